//! Experiments, their blocks and their verdicts, as history and people see them.

use crate::action::ActionId;
use crate::meter::MeterId;
use crate::units::{Bytes, Nanoseconds};
use crate::workload::{Fingerprint, WorkloadId};
use crate::{text_id, words};
use serde::{Deserialize, Deserializer, Serialize};

text_id!(
    /// Name of a strategy, e.g. `large_pages`; stable forever, histories refer to it.
    StrategyId
);

/// Number of an experiment on this machine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExperimentId(pub u64);
impl std::fmt::Display for ExperimentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

words!(
    /// What kind of trial.
    ExperimentKind {
        /// Randomised on/off blocks.
        Switchback = "switchback",
        /// Stages with randomised onset, for changes that cannot be switched back cheaply.
        StagedRollout = "staged_rollout",
        /// A switchback whose treatment does nothing: measures our own false accepts.
        Placebo = "placebo",
    }
);

words!(
    /// How an experiment ended.
    Verdict {
        /// A gain was proven; the change stays.
        Accepted = "accepted",
        /// No useful gain; undone.
        Rejected = "rejected",
        /// A loss was seen; undone and remembered.
        Harmful = "harmful",
        /// Neither could be shown within the budget; undone.
        Inconclusive = "inconclusive",
        /// Stopped for a reason that says nothing about the effect (workload ended, operator, no measurement).
        Aborted = "aborted",
    }
);

/// An estimated relative change of the objective with its interval; 0.05 = +5 %. That of a trial is time-uniform, that of fresh
/// pairs exact. Others (members, spans, meanings, rollouts) hold at one check.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Best estimate.
    #[serde(with = "crate::units::any_number")]
    pub estimate: f64,
    /// Lower end.
    #[serde(with = "crate::units::any_number")]
    pub lower: f64,
    /// Upper end.
    #[serde(with = "crate::units::any_number")]
    pub upper: f64,
    /// Confidence of the interval, e.g. 0.90.
    pub confidence: f64,
}
impl std::fmt::Display for Effect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&effect_in_words(
            Some(self.estimate),
            Some(self.lower),
            Some(self.upper),
        ))
    }
}

/// A relative change as people read it: its interval first, as in `+2.0 to +18.4 %`, `at least +170.8 %`; the estimate alone while
/// no end is known. `None` is an end that is not known; nor is one that lies so far out that it only says so, beyond −99 % or a
/// tenfold gain.
pub fn effect_in_words(estimate: Option<f64>, lower: Option<f64>, upper: Option<f64>) -> String {
    let known = |x: Option<f64>, most: f64| x.filter(|x| x.is_finite() && *x > -0.99 && *x < most);
    let number = |x: f64| {
        if x < 10.0 {
            format!("{:+.1}", x * 100.0)
        } else {
            format!("{:+.0}", x * 100.0)
        }
    };
    let (lower, upper) = (known(lower, 10.0), known(upper, 10.0));
    let estimate = known(estimate, 1000.0);
    let interval = match (lower, upper) {
        (None, None) => None,
        (Some(lower), None) => Some(format!("at least {} %", number(lower))),
        (None, Some(upper)) => Some(format!("at most {} %", number(upper))),
        (Some(lower), Some(upper)) => Some(format!("{} to {} %", number(lower), number(upper))),
    };
    match (interval, estimate) {
        (Some(interval), _) => interval,
        (None, Some(x)) => format!("{} % (no interval yet)", number(x)),
        (None, None) => "a change that is not known yet".to_owned(),
    }
}

/// One block of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockRecord {
    /// Position, from 0.
    pub index: u32,
    /// Whether the change was on.
    pub on: bool,
    /// Start of the measured part (since boot): of the first sample in it, up to a second after the washout is over.
    pub measured_from: Nanoseconds,
    /// Length of the measured part.
    pub measured: Nanoseconds,
    /// Work in the measured part.
    #[serde(with = "crate::units::any_number")]
    pub work: f64,
    /// CPU time in the measured part.
    pub cpu: Nanoseconds,
    /// Natural logarithm of the objective, oriented so that more is better.
    #[serde(with = "crate::units::any_number")]
    pub score: f64,
    /// True when the circuit breaker ended it.
    pub broken: bool,
}

/// What a trial of several workloads showed of one of them by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberOutcome {
    /// Which.
    pub workload: WorkloadId,
    /// What is remembered of it: the verdict of the whole, or [`Verdict::Aborted`] when nothing is held against it and it
    /// is tried again.
    pub verdict: Verdict,
    /// Its own effect; `None` with too few blocks. Student's interval, 90 % at one check: the verdict does not rest on it.
    pub effect: Option<Effect>,
}

/// How long a share of the spans was with the change and without.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpanChange {
    /// With it (seconds): the geometric mean over the blocks.
    #[serde(with = "crate::units::any_number")]
    pub on_s: f64,
    /// Without (seconds).
    #[serde(with = "crate::units::any_number")]
    pub off_s: f64,
    /// Standard deviation between the blocks that were off, as a share.
    #[serde(with = "crate::units::any_number")]
    pub noise: f64,
    /// By how much longer they were with it (0.2 = a fifth), with Student's interval, 90 % at one check.
    pub longer: Effect,
    /// The same for each unit of work that was done in them.
    pub longer_for_its_work: Effect,
}

/// What was seen in a trial of a workload's spans: the times from the moment at which its threads begin to run after a wait
/// to their next wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpansAccount {
    /// Whose.
    pub workload: WorkloadId,
    /// Why they could not be judged, or not to the end; `None` where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unseen: Option<String>,
    /// Blocks with the change in which they were measured.
    pub blocks_on: u32,
    /// Blocks without.
    pub blocks_off: u32,
    /// Half of them are shorter; `None` with too few blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median: Option<SpanChange>,
    /// 99 of 100 are shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<SpanChange>,
}

impl std::fmt::Display for SpansAccount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let part = |c: &SpanChange| {
            format!(
                "{} with it and {} without ({}; noise {:.1} %)",
                time_in_words(c.on_s),
                time_in_words(c.off_s),
                c.longer,
                c.noise * 100.0
            )
        };
        match (&self.median, &self.p99) {
            (Some(median), Some(p99)) => write!(
                f,
                "spans from wait to wait over {} blocks: half of them up to {}, 99 of 100 up to {}",
                self.blocks_on + self.blocks_off,
                part(median),
                part(p99)
            )?,
            _ => write!(f, "its response was not watched")?,
        }
        match &self.unseen {
            Some(why) => write!(f, "; {why}"),
            None => Ok(()),
        }
    }
}

/// What the watch over the meaning of a meter of kernel work saw in a trial: how many of what judged there were for each of the kind by
/// whose constant ratio it had qualified.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeaningAccount {
    /// Whose.
    pub workload: WorkloadId,
    /// The kind that judged.
    pub judge: MeterId,
    /// The kind that was read beside it, or was to be.
    pub beside: MeterId,
    /// Why the two could not be compared, or not to the end; `None` where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwatched: Option<String>,
    /// Blocks with the change in which both were read.
    pub blocks_on: u32,
    /// Blocks without.
    pub blocks_off: u32,
    /// By how much the ratio was another with the change than without, with Student's interval, 90 % at one check. `None` with
    /// too few blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Effect>,
    /// The same of the last blocks of both arms against those before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<Effect>,
    /// Slots of a rollout in which both were read; the blocks are those of its round trips.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slots: u32,
    /// By how much the ratio moves with the share that is in force in these, for the whole change; `None` with too few of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staged: Option<Effect>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl std::fmt::Display for MeaningAccount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.change.is_none() && self.staged.is_none() {
            write!(f, "whether {} keeps its meaning was not watched", self.judge)?;
            return self.unwatched.iter().try_for_each(|why| write!(f, ": {why}"));
        }
        write!(f, "{} for each of {}, over ", self.judge, self.beside)?;
        if let Some(staged) = &self.staged {
            write!(
                f,
                "{} slots of the rollout: {staged} by all of the change",
                self.slots
            )?;
        }
        if let Some(change) = &self.change {
            let (before, what) = match self.staged {
                Some(_) => ("; over ", "the part that was switched"),
                None => ("", "the change"),
            };
            let blocks = self.blocks_on + self.blocks_off;
            write!(f, "{before}{blocks} blocks: {change} with {what}")?;
            match &self.drift {
                Some(drift) => write!(f, "; {drift} in the last blocks against those before")?,
                None => write!(f, "; too few blocks to say anything of it over time")?,
            }
        }
        self.unwatched.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

/// A short time as people read it.
pub fn time_in_words(seconds: f64) -> String {
    if seconds >= 1.0 {
        format!("{seconds:.2} s")
    } else if seconds >= 1e-3 {
        format!("{:.2} ms", seconds * 1e3)
    } else {
        format!("{:.1} µs", seconds * 1e6)
    }
}

/// A gain as pairs of blocks show it that were made after the acceptance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FreshGain {
    /// Their mean, with an interval that is exact whatever the noise.
    pub effect: Effect,
    /// How many.
    pub pairs: u32,
}

/// An experiment as it is remembered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExperimentRecord {
    /// Number.
    pub id: ExperimentId,
    /// Kind of trial.
    pub kind: ExperimentKind,
    /// Strategy.
    pub strategy: StrategyId,
    /// Workload at the time; of several that were tried as one change the first.
    pub workload: WorkloadId,
    /// Its identity across restarts.
    pub fingerprint: Fingerprint,
    /// The other workloads of a trial in which several were tried as one change, with their identities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<(WorkloadId, Fingerprint)>,
    /// What such a trial showed of each of them, the first and then the others; empty while it runs, and of a trial of one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberOutcome>,
    /// What was seen of the spans of those that were tried; empty while it runs, and where nobody could look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<SpansAccount>,
    /// Whether meters of kernel work by which it was judged kept their meaning; empty while it runs, and where it was judged by others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub meanings: Vec<MeaningAccount>,
    /// The identity of the reader that was contained, if that was the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reader: Option<Fingerprint>,
    /// Machine fingerprint.
    pub machine: String,
    /// The change tried.
    pub action: ActionId,
    /// What was changed and why, in a sentence with numbers.
    pub hypothesis: String,
    /// Gain predicted beforehand.
    pub predicted: Effect,
    /// Meter that judged.
    pub meter: MeterId,
    /// Objective in words: `work per second` or `work per CPU second`.
    pub objective: String,
    /// Seed of the coins.
    pub seed: u64,
    /// Level at which this try was tested (after false-discovery control).
    pub alpha: f64,
    /// Washout and measured part of a block.
    pub washout: Nanoseconds,
    /// Measured part of a block.
    pub measured: Nanoseconds,
    /// Start and end in seconds since the epoch.
    pub started_unix: u64,
    /// End.
    pub ended_unix: u64,
    /// Verdict; `None` while it runs.
    pub verdict: Option<Verdict>,
    /// Why, in a sentence.
    pub reason: String,
    /// Estimate.
    pub effect: Option<Effect>,
    /// What pairs of blocks after the acceptance show: a trial stops when it looks best, and they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fresh: Option<FreshGain>,
    /// The level without the change against the level before the trial; `None` while it runs, and where the two do not compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub off_level: Option<OffLevel>,
    /// Losses that an accepted trial does not exclude, the largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_excluded: Vec<NotExcluded>,
    /// Time constant with which the effect set in, as it was measured or else as it was told; `None` in what earlier versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settling: Option<Nanoseconds>,
    /// Evidence for a gain (e-value).
    #[serde(with = "crate::units::any_number")]
    pub evidence: f64,
    /// Time the workload stood still for our changes.
    pub stalled: Nanoseconds,
    /// Memory added while on.
    pub bloat: Bytes,
    /// Harm exposure in percent × seconds: loss during the parts of the trial that were worse than off.
    #[serde(with = "crate::units::any_number")]
    pub harm_exposure: f64,
    /// The blocks.
    pub blocks: Vec<BlockRecord>,
}

impl ExperimentRecord {
    /// What is known of the effect: what was measured after the acceptance, else what the trial showed.
    pub fn known_effect(&self) -> Option<Effect> {
        self.fresh.map(|fresh| fresh.effect).or(self.effect)
    }
}

/// An observation window to remember: means over a minute or so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowRecord {
    /// Whose.
    pub workload: WorkloadId,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Length.
    pub length: Nanoseconds,
    /// Samples in it.
    pub samples: u32,
    /// The meter that counted; `None` when none was open.
    pub meter: Option<MeterId>,
    /// Work by that meter; NaN without one.
    pub work: f64,
    /// Coefficient of variation of work per second between samples; NaN with fewer than two, and where it is not known.
    #[serde(deserialize_with = "number_or_nan")]
    pub variation: f64,
    /// CPU time used.
    pub cpu: Nanoseconds,
    /// Time its threads waited for a CPU.
    pub runqueue_wait: Nanoseconds,
    /// Minor page faults.
    pub faults_minor: u64,
    /// Major page faults.
    pub faults_major: u64,
    /// Resident memory at the end.
    pub resident: Bytes,
    /// Of which anonymous.
    pub anonymous: Bytes,
    /// Of which shared.
    pub shared: Bytes,
    /// Of which mapped by large pages, when known.
    pub huge: Option<Bytes>,
}

/// What is not a number is written as null by formats that have no word for it.
fn number_or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// A reader that was proven to take the memory of a program: the last trial of the two accepted its containment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProvenReader {
    /// The program's identity.
    pub program: Fingerprint,
    /// The reader's.
    pub reader: Fingerprint,
    /// Strategy.
    pub strategy: StrategyId,
    /// What the program gained.
    pub effect: Effect,
    /// How long it took to come back.
    pub washout: Nanoseconds,
    /// Trials that accepted it.
    pub trials: u32,
}

/// Something a person could do and homeostat may not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// Stable id: strategy, topic and workload, e.g. `large_pages/shared-memory-alignment/postgresql`.
    pub id: String,
    /// For which workload; `None` = the host.
    pub workload: Option<WorkloadId>,
    /// What was found, with numbers.
    pub finding: String,
    /// What to do, step by step.
    pub remedy: String,
    /// What it costs or risks.
    pub risk: String,
    /// The setting of the kernel that does it, where one does: whoever accepts the advice can have it set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setting: Option<AdvisedSetting>,
}

/// A value that a person could give a setting of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdvisedSetting {
    /// File of the setting below `/proc/sys` or `/sys`.
    pub path: String,
    /// The value.
    pub value: String,
}

/// The level of a trial's blocks without the change, against the level before the trial. An undo that slows the program down
/// (a scar) lowers it, and so does a fall of the load: it decides nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OffLevel {
    /// How far the mean of these blocks lies above the median before the trial, as a share.
    pub change: f64,
    /// Lower end of the usual range of `change`, by the noise before the trial.
    pub usual_lower: f64,
    /// Upper end.
    pub usual_upper: f64,
    /// Confidence of that range.
    pub confidence: f64,
    /// Blocks without the change.
    pub blocks: u32,
    /// Spans before the trial, each as long as a block.
    pub spans_before: u32,
    /// Whether the fall is unusual, and the gain does not clearly make up for it.
    pub may_be_a_scar: bool,
}
impl std::fmt::Display for OffLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let side = if self.change < 0.0 { "below" } else { "above" };
        write!(
            f,
            "Without the change, in the trial: {:.1} % {side} the level before the trial (usual range {:+.1} to {:+.1} %)",
            self.change.abs() * 100.0,
            self.usual_lower * 100.0,
            self.usual_upper * 100.0
        )?;
        if self.may_be_a_scar {
            f.write_str(
                ". The undo may leave a scar: this fall is unusual, and with the change the program does not clearly do \
                 more than before the trial",
            )?;
        }
        Ok(())
    }
}

words!(
    /// What a loss is counted in.
    LossIn {
        /// Work per second.
        WorkPerSecond = "work per second",
        /// Work per CPU second.
        WorkPerCpuSecond = "work per CPU second",
        /// The longest of 99 in 100 spans from wait to wait, which get longer.
        Spans = "spans from wait to wait",
    }
);

/// A loss that a trial does not exclude: it shows that no loss is proven, which is not the same as none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NotExcluded {
    /// Whose.
    pub workload: WorkloadId,
    /// In what.
    pub what: LossIn,
    /// The largest that is not excluded, as a share.
    pub most: f64,
    /// Confidence with which a larger one is excluded (one-sided).
    pub confidence: f64,
}
impl std::fmt::Display for NotExcluded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (who, what, percent) = (&self.workload, self.what, self.most * 100.0);
        match what {
            LossIn::Spans => write!(
                f,
                "{who}: 99 of 100 of its {what} take up to {percent:.0} % longer"
            ),
            _ => write!(f, "{who} loses up to {percent:.1} % {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_is_not_known_is_told_in_words() {
        let words = |estimate: f64, lower: f64, upper: f64| {
            Effect {
                estimate,
                lower,
                upper,
                confidence: 0.9,
            }
            .to_string()
        };
        let far = f64::INFINITY;
        assert_eq!(words(0.099, 0.02, 0.184), "+2.0 to +18.4 %");
        assert_eq!(words(-0.05, -0.08, -0.02), "-8.0 to -2.0 %");
        assert_eq!(words(40.0, 1.708, far), "at least +170.8 %");
        assert_eq!(words(40.0, 1.708, 1e9), "at least +170.8 %");
        assert_eq!(words(1e7, 1.708, far), "at least +170.8 %");
        assert_eq!(words(f64::NAN, 1.708, far), "at least +170.8 %");
        assert_eq!(words(-0.5, -1.0, -0.1), "at most -10.0 %");
        assert_eq!(words(f64::NAN, -1.0, -0.1), "at most -10.0 %");
        assert_eq!(words(f64::NAN, 0.01, 0.02), "+1.0 to +2.0 %");
        assert_eq!(words(0.011, -1.0, far), "+1.1 % (no interval yet)");
        assert_eq!(words(f64::NAN, -1.0, far), "a change that is not known yet");
        assert_eq!(effect_in_words(None, Some(0.5), None), "at least +50.0 %");
    }
}
