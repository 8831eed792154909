//! What people see. Pure functions from the stable shapes to text, so that whole outputs are tested as snapshots.
//!
//! Written for somebody who is tired: the answer first, numbers with units, what to do next at the end.

mod memory;
mod meters;
mod past;
mod places;
mod privileges;
pub(crate) mod text;

pub use memory::memory;
pub use meters::{known_meters, meter_list, meter_test};
pub use past::{experiment, past};
pub use places::{locality, locality_of_one, placement, topology};
pub use privileges::privileges;
pub use text::{Look, bytes, effect, hours_or_less};

use homeostat_daemon::api::{
    Advice, Change, Experiment, ExperimentKind, Explanation, Outcome, Plan, Stage, Status, StoryLine,
    Workload, is_said_by,
};
use homeostat_daemon::board::hangs_for;
use homeostat_daemon::log::time_of_day;
use homeostat_daemon::report::Diagnosis;
use homeostat_model::{Capability, CapabilityState, Nanoseconds, NotExcluded, OffLevel};
use std::fmt::Write as _;
use text::{Tone, all_of, first_of, in_turns, lost_work, percent, plural, table, wrap};

/// Verdicts that `explain` shows.
const OUTCOMES_MAX: usize = 20;
/// Losses that are not excluded are shown for one trial up to this number; `--json` has all.
const LOSSES_MAX: usize = 3;

/// `homeostat status`.
pub fn status(s: &Status, all: bool, look: &Look) -> String {
    let mut out = String::new();
    match &s.switch {
        Some(switch) => {
            let tone = if switch.on && !s.paused {
                Tone::Good
            } else {
                Tone::Warn
            };
            let _ = writeln!(out, "{}", look.paint(tone, &switch.sentence()));
        }
        // A daemon of an earlier version.
        None => {
            let _ = writeln!(out, "homeostat is in mode {}", s.mode);
        }
    }
    if s.paused {
        let text = "It is paused: no new trial starts, proven changes stay. Go on: homeostat resume";
        let _ = writeln!(out, "{}", look.paint(Tone::Warn, text));
    }
    let _ = writeln!(out, "version {}, process {}, on {}", s.version, s.pid, s.machine);
    if let Some(age) = hangs_for(s) {
        let text = format!("The loop hangs: this state is {} s old.", age.as_secs());
        let _ = writeln!(out, "{}", look.paint(Tone::Bad, &text));
    }
    for refusal in &s.machine_refusals {
        out.push_str(&wrap(
            &format!("nothing can be done here: {refusal}"),
            "  ",
            look.width,
        ));
    }
    for note in &s.notes {
        out.push_str(&wrap(&format!("note: {note}"), "  ", look.width));
    }
    changes(&s.in_force, look, &mut out);
    experiments(&s.experiments, look, &mut out);
    workloads(s, all, look, &mut out);
    outcomes(&s.outcomes, 5, look, &mut out);
    advice(&s.advice, look, &mut out);
    own_cost(s, look, &mut out);
    out
}

fn own_cost(s: &Status, look: &Look, out: &mut String) {
    let b = &s.budget;
    let c = &s.calibration;
    heading("Own cost", look, out);
    let _ = writeln!(
        out,
        "  {} of one CPU, {} resident; workloads stood still {} for our changes, {} of memory added",
        percent(b.own_cpu, 2),
        bytes(b.own_resident_bytes),
        hours_or_less(b.stalled_s),
        bytes(b.bloat_bytes),
    );
    if b.canary_resident_bytes > 0 {
        let _ = writeln!(
            out,
            "  memory canary (runs during trials): {} of one CPU, {} resident",
            percent(b.canary_cpu, 2),
            bytes(b.canary_resident_bytes),
        );
    }
    let _ = writeln!(
        out,
        "  the loop waited {} for a CPU, and {} times for a page from storage ({} page faults without)",
        hours_or_less(b.own_waited_s),
        b.own_faults_major,
        b.own_faults_minor,
    );
    let kept = b.kept_small;
    if kept.looks > 0 {
        let share = |count: u64| percent(count as f64 / kept.looks as f64, 1);
        let _ = writeln!(
            out,
            "  {} kept small now; of {} looks since the start {} found one a quarter above what it is meant to use, {} left one above it",
            plural(kept.readers, "reader"),
            kept.looks,
            share(kept.above),
            share(kept.stuck),
        );
    }
    let _ = writeln!(
        out,
        "  {} of at most {} experiments this hour; trials cost {} of lost work today (limit {})",
        b.experiments_last_hour,
        b.experiments_per_hour_max,
        lost_work(b.harm_exposure_day),
        lost_work(b.harm_exposure_per_day_max),
    );
    for o in &b.owners {
        let _ = writeln!(
            out,
            "  of these {}: {} of at most {} experiments, {:.0} of at most {:.0} percent x seconds",
            o.owner,
            o.experiments_last_hour,
            o.experiments_per_hour_max,
            o.harm_exposure_day,
            o.harm_exposure_per_day_max,
        );
    }
    let _ = writeln!(
        out,
        "  placebos accepted by mistake: {} of {}; real tries accepted: {} of {}; level of the next try: {}",
        c.false_accepts,
        c.placebos,
        c.accepts,
        c.tries,
        percent(c.alpha_next, 2),
    );
}

fn heading(title: &str, look: &Look, out: &mut String) {
    let _ = writeln!(out, "\n{}", look.paint(Tone::Heading, title));
}

fn changes(list: &[Change], look: &Look, out: &mut String) {
    if list.is_empty() {
        return;
    }
    heading("In force (proven)", look, out);
    let rows: Vec<Vec<String>> = list
        .iter()
        .map(|c| {
            let off = if c.on { "" } else { " (off for a probe)" };
            vec![
                c.action.to_string(),
                c.workload.to_string(),
                c.effect.as_ref().map_or_else(|| "not measured".into(), effect),
                format!("{}{off}; since {}; {}", c.text, look.ago(c.since_unix), c.guard),
            ]
        })
        .collect();
    out.push_str(&table(&["NO", "WORKLOAD", "GAIN", "WHAT"], &rows, look));
    let _ = writeln!(out, "  take one back: homeostat undo {}", list[0].action);
}

/// One line about a running experiment.
pub fn experiment_line(e: &Experiment) -> String {
    if e.phase == "preparing" {
        return format!(
            "experiment {} ({}): preparing, {} done",
            e.id,
            e.strategy,
            percent(e.prepared, 0)
        );
    }
    let estimate = e.effect.as_ref().map_or_else(|| "no estimate yet".into(), effect);
    format!(
        "experiment {} ({}): block {} {} ({}), {estimate}, evidence {} of {}, {} of at most {}",
        e.id,
        e.strategy,
        e.blocks + 1,
        if e.on { "on" } else { "off" },
        e.phase,
        text::count(e.evidence),
        text::count(e.evidence_needed),
        hours_or_less(e.elapsed_s),
        hours_or_less(e.budget_s),
    )
}

/// What a running trial has cost so far; nothing of a placebo, which changes nothing.
pub(crate) fn price(e: &Experiment) -> Option<String> {
    (e.kind != ExperimentKind::Placebo).then(|| {
        format!(
            "stood still {}, lost work {}, own CPU {}, added memory {}",
            hours_or_less(e.stalled_s),
            hours_or_less(e.lost_work_s),
            hours_or_less(e.own_cpu_s),
            bytes(e.bloat_bytes)
        )
    })
}

fn experiments(list: &[Experiment], look: &Look, out: &mut String) {
    if list.is_empty() {
        return;
    }
    heading("Being tried", look, out);
    for e in list {
        let placebo = if e.kind == ExperimentKind::Placebo {
            " (placebo: changes nothing)"
        } else {
            ""
        };
        out.push_str(&wrap(
            &format!(
                "{}{placebo}: {}",
                all_of(&e.workload, &e.others),
                experiment_line(e)
            ),
            "  ",
            look.width,
        ));
        if let Some(price) = price(e) {
            out.push_str(&wrap(&format!("cost so far: {price}"), "    ", look.width));
        }
    }
}

fn stage_tone(stage: &str) -> Tone {
    match stage {
        "improved" => Tone::Good,
        "trying" | "proposed" => Tone::Busy,
        _ => Tone::Plain,
    }
}

fn workload_rows<'a>(list: impl Iterator<Item = &'a Workload>, look: &Look) -> Vec<Vec<String>> {
    list.map(|w| {
        vec![
            w.name.to_string(),
            look.paint(stage_tone(&w.stage), w.stage_word()),
            format!("{:.2}", w.cpus),
            bytes(w.resident_bytes),
            w.summary.clone(),
        ]
    })
    .collect()
}

fn workloads(s: &Status, all: bool, look: &Look, out: &mut String) {
    heading("Workloads", look, out);
    let idle = |w: &&Workload| matches!(w.stage, Stage::Declined | Stage::Ignored);
    let shown = s.workloads.iter().filter(|w| all || !idle(w));
    let rows = workload_rows(shown, look);
    if rows.is_empty() {
        out.push_str("  none that could be improved at the moment\n");
    } else {
        out.push_str(&table(&["NAME", "STAGE", "CPUS", "MEMORY", "WHY"], &rows, look));
    }
    let hidden = if all {
        0
    } else {
        s.workloads.iter().filter(idle).count()
    };
    if hidden > 0 {
        let _ = writeln!(
            out,
            "  {} with nothing to do: homeostat status --all",
            plural(hidden as u64, "workload")
        );
    }
    if s.workloads_ignored > 0 {
        let _ = writeln!(
            out,
            "  {} too young, too small or too idle to look at",
            plural(u64::from(s.workloads_ignored), "workload")
        );
    }
}

fn outcomes(list: &[Outcome], most: usize, look: &Look, out: &mut String) {
    if list.is_empty() {
        return;
    }
    heading("Latest verdicts", look, out);
    let rows: Vec<Vec<String>> = list
        .iter()
        .take(most)
        .map(|o| {
            vec![
                o.id.to_string(),
                look.ago(o.ended_unix) + " ago",
                first_of(&o.workload, &o.others),
                look.paint(verdict_tone(&o.verdict), &o.verdict),
                o.effect.as_ref().map_or_else(String::new, effect),
                o.reason.clone(),
            ]
        })
        .collect();
    out.push_str(&table(
        &["NO", "WHEN", "WORKLOAD", "VERDICT", "EFFECT", "WHY"],
        &rows,
        look,
    ));
}

/// The limits of a trial's verdict, a sentence each.
pub(crate) fn limits(level: Option<&OffLevel>, not_excluded: &[NotExcluded]) -> Vec<String> {
    let mut lines: Vec<String> = level.iter().map(ToString::to_string).collect();
    lines.extend(
        not_excluded
            .iter()
            .take(LOSSES_MAX)
            .map(|n| format!("Not excluded ({:.0} % confidence): {n}", n.confidence * 100.0)),
    );
    let more = not_excluded.len().saturating_sub(LOSSES_MAX);
    if more > 0 {
        lines.push(format!(
            "… and {} more, not larger; see --json",
            plural(more as u64, "loss")
        ));
    }
    lines
}

pub(crate) fn verdict_tone(verdict: &str) -> Tone {
    match verdict {
        "accepted" => Tone::Good,
        "harmful" => Tone::Bad,
        _ => Tone::Plain,
    }
}

fn advice(list: &[Advice], look: &Look, out: &mut String) {
    if list.is_empty() {
        return;
    }
    heading("What a person could do", look, out);
    for a in list {
        out.push_str(&wrap(&a.finding, "  ", look.width));
        out.push_str(&wrap(&format!("do: {}", a.remedy), "    ", look.width));
        if !a.risk.is_empty() {
            out.push_str(&wrap(&format!("risk: {}", a.risk), "    ", look.width));
        }
        let _ = match a.setting {
            Some(_) => writeln!(out, "    id: {}  (homeostat advice apply)", a.id),
            None => writeln!(out, "    id: {}", a.id),
        };
    }
}

/// `homeostat advice`.
pub fn advice_list(list: &[Advice], muted: &[String], look: &Look) -> String {
    let mut out = String::new();
    if list.is_empty() {
        out.push_str("There is no advice: nothing was found that a person could do and homeostat may not.\n");
    }
    advice(list, look, &mut out);
    if !muted.is_empty() {
        let _ = writeln!(out, "Muted: {}", muted.join(", "));
    }
    out
}

/// `homeostat explain`.
pub fn explanation(e: &Explanation, look: &Look) -> String {
    let w = &e.workload;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} is {}",
        look.paint(Tone::Heading, &w.name),
        look.paint(stage_tone(&w.stage), w.stage_word())
    );
    out.push_str(&wrap(&w.summary, "  ", look.width));
    let pids: Vec<String> = w.pids.iter().take(8).map(ToString::to_string).collect();
    let more = if u64::from(w.processes) > pids.len() as u64 {
        " …"
    } else {
        ""
    };
    let huge = w
        .huge_bytes
        .map_or_else(String::new, |h| format!(", {} of it in large pages", bytes(h)));
    let _ = writeln!(
        out,
        "  {} {}; {} ({}{more}); {} old; {:.2} CPUs; {}{huge}",
        w.kind.replace('_', " "),
        w.program,
        plural(u64::from(w.processes), "process"),
        pids.join(", "),
        hours_or_less(w.age_s),
        w.cpus,
        bytes(w.resident_bytes),
    );
    heading("How its work is counted", look, &mut out);
    match &w.meter {
        Some(m) => {
            let _ = writeln!(
                out,
                "  {}: {} {}/s, noise {}, costs the workload {}{}",
                m.id,
                text::count(m.rate),
                m.unit,
                percent(m.noise, 1),
                percent(m.cost, 2),
                in_turns(m),
            );
            out.push_str(&wrap(
                &format!("judged by {}: {}", m.objective, m.objective_reason),
                "  ",
                look.width,
            ));
        }
        None => out.push_str("  no meter is chosen (yet)\n"),
    }
    for m in &e.meters {
        match &m.refused {
            Some(why) => out.push_str(&wrap(&format!("{}: refused: {why}", m.id), "  ", look.width)),
            None if w.meter.as_ref().is_none_or(|chosen| chosen.id != m.id) => {
                let _ = writeln!(out, "  {}: possible ({})", m.id, m.unit);
            }
            None => {}
        }
    }
    if let Some(p) = &w.proposal {
        heading("What is proposed", look, &mut out);
        proposal(w, p, look, &mut out);
    }
    changes(&e.in_force, look, &mut out);
    experiments(&e.experiments, look, &mut out);
    outcomes(&e.outcomes, OUTCOMES_MAX, look, &mut out);
    for o in e.outcomes.iter().take(OUTCOMES_MAX) {
        for line in limits(o.off_level.as_ref(), &o.not_excluded) {
            out.push_str(&wrap(&format!("{}: {line}", o.id), "  ", look.width));
        }
    }
    advice(&e.advice, look, &mut out);
    heading("What was decided, and why", look, &mut out);
    if e.decisions.is_empty() {
        out.push_str("  nothing yet\n");
    }
    for d in &e.decisions {
        let stage = if is_said_by(&d.stage, &d.text) {
            ""
        } else {
            &format!("{}: ", d.stage)
        };
        let line = format!("{} {stage}{}", time_of_day(d.at_unix), d.text);
        out.push_str(&wrap(&line, "  ", look.width));
    }
    out
}

fn proposal(w: &Workload, p: &homeostat_daemon::api::Proposal, look: &Look, out: &mut String) {
    let _ = writeln!(
        out,
        "  {} ({}, {:.2} CPUs, {}): predicted {}",
        look.paint(Tone::Busy, &p.id),
        w.program,
        w.cpus,
        bytes(w.resident_bytes),
        effect(&p.predicted)
    );
    for line in [
        &p.hypothesis,
        &format!("test: {}", p.design),
        &format!("risk: {}", p.risk),
    ] {
        out.push_str(&wrap(line, "    ", look.width));
    }
}

/// `homeostat plan`. `placement` is what is to be said about places ([`placement`]); empty where there are none.
pub fn plan(p: &Plan, placement: &str, look: &Look) -> String {
    let mut out = String::new();
    for refusal in &p.machine_refusals {
        out.push_str(&wrap(
            &format!("Nothing can be done here: {refusal}"),
            "",
            look.width,
        ));
    }
    let _ = writeln!(out, "{}", look.paint(Tone::Heading, "Would be tried"));
    if p.proposed.is_empty() {
        out.push_str("  nothing\n");
    }
    for w in &p.proposed {
        match &w.proposal {
            Some(proposed) => proposal(w, proposed, look, &mut out),
            None => out.push_str(&wrap(&format!("{}: {}", w.name, w.summary), "  ", look.width)),
        }
    }
    for (title, list) in [
        ("Under way", &p.active),
        ("Not decided yet", &p.undecided),
        ("Nothing to do", &p.declined),
    ] {
        if !list.is_empty() {
            heading(title, look, &mut out);
            let rows = workload_rows(list.iter(), look);
            out.push_str(&table(&["NAME", "STAGE", "CPUS", "MEMORY", "WHY"], &rows, look));
        }
    }
    out.push_str(placement);
    advice(&p.advice, look, &mut out);
    out.push_str(
        "\nNothing was changed. `homeostat run` tries what stands above and keeps only what is proven.\n",
    );
    out
}

/// One line while a rehearsal runs.
pub fn plan_progress(p: &Plan, elapsed: Nanoseconds, length: Nanoseconds) -> String {
    format!(
        "{:.0} of {:.0} s: {} to try, {} being measured, {} with nothing to do",
        elapsed.as_secs_f64(),
        length.as_secs_f64(),
        p.proposed.len(),
        p.undecided.len(),
        p.declined.len()
    )
}

/// `homeostat doctor`.
pub fn diagnosis(d: &Diagnosis, look: &Look) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "Linux {} on {}{}: {}, {}, {} of memory, large pages of {}",
        d.kernel,
        d.cpu_model,
        match d.hypervisor.as_deref() {
            None => String::new(),
            Some("unknown") => " (virtual machine)".into(),
            Some(name) => format!(" (virtual machine: {name})"),
        },
        plural(d.cpus, "CPU"),
        plural(d.nodes, "NUMA node"),
        bytes(d.memory_bytes),
        if d.huge_page_bytes == 0 {
            "no size at all".into()
        } else {
            bytes(d.huge_page_bytes)
        },
    );
    if let Some(switch) = &d.switch {
        heading("Switch", look, &mut out);
        out.push_str(&wrap(&switch.sentence(), "  ", look.width));
    }
    heading("Strategies", look, &mut out);
    for s in &d.strategies {
        let state = match &s.refused {
            None => look.paint(Tone::Good, "can work here"),
            Some(_) => look.paint(Tone::Bad, "can not work here"),
        };
        let _ = writeln!(out, "  {} {state}: {}", s.id, s.summary);
        if let Some(why) = &s.refused {
            out.push_str(&wrap(why, "    ", look.width));
        }
    }
    let rows: Vec<Vec<String>> = d
        .capabilities
        .iter()
        .map(|c| {
            let tone = match c.state {
                CapabilityState::Available => Tone::Good,
                CapabilityState::Missing => Tone::Bad,
                CapabilityState::Limited => Tone::Warn,
            };
            vec![c.id.to_string(), look.paint(tone, &c.state), c.detail.clone()]
        })
        .collect();
    heading("Sensors and effectors", look, &mut out);
    out.push_str(&table(&["NAME", "STATE", "SEEN"], &rows, look));
    let lacks = |c: &&Capability| c.state != CapabilityState::Available;
    let lacking: Vec<_> = d.capabilities.iter().filter(lacks).collect();
    if !lacking.is_empty() {
        heading("What is lost, and what to do", look, &mut out);
        for c in lacking {
            out.push_str(&wrap(
                &format!("{}: {}", c.id, c.cost_of_absence),
                "  ",
                look.width,
            ));
            if !c.remedy.is_empty() {
                out.push_str(&wrap(&format!("do: {}", c.remedy), "    ", look.width));
            }
        }
    }
    out
}

/// A line of the story.
pub fn story(line: &StoryLine, look: &Look) -> String {
    let text = wrap(
        &format!("{} {}", time_of_day(line.at_unix), line.sentence()),
        "",
        look.width,
    );
    if line.warning {
        look.paint(Tone::Warn, text.trim_end()) + "\n"
    } else {
        text
    }
}

#[cfg(test)]
mod tests;
