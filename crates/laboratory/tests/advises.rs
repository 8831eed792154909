//! Who only advises changes nothing: every strategy, on the machines of all scenarios. What is in force when advice begins goes.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_engine::{Mode, OperatorRequest};
use homeostat_laboratory::run::{Arm, Laboratory};
use homeostat_laboratory::scenario::built_in;
use homeostat_store::journal;
use std::collections::BTreeSet;

/// Long enough for a trial to begin in most scenarios.
const SECONDS: f64 = 900.0;
/// An undo takes at most so long.
const UNDO_S: f64 = 300.0;

#[test]
fn advice_changes_nothing_in_any_scenario_and_undoes_what_is_in_force() {
    let (mut proposed, mut acted) = (BTreeSet::new(), 0);
    for mut scenario in built_in().unwrap() {
        let configured = scenario.policy.clone();
        scenario.policy.mode = Mode::AdviseOnly;
        let mut advising = Laboratory::new(&scenario, Arm::Homeostat).unwrap();
        advising.run_until(SECONDS).unwrap();
        let view = advising.view().unwrap();
        assert!(
            view.in_force.is_empty() && view.experiments.is_empty(),
            "{}: {view:?}",
            scenario.name
        );
        let written = journal::read(&advising.directory()).unwrap();
        assert_eq!(
            written.next_action.0, 1,
            "{}: no change was ever begun",
            scenario.name
        );
        proposed.extend(
            view.workloads
                .iter()
                .filter_map(|w| w.proposal.as_ref().map(|p| p.strategy.to_string())),
        );

        scenario.policy = configured;
        let mut acting = Laboratory::new(&scenario, Arm::Homeostat).unwrap();
        acting.run_until(SECONDS).unwrap();
        let owes = |laboratory: &Laboratory| journal::read(&laboratory.directory()).unwrap().owed.len();
        acted += usize::from(owes(&acting) > 0);
        let advice = homeostat_engine::Policy {
            mode: Mode::AdviseOnly,
            ..scenario.policy()
        };
        acting.operator(OperatorRequest::Configure(Box::new(advice)));
        acting.run_until(SECONDS + UNDO_S).unwrap();
        assert_eq!(owes(&acting), 0, "{}: {:?}", scenario.name, acting.view());
    }
    assert!(proposed.len() >= 2, "strategies that advised: {proposed:?}");
    assert!(
        acted >= 5,
        "in {acted} scenarios something was in force when advice began"
    );
}
