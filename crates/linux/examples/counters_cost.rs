//! What counting a workload costs, measured on a process of our own with software events: opening, reading and closing
//! groups on its threads, and what a switch of threads costs more while they are open.
//!
//! ```sh
//! cargo run --release -p homeostat-linux --example counters_cost -- [THREADS]
//! ```
//!
//! Software events go through the same calls as hardware events, but need no programming of registers at a switch of
//! threads: on a machine with a PMU that part is dearer (`--hardware` counts cycles and instructions instead).
#![expect(
    clippy::unwrap_used,
    reason = "a measurement: it ends with the fault it meets"
)]

use homeostat_kernel::perf::{Encoding, Group, Scope};
use homeostat_kernel::probe::process_cpu_time;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// Two threads that hand a message to each other, and how long a round takes.
fn round_trip_ns(rounds: u32) -> f64 {
    let (to, from_main): (Sender<()>, Receiver<()>) = channel();
    let (back, answers) = channel();
    let partner = std::thread::spawn(move || {
        while from_main.recv().is_ok() {
            if back.send(()).is_err() {
                break;
            }
        }
    });
    let begin = Instant::now();
    for _ in 0..rounds {
        to.send(()).unwrap();
        answers.recv().unwrap();
    }
    let took = begin.elapsed();
    drop(to);
    partner.join().unwrap();
    took.as_nanos() as f64 / f64::from(rounds)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let hardware = arguments.iter().any(|a| a == "--hardware");
    let threads: usize = arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(64);
    let events = if hardware {
        [
            Encoding::CYCLES,
            Encoding::INSTRUCTIONS,
            Encoding::STALLED_CYCLES_BACKEND,
            Encoding::NODE_READS,
        ]
    } else {
        [
            Encoding::TASK_CLOCK,
            Encoding::PAGE_FAULTS,
            Encoding::CONTEXT_SWITCHES,
            Encoding::TASK_CLOCK,
        ]
    };
    let stop = Arc::new(AtomicBool::new(false));
    let sleepers: Vec<_> = (0..threads)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::park_timeout(std::time::Duration::from_millis(200));
                }
            })
        })
        .collect();
    let tids: Vec<i32> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|e| e.unwrap().file_name().to_string_lossy().parse().ok())
        .collect();
    let cpu = || process_cpu_time(std::process::id() as i32).unwrap_or(0);
    // Wall time and CPU time in microseconds a thread: on a machine that is busy with other things they differ.
    let timed = |what: &mut dyn FnMut()| {
        let (begin, used) = (Instant::now(), cpu());
        what();
        let threads = tids.len() as f64;
        (
            begin.elapsed().as_secs_f64() * 1e6 / threads,
            (cpu() - used) as f64 / 1e3 / threads,
        )
    };
    let mut groups = Vec::new();
    let mut failed = None;
    let opened = timed(&mut || {
        for tid in &tids {
            match Group::open(&events, Scope::Thread(*tid)) {
                Ok(group) => groups.push(group),
                Err(e) => failed = Some(e),
            }
        }
    });
    if let Some(e) = failed {
        println!("these events cannot be counted here: {e}");
        return;
    }
    let counted = groups.iter().map(Group::descriptors).sum::<usize>();
    let read = timed(&mut || groups.iter().for_each(|g| drop(g.read().unwrap())));
    let closed = timed(&mut || groups.clear());
    println!(
        "{} threads, {counted} events, us a thread as wall time (CPU time): opening {:.1} ({:.1}), reading {:.2} ({:.2}), \
         closing {:.1} ({:.1})",
        tids.len(),
        opened.0,
        opened.1,
        read.0,
        read.1,
        closed.0,
        closed.1
    );
    // Interleaved, so that what else the machine does hits both alike.
    let mut without = Vec::new();
    let mut with = Vec::new();
    for _ in 0..15 {
        without.push(round_trip_ns(4000));
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        // Inherited by the partner thread.
        let open: Vec<Group> = Group::open(&events, Scope::Thread(me)).into_iter().collect();
        with.push(round_trip_ns(4000));
        drop(open);
    }
    without.sort_by(f64::total_cmp);
    with.sort_by(f64::total_cmp);
    let (plain, counted) = (without[without.len() / 2], with[with.len() / 2]);
    println!(
        "a round trip between two threads (some two to four switches): {plain:.0} ns without, {counted:.0} ns with one group \
         (+{:.0} ns), medians of 15",
        counted - plain
    );
    stop.store(true, Ordering::Relaxed);
    for sleeper in sleepers {
        sleeper.thread().unpark();
        sleeper.join().unwrap();
    }
}
