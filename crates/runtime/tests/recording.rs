//! Recordings: a real one gives the same decisions again; damaged ones are told for what they are.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_engine::{Engine, Event, Fault, FaultKind, Memory, OperatorRequest, Policy, Prior, Strategy};
use homeostat_model::{
    Bytes, Effect, Fingerprint, Machine, MachineSample, MeterReading, Nanoseconds, OperatorChoice, ProcessId,
    Snapshot, Verdict, Workload, WorkloadKind, WorkloadSample,
};
use homeostat_runtime::recording::{self, EndReason, Ending, replay};
use homeostat_runtime::{Recorder, RecordingError};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Made on a real machine: `homeostat run --record` in a process namespace of its own beside `latency`, until a gain
/// was proven and the daemon was stopped.
const REAL: &str = "../../fixtures/recordings/latency.jsonl";

fn real() -> Vec<u8> {
    std::fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(REAL)).unwrap()
}

fn registry() -> Vec<Box<dyn Strategy>> {
    homeostat_strategies::all()
}

/// A file in memory that can be full.
#[derive(Clone, Default)]
struct Sink {
    bytes: Arc<Mutex<Vec<u8>>>,
    room: Option<usize>,
}

impl Sink {
    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }
}

impl Write for Sink {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        let mut bytes = self.bytes.lock().unwrap();
        let room = self.room.map_or(usize::MAX, |r| r.saturating_sub(bytes.len()));
        if room == 0 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        let n = buffer.len().min(room);
        bytes.extend_from_slice(&buffer[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn machine() -> Machine {
    Machine {
        kernel: "test".into(),
        cpu_model: "test".into(),
        hypervisor: None,
        cpus: vec![],
        nodes: vec![],
        memory: Bytes::from_mib(4096),
        page_size: Bytes(4096),
        huge_page_size: Bytes(2 << 20),
        llc_size: Bytes(0),
        boot_id: "boot".into(),
        capabilities: vec![],
    }
}

fn memory() -> Memory {
    Memory {
        priors: vec![Prior {
            fingerprint: Fingerprint::new("program"),
            strategy: "large_pages".into(),
            verdict: Verdict::Inconclusive,
            effect: Some(Effect {
                estimate: -0.0,
                lower: f64::NEG_INFINITY,
                upper: f64::INFINITY,
                confidence: 0.1 + 0.2,
            }),
            unix_seconds: 1,
            failures: 1,
            settling: Some(Nanoseconds(300_000_000)),
        }],
        ..Memory::default()
    }
}

fn sampled(second: u64, work: f64) -> Event {
    let workload = Workload {
        id: "program[7]".into(),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::new("program"),
        program: "program".into(),
        executable: "/usr/bin/program".into(),
        processes: vec![ProcessId {
            pid: 7,
            start_ticks: 1,
        }],
        choice: OperatorChoice::default(),
    };
    let sample = WorkloadSample {
        id: workload.id.clone(),
        interval: Nanoseconds::from_secs(1),
        age: Nanoseconds::from_secs(1000 + second),
        processes: 1,
        threads: 1,
        cpu: Nanoseconds::from_secs(1),
        cpu_busiest: Nanoseconds::from_secs(1),
        runqueue_wait: Nanoseconds::ZERO,
        faults_minor: 0,
        faults_major: 0,
        churn: 0,
        resident: Bytes::from_mib(512),
        anonymous: Bytes::from_mib(512),
        shared: Bytes::ZERO,
        huge: Some(Bytes::ZERO),
        meters: vec![MeterReading {
            meter: "progress".into(),
            work,
            interval: Nanoseconds::from_secs(1),
            counted: 1.0,
            lag: Nanoseconds::ZERO,
        }],
        reads: homeostat_model::Reads::default(),
        spans: None,
        executions: 0,
    };
    Event::Sampled(Box::new(Snapshot {
        at: Nanoseconds::from_secs(second),
        unix_seconds: second,
        interval: Nanoseconds::from_secs(1),
        machine: MachineSample::default(),
        workloads: Some(vec![workload]),
        samples: vec![sample],
        own_cpu: Nanoseconds::ZERO,
        own_resident: Bytes::ZERO,
        canary: None,
    }))
}

fn events() -> Vec<Event> {
    let mut events: Vec<Event> = (1..20).map(|s| sampled(s, s as f64 / 3.0)).collect();
    // A broken sensor: what it said must come back as it was, words that JSON lacks included.
    events.extend([
        sampled(20, f64::NAN),
        sampled(21, f64::INFINITY),
        sampled(22, -0.0),
    ]);
    events.push(Event::MetersFound(
        "program[7]".into(),
        Err(Fault {
            kind: FaultKind::Denied,
            text: "a \"quoted\" reason,\nin two lines".into(),
        }),
    ));
    events.push(Event::MeterLost(
        "program[7]".into(),
        "progress".into(),
        Fault {
            kind: FaultKind::Unsupported,
            text: "its code was made anew".into(),
        },
    ));
    events.push(Event::Operator(OperatorRequest::Configure(Box::default())));
    events.push(Event::Operator(OperatorRequest::Stop { keep: false }));
    events
}

/// Records the events up to the first that does not fit.
fn record(mut recorder: Recorder) -> Result<u64, RecordingError> {
    let (machine, policy, memory) = (machine(), Policy::default(), memory());
    recorder.begin(&machine, &policy, &registry(), &memory)?;
    let mut engine = Engine::new(machine, registry(), policy, memory);
    for (second, event) in (1..).zip(events()) {
        recorder.event(&event)?;
        let now = Nanoseconds::from_secs(second);
        let commands = engine.step(now, 1_000 + second, event);
        if !recorder.step(now, 1_000 + second, &commands)? {
            break;
        }
    }
    Ok(recorder.steps())
}

fn recorded() -> Vec<u8> {
    let sink = Sink::default();
    record(Recorder::to(sink.clone(), Bytes::from_mib(1))).unwrap();
    sink.bytes()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_recording_of_a_real_machine_replays_to_the_same_decisions() {
    if std::env::var_os("HOMEOSTAT_UPDATE_RECORDINGS").is_some() {
        // After a change of the mind that is meant: the same events, answered as it answers now.
        let sink = Sink::default();
        let mut recorder = Recorder::to(sink.clone(), Bytes::from_mib(1));
        let ending = recording::answer_again(real().as_slice(), registry(), &mut recorder).unwrap();
        if let Ending::Marked { reason } = ending {
            recorder.end(reason).unwrap();
        }
        drop(recorder);
        std::fs::write(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(REAL), sink.bytes()).unwrap();
    }
    let found = replay(real().as_slice(), registry()).unwrap();
    assert_eq!(
        found.difference, None,
        "the mind decides otherwise than recorded; if that is meant: HOMEOSTAT_UPDATE_RECORDINGS=1, and look at the diff"
    );
    assert!(found.steps > 100 && found.texts, "{found:?}");
    for kind in ["Apply", "Switch", "NoteCoin", "RecordExperiment", "Tell"] {
        assert!(found.kinds.contains_key(kind), "{kind} in {:?}", found.kinds);
    }
}

#[test]
fn another_seed_is_found_out_at_the_first_thing_that_depends_on_it() {
    let text = text(&real());
    let at = text.find("\"seed\":").unwrap() + "\"seed\":".len();
    let end = at + text[at..].find(|c: char| !c.is_ascii_digit()).unwrap();
    let other = format!("{}424242{}", &text[..at], &text[end..]);
    let found = replay(other.as_bytes(), registry()).unwrap();
    let difference = found.difference.unwrap();
    assert!(found.steps > 10, "what came before the first trial is the same");
    assert_ne!(difference.recorded, difference.replayed);
    assert!(difference.recorded.unwrap().contains("seed"));
}

#[test]
fn what_was_recorded_here_comes_out_again_to_the_last_bit() {
    let found = replay(recorded().as_slice(), registry()).unwrap();
    assert_eq!(found.difference, None);
    assert_eq!(found.steps, events().len() as u64);
    assert_eq!(
        found.ending,
        Some(Ending::Marked {
            reason: EndReason::Finished
        })
    );
    assert_eq!(found.kinds.get("Finished"), Some(&1));
    // Numbers that JSON has no word for come back as they went in.
    let line = text(&recorded()).lines().next().unwrap().to_owned();
    let header: recording::Header = serde_json::from_str(&line).unwrap();
    assert_eq!(header.memory, memory());
    for event in events() {
        let written = serde_json::to_string(&event).unwrap();
        let read: Event = serde_json::from_str(&written).unwrap();
        assert_eq!(format!("{read:?}"), format!("{event:?}"));
    }
}

#[test]
fn a_command_that_differs_is_shown_with_both_texts() {
    let whole = text(&recorded());
    let changed = whole.replacen("looking for", "LOOKING FOR", 1);
    assert_ne!(whole, changed);
    let line = 1 + whole
        .lines()
        .zip(changed.lines())
        .position(|(a, b)| a != b)
        .unwrap() as u64;
    let difference = replay(changed.as_bytes(), registry())
        .unwrap()
        .difference
        .unwrap();
    assert_eq!((difference.line, difference.step), (line, line - 1));
    assert_eq!(difference.event, "Sampled");
    let (recorded, replayed) = (difference.recorded.unwrap(), difference.replayed.unwrap());
    assert!(recorded.contains("LOOKING FOR"), "{recorded}");
    assert!(replayed.contains("looking for"), "{replayed}");
    // A hash that was tampered with is found too, though the texts agree.
    let at = whole.find("\"hash\":\"").unwrap() + 8;
    let other = if whole.as_bytes()[at] == b'0' { "1" } else { "0" };
    let tampered = format!("{}{other}{}", &whole[..at], &whole[at + 1..]);
    let difference = replay(tampered.as_bytes(), registry())
        .unwrap()
        .difference
        .unwrap();
    assert_eq!((difference.step, difference.command), (1, None));
}

#[test]
fn without_texts_the_hashes_still_tell() {
    let sink = Sink::default();
    record(Recorder::to(sink.clone(), Bytes::from_mib(1)).without_texts()).unwrap();
    let bytes = sink.bytes();
    assert!(bytes.len() < recorded().len());
    let found = replay(bytes.as_slice(), registry()).unwrap();
    assert_eq!((found.difference, found.texts), (None, false));
    let changed = text(&bytes).replacen("\"program\":\"program\"", "\"program\":\"another\"", 1);
    let difference = replay(changed.as_bytes(), registry())
        .unwrap()
        .difference
        .unwrap();
    assert_eq!(difference.recorded, None);
    assert!(difference.replayed.unwrap().contains("another"));
}

#[test]
fn a_recording_that_reaches_its_limit_says_so_and_stays_below() {
    let whole = recorded().len() as u64;
    let header = recorded().iter().position(|b| *b == b'\n').unwrap() as u64;
    for limit in [header + 200, (header + whole) / 2, whole - 1] {
        let sink = Sink::default();
        let steps = record(Recorder::to(sink.clone(), Bytes(limit))).unwrap();
        let bytes = sink.bytes();
        assert!(bytes.len() as u64 <= limit);
        let found = replay(bytes.as_slice(), registry()).unwrap();
        assert_eq!((found.steps, found.difference), (steps, None));
        let reason = EndReason::Limit;
        assert_eq!(found.ending, Some(Ending::Marked { reason }));
    }
    let none = record(Recorder::to(Sink::default(), Bytes(100)));
    assert!(matches!(none, Err(RecordingError::Limit { .. })), "{none:?}");
}

#[test]
fn a_tail_that_was_torn_is_left_out_wherever_it_was_torn() {
    let whole = recorded();
    let header = whole.iter().position(|b| *b == b'\n').unwrap() + 1;
    let last = whole[..whole.len() - 1]
        .iter()
        .rposition(|b| *b == b'\n')
        .unwrap();
    for cut in (header..last).step_by(97) {
        let part = &whole[..cut];
        let found = replay(part, registry()).unwrap();
        assert_eq!(found.difference, None);
        let lines = part.iter().filter(|b| **b == b'\n').count() as u64;
        assert_eq!(found.steps, lines - 1, "cut at {cut}");
        let torn = part.last() != Some(&b'\n');
        assert_eq!(matches!(found.ending, Some(Ending::Torn { .. })), torn);
        assert_eq!(found.ending == Some(Ending::Missing), !torn);
    }
}

#[test]
fn a_disk_that_is_full_ends_the_recording_and_nothing_follows_the_torn_line() {
    let room = recorded().len() / 2;
    let sink = Sink {
        room: Some(room),
        ..Sink::default()
    };
    let result = record(Recorder::to(sink.clone(), Bytes::from_mib(1)));
    assert!(matches!(result, Err(RecordingError::Write(_))), "{result:?}");
    assert_eq!(sink.bytes().len(), room);
    let found = replay(sink.bytes().as_slice(), registry()).unwrap();
    assert!(matches!(found.ending, Some(Ending::Torn { .. })));
}

#[test]
fn what_is_no_recording_is_refused_with_the_reason() {
    let whole = text(&recorded());
    let fails = |text: &str| replay(text.as_bytes(), registry()).unwrap_err();
    assert!(matches!(fails(""), RecordingError::NotARecording(_)));
    assert!(matches!(fails("{}\n"), RecordingError::NotARecording(_)));
    assert!(matches!(fails("\u{0}\u{1}\n"), RecordingError::NotARecording(_)));
    let other = whole.replacen(recording::FORMAT, "something else", 1);
    assert!(matches!(fails(&other), RecordingError::NotARecording(_)));
    let newer = whole.replacen("\"version\":1", "\"version\":2", 1);
    assert!(matches!(fails(&newer), RecordingError::Version { found: 2 }));
    let lines: Vec<&str> = whole.lines().collect();
    let with = |at: usize, line: &str| {
        let mut lines = lines.clone();
        lines[at] = line;
        lines.join("\n") + "\n"
    };
    let garbled = fails(&with(3, "{\"now\":1"));
    assert!(
        matches!(garbled, RecordingError::Malformed { line: 4, .. }),
        "{garbled}"
    );
    let miscounted = fails(&with(
        lines.len() - 1,
        "{\"end\":{\"reason\":\"limit\",\"steps\":3}}",
    ));
    assert!(miscounted.to_string().contains("counts 3 steps"), "{miscounted}");
    let beyond = fails(&format!("{whole}{}\n", lines[1]));
    assert!(beyond.to_string().contains("follows"), "{beyond}");
    let foreign = whole.replacen("\"strategies\":[", "\"strategies\":[\"alchemy\",", 1);
    let RecordingError::Strategy { missing, .. } = fails(&foreign) else {
        unreachable!("it must be refused");
    };
    assert_eq!(missing.as_str(), "alchemy");
}

#[test]
fn a_file_that_exists_is_not_written_over_and_others_may_not_read_it() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.jsonl");
    let recorder = Recorder::create(&path, Bytes::from_mib(1)).unwrap();
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    record(recorder).unwrap();
    let before = std::fs::read(&path).unwrap();
    let again = Recorder::create(&path, Bytes::from_mib(1)).unwrap_err();
    assert!(again.to_string().contains("hint"), "{again}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(replay(before.as_slice(), registry()).unwrap().difference, None);
}
