//! Groups processes into the workloads that an operator would name. Pure: the workloads come in order of their ids.
//!
//! The first rule that fits wins.
//! 1. **Place** ([`place`]): a container, a systemd unit, the next group below a unit that delegates, or another
//!    control group, each keyed by its whole path. A place with the init or this daemon in it names nothing. A plain
//!    group with more than half of all programs names nothing either. Users with a login ([`PERSONS_FROM`]) in another
//!    owner's unit have a workload of their own there.
//! 2. **Family**: a process joins its parent if both have the same executable and one more fact holds: a fork without
//!    `exec` (same initial stack), no interpreter or shell, or the same arguments. The rest joins siblings of one user
//!    with the same executable and arguments, under one parent (not the init) or in one session.
//! 3. **Shared segment**: families with one large shared segment join if they run one executable, or if one user's
//!    programs share a SysV segment of at least 64 MiB.

mod lasting;
mod place;

use crate::choice;
use homeostat_model::{Fingerprint, OperatorChoice, Owner, ProcessId, Workload, WorkloadId, WorkloadKind};
pub use place::{Groups, Holder, Place, PlaceKind, TextOnly, Writer, place};
use std::collections::{BTreeMap, BTreeSet};

/// Users from here on are persons with a login; below are root and service accounts. Source: `UID_MIN` and
/// `SYS_UID_MAX` of login.defs(5) as all major distributions set them.
pub const PERSONS_FROM: u32 = 1000;

/// Hashes of the arguments of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArgumentHashes {
    /// Without text of a single run.
    pub lasting: u64,
    /// As the previous version computed it.
    pub former: u64,
}

impl ArgumentHashes {
    /// Hashes a `/proc/PID/cmdline`.
    pub fn of(command_line: &[u8]) -> Self {
        Self {
            lasting: lasting::arguments(command_line),
            former: lasting::former_arguments(command_line),
        }
    }
}

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

/// The grouping's view of one process.
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
    /// Hashes of the arguments.
    pub arguments: ArgumentHashes,
    /// Initial stack address (field 28 of `/proc/PID/stat`): same after `fork`, new after `exec`, zero if not reported.
    pub start_stack: u64,
    /// Cgroup.
    pub place: Place,
    /// Largest shared segment, if any is large.
    pub segment: Option<Segment>,
    /// Its owner's choice.
    pub choice: OperatorChoice,
}

impl Member {
    /// Which process it is.
    pub fn process(&self) -> ProcessId {
        ProcessId {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
    fn order(&self) -> (u64, i32) {
        (self.start_ticks, self.pid)
    }
    fn owner(&self) -> Owner {
        match &self.place.holder {
            Holder::Owner(owner) => owner.clone(),
            Holder::Machine => Owner::Machine,
            Holder::Whoever if self.user < PERSONS_FROM => Owner::Machine,
            Holder::Whoever => Owner::User(self.user),
        }
    }
}

/// Prefix of the groups into which homeostat itself moves a reader: its processes belong where the group is.
pub const OWN_GROUP: &str = "homeostat-reader-";

/// Whether homeostat made a group, to limit a reader.
pub fn is_own_group(path: &str) -> bool {
    path.rsplit('/')
        .next()
        .is_some_and(|name| name.starts_with(OWN_GROUP))
}

/// Programs whose executable says little about their work: their script or subcommand does.
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

struct Group<'m> {
    kind: WorkloadKind,
    name: Option<String>,
    /// Part of the fingerprint that the kind adds to executable and arguments.
    mark: String,
    /// Owner; of a family, the owner of its eldest process.
    owner: Option<Owner>,
    members: Vec<&'m Member>,
}

impl Group<'_> {
    fn owner(&self) -> Owner {
        let main = || self.members.iter().min_by_key(|m| m.order());
        self.owner
            .clone()
            .or_else(|| main().map(|m| m.owner()))
            .unwrap_or_default()
    }
}

/// Recognises workloads. `own` is this daemon's process id: a group that it belongs to is left out.
pub fn group(members: &[&Member], own: i32) -> Vec<Workload> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let mut loose: Vec<&Member> = Vec::new();
    let mut places: BTreeMap<(PlaceKind, &str), Vec<&Member>> = BTreeMap::new();
    for member in members {
        match member.place.kind {
            PlaceKind::Nowhere => loose.push(member),
            kind => places.entry((kind, &member.place.path)).or_default().push(member),
        }
    }
    for ((kind, _), inside) in places {
        if says_nothing(kind, &inside, members.len(), own) {
            loose.extend(inside);
        } else {
            groups.extend(named_groups(kind, inside));
        }
    }
    let families = families(&loose);
    groups.extend(join_segments(families));
    groups.retain(|g| g.members.iter().all(|m| m.pid != own));
    finish(groups)
}

/// Whether a place is no evidence of a workload: a plain group with most programs, or the init or this daemon in it.
fn says_nothing(kind: PlaceKind, inside: &[&Member], all: usize, own: i32) -> bool {
    /// Number of programs on the machine below which a share is no evidence.
    const PROGRAMS_MIN: usize = 8;
    let swallows = kind == PlaceKind::Cgroup && all >= PROGRAMS_MIN && inside.len() * 2 > all;
    swallows || inside.iter().any(|m| m.pid == 1 || m.pid == own)
}

/// The groups of a place: one, and one for each person whose programs run in another owner's place.
fn named_groups(kind: PlaceKind, mut inside: Vec<&Member>) -> Vec<Group<'_>> {
    inside.sort_by_key(|m| m.order());
    let Some(main) = inside.first().copied() else {
        return Vec::new();
    };
    let place = &main.place;
    let workload_kind = match kind {
        PlaceKind::Container => WorkloadKind::Container,
        PlaceKind::Unit => WorkloadKind::Unit,
        PlaceKind::Cgroup | PlaceKind::Nowhere => WorkloadKind::Cgroup,
    };
    // A container, or a place of one user, has one owner, whatever its users are called.
    let is_split = kind != PlaceKind::Container && !matches!(place.holder, Holder::Owner(_));
    let mut own: Vec<&Member> = Vec::new();
    let mut persons: BTreeMap<u32, Vec<&Member>> = BTreeMap::new();
    for member in inside {
        if is_split && member.user >= PERSONS_FROM && member.user != main.user {
            persons.entry(member.user).or_default().push(member);
        } else {
            own.push(member);
        }
    }
    let mut groups = vec![Group {
        kind: workload_kind,
        name: Some(place.name.clone()),
        mark: place.lasting.clone(),
        owner: Some(main.owner()),
        members: own,
    }];
    groups.extend(persons.into_iter().map(|(user, members)| Group {
        kind: workload_kind,
        name: Some(format!("{}/user-{user}", place.name)),
        mark: place.lasting.clone(),
        owner: Some(Owner::User(user)),
        members,
    }));
    groups
}

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
    let mut merged: BTreeMap<(String, u64, u32, bool, i32), Vec<&'m Member>> = BTreeMap::new();
    for (root, family) in by_root {
        let Some(head) = by_pid.get(&root) else { continue };
        // Without a readable executable, a process is the same only as itself.
        let (executable, by_parent, link) = if head.executable.is_empty() {
            (format!("{}#{root}", head.program), false, root)
        } else if head.parent > 1 {
            (head.executable.clone(), true, head.parent)
        } else {
            (head.executable.clone(), false, head.session)
        };
        merged
            .entry((executable, head.arguments.lasting, head.user, by_parent, link))
            .or_default()
            .extend(family);
    }
    merged
        .into_values()
        .map(|members| Group {
            kind: WorkloadKind::ProcessGroup,
            name: None,
            mark: "process".to_owned(),
            owner: None,
            members,
        })
        .collect()
}

fn family_root(member: &Member, by_pid: &BTreeMap<i32, &Member>) -> i32 {
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
        // Another user's program does not belong to its parent's workload, whatever it executes.
        if !belongs || at.owner() != parent.owner() {
            break;
        }
        at = parent;
    }
    at.pid
}

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

fn finish(mut groups: Vec<Group<'_>>) -> Vec<Workload> {
    for group in &mut groups {
        group.members.sort_by_key(|m| m.order());
    }
    groups.retain(|g| !g.members.is_empty());
    // Root's groups take their names first, so that no user can take such a name.
    groups.sort_by_cached_key(|g| g.owner() != Owner::Machine);
    let mut names: BTreeMap<(bool, String), u32> = BTreeMap::new();
    for group in &groups {
        if let Some(name) = &group.name {
            *names
                .entry((group.owner() == Owner::Machine, name.clone()))
                .or_default() += 1;
        }
    }
    let mut workloads: Vec<Workload> = Vec::with_capacity(groups.len());
    let mut used: BTreeSet<WorkloadId> = BTreeSet::new();
    for group in groups {
        let Some(main) = group.members.first().copied() else {
            continue;
        };
        let owner = group.owner();
        let count = |of_root: bool, name: &String| names.get(&(of_root, name.clone())).copied().unwrap_or(0);
        let is_of_root = owner == Owner::Machine;
        let id = match &group.name {
            Some(name) if count(is_of_root, name) <= 1 && (is_of_root || count(true, name) == 0) => {
                name.clone()
            }
            Some(name) => format!("{name}[{}]", main.pid),
            None => format!("{}[{}]", main.program, main.pid),
        };
        let id = WorkloadId::new(id);
        // A cgroup may have a family's name; ids stay unique anyway.
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
        // Evidence about one user's programs does not apply to another user's of the same name.
        let of_whom = match &owner {
            Owner::User(user) => format!("user {user} "),
            Owner::Machine | Owner::Tenant(_) => String::new(),
        };
        let fingerprint = |arguments: u64| {
            Fingerprint::new(format!("{of_whom}{}: {program} #{arguments:016x}", group.mark))
        };
        let is_known_by_another = is_of_root && main.arguments.former != main.arguments.lasting;
        let belongs = |m: &&&Member| m.user != main.user && m.user != 0;
        workloads.push(Workload {
            id,
            kind: group.kind,
            fingerprint: fingerprint(main.arguments.lasting),
            former: is_known_by_another.then(|| fingerprint(main.arguments.former)),
            program: main.program.clone(),
            executable: main.executable.clone(),
            processes: group.members.iter().map(|m| m.process()).collect(),
            others: group
                .members
                .iter()
                .filter(belongs)
                .map(|m| m.process())
                .collect(),
            owner,
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

    /// Directories of a user, and units that delegate.
    #[derive(Default)]
    struct Tree {
        writers: BTreeMap<String, Writer>,
        delegating: Vec<String>,
    }

    impl Groups for Tree {
        fn writer(&self, _: &str, path: &str) -> Option<Writer> {
            self.writers.get(path).copied()
        }
        fn delegates(&self, _: &str, _: &str, unit: &str) -> bool {
            self.delegating.iter().any(|d| d == unit)
        }
    }

    fn at(path: &str) -> Place {
        place(format!("0::{path}\n").as_bytes(), &TextOnly)
    }

    fn container_name(path: &str) -> Option<String> {
        Some(at(path))
            .filter(|p| p.kind == PlaceKind::Container)
            .map(|p| p.name)
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
                format!("/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}"),
                "containerd-0123456789ab",
            ),
            (
                format!("/machine.slice/libpod-{ID}.scope/container"),
                "podman-0123456789ab",
            ),
            ("/lxc/web/init.scope".to_owned(), "lxc-web"),
            (
                "/lxc.payload.web/system.slice/x.service".to_owned(),
                "lxc-web/x.service",
            ),
            ("/machine.slice/machine-deb.scope".to_owned(), "machine-deb"),
        ] {
            assert_eq!(container_name(&path).as_deref(), Some(name), "{path}");
        }
        for path in [
            "/system.slice/docker.service".to_owned(),
            "/docker".to_owned(),
            "/session/0123456789abcdef0123456789abcdef".to_owned(),
            // Whoever holds a directory chooses the names below it.
            format!("/user.slice/user-1007.slice/user@1007.service/user.slice/libpod-{ID}.scope"),
            format!("/user.slice/user-1007.slice/user@1007.service/docker-{ID}.scope"),
        ] {
            assert_eq!(container_name(&path), None, "{path}");
        }
    }

    #[test]
    fn a_users_directory_holds_no_containers_and_is_the_users() {
        let path = format!("/batch/7/docker-{ID}.scope");
        let mut tree = Tree::default();
        let look = |tree: &Tree| place(format!("0::{path}\n").as_bytes(), tree);
        assert_eq!(look(&tree).kind, PlaceKind::Container);
        tree.writers.insert("/batch/7".into(), Writer::User(1007));
        let found = look(&tree);
        assert_eq!((found.kind, &found.path), (PlaceKind::Unit, &path));
        assert_eq!(found.holder, Holder::Owner(Owner::User(1007)));
        tree.writers.insert("/batch/7".into(), Writer::Others);
        assert_eq!(look(&tree).kind, PlaceKind::Unit);
        // A container with users of its own owns its own directory, which root made.
        let tree = Tree {
            writers: [(path.clone(), Writer::User(100_000))].into(),
            ..Tree::default()
        };
        let found = look(&tree);
        assert_eq!(
            (found.kind, found.holder),
            (PlaceKind::Container, Holder::Machine)
        );
    }

    #[test]
    fn below_what_delegates_the_next_group_is_the_workload() {
        let tree = Tree {
            delegating: vec!["own.service".into()],
            ..Tree::default()
        };
        let of = |path: &str| {
            let found = place(format!("0::{path}\n").as_bytes(), &tree);
            (found.path, found.lasting)
        };
        for (path, key, lasting) in [
            (
                "/system.slice/slurmstepd.scope/job_1001/step_0/user/task_0",
                "/system.slice/slurmstepd.scope/job_1001",
                "unit slurmstepd.scope/job_*",
            ),
            (
                "/system.slice/slurmstepd.scope/s5AAAAAAAAAA00/step_0/user",
                "/system.slice/slurmstepd.scope/s5AAAAAAAAAA00",
                "unit slurmstepd.scope/*",
            ),
            (
                "/system.slice/own.service/b.slice/c/d",
                "/system.slice/own.service/b.slice/c",
                "unit own.service/c",
            ),
            (
                "/system.slice/own.service",
                "/system.slice/own.service",
                "unit own.service",
            ),
            (
                "/system.slice/other.service/a/b",
                "/system.slice/other.service",
                "unit other.service",
            ),
            (
                "/user.slice/user-1007.slice/user@1007.service/mine/inner",
                "/user.slice/user-1007.slice/user@1007.service/mine",
                "unit user@1007.service/mine",
            ),
        ] {
            assert_eq!(of(path), (key.to_owned(), lasting.to_owned()), "{path}");
        }
    }

    #[test]
    fn jobs_of_a_manager_are_told_apart_where_only_resources_have_groups() {
        let of = |text: &str| {
            let found = place(text.as_bytes(), &TextOnly);
            (found.path, found.lasting)
        };
        let job = |number: u32, step: u32| {
            of(&format!(
                "9:name=systemd:/system.slice/slurmd.service\n4:memory:/slurm/uid_1007/job_{number}/step_{step}/task_0\n"
            ))
        };
        assert_eq!(job(1, 0), job(1, 1));
        assert_ne!(job(1, 0).0, job(2, 0).0);
        assert_eq!(job(1, 0).1, job(2, 0).1);
        assert_eq!(job(1, 0).1, "unit slurmd.service/slurm/uid_1007/job_*");
        // The manager itself, and a unit that is none.
        for unit in ["slurmd.service", "web.service"] {
            let resources = if unit == "web.service" { "/session/1" } else { "/" };
            let text = format!("9:name=systemd:/system.slice/{unit}\n4:memory:{resources}\n");
            assert_eq!(of(&text).0, format!("/system.slice/{unit}"));
        }
    }

    #[test]
    fn who_holds_a_place_is_told_by_its_path() {
        let holder = |path: &str| at(path).holder;
        let user = |user| Holder::Owner(Owner::User(user));
        let tenant = |name: &str| Holder::Owner(Owner::Tenant(name.to_owned()));
        let uid = "0f0f0f0f-1111-2222-3333-444444444444";
        for (path, expected) in [
            ("/system.slice/a.service".to_owned(), Holder::Machine),
            (format!("/system.slice/docker-{ID}.scope"), Holder::Machine),
            (format!("/kubepods/pod{uid}/{ID}"), tenant(&format!("pod:{uid}"))),
            (
                format!(
                    "/kubepods.slice/kubepods-pod{}.slice/crio-{ID}.scope",
                    uid.replace('-', "_")
                ),
                tenant(&format!("pod:{uid}")),
            ),
            (
                "/machine.slice/machine-deb.scope".to_owned(),
                tenant("machine:deb"),
            ),
            (
                "/user.slice/user-1007.slice/session-3.scope".to_owned(),
                user(1007),
            ),
            (
                "/user.slice/user-0.slice/session-3.scope".to_owned(),
                Holder::Machine,
            ),
            (
                "/user.slice/user-1007.slice/user@1007.service/app.slice/x.service".to_owned(),
                user(1007),
            ),
            ("/system.slice/slurmstepd.scope/job_1".to_owned(), Holder::Whoever),
            ("/system.slice/cron.service".to_owned(), Holder::Whoever),
            ("/jobs/1".to_owned(), Holder::Whoever),
            (
                "/user.slice/user-998.slice/session-3.scope".to_owned(),
                Holder::Machine,
            ),
            ("/".to_owned(), Holder::Whoever),
        ] {
            assert_eq!(holder(&path), expected, "{path}");
        }
    }

    #[test]
    fn units_are_found_and_logins_are_not_units() {
        let look = |text: &str| place(text.as_bytes(), &TextOnly);
        let unit = |text: &str| {
            Some(look(text))
                .filter(|p| p.kind == PlaceKind::Unit)
                .map(|p| p.name)
        };
        assert_eq!(unit("0::/system.slice/a.service\n").as_deref(), Some("a.service"));
        assert_eq!(
            unit("0::/system.slice/a.service/inner\n").as_deref(),
            Some("a.service")
        );
        assert_eq!(
            unit("1:name=systemd:/system.slice/b.service\n0::/\n").as_deref(),
            Some("b.service")
        );
        assert_eq!(
            unit("0::/user.slice/user-1.slice/user@1.service/app.slice/c.service\n").as_deref(),
            Some("c.service")
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
            assert_eq!(look(none).kind, PlaceKind::Nowhere, "{none}");
        }
        let plain = look("0::/jobs/1\n");
        assert_eq!((plain.kind, plain.path.as_str()), (PlaceKind::Cgroup, "/jobs/1"));
    }

    fn arguments(list: &[&str]) -> u64 {
        ArgumentHashes::of(list.join("\0").as_bytes()).lasting
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
    fn a_program_of_another_user_is_no_part_of_its_parents() {
        let of = |pid: i32, parent: i32, user: u32| Member {
            user,
            place: place(b"0::/init.scope\n", &Tree::default()),
            ..member(pid, parent, "/usr/lib/systemd/systemd")
        };
        let machines = of(5, 1, 0);
        let of = |user: u32| of(9, 5, user);
        assert_eq!(grouped(&[machines.clone(), of(0)], 3), [vec![5, 9]]);
        assert_eq!(grouped(&[machines, of(1000)], 3), [vec![5], vec![9]]);
    }

    #[test]
    fn an_interpreter_joins_its_parent_only_when_forked() {
        let script = member(10, 1, "/usr/bin/python3");
        let forked = Member {
            start_stack: 10,
            ..member(11, 10, "/usr/bin/python3")
        };
        let other = Member {
            arguments: ArgumentHashes {
                lasting: 5,
                former: 5,
            },
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
            m.place = at("/all");
        }
        assert_eq!(grouped(&all, 0).len(), 10);
        for m in all.iter_mut().skip(3) {
            m.place = Place::default();
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

    fn found(members: &[Member]) -> Vec<Workload> {
        group(&members.iter().collect::<Vec<_>>(), 0)
    }

    #[test]
    fn nobody_takes_the_name_of_roots_unit_and_users_units_have_two_ids() {
        let unit = |pid: i32, path: &str| Member {
            place: at(path),
            ..member(pid, 1, "/bin/web")
        };
        let of_user = |user: u32| format!("/user.slice/user-{user}.slice/user@{user}.service/web.service");
        let ids = |members: &[Member]| -> Vec<String> {
            let mut all: Vec<(i32, String)> = found(members)
                .iter()
                .map(|w| (w.processes[0].pid, w.id.to_string()))
                .collect();
            all.sort();
            all.into_iter().map(|(_, id)| id).collect()
        };
        let users = [unit(10, &of_user(1007)), unit(11, &of_user(1008))];
        assert_eq!(ids(&users), ["web.service[10]", "web.service[11]"]);
        let with_root = [unit(10, &of_user(1007)), unit(11, "/system.slice/web.service")];
        assert_eq!(ids(&with_root), ["web.service[10]", "web.service"]);
        let fingerprints: BTreeSet<Fingerprint> = found(&users)
            .into_iter()
            .chain(found(&with_root))
            .map(|w| w.fingerprint)
            .collect();
        assert_eq!(fingerprints.len(), 3, "{fingerprints:?}");
        // Nor by calling a group like a program.
        let like_a_program = [
            Member {
                place: at("/user.slice/user-1007.slice/user@1007.service/latency[11]"),
                ..member(10, 1, "/bin/web")
            },
            member(11, 1, "/bin/latency"),
        ];
        assert_eq!(ids(&like_a_program)[1], "latency[11]");
    }

    #[test]
    fn a_person_in_somebody_elses_unit_is_a_workload_of_his_own() {
        let in_unit = |pid: i32, user: u32| Member {
            user,
            place: at("/system.slice/hub.service"),
            ..member(pid, 1, "/bin/hub")
        };
        let all = found(&[
            in_unit(10, 0),
            in_unit(11, 33),
            in_unit(12, 1007),
            in_unit(13, 1008),
        ]);
        let told: Vec<(String, Owner, usize)> = all
            .iter()
            .map(|w| (w.id.to_string(), w.owner.clone(), w.processes.len()))
            .collect();
        assert_eq!(
            told,
            [
                ("hub.service".to_owned(), Owner::Machine, 2),
                ("hub.service/user-1007".to_owned(), Owner::User(1007), 1),
                ("hub.service/user-1008".to_owned(), Owner::User(1008), 1),
            ]
        );
        assert_eq!(all[0].others.iter().map(|p| p.pid).collect::<Vec<_>>(), [11]);
    }

    /// The victim's id, and the same cut to what is shown of it.
    fn forged(victim: &str, tail: &str) -> String {
        format!("{}{}", &victim[..12], &tail[..52])
    }

    proptest! {
        #[test]
        fn two_groups_are_never_one_workload_whatever_they_are_called(
            victim in "[0-9a-f]{64}",
            tail in "[0-9a-f]{64}",
            prefix in prop::sample::select(vec!["docker-", "cri-containerd-", "crio-", "libpod-", "nerdctl-", ""]),
            held in prop::sample::select(vec![
                "/user.slice/user-1007.slice/user@1007.service",
                "/user.slice/user-1007.slice/user@1007.service/app.slice",
                "/batch/1007",
            ]),
            version_one in any::<bool>(),
        ) {
            let forged = forged(&victim, &tail);
            let tree = Tree {
                writers: [("/batch/1007".to_owned(), Writer::User(1007))].into(),
                ..Tree::default()
            };
            let number = if version_one { "1:name=systemd" } else { "0:" };
            let of = |path: String| place(format!("{number}:{path}\n").as_bytes(), &tree);
            let theirs = Member {
                place: of(format!("{held}/{prefix}{forged}.scope")),
                user: 1007,
                ..member(9, 1, "/bin/redis-server")
            };
            // A directory of the same name as the victim's own, too.
            let twin = Member {
                place: of(format!("{held}/{prefix}{victim}.scope")),
                user: 1007,
                ..member(10, 1, "/bin/redis-server")
            };
            let victims = Member {
                place: of(format!("/system.slice/docker-{victim}.scope")),
                ..member(11, 1, "/bin/redis-server")
            };
            let all = found(&[theirs, twin, victims]);
            prop_assert_eq!(all.len(), 3);
            let own = all.iter().find(|w| w.processes[0].pid == 11).unwrap();
            prop_assert_eq!(own.id.to_string(), format!("docker-{}", &victim[..12]));
            prop_assert_eq!(&own.owner, &Owner::Machine);
            for other in all.iter().filter(|w| w.processes[0].pid != 11) {
                prop_assert_eq!(&other.owner, &Owner::User(1007));
                prop_assert_ne!(&other.fingerprint, &own.fingerprint);
                prop_assert_ne!(&other.kind, &WorkloadKind::Container);
            }
        }

        #[test]
        fn what_lasts_of_a_group_is_the_same_in_the_next_run(
            (first, second) in (run(), run()),
            shape in 0..SHAPES,
            own in "[a-z]{3,7}",
        ) {
            let of = |run: &Run| at(&run.path(shape, &own)).lasting;
            prop_assert_eq!(of(&first), of(&second));
            // What a person chose stays: two programs are told apart.
            let other = at(&first.path(shape, &format!("{own}x"))).lasting;
            if !NAMELESS.contains(&shape) {
                prop_assert_ne!(of(&first), other);
            }
        }

        #[test]
        fn what_lasts_of_arguments_is_the_same_in_the_next_run(
            (first, second) in (run(), run()),
            own in "[a-z]{3,9}",
        ) {
            let of = |run: &Run, own: &str| arguments(&run.arguments(own).iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert_eq!(of(&first, &own), of(&second, &own));
            prop_assert_ne!(of(&first, &own), of(&first, &format!("{own}x")));
        }

        #[test]
        fn names_and_ports_that_a_person_chose_stay(
            base in "[a-z]{2,9}",
            one in 1u32..32_768,
            two in 1u32..32_768,
        ) {
            prop_assume!(one != two);
            let service = |n: u32| at(&format!("/system.slice/{base}@{n}-main.service")).lasting;
            prop_assert_eq!(service(one), format!("unit {base}@{one}-main.service"));
            prop_assert_ne!(service(one), service(two));
            let port = |n: u32| arguments(&["server", "--port", &n.to_string(), &format!("*:{n}")]);
            prop_assert_ne!(port(one), port(two));
            // History of the version before is found again.
            let hashes = ArgumentHashes::of(format!("server\0--port\0{one}").as_bytes());
            prop_assert_eq!(hashes.lasting, hashes.former);
        }
    }

    /// What one run invents.
    #[derive(Clone, Debug)]
    struct Run {
        uuid: String,
        hex: String,
        number: u32,
        pid: u32,
        time: u64,
        port: u32,
        token: String,
    }

    fn run() -> impl Strategy<Value = Run> {
        (
            "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            "[0-9a-f]{32}",
            1u32..100_000,
            100u32..4_194_304,
            1_600_000_000u64..1_999_999_999,
            32_768u32..=60_999,
            "[A-Z][0-9][A-Z]{3}[0-9][A-Z]{4}",
        )
            .prop_map(|(uuid, hex, number, pid, time, port, token)| Run {
                uuid,
                hex,
                number,
                pid,
                time,
                port,
                token,
            })
    }

    const SHAPES: usize = 16;
    /// Those whose workload has no part that a person chose.
    const NAMELESS: [usize; 4] = [3, 9, 11, 12];

    impl Run {
        fn path(&self, shape: usize, own: &str) -> String {
            let Self {
                uuid,
                hex,
                number,
                pid,
                time,
                token,
                ..
            } = self;
            match shape {
                0 => format!("/machine.slice/machine-qemu\\x2d{number}\\x2d{own}.scope"),
                1 => format!("/ecs/{own}/{hex}/{hex}-{time}"),
                2 => format!("/nomad.slice/share.slice/{uuid}.{own}.scope"),
                3 => format!("/system.slice/slurmstepd.scope/job_{number}/step_{own}"),
                4 => format!("/batch/{own}/job_{number}/task_{pid}"),
                5 => format!("/{own}/jobs/{number}"),
                6 => format!("/app.slice/snap.{own}.{own}-{uuid}.scope"),
                7 => format!("/system.slice/{own}-{uuid}.service"),
                8 => format!("/yarn/{own}/container_{time}_{number}_01_{pid}"),
                9 => format!("/system.slice/slurmstepd.scope/s{token}{token}/step_0"),
                10 => format!("/{own}/{time}"),
                11 => "/system.slice/run-u17.service".replace("17", &number.to_string()),
                12 => format!("/system.slice/run-r{hex}.scope"),
                13 => {
                    format!("/user.slice/user-1007.slice/user@1007.service/app.slice/app-{own}-{pid}.scope")
                }
                14 => format!("/system.slice/dbus-:1.{number}-org.{own}@{number}.service"),
                _ => format!("/{own}/pod{}/{own}", uuid.replace('-', "_")),
            }
        }

        fn arguments(&self, own: &str) -> Vec<String> {
            let Self {
                uuid,
                hex,
                number,
                pid,
                time,
                port,
                ..
            } = self;
            vec![
                own.to_owned(),
                format!("-uuid={uuid}"),
                format!("socket,path=/var/lib/libvirt/qemu/domain-{number}-{own}/monitor.sock,fd={pid}"),
                format!("--task={uuid}.{own}"),
                format!("/opt/{hex}/{own}"),
                format!("--started={time}"),
                "--pid".to_owned(),
                pid.to_string(),
                format!("--peer=127.0.0.1:{port}"),
                "--port".to_owned(),
                port.to_string(),
                format!("/tmp/{own}-{time}/x"),
            ]
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), text in "[a-z0-9/.:=@-]{0,80}") {
            let _ = place(&bytes, &TextOnly);
            let _ = place(format!("0::/{text}").as_bytes(), &TextOnly);
            let _ = ArgumentHashes::of(&bytes);
            let _ = ArgumentHashes::of(text.as_bytes());
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
                    place: if *place == 0 { at("/c") } else { Place::default() },
                    ..member(i as i32 + 10, *parent as i32 + 10, &format!("/bin/{exe}"))
                })
                .collect();
            let mut found: Vec<i32> = grouped(&members, 0).into_iter().flatten().collect();
            found.sort_unstable();
            prop_assert_eq!(found, members.iter().map(|m| m.pid).collect::<Vec<_>>());
        }
    }
}
