//! What is published keeps its shape: the names, the types and the order of all fields of what `--json` prints, the control
//! socket answers and a recording holds. `shapes.txt` has three values of each: `full` (all there), `bare` (nothing that may
//! be absent) and `old` (without the fields that earlier versions lacked). `made` is an experiment of the history and what is
//! printed of it.

use homeostat_daemon::report::PastExperiment;
use homeostat_daemon::{api, dossier, memory, meters, places, report, tunables};
use homeostat_model::ExperimentRecord;
use serde::Serialize;
use serde::de::{DeserializeOwned, Error};

const SHAPES: &str = include_str!("shapes.txt");

/// What the type makes of a text that it reads.
fn again<T: Serialize + DeserializeOwned>(text: &str) -> Result<String, serde_json::Error> {
    serde_json::to_string(&serde_json::from_str::<T>(text)?)
}

fn written(name: &str, text: &str) -> Result<String, serde_json::Error> {
    match name {
        "api::Status" => again::<api::Status>(text),
        "api::Explanation" => again::<api::Explanation>(text),
        "api::Plan" => again::<api::Plan>(text),
        "api::StoryLine" => again::<api::StoryLine>(text),
        "report::Diagnosis" => again::<report::Diagnosis>(text),
        "report::Past" => again::<report::Past>(text),
        "dossier::Dossier" => again::<dossier::Dossier>(text),
        "places::Topology" => again::<places::Topology>(text),
        "places::Locality" => again::<places::Locality>(text),
        "memory::Memory" => again::<memory::Memory>(text),
        "meters::Known" => again::<meters::Known>(text),
        "meters::Listing" => again::<meters::Listing>(text),
        "meters::Test" => again::<meters::Test>(text),
        "tunables::Tunables" => again::<tunables::Tunables>(text),
        "tunables::Check" => again::<tunables::Check>(text),
        "tunables::OneChange" => again::<tunables::OneChange>(text),
        "model::ExperimentRecord" => again::<ExperimentRecord>(text),
        _ => Err(serde_json::Error::custom("no published type")),
    }
}

#[test]
fn what_is_published_keeps_its_shape() {
    let mut seen = 0;
    for line in SHAPES.lines() {
        let mut parts = line.splitn(3, ' ');
        let (Some(name), Some(form), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
            panic!("{line:?} is not a name, a form and a value");
        };
        seen += 1;
        match (form, written(name, text)) {
            ("full" | "bare", Ok(again)) => assert_eq!(again, text, "{name} {form}"),
            ("old", Ok(again)) => assert!(again.len() >= text.len(), "{name} {form}: {again}"),
            ("made", _) => {
                let (record, printed) = text.split_once(" => ").unwrap_or_default();
                let record: ExperimentRecord = serde_json::from_str(record).unwrap();
                let made = serde_json::to_string(&PastExperiment::from(&record)).unwrap();
                assert_eq!(made, printed, "{name} {form}");
            }
            (_, result) => panic!("{name} {form}: {result:?}"),
        }
    }
    assert_eq!(seen, 49);
}
