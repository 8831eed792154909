//! One run of the published procedure on a record: history, block length, trial, fresh pairs, probation.

use super::record::{Ring, score};
use homeostat_statistics::block_length::{self, Choice, Past};
use homeostat_statistics::control::Control;
use homeostat_statistics::fresh::Fresh;
use homeostat_statistics::guard::{Holdback, Probation, ProbationState};
use homeostat_statistics::robust::{exp, exp_m1, ln_1p};
use homeostat_statistics::scar::{Scar, ScarState};
use homeostat_statistics::schedule::{
    FRESH_EARNED_IN_S, SCAR_PAIRS_MAX, SETTLING_CONSTANTS, SWITCH_MARGIN, fresh_pairs, is_cheap,
    is_too_small, long_washout_s, probation_pairs, probe_interval_s,
};
use homeostat_statistics::simulation::Random;
use homeostat_statistics::{Arm, Decision, Trial, TrialParameters};
use serde::{Deserialize, Serialize};

/// The effect that is put on the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Injected {
    /// Relative gain in work of the change (0.15 is +15 %).
    pub gain: f64,
    /// Time constant with which the gain comes and goes (seconds); 0: at once.
    pub onset_s: f64,
    /// Relative loss after each undo.
    pub scar: f64,
    /// How long that loss lasts while the change is off (seconds).
    pub scar_s: f64,
}

/// The procedure's parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    /// Passive history before a trial (seconds).
    pub history_s: f64,
    /// Shortest washout (seconds).
    pub washout_min_s: f64,
    /// Slowest switch (seconds).
    pub switch_s: f64,
    /// Candidate lengths of the measured part (seconds).
    pub candidates_s: Vec<f64>,
    /// Longest trial (seconds).
    pub budget_s: f64,
    /// Probe pairs right after an accept, instead of those of the daemon's rule.
    pub fresh_pairs: Option<u32>,
    /// Whether a record's memory canary takes noise out of the scores.
    pub canary: bool,
    /// Fewest probe pairs of the probation, those right after the accept included.
    pub probation_pairs: u32,
    /// Confidence of the intervals that are shown.
    pub confidence: f64,
    /// Parameters of the trial but for its level and scale.
    pub trial: TrialParameters,
}

/// A shown gain, relative (0.15 is +15 %).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shown {
    /// Estimate.
    pub gain: f64,
    /// Lower end.
    pub lower: f64,
    /// Upper end.
    pub upper: f64,
}

/// Why the guard revoked a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Revoked {
    /// Too many large losses in the probation.
    Losses,
    /// The probation's mean is too low.
    Mean,
    /// The shown interval lies below the gate.
    Interval,
    /// The detector that watches for ever raised its alarm.
    Detector,
    /// The gain shrinks with the long washout.
    Scar,
    /// No gain was proven with the long washout.
    Unproven,
}

/// What follows an accept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct After {
    /// The trial's own estimate and time-uniform interval.
    pub trial: Shown,
    /// Fresh pairs alone.
    pub fresh: Option<Shown>,
    /// Seconds that they took.
    pub fresh_s: f64,
    /// All pairs up to the end of the probation.
    pub pooled: Option<Shown>,
    /// Seconds from the accept to the end of the probation.
    pub pooled_s: f64,
    /// Pairs up to the end of the probation, or until the change was revoked.
    pub pairs: u32,
    /// Why the guard revoked the change.
    pub revoked: Option<Revoked>,
    /// Pairs until the gain was proven with the long washout.
    pub clear_pairs: Option<u32>,
}

impl After {
    fn new(trial: Shown) -> Self {
        Self {
            trial,
            fresh: None,
            fresh_s: 0.0,
            pooled: None,
            pooled_s: 0.0,
            pairs: 0,
            revoked: None,
            clear_pairs: None,
        }
    }

    /// Whether the change stays.
    pub fn is_kept(&self) -> bool {
        self.revoked.is_none()
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The decision; `None` if the history allowed no trial.
    pub decision: Option<Decision>,
    /// Seconds of the trial.
    pub seconds: f64,
    /// Measured part of a block (seconds).
    pub measured_s: f64,
    /// Scale of a pair's difference by the history (log units).
    pub scale: f64,
    /// Lost work of the trial (seconds of the program's work).
    pub lost_s: f64,
    /// Lost work of the fresh pairs (seconds).
    pub lost_fresh_s: f64,
    /// What followed an accept.
    pub after: Option<After>,
}

/// A machine that plays the record, with the injected effect.
struct Machine<'a> {
    ring: &'a Ring,
    injected: Injected,
    /// Logarithm of the gain.
    theta: f64,
    at: usize,
    rows: usize,
    is_on: bool,
    /// Share of the gain that is there now.
    level: f64,
    /// Rows since the last undo.
    since_undo: usize,
    lost_s: f64,
}

impl<'a> Machine<'a> {
    fn new(ring: &'a Ring, injected: Injected, at: usize) -> Self {
        Self {
            ring,
            injected,
            theta: ln_1p(injected.gain),
            at,
            rows: 0,
            is_on: false,
            level: 0.0,
            since_undo: usize::MAX / 2,
            lost_s: 0.0,
        }
    }

    fn seconds(&self) -> f64 {
        self.rows as f64 * self.ring.row_s
    }

    fn switch(&mut self, on: bool) {
        if self.is_on && !on {
            self.since_undo = 0;
        }
        self.is_on = on;
    }

    /// Plays some rows: their work, with the effect, and denominator.
    fn play(&mut self, rows: usize) -> (f64, f64) {
        let worse = if self.theta >= 0.0 {
            !self.is_on
        } else {
            self.is_on
        };
        if worse {
            self.lost_s += rows as f64 * self.ring.row_s * (1.0 - exp(-self.theta.abs()));
        }
        let at = self.at;
        self.at = (self.at + rows) % self.ring.len().max(1);
        self.rows += rows;
        if self.injected.onset_s > 0.0 || self.injected.scar > 0.0 {
            return self.play_slowly(at, rows);
        }
        let (work, denominator) = self.ring.sum(at, rows);
        let factor = if self.is_on { 1.0 + self.injected.gain } else { 1.0 };
        (work * factor, denominator)
    }

    /// Lets time pass with the change in force.
    fn rest(&mut self, seconds: f64) {
        let rows = self.ring.rows_for(seconds);
        if self.injected.onset_s > 0.0 {
            let decay = exp(-(rows as f64) * self.ring.row_s / self.injected.onset_s);
            self.level = 1.0 + (self.level - 1.0) * decay;
        }
        self.at = (self.at + rows) % self.ring.len().max(1);
        self.rows += rows;
        self.since_undo = self.since_undo.saturating_add(rows);
    }

    /// Row by row: a gain that comes and goes slowly, and the scar of an undo.
    fn play_slowly(&mut self, at: usize, rows: usize) -> (f64, f64) {
        let target = if self.is_on { 1.0 } else { 0.0 };
        let (tau, row_s) = (self.injected.onset_s, self.ring.row_s);
        let decay = if tau > 0.0 { exp(-row_s / tau) } else { 0.0 };
        let mut total = (0.0, 0.0);
        for i in 0..rows {
            // Mean share of the gain over the row.
            let mean = target + (self.level - target) * (1.0 - decay) * tau / row_s;
            self.level = target + (self.level - target) * decay;
            let is_scarred = !self.is_on && (self.since_undo as f64) * row_s < self.injected.scar_s - 1e-9;
            let scar = if is_scarred { 1.0 - self.injected.scar } else { 1.0 };
            let (work, denominator) = self.ring.row(at + i);
            total.0 += work * exp(self.theta * mean) * scar;
            total.1 += denominator;
            self.since_undo = self.since_undo.saturating_add(1);
        }
        total
    }

    /// The score of a block, and the canary's speed in it.
    fn block(&mut self, on: bool, washout: usize, measured: usize) -> (f64, Option<f64>) {
        self.switch(on);
        self.play(washout);
        let canary = self.ring.canary(self.at, measured);
        (score(self.play(measured)), canary)
    }

    /// The differences of score and canary in a probe pair (on − off); afterwards the change is in force.
    fn pair(&mut self, washout: usize, measured: usize, random: &mut Random) -> (f64, Option<f64>) {
        let on_first = random.coin();
        let first = self.block(on_first, washout, measured);
        let second = self.block(!on_first, washout, measured);
        self.switch(true);
        let (on, off) = if on_first {
            (first, second)
        } else {
            (second, first)
        };
        (on.0 - off.0, on.1.zip(off.1).map(|(on, off)| on - off))
    }
}

/// Lengths of a block in rows.
#[derive(Clone, Copy)]
struct Lengths {
    washout: usize,
    measured: usize,
}

/// The washout for a time constant that is known beforehand (seconds).
fn washout_s(rules: &Rules, known_onset_s: f64) -> f64 {
    rules
        .washout_min_s
        .max(SWITCH_MARGIN * rules.switch_s + SETTLING_CONSTANTS * known_onset_s)
}

/// What differs between runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) injected: Injected,
    /// Time constant by which the washout is set (seconds).
    pub(super) known_onset_s: f64,
    /// Level of the trial.
    pub(super) alpha: f64,
    pub(super) seed: u64,
}

/// Runs the procedure once.
pub(super) fn run(ring: &Ring, setting: Setting, rules: &Rules) -> Run {
    let Setting {
        injected,
        known_onset_s,
        alpha,
        seed,
    } = setting;
    let mut random = Random::new(seed);
    let at = (random.uniform() * ring.len() as f64) as usize;
    let washout = ring.rows_for(washout_s(rules, known_onset_s));
    let parameters = TrialParameters {
        alpha,
        ..rules.trial.clone()
    };
    let Some(choice) = choose(ring, at, washout, &parameters, rules) else {
        return Run {
            decision: None,
            seconds: 0.0,
            measured_s: 0.0,
            scale: 0.0,
            lost_s: 0.0,
            lost_fresh_s: 0.0,
            after: None,
        };
    };
    let lengths = Lengths {
        washout,
        measured: ring.rows_for(choice.measured_s).max(1),
    };
    let mut machine = Machine::new(ring, injected, at);
    let mut trial = Trial::new(TrialParameters {
        scale_prior: choice.scale,
        ..parameters
    });
    let block_s = (lengths.washout + lengths.measured) as f64 * ring.row_s;
    let mut control = Control::default();
    while trial.decision() == Decision::Continue {
        if machine.seconds() + block_s > rules.budget_s {
            trial.budget_exhausted();
            break;
        }
        let coin = trial.needs_coin() && {
            control.fix();
            random.coin()
        };
        let on = trial.next_arm(coin) == Arm::On;
        let (score, canary) = machine.block(on, lengths.washout, lengths.measured);
        let canary = canary.filter(|_| rules.canary);
        let taken = control.taken_out(canary);
        control.observe(on, score, canary);
        let decision = trial.observe(score - taken);
        if decision == Decision::Benefit && !control.permits(trial.parameters().gate) {
            trial.go_on();
        }
    }
    let (seconds, lost_s) = (machine.seconds(), machine.lost_s);
    let after = (trial.decision() == Decision::Benefit).then(|| {
        let watch = Watch::new(&trial, &control, lengths, &choice, rules);
        follow(&mut machine, watch, &mut random)
    });
    Run {
        decision: Some(trial.decision()),
        seconds,
        measured_s: lengths.measured as f64 * ring.row_s,
        scale: choice.scale,
        lost_s,
        lost_fresh_s: after.as_ref().map_or(0.0, |a| a.1),
        after: after.map(|a| a.0),
    }
}

/// Candidates are whole rows long: others are left out.
fn choose(
    ring: &Ring,
    at: usize,
    washout: usize,
    parameters: &TrialParameters,
    rules: &Rules,
) -> Option<Choice> {
    let is_whole = |s: &f64| (s / ring.row_s - (s / ring.row_s).round()).abs() < 1e-6;
    let candidates: Vec<f64> = rules.candidates_s.iter().copied().filter(is_whole).collect();
    let past = Past {
        seconds: &ring.history(at, rules.history_s),
        interval: 1.0,
        few: false,
    };
    let washout_s = washout as f64 * ring.row_s;
    block_length::choose(
        0.0,
        past,
        block_length::Switch {
            washout: washout_s,
            standstill: rules.switch_s,
        },
        &candidates,
        parameters,
        rules.budget_s,
    )
    .ok()
}

fn shown(fresh: &Fresh, confidence: f64) -> Option<Shown> {
    fresh.interval(confidence).map(|i| Shown {
        gain: exp_m1(i.estimate),
        lower: exp_m1(i.lower),
        upper: exp_m1(i.upper),
    })
}

/// What watches an accepted change.
struct Watch<'a> {
    lengths: Lengths,
    rules: &'a Rules,
    /// Pairs that measure the gain.
    fresh_pairs: u32,
    /// Factor of the canary's speed, fixed at the end of the trial.
    factor: f64,
    fresh: Fresh,
    scar: Scar,
    probation: Probation,
    detector: Holdback,
    after: After,
    /// Sum of the differences.
    sum: f64,
}

impl<'a> Watch<'a> {
    fn new(trial: &Trial, control: &Control, lengths: Lengths, choice: &Choice, rules: &'a Rules) -> Self {
        let estimate = trial.estimate();
        let (factor, scale) = control.after(estimate.scale.max(choice.scale / 2.0));
        let spread = choice.spread.max(scale);
        Self {
            lengths,
            rules,
            fresh_pairs: rules
                .fresh_pairs
                .unwrap_or_else(|| fresh_pairs(spread, estimate.effect)),
            factor,
            fresh: Fresh::new(scale),
            scar: Scar::new(scale),
            probation: Probation::new(
                probation_pairs(rules.probation_pairs, spread, estimate.effect),
                spread,
            ),
            // The probation's own tests tell that a gain is gone.
            detector: Holdback::below(0.0, scale),
            after: After::new(Shown {
                gain: estimate.effect,
                lower: estimate.lower,
                upper: estimate.upper,
            }),
            sum: 0.0,
        }
    }

    /// The gain as it is known: by the trial, later by the pairs.
    fn gain(&self) -> f64 {
        if self.after.pairs < self.fresh_pairs {
            self.after.trial.gain
        } else {
            exp_m1(self.sum / f64::from(self.after.pairs.max(1)))
        }
    }

    /// Washout of a pair in rows.
    fn washout(&self, is_long: bool, row_s: f64) -> usize {
        let usual_s = self.lengths.washout as f64 * row_s;
        if is_long {
            (long_washout_s(usual_s) / row_s - 1e-6).ceil() as usize
        } else {
            self.lengths.washout
        }
    }

    /// Makes a pair, and says why the change must go.
    fn pair(&mut self, machine: &mut Machine<'_>, is_long: bool, random: &mut Random) -> Option<Revoked> {
        let washout = self.washout(is_long, machine.ring.row_s);
        let (score, canary) = machine.pair(washout, self.lengths.measured, random);
        let difference = score - self.factor * canary.unwrap_or(0.0);
        self.after.pairs += 1;
        self.sum += difference;
        self.fresh.observe(difference);
        let is_running = self.probation.state() == ProbationState::Running;
        let has_failed = self.probation.observe(difference) == ProbationState::Revoked;
        let has_alarm = self.detector.observe(difference);
        let scar = self.scar.observe(difference, is_long);
        if scar == ScarState::Clear && self.after.clear_pairs.is_none() {
            self.after.clear_pairs = Some(self.after.pairs);
        }
        if self.after.pairs == self.fresh_pairs {
            self.after.fresh = shown(&self.fresh, self.rules.confidence);
        }
        let told = self.after.fresh.filter(|_| self.after.pairs == self.fresh_pairs);
        if is_running && has_failed {
            let has_losses = self.probation.excess() >= 2;
            Some(if has_losses {
                Revoked::Losses
            } else {
                Revoked::Mean
            })
        } else if has_alarm {
            Some(Revoked::Detector)
        } else if scar == ScarState::Scar {
            Some(Revoked::Scar)
        } else if scar == ScarState::Open && self.after.pairs >= SCAR_PAIRS_MAX {
            Some(Revoked::Unproven)
        } else if told.is_some_and(|t| is_too_small(t.upper)) {
            Some(Revoked::Interval)
        } else {
            None
        }
    }

    fn has_passed(&self) -> bool {
        self.probation.state() == ProbationState::Passed && self.scar.state() == ScarState::Clear
    }
}

/// Fresh pairs at once, then the probation. The second figure is the lost work of the fresh pairs (seconds).
fn follow(machine: &mut Machine<'_>, mut watch: Watch<'_>, random: &mut Random) -> (After, f64) {
    let (accepted_s, lost_s, row_s) = (machine.seconds(), machine.lost_s, machine.ring.row_s);
    machine.switch(true);
    let lengths = watch.lengths;
    let block_s = |washout: usize| (washout + lengths.measured) as f64 * row_s;
    let off_s = block_s(lengths.washout);
    let stall_s = 2.0 * watch.rules.switch_s;
    let pairs = watch.fresh_pairs;
    let cheap = is_cheap(pairs, watch.gain(), off_s, stall_s, FRESH_EARNED_IN_S);
    let at_once = if cheap { pairs } else { 0 };
    let mut lost_fresh_s = 0.0;
    loop {
        let is_long = watch.after.pairs >= at_once;
        if is_long {
            let pair_s = 2.0 * block_s(watch.washout(true, row_s));
            machine.rest(probe_interval_s(pair_s, watch.gain(), stall_s));
        }
        watch.after.revoked = watch.pair(machine, is_long, random);
        if watch.after.pairs == pairs {
            lost_fresh_s = machine.lost_s - lost_s;
            watch.after.fresh_s = machine.seconds() - accepted_s;
        }
        if watch.after.revoked.is_some() || watch.has_passed() {
            break;
        }
    }
    if watch.after.revoked.is_none() {
        watch.after.pooled = shown(&watch.fresh, watch.rules.confidence);
        watch.after.pooled_s = machine.seconds() - accepted_s;
    }
    (watch.after, lost_fresh_s)
}

#[cfg(test)]
mod tests {
    use super::super::record::{Objective, Record};
    use super::*;

    fn flat() -> Ring {
        let text = "dt,work,cpu\n".to_owned() + &"0.25,100,0.25\n".repeat(1200);
        let path = std::env::temp_dir().join(format!("homeostat-proof-{}.csv", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let ring = Record::read(&path).unwrap().ring(Objective::Cpu);
        std::fs::remove_file(&path).unwrap();
        ring
    }

    #[test]
    fn a_gain_a_scar_and_a_slow_onset_are_what_they_should_be() {
        let ring = flat();
        let gain = Injected {
            gain: 0.15,
            ..Injected::default()
        };
        let mut machine = Machine::new(&ring, gain, 0);
        let (difference, _) = machine.pair(2, 4, &mut Random::new(1));
        assert!((difference - ln_1p(0.15)).abs() < 1e-12);
        // One block off: 1.5 s at 13 % less than with the change.
        assert!((machine.lost_s - 1.5 * (1.0 - 1.0 / 1.15)).abs() < 1e-9);
        let scar = Injected {
            scar: 0.02,
            scar_s: 1.0,
            ..Injected::default()
        };
        let mut machine = Machine::new(&ring, scar, 0);
        machine.switch(true);
        // Half of the measured second after half a second of washout is scarred.
        let (off, _) = machine.block(false, 2, 4);
        assert!((off - score((396.0, 1.0))).abs() < 1e-9, "{off}");
        let (off, _) = machine.block(false, 2, 4);
        assert_eq!(off, score((400.0, 1.0)), "no new undo, no scar");
        let slow = Injected {
            gain: 0.15,
            onset_s: 1.5,
            ..Injected::default()
        };
        let mut machine = Machine::new(&ring, slow, 0);
        let (on, _) = machine.block(true, 400, 4);
        assert!((on - score((460.0, 1.0))).abs() < 1e-9);
        let residue = machine.block(false, 2, 4).0 - score((400.0, 1.0));
        assert!((residue / ln_1p(0.15) - 0.523).abs() < 0.01, "{residue}");
    }
}
