//! One setting of the kernel, by its file: `/proc/sys/…` or `/sys/…`.
//!
//! **Apply** writes the argument `value`, **undo** the value found; both are read back. Whoever writes another value in
//! between wins: Apply ends in a conflict, and the undo leaves it as it is. When the kernel takes a value and makes another
//! of it (it rounds), what was found is put back at once and the action is rejected. A person's write between ours and our
//! look at it reads the same as rounding; it is told from it by a second try ([`settle`]).
//!
//! Some settings come in pairs of which only one counts ([`PAIRS`]): writing one sets the other to zero, and zero cannot
//! be written. The undo then writes the other one.
//!
//! The target is one file; who may ask for which value is for the caller to check.

use super::identity::{boot_id, malformed, of_another_boot};
use super::{Effector, Holder};
use crate::Root;
use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, Direction, EffectorId, Progress, UndoRecord, Workload, WorkloadId};
use homeostat_platform::PlatformError;
use homeostat_tunables::{Tree, Unreadable};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

/// Longest value.
const VALUE_MAX: usize = 4096;
/// Settings of which one counts, and the other reads zero (Documentation/admin-guide/sysctl/vm.rst).
const PAIRS: &[(&str, &str)] = &[
    ("/proc/sys/vm/dirty_bytes", "/proc/sys/vm/dirty_ratio"),
    (
        "/proc/sys/vm/dirty_background_bytes",
        "/proc/sys/vm/dirty_background_ratio",
    ),
    ("/proc/sys/vm/overcommit_kbytes", "/proc/sys/vm/overcommit_ratio"),
];

/// How an action was left.
struct Left {
    direction: Direction,
    workload: WorkloadId,
    file: String,
    /// The value of the action.
    ours: String,
}

/// Writes settings.
pub(super) struct Setting {
    root: Root,
    left: BTreeMap<ActionId, Left>,
    /// Files to which somebody else wrote while they were ours.
    theirs: BTreeSet<String>,
}

impl Setting {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            left: BTreeMap::new(),
            theirs: BTreeSet::new(),
        }
    }

    /// The actions that are in force.
    fn in_force(&self) -> impl Iterator<Item = &Left> {
        self.left
            .values()
            .filter(|left| left.direction == Direction::Apply)
    }

    fn drive(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let (file, ours) = wanted(&record.action)?;
        let found = record
            .found
            .get("value")
            .ok_or_else(|| malformed(record, "value"))?
            .clone();
        let now = read(&self.root, &file)?;
        let id = record.action.id;
        let was_left = self.left.get(&id).map(|left| left.direction);
        let (goal, source) = match direction {
            Direction::Apply => (&ours, &found),
            Direction::Undo => (&found, &ours),
        };
        // Ours already, although we left it as found: somebody chose what we would have set, and it is theirs.
        let is_chosen = direction == Direction::Apply && now == *goal && was_left == Some(Direction::Undo);
        let is_others = now != *goal && (now != *source || was_left == Some(direction));
        if is_chosen || is_others {
            self.theirs.insert(file.clone());
            let expected = if is_chosen { source } else { goal };
            return theirs(direction, file, expected, now);
        }
        if now != *goal {
            if direction == Direction::Apply {
                // Until it is done it may be either, and neither is somebody else's. (What is being undone is held until it is.)
                self.left.remove(&id);
            }
            let root = &self.root;
            let other = other_of(&file).zip(record.found.get("other"));
            let mut write = |value: &str| match other {
                // Zero means that the other one counted.
                Some((other, found)) if direction == Direction::Undo && value == "0" && found != "0" => {
                    put(root, other, found)
                }
                _ => put(root, &file, value),
            };
            match settle(goal, &mut write, &mut || read(root, &file))? {
                Settled::There => {}
                Settled::Theirs(value) => {
                    self.theirs.insert(file.clone());
                    return theirs(direction, file, goal, value);
                }
                Settled::Rounded(after) => {
                    if direction == Direction::Apply {
                        put(root, &file, &found)?;
                    }
                    return Err(PlatformError::Rejected {
                        what: file,
                        value: goal.clone(),
                        errno: format!("it read {after} afterwards"),
                    });
                }
            }
        }
        let left = Left {
            direction,
            workload: record.action.workload.clone(),
            file,
            ours,
        };
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

impl Effector for Setting {
    fn id(&self) -> EffectorId {
        EffectorId::new("setting")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        let (file, ours) = wanted(action)?;
        let now = read(&self.root, &file)?;
        if now == ours {
            return Err(PlatformError::Conflict {
                what: file,
                expected: format!("another value than {ours}"),
                found: format!("{ours} already"),
            });
        }
        let mut found = BTreeMap::from([("value".to_owned(), now)]);
        if let Some(other) = other_of(&file)
            && let Ok(value) = read(&self.root, other)
        {
            found.insert("other".to_owned(), value);
        }
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found,
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        self.drive(record, direction)
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.left.remove(&record.action.id);
    }

    fn adopt(&mut self, record: &UndoRecord) {
        if let Ok((file, ours)) = wanted(&record.action) {
            let left = Left {
                direction: Direction::Apply,
                workload: record.action.workload.clone(),
                file,
                ours,
            };
            self.left.insert(record.action.id, left);
        }
    }

    fn review(&mut self, _workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        let changed: Vec<(WorkloadId, String, String)> = self
            .in_force()
            .filter_map(|left| {
                let now = read(&self.root, &left.file)
                    .ok()
                    .filter(|now| *now != left.ours)?;
                let sentence = format!(
                    "{} was set to {now} by somebody else, after homeostat had set it to {}",
                    left.file, left.ours
                );
                Some((left.workload.clone(), left.file.clone(), sentence))
            })
            .collect();
        changed
            .into_iter()
            .map(|(workload, file, sentence)| {
                self.theirs.insert(file);
                (workload, sentence)
            })
            .collect()
    }

    fn holder(&self, file: &str) -> Holder {
        if self.theirs.contains(file) {
            Holder::SomebodyElse
        } else if self.in_force().any(|left| left.file == file) {
            Holder::Homeostat
        } else {
            Holder::Unknown
        }
    }
}

/// What is answered when somebody else has set the file: the person wins.
fn theirs(direction: Direction, file: String, goal: &str, found: String) -> Result<Progress, PlatformError> {
    match direction {
        Direction::Apply => Err(PlatformError::Conflict {
            what: file,
            expected: goal.to_owned(),
            found,
        }),
        Direction::Undo => Ok(Progress {
            done: true,
            total: 1,
            skipped: BTreeMap::from([("changed by somebody else".to_owned(), 1)]),
            verified: true,
            ..Progress::default()
        }),
    }
}

/// What became of a value that was written.
#[derive(Debug, PartialEq, Eq)]
enum Settled {
    /// It is there.
    There,
    /// The kernel made another of it, this one.
    Rounded(String),
    /// Somebody else wrote at the same time, and has their value back.
    Theirs(String),
}

/// Writes a value and looks whether it is there. When another one is, it is written once more: the kernel rounds the same way
/// every time, a person has written only once. What a person wrote is put back.
fn settle(
    goal: &str,
    write: &mut dyn FnMut(&str) -> Result<(), PlatformError>,
    read: &mut dyn FnMut() -> Result<String, PlatformError>,
) -> Result<Settled, PlatformError> {
    write(goal)?;
    let first = read()?;
    if first == goal {
        return Ok(Settled::There);
    }
    write(goal)?;
    let second = read()?;
    if second == first {
        return Ok(Settled::Rounded(first));
    }
    // Whoever wrote between the second try and this look has the last word.
    if second != goal {
        return Ok(Settled::Theirs(second));
    }
    write(&first)?;
    Ok(Settled::Theirs(first))
}

fn other_of(file: &str) -> Option<&'static str> {
    PAIRS.iter().find_map(|(a, b)| match file {
        f if f == *a => Some(*b),
        f if f == *b => Some(*a),
        _ => None,
    })
}

/// The file and the value of the action.
fn wanted(action: &Action) -> Result<(String, String), PlatformError> {
    let rejected = |what: &str, value: &str, why: &str| PlatformError::Rejected {
        what: format!("{what} of setting"),
        value: value.to_owned(),
        errno: why.to_owned(),
    };
    let file = match &action.target {
        Target::Files(files) => match files.as_slice() {
            [one] => one.clone(),
            _ => return Err(rejected("target", "several files", "expected one")),
        },
        _ => return Err(rejected("target", "another kind", "expected a file")),
    };
    let is_setting = file.starts_with("/proc/sys/") || file.starts_with("/sys/");
    if !is_setting || file.split('/').any(|part| part == "..") {
        return Err(rejected(
            "target",
            &file,
            "expected a file below /proc/sys or /sys",
        ));
    }
    let value = action
        .arguments
        .get("value")
        .map(String::as_str)
        .unwrap_or_default();
    if value.is_empty() || value.len() > VALUE_MAX || value.contains(['\n', '\0']) {
        return Err(rejected("argument value", value, "expected one line"));
    }
    Ok((file, plain(value)))
}

/// One form for what is written and what is read: the word in brackets where all are listed, single blanks, numbers in
/// base ten.
fn plain(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    if let Some(chosen) = words
        .iter()
        .find_map(|w| w.strip_prefix('[').and_then(|w| w.strip_suffix(']')))
    {
        return chosen.to_owned();
    }
    let joined = words.join(" ");
    match joined.strip_prefix("0x").map(|hex| u64::from_str_radix(hex, 16)) {
        Some(Ok(n)) => n.to_string(),
        _ => joined,
    }
}

fn read(root: &Root, file: &str) -> Result<String, PlatformError> {
    match root.read(file) {
        Ok(bytes) => Ok(plain(&String::from_utf8_lossy(&bytes))),
        Err(Unreadable::Denied) => Err(PlatformError::Denied {
            what: file.to_owned(),
            needs: "run as root on the host".into(),
        }),
        Err(Unreadable::Absent) => Err(PlatformError::Unsupported {
            what: file.to_owned(),
            why: "this kernel or machine does not have it".into(),
        }),
        Err(Unreadable::Failed) => Err(PlatformError::Unsupported {
            what: file.to_owned(),
            why: "it cannot be read, so it could not be put back".into(),
        }),
    }
}

fn put(root: &Root, file: &str, value: &str) -> Result<(), PlatformError> {
    let path = root.path(file);
    let outcome = std::fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path)
        .and_then(|mut f| f.write_all(format!("{value}\n").as_bytes()));
    outcome.map_err(|e| match e.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => PlatformError::Denied {
            what: file.to_owned(),
            needs: "run as root on the host, with that file system writable".into(),
        },
        _ => PlatformError::Rejected {
            what: file.to_owned(),
            value: value.to_owned(),
            errno: e.to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "/proc/sys/vm/swappiness";

    fn machine(list: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut all = vec![("/proc/sys/kernel/random/boot_id", "this\n"), (FILE, "60\n")];
        all.extend(list);
        for (path, text) in all {
            let file = root.path(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        (tree, root)
    }

    fn action(file: &str, value: &str) -> Action {
        Action {
            id: ActionId(1),
            effector: "setting".into(),
            workload: "host".into(),
            target: Target::Files(vec![file.into()]),
            arguments: BTreeMap::from([("value".to_owned(), value.to_owned())]),
            why: "test".into(),
        }
    }

    fn now(root: &Root, file: &str) -> String {
        std::fs::read_to_string(root.path(file))
            .unwrap()
            .trim()
            .to_owned()
    }

    #[test]
    fn a_value_is_written_and_put_back_by_a_fresh_process() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        assert_eq!(now(&root, FILE), "60", "preparing changes nothing");
        assert!(effector.advance(&record, Direction::Apply).unwrap().done);
        assert_eq!(now(&root, FILE), "10");
        let mut fresh = Setting::new(root.clone());
        assert!(fresh.advance(&record, Direction::Undo).unwrap().verified);
        assert_eq!(now(&root, FILE), "60");
        assert!(fresh.advance(&record, Direction::Undo).unwrap().done, "again");
    }

    #[test]
    fn whoever_writes_in_between_wins() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        std::fs::write(root.path(FILE), "33\n").unwrap();
        assert!(matches!(
            effector.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        let undone = Setting::new(root.clone())
            .advance(&record, Direction::Undo)
            .unwrap();
        assert_eq!(undone.skipped.len(), 1);
        assert_eq!(now(&root, FILE), "33");
    }

    #[test]
    fn whoever_chooses_our_value_while_it_is_off_keeps_it() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        effector.advance(&record, Direction::Undo).unwrap();
        std::fs::write(root.path(FILE), "10\n").unwrap();
        assert!(matches!(
            effector.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        assert_eq!(effector.holder(FILE), Holder::SomebodyElse);
        let undone = effector.advance(&record, Direction::Undo).unwrap();
        assert_eq!(undone.skipped.len(), 1, "{undone:?}");
        assert_eq!(now(&root, FILE), "10");
    }

    /// A setting that makes of a value what `takes` says, and into which a person writes after the first look at it.
    fn settled(takes: fn(u64) -> u64, person: Option<&str>) -> (Settled, String) {
        use std::cell::RefCell;
        let value = RefCell::new("60".to_owned());
        let writes = RefCell::new(0);
        let mut write = |text: &str| {
            *value.borrow_mut() = takes(text.parse().unwrap()).to_string();
            *writes.borrow_mut() += 1;
            Ok(())
        };
        let mut read = || {
            if let Some(theirs) = person
                && *writes.borrow() == 1
            {
                theirs.clone_into(&mut value.borrow_mut());
            }
            Ok(value.borrow().clone())
        };
        let outcome = settle("10", &mut write, &mut read).unwrap();
        (outcome, value.into_inner())
    }

    #[test]
    fn a_person_s_write_at_the_same_moment_is_told_from_rounding_and_stays() {
        assert_eq!(settled(|v| v, None), (Settled::There, "10".into()));
        let rounds = |v| v / 4 * 4;
        assert_eq!(settled(rounds, None), (Settled::Rounded("8".into()), "8".into()));
        assert_eq!(
            settled(|v| v, Some("33")),
            (Settled::Theirs("33".into()), "33".into())
        );
    }

    #[test]
    fn it_is_known_whose_value_a_file_has() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        assert_eq!(effector.holder(FILE), Holder::Unknown);
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        assert_eq!(effector.holder(FILE), Holder::Homeostat);
        assert!(effector.review(&BTreeMap::new()).is_empty());
        effector.advance(&record, Direction::Undo).unwrap();
        assert_eq!(effector.holder(FILE), Holder::Unknown, "put back is nobody's");
        effector.advance(&record, Direction::Apply).unwrap();
        std::fs::write(root.path(FILE), "33\n").unwrap();
        let told = effector.review(&BTreeMap::new());
        assert!(
            told.len() == 1 && told[0].1.contains("set to 33 by somebody else"),
            "{told:?}"
        );
        assert_eq!(effector.holder(FILE), Holder::SomebodyElse);
        // A fresh process knows of it what it is told.
        let mut fresh = Setting::new(root);
        fresh.adopt(&record);
        assert_eq!(fresh.holder(FILE), Holder::Homeostat);
    }

    #[test]
    fn a_record_of_another_boot_is_void() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let mut record = effector.prepare(&action(FILE, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        record.boot_id = "another".into();
        assert!(effector.advance(&record, Direction::Undo).unwrap().done);
        assert_eq!(now(&root, FILE), "10");
    }

    /// In a tree of plain files zero can be written; the kernel refuses it. What counts is which file is written.
    #[test]
    fn of_a_pair_the_one_that_counted_is_put_back() {
        const BYTES: &str = "/proc/sys/vm/dirty_bytes";
        const RATIO: &str = "/proc/sys/vm/dirty_ratio";
        let (_keep, root) = machine(&[(BYTES, "0\n"), (RATIO, "20\n")]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(BYTES, "1000000")).unwrap();
        assert_eq!(record.found.get("other").map(String::as_str), Some("20"));
        effector.advance(&record, Direction::Apply).unwrap();
        // As the kernel does.
        std::fs::write(root.path(RATIO), "0\n").unwrap();
        let outcome = effector.advance(&record, Direction::Undo);
        assert_eq!(now(&root, RATIO), "20");
        // The plain file did not become zero by itself, so this is told, and not taken for done.
        assert!(matches!(outcome, Err(PlatformError::Rejected { .. })));
    }

    #[test]
    fn only_settings_are_written() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root);
        for file in ["/etc/passwd", "/proc/sys/../../etc/passwd", "/dev/null"] {
            assert!(
                matches!(
                    effector.prepare(&action(file, "1")),
                    Err(PlatformError::Rejected { .. })
                ),
                "{file}"
            );
        }
        for value in ["", "1\n2"] {
            assert!(effector.prepare(&action(FILE, value)).is_err(), "{value:?}");
        }
        assert!(matches!(
            effector.prepare(&action("/proc/sys/vm/none", "1")),
            Err(PlatformError::Unsupported { .. })
        ));
        assert!(matches!(
            effector.prepare(&action(FILE, "60")),
            Err(PlatformError::Conflict { .. })
        ));
        assert_eq!(plain("a [b] c"), "b");
        assert_eq!(plain("0x0007\n"), "7");
    }
}
