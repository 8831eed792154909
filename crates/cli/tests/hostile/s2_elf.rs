//! S2: executable files that take memory and time without end from whoever reads their tables.
//!
//! Each is a real program, busy and named like a server whose functions are known. What follows its code are tables that the kernel
//! does not look at: millions of long names, probes without end, and tables larger than any memory.

use crate::plant::{ATTACKER, Options, Plant, Running, assert_unharmed};
use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SYMTAB: u32 = 2;
const STRTAB: u32 = 3;
const DYNSYM: u32 = 11;

/// Symbols of such a file. Source: the attack that made the daemon take 3 GiB had two million.
const MANY: u32 = 2_000_000;

/// Time for the daemon to look for meters of all of them. A debug build beside other tests takes some seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// Other users' programs that do the same without such tables.
const HONEST: u32 = 65534;

/// So many symbols of functions, by where their names stand.
fn symbols(name: impl Fn(u32) -> u32) -> Vec<u8> {
    (0..MANY)
        .flat_map(|i| {
            let mut symbol = [
                2, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
            ];
            symbol[..4].copy_from_slice(&name(i).to_le_bytes());
            symbol
        })
        .collect()
}

/// A table: its name, kind and size, and the bytes that it begins with; the rest is a hole.
struct Table(&'static str, u32, Vec<u8>, u64);

impl Table {
    fn full(name: &'static str, kind: u32, bytes: Vec<u8>) -> Self {
        let size = bytes.len() as u64;
        Self(name, kind, bytes, size)
    }
}

/// A copy of the shell with these tables instead of its own. Tables of symbols have their names in the first.
fn hostile(directory: &Path, name: &str, tables: &[Table]) -> PathBuf {
    let path = directory.join(format!("{name}.made"));
    let shell = std::fs::read("/bin/sh").unwrap();
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&shell).unwrap();
    let mut end = shell.len() as u64;
    let mut names = vec![0u8];
    let mut headers = vec![0u8; 64];
    let mut header = |name: usize, kind: u32, at: u64, size: u64| {
        headers.extend(u32::try_from(name).unwrap().to_le_bytes());
        headers.extend(kind.to_le_bytes());
        for n in [0, 0, at, size] {
            headers.extend(n.to_le_bytes());
        }
        headers.extend(1u32.to_le_bytes());
        headers.extend([0; 20]);
    };
    for Table(name, kind, bytes, size) in tables {
        file.seek(SeekFrom::Start(end)).unwrap();
        file.write_all(bytes).unwrap();
        header(names.len(), *kind, end, *size);
        names.extend(name.bytes().chain([0]));
        end += size;
    }
    header(0, STRTAB, end, names.len() as u64);
    file.seek(SeekFrom::Start(end)).unwrap();
    file.write_all(&names).unwrap();
    end += names.len() as u64;
    let count = u16::try_from(tables.len() + 2).unwrap();
    file.write_all(&headers).unwrap();
    file.seek(SeekFrom::Start(40)).unwrap();
    file.write_all(&end.to_le_bytes()).unwrap();
    file.seek(SeekFrom::Start(58)).unwrap();
    for n in [64, count, count - 1] {
        file.write_all(&n.to_le_bytes()).unwrap();
    }
    path
}

/// A copy that every user may execute. Another process makes it, so that no test that forks meanwhile has it open for writing.
fn installed(source: &Path, directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    let mut command = std::process::Command::new("install");
    let copied = command.args(["-m", "755"]).arg(source).arg(&path).status();
    assert!(copied.unwrap().success());
    path
}

/// The files, by the name of a program whose functions are known.
fn files() -> BTreeMap<&'static str, Vec<Table>> {
    let overlapping = |text: &str| [text.repeat(8_000_000 / text.len()).as_bytes(), b"\0"].concat();
    let huge = |name, kind| Table(name, kind, vec![1; 4096], 1 << 34);
    let note = [
        &[8u32, 36, 3].map(u32::to_le_bytes).concat()[..],
        b"stapsdt\0",
        &[0; 24],
        b"postgresql\0\0",
    ]
    .concat();
    BTreeMap::from([
        // 56 MB: each name is what is looked for, again and again, and up to 8 MB long.
        (
            "postgres",
            vec![
                Table::full(".dynstr", STRTAB, overlapping("ReadyForQuery")),
                Table::full(".dynsym", DYNSYM, symbols(|i| i * 4)),
                Table::full(".note.stapsdt", 7, note.repeat(4_000_000 / note.len())),
            ],
        ),
        // Each function has a short name, and that of one is the one that is looked for.
        (
            "redis-server",
            vec![
                Table::full(".strtab", STRTAB, b"\0readQueryFromClient\0x\0".to_vec()),
                Table::full(".symtab", SYMTAB, symbols(|_| 21)),
            ],
        ),
        // All of two million names have the text in them.
        (
            "mysqld",
            vec![
                Table::full(
                    ".strtab",
                    STRTAB,
                    "dispatch_command\0".repeat(1_000_000).into_bytes(),
                ),
                Table::full(".symtab", SYMTAB, symbols(|i| i * 8)),
            ],
        ),
        // Tables of 16 GiB each, nearly all of them a hole.
        (
            "nginx",
            vec![
                huge(".strtab", STRTAB),
                huge(".symtab", SYMTAB),
                huge(".eh_frame", 1),
                huge(".eh_frame_hdr", 1),
                huge(".gopclntab", 1),
            ],
        ),
        ("caddy", vec![huge(".gopclntab", 1)]),
    ])
}

#[test]
fn hostile_executables_take_no_memory_and_hold_nobody_up() {
    // Other programs with these names may run on this machine.
    let Some(mut plant) = Plant::start(&Options::touching(&["*/s2-elf/*"])) else {
        return;
    };
    let directory = plant.directory(0, "s2-elf");
    let busy = "while :; do :; done";
    let honest = installed(Path::new("/bin/sh"), &directory, "honest");
    let programs: Vec<PathBuf> = files()
        .iter()
        .map(|(name, tables)| {
            let made = hostile(&directory, name, tables);
            let program = installed(&made, &directory, name);
            std::fs::remove_file(made).unwrap();
            program
        })
        .collect();
    plant.begin();
    let start = |user, program: &Path| {
        let mut command = plant.as_user(user, ["nice", "-n", "19"]);
        Running::start(command.arg(program).args(["-c", busy]))
    };
    let mut running: Vec<Running> = programs.iter().map(|program| start(ATTACKER, program)).collect();
    running.push(start(HONEST, &honest));

    // It looks for meters of each of them, and of the honest one as well.
    let is_looked_at = |workload: &serde_json::Value, name: &str| {
        workload["name"].as_str().is_some_and(|n| n.contains(name))
            && workload["stage"].as_str().is_some_and(|stage| stage != "ignored")
    };
    let mut wanted: Vec<&str> = files().into_keys().collect();
    wanted.push("honest");
    plant
        .attacked
        .wait_for("all of them are looked at", PATIENCE, |status| {
            let workloads = status["workloads"].as_array().cloned().unwrap_or_default();
            wanted
                .iter()
                .all(|name| workloads.iter().any(|w| is_looked_at(w, name)))
        });
    std::thread::sleep(Duration::from_secs(5));
    for program in &mut running {
        assert!(program.lives(), "a file like that is a program that runs");
    }
    assert_unharmed(&plant.attacked, &plant.control);

    // A person who asks what could be counted is answered, too.
    let begun = Instant::now();
    for (program, name) in running.iter().zip(files().into_keys()) {
        let asked = plant
            .attacked
            .ask(&["meter", "list", &program.pid().to_string(), "--json"]);
        let text = String::from_utf8_lossy(&asked.stdout).into_owned();
        assert!(
            text.contains("uprobe:"),
            "{name}: {text}{}",
            String::from_utf8_lossy(&asked.stderr)
        );
    }
    println!("answered after {:?}", begun.elapsed());
    plant.attacked.assert_restores_and_restarts();
    println!(
        "late by {:?} (control {:?}), {} MiB (control {} MiB)",
        plant.attacked.lateness(),
        plant.control.lateness(),
        plant.attacked.resident_max() >> 20,
        plant.control.resident_max() >> 20
    );
}
