//! One kernel setting, by its file: `/proc/sys/…` or `/sys/…`.
//!
//! **Apply** writes the argument `value`, **undo** the value found; both read back. A person who writes in between
//! wins: Apply ends in a conflict, undo changes nothing, and this process does not touch that file again. If the kernel
//! rounds a value, the old one is put back and the action rejected. A second try reveals a person's write ([`settle`]).
//!
//! A file or pair is held at one value. An action that wants another is refused: it would find the first one's value,
//! and only actions of one workload are undone in order. Workloads that found the same value and want the same share
//! it. The last undo restores the value found.
//!
//! Remaining races, since the kernel has no compare-and-write: a person's write in the microseconds between check and
//! write is missed. Two in a row between the tries pass for rounding. A value equal to the kernel's rounding passes for
//! homeostat's. A second kill while [`Setting::is_made_of`] writes a person's value back loses that value.
//!
//! The target is one file. The caller checks who may ask for which value.

use crate::Effector;
use crate::identity::{boot_id, malformed, of_another_boot};
use homeostat_kernel::Root;
use homeostat_model::action::Target;
use homeostat_model::setting::{is_one_setting, other_of_pair};
use homeostat_model::{Action, ActionId, Direction, EffectorId, Progress, UndoRecord, Workload, WorkloadId};
use homeostat_platform::{PlatformError, Reached};
use homeostat_sensors::settings::Holder;
use homeostat_tunables::{Tree, Unreadable};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

const VALUE_MAX: usize = 4096;
/// Writes until the outcome is clear. Rounding plus one person's write takes three.
const TRIES_MAX: usize = 4;

type Put = fn(&Root, &str, &str) -> Result<(), PlatformError>;

/// Value of a file. In a pair only one file counts ([`other_of_pair`]): writing one zeroes the other, and zero cannot
/// be written. To restore zero, the undo writes the other file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    value: String,
    /// The value of the other half of a pair, if it is known.
    other: Option<String>,
}

/// How an action was left.
struct Left {
    /// `None` until a write has certainly ended. Until then either value is homeostat's.
    direction: Option<Direction>,
    workload: WorkloadId,
    file: String,
    /// The value of the action.
    ours: String,
    /// The value that it found.
    found: String,
}

impl Left {
    fn of(record: &UndoRecord, direction: Option<Direction>) -> Result<Self, PlatformError> {
        let (file, ours) = wanted(&record.action)?;
        let found = record
            .found
            .get("value")
            .ok_or_else(|| malformed(record, "value"))?;
        Ok(Self {
            direction,
            workload: record.action.workload.clone(),
            file,
            ours,
            found: found.clone(),
        })
    }

    /// Whether both hold one value for two workloads.
    fn shares(&self, other: &Self) -> bool {
        self.workload != other.workload
            && self.file == other.file
            && self.ours == other.ours
            && self.found == other.found
    }
}

/// Writes settings.
pub(super) struct Setting {
    root: Root,
    put: Put,
    left: BTreeMap<ActionId, Left>,
    /// The kernel's rounding of an action's value, as long as the file may hold it.
    made: BTreeMap<ActionId, String>,
    /// Actions of an earlier process whose rounding by the kernel is unknown.
    begun: BTreeSet<ActionId>,
    /// Files to which somebody else wrote while an action held them.
    theirs: BTreeSet<String>,
}

impl Setting {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            put,
            left: BTreeMap::new(),
            made: BTreeMap::new(),
            begun: BTreeSet::new(),
            theirs: BTreeSet::new(),
        }
    }

    fn in_force(&self) -> impl Iterator<Item = &Left> {
        self.left
            .values()
            .filter(|left| left.direction == Some(Direction::Apply))
    }

    /// The actions of other workloads that share the value of this one.
    fn sharers(&self, own: &Left) -> impl Iterator<Item = (&ActionId, &Left)> {
        self.left.iter().filter(|(_, left)| left.shares(own))
    }

    /// Whether somebody else wrote to it, by either name of a pair.
    fn is_theirs(&self, file: &str) -> bool {
        self.theirs.iter().any(|theirs| is_one_setting(theirs, file))
    }

    fn leave(&mut self, record: &UndoRecord, direction: Option<Direction>) -> Result<(), PlatformError> {
        self.left.insert(record.action.id, Left::of(record, direction)?);
        Ok(())
    }

    fn look(&self, file: &str) -> Result<State, PlatformError> {
        Ok(State {
            value: read(&self.root, file)?,
            other: other_of_pair(file).and_then(|other| read(&self.root, other).ok()),
        })
    }

    /// Writes a state: of a pair the half that counts.
    fn write(&self, file: &str, state: &State) -> Result<(), PlatformError> {
        match other_of_pair(file).zip(state.other.as_ref()) {
            // Zero means that the other one counted.
            Some((other, found)) if state.value == "0" && found != "0" => {
                (self.put)(&self.root, other, found)
            }
            _ => (self.put)(&self.root, file, &state.value),
        }
    }

    fn bring(&self, file: &str, goal: &State) -> Result<Settled, PlatformError> {
        settle(goal, &mut |state| self.write(file, state), &mut || {
            self.look(file)
        })
    }

    /// Whether the kernel rounds the action's value to this one: writes it once more, and a person's value back.
    ///
    /// The kernel's rounding is known only after the write, and the record is written before. After a kill in between
    /// ([`Reached::Begun`]) a third value may be the rounding or a person's. An action known to be made whole
    /// ([`Reached::Made`]) was not rounded, so there a third value is always a person's.
    fn is_made_of(&self, file: &str, ours: &State, there: &State) -> Result<bool, PlatformError> {
        match self.bring(file, ours)? {
            Settled::Rounded(value) if value == there.value => Ok(true),
            // Whoever has written just now has the last word, and has it already.
            Settled::Theirs(_) => Ok(false),
            Settled::There | Settled::Rounded(_) => {
                self.write(file, there)?;
                Ok(false)
            }
        }
    }

    /// Somebody else has set the file: the person wins.
    fn yield_to(
        &mut self,
        direction: Direction,
        file: String,
        expected: &str,
        found: String,
    ) -> Result<Progress, PlatformError> {
        self.theirs.insert(file.clone());
        theirs(direction, file, expected, found)
    }

    fn drive(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let own = Left::of(record, Some(direction))?;
        let file = own.file.clone();
        let ours = State {
            value: own.ours.clone(),
            other: None,
        };
        let found = State {
            value: own.found.clone(),
            other: record.found.get("other").cloned(),
        };
        let now = self.look(&file)?;
        let id = record.action.id;
        let was_left = self.left.get(&id).and_then(|left| left.direction);
        let (goal, source) = match direction {
            Direction::Apply => (&ours, &found),
            Direction::Undo => (&found, &ours),
        };
        if self.is_theirs(&file) {
            // The file stays theirs, whatever it holds by now, even if that is the value of the action.
            return theirs(direction, file, &source.value, now.value);
        }
        let is_shared = self
            .sharers(&own)
            .any(|(_, left)| left.direction != Some(Direction::Undo));
        if direction == Direction::Undo && is_shared && now.value == ours.value {
            // The last of the sharers restores it.
            return self.end(record, direction);
        }
        let is_there = now.value == goal.value;
        let is_made = |maker: &ActionId| self.made.get(maker) == Some(&now.value);
        let is_ours_to_move =
            now.value == source.value || is_made(&id) || self.sharers(&own).any(|(maker, _)| is_made(maker));
        // It was left as found and has the action's value: somebody chose that value, and it is theirs.
        let is_chosen =
            direction == Direction::Apply && is_there && was_left == Some(Direction::Undo) && !is_shared;
        let mut is_others = !is_there && (!is_ours_to_move || was_left == Some(direction));
        if is_others && direction == Direction::Undo && self.begun.contains(&id) {
            is_others = !self.is_made_of(&file, &ours, &now)?;
        }
        if is_chosen || is_others {
            let expected = if is_chosen { source } else { goal };
            return self.yield_to(direction, file, &expected.value, now.value);
        }
        if !is_there {
            if direction == Direction::Apply {
                // The file stays held until the undo is done.
                self.leave(record, None)?;
            }
            match self.bring(&file, goal)? {
                Settled::There => {}
                Settled::Theirs(value) => return self.yield_to(direction, file, &goal.value, value),
                Settled::Rounded(after) => {
                    let mut errno = format!("it read {after} afterwards");
                    // Until the value found is back, the undo must know the rounded one for homeostat's.
                    self.made.insert(id, after);
                    if direction == Direction::Apply {
                        match self.bring(&file, &found) {
                            Ok(Settled::There) => {
                                self.made.remove(&id);
                                self.leave(record, Some(Direction::Undo))?;
                            }
                            Ok(Settled::Theirs(value)) => {
                                return self.yield_to(direction, file, &goal.value, value);
                            }
                            Ok(Settled::Rounded(after)) => {
                                errno.push_str(&format!("; {} put back reads {after}", found.value));
                                self.made.insert(id, after);
                            }
                            Err(e) => errno.push_str(&format!("; {} is not put back yet: {e}", found.value)),
                        }
                    }
                    return Err(PlatformError::Rejected {
                        what: file,
                        value: goal.value.clone(),
                        errno,
                    });
                }
            }
        }
        self.end(record, direction)
    }

    /// The file is as the direction wants it.
    fn end(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.made.remove(&record.action.id);
        self.begun.remove(&record.action.id);
        self.leave(record, Some(direction))?;
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
        let now = self.look(&file)?;
        if now.value == ours {
            return Err(PlatformError::Conflict {
                what: file,
                expected: format!("another value than {ours}"),
                found: format!("{ours} already"),
            });
        }
        if self.is_theirs(&file) {
            return Err(PlatformError::Conflict {
                what: file,
                expected: "chosen by nobody".to_owned(),
                found: format!(
                    "{}, and somebody else wrote to it while homeostat had set it",
                    now.value
                ),
            });
        }
        // Done before anything is remembered: a refused action gets no `forget`, and would hold the file for ever.
        let boot_id = boot_id(&self.root)?;
        let mut found = BTreeMap::from([("value".to_owned(), now.value)]);
        found.extend(now.other.map(|value| ("other".to_owned(), value)));
        let record = UndoRecord {
            action: action.clone(),
            boot_id,
            found,
        };
        let own = Left::of(&record, Some(Direction::Undo))?;
        let joins = |left: &Left| left.direction == Some(Direction::Undo) && left.shares(&own);
        if let Some((holder, left)) = self
            .left
            .iter()
            .find(|(id, left)| **id != action.id && !joins(left) && is_one_setting(&left.file, &file))
        {
            return Err(PlatformError::Busy {
                why: format!("action {holder} for {} has it until it is undone", left.workload),
                what: file,
            });
        }
        // From now on a person who writes the same value has chosen it.
        self.left.insert(action.id, own);
        Ok(record)
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        self.drive(record, direction)
    }

    fn forget(&mut self, record: &UndoRecord) {
        let id = record.action.id;
        self.left.remove(&id);
        self.made.remove(&id);
        self.begun.remove(&id);
    }

    fn adopt(&mut self, record: &UndoRecord) {
        let id = record.action.id;
        // An action only begun may have left another value, which is nobody else's for that.
        let direction = (!self.begun.contains(&id)).then_some(Direction::Apply);
        if !self.left.contains_key(&id) {
            // The undo reports a record that is not understood.
            let _ = self.leave(record, direction);
        }
    }

    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        let direction = match reached {
            Reached::Begun => {
                self.begun.insert(record.action.id);
                None
            }
            Reached::Made => Some(Direction::Apply),
            Reached::PutBack => Some(Direction::Undo),
        };
        // The undo reports a record that is not understood.
        let _ = self.leave(record, direction);
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
        if self.is_theirs(file) {
            Holder::SomebodyElse
        } else if self.in_force().any(|left| is_one_setting(&left.file, file)) {
            Holder::Homeostat
        } else {
            Holder::Unknown
        }
    }
}

/// The answer when somebody else has set the file: the person wins.
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

/// Outcome of a write.
#[derive(Debug, PartialEq, Eq)]
enum Settled {
    /// The value is there.
    There,
    /// The kernel made this value of it.
    Rounded(String),
    /// Somebody else wrote at the same time, and has their value back.
    Theirs(String),
}

/// Writes a value and reads it back. If another value is there, it writes once more: the kernel rounds the same way
/// every time, a person writes once. A person's value is put back.
fn settle(
    goal: &State,
    write: &mut dyn FnMut(&State) -> Result<(), PlatformError>,
    look: &mut dyn FnMut() -> Result<State, PlatformError>,
) -> Result<Settled, PlatformError> {
    let mut others: Vec<State> = Vec::new();
    for _ in 0..TRIES_MAX {
        write(goal)?;
        let now = look()?;
        let rounds = others.last().is_some_and(|before| before.value == now.value);
        if rounds {
            others.retain(|before| before.value != now.value);
        }
        if rounds || now.value == goal.value {
            return match others.as_slice() {
                // A value seen once was a person's.
                [person] => {
                    write(person)?;
                    Ok(Settled::Theirs(person.value.clone()))
                }
                _ if rounds => Ok(Settled::Rounded(now.value)),
                // Different values at each check were the kernel's, on the way.
                _ => Ok(Settled::There),
            };
        }
        others.push(now);
    }
    Ok(Settled::Rounded(
        others.pop().map(|last| last.value).unwrap_or_default(),
    ))
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

/// Common form of written and read values: the bracketed word of a list, single blanks, decimal numbers.
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

    /// A setting that makes of a value what `takes` says, and into which a person writes after the first write to it.
    fn settled(takes: fn(u64) -> u64, person: Option<&str>) -> (Settled, String) {
        use std::cell::RefCell;
        let state = |value: &str| State {
            value: value.to_owned(),
            other: None,
        };
        let value = RefCell::new("60".to_owned());
        let writes = RefCell::new(0);
        let mut write = |to: &State| {
            // What is there already was taken before: a person's value is not rounded twice.
            if *value.borrow() != to.value {
                *value.borrow_mut() = takes(to.value.parse().unwrap()).to_string();
            }
            *writes.borrow_mut() += 1;
            Ok(())
        };
        let mut look = || {
            if let Some(theirs) = person {
                if *writes.borrow() == 1 {
                    theirs.clone_into(&mut value.borrow_mut());
                }
            }
            Ok(state(&value.borrow()))
        };
        let outcome = settle(&state("10"), &mut write, &mut look).unwrap();
        (outcome, value.into_inner())
    }

    #[test]
    fn a_person_s_write_at_the_same_moment_is_told_from_rounding_and_stays() {
        assert_eq!(settled(|v| v, None), (Settled::There, "10".into()));
        let rounds = |v| v / 4 * 4;
        assert_eq!(settled(rounds, None), (Settled::Rounded("8".into()), "8".into()));
        for takes in [|v| v, rounds] {
            assert_eq!(
                settled(takes, Some("32")),
                (Settled::Theirs("32".into()), "32".into())
            );
        }
    }

    /// Holds values as a kernel does that takes multiples of four, and while [`STUCK`] exists takes nothing.
    fn rounding(root: &Root, file: &str, value: &str) -> Result<(), PlatformError> {
        if root.path(STUCK).exists() {
            return Err(PlatformError::Rejected {
                what: file.to_owned(),
                value: value.to_owned(),
                errno: "stuck".into(),
            });
        }
        put(root, file, &(value.parse::<u64>().unwrap() / 4 * 4).to_string())
    }
    const STUCK: &str = "/proc/sys/vm/stuck";

    /// As [`rounding`], but gets stuck when it was written to twice: when the put-back begins.
    fn rounding_then_stuck(root: &Root, file: &str, value: &str) -> Result<(), PlatformError> {
        rounding(root, file, value)?;
        let count = root.path("/proc/sys/vm/count");
        let before = std::fs::read_to_string(&count).unwrap_or_default();
        if !before.is_empty() {
            std::fs::write(root.path(STUCK), "").unwrap();
        }
        std::fs::write(count, before + "x").unwrap();
        Ok(())
    }

    fn with(root: &Root, put: Put) -> Setting {
        Setting {
            put,
            ..Setting::new(root.clone())
        }
    }

    fn rejected(outcome: &Result<Progress, PlatformError>) -> bool {
        matches!(outcome, Err(PlatformError::Rejected { .. }))
    }

    #[test]
    fn what_the_kernel_made_of_ours_goes_back_also_when_the_first_try_fails() {
        let (_keep, root) = machine(&[]);
        let mut effector = with(&root, rounding);
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        assert!(rejected(&effector.advance(&record, Direction::Apply)));
        assert_eq!(now(&root, FILE), "60");
        assert!(
            effector
                .advance(&record, Direction::Undo)
                .unwrap()
                .skipped
                .is_empty()
        );
        // Stuck with the rounded value.
        let mut effector = with(&root, rounding_then_stuck);
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        assert!(rejected(&effector.advance(&record, Direction::Apply)));
        assert_eq!(now(&root, FILE), "8");
        assert!(
            rejected(&effector.advance(&record, Direction::Undo)),
            "still owed"
        );
        std::fs::remove_file(root.path(STUCK)).unwrap();
        effector.put = rounding;
        let undone = effector.advance(&record, Direction::Undo).unwrap();
        assert!(undone.skipped.is_empty(), "{undone:?}");
        assert_eq!(now(&root, FILE), "60");
    }

    #[test]
    fn after_a_kill_what_the_kernel_made_of_ours_is_told_from_a_person_s_choice() {
        let (_keep, root) = machine(&[]);
        let record = with(&root, rounding).prepare(&action(FILE, "10")).unwrap();
        for (there, after, skipped) in [
            ("60", "60", 0),
            // The kernel's of ours.
            ("8", "60", 0),
            ("10", "60", 0),
            ("32", "32", 1),
        ] {
            std::fs::write(root.path(FILE), format!("{there}\n")).unwrap();
            let mut fresh = with(&root, rounding);
            fresh.inherit(&record, Reached::Begun);
            let undone = fresh.advance(&record, Direction::Undo).unwrap();
            assert_eq!(
                (now(&root, FILE).as_str(), undone.skipped.len()),
                (after, skipped),
                "{there}"
            );
        }
        // A kernel that takes ours as it is makes nothing else of it.
        std::fs::write(root.path(FILE), "8\n").unwrap();
        let mut fresh = Setting::new(root.clone());
        fresh.inherit(&record, Reached::Begun);
        assert_eq!(fresh.advance(&record, Direction::Undo).unwrap().skipped.len(), 1);
        assert_eq!(now(&root, FILE), "8");
        // What was made whole was taken as it is: nothing is asked, and nothing written.
        let mut fresh = with(&root, |_, _, _| unreachable!("nothing is written"));
        fresh.inherit(&record, Reached::Made);
        assert_eq!(fresh.advance(&record, Direction::Undo).unwrap().skipped.len(), 1);
        assert_eq!(now(&root, FILE), "8");
        // What could not be undone at the start is not told as somebody's choice meanwhile.
        let mut fresh = with(&root, rounding);
        fresh.inherit(&record, Reached::Begun);
        fresh.adopt(&record);
        assert!(fresh.review(&BTreeMap::new()).is_empty());
        assert!(
            fresh
                .advance(&record, Direction::Undo)
                .unwrap()
                .skipped
                .is_empty()
        );
        assert_eq!(now(&root, FILE), "60");
    }

    const BYTES: &str = "/proc/sys/vm/dirty_bytes";
    const RATIO: &str = "/proc/sys/vm/dirty_ratio";

    /// A pair as the kernel keeps it; bytes are made whole pages.
    fn paired(root: &Root, file: &str, value: &str) -> Result<(), PlatformError> {
        let n: u64 = value.parse().unwrap();
        if n == 0 {
            return Err(PlatformError::Rejected {
                what: file.to_owned(),
                value: value.to_owned(),
                errno: "out of range".into(),
            });
        }
        let n = if file == BYTES { n / 4096 * 4096 } else { n };
        put(root, file, &n.to_string())?;
        put(root, other_of_pair(file).unwrap(), "0")
    }

    #[test]
    fn of_a_pair_what_the_kernel_rounded_goes_back_to_the_one_that_counted() {
        let (_keep, root) = machine(&[(BYTES, "0\n"), (RATIO, "20\n")]);
        let mut effector = with(&root, paired);
        let record = effector.prepare(&action(BYTES, "10000")).unwrap();
        assert!(rejected(&effector.advance(&record, Direction::Apply)));
        assert_eq!(
            (now(&root, BYTES).as_str(), now(&root, RATIO).as_str()),
            ("0", "20")
        );
        // A kill before it was put back.
        put(&root, BYTES, "8192").unwrap();
        put(&root, RATIO, "0").unwrap();
        let mut fresh = with(&root, paired);
        fresh.inherit(&record, Reached::Begun);
        assert!(
            fresh
                .advance(&record, Direction::Undo)
                .unwrap()
                .skipped
                .is_empty()
        );
        assert_eq!(
            (now(&root, BYTES).as_str(), now(&root, RATIO).as_str()),
            ("0", "20")
        );
        // Found in bytes, and a person has chosen a ratio since the kill: that is what comes back from the question.
        put(&root, BYTES, "4096").unwrap();
        put(&root, RATIO, "0").unwrap();
        let record = with(&root, paired).prepare(&action(BYTES, "10000")).unwrap();
        put(&root, BYTES, "0").unwrap();
        put(&root, RATIO, "33").unwrap();
        let mut fresh = with(&root, paired);
        fresh.inherit(&record, Reached::Begun);
        assert_eq!(fresh.advance(&record, Direction::Undo).unwrap().skipped.len(), 1);
        assert_eq!(
            (now(&root, BYTES).as_str(), now(&root, RATIO).as_str()),
            ("0", "33")
        );
    }

    #[test]
    fn what_somebody_else_took_hold_of_stays_theirs_whatever_it_holds_later() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        std::fs::write(root.path(FILE), "33\n").unwrap();
        assert_eq!(
            effector.advance(&record, Direction::Undo).unwrap().skipped.len(),
            1
        );
        // They go on, and come to what we would have set.
        std::fs::write(root.path(FILE), "10\n").unwrap();
        assert!(matches!(
            effector.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        assert_eq!(
            effector.advance(&record, Direction::Undo).unwrap().skipped.len(),
            1
        );
        assert_eq!(now(&root, FILE), "10");
        effector.forget(&record);
        assert!(matches!(
            effector.prepare(&action(FILE, "20")),
            Err(PlatformError::Conflict { .. })
        ));
    }

    #[test]
    fn who_chooses_our_value_while_the_record_is_being_written_keeps_it() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        std::fs::write(root.path(FILE), "10\n").unwrap();
        assert!(matches!(
            effector.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        effector.advance(&record, Direction::Undo).unwrap();
        assert_eq!(now(&root, FILE), "10");
    }

    #[test]
    fn a_setting_belongs_to_one_action_at_a_time() {
        let (_keep, root) = machine(&[(BYTES, "0\n"), (RATIO, "20\n")]);
        let mut effector = with(&root, paired);
        let first = effector.prepare(&action(RATIO, "10")).unwrap();
        let mut second = action(RATIO, "30");
        second.id = ActionId(2);
        second.workload = "another".into();
        let busy = |outcome| matches!(outcome, Err(PlatformError::Busy { .. }));
        for direction in [Direction::Apply, Direction::Undo] {
            assert!(busy(effector.prepare(&second)), "before {direction:?}");
            effector.advance(&first, direction).unwrap();
        }
        // The other one of a pair is the same setting.
        let mut bytes = action(BYTES, "8192");
        bytes.id = ActionId(2);
        assert!(busy(effector.prepare(&bytes)));
        effector.forget(&first);
        effector.prepare(&second).unwrap();
    }

    #[test]
    fn what_several_workloads_found_and_want_alike_comes_back_with_the_last() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let of = |id: u64, workload: &str, value: &str| {
            let mut action = action(FILE, value);
            action.id = ActionId(id);
            action.workload = workload.into();
            action
        };
        let a = effector.prepare(&of(1, "a", "10")).unwrap();
        let b = effector.prepare(&of(2, "b", "10")).unwrap();
        effector.advance(&a, Direction::Apply).unwrap();
        effector.advance(&b, Direction::Apply).unwrap();
        for (record, left) in [(&a, "10"), (&b, "60")] {
            effector.advance(record, Direction::Undo).unwrap();
            assert_eq!(now(&root, FILE), left);
        }
        // A third that finds another value does not share: what it found would be lost.
        std::fs::write(root.path(FILE), "33\n").unwrap();
        let third = effector.prepare(&of(3, "c", "10"));
        assert!(matches!(third, Err(PlatformError::Busy { .. })), "{third:?}");
    }

    #[test]
    fn an_older_change_of_the_same_workload_to_the_same_value_is_no_reason_to_leave_a_newer_one() {
        let (_keep, root) = machine(&[]);
        let record = |id: u64, value: &str, found: &str| {
            let mut action = action(FILE, value);
            action.id = ActionId(id);
            UndoRecord {
                action,
                boot_id: "this".into(),
                found: BTreeMap::from([("value".to_owned(), found.to_owned())]),
            }
        };
        // By hand: 10, then 20, then 10 again, and a kill before that is noted as kept.
        std::fs::write(root.path(FILE), "10\n").unwrap();
        let mut next = Setting::new(root.clone());
        next.inherit(&record(1, "10", "60"), Reached::Made);
        next.inherit(&record(2, "20", "10"), Reached::Made);
        let third = record(3, "10", "20");
        next.inherit(&third, Reached::Begun);
        assert!(next.advance(&third, Direction::Undo).unwrap().verified);
        assert_eq!(now(&root, FILE), "20");
    }

    #[test]
    fn what_somebody_else_chose_by_one_name_of_a_pair_is_theirs_by_both() {
        let (_keep, root) = machine(&[(BYTES, "0\n"), (RATIO, "20\n")]);
        let mut effector = with(&root, paired);
        let record = effector.prepare(&action(RATIO, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        assert_eq!(effector.holder(BYTES), Holder::Homeostat);
        paired(&root, BYTES, "8192").unwrap();
        let undone = effector.advance(&record, Direction::Undo).unwrap();
        assert_eq!(undone.skipped.len(), 1, "{undone:?}");
        effector.forget(&record);
        assert_eq!(effector.holder(BYTES), Holder::SomebodyElse);
        assert!(matches!(
            effector.prepare(&action(BYTES, "4096")),
            Err(PlatformError::Conflict { .. })
        ));
        assert_eq!(
            (now(&root, BYTES).as_str(), now(&root, RATIO).as_str()),
            ("8192", "0")
        );
    }

    #[test]
    fn who_cannot_be_told_how_to_undo_holds_nothing() {
        let (_keep, root) = machine(&[]);
        let boot = root.path("/proc/sys/kernel/random/boot_id");
        std::fs::remove_file(&boot).unwrap();
        let mut effector = Setting::new(root);
        assert!(effector.prepare(&action(FILE, "10")).is_err());
        std::fs::write(boot, "this\n").unwrap();
        let mut second = action(FILE, "30");
        second.id = ActionId(2);
        effector.prepare(&second).unwrap();
    }

    #[test]
    fn what_was_put_back_before_a_kill_and_holds_our_value_is_a_person_s() {
        let (_keep, root) = machine(&[]);
        let mut effector = Setting::new(root.clone());
        let record = effector.prepare(&action(FILE, "10")).unwrap();
        effector.advance(&record, Direction::Apply).unwrap();
        effector.advance(&record, Direction::Undo).unwrap();
        std::fs::write(root.path(FILE), "10\n").unwrap();
        let mut fresh = Setting::new(root.clone());
        fresh.inherit(&record, Reached::PutBack);
        assert_eq!(fresh.advance(&record, Direction::Undo).unwrap().skipped.len(), 1);
        assert_eq!(now(&root, FILE), "10");
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

    #[test]
    fn of_a_pair_the_one_that_counted_is_put_back() {
        let (_keep, root) = machine(&[(BYTES, "0\n"), (RATIO, "20\n")]);
        let mut effector = with(&root, paired);
        let record = effector.prepare(&action(BYTES, "1048576")).unwrap();
        assert_eq!(record.found.get("other").map(String::as_str), Some("20"));
        effector.advance(&record, Direction::Apply).unwrap();
        assert_eq!(now(&root, RATIO), "0");
        assert!(effector.advance(&record, Direction::Undo).unwrap().verified);
        assert_eq!(
            (now(&root, BYTES).as_str(), now(&root, RATIO).as_str()),
            ("0", "20")
        );
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
