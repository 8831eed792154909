//! The backup of every night: what a program loses to it in the first night, and in those that follow, when the reader is
//! known.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod plant;

use homeostat_engine::Memory;
use plant::{Faults, Plant, READ_MIB, known};

/// How long the reader reads, and how long it does not.
const NIGHT_S: u64 = 900;
const DAY_S: u64 = 3600;

impl Plant {
    /// The reader comes and ends; then a day passes.
    fn night(&mut self) -> Night {
        let (trials, lost, began) = (self.trials, self.lost_s, self.second);
        self.contained_at.clear();
        self.starts_to_read();
        self.run(NIGHT_S);
        self.ends();
        self.run(DAY_S);
        assert!(!self.is_any_in_force(), "nothing stays after the reader");
        Night {
            lost_s: self.lost_s - lost,
            contained_after: self.contained_at.first().map(|at| at - began),
            trials: self.trials - trials,
        }
    }
}

#[derive(Debug)]
struct Night {
    /// Work that the program lost, in seconds of its work.
    lost_s: f64,
    /// Seconds until the reader was contained first.
    contained_after: Option<u64>,
    trials: u32,
}

#[test]
fn in_the_second_night_the_program_loses_nothing() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    let first = plant.night();
    assert_eq!((first.trials, plant.accepted.len()), (1, 1), "{first:?}");
    // What nobody uses lasts for 20 s; then it is pushed out, and in half of the blocks of the trial again.
    assert!(
        first.contained_after.unwrap() >= 20 && first.lost_s > 30.0,
        "{first:?}"
    );
    let nights: Vec<Night> = (0..3).map(|_| plant.night()).collect();
    println!("first {first:?}\nthen {nights:?}");
    for night in &nights[..2] {
        assert_eq!(night.trials, 0, "{night:?}");
        assert!(night.contained_after.unwrap() <= 8, "{night:?}");
        assert_eq!(night.lost_s, 0.0, "{night:?}");
    }
    // The third after that is left to come to a trial again, and the four that follow are not.
    assert_eq!(nights[2].trials, 1, "{nights:?}");
    assert!(nights[2].lost_s > 30.0, "{nights:?}");
    let later: Vec<u32> = (0..5).map(|_| plant.night().trials).collect();
    assert_eq!(later, [0, 0, 0, 0, 1]);
}

#[test]
fn what_the_reader_itself_left_behind_is_no_room_for_it() {
    // It lasts for 100 s: nothing is to be done at first.
    let mut plant = Plant::with_unused(Memory::default(), 100.0 * READ_MIB);
    plant.run(DAY_S);
    let first = plant.night();
    assert!(
        first.contained_after.unwrap() >= 100 && first.lost_s > 30.0,
        "{first:?}"
    );
    let second = plant.night();
    println!("first {first:?}\nthen {second:?}");
    // Contained when the rest lasts for less than a minute, although the kernel tells of as much unused memory as ever.
    let after = second.contained_after.unwrap();
    assert!((40..=55).contains(&after), "{second:?}");
    assert_eq!((second.trials, second.lost_s), (0, 0.0), "{second:?}");
}

#[test]
fn what_was_proven_is_known_after_a_restart() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    plant.night();
    let memory = Memory {
        readers: vec![known(&plant.accepted[0], 1)],
        ..Memory::default()
    };
    let mut plant = Plant::new(memory);
    plant.run(DAY_S);
    // How often it was recalled is not known any more, so it comes to a trial first; which is the second then.
    let trials: Vec<u32> = (0..6).map(|_| plant.night().trials).collect();
    assert_eq!(trials, [1, 0, 0, 0, 0, 1]);
}

#[test]
fn whatever_goes_wrong_it_is_recalled_on_a_verdict_that_holds_and_released_when_it_has_ended() {
    let (mut trials, mut recalls) = (0, 0);
    for seed in 0..20 {
        let mut plant = Plant::new(Memory::default());
        plant.faults = Some(Faults::new(seed));
        plant.run(600);
        for _ in 0..6 {
            plant.starts_to_read();
            // Some end before anything can be done about them.
            let length = plant.faults.as_mut().unwrap().below(NIGHT_S);
            plant.run(length);
            plant.ends();
            plant.run(1800);
        }
        trials += plant.trials;
        recalls += plant.faults.as_ref().unwrap().all_recalls;
    }
    println!("120 nights: {trials} trials, {recalls} times contained without");
    // It is about what happens, so something must.
    assert!(trials >= 20 && recalls >= 10, "{trials} {recalls}");
}

#[test]
fn readers_that_are_over_before_they_are_tried_do_not_use_up_the_trials() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    plant.unused_mib = 0.0;
    // A shell that runs one after another, for an hour; what each leaves behind the next one takes.
    for _ in 0..360 {
        plant.starts_to_read();
        plant.run(10);
    }
    assert!((1..=3).contains(&plant.trials), "{}", plant.trials);
    println!("an hour of readers of 10 s each: {} trials", plant.trials);
    // One that stays is tried, if a little later.
    let trials = plant.trials;
    plant.contained_at.clear();
    plant.starts_to_read();
    let began = plant.second;
    plant.run(60);
    assert_eq!(plant.trials, trials + 1);
    let after = plant.contained_at.first().unwrap() - began;
    assert!(after <= 45, "contained after {after} s");
}

#[test]
fn a_reader_that_was_never_proven_is_not_looked_for() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    plant.starts_to_read();
    plant.run(10);
    let plan = plant.engine.sampling();
    assert!(!plan.reads && !plan.in_a_hurry);
}
