//! The spans of real programs from wait to wait, as the daemon gets them: with the samples of a workload that is followed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_model::{SpanHistogram, Spans, WorkloadId, WorkloadSample};
use homeostat_platform::{SampleRequest, Sensors};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shells that are started by one program are one workload: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A program that answers what is written to it, ended when the test ends.
struct Server(
    Child,
    #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>,
);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    fn start(program: &str, arguments: &[&str]) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let server = Self(command.spawn().unwrap(), alone);
        std::thread::sleep(Duration::from_millis(100));
        server
    }

    /// Asks it and waits for the answer, again and again, with a pause in between; how often.
    fn ask(&mut self, request: &[u8], pause: Duration, length: Duration) -> u32 {
        let mut asked = 0;
        let end = Instant::now() + length;
        let (mut to, mut from) = (self.0.stdin.take().unwrap(), self.0.stdout.take().unwrap());
        let mut answer = [0u8; 1];
        while Instant::now() < end {
            to.write_all(request).unwrap();
            from.read_exact(&mut answer).unwrap();
            asked += 1;
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
        }
        (self.0.stdin, self.0.stdout) = (Some(to), Some(from));
        asked
    }
}

fn platform(server: &Server) -> (LinuxPlatform, WorkloadId) {
    let mut platform = LinuxPlatform::new(Root::default());
    let seen = platform
        .sample(&SampleRequest {
            scan: true,
            detail: vec![],
        })
        .unwrap();
    let pid = server.0.id() as i32;
    let workload = seen
        .workloads
        .unwrap()
        .into_iter()
        .find(|w| w.processes.iter().any(|p| p.pid == pid))
        .expect("it is a workload");
    (platform, workload.id)
}

fn spans(platform: &mut LinuxPlatform, id: &WorkloadId) -> Option<Result<Spans, String>> {
    sample(platform, id).spans
}

fn sample(platform: &mut LinuxPlatform, id: &WorkloadId) -> WorkloadSample {
    let seen = platform
        .sample(&SampleRequest {
            scan: false,
            detail: vec![id.clone()],
        })
        .unwrap();
    seen.samples.into_iter().find(|s| s.id == *id).unwrap()
}

/// Whether this kernel and this user can see the switches of a thread.
fn refused_by_the_machine(result: &Option<Result<Spans, String>>) -> bool {
    let refused = matches!(result, Some(Err(why)) if why.contains("cannot be seen"));
    if refused {
        eprintln!("skipped: this kernel or this user cannot see the switches of a thread");
    }
    refused
}

/// Counts to the number that it reads, and answers.
const COUNTS: &str = "while read n; do i=0; while [ $i -lt $n ]; do i=$((i+1)); done; echo; done";
const PAUSE: Duration = Duration::from_millis(4);
/// What recording a start and a stop is taken to cost, and the share of its CPU time that all of that may: of less all is recorded.
const SPAN_COST_S: f64 = 2e-6;
const COST_MAX: f64 = 0.005;

#[test]
fn the_spans_of_a_server_are_as_long_as_it_works_at_a_request() {
    let mut server = Server::start("sh", &["-c", COUNTS]);
    let (mut platform, id) = platform(&server);
    assert_eq!(spans(&mut platform, &id), None, "nobody asked");
    platform.follow_spans(std::slice::from_ref(&id));
    let mut told = None;
    for _ in 0..20 {
        server.ask(b"2000\n", PAUSE, Duration::from_millis(500));
        told = spans(&mut platform, &id);
        if told.is_some() {
            break;
        }
    }
    if refused_by_the_machine(&told) {
        return;
    }
    let mut median = |request: &[u8]| {
        let mut all = SpanHistogram::default();
        for _ in 0..3 {
            server.ask(request, PAUSE, Duration::from_secs(1));
            let spans = spans(&mut platform, &id).expect("asked").expect("affordable");
            assert!(spans.number(0.0) > 20.0, "{spans:?}");
            all.add_spans(&spans);
        }
        all.quantile(0.5).unwrap()
    };
    let (short, long) = (median(b"2000\n"), median(b"8000\n"));
    // A shell counts some two million times a second.
    assert!((100_000.0..20_000_000.0).contains(&short), "{short} ns");
    assert!((2.0..8.0).contains(&(long / short)), "{short} and {long} ns");
    assert_eq!(platform.threads_followed(&id), Some(1));
    platform.follow_spans(&[]);
    assert_eq!(spans(&mut platform, &id), None, "nobody asks any more");
    assert_eq!(platform.threads_followed(&id), None);
}

#[test]
fn short_spans_are_recorded_in_windows_and_their_number_is_known() {
    let mut server = Server::start("sh", &["-c", COUNTS]);
    let (mut platform, id) = platform(&server);
    platform.follow_spans(std::slice::from_ref(&id));
    let (mut asked, mut number, mut seen, mut told, mut cpu) = (0, 0.0, 0.0, 0, 0.0);
    for _ in 0..14 {
        let now = server.ask(b"30\n", Duration::from_micros(300), Duration::from_millis(700));
        let sample = sample(&mut platform, &id);
        if refused_by_the_machine(&sample.spans) {
            return;
        }
        if let Some(spans) = sample.spans {
            let spans = spans.expect("a part of the time is affordable");
            asked += now;
            number += spans.number(sample.cpu.as_secs_f64());
            seen += spans.number(0.0);
            cpu += sample.cpu.as_secs_f64();
            told += 1;
        }
    }
    let cost = number * SPAN_COST_S / cpu;
    eprintln!(
        "{told} intervals: {asked} requests, {number:.0} spans of which {seen} were recorded; all would cost {cost:.3}"
    );
    assert!(told >= 5 && seen > 100.0, "{told} {seen}");
    // On a machine so slow that a request takes .4 ms all of them may be recorded.
    assert!(
        cost < COST_MAX || seen < 0.6 * number,
        "{seen} of {number}: not all the time"
    );
    // What was recorded, with what the first window needed to learn that.
    assert!(seen * SPAN_COST_S < 2.0 * COST_MAX * cpu, "{seen} in {cpu} s");
    let ratio = number / f64::from(asked);
    assert!((0.6..1.7).contains(&ratio), "{number} spans of {asked} requests");
}

#[test]
fn what_switches_very_often_is_recorded_for_so_little_of_the_time_that_it_costs_half_a_percent() {
    let mut server = Server::start("cat", &[]);
    let (mut platform, id) = platform(&server);
    platform.follow_spans(std::slice::from_ref(&id));
    let (mut cost, mut cpu, mut told) = (0.0, 0.0, 0);
    for _ in 0..20 {
        server.ask(b".", Duration::ZERO, Duration::from_millis(400));
        let sample = sample(&mut platform, &id);
        if refused_by_the_machine(&sample.spans) {
            return;
        }
        match sample.spans {
            None => {}
            // Where a round is so short that even that would be too much.
            Some(Err(why)) => {
                assert!(why.contains("times per second of its CPU time"), "{why}");
                return;
            }
            Some(Ok(spans)) => {
                // A start and a stop, and what a preemption adds.
                cost += spans.number(0.0) * SPAN_COST_S;
                cpu += sample.cpu.as_secs_f64();
                told += 1;
            }
        }
    }
    eprintln!("{told} intervals: {:.2} % of its CPU time", cost / cpu * 100.0);
    assert!(told >= 5 && cost > 0.0);
    assert!(cost <= 0.006 * cpu, "{cost} s of {cpu} s");
}

#[test]
fn what_never_waits_has_no_spans() {
    let server = Server::start("sh", &["-c", "while :; do :; done"]);
    let (mut platform, id) = platform(&server);
    platform.follow_spans(std::slice::from_ref(&id));
    let mut told = None;
    for _ in 0..40 {
        std::thread::sleep(Duration::from_millis(250));
        told = spans(&mut platform, &id);
        if told.is_some() {
            break;
        }
    }
    if refused_by_the_machine(&told) {
        return;
    }
    let spans = told.expect("known after some time").expect("affordable");
    assert!(spans.number(0.0) < 5.0, "{spans:?}");
}
