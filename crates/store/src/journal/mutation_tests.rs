//! Damage of every kind to real journals: what is in force and cannot be read any more is always reported.

use super::*;
use homeostat_model::Action;
use homeostat_model::action::Target;

/// Damaged journals that are tried.
const MUTATIONS: u32 = 2000;
/// Journals that are damaged, each after a life of its own.
const LIVES: u32 = 20;

/// A sequence of numbers that is the same in every run (xorshift64*, Vigna 2016).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound.max(1)
    }
}

fn record(id: ActionId) -> UndoRecord {
    UndoRecord {
        action: Action {
            id,
            effector: "files".into(),
            workload: "w".into(),
            target: Target::Files(vec![format!("/sys/{id}")]),
            arguments: BTreeMap::new(),
            why: "test".to_owned(),
        },
        boot_id: "b".to_owned(),
        found: BTreeMap::from([("was".to_owned(), id.to_string())]),
    }
}

/// The two files of a journal and what is owed by it.
struct Life {
    journal: Vec<u8>,
    count: Vec<u8>,
    owed: BTreeMap<ActionId, Owed>,
}

fn live(numbers: &mut Numbers) -> Life {
    let directory = tempfile::tempdir().unwrap();
    let options = || JournalOptions {
        compact_bytes: Some(4096),
        ..JournalOptions::default()
    };
    let mut journal = Journal::open(directory.path(), options()).unwrap().0;
    for _ in 0..10 + numbers.below(60) {
        let open: Vec<ActionId> = journal.books.owed.keys().copied().collect();
        let one = open.get(numbers.below(open.len())).copied();
        match (numbers.below(8), one) {
            (0 | 1, _) | (_, None) => journal.intend(&record(journal.next_action_id())).unwrap(),
            (2, Some(id)) => journal.applied(id).unwrap(),
            (3, Some(id)) => journal.undoing(id).unwrap(),
            (4, Some(id)) => journal.put_back(id).unwrap(),
            (5, Some(id)) => journal.kept(id).unwrap(),
            (6, Some(id)) => journal.closed(id).unwrap(),
            (_, Some(_)) => journal.note(Note::Remark("remark".to_owned())).unwrap(),
        }
        if numbers.below(20) == 0 {
            drop(journal);
            journal = Journal::open(directory.path(), options()).unwrap().0;
        }
    }
    // Something is in force, whatever went before.
    let last = journal.next_action_id();
    journal.intend(&record(last)).unwrap();
    journal.applied(last).unwrap();
    let read = |name| std::fs::read(directory.path().join(name)).unwrap();
    Life {
        journal: read(JOURNAL_FILE),
        count: read(COUNT_FILE),
        owed: journal.books.owed.clone(),
    }
}

/// The file as damage left it; `None`: it is gone.
fn damage(file: &[u8], numbers: &mut Numbers) -> Option<Vec<u8>> {
    let used = file.iter().rposition(|b| *b != 0).unwrap() + 1;
    let mut bytes = file.to_vec();
    let lines: Vec<std::ops::Range<usize>> = bytes[..used]
        .iter()
        .enumerate()
        .filter(|(_, b)| **b == b'\n')
        .scan(0, |from, (at, _)| {
            let line = *from..at + 1;
            *from = at + 1;
            Some(line)
        })
        .collect();
    let line = lines[numbers.below(lines.len())].clone();
    let other = lines[numbers.below(lines.len())].clone();
    let (from, length) = (numbers.below(used), 1 + numbers.below(600));
    let piece = from..(from + length).min(bytes.len());
    match numbers.below(16) {
        0 => return None,
        1 => bytes.clear(),
        2 => bytes.fill(0),
        // At the beginning of a record, with and without the space behind.
        3 => bytes.truncate(line.start),
        4 => bytes[line.start..].fill(0),
        5 => bytes.truncate(from),
        6 => bytes[from..].fill(0),
        7 => bytes[piece].fill(0),
        8 => bytes[..line.start].fill(0),
        9 => drop(bytes.drain(line)),
        10 => drop(bytes.drain(piece)),
        11 => bytes[from] ^= 1 << numbers.below(8),
        12 => {
            let text = bytes[other].to_vec();
            drop(bytes.splice(line, text));
        }
        13 => {
            let (first, second) = if line.start < other.start {
                (line, other)
            } else {
                (other, line)
            };
            if first.start < second.start {
                let text = [
                    &bytes[second.clone()],
                    &bytes[first.end..second.start],
                    &bytes[first.clone()],
                ]
                .concat();
                drop(bytes.splice(first.start..second.end, text));
            }
        }
        14 => {
            // Two blocks of a disk.
            let blocks = bytes.len() / 512;
            let (a, b) = (numbers.below(blocks), numbers.below(used.div_ceil(512)));
            for i in 0..512 {
                bytes.swap(a * 512 + i, b * 512 + i);
            }
        }
        _ => {
            let garbage: Vec<u8> = (0..length).map(|_| numbers.below(256) as u8).collect();
            let at = if numbers.below(2) == 0 { used } else { bytes.len() };
            drop(bytes.splice(at..at, garbage));
        }
    }
    Some(bytes)
}

/// What a person is not told of and is lost: a change in force whose undo record is not found as it was, or that is said to be
/// put back or kept and is not.
fn silently_lost(life: &Life, journal: Option<&[u8]>, count: Option<&[u8]>) -> Option<String> {
    let count = count.map_or(Found::Nothing, count::decode);
    let reading = reading(journal, &count, &boot_id());
    let recovered = Recovered::from_reading(JOURNAL_FILE.into(), journal.is_some(), &reading);
    assert_eq!(
        recovered.is_whole(),
        recovered.complaints().is_empty() || (recovered.is_whole() && recovered.torn > 0)
    );
    for (id, owed) in &recovered.owed {
        assert_eq!(owed.record, record(*id), "a wrong value would be written");
    }
    if recovered.is_whole() {
        for (id, owed) in &life.owed {
            let found = recovered.owed.get(id);
            if found != Some(owed) {
                return Some(format!("action {id}: {owed:?}, found {found:?}"));
            }
        }
    }
    None
}

#[test]
fn no_damage_to_either_file_loses_a_change_without_a_word() {
    let mut numbers = Numbers(0x5eed_0001);
    let (mut noticed, mut harmless) = (0, 0);
    for _ in 0..LIVES {
        let life = live(&mut numbers);
        assert_eq!(silently_lost(&life, Some(&life.journal), Some(&life.count)), None);
        for number in 0..MUTATIONS / LIVES {
            // Three of four to the journal, the rest to the second file.
            let in_journal = number % 4 != 0;
            let (journal, count) = if in_journal {
                (damage(&life.journal, &mut numbers), Some(life.count.clone()))
            } else {
                (Some(life.journal.clone()), damage(&life.count, &mut numbers))
            };
            let lost = silently_lost(&life, journal.as_deref(), count.as_deref());
            assert_eq!(lost, None, "mutation {number}, journal {in_journal}");
            let count = count.as_deref().map_or(Found::Nothing, count::decode);
            if reading(journal.as_deref(), &count, &boot_id()).is_whole() {
                harmless += 1;
            } else {
                noticed += 1;
            }
        }
    }
    assert!(noticed > harmless, "{noticed} noticed, {harmless} harmless");
}

/// Without its second file a journal of an older version has the loss of its beginning and of its reserve to show.
#[test]
fn a_journal_without_a_second_file_that_is_emptied_or_cut_is_damaged() {
    let life = live(&mut Numbers(0x5eed_0002));
    let text = String::from_utf8_lossy(&life.journal).into_owned();
    let start = text.lines().next().unwrap();
    let old = start[9..].replace(books::COUNTED, "");
    let old = format!("{:08x} {old}", crc32fast::hash(old.as_bytes()));
    let journal = text.replace(start, &old).into_bytes();
    let seen = |journal: &[u8]| reading(Some(journal), &Found::Nothing, &boot_id());
    assert!(seen(&journal).is_whole() && seen(&journal).books.owed == life.owed);
    let used = journal.iter().rposition(|b| *b != 0).unwrap() + 1;
    let last = journal[..used - 1].iter().rposition(|b| *b == b'\n').unwrap() + 1;
    for damaged in [
        &[][..],
        &[0; 4096],
        &journal[..last],
        &journal[..used],
        &journal[old.len() + 1..],
    ] {
        assert!(!seen(damaged).is_whole());
    }
}
