//! Draws a [`Model`] into a buffer of cells. Pure: the same model, size and look give the same cells. All text that
//! reaches a cell goes through [`Canvas::put`], which lets nothing through that a terminal obeys.

use super::cells::{Cells, Rect};
use super::model::{Model, Origin, PAGES, Page};
use crate::render::text::{
    all_of, count, effect, first_of, hours_or_less, in_turns, lost_work, percent, plural, wrap,
};
use crate::render::{bytes, experiment_line, price};
use homeostat_daemon::api::{Experiment, ExperimentKind, Status, StoryLine, TrialBlock, Workload};
use homeostat_daemon::log::time_of_day;
use homeostat_daemon::printable;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Smaller than this nothing can be shown.
const WIDTH_MIN: u16 = 40;
/// Fewer lines than this neither.
const HEIGHT_MIN: u16 = 10;
/// From this width on the story stands beside the rest.
const WIDE: u16 = 120;
/// Ends of the axes of intervals, in percent.
const AXES: [f64; 8] = [5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

/// What the terminal can do.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Whether colour is welcome.
    pub color: bool,
    /// Whether it shows more than ASCII.
    pub unicode: bool,
}

/// What a text means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Plain,
    Soft,
    Strong,
    Good,
    Busy,
    Warn,
    Bad,
    /// The line at the top.
    Bar,
    /// The selected line.
    Chosen,
}

impl Look {
    /// Parameters of "select graphic rendition".
    fn style(self, tone: Tone) -> &'static str {
        match (tone, self.color) {
            (Tone::Strong, _) | (Tone::Bad, false) => ";1",
            (Tone::Bar | Tone::Chosen, _) => ";7",
            (Tone::Soft, false) => ";2",
            (Tone::Plain, _) | (_, false) => "",
            (Tone::Soft, true) => ";90",
            (Tone::Good, true) => ";32",
            (Tone::Busy, true) => ";36",
            (Tone::Warn, true) => ";33",
            (Tone::Bad, true) => ";1;31",
        }
    }

    /// The sign, or what stands for it in ASCII.
    fn sign<T>(self, unicode: T, ascii: T) -> T {
        if self.unicode { unicode } else { ascii }
    }
}

/// A piece of a line.
type Piece = (String, Tone);
/// A line.
type Row = Vec<Piece>;

fn row(text: impl Into<String>, tone: Tone) -> Row {
    vec![(text.into(), tone)]
}

/// The part of the buffer that is drawn into.
struct Canvas<'a> {
    buffer: &'a mut Cells,
    look: Look,
}

impl Canvas<'_> {
    /// Writes text from `x` on, at most up to the column before `end`; what does not fit is cut and marked. Returns the
    /// column after it.
    fn put(&mut self, x: u16, y: u16, end: u16, text: &str, tone: Tone) -> u16 {
        let style = self.look.style(tone);
        let text = printable::for_terminal(text, false);
        let room = usize::from(end.saturating_sub(x));
        if room == 0 {
            return x;
        }
        let fits = text.width() <= room;
        let keep = if fits { room } else { room - 1 };
        let mut at = x;
        let mut used = 0;
        for c in text.chars() {
            let c = match c {
                '\n' => ' ',
                c if self.look.unicode || c.is_ascii() => c,
                '\u{2212}' | '\u{2013}' => '-',
                '\u{b7}' => '|',
                '\u{2026}' => '~',
                _ => '?',
            };
            let width = c.width().unwrap_or(0);
            // What has no width of its own could hang on to a neighbour.
            if width == 0 {
                continue;
            }
            if used + width > keep {
                break;
            }
            self.buffer.set(at, y, c, style);
            at += width as u16;
            used += width;
        }
        if !fits {
            self.buffer.set(at, y, self.look.sign('\u{2026}', '~'), style);
            at += 1;
        }
        at
    }

    fn row(&mut self, area: Rect, y: u16, row: &Row) {
        let mut x = area.x;
        for (text, tone) in row {
            x = self.put(x, y, area.right(), text, *tone);
        }
    }

    /// Lines into an area; those that do not fit are left out.
    fn rows(&mut self, area: Rect, rows: &[Row]) {
        for (row, y) in rows.iter().zip(area.y..area.bottom()) {
            self.row(area, y, row);
        }
    }

    fn fill(&mut self, area: Rect, y: u16, tone: Tone) {
        for x in area.x..area.right() {
            self.buffer.set(x, y, ' ', self.look.style(tone));
        }
    }
}

/// Draws everything. Returns how many lines of the page are seen, and how far it can be scrolled.
pub fn draw(model: &Model, buffer: &mut Cells, look: Look) -> (usize, usize) {
    let area = buffer.area;
    let mut canvas = Canvas { buffer, look };
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        let text = format!("at least {WIDTH_MIN} columns and {HEIGHT_MIN} lines are needed");
        for (line, y) in wrap(&text, "", usize::from(area.width))
            .lines()
            .zip(0..area.height)
        {
            canvas.put(0, y, area.right(), line, Tone::Plain);
        }
        return (1, 0);
    }
    title(&mut canvas, area, model);
    keys(&mut canvas, area, model);
    let inner = Rect::new(0, 1, area.width, area.height - 2);
    if model.help() {
        canvas.rows(
            Rect::new(2, 2, area.width - 2, inner.height - 1),
            &help_rows(look),
        );
        return (1, 0);
    }
    let Some(status) = model.status() else {
        let text = model.trouble().unwrap_or("waiting for the daemon");
        let rows: Vec<Row> = wrap(text, "  ", usize::from(area.width))
            .lines()
            .map(|l| row(l, Tone::Warn))
            .collect();
        canvas.rows(Rect::new(0, 2, area.width, inner.height - 1), &rows);
        return (1, 0);
    };
    let head = machine_rows(status, look, usize::from(area.width));
    canvas.rows(inner, &head);
    let top = inner.y + head.len() as u16;
    let body = Rect::new(0, top, area.width, inner.bottom() - top);
    match model.page() {
        Page::Overview => overview(&mut canvas, body, model, status),
        Page::Trial => scrolled(&mut canvas, body, model, &trial_page(model, look, body)),
        Page::Workload => scrolled(
            &mut canvas,
            body,
            model,
            &workload_page(model, status, look, body),
        ),
        Page::Story => story_page(&mut canvas, body, model),
    }
}

fn title(canvas: &mut Canvas<'_>, area: Rect, model: &Model) {
    canvas.fill(area, 0, Tone::Bar);
    let clock = model
        .moment()
        .map_or_else(String::new, |m| time_of_day(m.at_unix));
    let place = match (model.origin(), model.place()) {
        (_, _) if model.trouble().is_some() => "no answer".to_owned(),
        (Origin::Daemon, None) => match model.status().and_then(homeostat_daemon::board::hangs_for) {
            Some(age) => format!("loop hangs, {} s old", age.as_secs()),
            None => "live".to_owned(),
        },
        (Origin::Daemon, Some(_)) => format!("{} ago", hours_or_less(model.behind() as f64)),
        (Origin::Recording(_), place) => {
            let (at, of) = place.unwrap_or((0, 0));
            let state = if model.playing() { "playing" } else { "held" };
            format!("{state} {at}/{of}")
        }
    };
    let right = format!("{clock} {place} ");
    let from = area.right().saturating_sub(right.width() as u16);
    let left = match model.status() {
        None => " homeostat".to_owned(),
        Some(s) => {
            let mode = match (s.paused, &s.switch) {
                (true, _) => "paused",
                (false, Some(switch)) if switch.on => "on",
                (false, Some(_)) => "off (homeostat on lets it act)",
                // A recording.
                (false, None) if s.mode == "act" => "acting",
                (false, None) => s.mode.as_str(),
            };
            format!(
                " homeostat {} {mode}  {}",
                s.version,
                s.machine.replace(" | ", ", ")
            )
        }
    };
    canvas.put(0, 0, from.saturating_sub(1), &left, Tone::Bar);
    canvas.put(from, 0, area.right(), &right, Tone::Bar);
}

fn keys(canvas: &mut Canvas<'_>, area: Rect, model: &Model) {
    let y = area.bottom() - 1;
    let mut x = 0;
    for (i, page) in PAGES.iter().enumerate() {
        let tone = if *page == model.page() && !model.help() {
            Tone::Chosen
        } else {
            Tone::Soft
        };
        x = canvas.put(x, y, area.right(), &format!(" {} {} ", i + 1, page.name()), tone);
    }
    let more = if model.help() {
        "  Esc leaves help"
    } else {
        "  ? help  q quit"
    };
    canvas.put(x, y, area.right(), more, Tone::Soft);
}

fn help_rows(look: Look) -> Vec<Row> {
    let arrows = look.sign("\u{2190} \u{2192}", "left right");
    let upright = look.sign("\u{2191} \u{2193}", "up down");
    let lines: [(&str, &str); 13] = [
        ("1 2 3 4, Tab", "overview, trial, workload, story"),
        (upright, "or j k: select a workload, scroll a page"),
        ("Enter", "the selected workload in full; Esc goes back"),
        ("PgUp PgDn", "by screens"),
        (arrows, "or h l: back and forth in time; [ ] by ten"),
        ("Home", "or g: the first moment that is known"),
        ("End", "or G: now, and every new moment"),
        ("Space", "hold the picture; in a recording: play, hold"),
        ("? q", "this help; leave (nothing changes by looking)"),
        ("", ""),
        (
            look.sign("\u{25cf} \u{25cb} \u{2715}", "# o x"),
            "block with the change on, off, cut short",
        ),
        (
            look.sign("\u{2560}\u{2550}\u{25cf}\u{2550}\u{2563}", "[=#=]"),
            "the interval of the effect; ! or \u{2503} is zero",
        ),
        ("evidence", "what it must reach for a gain to be proven"),
    ];
    let mut rows = vec![row("What the keys and signs mean", Tone::Strong), Row::new()];
    rows.extend(lines.iter().map(|(key, what)| {
        vec![
            (format!("{key:<14}"), Tone::Busy),
            ((*what).to_owned(), Tone::Plain),
        ]
    }));
    rows
}

/// Load, pressure and budgets: two lines, and one for each thing that is wrong.
fn machine_rows(s: &Status, look: Look, width: usize) -> Vec<Row> {
    let host = &s.host;
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let used = host.memory_bytes.saturating_sub(host.memory_available_bytes);
    let gib = |b: u64| b as f64 / f64::from(1u32 << 30);
    let pressure = host.pressure_cpu.max(host.pressure_memory).max(host.pressure_io);
    let size = if width >= 100 { 16 } else { 8 };
    let mut rows = vec![vec![
        (" CPU ".to_owned(), Tone::Soft),
        (
            bar(share(host.cpus_busy, f64::from(host.cpus)), size, look),
            Tone::Busy,
        ),
        (format!(" {:.2}/{}", host.cpus_busy, host.cpus), Tone::Plain),
        ("  memory ".to_owned(), Tone::Soft),
        (
            bar(share(used as f64, host.memory_bytes as f64), size, look),
            Tone::Busy,
        ),
        (
            format!(" {:.1}/{:.1} GiB", gib(used), gib(host.memory_bytes)),
            Tone::Plain,
        ),
        ("  waits".to_owned(), Tone::Soft),
        (
            format!(
                " cpu {:.0} mem {:.0} io {:.0} %",
                host.pressure_cpu * 100.0,
                host.pressure_memory * 100.0,
                host.pressure_io * 100.0
            ),
            if pressure >= 0.2 { Tone::Warn } else { Tone::Plain },
        ),
    ]];
    if host.cpus_stolen >= 0.05 * f64::from(host.cpus.max(1)) {
        rows[0].push((format!("  stolen {:.2}", host.cpus_stolen), Tone::Warn));
    }
    let b = &s.budget;
    let c = &s.calibration;
    let spent = b.harm_exposure_day >= 0.8 * b.harm_exposure_per_day_max && b.harm_exposure_per_day_max > 0.0;
    rows.push(vec![
        (" own ".to_owned(), Tone::Soft),
        (
            format!("{} {}", percent(b.own_cpu, 1), bytes(b.own_resident_bytes)),
            Tone::Plain,
        ),
        ("  trials ".to_owned(), Tone::Soft),
        (
            format!(
                "{}/{} an hour",
                b.experiments_last_hour, b.experiments_per_hour_max
            ),
            Tone::Plain,
        ),
        ("  lost work ".to_owned(), Tone::Soft),
        (
            format!(
                "{}/{}",
                lost_work(b.harm_exposure_day),
                lost_work(b.harm_exposure_per_day_max)
            ),
            if spent { Tone::Warn } else { Tone::Plain },
        ),
        ("  stalls ".to_owned(), Tone::Soft),
        (hours_or_less(b.stalled_s), Tone::Plain),
        ("  placebos ".to_owned(), Tone::Soft),
        (format!("{}/{}", c.false_accepts, c.placebos), Tone::Plain),
    ]);
    for problem in s.machine_refusals.iter().chain(&s.notes).take(2) {
        rows.push(row(format!(" ! {problem}"), Tone::Warn));
    }
    rows
}

/// A share as a bar.
fn bar(share: f64, width: usize, look: Look) -> String {
    let full = if share.is_finite() {
        (share.clamp(0.0, 1.0) * width as f64).round() as usize
    } else {
        0
    };
    format!(
        "{}{}",
        look.sign("\u{2588}", "#").repeat(full),
        look.sign("\u{2591}", ".").repeat(width - full)
    )
}

fn heading(text: &str, width: usize, look: Look) -> Row {
    let rest = width.saturating_sub(text.width() + 4);
    let line = look.sign("\u{2500}", "-");
    vec![
        (format!("{line} "), Tone::Soft),
        (text.to_owned(), Tone::Strong),
        (format!(" {}", line.repeat(rest)), Tone::Soft),
    ]
}

fn overview(canvas: &mut Canvas<'_>, body: Rect, model: &Model, status: &Status) -> (usize, usize) {
    let beside = body.width >= WIDE;
    let left = if beside {
        Rect {
            width: body.width * 3 / 5,
            ..body
        }
    } else {
        body
    };
    let width = usize::from(left.width);
    let height = usize::from(left.height);
    let look = canvas.look;
    let mut rows = Vec::new();
    let trials = model.trials();
    if trials.is_empty() {
        rows.push(heading("Being tried", width, look));
        rows.push(row(" nothing at the moment", Tone::Soft));
    }
    // A placebo changes nothing: it comes last and may be left out.
    for trial in trials.iter().take(if height >= 24 { 2 } else { 1 }) {
        rows.push(heading("Being tried", width, look));
        rows.extend(trial_rows(trial, width, look));
    }
    if !status.in_force.is_empty() {
        rows.push(heading("In force, proven", width, look));
        let most = if height >= 24 { 6 } else { 3 };
        rows.extend(status.in_force.iter().take(most).map(|c| {
            let gain = c
                .effect
                .as_ref()
                .map_or_else(|| "not measured".to_owned(), effect);
            let tone = if c.on { Tone::Good } else { Tone::Warn };
            let off = if c.on { "" } else { "off for a probe; " };
            vec![
                (format!(" {:>3} ", c.action), Tone::Soft),
                (format!("{:<22} ", clipped(&c.workload, 22)), Tone::Plain),
                (format!("{gain} "), tone),
                (format!(" {}; {off}{}", c.strategy, c.guard), Tone::Soft),
            ]
        }));
        let hidden = status.in_force.len().saturating_sub(most);
        if hidden > 0 {
            rows.push(row(format!("     and {hidden} more"), Tone::Soft));
        }
    }
    // What is left is for the workloads and, where it has no place of its own, the story.
    let story_least = if beside { 0 } else { 4 };
    let room = height.saturating_sub(rows.len() + story_least + 2).max(3);
    let workloads = model.workloads();
    rows.push(heading(&workloads_title(&workloads, status), width, look));
    let shown = workloads.len().min(room);
    let selected = workloads
        .iter()
        .position(|w| Some(w.name.as_str()) == model.selected())
        .unwrap_or(0);
    let from = (selected + 1).saturating_sub(shown);
    let name_width = workloads
        .iter()
        .map(|w| w.name.width())
        .max()
        .unwrap_or(8)
        .clamp(8, width / 3);
    let titles = format!(
        " {:<name_width$} {:<10} {:>5} {:>9} {:>6} WHY",
        "WORKLOAD", "STAGE", "CPUS", "MEMORY", "LARGE"
    );
    rows.push(row(titles, Tone::Soft));
    for (i, w) in workloads.iter().enumerate().skip(from).take(shown) {
        rows.push(workload_row(w, name_width, i == selected, width));
    }
    canvas.rows(left, &rows);
    let told = model.told();
    if beside {
        let right = Rect {
            x: left.right() + 1,
            width: body.width - left.width - 1,
            ..body
        };
        let mut column = vec![heading("Decisions", usize::from(right.width), look)];
        column.extend(story_tail(
            told,
            usize::from(right.width),
            usize::from(right.height) - 1,
        ));
        canvas.rows(right, &column);
    } else {
        let y = left.y + rows.len() as u16;
        if y + 1 < left.bottom() {
            let room = Rect {
                y,
                height: left.bottom() - y,
                ..left
            };
            let mut column = vec![heading("Decisions", width, look)];
            column.extend(story_tail(told, width, usize::from(room.height) - 1));
            canvas.rows(room, &column);
        }
    }
    (shown, 0)
}

fn workloads_title(shown: &[&Workload], status: &Status) -> String {
    let ignored = status.workloads_ignored as usize + (status.workloads.len() - shown.len());
    format!("{}, {ignored} ignored", plural(shown.len() as u64, "workload"))
}

fn stage_tone(stage: &str) -> Tone {
    match stage {
        "improved" => Tone::Good,
        "trying" | "proposed" => Tone::Busy,
        _ => Tone::Plain,
    }
}

fn workload_row(w: &Workload, name_width: usize, chosen: bool, width: usize) -> Row {
    let large = match w.huge_bytes {
        Some(huge) if w.resident_bytes > 0 => {
            format!("{:.0} %", huge as f64 / w.resident_bytes as f64 * 100.0)
        }
        _ => String::new(),
    };
    let name = padded(&w.name, name_width);
    let numbers = format!(
        " {:>5.2} {:>9} {large:>6} {}",
        w.cpus,
        bytes(w.resident_bytes),
        w.summary
    );
    if chosen {
        let mut line = format!(" {name} {:<10}{numbers}", w.stage_word());
        let missing = width.saturating_sub(line.width());
        line.push_str(&" ".repeat(missing));
        return row(line, Tone::Chosen);
    }
    vec![
        (format!(" {name} "), Tone::Plain),
        (format!("{:<10}", w.stage_word()), stage_tone(&w.stage)),
        (numbers, Tone::Plain),
    ]
}

fn clipped(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut out = String::new();
    for c in text.chars() {
        if out.width() + c.width().unwrap_or(0) + 1 > width {
            break;
        }
        out.push(c);
    }
    out.push('\u{2026}');
    out
}

fn padded(text: &str, width: usize) -> String {
    let mut out = clipped(&printable::for_terminal(text, false), width);
    out.push_str(&" ".repeat(width.saturating_sub(out.width())));
    out
}

/// A line of the story: when, about whom, what.
fn story_rows(line: &StoryLine, width: usize) -> Vec<Row> {
    let tone = if line.warning {
        Tone::Warn
    } else {
        stage_tone(&line.stage)
    };
    let text = format!(
        "{} {}",
        time_of_day(line.at_unix),
        printable::for_log(&line.sentence())
    );
    wrap(&text, " ", width).lines().map(|l| row(l, tone)).collect()
}

/// The last lines of the story that fit.
fn story_tail(told: &[StoryLine], width: usize, height: usize) -> Vec<Row> {
    let mut rows: Vec<Vec<Row>> = Vec::new();
    let mut used = 0;
    for line in told.iter().rev() {
        let lines = story_rows(line, width);
        if used + lines.len() > height {
            // The beginning of the one that does not fit: its first words say what it was.
            if rows.is_empty() {
                rows.push(lines.into_iter().take(height).collect());
            }
            break;
        }
        used += lines.len();
        rows.push(lines);
    }
    rows.into_iter().rev().flatten().collect()
}

fn block_sign(b: &TrialBlock, look: Look) -> Piece {
    match (b.broken, b.on) {
        (true, _) => (look.sign("\u{2715}", "x").to_owned(), Tone::Bad),
        (_, true) => (look.sign("\u{25cf}", "#").to_owned(), Tone::Good),
        (_, false) => (look.sign("\u{25cb}", "o").to_owned(), Tone::Plain),
    }
}

/// A trial in five lines.
fn trial_rows(e: &Experiment, width: usize, look: Look) -> Vec<Row> {
    let placebo = if e.kind == ExperimentKind::Placebo {
        " (placebo, changes nothing)"
    } else {
        ""
    };
    let mut rows = vec![vec![
        (" ".to_owned(), Tone::Plain),
        (
            clipped(&first_of(&e.workload, &e.others), width / 3),
            Tone::Strong,
        ),
        (
            format!("  {}{placebo}, experiment {}  ", e.strategy, e.id),
            Tone::Plain,
        ),
        (
            format!(
                "{} of at most {}",
                hours_or_less(e.elapsed_s),
                hours_or_less(e.budget_s)
            ),
            Tone::Soft,
        ),
    ]];
    if e.phase == "preparing" {
        rows.push(vec![
            (" making the change ".to_owned(), Tone::Soft),
            (bar(e.prepared, 20, look), Tone::Busy),
            (format!(" {}", percent(e.prepared, 0)), Tone::Plain),
        ]);
        return rows;
    }
    let now = format!("{} {}", if e.on { "on" } else { "off" }, e.phase);
    let mut blocks: Row = vec![(" blocks   ".to_owned(), Tone::Soft)];
    let room = width.saturating_sub(12 + 24);
    let skip = e.latest.len().saturating_sub(room);
    blocks.extend(e.latest.iter().skip(skip).map(|b| block_sign(b, look)));
    blocks.push((format!("  {} + {now}", e.blocks), Tone::Busy));
    rows.push(blocks);
    let mut effects: Row = vec![(" effect   ".to_owned(), Tone::Soft)];
    match &e.effect {
        Some(effect_so_far) => {
            let size = width.saturating_sub(12 + 34).clamp(16, 60);
            effects.extend(interval(effect_so_far, size, look));
            effects.push((format!(" {}", effect(effect_so_far)), Tone::Plain));
        }
        None => effects.push(("no estimate before the second block".to_owned(), Tone::Soft)),
    }
    rows.push(effects);
    let reached = (e.evidence.max(1.0).ln() / e.evidence_needed.max(1.001).ln()).clamp(0.0, 1.0);
    let size = width.saturating_sub(12 + 34).clamp(16, 60);
    rows.push(vec![
        (" evidence ".to_owned(), Tone::Soft),
        (
            bar(reached, size, look),
            if reached >= 1.0 { Tone::Good } else { Tone::Busy },
        ),
        (
            format!(" {} of {} needed", count(e.evidence), count(e.evidence_needed)),
            Tone::Plain,
        ),
    ]);
    if let Some(price) = price(e) {
        rows.push(vec![(" cost     ".to_owned(), Tone::Soft), (price, Tone::Plain)]);
    }
    rows
}

/// An interval on an axis with zero in its middle. The axis follows the estimate, so that one sees the interval shrink.
fn interval(e: &homeostat_daemon::api::Effect, width: usize, look: Look) -> Row {
    let estimate = e.estimate.unwrap_or(0.0) * 100.0;
    let axis = AXES
        .into_iter()
        .find(|a| *a >= estimate.abs() * 1.6)
        .unwrap_or(1000.0);
    let cells = width.saturating_sub(2).max(3);
    let place = |v: f64| -> usize {
        let share = ((v + axis) / (2.0 * axis)).clamp(0.0, 1.0);
        (share * (cells - 1) as f64).round() as usize
    };
    let (low, high) = (e.lower.map(|l| l * 100.0), e.upper.map(|u| u * 100.0));
    let from = place(low.unwrap_or(-axis));
    let to = place(high.unwrap_or(axis));
    let centre = place(estimate);
    let zero = place(0.0);
    let clear = low.is_some_and(|l| l > 0.0);
    let lost = high.is_some_and(|h| h < 0.0);
    let tone = match (clear, lost) {
        (true, _) => Tone::Good,
        (_, true) => Tone::Bad,
        _ => Tone::Busy,
    };
    let beyond = |end: Option<f64>| end.is_none_or(|e| e.abs() > axis);
    let mut row: Row = vec![(format!("{}%", axis_label(-axis)), Tone::Soft)];
    for i in 0..cells {
        let piece = if i == centre {
            (look.sign("\u{25cf}", "#"), tone)
        } else if i == zero {
            (look.sign("\u{2503}", "!"), Tone::Strong)
        } else if i == from {
            (
                if beyond(low) {
                    look.sign("\u{25c2}", "<")
                } else {
                    look.sign("\u{2560}", "[")
                },
                tone,
            )
        } else if i == to {
            (
                if beyond(high) {
                    look.sign("\u{25b8}", ">")
                } else {
                    look.sign("\u{2563}", "]")
                },
                tone,
            )
        } else if from < i && i < to {
            (look.sign("\u{2550}", "="), tone)
        } else {
            (look.sign("\u{2500}", "-"), Tone::Soft)
        };
        row.push((piece.0.to_owned(), piece.1));
    }
    row.push((format!("{}%", axis_label(axis)), Tone::Soft));
    row
}

fn axis_label(value: f64) -> String {
    format!("{value:+.0}")
}

/// A page of lines that can be scrolled.
fn scrolled(canvas: &mut Canvas<'_>, body: Rect, model: &Model, rows: &[Row]) -> (usize, usize) {
    let height = usize::from(body.height);
    let most = rows.len().saturating_sub(height);
    let from = model.scroll().min(most);
    canvas.rows(body, &rows[from..]);
    (height, most)
}

fn trial_page(model: &Model, look: Look, body: Rect) -> Vec<Row> {
    let width = usize::from(body.width);
    let trials = model.trials();
    let mut rows = Vec::new();
    if trials.is_empty() {
        rows.push(heading("Being tried", width, look));
        rows.push(row(" nothing at the moment; the latest verdicts:", Tone::Soft));
        for o in model.status().map(|s| s.outcomes.as_slice()).unwrap_or_default() {
            let tone = match o.verdict.as_str() {
                "accepted" => Tone::Good,
                "harmful" => Tone::Bad,
                _ => Tone::Plain,
            };
            rows.push(vec![
                (format!(" {} {:>4} ", time_of_day(o.ended_unix), o.id), Tone::Soft),
                (format!("{:<12} ", o.verdict), tone),
                (
                    format!(
                        "{} {} {}",
                        first_of(&o.workload, &o.others),
                        o.strategy,
                        o.effect.as_ref().map_or_else(String::new, effect)
                    ),
                    Tone::Plain,
                ),
            ]);
            rows.extend(
                wrap(&o.reason, "        ", width)
                    .lines()
                    .map(|l| row(l, Tone::Soft)),
            );
        }
        return rows;
    }
    for e in trials {
        rows.push(heading(&all_of(&e.workload, &e.others), width, look));
        rows.extend(trial_rows(e, width, look));
        if e.latest.len() >= 2 {
            rows.push(Row::new());
            rows.push(row(" estimate and interval after each block", Tone::Soft));
            // The rest of the screen, within reason.
            let lines = usize::from(body.height)
                .saturating_sub(rows.len() + 2)
                .clamp(7, 17);
            rows.extend(chart(&e.latest, width, lines, look));
        }
        rows.push(Row::new());
        rows.extend(
            wrap(&experiment_line(e), " ", width)
                .lines()
                .map(|l| row(l, Tone::Soft)),
        );
    }
    rows
}

/// The interval after each block as a column, newest at the right.
fn chart(blocks: &[TrialBlock], width: usize, lines: usize, look: Look) -> Vec<Row> {
    const LABEL: usize = 8;
    let room = width.saturating_sub(LABEL + 2);
    // Two columns for a block where there is room.
    let step = if blocks.len() * 2 <= room { 2 } else { 1 };
    let shown = &blocks[blocks.len().saturating_sub(room / step)..];
    let in_percent = |x: Option<f64>| x.map(|x| x * 100.0);
    let last = shown.last().map(|b| &b.effect);
    let centre = last.and_then(|e| in_percent(e.estimate)).unwrap_or(0.0);
    let reach = last
        .and_then(|e| Some((in_percent(e.upper)? - in_percent(e.lower)?) * 1.5))
        .unwrap_or(40.0)
        .clamp(4.0, 400.0);
    let low = (centre - reach).min(0.0);
    let high = (centre + reach).max(0.0);
    let per_line = (high - low) / (lines - 1).max(1) as f64;
    (0..lines)
        .map(|i| {
            let value = high - per_line * i as f64;
            let holds = |x: f64| (x - value).abs() <= per_line / 2.0;
            let zero = holds(0.0);
            let label = if zero {
                "0 %".to_owned()
            } else {
                format!("{value:+.1} %")
            };
            let mut row: Row = vec![(format!("{label:>LABEL$} "), Tone::Soft)];
            for b in shown {
                let e = &b.effect;
                let estimate = in_percent(e.estimate).unwrap_or(0.0).clamp(low, high);
                let inside = in_percent(e.lower).is_none_or(|l| l <= value)
                    && in_percent(e.upper).is_none_or(|u| u >= value);
                if holds(estimate) {
                    row.push(block_sign(b, look));
                } else if inside {
                    row.push((look.sign("\u{2502}", "|").to_owned(), Tone::Busy));
                } else {
                    row.push((
                        if zero { look.sign("\u{2500}", "-") } else { " " }.to_owned(),
                        Tone::Soft,
                    ));
                }
                if step == 2 {
                    row.push((
                        if zero { look.sign("\u{2500}", "-") } else { " " }.to_owned(),
                        Tone::Soft,
                    ));
                }
            }
            row
        })
        .collect()
}

fn workload_page(model: &Model, status: &Status, look: Look, body: Rect) -> Vec<Row> {
    let width = usize::from(body.width);
    let Some(w) = model.workload() else {
        return vec![row(" no workload is selected", Tone::Soft)];
    };
    let mut rows = vec![heading(&w.name, width, look)];
    let text = |rows: &mut Vec<Row>, text: &str, tone: Tone| {
        rows.extend(wrap(text, " ", width).lines().map(|l| row(l, tone)));
    };
    text(
        &mut rows,
        &format!("{}: {}", w.stage_word(), w.summary),
        stage_tone(&w.stage),
    );
    let huge = w
        .huge_bytes
        .map_or_else(String::new, |b| format!(", {} in large pages", bytes(b)));
    let facts = format!(
        "{} {}, {}, {} old, {:.2} CPUs, {}{huge}",
        w.kind.replace('_', " "),
        w.program,
        plural(u64::from(w.processes), "process"),
        hours_or_less(w.age_s),
        w.cpus,
        bytes(w.resident_bytes)
    );
    text(&mut rows, &facts, Tone::Plain);
    if let Some(m) = &w.meter {
        let meter = format!(
            "work: {} {}/s by {}, noise {}{}; judged by {}",
            count(m.rate),
            m.unit,
            m.id,
            percent(m.noise, 1),
            in_turns(m),
            m.objective
        );
        text(&mut rows, &meter, Tone::Plain);
    }
    if let Some(p) = &w.proposal {
        rows.push(heading("Proposed", width, look));
        text(
            &mut rows,
            &format!("{}: predicted {}", p.strategy, effect(&p.predicted)),
            Tone::Busy,
        );
        text(&mut rows, &p.hypothesis, Tone::Plain);
        text(&mut rows, &format!("risk: {}", p.risk), Tone::Soft);
    }
    for c in status.in_force.iter().filter(|c| c.workload == w.name) {
        rows.push(heading(
            &format!("In force: {} (undo {})", c.strategy, c.action),
            width,
            look,
        ));
        let gain = c
            .effect
            .as_ref()
            .map_or_else(|| "not measured".to_owned(), effect);
        text(
            &mut rows,
            &format!("{gain}; {}; guard: {}", c.text, c.guard),
            Tone::Good,
        );
    }
    for e in status
        .experiments
        .iter()
        .filter(|e| e.workload == w.name || e.others.contains(&w.name))
    {
        rows.push(heading("Being tried", width, look));
        rows.extend(trial_rows(e, width, look));
    }
    for a in status
        .advice
        .iter()
        .filter(|a| a.workload.as_deref() == Some(&w.name))
    {
        rows.push(heading("Advice", width, look));
        text(&mut rows, &a.finding, Tone::Plain);
        text(&mut rows, &format!("do: {}", a.remedy), Tone::Plain);
        text(&mut rows, &format!("risk: {}", a.risk), Tone::Soft);
    }
    let mut told = model
        .told()
        .iter()
        .filter(|l| l.workload.as_deref() == Some(&w.name))
        .peekable();
    if told.peek().is_some() {
        rows.push(heading("Decisions", width, look));
        rows.extend(told.flat_map(|l| story_rows(l, width)));
    }
    rows
}

fn story_page(canvas: &mut Canvas<'_>, body: Rect, model: &Model) -> (usize, usize) {
    let told = model.told();
    let height = usize::from(body.height).saturating_sub(1);
    let width = usize::from(body.width);
    let back = model.scroll().min(told.len().saturating_sub(1));
    let title = if back > 0 {
        format!("Decisions, {back} later ones below")
    } else {
        "Decisions".to_owned()
    };
    let mut rows = vec![heading(&title, width, canvas.look)];
    let upto = &told[..told.len() - back];
    if upto.is_empty() {
        rows.push(row(" none yet", Tone::Soft));
    }
    rows.extend(story_tail(upto, width, height));
    canvas.rows(body, &rows);
    (height / 2, told.len().saturating_sub(1))
}

#[cfg(test)]
mod tests;
