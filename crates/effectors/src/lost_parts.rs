//! Which parts of a program's files are read again, in which order, and how.
//!
//! The kernel keeps written and sequentially read pages in units of up to 2 MiB (large folios). It finds these faster:
//! a program with single-page `pread` does some ten percent more work. Read-ahead starts each hole with single pages
//! and grows the units (`page_cache_ra_order` in Linux `mm/readahead.c`). Where it meets a page in memory it falls back
//! to single pages. A program that lost everything brings back such pages by itself.
//!
//! So if at least half of 2 MiB was evicted, the rest is dropped and all of it read **as a unit**
//! ([`read_as_unit`](homeostat_kernel::cache::read_as_unit), [`Part::as_unit`]). For some milliseconds this takes pages
//! of the protected program, and the kernel forgets its evictions there. So this is done only:
//! * In the first pass, if all missing pages fit with room to spare.
//! * In files with large units ([`has_large_units`]) not mapped by the program, because mapped pages cannot be dropped.
//! * If still true at the moment of the request, and nothing waits to be written.

use homeostat_kernel::Root;
use homeostat_kernel::cache::{Pages, UNIT, pages_of};
use homeostat_kernel::release::{kernel_release, kernel_version};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, StatxFlags, makedev, statx};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Steps by which ranges are divided.
pub(super) const DIVISIONS: [u64; 3] = [32 << 20, NEIGHBOURHOOD, PART];
/// A neighbourhood is in use or not as a whole. It may be read as a unit.
const NEIGHBOURHOOD: u64 = UNIT;
/// Read whole if pages of it were evicted.
const PART: u64 = 128 << 10;
const ASKED_MAX: u64 = 2 << 20;
/// Most bytes brought back without knowing whether the program uses them.
const BLIND_MAX: u64 = 1 << 30;
/// Share of evicted pages from which a neighbourhood is read as a unit: numerator, denominator.
const TAKEN: (u64, u64) = (1, 2);
/// Parts remembered, in some megabytes of memory.
const KNOWN_MAX: usize = 128 * 1024;
/// File systems with large units, and their first kernel version.
const LARGE_UNITS: [(&[u8], (u32, u32)); 2] = [(b"ext4", (6, 16)), (b"xfs", (5, 18))];

/// A part with evicted pages.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) file: Arc<OwnedFd>,
    pub(super) range: Range<u64>,
    /// Bytes of it that are not in memory.
    pub(super) absent: u64,
    /// Pages of its neighbourhood that are in memory.
    near: u64,
    /// A neighbourhood of which at least half was evicted: the rest is dropped, and all of it read as a unit.
    ///
    /// Pages of others in the file are dropped, too, and read a moment later. The program's group is then charged.
    pub(super) as_unit: bool,
}

/// Whether the kernel keeps files of this file system in large units.
pub(super) fn has_large_units(root: &Root, kind: &[u8]) -> bool {
    let since = LARGE_UNITS.iter().find(|(name, _)| *name == kind);
    let version = kernel_version(&kernel_release(root));
    // A kernel without large pages has no large units either, and its large pages must be of this size.
    let size = root.path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    let size = std::fs::read_to_string(size)
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok());
    size == Some(UNIT)
        && since
            .zip(version)
            .is_some_and(|((_, since), version)| version >= *since)
}

/// Adds the parts of a range with evicted pages.
///
/// # Errors
/// As `cachestat(2)`.
pub(super) fn taken_of(
    file: &Arc<OwnedFd>,
    in_units: bool,
    range: Range<u64>,
    divisions: &[u64],
    near: u64,
    parts: &mut Vec<Part>,
) -> std::io::Result<()> {
    let pages = match pages_of(&**file, range.start, range.end - range.start) {
        // A kind of file without this count has lost nothing.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Pages::default(),
        pages => pages?,
    };
    // One page is enough: if memory is 200 times as fast as storage, one missing page of 200 halves the program's work.
    if pages.evicted == 0 {
        return Ok(());
    }
    let length = range.end - range.start;
    let is_neighbourhood = divisions.len() == 1;
    let near = if is_neighbourhood { pages.cached } else { near };
    let as_unit = in_units && is_neighbourhood && is_unit_gone(pages, length);
    match divisions.split_first() {
        Some((step, finer)) if !as_unit => {
            let mut from = range.start;
            while from < range.end {
                let to = range.end.min(from + step);
                taken_of(file, in_units, from..to, finer, near, parts)?;
                from = to;
            }
        }
        _ => {
            let page = rustix::param::page_size() as u64;
            parts.push(Part {
                file: Arc::clone(file),
                absent: length.saturating_sub(pages.cached * page),
                range,
                near,
                as_unit,
            });
        }
    }
    Ok(())
}

/// Whether at least half of a whole neighbourhood was evicted, and nothing of it waits to be written.
fn is_unit_gone(pages: Pages, length: u64) -> bool {
    let all = length.div_ceil(rustix::param::page_size() as u64);
    length == NEIGHBOURHOOD && pages.evicted * TAKEN.1 >= all * TAKEN.0 && pages.unwritten == 0
}

/// Parts to bring into so much room, to be taken from the end, and the number of used parts left out for want of room.
pub(super) fn choose(mut parts: Vec<Part>, room: u64) -> (Vec<Part>, u64) {
    let all: u64 = parts.iter().map(|part| part.absent).sum();
    let mut too_many = 0;
    let is_all = all <= room.min(BLIND_MAX);
    if !is_all {
        parts = parts.into_iter().flat_map(divided).collect();
        parts.retain(|part| part.near > 0);
        // The sort is stable: among equals the file opened first comes first.
        parts.sort_by_key(|part| std::cmp::Reverse(part.near));
        let mut sum = 0;
        let before = parts.len();
        parts.retain(|part| {
            let fits = sum + part.absent <= room;
            sum += if fits { part.absent } else { 0 };
            fits
        });
        too_many = (before - parts.len()) as u64;
    }
    // In file order: a disk with a head reads them in one go.
    parts.sort_by_key(|part| std::cmp::Reverse((part.file.as_raw_fd(), part.range.start)));
    (parts, too_many)
}

/// Divides a unit into parts. If room is short, the remaining pages may be the program's most used ones, and it may
/// never have used most of the rest.
fn divided(unit: Part) -> Vec<Part> {
    if !unit.as_unit {
        return vec![unit];
    }
    let mut parts = Vec::new();
    match taken_of(
        &unit.file,
        false,
        unit.range.clone(),
        &[PART],
        unit.near,
        &mut parts,
    ) {
        Ok(()) => {
            for part in &mut parts {
                part.near = unit.near;
            }
            parts
        }
        Err(_) => vec![Part {
            as_unit: false,
            ..unit
        }],
    }
}

/// Whether a part begins at the end of another one of that file, and both are read in one go.
fn follows(part: &Part, next: &Part) -> bool {
    let is_next = Arc::ptr_eq(&part.file, &next.file) && part.range.end == next.range.start;
    is_next && !part.as_unit && !next.as_unit
}

/// The range read in one go, from the last of these parts on without a gap, and its number of parts.
pub(super) fn run(parts: &[Part], last: &Part) -> (Range<u64>, usize) {
    let (mut end, mut count) = (last.range.end, 1);
    for pair in parts.windows(2).rev() {
        let [next, part] = pair else { break };
        if !follows(part, next) || next.range.end - last.range.start > ASKED_MAX {
            break;
        }
        end = next.range.end;
        count += 1;
    }
    (last.range.start..end, count)
}

/// Whether at least half of a part is still gone. False if unknown.
pub(super) fn is_gone(part: &Part) -> bool {
    let length = part.range.end - part.range.start;
    pages_of(&*part.file, part.range.start, length).is_ok_and(|pages| is_unit_gone(pages, length))
}

/// The parts of a range not covered by these disjoint ranges (begin, end).
fn gaps(range: Range<u64>, there: &BTreeMap<u64, u64>) -> Vec<Range<u64>> {
    let before = there.range(..range.start).next_back();
    let within = there.range(range.start..range.end.max(range.start));
    let (mut from, mut gaps) = (range.start, Vec::new());
    for (&start, &end) in before.into_iter().chain(within) {
        if start > from {
            gaps.push(from..start);
        }
        from = from.max(end);
    }
    if from < range.end {
        gaps.push(from..range.end);
    }
    gaps
}

/// Identity of a file: device, inode, and birth time, because inode numbers are reused.
pub(super) type Identity = (u64, u64, i64, u32);

pub(super) fn identity(file: &OwnedFd) -> Option<Identity> {
    let told = statx(
        file,
        c"",
        AtFlags::EMPTY_PATH,
        StatxFlags::BTIME | StatxFlags::INO,
    )
    .ok()?;
    let device = makedev(told.stx_dev_major, told.stx_dev_minor);
    Some((
        device,
        told.stx_ino,
        told.stx_btime.tv_sec,
        told.stx_btime.tv_nsec,
    ))
}

/// Ranges of files that were read for a program before, or chosen for reading. A later pass for the same action reads
/// what was dropped and not read. The kernel forgets evictions of dropped pages, or for want of memory.
#[derive(Debug, Default)]
pub(super) struct Known(BTreeMap<Identity, BTreeMap<u64, u64>>);

impl Known {
    pub(super) fn note(&mut self, parts: &[Part]) {
        let known: usize = self.0.values().map(BTreeMap::len).sum();
        if known + parts.len() > KNOWN_MAX {
            self.0.clear();
        }
        for of_file in parts.chunk_by(|one, other| Arc::ptr_eq(&one.file, &other.file)) {
            let Some(identity) = of_file.first().and_then(|part| identity(&part.file)) else {
                continue;
            };
            let known = self.0.entry(identity).or_default();
            for part in of_file {
                let end = known.entry(part.range.start).or_default();
                *end = part.range.end.max(*end);
            }
        }
    }

    /// Adds remembered, missing ranges of a file that are not among the parts of that range (from `first` on).
    ///
    /// # Errors
    /// As `cachestat(2)`.
    pub(super) fn add_missing(
        &self,
        file: &Arc<OwnedFd>,
        identity: Identity,
        range: &Range<u64>,
        first: usize,
        parts: &mut Vec<Part>,
    ) -> std::io::Result<()> {
        let Some(known) = self.0.get(&identity) else {
            return Ok(());
        };
        let told = parts.get(first..).unwrap_or_default();
        let there: BTreeMap<u64, u64> = told
            .iter()
            .map(|part| (part.range.start, part.range.end))
            .collect();
        let page = rustix::param::page_size() as u64;
        // Remembered ranges from here on are not added yet.
        let mut from = range.start;
        for (&start, &end) in known.range(range.clone()) {
            // The file may be shorter now.
            for gap in gaps(start.max(from)..end.min(range.end), &there) {
                let length = gap.end - gap.start;
                let cached = pages_of(&**file, gap.start, length)?.cached;
                let absent = length.saturating_sub(cached * page);
                if absent > 0 {
                    parts.push(Part {
                        file: Arc::clone(file),
                        range: gap,
                        absent,
                        // It counts as used: it was read before, or chosen for reading.
                        near: cached.max(1),
                        as_unit: false,
                    });
                }
            }
            from = from.max(end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const MIB: u64 = 1 << 20;

    fn file() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/dev/null").unwrap().into())
    }

    fn part(file: &Arc<OwnedFd>, at: u64, absent: u64, near: u64) -> Part {
        Part {
            file: Arc::clone(file),
            range: at * PART..(at + 1) * PART,
            absent,
            near,
            as_unit: false,
        }
    }

    /// A neighbourhood that is read as a unit.
    fn unit(file: &Arc<OwnedFd>, at: u64) -> Part {
        Part {
            file: Arc::clone(file),
            range: at * NEIGHBOURHOOD..(at + 1) * NEIGHBOURHOOD,
            absent: NEIGHBOURHOOD,
            near: 1,
            as_unit: true,
        }
    }

    fn starts(parts: &[Part]) -> Vec<u64> {
        parts.iter().rev().map(|part| part.range.start / PART).collect()
    }

    #[test]
    fn all_that_was_taken_is_chosen_where_there_is_room_for_what_is_not_in_memory() {
        let file = file();
        let parts = vec![part(&file, 3, PART, 0), part(&file, 1, PART, 0)];
        let (chosen, too_many) = choose(parts.clone(), 2 * PART);
        assert_eq!((starts(&chosen), too_many), (vec![1, 3], 0));
        // Nothing shows that the program works on them.
        let (chosen, too_many) = choose(parts, 2 * PART - 1);
        assert_eq!((starts(&chosen), too_many), (vec![], 0));
    }

    #[test]
    fn where_room_is_short_what_the_program_works_on_most_comes_first() {
        let file = file();
        let parts = vec![
            part(&file, 0, PART, 1),
            part(&file, 40, PART, 9),
            part(&file, 80, PART, 0),
            part(&file, 120, PART / 2, 5),
        ];
        let (chosen, too_many) = choose(parts.clone(), PART + PART / 2);
        assert_eq!((starts(&chosen), too_many), (vec![40, 120], 1));
        // One that does not fit keeps no smaller one out.
        let (chosen, too_many) = choose(parts, PART - 1);
        assert_eq!((starts(&chosen), too_many), (vec![120], 2));
    }

    #[test]
    fn what_lies_together_is_read_in_one_go_up_to_two_mebibytes() {
        let (file, other) = (file(), file());
        let mut parts: Vec<Part> = (0..40).map(|at| part(&file, at, PART, 1)).collect();
        parts.push(part(&file, 50, PART, 1));
        parts.push(part(&other, 51, PART, 1));
        // The same place of another file is another part.
        parts.push(part(&file, 60, PART, 1));
        parts.push(part(&other, 60, PART, 1));
        parts.reverse();
        let (mut ranges, all) = (Vec::new(), parts.len());
        let mut taken = 0;
        while let Some(last) = parts.last() {
            let (range, count) = run(&parts, last);
            parts.truncate(parts.len() - count);
            taken += count;
            ranges.push((range.start / PART, range.end / PART));
        }
        assert_eq!(
            ranges,
            [
                (0, 16),
                (16, 32),
                (32, 40),
                (50, 51),
                (51, 52),
                (60, 61),
                (60, 61)
            ]
        );
        assert_eq!(taken, all);
        assert_eq!(16 * PART, 2 * MIB);
        // A unit is read by itself.
        let parts = [unit(&file, 4), unit(&file, 3), part(&file, 47, PART, 1)];
        assert_eq!(run(&parts, &parts[2]), (47 * PART..48 * PART, 1));
        assert_eq!(run(&parts[..2], &parts[1]), (6 * MIB..8 * MIB, 1));
    }

    #[test]
    fn units_are_read_only_where_all_that_is_missing_fits() {
        let file = file();
        let parts = || (0..8).map(|at| unit(&file, at)).collect::<Vec<_>>();
        let (chosen, _) = choose(parts(), 8 * NEIGHBOURHOOD);
        assert_eq!(chosen.iter().filter(|part| part.as_unit).count(), 8);
        // Of these the kernel tells nothing (a device), so nothing of them is known to be lost any more.
        let (chosen, _) = choose(parts(), 7 * NEIGHBOURHOOD);
        assert!(!chosen.iter().any(|part| part.as_unit));
    }

    #[test]
    fn what_was_to_be_read_is_remembered_also_when_the_kernel_has_forgotten() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        let file = Arc::new(OwnedFd::from(file));
        let identity = identity(&file).unwrap();
        if pages_of(&*file, 0, 1).is_err() {
            eprintln!("skipped: cachestat is not there (before Linux 6.5)");
            return;
        }
        let mut known = Known::default();
        // Of 1 to 2 MiB all is there; from 4 MiB on nothing ever was.
        let mut parts = vec![
            unit(&file, 3),
            unit(&file, 2),
            part(&file, 35, PART, 0),
            part(&file, 8, PART, 0),
        ];
        known.note(&parts);
        parts.clear();
        let all = 0..8 * MIB;
        known.add_missing(&file, identity, &all, 0, &mut parts).unwrap();
        let ranges: Vec<_> = parts
            .iter()
            .map(|part| (part.range.start, part.range.end))
            .collect();
        assert_eq!(ranges, [(4 * MIB, 6 * MIB), (6 * MIB, 8 * MIB)], "each once");
        assert!(
            parts
                .iter()
                .all(|part| !part.as_unit && part.near > 0 && part.absent == 2 * MIB)
        );
        // What the kernel tells is not told again, nor what lies in another range or another file.
        known.add_missing(&file, identity, &all, 0, &mut parts).unwrap();
        assert_eq!(parts.len(), 2);
        known
            .add_missing(&file, identity, &(0..4 * MIB), 2, &mut parts)
            .unwrap();
        known
            .add_missing(&file, (identity.0, identity.1, 0, 0), &all, 2, &mut parts)
            .unwrap();
        assert_eq!(parts.len(), 2);
        // Of what the kernel tells a part only, the rest is added.
        let mut parts = vec![part(&file, 40, PART, 0)];
        known.add_missing(&file, identity, &all, 0, &mut parts).unwrap();
        let ranges: Vec<_> = parts
            .iter()
            .map(|part| (part.range.start / PART, part.range.end / PART))
            .collect();
        assert_eq!(ranges, [(40, 41), (32, 40), (41, 48), (48, 64)]);
        // It does not grow for ever.
        let many: Vec<Part> = (0..KNOWN_MAX as u64).map(|at| part(&file, at, PART, 0)).collect();
        known.note(&many);
        assert_eq!(known.0.values().map(BTreeMap::len).sum::<usize>(), KNOWN_MAX);
    }

    #[test]
    fn of_a_unit_at_least_half_was_taken_and_nothing_waits_to_be_written() {
        let all = NEIGHBOURHOOD / rustix::param::page_size() as u64;
        let pages = |cached, unwritten, evicted| Pages {
            cached,
            unwritten,
            evicted,
        };
        for (pages, expected) in [
            (pages(0, 0, all), true),
            (pages(all / 2, 0, all / 2), true),
            (pages(all / 2 + 1, 0, all / 2 - 1), false),
            // Much of it was never there, or it is forgotten.
            (pages(0, 0, all / 2 - 1), false),
            (pages(1, 1, all - 1), false),
            (pages(0, 0, 0), false),
        ] {
            assert_eq!(is_unit_gone(pages, NEIGHBOURHOOD), expected, "{pages:?}");
        }
        // The end of a file is none.
        assert!(!is_unit_gone(pages(0, 0, all), NEIGHBOURHOOD - 4096));
    }

    #[test]
    fn what_is_in_memory_of_a_file_that_was_written_is_not_gone() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 2 << 20]).unwrap();
        let mut part = unit(&Arc::new(file.into()), 0);
        assert!(!is_gone(&part));
        part.file = self::file();
        assert!(!is_gone(&part), "what cannot be told");
    }

    #[test]
    fn units_are_kept_by_some_file_systems_since_some_time() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert!(!has_large_units(&root, b"ext4"), "the kernel is not known");
        write("proc/sys/kernel/osrelease", "6.16.0-1-amd64\n");
        write("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
        assert!(has_large_units(&root, b"ext4") && has_large_units(&root, b"xfs"));
        // Pages of 16 KiB.
        write("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "33554432\n");
        assert!(!has_large_units(&root, b"ext4") && !has_large_units(&root, b"xfs"));
        write("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
        for kind in [&b"ext2"[..], b"btrfs", b"f2fs", b""] {
            assert!(!has_large_units(&root, kind));
        }
        write("proc/sys/kernel/osrelease", "6.12.0\n");
        assert!(!has_large_units(&root, b"ext4") && has_large_units(&root, b"xfs"));
        std::fs::remove_dir_all(directory.path().join("sys/kernel")).unwrap();
        assert!(!has_large_units(&root, b"xfs"), "no large pages at all");
    }
}
