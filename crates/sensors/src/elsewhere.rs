//! Statements about a process that it cannot overwrite: an attribute of its control groups, the files of its unit, its
//! container's specification. Each set of control groups is read once a pass, and its files once a minute.

use crate::{choice, units};
use homeostat_kernel::bytes::{fingerprint, lines};
use homeostat_kernel::{Root, files};
use homeostat_model::OperatorChoice;
use rustix::fs::lgetxattr;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// The extended attribute of a control group: `setfattr -n user.homeostat -v never`.
const ATTRIBUTE: &str = "user.homeostat";
const GROUPS_MAX: usize = 128;
const FILES_EVERY: u64 = 6;
const SPECIFICATION_MAX: usize = 1024 * 1024;

/// The statement about all processes in a set of control groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Says {
    pub(super) choice: OperatorChoice,
    /// Programs of the unit whose files are completely known: the files contain all statements about them.
    programs: Vec<String>,
    is_container: bool,
}

impl Says {
    /// Whether the statement to a program that overwrote its environment is known.
    pub(super) fn answer_for(&self, executable: &str) -> bool {
        self.choice.always.is_some() || self.is_container || self.programs.iter().any(|p| p == executable)
    }
}

struct Known {
    text: Vec<u8>,
    /// Statements of the files, and the pass that read them.
    files: Says,
    read_at: u64,
    /// With the attributes, and the number of its state.
    says: Says,
    state: u64,
}

/// Known control groups of the machine.
pub(super) struct Elsewhere {
    root: Root,
    known: BTreeMap<u64, Known>,
    states: u64,
    pass: u64,
}

impl Elsewhere {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            known: BTreeMap::new(),
            states: 0,
            pass: 0,
        }
    }

    /// Adds the control groups of a process, as in `/proc/PID/cgroup`. Returns their key.
    pub(super) fn enter(&mut self, text: &[u8]) -> u64 {
        let key = fingerprint(&[text]);
        if !self.known.contains_key(&key) {
            let files = from_files(&self.root, text);
            self.states += 1;
            let known = Known {
                says: with_attributes(&self.root, text, files.clone()),
                text: text.to_owned(),
                files,
                read_at: self.pass,
                state: self.states,
            };
            self.known.insert(key, known);
        }
        key
    }

    /// Reads all of them again.
    pub(super) fn refresh(&mut self, pass: u64) {
        self.pass = pass;
        for known in self.known.values_mut() {
            if pass.saturating_sub(known.read_at) >= FILES_EVERY {
                known.files = from_files(&self.root, &known.text);
                known.read_at = pass;
            }
            let says = with_attributes(&self.root, &known.text, known.files.clone());
            if says != known.says {
                self.states += 1;
                known.state = self.states;
                known.says = says;
            }
        }
    }

    /// Forgets all but these.
    pub(super) fn retain(&mut self, used: &BTreeSet<u64>) {
        self.known.retain(|key, _| used.contains(key));
    }

    /// The statement, with the number of its state.
    pub(super) fn says(&self, key: u64) -> Option<(u64, &Says)> {
        self.known.get(&key).map(|known| (known.state, &known.says))
    }
}

/// The hierarchies and paths of `/proc/PID/cgroup`, as directories of possible mounts.
fn directories(text: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    for line in lines(text) {
        let line = String::from_utf8_lossy(line);
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        if path.split('/').any(|part| part == "..") {
            continue;
        }
        let mounts = match controllers {
            "" => vec!["/sys/fs/cgroup".to_owned(), "/sys/fs/cgroup/unified".to_owned()],
            named => vec![format!(
                "/sys/fs/cgroup/{}",
                named.strip_prefix("name=").unwrap_or(named)
            )],
        };
        let mut here = path.trim_end_matches('/');
        // A statement about a group holds for all below it. The configuration decides for the whole machine (root).
        while !here.is_empty() {
            found.extend(mounts.iter().map(|mount| format!("{mount}{here}")));
            here = here.rsplit_once('/').map_or("", |(above, _)| above);
        }
    }
    found.truncate(GROUPS_MAX);
    found
}

fn with_attributes(root: &Root, text: &[u8], mut says: Says) -> Says {
    let mut value = [0; 64];
    for directory in directories(text) {
        let Ok(length) = lgetxattr(root.path(&directory), ATTRIBUTE, &mut value[..]) else {
            continue;
        };
        let value = value.get(..length).unwrap_or_default();
        choice::take_value(&mut says.choice, value, ATTRIBUTE, &directory);
    }
    says
}

fn from_files(root: &Root, text: &[u8]) -> Says {
    let mut says = Says::default();
    let mut asked = BTreeSet::new();
    for line in lines(text) {
        let line = String::from_utf8_lossy(line);
        let Some(path) = line.splitn(3, ':').nth(2) else {
            continue;
        };
        // Groups of a user's manager belong to that user, whatever their names.
        if path.split('/').any(|part| part.starts_with("user@")) {
            continue;
        }
        for part in path.split('/') {
            let container = container_id(part)
                .filter(|id| asked.insert((*id).to_owned()))
                .and_then(|id| Some((id, container_environment(root, id)?)));
            if let Some((id, environment)) = container {
                says.is_container = true;
                let place = format!("the specification of container {}", id.get(..12).unwrap_or(id));
                for variable in environment {
                    choice::take_variable(&mut says.choice, variable.as_bytes(), &place);
                }
            } else if (part.ends_with(".service") || part.ends_with(".scope"))
                && asked.insert(part.to_owned())
            {
                if let Some(unit) = units::read(root, &unescaped(part)) {
                    choice::merge(&mut says.choice, &unit.choice);
                    if unit.is_complete {
                        says.programs
                            .extend(unit.programs.iter().map(|p| resolved(root, p)));
                    }
                }
            }
        }
    }
    says
}

/// The tree of control groups prefixes `_` to a name that looks like a file of the kernel.
fn unescaped(part: &str) -> String {
    part.strip_prefix('_').unwrap_or(part).to_owned()
}

/// The program behind links such as `/usr/bin/redis-server -> redis-check-rdb`, as in `/proc/PID/exe`.
fn resolved(root: &Root, program: &str) -> String {
    if root.is_live() {
        if let Ok(path) = std::fs::canonicalize(program) {
            return path.to_string_lossy().into_owned();
        }
    }
    program.to_owned()
}

fn container_id(part: &str) -> Option<&str> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit(['-', ':']).next()?;
    (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then_some(id)
}

#[derive(Deserialize)]
struct Specification {
    /// OCI runtime specification, `process.env`.
    process: Option<Environment>,
    #[serde(rename = "Config")]
    config: Option<Environment>,
}

#[derive(Deserialize)]
struct Environment {
    #[serde(alias = "Env", default)]
    env: Vec<String>,
}

/// homeostat's variables in the environment from a container's runtime; `None` if its specification is absent or cut.
fn container_environment(root: &Root, id: &str) -> Option<Vec<String>> {
    const PLACES: [(&str, &str); 8] = [
        (
            "/run/containerd/io.containerd.runtime.v2.task/k8s.io/",
            "/config.json",
        ),
        (
            "/run/containerd/io.containerd.runtime.v2.task/moby/",
            "/config.json",
        ),
        (
            "/run/containerd/io.containerd.runtime.v2.task/default/",
            "/config.json",
        ),
        (
            "/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/",
            "/config.json",
        ),
        (
            "/run/containers/storage/overlay-containers/",
            "/userdata/config.json",
        ),
        (
            "/var/lib/containers/storage/overlay-containers/",
            "/userdata/config.json",
        ),
        ("/var/lib/docker/containers/", "/config.v2.json"),
        ("/run/docker/runtime-runc/moby/", "/config.json"),
    ];
    PLACES.iter().find_map(|(before, after)| {
        let text = files::bytes(root, &format!("{before}{id}{after}"), SPECIFICATION_MAX)?;
        let found: Specification = serde_json::from_slice(&text).ok()?;
        let environment = found.process.or(found.config)?.env;
        let ours = environment.into_iter().filter(|v| v.starts_with("HOMEOSTAT"));
        Some(ours.collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn tree(list: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        for (path, text) in list {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (directory, root)
    }

    #[test]
    fn groups_and_those_above_are_asked_at_each_mount() {
        let found = directories(b"0::/a.slice/b.service\n3:cpu,cpuacct:/x\n1:name=systemd:/../y\n");
        assert_eq!(
            found,
            [
                "/sys/fs/cgroup/a.slice/b.service",
                "/sys/fs/cgroup/unified/a.slice/b.service",
                "/sys/fs/cgroup/a.slice",
                "/sys/fs/cgroup/unified/a.slice",
                "/sys/fs/cgroup/cpu,cpuacct/x",
            ]
        );
        assert_eq!(directories(b"0::/\n"), Vec::<String>::new());
    }

    #[test]
    fn the_specification_of_a_container_speaks_for_it() {
        let path = format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json");
        let text = r#"{"process":{"env":["SECRET=hunter2","HOMEOSTAT=never"],"args":["x"]},"root":{}}"#;
        let (_directory, root) = tree(&[(&path, text)]);
        let group = format!("0::/kubepods.slice/pod1/cri-containerd-{ID}.scope\n");
        let says = from_files(&root, group.as_bytes());
        assert!(
            says.choice
                .never
                .as_deref()
                .unwrap()
                .contains("container 0123456789ab")
        );
        assert!(says.answer_for("/any") && !format!("{says:?}").contains("hunter2"));
        // A user's own group of that name is none of a container.
        let own = format!("0::/user.slice/user-1000.slice/user@1000.service/docker-{ID}.scope\n");
        assert_eq!(from_files(&root, own.as_bytes()), Says::default());
        // Docker's file, and one that cannot be read whole.
        let docker = format!("/var/lib/docker/containers/{ID}/config.v2.json");
        let (_directory, root) = tree(&[(&docker, r#"{"Config":{"Env":["A=1"]}}"#)]);
        let says = from_files(&root, format!("0::/docker/{ID}\n").as_bytes());
        assert!(says.answer_for("/any") && says.choice == OperatorChoice::default());
        let (_directory, root) = tree(&[(
            &docker,
            &format!("{{\"Config\":{{\"Env\":[]}}}}{}", " ".repeat(2 << 20)),
        )]);
        assert!(!from_files(&root, format!("0::/docker/{ID}\n").as_bytes()).answer_for("/any"));
    }

    #[test]
    fn a_unit_answers_for_the_programs_it_starts_itself() {
        let unit = "/etc/systemd/system/a.service";
        let (_directory, root) = tree(&[(unit, "[Service]\nExecStart=/usr/bin/a --x\n")]);
        let mut elsewhere = Elsewhere::new(root.clone());
        let key = elsewhere.enter(b"0::/system.slice/a.service\n");
        let (state, says) = elsewhere.says(key).unwrap();
        assert!(says.answer_for("/usr/bin/a") && !says.answer_for("/usr/bin/b"));
        std::fs::write(
            root.path(unit),
            "[Service]\nExecStart=/usr/bin/a\nEnvironment=HOMEOSTAT=never\n",
        )
        .unwrap();
        elsewhere.refresh(1);
        assert_eq!(
            elsewhere.says(key).unwrap().0,
            state,
            "files are read now and then"
        );
        elsewhere.refresh(FILES_EVERY);
        let (later, says) = elsewhere.says(key).unwrap();
        assert!(later != state && says.choice.never.is_some());
        elsewhere.retain(&BTreeSet::new());
        assert!(elsewhere.says(key).is_none());
    }

    #[test]
    fn an_attribute_holds_for_the_group_and_all_below() {
        let (_directory, root) = tree(&[("/sys/fs/cgroup/a/b/cgroup.procs", "")]);
        let mut elsewhere = Elsewhere::new(root.clone());
        let key = elsewhere.enter(b"0::/a/b\n");
        let never = |elsewhere: &Elsewhere| elsewhere.says(key).unwrap().1.choice.never.clone();
        assert_eq!(never(&elsewhere), None);
        let set = rustix::fs::setxattr(
            root.path("/sys/fs/cgroup/a"),
            ATTRIBUTE,
            b"never",
            rustix::fs::XattrFlags::empty(),
        );
        set.expect("the file system of temporary files must have extended attributes of users");
        elsewhere.refresh(1);
        assert!(never(&elsewhere).unwrap().contains("/sys/fs/cgroup/a"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let (_directory, root) = tree(&[]);
            let _ = directories(&bytes);
            let _ = from_files(&root, &bytes);
        }
    }
}
