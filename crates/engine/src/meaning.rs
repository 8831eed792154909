//! Whether a meter of kernel work still means what it meant when it was chosen.
//!
//! Such a meter was taken because a second kind of kernel work kept a constant ratio to it. That kind is read beside it during a
//! trial, and the trial is broken off when the ratio is no longer the same: between the arms, for then the change alters what a
//! unit of work is (fewer calls for the same bytes) and what looks like a gain may be none; or over time in both arms, for then
//! the program does something else now (another phase, other code).
//!
//! Which of the two has changed its meaning the ratio does not tell. So switches of threads are no witness: what a change does to
//! waiting shows in them, and not in the work; and a trial that protects a program from losing its pages is not watched, for
//! each of its waits is a switch. Kinds that change together (reads and wake-ups of a program that takes whatever is there) are
//! seen by neither.
//!
//! A change that is made in stages is never off again. Its slots are asked twice: after each of them whether the ratio in those with more of
//! it in force has left the band of those before, whoever did that, the change or time; and before the change is accepted whether it moves
//! with the share that was in force, over and above what it does from stage to stage and evenly in time.
//!
//! The probes of guards are not watched: the two blocks of a pair follow each other, so what the program does otherwise since the trial is
//! in both, and what the change does to the ratio was asked in the trial.
//!
//! What was seen, or why nothing was, is written down with the trial.

use crate::meters::is_of_waiting;
use crate::panel::{GUARDRAIL_BLOCKS, GUARDRAIL_ERROR_MIN, effect_between, effect_of};
use crate::series::Series;
use homeostat_model::{Effect, MeaningAccount, MeterId, Nanoseconds, WorkloadId};
use homeostat_statistics::robust::{exp, ln, mean};
use homeostat_statistics::staged::{Seen, moved_with_the_share};
use homeostat_statistics::trimmed::{self, Comparison, Proof};

/// The ratio may move by this share: the band in which it qualified.
const BAND: f64 = crate::meters::CONFIRMATION_NOISE_MAX;
/// The last blocks of each arm that are compared with those before, of which there must be as many, to see whether the ratio has
/// moved over time …
const MOVED_BLOCKS: usize = 3;
/// … and the level at which both arms must prove it. It is looked at after every block.
const MOVED_LEVEL: f64 = 0.0005;
/// A kind that counted nothing at all is taken for half a count, so that its absence shows as a ratio that is far off.
const COUNTED_MIN: f64 = 0.5;

/// Why the kind that confirmed what judges says nothing of it in such a trial, if so.
pub(crate) fn unwatched(urgent: bool, beside: &MeterId) -> Option<String> {
    if urgent {
        Some(
            "the trial protects from a loss, and what waits for its pages switches more for the same work"
                .to_owned(),
        )
    } else if is_of_waiting(beside) {
        Some(format!(
            "{beside}, by which it qualified, counts switches of threads: what a change does to waiting shows in them, and not in the work"
        ))
    } else {
        None
    }
}

/// A slot of a rollout that is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSpan {
    /// Its stage, and which slot of that it is.
    pub(crate) stage: u32,
    pub(crate) slot: u32,
    /// The share of the change that was in force, or was being made.
    pub(crate) share: f64,
    /// Its measured part.
    pub(crate) from: Nanoseconds,
    pub(crate) to: Nanoseconds,
}

impl SlotSpan {
    /// What it showed.
    pub(crate) fn seen(self, value: f64) -> Seen {
        Seen {
            stage: self.stage,
            slot: self.slot,
            share: self.share,
            value,
        }
    }
}

/// What is asked of the slots of a rollout before it is accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastLook {
    /// What the parts that were made are thought to give (log units), …
    pub(crate) gain: f64,
    /// … which are this share of the change.
    pub(crate) share: f64,
    /// At which level.
    pub(crate) level: f64,
}

/// The ratio of two kinds of kernel work of one workload that is tried.
#[derive(Clone, Debug)]
pub(crate) struct Meaning {
    workload: WorkloadId,
    judge: MeterId,
    beside: MeterId,
    /// Logarithms of the ratio by block, oldest first.
    on: Vec<f64>,
    off: Vec<f64>,
    /// … by slot of a rollout.
    slots: Vec<Seen>,
    /// Blocks that ended while it was to be watched.
    ended: u32,
    /// Whether the other kind was opened for that, and is to be closed again.
    opened: bool,
    /// Why it is not watched, or no longer.
    refused: Option<String>,
}

impl Meaning {
    pub(crate) fn new(workload: WorkloadId, judge: MeterId, beside: MeterId) -> Self {
        Self {
            workload,
            judge,
            beside,
            on: Vec::new(),
            off: Vec::new(),
            slots: Vec::new(),
            ended: 0,
            opened: false,
            refused: None,
        }
    }

    /// It is not watched, or no longer. The first reason stays.
    pub(crate) fn refuse(&mut self, why: impl Into<String>) {
        self.refused.get_or_insert_with(|| why.into());
    }

    /// Whether it is watched.
    pub(crate) fn watches(&self) -> bool {
        self.refused.is_none()
    }

    /// The other kind was opened for it.
    pub(crate) fn opened(&mut self) {
        self.opened = true;
    }

    /// Whether the other kind is to be closed after it.
    pub(crate) fn has_opened(&self) -> bool {
        self.opened
    }

    pub(crate) fn workload(&self) -> &WorkloadId {
        &self.workload
    }

    pub(crate) fn beside(&self) -> &MeterId {
        &self.beside
    }

    /// Reads both over the measured part of a block that ended. A block in which one of them was not read, or nothing was done,
    /// says nothing.
    pub(crate) fn observe(&mut self, series: &Series, on: bool, from: Nanoseconds, to: Nanoseconds) {
        if let Some(ratio) = self.read(series, from, to) {
            let arm = if on { &mut self.on } else { &mut self.off };
            arm.push(ratio);
        }
    }

    /// The same over a slot of a rollout, in which so large a share of the change was in force.
    pub(crate) fn observe_slot(&mut self, series: &Series, of: SlotSpan) {
        if let Some(value) = self.read(series, of.from, of.to) {
            self.slots.push(of.seen(value));
        }
    }

    /// Logarithm of their ratio.
    fn read(&mut self, series: &Series, from: Nanoseconds, to: Nanoseconds) -> Option<f64> {
        if !self.watches() {
            return None;
        }
        self.ended += 1;
        let (judge, beside) = (
            series.sums(&self.judge, from, to),
            series.sums(&self.beside, from, to),
        );
        let both_read = judge.intervals > 0 && judge.intervals == beside.intervals;
        let worked = judge.work > 0.0 || beside.work > 0.0;
        (both_read && worked).then(|| ln(judge.work.max(COUNTED_MIN)) - ln(beside.work.max(COUNTED_MIN)))
    }

    /// What to say when the ratio is not what it was. Between the arms that must be proven at this level; `gain`: what the change
    /// is thought to give (log units), at the one look before it is accepted, else it is one look of many, at which two tests
    /// must prove it.
    pub(crate) fn changed(&self, level: f64, gain: Option<f64>) -> Option<String> {
        self.moved().or_else(|| self.differs(level, gain))
    }

    /// The same of a rollout, after one of its slots, at this level; and what is asked before it is accepted.
    pub(crate) fn changed_in_stages(&self, early: f64, at_last: Option<LastLook>) -> Option<String> {
        if !self.watches() {
            return None;
        }
        let (more, less) = self.by_share();
        if differ(&more, &less, early, None) {
            return Some(format!(
                "{}: {} no longer means what it did: {:.4} of them for one of {} in the slots with more of the change in force, {:.4} in \
                 those before (the change alters what it means, or the program is in another phase)",
                self.workload,
                self.judge,
                exp(mean(&more)),
                self.beside,
                exp(mean(&less)),
            ));
        }
        let look = at_last?;
        let whole = moved_with_the_share(&self.slots)?;
        let made = Comparison {
            change: whole.change * look.share,
            error: whole.error * look.share,
            ..whole
        };
        let altered = made.rose(faked(look.gain), look.level / 2.0, GUARDRAIL_ERROR_MIN)
            || made.fell(ln(1.0 + BAND), look.level / 2.0, GUARDRAIL_ERROR_MIN);
        altered.then(|| {
            format!(
                "{}: the change alters what {} means: {:+.1} % of them for one of {} by what was made of it, by the stages",
                self.workload,
                self.judge,
                (exp(made.change) - 1.0) * 100.0,
                self.beside,
            )
        })
    }

    /// Ratios of the slots with more of the change in force and of those with less: parted as late as leaves enough of both.
    fn by_share(&self) -> (Vec<f64>, Vec<f64>) {
        let mut shares: Vec<f64> = self.slots.iter().map(|s| s.share).collect();
        shares.sort_by(f64::total_cmp);
        shares.dedup();
        let parted = |from: f64| -> (Vec<f64>, Vec<f64>) {
            let (more, less): (Vec<&Seen>, Vec<&Seen>) = self.slots.iter().partition(|s| s.share >= from);
            let of = |slots: Vec<&Seen>| slots.iter().map(|s| s.value).collect();
            (of(more), of(less))
        };
        let all = shares.iter().rev().map(|from| parted(*from));
        all.into_iter()
            .find(|(more, less)| speak(more, less))
            .unwrap_or_default()
    }

    fn differs(&self, level: f64, gain: Option<f64>) -> Option<String> {
        differ(&self.on, &self.off, level, gain).then(|| {
            format!(
                "{}: the change alters what {} means: {:.4} of them for one of {} with it, {:.4} without",
                self.workload,
                self.judge,
                exp(mean(&self.on)),
                self.beside,
                exp(mean(&self.off)),
            )
        })
    }

    /// Both arms have left the band of their own earlier blocks, to the same side, and each proves it.
    fn moved(&self) -> Option<String> {
        let (on, off) = (Moved::of(&self.on)?, Moved::of(&self.off)?);
        (on.is_proven && off.is_proven && (on.now > on.before) == (off.now > off.before)).then(|| {
            format!(
                "{}: {} no longer means what it did: {:.4} of them for one of {} before, {:.4} now, with the change and without \
                 (another phase, or other code)",
                self.workload,
                self.judge,
                exp(off.before),
                self.beside,
                exp(off.now),
            )
        })
    }
}

/// Whether so many blocks say something.
fn speak(on: &[f64], off: &[f64]) -> bool {
    on.len() >= GUARDRAIL_BLOCKS && off.len() >= GUARDRAIL_BLOCKS
}

/// Whether the ratio differs between two arms; see [`Meaning::changed`].
fn differ(on: &[f64], off: &[f64], level: f64, gain: Option<f64>) -> bool {
    if !speak(on, off) {
        return false;
    }
    let proof = if gain.is_some() {
        Proof::Either
    } else {
        Proof::Both
    };
    // Either direction, so half of the level each.
    let below = |a: &[f64], b: &[f64], band: f64| {
        trimmed::fall(a, b, band, level / 2.0, GUARDRAIL_ERROR_MIN, proof).is_some()
    };
    below(on, off, ln(1.0 + BAND)) || below(off, on, gain.map_or(ln(1.0 + BAND), faked))
}

/// From how many more counts for the same work on they are taken for what the gain comes from: fewer than leave the band, where that is
/// all there is to it.
fn faked(gain: f64) -> f64 {
    ln(1.0 + BAND).min(gain / 2.0).max(GUARDRAIL_ERROR_MIN)
}

impl Meaning {
    /// What was seen, for people; `None` of a trial that ended before its first block did.
    pub(crate) fn account(&self) -> Option<MeaningAccount> {
        if self.ended == 0 && self.watches() {
            return None;
        }
        let (on, off) = (&self.on, &self.off);
        let speaks = speak(on, off);
        let staged = moved_with_the_share(&self.slots).map(effect_of);
        let unwatched = match &self.refused {
            None if !speaks && staged.is_none() && !self.slots.is_empty() => Some(format!(
                "{} slots of the rollout are too few to tell the change from time",
                self.slots.len()
            )),
            None if !speaks && staged.is_none() => Some(format!(
                "of {} blocks both it and {} were read in {} with the change and {} without, and {GUARDRAIL_BLOCKS} of each are needed",
                self.ended,
                self.beside,
                on.len(),
                off.len()
            )),
            refused => refused.clone(),
        };
        Some(MeaningAccount {
            workload: self.workload.clone(),
            judge: self.judge.clone(),
            beside: self.beside.clone(),
            unwatched,
            blocks_on: u32::try_from(on.len()).unwrap_or(u32::MAX),
            blocks_off: u32::try_from(off.len()).unwrap_or(u32::MAX),
            change: speaks.then(|| effect_between(on, off)).flatten(),
            slots: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
            staged,
            drift: self.drift(),
        })
    }

    /// The last blocks of both arms against those before. What the change itself does to the ratio is not in it: of each arm its
    /// own mean is taken off.
    fn drift(&self) -> Option<Effect> {
        let (mut before, mut last) = (Vec::new(), Vec::new());
        for arm in [&self.on, &self.off] {
            if arm.len() < 2 * MOVED_BLOCKS {
                return None;
            }
            let own = mean(arm);
            let (earlier, later) = arm.split_at(arm.len() - MOVED_BLOCKS);
            before.extend(earlier.iter().map(|ratio| ratio - own));
            last.extend(later.iter().map(|ratio| ratio - own));
        }
        effect_between(&last, &before)
    }
}

/// The last blocks of one arm against those before.
struct Moved {
    before: f64,
    now: f64,
    is_proven: bool,
}

impl Moved {
    fn of(arm: &[f64]) -> Option<Self> {
        let (earlier, last) = arm.split_at(arm.len().checked_sub(MOVED_BLOCKS)?);
        if earlier.len() < MOVED_BLOCKS {
            return None;
        }
        let fell = |a: &[f64], b: &[f64]| {
            let band = ln(1.0 + BAND);
            trimmed::fall(a, b, band, MOVED_LEVEL, GUARDRAIL_ERROR_MIN, Proof::Both).is_some()
        };
        Some(Self {
            before: mean(earlier),
            now: mean(last),
            is_proven: fell(last, earlier) || fell(earlier, last),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Interval;
    use std::collections::BTreeMap;

    fn meaning() -> Meaning {
        Meaning::new(
            "server".into(),
            MeterId::new("sockets.segments"),
            MeterId::new("io.write_calls"),
        )
    }

    /// Adds a block of ten seconds with so many segments for each call; `None`: the calls could not be read.
    fn block(meaning: &mut Meaning, on: bool, ratio: Option<f64>) {
        let mut series = Series::default();
        for end in 1..=10 {
            let mut work = BTreeMap::from([(MeterId::new("sockets.segments"), (1000.0, 1.0))]);
            if let Some(ratio) = ratio {
                work.insert(MeterId::new("io.write_calls"), (1000.0 / ratio, 1.0));
            }
            series.push(Interval {
                end: Nanoseconds::from_secs(end),
                seconds: 1.0,
                cpu: 0.5,
                work,
                ..Interval::default()
            });
        }
        meaning.observe(&series, on, Nanoseconds::ZERO, Nanoseconds::from_secs(10));
    }

    #[test]
    fn the_account_tells_the_arms_apart_from_what_changed_over_time() {
        let mut seen = meaning();
        for k in 0..16 {
            // A fifth more with the change, and half as many in the last blocks of both arms.
            let on = k % 2 == 0;
            let ratio = if on { 1.2 } else { 1.0 } * if k < 10 { 1.0 } else { 0.5 };
            block(&mut seen, on, Some(ratio));
        }
        let account = seen.account().unwrap();
        assert_eq!((account.blocks_on, account.blocks_off), (8, 8));
        let (change, drift) = (account.change.unwrap(), account.drift.unwrap());
        assert!((change.estimate - 0.2).abs() < 1e-9, "{account:?}");
        assert!((drift.estimate + 0.5).abs() < 1e-9, "{account:?}");
        assert!(change.upper > 0.5 && drift.upper < -0.49, "{account:?}");
        let text = account.to_string();
        assert!(
            text.starts_with(
                "sockets.segments for each of io.write_calls, over 16 blocks: -12.5 to +64.6 % with"
            ) && text.ends_with("-50.0 to -50.0 % in the last blocks against those before"),
            "{text}"
        );
    }

    #[test]
    fn trials_that_protect_from_a_loss_and_switches_are_not_watched() {
        let why = |urgent, beside: &str| unwatched(urgent, &MeterId::new(beside));
        assert_eq!(why(false, "io.write_calls"), None);
        for (urgent, beside, part) in [
            (true, "io.write_calls", "protects from a loss"),
            (false, "switches.voluntary", "switches of threads"),
        ] {
            assert!(why(urgent, beside).unwrap().contains(part));
        }
    }

    #[test]
    fn in_a_rollout_slots_with_more_of_the_change_are_compared_with_those_before() {
        let shares = [0.0, 0.1, 0.25, 0.5, 1.0];
        // By how much the ratio is another at such a share, in such a stage and slot.
        let rollout = |ratio: &dyn Fn(f64, u32, u32) -> f64| {
            let mut seen = meaning();
            for (stage, onset) in (0u32..).zip([5, 3, 8, 4]) {
                for slot in 0..9u32 {
                    let share = shares[stage as usize + usize::from(slot >= onset)];
                    // A percent more or less in every second slot, as chance has it.
                    let ratio =
                        2.0 * ratio(share, stage, slot) * (1.0 + 0.01 * f64::from((3 * slot + stage) % 4));
                    let mut series = Series::default();
                    series.push(Interval {
                        end: Nanoseconds::from_secs(1),
                        seconds: 1.0,
                        work: BTreeMap::from([
                            (MeterId::new("sockets.segments"), (1e5, 1.0)),
                            (MeterId::new("io.write_calls"), (1e5 / ratio, 1.0)),
                        ]),
                        ..Interval::default()
                    });
                    let (from, to) = (Nanoseconds::ZERO, Nanoseconds::from_secs(1));
                    seen.observe_slot(
                        &series,
                        SlotSpan {
                            stage,
                            slot,
                            share,
                            from,
                            to,
                        },
                    );
                }
            }
            seen
        };
        let early = 0.001;
        let look = |gain: f64, share: f64| {
            Some(LastLook {
                gain,
                share,
                level: 0.05,
            })
        };
        let kept = rollout(&|_, _, _| 1.0);
        assert_eq!(kept.changed_in_stages(early, look(0.10, 1.0)), None);
        let account = kept.account().unwrap();
        assert_eq!((account.slots, account.blocks_on, account.blocks_off), (36, 0, 0));
        assert!(account.staged.unwrap().estimate.abs() < 0.02, "{account:?}");
        assert!(account.to_string().contains("over 36 slots"), "{account}");
        // Of the last stage there are five slots with all of it in force, of the one before only one.
        assert_eq!(kept.by_share().0.len(), 5);
        // All of it makes half as many more of them: beyond the band.
        let altered = rollout(&|share, _, _| 1.0 + 0.5 * share);
        let why = altered.changed_in_stages(early, None).unwrap();
        assert!(why.contains("sockets.segments no longer means"), "{why}");
        // A few percent more look like most of the gain that it is thought to give, which is asked at the end only.
        let faked = rollout(&|share, _, _| 1.0 + 0.07 * share);
        assert_eq!(faked.changed_in_stages(early, None), None);
        let why = faked.changed_in_stages(early, look(0.10, 1.0)).unwrap();
        assert!(why.contains("by the stages"), "{why}");
        assert_eq!(faked.changed_in_stages(early, look(0.40, 1.0)), None);
        // Where half of it was made and gave that, it is half as many.
        assert_eq!(faked.changed_in_stages(early, look(0.10, 0.5)), None);
        // As much more by and by, whatever is in force, is not the change's doing.
        let drifts = rollout(&|_, stage, slot| 1.0 + 0.002 * f64::from(9 * stage + slot));
        assert_eq!(drifts.changed_in_stages(early, look(0.10, 1.0)), None);
        // Another phase: half as many of them from the third stage on.
        let phase = rollout(&|_, stage, _| if stage >= 2 { 0.5 } else { 1.0 });
        assert!(phase.changed_in_stages(early, None).is_some());
    }

    #[test]
    fn what_could_not_be_watched_says_why() {
        assert_eq!(meaning().account(), None, "no block has ended");
        let mut silent = meaning();
        (0..8).for_each(|k| block(&mut silent, k % 2 == 0, (k < 4).then_some(1.0)));
        let account = silent.account().unwrap();
        assert_eq!((account.blocks_on, account.change), (2, None));
        let text = account.to_string();
        assert!(
            text.contains(
                "not watched: of 8 blocks both it and io.write_calls were read in 2 with the change"
            ),
            "{text}"
        );
        let mut refused = meaning();
        refused.refuse("no such file");
        refused.refuse("another reason");
        block(&mut refused, true, Some(1.0));
        let account = refused.account().unwrap();
        assert_eq!(
            account.to_string(),
            "whether sockets.segments keeps its meaning was not watched: no such file"
        );
        assert_eq!((account.blocks_on, refused.watches()), (0, false));
        // Six blocks say something of the change, and nothing of time.
        let mut short = meaning();
        (0..6).for_each(|k| block(&mut short, k % 2 == 0, Some(1.0)));
        let account = short.account().unwrap();
        assert!(account.change.is_some() && account.drift.is_none());
        assert!(account.to_string().ends_with("over time"), "{account}");
    }
}
