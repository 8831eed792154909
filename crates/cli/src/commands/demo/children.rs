//! The processes that the demo starts. Each is ended when its value is dropped, on every path out of the demo.
//!
//! They run in process groups of their own: a Ctrl-C on the terminal reaches the demo alone, which then ends them in
//! the right order (the daemon first, because it undoes its changes while the workloads still live).

use super::ground::Ground;
use homeostat_daemon::client::{Client, ClientError};
use rustix::process::{Pid, Signal, kill_process};
use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A daemon may take its own 60 s to undo everything, and a little more to end.
const DAEMON_PATIENCE: Duration = Duration::from_secs(70);
/// A daemon listens a moment after it starts.
const CONNECT_PATIENCE: Duration = Duration::from_secs(20);
/// Filling redis takes some seconds.
const FILL_PATIENCE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(50);
/// The load generator that comes with redis.
const BENCHMARK: &str = "redis-benchmark";
/// Keys at most, and bytes per value: the more memory is read at random, the more a large page saves, and the longer takes a switch.
/// On a noisy host, with one run each, 800 MiB told a gain after 78 s, and 400 MiB not in 109 s.
const REDIS_KEYS_MAX: u64 = 2_400_000;
const REDIS_VALUE_BYTES: u64 = 300;
/// Keys that a command reads. In three runs each, large pages saved 12 to 19 % of its CPU time, and −6 to 15 % with one key.
pub(super) const REDIS_KEYS_PER_READ: usize = 10;
/// A key at random, as the filling names them.
const REDIS_KEY: &str = "key:__rand_int__";
/// Memory of redis per key, with what it needs beside the value.
const REDIS_KEY_BYTES: u64 = 410;
/// Of keys drawn at random for twice as many writes as there are keys one in seven stays empty.
const WRITES_PER_KEY: u64 = 2;

/// What went wrong with a child.
#[derive(Debug)]
pub(super) struct ChildError {
    what: String,
    source: Option<std::io::Error>,
}

impl ChildError {
    fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            source: None,
        }
    }
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |e| Self {
            what: format!("{what}: {e}"),
            source: Some(e),
        }
    }
}

impl std::fmt::Display for ChildError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for ChildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

/// The demo's own directory, removed at the end.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Result<Self, ChildError> {
        Self::below(&std::env::temp_dir())
    }

    /// A directory whose files are on a disk, and not in memory themselves.
    pub(super) fn on_disk() -> Result<Self, ChildError> {
        /// `TMPFS_MAGIC` of `include/uapi/linux/magic.h`.
        const TMPFS: u64 = 0x0102_1994;
        let is_in_memory = |path: &Path| rustix::fs::statfs(path).is_ok_and(|s| s.f_type as u64 == TMPFS);
        let usual = std::env::temp_dir();
        if is_in_memory(&usual) {
            Self::below(Path::new("/var/tmp"))
        } else {
            Self::below(&usual)
        }
    }

    fn below(directory: &Path) -> Result<Self, ChildError> {
        let path = directory.join(format!("homeostat-demo-{}", std::process::id()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(ChildError::io(format!("cannot create {}", path.display())))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The last lines of a log, for an error message.
fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

fn spawn(
    program: &Path,
    arguments: &[&str],
    scratch: &Scratch,
    name: &str,
) -> Result<(Child, PathBuf), ChildError> {
    let log = scratch.path().join(format!("{name}.log"));
    let file = File::create(&log).map_err(ChildError::io(format!("cannot create {}", log.display())))?;
    let errors = file.try_clone().map_err(ChildError::io("cannot share the log"))?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(errors)
        .process_group(0)
        // What the demo measures must not be preset from outside.
        .env_remove("HOMEOSTAT")
        .env_remove("HOMEOSTAT_STRATEGIES")
        .env_remove("NOTIFY_SOCKET")
        .env_remove("JOURNAL_STREAM")
        .spawn()
        .map_err(ChildError::io(format!("cannot start {}", program.display())))?;
    Ok((child, log))
}

fn send(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

fn wait_at_most(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if begin.elapsed() > patience {
            return None;
        }
        std::thread::sleep(TICK);
    }
}

fn end(child: &mut Child) {
    if matches!(child.try_wait(), Ok(Some(_))) {
        return;
    }
    send(child, Signal::TERM);
    if wait_at_most(child, Duration::from_secs(3)).is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A program whose memory the daemon may improve.
pub(super) struct Workload {
    child: RefCell<Child>,
    pid: u32,
    log: PathBuf,
}

impl Workload {
    pub(super) fn start(
        program: &Path,
        arguments: &[&str],
        scratch: &Scratch,
        name: &str,
    ) -> Result<Self, ChildError> {
        let (child, log) = spawn(program, arguments, scratch, name)?;
        Ok(Self {
            pid: child.id(),
            child: RefCell::new(child),
            log,
        })
    }

    /// Starts a program in a control group, from its first byte of memory on.
    pub(super) fn start_in(
        group: &Path,
        program: &Path,
        arguments: &[&str],
        scratch: &Scratch,
        name: &str,
    ) -> Result<Self, ChildError> {
        let group = group.join("cgroup.procs").to_string_lossy().into_owned();
        let program = program.to_string_lossy().into_owned();
        // The shell joins the group and becomes the program.
        let mut all = vec!["-c", "echo $$ > \"$0\" && exec \"$@\"", &group, &program];
        all.extend(arguments);
        Self::start(Path::new("/bin/sh"), &all, scratch, name)
    }

    /// A number of the last line that it reported.
    pub(super) fn last_report(&self, key: &str) -> Option<f64> {
        let text = std::fs::read_to_string(&self.log).ok()?;
        let line = text.lines().rev().find(|l| l.starts_with("report "))?;
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))?
            .parse()
            .ok()
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Why it ended, if it did.
    pub(super) fn ended(&self) -> Option<String> {
        let status = self.child.borrow_mut().try_wait().ok().flatten()?;
        Some(format!("{status}\n{}", tail(&self.log)))
    }

    /// Memory of the kind that the demo is about in large pages, from the kernel.
    pub(super) fn huge_bytes(&self, ground: Ground) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid)).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix(ground.kernel_name()))?;
        line.split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
            .map(|kib| kib * 1024)
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        end(&mut self.child.borrow_mut());
    }
}

/// The private daemon.
pub(super) struct Daemon {
    child: Child,
    log: PathBuf,
    socket: PathBuf,
}

impl Daemon {
    pub(super) fn start(scratch: &Scratch, config: &Path) -> Result<Self, ChildError> {
        let own = std::env::current_exe().map_err(ChildError::io("cannot find myself"))?;
        let config = config.to_string_lossy();
        let (child, log) = spawn(&own, &["run", "--config", &config], scratch, "daemon")?;
        Ok(Self {
            child,
            log,
            socket: scratch.path().join("io.homeostat"),
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Why it ended, if it did.
    pub(super) fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(format!("{status}\n{}", tail(&self.log)))
    }

    /// Connects as soon as it listens.
    pub(super) fn connect(&mut self) -> Result<Client, ClientError> {
        let begin = Instant::now();
        loop {
            match Client::connect(&self.socket) {
                Err(ClientError::NotRunning(_))
                    if begin.elapsed() < CONNECT_PATIENCE && self.ended().is_none() =>
                {
                    std::thread::sleep(TICK);
                }
                result => return result,
            }
        }
    }

    /// Stops it and says whether it has put everything back.
    pub(super) fn stop(mut self) -> Result<bool, ChildError> {
        send(&self.child, Signal::TERM);
        match wait_at_most(&mut self.child, DAEMON_PATIENCE) {
            Some(status) => Ok(status.success()),
            None => Err(ChildError::new(format!(
                "the private daemon did not end\n{}",
                tail(&self.log)
            ))),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        send(&self.child, Signal::TERM);
        if wait_at_most(&mut self.child, DAEMON_PATIENCE).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A copy of redis-server in the demo's directory: the rule of the private daemon names this very file, so no other
/// redis on the machine is meant. `None` when redis or its load generator is not installed.
pub(super) fn copy_of_redis(scratch: &Scratch) -> Option<PathBuf> {
    let found = |name: &str| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path)
            .map(|d| d.join(name))
            .find(|p| p.is_file())
    };
    found("redis-benchmark")?;
    let copy = scratch.path().join("redis-server");
    std::fs::copy(found("redis-server")?, &copy).ok()?;
    Some(copy)
}

/// A redis-server with data, idle until it gets a load.
pub(super) struct Redis {
    // Declared, and so ended, before the server.
    load: Option<Workload>,
    pub(super) server: Workload,
    keys: u64,
    socket: String,
}

impl Redis {
    /// Keys for a third of the memory that is free.
    pub(super) fn keys() -> u64 {
        let free = memory_available_mib().map_or(u64::MAX, |mib| mib * 1024 * 1024 / 3);
        REDIS_KEYS_MAX.min(free / REDIS_KEY_BYTES).max(1000)
    }

    pub(super) fn start(
        program: &Path,
        keys: u64,
        scratch: &Scratch,
        stop: &AtomicBool,
    ) -> Result<Self, ChildError> {
        let socket = scratch.path().join("redis.sock").to_string_lossy().into_owned();
        let directory = scratch.path().to_string_lossy();
        let server = Workload::start(
            program,
            &[
                "--port",
                "0",
                "--unixsocket",
                &socket,
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
                &directory,
            ],
            scratch,
            "redis-server",
        )?;
        let bench = Path::new(BENCHMARK);
        let begin = Instant::now();
        while !Path::new(&socket).exists() {
            if server.ended().is_some() || begin.elapsed() > CONNECT_PATIENCE || stop.load(Ordering::Relaxed)
            {
                return Err(ChildError::new(format!(
                    "redis-server does not listen\n{}",
                    tail(&server.log)
                )));
            }
            std::thread::sleep(TICK);
        }
        let filling = Workload::start(
            bench,
            &[
                "-s",
                &socket,
                "-t",
                "set",
                "-r",
                &keys.to_string(),
                "-n",
                &(WRITES_PER_KEY * keys).to_string(),
                "-d",
                &REDIS_VALUE_BYTES.to_string(),
                "-P",
                "64",
                "-q",
            ],
            scratch,
            "redis-fill",
        )?;
        while filling.ended().is_none() {
            if begin.elapsed() > FILL_PATIENCE || stop.load(Ordering::Relaxed) {
                return Err(ChildError::new("redis could not be filled in time"));
            }
            std::thread::sleep(TICK);
        }
        Ok(Self {
            load: None,
            server,
            keys,
            socket,
        })
    }

    /// Keys that it was filled with.
    pub(super) fn keys_filled(&self) -> u64 {
        self.keys
    }

    /// Has keys read at random from now on, several with each command.
    pub(super) fn start_load(&mut self, scratch: &Scratch) -> Result<(), ChildError> {
        let keys = self.keys.to_string();
        let mut arguments: Vec<&str> = ["-s", &self.socket, "-r", &keys, "-n", "1000000"].into();
        arguments.extend(["-P", "16", "-c", "8", "-l", "-q", "mget"]);
        arguments.extend([REDIS_KEY; REDIS_KEYS_PER_READ]);
        let load = Workload::start(Path::new(BENCHMARK), &arguments, scratch, "redis-load")?;
        self.load = Some(load);
        Ok(())
    }
}

/// Free memory, so that the demo does not take what others need.
pub(super) fn memory_available_mib() -> Option<u64> {
    let mut text = String::new();
    File::open("/proc/meminfo").ok()?.read_to_string(&mut text).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()
        .map(|kib| kib / 1024)
}
