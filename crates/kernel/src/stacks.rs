//! Samples of a thread's instruction and stack pointers and top of the stack (unwound by the reader): a perf event on
//! the CPU clock (perf_event_open(2)), without a hardware counter. Without the stack samples can be more frequent.
//!
//! A stack may hold passwords. Read data is wiped from our memory at once, and a sample wipes its copy when dropped.
//! The kernel's ring is read-only except its first page. The kernel clears its pages when the sampler is dropped.
//!
//! Cost: the kernel copies the stack at each sample, about 2 µs for 16 KiB; without it only the interrupt remains.

use crate::perf::{Attributes, OpenError, PERF_TYPE_SOFTWARE, classify_thread};
use crate::ring::{Record, Ring, records};

/// Bytes of stack in each sample.
pub const STACK_BYTES: u32 = 16 * 1024;
/// Bytes of the ring of one thread: 31 samples.
const RING_BYTES: usize = 512 * 1024;
/// Bytes of the ring without the stack: 409 samples.
const RING_BYTES_BARE: usize = 16 * 1024;

/// One sample.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Thread.
    pub thread: i32,
    /// Address of the instruction in user mode; for a thread in the kernel, that of its entry into the kernel.
    pub instruction: u64,
    /// Interrupted in user mode, so that the processor was about to execute the instruction. In the kernel that is
    /// uncertain: while the kernel handles any breakpoint the address is one byte behind it.
    pub in_user_mode: bool,
    /// Stack pointer.
    pub stack_pointer: u64,
    stack: Vec<u64>,
}

impl Sample {
    /// Words of the stack from the stack pointer upwards.
    pub fn stack(&self) -> &[u64] {
        &self.stack
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        wipe(&mut self.stack);
    }
}

/// Overwrites read data, so that it does not stay in freed memory.
fn wipe<T: Copy + Default>(words: &mut [T]) {
    words.fill(T::default());
    // Keeps the compiler from removing the writes.
    std::hint::black_box(&mut *words);
}

const PERF_COUNT_SW_CPU_CLOCK: u64 = 0;
const PERF_SAMPLE_TID: u64 = 1 << 1;
const PERF_SAMPLE_REGS_USER: u64 = 1 << 12;
const PERF_SAMPLE_STACK_USER: u64 = 1 << 13;
/// Bits of the flag word: the period is a frequency; the wake-up field counts bytes.
const FLAG_FREQUENCY: u64 = 1 << 10;
const FLAG_WATERMARK: u64 = 1 << 14;
const PERF_RECORD_SAMPLE: u32 = 9;
/// Bits of a record's `misc` for the interrupted mode, and their value in user mode.
const PERF_RECORD_MISC_CPUMODE_MASK: u16 = 7;
const PERF_RECORD_MISC_USER: u16 = 2;
/// `PERF_SAMPLE_REGS_ABI_64`.
const ABI_64: u64 = 2;

/// Sampled registers: stack and instruction pointer, in the order of bits (arch/*/include/uapi/asm/perf_regs.h).
#[cfg(target_arch = "x86_64")]
const REGISTERS: u64 = 1 << 7 | 1 << 8;
#[cfg(target_arch = "aarch64")]
const REGISTERS: u64 = 1 << 31 | 1 << 32;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const REGISTERS: u64 = 0;

/// Samples of one thread.
pub struct Sampler(Ring);

impl Sampler {
    /// Samples a thread from now on, this often per second of its CPU time.
    ///
    /// # Errors
    /// [`OpenError`]: the thread is gone, a privilege is missing, or there is no memory for the ring.
    pub fn open(thread: i32, per_second: u64) -> Result<Self, OpenError> {
        let with_stack = Attributes {
            sample_type: PERF_SAMPLE_TID | PERF_SAMPLE_REGS_USER | PERF_SAMPLE_STACK_USER,
            sample_stack_user: STACK_BYTES,
            ..Attributes::default()
        };
        Self::begin(thread, per_second, with_stack, RING_BYTES)
    }

    /// As [`Self::open`], without stacks.
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_bare(thread: i32, per_second: u64) -> Result<Self, OpenError> {
        let bare = Attributes {
            sample_type: PERF_SAMPLE_TID | PERF_SAMPLE_REGS_USER,
            ..Attributes::default()
        };
        Self::begin(thread, per_second, bare, RING_BYTES_BARE)
    }

    fn begin(thread: i32, per_second: u64, what: Attributes, ring: usize) -> Result<Self, OpenError> {
        let mut attributes = Attributes {
            kind: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_CPU_CLOCK,
            sample_period: per_second.max(1),
            flags: FLAG_FREQUENCY | FLAG_WATERMARK,
            wakeup: ring as u32,
            sample_registers_user: REGISTERS,
            ..what
        };
        let event = attributes.open(thread, -1, -1).map_err(classify_thread)?;
        Ring::map(event, ring).map(Self).map_err(classify_thread)
    }

    /// Takes samples since the last call. Samples beyond the ring's size are lost.
    pub fn read(&mut self, into: &mut Vec<Sample>) {
        let mut bytes = self.0.read();
        parse(&bytes, into);
        wipe(&mut bytes);
    }
}

fn parse(bytes: &[u8], into: &mut Vec<Sample>) {
    let samples = records(bytes).filter(|record| record.kind == PERF_RECORD_SAMPLE);
    into.extend(samples.filter_map(|record| sample(&record)));
}

/// A sample in the kernel's order: process and thread, kind of registers, two registers, stack size, stack, copied
/// part.
fn sample(record: &Record<'_>) -> Option<Sample> {
    if record.u64(16)? != ABI_64 {
        // A thread of the kernel, or a program of 32 bits.
        return None;
    }
    let (stack, copied): (&[u8], usize) = match record.u64(40) {
        None | Some(0) => (&[], 0),
        Some(size) => {
            let size = usize::try_from(size).ok()?;
            let behind = size.checked_add(48)?;
            let copied = usize::try_from(record.u64(behind)?).ok()?;
            (record.bytes(48..behind)?, copied.min(size))
        }
    };
    Some(Sample {
        thread: record.u32(12)? as i32,
        stack_pointer: record.u64(24)?,
        instruction: record.u64(32)?,
        in_user_mode: record.misc & PERF_RECORD_MISC_CPUMODE_MASK == PERF_RECORD_MISC_USER,
        stack: stack
            .get(..copied)?
            .chunks_exact(8)
            .filter_map(|word| word.first_chunk())
            .map(|word| u64::from_ne_bytes(*word))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(misc: u16, stack: &[u64], copied: u64) -> Vec<u8> {
        let mut body = Vec::new();
        for n in [7u32, 9] {
            body.extend(n.to_ne_bytes());
        }
        for n in [ABI_64, 0x7000, 0x40_0000, stack.len() as u64 * 8] {
            body.extend(n.to_ne_bytes());
        }
        for n in stack.iter().chain(&[copied]) {
            body.extend(n.to_ne_bytes());
        }
        let mut record = Vec::new();
        record.extend(PERF_RECORD_SAMPLE.to_ne_bytes());
        record.extend(misc.to_ne_bytes());
        record.extend((body.len() as u16 + 8).to_ne_bytes());
        record.extend(body);
        record
    }

    #[test]
    fn samples_are_taken_apart_and_broken_ones_left_out() {
        // Of user mode; of the kernel, with another bit.
        let mut two = record(2, &[1, 2, 3], 16);
        two.extend(record(1 << 14 | 1, &[4], 8));
        let mut found = Vec::new();
        parse(&two, &mut found);
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0],
            Sample {
                thread: 9,
                instruction: 0x40_0000,
                in_user_mode: true,
                stack_pointer: 0x7000,
                stack: vec![1, 2]
            }
        );
        assert_eq!(
            (found[1].stack.as_slice(), found[1].in_user_mode),
            (&[4][..], false)
        );
        for cut in 0..two.len() {
            let mut some = Vec::new();
            parse(&two[..cut], &mut some);
            assert!(some.len() <= 2);
        }
        for at in 0..two.len() {
            let mut broken = two.clone();
            broken[at] = 0xff;
            parse(&broken, &mut Vec::new());
        }
    }

    #[test]
    fn what_was_read_is_wiped() {
        let mut words = vec![0xdead_beef_u64; 64];
        wipe(&mut words);
        assert!(words.iter().all(|w| *w == 0));
        let mut bytes = [7u8; 9];
        wipe(&mut bytes);
        assert_eq!(bytes, [0; 9]);
    }

    #[test]
    fn a_thread_of_ours_that_works_is_seen_at_work() {
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        let mut sampler = match Sampler::open(me, 999) {
            Ok(sampler) => sampler,
            Err(OpenError::Denied(_) | OpenError::Unsupported(_) | OpenError::Busy(_)) => {
                eprintln!("skipped: this kernel or this user cannot sample a thread");
                return;
            }
            Err(e) => panic!("{e}"),
        };
        let mut x = 0u64;
        let mut samples = Vec::new();
        // Until there is one, however busy the machine is.
        for _ in 0..10_000 {
            for i in 0..200_000u64 {
                x = std::hint::black_box(x ^ i);
            }
            sampler.read(&mut samples);
            if samples.len() >= 3 {
                break;
            }
        }
        assert!(samples.len() >= 3, "{x}");
        for sample in &samples {
            assert_eq!(sample.thread, me);
            assert!(sample.instruction > 0 && sample.stack_pointer > 0);
            assert!(!sample.stack.is_empty());
        }
        // It does next to nothing in the kernel.
        assert!(samples.iter().any(|s| s.in_user_mode));
        let mut bare = Sampler::open_bare(me, 999).unwrap();
        samples.clear();
        for _ in 0..10_000 {
            for i in 0..200_000u64 {
                x = std::hint::black_box(x ^ i);
            }
            bare.read(&mut samples);
            if samples.len() >= 3 {
                break;
            }
        }
        assert!(samples.len() >= 3, "{x}");
        assert!(
            samples
                .iter()
                .all(|s| s.thread == me && s.instruction > 0 && s.stack().is_empty())
        );
    }
}
