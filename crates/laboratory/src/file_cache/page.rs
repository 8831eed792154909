//! The page of the book: tables and pictures of [`super::figures`], [`super::sweep`] and [`super::loads`].

use super::figures::{self, INSUFFICIENT_MIB, READER, SUFFICIENT_MIB, Shown, after_the_writer, shown};
use super::loads::{self, Case, Spread};
use super::sweep::{self, DELAYS_S, GAINS, Held};
use super::{Control, Point};
use crate::drawing::{self, Axis, Curve, Panel, picture};
use std::fmt::Write;

/// Where the pictures lie, as the page names them.
pub const PICTURES: [&str; 3] = [
    "figures/simulated-6-to-11.svg",
    "figures/simulated-margins.svg",
    "figures/simulated-loads.svg",
];
/// Random loads of the page in the book, and their seed.
pub const LOADS: u64 = 100;
/// See [`LOADS`].
pub const SEED: u64 = 1;
/// Pages of 4 KiB in a megabyte of the source's programs.
const PAGES_PER_MB: f64 = 256.0;
/// The source's programs tell so often what they did, in points of a run and in seconds.
const REPORT_POINTS: usize = 5;
const REPORT_S: f64 = 10.0;
/// Controllers that move.
const BOTH: [Control; 2] = [Control::Autotune, Control::Own];

/// The page and its pictures, in the order of [`PICTURES`].
pub struct Page {
    /// Markdown.
    pub text: String,
    /// SVG.
    pub pictures: [String; 3],
}

/// Runs everything and makes the page.
pub fn page(loads_count: u64, seed: u64, threads: usize) -> Page {
    let sufficient = shown(SUFFICIENT_MIB);
    let insufficient = shown(INSUFFICIENT_MIB);
    let margins = Margins {
        gains: BOTH.map(sweep::gains),
        delays: BOTH.map(sweep::delays),
        together: BOTH.map(|control| GAINS.map(|gain| sweep::delay_margin(control, gain))),
    };
    let cases = loads::cases(loads_count, seed, threads);
    let mut text = introduction(&command(loads_count, seed));
    of_the_figures(&mut text, &sufficient, &insufficient);
    margins.tell(&mut text);
    of_the_loads(&mut text, &cases, seed);
    text.push_str(STABILITY);
    text.push_str(LIMITS);
    Page {
        text,
        pictures: [
            figures_6_to_11(&sufficient, &insufficient),
            margins.drawn(),
            loads_drawn(&cases),
        ],
    }
}

/// How the page is made.
fn command(loads_count: u64, seed: u64) -> String {
    let mut out = "cargo run --release -p homeostat-laboratory --example file_cache docs".to_owned();
    if (loads_count, seed) != (LOADS, SEED) {
        let _ = write!(out, " {loads_count} {seed}");
    }
    out
}

fn introduction(command: &str) -> String {
    format!(
        "# The file cache, simulated\n\nMade by `{command}`, to the bit the same everywhere.\n\n\
         IBM's autotune moved the ceiling of AIX's file cache (seed 003: Trent, 2004). Its rules and homeostat's own \
         controller of such a ceiling are shown here on the simulated machine's two pools, memory of programs and pages of \
         files: the paper's Figures 6 to 11, how much gain and delay may change before a controller loses its hold, and \
         random loads against an expert. **Linux has no such ceiling**: there autotune's rules move other settings and \
         homeostat limits the reader itself; what that does on real memory is in [file-cache.md](file-cache.md). This page is \
         evidence for the rules, not for Linux.\n"
    )
}

/// What runs on Linux, over random loads: made by a test of the strategies, which says how.
const STABILITY: &str = include_str!("stability.md");

const LIMITS: &str = "\n## What this does not show\n\n\
    * The source gives no sizes and no speed of its disk; those here were fitted to the one time that it gives (about a \
    minute), so that this time is no evidence. What follows from it without being put in: that nothing recovers without \
    control, that page-outs end with it, the size of the first spike (which depends on how long one looks: the source does not \
    say), and what happens when the writer ends.\n\
    * The machine has no CPUs here: the slight dip of Figures 6 and 7 is two programs that share a machine's memory bus, \
    which this model does not have.\n\
    * Pages are taken from both pools in proportion to their size below the ceiling. Real kernels know which pages were used \
    (AIX by repage rates, Linux by its lists), and take fewer of those that are needed.\n\
    * One reader and one writer. Whose pages are taken among several programs is no question of a ceiling.\n";

fn megabytes(pages_per_s: f64) -> f64 {
    pages_per_s * REPORT_S / PAGES_PER_MB
}

fn seconds(value: Option<f64>, otherwise: &str) -> String {
    value.map_or_else(|| otherwise.to_owned(), |s| format!("{s:.0} s"))
}

fn percent(share: f64) -> String {
    let text = format!("{:.1} %", share * 100.0);
    text.strip_prefix('-')
        .filter(|rest| rest.starts_with("0.0 "))
        .map_or(text.clone(), str::to_owned)
}

fn of_the_figures(out: &mut String, sufficient: &[Shown], insufficient: &[Shown]) {
    let (from_s, to_s) = READER;
    let _ = write!(
        out,
        "\n## Figures 6 to 11\n\nA program that rewrites 234 MiB, and from {from_s} s to {to_s} s one that reads a file of 586 MiB over \
         and over; {SUFFICIENT_MIB} MiB of memory are enough for both, {INSUFFICIENT_MIB} are not. The disk needs 2 ms a page at \
         random and delivers 98 MB in 10 s in sequence. While all of the file is in memory it is read at 781 MB in 10 s, half \
         of what the writer does, as in the paper.\n\n![Figures 6 to 11]({})\n\n",
        PICTURES[0]
    );
    out.push_str(
        "| figure | number | published | nobody controls | autotune-classic | homeostat's own |\n|---|---|---|---:|---:|---:|\n",
    );
    let mut row =
        |figure: &str, number: &str, published: &str, of: &dyn Fn(&Shown) -> String, shown: &[Shown]| {
            let cells: Vec<String> = shown.iter().map(of).collect();
            let _ = writeln!(
                out,
                "| {figure} | {number} | {published} | {} |",
                cells.join(" | ")
            );
        };
    row(
        "6, 7",
        "sufficient memory: what the writer loses",
        "under 3 %",
        &|s| percent(s.dip),
        sufficient,
    );
    row(
        "6, 7",
        "… pages taken from it",
        "",
        &|s| format!("{:.0}", s.paged_out),
        sufficient,
    );
    row(
        "8, 9",
        "insufficient memory: the writer's speed, second half of the reader's time",
        "no progress; recovered",
        &|s| percent(s.with_reader),
        insufficient,
    );
    row(
        "8, 9",
        "… back at 90 % while the reader runs, after its start",
        "never; \"about a minute\"",
        &|s| seconds(s.recovered_s, "never"),
        insufficient,
    );
    row(
        "8",
        "… back at 90 % after the reader's end",
        "\"over 30 seconds\"; at once",
        &|s| seconds(s.resumed_s, "at once"),
        insufficient,
    );
    row(
        "8, 9",
        "… the reader, MB in 10 s",
        "",
        &|s| format!("{:.0}", megabytes(s.reads)),
        insufficient,
    );
    let first = insufficient.first().map_or(f64::NAN, |s| s.spike);
    row(
        "10, 11",
        "largest page-outs in 10 s, pages a second",
        "",
        &|s| format!("{:.0}", s.spike),
        insufficient,
    );
    row(
        "10, 11",
        "… smaller than without control by",
        "30 %",
        &|s| match s.control {
            Control::Nobody => String::new(),
            _ => percent(1.0 - s.spike / first),
        },
        insufficient,
    );
    row(
        "10, 11",
        "largest page-outs in 2 s, before a controller can know of it",
        "",
        &|s| format!("{:.0}", s.sharp_spike),
        insufficient,
    );
    row(
        "10, 11",
        "page-outs in the last minute of the reader, pages a second",
        "go on; suppressed",
        &|s| format!("{:.0}", s.ongoing),
        insufficient,
    );
    let _ = writeln!(
        out,
        "\n\"Unlike using a statically limited file cache, when the CPU bound process terminates, the disk I/O bound process will run \
         at full speed\" (4.6): with a file of 391 MiB, which fits once the writer has gone, the reader reads from memory {} after \
         the writer's end with autotune-classic, {} with homeostat's own controller, and with the ceiling that an expert fixed at \
         {:.0} % {}.",
        seconds(after_the_writer(Control::Autotune), "never"),
        seconds(after_the_writer(Control::Own), "never"),
        figures::EXPERT * 100.0,
        seconds(after_the_writer(Control::Fixed(figures::EXPERT)), "never"),
    );
}

/// Means over the intervals at which the source's programs report.
fn reported(points: &[Point], of: impl Fn(&Point) -> f64) -> Vec<(f64, f64)> {
    points
        .chunks_exact(REPORT_POINTS)
        .filter_map(|chunk| {
            let mean = chunk.iter().map(&of).sum::<f64>() / chunk.len() as f64;
            Some((chunk.last()?.at_s, mean))
        })
        .collect()
}

fn figures_6_to_11(sufficient: &[Shown], insufficient: &[Shown]) -> String {
    const TIMES: [f64; 8] = [0.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 420.0];
    let curve = |colour, points| Curve {
        colour,
        points,
        marked: false,
    };
    let panel = |title: String, y: Axis, curves| Panel {
        title,
        below: "seconds",
        x: Axis::new(0.0, figures::END_S, &TIMES),
        y,
        shaded: Some(READER),
        curves,
    };
    let throughput = |figures: [&str; 3], words: &str, shown: &[Shown]| -> Vec<Panel> {
        let top = Axis::new(0.0, 1800.0, &[0.0, 500.0, 1000.0, 1500.0]);
        figures
            .iter()
            .zip(shown)
            .map(|(figure, s)| {
                panel(
                    format!("{figure}{words}, {} (MB/10 s)", s.control.name()),
                    top.clone(),
                    vec![
                        curve(drawing::WRITER, reported(&s.run.points, |p| megabytes(p.touches))),
                        curve(drawing::READER, reported(&s.run.points, |p| megabytes(p.reads))),
                    ],
                )
            })
            .collect()
    };
    let mut panels = throughput(["6: ", "7: ", ""], "enough memory", sufficient);
    panels.extend(throughput(["8: ", "9: ", ""], "too little", insufficient));
    for (figure, s) in ["10: ", "11: ", ""].iter().zip(insufficient) {
        let of = |of: fn(&Point) -> f64| s.run.points.iter().map(|p| (p.at_s, of(p))).collect();
        panels.push(panel(
            format!("{figure}paging, {} (pages a second)", s.control.name()),
            Axis::new(0.0, 1500.0, &[0.0, 500.0, 1000.0, 1500.0]),
            vec![
                curve(drawing::HELD, of(|p| p.paged_in)),
                curve(drawing::OUT, of(|p| p.paged_out)),
            ],
        ));
    }
    picture(
        "Seed 003, Figures 6 to 11, on the simulated machine",
        3,
        &panels,
        &[
            (drawing::WRITER, "writer"),
            (drawing::READER, "reader (it runs in the shaded time)"),
            (drawing::HELD, "pages in"),
            (drawing::OUT, "pages out"),
        ],
    )
}

struct Margins {
    gains: [Vec<Held>; 2],
    delays: [Vec<Held>; 2],
    /// The largest delay with which it holds, for each gain.
    together: [[Option<f64>; GAINS.len()]; 2],
}

impl Margins {
    fn tell(&self, out: &mut String) {
        let _ = write!(
            out,
            "\n## How far from losing their hold\n\nThe same writer beside a reader whose file never ends, for an hour, with {INSUFFICIENT_MIB} MiB. \
             *Settled*: from then on no minute in which the writer has less than 90 % of its speed. What follows is of the second half \
             hour: the writer's mean speed and that of its worst minute; *files*: how much they have of the memory that nobody \
             misses; *turns*: how often the ceiling changes its direction in an hour. *Overshoot*: how far files were pushed below \
             what nobody misses at the worst moment of the hour. A controller *holds* when it has settled within the first half hour, \
             turns at most {:.0} times an hour, and leaves files {:.0} % or more.\n\n![Margins]({})\n\n",
            sweep::REVERSALS_MAX,
            sweep::FILES_MIN * 100.0,
            PICTURES[1]
        );
        out.push_str(
            "| controller | gain | delay | settled | writer | worst minute | files | overshoot | turns an hour | page-outs a second | holds |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|\n",
        );
        for (gains, delays) in self.gains.iter().zip(&self.delays) {
            // The one that ships without delay is in both.
            for held in gains.iter().chain(delays.iter().skip(1)) {
                let _ = writeln!(
                    out,
                    "| {} | ×{} | {} s | {} | {} | {} | {} | {} | {:.0} | {:.1} | {} |",
                    held.tuning.control.name(),
                    held.tuning.gain,
                    held.tuning.delay_s,
                    seconds(held.settled_s, "never"),
                    percent(held.writer),
                    percent(held.worst_minute),
                    percent(held.files),
                    percent(held.overshoot),
                    held.reversals_per_h,
                    held.paged_out,
                    if held.holds() { "yes" } else { "NO" }
                );
            }
        }
        out.push_str(
            "\nGain and delay together: the largest of the delays tried (0, 2, 4, 8, 16, 32 s) up to which a controller \
             holds.\n\n| controller |",
        );
        for gain in GAINS {
            let _ = write!(out, " ×{gain} |");
        }
        let _ = writeln!(out, "\n|---|{}", "---:|".repeat(GAINS.len()));
        for (control, margins) in BOTH.iter().zip(&self.together) {
            let cells: Vec<String> = margins.iter().map(|m| seconds(*m, "none")).collect();
            let _ = writeln!(out, "| {} | {} |", control.name(), cells.join(" | "));
        }
    }

    fn drawn(&self) -> String {
        let gains = || Axis::of_words(GAINS.iter().map(|g| format!("×{g}")));
        let delays = || Axis::of_words(DELAYS_S.iter().map(|d| format!("{d}")));
        let curves = |of: fn(&Held) -> f64, held: &[Vec<Held>; 2]| -> Vec<Curve> {
            held.iter()
                .zip([drawing::READER, drawing::WRITER])
                .map(|(held, colour)| Curve {
                    colour,
                    points: held.iter().enumerate().map(|(i, h)| (i as f64, of(h))).collect(),
                    marked: true,
                })
                .collect()
        };
        let shares = || Axis::new(0.0, 100.0, &[0.0, 25.0, 50.0, 75.0, 100.0]);
        let turns = || Axis::new(0.0, 100.0, &[0.0, 25.0, 50.0, 75.0, 100.0]);
        type Quantity = (&'static str, fn(&Held) -> f64, fn() -> Axis);
        let quantities: [Quantity; 3] = [
            ("writer's speed (%)", |h| h.writer * 100.0, shares),
            ("files, of what nobody misses (%)", |h| h.files * 100.0, shares),
            ("turns of the ceiling an hour", |h| h.reversals_per_h, turns),
        ];
        let mut panels = Vec::new();
        for (below, held, x) in [
            ("gain", &self.gains, &gains as &dyn Fn() -> Axis),
            ("delay (seconds)", &self.delays, &delays as &dyn Fn() -> Axis),
        ] {
            for (title, of, y) in quantities {
                panels.push(Panel {
                    title: title.to_owned(),
                    below,
                    x: x(),
                    y: y(),
                    shaded: None,
                    curves: curves(of, held),
                });
            }
        }
        picture(
            "Gain and delay of both controllers",
            3,
            &panels,
            &[
                (drawing::READER, "autotune-classic"),
                (drawing::WRITER, "homeostat's own"),
            ],
        )
    }
}

fn of_the_loads(out: &mut String, cases: &[Case], seed: u64) {
    let _ = write!(
        out,
        "\n## Random loads\n\n{} random loads of an hour (seed {seed}): a writer of 20 to 85 % of the memory that touches 5,000 to \
         200,000 pages a second, a reader of 500 to 20,000 pages a second of a file that never ends or of 10 to 200 % of the \
         memory, a disk of 0.1 to 5 ms a page with or without a queue in front of it; every five minutes on average the reader \
         comes or goes or the writer changes its size, and what the controllers see is off by up to 20 %. The *expert* knows \
         the hour beforehand, and sets the best of ten fixed ceilings for it: that with the largest sum of the writer's speed \
         (1 = it never waits) and the reader's (1 = as if it had the machine to itself).\n\n![Random loads]({})\n\n",
        cases.len(),
        PICTURES[2]
    );
    out.push_str(
        "| controller | sum, of the expert's: median | 5th percentile | worst | loads with 98 % or more | writer: median | 5th percentile | \
         turns an hour: median | 95th percentile | most |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for (i, control) in Control::SHOWN.iter().enumerate() {
        let of = |of: &dyn Fn(&Case) -> f64| Spread::of(cases.iter().map(of));
        let sum = of(&|c| c.of_the_experts(i));
        let writer = of(&|c| c.shown[i].writer);
        let turns = of(&|c| c.shown[i].reversals_per_h);
        let good = cases.iter().filter(|c| c.of_the_experts(i) >= 0.98).count();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {good} of {} | {} | {} | {:.0} | {:.0} | {:.0} |",
            control.name(),
            percent(sum.median),
            percent(sum.p5),
            percent(sum.min),
            cases.len(),
            percent(writer.median),
            percent(writer.p5),
            turns.median,
            turns.p95,
            turns.max
        );
    }
}

fn loads_drawn(cases: &[Case]) -> String {
    let sorted = |of: &dyn Fn(&Case) -> f64| -> Vec<(f64, f64)> {
        let mut values: Vec<f64> = cases.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let last = values.len().saturating_sub(1).max(1) as f64;
        values
            .into_iter()
            .enumerate()
            .map(|(i, v)| (100.0 * i as f64 / last, v))
            .collect()
    };
    let colours = [drawing::NOBODY, drawing::READER, drawing::WRITER];
    let panel = |title: &str, y: Axis, of: &dyn Fn(&Case, usize) -> f64| Panel {
        title: title.to_owned(),
        below: "loads in order (%)",
        x: Axis::new(0.0, 100.0, &[0.0, 25.0, 50.0, 75.0, 100.0]),
        y,
        shaded: None,
        curves: colours
            .into_iter()
            .enumerate()
            .map(|(i, colour)| Curve {
                colour,
                points: sorted(&|case| of(case, i)),
                marked: false,
            })
            .collect(),
    };
    picture(
        "Random loads under nobody, autotune and homeostat's own controller",
        3,
        &[
            panel(
                "both speeds, of the expert's (%)",
                Axis::new(40.0, 120.0, &[40.0, 60.0, 80.0, 100.0, 120.0]),
                &|case, i| case.of_the_experts(i) * 100.0,
            ),
            panel(
                "writer's speed (%)",
                Axis::new(0.0, 100.0, &[0.0, 25.0, 50.0, 75.0, 100.0]),
                &|case, i| case.shown[i].writer * 100.0,
            ),
            panel(
                "reader's, of alone (%)",
                Axis::new(0.0, 100.0, &[0.0, 25.0, 50.0, 75.0, 100.0]),
                &|case, i| case.shown[i].reader * 100.0,
            ),
        ],
        &[
            (drawing::NOBODY, "nobody controls"),
            (drawing::READER, "autotune-classic"),
            (drawing::WRITER, "homeostat's own"),
        ],
    )
}
