//! The watch over accepted changes: one guard for each.
//!
//! First *probation*: probe pairs (one block on, one off, in random order) interleaved one in four or, for large gains,
//! rarer, so that they cost at most half a percent. They catch a change that helps a little often and hurts a lot
//! rarely. Then *holdback*: a probe pair every half hour, for ever,
//! with a detector whose false alarms are rare by construction. An alarm undoes the change at once; it may be tried
//! afresh after the back-off.
//!
//! Parts that followed the tried part are switched together with it, so the guard's evidence covers them too, as long
//! as the whole can be switched within the longest washout; else only the tried part is probed, and `status` says so.
//! A one-way change is not probed: its guard keeps asking the strategy whether it is still wanted, and nothing more.
//! No probe runs while something further is looked for or tried on the same workload.

use crate::blocks::{BREAKER_SPAN, Block, BlockState, Objective};
use crate::coins::Coins;
use crate::engine::{Change, Engine};
use crate::experiment::Experiment;
use crate::policy::{Mode, Policy};
use crate::protocol::Command;
use crate::strategy::{Held, Opinion};
use crate::view::Stage;
use crate::watched::Watched;
use homeostat_model::action::{PageMove, Target};
use homeostat_model::{
    Action, ActionId, Bytes, Effect, EffectorId, ExperimentRecord, MeterId, Nanoseconds, StrategyId, Verdict,
    WorkloadId,
};
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::guard::{Holdback, Probation, ProbationState};
use std::collections::{BTreeMap, VecDeque};

/// Probe pairs of the probation are at least this many pair lengths apart (one in four) …
const PROBATION_SPACING: u64 = 3;
/// … and so far apart that all probes together cost at most this share of the work: what gains much is probed less
/// often, since each probe of it is dear and tells much.
const PROBE_COST_MAX: f64 = 0.005;
/// … but at most this far apart.
const PROBE_INTERVAL_MAX: Nanoseconds = Nanoseconds::from_secs(86_400);
/// The guard raises its alarm when the gain falls below this (log units).
const HOLDBACK_FLOOR: f64 = 0.01;
/// Memory of an improved workload is inspected again this often, for parts that came later.
const REVIEW: Nanoseconds = Nanoseconds::from_secs(600);
/// New parts are added when they make up at least this share of what is converted.
const GROWTH_MIN: f64 = 0.05;
/// Parts that may wait for their stage.
const STAGES_MAX: usize = 16;
/// Parts that may follow.
const FOLLOWERS_MAX: usize = 256;
/// The washout of a probe covers this many times the slowest switch seen.
const SWITCH_MARGIN: f64 = 1.25;
/// What a probe block that the circuit breaker ended counts as: a loss of this many scales.
const BROKEN_SCALES: f64 = 4.0;
/// Probe pairs that may run between two trials while a proposal waits for its turn.
const PROBES_BETWEEN_TRIALS: u32 = 3;
/// A proposal older than this no longer holds the probes of its workload back.
pub(crate) const PROPOSAL_STALE: Nanoseconds = Nanoseconds::from_secs(600);

/// A probe pair in the making.
struct Probe {
    block: Block,
    /// Of both blocks, fixed before the coin is tossed.
    washout: Nanoseconds,
    first: Option<(bool, f64)>,
    switch_started: Nanoseconds,
}

/// What follows the part that was tried.
pub(crate) struct Rest {
    pub(crate) stages: Vec<Target>,
    pub(crate) effector: EffectorId,
    pub(crate) arguments: BTreeMap<String, String>,
}

/// The guard of one accepted change.
pub(crate) struct Guard {
    pub(crate) strategy: StrategyId,
    /// The part that was tried; the guard goes when it goes.
    pub(crate) leader: ActionId,
    /// Parts that followed.
    pub(crate) followers: Vec<ActionId>,
    pub(crate) effect: Effect,
    /// When it was accepted.
    pub(crate) since: Nanoseconds,
    /// What was proven, for people.
    pub(crate) sentence: String,
    /// The experiment that accepted the change, rewritten when the change is revoked.
    record: ExperimentRecord,
    pub(crate) probes: u32,
    effector: EffectorId,
    arguments: BTreeMap<String, String>,
    stages: VecDeque<Target>,
    stage_due: Nanoseconds,
    stage_running: Option<ActionId>,
    /// Whether the change can be switched back and forth for probes.
    switchable: bool,
    /// Whether the parts that followed are switched together with the tried one.
    together: bool,
    meter: MeterId,
    objective: Objective,
    washout: Nanoseconds,
    measured: Nanoseconds,
    cpus: f64,
    coins: Coins,
    scale: f64,
    breaker: Breaker,
    probation: Probation,
    holdback: Holdback,
    /// Standstill that switching off and on again causes.
    stall: Nanoseconds,
    next_probe: Nanoseconds,
    probe: Option<Probe>,
    pieces: u64,
    review_at: Nanoseconds,
}

impl Guard {
    pub(crate) fn new(
        e: &Experiment,
        record: ExperimentRecord,
        sentence: String,
        now: Nanoseconds,
        policy: &Policy,
        rest: Option<Rest>,
    ) -> Self {
        let rest = rest.unwrap_or(Rest {
            stages: Vec::new(),
            effector: EffectorId::from("none"),
            arguments: BTreeMap::new(),
        });
        let pair = (e.washout + e.setup.measured) * 2;
        let scale = e.trial.estimate().scale;
        Self {
            strategy: e.setup.strategy.clone(),
            leader: e.setup.action,
            followers: e.further_parts().to_vec(),
            effect: e.effect(),
            since: now,
            sentence,
            record,
            probes: 0,
            effector: rest.effector,
            arguments: rest.arguments,
            stages: rest.stages.into(),
            stage_due: now + pair,
            stage_running: None,
            switchable: !e.is_staged(),
            together: true,
            meter: e.setup.meter.clone(),
            objective: e.setup.objective,
            washout: e.washout,
            measured: e.setup.measured,
            cpus: e.setup.cpus,
            // A stream of coins apart from that of the experiment.
            coins: Coins::new(e.setup.seed ^ 0x6775_6172_6400_0000, e.setup.id),
            scale,
            breaker: e.breaker,
            probation: Probation::new(policy.probation_pairs, scale),
            // Alarm when the gain is lost, not only when it has become a loss.
            holdback: Holdback::below(HOLDBACK_FLOOR, scale),
            stall: e.stall_per_round(),
            next_probe: now + probe_interval(pair, e.effect().estimate, e.stall_per_round()),
            probe: None,
            pieces: 0,
            review_at: now + REVIEW,
        }
    }

    /// Whether a probe or a stage is under way: then no other trial starts.
    pub(crate) fn busy(&self) -> bool {
        self.probe.is_some() || self.stage_running.is_some()
    }

    /// Whether parts wait for their turn.
    pub(crate) fn parts_wait(&self) -> bool {
        !self.stages.is_empty()
    }

    /// The actions of this change, in the order in which they were made.
    pub(crate) fn members(&self) -> impl Iterator<Item = ActionId> + '_ {
        std::iter::once(self.leader).chain(self.followers.iter().copied())
    }

    /// What a probe switches, in the order in which it is made.
    fn switched(&self) -> Vec<ActionId> {
        if self.together {
            self.members().collect()
        } else {
            vec![self.leader]
        }
    }

    fn in_probation(&self) -> bool {
        matches!(self.probation.state(), ProbationState::Running)
    }

    pub(crate) fn wants_detail(&self, now: Nanoseconds) -> bool {
        // The readings of the first block need a sample to start from.
        self.busy() || (self.switchable && now + Nanoseconds::from_secs(3) >= self.next_probe)
    }

    pub(crate) fn describe(&self, now: Nanoseconds) -> String {
        if !self.switchable {
            return "one-way change: not probed, withdrawn when it is no longer wanted".to_owned();
        }
        let next = self.next_probe.saturating_sub(now);
        let mut text = if self.probe.is_some() {
            format!("probing (pair {})", self.probes + 1)
        } else if self.in_probation() {
            format!("probation: {} probe pairs done, next in {next}", self.probes)
        } else {
            format!(
                "passed probation; {} probe pairs done, next in {next}",
                self.probes
            )
        };
        if !self.together && !self.followers.is_empty() {
            text.push_str("; only the tried part is probed, the whole takes too long to switch");
        }
        text
    }

    fn probe_interval(&self) -> Nanoseconds {
        probe_interval(self.pair(), self.effect.estimate, self.stall)
    }

    fn pair(&self) -> Nanoseconds {
        (self.washout + self.measured) * 2
    }
}

/// Time between two probe pairs of the probation: `pair` is the length of one, `gain` the proven relative gain, `stall` the
/// standstill that switching off and on again causes.
fn probe_interval(pair: Nanoseconds, gain: f64, stall: Nanoseconds) -> Nanoseconds {
    // Off costs this share of what on does. A pair is off for half its length, and for up to as long the change is
    // on its way back.
    let gain = if gain.is_finite() { gain.max(0.0) } else { 0.0 };
    let lost = gain / (1.0 + gain) * pair.as_secs_f64() + stall.as_secs_f64();
    Nanoseconds::from_secs_f64(lost / PROBE_COST_MAX).clamp(
        pair * PROBATION_SPACING,
        PROBE_INTERVAL_MAX.max(pair * PROBATION_SPACING),
    )
}

/// What a guard found.
enum Finding {
    Nothing,
    Switch(bool),
    Alarm(String),
    Passed,
}

/// Whether the probes of a workload must wait: something further is looked for or tried on it.
fn held_back(w: &Watched, now: Nanoseconds) -> bool {
    match w.stage {
        Stage::Trying => true,
        Stage::Proposed => w.proposed.as_ref().is_some_and(|p| now - p.at < PROPOSAL_STALE),
        _ => w.seeking,
    }
}

impl Engine {
    pub(crate) fn poll_guards(&mut self) {
        let keys: Vec<(WorkloadId, ActionId)> = self
            .guards
            .iter()
            .flat_map(|(id, of)| of.keys().map(|leader| (id.clone(), *leader)))
            .collect();
        // Many guards together always have a probe that is due; proposals must get their turn all the same.
        let waits = !keys.is_empty() && self.proposal_waits();
        for (id, leader) in keys {
            if self.stopping.is_some() {
                return;
            }
            self.withdraw_if_unwanted(&id, leader);
            let turn_over = waits && self.probes_since_trial >= PROBES_BETWEEN_TRIALS;
            self.poll_guard(&id, leader, turn_over);
        }
    }

    pub(crate) fn guard(&self, id: &WorkloadId, leader: ActionId) -> Option<&Guard> {
        self.guards.get(id)?.get(&leader)
    }

    fn guard_mut(&mut self, id: &WorkloadId, leader: ActionId) -> Option<&mut Guard> {
        self.guards.get_mut(id)?.get_mut(&leader)
    }

    /// A guard that probes or adds a part, if any.
    pub(crate) fn busy_guard(&self) -> Option<ActionId> {
        self.guards
            .values()
            .flat_map(BTreeMap::values)
            .find(|g| g.busy())
            .map(|g| g.leader)
    }

    /// What is in force for a workload, in the order of acceptance.
    pub(crate) fn held(&self, id: &WorkloadId) -> Vec<Held> {
        let Some(guards) = self.guards.get(id) else {
            return Vec::new();
        };
        let mut guards: Vec<&Guard> = guards.values().collect();
        guards.sort_by_key(|g| (g.since, g.leader));
        guards
            .into_iter()
            .filter_map(|g| {
                Some(Held {
                    strategy: g.strategy.clone(),
                    target: self.whole_target(g)?,
                    effect: g.effect,
                })
            })
            .collect()
    }

    /// The target of a change with its further parts: pages on the way to one node are added up; else that of the
    /// tried part.
    fn whole_target(&self, g: &Guard) -> Option<Target> {
        let leader = &self.changes.get(&g.leader)?.target;
        let Target::Pages(first) = leader else {
            return Some(leader.clone());
        };
        let further: Bytes = g
            .followers
            .iter()
            .filter_map(|a| match self.changes.get(a).map(|c| &c.target) {
                Some(Target::Pages(p)) if p.node == first.node => Some(p.bytes),
                _ => None,
            })
            .sum();
        Some(Target::Pages(PageMove {
            bytes: first.bytes + further,
            ..*first
        }))
    }

    /// A person chose otherwise since: ours goes first.
    fn withdraw_if_unwanted(&mut self, id: &WorkloadId, leader: ActionId) {
        let Some(g) = self.guard(id, leader) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        let unwanted = self
            .ask(id, index, Vec::new(), |strategy, seen| strategy.unwanted(seen))
            .flatten();
        if let Some(why) = unwanted {
            self.revoke(id, leader, &format!("withdrawn: {why}"), None);
        }
    }

    /// Whether a later change of the same workload lies over this one, so that it cannot be switched alone.
    fn covered(&self, id: &WorkloadId, g: &Guard) -> bool {
        self.guards.get(id).is_some_and(|of| {
            of.values().any(|later| {
                later.leader > g.leader && g.members().any(|a| later.members().any(|b| self.lies_over(b, a)))
            })
        })
    }

    /// `turn_over`: a trial is due before the next probe.
    fn poll_guard(&mut self, id: &WorkloadId, leader: ActionId, turn_over: bool) {
        let Some(guard) = self.guard(id, leader) else {
            return;
        };
        let elsewhere = !self.experiments.is_empty() || self.busy_guard().is_some_and(|busy| busy != leader);
        let covered = self.covered(id, guard);
        let settled = guard
            .switched()
            .iter()
            .all(|a| self.changes.get(a).is_none_or(|c| c.settled));
        let now = self.now;
        let washout_max = Nanoseconds::from_secs_f64(self.policy.washout_max_s);
        let mut finding = Finding::Nothing;
        let mut inspect = false;
        let mut stage = None;
        {
            let (Some(g), Some(w)) = (
                self.guards.get_mut(id).and_then(|of| of.get_mut(&leader)),
                self.workloads.get(id),
            ) else {
                return;
            };
            if g.stage_running.is_some() {
                return;
            }
            if let Some(probe) = &mut g.probe {
                let floor = g.cpus * 0.1;
                let broke = probe.block.on && probe.block.measuring(now) && probe.first.is_some() && {
                    let from = probe.block.measure_from.max(now.saturating_sub(BREAKER_SPAN));
                    let sums = w.series.sums(&g.meter, from, now);
                    let idle = g.objective == Objective::CpuPerWork && sums.cpu < floor * sums.seconds;
                    let enough = sums.seconds >= BREAKER_SPAN.as_secs_f64() * 0.8 && !idle;
                    g.objective
                        .score(&sums)
                        .is_some_and(|score| enough && g.breaker.trips(score))
                };
                if broke {
                    let off = probe.first.map_or(0.0, |(_, score)| score);
                    let score = off - BROKEN_SCALES * g.scale;
                    finding = g.block_done(true, score, now, &self.policy);
                } else {
                    match probe.block.poll(now, &w.series, &g.meter, g.objective, floor) {
                        BlockState::Running | BlockState::Idle => {}
                        BlockState::Unmeasurable(_) => {
                            g.probe = None;
                            g.next_probe = now + g.probe_interval();
                            finding = Finding::Switch(true);
                        }
                        BlockState::Finished(_) if !settled => {
                            // The switch outlasted its block, which then mixes both arms: the pair says nothing. Later
                            // ones wait longer, or switch the tried part only.
                            let took = now - probe.switch_started;
                            g.probe = None;
                            g.learn_switch(took, washout_max);
                            g.next_probe = now + g.probe_interval();
                            finding = Finding::Switch(true);
                        }
                        BlockState::Finished(record) => {
                            finding = g.block_done(record.on, record.score, now, &self.policy)
                        }
                    }
                }
            } else if self.paused || self.policy.mode != Mode::Act || elsewhere || held_back(w, now) {
            } else if g.parts_wait() && now >= g.stage_due {
                stage = g.stages.pop_front();
            } else if g.switchable && !covered && settled && !turn_over && now >= g.next_probe {
                self.probes_since_trial = self.probes_since_trial.saturating_add(1);
                let on = g.coins.toss();
                g.breaker.block_started();
                g.probe = Some(Probe {
                    block: Block::start(0, on, now, g.washout, g.measured),
                    washout: g.washout,
                    first: None,
                    switch_started: now,
                });
                if !on {
                    finding = Finding::Switch(false);
                }
            } else if settled && now >= g.review_at && !w.inspecting && g.pieces_grow(&self.changes) {
                g.review_at = now + REVIEW;
                inspect = true;
            }
        }
        match finding {
            Finding::Nothing => {}
            Finding::Switch(on) => self.switch_group(id, leader, on),
            Finding::Alarm(why) => self.revoke(id, leader, &why, Some(Verdict::Rejected)),
            Finding::Passed => {
                self.switch_group(id, leader, true);
                if let Some(g) = self.guard_mut(id, leader) {
                    let text = format!(
                        "guarded: probation passed after {} probe pairs; {} stays",
                        g.probes, g.effect
                    );
                    g.sentence = format!("{} {text}", g.strategy);
                    self.decide(id, Stage::Improved, text, false);
                }
            }
        }
        if inspect && let Some(w) = self.workloads.get_mut(id) {
            w.inspecting = true;
            w.review = Some(leader);
            self.out.push(Command::InspectMemory(id.clone()));
        }
        if let Some(target) = stage {
            self.add_part(id, leader, target);
        }
    }

    /// Switches what a probe of this change switches: made in order, undone in reverse.
    /// Whether a change is in force by an accepting verdict.
    pub(crate) fn guarded(&self, action: ActionId) -> bool {
        self.guards
            .values()
            .any(|of| of.values().any(|g| g.members().any(|a| a == action)))
    }

    fn switch_group(&mut self, id: &WorkloadId, leader: ActionId, on: bool) {
        let Some(g) = self.guard(id, leader) else { return };
        // On is for all: parts that went off before it was learnt that they are too slow for probes come back too.
        let mut members: Vec<ActionId> = if on { g.members().collect() } else { g.switched() };
        if !on {
            members.reverse();
        }
        for action in members {
            if self
                .changes
                .get(&action)
                .is_some_and(|c| !c.leaving && (c.on != on || !c.settled))
            {
                self.switch(action, on);
            }
        }
    }

    /// Makes the change on one more part of the workload.
    fn add_part(&mut self, id: &WorkloadId, leader: ActionId, target: Target) {
        let action = ActionId(self.next_action);
        let Some(g) = self.guard_mut(id, leader) else {
            return;
        };
        g.stage_running = Some(action);
        g.followers.push(action);
        let text = format!("next part, on the evidence of action {} ({})", g.leader, g.effect);
        let command = Action {
            id: action,
            effector: g.effector.clone(),
            workload: id.clone(),
            target,
            arguments: g.arguments.clone(),
            why: text.clone(),
        };
        let strategy = g.strategy.clone();
        self.next_action += 1;
        self.changes
            .insert(action, Change::new(&command, strategy, self.unix));
        self.decide(id, Stage::Improved, format!("extending: {text}"), false);
        self.out.push(Command::Apply(Box::new(command)));
    }

    /// A change under guard reached the state it was sent to.
    pub(crate) fn guard_settled(&mut self, action: ActionId) {
        let now = self.now;
        let washout_max = Nanoseconds::from_secs_f64(self.policy.washout_max_s);
        let Some(id) = self.changes.get(&action).map(|c| c.workload.clone()) else {
            return;
        };
        let Some(guards) = self.guards.get_mut(&id) else {
            return;
        };
        for g in guards.values_mut() {
            if g.stage_running == Some(action) {
                g.stage_running = None;
                g.stage_due = now + g.pair();
            }
            let switched = g.switched();
            if let Some(p) = &g.probe
                && switched.contains(&action)
                && switched
                    .iter()
                    .all(|a| self.changes.get(a).is_none_or(|c| c.settled))
            {
                let took = now - p.switch_started;
                g.learn_switch(took, washout_max);
            }
        }
    }

    /// A change under guard is on its way out.
    pub(crate) fn guard_loses(&mut self, id: &WorkloadId, action: ActionId) {
        let Some(guards) = self.guards.get_mut(id) else {
            return;
        };
        for g in guards.values_mut() {
            if g.stage_running == Some(action) {
                g.stage_running = None;
            }
            g.followers.retain(|a| *a != action);
        }
        let Some(gone) = guards.remove(&action) else {
            return;
        };
        let last = guards.is_empty();
        if last {
            self.guards.remove(id);
        }
        for follower in gone.followers.iter().rev() {
            self.withdraw(*follower, "the change it followed was undone");
        }
        let retry = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if w.stage != Stage::Improved {
            return;
        }
        if w.review == Some(action) {
            w.review = None;
            w.inspecting = false;
        }
        w.proposed = None;
        w.seeking = false;
        if last {
            w.retry_at = retry;
            self.close_meters(id);
            self.decide(
                id,
                Stage::Declined,
                "the change was undone and is not tried again for now",
                false,
            );
        } else {
            w.more_at = retry;
            let text = format!(
                "the change of {} was undone and is not tried again for now; what else was accepted stays on its own evidence",
                gone.strategy
            );
            self.decide(id, Stage::Improved, text, false);
            self.summarise(id);
        }
    }

    /// Undoes what was accepted.
    fn revoke(&mut self, id: &WorkloadId, leader: ActionId, why: &str, verdict: Option<Verdict>) {
        let Some(g) = self.guard(id, leader) else { return };
        let (strategy, accepted) = (g.strategy.clone(), g.record.clone());
        self.narrate(id, why.to_owned(), true);
        if let Some(verdict) = verdict {
            // The history must not take it for a known gain after a restart.
            let record = ExperimentRecord {
                verdict: Some(verdict),
                reason: why.to_owned(),
                ended_unix: self.unix,
                ..accepted
            };
            self.out.push(Command::RecordExperiment(Box::new(record)));
        }
        if let (Some(verdict), Some(w)) = (verdict, self.workloads.get(id)) {
            let key = (w.workload.fingerprint.clone(), strategy);
            let unix = self.unix;
            if let Some(p) = self.priors.get_mut(&key) {
                p.verdict = verdict;
                p.failures += 1;
                p.unix_seconds = unix;
            }
        }
        self.withdraw(leader, why);
    }

    /// The memory of an improved workload was inspected again for this change: add what came since.
    pub(crate) fn extend(&mut self, id: &WorkloadId, leader: ActionId) {
        let Some(g) = self.guard(id, leader) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        self.withdraw_if_unwanted(id, leader);
        let opinion = self.opinion(id, index);
        if let Some(w) = self.workloads.get_mut(id) {
            w.memory = None;
        }
        let Some(Opinion::Propose(p)) = opinion else {
            return;
        };
        let Some(g) = self.guard_mut(id, leader) else {
            return;
        };
        let mut targets = vec![p.target];
        targets.extend(p.stages);
        let new: u64 = targets.iter().map(size).sum();
        if (new as f64) < GROWTH_MIN * g.pieces.max(1) as f64 && g.pieces > 0 {
            return;
        }
        g.pieces += new;
        g.effector = p.effector;
        for target in targets {
            if g.stages.len() < STAGES_MAX && g.followers.len() < FOLLOWERS_MAX {
                g.stages.push_back(target);
            }
        }
    }

    /// Which guard watches the change, for people.
    pub(crate) fn guard_of(&self, action: ActionId) -> Option<&Guard> {
        let workload = &self.changes.get(&action)?.workload;
        self.guards
            .get(workload)?
            .values()
            .find(|g| g.members().any(|a| a == action))
    }
}

impl Guard {
    /// Later probes wait for as long as a switch was seen to take. What takes longer than the longest washout is not
    /// switched as a whole any more.
    fn learn_switch(&mut self, took: Nanoseconds, washout_max: Nanoseconds) {
        let wanted = Nanoseconds::from_secs_f64(took.as_secs_f64() * SWITCH_MARGIN);
        if wanted > washout_max && self.together && !self.followers.is_empty() {
            self.together = false;
        } else {
            self.washout = self.washout.max(wanted.min(washout_max));
        }
    }

    /// Whether this change grows with the memory of its workload.
    pub(crate) fn pieces_grow(&self, changes: &BTreeMap<ActionId, Change>) -> bool {
        matches!(
            changes.get(&self.leader).map(|c| &c.target),
            Some(Target::Memory(_))
        )
    }

    fn block_done(&mut self, on: bool, score: f64, now: Nanoseconds, policy: &Policy) -> Finding {
        if !on {
            self.breaker.off_block(score);
        }
        let Some(probe) = &mut self.probe else {
            return Finding::Nothing;
        };
        let Some((first_on, first)) = probe.first.replace((on, score)) else {
            // The second block is the other arm.
            probe.block = Block::start(1, !on, now, probe.washout, self.measured);
            probe.switch_started = now;
            self.breaker.block_started();
            return Finding::Switch(!on);
        };
        self.probe = None;
        self.probes += 1;
        let difference = if first_on { first - score } else { score - first };
        let was_in_probation = self.in_probation();
        let alarm = self.holdback.observe(difference);
        let state = self.probation.observe(difference);
        self.next_probe = now
            + if matches!(state, ProbationState::Running) {
                self.probe_interval()
            } else {
                self.probe_interval()
                    .max(Nanoseconds::from_secs_f64(policy.probe_every_s))
            };
        match state {
            ProbationState::Revoked => Finding::Alarm(format!(
                "revoked in probation after {} probe pairs: the gain did not last",
                self.probes
            )),
            _ if alarm => Finding::Alarm(format!(
                "revoked by the guard after {} probe pairs: the gain is gone",
                self.probes
            )),
            ProbationState::Passed if was_in_probation => Finding::Passed,
            _ => Finding::Switch(true),
        }
    }
}

/// How much a target changes, in its own unit: pieces of memory, CPUs, bytes, files.
pub(crate) fn size(target: &Target) -> u64 {
    match target {
        Target::Memory(m) => m.iter().map(|t| t.pieces.len() as u64).sum(),
        Target::Pages(p) => p.bytes.0,
        Target::Cpus(cpus) => cpus.len() as u64,
        Target::Files(files) => files.len() as u64,
        Target::Nothing => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_rare_enough_to_cost_half_a_percent() {
        let pair = Nanoseconds::from_secs(20);
        let none = Nanoseconds::ZERO;
        for gain in [0.0, -0.5, f64::NAN, 0.015] {
            assert_eq!(
                probe_interval(pair, gain, none),
                pair * PROBATION_SPACING,
                "{gain}"
            );
        }
        for gain in [0.05, 0.25, 1.0, 10.0] {
            for stall in [0, 1, 30] {
                let apart = probe_interval(pair, gain, Nanoseconds::from_secs(stall));
                let lost = gain / (1.0 + gain) * 20.0 + stall as f64;
                assert!(
                    lost / apart.as_secs_f64() <= PROBE_COST_MAX + 1e-9,
                    "{gain} {stall}"
                );
            }
        }
        assert_eq!(
            probe_interval(pair, 1.0, Nanoseconds::from_secs(1 << 30)),
            PROBE_INTERVAL_MAX
        );
    }
}
