//! Every setting with its default and its meaning, made from the types themselves.

use super::{Paths, SECTIONS, Settings};
use homeostat_engine::Setting;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use toml::Value;

/// The sources with the fields' doc comments: section, file, type.
const SOURCES: &[(&str, &str, &str)] = &[
    ("", include_str!("../settings.rs"), "Settings"),
    ("paths", include_str!("../settings.rs"), "Paths"),
    ("control", include_str!("../settings.rs"), "Control"),
    ("service", include_str!("../settings.rs"), "Service"),
    ("metrics", include_str!("../settings.rs"), "Metrics"),
    (
        "meters",
        include_str!("../../../meters/src/settings.rs"),
        "MeterSettings",
    ),
    ("policy", include_str!("../../../engine/src/policy.rs"), "Policy"),
    (
        "policy.trial",
        include_str!("../../../statistics/src/switchback.rs"),
        "TrialParameters",
    ),
];

/// Empty by default and best shown by an example: section, example lines.
const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "meters.configured",
        &[
            "\"redis*\" = [\"uprobe:redis-server:readQueryFromClient\"]",
            "\"shop.service\" = [\"prometheus:http://127.0.0.1:9090/metrics#orders_total\"]",
            "\"worker*\" = [{ meter = \"uprobe:worker:handle_order\", unit = \"order\" }]",
        ],
    ),
    (
        "meters.redis_password_files",
        &["\"redis-server.service\" = \"/etc/homeostat/redis.password\""],
    ),
    (
        "policy.discovery",
        &[
            "# e_lond: share of false accepts among all accepts at most `rate`; the level decays by `decay` from try to",
            "# try and starts again after `epoch` tries. This is the default.",
            "kind = \"e_lond\"",
            "rate = 0.1",
            "decay = 0.99",
            "epoch = 200",
            "# Others: kind = \"spending\" with `total` (chance of any false accept ever), or kind = \"fixed\" with `alpha`.",
        ],
    ),
    ("policy.workloads", &["match = \"backup*\"", "never = true"]),
    ("policy.strategies", &["large_pages = true"]),
    ("policy.settings", &["large_pages = { gain_min = 0.03 }"]),
];

struct Leaf {
    section: String,
    name: String,
    default: Value,
    doc: String,
}

impl Leaf {
    fn key(&self) -> String {
        if self.section.is_empty() {
            self.name.clone()
        } else {
            format!("{}.{}", self.section, self.name)
        }
    }
}

fn field_docs(source: &str, type_name: &str) -> BTreeMap<String, String> {
    let mut docs = BTreeMap::new();
    let opening = format!("pub struct {type_name} {{");
    let mut inside = false;
    let mut doc = String::new();
    for line in source.lines() {
        let line = line.trim();
        if line == opening {
            inside = true;
        } else if !inside {
            continue;
        } else if line == "}" {
            break;
        } else if let Some(text) = line.strip_prefix("///") {
            if !doc.is_empty() {
                doc.push(' ');
            }
            doc.push_str(text.trim());
        } else if let Some(field) = line.strip_prefix("pub ").and_then(|l| l.split_once(':')) {
            // Operators need no links between doc comments.
            let plain = std::mem::take(&mut doc).replace("[`", "`").replace("`]", "`");
            docs.insert(field.0.to_owned(), plain);
        }
    }
    docs
}

fn docs() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for (section, source, type_name) in SOURCES {
        for (field, doc) in field_docs(source, type_name) {
            let key = if section.is_empty() {
                field
            } else {
                format!("{section}.{field}")
            };
            all.insert(key, doc);
        }
    }
    all
}

fn leaves() -> Vec<Leaf> {
    let mut found = Vec::new();
    if let Ok(Value::Table(table)) = Value::try_from(Settings::default()) {
        collect(&table, "", &docs(), &mut found);
    }
    found
}

fn collect(table: &toml::Table, section: &str, docs: &BTreeMap<String, String>, found: &mut Vec<Leaf>) {
    for (name, value) in table {
        let key = if section.is_empty() {
            name.clone()
        } else {
            format!("{section}.{name}")
        };
        let empty_list = EXAMPLES.iter().any(|(section, _)| *section == key);
        match value {
            _ if empty_list => {}
            Value::Table(inner) => collect(inner, &key, docs, found),
            leaf => found.push(Leaf {
                section: section.to_owned(),
                name: name.clone(),
                default: leaf.clone(),
                doc: docs.get(&key).cloned().unwrap_or_default(),
            }),
        }
    }
}

pub(super) fn keys() -> Vec<String> {
    let mut keys: Vec<String> = leaves().iter().map(Leaf::key).collect();
    keys.extend(EXAMPLES.iter().map(|(section, _)| (*section).to_owned()));
    keys.extend(SECTIONS.map(str::to_owned));
    keys.extend(["match", "never", "always", "strategies"].map(|k| format!("policy.workloads.{k}")));
    keys
}

pub(super) fn default_of(key: &str) -> Option<String> {
    leaves()
        .into_iter()
        .find(|l| l.key() == key)
        .map(|l| l.default.to_string())
}

pub(super) fn example(key: &str) -> Option<String> {
    if let Some(leaf) = leaves().into_iter().find(|l| l.key() == key) {
        return Some(format!("{} = {}", leaf.name, leaf.default));
    }
    match key {
        "policy.workloads.match" => Some("match = \"redis*\"".into()),
        "policy.workloads.never" | "policy.workloads.always" => {
            Some(format!("{} = true", key.rsplit('.').next().unwrap_or_default()))
        }
        _ => EXAMPLES
            .iter()
            .filter(|(section, _)| {
                key == *section || key.strip_prefix(section).is_some_and(|k| k.starts_with('.'))
            })
            .find_map(|(_, lines)| lines.first().map(|l| (*l).to_owned())),
    }
}

fn sections(leaves: &[Leaf]) -> Vec<String> {
    let mut order: Vec<String> = SECTIONS.map(str::to_owned).to_vec();
    for leaf in leaves {
        if !order.contains(&leaf.section) {
            order.push(leaf.section.clone());
        }
    }
    order
}

fn wrapped(text: &str, prefix: &str, out: &mut String) {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && prefix.len() + line.chars().count() + 1 + word.chars().count() > 100 {
            let _ = writeln!(out, "{prefix}{line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() {
        let _ = writeln!(out, "{prefix}{line}");
    }
}

/// A configuration file with every setting, its meaning and its default, all commented out.
pub fn default_file() -> String {
    let leaves = leaves();
    let docs = docs();
    let mut out = String::from(
        "# homeostat works without a configuration file. Every setting is shown with its default, commented out.\n\
         # A file in homeostat.d/*.toml beside this one overrides it. After a change: homeostat config check, then\n\
         # systemctl reload homeostat.\n",
    );
    for section in sections(&leaves) {
        out.push('\n');
        wrapped(docs.get(&section).map_or("", String::as_str), "# ", &mut out);
        let _ = writeln!(out, "[{section}]");
        for leaf in leaves.iter().filter(|l| l.section == section) {
            out.push('\n');
            wrapped(&leaf.doc, "# ", &mut out);
            let _ = writeln!(out, "#{} = {}", leaf.name, leaf.default);
        }
    }
    for section in reference().into_iter().filter(|s| !s.example.is_empty()) {
        out.push('\n');
        wrapped(&section.meaning, "# ", &mut out);
        let _ = writeln!(out, "# For example:\n#{}", section.header);
        for line in section.example {
            let _ = writeln!(out, "#{line}");
        }
    }
    out.push_str("\n# All settings of single strategies, with their defaults and ranges:\n");
    for setting in of_strategies() {
        let text = format!(
            "{} = {{ {} = {} }}: from {} to {}; {}",
            setting.strategy, setting.name, setting.default, setting.low, setting.high, setting.help
        );
        wrapped(&text, "# ", &mut out);
    }
    out
}

/// The settings of single strategies, as the strategies have them.
pub fn of_strategies() -> Vec<&'static Setting> {
    homeostat_strategies::all()
        .iter()
        .flat_map(|strategy| strategy.settings())
        .collect()
}

/// A section of the configuration, as the reference describes it.
#[derive(Debug)]
pub struct Section {
    /// Its header, with brackets.
    pub header: String,
    /// Its purpose; may hold code between back quotes, as all texts here.
    pub meaning: String,
    /// Its settings; none where an example says more.
    pub settings: Vec<SettingText>,
    /// Lines that are right below the header.
    pub example: &'static [&'static str],
}

/// One setting, as the reference describes it.
#[derive(Debug)]
pub struct SettingText {
    /// Its name within the section.
    pub name: String,
    /// Its default, as TOML.
    pub default: String,
    /// Its effect.
    pub meaning: String,
}

/// Every section with its settings: source of the documentation and the manual page.
pub fn reference() -> Vec<Section> {
    let leaves = leaves();
    let docs = docs();
    let meaning = |section: &str| docs.get(section).cloned().unwrap_or_default();
    let mut all: Vec<Section> = sections(&leaves)
        .into_iter()
        .map(|section| Section {
            header: format!("[{section}]"),
            meaning: meaning(&section),
            settings: leaves
                .iter()
                .filter(|l| l.section == section)
                .map(|l| SettingText {
                    name: l.name.clone(),
                    default: l.default.to_string(),
                    meaning: l.doc.clone(),
                })
                .collect(),
            example: &[],
        })
        .collect();
    all.extend(EXAMPLES.iter().map(|(section, lines)| Section {
        header: if *section == "policy.workloads" {
            format!("[[{section}]]")
        } else {
            format!("[{section}]")
        },
        meaning: meaning(section),
        settings: Vec::new(),
        example: lines,
    }));
    all
}

/// The beginning of the reference.
pub fn introduction() -> String {
    format!(
        "homeostat works without a configuration file. If there is one it is `{}`; files in\n\
         `/etc/homeostat/homeostat.d/*.toml` are read after it in the order of their names, and `--set key=value` on\n\
         the command line of `homeostat run` comes last. Later layers win; lists of rules are joined, those of later\n\
         layers first. `homeostat config check` says what is wrong and where, `homeostat config show` what is in\n\
         force, `systemctl reload homeostat` (SIGHUP) reads everything again: a file with an error changes nothing.\n\
         State is kept in `{}`.",
        super::MAIN_FILE,
        Paths::default().state_directory.display(),
    )
}

/// The reference as a page of the documentation.
pub fn markdown() -> String {
    let mut out = String::from("# Configuration\n\n");
    out.push_str("<!-- Made by `homeostat config default --markdown` from the source; a test keeps it in step. -->\n\n");
    let _ = writeln!(out, "{}", introduction());
    for section in reference() {
        let _ = writeln!(out, "\n## `{}`\n", section.header);
        if !section.meaning.is_empty() {
            let _ = writeln!(out, "{}\n", section.meaning);
        }
        if !section.example.is_empty() {
            let _ = writeln!(
                out,
                "```toml\n{}\n{}\n```",
                section.header,
                section.example.join("\n")
            );
            continue;
        }
        out.push_str("| setting | default | meaning |\n|---|---|---|\n");
        for setting in section.settings {
            let _ = writeln!(
                out,
                "| `{}` | `{}` | {} |",
                setting.name,
                setting.default,
                setting.meaning.replace('|', "\\|")
            );
        }
    }
    out.push_str("\n### Settings of single strategies\n\n| strategy | setting | default | range | meaning |\n|---|---|---|---|---|\n");
    for setting in of_strategies() {
        let _ = writeln!(
            out,
            "| {} | `{}` | `{}` | {} to {} | {} |",
            setting.strategy,
            setting.name,
            setting.default,
            setting.low,
            setting.high,
            setting.help.replace('|', "\\|")
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_meaning() {
        let without: Vec<String> = leaves()
            .iter()
            .filter(|l| l.doc.is_empty())
            .map(Leaf::key)
            .collect();
        assert_eq!(without, Vec::<String>::new());
        for (section, _) in EXAMPLES {
            assert!(
                docs().get(*section).is_some_and(|d| !d.is_empty()),
                "{section} has no meaning"
            );
        }
    }

    #[test]
    fn the_default_file_says_nothing_and_uncommented_it_says_the_defaults() {
        let text = default_file();
        let nothing: Settings = toml::from_str(&text).unwrap();
        assert_eq!(nothing, Settings::default());
        let until_examples = text.split("# For example:").next().unwrap();
        let spoken: String = until_examples
            .lines()
            .map(|l| match l.strip_prefix('#') {
                Some(rest) if !rest.starts_with(' ') => format!("{rest}\n"),
                _ => format!("{l}\n"),
            })
            .collect();
        assert!(spoken.contains("\nage_min_s = "), "{spoken}");
        assert_eq!(toml::from_str::<Settings>(&spoken).unwrap(), Settings::default());
    }

    #[test]
    fn the_examples_are_valid() {
        let mut text = String::new();
        for (section, lines) in EXAMPLES {
            let header = if *section == "policy.workloads" {
                format!("[[{section}]]")
            } else {
                format!("[{section}]")
            };
            text.push_str(&format!("{header}\n{}\n", lines.join("\n")));
        }
        let settings: Settings = toml::from_str(&text).unwrap();
        assert_eq!(super::super::complaints(&settings), vec![]);
        assert_eq!(settings.meters.configured.len(), 3);
        assert_eq!(settings.policy.discovery, Settings::default().policy.discovery);
        assert!(settings.policy.workloads[0].never);
    }

    #[test]
    fn the_page_of_the_book_is_in_step() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        if std::env::var_os("HOMEOSTAT_UPDATE_DOCS").is_some() {
            std::fs::write(&page, markdown()).unwrap();
        }
        let written = std::fs::read_to_string(&page).unwrap();
        assert_eq!(written, markdown(), "run this test with HOMEOSTAT_UPDATE_DOCS=1");
    }
}
