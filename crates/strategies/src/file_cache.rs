//! # file_cache
//!
//! ## What
//! Protects a program from a big reader. A backup, a log scan, a copy of a large file reads gigabytes once; the kernel
//! keeps what was read last, and takes the pages that other programs work on. The reader is kept to a little memory while
//! it reads: its own old pages make room for its new ones. Several readers are contained one after another, each for
//! reasons of its own, up to four for the sake of one program.
//!
//! ## Why it helps
//! A program that works on a mapped or cached file (a database beyond its own buffers, a search index, a key-value
//! store) loses its whole working set to one sequential reader within a second, and then waits for storage at every step.
//! Measured on this project's machine: 2 GiB at random from a mapped file fall from 51 million to 3,000 touches per
//! second. What the reader reads once is in memory for nobody. `vm.swappiness` does nothing here,
//! since both sides are pages of files.
//!
//! ## When it hurts
//! * A reader that reads the same data again would find it in memory without the limit. Who is served from memory is
//!   therefore left alone (`cache_use_max`), and the reader's work is a guardrail of the trial where it can be measured: it may lose as much as the program is
//!   sure to gain, and no more than `reader_loss_max`, half of it. (A program that gets its speed back takes CPU time and disk, too,
//!   as it does under a limit set by hand: on two CPUs `tar` lost a third while a database gained more than twice its work.)
//! * Under the limit the reader's read-ahead has less room; 32 MiB beside its own memory cost it nothing measurable where the
//!   program that comes back leaves it CPU time and disk.
//! * Who opens, reads and closes a file now and then has nothing open when it is looked at (`give_back`): what a reader has
//!   read of that file is dropped, and read again from storage the next time.
//! * A program that reads single pages at random (`pread`) from a set that was taken whole brings back one page at a time, for
//!   minutes, and blocks end before that. So what it lost is read for it (`bring_back`), where the kernel tells what that is (Linux
//!   6.5). That is a burst of reads on its disk, of 1 GiB at most where it is not seen that the program works on it, of 8 GiB otherwise,
//!   and never more than there is room for. While the reader stays contained that is done again where storage still delivers 256 KiB a
//!   second and more to the program, 1 GiB at most each time; later and later where it does not help. Not for programs in containers or
//!   delegated groups.
//! * In every block of the trial in which the reader is released the program loses its pages again. That is what happens
//!   without homeostat; the blocks are short.
//!
//! ## Evidence
//! A workload that waits for storage (major faults, or reads from storage that are not in sequence), on a machine on which
//! pages come back that were taken (refaults, 50 a second and more, or 5 where some task waits for memory for a tenth of the time:
//! PSI), and another workload that reads much from storage, from beginning to end or
//! by large calls, and is not served from memory. It is asked at once when memory is short; the change is made with the
//! first proposal, which begins its trial: the reader is released and contained again by coins, and the work per second
//! of the program decides. How much it gains is not predicted: from a tenth to a thousandfold. A block in which three
//! quarters of the work are lost counts like one in which all of it is, so at most +306 % is told as gained; the gain may be
//! more.
//!
//! A reader of which a trial has proven that for this program is contained as soon as it is seen reading, before anything is
//! lost, unless what nobody uses lasts it for a minute: free memory and pages of files that were not used lately, less what
//! the reader itself has read since it is looked at, which lies among them. No hour of the day is in that: a backup that
//! comes earlier is the same backup. The change goes under guard on the verdict of that trial; after two such times, later
//! four, and after a restart, it is left to come to a trial again.
//!
//! A reader that is a new process every second (a shell that runs `tar` or `cp` in a loop) is over before it is seen twice,
//! and what it has read counts to the shell when that has waited for it. Outside of a unit the shell is not contained for it:
//! the limit would hold whatever it runs next. homeostat says so, with the advice to start the loop in a scope of its own.
//!
//! Left alone are readers in delegated control groups, in groups with a limit that somebody set, and those that a person
//! excluded. In control groups of version 2 a reader must have a group of its own (a unit or a scope), or be in the root
//! group. A container's limits belong to whoever runs it: of a reader in one, what it has read and left behind is dropped
//! instead, about once a second, and only pages that were not in memory before it came. That protects where a second of
//! its reading is little beside the memory.
//!
//! A reader that is moved into a group of its own leaves behind what it was charged for, and the group that it came from, or one
//! above it with a limit, may stay full of that. Where one is, what the reader was seen to have read before is dropped
//! when it is contained (`give_back`): only of files that it has open for reading, on a disk of this machine, that no other
//! process has open or mapped. Where not all processes can be looked at, nothing is dropped.
//!
//! Where control groups are of version 1 no limit stays, since one has the system calls of a reader that grows fail: the group that
//! is made for it is kept small from moment to moment, by the daemon, whose CPU time the kernel's work on that is (some percent of a CPU
//! beside a reader of 2 GB/s).
//!
//! ## Undo
//! The reader's processes are moved back to the control group they came from, and the group that was made for them is
//! removed; a limit that was set on the reader's own group is taken away. A limit or a move by somebody else ends it.
//! Of dropped pages there is nothing to put back: they are clean, and whoever needs one reads it again. Of pages that were brought
//! back neither: the kernel takes those that nobody uses.
//!
//! ## References
//! Seed 003 (Trent: autotune), which lowers the share of memory that files may use while programs wait for their pages;
//! Linux `Documentation/admin-guide/cgroup-v2.rst`, `cgroup-v1/memory.rst`, `mm/workingset.c`.

use crate::common::{AGE_HELP, age_min, capable, too_young};
use homeostat_engine::{Declined, Neighbour, Opinion, Profile, Proposal, Seen, Setting, Strategy};
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{
    Advice, Bytes, Effect, EffectorId, Machine, Nanoseconds, Reads, StrategyId, WorkloadKind,
};

const ID: &str = "file_cache";
const AGE_MIN: Setting = age_min(ID, 0.0, AGE_HELP);
const FAULTS_MIN: Setting = Setting {
    strategy: ID,
    name: "faults_min",
    default: 5.0,
    classic: 5.0,
    low: 0.1,
    high: 1e9,
    help: "faults per second that wait for storage from which a workload loses its pages; on a busy disk twenty take all \
           of a second (classic: the threshold with which the published recovery comes out; seed 003 gives none)",
};
const LOSS_MIN: Setting = Setting {
    strategy: ID,
    name: "loss_min_mib_per_s",
    default: 1.0,
    classic: 2.0,
    low: 0.01,
    high: 1e6,
    help: "MiB per second that a workload reads from storage here and there from which it loses its pages; 1 are 256 single \
           pages. A disk that turns gives fewer beside a reader",
};
const STREAM_MIN: Setting = Setting {
    strategy: ID,
    name: "stream_min_mib_per_s",
    default: 16.0,
    classic: 16.0,
    low: 0.1,
    high: 1e6,
    help: "MiB per second from storage from which a reader takes memory from others",
};
const CACHE_USE_MAX: Setting = Setting {
    strategy: ID,
    name: "cache_use_max",
    default: 0.2,
    classic: 0.2,
    low: 0.0,
    high: 1.0,
    help: "share of its reads that a reader may find in memory; who finds more makes use of it and is left alone",
};
const LIMIT: Setting = Setting {
    strategy: ID,
    name: "limit_mib",
    default: 32.0,
    classic: 32.0,
    low: 16.0,
    high: 1e6,
    help: "memory in MiB that a reader is left with beside twice its own",
};
const GIVE_BACK: Setting = Setting {
    strategy: ID,
    name: "give_back",
    default: 1.0,
    classic: 1.0,
    low: 0.0,
    high: 1.0,
    help: "1: when a reader is contained, what it has read before of files that nobody else has open is dropped from memory; \
           0: it stays until the kernel takes it",
};
const BRING_BACK: Setting = Setting {
    strategy: ID,
    name: "bring_back",
    default: 1.0,
    classic: 1.0,
    low: 0.0,
    high: 1.0,
    help: "1: when a reader is contained, what the program lost of the files that it has open or mapped is read for it, as far \
           as there is room (Linux 6.5); 0: the program reads it again by itself",
};

/// A read call of this size or more is one of a program that copies or scans …
const LARGE_CALL: u64 = 32 * 1024;
/// … and so is one that moves through its files by at least this share of what it reads.
const SEQUENCE_MIN: f64 = 0.5;
/// Who has not read more than this share of what counts to it itself, but waited for processes that have ended, is no reader.
const ENDED_MAX: f64 = 0.5;
/// What those have read that have ended was read lately if it is at most so many times what the whole machine reads: they began
/// up to a look earlier.
const ENDED_SPREAD: f64 = 2.0;
/// A reader that is known is contained before any harm is done when what nobody uses lasts it for less than this (seconds):
/// a copy of a few files is over by then.
const FORESEEN_S: f64 = 60.0;
/// Pages that were taken are back, and those that are to go are gone, within one and a half times this, where it is not seen how long
/// that takes: with 256 MiB on a disk of 0.4 GB/s it took 4 and 8 seconds.
const SETTLING: Nanoseconds = Nanoseconds::from_millis(5000);
/// The effectors; each begins with its name and that of the reader the sentence by which it says that its change is over.
const CONTAINMENT: &str = "memory_containment";
const DROPPING: &str = "page_dropping";
/// Processes of a reader at most: what the effector takes.
const PROCESSES_MAX: usize = 512;
/// What is expected when nothing is known. A wide guess: nothing at hand tells what the program does with its pages.
const GUESS: Effect = Effect {
    estimate: 0.5,
    lower: 0.1,
    upper: 100.0,
    confidence: 0.5,
};

/// The strategy.
pub(crate) struct FileCache;

impl Strategy for FileCache {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "keeps a big reader of files from pushing other programs out of memory"
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            AGE_MIN,
            FAULTS_MIN,
            LOSS_MIN,
            STREAM_MIN,
            CACHE_USE_MAX,
            LIMIT,
            GIVE_BACK,
            BRING_BACK,
        ]
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        capable(machine, &["memory.groups", "process.io"])
    }

    fn works_in(&self, profile: Profile) -> Result<(), String> {
        match profile {
            Profile::AutotuneClassic => {
                Err("in the profile autotune-classic autotune looks after the file cache".into())
            }
            Profile::Homeostat | Profile::AsoClassic => Ok(()),
        }
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if let Some(why) = too_young(seen, AGE_MIN.value(seen.policy)) {
            return decline(why);
        }
        let loss = match proven_loss(seen) {
            Ok(loss) => loss,
            Err(why) => return foreseen(seen).unwrap_or_else(|| decline(why)),
        };
        let readers = readers(seen);
        let Some((reader, rate)) = readers
            .iter()
            .filter(|(n, _)| refusal(n).is_none())
            .max_by(|a, b| a.1.total_cmp(&b.1))
        else {
            return match readers.iter().max_by(|a, b| a.1.total_cmp(&b.1)) {
                Some((reader, rate)) => nobody_to_contain(seen, &loss, reader, *rate),
                None => decline(format!(
                    "{loss}, but no other workload reads {:.0} MiB/s or more from storage from beginning to end",
                    STREAM_MIN.value(seen.policy)
                )),
            };
        };
        Opinion::Propose(Box::new(propose(seen, &loss, reader, *rate)))
    }

    fn relieves(&self) -> bool {
        true
    }

    fn unwanted_change(&self, seen: &Seen<'_>, change: &Target) -> Option<String> {
        let Target::Reader(reader) = change else {
            return None;
        };
        seen.workload.choice.tuned.iter().find_map(|sentence| {
            let (effector, about) = sentence.split_once(": ")?;
            // Of several readers that are contained for its sake one is meant.
            let why = about.strip_prefix(reader.workload.as_str())?.strip_prefix(": ")?;
            [CONTAINMENT, DROPPING]
                .contains(&effector)
                .then(|| format!("the reader {}: {why}", reader.workload))
        })
    }
}

/// Neighbours that read much once and are not contained, and how many MiB per second.
fn readers<'a>(seen: &Seen<'a>) -> Vec<(&'a Neighbour, f64)> {
    let is_contained = |n: &Neighbour| {
        seen.held
            .iter()
            .any(|h| matches!(&h.target, Target::Reader(r) if r.workload == n.id))
    };
    seen.neighbours
        .iter()
        .filter(|n| !is_contained(n))
        .filter_map(|n| {
            let rate = if starts_readers(n) {
                // One that ran for long counts all at once when it has ended: that was not read now. What they called for
                // they may have got from each other, through pipes.
                let most = ENDED_SPREAD * machine_reads(seen);
                from_storage(seen, &n.reads, n.interval).filter(|rate| *rate <= most)
            } else {
                stream(seen, &n.reads, n.interval)
            };
            Some((n, rate?))
        })
        .collect()
}

/// The largest reader of those that were proven to take the memory of this workload, before it has lost anything: unless
/// memory holds what it reads for a while.
fn foreseen(seen: &Seen<'_>) -> Option<Opinion> {
    // One that reads so itself has nothing that another could take.
    if is_reader(seen) {
        return None;
    }
    let (reader, rate) = readers(seen)
        .into_iter()
        .filter(|(n, _)| n.is_proven && refusal(n).is_none())
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    // What goes before anybody's pages do. What the reader itself has read since lies in it, and is all it will ever be.
    let inactive = seen.machine_sample.memory_file_inactive;
    let own = reader.read_so_far.0.min(inactive.0);
    let unused = seen.machine_sample.memory_free + inactive.saturating_sub(Bytes(own));
    let lasts_s = unused.0 as f64 / MIB / rate;
    let loss = format!(
        "it has lost its pages to {} before, and the {unused} that nobody uses last that reader for {lasts_s:.0} s",
        reader.id
    );
    (lasts_s < FORESEEN_S).then(|| Opinion::Propose(Box::new(propose(seen, &loss, reader, rate))))
}

/// What the workload loses because pages are taken from it, in words; else why it does not.
fn proven_loss(seen: &Seen<'_>) -> Result<String, String> {
    let loss = loss(seen)?;
    let (machine, interval) = (seen.machine_sample, seen.machine_interval);
    if !machine.is_short_of_memory(interval) {
        return Err(format!(
            "{loss}, but nothing is pushed out of memory: {:.0} pages a second come back that were taken, and tasks wait for memory {:.0} % \
             of the time",
            machine.refaults_per_s(interval),
            100.0 * machine.stalled_for_memory(interval)
        ));
    }
    Ok(loss)
}

fn decline(reason: String) -> Opinion {
    Opinion::Decline(Declined::because(reason))
}

/// What the workload loses, in words; else why it loses nothing.
fn loss(seen: &Seen<'_>) -> Result<String, String> {
    let seconds = seen.sample.interval.as_secs_f64();
    let per_s = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
    let faults = per_s(seen.sample.faults_major as f64);
    if is_reader(seen) {
        return Err("it reads files from beginning to end itself: others are protected from that".into());
    }
    if faults >= FAULTS_MIN.value(seen.policy) {
        return Ok(format!("it waits for storage {faults:.0} times a second"));
    }
    // What somebody else has read that has ended is no loss of this one.
    let mib = per_s(seen.sample.reads.here_and_there().0 as f64) / MIB;
    if mib >= LOSS_MIN.value(seen.policy) {
        return Ok(format!("it reads {mib:.1} MiB/s from storage here and there"));
    }
    Err(format!(
        "it loses no pages: {faults:.1} faults a second wait for storage (at least {:.0}), {mib:.2} MiB/s are read from \
         storage here and there (at least {:.2})",
        FAULTS_MIN.value(seen.policy),
        LOSS_MIN.value(seen.policy)
    ))
}

const MIB: f64 = 1024.0 * 1024.0;

/// MiB per second from storage of a workload that reads from beginning to end what nobody finds in memory; `None` for
/// others.
fn stream(seen: &Seen<'_>, reads: &Reads, interval: Nanoseconds) -> Option<f64> {
    // How those read that have ended nobody can tell any more; it is judged by those that live.
    let by_living = reads.called.saturating_sub(reads.by_ended);
    let moves = reads.in_sequence.0 > 0 && reads.in_sequence.0 as f64 >= SEQUENCE_MIN * by_living.0 as f64;
    let in_order = moves || reads.called.0 / reads.calls.max(1) >= LARGE_CALL;
    let from_memory = 1.0 - reads.from_storage.0 as f64 / reads.called.0.max(1) as f64;
    let is_once = reads.called.0 > 0 && from_memory <= CACHE_USE_MAX.value(seen.policy);
    from_storage(seen, reads, interval).filter(|_| in_order && is_once)
}

/// MiB per second that a workload reads from storage, if that is much.
fn from_storage(seen: &Seen<'_>, reads: &Reads, interval: Nanoseconds) -> Option<f64> {
    let seconds = interval.as_secs_f64();
    if seconds <= 0.0 {
        return None;
    }
    let rate = reads.from_storage.0 as f64 / MIB / seconds;
    (rate >= STREAM_MIN.value(seen.policy)).then_some(rate)
}

/// MiB per second that the whole machine reads from storage.
fn machine_reads(seen: &Seen<'_>) -> f64 {
    let seconds = seen.machine_interval.as_secs_f64();
    if seconds > 0.0 {
        seen.machine_sample.paging.read_in.0 as f64 / MIB / seconds
    } else {
        0.0
    }
}

/// Whether the workload in question reads from beginning to end itself.
fn is_reader(seen: &Seen<'_>) -> bool {
    let sample = seen.sample;
    !is_by_ended(&sample.reads) && stream(seen, &sample.reads, sample.interval).is_some()
}

/// Whether what counts as read was read by processes that have ended.
fn is_by_ended(reads: &Reads) -> bool {
    reads.by_ended.0 as f64 > ENDED_MAX * reads.from_storage.0 as f64
}

/// Whether it starts readers one after another, each over before it could be contained. In a unit or a control group of
/// their own they are one workload with whoever starts them, and are contained as one.
fn starts_readers(n: &Neighbour) -> bool {
    n.kind == WorkloadKind::ProcessGroup && is_by_ended(&n.reads)
}

/// Why a reader may not be touched.
fn refusal(reader: &Neighbour) -> Option<String> {
    if let Some(why) = &reader.left_alone {
        return Some(why.clone());
    }
    if starts_readers(reader) {
        return Some(
            "each is over before it could be contained, and a limit for who starts them would hold whatever it starts next"
                .into(),
        );
    }
    if reader.processes.is_empty() || reader.processes.len() > PROCESSES_MAX {
        return Some(format!("it has {} processes", reader.processes.len()));
    }
    None
}

/// The name of a workload without the number of its process: what is advised of a program that runs again and again is
/// said, and muted, once.
fn without_process(id: &str) -> &str {
    id.rsplit_once('[').map_or(id, |(program, _)| program)
}

fn nobody_to_contain(seen: &Seen<'_>, loss: &str, reader: &Neighbour, rate: f64) -> Opinion {
    let why = refusal(reader).unwrap_or_default();
    let is_of_others = reader.left_alone.is_none() && starts_readers(reader);
    let finding = if is_of_others {
        format!(
            "{loss}, while processes that {} starts one after another read {rate:.0} MiB/s from storage: {why}",
            reader.id
        )
    } else {
        format!(
            "{loss}, while {} reads {rate:.0} MiB/s from storage from beginning to end, which is left alone: {why}",
            reader.id
        )
    };
    Opinion::Decline(Declined {
        advice: vec![Advice {
            id: format!("file_cache/reader/{}", without_process(reader.id.as_str())),
            workload: Some(seen.workload.id.clone()),
            finding: finding.clone(),
            remedy: if is_of_others {
                "start the whole of it in a control group of its own (`systemd-run --scope COMMAND`, or a unit): there it is \
                 contained as one"
                    .into()
            } else {
                "give the reader a memory limit of its own (MemoryHigh= in its unit, --memory of its container): 256 MiB \
                 beside what it needs itself cost a reader nothing"
                    .into()
            },
            risk: "a limit below what the reader itself needs slows it down".into(),
            setting: None,
        }],
        reason: finding,
    })
}

fn propose(seen: &Seen<'_>, loss: &str, reader: &Neighbour, rate: f64) -> Proposal {
    let is_container = reader.kind == WorkloadKind::Container;
    // What a container has left behind is dropped by the other effector all the time.
    let arguments = [("give_back", GIVE_BACK), ("bring_back", BRING_BACK)]
        .into_iter()
        .filter(|(_, setting)| !is_container && setting.value(seen.policy) >= 0.5)
        .map(|(name, _)| (name.to_owned(), "1".to_owned()))
        .collect();
    let own = reader.resident.0.saturating_mul(2);
    let wanted = own.saturating_add((LIMIT.value(seen.policy) * MIB) as u64);
    // Whole MiB, since the kernel rounds limits to pages; an odd number of them, so that what a person writes (64M, 1G) is not taken for
    // this limit doubled.
    let limit = Bytes((wanted.div_ceil(1 << 20) | 1) << 20);
    let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    Proposal {
        hypothesis: format!(
            "{loss} while {} reads {rate:.0} MiB/s from storage from beginning to end ({:.0} % of it found in memory) and \
             pushes its pages out; {}",
            reader.id,
            (100.0 - percent(reader.reads.from_storage.0, reader.reads.called.0)).max(0.0),
            if is_container {
                "its limits belong to whoever runs the container, but what it has read and left behind can be dropped"
                    .to_owned()
            } else {
                format!("{limit} are enough for {}", reader.id)
            },
        ),
        predicted: seen.known.unwrap_or(GUESS),
        effector: EffectorId::from(if is_container { DROPPING } else { CONTAINMENT }),
        target: Target::Reader(FileReader {
            workload: reader.id.clone(),
            processes: reader.processes.clone(),
            limit,
        }),
        stages: Vec::new(),
        arguments,
        reversible: true,
        joint: false,
        urgent: true,
        makes_room: false,
        settling: SETTLING,
        risk: "a reader that would find its data in memory again reads it from storage".into(),
        advice: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Scene, chips, machine};
    use homeostat_engine::Held;
    use homeostat_model::ProcessId;
    use std::collections::BTreeMap;

    const SECOND: Nanoseconds = Nanoseconds::from_secs(1);

    fn mib(n: u64) -> Bytes {
        Bytes::from_mib(n)
    }

    /// A program that waits for its pages while another one reads a large file.
    fn scene() -> Scene {
        Scene::new(machine(&chips(1, 1), 2), 0.1, 0.02).with(|s| {
            s.sample.faults_major = 400;
            s.machine_sample.paging.refaults_file = 20_000;
            s.neighbour(0.9, None);
            let reader = s.neighbours.last_mut().unwrap();
            reader.id = "dd".into();
            reader.resident = mib(2);
            reader.processes = vec![ProcessId {
                pid: 77,
                start_ticks: 5,
            }];
            reader.reads = Reads {
                from_storage: mib(900),
                called: mib(900),
                calls: 900,
                in_sequence: mib(900),
                ..Reads::default()
            };
            reader.interval = SECOND;
        })
    }

    fn reader(s: &mut Scene) -> &mut Neighbour {
        s.neighbours.last_mut().unwrap()
    }

    #[test]
    fn the_reader_is_contained_at_once_for_the_sake_of_who_waits() {
        let p = scene().proposal(&FileCache);
        assert!(p.urgent && p.reversible && !p.joint && p.stages.is_empty());
        assert_eq!(p.effector.as_str(), "memory_containment");
        let Target::Reader(target) = p.target else {
            panic!("another target");
        };
        assert_eq!((target.workload.as_str(), target.limit), ("dd", mib(37)));
        assert_eq!(target.processes.len(), 1);
        assert!(
            p.hypothesis.contains("400 times") && p.hypothesis.contains("900 MiB/s"),
            "{}",
            p.hypothesis
        );
        // A program that reads here and there by read calls has no faults.
        let by_calls = scene().with(|s| {
            s.sample.faults_major = 0;
            s.sample.reads = Reads {
                from_storage: mib(40),
                called: mib(30),
                calls: 30 * 256,
                ..Reads::default()
            };
        });
        assert!(by_calls.proposal(&FileCache).hypothesis.contains("40.0 MiB/s"));
        // On a slow disk some hundred single pages a second are all that it gets beside a reader.
        let slow_disk = |kib: u64| {
            scene().with(move |s| {
                s.sample.faults_major = 0;
                s.sample.reads = Reads {
                    from_storage: Bytes(kib << 10),
                    called: Bytes(kib << 10),
                    calls: kib / 4,
                    ..Reads::default()
                };
            })
        };
        slow_disk(1280).proposal(&FileCache);
        assert!(slow_disk(640).reason(&FileCache).contains("0.62 MiB/s"));
        // Many small files: positions tell nothing, the size of the calls does.
        let small_files = scene().with(|s| reader(s).reads.in_sequence = Bytes::ZERO);
        small_files.proposal(&FileCache);
    }

    #[test]
    fn a_person_can_switch_off_that_pages_are_given_back_or_brought_back() {
        let both = ["bring_back", "give_back"];
        let asked = |scene: Scene| scene.proposal(&FileCache).arguments;
        let names = |arguments: BTreeMap<String, String>| -> Vec<String> {
            assert!(arguments.values().all(|value| value == "1"), "{arguments:?}");
            arguments.into_keys().collect()
        };
        assert_eq!(names(asked(scene())), both);
        for (name, other) in [(both[0], both[1]), (both[1], both[0])] {
            let off = scene().with(|s| {
                let settings = s.policy.settings.entry(ID.into()).or_default();
                settings.insert(name.into(), 0.0);
            });
            assert_eq!(names(asked(off)), [other]);
        }
        // What a container leaves behind is dropped by another effector, which takes no argument.
        let container = scene().with(|s| reader(s).kind = WorkloadKind::Container);
        assert!(container.proposal(&FileCache).arguments.is_empty());
    }

    #[test]
    fn the_largest_reader_that_may_be_touched_is_meant() {
        let two = scene().with(|s| {
            let mut larger = reader(s).clone();
            larger.id = "cp".into();
            larger.reads.from_storage = mib(1200);
            larger.reads.called = mib(1200);
            s.neighbours.push(larger);
        });
        let whose = |s: &Scene| match s.proposal(&FileCache).target {
            Target::Reader(r) => r.workload.as_str().to_owned(),
            other => panic!("{other:?}"),
        };
        assert_eq!(whose(&two), "cp");
        let two = two.with(|s| reader(s).left_alone = Some("left alone: HOMEOSTAT=never".into()));
        assert_eq!(whose(&two), "dd");
    }

    #[test]
    fn of_several_readers_the_next_is_meant_when_the_first_is_contained() {
        let two = scene().with(|s| {
            let mut smaller = reader(s).clone();
            smaller.id = "cp".into();
            smaller.reads.from_storage = mib(100);
            smaller.reads.called = mib(100);
            s.neighbours.push(smaller);
            s.held.push(Held {
                strategy: ID.into(),
                target: Target::Reader(FileReader {
                    workload: "dd".into(),
                    processes: Vec::new(),
                    limit: mib(37),
                }),
                effect: GUESS,
                waited: 0.0,
                runnable: 0.0,
                machine_busy: 0.0,
            });
        });
        match two.proposal(&FileCache).target {
            Target::Reader(r) => assert_eq!(r.workload.as_str(), "cp"),
            other => panic!("{other:?}"),
        }
        let one = two.with(|s| {
            s.neighbours.pop();
        });
        assert!(one.reason(&FileCache).contains("no other workload"));
    }

    #[test]
    fn of_a_container_only_what_it_left_behind_is_dropped() {
        let p = scene()
            .with(|s| reader(s).kind = WorkloadKind::Container)
            .proposal(&FileCache);
        assert_eq!(p.effector.as_str(), "page_dropping");
        assert!(
            p.urgent && p.hypothesis.contains("can be dropped"),
            "{}",
            p.hypothesis
        );
    }

    #[test]
    fn whom_a_person_excluded_is_left_alone_with_advice() {
        for (change, why) in [
            (
                (|n: &mut Neighbour| n.left_alone = Some("left alone: by a person".into()))
                    as fn(&mut Neighbour),
                "by a person",
            ),
            (|n| n.processes.clear(), "0 processes"),
        ] {
            let declined = scene()
                .with(|s| {
                    change(reader(s));
                    reader(s).id = "tar[7]".into();
                })
                .declined(&FileCache);
            assert!(declined.reason.contains(why), "{}", declined.reason);
            // The tar of the next minute is no news.
            assert_eq!(declined.advice[0].id, "file_cache/reader/tar");
            assert!(declined.advice[0].remedy.contains("MemoryHigh"));
        }
    }

    #[test]
    fn who_starts_readers_one_after_another_is_left_alone_unless_it_has_a_group_of_its_own() {
        // A shell that runs `tar` in a loop: what tar has read by small calls counts to it.
        let shell = |s: &mut Scene| {
            s.machine_sample.paging.read_in = mib(300);
            reader(s).id = "bash[7]".into();
            reader(s).reads = Reads {
                from_storage: mib(300),
                called: mib(310),
                calls: 310 * 102,
                in_sequence: Bytes::ZERO,
                by_ended: mib(290),
            };
        };
        // … and what is at the other end of a pipe gets it once more.
        let piped = scene().with(shell).with(|s| reader(s).reads.called = mib(620));
        assert!(piped.declined(&FileCache).reason.contains("bash[7]"));
        let declined = scene().with(shell).declined(&FileCache);
        assert!(
            declined.reason.contains("that bash[7] starts") && declined.reason.contains("300 MiB/s"),
            "{}",
            declined.reason
        );
        assert!(declined.advice[0].remedy.contains("systemd-run --scope"));
        // Whom a person wants to be left alone can be limited by a person.
        let excluded = scene()
            .with(shell)
            .with(|s| reader(s).left_alone = Some("by a person".into()));
        assert!(
            excluded.declined(&FileCache).advice[0]
                .remedy
                .contains("MemoryHigh")
        );
        // A `cp` of a large file that has just ended: the shell itself does not read.
        let copied = scene().with(shell).with(|s| reader(s).reads.calls = 310 * 8);
        assert!(copied.declined(&FileCache).reason.contains("bash[7]"));
        // What ran for a minute and has ended now was not read now, and no advice helps any more.
        let ended = scene().with(shell).with(|s| {
            let of = &mut reader(s).reads;
            (of.from_storage, of.called, of.by_ended) = (mib(9000), mib(9010), mib(9000));
        });
        assert!(ended.reason(&FileCache).contains("no other workload"));
        // A unit is contained with all that it starts, if those that live read in order, or by large calls.
        let unit = |s: &mut Scene| reader(s).kind = WorkloadKind::Unit;
        assert!(
            scene()
                .with(shell)
                .with(unit)
                .reason(&FileCache)
                .contains("no other workload")
        );
        let scans = scene()
            .with(shell)
            .with(unit)
            .with(|s| reader(s).reads.calls = 310 * 8);
        assert!(scans.proposal(&FileCache).urgent);
        let in_order = scene()
            .with(shell)
            .with(unit)
            .with(|s| reader(s).reads.in_sequence = mib(15));
        assert!(in_order.proposal(&FileCache).urgent);
        // A reader that can be contained comes first, also where it reads less.
        let both = scene().with(shell).with(|s| {
            let mut dd = reader(s).clone();
            dd.id = "dd".into();
            dd.reads = Reads {
                from_storage: mib(100),
                called: mib(100),
                calls: 100,
                ..Reads::default()
            };
            s.neighbours.push(dd);
        });
        assert!(both.proposal(&FileCache).hypothesis.contains("dd"));
        // What the children of a program have read is no loss of its own.
        let parent = scene().with(|s| {
            s.sample.faults_major = 0;
            s.sample.reads = Reads {
                from_storage: mib(40),
                called: mib(40),
                calls: 40 * 128,
                in_sequence: Bytes::ZERO,
                by_ended: mib(40),
            };
        });
        assert!(parent.reason(&FileCache).contains("loses no pages"));
    }

    #[test]
    fn a_reader_that_was_proven_is_contained_before_anything_is_lost() {
        let nothing_lost = |s: &mut Scene| {
            s.sample.faults_major = 0;
            s.machine_sample.paging.refaults_file = 0;
            s.machine_sample.memory_free = mib(20 * 1024);
            s.machine_sample.memory_file_inactive = mib(1024);
            reader(s).is_proven = true;
        };
        // 21 GiB last a reader of 900 MiB/s for 24 s.
        let p = scene().with(nothing_lost).proposal(&FileCache);
        assert!(p.urgent && p.hypothesis.contains("for 24 s"), "{}", p.hypothesis);
        // Two minutes' worth, of which the reader's own pages are more than half by now: the kernel counts them as unused.
        let half_read = |s: &mut Scene| {
            s.machine_sample.memory_file_inactive = mib(110 * 1024);
            reader(s).read_so_far = mib(90 * 1024);
        };
        let p = scene().with(nothing_lost).with(half_read).proposal(&FileCache);
        assert!(p.hypothesis.contains("for 46 s"), "{}", p.hypothesis);
        // One that leaves nothing behind has no pages there, whatever it has read.
        let s = scene().with(nothing_lost).with(|s| {
            s.machine_sample.memory_free = mib(60 * 1024);
            reader(s).read_so_far = mib(900 * 1024);
        });
        assert!(s.reason(&FileCache).contains("loses no pages"));
        // What was never proven has to do harm first.
        let s = scene().with(nothing_lost).with(|s| reader(s).is_proven = false);
        assert!(s.reason(&FileCache).contains("loses no pages"));
        // Room for more than a minute; a reader that somebody excluded; one that is contained; one that does not read.
        for change in [
            (|s: &mut Scene| s.machine_sample.memory_free = mib(60 * 1024)) as fn(&mut Scene),
            |s| reader(s).left_alone = Some("by a person".into()),
            |s| {
                s.held.push(Held {
                    strategy: ID.into(),
                    target: Target::Reader(FileReader {
                        workload: "dd".into(),
                        processes: Vec::new(),
                        limit: mib(37),
                    }),
                    effect: GUESS,
                    waited: 0.0,
                    runnable: 0.0,
                    machine_busy: 0.0,
                });
            },
            |s| reader(s).reads = Reads::default(),
        ] {
            let s = scene().with(nothing_lost).with(change);
            assert!(s.reason(&FileCache).contains("loses no pages"));
        }
        // One that reads so itself is not protected from another.
        let s = scene()
            .with(nothing_lost)
            .with(|s| s.sample.reads = reader(s).reads);
        assert!(s.reason(&FileCache).contains("itself"));
    }

    #[test]
    fn on_a_slow_disk_few_pages_come_back_and_everybody_waits_for_them() {
        let slow = scene().with(|s| {
            s.sample.faults_major = 15;
            s.machine_sample.paging.refaults_file = 15;
        });
        assert!(slow.reason(&FileCache).contains("15 pages a second come back"));
        let waiting = slow.with(|s| s.machine_sample.pressure_memory.some = SECOND);
        assert!(waiting.proposal(&FileCache).urgent);
    }

    #[test]
    fn nothing_is_done_where_nobody_loses_or_nobody_takes() {
        for (change, why) in [
            (
                (|s: &mut Scene| s.sample.faults_major = 3) as fn(&mut Scene),
                "loses no pages",
            ),
            (
                |s| s.machine_sample.paging.refaults_file = 10,
                "nothing is pushed out",
            ),
            (
                |s| {
                    s.machine_sample.paging.refaults_file = 0;
                    s.machine_sample.pressure_memory.some = SECOND;
                },
                "nothing is pushed out",
            ),
            (|s| s.neighbours.clear(), "no other workload"),
            // It finds most of what it reads in memory: it would lose by a limit.
            (|s| reader(s).reads.from_storage = mib(300), "no other workload"),
            // It reads here and there itself.
            (
                |s| {
                    reader(s).reads.in_sequence = Bytes::ZERO;
                    reader(s).reads.calls = 900 * 128;
                },
                "no other workload",
            ),
            (
                |s| reader(s).interval = Nanoseconds::from_secs(600),
                "no other workload",
            ),
            (|s| s.sample.reads = reader(s).reads, "itself"),
        ] {
            let reason = scene().with(change).reason(&FileCache);
            assert!(reason.contains(why), "{why}: {reason}");
        }
    }

    #[test]
    fn it_ends_when_its_reader_has_ended_or_somebody_chose_otherwise() {
        let about = |name: &str| {
            Target::Reader(FileReader {
                workload: name.into(),
                processes: Vec::new(),
                limit: mib(37),
            })
        };
        let told = |sentences: &[&str]| {
            let sentences: Vec<String> = sentences.iter().map(|s| (*s).to_owned()).collect();
            scene().with(|s| s.workload.choice.tuned = sentences)
        };
        let why = |s: &Scene, name: &str| s.ask(|seen| FileCache.unwanted_change(seen, &about(name)));
        let s = told(&["Nice=5 in the unit", "memory_containment: dd: it has ended"]);
        assert_eq!(why(&s, "dd").as_deref(), Some("the reader dd: it has ended"));
        // Of another reader, also of one whose name begins so, nothing is said.
        assert_eq!(why(&s, "cp"), None);
        assert_eq!(why(&s, "d"), None);
        let s = told(&["page_dropping: c: d: it has ended"]);
        assert_eq!(why(&s, "c: d").as_deref(), Some("the reader c: d: it has ended"));
        assert_eq!(why(&scene(), "dd"), None);
    }
}
