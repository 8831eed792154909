//! Safety check: code in large pages. A breakpoint splits a 2 MiB page for good, which costs more than counting may.
//!
//! Few machines have such pages, and `FilePmdMapped` in `/proc/meminfo` tells. Only if it is not zero, the page tables
//! of the file's mappings are read, once per program before the first breakpoint.

use homeostat_kernel::memory::{PIECE, PIECES_PER_QUERY_MAX, Pagemap, PieceState};
use homeostat_kernel::process::{open_process, text_of};
use homeostat_kernel::{Root, files};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use homeostat_sensors::patient::patiently;
use homeostat_sensors::storage::{DeviceInode, Refusal};
use homeostat_sensors::walks;

/// Most bytes read of a captured `smaps`, with about 700 bytes per mapping.
const SMAPS_MAX: usize = 64 * 1024 * 1024;

/// Checks that none of these processes has code of the file in large pages.
///
/// # Errors
/// A sentence: one has, or that is unknown.
pub(crate) fn allow(root: &Root, processes: &[ProcessId], file: &DeviceInode) -> Result<(), Refusal> {
    let memory = files::text(root, "/proc/meminfo").unwrap_or_default();
    // Kernels without the line have no such pages.
    if kib(&memory, "FilePmdMapped:").unwrap_or(0) == 0 {
        return Ok(());
    }
    for process in processes {
        let dir = match open_process(root, *process) {
            Ok(dir) => dir,
            Err(PlatformError::Vanished { .. }) => continue,
            Err(e) => return Err(Refusal::Now(e.to_string())),
        };
        let (below, process, file) = (root.clone(), *process, *file);
        let told = patiently(process.pid, move || {
            if below.is_live() {
                maps_large_pages(&below, process, &file)
            } else {
                let text = text_of(&dir, "smaps", SMAPS_MAX).map_err(|e| e.to_string())?;
                Ok(in_large_pages(&text, &file))
            }
        });
        let large = told.and_then(|told| told).map_err(|why| {
            Refusal::Now(format!(
                "whether code of process {process} lies in large pages cannot be told: {why}"
            ))
        })?;
        if large {
            return Err(Refusal::Lasting(format!(
                "code of process {process} lies in large pages, which the kernel would split for a breakpoint"
            )));
        }
    }
    Ok(())
}

fn kib(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name))?
        .split_ascii_whitespace()
        .next()?
        .parse()
        .ok()
}

/// Whether large pages map the file, by the page tables: reading `smaps` would hold the address space for a long walk.
fn maps_large_pages(root: &Root, process: ProcessId, file: &DeviceInode) -> Result<bool, String> {
    let (mappings, more) = walks::mappings(root, process).ok_or("it ended")?;
    if more {
        return Err("it has too many mappings".into());
    }
    let mut pagemap = Pagemap::open(&root.path("/proc"), process.pid).map_err(|e| e.to_string())?;
    let mut states = Vec::new();
    for mapping in mappings {
        let device = mapping.device.split_once(':').and_then(|(major, minor)| {
            let number = |text| u32::from_str_radix(text, 16).ok();
            Some((number(major)?, number(minor)?))
        });
        if device.map(|device| (device, mapping.inode)) != Some(*file) {
            continue;
        }
        let (mut at, end) = (mapping.start.next_multiple_of(PIECE), mapping.end / PIECE * PIECE);
        while at < end {
            let count = ((end - at) / PIECE).min(PIECES_PER_QUERY_MAX);
            pagemap
                .piece_states(at, count, &mut states)
                .map_err(|e| e.to_string())?;
            if states.contains(&PieceState::Huge) {
                return Ok(true);
            }
            at += count * PIECE;
        }
    }
    Ok(false)
}

/// The same from the text of a captured `smaps`.
fn in_large_pages(smaps: &str, file: &DeviceInode) -> bool {
    let mut of_the_file = false;
    for line in smaps.lines() {
        if let Some(mapped) = file_of(line) {
            of_the_file = mapped == *file;
        } else if of_the_file && kib(line, "FilePmdMapped:").is_some_and(|kib| kib > 0) {
            return true;
        }
    }
    false
}

/// Device and inode from the first line of a mapping, `start-end perms offset device inode path`. `None`: another line.
fn file_of(line: &str) -> Option<DeviceInode> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    hex(start)?;
    hex(end)?;
    let (major, minor) = fields.nth(2)?.split_once(':')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    Some(((number(major)?, number(minor)?), fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0400000 r-xp 00200000 fe:00 1234                       /usr/bin/database
Size:               4096 kB
FilePmdMapped:      2048 kB
VmFlags: rd ex mr mw me
7f00c0000000-7f00c0400000 r-xp 00000000 fe:00 99                         /usr/lib/libc.so.6
Size:               4096 kB
FilePmdMapped:         0 kB
";

    #[test]
    fn code_in_large_pages_is_seen_in_its_own_file_only() {
        assert!(in_large_pages(SMAPS, &((0xfe, 0), 1234)));
        assert!(!in_large_pages(SMAPS, &((0xfe, 0), 99)));
        assert!(!in_large_pages(SMAPS, &((0xfe, 1), 1234)));
        assert!(!in_large_pages("", &((0xfe, 0), 1234)));
    }

    #[test]
    fn programs_are_asked_only_where_the_machine_has_such_pages() {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "proc/7/stat",
            "7 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 42 20 21",
        );
        write("proc/7/smaps", SMAPS);
        let root = Root::new(tree.path());
        let process = ProcessId {
            pid: 7,
            start_ticks: 42,
        };
        let allowed = |inode| allow(&root, &[process], &((0xfe, 0), inode));
        write("proc/meminfo", "MemTotal: 1 kB\nFilePmdMapped:         0 kB\n");
        assert_eq!(allowed(1234), Ok(()), "nobody looks");
        write("proc/meminfo", "MemTotal: 1 kB\nFilePmdMapped:      2048 kB\n");
        assert!(matches!(allowed(1234), Err(Refusal::Lasting(why)) if why.contains("process 7")));
        assert_eq!(allowed(99), Ok(()));
        // Of whoever cannot be asked it is not known; who has ended needs nothing.
        std::fs::remove_file(tree.path().join("proc/7/smaps")).unwrap();
        assert!(matches!(allowed(99), Err(Refusal::Now(_))));
        std::fs::remove_dir_all(tree.path().join("proc/7")).unwrap();
        assert_eq!(allowed(1234), Ok(()));
    }
}
