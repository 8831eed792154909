//! The programs as a person runs them: what they print, what they publish, how they end and what they leave behind.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

const LATENCY: &str = env!("CARGO_BIN_EXE_latency");
const MEMORY_WRITER: &str = env!("CARGO_BIN_EXE_memory-writer");
const FILE_READER: &str = env!("CARGO_BIN_EXE_file-reader");
const FILE_WORKER: &str = env!("CARGO_BIN_EXE_file-worker");
const SPARSE: &str = env!("CARGO_BIN_EXE_sparse");
const SHORT_LIVED: &str = env!("CARGO_BIN_EXE_short-lived");
const COLLAPSE: &str = env!("CARGO_BIN_EXE_collapse");

const LOADS_PER_TRANSACTION: u64 = 16_777_216;

/// A running program that is killed if the test forgets it or fails.
struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
    progress: tempfile::TempDir,
}

impl Running {
    fn start(program: &str, arguments: &[&str]) -> Self {
        let progress = tempfile::tempdir().unwrap();
        let mut child = Command::new(program)
            .args(arguments)
            .env("HOMEOSTAT_PROGRESS_DIR", progress.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out, progress }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line
    }

    /// Lines until one begins with this word.
    fn until(&mut self, word: &str) -> BTreeMap<String, String> {
        loop {
            let line = self.line();
            assert!(!line.is_empty(), "the program ended before it said {word}");
            if line.split(' ').next() == Some(word) {
                return words(&line);
            }
        }
    }

    fn terminate(&mut self) -> (String, ExitStatus) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        self.rest()
    }

    fn rest(&mut self) -> (String, ExitStatus) {
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap())
    }

    fn progress_files(&self) -> Vec<std::path::PathBuf> {
        std::fs::read_dir(self.progress.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has usually ended already.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn words(line: &str) -> BTreeMap<String, String> {
    line.split_whitespace()
        .filter_map(|word| word.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn number(words: &BTreeMap<String, String>, key: &str) -> f64 {
    words
        .get(key)
        .unwrap_or_else(|| panic!("{key} is missing in {words:?}"))
        .parse()
        .unwrap()
}

fn published(path: &Path) -> (u64, String) {
    let bytes = std::fs::read(path).unwrap();
    let header = homeostat_progress::layout::Header::parse(&bytes, bytes.len() as u64).unwrap();
    let total = (0..header.slots)
        .map(|slot| {
            let at = homeostat_progress::layout::HEADER_SIZE + slot * homeostat_progress::layout::SLOT_STRIDE;
            u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
        })
        .sum();
    (total, header.unit)
}

#[test]
fn latency_ends_after_the_transactions_asked_for_and_counts_them() {
    for shared in ["anon", "memfd", "sysv"] {
        let mut latency = Running::start(
            LATENCY,
            &[
                "2",
                "4096",
                "2",
                "3600",
                "--transactions",
                "1",
                "--order",
                "random",
                "--shared",
                shared,
            ],
        );
        let (rest, status) = latency.rest();
        assert!(status.success());
        let summary = words(rest.lines().last().unwrap());
        let loads = number(&summary, "work") as u64;
        // Each of the two threads may be one batch of 4,096 loads beyond the goal.
        assert!(
            (LOADS_PER_TRANSACTION..=LOADS_PER_TRANSACTION + 2 * 4096).contains(&loads),
            "{rest}"
        );
        assert!(number(&summary, "latency_ns") > 0.0);
        assert!(number(&summary, "tps") > 0.0);
    }
}

#[test]
fn progress_is_published_while_it_runs_and_withdrawn_at_the_end() {
    let programs: [(&str, &[&str], &str); 4] = [
        (LATENCY, &["2", "64", "2", "3600", "--report", "1"], "load"),
        (
            MEMORY_WRITER,
            &["4", "3600", "--threads", "2", "--report", "1"],
            "byte",
        ),
        (SPARSE, &["64", "3600", "--report", "1"], "touch"),
        (SHORT_LIVED, &["3600", "--rate", "0", "--report", "1"], "process"),
    ];
    for (program, arguments, unit) in programs {
        let mut running = Running::start(program, arguments);
        assert_eq!(running.until("ready")["unit"], unit);
        let files = running.progress_files();
        assert_eq!(files.len(), 1, "{program}");
        let report = running.until("report");
        let (first, published_unit) = published(&files[0]);
        assert_eq!(published_unit, unit);
        assert!(
            first >= number(&report, "work") as u64,
            "{program}: {first} {report:?}"
        );
        running.until("report");
        assert!(published(&files[0]).0 > first, "{program} goes on counting");

        let (rest, status) = running.terminate();
        assert!(status.success(), "{program}");
        let summary = words(rest.lines().last().unwrap());
        assert!(rest.lines().last().unwrap().starts_with("summary "), "{rest}");
        assert!(number(&summary, "work") as u64 > first);
        assert_eq!(
            running.progress_files(),
            Vec::<std::path::PathBuf>::new(),
            "{program}"
        );
    }
}

#[test]
fn a_program_that_cannot_publish_runs_all_the_same() {
    let output = Command::new(LATENCY)
        .args(["2", "4096", "1", "3600", "--transactions", "1"])
        .env("HOMEOSTAT_PROGRESS_DIR", "/proc/no/such/place")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("progress is not published"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("transactions=1.0"));
}

#[test]
fn the_duty_is_a_share_of_cpu_time() {
    let mut latency = Running::start(LATENCY, &["4", "64", "1", "2", "--duty", "10"]);
    let (rest, status) = latency.rest();
    assert!(status.success());
    let summary = words(rest.lines().last().unwrap());
    let share = number(&summary, "cpu_s") / number(&summary, "seconds");
    // A busy machine makes it less, nothing makes it much more.
    assert!(share > 0.0 && share < 0.2, "{rest}");
}

#[test]
fn programs_that_pause_work_for_a_tenth_of_a_second_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("index");
    let path = file.to_str().unwrap();
    let programs: [(&str, &[&str]); 2] = [
        (MEMORY_WRITER, &["2", "2", "--pause", "900"]),
        (FILE_WORKER, &["2", "2", "--pause", "900", "--file", path]),
    ];
    for (program, arguments) in programs {
        let mut running = Running::start(program, arguments);
        let (rest, status) = running.rest();
        assert!(status.success(), "{program}");
        let summary = words(rest.lines().last().unwrap());
        assert!(number(&summary, "work") > 0.0, "{program}: {rest}");
        let share = number(&summary, "cpu_s") / number(&summary, "seconds");
        // Two bursts of 100 ms in two seconds. A busy machine makes it less, nothing makes it much more.
        assert!(share > 0.0 && share < 0.25, "{program}: {rest}");
    }
}

#[test]
fn impossible_arguments_are_refused_with_a_reason() {
    let cases: [(&str, &[&str], &str); 8] = [
        (LATENCY, &["1", "12", "1", "1"], "multiple of 8"),
        (LATENCY, &["0", "64", "1", "1"], "invalid value"),
        (LATENCY, &["1", "64", "257", "1"], "invalid value"),
        (
            LATENCY,
            &["1", "64", "1", "1", "--huge", "--nohuge"],
            "cannot be used with",
        ),
        (
            LATENCY,
            &["99999999999999", "64", "1", "1"],
            "not a possible size",
        ),
        (MEMORY_WRITER, &["1", "1", "--duty", "0"], "invalid value"),
        (MEMORY_WRITER, &["1", "1", "--pause", "0"], "invalid value"),
        (COLLAPSE, &["2147483647", "on"], "cannot find process"),
    ];
    for (program, arguments, reason) in cases {
        let output = Command::new(program).args(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{program} {arguments:?}");
        assert!(error.contains(reason), "{program} {arguments:?}: {error}");
    }
}

#[test]
fn the_file_reader_removes_the_file_it_made_and_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let made = directory.path().join("made");
    let mut running = Running::start(
        FILE_READER,
        &["2", "3600", "--file", made.to_str().unwrap(), "--report", "1"],
    );
    running.until("ready");
    assert_eq!(std::fs::metadata(&made).unwrap().len(), 2 * 1024 * 1024);
    // More than the file has: it is read over and over.
    assert!(number(&running.until("report"), "mib") > 2.0);
    assert!(running.terminate().1.success());
    assert!(!made.exists());

    let found = directory.path().join("found");
    std::fs::write(&found, "content").unwrap();
    let mut running = Running::start(
        FILE_READER,
        &["2", "3600", "--file", found.to_str().unwrap(), "--report", "1"],
    );
    assert!(number(&running.until("report"), "work") > 7.0);
    assert!(running.terminate().1.success());
    assert_eq!(std::fs::read_to_string(&found).unwrap(), "content");

    std::fs::write(&found, "").unwrap();
    let output = Command::new(FILE_READER)
        .args(["2", "1", "--file", found.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("is empty"));
}

#[test]
fn file_worker_touches_its_file_both_ways_and_leaves_none_behind() {
    let directory = tempfile::tempdir().unwrap();
    for by in ["mapping", "pread"] {
        let made = directory.path().join(by);
        let mut running = Running::start(
            FILE_WORKER,
            &[
                "2",
                "3600",
                "--file",
                made.to_str().unwrap(),
                "--by",
                by,
                "--report",
                "1",
            ],
        );
        running.until("ready");
        let report = running.until("report");
        assert!(number(&report, "work") > 1000.0, "{by}: {report:?}");
        let files = running.progress_files();
        let (touches, unit) = published(&files[0]);
        assert!(
            touches as f64 >= number(&report, "work") && unit == "touch",
            "{by}: {touches} {unit}"
        );
        assert!(running.terminate().1.success(), "{by}");
        assert!(!made.exists(), "{by}");
    }
    let short = directory.path().join("short");
    std::fs::write(&short, "content").unwrap();
    let output = Command::new(FILE_WORKER)
        .args(["2", "1", "--file", short.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("less than 2 MiB"));
    assert_eq!(std::fs::read_to_string(&short).unwrap(), "content");
}

#[test]
fn sparse_uses_a_512th_of_what_it_reserves() {
    let mut running = Running::start(SPARSE, &["4096", "3600", "--report", "1"]);
    let report = running.until("report");
    assert!((number(&report, "used_mib") - 8.0).abs() < 0.05);
    let kib = |field: &str| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", running.child.id())).unwrap();
        status
            .lines()
            .find(|line| line.starts_with(field))
            .unwrap()
            .split_whitespace()
            .nth(1)
            .unwrap()
            .parse()
            .unwrap()
    };
    assert!(kib("VmSize:") > 4096 * 1024);
    let always = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if always.contains("[always]") {
        eprintln!("not checked: with transparent huge pages everywhere, sparse memory is not sparse");
    } else {
        assert!(kib("VmRSS:") < 64 * 1024, "{} KiB", kib("VmRSS:"));
    }
}

#[test]
fn collapse_converts_a_running_program_and_splits_it_again() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not checked: advice to another process needs root");
        return;
    }
    for (shared, kinds) in [
        ("anon", "AnonHugePages"),
        ("memfd", "ShmemPmdMapped"),
        ("sysv", "ShmemPmdMapped"),
    ] {
        let mut running = Running::start(
            LATENCY,
            &["32", "64", "1", "3600", "--shared", shared, "--duty", "20"],
        );
        running.until("ready");
        let pid = running.child.id().to_string();
        let collapse = |state: &str| {
            let output = Command::new(COLLAPSE).args([&pid, state]).output().unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            words(&String::from_utf8(output.stdout).unwrap())
        };
        let on = collapse("on");
        assert!(number(&on, "blocks") >= 15.0, "{shared}: {on:?}");
        // A block may be in use at every try; one of sixteen is left for that.
        assert!(number(&on, "large_kib") >= 15.0 * 2048.0, "{shared}: {on:?}");
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find(|line| line.starts_with(kinds)).unwrap();
        assert!(
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >= 15 * 2048,
            "{shared}: {line}"
        );
        let off = collapse("off");
        assert!(
            number(&off, "large_kib_before") >= 15.0 * 2048.0,
            "{shared}: {off:?}"
        );
        assert!(number(&off, "large_kib") <= 2048.0, "{shared}: {off:?}");
        assert!(running.terminate().1.success());
    }
}

#[test]
fn collapse_leaves_memory_alone_that_refused_large_pages() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not checked: advice to another process needs root");
        return;
    }
    let mut running = Running::start(LATENCY, &["16", "64", "1", "3600", "--nohuge", "--duty", "20"]);
    running.until("ready");
    let output = Command::new(COLLAPSE)
        .args([&running.child.id().to_string(), "on"])
        .output()
        .unwrap();
    let line = words(&String::from_utf8(output.stdout).unwrap());
    assert!(number(&line, "large_kib") < 16.0 * 1024.0, "{line:?}");
    assert!(
        number(&line, "blocks") <= 1.0,
        "only what the program has besides: {line:?}"
    );
    assert!(running.terminate().1.success());
}

#[test]
fn map_lookup_publishes_its_lookups_in_the_layout_of_the_progress_crate() {
    let classes = tempfile::tempdir().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/java/MapLookup.java");
    let compiled = Command::new("javac")
        .args(["-d", classes.path().to_str().unwrap(), source])
        .status();
    let Ok(compiled) = compiled else {
        eprintln!("not checked: there is no javac on this machine");
        return;
    };
    assert!(compiled.success());
    let java = [
        "-XX:+UseSerialGC",
        "-Xmx64m",
        "-cp",
        classes.path().to_str().unwrap(),
        "MapLookup",
    ];
    let mut running = Running::start(
        "java",
        &[&java[..], &["1000", "3600", "--duty", "20", "--report", "1"]].concat(),
    );
    running.until("ready");
    let files = running.progress_files();
    assert_eq!(files.len(), 1);
    assert_eq!(
        files[0].file_name().unwrap().to_str().unwrap().split('-').next(),
        Some(running.child.id().to_string().as_str())
    );
    let report = running.until("report");
    let (first, unit) = published(&files[0]);
    assert_eq!(unit, "lookup");
    assert!(first >= number(&report, "lookups") as u64);
    running.until("report");
    assert!(published(&files[0]).0 > first);
    let (rest, _terminated) = running.terminate();
    assert!(
        number(&words(rest.lines().last().unwrap()), "checksum") > 0.0,
        "{rest}"
    );
    assert_eq!(running.progress_files(), Vec::<std::path::PathBuf>::new());
}
