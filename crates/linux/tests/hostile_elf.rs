//! Executable files that a hostile user made: what is asked of them takes little memory and ends.
//!
//! One test in a process of its own, because the kernel counts the peak of a whole process.
#![allow(clippy::unwrap_used, reason = "helpers of a test")]

use homeostat_linux::parsers;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Most memory that all questions about a file may take.
const MEMORY_MAX_KIB: u64 = 24 * 1024;
/// Longest time for them, unoptimised and on a busy machine. Optimised they take about a second.
const TIME_MAX: Duration = Duration::from_secs(100);

const SYMTAB: u32 = 2;
const STRTAB: u32 = 3;
const NOTE: u32 = 7;
const DYNSYM: u32 = 11;
const PROGBITS: u32 = 1;

/// A section: name, kind, number of the section that it refers to, flags, and where it lies.
struct Section {
    name: &'static str,
    kind: u32,
    link: u32,
    flags: u64,
    offset: u64,
    size: u64,
}

fn section(name: &'static str, kind: u32, link: u32, (offset, size): (u64, u64)) -> Section {
    Section {
        name,
        kind,
        link,
        flags: 0,
        offset,
        size,
    }
}

/// A file whose beginning is a header and one segment of code, and whose end is a list of sections.
struct Made {
    file: File,
    end: u64,
}

impl Made {
    fn new() -> Self {
        Self {
            file: tempfile::tempfile().unwrap(),
            end: 4096,
        }
    }

    fn add(&mut self, bytes: &[u8]) -> (u64, u64) {
        let at = self.end;
        self.file.write_all_at(bytes, at).unwrap();
        self.end += bytes.len() as u64;
        (at, bytes.len() as u64)
    }

    fn hole(&mut self, size: u64) -> (u64, u64) {
        let at = self.end;
        self.end += size;
        (at, size)
    }

    fn finish(mut self, sections: &[Section]) -> File {
        let mut names = vec![0u8];
        let mut headers = vec![0u8; 64];
        for s in sections {
            headers.extend((names.len() as u32).to_le_bytes());
            headers.extend(s.kind.to_le_bytes());
            for n in [s.flags, 0x40_0000, s.offset, s.size] {
                headers.extend(n.to_le_bytes());
            }
            headers.extend(s.link.to_le_bytes());
            headers.extend([0; 20]);
            names.extend(s.name.bytes().chain([0]));
        }
        let (at, size) = self.add(&names);
        headers.extend([0, 0, 0, 0, 3, 0, 0, 0]);
        for n in [0, 0, at, size, 0, 0, 0] {
            headers.extend(n.to_le_bytes());
        }
        let (headers_at, _) = self.add(&headers);
        let count = sections.len() as u16 + 2;
        let mut head = vec![0u8; 120];
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[0x7f, b'E', b'L', b'F', 2, 1]);
        put(18, &62u16.to_le_bytes());
        put(32, &64u64.to_le_bytes());
        put(40, &headers_at.to_le_bytes());
        for (at, n) in [(54, 56u16), (56, 1), (58, 64), (60, count), (62, count - 1)] {
            put(at, &n.to_le_bytes());
        }
        // One loaded piece that is the whole file, as code.
        put(64, &[1, 0, 0, 0, 5]);
        put(80, &0x40_0000u64.to_le_bytes());
        put(96, &self.end.to_le_bytes());
        self.file.write_all_at(&head, 0).unwrap();
        self.file
    }
}

/// So many symbols of functions; `name` says where the name of each stands.
fn symbols(count: u32, name: impl Fn(u32) -> u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count as usize * 24);
    for i in 0..count {
        bytes.extend(name(i).to_le_bytes());
        bytes.extend([2, 0, 1, 0]);
        bytes.extend((0x40_0000 + u64::from(i)).to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
    }
    bytes
}

const MANY: u32 = 2_000_000;

/// Two million names that overlap, so that each is up to eight megabytes long, in the table that survives `strip`.
fn long_names() -> File {
    let mut made = Made::new();
    let mut names = b"main".repeat(2_000_000);
    names.push(0);
    let names = made.add(&names);
    let table = made.add(&symbols(MANY, |i| i * 4));
    made.finish(&[
        section(".dynstr", STRTAB, 0, names),
        section(".dynsym", DYNSYM, 1, table),
    ])
}

/// The same in the full table, and no name ends.
fn endless_names() -> File {
    let mut made = Made::new();
    let names = made.add(&b"main".repeat(2_000_000));
    let table = made.add(&symbols(MANY, |i| i));
    made.finish(&[
        section(".strtab", STRTAB, 0, names),
        section(".symtab", SYMTAB, 1, table),
    ])
}

/// Two million names, and each has what is looked for.
fn matching_names() -> File {
    let mut made = Made::new();
    let names: Vec<u8> = (0..MANY)
        .flat_map(|i| format!("{i:07}main\0").into_bytes())
        .collect();
    let names = made.add(&names);
    let table = made.add(&symbols(MANY, |i| i * 12));
    made.finish(&[
        section(".strtab", STRTAB, 0, names),
        section(".symtab", SYMTAB, 1, table),
    ])
}

/// As many matches as are searched, and all symbols have names of one length with different texts.
fn tied_names() -> File {
    let mut made = Made::new();
    let names: Vec<u8> = (0..16_000)
        .rev()
        .flat_map(|i| format!("{i:07}main\0").into_bytes())
        .collect();
    let names = made.add(&names);
    // Far from each other, so that each name lies in another window.
    let table = made.add(&symbols(MANY, |i| (i.wrapping_mul(7919) % 16_000) * 12));
    made.finish(&[
        section(".strtab", STRTAB, 0, names),
        section(".symtab", SYMTAB, 1, table),
    ])
}

/// Tables of many gigabytes that lie over each other, in a file with holes, and sections that refer to each other in a circle.
fn holes_that_overlap() -> File {
    let mut made = Made::new();
    let hole = made.hole(1 << 40);
    let mut all = vec![
        section(".symtab", SYMTAB, 2, hole),
        section(".strtab", STRTAB, 1, hole),
        section(".dynsym", DYNSYM, 2, (hole.0 + 8, hole.1 - 8)),
        section(".note.stapsdt", NOTE, 3, hole),
        section(".gopclntab", PROGBITS, 5, hole),
        section(".eh_frame", PROGBITS, 6, hole),
        section(".eh_frame_hdr", PROGBITS, 6, hole),
    ];
    for _ in 0..4000 {
        all.push(section(".symtab", SYMTAB, 2, hole));
    }
    made.finish(&all)
}

/// Sizes that lie: larger than the file, up to the end of all numbers, and half a record.
fn sizes_that_lie() -> Vec<File> {
    [u64::MAX, u64::MAX - 4096, 1 << 62, 1 << 33, 23, 25, 1]
        .into_iter()
        .map(|size| {
            let mut made = Made::new();
            let (at, _) = made.add(&symbols(10, |i| i));
            let lie = (at, size);
            made.finish(&[
                section(".symtab", SYMTAB, 2, lie),
                section(".strtab", STRTAB, 1, lie),
                section(".note.stapsdt", NOTE, 0, lie),
                section(".gopclntab", PROGBITS, 0, lie),
                section(".eh_frame", PROGBITS, 0, lie),
                section(".eh_frame_hdr", PROGBITS, 0, lie),
            ])
        })
        .collect()
}

/// Megabytes of notes, each as short as a note can be, or one that claims four gigabytes.
fn notes() -> Vec<File> {
    let short: Vec<u8> = [8u32, 26, 3].into_iter().flat_map(u32::to_le_bytes).collect();
    let short = [&short[..], b"stapsdt\0", &[0; 24], b"a\0\0\0"].concat();
    let long: Vec<u8> = [8u32, u32::MAX, 3]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    [
        short.repeat(80_000),
        [&long[..], b"stapsdt\0"].concat().repeat(100),
        vec![0; 4 << 20],
        vec![0; 64 << 20],
    ]
    .into_iter()
    .map(|notes| {
        let mut made = Made::new();
        let notes = made.add(&notes);
        made.finish(&[section(".note.stapsdt", NOTE, 0, notes)])
    })
    .collect()
}

/// A table of Go's functions whose two million descriptions and names lie far from each other.
fn go_table() -> File {
    let mut made = Made::new();
    let mut data = vec![0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8];
    for n in [u64::MAX, 0, 0x40_0000, 72, 0, 0, 0, 4096] {
        data.extend(n.to_le_bytes());
    }
    data.extend(b"main\0");
    data.resize(4096, 0);
    for i in 0..MANY {
        data.extend(i.to_le_bytes());
        data.extend((i.wrapping_mul(2_654_435_761) % (16 * MANY)).to_le_bytes());
    }
    data.resize(data.len() + 16 * MANY as usize, 0);
    let data = made.add(&data);
    made.finish(&[section(".gopclntab", PROGBITS, 0, data)])
}

/// Two million frames, each with a kind of its own, in no order.
fn frames() -> File {
    let mut made = Made::new();
    let mut frames = Vec::new();
    for i in 0..MANY {
        // A kind, and a description that refers to the kind of another.
        for n in [12u32, 0, 0x0052_7a01, 0x1b10_7801] {
            frames.extend(n.to_le_bytes());
        }
        let at = 32 * i + 20;
        let other = 32 * (i.wrapping_mul(7919) % (i + 1));
        for n in [12u32, at - other, i, 1] {
            frames.extend(n.to_le_bytes());
        }
    }
    let frames = made.add(&frames);
    let mut header = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
    header.extend(MANY.to_le_bytes());
    for i in 0..MANY {
        header.extend(i.to_le_bytes());
        header.extend((32 * (i.wrapping_mul(7919) % MANY) + 16).to_le_bytes());
    }
    let header = made.add(&header);
    made.finish(&[
        section(".eh_frame", PROGBITS, 0, frames),
        section(".eh_frame_hdr", PROGBITS, 0, header),
    ])
}

/// Debug sections and tables that say they are compressed: a bomb that nobody unpacks.
fn packed() -> File {
    let mut made = Made::new();
    let mut bomb: Vec<u8> = [1u64, u64::MAX, 1]
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .collect();
    bomb.resize(1 << 20, 0x78);
    let bomb = made.add(&bomb);
    let mut all = [
        section(".debug_info", PROGBITS, 0, bomb),
        section(".zdebug_line", PROGBITS, 0, bomb),
        section(".symtab", SYMTAB, 4, bomb),
        section(".strtab", STRTAB, 3, bomb),
        section(".note.stapsdt", NOTE, 0, bomb),
    ];
    for section in &mut all {
        section.flags = 0x800;
    }
    made.finish(&all)
}

/// The most memory that this process had since [`forget_peak`], in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}

#[test]
fn a_hostile_executable_takes_little_memory_and_ends() {
    let mut files: Vec<(&str, File)> = vec![
        ("long names", long_names()),
        ("endless names", endless_names()),
        ("matching names", matching_names()),
        ("tied names", tied_names()),
        ("holes that overlap", holes_that_overlap()),
        ("a table of Go", go_table()),
        ("frames", frames()),
        ("packed", packed()),
    ];
    files.extend(sizes_that_lie().into_iter().map(|file| ("sizes that lie", file)));
    files.extend(notes().into_iter().map(|file| ("notes", file)));
    // What making them took is given back.
    for (name, file) in files {
        forget_peak();
        let before = peak();
        let begun = Instant::now();
        parsers::executable(&file);
        let (took, grew) = (begun.elapsed(), peak().saturating_sub(before));
        println!("{name}: {grew} KiB, {took:?}");
        assert!(grew <= MEMORY_MAX_KIB, "{name}: {grew} KiB");
        assert!(took <= TIME_MAX, "{name}: {took:?}");
    }
}
