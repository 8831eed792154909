//! `homeostat-lab` as a person runs it.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Command, Output, Stdio};

fn simulate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homeostat-lab"))
        .args(arguments)
        .stdin(Stdio::null())
        .env("COLUMNS", "100")
        .env("LC_ALL", "C")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_list_names_every_scenario_and_machine() {
    let output = simulate(&["--list"]);
    let list = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for name in ["p1 ", "p8 ", "p15 ", "x86-2s"] {
        assert!(list.contains(name), "{name}: {list}");
    }
    let json: serde_json::Value = serde_json::from_slice(&simulate(&["--list", "--json"]).stdout).unwrap();
    assert!(json["scenarios"].as_array().unwrap().len() >= 20);
}

#[test]
fn a_run_tells_its_story_and_draws_its_curves() {
    let arguments = ["p15", "--hours", "0.2", "--seed", "3", "--plot"];
    let output = simulate(&arguments);
    let shown = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for part in [
        "latency-a considered",
        "latency-a: throughput",
        "latency-b after",
        "left alone",
        "seed 3",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(
        simulate(&arguments).stdout,
        output.stdout,
        "the same seed is the same run"
    );
}

#[test]
fn json_has_every_run_with_its_curves() {
    let output = simulate(&["p7", "--hours", "0.2", "--json"]);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{}",
        text(&output.stderr)
    );
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["schema"], 1);
    let arms: Vec<&str> = json["tracks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["arm"].as_str().unwrap())
        .collect();
    assert_eq!(arms, ["homeostat", "left-alone", "manual"]);
    assert_eq!(
        json["tracks"][0]["programs"][0]["points"]
            .as_array()
            .unwrap()
            .len(),
        12
    );
}

#[test]
fn help_and_mistakes_are_those_of_this_program() {
    let help = text(&simulate(&["--help"]).stdout);
    assert!(
        help.contains("EXAMPLES\n  homeostat-lab") && help.contains("--json"),
        "{help}"
    );
    let wrong = simulate(&["nonesuch"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        text(&wrong.stderr).starts_with("homeostat-lab: "),
        "{}",
        text(&wrong.stderr)
    );
    let wrong = simulate(&["--nonesuch", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&wrong.stderr).unwrap();
    assert_eq!(json["error"]["exit_code"], 2);
}

#[test]
fn mistakes_are_answered_with_place_and_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("mine.toml");
    std::fs::write(&file, "name = \"mine\"\ntitle = \"t\"\nhours = -2.0\n[machine]\nnamed = \"small-1n\"\n[[program]]\nname = \"a\"\nprofile = \"oltp\"\n").unwrap();
    for (arguments, parts) in [
        (&["nonesuch"][..], &["nonesuch", "--list"][..]),
        (&[file.to_str().unwrap()], &["mine.toml:3", "hours = -2", "hint:"]),
        (&["p15", "--hours", "0"], &["--hours 0"]),
    ] {
        let output = simulate(arguments);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {part}: {said}");
        }
    }
}

#[test]
fn a_campaign_and_a_swarm_are_run_by_one_command() {
    let output = simulate(&["--campaign", "--seed", "3", "--seeds", "2", "--hours", "4"]);
    let shown = text(&output.stdout);
    assert!(
        output.status.success() && shown.contains("all invariants held"),
        "{shown}{}",
        text(&output.stderr)
    );
    let output = simulate(&["--swarm", "--seeds", "2", "--hours", "0.5", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["summary"]["machines"], 2);
    assert_eq!(json["options"]["hours"], 0.5);
    // One machine again, as the list of the worst says it.
    let output = simulate(&[
        "--swarm",
        "--seed",
        "1",
        "--from",
        "1",
        "--machines",
        "1",
        "--hours",
        "0.5",
        "--rough",
    ]);
    let shown = text(&output.stdout);
    assert!(
        output.status.success()
            && shown.contains("--swarm --seed 1 --from 1 --machines 1 --hours 0.5 --rough"),
        "{shown}{}",
        text(&output.stderr)
    );
    assert!(!simulate(&["p15", "--from", "2"]).status.success());
    assert!(!simulate(&["p15", "--seeds", "2"]).status.success());
    let output = simulate(&["--published", "--seeds", "100000"]);
    assert!(
        !output.status.success() && text(&output.stderr).contains("--seeds 100000: at most 1000"),
        "{}",
        text(&output.stderr)
    );
    assert!(!simulate(&["--campaign", "--swarm"]).status.success());
}

#[test]
fn a_record_of_ones_own_is_tried_and_a_bad_one_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("mine.csv");
    let rows: String = (0..400)
        .map(|i| format!("{i},1.0,{},0.5\n", 1000 + i * 37 % 60))
        .collect();
    let good = format!("t_s,interval_s,work,cpu_s\n{rows}");
    std::fs::write(&file, &good).unwrap();
    let path = file.to_str().unwrap();
    let arguments = [
        "proof",
        path,
        "--only",
        "gain",
        "--effects",
        "15",
        "--runs",
        "5",
        "--tries",
        "1",
        "--json",
    ];
    let output = simulate(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["cells"][0]["record"], "mine");
    assert_eq!(json["cells"][0]["accepted"], 1.0);
    std::fs::write(&file, good + "400,1.0,nonesuch").unwrap();
    let output = simulate(&["proof", path]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(
        said.contains("mine.csv, line 402: 3 columns instead of 4. Delete"),
        "{said}"
    );
}
