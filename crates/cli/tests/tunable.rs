//! `homeostat tunable` as a person uses it, on a captured machine.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn machine() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (path, text) in [
        ("proc/sys/kernel/osrelease", "6.12.0\n"),
        ("proc/sys/kernel/hostname", "captured\n"),
        ("proc/meminfo", "MemTotal: 33554432 kB\n"),
        ("proc/cmdline", "quiet elevator=noop transparent_hugepage=never\n"),
        ("sys/devices/system/cpu/online", "0-7\n"),
        ("sys/devices/system/node/online", "0\n"),
        ("proc/sys/vm/swappiness", "10\n"),
        ("proc/sys/vm/dirty_ratio", "20\n"),
        ("proc/sys/vm/zone_reclaim_mode", "1\n"),
        (
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always madvise [never]\n",
        ),
        ("sys/block/vda/queue/scheduler", "[none] mq-deadline\n"),
        (
            "etc/sysctl.d/10-db.conf",
            "vm.swappiness = 10\nkernel.sched_min_granularity_ns = 1\n",
        ),
    ] {
        let file = directory.path().join("root").join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    directory
}

fn tunable(directory: &Path, arguments: &[&str]) -> Output {
    let state = directory.join("state");
    Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .args(["--state-dir", state.to_str().unwrap(), "tunable"])
        .args(arguments)
        .current_dir(directory)
        .env("COLUMNS", "100")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_captured_machine_is_listed_shown_and_compared_with_the_kernels_own_values() {
    let keep = machine();
    let here = keep.path();
    let list = text(&tunable(here, &["list", "--root", "root", "--changed"]));
    for part in [
        "vm.swappiness",
        "/etc/sysctl.d/10-db.conf:1",
        "vm.zone_reclaim_mode",
        "at run time",
    ] {
        assert!(list.contains(part), "{part}\n{list}");
    }
    assert!(!list.contains("dirty_ratio"), "{list}");
    let shown = text(&tunable(here, &["show", "--root", "root", "thp.enabled"]));
    assert!(
        shown.contains("kernel command line transparent_hugepage=never"),
        "{shown}"
    );
    let json = tunable(here, &["show", "--root", "root", "--json", "vm/swappiness"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["settings"][0]["value"], "10");
    assert_eq!(json["settings"][0]["set_by"]["kind"], "sysctl_file");
    let diff = text(&tunable(here, &["diff", "--root", "root", "--group", "vm"]));
    assert!(
        diff.contains("60") && diff.contains("2 settings not as Linux 6.12.0"),
        "{diff}"
    );
    let missing = tunable(here, &["show", "--root", "root", "swapiness"]);
    assert_eq!(missing.status.code(), Some(4));
}

#[test]
fn old_tuning_is_found_and_a_snapshot_is_compared() {
    let keep = machine();
    let here = keep.path();
    let check = tunable(here, &["check", "--root", "root", "--json"]);
    assert_eq!(check.status.code(), Some(1), "something was found");
    let check: Value = serde_json::from_slice(&check.stdout).unwrap();
    let found: Vec<(String, String)> = check["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| {
            let part = |key: &str| f[key].as_str().unwrap().to_owned();
            (part("kind"), part("name"))
        })
        .collect();
    let expected = [
        ("ignored", "boot.elevator"),
        ("ignored", "kernel.sched_min_granularity_ns"),
        ("works_against", "vm.zone_reclaim_mode"),
    ]
    .map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(found, expected);
    let made = tunable(here, &["snapshot", "--root", "root", "-o", "a.json"]);
    assert!(made.status.success(), "{made:?}");
    // A file that is there is not written over.
    let again = tunable(here, &["snapshot", "--root", "root", "-o", "a.json"]);
    assert_eq!(again.status.code(), Some(1));
    std::fs::write(here.join("root/proc/sys/vm/dirty_ratio"), "5\n").unwrap();
    let compared = text(&tunable(here, &["check", "--root", "root", "a.json"]));
    assert!(
        compared.contains("Compared with captured, Linux 6.12.0"),
        "{compared}"
    );
    assert!(
        compared.contains("vm.dirty_ratio: 5 here, 20 there"),
        "{compared}"
    );
    std::fs::write(here.join("b.json"), "{}").unwrap();
    let none = tunable(here, &["check", "--root", "root", "b.json"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&none.stderr).contains("is no snapshot"));
}

#[test]
fn bad_wishes_are_refused_with_the_reason() {
    let keep = machine();
    let here = keep.path();
    for (arguments, code, part) in [
        (
            ["set", "--dry-run", "vm.nonsense", "1"],
            4,
            "no setting is called",
        ),
        (["set", "--dry-run", "vm.swappiness", "1000"], 2, "0 to 200"),
        (
            ["set", "--dry-run", "vm.swappiness", "many"],
            2,
            "no whole number",
        ),
        (["set", "--dry-run", "boot.isolcpus", "1"], 1, "command line only"),
        (
            ["set", "--dry-run", "vm.min_free_kbytes", "70000"],
            1,
            "restricted",
        ),
        (["set", "--dry-run", "vm.*", "1"], 2, "several settings"),
    ] {
        let output = tunable(here, &arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
    let nothing = tunable(here, &["unset", "vm.swappiness"]);
    if rustix::process::geteuid().is_root() {
        assert_eq!(nothing.status.code(), Some(4), "{nothing:?}");
    } else {
        assert_eq!(nothing.status.code(), Some(5), "{nothing:?}");
    }
}
