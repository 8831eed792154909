//! The text of the interface and the types that are sent must say the same.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

const API: &str = include_str!("../src/api.rs");
const VIEW: &str = include_str!("../../engine/src/view.rs");
const MODEL: &str = include_str!("../../model/src/experiment.rs");
type Fields = Vec<(String, String)>;

/// `type Name (field: type, …)` of the interface.
fn interface_types() -> BTreeMap<String, Fields> {
    let text: String = homeostat_daemon::control::INTERFACE
        .lines()
        .filter(|l| !l.trim_start().starts_with('#'))
        .map(|l| format!("{l}\n"))
        .collect();
    text.split("\ntype ")
        .skip(1)
        .map(|part| {
            let (name, rest) = part.split_once('(').unwrap();
            let body = rest.split(')').next().unwrap();
            let fields = body.split(',').map(|f| f.split_once(':').unwrap());
            (
                name.trim().to_owned(),
                fields
                    .map(|(n, t)| (n.trim().to_owned(), t.trim().to_owned()))
                    .collect(),
            )
        })
        .collect()
}

fn varlink_type(rust: &str) -> String {
    if let Some(inner) = rust.strip_prefix("Option<").and_then(|r| r.strip_suffix('>')) {
        return format!("?{}", varlink_type(inner));
    }
    if let Some(inner) = rust.strip_prefix("Vec<").and_then(|r| r.strip_suffix('>')) {
        return format!("[]{}", varlink_type(inner));
    }
    match rust {
        "String" | "WorkloadId" | "StrategyId" | "MeterId" | "Stage" | "Verdict" | "WorkloadKind"
        | "ExperimentKind" | "LossIn" => "string".into(),
        "u32" | "u64" | "i64" | "Nanoseconds" | "ActionId" | "ExperimentId" => "int".into(),
        "f64" => "float".into(),
        other => other.into(),
    }
}

/// `pub struct Name { pub field: type, … }` of the source.
fn sent_types() -> BTreeMap<String, Fields> {
    let advice = MODEL.split_once("\n/// Something a person could do").unwrap().1;
    let sources = [API, VIEW, advice];
    sources
        .iter()
        .flat_map(|source| source.split("\npub struct ").skip(1))
        .map(|part| {
            let (name, rest) = part.split_once(" {").unwrap();
            let body = rest.split("\n}").next().unwrap();
            // What is not sent stands last.
            let sent = body.split("#[serde(skip)]").next().unwrap();
            let fields = sent
                .lines()
                .filter_map(|l| l.trim().strip_prefix("pub ")?.strip_suffix(',')?.split_once(": "))
                .map(|(n, t)| (n.to_owned(), varlink_type(t)))
                .collect();
            (name.to_owned(), fields)
        })
        .collect()
}

#[test]
fn every_type_of_the_interface_is_the_type_that_is_sent() {
    let (interface, sent) = (interface_types(), sent_types());
    assert!(interface.len() >= 14, "{interface:?}");
    assert_eq!(interface, sent);
}

#[test]
fn every_method_of_the_interface_is_served() {
    let source = include_str!("../src/control.rs");
    let methods: Vec<&str> = homeostat_daemon::control::INTERFACE
        .lines()
        .filter_map(|l| l.strip_prefix("method ")?.split('(').next())
        .collect();
    assert_eq!(methods.len(), 10);
    for method in methods {
        assert!(
            source.contains(&format!("\"{method}\" =>")),
            "{method} is not served"
        );
    }
}
