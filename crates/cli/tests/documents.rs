//! The book in docs/: what is made from the program is in step with it, every page has its place, and every link leads
//! somewhere.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use clap::CommandFactory;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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

/// Commands that a page names: inline code and lines of blocks that begin with the program. In the page that is made from the
/// program only examples are commands, and these are indented.
fn commands_in(text: &str, is_made: bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
            continue;
        }
        let spans: Vec<&str> = if in_block {
            if is_made && !line.starts_with("  ") {
                continue;
            }
            // What follows wide space is a remark.
            vec![line.trim_start().split("  ").next().unwrap_or_default()]
        } else {
            line.split('`').skip(1).step_by(2).collect()
        };
        for span in spans {
            // Pipes, chains and comments of a shell each begin anew.
            for part in span.split(['|', ';', '#']).flat_map(|p| p.split("&&")) {
                let part = part.trim().trim_start_matches("$ ").trim_start_matches("sudo ");
                // "homeostat is on" is what the program says.
                if let Some(rest) = part
                    .strip_prefix("homeostat ")
                    .filter(|rest| !rest.starts_with("is "))
                {
                    found.push(rest.to_owned());
                }
            }
        }
    }
    found
}

/// What is wrong with a command that a page names.
fn fault(command: &clap::Command, words: &str) -> Option<String> {
    let mut at = command;
    let is_word = |w: &str| w.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !w.starts_with('-');
    let mut may_go_on = true;
    for word in words.split_whitespace() {
        let word = word.trim_end_matches([',', '.', ':', ')', '\'', '"']);
        if let Some(option) = word.strip_prefix("--") {
            let name = option.split('=').next().unwrap_or_default();
            let knows = |c: &clap::Command| {
                c.get_arguments().any(|a| {
                    let aliases = a.get_all_aliases().unwrap_or_default();
                    a.get_long() == Some(name) || aliases.contains(&name)
                })
            };
            if !name.is_empty() && !matches!(name, "help" | "version") && !knows(at) && !knows(command) {
                return Some(format!("`homeostat {words}`: no option --{name}"));
            }
        } else if may_go_on && at.has_subcommands() && is_word(word) {
            match at.find_subcommand(word) {
                Some(inner) => at = inner,
                None if at.get_name() == "help" || word == "help" => return None,
                None => return Some(format!("`homeostat {words}`: no command {word}")),
            }
        } else if !word.starts_with('-') {
            may_go_on = false;
        }
    }
    None
}

#[test]
fn every_command_that_the_book_names_exists() {
    let mut command = homeostat_cli::Arguments::command();
    command.build();
    let mut files = Vec::new();
    pages(&root().join("docs"), &mut files);
    files.push(root().join("README.md"));
    let mut faults = Vec::new();
    let mut named = 0;
    for file in files {
        for words in commands_in(&read(&file), file.ends_with("commands.md")) {
            named += 1;
            faults.extend(fault(&command, &words).map(|f| format!("{}: {f}", file.display())));
        }
    }
    assert!(named > 100, "only {named} commands were found");
    assert_eq!(faults, Vec::<String>::new());
    // The check itself sees what it is there for.
    for (words, wrong) in [
        ("list", true),
        ("compare a b", true),
        ("tunable lst", true),
        ("status --nosuch", true),
        ("tunable show vm.swappiness", false),
        ("meter list --json", false),
        ("COMMAND --help", false),
    ] {
        assert_eq!(fault(&command, words).is_some(), wrong, "{words}");
    }
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

/// Words of a page: code counts as words, the marks of tables and headings do not.
fn words(text: &str) -> usize {
    text.split_whitespace()
        .filter(|w| w.chars().any(char::is_alphanumeric))
        .count()
}

/// The paths of tests that a text names: `path/to/file.rs::name` in code.
fn named_tests(text: &str) -> Vec<(String, String)> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|code| {
            let (file, name) = code.split_once(".rs::")?;
            Some((format!("{file}.rs"), name.to_owned()))
        })
        .collect()
}

/// The numbered claims of the threat model, each with the lines that belong to it.
fn claims(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let is_item = line
            .split_once(". ")
            .is_some_and(|(number, _)| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
        if is_item {
            found.push(String::new());
            inside = true;
        } else if line.starts_with('#') {
            inside = false;
        }
        if let (true, Some(claim)) = (inside, found.last_mut()) {
            claim.push_str(line);
            claim.push('\n');
        }
    }
    found
}

#[test]
fn the_threat_model_is_short_and_each_of_its_claims_names_tests_that_exist() {
    let text = read(&root().join("docs/security.md"));
    assert!(words(&text) <= 1500, "{} words", words(&text));
    let claims = claims(&text);
    assert!(claims.len() >= 5, "{} claims", claims.len());
    for claim in &claims {
        assert!(!named_tests(claim).is_empty(), "no test is named: {claim}");
    }
    for (file, name) in named_tests(&text) {
        let source = read(&root().join(&file));
        let head = format!("fn {name}(");
        // The attribute stands before the function, perhaps with others and comments between.
        let found = source
            .split_once(&head)
            .and_then(|(before, _)| Some(before.rsplit_once("\n\n")?.1.to_owned()));
        assert!(
            found
                .as_ref()
                .is_some_and(|before| before.contains("#[test]") || source.contains("proptest!")),
            "{file} has no test {name}"
        );
    }
}

#[test]
fn claims_and_tests_are_read_from_a_page() {
    let page = "# T\n\n1. One. Test: `a/b.rs::c`.\n   More.\n2. Two.\n\n## Rest\n\nNo 3. claim `x.rs`.\n";
    let found = claims(page);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(named_tests(&found[0]), [("a/b.rs".to_owned(), "c".to_owned())]);
    assert!(named_tests(&found[1]).is_empty());
    assert_eq!(words("| a | 1.5 | -- |\n# b"), 3);
}

/// The manual pages that the program writes, by name and section, such as `homeostat-run(8)`.
fn manual_pages(directory: &Path) -> BTreeMap<String, PathBuf> {
    let status = Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .arg("manual")
        .arg(directory)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let mut found = BTreeMap::new();
    for section in ["1", "5", "8"] {
        for entry in std::fs::read_dir(directory.join(format!("man{section}"))).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            found.insert(format!("{name}({section})"), path);
        }
    }
    found
}

/// What a formatter of manual pages says: standard output and standard error; nothing where it is missing.
fn format_page(command: &[&str], page: &Path) -> Option<(String, String)> {
    let Ok(output) = Command::new(command[0])
        .args(&command[1..])
        .arg(page)
        .env("LC_ALL", "C.UTF-8")
        .output()
    else {
        eprintln!(
            "SKIPPED: {} is missing, so the manual pages are not formatted by it",
            command[0]
        );
        return None;
    };
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((said(&output.stdout), said(&output.stderr)))
}

#[test]
fn the_manual_pages_are_clean_fit_a_terminal_and_refer_to_pages_that_exist() {
    let directory = tempfile::tempdir().unwrap();
    let pages = manual_pages(directory.path());
    for name in [
        "homeostat(1)",
        "homeostat.toml(5)",
        "homeostat-run(8)",
        "homeostat-restore(8)",
    ] {
        assert!(pages.contains_key(name), "{name}: {:?}", pages.keys());
    }
    let plain = ["groff", "-ww", "-man", "-Tutf8", "-k", "-P-cbou", "-rLL=80n"];
    for (name, path) in &pages {
        // Formatters tell only some of what they cannot show; a warning of either is a fault.
        if let Some((text, warnings)) = format_page(&plain, path) {
            assert_eq!(warnings, "", "groff of {name}");
            let wide: Vec<&str> = text.lines().filter(|l| l.chars().count() > 80).collect();
            assert_eq!(wide, Vec::<&str>::new(), "{name} is wider than a terminal");
            let (_, related) = text.split_once("\nSEE ALSO\n").unwrap_or_default();
            let (_, commands) = text.split_once("\nCOMMANDS\n").unwrap_or_default();
            let commands = commands.split("\nEX").next().unwrap_or_default();
            assert!(
                name == "homeostat(1)" || related.contains("homeostat(1)"),
                "{name}: {related}"
            );
            for word in related.split_whitespace().chain(commands.split_whitespace()) {
                let word = word.trim_end_matches([',', '.']);
                if word.starts_with("homeostat") && word.ends_with(')') {
                    assert!(
                        pages.contains_key(word),
                        "{name} refers to {word}, which does not exist"
                    );
                }
            }
        }
        if let Some((faults, _)) = format_page(&["mandoc", "-T", "lint", "-W", "warning"], path) {
            assert_eq!(faults, "", "mandoc of {name}");
        }
    }
}

#[test]
fn examples_of_the_manual_pages_are_shown_line_by_line_and_columns_as_lists() {
    let directory = tempfile::tempdir().unwrap();
    let pages = manual_pages(directory.path());
    let text = |name: &str| std::fs::read_to_string(&pages[name]).unwrap();
    let run = text("homeostat-run(8)");
    assert!(
        run.contains(".EX\nhomeostat run \\-\\-advise\\-only\n.EE\n"),
        "{run}"
    );
    let overview = text("homeostat(1)");
    assert!(
        overview.contains(".SH \"EXIT CODES\"\n.TP\n\\fB0\\fR\nall is well\n"),
        "{overview}"
    );
    // Each setting of the default file is explained.
    let configuration = text("homeostat.toml(5)");
    let default = Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .args(["config", "default"])
        .output()
        .unwrap();
    let default = String::from_utf8(default.stdout).unwrap();
    let (settings, _) = default.split_once("# For example:").unwrap();
    let names: Vec<&str> = settings
        .lines()
        .filter_map(|l| l.strip_prefix('#')?.split_once(" = "))
        .map(|(name, _)| name)
        .filter(|name| !name.starts_with(' '))
        .collect();
    assert!(names.len() > 30, "{names:?}");
    for name in names {
        assert!(configuration.contains(&format!("\n\\fB{name}\\fR = ")), "{name}");
    }
}
