//! The stable shape of homeostat's state: `--json`, the answers of the control socket, and queries on the state.

use homeostat_engine::Story;
pub use homeostat_engine::view::*;
use homeostat_model::Nanoseconds;
pub use homeostat_model::{Advice, AdvisedSetting, ExperimentKind, MeterId, Verdict, WorkloadId};
use serde::{Deserialize, Serialize};

/// Whether a sentence needs no stage before it: it begins with the stage, or a person decided.
pub fn is_said_by(stage: &str, text: &str) -> bool {
    text.strip_prefix(stage).is_some_and(|rest| rest.starts_with(':'))
        || text.starts_with(homeostat_engine::UNDONE_BY_A_PERSON)
}

/// A meter that was examined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeterCandidate {
    /// Name.
    pub id: MeterId,
    /// The unit of one count.
    pub unit: String,
    /// Cost to the workload of one count in nanoseconds; 0 = reading costs the workload nothing.
    pub cost_per_count_ns: Nanoseconds,
    /// Why it cannot be used, with the remedy; absent when it can.
    pub refused: Option<String>,
}

impl From<&homeostat_model::MeterCandidate> for MeterCandidate {
    fn from(m: &homeostat_model::MeterCandidate) -> Self {
        Self {
            id: m.id.clone(),
            unit: m.unit.clone(),
            cost_per_count_ns: m.cost_per_count,
            refused: m.refused.clone(),
        }
    }
}

/// All about one workload (`homeostat explain --json`, `io.homeostat.Explain`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// The workload.
    pub workload: Workload,
    /// The examined meters, with refusals.
    pub meters: Vec<MeterCandidate>,
    /// The chain of decisions, oldest first.
    pub decisions: Vec<Decision>,
    /// Its running experiments.
    pub experiments: Vec<Experiment>,
    /// Its changes in force.
    pub in_force: Vec<Change>,
    /// Its experiments that ended, newest first.
    pub outcomes: Vec<Outcome>,
    /// Advice for it.
    pub advice: Vec<Advice>,
}

/// Planned trials, and reasons against the rest (`homeostat plan --json`, `io.homeostat.GetPlan`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// Why nothing at all can be done on this host; empty when something can.
    pub machine_refusals: Vec<String>,
    /// Workloads with a proposal that waits.
    pub proposed: Vec<Workload>,
    /// Workloads on which something is being tried, or on which a change is in force.
    pub active: Vec<Workload>,
    /// Workloads that are still being measured.
    pub undecided: Vec<Workload>,
    /// Workloads for which there is nothing to do, with the reason in `summary`.
    pub declined: Vec<Workload>,
    /// Advice for people.
    pub advice: Vec<Advice>,
}

/// A line of the log (`homeostat run --log json`, `io.homeostat.Follow`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoryLine {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// When, seconds since the epoch.
    pub at_unix: u64,
    /// About which workload; absent = the host.
    pub workload: Option<String>,
    /// Stage the line belongs to.
    pub stage: String,
    /// The sentence.
    pub text: String,
    /// Whether an operator should see it.
    pub warning: bool,
}

impl StoryLine {
    /// A line of that time.
    pub fn new(at_unix: u64, story: &Story) -> Self {
        Self {
            schema: SCHEMA,
            at_unix,
            workload: story.workload.as_ref().map(ToString::to_string),
            stage: story.stage.to_string(),
            text: story.text.clone(),
            warning: story.warning,
        }
    }

    /// The line for people, without the time: workload, stage unless the sentence begins with it, sentence.
    pub fn sentence(&self) -> String {
        match &self.workload {
            Some(workload) if is_said_by(&self.stage, &self.text) => {
                format!("{workload} {}", self.text)
            }
            Some(workload) => format!("{workload} {}: {}", self.stage, self.text),
            None => self.text.clone(),
        }
    }
}

impl Explanation {
    /// All about one workload of the state.
    pub fn new(status: &Status, workload: &Workload) -> Self {
        let name = &workload.name;
        let tries = |first: &WorkloadId, others: &[WorkloadId]| first == name || others.contains(name);
        Self {
            schema: SCHEMA,
            workload: workload.clone(),
            meters: workload.meters.iter().map(Into::into).collect(),
            decisions: workload.decisions.to_vec(),
            experiments: those(&status.experiments, |e| tries(&e.workload, &e.others)),
            in_force: those(&status.in_force, |c| c.workload == *name),
            outcomes: those(&status.outcomes, |o| tries(&o.workload, &o.others)),
            advice: those(&status.advice, |a| a.workload.as_ref() == Some(name)),
        }
    }
}

fn those<T: Clone>(all: &[T], is: impl Fn(&&T) -> bool) -> Vec<T> {
    all.iter().filter(is).cloned().collect()
}

impl Plan {
    /// The plan in the state.
    pub fn new(status: &Status) -> Self {
        let of = |stages: &[Stage]| those(&status.workloads, |w| stages.contains(&w.stage));
        Self {
            schema: SCHEMA,
            machine_refusals: status.machine_refusals.clone(),
            proposed: of(&[Stage::Proposed]),
            active: of(&[Stage::Trying, Stage::Improved]),
            undecided: of(&[Stage::Considered, Stage::Observed]),
            declined: of(&[Stage::Declined, Stage::Ignored]),
            advice: status.advice.clone(),
        }
    }

    /// Whether every sampled workload is decided. CPU use needs two scans; until a program runs, nothing is settled.
    pub fn is_settled(&self) -> bool {
        let ran = |list: &[Workload]| list.iter().any(|w| w.cpus > 0.0);
        self.undecided.is_empty() && (ran(&self.proposed) || ran(&self.active) || ran(&self.declined))
    }
}

/// The answer to the question for a workload by whatever a person calls it.
#[derive(Clone, Debug, PartialEq)]
pub enum Found<'a, T = Workload> {
    /// It is this one.
    One(&'a T),
    /// Nothing has that name; these come near (at most five).
    Near(Vec<String>),
    /// Several are meant.
    Several(Vec<String>),
}

/// Names by which a person may call a workload.
pub trait Named {
    /// Its name.
    fn name(&self) -> &str;
    /// The program of its main process.
    fn program(&self) -> &str;
    /// Whether the process is one of its own.
    fn has_process(&self, pid: i32) -> bool;
}

impl Named for Workload {
    fn name(&self) -> &str {
        &self.name
    }
    fn program(&self) -> &str {
        &self.program
    }
    fn has_process(&self, pid: i32) -> bool {
        self.pids.contains(&i64::from(pid))
    }
}

/// Finds a workload of the state; see [`find_named`].
pub fn find_workload<'a>(status: &'a Status, name: &str) -> Found<'a> {
    find_named(&status.workloads, name)
}

/// Finds a workload by name, else by process id, program, or the start of its name.
pub fn find_named<'a, T: Named>(all: &'a [T], name: &str) -> Found<'a, T> {
    if let Some(w) = all.iter().find(|w| w.name() == name) {
        return Found::One(w);
    }
    let pid: Option<i32> = name.parse().ok();
    let ways: [&dyn Fn(&T) -> bool; 4] = [
        &|w| pid.is_some_and(|p| w.has_process(p)),
        &|w| w.name().strip_suffix(".service") == Some(name),
        &|w| w.program() == name,
        &|w| name.len() >= 2 && w.name().starts_with(name),
    ];
    for way in ways {
        let hits: Vec<&T> = all.iter().filter(|w| way(w)).collect();
        match hits.as_slice() {
            [] => {}
            [one] => return Found::One(one),
            several => return Found::Several(several.iter().map(|w| w.name().to_owned()).collect()),
        }
    }
    Found::Near(near_names(name, all.iter().map(Named::name)))
}

/// The names nearest to `wanted`, at most five.
pub fn near_names<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let wanted = wanted.to_lowercase();
    let mut ranked: Vec<(usize, &str)> = names
        .filter_map(|name| {
            let lower = name.to_lowercase();
            let distance = if !wanted.is_empty() && (lower.contains(&wanted) || wanted.contains(&lower)) {
                0
            } else {
                edit_distance(&wanted, &lower)
            };
            // With more than half of the letters different, a suggestion does not help.
            (distance * 2 <= wanted.chars().count().max(lower.chars().count())).then_some((distance, name))
        })
        .collect();
    ranked.sort();
    ranked
        .into_iter()
        .take(5)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// Levenshtein distance; names longer than 128 characters are cut.
fn edit_distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().take(128).collect();
    let b: Vec<char> = b.chars().take(128).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (diagonal + usize::from(ca != cb)).min(above + 1).min(row[j] + 1);
            diagonal = above;
        }
    }
    row[b.len()]
}
