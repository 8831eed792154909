//! Figures from made totals, and windows over software events on processes of our own: the same code, other events.

use crate::counters::*;
use homeostat_model::{Fingerprint, OperatorChoice, ProcessId, WorkloadKind};
use std::process::{Child, Command, Stdio};

fn totals(values: &[(What, f64)]) -> Totals {
    let mut values: BTreeMap<What, f64> = values.iter().copied().collect();
    values.entry(What::Cycles).or_insert(1000.0);
    Totals {
        values,
        enabled_ns: 1_000_000_000,
        running_ns: 1_000_000_000,
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn an_intel_server_tells_everything() {
    let phases = [
        totals(&[
            (What::Instructions, 500.0),
            (What::MissStall, 300.0),
            (What::LoadWalkCycles, 60.0),
            (What::StoreWalkCycles, 20.0),
        ]),
        totals(&[(What::PrefetchMisses, 100.0), (What::PrefetchUseless, 75.0)]),
        totals(&[
            (What::FromNearMemory, 60.0),
            (What::FromFarMemory, 20.0),
            (What::FromFarCache, 0.0),
        ]),
        totals(&[(What::LinesAll, 100.0), (What::LinesDemand, 60.0)]),
    ];
    let c = figures(&phases, 2, Some(0.8)).unwrap();
    assert!(near(c.cycles_per_instruction, 2.0));
    assert!(near(c.memory_stall_share, 0.3) && near(c.cache_to_cache_stall_share, 0.0));
    assert!(near(c.table_walk_share, 0.08) && near(c.local_share, 0.75));
    // Of 40 prefetched lines 30 were useless; 10 covered what would have been 70 misses.
    assert!(near(c.prefetch_share, 0.3) && near(c.prefetch_useful_share, 1.0 / 7.0));
    assert!(near(c.busiest_link, 0.8));
}

#[test]
fn stalls_are_shared_out_by_where_lines_came_from() {
    let phases = [
        totals(&[
            (What::Instructions, 500.0),
            (What::LoadStall, 400.0),
            (What::Walks, 2.0),
        ]),
        totals(&[
            (What::FromOwnCache, 60.0),
            (What::FromNearCache, 9.0),
            (What::FromFarCache, 0.0),
            (What::FromNearMemory, 10.0),
            (What::FromFarMemory, 0.0),
        ]),
        totals(&[(What::LinesDemand, 80.0), (What::LinesPrefetched, 20.0)]),
    ];
    let c = figures(&phases, 1, None).unwrap();
    // 60 x 15, 9 x 100 and 10 x 90 ns: a third each.
    assert!(near(c.memory_stall_share, 0.4 / 3.0), "{c:?}");
    assert!(near(c.cache_to_cache_stall_share, 0.4 / 3.0));
    assert!(near(c.table_walk_share, 0.07));
    assert!(near(c.local_share, 1.0), "one node");
    // Which of the prefetched lines were used is not counted: nothing is claimed.
    assert!(c.prefetch_share.is_nan() && c.prefetch_useful_share.is_nan() && c.busiest_link.is_nan());
}

#[test]
fn what_was_counted_too_little_is_unknown() {
    let full = totals(&[(What::Instructions, 500.0), (What::MissStall, 300.0)]);
    assert!(figures(std::slice::from_ref(&full), 1, None).is_some());
    // Few turns: an error of sqrt(.95 x 4 ms / 50 ms) = 28 %.
    let crowded = Totals {
        running_ns: 50_000_000,
        ..full.clone()
    };
    assert_eq!(figures(&[crowded], 1, None), None);
    // Many turns of a crowded machine are enough: sqrt(.5 x 4 ms / 500 ms) = 6 %.
    let shared = Totals {
        running_ns: 500_000_000,
        ..full.clone()
    };
    assert!(figures(&[shared], 1, None).is_some());
    let idle = Totals {
        enabled_ns: 1_000_000,
        running_ns: 1_000_000,
        ..full
    };
    assert_eq!(figures(&[idle], 1, None), None);
    assert_eq!(figures(&[], 1, None), None);
}

#[test]
fn figures_of_different_phases_are_not_mixed() {
    // Cycles of one phase and instructions of another say nothing together.
    let phases = [totals(&[(What::MissStall, 1.0)]), {
        let mut other = totals(&[(What::Instructions, 1.0)]);
        other.values.remove(&What::Cycles);
        other
    }];
    assert_eq!(figures(&phases, 1, None), None);
}

#[test]
fn no_prefetch_at_all_is_known_without_knowing_its_use() {
    let phases = [
        totals(&[(What::Instructions, 1.0)]),
        totals(&[(What::LinesAll, 50.0), (What::LinesDemand, 50.0)]),
    ];
    let c = figures(&phases, 1, None).unwrap();
    assert!(near(c.prefetch_share, 0.0) && near(c.prefetch_useful_share, 0.0));
    assert!(c.memory_stall_share.is_nan() && c.table_walk_share.is_nan());
}

/// A process of our own that keeps a CPU busy or sleeps, ended with the test.
struct Busy(Child);

impl Busy {
    fn start(script: &str) -> Self {
        Self(
            Command::new("/bin/sh")
                .args(["-c", script])
                .stdin(Stdio::null())
                .spawn()
                .unwrap(),
        )
    }
    fn workload(&self) -> Workload {
        let pid = self.0.id() as i32;
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        Workload {
            id: WorkloadId::from("busy"),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: Fingerprint::from("busy"),
            program: "sh".into(),
            executable: "/bin/sh".into(),
            processes: vec![ProcessId {
                pid,
                start_ticks: homeostat_kernel::process::start_ticks(&stat).unwrap(),
            }],
            choice: OperatorChoice::default(),
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Software events in the place of cycles and instructions.
fn software() -> EventSet {
    let clock = (What::Cycles, Encoding::TASK_CLOCK);
    EventSet {
        name: "software events",
        groups: vec![
            vec![clock, (What::Instructions, Encoding::TASK_CLOCK)],
            vec![clock, (What::MissStall, Encoding::PAGE_FAULTS)],
        ],
    }
}

fn at(seconds: u64) -> Nanoseconds {
    Nanoseconds::from_secs(seconds)
}

/// Waits until the process has used some more CPU time: time is the caller's, but counters count what is really done.
fn let_it_run(busy: &Busy) {
    let used = || homeostat_kernel::probe::process_cpu_time(busy.0.id() as i32).unwrap();
    let until = used() + 3 * COUNTED_MIN_NS;
    while used() < until {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_window_goes_through_its_phases_and_then_rests() {
    let root = Root::default();
    let busy = Busy::start("while :; do :; done");
    let workload = busy.workload();
    let mut counters = HardwareCounters::with_events(software());
    counters.follow(&root, &workload, 1, at(10));
    if let Some(why) = counters.impossible() {
        println!("skipped: software events cannot be counted here: {why}");
        return;
    }
    assert_eq!(counters.windows.len(), 1);
    let_it_run(&busy);
    // Before the phase is over nothing happens.
    counters.follow(&root, &workload, 1, at(11));
    assert!(counters.windows[&workload.id].totals.is_empty());
    counters.follow(&root, &workload, 1, at(12));
    assert_eq!(counters.windows[&workload.id].totals.len(), 1);
    let_it_run(&busy);
    counters.follow(&root, &workload, 1, at(14));
    assert!(counters.windows.is_empty());
    let reading = counters.latest(&workload.id, at(15)).unwrap();
    // The clock by itself: one "cycle" an "instruction", within the times of two readings of the kernel.
    assert!(
        (reading.counters.cycles_per_instruction - 1.0).abs() < 0.05,
        "{reading:?}"
    );
    assert_eq!((reading.threads, reading.coverage), (1, 1.0));
    assert!(counters.latest(&workload.id, at(15) + FRESH).is_none());
    // At rest nothing is opened; then again.
    counters.follow(&root, &workload, 1, at(20));
    assert!(counters.windows.is_empty());
    counters.follow(&root, &workload, 1, at(14) + REST);
    assert_eq!(counters.windows.len(), 1);
    counters.sweep(at(14) + REST + ABANDONED);
    assert!(counters.windows.is_empty(), "abandoned");
}

#[test]
fn counters_give_way_to_a_profiler() {
    let root = Root::default();
    let busy = Busy::start("sleep 60");
    let workload = busy.workload();
    let mut counters = HardwareCounters::with_events(software());
    counters.follow(&root, &workload, 1, at(1));
    if counters.impossible().is_some() {
        println!("skipped: software events cannot be counted here");
        return;
    }
    assert_eq!(counters.windows.len(), 1);
    counters.yield_to(vec![others::by_program("perf").unwrap()]);
    assert!(counters.windows.is_empty());
    counters.follow(&root, &workload, 1, at(2));
    assert!(counters.windows.is_empty());
    counters.yield_to(Vec::new());
    counters.follow(&root, &workload, 1, at(3));
    assert_eq!(counters.windows.len(), 1);
    counters.retain(|_| false);
    assert!(counters.windows.is_empty());
}

#[test]
fn a_machine_that_does_not_count_is_asked_once() {
    let busy = Busy::start("sleep 60");
    let nonsense = Encoding {
        source: 1,
        config: 9_999,
        config1: 0,
        user_only: false,
    };
    let set = EventSet {
        name: "nothing",
        groups: vec![vec![(What::Cycles, nonsense)]],
    };
    let mut counters = HardwareCounters::with_events(set);
    counters.follow(&Root::default(), &busy.workload(), 1, at(1));
    assert!(counters.impossible().is_some() && counters.windows.is_empty());
}

#[test]
fn a_workload_that_is_gone_is_no_fault_of_the_machine() {
    let workload = {
        let busy = Busy::start("sleep 60");
        busy.workload()
    };
    let mut counters = HardwareCounters::with_events(software());
    counters.follow(&Root::default(), &workload, 1, at(1));
    assert!(counters.impossible().is_none() && counters.windows.is_empty());
}

#[test]
fn a_captured_machine_is_not_counted() {
    let empty = tempfile::tempdir().unwrap();
    let busy = Busy::start("sleep 60");
    let mut counters = HardwareCounters::with_events(software());
    counters.follow(&Root::new(empty.path()), &busy.workload(), 1, at(1));
    assert!(counters.windows.is_empty() && counters.impossible().is_none());
}

#[test]
fn the_probe_agrees_with_itself() {
    let ability = Ability::probe(&Root::default());
    let (has, lacks) = ability.figures();
    assert_eq!(has.len() + lacks.len(), 6);
    // Either cycles and instructions work, or the reason is told.
    assert_eq!(
        ability.refused.is_none(),
        has.contains(&"cycles per instruction"),
        "{ability:?}"
    );
}
