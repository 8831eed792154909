//! No parser of what a workload can influence panics, hangs or grows, whatever the bytes: real inputs, damaged many times.
//! The same list goes to the coverage-guided fuzzer (`tools/fuzz`).

use homeostat_linux::parsers;
use std::fmt::Write as _;

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

/// A real input for each parser.
fn seed(name: &str) -> Vec<u8> {
    let own = |file: &str| std::fs::read(format!("/proc/self/{file}")).unwrap_or_default();
    match name {
        "environment" => b"HOMEOSTAT=never\0HOMEOSTAT_STRATEGIES=large_pages=off,prefetch=on\0PATH=/bin\0".to_vec(),
        "cgroup" => b"12:memory:/docker/0123456789abcdef/x\n1:name=systemd:/a\n0::/system.slice/redis-server.service\n".to_vec(),
        "stat" | "thread-stat" => own("stat"),
        "schedstat" => own("schedstat"),
        "maps" | "maps-of-code" | "code-mappings" => own("maps"),
        "smaps" => own("smaps"),
        "status" => own("status"),
        "numa-maps" => b"7f00 default anon=3 dirty=3 active=0 N0=1 N1=2 kernelpagesize_kB=4\n7f10 bind:0-1 file=/lib/x\\040y mapped=7 N0=7\n".to_vec(),
        "sched" => b"name (1, #threads: 1)\nse.nr_migrations : 12\nnr_switches : 3\n".to_vec(),
        "process-io" | "io" => b"rchar: 1\nread_bytes: 4096\npos:\t12\nvoluntary_ctxt_switches:\t5\n".to_vec(),
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
        "progress-file-name" => b"12-34567".to_vec(),
        "elf" => own("exe"),
        // The header of the unwinder's table with two functions; push rbx, a loop around a call, ret.
        "code-functions" => [&[1u8, 0x1b, 3, 0x3b, 0, 0, 0, 0, 2, 0, 0, 0][..], &[0x10; 16]].concat(),
        "code" => vec![0x53, 0xe8, 0, 0, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xff, 0xcb, 0x75, 0xf3, 0x5b, 0xc3],
        "memcached" => b"STAT cmd_get 12\r\nSTAT cmd_set 1\r\nEND\r\n".to_vec(),
        "prometheus" => b"orders_total{shop=\"a\"}\n# TYPE orders_total counter\norders_total{shop=\"a\",x=\"\\\"\"} 3\n".to_vec(),
        "prometheus-chunks" => b"5\r\nhello\r\n0\r\n\r\n".to_vec(),
        "redis" => {
            let info = "# Stats\r\ntotal_commands_processed:123\r\n";
            let mut answer = String::new();
            let _ = write!(answer, "${}\r\n{info}\r\n", info.len());
            answer.into_bytes()
        }
        "tcp-listeners" => b"  sl  local_address rem_address   st\n   0: 0100007F:18EB 00000000:0000 0A 0:0 0:0 0 0 0 12345 1\n".to_vec(),
        "unix-listeners" => b"Num RefCount Protocol Flags Type St Inode Path\n0: 2 0 00010000 0001 01 12345 /run/x\n".to_vec(),
        "sockets" => {
            let mut message = vec![0; 128];
            message[0] = 128;
            message[4] = 20;
            message
        }
        // The test says that the parser has no real input here.
        _ => Vec::new(),
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
        assert!(!seed.is_empty(), "the parser {name} has no real input here");
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
