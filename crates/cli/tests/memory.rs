//! How much memory the daemon takes, in bytes: at rest, and in a trial of large pages on a redis that holds some 300 MiB.
//!
//! The program of the tests is not optimised, and its code is several times as large as that which is installed. So of this
//! program only what it writes counts, against the limits without [`CODE`]. `HOMEOSTAT_PROGRAM` names an installed program,
//! for which all that is resident counts; `make evidence` does that.
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
/// Time in which the most counts.
const WATCHED: Duration = Duration::from_secs(10);
/// Longest wait for an answer or a trial: a busy machine makes the meters vary, and those are looked at again.
const PATIENCE: Duration = Duration::from_secs(240);

/// A program that ends with the test, however that ends.
struct Running(Child);

impl Running {
    fn start(command: &Command) -> Self {
        let mut bound = Command::new("setpriv");
        bound
            .args(["--pdeathsig", "KILL", "--"])
            .arg(command.get_program())
            .args(command.get_args());
        Self(bound.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
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
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let bytes = |name: &str| -> u64 {
        let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    if installed().is_some() {
        (bytes("Rss:"), max)
    } else {
        (bytes("Anonymous:"), max - CODE)
    }
}

/// The most of it while it is watched.
fn most(pid: u32, max: u64) -> (u64, u64) {
    let begin = Instant::now();
    let mut most = resident(pid, max);
    while begin.elapsed() < WATCHED {
        std::thread::sleep(Duration::from_millis(100));
        most = most.max(resident(pid, max));
    }
    most
}

fn installed() -> Option<PathBuf> {
    std::env::var_os("HOMEOSTAT_PROGRAM").map(PathBuf::from)
}

fn homeostat(directory: &Path, arguments: &[&str]) -> Command {
    let program = installed().unwrap_or_else(|| env!("CARGO_BIN_EXE_homeostat").into());
    let mut command = Command::new(program);
    let files = [
        ("--socket", "socket"),
        ("--state-dir", "state"),
        ("--config", "homeostat.toml"),
    ];
    for (option, name) in files {
        command.arg(option).arg(directory.join(name));
    }
    command.args(arguments);
    command
}

/// Asks for the state until it satisfies a condition.
fn wait_for(directory: &Path, condition: impl Fn(&serde_json::Value) -> bool) {
    let begin = Instant::now();
    loop {
        let output = homeostat(directory, &["status", "--json"]).output().unwrap();
        if serde_json::from_slice(&output.stdout).is_ok_and(|status| condition(&status)) {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{output:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A redis with data, and a client that reads it.
fn loaded(program: &Path, socket: &str) -> [Running; 2] {
    let options = [
        "--port",
        "0",
        "--save",
        "",
        "--dir",
        "/",
        "--disable-thp",
        "no",
        "--enable-debug-command",
        "yes",
        "--unixsocket",
        socket,
    ];
    let server = Running::start(Command::new(program).args(options));
    let begin = Instant::now();
    let fill = ["-s", socket, "debug", "populate", "1000000", "key", "200"];
    while !Command::new("redis-cli")
        .args(fill)
        .output()
        .unwrap()
        .stdout
        .starts_with(b"OK")
    {
        assert!(begin.elapsed() < PATIENCE, "the server takes data");
        std::thread::sleep(Duration::from_millis(100));
    }
    let read = [
        "-s",
        socket,
        "-c",
        "1",
        "-l",
        "-r",
        "1000000",
        "GET",
        "key:__rand_int__",
    ];
    [server, Running::start(Command::new("redis-benchmark").args(read))]
}

#[test]
fn the_daemon_takes_little_memory_at_rest_and_in_a_trial() {
    let server = Path::new("/usr/bin/redis-server");
    let enabled = "/sys/kernel/mm/transparent_hugepage/enabled";
    let enabled = std::fs::read_to_string(enabled).unwrap_or_default();
    if !rustix::process::geteuid().is_root() || !enabled.contains("[madvise]") || !server.exists() {
        eprintln!("skipped: needs root, redis-server and large pages on request, found {enabled:?}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    std::fs::write(directory.join("homeostat.toml"), "").unwrap();
    let program = directory.join("redis-server");
    std::fs::copy(server, &program).unwrap();
    let _redis = loaded(&program, directory.join("redis").to_str().unwrap());
    let rules = format!(
        "policy.workloads=[{{match=\"{}\"}},{{match=\"*\",never=true}}]",
        program.display()
    );
    let mut command = homeostat(directory, &["run"]);
    for setting in [
        rules.as_str(),
        "meters.breakpoints=false",
        "policy.age_min_s=1.0",
        "policy.cpu_min=0.001",
        "policy.memory_min_mib=1",
        "policy.scan_interval_s=1.0",
        "policy.observe_min_s=10.0",
        "policy.meter_samples_min=10",
        "policy.meter_noise_max=5.0",
        "policy.washout_min_s=0.5",
        "policy.measured_candidates_s=[1,2]",
        "policy.placebo_every_s=0.0",
    ] {
        command.args(["--set", setting]);
    }
    let daemon = Running::start(&command);
    wait_for(directory, |status| {
        !status["workloads"].as_array().unwrap().is_empty()
    });
    let (rest, rest_max) = most(daemon.0.id(), REST_MAX);
    wait_for(directory, |status| {
        !status["experiments"].as_array().unwrap().is_empty()
    });
    let (trial, trial_max) = most(daemon.0.id(), TRIAL_MAX);
    println!("{rest} bytes at rest (at most {rest_max}), {trial} in a trial (at most {trial_max})");
    assert!(rest <= rest_max, "{rest} bytes at rest, at most {rest_max}");
    assert!(
        trial <= trial_max,
        "{trial} bytes in a trial, at most {trial_max}"
    );
}
