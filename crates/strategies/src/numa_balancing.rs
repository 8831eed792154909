//! # numa_balancing
//!
//! ## What
//! Switches the kernel's automatic NUMA balancing off, for the whole host, where it costs time and has nothing left to
//! move. All programs whose work can be measured are tried together: their mean decides, and a loss of one of them, or of
//! a neighbour, ends it. Switching it *on* is never tried (see Evidence).
//!
//! ## Why it helps
//! To find out from where memory is used, the kernel takes pages away from the programs, some 256 MiB of each at a time,
//! and looks who faults on them. That is up to a tenth of a second of CPU time for each program and turn, each second
//! to each minute, whether or not there is anything to gain: of memory that many threads on all nodes use alike, half of
//! the faults come from afar for ever, and the kernel looks as often as it can.
//!
//! ## When it hurts
//! * Where it still moves memory to its users: then what it will gain comes later than any block of a trial. So nothing is
//!   proposed while more than a small part of the memory is moved in an hour (`moved_share_max`).
//! * Where memory lies on nodes without CPUs, or the setting promotes hot pages of slow memory (value 2 or 3): that is
//!   its work, and it is left alone.
//! * Programs that start later and lie badly are not helped by the kernel any more while it is off. `cache_affinity` and
//!   `memory_affinity` look after those whose work can be measured; the guard gives the setting back when a program that
//!   it watches loses. Who starts later, and is not measured, has only the other programs' guard.
//! * A program that a person excluded (`HOMEOSTAT=never`, a rule `never`) would be reached, and nobody would see its loss: while
//!   one works nothing is proposed, and what is in force is withdrawn.
//!
//! ## Evidence
//! The kernel's own counters of the last minutes (`/proc/vmstat`): hinting faults, how many were local, pages migrated. A
//! fault is taken to cost 1.5 µs (0.5 to 3), with the marking of its page; a migrated page 3 µs more. These are
//! estimates, and the trial decides: whether it is off can be seen within seconds, since scanning stops at once, and begins
//! at once when it is on again. A block begins with one and a half times `settling_s` unmeasured, so that one scan after the switch
//! is not taken for all of them.
//!
//! Switching it on cannot be judged in blocks, however long: its effect builds up over minutes, and the pages that it moved
//! stay where they are in the blocks without it, which therefore show the same. homeostat declines and says so; where
//! threads are and memory lies is what `cache_affinity` and `memory_affinity` try one program at a time, with a verdict
//! for each.
//!
//! The simulated machine has no hinting faults. That the setting is tried and put back is proven in an emulated machine
//! (vm/README.md); that it gains, nowhere yet.
//!
//! ## Undo
//! The value found is written back. A value that anybody configured (sysctl.d, a profile of tuned, the kernel's command
//! line) or set at run time is a person's choice and stays; one that somebody writes meanwhile stays, too.
//!
//! ## References
//! Linux Documentation/admin-guide/sysctl/kernel.rst (`numa_balancing`: unmapping pages and trapping the faults is overhead
//! that better locality ideally, but not always, makes up for; to be off where programs are bound to nodes anyway) and
//! Documentation/scheduler/sched-debug.rst (`scan_size_mb` = 256, `scan_period_min_ms` = 1000,
//! `scan_period_max_ms` = 60000).

use crate::common::{AGE_HELP, age_min, capable, gain_min, too_young};
use homeostat_engine::{Declined, Opinion, Proposal, Seen, Setting, Strategy};
use homeostat_model::action::Target;
use homeostat_model::{Bytes, Effect, EffectorId, KernelBalancing, Machine, Nanoseconds, StrategyId};
use std::collections::BTreeMap;

const ID: &str = "numa_balancing";
/// What the setting is called where somebody else's choice of it is told: sentences about it begin so.
pub(crate) const SETTING: &str = "kernel.numa_balancing";
const FILE: &str = "/proc/sys/kernel/numa_balancing";
/// Off, and on without promotion from slow memory (Documentation/admin-guide/sysctl/kernel.rst).
const OFF: u8 = 0;
const ON: u8 = 1;
/// CPU time of a hinting fault, with the marking of its page: estimate, least, most (seconds). 0.1 s for the 65,536 pages
/// of a scan of 256 MiB is 1.5 µs each; a fault that does nothing else takes some 0.5 µs on a processor of today.
const FAULT_S: [f64; 3] = [1.5e-6, 0.5e-6, 3e-6];
/// CPU time of a migrated page beyond that (as in `memory_affinity`).
const MIGRATION_S: f64 = 3e-6;
/// Level of the interval. It is a judgement, not a calibrated figure.
const CONFIDENCE: f64 = 0.9;
/// No more than this share of the busy time is believed to be saved.
const SHARE_MOST: f64 = 0.5;

const AGE_MIN: Setting = age_min(ID, 0.0, AGE_HELP);
const WINDOW_MIN: Setting = Setting {
    strategy: ID,
    name: "window_min_s",
    default: 60.0,
    classic: 60.0,
    low: 1.0,
    high: 300.0,
    help: "seconds over which the kernel's counters must have been watched before anything is concluded from them; the \
           longest period of its scans is 60",
};
const MOVED_SHARE_MAX: Setting = Setting {
    strategy: ID,
    name: "moved_share_max",
    default: 0.05,
    classic: 0.05,
    low: 0.0,
    high: 1e9,
    help: "share of the memory in use that it may move in an hour, at its present pace, and still be taken to have nothing \
           left to do",
};
const SETTLING_S: Setting = Setting {
    strategy: ID,
    name: "settling_s",
    default: 10.0,
    classic: 10.0,
    low: 0.1,
    high: 60.0,
    help: "time constant in seconds of the switch; a block begins with one and a half times as much unmeasured, so that it holds \
           scans of the usual period and not only the one that follows the switch",
};
const GAIN_MIN: Setting = gain_min(ID);

/// The strategy.
pub(crate) struct NumaBalancing;

impl Strategy for NumaBalancing {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "switches the kernel's automatic NUMA balancing off where it costs time and has nothing left to move"
    }

    fn settings(&self) -> &'static [Setting] {
        &[AGE_MIN, WINDOW_MIN, MOVED_SHARE_MAX, SETTLING_S, GAIN_MIN]
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        let with_memory = machine.nodes.iter().filter(|n| n.memory > Bytes::ZERO).count();
        if with_memory < 2 {
            return Err("one memory node: the kernel has nothing to balance".into());
        }
        let without_cpus = machine
            .nodes
            .iter()
            .find(|n| n.memory > Bytes::ZERO && machine.cpus.iter().all(|c| c.node != n.id));
        if let Some(node) = without_cpus {
            return Err(format!(
                "node {} has memory and no CPUs: bringing its pages to those who use them is the kernel's work",
                node.id
            ));
        }
        capable(machine, &["numa_balancing"])
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if seen.held.iter().any(|h| h.strategy.as_str() == ID) {
            return decline("automatic NUMA balancing is off already".into());
        }
        if let Some(why) = too_young(seen, AGE_MIN.value(seen.policy)) {
            return decline(why);
        }
        let Some(now) = seen.machine_sample.numa_balancing.as_ref() else {
            return decline("the kernel does not tell what its automatic NUMA balancing does".into());
        };
        if let Some(why) = not_ours_to_change(seen, now) {
            return decline(why);
        }
        propose(seen, now)
    }

    fn reaches_others(&self) -> bool {
        true
    }

    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        if let Some(theirs) = set_by_a_person(seen) {
            return Some(theirs.to_owned());
        }
        let now = seen.machine_sample.numa_balancing.as_ref()?;
        let place = now.set_by.as_ref()?;
        Some(format!("{SETTING} is set by somebody else ({place})"))
    }
}

fn decline(reason: String) -> Opinion {
    Opinion::Decline(Declined::because(reason))
}

/// What somebody wrote to the setting while it was ours, as the effector found it.
fn set_by_a_person<'s>(seen: &'s Seen<'_>) -> Option<&'s str> {
    let mut told = seen.workload.choice.tuned.iter().map(String::as_str);
    told.find(|t| t.starts_with(SETTING))
}

/// Why the setting is not to be changed, whatever it costs.
fn not_ours_to_change(seen: &Seen<'_>, now: &KernelBalancing) -> Option<String> {
    if let Some(theirs) = set_by_a_person(seen) {
        return Some(theirs.to_owned());
    }
    if now.ours {
        return Some("automatic NUMA balancing is switched off for a neighbour at the moment".into());
    }
    let at = |place: &str| {
        if place == "at run time" {
            place.to_owned()
        } else {
            format!("in {place}")
        }
    };
    match (now.value, now.set_by.as_deref()) {
        (value, Some(place)) => Some(format!(
            "a person or another tool chose how the kernel balances: {SETTING} = {value}, set {}",
            at(place)
        )),
        (OFF, None) => Some(
            "automatic NUMA balancing is off, as the kernel was built. Switching it on is not tried: it works over minutes, \
             and the pages that it moved stay where they are in the blocks without it, so no trial can tell what it gains"
                .into(),
        ),
        (ON, None) => None,
        (value, None) => Some(format!(
            "{SETTING} = {value}: it promotes hot pages from slow memory, which is left to the kernel"
        )),
    }
}

fn propose(seen: &Seen<'_>, now: &KernelBalancing) -> Opinion {
    let policy = seen.policy;
    let window = now.window.as_secs_f64();
    let least = WINDOW_MIN.value(policy);
    if window < least {
        return decline(format!(
            "what automatic NUMA balancing does was watched for {} so far (at least {})",
            now.window,
            Nanoseconds::from_secs_f64(least)
        ));
    }
    let doing = doing(now);
    let used = seen
        .machine
        .memory
        .saturating_sub(seen.machine_sample.memory_available);
    let moved = now.pages_migrated as f64 * seen.machine.page_size.0 as f64;
    let hourly = moved / window * 3600.0 / (used.0 as f64).max(1.0);
    let most = MOVED_SHARE_MAX.value(policy);
    if hourly > most {
        return decline(format!(
            "{doing}: at this pace it moves {:.0} % of the memory in use in an hour (at most {:.0} %), so it is at work, and \
             what that gains no block would show",
            hourly * 100.0,
            most * 100.0
        ));
    }
    let gain = seen.known.unwrap_or_else(|| saved(now));
    let least = GAIN_MIN.value(policy);
    if seen.known.is_none() && gain.estimate < least {
        return decline(format!(
            "{doing}: no benefit predicted from switching it off ({gain}; at least {:+.1} %)",
            least * 100.0
        ));
    }
    Opinion::Propose(Box::new(Proposal {
        hypothesis: format!(
            "{doing}: switched off for the whole host, nobody pays for the faults, and nothing is lost that it still moved \
             (predicted {gain})"
        ),
        predicted: gain,
        effector: EffectorId::from(ID),
        target: Target::Files(vec![FILE.to_owned()]),
        stages: Vec::new(),
        arguments: BTreeMap::from([("value".to_owned(), OFF.to_string())]),
        reversible: true,
        joint: true,
        urgent: false,
        makes_room: false,
        settling: Nanoseconds::from_secs_f64(SETTLING_S.value(policy)),
        risk: "the kernel does not bring memory to programs that start later, or change, while it is off"
            .into(),
        advice: Vec::new(),
    }))
}

/// What it did, as the beginning of a sentence.
fn doing(now: &KernelBalancing) -> String {
    let window = now.window.as_secs_f64().max(1e-9);
    let local = now.hint_faults_local as f64 / (now.hint_faults.max(1)) as f64;
    format!(
        "automatic NUMA balancing took {:.0} hinting faults a second over {} ({:.0} % local) and migrated {:.1} pages a \
         second",
        now.hint_faults as f64 / window,
        now.window,
        local * 100.0,
        now.pages_migrated as f64 / window
    )
}

/// The share of the host's CPU time that goes into it, as a gain of everybody.
fn saved(now: &KernelBalancing) -> Effect {
    let busy = now.cpu_busy.as_secs_f64();
    let gain = |fault_s: f64| {
        let spent = now.hint_faults as f64 * fault_s + now.pages_migrated as f64 * MIGRATION_S;
        let share = if busy > 0.0 { spent / busy } else { 0.0 };
        let share = share.clamp(0.0, SHARE_MOST);
        share / (1.0 - share)
    };
    let [estimate, least, most] = FAULT_S.map(gain);
    Effect {
        estimate,
        lower: least,
        upper: most,
        confidence: CONFIDENCE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_affinity::CacheAffinity;
    use crate::common::testing::{Scene, available, chips, machine};
    use homeostat_model::{CapabilityState, NodeId};

    /// Two nodes, on which 100 processes use the same memory: 80,000 faults a second of eight busy CPUs, half of them
    /// local, and next to nothing moves.
    fn scanned() -> Scene {
        let mut machine = machine(&chips(2, 2), 2);
        machine.capabilities.push(available("numa_balancing"));
        Scene::new(machine, 8.0, 40.0).with(|s| {
            s.machine_sample.memory_available = Bytes(88 << 30);
            s.machine_sample.numa_balancing = Some(KernelBalancing {
                value: 1,
                set_by: None,
                ours: false,
                window: Nanoseconds::from_secs(120),
                cpu_busy: Nanoseconds::from_secs(960),
                hint_faults: 9_600_000,
                hint_faults_local: 4_800_000,
                pages_migrated: 600,
            });
        })
    }

    fn with(change: impl FnOnce(&mut KernelBalancing)) -> Scene {
        scanned().with(|s| change(s.machine_sample.numa_balancing.as_mut().unwrap()))
    }

    #[test]
    fn faults_that_cost_and_move_nothing_are_switched_off_for_all_together() {
        let p = scanned().proposal(&NumaBalancing);
        assert_eq!(p.target, Target::Files(vec![FILE.into()]));
        assert_eq!(p.arguments, BTreeMap::from([("value".into(), "0".into())]));
        assert_eq!(p.effector.as_str(), "numa_balancing");
        assert!(p.joint && p.reversible && p.stages.is_empty());
        // 9.6 million faults of 1.5 µs and 600 pages of 3 µs, of 960 s: 1.5 %.
        let gain = (9.6e6 * 1.5e-6 + 600.0 * 3e-6) / 960.0;
        assert!((p.predicted.estimate - gain / (1.0 - gain)).abs() < 1e-12);
        assert!(p.predicted.lower < p.predicted.estimate && p.predicted.estimate < p.predicted.upper);
        assert!(
            p.hypothesis.contains("80000 hinting faults a second"),
            "{}",
            p.hypothesis
        );
        assert!(p.hypothesis.contains("50 % local"), "{}", p.hypothesis);
        // A block must be longer than the scans are apart.
        assert!(p.settling >= Nanoseconds::from_secs(5));
    }

    #[test]
    fn what_costs_next_to_nothing_is_not_worth_a_trial() {
        let why = with(|b| b.hint_faults = 500_000).reason(&NumaBalancing);
        assert!(why.contains("no benefit predicted"), "{why}");
        // Shown to help here before: the trial is made again.
        let scene = with(|b| b.hint_faults = 500_000);
        let known = Effect {
            estimate: 0.02,
            lower: 0.01,
            upper: 0.03,
            confidence: 0.9,
        };
        let opinion = scene.ask(|seen| {
            NumaBalancing.consider(&Seen {
                known: Some(known),
                refused: &[],
                ..*seen
            })
        });
        assert!(matches!(opinion, Opinion::Propose(p) if p.predicted == known));
    }

    #[test]
    fn while_it_moves_memory_it_is_left_to_its_work() {
        // 2 GiB in two minutes, of 40 GiB in use: all of it in 40 minutes.
        let why = with(|b| b.pages_migrated = 524_288).reason(&NumaBalancing);
        assert!(why.contains("at work") && why.contains("150 %"), "{why}");
        let scene = with(|b| b.pages_migrated = 524_288).with(|s| {
            s.policy
                .settings
                .entry(ID.into())
                .or_default()
                .insert("moved_share_max".into(), 2.0);
        });
        assert!(matches!(scene.opinion(&NumaBalancing), Opinion::Propose(_)));
    }

    #[test]
    fn too_short_a_look_says_nothing() {
        for seconds in [0, 59] {
            let why = with(|b| b.window = Nanoseconds::from_secs(seconds)).reason(&NumaBalancing);
            assert!(why.contains("so far"), "{why}");
        }
    }

    #[test]
    fn switching_it_on_is_never_tried_and_it_is_said_why() {
        let why = with(|b| b.value = 0).reason(&NumaBalancing);
        assert!(
            why.contains("stay where they are") && why.contains("no trial"),
            "{why}"
        );
    }

    #[test]
    fn what_a_person_chose_stays() {
        for (value, place, said) in [
            (0, "at run time", "set at run time"),
            (1, "/etc/sysctl.d/90.conf", "set in /etc/sysctl.d/90.conf"),
            (2, "at run time", "= 2"),
        ] {
            let scene = with(|b| (b.value, b.set_by) = (value, Some(place.into())));
            let why = scene.reason(&NumaBalancing);
            assert!(
                why.contains("a person or another tool") && why.contains(said),
                "{why}"
            );
            assert!(scene.unwanted(&NumaBalancing).is_some());
        }
        let why = with(|b| b.value = 2).reason(&NumaBalancing);
        assert!(why.contains("slow memory"), "{why}");
        // What the effector found to be somebody else's while the change was in force.
        let written = scanned().with(|s| {
            let sentence = "kernel.numa_balancing was set to 2 by somebody else";
            s.workload.choice.tuned.push(sentence.into());
        });
        assert!(written.reason(&NumaBalancing).contains("somebody else"));
        assert!(written.unwanted(&NumaBalancing).unwrap().contains("set to 2"));
        assert_eq!(scanned().unwanted(&NumaBalancing), None);
        // It is no choice of a place: threads and memory may be placed all the same.
        let why = match written.opinion(&CacheAffinity) {
            Opinion::Decline(d) => d.reason,
            _ => String::new(),
        };
        assert!(!why.contains("kernel.numa_balancing"), "{why}");
    }

    #[test]
    fn what_is_off_already_is_not_switched_off_again() {
        let held = scanned().with(|s| s.hold(ID, Target::Files(vec![FILE.into()])));
        assert!(held.reason(&NumaBalancing).contains("off already"));
        let why = with(|b| (b.value, b.ours) = (0, true)).reason(&NumaBalancing);
        assert!(why.contains("neighbour"), "{why}");
        let blind = scanned().with(|s| s.machine_sample.numa_balancing = None);
        assert!(blind.reason(&NumaBalancing).contains("does not tell"));
    }

    #[test]
    fn machines_on_which_it_has_other_work_or_none_are_left_alone() {
        let scene = scanned();
        assert_eq!(NumaBalancing.applicable(&scene.machine), Ok(()));
        let mut one = scene.machine.clone();
        one.nodes[1].memory = Bytes::ZERO;
        assert!(
            NumaBalancing
                .applicable(&one)
                .unwrap_err()
                .contains("one memory node")
        );
        let mut memory_alone = scene.machine.clone();
        for cpu in &mut memory_alone.cpus {
            cpu.node = NodeId(0);
        }
        let why = NumaBalancing.applicable(&memory_alone).unwrap_err();
        assert!(why.contains("no CPUs"), "{why}");
        let mut configured = scene.machine.clone();
        for c in &mut configured.capabilities {
            if c.id.as_str() == "numa_balancing" {
                c.state = CapabilityState::Limited;
                c.detail = "kernel.numa_balancing = 0, set in /etc/sysctl.d/x.conf".into();
            }
        }
        let why = NumaBalancing.applicable(&configured).unwrap_err();
        assert!(why.contains("/etc/sysctl.d/x.conf"), "{why}");
        let mut unknown = scene.machine.clone();
        unknown.capabilities.retain(|c| c.id.as_str() != "numa_balancing");
        assert!(NumaBalancing.applicable(&unknown).is_err());
    }
}
