//! The watch over accepted changes: one guard for each.
//!
//! First *probation*: probe pairs (one block on, one off, in random order) interleaved one in four or, for large gains,
//! rarer, so that they cost at most half a percent of the work and a twentieth of the gain. They catch a change that
//! helps a little often and hurts a lot rarely. Then *holdback*: a probe pair every half hour, for ever, with a detector
//! whose false alarms are rare by construction. An alarm undoes the change at once; it may be tried afresh after the
//! back-off.
//!
//! Parts that followed the tried part are switched together with it, so the guard's evidence covers them too, as long
//! as the whole can be switched within the longest washout; else only the tried part is probed, and `status` says so.
//! A one-way change is not probed: its guard keeps asking the strategy whether it is still wanted, and nothing more.
//! No probe runs while something further is looked for or tried on the same workload.
//!
//! What was tried as one change of several workloads has one guard, is probed as one and undone as one; when one of the
//! workloads ends, or a person takes hold of it, the others keep the rest.

use crate::blocks::{BREAKER_SPAN, Block, BlockState};
use crate::coins::Coins;
use crate::engine::{Change, Engine};
use crate::experiment::Experiment;
use crate::panel::{Gauge, Panel};
use crate::policy::{Mode, Policy};
use crate::protocol::Command;
use crate::rollout::Piece;
use crate::strategy::{Held, Opinion};
use crate::view::Stage;
use crate::watched::Watched;
use homeostat_model::action::{PageMove, Target};
use homeostat_model::{
    ActionId, Bytes, Effect, ExperimentRecord, Nanoseconds, StrategyId, Verdict, WorkloadId,
};
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::guard::{Holdback, Probation, ProbationState};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Probe pairs of the probation are at least this many pair lengths apart (one in four) …
const PROBATION_SPACING: u64 = 3;
/// … and so far apart that all probes together cost at most this share of the work: what gains much is probed less
/// often, since each probe of it is dear and tells much …
const PROBE_COST_MAX: f64 = 0.005;
/// … and at most this share of the gain, so that a small gain is not spent on its proof.
const PROBE_GAIN_MAX: f64 = 0.05;
/// … but at most this far apart.
const PROBE_INTERVAL_MAX: Nanoseconds = Nanoseconds::from_secs(86_400);
/// The coins of probes are journalled as blocks of the experiment that proved the change, from this number on.
const PROBES_FROM: u32 = 1 << 20;
/// Probe pairs in a row that were lost because the switch outlasted its block, after which the change is not probed.
const OUTLASTED_MAX: u32 = 3;
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

/// The guard of one accepted change.
pub(crate) struct Guard {
    pub(crate) strategy: StrategyId,
    /// Its name: the first action that was tried.
    pub(crate) key: ActionId,
    /// What was tried, in the order in which it was made: an action for each workload. The guard goes when the last of
    /// them goes.
    tried: Vec<ActionId>,
    /// Parts that followed.
    pub(crate) followers: Vec<ActionId>,
    /// Whose work judges.
    panel: Panel,
    pub(crate) effect: Effect,
    /// When it was accepted.
    pub(crate) since: Nanoseconds,
    /// What was proven, for people.
    pub(crate) sentence: String,
    /// The experiment that accepted the change, rewritten when the change is revoked.
    record: ExperimentRecord,
    pub(crate) probes: u32,
    /// Parts that wait for their turn.
    stages: VecDeque<Piece>,
    stage_due: Nanoseconds,
    stage_running: Option<ActionId>,
    /// Whether the change can be switched back and forth for probes.
    switchable: bool,
    /// Whether the parts that followed are switched together with the tried one.
    together: bool,
    washout: Nanoseconds,
    measured: Nanoseconds,
    coins: Coins,
    /// Probe pairs begun, for the numbers of their coins.
    pairs: u32,
    /// Probe pairs in a row that were lost because the switch outlasted its block.
    outlasted: u32,
    scale: f64,
    breaker: Breaker,
    probation: Probation,
    probation_pairs: u32,
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
    ) -> Self {
        let pair = (e.washout + e.setup.measured) * 2;
        let scale = e.trial.estimate().scale;
        let (tried, followers) = match e.parts.split_first() {
            Some((first, further)) => (first.clone(), further.iter().flatten().copied().collect()),
            None => (vec![e.setup.action], Vec::new()),
        };
        Self {
            strategy: e.setup.strategy.clone(),
            key: e.setup.action,
            tried,
            followers,
            panel: e.setup.panel.clone(),
            effect: e.effect(),
            since: now,
            sentence,
            record,
            probes: 0,
            stages: e.rest().into(),
            stage_due: now + pair,
            stage_running: None,
            switchable: !e.is_staged(),
            together: true,
            washout: e.washout,
            measured: e.setup.measured,
            // A stream of coins apart from that of the experiment.
            coins: Coins::new(e.setup.seed ^ 0x6775_6172_6400_0000, e.setup.id),
            pairs: 0,
            outlasted: 0,
            scale,
            breaker: e.breaker,
            probation: Probation::new(policy.probation_pairs, scale),
            probation_pairs: policy.probation_pairs,
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
        self.tried.iter().chain(&self.followers).copied()
    }

    /// Whether nothing of what was tried is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.tried.is_empty()
    }

    /// The workloads whose change it guards.
    pub(crate) fn workloads(&self) -> impl Iterator<Item = &WorkloadId> {
        self.panel.workloads()
    }

    /// Lets go of a workload and its actions; what is left of a probe says nothing any more.
    pub(crate) fn lose_workload(&mut self, id: &WorkloadId, changes: &BTreeMap<ActionId, Change>) {
        let others = |a: &ActionId| changes.get(a).is_some_and(|c| c.workload != *id);
        self.tried.retain(others);
        self.followers.retain(others);
        self.stages.retain(|p| p.workload != *id);
        // A part that was being made for it is nobody's any more: the guard must not wait for it.
        if self.stage_running.is_some_and(|a| !self.followers.contains(&a)) {
            self.stage_running = None;
        }
        let before = self.panel.members().len() as f64;
        match self.panel.without(id) {
            Some(panel) => self.panel = panel,
            None => self.tried.clear(),
        }
        // Fewer are noisier, and what was seen of all says little of the rest: the probation begins anew.
        self.scale *= (before / self.panel.members().len() as f64).sqrt();
        self.probation = Probation::new(self.probation_pairs, self.scale);
        self.holdback = Holdback::below(HOLDBACK_FLOOR, self.scale);
        self.probe = None;
    }

    /// What a probe switches, in the order in which it is made.
    fn switched(&self) -> Vec<ActionId> {
        if self.together {
            self.members().collect()
        } else {
            self.tried.clone()
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
        if !self.switchable && self.outlasted >= OUTLASTED_MAX {
            return "switching takes too long: not probed, withdrawn when it is no longer wanted".to_owned();
        }
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
    let share = gain / (1.0 + gain);
    let lost = share * pair.as_secs_f64() + stall.as_secs_f64();
    let affordable = (PROBE_GAIN_MAX * share).min(PROBE_COST_MAX);
    let apart = if affordable > 0.0 {
        Nanoseconds::from_secs_f64((lost / affordable).min(PROBE_INTERVAL_MAX.as_secs_f64()))
    } else {
        Nanoseconds::ZERO
    };
    apart.max(pair * PROBATION_SPACING)
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

/// All guards, by name, and which of them watch over a workload.
#[derive(Default)]
pub(crate) struct Guards {
    by_key: BTreeMap<ActionId, Guard>,
    of: BTreeMap<WorkloadId, BTreeSet<ActionId>>,
}

impl Guards {
    pub(crate) fn insert(&mut self, guard: Guard) {
        for id in guard.workloads() {
            self.of.entry(id.clone()).or_default().insert(guard.key);
        }
        self.by_key.insert(guard.key, guard);
    }

    pub(crate) fn get(&self, key: ActionId) -> Option<&Guard> {
        self.by_key.get(&key)
    }

    fn get_mut(&mut self, key: ActionId) -> Option<&mut Guard> {
        self.by_key.get_mut(&key)
    }

    /// All of them, oldest first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Guard> {
        self.by_key.values()
    }

    /// Those that watch over a workload, oldest first.
    pub(crate) fn of(&self, id: &WorkloadId) -> impl Iterator<Item = &Guard> {
        self.of
            .get(id)
            .into_iter()
            .flatten()
            .filter_map(|key| self.by_key.get(key))
    }

    /// Whether something is in force for a workload.
    pub(crate) fn any(&self, id: &WorkloadId) -> bool {
        self.of.contains_key(id)
    }

    /// A guard lets go of a workload; without any left it goes.
    fn release(&mut self, key: ActionId, id: &WorkloadId, changes: &BTreeMap<ActionId, Change>) {
        if let Some(of) = self.of.get_mut(id) {
            of.remove(&key);
            if of.is_empty() {
                self.of.remove(id);
            }
        }
        if let Some(g) = self.by_key.get_mut(&key) {
            g.lose_workload(id, changes);
            if g.is_empty() {
                self.by_key.remove(&key);
            }
        }
    }

    /// All guards let go of a workload.
    pub(crate) fn release_all(&mut self, id: &WorkloadId, changes: &BTreeMap<ActionId, Change>) {
        for key in self.of.get(id).cloned().unwrap_or_default() {
            self.release(key, id, changes);
        }
    }
}

impl Engine {
    pub(crate) fn poll_guards(&mut self) {
        let keys: Vec<ActionId> = self.guards.all().map(|g| g.key).collect();
        // Many guards together always have a probe that is due; proposals must get their turn all the same.
        let waits = !keys.is_empty() && self.proposal_waits();
        for key in keys {
            if self.stopping.is_some() {
                return;
            }
            self.withdraw_if_unwanted(key);
            let turn_over = waits && self.probes_since_trial >= PROBES_BETWEEN_TRIALS;
            self.poll_guard(key, turn_over);
        }
    }

    /// A guard that probes or adds a part, if any.
    pub(crate) fn busy_guard(&self) -> Option<ActionId> {
        self.guards.all().find(|g| g.busy()).map(|g| g.key)
    }

    /// What is in force for a workload, in the order of acceptance.
    pub(crate) fn held(&self, id: &WorkloadId) -> Vec<Held> {
        let mut guards: Vec<&Guard> = self.guards.of(id).collect();
        guards.sort_by_key(|g| (g.since, g.key));
        guards
            .into_iter()
            .filter_map(|g| {
                Some(Held {
                    strategy: g.strategy.clone(),
                    target: self.whole_target(g, id)?,
                    effect: g.effect,
                })
            })
            .collect()
    }

    /// The target of a change of this workload with its further parts: pages on the way to one node are added up; else
    /// that of the tried part.
    fn whole_target(&self, g: &Guard, id: &WorkloadId) -> Option<Target> {
        let mut own = g
            .members()
            .filter_map(|a| self.changes.get(&a))
            .filter(|c| c.workload == *id)
            .map(|c| &c.target);
        let first = own.next()?;
        let Target::Pages(first) = first else {
            return Some(first.clone());
        };
        let further: Bytes = own
            .filter_map(|target| match target {
                Target::Pages(p) if p.node == first.node => Some(p.bytes),
                _ => None,
            })
            .sum();
        Some(Target::Pages(PageMove {
            bytes: first.bytes + further,
            ..*first
        }))
    }

    /// A person chose otherwise since: ours goes first, for the workload that the choice is about.
    fn withdraw_if_unwanted(&mut self, key: ActionId) {
        let Some(g) = self.guards.get(key) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        for id in g.workloads().cloned().collect::<Vec<_>>() {
            let unwanted = self
                .ask(&id, index, Vec::new(), |strategy, seen| strategy.unwanted(seen))
                .flatten();
            let tried = self.tried_on(key, &id);
            if let (Some(why), Some(action)) = (unwanted, tried) {
                let why = format!("withdrawn: {why}");
                self.narrate(&id, why.clone(), true);
                self.withdraw(action, &why);
            }
        }
    }

    /// The action of a guard that was tried on this workload.
    fn tried_on(&self, key: ActionId, id: &WorkloadId) -> Option<ActionId> {
        let on = |a: &ActionId| self.changes.get(a).is_some_and(|c| c.workload == *id);
        self.guards.get(key)?.tried.iter().copied().find(on)
    }

    /// Whether a later change of the same workload lies over this one, so that it cannot be switched alone.
    fn covered(&self, g: &Guard) -> bool {
        g.workloads().any(|id| {
            self.guards
                .of(id)
                .filter(|later| later.key > g.key)
                .any(|later| g.members().any(|a| later.members().any(|b| self.lies_over(b, a))))
        })
    }

    /// `turn_over`: a trial is due before the next probe.
    fn poll_guard(&mut self, key: ActionId, turn_over: bool) {
        let Some(guard) = self.guards.get(key) else {
            return;
        };
        let elsewhere = !self.experiments.is_empty() || self.busy_guard().is_some_and(|busy| busy != key);
        let covered = self.now >= guard.next_probe && self.covered(guard);
        let settled = guard
            .switched()
            .iter()
            .all(|a| self.changes.get(a).is_none_or(|c| c.settled));
        let now = self.now;
        let panel = guard.panel.clone();
        let was_probing = guard.probe.is_some();
        let kept_back = panel
            .workloads()
            .filter_map(|id| self.workloads.get(id))
            .any(|w| held_back(w, now));
        let inspecting = self
            .workloads
            .get(&panel.lead().workload)
            .is_some_and(|w| w.inspecting);
        let washout_max = Nanoseconds::from_secs_f64(self.policy.washout_max_s);
        let mut finding = Finding::Nothing;
        let mut inspect = false;
        let mut stage = None;
        let mut coin = None;
        {
            let workloads = &self.workloads;
            let (Some(g), Some(gauge)) = (
                self.guards.get_mut(key),
                Gauge::new(&panel, |id| workloads.get(id).map(|w| &w.series)),
            ) else {
                return;
            };
            if g.stage_running.is_some() {
                return;
            }
            if let Some(probe) = &mut g.probe {
                let broke = probe.block.on && probe.block.measuring(now) && probe.first.is_some() && {
                    let from = probe.block.measure_from.max(now.saturating_sub(BREAKER_SPAN));
                    gauge
                        .last_seconds(from, now)
                        .is_some_and(|score| g.breaker.trips(score))
                };
                if broke {
                    let off = probe.first.map_or(0.0, |(_, score)| score);
                    let score = off - BROKEN_SCALES * g.scale;
                    finding = g.block_done(true, score, now, &self.policy);
                } else {
                    match probe.block.poll(now, &gauge) {
                        BlockState::Running | BlockState::Idle => {}
                        BlockState::Unmeasurable(_) => {
                            g.probe = None;
                            g.next_probe = now + g.probe_interval();
                            finding = Finding::Switch(true);
                        }
                        BlockState::Finished(_) if !settled => {
                            // The switch outlasted its block, which then mixes both arms: the pair says nothing. Later
                            // ones wait longer, or switch the tried part only, and after some the change is not probed.
                            let took = now - probe.switch_started;
                            g.probe = None;
                            g.outlasted += 1;
                            g.learn_switch(took, washout_max);
                            g.switchable = g.outlasted < OUTLASTED_MAX;
                            g.next_probe = now + g.probe_interval();
                            finding = Finding::Switch(true);
                        }
                        BlockState::Finished(record) => {
                            g.outlasted = 0;
                            finding = g.block_done(record.on, record.score, now, &self.policy);
                            if let (Some(_), Finding::Switch(on)) = (&g.probe, &finding) {
                                coin = Some((g.record.id, g.coin_number() + 1, *on));
                            }
                        }
                    }
                }
            } else if self.paused || self.policy.mode != Mode::Act || elsewhere || kept_back {
            } else if g.parts_wait() && now >= g.stage_due {
                stage = g.stages.pop_front();
            } else if g.switchable && !covered && settled && !turn_over && now >= g.next_probe {
                self.probes_since_trial = self.probes_since_trial.saturating_add(1);
                let on = g.coins.toss();
                g.pairs += 1;
                coin = Some((g.record.id, g.coin_number(), on));
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
            } else if settled && now >= g.review_at && !inspecting && g.pieces_grow(&self.changes) {
                g.review_at = now + REVIEW;
                inspect = true;
            }
        }
        if was_probing && self.guards.get(key).is_some_and(|g| g.probe.is_none()) {
            self.drop_coins(key);
        }
        if let Some((experiment, block, on)) = coin {
            // On disk before the switch, like the coins of a trial.
            self.out.push(Command::NoteCoin {
                experiment,
                block,
                on,
            });
        }
        match finding {
            Finding::Nothing => {}
            Finding::Switch(on) => self.switch_group(key, on),
            Finding::Alarm(why) => self.revoke(key, &why, Verdict::Rejected),
            Finding::Passed => {
                self.switch_group(key, true);
                if let Some(g) = self.guards.get_mut(key) {
                    let text = format!(
                        "guarded: probation passed after {} probe pairs; {} stays",
                        g.probes, g.effect
                    );
                    g.sentence = format!("{} {text}", g.strategy);
                    let ids: Vec<WorkloadId> = panel.workloads().cloned().collect();
                    self.decide_all(&ids, Stage::Improved, &text, false);
                }
            }
        }
        if inspect {
            let id = &panel.lead().workload;
            if let Some(w) = self.workloads.get_mut(id) {
                w.inspecting = true;
                w.review = Some(key);
                self.out.push(Command::InspectMemory(id.clone()));
            }
        }
        if let Some(piece) = stage {
            self.add_part(key, piece);
        }
    }

    /// The coins of a probe that is over need not be kept.
    fn drop_coins(&mut self, key: ActionId) {
        if let Some(g) = self.guards.get(key) {
            self.out.push(Command::DropCoins(g.record.id));
        }
    }

    /// Whether a change is in force by an accepting verdict.
    pub(crate) fn guarded(&self, action: ActionId) -> bool {
        self.guard_of(action).is_some()
    }

    /// Switches what a probe of this change switches: made in order, undone in reverse.
    fn switch_group(&mut self, key: ActionId, on: bool) {
        let Some(g) = self.guards.get(key) else { return };
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

    /// Makes the change on one more part of a workload.
    fn add_part(&mut self, key: ActionId, piece: Piece) {
        let action = ActionId(self.next_action);
        let Some(g) = self.guards.get_mut(key) else {
            return;
        };
        g.stage_running = Some(action);
        g.followers.push(action);
        let text = format!("next part, on the evidence of action {} ({})", g.key, g.effect);
        let strategy = g.strategy.clone();
        let id = piece.workload.clone();
        self.next_action += 1;
        self.decide(&id, Stage::Improved, format!("extending: {text}"), false);
        self.make(piece.action(action, text), strategy);
    }

    /// A change under guard reached the state it was sent to.
    pub(crate) fn guard_settled(&mut self, action: ActionId) {
        let now = self.now;
        let washout_max = Nanoseconds::from_secs_f64(self.policy.washout_max_s);
        let Some(key) = self.guard_of(action).map(|g| g.key) else {
            return;
        };
        let Some(g) = self.guards.get_mut(key) else { return };
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

    /// A change of this workload that was under guard is on its way out.
    pub(crate) fn guard_loses(&mut self, id: &WorkloadId, action: ActionId) {
        let Some(key) = self.guard_of_any(id, action) else {
            return;
        };
        let Some(g) = self.guards.get_mut(key) else { return };
        if g.stage_running == Some(action) {
            g.stage_running = None;
        }
        if !g.tried.contains(&action) {
            g.followers.retain(|a| *a != action);
            return;
        }
        let strategy = g.strategy.clone();
        let followers: Vec<ActionId> = g
            .followers
            .iter()
            .rev()
            .copied()
            .filter(|a| self.changes.get(a).is_some_and(|c| c.workload == *id))
            .collect();
        // A probe that runs is cut off: what it switched comes back for those that stay.
        if g.probe.is_some() {
            self.drop_coins(key);
            self.guards.release(key, id, &self.changes);
            self.switch_group(key, true);
        } else {
            self.guards.release(key, id, &self.changes);
        }
        for follower in followers {
            self.withdraw(follower, "the change it followed was undone");
        }
        let retry = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let last = !self.guards.any(id);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if w.stage != Stage::Improved {
            return;
        }
        if w.review == Some(key) {
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
                "the change of {strategy} was undone and is not tried again for now; what else was accepted stays on its own evidence"
            );
            self.decide(id, Stage::Improved, text, false);
            self.summarise(id);
        }
    }

    /// Undoes what was accepted, since a guard found that it does not hold.
    fn revoke(&mut self, key: ActionId, why: &str, verdict: Verdict) {
        let Some(g) = self.guards.get(key) else { return };
        let (strategy, accepted) = (g.strategy.clone(), g.record.clone());
        let (ids, tried): (Vec<WorkloadId>, Vec<ActionId>) =
            (g.workloads().cloned().collect(), g.tried.clone());
        // The history must not take it for a known gain after a restart.
        let record = ExperimentRecord {
            verdict: Some(verdict),
            reason: why.to_owned(),
            ended_unix: self.unix,
            ..accepted
        };
        self.out.push(Command::RecordExperiment(Box::new(record)));
        let fingerprints: BTreeSet<_> = ids
            .iter()
            .filter_map(|id| self.workloads.get(id))
            .map(|w| w.workload.fingerprint.clone())
            .collect();
        for fingerprint in fingerprints {
            let unix = self.unix;
            if let Some(p) = self.priors.get_mut(&(fingerprint, strategy.clone())) {
                p.verdict = verdict;
                p.failures += 1;
                p.unix_seconds = unix;
            }
        }
        for id in &ids {
            self.narrate(id, why.to_owned(), true);
        }
        for action in tried.into_iter().rev() {
            self.withdraw(action, why);
        }
    }

    /// The memory of an improved workload was inspected again for this change: add what came since.
    pub(crate) fn extend(&mut self, id: &WorkloadId, key: ActionId) {
        let Some(g) = self.guards.get(key) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        self.withdraw_if_unwanted(key);
        let opinion = self.opinion(id, index);
        if let Some(w) = self.workloads.get_mut(id) {
            w.memory = None;
        }
        let Some(Opinion::Propose(p)) = opinion else {
            return;
        };
        let Some(g) = self.guards.get_mut(key) else {
            return;
        };
        let pieces = Piece::of(id, &p);
        let new: u64 = pieces.iter().map(|p| size(&p.target)).sum();
        if (new as f64) < GROWTH_MIN * g.pieces.max(1) as f64 && g.pieces > 0 {
            return;
        }
        g.pieces += new;
        for piece in pieces {
            if g.stages.len() < STAGES_MAX && g.followers.len() < FOLLOWERS_MAX {
                g.stages.push_back(piece);
            }
        }
    }

    /// Which guard watches the change.
    pub(crate) fn guard_of(&self, action: ActionId) -> Option<&Guard> {
        let workload = &self.changes.get(&action)?.workload;
        self.guards
            .of(workload)
            .find(|g| g.members().any(|a| a == action))
    }

    /// The name of the guard that watched this change of the workload, also when the change is gone already.
    fn guard_of_any(&self, id: &WorkloadId, action: ActionId) -> Option<ActionId> {
        self.guards
            .of(id)
            .find(|g| g.members().any(|a| a == action))
            .map(|g| g.key)
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
        let target = self.tried.first().and_then(|a| changes.get(a)).map(|c| &c.target);
        matches!(target, Some(Target::Memory(_)))
    }

    /// Number under which the first coin of the probe pair that runs is journalled; the second block, whose arm is the
    /// other one, has the next.
    fn coin_number(&self) -> u32 {
        PROBES_FROM.saturating_add(self.pairs.saturating_sub(1).saturating_mul(2))
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
    fn probes_are_rare_enough_to_cost_half_a_percent_and_a_twentieth_of_the_gain() {
        let pair = Nanoseconds::from_secs(20);
        let none = Nanoseconds::ZERO;
        for gain in [0.0, -0.5, f64::NAN] {
            assert_eq!(
                probe_interval(pair, gain, none),
                pair * PROBATION_SPACING,
                "{gain}"
            );
        }
        for gain in [0.015, 0.05, 0.25, 1.0, 10.0] {
            for stall in [0, 1] {
                let apart = probe_interval(pair, gain, Nanoseconds::from_secs(stall));
                let lost = gain / (1.0 + gain) * 20.0 + stall as f64;
                assert!(
                    lost / apart.as_secs_f64() <= PROBE_COST_MAX + 1e-9,
                    "{gain} {stall}"
                );
                assert!(
                    lost / apart.as_secs_f64() <= PROBE_GAIN_MAX * gain / (1.0 + gain) + 1e-9,
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
