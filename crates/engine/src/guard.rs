//! The watch over an accepted change.
//!
//! First *probation*: probe pairs (one block on, one off, in random order) interleaved one in four, which catch a
//! change that helps a little often and hurts a lot rarely. Then *holdback*: a probe pair every half hour, for ever,
//! with a detector whose false alarms are rare by construction. An alarm undoes the change at once; it may be tried
//! afresh after the back-off. Parts that follow the tried part in stages are watched by the same guard.

use crate::blocks::{Block, BlockState, Objective};
use crate::coins::Coins;
use crate::engine::{Change, Engine};
use crate::experiment::Experiment;
use crate::policy::Policy;
use crate::protocol::Command;
use crate::strategy::Opinion;
use crate::view::Stage;
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Effect, EffectorId, ExperimentRecord, MeterId, Nanoseconds, StrategyId, Verdict,
    WorkloadId,
};
use homeostat_statistics::guard::{Holdback, Probation, ProbationState};
use std::collections::{BTreeMap, VecDeque};

/// Probe pairs of the probation are this many pair lengths apart (one in four).
const PROBATION_SPACING: u64 = 3;
/// The guard raises its alarm when the gain falls below this (log units).
const HOLDBACK_FLOOR: f64 = 0.01;
/// Memory of an improved workload is inspected again this often, for parts that came later.
const REVIEW: Nanoseconds = Nanoseconds::from_secs(600);
/// New parts are added when they make up at least this share of what is converted.
const GROWTH_MIN: f64 = 0.05;
/// Parts that may wait for their stage.
const STAGES_MAX: usize = 16;

/// A probe pair in the making.
struct Probe {
    block: Block,
    /// Of both blocks, fixed before the coin is tossed.
    washout: Nanoseconds,
    first: Option<(bool, f64)>,
    switch_started: Nanoseconds,
}

/// The guard of one workload.
pub(crate) struct Guard {
    pub(crate) strategy: StrategyId,
    /// The part that was tried and is switched in probes.
    pub(crate) leader: ActionId,
    /// Parts that followed.
    pub(crate) followers: Vec<ActionId>,
    pub(crate) effect: Effect,
    /// The experiment that accepted the change, rewritten when the change is revoked.
    record: ExperimentRecord,
    pub(crate) probes: u32,
    effector: EffectorId,
    arguments: BTreeMap<String, String>,
    stages: VecDeque<Target>,
    stage_due: Nanoseconds,
    stage_running: Option<ActionId>,
    meter: MeterId,
    objective: Objective,
    washout: Nanoseconds,
    measured: Nanoseconds,
    cpus: f64,
    coins: Coins,
    probation: Probation,
    holdback: Holdback,
    next_probe: Nanoseconds,
    probe: Option<Probe>,
    pieces: u64,
    review_at: Nanoseconds,
}

impl Guard {
    pub(crate) fn new(
        e: &Experiment,
        record: ExperimentRecord,
        now: Nanoseconds,
        policy: &Policy,
        rest: Option<(Vec<Target>, EffectorId, BTreeMap<String, String>)>,
    ) -> Self {
        let (stages, effector, arguments) =
            rest.unwrap_or((Vec::new(), EffectorId::from("none"), BTreeMap::new()));
        let pair = (e.washout + e.setup.measured) * 2;
        Self {
            strategy: e.setup.strategy.clone(),
            leader: e.setup.action,
            followers: Vec::new(),
            effect: e.effect(),
            record,
            probes: 0,
            effector,
            arguments,
            stages: stages.into(),
            stage_due: now + pair,
            stage_running: None,
            meter: e.setup.meter.clone(),
            objective: e.setup.objective,
            washout: e.washout,
            measured: e.setup.measured,
            cpus: e.setup.cpus,
            // A stream of coins apart from that of the experiment.
            coins: Coins::new(e.setup.seed ^ 0x6775_6172_6400_0000, e.setup.id),
            probation: Probation::new(policy.probation_pairs, e.trial.estimate().scale),
            // Alarm when the gain is lost, not only when it has become a loss.
            holdback: Holdback::below(HOLDBACK_FLOOR, e.trial.estimate().scale),
            next_probe: now + pair * PROBATION_SPACING,
            probe: None,
            pieces: 0,
            review_at: now + REVIEW,
        }
    }

    /// Whether a probe or a stage is under way: then no other trial starts.
    pub(crate) fn busy(&self) -> bool {
        self.probe.is_some() || self.stage_running.is_some()
    }

    fn in_probation(&self) -> bool {
        matches!(self.probation.state(), ProbationState::Running)
    }

    pub(crate) fn wants_detail(&self, now: Nanoseconds) -> bool {
        // The readings of the first block need a sample to start from.
        self.busy() || now + Nanoseconds::from_secs(3) >= self.next_probe
    }

    pub(crate) fn describe(&self, now: Nanoseconds) -> String {
        let next = self.next_probe.saturating_sub(now);
        if self.probe.is_some() {
            format!("probing (pair {})", self.probes + 1)
        } else if self.in_probation() {
            format!("probation: {} probe pairs done, next in {next}", self.probes)
        } else {
            format!(
                "passed probation; {} probe pairs done, next in {next}",
                self.probes
            )
        }
    }
}

/// What a guard found.
enum Finding {
    Nothing,
    Switch(bool),
    Alarm(String),
    Passed,
}

impl Engine {
    pub(crate) fn poll_guards(&mut self) {
        let ids: Vec<WorkloadId> = self.guards.keys().cloned().collect();
        for id in ids {
            if self.stopping.is_some() {
                return;
            }
            self.withdraw_if_unwanted(&id);
            self.poll_guard(&id);
        }
    }

    /// A person chose otherwise since: ours goes first.
    fn withdraw_if_unwanted(&mut self, id: &WorkloadId) {
        let Some(g) = self.guards.get(id) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        let unwanted = self
            .ask(id, index, |strategy, seen| strategy.unwanted(seen))
            .flatten();
        if let Some(why) = unwanted {
            self.revoke(id, &format!("withdrawn: {why}"), None);
        }
    }

    fn poll_guard(&mut self, id: &WorkloadId) {
        let trial_elsewhere =
            !self.experiments.is_empty() || self.guards.iter().any(|(other, g)| other != id && g.busy());
        let now = self.now;
        let mut finding = Finding::Nothing;
        let mut inspect = false;
        let mut stage = None;
        {
            let (Some(g), Some(w)) = (self.guards.get_mut(id), self.workloads.get(id)) else {
                return;
            };
            if g.stage_running.is_some() {
                return;
            }
            if let Some(probe) = &mut g.probe {
                let floor = g.cpus * 0.1;
                match probe.block.poll(now, &w.series, &g.meter, g.objective, floor) {
                    BlockState::Running | BlockState::Idle => {}
                    BlockState::Unmeasurable(_) => {
                        g.probe = None;
                        g.next_probe = now + (g.washout + g.measured) * 2 * PROBATION_SPACING;
                        finding = Finding::Switch(true);
                    }
                    BlockState::Finished(record) => {
                        finding = g.block_done(record.on, record.score, now, &self.policy)
                    }
                }
            } else if self.paused || trial_elsewhere {
            } else if !g.stages.is_empty() && now >= g.stage_due {
                stage = g.stages.pop_front();
            } else if now >= g.next_probe {
                let on = g.coins.toss();
                g.probe = Some(Probe {
                    block: Block::start(0, on, now, g.washout, g.measured),
                    washout: g.washout,
                    first: None,
                    switch_started: now,
                });
                if !on {
                    finding = Finding::Switch(false);
                }
            } else if now >= g.review_at && !w.inspecting {
                g.review_at = now + REVIEW;
                inspect = true;
            }
        }
        let leader = self.guards.get(id).map(|g| g.leader);
        match (finding, leader) {
            (Finding::Switch(on), Some(leader))
                if self
                    .changes
                    .get(&leader)
                    .is_some_and(|c| c.on != on || !c.settled) =>
            {
                self.switch(leader, on);
            }
            (Finding::Alarm(why), _) => self.revoke(id, &why, Some(Verdict::Rejected)),
            (Finding::Passed, Some(leader)) => {
                if self.changes.get(&leader).is_some_and(|c| !c.on) {
                    self.switch(leader, true);
                }
                let text = self.guards.get(id).map(|g| {
                    format!(
                        "guarded: probation passed after {} probe pairs; {} stays",
                        g.probes, g.effect
                    )
                });
                if let Some(text) = text {
                    self.decide(id, Stage::Improved, text, false);
                }
            }
            _ => {}
        }
        if inspect && let Some(w) = self.workloads.get_mut(id) {
            w.inspecting = true;
            self.out.push(Command::InspectMemory(id.clone()));
        }
        if let Some(target) = stage {
            self.add_part(id, target);
        }
    }

    /// Makes the change on one more part of the workload.
    fn add_part(&mut self, id: &WorkloadId, target: Target) {
        let Some(g) = self.guards.get_mut(id) else { return };
        let action = ActionId(self.next_action);
        self.next_action += 1;
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
        self.changes.insert(
            action,
            Change {
                workload: id.clone(),
                strategy,
                target: command.target.clone(),
                text: text.clone(),
                on: true,
                settled: false,
                leaving: false,
                failures: 0,
                retry_at: None,
                since_unix: self.unix,
                bloat: homeostat_model::Bytes::ZERO,
            },
        );
        self.decide(id, Stage::Improved, format!("extending: {text}"), false);
        self.out.push(Command::Apply(Box::new(command)));
    }

    /// A change under guard reached the state it was sent to.
    pub(crate) fn guard_settled(&mut self, action: ActionId) {
        let now = self.now;
        for g in self.guards.values_mut() {
            if g.stage_running == Some(action) {
                g.stage_running = None;
                g.stage_due = now + (g.washout + g.measured) * 2;
            }
            if g.leader == action
                && let Some(p) = &g.probe
            {
                // Later probes wait for as long as a switch was seen to take.
                let took = now - p.switch_started;
                g.washout = g
                    .washout
                    .max(Nanoseconds::from_secs_f64(took.as_secs_f64() * 1.25));
            }
        }
    }

    /// A change under guard is on its way out.
    pub(crate) fn guard_loses(&mut self, id: &WorkloadId, action: ActionId) {
        let Some(g) = self.guards.get_mut(id) else { return };
        if g.stage_running == Some(action) {
            g.stage_running = None;
        }
        g.followers.retain(|a| *a != action);
        if g.leader == action {
            let followers = std::mem::take(&mut g.followers);
            self.guards.remove(id);
            for follower in followers {
                self.withdraw(follower, "the change it followed was undone");
            }
            self.close_meters(id);
            let retry = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
            if let Some(w) = self.workloads.get_mut(id)
                && w.stage == Stage::Improved
            {
                w.retry_at = retry;
                w.proposed = None;
                self.decide(
                    id,
                    Stage::Declined,
                    "the change was undone and is not tried again for now",
                    false,
                );
            }
        }
    }

    /// Undoes what was accepted.
    fn revoke(&mut self, id: &WorkloadId, why: &str, verdict: Option<Verdict>) {
        let Some(g) = self.guards.get(id) else { return };
        let (leader, strategy, accepted) = (g.leader, g.strategy.clone(), g.record.clone());
        self.decide(id, Stage::Improved, why.to_owned(), true);
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

    /// The memory of an improved workload was inspected again: add what came since.
    pub(crate) fn extend(&mut self, id: &WorkloadId) {
        let Some(g) = self.guards.get(id) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        self.withdraw_if_unwanted(id);
        let opinion = self.opinion(id, index);
        if let Some(w) = self.workloads.get_mut(id) {
            w.memory = None;
        }
        let Some(Opinion::Propose(p)) = opinion else {
            return;
        };
        let Some(g) = self.guards.get_mut(id) else { return };
        let mut targets = vec![p.target];
        targets.extend(p.stages);
        let new: u64 = targets.iter().map(pieces).sum();
        if (new as f64) < GROWTH_MIN * g.pieces.max(1) as f64 && g.pieces > 0 {
            return;
        }
        g.pieces += new;
        g.effector = p.effector;
        for target in targets {
            if g.stages.len() < STAGES_MAX && g.followers.len() < 256 {
                g.stages.push_back(target);
            }
        }
    }

    /// Which experiment accepted the change, for people.
    pub(crate) fn guard_of(&self, action: ActionId) -> Option<&Guard> {
        self.guards
            .values()
            .find(|g| g.leader == action || g.followers.contains(&action))
    }
}

impl Guard {
    fn block_done(&mut self, on: bool, score: f64, now: Nanoseconds, policy: &Policy) -> Finding {
        let Some(probe) = &mut self.probe else {
            return Finding::Nothing;
        };
        let Some((first_on, first)) = probe.first.replace((on, score)) else {
            // The second block is the other arm.
            probe.block = Block::start(1, !on, now, probe.washout, self.measured);
            probe.switch_started = now;
            return Finding::Switch(!on);
        };
        self.probe = None;
        self.probes += 1;
        let difference = if first_on { first - score } else { score - first };
        let was_in_probation = self.in_probation();
        let alarm = self.holdback.observe(difference);
        let state = self.probation.observe(difference);
        let pair = (self.washout + self.measured) * 2;
        self.next_probe = now
            + if matches!(state, ProbationState::Running) {
                pair * PROBATION_SPACING
            } else {
                Nanoseconds::from_secs_f64(policy.probe_every_s)
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

fn pieces(target: &Target) -> u64 {
    match target {
        Target::Memory(m) => m.iter().map(|t| t.pieces.len() as u64).sum(),
        Target::Nothing | Target::Files(_) | Target::Cpus(_) | Target::Pages(_) => 0,
    }
}
