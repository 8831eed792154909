//! All kinds of meters of this machine.

use homeostat_meters::{MeterKind, MeterSettings};

/// All of them, those closest to the work first.
pub fn kinds(settings: &MeterSettings) -> Vec<Box<dyn MeterKind>> {
    let mut all = homeostat_meters::published(settings);
    all.push(homeostat_probes::by_functions(settings));
    all.extend(homeostat_meters::by_kernel());
    all.push(homeostat_probes::by_points(settings));
    all.push(homeostat_meters::by_processor());
    all.push(homeostat_probes::unclaimed(settings));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::Root;
    use homeostat_meters::testing::{own, workload};
    use homeostat_meters::{ConfiguredMeter, PointsWish};
    use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
    use homeostat_platform::PlatformError;
    use homeostat_probes::{KnownPoint, NO_BREAKPOINTS, Place, known_points};

    #[test]
    fn every_candidate_has_an_id_of_its_own_and_every_refusal_a_reason() {
        let root = Root::default();
        let mut ids = std::collections::BTreeSet::new();
        for kind in &mut kinds(&MeterSettings::default()) {
            for candidate in kind.find(&root, &own()) {
                assert!(ids.insert(candidate.id.clone()), "{} twice", candidate.id);
                assert!(!candidate.unit.is_empty());
                if let Some(why) = candidate.refused {
                    assert!(why.len() > 20, "{}: {why}", candidate.id);
                }
            }
        }
        assert!(ids.len() > 8);
    }

    #[test]
    fn nothing_is_counted_through_breakpoints_where_nobody_wants_any() {
        let root = Root::default();
        // This program is none that is known, so something of it is asked for by name.
        let named = "uprobe:own:main";
        let settings = |breakpoints| MeterSettings {
            breakpoints,
            progress_points: PointsWish::Always,
            configured: [("own".to_owned(), vec![ConfiguredMeter::from(named)])].into(),
            ..MeterSettings::default()
        };
        let is_by_breakpoints =
            |c: &MeterCandidate| matches!(c.class, MeterClass::Probe | MeterClass::Points);
        let mut ids = Vec::new();
        for kind in &mut kinds(&settings(false)) {
            for candidate in kind.find(&root, &own()).into_iter().filter(is_by_breakpoints) {
                assert!(candidate.refused.is_some(), "{}", candidate.id);
                ids.push(candidate.id);
            }
        }
        assert!(ids.iter().any(|id| id.as_str() == "points"), "{ids:?}");
        assert!(ids.iter().any(|id| id.as_str().starts_with("uprobe:")), "{ids:?}");
        // Nor for whoever asks for one by its name.
        for id in &ids {
            let refusals: Vec<String> = kinds(&settings(false))
                .iter_mut()
                .map(|kind| kind.open(&root, &own(), id).err().unwrap().to_string())
                .collect();
            assert!(
                refusals.iter().any(|why| why.contains(NO_BREAKPOINTS)),
                "{refusals:?}"
            );
        }
        // What is refused otherwise has another reason.
        let others = kinds(&settings(true));
        for candidate in others.into_iter().flat_map(|mut kind| kind.find(&root, &own())) {
            assert_ne!(candidate.refused.as_deref(), Some(NO_BREAKPOINTS));
        }
    }

    #[test]
    fn a_count_is_what_a_person_says_it_is_and_else_what_is_known_of_it() {
        let function = |p: &&KnownPoint| matches!(p.place, Place::Function("readQueryFromClient"));
        let known = known_points().iter().find(function).unwrap().unit;
        let gone = workload(
            "redis-server",
            vec![ProcessId {
                pid: i32::MAX,
                start_ticks: 1,
            }],
        );
        for (meter, unsaid) in [
            ("uprobe:redis-server:readQueryFromClient", known),
            ("uprobe:redis-server:other", "hit"),
            ("usdt:redis-server:redis:other", "hit"),
            ("prometheus:http://127.0.0.1:1/metrics#orders_total", "count"),
            ("of no kind", "count"),
        ] {
            for said in [None, Some("order")] {
                let named = ConfiguredMeter {
                    meter: meter.to_owned(),
                    unit: said.map(str::to_owned),
                };
                let settings = MeterSettings {
                    configured: [("redis*".to_owned(), vec![named])].into(),
                    ..MeterSettings::default()
                };
                let units: Vec<String> = kinds(&settings)
                    .iter_mut()
                    .flat_map(|kind| kind.find(&Root::default(), &gone))
                    .filter(|c| c.id.as_str() == meter)
                    .map(|c| c.unit)
                    .collect();
                assert_eq!(units, [said.unwrap_or(unsaid)], "{meter}");
            }
        }
    }

    #[test]
    fn an_id_of_nobody_is_refused_by_all() {
        for kind in &mut kinds(&MeterSettings::default()) {
            let opened = kind.open(&Root::default(), &own(), &MeterId::from("no such meter"));
            assert!(matches!(opened, Err(PlatformError::Unsupported { .. })));
        }
    }

    #[test]
    fn an_empty_tree_and_a_process_that_is_gone_give_refusals_only() {
        let empty = tempfile::tempdir().unwrap();
        let gone = workload(
            "redis-server",
            vec![ProcessId {
                pid: i32::MAX,
                start_ticks: 1,
            }],
        );
        for root in [Root::new(empty.path()), Root::default()] {
            for kind in &mut kinds(&MeterSettings::default()) {
                for candidate in kind.find(&root, &gone) {
                    assert!(candidate.refused.is_some(), "{}", candidate.id);
                    assert!(
                        kind.open(&root, &gone, &candidate.id).is_err(),
                        "{}",
                        candidate.id
                    );
                }
            }
        }
    }

    #[test]
    fn every_kind_but_those_the_kernel_keeps_for_all_processes_is_owned() {
        // A process whose number is none: who looks at it at all says so in his refusal.
        let other = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        let workload = Workload {
            others: vec![other],
            ..own()
        };
        let told = "belong to other users";
        for kind in &mut kinds(&MeterSettings::default()) {
            for candidate in kind.find(&Root::default(), &workload) {
                let of_all = matches!(candidate.class, MeterClass::Kernel | MeterClass::Hardware);
                if let Some(why) = &candidate.refused {
                    assert_ne!(why.contains(told), of_all, "{}: {why}", candidate.id);
                }
            }
        }
    }
}
