//! Reads one meter of a program once a second, or every so many, and prints each reading as a line of JSON; what to do comes line by line on its
//! input, so that a benchmark can go to and fro between counting all the time, in turns and not at all (`tools/bench-turns`).
//!
//! `cargo run -p homeostat-linux --example probe_readings -- PID METER [SECONDS]`, then `open COST_MAX`, `close`, `open` (once more what was
//! open, without another search for points) or `quit`.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_meters::{MeterSettings, PointsWish};
use homeostat_model::{MeterId, WorkloadId};
use homeostat_platform::{SampleRequest, Sensors};
use std::io::BufRead;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// A platform that may spend this share of a program's CPU time, and the workload of the process.
fn platform(pid: i32, cost_max: f64) -> Option<(LinuxPlatform, WorkloadId)> {
    let settings = MeterSettings {
        probe_cost_max: cost_max,
        // Whoever runs this asks for it.
        progress_points: PointsWish::Always,
        ..MeterSettings::default()
    };
    let mut platform = LinuxPlatform::with_meters(Root::default(), &settings);
    let seen = platform.sample(&SampleRequest {
        scan: true,
        detail: Vec::new(),
    });
    let workload = seen
        .ok()?
        .workloads?
        .into_iter()
        .find(|w| w.processes.iter().any(|p| p.pid == pid))?;
    Some((platform, workload.id))
}

fn orders() -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    told
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [pid, meter, every @ ..] = arguments.as_slice() else {
        println!("of which process, and what? probe_readings PID METER [SECONDS]");
        return;
    };
    let every = every.first().map_or(1.0, |s| s.parse().expect("seconds"));
    let (pid, meter) = (pid.parse().expect("a process id"), MeterId::new(meter.as_str()));
    let orders = orders();
    let (mut platform, mut workload) = platform_of(pid, 0.005);
    let (begun, mut number) = (Instant::now(), 0u32);
    loop {
        match orders.try_recv() {
            Ok(order) => match order.split_whitespace().collect::<Vec<_>>()[..] {
                ["open", ref cost_max @ ..] => {
                    if let [cost_max] = cost_max {
                        let cost_max = cost_max.parse().expect("a share");
                        (platform, workload) = platform_of(pid, cost_max);
                    }
                    let opened = platform
                        .find_meters(&workload)
                        .and_then(|_| platform.open_meter(&workload, &meter));
                    if let Err(e) = opened {
                        println!("{}", serde_json::json!({ "error": e.to_string() }));
                    }
                }
                ["close"] => platform.close_meter(&workload, &meter),
                _ => return,
            },
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {}
        }
        number += 1;
        std::thread::sleep(
            (begun + Duration::from_secs_f64(every * f64::from(number)))
                .saturating_duration_since(Instant::now()),
        );
        let Ok(seen) = platform.sample(&SampleRequest {
            scan: number % ((5.0 / every) as u32).max(1) == 0,
            detail: vec![workload.clone()],
        }) else {
            return;
        };
        let Some(sample) = seen.samples.iter().find(|s| s.id == workload) else {
            return;
        };
        let reading = sample.meters.iter().find(|m| m.meter == meter);
        println!(
            "{}",
            serde_json::json!({
                "at": seen.at.as_secs_f64(),
                "seconds": sample.interval.as_secs_f64(),
                "cpu": sample.cpu.as_secs_f64(),
                "work": reading.map(|r| r.work),
                "counted": reading.map(|r| r.counted),
                "own_cpu": seen.own_cpu.as_secs_f64(),
            })
        );
    }
}

fn platform_of(pid: i32, cost_max: f64) -> (LinuxPlatform, WorkloadId) {
    platform(pid, cost_max).expect("the process is part of a workload")
}
