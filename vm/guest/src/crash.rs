//! kill -9 at every step of the journal: a child carries out an action and dies at a named point; then a fresh journal
//! and a fresh platform restore, and the machine must be as it was found.

use crate::driver::{Driver, Watch, private_directory};
use crate::keeper::program;
use crate::{Failure, ensure};
use homeostat_model::{Action, Direction, ExperimentId};
use homeostat_store::JournalOptions;
use homeostat_store::journal::{Coin, FAULT_POINTS, Note};
use std::path::Path;
use std::process::Command;

/// Points of our own, between those of the journal.
const OWN_POINTS: &[&str] = &[
    "own.first_slice_of_apply",
    "own.applied",
    "own.first_slice_of_undo",
    "own.never",
];
/// Fewer points reached than this would mean that the child dies before it does anything.
const DEATHS_MIN: usize = 8;
const SURVIVED: &str = "SURVIVED";
const ACTION_FILE: &str = "action.json";
const JOURNAL_DIRECTORY: &str = "journal";

/// The child: `directory` holds the action and gets the journal. Dies at `point`, or lives and says so.
///
/// # Errors
/// Anything that goes wrong before.
pub fn child(point: &str, directory: &Path) -> Result<(), Failure> {
    let path = directory.join(ACTION_FILE);
    let text =
        std::fs::read_to_string(&path).map_err(Failure::system(format!("reading {}", path.display())))?;
    let action: Action = serde_json::from_str(&text)?;
    let wanted = point.to_owned();
    let options = JournalOptions {
        fault: Some(Box::new(move |at: &'static str| {
            if at == wanted {
                die();
            }
            Ok(())
        })),
        // Compaction is one of the steps.
        compact_bytes: Some(1),
    };
    let mut driver = Driver::open(&directory.join(JOURNAL_DIRECTORY), options)?;
    driver.workload(&action.workload)?;
    let record = driver.intend(&action)?;
    driver.journal.note(Note::Coin(Coin {
        experiment: ExperimentId(1),
        block: 0,
        on: true,
    }))?;
    let dies_in = |name: &str| {
        let dies = point == name;
        move |_: &homeostat_model::Progress| {
            if dies {
                die();
            }
            Ok(Watch::GoOn)
        }
    };
    driver.drive(&record, Direction::Apply, dies_in("own.first_slice_of_apply"))?;
    driver.journal.applied(record.action.id)?;
    if point == "own.applied" {
        die();
    }
    driver.journal.undoing(record.action.id)?;
    driver.drive(&record, Direction::Undo, dies_in("own.first_slice_of_undo"))?;
    driver.journal.put_back(record.action.id)?;
    driver.journal.closed(record.action.id)?;
    println!("{SURVIVED}");
    Ok(())
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}

/// Carries out the action in children that die at every point; `found` says how the machine is, and must say the same
/// after each restore. Returns how many children died.
///
/// # Errors
/// A restore leaves something behind, or too few points were reached.
pub fn at_every_step<T: PartialEq + std::fmt::Debug>(
    action: &Action,
    directory: &Path,
    mut found: impl FnMut() -> Result<T, Failure>,
) -> Result<usize, Failure> {
    let before = found()?;
    let mut died = 0;
    for point in FAULT_POINTS.iter().chain(OWN_POINTS) {
        let directory = directory.join(point);
        private_directory(&directory)?;
        let path = directory.join(ACTION_FILE);
        std::fs::write(&path, serde_json::to_string(action)?)
            .map_err(Failure::system(format!("writing {}", path.display())))?;
        let output = Command::new(program("scenarios")?)
            .arg("crash")
            .arg(point)
            .arg(&directory)
            .output()
            .map_err(Failure::system("starting a child that dies"))?;
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let killed = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(9);
        ensure!(
            killed || (output.status.success() && text.contains(SURVIVED)),
            "{point}: the child failed: {} {text}",
            output.status
        );
        died += usize::from(killed);
        let mut driver = Driver::open(&directory.join(JOURNAL_DIRECTORY), JournalOptions::default())?;
        driver
            .restore()
            .map_err(|e| Failure::Broken(format!("{point}: {e}")))?;
        let after = found()?;
        ensure!(
            after == before,
            "killed at {point}, the machine is not as it was found:\n  before {before:?}\n  after  {after:?}"
        );
    }
    ensure!(died >= DEATHS_MIN, "only {died} points were reached");
    Ok(died)
}
