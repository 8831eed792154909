//! The daemon as a process that still works when the machine is in trouble.

use crate::settings::Service;
use homeostat_engine::view::Budget;
use homeostat_kernel::files::Kept;
use homeostat_kernel::{Root, residence};
use homeostat_model::Bytes;
use homeostat_sensors::processes::{parse_stat, parse_wait};
use rustix::mm::MlockAllFlags;

/// Score for the out-of-memory killer: −500 of −1000..1000 halves our badness, because homeostat holds every undo.
const OOM_SCORE_ADJ: &str = "-500";
/// Heap that the loop may use without a page fault. Measured (`homeostat-cli --test memory`): a trial takes 0.2 MiB.
const HEAP_RESERVE: usize = 1 << 20;
/// Most code kept in memory: a build without optimisation has 30 MiB.
const CODE_MAX: usize = 64 << 20;
/// Nice value: the loop is short, and late when the machine is busy.
const NICE: i32 = -5;

/// Locks memory as the settings want and the kernel permits. Used memory stays, freed memory stays with the allocator,
/// and code, stack and some heap are ready. Called by the loop's thread. Returns refusals for people.
///
/// Call it after probing the capabilities: the probe of the undo splits a large page of our own. The kernel refuses
/// MADV_COLD on locked memory (EINVAL, `madvise(2)`), so a locked daemon would believe that the machine cannot undo.
pub fn lock_memory(service: &Service) -> Vec<String> {
    let mut refused = Vec::new();
    if service.lock_memory {
        // ONFAULT: lock used pages, do not fault in the rest.
        let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
        if let Err(e) = rustix::mm::mlockall(flags) {
            refused.push(format!(
                "memory is not locked ({e}): homeostat may be slow when memory is short; it needs CAP_IPC_LOCK"
            ));
        } else if let Err(e) = residence::lock_code(CODE_MAX) {
            refused.push(format!(
                "the program's code is not kept in memory ({e}; at most {}): what it does for the first time may wait for \
                 the disk",
                Bytes(CODE_MAX as u64)
            ));
        }
        // Also useful without the lock: kept memory need not be requested again.
        if residence::keep_heap() && !residence::touch_heap(HEAP_RESERVE) {
            refused.push(format!(
                "{} of memory are not to be had in advance: what homeostat needs when memory is short it may have to wait for",
                Bytes(HEAP_RESERVE as u64)
            ));
        }
        residence::touch_stack();
    }
    refused
}

/// Whether a process was killed, is exiting or is gone, so that its locks come free in a moment.
pub fn is_ending(pid: u32) -> bool {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
    match (read("stat"), read("status")) {
        (Ok(stat), Ok(status)) => stat_tells_of_end(&stat) || is_killed(&status),
        (Err(e), _) | (_, Err(e)) => {
            // ESRCH: the process ended during the read.
            e.kind() == std::io::ErrorKind::NotFound
                || e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        }
    }
}

/// A zombie, dead, or marked as exiting by the kernel.
fn stat_tells_of_end(stat: &str) -> bool {
    /// `PF_EXITING` (include/linux/sched.h).
    const EXITING: u64 = 4;
    let mut fields = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_ascii_whitespace();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    matches!(state, Some("Z" | "X")) || flags.is_some_and(|flags| flags & EXITING != 0)
}

/// SIGKILL is pending for the process or its first thread.
fn is_killed(status: &str) -> bool {
    const SIGKILL: u64 = 1 << (rustix::process::Signal::KILL.as_raw() - 1);
    status
        .lines()
        .filter_map(|line| {
            line.strip_prefix("SigPnd:")
                .or_else(|| line.strip_prefix("ShdPnd:"))
        })
        .filter_map(|set| u64::from_str_radix(set.trim(), 16).ok())
        .any(|set| set & SIGKILL != 0)
}

/// Waits that the kernel imposed on the loop's thread since it began.
pub struct OwnWaits {
    stat: Kept,
    schedstat: Kept,
    buffer: Vec<u8>,
    start: Waits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Waits {
    faults_minor: u64,
    faults_major: u64,
    /// Nanoseconds in which it was ready and had no CPU.
    for_cpu: u64,
}

impl OwnWaits {
    /// Counts from now on. For the calling thread only.
    pub fn begin() -> Self {
        let root = Root::default();
        let mut waits = Self {
            stat: Kept::new(&root, "/proc/thread-self/stat"),
            schedstat: Kept::new(&root, "/proc/thread-self/schedstat"),
            buffer: Vec::new(),
            start: Waits::default(),
        };
        waits.start = waits.read();
        waits
    }

    fn read(&mut self) -> Waits {
        /// Longer than both files.
        const LONG: usize = 2048;
        let mut waits = Waits::default();
        if let Some(stat) = self.stat.read(&mut self.buffer, LONG).and_then(parse_stat) {
            waits.faults_minor = stat.faults_minor;
            waits.faults_major = stat.faults_major;
        }
        let schedstat = self.schedstat.read(&mut self.buffer, LONG);
        waits.for_cpu = schedstat.and_then(parse_wait).unwrap_or(0);
        waits
    }

    /// Adds what was counted to what homeostat spent.
    pub fn tell(&mut self, budget: &mut Budget) {
        let now = self.read();
        budget.own_faults_minor = now.faults_minor.saturating_sub(self.start.faults_minor);
        budget.own_faults_major = now.faults_major.saturating_sub(self.start.faults_major);
        budget.own_waited_s = now.for_cpu.saturating_sub(self.start.for_cpu) as f64 / 1e9;
    }
}

/// Raises the priority as the settings want and the kernel permits. Returns refusals for people.
pub fn raise_priority(service: &Service) -> Vec<String> {
    let mut refused = Vec::new();
    if service.raise_priority {
        if let Err(e) = rustix::process::setpriority_process(None, NICE) {
            refused.push(format!("the priority is not raised ({e}): it needs CAP_SYS_NICE"));
        }
        if let Err(e) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
            refused.push(format!(
                "not protected from the out-of-memory killer ({e}): it needs CAP_SYS_RESOURCE"
            ));
        }
    }
    refused
}

/// Whether this process has the rights for any change. Capability probes report the rights of single strategies.
///
/// # Errors
/// The missing rights; empty if it has no root right at all.
pub fn may_change_others() -> Result<(), Vec<&'static str>> {
    use rustix::thread::{CapabilitySet, capabilities};
    let has = capabilities(None).map_or(CapabilitySet::empty(), |has| has.effective);
    let missing = missing_of(has);
    match missing.is_empty() {
        true => Ok(()),
        false if has.is_empty() && !rustix::process::geteuid().is_root() => Err(Vec::new()),
        false => Err(missing),
    }
}

/// Missing rights among those of every change: inspecting other processes (`ptrace(2)`: `/proc/PID/exe`, `maps`, `io`),
/// and reading their owners' wishes (`/proc/PID/environ`, otherwise only for the owner).
fn missing_of(has: rustix::thread::CapabilitySet) -> Vec<&'static str> {
    use rustix::thread::CapabilitySet;
    let reads_all = CapabilitySet::DAC_READ_SEARCH | CapabilitySet::DAC_OVERRIDE;
    let needed = [
        ("CAP_SYS_PTRACE", CapabilitySet::SYS_PTRACE),
        ("CAP_DAC_READ_SEARCH", reads_all),
    ];
    let lacks = |any: &CapabilitySet| !has.intersects(*any);
    needed
        .iter()
        .filter(|(_, any)| lacks(any))
        .map(|(name, _)| *name)
        .collect()
}

/// Open file limit: meters of a busy host and the watch over settings need some hundred each.
const FILES: u64 = 8192;

/// Raises the soft limit of open files towards [`FILES`]. A failure does no harm: later users report it.
pub fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(FILES, |hard| hard.min(FILES));
    if limit.current.is_some_and(|soft| soft < wanted) {
        limit.current = Some(wanted);
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_killed_or_gone_is_ending_and_one_that_sleeps_is_not() {
        assert!(!is_ending(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        assert!(!is_ending(pid));
        child.kill().unwrap();
        // From the moment in which the signal is sent: pending, exiting, a zombie.
        for _ in 0..100 {
            assert!(is_ending(pid));
        }
        child.wait().unwrap();
        assert!(is_ending(pid), "gone");

        let alive = "7 (a) Z b) S 1 7 7 0 -1 4194304 1 2";
        assert!(!stat_tells_of_end(alive));
        assert!(
            stat_tells_of_end(&alive.replace("4194304", "4194308")),
            "PF_EXITING"
        );
        assert!(stat_tells_of_end(&alive.replace(" S ", " Z ")));
        let pending =
            |set: &str| is_killed(&format!("Name:\tx\nSigPnd:\t{set}\nShdPnd:\t0000000000000000\n"));
        assert!(pending("0000000000000100") && !pending("0000000000004000"));
    }

    #[test]
    fn page_faults_of_this_thread_are_counted_from_the_beginning_on() {
        let mut waits = OwnWaits::begin();
        let mut budget = Budget::default();
        waits.tell(&mut budget);
        let before = budget.own_faults_minor;
        // More than the allocator has at hand, so that the kernel has to give it page by page.
        let mut room = vec![1u8; 32 << 20];
        std::hint::black_box(&mut room);
        waits.tell(&mut budget);
        assert!(budget.own_faults_minor > before, "{budget:?}");
        assert!(budget.own_waited_s >= 0.0);
    }
}
