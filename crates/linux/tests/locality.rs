//! Where threads run and memory lies: on made machines with several nodes, and on programs that the test starts itself.
//! Real pages on several nodes are checked in the virtual machines (`vm/`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_kernel::clock::MonotonicClock;
use homeostat_kernel::numa::CpuMask;
use homeostat_kernel::{Root, numa};
use homeostat_linux::LinuxPlatform;
use homeostat_model::{
    Bytes, Fingerprint, LlcId, Nanoseconds, NodeId, OperatorChoice, ProcessId, Workload, WorkloadKind,
};
use homeostat_platform::{Clock, PlatformError, SampleRequest, Sensors};
use homeostat_sensors::locality::memory::{MemoryError, Reading, Resident};
use homeostat_sensors::locality::{LocalitySensor, memory};
use homeostat_sensors::reader::Reader;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

// ---- made machines --------------------------------------------------------------------------------------------------

/// Two nodes of two CPUs with a cache each, and what processes a test puts in.
struct Made(tempfile::TempDir);

impl Made {
    fn new() -> Self {
        let made = Self(tempfile::tempdir().unwrap());
        made.write("proc/meminfo", "MemTotal: 8388608 kB\nAnonHugePages: 0 kB\n");
        made.write("proc/uptime", "1000.00 1.00\n");
        made.write("sys/devices/system/cpu/online", "0-3\n");
        for node in 0..2 {
            let cpus = [
                format!("{}-{}\n", node * 2, node * 2 + 1),
                format!("Node {node} MemTotal: 4194304 kB\n"),
            ];
            made.write(&format!("sys/devices/system/node/node{node}/cpulist"), &cpus[0]);
            made.write(&format!("sys/devices/system/node/node{node}/meminfo"), &cpus[1]);
            made.write(
                &format!("sys/devices/system/node/node{node}/distance"),
                ["10 21\n", "21 10\n"][node],
            );
            for cpu in node * 2..node * 2 + 2 {
                let cache = format!("sys/devices/system/cpu/cpu{cpu}/cache/index0");
                made.write(&format!("{cache}/level"), "3\n");
                made.write(&format!("{cache}/type"), "Unified\n");
                made.write(&format!("{cache}/shared_cpu_list"), &cpus[0]);
            }
        }
        made
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn root(&self) -> Root {
        Root::new(self.0.path())
    }

    /// A process of one thread that used so many ticks, last on that CPU, with this much memory in KiB.
    fn process(&self, pid: i32, ticks: u64, cpu: u32, anonymous: u64, shared: u64, allowed: [&str; 2]) {
        let stat = format!(
            "{pid} (w) S 1 {pid} {pid} 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 100 1 1 1 1 1 7 0 0 0 0 0 0 0 0 0 17 {cpu} 0\n"
        );
        self.write(&format!("proc/{pid}/stat"), &stat);
        self.write(&format!("proc/{pid}/task/{pid}/stat"), &stat);
        let [cpus, nodes] = allowed;
        self.write(
            &format!("proc/{pid}/status"),
            &format!(
                "Name:\tw\nVmRSS:\t{} kB\nRssAnon:\t{anonymous} kB\nRssFile:\t0 kB\nRssShmem:\t{shared} kB\n\
                 Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{nodes}\n",
                anonymous + shared
            ),
        );
    }

    fn numa_maps(&self, pid: i32, policy: &str, anonymous: [u64; 2], shared: [u64; 2]) {
        let pages = |kib: [u64; 2]| format!("N0={} N1={} kernelpagesize_kB=4", kib[0] / 4, kib[1] / 4);
        self.write(
            &format!("proc/{pid}/numa_maps"),
            &format!(
                "7f0000000000 {policy} anon={} dirty=1 {}\n7f1000000000 default file=/dev/shm/pool mapped=5 {}\n",
                (anonymous[0] + anonymous[1]) / 4,
                pages(anonymous),
                pages(shared)
            ),
        );
    }
}

fn workload(processes: &[ProcessId]) -> Workload {
    Workload {
        id: "w".into(),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::new("w"),
        program: "w".into(),
        executable: String::new(),
        processes: processes.to_vec(),
        choice: OperatorChoice::default(),
    }
}

fn made(pids: &[i32]) -> Workload {
    let ids: Vec<ProcessId> = pids
        .iter()
        .map(|pid| ProcessId {
            pid: *pid,
            start_ticks: 100,
        })
        .collect();
    workload(&ids)
}

const FREE: [&str; 2] = ["0-3", "0-1"];

#[test]
fn memory_of_several_processes_is_added_up_and_shared_memory_counted_once() {
    let machine = Made::new();
    machine.process(10, 500, 0, 4000, 2000, FREE);
    machine.numa_maps(10, "default", [1000, 3000], [2000, 0]);
    machine.process(11, 1500, 3, 8000, 1000, FREE);
    machine.numa_maps(11, "default", [8000, 0], [1000, 0]);
    let mut sensor = LocalitySensor::new(machine.root());
    let places = sensor
        .look(
            &made(&[10, 11, 99]),
            Nanoseconds::from_secs(1),
            &mut Reader::default(),
            &[],
        )
        .unwrap();
    let kib = Bytes::from_kib;
    assert_eq!(places.memory[&NodeId(0)].anonymous, kib(9000));
    assert_eq!(places.memory[&NodeId(1)].anonymous, kib(3000));
    assert_eq!(
        places.memory[&NodeId(0)].shared,
        kib(2000),
        "once, from who has most of it"
    );
    assert_eq!((places.memory_error, places.memory_covered), (0.0, 1.0));
    // Over their life of 999 s they used 20 s, a quarter of it on the first node.
    assert!(
        (places.running[&LlcId(0)] - 5.0 / 999.0).abs() < 1e-6,
        "{:?}",
        places.running
    );
    assert!((places.running[&LlcId(2)] - 15.0 / 999.0).abs() < 1e-6);
    assert_eq!((places.threads, places.threads_of_busiest_process), (2, 1));
    assert_eq!(places.bound, None);
    let summary = places.summary();
    assert_eq!(summary.shared, BTreeMap::from([(NodeId(0), kib(2000))]));
    let local = summary.local_share(|llc| Some(NodeId(llc.0 / 2))).unwrap();
    assert!(
        (local - (0.25 * 11.0 + 0.75 * 3.0) / 14.0).abs() < 1e-9,
        "{local}"
    );
}

#[test]
fn what_was_chosen_is_told_and_what_homeostat_set_itself_is_not() {
    let machine = Made::new();
    let look = |own: &[CpuMask]| {
        LocalitySensor::new(machine.root())
            .look(
                &made(&[10]),
                Nanoseconds::from_secs(1),
                &mut Reader::default(),
                own,
            )
            .unwrap()
            .bound
    };
    machine.process(10, 500, 0, 4000, 0, ["0-1", "0-1"]);
    machine.numa_maps(10, "default", [4000, 0], [0, 0]);
    let bound = look(&[]).unwrap();
    assert!(bound.contains("CPUs 0-1") && bound.contains("taskset"), "{bound}");
    assert_eq!(look(&[CpuMask::of([2]), CpuMask::of([0, 1])]), None);
    assert!(look(&[CpuMask::of([0])]).is_some(), "it is not ours any more");
    machine.write("proc/10/cpuset", "/docker/abc\n");
    assert!(look(&[]).unwrap().contains("cpuset /docker/abc"));
    machine.process(10, 500, 0, 4000, 0, ["0-3", "1"]);
    assert!(look(&[]).unwrap().contains("nodes 1 only"));
    machine.process(10, 500, 0, 4000, 0, FREE);
    machine.numa_maps(10, "bind:0", [4000, 0], [0, 0]);
    let bound = look(&[]).unwrap();
    assert!(bound.contains("bind:0") && bound.contains("100 %"), "{bound}");
    machine.numa_maps(10, "local", [4000, 0], [0, 0]);
    assert_eq!(look(&[]), None, "local is what the default does");
}

#[test]
fn what_ended_what_may_not_be_read_and_a_kernel_without_numa_are_told_apart() {
    let machine = Made::new();
    let mut sensor = LocalitySensor::new(machine.root());
    let mut reader = Reader::default();
    let mut look = |pids: &[i32]| sensor.look(&made(pids), Nanoseconds::from_secs(1), &mut reader, &[]);
    assert!(matches!(look(&[10]), Err(PlatformError::Vanished { .. })));
    // A process without numa_maps on a machine with two nodes: the kernel tells nothing.
    machine.process(10, 500, 0, 4000, 0, FREE);
    let error = look(&[10]).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Unsupported { why, .. } if why.contains("without NUMA")),
        "{error}"
    );
    // On a machine with one node everything is there.
    let single = Made::new();
    std::fs::remove_dir_all(single.0.path().join("sys/devices/system/node")).unwrap();
    single.process(10, 500, 0, 4000, 500, FREE);
    let places = LocalitySensor::new(single.root())
        .look(
            &made(&[10]),
            Nanoseconds::from_secs(1),
            &mut Reader::default(),
            &[],
        )
        .unwrap();
    assert_eq!(places.memory.len(), 1);
    assert_eq!(places.memory[&NodeId(0)].anonymous, Bytes::from_kib(4000));
    assert_eq!(places.memory[&NodeId(0)].shared, Bytes::from_kib(500));
    assert_eq!(
        places.bound, None,
        "a list of nodes says nothing about a machine with one"
    );
    // A captured process is counted whatever its size: nobody is held up.
    machine.process(10, 500, 0, 4 << 20, 0, FREE);
    machine.numa_maps(10, "default", [4 << 20, 0], [0, 0]);
    let large = look(&[10]).unwrap();
    assert_eq!(large.memory[&NodeId(0)].anonymous, Bytes(4 << 30));
}

#[test]
fn a_workload_that_is_measured_is_followed_so_that_its_places_are_known() {
    let machine = Made::new();
    machine.write("proc/stat", "cpu 1 1 1 1 1 1 1 1\n");
    machine.process(10, 500, 0, 40_000, 0, FREE);
    machine.numa_maps(10, "default", [40_000, 0], [0, 0]);
    std::os::unix::fs::symlink("/bin/w", machine.0.path().join("proc/10/exe")).unwrap();
    let mut platform = LinuxPlatform::new(machine.root());
    platform.machine().unwrap();
    let scan = SampleRequest {
        scan: true,
        detail: vec!["w[10]".into()],
    };
    platform.sample(&scan).unwrap();
    machine.process(10, 600, 2, 40_000, 0, FREE);
    MonotonicClock.sleep(Nanoseconds::from_millis(20));
    platform.sample(&scan).unwrap();
    let seen = platform.inspect_locality(&"w[10]".into()).unwrap();
    assert_eq!(
        seen.running.keys().copied().collect::<Vec<_>>(),
        [LlcId(2)],
        "where it ran since it is measured"
    );
    assert_eq!(
        seen.private,
        BTreeMap::from([(NodeId(0), Bytes::from_kib(40_000))])
    );
    assert!(!platform.should_be_probed_again());
    machine.write("sys/devices/system/cpu/online", "0-2\n");
    platform.sample(&scan).unwrap();
    assert!(platform.machine_changed() && platform.should_be_probed_again());
    assert_eq!(platform.machine().unwrap().cpus.len(), 3);
    assert!(!platform.machine_changed());
    assert!(matches!(
        platform.inspect_locality(&"nobody".into()),
        Err(PlatformError::Vanished { .. })
    ));
}

// ---- the running machine --------------------------------------------------------------------------------------------

/// Does nothing unless it is started as a victim: maps memory, keeps a thread busy, says so, and waits for its end.
#[test]
#[ignore = "the process that the other tests look at"]
fn victim() {
    let Ok(mib) = std::env::var("VICTIM_MIB") else {
        return;
    };
    let mib: usize = mib.parse().unwrap();
    let mut memory: Vec<u8> = vec![0; mib << 20];
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    if let Some(cpu) = std::env::var("VICTIM_CPU").ok().and_then(|c| c.parse().ok()) {
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        numa::set_affinity(own, &CpuMask::of([cpu])).unwrap();
    }
    println!("\nready");
    let parent = rustix::process::getppid();
    // Half busy, so that several victims leave the machine to others.
    while rustix::process::getppid() == parent {
        let mut sum = 0u64;
        for i in 0..2_000_000u64 {
            sum = std::hint::black_box(sum ^ i);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    std::hint::black_box(&memory);
}

/// A victim. Killed when dropped.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Victim {
    fn start(mib: usize, cpu: Option<u32>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "victim",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("VICTIM_MIB", mib.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if let Some(cpu) = cpu {
            command.env("VICTIM_CPU", cpu.to_string());
        }
        let mut child = command.spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let victim = Self(child);
        let mut lines = BufReader::new(output).lines();
        assert!(lines.any(|l| l.unwrap() == "ready"), "the victim did not start");
        victim
    }

    fn id(&self) -> ProcessId {
        let pid = self.0.id() as i32;
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        let start_ticks = homeostat_sensors::processes::parse_stat(&stat)
            .unwrap()
            .start_ticks;
        ProcessId { pid, start_ticks }
    }

    fn resident(&self) -> Resident {
        Resident::parse(&std::fs::read(format!("/proc/{}/status", self.0.id())).unwrap()).unwrap()
    }
}

fn how(exact_max: Bytes, seed: u64) -> Reading {
    Reading {
        exact_max,
        budget: Duration::from_secs(30),
        seed,
        huge: true,
    }
}

/// Asks until it is answered: on a machine that is overloaded a look may run out of patience.
fn patiently<T>(mut ask: impl FnMut(&mut Reader) -> Result<T, PlatformError>) -> Result<T, PlatformError> {
    loop {
        match ask(&mut Reader::default()) {
            Err(PlatformError::Busy { .. }) => std::thread::sleep(Duration::from_millis(50)),
            other => return other,
        }
    }
}

/// As `numastat -p` adds up: every `N<node>=` of every line times the size of its pages.
fn numastat(pid: i32) -> BTreeMap<u32, u64> {
    let mut sum = BTreeMap::new();
    for line in std::fs::read_to_string(format!("/proc/{pid}/numa_maps"))
        .unwrap()
        .lines()
    {
        let value = |key: &str| {
            line.split(' ')
                .find_map(|w| w.strip_prefix(key))
                .and_then(|v| v.parse::<u64>().ok())
        };
        let size = value("kernelpagesize_kB=").unwrap_or(4) * 1024;
        for word in line.split(' ') {
            if let Some((node, pages)) = word.strip_prefix('N').and_then(|w| w.split_once('=')) {
                if let (Ok(node), Ok(pages)) = (node.parse::<u32>(), pages.parse::<u64>()) {
                    *sum.entry(node).or_default() += pages * size;
                }
            }
        }
    }
    sum
}

fn within_one_percent(a: u64, b: u64) -> bool {
    a.abs_diff(b) as f64 <= 0.01 * a.max(b) as f64
}

#[test]
fn counted_and_sampled_memory_agree_with_numastat_within_one_percent() {
    let victim = Victim::start(96, None);
    let (id, resident) = (victim.id(), victim.resident());
    let root = Root::default();
    let counted = match memory::read(&root, id, &resident, &how(Bytes(u64::MAX), 1)) {
        Ok(counted) => counted,
        Err(error @ (MemoryError::NoNuma | MemoryError::Denied)) => {
            println!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let truth = numastat(id.pid);
    assert!(!truth.is_empty());
    for (node, bytes) in &truth {
        let found = counted.nodes[&NodeId(*node)].total().0;
        assert!(
            within_one_percent(found, *bytes),
            "node {node}: {found} and {bytes}"
        );
    }
    assert_eq!(counted.error, 0.0);
    let sampled = memory::read(&root, id, &resident, &how(Bytes::ZERO, 7)).unwrap();
    assert!(sampled.error > 0.0 && sampled.error < 0.01, "{}", sampled.error);
    let all: u64 = truth.values().sum();
    for (node, bytes) in &truth {
        let found = sampled.nodes.get(&NodeId(*node)).map_or(0, |m| m.total().0);
        assert!(
            found.abs_diff(*bytes) as f64 <= (sampled.error + 0.01) * all as f64,
            "node {node}: {found} and {bytes} of {all}"
        );
    }
    let private: u64 = sampled.nodes.values().map(|m| m.anonymous.0).sum();
    assert!(
        within_one_percent(private, resident.anonymous.0),
        "{private} {resident:?}"
    );
}

#[test]
fn a_program_is_looked_at_until_it_ends() {
    let victim = Victim::start(16, None);
    let mut platform = LinuxPlatform::new(Root::default());
    // A child of ours is no workload of its own: it is named by its process.
    let alone = workload(&[victim.id()]);
    let machine = platform.machine().unwrap();
    let sensor = platform.locality();
    let note = sensor.watch_dispatches().unwrap();
    let clock = MonotonicClock;
    let first = patiently(|reader| sensor.look(&alone, clock.now(), reader, &[])).unwrap();
    assert!(first.redispatches.is_none(), "the first look begins");
    // Until the victim has had its turn, however busy the machine is.
    let second = loop {
        for _ in 0..10 {
            clock.sleep(Nanoseconds::from_millis(25));
            sensor.poll_dispatches();
            sensor.look_at_threads(&alone, clock.now());
        }
        let seen = patiently(|reader| sensor.look(&alone, clock.now(), reader, &[])).unwrap();
        if seen.cpus() > 0.0 && seen.redispatches.is_some_and(|r| r.dispatches > 0.0) {
            break seen;
        }
    };
    assert!(
        second
            .running
            .keys()
            .all(|llc| machine.cpus.iter().any(|c| c.llc == *llc))
    );
    assert!(second.resident() >= Bytes::from_mib(16));
    assert_eq!(second.memory_covered, 1.0);
    let dispatches = second.redispatches.expect("it was dispatched");
    assert!(dispatches.dispatches > 0.0);
    let sum = dispatches.same_core + dispatches.same_cache + dispatches.same_node + dispatches.other_node;
    assert!((sum - 1.0).abs() < 1e-6, "{dispatches:?}");
    assert_eq!(dispatches.every_move_seen, note.is_none());
    drop(victim);
    let gone = patiently(|reader| platform.locality().look(&alone, clock.now(), reader, &[]));
    assert!(matches!(gone, Err(PlatformError::Vanished { .. })), "{gone:?}");
}

#[test]
fn a_program_that_was_bound_says_so() {
    let machine = LinuxPlatform::new(Root::default()).machine().unwrap();
    let Some(cpu) = machine.cpus.get(1).map(|c| c.id.0) else {
        println!("skipped: one CPU");
        return;
    };
    let victim = Victim::start(4, Some(cpu));
    let alone = workload(&[victim.id()]);
    let mut sensor = LocalitySensor::new(Root::default());
    let mut look = |own: &[CpuMask]| {
        patiently(|reader| sensor.look(&alone, MonotonicClock.now(), reader, own))
            .unwrap()
            .bound
    };
    let bound = look(&[]).unwrap();
    assert!(bound.contains(&format!("CPUs {cpu}")), "{bound}");
    let own = CpuMask::of([cpu]);
    // The other thread of the victim (the test harness) is free.
    assert_eq!(look(&[own]), None);
}

/// On a machine with several nodes of memory (the virtual machines of `vm/`): half of a program's memory is moved, and both
/// ways of looking see it within one percent.
#[test]
fn memory_that_was_moved_is_seen_on_its_node() {
    let machine = LinuxPlatform::new(Root::default()).machine().unwrap();
    let nodes: Vec<u32> = machine
        .nodes
        .iter()
        .filter(|n| n.memory.0 > 0)
        .map(|n| n.id.0)
        .collect();
    let [first, second, ..] = nodes.as_slice() else {
        println!("skipped: one node with memory");
        return;
    };
    const MIB: usize = 64;
    let victim = Victim::start(MIB, None);
    let id = victim.id();
    let maps = std::fs::read(format!("/proc/{}/maps", id.pid)).unwrap();
    let range = memory::parse_maps(&maps)
        .into_iter()
        .find(|r| r.end - r.start >= (MIB as u64) << 20)
        .unwrap();
    let mut call = numa::PageCall::default();
    let pages: Vec<u64> = (range.start..range.end).step_by(4096).collect();
    for (chunk, node) in pages.chunks(pages.len().div_ceil(2)).zip([*first, *second]) {
        for batch in chunk.chunks(4096) {
            call.move_to(id.pid, batch, node, false).unwrap();
        }
    }
    let truth = numastat(id.pid);
    let all: u64 = truth.values().sum();
    assert!(truth[first] > all / 3 && truth[second] > all / 3, "{truth:?}");
    let resident = victim.resident();
    for (exact_max, slack) in [(Bytes(u64::MAX), 0.01), (Bytes::ZERO, 0.02)] {
        let seen = memory::read(&Root::default(), id, &resident, &how(exact_max, 3)).unwrap();
        for node in [first, second] {
            let found = seen.nodes[&NodeId(*node)].total().0;
            assert!(
                found.abs_diff(truth[node]) as f64 <= (seen.error + slack) * all as f64,
                "node {node}: {found} and {} of {all}, error {}",
                truth[node],
                seen.error
            );
        }
    }
    // The whole way: scan, follow, inspect.
    let alone = workload(&[id]);
    let mut sensor = LocalitySensor::new(Root::default());
    let places = patiently(|reader| sensor.look(&alone, MonotonicClock.now(), reader, &[])).unwrap();
    let summary = places.summary();
    for node in [first, second] {
        let found = summary.private[&NodeId(*node)].0 + summary.shared.get(&NodeId(*node)).map_or(0, |b| b.0);
        assert!(
            within_one_percent(found, truth[node]),
            "node {node}: {found} and {}",
            truth[node]
        );
    }
    let llc_node = |llc: LlcId| machine.cpus.iter().find(|c| c.llc == llc).map(|c| c.node);
    let local = summary.local_share(llc_node).unwrap();
    assert!(local > 0.3 && local < 0.7, "{local}");
}

#[test]
fn the_seam_tells_the_places_of_a_program() {
    let child = Command::new("sleep")
        .arg("603")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let child = Victim(child);
    let mut platform = LinuxPlatform::new(Root::default());
    let machine = platform.machine().unwrap();
    let scan = SampleRequest {
        scan: true,
        detail: vec![],
    };
    let pid = child.0.id() as i32;
    let list = platform.sample(&scan).unwrap().workloads.unwrap();
    let id = &list
        .iter()
        .find(|w| w.processes.iter().any(|p| p.pid == pid))
        .expect("it is a workload")
        .id;
    match platform.inspect_locality(id) {
        Err(PlatformError::Busy { .. }) => println!("not now: the machine is overloaded"),
        Ok(seen) => {
            assert!(machine.can("locality"));
            assert!(
                seen.private.values().chain(seen.shared.values()).any(|b| b.0 > 0),
                "{seen:?}"
            );
        }
        Err(error) => assert!(!machine.can("locality"), "{error}"),
    }
}
