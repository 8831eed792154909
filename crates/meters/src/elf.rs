//! Finds places in an executable file: function entries by symbol, static probes by note, and the cost of a probe
//! there.
//!
//! The workload chooses the file. So its tables are searched in a stream ([`Bounded`]), and only the result is kept.
//! Names that overlap, never end or fill gigabytes cost no memory.

use crate::bounded::{Bounded, ReadAt, Region};
use crate::elf64::{FunctionSymbol, Outline, Symbols, functions};
use crate::go;
use serde::{Deserialize, Serialize};

/// Longest name of a function or probe. Source: mangled names of the known servers stay below 300 bytes.
const NAME_MAX: usize = 1024;
/// Most matches of a name or text among all names. Source: a linker writes a name once, or as the end of a longer one.
const PLACES_MAX: usize = 16 * 1024;
/// Most bytes of probe notes that are read.
const NOTES_MAX: u64 = 4 * 1024 * 1024;
/// Longest probe note: addresses, two names, and the locations of the arguments.
const NOTE_MAX: usize = 4096;
/// Most places of one static probe.
const SITES_MAX: usize = 16;

/// An instruction that can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Site {
    /// Offset in the file.
    pub offset: u64,
    /// Offset of the probe's semaphore in the file; 0 = none.
    pub semaphore: u32,
    /// Whether the kernel emulates the instruction instead of single-stepping it.
    pub cheap: bool,
}

/// The place to find.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Wanted {
    /// The function with this name.
    Function(String),
    /// The function with the shortest name that contains this text (mangled C++).
    Containing(String),
    /// The static probe of this provider with this name.
    StaticProbe(String, String),
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The full name.
    pub name: String,
    /// All its places, which are counted together.
    pub sites: Vec<Site>,
}

impl Found {
    /// Whether this can be a result for a file of this size. It comes from a process that parses hostile files.
    pub fn is_plausible(&self, length: u64) -> bool {
        let names = !self.name.is_empty() && is_plain(self.name.as_bytes());
        let sites = (1..=SITES_MAX).contains(&self.sites.len());
        names
            && sites
            && self
                .sites
                .iter()
                .all(|s| s.offset < length && u64::from(s.semaphore) < length)
    }
}

/// Why there is no place to count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ElfError {
    /// The file gave an error.
    #[error("the file cannot be read: {0}")]
    Unreadable(String),
    /// No executable, or a damaged one.
    #[error("the file is not an executable that is understood: {0}")]
    Malformed(String),
    /// No such function.
    #[error(
        "the program has no symbol {0}; it is stripped or was built without it: install a build with symbols"
    )]
    NoSymbol(String),
    /// The symbol is not code.
    #[error("{0} is not code in this file")]
    NotCode(String),
    /// No such static probe.
    #[error(
        "the program has no static probe {0}; install a build with static probes (--enable-dtrace or the like)"
    )]
    NoProbe(String),
    /// The static probe cannot be counted.
    #[error("the static probe {0} has too many places, or a semaphore out of reach")]
    Probe(String),
    /// The tables are larger or more tangled than those of any known program.
    #[error("looking for {0} was given up: the file has more names or larger tables than are searched")]
    TooMuch(String),
}

/// Finds a place in a file.
///
/// # Errors
/// [`ElfError`].
pub fn find(file: &dyn ReadAt, wanted: &Wanted) -> Result<Found, ElfError> {
    let file = Bounded::new(file).map_err(|e| ElfError::Unreadable(e.to_string()))?;
    let outline = Outline::read(&file).map_err(ElfError::Malformed)?;
    let search = Search {
        file: &file,
        outline: &outline,
    };
    let (called, found) = match wanted {
        Wanted::Function(name) => (name.clone(), search.function(name)),
        Wanted::Containing(text) => (text.clone(), search.containing(text)),
        Wanted::StaticProbe(provider, name) => {
            (format!("{provider}:{name}"), search.static_probe(provider, name))
        }
    };
    match found {
        // The missing name may be in the unread part.
        Err(_) if file.is_used_up() => Err(ElfError::TooMuch(called)),
        found => found,
    }
}

/// Only graphic ASCII characters, because a workload chose the name and people see it.
fn is_plain(name: &[u8]) -> bool {
    name.len() <= NAME_MAX && name.iter().all(u8::is_ascii_graphic)
}

struct Search<'s> {
    file: &'s Bounded<'s>,
    outline: &'s Outline,
}

impl Search<'_> {
    fn function(&self, name: &str) -> Result<Found, ElfError> {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(ElfError::NoSymbol(name.to_owned()));
        }
        for mut symbols in self.outline.symbols(self.file) {
            if let Some(address) = exact(&mut symbols, name)? {
                return self.entry(name.to_owned(), address);
            }
        }
        // A stripped Go program keeps its names.
        let address = go::SECTIONS.iter().find_map(|section| {
            let (_, table) = self.outline.section(self.file, section)?;
            go::function(table, name, go::Beginning::of(self.outline))
        });
        self.entry(
            name.to_owned(),
            address.ok_or_else(|| ElfError::NoSymbol(name.to_owned()))?,
        )
    }

    fn containing(&self, text: &str) -> Result<Found, ElfError> {
        if text.is_empty() || text.len() > NAME_MAX {
            return Err(ElfError::NoSymbol(text.to_owned()));
        }
        for mut symbols in self.outline.symbols(self.file) {
            if let Some((name, address)) = shortest(&mut symbols, text)? {
                return self.entry(name, address);
            }
        }
        Err(ElfError::NoSymbol(text.to_owned()))
    }

    /// The place to count executions of a function.
    ///
    /// A function often begins with `endbr64`, which the kernel single-steps at ten times the cost of an emulated
    /// instruction (measured: 9.6 µs against 0.8 µs). If a `push` follows, the probe goes there. It runs equally often,
    /// because nothing jumps to a `push` in its own function's entry (each jump would grow the stack).
    fn entry(&self, name: String, address: u64) -> Result<Found, ElfError> {
        let Some(offset) = self.outline.file_offset(address, true) else {
            return Err(ElfError::NotCode(name));
        };
        let code = self.code(offset);
        let behind = code.strip_prefix(&[0xf3, 0x0f, 0x1e, 0xfa]).is_some_and(is_push);
        // Not measured on other processors: the higher cost is assumed.
        let site = if self.outline.x86_64 && behind {
            Site {
                offset: offset.saturating_add(4),
                semaphore: 0,
                cheap: true,
            }
        } else {
            Site {
                offset,
                semaphore: 0,
                cheap: self.outline.x86_64 && is_emulated(&code),
            }
        };
        Ok(Found {
            name,
            sites: vec![site],
        })
    }

    fn code(&self, offset: u64) -> Vec<u8> {
        let left = self.file.length().saturating_sub(offset).min(16);
        let size = usize::try_from(left).unwrap_or(0);
        self.file.read(offset, size).unwrap_or_default()
    }

    fn static_probe(&self, provider: &str, name: &str) -> Result<Found, ElfError> {
        let full = || format!("{provider}:{name}");
        let Some((_, mut notes)) = self.outline.section(self.file, ".note.stapsdt") else {
            return Err(ElfError::NoProbe(full()));
        };
        if notes.size() > NOTES_MAX {
            return Err(ElfError::Malformed("its probe notes are too large".to_owned()));
        }
        let base = self.outline.range(".stapsdt.base").map(|range| range.0);
        let mut sites = Vec::new();
        let mut at = 0;
        while let Some((size, note)) = note_at(&mut notes, at) {
            at += size;
            let Some(note) = note.as_deref().and_then(Note::parse) else {
                continue;
            };
            if note.provider != provider.as_bytes() || note.name != name.as_bytes() {
                continue;
            }
            // Prelinking moved the whole file after the notes were written.
            let moved = base.map_or(0, |b| b.wrapping_sub(note.base));
            let offset = self
                .outline
                .file_offset(note.address.wrapping_add(moved), true)
                .ok_or_else(|| ElfError::NotCode(full()))?;
            let semaphore = if note.semaphore == 0 {
                0
            } else {
                self.outline
                    .file_offset(note.semaphore.wrapping_add(moved), false)
                    .and_then(|o| u32::try_from(o).ok())
                    .ok_or_else(|| ElfError::Probe(full()))?
            };
            sites.push(Site {
                offset,
                semaphore,
                cheap: self.outline.x86_64 && is_emulated(&self.code(offset)),
            });
            if sites.len() > SITES_MAX {
                return Err(ElfError::Probe(full()));
            }
        }
        sites.sort_unstable();
        sites.dedup();
        if sites.is_empty() {
            return Err(ElfError::NoProbe(full()));
        }
        Ok(Found { name: full(), sites })
    }
}

fn exact(symbols: &mut Symbols<'_>, name: &str) -> Result<Option<u64>, ElfError> {
    // A symbol may also use the end of a longer name.
    let ended = [name.as_bytes(), b"\0"].concat();
    let too_much = || ElfError::TooMuch(name.to_owned());
    let places = symbols.names.positions(&ended, PLACES_MAX).ok_or_else(too_much)?;
    if places.is_empty() {
        return Ok(None);
    }
    let mut found = None;
    functions(&mut symbols.table, |function| {
        if places.binary_search(&u64::from(function.name)).is_ok() {
            found = Some(function.address);
        }
        found.is_none()
    })
    .ok_or_else(too_much)?;
    Ok(found)
}

struct Holder {
    /// Start of the name, and the last position of the text in it: a symbol may use any end that contains it.
    begin: u64,
    text: u64,
    end: u64,
}

/// The function with the shortest name that contains this text; of several, the first in the alphabet.
fn shortest(symbols: &mut Symbols<'_>, text: &str) -> Result<Option<(String, u64)>, ElfError> {
    let too_much = || ElfError::TooMuch(text.to_owned());
    let places = symbols
        .names
        .positions(text.as_bytes(), PLACES_MAX)
        .ok_or_else(too_much)?;
    let mut holders: Vec<Holder> = Vec::new();
    for place in places {
        let Some(holder) = holder(&mut symbols.names, place, text.len()) else {
            continue;
        };
        match holders.last_mut().filter(|last| last.end == holder.end) {
            Some(last) => last.text = holder.text,
            None => holders.push(holder),
        }
    }
    if holders.is_empty() {
        return Ok(None);
    }
    let Symbols { table, names } = symbols;
    let mut names = names.another();
    let mut best: Option<(String, u64)> = None;
    let mut consider = |function: FunctionSymbol| {
        let begin = u64::from(function.name);
        let after = holders.partition_point(|holder| holder.text < begin);
        let length = holders
            .get(after)
            .filter(|holder| holder.begin <= begin)
            .and_then(|holder| usize::try_from(holder.end - begin).ok());
        let length = length.filter(|l| best.as_ref().is_none_or(|(name, _)| *l <= name.len()));
        let name = length.and_then(|length| names.bytes(begin, length));
        if let Some(name) = name.filter(|name| is_plain(name)).map(String::from_utf8_lossy) {
            let better = |(best, _): &(String, u64)| (name.len(), &*name) < (best.len(), best.as_str());
            if best.as_ref().is_none_or(better) {
                best = Some((name.into_owned(), function.address));
            }
        }
        true
    };
    functions(table, &mut consider).ok_or_else(too_much)?;
    Ok(best)
}

/// The name around a text at this offset among all names. `None`: the name is too long.
fn holder(names: &mut Region<'_>, place: u64, length: usize) -> Option<Holder> {
    let from = place.saturating_sub(NAME_MAX as u64);
    let before = names.bytes(from, usize::try_from(place - from).ok()?)?;
    let begin = match memchr::memrchr(0, before) {
        Some(at) => from + at as u64 + 1,
        None => from,
    };
    let after = place.checked_add(length as u64)?;
    let end = memchr::memchr(0, names.up_to(after, NAME_MAX)?)?;
    Some(Holder {
        begin,
        text: place,
        end: after + end as u64,
    })
}

fn is_push(code: &[u8]) -> bool {
    matches!(code, [0x50..=0x57, ..] | [0x41, 0x50..=0x57, ..])
}

/// Instructions that Linux emulates under a uprobe on x86-64: push of a register, one-byte nop, jmp and jcc, direct
/// call (arch/x86/kernel/uprobes.c: `branch_setup_xol_ops` and `push_setup_xol_ops`).
fn is_emulated(code: &[u8]) -> bool {
    is_push(code)
        || matches!(
            code,
            [0x90, ..] | [0xe8, ..] | [0xe9, ..] | [0xeb, ..] | [0x70..=0x7f, ..]
        )
        || matches!(code, [0x0f, 0x80..=0x8f, ..])
}

/// A probe's note: its description, of kind 3 by `stapsdt` (SystemTap wiki, *UserSpaceProbeImplementation*).
#[derive(Debug, PartialEq, Eq)]
struct Note<'a> {
    address: u64,
    base: u64,
    semaphore: u64,
    provider: &'a [u8],
    name: &'a [u8],
}

impl<'a> Note<'a> {
    fn parse(description: &'a [u8]) -> Option<Self> {
        let (numbers, texts) = description.split_at_checked(24)?;
        let numbers = numbers.chunks_exact(8).filter_map(|number| number.first_chunk());
        let mut numbers = numbers.map(|number| u64::from_le_bytes(*number));
        let mut texts = texts.split(|&c| c == 0);
        Some(Self {
            address: numbers.next()?,
            base: numbers.next()?,
            semaphore: numbers.next()?,
            provider: texts.next()?,
            name: texts.next()?,
        })
    }
}

/// Length of the note at an offset, and its description if it is a probe's. `None`: no further note.
fn note_at(notes: &mut Region<'_>, at: u64) -> Option<(u64, Option<Vec<u8>>)> {
    let name = u64::from(notes.u32(at)?);
    let description = u64::from(notes.u32(at.checked_add(4)?)?);
    let kind = notes.u32(at.checked_add(8)?)?;
    // No overflow: the two are sums of 32-bit numbers.
    let begin = 12 + name.next_multiple_of(4);
    let size = begin + description.next_multiple_of(4);
    let ours = kind == 3 && name == 8 && notes.bytes(at.checked_add(12)?, 8)? == b"stapsdt\0";
    let length = usize::try_from(description)
        .ok()
        .filter(|length| ours && *length <= NOTE_MAX);
    let found = match length {
        Some(length) => Some(notes.bytes(at.checked_add(begin)?, length)?.to_vec()),
        None => None,
    };
    Some((size, found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf64::tests::{ADDRESS, CODE, Made, made, table};

    const SYMTAB: u32 = 2;
    const STRTAB: u32 = 3;
    const DYNSYM: u32 = 11;

    fn exact(name: &str) -> Wanted {
        Wanted::Function(name.to_owned())
    }

    fn containing(text: &str) -> Wanted {
        Wanted::Containing(text.to_owned())
    }

    fn look(file: &[u8], wanted: &Wanted) -> Result<Found, ElfError> {
        let found = find(&file, wanted);
        if let Ok(found) = &found {
            assert!(found.is_plausible(file.len() as u64), "{found:?}");
        }
        found
    }

    /// An executable with this code and these functions, in the table that `strip` leaves or in the full one.
    fn program(code: &[u8], kind: u32, names: &[u8], symbols: &[(u32, u64)]) -> Vec<u8> {
        let symbols: Vec<(u32, u64, u64)> = symbols.iter().map(|(n, a)| (*n, ADDRESS + a, 1)).collect();
        let table = Made {
            link: 1,
            ..Made::new(".symbols", kind, table(&symbols))
        };
        made(code, &[Made::new(".names", STRTAB, names.to_vec()), table])
    }

    #[test]
    fn a_function_is_found_by_its_whole_name() {
        for kind in [SYMTAB, DYNSYM] {
            // `end` is also the end of `the_end`, as linkers write it; `en` is nobody's.
            let file = program(
                &[0x55; 64],
                kind,
                b"\0the_end\0begin\0",
                &[(1, 0), (5, 8), (9, 16)],
            );
            for (name, at) in [("the_end", 0), ("end", 8), ("begin", 16)] {
                let found = look(&file, &exact(name)).unwrap();
                let site = Site {
                    offset: CODE + at,
                    semaphore: 0,
                    cheap: true,
                };
                assert_eq!((found.name.as_str(), found.sites), (name, vec![site]));
            }
            for nobody in ["en", "_end", "begi", "", "\0", &"x".repeat(NAME_MAX + 1)] {
                let refused = look(&file, &exact(nobody));
                assert_eq!(refused, Err(ElfError::NoSymbol(nobody.to_owned())));
            }
        }
        let outside = program(&[0x55; 8], SYMTAB, b"\0f\0", &[(1, 8)]);
        assert_eq!(
            look(&outside, &exact("f")),
            Err(ElfError::NotCode("f".to_owned()))
        );
    }

    #[test]
    fn the_shortest_name_with_a_text_is_taken_and_only_one_that_can_be_shown() {
        let names = b"\0_Z3xdispatch\0_Z1dispatchB\0_Z1dispatchA\0dispatch\xff\0a dispatch\0none\0";
        let at = |name: &[u8]| names.windows(name.len()).position(|w| w == name).unwrap() as u32;
        let symbols = [
            (at(b"_Z3x"), 0),
            (at(b"_Z1dispatchB"), 1),
            (at(b"_Z1dispatchA"), 2),
            (at(b"dispatch\xff"), 3),
            (at(b"a dis"), 4),
            (at(b"none"), 5),
        ];
        let file = program(&[0x55; 64], SYMTAB, names, &symbols);
        let found = look(&file, &containing("dispatch")).unwrap();
        assert_eq!(
            (found.name.as_str(), found.sites[0].offset),
            ("_Z1dispatchA", CODE + 2)
        );
        let found = look(&file, &containing("xdis")).unwrap();
        assert_eq!(found.name, "_Z3xdispatch");
        for nobody in ["dispatchC", "", "\0"] {
            assert!(
                matches!(look(&file, &containing(nobody)), Err(ElfError::NoSymbol(_))),
                "{nobody:?}"
            );
        }
        // A symbol may have the end of a name, as long as the text is in it.
        let file = program(
            &[0x55; 64],
            SYMTAB,
            b"\0aadispatch\0",
            &[(1, 0), (2, 1), (3, 2), (4, 3)],
        );
        assert_eq!(look(&file, &containing("dispatch")).unwrap().name, "dispatch");
        let longer = [&b"\0"[..], &b"x".repeat(NAME_MAX), b"dispatch\0"].concat();
        let file = program(&[0x55; 64], SYMTAB, &longer, &[(1, 0)]);
        assert!(
            look(&file, &containing("dispatch")).is_err(),
            "longer than names are"
        );
    }

    #[test]
    fn names_that_overlap_or_end_nowhere_are_no_names() {
        // Each symbol names all that follows, up to an end that does not come.
        let names = [&b"\0"[..], &b"main".repeat(4000)].concat();
        let symbols: Vec<(u32, u64)> = (1..16_000).map(|i| (i, 0)).collect();
        let file = program(&[0x55; 64], DYNSYM, &names, &symbols);
        assert!(matches!(look(&file, &exact("main")), Err(ElfError::NoSymbol(_))));
        assert!(matches!(
            look(&file, &containing("main")),
            Err(ElfError::NoSymbol(_))
        ));
        // One text more often than anybody writes it.
        let names = b"main\0".repeat(PLACES_MAX + 1);
        let file = program(&[0x55; 64], DYNSYM, &names, &[(5, 0)]);
        assert!(matches!(look(&file, &exact("main")), Err(ElfError::TooMuch(_))));
        assert!(matches!(
            look(&file, &containing("main")),
            Err(ElfError::TooMuch(_))
        ));
        let names = b"main\0".repeat(PLACES_MAX);
        let file = program(&[0x55; 64], DYNSYM, &names, &[(5, 0)]);
        assert!(look(&file, &exact("main")).is_ok() && look(&file, &containing("main")).is_ok());
    }

    #[test]
    fn a_probe_moves_from_endbr64_to_the_push_behind_it() {
        let at = |code: &[u8]| {
            let file = program(code, SYMTAB, b"\0f\0", &[(1, 0)]);
            let site = look(&file, &exact("f")).unwrap().sites[0];
            (site.offset - CODE, site.cheap)
        };
        assert_eq!(at(&[0xf3, 0x0f, 0x1e, 0xfa, 0x55]), (4, true));
        assert_eq!(at(&[0xf3, 0x0f, 0x1e, 0xfa, 0x41, 0x54]), (4, true));
        // A jump target behind it may be a loop head: stays at the entry.
        assert_eq!(at(&[0xf3, 0x0f, 0x1e, 0xfa, 0xe8]), (0, false));
        assert_eq!(at(&[0x55]), (0, true));
        let mut arm = program(&[0x55], SYMTAB, b"\0f\0", &[(1, 0)]);
        arm[18] = 183;
        assert!(!look(&arm, &exact("f")).unwrap().sites[0].cheap);
    }

    fn note(address: u64, base: u64, semaphore: u64, texts: &str) -> Vec<u8> {
        let mut d = Vec::new();
        for n in [address, base, semaphore] {
            d.extend(n.to_le_bytes());
        }
        d.extend(texts.bytes());
        let mut b = Vec::new();
        for n in [8u32, d.len() as u32, 3] {
            b.extend(n.to_le_bytes());
        }
        b.extend(b"stapsdt\0");
        b.extend(&d);
        b.resize(b.len().next_multiple_of(4), 0);
        b
    }

    fn with_notes(notes: Vec<u8>) -> Vec<u8> {
        let base = Made {
            address: 0x30,
            ..Made::new(".stapsdt.base", 1, vec![0])
        };
        made(&[0x90; 64], &[Made::new(".note.stapsdt", 7, notes), base])
    }

    #[test]
    fn static_probes_are_found_and_broken_notes_end_the_list() {
        let of = |name: &str| Wanted::StaticProbe("db".to_owned(), name.to_owned());
        let args = "db\0go\0-4@%eax\0";
        let mut notes = note(ADDRESS - 0x10, 0x20, 0x10_0000 - 0x10 + 8, args);
        notes.extend(note(ADDRESS, 0x20, 0, "other\0go\0\0"));
        notes.extend(note(ADDRESS - 8, 0x20, 0, args));
        let file = with_notes(notes.clone());
        let found = look(&file, &of("go")).unwrap();
        let site = |offset, semaphore| Site {
            offset,
            semaphore,
            cheap: true,
        };
        // All places were moved by 0x10 after the notes were written.
        assert_eq!(found.sites, [site(CODE, 8), site(CODE + 8, 0)]);
        assert!(matches!(look(&file, &of("gone")), Err(ElfError::NoProbe(_))));
        for at in 0..notes.len() {
            for value in [0, 0x7f, 0xff] {
                let mut broken = notes.clone();
                broken[at] = value;
                let _ = look(&with_notes(broken), &of("go"));
            }
            let _ = look(&with_notes(notes[..at].to_vec()), &of("go"));
        }
        let nowhere = with_notes(note(ADDRESS + 64, 0x30, 0, args));
        assert!(matches!(look(&nowhere, &of("go")), Err(ElfError::NotCode(_))));
        let in_code = with_notes(note(ADDRESS, 0x30, ADDRESS, args));
        assert!(matches!(look(&in_code, &of("go")), Err(ElfError::Probe(_))));
        let many: Vec<u8> = (0..SITES_MAX as u64 + 1)
            .flat_map(|i| note(ADDRESS + i, 0x30, 0, args))
            .collect();
        assert!(matches!(
            look(&with_notes(many), &of("go")),
            Err(ElfError::Probe(_))
        ));
        let large = with_notes(vec![0; NOTES_MAX as usize + 4]);
        assert!(matches!(look(&large, &of("go")), Err(ElfError::Malformed(_))));
    }

    #[test]
    fn costs_of_first_instructions() {
        for cheap in [
            &[0x55u8, 0x48][..],
            &[0x41, 0x57],
            &[0x90],
            &[0xe9, 0, 0, 0, 0],
            &[0x0f, 0x84],
        ] {
            assert!(is_emulated(cheap), "{cheap:x?}");
        }
        // endbr64, mov, sub rsp, ret, five-byte nop, nothing.
        for dear in [
            &[0xf3u8, 0x0f, 0x1e, 0xfa][..],
            &[0x48, 0x89],
            &[0x48, 0x83],
            &[0xc3],
            &[0x0f, 0x1f],
            &[],
        ] {
            assert!(!is_emulated(dear), "{dear:x?}");
        }
    }

    #[test]
    fn what_is_no_executable_is_refused() {
        for bytes in [
            &b""[..],
            b"#!/bin/sh\n",
            b"\x7fELF",
            &[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0],
        ] {
            assert!(matches!(look(bytes, &exact("main")), Err(ElfError::Malformed(_))));
        }
    }

    #[test]
    fn a_damaged_executable_never_panics() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        for at in (0..512usize).step_by(3) {
            let mut broken = own[..own.len().min(1 << 20)].to_vec();
            broken[at] ^= 0xff;
            let _ = look(&broken, &exact("main"));
            let _ = look(&broken, &containing("main"));
        }
    }

    #[test]
    fn functions_of_this_program_are_found_where_it_runs_them() {
        // Its own symbols, by a path, as a program of the machine.
        let own = std::fs::File::open("/proc/self/exe").unwrap();
        let found = find(&own, &exact("main")).unwrap();
        assert_eq!((found.name.as_str(), found.sites.len()), ("main", 1));
        let found = find(&own, &containing("functions_of_this_program_are_found")).unwrap();
        assert!(
            found.name.contains("functions_of_this_program_are_found"),
            "{found:?}"
        );
        assert!(matches!(
            find(&own, &exact("no such function")),
            Err(ElfError::NoSymbol(_))
        ));
    }
}
