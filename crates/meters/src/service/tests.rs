//! What helper processes have and have not, looked at from outside; and what becomes of those that hang.

use crate::service::speaker::{Place, Reply, Request};
use crate::{MeterSettings, remote};
use homeostat_helper::{Domain, GRACE, Line, PATIENCE, Pool, confine_speaker};
use homeostat_kernel::Root;
use homeostat_model::Workload;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

fn find(workload: &Workload) -> Request {
    Request::Find(Place {
        kind: remote::Kind::Progress,
        root: Root::default().as_path().to_owned(),
        settings: MeterSettings::default(),
        workload: workload.clone(),
    })
}

/// This test, as a workload, and its domain.
fn own() -> (Workload, Domain) {
    let own = crate::testing::own();
    let domain = Domain::of(&Root::default(), own.processes[0]).unwrap();
    (own, domain)
}

/// Asks until it is answered: the machine may be busy.
fn answered(pool: &mut Pool, domain: Domain, request: &Request) -> Reply {
    let begun = Instant::now();
    loop {
        match pool.call(domain, request) {
            Ok(reply) => return reply,
            Err(why) => assert!(begun.elapsed() < Duration::from_secs(60), "{why}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn pid_of(process: &OwnedFd) -> i32 {
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).unwrap();
    let pid = about.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap();
    pid.trim().parse().unwrap()
}

#[test]
fn a_helper_has_nothing_of_ours_and_no_right_that_it_does_not_need() {
    let directory = tempfile::tempdir().unwrap();
    let lock = std::fs::File::create(directory.path().join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (workload, domain) = own();
    let mut pool = Pool::new(&super::SERVICE);
    answered(&mut pool, domain, &find(&workload));
    let processes: Vec<i32> = pool.processes(domain).map(pid_of).collect();
    assert_eq!(processes.len(), 2);
    for (pid, is_speaker) in processes.iter().zip([false, true]) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("{name} {status}"))
                .trim()
                .to_owned()
        };
        assert_eq!(field("Seccomp:"), "2");
        assert_eq!(field("NoNewPrivs:"), "1");
        let capabilities = |name| u64::from_str_radix(&field(name), 16).unwrap();
        for set in ["CapPrm:", "CapEff:", "CapInh:"] {
            // DAC_OVERRIDE, DAC_READ_SEARCH, SYS_PTRACE, SYS_ADMIN (include/uapi/linux/capability.h).
            let most = if is_speaker {
                0
            } else {
                1 << 1 | 1 << 2 | 1 << 19 | 1 << 21
            };
            assert_eq!(capabilities(set) & !most, 0, "{set} {status}");
        }
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let target = std::fs::read_link(entry.unwrap().path()).unwrap();
            let target = target.to_string_lossy();
            // An opener comes back to our network from that of a container.
            let home = !is_speaker && target.starts_with("net:");
            assert!(
                target == "/dev/null" || target.starts_with("socket:") || home,
                "{target}"
            );
        }
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        for limited in ["Max address space", "Max cpu time", "Max open files"] {
            let line = limits.lines().find(|line| line.starts_with(limited)).unwrap();
            assert!(!line.contains("unlimited"), "{line}");
        }
    }
    drop(lock);
    let again = std::fs::File::open(directory.path().join("lock")).unwrap();
    // A process that another test is just starting has it for a moment, until it has closed what it does not need.
    let is_free = || rustix::fs::flock(&again, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok();
    assert!((0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        is_free()
    }));
}

#[test]
fn one_that_breaks_off_or_is_late_is_replaced_after_a_rest_and_holds_up_nobody_else() {
    let (workload, domain) = own();
    let mut pool = Pool::new(&super::SERVICE);
    answered(&mut pool, domain, &find(&workload));
    let stopped: Vec<i32> = pool.processes(domain).map(pid_of).collect();
    for pid in &stopped {
        kill_process(Pid::from_raw(*pid).unwrap(), Signal::STOP).unwrap();
    }
    let begun = Instant::now();
    let late = pool
        .call::<_, Reply>(domain, &find(&workload))
        .unwrap_err()
        .to_string();
    assert!(late.contains("did not answer"), "{late}");
    assert!(begun.elapsed() >= PATIENCE);
    // It may answer yet, and is not killed before it had the time for that.
    let late = pool
        .call::<_, Reply>(domain, &find(&workload))
        .unwrap_err()
        .to_string();
    assert!(late.contains("did not answer"), "{late}");
    assert!(pool.processes(domain).map(pid_of).eq(stopped.iter().copied()));
    loop {
        let why = pool
            .call::<_, Reply>(domain, &find(&workload))
            .unwrap_err()
            .to_string();
        if why.contains("after a rest") {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{why}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(begun.elapsed() >= GRACE);
    assert_eq!(pool.refused(Instant::now()).len(), 1);
    // Another user's are read meanwhile; its opener looks at none but that user's.
    let other = Domain(domain.0 + 1);
    let Reply::Found(found) = answered(&mut pool, other, &find(&workload)) else {
        panic!("not what was asked for");
    };
    let why = found[0].refused.clone().unwrap();
    assert!(why.contains("belongs to user"), "{why}");
    // It was killed, and there is another one after a while.
    let Reply::Found(found) = answered(&mut pool, domain, &find(&workload)) else {
        panic!("not what was asked for");
    };
    assert!(
        found[0]
            .refused
            .clone()
            .unwrap()
            .contains("publishes no progress counter")
    );
    assert!(
        pool.processes(domain)
            .map(pid_of)
            .all(|pid| !stopped.contains(&pid))
    );
}

#[test]
fn one_that_was_only_slow_goes_on_and_a_late_answer_is_not_taken_for_the_next() {
    let (workload, domain) = own();
    let mut pool = Pool::new(&super::SERVICE);
    answered(&mut pool, domain, &find(&workload));
    let processes: Vec<i32> = pool.processes(domain).map(pid_of).collect();
    let signal = |signal| {
        for pid in &processes {
            kill_process(Pid::from_raw(*pid).unwrap(), signal).unwrap();
        }
    };
    signal(Signal::STOP);
    let path = Request::Behind("/proc/self".into(), workload.processes[0]);
    assert!(pool.call::<_, Reply>(domain, &path).is_err());
    signal(Signal::CONT);
    assert!(matches!(
        answered(&mut pool, domain, &find(&workload)),
        Reply::Found(_)
    ));
    assert!(pool.processes(domain).map(pid_of).eq(processes.iter().copied()));
}

#[test]
fn nobody_is_read_for_whom_too_many_helpers_hang() {
    let (workload, domain) = own();
    let mut pool = Pool::new(&super::SERVICE);
    let flags = rustix::process::PidfdFlags::empty();
    let one = || rustix::process::pidfd_open(rustix::process::getpid(), flags).unwrap();
    // This process has not ended: as one that cannot be killed.
    pool.hang(domain, one());
    answered(&mut pool, domain, &find(&workload));
    pool.hang(domain, one());
    let stuck = pool
        .call::<_, Reply>(domain, &find(&workload))
        .unwrap_err()
        .to_string();
    assert!(stuck.contains("hang for good"), "{stuck}");
    let other = Domain(domain.0 + 1);
    answered(&mut pool, other, &find(&workload));
    pool.hang(Domain(domain.0 + 2), one());
    pool.hang(Domain(domain.0 + 2), one());
    assert!(pool.call::<_, Reply>(other, &find(&workload)).is_err());
    assert!(!pool.refused(Instant::now()).is_empty());
}

#[test]
fn a_domain_that_was_waited_for_too_long_is_asked_no_more_for_a_while() {
    let (workload, domain) = own();
    let mut pool = Pool::new(&super::SERVICE);
    let other = Domain(domain.0 + 1);
    answered(&mut pool, other, &find(&workload));
    pool.wait_for(other, Duration::from_secs(2));
    let late = pool
        .call::<_, Reply>(other, &find(&workload))
        .unwrap_err()
        .to_string();
    assert!(late.contains("asked again"), "{late}");
    answered(&mut pool, Domain(domain.0 + 2), &find(&workload));
    pool.wait_for(other, Duration::ZERO);
    answered(&mut pool, other, &find(&workload));
}

#[test]
fn another_mother_takes_over_from_one_that_ended_or_stands_still() {
    let (workload, domain) = own();
    let mut pool = Pool::new(&super::SERVICE);
    for (turn, signal) in [(1, Signal::KILL), (2, Signal::STOP)] {
        answered(&mut pool, domain, &find(&workload));
        let first = pid_of(pool.mother().unwrap());
        kill_process(Pid::from_raw(first).unwrap(), signal).unwrap();
        // It has no helper yet, and the first try may fail.
        answered(&mut pool, Domain(domain.0 + turn), &find(&workload));
        assert_ne!(pid_of(pool.mother().unwrap()), first);
        let left = std::fs::exists(format!("/proc/{first}")).unwrap();
        assert!(!left, "not even a zombie is left");
        answered(&mut pool, domain, &find(&workload));
    }
}

#[test]
fn a_speaker_may_open_nothing() {
    let (ours, theirs) = Line::pair().unwrap();
    homeostat_kernel::helper::fork(|| {
        let confined = confine_speaker();
        let file = rustix::fs::open("/proc/self/stat", OFlags::RDONLY, Mode::empty());
        let socket = std::net::TcpStream::connect("127.0.0.1:1");
        let child = homeostat_kernel::helper::fork(|| ());
        let outcome = (
            confined.is_ok(),
            file.err().map(|e| e.raw_os_error()),
            socket.err().and_then(|e| e.raw_os_error()),
            child.err().map(|e| e.raw_os_error()),
        );
        let _ = theirs.send(&outcome, &[], None);
    })
    .unwrap();
    let deadline = Some(Instant::now() + Duration::from_secs(60));
    let outcome: (bool, Option<i32>, Option<i32>, Option<i32>) = ours.receive(deadline).unwrap();
    let refused = Some(rustix::io::Errno::PERM.raw_os_error());
    assert_eq!(outcome, (true, refused, refused, refused));
}
