//! The journal's contract, on real files: what is owed after a kill at any step, a cut or a flipped bit at any
//! byte, a failure of any step, a full disk, and random sequences of calls.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{Action, ActionId, ExperimentId, ProcessId, UndoRecord};
use homeostat_store::journal::{
    COUNT_FILE, Coin, FAULT_POINTS, JOURNAL_FILE, Journal, JournalError, JournalOptions, LOCK_FILE, NEW_FILE,
    Note, OwedState, RESERVE_BYTES, Recovered, read,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

fn record(id: u64) -> UndoRecord {
    // Number 17 is large: it uses up the space that a new journal has ahead.
    sized_record(id, if id == 17 { 6000 } else { 3 })
}

fn sized_record(id: u64, pieces: u64) -> UndoRecord {
    let base = 0x7f00_0000_0000 + id * 0x4000_0000;
    UndoRecord {
        action: Action {
            id: ActionId(id),
            effector: "large_pages".into(),
            workload: "redis-server.service".into(),
            target: Target::Memory(vec![MemoryTarget {
                process: ProcessId {
                    pid: 4711,
                    start_ticks: 99,
                },
                pieces: (0..pieces).map(|i| base + i * 0x20_0000).collect(),
            }]),
            arguments: BTreeMap::new(),
            // A text that looks like a record must not confuse the reader.
            why: "deadbeef {\"v\":1,\"n\":7}\n\u{1f680} 3 blocks, +12 % [8, 16] predicted".to_owned(),
        },
        boot_id: "b7f0".to_owned(),
        found: BTreeMap::from([("enabled".to_owned(), "madvise".to_owned())]),
    }
}

fn coin(experiment: u64, block: u32, on: bool) -> Note {
    Note::Coin(Coin {
        experiment: ExperimentId(experiment),
        block,
        on,
    })
}

/// What the journal should say, kept by the most obvious means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Model {
    owed: BTreeMap<u64, OwedState>,
    coins: BTreeMap<(u64, u32), bool>,
    highest_action: u64,
    highest_experiment: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Intend(u64),
    Applied(u64),
    Undoing(u64),
    Kept(u64),
    PutBack(u64),
    Closed(u64),
    Coin(u64, u32, bool),
    Ended(u64),
    Remark(String),
    Reopen,
}

impl Model {
    fn take(&mut self, step: &Step) {
        match step {
            Step::Intend(id) => {
                self.owed.insert(*id, OwedState::Intended);
                self.highest_action = self.highest_action.max(*id);
            }
            Step::Applied(id) => self.set(*id, OwedState::Applied),
            Step::Undoing(id) => self.set(*id, OwedState::Undoing),
            Step::Kept(id) => self.set(*id, OwedState::Kept),
            Step::PutBack(id) => self.set(*id, OwedState::PutBack),
            Step::Closed(id) => {
                self.owed.remove(id);
            }
            Step::Coin(experiment, block, on) => {
                self.coins.insert((*experiment, *block), *on);
                self.highest_experiment = self.highest_experiment.max(*experiment);
            }
            Step::Ended(id) => {
                self.coins.retain(|(experiment, _), _| experiment != id);
                self.highest_experiment = self.highest_experiment.max(*id);
            }
            Step::Remark(_) | Step::Reopen => {}
        }
    }
    fn set(&mut self, id: u64, state: OwedState) {
        if let Some(s) = self.owed.get_mut(&id) {
            *s = state;
        }
    }
    fn of(recovered: &Recovered) -> Self {
        for (id, owed) in &recovered.owed {
            assert_eq!(owed.record.action.id, *id);
        }
        Self {
            owed: recovered
                .owed
                .iter()
                .map(|(id, owed)| (id.0, owed.state))
                .collect(),
            coins: recovered
                .coins
                .iter()
                .map(|c| ((c.experiment.0, c.block), c.on))
                .collect(),
            highest_action: recovered.next_action.0 - 1,
            highest_experiment: recovered.next_experiment.0 - 1,
        }
    }
}

fn carry_out(journal: &mut Journal, step: &Step) -> Result<(), JournalError> {
    match step {
        Step::Intend(id) => journal.intend(&record(*id)),
        Step::Applied(id) => journal.applied(ActionId(*id)),
        Step::Undoing(id) => journal.undoing(ActionId(*id)),
        Step::Kept(id) => journal.kept(ActionId(*id)),
        Step::PutBack(id) => journal.put_back(ActionId(*id)),
        Step::Closed(id) => journal.closed(ActionId(*id)),
        Step::Coin(experiment, block, on) => journal.note(coin(*experiment, *block, *on)),
        Step::Ended(id) => journal.note(Note::Ended(ExperimentId(*id))),
        Step::Remark(text) => journal.note(Note::Remark(text.clone())),
        Step::Reopen => Ok(()),
    }
}

/// A life with every kind of record in it.
fn script() -> Vec<Step> {
    use Step::*;
    vec![
        Coin(1, 0, true),
        Intend(1),
        Applied(1),
        Coin(1, 1, false),
        Undoing(1),
        PutBack(1),
        Applied(1),
        Intend(2),
        Intend(6),
        PutBack(6),
        Undoing(1),
        Closed(1),
        Ended(1),
        Remark("daemon stops".to_owned()),
        Applied(2),
        Kept(2),
        Intend(5),
        Coin(4, 0, true),
        Undoing(2),
        Closed(2),
        Intend(7),
    ]
}

fn fill(directory: &Path, steps: &[Step]) -> Model {
    let (mut journal, _) = Journal::open(directory, JournalOptions::default()).unwrap();
    let mut model = Model::default();
    for step in steps {
        carry_out(&mut journal, step).unwrap();
        model.take(step);
    }
    model
}

fn reopen(directory: &Path) -> Recovered {
    Journal::open(directory, JournalOptions::default()).unwrap().1
}

#[test]
fn a_clean_life_is_read_back_exactly() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state/homeostat");
    let model = fill(&state, &script());
    let seen = read(&state).unwrap();
    assert_eq!(Model::of(&seen), model);
    assert!(
        seen.is_whole() && seen.complaints().is_empty(),
        "{:?}",
        seen.complaints()
    );
    assert_eq!(seen.owed[&ActionId(5)].record, record(5));
    assert_eq!(seen.remarks, ["daemon stops"]);
    assert!(seen.owed[&ActionId(5)].is_void("another boot") && !seen.owed[&ActionId(5)].is_void("b7f0"));
    assert_eq!(reopen(&state), seen);
    use std::os::unix::fs::PermissionsExt;
    let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&state), 0o700);
    assert_eq!(mode(&state.join(JOURNAL_FILE)), 0o600);
    assert_eq!(mode(&state.join(LOCK_FILE)), 0o600);
}

#[test]
fn reading_a_directory_without_a_journal_finds_nothing_and_makes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let seen = read(directory.path()).unwrap();
    assert!(!seen.existed && seen.owed.is_empty());
    assert_eq!(
        (seen.next_action, seen.next_experiment),
        (ActionId(1), ExperimentId(1))
    );
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    assert!(!read(&directory.path().join("none")).unwrap().existed);
}

#[test]
fn a_second_holder_is_refused_and_told_who_has_it() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    match Journal::open(directory.path(), JournalOptions::default()) {
        Err(JournalError::Held { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
        other => panic!("{other:?}"),
    }
    read(directory.path()).unwrap();
    drop(journal);
    Journal::open(directory.path(), JournalOptions::default()).unwrap();
}

#[test]
fn numbers_are_never_used_twice_even_after_compaction() {
    let directory = tempfile::tempdir().unwrap();
    fill(
        directory.path(),
        &[
            Step::Intend(41),
            Step::Closed(41),
            Step::Coin(17, 0, true),
            Step::Ended(17),
        ],
    );
    // A size of zero compacts at every opportunity.
    for _ in 0..3 {
        let options = JournalOptions {
            compact_bytes: Some(0),
            ..JournalOptions::default()
        };
        let (mut journal, recovered) = Journal::open(directory.path(), options).unwrap();
        assert_eq!(
            (recovered.next_action, recovered.next_experiment),
            (ActionId(42), ExperimentId(18))
        );
        assert!(matches!(
            journal.intend(&record(41)),
            Err(JournalError::Reused { .. })
        ));
        assert!(matches!(
            journal.intend(&record(3)),
            Err(JournalError::Reused { .. })
        ));
    }
    let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    // Out of order within one life is fine: proposals may wait for their turn.
    journal.intend(&record(44)).unwrap();
    journal.intend(&record(43)).unwrap();
    assert!(matches!(
        journal.intend(&record(43)),
        Err(JournalError::AlreadyOwed { .. })
    ));
    journal.closed(ActionId(43)).unwrap();
    journal.closed(ActionId(43)).unwrap();
    assert!(matches!(
        journal.intend(&record(43)),
        Err(JournalError::Reused { .. })
    ));
    assert!(matches!(
        journal.applied(ActionId(43)),
        Err(JournalError::NotOwed { .. })
    ));
    assert!(matches!(
        journal.closed(ActionId(99)),
        Err(JournalError::NotOwed { .. })
    ));
}

#[test]
fn a_coin_is_drawn_once() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    journal.note(coin(3, 0, true)).unwrap();
    let bytes = journal.bytes();
    journal.note(coin(3, 0, true)).unwrap();
    assert_eq!(journal.bytes(), bytes);
    assert!(matches!(
        journal.note(coin(3, 0, false)),
        Err(JournalError::CoinFixed { .. })
    ));
    drop(journal);
    let (mut journal, recovered) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    assert_eq!(
        recovered.coins,
        [Coin {
            experiment: ExperimentId(3),
            block: 0,
            on: true
        }]
    );
    assert!(matches!(
        journal.note(coin(3, 0, false)),
        Err(JournalError::CoinFixed { .. })
    ));
}

#[test]
fn the_file_stays_small_however_long_it_lives() {
    let directory = tempfile::tempdir().unwrap();
    let options = JournalOptions {
        compact_bytes: Some(16 * 1024),
        ..JournalOptions::default()
    };
    let (mut journal, _) = Journal::open(directory.path(), options).unwrap();
    journal.intend(&record(1)).unwrap();
    for id in 2..400 {
        journal.note(coin(id, 0, id % 2 == 0)).unwrap();
        journal.intend(&record(id)).unwrap();
        journal.applied(ActionId(id)).unwrap();
        journal.closed(ActionId(id)).unwrap();
        journal.note(Note::Ended(ExperimentId(id))).unwrap();
        assert!(journal.bytes() < 20 * 1024, "{}", journal.bytes());
    }
    assert_eq!(journal.compaction_failure(), None);
    drop(journal);
    let recovered = reopen(directory.path());
    assert_eq!(recovered.owed.keys().collect::<Vec<_>>(), [&ActionId(1)]);
    assert!(recovered.coins.is_empty() && recovered.is_whole());
    let size = std::fs::metadata(directory.path().join(JOURNAL_FILE))
        .unwrap()
        .len();
    assert!(size < 20 * 1024 + 2 * RESERVE_BYTES + 8192, "{size}");
}

#[test]
fn a_record_that_is_too_large_is_refused_before_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    let before = journal.bytes();
    let error = journal.intend(&sized_record(1, 1_200_000)).unwrap_err();
    assert!(matches!(error, JournalError::RecordTooLarge { .. }), "{error}");
    assert_eq!(journal.bytes(), before);
    journal.intend(&sized_record(2, 100_000)).unwrap();
    drop(journal);
    assert_eq!(
        reopen(directory.path()).owed[&ActionId(2)].record,
        sized_record(2, 100_000)
    );
}

#[test]
fn a_directory_or_file_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    fill(directory.path(), &script());
    let journal = directory.path().join(JOURNAL_FILE);
    let open = || Journal::open(directory.path(), JournalOptions::default());
    let set = |p: &Path, mode| std::fs::set_permissions(p, std::fs::Permissions::from_mode(mode)).unwrap();
    set(directory.path(), 0o777);
    assert!(matches!(open(), Err(JournalError::Insecure { .. })));
    set(directory.path(), 0o755);
    set(&journal, 0o620);
    assert!(matches!(open(), Err(JournalError::Insecure { .. })));
    assert!(matches!(
        read(directory.path()),
        Err(JournalError::Insecure { .. })
    ));
    set(&journal, 0o600);
    open().unwrap();
    let elsewhere = directory.path().join("elsewhere");
    std::fs::rename(&journal, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &journal).unwrap();
    let error = open().unwrap_err();
    assert!(matches!(error, JournalError::Insecure { .. }));
    let text = error.to_string();
    assert!(text.contains("move it away") && !text.contains("0700"), "{text}");
    std::fs::remove_file(&journal).unwrap();
    std::fs::create_dir(&journal).unwrap();
    assert!(open().is_err() && read(directory.path()).is_err());
}

/// A line as the journal writes it, around any JSON.
fn line(json: &str) -> String {
    format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()))
}

#[test]
fn a_journal_of_a_newer_format_is_not_touched() {
    let directory = tempfile::tempdir().unwrap();
    let text = line(r#"{"v":2,"n":0,"undo":{"what":"something new"}}"#);
    std::fs::write(directory.path().join(JOURNAL_FILE), &text).unwrap();
    for result in [
        read(directory.path()),
        Journal::open(directory.path(), JournalOptions::default()).map(|x| x.1),
    ] {
        assert!(
            matches!(result, Err(JournalError::Newer { version: 2, .. })),
            "{result:?}"
        );
    }
    assert_eq!(
        std::fs::read_to_string(directory.path().join(JOURNAL_FILE)).unwrap(),
        text
    );
}

#[test]
fn the_format_of_version_1_can_be_read_forever() {
    // Written out by hand: a change of the format that breaks this needs version 2 and a reader for both.
    let directory = tempfile::tempdir().unwrap();
    let text = [
        r#"{"v":1,"n":0,"a":0,"e":0,"event":{"start":"homeostat 0.1.0"}}"#,
        r#"{"v":1,"n":1,"a":0,"e":3,"event":{"note":{"coin":{"experiment":3,"block":0,"on":true}}}}"#,
        r#"{"v":1,"n":2,"a":9,"e":3,"event":{"intend":{"action":{"id":9,"effector":"files","workload":"w","target":{"files":["/sys/a"]},"arguments":{},"why":"y"},"boot_id":"b","found":{"/sys/a":"1"}}}}"#,
        r#"{"v":1,"n":3,"a":9,"e":3,"event":{"applied":9}}"#,
        r#"{"v":1,"n":4,"a":9,"e":3,"event":{"note":{"remark":"hello"}}}"#,
        r#"{"v":1,"n":5,"a":9,"e":4,"event":{"note":{"ended":4}}}"#,
        r#"{"v":1,"n":6,"a":9,"e":4,"event":{"undoing":9}}"#,
        r#"{"v":1,"n":7,"a":9,"e":4,"event":{"kept":9}}"#,
    ]
    .map(line)
    .concat();
    let mut bytes = text.into_bytes();
    bytes.resize(bytes.len() + RESERVE_BYTES as usize, 0);
    std::fs::write(directory.path().join(JOURNAL_FILE), bytes).unwrap();
    let seen = read(directory.path()).unwrap();
    assert!(seen.is_whole() && seen.torn == 0, "{seen:?}");
    // From the first opening on it has a second file, and is as whole.
    assert_eq!(reopen(directory.path()), seen);
    assert!(directory.path().join(COUNT_FILE).exists() && reopen(directory.path()).is_whole());
    assert_eq!(seen.records, 8);
    assert_eq!(seen.owed[&ActionId(9)].state, OwedState::Kept);
    assert_eq!(
        seen.owed[&ActionId(9)].record.action.target,
        Target::Files(vec!["/sys/a".to_owned()])
    );
    assert_eq!(
        (seen.next_action, seen.next_experiment),
        (ActionId(10), ExperimentId(5))
    );
}

/// A crash leaves the journal with an unfinished last record, and the second file as it was before that record.
#[test]
fn cut_at_any_byte_the_journal_owes_what_its_whole_lines_say() {
    let directory = tempfile::tempdir().unwrap();
    let steps = script();
    let path = directory.path().join(JOURNAL_FILE);
    let count_path = directory.path().join(COUNT_FILE);
    let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    // Expectation and second file after k whole lines; line 0 is the start, without which nothing is whole.
    let mut expected = vec![Model::default(), Model::default()];
    let mut counts = vec![Vec::new(), std::fs::read(&count_path).unwrap()];
    for step in &steps {
        carry_out(&mut journal, step).unwrap();
        let mut next = expected.last().unwrap().clone();
        next.take(step);
        expected.push(next);
        counts.push(std::fs::read(&count_path).unwrap());
    }
    drop(journal);
    let mut bytes = std::fs::read(&path).unwrap();
    let used = bytes.iter().rposition(|b| *b != 0).unwrap() + 1;
    bytes.truncate(used);
    let full = counts.last().unwrap();
    for cut in 0..=used {
        // A last line that lacks only its newline is whole: its checksum says so.
        let whole = bytes[..cut].iter().filter(|b| **b == b'\n').count()
            + usize::from(cut < used && bytes[cut] == b'\n' && cut > 0 && bytes[cut - 1] != b'\n');
        let mut content = bytes[..cut].to_vec();
        content.resize(cut + RESERVE_BYTES as usize, 0);
        std::fs::write(&path, &content).unwrap();
        std::fs::write(&count_path, &counts[whole]).unwrap();
        let seen = read(directory.path()).unwrap();
        assert_eq!(Model::of(&seen), expected[whole], "cut at {cut}");
        assert_eq!(seen.is_whole(), whole > 0, "cut at {cut}: {seen:?}");
        // The same cut as damage: the second file knows of what is not there.
        std::fs::write(&count_path, full).unwrap();
        let seen = read(directory.path()).unwrap();
        assert_eq!(
            seen.is_whole(),
            whole == expected.len() - 1,
            "cut at {cut}: {seen:?}"
        );
        let named: BTreeSet<u64> = seen.owed.keys().chain(&seen.lost).map(|id| id.0).collect();
        let owed = &expected.last().unwrap().owed;
        assert!(owed.keys().all(|id| named.contains(id)), "cut at {cut}: {seen:?}");
        // Opening cleans up, and life goes on. (Sampled: it syncs four times.)
        if cut % 23 == 0 && whole > 0 {
            std::fs::write(&count_path, &counts[whole]).unwrap();
            let (mut journal, recovered) =
                Journal::open(directory.path(), JournalOptions::default()).unwrap();
            assert_eq!(Model::of(&recovered), expected[whole], "cut at {cut}");
            journal.intend(&record(100)).unwrap();
            drop(journal);
            let again = read(directory.path()).unwrap();
            assert!(again.torn == 0 && again.is_whole() && again.set_aside.is_none());
            assert!(again.owed.contains_key(&ActionId(100)));
            assert_eq!(again.owed.len(), recovered.owed.len() + 1);
        }
    }
}

/// Who trusts it leaves alone what reads like homeostat's own value.
#[test]
fn what_was_put_back_is_not_known_to_be_so_where_a_later_record_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let count_path = directory.path().join(COUNT_FILE);
    fill(directory.path(), &[Step::Intend(1), Step::PutBack(1)]);
    let before = std::fs::read(&count_path).unwrap();
    let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    journal.applied(ActionId(1)).unwrap();
    drop(journal);
    let path = directory.path().join(JOURNAL_FILE);
    let good = std::fs::read(&path).unwrap();
    let line = |n: usize| {
        good.split(|b| *b == b'\n')
            .take(n)
            .map(|l| l.len() + 1)
            .sum::<usize>()
    };
    let mut content = good.clone();
    content[line(3) + 20] ^= 1;
    std::fs::write(&path, &content).unwrap();
    let seen = read(directory.path()).unwrap();
    assert!(!seen.is_whole());
    assert_eq!(seen.owed[&ActionId(1)].state, OwedState::Applied);
    // One that is only unfinished was not written, and nothing made after it.
    let mut content = good[..line(3) + 20].to_vec();
    content.resize(content.len() + RESERVE_BYTES as usize, 0);
    std::fs::write(&path, content).unwrap();
    std::fs::write(&count_path, before).unwrap();
    assert_eq!(
        read(directory.path()).unwrap().owed[&ActionId(1)].state,
        OwedState::PutBack
    );
}

#[test]
fn a_flipped_byte_anywhere_costs_at_most_the_record_it_is_in() {
    let directory = tempfile::tempdir().unwrap();
    // Only intents, so every readable record is visible in what is owed.
    let ids: Vec<u64> = (1..=6).collect();
    fill(
        directory.path(),
        &ids.iter().map(|id| Step::Intend(*id)).collect::<Vec<_>>(),
    );
    let path = directory.path().join(JOURNAL_FILE);
    let good = std::fs::read(&path).unwrap();
    let used = good.iter().rposition(|b| *b != 0).unwrap() + 1;
    for at in 0..used {
        let line_of = good[..at].iter().filter(|b| **b == b'\n').count();
        for flip in [0x01_u8, 0x20, 0x80, 0xff, good[at], good[at] ^ b'\n'] {
            let mut content = good.clone();
            content[at] ^= flip;
            std::fs::write(&path, &content).unwrap();
            let seen = read(directory.path()).unwrap();
            let owed: BTreeSet<u64> = seen.owed.keys().map(|id| id.0).collect();
            let without: BTreeSet<u64> = ids.iter().copied().filter(|id| *id != line_of as u64).collect();
            let all: BTreeSet<u64> = ids.iter().copied().collect();
            assert!(
                owed == all || owed == without,
                "byte {at} in line {line_of} ^ {flip:#x}: {owed:?}"
            );
            for (id, owed) in &seen.owed {
                assert_eq!(owed.record, record(id.0));
            }
            // What is lost is known by its number, the last one by the second file.
            if owed != all {
                assert_eq!(seen.lost, [ActionId(line_of as u64)], "byte {at} ^ {flip:#x}");
                assert!(!seen.is_whole());
                assert!(!seen.complaints().is_empty());
            }
            assert!(
                owed == all || seen.torn > 0 || !seen.damaged.is_empty(),
                "byte {at} ^ {flip:#x}: unnoticed"
            );
            assert_eq!(seen.next_action, ActionId(7));
        }
    }
}

#[test]
fn a_damaged_journal_is_set_aside_and_replaced_by_what_could_be_read() {
    let directory = tempfile::tempdir().unwrap();
    fill(
        directory.path(),
        &[
            Step::Intend(1),
            Step::Intend(2),
            Step::Applied(2),
            Step::Intend(3),
        ],
    );
    let path = directory.path().join(JOURNAL_FILE);
    let mut bytes = std::fs::read(&path).unwrap();
    let second = bytes
        .iter()
        .enumerate()
        .filter(|(_, b)| **b == b'\n')
        .nth(1)
        .unwrap()
        .0
        + 1;
    bytes[second + 40] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let (mut journal, recovered) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    assert_eq!(recovered.owed.keys().map(|id| id.0).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(recovered.lost, [ActionId(2)]);
    assert_eq!((recovered.missing, recovered.damaged.len()), (1, 1));
    let copy = recovered.set_aside.clone().unwrap();
    assert_eq!(std::fs::read(&copy).unwrap(), bytes);
    assert_eq!(recovered.complaints().len(), 4, "{:?}", recovered.complaints());
    // The loss is reported at every start until it is closed; the damage only once.
    drop(journal);
    let again = reopen(directory.path());
    assert!(again.damaged.is_empty() && again.lost == [ActionId(2)] && again.set_aside.is_none());
    journal = Journal::open(directory.path(), JournalOptions::default())
        .unwrap()
        .0;
    journal.closed(ActionId(2)).unwrap();
    drop(journal);
    assert!(reopen(directory.path()).is_whole());
}

#[test]
fn the_number_of_damaged_copies_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    fill(directory.path(), &[Step::Intend(1)]);
    for _ in 0..12 {
        let path = directory.path().join(JOURNAL_FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.splice(0..0, b"garbage\n".iter().copied());
        std::fs::write(&path, &bytes).unwrap();
        let (mut journal, recovered) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        assert!(recovered.owed.contains_key(&ActionId(1)));
        journal.note(Note::Remark("goes on".to_owned())).unwrap();
    }
    let copies = std::fs::read_dir(directory.path())
        .unwrap()
        .filter(|e| {
            e.as_ref()
                .unwrap()
                .file_name()
                .to_string_lossy()
                .contains("damaged")
        })
        .count();
    assert_eq!(copies, 8);
}

#[test]
fn what_stands_only_in_a_left_over_new_file_is_not_lost() {
    let directory = tempfile::tempdir().unwrap();
    let model = fill(directory.path(), &script());
    std::fs::rename(
        directory.path().join(JOURNAL_FILE),
        directory.path().join(NEW_FILE),
    )
    .unwrap();
    assert_eq!(Model::of(&read(directory.path()).unwrap()), model);
    assert_eq!(Model::of(&reopen(directory.path())), model);
    assert_eq!(Model::of(&reopen(directory.path())), model);
}

#[test]
fn a_failure_of_any_step_is_an_error_that_changes_nothing_owed() {
    let mut tried = BTreeSet::new();
    for failing in 1.. {
        let directory = tempfile::tempdir().unwrap();
        let counter = Arc::new(Mutex::new((0_u32, None)));
        let seen = counter.clone();
        let options = JournalOptions {
            compact_bytes: Some(1500),
            fault: Some(Box::new(move |step| {
                let mut seen = seen.lock().unwrap();
                seen.0 += 1;
                if seen.0 == failing {
                    seen.1 = Some(step);
                    return Err(std::io::Error::from_raw_os_error(28));
                }
                Ok(())
            })),
        };
        let Ok((mut journal, _)) = Journal::open(directory.path(), options) else {
            tried.insert(counter.lock().unwrap().1.unwrap());
            // The next try works.
            reopen(directory.path());
            continue;
        };
        let mut model = Model::default();
        for step in &crash_script() {
            let before = model.clone();
            if let Err(e) = carry_out(&mut journal, step) {
                assert!(matches!(e, JournalError::NoSpace { .. }), "{e}");
                let owed: BTreeMap<u64, OwedState> =
                    journal.owed().map(|o| (o.record.action.id.0, o.state)).collect();
                assert_eq!(owed, before.owed, "{step:?} at {failing}");
                // The fault is gone: the same call works now.
                carry_out(&mut journal, step).unwrap();
            }
            model.take(step);
            let now = read(directory.path()).unwrap();
            assert_eq!(Model::of(&now), model, "{step:?} at {failing}");
            assert!(now.is_whole() && now.torn == 0, "{step:?} at {failing}: {now:?}");
        }
        drop(journal);
        assert_eq!(Model::of(&reopen(directory.path())), model);
        let (calls, failed) = *counter.lock().unwrap();
        match failed {
            Some(step) => {
                tried.insert(step);
            }
            None => {
                assert!(calls < failing);
                break;
            }
        }
    }
    let all: BTreeSet<&str> = FAULT_POINTS.iter().copied().collect();
    let not_tried: Vec<_> = all.difference(&tried).collect();
    // It needs a damaged file.
    assert_eq!(not_tried, [&"open.after_set_aside"]);
}

/// Steps acknowledged by a child that kills itself, one byte each.
const ACKNOWLEDGED: &str = "acknowledged";
const CRASH_TEST: &str = "after_a_kill_at_any_step_exactly_what_the_contract_says_is_owed";

#[test]
fn after_a_kill_at_any_step_exactly_what_the_contract_says_is_owed() {
    if common::role().as_deref() == Some("crash") {
        crash_child();
        return;
    }
    let mut killed_at = BTreeSet::new();
    for moment in 1_u64.. {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        // Start with a damaged file, so that recovery itself is among the steps.
        let mut base = fill(
            &state,
            &[
                Step::Intend(1),
                Step::Closed(1),
                Step::Coin(1, 0, true),
                Step::Intend(3),
            ],
        );
        let path = state.join(JOURNAL_FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.splice(0..0, b"damage\n".iter().copied());
        std::fs::write(&path, &bytes).unwrap();
        // And without the second file, which is made again.
        std::fs::remove_file(state.join(COUNT_FILE)).unwrap();

        let output = common::child(CRASH_TEST, "crash", directory.path(), moment);
        use std::os::unix::process::ExitStatusExt;
        if output.status.success() {
            assert!(moment > 40, "the child must have had many steps to die at");
            break;
        }
        assert_eq!(
            output.status.signal(),
            Some(9),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );

        let point = std::fs::read_to_string(directory.path().join("point")).unwrap();
        let point = *FAULT_POINTS
            .iter()
            .find(|p| **p == point)
            .expect("a published fault point");
        killed_at.insert(point);
        let acknowledged = std::fs::read(directory.path().join(ACKNOWLEDGED)).map_or(0, |a| a.len());
        let steps = crash_script();
        for step in &steps[..acknowledged] {
            base.take(step);
        }
        let mut with_next = base.clone();
        if let Some(step) = steps.get(acknowledged) {
            with_next.take(step);
        }
        // A kill leaves the page cache intact: what was written is there, what was not is not.
        let expected = match point.rsplit_once('.').unwrap().1 {
            "before_write" | "before_allocate" if !point.starts_with("count.") => base,
            _ if point.starts_with("open.") => base,
            // The second file comes after the record, or is made at the start.
            _ if point.starts_with("count.") && acknowledged == 0 && !state_has_step(&state, &with_next) => {
                base
            }
            _ if point.starts_with("count.") => with_next,
            "after_write" | "after_sync" if !point.starts_with("compact.") => with_next,
            // Compaction happens inside `open` or at the end of a call whose record is written.
            _ if acknowledged == 0 && !state_has_step(&state, &with_next) => base,
            _ => with_next,
        };
        let seen = read(&state).unwrap();
        assert_eq!(Model::of(&seen), expected, "killed at step {moment}, {point}");
        let recovered = reopen(&state);
        assert_eq!(
            Model::of(&recovered),
            expected,
            "killed at step {moment}, {point}"
        );
        let again = reopen(&state);
        assert_eq!(Model::of(&again), expected);
        assert!(again.is_whole() && again.torn == 0);
    }
    let all: BTreeSet<&str> = FAULT_POINTS.iter().copied().collect();
    let never: Vec<_> = all.difference(&killed_at).collect();
    assert!(never.is_empty(), "never killed at {never:?}");
}

fn state_has_step(state: &Path, with_next: &Model) -> bool {
    Model::of(&read(state).unwrap()) == *with_next
}

/// The same life with higher numbers, for a journal that has already seen some.
fn crash_script() -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for step in script() {
        steps.push(match step {
            Step::Intend(id) => Step::Intend(id + 10),
            Step::Applied(id) => Step::Applied(id + 10),
            Step::Undoing(id) => Step::Undoing(id + 10),
            Step::Kept(id) => Step::Kept(id + 10),
            Step::PutBack(id) => Step::PutBack(id + 10),
            Step::Closed(id) => Step::Closed(id + 10),
            Step::Coin(e, b, on) => Step::Coin(e + 10, b, on),
            Step::Ended(id) => Step::Ended(id + 10),
            other => other,
        });
    }
    steps
}

fn crash_child() {
    let directory = common::directory();
    let moment = common::number();
    let mut count = 0;
    let point_file = directory.join("point");
    let options = JournalOptions {
        compact_bytes: Some(1500),
        fault: Some(Box::new(move |step| {
            count += 1;
            if count == moment {
                std::fs::write(&point_file, step)?;
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
            }
            Ok(())
        })),
    };
    let (mut journal, _) = Journal::open(&directory.join("state"), options).unwrap();
    let mut acknowledged = std::fs::File::create(directory.join(ACKNOWLEDGED)).unwrap();
    for step in crash_script() {
        carry_out(&mut journal, &step).unwrap();
        acknowledged.write_all(b".").unwrap();
    }
}

#[test]
fn on_a_full_disk_nothing_new_is_begun_and_what_was_begun_can_be_ended() {
    const TEST: &str = "on_a_full_disk_nothing_new_is_begun_and_what_was_begun_can_be_ended";
    if common::role().as_deref() == Some("full") {
        full_disk_child();
        println!("CHILD-DONE");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=512k,mode=700 none \"$DIR\"";
    if let Some(output) = common::child_with_mounts(mount, TEST, "full", directory.path()) {
        assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD-DONE"));
    }
}

fn fill_disk(path: &Path) {
    let mut filler = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .unwrap();
    for size in [4096, 1] {
        while filler.write_all(&vec![1; size]).is_ok() {}
    }
}

fn full_disk_child() {
    let directory = common::directory();
    let state = directory.join("state");
    let filler = directory.join("filler");
    let open = || {
        let options = JournalOptions {
            compact_bytes: Some(2000),
            ..JournalOptions::default()
        };
        Journal::open(&state, options)
    };
    // No journal yet and no room for one: said so, and nothing half made is left.
    fill_disk(&filler);
    assert!(matches!(open(), Err(JournalError::NoSpace { .. })));
    assert!(!state.join(JOURNAL_FILE).exists());
    std::fs::remove_file(&filler).unwrap();

    let (mut journal, _) = open().unwrap();
    for id in 1..=20 {
        journal.intend(&record(id)).unwrap();
        journal.applied(ActionId(id)).unwrap();
    }
    fill_disk(&filler);
    let refused = (21..1000).find_map(|id| journal.intend(&record(id)).err().map(|e| (id, e)));
    let (first_refused, error) = refused.expect("the disk is full");
    assert!(matches!(error, JournalError::NoSpace { .. }), "{error}");
    assert!(error.to_string().contains("hint"), "{error}");
    let mut owed: Vec<u64> = journal.owed().map(|o| o.record.action.id.0).collect();
    assert_eq!(owed, (1..first_refused).collect::<Vec<_>>());
    drop(journal);

    // A restart on the full disk owes the same.
    let (mut journal, recovered) = open().unwrap();
    assert_eq!(recovered.owed.keys().map(|id| id.0).collect::<Vec<_>>(), owed);
    assert!(journal.compaction_failure().is_some());
    // Everything that was begun can be undone and closed, with a restart in between.
    while let Some(id) = owed.pop() {
        journal.undoing(ActionId(id)).unwrap();
        journal.closed(ActionId(id)).unwrap();
        if id == 10 {
            drop(journal);
            journal = open().unwrap().0;
        }
    }
    drop(journal);
    assert!(read(&state).unwrap().owed.is_empty());

    // A torn and a damaged journal are recovered on a full disk, too.
    std::fs::remove_file(&filler).unwrap();
    let (mut journal, recovered) = open().unwrap();
    let next = recovered.next_action.0;
    journal.intend(&record(next)).unwrap();
    journal.intend(&record(next + 1)).unwrap();
    drop(journal);
    let path = state.join(JOURNAL_FILE);
    let mut bytes = std::fs::read(&path).unwrap();
    let used = bytes.iter().rposition(|b| *b != 0).unwrap() + 1;
    bytes[used..used + 8].copy_from_slice(b"12345678");
    bytes[3] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    fill_disk(&filler);
    let (mut journal, recovered) = open().unwrap();
    assert_eq!(recovered.owed.len(), 2);
    assert!(
        recovered.torn == 8 && recovered.damaged.len() == 1 && recovered.set_aside.is_none(),
        "{recovered:?}"
    );
    let told = recovered.complaints().join("\n");
    assert!(
        told.contains("what stood there is not known") && !told.contains("nothing is lost"),
        "{told}"
    );
    journal.closed(ActionId(next)).unwrap();
    drop(journal);
    let seen = read(&state).unwrap();
    assert_eq!(seen.owed.keys().map(|id| id.0).collect::<Vec<_>>(), [next + 1]);
    // With room again the next start cleans up.
    std::fs::remove_file(&filler).unwrap();
    let (_, recovered) = open().unwrap();
    assert!(recovered.set_aside.is_some());
    assert!(read(&state).unwrap().damaged.is_empty());
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u64..30).prop_map(Step::Intend),
        2 => (1_u64..30).prop_map(Step::Applied),
        2 => (1_u64..30).prop_map(Step::Undoing),
        1 => (1_u64..30).prop_map(Step::Kept),
        2 => (1_u64..30).prop_map(Step::PutBack),
        4 => (1_u64..30).prop_map(Step::Closed),
        2 => (1_u64..5, 0_u32..4, any::<bool>()).prop_map(|(e, b, on)| Step::Coin(e, b, on)),
        1 => (1_u64..5).prop_map(Step::Ended),
        1 => ".{0,40}".prop_map(Step::Remark),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_calls_agrees_with_the_model(
        steps in proptest::collection::vec(any_step(), 1..60),
        compact_bytes in prop_oneof![Just(0_u64), Just(1200), Just(1 << 20)],
    ) {
        let directory = tempfile::tempdir().unwrap();
        let open = || {
            let options = JournalOptions { compact_bytes: Some(compact_bytes), ..JournalOptions::default() };
            Journal::open(directory.path(), options).unwrap()
        };
        let mut journal = open().0;
        let mut model = Model::default();
        for step in &steps {
            if *step == Step::Reopen {
                drop(journal);
                let (again, recovered) = open();
                journal = again;
                prop_assert_eq!(Model::of(&recovered), model.clone());
                prop_assert!(recovered.is_whole() && recovered.torn == 0);
                continue;
            }
            let used_before = |id: &u64| *id <= model.highest_action && !model.owed.contains_key(id);
            match carry_out(&mut journal, step) {
                Ok(()) => model.take(step),
                Err(JournalError::Reused { id, .. }) => prop_assert!(used_before(&id.0)),
                Err(JournalError::AlreadyOwed { id }) => prop_assert!(model.owed.contains_key(&id.0)),
                Err(JournalError::NotOwed { id }) => prop_assert!(!model.owed.contains_key(&id.0)),
                Err(JournalError::CoinFixed { experiment, block }) => {
                    prop_assert!(model.coins.contains_key(&(experiment.0, block)));
                }
                Err(e) => prop_assert!(false, "{}", e),
            }
            prop_assert_eq!(journal.next_action_id().0, model.highest_action + 1);
        }
        drop(journal);
        prop_assert_eq!(Model::of(&read(directory.path()).unwrap()), model);
    }

    #[test]
    fn any_bytes_at_all_are_read_without_a_panic(
        noise in proptest::collection::vec(any::<u8>(), 0..400),
        at in 0_usize..4000,
        replace in any::<bool>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        fill(directory.path(), &[Step::Intend(1), Step::Applied(1), Step::Intend(2)]);
        let path = directory.path().join(JOURNAL_FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(4000);
        let stop = if replace { (at + noise.len()).min(bytes.len()) } else { at.min(bytes.len()) };
        bytes.splice(at.min(stop)..stop, noise);
        std::fs::write(&path, &bytes).unwrap();
        let (mut journal, recovered) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        for owed in recovered.owed.values() {
            prop_assert_eq!(&owed.record, &record(owed.record.action.id.0));
        }
        if !replace {
            // Insertion destroys at most the record it falls into.
            prop_assert!(recovered.owed.len() + 1 >= 2);
        }
        journal.intend(&record(50)).unwrap();
        drop(journal);
        prop_assert!(read(directory.path()).unwrap().owed.contains_key(&ActionId(50)));
    }
}

#[test]
fn a_journal_that_is_gone_or_emptied_is_damage_and_names_what_was_in_force() {
    for damage in ["gone", "empty", "zero", "both gone"] {
        let directory = tempfile::tempdir().unwrap();
        fill(directory.path(), &script());
        let path = directory.path().join(JOURNAL_FILE);
        let length = std::fs::metadata(&path).unwrap().len() as usize;
        match damage {
            "gone" => std::fs::remove_file(&path).unwrap(),
            "empty" => std::fs::write(&path, "").unwrap(),
            "zero" => std::fs::write(&path, vec![0; length]).unwrap(),
            _ => {
                std::fs::remove_file(&path).unwrap();
                std::fs::remove_file(directory.path().join(COUNT_FILE)).unwrap();
            }
        }
        let seen = reopen(directory.path());
        if damage == "both gone" {
            assert!(seen.is_whole() && !seen.existed, "as where homeostat never ran");
            continue;
        }
        assert_eq!(seen.lost, [5, 6, 7].map(ActionId), "{damage}");
        let told = seen.complaints().join("\n");
        assert!(
            told.contains(&path.display().to_string()) && told.contains("reboot"),
            "{told}"
        );
        // No number is used again, and the loss is told until it is closed.
        assert_eq!(seen.next_action, ActionId(8));
        let again = reopen(directory.path());
        assert_eq!(again.lost, seen.lost);
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        for id in seen.lost {
            journal.closed(id).unwrap();
        }
        drop(journal);
        assert!(reopen(directory.path()).is_whole());
    }
}

#[test]
fn where_nothing_can_be_written_the_journal_is_read_to_undo_it() {
    const TEST: &str = "where_nothing_can_be_written_the_journal_is_read_to_undo_it";
    if common::role().as_deref() == Some("read-only") {
        let state = common::directory();
        let refused = Journal::open(&state, JournalOptions::default());
        assert!(
            matches!(refused, Err(JournalError::ReadOnly { .. })),
            "{refused:?}"
        );
        let (mut journal, found) = Journal::open_for_undo(&state, JournalOptions::default()).unwrap();
        assert!(found.is_whole() && found.owed.len() == 3, "{found:?}");
        let written = journal.closed(ActionId(5));
        assert!(
            matches!(written, Err(JournalError::ReadOnly { .. })),
            "{written:?}"
        );
        assert_eq!(journal.owed().count(), 3);
        println!("CHILD-DONE");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    fill(&state, &script());
    let mount = "mount --bind \"$DIR\" \"$DIR\" && mount -o remount,bind,ro \"$DIR\"";
    if let Some(output) = common::child_with_mounts(mount, TEST, "read-only", &state) {
        assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD-DONE"));
    }
}

#[test]
fn below_a_directory_that_others_may_write_to_no_journal_is_made() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let above = directory.path().join("above");
    std::fs::create_dir(&above).unwrap();
    let set = |mode| std::fs::set_permissions(&above, PermissionsExt::from_mode(mode)).unwrap();
    let state = above.join("state");
    let open = || Journal::open(&state, JournalOptions::default());
    set(0o777);
    let refused = open().unwrap_err();
    let text = refused.to_string();
    assert!(
        matches!(refused, JournalError::Insecure { .. }) && text.contains("chmod"),
        "{text}"
    );
    assert!(!state.exists());
    for mode in [0o1777, 0o755] {
        set(mode);
        open().unwrap();
    }
}
