//! The dependency arrows of ARCHITECTURE.md, checked against what cargo says.

use std::collections::{BTreeMap, BTreeSet};

/// Who may know whom inside the workspace (normal dependencies; tests may look further).
const ALLOWED: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("statistics", &[]),
    ("progress", &[]),
    ("tunables", &["model"]),
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
    ("kernel", &["platform", "model", "tunables"]),
    ("helper", &["kernel", "platform", "model"]),
    ("sensors", &["kernel", "platform", "model", "tunables"]),
    (
        "meters",
        &["sensors", "helper", "kernel", "platform", "progress", "model"],
    ),
    (
        "probes",
        &[
            "meters", "sensors", "helper", "kernel", "platform", "points", "model",
        ],
    ),
    (
        "effectors",
        &["sensors", "helper", "kernel", "platform", "tunables", "model"],
    ),
    (
        "linux",
        &[
            "probes",
            "meters",
            "effectors",
            "sensors",
            "helper",
            "kernel",
            "platform",
            "model",
        ],
    ),
    ("runtime", &["engine", "platform", "store", "model"]),
    (
        "daemon",
        &[
            "runtime",
            "strategies",
            "engine",
            "linux",
            "probes",
            "meters",
            "effectors",
            "sensors",
            "helper",
            "kernel",
            "platform",
            "store",
            "tunables",
            "model",
        ],
    ),
    ("cli", &["daemon", "model"]),
    ("lab", &["cli", "laboratory"]),
    ("workloads", &["progress"]),
    // The scenarios inside the emulated machines of vm/: they carry out actions as the runtime does.
    // The strategies are asked there what they propose on a real kernel.
    (
        "guest",
        &[
            "linux",
            "kernel",
            "effectors",
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

/// The parsers are fuzzed in a workspace of their own (`tools/fuzz`), with a lock file of its own: nothing else here would
/// notice that it is behind.
#[test]
fn the_lock_file_of_the_fuzzer_knows_what_the_crates_depend_on() {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .other_options(vec!["--offline".to_owned()])
        .exec()
        .expect("cargo metadata works");
    let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/Cargo.lock"))
        .expect("fuzz/Cargo.lock can be read");
    let quoted = |line: &str| line.split('"').nth(1).map(str::to_owned);
    let mut compared = 0;
    for block in lock.split("[[package]]").skip(1) {
        let name = block.lines().find(|l| l.starts_with("name = ")).and_then(quoted);
        let Some(package) = metadata
            .packages
            .iter()
            .find(|p| Some(p.name.as_str()) == name.as_deref())
        else {
            continue;
        };
        // An entry is a name, and a version after it where there are several.
        let locked: BTreeSet<String> = block
            .lines()
            .filter(|l| l.starts_with(" \""))
            .filter_map(|l| quoted(l)?.split(' ').next().map(str::to_owned))
            .collect();
        let needed: BTreeSet<String> = package
            .dependencies
            .iter()
            .filter(|d| d.kind != cargo_metadata::DependencyKind::Development && !d.optional)
            .map(|d| d.name.clone())
            .collect();
        assert_eq!(
            locked, needed,
            "fuzz/Cargo.lock is behind {}; run: cargo metadata --manifest-path fuzz/Cargo.toml",
            package.name
        );
        compared += 1;
    }
    assert!(compared >= 4, "only {compared} crates of ours in fuzz/Cargo.lock");
}

/// Foreign crates in the daemon's program, those that only build it included.
const FOREIGN_MAX: usize = 60;

#[test]
fn the_daemons_program_holds_few_foreign_crates_and_no_simulated_machine() {
    let output = std::process::Command::new(env!("CARGO"))
        .args("tree --offline --package homeostat-cli --edges normal --prefix none --format".split(' '))
        .arg("{p}")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo tree works");
    let text = String::from_utf8(output.stdout).expect("text");
    let (own, foreign): (BTreeSet<&str>, BTreeSet<&str>) = text
        .lines()
        // Name and version; marks of cargo follow.
        .filter_map(|line| {
            line.match_indices(' ')
                .nth(1)
                .map_or(Some(line), |(at, _)| line.get(..at))
        })
        .filter(|line| !line.is_empty())
        .partition(|line| line.starts_with("homeostat-"));
    assert!(own.len() > 10, "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["homeostat-simulator ", "homeostat-laboratory "] {
        assert!(!own.iter().any(|line| line.starts_with(name)), "{own:?}");
    }
    assert!(
        foreign.len() <= FOREIGN_MAX,
        "{} foreign crates, at most {FOREIGN_MAX}: {foreign:#?}",
        foreign.len()
    );
}
