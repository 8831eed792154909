//! kill -9 at every step of the journal with a setting of a made machine: restart, and it is as it was found, or as a person
//! chose meanwhile.

use crate::recovery::restore;
use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_model::action::Target;
use homeostat_model::{Action, Direction};
use homeostat_platform::Effectors;
use homeostat_store::journal::FAULT_POINTS;
use homeostat_store::{Journal, JournalOptions};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const CRASH: &str = "HOMEOSTAT_TEST_SETTING_CRASH";
const BOOT: &str = "boot-of-settings";
const FILE: &str = "/proc/sys/vm/swappiness";
const FOUND: &str = "60\n";
const OURS: &str = "10";
/// Somebody chose our value while it was put back.
const CHOSEN: &str = "own.chosen_while_put_back";
/// Blocks with the change, one after another.
const BLOCKS: usize = 2;

fn kill_self() -> ! {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}

/// The child: switches the setting on and off as a trial does, and dies at the named point of the named block.
#[test]
#[ignore = "started by the crash test, not by itself"]
fn setting_crash_child() {
    let Ok(plan) = std::env::var(CRASH) else { return };
    let mut parts = plan.split(' ');
    let mut next = || parts.next().unwrap().to_owned();
    let (point, which, directory) = (next(), next().parse::<usize>().unwrap(), next());
    let directory = Path::new(&directory);
    let root = Root::new(directory.join("machine"));
    let block = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (wanted, at_block) = (point.clone(), block.clone());
    let options = JournalOptions {
        fault: Some(Box::new(move |at: &'static str| {
            if at == wanted && at_block.load(std::sync::atomic::Ordering::Relaxed) == which {
                kill_self();
            }
            Ok(())
        })),
        compact_bytes: Some(1),
    };
    let (mut journal, _) = Journal::open(&directory.join("state"), options).unwrap();
    let action = Action {
        id: journal.next_action_id(),
        effector: "setting".into(),
        workload: "host".into(),
        target: Target::Files(vec![FILE.to_owned()]),
        arguments: BTreeMap::from([("value".to_owned(), OURS.to_owned())]),
        why: "crash test".into(),
    };
    let id = action.id;
    let mut effectors = Registry::new(&root);
    let record = effectors.prepare(&action).unwrap();
    journal.intend(&record).unwrap();
    for number in 0..BLOCKS {
        block.store(number, std::sync::atomic::Ordering::Relaxed);
        if number > 0 {
            journal.applied(id).unwrap();
        }
        assert!(effectors.advance(&record, Direction::Apply).unwrap().done);
        if point == "own.made" && number == which {
            kill_self();
        }
        journal.applied(id).unwrap();
        assert!(effectors.advance(&record, Direction::Undo).unwrap().done);
        if point == "own.undone" && number == which {
            kill_self();
        }
        journal.put_back(id).unwrap();
        if point == CHOSEN && number == which {
            std::fs::write(root.path(FILE), OURS).unwrap();
            kill_self();
        }
    }
    journal.closed(id).unwrap();
    println!("SURVIVED");
}

#[test]
fn killed_at_every_step_a_setting_is_as_it_was_found_or_as_a_person_chose() {
    let own = ["own.made", "own.undone", CHOSEN];
    let mut died = 0;
    for (point, block) in FAULT_POINTS
        .iter()
        .chain(&own)
        .flat_map(|point| (0..BLOCKS).map(move |block| (*point, block)))
    {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path().join("machine"));
        for (file, text) in [(FILE, FOUND), ("/proc/sys/kernel/random/boot_id", BOOT)] {
            let path = root.path(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "setting_crash_tests::setting_crash_child",
                "--exact",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CRASH, format!("{point} {block} {}", directory.path().display()))
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let killed = !output.status.success();
        died += usize::from(killed);
        assert!(killed || text.contains("SURVIVED"), "{point}: {text}");
        assert!(!killed || !text.contains("panicked"), "{point}: {text}");

        let (mut journal, _) =
            Journal::open(&directory.path().join("state"), JournalOptions::default()).unwrap();
        let report = restore(
            &mut journal,
            &mut Registry::new(&root),
            &MonotonicClock,
            BOOT,
            false,
        );
        assert!(report.complete(), "{point}: {report:?}");
        assert_eq!(journal.owed().count(), 0, "{point}");
        let expected = if point == CHOSEN { OURS } else { FOUND.trim() };
        assert_eq!(
            std::fs::read_to_string(root.path(FILE)).unwrap().trim(),
            expected,
            "{point} of block {block}"
        );
    }
    assert!(died >= 16, "only {died} fault points were reached");
}
