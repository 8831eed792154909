//! Who is measured in a trial, and how: one workload, or several whose changes are tried as one.
//!
//! Changes of workloads that act on each other (which CPUs they run on, whose memory is where) have effects in common:
//! the first that is moved out of the way helps those that stay, and the last finds everything done. Each by itself
//! then shows a part of what all bring, or nothing. Tried as one change they are judged by one score: the mean of the
//! logarithms of their objectives, each counting by the CPUs it used when the trial began. With one member this is its
//! own score.
//!
//! A member that has nothing to do in a block is left out of it, so that one idle program does not keep all others
//! waiting: the score is the mean over those that work, each against its own level when the trial began, as long as they
//! are half of the whole by weight. Who works does not depend on the coin if the change does nothing, and the levels are
//! fixed before the first coin, so the test stays exact; a change that itself makes a member stand still shows in the
//! work per second of that member, which is a guardrail.

use crate::blocks::{COVERAGE_MIN, Objective};
use crate::harm::By;
use crate::meaning::SlotSpan;
use crate::series::{Series, Sums};
use homeostat_model::{Effect, Fingerprint, MeterId, Nanoseconds, NotExcluded, WorkloadId};
use homeostat_statistics::robust::{exp_m1, ln, student_t_limit, variance};
use homeostat_statistics::staged;
use homeostat_statistics::trimmed::{self, Comparison, Proof};
use std::sync::Arc;

/// Below this share of its CPU use at the start a program whose load is offered counts as idle.
pub(crate) const IDLE_SHARE: f64 = 0.1;
/// Blocks of each arm that a guardrail needs to say something.
pub(crate) const GUARDRAIL_BLOCKS: usize = 3;
/// All guardrails of a trial together raise a false alarm with at most this probability when a gain is to be accepted …
pub(crate) const GUARDRAIL_LEVEL: f64 = 0.05;
/// … and with this at each block before.
pub(crate) const GUARDRAIL_LEVEL_EARLY: f64 = 0.001;
/// Scores of few counts may be equal by chance: the standard error is at least this (log units).
pub(crate) const GUARDRAIL_ERROR_MIN: f64 = 0.002;
/// A guardrail is hurt when its fall is proven (Welch's and Yuen's tests) and its estimate is at least this (log units): less is not
/// harm worth giving a proven gain up for.
pub(crate) const GUARDRAIL_FALL: f64 = 0.03;
/// Confidence of the intervals that are told and that no verdict rests on.
pub(crate) const INTERVAL_CONFIDENCE: f64 = 0.90;
/// Confidence with which larger losses are excluded (one-sided).
pub(crate) const NOT_EXCLUDED_CONFIDENCE: f64 = 0.95;
/// A block counts when members that carry at least this share of the weight worked in it.
pub(crate) const QUORUM: f64 = 0.5;
/// A sample of the history counts as a whole one from this share of its usual length: samples come on a beat, but late.
const WHOLE_INTERVAL: f64 = 0.8;
/// Others that a trial looks at besides its members.
pub(crate) const BYSTANDERS_MAX: usize = 16;

/// One workload and how its work is judged.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Member {
    pub(crate) workload: WorkloadId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) meter: MeterId,
    pub(crate) objective: Objective,
    /// CPUs it used when the trial began.
    pub(crate) cpus: f64,
    /// Its share in the score; the shares of a panel add up to one.
    weight: f64,
    /// Its own score when the trial began, from which its scores count where it is one of several (log units); 0 for one
    /// alone, whose score is what it is.
    level: f64,
}

impl Member {
    pub(crate) fn new(
        workload: WorkloadId,
        fingerprint: Fingerprint,
        meter: MeterId,
        objective: Objective,
        cpus: f64,
    ) -> Self {
        Self {
            workload,
            fingerprint,
            meter,
            objective,
            cpus,
            weight: 1.0,
            level: 0.0,
        }
    }

    /// The same as one of several, whose scores count from this level; a level that is no number is none.
    pub(crate) fn with_level(self, level: f64) -> Self {
        Self {
            level: if level.is_finite() { level } else { 0.0 },
            ..self
        }
    }

    /// The same by its work per second, whatever judges it: as a guardrail of somebody else's change.
    pub(crate) fn by_work(&self) -> Self {
        Self {
            weight: 1.0,
            objective: Objective::WorkPerSecond,
            ..self.clone()
        }
    }

    /// The same by all that somebody else's change must not worsen: its work per second; and where the CPU time for its work
    /// judges it also that, which may rise while the work stays what is offered.
    pub(crate) fn as_neighbour(&self) -> impl Iterator<Item = Self> + use<> {
        let by_cpu = (self.objective == Objective::CpuPerWork).then(|| Self {
            weight: 1.0,
            ..self.clone()
        });
        std::iter::once(self.by_work()).chain(by_cpu)
    }

    pub(crate) fn weight(&self) -> f64 {
        self.weight
    }

    /// Its score over a span of this length, when most of the span was read and it had something to do.
    pub(crate) fn measured(&self, sums: &Sums, length: Nanoseconds) -> Option<f64> {
        self.objective
            .score(sums)
            .filter(|s| s.is_finite() && self.covers(sums, length) && !self.is_idle(sums))
    }

    /// From when on what its meter tells, until `to`, is of the block whose measured part begins at `from`. So much is left out of each block
    /// before that for meters that tell late, which may be less than this one needs.
    pub(crate) fn own_from(
        &self,
        series: &Series,
        from: Nanoseconds,
        left_out: Nanoseconds,
        to: Nanoseconds,
    ) -> Nanoseconds {
        (from + series.lag(&self.meter).saturating_sub(left_out)).min(to)
    }

    /// Whether most of a span of this length was read.
    pub(crate) fn covers(&self, sums: &Sums, length: Nanoseconds) -> bool {
        sums.seconds >= COVERAGE_MIN * length.as_secs_f64()
    }

    /// Whether it had next to nothing to do in a span in which it used so many CPU seconds.
    fn is_idle(&self, sums: &Sums) -> bool {
        self.objective == Objective::CpuPerWork && sums.cpu < IDLE_SHARE * self.cpus * sums.seconds
    }
}

/// The workloads of a trial; the first leads.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Panel(Arc<[Member]>);

/// What was measured over a span.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Reading {
    /// When the first interval began that carries a reading; of several members the earliest.
    pub(crate) from: Option<Nanoseconds>,
    /// Seconds that carry readings: those of the member with the fewest.
    pub(crate) seconds: f64,
    /// Work of all, in the units of their meters.
    pub(crate) work: f64,
    /// CPU seconds of all.
    pub(crate) cpu: f64,
    /// Whether a member whose load is offered had none; of several, so many that the others do not speak for the whole.
    pub(crate) idle: bool,
    /// The score; `None` when a member was not measured.
    pub(crate) score: Option<f64>,
}

impl Panel {
    /// Weighs the members by the CPUs they use.
    pub(crate) fn new(lead: Member, others: Vec<Member>) -> Self {
        let mut members = others;
        members.insert(0, lead);
        let all: f64 = members.iter().map(|m| m.cpus.max(0.0)).sum();
        let count = members.len() as f64;
        for m in &mut members {
            m.weight = match count {
                1.0 => 1.0,
                _ if all > 0.0 => m.cpus.max(0.0) / all,
                _ => 1.0 / count,
            };
        }
        Self(members.into())
    }

    pub(crate) fn members(&self) -> &[Member] {
        &self.0
    }

    /// Whether several workloads are tried as one.
    pub(crate) fn is_joint(&self) -> bool {
        self.0.len() > 1
    }

    /// The member that stands for all where one name is needed.
    pub(crate) fn lead(&self) -> &Member {
        &self.0[0]
    }

    pub(crate) fn workloads(&self) -> impl Iterator<Item = &WorkloadId> {
        self.0.iter().map(|m| &m.workload)
    }

    pub(crate) fn has(&self, workload: &WorkloadId) -> bool {
        self.workloads().any(|w| w == workload)
    }

    /// CPUs that all used when the trial began.
    pub(crate) fn cpus(&self) -> f64 {
        self.0.iter().map(|m| m.cpus).sum()
    }

    /// The panel without one of its workloads; `None` when nobody is left.
    pub(crate) fn without(&self, workload: &WorkloadId) -> Option<Self> {
        let mut rest = self.0.iter().filter(|m| m.workload != *workload).cloned();
        let lead = rest.next()?;
        Some(Self::new(lead, rest.collect()))
    }

    /// The objective in words.
    pub(crate) fn words(&self) -> String {
        let mut words: Vec<&str> = self.0.iter().map(|m| m.objective.words()).collect();
        words.sort_unstable();
        words.dedup();
        let words = words.join(" or ");
        if self.is_joint() {
            format!("mean over {} workloads of {words}", self.0.len())
        } else {
            words
        }
    }

    /// The gain in words.
    pub(crate) fn gain(&self, effect: &homeostat_model::Effect) -> String {
        let gain = self.lead().objective.gain(effect);
        if self.is_joint() {
            format!("{gain} on average")
        } else {
            gain
        }
    }

    /// The names of all but the first, for people.
    pub(crate) fn others(&self) -> Vec<WorkloadId> {
        self.workloads().skip(1).cloned().collect()
    }
}

/// A panel with the series from which it is read.
pub(crate) struct Gauge<'a> {
    members: &'a [Member],
    series: Vec<&'a Series>,
}

impl<'a> Gauge<'a> {
    /// `None` when the series of a member cannot be found.
    pub(crate) fn new(panel: &'a Panel, series: impl Fn(&WorkloadId) -> Option<&'a Series>) -> Option<Self> {
        Some(Self {
            members: panel.members(),
            series: panel.workloads().map(series).collect::<Option<_>>()?,
        })
    }

    /// The meters, for people.
    pub(crate) fn meters(&self) -> String {
        let mut meters: Vec<&str> = self.members.iter().map(|m| m.meter.as_str()).collect();
        meters.sort_unstable();
        meters.dedup();
        meters.join(", ")
    }

    /// What was measured from `from` to `to`.
    pub(crate) fn read(&self, from: Nanoseconds, to: Nanoseconds) -> Reading {
        let mut reading = Reading {
            seconds: f64::INFINITY,
            ..Reading::default()
        };
        let (mut present, mut score) = (0.0, Some(0.0));
        for (m, series) in self.members.iter().zip(&self.series) {
            let sums = series.sums(&m.meter, from, to);
            reading.seconds = reading.seconds.min(sums.seconds);
            reading.from = reading.from.into_iter().chain(sums.from).min();
            reading.work += sums.work;
            reading.cpu += sums.cpu;
            let idle = m.is_idle(&sums);
            if idle && self.members.len() > 1 {
                continue;
            }
            reading.idle |= idle;
            present += m.weight;
            score = score
                .zip(m.objective.score(&sums))
                .map(|(all, own)| all + m.weight * (own - m.level));
        }
        if !reading.seconds.is_finite() {
            reading.seconds = 0.0;
        }
        reading.idle |= present < QUORUM;
        reading.score = score.filter(|_| present > 0.0).map(|all| all / present);
        reading
    }

    /// The score over a span of the past, where it counts as a block would.
    pub(crate) fn whole(&self, from: Nanoseconds, to: Nanoseconds) -> Option<f64> {
        let reading = self.read(from, to);
        let covered = reading.seconds >= COVERAGE_MIN * (to - from).as_secs_f64();
        reading
            .score
            .filter(|score| score.is_finite() && covered && !reading.idle)
    }

    /// The score over the last seconds, from `from` to `now`, when nearly all of a `span` was measured and no lull.
    pub(crate) fn last_seconds(&self, from: Nanoseconds, now: Nanoseconds, span: Nanoseconds) -> Option<f64> {
        let reading = self.read(from, now);
        reading
            .score
            .filter(|_| reading.seconds >= span.as_secs_f64() * 0.8 && !reading.idle)
    }

    /// The passive history since `since` as (work, denominator) per interval, for the choice of the block length: of
    /// one member its own counts, of several the mean of their rates, each relative to its own mean, over the
    /// intervals in which all were read.
    pub(crate) fn history(&self, since: Nanoseconds, interval: f64) -> Vec<(f64, f64)> {
        // Samples of a time in which something else was compared on and off are shorter: several make one interval.
        let readings = |m: &Member, series: &Series| -> Vec<(Nanoseconds, f64, f64)> {
            let mut whole = Vec::new();
            let (mut seconds, mut work, mut denominator) = (0.0, 0.0, 0.0);
            for i in series.since(since) {
                let Some((own_work, own_seconds)) = i.work.get(&m.meter) else {
                    continue;
                };
                seconds += i.seconds;
                work += own_work;
                denominator += match m.objective {
                    Objective::WorkPerSecond => *own_seconds,
                    Objective::CpuPerWork => i.cpu,
                };
                if seconds >= WHOLE_INTERVAL * interval {
                    whole.push((i.end, work, denominator));
                    (seconds, work, denominator) = (0.0, 0.0, 0.0);
                }
            }
            whole
        };
        if let ([m], [series]) = (self.members, self.series.as_slice()) {
            return readings(m, series).into_iter().map(|(_, w, d)| (w, d)).collect();
        }
        let mut sums: std::collections::BTreeMap<Nanoseconds, (usize, f64)> =
            std::collections::BTreeMap::new();
        for (m, series) in self.members.iter().zip(&self.series) {
            let own: Vec<_> = readings(m, series).into_iter().filter(|r| r.2 > 0.0).collect();
            let (work, denominator) = own.iter().fold((0.0, 0.0), |s, r| (s.0 + r.1, s.1 + r.2));
            if work <= 0.0 {
                return Vec::new();
            }
            for (end, w, d) in own {
                let sum = sums.entry(end).or_default();
                sum.0 += 1;
                sum.1 += m.weight * (w / d) * (denominator / work);
            }
        }
        // Counts that are large enough for the half count that stands for nothing to be nothing.
        const SCALE: f64 = 1e6;
        sums.into_values()
            .filter(|(members, _)| *members == self.members.len())
            .map(|(_, rate)| (rate * interval * SCALE, interval))
            .collect()
    }
}

/// A workload that a change must not harm, besides the score that it is to raise: a neighbour, a member of a joint
/// trial by itself, or the work per second of a program that is judged by its CPU time.
#[derive(Clone, Debug)]
pub(crate) struct Guardrail {
    member: Member,
    /// Whether it is of a workload that is not tried.
    neighbour: bool,
    /// The fall (log units) from which it is hurt, where there is more for the change to give than usual.
    concedes: Option<f64>,
    on: Vec<f64>,
    off: Vec<f64>,
    /// What the slots of a rollout showed.
    slots: Vec<staged::Seen>,
}

impl Guardrail {
    pub(crate) fn new(member: Member, objective: Objective) -> Self {
        Self {
            member: Member {
                weight: 1.0,
                objective,
                ..member
            },
            neighbour: false,
            concedes: None,
            on: Vec::new(),
            off: Vec::new(),
            slots: Vec::new(),
        }
    }

    /// The same, of a workload that is not tried.
    pub(crate) fn of_a_neighbour(self) -> Self {
        Self {
            neighbour: true,
            ..self
        }
    }

    /// The same, of the reader that the change contains: what a program lost to it is given back, so it may lose as much of
    /// its work (a share of it) as the program is sure to gain, up to this.
    pub(crate) fn of_the_reader(self, most: f64) -> Self {
        Self {
            concedes: Some(-ln(1.0 - most)),
            ..self
        }
    }

    /// Of the reader that the change contains: what it lost, in words; `None` for others, and for a reader that is not
    /// proven to have lost anything worth telling.
    pub(crate) fn conceded(&self) -> Option<String> {
        self.concedes?;
        self.fell(GUARDRAIL_FALL, GUARDRAIL_LEVEL, Proof::Either)
            .map(|change| self.lost(change))
    }

    /// Whether it is of the reader that the change contains, and has seen enough of it to say something.
    pub(crate) fn knows_the_reader(&self) -> bool {
        self.concedes.is_some() && self.compare().is_some()
    }

    pub(crate) fn is_neighbour(&self) -> bool {
        self.neighbour
    }

    pub(crate) fn workload(&self) -> &WorkloadId {
        &self.member.workload
    }

    /// Reads its score over the measured part of a block that ended.
    pub(crate) fn observe(&mut self, series: &Series, on: bool, from: Nanoseconds, to: Nanoseconds) {
        let sums = series.sums(&self.member.meter, from, to);
        if let Some(score) = self.member.measured(&sums, to - from) {
            if on {
                self.on.push(score);
            } else {
                self.off.push(score);
            }
        }
    }

    /// Reads its score over a slot of a rollout that ended. Readings before `from` belong to the time before the slot.
    pub(crate) fn observe_slot(&mut self, series: &Series, of: SlotSpan, from: Nanoseconds) {
        let sums = series.sums(&self.member.meter, from, of.to);
        if let Some(value) = self.member.measured(&sums, of.to - from) {
            self.slots.push(of.seen(value));
        }
    }

    /// What to say when the whole change hurts it by the slots of a rollout, at this level (one-sided). `gained`: see
    /// [`Guardrail::hurt`].
    pub(crate) fn hurt_in_stages(&self, level: f64, gained: Option<f64>) -> Option<String> {
        let fall = allowed_fall(self.concedes, gained);
        let change = staged::fell_with_the_share(&self.slots, fall, level, GUARDRAIL_ERROR_MIN)?;
        Some(self.lost(change))
    }

    /// Its own change (log units); `None` with too few blocks.
    pub(crate) fn change(&self) -> Option<Comparison> {
        self.compare()
    }

    /// The largest fall that these readings do not exclude; `None` with too few of them, and for the reader that the change
    /// contains, whose loss is told by itself.
    pub(crate) fn not_excluded(&self, by: By) -> Option<NotExcluded> {
        let found = match by {
            By::Blocks => self.compare(),
            By::Slots => staged::moved_with_the_share(&self.slots),
        };
        let found = found.filter(|_| self.concedes.is_none())?;
        Some(NotExcluded {
            workload: self.member.workload.clone(),
            what: self.member.objective.loss(),
            most: -exp_m1(-largest_fall(found)),
            confidence: NOT_EXCLUDED_CONFIDENCE,
        })
    }

    /// Standard deviation of the difference of one block that is on and one that is off (log units), as seen so far; `None`
    /// with too few blocks.
    pub(crate) fn scale(&self) -> Option<f64> {
        self.compare()?;
        Some((variance(&self.on) + variance(&self.off)).sqrt())
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// What to say when it was hurt, at this level (one-sided). `gained`: what the change is sure to gain (log units), at the one
    /// look before it is accepted; before that, at each of many looks, only what two tests prove.
    pub(crate) fn hurt(&self, level: f64, gained: Option<f64>) -> Option<String> {
        let proof = if gained.is_some() {
            Proof::Either
        } else {
            Proof::Both
        };
        let change = self.fell(allowed_fall(self.concedes, gained), level, proof)?;
        Some(self.lost(change))
    }

    /// Its fall (log units), where it is at least this and proven.
    fn fell(&self, fall: f64, level: f64, proof: Proof) -> Option<f64> {
        self.compare()?;
        trimmed::fall(&self.on, &self.off, fall, level, GUARDRAIL_ERROR_MIN, proof)
    }

    fn lost(&self, change: f64) -> String {
        format!(
            "{} lost {:.1} % {} with it",
            self.member.workload,
            -exp_m1(change) * 100.0,
            self.member.objective.words()
        )
    }

    /// Its blocks that were on against those that were off; `None` with too few of them.
    fn compare(&self) -> Option<Comparison> {
        if self.on.len() < GUARDRAIL_BLOCKS || self.off.len() < GUARDRAIL_BLOCKS {
            return None;
        }
        trimmed::welch(&self.on, &self.off)
    }

    /// Whether it is the score of this member itself.
    pub(crate) fn is_of(&self, member: &Member) -> bool {
        self.member.workload == member.workload && self.member.objective == member.objective
    }
}

/// The fall (log units) from which somebody is hurt by a change that is sure to gain so much: the usual one, or, where it
/// may concede more, as much as is gained, up to that.
pub(crate) fn allowed_fall(concedes: Option<f64>, gained: Option<f64>) -> f64 {
    concedes.map_or(GUARDRAIL_FALL, |most| {
        most.min(gained.unwrap_or(most)).max(GUARDRAIL_FALL)
    })
}

/// The log of a predicted relative gain; nothing below no gain.
pub(crate) fn log_gain(estimate: f64) -> f64 {
    ln(1.0 + estimate.max(0.0))
}

/// The largest fall (log units) that a comparison does not exclude, with [`NOT_EXCLUDED_CONFIDENCE`].
pub(crate) fn largest_fall(found: Comparison) -> f64 {
    let errors = student_t_limit(1.0 - NOT_EXCLUDED_CONFIDENCE, found.freedom);
    errors * found.error.max(GUARDRAIL_ERROR_MIN) - found.change
}

/// The effect of blocks that were on against those that were off, both in log units. `None` with too few of them.
pub(crate) fn effect_between(on: &[f64], off: &[f64]) -> Option<Effect> {
    trimmed::welch(on, off).map(effect_of)
}

/// What was compared in log units, with Student's interval at one check. No verdict rests on it.
pub(crate) fn effect_of(found: Comparison) -> Effect {
    let errors = student_t_limit((1.0 - INTERVAL_CONFIDENCE) / 2.0, found.freedom);
    Effect {
        estimate: exp_m1(found.change),
        lower: exp_m1(found.change - errors * found.error),
        upper: exp_m1(found.change + errors * found.error),
        confidence: INTERVAL_CONFIDENCE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Interval;
    use homeostat_statistics::simulation::Random;
    use std::collections::BTreeMap;

    fn member(name: &str, cpus: f64) -> Member {
        Member::new(
            name.into(),
            Fingerprint::new(name),
            MeterId::new("m"),
            Objective::WorkPerSecond,
            cpus,
        )
    }

    fn series(rate: impl Fn(u64) -> f64, from: u64) -> Series {
        let mut s = Series::default();
        for t in from..=60 {
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 0.5,
                wait: 0.0,
                machine_idle: 0.5,
                churn: 0,
                faults: (0, 0),
                work: BTreeMap::from([(MeterId::new("m"), (rate(t), 1.0))]),
                counted: BTreeMap::new(),
                lags: BTreeMap::new(),
                spans: None,
            });
        }
        s
    }

    #[test]
    fn the_score_of_several_is_their_mean_by_cpus_and_that_of_one_its_own() {
        let (a, b) = (series(|_| 100.0, 1), series(|_| 400.0, 1));
        let panel = Panel::new(member("a", 3.0), vec![member("b", 1.0)]);
        let gauge = Gauge::new(&panel, |w| Some(if w.as_str() == "a" { &a } else { &b })).unwrap();
        let (from, to) = (Nanoseconds::from_secs(10), Nanoseconds::from_secs(20));
        let both = gauge.read(from, to).score.unwrap();
        assert!((both - (0.75 * 100f64.ln() + 0.25 * 400f64.ln())).abs() < 1e-12);
        let levelled = Panel::new(
            member("a", 3.0).with_level(ln(50.0)),
            vec![member("b", 1.0).with_level(f64::NAN)],
        );
        let score = Gauge::new(&levelled, |w| Some(if w.as_str() == "a" { &a } else { &b }))
            .unwrap()
            .read(from, to)
            .score;
        assert!((score.unwrap() - (0.75 * 2f64.ln() + 0.25 * 400f64.ln())).abs() < 1e-12);
        let alone = panel.without(&"a".into()).unwrap();
        let gauge = Gauge::new(&alone, |_| Some(&b)).unwrap();
        assert_eq!(gauge.read(from, to).score, Some(ln(400.0)));
        assert!(alone.without(&"b".into()).is_none());
    }

    #[test]
    fn who_has_nothing_to_do_is_left_out_while_those_who_work_are_half_of_the_whole() {
        let (busy, idle) = (series(|_| 100.0, 1), series(|_| 1.0, 1));
        let offered = |name: &str, cpus: f64| Member {
            objective: Objective::CpuPerWork,
            ..member(name, cpus)
        };
        // All use half a CPU: too little of more than five.
        let read = |c: f64| {
            let panel = Panel::new(
                offered("a", 4.9).with_level(ln(50.0)),
                vec![offered("b", 5.1), offered("c", c)],
            );
            let find = |w: &WorkloadId| Some(if w.as_str() == "b" { &idle } else { &busy });
            let gauge = Gauge::new(&panel, find).unwrap();
            gauge.read(Nanoseconds::from_secs(10), Nanoseconds::from_secs(20))
        };
        let most = read(4.9);
        // Work per CPU second is 200; what `b` does counts neither for nor against.
        assert!(!most.idle);
        assert!((most.score.unwrap() - (0.5 * 4f64.ln() + 0.5 * 200f64.ln())).abs() < 1e-12);
        assert!(read(0.1).idle, "less than half of the weight works");
        assert!(read(5.2).idle);
    }

    #[test]
    fn a_member_without_readings_leaves_the_panel_without_a_score() {
        let (a, b) = (series(|_| 100.0, 1), series(|_| 400.0, 15));
        let panel = Panel::new(member("a", 1.0), vec![member("b", 1.0)]);
        let gauge = Gauge::new(&panel, |w| Some(if w.as_str() == "a" { &a } else { &b })).unwrap();
        let early = gauge.read(Nanoseconds::from_secs(2), Nanoseconds::from_secs(8));
        assert_eq!((early.score, early.seconds), (None, 0.0));
        assert_eq!(
            gauge.history(Nanoseconds::ZERO, 1.0).len(),
            46,
            "where both were read"
        );
        assert!(Gauge::new(&panel, |w| (w.as_str() == "a").then_some(&a)).is_none());
    }

    #[test]
    fn independent_noise_of_several_averages_out_in_their_history() {
        let wobble = |t: u64, phase: u64| 100.0 * (1.0 + 0.2 * if (t + phase) % 2 == 0 { 1.0 } else { -1.0 });
        let (a, b) = (series(|t| wobble(t, 0), 1), series(|t| wobble(t, 1), 1));
        let panel = Panel::new(member("a", 1.0), vec![member("b", 1.0)]);
        let gauge = Gauge::new(&panel, |w| Some(if w.as_str() == "a" { &a } else { &b })).unwrap();
        let rates: Vec<f64> = gauge
            .history(Nanoseconds::ZERO, 1.0)
            .iter()
            .map(|(w, d)| w / d)
            .collect();
        assert!(
            variance(&rates).sqrt() < 0.02 * homeostat_statistics::robust::mean(&rates),
            "{rates:?}"
        );
    }

    #[test]
    fn the_reader_may_lose_what_is_sure_to_be_gained_up_to_its_bound() {
        assert_eq!(allowed_fall(None, Some(2.0)), GUARDRAIL_FALL);
        assert_eq!(allowed_fall(Some(0.36), None), 0.36);
        assert_eq!(allowed_fall(Some(0.36), Some(0.1)), 0.1);
        assert_eq!(allowed_fall(Some(0.36), Some(2.0)), 0.36);
        assert_eq!(allowed_fall(Some(0.36), Some(0.0)), GUARDRAIL_FALL);
    }

    #[test]
    fn intervals_and_excluded_losses_hold_as_often_as_they_say() {
        const RUNS: u32 = 4000;
        let mut random = Random::new(9);
        let (mut held, mut excluded) = (0u32, 0u32);
        for _ in 0..RUNS {
            let mut arm = |level: f64, n: usize| -> Vec<f64> {
                (0..n).map(|_| level + 0.05 * random.gaussian()).collect()
            };
            let (on, off) = (arm(-0.02, 6), arm(0.0, 5));
            let effect = effect_between(&on, &off).unwrap();
            held += u32::from((effect.lower..effect.upper).contains(&exp_m1(-0.02)));
            excluded += u32::from(largest_fall(trimmed::welch(&on, &off).unwrap()) >= 0.02);
        }
        let share = |count: u32| f64::from(count) / f64::from(RUNS);
        let (held, excluded) = (share(held), share(excluded));
        assert!((held - INTERVAL_CONFIDENCE).abs() < 0.015, "{held}");
        assert!((excluded - NOT_EXCLUDED_CONFIDENCE).abs() < 0.015, "{excluded}");
    }

    #[test]
    fn a_guardrail_is_hurt_by_a_proven_fall_only() {
        let mut rail = Guardrail::new(member("n", 1.0), Objective::WorkPerSecond);
        let block = |rail: &mut Guardrail, on: bool, rate: f64| {
            rail.observe(
                &series(|_| rate, 1),
                on,
                Nanoseconds::from_secs(10),
                Nanoseconds::from_secs(20),
            );
        };
        for k in 0..3 {
            block(&mut rail, false, 100.0 + f64::from(k));
            assert_eq!(rail.hurt(0.05, None), None, "nothing is known yet");
            block(&mut rail, true, 90.0 + f64::from(k));
        }
        assert!(
            rail.hurt(0.01, None).unwrap().starts_with("n lost 9."),
            "{:?}",
            rail.hurt(0.01, None)
        );
        let mut rail = Guardrail::new(member("n", 1.0), Objective::WorkPerSecond);
        for k in 0..4 {
            block(&mut rail, false, 100.0 + 20.0 * f64::from(k % 2));
            block(&mut rail, true, 98.0 + 20.0 * f64::from(k % 2));
        }
        assert_eq!(rail.hurt(0.01, None), None, "within its noise");
    }

    #[test]
    fn what_is_told_of_the_time_before_a_block_is_not_the_blocks() {
        let secs = Nanoseconds::from_secs;
        let mut series = Series::default();
        for end in 1..=160 {
            series.push(Interval {
                end: secs(end),
                seconds: 1.0,
                work: BTreeMap::from([(MeterId::new("own"), (1.0, 1.0))]),
                ..Interval::default()
            });
        }
        series.push(Interval {
            end: secs(161),
            seconds: 1.0,
            work: BTreeMap::from([(MeterId::new("points"), (1.0, 1.0))]),
            lags: BTreeMap::from([(MeterId::new("points"), secs(7))]),
            ..Interval::default()
        });
        let own = |meter: &str, left_out| {
            let (workload, kind) = ("w".into(), Fingerprint::new("w"));
            let member = Member::new(workload, kind, meter.into(), Objective::WorkPerSecond, 1.0);
            member.own_from(&series, secs(100), secs(left_out), secs(104))
        };
        // The trial leaves out nothing, or less or more than it takes, for the meter that judges; in no case more than there is.
        assert_eq!(
            [0, 5, 7, 9].map(|left_out| own("points", left_out)),
            [104, 102, 100, 100].map(secs)
        );
        assert_eq!(own("own", 0), secs(100));
    }
}
