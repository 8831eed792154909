//! Automatic NUMA balancing, for the whole host, as an experiment.
//!
//! **Apply** writes the value of the action to `/proc/sys/kernel/numa_balancing` (0 off, 1 on, 2 memory tiering, their sum;
//! Documentation/admin-guide/sysctl/kernel.rst), **undo** the value found. Both are read back. Whoever writes another value in
//! between wins: Apply ends in a conflict, the undo leaves it as it is, and it is not tried again by this process. A value
//! that somebody configured (`sysctl.d`, `sysctl.conf`, a profile of tuned, `numa_balancing=` on the kernel's command line)
//! is not tried at all.
//!
//! The setting is one for all workloads. Where several are tried together each has an action of its own for it; the value
//! found comes back when the last of them is undone. A fresh process knows of none of them but those that it was told of
//! (`adopt`, `inherit`); told of none it writes the value back at the first undo, which is right after a crash. They hold it at
//! one value, 0: a second one that wants another is refused.
//!
//! The target is that one file; the one argument is `value`.

use crate::Effector;
use crate::identity::{boot_id, malformed, of_another_boot};
use homeostat_kernel::Root;
use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, Direction, EffectorId, Progress, UndoRecord, Workload, WorkloadId};
use homeostat_platform::{PlatformError, Reached};
use homeostat_sensors::kernel_balancing::{FILE, configured};
use homeostat_sensors::settings::Holder;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Bits that the kernel knows: `NUMA_BALANCING_NORMAL` and `NUMA_BALANCING_MEMORY_TIERING`.
const VALUE_MAX: u8 = 3;

/// What the setting is called in sentences for people, which begin with it.
const NAME: &str = "kernel.numa_balancing";

/// How an action was left.
struct Left {
    direction: Direction,
    workload: WorkloadId,
    /// The value of the action.
    ours: u8,
}

/// Switches automatic NUMA balancing.
pub(super) struct NumaBalancing {
    root: Root,
    left: BTreeMap<ActionId, Left>,
    /// The value that somebody else wrote while the setting was ours.
    theirs: Option<u8>,
}

impl NumaBalancing {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            left: BTreeMap::new(),
            theirs: None,
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

    /// Whether another action holds the setting at this value.
    fn is_held_besides(&self, id: ActionId, value: u8) -> bool {
        self.left
            .iter()
            .any(|(other, left)| *other != id && left.direction == Direction::Apply && left.ours == value)
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
        // What it found would be what the other one set, and only changes of one workload are undone in order.
        let held = |(id, left): (&ActionId, &Left)| *id != action.id && left.ours != wanted;
        if self.left.iter().any(held) {
            return Err(PlatformError::Busy {
                what: FILE.into(),
                why: "homeostat holds it at another value for another workload".into(),
            });
        }
        if let Some(theirs) = self.theirs {
            return Err(PlatformError::Conflict {
                what: FILE.into(),
                expected: "chosen by nobody".into(),
                found: format!("{theirs}, written by somebody else while homeostat had set it"),
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
        let id = record.action.id;
        let was_left = self.left.get(&id).map(|left| left.direction);
        let left = Left {
            direction,
            workload: record.action.workload.clone(),
            ours,
        };
        if direction == Direction::Undo && now == ours && self.is_held_besides(id, ours) {
            // It goes back with the last of them.
            self.left.insert(id, left);
            return Ok(Progress {
                done: true,
                finished: 1,
                total: 1,
                verified: true,
                ..Progress::default()
            });
        }
        let (goal, source) = match direction {
            Direction::Apply => (ours, found),
            Direction::Undo => (found, ours),
        };
        // Ours already, although we left it as found and nobody of ours holds it: somebody chose what we would have set.
        let is_chosen = direction == Direction::Apply
            && now == goal
            && was_left == Some(Direction::Undo)
            && !self.is_held_besides(id, ours);
        let is_others = is_chosen || now != goal && (now != source || was_left == Some(direction));
        if is_others {
            self.theirs = Some(now);
        }
        match direction {
            Direction::Apply if is_others => {
                return Err(PlatformError::Conflict {
                    what: FILE.into(),
                    expected: if is_chosen { source } else { goal }.to_string(),
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
            if direction == Direction::Apply {
                // Until it is done it may be either, and neither is somebody else's. (What is being undone is held until it is.)
                self.left.remove(&id);
            }
            write(&self.root, goal)?;
        }
        self.left.insert(id, left);
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

    fn adopt(&mut self, record: &UndoRecord) {
        if let Ok(ours) = wanted(&record.action) {
            let left = Left {
                direction: Direction::Apply,
                workload: record.action.workload.clone(),
                ours,
            };
            self.left.entry(record.action.id).or_insert(left);
        }
    }

    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        if let Ok(ours) = wanted(&record.action) {
            let left = Left {
                direction: match reached {
                    Reached::PutBack => Direction::Undo,
                    // Of several that hold the setting one may have been put back, and another only begun: the value is ours.
                    Reached::Begun | Reached::Made => Direction::Apply,
                },
                workload: record.action.workload.clone(),
                ours,
            };
            self.left.insert(record.action.id, left);
        }
    }

    fn review(&mut self, _workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        let in_force = || {
            self.left
                .values()
                .filter(|left| left.direction == Direction::Apply)
        };
        if in_force().next().is_none() {
            return Vec::new();
        }
        let Ok(now) = read(&self.root) else {
            return Vec::new();
        };
        let told: Vec<(WorkloadId, String)> = in_force()
            .filter(|left| left.ours != now)
            .map(|left| {
                let sentence = format!(
                    "{NAME} was set to {now} by somebody else, after homeostat had set it to {}",
                    left.ours
                );
                (left.workload.clone(), sentence)
            })
            .collect();
        if !told.is_empty() {
            self.theirs = Some(now);
        }
        told
    }

    fn holder(&self, file: &str) -> Holder {
        let mut in_force = self
            .left
            .values()
            .filter(|left| left.direction == Direction::Apply);
        if file != FILE {
            Holder::Unknown
        } else if self.theirs.is_some() {
            Holder::SomebodyElse
        } else if in_force.next().is_some() {
            Holder::Homeostat
        } else {
            Holder::Unknown
        }
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
        // Somebody who writes our value while we have left it as found has chosen it: it stays.
        let (_keep, root) = machine("1\n");
        let mut effector = NumaBalancing::new(root.clone());
        effector.drive(&record, Direction::Apply).unwrap();
        effector.drive(&record, Direction::Undo).unwrap();
        fs::write(path(&root), "0\n").unwrap();
        assert!(matches!(
            effector.drive(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        let undone = effector.drive(&record, Direction::Undo).unwrap();
        assert_eq!(undone.skipped.len(), 1, "{undone:?}");
        assert_eq!(now(&root), "0\n");
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
    fn of_several_actions_the_last_one_gives_the_value_back() {
        let (_keep, root) = machine("1\n");
        let of = |id: u64, workload: &str| {
            let mut record = record(&root, "0");
            record.action.id = ActionId(id);
            record.action.workload = workload.into();
            record
        };
        let (a, b) = (of(1, "a"), of(2, "b"));
        let mut effector = NumaBalancing::new(root.clone());
        for _ in 0..2 {
            for record in [&a, &b] {
                assert!(effector.drive(record, Direction::Apply).unwrap().verified);
                assert_eq!(now(&root), "0\n");
            }
            assert_eq!(effector.holder(FILE), Holder::Homeostat);
            for (record, left) in [(&b, "0\n"), (&b, "0\n"), (&a, "1\n"), (&b, "1\n")] {
                let undone = effector.drive(record, Direction::Undo).unwrap();
                assert!(undone.verified && undone.skipped.is_empty(), "{undone:?}");
                assert_eq!(now(&root), left);
            }
            assert_eq!(effector.holder(FILE), Holder::Unknown);
        }
        // One of them goes for good, whichever it is: the other keeps the setting.
        for record in [&a, &b] {
            effector.drive(record, Direction::Apply).unwrap();
        }
        effector.drive(&a, Direction::Undo).unwrap();
        effector.forget(&a);
        assert_eq!(now(&root), "0\n");
        // The same after a stop that kept both: the next process was told of them.
        let mut next = NumaBalancing::new(root.clone());
        next.adopt(&a);
        next.adopt(&b);
        next.drive(&b, Direction::Undo).unwrap();
        assert_eq!(now(&root), "0\n");
        next.drive(&a, Direction::Undo).unwrap();
        assert_eq!(now(&root), "1\n");
        // After a crash nobody was told of any: all go, in any order.
        effector.drive(&a, Direction::Apply).unwrap();
        for record in [&a, &b] {
            let undone = NumaBalancing::new(root.clone()).drive(record, Direction::Undo);
            assert!(undone.unwrap().verified);
            assert_eq!(now(&root), "1\n");
        }
    }

    #[test]
    fn what_was_put_back_before_a_kill_and_holds_our_value_is_a_person_s_unless_another_holds_it() {
        let (_keep, root) = machine("1\n");
        let of = |id: u64, workload: &str| {
            let mut record = record(&root, "0");
            record.action.id = ActionId(id);
            record.action.workload = workload.into();
            record
        };
        let (a, b) = (of(1, "a"), of(2, "b"));
        for (other, after) in [
            (Reached::PutBack, "0\n"),
            (Reached::Made, "1\n"),
            (Reached::Begun, "1\n"),
        ] {
            fs::write(path(&root), "0\n").unwrap();
            let mut next = NumaBalancing::new(root.clone());
            next.inherit(&a, other);
            next.inherit(&b, Reached::PutBack);
            for record in [&b, &a] {
                assert!(next.drive(record, Direction::Undo).unwrap().verified);
                next.forget(record);
            }
            assert_eq!(now(&root), after, "{other:?}");
        }
    }

    #[test]
    fn several_hold_it_at_one_value() {
        let (_keep, root) = machine("1\n");
        let mut effector = NumaBalancing::new(root.clone());
        effector.drive(&record(&root, "0"), Direction::Apply).unwrap();
        let mut another = action("2");
        another.id = ActionId(4);
        another.workload = "another".into();
        assert!(matches!(
            effector.survey(&another),
            Err(PlatformError::Busy { .. })
        ));
    }

    #[test]
    fn somebody_elses_value_is_told_between_the_switches_and_for_ever_after() {
        let (_keep, root) = machine("1\n");
        let record = record(&root, "0");
        let mut effector = NumaBalancing::new(root.clone());
        let nobody = BTreeMap::new();
        assert!(effector.review(&nobody).is_empty());
        effector.drive(&record, Direction::Apply).unwrap();
        assert!(effector.review(&nobody).is_empty());
        // Also who writes what was found.
        fs::write(path(&root), "1\n").unwrap();
        let told = effector.review(&nobody);
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].0.as_str(), "host");
        assert!(
            told[0].1.starts_with(NAME) && told[0].1.contains("set to 1"),
            "{told:?}"
        );
        assert_eq!(effector.holder(FILE), Holder::SomebodyElse);
        assert_eq!(effector.holder("/proc/sys/vm/swappiness"), Holder::Unknown);
        effector.drive(&record, Direction::Undo).unwrap();
        effector.forget(&record);
        assert_eq!(now(&root), "1\n");
        assert!(effector.review(&nobody).is_empty());
        let again = effector.survey(&action("0"));
        assert!(matches!(again, Err(PlatformError::Conflict { .. })), "{again:?}");
        assert_eq!(effector.holder(FILE), Holder::SomebodyElse);
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
            (
                "/usr/lib/tuned/mine/tuned.conf",
                "[sysctl]\nkernel.numa_balancing=0\n",
                true,
            ),
            (
                "/usr/lib/tuned/other/tuned.conf",
                "[sysctl]\nkernel.numa_balancing=0\n",
                false,
            ),
            ("/proc/cmdline", "quiet numa_balancing=enable\n", true),
            ("/proc/cmdline", "quiet\n", false),
        ] {
            let (_keep, root) = machine("1\n");
            let file_at = root.path(file);
            fs::create_dir_all(file_at.parent().unwrap()).unwrap();
            fs::create_dir_all(root.path("/etc/tuned")).unwrap();
            fs::write(root.path("/etc/tuned/active_profile"), "mine\n").unwrap();
            fs::write(file_at, text).unwrap();
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
