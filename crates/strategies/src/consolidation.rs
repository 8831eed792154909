//! # consolidation
//!
//! ## What
//! Keeps a program that was placed (`cache_affinity`) on fewer of its last-level caches, once it is seen how it runs there:
//! a further, smaller step from what the last has shown, with a trial and a guard of its own. Its memory goes along in the
//! same change where that is worth it and the machine can do it.
//!
//! ## Why it helps
//! What a placement will need is known only when it is made. A program whose load is offered from outside runs fewer
//! threads once each is faster, so that fewer caches hold them; and the fewer they are, the more of the lines that its
//! threads share, and of its memory, are near to them.
//!
//! ## When it hurts
//! As [cache_affinity](cache_affinity.md): when the set is too small, threads wait for each other. The same limits hold
//! (threads per core, a hardware thread for each that runs), counted by how densely its threads run where they
//! are kept; but no head room is asked for, since there is a place to go back to. The trial compares with the placement before, and when the demand outgrows the smaller set, that goes and the
//! one before stays.
//!
//! ## Evidence
//! Where the threads are kept, how many of them run, where the memory lies, and event counters since the placement. Too
//! little predicted gain (`gain_min`) is not tried, and at most three such steps are made, each from what the one before has
//! shown. Gains were measured on the simulated machine only (docs/evidence.md).
//!
//! ## Undo
//! Each thread gets the mask back that the placement before gave it, and the undo of the first gives back what was found
//! before all. The smaller set lies over the other, so it always goes before it: at the end, in a recovery after a crash, and
//! whenever the other is probed.
//!
//! ## References
//! As cache_affinity. ASO placed a workload once (seed 000 §3.1); so does the profile `aso-classic`.

use crate::cache_affinity::{Ask, Step};
use homeostat_engine::Setting;

pub(crate) const ID: &str = "consolidation";

const GAIN_MIN: Setting = Setting {
    strategy: ID,
    name: "gain_min",
    default: 0.01,
    classic: 10.0,
    low: 0.0,
    high: 10.0,
    help: "predicted gain from which it is tried (0.01 = 1 %; classic: never, ASO placed a workload once)",
};

/// The strategy.
pub(crate) const CONSOLIDATION: Step = Step {
    id: ID,
    summary: "keeps a placed program on fewer of its last-level caches, once it is seen how it runs there",
    gain_min: &[GAIN_MIN],
    to: "fewer caches",
    ask: Ask::Fewer,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Scene, available, chips, machine};
    use homeostat_engine::{Opinion, Proposal, Seen, Strategy as _};
    use homeostat_model::action::Target;
    use homeostat_model::{Bytes, CpuId, LlcId, NodeId};

    fn cpus(proposal: &Proposal) -> usize {
        match &proposal.target {
            Target::Cpus(cpus) => cpus.len(),
            other => panic!("{other:?}"),
        }
    }

    /// The CPUs of the first so many of eight chips of eight cores with one thread each.
    fn first(chips: u32) -> Vec<CpuId> {
        (0..8 * chips).map(CpuId).collect()
    }

    /// A program that is kept on so many chips, with its memory spread over them, and exchanges many lines.
    fn kept(on: u32, running: f64) -> Scene {
        Scene::new(machine(&chips(8, 8), 1), running, 4.0).with(|s| {
            s.load.saturated = false;
            s.sample.threads = 60;
            let share = running / f64::from(on);
            let locality = s.locality();
            locality.threads = 60;
            locality.running = (0..on).map(|chip| (LlcId(8 * chip), share)).collect();
            locality.private = (0..on)
                .map(|node| (NodeId(node), Bytes::from_mib(1024)))
                .collect();
            s.counters().memory_stall_share = 0.4;
            s.counters().cache_to_cache_stall_share = 0.3;
            s.machine.capabilities.push(available("placement.threads.memory"));
            s.hold("cache_affinity", Target::Cpus(first(on)));
        })
    }

    #[test]
    fn a_program_that_runs_fewer_threads_where_it_is_kept_gets_fewer_caches() {
        let p = kept(4, 15.0).proposal(&CONSOLIDATION);
        assert_eq!(cpus(&p), 16, "{}", p.hypothesis);
        assert!(p.reversible && p.joint && p.effector.as_str() == "thread_placement");
        assert!(
            p.hypothesis.contains("4.0 of 8 last-level caches"),
            "{}",
            p.hypothesis
        );
        assert_eq!(p.arguments["memory"], "all");
        // ASO placed a workload once.
        let classic = kept(4, 15.0).classic().reason(&CONSOLIDATION);
        assert!(classic.contains("no benefit predicted"), "{classic}");
    }

    #[test]
    fn what_holds_it_only_if_the_prediction_comes_true_is_tried_and_what_would_not_is_not() {
        // 9 running threads on a chip of 8: only if each becomes a quarter faster and more.
        let p = kept(2, 9.0).proposal(&CONSOLIDATION);
        assert_eq!(cpus(&p), 8, "{}", p.hypothesis);
        // Nothing to gain from nearer lines and memory: no room either.
        let text = kept(2, 9.0)
            .with(|s| {
                s.counters().memory_stall_share = 0.05;
                s.counters().cache_to_cache_stall_share = 0.0;
            })
            .reason(&CONSOLIDATION);
        assert!(text.contains("no part of CPUs 0-15"), "{text}");
        // Without head room, since there is a place to go back to; but not more threads than hardware threads.
        let p = kept(4, 13.0).proposal(&CONSOLIDATION);
        assert_eq!(cpus(&p), 8, "{}", p.hypothesis);
        // An offered load never takes turns; without counters the price of sharing is not known.
        let text = kept(2, 15.0).reason(&CONSOLIDATION);
        assert!(text.contains("no part of CPUs 0-15"), "{text}");
        let text = kept(2, 9.0)
            .with(|s| s.locality().counters = None)
            .reason(&CONSOLIDATION);
        assert!(text.contains("no part of CPUs 0-15"), "{text}");
    }

    #[test]
    fn what_an_earlier_step_gave_is_no_prediction_of_the_next() {
        let calm = |s: &mut Scene| {
            s.counters().memory_stall_share = 0.0;
            s.counters().cache_to_cache_stall_share = 0.0;
        };
        let nothing = kept(4, 13.0).with(calm);
        let known = homeostat_model::Effect {
            estimate: 0.5,
            lower: 0.4,
            upper: 0.6,
            confidence: 0.95,
        };
        assert_eq!(
            nothing.ask(|seen| {
                CONSOLIDATION.consider(&Seen {
                    known: Some(known),
                    refused: &[],
                    ..*seen
                })
            }),
            nothing.opinion(&CONSOLIDATION)
        );
        assert!(nothing.reason(&CONSOLIDATION).contains("no benefit predicted"));
    }

    #[test]
    fn it_starts_from_a_placement_and_ends_after_three_steps_or_on_one_cache() {
        let free = kept(4, 15.0).with(|s| s.held.clear());
        assert!(free.reason(&CONSOLIDATION).contains("not kept anywhere"));
        let one = kept(1, 5.0).reason(&CONSOLIDATION);
        assert!(one.contains("one last-level cache"), "{one}");
        let all = kept(8, 15.0).reason(&CONSOLIDATION);
        assert!(all.contains("are all there are"), "{all}");
        let mut scene = kept(6, 15.0);
        for chips in [5, 4] {
            scene = scene.with(|s| s.hold(ID, Target::Cpus(first(chips))));
        }
        let p = scene.proposal(&CONSOLIDATION);
        assert_eq!(cpus(&p), 16, "of the four where it is now: {}", p.hypothesis);
        let done = scene.with(|s| s.hold(ID, Target::Cpus(first(3))));
        let text = done.reason(&CONSOLIDATION);
        assert!(text.contains("3 times") && text.contains("0-23"), "{text}");
    }

    #[test]
    fn places_are_asked_for_and_a_person_s_choice_is_honoured() {
        let blind = kept(4, 13.0).with(|s| s.locality = None);
        assert_eq!(blind.opinion(&CONSOLIDATION), Opinion::InspectLocality);
        let bound = kept(4, 13.0).with(|s| s.locality().bound = Some("taskset -c 0-7".into()));
        assert!(bound.reason(&CONSOLIDATION).contains("taskset -c 0-7"));
        assert!(bound.unwanted(&CONSOLIDATION).is_some());
    }
}
