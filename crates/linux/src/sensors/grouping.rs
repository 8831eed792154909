//! Which processes belong together: what an operator would name.
//!
//! Rules, the first that fits wins (issue 3, item 2; design.md, *workload*):
//! 1. **Container**: a cgroup made by docker, containerd, CRI-O, podman, LXC, systemd-nspawn, at any depth and in
//!    any hierarchy. A systemd unit inside a container is a workload of its own. As with every cgroup below: if
//!    it holds the init or this daemon, it is what we run inside of and names nothing; its processes fall through.
//! 2. **Unit**: the innermost `.service` or `.scope` of the unified or `name=systemd` hierarchy. Login sessions,
//!    terminals and the init itself are not units that anybody would name: their processes fall through.
//! 3. **Cgroup**: another cgroup of the unified or `name=systemd` hierarchy, unless it
//!    holds more than half of all programs: then it says nothing about what belongs together.
//!    Groups of v1 resource controllers alone are not used: tools put whole sessions into them.
//! 4. **Family**: a process joins its parent when it runs the same executable and was forked from it without a
//!    new `exec` (same place of the initial stack), or when the executable is not an interpreter or shell, or when
//!    both have the same arguments. What is left joins siblings with the same executable and arguments under the
//!    same parent (not the init) or in the same session.
//! 5. **Shared segment**: families attached to one large shared segment become one workload, when they run one
//!    executable, or when one user's programs share a SysV segment of at least 64 MiB. (Small segments and memfds
//!    between different programs are display buffers.)
//!
//! Pure: processes in, workloads out, in order of their ids.

use super::bytes::fingerprint;
use super::choice;
use homeostat_model::{Fingerprint, OperatorChoice, ProcessId, Workload, WorkloadId, WorkloadKind};
use std::collections::{BTreeMap, BTreeSet};

/// A shared segment that a process maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// Device and inode of the segment in `/proc/PID/maps`.
    pub device: u64,
    /// Inode; for SysV segments the segment's id.
    pub inode: u64,
    /// Mapped length in bytes.
    pub length: u64,
    /// Whether it is a SysV segment.
    pub system_v: bool,
}

/// Smallest SysV segment in bytes that ties different programs together.
pub const SEGMENT_BETWEEN_PROGRAMS_MIN: u64 = 64 * 1024 * 1024;

/// Where the cgroups put a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In a container: its short name, and the unit inside it if any.
    Container {
        /// Runtime and short id or name, e.g. `docker-0123456789ab`.
        name: String,
        /// Whether the name is chosen by a person and so survives a restart of the container.
        named: bool,
        /// Unit inside the container.
        unit: Option<String>,
    },
    /// In a systemd unit: its name and the slice path above it, which tells units of two users apart.
    Unit {
        /// `redis-server.service`.
        name: String,
        /// `/system.slice`.
        slice: String,
    },
    /// In another cgroup: its path.
    Cgroup(String),
    /// Nowhere that says something.
    #[default]
    Nowhere,
}

/// One process as the grouping sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Parent.
    pub parent: i32,
    /// Session.
    pub session: i32,
    /// User.
    pub user: u32,
    /// `comm`.
    pub program: String,
    /// Path of the executable; empty if unreadable.
    pub executable: String,
    /// Hash of the normalised arguments ([`normalised_arguments`]).
    pub arguments: u64,
    /// Initial stack address (field 28 of `/proc/PID/stat`): the same after `fork`, another after `exec`; zero
    /// when the kernel does not tell.
    pub start_stack: u64,
    /// Cgroup.
    pub place: Place,
    /// Largest shared segment, if any is large.
    pub segment: Option<Segment>,
    /// What its owner chose.
    pub choice: OperatorChoice,
}

impl Member {
    fn id(&self) -> ProcessId {
        ProcessId {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
    fn order(&self) -> (u64, i32) {
        (self.start_ticks, self.pid)
    }
}

/// Finds the place of a process from `/proc/PID/cgroup`.
pub fn place(cgroup: &[u8]) -> Place {
    let text = String::from_utf8_lossy(cgroup);
    let mut best = Place::Nowhere;
    for line in text.lines() {
        // hierarchy-ID:controller-list:cgroup-path (cgroups(7)).
        let mut parts = line.splitn(3, ':');
        let (Some(hierarchy), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let container = container(path);
        if matches!(container, Place::Container { .. }) {
            return container;
        }
        let names_processes = (hierarchy == "0" && controllers.is_empty()) || controllers == "name=systemd";
        if names_processes && best == Place::Nowhere {
            best = unit_or_cgroup(path);
        }
    }
    best
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Prefixes of the cgroup that a runtime makes for a container under systemd: `docker-<id>.scope`.
const RUNTIME_PREFIXES: &[(&str, &str)] = &[
    ("docker-", "docker"),
    ("cri-containerd-", "containerd"),
    ("crio-", "crio"),
    ("libpod-", "podman"),
    ("nerdctl-", "nerdctl"),
];

fn container(path: &str) -> Place {
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
    // The outermost container is meant; what is inside it belongs to it.
    for (index, part) in parts.iter().enumerate() {
        let above = index
            .checked_sub(1)
            .and_then(|i| parts.get(i))
            .copied()
            .unwrap_or_default();
        let base = part.strip_suffix(".scope").unwrap_or(part);
        let found = RUNTIME_PREFIXES
            .iter()
            .find_map(|(prefix, runtime)| {
                base.strip_prefix(prefix)
                    .filter(|id| is_hex(id, 64))
                    .map(|id| (*runtime, id, false))
            })
            .or_else(|| {
                is_hex(base, 64).then(|| {
                    let runtime = if path.contains("kubepods") {
                        "containerd"
                    } else if above.starts_with("libpod") {
                        "podman"
                    } else if above == "docker" {
                        "docker"
                    } else {
                        "container"
                    };
                    (runtime, base, false)
                })
            })
            .or_else(|| base.strip_prefix("lxc.payload.").map(|name| ("lxc", name, true)))
            .or_else(|| matches!(above, "lxc" | "lxc.payload").then_some(("lxc", base, true)))
            .or_else(|| {
                (above == "machine.slice")
                    .then(|| base.strip_prefix("machine-"))
                    .flatten()
                    .or_else(|| part.strip_prefix("systemd-nspawn@")?.strip_suffix(".service"))
                    .map(|name| ("machine", name, true))
            });
        let Some((runtime, id, named)) = found.filter(|(_, id, _)| !id.is_empty()) else {
            continue;
        };
        let short = if named { id } else { id.get(..12).unwrap_or(id) };
        let inner = parts.get(index + 1..).unwrap_or_default();
        let unit = inner
            .iter()
            .rev()
            .find(|p| p.ends_with(".service"))
            .map(|p| (*p).to_owned());
        return Place::Container {
            name: format!("{runtime}-{short}"),
            named,
            unit,
        };
    }
    Place::Nowhere
}

/// Scopes of logins and terminals: whatever a person starts there, unrelated things share them.
fn is_session(scope: &str) -> bool {
    scope == "init.scope"
        || ["session-", "vte-spawn-", "tmux-spawn-", "app-org.gnome.Terminal"]
            .iter()
            .any(|p| scope.starts_with(p))
}

/// How the groups begin into which homeostat itself moves a reader: who is in one belongs where the group is.
pub(crate) const OWN_GROUP: &str = "homeostat-reader-";

/// Whether homeostat made a group, to keep a reader small.
pub fn is_own_group(path: &str) -> bool {
    path.rsplit('/')
        .next()
        .is_some_and(|name| name.starts_with(OWN_GROUP))
}

fn unit_or_cgroup(path: &str) -> Place {
    let mut parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != "..").collect();
    if parts.last().is_some_and(|last| last.starts_with(OWN_GROUP)) {
        parts.pop();
    }
    for (index, part) in parts.iter().enumerate().rev() {
        if !(part.ends_with(".service") || part.ends_with(".scope")) {
            continue;
        }
        // The user's own service manager is a container of units, not a unit that anybody means.
        if is_session(part) || part.starts_with("user@") {
            return Place::Nowhere;
        }
        let slice = parts.get(..index).unwrap_or_default().join("/");
        return Place::Unit {
            name: (*part).to_owned(),
            slice: format!("/{slice}"),
        };
    }
    match parts.last() {
        // Slices hold units; a process directly in one is in no unit.
        None => Place::Nowhere,
        Some(last) if last.ends_with(".slice") => Place::Nowhere,
        Some(_) => Place::Cgroup(format!("/{}", parts.join("/"))),
    }
}

/// Programs whose executable says little about what they do: their script or subcommand does.
fn is_interpreter(executable: &str) -> bool {
    let name = executable.rsplit('/').next().unwrap_or_default();
    const NAMES: &[&str] = &[
        "ash",
        "bash",
        "beam.smp",
        "busybox",
        "bun",
        "coreutils",
        "csh",
        "dash",
        "deno",
        "env",
        "fish",
        "guile",
        "java",
        "julia",
        "ksh",
        "mono",
        "node",
        "nodejs",
        "perl",
        "php",
        "pwsh",
        "python",
        "Rscript",
        "ruby",
        "sh",
        "sudo",
        "tcsh",
        "toybox",
        "zsh",
    ];
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    NAMES.contains(&name) || NAMES.contains(&plain)
}

/// A hash of the arguments without what changes from run to run, so that the fingerprint survives a restart but two
/// servers with different configurations stay apart. Arguments may hold secrets, so only their hash is kept.
///
/// Masked: values of options about process ids, descriptors and sockets handed over (`--pid`, `--parent-pid`,
/// `--fd`); runs of ten or more digits (times, random ids); runs of 32 or more hexadecimal digits (UUIDs without
/// dashes, container ids) and dashed UUIDs; and in parts of paths below `/tmp`, `/var/tmp`, `/run`, `/var/run`,
/// `/dev/shm`: runs of more than 3 digits, and endings in the manner of `mkstemp(3)` (a dot, dash or underscore and
/// 6 to 12 letters and digits of mixed kind). Kept: every other number, so ports (`--port 6380`, `*:6380`, `-p 5433`),
/// sizes and counts.
pub fn normalised_arguments(command_line: &[u8]) -> u64 {
    /// Options whose value is a number of this run.
    const RUN_OPTIONS: &[&str] = &[
        "pid",
        "ppid",
        "parent-pid",
        "parent",
        "fd",
        "listen-fd",
        "start-time",
    ];
    /// Most arguments that take part.
    const ARGUMENTS_MAX: usize = 256;
    let mut parts: Vec<String> = Vec::new();
    let mut masks_next = false;
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
            continue;
        }
        masks_next = of_this_run && value.is_none();
        parts.push(match value {
            Some(_) if of_this_run => format!("{option}=*"),
            Some(value) => format!("{option}={}", mask(value)),
            None => mask(&text),
        });
    }
    let bytes: Vec<&[u8]> = parts.iter().map(|p| p.as_bytes()).collect();
    fingerprint(&bytes)
}

fn mask(text: &str) -> String {
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

/// Writes one run of letters and digits, masked where it belongs to this run of the program.
fn push_masked(out: &mut String, run: &str, temporary: bool, before: Option<char>) {
    let digits = |c: char| c.is_ascii_digit();
    let random_hex = run.len() >= 32 && run.bytes().all(|b| b.is_ascii_hexdigit());
    // mkstemp's letters: digits and letters mixed, or both cases mixed inside the word.
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

/// A group on its way to becoming a workload.
struct Group<'m> {
    kind: WorkloadKind,
    name: Option<String>,
    /// Part of the fingerprint that the kind adds to executable and arguments.
    mark: String,
    members: Vec<&'m Member>,
}

/// Recognises workloads. `own` is this daemon's process id: whatever it belongs to is left out.
pub fn group(members: &[&Member], own: i32) -> Vec<Workload> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let mut loose: Vec<&Member> = Vec::new();
    let mut places: BTreeMap<&Place, Vec<&Member>> = BTreeMap::new();
    for member in members {
        match member.place {
            Place::Nowhere => loose.push(member),
            _ => places.entry(&member.place).or_default().push(member),
        }
    }
    for (place, inside) in places {
        match named_group(place, &inside, members.len(), own) {
            Some(group) => groups.push(group),
            None => loose.extend(inside),
        }
    }
    let families = families(&loose);
    groups.extend(join_segments(families));
    groups.retain(|g| g.members.iter().all(|m| m.pid != own));
    finish(groups)
}

/// A group that a cgroup names, unless the cgroup says nothing about what belongs together.
fn named_group<'m>(place: &Place, inside: &[&'m Member], all: usize, own: i32) -> Option<Group<'m>> {
    // Seen from inside a container, everything is in it; seen from a job runner's unit, we are. Then the place says
    // nothing about what belongs together.
    if inside.iter().any(|m| m.pid == 1 || m.pid == own) {
        return None;
    }
    let members = inside.to_vec();
    match place {
        Place::Nowhere => None,
        Place::Container { name, named, unit } => {
            let id = unit
                .as_ref()
                .map_or_else(|| name.clone(), |u| format!("{name}/{u}"));
            let stable = if *named {
                id.clone()
            } else {
                unit.clone().unwrap_or_default()
            };
            Some(Group {
                kind: WorkloadKind::Container,
                name: Some(id),
                mark: format!("container {stable}"),
                members,
            })
        }
        Place::Unit { name, .. } => {
            let mark = format!("unit {}", stable_unit_name(name));
            Some(Group {
                kind: WorkloadKind::Unit,
                name: Some(name.clone()),
                mark,
                members,
            })
        }
        Place::Cgroup(path) => {
            /// Below this number of programs on the machine a share says nothing.
            const PROGRAMS_MIN: usize = 8;
            let swallows = all >= PROGRAMS_MIN && inside.len() * 2 > all;
            if swallows {
                return None;
            }
            Some(Group {
                kind: WorkloadKind::Cgroup,
                name: Some(path.trim_start_matches('/').to_owned()),
                mark: format!("cgroup {path}"),
                members,
            })
        }
    }
}

/// Names of transient units carry a number of this run: `run-u17.service`, `run-r4f…e.scope`, `app-x-4711.scope`.
fn stable_unit_name(name: &str) -> String {
    let (base, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
    let transient = base.strip_prefix("run-").is_some_and(|rest| {
        let rest = rest.trim_start_matches(['u', 'r', 'p', 'i']);
        !rest.is_empty()
            && rest
                .chars()
                .all(|c| c.is_ascii_hexdigit() || c == '-' || c == 'i')
    });
    if transient {
        return format!("run-*.{suffix}");
    }
    match base.rsplit_once('-') {
        Some((head, number))
            if suffix == "scope" && number.len() > 1 && number.chars().all(|c| c.is_ascii_digit()) =>
        {
            format!("{head}-*.{suffix}")
        }
        _ => name.to_owned(),
    }
}

/// Families of processes that no cgroup names.
fn families<'m>(loose: &[&'m Member]) -> Vec<Group<'m>> {
    let by_pid: BTreeMap<i32, &Member> = loose.iter().map(|m| (m.pid, *m)).collect();
    let mut by_root: BTreeMap<i32, Vec<&'m Member>> = BTreeMap::new();
    for member in loose {
        by_root
            .entry(family_root(member, &by_pid))
            .or_default()
            .push(member);
    }
    // Roots with one executable and the same arguments under one parent or session are one workload.
    let mut merged: BTreeMap<(String, u64, bool, i32), Vec<&'m Member>> = BTreeMap::new();
    for (root, family) in by_root {
        let Some(head) = by_pid.get(&root) else { continue };
        // Without a readable executable nothing but the process itself is known to be the same.
        let (executable, by_parent, link) = if head.executable.is_empty() {
            (format!("{}#{root}", head.program), false, root)
        } else if head.parent > 1 {
            (head.executable.clone(), true, head.parent)
        } else {
            (head.executable.clone(), false, head.session)
        };
        merged
            .entry((executable, head.arguments, by_parent, link))
            .or_default()
            .extend(family);
    }
    merged
        .into_values()
        .map(|members| Group {
            kind: WorkloadKind::ProcessGroup,
            name: None,
            mark: "process".to_owned(),
            members,
        })
        .collect()
}

/// The eldest ancestor that a process belongs to.
fn family_root(member: &Member, by_pid: &BTreeMap<i32, &Member>) -> i32 {
    /// Longest chain of ancestors that is followed.
    const GENERATIONS_MAX: usize = 64;
    let mut at = member;
    for _ in 0..GENERATIONS_MAX {
        let Some(parent) = by_pid
            .get(&at.parent)
            .filter(|p| p.pid != at.pid && p.order() <= at.order())
        else {
            break;
        };
        let same_program = !at.executable.is_empty() && at.executable == parent.executable;
        let forked = at.start_stack != 0 && at.start_stack == parent.start_stack;
        let belongs =
            same_program && (forked || !is_interpreter(&at.executable) || at.arguments == parent.arguments);
        if !belongs {
            break;
        }
        at = parent;
    }
    at.pid
}

/// Joins families that are attached to one large shared segment.
fn join_segments(families: Vec<Group<'_>>) -> Vec<Group<'_>> {
    let mut by_segment: BTreeMap<(u64, u64, String, u32), Group<'_>> = BTreeMap::new();
    let mut result = Vec::new();
    for mut family in families {
        let user = family.members.first().map_or(u32::MAX, |m| m.user);
        let executable = family
            .members
            .first()
            .map(|m| m.executable.clone())
            .unwrap_or_default();
        let segment = family
            .members
            .iter()
            .filter_map(|m| m.segment)
            .max_by_key(|s| (s.length, s.inode));
        let Some(segment) = segment else {
            result.push(family);
            continue;
        };
        let between = segment.system_v && segment.length >= SEGMENT_BETWEEN_PROGRAMS_MIN;
        let program = if between { String::new() } else { executable };
        match by_segment.entry((segment.device, segment.inode, program, user)) {
            std::collections::btree_map::Entry::Vacant(slot) => {
                slot.insert(family);
            }
            std::collections::btree_map::Entry::Occupied(mut slot) => {
                let joined = slot.get_mut();
                joined.members.append(&mut family.members);
                joined.kind = WorkloadKind::SharedSegment;
                joined.mark = "segment".to_owned();
            }
        }
    }
    result.extend(by_segment.into_values());
    result
}

fn finish(groups: Vec<Group<'_>>) -> Vec<Workload> {
    let mut workloads: Vec<Workload> = Vec::with_capacity(groups.len());
    let mut names: BTreeMap<String, u32> = BTreeMap::new();
    for group in &groups {
        if let Some(name) = &group.name {
            *names.entry(name.clone()).or_default() += 1;
        }
    }
    let mut used: BTreeSet<WorkloadId> = BTreeSet::new();
    for mut group in groups {
        group.members.sort_by_key(|m| m.order());
        let Some(main) = group.members.first().copied() else {
            continue;
        };
        let id = match &group.name {
            Some(name) if names.get(name).is_none_or(|n| *n == 1) => name.clone(),
            // Two users' units of one name.
            Some(name) => format!("{name}[{}]", main.pid),
            None => format!("{}[{}]", main.program, main.pid),
        };
        let id = WorkloadId::new(id);
        // A cgroup may be called like a family; ids stay unique whatever the names are.
        let id = if used.contains(&id) {
            WorkloadId::new(format!("{id}#{}", main.start_ticks))
        } else {
            id
        };
        used.insert(id.clone());
        let mut all = OperatorChoice::default();
        for member in &group.members {
            choice::merge(&mut all, &member.choice);
        }
        let program = if main.executable.is_empty() {
            &main.program
        } else {
            &main.executable
        };
        workloads.push(Workload {
            id,
            kind: group.kind,
            fingerprint: Fingerprint::new(format!("{}: {program} #{:016x}", group.mark, main.arguments)),
            program: main.program.clone(),
            executable: main.executable.clone(),
            processes: group.members.iter().map(|m| m.id()).collect(),
            choice: all,
        });
    }
    workloads.sort_by(|a, b| a.id.cmp(&b.id));
    workloads
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn container_name(path: &str) -> Option<String> {
        match place(format!("0::{path}\n").as_bytes()) {
            Place::Container { name, .. } => Some(name),
            _ => None,
        }
    }

    #[test]
    fn containers_of_every_runtime_are_recognised() {
        for (path, name) in [
            (format!("/docker/{ID}"), "docker-0123456789ab"),
            (format!("/system.slice/docker-{ID}.scope"), "docker-0123456789ab"),
            (
                format!("/kubepods/burstable/pod1234/{ID}"),
                "containerd-0123456789ab",
            ),
            (
                format!("/kubepods.slice/x.slice/crio-{ID}.scope"),
                "crio-0123456789ab",
            ),
            (
                format!("/machine.slice/libpod-{ID}.scope/container"),
                "podman-0123456789ab",
            ),
            (
                format!("/user.slice/user-1.slice/user@1.service/user.slice/libpod-{ID}.scope"),
                "podman-0123456789ab",
            ),
            ("/lxc/web/init.scope".to_owned(), "lxc-web"),
            ("/lxc.payload.web/system.slice/x.service".to_owned(), "lxc-web"),
            ("/machine.slice/machine-deb.scope".to_owned(), "machine-deb"),
        ] {
            assert_eq!(container_name(&path).as_deref(), Some(name), "{path}");
        }
        for path in [
            "/system.slice/docker.service",
            "/docker",
            "/session/0123456789abcdef0123456789abcdef",
        ] {
            assert_eq!(container_name(path), None, "{path}");
        }
    }

    #[test]
    fn units_are_found_and_logins_are_not_units() {
        let unit = |text: &str| match place(text.as_bytes()) {
            Place::Unit { name, .. } => name,
            other => format!("{other:?}"),
        };
        assert_eq!(unit("0::/system.slice/a.service\n"), "a.service");
        assert_eq!(unit("0::/system.slice/a.service/inner\n"), "a.service");
        assert_eq!(
            unit("1:name=systemd:/system.slice/b.service\n0::/\n"),
            "b.service"
        );
        assert_eq!(
            unit("0::/user.slice/user-1.slice/user@1.service/app.slice/c.service\n"),
            "c.service"
        );
        for none in [
            "0::/user.slice/user-1.slice/session-3.scope\n",
            "0::/user.slice/user-1.slice/user@1.service/init.scope\n",
            "0::/user.slice/user-1.slice/user@1.service/tmux-spawn-1.scope\n",
            "0::/init.scope\n",
            "0::/\n",
            "0::/../..\n",
            "4:memory:/jobs/1\n",
            "rubbish",
            "",
        ] {
            assert_eq!(place(none.as_bytes()), Place::Nowhere, "{none}");
        }
        assert_eq!(place(b"0::/jobs/1\n"), Place::Cgroup("/jobs/1".into()));
    }

    #[test]
    fn names_of_transient_units_are_one_across_runs() {
        assert_eq!(
            stable_unit_name("run-u17.service"),
            stable_unit_name("run-u4711.service")
        );
        assert_eq!(stable_unit_name("app-firefox-123.scope"), "app-firefox-*.scope");
        assert_eq!(
            stable_unit_name("postgresql@15-main.service"),
            "postgresql@15-main.service"
        );
        assert_eq!(stable_unit_name("run-backup.service"), "run-backup.service");
    }

    fn arguments(list: &[&str]) -> u64 {
        normalised_arguments(list.join("\0").as_bytes())
    }

    #[test]
    fn arguments_of_one_run_are_masked_and_configuration_is_not() {
        assert_eq!(
            arguments(&["x", "--pid", "123"]),
            arguments(&["x", "--pid", "99"])
        );
        assert_eq!(
            arguments(&["x", "--parent-pid=1"]),
            arguments(&["x", "--parent-pid=2"])
        );
        assert_eq!(
            arguments(&["x", "/tmp/out.aB3dE9"]),
            arguments(&["x", "/tmp/out.Zz8yX1"])
        );
        assert_eq!(
            arguments(&["x", "--log=/tmp/run-12345/log"]),
            arguments(&["x", "--log=/tmp/run-54321/log"])
        );
        assert_eq!(
            arguments(&["x", "--at=1700000000"]),
            arguments(&["x", "--at=1700009999"])
        );
        assert_eq!(arguments(&["x", ID]), arguments(&["x", &ID.replace('0', "f")]));
        assert_ne!(
            arguments(&["redis-server *:6379"]),
            arguments(&["redis-server *:6380"])
        );
        assert_ne!(
            arguments(&["x", "--port", "6379"]),
            arguments(&["x", "--port", "6380"])
        );
        assert_ne!(arguments(&["x", "/etc/a.conf"]), arguments(&["x", "/etc/b.conf"]));
        assert_ne!(arguments(&["x", "/tmp/a.conf"]), arguments(&["x", "/tmp/b.conf"]));
        assert_ne!(
            arguments(&["java", "-Xmx4096m"]),
            arguments(&["java", "-Xmx8192m"])
        );
    }

    fn member(pid: i32, parent: i32, executable: &str) -> Member {
        Member {
            pid,
            parent,
            session: pid,
            start_ticks: pid as u64,
            start_stack: pid as u64,
            program: executable.rsplit('/').next().unwrap().to_owned(),
            executable: executable.to_owned(),
            ..Member::default()
        }
    }

    fn grouped(members: &[Member], own: i32) -> Vec<Vec<i32>> {
        let all: Vec<&Member> = members.iter().collect();
        let mut found: Vec<Vec<i32>> = group(&all, own)
            .iter()
            .map(|w| w.processes.iter().map(|p| p.pid).collect())
            .collect();
        found.sort();
        found
    }

    #[test]
    fn an_interpreter_joins_its_parent_only_when_forked() {
        let script = member(10, 1, "/usr/bin/python3");
        let forked = Member {
            start_stack: 10,
            ..member(11, 10, "/usr/bin/python3")
        };
        let other = Member {
            arguments: 5,
            ..member(12, 10, "/usr/bin/python3")
        };
        assert_eq!(grouped(&[script, forked, other], 0), [vec![10, 11], vec![12]]);
    }

    #[test]
    fn the_daemons_own_group_is_left_out_with_all_its_processes() {
        let own = member(10, 1, "/usr/bin/homeostat");
        let fork = Member {
            start_stack: 10,
            ..member(11, 10, "/usr/bin/homeostat")
        };
        assert_eq!(
            grouped(&[own, fork, member(12, 10, "/usr/bin/latency")], 10),
            [vec![12]]
        );
    }

    #[test]
    fn a_cgroup_that_holds_nearly_everything_names_nothing() {
        let mut all: Vec<Member> = (10..20)
            .map(|pid| member(pid, 1, &format!("/bin/p{pid}")))
            .collect();
        for m in all.iter_mut().take(8) {
            m.place = Place::Cgroup("/all".into());
        }
        assert_eq!(grouped(&all, 0).len(), 10);
        for m in all.iter_mut().skip(3) {
            m.place = Place::Nowhere;
        }
        assert_eq!(grouped(&all, 0)[0], [10, 11, 12]);
    }

    #[test]
    fn display_buffers_do_not_tie_programs_together() {
        let segment = |length, system_v| {
            Some(Segment {
                device: 1,
                inode: 7,
                length,
                system_v,
            })
        };
        let pair = |s: Option<Segment>| {
            [
                Member {
                    segment: s,
                    ..member(10, 1, "/bin/server")
                },
                Member {
                    segment: s,
                    ..member(11, 1, "/bin/client")
                },
            ]
        };
        assert_eq!(grouped(&pair(segment(1 << 30, false)), 0).len(), 2);
        assert_eq!(grouped(&pair(segment(32 << 20, true)), 0).len(), 2);
        assert_eq!(grouped(&pair(segment(1 << 30, true)), 0).len(), 1);
    }

    #[test]
    fn units_of_two_users_with_one_name_have_two_ids() {
        let unit = |user: u32| Place::Unit {
            name: "web.service".into(),
            slice: format!("/user-{user}"),
        };
        let all = [
            Member {
                place: unit(1),
                ..member(10, 1, "/bin/web")
            },
            Member {
                place: unit(2),
                ..member(11, 1, "/bin/web")
            },
        ];
        let refs: Vec<&Member> = all.iter().collect();
        let ids: Vec<String> = group(&refs, 0).iter().map(|w| w.id.to_string()).collect();
        assert_eq!(ids, ["web.service[10]", "web.service[11]"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), text in "[a-z0-9/.:=@-]{0,80}") {
            let _ = place(&bytes);
            let _ = place(format!("0::/{text}").as_bytes());
            let _ = normalised_arguments(&bytes);
            let _ = normalised_arguments(text.as_bytes());
        }

        #[test]
        fn every_process_is_in_exactly_one_workload(
            shape in proptest::collection::vec((0usize..30, 0u64..4, 0u64..3, 0u8..5), 1..30)
        ) {
            let members: Vec<Member> = shape
                .iter()
                .enumerate()
                .map(|(i, (parent, exe, stack, place))| Member {
                    start_stack: *stack,
                    place: if *place == 0 { Place::Cgroup("/c".into()) } else { Place::Nowhere },
                    ..member(i as i32 + 10, *parent as i32 + 10, &format!("/bin/{exe}"))
                })
                .collect();
            let mut found: Vec<i32> = grouped(&members, 0).into_iter().flatten().collect();
            found.sort_unstable();
            prop_assert_eq!(found, members.iter().map(|m| m.pid).collect::<Vec<_>>());
        }
    }
}
