//! The machine as a whole in one interval: CPU time, memory, free blocks, pressure.
//!
//! Sources: `/proc/stat`, `/proc/meminfo`, `/proc/vmstat`, `/proc/buddyinfo`, `/proc/pressure` (Linux
//! Documentation/filesystems/proc.rst). A file that is missing leaves its values at zero; `/proc/meminfo` must be
//! there.

use super::bytes::{keyed, lines, number, words};
use super::files;
use super::huge_pages::HugePages;
use super::paging;
use super::pressure::{self, Stalled};
use crate::Root;
use homeostat_model::{Bytes, MachineSample, Nanoseconds, Paging};
use homeostat_platform::PlatformError;

/// Cumulative CPU times of all CPUs together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// user + nice + system + irq + softirq, in clock ticks. Guest time is part of user time already.
    pub busy: u64,
    /// Stolen by the hypervisor, in clock ticks.
    pub steal: u64,
}

/// Parses the first line of `/proc/stat`; `None` when it is not there.
pub fn parse_cpu_times(stat: &[u8]) -> Option<CpuTimes> {
    let line = lines(stat).find_map(|l| l.strip_prefix(b"cpu "))?;
    let mut field = [0u64; 8];
    for (slot, word) in field.iter_mut().zip(words(line)) {
        *slot = number(word)?;
    }
    let [user, nice, system, _idle, _iowait, irq, softirq, steal] = field;
    let busy = [nice, system, irq, softirq]
        .iter()
        .fold(user, |sum, x| sum.saturating_add(*x));
    Some(CpuTimes { busy, steal })
}

/// Free memory in blocks of at least `block` bytes, from `/proc/buddyinfo`.
pub fn parse_free_blocks(buddyinfo: &[u8], page: u64, block: u64) -> Bytes {
    let mut sum: u64 = 0;
    for line in lines(buddyinfo) {
        // Node 0, zone   Normal   2040   1020 …: counts of free blocks of 2^order pages.
        let counts = words(line).skip_while(|w| *w != b"zone").skip(2);
        for (order, count) in counts.enumerate().take(32) {
            let size = page.checked_shl(order as u32).unwrap_or(0);
            if block > 0 && size >= block {
                sum = sum.saturating_add(number(count).unwrap_or(0).saturating_mul(size));
            }
        }
    }
    Bytes(sum)
}

/// The machine's counters between samples.
#[derive(Debug)]
pub struct Host {
    root: Root,
    before: Option<(CpuTimes, [Stalled; 3], Paging)>,
    huge_pages: HugePages,
    /// Free blocks as last read: with the scans only, because that walks all zones under their locks.
    free_in_huge_blocks: Option<Bytes>,
    tick: u64,
    large: u64,
}

impl Host {
    /// A sensor that has not seen anything yet.
    pub fn new(root: Root) -> Self {
        let large = files::text(&root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
            .and_then(|t| number(t.as_bytes()))
            .unwrap_or(2 * 1024 * 1024);
        let huge_pages = HugePages::new(root.clone());
        Self {
            root,
            before: None,
            huge_pages,
            free_in_huge_blocks: None,
            tick: tick_length(),
            large,
        }
    }

    /// The machine now; differences are since the previous call and zero at the first. The large-page settings are read
    /// every time (four small files, some 10 µs): a person's `never` holds from that moment on. Free blocks are read anew
    /// when `thorough`, and at the first call.
    ///
    /// # Errors
    /// `Unsupported` when `/proc/meminfo` cannot be read.
    pub fn sample(&mut self, thorough: bool) -> Result<MachineSample, PlatformError> {
        let meminfo = files::required(&self.root, "/proc/meminfo", files::SMALL_FILE_MAX)?;
        let stat = files::bytes(&self.root, "/proc/stat", files::LARGE_FILE_MAX).unwrap_or_default();
        let free_in_huge_blocks = match self.free_in_huge_blocks {
            Some(known) if !thorough => known,
            _ => parse_free_blocks(
                &files::bytes(&self.root, "/proc/buddyinfo", files::SMALL_FILE_MAX).unwrap_or_default(),
                rustix::param::page_size() as u64,
                self.large,
            ),
        };
        self.free_in_huge_blocks = Some(free_in_huge_blocks);
        let times = parse_cpu_times(&stat).unwrap_or_default();
        let stalled = ["cpu", "memory", "io"].map(|r| pressure::read(&self.root, r).unwrap_or_default());
        let paged = paging::read(&self.root).unwrap_or_default();
        let (times_before, stalled_before, paged_before) = self.before.unwrap_or((times, stalled, paged));
        self.before = Some((times, stalled, paged));
        let kib = |key: &str| Bytes::from_kib(keyed(&meminfo, key).unwrap_or(0));
        let ticks = |now: u64, before: u64| Nanoseconds(now.saturating_sub(before).saturating_mul(self.tick));
        let [cpu, memory, io] = stalled;
        let [cpu_before, memory_before, io_before] = stalled_before;
        Ok(MachineSample {
            cpu_busy: ticks(times.busy, times_before.busy),
            cpu_steal: ticks(times.steal, times_before.steal),
            memory_free: kib("MemFree"),
            memory_available: kib("MemAvailable"),
            memory_free_in_huge_blocks: free_in_huge_blocks,
            anonymous_huge: kib("AnonHugePages"),
            shared_huge: kib("ShmemHugePages"),
            swap_used: kib("SwapTotal").saturating_sub(kib("SwapFree")),
            memory_file: (kib("Cached") + kib("Buffers")).saturating_sub(kib("Shmem")),
            pressure_cpu: cpu.since(cpu_before),
            pressure_memory: memory.since(memory_before),
            pressure_io: io.since(io_before),
            huge_pages: self.huge_pages.read(),
            other_tuners: Vec::new(),
            numa_balancing: None,
            paging: paging::since(&paged, &paged_before),
            memory_settings: Vec::new(),
        })
    }

    /// CPU time that all CPUs together were busy since the machine was booted, as of the last sample.
    pub fn cpu_busy(&self) -> Nanoseconds {
        let ticks = self.before.map_or(0, |(times, ..)| times.busy);
        Nanoseconds(ticks.saturating_mul(self.tick))
    }
}

/// Length of a clock tick (`USER_HZ`) in nanoseconds: the unit of CPU times in `/proc`.
pub fn tick_length() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn busy_time_leaves_out_idle_waiting_and_guests() {
        let t = parse_cpu_times(b"cpu  10 1 5 100 50 2 3 4 9 9\ncpu0 1 1\n").unwrap();
        assert_eq!(t, CpuTimes { busy: 21, steal: 4 });
        assert_eq!(parse_cpu_times(b"cpu  1 2 3 4\n").unwrap().busy, 6);
        assert_eq!(parse_cpu_times(b"cpu0 1 2 3\n"), None);
        assert_eq!(parse_cpu_times(b"cpu  1 x\n"), None);
    }

    #[test]
    fn only_blocks_of_the_large_size_count() {
        let text = b"Node 0, zone      DMA      0 0 0 0 0 0 0 0 1 1 2\n\
                     Node 1, zone   Normal      9 9 9 9 9 9 9 9 9 3 4\n";
        // Order 9 = 2 MiB, order 10 = 4 MiB.
        assert_eq!(
            parse_free_blocks(text, 4096, 2 << 20),
            Bytes::from_mib(2 + 8 + 6 + 16)
        );
        assert_eq!(
            parse_free_blocks(b"Node 0, zone\nrubbish", 4096, 2 << 20),
            Bytes::ZERO
        );
    }

    #[test]
    fn settings_and_counters_are_read_always_and_free_blocks_with_the_scans() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = dir.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        const ENABLED: &str = "sys/kernel/mm/transparent_hugepage/enabled";
        write("proc/meminfo", "MemFree: 10 kB\n");
        write("proc/buddyinfo", "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 1 0\n");
        write(ENABLED, "always [madvise] never\n");
        let mut host = Host::new(Root::new(dir.path()));
        let first = host.sample(false).unwrap();
        assert_eq!(first.huge_pages.enabled.0, "madvise");
        let free = first.memory_free_in_huge_blocks;
        write("proc/meminfo", "MemFree: 20 kB\n");
        write("proc/buddyinfo", "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 3 0\n");
        write(ENABLED, "always madvise [never]\n");
        let between = host.sample(false).unwrap();
        assert_eq!(between.memory_free, Bytes::from_kib(20));
        assert_eq!(between.huge_pages.enabled.0, "never");
        assert_eq!(between.memory_free_in_huge_blocks, free);
        assert_ne!(host.sample(true).unwrap().memory_free_in_huge_blocks, free);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_cpu_times(&bytes);
            let _ = parse_free_blocks(&bytes, 4096, 2 << 20);
        }
    }
}
