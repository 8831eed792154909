//! A small memory of its own for a demo: a control group with a limit, so that a shortage of memory can be shown without
//! taking memory from anybody. Removed at the end, after what ran in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where the memory hierarchy of version 1 and the unified hierarchy are.
const VERSION_ONE: &str = "/sys/fs/cgroup/memory";
const UNIFIED: &str = "/sys/fs/cgroup";
/// A process that was told to end is gone after this time.
const PATIENCE: Duration = Duration::from_secs(5);

/// The group, with one below it for each program where version 2 wants that.
#[derive(Debug)]
pub(super) struct Arena {
    path: PathBuf,
    is_version_one: bool,
    below: Vec<PathBuf>,
}

impl Arena {
    /// A group that may use so much memory.
    ///
    /// # Errors
    /// When there is no hierarchy in which that is possible; the message says what to do.
    pub(super) fn new(name: &str, bytes: u64) -> Result<Self, String> {
        let is_version_one = Path::new(VERSION_ONE).join("memory.stat").exists();
        let mount = if is_version_one { VERSION_ONE } else { UNIFIED };
        let offered =
            fs::read_to_string(Path::new(UNIFIED).join("cgroup.subtree_control")).unwrap_or_default();
        if !is_version_one && !offered.split_whitespace().any(|c| c == "memory") {
            return Err(
                "control groups cannot limit memory here: neither version 1 with the memory controller nor version 2 \
                 with memory in /sys/fs/cgroup/cgroup.subtree_control is there"
                    .into(),
            );
        }
        let arena = Self {
            path: Path::new(mount).join(name),
            is_version_one,
            below: Vec::new(),
        };
        let said = |e: io::Error| format!("cannot limit memory with {}: {e}", arena.path.display());
        fs::create_dir(&arena.path).map_err(said)?;
        let limit = if is_version_one {
            "memory.limit_in_bytes"
        } else {
            "memory.max"
        };
        let set = || {
            fs::write(arena.path.join(limit), bytes.to_string())?;
            if is_version_one {
                return Ok(());
            }
            fs::write(arena.path.join("cgroup.subtree_control"), "+memory")
        };
        set().map_err(said)?;
        Ok(arena)
    }

    /// The group in which a program is to start.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn group_for(&mut self, program: &str) -> Result<PathBuf, String> {
        if self.is_version_one {
            return Ok(self.path.clone());
        }
        let group = self.path.join(program);
        fs::create_dir(&group).map_err(|e| format!("cannot make {}: {e}", group.display()))?;
        self.below.push(group.clone());
        Ok(group)
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let begin = Instant::now();
        loop {
            for group in &self.below {
                let _ = fs::remove_dir(group);
            }
            match fs::remove_dir(&self.path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound && begin.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                _ => return,
            }
        }
    }
}

/// The control group that counts the memory of a process, as the kernel names it; `None` when it is gone.
pub(super) fn memory_group_of(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let line = |meant: fn(&str) -> bool| {
        text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            meant(controllers).then(|| path.to_owned())
        })
    };
    line(|controllers| controllers.split(',').any(|c| c == "memory")).or_else(|| line(str::is_empty))
}

/// How the groups begin that homeostat makes for a reader.
pub(super) const OWN_GROUP: &str = "homeostat-reader-";

/// What the group of a process is kept to, in bytes: its limit, or, where homeostat keeps it small from moment to moment (version 1), what
/// it uses now.
pub(super) fn kept_to(pid: u32) -> Option<u64> {
    let path = memory_group_of(pid)?;
    let relative = path.trim_start_matches('/');
    let read = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let one = Path::new(VERSION_ONE).join(relative);
    let is_own = relative
        .rsplit('/')
        .next()
        .is_some_and(|name| name.starts_with(OWN_GROUP));
    if is_own && one.exists() {
        return read(one.join("memory.usage_in_bytes"));
    }
    read(one.join("memory.limit_in_bytes"))
        .or_else(|| read(Path::new(UNIFIED).join(relative).join("memory.high")))
}
