//! The systemd unit and drop-ins for it.

use super::calls::{ADDED, GROUPS, REMOVED};
use super::{Decision, Need, Privileges, RUN};

const MARK: &str = "@PRIVILEGES@\n";
const TEMPLATE: &str = include_str!("homeostat.service.in");
const WIDTH: usize = 120;

pub(super) fn whole(privileges: &Privileges) -> String {
    TEMPLATE
        .replace("@RUN@", &RUN.join(" "))
        .replace(MARK, &rows(privileges))
}

/// The settings of the table alone. Each is emptied first, so that nothing of the shipped unit stays.
pub(super) fn drop_in(privileges: &Privileges) -> String {
    let off = match privileges.off.as_slice() {
        [] => "no strategy is switched off".to_owned(),
        off => format!("switched off: {}", off.join(", ")),
    };
    let emptied: String = [
        "CapabilityBoundingSet",
        "SystemCallFilter",
        "ReadOnlyPaths",
        "ReadWritePaths",
        "InaccessiblePaths",
        "DeviceAllow",
        "RestrictAddressFamilies",
        "RestrictNamespaces",
    ]
    .map(|name| format!("{name}=\n"))
    .concat();
    format!(
        "# Made by `homeostat privileges --drop-in`; {off}.\n# Undo what a strategy has in force before this is installed: \
         the way back needs the same privileges.\n[Service]\n{emptied}{}",
        rows(privileges)
    )
}

fn rows(privileges: &Privileges) -> String {
    let mut out = String::new();
    let given = privileges.given();
    let part = |out: &mut String, heading: &str, wanted: &dyn Fn(Need) -> Option<String>| {
        comment(out, heading);
        for need in given.iter().copied() {
            let Some(setting) = wanted(need) else { continue };
            for row in privileges.reasons(need) {
                comment(out, &format!("{} ({}): {}", need.name(), row.by, row.why));
            }
            out.push_str(&setting);
        }
        out.push('\n');
    };
    part(&mut out, "Capabilities.", &|need| match need {
        Need::Capability(name) => Some(format!("CapabilityBoundingSet={name}\n")),
        _ => None,
    });
    let calls = format!(
        "System calls: those of every service without the groups that nothing here uses, and these. Any other fails.\n\
         SystemCallFilter={}\nSystemCallFilter=~{}\nSystemCallFilter={}",
        GROUPS.join(" "),
        REMOVED.join(" "),
        ADDED.join(" ")
    );
    part(&mut out, &calls, &|need| match need {
        Need::Call(name) => Some(format!("SystemCallFilter={name}\n")),
        _ => None,
    });
    part(
        &mut out,
        "Paths: the kernel's settings can be written only where a strategy does.\nReadOnlyPaths=/proc/sys /sys",
        &|need| match need {
            Need::Write(path) => Some(format!("ReadWritePaths=-{path}\n")),
            _ => None,
        },
    );
    if !privileges.directories.is_empty() {
        comment(&mut out, "The directories that the configuration names.");
        for path in &privileges.directories {
            out.push_str(&format!("ReadWritePaths={}\n", quoted(&path.to_string_lossy())));
        }
        out.push('\n');
    }
    part(
        &mut out,
        "Devices: none but the standard ones and these.\nDevicePolicy=closed",
        &|need| match need {
            Need::Device { name, access, .. } => Some(format!("DeviceAllow={name} {access}\n")),
            _ => None,
        },
    );
    part(&mut out, "Address families.", &|need| match need {
        Need::Family(name) => Some(format!("RestrictAddressFamilies={name}\n")),
        _ => None,
    });
    part(&mut out, "Namespaces.", &|need| match need {
        Need::Namespace(name) => Some(format!("RestrictNamespaces={name}\n")),
        _ => None,
    });
    comment(&mut out, "What later work asks for and does not get yet.");
    for row in privileges.rows() {
        if row.decision != Decision::Withheld {
            continue;
        }
        comment(
            &mut out,
            &format!("{} ({}): {}", row.need.name(), row.by, row.why),
        );
        if let Need::Socket(path) = row.need {
            out.push_str(&format!("InaccessiblePaths=-{path}\n"));
        }
    }
    out
}

/// A path for a unit's list: one word, with nothing that systemd expands.
fn quoted(path: &str) -> String {
    let escaped = path
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
        .replace('%', "%%");
    format!("\"{escaped}\"")
}

/// Writes comment lines of at most [`WIDTH`]; lines with a setting stay.
fn comment(out: &mut String, text: &str) {
    for line in text.lines() {
        let is_setting = line
            .split_once('=')
            .is_some_and(|(name, _)| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphabetic()));
        if is_setting {
            out.push_str(line);
            out.push('\n');
            continue;
        }
        let mut current = String::from("#");
        for word in line.split(' ') {
            if current.len() + 1 + word.len() > WIDTH {
                out.push_str(&current);
                out.push('\n');
                current = String::from("#");
            }
            current.push(' ');
            current.push_str(word);
        }
        out.push_str(&current);
        out.push('\n');
    }
}
