//! The report: one HTML file that needs nothing else. No script, no picture, no font from anywhere; its own policy
//! (`Content-Security-Policy`) forbids the browser to load anything at all.
//!
//! The order is that of a reader with little time: what came of it, what was tried with its evidence, what was found,
//! what a person could do, how it came about, how to read it.

mod by_hand;
mod html;
mod parts;
mod plot;

use crate::render::text::all_of;
use crate::render::text::{count, effect, hours_or_less, percent, plural};
use homeostat_daemon::api::{Effect, ExperimentKind, Status};
use homeostat_daemon::dossier::{Dossier, Tried};
use homeostat_daemon::log::date_and_time;
use html::Html;
use plot::Span;

const STYLE: &str = include_str!("style.css");
/// Nothing is loaded, nothing runs.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";
/// Experiments that are shown in full; the others are rows of the overview.
const FULL_MAX: usize = 40;
/// Blocks in the table of one experiment.
const BLOCK_ROWS_MAX: usize = 400;

/// The page.
pub fn page(d: &Dossier) -> String {
    let mut h = Html::default();
    let title = format!("homeostat report of {}", date_and_time(d.at_unix));
    h.constant("<!doctype html>\n");
    h.element("html", &[("lang", "en")], |h| {
        h.element("head", &[], |h| {
            h.open("meta", &[("charset", "utf-8")]);
            h.open(
                "meta",
                &[("http-equiv", "Content-Security-Policy"), ("content", POLICY)],
            );
            h.open(
                "meta",
                &[
                    ("name", "viewport"),
                    ("content", "width=device-width, initial-scale=1"),
                ],
            );
            h.open("meta", &[("name", "color-scheme"), ("content", "light dark")]);
            h.open(
                "meta",
                &[
                    ("name", "generator"),
                    ("content", &format!("homeostat {}", d.version)),
                ],
            );
            h.leaf("title", &[], &title);
            h.element("style", &[], |h| {
                h.constant(STYLE);
            });
        });
        h.constant("\n");
        h.element("body", &[], |h| {
            h.element("main", &[], |h| body(h, d));
        });
    });
    h.constant("\n");
    h.finish()
}

fn body(h: &mut Html, d: &Dossier) {
    parts::head(h, d);
    if let Some(status) = &d.status {
        parts::in_force(h, status, d);
        running(h, status);
    }
    tried(h, d);
    parts::found(h, d);
    parts::advice(h, d);
    parts::story(h, d);
    parts::reading(h, d);
}

/// The class of a verdict in the style sheet.
fn tone(verdict: &str) -> &'static str {
    match verdict {
        "accepted" | "improved" => "good",
        "harmful" => "bad",
        "inconclusive" | "aborted" | "unfinished" => "doubt",
        _ => "plain",
    }
}

fn badge(h: &mut Html, word: &str) {
    let class = format!("badge {}", tone(word));
    h.leaf("span", &[("class", &class)], word);
}

/// An estimate in percent; `None` while there is none.
fn span(e: &Effect) -> Option<Span> {
    Some(Span {
        estimate: e.estimate? * 100.0,
        lower: e.lower.map(|l| l * 100.0),
        upper: e.upper.map(|u| u * 100.0),
    })
}

/// `+13.6 to +45.2 %` with a minus as printers have it.
fn effect_text(e: &Effect) -> String {
    effect(e).replace('-', "\u{2212}")
}

fn is_placebo(t: &Tried) -> bool {
    t.past.kind == ExperimentKind::Placebo
}

fn verdict_of(t: &Tried) -> &str {
    t.past.verdict.as_deref().unwrap_or("unfinished")
}

/// What is being tried now.
fn running(h: &mut Html, status: &Status) {
    if status.experiments.is_empty() {
        return;
    }
    h.element("section", &[], |h| {
        h.leaf("h2", &[], "Being tried now");
        for e in &status.experiments {
            h.element("article", &[], |h| {
                h.element("header", &[], |h| {
                    h.leaf("h3", &[], &all_of(&e.workload, &e.others));
                    badge(h, "trying");
                    h.leaf(
                        "span",
                        &[("class", "soft")],
                        &format!("{}, experiment {}", e.strategy, e.id),
                    );
                    if let Some(effect) = &e.effect {
                        h.leaf("span", &[("class", "effect")], &effect_text(effect));
                    }
                });
                h.leaf("p", &[("class", "soft")], &crate::render::experiment_line(e));
                if let Some(price) = crate::render::price(e) {
                    h.leaf("p", &[("class", "soft")], &format!("Cost so far: {price}"));
                }
                let dots = dots(e.latest.iter().map(|b| (b.on, b.broken, b.score)));
                let known: Vec<(Option<Span>, f64)> =
                    e.latest.iter().map(|b| (span(&b.effect), b.evidence)).collect();
                plots(h, &dots, &known, e.evidence_needed);
            });
        }
    });
}

/// Percent against the mean of the off blocks, from scores in logarithms.
fn dots(blocks: impl Iterator<Item = (bool, bool, Option<f64>)> + Clone) -> Vec<plot::Dot> {
    let off: Vec<f64> = blocks
        .clone()
        .filter(|(on, broken, _)| !on && !broken)
        .filter_map(|b| b.2)
        .collect();
    let all: Vec<f64> = blocks.clone().filter_map(|b| b.2).collect();
    let base = if off.is_empty() { &all } else { &off };
    let mean = base.iter().sum::<f64>() / base.len().max(1) as f64;
    blocks
        .map(|(on, broken, score)| plot::Dot {
            on,
            broken,
            percent: score
                .map(|s| ((s - mean).exp() - 1.0) * 100.0)
                .filter(|p| p.is_finite()),
        })
        .collect()
}

/// The plots of one trial: its blocks, and, where it is known, the estimate and the evidence after each.
fn plots(h: &mut Html, dots: &[plot::Dot], known: &[(Option<Span>, f64)], needed: f64) {
    if dots.is_empty() {
        return;
    }
    h.element("div", &[("class", "plots")], |h| {
        h.element("figure", &[], |h| {
            h.leaf("h4", &[], "Work in each block");
            plot::blocks(h, "Work in each block, in percent of the mean of the off blocks", dots);
            h.leaf(
                "figcaption",
                &[],
                "Percent against the mean of the off blocks. A coin decided which blocks were on.",
            );
        });
        let spans: Vec<Span> = known.iter().filter_map(|k| k.0).collect();
        if spans.len() >= 2 && spans.len() == known.len() {
            h.element("figure", &[], |h| {
                h.leaf("h4", &[], "What was known after each block");
                plot::estimate(h, "Estimate and interval of the effect after each block, in percent", &spans);
                h.leaf("figcaption", &[], "Estimate and interval. An interval clear of zero is not yet a proof.");
            });
            h.element("figure", &[], |h| {
                h.leaf("h4", &[], "Evidence for a gain");
                let values: Vec<f64> = known.iter().map(|k| k.1).collect();
                plot::evidence(h, "Evidence for a gain after each block, logarithmic", &values, needed);
                h.leaf(
                    "figcaption",
                    &[],
                    "An e-value: under \u{201c}no effect\u{201d} the chance that it ever gets this high is at most one in that number.",
                );
            });
        }
    });
}

/// What was tried: all intervals under each other, then each experiment with its receipts.
fn tried(h: &mut Html, d: &Dossier) {
    h.element("section", &[("id", "tried")], |h| {
        h.leaf("h2", &[], "What was tried");
        let all = ended(d);
        if all.is_empty() {
            h.leaf("p", &[("class", "intro")], "No experiment has ended yet: what was found so far stands below.");
            return;
        }
        h.leaf(
            "p",
            &[("class", "intro")],
            "Every change is switched on and off in random order while the program runs. It stays only if a test that may be \
             looked at any time proves a gain; otherwise it is undone.",
        );
        forest(h, &all);
        let (full, rest) = all.split_at(all.len().min(FULL_MAX));
        h.element("div", &[("class", "legend")], |h| {
            for (class, sign, text) in [
                ("k-on", "\u{25cf}", "block with the change on"),
                ("k-off", "\u{25cb}", "block with the machine as it was"),
                ("k-bad", "\u{2715}", "on block cut short by the circuit breaker"),
            ] {
                h.element("span", &[], |h| {
                    h.leaf("i", &[("class", class)], sign);
                    h.text(text);
                });
            }
        });
        h.open("div", &[("class", "stack")]);
        for t in full {
            experiment(h, t);
        }
        h.close("div");
        if !rest.is_empty() {
            let text = format!(
                "{} more in the overview above: homeostat history --blocks NUMBER shows each.",
                plural(rest.len() as u64, "experiment")
            );
            h.leaf("p", &[("class", "soft")], &text);
        }
    });
}

/// The experiments that do not run at the moment.
fn ended(d: &Dossier) -> Vec<&Tried> {
    let runs = |id| d.status.iter().any(|s| s.experiments.iter().any(|e| e.id == id));
    d.experiments.iter().filter(|t| !runs(t.past.id)).collect()
}

/// A length of time, or that there was none.
fn time(seconds: f64) -> String {
    if seconds > 0.0 {
        hours_or_less(seconds)
    } else {
        "none".to_owned()
    }
}

fn forest(h: &mut Html, all: &[&Tried]) {
    let spans: Vec<Span> = all
        .iter()
        .filter_map(|t| t.past.effect.as_ref().and_then(span))
        .collect();
    let axis = plot::shared_axis(&spans);
    h.element("div", &[("class", "forest")], |h| {
        for (i, t) in all.iter().enumerate() {
            let e = &t.past;
            let link = if i < FULL_MAX {
                format!("#e{}", e.id)
            } else {
                "#tried".to_owned()
            };
            h.element("a", &[("class", "row"), ("href", &link)], |h| {
                h.element("span", &[], |h| {
                    h.leaf("b", &[], &all_of(&e.workload, &e.others));
                    h.text(" ");
                    h.leaf("span", &[("class", "soft small")], &what(t));
                });
                h.element("span", &[("class", "bar-cell")], |h| {
                    match e.effect.as_ref().and_then(span) {
                        Some(s) => {
                            plot::interval(h, "Effect with its interval", s, axis, tone(verdict_of(t)))
                        }
                        None => {
                            h.leaf("span", &[("class", "soft small")], "not measured");
                        }
                    }
                });
                h.element("span", &[("class", "num")], |h| {
                    badge(h, verdict_of(t));
                    h.open("br", &[]);
                    let text = e.effect.as_ref().map_or_else(String::new, effect_text);
                    h.leaf("span", &[("class", "small")], &text);
                });
            });
        }
    });
}

/// What was tried, in two words.
fn what(t: &Tried) -> String {
    if is_placebo(t) {
        "placebo: nothing was changed".to_owned()
    } else {
        by_hand::of(&t.past.strategy).map_or_else(|| t.past.strategy.to_string(), |w| w.title.to_owned())
    }
}

fn experiment(h: &mut Html, t: &Tried) {
    let e = &t.past;
    h.element("article", &[("id", &format!("e{}", e.id))], |h| {
        h.element("header", &[], |h| {
            h.leaf("h3", &[], &all_of(&e.workload, &e.others));
            badge(h, verdict_of(t));
            h.leaf(
                "span",
                &[("class", "soft")],
                &format!("{}, experiment {}", what(t), e.id),
            );
            if let Some(effect) = &e.effect {
                let text = format!("{} {}", effect_text(effect), in_words(&e.objective));
                h.leaf("span", &[("class", "effect")], text.trim_end());
            }
        });
        let why = format!("{}: {}", verdict_of(t), e.reason);
        h.leaf("p", &[], why.trim_end_matches([':', ' ']));
        h.element("p", &[("class", "soft")], |h| {
            h.text("Why it was tried: ");
            h.text(&e.hypothesis);
        });
        let dots = dots(e.blocks.iter().map(|b| (b.on, b.broken, b.score)));
        let known: Vec<(Option<Span>, f64)> = t
            .trace
            .iter()
            .flatten()
            .map(|k| (span(&k.effect), k.evidence))
            .collect();
        plots(h, &dots, &known, 1.0 / e.alpha.max(1e-12));
        receipts(h, t);
        members(h, t);
        block_table(h, t);
        if !is_placebo(t) {
            way_by_hand(h, t);
        }
    });
}

fn in_words(objective: &str) -> &str {
    match objective {
        "CPU seconds per unit of work" => "work per CPU second",
        other => other,
    }
}

/// What the verdict rests on.
fn receipts(h: &mut Html, t: &Tried) {
    let e = &t.past;
    let on = e.blocks.iter().filter(|b| b.on).count();
    let mut facts: Vec<(&str, String)> = vec![
        (
            "evidence",
            format!(
                "{} of {} needed",
                e.evidence.map_or_else(|| "?".into(), count),
                count(1.0 / e.alpha.max(1e-12))
            ),
        ),
        (
            "level of the test",
            format!("{} chance of a false accept", percent(e.alpha, 2)),
        ),
        (
            "blocks",
            format!("{}: {on} on, {} off", e.blocks.len(), e.blocks.len() - on),
        ),
        (
            "each block",
            format!(
                "{} measured after {} of washout",
                hours_or_less(e.measured_s),
                hours_or_less(e.washout_s)
            ),
        ),
        ("work counted by", e.meter.to_string()),
        ("judged by", in_words(&e.objective).to_owned()),
        ("predicted", effect_text(&e.predicted)),
        ("began", date_and_time(e.started_unix)),
    ];
    if e.ended_unix > e.started_unix {
        facts.push(("took", hours_or_less((e.ended_unix - e.started_unix) as f64)));
    }
    for s in &e.spans {
        facts.push(("worked at once", s.text.clone()));
    }
    for m in &e.meanings {
        facts.push(("its unit of work", m.text.clone()));
    }
    for line in crate::render::limits(e.off_level.as_ref(), &e.not_excluded) {
        facts.push(("limits", line));
    }
    facts.push(("work stood still", time(e.stalled_s)));
    facts.push(("memory added", crate::render::bytes(e.bloat_bytes)));
    if let Some(harm) = e.harm_exposure {
        facts.push(("lost work", time(harm / 100.0)));
    }
    facts.push(("seed of the coins", format!("{:016x}", e.seed)));
    h.element("dl", &[("class", "receipt")], |h| {
        for (name, value) in &facts {
            h.element("div", &[], |h| {
                h.leaf("dt", &[], name);
                h.leaf("dd", &[], value);
            });
        }
        if !e.blocks.is_empty() {
            h.element("div", &[("class", "wide")], |h| {
                h.leaf("dt", &[], "the coins, in order: \u{25cf} on, \u{25cb} off");
                let coins: String = e
                    .blocks
                    .iter()
                    .take(BLOCK_ROWS_MAX)
                    .map(|b| if b.on { '\u{25cf}' } else { '\u{25cb}' })
                    .collect();
                h.leaf("dd", &[("class", "coins")], &coins);
            });
        }
        h.element("div", &[("class", "wide")], |h| {
            h.leaf("dt", &[], "checked");
            let text = match (&t.trace, e.kind.as_str()) {
                (Some(trace), _) => format!(
                    "The verdict follows from the blocks: computed again for this page, the evidence after block {} is {}, \
                     as recorded.",
                    trace.len(),
                    e.evidence.map_or_else(|| "?".into(), count)
                ),
                (None, "staged_rollout") => {
                    "A change that cannot be switched back cheaply is made in stages; a coin decided when each began.".to_owned()
                }
                (None, _) if e.verdict.is_none() => "It has no verdict: it still ran, or the daemon died in it.".to_owned(),
                (None, _) => "The way to this verdict could not be computed again from what is recorded.".to_owned(),
            };
            h.leaf("dd", &[], &text);
        });
    });
}

fn members(h: &mut Html, t: &Tried) {
    if t.members.is_empty() {
        return;
    }
    h.element("div", &[("class", "scroll")], |h| {
        h.element("table", &[], |h| {
            head_row(
                h,
                &[
                    ("workload of the joint change", false),
                    ("by itself", true),
                    ("remembered as", false),
                ],
            );
            for m in &t.members {
                h.element("tr", &[], |h| {
                    h.leaf("td", &[], &m.workload);
                    h.leaf(
                        "td",
                        &[("class", "n")],
                        &m.effect.as_ref().map_or_else(|| "?".into(), effect_text),
                    );
                    h.leaf("td", &[], &m.verdict);
                });
            }
        });
    });
}

fn head_row(h: &mut Html, titles: &[(&str, bool)]) {
    h.element("tr", &[], |h| {
        for (title, number) in titles {
            h.leaf("th", &[("class", if *number { "n" } else { "" })], title);
        }
    });
}

fn block_table(h: &mut Html, t: &Tried) {
    let blocks = &t.past.blocks;
    if blocks.is_empty() {
        return;
    }
    h.element("details", &[], |h| {
        h.leaf("summary", &[], &format!("Every block ({})", blocks.len()));
        h.element("div", &[("class", "scroll")], |h| {
            h.element("table", &[], |h| {
                head_row(
                    h,
                    &[
                        ("block", true),
                        ("arm", false),
                        ("seconds", true),
                        ("work", true),
                        ("per second", true),
                        ("CPU s", true),
                        ("score", true),
                    ],
                );
                for b in blocks.iter().take(BLOCK_ROWS_MAX) {
                    h.element("tr", &[], |h| {
                        let cell = |h: &mut Html, text: &str| {
                            h.leaf("td", &[("class", "n")], text);
                        };
                        cell(h, &(b.index + 1).to_string());
                        let arm = match (b.on, b.broken) {
                            (_, true) => "\u{2715} cut short",
                            (true, _) => "\u{25cf} on",
                            (false, _) => "\u{25cb} off",
                        };
                        h.leaf("td", &[], arm);
                        cell(h, &format!("{:.1}", b.measured_s));
                        cell(h, &b.work.map_or_else(|| "?".into(), count));
                        let rate = b.work.filter(|_| b.measured_s > 0.0).map(|w| w / b.measured_s);
                        cell(h, &rate.map_or_else(|| "?".into(), count));
                        cell(h, &format!("{:.2}", b.cpu_s));
                        cell(h, &b.score.map_or_else(|| "?".into(), |s| format!("{s:.4}")));
                    });
                }
            });
        });
        if blocks.len() > BLOCK_ROWS_MAX {
            let text = format!(
                "{} more: homeostat history --blocks {}",
                blocks.len() - BLOCK_ROWS_MAX,
                t.past.id
            );
            h.leaf("p", &[("class", "soft")], &text);
        }
    });
}

fn way_by_hand(h: &mut Html, t: &Tried) {
    let Some(way) = by_hand::of(&t.past.strategy) else {
        return;
    };
    h.element("details", &[], |h| {
        h.leaf("summary", &[], "Do or undo it by hand");
        h.element("p", &[("class", "small soft")], |h| {
            h.text("While it is in force, ");
            h.leaf("code", &[], &format!("homeostat undo {}", t.action));
            h.text(" takes back what this experiment tried; with the daemon dead, ");
            h.leaf("code", &[], "homeostat restore");
            h.text(" takes back everything. Without homeostat:");
        });
        h.leaf("p", &[("class", "small")], way.note);
        h.leaf("h4", &[], "Make the change");
        h.leaf("pre", &[], &way.make.join("\n"));
        h.leaf("h4", &[], "Take it back");
        h.leaf("pre", &[], &way.undo.join("\n"));
    });
}

#[cfg(test)]
mod tests;
