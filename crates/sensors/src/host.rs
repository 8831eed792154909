//! The whole machine in one interval: CPU time, memory, free blocks, pressure.
//!
//! Sources: `/proc/stat`, `/proc/meminfo`, `/proc/vmstat`, `/proc/buddyinfo`, `/proc/pressure` (Linux
//! Documentation/filesystems/proc.rst). Values of a file that this kernel lacks are zero; only `/proc/meminfo` is
//! required. If a file becomes unreadable, there is no sample: counters that fall to zero and return would look like
//! all counts since boot. The next sample covers the time of both.

use crate::huge_pages::HugePages;
use crate::pressure::Stalled;
use crate::{paging, pressure, topology};
use homeostat_kernel::bytes::{keyed, lines, number, words};
use homeostat_kernel::files::Kept;
use homeostat_kernel::{Root, files};
use homeostat_model::{Bytes, MachineSample, Nanoseconds, Paging, Pressure};
use homeostat_platform::PlatformError;
use std::path::PathBuf;

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

/// The files of each sample; they stay open, and one buffer serves all.
#[derive(Debug)]
struct Files {
    meminfo: Kept,
    stat: Kept,
    buddyinfo: Kept,
    vmstat: Kept,
    pressure: [Kept; 3],
    buffer: Vec<u8>,
    page: u64,
}

/// Most bytes read of `/proc/stat`: only its first line, with at most eleven numbers.
const STAT_MAX: usize = 1024;

/// Samples skipped in a row because a file became unreadable; then it counts as absent.
const MISSED_MAX: u32 = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Look {
    times: Option<CpuTimes>,
    /// Of the CPU, memory, and I/O.
    stalled: [Option<Stalled>; 3],
    paged: Option<Paging>,
    memory: Memory,
    free_in_huge_blocks: Option<Bytes>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Memory {
    free: Bytes,
    available: Bytes,
    anonymous_huge: Bytes,
    shared_huge: Bytes,
    swap_used: Bytes,
    file: Bytes,
    file_inactive: Bytes,
}

impl Memory {
    fn parse(meminfo: &[u8]) -> Self {
        let kib = |key: &str| Bytes::from_kib(keyed(meminfo, key).unwrap_or(0));
        Self {
            free: kib("MemFree"),
            available: kib("MemAvailable"),
            anonymous_huge: kib("AnonHugePages"),
            shared_huge: kib("ShmemHugePages"),
            swap_used: kib("SwapTotal").saturating_sub(kib("SwapFree")),
            file_inactive: kib("Inactive(file)"),
            file: (kib("Cached") + kib("Buffers")).saturating_sub(kib("Shmem")),
        }
    }
}

impl Files {
    fn new(root: &Root) -> Self {
        let file = |path| Kept::new(root, path);
        Self {
            meminfo: file("/proc/meminfo"),
            stat: file("/proc/stat"),
            buddyinfo: file("/proc/buddyinfo"),
            vmstat: file("/proc/vmstat"),
            pressure: [
                file("/proc/pressure/cpu"),
                file("/proc/pressure/memory"),
                file("/proc/pressure/io"),
            ],
            buffer: Vec::new(),
            page: topology::page_size(root).0,
        }
    }

    /// Reads the files, and on request free blocks of at least `block` bytes. Only the buffer's first growth allocates,
    /// because this runs while memory is short. `None` without `/proc/meminfo`.
    fn look(&mut self, block: Option<u64>) -> Option<Look> {
        let buffer = &mut self.buffer;
        let told = |text: &&[u8]| !text.is_empty();
        let meminfo = self.meminfo.read(buffer, files::SMALL_FILE_MAX);
        let memory = meminfo.filter(told).map(Memory::parse)?;
        let times = self.stat.read_text(buffer, STAT_MAX);
        let times = times.and_then(|text| parse_cpu_times(text.beginning()));
        let vmstat = self.vmstat.read(buffer, files::SMALL_FILE_MAX);
        let paged = vmstat.filter(told).map(paging::parse);
        let mut stalled = [None; 3];
        for (file, stalled) in self.pressure.iter_mut().zip(&mut stalled) {
            *stalled = file.read(buffer, files::SMALL_FILE_MAX).map(pressure::parse);
        }
        let page = self.page;
        let free_in_huge_blocks = block.and_then(|block| {
            let text = self.buddyinfo.read(buffer, files::SMALL_FILE_MAX)?;
            Some(parse_free_blocks(text, page, block))
        });
        Some(Look {
            times,
            stalled,
            paged,
            memory,
            free_in_huge_blocks,
        })
    }

    fn lost(&self, before: &Look, now: &Look) -> Option<PathBuf> {
        let is_lost = |before: bool, now: bool| before && !now;
        if is_lost(before.times.is_some(), now.times.is_some()) {
            return Some(self.stat.path());
        }
        if is_lost(before.paged.is_some(), now.paged.is_some()) {
            return Some(self.vmstat.path());
        }
        let mut stalled = before.stalled.iter().zip(&now.stalled);
        let at = stalled.position(|(before, now)| is_lost(before.is_some(), now.is_some()))?;
        self.pressure.get(at).map(Kept::path)
    }
}

/// The machine's counters between samples.
#[derive(Debug)]
pub struct Host {
    files: Files,
    before: Option<Look>,
    missed: u32,
    huge_pages: HugePages,
    /// Free blocks at the last scan: reading them walks all zones under their locks.
    free_in_huge_blocks: Option<Bytes>,
    tick: u64,
    large: u64,
}

impl Host {
    /// A sensor without samples.
    pub fn new(root: Root) -> Self {
        let large = files::text(&root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
            .and_then(|t| number(t.as_bytes()))
            .unwrap_or_else(|| topology::large_page_of(topology::page_size(&root).0));
        let huge_pages = HugePages::new(root.clone());
        Self {
            files: Files::new(&root),
            before: None,
            missed: 0,
            huge_pages,
            free_in_huge_blocks: None,
            tick: tick_length(),
            large,
        }
    }

    /// The machine now; differences are since the previous call, and zero at the first. Each call reads the large-page
    /// settings (four small files, some 10 µs), so a person's `never` holds at once; free blocks only the first one and
    /// `thorough` ones.
    ///
    /// # Errors
    /// `Unsupported` when `/proc/meminfo` cannot be read. `Busy` when another file became unreadable: the next sample
    /// covers this one's time, too. After three such samples the file counts as absent.
    pub fn sample(&mut self, thorough: bool) -> Result<MachineSample, PlatformError> {
        let wanted = (thorough || self.free_in_huge_blocks.is_none()).then_some(self.large);
        let look = self
            .files
            .look(wanted)
            .ok_or_else(|| files::is_missing(&self.files.meminfo.path()))?;
        if self.missed < MISSED_MAX {
            if let Some(path) = self.before.and_then(|before| self.files.lost(&before, &look)) {
                self.missed += 1;
                return Err(PlatformError::Busy {
                    what: format!("reading {}", path.display()),
                    why: "it could be read before and cannot be now; this sample is left out".into(),
                });
            }
        }
        self.missed = 0;
        self.free_in_huge_blocks = look.free_in_huge_blocks.or(self.free_in_huge_blocks);
        let before = self.before.replace(look).unwrap_or(look);
        // A counter that was absent before begins now.
        let ticks = |counter: fn(&CpuTimes) -> u64| match (&look.times, &before.times) {
            (Some(now), Some(before)) => {
                let ticks = counter(now).saturating_sub(counter(before));
                Nanoseconds(ticks.saturating_mul(self.tick))
            }
            _ => Nanoseconds::ZERO,
        };
        let mut stalled = look
            .stalled
            .into_iter()
            .zip(before.stalled)
            .map(|pair| match pair {
                (Some(now), Some(before)) => now.since(before),
                _ => Pressure::default(),
            });
        let mut next_stalled = || stalled.next().unwrap_or_default();
        let (pressure_cpu, pressure_memory, pressure_io) = (next_stalled(), next_stalled(), next_stalled());
        let paging = match (&look.paged, &before.paged) {
            (Some(now), Some(before)) => paging::since(now, before),
            _ => Paging::default(),
        };
        Ok(MachineSample {
            cpu_busy: ticks(|t| t.busy),
            cpu_steal: ticks(|t| t.steal),
            memory_free: look.memory.free,
            memory_available: look.memory.available,
            memory_free_in_huge_blocks: self.free_in_huge_blocks.unwrap_or(Bytes::ZERO),
            anonymous_huge: look.memory.anonymous_huge,
            shared_huge: look.memory.shared_huge,
            swap_used: look.memory.swap_used,
            memory_file: look.memory.file,
            memory_file_inactive: look.memory.file_inactive,
            pressure_cpu,
            pressure_memory,
            pressure_io,
            huge_pages: self.huge_pages.read(),
            other_tuners: Vec::new(),
            numa_balancing: None,
            paging,
            memory_settings: Vec::new(),
        })
    }

    /// Whether the last sample had stall times of the CPU, memory, and I/O.
    pub fn tells_pressure(&self) -> [bool; 3] {
        self.before
            .map_or([false; 3], |look| look.stalled.map(|told| told.is_some()))
    }

    /// The size of a large page.
    pub fn large_page(&self) -> Bytes {
        Bytes(self.large)
    }

    /// Busy time of all CPUs since boot, at the last sample.
    pub fn cpu_busy(&self) -> Nanoseconds {
        let ticks = self
            .before
            .and_then(|look| look.times)
            .map_or(0, |times| times.busy);
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
    use crate::counted;
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
        // Pages of 64 KiB, as arm64 may have: order 13 = 512 MiB, the largest.
        let text = b"Node 0, zone      DMA      9 9 9 9 9 9 9 9 9 9 9 9 9 3\n";
        assert_eq!(
            parse_free_blocks(text, 65_536, 512 << 20),
            Bytes::from_mib(3 * 512)
        );
    }

    #[test]
    fn where_the_kernel_does_not_tell_it_the_large_page_follows_from_the_page() {
        let made = tempfile::tempdir().unwrap();
        let config = made.path().join("boot/config-6.8.0-64k");
        std::fs::create_dir_all(config.parent().unwrap()).unwrap();
        std::fs::create_dir_all(made.path().join("proc/sys/kernel")).unwrap();
        std::fs::write(made.path().join("proc/sys/kernel/osrelease"), "6.8.0-64k\n").unwrap();
        for (pages, large) in [("4K", 2), ("16K", 32), ("64K", 512)] {
            std::fs::write(&config, format!("CONFIG_ARM64_{pages}_PAGES=y\n")).unwrap();
            assert_eq!(Host::new(Root::new(made.path())).large, large << 20, "{pages}");
        }
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

    #[test]
    fn a_file_that_cannot_be_read_for_once_leaves_the_sample_out_and_not_its_counters_at_zero() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = dir.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        let remove = |path: &str| std::fs::remove_file(dir.path().join(path)).unwrap();
        let counts = |refaults: u64, busy: u64, stalled: u64| {
            write("proc/vmstat", &format!("workingset_refault_file {refaults}\n"));
            // A long file, as that of a machine with many interrupts.
            write(
                "proc/stat",
                &format!("cpu  {busy} 0 0 0\nintr{}\n", " 0".repeat(1000)),
            );
            write("proc/pressure/memory", &format!("some total={stalled}\n"));
        };
        write("proc/meminfo", "MemFree: 10 kB\n");
        counts(5_000_000, 90_000, 70_000);
        let mut host = Host::new(Root::new(dir.path()));
        host.sample(false).unwrap();
        for file in ["proc/vmstat", "proc/stat", "proc/pressure/memory"] {
            let before = host.before.unwrap();
            remove(file);
            let error = host.sample(false).unwrap_err();
            assert!(matches!(error, PlatformError::Busy { .. }), "{error}");
            assert!(error.to_string().contains(file), "{error}");
            let (refaults, busy) = (before.paged.unwrap().refaults_file, before.times.unwrap().busy);
            let stalled = before.stalled[1].unwrap().some.0 / 1000;
            counts(refaults + 7, busy + 2, stalled + 3);
            // What was counted since the last sample that was one, and not since the boot.
            let next = host.sample(false).unwrap();
            assert_eq!(next.paging.refaults_file, 7, "{file}");
            assert_eq!(next.cpu_busy, Nanoseconds(2 * tick_length()), "{file}");
            assert_eq!(next.pressure_memory.some, Nanoseconds(3000), "{file}");
        }
        // One that stays away counts as absent, and begins anew when it is there again.
        remove("proc/vmstat");
        for _ in 0..MISSED_MAX {
            host.sample(false).unwrap_err();
        }
        assert_eq!(host.sample(false).unwrap().paging, Paging::default());
        counts(9_000_000, 90_010, 70_100);
        assert_eq!(host.sample(false).unwrap().paging, Paging::default());
        counts(9_000_009, 90_010, 70_100);
        assert_eq!(host.sample(false).unwrap().paging.refaults_file, 9);
        // Nor is an empty answer one of a kernel that has counted nothing.
        write("proc/vmstat", "");
        host.sample(false).unwrap_err();
        write("proc/meminfo", "");
        let error = host.sample(false).unwrap_err();
        assert!(matches!(error, PlatformError::Unsupported { .. }), "{error}");
    }

    #[test]
    fn reading_the_running_machine_again_allocates_nothing() {
        let mut files = Files::new(&Root::default());
        let block = Some(2 << 20);
        // The first looks open the files and make room for the longest.
        for _ in 0..3 {
            assert!(files.look(block).is_some(), "/proc is needed");
        }
        let (look, allocated) = counted::of(|| files.look(block));
        assert!(look.is_some());
        assert_eq!(allocated, 0);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_cpu_times(&bytes);
            let _ = parse_free_blocks(&bytes, 4096, 2 << 20);
        }
    }
}
