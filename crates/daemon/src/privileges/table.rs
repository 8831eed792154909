//! The table of privileges, each with its reason. Every row has a reason. The daemon's test `privileges` compares the
//! rows with the system calls of `kernel` and the registered strategies.

use super::By::{Always, Later, Meters, Sensors, Strategies};
use super::Decision::{Covered, Given, Withheld};
use super::Need::{Call, Capability, Device, Family, Namespace, Socket, Write};
use super::Row;

/// The strategies that place threads, all through the effector `thread_placement`.
const THREADS: &[&str] = &["cache_affinity", "consolidation", "relocation"];
const PAGES: &[&str] = &["cache_affinity", "consolidation", "memory_affinity", "relocation"];
const LARGE_PAGES: &[&str] = &["large_pages"];
const FILE_CACHE: &[&str] = &["file_cache"];
const PREFETCH: &[&str] = &["prefetch"];

/// Every privilege that homeostat uses, and every one that later work asks for.
pub static TABLE: &[Row] = &[
    // Capabilities.
    Row {
        need: Capability("CAP_SYS_PTRACE"),
        by: Sensors,
        decision: Given,
        why: "The kernel shows memory maps, environments and open files of other users' processes only with it.",
    },
    Row {
        need: Capability("CAP_DAC_READ_SEARCH"),
        by: Sensors,
        decision: Given,
        why: "Programs, configuration and counters of services lie in directories that only their users may read.",
    },
    Row {
        need: Capability("CAP_SYS_ADMIN"),
        by: Sensors,
        decision: Given,
        why: "It shows page frames and page flags, and permits fanotify(7), which reports who wrote a setting.",
    },
    Row {
        need: Capability("CAP_SYS_ADMIN"),
        by: Meters,
        decision: Given,
        why: "A helper enters a container's network namespace to ask the servers in it.",
    },
    Row {
        need: Capability("CAP_PERFMON"),
        by: Meters,
        decision: Given,
        why: "Probes, breakpoints and CPU counters of other users' processes are opened with it.",
    },
    Row {
        need: Capability("CAP_BPF"),
        by: Meters,
        decision: Given,
        why: "BPF programs count hits of many probe sites, run-to-block times and waits.",
    },
    Row {
        need: Capability("CAP_DAC_OVERRIDE"),
        by: Meters,
        decision: Given,
        why: "A helper connects to control sockets that only the server's user may write.",
    },
    Row {
        need: Capability("CAP_DAC_OVERRIDE"),
        by: Strategies(FILE_CACHE),
        decision: Given,
        why: "Control groups that a user's session manager owns are writable by that user alone.",
    },
    Row {
        need: Capability("CAP_DAC_OVERRIDE"),
        by: Strategies(THREADS),
        decision: Given,
        why: "Control groups that a user's session manager owns are writable by that user alone.",
    },
    Row {
        need: Capability("CAP_CHOWN"),
        by: Always,
        decision: Given,
        why: "The control socket gets the group that control.group names.",
    },
    Row {
        need: Capability("CAP_IPC_LOCK"),
        by: Always,
        decision: Given,
        why: "The daemon locks its memory, so that it still works when memory is short.",
    },
    Row {
        need: Capability("CAP_SYS_RESOURCE"),
        by: Always,
        decision: Given,
        why: "The daemon protects itself and its reading process from the out-of-memory killer.",
    },
    Row {
        need: Capability("CAP_SYS_NICE"),
        by: Always,
        decision: Given,
        why: "The daemon raises its own priority.",
    },
    Row {
        need: Capability("CAP_SYS_NICE"),
        by: Sensors,
        decision: Given,
        why: "move_pages(2) reports the node of another user's pages only with it.",
    },
    Row {
        need: Capability("CAP_SYS_NICE"),
        by: Strategies(THREADS),
        decision: Given,
        why: "sched_setaffinity(2) changes the CPUs of other users' threads only with it.",
    },
    Row {
        need: Capability("CAP_SYS_NICE"),
        by: Strategies(PAGES),
        decision: Given,
        why: "move_pages(2) moves other users' pages only with it.",
    },
    Row {
        need: Capability("CAP_SYS_NICE"),
        by: Strategies(LARGE_PAGES),
        decision: Given,
        why: "process_madvise(2) advises on another process's memory only with it.",
    },
    Row {
        need: Capability("CAP_SYS_RAWIO"),
        by: Strategies(PREFETCH),
        decision: Given,
        why: "The prefetchers' registers are written through /dev/cpu/*/msr, which asks for it.",
    },
    // System calls beyond those that every service makes.
    Row {
        need: Call("setpriority"),
        by: Always,
        decision: Given,
        why: "The daemon raises its own priority, and a meter its thread's while it counts in turns.",
    },
    Row {
        need: Call("memfd_create"),
        by: Sensors,
        decision: Given,
        why: "The device numbers of memory that is no file are learnt from a file of that kind. The memory canary reports its \
              counts in another.",
    },
    Row {
        need: Call("io_setup"),
        by: Sensors,
        decision: Given,
        why: "The device number of rings for asynchronous I/O is learnt from a ring of our own, so that a database's ring is \
              not taken for unknown storage.",
    },
    Row {
        need: Call("io_destroy"),
        by: Sensors,
        decision: Given,
        why: "It removes that ring again.",
    },
    Row {
        need: Call("fanotify_init"),
        by: Sensors,
        decision: Given,
        why: "The kernel reports who writes a setting, so that a person's choice is kept.",
    },
    Row {
        need: Call("fanotify_mark"),
        by: Sensors,
        decision: Given,
        why: "It names the settings to report.",
    },
    Row {
        need: Call("process_vm_readv"),
        by: Sensors,
        decision: Given,
        why: "It reads a process's environment as it is now. The calls that write are refused.",
    },
    Row {
        need: Call("process_vm_readv"),
        by: Strategies(PAGES),
        decision: Given,
        why: "It touches pages that the kernel has unmapped for its own balancing, before they are moved.",
    },
    Row {
        need: Call("move_pages"),
        by: Sensors,
        decision: Given,
        why: "It reports on which node pages lie.",
    },
    Row {
        need: Call("move_pages"),
        by: Strategies(PAGES),
        decision: Given,
        why: "It moves pages to a node and back.",
    },
    Row {
        need: Call("sched_setaffinity"),
        by: Meters,
        decision: Given,
        why: "A meter's thread stays on one CPU while it sets breakpoints there.",
    },
    Row {
        need: Call("sched_setaffinity"),
        by: Strategies(THREADS),
        decision: Given,
        why: "It places threads on CPUs and back.",
    },
    Row {
        need: Call("process_madvise"),
        by: Strategies(LARGE_PAGES),
        decision: Given,
        why: "MADV_COLLAPSE makes a large page of a process's memory, MADV_COLD splits it again.",
    },
    Row {
        need: Call("cachestat"),
        by: Strategies(FILE_CACHE),
        decision: Given,
        why: "It reports which pages of a file were taken from a program, so that they can be read back.",
    },
    Row {
        need: Call("mincore"),
        by: Strategies(FILE_CACHE),
        decision: Given,
        why: "It reports which pages of a file are in memory, before they are dropped and after they are read back.",
    },
    Row {
        need: Call("setns"),
        by: Meters,
        decision: Given,
        why: "A helper enters a container's network namespace to open a socket in it.",
    },
    Row {
        need: Call("perf_event_open"),
        by: Meters,
        decision: Given,
        why: "Probes, breakpoints, CPU counters and context switches are counted through it.",
    },
    Row {
        need: Call("bpf"),
        by: Meters,
        decision: Given,
        why: "BPF programs count hits of many probe sites, run-to-block times and waits.",
    },
    // Paths.
    Row {
        need: Write("/sys/fs/cgroup"),
        by: Strategies(FILE_CACHE),
        decision: Given,
        why: "memory.high limits a reader's control group; a reader of the root group moves into a group made for it.",
    },
    Row {
        need: Write("/sys/fs/cgroup"),
        by: Strategies(THREADS),
        decision: Given,
        why: "A workload with a cpuset of its own is placed by cpuset.cpus.",
    },
    Row {
        need: Write("/proc/sys/kernel/numa_balancing"),
        by: Strategies(&["numa_balancing"]),
        decision: Given,
        why: "The kernel's automatic NUMA balancing is switched off in a trial and on again.",
    },
    Row {
        need: Write("/proc/sys/vm/swappiness"),
        by: Strategies(&["autotune"]),
        decision: Given,
        why: "The profile autotune-classic moves it.",
    },
    Row {
        need: Write("/proc/sys/vm/vfs_cache_pressure"),
        by: Strategies(&["autotune"]),
        decision: Given,
        why: "The profile autotune-classic moves it.",
    },
    Row {
        need: Write("/proc/sys/vm/watermark_scale_factor"),
        by: Strategies(&["autotune"]),
        decision: Given,
        why: "The profile autotune-classic moves it.",
    },
    // Devices.
    Row {
        need: Device {
            name: "char-cpu/msr",
            path: "/dev/cpu/*/msr",
            access: "rw",
        },
        by: Strategies(PREFETCH),
        decision: Given,
        why: "The prefetchers' registers are read and written through it.",
    },
    Row {
        need: Device {
            name: "char-cpu/cpuid",
            path: "/dev/cpu/*/cpuid",
            access: "r",
        },
        by: Strategies(PREFETCH),
        decision: Given,
        why: "An AMD processor reports by CPUID whether it has the prefetchers' register.",
    },
    // Address families and namespaces.
    Row {
        need: Family("AF_UNIX"),
        by: Always,
        decision: Given,
        why: "The control socket, systemd's readiness socket and its journal are such sockets.",
    },
    Row {
        need: Family("AF_UNIX"),
        by: Meters,
        decision: Given,
        why: "Servers report their counters on such sockets.",
    },
    Row {
        need: Family("AF_INET"),
        by: Meters,
        decision: Given,
        why: "Servers report their counters on their own ports; metrics.listen opens one on a loopback address.",
    },
    Row {
        need: Family("AF_INET6"),
        by: Meters,
        decision: Given,
        why: "As AF_INET, for servers that listen on IPv6 alone.",
    },
    Row {
        need: Family("AF_NETLINK"),
        by: Meters,
        decision: Given,
        why: "The kernel's socket diagnostics count the bytes of a workload's connections.",
    },
    Row {
        need: Namespace("net"),
        by: Meters,
        decision: Given,
        why: "A helper enters a container's network namespace to open a socket in it.",
    },
    // Privileges of later work, decided now.
    Row {
        need: Call("sched_setscheduler"),
        by: Later("batch work on SCHED_IDLE"),
        decision: Withheld,
        why: "No strategy makes this call yet. With a strategy it is to be given: CAP_SYS_NICE is held, and a rule on the policy \
              keeps real time out.",
    },
    Row {
        need: Call("ioprio_set"),
        by: Later("batch work in the idle class of block I/O"),
        decision: Withheld,
        why: "No strategy makes this call yet. With a strategy it is to be given, but for the real-time class.",
    },
    Row {
        need: Call("process_madvise"),
        by: Later("cold memory pushed out (MADV_PAGEOUT, MADV_COLD)"),
        decision: Covered,
        why: "It is the call of large pages: a filter cannot tell its advices apart.",
    },
    Row {
        need: Call("bpf"),
        by: Later("request times by tracing programs and iterators"),
        decision: Covered,
        why: "The meters make this call with CAP_BPF and CAP_PERFMON, which permit tracing programs, too.",
    },
    Row {
        need: Call("perf_event_open"),
        by: Later("request times by kernel probes"),
        decision: Covered,
        why: "The meters make this call with CAP_PERFMON, which permits probes of the kernel, too.",
    },
    Row {
        need: Write("/sys/fs/cgroup"),
        by: Later("cpu.idle, cpu.weight and cpu.max.burst of a batch unit"),
        decision: Covered,
        why: "The file cache's strategy writes to the same tree; single files of groups cannot be named ahead.",
    },
    Row {
        need: Write("/proc/PID/timerslack_ns"),
        by: Later("timer slack of event loops"),
        decision: Covered,
        why: "Files below /proc/PID follow the capabilities alone; CAP_SYS_NICE permits this one.",
    },
    Row {
        need: Call("sched_setattr"),
        by: Later("slices of threads"),
        decision: Withheld,
        why: "Its argument lies in memory, where a filter sees no policy, so it would permit real-time policies. The gain of \
              longer slices is not proven.",
    },
    Row {
        need: Call("migrate_pages"),
        by: Later("whole processes moved between nodes"),
        decision: Withheld,
        why: "One call moves everything, however long that takes. move_pages(2) moves pages within a budget.",
    },
    Row {
        need: Call("pidfd_getfd"),
        by: Later("read-ahead of one open file, options of one socket, busy polling of one epoll"),
        decision: Withheld,
        why: "A duplicate of a foreign socket speaks for its program, which no call that is given permits. A strategy that \
              needs it must take it in a helper process of its own.",
    },
    Row {
        need: Write("/sys/class/bdi"),
        by: Later("read-ahead of one open file"),
        decision: Withheld,
        why: "It is of use with pidfd_getfd(2) alone.",
    },
    Row {
        need: Write("/sys/block"),
        by: Later("queues of block devices"),
        decision: Withheld,
        why: "No strategy chooses them. A value written there reaches every user of the disk.",
    },
    Row {
        need: Call("swapon"),
        by: Later("memory expansion by zram"),
        decision: Withheld,
        why: "No strategy makes swap. With swapon(2) the daemon could give the kernel any file to swap on.",
    },
    Row {
        need: Call("swapoff"),
        by: Later("memory expansion by zram"),
        decision: Withheld,
        why: "No strategy makes swap. Switching a person's swap off can end programs.",
    },
    Row {
        need: Device {
            name: "block-zram",
            path: "/dev/zram*",
            access: "rw",
        },
        by: Later("memory expansion by zram"),
        decision: Withheld,
        why: "No strategy makes swap, and only its header is written there.",
    },
    Row {
        need: Write("/sys/class/zram-control"),
        by: Later("memory expansion by zram"),
        decision: Withheld,
        why: "No strategy makes swap.",
    },
    Row {
        need: Device {
            name: "/dev/cpu_dma_latency",
            path: "/dev/cpu_dma_latency",
            access: "rw",
        },
        by: Later("CPUs kept from deep idle states"),
        decision: Withheld,
        why: "No strategy weighs latency against power yet, and one open descriptor keeps every CPU awake.",
    },
    Row {
        need: Write("/sys/kernel/debug/split_huge_pages"),
        by: Later("shared large pages split"),
        decision: Withheld,
        why: "It is a test interface: one wrong number splits every large page of the machine.",
    },
    Row {
        need: Socket("/run/dbus/system_bus_socket"),
        by: Later("properties of units set by systemd"),
        decision: Withheld,
        why: "Who may set a unit's properties as root may also start a unit outside of this sandbox.",
    },
    Row {
        need: Socket("/run/systemd/private"),
        by: Later("properties of units set by systemd"),
        decision: Withheld,
        why: "It is systemd's own door to the same.",
    },
];
