//! The program itself: every command's help, and bad input of every kind.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn homeostat(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homeostat"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .env_remove("NOTIFY_SOCKET")
        .env_remove("JOURNAL_STREAM");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs with a socket and a state directory that do not exist, so that nothing of this machine is touched.
fn alone(directory: &Path, arguments: &[&str]) -> Output {
    let socket = directory.join("none/io.homeostat");
    let state = directory.join("state");
    let mut all = vec![
        "--socket",
        socket.to_str().unwrap(),
        "--state-dir",
        state.to_str().unwrap(),
    ];
    all.extend(arguments);
    homeostat(&all)
}

const COMMANDS: &[&str] = &[
    "run",
    "status",
    "top",
    "explain",
    "history",
    "report",
    "plan",
    "advice",
    "on",
    "off",
    "undo",
    "restore",
    "prepare-downgrade",
    "pause",
    "resume",
    "doctor",
    "privileges",
    "topology",
    "locality",
    "memory",
    "meter",
    "tunable",
    "record",
    "replay",
    "demo",
    "config",
    "completions",
    "manual",
];

#[test]
fn every_command_has_help_with_examples() {
    let all = homeostat(&["--help"]);
    let overview = text(&all.stdout);
    assert!(
        all.status.success() && overview.contains("EXIT CODES") && overview.contains("EXAMPLES"),
        "{overview}"
    );
    for command in COMMANDS {
        assert!(
            overview.contains(&format!("  {command}")),
            "{command} is not listed"
        );
        let output = homeostat(&[command, "--help"]);
        let help = text(&output.stdout);
        assert!(output.status.success(), "{command}");
        assert!(
            help.contains("EXAMPLES\n  homeostat"),
            "{command} has no examples:\n{help}"
        );
        assert!(help.contains("--json"), "{command} has no --json");
    }
    // Not only the first line of what a command is for.
    let off = text(&homeostat(&["off", "--help"]).stdout);
    assert!(off.contains("restarts, reboots and upgrades"), "{off}");
    let listed = overview
        .split("Commands:")
        .nth(1)
        .unwrap()
        .split("Options:")
        .next()
        .unwrap();
    let count = listed
        .lines()
        .filter(|l| l.starts_with("  ") && !l.starts_with("   "))
        .count();
    assert_eq!(
        count,
        COMMANDS.len() + 1,
        "the list of this test is complete (and help):\n{listed}"
    );
}

#[test]
fn the_former_command_of_the_simulated_machine_names_its_program() {
    for arguments in [
        &["simulate", "p8", "--plot"][..],
        &["lab"],
        &["simulate", "--help"],
    ] {
        let output = homeostat(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(
            said.contains("hint: homeostat-lab takes"),
            "{arguments:?}: {said}"
        );
    }
}

#[test]
fn a_wrong_command_line_is_2() {
    for arguments in [
        &["nonsense"][..],
        &[],
        &["undo"],
        &["undo", "--all", "5"],
        &["undo", "five"],
        &["run", "--advise-only", "--calibrate"],
        &["history", "--limit", "0"],
        &["explain"],
    ] {
        let output = homeostat(arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments:?}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn without_a_daemon_it_is_3_and_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    for arguments in [
        &["status"][..],
        &["explain", "x"],
        &["undo", "1"],
        &["undo", "--all"],
        &["pause"],
        &["resume"],
        &["config", "reload"],
    ] {
        let output = alone(directory.path(), arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {message}");
        assert!(message.contains("homeostat run"), "{message}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_history_that_does_not_exist_is_4_and_nothing_is_created() {
    let directory = tempfile::tempdir().unwrap();
    let output = alone(directory.path(), &["history"]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// Makes the state directory that `alone` names.
fn state_directory(directory: &std::path::Path) {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(directory.join("state"))
        .unwrap();
}

#[test]
fn restore_without_anything_to_restore_is_well_and_a_directory_that_is_not_there_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let absent = alone(directory.path(), &["restore"]);
    assert!(!absent.status.success());
    assert!(
        text(&absent.stderr).contains("--state-dir"),
        "{}",
        text(&absent.stderr)
    );
    // As the scripts of the packages ask before homeostat is removed: a configured directory that was never used is no reason to stay.
    let config = directory.path().join("homeostat.toml");
    let unused = directory.path().join("unused");
    std::fs::write(&config, format!("[paths]\nstate_directory = {unused:?}\n")).unwrap();
    for arguments in [&["tunable", "unset", "--all"][..], &["restore"]] {
        let socket = directory.path().join("socket");
        let mut all = vec![
            "--config",
            config.to_str().unwrap(),
            "--socket",
            socket.to_str().unwrap(),
        ];
        all.extend(arguments);
        let output = homeostat(&all);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(!unused.exists(), "{arguments:?}");
    }
    state_directory(directory.path());
    let output = alone(directory.path(), &["restore"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("Nothing to undo is known in"));
    let json = alone(directory.path(), &["restore", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        (value["schema"].as_u64(), value["by"].as_str()),
        (Some(1), Some("journal"))
    );
}

#[test]
fn restore_works_with_a_broken_configuration() {
    let directory = tempfile::tempdir().unwrap();
    state_directory(directory.path());
    let config = directory.path().join("homeostat.toml");
    std::fs::write(&config, "this is not toml").unwrap();
    let output = alone(
        directory.path(),
        &["restore", "--config", config.to_str().unwrap()],
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_broken_configuration_is_named_with_its_place_and_nothing_starts() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("homeostat.toml");
    std::fs::write(&config, "[policy]\nage_mins = 5\ncpu_min = -1\n").unwrap();
    let path = config.to_str().unwrap();
    let check = homeostat(&["config", "check", "--config", path]);
    let message = text(&check.stderr);
    assert_eq!(check.status.code(), Some(2));
    assert!(
        message.contains("homeostat.toml:2:1: policy.age_mins = 5"),
        "{message}"
    );
    assert!(message.contains("did you mean `age_min_s`?"), "{message}");
    let json = homeostat(&["config", "check", "--json", "--config", path]);
    let value: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        (value["valid"].as_bool(), value["errors"][0]["line"].as_u64()),
        (Some(false), Some(2))
    );
    let run = alone(directory.path(), &["run", "--config", path]);
    assert_eq!(run.status.code(), Some(2), "{}", text(&run.stderr));
    assert!(!directory.path().join("state").exists());
    let missing = homeostat(&["config", "check", "--config", "/nowhere/homeostat.toml"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("/nowhere/homeostat.toml: can not be read"));
    let set = alone(directory.path(), &["run", "--set", "cpu_mni=1"]);
    assert_eq!(set.status.code(), Some(2));
    assert!(text(&set.stderr).contains("`cpu_min`"), "{}", text(&set.stderr));
}

#[test]
fn a_group_that_does_not_exist_is_an_error_of_the_configuration_and_keeps_nobody_from_looking() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("homeostat.toml");
    std::fs::write(&config, "[control]\ngroup = \"no-such-group\"\n").unwrap();
    let path = config.to_str().unwrap();
    for arguments in [
        &["config", "check", "--config", path][..],
        &["run", "--config", path],
    ] {
        let output = alone(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let message = text(&output.stderr);
        assert!(
            message.contains("homeostat.toml:2:9: control.group = \"no-such-group\": there is no such group"),
            "{message}"
        );
    }
    assert!(!directory.path().join("state").exists());
    // Who looks for the daemon or undoes is not kept from it: the paths are known.
    state_directory(directory.path());
    let restore = alone(directory.path(), &["restore", "--config", path]);
    assert!(restore.status.success(), "{}", text(&restore.stderr));
    assert_eq!(text(&restore.stderr), "");
}

#[test]
fn with_json_errors_are_objects_of_one_shape() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("homeostat.toml");
    std::fs::write(&config, "[policy]\nobserve_min_s = 5000\n").unwrap();
    let path = config.to_str().unwrap();
    let error = |output: Output| -> serde_json::Value {
        let stderr = text(&output.stderr);
        let value: serde_json::Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
        assert_eq!(value["schema"], 1, "{stderr}");
        assert_eq!(
            value["error"]["exit_code"].as_i64(),
            output.status.code().map(i64::from),
            "{stderr}"
        );
        value["error"].clone()
    };
    let not_running = error(alone(directory.path(), &["--json", "status"]));
    assert_eq!(not_running["kind"], "not_running");
    assert!(not_running["hint"].as_str().unwrap().contains("homeostat run"));
    for arguments in [&["config", "check"][..], &["config", "show"], &["run"], &["plan"]] {
        let mut all = vec!["--json", "--config", path];
        all.extend(arguments);
        let invalid = error(alone(directory.path(), &all));
        assert_eq!(invalid["kind"], "usage", "{arguments:?}");
        assert_eq!(
            invalid["places"][0]["key"], "policy.observe_min_s",
            "{arguments:?}"
        );
        assert_eq!(invalid["places"][0]["line"], 2);
    }
    let usage = error(homeostat(&["--json", "undo", "five"]));
    assert_eq!(usage["kind"], "usage");
    assert!(usage["message"].as_str().unwrap().contains("five"));
}

#[test]
fn the_default_configuration_is_valid_and_shows_as_json() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("homeostat.toml");
    let default = homeostat(&["config", "default"]);
    std::fs::write(&config, &default.stdout).unwrap();
    let check = homeostat(&["config", "check", "--config", config.to_str().unwrap()]);
    assert!(check.status.success(), "{}", text(&check.stderr));
    let show = homeostat(&["config", "show", "--json", "--config", config.to_str().unwrap()]);
    let value: serde_json::Value = serde_json::from_slice(&show.stdout).unwrap();
    assert!(value["policy"]["age_min_s"].is_number(), "{value}");
}

#[test]
fn documents_are_written_for_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let output = homeostat(&["completions", shell]);
        assert!(
            output.status.success() && text(&output.stdout).contains("explain"),
            "{shell}"
        );
        // Names of settings, too; not those that have a device in them, which differ by machine. (For fish clap completes
        // options only.)
        assert!(
            shell == "fish" || text(&output.stdout).contains("vm.swappiness"),
            "{shell}"
        );
        assert!(!text(&output.stdout).contains("block.*"), "{shell}");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    assert!(homeostat(&["manual", path]).status.success());
    let page = std::fs::read_to_string(directory.path().join("man8/homeostat-run.8")).unwrap();
    let title = page.lines().find(|l| l.starts_with(".TH ")).unwrap();
    assert!(title.starts_with(".TH HOMEOSTAT-RUN 8 "), "{title}");
    // The third argument is the date: a reader takes whatever stands there for it.
    assert!(
        title.split(' ').nth(3).is_some_and(|d| d.starts_with("20")),
        "{title}"
    );
    for name in COMMANDS
        .iter()
        .map(|c| format!("homeostat-{c}"))
        .chain(["homeostat".into()])
    {
        let page = ["1", "8"]
            .iter()
            .find_map(|s| std::fs::read_to_string(directory.path().join(format!("man{s}/{name}.{s}"))).ok())
            .expect(&name);
        assert!(page.contains("EXAMPLES"));
    }
    assert_eq!(homeostat(&["man", "/nowhere/at/all"]).status.code(), Some(1));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .args(["config", "default"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_doctor_reports_as_json_whatever_the_machine_can() {
    let output = homeostat(&["doctor", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["schema"], 1);
    assert!(value["capabilities"].as_array().unwrap().len() >= 5, "{value}");
    let refused = value["strategies"]
        .as_array()
        .unwrap()
        .iter()
        .all(|s| s["refused"].is_string());
    assert_eq!(output.status.code(), Some(i32::from(refused)));
    let human = text(&homeostat(&["doctor"]).stdout);
    assert!(
        human.contains("Sensors and effectors") && !human.contains('\x1b'),
        "{human}"
    );
}

/// As user nobody, if this test may become anybody.
fn as_nobody(arguments: &[&str]) -> Option<Output> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    // The program must be where nobody may read it.
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = directory.path().join("homeostat");
    std::fs::copy(env!("CARGO_BIN_EXE_homeostat"), &program).unwrap();
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    Some(output)
}

#[test]
fn without_permission_it_is_5_and_says_what_is_needed() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let socket = directory.path().join("io.homeostat");
    let state = directory.path().join("state");
    let (socket, state) = (socket.to_str().unwrap(), state.to_str().unwrap());
    for arguments in [
        &["--socket", socket, "status"][..],
        &["--socket", socket, "--state-dir", state, "run"],
        &["--socket", "/nowhere/socket", "--state-dir", state, "history"],
        &["--socket", "/nowhere/socket", "demo"],
    ] {
        let Some(output) = as_nobody(arguments) else {
            eprintln!("not root, or no setpriv: other users can not be tried");
            return;
        };
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{arguments:?}: {message}");
        assert!(
            message.contains("root") || message.contains("hint"),
            "{arguments:?}: {message}"
        );
    }
}

#[test]
fn the_topology_of_this_machine_and_of_a_described_one_can_be_shown() {
    let here = homeostat(&["topology", "--json"]);
    assert!(here.status.success(), "{}", text(&here.stderr));
    let here: serde_json::Value = serde_json::from_slice(&here.stdout).unwrap();
    assert_eq!(here["schema"], 1);
    assert!(!here["cpus"].as_array().unwrap().is_empty());
    let captured = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/hosts/server-2n2p-smt");
    let captured = homeostat(&["topology", "--root", captured.to_str().unwrap()]);
    let shown = text(&captured.stdout);
    assert!(
        shown.contains("2 memory nodes") && shown.contains("L3 16.0 MiB"),
        "{shown}"
    );
    let nothing = tempfile::tempdir().unwrap();
    let nothing = homeostat(&["topology", "--root", nothing.path().to_str().unwrap()]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(text(&nothing.stderr).contains("proc"));
}

#[test]
fn locality_needs_no_daemon_and_says_when_a_workload_is_not_there() {
    let seen = homeostat(&["locality", "--seconds", "1", "--json"]);
    assert!(seen.status.success(), "{}", text(&seen.stderr));
    let seen: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    assert_eq!(seen["schema"], 1);
    assert!(!seen["nodes"].as_array().unwrap().is_empty());
    for workload in seen["workloads"].as_array().unwrap() {
        for key in [
            "name",
            "memory",
            "local",
            "dispatches",
            "score",
            "bound",
            "unknown",
        ] {
            assert!(workload.get(key).is_some(), "{key} is missing: {workload}");
        }
    }
    let absent = homeostat(&["locality", "no-such-workload-anywhere"]);
    assert_eq!(absent.status.code(), Some(4), "{}", text(&absent.stderr));
    let both = homeostat(&["locality", "--all", "x"]);
    assert_eq!(both.status.code(), Some(2));
}
