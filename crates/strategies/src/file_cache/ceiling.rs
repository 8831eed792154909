//! homeostat's own controller of how much memory files may use: a pure function of samples.
//!
//! Problem: the right ceiling is not known, moves with the load, and answers late (memory that was taken comes back page
//! by page). autotune's rule lowers it by steps while both directions page, and raises it after a minute: it needs swap to
//! see anything, takes ten intervals to get there, and comes back to the same cliff every minute.
//!
//! Approach: *loss* is one number between 0 and 1, the largest of the share of time in which tasks stand still for memory
//! (PSI) and of the rates at which protected programs get back what was taken from them. While there is loss and more is
//! taken, the ceiling falls by a share in proportion to the loss, from what files use now. A program that is only getting its
//! pages back needs time and no lower ceiling: to go on would take from files what nobody misses (wind-up). When it has been
//! quiet for a while the ceiling rises: fast to nine tenths of where it began to hurt last, then slowly. Each loss that follows
//! a rise doubles the wait before the next rise (damping), and between the two levels of loss nothing moves (hysteresis). So
//! it settles below the cliff and looks over it ever more rarely, and files get all memory that nobody misses.
//! How far gain and delay may be off is tested in crates/laboratory/tests/file_cache.rs.
//!
//! Units: shares of the memory, 0 to 1.

use homeostat_model::Nanoseconds;

/// How the controller moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gains {
    /// The ceiling is never lower: files need some memory to be read at all.
    pub floor: f64,
    /// From this loss on the ceiling falls.
    pub loss_high: f64,
    /// Up to this loss it may rise.
    pub loss_low: f64,
    /// Share by which it falls per step at full loss …
    pub fall: f64,
    /// … and at most, whatever the gain: what was taken too much comes back slowly.
    pub fall_most: f64,
    /// Share of the memory by which it rises per step below nine tenths of where it hurt last …
    pub rise_fast: f64,
    /// … and above.
    pub rise_slow: f64,
    /// Quiet time before the first rise.
    pub wait_min: Nanoseconds,
    /// … and at most.
    pub wait_max: Nanoseconds,
    /// Pages per second that come back to protected programs which count as full loss.
    pub refaults_full: f64,
    /// From so many pages per second on that are taken from them it counts as taking.
    pub taken_min: f64,
}

impl Default for Gains {
    fn default() -> Self {
        Self {
            floor: 0.03,
            loss_high: 0.05,
            loss_low: 0.01,
            fall: 0.5,
            fall_most: 0.5,
            rise_fast: 0.02,
            rise_slow: 0.0025,
            wait_min: Nanoseconds::from_secs(30),
            wait_max: Nanoseconds::from_secs(640),
            refaults_full: 500.0,
            taken_min: 5.0,
        }
    }
}

/// What is seen in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// When it ended.
    pub at: Nanoseconds,
    /// Share of the time in which at least one task stood still for memory (PSI memory `some`).
    pub stalled: f64,
    /// Pages per second that came back to protected programs: from swap, or of files that had been taken.
    pub refaults: f64,
    /// Pages per second that were taken from protected programs.
    pub taken: f64,
    /// Share of the memory that holds pages of files.
    pub files: f64,
}

/// The controller.
#[derive(Clone, Debug, PartialEq)]
pub struct Ceiling {
    gains: Gains,
    ceiling: f64,
    /// The ceiling at which it hurt last.
    cliff: f64,
    quiet_since: Option<Nanoseconds>,
    wait: Nanoseconds,
    /// Whether it has risen since it fell last.
    risen: bool,
    /// Whether it has fallen since it was quiet last.
    fallen: bool,
}

impl Ceiling {
    /// Starts with no limit.
    pub fn new(gains: Gains) -> Self {
        Self {
            ceiling: 1.0,
            cliff: 1.0,
            quiet_since: None,
            wait: gains.wait_min,
            risen: false,
            fallen: false,
            gains,
        }
    }

    /// Share of the memory that files may use.
    pub fn share(&self) -> f64 {
        self.ceiling
    }

    /// Quiet time before the next rise.
    pub fn wait(&self) -> Nanoseconds {
        self.wait
    }

    /// Takes a sample and returns the new ceiling, when it changes.
    pub fn step(&mut self, sample: &Sample) -> Option<f64> {
        let g = self.gains;
        let before = self.ceiling;
        let loss = sample
            .stalled
            .max(sample.refaults / g.refaults_full)
            .clamp(0.0, 1.0);
        if loss >= g.loss_high {
            self.quiet_since = None;
            if sample.taken >= g.taken_min {
                self.fall(loss, sample.files);
            }
        } else if loss <= g.loss_low {
            self.fallen = false;
            let since = *self.quiet_since.get_or_insert(sample.at);
            if sample.at - since >= self.wait && self.ceiling < 1.0 {
                let step = if self.ceiling < 0.9 * self.cliff {
                    g.rise_fast
                } else {
                    g.rise_slow
                };
                self.ceiling = (self.ceiling + step).min(1.0);
                self.risen = true;
            }
            // What hurt once may hurt nobody later: after the longest wait it is forgotten by and by.
            if sample.at - since >= g.wait_max * 2 {
                self.wait = g.wait_min;
                self.cliff = 1.0;
            }
        } else {
            self.quiet_since = None;
        }
        (self.ceiling != before).then_some(self.ceiling)
    }

    fn fall(&mut self, loss: f64, files: f64) {
        let g = self.gains;
        if self.risen {
            self.wait = (self.wait * 2).min(g.wait_max);
            self.risen = false;
        }
        let used = self.ceiling.min(files.max(g.floor));
        if !self.fallen {
            // Where it began is where it hurts.
            self.cliff = used;
            self.fallen = true;
        }
        self.ceiling = (used * (1.0 - (g.fall * loss).min(g.fall_most))).max(g.floor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Seconds between two steps.
    const STEP: u64 = 2;
    /// Pages of the plant's memory: 1 GiB.
    const MEMORY_PAGES: f64 = 262_144.0;

    /// Two pools that compete for frames: a program whose working set comes back at a bounded rate, and a reader that fills
    /// whatever it is given.
    struct Plant {
        working: f64,
        program: f64,
        files: f64,
        /// Share of the memory that the disk brings back per second.
        back: f64,
        reads: f64,
    }

    impl Plant {
        /// Shares of the memory per second that came back to the program and that were taken from it.
        fn run(&mut self, ceiling: f64, seconds: f64) -> (f64, f64) {
            let (tick, mut missed, mut taken) = (0.1, 0.0, 0.0);
            let ticks = (seconds / tick) as usize;
            for _ in 0..ticks {
                let missing = (self.working - self.program).max(0.0);
                let came = missing.min(self.back * tick);
                missed += came;
                self.program += came;
                self.files += self.reads * tick;
                let over = (self.program + self.files - 1.0).max(0.0);
                let from_files = if self.files > ceiling {
                    over
                } else {
                    over * self.files / (self.program + self.files)
                };
                self.files -= from_files.min(self.files);
                self.program -= over - from_files;
                taken += over - from_files;
                self.files = self.files.min(ceiling.max(self.files - 0.2 * tick));
            }
            (missed / seconds, taken / seconds)
        }
    }

    /// The share of full speed, the ceiling and the changes of direction at the end of so many steps.
    fn settle(working: f64, back: f64, reads: f64, gains: Gains, steps: u64) -> (f64, f64, u32) {
        let mut plant = Plant {
            working,
            program: working.min(0.98),
            files: 0.0,
            back,
            reads,
        };
        let mut c = Ceiling::new(gains);
        let (mut turns, mut direction, mut lost) = (0, 0.0, 0.0);
        for i in 0..steps {
            let (missed, taken) = plant.run(c.share(), STEP as f64);
            let before = c.share();
            c.step(&Sample {
                at: Nanoseconds::from_secs(i * STEP),
                stalled: (missed / back).min(1.0),
                refaults: 0.0,
                taken: taken * MEMORY_PAGES,
                files: plant.files,
            });
            let moved = c.share() - before;
            if moved != 0.0 && moved.signum() != direction {
                turns += 1;
                direction = moved.signum();
            }
            if i >= steps / 2 {
                lost += ((plant.working - plant.program) / plant.working).max(0.0);
            }
        }
        (1.0 - lost / (steps - steps / 2) as f64, c.share(), turns)
    }

    #[test]
    fn a_reader_is_held_below_what_the_program_leaves() {
        let (speed, ceiling, turns) = settle(0.6, 0.05, 0.5, Gains::default(), 900);
        assert!(speed > 0.97, "{speed}");
        assert!((0.2..0.45).contains(&ceiling), "{ceiling}");
        // Half an hour: looks over the edge ever more rarely.
        assert!(turns <= 20, "{turns} turns");
    }

    #[test]
    fn files_get_all_memory_that_nobody_needs() {
        let (_, ceiling, turns) = settle(0.0, 0.05, 0.5, Gains::default(), 300);
        assert_eq!((ceiling, turns), (1.0, 0));
        let mut c = Ceiling::new(Gains::default());
        let at = Nanoseconds::from_secs;
        c.step(&Sample {
            at: at(0),
            stalled: 1.0,
            refaults: 0.0,
            taken: 100.0,
            files: 0.8,
        });
        assert!((c.share() - 0.4).abs() < 1e-12);
        for i in 1..2000 {
            c.step(&Sample {
                at: at(i),
                files: 0.9,
                ..Sample::default()
            });
        }
        assert_eq!(c.share(), 1.0, "the program has ended: everything is given back");
    }

    #[test]
    fn a_program_that_only_gets_its_pages_back_lowers_nothing() {
        let mut c = Ceiling::new(Gains::default());
        let loss = |second, taken| Sample {
            at: Nanoseconds::from_secs(second),
            stalled: 0.5,
            refaults: 400.0,
            taken,
            files: 0.6,
        };
        let fell = c.step(&loss(2, 300.0)).unwrap();
        for second in 2..60 {
            assert_eq!(c.step(&loss(2 * second, 0.0)), None);
        }
        assert!(c.step(&loss(120, 300.0)).unwrap() < fell);
    }

    #[test]
    fn between_the_two_levels_nothing_moves() {
        let mut c = Ceiling::new(Gains::default());
        for i in 0..100 {
            let sample = Sample {
                at: Nanoseconds::from_secs(i),
                stalled: 0.03,
                taken: 1000.0,
                files: 0.5,
                ..Sample::default()
            };
            assert_eq!(c.step(&sample), None);
        }
    }

    #[test]
    fn each_loss_after_a_rise_doubles_the_wait() {
        let mut c = Ceiling::new(Gains::default());
        let mut second = 0;
        let mut waits = Vec::new();
        for _ in 0..8 {
            let loss = Sample {
                at: Nanoseconds::from_secs(second),
                refaults: 1000.0,
                taken: 1000.0,
                files: 0.5,
                ..Sample::default()
            };
            c.step(&loss);
            waits.push(c.wait().as_secs_f64());
            let risen = c.share();
            while c.share() == risen {
                second += 1;
                c.step(&Sample {
                    at: Nanoseconds::from_secs(second),
                    files: 0.5,
                    ..Sample::default()
                });
            }
        }
        assert_eq!(waits, [30.0, 60.0, 120.0, 240.0, 480.0, 640.0, 640.0, 640.0]);
    }

    proptest! {
        #[test]
        fn the_ceiling_stays_in_its_range_whatever_is_seen(
            samples in proptest::collection::vec((0.0..2.0f64, 0.0..1e5f64, 0.0..1e5f64, 0.0..1.0f64), 1..300)
        ) {
            let mut c = Ceiling::new(Gains::default());
            for (i, (stalled, refaults, taken, files)) in samples.into_iter().enumerate() {
                c.step(&Sample { at: Nanoseconds::from_secs(i as u64), stalled, refaults, taken, files });
                prop_assert!((0.03..=1.0).contains(&c.share()));
                prop_assert!(c.wait() <= Nanoseconds::from_secs(640));
            }
        }

        #[test]
        fn it_is_stable_over_loads_disks_and_gains(
            working in 0.2..0.85f64,
            back in 0.01..0.3f64,
            reads in 0.02..2.0f64,
            fall in 0.2..0.9f64,
            rise in 0.5..3.0f64,
        ) {
            let gains = Gains {
                fall,
                rise_fast: 0.02 * rise,
                rise_slow: 0.0025 * rise,
                ..Gains::default()
            };
            let (speed, _, turns) = settle(working, back, reads, gains, 900);
            prop_assert!(speed > 0.9, "speed {speed}");
            prop_assert!(turns <= 30, "{turns} turns");
        }
    }
}
