//! Text for a terminal or a log. Programs choose their names, and a name may move the cursor, recolour the screen or
//! begin a line that looks like ours.

use std::borrow::Cow;
use std::fmt::Write as _;
use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};
use unicode_width::UnicodeWidthChar;

/// Our colours' escape sequences, after the escape character.
const PAINT: [&str; 6] = ["[0m", "[1m", "[31m", "[32m", "[33m", "[36m"];

/// Letters and symbols drawn as nothing, which neither category nor width reveals.
const BLANK: [char; 2] = ['\u{115f}', '\u{2800}'];

/// Whether a terminal obeys the character, or a reader cannot see it. Hostile is everything but letters, marks,
/// numbers, punctuation and symbols: controls, text direction, other line breaks and blanks, private and unassigned
/// characters. So is everything without width: joiners, fillers, variation selectors.
fn is_hostile(c: char) -> bool {
    if c.is_ascii() {
        return c.is_control() && c != '\n';
    }
    let group = c.general_category_group();
    matches!(
        group,
        GeneralCategoryGroup::Other | GeneralCategoryGroup::Separator
    ) || c.width().unwrap_or(0) == 0
        || BLANK.contains(&c)
}

/// The text with terminal controls spelled out (`\u{1b}`), except line breaks. `painted` keeps our colours.
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

/// JSON text with the same characters escaped as JSON does it.
pub fn for_json(text: &str) -> Cow<'_, str> {
    // JSON permits DEL.
    if !text.contains(is_hostile) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hostile(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// One log entry: as for a terminal, with line breaks only before our indented lines. So no name can begin an entry.
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

    /// All characters: what is left is seen. Stands beside the rule above as its meaning, by other means where there are some.
    #[test]
    fn no_character_is_left_that_nobody_sees() {
        let known = [
            "\u{61c}",
            "\u{2028}",
            "\u{2029}",
            "\u{200b}",
            "\u{200c}",
            "\u{200d}",
            "\u{200e}",
            "\u{200f}",
            "\u{2060}",
            "\u{2061}",
            "\u{2064}",
            "\u{2066}",
            "\u{2069}",
            "\u{202a}",
            "\u{202e}",
            "\u{206a}",
            "\u{206f}",
            "\u{feff}",
            "\u{ad}",
            "\u{34f}",
            "\u{180e}",
            "\u{180b}",
            "\u{fe0f}",
            "\u{e0100}",
            "\u{e0001}",
            "\u{e007f}",
            "\u{115f}",
            "\u{1160}",
            "\u{3164}",
            "\u{ffa0}",
            "\u{17b4}",
            "\u{1bca0}",
            "\u{1d173}",
            "\u{fff9}",
            "\u{13430}",
            "\u{600}",
            "\u{70f}",
            "\u{85}",
            "\u{9b}",
            "\u{7f}",
            "\u{a0}",
            "\u{3000}",
            "\u{2003}",
            "\u{1680}",
            "\u{2800}",
            "\u{e000}",
            "\u{10ffff}",
            "\u{378}",
            "\u{2065}",
            "\u{e0fff}",
        ];
        for text in known {
            let shown = for_terminal(text, true);
            assert!(shown.starts_with('\\') && shown.is_ascii(), "{text:?} as {shown}");
            let json = serde_json::to_string(text).unwrap();
            let safe = for_json(&json);
            assert!(safe.is_ascii(), "{text:?} as {safe}");
            assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), text);
        }
        for text in [
            "redis-server",
            "gr\u{f6}\u{df}e",
            "\u{65e5}\u{672c}",
            "\u{2026}\u{2212}\u{d7}\u{b7}",
            "\u{1f680}",
            "\u{fffd}",
        ] {
            assert_eq!(for_terminal(text, false), text);
        }
        for c in (0..=0x10_ffff).filter_map(char::from_u32) {
            let text = c.to_string();
            if matches!(c, '\n' | ' ') || for_terminal(&text, false) != text {
                continue;
            }
            assert!(
                !c.is_control() && !c.is_whitespace() && c.width().unwrap_or(0) > 0,
                "{c:?}"
            );
        }
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
