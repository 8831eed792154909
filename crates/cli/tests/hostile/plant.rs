//! Two daemons on this machine: one is attacked, the other is the control run.
//!
//! Both run in a mount namespace with a `/run` of their own, so the machine's lock and the progress directory are not those of
//! another daemon. Each has its own state directory, socket, configuration and log. The attacked daemon may act on the programs that the
//! test names, and on no other; the control run may act on none.
//!
//! Each daemon is watched from outside through its control socket. Its lateness is the largest of two times: the age of the view that
//! it answers with, and the wait for the answer. Everything that the plant starts ends with it.

#![allow(dead_code, reason = "each attack uses its own part")]

use homeostat_daemon::client::Client;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The user of most attacks. It has no groups but its own and need not exist in `/etc/passwd`.
pub(crate) const ATTACKER: u32 = 1000;
/// The loop may be late by so much more than that of the control run. Source: the acceptance of the attack tests.
pub(crate) const LATE_MAX: Duration = Duration::from_secs(1);
/// Memory of the daemon and its processes. Source: the acceptance of the attack tests.
pub(crate) const RESIDENT_MAX: u64 = 64 << 20;
/// A start, a restore or a restart that takes longer counts as stuck. A debug build on a busy machine takes some seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Time until a process is gone that was killed.
pub(crate) const DEATH_PATIENCE: Duration = Duration::from_secs(10);
/// Time between two questions of the watch.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// What the attacked daemon is told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// Patterns of the workloads on which it may act: a program, its whole path, or a unit.
    pub(crate) may_touch: Vec<String>,
    /// Further settings for both daemons, as for `--set`. They come last and win.
    pub(crate) set: Vec<String>,
}

impl Options {
    /// For a daemon that may act on these programs.
    pub(crate) fn touching(patterns: &[&str]) -> Self {
        Self {
            may_touch: patterns.iter().map(|p| (*p).to_owned()).collect(),
            set: Vec::new(),
        }
    }

    /// With one more setting.
    pub(crate) fn set(mut self, assignment: &str) -> Self {
        self.set.push(assignment.to_owned());
        self
    }

    /// The arguments of `run` for a daemon that may act on those programs.
    fn arguments(&self, may_touch: &[String]) -> Vec<String> {
        let mut rules: Vec<String> = may_touch
            .iter()
            .map(|pattern| format!("{{match=\"{pattern}\"}}"))
            .collect();
        rules.push("{match=\"*\",never=true}".to_owned());
        // Low floors, so that small programs of a test are looked at soon. Locked memory and priority are no part of any attack.
        let common = [
            "policy.age_min_s=1.0".to_owned(),
            "policy.cpu_min=0.001".to_owned(),
            "policy.memory_min_mib=1".to_owned(),
            "policy.scan_interval_s=1.0".to_owned(),
            "service.lock_memory=false".to_owned(),
            "service.raise_priority=false".to_owned(),
            format!("policy.workloads=[{}]", rules.join(",")),
        ];
        let mut arguments = vec!["run".to_owned(), "--log".to_owned(), "json".to_owned()];
        for assignment in common.iter().chain(&self.set) {
            arguments.extend(["--set".to_owned(), assignment.clone()]);
        }
        arguments
    }
}

/// The attacked daemon, the control run, and where they live.
pub(crate) struct Plant {
    /// The daemon that is attacked.
    pub(crate) attacked: Daemon,
    /// The control run.
    pub(crate) control: Daemon,
    hall: Hall,
    /// One attack at a time: the load of another would be measured, too. Dropped last.
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Plant {
    /// Starts both daemons and waits until they answer. `None`, with the reason on standard error, where this machine cannot do it.
    pub(crate) fn start(options: &Options) -> Option<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let hall = Hall::open()?;
        let attacked = Daemon::start(&hall, "attacked", &options.arguments(&options.may_touch));
        let control = Daemon::start(&hall, "control", &options.arguments(&[]));
        let plant = Self {
            attacked,
            control,
            hall,
            _alone: alone,
        };
        plant.begin();
        Some(plant)
    }

    /// From now on lateness and memory count. Called by [`start`](Self::start); again when the load of the attack stands.
    pub(crate) fn begin(&self) {
        self.attacked.watch.reset();
        self.control.watch.reset();
    }

    /// A directory that belongs to this user, outside of the daemons' `/run`.
    pub(crate) fn directory(&self, user: u32, name: &str) -> PathBuf {
        let path = self.hall.home.path().join(name);
        fs::create_dir_all(&path).unwrap();
        chown(&path, Some(user), Some(user)).unwrap();
        path
    }

    /// A copy of a program that every user may execute, under that name.
    pub(crate) fn program(&self, source: impl AsRef<Path>, name: &str) -> PathBuf {
        let directory = self.hall.home.path().join("programs");
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(name);
        // By another process: a fork of another test could hold a copy of ours open for writing (`Text file busy`).
        let copied = Command::new("install")
            .args(["-m", "755"])
            .arg(source.as_ref())
            .arg(&path)
            .status()
            .unwrap();
        assert!(copied.success());
        path
    }

    /// A command of this user without other groups and without capabilities, in the mount namespace of the daemons.
    pub(crate) fn as_user<S: AsRef<OsStr>>(
        &self,
        user: u32,
        command: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut inside = self.hall.command();
        inside
            .arg("setpriv")
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .args(["--clear-groups", "--pdeathsig", "KILL", "--"])
            .args(command);
        inside
    }

    /// The same in a user and a mount namespace of its own, in which it appears as root and may mount.
    pub(crate) fn as_user_in_own_namespaces<S: AsRef<OsStr>>(
        &self,
        user: u32,
        command: impl IntoIterator<Item = S>,
    ) -> Command {
        let words = ["unshare", "--user", "--map-root-user", "--mount", "--"];
        let mut inside = self.as_user(user, words);
        inside.args(command);
        inside
    }

    /// The directories below which the daemons of this plant keep their things.
    pub(crate) fn home(&self) -> &Path {
        self.hall.home.path()
    }
}

/// The daemon under attack was late by at most [`LATE_MAX`] more than the control run, lives, and stayed below [`RESIDENT_MAX`].
pub(crate) fn assert_unharmed(attacked: &Daemon, control: &Daemon) {
    if let Err(harm) = unharmed(attacked, control) {
        panic!("{harm}\nlog of the attacked daemon:\n{}", attacked.log());
    }
}

/// As [`assert_unharmed`], with what is wrong as an answer.
pub(crate) fn unharmed(attacked: &Daemon, control: &Daemon) -> Result<(), String> {
    if !attacked.lives() {
        return Err("the attacked daemon has ended".to_owned());
    }
    let (late, usual) = (attacked.lateness(), control.lateness());
    if late > usual + LATE_MAX {
        return Err(format!(
            "the loop was late by {late:?}, that of the control run by {usual:?}"
        ));
    }
    let resident = attacked.resident_max();
    if resident > RESIDENT_MAX {
        return Err(format!(
            "the daemon took {} MiB, the control run {} MiB",
            resident >> 20,
            control.resident_max() >> 20
        ));
    }
    Ok(())
}

/// The mount namespace of the plant, held by a process that sleeps, and the directory of the daemons.
struct Hall {
    holder: Child,
    home: tempfile::TempDir,
}

impl Hall {
    fn open() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can run a daemon that acts, and become another user");
            return None;
        }
        let home = tempfile::tempdir().unwrap();
        fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let ready = home.path().join("ready");
        // /run is what the daemons and the attackers share; /sys, /proc and /tmp are the machine's.
        let script = "mount -t tmpfs -o mode=755 tmpfs /run && touch \"$0\" && exec sleep infinity";
        let holder = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--mount",
                "--propagation",
                "private",
            ])
            .args(["sh", "-c", script])
            .arg(&ready)
            .stdin(Stdio::null())
            .spawn();
        let mut holder = match holder {
            Ok(holder) => holder,
            Err(e) => {
                eprintln!("skipped: needs setpriv and unshare of util-linux: {e}");
                return None;
            }
        };
        let begin = Instant::now();
        while !ready.exists() {
            if let Some(status) = holder.try_wait().unwrap() {
                eprintln!("skipped: no mount namespace can be had here: {status}");
                return None;
            }
            assert!(begin.elapsed() < PATIENCE, "the mount namespace stands");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(Self { holder, home })
    }

    /// `nsenter` into the namespace; what follows is the command. It is executed in place, so its process is that of the child.
    fn command(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--mount=/proc/{}/ns/mnt", self.holder.id()))
            .arg("--")
            .stdin(Stdio::null())
            .env_remove("NOTIFY_SOCKET")
            .env_remove("JOURNAL_STREAM");
        command
    }
}

impl Drop for Hall {
    fn drop(&mut self) {
        end(&mut self.holder);
    }
}

/// Kills and waits within bounds. False when the process is stuck in the kernel.
fn end(child: &mut Child) -> bool {
    let _ = child.kill();
    let begin = Instant::now();
    while begin.elapsed() < DEATH_PATIENCE {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    eprintln!("process {} does not end", child.id());
    false
}

/// Runs a command to its end within bounds; kills it and fails after them.
pub(crate) fn bounded(command: &mut Command, patience: Duration) -> Output {
    let text = format!("{command:?}");
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{text}: {e}"));
    let gather = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.unwrap().read_to_end(&mut bytes);
            bytes
        })
    };
    let out = gather(child.stdout.take().map(|p| Box::new(p) as _));
    let error = gather(child.stderr.take().map(|p| Box::new(p) as _));
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Output {
                status,
                stdout: out.join().unwrap(),
                stderr: error.join().unwrap(),
            };
        }
        if begin.elapsed() >= patience {
            end(&mut child);
            panic!("{text}: no end within {patience:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program of an attack with all its children that stay in its process group. Ends when it is dropped.
pub(crate) struct Running(Child);

impl Running {
    /// Starts the command in a process group of its own. Its output goes to that of the test.
    pub(crate) fn start(command: &mut Command) -> Self {
        let text = format!("{command:?}");
        Self(
            command
                .process_group(0)
                .spawn()
                .unwrap_or_else(|e| panic!("{text}: {e}")),
        )
    }

    /// Process id of the command, which is that of its group.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// The child itself, for its pipes.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// It has not ended.
    pub(crate) fn lives(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        end(&mut self.0);
    }
}

/// A daemon, how it was started, and the watch over it.
pub(crate) struct Daemon {
    directory: PathBuf,
    child: Child,
    start: Box<dyn Fn(&Path) -> Child + Send>,
    ask: Box<dyn Fn(&Path) -> Command + Send>,
    watch: Watch,
}

impl Daemon {
    fn start(hall: &Hall, name: &str, arguments: &[String]) -> Self {
        let directory = hall.home.path().join(name);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("homeostat.toml"), "").unwrap();
        let namespace = format!("--mount=/proc/{}/ns/mnt", hall.holder.id());
        let command = move |directory: &Path, death: &[&str]| {
            let mut command = Command::new("nsenter");
            command
                .args([&namespace, "--"])
                .args(death)
                .arg(env!("CARGO_BIN_EXE_homeostat"))
                .arg("--socket")
                .arg(directory.join("io.homeostat"))
                .arg("--state-dir")
                .arg(directory.join("state"))
                .arg("--config")
                .arg(directory.join("homeostat.toml"))
                .stdin(Stdio::null())
                .env_remove("NOTIFY_SOCKET")
                .env_remove("JOURNAL_STREAM");
            command
        };
        let arguments = arguments.to_vec();
        let again = command.clone();
        let start = move |directory: &Path| {
            let log = fs::File::options()
                .create(true)
                .append(true)
                .open(directory.join("log"))
                .unwrap();
            again(directory, &["setpriv", "--pdeathsig", "KILL", "--"])
                .args(&arguments)
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
                .unwrap()
        };
        let child = start(&directory);
        let watch = Watch::begin(directory.join("io.homeostat"));
        let mut daemon = Self {
            child,
            start: Box::new(start),
            ask: Box::new(move |directory| command(directory, &[])),
            directory,
            watch,
        };
        daemon.wait_until_ready();
        daemon
    }

    fn wait_until_ready(&mut self) {
        let begin = Instant::now();
        while Client::connect(&self.socket())
            .and_then(|mut client| client.status())
            .is_err()
        {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the daemon ended at its start, {status}:\n{}", self.log());
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "the daemon answers within {PATIENCE:?}:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        self.watch.resume(self.child.id());
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its control socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("io.homeostat")
    }

    /// Its state directory.
    pub(crate) fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// Its configuration file.
    pub(crate) fn config(&self) -> PathBuf {
        self.directory.join("homeostat.toml")
    }

    /// What it has logged, JSON lines.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    /// The log of a daemon is free of this text: a secret, or a raw name.
    pub(crate) fn assert_never_logged(&self, text: &str) {
        assert!(!self.log().contains(text), "{text:?} stands in the log");
    }

    /// `homeostat ARGUMENTS` with the socket, state directory and configuration of this daemon, within bounds.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Output {
        bounded((self.ask)(&self.directory).args(arguments), PATIENCE)
    }

    /// The answer of `status --json`.
    pub(crate) fn status(&self) -> serde_json::Value {
        let output = self.ask(&["status", "--json"]);
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Waits until the status is as wanted, and returns it.
    pub(crate) fn wait_for(
        &self,
        what: &str,
        patience: Duration,
        is_it: impl Fn(&serde_json::Value) -> bool,
    ) -> serde_json::Value {
        let begin = Instant::now();
        loop {
            let status = self.status();
            if is_it(&status) {
                return status;
            }
            assert!(
                begin.elapsed() < patience,
                "{what} within {patience:?}: {status:#}"
            );
            std::thread::sleep(WATCH_EVERY);
        }
    }

    /// It runs.
    pub(crate) fn lives(&self) -> bool {
        is_process(self.child.id())
    }

    /// The largest lateness of the loop since the attack began.
    pub(crate) fn lateness(&self) -> Duration {
        self.watch.lateness()
    }

    /// Memory of the daemon and all its children now, in bytes: see [`resident`].
    pub(crate) fn resident(&self) -> u64 {
        resident(self.child.id())
    }

    /// The most memory since the attack began.
    pub(crate) fn resident_max(&self) -> u64 {
        self.watch
            .seen
            .resident
            .load(Ordering::SeqCst)
            .max(self.resident())
    }

    /// Kills the daemon, and fails when it is not gone soon.
    pub(crate) fn kill9(&mut self) {
        self.watch.pause();
        assert!(
            end(&mut self.child),
            "the daemon is gone {DEATH_PATIENCE:?} after SIGKILL"
        );
    }

    /// `homeostat restore --json`, within bounds.
    pub(crate) fn restore(&self) -> Output {
        self.ask(&["restore", "--json"])
    }

    /// Starts it again after [`kill9`](Self::kill9), and waits until it answers.
    pub(crate) fn restart(&mut self) {
        self.child = (self.start)(&self.directory);
        self.wait_until_ready();
    }

    /// Kills it, restores and starts it again: each must work while an attack goes on.
    pub(crate) fn assert_restores_and_restarts(&mut self) {
        self.kill9();
        let restored = self.restore();
        assert!(
            restored.status.success(),
            "{restored:?}\nlog of the daemon:\n{}",
            self.log()
        );
        self.restart();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.watch.pause();
        let children = descendants(self.child.id());
        end(&mut self.child);
        // Helper processes that outlive it are its own.
        for pid in children {
            if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

fn is_process(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The children of a process, their children and so on.
pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(child);
        }
    }
    let mut all = Vec::new();
    let mut next = vec![pid];
    while let Some(parent) = next.pop() {
        let below = children.remove(&parent).unwrap_or_default();
        all.extend(&below);
        next.extend(below);
    }
    all
}

/// Memory of a process and its descendants in bytes: what each has for itself, and the pages of files of the one that maps most of
/// them, since all of them run the same program.
pub(crate) fn resident(pid: u32) -> u64 {
    let mut own = 0;
    let mut files = 0;
    for pid in std::iter::once(pid).chain(descendants(pid)) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok())
                .unwrap_or(0)
                << 10
        };
        own += field("RssAnon:") + field("RssShmem:");
        files = files.max(field("RssFile:"));
    }
    own + files
}

/// What the watch has seen since the attack began.
#[derive(Default)]
struct Seen {
    /// Microseconds.
    late: AtomicU64,
    /// Bytes.
    resident: AtomicU64,
    /// Whose memory counts; 0 while the daemon is down on purpose.
    pid: AtomicU64,
    /// When the question was put that waits for its answer.
    asked: Mutex<Option<Instant>>,
    ended: AtomicBool,
}

impl Seen {
    fn was_late(&self, by: Duration) {
        let by = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        self.late.fetch_max(by, Ordering::SeqCst);
    }
}

/// Asks a daemon all the time, in a thread.
struct Watch {
    seen: Arc<Seen>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn begin(socket: PathBuf) -> Self {
        let seen = Arc::new(Seen::default());
        let watching = seen.clone();
        let thread = std::thread::spawn(move || watch(&socket, &watching));
        Self {
            seen,
            thread: Some(thread),
        }
    }

    fn reset(&self) {
        let mut asked = self.seen.asked.lock().unwrap();
        if asked.is_some() {
            *asked = Some(Instant::now());
        }
        self.seen.late.store(0, Ordering::SeqCst);
        self.seen.resident.store(0, Ordering::SeqCst);
    }

    fn pause(&self) {
        let mut asked = self.seen.asked.lock().unwrap();
        self.seen.pid.store(0, Ordering::SeqCst);
        *asked = None;
    }

    fn resume(&self, pid: u32) {
        self.seen.pid.store(u64::from(pid), Ordering::SeqCst);
    }

    fn lateness(&self) -> Duration {
        if let Some(asked) = *self.seen.asked.lock().unwrap() {
            self.seen.was_late(asked.elapsed());
        }
        Duration::from_micros(self.seen.late.load(Ordering::SeqCst))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.seen.ended.store(true, Ordering::SeqCst);
        // It waits for an answer at most as long as the client does.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(socket: &Path, seen: &Seen) {
    let mut client = None;
    while !seen.ended.load(Ordering::SeqCst) {
        let pid = u32::try_from(seen.pid.load(Ordering::SeqCst)).unwrap();
        if pid == 0 {
            client = None;
        } else {
            // After an answer that failed the question stands, and its time goes on.
            seen.asked.lock().unwrap().get_or_insert_with(Instant::now);
            let answer = match client.take() {
                Some(client) => Ok(client),
                None => Client::connect(socket),
            }
            .and_then(|mut client| client.status().map(|status| (client, status)));
            let mut asked = seen.asked.lock().unwrap();
            if let (Ok((again, status)), Some(since)) = (answer, *asked) {
                let age = Duration::try_from_secs_f64(status.view_age_s.unwrap_or(0.0)).unwrap_or_default();
                seen.was_late(age.max(since.elapsed()));
                *asked = None;
                client = Some(again);
            }
            drop(asked);
            seen.resident.fetch_max(resident(pid), Ordering::SeqCst);
        }
        std::thread::sleep(WATCH_EVERY);
    }
}
