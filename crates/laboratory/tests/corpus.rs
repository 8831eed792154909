//! The replay corpus: what the engine answers to events of real programs, and on machines of the laboratory.
//!
//! `fixtures/corpus` holds recordings of real programs without their answers (tools/record-corpus), and in `answers.txt` a hash of
//! all commands for each recording and each machine. A commit that restructures or renames must leave every hash as it is. A commit
//! that changes decisions on purpose lists the difference: dump the commands before and after, compare the two directories, and
//! answer again.
//!
//! * `make replay` answers everything; `make test` all recordings and a sample of the machines.
//! * `HOMEOSTAT_CORPUS_DUMP=DIRECTORY` writes the commands, one a line, into a file for each recording and machine.
//! * `HOMEOSTAT_CORPUS_MACHINE=NUMBER` has `make replay` answer one machine only.
//! * `HOMEOSTAT_UPDATE_CORPUS=1` writes the hashes of what was answered into `answers.txt`.
//!
//! Commands are compared in a canonical form: sentences for people are left out, and names have the form that they had when the
//! corpus was recorded (`names.toml`: recorded name = today's name).
#![expect(clippy::unwrap_used, reason = "a test")]

use homeostat_engine::Command;
use homeostat_laboratory::run::{Arm, Laboratory};
use homeostat_laboratory::swarm::{self, Options};
use homeostat_model::Bytes;
use homeostat_runtime::{Recorder, recording};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Machines of the laboratory.
const MACHINES: u64 = 500;
/// Every so many of them are in the sample.
const SAMPLE_EVERY: u64 = 25;
/// Seed of the machines, and the simulated hours of each: enough for several trials of each program.
const SEED: u64 = 45;
const HOURS: f64 = 1.0;
/// Fields that hold sentences.
const SENTENCES: [&str; 9] = [
    "finding",
    "hypothesis",
    "objective",
    "reason",
    "refused",
    "remedy",
    "risk",
    "unwatched",
    "why",
];

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/corpus")
}

/// Names that have changed since the corpus was recorded: recorded name and today's.
fn names() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(corpus().join("names.toml")).unwrap();
    toml::from_str(&text).unwrap()
}

/// Replaces every string and key that is one of the names.
fn renamed(value: &mut Value, names: &BTreeMap<String, String>) {
    match value {
        Value::String(text) => {
            if let Some(name) = names.get(text) {
                text.clone_from(name);
            }
        }
        Value::Array(all) => all.iter_mut().for_each(|v| renamed(v, names)),
        Value::Object(fields) => {
            for (key, mut field) in std::mem::take(fields) {
                renamed(&mut field, names);
                fields.insert(names.get(&key).unwrap_or(&key).clone(), field);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn without_sentences(value: &mut Value) {
    match value {
        Value::Array(all) => all.iter_mut().for_each(without_sentences),
        Value::Object(fields) => {
            fields.retain(|key, _| !SENTENCES.contains(&key.as_str()));
            fields.values_mut().for_each(without_sentences);
        }
        _ => {}
    }
}

/// The commands of a run in their canonical form.
struct Answers {
    /// From today's names to those of the time of the recording.
    names: BTreeMap<String, String>,
    count: u64,
    hash: u64,
    dump: Option<String>,
}

impl Answers {
    fn new() -> Self {
        Self {
            names: names()
                .into_iter()
                .map(|(recorded, today)| (today, recorded))
                .collect(),
            count: 0,
            // FNV-1a, 64 bits.
            hash: 0xcbf2_9ce4_8422_2325,
            dump: std::env::var_os("HOMEOSTAT_CORPUS_DUMP").map(|_| String::new()),
        }
    }

    fn take(&mut self, mut command: Value) {
        if command.get("Tell").is_some() {
            return;
        }
        renamed(&mut command, &self.names);
        without_sentences(&mut command);
        let mut line = command.to_string();
        line.push('\n');
        for byte in line.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self.count += 1;
        if let Some(dump) = &mut self.dump {
            dump.push_str(&line);
        }
    }

    /// The line of `answers.txt`.
    fn line(&self, name: &str) -> String {
        if let (Some(directory), Some(dump)) = (std::env::var_os("HOMEOSTAT_CORPUS_DUMP"), &self.dump) {
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(Path::new(&directory).join(name), dump).unwrap();
        }
        format!("{:016x} {}", self.hash, self.count)
    }
}

/// Answers a recording.
fn recorded(file: &Path) -> String {
    let unpacked = std::process::Command::new("gzip")
        .arg("-dc")
        .arg(file)
        .output()
        .unwrap();
    assert!(unpacked.status.success(), "{}", file.display());
    let names = names();
    let mut text = String::new();
    for line in String::from_utf8(unpacked.stdout).unwrap().lines() {
        let mut value: Value = serde_json::from_str(line).unwrap();
        renamed(&mut value, &names);
        writeln!(text, "{value}").unwrap();
    }
    let mut answers = Answers::new();
    let each = |_: u64, _: &_, commands: &[Command]| {
        for command in commands {
            answers.take(serde_json::to_value(command).unwrap());
        }
    };
    let ending = recording::watch(text.as_bytes(), homeostat_strategies::all(), each).unwrap();
    assert!(
        matches!(ending, recording::Ending::Marked { .. }),
        "{}: {ending:?}",
        file.display()
    );
    answers.line(file.file_name().unwrap().to_str().unwrap())
}

/// Where the recording of a simulated run goes: each step's commands are taken as the step is written.
#[derive(Clone)]
struct Sink(Arc<Mutex<Answers>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        /// The rest of the line is skipped.
        #[derive(serde::Deserialize)]
        struct Step {
            #[serde(default)]
            commands: Vec<Value>,
        }
        // The recorder writes a whole line at once.
        let step: Step = serde_json::from_slice(bytes)?;
        let mut answers = self.0.lock().unwrap();
        step.commands
            .into_iter()
            .for_each(|command| answers.take(command));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs one machine of the laboratory.
fn simulated(index: u64) -> String {
    let options = Options {
        seed: SEED,
        hours: HOURS,
        // Half of the machines are as noisy as machines are.
        rough: index % 2 == 1,
        ..Options::default()
    };
    let scenario = swarm::scenario(&options, index);
    let sink = Sink(Arc::new(Mutex::new(Answers::new())));
    let recorder = Recorder::to(sink.clone(), Bytes(u64::MAX));
    let mut laboratory = Laboratory::recorded(&scenario, Arm::Homeostat, Some(recorder)).unwrap();
    laboratory.run_until(HOURS * 3600.0).unwrap();
    laboratory.stop().unwrap();
    drop(laboratory);
    sink.0.lock().unwrap().line(&format!("machine-{index}"))
}

/// What `answers.txt` says, by name.
fn known() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(corpus().join("answers.txt")).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, rest)| (name.to_owned(), rest.to_owned()))
        .collect()
}

/// Compares with what is known, or writes it down.
fn compare(found: &BTreeMap<String, String>) {
    if std::env::var_os("HOMEOSTAT_UPDATE_CORPUS").is_some() {
        let mut all = known();
        all.extend(found.clone());
        let text: String = all
            .iter()
            .map(|(name, rest)| format!("{name} {rest}\n"))
            .collect();
        std::fs::write(corpus().join("answers.txt"), text).unwrap();
        return;
    }
    let known = known();
    let others: Vec<String> = found
        .iter()
        .filter(|(name, answer)| known.get(*name) != Some(answer))
        .map(|(name, answer)| {
            let before = known.get(name).map_or("nothing", String::as_str);
            format!("{name}: {answer}, and before {before}")
        })
        .collect();
    assert!(
        others.is_empty(),
        "other commands (hash and number) than before:\n{}\nSee the top of this file for how to look at the difference.",
        others.join("\n")
    );
}

fn machines(which: impl Iterator<Item = u64>) {
    let which: Vec<u64> = which.collect();
    let (next, found) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(index) = which.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let answer = simulated(*index);
                    found.lock().unwrap().insert(format!("machine-{index}"), answer);
                }
            });
        }
    });
    compare(&found.into_inner().unwrap());
}

#[test]
fn recordings_of_real_programs_are_answered_as_before() {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(corpus()).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|e| e == "gz") {
            let name = file.file_name().unwrap().to_str().unwrap().to_owned();
            found.insert(name, recorded(&file));
        }
    }
    // None is lost.
    assert!(
        known()
            .keys()
            .all(|name| !name.ends_with(".gz") || found.contains_key(name))
    );
    assert!(!found.is_empty());
    compare(&found);
}

#[test]
fn a_sample_of_simulated_machines_is_answered_as_before() {
    machines((0..MACHINES).filter(|index| index % SAMPLE_EVERY == 0));
}

#[test]
#[ignore = "make replay: minutes"]
fn all_simulated_machines_are_answered_as_before() {
    match std::env::var("HOMEOSTAT_CORPUS_MACHINE") {
        Ok(one) => machines(std::iter::once(one.parse().unwrap())),
        Err(_) => machines(0..MACHINES),
    }
}
