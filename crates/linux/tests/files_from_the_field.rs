//! Configuration as it is found on real machines: which line is in force, who made a value so, and what is stale.
//!
//! Each case lays its files over a small virtual machine (four CPUs, Linux 6.12) and gives the right answers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_kernel::Root;
use homeostat_tunables::settings::{Host, Known};
use homeostat_tunables::{Catalogue, Origin, stale};
use std::path::Path;

const BASE: &[(&str, &str)] = &[
    ("/proc/sys/kernel/osrelease", "6.12.41-cloud\n"),
    ("/proc/sys/kernel/hostname", "vm\n"),
    (
        "/proc/cpuinfo",
        "processor\t: 0\nmodel name\t: Example CPU\nflags\t\t: fpu sse2 hypervisor\n",
    ),
    (
        "/proc/meminfo",
        "MemTotal:       16384000 kB\nHugepagesize:       2048 kB\n",
    ),
    ("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/vda1 ro\n"),
    (
        "/boot/config-6.12.41-cloud",
        "CONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y\n",
    ),
    ("/proc/sys/vm/swappiness", "60\n"),
    ("/proc/sys/vm/max_map_count", "65530\n"),
    ("/proc/sys/vm/dirty_ratio", "20\n"),
    ("/proc/sys/vm/dirty_background_ratio", "10\n"),
    ("/proc/sys/vm/dirty_bytes", "0\n"),
    ("/proc/sys/vm/dirty_background_bytes", "0\n"),
    ("/proc/sys/vm/min_free_kbytes", "67584\n"),
    ("/proc/sys/vm/nr_hugepages", "0\n"),
    ("/proc/sys/net/core/somaxconn", "4096\n"),
    ("/proc/sys/net/core/default_qdisc", "pfifo_fast\n"),
    ("/sys/devices/system/cpu/online", "0-3\n"),
    ("/sys/devices/system/node/online", "0\n"),
    (
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "always [madvise] never\n",
    ),
    (
        "/sys/kernel/mm/transparent_hugepage/defrag",
        "always defer defer+madvise [madvise] never\n",
    ),
    ("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n"),
];

struct Case {
    _keep: tempfile::TempDir,
    root: Root,
}

impl Case {
    fn new(files: &[(&str, &str)]) -> Self {
        let keep = tempfile::tempdir().unwrap();
        let root = keep.path().join("root");
        for (path, text) in BASE.iter().chain(files) {
            let file = root.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        Self {
            _keep: keep,
            root: Root::new(root),
        }
    }

    fn link(self, path: &str, target: &str) -> Self {
        let file = self.root.as_path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, file).unwrap();
        self
    }

    /// Kind of finding, setting, and place.
    fn findings(&self) -> Vec<(&'static str, String, String)> {
        let catalogue = Catalogue::load().unwrap();
        let host = Host::read(&self.root);
        let settings = host.settings(&catalogue);
        stale::find(&catalogue, &host, &settings)
            .into_iter()
            .map(|f| (f.trouble.as_str(), f.name, f.place))
            .collect()
    }

    fn origin(&self, name: &str) -> String {
        let catalogue = Catalogue::load().unwrap();
        let host = Host::read(&self.root);
        let settings = host.settings(&catalogue);
        let setting = settings.iter().find(|s| s.name == name).expect(name);
        match host.origin(setting, &Known::default()).expect(name) {
            Origin::Configured { place, .. } => place,
            Origin::Kernel { why, .. } => format!("kernel: {why}"),
            other => other.kind().to_owned(),
        }
    }

    #[track_caller]
    fn is_clean(&self) -> &Self {
        assert_eq!(self.findings(), []);
        self
    }

    #[track_caller]
    fn has(&self, name: &str, origin: &str) -> &Self {
        assert_eq!(self.origin(name), origin, "{name}");
        self
    }
}

fn found(kind: &'static str, name: &str, place: &str) -> (&'static str, String, String) {
    (kind, name.to_owned(), place.to_owned())
}

#[test]
fn a_comment_after_a_number_is_nothing_to_the_kernel() {
    Case::new(&[
        (
            "/etc/sysctl.d/60-db.conf",
            "vm.swappiness = 30 # default value is 60\nvm.max_map_count=262144   # for the search engine\n",
        ),
        ("/proc/sys/vm/swappiness", "30\n"),
        ("/proc/sys/vm/max_map_count", "262144\n"),
    ])
    .is_clean()
    .has("vm.swappiness", "/etc/sysctl.d/60-db.conf:1")
    .has("vm.max_map_count", "/etc/sysctl.d/60-db.conf:2");
}

#[test]
fn of_lines_of_tmpfiles_the_first_counts() {
    Case::new(&[
        (
            "/etc/tmpfiles.d/10-local-thp.conf",
            "w! /sys/kernel/mm/transparent_hugepage/enabled - - - - never\n",
        ),
        (
            "/usr/lib/tmpfiles.d/thp.conf",
            "w! /sys/kernel/mm/transparent_hugepage/enabled - - - - always\n",
        ),
        (
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "always madvise [never]\n",
        ),
    ])
    .is_clean()
    .has("thp.enabled", "/etc/tmpfiles.d/10-local-thp.conf:1");
}

#[test]
fn what_tuned_s_own_profiles_write_is_understood() {
    let case = Case::new(&[
        ("/etc/tuned/active_profile", "srv-guest\n"),
        (
            "/usr/lib/tuned/profiles/srv-base/tuned.conf",
            "[main]\nsummary=a server\n\n[variables]\narm_regex=CPU part\\s+:\\s+(0x0?af)\\b\n\n[vm]\ndirty_bytes = 40%\n\
             dirty_background_bytes = 10%\n\n[vm.arm]\ntype=vm\nuname_regex=aarch64\ncpuinfo_regex=${arm_regex}\n\
             transparent_hugepages=never\n\n[disk]\nreadahead=>4096\n\n[sysctl]\nnet.core.somaxconn=>2048\n\
             vm.min_free_kbytes=>135168\n",
        ),
        (
            "/usr/lib/tuned/profiles/srv-guest/tuned.conf",
            "[main]\nsummary=a guest\ninclude=srv-base\n\n[vm]\ndirty_bytes = 30%\n\n[sysctl]\nvm.swappiness = 30\n",
        ),
        (
            "/boot/config-6.12.41-cloud",
            "CONFIG_TRANSPARENT_HUGEPAGE_ALWAYS=y\n",
        ),
        ("/proc/sys/vm/dirty_ratio", "30\n"),
        ("/proc/sys/vm/min_free_kbytes", "225280\n"),
        ("/proc/sys/vm/swappiness", "30\n"),
        (
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "[always] madvise never\n",
        ),
        ("/sys/block/vda/queue/read_ahead_kb", "8192\n"),
    ]);
    let place = |profile: &str, line: u32| {
        format!("tuned profile srv-guest (/usr/lib/tuned/profiles/{profile}/tuned.conf:{line})")
    };
    case.is_clean()
        .has("thp.enabled", "default")
        .has("vm.dirty_ratio", &place("srv-guest", 6))
        .has("vm.swappiness", &place("srv-guest", 9))
        .has("net.core.somaxconn", &place("srv-base", 21))
        .has("block.vda.read_ahead_kb", &place("srv-base", 18));
}

#[test]
fn what_the_large_page_thread_raised_is_the_kernel_s() {
    let case = Case::new(&[
        ("/etc/sysctl.d/70-mem.conf", "vm.min_free_kbytes = 135168\n"),
        ("/proc/sys/vm/min_free_kbytes", "225280\n"),
        (
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "[always] madvise never\n",
        ),
    ]);
    let origin = case.is_clean().origin("vm.min_free_kbytes");
    assert!(
        origin.starts_with("kernel: the kernel raised it from 135168"),
        "{origin}"
    );
}

#[test]
fn systemd_does_not_read_the_old_file_of_sysctls() {
    let files = [
        ("/etc/sysctl.conf", "vm.swappiness = 10\n"),
        ("/etc/sysctl.d/50-app.conf", "vm.swappiness = 40\n"),
        ("/proc/sys/vm/swappiness", "40\n"),
        ("/usr/lib/systemd/systemd-sysctl", ""),
    ];
    let case = Case::new(&files);
    case.has("vm.swappiness", "/etc/sysctl.d/50-app.conf:1");
    assert_eq!(
        case.findings(),
        [found("ignored", "vm.swappiness", "/etc/sysctl.conf:1")]
    );
    // As Debian 12 has it: then it counts.
    let case = Case::new(&files).link("/etc/sysctl.d/99-sysctl.conf", "../sysctl.conf");
    assert_eq!(
        case.findings(),
        [found("not_in_force", "vm.swappiness", "/etc/sysctl.conf:1")]
    );
}

#[test]
fn large_pages_of_two_sizes_are_two_pools() {
    Case::new(&[
        ("/proc/sys/vm/nr_hugepages", "512\n"),
        (
            "/proc/cmdline",
            "BOOT_IMAGE=/vmlinuz ro default_hugepagesz=2M hugepagesz=2M hugepages=512 hugepagesz=1G hugepages=4\n",
        ),
    ])
    .is_clean()
    .has("vm.nr_hugepages", "kernel command line hugepages=512");
}

#[test]
fn what_its_counterpart_set_to_zero_is_the_kernel_s() {
    let case = Case::new(&[
        (
            "/etc/sysctl.d/50-old.conf",
            "vm.dirty_background_ratio = 5\nvm.dirty_ratio = 10\n",
        ),
        (
            "/etc/sysctl.d/60-new.conf",
            "vm.dirty_background_bytes = 209715200\nvm.dirty_bytes = 1073741824\n",
        ),
        ("/proc/sys/vm/dirty_background_bytes", "209715200\n"),
        ("/proc/sys/vm/dirty_background_ratio", "0\n"),
        ("/proc/sys/vm/dirty_bytes", "1073741824\n"),
        ("/proc/sys/vm/dirty_ratio", "0\n"),
    ]);
    let origin = case.is_clean().origin("vm.dirty_ratio");
    assert!(
        origin.contains("its counterpart vm.dirty_bytes = 1073741824"),
        "{origin}"
    );
    assert!(origin.contains("/etc/sysctl.d/60-new.conf:2"), "{origin}");
}

#[test]
fn a_scheduler_that_the_kernel_does_not_offer_is_stale() {
    let rules = "SUBSYSTEM==\"block\", ACTION==\"add|change\", KERNEL==\"sd[a-z]|nvme*n*\", ATTR{queue/rotational}==\"0\", \
         ATTR{queue/scheduler}=\"noop\"\n";
    let case = Case::new(&[
        ("/etc/udev/rules.d/60-block.rules", rules),
        ("/sys/block/sda/queue/rotational", "0\n"),
        ("/sys/block/sda/queue/scheduler", "[none] mq-deadline kyber bfq\n"),
        ("/sys/block/sdb/queue/rotational", "1\n"),
        ("/sys/block/sdb/queue/scheduler", "[none] mq-deadline kyber bfq\n"),
    ]);
    assert_eq!(
        case.findings(),
        [found(
            "ignored",
            "block.sda.scheduler",
            "/etc/udev/rules.d/60-block.rules:1"
        )]
    );
}

#[test]
fn a_rule_for_other_disks_hides_nothing() {
    Case::new(&[
        (
            "/etc/udev/rules.d/60-ssd.rules",
            "ACTION==\"add|change\", KERNEL==\"sd[a-z]*\", ATTR{queue/rotational}==\"0\", ATTR{queue/scheduler}=\"kyber\"\n",
        ),
        (
            "/etc/udev/rules.d/61-usb.rules",
            "ACTION==\"add|change\", KERNEL==\"sd[a-z]*\", SUBSYSTEMS==\"usb\", ATTR{queue/scheduler}=\"bfq\"\n\
             ACTION==\"add|change\", KERNEL==\"sd[a-z]*\", ATTRS{queue/zoned}==\"host-managed\", ATTR{queue/scheduler}=\"mq-deadline\"\n",
        ),
        ("/sys/block/sda/queue/rotational", "0\n"),
        ("/sys/block/sda/queue/scheduler", "none mq-deadline [kyber] bfq\n"),
    ])
    .is_clean()
    .has("block.sda.scheduler", "/etc/udev/rules.d/60-ssd.rules:1");
}

#[test]
fn parents_of_a_device_are_found_through_its_links() {
    let rules = "KERNEL==\"sd*\", SUBSYSTEMS==\"usb\", ATTR{queue/scheduler}=\"bfq\"\n\
         KERNEL==\"sd*\", SUBSYSTEMS==\"scsi\", ATTRS{vendor}==\"ATA*\", ATTR{queue/nr_requests}=\"64\"\n";
    let device = "/sys/devices/pci0000:00/0000:00:01.0/ata1/host0/target0:0:0/0:0:0:0";
    let file = |leaf: &str| format!("{device}/{leaf}");
    let paths = [
        file("uevent"),
        file("vendor"),
        file("block/sda/uevent"),
        file("block/sda/queue/scheduler"),
        file("block/sda/queue/nr_requests"),
    ];
    let texts = [
        "",
        "ATA     \n",
        "DEVTYPE=disk\n",
        "none [mq-deadline] bfq\n",
        "256\n",
    ];
    let mut files: Vec<(&str, &str)> = paths.iter().map(String::as_str).zip(texts).collect();
    files.push(("/etc/udev/rules.d/60-x.rules", rules));
    files.push(("/sys/bus/scsi/uevent", ""));
    let case = Case::new(&files)
        .link(
            "/sys/block/sda",
            &format!("..{}/block/sda", device.trim_start_matches("/sys")),
        )
        .link(&file("subsystem"), "../../../../../../../bus/scsi");
    // No parent is a USB device; one is the SCSI device.
    assert_eq!(
        case.findings(),
        [found(
            "not_in_force",
            "block.sda.nr_requests",
            "/etc/udev/rules.d/60-x.rules:2"
        )]
    );
}

#[test]
fn links_are_resolved_within_the_tree() {
    let outside = tempfile::tempdir().unwrap();
    let host = outside.path().join("hostfile.conf");
    std::fs::write(&host, "vm.swappiness = 77\n").unwrap();
    Case::new(&[
        ("/etc/static/sysctl.d/60-nixos.conf", "vm.swappiness = 5\n"),
        ("/proc/sys/vm/swappiness", "5\n"),
    ])
    .link(
        "/etc/sysctl.d/60-nixos.conf",
        "/etc/static/sysctl.d/60-nixos.conf",
    )
    .link("/etc/sysctl.d/70-host.conf", host.to_str().unwrap())
    .is_clean()
    .has("vm.swappiness", "/etc/sysctl.d/60-nixos.conf:1");
}

#[test]
fn loops_and_files_of_sysctls_in_units_are_followed() {
    Case::new(&[
        (
            "/etc/systemd/system/a-missing-quote.service",
            "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo never > /sys/kernel/mm/transparent_hugepage/enabled\n",
        ),
        (
            "/etc/systemd/system/b-loop.service",
            "[Service]\nType=oneshot\nExecStart=/usr/bin/bash -c \"for f in enabled defrag; do echo never > \
             /sys/kernel/mm/transparent_hugepage/$f; done\"\n",
        ),
        (
            "/etc/systemd/system/c-sysctl-file.service",
            "[Service]\nType=oneshot\nExecStart=/usr/sbin/sysctl -p /etc/opt/db-sysctl.conf\n",
        ),
        ("/etc/opt/db-sysctl.conf", "vm.swappiness = 3\n"),
        ("/proc/sys/vm/swappiness", "3\n"),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ("/sys/kernel/mm/transparent_hugepage/defrag", "always defer defer+madvise madvise [never]\n"),
    ])
    .is_clean()
    .has("thp.enabled", "/etc/systemd/system/b-loop.service:3")
    .has("thp.defrag", "/etc/systemd/system/b-loop.service:3")
    .has(
        "vm.swappiness",
        "/etc/opt/db-sysctl.conf:1, by /etc/systemd/system/c-sysctl-file.service:3",
    );
}

#[test]
fn a_command_that_is_not_understood_may_have_set_a_value() {
    Case::new(&[
        (
            "/etc/systemd/system/x.service",
            "[Service]\nExecStart=/bin/sh -c 'cat /etc/opt/thp > /sys/kernel/mm/transparent_hugepage/enabled'\n",
        ),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
    ])
    .is_clean()
    .has("thp.enabled", "/etc/systemd/system/x.service:2 may have set it");
}

#[test]
fn quotation_marks_are_no_numbers_and_a_mark_of_bytes_is_no_name() {
    let case = Case::new(&[(
        "/etc/sysctl.d/99-q.conf",
        "net.core.default_qdisc=\"fq\"\nvm.swappiness=\"10\"\n",
    )]);
    let place = |line: u32| format!("/etc/sysctl.d/99-q.conf:{line}");
    assert_eq!(
        case.findings(),
        [
            found("not_in_force", "net.core.default_qdisc", &place(1)),
            found("not_in_force", "vm.swappiness", &place(2)),
        ]
    );
    let case = Case::new(&[
        (
            "/etc/sysctl.d/60-w.conf",
            "\u{feff}vm.swappiness = 10\r\nvm.max_map_count = 262144\r\n",
        ),
        ("/proc/sys/vm/max_map_count", "262144\n"),
    ]);
    case.has("vm.max_map_count", "/etc/sysctl.d/60-w.conf:2");
    assert_eq!(
        case.findings(),
        [found(
            "ignored",
            "\u{feff}vm.swappiness",
            "/etc/sysctl.d/60-w.conf:1"
        )]
    );
}

#[test]
fn a_dash_before_a_name_is_no_part_of_it() {
    Case::new(&[
        (
            "/usr/lib/sysctl.d/50-default.conf",
            "net.ipv4.conf.*.rp_filter = 2\n-net.ipv4.conf.all.rp_filter\n-vm.max_map_count = 1048576\nvm/swappiness=20\n-vm.no_such = 1\n",
        ),
        ("/proc/sys/vm/max_map_count", "1048576\n"),
        ("/proc/sys/vm/swappiness", "20\n"),
    ])
    .is_clean()
    .has("vm.max_map_count", "/usr/lib/sysctl.d/50-default.conf:3")
    .has("vm.swappiness", "/usr/lib/sysctl.d/50-default.conf:4");
}

#[test]
fn stale_lines_about_files_and_devices_are_found_in_every_kind_of_place() {
    let case = Case::new(&[
        (
            "/etc/tmpfiles.d/a.conf",
            "w /sys/kernel/mm/redhat_transparent_hugepage/enabled - - - - never\nw /sys/block/sdz/queue/nr_requests - - - - 64\n\
             w- /sys/kernel/mm/optional - - - - 1\nw /sys/block/sd[x-z]/queue/nr_requests - - - - 64\n",
        ),
        (
            "/etc/sysfs.conf",
            "kernel/mm/transparent_hugepage/khugepaged_old = 1\nblock/hda/queue/scheduler = noop\n",
        ),
        (
            "/etc/udev/rules.d/60-x.rules",
            "KERNEL==\"sdy\", SUBSYSTEM==\"block\", ATTR{queue/scheduler}=\"none\"\n\
             KERNEL==\"sda\", SUBSYSTEM==\"block\", ATTR{queue/old_name}=\"1\"\n\
             KERNEL==\"sdy\", SUBSYSTEMS==\"usb\", ATTR{queue/scheduler}=\"none\"\n",
        ),
        ("/etc/tuned/active_profile", "p\n"),
        (
            "/etc/tuned/p/tuned.conf",
            "[sysfs]\n/sys/kernel/mm/old/x=1\n/sys/kernel/mm/old/*=1\n",
        ),
        ("/sys/block/sda/queue/scheduler", "[none] mq-deadline\n"),
    ]);
    let is = |name: &str, place: &str| found("ignored", name, place);
    let tuned = "tuned profile p (/etc/tuned/p/tuned.conf:2)";
    let mut expected = vec![
        is("/sys/block/*/queue/old_name", "/etc/udev/rules.d/60-x.rules:2"),
        is("/sys/kernel/mm/old/x", tuned),
        is(
            "/sys/kernel/mm/redhat_transparent_hugepage/enabled",
            "/etc/tmpfiles.d/a.conf:1",
        ),
        is(
            "/sys/kernel/mm/transparent_hugepage/khugepaged_old",
            "/etc/sysfs.conf:1",
        ),
        is("block.*.scheduler", "/etc/udev/rules.d/60-x.rules:1"),
        is("block.hda.scheduler", "/etc/sysfs.conf:2"),
        is("block.sdz.nr_requests", "/etc/tmpfiles.d/a.conf:2"),
    ];
    expected.sort_by(|a, b| a.1.cmp(&b.1));
    assert_eq!(case.findings(), expected);
}

#[test]
fn two_kinds_of_places_that_disagree_are_said_to() {
    let case = Case::new(&[
        ("/etc/sysctl.d/a.conf", "vm.swappiness = 10\n"),
        ("/etc/tmpfiles.d/a.conf", "w /proc/sys/vm/swappiness - - - - 20\n"),
        ("/proc/sys/vm/swappiness", "20\n"),
    ]);
    case.has("vm.swappiness", "/etc/tmpfiles.d/a.conf:1");
    assert_eq!(
        case.findings(),
        [found("conflict", "vm.swappiness", "/etc/sysctl.d/a.conf:1")]
    );
}

#[test]
fn a_tree_is_read_and_not_the_running_machine() {
    assert!(Path::new("/proc/self").exists());
    let case = Case::new(&[]);
    assert_eq!(Host::read(&case.root).facts.release_text, "6.12.41-cloud");
}
