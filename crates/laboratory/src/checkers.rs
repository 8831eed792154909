//! The seven invariants, checked from outside: the verdicts of the code under test play no part.
//!
//! Two runs never compare value by value, since a faster program allocates and ends at other times. So every change of
//! settings is *attributed* when it happens. The [`Ledger`] compares a [`Picture`] before and after every effector
//! call: that difference is ours, others belong to people, programs or the kernel. Amounts (pages) are attributed by
//! difference, so a program may grow during a move; settings by value. The world gives the true effect of kept changes,
//! without noise. The engine's claims are compared with it, never the reverse. The variants of [`Invariant`] say what
//! is compared.

mod evidence;
mod ledger;
mod truth;

pub use evidence::{Gain, Speed, Speeds};
pub use ledger::{Hand, Ledger, Picture, Value, differences};
pub use truth::Truth;

use evidence::{Acted, Coins};
use homeostat_model::words;
use homeostat_model::{Action, ActionId, Direction, EffectorId, ExperimentId, Nanoseconds, WorkloadId};
use homeostat_store::journal::Coin;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

words!(
    /// An invariant of the design, or the liveness after all faults have stopped.
    Invariant {
        /// Every change has a synced record of what was found, before the first slice, and is taken back from it. The
        /// untouched picture is compared with the found one whenever nothing is owed.
        Restorable = "restorable",
        /// Unproven changes touch one workload, or several tried as one by words and assignments.
        OneAtATime = "one change at a time",
        /// A setting that a person wrote after us is never written by us again while its program lives.
        PersonWins = "the person wins",
        /// What stays on was tried ([`Gain`]), and the work lost against the machine left alone stays in its budget.
        NoHarm = "no harm",
        /// Starts per hour, calls and lines per turn, what is owed, journal size and trial length are bounded.
        Bounded = "bounded",
        /// Two runs of one seed have the same hash over all effector calls and lines.
        Deterministic = "deterministic",
        /// Every action has a sentence with numbers, every line says something, and what is said to be in force is on.
        Explained = "explained",
        /// When the faults stop, everything settles.
        Liveness = "liveness",
        /// Nothing that the machine does ends the program.
        NoPanic = "no panic",
    }
);

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When (simulated time since boot).
    pub at: Nanoseconds,
    /// The invariant.
    pub invariant: Invariant,
    /// The finding, with names and numbers.
    pub text: String,
}

/// One call of an effector, as seen at the seam.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The action.
    pub action: ActionId,
    /// The workload.
    pub workload: WorkloadId,
    /// By which effector.
    pub effector: EffectorId,
    /// `None`: it was only prepared.
    pub direction: Option<Direction>,
    /// The sentence that came with it.
    pub why: String,
    /// Whether it reached the machine, or a fault took its place.
    pub reached: bool,
    /// Whether it reported to be done.
    pub done: bool,
}

impl Call {
    /// One that did not reach the machine yet.
    pub fn of(action: &Action, direction: Option<Direction>) -> Self {
        Self {
            action: action.id,
            workload: action.workload.clone(),
            effector: action.effector.clone(),
            direction,
            why: action.why.clone(),
            reached: false,
            done: false,
        }
    }
}

/// The engine's claims in one turn, to compare with the seam.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// Running real trials: experiment, and the workloads that it says it tries as one change.
    pub trials: Vec<(ExperimentId, Vec<WorkloadId>)>,
    /// Running placebos.
    pub placebos: Vec<ExperimentId>,
    /// Changes in force: action and workload.
    pub in_force: BTreeMap<ActionId, WorkloadId>,
    /// Harm exposure of the day as it counts it, in percent × seconds.
    pub exposure: f64,
}

/// Limits that the checkers hold the run to.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Trials (placebos not counted) started in any hour.
    pub starts_per_hour: u32,
    /// Longest life of one trial, from its start to its verdict.
    pub trial: Nanoseconds,
    /// Calls of sensors and effectors in one turn.
    pub calls_per_turn: u64,
    /// Lines in one turn.
    pub lines_per_turn: usize,
    /// Actions owed an undo at the same time.
    pub owed: usize,
    /// Turns in one simulated minute.
    pub turns_per_minute: u32,
    /// Harm of any 24 hours: work lost against the machine left alone, in percent × seconds of one program.
    pub harm_per_day: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            starts_per_hour: 20,
            // The budget of a trial, plus a refused undo until it is given up and reported.
            trial: Nanoseconds::from_secs(3600 + 1800),
            calls_per_turn: 20_000,
            lines_per_turn: 512,
            owed: 512,
            turns_per_minute: 30_000,
            harm_per_day: 20_000.0 + HARM_UNTIL_ENDED,
        }
    }
}

/// Everything the checkers remember of one run.
#[derive(Clone, Debug)]
pub struct Checkers {
    limits: Limits,
    acted: BTreeMap<ActionId, Acted>,
    trials: BTreeMap<ExperimentId, Nanoseconds>,
    starts: VecDeque<Nanoseconds>,
    started: BTreeSet<ExperimentId>,
    /// Changes whose trial began within the last hour, from the seam.
    begun: VecDeque<Nanoseconds>,
    coins: BTreeMap<ExperimentId, Coins>,
    owed: BTreeSet<ActionId>,
    /// Work lost within the last day: time, and percent × seconds of one program.
    lost: VecDeque<(Nanoseconds, f64)>,
    truth: Truth,
    minute: (u64, u32),
    found: Vec<Violation>,
    told: usize,
    reported: BTreeSet<(Invariant, String)>,
}

const FOUND_MAX: usize = 32;
const STARTED_MAX: usize = 4096;
const COINS_KEPT: usize = 256;
/// Longest time in force of a change unknown to any engine: the retry of a refused undo.
const ORPHAN: Nanoseconds = Nanoseconds::from_secs(180);
/// Effectors that may move pages again that an earlier action has moved.
const MOVES_MEMORY: [&str; 2] = ["thread_placement", "page_placement"];
/// Period for asking the true gain of kept changes.
const LOOK_EVERY: Nanoseconds = Nanoseconds::from_secs(300);
/// A change that costs its program at least this much does harm.
const HARM: f64 = 0.05;
/// Probes after which a harmful change must be gone. The guard's detectors need a few.
const PROBES_OF_HARM_MAX: u32 = 20;
/// Largest cost of a kept change's probes, as a share of its program's work. The guard allows itself half a percent
/// over its life. Faults slow down instant changes, and the first ten probes come close together.
const PROBE_COST_MAX: f64 = 0.05;
/// Probes before their cost is checked.
const PROBES_FOR_COST: u32 = 10;
/// The pairs right after an acceptance may cost what the change earns in this (seconds): a joint change is looked at for longer.
const MEASURED_AFRESH_S: f64 = 300.0;
/// A program works if it would use at least this many CPUs on the machine left alone: the floor for trials.
pub const WORKS_FROM: f64 = 0.05;
/// Allowed loss per day above the budget of the trials. A trial may start just below the budget, and a kept change can
/// become a loss. A guard needs the interval between two probes (half an hour, or more if memory moves) and eight
/// losing pairs. Assumed: a third of one program's work for half an hour, including refused undos and sensor faults.
pub const HARM_UNTIL_ENDED: f64 = 60_000.0;
const DAY: Nanoseconds = Nanoseconds::from_secs(86_400);
const HOUR: Nanoseconds = Nanoseconds::from_secs(3600);

impl Checkers {
    /// Checkers with these limits.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            acted: BTreeMap::new(),
            trials: BTreeMap::new(),
            starts: VecDeque::new(),
            started: BTreeSet::new(),
            begun: VecDeque::new(),
            coins: BTreeMap::new(),
            owed: BTreeSet::new(),
            lost: VecDeque::new(),
            truth: Truth::default(),
            minute: (0, 0),
            found: Vec::new(),
            told: 0,
            reported: BTreeSet::new(),
        }
    }

    /// The machine and the loop stood still for this time: nobody's delay.
    pub fn slept(&mut self, length: Nanoseconds) {
        for since in self.trials.values_mut() {
            *since += length;
        }
        for acted in self.acted.values_mut() {
            let times = [
                &mut acted.orphan_since,
                &mut acted.first,
                &mut acted.off_since,
                &mut acted.kept_since,
            ];
            for since in times.into_iter().flatten() {
                *since += length;
            }
        }
    }

    /// Findings so far, oldest first.
    pub fn found(&self) -> &[Violation] {
        &self.found
    }

    /// Findings since the last call.
    pub fn take_new(&mut self) -> Vec<Violation> {
        let new = self.found[self.told..].to_vec();
        self.told = self.found.len();
        new
    }

    /// Trials seen so far, placebos not counted.
    pub fn trials_started(&self) -> usize {
        self.started.len()
    }

    /// The limits are those of a new configuration.
    pub fn set_limits(&mut self, limits: Limits) {
        // Starts before the change count against the more generous limit.
        self.limits = Limits {
            starts_per_hour: limits.starts_per_hour.max(self.limits.starts_per_hour),
            trial: limits.trial.max(self.limits.trial),
            harm_per_day: limits.harm_per_day.max(self.limits.harm_per_day),
            ..limits
        };
    }

    /// Enters a violation; the same one is entered once.
    pub fn report(&mut self, at: Nanoseconds, invariant: Invariant, key: &str, text: String) {
        if self.found.len() < FOUND_MAX && self.reported.insert((invariant, key.to_owned())) {
            self.found.push(Violation { at, invariant, text });
        }
    }

    /// A call at the seam.
    pub fn called(&mut self, at: Nanoseconds, call: &Call) {
        match call.direction {
            None => {
                if call.why.trim().len() < 8
                    || !call.why.chars().any(|c| c.is_ascii_digit()) && call.effector.as_str() != "placebo"
                {
                    self.report(
                        at,
                        Invariant::Explained,
                        call.effector.as_str(),
                        format!(
                            "action {} ({} on {}) says only {:?}: no number that justifies it",
                            call.action, call.effector, call.workload, call.why
                        ),
                    );
                }
            }
            Some(direction) => self.driven(at, call, direction),
        }
    }

    fn driven(&mut self, at: Nanoseconds, call: &Call, direction: Direction) {
        // Further parts of a rollout are no trials. A try together with another one is checked as one change at a time.
        let begins = self.acted.iter().all(|(id, a)| {
            let beside = a.direction == Direction::Apply && !self.proven(a);
            let follows = a.workload == call.workload && a.effector == call.effector;
            *id == call.action || !a.on || a.is_placebo() || !(beside || follows)
        });
        let acted = self
            .acted
            .entry(call.action)
            .or_insert_with(|| Acted::new(&call.workload, &call.effector, direction, &call.why));
        if acted.direction == Direction::Undo && direction == Direction::Apply {
            acted.rounds += 1;
        }
        acted.direction = direction;
        acted.orphan_since = None;
        if let Some(since) = acted.off_since {
            if direction == Direction::Apply && call.reached && acted.kept() {
                acted.probed.0 += 1;
                acted.probed.1 += at - since;
                self.truth.probes += 1;
            }
        }
        match direction {
            Direction::Apply if call.reached => {
                acted.on = true;
                acted.done |= call.done;
                acted.off_since = None;
                if acted.first.is_none() {
                    acted.first = Some(at);
                    if begins && !acted.is_placebo() {
                        self.begun.push_back(at);
                    }
                }
            }
            Direction::Undo if call.done => {
                acted.on = false;
                acted.off_since = Some(at);
            }
            Direction::Apply | Direction::Undo => {}
        }
        let (probes, cost) = (acted.probed.0, acted.probe_cost(at));
        if probes >= PROBES_FOR_COST {
            self.probes_cost(at, call, probes, cost);
        }
        while self.begun.front().is_some_and(|t| at - *t > HOUR) {
            self.begun.pop_front();
        }
        let (begun, most) = (self.begun.len(), self.limits.starts_per_hour as usize);
        if begun > most {
            self.report(
                at,
                Invariant::Bounded,
                "begun",
                format!("{begun} changes began to be tried within an hour, at most {most} are allowed"),
            );
        }
        let off: Vec<ActionId> = self
            .acted
            .iter()
            .filter(|(id, a)| !a.on && !self.owed.contains(id))
            .map(|(id, _)| *id)
            .collect();
        // Of finished actions only the latest are remembered.
        for id in off.iter().rev().skip(64) {
            self.acted.remove(id);
        }
    }

    fn probes_cost(&mut self, at: Nanoseconds, call: &Call, probes: u32, cost: f64) {
        self.truth.probe_cost_max = self.truth.probe_cost_max.max(cost);
        if cost > PROBE_COST_MAX {
            self.report(
                at,
                Invariant::NoHarm,
                &format!("probes/{}", call.effector),
                format!(
                    "{probes} probes of action {} ({} on {}) cost {:.1} % of the work since it is kept",
                    call.action,
                    call.effector,
                    call.workload,
                    cost * 100.0
                ),
            );
        }
    }

    /// Takes the assignments on disk before the calls of the same turn: calls until now followed the earlier ones.
    pub fn tossed(&mut self, at: Nanoseconds, coins: &[Coin]) {
        for coin in coins {
            let known = self.coins.entry(coin.experiment).or_default();
            if !known.is_new(coin) {
                continue;
            }
            let before = known.take(coin, at);
            for acted in self.acted.values_mut().filter(|a| !a.is_placebo()) {
                if let Some(face) = before {
                    acted.follow(coin.experiment, face);
                }
                acted.roll_out(coin.experiment, known);
            }
        }
        while self.coins.len() > COINS_KEPT {
            self.coins.pop_first();
        }
    }

    /// Whether a change was visibly tried, or follows one that was.
    fn proven(&self, acted: &Acted) -> bool {
        acted.tried()
            || acted
                .leader
                .and_then(|leader| self.acted.get(&leader))
                .is_some_and(|l| l.tried() && l.workload == acted.workload && l.effector == acted.effector)
    }

    /// After a turn of the loop.
    pub fn turned(&mut self, at: Nanoseconds, calls: u64, lines: &[String]) {
        let minute = at.0 / 60_000_000_000;
        if self.minute.0 == minute {
            self.minute.1 += 1;
        } else {
            self.minute = (minute, 1);
        }
        let Limits {
            calls_per_turn,
            lines_per_turn,
            turns_per_minute,
            ..
        } = self.limits;
        if self.minute.1 == turns_per_minute + 1 {
            self.report(
                at,
                Invariant::Bounded,
                "turns",
                format!("more than {turns_per_minute} turns in one minute: the loop spins"),
            );
        }
        if calls > calls_per_turn {
            self.report(
                at,
                Invariant::Bounded,
                "calls",
                format!("{calls} calls of sensors and effectors in one turn"),
            );
        }
        if lines.len() > lines_per_turn {
            self.report(
                at,
                Invariant::Bounded,
                "lines",
                format!("{} lines told in one turn", lines.len()),
            );
        }
        if lines.iter().any(|l| l.trim().is_empty()) {
            self.report(
                at,
                Invariant::Explained,
                "empty",
                "an empty line was told".to_owned(),
            );
        }
    }

    /// Compares the engine's claims with the seam.
    pub fn said(&mut self, at: Nanoseconds, said: &Said) {
        self.count_starts(at, said);
        let (trying, wrong) = self.standing(at, said);
        // Programs are tried as one change only by its sentence. The same assignments then prove each.
        let as_one = said
            .trials
            .iter()
            .any(|(_, of)| trying.iter().all(|w| of.contains(w)));
        if (trying.len() > 1 && !as_one) || said.trials.len() > 1 {
            let names: Vec<String> = trying.iter().map(ToString::to_string).collect();
            self.report(
                at,
                Invariant::OneAtATime,
                "trials",
                format!(
                    "{} real trials at a time, changes on trial on: {}",
                    said.trials.len(),
                    names.join(", ")
                ),
            );
        }
        for (id, invariant, what) in wrong {
            let Some(acted) = self.acted.get(&id).cloned() else {
                continue;
            };
            self.report(
                at,
                invariant,
                &format!("{}/{what}", acted.effector),
                format!("action {id} ({} on {}) {what}", acted.effector, acted.workload),
            );
        }
        if !said.exposure.is_finite() || said.exposure < 0.0 {
            self.report(
                at,
                Invariant::NoHarm,
                "exposure",
                format!("it counts a harm exposure of {} percent-seconds", said.exposure),
            );
        }
    }

    /// This action, those tried as one change with it (same assignments), and the parts that followed them.
    pub fn tried_with(&self, id: ActionId) -> Vec<ActionId> {
        let leader = |a: &Acted, of: ActionId| a.leader.unwrap_or(of);
        let Some(own) = self.acted.get(&id) else {
            return vec![id];
        };
        let tried_by = self.acted.get(&leader(own, id)).and_then(|a| a.tried_by);
        let with = |(other, a): &(&ActionId, &Acted)| {
            **other != id
                && tried_by.is_some()
                && self.acted.get(&leader(a, **other)).and_then(|l| l.tried_by) == tried_by
        };
        let others = self.acted.iter().filter(with).map(|(other, _)| *other);
        std::iter::once(id).chain(others).collect()
    }

    /// Workloads with an unproven change in trial, from the seam, and changes that contradict the engine.
    fn standing(
        &mut self,
        at: Nanoseconds,
        said: &Said,
    ) -> (BTreeSet<WorkloadId>, Vec<(ActionId, Invariant, &'static str)>) {
        // One at a time, from the seam: unproven changes that are not being undone.
        let mut trying: BTreeSet<WorkloadId> = BTreeSet::new();
        let mut wrong = Vec::new();
        let mut kept = Vec::new();
        let mut orphans = Vec::new();
        // Pages moved again later, with threads or alone, wait until that move is undone.
        let waits = |id: &ActionId, acted: &Acted| {
            let above = |(later, l): (&ActionId, &Acted)| {
                later > id
                    && l.workload == acted.workload
                    && MOVES_MEMORY.contains(&l.effector.as_str())
                    && l.on
                    && l.direction == Direction::Undo
            };
            acted.effector.as_str() == "page_placement" && self.acted.iter().any(above)
        };
        for (id, acted) in self.acted.iter().filter(|(_, a)| !a.is_placebo()) {
            let tried = said.trials.iter().any(|(_, of)| of.contains(&acted.workload));
            let in_force = said.in_force.contains_key(id);
            let limit = self.limits.trial;
            if !acted.on {
                if in_force && acted.off_since.is_some_and(|since| at - since > limit) {
                    wrong.push((*id, Invariant::Explained, "is said to be in force and is off"));
                }
                continue;
            }
            let old = acted.first.is_none_or(|first| at - first > limit);
            let proven = self.proven(acted);
            if acted.direction == Direction::Apply && !proven {
                trying.insert(acted.workload.clone());
                if in_force && !tried {
                    let what = "is called in force and no trial of it was seen";
                    wrong.push((*id, Invariant::NoHarm, what));
                } else if old {
                    let what = "is on for longer than a trial may last and no trial of it was seen";
                    wrong.push((*id, Invariant::NoHarm, what));
                }
            }
            if proven && (old || (in_force && !tried)) {
                kept.push(*id);
            }
            if !tried && !in_force && !waits(id, acted) {
                orphans.push(*id);
                if acted.orphan_since.is_some_and(|since| at - since > ORPHAN) {
                    let what = "is on although no trial runs and nothing is in force";
                    wrong.push((*id, Invariant::NoHarm, what));
                }
            }
        }
        for (id, acted) in &mut self.acted {
            if kept.contains(id) {
                acted.kept_since.get_or_insert(at);
            }
            acted.orphan_since = orphans.contains(id).then(|| acted.orphan_since.unwrap_or(at));
        }
        (trying, wrong)
    }

    fn count_starts(&mut self, at: Nanoseconds, said: &Said) {
        let running: BTreeSet<ExperimentId> = said
            .trials
            .iter()
            .map(|(id, _)| *id)
            .chain(said.placebos.iter().copied())
            .collect();
        for (id, _) in &said.trials {
            if self.started.insert(*id) {
                self.starts.push_back(at);
            }
            while self.started.len() > STARTED_MAX {
                self.started.pop_first();
            }
        }
        while self.starts.front().is_some_and(|t| at - *t > HOUR) {
            self.starts.pop_front();
        }
        if self.starts.len() > self.limits.starts_per_hour as usize {
            let (n, most) = (self.starts.len(), self.limits.starts_per_hour);
            self.report(
                at,
                Invariant::Bounded,
                "starts",
                format!("{n} trials started within an hour, at most {most} are allowed"),
            );
        }
        self.trials.retain(|id, _| running.contains(id));
        for id in running {
            let since = *self.trials.entry(id).or_insert(at);
            if at - since > self.limits.trial {
                let (length, most) = (at - since, self.limits.trial);
                self.report(
                    at,
                    Invariant::Bounded,
                    "trial",
                    format!("experiment {id} runs for {length}, longer than {most}"),
                );
            }
        }
    }

    /// The daemon was restarted: running trials ended with it, and it counts its starts anew.
    pub fn restarted(&mut self) {
        self.trials.clear();
        self.starts.clear();
        self.begun.clear();
    }

    /// Compares the journal on disk with the actions at the seam.
    pub fn owed(&mut self, at: Nanoseconds, owed: &BTreeSet<ActionId>, ledger: &Ledger) {
        self.owed.clone_from(owed);
        if owed.len() > self.limits.owed {
            self.report(
                at,
                Invariant::Bounded,
                "owed",
                format!("{} actions are owed an undo", owed.len()),
            );
        }
        let uncovered: Vec<(ActionId, Acted)> = self
            .acted
            .iter()
            .filter(|(id, a)| a.on && !a.is_placebo() && !owed.contains(id))
            .map(|(id, a)| (*id, a.clone()))
            .collect();
        for (id, acted) in uncovered {
            self.report(
                at,
                Invariant::Restorable,
                "uncovered",
                format!(
                    "action {id} ({} on {}) is on and no undo is owed in the journal",
                    acted.effector, acted.workload
                ),
            );
        }
        if owed.is_empty() {
            let left = ledger.ours();
            if !left.is_empty() {
                self.report(
                    at,
                    Invariant::Restorable,
                    "leftover",
                    format!(
                        "nothing is owed, yet the machine is not as found: {}",
                        differences(&left)
                    ),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests;
