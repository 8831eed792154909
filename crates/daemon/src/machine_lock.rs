//! One daemon per machine. Two with separate state directories would take each other's changes for noise.
//!
//! The lock is a `flock` on a file that only root may open. The kernel releases it however the process ends, also after
//! `kill -9`. Any user could bind an abstract socket and so block the daemon; nobody else can take this file. It is the
//! same in every network namespace. The service's sandbox leaves its directory open, and a container gets it from the
//! host (`packaging/Containerfile`). A container without it is not seen.
//!
//! A daemon that changes nothing, or only what its rules name, needs no lock ([`needed`]): rehearsals and `homeostat
//! demo`. The demo refuses to start with the machine's daemon running, since that would find its programs, too.

use crate::process::is_ending;
use homeostat_engine::{Mode, Policy, Profile};
use rustix::fs::{FlockOperation, Mode as FileMode, OFlags};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Directory with a lock file for each workload being measured.
const MEASURED: &str = "/run/homeostat/measured";

/// The file. Not below the run directory of the configuration: two daemons may have two of those.
pub const FILE: &str = "/run/homeostat/daemon.lock";
const TEXT_MAX: u64 = 8 * 1024;
/// Time for the kernel to release a killed process's locks, after freeing its memory.
pub const DYING_PATIENCE: Duration = Duration::from_secs(2);
/// … and for a process that is seen to end: it closes all its counters and breakpoints.
const ENDING_PATIENCE: Duration = Duration::from_secs(15);
const DYING_TICK: Duration = Duration::from_millis(20);

/// The holder of the lock, as far as recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub pid: Option<u32>,
    /// Its state directory.
    pub state_directory: Option<PathBuf>,
}

/// Why the lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum MachineLockError {
    /// Another daemon has it.
    #[error(
        "another homeostat daemon runs on this machine{}, and two would try changes on the same programs\n  hint: {}",
        holder_text(.0), remedy(.0)
    )]
    Held(Holder),
    /// The file cannot be used. The daemon works without, and would not notice another one.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The holder in words.
pub fn holder_text(holder: &Holder) -> String {
    match (holder.pid, &holder.state_directory) {
        (Some(pid), Some(directory)) => {
            format!(" (process {pid}, state directory {})", directory.display())
        }
        (Some(pid), None) => format!(" (process {pid})"),
        (None, Some(directory)) => format!(
            " (it has {FILE} locked; state directory {}, in a container if that is not here)",
            directory.display()
        ),
        (None, None) => format!(" (it has {FILE} locked)"),
    }
}

fn remedy(holder: &Holder) -> String {
    let stop = match holder.pid {
        Some(pid) => format!("stop it first (`systemctl stop homeostat`, or `kill {pid}`)"),
        None => format!("stop it first (`systemctl stop homeostat`; `fuser {FILE}` finds it)"),
    };
    format!(
        "{stop}; with --advise-only, or with rules that name its programs and exclude all others, this one may run beside it\n  \
         hint: `homeostat restore` puts back what a daemon of this state directory has left, if any"
    )
}

/// Whether a daemon with this policy must be the only one: it changes more than rules name. A rule that excludes all
/// (`match = "*"`, `never = true`) spares earlier rules and stops changes that reach all. Controllers of hosts ask no
/// rule.
pub fn needed(policy: &Policy) -> bool {
    let only_what_is_named = policy
        .workloads
        .iter()
        .any(|rule| rule.pattern == "*" && rule.never)
        && policy.profile != Profile::AutotuneClassic;
    policy.mode == Mode::Act && !only_what_is_named
}

/// The lock, until dropped.
#[derive(Debug)]
pub struct MachineLock(File);

impl Drop for MachineLock {
    fn drop(&mut self) {
        // A process forked just before may still have the file open.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

impl MachineLock {
    /// Takes the lock for the daemon with this state directory. Waits a moment for a dying holder.
    ///
    /// # Errors
    /// [`MachineLockError`].
    pub fn take(file: &Path, state_directory: &Path) -> Result<Self, MachineLockError> {
        let held_by = |e: &MachineLockError| match e {
            MachineLockError::Held(holder) => Some(holder.pid),
            MachineLockError::File { .. } => None,
        };
        while_dying(held_by, || Self::try_to_take(file, state_directory))
    }

    fn try_to_take(path: &Path, state_directory: &Path) -> Result<Self, MachineLockError> {
        let failed = |source: io::Error| MachineLockError::File {
            path: path.to_owned(),
            source,
        };
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(failed)?;
        }
        // If a person removes the file before the lock, nobody else finds the locked file. Try again.
        for _ in 0..8 {
            let mut file = open(path, OFlags::CREATE).map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(MachineLockError::Held(read(&mut file))),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(failed(e.into())),
            }
            if is_the_one_at(&file, path) {
                // Only for a friendlier refusal of another daemon.
                let _ = file
                    .set_len(0)
                    .and_then(|()| file.write_all(text(state_directory).as_bytes()));
                return Ok(Self(file));
            }
        }
        Err(failed(io::Error::other("somebody removes it again and again")))
    }
}

/// Allows one `homeostat meter test` per workload: two would mistake each other's breakpoints and cost.
#[derive(Debug)]
pub struct Measuring {
    path: PathBuf,
    /// Released after the file is removed.
    _lock: MachineLock,
}

impl Drop for Measuring {
    fn drop(&mut self) {
        // While locked: whoever opened the file meanwhile finds another one in its place.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Measuring {
    /// Begins to measure this workload. `None` without root's rights: then no breakpoint could disturb another test.
    ///
    /// # Errors
    /// Who else measures it.
    pub fn begin(workload: &str, state_directory: &Path) -> Result<Option<Self>, Holder> {
        Self::begin_in(Path::new(MEASURED), workload, state_directory)
    }

    fn begin_in(directory: &Path, workload: &str, state_directory: &Path) -> Result<Option<Self>, Holder> {
        // File names have at most 255 bytes. Workloads with the same shortened name measure one after the other.
        let name: String = workload
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .take(200)
            .collect();
        let path = directory.join(format!("{name}.lock"));
        match MachineLock::take(&path, state_directory) {
            Ok(lock) => Ok(Some(Self { path, _lock: lock })),
            Err(MachineLockError::Held(holder)) => Err(holder),
            Err(MachineLockError::File { .. }) => Ok(None),
        }
    }
}

/// The holder of the lock, without taking it. `None` if nobody has it, or if that is invisible.
pub fn holder(path: &Path) -> Option<Holder> {
    let mut file = open(path, OFlags::empty()).ok()?;
    // A shared lock, released with the file: two checks do not see each other.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Some(read(&mut file)),
        _ => None,
    }
}

/// Tries again while the holder is ending ([`ENDING_PATIENCE`] at most) or unknown ([`DYING_PATIENCE`]).
pub(crate) fn while_dying<T, E>(
    held_by: impl Fn(&E) -> Option<Option<u32>>,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let begin = Instant::now();
    let mut seen_alive = false;
    loop {
        let result = attempt();
        let Some(pid) = result.as_ref().err().and_then(&held_by) else {
            return result;
        };
        let alive = pid.is_some_and(|pid| !is_ending(pid));
        // Check twice: a signalled process looks alive until it is marked as exiting.
        let patience = if pid.is_some() && !alive {
            ENDING_PATIENCE
        } else {
            DYING_PATIENCE
        };
        if alive && seen_alive || begin.elapsed() >= patience {
            return result;
        }
        seen_alive = alive;
        std::thread::sleep(DYING_TICK);
    }
}

fn open(path: &Path, more: OFlags) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | more;
    Ok(rustix::fs::open(path, flags, FileMode::RUSR | FileMode::WUSR)?.into())
}

fn is_the_one_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn text(state_directory: &Path) -> String {
    format!(
        "{}\n{}\n{}\n",
        std::process::id(),
        state_directory.display(),
        space_of_numbers()
    )
}

/// Namespace of process ids: a process in a container has another id here.
fn space_of_numbers() -> String {
    std::fs::read_link("/proc/self/ns/pid").map_or_else(|_| String::new(), |link| link.display().to_string())
}

fn read(file: &mut File) -> Holder {
    let mut text = String::new();
    let _ = file.rewind();
    let _ = file.take(TEXT_MAX).read_to_string(&mut text);
    let mut lines = text.lines();
    let pid = lines.next().and_then(|line| line.trim().parse().ok());
    let state_directory = lines.next().map(PathBuf::from);
    let is_here = lines.next().is_none_or(|space| space == space_of_numbers());
    Holder {
        pid: pid.filter(|_| is_here),
        state_directory,
    }
}

/// The lock as the daemon holds it: taken when its policy first needs it, and kept from then on.
#[derive(Debug)]
pub struct Sole {
    file: PathBuf,
    state_directory: PathBuf,
    lock: Option<MachineLock>,
    /// Locking failed, but not because of another daemon; already reported.
    without: bool,
}

impl Sole {
    /// For the daemon with this state directory; not locked yet.
    pub fn new(file: &Path, state_directory: &Path) -> Self {
        Self {
            file: file.to_owned(),
            state_directory: state_directory.to_owned(),
            lock: None,
            without: false,
        }
    }

    /// Ensures that a daemon with this policy may run. Returns warnings for people.
    ///
    /// # Errors
    /// Another daemon runs: the policy must not come into force.
    pub fn ensure(&mut self, policy: &Policy) -> Result<Option<String>, MachineLockError> {
        if self.lock.is_some() {
            return Ok(None);
        }
        if !needed(policy) {
            // A daemon that only advises disturbs nobody.
            let beside = holder(&self.file).filter(|_| policy.mode == Mode::Act);
            return Ok(beside.map(|holder| {
                format!(
                    "another homeostat daemon runs on this machine{}: exclude there what this one may touch ([[policy.workloads]] with never = true)",
                    holder_text(&holder)
                )
            }));
        }
        match MachineLock::take(&self.file, &self.state_directory) {
            Ok(lock) => {
                self.lock = Some(lock);
                Ok(None)
            }
            Err(MachineLockError::File { .. }) if self.without => Ok(None),
            Err(e @ MachineLockError::File { .. }) => {
                self.without = true;
                Ok(Some(format!(
                    "another homeostat daemon on this machine would not be noticed, and would disturb the trials: {e}"
                )))
            }
            Err(e @ MachineLockError::Held(_)) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_engine::WorkloadRule;

    fn rule(pattern: &str, never: bool) -> WorkloadRule {
        WorkloadRule {
            pattern: pattern.into(),
            never,
            ..WorkloadRule::default()
        }
    }

    #[test]
    fn the_second_is_told_who_is_the_first_and_the_lock_goes_with_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("run/daemon.lock");
        assert_eq!(holder(&file), None);
        let first = MachineLock::take(&file, Path::new("/first")).unwrap();
        let own = Holder {
            pid: Some(std::process::id()),
            state_directory: Some("/first".into()),
        };
        assert_eq!(holder(&file).as_ref(), Some(&own));
        let second = MachineLock::take(&file, Path::new("/second"));
        let Err(MachineLockError::Held(who)) = &second else {
            panic!("{second:?}")
        };
        assert_eq!(who, &own);
        let text = second.unwrap_err().to_string();
        for part in [
            &std::process::id().to_string(),
            "/first",
            "hint:",
            "--advise-only",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        drop(first);
        assert_eq!(holder(&file), None);
        // A longer text of an earlier holder does not shine through.
        MachineLock::take(&file, Path::new("/3")).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("\n/3\n"));
        // The number of one in a container is another process's here.
        let theirs = MachineLock::take(&file, Path::new("/theirs")).unwrap();
        std::fs::write(&file, "1\n/theirs\npid:[1]\n").unwrap();
        let who = holder(&file).unwrap();
        assert_eq!((who.pid, who.state_directory), (None, Some("/theirs".into())));
        drop(theirs);
    }

    #[test]
    fn of_two_who_measure_a_workload_the_second_is_told_of_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let begin = |workload: &str| Measuring::begin_in(directory.path(), workload, Path::new("/state"));
        let first = begin("user.slice/latency[7]").unwrap().unwrap();
        assert_eq!(
            begin("user.slice/latency[7]").unwrap_err().pid,
            Some(std::process::id())
        );
        let other = begin("latency[8]").unwrap();
        assert!(other.is_some());
        drop(other);
        drop(first);
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            0,
            "no file is left"
        );
        assert!(begin("user.slice/latency[7]").unwrap().is_some());
        assert!(matches!(
            Measuring::begin_in(Path::new("/proc/no"), "a", Path::new("/state")),
            Ok(None)
        ));
    }

    #[test]
    fn who_changes_nothing_or_only_what_is_named_needs_no_lock() {
        let mut policy = Policy::default();
        assert!(needed(&policy));
        for mode in [Mode::AdviseOnly, Mode::Calibrate] {
            assert!(!needed(&Policy {
                mode,
                ..Policy::default()
            }));
        }
        policy.workloads = vec![rule("/opt/own", false), rule("redis*", true)];
        assert!(needed(&policy), "all that no rule names");
        policy.workloads.push(rule("*", false));
        assert!(needed(&policy));
        policy.workloads = vec![rule("/opt/own", false), rule("*", true)];
        assert!(!needed(&policy));
        policy.profile = Profile::AutotuneClassic;
        assert!(needed(&policy), "its controllers change the host's settings");
    }

    #[test]
    fn a_policy_that_needs_the_lock_later_takes_it_then() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("daemon.lock");
        let advising = Policy {
            mode: Mode::AdviseOnly,
            ..Policy::default()
        };
        let named = Policy {
            workloads: vec![rule("*", true)],
            ..Policy::default()
        };
        let (mut a, mut b) = (
            Sole::new(&file, Path::new("/a")),
            Sole::new(&file, Path::new("/b")),
        );
        assert!(matches!(a.ensure(&advising), Ok(None)));
        assert!(matches!(b.ensure(&Policy::default()), Ok(None)));
        assert!(matches!(
            a.ensure(&Policy::default()),
            Err(MachineLockError::Held(_))
        ));
        assert!(matches!(a.ensure(&advising), Ok(None)));
        assert!(a.ensure(&named).unwrap().unwrap().contains("/b"), "it is told");
        drop(b);
        assert!(matches!(a.ensure(&Policy::default()), Ok(None)));
        assert!(holder(&file).is_some());
        // Where no lock can be had it is said once, and the daemon works.
        let mut nowhere = Sole::new(Path::new("/proc/no/daemon.lock"), Path::new("/c"));
        let said = nowhere.ensure(&Policy::default()).unwrap().unwrap();
        assert!(said.contains("/proc/no/daemon.lock"), "{said}");
        assert!(matches!(nowhere.ensure(&Policy::default()), Ok(None)));
    }
}
