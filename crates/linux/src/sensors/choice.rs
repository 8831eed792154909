//! What the person in charge of a process chose, from its environment and status.
//!
//! The environment is read once per program started, looked through for the two variables below, and forgotten:
//! nothing else of it is kept, shown or written anywhere.

use super::bytes::{keyed, lines};
use homeostat_model::OperatorChoice;

/// Most of an environment that is looked at, in bytes.
pub const ENVIRONMENT_MAX: usize = 64 * 1024;
/// Most strategies that one variable may name.
const STRATEGIES_MAX: usize = 64;

/// Parses `/proc/PID/environ`. `place` says whose environment it is, for the explanation.
///
/// `HOMEOSTAT=never|always` (also `off`, `no`, `0` for never; anything else is reported in `tuned`, and treated as
/// `never`, because whoever wrote it wanted to say something to homeostat and doing nothing is safe).
/// `HOMEOSTAT_STRATEGIES=large_pages=off,other=on`.
pub fn from_environment(environ: &[u8], place: &str) -> OperatorChoice {
    let mut choice = OperatorChoice::default();
    for variable in environ.split(|&b| b == 0) {
        if let Some(value) = variable.strip_prefix(b"HOMEOSTAT=") {
            let value = String::from_utf8_lossy(value);
            match value.trim().to_ascii_lowercase().as_str() {
                "" => {}
                "always" => choice.always = Some(format!("HOMEOSTAT=always in {place}")),
                "never" | "off" | "no" | "0" => choice.never = Some(format!("HOMEOSTAT={value} in {place}")),
                _ => {
                    // The value itself is not repeated: it is not ours and may be long.
                    let sentence =
                        format!("HOMEOSTAT in {place} is neither never nor always; taken as never");
                    choice.never = Some(sentence.clone());
                    choice.tuned.push(sentence);
                }
            }
        } else if let Some(value) = variable.strip_prefix(b"HOMEOSTAT_STRATEGIES=") {
            for part in value.split(|&b| b == b',').take(STRATEGIES_MAX) {
                let text = String::from_utf8_lossy(part);
                let Some((name, state)) = text.split_once('=') else {
                    continue;
                };
                let state = match state.trim().to_ascii_lowercase().as_str() {
                    "on" | "yes" | "1" | "true" | "always" => true,
                    "off" | "no" | "0" | "false" | "never" => false,
                    _ => continue,
                };
                choice.strategies.insert(name.trim().to_owned(), state);
            }
        }
    }
    choice
}

/// Settings on the process that a person or the program made, from `/proc/PID/status`.
pub fn from_status(status: &[u8], program: &str, pid: i32) -> Vec<String> {
    let mut found = Vec::new();
    if keyed(status, "THP_enabled") == Some(0) {
        found.push(format!(
            "{program} (pid {pid}) has large pages disabled (PR_SET_THP_DISABLE, or MemoryTHP= of its unit)"
        ));
    }
    if keyed(status, "HugetlbPages").is_some_and(|kib| kib > 0) {
        found.push(format!(
            "{program} (pid {pid}) uses reserved huge pages (hugetlbfs)"
        ));
    }
    if keyed(status, "VmLck").is_some_and(|kib| kib > 0) {
        found.push(format!("{program} (pid {pid}) locks memory (mlock)"));
    }
    found
}

/// The process's real user id.
pub fn user(status: &[u8]) -> u32 {
    keyed(status, "Uid")
        .and_then(|u| u32::try_from(u).ok())
        .unwrap_or(u32::MAX)
}

/// Adds the choice of one member to that of its workload: any `never` holds for all; `off` wins over `on`.
pub fn merge(into: &mut OperatorChoice, member: &OperatorChoice) {
    if into.never.is_none() {
        into.never.clone_from(&member.never);
    }
    if into.always.is_none() {
        into.always.clone_from(&member.always);
    }
    for (strategy, on) in &member.strategies {
        into.strategies
            .entry(strategy.clone())
            .and_modify(|o| *o &= *on)
            .or_insert(*on);
    }
    /// Most sentences kept for one workload: a hundred workers say the same thing.
    const TUNED_MAX: usize = 8;
    for sentence in &member.tuned {
        if into.tuned.len() < TUNED_MAX && !into.tuned.contains(sentence) {
            into.tuned.push(sentence.clone());
        }
    }
}

/// Whether a text has the form of `/proc/PID/status`.
pub fn is_status(status: &[u8]) -> bool {
    lines(status).next().is_some_and(|l| l.starts_with(b"Name:"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_two_variables_are_understood_and_nothing_else_is_kept() {
        let c = from_environment(
            b"SECRET=hunter2\0HOMEOSTAT=never\0HOMEOSTAT_STRATEGIES=large_pages=off, other=on,x\0",
            "p (pid 1)",
        );
        assert_eq!(c.never.as_deref(), Some("HOMEOSTAT=never in p (pid 1)"));
        assert_eq!(c.strategies.get("large_pages"), Some(&false));
        assert_eq!(c.strategies.get("other"), Some(&true));
        assert_eq!(c.strategies.len(), 2);
        assert!(!format!("{c:?}").contains("hunter2"));
        assert_eq!(
            from_environment(b"XHOMEOSTAT=never\0HOMEOSTAT=\0", "p"),
            OperatorChoice::default()
        );
    }

    #[test]
    fn a_value_that_is_not_understood_means_leave_alone() {
        let c = from_environment(b"HOMEOSTAT=sometimes", "p");
        assert!(c.never.is_some() && c.always.is_none() && c.tuned.len() == 1);
    }

    #[test]
    fn one_member_that_says_never_speaks_for_all() {
        let mut all = from_environment(b"HOMEOSTAT=always\0HOMEOSTAT_STRATEGIES=a=on,b=off", "p");
        merge(
            &mut all,
            &from_environment(b"HOMEOSTAT=never\0HOMEOSTAT_STRATEGIES=a=off,b=on", "q"),
        );
        assert!(all.never.is_some() && all.always.is_some());
        assert_eq!(
            all.strategies.values().copied().collect::<Vec<_>>(),
            [false, false]
        );
    }

    #[test]
    fn disabled_large_pages_and_reserved_ones_are_named() {
        let status = b"Name:\tx\nUid:\t1000\t1000\t1000\t1000\nVmLck:\t       0 kB\n\
                       HugetlbPages:\t    2048 kB\nTHP_enabled:\t0\n";
        let found = from_status(status, "x", 5);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("PR_SET_THP_DISABLE") && found[1].contains("hugetlbfs"));
        assert_eq!(user(status), 1000);
        assert!(is_status(status) && !is_status(b"junk"));
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = from_environment(&bytes, "p");
            let _ = from_status(&bytes, "p", 1);
        }
    }
}
