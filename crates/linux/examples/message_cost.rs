//! What counting the messages of one program costs it, and everybody else: programs that make calls on one CPU, in windows in
//! which what one of them sends is counted, and in others, in turns.
//!
//! ```sh
//! cargo run --release -p homeostat-linux --example message_cost -- [PAIRS] [CPU]
//! ```
//!
//! What is passed by everybody is paid for by everybody, so there are two questions each of the program that is counted, and of
//! another one: what a message costs it, and what any other call. Told is by how much more CPU time that takes: mean over pairs of
//! windows, with two standard errors.
#![expect(
    clippy::unwrap_used,
    reason = "a measurement: it ends with the fault it meets"
)]

use homeostat_linux::Root;
use homeostat_linux::meters::{Meter, MeterSettings, kinds};
use homeostat_linux::sensors::processes::parse_stat;
use homeostat_model::{Fingerprint, MeterId, OperatorChoice, ProcessId, Workload, WorkloadKind};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// CPU time of a window.
const WINDOW: Duration = Duration::from_millis(100);
/// What a thread of ours may take until it counts.
const OPENING: Duration = Duration::from_millis(50);
/// What the kernel may take until nothing is counted any more.
const CLOSING: Duration = Duration::from_millis(150);
/// Calls between two looks at the clock.
const BATCH: u32 = 2_000;

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A program that makes calls when it is asked, and tells what one took (nanoseconds of its CPU time).
fn serve(cpu: usize) {
    let mut here = CpuSet::new();
    here.set(cpu);
    sched_setaffinity(None, &here).unwrap();
    let (a, b) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::empty(),
        None,
    )
    .unwrap();
    let mut byte = [0u8; 1];
    for what in std::io::stdin().lock().lines().map_while(Result::ok) {
        let (begun, mut calls) = (cpu_time(), 0u32);
        while cpu_time() - begun < WINDOW {
            for _ in 0..BATCH {
                if what == "messages" {
                    send(&a, b".", SendFlags::empty()).unwrap();
                    recv(&b, &mut byte[..], RecvFlags::empty()).unwrap();
                } else {
                    std::hint::black_box(rustix::process::getppid());
                }
            }
            calls += BATCH;
        }
        let mut out = std::io::stdout();
        writeln!(
            out,
            "{}",
            (cpu_time() - begun).as_nanos() as f64 / f64::from(calls)
        )
        .unwrap();
        out.flush().unwrap();
    }
}

struct Servant {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Servant {
    fn start(cpu: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["serve", &cpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self {
            child,
            to,
            from: BufReader::new(from),
        }
    }

    fn workload(&self) -> Workload {
        let pid = self.child.id() as i32;
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        Workload {
            id: "servant".into(),
            kind: WorkloadKind::ProcessGroup,
            fingerprint: Fingerprint::new("servant"),
            program: "servant".into(),
            executable: "/usr/bin/servant".into(),
            processes: vec![ProcessId {
                pid,
                start_ticks: parse_stat(&stat).unwrap().start_ticks,
            }],
            choice: OperatorChoice::default(),
        }
    }

    fn window(&mut self, what: &str) -> f64 {
        writeln!(self.to, "{what}").unwrap();
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }
}

impl Drop for Servant {
    fn drop(&mut self) {
        let _ = (self.child.kill(), self.child.wait());
    }
}

fn open(workload: &Workload, id: &str) -> Box<dyn Meter> {
    let id = MeterId::new(id);
    let settings = MeterSettings {
        // All the time, whatever it costs.
        probe_cost_max: 1.0,
        ..MeterSettings::default()
    };
    kinds(&settings)
        .iter_mut()
        .find_map(|kind| kind.open(&Root::default(), workload, &id).ok())
        .unwrap()
}

/// Mean and two standard errors.
fn mean(xs: &[f64]) -> (f64, f64) {
    let n = xs.len() as f64;
    let mean = xs.iter().sum::<f64>() / n;
    let variance = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, 2.0 * (variance / n).sqrt())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [serve_word, cpu] = arguments.as_slice()
        && serve_word == "serve"
    {
        return serve(cpu.parse().unwrap());
    }
    let pairs: usize = arguments.first().map_or(100, |a| a.parse().unwrap());
    let cpu: usize = arguments.get(1).map_or(0, |a| a.parse().unwrap());
    let (mut counted, mut other) = (Servant::start(cpu), Servant::start(cpu));
    let workload = counted.workload();
    println!("nanoseconds of CPU time, and two standard errors; {pairs} pairs of windows of {WINDOW:?}");
    for (of_counted, what, title) in [
        (
            true,
            "messages",
            "counted program: a message that is sent, which is counted, and received, which is not",
        ),
        (true, "plain", "counted program: another call (getppid)"),
        (
            false,
            "messages",
            "another program: a message that is sent and received",
        ),
        (false, "plain", "another program: getppid"),
    ] {
        let (mut more, mut without) = (Vec::new(), Vec::new());
        let mut hits = 0.0;
        for k in 0..pairs {
            let mut with = |counted: &mut Servant, other: &mut Servant| {
                let mut meter = open(&workload, "messages.sent");
                std::thread::sleep(OPENING);
                let cost = if of_counted { &mut *counted } else { other }.window(what);
                hits += meter.read(&workload).unwrap();
                drop(meter);
                // A thread of ours does that.
                std::thread::sleep(CLOSING);
                cost
            };
            let (on, off);
            if k % 2 == 0 {
                on = with(&mut counted, &mut other);
                off = if of_counted { &mut counted } else { &mut other }.window(what);
            } else {
                off = if of_counted { &mut counted } else { &mut other }.window(what);
                on = with(&mut counted, &mut other);
            }
            more.push(on - off);
            without.push(off);
        }
        let ((without, _), (more, error)) = (mean(&without), mean(&more));
        println!(
            "{title}: {without:.0} without, {more:+.1} ± {error:.1} while that one is counted ({hits:.0} counted)"
        );
    }
}
