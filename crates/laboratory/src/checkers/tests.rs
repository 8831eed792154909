//! Every checker can fail: a small stream of calls, coins and sayings that passes, and the same stream with one thing broken.

use super::*;
use homeostat_model::Verdict;

const SECOND: Nanoseconds = Nanoseconds::from_secs(1);

/// What is broken in the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    /// The change is kept without any trial.
    NeverTried,
    /// Coins are on disk, and the change stays on whatever they say.
    CoinsIgnored,
    /// The change is switched, and no coin is on disk.
    NoCoins,
    /// As many coins as one block takes.
    OneCoin,
    /// It is on trial by its own words, for ever.
    EndlessTrial,
    /// What it says to be in force was taken back long ago.
    SaysWhatIsNot,
    /// Nobody knows of it any more.
    Forgotten,
    /// Two programs are tried at the same time, and it speaks of one.
    TwoAtOnce,
    /// No undo is owed on disk.
    NotOwed,
    /// Undone by its own words, and the mask is still there.
    UndoLeavesMask,
    /// It writes over what a person chose.
    Overwrites,
    /// It says nothing that justifies it.
    Silent,
    /// A further part names a change that was never tried.
    FalseLeader,
    /// More starts than are allowed.
    ManyStarts,
    /// The mind counts its own harm as less than nothing.
    CountsNonsense,
}

/// Drives the checkers as a campaign does.
struct Stream {
    checkers: Checkers,
    ledger: Ledger,
    now: Nanoseconds,
    mask: String,
    owed: BTreeSet<ActionId>,
    coins: Vec<Coin>,
    said: Said,
    broken: Broken,
}

impl Stream {
    fn new(broken: Broken) -> Self {
        let picture = |mask: &str| Picture::from([("a/mask".to_owned(), Value::Setting(mask.to_owned()))]);
        Self {
            checkers: Checkers::new(Limits {
                starts_per_hour: 3,
                trial: SECOND * 2000,
                ..Limits::default()
            }),
            ledger: Ledger::new(picture("all")),
            now: SECOND,
            mask: "all".into(),
            owed: BTreeSet::new(),
            coins: Vec::new(),
            said: Said::default(),
            broken,
        }
    }

    fn picture(&self) -> Picture {
        Picture::from([("a/mask".to_owned(), Value::Setting(self.mask.clone()))])
    }

    fn call(&mut self, action: u64, workload: &str, direction: Option<Direction>, why: &str) {
        self.checkers.called(
            self.now,
            &Call {
                action: ActionId(action),
                workload: workload.into(),
                effector: "mask".into(),
                direction,
                why: why.into(),
                reached: direction.is_some(),
                done: direction.is_some(),
            },
        );
    }

    fn switch(&mut self, action: u64, workload: &str, on: bool, why: &str) {
        let direction = if on { Direction::Apply } else { Direction::Undo };
        if workload == "a" {
            let undone = if self.broken == Broken::UndoLeavesMask {
                "0-3"
            } else {
                "all"
            };
            self.mask = if on { "0-3" } else { undone }.into();
        }
        let overwritten = self.ledger.note(Hand::Ours, self.picture());
        for (name, ..) in overwritten {
            self.checkers
                .report(self.now, Invariant::PersonWins, "overwritten", name);
        }
        self.call(action, workload, Some(direction), why);
    }

    /// A turn passes and everything is looked at.
    fn turn(&mut self, seconds: u64) {
        self.now += SECOND * seconds;
        let coins = self.coins.clone();
        self.checkers.tossed(self.now, &coins);
        self.checkers.turned(self.now, 10, &[]);
        self.checkers.said(self.now, &self.said);
        let owed = self.owed.clone();
        self.checkers.owed(self.now, &owed, &self.ledger);
    }

    fn toss(&mut self, experiment: u64, block: u32, on: bool) {
        if self.broken != Broken::NoCoins && (self.broken != Broken::OneCoin || block == 0) {
            self.coins.push(Coin {
                experiment: ExperimentId(experiment),
                block,
                on,
            });
        }
        self.turn(1);
    }

    fn in_trial(&mut self, action: u64, workload: &str) {
        self.said.trials = vec![(ExperimentId(action), vec![workload.into()])];
    }

    /// A whole trial of one change, and its end.
    fn trial(&mut self, action: u64, verdict: Verdict) {
        let why = if self.broken == Broken::Silent {
            "because"
        } else {
            "12 % may be gained"
        };
        self.call(action, "a", None, why);
        if self.broken != Broken::NotOwed {
            self.owed.insert(ActionId(action));
        }
        self.in_trial(action, "a");
        self.switch(action, "a", true, why);
        self.turn(5);
        if self.broken == Broken::TwoAtOnce {
            self.owed.insert(ActionId(900));
            self.switch(900, "b", true, why);
            self.turn(5);
        }
        if self.broken != Broken::NeverTried {
            for (block, on) in [true, false, false, true, false, true, true, false]
                .into_iter()
                .enumerate()
            {
                self.toss(action, block as u32, on);
                if self.broken != Broken::CoinsIgnored {
                    self.switch(action, "a", on, why);
                }
                self.turn(20);
            }
        }
        if self.broken == Broken::EndlessTrial {
            self.turn(2001);
        }
        match verdict {
            Verdict::Accepted => {
                self.switch(action, "a", true, why);
                self.said.in_force.insert(ActionId(action), "a".into());
            }
            _ => {
                self.switch(action, "a", false, why);
                self.owed.remove(&ActionId(action));
            }
        }
        self.said.trials.clear();
        self.turn(1);
    }

    /// An accepted change with a further part, then a rejected trial, all that a life has.
    fn live(mut self) -> Vec<Violation> {
        self.trial(1, Verdict::Accepted);
        // A further part.
        let leader = if self.broken == Broken::FalseLeader { 7 } else { 1 };
        let why = format!("next part, on the evidence of action {leader} (+3 %)");
        self.owed.insert(ActionId(2));
        self.switch(2, "a", true, &why);
        self.said.in_force.insert(ActionId(2), "a".into());
        self.turn(100);
        if self.broken == Broken::Forgotten {
            self.said.in_force.clear();
            self.turn(1);
            self.turn(400);
        }
        if self.broken == Broken::SaysWhatIsNot {
            self.switch(2, "a", false, &why);
            self.turn(2001);
        }
        // Hours later it is taken back.
        self.turn(7200);
        for action in [2, 1] {
            self.switch(action, "a", false, &why);
            self.owed.remove(&ActionId(action));
            self.said.in_force.remove(&ActionId(action));
        }
        self.turn(1);
        let trials = if self.broken == Broken::ManyStarts { 4 } else { 1 };
        for n in 0..trials {
            self.trial(10 + n, Verdict::Rejected);
        }
        if self.broken == Broken::Overwrites {
            self.mask = "5".into();
            let picture = self.picture();
            self.ledger.note(Hand::Person, picture);
            self.trial(20, Verdict::Rejected);
        }
        if self.broken == Broken::CountsNonsense {
            self.said.exposure = -1.0;
            self.turn(1);
        }
        self.checkers.found().to_vec()
    }
}

#[test]
fn every_broken_stream_is_found_and_the_whole_one_is_not() {
    assert_eq!(Stream::new(Broken::Nothing).live(), vec![]);
    for (broken, invariant, words) in [
        (Broken::NeverTried, Invariant::NoHarm, "called in force"),
        (Broken::CoinsIgnored, Invariant::NoHarm, "called in force"),
        (Broken::NoCoins, Invariant::NoHarm, "called in force"),
        (Broken::OneCoin, Invariant::NoHarm, "called in force"),
        (Broken::EndlessTrial, Invariant::Bounded, "longer than"),
        (Broken::SaysWhatIsNot, Invariant::Explained, "and is off"),
        (Broken::Forgotten, Invariant::NoHarm, "no trial runs"),
        (Broken::TwoAtOnce, Invariant::OneAtATime, "on trial on: a, b"),
        (Broken::NotOwed, Invariant::Restorable, "no undo is owed"),
        (Broken::UndoLeavesMask, Invariant::Restorable, "not as found"),
        (Broken::Overwrites, Invariant::PersonWins, "a/mask"),
        (Broken::Silent, Invariant::Explained, "no number"),
        (Broken::FalseLeader, Invariant::NoHarm, "called in force"),
        (Broken::ManyStarts, Invariant::Bounded, "began to be tried"),
        (Broken::CountsNonsense, Invariant::NoHarm, "-1"),
    ] {
        let found = Stream::new(broken).live();
        assert!(
            found
                .iter()
                .any(|v| v.invariant == invariant && v.text.contains(words)),
            "{broken:?}: {found:?}"
        );
    }
}

/// Two programs that are tried as one change follow the same coins; of one that does not, no trial was seen.
#[test]
fn what_is_tried_as_one_change_must_follow_the_same_coins() {
    for (follows, found) in [(true, false), (false, true)] {
        let mut s = Stream::new(Broken::Nothing);
        s.said.trials = vec![(ExperimentId(1), vec!["a".into(), "b".into()])];
        for (action, workload) in [(1, "a"), (2, "b")] {
            s.owed.insert(ActionId(action));
            s.switch(action, workload, true, "12 %");
        }
        s.turn(5);
        let faces = [true, false, false, true, false, true, true, false, true];
        for (block, on) in faces.into_iter().enumerate() {
            s.toss(1, block as u32, on);
            s.switch(1, "a", on, "12 %");
            s.switch(2, "b", on || !follows, "12 %");
            s.turn(20);
        }
        assert_eq!(s.checkers.found().to_vec(), vec![], "as one change");
        s.said.trials.clear();
        s.said.in_force = BTreeMap::from([(ActionId(1), "a".into()), (ActionId(2), "b".into())]);
        s.turn(1);
        let says = s.checkers.found();
        assert_eq!(
            says.iter()
                .any(|v| v.text.contains("action 2 ") && v.text.contains("no trial of it was seen")),
            found,
            "{says:?}"
        );
    }
}

/// Not even a mind that calls it a trial for ever keeps what was never tried.
#[test]
fn what_stays_on_is_found_whatever_the_mind_says_of_it() {
    let mut s = Stream::new(Broken::Nothing);
    s.owed.insert(ActionId(1));
    s.switch(1, "a", true, "12 % may be gained");
    for number in 0..30 {
        // A new number each time: no trial is ever too long.
        s.said.trials = vec![(ExperimentId(number), vec!["a".into()])];
        s.turn(100);
    }
    let found = s.checkers.found();
    assert!(
        found
            .iter()
            .any(|v| v.invariant == Invariant::NoHarm && v.text.contains("longer than a trial may last")),
        "{found:?}"
    );
}

#[test]
fn a_machine_that_stood_still_is_nobodys_delay() {
    let mut s = Stream::new(Broken::Nothing);
    s.owed.insert(ActionId(1));
    s.in_trial(1, "a");
    s.switch(1, "a", true, "12 % may be gained");
    s.turn(1900);
    s.checkers.slept(SECOND * 5000);
    s.turn(5000);
    assert_eq!(s.checkers.found().to_vec(), vec![]);
    s.turn(200);
    assert!(!s.checkers.found().is_empty(), "then it is");
}

fn gain(work: f64, per_cpu: f64) -> Gain {
    Gain { work, per_cpu }
}

/// A change that is kept, and does its program harm in both measures.
#[test]
fn harm_that_the_guard_does_not_end_is_counted() {
    for (harm, found) in [
        (gain(-0.1, -0.1), true),
        // A loss in one measure and a gain in the other is what the mind may judge by.
        (gain(-0.1, 0.1), false),
        (gain(-0.01, -0.01), false),
        (gain(0.1, 0.1), false),
    ] {
        let mut s = Stream::new(Broken::Nothing);
        s.trial(1, Verdict::Accepted);
        let id = ActionId(1);
        assert_eq!(s.checkers.to_judge(s.now), [id], "it was never looked at");
        s.checkers.judged(s.now, id, gain(0.1, 0.1));
        assert!(s.checkers.to_judge(s.now).is_empty(), "it was just now");
        for _ in 0..30 {
            // A probe: off and on again.
            s.switch(1, "a", false, "1");
            s.turn(30);
            s.switch(1, "a", true, "1");
            s.turn(600);
            assert_eq!(s.checkers.to_judge(s.now), [id], "again and again while it stays");
            s.checkers.judged(s.now, id, harm);
        }
        let stood = s.checkers.truth().harm_stood;
        assert_eq!(stood, u64::from(found), "{harm:?}");
    }
}

#[test]
fn probes_that_cost_more_than_they_may_are_found() {
    for (off_s, gain_of, found) in [(30, 0.1, false), (600, 0.5, true), (600, 0.001, false)] {
        let mut s = Stream::new(Broken::Nothing);
        s.trial(1, Verdict::Accepted);
        s.checkers.judged(s.now, ActionId(1), gain(gain_of, gain_of));
        for _ in 0..12 {
            s.turn(600);
            s.switch(1, "a", false, "1");
            s.turn(off_s);
            s.switch(1, "a", true, "1");
        }
        let says = s.checkers.found();
        assert_eq!(
            says.iter()
                .any(|v| v.text.contains("12 probes") || v.text.contains("10 probes")),
            found,
            "{off_s} {gain_of}: {says:?}"
        );
    }
}

#[test]
fn what_is_kept_for_nothing_is_counted_by_the_world_not_by_the_verdict() {
    let mut s = Stream::new(Broken::Nothing);
    s.trial(1, Verdict::Accepted);
    s.checkers.judged(s.now, ActionId(1), gain(-0.001, -0.02));
    s.turn(400);
    s.checkers.judged(s.now, ActionId(1), gain(-0.001, -0.02));
    s.checkers.judged(s.now, ActionId(77), gain(-1.0, -1.0));
    let truth = s.checkers.truth();
    assert_eq!((truth.tried, truth.nulls), (1, 1));
    assert_eq!(
        (truth.kept, truth.kept_for_nothing),
        (1, 1),
        "once, however often one looks"
    );
    // One is chance; their share is for the campaign to judge.
    assert_eq!(s.checkers.found().to_vec(), vec![]);
}

#[test]
fn work_lost_against_the_machine_left_alone_is_held_to_its_budget() {
    let speeds = |work: f64, cpus: f64| {
        Speeds::from([(
            "a".to_owned(),
            Speed {
                work,
                per_cpu: work,
                cpus,
            },
        )])
    };
    let run_when = |touched: bool, with: f64, cpus: f64, hours: u64| {
        let mut checkers = Checkers::new(Limits {
            harm_per_day: 40_000.0,
            ..Limits::default()
        });
        for hour in 1..=hours {
            checkers.compared(
                HOUR * hour,
                HOUR,
                &speeds(with, cpus),
                &speeds(100.0, cpus),
                touched,
            );
        }
        (checkers.truth(), checkers.found().len())
    };
    let run = |with: f64, cpus: f64, hours: u64| run_when(true, with, cpus, hours);
    assert_eq!(run_when(false, 10.0, 1.0, 24).1, 0, "nothing of ours is there");
    // One percent for a day is 86,400 percent-seconds; a gain is none, and who rests loses nothing.
    let (truth, found) = run(99.0, 1.0, 24);
    assert!((truth.lost_s - 864.0).abs() < 1e-6 && found == 1, "{truth:?}");
    assert!((truth.worked_s - 86_400.0).abs() < 1e-6);
    assert_eq!(run(99.0, 1.0, 11).1, 0, "within the budget");
    assert_eq!(
        run(120.0, 1.0, 24),
        (
            Truth {
                worked_s: 86_400.0,
                ..Truth::default()
            },
            0
        )
    );
    assert_eq!(run(10.0, 0.01, 24), (Truth::default(), 0));
    // What was lost days ago does not count for today: 0.4 % is 34,560 percent-seconds a day.
    assert_eq!(run(99.6, 1.0, 240).1, 0);
}

#[test]
fn a_loop_that_spins_and_lines_that_say_nothing_are_found() {
    let mut c = Checkers::new(Limits {
        turns_per_minute: 10,
        calls_per_turn: 100,
        lines_per_turn: 3,
        owed: 2,
        ..Limits::default()
    });
    for _ in 0..10 {
        c.turned(SECOND * 5, 100, &["3 things".to_owned()]);
    }
    assert_eq!(c.found().to_vec(), vec![]);
    c.turned(
        SECOND * 5,
        101,
        &["".to_owned(), "1".into(), "2".into(), "3".into()],
    );
    let owed: BTreeSet<ActionId> = (0..3).map(ActionId).collect();
    c.owed(SECOND * 5, &owed, &Ledger::default());
    let found: Vec<&str> = c.found().iter().map(|v| v.text.as_str()).collect();
    for words in [
        "the loop spins",
        "101 calls",
        "4 lines",
        "an empty line",
        "3 actions are owed",
    ] {
        assert!(
            found.iter().any(|text| text.contains(words)),
            "{words}: {found:?}"
        );
    }
}
