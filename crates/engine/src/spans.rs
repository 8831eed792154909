//! The response of a program that is tried, seen without its help: spans of its threads from the end of a wait to the next
//! wait ([`homeostat_model::spans`]), as a guardrail of the trial.
//!
//! A server that does more work may answer later: its median span, or one of a hundred, gets longer. That is asked of its blocks
//! as all guardrails are asked (Welch's and Yuen's tests, at their level). What longer spans mean needs care:
//!
//! * A thread that finds more to do each time it wakes runs longer without anybody waiting longer for his part. A change by which
//!   there are fewer waits (for a page, a lock) joins spans that were apart. In both there is more work in a span. So a span
//!   counts as longer only when it is longer also *for the work done in it*, and both are proven.
//! * Shorter spans are no gain: nothing is accepted for them.
//! * What waits before a thread wakes up, in a queue or at a lock, is in no span.
//!
//! The same is asked of neighbours whose work is measured, and after an acceptance of the probe pairs of its guard ([`SpanWatch`]),
//! of all those of whom the trial has shown how much their spans vary by themselves.

use crate::blocks::COVERAGE_MIN;
use crate::harm::By;
use crate::meaning::SlotSpan;
use crate::panel::{
    GUARDRAIL_BLOCKS, GUARDRAIL_ERROR_MIN, Member, NOT_EXCLUDED_CONFIDENCE, effect_between, largest_fall,
};
use crate::series::Series;
use homeostat_model::experiment::time_in_words;
use homeostat_model::{Effect, LossIn, Nanoseconds, NotExcluded, SpanChange, SpansAccount, WorkloadId};
use homeostat_statistics::guard::Holdback;
use homeostat_statistics::robust::{exp, exp_m1, ln, mean, variance};
use homeostat_statistics::staged;
use homeostat_statistics::trimmed::{self, Proof};
use std::collections::VecDeque;

/// Members of a trial whose spans are followed: those that use most CPU.
pub(crate) const MEMBERS_MAX: usize = 4;
/// … and of its neighbours.
pub(crate) const NEIGHBOURS_MAX: usize = 4;
/// Fewest spans of a block: of fewer the longest one in a hundred is none of them.
const SPANS_MIN: f64 = 100.0;
/// What is asked of a rail: the longest one in a hundred, and the median.
pub(crate) const QUESTIONS: usize = 2;
/// Smallest scale of a pair's difference (log units): a histogram is exact to 6 %.
const SCALE_MIN: f64 = 0.06;
/// Differences that what is said is the mean of.
const RECENT_MAX: usize = 8;

/// Which of the spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    Half,
    P99,
}

/// In the order in which they are asked.
const SHARES: [Share; QUESTIONS] = [Share::P99, Share::Half];

impl Share {
    fn words(self) -> &'static str {
        match self {
            Self::Half => "half of its spans from wait to wait",
            Self::P99 => "99 of 100 of its spans from wait to wait",
        }
    }
}

/// What a block showed (log units).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seen {
    /// Half of the spans are shorter (seconds).
    median: f64,
    /// 99 of 100 are shorter.
    p99: f64,
    /// Units of work in one.
    work: f64,
}

impl Seen {
    /// Of the measured part of a block, whether they were followed in it, and what they showed if that is enough.
    fn of(member: &Member, series: &Series, from: Nanoseconds, to: Nanoseconds) -> (bool, Option<Self>) {
        let spans = series.spans(&member.meter, from, to);
        let followed = spans.sums.seconds > 0.0;
        let measured = member.measured(&spans.sums, to - from).is_some()
            && spans.sums.seconds >= COVERAGE_MIN * (to - from).as_secs_f64();
        if !measured || spans.sums.work <= 0.0 || (spans.histogram.total() as f64) < SPANS_MIN {
            return (followed, None);
        }
        let quantile = |share: f64| spans.histogram.quantile(share).map(|ns| ln(ns / 1e9));
        let seen = quantile(0.5).zip(quantile(0.99)).map(|(median, p99)| Self {
            median,
            p99,
            work: ln(spans.sums.work / spans.number),
        });
        (followed, seen)
    }

    fn length(&self, share: Share) -> f64 {
        match share {
            Share::Half => self.median,
            Share::P99 => self.p99,
        }
    }

    fn length_for_its_work(&self, share: Share) -> f64 {
        self.length(share) - self.work
    }
}

/// The spans of one workload that is tried, or beside which something is tried.
#[derive(Clone, Debug)]
pub(crate) struct SpanRail {
    member: Member,
    neighbour: bool,
    on: Vec<Seen>,
    off: Vec<Seen>,
    /// What the slots of a rollout showed.
    slots: Vec<(SlotSpan, Seen)>,
    /// Why they are not followed.
    refused: Option<String>,
    /// Blocks that ended while they were followed.
    followed: u32,
}

impl SpanRail {
    pub(crate) fn new(member: Member) -> Self {
        Self {
            member,
            neighbour: false,
            on: Vec::new(),
            off: Vec::new(),
            slots: Vec::new(),
            refused: None,
            followed: 0,
        }
    }

    /// Of one that somebody else's change is tried beside.
    pub(crate) fn of_a_neighbour(member: Member) -> Self {
        Self {
            neighbour: true,
            ..Self::new(member)
        }
    }

    pub(crate) fn is_neighbour(&self) -> bool {
        self.neighbour
    }

    pub(crate) fn workload(&self) -> &WorkloadId {
        &self.member.workload
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Whether they are to be followed.
    pub(crate) fn wanted(&self) -> bool {
        self.refused.is_none()
    }

    /// They cannot be followed, or no longer. Whether that is new.
    pub(crate) fn refuse(&mut self, why: &str) -> bool {
        let news = self.refused.is_none();
        self.refused.get_or_insert_with(|| why.to_owned());
        news
    }

    /// Reads the measured part of a block that ended.
    pub(crate) fn observe(&mut self, series: &Series, on: bool, from: Nanoseconds, to: Nanoseconds) {
        let (followed, seen) = Seen::of(&self.member, series, from, to);
        self.followed += u32::from(followed);
        let arm = if on { &mut self.on } else { &mut self.off };
        arm.extend(seen);
    }

    /// Reads a slot of a rollout that ended. Readings before `from` belong to the time before the slot.
    pub(crate) fn observe_slot(&mut self, series: &Series, of: SlotSpan, from: Nanoseconds) {
        let (followed, seen) = Seen::of(&self.member, series, from, of.to);
        self.followed += u32::from(followed);
        self.slots.extend(seen.map(|seen| (of, seen)));
    }

    /// Whether the slots of a rollout are enough to say something.
    pub(crate) fn speaks_in_stages(&self) -> bool {
        self.slots.len() >= 2 * GUARDRAIL_BLOCKS
    }

    /// What to say when its spans get longer with the whole change by more than `limit` (a share), and longer for the work
    /// done in them, proven by the slots of a rollout at this level each (one-sided).
    pub(crate) fn hurt_in_stages(&self, limit: f64, level: f64) -> Option<String> {
        let least = ln(1.0 + limit);
        SHARES.into_iter().find_map(|share| {
            let longer = |length: fn(&Seen, Share) -> f64| {
                let slots = self.slots.iter().map(|(of, seen)| of.seen(-length(seen, share)));
                let slots: Vec<staged::Seen> = slots.collect();
                staged::fell_with_the_share(&slots, least, level, GUARDRAIL_ERROR_MIN)
                    .map(|fall| exp_m1(-fall) * 100.0)
            };
            let (longer, for_its_work) = (longer(Seen::length)?, longer(Seen::length_for_its_work)?);
            Some(format!(
                "{}: {} takes {longer:.0} % longer with the whole change, by its stages (for the work done in each \
                 +{for_its_work:.0} %)",
                self.member.workload,
                share.words(),
            ))
        })
    }

    /// The largest rise of its longest spans that these readings do not exclude, as long as they are or for the
    /// work done in them. `None` with too few of them.
    pub(crate) fn not_excluded(&self, by: By) -> Option<NotExcluded> {
        let [share, ..] = SHARES;
        let largest = |length: fn(&Seen, Share) -> f64| -> Option<f64> {
            let shortness = |arm: &[Seen]| arm.iter().map(|s| -length(s, share)).collect::<Vec<f64>>();
            let found = match by {
                By::Blocks if self.speaks() => trimmed::welch(&shortness(&self.on), &shortness(&self.off)),
                By::Blocks => None,
                By::Slots => {
                    let slots = self.slots.iter().map(|(of, seen)| of.seen(-length(seen, share)));
                    staged::moved_with_the_share(&slots.collect::<Vec<_>>())
                }
            };
            found.map(largest_fall)
        };
        let rise = largest(Seen::length)?.min(largest(Seen::length_for_its_work)?);
        Some(NotExcluded {
            workload: self.member.workload.clone(),
            what: LossIn::Spans,
            most: exp_m1(rise),
            confidence: NOT_EXCLUDED_CONFIDENCE,
        })
    }

    /// Whether it has seen enough to say something.
    pub(crate) fn speaks(&self) -> bool {
        self.on.len() >= GUARDRAIL_BLOCKS && self.off.len() >= GUARDRAIL_BLOCKS
    }

    /// What to say when its spans got longer by more than `limit` (a share), and longer for the work done in them, proven at this
    /// level each (one-sided). `last`: the one look before the change is accepted; else one of many, at which two tests must prove it.
    pub(crate) fn hurt(&self, limit: f64, level: f64, last: bool) -> Option<String> {
        if !self.speaks() {
            return None;
        }
        let proof = if last { Proof::Either } else { Proof::Both };
        let least = ln(1.0 + limit);
        SHARES.into_iter().find_map(|share| {
            let longer = |length: fn(&Seen, Share) -> f64| {
                let shortness = |arm: &[Seen]| arm.iter().map(|s| -length(s, share)).collect::<Vec<f64>>();
                trimmed::fall(
                    &shortness(&self.on),
                    &shortness(&self.off),
                    least,
                    level,
                    GUARDRAIL_ERROR_MIN,
                    proof,
                )
                .map(|fall| exp_m1(-fall) * 100.0)
            };
            let (longer, for_its_work) = (longer(Seen::length)?, longer(Seen::length_for_its_work)?);
            Some(format!(
                "{}: {} took up to {} with it instead of {} (+{longer:.0} %; for the work done in each +{for_its_work:.0} %)",
                self.member.workload,
                share.words(),
                time_in_words(exp(self.mean(share, true))),
                time_in_words(exp(self.mean(share, false))),
            ))
        })
    }

    fn arm(&self, on: bool) -> &[Seen] {
        if on { &self.on } else { &self.off }
    }

    fn lengths(&self, share: Share, on: bool) -> Vec<f64> {
        self.arm(on).iter().map(|s| s.length(share)).collect()
    }

    fn mean(&self, share: Share, on: bool) -> f64 {
        mean(&self.lengths(share, on))
    }

    /// What was seen, for people; `None` where nobody could look and nobody said why.
    pub(crate) fn account(&self) -> Option<SpansAccount> {
        if self.followed == 0 && self.refused.is_none() {
            return None;
        }
        let unseen = match &self.refused {
            None if self.speaks_in_stages() => Some(format!(
                "its times were watched in {} slots of the rollout, and are told only if they got longer",
                self.slots.len()
            )),
            None if !self.speaks() => Some(format!(
                "{} of {} blocks had {SPANS_MIN} spans and more: its threads hardly wait, or the trial was short",
                self.on.len() + self.off.len(),
                self.followed
            )),
            refused => refused.clone(),
        };
        Some(SpansAccount {
            workload: self.member.workload.clone(),
            unseen,
            blocks_on: u32::try_from(self.on.len()).unwrap_or(u32::MAX),
            blocks_off: u32::try_from(self.off.len()).unwrap_or(u32::MAX),
            median: self.change(Share::Half),
            p99: self.change(Share::P99),
        })
    }

    fn change(&self, share: Share) -> Option<SpanChange> {
        if !self.speaks() {
            return None;
        }
        let effect = |length: fn(&Seen, Share) -> f64| -> Option<Effect> {
            let of = |arm: &[Seen]| arm.iter().map(|s| length(s, share)).collect::<Vec<f64>>();
            effect_between(&of(&self.on), &of(&self.off))
        };
        Some(SpanChange {
            on_s: exp(self.mean(share, true)),
            off_s: exp(self.mean(share, false)),
            noise: exp_m1(variance(&self.lengths(share, false)).sqrt()),
            longer: effect(Seen::length)?,
            longer_for_its_work: effect(Seen::length_for_its_work)?,
        })
    }
}

/// The spans of one workload in the probe pairs of an accepted change.
#[derive(Clone, Debug)]
pub(crate) struct SpanWatch {
    member: Member,
    neighbour: bool,
    questions: [Question; QUESTIONS],
}

/// One of the questions that are asked of each pair.
#[derive(Clone, Debug)]
struct Question {
    share: Share,
    /// Standard deviation of a pair's difference.
    scale: f64,
    /// So much longer they may be (log units).
    rise: f64,
    detector: Holdback,
    /// By how much they were shorter in each of the last pairs (log units).
    recent: VecDeque<f64>,
}

impl Question {
    fn new(share: Share, scale: f64, rise: f64) -> Self {
        Self {
            share,
            scale,
            rise,
            detector: Holdback::below(-rise, scale),
            recent: VecDeque::new(),
        }
    }

    /// By how much they are shorter with the change than without (log units): negative only where they are longer, and longer for the
    /// work done in them. (It is at least either of the two; so where one of them has not got longer by more than it may, the detector
    /// speaks no more often than if it were fed with that one.)
    fn shorter(&self, on: &Seen, off: &Seen) -> f64 {
        let (length, for_its_work) = (Seen::length, Seen::length_for_its_work);
        (length(off, self.share) - length(on, self.share))
            .max(for_its_work(off, self.share) - for_its_work(on, self.share))
    }
}

/// What a pair has shown of spans.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SpanAlarm {
    /// Looks like harm, and is not proven.
    pub(crate) suspicious: bool,
    /// Proven harm: whether it is a neighbour's, and what to say.
    pub(crate) hurt: Option<(bool, String)>,
}

impl SpanWatch {
    /// Those of whom the trial has shown how much they vary; `rise_max`: a share.
    pub(crate) fn of(rail: &SpanRail, rise_max: f64) -> Option<Self> {
        if !rail.speaks() || !rail.wanted() || rise_max <= 0.0 {
            return None;
        }
        let questions = SHARES.map(|share| {
            let varies = |on| variance(&rail.lengths(share, on));
            let scale = (varies(true) + varies(false)).sqrt().max(SCALE_MIN);
            Question::new(share, scale, ln(1.0 + rise_max))
        });
        Some(Self {
            member: rail.member.clone(),
            neighbour: rail.neighbour,
            questions,
        })
    }

    pub(crate) fn workload(&self) -> &WorkloadId {
        &self.member.workload
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Forgets what was seen.
    pub(crate) fn start_over(&mut self) {
        for q in &mut self.questions {
            *q = Question::new(q.share, q.scale, q.rise);
        }
    }

    /// So many detectors watch the change together.
    pub(crate) fn share_alarms(&mut self, detectors: usize) {
        for q in &mut self.questions {
            q.detector = q.detector.clone().one_of(detectors);
        }
    }

    /// What was measured from `from` to `to`.
    pub(crate) fn see(&self, series: &Series, from: Nanoseconds, to: Nanoseconds) -> Option<Seen> {
        Seen::of(&self.member, series, from, to).1
    }

    /// Takes a pair. `level`, `scales`: from where on a level, and a difference in scales, is looked into at once.
    pub(crate) fn observe(&mut self, on: &Seen, off: &Seen, level: f64, scales: f64) -> SpanAlarm {
        let mut alarm = SpanAlarm::default();
        for q in &mut self.questions {
            let shorter = q.shorter(on, off);
            if q.recent.len() == RECENT_MAX {
                q.recent.pop_front();
            }
            q.recent.push_back(shorter);
            let proven = q.detector.observe(shorter);
            alarm.suspicious |=
                (q.detector.level() >= level && shorter < -q.rise) || shorter < -q.rise - scales * q.scale;
            if proven && alarm.hurt.is_none() {
                let recent: Vec<f64> = q.recent.iter().copied().collect();
                let text = format!(
                    "{}: {} took up to {} with it instead of {}, as the last pair shows (+{:.0} % or more by the mean of the last {}, for the work \
                     done in each as well)",
                    self.member.workload,
                    q.share.words(),
                    time_in_words(exp(on.length(q.share))),
                    time_in_words(exp(off.length(q.share))),
                    exp_m1(-mean(&recent)) * 100.0,
                    recent.len()
                );
                alarm.hurt = Some((self.neighbour, text));
            }
        }
        alarm
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::Objective;
    use crate::panel::{GUARDRAIL_LEVEL, GUARDRAIL_LEVEL_EARLY};
    use crate::series::Interval;
    use homeostat_model::{Fingerprint, MeterId, SpanHistogram, Spans};
    use homeostat_statistics::simulation::Random;
    use std::collections::BTreeMap;

    const LIMIT: f64 = 0.2;

    fn rail() -> SpanRail {
        SpanRail::new(Member::new(
            "server".into(),
            Fingerprint::new("server"),
            MeterId::new("m"),
            Objective::CpuPerWork,
            0.5,
        ))
    }

    /// A second in which spans of 1 ms, one in fifty `tail` times as long, were worked at, with so much work in each.
    fn second(end: u64, spans: u64, length: f64, tail: f64, work: f64) -> Interval {
        let mut histogram = SpanHistogram::default();
        for k in 0..spans {
            let times = if k % 50 == 0 { tail } else { 1.0 };
            histogram.add((length * times * 1e6) as u64);
        }
        Interval {
            end: Nanoseconds::from_secs(end),
            seconds: 1.0,
            cpu: 0.5,
            machine_idle: 0.5,
            work: BTreeMap::from([(MeterId::new("m"), (spans as f64 * work, 1.0))]),
            spans: Some(Spans::of(&histogram, Nanoseconds::from_millis(500))),
            ..Interval::default()
        }
    }

    /// Adds a block of ten seconds.
    fn block(rail: &mut SpanRail, on: bool, spans: u64, length: f64, tail: f64, work: f64) {
        let mut series = Series::default();
        (1..=10).for_each(|t| series.push(second(t, spans, length, tail, work)));
        rail.observe(&series, on, Nanoseconds::ZERO, Nanoseconds::from_secs(10));
    }

    /// Ten blocks; what is on differs by these factors.
    fn trial(spans: f64, length: f64, tail: f64, work: f64) -> SpanRail {
        let mut rail = rail();
        for k in 0..5 {
            let wobble = 1.0 + 0.03 * f64::from(k % 3);
            block(&mut rail, false, 200, wobble, 4.0, 1.0);
            block(
                &mut rail,
                true,
                (200.0 * spans) as u64,
                length * wobble,
                4.0 * tail,
                work,
            );
        }
        rail
    }

    fn said(rail: &SpanRail) -> Option<String> {
        rail.hurt(LIMIT, GUARDRAIL_LEVEL / QUESTIONS as f64, true)
    }

    #[test]
    fn a_longer_tail_is_harm_and_the_same_is_not() {
        let slow = said(&trial(1.2, 1.0, 2.0, 1.0)).expect("twice as long");
        assert!(
            slow.starts_with("server: 99 of 100") && slow.contains("(+100 %"),
            "{slow}"
        );
        let slow = said(&trial(1.0, 1.5, 1.0, 1.0)).expect("all longer");
        assert!(slow.contains("(+4") || slow.contains("(+5"), "{slow}");
        let early = trial(1.0, 1.0, 2.0, 1.0).hurt(LIMIT, GUARDRAIL_LEVEL_EARLY / 2.0, false);
        assert!(early.is_some());
        for same in [
            trial(1.2, 1.0, 1.0, 1.0),
            trial(1.0, 1.1, 1.0, 1.0),
            trial(1.3, 0.7, 0.8, 1.0),
        ] {
            assert_eq!(said(&same), None);
        }
    }

    #[test]
    fn more_work_in_each_span_is_no_harm() {
        // Half as many spans, each twice as long, with twice the work: what came together was worked at together.
        assert_eq!(said(&trial(0.5, 2.0, 1.0, 2.0)), None);
        // Twice as long, and only a fifth more work in each.
        assert!(said(&trial(0.5, 2.0, 1.0, 1.2)).is_some());
    }

    #[test]
    fn the_account_tells_both_arms_and_the_noise() {
        let account = trial(1.0, 1.5, 1.0, 1.0).account().unwrap();
        let p99 = account.p99.unwrap();
        assert_eq!((account.blocks_on, account.blocks_off), (5, 5));
        assert!((p99.longer.estimate - 0.5).abs() < 0.05, "{p99:?}");
        assert!((p99.on_s / p99.off_s - 1.5).abs() < 0.05 && p99.noise > 0.01 && p99.noise < 0.06);
        let text = account.to_string();
        assert!(
            text.contains("99 of 100 up to 6.") && text.contains("noise"),
            "{text}"
        );
    }

    #[test]
    fn what_cannot_be_measured_is_told_and_holds_nothing_against_the_change() {
        assert_eq!(rail().account(), None, "nobody looked");
        let mut few = rail();
        for k in 0..10 {
            block(&mut few, k % 2 == 0, 5, 1.0, 50.0, 1.0);
        }
        assert!(!few.speaks());
        let why = few.account().unwrap().to_string();
        assert!(why.contains("not watched; 0 of 10 blocks"), "{why}");
        let mut refused = rail();
        assert!(refused.wanted() && refused.refuse("it costs too much") && !refused.refuse("again"));
        assert!(!refused.wanted() && refused.hurt(LIMIT, 0.05, true).is_none());
        assert!(
            refused
                .account()
                .unwrap()
                .to_string()
                .ends_with("it costs too much")
        );
    }

    /// Pairs until the guard speaks, of so many; `on` differs from a pair without by these (log units).
    fn until_alarm(length: f64, work: f64, noise: f64, pairs: u32) -> Option<u32> {
        let mut watch = SpanWatch::of(&trial(1.0, 1.0, 1.0, 1.0), LIMIT).unwrap();
        watch.share_alarms(QUESTIONS);
        let mut random = Random::new(7);
        (1..=pairs).find(|_| {
            let mut block = |by: f64, work: f64| {
                let median = by + noise * random.gaussian();
                let p99 = 1.4 + by + noise * random.gaussian();
                Seen { median, p99, work }
            };
            let (off, on) = (block(0.0, 0.0), block(length, work));
            watch.observe(&on, &off, 6.0, 4.0).hurt.is_some()
        })
    }

    #[test]
    fn a_guard_finds_longer_spans_and_forgives_what_a_trial_forgives() {
        let found = until_alarm(0.7, 0.0, 0.04, 60);
        assert!(found.is_some_and(|pairs| pairs <= 12), "{found:?}");
        // As before; a tenth longer, which is allowed; more work in each; shorter.
        for (length, work) in [(0.0, 0.0), (0.1, 0.0), (0.7, 0.7), (-0.7, -0.7)] {
            assert_eq!(until_alarm(length, work, 0.04, 400), None, "{length} {work}");
        }
        // Of spans of which the trial has shown too little nothing is known.
        assert!(SpanWatch::of(&rail(), LIMIT).is_none());
        assert!(SpanWatch::of(&trial(1.0, 1.0, 1.0, 1.0), 0.0).is_none());
    }

    /// All looks of a trial: an early one after each block, the last at the end.
    #[test]
    fn noise_alone_refuses_no_more_often_than_it_may() {
        const RUNS: u32 = 4000;
        for (noise, heavy) in [(0.05, false), (0.3, false), (0.6, true)] {
            let mut random = Random::new(5);
            let mut refused = 0;
            for _ in 0..RUNS {
                let mut rail = rail();
                let mut hurt = false;
                for k in 0..24 {
                    let mut draw = || noise * if heavy { random.heavy() } else { random.gaussian() };
                    let median = draw();
                    let seen = Seen {
                        median,
                        p99: 1.0 + 0.5 * median + draw(),
                        work: 0.05 * draw(),
                    };
                    let on = (k / 2 + k) % 2 == 0;
                    let arm = if on { &mut rail.on } else { &mut rail.off };
                    arm.push(seen);
                    hurt |= rail.hurt(LIMIT, GUARDRAIL_LEVEL_EARLY / 3.0, false).is_some();
                }
                hurt |= rail.hurt(LIMIT, GUARDRAIL_LEVEL / 3.0, true).is_some();
                refused += u32::from(hurt);
            }
            let share = f64::from(refused) / f64::from(RUNS);
            assert!(share <= GUARDRAIL_LEVEL, "{noise} {heavy}: {share}");
        }
    }
}
