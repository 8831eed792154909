//! Carries out the engine's commands: journal first, act, confirm, record. Takes no decisions; faults become events.
//!
//! The same code runs on the real and on the simulated machine, through `homeostat_platform`'s traits and the store.
//!
//! Order of an action, and what recovery does after a crash at each point:
//! 1. `prepare` computes the undo: nothing to recover.
//! 2. [`Journal::intend`] syncs the record: nothing to undo.
//! 3. Slices of the change run: recovery undoes them, from the record alone.
//! 4. `applied` is noted: recovery undoes all.
//! 5. The undo runs and is verified: recovery undoes again and finds nothing to do. For a kept change the journal notes
//!    the beginning of the undo first, since recovery leaves kept changes alone.
//! 6. `put back` is noted: a value like ours is now somebody else's. `applied` is noted before the change is remade.
//! 7. `closed` is noted: nothing is owed.

pub mod by_hand;
#[cfg(test)]
mod crash_tests;
pub mod recording;
mod recovery;
#[cfg(test)]
mod register_crash_tests;
#[cfg(test)]
mod setting_crash_tests;
#[cfg(test)]
mod switch_tests;

pub use recording::{Recorder, RecordingError};
pub use recovery::{RECOVERY_PATIENCE, RecoveryReport, restore, restore_within};

use homeostat_engine::{
    Attempt, Command, Engine, Event, Fault, FaultKind, Memory, Mode, OperatorRequest, Policy, Prior,
    SamplingPlan, Stage, Status, Story, Strategy,
};
use homeostat_model::action::Target;
use homeostat_model::setting::is_one_setting;
use homeostat_model::{
    Action, ActionId, Direction, ExperimentKind, Nanoseconds, Progress, UndoRecord, Verdict,
};
use homeostat_platform::{Clock, Effectors, PlatformError, SampleRequest, Sensors};
use homeostat_store::journal::{Coin, Note, OwedState};
use homeostat_store::{Journal, ResilientHistory, history};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Share of one CPU that scanning may take at rest; scans are spread out until it holds.
const SCAN_SHARE: f64 = 0.001;
/// Larger share for a while after a memory shortage: two scans must show who takes memory, and the losers cannot wait.
const SCAN_SHARE_HURRIED: f64 = 0.01;
const SCAN_EVERY_MAX: Nanoseconds = Nanoseconds::from_secs(60);
/// So many scans have the larger share at the start. The first one reads every process anew: it took 27 and 37 ms of CPU time,
/// which would put off the second one, which tells who works, by as many seconds.
const SCANS_AT_START: u32 = 4;
/// Wait after an effector said "not now".
const BUSY_WAIT: Nanoseconds = Nanoseconds::from_secs(2);
/// "Not now" answers in a row after which an action counts as failed.
const BUSY_MAX: u32 = 15;
/// Waits of [`BUSY_WAIT`], 90 s in all, for an unwritable journal before the undo of a kept change. Then it runs
/// anyway: a person's undo must not depend on the disk. An earlier end leaves the change in force, as journalled.
const UNNOTED_MAX: u32 = 45;
/// Longest wait for another change that makes no progress: five of the longest pauses, or three waits for the journal.
/// Then the change is reported as not possible now, and the engine decides whether to wait on.
const TURN_PATIENCE: Nanoseconds = Nanoseconds::from_secs(300);
/// Longest pause between two slices, whatever the effector asks for. An undo must not wait for ever.
const PAUSE_MAX: Nanoseconds = Nanoseconds::from_secs(60);
/// Doublings of the wait without progress: up to about a second.
const IDLE_DOUBLINGS_MAX: u32 = 10;
const EVENTS_PER_TURN_MAX: usize = 256;
/// Shortest wait: a fault must not turn the loop into a spin.
const WAIT_MIN: Nanoseconds = Nanoseconds::from_millis(1);
const PRUNE_EVERY: Nanoseconds = Nanoseconds::from_secs(3600);

/// The result of one turn of the loop.
#[derive(Debug, Default)]
pub struct Turn {
    /// Lines for people, in order.
    pub stories: Vec<Story>,
    /// When the next turn is due.
    pub wake_at: Nanoseconds,
    /// True when everything is settled after a stop.
    pub finished: bool,
}

/// Why the loop cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The machine cannot be described.
    #[error("the machine cannot be read: {0}")]
    Machine(#[from] PlatformError),
    /// The wanted recording cannot be made.
    #[error("{0}")]
    Recording(#[from] RecordingError),
}

struct Pending {
    direction: Direction,
    due: Nanoseconds,
    busy: u32,
    idle: u32,
    /// Failed tries to note in the journal that the change is kept no longer.
    unnoted: u32,
    finished: u64,
    /// Time of the last progress of this change, or of one that it waits for.
    moved_at: Nanoseconds,
}

impl Pending {
    fn new(direction: Direction, now: Nanoseconds) -> Self {
        Self {
            direction,
            due: now,
            busy: 0,
            idle: 0,
            unnoted: 0,
            finished: 0,
            moved_at: now,
        }
    }
}

/// Another change of the same direction that must go first.
struct Before {
    id: ActionId,
    due: Nanoseconds,
    moved_at: Nanoseconds,
    /// Whether the effector itself keeps the order of the two: see [`recovery::effector_knows`].
    is_kept_by_effector: bool,
}

/// The loop.
pub struct Runtime<P, C> {
    platform: P,
    clock: C,
    fingerprint: String,
    journal: Journal,
    history: ResilientHistory,
    engine: Engine,
    pending: BTreeMap<ActionId, Pending>,
    records: BTreeMap<ActionId, UndoRecord>,
    events: VecDeque<Event>,
    stories: Vec<Story>,
    /// The engine's sampling plan at the end of the last turn.
    plan: Option<SamplingPlan>,
    next_scan: Nanoseconds,
    /// Scans since the start.
    scans: u32,
    next_detail: Nanoseconds,
    next_quick: Nanoseconds,
    looked_at: Nanoseconds,
    /// Time of the last scan, and its CPU time.
    scanned: (Nanoseconds, Nanoseconds),
    next_prune: Nanoseconds,
    journal_warned: bool,
    /// A random assignment could not be journalled: no change is applied until it can.
    coin_missing: bool,
    /// Why the last sample failed; reported once.
    unseen: Option<String>,
    /// Undone, but not yet closed in the journal.
    unclosed: BTreeSet<ActionId>,
    finished: bool,
    recorder: Option<Recorder>,
}

impl<P: Sensors + Effectors, C: Clock> Runtime<P, C> {
    /// Undoes what an earlier run left, before the first sample, and builds the engine.
    ///
    /// # Errors
    /// The machine cannot be described at all.
    pub fn start(
        platform: P,
        clock: C,
        journal: Journal,
        history: ResilientHistory,
        strategies: Vec<Box<dyn Strategy>>,
        policy: Policy,
    ) -> Result<(Self, RecoveryReport), StartError> {
        Self::start_recorded(platform, clock, journal, history, strategies, policy, None)
    }

    /// As [`Runtime::start`], and records the engine's events and commands.
    ///
    /// # Errors
    /// Also when the recording cannot begin: its user would find out too late.
    pub fn start_recorded(
        mut platform: P,
        clock: C,
        mut journal: Journal,
        mut history: ResilientHistory,
        strategies: Vec<Box<dyn Strategy>>,
        policy: Policy,
        mut recorder: Option<Recorder>,
    ) -> Result<(Self, RecoveryReport), StartError> {
        let machine = platform.machine()?;
        // In advise mode nothing is in force, not even changes kept by an earlier run.
        let advises = policy.mode == Mode::AdviseOnly;
        let report = restore(&mut journal, &mut platform, &clock, &machine.boot_id, advises);
        let kept: Vec<(UndoRecord, bool)> = journal
            .owed()
            .filter(|o| !o.is_void(&machine.boot_id))
            // A change that could not be undone now is still there: the engine knows it and tries again.
            .map(|o| (o.record.clone(), o.state == OwedState::Kept))
            .collect();
        let unfinished: VecDeque<Event> = kept
            .iter()
            .filter(|(_, kept)| !kept || advises)
            .map(|(r, _)| Event::Operator(OperatorRequest::Undo(r.action.id)))
            .collect();
        let kept: Vec<UndoRecord> = kept.into_iter().map(|(r, _)| r).collect();
        for record in &kept {
            platform.adopt(record);
        }
        let fingerprint = machine.fingerprint();
        let mut memory = recall(&mut history, &fingerprint, clock.unix_seconds());
        memory.next_action = journal.next_action_id().0;
        memory.next_experiment = memory.next_experiment.max(journal.next_experiment_id().0);
        memory.kept = kept.iter().map(|r| r.action.clone()).collect();
        if let Some(recorder) = &mut recorder {
            recorder.begin(&machine, &policy, &strategies, &memory)?;
        }
        let engine = Engine::new(machine, strategies, policy, memory);
        let now = clock.now();
        let runtime = Self {
            platform,
            clock,
            fingerprint,
            journal,
            history,
            engine,
            pending: BTreeMap::new(),
            records: kept.into_iter().map(|r| (r.action.id, r)).collect(),
            events: unfinished,
            stories: Vec::new(),
            plan: None,
            next_scan: now,
            scans: 0,
            next_detail: now,
            next_quick: now,
            looked_at: now,
            scanned: (now, Nanoseconds::ZERO),
            next_prune: now + PRUNE_EVERY,
            journal_warned: false,
            coin_missing: false,
            unseen: None,
            unclosed: BTreeSet::new(),
            finished: false,
            recorder,
        };
        Ok((runtime, report))
    }

    /// Does what is due and says when to come again.
    pub fn turn(&mut self) -> Turn {
        let now = self.clock.now();
        self.sample_if_due(now);
        self.handle_events();
        self.advance_due();
        self.handle_events();
        self.close_late();
        self.history.flush(self.clock.unix_seconds());
        if now >= self.next_prune {
            self.next_prune = now + PRUNE_EVERY;
            self.history.prune(self.clock.unix_seconds());
        }
        for message in self.history.take_messages() {
            self.tell(message, true);
        }
        Turn {
            stories: std::mem::take(&mut self.stories),
            wake_at: self.wake_at(),
            finished: self.finished,
        }
    }

    /// Passes on what a person asked for; it takes effect in the next turn, which is due at once.
    pub fn operator(&mut self, request: OperatorRequest) {
        self.events.push_back(Event::Operator(request));
    }

    /// Withdraws homeostat's changes to a setting that somebody else has written; their value stays. Returns the
    /// numbers of the withdrawn changes. `why` is the sentence for people.
    pub fn setting_is_others(&mut self, path: &str, why: &str) -> Vec<ActionId> {
        let ours: Vec<ActionId> = self
            .records
            .values()
            .filter(|r| sets(r, path))
            .map(|r| r.action.id)
            .collect();
        for id in &ours {
            self.operator(OperatorRequest::Yield(*id, why.to_owned()));
        }
        // Scan now, so that the next decisions see the current state.
        self.next_scan = self.clock.now();
        ours
    }

    /// Whether a value of a setting is one that homeostat wrote itself, or put back.
    pub fn wrote_setting(&self, path: &str, value: &str) -> bool {
        self.records.values().any(|r| {
            let is = |text: Option<&String>| text.is_some_and(|t| t.trim() == value);
            match &r.action.target {
                Target::Files(files) if files.iter().any(|f| f == path) => {
                    is(r.action.arguments.get("value")) || is(r.found.get("value"))
                }
                // The other file of a pair reads zero while ours is in force.
                _ => sets(r, path) && (value == "0" || is(r.found.get("other"))),
            }
        })
    }

    /// The state for people.
    pub fn view(&self) -> Status {
        self.engine.view()
    }

    /// The machine and its sensors and effectors (for tests and `doctor`).
    pub fn platform(&mut self) -> &mut P {
        &mut self.platform
    }

    // ---- sensing ------------------------------------------------------------------------------------------------

    fn sample_if_due(&mut self, now: Nanoseconds) {
        // No event has reached the engine since it computed this wake-up time.
        let plan = self.plan.take().unwrap_or_else(|| self.engine.sampling());
        // Quick samples give the beat where there are any: one in between would cut an interval in two.
        let quick = !plan.quick.is_empty();
        if quick && now < self.next_quick {
            return;
        }
        let scan = now >= self.scan_due(&plan);
        let early = if quick { plan.quick_every.0 / 2 } else { 0 };
        let detail = !plan.detail.is_empty() && now + Nanoseconds(early) >= self.next_detail;
        let host = plan.host_every.is_some_and(|every| now >= self.looked_at + every);
        if !scan && !detail && !quick && !host {
            return;
        }
        // Each time all of them, so that one interval holds for all.
        let request = SampleRequest {
            scan,
            detail: if detail || !quick { plan.detail } else { plan.quick },
        };
        let used = self.clock.cpu_time();
        self.looked_at = now;
        self.platform.look_at_reads(plan.reads);
        self.platform.follow_spans(&plan.spans);
        self.platform.keep_canary(plan.canary);
        let looked = self.platform.sample(&request);
        // Lost meters first: their last readings say nothing about the loss.
        for lost in self.platform.take_lost_meters() {
            let why = fault(&lost.why);
            self.events
                .push_back(Event::MeterLost(lost.workload, lost.meter, why));
        }
        match looked {
            Ok(snapshot) => {
                self.unseen = None;
                self.events.push_back(Event::Sampled(Box::new(snapshot)));
            }
            Err(e) => {
                self.events.push_back(Event::Unseen);
                let text = e.to_string();
                if self.unseen.as_ref() != Some(&text) {
                    self.tell(format!("sampling failed: {text}"), true);
                    self.unseen = Some(text);
                }
            }
        }
        if scan {
            let cost = self.clock.cpu_time().saturating_sub(used);
            self.scanned = (now, cost);
            self.scans = self.scans.saturating_add(1);
            self.next_scan = now + plan.scan_every.max(spread(cost, SCAN_SHARE));
        }
        // Keep the rhythm; after a long delay, or after a sample that was taken for another reason, start a new one.
        let next = |kept: bool, due: Nanoseconds, every: Nanoseconds| match due + every {
            next if kept && next > now => next,
            _ => now + every,
        };
        if detail || !quick {
            self.next_detail = next(detail, self.next_detail, plan.detail_every);
        }
        self.next_quick = next(quick, self.next_quick, plan.quick_every);
    }

    fn scan_due(&self, plan: &SamplingPlan) -> Nanoseconds {
        let (at, cost) = self.scanned;
        if plan.in_a_hurry || self.scans < SCANS_AT_START {
            let hurried = at + plan.scan_every.max(spread(cost, SCAN_SHARE_HURRIED));
            hurried.min(self.next_scan)
        } else {
            self.next_scan
        }
    }

    fn wake_at(&mut self) -> Nanoseconds {
        let plan = self.engine.sampling();
        let at = self.due_at(&plan);
        self.plan = Some(plan);
        at
    }

    fn due_at(&self, plan: &SamplingPlan) -> Nanoseconds {
        if !self.events.is_empty() {
            return self.clock.now();
        }
        let mut at = self.next_quick;
        if plan.quick.is_empty() {
            at = self.scan_due(plan);
            if !plan.detail.is_empty() {
                at = at.min(self.next_detail);
            }
            if let Some(every) = plan.host_every {
                at = at.min(self.looked_at + every);
            }
        }
        for p in self.pending.values() {
            at = at.min(p.due);
        }
        at.max(self.clock.now() + WAIT_MIN)
    }

    // ---- the mind -----------------------------------------------------------------------------------------------

    fn handle_events(&mut self) {
        for _ in 0..EVENTS_PER_TURN_MAX {
            let Some(event) = self.events.pop_front() else {
                return;
            };
            let (now, unix) = (self.clock.now(), self.clock.unix_seconds());
            let noted = self.recorder.as_mut().map_or(Ok(()), |r| r.event(&event));
            let commands = self.engine.step(now, unix, event);
            self.record(noted, now, unix, &commands);
            for command in commands {
                self.execute(command);
            }
        }
    }

    /// Writes a step to the recording. A failing recording never holds up the engine or the effectors.
    fn record(
        &mut self,
        noted: Result<(), RecordingError>,
        now: Nanoseconds,
        unix: u64,
        commands: &[Command],
    ) {
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        let text = match noted.and_then(|()| recorder.step(now, unix, commands)) {
            Ok(true) => return,
            Ok(false) => format!(
                "the recording has reached its limit after {} steps ({}) and ends here",
                recorder.steps(),
                recorder.written()
            ),
            Err(e) => format!("{e}; it ends after {} steps", recorder.steps()),
        };
        self.recorder = None;
        self.tell(text, true);
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::InspectMemory(id) => {
                let result = self.platform.inspect_memory(&id).map_err(|e| fault(&e));
                self.events.push_back(Event::MemoryInspected(id, result));
            }
            Command::InspectLocality(id) => {
                let result = self.platform.inspect_locality(&id).map_err(|e| fault(&e));
                self.events.push_back(Event::LocalityInspected(id, result));
            }
            Command::FindMeters(id) => {
                let result = self.platform.find_meters(&id).map_err(|e| fault(&e));
                self.events.push_back(Event::MetersFound(id, result));
            }
            Command::OpenMeter(id, meter) => {
                let result = self.platform.open_meter(&id, &meter).map_err(|e| fault(&e));
                self.events.push_back(Event::MeterOpened(id, meter, result));
            }
            Command::CloseMeter(id, meter) => self.platform.close_meter(&id, &meter),
            Command::Apply(action) => self.apply(*action),
            Command::Switch(action, direction) => self.switch(action, direction),
            Command::Close(action) => {
                if let Some(record) = self.records.remove(&action) {
                    self.platform.forget(&record);
                    let result = self.journal.closed(action);
                    if result.is_err() {
                        self.unclosed.insert(action);
                    }
                    self.journal_result(result);
                }
                self.pending.remove(&action);
            }
            // A change kept over an earlier stop is already noted.
            Command::Keep(action) if self.journal.is_kept(action) => {}
            Command::Keep(action) => {
                let result = self.journal.kept(action);
                self.journal_result(result);
            }
            Command::NoteCoin {
                experiment,
                block,
                on,
            } => {
                let result = self.journal.note(Note::Coin(Coin {
                    experiment,
                    block,
                    on,
                }));
                self.coin_missing = result.is_err();
                self.journal_result(result);
            }
            Command::DropCoins(experiment) => {
                self.coin_missing = false;
                let result = self.journal.note(Note::Ended(experiment));
                self.journal_result(result);
            }
            Command::RecordExperiment(record) => {
                if record.verdict.is_some() {
                    // The trial with the lost assignment is over.
                    self.coin_missing = false;
                    let result = self.journal.note(Note::Ended(record.id));
                    self.journal_result(result);
                }
                self.history.record_experiment(*record);
            }
            Command::RecordDecision(d) => self.history.record_decision(history::DecisionRecord {
                at_unix: self.clock.unix_seconds(),
                workload: d.workload,
                stage: d.stage.to_string(),
                text: d.text,
            }),
            Command::RecordWindow(seen) => self.history.record_window(history::Window {
                machine: self.fingerprint.clone(),
                started_unix: self
                    .clock
                    .unix_seconds()
                    .saturating_sub(seen.length.0 / 1_000_000_000),
                seen,
            }),
            Command::Tell(story) => self.stories.push(story),
            Command::Finished => self.finished = true,
        }
    }

    /// Closes in the journal what could not be closed before.
    fn close_late(&mut self) {
        let waiting: Vec<ActionId> = self.unclosed.iter().copied().collect();
        for action in waiting {
            if self.journal.closed(action).is_err() {
                return;
            }
            self.unclosed.remove(&action);
        }
    }

    fn tell(&mut self, text: String, warning: bool) {
        self.stories.push(Story {
            workload: None,
            stage: Stage::Ignored,
            text,
            warning,
        });
    }

    fn journal_result<E: std::fmt::Display>(&mut self, result: Result<(), E>) {
        match result {
            Ok(()) => self.journal_warned = false,
            Err(e) if !self.journal_warned => {
                // The record stays owed: undoing twice is harmless, forgetting is not.
                self.journal_warned = true;
                self.tell(
                    format!("the journal cannot be written: {e}; no new change will be made"),
                    true,
                );
            }
            Err(_) => {}
        }
    }

    // ---- acting -------------------------------------------------------------------------------------------------

    fn apply(&mut self, action: Action) {
        let id = action.id;
        if self.coin_missing {
            self.events
                .push_back(Event::Settled(id, Direction::Apply, Err(coin_lost())));
            return;
        }
        let record = match self.platform.prepare(&action) {
            Ok(record) => record,
            Err(e) => {
                self.events
                    .push_back(Event::Settled(id, Direction::Apply, Err(fault(&e))));
                return;
            }
        };
        if let Err(e) = self.journal.intend(&record) {
            let fault = Fault {
                kind: FaultKind::Journal,
                text: format!("the journal cannot be written, so nothing is changed: {e}"),
            };
            // Without a record it can never be closed.
            self.platform.forget(&record);
            self.events
                .push_back(Event::Settled(id, Direction::Apply, Err(fault)));
            return;
        }
        self.records.insert(id, record);
        let pending = Pending::new(Direction::Apply, self.clock.now());
        self.pending.insert(id, pending);
    }

    fn switch(&mut self, id: ActionId, direction: Direction) {
        if !self.records.contains_key(&id) {
            // Never prepared or never journalled: it is off already.
            let done = match direction {
                Direction::Undo => Ok(Progress {
                    done: true,
                    verified: true,
                    ..Progress::default()
                }),
                Direction::Apply => Err(Fault {
                    kind: FaultKind::Vanished,
                    text: format!("action {id} has no record"),
                }),
            };
            self.events.push_back(Event::Settled(id, direction, done));
            return;
        }
        if direction == Direction::Apply && self.coin_missing {
            self.events
                .push_back(Event::Settled(id, direction, Err(coin_lost())));
            return;
        }
        if direction == Direction::Apply
            && self
                .journal
                .find(id)
                .is_some_and(|o| o.state == OwedState::PutBack)
        {
            if let Err(e) = self.journal.applied(id) {
                // A start that found it put back would take our value for somebody else's and leave it.
                let fault = Fault {
                    kind: FaultKind::Journal,
                    text: format!("the journal cannot be written, so nothing is changed: {e}"),
                };
                self.journal_result(Err::<(), _>(e));
                self.events.push_back(Event::Settled(id, direction, Err(fault)));
                return;
            }
        }
        let pending = Pending::new(direction, self.clock.now());
        self.pending.insert(id, pending);
    }

    fn advance_due(&mut self) {
        let now = self.clock.now();
        let due: Vec<ActionId> = self
            .pending
            .iter()
            .filter(|(_, p)| p.due <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.advance(id);
        }
    }

    /// Notes before the first step of an undo that the change is kept no longer. False: not written, so the undo waits.
    fn may_undo(&mut self, id: ActionId) -> bool {
        if !self.journal.is_kept(id) {
            return true;
        }
        let noted = self.journal.undoing(id);
        let failed = noted.is_err();
        self.journal_result(noted);
        match self.pending.get_mut(&id) {
            Some(pending) if failed && pending.unnoted < UNNOTED_MAX => {
                pending.unnoted += 1;
                pending.due = self.clock.now() + BUSY_WAIT;
                false
            }
            _ => true,
        }
    }

    /// The changes to wait for: an undo waits for changes above it, a change for those that it lies on.
    fn before(&self, id: ActionId) -> Vec<Before> {
        let (Some(pending), Some(own)) = (self.pending.get(&id), self.records.get(&id)) else {
            return Vec::new();
        };
        let own = &own.action;
        self.pending
            .iter()
            .filter(|(_, other)| other.direction == pending.direction)
            .filter_map(|(other, state)| Some((&self.records.get(other)?.action, state)))
            .filter(|(other, _)| match pending.direction {
                Direction::Undo => other.lies_over(own),
                Direction::Apply => own.lies_over(other),
            })
            .map(|(other, state)| Before {
                id: other.id,
                due: state.due,
                moved_at: state.moved_at,
                is_kept_by_effector: pending.direction == Direction::Undo
                    && recovery::effector_knows(other, own),
            })
            .collect()
    }

    /// Whether another change goes first. The wait for a change without progress is bounded. Then the effector is asked
    /// if it keeps the order, else the change is reported as not possible now.
    fn waits_its_turn(&mut self, id: ActionId) -> bool {
        let now = self.clock.now();
        let is_stuck = |b: &Before| now.saturating_sub(b.moved_at) >= TURN_PATIENCE;
        let mut before = self.before(id);
        before.retain(|b| !(is_stuck(b) && b.is_kept_by_effector));
        let Some(due) = before.iter().map(|b| b.due).min() else {
            return false;
        };
        let stuck = before.iter().find(|b| is_stuck(b)).map(|b| b.id);
        let Some(pending) = self.pending.get_mut(&id) else {
            return false;
        };
        match stuck {
            // Changes that wait for this one need not repeat the long wait.
            None => {
                pending.moved_at = now;
                pending.due = due.max(now + WAIT_MIN);
            }
            Some(other) => {
                let direction = pending.direction;
                self.pending.remove(&id);
                let fault = Fault {
                    kind: FaultKind::Busy,
                    text: format!("it waits for action {other}, which gets no further"),
                };
                self.events.push_back(Event::Settled(id, direction, Err(fault)));
            }
        }
        true
    }

    fn advance(&mut self, id: ActionId) {
        if self.waits_its_turn(id) {
            return;
        }
        let undoes = |p: &Pending| p.direction == Direction::Undo;
        if self.pending.get(&id).is_some_and(undoes) && !self.may_undo(id) {
            return;
        }
        let (Some(pending), Some(record)) = (self.pending.get_mut(&id), self.records.get(&id)) else {
            return;
        };
        let direction = pending.direction;
        let result = self.platform.advance(record, direction);
        let now = self.clock.now();
        match result {
            Ok(progress) if progress.done => {
                self.pending.remove(&id);
                let noted = match direction {
                    Direction::Apply => self.journal.applied(id),
                    Direction::Undo => self.journal.put_back(id),
                };
                self.journal_result(noted);
                self.events.push_back(Event::Settled(id, direction, Ok(progress)));
            }
            Ok(progress) => {
                // Without progress, ask ever more rarely.
                let idle = Nanoseconds(WAIT_MIN.0 << pending.idle.min(IDLE_DOUBLINGS_MAX));
                pending.idle = pending.idle.saturating_add(1);
                pending.due = now + progress.pause.clamp(idle, PAUSE_MAX);
                // A change that restarts after each "not now" must end visibly. The engine goes on trying an undo.
                if progress.finished > pending.finished {
                    pending.busy = 0;
                    pending.idle = 0;
                    pending.finished = progress.finished;
                    pending.moved_at = now;
                }
                self.events.push_back(Event::Advanced(id, direction, progress));
            }
            Err(PlatformError::Vanished { .. }) if direction == Direction::Undo => {
                self.pending.remove(&id);
                let gone = Progress {
                    done: true,
                    verified: true,
                    ..Progress::default()
                };
                self.events.push_back(Event::Settled(id, direction, Ok(gone)));
            }
            Err(PlatformError::Busy { .. }) if pending.busy < BUSY_MAX => {
                pending.busy += 1;
                pending.due = now + BUSY_WAIT;
            }
            Err(e) => {
                self.pending.remove(&id);
                self.events
                    .push_back(Event::Settled(id, direction, Err(fault(&e))));
            }
        }
    }
}

/// Time between scans that keeps a scan of this cost to this share of one CPU.
fn spread(cost: Nanoseconds, share: f64) -> Nanoseconds {
    Nanoseconds::from_secs_f64(cost.as_secs_f64() / share).min(SCAN_EVERY_MAX)
}

/// Whether a record is about a setting, by either name of a pair.
fn sets(record: &UndoRecord, path: &str) -> bool {
    matches!(&record.action.target, Target::Files(files) if files.iter().any(|f| is_one_setting(f, path)))
}

/// The random assignment that decides about a change is not on disk.
fn coin_lost() -> Fault {
    Fault {
        kind: FaultKind::Journal,
        text: "the coin could not be written down, so nothing is switched on".into(),
    }
}

fn fault(error: &PlatformError) -> Fault {
    let kind = match error {
        PlatformError::Unsupported { .. } => FaultKind::Unsupported,
        PlatformError::Denied { .. } => FaultKind::Denied,
        PlatformError::Vanished { .. } => FaultKind::Vanished,
        PlatformError::Conflict { .. } => FaultKind::Conflict,
        PlatformError::Rejected { .. } => FaultKind::Rejected,
        PlatformError::Malformed { .. } => FaultKind::Malformed,
        PlatformError::Busy { .. } => FaultKind::Busy,
    };
    Fault {
        kind,
        text: error.to_string(),
    }
}

/// The daily budget of lost work: a restart does not renew it.
const DAY_S: u64 = 86_400;
/// Experiments read at start to rebuild false-discovery control: rows without blocks, with placebos. An epoch has 200
/// tries by default. With four placebos a day this reaches back more than a year.
const TRIES_MAX: u32 = 2_000;

fn recall(history: &mut ResilientHistory, machine: &str, now_unix: u64) -> Memory {
    let priors = history
        .priors(machine, now_unix)
        .into_iter()
        .filter_map(|p| {
            Some(Prior {
                verdict: p.last_verdict?,
                effect: p.last_effect,
                settling: p.last_settling,
                unix_seconds: p.last_unix,
                // A count over all time bounds the failures in a row: the back-off errs to caution.
                failures: p.rejected + p.harmful + p.inconclusive,
                fingerprint: p.fingerprint,
                strategy: p.strategy,
            })
        })
        .collect();
    let placebos = history.placebo_summary(now_unix);
    let filter = history::ExperimentFilter {
        limit: TRIES_MAX,
        blocks: false,
        ..Default::default()
    };
    let mut tries: Vec<(homeostat_model::ExperimentId, Attempt)> = history
        .experiments(&filter, now_unix)
        .into_iter()
        .filter(|e| e.kind != ExperimentKind::Placebo)
        // An aborted try with a measurement has used its level, and so has one that a crash cut off.
        .filter(|e| e.verdict != Some(Verdict::Aborted) || e.effect.is_some())
        .map(|e| {
            let attempt = Attempt {
                of: Attempt::of(&e.fingerprint, &e.strategy),
                accepted: e.verdict == Some(Verdict::Accepted),
            };
            (e.id, attempt)
        })
        .collect();
    tries.sort_by_key(|(id, _)| *id);
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let of_the_day = history::ExperimentFilter {
        since_unix: now_unix.saturating_sub(DAY_S),
        limit: TRIES_MAX,
        blocks: false,
        ..Default::default()
    };
    let exposure = history
        .experiments(&of_the_day, now_unix)
        .iter()
        .map(|e| e.harm_exposure)
        .filter(|e| e.is_finite() && *e > 0.0)
        .fold(0.0, |sum, e| sum + e);
    Memory {
        exposure,
        priors,
        placebos: small(placebos.run),
        false_accepts: small(placebos.accepted),
        tries: tries.into_iter().map(|(_, attempt)| attempt).collect(),
        next_experiment: history.next_experiment_id(now_unix).0,
        next_action: 1,
        kept: Vec::new(),
        readers: history.proven_readers(machine, now_unix),
    }
}
