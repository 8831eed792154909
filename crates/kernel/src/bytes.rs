//! Parsers of the kernel's texts as bytes: without allocation or panic, also for cut texts.

/// A decimal number without sign, all of the bytes.
pub fn number(bytes: &[u8]) -> Option<u64> {
    if bytes.is_empty() {
        return None;
    }
    let mut value: u64 = 0;
    for &b in bytes {
        if !b.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(b - b'0'))?;
    }
    Some(value)
}

/// A hexadecimal number without prefix, all of the bytes.
pub fn hexadecimal(bytes: &[u8]) -> Option<u64> {
    if bytes.is_empty() || bytes.len() > 16 {
        return None;
    }
    let mut value: u64 = 0;
    for &b in bytes {
        let digit = (b as char).to_digit(16)?;
        value = (value << 4) | u64::from(digit);
    }
    Some(value)
}

/// A decimal number that may be negative.
pub fn signed(bytes: &[u8]) -> Option<i64> {
    match bytes.strip_prefix(b"-") {
        Some(rest) => number(rest).and_then(|n| i64::try_from(n).ok()).map(|n| -n),
        None => number(bytes).and_then(|n| i64::try_from(n).ok()),
    }
}

/// The words between white space.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(u8::is_ascii_whitespace).filter(|w| !w.is_empty())
}

/// The lines, without their ends.
pub fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|&b| b == b'\n').filter(|l| !l.is_empty())
}

/// The first number after `Key:` at the start of a line, as in `/proc/meminfo` and `/proc/PID/status`.
pub fn keyed(bytes: &[u8], key: &str) -> Option<u64> {
    lines(bytes).find_map(|line| {
        let rest = line.strip_prefix(key.as_bytes())?.strip_prefix(b":")?;
        words(rest).next().and_then(number)
    })
}

/// Most CPUs or nodes that a list may name: `NR_CPUS` of the largest kernels in use is 8192.
pub const LIST_MAX: usize = 8192;

/// A list such as `0-3,8,10-11` (cpulist, nodelist), ascending; `None` when it is not one. Empty text: empty list.
pub fn list(bytes: &[u8]) -> Option<Vec<u32>> {
    let text = bytes.trim_ascii();
    let mut found = Vec::new();
    if text.is_empty() {
        return Some(found);
    }
    for part in text.split(|&b| b == b',') {
        let mut ends = part.splitn(2, |&b| b == b'-');
        let first = number(ends.next()?)?;
        let last = match ends.next() {
            Some(end) => number(end)?,
            None => first,
        };
        if last < first || last >= LIST_MAX as u64 {
            return None;
        }
        for n in first..=last {
            found.push(u32::try_from(n).ok()?);
        }
        if found.len() > LIST_MAX {
            return None;
        }
    }
    found.sort_unstable();
    found.dedup();
    Some(found)
}

/// A size such as `32768K` or `8M` (cache sizes in sysfs), in bytes.
pub fn size(bytes: &[u8]) -> Option<u64> {
    let text = bytes.trim_ascii();
    let (digits, factor) = match text.split_last()? {
        (b'K', rest) => (rest, 1024),
        (b'M', rest) => (rest, 1024 * 1024),
        (b'G', rest) => (rest, 1024 * 1024 * 1024),
        _ => (text, 1),
    };
    number(digits)?.checked_mul(factor)
}

/// The word in brackets of a choice file: `madvise` of `always [madvise] never`.
pub fn chosen(bytes: &[u8]) -> Option<&str> {
    let open = bytes.iter().position(|&b| b == b'[')?;
    let rest = bytes.get(open + 1..)?;
    let close = rest.iter().position(|&b| b == b']')?;
    std::str::from_utf8(rest.get(..close)?).ok()
}

/// FNV-1a, 64 bits: a stable short name for a text that is not kept, for size or secrecy.
pub fn fingerprint(parts: &[&[u8]]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for part in parts {
        for &b in part.iter().chain(&[0]) {
            hash = (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_that_overflow_or_carry_other_signs_are_refused() {
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(number(b"18446744073709551616"), None);
        assert_eq!(number(b""), None);
        assert_eq!(number(b"1x"), None);
        assert_eq!(signed(b"-12"), Some(-12));
        assert_eq!(signed(b"--12"), None);
        assert_eq!(hexadecimal(b"7ffcdeadbeef"), Some(0x7ffc_dead_beef));
        assert_eq!(hexadecimal(b"11112222333344445"), None);
    }

    #[test]
    fn lists_are_ascending_and_bounded() {
        assert_eq!(list(b"0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(list(b"\n"), Some(vec![]));
        assert_eq!(list(b"3-1"), None);
        assert_eq!(list(b"0-4294967295"), None);
        assert_eq!(list(b"0-,"), None);
    }

    #[test]
    fn sizes_and_choices() {
        assert_eq!(size(b"32768K\n"), Some(32 << 20));
        assert_eq!(size(b"K"), None);
        assert_eq!(chosen(b"always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen(b"always madvise"), None);
        assert_eq!(chosen(b"[always"), None);
    }

    #[test]
    fn a_key_matches_whole_words_only() {
        let text = b"MemTotalX: 1 kB\nMemTotal:       24684084 kB\n";
        assert_eq!(keyed(text, "MemTotal"), Some(24_684_084));
        assert_eq!(keyed(text, "Mem"), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = number(&bytes);
            let _ = signed(&bytes);
            let _ = hexadecimal(&bytes);
            let _ = size(&bytes);
            let _ = chosen(&bytes);
            let _ = keyed(&bytes, "A");
            if let Some(l) = list(&bytes) {
                prop_assert!(l.windows(2).all(|w| w[0] < w[1]) && l.len() <= LIST_MAX);
            }
        }

        #[test]
        fn numbers_read_back(n in any::<u64>()) {
            prop_assert_eq!(number(n.to_string().as_bytes()), Some(n));
            prop_assert_eq!(hexadecimal(format!("{n:x}").as_bytes()), Some(n));
        }
    }
}
