//! The example of the report in the documentation, made from a real run.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_cli::page::page;
use homeostat_daemon::dossier::Dossier;
use std::path::Path;

/// What `homeostat report --json` printed after a real run, without the names of the machine.
fn example() -> Dossier {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/report/latency.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn the_example_in_the_documentation_is_what_the_program_writes() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/report-example.html");
    let wanted = page(&example());
    if std::env::var("HOMEOSTAT_UPDATE_DOCS").is_ok() {
        std::fs::write(&file, &wanted).unwrap();
    }
    assert!(
        std::fs::read_to_string(&file).unwrap_or_default() == wanted,
        "{} is not in step: HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-cli --test report",
        file.display()
    );
}

#[test]
fn the_verdict_of_the_example_follows_from_its_blocks() {
    let example = example();
    let accepted = example
        .experiments
        .iter()
        .find(|t| t.past.verdict.as_deref() == Some("accepted"))
        .unwrap();
    let trace = accepted.trace.as_ref().unwrap();
    assert_eq!(trace.len(), accepted.past.blocks.len());
    let width = |k: &homeostat_daemon::dossier::Known| k.effect.upper.unwrap() - k.effect.lower.unwrap();
    let known: Vec<_> = trace
        .iter()
        .filter(|k| k.effect.upper.is_some() && k.effect.lower.is_some())
        .collect();
    assert!(
        width(known.last().unwrap()) < width(known[0]),
        "the interval shrinks"
    );
    assert!(trace.last().unwrap().evidence >= 1.0 / accepted.past.alpha);
}
