//! A journal that lost its records is never taken for one that owes nothing.

use crate::plant::{Options, Plant, bounded};
use homeostat_model::action::Target;
use homeostat_model::{Action, UndoRecord};
use homeostat_store::journal::{COUNT_FILE, JOURNAL_FILE};
use homeostat_store::{Journal, JournalOptions};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often counters of memory are gathered: a setting on which nothing depends.
const SETTING: &str = "/proc/sys/vm/stat_interval";
const OURS: &str = "7";
/// Held by the test that changes it.
static SETTING_IN_USE: Mutex<()> = Mutex::new(());

/// Puts the setting back whatever happens.
struct Changed(
    String,
    #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>,
);

impl Changed {
    /// The setting is changed, and the journal of this state directory owes its undo.
    fn owed_in(state: &Path) -> Self {
        let held = SETTING_IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = fs::read_to_string(SETTING).unwrap().trim().to_owned();
        assert_ne!(found, OURS);
        let (mut journal, _) = Journal::open(state, JournalOptions::default()).unwrap();
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let record = UndoRecord {
            action: Action {
                id: journal.next_action_id(),
                effector: "setting".into(),
                workload: "host".into(),
                target: Target::Files(vec![SETTING.to_owned()]),
                arguments: BTreeMap::from([("value".to_owned(), OURS.to_owned())]),
                why: "test".into(),
            },
            boot_id: boot_id.trim().to_owned(),
            found: BTreeMap::from([("value".to_owned(), found.clone())]),
        };
        journal.intend(&record).unwrap();
        let changed = Self(found, held);
        fs::write(SETTING, OURS).unwrap();
        journal.applied(record.action.id).unwrap();
        changed
    }

    fn is_put_back(&self) -> bool {
        fs::read_to_string(SETTING).unwrap().trim() == self.0
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let _ = fs::write(SETTING, &self.0);
    }
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn a_journal_that_was_emptied_cut_or_removed_beside_a_killed_daemon_is_told_with_its_name_and_a_failure() {
    let Some(mut plant) = Plant::start(&Options::default()) else {
        return;
    };
    let daemon = &mut plant.attacked;
    let journal = daemon.state().join(JOURNAL_FILE);
    let count = daemon.state().join(COUNT_FILE);
    for damage in ["emptied", "zeroed", "removed", "cut", "second file removed"] {
        daemon.kill9();
        let changed = Changed::owed_in(&daemon.state());
        let bytes = fs::read(&journal).unwrap();
        match damage {
            "emptied" => fs::write(&journal, "").unwrap(),
            "zeroed" => fs::write(&journal, vec![0; bytes.len()]).unwrap(),
            "removed" => fs::remove_file(&journal).unwrap(),
            "cut" => {
                // After the first record.
                let first = bytes.iter().position(|b| *b == b'\n').unwrap() + 1;
                fs::write(&journal, &bytes[..first]).unwrap();
            }
            _ => fs::remove_file(&count).unwrap(),
        }
        let restored = daemon.ask(&["restore"]);
        let text = said(&restored);
        assert_eq!(restored.status.code(), Some(1), "{damage}: {text}");
        assert!(text.contains(&journal.display().to_string()), "{damage}: {text}");
        assert!(text.contains("reboot"), "{damage}: {text}");
        // What can be read is undone, and what is lost is named again until it is gone.
        if damage == "second file removed" {
            assert!(changed.is_put_back(), "{text}");
        } else {
            let again = daemon.ask(&["restore"]);
            assert!(
                !again.status.success() && said(&again).contains("is lost"),
                "{}",
                said(&again)
            );
        }
        drop(changed);
        daemon.restart();
    }
}

#[test]
fn a_state_directory_that_cannot_be_written_is_read_and_its_changes_are_undone() {
    let Some(mut plant) = Plant::start(&Options::default()) else {
        return;
    };
    let daemon = &mut plant.attacked;
    daemon.kill9();
    let changed = Changed::owed_in(&daemon.state());
    let script = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";
    let mut read_only = Command::new("unshare");
    read_only
        .args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"])
        .arg(daemon.state())
        .arg(env!("CARGO_BIN_EXE_homeostat"))
        .arg("--socket")
        .arg(daemon.socket())
        .arg("--state-dir")
        .arg(daemon.state())
        .arg("restore");
    let restored = bounded(&mut read_only, Duration::from_secs(60));
    let text = said(&restored);
    assert!(changed.is_put_back(), "{text}");
    assert_eq!(restored.status.code(), Some(1), "{text}");
    assert!(text.contains("could not be updated"), "{text}");
    // Writable again: the record goes.
    assert!(daemon.restore().status.success());
    daemon.restart();
}
