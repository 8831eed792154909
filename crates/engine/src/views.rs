//! Copies the mind's state for people.

use crate::engine::Engine;
use crate::experiment::{Experiment, Phase};
use crate::meters;
use crate::view::{
    self, Budget, Calibration, Change, Host, Meter, Proposal, SCHEMA, Stage, Status, TrialBlock, Workload,
    finite, finite_or_zero,
};
use crate::watched::Watched;
use homeostat_model::{ExperimentKind, Nanoseconds};

/// Span over which it is told for how much of the time a meter counted.
const COUNTED_SPAN: Nanoseconds = Nanoseconds::from_secs(60);

/// Waits shorter than this are not worth a word.
const WAITS_FROM: Nanoseconds = Nanoseconds::from_secs(10);
/// Process ids listed per workload.
const PIDS_MAX: usize = 16;
/// Blocks of a running trial that are shown.
const BLOCKS_MAX: usize = 60;
/// Workloads listed; the rest is counted.
const LISTED_MAX: usize = 200;

impl Engine {
    /// What people see.
    pub fn view(&self) -> Status {
        let profile = self.policy.profile;
        let other_profile = |id: &homeostat_model::StrategyId| {
            let mut all = self.strategies.iter();
            all.any(|s| s.id() == *id && s.works_in(profile).is_err())
        };
        let mut workloads: Vec<Workload> = self
            .workloads
            .values()
            .filter(|w| !w.gone)
            .map(|w| self.workload_view(w))
            .collect();
        workloads.sort_by(|a, b| {
            (b.stage > Stage::Ignored)
                .cmp(&(a.stage > Stage::Ignored))
                .then(b.cpus.total_cmp(&a.cpus))
                .then(b.resident_bytes.cmp(&a.resident_bytes))
                .then(a.name.cmp(&b.name))
        });
        let ignored = workloads.len().saturating_sub(LISTED_MAX) as u32;
        workloads.truncate(LISTED_MAX);
        Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            at_unix: self.unix,
            mode: self.policy.mode.to_string(),
            paused: self.paused,
            machine: self.machine.fingerprint(),
            host: self.host_view(),
            machine_refusals: self
                .refusals
                .iter()
                // What belongs to another profile says nothing about the machine.
                .filter(|(id, _)| !other_profile(id))
                .map(|(id, why)| format!("{id}: {why}"))
                .collect(),
            workloads,
            workloads_ignored: ignored,
            experiments: self
                .experiments
                .values()
                .map(|e| self.experiment_view(e))
                .collect(),
            in_force: self.changes_view(),
            outcomes: self.outcomes.iter().cloned().collect(),
            advice: self.advice.values().cloned().collect(),
            budget: self.budget_view(),
            calibration: Calibration {
                placebos: self.placebos,
                false_accepts: self.false_accepts,
                tries: self.discovery.tries(),
                accepts: self.discovery.accepts(),
                alpha_next: finite_or_zero(self.discovery.next_alpha()),
            },
            ..Status::default()
        }
    }

    fn host_view(&self) -> Host {
        let sample = &self.machine_sample;
        let share = |time: Nanoseconds| time.share_of(self.machine_interval);
        let cpus = self.machine.cpus.len() as u32;
        Host {
            cpus,
            // The kernel accounts in ticks, and of idle CPUs late: over a short interval its sums exceed what there is.
            cpus_busy: share(sample.cpu_busy).min(f64::from(cpus)),
            cpus_stolen: share(sample.cpu_steal),
            memory_bytes: self.machine.memory.0,
            memory_available_bytes: sample.memory_available.0,
            pressure_cpu: share(sample.pressure_cpu.some),
            pressure_memory: share(sample.pressure_memory.some),
            pressure_io: share(sample.pressure_io.some),
        }
    }

    fn workload_view(&self, w: &Watched) -> Workload {
        let sample = w.sample.as_ref();
        Workload {
            name: w.workload.id.clone(),
            kind: w.workload.kind,
            program: w.workload.program.clone(),
            fingerprint: w.workload.fingerprint.to_string(),
            owner: w.workload.owner.to_string(),
            pids: w
                .workload
                .processes
                .iter()
                .take(PIDS_MAX)
                .map(|p| i64::from(p.pid))
                .collect(),
            processes: w.workload.processes.len() as u32,
            age_s: sample.map_or(0.0, |s| s.age.as_secs_f64()),
            cpus: finite_or_zero(w.load.cpus),
            resident_bytes: sample.map_or(0, |s| s.resident.0),
            huge_bytes: sample.and_then(|s| s.huge).map(|b| b.0),
            stage: w.stage,
            undone: w.undone_by_a_person,
            summary: match self.waiting(w) {
                Some(waits) => format!("{}; {waits}", w.summary),
                None => w.summary.clone(),
            },
            meter: w.meter.as_ref().map(|m| {
                let counted = w
                    .series
                    .counted(&m.candidate.id, self.now.saturating_sub(COUNTED_SPAN));
                Meter {
                    id: m.candidate.id.clone(),
                    unit: m.candidate.unit.clone(),
                    rate: finite_or_zero(m.assessment.rate),
                    noise: finite_or_zero(m.assessment.noise),
                    cost: finite_or_zero(m.assessment.cost),
                    counted: finite_or_zero(counted),
                    lag_s: if counted < 1.0 {
                        meters::lag(&m.candidate, &w.series).as_secs_f64()
                    } else {
                        // What is counted all the time is of the reading's own time, whatever it would be otherwise.
                        0.0
                    },
                    objective: w.objective.words().to_owned(),
                    objective_reason: w.objective_reason.to_owned(),
                }
            }),
            meters: w.candidates.as_slice().into(),
            proposal: w
                .proposed
                .as_ref()
                .filter(|_| w.stage == Stage::Proposed)
                .map(|p| Proposal {
                    id: format!("{}/{}", p.strategy, w.workload.id),
                    strategy: p.strategy.clone(),
                    hypothesis: p.proposal.hypothesis.clone(),
                    predicted: p.proposal.predicted.into(),
                    risk: p.proposal.risk.clone(),
                    design: format!(
                        "randomised on/off blocks judged by {}; undone unless a gain of {:.0} % is proven{}",
                        w.objective.words(),
                        self.policy.trial.gate * 100.0,
                        self.expected_costs(&w.workload.id)
                            .map_or_else(String::new, |costs| format!("; {costs}"))
                    ),
                }),
            decisions: w.decisions.iter().cloned().collect(),
        }
    }

    /// Since when and for what a workload waits, for people; nothing is said of waits that are short.
    fn waiting(&self, w: &Watched) -> Option<String> {
        let id = &w.workload.id;
        let (since, what) = match w.stage {
            Stage::Considered => (w.judging_since, w.reads_on.clone()?),
            Stage::Proposed => (w.proposed.as_ref()?.at, self.waits_for(id)?),
            Stage::Trying => {
                let e = self.experiments.values().find(|e| e.setup.panel.has(id))?;
                let Phase::Block(block) = &e.phase else {
                    return None;
                };
                let (since, what, left) = block.waits()?;
                let text = format!(
                    "{what} in block {}; the trial is given up after {left} more",
                    block.index
                );
                (since, text)
            }
            _ => return None,
        };
        let waited = self.now.saturating_sub(since);
        (waited >= WAITS_FROM).then(|| format!("waits since {waited}: {what}"))
    }

    fn experiment_view(&self, e: &Experiment) -> view::Experiment {
        let phase = match &e.phase {
            Phase::Preparing => "preparing",
            Phase::Stage
                if e.staged
                    .as_ref()
                    .is_some_and(|s| s.measuring_since(self.now).is_some()) =>
            {
                "measuring"
            }
            Phase::Stage => "washout",
            Phase::Block(b) if b.measuring(self.now) => "measuring",
            Phase::Block(_) => "washout",
            Phase::Concluding => "concluding",
        };
        view::Experiment {
            id: e.setup.id,
            kind: e.setup.kind,
            strategy: e.setup.strategy.clone(),
            workload: e.setup.panel.lead().workload.clone(),
            others: e.setup.panel.others(),
            phase: phase.to_owned(),
            prepared: finite_or_zero(e.prepared),
            blocks: e.blocks.len() as u32,
            latest: latest(e),
            on: e.on,
            washout_s: e.washout.as_secs_f64(),
            measured_s: e.measured().as_secs_f64(),
            effect: e.effect_told().map(Into::into),
            evidence: finite_or_zero(e.evidence()),
            evidence_needed: finite_or_zero(1.0 / e.setup.parameters.alpha),
            elapsed_s: (self.now - e.setup.started).as_secs_f64(),
            budget_s: e.setup.budget.as_secs_f64(),
            stalled_s: e.stalled.as_secs_f64(),
            bloat_bytes: e.bloat.0,
            lost_work_s: finite_or_zero(exposure_of(e) / 100.0),
            own_cpu_s: e.beside.own_cpu.as_secs_f64(),
        }
    }

    fn changes_view(&self) -> Vec<Change> {
        let on_trial = |action| self.experiments.values().any(|e| e.owns(action));
        self.changes
            .iter()
            .filter(|(action, c)| !c.leaving && !on_trial(**action))
            .map(|(action, c)| {
                let guard = self.guard_of(*action);
                Change {
                    action: *action,
                    strategy: c.strategy.clone(),
                    workload: c.action.workload.clone(),
                    text: c.action.why.clone(),
                    effect: guard.map(|g| g.effect.into()),
                    since_unix: c.since_unix,
                    guard: match (guard, self.steered_by(*action)) {
                        (Some(g), _) => g.describe(self.now),
                        (None, Some(controller)) => format!("held by the controller {controller}; not tried"),
                        (None, None) => "kept from an earlier run; not guarded".to_owned(),
                    },
                    on: c.on && c.settled,
                }
            })
            .collect()
    }

    fn budget_view(&self) -> Budget {
        Budget {
            own_cpu: finite_or_zero(self.own.cpu()),
            own_resident_bytes: self.own.resident.0,
            canary_cpu: finite_or_zero(self.own.canary.cpu()),
            canary_resident_bytes: self.own.canary.resident().0,
            experiments_last_hour: self.starts.total() as u32,
            experiments_per_hour_max: self.policy.experiments_per_hour_max,
            harm_exposure_day: finite_or_zero(
                self.exposure.total() + self.experiments.values().map(exposure_of).sum::<f64>(),
            ),
            harm_exposure_per_day_max: finite_or_zero(self.policy.harm_exposure_per_day_max),
            owners: self.owner_budgets(),
            stalled_s: self.stalled.as_secs_f64(),
            bloat_bytes: self.changes.values().map(|c| c.bloat.0).sum(),
            ..Budget::default()
        }
    }
}

/// What a running trial has cost so far in percent × seconds. A placebo switches nothing.
fn exposure_of(e: &Experiment) -> f64 {
    if e.setup.kind == ExperimentKind::Placebo {
        0.0
    } else {
        e.harm_exposure()
    }
}

/// The last blocks of a trial. A rollout knows something after a block only once its round trips have begun.
fn latest(e: &Experiment) -> Vec<TrialBlock> {
    let skip = e.known.len().min(e.blocks.len()).saturating_sub(BLOCKS_MAX);
    // Counted from the end: the two lists end with the same block.
    let count = e.known.len().min(e.blocks.len());
    let blocks = &e.blocks[e.blocks.len() - count..];
    let known = &e.known[e.known.len() - count..];
    blocks
        .iter()
        .zip(known)
        .skip(skip)
        .map(|(block, known)| TrialBlock {
            on: block.on,
            broken: block.broken,
            score: finite(block.score),
            effect: known.effect.into(),
            evidence: finite_or_zero(known.evidence),
        })
        .collect()
}
