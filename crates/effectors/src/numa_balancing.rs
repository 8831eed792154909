//! Automatic NUMA balancing, for the whole host, as an experiment: [`Setting`] on `/proc/sys/kernel/numa_balancing` (0
//! off, 1 on, 2 memory tiering, or their sum; Documentation/admin-guide/sysctl/kernel.rst).
//!
//! A configured value (`sysctl.d`, `sysctl.conf`, a profile of tuned, `numa_balancing=` on the kernel's command line)
//! is not tried. The target is that one file; the one argument is `value`.

use crate::Effector;
use crate::setting::Setting;
use homeostat_kernel::Root;
use homeostat_model::action::Target;
use homeostat_model::{Action, Direction, EffectorId, Progress, UndoRecord, Workload, WorkloadId};
use homeostat_platform::{PlatformError, Reached};
use homeostat_sensors::kernel_balancing::{FILE, configured};
use homeostat_sensors::settings::Holder;
use std::collections::BTreeMap;

/// Bits that the kernel knows: `NUMA_BALANCING_NORMAL` and `NUMA_BALANCING_MEMORY_TIERING`.
const VALUE_MAX: u8 = 3;

/// The setting's name at the beginning of sentences.
const NAME: &str = "kernel.numa_balancing";

pub(super) struct NumaBalancing {
    root: Root,
    setting: Setting,
}

impl NumaBalancing {
    pub(super) fn new(root: Root) -> Self {
        Self {
            setting: Setting::new(root.clone()),
            root,
        }
    }

    fn require_live(&self) -> Result<(), PlatformError> {
        if self.root.is_live() {
            return Ok(());
        }
        Err(PlatformError::Unsupported {
            what: "automatic NUMA balancing".into(),
            why: "the files below the root are not those of the running kernel".into(),
        })
    }

    fn survey(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        check(action)?;
        if let Some(place) = configured(&self.root) {
            return Err(PlatformError::Conflict {
                what: FILE.into(),
                expected: "not configured by anybody".into(),
                found: format!("set in {place}"),
            });
        }
        let record = self.setting.prepare(action)?;
        if let Some(found) = record.found.get("value").filter(|v| v.parse::<u8>().is_err()) {
            self.setting.forget(&record);
            return Err(PlatformError::Malformed {
                path: self.root.path(FILE),
                line: found.clone(),
            });
        }
        Ok(record)
    }
}

impl Effector for NumaBalancing {
    fn id(&self) -> EffectorId {
        EffectorId::new("numa_balancing")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.require_live()?;
        self.survey(action)
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.require_live()?;
        check(&record.action)?;
        self.setting.advance(record, direction)
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.setting.forget(record);
    }

    fn adopt(&mut self, record: &UndoRecord) {
        self.setting.adopt(record);
    }

    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        // The kernel takes each value as it is. So even after a change only begun, a third value is a person's.
        let is_begun = reached == Reached::Begun;
        self.setting
            .inherit(record, if is_begun { Reached::Made } else { reached });
    }

    fn review(&mut self, workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        // The strategies know the setting by its name.
        let named = |text: String| text.replacen(FILE, NAME, 1);
        let told = self.setting.review(workloads).into_iter();
        told.map(|(workload, text)| (workload, named(text))).collect()
    }

    fn holder(&self, file: &str) -> Holder {
        self.setting.holder(file)
    }
}

/// Refuses another target than the one file, and another value than the kernel knows.
fn check(action: &Action) -> Result<(), PlatformError> {
    let rejected = |what: &str, value: &str, why: &str| {
        Err(PlatformError::Rejected {
            what: format!("{what} of numa_balancing"),
            value: value.to_owned(),
            errno: why.to_owned(),
        })
    };
    if !matches!(&action.target, Target::Files(files) if files.as_slice() == [FILE]) {
        return rejected("target", "another one", "the one file expected");
    }
    if let Some(name) = action.arguments.keys().find(|name| *name != "value") {
        return rejected("argument", name, "expected value");
    }
    let value = action.arguments.get("value").map_or("", String::as_str);
    match value.parse::<u8>() {
        Ok(0..=VALUE_MAX) => Ok(()),
        _ => rejected("argument value", value, "expected 0 to 3"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::ActionId;
    use std::fs;
    use std::path::PathBuf;

    fn path(root: &Root) -> PathBuf {
        root.path(FILE)
    }

    fn machine(value: &str) -> (tempfile::TempDir, Root) {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        for directory in ["/proc/sys/kernel/random", "/etc/sysctl.d", "/usr/lib/sysctl.d"] {
            fs::create_dir_all(root.path(directory)).unwrap();
        }
        fs::write(root.path("/proc/sys/kernel/random/boot_id"), "boot\n").unwrap();
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
        NumaBalancing::new(root.clone()).survey(&action(value)).unwrap()
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
            assert!(
                effector
                    .setting
                    .advance(&record, Direction::Apply)
                    .unwrap()
                    .verified
            );
            assert_eq!(now(&root), "0\n");
        }
        for mut effector in [NumaBalancing::new(root.clone()), effector] {
            assert_eq!(
                effector
                    .setting
                    .advance(&record, Direction::Undo)
                    .unwrap()
                    .finished,
                1
            );
            assert_eq!(now(&root), "1\n");
        }
    }

    #[test]
    fn who_writes_later_wins() {
        let (_keep, root) = machine("1\n");
        let record = record(&root, "0");
        let mut effector = NumaBalancing::new(root.clone());
        effector.setting.advance(&record, Direction::Apply).unwrap();
        fs::write(path(&root), "2\n").unwrap();
        assert!(matches!(
            effector.setting.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        let undone = effector.setting.advance(&record, Direction::Undo).unwrap();
        assert_eq!(
            (undone.done, undone.finished, now(&root).as_str()),
            (true, 0, "2\n")
        );
        // Somebody who writes our value while we have left it as found has chosen it: it stays.
        let (_keep, root) = machine("1\n");
        let mut effector = NumaBalancing::new(root.clone());
        effector.setting.advance(&record, Direction::Apply).unwrap();
        effector.setting.advance(&record, Direction::Undo).unwrap();
        fs::write(path(&root), "0\n").unwrap();
        assert!(matches!(
            effector.setting.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        let undone = effector.setting.advance(&record, Direction::Undo).unwrap();
        assert_eq!(undone.skipped.len(), 1, "{undone:?}");
        assert_eq!(now(&root), "0\n");
        // Somebody who writes the value found back has decided, too.
        let (_keep, root) = machine("1\n");
        let mut effector = NumaBalancing::new(root.clone());
        effector.setting.advance(&record, Direction::Apply).unwrap();
        fs::write(path(&root), "1\n").unwrap();
        assert!(matches!(
            effector.setting.advance(&record, Direction::Apply),
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
                assert!(
                    effector
                        .setting
                        .advance(record, Direction::Apply)
                        .unwrap()
                        .verified
                );
                assert_eq!(now(&root), "0\n");
            }
            assert_eq!(effector.holder(FILE), Holder::Homeostat);
            for (record, left) in [(&b, "0\n"), (&b, "0\n"), (&a, "1\n"), (&b, "1\n")] {
                let undone = effector.setting.advance(record, Direction::Undo).unwrap();
                assert!(undone.verified && undone.skipped.is_empty(), "{undone:?}");
                assert_eq!(now(&root), left);
            }
            assert_eq!(effector.holder(FILE), Holder::Unknown);
        }
        // One of them goes for good, whichever it is: the other keeps the setting.
        for record in [&a, &b] {
            effector.setting.advance(record, Direction::Apply).unwrap();
        }
        effector.setting.advance(&a, Direction::Undo).unwrap();
        effector.forget(&a);
        assert_eq!(now(&root), "0\n");
        // The same after a stop that kept both: the next process was told of them.
        let mut next = NumaBalancing::new(root.clone());
        next.adopt(&a);
        next.adopt(&b);
        next.setting.advance(&b, Direction::Undo).unwrap();
        assert_eq!(now(&root), "0\n");
        next.setting.advance(&a, Direction::Undo).unwrap();
        assert_eq!(now(&root), "1\n");
        // After a crash nobody was told of any: all go, in any order.
        effector.setting.advance(&a, Direction::Apply).unwrap();
        for record in [&a, &b] {
            let undone = NumaBalancing::new(root.clone())
                .setting
                .advance(record, Direction::Undo);
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
                assert!(next.setting.advance(record, Direction::Undo).unwrap().verified);
                next.forget(record);
            }
            assert_eq!(now(&root), after, "{other:?}");
        }
    }

    #[test]
    fn several_hold_it_at_one_value() {
        let (_keep, root) = machine("1\n");
        let mut effector = NumaBalancing::new(root.clone());
        effector
            .setting
            .advance(&record(&root, "0"), Direction::Apply)
            .unwrap();
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
        effector.setting.advance(&record, Direction::Apply).unwrap();
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
        effector.setting.advance(&record, Direction::Undo).unwrap();
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
        let mut effector = NumaBalancing::new(root.clone());
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
