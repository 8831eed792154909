use super::calls::{ADDED, GROUPS, NAMES, REMOVED};
use super::*;
use std::path::PathBuf;
use std::process::Command;

fn by_default() -> Privileges {
    Privileges::of(&Settings::default())
}

fn without(strategies: &[&str]) -> Privileges {
    let mut settings = Settings::default();
    for id in strategies {
        settings.policy.strategies.insert((*id).to_owned(), false);
    }
    Privileges::of(&settings)
}

fn source(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

#[test]
fn the_shipped_files_are_what_the_table_makes() {
    let all = by_default();
    for (path, wanted) in [
        ("packaging/homeostat.service", all.unit()),
        ("packaging/Containerfile", all.container()),
        ("packaging/seccomp.json", all.seccomp()),
    ] {
        let file = source(path);
        if std::env::var("HOMEOSTAT_UPDATE_DOCS").is_ok() {
            std::fs::write(&file, &wanted).unwrap();
        }
        let found = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            found == wanted,
            "{path} is not in step: HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-daemon privileges"
        );
    }
}

#[test]
fn every_strategy_has_rows_and_every_row_a_strategy() {
    let registry: BTreeSet<String> = homeostat_strategies::all()
        .iter()
        .map(|strategy| strategy.id().to_string())
        .collect();
    let named: BTreeSet<String> = TABLE
        .iter()
        .filter_map(|row| match row.by {
            By::Strategies(ids) => Some(ids),
            _ => None,
        })
        .flatten()
        .map(|id| (*id).to_owned())
        .collect();
    assert_eq!(named, registry);
    for row in TABLE {
        assert!(row.why.ends_with('.') && row.why.len() > 15, "{row:?}");
    }
}

/// For each strategy: its rows go, those that it shares and those of everybody else stay, and so in the files.
#[test]
fn a_strategy_that_is_off_takes_its_own_rows_and_no_others() {
    for strategy in homeostat_strategies::all() {
        let id = strategy.id().to_string();
        let (all, less) = (by_default(), without(&[&id]));
        let own = |row: &&Row| matches!(row.by, By::Strategies([only]) if *only == id);
        let (gone, stay): (Vec<&Row>, Vec<&Row>) = all.rows().iter().partition(own);
        assert_eq!(
            format!("{stay:?}"),
            format!("{:?}", less.rows().iter().collect::<Vec<_>>()),
            "{id}"
        );
        let left: BTreeSet<Need> = stay
            .iter()
            .filter(|row| row.decision == Decision::Given)
            .map(|row| row.need)
            .collect();
        for row in gone {
            let setting = match row.need {
                Need::Capability(name) => format!("\nCapabilityBoundingSet={name}\n"),
                Need::Call(name) => format!("\nSystemCallFilter={name}\n"),
                Need::Write(path) => format!("\nReadWritePaths=-{path}\n"),
                Need::Device { name, access, .. } => format!("\nDeviceAllow={name} {access}\n"),
                other => panic!("{id} needs {other:?}"),
            };
            assert!(all.unit().contains(&setting), "{id}: {setting}");
            for text in [less.unit(), less.drop_in()] {
                assert_eq!(
                    text.contains(&setting),
                    left.contains(&row.need),
                    "{id}: {setting}"
                );
            }
        }
    }
    // What several share goes with the last of them.
    let placing = ["cache_affinity", "consolidation", "relocation"];
    assert!(
        without(&placing)
            .unit()
            .contains("ReadWritePaths=-/sys/fs/cgroup")
    );
    let all = ["cache_affinity", "consolidation", "relocation", "file_cache"];
    assert!(!without(&all).unit().contains("ReadWritePaths=-/sys/fs/cgroup"));
    // The container loses the same.
    assert!(by_default().container().contains("--cap-add=SYS_RAWIO"));
    assert!(!without(&["prefetch"]).container().contains("SYS_RAWIO"));
    assert!(by_default().seccomp().contains("\"process_madvise\""));
    assert!(
        !without(&["large_pages"])
            .seccomp()
            .contains("\"process_madvise\"")
    );
    assert!(
        !without(&["numa_balancing", "autotune"])
            .container()
            .contains("unmask")
    );
}

#[test]
fn a_rule_that_switches_a_strategy_on_for_a_workload_keeps_its_rows() {
    let mut settings = Settings::default();
    let policy = &mut settings.policy;
    policy.strategies.insert("prefetch".into(), false);
    policy.workloads.push(homeostat_engine::policy::WorkloadRule {
        pattern: "db".into(),
        strategies: [("prefetch".to_owned(), true)].into(),
        ..Default::default()
    });
    assert_eq!(Privileges::of(&settings).unit(), by_default().unit());
}

/// Below `ProtectSystem=strict` the daemon could not write its journal there.
#[test]
fn directories_of_the_configuration_can_be_written() {
    let mut settings = Settings::default();
    settings.paths.state_directory = "/srv/100% ours".into();
    let line = "ReadWritePaths=\"/srv/100%% ours\"\n";
    let privileges = Privileges::of(&settings);
    assert!(privileges.unit().contains(line) && privileges.drop_in().contains(line));
    assert!(!by_default().unit().contains("ReadWritePaths=\""));
}

#[test]
fn what_is_withheld_is_given_by_no_row_and_what_is_covered_is_given_by_one() {
    let given: BTreeSet<Need> = by_default().given().into_iter().collect();
    let names: BTreeSet<&str> = NAMES.split_ascii_whitespace().collect();
    for row in TABLE {
        let is_given = given.contains(&row.need);
        match row.decision {
            Decision::Given => assert!(is_given),
            Decision::Withheld => {
                assert!(!is_given && !names.contains(row.need.name()), "{row:?}");
                assert!(matches!(row.by, By::Later(_)), "{row:?}");
            }
            // Of files below /proc/PID the kernel asks for a capability only.
            Decision::Covered => assert!(is_given || row.need.name().starts_with("/proc/PID/"), "{row:?}"),
        }
    }
}

/// A new call in `kernel` that nobody wrote a row for would fail under systemd only.
#[test]
fn every_system_call_of_the_module_of_system_calls_is_permitted() {
    let permitted: BTreeSet<&str> = NAMES
        .split_ascii_whitespace()
        .chain(by_default().given().into_iter().filter_map(|need| match need {
            Need::Call(name) => Some(name),
            _ => None,
        }))
        .collect();
    let withheld: BTreeSet<&str> = TABLE
        .iter()
        .filter(|row| row.decision == Decision::Withheld)
        .map(|row| row.need.name())
        .collect();
    let mut seen = 0;
    for entry in std::fs::read_dir(source("crates/kernel/src")).unwrap() {
        let file = entry.unwrap().path();
        let text = std::fs::read_to_string(&file).unwrap();
        let word = |rest: &str| -> String {
            rest.chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                .collect()
        };
        let by_number = text.split("libc::SYS_").skip(1).map(word);
        // Functions of the C library: most are called as the system call that they make.
        let by_name = text.split("libc::").skip(1).filter_map(|rest| {
            let name = word(rest);
            rest[name.len()..].starts_with('(').then_some(name)
        });
        for name in by_number.chain(by_name) {
            let name = match name.as_str() {
                "syscall" | "mallopt" | "sigemptyset" => continue,
                "_exit" => "exit_group".to_owned(),
                "signal" | "sigaction" => "rt_sigaction".to_owned(),
                "sigprocmask" => "rt_sigprocmask".to_owned(),
                _ => name,
            };
            seen += 1;
            assert!(
                permitted.contains(name.as_str()) || withheld.contains(name.as_str()),
                "{}: {name} has no row in the table of privileges",
                file.display()
            );
        }
    }
    assert!(seen >= 10, "{seen} calls were seen");
}

/// The output of `systemd-analyze`; `None`, said loudly, where it is not installed.
fn analyze(arguments: &[&str]) -> Option<(bool, String)> {
    match Command::new("systemd-analyze")
        .args(arguments)
        .env("LC_ALL", "C")
        .output()
    {
        Ok(done) => Some((
            done.status.success(),
            String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr),
        )),
        Err(e) => {
            println!("SKIPPED: systemd-analyze (Debian's package systemd) cannot be started: {e}");
            None
        }
    }
}

/// The calls of a group, groups in it resolved.
fn members(name: &str, into: &mut BTreeSet<String>) -> Option<()> {
    if !name.starts_with('@') {
        into.insert(name.to_owned());
        return Some(());
    }
    let (_, text) = analyze(&["syscall-filter", name])?;
    for word in text.lines().skip(1).map(str::trim) {
        if !word.starts_with('#') && !word.is_empty() && word != name {
            members(word, into)?;
        }
    }
    Some(())
}

/// A container may not make calls that the unit forbids.
#[test]
fn the_names_for_containers_are_those_of_the_groups_for_systemd() {
    let (mut unit, mut removed) = (BTreeSet::new(), BTreeSet::new());
    let done = GROUPS
        .iter()
        .try_for_each(|name| members(name, &mut unit))
        .and_then(|()| REMOVED.iter().try_for_each(|name| members(name, &mut removed)));
    if done.is_none() {
        return;
    }
    let mut wanted: BTreeSet<&str> = unit.difference(&removed).map(String::as_str).collect();
    wanted.extend(ADDED);
    let names: BTreeSet<&str> = NAMES.split_ascii_whitespace().collect();
    let more: Vec<_> = names.difference(&wanted).collect();
    assert!(more.is_empty(), "only containers may make {more:?}");
}

#[test]
fn systemd_rates_the_unit_at_4_6_or_less() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("homeostat.service");
    std::fs::write(&file, by_default().unit()).unwrap();
    let file = file.to_string_lossy();
    let Some((is_within, text)) = analyze(&[
        "security",
        "--offline=true",
        "--threshold=46",
        "--no-pager",
        &file,
    ]) else {
        return;
    };
    let verdict = text.lines().last().unwrap_or_default();
    println!("{verdict}");
    assert!(
        text.contains("Overall exposure level") && is_within,
        "systemd-analyze says: {verdict}"
    );
}
