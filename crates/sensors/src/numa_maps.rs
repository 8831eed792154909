//! `/proc/PID/numa_maps` (proc_pid_numa_maps(5)): policy, backing and nodes of each mapping.

use homeostat_kernel::bytes::{hexadecimal, lines, number, words};
use std::borrow::Cow;

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Area<'t> {
    /// First address.
    pub start: u64,
    /// The policy as one word (`default`, `bind:0`, `weightedinterleave:0-3`, `prefer(many):0`). The kernel writes that
    /// of the process for mappings without their own.
    policy: Cow<'t, str>,
    /// The file behind it, as the kernel writes its name.
    pub file: Option<&'t [u8]>,
    /// Whether it consists of reserved huge pages.
    pub is_hugetlb: bool,
    /// Its anonymous pages: for a file, pages written in a private copy.
    pub anonymous: u64,
    /// Size of its pages in KiB; `None` before Linux 3.14.
    pub page_kib: Option<u64>,
    /// Pages by node, in the order of the kernel.
    pub nodes: Vec<(u32, u64)>,
}

impl<'t> Area<'t> {
    /// The policy, if somebody chose one; `local` names the default.
    pub fn chosen_policy(&self) -> Option<&str> {
        (!matches!(&*self.policy, "default" | "local")).then_some(&*self.policy)
    }

    /// Pages in memory.
    pub fn pages(&self) -> u64 {
        self.nodes.iter().fold(0, |sum, (_, n)| sum.saturating_add(*n))
    }

    fn parse(line: &'t [u8]) -> Option<Self> {
        let mut parts = words(line).peekable();
        let start = hexadecimal(parts.next()?)?;
        let mut policy = String::from_utf8_lossy(parts.next()?);
        // Two policies are written as two words: `weighted interleave:0-1` and `prefer (many):0-1`.
        if let Some(next) = parts.peek() {
            if (next.starts_with(b"(many)") || next.starts_with(b"interleave"))
                && matches!(&*policy, "prefer" | "weighted")
            {
                policy.to_mut().push_str(&String::from_utf8_lossy(next));
                parts.next();
            }
        }
        let mut area = Self {
            start,
            policy,
            file: None,
            is_hugetlb: false,
            anonymous: 0,
            page_kib: None,
            nodes: Vec::new(),
        };
        for part in parts {
            let mut sides = part.splitn(2, |&b| b == b'=');
            let (Some(key), value) = (sides.next(), sides.next()) else {
                continue;
            };
            match (key, value) {
                (b"file", Some(name)) => area.file = Some(name),
                (b"huge", None) => area.is_hugetlb = true,
                (b"anon", Some(pages)) => area.anonymous = number(pages).unwrap_or(0),
                (b"kernelpagesize_kB", Some(kib)) => area.page_kib = number(kib),
                ([b'N', digits @ ..], Some(pages)) => {
                    let node = number(digits).and_then(|n| u32::try_from(n).ok());
                    if let (Some(node), Some(pages)) = (node, number(pages)) {
                        area.nodes.push((node, pages));
                    }
                }
                _ => {}
            }
        }
        Some(area)
    }
}

/// All mappings of the text, in ascending order of addresses, without lines that are cut or not understood.
pub fn areas(text: &[u8]) -> impl Iterator<Item = Area<'_>> {
    let whole = text.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
    lines(text.get(..whole).unwrap_or_default()).filter_map(Area::parse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &[u8] = b"\
55f258569000 default file=/usr/bin/a\\040b mapped=2 N0=2 kernelpagesize_kB=4
5581aa000000 bind:1 heap anon=40 dirty=40 N1=40 kernelpagesize_kB=4
7f0000000000 weighted interleave:0-1 anon=8 dirty=8 N0=4 N1=4 kernelpagesize_kB=4
7f0001000000 prefer (many):0 anon=1 dirty=1 N0=1 kernelpagesize_kB=4
7f0002000000 prefer=static:1 anon=1 dirty=1 N0=1 kernelpagesize_kB=4
7f0003000000 local anon=3 dirty=3 N0=1 N12=2
7f0004000000 default file=/anon_hugepage\\040(deleted) huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
7fff00000000 default anon=1 N0=1 kernelpa";

    #[test]
    fn policies_and_nodes_of_every_kind_are_read() {
        let found: Vec<Area<'_>> = areas(TEXT).collect();
        let policies: Vec<Option<&str>> = found.iter().map(Area::chosen_policy).collect();
        assert_eq!(
            policies,
            [
                None,
                Some("bind:1"),
                Some("weightedinterleave:0-1"),
                Some("prefer(many):0"),
                Some("prefer=static:1"),
                None,
                None,
                None
            ],
            "and the cut line is left out"
        );
        assert_eq!(found[5].nodes, [(0, 1), (12, 2)]);
        assert_eq!((found[5].pages(), found[5].page_kib), (3, None));
        assert_eq!((found[0].page_kib, found[6].page_kib), (Some(4), Some(2048)));
        assert_eq!(found[0].file, Some(&b"/usr/bin/a\\040b"[..]));
        assert!(found[6].is_hugetlb && !found[0].is_hugetlb);
        assert_eq!((found[1].anonymous, found[7].start), (40, 0x7ffc_0000_0000));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = areas(&bytes).count();
        }

        #[test]
        fn a_cut_at_any_place_keeps_the_whole_lines(cut in 0..TEXT.len()) {
            let whole: Vec<Area<'_>> = areas(TEXT).collect();
            let part: Vec<Area<'_>> = areas(&TEXT[..cut]).collect();
            prop_assert_eq!(&part[..], &whole[..part.len()]);
        }
    }
}
