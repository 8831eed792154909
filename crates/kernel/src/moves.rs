//! Every move of a thread between CPUs: the kernel's software event `cpu-migrations` (perf_event_open(2)), recorded
//! into a ring per CPU. It needs no tracefs and no hardware counter, and reports thread, time and the new CPU.
//!
//! Cost: the kernel writes 32 bytes per move, in [`RING_BYTES`] per CPU. Moves beyond that are lost, and counted.

use crate::perf::{Attributes, OpenError, PERF_TYPE_SOFTWARE, classify_thread};
use crate::ring::{Record, Ring, records};
use rustix::io::Errno;

/// Most CPUs that are watched: 36 KiB of locked memory each.
pub const CPUS_MAX: usize = 512;
/// Records per CPU: 1,000 moves between two reads.
pub const RING_BYTES: usize = 32 * 1024;

/// A thread arrived on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Move {
    /// Time on the kernel's scheduler clock, in nanoseconds; orders moves of all CPUs.
    pub at: u64,
    /// Process.
    pub process: i32,
    /// Thread.
    pub thread: i32,
    /// CPU that it arrived on.
    pub to: u32,
}

/// What was read from the rings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// In order of time.
    pub list: Vec<Move>,
    /// Moves that did not fit into a ring.
    pub lost: u64,
}

const PERF_COUNT_SW_CPU_MIGRATIONS: u64 = 4;
const PERF_SAMPLE_TID: u64 = 1 << 1;
const PERF_SAMPLE_TIME: u64 = 1 << 2;
const PERF_SAMPLE_CPU: u64 = 1 << 7;
/// Bit of the flag word: the wake-up field counts bytes, not records.
const FLAG_WATERMARK: u64 = 1 << 14;
const PERF_RECORD_LOST: u32 = 2;
const PERF_RECORD_SAMPLE: u32 = 9;
fn open(cpu: u32) -> Result<Ring, OpenError> {
    let mut attributes = Attributes {
        kind: PERF_TYPE_SOFTWARE,
        config: PERF_COUNT_SW_CPU_MIGRATIONS,
        sample_period: 1,
        sample_type: PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_CPU,
        flags: FLAG_WATERMARK,
        wakeup: RING_BYTES as u32,
        ..Attributes::default()
    };
    let cpu = i32::try_from(cpu).map_err(|_| OpenError::Unsupported(Errno::INVAL))?;
    let event = attributes.open(-1, cpu, -1).map_err(classify_thread)?;
    Ring::map(event, RING_BYTES).map_err(classify_thread)
}

fn parse(bytes: &[u8], into: &mut Moves) {
    let moved = |record: &Record<'_>| {
        Some(Move {
            at: record.u64(16)?,
            process: record.u32(8)? as i32,
            thread: record.u32(12)? as i32,
            to: record.u32(24)?,
        })
    };
    for record in records(bytes) {
        match record.kind {
            PERF_RECORD_SAMPLE => into.list.extend(moved(&record)),
            PERF_RECORD_LOST => into.lost = into.lost.saturating_add(record.u64(16).unwrap_or(0)),
            _ => {}
        }
    }
}

/// Watches the moves of all threads on all CPUs until it is dropped.
pub struct MoveWatch {
    rings: Vec<Ring>,
}

impl std::fmt::Debug for MoveWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoveWatch")
            .field("rings", &self.rings.len())
            .finish()
    }
}

impl MoveWatch {
    /// Begins to watch.
    ///
    /// # Errors
    /// [`OpenError`]: more than [`CPUS_MAX`] CPUs are unsupported; without `CAP_PERFMON` (and with
    /// `kernel.perf_event_paranoid` above 0) it is denied. A CPU that went offline meanwhile is skipped.
    pub fn open(cpus: impl IntoIterator<Item = u32>) -> Result<Self, OpenError> {
        let mut rings = Vec::new();
        for cpu in cpus {
            if rings.len() == CPUS_MAX {
                return Err(OpenError::Unsupported(Errno::TOOBIG));
            }
            match open(cpu) {
                Ok(ring) => rings.push(ring),
                Err(OpenError::Unsupported(Errno::NODEV)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { rings })
    }

    /// Moves since the last call, in order of time.
    pub fn read(&mut self) -> Moves {
        let mut moves = Moves::default();
        for ring in &mut self.rings {
            parse(&ring.read(), &mut moves);
        }
        moves.list.sort_unstable();
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numa::{CpuMask, affinity, set_affinity};
    use proptest::prelude::*;

    fn sample(at: u64, process: u32, thread: u32, to: u32) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(PERF_RECORD_SAMPLE.to_ne_bytes());
        out.extend(0u16.to_ne_bytes());
        out.extend(32u16.to_ne_bytes());
        out.extend(process.to_ne_bytes());
        out.extend(thread.to_ne_bytes());
        out.extend(at.to_ne_bytes());
        out.extend(to.to_ne_bytes());
        out.extend(0u32.to_ne_bytes());
        out
    }

    #[test]
    fn records_are_taken_apart_and_strange_ones_passed_over() {
        let mut bytes = sample(5, 10, 11, 3);
        // PERF_RECORD_THROTTLE, 16 bytes.
        bytes.extend(5u32.to_ne_bytes());
        bytes.extend(0u16.to_ne_bytes());
        bytes.extend(16u16.to_ne_bytes());
        bytes.extend([7; 8]);
        bytes.extend(PERF_RECORD_LOST.to_ne_bytes());
        bytes.extend(0u16.to_ne_bytes());
        bytes.extend(24u16.to_ne_bytes());
        bytes.extend(1u64.to_ne_bytes());
        bytes.extend(9u64.to_ne_bytes());
        bytes.extend(sample(2, 10, 12, 1));
        let mut moves = Moves::default();
        parse(&bytes, &mut moves);
        assert_eq!(moves.lost, 9);
        assert_eq!(
            moves.list,
            [
                Move {
                    at: 5,
                    process: 10,
                    thread: 11,
                    to: 3
                },
                Move {
                    at: 2,
                    process: 10,
                    thread: 12,
                    to: 1
                }
            ]
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_loop(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            parse(&bytes, &mut Moves::default());
        }
    }

    #[test]
    fn a_thread_that_is_sent_to_and_fro_is_seen_moving() {
        std::thread::spawn(|| {
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            let found = affinity(thread).unwrap();
            let cpus: Vec<u32> = found.iter().take(2).collect();
            if cpus.len() < 2 {
                println!("skipped: one CPU");
                return;
            }
            set_affinity(thread, &CpuMask::of([cpus[0]])).unwrap();
            let mut watch = match MoveWatch::open(found.iter()) {
                Ok(watch) => watch,
                Err(error) => {
                    println!("skipped: {error}");
                    return;
                }
            };
            for round in 1..=20 {
                set_affinity(thread, &CpuMask::of([cpus[round % 2]])).unwrap();
            }
            let moves = watch.read();
            let ours: Vec<u32> = moves
                .list
                .iter()
                .filter(|m| m.thread == thread)
                .map(|m| m.to)
                .collect();
            assert_eq!(moves.lost, 0);
            assert_eq!(ours.len(), 20, "{ours:?}");
            assert!(ours.chunks(2).all(|pair| pair == [cpus[1], cpus[0]]), "{ours:?}");
            assert!(moves.list.windows(2).all(|w| w[0].at <= w[1].at));
            assert!(
                moves
                    .list
                    .iter()
                    .filter(|m| m.thread == thread)
                    .all(|m| m.process == std::process::id() as i32)
            );
            assert_eq!(watch.read().list.iter().filter(|m| m.thread == thread).count(), 0);
        })
        .join()
        .unwrap();
    }
}
