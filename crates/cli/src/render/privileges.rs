//! `homeostat privileges`.

use super::text::{Look, Tone, wrap};
use homeostat_daemon::privileges::{Decision, Privileges};

/// Privileges by kind, each with who needs it and why; then those that are refused.
pub fn privileges(privileges: &Privileges, look: &Look) -> String {
    let mut out = String::new();
    if !privileges.off().is_empty() {
        let text = format!(
            "Without what only {} needs: switched off in the configuration.",
            privileges.off().join(", ")
        );
        out.push_str(&wrap(&text, "", look.width));
    }
    for withheld in [false, true] {
        let (mut kind, mut name) = ("", "");
        let part = privileges
            .rows()
            .iter()
            .filter(|row| (row.decision == Decision::Withheld) == withheld);
        for row in part {
            if !withheld && kind != row.need.kind() {
                kind = row.need.kind();
                super::heading(&format!("Given: {kind}"), look, &mut out);
            }
            if withheld && kind.is_empty() {
                kind = row.need.kind();
                super::heading("Refused until something needs it", look, &mut out);
            }
            if name != row.need.name() {
                name = row.need.name();
                let tone = if withheld { Tone::Warn } else { Tone::Good };
                out.push_str(&format!("  {}\n", look.paint(tone, name)));
            }
            out.push_str(&wrap(&format!("{}: {}", row.by, row.why), "    ", look.width));
        }
    }
    out
}
