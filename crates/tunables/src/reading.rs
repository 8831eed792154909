//! What the kernel makes of a text that somebody writes into a setting.
//!
//! Two texts may mean one value (`0x10` and `16`, `Y` and `1`), and one text may mean another value than it shows (`30 # c`
//! is 30 for a sysctl, `010` is 8). This module is the only place that compares a text with a value in force. It follows the
//! kernel's parsers: `proc_get_long()` for /proc/sys, `kstrtoull()`, `kstrtobool()` and `sysfs_streq()` for /sys.

use crate::catalogue::{Kind, Tunable};
use crate::configured::Form;
use crate::tree::Tree;
use crate::values::Values;

/// What a text means for a setting that has a value now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reading {
    /// The value that is in force.
    Equal,
    /// This other value.
    Different(String),
    /// The kernel refuses the text; the reason.
    Refused(String),
    /// It cannot be told from the files; the reason.
    Unknown(String),
}

/// Longest number that the kernel's parser for sysctls takes (`TMPBUFLEN`).
const DIGITS_MAX: usize = 21;
/// Schedulers of the multi-queue block layer, some of them modules that the kernel loads when they are asked for.
const SCHEDULERS: [&str; 4] = ["none", "mq-deadline", "kyber", "bfq"];
/// Longest list of CPUs or ports that is compared number by number.
const LIST_MAX: u32 = 1 << 17;

/// What the kernel makes of `text`, written to the setting at `path` that reads `shown` now.
pub fn of(tunable: &Tunable, path: &str, form: Form, text: &str, shown: &str, tree: &dyn Tree) -> Reading {
    let now = tunable.values.normal(shown);
    match form {
        Form::Plain => plain(tunable, path, text, shown, &now, tree),
        Form::Computed => Reading::Unknown("the value is computed when it is set".to_owned()),
        Form::AtLeast | Form::AtMost => {
            let (Ok(bound), Ok(value)) = (text.trim().parse::<i128>(), now.parse::<i128>()) else {
                return Reading::Unknown(format!("{text:?} is compared with the value from before"));
            };
            let holds = if form == Form::AtLeast {
                value >= bound
            } else {
                value <= bound
            };
            match holds {
                true => Reading::Equal,
                false => Reading::Different(bound.to_string()),
            }
        }
        Form::FirstOffered => {
            let words = || text.split('|').map(str::trim).filter(|w| !w.is_empty());
            if words().any(|w| w == now) {
                Reading::Equal
            } else {
                Reading::Different(words().next().unwrap_or_default().to_owned())
            }
        }
    }
}

fn plain(tunable: &Tunable, path: &str, text: &str, shown: &str, now: &str, tree: &dyn Tree) -> Reading {
    if tunable.kind == Kind::Boot {
        return same(text.trim() == now || (text.is_empty() && now == "given"), text);
    }
    let is_sysctl = path.starts_with("/proc/sys/");
    match &tunable.values {
        Values::Integers { count, min, max } => {
            let bounds = (*min, *max);
            if is_sysctl {
                sysctl_numbers(path, text, *count, bounds, now)
            } else {
                sysfs_number(path, text, bounds, now, tree)
            }
        }
        Values::Words(words) => word(text, words, shown, now),
        Values::Listed => listed(path, text, shown, now),
        Values::Text if path.ends_with("_cpus") || path.ends_with("/default_smp_affinity") => {
            match (mask(text), mask(now)) {
                (Some(a), Some(b)) => same(a == b, text),
                (None, _) => Reading::Refused(format!("{text:?} is no mask of CPUs")),
                (_, None) => Reading::Unknown("the mask in force is not understood".to_owned()),
            }
        }
        Values::Text if path.ends_with("_affinity_list") || path.ends_with("_reserved_ports") => {
            match (numbers_of(text), numbers_of(now)) {
                (Some(a), Some(b)) => same(a == b, text),
                (None, _) => Reading::Refused(format!("{text:?} is no list of numbers")),
                (_, None) => Reading::Unknown("the list in force is not understood".to_owned()),
            }
        }
        Values::Text => same(tunable.values.normal(text) == now, text.trim()),
    }
}

fn same(is_same: bool, means: &str) -> Reading {
    if is_same {
        Reading::Equal
    } else {
        Reading::Different(means.to_owned())
    }
}

/// A number as the kernel reads it, and what follows it: `0x10` is 16, `010` is 8.
fn number(text: &str) -> Option<(i128, &str)> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let is_hex = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"))
        .filter(|hex| hex.starts_with(|c: char| c.is_ascii_hexdigit()));
    let (base, digits) = match is_hex {
        Some(hex) => (16, hex),
        None if digits.starts_with('0') => (8, digits),
        None => (10, digits),
    };
    let end = digits.find(|c: char| !c.is_digit(base)).unwrap_or(digits.len());
    let (number, rest) = digits.split_at_checked(end)?;
    if number.is_empty() || number.len() > DIGITS_MAX {
        return None;
    }
    let value = i128::from_str_radix(number, base)
        .ok()
        .filter(|n| *n <= i128::from(u64::MAX))?;
    Some((if negative { -value } else { value }, rest))
}

type Bounds = (Option<i128>, Option<i128>);

fn is_within(n: i128, (min, max): Bounds) -> bool {
    min.is_none_or(|m| n >= m) && max.is_none_or(|m| n <= m)
}

/// `proc_dointvec()` and its like: numbers parted by white space. What follows the last one is not looked at, and of several
/// numbers those that are not given stay what they are.
fn sysctl_numbers(path: &str, text: &str, count: usize, bounds: Bounds, now: &str) -> Reading {
    const SPACE: &[char] = &[' ', '\t', '\n', '\r', '\x0b', '\x0c'];
    let refused = |why: String| Reading::Refused(why);
    let mut given = Vec::new();
    let mut rest = text.trim_start_matches(SPACE);
    let mut fault = None;
    let mut has_negative_zero = false;
    while given.len() < count && !rest.is_empty() {
        match number(rest) {
            Some((n, after)) if after.is_empty() || after.starts_with([' ', '\t', '\n']) => {
                has_negative_zero |= n == 0 && rest.starts_with('-');
                given.push(n);
                rest = after.trim_start_matches(SPACE);
            }
            _ => {
                fault = Some(format!("the kernel takes no number from {rest:?}"));
                break;
            }
        }
    }
    let Some(first) = given.first() else {
        return refused(fault.unwrap_or_else(|| "no number is given".to_owned()));
    };
    if has_negative_zero {
        return Reading::Unknown("not every setting takes -0".to_owned());
    }
    let current: Vec<Option<i128>> = now.split(' ').map(|w| number(w).map(|(n, _)| n)).collect();
    let made: Vec<i128> = given.iter().map(|n| rounded(path, *n)).collect();
    if made.iter().zip(&current).all(|(a, b)| Some(*a) == *b) && made.len() <= current.len() {
        return Reading::Equal;
    }
    if let Some(n) = given.iter().find(|n| !is_within(**n, bounds)) {
        return refused(format!("{n} is out of the kernel's range"));
    }
    if is_refused_zero(path) && *first == 0 {
        return refused("the kernel takes no 0 here: its counterpart is to be set instead".to_owned());
    }
    match fault {
        Some(fault) if count > 1 => Reading::Unknown(format!("{fault}; what stands before it may be set")),
        _ => Reading::Different(made.iter().map(i128::to_string).collect::<Vec<_>>().join(" ")),
    }
}

/// What the kernel makes of a number that it takes (`round_pipe_size()`).
fn rounded(path: &str, n: i128) -> i128 {
    match u64::try_from(n) {
        Ok(size) if path == "/proc/sys/fs/pipe-max-size" && size <= 1 << 31 => {
            i128::from(size.max(4096).next_power_of_two())
        }
        _ => n,
    }
}

/// Lower bounds that the kernel has and the ranges of the documentation leave out (kernel/mm `dirty_bytes_min`).
fn is_refused_zero(path: &str) -> bool {
    matches!(
        path,
        "/proc/sys/vm/dirty_bytes" | "/proc/sys/vm/dirty_background_bytes"
    )
}

/// `kstrtoull()` and its like: one number, and at most one end of line.
fn sysfs_number(path: &str, text: &str, bounds: Bounds, now: &str, tree: &dyn Tree) -> Reading {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let current = number(now).map(|(n, _)| n);
    if path.ends_with("/lru_gen/enabled") && text.starts_with(['y', 'Y', 'n', 'N']) {
        return match (text.starts_with(['n', 'N']), current) {
            (true, n) => same(n == Some(0), "0"),
            (false, Some(0)) => Reading::Different("all that the CPU can do".to_owned()),
            (false, _) => Reading::Unknown("which bits the CPU can do is not known".to_owned()),
        };
    }
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    let Some((n, rest)) = number(unsigned) else {
        return Reading::Refused(format!("{text:?} is no number"));
    };
    if n == 0 && unsigned.starts_with('-') {
        return Reading::Unknown("not every setting takes -0".to_owned());
    }
    // Some files read decimal numbers only: there a leading zero means nothing.
    let decimal = unsigned.parse::<i128>().ok();
    if !rest.is_empty() {
        // Files that use sscanf() take what stands before it; most refuse it.
        return if decimal.is_some() && decimal == current {
            Reading::Equal
        } else if decimal.is_some() || current == Some(n) {
            Reading::Unknown(format!("not every file of /sys takes {text:?}"))
        } else {
            Reading::Refused(format!("{rest:?} after the number"))
        };
    }
    let made = |n: i128| limited(path, n, tree);
    if current == Some(made(n)) || decimal.map(made).is_some_and(|d| current == Some(d)) {
        return Reading::Equal;
    }
    if is_within(n, bounds) {
        Reading::Different(made(decimal.unwrap_or(n)).to_string())
    } else {
        Reading::Refused(format!("{n} is out of the kernel's range"))
    }
}

/// What files of /sys make of a number that they take: whole pages, the range of the hardware, on and off.
fn limited(path: &str, n: i128, tree: &dyn Tree) -> i128 {
    let (directory, leaf) = path.rsplit_once('/').unwrap_or(("", path));
    let other = |leaf: &str| {
        tree.text(&format!("{directory}/{leaf}"))
            .and_then(|t| t.trim().parse::<i128>().ok())
    };
    match leaf {
        // queue_ra_store(): pages of 4 KiB and more.
        "read_ahead_kb" => n - n.rem_euclid(4),
        // cpufreq_verify_within_cpu_limits().
        "scaling_min_freq" | "scaling_max_freq" => {
            let n = other("cpuinfo_min_freq").map_or(n, |low| n.max(low));
            other("cpuinfo_max_freq").map_or(n, |high| n.min(high))
        }
        // queue_requests_store(): BLKDEV_MIN_RQ.
        "nr_requests" => n.max(4),
        "rotational" | "iostats" | "add_random" => i128::from(n != 0),
        _ => n,
    }
}

/// `kstrtobool()` for switches, `sysfs_streq()` for the rest.
fn word(text: &str, words: &[String], shown: &str, now: &str) -> Reading {
    let text = text.trim();
    let is_switch = words.len() == 2 && words.iter().any(|w| matches!(w.as_str(), "Y" | "true"));
    if is_switch {
        let lower = text.to_ascii_lowercase();
        let meant = match lower.as_bytes() {
            [b'y' | b't' | b'1', ..] | [b'o', b'n', ..] => Some(true),
            [b'n' | b'f' | b'0', ..] | [b'o', b'f', ..] => Some(false),
            _ => None,
        };
        let is_on = matches!(now, "Y" | "true");
        return match meant {
            Some(meant) => same(meant == is_on, if meant { "on" } else { "off" }),
            None => Reading::Refused(format!("{text:?} is neither on nor off")),
        };
    }
    if text == now {
        return Reading::Equal;
    }
    let offered = offered(shown);
    let known = if offered.len() > 1 {
        offered.contains(&text)
    } else {
        words.iter().any(|w| w == text)
    };
    if known {
        Reading::Different(text.to_owned())
    } else {
        let list = if offered.len() > 1 {
            offered.join(", ")
        } else {
            words.join(", ")
        };
        Reading::Refused(format!("this kernel offers {list}, and not {text:?}"))
    }
}

/// The words that a file lists.
fn offered(shown: &str) -> Vec<&str> {
    shown
        .split_whitespace()
        .map(|w| w.trim_matches(['[', ']']))
        .collect()
}

fn listed(path: &str, text: &str, shown: &str, now: &str) -> Reading {
    // Only the first word counts for governors (sscanf()), and white space around it for neither.
    let text = text.split_whitespace().next().unwrap_or_default();
    let offered = offered(shown);
    // The old name of the multi-queue scheduler is an alias of the kernel's own.
    let text = match text {
        "deadline" if offered.contains(&"mq-deadline") => "mq-deadline",
        text => text,
    };
    if text == now {
        Reading::Equal
    } else if !path.ends_with("/scheduler") || offered.contains(&text) || SCHEDULERS.contains(&text) {
        Reading::Different(text.to_owned())
    } else {
        Reading::Refused(format!(
            "this kernel offers {}, and not {text:?}",
            offered.join(", ")
        ))
    }
}

/// A mask in hexadecimal digits, parted by commas: its digits without zeros at the start.
fn mask(text: &str) -> Option<String> {
    let text = text.trim();
    let mut digits = String::new();
    for (index, group) in text.split(',').enumerate() {
        let group = group.strip_prefix("0x").unwrap_or(group);
        if group.is_empty() || group.len() > 8 || !group.chars().all(|c| c.is_ascii_hexdigit()) {
            return None;
        }
        let width = if index == 0 { 0 } else { 8 };
        digits.push_str(&format!("{:0>width$}", group.to_ascii_lowercase()));
    }
    Some(digits.trim_start_matches('0').to_owned())
}

/// The numbers that a list such as `0-3,8` names, as ranges that do not touch.
fn numbers_of(text: &str) -> Option<Vec<(u32, u32)>> {
    let mut ranges = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.trim().is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last > LIST_MAX {
            return None;
        }
        ranges.push((first, last));
    }
    ranges.sort_unstable();
    let mut merged: Vec<(u32, u32)> = Vec::new();
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    Some(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;
    use crate::testing::Files;
    use proptest::prelude::*;

    fn read(name: &str, text: &str, shown: &str) -> Reading {
        let catalogue = Catalogue::load().unwrap();
        let tunable = catalogue.tunables.iter().find(|t| t.name == name).expect(name);
        let path = tunable.path.replace('*', "x");
        let tree = Files::new(&[
            ("/sys/devices/system/cpu/cpufreq/x/cpuinfo_min_freq", "800000\n"),
            ("/sys/devices/system/cpu/cpufreq/x/cpuinfo_max_freq", "3000000\n"),
        ]);
        of(tunable, &path, Form::Plain, text, shown, &tree)
    }

    #[test]
    fn texts_mean_what_the_kernel_makes_of_them() {
        let schedulers = "[none] mq-deadline kyber bfq\n";
        let thp = "always [madvise] never\n";
        for (name, text, shown, expected) in [
            ("vm.swappiness", "30 # comment", "30\n", "equal"),
            ("vm.swappiness", "0x1e", "30\n", "equal"),
            ("vm.swappiness", "036", "30\n", "equal"),
            ("vm.swappiness", "30#", "30\n", "refused"),
            ("vm.swappiness", "\"30\"", "30\n", "refused"),
            ("vm.swappiness", "30.0", "30\n", "refused"),
            ("vm.swappiness", "1G", "1\n", "refused"),
            ("vm.swappiness", "+30", "30\n", "refused"),
            ("vm.swappiness", "500", "30\n", "refused"),
            ("vm.swappiness", "31", "30\n", "different"),
            ("vm.dirty_bytes", "0", "0\n", "equal"),
            ("vm.dirty_bytes", "0", "9000\n", "refused"),
            (
                "net.ipv4.tcp_rmem",
                "4096 131072",
                "4096\t131072\t6291456\n",
                "equal",
            ),
            (
                "net.ipv4.tcp_rmem",
                "4096  131072\t6291456",
                "4096\t131072\t6291456\n",
                "equal",
            ),
            (
                "net.ipv4.tcp_rmem",
                "4096 1 6291456",
                "4096\t131072\t6291456\n",
                "different",
            ),
            (
                "net.ipv4.tcp_rmem",
                "4096 x",
                "5000\t131072\t6291456\n",
                "unknown",
            ),
            (
                "net.ipv4.ip_local_reserved_ports",
                "8081,8080",
                "8080-8081\n",
                "equal",
            ),
            ("fs.pipe-max-size", "1000000", "1048576\n", "equal"),
            ("net.core.default_qdisc", "fq # best", "fq\n", "different"),
            ("thp.enabled", "madvise", thp, "equal"),
            ("thp.enabled", "always", thp, "different"),
            ("thp.enabled", "inherit", thp, "refused"),
            ("block.*.scheduler", "none", schedulers, "equal"),
            ("block.*.scheduler", "deadline", "none [mq-deadline]\n", "equal"),
            ("block.*.scheduler", "bfq", "none [mq-deadline]\n", "different"),
            ("block.*.scheduler", "noop", schedulers, "refused"),
            ("block.*.read_ahead_kb", "4097", "4096\n", "equal"),
            ("block.*.read_ahead_kb", "4096 ", "128\n", "refused"),
            ("cpu.*.scaling_max_freq", "9000000", "3000000\n", "equal"),
            ("link.*.rx-*.rps_cpus", "f", "00000000,0000000f\n", "equal"),
            ("irq.*.smp_affinity_list", "0,1,2", "0-2\n", "equal"),
            ("zswap.enabled", "1", "Y\n", "equal"),
            ("zswap.enabled", "off", "N\n", "equal"),
            ("mm.lru_gen.enabled", "y", "0x0007\n", "unknown"),
            ("mm.lru_gen.enabled", "7", "0x0007\n", "equal"),
        ] {
            let seen = match read(name, text, shown) {
                Reading::Equal => "equal",
                Reading::Different(_) => "different",
                Reading::Refused(_) => "refused",
                Reading::Unknown(_) => "unknown",
            };
            assert_eq!(seen, expected, "{name} = {text:?} where it reads {shown:?}");
        }
    }

    proptest! {
        /// What a file reads means itself, and nothing makes the comparison fail.
        #[test]
        fn a_number_means_itself_and_no_text_panics(n in 0u32..=200, text in "[ \\t0-9a-fx#,.%>-]{0,20}") {
            let shown = format!("{n}\n");
            prop_assert_eq!(read("vm.swappiness", &shown, &shown), Reading::Equal);
            for name in ["vm.swappiness", "net.ipv4.tcp_rmem", "thp.enabled", "block.*.scheduler", "block.*.nr_requests",
                "link.*.rx-*.rps_cpus", "irq.*.smp_affinity_list", "zswap.enabled"] {
                let _ = read(name, &text, &text);
            }
        }
    }
}
