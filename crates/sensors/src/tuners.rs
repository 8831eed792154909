//! Other programs that tune the machine. homeostat names them, so that a person knows who else may change things. Each
//! strategy says which of them conflicts with it (irqbalance, for one, never touches large pages).

use homeostat_kernel::{Root, files};

/// Programs by their name in `/proc/PID/comm` (cut to 15 characters by the kernel) and the name shown. Scripts run as
/// their interpreter, so [`by_argument`] also recognises tuned and bpftune by their script's name.
const BY_PROGRAM: &[(&str, &str)] = &[
    ("ananicy", "ananicy"),
    ("ananicy-cpp", "ananicy-cpp"),
    ("auto-cpufreq", "auto-cpufreq"),
    ("bpftune", "bpftune"),
    ("damo", "damo"),
    ("earlyoom", "earlyoom"),
    ("gamemoded", "gamemoded"),
    ("irqbalance", "irqbalance"),
    ("ksmtuned", "ksmtuned"),
    ("nohang", "nohang"),
    ("numad", "numad"),
    ("oomd", "oomd"),
    ("power-profiles-", "power-profiles-daemon"),
    ("systemd-oomd", "systemd-oomd"),
    ("thermald", "thermald"),
    ("tlp", "tlp"),
    ("tuned", "tuned"),
    ("uresourced", "uresourced"),
];

/// The tuner with this program name.
pub fn by_program(comm: &str) -> Option<&'static str> {
    BY_PROGRAM
        .iter()
        .find(|(name, _)| *name == comm)
        .map(|(_, shown)| *shown)
}

/// The tuner with this command line: an interpreter whose script is a tuner.
pub fn by_argument(arguments: &[&[u8]]) -> Option<&'static str> {
    // The script is the first argument that is not an option: `python3 -Es /usr/sbin/tuned -l -P`.
    let script = arguments.iter().skip(1).find(|a| !a.starts_with(b"-"))?;
    let name = script.rsplit(|&b| b == b'/').next()?;
    by_program(std::str::from_utf8(name).ok()?)
}

/// Tuners inside the kernel: DAMON with its users, and sched_ext schedulers. `kdamond` alone may only measure.
pub fn in_kernel(root: &Root) -> Vec<String> {
    let mut found = Vec::new();
    for module in ["damon_reclaim", "damon_lru_sort"] {
        let enabled = files::text(root, &format!("/sys/module/{module}/parameters/enabled"));
        if enabled.as_deref() == Some("Y") {
            found.push(module.to_owned());
        }
    }
    let monitors = files::text(root, "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds");
    if monitors.and_then(|n| n.parse().ok()).is_some_and(|n: u32| n > 0) {
        found.push("DAMON (set up in /sys/kernel/mm/damon)".to_owned());
    }
    if files::text(root, "/sys/kernel/sched_ext/state").as_deref() == Some("enabled") {
        let name = files::text(root, "/sys/kernel/sched_ext/root/ops").unwrap_or_default();
        found.push(format!("scheduler {name} (sched_ext)").replace("  ", " "));
    }
    found
}

/// Objects that a tuner works on, to find conflicts.
pub fn works_on(tuner: &str) -> &'static str {
    match tuner {
        "tuned" | "power-profiles-daemon" | "tlp" | "uresourced" => "settings of the whole machine",
        "bpftune" => "buffers and tables of the network",
        "numad" => "places of processes and memory",
        "irqbalance" => "CPUs of interrupts",
        "ksmtuned" => "merging of equal pages",
        "earlyoom" | "nohang" | "oomd" | "systemd-oomd" => "which process ends when memory is short",
        "auto-cpufreq" | "thermald" => "CPU frequencies",
        "ananicy" | "ananicy-cpp" | "gamemoded" => "priorities of processes",
        t if t.contains("sched_ext") => "when and where threads run",
        t if t.starts_with("damo") || t.starts_with("DAMON") => "reclaim of idle memory",
        _ => "something",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuned_is_recognised_as_a_script_too() {
        let line: [&[u8]; 4] = [b"/usr/bin/python3", b"-Es", b"/usr/sbin/tuned", b"-l"];
        assert_eq!(by_argument(&line), Some("tuned"));
        assert_eq!(by_program("numad"), Some("numad"));
        assert_eq!(by_program("number-cruncher"), None);
        assert_eq!(by_argument(&[b"vi", b"/etc/tuned/tuned-main.conf"]), None);
        assert_eq!(by_argument(&[]), None);
        let auto: [&[u8]; 3] = [b"/usr/bin/python3", b"/usr/bin/auto-cpufreq", b"--daemon"];
        assert_eq!(by_argument(&auto), Some("auto-cpufreq"));
    }

    #[test]
    fn names_are_those_that_the_kernel_keeps_and_everyone_works_on_something() {
        assert!(BY_PROGRAM.is_sorted());
        for (comm, shown) in BY_PROGRAM {
            assert!(comm.len() <= 15, "{comm} is longer than the kernel keeps");
            assert_ne!(works_on(shown), "something", "{shown}");
        }
    }

    #[test]
    fn what_the_kernel_is_told_to_tune_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        assert_eq!(in_kernel(&root), Vec::<String>::new());
        for (path, text) in [
            ("/sys/module/damon_reclaim/parameters/enabled", "Y\n"),
            ("/sys/module/damon_lru_sort/parameters/enabled", "N\n"),
            ("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "1\n"),
            ("/sys/kernel/sched_ext/state", "enabled\n"),
            ("/sys/kernel/sched_ext/root/ops", "lavd\n"),
        ] {
            let file = root.path(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        assert_eq!(
            in_kernel(&root),
            [
                "damon_reclaim",
                "DAMON (set up in /sys/kernel/mm/damon)",
                "scheduler lavd (sched_ext)"
            ]
        );
    }
}
