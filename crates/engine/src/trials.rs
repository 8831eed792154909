//! Experiments from start to verdict, and the changes they leave behind.

use crate::blocks::Objective;
use crate::engine::{Change, Engine};
use crate::experiment::{Experiment, Need, Phase, Setup};
use crate::guard::{self, Guard, PROPOSAL_STALE, Rest};
use crate::policy::Mode;
use crate::protocol::{Command, Fault, FaultKind, Prior};
use crate::rollout::{self, Staged, Wish};
use crate::strategy::Declined;
use crate::view::{OutcomeView, Stage};
use crate::watched::Proposed;
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Direction, Effect, EffectorId, ExperimentId, ExperimentKind, ExperimentRecord,
    Nanoseconds, Progress, StrategyId, Verdict, WorkloadId,
};
use homeostat_statistics::TrialParameters;
use homeostat_statistics::block_length::{self, Choice, Unmeasurable};
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::staged;
use std::collections::BTreeMap;

/// A change must reach at least this share of what it aimed at to be worth testing.
const CONVERTED_MIN: f64 = 0.5;
/// Failed undos before the operator is told that it does not work.
pub(crate) const UNDO_ATTEMPTS_MAX: u32 = 5;
/// Wait between attempts to undo.
const UNDO_RETRY: Nanoseconds = Nanoseconds::from_secs(10);
/// … and after it was reported.
const UNDO_RETRY_SLOW: Nanoseconds = Nanoseconds::from_secs(60);
/// No trial starts while tasks are stalled for memory more than this share of the time.
const PRESSURE_MEMORY_MAX: f64 = 0.10;
/// Passive history that the circuit breaker takes as the level before.
const PASSIVE_LEVEL_SPAN: Nanoseconds = Nanoseconds::from_secs(60);
/// Effector that does nothing.
const PLACEBO: &str = "placebo";

impl Engine {
    // ---- starting -----------------------------------------------------------------------------------------------

    /// The arbiter: at most one real trial at a time on the host, since last-level cache, memory bandwidth and free
    /// memory are shared by all workloads; known gains first, then the largest predicted gain in CPUs.
    pub(crate) fn start_next(&mut self) {
        if self.paused
            || self.stopping.is_some()
            || self.policy.mode != Mode::Act
            || self.real_trial_running()
        {
            return;
        }
        let rank = |w: &crate::watched::Watched| {
            let p = w.proposed.as_ref()?;
            let known = self
                .priors
                .get(&(w.workload.fingerprint.clone(), p.strategy.clone()))
                .is_some_and(|p| p.verdict == Verdict::Accepted);
            Some((known, p.proposal.predicted.estimate * w.load.cpus))
        };
        let best = self
            .workloads
            .iter()
            .filter(|(id, w)| w.stage == Stage::Proposed && !w.gone && !self.something_leaves(id))
            .filter_map(|(id, w)| rank(w).map(|r| (r, id.clone())))
            .max_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let Some((_, id)) = best else { return };
        if self.stale(&id) {
            self.ask_again(&id);
            return;
        }
        if let Some(why) = self.no_trial_now() {
            self.tell_host(why, false);
            return;
        }
        self.start_trial(&id);
    }

    /// Whether a change of this workload is still on its way out: what a new one found there would be ours.
    fn something_leaves(&self, id: &WorkloadId) -> bool {
        self.changes.values().any(|c| c.workload == *id && c.leaving)
    }

    /// Whether a proposal could be tried now, were it not for the guards.
    pub(crate) fn proposal_waits(&self) -> bool {
        !self.paused
            && self.policy.mode == Mode::Act
            && self
                .workloads
                .values()
                .any(|w| w.stage == Stage::Proposed && !w.gone && !self.something_leaves(&w.workload.id))
            && self.no_trial_now().is_none()
    }

    /// Whether the proposal of a workload was made so long ago that it may rest on what is no longer so.
    fn stale(&self, id: &WorkloadId) -> bool {
        self.workloads
            .get(id)
            .and_then(|w| w.proposed.as_ref())
            .is_some_and(|p| self.now - p.at >= PROPOSAL_STALE)
    }

    /// Puts the question to the strategies once more.
    fn ask_again(&mut self, id: &WorkloadId) {
        let now = self.now;
        let improved = self.guards.contains_key(id);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.proposed = None;
        w.forget_inspections();
        let text = "its turn has come after a long wait: the strategies are asked once more";
        if improved {
            // Probes ran meanwhile: the passive history begins anew.
            w.seeking = true;
            w.more_at = now;
            w.observed_since = now;
            self.decide(id, Stage::Improved, text, false);
        } else {
            self.decide(id, Stage::Observed, text, false);
        }
    }

    fn real_trial_running(&self) -> bool {
        self.experiments
            .values()
            .any(|e| e.setup.kind != ExperimentKind::Placebo)
            || self.busy_guard().is_some()
    }

    /// A budget or the state of the machine that forbids any trial now.
    fn no_trial_now(&self) -> Option<String> {
        if self.starts.len() as u32 >= self.policy.experiments_per_hour_max {
            return Some(format!(
                "the budget of {} experiments per hour is used up; the next waits",
                self.policy.experiments_per_hour_max
            ));
        }
        let exposure: f64 = self.exposure.iter().map(|(_, e)| e).sum();
        if exposure > self.policy.harm_exposure_per_day_max {
            return Some(format!(
                "the daily budget of harm exposure ({:.0} percent-seconds) is used up; no new trial today",
                self.policy.harm_exposure_per_day_max
            ));
        }
        let interval = self.machine_interval.as_secs_f64();
        let stalled = self.machine_sample.pressure_memory.some.as_secs_f64();
        if interval > 0.0 && stalled / interval > PRESSURE_MEMORY_MAX {
            return Some("tasks wait for memory: trials are put off until the pressure is gone".into());
        }
        None
    }

    /// Passive history of a workload: work and what the objective divides it by, per interval.
    fn passive(&self, id: &WorkloadId) -> Vec<(f64, f64)> {
        let Some((w, chosen)) = self.workloads.get(id).and_then(|w| Some((w, w.meter.as_ref()?))) else {
            return Vec::new();
        };
        let since = w.observed_since.max(
            self.now
                .saturating_sub(Nanoseconds::from_secs_f64(self.policy.observe_max_s)),
        );
        w.series
            .readings(&chosen.candidate.id, since)
            .iter()
            .map(|(work, work_seconds, cpu)| match w.objective {
                Objective::WorkPerSecond => (*work, *work_seconds),
                Objective::CpuPerWork => (*work, *cpu),
            })
            .collect()
    }

    /// Chooses the block length from the passive history; `Err` says why nothing can be proven now.
    fn design(&self, id: &WorkloadId, alpha: f64, settling: Nanoseconds) -> Result<Choice, Unmeasurable> {
        let seconds = self.passive(id);
        let interval = self.policy.detail_interval_s;
        block_length::choose(
            &seconds,
            interval,
            self.policy.washout_min_s.max((settling * 3).as_secs_f64()),
            &self.policy.measured_candidates_s,
            &TrialParameters {
                alpha,
                ..self.policy.trial.clone()
            },
            self.policy.experiment_max_s,
        )
    }

    fn start_trial(&mut self, id: &WorkloadId) {
        let alpha = self.discovery.next_alpha();
        let settling = self
            .workloads
            .get(id)
            .and_then(|w| w.proposed.as_ref())
            .map_or(Nanoseconds::ZERO, |p| p.proposal.settling);
        let choice = match self.design(id, alpha, settling) {
            Ok(choice) => choice,
            // More history comes by waiting.
            Err(Unmeasurable::HistoryTooShort { .. }) => return,
            Err(why) => {
                self.refuse(id, Declined::because(format!("not tried: {why}")), false);
                return;
            }
        };
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        let Some(proposed) = w.proposed.clone() else {
            return;
        };
        if !proposed.proposal.reversible {
            self.start_rollout(id, &proposed, alpha, &choice);
            return;
        }
        let proposal = proposed.proposal;
        let predicted = proposal.predicted;
        let text = format!(
            "{} in randomised on/off blocks of {:.0} s, washout at least {:.0} s, at level {alpha:.4}",
            proposed.strategy, choice.measured_s, self.policy.washout_min_s
        );
        let experiment = self.launch(
            id,
            ExperimentKind::Switchback,
            proposed.strategy.clone(),
            proposal.effector.clone(),
            proposal.target.clone(),
            proposal.arguments.clone(),
            &proposal.hypothesis,
            predicted,
            proposal.settling,
            alpha,
            &choice,
        );
        if experiment.is_some() {
            self.starts.push_back(self.now);
            self.decide(id, Stage::Trying, text, false);
        }
    }

    /// Starts the trial of a change that cannot be switched back cheaply: part by part, at times that coins decide.
    fn start_rollout(&mut self, id: &WorkloadId, proposed: &Proposed, alpha: f64, choice: &Choice) {
        let proposal = &proposed.proposal;
        let targets: Vec<Target> = std::iter::once(&proposal.target)
            .chain(&proposal.stages)
            .take(rollout::STAGES_MAX)
            .cloned()
            .collect();
        let sizes: Vec<f64> = targets.iter().map(|t| guard::size(t) as f64).collect();
        let shares = staged::shares(&sizes);
        let seconds = self.passive(id);
        let interval = self.policy.detail_interval_s;
        let plan = rollout::plan(&Wish {
            seconds: &seconds,
            interval,
            discard: self
                .policy
                .washout_min_s
                .max((proposal.settling * 3).as_secs_f64()),
            candidates: &self.policy.measured_candidates_s,
            shares: &shares,
            theta: homeostat_statistics::robust::ln(1.0 + proposal.predicted.estimate.max(0.0)),
            alpha,
            budget: self.policy.experiment_max_s,
        });
        let Some(plan) = plan else {
            let text = format!(
                "not tried: {} stages of a one-way change do not fit into the budget of {:.0} s, or the history is too broken to plan them",
                targets.len(),
                self.policy.experiment_max_s
            );
            self.refuse(id, Declined::because(text), false);
            return;
        };
        let stages = targets.len();
        let text = format!(
            "{} in {stages} stages with randomised onset, 9 slots of {:.0} s each, at level {alpha:.4}",
            proposed.strategy,
            (plan.measured + plan.discard).as_secs_f64()
        );
        let started = self.launch(
            id,
            ExperimentKind::StagedRollout,
            proposed.strategy.clone(),
            proposal.effector.clone(),
            proposal.target.clone(),
            proposal.arguments.clone(),
            &proposal.hypothesis,
            proposal.predicted,
            proposal.settling,
            alpha,
            choice,
        );
        let now = self.now;
        if let Some(experiment) = started
            && let Some(e) = self.experiments.get_mut(&experiment)
        {
            let staged = Staged::new(targets, shares, plan, Nanoseconds::from_secs_f64(interval));
            let need = e.roll_out(staged, now);
            self.starts.push_back(now);
            self.decide(id, Stage::Trying, text, false);
            self.meet(experiment, need);
        }
    }

    /// Makes a part of a rollout.
    fn make_part(&mut self, id: ExperimentId, index: usize) {
        let next = ActionId(self.next_action);
        let Some(e) = self.experiments.get_mut(&id) else {
            return;
        };
        let Some(target) = e.staged.as_ref().and_then(|s| s.targets.get(index)).cloned() else {
            return;
        };
        let proposal = self
            .workloads
            .get(&e.setup.workload)
            .and_then(|w| w.proposed.as_ref())
            .map(|p| (p.proposal.effector.clone(), p.proposal.arguments.clone()));
        let Some((effector, arguments)) = proposal else {
            return;
        };
        let action_id = if index == 0 { e.setup.action } else { next };
        if index > 0 {
            self.next_action += 1;
            e.parts.push(action_id);
        }
        let stages = e.staged.as_ref().map_or(1, |s| s.targets.len());
        let strategy = e.setup.strategy.clone();
        let action = Action {
            id: action_id,
            effector,
            workload: e.setup.workload.clone(),
            target,
            arguments,
            why: format!("part {} of {stages}: {}", index + 1, e.setup.hypothesis),
        };
        self.changes
            .insert(action_id, Change::new(&action, strategy, self.unix));
        self.out.push(Command::Apply(Box::new(action)));
    }

    /// Whether a placebo should run on this workload now.
    pub(crate) fn placebo_wanted(&self, id: &WorkloadId) -> bool {
        if self.paused || self.stopping.is_some() || self.policy.mode == Mode::AdviseOnly {
            return false;
        }
        if self.policy.mode == Mode::Calibrate {
            return true;
        }
        // Never as the first thing that a new workload sees: improving it comes first.
        let seen_before = self.workloads.get(id).is_some_and(|w| {
            w.decisions
                .iter()
                .any(|d| matches!(d.stage, Stage::Declined | Stage::Improved))
        });
        self.policy.placebo_every_s > 0.0 && self.now >= self.placebo_due && seen_before
    }

    pub(crate) fn start_placebo(&mut self, id: &WorkloadId) {
        let choice = match self.design(id, self.policy.placebo_alpha, Nanoseconds::ZERO) {
            Ok(choice) => choice,
            Err(Unmeasurable::HistoryTooShort { .. }) => return,
            Err(why) => {
                self.refuse(id, Declined::because(format!("no placebo trial: {why}")), false);
                return;
            }
        };
        self.placebo_due = self.now + Nanoseconds::from_secs_f64(self.policy.placebo_every_s);
        let none = Effect {
            estimate: 0.0,
            lower: 0.0,
            upper: 0.0,
            confidence: 1.0,
        };
        let hypothesis = "placebo: nothing is changed; measures how often homeostat accepts by mistake";
        let started = self.launch(
            id,
            ExperimentKind::Placebo,
            StrategyId::from(PLACEBO),
            EffectorId::from(PLACEBO),
            Target::Nothing,
            BTreeMap::new(),
            hypothesis,
            none,
            Nanoseconds::ZERO,
            self.policy.placebo_alpha,
            &choice,
        );
        if started.is_some() {
            self.decide(id, Stage::Trying, hypothesis.to_owned(), false);
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one caller per kind of trial; a struct would only repeat Setup"
    )]
    fn launch(
        &mut self,
        id: &WorkloadId,
        kind: ExperimentKind,
        strategy: StrategyId,
        effector: EffectorId,
        target: Target,
        arguments: BTreeMap<String, String>,
        hypothesis: &str,
        predicted: Effect,
        settling: Nanoseconds,
        alpha: f64,
        choice: &Choice,
    ) -> Option<ExperimentId> {
        let w = self.workloads.get(id)?;
        let meter = w.meter.as_ref()?.candidate.id.clone();
        let action = Action {
            id: ActionId(self.next_action),
            effector,
            workload: id.clone(),
            target,
            arguments,
            why: hypothesis.to_owned(),
        };
        self.next_action += 1;
        let experiment_id = ExperimentId(self.next_experiment);
        self.next_experiment += 1;
        let parameters = TrialParameters {
            alpha,
            scale_prior: choice.scale,
            ..self.policy.trial.clone()
        };
        let setup = Setup {
            id: experiment_id,
            kind,
            strategy: strategy.clone(),
            workload: id.clone(),
            fingerprint: w.workload.fingerprint.clone(),
            action: action.id,
            hypothesis: hypothesis.to_owned(),
            predicted,
            meter,
            objective: w.objective,
            seed: self.policy.seed,
            settling,
            washout_min: Nanoseconds::from_secs_f64(self.policy.washout_min_s),
            washout_max: Nanoseconds::from_secs_f64(self.policy.washout_max_s),
            measured: Nanoseconds::from_secs_f64(choice.measured_s),
            budget: Nanoseconds::from_secs_f64(self.policy.experiment_max_s),
            cpus: w.load.cpus,
            parameters,
            started: self.now,
            started_unix: self.unix,
        };
        let mut breaker = Breaker::new(choice.scale_5s);
        // Until the first off block the passive history is what a fall is measured against.
        let from = w.observed_since.max(self.now.saturating_sub(PASSIVE_LEVEL_SPAN));
        let level = w.objective.score(&w.series.sums(&setup.meter, from, self.now));
        if let Some(level) = level {
            breaker.off_block(level);
        }
        if kind != ExperimentKind::Placebo {
            self.probes_since_trial = 0;
        }
        let at_once = kind != ExperimentKind::StagedRollout;
        if at_once {
            self.changes
                .insert(action.id, Change::new(&action, strategy, self.unix));
        }
        let experiment = Experiment::new(setup, breaker);
        self.out.push(Command::RecordExperiment(Box::new(
            self.record(&experiment, None),
        )));
        self.experiments.insert(experiment_id, experiment);
        if at_once {
            self.out.push(Command::Apply(Box::new(action)));
        }
        Some(experiment_id)
    }

    // ---- running ------------------------------------------------------------------------------------------------

    pub(crate) fn poll_experiments(&mut self) {
        let ids: Vec<ExperimentId> = self.experiments.keys().copied().collect();
        for id in ids {
            let Some(e) = self.experiments.get_mut(&id) else {
                continue;
            };
            let Some(w) = self.workloads.get(&e.setup.workload) else {
                continue;
            };
            let need = e.poll(self.now, &w.series);
            self.meet(id, need);
        }
    }

    fn meet(&mut self, id: ExperimentId, need: Need) {
        let Some(e) = self.experiments.get(&id) else {
            return;
        };
        let action = e.switched();
        match need {
            Need::Stage { stage, onset } => self.out.push(Command::NoteCoin {
                experiment: id,
                block: stage * rollout::BLOCKS_PER_STAGE + onset,
                on: true,
            }),
            Need::Part { index } => self.make_part(id, index),
            Need::Nothing => {}
            Need::Switch { on } => self.switch(action, on),
            Need::Begin { block, on, switch } => {
                let record = (block > 0 && block.is_multiple_of(8)).then(|| self.record(e, None));
                self.out.push(Command::NoteCoin {
                    experiment: id,
                    block,
                    on,
                });
                if switch {
                    self.switch(action, on);
                }
                if let Some(record) = record {
                    self.out.push(Command::RecordExperiment(Box::new(record)));
                }
            }
            // A rollout ends with all its parts made, unless the last one is on a round trip.
            Need::Conclude { on: true } if self.all_made(id) => self.conclude(id),
            Need::Conclude { on: true } => self.switch(action, true),
            Need::Conclude { on: false } => {
                let actions = e.actions();
                for action in actions.iter().rev() {
                    if let Some(c) = self.changes.get_mut(action) {
                        c.leaving = true;
                    }
                }
                for action in actions.iter().rev() {
                    self.leave(*action);
                }
                self.conclude_when_gone(id);
            }
        }
    }

    /// Drives a change to on or off.
    pub(crate) fn switch(&mut self, action: ActionId, on: bool) {
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        c.on = on;
        c.settled = false;
        let direction = if on { Direction::Apply } else { Direction::Undo };
        self.out.push(Command::Switch(action, direction));
    }

    pub(crate) fn on_advanced(&mut self, action: ActionId, direction: Direction, progress: &Progress) {
        self.account(action, progress);
        if direction == Direction::Apply
            && let Some(e) = self.experiments.values_mut().find(|e| e.owns(action))
            && matches!(e.phase, Phase::Preparing)
            && progress.total > 0
        {
            e.prepared = progress.finished as f64 / progress.total as f64;
        }
    }

    /// Adds the cost of a slice to the books.
    fn account(&mut self, action: ActionId, progress: &Progress) {
        self.stalled += progress.stalled;
        if let Some(c) = self.changes.get_mut(&action) {
            c.bloat = progress.bloat;
        }
        if let Some(e) = self.experiments.values_mut().find(|e| e.owns(action)) {
            e.stalled += progress.stalled;
            e.bloat = e.bloat.max(progress.bloat);
        }
    }

    pub(crate) fn on_settled(
        &mut self,
        action: ActionId,
        direction: Direction,
        result: Result<Progress, Fault>,
    ) {
        if let Ok(progress) = &result {
            self.account(action, progress);
        }
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        let expected = if c.on { Direction::Apply } else { Direction::Undo };
        if direction != expected {
            return;
        }
        match (direction, result) {
            (Direction::Apply, Ok(progress)) => {
                c.settled = true;
                self.applied(action, &progress);
            }
            (Direction::Apply, Err(fault)) => self.apply_failed(action, &fault),
            (Direction::Undo, Ok(_)) => {
                c.settled = true;
                if c.leaving {
                    let workload = c.workload.clone();
                    self.out.push(Command::Close(action));
                    self.changes.remove(&action);
                    self.guard_loses(&workload, action);
                    self.release();
                    self.conclude_of(action);
                } else {
                    self.experiment_settled(action);
                    self.guard_settled(action);
                }
            }
            (Direction::Undo, Err(fault)) => self.undo_failed(action, &fault),
        }
    }

    fn applied(&mut self, action: ActionId, progress: &Progress) {
        let found = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, e)| {
                (
                    *id,
                    // Also each part of a rollout is made for the first time.
                    matches!(e.phase, Phase::Preparing | Phase::Stage),
                    matches!(e.phase, Phase::Concluding),
                )
            });
        let Some((id, preparing, concluding)) = found else {
            if self.stopping == Some(true) && self.guarded(action) {
                self.out.push(Command::Keep(action));
                self.changes.remove(&action);
                return;
            }
            self.guard_settled(action);
            return;
        };
        if concluding {
            self.conclude_of(action);
            return;
        }
        let share = if progress.total == 0 {
            1.0
        } else {
            progress.finished as f64 / progress.total as f64
        };
        if preparing && share < CONVERTED_MIN {
            let why = progress
                .skipped
                .iter()
                .map(|(reason, n)| format!("{n} {reason}"))
                .collect::<Vec<_>>()
                .join(", ");
            let text = format!(
                "only {} of {} pieces could be converted ({why})",
                progress.finished, progress.total
            );
            self.abort(id, text);
            return;
        }
        self.experiment_settled(action);
    }

    fn experiment_settled(&mut self, action: ActionId) {
        let now = self.now;
        let Some((id, e)) = self.experiments.iter_mut().find(|(_, e)| e.owns(action)) else {
            return;
        };
        let id = *id;
        let need = e.settled(now);
        self.meet(id, need);
    }

    fn apply_failed(&mut self, action: ActionId, fault: &Fault) {
        let id = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, _)| *id);
        // Nothing was done when the record never reached the journal, or preparation was refused; the undo that
        // follows finds nothing to do and closes the record if there is one.
        let text = match fault.kind {
            FaultKind::Conflict => format!("a person or another program chose otherwise: {}", fault.text),
            _ => fault.text.clone(),
        };
        match id {
            Some(id) => self.abort(id, text),
            None => self.withdraw(action, &text),
        }
    }

    fn undo_failed(&mut self, action: ActionId, fault: &Fault) {
        let now = self.now;
        if self.changes.get(&action).is_some_and(|c| !c.leaving) {
            // It was to be off for a block only. A change that cannot be switched off when asked is none to test or to
            // guard: its trial ends, or its guard lets go of it, and it leaves for good.
            let why = format!("it could not be switched off: {}", fault.text);
            if let Some((_, e)) = self.experiments.iter_mut().find(|(_, e)| e.owns(action)) {
                e.own_end = true;
            }
            self.withdraw(action, &why);
        }
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        c.leaving = true;
        c.failures += 1;
        let workload = c.workload.clone();
        let failures = c.failures;
        let given_up = c.failures >= UNDO_ATTEMPTS_MAX;
        // Never given up for good: what stands in the way (a snapshot by fork, a pin) may go.
        c.retry_at = Some(now + if given_up { UNDO_RETRY_SLOW } else { UNDO_RETRY });
        let text = if given_up {
            format!(
                "action {action} could not be undone after {UNDO_ATTEMPTS_MAX} attempts: {}; it stays in the journal and is tried again every minute",
                fault.text
            )
        } else {
            format!(
                "action {action} could not be undone yet: {}; trying again",
                fault.text
            )
        };
        self.narrate(&workload, text, true);
        if failures == UNDO_ATTEMPTS_MAX {
            self.release();
            self.conclude_of(action);
        }
    }

    /// Whether `later` may set the same thing as `earlier`, on top of it: then it is undone first, since what it found
    /// is what the earlier one had set. Pieces of memory never overlap: no strategy proposes a piece twice.
    pub(crate) fn lies_over(&self, later: ActionId, earlier: ActionId) -> bool {
        let (Some(l), Some(e)) = (self.changes.get(&later), self.changes.get(&earlier)) else {
            return false;
        };
        later > earlier
            && l.workload == e.workload
            && l.effector == e.effector
            && !matches!(l.target, Target::Memory(_) | Target::Nothing)
    }

    /// Whether the undo of a change must wait for that of a later one. What cannot be undone stands in nobody's way.
    fn must_wait(&self, action: ActionId) -> bool {
        self.changes
            .range((std::ops::Bound::Excluded(action), std::ops::Bound::Unbounded))
            .any(|(later, c)| c.leaving && c.failures < UNDO_ATTEMPTS_MAX && self.lies_over(*later, action))
    }

    /// Undoes a change for good, after the later ones that lie over it.
    fn leave(&mut self, action: ActionId) {
        let waits = self.must_wait(action);
        if let Some(c) = self.changes.get_mut(&action) {
            c.leaving = true;
            c.waits = waits;
            if !waits {
                self.switch(action, false);
            }
        }
    }

    /// Undoes what waited for a change that is gone now.
    fn release(&mut self) {
        let waiting: Vec<ActionId> = self
            .changes
            .iter()
            .rev()
            .filter(|(_, c)| c.waits)
            .map(|(id, _)| *id)
            .collect();
        for action in waiting {
            self.leave(action);
        }
    }

    pub(crate) fn retry_undos(&mut self) {
        let now = self.now;
        let due: Vec<ActionId> = self
            .changes
            .iter_mut()
            .filter(|(_, c)| c.retry_at.is_some_and(|t| now >= t))
            .map(|(id, c)| {
                c.retry_at = None;
                *id
            })
            .collect();
        for action in due {
            self.leave(action);
        }
    }

    // ---- ending -------------------------------------------------------------------------------------------------

    pub(crate) fn abort(&mut self, id: ExperimentId, why: String) {
        let now = self.now;
        let Some(e) = self.experiments.get_mut(&id) else {
            return;
        };
        let need = e.conclude(now, Verdict::Aborted, why);
        self.meet(id, need);
    }

    pub(crate) fn abort_all(&mut self, why: &str) {
        for id in self.experiments.keys().copied().collect::<Vec<_>>() {
            self.abort(id, why.to_owned());
        }
    }

    pub(crate) fn abort_workload(&mut self, workload: &WorkloadId, why: &str) {
        let ids: Vec<ExperimentId> = self
            .experiments
            .iter()
            .filter(|(_, e)| e.setup.workload == *workload)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.abort(id, why.to_owned());
        }
    }

    /// Takes a change back for good.
    pub(crate) fn withdraw(&mut self, action: ActionId, why: &str) {
        if let Some(id) = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, _)| *id)
        {
            self.abort(id, why.to_owned());
            return;
        }
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        if c.leaving && c.failures == 0 {
            return;
        }
        c.leaving = true;
        c.failures = 0;
        c.retry_at = None;
        let workload = c.workload.clone();
        let places = matches!(c.target, Target::Cpus(_) | Target::Files(_));
        self.narrate(&workload, format!("action {action} is undone: {why}"), false);
        // What was set on top of it found its value, not that of a person: it goes first. Moved pages do not.
        let over: Vec<ActionId> = self
            .changes
            .keys()
            .rev()
            .copied()
            .filter(|later| places && self.lies_over(*later, action))
            .collect();
        for later in over {
            self.withdraw(later, "it was set on top of a change that is undone");
        }
        // The parts that followed it go first.
        self.guard_loses(&workload, action);
        self.leave(action);
    }

    /// Whether all parts of a rollout are made and stay.
    fn all_made(&self, id: ExperimentId) -> bool {
        self.experiments.get(&id).is_some_and(|e| {
            e.is_staged()
                && e.actions()
                    .iter()
                    .all(|a| self.changes.get(a).is_some_and(|c| c.on && c.settled))
        })
    }

    /// A change of an experiment reached its final state.
    fn conclude_of(&mut self, action: ActionId) {
        let found = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, e)| (*id, e.on));
        match found {
            Some((id, true)) => self.conclude(id),
            Some((id, false)) => self.conclude_when_gone(id),
            None => {}
        }
    }

    /// Ends an experiment whose changes are all undone, or cannot be.
    fn conclude_when_gone(&mut self, id: ExperimentId) {
        let gone = self.experiments.get(&id).is_some_and(|e| {
            e.actions().iter().all(|a| {
                self.changes
                    .get(a)
                    .is_none_or(|c| c.failures >= UNDO_ATTEMPTS_MAX)
            })
        });
        if gone {
            self.conclude(id);
        }
    }

    /// All changes of an experiment reached their final state: write the verdict down.
    fn conclude(&mut self, id: ExperimentId) {
        let Some(e) = self.experiments.remove(&id) else {
            return;
        };
        let verdict = e.verdict.unwrap_or(Verdict::Aborted);
        let exposure = e.harm_exposure();
        let record = self.record(&e, Some(verdict));
        self.out.push(Command::RecordExperiment(Box::new(record.clone())));
        let placebo = e.setup.kind == ExperimentKind::Placebo;
        let workload = e.setup.workload.clone();
        self.outcomes.push_front(OutcomeView {
            id,
            workload: workload.clone(),
            strategy: e.setup.strategy.clone(),
            verdict,
            effect: (!e.blocks.is_empty()).then(|| e.effect()),
            unix_seconds: self.unix,
            reason: e.reason.clone(),
        });
        if placebo && e.orphan {
            return;
        }
        if placebo {
            self.conclude_placebo(&workload, verdict);
            return;
        }
        self.exposure.push_back((self.now, exposure));
        if verdict != Verdict::Aborted || !e.blocks.is_empty() {
            // A try that was broken off could have been accepted until then: its level is used up.
            self.discovery.record(verdict == Verdict::Accepted);
        }
        if verdict != Verdict::Aborted || e.own_end {
            self.remember(&e, verdict);
        }
        if e.orphan {
            // Whoever has its name now is another.
            return;
        }
        let effect = e.effect();
        match verdict {
            Verdict::Accepted => {
                let rest = self
                    .workloads
                    .get(&workload)
                    .and_then(|w| w.proposed.as_ref())
                    .map(|p| Rest {
                        // The first parts of a rollout are made already.
                        stages: p.proposal.stages.iter().skip(e.parts.len()).cloned().collect(),
                        effector: p.proposal.effector.clone(),
                        arguments: p.proposal.arguments.clone(),
                    });
                let text = format!(
                    "{} {} by experiment {id}, {}; the change stays and is guarded",
                    e.setup.strategy,
                    e.setup.objective.gain(&effect),
                    e.reason
                );
                let guard = Guard::new(&e, record, text.clone(), self.now, &self.policy, rest);
                self.guards
                    .entry(workload.clone())
                    .or_default()
                    .insert(guard.leader, guard);
                self.decide(&workload, Stage::Improved, text, false);
                if self.anyone_to_ask(&workload, None) {
                    self.look_further(&workload, e.washout);
                } else if let Some(w) = self.workloads.get_mut(&workload) {
                    w.proposed = None;
                    w.seeking = false;
                    w.more_at = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
                }
                self.summarise(&workload);
            }
            _ => {
                let text = format!(
                    "{verdict} by experiment {id}: {}; the change was undone",
                    e.reason
                );
                let own_end = verdict != Verdict::Aborted || e.own_end;
                let on = own_end
                    && !self.paused
                    && self.stopping.is_none()
                    && self.policy.mode == Mode::Act
                    && self.anyone_to_ask(&workload, Some(&e.setup.strategy));
                let warning = verdict == Verdict::Harmful;
                if on {
                    let stage = if self.guards.contains_key(&workload) {
                        Stage::Improved
                    } else {
                        Stage::Declined
                    };
                    self.decide(&workload, stage, text, warning);
                    self.look_further(&workload, e.washout);
                    self.summarise(&workload);
                } else {
                    self.refuse(&workload, Declined::because(text), warning);
                }
            }
        }
    }

    fn conclude_placebo(&mut self, workload: &WorkloadId, verdict: Verdict) {
        if verdict != Verdict::Aborted {
            self.placebos += 1;
            if verdict == Verdict::Accepted {
                self.false_accepts += 1;
            }
        }
        let text = format!(
            "placebo trial {}: {} of {} accepted so far (at most {:.0} % expected)",
            if verdict == Verdict::Accepted {
                "accepted by mistake"
            } else {
                "not accepted, as it should be"
            },
            self.false_accepts,
            self.placebos,
            self.policy.placebo_alpha * 100.0
        );
        self.decide(workload, Stage::Observed, text, false);
        let now = self.now;
        if let Some(w) = self.workloads.get_mut(workload)
            && self.policy.mode != Mode::Calibrate
        {
            // A placebo changes nothing: what was read meanwhile is passive history.
            w.retry_at = now;
        }
    }

    fn remember(&mut self, e: &Experiment, verdict: Verdict) {
        let key = (e.setup.fingerprint.clone(), e.setup.strategy.clone());
        let failures = match verdict {
            Verdict::Accepted => 0,
            _ => self.priors.get(&key).map_or(0, |p| p.failures) + 1,
        };
        self.priors.insert(
            key,
            Prior {
                fingerprint: e.setup.fingerprint.clone(),
                strategy: e.setup.strategy.clone(),
                verdict,
                effect: Some(e.effect()),
                unix_seconds: self.unix,
                failures,
            },
        );
    }

    /// The experiment as the history keeps it.
    pub(crate) fn record(&self, e: &Experiment, verdict: Option<Verdict>) -> ExperimentRecord {
        let s = &e.setup;
        ExperimentRecord {
            id: s.id,
            kind: s.kind,
            strategy: s.strategy.clone(),
            workload: s.workload.clone(),
            fingerprint: s.fingerprint.clone(),
            machine: self.machine.fingerprint(),
            action: s.action,
            hypothesis: s.hypothesis.clone(),
            predicted: s.predicted,
            meter: s.meter.clone(),
            objective: s.objective.words().to_owned(),
            seed: s.seed,
            alpha: s.parameters.alpha,
            washout: e.washout,
            measured: e.measured(),
            started_unix: s.started_unix,
            ended_unix: if verdict.is_some() { self.unix } else { 0 },
            verdict,
            reason: e.reason.clone(),
            effect: (!e.blocks.is_empty()).then(|| e.effect()),
            evidence: e.evidence(),
            stalled: e.stalled,
            bloat: e.bloat,
            harm_exposure: e.harm_exposure(),
            blocks: e.blocks.clone(),
        }
    }
}
