//! The sensors over captured and made machines (`fixtures/hosts`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_model::{
    Bytes, CapabilityState, CpuId, LlcId, MemoryKind, Nanoseconds, NodeId, Snapshot, Workload, WorkloadKind,
};
use homeostat_platform::{PlatformError, SampleRequest, Sensors, conformance};
use std::path::PathBuf;

fn host(name: &str) -> Root {
    Root::new(
        PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../../fixtures/hosts")
            .join(name),
    )
}

fn scan(name: &str) -> (LinuxPlatform, Snapshot, Vec<Workload>) {
    let mut platform = LinuxPlatform::new(host(name));
    let snapshot = platform
        .sample(&SampleRequest {
            scan: true,
            detail: vec![],
        })
        .unwrap();
    let workloads = snapshot.workloads.clone().unwrap();
    (platform, snapshot, workloads)
}

fn ids(list: &[Workload]) -> Vec<&str> {
    list.iter().map(|w| w.id.as_str()).collect()
}

fn named<'w>(list: &'w [Workload], id: &str) -> &'w Workload {
    list.iter()
        .find(|w| w.id.as_str() == id)
        .unwrap_or_else(|| panic!("{id} is not among {:?}", ids(list)))
}

fn pids(workload: &Workload) -> Vec<i32> {
    workload.processes.iter().map(|p| p.pid).collect()
}

#[test]
fn every_machine_keeps_the_promises_of_the_seam() {
    for name in [
        "server-2n2p-smt",
        "container-blind",
        "old-kernel-3.10",
        "small-vm",
    ] {
        let mut platform = LinuxPlatform::new(host(name));
        assert_eq!(
            conformance::sensing(&mut platform),
            Vec::<String>::new(),
            "{name}"
        );
    }
}

#[test]
fn a_server_with_two_packages_is_seen_down_to_its_caches() {
    let machine = LinuxPlatform::new(host("server-2n2p-smt")).machine().unwrap();
    assert_eq!(machine.cpus.len(), 16);
    let cpu = |id: u32| machine.cpus.iter().find(|c| c.id == CpuId(id)).unwrap();
    let fourteen = cpu(14);
    assert_eq!((fourteen.core, fourteen.package), (6, 1));
    assert_eq!((fourteen.llc, fourteen.node), (LlcId(6), NodeId(1)));
    assert_eq!(
        machine
            .cpus
            .iter()
            .map(|c| c.llc)
            .collect::<std::collections::BTreeSet<_>>()
            .len(),
        4
    );
    assert_eq!(machine.nodes.len(), 2);
    assert_eq!(machine.nodes[1].distances, [21, 10]);
    assert_eq!(machine.nodes[0].memory, Bytes::from_kib(65_970_000));
    assert_eq!(machine.llc_size, Bytes::from_mib(16));
    assert_eq!(machine.huge_page_size, Bytes::from_mib(2));
    assert_eq!(machine.hypervisor, None);
    assert!(machine.can("numa"));
    assert_eq!(
        machine.capability("thp_mode").unwrap().state,
        CapabilityState::Limited
    );
}

#[test]
fn a_server_groups_into_what_an_operator_would_name() {
    let (_, _, list) = scan("server-2n2p-smt");
    assert_eq!(
        ids(&list),
        [
            "bash[2000]",
            "batch/night",
            "containerd-a1b2c3111111",
            "docker-d0c4e5000000",
            "my (odd) R 1 x[2100]",
            "ora_pmon[4000]",
            "postgresql@15-main.service",
            "redis-benchmark[2012]",
            "redis-server.service",
            "redis-server[2010]",
            "redis-server[2011]",
            "systemd[1]",
            "tuned.service",
            "web.service",
        ]
    );
    assert_eq!(named(&list, "redis-server.service").kind, WorkloadKind::Unit);
    assert_eq!(named(&list, "docker-d0c4e5000000").kind, WorkloadKind::Container);
    assert_eq!(named(&list, "batch/night").kind, WorkloadKind::Cgroup);
    assert_eq!(named(&list, "ora_pmon[4000]").kind, WorkloadKind::SharedSegment);
    assert_eq!(pids(named(&list, "ora_pmon[4000]")), [4000, 4001]);
    assert_eq!(pids(named(&list, "postgresql@15-main.service")), [1000, 1001]);
    // The child that a server forks to save its data belongs to it.
    assert_eq!(pids(named(&list, "redis-server[2010]")), [2010, 2013]);
    assert_ne!(
        named(&list, "redis-server[2010]").fingerprint,
        named(&list, "redis-server[2011]").fingerprint,
        "two servers on two ports have two histories"
    );
}

#[test]
fn a_server_shows_what_people_chose() {
    let (_, snapshot, list) = scan("server-2n2p-smt");
    assert_eq!(snapshot.machine.other_tuners, ["tuned"]);
    let huge = &snapshot.machine.huge_pages;
    assert_eq!(
        (huge.enabled.0.as_str(), huge.shmem_enabled.0.as_str()),
        ("never", "never")
    );
    assert_eq!(
        huge.enabled_set_by.as_deref(),
        Some("/etc/tmpfiles.d/no-thp.conf:2")
    );
    assert!(
        named(&list, "docker-d0c4e5000000")
            .choice
            .never
            .as_deref()
            .unwrap()
            .contains("pid 3001")
    );
    assert!(named(&list, "containerd-a1b2c3111111").choice.tuned[0].contains("PR_SET_THP_DISABLE"));
    assert_eq!(
        named(&list, "web.service").choice,
        homeostat_model::OperatorChoice::default()
    );
}

#[test]
fn a_server_in_numbers() {
    let (mut platform, snapshot, _) = scan("server-2n2p-smt");
    let machine = &snapshot.machine;
    assert_eq!(machine.memory_free, Bytes::from_kib(60_000_000));
    assert_eq!(machine.swap_used, Bytes::from_kib(100_000));
    assert_eq!(
        machine.memory_free_in_huge_blocks,
        Bytes::from_mib(2 + 8 + 2 * (20 + 28_000))
    );
    assert_eq!(
        machine.cpu_busy,
        Nanoseconds::ZERO,
        "the first sample has no differences"
    );
    // Shared memory counts once: 40,000 pages of which 30,000 shared, and 35,000 of which 34,000 shared.
    let postgres = snapshot
        .samples
        .iter()
        .find(|s| s.id.as_str() == "postgresql@15-main.service")
        .unwrap();
    assert_eq!(postgres.resident, Bytes((10_000 + 1_000 + 34_000) * 4096));
    assert_eq!(postgres.cpu, Nanoseconds::ZERO);
    assert_eq!(postgres.age, Nanoseconds::from_secs(100_000 - 30));
    let request = SampleRequest {
        scan: false,
        detail: vec!["redis-server.service".into(), "nobody".into()],
    };
    let detail = platform.sample(&request).unwrap().samples;
    assert_eq!(detail.len(), 1, "who is not there is absent");
    assert_eq!(detail[0].huge, Some(Bytes::from_mib(2)));
    assert_eq!(detail[0].anonymous, Bytes::from_kib(2_000_000));
    let map = platform.inspect_memory(&"redis-server.service".into()).unwrap();
    assert_eq!(map.regions.len(), 1, "the heap is smaller than a large page");
    assert_eq!(map.regions[0].kind, MemoryKind::Anonymous);
    assert_eq!(map.regions[0].huge, Bytes::from_mib(2));
    assert_eq!(
        map.regions[0].pieces,
        homeostat_model::Pieces::default(),
        "a captured machine has no page tables"
    );
    let disabled = platform
        .inspect_memory(&"containerd-a1b2c3111111".into())
        .unwrap()
        .disabled;
    assert_eq!(disabled.len(), 1);
}

#[test]
fn a_container_that_hides_the_host_still_has_workloads() {
    let (mut platform, _, list) = scan("container-blind");
    assert_eq!(ids(&list), ["node[17]", "node[25]"], "a zombie is no workload");
    let machine = platform.machine().unwrap();
    assert_eq!(machine.cpus.len(), 2);
    assert_eq!(machine.nodes.len(), 1);
    assert_eq!(machine.kernel, "5.15.0-91-generic");
    assert_eq!(machine.boot_id, "boot-time-1700000001");
    for id in ["process_list", "cgroup2", "psi", "transparent_huge_pages"] {
        let capability = machine.capability(id).unwrap();
        assert_ne!(capability.state, CapabilityState::Available, "{id}");
        assert!(!capability.cost_of_absence.is_empty(), "{id}");
    }
}

#[test]
fn an_old_kernel_is_seen_without_what_it_lacks() {
    let (mut platform, snapshot, list) = scan("old-kernel-3.10");
    assert_eq!(
        ids(&list),
        ["docker-feedfeedfeed", "httpd.service", "systemd[1]"],
        "rubbish is skipped"
    );
    assert_eq!(
        snapshot.machine.huge_pages,
        homeostat_model::HugePageSettings::default()
    );
    let machine = platform.machine().unwrap();
    assert_eq!(machine.huge_page_size, Bytes::ZERO);
    assert_eq!(machine.hypervisor.as_deref(), Some("QEMU"));
    assert_eq!(
        machine
            .cpus
            .iter()
            .map(|c| (c.core, c.package))
            .collect::<Vec<_>>(),
        [(0, 0), (0, 0)]
    );
    assert!(!machine.can("process_madvise.collapse"));
}

#[test]
fn a_control_group_of_one_resource_controller_does_not_swallow_unrelated_programs() {
    let (_, snapshot, list) = scan("small-vm");
    let mut programs: Vec<&str> = list.iter().map(|w| w.program.as_str()).collect();
    programs.sort_unstable();
    assert_eq!(programs, ["perl", "sh", "sleep", "sleep"]);
    assert!(list.iter().all(|w| w.kind == WorkloadKind::ProcessGroup));
    assert_eq!(
        snapshot.machine.huge_pages.enabled_set_by, None,
        "madvise is what this kernel was built with"
    );
}

#[test]
fn a_machine_without_proc_is_an_error_with_a_reason() {
    let empty = tempfile::tempdir().unwrap();
    let mut platform = LinuxPlatform::new(Root::new(empty.path()));
    for error in [
        platform.machine().unwrap_err(),
        platform
            .sample(&SampleRequest {
                scan: true,
                detail: vec![],
            })
            .unwrap_err(),
    ] {
        assert!(
            matches!(&error, PlatformError::Unsupported { why, .. } if why.contains("proc")),
            "{error}"
        );
    }
}

/// A process under a root that the test changes between samples.
struct Changing(tempfile::TempDir);
impl Changing {
    fn new() -> Self {
        let it = Self(tempfile::tempdir().unwrap());
        it.write("proc/meminfo", "MemTotal: 1000000 kB\n");
        it.write("proc/uptime", "1000.00 1.00\n");
        it
    }
    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    /// Writes `stat`; times in clock ticks (10 ms).
    fn process(&self, pid: i32, parent: i32, start: u64, own: u64, children: u64) {
        let tail = format!(
            "{own} 0 {children} 0 20 0 1 0 {start} 1 4000 0 1 1 {}",
            100 + start
        );
        self.write(
            &format!("proc/{pid}/stat"),
            &format!("{pid} (p{pid}) S {parent} {pid} {pid} 0 -1 0 0 0 0 0 {tail}\n"),
        );
        let exe = self.0.path().join(format!("proc/{pid}/exe"));
        if std::fs::symlink_metadata(&exe).is_err() {
            std::os::unix::fs::symlink("/bin/p", exe).unwrap();
        }
    }
    fn end(&self, pid: i32) {
        std::fs::remove_dir_all(self.0.path().join(format!("proc/{pid}"))).unwrap();
    }
}

fn cpu_ms(platform: &mut LinuxPlatform, id: &str) -> (u64, u32) {
    let snapshot = platform
        .sample(&SampleRequest {
            scan: true,
            detail: vec![id.into()],
        })
        .unwrap();
    let sample = snapshot.samples.iter().find(|s| s.id.as_str() == id).unwrap();
    (sample.cpu.as_millis(), sample.churn)
}

#[test]
fn rates_survive_exit_and_reuse_of_a_number() {
    let machine = Changing::new();
    machine.process(10, 1, 100, 5000, 0);
    let mut platform = LinuxPlatform::new(Root::new(machine.0.path()));
    assert_eq!(
        cpu_ms(&mut platform, "p10[10]").0,
        0,
        "a life before us is no difference"
    );
    machine.process(10, 1, 100, 5007, 0);
    assert_eq!(cpu_ms(&mut platform, "p10[10]").0, 70);
    // Another process with the same number, older than this interval: its past does not count at once.
    machine.process(10, 1, 200, 90_000, 0);
    let (used, churn) = cpu_ms(&mut platform, "p10[10]");
    assert!(used < 60_000, "{used} ms");
    assert!(churn >= 1);
    machine.process(10, 1, 200, 90_001, 0);
    assert_eq!(cpu_ms(&mut platform, "p10[10]").0, 10);
}

#[test]
fn a_childs_time_is_counted_once_whether_seen_alive_or_not() {
    let machine = Changing::new();
    machine.process(10, 1, 100, 0, 0);
    let mut platform = LinuxPlatform::new(Root::new(machine.0.path()));
    cpu_ms(&mut platform, "p10[10]");
    // Never seen alive: 30 ticks arrive with the parent's wait.
    machine.process(10, 1, 100, 0, 30);
    assert_eq!(cpu_ms(&mut platform, "p10[10]").0, 300);
    // Seen alive with 20 ticks since the first look, ends with 25 more.
    machine.process(11, 10, 100, 1000, 30);
    cpu_ms(&mut platform, "p10[10]");
    machine.process(11, 10, 100, 1020, 30);
    assert_eq!(cpu_ms(&mut platform, "p10[10]").0, 200);
    machine.end(11);
    // The parent inherits its 1045 ticks and the 30 of its own children.
    machine.process(10, 1, 100, 0, 30 + 1045 + 30);
    assert_eq!(cpu_ms(&mut platform, "p10[10]"), (250, 1));
}

#[test]
fn counters_that_go_back_give_nothing() {
    let machine = Changing::new();
    machine.process(10, 1, 100, 500, 80);
    let mut platform = LinuxPlatform::new(Root::new(machine.0.path()));
    cpu_ms(&mut platform, "p10[10]");
    machine.process(10, 1, 100, 400, 10);
    assert_eq!(cpu_ms(&mut platform, "p10[10]").0, 0);
}

/// A process of a made machine.
fn made_process(root: &std::path::Path, pid: i32, program: &str) -> PathBuf {
    let directory = root.join(format!("proc/{pid}"));
    std::fs::create_dir_all(&directory).unwrap();
    let write = |leaf: &str, text: String| std::fs::write(directory.join(leaf), text).unwrap();
    write(
        "stat",
        format!(
            "{pid} ({program}) S 1 {pid} {pid} 0 -1 4194304 1 0 0 0 10 10 0 0 20 0 1 0 100 99999999 20000 1 1 1 {pid}\n"
        ),
    );
    write("statm", "20000 20000 10 1 0 20000 0\n".into());
    write("status", "Name:\tx\nUid:\t0\t0\t0\t0\nVmRSS:\t80000 kB\n".into());
    write("cgroup", format!("0::/system.slice/{program}.service\n"));
    write("cmdline", format!("{program}\0"));
    write("environ", "A=b\0".into());
    directory
}

#[test]
fn a_file_of_a_process_that_is_no_file_holds_up_nobody_and_is_not_known() {
    let host = tempfile::tempdir().unwrap();
    let stuck = made_process(host.path(), 41, "stuck");
    made_process(host.path(), 42, "well");
    for (leaf, text) in [
        ("meminfo", "MemTotal: 1000000 kB\n"),
        ("uptime", "1000.0 1000.0\n"),
        ("stat", "cpu  1 1 1 1 1 1 1 1\n"),
    ] {
        std::fs::write(host.path().join("proc").join(leaf), text).unwrap();
    }
    // Opening a FIFO that nobody writes to would block.
    let fifo = |leaf: &str| {
        let path = stuck.join(leaf);
        std::fs::remove_file(&path).ok();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
    };
    fifo("environ");
    let mut platform = LinuxPlatform::new(Root::new(host.path()));
    let request = SampleRequest {
        scan: true,
        detail: vec![],
    };
    let workloads = platform.sample(&request).unwrap().workloads.unwrap();
    assert_eq!(named(&workloads, "well.service").choice.never, None);
    assert_eq!(named(&workloads, "well.service").choice.unknown, None);
    let unknown = named(&workloads, "stuck.service").choice.unknown.clone().unwrap();
    assert!(unknown.contains("cannot be read"), "{unknown}");
    fifo("smaps");
    let map = platform.inspect_memory(&"stuck.service".into()).unwrap();
    assert!(map.regions.is_empty(), "{map:?}");
    assert!(platform.inspect_memory(&"well.service".into()).is_ok());
}

#[test]
fn below_units_that_delegate_every_next_group_is_a_workload_with_an_owner_of_its_own() {
    let host = tempfile::tempdir().unwrap();
    let uid = |pod: u32| format!("{pod}f0f0f0f_1111_2222_3333_444444444444");
    let pod = |pod: u32, digit: &str| {
        let id = digit.repeat(64);
        let slice = format!("kubepods-burstable-pod{}.slice", uid(pod));
        format!("0::/system.slice/containerd.service/{slice}:cri-containerd:{id}\n")
    };
    let job = |job: &str| format!("0::/system.slice/slurmstepd.scope/{job}/step_0/user/task_0\n");
    let task = "0123456789abcdef".repeat(2);
    for (pid, program, user, cgroup) in [
        (
            700,
            "containerd",
            0,
            "0::/system.slice/containerd.service\n".to_owned(),
        ),
        (801, "redis-server", 0, pod(0, "a")),
        (802, "postgres", 0, pod(1, "b")),
        (910, "slurmd", 0, "0::/system.slice/slurmd.service\n".to_owned()),
        (911, "solver", 1001, job("job_1001")),
        (912, "train", 1002, job("job_1002")),
        (913, "solver2", 1003, job("s5AAAAAAAAAA00")),
        (921, "api", 0, format!("0::/ecs/{task}/{task}-123456789\n")),
    ] {
        let directory = made_process(host.path(), pid, program);
        std::fs::write(directory.join("cgroup"), cgroup).unwrap();
        let status = format!("Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\nVmRSS:\t80000 kB\n");
        std::fs::write(directory.join("status"), status).unwrap();
    }
    for (leaf, text) in [
        ("meminfo", "MemTotal: 1000000 kB\n"),
        ("uptime", "1000.0 1000.0\n"),
        ("stat", "cpu  1 1 1 1 1 1 1 1\n"),
    ] {
        std::fs::write(host.path().join("proc").join(leaf), text).unwrap();
    }
    let mut platform = LinuxPlatform::new(Root::new(host.path()));
    let request = SampleRequest {
        scan: true,
        detail: vec![],
    };
    let list = platform.sample(&request).unwrap().workloads.unwrap();
    let found: Vec<(&str, String, Vec<i32>)> = list
        .iter()
        .map(|w| (w.id.as_str(), w.owner.to_string(), pids(w)))
        .collect();
    let owner = |pod: u32| format!("pod:{}", uid(pod).replace('_', "-"));
    let ecs = format!("ecs/{0}/{0}-123456789", &task[..12]);
    assert_eq!(
        found,
        [
            ("containerd-aaaaaaaaaaaa", owner(0), vec![801]),
            ("containerd-bbbbbbbbbbbb", owner(1), vec![802]),
            ("containerd.service", "machine".to_owned(), vec![700]),
            (ecs.as_str(), "machine".to_owned(), vec![921]),
            ("slurmd.service", "machine".to_owned(), vec![910]),
            ("slurmstepd.scope/job_1001", "user:1001".to_owned(), vec![911]),
            ("slurmstepd.scope/job_1002", "user:1002".to_owned(), vec![912]),
            (
                "slurmstepd.scope/s5AAAAAAAAAA00",
                "user:1003".to_owned(),
                vec![913]
            ),
        ]
    );
    let of_ecs = &named(&list, &ecs).fingerprint;
    assert!(of_ecs.to_string().starts_with("cgroup /ecs/*/*-*: "), "{of_ecs}");
}
