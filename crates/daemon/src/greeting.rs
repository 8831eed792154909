//! The daemon's first lines: version, machine, sampling, abilities and exclusions. Then a report of the first sample.

use crate::api::Switch;
use crate::service::host_story;
use crate::settings::{Loaded, Settings};
use homeostat_engine::view::Workload;
use homeostat_engine::{Profile, Stage, Status, Story, Strategy};
use homeostat_model::{Machine, Nanoseconds};

/// Named ignored workloads after the first sample, largest first.
const NAMED_MAX: usize = 4;
const RULES_MAX: usize = 5;
/// CPU use is known from the second scan on. Scans are at most a minute apart.
const LOOK_PATIENCE: Nanoseconds = Nanoseconds::from_secs(75);

/// The first lines. `machine` is already probed, so refusals appear before any try.
pub fn lines(
    loaded: &Loaded,
    switch: &Switch,
    machine: &Machine,
    strategies: &[Box<dyn Strategy>],
) -> Vec<Story> {
    let settings = &loaded.settings;
    let policy = &settings.policy;
    let mut said = vec![
        (switch.sentence(), false),
        (
            format!(
                "version {}, process {}",
                env!("CARGO_PKG_VERSION"),
                std::process::id()
            ),
            false,
        ),
        (machine_line(machine), false),
        (
            format!(
                "looks at all processes every {} s, and every {} s at those it measures (at most {}); considers what is \
                 {} s old, uses {} CPUs and has {} MiB",
                policy.scan_interval_s,
                policy.detail_interval_s,
                policy.detail_workloads_max,
                policy.age_min_s,
                policy.cpu_min,
                policy.memory_min_mib
            ),
            false,
        ),
    ];
    let mut refused = 0;
    for strategy in strategies {
        let id = strategy.id();
        if policy.strategies.get(id.as_str()) == Some(&false) {
            said.push((
                format!("strategy {id} is switched off in the configuration"),
                false,
            ));
            refused += 1;
        } else if strategy.works_in(policy.profile).is_err() {
            // A mismatch with another profile says nothing about the machine.
            refused += 1;
        } else if let Err(why) = strategy.usable(machine, policy.profile) {
            said.push((format!("strategy {id} is refused: {why}"), false));
            refused += 1;
        } else {
            said.push((format!("strategy {id} is active: {}", strategy.summary()), false));
        }
    }
    if refused == strategies.len() {
        said.push((
            "nothing can be improved on this machine as it is; `homeostat doctor` says what is missing"
                .to_owned(),
            true,
        ));
    }
    if policy.profile == Profile::AsoClassic {
        said.push((
            "thresholds are those of the profile aso-classic".to_owned(),
            false,
        ));
    }
    if policy.profile == Profile::AutotuneClassic {
        said.push((
            "the file cache is left to the rules of autotune (profile autotune-classic), which are not tried"
                .to_owned(),
            false,
        ));
    }
    said.push((left_alone(settings), false));
    said.push((places(loaded), false));
    let stop = if settings.service.keep_on_stop {
        "leaves proven changes in force and undoes the rest"
    } else {
        "puts everything back"
    };
    said.push((
        format!("more: `homeostat status`, `homeostat explain WORKLOAD`; to stop: Ctrl-C, which {stop}"),
        false,
    ));
    said.into_iter()
        .map(|(text, warning)| host_story(text, warning))
        .collect()
}

fn machine_line(machine: &Machine) -> String {
    let several = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
    let large = match machine.huge_page_size.0 {
        0 => "no large pages".to_owned(),
        _ => format!("large pages of {}", machine.huge_page_size),
    };
    let host = match &machine.hypervisor {
        Some(name) if name == "unknown" => ", a virtual machine".to_owned(),
        Some(name) => format!(", a virtual machine ({name})"),
        None => String::new(),
    };
    format!(
        "machine: Linux {}, {}, {}, {}, {} of memory, {large}{host}",
        machine.kernel,
        machine.cpu_model,
        several(machine.cpus.len(), "CPU"),
        several(machine.nodes.len(), "NUMA node"),
        machine.memory,
    )
}

fn left_alone(settings: &Settings) -> String {
    let mut text = String::from(
        "leaves alone: programs with HOMEOSTAT=never in their environment, and what somebody chose (madvise, prctl, \
         mlock, other tuners)",
    );
    let never: Vec<&str> = settings
        .policy
        .workloads
        .iter()
        .filter(|rule| rule.never)
        .map(|rule| rule.pattern.as_str())
        .collect();
    match never.get(RULES_MAX..) {
        _ if never.is_empty() => text.push_str("; no rule of the configuration says never"),
        Some(more) if !more.is_empty() => {
            let first = never.get(..RULES_MAX).unwrap_or_default();
            text.push_str(&format!("; by rule {} and {} more", first.join(", "), more.len()));
        }
        _ => text.push_str(&format!("; by rule {}", never.join(", "))),
    }
    text
}

fn places(loaded: &Loaded) -> String {
    let from = if loaded.layers.is_empty() {
        "defaults (there is no configuration file)".to_owned()
    } else {
        loaded.layers.join(", ")
    };
    format!(
        "state: {}; control: {}; settings: {from}",
        loaded.settings.paths.state_directory.display(),
        loaded.settings.socket().display()
    )
}

/// Waits for the first useful sample, and reports it. Once.
#[derive(Debug, Default)]
pub struct FirstLook {
    since: Option<Nanoseconds>,
}

impl FirstLook {
    /// The lines, when the CPU use of the workloads is known (or does not come); then it is over.
    pub fn at(&mut self, view: &Status, now: Nanoseconds) -> Option<Vec<Story>> {
        if view.workloads.is_empty() {
            return None;
        }
        let since = *self.since.get_or_insert(now);
        let known = view.workloads.iter().any(|w| w.cpus > 0.0);
        if !known && now.saturating_sub(since) < LOOK_PATIENCE {
            return None;
        }
        let (ignored, considered): (Vec<&Workload>, Vec<&Workload>) =
            view.workloads.iter().partition(|w| w.stage == Stage::Ignored);
        let left = ignored.len() + view.workloads_ignored as usize;
        let above = match considered.len() {
            0 => "none is above the floors yet".to_owned(),
            1 => "1 is above the floors".to_owned(),
            n => format!("{n} are above the floors"),
        };
        let mut largest = ignored;
        largest.sort_by(|a, b| {
            b.resident_bytes
                .cmp(&a.resident_bytes)
                .then(b.cpus.total_cmp(&a.cpus))
                .then(a.name.cmp(&b.name))
        });
        // Too small to be sampled, so without facts.
        largest.retain(|w| w.resident_bytes > 0 && !w.summary.is_empty());
        largest.truncate(NAMED_MAX);
        let tail = match (left, largest.len()) {
            (0, _) => String::new(),
            (left, 0) => format!("; {left} left alone"),
            (left, named) if left == named => format!("; {left} left alone:"),
            (left, named) => format!("; {left} left alone, the {named} largest of them:"),
        };
        let seen = considered.len() + left;
        let what = if seen == 1 { "workload" } else { "workloads" };
        let mut lines = vec![host_story(
            format!("first look: {seen} {what} seen, {above}{tail}"),
            false,
        )];
        lines.extend(largest.into_iter().map(|w| Story {
            workload: Some(w.name.clone()),
            stage: Stage::Ignored,
            text: w.summary.clone(),
            warning: false,
        }));
        Some(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_engine::WorkloadRule;
    use homeostat_model::{Bytes, WorkloadKind};

    fn machine() -> Machine {
        Machine {
            kernel: "6.12.1".into(),
            cpu_model: "A CPU".into(),
            hypervisor: Some("KVM".into()),
            cpus: Vec::new(),
            nodes: Vec::new(),
            memory: Bytes::from_mib(2048),
            page_size: Bytes(4096),
            huge_page_size: Bytes::from_mib(2),
            llc_size: Bytes::ZERO,
            boot_id: "b".into(),
            capabilities: Vec::new(),
        }
    }

    fn switch() -> Switch {
        Switch {
            on: false,
            by: "switch".into(),
            since_unix: None,
            why: "switched off".into(),
            change: "homeostat on".into(),
        }
    }

    fn loaded() -> Loaded {
        Loaded {
            settings: Settings::default(),
            layers: Vec::new(),
            seed_given: false,
            mode_from: None,
        }
    }

    fn all_text(lines: &[Story]) -> String {
        lines.iter().map(|l| format!("{}\n", l.text)).collect()
    }

    #[test]
    fn it_says_who_where_what_how_often_and_how_to_stop() {
        let mut loaded = loaded();
        for pattern in ["a", "b", "c", "d", "e", "f"] {
            loaded.settings.policy.workloads.push(WorkloadRule {
                pattern: pattern.into(),
                never: true,
                ..WorkloadRule::default()
            });
        }
        let text = all_text(&lines(
            &loaded,
            &switch(),
            &machine(),
            &homeostat_strategies::all(),
        ));
        for part in [
            "homeostat is off: it advises and changes nothing (switched off). Let it act: homeostat on",
            env!("CARGO_PKG_VERSION"),
            "Linux 6.12.1",
            "virtual machine (KVM)",
            "every 10 s",
            "HOMEOSTAT=never",
            "by rule a, b, c, d, e and 1 more",
            "/var/lib/homeostat",
            "no configuration file",
            "homeostat explain",
            "Ctrl-C, which puts everything back",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        // This machine has no capabilities: what needs them is refused with the reason.
        assert!(text.contains("strategy large_pages is refused: "), "{text}");
        loaded.settings.service.keep_on_stop = true;
        loaded
            .settings
            .policy
            .strategies
            .insert("large_pages".into(), false);
        let text = all_text(&lines(
            &loaded,
            &switch(),
            &machine(),
            &homeostat_strategies::all(),
        ));
        assert!(
            text.contains("large_pages is switched off in the configuration"),
            "{text}"
        );
        assert!(text.contains("leaves proven changes in force"), "{text}");
    }

    fn workload(id: &str, cpus: f64, mib: u64, stage: Stage) -> Workload {
        Workload {
            name: id.into(),
            kind: WorkloadKind::Unit,
            program: id.into(),
            fingerprint: String::new(),
            owner: "machine".into(),
            pids: vec![1],
            processes: 1,
            age_s: 1.0,
            cpus,
            resident_bytes: mib << 20,
            huge_bytes: None,
            stage,
            undone: false,
            summary: format!("why {id}"),
            meter: None,
            meters: [].into(),
            proposal: None,
            decisions: [].into(),
        }
    }

    #[test]
    fn the_first_look_waits_for_cpu_use_and_names_the_largest() {
        let mut look = FirstLook::default();
        let mut view = Status::default();
        let at = Nanoseconds::from_secs;
        assert_eq!(look.at(&view, at(1)), None);
        for (i, mib) in [10, 60, 20, 50, 30, 40].into_iter().enumerate() {
            view.workloads
                .push(workload(&format!("w{i}"), 0.0, mib, Stage::Ignored));
        }
        assert_eq!(look.at(&view, at(2)), None, "CPU use is not known yet");
        view.workloads
            .push(workload("busy", 0.9, 5000, Stage::Considered));
        view.workloads_ignored = 7;
        let lines = look.at(&view, at(12)).unwrap();
        assert_eq!(
            lines[0].text,
            "first look: 14 workloads seen, 1 is above the floors; 13 left alone, the 4 largest of them:"
        );
        let named: Vec<&str> = lines[1..].iter().map(|l| l.text.as_str()).collect();
        assert_eq!(named, ["why w1", "why w3", "why w5", "why w4"]);
    }

    #[test]
    fn a_machine_that_is_all_idle_is_described_after_a_while() {
        let mut look = FirstLook::default();
        let view = Status {
            workloads: vec![workload("idle", 0.0, 1, Stage::Ignored)],
            ..Status::default()
        };
        assert_eq!(look.at(&view, Nanoseconds::from_secs(1)), None);
        assert_eq!(look.at(&view, Nanoseconds::from_secs(60)), None);
        let lines = look.at(&view, Nanoseconds::from_secs(76)).unwrap();
        assert!(
            lines[0]
                .text
                .contains("1 workload seen, none is above the floors yet; 1 left alone:")
        );
    }
}
