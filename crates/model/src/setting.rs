//! Settings of the kernel that have two names.

/// Pairs of which one counts, and the other reads zero (Documentation/admin-guide/sysctl/vm.rst): who writes one writes both,
/// so that the two are one thing for whoever asks what was set on top of what.
const PAIRS: &[(&str, &str)] = &[
    ("/proc/sys/vm/dirty_bytes", "/proc/sys/vm/dirty_ratio"),
    (
        "/proc/sys/vm/dirty_background_bytes",
        "/proc/sys/vm/dirty_background_ratio",
    ),
    ("/proc/sys/vm/overcommit_kbytes", "/proc/sys/vm/overcommit_ratio"),
];

/// The file of the other one of a pair.
pub fn other_of_pair(file: &str) -> Option<&'static str> {
    PAIRS.iter().find_map(|(a, b)| match file {
        f if f == *a => Some(*b),
        f if f == *b => Some(*a),
        _ => None,
    })
}

/// Whether two files are one setting: the same one, or a pair.
pub fn is_one_setting(a: &str, b: &str) -> bool {
    a == b || other_of_pair(a) == Some(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_one_setting_by_either_name() {
        let (bytes, ratio) = ("/proc/sys/vm/dirty_bytes", "/proc/sys/vm/dirty_ratio");
        assert!(is_one_setting(bytes, ratio) && is_one_setting(ratio, bytes) && is_one_setting(ratio, ratio));
        assert!(!is_one_setting("/proc/sys/vm/dirty_background_bytes", bytes));
        assert!(is_one_setting("/a", "/a") && !is_one_setting("/a", "/b"));
    }
}
