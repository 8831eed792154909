//! What a guard sees in a probe pair, and what it makes of it.
//!
//! Four things are watched, each by an e-detector of its own (`homeostat_statistics::guard`): the score that was proven,
//! every member of a joint change by itself, the neighbours whose work is measured, and how long threads of either work at once
//! (`spans.rs`), where the trial has shown that. The score must not lose its gain; members and neighbours must not lose more than a
//! guardrail of a trial allows, nor their spans get longer by more than one allows, however much the score gains.
//!
//! A pair compares a program with itself: of several only those count that worked in both blocks. So one that rests does
//! not hide what the change does to those that work. A program that worked in one block only counts for the detectors as
//! a large loss or a large gain, by the arm in which it rested: by the coin either is as likely if the change does
//! nothing, and a change that keeps a program from its work is found.

use crate::blocks::BREAKER_SPAN;
use crate::experiment::Experiment;
use crate::panel::{GUARDRAIL_FALL, Guardrail, IDLE_SHARE, Member, Panel, QUORUM, Reading, allowed_fall};
use crate::series::Series;
use crate::spans::{self, SpanWatch};
use homeostat_model::{Effect, Nanoseconds, Verdict, WorkloadId};
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::fresh::Fresh;
use homeostat_statistics::guard::{Holdback, Probation, ProbationState};
use homeostat_statistics::robust::{exp_m1, ln, mean};
use homeostat_statistics::scar::{Scar, ScarState};
use homeostat_statistics::schedule::{self, GAIN_MIN, SCAR_PAIRS_MAX};
use std::collections::VecDeque;

/// What a probe block that the circuit breaker ended counts as, at least, and a block in which a program rested that
/// worked in the other: a loss of this many scales.
const BROKEN_SCALES: f64 = 4.0;
/// A pair that lost by this many scales is looked into at once …
const SUSPECT_SCALES: f64 = 4.0;
/// … and so is a detector at this level: it takes two losses in a row.
const SUSPECT_LEVEL: f64 = 3.0;
/// Share of the last seconds that must be read before the circuit breaker looks at them.
const BREAKER_COVERAGE: f64 = 0.8;
/// Confidence of the gain that is told.
const FRESH_CONFIDENCE: f64 = 0.90;
/// Differences that what is said is the mean of.
const RECENT_MAX: usize = 8;
/// Smallest scale of a pair's difference of a neighbour (log units); its meter was judged over longer blocks.
const NEIGHBOUR_SCALE_MIN: f64 = 0.01;

/// What one block showed of one program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    /// The meter did not say enough.
    Unread,
    /// It had next to nothing to do.
    Resting,
    /// Its score (log units).
    Score(f64),
}

/// What one block showed of all.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Scores {
    judges: Vec<Seen>,
    rails: Vec<Seen>,
    spans: Vec<Option<spans::Seen>>,
    /// Speed of the memory canary (log units), where it has one.
    canary: Option<f64>,
}

impl Scores {
    /// The same with the canary's speed in the block.
    pub(crate) fn beside(self, canary: Option<f64>) -> Self {
        Self { canary, ..self }
    }
}

/// What a pair says of one program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Said {
    Nothing,
    /// It rested in one block: −1 when that was the one that was on.
    Rested(f64),
    Difference(f64),
}

impl Said {
    fn of(on: Seen, off: Seen) -> Self {
        match (on, off) {
            (Seen::Score(on), Seen::Score(off)) => Self::Difference(on - off),
            (Seen::Resting, Seen::Score(_)) => Self::Rested(-1.0),
            (Seen::Score(_), Seen::Resting) => Self::Rested(1.0),
            _ => Self::Nothing,
        }
    }
}

/// One whose score must not fall, besides the score that was proven.
#[derive(Clone, Debug)]
struct Rail {
    member: Member,
    neighbour: bool,
    scale: f64,
    /// The fall (log units) from which it is hurt.
    fall: f64,
    detector: Holdback,
    recent: VecDeque<f64>,
}

impl Rail {
    fn new(member: Member, neighbour: bool, scale: f64, fall: f64) -> Self {
        Self {
            member,
            neighbour,
            scale,
            fall,
            detector: Holdback::below(-fall, scale),
            recent: VecDeque::new(),
        }
    }
}

/// How noisy a panel is.
struct Noise {
    /// Standard deviation of a pair's difference of the score of all.
    scale: f64,
    /// … with its rare large ones.
    spread: f64,
    /// … and of each.
    scales: Vec<f64>,
    breakers: Vec<Breaker>,
    /// Pairs that measure the gain.
    fresh_pairs: u32,
    /// Factor of the canary's speed, fixed at the end of the trial; 0 is none.
    factor: f64,
}

/// What the pairs so far amount to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Found {
    /// The pair said nothing: nobody worked.
    Nothing,
    /// Nothing is wrong.
    Fine,
    /// Nothing is wrong, and the probation is over.
    Passed,
    /// The change must go, and what its verdict becomes.
    Alarm(String, Verdict),
}

/// The watch over one change.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    panel: Panel,
    /// Below so many CPUs a program rests, whatever it used when it was tried.
    floor: f64,
    /// One for each member of the panel.
    breakers: Vec<Breaker>,
    /// Standard deviation of a pair's difference of each.
    scales: Vec<f64>,
    /// … and of the score of all.
    scale: f64,
    /// … with its rare large ones.
    spread: f64,
    /// Factor of the canary's speed in the score of all: `scale` is of scores without the noise that the canary saw.
    factor: f64,
    probation: Probation,
    probation_pairs: u32,
    detector: Holdback,
    rails: Vec<Rail>,
    spans: Vec<SpanWatch>,
    /// The reader that the change contains, and how much of its work it may lose (log units).
    reader: Option<(WorkloadId, f64)>,
    recent: VecDeque<f64>,
    /// The gain as these pairs show it.
    fresh: Fresh,
    /// So many of them, fixed beforehand, tell it for the first time.
    pub(crate) fresh_pairs: u32,
    /// Whether the undo leaves a scar that looks like a gain; not asked of what protects from a loss.
    scar: Option<Scar>,
    /// Pairs that said something.
    pairs: u32,
    suspicious: bool,
}

impl Watch {
    /// `probation_pairs`: pairs of the probation; `floor`: CPUs below which nothing is tried.
    pub(crate) fn new(e: &Experiment, probation_pairs: u32, floor: f64) -> Self {
        let panel = e.setup.panel.clone();
        // Who is protected from losing its pages waits for storage without them, and uses no CPU: that is no rest.
        let floor = if e.setup.urgent { 0.0 } else { floor };
        // A trial that ended after few blocks may believe in too small a scale, which would cost a good change its place.
        let scale = e.trial.estimate().scale.max(e.setup.parameters.scale_prior / 2.0);
        let (factor, scale) = e.beside.after(scale);
        let count = panel.members().len() as f64;
        let rail_of = |m: &Member| e.rails.iter().find(|r| r.is_of(m)).and_then(Guardrail::scale);
        // Of several each is noisier than their mean.
        let scales: Vec<f64> = panel
            .members()
            .iter()
            .map(|m| rail_of(m).unwrap_or(scale * count.sqrt()))
            .collect();
        let per_span = (e.setup.measured.as_secs_f64() / BREAKER_SPAN.as_secs_f64()).max(1.0);
        let breakers = scales
            .iter()
            .map(|s| {
                if panel.is_joint() {
                    Breaker::new(s / std::f64::consts::SQRT_2 * per_span.sqrt())
                } else {
                    e.breaker
                }
            })
            .collect();
        let rails = e
            .rails
            .iter()
            .filter(|r| !r.is_neighbour())
            .map(|r| {
                Rail::new(
                    r.member().clone(),
                    false,
                    r.scale().unwrap_or(scale * count.sqrt()),
                    GUARDRAIL_FALL,
                )
            })
            .collect();
        let (spread, gain) = (e.setup.spread.max(scale), e.effect().estimate);
        let noise = Noise {
            scale,
            spread,
            fresh_pairs: schedule::fresh_pairs(spread, gain),
            factor,
            scales,
            breakers,
        };
        let pairs = schedule::probation_pairs(probation_pairs, noise.spread, gain);
        let mut watch = Self::of(panel, noise, rails, pairs, floor);
        watch.spans = e
            .spans
            .iter()
            .filter_map(|rail| SpanWatch::of(rail, e.span_rise_max))
            .collect();
        watch.share_alarms();
        if e.protects() {
            return watch.without_scar();
        }
        watch
    }

    fn of(panel: Panel, noise: Noise, rails: Vec<Rail>, probation_pairs: u32, floor: f64) -> Self {
        let mut watch = Self {
            panel,
            floor,
            breakers: noise.breakers,
            scales: noise.scales,
            scale: noise.scale,
            spread: noise.spread,
            factor: noise.factor,
            probation: Probation::new(probation_pairs, noise.spread),
            probation_pairs,
            detector: detector(probation_pairs, noise.scale),
            rails,
            spans: Vec::new(),
            reader: None,
            recent: VecDeque::new(),
            fresh: Fresh::new(noise.scale),
            fresh_pairs: noise.fresh_pairs,
            scar: Some(Scar::new(noise.scale)),
            pairs: 0,
            suspicious: false,
        };
        watch.share_alarms();
        watch
    }

    /// What protects from a loss is not switched off for longer than it must be.
    pub(crate) fn without_scar(self) -> Self {
        Self { scar: None, ..self }
    }

    /// Whether pairs of the probation have the long washout.
    pub(crate) fn looks_for_a_scar(&self) -> bool {
        self.scar.is_some()
    }

    /// The gain as the pairs after the acceptance show it (relative); `None` while they are too few.
    pub(crate) fn fresh(&self) -> Option<Effect> {
        let found = self.fresh.interval(FRESH_CONFIDENCE)?;
        Some(Effect {
            estimate: exp_m1(found.estimate),
            lower: exp_m1(found.lower),
            upper: exp_m1(found.upper),
            confidence: found.confidence,
        })
    }

    pub(crate) fn panel(&self) -> &Panel {
        &self.panel
    }

    /// Whether a probe looks at this workload.
    pub(crate) fn looks_at(&self) -> impl Iterator<Item = &WorkloadId> {
        self.panel
            .workloads()
            .chain(self.rails.iter().map(|r| &r.member.workload))
    }

    /// Whose spans are looked at in a probe.
    pub(crate) fn follows(&self) -> impl Iterator<Item = &WorkloadId> {
        self.spans.iter().map(SpanWatch::workload)
    }

    pub(crate) fn in_probation(&self) -> bool {
        let clear = self.scar.as_ref().is_none_or(|s| s.state() != ScarState::Open);
        matches!(self.probation.state(), ProbationState::Running) || (self.probation_pairs > 0 && !clear)
    }

    /// Whether the last pair, or those before it, look like a loss: the next one should come soon.
    pub(crate) fn suspicious(&self) -> bool {
        self.suspicious
    }

    /// Pairs that said something.
    pub(crate) fn pairs(&self) -> u32 {
        self.pairs
    }

    /// Share of the work that is lost by it as the last pairs show, of who loses most; 0 when nobody does.
    pub(crate) fn loss(&self) -> f64 {
        let rails = self.rails.iter().map(|r| &r.recent);
        let losses = std::iter::once(&self.recent)
            .chain(rails)
            .filter(|r| !r.is_empty());
        losses.map(|r| -relative(r)).fold(0.0, f64::max)
    }

    /// What the last pairs show, for people; empty before the first.
    pub(crate) fn lately(&self) -> String {
        if self.recent.is_empty() {
            return String::new();
        }
        format!(
            ", the last {} show {:+.1} %",
            self.recent.len(),
            relative(&self.recent) * 100.0
        )
    }

    /// The panel without one of its workloads, watched anew: fewer are noisier, and what was seen of all says little of
    /// the rest. False when nobody is left.
    pub(crate) fn lose(&mut self, id: &WorkloadId) -> bool {
        let Some(panel) = self.panel.without(id) else {
            return false;
        };
        let before = self.panel.members().len() as f64;
        let kept: Vec<bool> = self.panel.members().iter().map(|m| m.workload != *id).collect();
        let mut keep = kept.iter().copied();
        self.breakers.retain(|_| keep.next().unwrap_or(true));
        let mut keep = kept.iter().copied();
        self.scales.retain(|_| keep.next().unwrap_or(true));
        let noisier = (before / panel.members().len() as f64).sqrt();
        self.scale *= noisier;
        self.spread *= noisier;
        self.panel = panel;
        self.rails.retain(|r| r.member.workload != *id);
        self.spans.retain(|s| s.workload() != id);
        self.start_over();
        true
    }

    /// Forgets what was seen: what is probed is another from now on.
    pub(crate) fn start_over(&mut self) {
        self.probation = Probation::new(self.probation_pairs, self.spread);
        self.detector = detector(self.probation_pairs, self.scale);
        for r in &mut self.rails {
            *r = Rail::new(r.member.clone(), r.neighbour, r.scale, r.fall);
        }
        self.spans.iter_mut().for_each(SpanWatch::start_over);
        self.fresh = Fresh::new(self.scale);
        self.scar = self.scar.take().map(|_| Scar::new(self.scale));
        self.recent.clear();
        self.suspicious = false;
        self.share_alarms();
    }

    /// Who else must not be harmed, each with the noise of its meter: fixed before the coin of a pair is tossed.
    pub(crate) fn set_neighbours(&mut self, neighbours: Vec<(Member, f64)>) {
        let known: Vec<Rail> = std::mem::take(&mut self.rails);
        let (mut rails, old): (Vec<Rail>, Vec<Rail>) = known.into_iter().partition(|r| !r.neighbour);
        for (member, noise) in neighbours {
            let scale = (noise * std::f64::consts::SQRT_2).max(NEIGHBOUR_SCALE_MIN);
            let same = |r: &&Rail| {
                r.member.workload == member.workload
                    && r.member.meter == member.meter
                    && r.member.objective == member.objective
            };
            let rail = old.iter().find(same).cloned();
            let fall = self.fall_of(&member);
            rails.push(rail.unwrap_or_else(|| Rail::new(member, true, scale, fall)));
        }
        self.rails = rails;
        self.share_alarms();
    }

    /// Who is contained by the change may lose as much as that is sure to gain (log units), up to a share of its work.
    pub(crate) fn concede(&mut self, reader: WorkloadId, most: f64, gained: f64) {
        let fall = allowed_fall(Some(-ln(1.0 - most)), Some(gained));
        self.reader = Some((reader, fall));
    }

    fn fall_of(&self, neighbour: &Member) -> f64 {
        match &self.reader {
            Some((reader, fall)) if *reader == neighbour.workload => *fall,
            _ => GUARDRAIL_FALL,
        }
    }

    /// So many detectors watch beside that of the score.
    fn beside(&self) -> usize {
        self.rails.len() + spans::QUESTIONS * self.spans.len()
    }

    /// All rails together raise a false alarm as rarely as one detector does.
    fn share_alarms(&mut self) {
        let count = self.beside();
        for r in &mut self.rails {
            r.detector = r.detector.clone().one_of(count);
        }
        for s in &mut self.spans {
            s.share_alarms(count);
        }
    }

    /// A program works when it uses this many CPUs.
    fn works_from(&self, member: &Member) -> f64 {
        (IDLE_SHARE * member.cpus).min(self.floor)
    }

    /// Whether nobody whose change it is has anything to do, by the CPUs that each uses now.
    pub(crate) fn all_rest(&self, cpus: impl Fn(&WorkloadId) -> Option<f64>) -> bool {
        self.panel
            .members()
            .iter()
            .all(|m| cpus(&m.workload).is_some_and(|c| c < self.works_from(m)))
    }

    fn see(&self, member: &Member, series: Option<&Series>, from: Nanoseconds, to: Nanoseconds) -> Seen {
        let Some(series) = series else {
            return Seen::Unread;
        };
        let sums = series.sums(&member.meter, from, to);
        if !member.covers(&sums, to - from) {
            return Seen::Unread;
        }
        if sums.cpu < self.works_from(member) * sums.seconds {
            return Seen::Resting;
        }
        match member.objective.score(&sums).filter(|s| s.is_finite()) {
            Some(score) => Seen::Score(score),
            None => Seen::Unread,
        }
    }

    /// What was measured from `from` to `to`. So much is left out before that for meters that tell late.
    pub(crate) fn read<'a>(
        &self,
        series: impl Fn(&WorkloadId) -> Option<&'a Series>,
        left_out: Nanoseconds,
        from: Nanoseconds,
        to: Nanoseconds,
    ) -> Scores {
        let seen = |m: &Member| self.see(m, series(&m.workload), from, to);
        // What the meter of a neighbour tells of the time before the switch is not this block's.
        let own_from = |m: &Member| series(&m.workload).map_or(from, |s| m.own_from(s, from, left_out, to));
        let rail = |m: &Member| self.see(m, series(&m.workload), own_from(m), to);
        Scores {
            judges: self.panel.members().iter().map(seen).collect(),
            rails: self.rails.iter().map(|r| rail(&r.member)).collect(),
            spans: self
                .spans
                .iter()
                .map(|s| s.see(series(s.workload())?, own_from(s.member()), to))
                .collect(),
            canary: None,
        }
    }

    /// A block in which everybody rested.
    pub(crate) fn resting(&self) -> Scores {
        Scores {
            judges: vec![Seen::Resting; self.panel.members().len()],
            rails: vec![Seen::Resting; self.rails.len()],
            spans: vec![None; self.spans.len()],
            canary: None,
        }
    }

    /// What a block needs to know of a span: it is measured when one of those whose change it is was read at work.
    pub(crate) fn reading<'a>(
        &self,
        series: impl Fn(&WorkloadId) -> Option<&'a Series>,
        left_out: Nanoseconds,
        from: Nanoseconds,
        to: Nanoseconds,
    ) -> Reading {
        let scores = self.read(&series, left_out, from, to);
        let works = scores.judges.iter().any(|s| matches!(s, Seen::Score(_)));
        let mut reading = Reading {
            idle: !works && scores.judges.contains(&Seen::Resting),
            score: works.then_some(0.0),
            ..Reading::default()
        };
        for m in self.panel.members() {
            if let Some(series) = series(&m.workload) {
                let sums = series.sums(&m.meter, from, to);
                reading.seconds = reading.seconds.max(sums.seconds);
                reading.work += sums.work;
                reading.cpu += sums.cpu;
            }
        }
        reading
    }

    /// A block that was off ended: the level that a fall is measured against.
    pub(crate) fn off_block(&mut self, scores: &Scores) {
        for (breaker, seen) in self.breakers.iter_mut().zip(&scores.judges) {
            if let Seen::Score(score) = seen {
                breaker.off_block(*score);
            }
        }
    }

    /// A block starts: the circuit breakers are armed again.
    pub(crate) fn block_started(&mut self) {
        for breaker in &mut self.breakers {
            breaker.block_started();
        }
    }

    /// Whether somebody's work fell so far in the last seconds that the block must end.
    pub(crate) fn trips<'a>(
        &mut self,
        series: impl Fn(&WorkloadId) -> Option<&'a Series>,
        from: Nanoseconds,
        now: Nanoseconds,
    ) -> bool {
        let span = BREAKER_SPAN.as_secs_f64() * BREAKER_COVERAGE;
        let mut tripped = false;
        let floors: Vec<f64> = self.panel.members().iter().map(|m| self.works_from(m)).collect();
        let judges = self.panel.members().iter().zip(&mut self.breakers).zip(floors);
        for ((m, breaker), floor) in judges {
            let Some(series) = series(&m.workload) else {
                continue;
            };
            let sums = series.sums(&m.meter, from, now);
            if sums.seconds >= span && sums.cpu >= floor * sums.seconds {
                if let Some(score) = m.objective.score(&sums) {
                    tripped |= breaker.trips(score);
                }
            }
        }
        tripped
    }

    /// What a block that a circuit breaker ended counts as: whose breaker tripped lost at least so much.
    pub(crate) fn broken(&self, mut on: Scores, off: &Scores) -> Scores {
        for (i, breaker) in self.breakers.iter().enumerate() {
            let (Some(seen), Some(Seen::Score(before))) = (on.judges.get_mut(i), off.judges.get(i)) else {
                continue;
            };
            if breaker.tripped() {
                let least = BROKEN_SCALES * self.scales.get(i).copied().unwrap_or(self.scale);
                let worst = before - least.max(breaker.fall());
                *seen = match *seen {
                    Seen::Score(score) => Seen::Score(score.min(worst)),
                    _ => Seen::Score(worst),
                };
            }
        }
        on
    }

    /// Noise of a pair's difference that the canary saw. Without its speed in both blocks the difference counts as measured.
    fn taken_out(&self, on: &Scores, off: &Scores) -> f64 {
        match (on.canary, off.canary) {
            (Some(on), Some(off)) => self.factor * (on - off),
            _ => 0.0,
        }
    }

    /// Takes a pair. `is_long`: its washouts were the long ones.
    pub(crate) fn observe(&mut self, on: &Scores, off: &Scores, is_long: bool) -> Found {
        let said = |on: &[Seen], off: &[Seen]| -> Vec<Said> {
            on.iter().zip(off).map(|(on, off)| Said::of(*on, *off)).collect()
        };
        let judges = said(&on.judges, &off.judges);
        let (mut sum, mut weight, mut rested) = (0.0, 0.0, 0.0);
        for (m, said) in self.panel.members().iter().zip(&judges) {
            match said {
                Said::Difference(d) => {
                    sum += m.weight() * d;
                    weight += m.weight();
                }
                Said::Rested(sign) => rested += m.weight() * sign,
                Said::Nothing => {}
            }
        }
        let whole = (weight > 0.0).then(|| sum / weight - self.taken_out(on, off));
        // Nobody to compare, and somebody who rested when it was on or off.
        let difference =
            whole.or_else(|| (rested != 0.0).then(|| rested.signum() * BROKEN_SCALES * self.scale));
        let Some(difference) = difference else {
            return Found::Nothing;
        };
        self.pairs += 1;
        remember(&mut self.recent, difference);
        let was_in_probation = self.in_probation();
        let alarm = self.detector.observe(difference);
        let state = match whole {
            Some(d) if weight >= QUORUM => self.probation.observe(d),
            _ => self.probation.state(),
        };
        let scar = self.learn(whole.filter(|_| weight >= QUORUM), rested, is_long);
        let mut hurt = None;
        // Of small stakes the level rises to that by itself: a pair that gained is no reason to look again.
        let mut suspicious = (self.detector.level() >= SUSPECT_LEVEL && difference < GAIN_MIN)
            || difference < GAIN_MIN - SUSPECT_SCALES * self.scale;
        let said = said(&on.rails, &off.rails);
        let rails = self.beside().max(1) as f64;
        for (r, said) in self.rails.iter_mut().zip(said) {
            let difference = match said {
                Said::Difference(d) => d,
                Said::Rested(sign) => sign * BROKEN_SCALES * r.scale,
                Said::Nothing => continue,
            };
            remember(&mut r.recent, difference);
            let alarm = r.detector.observe(difference);
            // Of many rails one is above a level by chance more often.
            suspicious |= (r.detector.level() >= SUSPECT_LEVEL * rails && difference < -r.fall)
                || difference < -r.fall - SUSPECT_SCALES * r.scale;
            if alarm && hurt.is_none() {
                hurt = Some((r.neighbour, r.describe()));
            }
        }
        for ((s, on), off) in self.spans.iter_mut().zip(&on.spans).zip(&off.spans) {
            let (Some(on), Some(off)) = (on, off) else {
                continue;
            };
            let alarm = s.observe(on, off, SUSPECT_LEVEL * rails, SUSPECT_SCALES);
            suspicious |= alarm.suspicious;
            hurt = hurt.or(alarm.hurt);
        }
        self.suspicious = suspicious;
        let after = format!("after {} probe pairs", self.pairs);
        match state {
            ProbationState::Revoked if was_in_probation => Found::Alarm(
                format!(
                    "revoked in probation {after}: the gain did not last ({:+.1} % in the last {})",
                    relative(&self.recent) * 100.0,
                    self.recent.len()
                ),
                Verdict::Rejected,
            ),
            _ if alarm => Found::Alarm(
                format!(
                    "revoked by the guard {after}: the gain is gone ({:+.1} % in the last {})",
                    relative(&self.recent) * 100.0,
                    self.recent.len()
                ),
                Verdict::Rejected,
            ),
            _ if scar.is_some() => Found::Alarm(
                format!("revoked by the guard {after}: {}", scar.unwrap_or_default()),
                Verdict::Rejected,
            ),
            _ if hurt.is_some() => {
                let (neighbour, who) = hurt.unwrap_or_default();
                Found::Alarm(
                    format!("revoked by the guard {after}: {who}"),
                    // Which neighbours there are is chance.
                    if neighbour {
                        Verdict::Inconclusive
                    } else {
                        Verdict::Rejected
                    },
                )
            }
            _ if was_in_probation && !self.in_probation() => {
                self.detector = detector(0, self.scale);
                Found::Passed
            }
            _ => Found::Fine,
        }
    }

    /// How much is gained, and whether that is only a scar of the undo: `Some` says why the change must go.
    fn learn(&mut self, difference: Option<f64>, rested: f64, is_long: bool) -> Option<String> {
        let difference = match difference {
            Some(difference) => difference,
            // It kept them from their work.
            None if rested < 0.0 => f64::NEG_INFINITY,
            None => return None,
        };
        self.fresh.observe(difference);
        let state = self.scar.as_mut().map(|s| s.observe(difference, is_long));
        let told = self.fresh().filter(|_| self.fresh.count() == self.fresh_pairs);
        match (state, told) {
            (Some(ScarState::Scar), _) => Some(
                "the gain shrinks when blocks begin later: the undo slows the program down for a while, and that looked like a gain"
                    .to_owned(),
            ),
            (Some(ScarState::Open), _) if self.fresh.count() >= SCAR_PAIRS_MAX => Some(
                "no gain is proven in blocks that begin late, so it may be a slowness that the undo leaves".to_owned(),
            ),
            (_, Some(told)) if schedule::is_too_small(told.upper) => {
                Some(format!("the gain is {told}, too little"))
            }
            _ => None,
        }
    }
}

/// Alarms when the gain is lost, not only when it has become a loss. A probation, which has tests of its own for that, may take some
/// hundred pairs on a noisy machine, in which a small gain would be taken for lost by chance: there it is for losses.
fn detector(probation_pairs: u32, scale: f64) -> Holdback {
    let floor = if probation_pairs > 0 { 0.0 } else { GAIN_MIN };
    Holdback::below(floor, scale)
}

impl Rail {
    fn describe(&self) -> String {
        format!(
            "{} loses {:.1} % {} with it, as the last {} show",
            self.member.workload,
            -relative(&self.recent) * 100.0,
            self.member.objective.words(),
            self.recent.len()
        )
    }
}

fn remember(recent: &mut VecDeque<f64>, difference: f64) {
    if recent.len() == RECENT_MAX {
        recent.pop_front();
    }
    recent.push_back(difference);
}

/// The mean of differences as a relative change.
fn relative(differences: &VecDeque<f64>) -> f64 {
    let all: Vec<f64> = differences.iter().copied().collect();
    exp_m1(mean(&all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::Objective;
    use homeostat_model::{Fingerprint, MeterId};

    const SCALE: f64 = 0.01;

    fn member(name: &str, cpus: f64) -> Member {
        let meter = MeterId::new("m");
        Member::new(
            name.into(),
            Fingerprint::new(name),
            meter,
            Objective::CpuPerWork,
            cpus,
        )
    }

    /// Programs with so many CPUs each, as one change; with a rail for each if there are several.
    fn watch(cpus: &[f64]) -> Watch {
        let all: Vec<Member> = cpus
            .iter()
            .enumerate()
            .map(|(i, c)| member(&format!("w{i}"), *c))
            .collect();
        let (lead, others) = all.split_first().unwrap();
        let panel = Panel::new(lead.clone(), others.to_vec());
        let rails = if panel.is_joint() { all.clone() } else { vec![] };
        let noise = Noise {
            scale: SCALE,
            spread: SCALE,
            fresh_pairs: 6,
            factor: 0.0,
            scales: vec![SCALE; cpus.len()],
            breakers: vec![Breaker::new(SCALE); cpus.len()],
        };
        let rails = rails
            .into_iter()
            .map(|m| Rail::new(m, false, SCALE, GUARDRAIL_FALL))
            .collect();
        Watch::of(panel, noise, rails, 0, 0.05)
    }

    /// Scores of the members, `None` for those that rest, and the same for their rails.
    fn block(w: &Watch, seen: &[Option<f64>]) -> Scores {
        let seen: Vec<Seen> = seen
            .iter()
            .map(|s| s.map_or(Seen::Resting, Seen::Score))
            .collect();
        let rails = w.rails.iter().enumerate();
        let rails = rails.map(|(i, _)| seen.get(i).copied().unwrap_or(Seen::Unread));
        Scores {
            rails: rails.collect(),
            judges: seen,
            ..Scores::default()
        }
    }

    /// Pairs until the alarm, and what it says.
    fn until_alarm(w: &mut Watch, on: &[Option<f64>], off: &[Option<f64>]) -> Option<(u32, String)> {
        let (on, off) = (block(w, on), block(w, off));
        (1..=60).find_map(|n| match w.observe(&on, &off, false) {
            Found::Alarm(why, _) => Some((n, why)),
            _ => None,
        })
    }

    #[test]
    fn one_that_rests_does_not_hide_what_the_change_does_to_those_that_work() {
        let mut w = watch(&[1.0, 8.0]);
        let (n, why) = until_alarm(&mut w, &[Some(1.95), None], &[Some(2.0), None]).unwrap();
        assert!(n <= 9 && why.contains("the gain is gone (-4.9 %"), "{n} {why}");
        // All at rest say nothing, for ever.
        let mut w = watch(&[1.0, 8.0]);
        assert_eq!(until_alarm(&mut w, &[None, None], &[None, None]), None);
        assert_eq!(w.pairs(), 0);
    }

    #[test]
    fn a_member_that_loses_is_found_however_much_the_others_gain() {
        let mut w = watch(&[1.0, 8.0]);
        let (n, why) = until_alarm(&mut w, &[Some(1.9), Some(2.5)], &[Some(2.0), Some(2.0)]).unwrap();
        assert!(
            n <= 12 && why.contains("w0 loses 9.5 % work per CPU second"),
            "{n} {why}"
        );
        // What a guardrail of a trial allows is allowed here.
        let mut w = watch(&[1.0, 8.0]);
        let less = until_alarm(&mut w, &[Some(1.98), Some(2.5)], &[Some(2.0), Some(2.0)]);
        assert_eq!(less, None);
    }

    #[test]
    fn a_change_that_keeps_a_program_from_its_work_is_found_and_one_that_lets_it_work_is_not() {
        let mut w = watch(&[1.0]);
        let (n, _) = until_alarm(&mut w, &[None], &[Some(2.0)]).unwrap();
        assert!(n <= 9, "{n}");
        let mut w = watch(&[1.0]);
        assert_eq!(until_alarm(&mut w, &[Some(2.0)], &[None]), None);
    }

    #[test]
    fn noise_that_the_canary_saw_is_taken_out_of_the_score_and_of_nothing_else() {
        let pairs = |factor: f64, canary: bool| {
            let mut w = watch(&[1.0]);
            w.factor = factor;
            w.set_neighbours(vec![(member("n", 2.0).by_work(), 0.002)]);
            // The gain is 0.05, and memory is faster in every other block by as much as the score shows.
            for i in 0..8 {
                let noise = if i % 2 == 0 { 0.2 } else { -0.2 };
                let seen = |own: f64, canary: Option<f64>| Scores {
                    judges: vec![Seen::Score(own)],
                    rails: vec![Seen::Score(6.0)],
                    ..Scores::default().beside(canary)
                };
                // One block without a reading leaves the pair as measured.
                let off = canary.then_some(16.0);
                w.observe(&seen(2.05 + noise, Some(16.0 + noise)), &seen(2.0, off), false);
            }
            let told = w.fresh().unwrap();
            let fell = w.rails.iter().flat_map(|r| &r.recent).any(|d| *d != 0.0);
            assert!(!fell, "a neighbour's difference counts as measured");
            told.upper - told.lower
        };
        assert!(pairs(1.0, true) < 1e-9);
        for as_measured in [pairs(0.0, true), pairs(1.0, false)] {
            assert!(as_measured > 0.2, "{as_measured}");
        }
    }

    #[test]
    fn a_neighbour_that_loses_ends_it_and_is_nobody_s_verdict() {
        let mut w = watch(&[1.0]);
        w.set_neighbours(vec![(member("n", 2.0).by_work(), 0.002)]);
        let seen = |own: f64, other: f64| Scores {
            judges: vec![Seen::Score(own)],
            rails: vec![Seen::Score(other)],
            ..Scores::default()
        };
        let mut found = Vec::new();
        for _ in 0..12 {
            // The list is drawn up anew before each pair, and what was seen of those that stay is kept.
            w.set_neighbours(vec![(member("n", 2.0).by_work(), 0.002)]);
            found.push(w.observe(&seen(2.2, 5.9), &seen(2.0, 6.0), false));
        }
        let alarm = found.iter().find_map(|f| match f {
            Found::Alarm(why, verdict) => Some((why.clone(), *verdict)),
            _ => None,
        });
        let (why, verdict) = alarm.unwrap();
        assert!(why.contains("n loses 9.5 % work per second"), "{why}");
        assert_eq!(verdict, Verdict::Inconclusive);
    }

    #[test]
    fn a_loss_beyond_the_noise_is_suspicious_until_it_is_explained() {
        let mut w = watch(&[1.0]);
        let pair = |w: &mut Watch, d: f64| {
            let (on, off) = (block(w, &[Some(2.0 + d)]), block(w, &[Some(2.0)]));
            w.observe(&on, &off, false);
            w.suspicious()
        };
        assert!(!pair(&mut w, 0.1));
        assert!(pair(&mut w, -0.1));
        assert!(!pair(&mut w, 0.1), "it was chance");
        assert!(!pair(&mut w, -0.005), "within the noise");
    }

    #[test]
    fn who_trips_a_breaker_has_lost_as_much_as_that_takes() {
        let w = &mut watch(&[1.0, 8.0]);
        let off = block(w, &[Some(2.0), Some(3.0)]);
        w.off_block(&off);
        w.block_started();
        w.breakers[0].trips(1.0);
        let on = w.broken(block(w, &[None, Some(3.1)]), &off);
        let Seen::Score(first) = on.judges[0] else {
            panic!("{on:?}")
        };
        assert!((2.0 - first - w.breakers[0].fall()).abs() < 1e-12);
        assert_eq!(on.judges[1], Seen::Score(3.1), "only who fell");
    }
}
