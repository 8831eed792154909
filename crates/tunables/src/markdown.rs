//! The reference in docs/tunables.md, made from the catalogue.

use crate::catalogue::{Catalogue, Tunable};
use std::fmt::Write as _;

const HEAD: &str = "# Settings of the kernel that homeostat knows

Made from `crates/tunables/src/catalogue.toml`; do not edit (`HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-tunables`).

`homeostat tunable list` shows them as they are on a machine, `homeostat tunable show NAME` one of them with who set it. A
`*` stands for the device. *Default* is the kernel's own value, before anything is written at boot; \"about\" means that
the kernel computes it from more than can be seen afterwards. *Type*: **dynamic** settings can be changed at any time;
**boot** ones stand on the kernel's command line only; **restricted** ones can stop the machine or take something away
from it, and `homeostat tunable set` wants `--restricted` for them.
";

/// The whole page.
pub fn reference(catalogue: &Catalogue) -> String {
    let mut out = HEAD.to_owned();
    let _ = write!(
        out,
        "\n{} settings in {} groups:\n\n",
        catalogue.tunables.len(),
        catalogue.groups.len()
    );
    for group in &catalogue.groups {
        let of = catalogue.tunables.iter().filter(|t| t.group == group.id).count();
        let anchor: String = group
            .title
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let _ = writeln!(
            out,
            "* [{}](#{anchor}) ({of}, `--group {}`)",
            group.title, group.id
        );
    }
    for group in &catalogue.groups {
        let _ = write!(out, "\n## {}\n", group.title);
        for tunable in catalogue.tunables.iter().filter(|t| t.group == group.id) {
            entry(tunable, &mut out);
        }
    }
    out.push_str("\n## Gone\n\nWhat `homeostat tunable check` calls ignored.\n\n| setting | since | |\n|---|---|---|\n");
    for gone in &catalogue.gone {
        let _ = writeln!(out, "| `{}` | {} | {} |", gone.name, gone.since, gone.text);
    }
    out.push_str(
        "\n## Values that work against the machine\n\nWhat `homeostat tunable check` warns of.\n\n| setting | when | |\n|---|---|---|\n",
    );
    for rule in &catalogue.against {
        let when = if rule.when.is_empty() {
            rule.words.join(", ")
        } else {
            rule.when.replace("||", "or").replace("&&", "and")
        };
        let _ = writeln!(out, "| `{}` | `{when}` | {} |", rule.name, rule.text);
    }
    out
}

fn entry(t: &Tunable, out: &mut String) {
    let _ = write!(out, "\n### `{}`\n\n{}\n\n", t.name, t.what);
    let unit = if t.unit.is_empty() {
        String::new()
    } else {
        format!(", unit: {}", t.unit)
    };
    let _ = writeln!(
        out,
        "Values: {}{unit}. Default: {}. Type: {}. Since Linux {}.",
        t.values,
        t.default_text(),
        t.kind.name(),
        t.since
    );
    let file = match t.path.strip_prefix("cmdline:") {
        Some(parameter) => format!("parameter `{parameter}` of the kernel's command line"),
        None => format!("`{}`", t.path),
    };
    let also = match &t.parameter {
        Some(parameter) => format!("; also by `{parameter}=` on the kernel's command line"),
        None => String::new(),
    };
    let strategy = match &t.strategy {
        Some(strategy) => format!(" homeostat experiments with it: strategy `{strategy}`."),
        None => String::new(),
    };
    let _ = writeln!(out, "File: {file}{also}. Source: {}.{strategy}", t.source);
}
