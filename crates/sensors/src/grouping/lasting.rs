//! Names and arguments without the text of a single run; it is masked with `*`.
//!
//! The rest is the key of history: it must survive a restart, and keep apart two servers that a person told apart.
//! Names that a person writes (`.service` units) lose only UUIDs, long random ids, and times. Names that a program
//! makes for one run (scopes and other groups) also lose counters and process ids.

use crate::processes::one_line;
use homeostat_kernel::bytes::fingerprint;

/// Shortest run of hexadecimal digits, letters and numerals mixed, that counts as an id.
const HEX_MIN: usize = 12;
/// Shortest number that counts as a time or a random id.
const LONG_NUMBER: usize = 10;
/// Ports that the kernel assigns for one connection or run: Linux's default of `net.ipv4.ip_local_port_range`.
const EPHEMERAL_PORTS: std::ops::RangeInclusive<u32> = 32_768..=60_999;
const TOKEN_MIN: usize = 8;
/// Least changes between letters and digits in a random token.
const TOKEN_SWITCHES: usize = 3;

/// Words before a number that counts runs.
const COUNTED: &[&str] = &[
    "allocation",
    "attempt",
    "container",
    "domain",
    "execution",
    "invocation",
    "job",
    "jobid",
    "jobs",
    "pid",
    "pids",
    "qemu",
    "session",
    "step",
    "steps",
    "task",
    "tasks",
];
/// Words of [`COUNTED`] that may also touch the number.
const GLUED: &[&str] = &["job", "pid", "step", "task"];

/// A name for people: one line, and ids of 32 digits or more cut to 12.
pub(super) fn short(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for token in tokens(name) {
        if token.len() >= 32 && token.bytes().all(|b| b.is_ascii_hexdigit()) {
            out.push_str(token.get(..12).unwrap_or(token));
        } else {
            out.push_str(token);
        }
    }
    one_line(out.as_bytes())
}

/// The lasting part of the name of a systemd unit. Transient units carry a number of this run: `run-u17.service`,
/// `run-r4f…e.scope`, `app-x-4711.scope`. So does a service that D-Bus starts: `dbus-:1.2-org.example@0.service`.
pub(super) fn unit(name: &str) -> String {
    let (base, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
    let transient = base.strip_prefix("run-").is_some_and(|rest| {
        let rest = rest.trim_start_matches(['u', 'r', 'p', 'i']);
        // A person wrote `run-cafe.service`.
        rest.contains(|c: char| c.is_ascii_digit())
            && rest
                .chars()
                .all(|c| c.is_ascii_hexdigit() || c == '-' || c == 'i')
    });
    if transient {
        return format!("run-*.{suffix}");
    }
    if let Some(rest) = base.strip_prefix("dbus-:").filter(|_| suffix == "service") {
        let name = rest.split_once('-').map_or(rest, |(_, name)| name);
        let name = name.rsplit_once('@').map_or(name, |(name, _)| name);
        return format!("dbus-:*-{}@*.service", strong(name));
    }
    // Programs make scopes, people write services.
    if suffix == "scope" {
        if let Some((head, number)) = base.rsplit_once('-') {
            if number.len() > 1 && number.chars().all(|c| c.is_ascii_digit()) {
                return format!("{}-*.{suffix}", weak(head));
            }
        }
        return format!("{}.{suffix}", weak(base));
    }
    strong(name)
}

/// The lasting part of the name of a group that a program made.
pub(super) fn group(name: &str) -> String {
    if is_named_by_systemd(name) {
        unit(name)
    } else {
        weak(name)
    }
}

/// The lasting part of a whole path of groups.
pub(super) fn path(path: &str) -> String {
    let mut counted = false;
    let parts: Vec<String> = path
        .split('/')
        .map(|part| {
            // `/jobs/17`: the word stands in the directory above.
            let number = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            let kept = if number && counted {
                "*".to_owned()
            } else {
                group(part)
            };
            counted = is_counted(part);
            kept
        })
        .collect();
    parts.join("/")
}

/// The lasting part of the name of a virtual machine or system container: a person chose it, but libvirt puts a number
/// of this run before it (`qemu\x2d3\x2ddatabase`).
pub(super) fn machine(name: &str) -> String {
    let plain = unescaped(name);
    let Some(at) = plain.find("qemu-").or_else(|| plain.find("lxc-")) else {
        return strong(name);
    };
    let (head, rest) = plain.split_at(at);
    let mut words = rest.splitn(3, '-');
    match (words.next(), words.next(), words.next()) {
        (Some(kind), Some(number), Some(own))
            if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) =>
        {
            format!("{head}{kind}-*-{}", strong(own))
        }
        _ => strong(name),
    }
}

fn is_named_by_systemd(name: &str) -> bool {
    [".service", ".scope", ".slice"].iter().any(|s| name.ends_with(s))
}

fn is_counted(word: &str) -> bool {
    let word = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    COUNTED.iter().any(|c| c.eq_ignore_ascii_case(word))
}

/// `\x2d` is systemd's escape of a dash in a name.
fn unescaped(name: &str) -> String {
    name.replace("\\x2d", "-")
}

/// Masks text that no person types: UUIDs, long random ids, times.
fn strong(name: &str) -> String {
    masked(name, false)
}

/// Masks counters of runs, too: numbers after words such as `job`, process ids, random tokens.
fn weak(name: &str) -> String {
    masked(name, true)
}

fn masked(name: &str, weakly: bool) -> String {
    let plain = unescaped(name);
    let without = without_uuids(&plain);
    let mut out = String::with_capacity(without.len());
    let mut counted = false;
    for token in tokens(&without) {
        let alphanumeric = token.bytes().all(|b| b.is_ascii_alphanumeric());
        if !alphanumeric {
            // Only a short separator ties a number to the word before it.
            counted &= token.chars().count() == 1 && matches!(token, "-" | "_" | "." | ":");
            out.push_str(token);
            continue;
        }
        let number = token.bytes().all(|b| b.is_ascii_digit());
        let invented = is_id(token)
            || weakly
                && (number && (counted || token.len() >= 5 && !is_a_port_that_lasts(token))
                    || is_random(token));
        if invented {
            out.push('*');
        } else {
            push_number_of_word(&mut out, token, weakly);
        }
        // `job_17_3`: the number of a counted thing may have another counter after it.
        counted = is_counted(token) || counted && number;
    }
    // Names without text of one run stay unchanged, escapes included.
    if out == plain { name.to_owned() } else { out }
}

fn is_a_port_that_lasts(token: &str) -> bool {
    token
        .parse::<u32>()
        .is_ok_and(|port| port <= 65_535 && !EPHEMERAL_PORTS.contains(&port))
}

/// A word directly followed by a number: `job17`.
fn push_number_of_word(out: &mut String, token: &str, weakly: bool) {
    let split = token.find(|c: char| c.is_ascii_digit()).unwrap_or(token.len());
    let (word, number) = token.split_at(split);
    if weakly && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) && GLUED.contains(&word) {
        out.push_str(word);
        out.push('*');
    } else {
        out.push_str(token);
    }
}

/// Whether no person would type it: a long number, or a long or mixed run of hexadecimal digits.
fn is_id(token: &str) -> bool {
    let digits = token.bytes().filter(u8::is_ascii_digit).count();
    let hex = token.bytes().all(|b| b.is_ascii_hexdigit());
    let number = digits == token.len();
    number && token.len() >= LONG_NUMBER
        || hex && token.len() >= 32
        || hex && token.len() >= HEX_MIN && digits > 0 && digits < token.len()
}

/// Whether letters and digits mix as in no word.
fn is_random(token: &str) -> bool {
    let kinds: Vec<bool> = token.bytes().map(|b| b.is_ascii_digit()).collect();
    let switches = kinds
        .windows(2)
        .filter(|pair| pair.first() != pair.last())
        .count();
    token.len() >= TOKEN_MIN && switches >= TOKEN_SWITCHES
}

/// Runs of letters and digits, and the text between them, in order.
fn tokens(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let kind = first.is_ascii_alphanumeric();
        let end = rest
            .find(|c: char| c.is_ascii_alphanumeric() != kind)
            .unwrap_or(rest.len());
        let (token, after) = rest.split_at(end);
        rest = after;
        Some(token)
    })
}

fn without_uuids(text: &str) -> String {
    const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
    let all: Vec<&str> = tokens(text).collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while let Some(token) = all.get(at) {
        let is_uuid = GROUPS.iter().enumerate().all(|(group, length)| {
            let part = all.get(at + 2 * group);
            let sound = part.is_some_and(|p| p.len() == *length && p.bytes().all(|b| b.is_ascii_hexdigit()));
            let tied = group == 4
                || all
                    .get(at + 2 * group + 1)
                    .is_some_and(|s| matches!(*s, "-" | "_"));
            sound && tied
        });
        // `pod0f0f0f0f_1111_…`: the first group may directly follow a word.
        let glued = (!is_uuid && token.len() > 8)
            .then(|| token.split_at_checked(token.len() - 8))
            .flatten();
        let glued = glued.filter(|(word, first)| {
            word.bytes().all(|b| b.is_ascii_alphabetic())
                && first.bytes().all(|b| b.is_ascii_hexdigit())
                && GROUPS.iter().enumerate().skip(1).all(|(group, length)| {
                    let tied = all
                        .get(at + 2 * group - 1)
                        .is_some_and(|s| matches!(*s, "-" | "_"));
                    let part = all.get(at + 2 * group);
                    tied && part
                        .is_some_and(|p| p.len() == *length && p.bytes().all(|b| b.is_ascii_hexdigit()))
                })
        });
        if let Some((word, _)) = glued {
            out.push_str(word);
        }
        if is_uuid || glued.is_some() {
            out.push('*');
            at += 9;
        } else {
            out.push_str(token);
            at += 1;
        }
    }
    out
}

/// A hash of the arguments without their changes from run to run. The fingerprint survives a restart, but two servers
/// with different configurations stay apart. Arguments may hold secrets, so only their hash is kept.
///
/// Options about process ids, descriptors and sockets handed over have their values masked (`--pid`, `--parent-pid`,
/// `--fd`, also in lists as `fd=30,vhost=on`). So are runs of ten or more digits (times, random ids), hexadecimal ids
/// from 12 digits on, UUIDs, libvirt's `domain-3-name`. Kernel-assigned ports are masked after a colon or an option
/// about ports. Below `/tmp`, `/var/tmp`, `/run`, `/var/run`, `/dev/shm`, runs of more than 3 digits are masked, too.
/// So are endings of `mkstemp(3)`: a dot, dash or underscore and 6 to 12 letters and digits of mixed kind. Other
/// numbers stay: ports (`--port 6380`, `*:6380`, `-p 5433`), sizes and counts.
pub(super) fn arguments(command_line: &[u8]) -> u64 {
    hash(command_line, mask)
}

/// As the previous version masked it: that version's history has it as key.
pub(super) fn former_arguments(command_line: &[u8]) -> u64 {
    hash(command_line, former_mask)
}

fn hash(command_line: &[u8], mask: impl Fn(&str, &str) -> String) -> u64 {
    const RUN_OPTIONS: &[&str] = &[
        "pid",
        "ppid",
        "parent-pid",
        "parent",
        "fd",
        "listen-fd",
        "start-time",
    ];
    const ARGUMENTS_MAX: usize = 256;
    let mut parts: Vec<String> = Vec::new();
    let mut masks_next = false;
    let mut before = String::new();
    for argument in command_line
        .split(|&b| b == 0)
        .filter(|a| !a.is_empty())
        .take(ARGUMENTS_MAX)
    {
        let text = String::from_utf8_lossy(argument);
        let (option, value) = match text.split_once('=') {
            Some((option, value)) => (option, Some(value)),
            None => (text.as_ref(), None),
        };
        let of_this_run = option.starts_with('-') && RUN_OPTIONS.contains(&option.trim_start_matches('-'));
        if masks_next && !text.starts_with('-') {
            parts.push("*".to_owned());
            masks_next = false;
            before.clear();
            continue;
        }
        masks_next = of_this_run && value.is_none();
        parts.push(match value {
            Some(_) if of_this_run => format!("{option}=*"),
            Some(value) => format!("{option}={}", mask(value, option)),
            None => mask(&text, &before),
        });
        option.clone_into(&mut before);
    }
    let bytes: Vec<&[u8]> = parts.iter().map(|p| p.as_bytes()).collect();
    fingerprint(&bytes)
}

/// Masks one argument or the value of an option. `option` is the option that it belongs to, or the argument before.
fn mask(text: &str, option: &str) -> String {
    let text = without_domain_number(&without_uuids(text));
    let mut out = String::with_capacity(text.len());
    // A list such as `tap,fd=30,vhost=on` holds options of its own.
    for (index, item) in text.split(',').enumerate() {
        if index > 0 {
            out.push(',');
        }
        match item.split_once('=') {
            Some((name, value)) if matches!(name, "fd" | "fds" | "vhostfd" | "vhostfds" | "pid") => {
                let _ = value;
                out.push_str(name);
                out.push_str("=*");
            }
            Some((name, value)) => {
                out.push_str(name);
                out.push('=');
                out.push_str(&mask_value(value, name));
            }
            None => out.push_str(&mask_value(item, option)),
        }
    }
    out
}

fn mask_value(text: &str, option: &str) -> String {
    let masked = former_mask(text, option);
    let is_about_ports = option.starts_with('-') && option.to_ascii_lowercase().contains("port")
        || option.eq_ignore_ascii_case("port");
    let mut out = String::with_capacity(masked.len());
    let mut before = "";
    for token in tokens(&masked) {
        let alone = before.is_empty() && masked.len() == token.len();
        let is_a_port = token
            .parse::<u32>()
            .is_ok_and(|port| EPHEMERAL_PORTS.contains(&port))
            && (before.ends_with(':') || alone && is_about_ports);
        let hex_id = is_id(token) && token.bytes().any(|b| !b.is_ascii_digit());
        out.push_str(if is_a_port || hex_id { "*" } else { token });
        before = token;
    }
    out
}

/// libvirt puts a number of this run into paths: `/var/lib/libvirt/qemu/domain-3-database/monitor.sock`.
fn without_domain_number(text: &str) -> String {
    let Some((head, rest)) = text.split_once("/domain-") else {
        return text.to_owned();
    };
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    match rest.split_at(end) {
        (number, tail) if !number.is_empty() && tail.starts_with('-') => format!("{head}/domain-*{tail}"),
        _ => text.to_owned(),
    }
}

fn former_mask(text: &str, _option: &str) -> String {
    const TEMPORARY: &[&str] = &["/tmp/", "/var/tmp/", "/run/", "/var/run/", "/dev/shm/"];
    let temporary = TEMPORARY.iter().any(|t| text.starts_with(t));
    let mut out = String::with_capacity(text.len());
    let mut run = String::new();
    let mut before = None;
    for c in text.chars().map(Some).chain([None]) {
        match c {
            Some(c) if c.is_ascii_alphanumeric() => run.push(c),
            other => {
                push_masked(&mut out, &run, temporary, before);
                run.clear();
                before = other;
                out.extend(other);
            }
        }
    }
    out
}

/// Writes one run of letters and digits, masked if it belongs to this run of the program.
fn push_masked(out: &mut String, run: &str, temporary: bool, before: Option<char>) {
    let digits = |c: char| c.is_ascii_digit();
    let random_hex = run.len() >= 32 && run.bytes().all(|b| b.is_ascii_hexdigit());
    // mkstemp's letters: digits and letters mixed, or both cases within the word.
    let kinds = [
        run.chars().any(digits),
        run.chars().skip(1).any(|c| c.is_ascii_uppercase()),
        run.chars().any(|c| c.is_ascii_lowercase()),
    ];
    let random_ending = temporary
        && matches!(before, Some('.' | '-' | '_'))
        && (6..=12).contains(&run.len())
        && !run.chars().all(digits)
        && kinds.iter().filter(|k| **k).count() >= 2;
    if random_hex || random_ending {
        out.push('*');
        return;
    }
    let limit = if temporary { 4 } else { 10 };
    let mut rest = run;
    while !rest.is_empty() {
        let split = rest.find(digits).unwrap_or(rest.len());
        let (letters, tail) = rest.split_at(split);
        out.push_str(letters);
        let end = tail.find(|c| !digits(c)).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        out.push_str(if number.len() >= limit { "*" } else { number });
        rest = tail;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_invents_is_masked_and_what_a_person_chose_is_not() {
        for (name, lasts) in [
            ("run-u17.service", "run-*.service"),
            ("run-r4f5e6a7b8c9d0e1f2a3b4c5d6e7f8091.scope", "run-*.scope"),
            ("app-firefox-123.scope", "app-firefox-*.scope"),
            ("postgresql@15-main.service", "postgresql@15-main.service"),
            ("run-backup.service", "run-backup.service"),
            ("redis-6380.service", "redis-6380.service"),
            (
                "backup@srv-data\\x2done.service",
                "backup@srv-data\\x2done.service",
            ),
            ("job-7.service", "job-7.service"),
            ("dbus-:1.7-org.example@3.service", "dbus-:*-org.example@*.service"),
            ("run-cafe.service", "run-cafe.service"),
            ("app-web@blue.service", "app-web@blue.service"),
            (
                "app-org.kde.kate@0123456789abcdef0123456789abcdef.service",
                "app-org.kde.kate@*.service",
            ),
        ] {
            assert_eq!(unit(name), lasts, "{name}");
        }
        for (name, lasts) in [
            ("job_1001", "job_*"),
            ("step_batch", "step_batch"),
            ("task_3.0", "task_*.*"),
            ("uid_1007", "uid_1007"),
            ("slot1_1@host", "slot1_1@host"),
            ("app1", "app1"),
            ("job17", "job*"),
            ("redis-6380", "redis-6380"),
            ("redis-16380", "redis-16380"),
            ("worker-41234", "worker-*"),
            ("container_1410901177871_0001_01_000005", "container_*_*_*_*"),
        ] {
            assert_eq!(group(name), lasts, "{name}");
        }
        assert_eq!(machine("machine-qemu\\x2d3\\x2ddb\\x2d2"), "machine-qemu-*-db-2");
        assert_eq!(machine("machine-deb"), "machine-deb");
        assert_eq!(machine("lxc-101"), "lxc-101");
        assert_eq!(path("/user/1007/jobs/17"), "/user/1007/jobs/*");
        assert_eq!(
            short("docker-0123456789abcdef0123456789abcdef"),
            "docker-0123456789ab"
        );
    }
}
