//! The place of a process in the control groups, and the place's owner.
//!
//! A place is keyed by the whole path of its group, so two groups with similar names never become one workload. A
//! container's name counts only if root owns every directory above it, because a directory's owner chooses the names
//! below. Below a unit that delegates its subtree, the next group is the workload: the unit manages other people's
//! programs.

use crate::grouping::lasting;
use homeostat_model::Owner;

/// Kind of group that a process is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlaceKind {
    /// In no group that names anything.
    #[default]
    Nowhere,
    /// In a container that root's runtime made.
    Container,
    /// In a systemd unit, or in a group below one that delegates.
    Unit,
    /// In another group.
    Cgroup,
}

/// Place of a process in the control groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Kind of group.
    pub kind: PlaceKind,
    /// The whole path of the group: its key. Empty for [`PlaceKind::Nowhere`].
    pub path: String,
    /// A short name for people, e.g. `docker-0123456789ab`. Two places may have one name.
    pub name: String,
    /// Part of the name that survives restarts, for the fingerprint.
    pub lasting: String,
    /// Owner of the place.
    pub holder: Holder,
}

/// Owner of a place.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// Root made it for one program: all its processes are root's.
    #[default]
    Machine,
    /// No single owner: the user of each process decides.
    Whoever,
    /// An owner other than root.
    Owner(Owner),
}

/// Facts about control groups beyond the text of `/proc/PID/cgroup`.
pub trait Groups {
    /// Who besides root may make groups in this directory; `None` for root alone, or if unknown. `hierarchy` is the
    /// second field of `/proc/PID/cgroup`: empty for the unified one.
    fn writer(&self, hierarchy: &str, path: &str) -> Option<Writer>;
    /// Whether the unit at this path has its subtree delegated (`Delegate=`).
    fn delegates(&self, hierarchy: &str, path: &str, unit: &str) -> bool;
}

/// Who may make groups in a directory besides root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The user who owns it.
    User(u32),
    /// Members of a group, or anybody.
    Others,
}

/// No facts beyond the text.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextOnly;

impl Groups for TextOnly {
    fn writer(&self, _: &str, _: &str) -> Option<Writer> {
        None
    }
    fn delegates(&self, _: &str, _: &str, _: &str) -> bool {
        false
    }
}

/// Units known to run other people's programs in groups below their own, whatever their `Delegate=`.
const MANAGERS: &[&str] = &[
    "buildkit.service",
    "condor.service",
    "containerd.service",
    "cri-docker.service",
    "crio.service",
    "docker.service",
    "k0scontroller.service",
    "k0sworker.service",
    "k3s-agent.service",
    "k3s.service",
    "kubelet.service",
    "libvirtd.service",
    "lxc-monitord.service",
    "lxc.service",
    "lxd.service",
    "nomad.service",
    "pbs.service",
    "podman.service",
    "rke2-agent.service",
    "rke2-server.service",
    "slurmd.service",
    "slurmstepd.scope",
    "snap.docker.dockerd.service",
    "snap.lxd.daemon.service",
    "snap.microk8s.daemon-containerd.service",
    "snap.microk8s.daemon-kubelite.service",
];

/// Units in which root starts programs on request: one program there is no evidence about the next.
const STARTERS: &[&str] = &[
    "anacron.service",
    "atd.service",
    "cron.service",
    "crond.service",
    "cronie.service",
    "fcron.service",
    "ssh.service",
    "sshd.service",
];

/// Finds the place of a process from `/proc/PID/cgroup`.
pub fn place(cgroup: &[u8], groups: &dyn Groups) -> Place {
    let text = String::from_utf8_lossy(cgroup);
    let mut best: Option<Place> = None;
    let mut resources: Vec<(&str, &str)> = Vec::new();
    for line in text.lines() {
        // hierarchy-ID:controller-list:cgroup-path (cgroups(7)).
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(hierarchy), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let walked = Walk::along(path, hierarchy, groups);
        if let Some(container) = walked.container {
            return container;
        }
        let names_processes = (number == "0" && hierarchy.is_empty()) || hierarchy == "name=systemd";
        if names_processes && best.as_ref().is_none_or(|b| b.kind == PlaceKind::Nowhere) {
            best = Some(walked.place);
        } else if !names_processes {
            resources.push((hierarchy, path));
        }
    }
    let best = best.unwrap_or_else(|| Place {
        holder: Holder::Whoever,
        ..Place::default()
    });
    by_resources(&best, &resources).unwrap_or(best)
}

/// The group of a job whose manager makes groups only in hierarchies of version 1 controllers, as Slurm did. Other such
/// groups are no evidence: tools put whole sessions into them.
fn by_resources(best: &Place, resources: &[(&str, &str)]) -> Option<Place> {
    let unit = best.path.rsplit('/').next().unwrap_or_default();
    if best.kind != PlaceKind::Unit || !MANAGERS.contains(&unit) {
        return None;
    }
    let apart = |path: &str| path != "/" && !path.starts_with(&best.path) && !best.path.starts_with(path);
    let (hierarchy, path) = resources.iter().find(|(_, path)| apart(path))?;
    // Down to the first part that counts: steps and tasks belong to their job.
    let mut own = String::new();
    for part in path.split('/').filter(|p| !p.is_empty()) {
        own.push('/');
        own.push_str(part);
        if lasting::group(part) != part {
            break;
        }
    }
    Some(Place {
        kind: PlaceKind::Unit,
        path: format!("{}:{hierarchy}:{own}", best.path),
        name: lasting::short(&format!("{unit}{own}")),
        lasting: format!("unit {}{}", lasting::unit(unit), lasting::path(&own)),
        holder: Holder::Whoever,
    })
}

struct Walk {
    container: Option<Place>,
    place: Place,
}

impl Walk {
    fn along(path: &str, hierarchy: &str, groups: &dyn Groups) -> Self {
        let mut parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != "..").collect();
        if parts
            .last()
            .is_some_and(|last| last.starts_with(crate::grouping::OWN_GROUP))
        {
            parts.pop();
        }
        // A group outside our namespace is shown with "/../": it has no directory here.
        let is_inside = !path.split('/').any(|part| part == "..");
        let to = |index: usize| format!("/{}", parts.get(..=index).unwrap_or_default().join("/"));
        let mut holder: Option<Holder> = None;
        let mut by_root = true;
        let mut unit: Option<usize> = None;
        let mut delegating = false;
        for (index, part) in parts.iter().enumerate() {
            let above = index
                .checked_sub(1)
                .and_then(|i| parts.get(i))
                .copied()
                .unwrap_or_default();
            if by_root {
                if let Some(found) = container(&parts, index) {
                    let place = found.place(&parts, index, to);
                    return Self {
                        container: Some(place.clone()),
                        place,
                    };
                }
            }
            if by_root && above == "user.slice" {
                if let Some(user) = number_between(part, "user-", ".slice") {
                    holder = Some(of_user(user));
                }
            }
            if is_unit(part) {
                unit = Some(index);
                let own = to(index);
                delegating = is_manager(part) || is_inside && groups.delegates(hierarchy, &own, part);
                if by_root {
                    if let Some(user) = number_between(part, "user@", ".service") {
                        holder.get_or_insert_with(|| of_user(user));
                        by_root = false;
                    }
                }
            }
            if by_root && is_inside {
                if let Some(writer) = groups.writer(hierarchy, &to(index)) {
                    by_root = false;
                    holder.get_or_insert(match writer {
                        Writer::User(user) => of_user(user),
                        Writer::Others => Holder::Whoever,
                    });
                }
            }
        }
        Self {
            container: None,
            place: named(&parts, unit, delegating, holder, to),
        }
    }
}

/// The place of a process in no container: innermost unit, next group below a delegating unit, or another group.
fn named(
    parts: &[&str],
    unit: Option<usize>,
    delegating: bool,
    holder: Option<Holder>,
    to: impl Fn(usize) -> String,
) -> Place {
    let nowhere = |holder: Option<Holder>| Place {
        holder: holder.unwrap_or(Holder::Whoever),
        ..Place::default()
    };
    let Some(at) = unit else {
        // Slices hold units; a process directly in one is in no unit.
        let Some(index) = parts
            .len()
            .checked_sub(1)
            .filter(|_| !parts.last().is_some_and(|l| is_slice(l)))
        else {
            return nowhere(holder);
        };
        let path = to(index);
        return Place {
            kind: PlaceKind::Cgroup,
            name: lasting::short(path.trim_start_matches('/')),
            lasting: format!("cgroup {}", lasting::path(&path)),
            // The programs in a group that is no systemd unit may be anybody's.
            holder: holder.unwrap_or(Holder::Whoever),
            path,
        };
    };
    let name = parts.get(at).copied().unwrap_or_default();
    if is_session(name) || STARTERS.contains(&name) {
        return nowhere(holder);
    }
    let below = parts
        .iter()
        .enumerate()
        .skip(at + 1)
        .find(|(_, part)| !is_slice(part))
        .filter(|_| delegating);
    let is_user_manager = name.starts_with("user@");
    match below {
        Some((index, group)) => Place {
            kind: PlaceKind::Unit,
            path: to(index),
            name: lasting::short(&format!("{name}/{group}")),
            lasting: format!("unit {}/{}", lasting::unit(name), lasting::group(group)),
            holder: holder.unwrap_or(Holder::Whoever),
        },
        // A user's service manager holds units; it is not itself a workload.
        None if is_user_manager => nowhere(holder),
        None => Place {
            kind: PlaceKind::Unit,
            path: to(at),
            name: lasting::short(name),
            lasting: format!("unit {}", lasting::unit(name)),
            holder: holder.unwrap_or(Holder::Machine),
        },
    }
}

/// Service accounts belong to the machine, even with delegation.
fn of_user(user: u32) -> Holder {
    if user < crate::grouping::PERSONS_FROM {
        Holder::Machine
    } else {
        Holder::Owner(Owner::User(user))
    }
}

fn is_unit(part: &str) -> bool {
    part.ends_with(".service") || part.ends_with(".scope")
}

fn is_slice(part: &str) -> bool {
    part.ends_with(".slice")
}

fn is_manager(unit: &str) -> bool {
    MANAGERS.contains(&unit) || unit.starts_with("user@")
}

/// The number between a prefix and a suffix, e.g. of `user-1000.slice`.
fn number_between(part: &str, prefix: &str, suffix: &str) -> Option<u32> {
    part.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()
}

/// Scopes of logins and terminals: unrelated programs of a person share them.
fn is_session(scope: &str) -> bool {
    scope == "init.scope"
        || ["session-", "vte-spawn-", "tmux-spawn-", "app-org.gnome.Terminal"]
            .iter()
            .any(|p| scope.starts_with(p))
}

/// Prefixes of the cgroup that a runtime makes for a container under systemd: `docker-<id>.scope`.
const RUNTIME_PREFIXES: &[(&str, &str)] = &[
    ("docker-", "docker"),
    ("cri-containerd-", "containerd"),
    ("crio-", "crio"),
    ("libpod-", "podman"),
    ("nerdctl-", "nerdctl"),
];

struct Found<'a> {
    runtime: &'static str,
    id: &'a str,
    /// Whether a person chose the name, so that it survives a restart of the container.
    named: bool,
    /// Whether a whole system with its own users runs in it.
    system: bool,
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The container named by the group at this index. The outermost one counts, with everything inside it.
fn container<'a>(parts: &[&'a str], index: usize) -> Option<Found<'a>> {
    let part = *parts.get(index)?;
    let above = index
        .checked_sub(1)
        .and_then(|i| parts.get(i))
        .copied()
        .unwrap_or_default();
    let base = part.strip_suffix(".scope").unwrap_or(part);
    let program = |runtime, id| Found {
        runtime,
        id,
        named: false,
        system: false,
    };
    let system = |runtime, id| Found {
        runtime,
        id,
        named: true,
        system: true,
    };
    let by_prefix = RUNTIME_PREFIXES.iter().find_map(|(prefix, runtime)| {
        base.strip_prefix(prefix)
            .filter(|id| is_hex(id, 64))
            .map(|id| program(runtime, id))
    });
    // A runtime that makes groups itself although the kubelet asks for systemd's names: "SLICE:PREFIX:ID".
    let by_colons = || {
        let (_, rest) = base.split_once(".slice:")?;
        let (prefix, id) = rest.split_once(':')?;
        let (_, runtime) = RUNTIME_PREFIXES
            .iter()
            .find(|(p, _)| p.trim_end_matches('-') == prefix)?;
        is_hex(id, 64).then(|| program(runtime, id))
    };
    let by_id = || {
        is_hex(base, 64).then(|| {
            let runtime = if parts.iter().take(index).any(|p| p.contains("kubepods")) {
                "containerd"
            } else if above.starts_with("libpod") {
                "podman"
            } else if above == "docker" {
                "docker"
            } else {
                "container"
            };
            program(runtime, base)
        })
    };
    let by_system = || {
        let lxc = base
            .strip_prefix("lxc.payload.")
            .or_else(|| matches!(above, "lxc" | "lxc.payload").then_some(base));
        let machine = || {
            (above == "machine.slice")
                .then(|| base.strip_prefix("machine-"))
                .flatten()
                .or_else(|| part.strip_prefix("systemd-nspawn@")?.strip_suffix(".service"))
        };
        lxc.map(|name| system("lxc", name))
            .or_else(|| machine().map(|name| system("machine", name)))
    };
    by_prefix
        .or_else(by_colons)
        .or_else(by_id)
        .or_else(by_system)
        .filter(|found| !found.id.is_empty())
}

impl Found<'_> {
    fn place(&self, parts: &[&str], index: usize, to: impl Fn(usize) -> String) -> Place {
        let short = if self.named {
            self.id
        } else {
            self.id.get(..12).unwrap_or(self.id)
        };
        let name = format!("{}-{short}", self.runtime);
        let inside = parts
            .iter()
            .enumerate()
            .skip(index + 1)
            .rev()
            .find(|(_, part)| part.ends_with(".service"));
        let kept = if self.named {
            lasting::machine(&name)
        } else {
            String::new()
        };
        let kept = match inside {
            None => kept,
            Some((_, unit)) if kept.is_empty() => lasting::unit(unit),
            Some((_, unit)) => format!("{kept}/{}", lasting::unit(unit)),
        };
        let pod = parts.iter().take(index + 1).rev().find_map(|part| pod(part));
        let holder = match pod {
            Some(pod) => Holder::Owner(Owner::Tenant(format!("pod:{pod}"))),
            None if self.system => Holder::Owner(Owner::Tenant(format!("{}:{}", self.runtime, self.id))),
            None => Holder::Machine,
        };
        Place {
            kind: PlaceKind::Container,
            path: to(inside.map_or(index, |(at, _)| at)),
            name: lasting::short(&inside.map_or_else(|| name.clone(), |(_, unit)| format!("{name}/{unit}"))),
            lasting: format!("container {kept}"),
            holder,
        }
    }
}

/// The pod of a kubelet's group: `pod<uid>`, `kubepods-burstable-pod<uid>.slice`; a static pod's uid is a hash.
fn pod(part: &str) -> Option<String> {
    let start = part
        .rfind("pod")
        .filter(|at| *at == 0 || part.starts_with("kubepods"))?;
    let rest = part.get(start + 3..)?;
    let uid: String = rest
        .chars()
        .take_while(|c| c.is_ascii_hexdigit() || matches!(c, '-' | '_'))
        .map(|c| if c == '_' { '-' } else { c })
        .collect();
    (!uid.is_empty()).then_some(uid)
}
