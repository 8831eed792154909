//! The operator's choice for a process, from its environment and status.
//!
//! `/proc/PID/environ` is memory of the process: programs such as redis, nginx and sshd overwrite it. An environment
//! counts only if it is complete and looks as `execve` left it. Otherwise it is *not known*, never "nothing said". A
//! `never` counts wherever it is found. Environments hold secrets: only the two variables below are kept.

use homeostat_kernel::bytes::{keyed, lines};
use homeostat_kernel::files::Text;
use homeostat_model::OperatorChoice;

/// Most bytes read of an environment: `bprm_stack_limits` (Linux `fs/exec.c`) allows 6 MiB, with the arguments.
pub const ENVIRONMENT_MAX: u64 = 6 * 1024 * 1024;
const STRATEGIES_MAX: usize = 64;
/// Longest value of a variable that is read, in bytes. Longer ones are not known.
const VALUE_MAX: usize = 4096;
/// The variables that people set.
const NEVER: &[u8] = b"HOMEOSTAT=";
const STRATEGIES: &[u8] = b"HOMEOSTAT_STRATEGIES=";

/// Reason why an environment does not show the operator's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// It is longer than [`ENVIRONMENT_MAX`], or shorter than the kernel says.
    Cut,
    /// It has no text.
    Empty,
    /// The program overwrote it.
    Overwritten,
    /// The kernel refused to show it.
    Unreadable,
    /// One of the two variables is longer than a sensible value.
    TooLong,
}

impl Unknown {
    /// As a sentence about a process.
    pub fn sentence(self, place: &str) -> String {
        match self {
            Self::Cut => format!("{place} could not be read whole"),
            Self::Empty => format!("{place} is empty"),
            Self::Overwritten => format!("the program overwrote {place} (with its title, as a rule)"),
            Self::Unreadable => format!("{place} cannot be read"),
            Self::TooLong => format!("a HOMEOSTAT variable in {place} is longer than {VALUE_MAX} bytes"),
        }
    }
}

/// The statement of an environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The choice found. It holds even if the rest is unknown.
    pub choice: OperatorChoice,
    /// Reason why this may be incomplete.
    pub unknown: Option<Unknown>,
}

impl Said {
    /// Nothing is known.
    pub fn nothing(why: Unknown) -> Self {
        Self {
            choice: OperatorChoice::default(),
            unknown: Some(why),
        }
    }
}

/// Searches an environment that comes in pieces.
#[derive(Debug, Default)]
pub struct Scanner {
    /// The beginning of the present variable, as long as it may be one of ours.
    kept: Vec<u8>,
    /// Length of the present variable, and whether it has a name before a `=`.
    length: usize,
    has_name: bool,
    bytes: u64,
    variables: u64,
    unlike: bool,
    said: Said,
}

impl Scanner {
    /// Takes the next piece. `place` names the environment's owner.
    pub fn feed(&mut self, piece: &[u8], place: &str) {
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
        let mut rest = piece;
        while !rest.is_empty() {
            let Some(end) = rest.iter().position(|b| *b == 0) else {
                self.extend(rest);
                return;
            };
            self.extend(rest.get(..end).unwrap_or_default());
            self.end_variable(place);
            rest = rest.get(end + 1..).unwrap_or_default();
        }
    }

    fn extend(&mut self, part: &[u8]) {
        if !self.has_name {
            let end = part.iter().position(|b| *b == b'=');
            // Names have no blanks or slashes; titles have.
            let name = part.get(..end.unwrap_or(part.len())).unwrap_or_default();
            self.unlike |= name.iter().any(|b| *b <= b' ' || *b == b'/');
            self.has_name = end.is_some_and(|at| self.length + at > 0);
        }
        let may_be_ours = self.kept.len() == self.length;
        self.length = self.length.saturating_add(part.len());
        if !may_be_ours {
            return;
        }
        let room = (STRATEGIES.len() + VALUE_MAX).saturating_sub(self.kept.len());
        self.kept
            .extend_from_slice(part.get(..part.len().min(room)).unwrap_or_default());
        let is_ours = |name: &[u8]| self.kept.iter().zip(name).all(|(a, b)| a == b);
        if !is_ours(NEVER) && !is_ours(STRATEGIES) {
            // No text of another variable is kept.
            self.kept.fill(0);
            self.kept.clear();
        }
    }

    fn end_variable(&mut self, place: &str) {
        self.unlike |= !self.has_name;
        self.variables += 1;
        let whole = self.kept.len() == self.length;
        let is_ours = self.kept.starts_with(NEVER) || self.kept.starts_with(STRATEGIES);
        if whole {
            take_variable(&mut self.said.choice, &self.kept, place);
        } else if is_ours {
            self.said.unknown = Some(Unknown::TooLong);
        }
        self.kept.clear();
        self.length = 0;
        self.has_name = false;
    }

    /// The result. `length` is the kernel's length of the environment; `None` if unknown.
    pub fn finish(mut self, length: Option<u64>, place: &str) -> Said {
        let is_open = self.length > 0;
        if is_open {
            self.end_variable(place);
        }
        let why = if self.bytes == 0 {
            Some(Unknown::Empty)
        } else if length.is_some_and(|length| length != self.bytes) {
            Some(Unknown::Cut)
        } else if self.unlike {
            Some(Unknown::Overwritten)
        } else if is_open {
            Some(Unknown::Cut)
        } else {
            None
        };
        self.said.unknown = why.or(self.said.unknown);
        self.said
    }
}

/// Searches a whole environment, as in `/proc/PID/environ`.
pub fn from_environment(environ: &[u8], place: &str) -> Said {
    let mut scanner = Scanner::default();
    scanner.feed(environ, place);
    scanner.finish(None, place)
}

/// Applies one variable `NAME=VALUE`, if it is one of the two: `HOMEOSTAT_STRATEGIES=large_pages=off,other=on` or
/// `HOMEOSTAT=never|always` (also `off`, `no`, `0` for never). Any other value is reported in `tuned` and treated as
/// `never`: its author addressed homeostat, and doing nothing is safe.
pub fn take_variable(choice: &mut OperatorChoice, variable: &[u8], place: &str) {
    if let Some(value) = variable.strip_prefix(NEVER) {
        take_value(choice, value, "HOMEOSTAT", place);
    } else if let Some(value) = variable.strip_prefix(STRATEGIES) {
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
            choice
                .strategies
                .entry(name.trim().to_owned())
                .and_modify(|on| *on &= state)
                .or_insert(state);
        }
    }
}

/// Applies a value of `HOMEOSTAT`, or of the attribute `user.homeostat`.
pub fn take_value(choice: &mut OperatorChoice, value: &[u8], name: &str, place: &str) {
    let value = String::from_utf8_lossy(value).trim().to_ascii_lowercase();
    match value.as_str() {
        "" => {}
        "always" => choice.always = Some(format!("{name}=always in {place}")),
        "never" | "off" | "no" | "0" => choice.never = Some(format!("{name}={value} in {place}")),
        _ => {
            // The value is not repeated: it is not ours and may be long.
            let sentence = format!("{name} in {place} is neither never nor always; taken as never");
            choice.never = Some(sentence.clone());
            choice.tuned.push(sentence);
        }
    }
}

/// Settings that a person or the program made on the process, from `/proc/PID/status`.
pub fn from_status(status: Text<'_>, program: &str, pid: i32) -> Vec<String> {
    let mut found = Vec::new();
    let text = status.beginning();
    if keyed(text, "THP_enabled") == Some(0) {
        found.push(format!(
            "{program} (pid {pid}) has large pages disabled (PR_SET_THP_DISABLE, or MemoryTHP= of its unit)"
        ));
    } else if status.is_cut() {
        found.push(format!(
            "{program} (pid {pid}): MemoryTHP= and other settings are not known: /proc/{pid}/status could not be read whole"
        ));
    }
    if keyed(text, "HugetlbPages").is_some_and(|kib| kib > 0) {
        found.push(format!(
            "{program} (pid {pid}) uses reserved huge pages (hugetlbfs)"
        ));
    }
    if keyed(text, "VmLck").is_some_and(|kib| kib > 0) {
        found.push(format!("{program} (pid {pid}) locks memory (mlock)"));
    }
    found
}

/// Whether large pages are off for the process, or its status was cut before that line.
pub fn may_refuse_large_pages(status: Text<'_>) -> bool {
    status.is_cut() || keyed(status.beginning(), "THP_enabled") == Some(0)
}

/// The process's real user id.
pub fn user(status: &[u8]) -> u32 {
    keyed(status, "Uid")
        .and_then(|u| u32::try_from(u).ok())
        .unwrap_or(u32::MAX)
}

/// Adds a member's choice to its workload's: any `never` holds for all, `off` wins over `on`, unknown holds for all.
pub fn merge(into: &mut OperatorChoice, member: &OperatorChoice) {
    if into.never.is_none() {
        into.never.clone_from(&member.never);
    }
    if into.always.is_none() {
        into.always.clone_from(&member.always);
    }
    if into.unknown.is_none() {
        into.unknown.clone_from(&member.unknown);
    }
    for (strategy, on) in &member.strategies {
        into.strategies
            .entry(strategy.clone())
            .and_modify(|o| *o &= *on)
            .or_insert(*on);
    }
    /// Most sentences kept for one workload: a hundred workers have the same one.
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
        let said = from_environment(
            b"SECRET=hunter2\0HOMEOSTAT=never\0HOMEOSTAT_STRATEGIES=large_pages=off, other=on,x\0",
            "p (pid 1)",
        );
        assert_eq!(said.unknown, None);
        let c = said.choice;
        assert_eq!(c.never.as_deref(), Some("HOMEOSTAT=never in p (pid 1)"));
        assert_eq!(c.strategies.get("large_pages"), Some(&false));
        assert_eq!(c.strategies.get("other"), Some(&true));
        assert_eq!(c.strategies.len(), 2);
        assert!(!format!("{c:?}").contains("hunter2"));
        assert_eq!(
            from_environment(b"XHOMEOSTAT=never\0HOMEOSTAT=\0", "p"),
            Said::default()
        );
    }

    #[test]
    fn a_value_that_is_not_understood_means_leave_alone() {
        let c = from_environment(b"HOMEOSTAT=sometimes\0", "p").choice;
        assert!(c.never.is_some() && c.always.is_none() && c.tuned.len() == 1);
    }

    #[test]
    fn an_environment_that_is_not_as_execve_left_it_is_not_known() {
        let why = |text: &[u8]| from_environment(text, "p").unknown;
        assert_eq!(why(b"A=1\0B=\0=\0"), Some(Unknown::Overwritten));
        assert_eq!(why(b"A=1\0B=\0"), None);
        assert_eq!(why(b""), Some(Unknown::Empty));
        // redis clears it, nginx leaves the end of its title, some pad with blanks.
        assert_eq!(why(&[0; 1343]), Some(Unknown::Overwritten));
        assert_eq!(why(b"p/nginx.conf\0\0\0\0A=1\0"), Some(Unknown::Overwritten));
        assert_eq!(why(b"          \0A=1\0"), Some(Unknown::Overwritten));
        assert_eq!(why(b"A=1\0B=2"), Some(Unknown::Cut));
        // What is left of a `never` counts all the same.
        let rest = from_environment(b"title\0\0\0HOMEOSTAT=never\0", "p");
        assert!(rest.choice.never.is_some() && rest.unknown == Some(Unknown::Overwritten));
        let mut long = STRATEGIES.to_vec();
        long.resize(2 * VALUE_MAX, b'x');
        long.push(0);
        assert_eq!(why(&long), Some(Unknown::TooLong));
        let mut scanner = Scanner::default();
        scanner.feed(b"A=1\0", "p");
        assert_eq!(scanner.finish(Some(99), "p").unknown, Some(Unknown::Cut));
    }

    #[test]
    fn one_member_that_says_never_speaks_for_all() {
        let of = |text: &[u8]| from_environment(text, "p").choice;
        let mut all = of(b"HOMEOSTAT=always\0HOMEOSTAT_STRATEGIES=a=on,b=off\0");
        merge(
            &mut all,
            &of(b"HOMEOSTAT=never\0HOMEOSTAT_STRATEGIES=a=off,b=on\0"),
        );
        assert!(all.never.is_some() && all.always.is_some());
        assert_eq!(
            all.strategies.values().copied().collect::<Vec<_>>(),
            [false, false]
        );
        let not_known = OperatorChoice {
            unknown: Some("cut".into()),
            ..OperatorChoice::default()
        };
        merge(&mut all, &not_known);
        assert_eq!(all.unknown.as_deref(), Some("cut"));
    }

    #[test]
    fn disabled_large_pages_and_reserved_ones_are_named() {
        let status = b"Name:\tx\nUid:\t1000\t1000\t1000\t1000\nVmLck:\t       0 kB\n\
                       HugetlbPages:\t    2048 kB\nTHP_enabled:\t0\n";
        let found = from_status(Text::whole_of(status), "x", 5);
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("PR_SET_THP_DISABLE") && found[1].contains("hugetlbfs"));
        assert_eq!(user(status), 1000);
        assert!(is_status(status) && !is_status(b"junk"));
    }

    #[test]
    fn a_status_that_was_cut_before_the_line_does_not_allow_large_pages() {
        let status = b"Name:\tx\nUid:\t1000\t1000\t1000\t1000\nGroups:\t1532000000 15320";
        assert!(may_refuse_large_pages(Text::cut(status)));
        assert!(!may_refuse_large_pages(Text::whole_of(
            b"Name:\tx\nTHP_enabled:\t1\n"
        )));
        assert!(from_status(Text::cut(status), "x", 5)[0].contains("MemoryTHP"));
    }

    fn variable() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            "[A-Z]{1,8}=[a-z0-9]{0,12}".prop_map(String::into_bytes),
            "[A-Z]{1,8}=[a-z0-9/:]{3000,9000}".prop_map(String::into_bytes),
            Just(b"HOMEOSTATX=never".to_vec()),
            Just(b"XHOMEOSTAT=never".to_vec()),
        ]
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = from_environment(&bytes, "p");
            let _ = from_status(Text::cut(&bytes), "p", 1);
        }

        /// Wherever the variable stands, and wherever the pieces are cut, it is seen.
        #[test]
        fn a_never_is_seen_at_any_place_in_pieces_of_any_size(
            before in proptest::collection::vec(variable(), 0..30),
            after in proptest::collection::vec(variable(), 0..30),
            size in 1_usize..5000,
            says in any::<bool>(),
        ) {
            let mut environment: Vec<u8> = Vec::new();
            let own = says.then(|| b"HOMEOSTAT=never".to_vec());
            for v in before.iter().chain(&own).chain(&after) {
                environment.extend_from_slice(v);
                environment.push(0);
            }
            prop_assume!(!environment.is_empty());
            let mut scanner = Scanner::default();
            for piece in environment.chunks(size) {
                scanner.feed(piece, "p");
            }
            let said = scanner.finish(Some(environment.len() as u64), "p");
            prop_assert_eq!(said.unknown, None);
            prop_assert_eq!(said.choice.never.is_some(), says);
        }

        /// A program that writes anything over the beginning, or a cut at any place, never reads as "nothing said".
        #[test]
        fn an_overwritten_or_cut_environment_never_reads_as_nothing_said(
            variables in proptest::collection::vec(variable(), 1..20),
            title in proptest::collection::vec(prop_oneof![Just(0_u8), Just(b' '), b'a'..=b'z'], 1..400),
            cut in any::<proptest::sample::Index>(),
        ) {
            let mut environment: Vec<u8> = b"HOMEOSTAT=never\0".to_vec();
            for v in &variables {
                environment.extend_from_slice(v);
                environment.push(0);
            }
            let whole = environment.len();
            let cut_at = cut.index(whole);
            let mut scanner = Scanner::default();
            scanner.feed(&environment[..cut_at], "p");
            let said = scanner.finish(Some(whole as u64), "p");
            prop_assert!(said.unknown.is_some());
            // At least the first variable is gone.
            let mut title = title;
            title.resize(title.len().max(15), b' ');
            title.push(0);
            for (to, from) in environment.iter_mut().zip(&title) {
                *to = *from;
            }
            let said = from_environment(&environment, "p");
            prop_assert!(said.unknown.is_some() || said.choice.never.is_some(), "{:?}", environment);
        }
    }
}
