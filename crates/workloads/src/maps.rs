//! Which ranges of a process could be mapped by large pages: just enough of `/proc/PID/smaps` for `collapse`.

use crate::LARGE_PAGE_BYTES;

/// Bytes of a large page as an address difference.
const BLOCK: u64 = LARGE_PAGE_BYTES as u64;

/// One mapping of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMapping {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Where it begins in its file, in bytes.
    pub offset: u64,
    /// File or name; empty for plain anonymous memory.
    pub name: String,
    /// Written by others, too (`s` in the permissions).
    pub shared: bool,
    /// Can be read at all.
    pub readable: bool,
    /// Resident, in KiB.
    pub resident_kib: u64,
    /// Mapped by large pages, in KiB.
    pub large_kib: u64,
    /// `VmFlags`, as two-letter words.
    pub flags: Vec<String>,
}

impl ProcessMapping {
    /// Whether the kernel could map it by large pages and nobody has refused it.
    #[must_use]
    pub fn is_eligible(&self) -> bool {
        // io, pf: device memory; ht: hugetlbfs has its own large pages; nh: the program refused (MADV_NOHUGEPAGE).
        let refused = self
            .flags
            .iter()
            .any(|flag| matches!(flag.as_str(), "io" | "pf" | "ht" | "nh"));
        self.readable && !refused && (self.is_anonymous() || self.is_shared_memory())
    }

    fn is_anonymous(&self) -> bool {
        !self.shared && (self.name.is_empty() || self.name == "[heap]" || self.name.starts_with("[anon:"))
    }

    fn is_shared_memory(&self) -> bool {
        // A large page of a file must begin at a multiple of its size in the file as in memory.
        let aligned = self.start % BLOCK == self.offset % BLOCK;
        let shmem = ["/dev/zero", "/SYSV", "/memfd:", "/dev/shm/", "[anon_shmem:"];
        self.shared && aligned && shmem.iter().any(|prefix| self.name.starts_with(prefix))
    }

    /// The blocks of 2 MiB that lie inside, by their first address.
    pub fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        let (first, end) = (self.start.next_multiple_of(BLOCK), self.end);
        (0..end.saturating_sub(first) / BLOCK).map(move |block| first + block * BLOCK)
    }
}

/// Reads `smaps`. Lines that are not understood are passed over: the kernel adds new ones.
#[must_use]
pub fn parse_smaps(text: &str) -> Vec<ProcessMapping> {
    let mut mappings: Vec<ProcessMapping> = Vec::new();
    for line in text.lines() {
        if let Some(mapping) = parse_head(line) {
            mappings.push(mapping);
        } else if let (Some(mapping), Some((key, value))) = (mappings.last_mut(), line.split_once(':')) {
            let kib = || {
                value
                    .split_ascii_whitespace()
                    .next()
                    .and_then(|number| number.parse().ok())
                    .unwrap_or(0)
            };
            match key {
                "Rss" => mapping.resident_kib = kib(),
                "AnonHugePages" | "ShmemPmdMapped" => mapping.large_kib += kib(),
                "VmFlags" => mapping.flags = value.split_ascii_whitespace().map(str::to_owned).collect(),
                _ => {}
            }
        }
    }
    mappings
}

/// `7f00-7f10 rw-p 00000000 00:00 0    [heap]`
fn parse_head(line: &str) -> Option<ProcessMapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let permissions = words.next()?;
    let mapping = ProcessMapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        shared: permissions.ends_with('s'),
        readable: permissions.starts_with('r'),
        offset: u64::from_str_radix(words.next()?, 16).ok()?,
        name: words.skip(2).collect::<Vec<_>>().join(" "),
        ..ProcessMapping::default()
    };
    (mapping.end > mapping.start).then_some(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c8a00000-55d0c8c00000 r-xp 00001000 08:01 1234                       /usr/bin/redis server
Rss:                 900 kB
AnonHugePages:         0 kB
VmFlags: rd ex mr mw me
7f0000100000-7f0000b00000 rw-p 00000000 00:00 0
Rss:                8192 kB
AnonHugePages:      4096 kB
ShmemPmdMapped:        0 kB
SomethingNew:         12 kB
VmFlags: rd wr mr mw me ac
7f0001000000-7f0001400000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me nh
7f0002000000-7f0002800000 rw-s 00000000 00:01 99                         /memfd:buffer (deleted)
ShmemPmdMapped:     2048 kB
VmFlags: rd wr sh mr mw me ms
7f0003001000-7f0003801000 rw-s 00000000 00:01 17                         /dev/zero (deleted)
VmFlags: rd wr sh mr mw me ms
7f0004000000-7f0004400000 ---p 00000000 00:00 0
VmFlags: mr mw me
";

    #[test]
    fn mappings_are_read_with_their_names_and_sizes() {
        let mappings = parse_smaps(SMAPS);
        assert_eq!(mappings.len(), 6);
        assert_eq!(mappings[0].name, "/usr/bin/redis server");
        assert_eq!((mappings[1].resident_kib, mappings[1].large_kib), (8192, 4096));
        assert_eq!(mappings[3].large_kib, 2048);
        assert_eq!(mappings[4].flags[2], "sh");
    }

    #[test]
    fn only_what_the_kernel_can_convert_and_nobody_refused_is_eligible() {
        let eligible: Vec<bool> = parse_smaps(SMAPS)
            .iter()
            .map(ProcessMapping::is_eligible)
            .collect();
        // program text, anonymous, refused, memfd, misaligned shared memory, inaccessible
        assert_eq!(eligible, [false, true, false, true, false, false]);
    }

    #[test]
    fn blocks_lie_wholly_inside() {
        let mappings = parse_smaps(SMAPS);
        let blocks: Vec<u64> = mappings[1].blocks().collect();
        // 0x100000..0xb00000 holds the blocks at 2, 4, 6 and 8 MiB; that at 10 MiB would reach beyond the end.
        assert_eq!(
            blocks,
            [
                0x7f00_0020_0000,
                0x7f00_0040_0000,
                0x7f00_0060_0000,
                0x7f00_0080_0000
            ]
        );
        let small = ProcessMapping {
            start: 0x1000,
            end: 0x2000,
            ..ProcessMapping::default()
        };
        assert_eq!(small.blocks().count(), 0);
    }

    #[test]
    fn damaged_text_yields_nothing_wrong() {
        for text in [
            "",
            "Rss: 5 kB\n",
            "5-3 rw-p 0 0 0\n",
            "zz-yy rw-p 0 0 0\n",
            "1000-2000\n",
            "-\n:\n",
        ] {
            assert_eq!(parse_smaps(text), [], "{text:?}");
        }
    }
}
