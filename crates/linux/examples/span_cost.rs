//! What following the spans of a program costs it, and its reader: `cat` and this program hand a byte to each other on one CPU, in
//! windows in which the switches of `cat` are recorded and read, and in others, in turns.
//!
//! ```sh
//! cargo run --release -p homeostat-linux --example span_cost -- [WINDOWS] [CPU]
//! ```
//!
//! Told is by how much more CPU time of both together a round takes (median over pairs of windows), of which there are two
//! records: `cat` starts and stops.
#![expect(
    clippy::unwrap_used,
    reason = "a measurement: it ends with the fault it meets"
)]

use homeostat_kernel::Root;
use homeostat_meters::Spans;
use homeostat_model::{Fingerprint, OperatorChoice, ProcessId, Workload, WorkloadKind};
use homeostat_sensors::processes::parse_stat;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time on a CPU of a thread in nanoseconds.
fn ran(path: &str) -> f64 {
    let text = std::fs::read_to_string(path).unwrap();
    text.split_ascii_whitespace().next().unwrap().parse().unwrap()
}

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let windows = arguments.first().copied().unwrap_or(100);
    let cpu = arguments.get(1).copied().unwrap_or(0);
    let mut here = CpuSet::new();
    here.set(cpu);
    let mut child = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id() as i32;
    let (mut to, mut from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let rounds = Arc::new(AtomicU64::new(0));
    let (counter, thread) = (Arc::clone(&rounds), Arc::new(AtomicU64::new(0)));
    let own = Arc::clone(&thread);
    std::thread::spawn(move || {
        sched_setaffinity(None, &here).unwrap();
        own.store(gettid().as_raw_nonzero().get() as u64, Ordering::Relaxed);
        let mut answer = [0u8; 1];
        while to.write_all(b".").is_ok() && from.read_exact(&mut answer).is_ok() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    sched_setaffinity(rustix::process::Pid::from_raw(pid), &here).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
    let workload = Workload {
        id: "cat".into(),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::new("cat"),
        program: "cat".into(),
        executable: "/usr/bin/cat".into(),
        processes: vec![ProcessId {
            pid,
            start_ticks: parse_stat(&stat).unwrap().start_ticks,
        }],
        choice: OperatorChoice::default(),
    };
    let client = format!("/proc/self/task/{}/schedstat", thread.load(Ordering::Relaxed));
    let server = format!("/proc/{pid}/schedstat");
    let window = |spans: &mut Option<Spans>| {
        let before = (
            rounds.load(Ordering::Relaxed),
            ran(&client) + ran(&server),
            Instant::now(),
        );
        while before.2.elapsed() < Duration::from_millis(200) {
            std::thread::sleep(Duration::from_millis(4));
            if let Some(spans) = spans {
                spans.read();
            }
        }
        let done = (rounds.load(Ordering::Relaxed) - before.0) as f64;
        (ran(&client) + ran(&server) - before.1) / done
    };
    let (mut more, mut plain, mut opening, mut closing) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut seen = 0;
    for k in 0..windows {
        let mut with = |seen: &mut u64| {
            let at = Instant::now();
            let mut spans = Some(Spans::open(&Root::default(), &workload).unwrap());
            opening.push(at.elapsed().as_secs_f64() * 1e3);
            let cost = window(&mut spans);
            *seen += spans.as_ref().and_then(Spans::report).map_or(0, |r| r.count);
            let at = Instant::now();
            drop(spans);
            closing.push(at.elapsed().as_secs_f64() * 1e3);
            cost
        };
        let (on, off) = if k % 2 == 0 {
            let on = with(&mut seen);
            (on, window(&mut None))
        } else {
            let off = window(&mut None);
            (with(&mut seen), off)
        };
        more.push(on - off);
        plain.push(off);
    }
    let _ = (child.kill(), child.wait());
    let quartiles = |xs: &mut Vec<f64>| {
        xs.sort_by(f64::total_cmp);
        let at = |share: f64| xs[((xs.len() - 1) as f64 * share) as usize];
        (at(0.25), at(0.5), at(0.75))
    };
    let round = quartiles(&mut plain).1;
    let (low, median, high) = quartiles(&mut more);
    println!("a round without: {round:.0} ns; {seen} spans were read");
    println!("more with records: {median:.0} ns, quartiles {low:.0} to {high:.0} ns");
    println!("a record: {:.0} ns", median / 2.0);
    let (opened, closed) = (quartiles(&mut opening), quartiles(&mut closing));
    println!(
        "opening {:.2} ms (quartiles {:.2} to {:.2}), closing {:.2} ms ({:.2} to {:.2})",
        opened.1, opened.0, opened.2, closed.1, closed.0, closed.2
    );
}
