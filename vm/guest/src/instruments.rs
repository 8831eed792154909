//! Measuring from outside, by other ways than the code under test: masks of threads from `/proc/PID/task/*/status`,
//! the node of each page from `/proc/PID/pagemap` and the kernel's memory blocks, sums from `/proc/PID/numa_maps` and from
//! `numastat`.

use crate::keeper::program;
use crate::{Failure, ensure};
use homeostat_model::ProcessId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a page; the emulated machines are x86-64.
pub const PAGE: u64 = 4096;
/// `/proc/PID/pagemap`: the page is in memory (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
/// `/proc/PID/pagemap`: the number of the frame.
const FRAME: u64 = (1 << 55) - 1;

/// `0-1,4` as numbers; the empty text is the empty set.
pub fn numbers(text: &str) -> Option<BTreeSet<u32>> {
    let mut out = BTreeSet::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        out.extend(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?);
    }
    Some(out)
}

/// Numbers as the kernel takes them: `0,1,4`.
pub fn list(numbers: &BTreeSet<u32>) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The text of a file, without white space at the ends.
///
/// # Errors
/// It cannot be read.
pub fn text(path: impl AsRef<Path>) -> Result<String, Failure> {
    let path = path.as_ref();
    fs::read_to_string(path)
        .map(|t| t.trim().to_owned())
        .map_err(Failure::system(format!("reading {}", path.display())))
}

/// Writes a setting of the kernel.
///
/// # Errors
/// The kernel refuses.
pub fn write(path: impl AsRef<Path>, value: &str) -> Result<(), Failure> {
    let path = path.as_ref();
    fs::write(path, value).map_err(Failure::system(format!("writing {value} to {}", path.display())))
}

/// The numbers of a file such as `/sys/devices/system/cpu/online`.
///
/// # Errors
/// It cannot be read, or holds something else.
pub fn numbers_in(path: impl AsRef<Path>) -> Result<BTreeSet<u32>, Failure> {
    let text = text(path.as_ref())?;
    numbers(&text).ok_or_else(|| Failure::Broken(format!("{}: {text} is no list", path.as_ref().display())))
}

/// The process that has this number now.
///
/// # Errors
/// There is none.
pub fn process(pid: i32) -> Result<ProcessId, Failure> {
    let stat = text(format!("/proc/{pid}/stat"))?;
    let start_ticks = stat
        .rsplit_once(')')
        .and_then(|(_, after)| after.split_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| Failure::Broken(format!("/proc/{pid}/stat: {stat}")))?;
    Ok(ProcessId { pid, start_ticks })
}

/// A value in a file of lines `Key: value`.
fn keyed<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':').map(str::trim))
}

/// By thread: the CPUs on which it may run.
pub type Masks = BTreeMap<i32, BTreeSet<u32>>;

/// The threads of a process and the CPUs each may run on.
///
/// # Errors
/// The process is gone.
pub fn masks(pid: i32) -> Result<Masks, Failure> {
    let directory = format!("/proc/{pid}/task");
    let mut out = BTreeMap::new();
    for entry in fs::read_dir(&directory).map_err(Failure::system(format!("reading {directory}")))? {
        let entry = entry.map_err(Failure::system(format!("reading {directory}")))?;
        let Some(tid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let status = match text(entry.path().join("status")) {
            Ok(status) => status,
            // It ended since the directory was listed.
            Err(_) if !entry.path().exists() => continue,
            Err(failure) => return Err(failure),
        };
        let mask = keyed(&status, "Cpus_allowed_list").and_then(numbers);
        out.insert(
            tid,
            mask.ok_or_else(|| Failure::Broken(format!("no mask in {status}")))?,
        );
    }
    ensure!(!out.is_empty(), "process {pid} has no threads");
    Ok(out)
}

/// Pages of files that a process has mapped and in memory, in MiB.
///
/// # Errors
/// The process is gone.
pub fn mapped_mib(pid: i32) -> Result<u64, Failure> {
    let path = format!("/proc/{pid}/status");
    let status = text(&path)?;
    keyed(&status, "RssFile")
        .and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok())
        .map(|kib| kib / 1024)
        .ok_or_else(|| Failure::Broken(format!("no RssFile in {path}")))
}

/// KiB in a line of `/proc/PID/smaps_rollup`, for example `AnonHugePages`.
///
/// # Errors
/// The process is gone, or there is no such line.
pub fn rollup_kib(pid: i32, key: &str) -> Result<u64, Failure> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = text(&path)?;
    keyed(&text, key)
        .and_then(|v| v.strip_suffix("kB")?.trim().parse().ok())
        .ok_or_else(|| Failure::Broken(format!("{path} has no line {key}")))
}

/// By node: base pages.
pub type Pages = BTreeMap<u32, u64>;

/// Pages of a process by node, from `/proc/PID/numa_maps`, in base pages.
///
/// # Errors
/// The process is gone, or the kernel has no NUMA.
pub fn numa_maps(pid: i32) -> Result<Pages, Failure> {
    let (mut private, files) = numa_maps_by_kind(pid)?;
    for (node, pages) in files {
        *private.entry(node).or_default() += pages;
    }
    Ok(private)
}

/// The same apart: private memory (heap, stacks, what was written into private copies of files), and pages of files.
///
/// # Errors
/// As [`numa_maps`].
pub fn numa_maps_by_kind(pid: i32) -> Result<(Pages, Pages), Failure> {
    Ok(sum_numa_maps(&text(format!("/proc/{pid}/numa_maps"))?))
}

fn sum_numa_maps(text: &str) -> (Pages, Pages) {
    let (mut private, mut files) = (Pages::new(), Pages::new());
    for line in text.lines() {
        let word = |key: &str| line.split_whitespace().find_map(|w| w.strip_prefix(key));
        // Counts are in pages of the mapping: 4 KiB but for hugetlbfs.
        let per_page = word("kernelpagesize_kB=")
            .and_then(|k| k.parse().ok())
            .unwrap_or(4)
            / (PAGE / 1024);
        let nodes: Pages = line
            .split_whitespace()
            .filter_map(|w| w.strip_prefix('N')?.split_once('='))
            .filter_map(|(node, pages)| Some((node.parse().ok()?, pages.parse::<u64>().ok()? * per_page)))
            .collect();
        let all: u64 = nodes.values().sum();
        // A line of a file says how many pages are copies that were written to, and not on which node those are.
        let copies = match word("file=") {
            None => all,
            Some(_) => word("anon=").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * per_page,
        };
        for (node, pages) in nodes {
            let own = pages * copies.min(all) / all.max(1);
            *private.entry(node).or_default() += own;
            *files.entry(node).or_default() += pages - own;
        }
    }
    (private, files)
}

/// Memory of a process by node, as `numastat -p` adds it up, in MiB (two decimals).
///
/// # Errors
/// The program is not there, fails, or prints something else.
pub fn numastat(pid: i32) -> Result<BTreeMap<u32, f64>, Failure> {
    let output = std::process::Command::new(program("numastat")?)
        .args(["-p", &pid.to_string()])
        .output()
        .map_err(Failure::system("starting numastat"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found = parse_numastat(&text);
    ensure!(
        output.status.success() && !found.is_empty(),
        "numastat ({}): {text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(found)
}

/// Tables of as many nodes as fit into a line, each with a head (`Node 0  Node 1  Total`) and a row `Total`.
fn parse_numastat(text: &str) -> BTreeMap<u32, f64> {
    let mut out = BTreeMap::new();
    let mut head: Vec<u32> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["Node", ..] => {
                let nodes = words.windows(2).filter(|pair| pair[0] == "Node");
                head = nodes.filter_map(|pair| pair[1].parse().ok()).collect();
            }
            ["Total", amounts @ ..] => {
                let amounts = amounts.iter().filter_map(|a| a.parse::<f64>().ok());
                out.extend(head.iter().copied().zip(amounts));
            }
            _ => {}
        }
    }
    out
}

/// Which node has which frame: the kernel's memory blocks. Read before blocks are taken away.
#[derive(Clone, Debug)]
pub struct Frames {
    block_bytes: u64,
    nodes: BTreeMap<u64, u32>,
}

impl Frames {
    /// From `/sys/devices/system/memory`.
    ///
    /// # Errors
    /// The kernel has no memory blocks (`CONFIG_MEMORY_HOTPLUG`), or they are not as expected.
    pub fn read() -> Result<Self, Failure> {
        let base = Path::new("/sys/devices/system/memory");
        let size = text(base.join("block_size_bytes"))?;
        let block_bytes = u64::from_str_radix(&size, 16)
            .map_err(|_| Failure::Broken(format!("block_size_bytes is {size}")))?;
        let mut nodes = BTreeMap::new();
        for (block, path) in entries(base, "memory")? {
            if let Some((node, _)) = entries(&path, "node")?.first() {
                let node = u32::try_from(*node).map_err(|_| Failure::Broken(format!("node {node}")))?;
                nodes.insert(block, node);
            }
        }
        ensure!(!nodes.is_empty(), "no memory block belongs to a node");
        Ok(Self { block_bytes, nodes })
    }

    /// The blocks of a node.
    pub fn blocks_of(&self, node: u32) -> Vec<u64> {
        let of = self.nodes.iter().filter(|(_, n)| **n == node);
        of.map(|(block, _)| *block).collect()
    }

    /// The node of each page of a range of a process's memory; `None` for pages that are not in memory.
    ///
    /// # Errors
    /// The page tables cannot be read.
    pub fn of_pages(&self, pid: i32, start: u64, pages: u64) -> Result<Vec<Option<u32>>, Failure> {
        let blocks = self.blocks_of_pages(pid, start, pages)?;
        let nodes = blocks.into_iter().map(|block| self.nodes.get(&block?).copied());
        Ok(nodes.collect())
    }

    /// The memory block of each page of a range of a process's memory; `None` for pages that are not in memory.
    ///
    /// # Errors
    /// The page tables cannot be read.
    pub fn blocks_of_pages(&self, pid: i32, start: u64, pages: u64) -> Result<Vec<Option<u64>>, Failure> {
        let path = format!("/proc/{pid}/pagemap");
        let what = || format!("reading {path}");
        let file = File::open(&path).map_err(Failure::system(what()))?;
        let mut entries = vec![0u8; usize::try_from(pages * 8).unwrap_or(0)];
        file.read_exact_at(&mut entries, start / PAGE * 8)
            .map_err(Failure::system(what()))?;
        let block_of = |entry: u64| (entry & PRESENT != 0).then(|| (entry & FRAME) * PAGE / self.block_bytes);
        let words = entries.chunks_exact(8).filter_map(|word| word.first_chunk());
        Ok(words.map(|w| block_of(u64::from_ne_bytes(*w))).collect())
    }
}

/// Entries of a directory named PREFIX and a number, in order of the numbers.
fn entries(directory: &Path, prefix: &str) -> Result<Vec<(u64, std::path::PathBuf)>, Failure> {
    let what = || format!("reading {}", directory.display());
    let mut out = Vec::new();
    for entry in fs::read_dir(directory).map_err(Failure::system(what()))? {
        let entry = entry.map_err(Failure::system(what()))?;
        let name = entry.file_name();
        if let Some(number) = name.to_str().and_then(|n| n.strip_prefix(prefix)?.parse().ok()) {
            out.push((number, entry.path()));
        }
    }
    out.sort();
    Ok(out)
}

/// How many pages lie on each node, or in each memory block.
pub fn by_node<N: Ord + Copy>(pages: &[Option<N>]) -> BTreeMap<N, u64> {
    let mut out = BTreeMap::new();
    for node in pages.iter().flatten() {
        *out.entry(*node).or_default() += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read_and_written() {
        assert_eq!(numbers("0-2,5\n"), Some(BTreeSet::from([0, 1, 2, 5])));
        assert_eq!(numbers(""), Some(BTreeSet::new()));
        assert_eq!(numbers("0-x"), None);
        assert_eq!(list(&BTreeSet::from([0, 1, 5])), "0,1,5");
    }

    #[test]
    fn numa_maps_are_summed_over_mappings_and_page_sizes() {
        let text = "55d0 default file=/bin/x mapped=3 N0=3 kernelpagesize_kB=4\n\
                    7f00 default anon=16 dirty=16 N0=1 N1=15 kernelpagesize_kB=4\n\
                    7f80 default file=/anon_hugepage huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n\
                    7fff default stack anon=2 dirty=2 active=0 N0=2 kernelpagesize_kB=4\n";
        let (private, files) = sum_numa_maps(text);
        assert_eq!(private, BTreeMap::from([(0, 3), (1, 15 + 1024)]));
        assert_eq!(files, BTreeMap::from([(0, 3), (1, 0)]));
    }

    #[test]
    fn copies_of_a_file_are_private_in_proportion() {
        let text = "7f00 default file=/lib/c anon=4 dirty=4 mapped=12 N0=12 N1=4 kernelpagesize_kB=4\n";
        let (private, files) = sum_numa_maps(text);
        assert_eq!(private, BTreeMap::from([(0, 3), (1, 1)]));
        assert_eq!(files, BTreeMap::from([(0, 9), (1, 3)]));
    }

    #[test]
    fn tables_of_numastat_are_read_also_when_they_are_split() {
        let text = "\nPer-node process memory usage (in MBs) for PID 9 (keeper)\n\
                    \x20                          Node 0          Node 1\n\
                    \x20                 --------------- ---------------\n\
                    Huge                         0.00            0.00\n\
                    Private                     48.06            0.27\n\
                    ----------------  --------------- ---------------\n\
                    Total                       50.06            0.27\n\n\
                    \x20                          Node 2           Total\n\
                    Total                        1.50           51.83\n";
        assert_eq!(
            parse_numastat(text),
            BTreeMap::from([(0, 50.06), (1, 0.27), (2, 1.5)])
        );
    }

    #[test]
    fn the_masks_of_this_process_are_read() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let masks = masks(pid).unwrap();
        assert!(masks.contains_key(&pid), "the main thread is among {masks:?}");
        assert!(masks.values().all(|m| !m.is_empty()));
        assert_eq!(process(pid).unwrap().pid, pid);
        assert!(rollup_kib(pid, "Rss").unwrap() > 0);
    }

    #[test]
    fn pages_that_are_not_there_have_no_node() {
        assert_eq!(
            by_node(&[Some(0), None, Some(1), Some(1)]),
            BTreeMap::from([(0, 1), (1, 2)])
        );
    }
}
