//! A real daemon on this machine, in a directory of its own, told to touch nothing: start, ask, stop.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let child = command(directory.path(), &["run", "--advise-only", "--log", "json"])
            .args(["--set", "policy.workloads=[{match=\"*\",never=true}]"])
            .stderr(log)
            .spawn()
            .unwrap();
        let daemon = Self { child, directory };
        let begin = Instant::now();
        while !daemon.ask(&["status"]).status.success() {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "it listens: {}",
                daemon.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        daemon
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        command(self.directory.path(), arguments).output().unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homeostat"));
    let config = directory.join("homeostat.toml");
    if !config.exists() {
        std::fs::write(&config, "").unwrap();
    }
    command
        .arg("--socket")
        .arg(directory.join("io.homeostat"))
        .arg("--state-dir")
        .arg(directory.join("state"))
        .arg("--config")
        .arg(config)
        .args(arguments)
        .stdin(Stdio::null())
        .env_remove("NOTIFY_SOCKET")
        .env_remove("JOURNAL_STREAM");
    command
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn a_daemon_starts_answers_reloads_and_stops_clean() {
    let mut daemon = Daemon::start();
    let status = json(&daemon.ask(&["status", "--json"]));
    assert_eq!(
        (status["schema"].as_u64(), status["mode"].as_str()),
        (Some(1), Some("advise-only"))
    );
    assert_eq!(status["pid"].as_u64(), Some(u64::from(daemon.child.id())));
    assert!(daemon.ask(&["pause"]).status.success());
    assert_eq!(json(&daemon.ask(&["status", "--json"]))["paused"], true);
    assert!(daemon.ask(&["resume"]).status.success());
    assert_eq!(
        daemon.ask(&["explain", "no-such-workload"]).status.code(),
        Some(4)
    );
    assert_eq!(daemon.ask(&["undo", "999"]).status.code(), Some(4));
    assert!(json(&daemon.ask(&["advice", "--json"]))["advice"].is_array());
    assert_eq!(
        daemon.ask(&["advice", "apply", "no-such-advice"]).status.code(),
        Some(4)
    );
    let nosuch = daemon.ask(&["advice", "mute", "nosuch"]);
    assert_eq!(nosuch.status.code(), Some(4));
    let known = String::from_utf8_lossy(&nosuch.stderr).into_owned();
    assert!(known.contains("prefetch/counters"), "{known}");
    assert_eq!(
        json(&daemon.ask(&["--json", "advice", "mute", "memory/growth/y"]))["in_force"],
        true
    );
    assert_eq!(
        json(&daemon.ask(&["advice", "--json"]))["muted"][0],
        "memory/growth/y"
    );
    assert!(
        daemon
            .ask(&["advice", "unmute", "memory/growth/y"])
            .status
            .success()
    );
    assert!(daemon.ask(&["undo", "--all"]).status.success());
    assert!(daemon.ask(&["plan"]).status.success());
    assert!(
        json(&daemon.ask(&["history", "--json"]))["experiments"]
            .as_array()
            .unwrap()
            .is_empty()
    );

    let second = daemon.ask(&["run"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&second.stderr).contains("in use"),
        "{second:?}"
    );

    let config = daemon.directory.path().join("homeostat.toml");
    std::fs::write(&config, "[policy]\nage_min_s = 9\n").unwrap();
    assert!(daemon.ask(&["config", "reload"]).status.success());
    std::fs::write(&config, "[policy]\nage = 9\n").unwrap();
    let refused = daemon.ask(&["config", "reload"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("homeostat.toml:2:1"),
        "{refused:?}"
    );
    std::fs::write(&config, "").unwrap();

    daemon.signal(rustix::process::Signal::TERM);
    let status = daemon.child.wait().unwrap();
    assert!(status.success(), "{}", daemon.log());
    assert!(!daemon.directory.path().join("io.homeostat").exists());
    for line in daemon.log().lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["schema"], 1);
    }
    assert!(daemon.ask(&["restore"]).status.success());
    assert!(
        daemon.ask(&["history"]).status.success(),
        "the past is readable with the daemon dead"
    );
}

#[test]
fn restore_beside_a_daemon_with_another_socket_is_refused() {
    let daemon = Daemon::start();
    let other = Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .args(["--socket", "/nowhere/socket", "--state-dir"])
        .arg(daemon.directory.path().join("state"))
        .arg("restore")
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&other.stderr).contains("a homeostat daemon runs"),
        "{other:?}"
    );
}

#[test]
fn what_runs_after_a_service_leaves_a_living_daemon_alone_and_undoes_what_a_dead_one_left() {
    let mut daemon = Daemon::start();
    let after = |daemon: &Daemon| {
        let output = daemon.ask(&["restore", "--unless-running", "--json"]);
        assert!(output.status.success(), "{output:?}");
        json(&output)["by"].as_str().map(str::to_owned)
    };
    assert_eq!(after(&daemon).as_deref(), Some("nobody"));
    assert!(daemon.ask(&["status"]).status.success(), "it runs as before");
    daemon.signal(rustix::process::Signal::KILL);
    daemon.child.wait().unwrap();
    assert_eq!(after(&daemon).as_deref(), Some("journal"));
}

#[test]
fn a_daemon_that_was_killed_is_followed_by_a_new_one() {
    let mut daemon = Daemon::start();
    daemon.signal(rustix::process::Signal::KILL);
    daemon.child.wait().unwrap();
    assert_eq!(
        daemon.ask(&["status"]).status.code(),
        Some(3),
        "the dead daemon's socket answers nobody"
    );
    assert!(daemon.ask(&["restore"]).status.success());
    let mut again = command(daemon.directory.path(), &["run", "--advise-only"])
        .args(["--set", "policy.workloads=[{match=\"*\",never=true}]"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while !daemon.ask(&["status"]).status.success() {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "the stale socket is replaced"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    again.kill().unwrap();
    again.wait().unwrap();
}

#[test]
fn restore_right_after_a_kill_waits_until_the_daemon_is_gone() {
    let daemon = Daemon::start();
    // Not waited for: the process has its lock and its socket until the kernel comes to them.
    daemon.signal(rustix::process::Signal::KILL);
    let restored = daemon.ask(&["restore", "--json"]);
    assert!(restored.status.success(), "{restored:?}");
    assert_eq!(json(&restored)["by"], "journal");
}

/// In a mount namespace of its own, so that a daemon of this machine is not in the way, nor any of these in its.
#[test]
fn of_two_daemons_that_may_touch_everything_the_second_is_refused_and_one_kept_to_its_own_programs_is_not() {
    const SCRIPT: &str = r#"
mount -t tmpfs tmpfs /run || exit 77
cd "$1"
# All that runs is far below these floors.
touch none.toml
idle="--set age_min_s=86400 --set cpu_min=10000 --set service.lock_memory=false --set service.raise_priority=false"
# In a subshell always, which becomes the daemon: its number is the daemon's.
daemon() { state=$1; shift; exec "$homeostat" --config none.toml --state-dir "$state" --socket "$state.socket" run $idle "$@"; }
listens() { for _ in $(seq 600); do [ -S "$1.socket" ] && return 0; sleep .1; done; return 1; }
daemon first 2> first.log & first=$!
listens first || exit 70
(daemon second 2> second.log); echo $? > second.code
daemon own --set 'policy.workloads=[{match="/nowhere/own"},{match="*",never=true}]' 2> own.log & own=$!
listens own; echo $? > own.code
echo $first > first.pid
# Its lock goes with it.
kill -9 $first
daemon third 2> third.log & third=$!
listens third; echo $? > third.code
kill $own $third
wait
"#;
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh"])
        .arg(directory.path())
        .env("homeostat", env!("CARGO_BIN_EXE_homeostat"))
        .env_remove("NOTIFY_SOCKET")
        .env_remove("JOURNAL_STREAM")
        .stdin(Stdio::null())
        .output();
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap_or_default();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) if [Some(77), Some(1)].contains(&output.status.code()) && read("first.log").is_empty() => {
            eprintln!("no mount namespace can be had here: {output:?}");
            return;
        }
        Ok(output) => panic!("{output:?}: {}", read("first.log")),
        Err(e) => {
            eprintln!("no unshare: {e}");
            return;
        }
    }
    let refusal = read("second.log");
    assert_eq!(read("second.code").trim(), "1", "{refusal}");
    let first = format!(
        "another homeostat daemon runs on this machine (process {}, state directory {})",
        read("first.pid").trim(),
        directory.path().join("first").display()
    );
    assert!(refusal.contains(&first), "{first} in {refusal}");
    assert_eq!(read("own.code").trim(), "0", "{}", read("own.log"));
    assert!(
        read("own.log").contains("exclude there what this one may touch"),
        "{}",
        read("own.log")
    );
    assert_eq!(read("third.code").trim(), "0", "{}", read("third.log"));
}

/// As user nobody in that group, or `None` where this test may not become somebody else.
fn as_nobody(daemon: &Daemon, group: &[&str], arguments: &[&str]) -> Option<Output> {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    // The program and the way to the socket must be open to nobody.
    let program = daemon.directory.path().join("homeostat");
    if !program.exists() {
        // By another process: what another test starts meanwhile would hold our copy open for writing (`Text file busy`).
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_homeostat"))
            .arg(&program)
            .status()
            .unwrap();
        assert!(copied.success());
    }
    std::fs::set_permissions(daemon.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    Command::new("setpriv")
        .arg("--reuid=65534")
        .args(group)
        .arg(program)
        .arg("--socket")
        .arg(daemon.directory.path().join("io.homeostat"))
        .args(arguments)
        .output()
        .ok()
}

#[test]
fn a_member_of_the_group_reads_and_may_not_change_and_others_may_not_even_read() {
    let daemon = Daemon::start();
    let member = ["--regid=65534", "--groups=0"];
    let Some(status) = as_nobody(&daemon, &member, &["status", "--json"]) else {
        eprintln!("not root, or no setpriv: other users can not be tried");
        return;
    };
    assert_eq!(json(&status)["mode"], "advise-only");
    for arguments in [
        &["pause"][..],
        &["resume"],
        &["undo", "--all"],
        &["config", "reload"],
        &["restore"],
    ] {
        let output = as_nobody(&daemon, &member, arguments).unwrap();
        assert_eq!(output.status.code(), Some(5), "{arguments:?}: {output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("only root"),
            "{output:?}"
        );
    }
    assert_eq!(
        json(&daemon.ask(&["status", "--json"]))["paused"],
        false,
        "nothing reached the mind"
    );
    let stranger = ["--regid=65534", "--clear-groups"];
    let output = as_nobody(&daemon, &stranger, &["status"]).unwrap();
    assert_eq!(output.status.code(), Some(5), "{output:?}");
}
