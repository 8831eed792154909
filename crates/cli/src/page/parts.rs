//! The parts of the report around the experiments.

use super::html::Html;
use super::plot::{self, Series};
use super::{badge, by_hand, effect_text, is_placebo, time, verdict_of};
use crate::render::bytes;
use crate::render::text::{count, hours_or_less, in_turns, percent, plural};
use homeostat_daemon::api::{Change, Explanation, Stage, Status, Workload, is_said_by};
use homeostat_daemon::dossier::{DecisionRecord, Dossier, Window};
use homeostat_daemon::log::date_and_time;
use std::collections::BTreeMap;

/// Workloads that are shown in full.
const WORKLOADS_MAX: usize = 24;
/// Lines of the story.
const STORY_MAX: usize = 150;
/// Points of a curve: more are not to be told apart.
const POINTS_MAX: usize = 240;

/// Title, what came of it, and the figures.
pub(super) fn head(h: &mut Html, d: &Dossier) {
    h.element("header", &[], |h| {
        h.leaf(
            "p",
            &[("class", "eyebrow")],
            &format!("homeostat report \u{b7} {}", date_and_time(d.at_unix)),
        );
        h.leaf("h1", &[], &headline(d));
        let machine = d
            .status
            .as_ref()
            .map(|s| s.machine.as_str())
            .or_else(|| d.experiments.first().map(|t| t.past.machine.as_str()));
        if let Some(machine) = machine {
            h.leaf("p", &[("class", "lead")], &machine.replace(" | ", " \u{b7} "));
        }
        for note in &d.notes {
            h.leaf("p", &[("class", "soft small")], note);
        }
        figures(h, d);
    });
}

fn headline(d: &Dossier) -> String {
    let accepted: Vec<_> = d
        .experiments
        .iter()
        .filter(|t| verdict_of(t) == "accepted")
        .collect();
    let gain = |name: &str, e: &homeostat_daemon::api::Effect| {
        e.estimate.map(|g| {
            let more = if g < 0.0 { "less" } else { "more" };
            format!(
                "{name} does {:.0} % {more} work, proven on this machine",
                g.abs() * 100.0
            )
        })
    };
    if let Some(s) = &d.status {
        return match s.in_force.as_slice() {
            [] if !s.experiments.is_empty() => match s.experiments.as_slice() {
                [one] => format!("A change is being tried on {}", one.workload),
                many => format!("{} changes are being tried", many.len()),
            },
            [] if d.experiments.is_empty() && s.outcomes.is_empty() => {
                format!(
                    "{} looked at, nothing tried yet",
                    plural(s.workloads.len() as u64, "workload")
                )
            }
            [] => "Nothing is in force: no gain is proven at the moment".to_owned(),
            [one] => one
                .effect
                .as_ref()
                .and_then(|e| gain(&one.workload, e))
                .unwrap_or_else(|| "One change is in force".to_owned()),
            many => format!("{} proven changes are in force", many.len()),
        };
    }
    match accepted.as_slice() {
        [] if d.experiments.is_empty() => "Nothing was tried yet".to_owned(),
        [] => format!(
            "{}, and no gain proven",
            plural(d.experiments.len() as u64, "experiment")
        ),
        [one] => one
            .past
            .effect
            .as_ref()
            .and_then(|e| gain(&one.past.workload, e))
            .unwrap_or_else(|| "One gain was proven".to_owned()),
        many => format!("{} gains were proven", many.len()),
    }
}

fn figures(h: &mut Html, d: &Dossier) {
    let real: Vec<_> = super::ended(d).into_iter().filter(|t| !is_placebo(t)).collect();
    let number = |verdict: &str| real.iter().filter(|t| verdict_of(t) == verdict).count();
    let mut facts: Vec<(&str, String, String)> = Vec::new();
    let verdicts: Vec<String> = [
        "accepted",
        "rejected",
        "harmful",
        "inconclusive",
        "aborted",
        "unfinished",
    ]
    .into_iter()
    .filter_map(|v| Some(number(v)).filter(|n| *n > 0).map(|n| format!("{n} {v}")))
    .collect();
    facts.push(("tried", real.len().to_string(), verdicts.join(", ")));
    if let Some(s) = &d.status {
        let said = if s.experiments.is_empty() {
            "nothing is being tried now".to_owned()
        } else {
            format!("{} being tried now", s.experiments.len())
        };
        facts.push(("in force", s.in_force.len().to_string(), said));
        facts.push((
            "own cost",
            percent(s.budget.own_cpu, 2),
            format!("of one CPU, and {} of memory", bytes(s.budget.own_resident_bytes)),
        ));
    } else {
        facts.push((
            "in force",
            "\u{2013}".into(),
            "no daemon runs: it undoes everything when it stops".into(),
        ));
    }
    let running = || d.status.iter().flat_map(|s| &s.experiments);
    let stalled =
        real.iter().map(|t| t.past.stalled_s).sum::<f64>() + running().map(|e| e.stalled_s).sum::<f64>();
    let lost = real.iter().filter_map(|t| t.past.harm_exposure).sum::<f64>() / 100.0
        + running().map(|e| e.lost_work_s).sum::<f64>();
    facts.push((
        "price of the trials",
        time(stalled),
        format!(
            "of standstill, and {} of lost work, with the trials that run",
            time(lost)
        ),
    ));
    let (placebos, wrong) = match &d.status {
        Some(s) => (
            u64::from(s.calibration.placebos),
            u64::from(s.calibration.false_accepts),
        ),
        None => {
            let judged = || {
                d.experiments
                    .iter()
                    .filter(|t| is_placebo(t) && !matches!(verdict_of(t), "aborted" | "unfinished"))
            };
            (
                judged().count() as u64,
                judged().filter(|t| verdict_of(t) == "accepted").count() as u64,
            )
        }
    };
    facts.push((
        "placebos accepted",
        format!("{wrong} of {placebos}"),
        "trials in which nothing was changed".into(),
    ));
    h.element("dl", &[("class", "figures")], |h| {
        for (name, value, more) in &facts {
            h.element("div", &[], |h| {
                h.leaf("dt", &[], name);
                h.element("dd", &[], |h| {
                    h.text(value);
                    h.leaf("small", &[], more);
                });
            });
        }
    });
}

/// The changes in force.
pub(super) fn in_force(h: &mut Html, s: &Status, d: &Dossier) {
    if s.in_force.is_empty() {
        return;
    }
    h.element("section", &[], |h| {
        h.leaf("h2", &[], "In force");
        h.leaf("p", &[("class", "intro")], "Proven, and watched: the guard switches each off now and then to see whether the gain is still there.");
        for c in &s.in_force {
            h.element("article", &[], |h| change(h, c, d));
        }
    });
}

fn change(h: &mut Html, c: &Change, d: &Dossier) {
    h.element("header", &[], |h| {
        h.leaf("h3", &[], &c.workload);
        h.leaf(
            "span",
            &[("class", "badge good")],
            if c.on { "in force" } else { "off for a probe" },
        );
        let title = by_hand::of(&c.strategy).map_or_else(|| c.strategy.to_string(), |w| w.title.to_owned());
        h.leaf("span", &[("class", "soft")], &title);
        let gain = c
            .effect
            .as_ref()
            .map_or_else(|| "not measured".to_owned(), effect_text);
        h.leaf("span", &[("class", "effect")], &gain);
    });
    h.leaf("p", &[], &c.text);
    h.leaf(
        "p",
        &[("class", "soft")],
        &format!("Since {}. Guard: {}.", date_and_time(c.since_unix), c.guard),
    );
    h.element("p", &[("class", "small")], |h| {
        h.text("Take it back: ");
        h.leaf("code", &[], &format!("homeostat undo {}", c.action));
        if let Some(t) = d.experiments.iter().find(|t| t.action == c.action) {
            h.text(" \u{b7} evidence: ");
            h.leaf(
                "a",
                &[("href", &format!("#e{}", t.past.id))],
                &format!("experiment {}", t.past.id),
            );
        }
    });
}

/// The workloads with what is known of them.
pub(super) fn found(h: &mut Html, d: &Dossier) {
    let mut seen: BTreeMap<&str, Vec<&Window>> = BTreeMap::new();
    for w in &d.windows {
        seen.entry(&w.workload).or_default().push(w);
    }
    h.element("section", &[], |h| {
        h.leaf("h2", &[], "What was found");
        match &d.status {
            Some(s) => {
                h.leaf(
                    "p",
                    &[("class", "intro")],
                    &format!(
                        "{} looked at; {} too young, too small or too idle.",
                        plural(
                            s.workloads.iter().filter(|w| w.stage != Stage::Ignored).count() as u64,
                            "workload"
                        ),
                        s.workloads_ignored as usize
                            + s.workloads.iter().filter(|w| w.stage == Stage::Ignored).count()
                    ),
                );
                if !s.machine_refusals.is_empty() {
                    h.element("details", &[], |h| {
                        h.leaf("summary", &[], "What can not be done on this machine, and why");
                        h.element("ul", &[("class", "small")], |h| {
                            for refusal in &s.machine_refusals {
                                h.leaf("li", &[], refusal);
                            }
                        });
                    });
                }
                h.open("div", &[("class", "stack")]);
                for w in s
                    .workloads
                    .iter()
                    .filter(|w| w.stage != Stage::Ignored)
                    .take(WORKLOADS_MAX)
                {
                    let explanation = d.explanations.iter().find(|e| e.workload.name == w.name);
                    let windows = seen.get(w.name.as_str()).map_or(&[][..], Vec::as_slice);
                    h.element("article", &[], |h| workload(h, w, explanation, windows, d));
                }
                h.close("div");
            }
            None if seen.is_empty() => {
                h.leaf(
                    "p",
                    &[("class", "intro")],
                    "No workload was observed for long enough to be remembered.",
                );
            }
            None => {
                h.leaf(
                    "p",
                    &[("class", "intro")],
                    "As remembered: no daemon runs that could say how it is now.",
                );
                for (name, windows) in seen.iter().rev().take(WORKLOADS_MAX) {
                    h.element("article", &[], |h| remembered(h, name, windows, d));
                }
            }
        }
    });
}

fn workload(h: &mut Html, w: &Workload, explanation: Option<&Explanation>, windows: &[&Window], d: &Dossier) {
    h.element("header", &[], |h| {
        h.leaf("h3", &[], &w.name);
        badge(h, w.stage_word());
    });
    h.leaf("p", &[], &w.summary);
    let huge = w
        .huge_bytes
        .map_or_else(String::new, |b| format!(", {} of it in large pages", bytes(b)));
    h.leaf(
        "p",
        &[("class", "soft small")],
        &format!(
            "{} {} \u{b7} {} \u{b7} {:.2} CPUs \u{b7} {}{huge} \u{b7} {} old",
            w.kind.replace('_', " "),
            w.program,
            plural(u64::from(w.processes), "process"),
            w.cpus,
            bytes(w.resident_bytes),
            hours_or_less(w.age_s),
        ),
    );
    if let Some(m) = &w.meter {
        h.leaf(
            "p",
            &[("class", "soft small")],
            &format!(
                "Work is counted by {}: {} {} per second, noise {}{}; judged by {}, because {}.",
                m.id,
                count(m.rate),
                m.unit,
                percent(m.noise, 1),
                in_turns(m),
                m.objective,
                m.objective_reason.trim_start_matches("because "),
            ),
        );
    }
    curves(h, windows, d);
    let refused: Vec<_> = explanation
        .iter()
        .flat_map(|e| &e.meters)
        .filter_map(|m| Some((m.id.as_str(), m.refused.as_deref()?)))
        .collect();
    if !refused.is_empty() {
        h.element("details", &[], |h| {
            h.leaf(
                "summary",
                &[],
                &format!("Meters that could not be used ({})", refused.len()),
            );
            h.element("ul", &[("class", "small")], |h| {
                for (id, why) in refused {
                    h.leaf("li", &[], &format!("{id}: {why}"));
                }
            });
        });
    }
}

fn remembered(h: &mut Html, name: &str, windows: &[&Window], d: &Dossier) {
    h.element("header", &[], |h| {
        h.leaf("h3", &[], name);
        if let Some(last) = d
            .decisions
            .iter()
            .rev()
            .find(|t| t.workload.as_deref() == Some(name))
        {
            badge(h, &last.stage);
        }
    });
    if let Some(last) = d
        .decisions
        .iter()
        .rev()
        .find(|t| t.workload.as_deref() == Some(name))
    {
        h.leaf("p", &[], &last.text);
    }
    if let Some(w) = windows.last() {
        let huge = w
            .huge_bytes
            .map_or_else(String::new, |b| format!(", {} of it in large pages", bytes(b)));
        h.leaf(
            "p",
            &[("class", "soft small")],
            &format!(
                "last seen {}: {:.2} CPUs, {}{huge}",
                date_and_time(w.started_unix),
                w.cpus,
                bytes(w.resident_bytes)
            ),
        );
    }
    curves(h, windows, d);
}

/// Work, processors and page sizes over time, where windows of observation are remembered.
fn curves(h: &mut Html, windows: &[&Window], d: &Dossier) {
    if windows.len() < 3 {
        return;
    }
    let step = windows.len().div_ceil(POINTS_MAX);
    let kept: Vec<&Window> = windows.iter().step_by(step).copied().collect();
    let end = |w: &Window| w.started_unix as f64 + w.length_s;
    let name = kept[0].workload.as_str();
    let trials: Vec<(f64, f64)> = d
        .experiments
        .iter()
        .filter(|t| *t.past.workload == *name || t.past.others.iter().any(|o| **o == *name))
        .map(|t| {
            let from = t.past.started_unix as f64;
            (from, (t.past.ended_unix as f64).max(from))
        })
        .collect();
    let work: Vec<(f64, f64)> = kept.iter().filter_map(|w| Some((end(w), w.rate?))).collect();
    let huge: Vec<(f64, f64)> = kept
        .iter()
        .filter_map(|w| Some((end(w), w.huge_bytes? as f64)))
        .collect();
    let resident = kept.iter().map(|w| (end(w), w.resident_bytes as f64)).collect();
    let cpus = kept.iter().map(|w| (end(w), w.cpus)).collect();
    h.element("div", &[("class", "plots")], |h| {
        if work.len() >= 3 {
            h.element("figure", &[], |h| {
                h.leaf("h4", &[], "Work per second");
                plot::over_time(
                    h,
                    "Work per second over time",
                    &[Series {
                        class: "on",
                        filled: true,
                        points: work,
                    }],
                    &trials,
                    count,
                );
                h.leaf(
                    "figcaption",
                    &[],
                    "As its meter counted it; shaded: while something was tried.",
                );
            });
        }
        h.element("figure", &[], |h| {
            h.leaf("h4", &[], "Memory by page size");
            let series = [
                Series {
                    class: "off",
                    filled: false,
                    points: resident,
                },
                Series {
                    class: "on",
                    filled: true,
                    points: huge,
                },
            ];
            plot::over_time(
                h,
                "Resident memory and its part in large pages over time",
                &series,
                &trials,
                |v| bytes(v as u64),
            );
            h.leaf(
                "figcaption",
                &[],
                "Grey: resident. Filled: in large pages, where it was looked at.",
            );
        });
        h.element("figure", &[], |h| {
            h.leaf("h4", &[], "CPUs");
            plot::over_time(
                h,
                "CPUs used over time",
                &[Series {
                    class: "off",
                    filled: false,
                    points: cpus,
                }],
                &trials,
                |v| {
                    format!("{v:.2}")
                        .trim_end_matches('0')
                        .trim_end_matches('.')
                        .to_owned()
                },
            );
            h.leaf("figcaption", &[], "CPUs used.");
        });
    });
}

/// What a person could do, and what waits for one.
pub(super) fn advice(h: &mut Html, d: &Dossier) {
    let Some(s) = &d.status else { return };
    let proposals: Vec<_> = s
        .workloads
        .iter()
        .filter_map(|w| Some((w, w.proposal.as_ref()?)))
        .collect();
    if s.advice.is_empty() && proposals.is_empty() {
        return;
    }
    h.element("section", &[], |h| {
        h.leaf("h2", &[], "What a person could do");
        h.leaf(
            "p",
            &[("class", "intro")],
            "What homeostat found and may not do by itself, and what it is about to try.",
        );
        for a in &s.advice {
            h.element("article", &[], |h| {
                h.element("header", &[], |h| {
                    h.leaf("h3", &[], a.workload.as_deref().unwrap_or("this machine"));
                    h.leaf("span", &[("class", "soft small")], &a.id);
                });
                h.leaf("p", &[], &a.finding);
                labelled(h, "Do", &a.remedy);
                labelled(h, "Risk", &a.risk);
            });
        }
        for (w, p) in proposals {
            h.element("article", &[], |h| {
                h.element("header", &[], |h| {
                    h.leaf("h3", &[], &w.name);
                    badge(h, "proposed");
                    h.leaf(
                        "span",
                        &[("class", "effect")],
                        &format!("predicted {}", effect_text(&p.predicted)),
                    );
                });
                h.leaf("p", &[], &p.hypothesis);
                labelled(h, "Test", &p.design);
                labelled(h, "Risk", &p.risk);
            });
        }
    });
}

fn labelled(h: &mut Html, label: &str, text: &str) {
    if text.is_empty() {
        return;
    }
    h.element("p", &[("class", "small")], |h| {
        h.leaf("b", &[], label);
        h.text(": ");
        h.text(text);
    });
}

/// The decisions in the order in which they were made.
pub(super) fn story(h: &mut Html, d: &Dossier) {
    let live = || {
        d.story
            .iter()
            .map(|l| DecisionRecord {
                at_unix: l.at_unix,
                workload: l.workload.as_deref().map(Into::into),
                stage: l.stage.clone(),
                text: l.text.clone(),
            })
            .collect::<Vec<_>>()
    };
    let told = if d.decisions.is_empty() {
        live()
    } else {
        d.decisions.clone()
    };
    if told.is_empty() {
        return;
    }
    let skipped = told.len().saturating_sub(STORY_MAX);
    h.element("section", &[], |h| {
        h.leaf("h2", &[], "How it came about");
        h.leaf(
            "p",
            &[("class", "intro")],
            "Every decision with its reason, oldest first.",
        );
        if skipped > 0 {
            h.leaf(
                "p",
                &[("class", "soft small")],
                &format!("{skipped} earlier ones are left out."),
            );
        }
        h.element("ol", &[("class", "story")], |h| {
            for t in told.iter().skip(skipped) {
                h.element("li", &[("class", &t.stage)], |h| {
                    h.leaf("time", &[], &date_and_time(t.at_unix));
                    if let Some(workload) = &t.workload {
                        h.leaf("b", &[], workload);
                        if is_said_by(&t.stage, &t.text) {
                            h.text(" ");
                        } else {
                            h.text(&format!(" {}: ", t.stage));
                        }
                    }
                    h.text(&t.text);
                });
            }
        });
    });
}

/// How to read it, and the way back from everything.
pub(super) fn reading(h: &mut Html, d: &Dossier) {
    h.element("section", &[], |h| {
        h.leaf("h2", &[], "How to read this");
        for text in [
            "A change is switched on and off in blocks whose order coins decide; the coin is on disk before its block begins. \
             Load that drifts or jumps can not take sides with a coin.",
            "The evidence is an e-value: a bet against \u{201c}the change does nothing\u{201d} that may be looked at after every block. \
             It has to reach one divided by the level of the test; the level falls with every try, so that few accepts in all \
             are false.",
            "The interval holds the true effect with the confidence given in it at all times, not only at the end. At an \
             acceptance the estimate is a little too high, because the trial ended when it looked good: count on the lower end.",
            "A gain is one of this machine and this load. The guard looks again for as long as the change is in force.",
        ] {
            h.leaf("p", &[], text);
        }
        h.leaf("h4", &[], "Take everything back");
        h.leaf("pre", &[], "homeostat undo --all      # the daemon runs on\nhomeostat restore         # the daemon is dead");
    });
    h.element("footer", &[], |h| {
        h.text(&format!(
            "Made by homeostat {} on {}, from {}. This file loads nothing and runs nothing; it holds names of programs and \
             units of this machine.",
            d.version,
            date_and_time(d.at_unix),
            if d.status.is_some() { "the running daemon and its history" } else { "the history alone" }
        ));
    });
}
