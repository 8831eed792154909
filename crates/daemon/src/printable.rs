//! Text that may go to a terminal or a log. Programs choose their own names, and a name may hold what moves the cursor,
//! recolours the screen or begins a line that looks like one of ours.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Beginnings of the escape sequences that our own painting uses, after the escape character.
const PAINT: [&str; 6] = ["[0m", "[1m", "[31m", "[32m", "[33m", "[36m"];

/// Whether a terminal obeys the character or shows something else for it: control characters except the line break,
/// and those that turn the direction of writing (Unicode, Bidirectional Algorithm, section 2).
fn is_hostile(c: char) -> bool {
    (c.is_control() && c != '\n')
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text with everything that a terminal would obey spelled out (`\u{1b}`), line breaks excepted. With `painted`
/// our own colours stay.
pub fn for_terminal(text: &str, painted: bool) -> Cow<'_, str> {
    if !text.contains(is_hostile) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for (at, c) in text.char_indices() {
        let rest = text.get(at + c.len_utf8()..).unwrap_or_default();
        let ours = painted && c == '\x1b' && PAINT.iter().any(|p| rest.starts_with(p));
        if is_hostile(c) && !ours {
            let _ = write!(out, "{}", c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// One entry of a log: as for a terminal, and a line break only where our own texts have one, before an indented line.
/// So no name can begin an entry.
pub fn for_log(text: &str) -> Cow<'_, str> {
    let text = for_terminal(text, false);
    let breaks_out = |text: &str, at: usize| text.get(at + 1..).is_some_and(|rest| !rest.starts_with("  "));
    if !text.match_indices('\n').any(|(at, _)| breaks_out(&text, at)) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for (at, c) in text.char_indices() {
        if c == '\n' && breaks_out(&text, at) {
            out.push_str("\\n");
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_spelled_out() {
        assert_eq!(
            for_terminal("redis \u{e4}\n  next", false),
            "redis \u{e4}\n  next"
        );
        assert_eq!(
            for_terminal("a\x1b[2Jb\r\u{9b}c\u{202e}", true),
            "a\\u{1b}[2Jb\\r\\u{9b}c\\u{202e}"
        );
        let painted = "\x1b[31mbad\x1b[0m";
        assert_eq!(for_terminal(painted, true), painted);
        assert_eq!(for_terminal(painted, false), "\\u{1b}[31mbad\\u{1b}[0m");
    }

    #[test]
    fn no_name_begins_an_entry_of_the_log() {
        assert_eq!(
            for_log("no space\n  hint: free some"),
            "no space\n  hint: free some"
        );
        assert_eq!(for_log("x\n<3>homeostat: lost[7]"), "x\\n<3>homeostat: lost[7]");
        assert_eq!(for_log("x\n"), "x\\n");
    }
}
