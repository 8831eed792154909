//! Times when a thread starts to run and stops to wait: context-switch records of a perf event (perf_event_open(2),
//! `context_switch`; Linux 4.3), for this thread only, without hardware counter, BPF or tracepoint. Cost: a record of
//! 24 bytes at each start and stop, 1.0 µs measured (`examples/span_cost`).

use crate::perf::{Attributes, OpenError, PERF_TYPE_SOFTWARE, classify_thread};
use crate::ring::{Ring, records};

/// Bytes of the ring of one thread: 2,048 records.
const RING_BYTES: usize = 64 * 1024;
const PERF_COUNT_SW_DUMMY: u64 = 9;
const PERF_SAMPLE_TID: u64 = 1 << 1;
const PERF_SAMPLE_TIME: u64 = 1 << 2;
/// Bits of the flag word, in the order of the structure's bit fields.
const FLAG_WATERMARK: u64 = 1 << 14;
const FLAG_SAMPLE_ID_ALL: u64 = 1 << 18;
const FLAG_USE_CLOCK: u64 = 1 << 25;
const FLAG_CONTEXT_SWITCH: u64 = 1 << 26;
const CLOCK_MONOTONIC: i32 = 1;
const PERF_RECORD_LOST: u32 = 2;
const PERF_RECORD_SWITCH: u32 = 14;
const MISC_OUT: u16 = 1 << 13;
const MISC_PREEMPTED: u16 = 1 << 14;

/// What a thread did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was put onto a CPU.
    Runs,
    /// It left the CPU voluntarily, to wait.
    Waits,
    /// It was taken off the CPU, and goes on as soon as it gets one.
    Preempted,
    /// Number of records lost here for lack of room.
    Lost(u64),
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// Time on the monotonic clock (nanoseconds); 0 for lost records.
    pub time: u64,
    /// Change.
    pub change: Change,
}

/// The switches of one thread.
pub struct Switches(Ring);

impl Switches {
    /// Records the switches of a thread from now on.
    ///
    /// # Errors
    /// [`OpenError`]: the thread is gone, a privilege is missing, or there is no memory for the ring.
    pub fn open(thread: i32) -> Result<Self, OpenError> {
        let mut attributes = Attributes {
            kind: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_DUMMY,
            sample_type: PERF_SAMPLE_TID | PERF_SAMPLE_TIME,
            flags: FLAG_WATERMARK | FLAG_SAMPLE_ID_ALL | FLAG_USE_CLOCK | FLAG_CONTEXT_SWITCH,
            wakeup: RING_BYTES as u32,
            clock: CLOCK_MONOTONIC,
            ..Attributes::default()
        };
        let event = attributes.open(thread, -1, -1).map_err(classify_thread)?;
        Ring::map(event, RING_BYTES).map(Self).map_err(classify_thread)
    }

    /// Takes the records since the last call, oldest first.
    pub fn read(&mut self, into: &mut Vec<Switch>) {
        parse(&self.0.read(), into);
    }
}

fn parse(bytes: &[u8], into: &mut Vec<Switch>) {
    into.extend(records(bytes).filter_map(|record| match record.kind {
        // The event's number, then the count.
        PERF_RECORD_LOST => Some(Switch {
            time: 0,
            change: Change::Lost(record.u64(16)?),
        }),
        // Process and thread, then the time.
        PERF_RECORD_SWITCH => Some(Switch {
            time: record.u64(16)?,
            change: match (record.misc & MISC_OUT != 0, record.misc & MISC_PREEMPTED != 0) {
                (false, _) => Change::Runs,
                (true, false) => Change::Waits,
                (true, true) => Change::Preempted,
            },
        }),
        _ => None,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, misc: u16, time: u64) -> Vec<u8> {
        let mut r = Vec::new();
        r.extend(kind.to_ne_bytes());
        r.extend(misc.to_ne_bytes());
        r.extend(24u16.to_ne_bytes());
        r.extend([7u32, 9].map(u32::to_ne_bytes).as_flattened());
        r.extend(time.to_ne_bytes());
        r
    }

    #[test]
    fn records_are_taken_apart_and_broken_ones_left_out() {
        let all: Vec<u8> = [
            record(PERF_RECORD_SWITCH, 0, 1),
            record(PERF_RECORD_SWITCH, MISC_OUT, 2),
            record(99, 0, 3),
            record(PERF_RECORD_SWITCH, MISC_OUT | MISC_PREEMPTED, 4),
            record(PERF_RECORD_LOST, 0, 5),
        ]
        .concat();
        let mut found = Vec::new();
        parse(&all, &mut found);
        let changes: Vec<(u64, Change)> = found.iter().map(|s| (s.time, s.change)).collect();
        assert_eq!(
            changes,
            [
                (1, Change::Runs),
                (2, Change::Waits),
                (4, Change::Preempted),
                (0, Change::Lost(5))
            ]
        );
        for cut in 0..all.len() {
            let mut some = Vec::new();
            parse(&all[..cut], &mut some);
            assert!(some.len() <= 4);
        }
        for at in 0..all.len() {
            let mut broken = all.clone();
            broken[at] = 0xff;
            parse(&broken, &mut Vec::new());
        }
    }

    #[test]
    fn a_thread_that_waits_is_seen_to_wait() {
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        let mut switches = match Switches::open(me) {
            Ok(switches) => switches,
            Err(OpenError::Denied(_) | OpenError::Unsupported(_) | OpenError::Busy(_)) => {
                eprintln!("skipped: this kernel or this user cannot see the switches of a thread");
                return;
            }
            Err(e) => panic!("{e}"),
        };
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let mut found = Vec::new();
        switches.read(&mut found);
        let waits = found.iter().filter(|s| s.change == Change::Waits).count();
        let runs = found.iter().filter(|s| s.change == Change::Runs).count();
        assert!(waits >= 5 && runs >= 5, "{found:?}");
        assert!(found.windows(2).all(|w| w[0].time <= w[1].time), "{found:?}");
    }
}
