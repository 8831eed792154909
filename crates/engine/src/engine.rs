//! The loop: observation in, commands out.

use crate::blocks::Objective;
use crate::canary::{self, OwnCost};
use crate::controller::Steered;
use crate::experiment::{Experiment, Phase};
use crate::guard::{Guard, Guards};
use crate::hindered::Hindered;
use crate::losses::{Losses, Rereads};
use crate::meters::{self, Assessment, MeterInterval, NoiseLimit, Unsettled};
use crate::owners::Spent;
use crate::panel::log_gain;
use crate::policy::{Mode, Policy};
use crate::protocol::{
    Command, DecisionRecord, Event, Fault, FaultKind, Memory, OperatorRequest, Prior, SamplingPlan, Story,
};
use crate::reach::Excluded;
use crate::recall::Recall;
use crate::relief;
use crate::series::{Interval, LOAD_SPAN};
use crate::strategy::{Declined, Neighbour, Opinion, Proposal, Seen, Strategy};
use crate::trials::{ALONE, is_plain};
use crate::view::{Outcome, Stage};
use crate::watched::{Chosen, Proposed, Watched};
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Advice, Bytes, CpuId, ExperimentId, ExperimentKind, Fingerprint, Machine,
    MachineSample, MeterClass, MeterId, Nanoseconds, Owner, Reads, Snapshot, StrategyId, Verdict, Workload,
    WorkloadId, WorkloadSample,
};
use homeostat_statistics::discovery::Discovery;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// From this share of the usual passive history on the strategies are asked for a gain that is plain to see.
const ASKED_EARLY: f64 = 0.4;
/// Passive history that takes four times as long as it should and this (seconds) is waited for no longer.
const LATE_HISTORY_S: f64 = 30.0;
/// Observation windows that go to the history.
const WINDOW: Nanoseconds = Nanoseconds::from_secs(60);
/// Outcomes kept for `status`.
const OUTCOMES_MAX: usize = 64;
/// Of a workload that nothing is planned for, this much of the past is kept.
const AT_REST: Nanoseconds = Nanoseconds::from_secs(120);
/// Workloads followed at most; the smallest beyond are not looked at.
const WORKLOADS_MAX: usize = 4096;
/// A workload may seem to use so many times the CPU time that the machine has, and so many seconds more: its threads are read one
/// after another, and their clocks have ticks.
const CPU_SLACK: f64 = 1.5;
const CPU_GRAIN_S: f64 = 0.5;
/// For so long what is read may lie back: all processes are looked at every so many seconds, at most.
const LATE_S: f64 = 30.0;
/// Neighbours that a strategy is shown at most, biggest first.
const NEIGHBOURS_MAX: usize = 64;
/// Programs remembered for ending while they were tried together with others.
const RESTLESS_MAX: usize = 256;
/// The time for which such a program is tried alone doubles so often.
const RESTLESS_DOUBLINGS: u32 = 4;
/// Effector that says on which CPUs threads run.
pub(crate) const PLACEMENT: &str = "thread_placement";
/// Pieces of advice kept at most.
const ADVICE_MAX: usize = 256;

/// How a workload went, so that what was done for it ends.
#[derive(Clone, Copy)]
pub(crate) enum Gone {
    /// Its main process is not there any more.
    Ended,
    /// Another program runs in it.
    Replaced,
}

impl Gone {
    fn why(self) -> &'static str {
        match self {
            Self::Ended => "the workload ended",
            Self::Replaced => "program replaced: its process has executed another one, or the same one anew",
        }
    }

    /// The same of a reader, to those for whose sake it was contained.
    pub(crate) fn of_the_reader(self, id: &WorkloadId) -> String {
        match self {
            Self::Ended => format!("its reader {id} has ended"),
            Self::Replaced => format!("the process of its reader {id} has executed another program"),
        }
    }
}

/// Why a change goes that a person had undone: the sentence about its workload begins with it.
pub const UNDONE_BY_A_PERSON: &str = "undone by a person";
/// Why everything is undone when the mode becomes [`Mode::AdviseOnly`].
const ADVICE_ONLY: &str = "homeostat advises only from now on";

/// A change that exists on the machine, or is on its way in or out.
pub(crate) struct Change {
    /// What is changed, and for whom.
    pub(crate) action: Action,
    pub(crate) strategy: StrategyId,
    /// State it was last sent to, and whether it got there.
    pub(crate) on: bool,
    pub(crate) settled: bool,
    /// Undone for good once it settles.
    pub(crate) leaving: bool,
    /// Failed undos so far.
    pub(crate) failures: u32,
    pub(crate) retry_at: Option<Nanoseconds>,
    /// When it was last sent on or off, or last made progress on the way.
    pub(crate) moved_at: Nanoseconds,
    /// Units that were done at the last report of progress.
    pub(crate) finished: u64,
    /// Since when it is there: when it was begun, and from a verdict that keeps it on when it was proven.
    pub(crate) since_unix: u64,
    pub(crate) bloat: Bytes,
    /// Its undo waits for that of a later change that lies over it.
    pub(crate) waits: bool,
    /// How often it made no progress for long while it was undone.
    pub(crate) stuck: u32,
}

impl Change {
    /// A change that is about to be made.
    pub(crate) fn new(action: Action, strategy: StrategyId, now: Nanoseconds, since_unix: u64) -> Self {
        Self {
            action,
            strategy,
            on: true,
            settled: false,
            leaving: false,
            failures: 0,
            retry_at: None,
            moved_at: now,
            finished: 0,
            since_unix,
            bloat: Bytes::ZERO,
            waits: false,
            stuck: 0,
        }
    }
}

/// The mind.
pub struct Engine {
    pub(crate) policy: Policy,
    pub(crate) machine: Machine,
    pub(crate) strategies: Vec<Box<dyn Strategy>>,
    pub(crate) refusals: BTreeMap<StrategyId, String>,
    pub(crate) now: Nanoseconds,
    pub(crate) unix: u64,
    pub(crate) machine_sample: MachineSample,
    pub(crate) machine_interval: Nanoseconds,
    pub(crate) workloads: BTreeMap<WorkloadId, Watched>,
    pub(crate) experiments: BTreeMap<ExperimentId, Experiment>,
    pub(crate) changes: BTreeMap<ActionId, Change>,
    /// One guard for each accepted change.
    pub(crate) guards: Guards,
    pub(crate) priors: BTreeMap<(Fingerprint, StrategyId), Prior>,
    /// Tries that ended for a neighbour's sake.
    pub(crate) hindered: Hindered,
    /// How much was lost when a protection was tried and refused.
    pub(crate) losses: Losses,
    pub(crate) discovery: Discovery,
    pub(crate) next_experiment: u64,
    pub(crate) next_action: u64,
    pub(crate) paused: bool,
    pub(crate) stopping: Option<bool>,
    pub(crate) finished: bool,
    pub(crate) advice: BTreeMap<String, Advice>,
    pub(crate) outcomes: VecDeque<Outcome>,
    /// Starts of experiments in the last hour.
    pub(crate) starts: Spent,
    /// Harm exposure by time of the verdict, last 24 hours.
    pub(crate) exposure: Spent,
    pub(crate) stalled: Nanoseconds,
    pub(crate) placebo_due: Nanoseconds,
    pub(crate) placebos: u32,
    pub(crate) false_accepts: u32,
    pub(crate) own: OwnCost,
    pub(crate) told_host: BTreeMap<String, ()>,
    /// Workloads that are looked at in detail, counted once per sample.
    looked_at: usize,
    /// Probe pairs begun since the last real trial.
    pub(crate) probes_since_trial: u32,
    /// Programs that ended while they were tried together with others: how often, and until when they are tried alone.
    pub(crate) restless: BTreeMap<Fingerprint, (u32, Nanoseconds)>,
    /// Since when the probes wait for a trial to take its turn.
    pub(crate) turn_over_since: Option<Nanoseconds>,
    /// When memory was short last.
    pub(crate) short_at: Option<Nanoseconds>,
    /// When that began.
    pub(crate) short_since: Option<Nanoseconds>,
    /// Readers that were proven to take a program's memory.
    pub(crate) recall: Recall,
    /// How old readers became that ended while they were tried.
    pub(crate) short_lived: relief::ShortLived,
    /// The work of programs that a person excluded.
    pub(crate) excluded: Excluded,
    /// The controllers at work.
    pub(crate) steered: Vec<Steered>,
    pub(crate) out: Vec<Command>,
}

impl Engine {
    /// A mind that knows the machine, its strategies, its settings and what it remembered.
    pub fn new(machine: Machine, strategies: Vec<Box<dyn Strategy>>, policy: Policy, memory: Memory) -> Self {
        let mut discovery = Discovery::new(policy.discovery.clone());
        for attempt in &memory.tries {
            discovery.record(&attempt.of, attempt.accepted);
        }
        let mut engine = Self {
            machine,
            strategies,
            refusals: BTreeMap::new(),
            now: Nanoseconds::ZERO,
            unix: 0,
            machine_sample: MachineSample::default(),
            machine_interval: Nanoseconds::ZERO,
            workloads: BTreeMap::new(),
            experiments: BTreeMap::new(),
            changes: BTreeMap::new(),
            guards: Guards::default(),
            priors: memory
                .priors
                .into_iter()
                .map(|p| ((p.fingerprint.clone(), p.strategy.clone()), p))
                .collect(),
            hindered: Hindered::new(),
            losses: Losses::new(),
            discovery,
            next_experiment: memory.next_experiment.max(1),
            next_action: memory.next_action.max(1),
            paused: false,
            stopping: None,
            finished: false,
            advice: BTreeMap::new(),
            outcomes: VecDeque::new(),
            starts: Spent::default(),
            exposure: Spent::default(),
            stalled: Nanoseconds::ZERO,
            placebo_due: Nanoseconds::ZERO,
            placebos: memory.placebos,
            false_accepts: memory.false_accepts,
            own: OwnCost::default(),
            told_host: BTreeMap::new(),
            looked_at: 0,
            probes_since_trial: 0,
            restless: BTreeMap::new(),
            turn_over_since: None,
            short_at: None,
            short_since: None,
            recall: Recall::remember(memory.readers),
            short_lived: relief::ShortLived::new(),
            excluded: Excluded::default(),
            steered: Vec::new(),
            out: Vec::new(),
            policy,
        };
        if memory.exposure > 0.0 {
            // Whose it was and when of the day is not known here: it counts from now on, which errs on the side of leaving
            // things alone.
            engine
                .exposure
                .note(Nanoseconds::ZERO, Owner::Machine, memory.exposure);
        }
        for action in memory.kept {
            let strategy = StrategyId::new(action.effector.as_str());
            let mut change = Change::new(action, strategy, Nanoseconds::ZERO, 0);
            change.settled = true;
            engine.changes.insert(change.action.id, change);
        }
        engine.judge_strategies();
        engine
    }

    /// Takes one event and returns what to do, in order. `now` never goes back.
    pub fn step(&mut self, now: Nanoseconds, unix_seconds: u64, event: Event) -> Vec<Command> {
        self.now = self.now.max(now);
        self.unix = unix_seconds;
        match event {
            Event::Sampled(snapshot) => self.on_sample(*snapshot),
            Event::MemoryInspected(id, result) => self.on_memory(&id, result),
            Event::LocalityInspected(id, result) => self.on_locality(&id, result),
            Event::MetersFound(id, result) => self.on_meters(&id, result),
            Event::MeterOpened(id, meter, result) => self.on_meter_opened(&id, &meter, result),
            Event::MeterLost(id, meter, fault) => self.on_meter_lost(&id, &meter, &fault),
            Event::Advanced(action, direction, progress) => self.on_advanced(action, direction, &progress),
            Event::Settled(action, direction, result) => self.on_settled(action, direction, result),
            Event::Unseen => self.on_nothing_seen(),
            Event::Operator(request) => self.on_operator(request),
        }
        self.finish_if_stopped();
        std::mem::take(&mut self.out)
    }

    /// How often to look and at whom in detail.
    pub fn sampling(&self) -> SamplingPlan {
        let looked_at = self.looked_at_in_trials();
        let detail: Vec<WorkloadId> = self
            .workloads
            .values()
            .filter(|w| !w.gone && self.wants_detail(w, &looked_at))
            .map(|w| w.workload.id.clone())
            .collect();
        let compared = self.compared();
        let quick = detail
            .iter()
            .filter(|id| compared.contains(*id))
            .cloned()
            .collect();
        let is_in_a_hurry = self.in_a_hurry() || self.recall.is_in_a_hurry(self.now);
        // While a reader is contained on trial no further one is.
        let is_looked_for = self.short_of_memory() && !self.protects_on_trial();
        let scan_s = if is_looked_for || is_in_a_hurry {
            self.policy.scan_interval_s.min(relief::SCAN_SHORT_S)
        } else {
            self.policy.scan_interval_s
        };
        SamplingPlan {
            scan_every: Nanoseconds::from_secs_f64(scan_s),
            detail_every: Nanoseconds::from_secs_f64(self.policy.detail_interval_s),
            detail,
            quick_every: Nanoseconds::from_secs_f64(
                self.policy.trial_interval_s.min(self.policy.detail_interval_s),
            ),
            quick,
            in_a_hurry: is_in_a_hurry,
            reads: self.recall.expects_anybody(),
            host_every: self.host_every(),
            canary: canary::is_wanted(self),
            spans: self
                .experiments
                .values()
                .flat_map(Experiment::follows)
                .chain(self.guards.all().flat_map(Guard::follows))
                .cloned()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
        }
    }

    /// The workloads that blocks with a change on and off look at now.
    fn compared(&self) -> BTreeSet<&WorkloadId> {
        let running = |e: &&Experiment| !matches!(e.phase, Phase::Concluding);
        let trials = self
            .experiments
            .values()
            .filter(running)
            .flat_map(Experiment::looks_at);
        let probes = self.guards.all().filter(|g| g.probes()).flat_map(Guard::looks_at);
        trials.chain(probes).collect()
    }

    fn wants_detail(&self, w: &Watched, looked_at: &BTreeSet<WorkloadId>) -> bool {
        // As a neighbour whose work is a guardrail of somebody else's trial or probe.
        let seen = !w.open.is_empty()
            && matches!(w.stage, Stage::Improved | Stage::Declined)
            && looked_at.contains(&w.workload.id);
        seen || self.recall.expects(&w.workload.id) || self.is_followed(w)
    }

    /// Whether it is looked at in detail for its own sake.
    fn is_followed(&self, w: &Watched) -> bool {
        match w.stage {
            Stage::Considered | Stage::Observed | Stage::Proposed | Stage::Trying => true,
            Stage::Improved => {
                let id = &w.workload.id;
                w.seeking || self.guards.of(id).any(|g| g.wants_detail(self.now))
            }
            Stage::Ignored | Stage::Declined => false,
        }
    }

    /// The workloads that running trials and probes look at.
    fn looked_at_in_trials(&self) -> BTreeSet<WorkloadId> {
        let trials = self.experiments.values().flat_map(Experiment::looks_at);
        let probes = self.guards.all().flat_map(Guard::looks_at);
        trials.chain(probes).cloned().collect()
    }

    // ---- people -------------------------------------------------------------------------------------------------

    /// Moves a workload to a stage with a sentence, and tells and remembers it unless it was said before.
    pub(crate) fn decide(&mut self, id: &WorkloadId, stage: Stage, text: impl Into<String>, warning: bool) {
        self.decide_as(id, stage, text.into(), warning, true);
    }

    /// The same for several workloads whose change is one: it is told once.
    pub(crate) fn decide_all(&mut self, ids: &[WorkloadId], stage: Stage, text: &str, warning: bool) {
        for (index, id) in ids.iter().enumerate() {
            self.decide_as(id, stage, text.to_owned(), warning, index == 0);
        }
    }

    fn decide_as(&mut self, id: &WorkloadId, stage: Stage, text: String, warning: bool, tell: bool) {
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if w.decide(self.unix, stage, &text) {
            if tell {
                self.out.push(Command::Tell(Story {
                    workload: Some(id.clone()),
                    stage,
                    text: text.clone(),
                    warning,
                }));
            }
            self.out.push(Command::RecordDecision(DecisionRecord {
                workload: Some(id.clone()),
                stage,
                text,
            }));
        }
    }

    /// Adds a line to the story without moving the workload to another stage.
    pub(crate) fn narrate(&mut self, id: &WorkloadId, text: impl Into<String>, warning: bool) {
        let stage = self.workloads.get(id).map_or(Stage::Ignored, |w| w.stage);
        self.decide(id, stage, text, warning);
    }

    /// Whether this was not said before. Bounded: past the bound nothing is new.
    fn first_time(&mut self, text: String) -> bool {
        self.told_host.len() < 256 && self.told_host.insert(text, ()).is_none()
    }

    /// Tells something about the host, once.
    pub(crate) fn tell_host(&mut self, text: impl Into<String>, warning: bool) {
        let text = text.into();
        if self.first_time(text.clone()) {
            self.out.push(Command::Tell(Story {
                workload: None,
                stage: Stage::Ignored,
                text,
                warning,
            }));
        }
    }

    pub(crate) fn advise(&mut self, advice: Vec<Advice>) {
        for a in advice {
            if self.policy.muted_advice.contains(&a.id) {
                continue;
            }
            let new = !self.advice.contains_key(&a.id);
            if new && self.advice.len() >= ADVICE_MAX {
                continue;
            }
            if new {
                let workload = a.workload.clone();
                let text = format!("advice {}: {}. Remedy: {}", a.id, a.finding, a.remedy);
                let stage = workload
                    .as_ref()
                    .and_then(|id| self.workloads.get(id))
                    .map_or(Stage::Declined, |w| w.stage);
                self.out.push(Command::Tell(Story {
                    workload,
                    stage,
                    text,
                    warning: false,
                }));
            }
            self.advice.insert(a.id.clone(), a);
        }
    }

    fn on_operator(&mut self, request: OperatorRequest) {
        match request {
            OperatorRequest::Pause => {
                self.paused = true;
                self.abort_all("paused by an operator");
                self.told_host.remove("resumed: new trials may start");
                self.tell_host("paused: no new trial starts; changes in force stay", false);
            }
            OperatorRequest::Resume => {
                self.paused = false;
                self.told_host
                    .remove("paused: no new trial starts; changes in force stay");
                self.tell_host("resumed: new trials may start", false);
            }
            OperatorRequest::Undo(action) => {
                let whose = self.changes.get(&action).map(|c| c.action.workload.clone());
                self.hold_relief(whose.as_ref());
                self.forget_readers(Some(action));
                self.rest_file(action, UNDONE_BY_A_PERSON);
                self.withdraw(action, UNDONE_BY_A_PERSON);
            }
            OperatorRequest::Yield(action, why) => {
                self.leave_file(action, &why);
                self.forget_readers(Some(action));
                self.withdraw(action, &why);
            }
            OperatorRequest::UndoAll => {
                self.hold_relief(None);
                self.forget_readers(None);
                self.abort_all(UNDONE_BY_A_PERSON);
                for action in self.changes.keys().rev().copied().collect::<Vec<_>>() {
                    self.rest_file(action, UNDONE_BY_A_PERSON);
                    self.withdraw(action, UNDONE_BY_A_PERSON);
                }
            }
            OperatorRequest::Stop { keep } => {
                self.stopping = Some(keep);
                self.abort_all("homeostat stops");
                // What is kept is written down from the oldest on: what lies under another is never left behind without it.
                let mut all: Vec<ActionId> = self.changes.keys().copied().collect();
                if !keep {
                    all.reverse();
                }
                for action in all {
                    let in_force = self
                        .changes
                        .get(&action)
                        .is_some_and(|c| !c.leaving && c.on && c.settled);
                    // What a controller holds is right only while it is there to move it.
                    if keep && in_force && self.steered_by(action).is_none() {
                        self.out.push(Command::Keep(action));
                        self.changes.remove(&action);
                    } else if keep
                        && self.guarded(action)
                        && self.changes.get(&action).is_some_and(|c| !c.leaving)
                    {
                        // Off for a probe: it is proven, so it is kept as soon as it is on again.
                        self.switch(action, true);
                    } else {
                        self.withdraw(action, "homeostat stops");
                    }
                }
            }
            OperatorRequest::Configure(policy) => {
                self.tell_host(
                    format!(
                        "another policy is in force since {} (seconds since the epoch)",
                        self.unix
                    ),
                    false,
                );
                self.configure(*policy);
            }
            OperatorRequest::Machine(machine) => {
                // What works now may be tried. What is in force was proven when it could be: a probe that fails in
                // passing is no reason to undo it.
                self.machine = *machine;
                self.judge_strategies();
                for w in self.workloads.values_mut().filter(|w| w.stage == Stage::Declined) {
                    w.retry_at = self.now;
                }
            }
        }
    }

    fn configure(&mut self, mut policy: Policy) {
        policy.seed = self.policy.seed;
        self.policy = policy;
        let muted = &self.policy.muted_advice;
        self.advice.retain(|id, _| !muted.contains(id));
        self.judge_strategies();
        match self.policy.mode {
            Mode::Act => {}
            // Advice holds nothing in force. It is no refusal of a change: whoever acts again may try it again.
            Mode::AdviseOnly => {
                self.abort_all(ADVICE_ONLY);
                for action in self.changes.keys().rev().copied().collect::<Vec<_>>() {
                    self.withdraw(action, ADVICE_ONLY);
                }
            }
            Mode::Calibrate => {
                let real: Vec<ExperimentId> = self
                    .experiments
                    .iter()
                    .filter(|(_, e)| e.setup.kind != ExperimentKind::Placebo)
                    .map(|(id, _)| *id)
                    .collect();
                for id in real {
                    self.abort(id, "the mode was changed: nothing is tried any more".to_owned());
                }
            }
        }
        for id in self.workloads.keys().cloned().collect::<Vec<_>>() {
            let Some(w) = self.workloads.get(&id) else {
                continue;
            };
            if let Some(why) = self.opted_out(&w.workload) {
                self.leave_alone(&id, &why);
            } else if let Some(w) = self.workloads.get_mut(&id) {
                if w.stage == Stage::Declined {
                    w.retry_at = self.now;
                }
            }
        }
        let acts = self.policy.mode == Mode::Act;
        let withdrawn: Vec<ActionId> = self
            .changes
            .iter()
            .filter(|(id, c)| {
                self.refusals.contains_key(&c.strategy) || (!acts && self.steered_by(**id).is_some())
            })
            .map(|(id, _)| *id)
            .collect();
        for action in withdrawn {
            self.withdraw(action, "its strategy was switched off");
        }
        self.release_readers_left_alone();
    }

    /// Which strategies are not asked at all, and why; which controllers are at work.
    fn judge_strategies(&mut self) {
        self.refusals.clear();
        for strategy in &self.strategies {
            if self.policy.strategies.get(strategy.id().as_str()) == Some(&false) {
                self.refusals
                    .insert(strategy.id(), "switched off in the configuration".to_owned());
            } else if let Err(why) = strategy.usable(&self.machine, self.policy.profile) {
                self.refusals.insert(strategy.id(), why);
            }
        }
        self.appoint_controllers();
    }

    fn finish_if_stopped(&mut self) {
        if self.stopping.is_some() && !self.finished && self.experiments.is_empty() {
            let waiting = self.changes.keys().any(|id| !self.cannot_go(*id));
            if !waiting {
                self.finished = true;
                self.out.push(Command::Finished);
            }
        }
    }

    // ---- observation --------------------------------------------------------------------------------------------

    fn on_sample(&mut self, snapshot: Snapshot) {
        let replaced = self.note_replaced(&snapshot);
        self.machine_sample = snapshot.machine;
        self.machine_interval = snapshot.interval;
        self.note_shortage();
        canary::note_own_cost(self, snapshot.own_cpu, snapshot.own_resident, snapshot.canary);
        for tuner in self.machine_sample.other_tuners.clone() {
            self.tell_host(
                format!("another tuner runs here: {tuner}; what it sets counts as chosen by a person"),
                false,
            );
        }
        if let Some(list) = snapshot.workloads {
            self.update_workloads(list);
        }
        for sample in snapshot.samples {
            // What was counted since the sample before is of both programs.
            if replaced.contains(&sample.id) {
                self.note_executions(&sample);
            } else {
                self.update_sample(sample);
            }
        }
        self.look_out_for_readers();
        self.close_windows();
        let ids: Vec<WorkloadId> = self.workloads.keys().cloned().collect();
        self.looked_at = self.in_detail();
        let in_trials = self.looked_at_in_trials();
        self.release_readers_left_alone();
        self.keep_off_the_excluded();
        for id in &ids {
            self.advance_workload(id, &in_trials);
        }
        self.poll_experiments();
        self.poll_guards();
        self.retry_undos();
        self.poll_changes();
        self.steer();
        self.start_next();
        self.prune();
    }

    /// A sample was due and could not be taken: time passes all the same for trials, guards and undos.
    fn on_nothing_seen(&mut self) {
        self.poll_experiments();
        self.poll_guards();
        self.retry_undos();
        self.poll_changes();
        self.prune();
    }

    fn update_workloads(&mut self, list: Vec<Workload>) {
        let mut seen = BTreeSet::new();
        for workload in list {
            self.know_by_former_name(&workload);
            let room = self.workloads.len() < WORKLOADS_MAX;
            seen.insert(workload.id.clone());
            match self.workloads.get_mut(&workload.id) {
                Some(w) if !w.gone && w.workload.processes.first() == workload.processes.first() => {
                    w.workload = workload;
                }
                Some(_) => {
                    // The same name with another main process: restarted between two scans.
                    self.vanish(&workload.id, Gone::Ended);
                    self.workloads
                        .insert(workload.id.clone(), Watched::new(workload, self.now));
                }
                None if room => {
                    self.workloads
                        .insert(workload.id.clone(), Watched::new(workload, self.now));
                }
                None => {}
            }
        }
        let gone: Vec<WorkloadId> = self
            .workloads
            .iter()
            .filter(|(id, w)| !w.gone && !seen.contains(*id))
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            self.vanish(&id, Gone::Ended);
        }
    }

    /// The workloads whose main process has executed a program since the sample before. The process is the same, but what runs in it has
    /// another unit of work, other memory and perhaps another name in the history: as after a restart, what was done for the one
    /// before ends, and the one that is there begins anew.
    fn note_replaced(&mut self, snapshot: &Snapshot) -> BTreeSet<WorkloadId> {
        let replaced: BTreeSet<WorkloadId> = snapshot
            .samples
            .iter()
            .filter(|s| {
                self.workloads.get(&s.id).is_some_and(|w| {
                    !w.gone
                        && w.executions.is_some_and(|before| s.executions > before)
                        && has_its_main_process(&w.workload, snapshot)
                })
            })
            .map(|s| s.id.clone())
            .collect();
        for id in &replaced {
            self.replace(id);
        }
        replaced
    }

    fn replace(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let (workload, followed) = (w.workload.clone(), w.stage > Stage::Ignored);
        let tried: Vec<ExperimentId> = self
            .experiments
            .values()
            .filter(|e| e.setup.panel.has(id) && !matches!(e.phase, Phase::Concluding))
            .map(|e| e.setup.id)
            .collect();
        let changed = self
            .changes
            .values()
            .any(|c| c.action.workload == *id && !matches!(c.action.target, Target::Nothing));
        self.vanish(id, Gone::Replaced);
        // The process of a reader is still contained, and it was another program that was to be.
        let contained: Vec<ActionId> = self
            .changes
            .iter()
            .filter(|(_, c)| matches!(&c.action.target, Target::Reader(r) if r.workload == *id))
            .map(|(action, _)| *action)
            .collect();
        for action in contained {
            self.withdraw(action, &Gone::Replaced.of_the_reader(id));
        }
        let mut text = Gone::Replaced.why().to_owned();
        if !workload.executable.is_empty() {
            text += &format!(" (it was {})", workload.executable);
        }
        for trial in tried {
            text += &format!("; experiment {trial} is aborted");
        }
        if changed {
            text += "; what was changed for it is undone";
        }
        self.workloads
            .insert(id.clone(), Watched::new(workload, self.now));
        // Shells execute all the time: told of what was looked at only.
        if followed || changed {
            self.decide(id, Stage::Ignored, text, false);
        }
    }

    /// The workload ended, or another program runs in its process.
    fn vanish(&mut self, id: &WorkloadId, gone: Gone) {
        self.reader_is_gone(id, gone);
        if let Some(w) = self.workloads.get_mut(id) {
            w.gone = true;
            for meter in std::mem::take(&mut w.open) {
                self.out.push(Command::CloseMeter(id.clone(), meter));
            }
        }
        let mut breaks_off = false;
        for e in self.experiments.values_mut().filter(|e| e.setup.panel.has(id)) {
            e.orphans.insert(id.clone());
            breaks_off |= e.setup.panel.is_joint() && !matches!(e.phase, Phase::Concluding);
        }
        if breaks_off {
            self.note_restless(id);
        }
        self.abort_workload(id, gone.why());
        for action in self.actions_of(id) {
            self.withdraw(action, gone.why());
        }
        self.guards.release_all(id, &self.changes, self.now);
        self.advice.retain(|_, a| a.workload.as_ref() != Some(id));
    }

    /// A program that ended while it was tried together with others is tried alone from now on, for twice as long each
    /// time: one that restarts again and again must not keep its company from ever being tried.
    fn note_restless(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let fingerprint = w.workload.fingerprint.clone();
        let now = self.now;
        if self.restless.len() >= RESTLESS_MAX && !self.restless.contains_key(&fingerprint) {
            self.restless.retain(|_, (_, until)| *until > now);
        }
        if self.restless.len() >= RESTLESS_MAX && !self.restless.contains_key(&fingerprint) {
            return;
        }
        let (ends, until) = self.restless.entry(fingerprint).or_default();
        *until = now + ALONE * (1 << (*ends).min(RESTLESS_DOUBLINGS));
        *ends = ends.saturating_add(1);
    }

    /// Share of the machine's CPUs that is busy, 0 to 1; not a number where that was not read.
    pub(crate) fn machine_busy(&self) -> f64 {
        let cpus = self.machine.general_cpus().count().max(1) as f64;
        let busy = self.machine_sample.cpu_busy.as_secs_f64() / (self.machine_interval.as_secs_f64() * cpus);
        busy.clamp(0.0, 1.0)
    }

    fn note_executions(&mut self, sample: &WorkloadSample) {
        if let Some(w) = self.workloads.get_mut(&sample.id) {
            w.executions = Some(sample.executions);
        }
    }

    fn update_sample(&mut self, sample: WorkloadSample) {
        self.note_executions(&sample);
        let cpus = self.machine.cpus.len().max(1) as f64;
        let interval = self.machine_interval.as_secs_f64();
        let idle = if interval > 0.0 {
            (1.0 - (self.machine_sample.cpu_busy + self.machine_sample.cpu_steal).as_secs_f64()
                / (interval * cpus))
                .clamp(0.0, 1.0)
        } else {
            1.0
        };
        let waits = self.lives_on_the_file_cache(&sample);
        let uses_files = waits || self.works_on_the_file_cache(&sample);
        let Some(w) = self.workloads.get_mut(&sample.id) else {
            return;
        };
        if w.gone {
            return;
        }
        if uses_files {
            w.used_files_at = Some(self.now);
        }
        if waits {
            w.lost_at = Some(self.now);
        }
        // More than all CPUs have is a counter that was read wrong: as if it had not been read. What a child used that has ended
        // comes in one lump, for the time since it was seen last.
        let length = sample.interval.as_secs_f64();
        let most = |of: f64| CPU_SLACK * of * length.max(LATE_S) + CPU_GRAIN_S;
        let credible = sample.cpu.as_secs_f64() <= most(cpus)
            && sample.runqueue_wait.as_secs_f64() <= most(f64::from(sample.threads.max(1)).max(cpus));
        if sample.interval.0 > 0 && credible {
            let read = MeterInterval::of(&sample);
            w.series.push(Interval {
                end: self.now,
                seconds: read.seconds,
                cpu: read.cpu,
                wait: read.wait,
                machine_idle: idle,
                churn: sample.churn,
                faults: (sample.faults_minor, sample.faults_major),
                work: read.work,
                counted: read.counted,
                lags: read.lags,
                spans: sample.spans.as_ref().and_then(|s| s.as_ref().ok()).cloned(),
            });
        }
        if matches!(w.stage, Stage::Ignored | Stage::Declined) && w.open.is_empty() {
            w.series.forget(self.now.saturating_sub(AT_REST));
        }
        w.load = w.series.load(self.now, self.machine.cpus.len());
        let (id, anonymous) = (sample.id.clone(), sample.anonymous);
        self.recall.note_read(&id, sample.reads.from_storage);
        w.rereads = [w.rereads[1], Rereads::of(&sample, self.machine.page_size)];
        w.sample = Some(sample);
        self.note_growth(&id, anonymous);
        self.note_loss(&id);
    }

    /// Sends finished observation windows to the history.
    fn close_windows(&mut self) {
        let now = self.now;
        for w in self.workloads.values_mut() {
            let Some(chosen) = &w.meter else {
                w.window_from = now;
                continue;
            };
            if now - w.window_from < WINDOW {
                continue;
            }
            let meter = chosen.candidate.id.clone();
            let from = std::mem::replace(&mut w.window_from, now);
            let sums = w.series.sums(&meter, from, now);
            let Some(sample) = w.sample.as_ref().filter(|_| sums.intervals > 0) else {
                continue;
            };
            let rates: Vec<f64> = w
                .series
                .readings(&meter, from)
                .iter()
                .filter(|r| r.1 > 0.0)
                .map(|r| r.0 / r.1)
                .collect();
            let mean = homeostat_statistics::robust::mean(&rates);
            let variation = if rates.len() > 1 && mean > 0.0 {
                homeostat_statistics::robust::variance(&rates).sqrt() / mean
            } else {
                f64::NAN
            };
            let mut wait = 0.0;
            let (mut minor, mut major) = (0, 0);
            for i in w.series.since(from) {
                wait += i.wait;
                minor = i.faults.0.saturating_add(minor);
                major = i.faults.1.saturating_add(major);
            }
            self.out
                .push(Command::RecordWindow(homeostat_model::WindowRecord {
                    workload: w.workload.id.clone(),
                    fingerprint: w.workload.fingerprint.clone(),
                    length: Nanoseconds::from_secs_f64(sums.seconds),
                    samples: sums.intervals as u32,
                    meter: Some(meter),
                    work: sums.work,
                    variation,
                    cpu: Nanoseconds::from_secs_f64(sums.cpu),
                    runqueue_wait: Nanoseconds::from_secs_f64(wait),
                    faults_minor: minor,
                    faults_major: major,
                    resident: sample.resident,
                    anonymous: sample.anonymous,
                    shared: sample.shared,
                    huge: sample.huge,
                }));
        }
    }

    fn prune(&mut self) {
        let hour = self.now.saturating_sub(Nanoseconds::from_secs(3600));
        self.starts.forget_before(hour);
        let day = self.now.saturating_sub(Nanoseconds::from_secs(86_400));
        self.exposure.forget_before(day);
        while self.outcomes.len() > OUTCOMES_MAX {
            self.outcomes.pop_back();
        }
        if self.workloads.values().any(|w| w.gone) {
            let busy: BTreeSet<WorkloadId> =
                self.changes.values().map(|c| c.action.workload.clone()).collect();
            self.workloads.retain(|id, w| !w.gone || busy.contains(id));
        }
    }

    // ---- recognition --------------------------------------------------------------------------------------------

    /// Why a person does not want this workload touched, if so.
    pub(crate) fn opted_out(&self, workload: &Workload) -> Option<String> {
        if let Some(rule) = self.rule(workload) {
            if rule.never {
                return Some(format!(
                    "left alone: the configuration says never for {:?}",
                    rule.pattern
                ));
            }
        }
        if let Some(by) = &workload.choice.never {
            return Some(format!("left alone: {by}"));
        }
        // A member's own `always` does not speak for one that cannot be read; the unit's does, and then nothing is unknown.
        let said_always = self.rule(workload).is_some_and(|r| r.always);
        let why = workload.choice.unknown.as_ref().filter(|_| !said_always)?;
        Some(format!(
            "left alone: whether a person opted it out is not known: {why}; a rule in the configuration with always = true, or \
             Environment=HOMEOSTAT=always in its unit, allows changes"
        ))
    }

    fn rule(&self, workload: &Workload) -> Option<&crate::policy::WorkloadRule> {
        self.policy
            .rule_for(&[workload.id.as_str(), &workload.program, &workload.executable])
    }

    /// Why the workload is not (yet) considered.
    fn below_floors(&self, w: &Watched) -> Option<String> {
        if let Some(why) = self.opted_out(&w.workload) {
            return Some(why);
        }
        let Some(sample) = &w.sample else {
            return Some("not sampled yet".into());
        };
        let always = w.workload.choice.always.is_some() || self.rule(&w.workload).is_some_and(|r| r.always);
        if always {
            return None;
        }
        if !w.load.known {
            return Some("seen once; what CPU it uses is known after the next look".into());
        }
        // What it needs is in the file cache, or was until somebody took it.
        if self.lived_on_the_file_cache(w) && sample.age.as_secs_f64() >= self.policy.age_min_s {
            return None;
        }
        if w.load.cpus < self.policy.cpu_min {
            return Some(format!(
                "uses {:.2} CPUs (at least {:.2})",
                w.load.cpus, self.policy.cpu_min
            ));
        }
        let floor = Bytes::from_mib(self.policy.memory_min_mib);
        if sample.resident.0 < floor.0 {
            return Some(format!("{} resident (at least {floor})", sample.resident));
        }
        if sample.age.as_secs_f64() < self.policy.age_min_s {
            return Some(format!(
                "runs since {} (at least {:.0} s)",
                sample.age, self.policy.age_min_s
            ));
        }
        None
    }

    fn in_detail(&self) -> usize {
        self.workloads
            .values()
            .filter(|w| !w.gone && self.is_followed(w))
            .count()
    }

    fn advance_workload(&mut self, id: &WorkloadId, in_trials: &BTreeSet<WorkloadId>) {
        let Some(w) = self.workloads.get(id) else { return };
        if w.gone || self.stopping.is_some() {
            return;
        }
        let (stage, retry_at) = (w.stage, w.retry_at);
        // Without it nobody can watch what is in force.
        if w.reopening.is_due(self.now) && self.guards.any(id) {
            self.open_own_meter(id);
        }
        match stage {
            Stage::Ignored => self.consider(id),
            Stage::Considered => self.judge_meters(id),
            Stage::Observed => self.observe(id),
            Stage::Proposed => {
                if self.seek_relief(id) || self.guards.any(id) {
                    return;
                }
                if let Some(why) = self.below_floors_now(id) {
                    self.leave_alone(id, &why);
                }
            }
            Stage::Declined => {
                if self.seek_relief(id) {
                    return;
                }
                if self.now >= retry_at && !in_trials.contains(id) {
                    if let Some(w) = self.workloads.get_mut(id) {
                        w.reset();
                    }
                }
            }
            Stage::Improved => {
                if !self.seek_relief(id) {
                    self.seek_more(id);
                }
            }
            Stage::Trying => {}
        }
    }

    fn below_floors_now(&self, id: &WorkloadId) -> Option<String> {
        self.workloads.get(id).and_then(|w| self.below_floors(w))
    }

    /// Stops looking at a workload; its meters are closed and its changes withdrawn if a person opted out.
    pub(crate) fn leave_alone(&mut self, id: &WorkloadId, why: &str) {
        let opted_out = self
            .workloads
            .get(id)
            .is_some_and(|w| self.opted_out(&w.workload).is_some());
        if opted_out {
            self.abort_workload(id, why);
            for action in self.actions_of(id) {
                self.withdraw(action, why);
            }
            self.guards.release_all(id, &self.changes, self.now);
        }
        self.close_meters(id);
        let told = self.workloads.get(id).is_some_and(|w| w.stage > Stage::Ignored);
        if told || opted_out {
            self.decide(id, Stage::Ignored, why.to_owned(), false);
        }
        if let Some(w) = self.workloads.get_mut(id) {
            w.reset();
            w.summary = why.to_owned();
        }
    }

    fn consider(&mut self, id: &WorkloadId) {
        if let Some(why) = self.below_floors_now(id) {
            let opted_out = self
                .workloads
                .get(id)
                .filter(|w| self.opted_out(&w.workload).is_some())
                .map(|w| format!("{}: {why}", w.workload.program));
            // A program that starts a process for every job would fill the log: its rule is told once.
            if opted_out.is_some_and(|said| self.first_time(said)) {
                self.decide(id, Stage::Ignored, why, false);
            } else if let Some(w) = self.workloads.get_mut(id) {
                w.summary = why;
            }
            return;
        }
        if self.looked_at >= self.policy.detail_workloads_max {
            if let Some(w) = self.workloads.get_mut(id) {
                w.summary = format!(
                    "waits: {} workloads are being looked at already",
                    self.policy.detail_workloads_max
                );
            }
            return;
        }
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        self.looked_at += 1;
        w.finding = true;
        w.series.clear();
        w.tier = 0;
        w.judge_from(self.now);
        let resident = w.sample.as_ref().map_or(Bytes::ZERO, |s| s.resident);
        let text = format!(
            "{} ({} process{}, {:.2} CPUs, {resident}); looking for a way to measure its work",
            w.workload.program,
            w.workload.processes.len(),
            if w.workload.processes.len() == 1 { "" } else { "es" },
            w.load.cpus,
        );
        self.out.push(Command::FindMeters(id.clone()));
        self.decide(id, Stage::Considered, text, false);
    }

    // ---- meters -------------------------------------------------------------------------------------------------

    fn on_meters(&mut self, id: &WorkloadId, result: Result<Vec<homeostat_model::MeterCandidate>, Fault>) {
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.finding = false;
        if w.stage != Stage::Considered {
            return;
        }
        match result {
            Ok(candidates) => {
                w.candidates = candidates;
                w.tier = 0;
                self.open_tier(id);
            }
            Err(fault) => {
                let text = format!("no way to look for meters: {}", fault.text);
                self.refuse(id, Declined::because(text), fault.kind == FaultKind::Denied);
            }
        }
    }

    /// Opens the meters of the present tier.
    fn open_tier(&mut self, id: &WorkloadId) {
        let now = self.now;
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        let Some(classes) = meters::TIERS.get(w.tier) else {
            return;
        };
        w.judge_from(now);
        let mut opened = Vec::new();
        for c in &w.candidates {
            if c.refused.is_none() && classes.contains(&c.class) && !w.open.contains(&c.id) {
                opened.push(c.id.clone());
            }
        }
        for meter in opened {
            w.open.push(meter.clone());
            self.out.push(Command::OpenMeter(id.clone(), meter));
        }
    }

    fn on_meter_opened(
        &mut self,
        id: &WorkloadId,
        meter: &homeostat_model::MeterId,
        result: Result<(), Fault>,
    ) {
        let (now, unix) = (self.now, self.unix);
        let longest = Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        let judges = w.is_judged_by(meter);
        let candidate = w.candidates.iter_mut().find(|c| c.id == *meter);
        let Err(fault) = result else {
            let was_lost = w.lost.remove(meter).is_some();
            if judges {
                w.reopening.note_opened(now);
                // It was chosen without one: what kept it from being opened again is over.
                if let Some(c) = candidate {
                    c.refused = None;
                }
                if was_lost {
                    w.note(unix, format!("the meter {meter}, which was lost, is read again"));
                }
            }
            return;
        };
        w.open.retain(|m| m != meter);
        if let Some(c) = candidate {
            c.refused = Some(fault.text.clone());
        }
        if judges {
            w.reopening.put_off(now, longest);
        }
        self.note_unread(id, meter, &fault.text);
    }

    /// A trial that is judged by it ends with the next sample. Who only looks on in a trial is told; while none runs, what becomes of it
    /// shows in what is read. The meter that a guard goes by is opened again after a while.
    fn on_meter_lost(&mut self, id: &WorkloadId, meter: &MeterId, fault: &Fault) {
        let (now, unix) = (self.now, self.unix);
        let longest = Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let is_guarded = self.guards.any(id);
        let Some(w) = self.workloads.get_mut(id).filter(|w| !w.gone) else {
            return;
        };
        // It is closed already.
        w.open.retain(|m| m != meter);
        w.lost.insert(meter.clone(), fault.text.clone());
        if w.stage == Stage::Considered {
            if let Some(c) = w.candidates.iter_mut().find(|c| c.id == *meter) {
                // Of what is not open nothing else will say why it does not do.
                c.refused = Some(format!("it was lost: {}", fault.text));
            }
        }
        if w.is_judged_by(meter) {
            w.reopening.put_off(now, longest);
            if is_guarded {
                let text = format!(
                    "the meter {meter}, by which what is in force is watched, was lost, and is opened again in a while: {}",
                    fault.text
                );
                w.note(unix, text);
            }
        }
        self.note_unread(id, meter, &fault.text);
        let told: Vec<String> = self
            .experiments
            .values()
            .filter(|e| e.guards_by(id, meter))
            .map(|e| {
                format!(
                    "the meter {meter}, by which harm to it was to be seen in experiment {}, was lost: {}",
                    e.setup.id, fault.text
                )
            })
            .collect();
        for text in told {
            self.narrate(id, text, false);
        }
    }

    fn judge_meters(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else {
            return;
        };
        if w.finding || w.series.since(w.judging_since).count() < w.judged_after {
            return;
        }
        let judged = |limit| judge(w, limit, &self.policy);
        let mut assessed = match judged(NoiseLimit::Kept) {
            Judged::Settled(assessed) => assessed,
            Judged::NotYet(reads_on) => {
                if let Some(w) = self.workloads.get_mut(id) {
                    w.reads_on = reads_on;
                }
                return;
            }
        };
        // Who has one that is steady also now needs no other.
        let in_a_loss = w.lost_at.is_some_and(|at| at > w.judging_since)
            && assessed.values().all(|a| a.refused.is_some())
            && self.relieves(id);
        if in_a_loss {
            if let Judged::Settled(lifted) = judged(NoiseLimit::Lifted) {
                assessed = lifted;
            }
        }
        let known = || {
            w.candidates
                .iter()
                .filter_map(|c| Some((c, assessed.get(&c.id)?)))
        };
        let best = |class: Option<MeterClass>| {
            let of_it = known().filter(|(c, _)| class.is_none_or(|k| c.class == k));
            meters::choose(of_it, &w.series, w.judging_since).map(|b| Chosen {
                candidate: b.candidate.clone(),
                assessment: b.assessment.clone(),
                in_a_loss,
            })
        };
        let application = best(Some(MeterClass::Application));
        let any = best(None);
        let next = meters::next_tier(w.tier, &w.candidates, application.is_some(), any.is_some());
        let chosen = application.or(any);
        let looked_for_after = chosen.as_ref().filter(|_| !in_a_loss).and_then(|chosen| {
            meters::bursts_are_looked_for_after(&chosen.candidate, known(), &w.series, w.judging_since)
        });
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if let Some(next) = next {
            w.tier = next;
            self.open_tier(id);
            return;
        }
        if let Some(readings) = looked_for_after {
            w.reads_on = Some(format!(
                "bytes and calls vary against each other, and which of them comes in bursts is not clear yet; that is judged after {readings} \
                 readings"
            ));
            // Until then chance would decide, and one burst refuse both.
            w.judged_after = readings;
            return;
        }
        for (meter, a) in &assessed {
            if let Some(c) = w.candidates.iter_mut().find(|c| c.id == *meter) {
                c.refused.clone_from(&a.refused);
            }
        }
        match chosen {
            Some(chosen) => self.choose_meter(id, chosen),
            None => {
                let text = no_meter(&w.candidates);
                self.refuse(id, Declined::because(text), false);
            }
        }
    }

    fn choose_meter(&mut self, id: &WorkloadId, chosen: Chosen) {
        let now = self.now;
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.confirming = (chosen.candidate.class == MeterClass::Kernel)
            .then(|| {
                let others: Vec<_> = w
                    .candidates
                    .iter()
                    .filter(|o| o.id != chosen.candidate.id && w.open.contains(&o.id))
                    .collect();
                meters::confirming(&chosen.candidate, &others, &w.series, w.judging_since)
            })
            .flatten();
        for meter in std::mem::take(&mut w.open) {
            if meter == chosen.candidate.id {
                w.open.push(meter);
            } else {
                self.out.push(Command::CloseMeter(id.clone(), meter));
            }
        }
        (w.objective, w.objective_reason) = Objective::of(&w.load, w.offered);
        // What was read while the meter was judged is passive history too.
        w.observed_since = w.judging_since;
        w.window_from = now;
        let by_what = if chosen.in_a_loss {
            "it waits for storage while memory is short, so that is more than a meter may vary otherwise, and it judges what is done \
             against that only until it is seen without"
                .to_owned()
        } else {
            format!("{} judges, because {}", w.objective.words(), w.objective_reason)
        };
        let lag = meters::lag(&chosen.candidate, &w.series);
        let text = format!(
            "its work is measured in {} by {} ({:.0} per second, noise {:.1} %, cost {:.2} % of its CPU{}{}); {by_what}",
            plural(&chosen.candidate.unit),
            chosen.candidate.id,
            chosen.assessment.rate,
            chosen.assessment.noise * 100.0,
            chosen.assessment.cost * 100.0,
            meters::in_turns(chosen.assessment.counted, lag),
            meters::vouched(&chosen.assessment),
        );
        w.meter = Some(chosen);
        self.decide(id, Stage::Observed, text, false);
    }

    pub(crate) fn close_meters(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        for meter in std::mem::take(&mut w.open) {
            self.out.push(Command::CloseMeter(id.clone(), meter));
        }
    }

    // ---- proposals ----------------------------------------------------------------------------------------------

    /// Declines a workload for a while; with changes in force it stays improved and is looked at again later.
    pub(crate) fn refuse(&mut self, id: &WorkloadId, declined: Declined, warning: bool) {
        if self.guards.any(id) {
            self.back_to_improved(id, &declined.reason, warning);
            self.advise(declined.advice);
            return;
        }
        if !self.lend_meter(id) {
            self.close_meters(id);
        }
        let retry = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        self.decide(id, Stage::Declined, declined.reason, warning);
        if let Some(w) = self.workloads.get_mut(id) {
            w.retry_at = retry;
            w.forget_inspections();
            w.proposed = None;
        }
        self.advise(declined.advice);
    }

    /// Nothing further for now: what is in force stays, and the question is put again later.
    fn back_to_improved(&mut self, id: &WorkloadId, why: &str, warning: bool) {
        let more_at = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.more_at = more_at;
        w.seeking = false;
        w.forget_inspections();
        w.proposed = None;
        let news = w.nothing_further(why);
        if news || w.stage != Stage::Improved {
            self.decide(id, Stage::Improved, why.to_owned(), warning);
        }
        self.summarise(id);
    }

    /// Sets the summary of an improved workload to what is in force.
    pub(crate) fn summarise(&mut self, id: &WorkloadId) {
        let mut guards: Vec<&Guard> = self.guards.of(id).collect();
        if guards.is_empty() {
            return;
        }
        guards.sort_by_key(|g| (g.since, g.key));
        let summary = guards
            .into_iter()
            .map(|g| g.sentence.as_str())
            .collect::<Vec<_>>()
            .join("; ");
        if let Some(w) = self.workloads.get_mut(id) {
            if w.stage == Stage::Improved {
                w.summary = summary;
            }
        }
    }

    /// After an experiment: gathers passive history anew, since the level may have moved, and asks the strategies
    /// that were not asked yet.
    pub(crate) fn look_further(&mut self, id: &WorkloadId, settling: Nanoseconds) {
        self.ask_after(id, settling);
        if !self.guards.any(id) {
            self.decide(id, Stage::Observed, "the other strategies are asked", false);
        }
    }

    /// Gathers passive history anew from so much later on, and asks the strategies then.
    pub(crate) fn ask_after(&mut self, id: &WorkloadId, wait: Nanoseconds) {
        let from = self.now + wait;
        let improved = self.guards.any(id);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.observed_since = from;
        w.more_at = from;
        w.forget_inspections();
        w.proposed = None;
        w.seeking = improved;
    }

    /// Why a strategy that has a change in force on the workload is not asked again; `None` when it is.
    pub(crate) fn has_enough(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<&'static str> {
        let again = Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let w = self.workloads.get(id);
        if w.is_some_and(|w| w.rests_from(strategy, self.now)) && !self.another_place_is_open(id, strategy) {
            return Some("a further step was refused not long ago");
        }
        self.guards.of(id).find_map(|g| {
            if g.strategy != *strategy {
                None
            } else if g.pieces_grow(&self.changes) {
                Some("its guard adds what comes later")
            } else if self.now - g.since < again {
                Some("in force since a short time")
            } else {
                None
            }
        })
    }

    /// Whether any strategy but `except` would be asked about the workload now.
    pub(crate) fn anyone_to_ask(&self, id: &WorkloadId, except: Option<&StrategyId>) -> bool {
        self.strategies.iter().any(|s| {
            let strategy = s.id();
            Some(&strategy) != except
                && self.strategy_refusal(id, &strategy).is_none()
                && self.has_enough(id, &strategy).is_none()
        })
    }

    /// A workload with changes in force: gathers passive history once nothing moves any more, then asks what else
    /// could help.
    fn seek_more(&mut self, id: &WorkloadId) {
        let now = self.now;
        let may = !self.paused && self.policy.mode == Mode::Act;
        let unrest = !self.guards.any(id) || self.guards.of(id).any(|g| g.busy() || g.parts_wait());
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if now < w.more_at || w.inspecting {
            return;
        }
        if !may || unrest {
            w.seeking = false;
            return;
        }
        if !w.seeking {
            if !self.anyone_to_ask(id, None) {
                let later = now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
                if let Some(w) = self.workloads.get_mut(id) {
                    w.more_at = later;
                }
                return;
            }
            if let Some(w) = self.workloads.get_mut(id) {
                w.seeking = true;
                w.observed_since = now;
            }
        }
        if self.history_suffices(id) {
            self.ask_strategies(id);
        }
    }

    /// Gathers passive history, then asks the strategies.
    fn observe(&mut self, id: &WorkloadId) {
        if let Some(why) = self.below_floors_now(id) {
            self.leave_alone(id, &why);
            return;
        }
        if self.seek_relief(id) {
            return;
        }
        if !self.history_suffices(id) {
            self.ask_early(id);
            return;
        }
        if self.placebo_wanted(id) {
            self.start_placebo(id);
            return;
        }
        if self.policy.mode == Mode::Calibrate {
            return;
        }
        self.ask_strategies(id);
    }

    /// Asks the strategies while the passive history is still short: a large gain needs little of it to be tried, and costs
    /// most while it is waited for. Whatever else they say is not taken down; they are asked again in time.
    fn ask_early(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let since = w.observed_since;
        let early = w.stage == Stage::Observed
            && !w.judges_a_loss_only()
            && w.asked_early != Some(since)
            && self.now >= since + Nanoseconds::from_secs_f64(self.policy.observe_min_s * ASKED_EARLY)
            && !self.paused
            && self.policy.mode == Mode::Act;
        if !early {
            return;
        }
        for index in 0..self.strategies.len() {
            let strategy = self.strategies[index].id();
            if self.has_enough(id, &strategy).is_some() || self.strategy_refusal(id, &strategy).is_some() {
                continue;
            }
            match self.opinion(id, index) {
                None => return,
                Some(opinion @ (Opinion::InspectMemory | Opinion::InspectLocality)) => {
                    if self
                        .inspect(id, &strategy, opinion == Opinion::InspectMemory)
                        .is_none()
                    {
                        return;
                    }
                }
                Some(Opinion::Propose(p)) if is_plain(log_gain(p.predicted.lower)) => {
                    self.ask_strategies(id);
                    return;
                }
                Some(Opinion::Propose(_)) => break,
                Some(Opinion::Decline(_)) => {}
            }
        }
        if let Some(w) = self.workloads.get_mut(id) {
            w.asked_early = Some(since);
        }
    }

    /// Judges a meter again that was chosen while the program lost its pages, when it has not for a while; one that varies too much also
    /// then, or of a program that never ceases to lose them, judges nothing else.
    fn judge_again(&mut self, id: &WorkloadId) {
        let now = self.now;
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        let Some(chosen) = &mut w.meter else { return };
        let since = w.lost_at.map_or(w.observed_since, |at| at.max(w.observed_since));
        let limit_s = 4.0 * self.policy.observe_min_s + LATE_HISTORY_S;
        match meters::assess_again(
            &chosen.candidate,
            &chosen.assessment,
            &w.series,
            since,
            &self.policy,
        ) {
            // The load is known over that span: who waited for storage looked as if little was asked of it.
            Some(_) if now < since + LOAD_SPAN => {}
            Some(Ok(assessment)) => {
                // What was measured in the loss is no history of the program.
                w.observed_since = since;
                (w.objective, w.objective_reason) = Objective::of(&w.load, w.offered);
                let text = format!(
                    "it loses no pages any more, and {} varies by {:.1} %: it judges any change from now on; {}, because {}",
                    chosen.candidate.id,
                    assessment.noise * 100.0,
                    w.objective.words(),
                    w.objective_reason
                );
                chosen.in_a_loss = false;
                chosen.assessment = assessment;
                if w.stage == Stage::Observed {
                    self.decide(id, Stage::Observed, text, false);
                } else {
                    w.note(self.unix, text);
                }
            }
            Some(Err(why)) => {
                self.refuse(id, Declined::because(why), false);
                // Another meter may do now.
                let soon = now + relief::AGAIN;
                if let Some(w) = self.workloads.get_mut(id).filter(|w| w.stage == Stage::Declined) {
                    w.retry_at = soon;
                }
            }
            None if (now - since).as_secs_f64() > limit_s => {
                let text = format!("the meter {} delivers no readings any more", chosen.candidate.id);
                self.refuse(id, Declined::because(text), false);
            }
            None => {
                let waited = (now - w.observed_since).as_secs_f64();
                if waited > limit_s {
                    let text = format!(
                        "{} varies by {:.0} % per CPU second from block to block while the program waits for storage, which it still did \
                         lately after {waited:.0} s: only what is done against that can be judged by it",
                        chosen.candidate.id,
                        chosen.assessment.noise * 100.0
                    );
                    self.refuse(id, Declined::because(text), false);
                }
            }
        }
    }

    /// Whether there is enough passive history to ask the strategies. A meter that fell silent ends the wait.
    fn history_suffices(&mut self, id: &WorkloadId) -> bool {
        if self.workloads.get(id).is_some_and(Watched::judges_a_loss_only) {
            self.judge_again(id);
            return false;
        }
        let Some(w) = self.workloads.get(id) else {
            return false;
        };
        let Some(chosen) = &w.meter else { return false };
        let known = self.strategies.iter().any(|s| {
            self.has_enough(id, &s.id()).is_none()
                && self
                    .priors
                    .get(&(w.workload.fingerprint.clone(), s.id()))
                    .is_some_and(|p| p.verdict == Verdict::Accepted)
        });
        // The noise of a workload that was tried before is known already.
        let needed = if known || self.guards.any(id) {
            self.policy.observe_min_s / 2.0
        } else {
            self.policy.observe_min_s
        };
        let readings = w.series.readings(&chosen.candidate.id, w.observed_since);
        let seconds: f64 = readings.iter().map(|r| r.1).sum();
        if seconds < needed {
            let waited = (self.now - w.observed_since).as_secs_f64();
            if waited > 4.0 * needed + LATE_HISTORY_S {
                let text = format!(
                    "the meter {} delivered {seconds:.0} s of readings in {waited:.0} s",
                    chosen.candidate.id
                );
                self.refuse(id, Declined::because(text), false);
            }
            return false;
        }
        true
    }

    fn ask_strategies(&mut self, id: &WorkloadId) {
        let mut declined: Vec<String> = Vec::new();
        let mut advice = Vec::new();
        for index in 0..self.strategies.len() {
            let strategy_id = self.strategies[index].id();
            if self.has_enough(id, &strategy_id).is_some() {
                continue;
            }
            if let Some(why) = self.strategy_refusal(id, &strategy_id) {
                declined.push(why);
                continue;
            }
            if let Some(why) = self.reaches_excluded(&strategy_id) {
                declined.push(format!("{strategy_id}: {why}"));
                continue;
            }
            let Some(opinion) = self.opinion(id, index) else {
                return;
            };
            match opinion {
                Opinion::InspectMemory | Opinion::InspectLocality => {
                    match self.inspect(id, &strategy_id, opinion == Opinion::InspectMemory) {
                        Some(why) => declined.push(why),
                        None => return,
                    }
                }
                Opinion::Decline(d) => {
                    declined.push(d.reason);
                    advice.extend(d.advice);
                }
                Opinion::Propose(proposal) if self.in_force_already(id, &proposal) => {
                    declined.push(format!("{strategy_id}: what it would do is in force already"));
                }
                Opinion::Propose(proposal) => {
                    self.advise(advice);
                    self.advise(proposal.advice.clone());
                    let text = proposal.hypothesis.clone();
                    let (now, unix) = (self.now, self.unix);
                    if let Some(w) = self.workloads.get_mut(id) {
                        if !declined.is_empty() {
                            w.note(unix, format!("asked first and declined: {}", declined.join("; ")));
                        }
                        w.proposed = Some(Proposed {
                            strategy: strategy_id,
                            proposal: *proposal,
                            at: now,
                        });
                        w.seeking = false;
                        w.forget_inspections();
                    }
                    self.decide(id, Stage::Proposed, text, false);
                    return;
                }
            }
        }
        let reason = match (declined.is_empty(), self.guards.any(id)) {
            (true, false) => "no strategy applies".to_owned(),
            (false, false) => declined.join("; "),
            (true, true) => "nothing further: no other strategy applies".to_owned(),
            (false, true) => format!("nothing further: {}", declined.join("; ")),
        };
        self.refuse(id, Declined { reason, advice }, false);
    }

    /// Orders the inspection that a strategy asks for. Returns why it cannot have it, if it cannot.
    fn inspect(&mut self, id: &WorkloadId, strategy: &StrategyId, memory: bool) -> Option<String> {
        let w = self.workloads.get_mut(id)?;
        let (refused, there) = if memory {
            (&w.memory_refused, w.memory.is_some())
        } else {
            (&w.locality_refused, w.locality.is_some())
        };
        if let Some(why) = refused {
            return Some(format!("{strategy}: {why}"));
        }
        if there {
            return Some(format!(
                "{strategy}: cannot make use of what the inspection shows"
            ));
        }
        if !w.inspecting {
            w.inspecting = true;
            w.review = None;
            self.out.push(if memory {
                Command::InspectMemory(id.clone())
            } else {
                Command::InspectLocality(id.clone())
            });
        }
        None
    }

    /// Whether a proposal asks for exactly what one of the changes in force does: one of this workload, or one that sets
    /// CPUs or files of the host, or contains the same reader, for another.
    pub(crate) fn in_force_already(&self, id: &WorkloadId, proposal: &Proposal) -> bool {
        let same = |c: &Change| {
            c.action.effector == proposal.effector
                && match (&c.action.target, &proposal.target) {
                    // Whose processes have come and gone since is the same reader.
                    (Target::Reader(a), Target::Reader(b)) => a.workload == b.workload,
                    (a, b) => a == b,
                }
        };
        let own = self
            .guards
            .of(id)
            .flat_map(Guard::members)
            .filter_map(|a| self.changes.get(&a))
            .any(|c| c.action.workload == *id && same(c));
        let of_the_host = proposal.effector.as_str() != PLACEMENT
            && matches!(
                proposal.target,
                Target::Cpus(_) | Target::Files(_) | Target::Reader(_)
            );
        own || (of_the_host
            && self
                .changes
                .values()
                .any(|c| c.action.workload != *id && !c.leaving && same(c)))
    }

    pub(crate) fn opinion(&self, id: &WorkloadId, strategy: usize) -> Option<Opinion> {
        let neighbours = self.neighbours(id);
        let opinion = self.ask(id, strategy, neighbours, |s, seen| s.consider(seen))?;
        let strategy = self.strategies.get(strategy)?.id();
        Some(self.within_one_owner(id, &strategy, opinion))
    }

    /// Puts a question to a strategy about a workload. Neighbours are costly to gather: only for `consider`.
    pub(crate) fn ask<T>(
        &self,
        id: &WorkloadId,
        strategy: usize,
        neighbours: Vec<Neighbour>,
        question: impl FnOnce(&dyn Strategy, &Seen<'_>) -> T,
    ) -> Option<T> {
        let w = self.workloads.get(id)?;
        let sample = w.sample.as_ref()?;
        let strategy = self.strategies.get(strategy)?.as_ref();
        let known = self
            .priors
            .get(&(w.workload.fingerprint.clone(), strategy.id()))
            .filter(|p| p.verdict == Verdict::Accepted)
            .and_then(|p| p.effect);
        let held = self.held(id);
        let refused = self.refused_places(w, &strategy.id());
        let seen = Seen {
            now: self.now,
            policy: &self.policy,
            machine: &self.machine,
            machine_sample: &self.machine_sample,
            machine_interval: self.machine_interval,
            workload: &w.workload,
            sample,
            load: &w.load,
            memory: w.memory.as_ref(),
            locality: w.locality.as_ref(),
            neighbours: &neighbours,
            held: &held,
            known,
            refused: &refused,
        };
        Some(question(strategy, &seen))
    }

    /// How long something is not tried again after that verdict, and so many in a row without a gain.
    pub(crate) fn back_off(&self, verdict: Verdict, failures: u32) -> Nanoseconds {
        Nanoseconds::from_secs_f64(match verdict {
            Verdict::Accepted => 0.0,
            Verdict::Harmful => self.policy.backoff_harmful_s,
            Verdict::Rejected => {
                self.policy.backoff_rejected_s * f64::from(1u32 << failures.saturating_sub(1).min(6))
            }
            Verdict::Inconclusive | Verdict::Aborted => self.policy.backoff_inconclusive_s,
        })
    }

    /// What was tried and refused of this kind, and how long it is not tried again.
    pub(crate) fn backs_off(&self, key: &(Fingerprint, StrategyId)) -> Option<(&Prior, Nanoseconds)> {
        let prior = self.priors.get(key)?;
        if prior.verdict == Verdict::Accepted {
            return None;
        }
        let wait = self.back_off(prior.verdict, prior.failures).as_secs_f64();
        let age = self.unix.saturating_sub(prior.unix_seconds) as f64;
        (age < wait).then(|| (prior, Nanoseconds::from_secs_f64(wait - age)))
    }

    /// Why a strategy is not asked about a workload: switched off, not applicable, or known not to help.
    pub(crate) fn strategy_refusal(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<String> {
        self.switched_off(id, strategy)
            .or_else(|| self.back_off_told(id, strategy))
    }

    /// Why a strategy is never asked about a workload, as things are: switched off, or not applicable.
    pub(crate) fn switched_off(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<String> {
        let w = self.workloads.get(id)?;
        if let Some(why) = self.refusals.get(strategy) {
            return Some(format!("{strategy}: {why}"));
        }
        if w.workload.choice.strategies.get(strategy.as_str()) == Some(&false) {
            return Some(format!(
                "{strategy}: switched off by HOMEOSTAT_STRATEGIES in its environment"
            ));
        }
        if let Some(rule) = self.rule(&w.workload) {
            if rule.strategies.get(strategy.as_str()) == Some(&false) {
                return Some(format!(
                    "{strategy}: switched off in the configuration for {:?}",
                    rule.pattern
                ));
            }
        }
        None
    }

    /// That a strategy was tried for such a workload without a gain, not long ago.
    pub(crate) fn back_off_told(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<String> {
        let w = self.workloads.get(id)?;
        let key = (w.workload.fingerprint.clone(), strategy.clone());
        let (prior, left) = self.backs_off(&key)?;
        if self.may_try_again(&key) || self.another_place_is_open(id, strategy) {
            return None;
        }
        let effect = prior.effect.map_or_else(String::new, |e| format!(" ({e})"));
        Some(format!(
            "{strategy}: an earlier try was {}{effect}; not tried again for {left}",
            prior.verdict
        ))
    }

    /// The other workloads above the floors, biggest CPU use first.
    fn neighbours(&self, id: &WorkloadId) -> Vec<Neighbour> {
        let mut placed: BTreeMap<&WorkloadId, &Vec<CpuId>> = BTreeMap::new();
        // What is proposed for others counts too: it is tried together with this one, or before it.
        for (other, w) in &self.workloads {
            if w.stage == Stage::Proposed {
                if let Some(p) = &w.proposed {
                    if p.proposal.effector.as_str() == PLACEMENT {
                        if let Target::Cpus(cpus) = &p.proposal.target {
                            placed.insert(other, cpus);
                        }
                    }
                }
            }
        }
        for c in self.changes.values().filter(|c| c.on) {
            if let Target::Cpus(cpus) = &c.action.target {
                if c.action.effector.as_str() == PLACEMENT {
                    // The newest lies over the others.
                    placed.insert(&c.action.workload, cpus);
                }
            }
        }
        let mut list: Vec<Neighbour> = self
            .workloads
            .iter()
            .filter(|(other, w)| {
                let reads = || w.sample.as_ref().is_some_and(|s| self.lives_on_the_file_cache(s));
                let is_expected = || self.recall.expects(other);
                *other != id && !w.gone && (w.load.cpus >= self.policy.cpu_min || reads() || is_expected())
            })
            .map(|(other, w)| (other, w, self.is_proven(id, other)))
            .map(|(other, w, is_proven)| Neighbour {
                id: other.clone(),
                cpus: w.load.cpus,
                resident: w.sample.as_ref().map_or(Bytes::ZERO, |s| s.resident),
                placed: placed.get(other).map(|cpus| (*cpus).clone()),
                reads: w.sample.as_ref().map_or_else(Reads::default, |s| s.reads),
                interval: w.sample.as_ref().map_or(Nanoseconds::ZERO, |s| s.interval),
                kind: w.workload.kind,
                processes: w.workload.processes.clone(),
                left_alone: self
                    .opted_out(&w.workload)
                    .or_else(|| self.strangers(other, id))
                    .or_else(|| self.over_too_soon(w).filter(|_| !is_proven)),
                is_proven,
                read_so_far: self.recall.read_by(other),
            })
            .collect();
        list.sort_by(|a, b| b.cpus.total_cmp(&a.cpus).then_with(|| a.id.cmp(&b.id)));
        list.truncate(NEIGHBOURS_MAX);
        list
    }

    fn on_locality(&mut self, id: &WorkloadId, result: Result<homeostat_model::Locality, Fault>) {
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.inspecting = false;
        if !deciding(w) {
            return;
        }
        match result {
            Ok(locality) => w.locality = Some(locality),
            Err(fault) => {
                let why = format!("where it runs cannot be inspected: {}", fault.text);
                w.locality_refused = Some(why.clone());
                self.tell_denied(id, &fault, why);
            }
        }
        self.ask_strategies(id);
    }

    fn on_memory(&mut self, id: &WorkloadId, result: Result<homeostat_model::MemoryMap, Fault>) {
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.inspecting = false;
        if let Some(guard) = w.review.take() {
            if let Ok(map) = result {
                if w.stage == Stage::Improved {
                    w.memory = Some(map);
                    self.extend(id, guard);
                }
            }
            return;
        }
        if !deciding(w) {
            return;
        }
        match result {
            Ok(map) => w.memory = Some(map),
            Err(fault) => {
                let why = format!("its memory cannot be inspected: {}", fault.text);
                w.memory_refused = Some(why.clone());
                self.tell_denied(id, &fault, why);
            }
        }
        self.ask_strategies(id);
    }

    /// A missing privilege is for an operator to see.
    fn tell_denied(&mut self, id: &WorkloadId, fault: &Fault, why: String) {
        if fault.kind == FaultKind::Denied {
            self.narrate(id, why, true);
        }
    }

    /// The changes of a workload, newest first: the order in which they are undone.
    pub(crate) fn actions_of(&self, id: &WorkloadId) -> Vec<ActionId> {
        self.changes
            .iter()
            .rev()
            .filter(|(_, c)| c.action.workload == *id)
            .map(|(a, _)| *a)
            .collect()
    }
}

/// Whether the main process of a workload is still the one that it was, as far as the snapshot says who is there.
fn has_its_main_process(workload: &Workload, snapshot: &Snapshot) -> bool {
    let mut scanned = snapshot.workloads.iter().flatten();
    scanned
        .find(|w| w.id == workload.id)
        .is_none_or(|w| w.processes.first() == workload.processes.first())
}

/// What the open meters of a workload come to.
enum Judged {
    /// One of them has too few readings yet, or what is said of it may change soon, with the sentence for people, and no other of its kind
    /// will do.
    NotYet(Option<String>),
    Settled(BTreeMap<MeterId, Assessment>),
}

/// Judges the open meters of a workload.
fn judge(w: &Watched, limit: NoiseLimit, policy: &Policy) -> Judged {
    let assessed: Option<Vec<(&homeostat_model::MeterCandidate, Assessment)>> = w
        .candidates
        .iter()
        .filter(|c| w.open.contains(&c.id))
        .map(|c| {
            let others: Vec<_> = w
                .candidates
                .iter()
                .filter(|o| o.id != c.id && w.open.contains(&o.id))
                .collect();
            let assessed = meters::assess(c, &others, &w.series, w.judging_since, policy, limit)?;
            Some((c, assessed))
        })
        .collect();
    let Some(assessed) = assessed else {
        return Judged::NotYet(None);
    };
    let will_do = |(c, a): &(&homeostat_model::MeterCandidate, Assessment)| {
        let is_near = match c.class {
            MeterClass::Application => true,
            MeterClass::Probe => a.counted >= meters::COUNTED_MIN,
            MeterClass::Kernel => !meters::is_of_waiting(&c.id) && a.unsettled != Some(Unsettled::Clock),
            MeterClass::Points | MeterClass::Hardware => false,
        };
        is_near && a.refused.is_none()
    };
    // What is read for longest.
    let unsettled = assessed
        .iter()
        .filter_map(|(c, a)| Some((c, a, a.unsettled?)))
        .max_by_key(|(_, _, unsettled)| unsettled.readings());
    match unsettled {
        Some((c, a, why)) if !assessed.iter().any(will_do) => {
            Judged::NotYet(Some(reads_on(&c.id, a.noise, why)))
        }
        _ => Judged::Settled(assessed.into_iter().map(|(c, a)| (c.id.clone(), a)).collect()),
    }
}

/// The sentence for a meter that is read for longer before anything is said of it.
fn reads_on(meter: &MeterId, noise: f64, unsettled: Unsettled) -> String {
    match unsettled {
        Unsettled::Clock => format!(
            "{meter} counts as evenly as by a clock so far, which tells no work; it is judged after at most {} readings",
            unsettled.readings()
        ),
        Unsettled::Unspoken(readings) if noise.is_finite() => format!(
            "{meter} varies by {:.0} % from block to block, and what may speak for it has few readings yet; it is judged after at most \
             {readings} readings of both",
            noise * 100.0
        ),
        Unsettled::Unspoken(readings) => format!(
            "{meter} counts now and then only, and what may speak for it has few readings yet; it is judged after at most {readings} \
             readings of both"
        ),
    }
}

/// Whether the workload waits for an inspection to be decided upon.
fn deciding(w: &Watched) -> bool {
    w.stage == Stage::Observed || (w.stage == Stage::Improved && w.seeking)
}

/// The sentence for a workload that cannot be measured.
fn no_meter(candidates: &[homeostat_model::MeterCandidate]) -> String {
    // Points are the last resort: why there are none is what stands between this program and a meter. The rest is in `explain`.
    let is_points = |c: &&homeostat_model::MeterCandidate| c.class == MeterClass::Points;
    let reasons: Vec<String> = candidates
        .iter()
        .filter(is_points)
        .chain(candidates.iter().filter(|c| !is_points(c)))
        .filter_map(|c| c.refused.as_ref().map(|r| format!("{}: {r}", c.id)))
        .take(2)
        .collect();
    let detail = if reasons.is_empty() {
        "no meter fits it".to_owned()
    } else {
        reasons.join("; ")
    };
    format!(
        "not touched, because its work cannot be measured from outside ({detail}). Remedy: publish a progress counter, \
         or name a meter (uprobe:BINARY:SYMBOL, prometheus:URL#METRIC) in the configuration"
    )
}

/// A unit of work in the plural: of `byte read or written` it is the bytes that are many, of `HTTP request` the requests.
fn plural(unit: &str) -> String {
    const BEHIND: [&str; 6] = [" of ", " read ", " sent ", " received ", " with ", " in "];
    let head = BEHIND
        .iter()
        .filter_map(|word| unit.find(word))
        .min()
        .unwrap_or(unit.len());
    let (many, rest) = unit.split_at(head);
    let (before, thing) = many.rsplit_once(' ').map_or(("", many), |(b, t)| (b, t));
    let consonant = |stem: &str| !stem.ends_with(['a', 'e', 'i', 'o', 'u']);
    let things = if thing.ends_with('s') {
        thing.to_owned()
    } else if ["ch", "sh", "x"].iter().any(|end| thing.ends_with(end)) {
        format!("{thing}es")
    } else if let Some(stem) = thing.strip_suffix('y').filter(|stem| consonant(stem)) {
        format!("{stem}ies")
    } else {
        format!("{thing}s")
    };
    let gap = if before.is_empty() { "" } else { " " };
    format!("{before}{gap}{things}{rest}")
}

#[cfg(test)]
mod tests {
    use super::plural;

    #[test]
    fn units_in_the_plural() {
        for (one, many) in [
            ("command", "commands"),
            ("query", "queries"),
            ("key", "keys"),
            ("request batch", "request batches"),
            ("HTTP request", "HTTP requests"),
            ("read call", "read calls"),
            ("voluntary context switch", "voluntary context switches"),
            ("byte read or written", "bytes read or written"),
            (
                "TCP segment received with data",
                "TCP segments received with data",
            ),
            ("turn of its work", "turns of its work"),
            ("statistics", "statistics"),
        ] {
            assert_eq!(plural(one), many);
        }
    }
}
