//! `homeostat meter test` on a real process: one at a time, and what an interrupted one says.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Counters of the kernel only: nothing is put into the program.
fn test_of(pid: u32, state: &std::path::Path) -> Command {
    let config = state.join("homeostat.toml");
    std::fs::write(&config, "").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_homeostat"));
    command
        .arg("--config")
        .arg(config)
        .args(["--json", "--state-dir"])
        .arg(state)
        .args(["meter", "test", "--class", "kernel", "--seconds", "600"])
        .arg(pid.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Whether that process has begun to measure.
fn measures(pid: u32) -> bool {
    let beginning = format!("{pid}\n");
    std::fs::read_dir("/run/homeostat/measured").is_ok_and(|entries| {
        entries
            .flatten()
            .any(|e| std::fs::read_to_string(e.path()).is_ok_and(|text| text.starts_with(&beginning)))
    })
}

#[test]
fn one_measures_a_process_at_a_time_and_an_interrupted_test_says_so() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: nobody can be told of the other");
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let busy = Ended(
        Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap(),
    );
    let mut first = test_of(busy.0.id(), state.path()).spawn().unwrap();
    let begin = Instant::now();
    while !measures(first.id()) {
        assert!(
            first.try_wait().unwrap().is_none(),
            "{:?}",
            first.wait_with_output()
        );
        assert!(begin.elapsed() < Duration::from_secs(60), "it begins");
        std::thread::sleep(Duration::from_millis(20));
    }
    let second = test_of(busy.0.id(), state.path()).output().unwrap();
    let text = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{text}");
    let other = format!("another `homeostat meter test` (process {}) measures", first.id());
    assert!(text.contains(&other), "{text}");

    rustix::process::kill_process(
        rustix::process::Pid::from_child(&first),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let output = first.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let seen: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(seen["interrupted"], true, "{seen}");
    assert!(seen["meters"].is_array());
    let said: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    let message = said["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("interrupted after"), "{message}");
}
