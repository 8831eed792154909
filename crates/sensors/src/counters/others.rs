//! Other users of the processor's event counters. While a profiler runs, homeostat closes its counters and opens none.

use homeostat_kernel::{Root, files};

/// Profilers by their name in `/proc/PID/comm` (cut to 15 characters by the kernel). Marked ones program the counters
/// behind the kernel's back, so the kernel's counts and theirs are wrong meanwhile.
const PROFILERS: &[(&str, bool)] = &[
    ("AMDuProfCLI", false),
    ("AMDuProfPcm", true),
    ("amplxe-perf", false),
    ("emon", true),
    ("likwid-perfctr", true),
    ("operf", false),
    ("pcm", true),
    ("pcm-memory", true),
    ("pcm-numa", true),
    ("pcm-sensor-serv", true),
    ("perf", false),
    ("pmdaperfevent", false),
    ("sep", true),
    ("toplev", false),
    ("toplev.py", false),
    ("turbostat", false),
    ("vtune", false),
];

/// A profiler that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Profiler {
    /// Its name.
    pub name: &'static str,
    /// It programs the counters itself, not through the kernel.
    pub direct: bool,
}

/// The profiler with this program name.
pub fn by_program(comm: &str) -> Option<Profiler> {
    PROFILERS
        .iter()
        .find(|(name, _)| *name == comm)
        .map(|(name, direct)| Profiler {
            name,
            direct: *direct,
        })
}

/// Whether the kernel's watchdog for hard lockups holds a counter on every CPU (`kernel.nmi_watchdog`).
pub fn watchdog(root: &Root) -> bool {
    files::text(root, "/proc/sys/kernel/nmi_watchdog").as_deref() == Some("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profilers_are_known_by_their_names() {
        assert_eq!(by_program("perf").map(|p| p.direct), Some(false));
        assert_eq!(by_program("pcm-memory").map(|p| p.direct), Some(true));
        assert_eq!(by_program("perfume"), None);
        for (name, _) in PROFILERS {
            assert!(name.len() <= 15, "{name} is longer than the kernel keeps");
        }
        assert!(PROFILERS.is_sorted());
    }
}
