//! Manual pages: what clap knows of a command, laid out as readers of `man` expect it.
//!
//! `clap_mangen` writes the parts that are made of arguments. It would run the help text after them into one paragraph, so
//! this module renders that: examples as literal blocks, columns as lists of terms. Code between back quotes is bold.

use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};
use homeostat_daemon::settings;

/// Commands that change the machine or the daemon, which is what section 8 is for. All others are in section 1.
const ADMINISTRATION: [&str; 8] = [
    "run",
    "restore",
    "prepare-downgrade",
    "on",
    "off",
    "undo",
    "pause",
    "resume",
];
/// The page of the configuration.
const CONFIGURATION: &str = "homeostat.toml";
/// Longest literal line, so that a block with its indentation fits into 80 columns.
const LITERAL_MAX: usize = 68;
/// Date of the manual pages; changed with their contents.
const DATE: &str = "2026-11-29";
const SOURCE: &str = concat!("homeostat ", env!("CARGO_PKG_VERSION"));

/// A finished page.
pub(super) struct Page {
    /// Its name, without the section.
    pub(super) name: String,
    /// 1, 5 or 8.
    pub(super) section: &'static str,
    /// Its source in roff.
    pub(super) text: String,
}

/// The section of a command by its path, such as `homeostat-tunable-set`.
fn section_of(name: &str) -> &'static str {
    let command = name.split('-').nth(1).unwrap_or_default();
    if ADMINISTRATION.contains(&command) {
        "8"
    } else {
        "1"
    }
}

fn name_of(command: &clap::Command) -> String {
    command
        .get_display_name()
        .unwrap_or(command.get_name())
        .to_owned()
}

fn visible(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    command
        .get_subcommands()
        .filter(|c| !c.is_hide_set() && c.get_name() != "help")
}

/// The pages of a command that is built, and of those below it.
pub(super) fn of_command(
    command: &clap::Command,
    above: &[String],
    pages: &mut Vec<Page>,
) -> std::io::Result<()> {
    let name = name_of(command);
    let section = section_of(&name);
    let man = Man::new(command.clone());
    let mut text = title(&name, section);
    for part in [
        Man::render_name_section,
        Man::render_synopsis_section,
        Man::render_description_section,
        Man::render_options_section,
    ] {
        let mut out = Vec::new();
        part(&man, &mut out)?;
        text.push_str(&String::from_utf8_lossy(&out));
    }
    let mut roff = Roff::new();
    if visible(command).next().is_some() {
        roff.control("SH", ["COMMANDS"]);
        for inner in visible(command) {
            let name = name_of(inner);
            let term = [bold(&name), roman(format!("({})", section_of(&name)))];
            item(
                &mut roff,
                term,
                &inner.get_about().map(ToString::to_string).unwrap_or_default(),
            );
        }
    }
    if let Some(help) = command.get_after_long_help().or(command.get_after_help()) {
        explain(&mut roff, &help.to_string());
    }
    let mut related: Vec<String> = above.to_vec();
    let mentions_settings = above.is_empty()
        || ["homeostat-run", "homeostat-config"]
            .iter()
            .any(|n| name.starts_with(n));
    if mentions_settings {
        related.push(CONFIGURATION.to_owned());
    }
    see_also(&mut roff, &related);
    text.push_str(&roff.render());
    pages.push(Page {
        name: name.clone(),
        section,
        text: finish(&text),
    });
    let mut path = above.to_vec();
    path.push(name);
    for inner in visible(command) {
        of_command(inner, &path, pages)?;
    }
    Ok(())
}

/// The page of the configuration file, from what `homeostat config default` says.
pub(super) fn of_configuration() -> Page {
    let mut roff = Roff::new();
    roff.control("SH", ["NAME"]);
    roff.text([roman("homeostat.toml - configuration of homeostat")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([roman("/etc/homeostat/homeostat.toml")]);
    roff.control("br", []);
    roff.text([roman("/etc/homeostat/homeostat.d/*.toml")]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(settings::introduction().replace('\n', " "))]);
    roff.control("PP", []);
    roff.text([roman(
        "A list below gives each setting with its default. Numbers, texts and lists are written as TOML has them.",
    )]);
    roff.control("SH", ["SETTINGS"]);
    for section in settings::reference() {
        roff.control("SS", [section.header.as_str()]);
        if !section.meaning.is_empty() {
            roff.text([roman(section.meaning.as_str())]);
        }
        if !section.example.is_empty() {
            let lines: Vec<String> = std::iter::once(section.header.as_str())
                .chain(section.example.iter().copied())
                .flat_map(fold_toml)
                .collect();
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            literal(&mut roff, &lines);
        }
        for setting in &section.settings {
            let term = [bold(&setting.name), roman(" = "), roman(&setting.default)];
            item(&mut roff, term, &setting.meaning);
        }
    }
    roff.control("SH", ["SETTINGS OF SINGLE STRATEGIES"]);
    roff.text([roman(
        "Each stands in the table of its strategy below `[policy.settings]`.",
    )]);
    for setting in settings::of_strategies() {
        let term = [
            bold(format!("{}.{}", setting.strategy, setting.name)),
            roman(format!(
                " = {}, from {} to {}",
                setting.default, setting.low, setting.high
            )),
        ];
        item(&mut roff, term, setting.help);
    }
    roff.control("SH", ["EXAMPLES"]);
    roff.text([roman(
        "A file with every setting, its meaning and its default, all commented out:",
    )]);
    literal(
        &mut roff,
        &["homeostat config default > /etc/homeostat/homeostat.toml"],
    );
    roff.control("PP", []);
    roff.text([roman("Leave one program alone:")]);
    literal(
        &mut roff,
        &["[[policy.workloads]]", "match = \"postgresql*\"", "never = true"],
    );
    see_also(
        &mut roff,
        &["homeostat", "homeostat-run", "homeostat-config"].map(str::to_owned),
    );
    Page {
        name: CONFIGURATION.to_owned(),
        section: "5",
        text: finish(&format!("{}{}", title(CONFIGURATION, "5"), roff.render())),
    }
}

fn title(name: &str, section: &str) -> String {
    let mut roff = Roff::new();
    // Without a date readers take the version for it.
    roff.control(
        "TH",
        [name.to_uppercase().as_str(), section, DATE, SOURCE, "homeostat"],
    );
    roff.render()
}

fn item(roff: &mut Roff, term: impl Into<Vec<Inline>>, text: &str) {
    roff.control("TP", []);
    roff.text(term);
    roff.text([roman(text)]);
}

fn literal(roff: &mut Roff, lines: &[&str]) {
    roff.control("PP", []);
    roff.control("RS", ["4"]);
    roff.control("EX", []);
    for line in lines {
        roff.text([roman(*line)]);
    }
    roff.control("EE", []);
    roff.control("RE", []);
}

fn see_also(roff: &mut Roff, names: &[String]) {
    if names.is_empty() {
        return;
    }
    roff.control("SH", ["SEE ALSO"]);
    for (at, name) in names.iter().enumerate() {
        let section = if name == CONFIGURATION {
            "5"
        } else {
            section_of(name)
        };
        let comma = if at + 1 < names.len() { "," } else { "" };
        roff.text([bold(name), roman(format!("({section}){comma}"))]);
    }
}

/// Lines of at most [`LITERAL_MAX`] characters: a longer command goes on in the next line, as a shell allows.
fn fold(line: &str, continued: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut rest = line.to_owned();
    while rest.chars().count() > LITERAL_MAX {
        let most = rest
            .char_indices()
            .nth(LITERAL_MAX - 2)
            .map_or(rest.len(), |(at, _)| at);
        let Some(at) = rest[..most]
            .rfind(' ')
            .filter(|at| !rest[..*at].trim().is_empty())
        else {
            break;
        };
        lines.push(format!("{}{continued}", &rest[..at]));
        rest = format!("    {}", rest[at..].trim_start());
    }
    lines.push(rest);
    lines
}

/// The same for TOML: words of a comment, or a list that begins in the line.
fn fold_toml(line: &str) -> Vec<String> {
    if line.chars().count() <= LITERAL_MAX {
        return vec![line.to_owned()];
    }
    if let Some(comment) = line.strip_prefix("# ") {
        let mut lines = vec![String::from("#")];
        for word in comment.split_whitespace() {
            match lines.last_mut() {
                Some(last) if last.chars().count() + 1 + word.chars().count() <= LITERAL_MAX => {
                    last.push(' ');
                    last.push_str(word);
                }
                _ => lines.push(format!("# {word}")),
            }
        }
        return lines;
    }
    match line.split_once('[') {
        Some((name, list)) => vec![format!("{name}["), format!("    {list}")],
        None => vec![line.to_owned()],
    }
}

/// The text after the options of a help: headings in capitals, indented columns, and sentences.
fn explain(roff: &mut Roff, help: &str) {
    let mut heading = String::new();
    let mut sentences: Vec<&str> = Vec::new();
    for line in help.lines().chain([""]) {
        let is_heading = !line.is_empty()
            && line.chars().all(|c| c.is_ascii_uppercase() || c == ' ')
            && !line.starts_with(' ');
        let is_indented = line.starts_with("  ");
        // Sentences of one paragraph are one text; each that ends a line with a full stop ends a paragraph.
        if (line.is_empty() || is_heading || is_indented) && !sentences.is_empty() {
            roff.control("PP", []);
            roff.text([roman(sentences.join(" "))]);
            sentences.clear();
        }
        if line.is_empty() {
            continue;
        }
        if is_heading {
            line.trim().clone_into(&mut heading);
            roff.control("SH", [line.trim()]);
        } else if is_indented {
            column(roff, &heading, line.trim());
        } else {
            sentences.push(line.trim());
        }
    }
}

/// An indented line of a help: a command with a remark, a term with its meaning, or a line to be shown as it is.
fn column(roff: &mut Roff, heading: &str, line: &str) {
    let (first, remark) = line.split_once("  ").unwrap_or((line, ""));
    let remark = remark.trim();
    if heading != "EXAMPLES" {
        if !remark.is_empty() {
            item(roff, [bold(first)], remark);
        } else if line.starts_with('{') {
            let lines = fold(line, "");
            literal(roff, &lines.iter().map(String::as_str).collect::<Vec<_>>());
        } else {
            roff.control("PP", []);
            roff.text([roman(line)]);
        }
        return;
    }
    if !remark.is_empty() {
        let mut letters = remark.chars();
        let capital: String = letters
            .next()
            .map(|c| c.to_ascii_uppercase())
            .into_iter()
            .chain(letters)
            .collect();
        roff.control("PP", []);
        roff.text([roman(format!("{capital}:"))]);
    }
    let lines = fold(first, " \\");
    literal(roff, &lines.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Joins the parts: one preamble, no spaces at the ends of lines, no macro without effect, and code between back quotes in
/// bold.
fn finish(text: &str) -> String {
    let mut out = String::new();
    let mut preamble = Vec::new();
    let mut in_literal = false;
    let mut last = "";
    for line in text.lines().map(str::trim_end) {
        let begins_anyway = line == ".PP" && (last.starts_with(".SH") || last.starts_with(".SS"));
        if begins_anyway || (line == ".br" && last == ".br") {
            continue;
        }
        // Each part brings the definition of the apostrophe.
        if line.starts_with(".ie ") || line.starts_with(".el ") {
            if preamble.contains(&line) {
                continue;
            }
            preamble.push(line);
        }
        match line {
            "" => continue,
            ".EX" => in_literal = true,
            ".EE" => in_literal = false,
            _ => {}
        }
        last = line;
        if in_literal || line.starts_with('.') {
            out.push_str(line);
        } else {
            out.push_str(&embolden(line));
        }
        out.push('\n');
    }
    out
}

fn embolden(line: &str) -> String {
    if line.matches('`').count() % 2 == 1 {
        return line.to_owned();
    }
    let mut out = String::new();
    for (at, part) in line.split('`').enumerate() {
        if at % 2 == 1 {
            out.push_str("\\fB");
            out.push_str(part);
            out.push_str("\\fR");
        } else {
            out.push_str(part);
        }
    }
    out
}
