//! No parser of what a workload can influence panics, hangs or grows, whatever the bytes: real inputs, damaged many times.
//! The same list goes to the coverage-guided fuzzer (`tools/fuzz`).

use homeostat_linux::parsers;

/// Damaged inputs that each parser is given.
const TRIES: u32 = 3_000;
/// Longest input that is damaged: enough for every form, and quick.
const SEED_BYTES_MAX: usize = 24 * 1024;

/// A small generator, so that a failure is found again (Steele, Vigna: SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % sides.max(1) as u64) as usize
    }
}

/// A real input for each parser: what `fuzz/seeds` has, or something of this process.
fn seed(name: &str) -> Vec<u8> {
    let own = |file: &str| std::fs::read(format!("/proc/self/{file}")).unwrap_or_default();
    match name {
        "stat" | "thread-stat" => own("stat"),
        "maps" | "code-mappings" | "mapped-files" => own("maps"),
        "mountinfo" | "schedstat" | "smaps" | "status" => own(name),
        "elf" => own("exe"),
        "progress" => {
            let mut file = vec![0; homeostat_progress::layout::file_size(2)];
            let header = homeostat_progress::layout::Header {
                slots: 2,
                pid: 7,
                start_ticks: 9,
                pid_namespace: 1,
                unit: "row".into(),
                name: "rows".into(),
            };
            let head = header.to_bytes();
            file[..head.len()].copy_from_slice(&head);
            file
        }
        // The test says that a parser has no real input.
        _ => std::fs::read(format!("{}/../../fuzz/seeds/{name}", env!("CARGO_MANIFEST_DIR")))
            .unwrap_or_default(),
    }
}

/// A copy with a few damages: bits, bytes, pieces cut out, doubled or put in, and numbers at their limits.
fn damaged(seed: &[u8], dice: &mut Dice) -> Vec<u8> {
    const TOKENS: &[&[u8]] = &[
        b"18446744073709551615",
        b"18446744073709551616",
        b"-1",
        b"0",
        b"\n",
        b"\0",
        b" ",
        b":",
        b"\xff\xfe",
        b"\xe2\x80\xae",
        b"1e999",
        b"0x",
        b"$-1\r\n",
        b"9999999999999999999999999999",
    ];
    let mut bytes = seed.to_vec();
    for _ in 0..=dice.roll(4) {
        let at = dice.roll(bytes.len() + 1);
        let end = (at + dice.roll(32)).min(bytes.len());
        match dice.roll(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << dice.roll(8),
            1 if at < bytes.len() => bytes[at] = dice.roll(256) as u8,
            2 => drop(bytes.drain(at..end)),
            3 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            4 => drop(bytes.splice(at..at, TOKENS[dice.roll(TOKENS.len())].iter().copied())),
            5 => drop(bytes.splice(at..end, TOKENS[dice.roll(TOKENS.len())].iter().copied())),
            _ => bytes.truncate(at),
        }
    }
    bytes
}

#[test]
fn no_damaged_input_is_more_than_refused() {
    let mut parsers = 0;
    for (number, (name, parse)) in parsers::all().enumerate() {
        let mut seed = seed(name);
        seed.truncate(SEED_BYTES_MAX);
        assert!(
            !seed.is_empty(),
            "the parser {name} has no real input: put one into fuzz/seeds"
        );
        parse(&seed);
        let mut dice = Dice(number as u64);
        for attempt in 0..TRIES {
            let input = damaged(&seed, &mut dice);
            let held = std::panic::catch_unwind(|| parse(&input));
            assert!(
                held.is_ok(),
                "{name}, attempt {attempt}: {:?}",
                String::from_utf8_lossy(&input)
            );
        }
        parsers += 1;
    }
    assert!(parsers > 20, "{parsers} parsers");
}
