//! The seven invariants, checked from outside: nothing here asks the code under test whether it did well.
//!
//! **How restorability is checked.** A run without homeostat would be the obvious reference, but a program that is
//! faster allocates, migrates and ends at other times, so two runs are never comparable value by value. Instead every
//! change of the machine's settings is *attributed* at the moment when it happens: the [`Ledger`] takes a
//! [`Picture`] before and after every call of an effector, and what differs in between is ours; what differs at any
//! other time is the doing of a person, a program or the kernel. From this it keeps the picture of the machine *as if
//! we had never touched it*. Amounts (pages on a node, large pieces) are attributed by difference, so a program that
//! grows while its memory is moved is accounted for; settings (masks, switches) by value.
//!
//! | invariant | what is compared |
//! |---|---|
//! | restorable | untouched picture against the picture found, whenever nothing is owed; the undo record is on disk before the first slice |
//! | one change at a time | changes without an accepting verdict that are not being taken back: at most one workload |
//! | the person wins | a setting that a person wrote after us is never written again by us while its program lives |
//! | no harm | what is on belongs to a running trial or was accepted; the budget of harm exposure holds |
//! | bounded | starts per hour, calls and lines per turn, what is owed, the size of the journal, the length of a trial |
//! | deterministic | the hash over all effector calls and all lines of two runs of one seed |
//! | explained | every action carries a sentence with numbers, every line says something |
//! | (no panic) | nothing that the machine does ends the program |

use homeostat_model::{ActionId, Direction, EffectorId, ExperimentId, Nanoseconds, Verdict, WorkloadId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// A value in a picture.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// An amount: bytes, pieces, pages. Zero is the same as absent.
    Amount(i128),
    /// A setting: a mask, a switch, a name.
    Setting(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(n) => n.fmt(f),
            Self::Setting(s) => s.fmt(f),
        }
    }
}

/// Settings that nobody chose: a person who sets them gives the choice back.
pub const FREE: [&str; 2] = ["all", "on"];

/// Everything that an effector or a person can change, by name.
pub type Picture = BTreeMap<String, Value>;

/// One of the seven invariants of the design, or the liveness that follows when all faults have stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// Every change has a synced record of what was found, and is taken back from it.
    Restorable,
    /// One change at a time per workload and shared resource.
    OneAtATime,
    /// What a person wrote is not overwritten.
    PersonWins,
    /// Nothing is kept without an accepting verdict.
    NoHarm,
    /// Everything has a maximum.
    Bounded,
    /// Same seed, same story.
    Deterministic,
    /// Every command has its sentence and its numbers.
    Explained,
    /// When the faults stop, everything settles.
    Liveness,
    /// Nothing that the machine does ends the program.
    NoPanic,
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Restorable => "restorable",
            Self::OneAtATime => "one change at a time",
            Self::PersonWins => "the person wins",
            Self::NoHarm => "no harm",
            Self::Bounded => "bounded",
            Self::Deterministic => "deterministic",
            Self::Explained => "explained",
            Self::Liveness => "liveness",
            Self::NoPanic => "no panic",
        })
    }
}

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When (simulated time since boot).
    pub at: Nanoseconds,
    /// Which.
    pub invariant: Invariant,
    /// What was found, with names and numbers.
    pub text: String,
}

/// Who changed the machine between two pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hand {
    /// A program or the kernel.
    Machine,
    /// A person or another tuner.
    Person,
    /// An effector of homeostat.
    Ours,
}

/// Attributes every change of the machine's settings, and so knows how the machine would look untouched.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    last: Picture,
    untouched: Picture,
    /// Settings (not amounts) that a person wrote while ours was in force.
    persons: BTreeMap<String, Value>,
    /// Amounts that a person moved while something of ours was owed: whose page it was is not to be told from amounts
    /// (pages that an administrator drained from a node look like ours, and go back with ours). Not compared until
    /// nothing is owed any more; then they are as they are.
    disputed: BTreeSet<String>,
}

/// The part of a name that all amounts of one program have in common.
fn family(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(family, _)| family)
}

/// The value of a name, absent amounts being zero.
fn amount(value: Option<&Value>) -> Option<i128> {
    match value {
        None => Some(0),
        Some(Value::Amount(n)) => Some(*n),
        Some(Value::Setting(_)) => None,
    }
}

/// Whether two values are the same picture; an absent amount is zero.
fn same(a: Option<&Value>, b: Option<&Value>) -> bool {
    a == b || matches!((amount(a), amount(b)), (Some(x), Some(y)) if x == y && (a.is_some() || b.is_some()))
}

impl Ledger {
    /// A ledger that starts on an untouched machine.
    pub fn new(picture: Picture) -> Self {
        Self {
            untouched: picture.clone(),
            last: picture,
            persons: BTreeMap::new(),
            disputed: BTreeSet::new(),
        }
    }

    /// Takes note of what `hand` changed since the last picture. Returns the settings of a person that were
    /// overwritten by us: name, the person's value, ours.
    pub fn note(&mut self, hand: Hand, now: Picture) -> Vec<(String, Value, Option<Value>)> {
        let mut overwritten = Vec::new();
        if now == self.last {
            return overwritten;
        }
        let names: BTreeSet<&String> = self.last.keys().chain(now.keys()).collect();
        for name in names {
            let (before, after) = (self.last.get(name), now.get(name));
            if before == after {
                continue;
            }
            match hand {
                Hand::Ours => {
                    if let Some(persons) = self.persons.get(name)
                        && after != Some(persons)
                    {
                        overwritten.push((name.clone(), persons.clone(), after.cloned()));
                    }
                }
                Hand::Machine | Hand::Person => {
                    let ours = !same(self.untouched.get(name), before);
                    if hand == Hand::Person && matches!(before, Some(Value::Amount(_))) {
                        self.disputed.insert(family(name).to_owned());
                    }
                    let change = match (amount(before), amount(after)) {
                        (Some(b), Some(a)) => Some(a - b),
                        _ => None,
                    };
                    match (change, amount(self.untouched.get(name)), after) {
                        // What a program gives up is given up from what it would have had, too.
                        (Some(_), Some(_), None) => {
                            self.untouched.remove(name);
                        }
                        (Some(change), Some(untouched), Some(_)) => {
                            self.untouched
                                .insert(name.clone(), Value::Amount(untouched + change));
                        }
                        (_, _, None) => {
                            self.untouched.remove(name);
                            self.persons.remove(name);
                        }
                        (_, _, Some(value)) => {
                            // The kernel changes a mask that we set (a CPU went away): what it would have made of
                            // the untouched one is not known from this, and the undo writes the untouched one.
                            if hand == Hand::Person || !ours {
                                self.untouched.insert(name.clone(), value.clone());
                            }
                            if hand == Hand::Person
                                && FREE.iter().any(|free| *value == Value::Setting((*free).into()))
                            {
                                self.persons.remove(name);
                            } else if hand == Hand::Person {
                                self.persons.insert(name.clone(), value.clone());
                            }
                        }
                    }
                }
            }
        }
        self.last = now;
        overwritten
    }

    /// What differs now from the untouched picture: name, untouched, found.
    pub fn ours(&self) -> Vec<(String, Option<Value>, Option<Value>)> {
        let names: BTreeSet<&String> = self.last.keys().chain(self.untouched.keys()).collect();
        names
            .into_iter()
            .filter(|name| !same(self.untouched.get(*name), self.last.get(*name)))
            .filter(|name| !self.disputed.contains(family(name)))
            .map(|name| {
                (
                    name.clone(),
                    self.untouched.get(name).cloned(),
                    self.last.get(name).cloned(),
                )
            })
            .collect()
    }

    /// Nothing is owed any more: what was disputed is as it is.
    pub fn nothing_owed(&mut self) {
        for family_name in std::mem::take(&mut self.disputed) {
            self.untouched.retain(|name, _| family(name) != family_name);
            let now = self.last.iter().filter(|(name, _)| family(name) == family_name);
            self.untouched
                .extend(now.map(|(name, value)| (name.clone(), value.clone())));
        }
    }

    /// Accepts what is left over as the machine's own, after it was reported: one cause, one report.
    pub fn settle(&mut self) {
        self.untouched.clone_from(&self.last);
    }
}

/// The first few differences as a sentence.
pub fn differences(list: &[(String, Option<Value>, Option<Value>)]) -> String {
    let word = |v: &Option<Value>| {
        v.as_ref()
            .map_or_else(|| "nothing".to_owned(), ToString::to_string)
    };
    let mut parts: Vec<String> = list
        .iter()
        .take(4)
        .map(|(name, untouched, found)| format!("{name}: {} instead of {}", word(found), word(untouched)))
        .collect();
    if list.len() > 4 {
        parts.push(format!("{} more", list.len() - 4));
    }
    parts.join("; ")
}

/// One call of an effector, as seen at the seam.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Which action.
    pub action: ActionId,
    /// Whose.
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

/// What the mind says of itself in one turn: compared with what was seen at the seam.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// Running real trials: experiment, workload, whether it is being concluded.
    pub trials: Vec<(ExperimentId, WorkloadId, bool)>,
    /// Running placebos.
    pub placebos: Vec<ExperimentId>,
    /// Changes in force: action and workload.
    pub in_force: BTreeMap<ActionId, WorkloadId>,
    /// Verdicts known so far, newest first.
    pub verdicts: Vec<(ExperimentId, WorkloadId, Verdict)>,
    /// Harm exposure of the day and its limit, in percent × seconds.
    pub exposure: (f64, f64),
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
    /// Lines told in one turn.
    pub lines_per_turn: usize,
    /// Actions owed an undo at the same time.
    pub owed: usize,
    /// Turns in one simulated minute.
    pub turns_per_minute: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            starts_per_hour: 20,
            // The budget of a trial, plus an undo that is refused until it is given up and reported.
            trial: Nanoseconds::from_secs(3600 + 1800),
            calls_per_turn: 20_000,
            lines_per_turn: 512,
            owed: 512,
            turns_per_minute: 30_000,
        }
    }
}

/// What is known of an action from the calls at the seam alone.
#[derive(Clone, Debug)]
struct Acted {
    workload: WorkloadId,
    effector: EffectorId,
    /// Some slice of it reached the machine and no undo has ended since.
    on: bool,
    /// The last direction that it was driven in.
    direction: Direction,
    /// Since when no mind knows of it and nobody tries to take it back.
    orphan_since: Option<Nanoseconds>,
}

/// Everything the checkers remember of one run.
#[derive(Clone, Debug)]
pub struct Checkers {
    limits: Limits,
    /// By action number, over restarts.
    acted: BTreeMap<ActionId, Acted>,
    /// First sight of each trial that is running.
    trials: BTreeMap<ExperimentId, Nanoseconds>,
    starts: VecDeque<Nanoseconds>,
    started: BTreeSet<ExperimentId>,
    /// Workloads with an accepting verdict, from the first sight of it until the change is closed.
    accepted: BTreeSet<WorkloadId>,
    minute: (u64, u32),
    found: Vec<Violation>,
    /// How many of them were taken by `take_new`.
    told: usize,
    reported: BTreeSet<(Invariant, String)>,
}

/// Violations kept of one run; the first says most.
const FOUND_MAX: usize = 32;
/// Trials whose start is remembered.
const STARTED_MAX: usize = 4096;
/// A change in force that no mind knows of any more may stand for this long: the retry of a refused undo.
const ORPHAN: Nanoseconds = Nanoseconds::from_secs(180);

impl Checkers {
    /// Checkers with these limits.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            acted: BTreeMap::new(),
            trials: BTreeMap::new(),
            starts: VecDeque::new(),
            started: BTreeSet::new(),
            accepted: BTreeSet::new(),
            minute: (0, 0),
            found: Vec::new(),
            told: 0,
            reported: BTreeSet::new(),
        }
    }

    /// The whole machine, the loop with it, stood still for so long: that is nobody's delay.
    pub fn slept(&mut self, length: Nanoseconds) {
        for since in self.trials.values_mut() {
            *since += length;
        }
        for since in self.acted.values_mut().filter_map(|a| a.orphan_since.as_mut()) {
            *since += length;
        }
    }

    /// What was found so far, oldest first.
    pub fn found(&self) -> &[Violation] {
        &self.found
    }

    /// What was found since the last call of this.
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
        // Starts before the change count against the more generous of the two.
        self.limits = Limits {
            starts_per_hour: limits.starts_per_hour.max(self.limits.starts_per_hour),
            trial: limits.trial.max(self.limits.trial),
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
            Some(direction) => {
                let acted = self.acted.entry(call.action).or_insert_with(|| Acted {
                    workload: call.workload.clone(),
                    effector: call.effector.clone(),
                    on: false,
                    direction,
                    orphan_since: None,
                });
                acted.direction = direction;
                acted.orphan_since = None;
                match direction {
                    Direction::Apply if call.reached => acted.on = true,
                    Direction::Undo if call.done => acted.on = false,
                    Direction::Apply | Direction::Undo => {}
                }
                let off: Vec<ActionId> = self
                    .acted
                    .iter()
                    .filter(|(_, a)| !a.on)
                    .map(|(id, _)| *id)
                    .collect();
                // Bounded: of what is off only the latest are remembered.
                for id in off.iter().rev().skip(64) {
                    self.acted.remove(id);
                }
            }
        }
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

    /// What the mind says, against what was seen at the seam.
    pub fn said(&mut self, at: Nanoseconds, said: &Said) {
        self.count_starts(at, said);
        for (_, workload, verdict) in &said.verdicts {
            if *verdict == Verdict::Accepted {
                self.accepted.insert(workload.clone());
            }
        }
        // One at a time, from the seam: changes that are being tried (no verdict yet, not on their way out).
        let mut trying: BTreeSet<WorkloadId> = BTreeSet::new();
        let mut orphans = Vec::new();
        for (id, acted) in self.acted.iter_mut().filter(|(_, a)| a.on) {
            if acted.effector.as_str() == "placebo" {
                continue;
            }
            let tried = said.trials.iter().any(|(_, w, _)| *w == acted.workload);
            let in_force = said.in_force.contains_key(id);
            if tried && !in_force {
                trying.insert(acted.workload.clone());
            }
            if in_force
                && !self.accepted.contains(&acted.workload)
                && !tried
                && acted.direction == Direction::Apply
            {
                orphans.push((
                    *id,
                    acted.clone(),
                    "is called in force without an accepting verdict",
                ));
            }
            let orphan = !tried && !in_force;
            acted.orphan_since = orphan.then(|| acted.orphan_since.unwrap_or(at));
            if acted.orphan_since.is_some_and(|since| at - since > ORPHAN) {
                orphans.push((
                    *id,
                    acted.clone(),
                    "is on although no trial runs and nothing is in force",
                ));
            }
        }
        if trying.len() > 1 || said.trials.len() > 1 {
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
        for (id, acted, what) in orphans {
            self.report(
                at,
                Invariant::NoHarm,
                &format!("{}/{what}", acted.effector),
                format!("action {id} ({} on {}) {what}", acted.effector, acted.workload),
            );
        }
        let (exposure, limit) = said.exposure;
        // A trial may start just below the limit; what one trial can lose comes on top.
        let most = limit + self.limits.trial.as_secs_f64() * 100.0;
        if !exposure.is_finite() || exposure < 0.0 || exposure > most {
            self.report(
                at,
                Invariant::NoHarm,
                "exposure",
                format!("harm exposure of the day is {exposure} percent-seconds of {limit}"),
            );
        }
    }

    fn count_starts(&mut self, at: Nanoseconds, said: &Said) {
        let running: BTreeSet<ExperimentId> = said
            .trials
            .iter()
            .map(|(id, _, _)| *id)
            .chain(said.placebos.iter().copied())
            .collect();
        for (id, _, _) in &said.trials {
            if self.started.insert(*id) {
                self.starts.push_back(at);
            }
            while self.started.len() > STARTED_MAX {
                self.started.pop_first();
            }
        }
        while self
            .starts
            .front()
            .is_some_and(|t| at - *t > Nanoseconds::from_secs(3600))
        {
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

    /// The daemon was restarted: running trials ended with it, and recovery undid accepted changes unless they are kept.
    pub fn restarted(&mut self, kept: &BTreeSet<ActionId>) {
        self.trials.clear();
        self.starts.clear();
        let still: BTreeSet<WorkloadId> = self
            .acted
            .iter()
            .filter(|(id, a)| a.on && kept.contains(id))
            .map(|(_, a)| a.workload.clone())
            .collect();
        self.accepted.retain(|w| still.contains(w));
    }

    /// What is owed in the journal on disk against what was done at the seam.
    pub fn owed(&mut self, at: Nanoseconds, owed: &BTreeSet<ActionId>, ledger: &Ledger) {
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
            .filter(|(id, a)| a.on && a.effector.as_str() != "placebo" && !owed.contains(id))
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
mod tests {
    use super::*;

    fn picture(pairs: &[(&str, Value)]) -> Picture {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect()
    }
    fn set(text: &str) -> Value {
        Value::Setting(text.to_owned())
    }

    #[test]
    fn growth_during_a_move_is_the_programs_and_the_move_is_ours() {
        let mut ledger = Ledger::new(picture(&[("a/0", Value::Amount(100)), ("a/1", Value::Amount(0))]));
        ledger.note(
            Hand::Ours,
            picture(&[("a/0", Value::Amount(40)), ("a/1", Value::Amount(60))]),
        );
        ledger.note(
            Hand::Machine,
            picture(&[("a/0", Value::Amount(40)), ("a/1", Value::Amount(90))]),
        );
        assert_eq!(ledger.ours().len(), 2);
        ledger.note(
            Hand::Ours,
            picture(&[("a/0", Value::Amount(100)), ("a/1", Value::Amount(30))]),
        );
        assert_eq!(ledger.ours(), vec![]);
    }

    #[test]
    fn a_mask_not_put_back_is_found_and_a_persons_value_overwritten_too() {
        let mut ledger = Ledger::new(picture(&[("mask", set("all"))]));
        ledger.note(Hand::Ours, picture(&[("mask", set("0-3"))]));
        assert_eq!(ledger.ours().len(), 1);
        ledger.note(Hand::Person, picture(&[("mask", set("4"))]));
        assert_eq!(ledger.ours(), vec![], "what a person chose is how it is to be");
        let overwritten = ledger.note(Hand::Ours, picture(&[("mask", set("all"))]));
        assert_eq!(overwritten, vec![("mask".to_owned(), set("4"), Some(set("all")))]);
        assert!(differences(&ledger.ours()).contains("mask: all instead of 4"));
    }

    #[test]
    fn what_ends_takes_its_changes_along() {
        let mut ledger = Ledger::new(picture(&[("mask", set("all")), ("a/0", Value::Amount(7))]));
        ledger.note(
            Hand::Ours,
            picture(&[("mask", set("0")), ("a/0", Value::Amount(2))]),
        );
        ledger.note(Hand::Machine, Picture::new());
        assert_eq!(ledger.ours(), vec![]);
    }

    fn call(action: u64, workload: &str, direction: Option<Direction>, done: bool) -> Call {
        Call {
            action: ActionId(action),
            workload: workload.into(),
            effector: "switch".into(),
            direction,
            why: "predicted gain 12 %".into(),
            reached: true,
            done,
        }
    }

    #[test]
    fn each_checker_finds_what_it_is_for() {
        let second = Nanoseconds::from_secs;
        let mut c = Checkers::new(Limits::default());
        c.called(second(1), &call(1, "a", Some(Direction::Apply), true));
        c.owed(second(1), &BTreeSet::new(), &Ledger::default());
        assert_eq!(c.found()[0].invariant, Invariant::Restorable);

        let mut c = Checkers::new(Limits::default());
        c.called(second(1), &call(1, "a", Some(Direction::Apply), true));
        c.said(
            second(2),
            &Said {
                exposure: (0.0, 1.0),
                ..Said::default()
            },
        );
        assert!(c.found().is_empty(), "it may be on its way out");
        c.said(
            second(400),
            &Said {
                exposure: (0.0, 1.0),
                ..Said::default()
            },
        );
        assert_eq!(c.found()[0].invariant, Invariant::NoHarm);

        let mut c = Checkers::new(Limits::default());
        let trials = ["a", "b"]
            .map(|w| (ExperimentId(w.len() as u64), w.into(), false))
            .to_vec();
        c.said(
            second(1),
            &Said {
                trials,
                ..Said::default()
            },
        );
        assert_eq!(c.found()[0].invariant, Invariant::OneAtATime);

        let mut c = Checkers::new(Limits {
            starts_per_hour: 2,
            ..Limits::default()
        });
        for i in 0..3u64 {
            let trials = vec![(ExperimentId(i), WorkloadId::from("a"), false)];
            c.said(
                second(i * 100),
                &Said {
                    trials,
                    ..Said::default()
                },
            );
        }
        assert_eq!(c.found()[0].invariant, Invariant::Bounded);

        let mut c = Checkers::new(Limits::default());
        let silent = Call {
            why: "because".into(),
            ..call(1, "a", None, false)
        };
        c.called(second(1), &silent);
        assert_eq!(c.found()[0].invariant, Invariant::Explained);

        let mut c = Checkers::new(Limits {
            turns_per_minute: 10,
            ..Limits::default()
        });
        for _ in 0..11 {
            c.turned(second(5), 1, &[]);
        }
        assert_eq!(c.found()[0].invariant, Invariant::Bounded);
        c.turned(second(5), 1, &[" ".to_owned()]);
        assert_eq!(c.found()[1].invariant, Invariant::Explained);
    }
}
