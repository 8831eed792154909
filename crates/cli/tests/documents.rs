//! The book in docs/: what is made from the program is in step with it, every page has its place, and every link leads
//! somewhere.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use clap::CommandFactory;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|e| format!("{}: {e}", file.display()))
}

/// The help of a command and of those below it.
fn describe(command: &mut clap::Command, path: &str, out: &mut String) {
    let help = command.render_long_help().to_string();
    let trimmed: Vec<&str> = help.lines().map(str::trim_end).collect();
    let _ = write!(
        out,
        "\n## {path}\n\n```text\n{}\n```\n",
        trimmed.join("\n").trim_end()
    );
    for inner in command.get_subcommands_mut().filter(|c| !c.is_hide_set()) {
        if inner.get_name() != "help" {
            let path = format!("{path} {}", inner.get_name());
            describe(inner, &path, out);
        }
    }
}

#[test]
fn the_page_of_commands_is_what_the_program_says() {
    let mut command = homeostat_cli::Arguments::command()
        .disable_help_subcommand(true)
        .term_width(100);
    command.build();
    let mut wanted = String::from(
        "# Commands\n\nMade from the program: `homeostat COMMAND --help` says the same, and so do the manual pages.\n",
    );
    describe(&mut command, "homeostat", &mut wanted);
    let file = root().join("docs/commands.md");
    if std::env::var_os("HOMEOSTAT_UPDATE_DOCS").is_some() {
        std::fs::write(&file, &wanted).unwrap();
    }
    assert!(
        read(&file) == wanted,
        "{} is not in step: HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-cli --test documents",
        file.display()
    );
}

fn pages(directory: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|x| x == "md") {
            found.push(path);
        }
    }
}

/// Targets of `[text](target)`, outside of code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        }
        if code {
            continue;
        }
        // Every second piece between back quotes is code.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("x");
        for (at, _) in prose.match_indices("](") {
            let rest = &prose[at + 2..];
            if let Some(end) = rest.find(')') {
                found.push(rest[..end].to_owned());
            }
        }
    }
    found
}

/// The names by which headings are linked to, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut code = false;
    text.lines()
        .filter(|line| {
            if line.trim_start().starts_with("```") {
                code = !code;
            }
            !code && line.starts_with('#')
        })
        .map(|line| {
            line.trim_start_matches('#')
                .trim()
                .to_lowercase()
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

#[test]
fn every_link_leads_somewhere() {
    let root = root();
    let mut files = vec![
        root.join("README.md"),
        root.join("ARCHITECTURE.md"),
        root.join("CONTRIBUTING.md"),
        root.join("vm/README.md"),
    ];
    pages(&root.join("docs"), &mut files);
    let mut broken = Vec::new();
    let mut seen = 0;
    for file in &files {
        let text = read(file);
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            seen += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link.as_str(), ""));
            let target = if path.is_empty() {
                file.clone()
            } else {
                file.parent().unwrap().join(path)
            };
            if !target.exists() || (!anchor.is_empty() && !anchors(&read(&target)).contains(anchor)) {
                broken.push(format!("{}: {link}", file.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert_eq!(broken, Vec::<String>::new());
    assert!(seen > 50, "{seen} links");
}

#[test]
fn every_page_has_its_place_in_the_book() {
    let docs = root().join("docs");
    let mut files = Vec::new();
    pages(&docs, &mut files);
    let listed: BTreeSet<PathBuf> = links(&read(&docs.join("SUMMARY.md")))
        .iter()
        .map(|l| docs.join(l))
        .collect();
    let missing: Vec<&PathBuf> = files
        .iter()
        .filter(|f| !listed.contains(*f) && !f.ends_with("SUMMARY.md"))
        .collect();
    assert_eq!(
        missing,
        Vec::<&PathBuf>::new(),
        "docs/SUMMARY.md lists every page"
    );
}
