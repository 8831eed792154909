//! Which parts of a program's files are read for it, in which order, and how.
//!
//! The kernel keeps what a program writes, or reads in order, in units of up to 2 MiB (large folios), which are found faster than
//! single pages: a program that reads single pages by `pread` does some ten percent more with them. It makes them where it
//! reads ahead, the larger the longer the same file is read in order (`page_cache_ra_order` in Linux `mm/readahead.c`), and falls back
//! to single pages for the rest of what it reads ahead where it comes upon a page that is in memory already. A program that lost
//! everything brings back a page here and there by itself, which is enough for that (measured: docs/file-cache.md).
//!
//! So where next to nothing is left over a stretch of a file, that is dropped, too, shortly before the kernel reads ahead there
//! ([`Part::anew`]). This takes pages of a program that is to be protected, and the kernel forgets with them what it had taken, so:
//!
//! * only when the reader is contained, and where all that is missing fits;
//! * only in files of which the kernel keeps large units, on disks of which it is known how far they read ahead ([`ahead`]);
//! * only what is still so in the moment in which it is asked for, and nothing that waits to be written;
//! * no further ahead than needed, and what was to be read is [remembered](Known): what was dropped and not read, for whatever
//!   reason the pass ended, a later pass of the same containment or of the same trial reads.
//!
//! Of a file that somebody else has open as well his pages are dropped with the others, until they are read a moment later, and count to the program's
//! group from then on.

use crate::Root;
use crate::sensors::topology::{kernel_release, kernel_version};
use crate::sys::cache::{Pages, pages_of};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, StatxFlags, major, makedev, minor, statx};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::sync::Arc;

/// Ranges are divided so far.
pub(super) const DIVISIONS: [u64; 3] = [32 << 20, NEIGHBOURHOOD, PART];
/// A neighbourhood is either worked on or not.
const NEIGHBOURHOOD: u64 = 2 << 20;
/// What is read whole if pages of it were taken.
const PART: u64 = 128 << 10;
/// What is read at one time.
const ASKED_MAX: u64 = 2 << 20;
/// Most that is brought back where it is not known whether the program works on it.
const BLIND_MAX: u64 = 1 << 30;
/// Next to nothing is left of a neighbourhood of which the kernel has taken so many of so many pages …
const TAKEN: (u64, u64) = (3, 4);
/// … and of which so many of so many are in memory at most.
const LEFT: (u64, u64) = (1, 8);
/// Shorter stretches are not worth it: the kernel's units begin small in each.
const STRETCH_MIN: u64 = 16 << 20;
/// What is left is dropped so many times as far ahead as the disk reads …
const AHEAD: u64 = 2;
/// … but no further than this: where a disk reads further nothing is dropped.
const AHEAD_MAX: u64 = 16 << 20;
/// It is dropped by so much at one time, where there is so much: that may wait for all CPUs.
const DROPPED_STEP: u64 = 8 << 20;
/// Parts that are remembered: some megabytes of memory.
const KNOWN_MAX: usize = 128 * 1024;
/// File systems that keep files in large units, and since when.
const LARGE_UNITS: [(&[u8], (u32, u32)); 2] = [(b"ext4", (6, 16)), (b"xfs", (5, 18))];

/// A part of which pages were taken.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) file: Arc<OwnedFd>,
    pub(super) range: Range<u64>,
    /// What of it is not in memory, in bytes.
    pub(super) absent: u64,
    /// Pages of its neighbourhood that are.
    near: u64,
    /// It is a neighbourhood of which next to nothing is left, and that is dropped before it is read; so far ahead, in bytes.
    anew: Option<u64>,
}

/// How far ahead what is left of a file is dropped before it is read anew; `None` where that gives no larger units, or is not known
/// to. By the kind of its file system and its device.
pub(super) fn ahead(root: &Root, kind: &[u8], device: u64) -> Option<u64> {
    let (_, since) = LARGE_UNITS.iter().find(|(name, _)| *name == kind)?;
    let version = kernel_version(&kernel_release(root))?;
    // A kernel without large pages has no large units, either.
    if version < *since || !root.path("/sys/kernel/mm/transparent_hugepage").exists() {
        return None;
    }
    let device = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A part of a disk reads ahead as the disk does.
    let kib = ["queue", "../queue"].into_iter().find_map(|queue| {
        let path = root.path(&format!("{device}/{queue}/read_ahead_kb"));
        fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    })?;
    let ahead = kib
        .checked_mul(AHEAD << 10)?
        .checked_next_multiple_of(NEIGHBOURHOOD)?;
    (1..=AHEAD_MAX).contains(&ahead).then_some(ahead)
}

/// Adds the parts of a range of which the kernel has taken pages.
///
/// # Errors
/// As `cachestat(2)`.
pub(super) fn taken_of(
    file: &Arc<OwnedFd>,
    ahead: Option<u64>,
    range: Range<u64>,
    divisions: &[u64],
    near: u64,
    parts: &mut Vec<Part>,
) -> std::io::Result<()> {
    let pages = match pages_of(&**file, range.start, range.end - range.start) {
        // A file of a kind of which the kernel tells nothing has lost nothing.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Pages::default(),
        pages => pages?,
    };
    // However few: a program that reads 200 times as fast from memory as from storage does half of its work when one page of 200 is
    // missing.
    if pages.evicted == 0 {
        return Ok(());
    }
    let length = range.end - range.start;
    let is_neighbourhood = divisions.len() == 1;
    let near = if is_neighbourhood { pages.cached } else { near };
    let anew = ahead.filter(|_| is_neighbourhood && is_nearly_gone(pages, length));
    match divisions.split_first() {
        Some((step, finer)) if anew.is_none() => {
            let mut from = range.start;
            while from < range.end {
                let to = range.end.min(from + step);
                taken_of(file, ahead, from..to, finer, near, parts)?;
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
                anew,
            });
        }
    }
    Ok(())
}

/// Whether of a neighbourhood next to nothing is left, of what was there once, and nothing that waits to be written.
fn is_nearly_gone(pages: Pages, length: u64) -> bool {
    let all = length.div_ceil(rustix::param::page_size() as u64);
    pages.evicted * TAKEN.1 >= all * TAKEN.0 && pages.cached * LEFT.1 <= all * LEFT.0 && pages.unwritten == 0
}

/// What is brought back of these into so much room, to be taken from the end, and how much of what the program works on is left out
/// for want of room.
pub(super) fn choose(mut parts: Vec<Part>, room: u64) -> (Vec<Part>, u64) {
    let all: u64 = parts.iter().map(|part| part.absent).sum();
    let mut too_many = 0;
    let is_all = all <= room.min(BLIND_MAX);
    if !is_all {
        parts.retain(|part| part.near > 0);
        // The sort is stable: of equal ones what the program opened first comes first.
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
    // In the order in which they lie: a disk with a head reads them in one go.
    parts.sort_by_key(|part| std::cmp::Reverse((part.file.as_raw_fd(), part.range.start)));
    for stretch in parts.chunk_by_mut(|later, earlier| follows(earlier, later)) {
        let length: u64 = stretch.iter().map(|part| part.range.end - part.range.start).sum();
        if !is_all || length < STRETCH_MIN {
            // What is left in places are perhaps the pages that it uses most.
            for part in stretch {
                part.anew = None;
            }
        }
    }
    (parts, too_many)
}

/// Whether a part begins where another one of that file ends, and both are read in the same way.
fn follows(part: &Part, next: &Part) -> bool {
    Arc::ptr_eq(&part.file, &next.file) && part.range.end == next.range.start && part.anew == next.anew
}

/// The range that is read in one go with the last of these parts, what follows without a gap, and how many parts that is.
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

/// What is to be dropped of a file next, before it is read up to `next`, from the last of these parts on, when all is dropped up to `done`: what is left
/// of those that are read anew, as far ahead as the disk may read, also across others that are read as they are. Where `is_gone` tells that next to
/// nothing is left no more, that is read as it is.
pub(super) fn to_be_dropped(
    parts: &mut [Part],
    next: u64,
    done: u64,
    is_gone: impl Fn(&Part) -> bool,
) -> Option<Range<u64>> {
    let file = Arc::clone(&parts.last()?.file);
    let mut found: Option<Range<u64>> = None;
    for part in parts
        .iter_mut()
        .rev()
        .take_while(|part| Arc::ptr_eq(&part.file, &file))
    {
        let Some(ahead) = part.anew.filter(|_| part.range.end > done) else {
            // Where something was found it ends here; and nobody looks further ahead than this.
            if found.is_some() || part.range.start >= next.saturating_add(AHEAD_MAX) {
                break;
            }
            continue;
        };
        let furthest = match &found {
            None => next.saturating_add(ahead),
            Some(range) => range.start.saturating_add(DROPPED_STEP.max(ahead)),
        };
        if part.range.start >= furthest || found.as_ref().is_some_and(|range| range.end != part.range.start) {
            break;
        }
        if !is_gone(part) {
            part.anew = None;
            continue;
        }
        let start = found.map_or(part.range.start, |range| range.start);
        found = Some(start..part.range.end);
    }
    found
}

/// Whether next to nothing is left of a part now; not if that cannot be told.
pub(super) fn is_gone(part: &Part) -> bool {
    let length = part.range.end - part.range.start;
    pages_of(&*part.file, part.range.start, length).is_ok_and(|pages| is_nearly_gone(pages, length))
}

/// What of a range none of these covers, which do not overlap, by where they begin and end.
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

/// Which file that is: device, inode, and when it was born, for numbers of inodes are given again.
pub(super) type Identity = (u64, u64, i64, u32);

/// Which file is open here.
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

/// Parts of its files that were read for a program before, or were to be, from where to where. The kernel forgets what it has
/// taken, of what is dropped and where it is short of memory for its marks.
#[derive(Debug, Default)]
pub(super) struct Known(BTreeMap<Identity, BTreeMap<u64, u64>>);

impl Known {
    /// Remembers parts that are to be read.
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

    /// Adds what is known of a range of a file, is missing, and is not among the parts from `first` on, which are those of that range.
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
        // From where on what is known was not added yet.
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
                        // It was read before, or was to be.
                        near: cached.max(1),
                        anew: None,
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
    const DISTANCE: u64 = 16 << 20;

    fn file() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/dev/null").unwrap().into())
    }

    fn part(file: &Arc<OwnedFd>, at: u64, absent: u64, near: u64) -> Part {
        Part {
            file: Arc::clone(file),
            range: at * PART..(at + 1) * PART,
            absent,
            near,
            anew: None,
        }
    }

    /// A neighbourhood of which next to nothing is left.
    fn anew(file: &Arc<OwnedFd>, at: u64) -> Part {
        Part {
            file: Arc::clone(file),
            range: at * NEIGHBOURHOOD..(at + 1) * NEIGHBOURHOOD,
            absent: NEIGHBOURHOOD,
            near: 1,
            anew: Some(DISTANCE),
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
        // What is read anew is no part of what is read as it is: the end of a file is short.
        let mut short = anew(&file, 3);
        short.range.end = short.range.start + PART;
        let parts = [short.clone(), part(&file, 47, PART, 1)];
        assert_eq!(run(&parts, &parts[1]).1, 1);
        short.anew = None;
        let parts = [short, part(&file, 47, PART, 1)];
        assert_eq!(run(&parts, &parts[1]).1, 2);
    }

    #[test]
    fn only_long_stretches_are_read_anew_and_only_where_all_fits() {
        let (file, other) = (file(), file());
        let stretch = |file, from: u64, to: u64| (from..to).map(move |at| anew(file, at));
        let parts = || {
            let all = stretch(&file, 0, 8)
                .chain(stretch(&file, 9, 16))
                .chain(stretch(&other, 16, 24));
            all.collect::<Vec<_>>()
        };
        let (chosen, _) = choose(parts(), 100 * NEIGHBOURHOOD);
        let kept = |of: &Arc<OwnedFd>| {
            let of = chosen
                .iter()
                .filter(|part| Arc::ptr_eq(&part.file, of) && part.anew.is_some());
            of.map(|part| part.range.start / NEIGHBOURHOOD)
                .collect::<Vec<_>>()
        };
        assert_eq!(chosen.len(), 23);
        assert_eq!(kept(&file), [7, 6, 5, 4, 3, 2, 1, 0]);
        assert_eq!(kept(&other), [23, 22, 21, 20, 19, 18, 17, 16]);
        let (chosen, _) = choose(parts(), 22 * NEIGHBOURHOOD);
        assert_eq!(chosen.len(), 22);
        assert!(chosen.iter().all(|part| part.anew.is_none()));
    }

    /// What is dropped before each part that is read.
    fn all_of(mut parts: Vec<Part>, is_gone: impl Fn(&Part) -> bool) -> Vec<(Range<u64>, Vec<Range<u64>>)> {
        parts.reverse();
        let (mut all, mut of) = (Vec::new(), (-1, 0));
        while let Some(last) = parts.last() {
            let (next, count) = run(&parts, last);
            let file = last.file.as_raw_fd();
            let (mut dropped, mut done) = (Vec::new(), if of.0 == file { of.1 } else { 0 });
            while let Some(range) = to_be_dropped(&mut parts, next.end, done, &is_gone) {
                assert!(range.start >= done && !range.is_empty(), "{range:?} after {done}");
                done = range.end;
                dropped.push(range);
            }
            of = (file, done);
            all.push((next, dropped));
            parts.truncate(parts.len() - count);
        }
        all
    }

    #[test]
    fn what_is_left_is_dropped_once_as_far_ahead_as_disks_read_and_no_further() {
        let file = file();
        for ahead in [2 * MIB, 8 * MIB, DISTANCE] {
            let mut parts: Vec<Part> = (0..48).map(|at| anew(&file, at)).collect();
            for part in &mut parts {
                part.anew = Some(ahead);
            }
            let all = all_of(parts, |_| true);
            let mut done = 0;
            for (read, dropped) in &all {
                done = dropped.last().map_or(done, |range| range.end);
                assert!(done >= (96 * MIB).min(read.end + ahead), "{read:?}: {dropped:?}");
                assert!(
                    done <= read.end + ahead + DROPPED_STEP.max(ahead),
                    "{read:?}: {dropped:?}"
                );
            }
            assert_eq!(done, 96 * MIB);
            // Not at each step: that waits for all CPUs.
            let steps: usize = all.iter().map(|(_, dropped)| dropped.len()).sum();
            assert!(
                steps as u64 <= 96 * MIB / DROPPED_STEP.max(ahead) + 1,
                "{ahead}: {steps}"
            );
        }
    }

    #[test]
    fn what_the_program_brought_back_meanwhile_is_not_dropped() {
        let file = file();
        let all = all_of((0..48).map(|at| anew(&file, at)).collect(), |part| {
            part.range.start != 30 * MIB
        });
        let dropped: Vec<_> = all.iter().flat_map(|(_, dropped)| dropped.clone()).collect();
        let sum: u64 = dropped.iter().map(|range| range.end - range.start).sum();
        assert_eq!(sum, 94 * MIB, "{dropped:?}");
        assert!(
            dropped
                .iter()
                .all(|range| range.end <= 30 * MIB || range.start >= 32 * MIB),
            "{dropped:?}"
        );
        assert!(
            all.iter().any(|(read, _)| *read == (30 * MIB..32 * MIB)),
            "it is read all the same"
        );
    }

    #[test]
    fn also_before_what_is_read_as_it_is_it_is_dropped_where_the_disk_reads_ahead() {
        let (file, other) = (file(), file());
        let mut parts = vec![part(&file, 0, PART, 1), part(&file, 16 * 4, PART, 1)];
        parts.extend((6..20).map(|at| anew(&file, at)));
        parts.extend((20..30).map(|at| anew(&other, at)));
        let all = all_of(parts, |_| true);
        // What is read up to 128 KiB may have been read ahead up to 16 MiB.
        assert_eq!((all[0].1.len(), &all[0].1[0]), (1, &(12 * MIB..28 * MIB)));
        assert_eq!(all[1], (8 * MIB..8 * MIB + PART, vec![]));
        // In another file nothing is.
        assert!(
            all.iter()
                .all(|(read, dropped)| read.start != 0 || dropped.iter().all(|range| range.start > 0))
        );
    }

    #[test]
    fn who_has_it_read_by_somebody_else_drops_nothing_again() {
        let file = file();
        let mut parts: Vec<Part> = (0..8).rev().map(|at| anew(&file, at)).collect();
        assert_eq!(to_be_dropped(&mut parts, 2 * MIB, 36 * MIB, |_| true), None);
        assert_eq!(to_be_dropped(&mut [], 0, 0, |_| true), None);
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
            anew(&file, 3),
            anew(&file, 2),
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
                .all(|part| part.anew.is_none() && part.near > 0 && part.absent == 2 * MIB)
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
    fn of_what_is_read_anew_next_to_nothing_is_left_and_nothing_waits_to_be_written() {
        let all = NEIGHBOURHOOD / rustix::param::page_size() as u64;
        let pages = |cached, unwritten, evicted| Pages {
            cached,
            unwritten,
            evicted,
        };
        for (pages, expected) in [
            (pages(0, 0, all), true),
            (pages(all / 8, 0, all - all / 8), true),
            (pages(all / 8 + 1, 0, all - all / 8 - 1), false),
            // Much of it was never there, or it is forgotten.
            (pages(0, 0, all - all / 4), true),
            (pages(0, 0, all - all / 4 - 1), false),
            (pages(1, 1, all - 1), false),
            (pages(0, 0, 0), false),
        ] {
            assert_eq!(is_nearly_gone(pages, NEIGHBOURHOOD), expected, "{pages:?}");
        }
    }

    #[test]
    fn what_is_in_memory_of_a_file_that_was_written_is_not_gone() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 2 << 20]).unwrap();
        let mut part = anew(&Arc::new(file.into()), 0);
        assert!(!is_gone(&part));
        part.file = self::file();
        assert!(!is_gone(&part), "what cannot be told");
    }

    #[test]
    fn how_far_ahead_is_told_by_the_disk_and_only_where_there_are_large_units() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let device = rustix::fs::makedev(8, 1);
        write("proc/sys/kernel/osrelease", "6.16.0-1-amd64\n");
        write("sys/kernel/mm/transparent_hugepage/enabled", "never\n");
        assert_eq!(ahead(&root, b"ext4", device), None, "the disk is not known");
        // A part of a disk, whose directory lies in the disk's.
        write("sys/devices/sda/sda1/dev", "8:1");
        write("sys/devices/sda/queue/read_ahead_kb", "128\n");
        std::fs::create_dir_all(directory.path().join("sys/dev/block")).unwrap();
        std::os::unix::fs::symlink(
            "../../devices/sda/sda1",
            directory.path().join("sys/dev/block/8:1"),
        )
        .unwrap();
        assert_eq!(ahead(&root, b"ext4", device), Some(2 * MIB));
        write("sys/devices/sda/queue/read_ahead_kb", "4096\n");
        assert_eq!(ahead(&root, b"ext4", device), Some(8 * MIB));
        assert_eq!(ahead(&root, b"xfs", device), Some(8 * MIB));
        for kind in [&b"ext2"[..], b"btrfs", b"f2fs", b""] {
            assert_eq!(ahead(&root, kind, device), None);
        }
        for odd in [
            "0\n",
            "8193\n",
            "9007199254740991\n",
            "18446744073709551615\n",
            "x\n",
            "",
        ] {
            write("sys/devices/sda/queue/read_ahead_kb", odd);
            assert_eq!(ahead(&root, b"ext4", device), None, "{odd:?}");
        }
        write("sys/devices/sda/queue/read_ahead_kb", "128\n");
        write("proc/sys/kernel/osrelease", "6.12.0\n");
        assert_eq!(ahead(&root, b"ext4", device), None);
        assert_eq!(ahead(&root, b"xfs", device), Some(2 * MIB));
        std::fs::remove_dir_all(directory.path().join("sys/kernel")).unwrap();
        assert_eq!(ahead(&root, b"xfs", device), None, "no large pages at all");
    }
}
