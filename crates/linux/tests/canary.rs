//! The memory canary as a real process.

use homeostat_helper::canary::Canary;
use std::time::{Duration, Instant};

fn status(pid: i32, field: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim_start_matches(':').trim().to_owned())
}

fn lives(pid: i32) -> bool {
    status(pid, "State").is_some_and(|state| !state.starts_with('Z'))
}

fn wait_for(mut what: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        if what() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn it_measures_without_privileges_in_little_memory_and_ends_with_its_handle() {
    homeostat_meters::service::start();
    let mut canary = Canary::start().unwrap();
    let pid = canary.pid();
    let until = Instant::now() + Duration::from_secs(60);
    let (mut loads, mut slowest) = (0, Duration::ZERO);
    let mut reading = canary.read().unwrap();
    assert_eq!(reading.loads, 0, "its memory is filled first");
    while loads < 10_000 {
        assert!(Instant::now() < until, "{reading:?}");
        std::thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        reading = canary.read().unwrap();
        slowest = slowest.max(begun.elapsed());
        loads += reading.loads;
        if let Some(each) = reading.loading.0.checked_div(reading.loads) {
            assert!((1..100_000).contains(&each), "{reading:?}");
        }
    }
    println!("slowest reading: {slowest:?}, last: {reading:?}");
    assert!((64 << 20..=72 << 20).contains(&reading.resident.0), "{reading:?}");
    assert_eq!(status(pid, "CapEff").as_deref(), Some("0000000000000000"));
    assert_eq!(status(pid, "CapPrm").as_deref(), Some("0000000000000000"));
    assert_eq!(status(pid, "NoNewPrivs").as_deref(), Some("1"));
    assert_eq!(status(pid, "Seccomp").as_deref(), Some("2"));
    assert_eq!(
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .map(Iterator::count)
            .ok(),
        Some(6)
    );
    drop(canary);
    assert!(wait_for(|| !lives(pid)));
}

#[test]
fn one_that_is_killed_is_told() {
    homeostat_meters::service::start();
    let mut canary = Canary::start().unwrap();
    let pid = rustix::process::Pid::from_raw(canary.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert!(wait_for(|| canary.read().is_err()));
}
