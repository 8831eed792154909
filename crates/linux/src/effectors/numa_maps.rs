//! `/proc/PID/numa_maps` (proc_pid_numa_maps(5)): the memory policy of each mapping, and where its pages lie.

use crate::sensors::bytes::{hexadecimal, lines, number, words};

/// One mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    /// First address.
    pub(super) start: u64,
    /// The policy, when somebody chose one (`bind:0`, `interleave:0-3`, …). The kernel writes that of the process for
    /// mappings without one of their own.
    pub(super) policy: Option<String>,
    /// Size of its pages in KiB: 2048 and more for mappings of reserved large pages.
    pub(super) page_kib: u64,
    /// Pages by node, in the order of the kernel.
    pub(super) nodes: Vec<(u32, u64)>,
}

impl Area {
    /// Pages on other nodes than these.
    pub(super) fn pages_away(&self, homes: &[u32]) -> u64 {
        self.nodes
            .iter()
            .filter(|(n, _)| !homes.contains(n))
            .map(|(_, pages)| pages)
            .sum()
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let mut parts = words(line).peekable();
        let start = hexadecimal(parts.next()?)?;
        let mut policy = String::from_utf8_lossy(parts.next()?).into_owned();
        // `weighted interleave:0-1` and `prefer (many):0-1` are policies with a space.
        while policy == "weighted" || parts.peek().is_some_and(|next| next.starts_with(b"(many)")) {
            policy.push(' ');
            policy.push_str(&String::from_utf8_lossy(parts.next()?));
        }
        let mut area = Self {
            start,
            policy: (policy != "default" && policy != "local").then_some(policy),
            page_kib: 4,
            nodes: Vec::new(),
        };
        for part in parts {
            let Some(at) = part.iter().position(|&b| b == b'=') else {
                continue;
            };
            let (Some(key), Some(value)) = (part.get(..at), part.get(at + 1..).and_then(number)) else {
                continue;
            };
            match key {
                b"kernelpagesize_kB" => area.page_kib = value,
                [b'N', digits @ ..] => {
                    if let Some(node) = number(digits).and_then(|n| u32::try_from(n).ok()) {
                        area.nodes.push((node, value));
                    }
                }
                _ => {}
            }
        }
        Some(area)
    }
}

/// All mappings of the text, in ascending order of their addresses. A line that was cut at the end of the text, and one
/// that is not understood, is left out.
pub(super) fn parse(text: &[u8]) -> Vec<Area> {
    let whole = text.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
    lines(text.get(..whole).unwrap_or_default())
        .filter_map(Area::parse)
        .collect()
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
7f0003000000 local anon=3 dirty=3 N0=1 N12=2 kernelpagesize_kB=4
7f0004000000 default file=/anon_hugepage\\040(deleted) huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
7fff00000000 default anon=1 N0=1 kernelpa";

    #[test]
    fn policies_and_nodes_of_every_kind_are_read() {
        let found = parse(TEXT);
        let policies: Vec<Option<&str>> = found.iter().map(|a| a.policy.as_deref()).collect();
        assert_eq!(
            policies,
            [
                None,
                Some("bind:1"),
                Some("weighted interleave:0-1"),
                Some("prefer (many):0"),
                Some("prefer=static:1"),
                None,
                None,
                None
            ],
            "and the cut line is left out"
        );
        assert_eq!(found[5].nodes, [(0, 1), (12, 2)]);
        assert_eq!(
            (
                found[5].pages_away(&[0]),
                found[5].pages_away(&[5]),
                found[5].pages_away(&[0, 12])
            ),
            (2, 3, 0)
        );
        assert_eq!((found[0].page_kib, found[6].page_kib), (4, 2048));
        assert_eq!(found[7].start, 0x7ffc_0000_0000);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_cut_at_any_place_keeps_the_whole_lines(cut in 0..TEXT.len()) {
            let (whole, part) = (parse(TEXT), parse(&TEXT[..cut]));
            prop_assert_eq!(&part[..], &whole[..part.len()]);
        }
    }
}
