//! One check of a group: its use, its allowance, and the reclaim of the excess.

use homeostat_kernel::Root;
use homeostat_sensors::memory_group::{MemoryGroup, UNLIMITED_FROM};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

/// Divisor of the limit: a group may grow by this share between two checks, so that much below the limit is taken away.
pub(super) const GROWTH: u64 = 4;
pub(super) const MIB: u64 = 1 << 20;

/// Removes a limit in version 1.
const UNLIMITED: &[u8] = b"-1";

/// Homeostat's limits are a page below whole MiB: the kernel rounds to pages, and hardly anybody else writes that.
pub(super) fn less() -> u64 {
    rustix::param::page_size() as u64
}

/// Files that stay open because they are read and written again and again.
pub(super) struct Files {
    usage: File,
    limit: File,
}

/// Use to leave a group with this allowance, undroppable memory and recent growth. A fast reader grows in leaps of
/// read-ahead. It is left with less by its growth, to come to its limit and not beyond. [`GROWTH`] stays droppable.
pub(super) fn tight(allowed: u64, held: u64, limit: u64, growth: u64) -> u64 {
    let least = limit / GROWTH;
    let most = allowed.saturating_sub(held).saturating_sub(least).max(least);
    (allowed.saturating_sub(growth.clamp(least, most)) / MIB * MIB).saturating_sub(less())
}

/// Whether a limit is a momentary one, left by a daemon killed at that moment.
pub(crate) fn is_of_a_moment(found: u64) -> bool {
    // An unlimited group of version 1 also shows a page less than whole MiB.
    found < UNLIMITED_FROM && (found + less()) % MIB == 0
}

impl Files {
    pub(super) fn open(root: &Root, group: &MemoryGroup) -> io::Result<Self> {
        let path = |leaf: &str| root.path(&format!("{}/{leaf}", group.path));
        Ok(Self {
            usage: File::open(path("memory.usage_in_bytes"))?,
            limit: OpenOptions::new()
                .read(true)
                .write(true)
                .open(path("memory.limit_in_bytes"))?,
        })
    }

    /// Those of a test.
    #[cfg(test)]
    pub(super) fn of(usage: File, limit: File) -> Self {
        Self { usage, limit }
    }

    pub(super) fn limit(&self) -> io::Result<u64> {
        Self::number(&self.limit)
    }

    pub(super) fn lift(&self) -> io::Result<()> {
        self.limit.write_all_at(UNLIMITED, 0)
    }

    fn number(file: &File) -> io::Result<u64> {
        let mut text = [0; 32];
        let length = loop {
            match file.read_at(&mut text, 0) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        let text = text.get(..length).unwrap_or_default();
        homeostat_kernel::bytes::number(text.trim_ascii())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no number"))
    }

    /// Reclaims until no more than this is left. False if the kernel finds nothing more.
    fn take(&self, bytes: u64) -> io::Result<bool> {
        match self.limit.write_at(bytes.to_string().as_bytes(), 0) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Ok(false),
            // Interrupted: the kernel reclaimed what it could until then, and set nothing.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(e) => return Err(e),
        }
        // Lifted despite a signal or an unreadable limit, but not if somebody else has set another one in between.
        if self.limit().map_or(true, |now| now == bytes) {
            self.lift()?;
        }
        Ok(true)
    }
}

/// Input of a check.
pub(super) struct View {
    pub(super) root: Root,
    pub(super) group: MemoryGroup,
    pub(super) limit: u64,
    pub(super) allowed: u64,
    pub(super) held: u64,
    pub(super) growth: u64,
    /// Measure undroppable memory in any case, or if the group is above its allowance or left with little.
    pub(super) asks: bool,
    pub(super) asks_above: bool,
    /// Try again for memory that the kernel did not find.
    pub(super) forgets: bool,
}

/// Allowance of a group: its limit, plus its undroppable memory if that is more than half of the limit.
pub(super) fn allowed(held: u64, limit: u64) -> u64 {
    if held > limit / 2 {
        held.saturating_add(limit)
    } else {
        limit
    }
}

/// Allowance if the kernel found nothing more and left so much. Fresh read-ahead cannot be dropped for some
/// milliseconds. So half of the limit as free room is enough, and [`tight`] leaves a quarter.
pub(super) fn allowed_when_stuck(allowed: u64, left: u64, limit: u64) -> u64 {
    if left.saturating_add(limit / 2) > allowed {
        left.saturating_add(limit)
    } else {
        allowed
    }
}

/// Result of one moment.
pub(super) enum Moment {
    Look(Look),
    /// A limit is in force, perhaps that of the other thread.
    Limited {
        is_of_a_moment: bool,
    },
}

/// Findings of one moment.
pub(super) struct Look {
    pub(super) found: u64,
    pub(super) left: u64,
    /// Undroppable memory, if measured.
    pub(super) held: Option<u64>,
    /// Whether the kernel ran out of memory to take before the goal was reached.
    pub(super) is_stuck: bool,
}

/// Checks a group and reclaims its excess, unless somebody limits it.
pub(super) fn moment(files: &Files, view: &View) -> io::Result<Moment> {
    let found = Files::number(&files.usage)?;
    let limit = files.limit()?;
    if limit < UNLIMITED_FROM {
        let is_of_a_moment = is_of_a_moment(limit);
        return Ok(Moment::Limited { is_of_a_moment });
    }
    // A group left with little is measured as often as one above: it must keep more than its undroppable memory.
    let is_tight = view.growth > view.limit / GROWTH;
    let asks = view.asks || view.asks_above && (found > view.allowed || is_tight);
    let held = asks.then(|| view.group.held(&view.root)).flatten();
    let now_allowed = held.map_or(view.allowed, |held| allowed(held, view.limit));
    // Memory not found before is not tried for at once.
    let (least_held, least_allowed) = if view.forgets {
        (0, 0)
    } else {
        (view.held, view.allowed)
    };
    let wanted = tight(
        now_allowed.max(least_allowed),
        held.map_or(view.held, |held| held.max(least_held)),
        view.limit,
        view.growth,
    );
    let mut look = Look {
        found,
        left: found,
        held,
        is_stuck: false,
    };
    if found > wanted {
        look.is_stuck = !files.take(wanted)?;
        look.left = Files::number(&files.usage)?;
    }
    Ok(Moment::Look(look))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_for_a_moment_is_no_limit_that_a_person_writes() {
        for limit in [16, 33, 37, 48] {
            for held in [0, 5, limit / 2, limit / 2 + 1, 100, 1000] {
                for growth in [0, 9, 20, 5000] {
                    let (limit, held) = (limit * MIB, held * MIB);
                    let allowed = allowed(held, limit);
                    let tight = tight(allowed, held, limit, growth * MIB);
                    assert!(is_of_a_moment(tight) && tight <= allowed - limit / 4);
                    assert!(
                        tight + 2 * MIB >= held + limit / 4,
                        "who grows finds something to drop"
                    );
                }
            }
        }
        for theirs in [
            50_000_000,
            64 << 20,
            150 << 20,
            1 << 30,
            (1 << 20) + 4096,
            (1 << 63) - 4096,
        ] {
            assert!(!is_of_a_moment(theirs), "{theirs}");
        }
    }

    #[test]
    fn a_reader_is_left_with_more_where_the_kernel_leaves_more_than_half_and_always_with_something_to_drop() {
        let limit = 37 * MIB;
        for left in 0..=80 {
            for growth in [0, 9, 17, 5000] {
                let left = left * MIB;
                let wanted = tight(allowed_when_stuck(limit, left, limit), left, limit, growth * MIB);
                assert!(wanted + 2 * MIB >= left + limit / GROWTH, "{left}: {wanted}");
            }
        }
        // What is being read ahead, 16 MiB, and no more.
        assert_eq!(allowed_when_stuck(limit, 16 * MIB, limit), limit);
        assert_eq!(allowed_when_stuck(limit, 19 * MIB, limit), 56 * MIB);
        assert_eq!(allowed_when_stuck(limit, 50 * MIB, limit), 87 * MIB);
    }
}
