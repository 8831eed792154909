//! Evidence about one change from the seam, the journal and the world, without verdicts of the code under test.
//!
//! A change is *proven* when it followed random assignments (coins): blocks of both faces whose coin was on disk
//! before, with the change driven to each. A part of a rollout counts with coins of several stages on disk, a part that
//! followed a tried one with that one. Whether the change *helps*, the world tells: every program's speed without
//! noise, now and with this change alone undone.

use homeostat_model::{ActionId, Direction, EffectorId, ExperimentId, Nanoseconds, WorkloadId};
use homeostat_store::journal::Coin;
use std::collections::BTreeMap;

/// Blocks that a change must have followed to count as tried. A proof needs more: a stake at most doubles per block,
/// and no try is judged above level one half.
const COINS_MIN: u32 = 4;
/// One assignment in this many may contradict the change: a fault cut its block short.
const AGAINST_ONE_IN: u32 = 4;
const BLOCKS_PER_STAGE: u32 = 16;
/// Words with which a further part names the tried part.
const LED_BY: &str = "on the evidence of action ";

/// How fast a program is, without noise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// Work per second.
    pub work: f64,
    /// Work per CPU second.
    pub per_cpu: f64,
    /// CPUs used.
    pub cpus: f64,
}

/// Speeds of all programs that run, by workload.
pub type Speeds = BTreeMap<String, Speed>;

/// The true relative effect of a change on its program, in both measures that may judge it; 0.05 = +5 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// On work per second.
    pub work: f64,
    /// On work per CPU second.
    pub per_cpu: f64,
}

impl Gain {
    /// A program's gain of `with` over `without`; `None` when it does nothing.
    pub fn of(with: &Speed, without: &Speed) -> Option<Self> {
        let relative = |a: f64, b: f64| {
            (a > 0.0 && b > 0.0)
                .then(|| a / b - 1.0)
                .filter(|g| g.is_finite())
        };
        Some(Self {
            work: relative(with.work, without.work)?,
            per_cpu: relative(with.per_cpu, without.per_cpu)?,
        })
    }

    /// The better of the two: below zero it is a loss whatever one counts.
    pub fn best(&self) -> f64 {
        self.work.max(self.per_cpu)
    }
}

/// Random assignments of one experiment, as they appeared on disk.
#[derive(Clone, Debug, Default)]
pub(super) struct Coins {
    /// The last block, and its face.
    last: Option<(u32, bool)>,
    first: Nanoseconds,
    /// Number of stages, if each assignment began a new one: a rollout.
    stages: Option<u32>,
}

impl Coins {
    /// Takes the next one. Returns the face of the one before.
    pub(super) fn take(&mut self, coin: &Coin, at: Nanoseconds) -> Option<bool> {
        let stage = coin.block / BLOCKS_PER_STAGE;
        match self.last {
            None => {
                self.first = at;
                self.stages = Some(1);
            }
            Some((before, _)) => {
                let next = coin.on && stage > before / BLOCKS_PER_STAGE;
                self.stages = self.stages.filter(|_| next).map(|n| n + 1);
            }
        }
        self.last.replace((coin.block, coin.on)).map(|(_, face)| face)
    }

    pub(super) fn is_new(&self, coin: &Coin) -> bool {
        self.last.is_none_or(|(block, _)| coin.block > block)
    }

    /// Whether it is a rollout of at least two stages that began before that moment.
    fn is_rollout_before(&self, at: Nanoseconds) -> bool {
        self.stages.is_some_and(|n| n >= 2) && self.first <= at
    }
}

/// How a change followed the assignments of one experiment.
#[derive(Clone, Copy, Debug, Default)]
struct Followed {
    on: u32,
    off: u32,
    against: u32,
}

impl Followed {
    fn proves(&self) -> bool {
        let with = self.on + self.off;
        self.on > 0 && self.off > 0 && with >= COINS_MIN && self.against * AGAINST_ONE_IN <= with
    }
}

/// Facts about an action from the calls at the seam, the assignments on disk and the world.
#[derive(Clone, Debug)]
pub(super) struct Acted {
    pub(super) workload: WorkloadId,
    pub(super) effector: EffectorId,
    /// A slice of it reached the machine, and no undo has ended since.
    pub(super) on: bool,
    pub(super) done: bool,
    pub(super) direction: Direction,
    /// First time on the machine; standstills shift it.
    pub(super) first: Option<Nanoseconds>,
    pub(super) off_since: Option<Nanoseconds>,
    /// Times that it was undone and made again.
    pub(super) rounds: u32,
    /// Since when no engine knows of it or tries to undo it.
    pub(super) orphan_since: Option<Nanoseconds>,
    /// The tried part that it follows, by its sentence.
    pub(super) leader: Option<ActionId>,
    followed: BTreeMap<ExperimentId, Followed>,
    proven: bool,
    /// The experiment whose assignments it followed: all followers are one change.
    pub(super) tried_by: Option<ExperimentId>,
    pub(super) kept_since: Option<Nanoseconds>,
    pub(super) gain: Option<Gain>,
    /// Probes since it is kept, and their off time.
    pub(super) probed: (u32, Nanoseconds),
    pub(super) counted: bool,
    pub(super) looked: Option<Nanoseconds>,
    /// While harmful: the probes meanwhile, and its rounds at the last check.
    pub(super) harms: Option<(u32, u32)>,
    pub(super) stood: bool,
}

impl Acted {
    pub(super) fn new(workload: &WorkloadId, effector: &EffectorId, direction: Direction, why: &str) -> Self {
        let leader = why.split_once(LED_BY).and_then(|(_, rest)| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok().map(ActionId)
        });
        Self {
            workload: workload.clone(),
            effector: effector.clone(),
            on: false,
            done: false,
            direction,
            first: None,
            off_since: None,
            rounds: 0,
            orphan_since: None,
            leader,
            followed: BTreeMap::new(),
            proven: false,
            tried_by: None,
            kept_since: None,
            gain: None,
            probed: (0, Nanoseconds::ZERO),
            counted: false,
            looked: None,
            harms: None,
            stood: false,
        }
    }

    pub(super) fn kept(&self) -> bool {
        self.kept_since.is_some()
    }

    /// Share of its program's work that its probes cost since it is kept, by its true gain, but for what the pairs may cost
    /// that measure the gain right after the acceptance.
    pub(super) fn probe_cost(&self, at: Nanoseconds) -> f64 {
        let gain = self.gain.map_or(0.0, |g| g.best().max(0.0));
        let kept = self.kept_since.map_or(0.0, |since| (at - since).as_secs_f64());
        let lost = gain / (1.0 + gain) * self.probed.1.as_secs_f64();
        let afresh = gain / (1.0 + gain) * super::MEASURED_AFRESH_S;
        (lost - afresh).max(0.0) / kept.max(1.0)
    }

    pub(super) fn is_placebo(&self) -> bool {
        self.effector.as_str() == "placebo"
    }

    /// A block of that experiment with this face has ended.
    pub(super) fn follow(&mut self, experiment: ExperimentId, face: bool) {
        if self.proven || self.first.is_none() {
            return;
        }
        let driven = self.direction == Direction::Apply;
        let followed = self.followed.entry(experiment).or_default();
        match (face == driven, face) {
            (true, true) => followed.on += 1,
            (true, false) => followed.off += 1,
            (false, _) => followed.against += 1,
        }
        self.proven = followed.proves();
        if self.proven {
            self.followed.clear();
            self.tried_by = Some(experiment);
        }
    }

    /// Assignments of rollouts on disk count for the parts made under them.
    pub(super) fn roll_out(&mut self, experiment: ExperimentId, coins: &Coins) {
        if let Some(first) = self.first {
            if !self.proven && coins.is_rollout_before(first) {
                self.proven = true;
                self.tried_by = Some(experiment);
            }
        }
    }

    pub(super) fn tried(&self) -> bool {
        self.proven
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coin(block: u32, on: bool) -> Coin {
        Coin {
            experiment: ExperimentId(1),
            block,
            on,
        }
    }

    fn acted() -> Acted {
        let mut acted = Acted::new(&"a".into(), &"mask".into(), Direction::Apply, "because of 12 %");
        acted.first = Some(Nanoseconds(5));
        acted
    }

    #[test]
    fn only_who_followed_coins_of_both_faces_is_proven() {
        let drive = |faces: &[bool], driven: &[bool]| {
            let mut a = acted();
            for (face, driven) in faces.iter().zip(driven) {
                a.direction = if *driven {
                    Direction::Apply
                } else {
                    Direction::Undo
                };
                a.follow(ExperimentId(1), *face);
            }
            a.tried()
        };
        let (t, f) = (true, false);
        assert!(drive(&[t, f, f, t], &[t, f, f, t]));
        assert!(!drive(&[t, f, f], &[t, f, f]), "too few");
        assert!(!drive(&[t; 9], &[t; 9]), "never off");
        assert!(!drive(&[t, f, t, f, t, f], &[t; 6]), "on whatever the coin said");
        assert!(!drive(&[t, f, t, f], &[f, t, f, t]), "always the other way");
        assert!(
            drive(&[t, f, f, t, t], &[t, f, t, t, t]),
            "one block was cut short"
        );
    }

    #[test]
    fn coins_of_two_experiments_are_not_added_up() {
        let mut a = acted();
        for (experiment, face) in [(1, true), (1, false), (2, true), (2, false)] {
            a.direction = if face { Direction::Apply } else { Direction::Undo };
            a.follow(ExperimentId(experiment), face);
        }
        assert!(!a.tried());
    }

    #[test]
    fn a_rollout_is_known_by_a_coin_for_each_stage() {
        let mut coins = Coins::default();
        assert_eq!(coins.take(&coin(3, true), Nanoseconds(1)), None);
        assert!(
            !coins.is_rollout_before(Nanoseconds(9)),
            "one stage is no rollout"
        );
        assert!(!coins.is_new(&coin(3, true)) && coins.is_new(&coin(16, true)));
        assert_eq!(coins.take(&coin(18, true), Nanoseconds(2)), Some(true));
        let mut a = acted();
        a.roll_out(ExperimentId(1), &coins);
        assert!(a.tried());
        let mut early = acted();
        early.first = Some(Nanoseconds(0));
        early.roll_out(ExperimentId(1), &coins);
        assert!(!early.tried(), "it was there before the first coin");
        // A switchback counts its blocks one by one.
        let mut coins = Coins::default();
        for block in 0..40 {
            coins.take(&coin(block, true), Nanoseconds(1));
        }
        assert!(!coins.is_rollout_before(Nanoseconds(9)));
    }

    #[test]
    fn a_gain_is_what_the_speeds_say() {
        let speed = |work, per_cpu| Speed {
            work,
            per_cpu,
            cpus: 1.0,
        };
        let gain = Gain::of(&speed(9.0, 12.0), &speed(10.0, 10.0)).unwrap();
        assert!((gain.work + 0.1).abs() < 1e-12 && (gain.best() - 0.2).abs() < 1e-12);
        assert_eq!(
            Gain::of(&speed(0.0, 0.0), &speed(1.0, 1.0)),
            None,
            "it is at rest"
        );
    }

    #[test]
    fn a_further_part_names_the_part_that_was_tried() {
        let led = |why: &str| Acted::new(&"a".into(), &"m".into(), Direction::Apply, why).leader;
        assert_eq!(
            led("next part, on the evidence of action 17 (+3.0 % [1, 4])"),
            Some(ActionId(17))
        );
        assert_eq!(led("12 % of 100 pages"), None);
    }
}
