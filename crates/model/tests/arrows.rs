//! The dependency arrows of ARCHITECTURE.md, checked against what cargo says.

use std::collections::{BTreeMap, BTreeSet};

/// Who may know whom inside the workspace (normal dependencies; tests may look further).
const ALLOWED: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("statistics", &[]),
    ("progress", &[]),
    ("tunables", &[]),
    ("engine", &["model", "statistics"]),
    ("strategies", &["engine", "model", "statistics"]),
    ("platform", &["model"]),
    ("store", &["model"]),
    ("simulator", &["platform", "model"]),
    (
        "laboratory",
        &[
            "simulator",
            "runtime",
            "strategies",
            "engine",
            "platform",
            "statistics",
            "store",
            "model",
        ],
    ),
    ("points", &[]),
    ("linux", &["platform", "model", "points", "progress", "tunables"]),
    ("runtime", &["engine", "platform", "store", "model"]),
    (
        "daemon",
        &[
            "runtime",
            "strategies",
            "engine",
            "linux",
            "platform",
            "store",
            "tunables",
            "model",
        ],
    ),
    ("cli", &["daemon", "laboratory", "model"]),
    ("workloads", &["progress"]),
    // The scenarios inside the emulated machines of vm/: they carry out actions as the runtime does.
    // The strategies are asked there what they propose on a real kernel.
    (
        "guest",
        &[
            "linux",
            "runtime",
            "strategies",
            "engine",
            "platform",
            "store",
            "model",
        ],
    ),
];

#[test]
fn every_arrow_points_the_way_architecture_md_says() {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .other_options(vec!["--offline".to_owned()])
        .exec()
        .expect("cargo metadata works");
    let allowed: BTreeMap<&str, BTreeSet<&str>> = ALLOWED
        .iter()
        .map(|(from, to)| (*from, to.iter().copied().collect()))
        .collect();
    let mut seen = 0;
    for package in &metadata.packages {
        let Some(from) = package.name.strip_prefix("homeostat-") else {
            panic!("package {} lacks the prefix homeostat-", package.name)
        };
        let may = allowed
            .get(from)
            .unwrap_or_else(|| panic!("{from} is missing from the table of arrows"));
        for dependency in &package.dependencies {
            if dependency.kind != cargo_metadata::DependencyKind::Normal {
                continue;
            }
            let Some(to) = dependency.name.strip_prefix("homeostat-") else {
                continue;
            };
            assert!(may.contains(to), "{from} must not depend on {to}");
            seen += 1;
        }
    }
    assert!(
        seen > 10,
        "only {seen} arrows found: the test looks at the wrong place"
    );
    assert_eq!(
        metadata.packages.len(),
        allowed.len(),
        "every crate stands in the table of arrows"
    );
}
