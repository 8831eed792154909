//! # relocation
//!
//! ## What
//! Brings a program that was placed (`cache_affinity`) to other last-level caches, or to more of them, once it is seen how it
//! runs where it is: when caches have become free since, or when it turned out that too many of its threads share cores. Its
//! memory goes along in the same change where that is worth it and the machine can do it. To fewer of its own caches it is
//! brought by `consolidation`.
//!
//! ## Why it helps
//! A first place is chosen by a prediction from how a program runs all over the machine, while others run everywhere too. It is
//! kept because it is proven to be better than none, not because it is the best. When the neighbours have places of their own,
//! whole caches may be free; and a program whose threads share cores beside their memory may gain more from a core each.
//!
//! ## When it hurts
//! As [cache_affinity](cache_affinity.md). What is predicted is not sure, so more of it is asked for (`gain_min`), and the trial
//! compares with the placement before.
//!
//! ## Evidence
//! Where the threads are kept, how many of them run and share cores there, where the memory lies, which caches others use, and
//! event counters since the placement; without counters the price of sharing cores is not known, and no place is left for that
//! reason. At most three such steps are in force at a time. Gains were measured on the simulated machine only (docs/evidence.md).
//!
//! ## Undo
//! As consolidation: each thread gets the mask back that the placement before gave it, and memory goes back to where it was.
//! The later place lies over the other, so it always goes before it.
//!
//! ## References
//! As cache_affinity. ASO placed a workload once (seed 000 §3.1); so does the profile `aso-classic`.

use crate::cache_affinity::{Ask, Step};
use homeostat_engine::Setting;

pub(crate) const ID: &str = "relocation";

const GAIN_MIN: Setting = Setting {
    strategy: ID,
    name: "gain_min",
    default: 0.05,
    classic: 10.0,
    low: 0.0,
    high: 10.0,
    help: "predicted gain from which it is tried (0.05 = 5 %; classic: never, ASO placed a workload once)",
};

/// The strategy.
pub(crate) const RELOCATION: Step = Step {
    id: ID,
    summary: "brings a placed program to other or more last-level caches, once it is seen how it runs there",
    gain_min: &[GAIN_MIN],
    to: "other caches",
    ask: Ask::Elsewhere,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Scene, available, chips, machine};
    use homeostat_engine::{Opinion, RefusedPlace};
    use homeostat_model::action::Target;
    use homeostat_model::{Bytes, CpuId, LlcId, NodeId, Verdict};

    const CHIP: u32 = 32;

    fn cpus(opinion: &Opinion) -> Vec<u32> {
        match opinion {
            Opinion::Propose(p) => match &p.target {
                Target::Cpus(cpus) => cpus.iter().map(|c| c.0).collect(),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    /// A program of 24 threads that are always busy, on the first of eight chips of eight cores with four threads each, with its
    /// memory beside it.
    fn crowded() -> Scene {
        Scene::new(machine(&chips(8, 8), 4), 24.0, 4.0).with(|s| {
            s.load.saturated = true;
            s.sample.threads = 24;
            let locality = s.locality();
            locality.threads = 24;
            locality.running = std::iter::once((LlcId(0), 24.0)).collect();
            locality.private = std::iter::once((NodeId(0), Bytes::from_mib(4096))).collect();
            s.counters().memory_stall_share = 0.1;
            s.counters().cache_to_cache_stall_share = 0.05;
            s.counters().local_share = 1.0;
            s.machine.capabilities.push(available("placement.threads.memory"));
            s.hold("cache_affinity", Target::Cpus((0..CHIP).map(CpuId).collect()));
        })
    }

    #[test]
    fn threads_that_share_cores_where_they_are_kept_go_to_more_caches_that_are_free() {
        let opinion = crowded().opinion(&RELOCATION);
        let wider = cpus(&opinion);
        assert!(wider.len() >= 3 * CHIP as usize, "a core each: {wider:?}");
        let Opinion::Propose(p) = opinion else { return };
        assert!(p.reversible && p.joint && p.effector.as_str() == "thread_placement");
        assert!(p.predicted.estimate >= 0.05, "{}", p.hypothesis);
        // Where others are placed on the rest, there is nothing to gain.
        let full = crowded().with(|s| {
            for chip in 1..8 {
                s.neighbour(24.0, Some(chip));
            }
        });
        assert!(matches!(full.opinion(&RELOCATION), Opinion::Decline(_)));
    }

    #[test]
    fn a_place_just_like_its_own_is_no_gain_beside_neighbours_that_run_everywhere() {
        // One thread a core: nothing to be relieved of.
        let opinion = crowded()
            .with(|s| {
                s.sample.threads = 5;
                s.load.saturated = false;
                let locality = s.locality();
                locality.threads = 8;
                locality.running = std::iter::once((LlcId(0), 4.8)).collect();
                s.neighbour(20.0, None);
            })
            .opinion(&RELOCATION);
        assert!(matches!(opinion, Opinion::Decline(_)), "{opinion:?}");
    }

    #[test]
    fn nobody_leaves_a_place_without_counters_in_the_classic_profile_or_without_one() {
        let blind = crowded().with(|s| s.locality().counters = None);
        assert!(matches!(blind.opinion(&RELOCATION), Opinion::Decline(_)));
        let classic = crowded().classic().reason(&RELOCATION);
        assert!(classic.contains("no benefit predicted"), "{classic}");
        let free = crowded().with(|s| s.held.clear()).reason(&RELOCATION);
        assert!(free.contains("not kept anywhere"), "{free}");
        let everywhere = crowded().with(|s| {
            s.held.clear();
            s.hold("cache_affinity", Target::Cpus((0..8 * CHIP).map(CpuId).collect()));
        });
        let text = everywhere.reason(&RELOCATION);
        assert!(text.contains("are all there are"), "{text}");
        let often = crowded().with(|s| {
            for _ in 0..3 {
                s.hold(ID, Target::Cpus((0..CHIP).map(CpuId).collect()));
            }
        });
        assert!(often.reason(&RELOCATION).contains("3 times"));
    }

    #[test]
    fn a_place_that_was_refused_is_not_asked_for_again() {
        let first = cpus(&crowded().opinion(&RELOCATION));
        let again = crowded().with(|s| {
            s.refused.push(RefusedPlace {
                cpus: first.iter().map(|c| CpuId(*c)).collect(),
                with_memory: true,
                verdict: Verdict::Harmful,
                for_a_neighbour: false,
            });
        });
        if let opinion @ Opinion::Propose(_) = again.opinion(&RELOCATION) {
            assert_ne!(cpus(&opinion).len(), first.len());
        }
    }
}
