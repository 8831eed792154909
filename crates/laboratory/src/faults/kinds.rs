//! The kinds of faults, and which of them a life has.

use homeostat_statistics::simulation::Random;
use serde::Serialize;
use std::collections::BTreeMap;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident,)*) => {
        /// One kind of fault. Rate: probability per call replaced, or number per simulated hour ([`Kind::per_call`]).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
        }

        impl Kind {
            /// All kinds, in order.
            pub const ALL: &[Self] = &[$(Self::$kind),*];
        }
    };
}

kinds! {
    // -- sensing, per call
    /// A sample fails.
    SampleLost,
    /// A sample is the one before it again, with its times.
    StaleSample,
    /// Values that cannot be: NaN, negative, huge, zero or endless intervals.
    GarbageValues,
    /// A counter wrapped: a difference of almost 2^64.
    CounterWrap,
    /// The same workload twice in a list, or a sample of one that does not exist.
    DuplicateWorkloads,
    /// A workload is missing in a scan although it runs.
    WorkloadMissed,
    /// Time stands still between two samples.
    TimeStandsStill,
    /// The meters are silent.
    MetersSilent,
    /// Meters cannot be searched or opened.
    MeterRefused,
    /// Memory or places cannot be inspected.
    InspectionRefused,
    /// An inspection returns values that cannot be.
    InspectionGarbage,
    // -- acting, per call
    /// `EPERM`.
    Denied,
    /// `EBUSY`.
    Busy,
    /// `ESRCH` although the process lives. Only for a change: no kernel tells this lie about an undo.
    Vanished,
    /// `ENOMEM`.
    NoMemory,
    /// The kernel does not know the call (any more).
    Unsupported,
    /// A part is done, the rest is reported as skipped.
    Partial,
    /// An effector that asks for a pause without end.
    EndlessPause,
    /// A slice that takes seconds.
    SlowSlice,
    /// An effector that never gets done, however often it is called.
    NeverDone,
    // -- per hour
    /// No sample for minutes to hours.
    SensorOutage,
    /// Every effector refuses for minutes.
    EffectorOutage,
    /// The wall clock jumps, forward or back; the monotonic clock does not.
    WallClockJump,
    /// The machine sleeps: a long gap in the monotonic clock.
    LongGap,
    /// The disk is full for some steps of the journal.
    DiskFull,
    /// The disk fails at some step of the journal.
    DiskError,
    /// The history on disk is damaged while the daemon is down.
    HistoryDamaged,
    /// The daemon is killed between two calls of sensors or effectors.
    CrashAtCall,
    /// The daemon is killed at a step of the journal.
    CrashAtJournal,
    /// At a crash the tail of the journal that was not synced is torn.
    TornTail,
    /// An orderly stop and start.
    Restart,
    /// An operator pauses, and resumes some time later.
    Pause,
    /// An operator undoes one change.
    Undo,
    /// An operator undoes everything.
    UndoAll,
    /// New settings.
    Reconfigure,
    /// A person changes a setting that homeostat may have changed.
    PersonChanges,
    /// Another tuner changes settings again and again.
    OtherTuner,
    /// CPUs go offline and come back.
    CpuOffline,
    /// A memory node goes offline and comes back.
    NodeOffline,
    /// A program ends for good.
    ProgramEnds,
    /// A program ends and starts again.
    ProgramRestarts,
    /// A program forks.
    ProgramForks,
    /// A program does something else from now on.
    PhaseChange,
}

impl Kind {
    /// Whether its rate is a probability per call (0..1); else it is a number per simulated hour.
    pub fn per_call(self) -> bool {
        self < Self::SensorOutage
    }

    /// Lowest and highest rate, drawn log-uniformly.
    fn range(self) -> (f64, f64) {
        match self {
            Self::NeverDone | Self::EndlessPause => (0.0005, 0.02),
            Self::WorkloadMissed | Self::StaleSample | Self::TimeStandsStill => (0.0002, 0.05),
            _ if self.per_call() => (0.0002, 0.1),
            // The share of crashes that tear the tail.
            Self::TornTail => (0.2, 1.0),
            Self::HistoryDamaged => (0.05, 0.5),
            Self::SensorOutage | Self::EffectorOutage | Self::NodeOffline | Self::ProgramEnds => (0.02, 0.5),
            _ => (0.05, 3.0),
        }
    }

    /// Whether it happens at a random time, by the hand of the campaign.
    pub fn is_event(self) -> bool {
        !self.per_call() && !matches!(self, Self::TornTail | Self::HistoryDamaged)
    }
}

/// The faults with their rates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// Seed of all draws of faults, apart from that of the machine.
    pub seed: u64,
    /// Rate by kind: a probability per call, or a number per simulated hour.
    pub rates: BTreeMap<Kind, f64>,
}

impl FaultPlan {
    /// The swarm of a seed: half of the kinds (one kind alone in one seed of eight), with log-uniform rates.
    pub fn swarm(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x5357_4152_4d00_0000);
        let alone = (random.next_u64() % 8 == 0).then(|| pick(&mut random, Kind::ALL));
        let mut rates = BTreeMap::new();
        for kind in Kind::ALL {
            let kind = *kind;
            let (coin, place) = (random.coin(), random.uniform());
            let enabled = match alone {
                Some(Some(one)) => *one == kind,
                _ => coin,
            };
            if enabled {
                let (low, high) = kind.range();
                let (low, high) = (low.log2(), high.log2());
                rates.insert(kind, (low + (high - low) * place).exp2());
            }
        }
        Self { seed, rates }
    }

    /// The rate of a kind; zero when it is not enabled.
    pub fn rate(&self, kind: Kind) -> f64 {
        self.rates.get(&kind).copied().unwrap_or(0.0)
    }
}

pub(crate) fn pick<'a, T>(random: &mut Random, list: &'a [T]) -> Option<&'a T> {
    let n = list.len() as u64;
    (n > 0)
        .then(|| (random.next_u64() % n) as usize)
        .and_then(|i| list.get(i))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_43_kinds() {
        assert_eq!(Kind::ALL.len(), 43);
    }

    #[test]
    fn swarms_differ_and_are_valid() {
        let plans: Vec<FaultPlan> = (0..200).map(FaultPlan::swarm).collect();
        for plan in &plans {
            for (kind, rate) in &plan.rates {
                assert!(
                    *rate > 0.0 && *rate <= if kind.per_call() { 1.0 } else { 3600.0 },
                    "{kind:?}"
                );
            }
            assert_eq!(*plan, FaultPlan::swarm(plan.seed));
        }
        for kind in Kind::ALL {
            let n = plans.iter().filter(|p| p.rate(*kind) > 0.0).count();
            assert!((40..160).contains(&n), "{kind:?} in {n} of 200");
        }
        assert!(plans.iter().any(|p| p.rates.len() == 1));
    }
}
