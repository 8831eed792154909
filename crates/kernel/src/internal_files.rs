//! Devices of the kernel's internal files without a mount, found by making one of each: shared memory (memfd_create(2),
//! `/dev/zero`, System V), huge pages, rings of asynchronous I/O (io_setup(2)). In mappings they look like files of a
//! disk.

use rustix::fs::{MemfdFlags, fstat, major, memfd_create, minor};
use std::collections::BTreeSet;

/// Major and minor numbers; a kind that this kernel lacks is left out.
pub fn devices() -> BTreeSet<(u32, u32)> {
    let kinds = [
        MemfdFlags::empty(),
        MemfdFlags::HUGETLB,
        MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
    ];
    let mut found: BTreeSet<(u32, u32)> = kinds
        .into_iter()
        .filter_map(|kind| {
            let file = memfd_create("homeostat", MemfdFlags::CLOEXEC | kind).ok()?;
            let device = fstat(&file).ok()?.st_dev;
            Some((major(device), minor(device)))
        })
        .collect();
    found.extend(ring_of_input_and_output());
    found
}

fn ring_of_input_and_output() -> Option<(u32, u32)> {
    let mut context: libc::c_ulong = 0;
    // SAFETY: the kernel writes one word, the address of the mapped ring, to a live one.
    if unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) } != 0 {
        return None;
    }
    let maps = std::fs::read_to_string("/proc/self/maps");
    // SAFETY: the unused ring just made; the kernel removes its own mapping.
    unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    device_at(&maps.ok()?, context)
}

fn device_at(maps: &str, start: u64) -> Option<(u32, u32)> {
    let line = maps.lines().find(|line| {
        let begin = line
            .split('-')
            .next()
            .and_then(|n| u64::from_str_radix(n, 16).ok());
        begin == Some(start)
    })?;
    let mut fields = line.split(' ').skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode: u64 = fields.next()?.parse().ok()?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    (inode != 0).then_some((number(major)?, number(minor)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_by_a_descriptor_lies_on_a_device_without_a_disk() {
        let found = devices();
        assert!(!found.is_empty());
        assert!(found.iter().all(|(major, _)| *major == 0), "{found:?}");
    }

    #[test]
    fn a_ring_is_found_where_it_was_mapped() {
        let maps =
            "1000-2000 r--p 00000000 fe:00 12 /x\n7f00-7f10 rw-s 00000000 00:13 77    /[aio] (deleted)\n";
        assert_eq!(device_at(maps, 0x7f00), Some((0, 0x13)));
        assert_eq!(device_at(maps, 0x7f08), None);
        assert_eq!(device_at("", 1), None);
    }
}
