//! The sensors on the running machine: what is seen of programs that the test starts and ends itself.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_linux::LinuxPlatform;
use homeostat_model::{CapabilityState, MemoryKind, Nanoseconds, Workload, WorkloadKind};
use homeostat_platform::{Clock, SampleRequest, Sensors, conformance};
use std::process::{Child, Command, Stdio};

/// Ends the program when the test ends, however it ends.
struct Ended(Child);
impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
impl Ended {
    fn start(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(program);
        command.args(arguments).envs(environment.iter().copied());
        Self::run(program, command.stdin(Stdio::null()))
    }
    fn run(program: &str, command: &mut Command) -> Self {
        let child = Self(command.stdout(Stdio::null()).spawn().unwrap());
        // Wait until it runs its own program and no longer our image.
        let wanted = std::fs::canonicalize(which(program)).unwrap();
        for _ in 0..1000 {
            if std::fs::read_link(format!("/proc/{}/exe", child.0.id())).is_ok_and(|exe| exe == wanted) {
                return child;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("{program} did not start");
    }
    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

fn which(program: &str) -> std::path::PathBuf {
    ["/usr/bin", "/bin"]
        .iter()
        .map(|d| std::path::Path::new(d).join(program))
        .find(|p| p.exists())
        .unwrap()
}

fn scan(platform: &mut LinuxPlatform) -> Vec<Workload> {
    platform
        .sample(&SampleRequest {
            scan: true,
            detail: vec![],
        })
        .unwrap()
        .workloads
        .unwrap()
}

fn of(list: &[Workload], pid: i32) -> Option<&Workload> {
    list.iter().find(|w| w.processes.iter().any(|p| p.pid == pid))
}

#[test]
fn the_running_machine_keeps_the_promises_of_the_seam() {
    let mut platform = LinuxPlatform::new(Root::default());
    assert_eq!(conformance::sensing(&mut platform), Vec::<String>::new());
}

#[test]
fn a_program_appears_as_a_workload_and_disappears_when_it_ends() {
    let mut platform = LinuxPlatform::new(Root::default());
    let mut child = Ended::start("sleep", &["600"], &[]);
    let pid = child.pid();
    let list = scan(&mut platform);
    let workload = of(&list, pid).expect("the program is a workload");
    assert_eq!(workload.program, "sleep");
    assert!(workload.executable.ends_with("sleep") || workload.executable.ends_with("coreutils"));
    assert!(
        list.iter()
            .all(|w| w.processes.iter().all(|p| p.pid != std::process::id() as i32))
    );
    let id = workload.id.clone();
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert!(of(&scan(&mut platform), pid).is_none());
    assert!(platform.inspect_memory(&id).is_err());
}

#[test]
fn a_program_that_another_one_replaces_in_the_same_process_is_seen_to() {
    let mut platform = LinuxPlatform::new(Root::default());
    let mut command = Command::new("sh");
    command.args(["-c", "read line; exec sh -c 'read line; :'"]);
    let mut child = Ended::run("sh", command.stdin(Stdio::piped()));
    let mut orders = child.0.stdin.take().unwrap();
    let workload = of(&scan(&mut platform), child.pid()).unwrap().clone();
    let mut executions = || {
        let request = SampleRequest {
            scan: false,
            detail: vec![workload.id.clone()],
        };
        let samples = platform.sample(&request).unwrap().samples;
        samples.iter().find(|s| s.id == workload.id).unwrap().executions
    };
    let before = executions();
    assert_eq!(executions(), before, "nothing was executed");
    std::io::Write::write_all(&mut orders, b"go on\n").unwrap();
    // Name, executable and pid are the same.
    let after = (0..200).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        let now = executions();
        (now != before).then_some(now)
    });
    assert_eq!(after, Some(before + 1));
}

#[test]
fn two_programs_launched_together_are_two_workloads() {
    let mut platform = LinuxPlatform::new(Root::default());
    let first = Ended::start("sleep", &["601"], &[]);
    let second = Ended::start("tail", &["-f", "/dev/null"], &[]);
    let list = scan(&mut platform);
    let (a, b) = (of(&list, first.pid()).unwrap(), of(&list, second.pid()).unwrap());
    if a.kind == WorkloadKind::ProcessGroup {
        assert_ne!(a.id, b.id);
        assert_ne!(a.fingerprint, b.fingerprint);
    }
}

#[test]
fn what_a_person_wrote_into_the_environment_is_honoured() {
    let mut platform = LinuxPlatform::new(Root::default());
    let environment = [
        ("HOMEOSTAT", "never"),
        ("HOMEOSTAT_STRATEGIES", "large_pages=off"),
    ];
    let child = Ended::start("sleep", &["602"], &environment);
    let list = scan(&mut platform);
    let choice = &of(&list, child.pid()).unwrap().choice;
    assert!(
        choice
            .never
            .as_deref()
            .unwrap()
            .starts_with("HOMEOSTAT=never in the environment of sleep")
    );
    assert_eq!(choice.strategies.get("large_pages"), Some(&false));
}

#[test]
fn cpu_time_of_short_lived_children_counts_for_the_parent_and_is_never_huge() {
    let mut platform = LinuxPlatform::new(Root::default());
    // The shell starts a busy child that ends before the next scan.
    let script = "while :; do (i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done) ; sleep 0.05; done";
    let child = Ended::start("sh", &["-c", script], &[]);
    let id = of(&scan(&mut platform), child.pid()).unwrap().id.clone();
    let clock = MonotonicClock;
    let mut used = 0;
    for _ in 0..40 {
        clock.sleep(Nanoseconds::from_millis(50));
        let snapshot = platform
            .sample(&SampleRequest {
                scan: true,
                detail: vec![id.clone()],
            })
            .unwrap();
        let sample = snapshot.samples.iter().find(|s| s.id == id).unwrap();
        // The shell alone uses one CPU; times of ended children come in steps of 10 ms, and late by a pass.
        assert!(sample.cpu.0 <= 2 * sample.interval.0 + 300_000_000, "{sample:?}");
        used += sample.cpu.0;
    }
    assert!(used > 50_000_000, "the children's time is seen: {used} ns");
}

#[test]
fn a_detailed_sample_knows_the_memory_by_kind_and_its_regions() {
    let mut platform = LinuxPlatform::new(Root::default());
    // 64 MiB of private memory in a program that everybody has.
    let script = "my $x = 'a' x (64 << 20); print STDERR \"\"; sleep 600;";
    let child = Ended::start("perl", &["-e", script], &[]);
    let id = of(&scan(&mut platform), child.pid()).unwrap().id.clone();
    let clock = MonotonicClock;
    let request = SampleRequest {
        scan: false,
        detail: vec![id.clone()],
    };
    let mut sample = None;
    for _ in 0..200 {
        let snapshot = platform.sample(&request).unwrap();
        assert!(snapshot.workloads.is_none());
        let seen = snapshot.samples.into_iter().find(|s| s.id == id).unwrap();
        // Also while it grows.
        assert!(seen.resident >= seen.anonymous + seen.shared, "{seen:?}");
        if seen.anonymous.0 >= 60 << 20 {
            sample = Some(seen);
            break;
        }
        clock.sleep(Nanoseconds::from_millis(20));
    }
    let sample = sample.expect("64 MiB are filled");
    assert!(sample.huge.is_some());
    let map = platform.inspect_memory(&id).unwrap();
    assert!(!map.truncated);
    let region = map
        .regions
        .iter()
        .filter(|r| r.kind == MemoryKind::Anonymous)
        .max_by_key(|r| r.resident)
        .unwrap();
    assert!(region.resident.0 >= 60 << 20);
    if platform.machine().unwrap().can("pagemap.scan") {
        let pieces = region.pieces;
        assert!(
            u64::from(pieces.full + pieces.huge) * (2 << 20) >= 58 << 20,
            "{pieces:?}"
        );
        assert_eq!(region.convertible.len(), pieces.full as usize);
        assert!(region.convertible.iter().all(|a| a % (2 << 20) == 0));
        assert!(region.convertible.windows(2).all(|w| w[0] < w[1]));
    }
}

#[test]
fn every_capability_says_how_it_was_probed_and_what_its_absence_costs() {
    let mut platform = LinuxPlatform::new(Root::default());
    let machine = platform.machine().unwrap();
    assert!(machine.capabilities.len() > 20);
    assert!(machine.capabilities.windows(2).all(|w| w[0].id < w[1].id));
    for capability in &machine.capabilities {
        assert!(!capability.detail.is_empty(), "{}", capability.id);
        let missing = capability.state != CapabilityState::Available;
        assert_eq!(
            missing,
            !capability.cost_of_absence.is_empty(),
            "{}",
            capability.id
        );
    }
}
