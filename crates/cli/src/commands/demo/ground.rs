//! What a demo of large pages can show on this machine.
//!
//! Where `transparent_hugepage/enabled` is `always`, the kernel gives private memory large pages at its first touch, and
//! nothing is left to convert. Shared memory has a switch of its own (`shmem_enabled`), which most distributions leave at
//! `never`: it stays in small pages until somebody converts it.

use std::path::Path;

/// Directory of the kernel's switches.
const SWITCHES: &str = "/sys/kernel/mm/transparent_hugepage";

/// The memory that the demo shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ground {
    /// Private memory, as most programs use.
    Private,
    /// Shared memory, as databases use.
    Shared,
    /// Every kind of memory has large pages already, or may not have them.
    Nothing,
}

impl Ground {
    /// What the switches of this machine leave.
    pub(super) fn of_this_machine() -> Self {
        let read = |name: &str| std::fs::read_to_string(Path::new(SWITCHES).join(name)).unwrap_or_default();
        Self::of(&read("enabled"), &read("shmem_enabled"))
    }

    fn of(enabled: &str, shmem_enabled: &str) -> Self {
        match (chosen(enabled), chosen(shmem_enabled)) {
            ("always", "never" | "advise") => Self::Shared,
            ("always", _) => Self::Nothing,
            // Where they are switched off, the daemon says so of the private memory that it finds.
            _ => Self::Private,
        }
    }

    /// What a person is told first, where the usual demo is not shown.
    pub(super) fn explanation(self) -> Option<String> {
        let first = "This machine gives the private memory of programs large pages from the start \
                     (transparent_hugepage/enabled = always), so homeostat has nothing to convert there.";
        match self {
            Self::Private => None,
            Self::Shared => Some(format!(
                "{first}\nShared memory, as databases use it, still has small pages. The demo shows that."
            )),
            Self::Nothing => Some(format!(
                "{first}\nThe setting shmem_enabled leaves nothing to show of shared memory either. The demo of the file \
                 cache follows instead."
            )),
        }
    }

    /// What `latency` is started with.
    pub(super) fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Shared => &["--shared", "sysv"],
            Self::Private | Self::Nothing => &[],
        }
    }

    /// The kind of memory, for people.
    pub(super) fn memory(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Private | Self::Nothing => "private",
        }
    }

    /// What `/proc/PID/smaps_rollup` calls memory of that kind in large pages.
    pub(super) fn kernel_name(self) -> &'static str {
        match self {
            Self::Shared => "ShmemPmdMapped:",
            Self::Private | Self::Nothing => "AnonHugePages:",
        }
    }
}

/// The word in brackets.
fn chosen(text: &str) -> &str {
    text.split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("", |(word, _)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_shows_memory_that_the_kernel_leaves_in_small_pages() {
        let shmem =
            |word: &str| "always within_size advise never deny force".replace(word, &format!("[{word}]"));
        for (enabled, shmem_enabled, ground) in [
            ("always [madvise] never\n", "never", Ground::Private),
            ("always [madvise] never\n", "always", Ground::Private),
            ("always madvise [never]\n", "never", Ground::Private),
            ("", "never", Ground::Private),
            ("[always] madvise never\n", "never", Ground::Shared),
            ("[always] madvise never\n", "advise", Ground::Shared),
            ("[always] madvise never\n", "within_size", Ground::Nothing),
            ("[always] madvise never\n", "force", Ground::Nothing),
            ("[always] madvise never\n", "deny", Ground::Nothing),
        ] {
            assert_eq!(
                Ground::of(enabled, &shmem(shmem_enabled)),
                ground,
                "{enabled} {shmem_enabled}"
            );
        }
        // A kernel without large pages for shared memory has no such switch.
        assert_eq!(Ground::of("[always] madvise never", ""), Ground::Nothing);
    }
}
