//! What the kernel does to a setting by itself, after it was set or because another one was.
//!
//! Such a value is nobody's: no file says it, and nobody wrote it. Each relation names what made the value so, and the line,
//! if there is one, whose wish it follows.

use crate::configured::Applies;
use crate::reading::{self, Reading};
use crate::settings::{Host, Said, Setting};
use crate::tree::Tree;
use homeostat_model::setting::other_of_pair;

/// Why the kernel itself made a value what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// In words.
    pub why: String,
    /// The line that the kernel followed as far as it could, or that set the other setting.
    pub place: Option<String>,
    /// Position of that line in the order of effect.
    pub position: Option<usize>,
    /// The line asked for more than the machine could give: it is not in force.
    pub falls_short: bool,
}

/// A block of pages is as large as a large page (`pageblock_order`); where that is not told, as on x86-64.
const PAGE_BLOCK: u64 = 2 << 20;
/// `set_recommended_min_free_kbytes()` asks for so many blocks in each zone: 2 + MIGRATE_PCPTYPES².
const BLOCKS_A_ZONE: u64 = 11;
/// … but at most this part of memory.
const SHARE_MAX: u64 = 20;
/// Most zones: three a node, on 1024 nodes.
const ZONES_MAX: u64 = 3072;

/// Whether the kernel itself made the value, given what lines say.
pub fn made(host: &Host<'_>, setting: &Setting<'_>, said: &[Said<'_>]) -> Option<Made> {
    let value = setting.found.value()?;
    let tree = host.tree;
    let now = value.parse::<i128>().ok();
    let asked = said
        .iter()
        .rev()
        .find(|s| matches!(s.reading, Reading::Different(_)) && s.applies == Applies::Yes);
    let asked_number = asked.and_then(|s| match &s.reading {
        Reading::Different(v) => v.parse::<i128>().ok(),
        Reading::Equal | Reading::Refused(_) | Reading::Unknown(_) => None,
    });
    let by_line = |why: String, falls_short: bool| Made {
        why,
        place: asked.map(|s| s.written.place()),
        position: asked.map(|s| s.position),
        falls_short,
    };
    let by_other = |why: String| Made {
        why,
        place: None,
        position: None,
        falls_short: false,
    };
    let standard = setting.standard.shown().and_then(|s| s.parse::<i128>().ok());
    let wished = asked_number.or(standard);
    let (directory, _) = setting.path.rsplit_once('/').unwrap_or_default();
    let beside = |leaf: &str| tree.text(&format!("{directory}/{leaf}")).unwrap_or_default();
    if let Some(other) = other_of_pair(&setting.path) {
        return (value == "0")
            .then(|| counterpart(host, setting, other))
            .flatten();
    }
    match setting.path.as_str() {
        "/proc/sys/vm/min_free_kbytes" => {
            let (now, asked) = (now?, asked_number?);
            (now > asked && is_recommended(host, u64::try_from(now).ok()?)).then(|| {
                by_line(
                    format!("the kernel raised it from {asked}: its large-page thread needs that much"),
                    false,
                )
            })
        }
        "/proc/sys/vm/nr_hugepages" => {
            let (now, asked) = (now?, asked_number?);
            (now < asked).then(|| {
                by_line(
                    format!("the kernel found memory for {now} of {asked} large pages"),
                    true,
                )
            })
        }
        "/proc/sys/kernel/perf_event_max_sample_rate" => {
            let limit = tree
                .text("/proc/sys/kernel/perf_cpu_time_max_percent")
                .unwrap_or_default();
            (now? < wished? && !matches!(limit.trim(), "0" | "100")).then(|| {
                by_line(
                    "the kernel lowered it: samples took too much CPU time".to_owned(),
                    false,
                )
            })
        }
        "/proc/sys/kernel/hung_task_warnings" => (now? < wished? && now? >= 0)
            .then(|| by_line("the kernel counts it down with each warning".to_owned(), false)),
        "/sys/kernel/mm/ksm/pages_to_scan" => beside("advisor_mode")
            .contains("[scan-time]")
            .then(|| by_other("ksm's advisor (ksm.advisor_mode) chooses it".to_owned())),
        path if path.ends_with("/queue/wbt_lat_usec") => (value == "0"
            && beside("scheduler").contains("[bfq]"))
        .then(|| by_other("the scheduler bfq turns it off".to_owned())),
        path if path.ends_with("/energy_performance_preference") => (value == "performance"
            && beside("scaling_governor").trim() == "performance")
            .then(|| by_other("the governor performance holds it there".to_owned())),
        _ => None,
    }
}

/// Of a pair of which one counts, the other one was set.
fn counterpart(host: &Host<'_>, setting: &Setting<'_>, other: &str) -> Option<Made> {
    let shown = host.tree.text(other)?;
    let counts = shown.trim();
    if counts == "0" || counts.is_empty() {
        return None;
    }
    let name = other
        .strip_prefix("/proc/sys/")
        .unwrap_or(other)
        .replace('/', ".");
    let lines = host.configured.about(other, host.tree);
    let line = lines.iter().rev().find(|c| {
        let w = c.written;
        reading::of(setting.tunable, other, w.form, &w.value, &shown, host.tree) == Reading::Equal
    });
    let by = line.map_or_else(String::new, |c| format!(" ({})", c.written.place()));
    Some(Made {
        why: format!("the kernel set it to 0, because its counterpart {name} = {counts} counts{by}"),
        place: line.map(|c| c.written.place()),
        position: line.map(|c| c.position),
        falls_short: false,
    })
}

/// Whether khugepaged would recommend so many KiB: so many blocks for each zone, or a share of memory.
fn is_recommended(host: &Host<'_>, kib: u64) -> bool {
    const BASE: &str = "/sys/kernel/mm/transparent_hugepage";
    let text = |leaf: &str| host.tree.text(&format!("{BASE}/{leaf}")).unwrap_or_default();
    if text("enabled").contains("[never]") {
        return false;
    }
    let block = text("hpage_pmd_size").trim().parse::<u64>().unwrap_or(PAGE_BLOCK);
    let a_zone = (block / 1024 * BLOCKS_A_ZONE).max(1);
    let is_share = host.facts.memory > 0 && kib.abs_diff(host.facts.memory / 1024 / SHARE_MAX) <= kib / 10;
    (kib % a_zone == 0 && (1..=ZONES_MAX).contains(&(kib / a_zone))) || is_share
}

/// Why the kernel refuses a value that is in range, as another setting or an earlier value stands.
pub fn refuses(path: &str, value: &str, now: &str, tree: &dyn Tree) -> Option<String> {
    let number = |text: &str| text.trim().parse::<i128>().ok();
    let wanted = number(value)?;
    let other = |path: &str| tree.text(path).as_deref().and_then(number);
    match path {
        "/proc/sys/kernel/sched_rt_runtime_us" => {
            let period = other("/proc/sys/kernel/sched_rt_period_us")?;
            (wanted > period).then(|| format!("it must not exceed kernel.sched_rt_period_us = {period}"))
        }
        "/proc/sys/kernel/sched_util_clamp_min" => {
            let most = other("/proc/sys/kernel/sched_util_clamp_max")?;
            (wanted > most).then(|| format!("it must not exceed kernel.sched_util_clamp_max = {most}"))
        }
        "/proc/sys/kernel/unprivileged_bpf_disabled" => {
            (now == "1").then(|| "once it is 1 it stays until the next boot".to_owned())
        }
        "/proc/sys/kernel/kexec_load_disabled" => {
            (now == "1").then(|| "once it is 1 it stays until the next boot".to_owned())
        }
        "/proc/sys/kernel/yama/ptrace_scope" => {
            (now == "3").then(|| "once it is 3 it stays until the next boot".to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::catalogue::Catalogue;
    use crate::settings::{Host, Known, Origin};
    use crate::testing::Files;

    /// Origin of a setting and the kinds of finding about it.
    fn verdict(name: &str, list: &[(&str, &str)]) -> (String, Vec<&'static str>) {
        let mut all = vec![
            ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ("/proc/meminfo", "MemTotal: 16777216 kB\n"),
            ("/sys/devices/system/cpu/online", "0-7\n"),
            ("/sys/devices/system/node/online", "0\n"),
            (
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "[always] madvise never\n",
            ),
        ];
        all.extend(list);
        let tree = Files::new(&all);
        let catalogue = Catalogue::load().unwrap();
        let host = Host::read(&tree);
        let settings = host.settings(&catalogue);
        let setting = settings.iter().find(|s| s.name == name).expect(name);
        let origin = match host.origin(setting, &Known::default()).unwrap() {
            Origin::Kernel { why, .. } => why,
            other => other.kind().to_owned(),
        };
        let found = crate::stale::find(&catalogue, &host, &settings);
        let kinds = found
            .iter()
            .filter(|f| f.name == name)
            .map(|f| f.trouble.as_str());
        (origin, kinds.collect())
    }

    #[test]
    fn each_relation_changes_a_verdict() {
        let vm = |leaf: &str| format!("/proc/sys/vm/{leaf}");
        let (free, ratio, bytes, pages) = (
            vm("min_free_kbytes"),
            vm("dirty_ratio"),
            vm("dirty_bytes"),
            vm("nr_hugepages"),
        );
        let file = "/etc/sysctl.d/a.conf";
        /// A tunable, files, and what is said: a part of the origin, the kinds of findings.
        type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str, &'a [&'a str]);
        let cases: &[Case] = &[
            (
                "vm.min_free_kbytes",
                &[(&free, "225280"), (file, "vm.min_free_kbytes=135168")],
                "large-page thread",
                &[],
            ),
            (
                "vm.min_free_kbytes",
                &[(&free, "225281"), (file, "vm.min_free_kbytes=135168")],
                "run_time",
                &["not_in_force"],
            ),
            (
                "vm.min_free_kbytes",
                &[(&free, "67584"), (file, "vm.min_free_kbytes=135168")],
                "default",
                &["not_in_force"],
            ),
            (
                "vm.dirty_ratio",
                &[
                    (&ratio, "0"),
                    (&bytes, "9000"),
                    (file, "vm.dirty_ratio=5\nvm.dirty_bytes=9000"),
                ],
                "counterpart vm.dirty_bytes = 9000 counts (/etc/sysctl.d/a.conf:2)",
                &[],
            ),
            // The other way round the ratio should count.
            (
                "vm.dirty_ratio",
                &[
                    (&ratio, "0"),
                    (&bytes, "9000"),
                    (file, "vm.dirty_bytes=9000\nvm.dirty_ratio=5"),
                ],
                "counterpart",
                &["not_in_force"],
            ),
            (
                "vm.dirty_ratio",
                &[(&ratio, "0"), (&bytes, "8000"), (file, "vm.dirty_ratio=5")],
                "counterpart",
                &["not_in_force"],
            ),
            (
                "vm.nr_hugepages",
                &[(&pages, "900"), (file, "vm.nr_hugepages=1024")],
                "900 of 1024",
                &["not_in_force"],
            ),
            (
                "kernel.perf_event_max_sample_rate",
                &[("/proc/sys/kernel/perf_event_max_sample_rate", "63000")],
                "lowered",
                &[],
            ),
            (
                "kernel.hung_task_warnings",
                &[
                    ("/proc/sys/kernel/hung_task_warnings", "7"),
                    (file, "kernel.hung_task_warnings=9"),
                ],
                "counts it down",
                &[],
            ),
            (
                "ksm.pages_to_scan",
                &[
                    ("/sys/kernel/mm/ksm/pages_to_scan", "777"),
                    ("/sys/kernel/mm/ksm/advisor_mode", "none [scan-time]"),
                ],
                "advisor",
                &[],
            ),
            (
                "block.sda.wbt_lat_usec",
                &[
                    ("/sys/block/sda/queue/wbt_lat_usec", "0"),
                    ("/sys/block/sda/queue/scheduler", "none [bfq]"),
                ],
                "bfq",
                &[],
            ),
            (
                "kernel.sched_rt_runtime_us",
                &[
                    ("/proc/sys/kernel/sched_rt_runtime_us", "950000"),
                    ("/proc/sys/kernel/sched_rt_period_us", "1000000"),
                    (file, "kernel.sched_rt_runtime_us=2000000"),
                ],
                "default",
                &["not_in_force"],
            ),
        ];
        for (name, files, origin, findings) in cases {
            let (seen, kinds) = verdict(name, files);
            assert!(seen.contains(origin), "{name} {files:?}: {seen}");
            assert_eq!(kinds, *findings, "{name} {files:?}");
        }
    }
}
