//! Pressure stall information (Linux Documentation/accounting/psi.rst): cumulative stall time, reported per interval.

use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::{Root, files};
use homeostat_model::{Nanoseconds, Pressure};

/// Cumulative stall times of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalled {
    /// At least one task.
    pub some: Nanoseconds,
    /// All non-idle tasks.
    pub full: Nanoseconds,
}

impl Stalled {
    /// Stall time since `before`; zero when a counter went back.
    pub fn since(self, before: Self) -> Pressure {
        Pressure {
            some: self.some - before.some,
            full: self.full - before.full,
        }
    }
}

/// Parses `/proc/pressure/{cpu,memory,io}`; lines it does not know are skipped.
pub fn parse(text: &[u8]) -> Stalled {
    let mut stalled = Stalled::default();
    for line in lines(text) {
        let mut parts = words(line);
        let kind = parts.next();
        let total = parts.find_map(|w| w.strip_prefix(b"total=").and_then(number));
        let Some(total) = total.map(|us| Nanoseconds(us.saturating_mul(1000))) else {
            continue;
        };
        match kind {
            Some(b"some") => stalled.some = total,
            Some(b"full") => stalled.full = total,
            _ => {}
        }
    }
    stalled
}

/// Reads one resource (`cpu`, `memory`, `io`); `None` when the kernel has no PSI or it is switched off.
pub fn read(root: &Root, resource: &str) -> Option<Stalled> {
    // With psi=0 the file can be opened, but reading it fails (EOPNOTSUPP).
    files::bytes(root, &format!("/proc/pressure/{resource}"), files::SMALL_FILE_MAX).map(|b| parse(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn microseconds_become_nanoseconds_and_differences_never_go_back() {
        let a = parse(
            b"some avg10=0.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0 avg300=0 total=3\n",
        );
        assert_eq!(
            a,
            Stalled {
                some: Nanoseconds(7000),
                full: Nanoseconds(3000)
            }
        );
        let later = Stalled {
            some: Nanoseconds(9000),
            full: Nanoseconds(1000),
        };
        assert_eq!(
            later.since(a),
            Pressure {
                some: Nanoseconds(2000),
                full: Nanoseconds(0)
            }
        );
    }

    #[test]
    fn unknown_and_cut_lines_are_skipped() {
        assert_eq!(parse(b"most total=5\nsome avg10=0.00 tot"), Stalled::default());
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) { let _ = parse(&bytes); }
    }
}
