//! One life while it is lived: the daemon's loop, and what happens to it.

mod quiet;
mod watch;

use super::drawn::{limits, reconfigured, settings};
use super::{Counts, Life, Subject, kind_name};
use crate::checkers::{Checkers, Hand, Invariant, differences};
use crate::faults::{
    FaultPlan, Faults, Faulty, FaultyClock, Kind, PictureOf, damage_bytes, pick, private_directory,
};
use crate::run::MACHINE_CHANGED;
use homeostat_engine::{OperatorRequest, Policy};
use homeostat_model::{ActionId, Nanoseconds, UndoRecord, Verdict};
use homeostat_platform::{Clock, Sensors};
use homeostat_runtime::{Runtime, restore};
use homeostat_statistics::simulation::Random;
use homeostat_store::ResilientHistory;
use homeostat_store::history::{HISTORY_FILE, HistoryOptions};
use homeostat_store::journal::{self, JOURNAL_FILE, Journal, JournalOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::io;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// A fault of this kind, again and again at random times.
    Fault(Kind),
    Resume,
    /// CPUs and nodes come back.
    Heal,
    /// The daemon sees a change of CPUs or nodes and probes again.
    Look,
}

type Loop<S> =
    Runtime<Faulty<<S as Subject>::Platform, <S as Subject>::Clock>, FaultyClock<<S as Subject>::Clock>>;

/// The same machine with the same disturbances, left alone.
struct Beside<S> {
    alone: S,
    compared: Nanoseconds,
    /// Tenths by which each program was slower then.
    slower: BTreeMap<String, u32>,
}

#[derive(Default)]
struct Counted {
    turns: u64,
    crashes: u64,
    verdicts: BTreeMap<u64, Verdict>,
}

#[derive(Default)]
struct Looked {
    checked: Nanoseconds,
    heard: Nanoseconds,
    /// Actions owed on disk after this many steps of the journal.
    read: Option<(u64, BTreeMap<ActionId, UndoRecord>)>,
}

pub(super) struct Run<S: Subject> {
    seed: u64,
    hours: f64,
    pub(super) subject: S,
    beside: Beside<S>,
    clock: S::Clock,
    picture: PictureOf,
    faults: Faults,
    plan: FaultPlan,
    random: Random,
    policy: Policy,
    checkers: Checkers,
    schedule: BTreeSet<(Nanoseconds, u32, Happening)>,
    scheduled: u32,
    runtime: Option<Loop<S>>,
    counted: Counted,
    looked: Looked,
    stopping: bool,
    finished: bool,
    /// Longest life: beyond it something slept for ever.
    horizon: Nanoseconds,
}

/// Extra time after which a life counts as sleeping for ever.
const HORIZON: Nanoseconds = Nanoseconds::from_secs(14 * 86_400);
/// Failed starts of the daemon that count as a failure in the quiet half.
const STARTS_MAX: u32 = 50;

impl<S: Subject> Run<S> {
    pub(super) fn new(plan: FaultPlan, seed: u64, hours: f64, subject: S, alone: S, faults: Faults) -> Self {
        let mut random = Random::new(seed ^ 0x4341_4d50_4149_474e);
        let policy = settings(&mut random);
        let checkers = Checkers::new(limits(&policy, subject.harm_per_day_max()));
        Self {
            seed,
            hours,
            clock: subject.clock(),
            picture: subject.picture(),
            beside: Beside {
                alone,
                compared: subject.clock().now(),
                slower: BTreeMap::new(),
            },
            subject,
            plan,
            faults,
            random,
            policy,
            checkers,
            schedule: BTreeSet::new(),
            scheduled: 0,
            runtime: None,
            counted: Counted::default(),
            looked: Looked::default(),
            stopping: false,
            finished: false,
            horizon: Nanoseconds(u64::MAX),
        }
    }

    pub(super) fn life(&self) -> Life {
        let mut verdicts: BTreeMap<String, u64> = BTreeMap::new();
        for verdict in self.counted.verdicts.values() {
            *verdicts.entry(verdict.to_string()).or_default() += 1;
        }
        Life {
            seed: self.seed,
            counts: Counts {
                hours: self.clock.now().as_secs_f64() / 3600.0,
                injected: self.faults.injected(),
                turns: self.counted.turns,
                trials: self.checkers.trials_started() as u64,
                verdicts,
                crashes: self.counted.crashes,
                truth: self.checkers.truth(),
            },
            violations: self.checkers.found().to_vec(),
            ..Life::default()
        }
    }

    pub(super) fn live(&mut self) -> io::Result<()> {
        for kind in Kind::ALL.iter().copied().filter(|k| k.is_event()) {
            self.plan_next(kind);
        }
        let end = self.clock.now() + Nanoseconds::from_secs_f64(self.hours * 3600.0);
        self.horizon = end + HORIZON;
        self.run_until(end)?;
        if !self.checkers.found().is_empty() {
            return Ok(());
        }
        if self.clock.now() > self.horizon {
            let text = "the loop or recovery slept for days in one call".to_owned();
            self.report(Invariant::Liveness, "slept", text);
            return Ok(());
        }
        self.quiet_half()
    }

    fn report(&mut self, invariant: Invariant, key: &str, text: String) {
        let at = self.clock.now();
        self.checkers.report(at, invariant, key, text);
    }

    fn plan_next(&mut self, kind: Kind) {
        let rate = self.plan.rate(kind);
        if rate > 0.0 {
            let wait = Nanoseconds::from_secs_f64(self.random.exponential() / rate * 3600.0);
            self.at(self.clock.now() + wait, Happening::Fault(kind));
        }
    }

    fn at(&mut self, at: Nanoseconds, what: Happening) {
        self.scheduled = self.scheduled.wrapping_add(1);
        self.schedule.insert((at, self.scheduled, what));
    }

    fn run_until(&mut self, end: Nanoseconds) -> io::Result<()> {
        while self.clock.now() < end && !self.finished {
            // The first violation says most; later ones are often its consequences.
            if self.clock.now() > self.horizon || !self.checkers.found().is_empty() {
                return Ok(());
            }
            while let Some(first) = self.schedule.first().copied() {
                if first.0 > self.clock.now() || self.clock.now() >= self.horizon {
                    break;
                }
                self.schedule.remove(&first);
                self.happen(first.2)?;
            }
            if self.runtime.is_none() || self.faults.dead() {
                self.start_again()?;
                continue;
            }
            let Some(runtime) = &mut self.runtime else {
                continue;
            };
            let turn = runtime.turn();
            self.counted.turns += 1;
            let directory = self.faults.directory().display().to_string();
            let lines: Vec<String> = turn
                .stories
                .into_iter()
                .map(|s| {
                    let whose = s.workload.map_or_else(|| "host".to_owned(), |w| w.to_string());
                    format!("{whose} {}: {}", s.stage, s.text.replace(&directory, "STATE"))
                })
                .collect();
            self.check(&lines);
            if turn.finished {
                self.finished = true;
                return Ok(());
            }
            if self.faults.dead() {
                continue;
            }
            let mut next = turn.wake_at.min(end);
            if let Some(first) = self.schedule.first() {
                next = next.min(first.0);
            }
            self.subject.advance_to(next.max(self.clock.now()));
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), String> {
        let directory = self.faults.directory();
        let options = JournalOptions {
            fault: Some(self.faults.journal_hook()),
            // Small, to test compaction too.
            compact_bytes: Some(32 * 1024),
        };
        let (journal, recovered) = Journal::open(&directory, options).map_err(|e| e.to_string())?;
        let clock = FaultyClock::new(self.clock.clone(), self.faults.clone());
        let history = ResilientHistory::open(
            &directory.join(HISTORY_FILE),
            HistoryOptions {
                first_experiment: recovered.next_experiment,
                ..HistoryOptions::default()
            },
            clock.unix_seconds(),
        );
        let (runtime, report) = Runtime::start(
            self.faulty(),
            clock,
            journal,
            history,
            self.subject.strategies(),
            self.policy.clone(),
        )
        .map_err(|e| e.to_string())?;
        self.faults.trace(format!(
            "started: {} undone, {} void, {} kept, {} failed",
            report.undone.len(),
            report.void.len(),
            report.kept.len(),
            report.failed.len()
        ));
        self.checkers.restarted();
        self.runtime = Some(runtime);
        Ok(())
    }

    fn faulty(&self) -> Faulty<S::Platform, S::Clock> {
        Faulty::new(
            self.subject.platform(),
            self.clock.clone(),
            self.faults.clone(),
            self.picture.clone(),
        )
    }

    fn start_again(&mut self) -> io::Result<()> {
        let first = self.counted.turns == 0 && self.counted.crashes == 0;
        self.runtime = None;
        self.looked.read = None;
        self.subject.restarted();
        if self.faults.dead() {
            self.counted.crashes += 1;
            self.take_calls();
            self.faults.trace(format!("killed at {}", self.clock.now()));
            self.faults.revive()?;
            self.any_byte()?;
        }
        if !first {
            let down = Nanoseconds::from_secs_f64(self.random.exponential() * 60.0);
            self.subject.advance_to(self.clock.now() + down);
        }
        if !first && self.random.next_u64() % 3 == 0 {
            self.restore_by_hand();
        }
        for _ in 0..STARTS_MAX {
            if self.faults.dead() {
                // Killed again during recovery.
                return Ok(());
            }
            match self.start() {
                Ok(()) => {
                    self.check(&[]);
                    return Ok(());
                }
                Err(why) => {
                    self.faults
                        .trace(format!("no start: {}", self.without_path(&why)));
                    self.take_calls();
                    let wait = Nanoseconds::from_secs(10);
                    self.subject.advance_to(self.clock.now() + wait);
                }
            }
        }
        Ok(())
    }

    fn without_path(&self, text: &str) -> String {
        text.replace(&self.faults.directory().display().to_string(), "STATE")
    }

    /// As `homeostat restore`: journal and effectors only.
    fn restore_by_hand(&mut self) {
        let options = JournalOptions {
            fault: Some(self.faults.journal_hook()),
            compact_bytes: None,
        };
        let Ok((mut journal, _)) = Journal::open(&self.faults.directory(), options) else {
            return;
        };
        let mut platform = self.faulty();
        let Ok(machine) = platform.machine() else { return };
        let clock = FaultyClock::new(self.clock.clone(), self.faults.clone());
        let report = restore(&mut journal, &mut platform, &clock, &machine.boot_id, true);
        self.faults.trace(format!(
            "restore by hand: {} undone, {} failed",
            report.undone.len(),
            report.failed.len()
        ));
        let owed = journal.owed().count();
        drop(journal);
        self.take_calls();
        self.faults.note(Hand::Machine, (self.picture)());
        if report.complete() && !self.faults.dead() {
            if owed > 0 {
                self.report(
                    Invariant::Restorable,
                    "restore",
                    format!("restore says that it is complete and {owed} undos are owed"),
                );
            }
            let left = self.faults.ledger().ours();
            if !left.is_empty() {
                self.report(
                    Invariant::Restorable,
                    "restore",
                    format!(
                        "after restore the machine is not as found: {}",
                        differences(&left)
                    ),
                );
                self.faults.settle();
            }
        }
    }

    /// Opens a copy of the journal damaged at any byte: it must open, and must invent nothing.
    fn any_byte(&mut self) -> io::Result<()> {
        let directory = self.faults.directory();
        let Ok(truth) = journal::read(&directory) else {
            return Ok(());
        };
        let mut bytes = match std::fs::read(directory.join(JOURNAL_FILE)) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        damage_bytes(&mut bytes, &mut self.random);
        let copy = directory.with_file_name("any-byte");
        private_directory(&copy)?;
        std::fs::write(copy.join(JOURNAL_FILE), &bytes)?;
        if let Ok((journal, found)) = Journal::open(&copy, JournalOptions::default()) {
            let next = journal.next_action_id();
            for owed in journal.owed() {
                let id = owed.record.action.id;
                if id >= next || id >= truth.next_action {
                    self.report(
                        Invariant::Restorable,
                        "invented",
                        format!("a damaged journal owes action {id}, which never was"),
                    );
                } else if truth.owed.get(&id).is_some_and(|o| o.record != owed.record) {
                    self.report(
                        Invariant::Restorable,
                        "altered",
                        format!("a damaged journal owes action {id} with another record"),
                    );
                }
            }
            drop(found);
        }
        std::fs::remove_dir_all(copy)
    }

    fn happen(&mut self, what: Happening) -> io::Result<()> {
        match what {
            Happening::Resume => {
                self.faults.trace("an operator resumes".to_owned());
                self.ask(OperatorRequest::Resume);
            }
            Happening::Heal => {
                self.heal();
                self.at(self.clock.now() + MACHINE_CHANGED, Happening::Look);
            }
            Happening::Look => self.look_again(),
            Happening::Fault(kind) => {
                self.fault(kind)?;
                self.plan_next(kind);
            }
        }
        Ok(())
    }

    fn heal(&mut self) {
        self.compare(self.clock.now());
        self.faults.note(Hand::Machine, (self.picture)());
        self.subject.heal();
        self.beside.alone.heal();
        self.faults.note(Hand::Machine, (self.picture)());
    }

    /// Probes again some seconds after CPUs or nodes change, as the daemon does. Unreadable parts are read later.
    fn look_again(&mut self) {
        match self.faulty().machine() {
            Ok(machine) => self.ask(OperatorRequest::Machine(Box::new(machine))),
            Err(_) => self.at(self.clock.now() + MACHINE_CHANGED, Happening::Look),
        }
    }

    fn ask(&mut self, request: OperatorRequest) {
        if let Some(runtime) = &mut self.runtime {
            runtime.operator(request);
        }
    }

    fn fault(&mut self, kind: Kind) -> io::Result<()> {
        let now = self.clock.now();
        let mut done = true;
        match kind {
            Kind::SensorOutage => {
                let length = minutes(&mut self.random, 20.0);
                self.faults.sensors_out(now + length);
                // The engine learns the time only from samples, so blind time does not count (open).
                self.checkers.slept(length);
            }
            Kind::EffectorOutage => {
                let until = now + minutes(&mut self.random, 5.0);
                self.faults.effectors_out(until);
            }
            Kind::WallClockJump => {
                let days = self.random.gaussian() * 3.0;
                self.faults.jump_wall_clock((days * 86_400.0) as i64);
            }
            Kind::LongGap => {
                let gap = minutes(&mut self.random, 60.0);
                self.compare(now);
                self.subject.advance_to(now + gap);
                self.beside.alone.advance_to(now + gap);
                // The loop stands still, so nobody can watch: losses in that time count against nobody.
                self.beside.compared = now + gap;
                self.checkers.slept(gap);
            }
            Kind::DiskFull | Kind::DiskError => {
                let steps = 1 + (self.random.next_u64() % 40) as u32;
                let error = if kind == Kind::DiskFull {
                    io::ErrorKind::StorageFull
                } else {
                    io::ErrorKind::Other
                };
                self.faults.fail_disk(steps, error);
            }
            Kind::CrashAtCall => {
                let calls = self.random.next_u64() % 200;
                let reached = self.random.coin();
                self.faults.crash_after_calls(calls, reached);
            }
            Kind::CrashAtJournal => self.faults.crash_after_steps(self.random.next_u64() % 40),
            Kind::Restart => {
                let keep = self.random.next_u64() % 3 == 0;
                self.orderly_restart(keep)?;
            }
            Kind::Pause | Kind::Undo | Kind::UndoAll | Kind::Reconfigure => self.operate(kind),
            _ => done = self.disturb(kind),
        }
        if done {
            self.faults.count(kind);
            self.faults
                .trace(format!("{:.3} fault: {}", now.as_secs_f64(), kind_name(kind)));
        }
        Ok(())
    }

    fn operate(&mut self, kind: Kind) {
        match kind {
            Kind::Pause => {
                self.ask(OperatorRequest::Pause);
                let until = self.clock.now() + minutes(&mut self.random, 20.0);
                self.at(until, Happening::Resume);
            }
            Kind::Undo => {
                let ids: Vec<ActionId> = self
                    .runtime
                    .as_ref()
                    .map(|r| r.view().in_force.iter().map(|c| c.action).collect())
                    .unwrap_or_default();
                // Sometimes a number that never existed.
                let id = match pick(&mut self.random, &ids) {
                    Some(id) => *id,
                    None => ActionId(self.random.next_u64() % 10),
                };
                self.ask(OperatorRequest::Undo(id));
            }
            Kind::UndoAll => self.ask(OperatorRequest::UndoAll),
            Kind::Reconfigure => {
                let policy = reconfigured(&self.policy, &mut self.random);
                self.checkers
                    .set_limits(limits(&policy, self.subject.harm_per_day_max()));
                self.policy = policy.clone();
                self.ask(OperatorRequest::Configure(Box::new(policy)));
            }
            _ => {}
        }
    }

    /// Disturbs both machines alike. False without a target.
    fn disturb(&mut self, kind: Kind) -> bool {
        let now = self.clock.now();
        let mut done = true;
        self.compare(now);
        self.faults.note(Hand::Machine, (self.picture)());
        // The same happens to the machine left alone.
        let mut again = self.random.clone();
        let _ = self.beside.alone.disturb(kind, &mut again);
        match self.subject.disturb(kind, &mut self.random) {
            Some((text, person)) => {
                let hand = if person { Hand::Person } else { Hand::Machine };
                self.faults.note(hand, (self.picture)());
                if let Some(name) = self.subject.written().filter(|_| person) {
                    self.faults.chosen(&name);
                }
                self.faults.trace(format!("{:.3} {text}", now.as_secs_f64()));
            }
            None => {
                done = false;
                // A node that could not be drained in full was drained in part, by the same administrator.
                if kind == Kind::NodeOffline {
                    self.faults.note(Hand::Person, (self.picture)());
                }
            }
        }
        if matches!(kind, Kind::CpuOffline | Kind::NodeOffline) && done {
            let until = now + minutes(&mut self.random, 15.0);
            self.at(until, Happening::Heal);
            self.at(now + MACHINE_CHANGED, Happening::Look);
        }
        done
    }

    /// SIGTERM and a later start.
    fn orderly_restart(&mut self, keep: bool) -> io::Result<()> {
        if self.runtime.is_none() || self.stopping {
            return Ok(());
        }
        self.stopping = true;
        self.ask(OperatorRequest::Stop { keep });
        // A supervisor waits this long and then kills.
        let end = self.clock.now() + Nanoseconds::from_secs(90);
        self.run_until(end)?;
        if self.runtime.is_some() && !self.finished && !self.faults.dead() {
            self.faults.crash_now();
        }
        self.finished = false;
        self.stopping = false;
        if self.faults.dead() {
            return Ok(());
        }
        self.runtime = None;
        Ok(())
    }
}

fn minutes(random: &mut Random, mean: f64) -> Nanoseconds {
    Nanoseconds::from_secs_f64(random.exponential() * mean * 60.0)
}
