//! How much memory the daemon takes, in bytes: at rest, and in a trial of a real server.
//!
//! The program of the tests is not optimised, and its code is several times as large as that which is installed. So of this
//! program only what it writes counts, against the limits without [`CODE`]. `HOMEOSTAT_PROGRAM` names an installed program,
//! for which all that is resident counts.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Most that may be resident at rest, in bytes.
const REST_MAX: u64 = 16 << 20;
/// Most that may be resident in a trial, in bytes.
const TRIAL_MAX: u64 = 24 << 20;
/// Share of both that is code and libraries, in bytes. Measured of the installed program; `tools/make-dist` bounds its size.
const CODE: u64 = 10 << 20;
/// Longest wait for an answer or a trial: a busy machine makes the meters vary, and those are looked at again.
const PATIENCE: Duration = Duration::from_secs(240);

/// A program that ends with the test.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap(),
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What counts of the resident memory of a process, and the most that it may be.
fn resident(pid: u32, max: u64) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let bytes = |name: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    if installed().is_some() {
        (bytes("VmRSS:"), max)
    } else {
        (bytes("RssAnon:") + bytes("RssShmem:"), max - CODE)
    }
}

fn installed() -> Option<PathBuf> {
    std::env::var_os("HOMEOSTAT_PROGRAM").map(PathBuf::from)
}

fn daemon(directory: &Path, arguments: &[&str]) -> Command {
    let program = installed().unwrap_or_else(|| env!("CARGO_BIN_EXE_homeostat").into());
    std::fs::write(directory.join("homeostat.toml"), "").unwrap();
    let mut command = Command::new(program);
    for (option, name) in [
        ("--socket", "socket"),
        ("--state-dir", "state"),
        ("--config", "homeostat.toml"),
    ] {
        command.arg(option).arg(directory.join(name));
    }
    command.args(arguments);
    command
}

/// Asks for the state until it satisfies a condition.
fn wait_for(directory: &Path, condition: impl Fn(&serde_json::Value) -> bool) {
    let begin = Instant::now();
    loop {
        let output = daemon(directory, &["status", "--json"]).output().unwrap();
        if serde_json::from_slice(&output.stdout).is_ok_and(|status| condition(&status)) {
            return;
        }
        let log = || std::fs::read_to_string(directory.join("log")).unwrap_or_default();
        assert!(begin.elapsed() < PATIENCE, "{output:?}\n{}", log());
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn the_daemon_takes_little_memory_at_rest_and_in_a_trial() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a daemon that tries changes needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let socket = directory.join("redis");
    let program = directory.join("redis-server");
    std::fs::copy("/usr/bin/redis-server", &program).unwrap();
    let _server = Running::start(Command::new(&program).args([
        "--port",
        "0",
        "--save",
        "",
        "--dir",
        "/",
        "--unixsocket",
        socket.to_str().unwrap(),
    ]));
    let begin = Instant::now();
    while !socket.exists() {
        assert!(begin.elapsed() < PATIENCE, "the server listens");
        std::thread::sleep(Duration::from_millis(20));
    }
    let _client = Running::start(Command::new("redis-benchmark").args([
        "-s",
        socket.to_str().unwrap(),
        "-c",
        "1",
        "-t",
        "get",
        "-l",
    ]));
    let rules = format!(
        "policy.workloads=[{{match=\"{}\"}},{{match=\"*\",never=true}}]",
        program.display()
    );
    let mut command = daemon(directory, &["run", "--calibrate"]);
    for setting in [
        rules.as_str(),
        "policy.age_min_s=1.0",
        "policy.cpu_min=0.001",
        "policy.memory_min_mib=1",
        "policy.scan_interval_s=1.0",
        "policy.observe_min_s=10.0",
        "policy.meter_samples_min=10",
        "policy.meter_noise_max=5.0",
        "policy.washout_min_s=0.5",
        "policy.measured_candidates_s=[1,2]",
    ] {
        command.args(["--set", setting]);
    }
    let log = std::fs::File::create(directory.join("log")).unwrap();
    let daemon = Running::start(command.stderr(log));
    wait_for(directory, |status| {
        !status["workloads"].as_array().unwrap().is_empty()
    });
    let (rest, rest_max) = resident(daemon.0.id(), REST_MAX);
    wait_for(directory, |status| {
        !status["experiments"].as_array().unwrap().is_empty()
    });
    let (trial, trial_max) = resident(daemon.0.id(), TRIAL_MAX);
    println!("{rest} bytes at rest (at most {rest_max}), {trial} in a trial (at most {trial_max})");
    assert!(rest <= rest_max, "{rest} bytes at rest, at most {rest_max}");
    assert!(
        trial <= trial_max,
        "{trial} bytes in a trial, at most {trial_max}"
    );
}
