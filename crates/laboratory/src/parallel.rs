//! Independent pieces of work on several threads, with results in a fixed order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

const THREADS_MAX: usize = 256;

/// Runs `work` for every index on up to `threads` threads. `take` gets the results on the calling thread in index
/// order, so they do not depend on the threads. `take` ends it with false; running work is finished and dropped.
pub(crate) fn in_order<T: Send>(
    indices: Range<u64>,
    threads: usize,
    work: &(dyn Fn(u64) -> T + Sync),
    take: &mut dyn FnMut(u64, T) -> bool,
) {
    let count = indices.end.saturating_sub(indices.start);
    let threads = threads
        .clamp(1, THREADS_MAX)
        .min(usize::try_from(count).unwrap_or(usize::MAX));
    if threads <= 1 {
        for index in indices {
            if !take(index, work(index)) {
                return;
            }
        }
        return;
    }
    let end = indices.end;
    let next = AtomicU64::new(indices.start);
    let stop = AtomicBool::new(false);
    // Only a busy reader holds up the worker of an awaited result; early results are kept below.
    let (done, results) = mpsc::sync_channel(threads);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (done, next, stop) = (done.clone(), &next, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= end || done.send((index, work(index))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(done);
        // Bounded by the indices; in practice by what finishes while one slow index runs.
        let mut early = BTreeMap::new();
        let mut due = indices.start;
        for (index, result) in results {
            early.insert(index, result);
            while let Some(result) = early.remove(&due) {
                if !stop.load(Ordering::Relaxed) && !take(due, result) {
                    stop.store(true, Ordering::Relaxed);
                }
                due += 1;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_on_any_number_of_threads() {
        for threads in [1, 2, 7, 1000] {
            let mut seen = Vec::new();
            // The first of every ten takes longest, so the others overtake it.
            let work =
                |i: u64| (0..if i % 10 == 0 { 200_000 } else { 10 }).fold(i, |a, b| a ^ (b & 1) ^ (b & 1));
            in_order(3..50, threads, &work, &mut |index, value| {
                assert_eq!(index, value);
                seen.push(index);
                true
            });
            assert_eq!(seen, (3..50).collect::<Vec<_>>(), "{threads} threads");
        }
    }

    #[test]
    fn whoever_takes_them_may_end_it() {
        for threads in [1, 3] {
            let mut seen = Vec::new();
            in_order(0..1_000_000, threads, &|i| i, &mut |index, _| {
                seen.push(index);
                index < 4
            });
            assert_eq!(seen, [0, 1, 2, 3, 4], "{threads} threads");
        }
        in_order(5..5, 2, &|i| i, &mut |_, _| panic!("there is nothing to do"));
    }
}
