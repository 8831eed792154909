//! One record, one line: `CCCCCCCC {json}\n`, where the first word is the CRC-32 (IEEE) of the JSON in hexadecimal.
//! Zero bytes after the last record are reserved space. The decoder looks for records anywhere, not only at line
//! starts: a flipped newline must not cost the next record. This is safe because the text ` {"v":` cannot occur inside
//! a JSON string, where its quotes are escaped.

use super::RESERVE_BYTES;
use super::books::{Books, COUNTED, Event};
use super::count::Found;
use homeostat_model::ActionId;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

/// Format version. Raised when an older program could misread a record: [`super::JournalError::Newer`].
pub const FORMAT_VERSION: u32 = 1;

const DAMAGE_LISTED_MAX: usize = 64;

/// Reserve behind a last record that closes no action: the least of any other kind ([`super::Journal`], `Kind::leave`).
const SHORT_BYTES: u64 = RESERVE_BYTES / 4;

const CHECKSUM_DIGITS: usize = 8;
const OPENING: &[u8] = br#" {"v":"#;

#[derive(Serialize, Deserialize)]
struct Envelope {
    v: u32,
    /// Sequence number, gapless over the life of the journal.
    n: u64,
    /// Highest action and experiment numbers before this record: reveals lost undo records, prevents reused numbers.
    a: u64,
    e: u64,
    event: Event,
}

#[derive(Deserialize)]
struct VersionOnly {
    v: u32,
}

/// Writes one record as a line. Fails only if the event cannot be expressed as JSON.
pub(super) fn encode(
    books: &Books,
    sequence: u64,
    event: Event,
) -> Result<(Vec<u8>, Event), serde_json::Error> {
    let envelope = Envelope {
        v: FORMAT_VERSION,
        n: sequence,
        a: books.highest_action,
        e: books.highest_experiment,
        event,
    };
    let mut line = vec![b' '; CHECKSUM_DIGITS + 1];
    serde_json::to_writer(&mut line, &envelope)?;
    let checksum = crc32fast::hash(&line[CHECKSUM_DIGITS + 1..]);
    line[..CHECKSUM_DIGITS].copy_from_slice(format!("{checksum:08x}").as_bytes());
    line.push(b'\n');
    Ok((line, envelope.event))
}

#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) books: Books,
    pub(super) sequence: u64,
    pub(super) records: u64,
    /// Records known to have existed (by their sequence numbers) that could not be read.
    pub(super) missing: u64,
    /// Byte after the last byte in use.
    pub(super) end: u64,
    /// Bytes of an unfinished last record: a crash or power loss while it was being written. Normal.
    pub(super) torn: u64,
    /// Places that do not hold a record and should; at most [`DAMAGE_LISTED_MAX`].
    pub(super) damaged: Vec<Range<u64>>,
    /// Highest format version seen when it is one that this program does not know.
    pub(super) newer: Option<u32>,
    /// Whether the last record in use is followed by a newline.
    pub(super) ends_with_newline: bool,
    /// The first record is not the one with which every journal begins.
    pub(super) headless: bool,
    /// Records are out of order.
    pub(super) disordered: bool,
    /// The space that is kept behind the last record is not there.
    pub(super) short: bool,
    /// The journal was written together with a second file, which is missing or unreadable.
    pub(super) uncounted: bool,
    /// The start says that there is a second file.
    pub(super) counted: bool,
    closed: BTreeSet<ActionId>,
}

impl Reading {
    /// Whether nothing that was written is known to be missing. An unfinished last line is no loss.
    pub(super) fn is_whole(&self) -> bool {
        self.missing == 0
            && self.damaged.is_empty()
            && !(self.headless || self.disordered || self.short || self.uncounted)
    }

    /// Compares the journal with `journal.count`. `boot`: the current boot.
    pub(super) fn hold_against(&mut self, found: &Found, boot: &str) {
        match found {
            Found::Nothing => self.uncounted = self.counted,
            Found::Unreadable => self.uncounted = true,
            Found::Valid(count) => {
                let expected = count.expected(boot);
                self.missing = self
                    .missing
                    .saturating_add(expected.saturating_sub(self.sequence));
                if !self.is_whole() {
                    let books = &mut self.books;
                    let gone = count
                        .open
                        .iter()
                        .filter(|id| !books.owed.contains_key(id) && !self.closed.contains(id));
                    books.lost.extend(gone);
                }
                self.sequence = self.sequence.max(count.next);
                self.books.highest_action = self.books.highest_action.max(count.a);
                self.books.highest_experiment = self.books.highest_experiment.max(count.e);
            }
        }
        if !self.is_whole() {
            self.books.doubt();
        }
    }
}

/// Reads everything that can be read. Never fails.
pub(super) fn decode(bytes: &[u8]) -> Reading {
    let mut reading = Reading::default();
    let used = bytes.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
    reading.end = used as u64;
    reading.ends_with_newline = used == 0 || bytes[used - 1] == b'\n';
    let mut at = 0;
    let mut entries = Vec::new();
    while at < used {
        let newline = bytes[at..used].iter().position(|b| *b == b'\n').map(|i| at + i);
        let stop = newline.unwrap_or(used);
        segment(
            &bytes[at..stop],
            at,
            newline.is_none(),
            &mut entries,
            &mut reading,
        );
        at = stop + 1;
    }
    reading.disordered = !entries.is_sorted_by(|a: &Envelope, b| a.n < b.n);
    // The order of writing decides the meaning.
    entries.sort_by_key(|entry| entry.n);
    reading.headless = !matches!(entries.first().map(|e| &e.event), Some(Event::Start(_)));
    // Only a last record that closes may use up the reserve.
    let may_be_short = matches!(entries.last().map(|e| &e.event), Some(Event::Closed(_)));
    reading.short = !may_be_short && (bytes.len() as u64) < reading.end + SHORT_BYTES;
    let mut previous = None;
    for entry in entries {
        enter(entry, &mut previous, &mut reading);
    }
    if !reading.is_whole() {
        // The lost record may have said that the action was made again.
        reading.books.doubt();
    }
    reading
}

/// Reads the text between two newlines: one record, or the damaged remains of several.
fn segment(bytes: &[u8], offset: usize, last: bool, entries: &mut Vec<Envelope>, reading: &mut Reading) {
    if bytes.is_empty() {
        return;
    }
    if let Some(json) = whole_record(bytes) {
        if accept(json, entries, reading) {
            return;
        }
    }
    let mut unread_from = 0;
    let mut at = 0;
    while let Some(found) = next_opening(bytes, at) {
        let json_from = found + CHECKSUM_DIGITS + 1;
        let length = value_length(&bytes[json_from..]);
        let record = length.and_then(|n| whole_record(&bytes[found..json_from + n]));
        match (record, length) {
            (Some(json), Some(n)) if accept(json, entries, reading) => {
                damage(bytes, unread_from..found, offset, reading);
                unread_from = json_from + n;
                at = unread_from;
            }
            _ => at = found + 1,
        }
    }
    let rest = unread_from..bytes.len();
    if last && rest.end > rest.start {
        reading.torn = (rest.end - rest.start) as u64;
    } else {
        damage(bytes, rest, offset, reading);
    }
}

fn damage(bytes: &[u8], range: Range<usize>, offset: usize, reading: &mut Reading) {
    // A record that lost only its newline leaves nothing behind.
    if range.is_empty() || bytes[range.clone()].iter().all(|b| *b == b'\n') {
        return;
    }
    if reading.damaged.len() < DAMAGE_LISTED_MAX {
        reading
            .damaged
            .push((offset + range.start) as u64..(offset + range.end) as u64);
    }
}

/// The JSON of the record if the bytes are exactly one, undamaged.
pub(super) fn whole_record(bytes: &[u8]) -> Option<&[u8]> {
    let (head, json) = bytes.split_at_checked(CHECKSUM_DIGITS + 1)?;
    let digits = std::str::from_utf8(&head[..CHECKSUM_DIGITS]).ok()?;
    // Accept only the writer's form: `from_str_radix` alone takes a sign or capitals.
    if !digits
        .bytes()
        .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        || head[CHECKSUM_DIGITS] != b' '
    {
        return None;
    }
    let checksum = u32::from_str_radix(digits, 16).ok()?;
    (crc32fast::hash(json) == checksum).then_some(json)
}

fn next_opening(bytes: &[u8], from: usize) -> Option<usize> {
    let window = CHECKSUM_DIGITS + OPENING.len();
    (from..(bytes.len() + 1).checked_sub(window)?).find(|i| bytes[i + CHECKSUM_DIGITS..].starts_with(OPENING))
}

fn value_length(bytes: &[u8]) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(values.byte_offset())
}

/// Takes a record with a correct checksum. False when this program does not understand it.
fn accept(json: &[u8], entries: &mut Vec<Envelope>, reading: &mut Reading) -> bool {
    let envelope: Envelope = match serde_json::from_slice(json) {
        Ok(envelope) => envelope,
        Err(_) => {
            if let Ok(VersionOnly { v }) = serde_json::from_slice(json) {
                if v > FORMAT_VERSION {
                    reading.newer = Some(reading.newer.unwrap_or(0).max(v));
                }
            }
            return false;
        }
    };
    if envelope.v > FORMAT_VERSION {
        reading.newer = Some(reading.newer.unwrap_or(0).max(envelope.v));
        return false;
    }
    entries.push(envelope);
    true
}

fn enter(envelope: Envelope, previous: &mut Option<u64>, reading: &mut Reading) {
    // Sequence numbers start anywhere (they go on over compaction); the first record sets the scale.
    if let Some(previous) = *previous {
        reading.missing = reading
            .missing
            .saturating_add(envelope.n.saturating_sub(previous).saturating_sub(1));
        // The highest number rose although no readable record raised it: that undo record is gone.
        if envelope.a > reading.books.highest_action {
            reading.books.lost.insert(ActionId(envelope.a));
        }
    }
    *previous = Some(envelope.n);
    reading.sequence = reading.sequence.max(envelope.n.saturating_add(1));
    reading.records += 1;
    reading.books.highest_action = reading.books.highest_action.max(envelope.a);
    reading.books.highest_experiment = reading.books.highest_experiment.max(envelope.e);
    match &envelope.event {
        Event::Start(by) => reading.counted |= by.ends_with(COUNTED),
        Event::Closed(id) => {
            reading.closed.insert(*id);
        }
        _ => {}
    }
    reading.books.enter(envelope.event);
}
