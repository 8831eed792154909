//! Automatic NUMA balancing, for the whole host, as an experiment.
//!
//! **Apply** writes the value of the action to `/proc/sys/kernel/numa_balancing` (0 off, 1 on, 2 memory tiering, their sum;
//! Documentation/admin-guide/sysctl/kernel.rst), **undo** the value found. Both are read back. Whoever writes another value in
//! between wins: Apply ends in a conflict, and the undo leaves it as it is. A value that somebody configured (`sysctl.d`,
//! `sysctl.conf`, `numa_balancing=` on the kernel's command line) is not tried at all.
//!
//! The target is that one file; the one argument is `value`.

use super::Effector;
use super::identity::{boot_id, malformed, of_another_boot};
use crate::Root;
use crate::sensors::files;
use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, Direction, EffectorId, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// The setting.
pub(crate) const FILE: &str = "/proc/sys/kernel/numa_balancing";
/// Where administrators and packages configure sysctls (`sysctl.d(5)`).
const CONFIGURATIONS: [&str; 5] = [
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
];
/// Bits that the kernel knows: `NUMA_BALANCING_NORMAL` and `NUMA_BALANCING_MEMORY_TIERING`.
const VALUE_MAX: u8 = 3;

/// Switches automatic NUMA balancing.
pub(super) struct NumaBalancing {
    root: Root,
    /// The state in which each action was left.
    left: BTreeMap<ActionId, Direction>,
}

impl NumaBalancing {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            left: BTreeMap::new(),
        }
    }

    fn require_live(&self) -> Result<(), PlatformError> {
        if self.root.is_live() {
            return Ok(());
        }
        Err(unsupported(
            "the files below the root are not those of the running kernel",
        ))
    }

    fn survey(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        let wanted = wanted(action)?;
        let found = read(&self.root)?;
        if found == wanted {
            return Err(PlatformError::Conflict {
                what: FILE.into(),
                expected: format!("another value than {wanted}"),
                found: format!("{wanted} already"),
            });
        }
        if let Some(place) = configured(&self.root) {
            return Err(PlatformError::Conflict {
                what: FILE.into(),
                expected: "not configured by anybody".into(),
                found: format!("set in {place}"),
            });
        }
        Ok(BTreeMap::from([("value".to_owned(), found.to_string())]))
    }

    fn drive(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let ours = wanted(&record.action)?;
        let found: u8 = record
            .found
            .get("value")
            .and_then(|v| v.parse().ok())
            .ok_or_else(|| malformed(record, "value"))?;
        let now = read(&self.root)?;
        let was_left_so = self.left.get(&record.action.id) == Some(&direction);
        let (goal, source) = match direction {
            Direction::Apply => (ours, found),
            Direction::Undo => (found, ours),
        };
        let is_others = now != goal && (now != source || was_left_so);
        match direction {
            Direction::Apply if is_others => {
                return Err(PlatformError::Conflict {
                    what: FILE.into(),
                    expected: goal.to_string(),
                    found: now.to_string(),
                });
            }
            Direction::Undo if is_others => {
                return Ok(Progress {
                    done: true,
                    total: 1,
                    skipped: BTreeMap::from([("changed by somebody else".to_owned(), 1)]),
                    verified: true,
                    ..Progress::default()
                });
            }
            Direction::Apply | Direction::Undo => {}
        }
        if now != goal {
            write(&self.root, goal)?;
        }
        self.left.insert(record.action.id, direction);
        Ok(Progress {
            done: true,
            finished: 1,
            total: 1,
            verified: true,
            ..Progress::default()
        })
    }
}

impl Effector for NumaBalancing {
    fn id(&self) -> EffectorId {
        EffectorId::new("numa_balancing")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.require_live()?;
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found: self.survey(action)?,
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.require_live()?;
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        self.drive(record, direction)
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.left.remove(&record.action.id);
    }
}

/// The value of the action.
fn wanted(action: &Action) -> Result<u8, PlatformError> {
    let rejected = |what: &str, value: String, why: &str| PlatformError::Rejected {
        what: format!("{what} of numa_balancing"),
        value,
        errno: why.to_owned(),
    };
    match &action.target {
        Target::Files(files) if files.as_slice() == [FILE] => {}
        _ => {
            return Err(rejected("target", "another one".into(), "the one file expected"));
        }
    }
    let mut wanted = None;
    for (name, value) in &action.arguments {
        if name != "value" {
            return Err(rejected("argument", name.clone(), "expected value"));
        }
        wanted = value.parse().ok().filter(|v| *v <= VALUE_MAX);
    }
    wanted.ok_or_else(|| {
        let value = action.arguments.get("value").cloned().unwrap_or_default();
        rejected("argument value", value, "expected 0 to 3")
    })
}

fn path(root: &Root) -> PathBuf {
    root.path(FILE)
}

fn read(root: &Root) -> Result<u8, PlatformError> {
    let text = fs::read_to_string(path(root)).map_err(|e| unsupported(&format!("{FILE}: {e}")))?;
    text.trim().parse().map_err(|_| PlatformError::Malformed {
        path: path(root),
        line: text.clone(),
    })
}

fn write(root: &Root, value: u8) -> Result<(), PlatformError> {
    let denied =
        |e: &std::io::Error| matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS));
    let outcome = fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path(root))
        .and_then(|mut file| std::io::Write::write_all(&mut file, format!("{value}\n").as_bytes()));
    match outcome {
        Ok(()) => {}
        Err(e) if denied(&e) => {
            return Err(PlatformError::Denied {
                what: FILE.into(),
                needs: "run as root on the host, with /proc/sys writable".into(),
            });
        }
        Err(e) => {
            return Err(PlatformError::Rejected {
                what: FILE.into(),
                value: value.to_string(),
                errno: e.to_string(),
            });
        }
    }
    match read(root)? {
        now if now == value => Ok(()),
        now => Err(PlatformError::Rejected {
            what: FILE.into(),
            value: value.to_string(),
            errno: format!("it reads {now} afterwards"),
        }),
    }
}

/// Where somebody configured the value.
pub(crate) fn configured(root: &Root) -> Option<String> {
    let line = files::text(root, "/proc/cmdline").unwrap_or_default();
    if line
        .split_whitespace()
        .any(|word| word.starts_with("numa_balancing="))
    {
        return Some("the kernel's command line".into());
    }
    let is_set = |text: &str| {
        text.lines().any(|line| {
            let line = line.trim().trim_start_matches('-');
            let name = line
                .split('=')
                .next()
                .unwrap_or_default()
                .trim()
                .replace('/', ".");
            !line.starts_with(['#', ';']) && line.contains('=') && name == "kernel.numa_balancing"
        })
    };
    let mut candidates = vec!["/etc/sysctl.conf".to_owned()];
    for directory in CONFIGURATIONS {
        candidates.extend(
            files::names(root, directory)
                .into_iter()
                .filter(|name| name.ends_with(".conf"))
                .map(|name| format!("{directory}/{name}")),
        );
    }
    candidates
        .into_iter()
        .find(|path| files::text(root, path).is_some_and(|text| is_set(&text)))
}

fn unsupported(why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: "automatic NUMA balancing".into(),
        why: why.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(value: &str) -> (tempfile::TempDir, Root) {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        for directory in ["/proc/sys/kernel", "/etc/sysctl.d", "/usr/lib/sysctl.d"] {
            fs::create_dir_all(root.path(directory)).unwrap();
        }
        fs::write(path(&root), value).unwrap();
        (tree, root)
    }

    fn action(value: &str) -> Action {
        Action {
            id: ActionId(3),
            effector: "numa_balancing".into(),
            workload: "host".into(),
            target: Target::Files(vec![FILE.into()]),
            arguments: BTreeMap::from([("value".to_owned(), value.to_owned())]),
            why: "test".into(),
        }
    }

    fn record(root: &Root, value: &str) -> UndoRecord {
        UndoRecord {
            action: action(value),
            boot_id: "boot".into(),
            found: NumaBalancing::new(root.clone()).survey(&action(value)).unwrap(),
        }
    }

    fn now(root: &Root) -> String {
        fs::read_to_string(path(root)).unwrap()
    }

    #[test]
    fn the_value_found_comes_back_also_from_the_record_alone() {
        let (_keep, root) = machine("1\n");
        let record = record(&root, "0");
        let mut effector = NumaBalancing::new(root.clone());
        for _ in 0..2 {
            assert!(effector.drive(&record, Direction::Apply).unwrap().verified);
            assert_eq!(now(&root), "0\n");
        }
        for mut effector in [NumaBalancing::new(root.clone()), effector] {
            assert_eq!(effector.drive(&record, Direction::Undo).unwrap().finished, 1);
            assert_eq!(now(&root), "1\n");
        }
    }

    #[test]
    fn who_writes_later_wins() {
        let (_keep, root) = machine("1\n");
        let record = record(&root, "0");
        let mut effector = NumaBalancing::new(root.clone());
        effector.drive(&record, Direction::Apply).unwrap();
        fs::write(path(&root), "2\n").unwrap();
        assert!(matches!(
            effector.drive(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        let undone = effector.drive(&record, Direction::Undo).unwrap();
        assert_eq!(
            (undone.done, undone.finished, now(&root).as_str()),
            (true, 0, "2\n")
        );
        // Somebody who writes the value found back has decided, too.
        let (_keep, root) = machine("1\n");
        let mut effector = NumaBalancing::new(root.clone());
        effector.drive(&record, Direction::Apply).unwrap();
        fs::write(path(&root), "1\n").unwrap();
        assert!(matches!(
            effector.drive(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
    }

    #[test]
    fn what_somebody_configured_is_not_tried() {
        for (file, text, is_choice) in [
            ("/etc/sysctl.conf", "kernel.numa_balancing = 0\n", true),
            ("/etc/sysctl.d/90-x.conf", " -kernel/numa_balancing=1\n", true),
            ("/usr/lib/sysctl.d/x.conf", "kernel.numa_balancing=0\n", true),
            ("/etc/sysctl.d/x.conf", "# kernel.numa_balancing = 0\n", false),
            ("/etc/sysctl.d/x.conf", "kernel.numa_balancing_x = 0\n", false),
            ("/etc/sysctl.d/x.txt", "kernel.numa_balancing = 0\n", false),
            ("/proc/cmdline", "quiet numa_balancing=enable\n", true),
            ("/proc/cmdline", "quiet\n", false),
        ] {
            let (_keep, root) = machine("1\n");
            fs::write(root.path(file), text).unwrap();
            assert_eq!(configured(&root).is_some(), is_choice, "{file}: {text}");
            let outcome = NumaBalancing::new(root).survey(&action("0"));
            assert_eq!(
                matches!(outcome, Err(PlatformError::Conflict { .. })),
                is_choice,
                "{file}: {text}"
            );
        }
    }

    #[test]
    fn impossible_wishes_are_rejected_and_a_kernel_without_it_is_unsupported() {
        let (_keep, root) = machine("1\n");
        let effector = NumaBalancing::new(root.clone());
        for value in ["4", "-1", "on", ""] {
            let outcome = effector.survey(&action(value));
            assert!(
                matches!(outcome, Err(PlatformError::Rejected { .. })),
                "{value}: {outcome:?}"
            );
        }
        let mut elsewhere = action("0");
        elsewhere.target = Target::Files(vec!["/etc/passwd".into()]);
        assert!(matches!(
            effector.survey(&elsewhere),
            Err(PlatformError::Rejected { .. })
        ));
        assert!(matches!(
            effector.survey(&action("1")),
            Err(PlatformError::Conflict { .. })
        ));
        fs::write(path(&root), "rubbish").unwrap();
        assert!(matches!(
            effector.survey(&action("0")),
            Err(PlatformError::Malformed { .. })
        ));
        fs::remove_file(path(&root)).unwrap();
        assert!(matches!(
            effector.survey(&action("0")),
            Err(PlatformError::Unsupported { .. })
        ));
    }
}
