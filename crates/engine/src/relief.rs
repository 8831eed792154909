//! Relief: protection from a loss that happens now.
//!
//! A program whose pages are taken from it loses most of its work within a second, and waits for nobody's passive
//! history. A strategy that protects ([`crate::Strategy::relieves`]) is therefore asked as soon as memory is short and a
//! workload has a meter, and what it proposes as urgent is made at once; that is the beginning of its trial. The proof
//! follows: the same coins release it for a block now and then, the same test decides, and what helps nobody goes.
//!
//! What is different from other trials: no passive history is waited for (its level would be a mixture of before and
//! after), so block lengths and stakes are taken from a table, and the circuit breaker waits for the first block that is
//! off; memory pressure, which puts other trials off, is the reason for this one; a running trial of something else makes
//! way; work per second judges, since the loss is waiting and not CPU time; and neighbours whose meter is found during
//! the trial become guardrails from then on, because the reader was of no interest before.
//!
//! A reader that ends before its trial has shown anything is no use to try, and one after another would use up the trials of an
//! hour: where that happened, the next one of that program is tried when it is a good deal older than that one became.

use crate::blocks::Objective;
use crate::engine::{Engine, Gone};
use crate::experiment::{Experiment, Phase};
use crate::panel::{BYSTANDERS_MAX, Guardrail, Panel};
use crate::policy::{Mode, Policy};
use crate::protocol::Command;
use crate::recovery;
use crate::strategy::{Opinion, Proposal};
use crate::view::Stage;
use crate::watched::{Proposed, Watched};
use homeostat_model::action::Target;
use homeostat_model::{
    ActionId, ExperimentId, ExperimentKind, Nanoseconds, StrategyId, WorkloadId, WorkloadSample,
};
use homeostat_statistics::TrialParameters;
use homeostat_statistics::block_length::Choice;
use std::collections::BTreeMap;

/// After memory was seen to be short it counts as that for so long.
const SHORT_FOR: Nanoseconds = Nanoseconds::from_secs(60);
/// Whether it is, is looked at this often, at least (seed 003: every 4 seconds); it costs some 100 µs.
pub(crate) const LOOK_EVERY: Nanoseconds = Nanoseconds::from_secs(4);
/// While it is and nobody is protected on trial, all processes are looked at at least so often (seconds): who reads is seen from
/// two looks.
pub(crate) const SCAN_SHORT_S: f64 = 2.0;
/// For so long after it became short, scans of all processes may cost more.
const HURRY: Nanoseconds = Nanoseconds::from_secs(300);
/// After an attempt the next one on the same workload waits for this.
pub(crate) const AGAIN: Nanoseconds = Nanoseconds::from_secs(60);
/// Faults that wait for storage, per second, from which a program counts as using memory that is not resident …
const FAULTS_MIN: f64 = 5.0;
/// … or bytes per second that it reads from storage …
const READS_MIN: f64 = 4.0 * 1024.0 * 1024.0;
/// … or here and there: 256 single pages.
const PAGES_MIN: f64 = 1024.0 * 1024.0;
/// Bytes per second that a program gets by read calls and not from storage, from which it works on what is in memory of its files.
const FROM_MEMORY_MIN: f64 = 32.0 * 1024.0 * 1024.0;
/// For so long after that it counts as doing so, whatever it does.
const USES_FILES_FOR: Nanoseconds = Nanoseconds::from_secs(300);
/// For the sake of one workload so many readers are contained at most.
const READERS_MAX: usize = 4;
/// A block is measured for at least this long where the settings offer it (seconds): losses and recoveries take a second
/// or two, and are large.
const MEASURED_S: f64 = 5.0;
/// Expected standard deviation of the difference of two blocks (log units). A guess, which sets the stakes only.
const SCALE: f64 = 0.5;

/// Readers that ended younger than this while they were tried are over before anything can be proven of them: the next one of
/// that program …
const SHORT_LIFE: Nanoseconds = Nanoseconds::from_secs(30);
/// … has to be so many times as old before it is tried as that one was when it was seen last …
const SHORT_LIFE_TIMES: u64 = 4;
/// … but not older than this.
const SHORT_LIFE_AWAITED_MAX: Nanoseconds = Nanoseconds::from_secs(60);
/// … and that for so long: then one of them may show that this has changed.
const SHORT_LIFE_FOR: Nanoseconds = Nanoseconds::from_secs(3600);
/// Programs of which that is remembered.
const SHORT_LIVED_MAX: usize = 256;

/// Readers that ended while they were tried, by their executable: how old the oldest was when it was seen last, and when the
/// first was.
pub(crate) type ShortLived = BTreeMap<String, (Nanoseconds, Nanoseconds)>;

/// Effects on which the bets are tuned (log units): what is lost and comes back is a tenth to all of the work, and so is the
/// noise. The usual targets, up to a fifth, would stake next to nothing against that.
const TARGETS: [f64; 5] = [0.1, 0.3, 0.7, 1.4, 2.0];
/// A block in which three quarters of the work are lost counts like one in which all of it is (log units): a program that lost
/// its pages does a hundredth of its work in one block and a third in the next, and both are the loss.
const LOSS_MAX: f64 = 1.4;

/// Chance that a block is off once the effect is plain. In simulated trials a loss of 90 % (50 %) is proven with 3 (4) off
/// blocks instead of 5 (6), and with 12 blocks in all instead of 10 (11). A fifth spares no more and takes longer.
const OFF_CHANCE: f64 = 0.25;

/// The parameters of such a trial, from those of the policy.
pub(crate) fn parameters(of_policy: &TrialParameters) -> TrialParameters {
    sparing(&TrialParameters {
        targets: TARGETS,
        loss_max: Some(LOSS_MAX),
        ..of_policy.clone()
    })
}

/// The same parameters, for a program to which each off block is damage.
pub(crate) fn sparing(of: &TrialParameters) -> TrialParameters {
    TrialParameters {
        off_chance: OFF_CHANCE,
        ..of.clone()
    }
}

impl Engine {
    /// Whether memory is short now, or was lately: pages come back that were taken.
    pub(crate) fn short_of_memory(&self) -> bool {
        self.short_at.is_some_and(|at| self.now - at < SHORT_FOR)
    }

    /// Whether memory has become short not long ago, and nobody is protected yet: then it is looked more often who takes it.
    pub(crate) fn in_a_hurry(&self) -> bool {
        let is_new = self.short_since.is_some_and(|at| self.now - at < HURRY);
        is_new && self.short_of_memory() && !self.protects_on_trial()
    }

    /// Whether a strategy may do something for this workload against a loss of memory.
    pub(crate) fn relieves(&self, id: &WorkloadId) -> bool {
        self.policy.mode == Mode::Act
            && self
                .strategies
                .iter()
                .any(|s| s.relieves() && self.relief_refusal(id, &s.id()).is_none())
    }

    /// Whether somebody is protected in a trial that runs.
    pub(crate) fn protects_on_trial(&self) -> bool {
        self.experiments.values().any(|e| e.setup.urgent)
    }

    /// Notes whether the last interval shows a shortage.
    pub(crate) fn note_shortage(&mut self) {
        if !self.short_of_memory() {
            self.short_since = None;
        }
        if self.machine_sample.is_short_of_memory(self.machine_interval) {
            self.short_at = Some(self.now);
            self.short_since.get_or_insert(self.now);
        }
    }

    /// Whether a workload uses memory that is not resident in it: it reads files, or waits for pages that were taken.
    pub(crate) fn lives_on_the_file_cache(&self, sample: &WorkloadSample) -> bool {
        let seconds = sample.interval.as_secs_f64();
        let reads = &sample.reads;
        self.short_of_memory()
            && seconds > 0.0
            && (sample.faults_major as f64 >= FAULTS_MIN * seconds
                || reads.from_storage.0 as f64 >= READS_MIN * seconds
                || reads.here_and_there().0 as f64 >= PAGES_MIN * seconds)
    }

    /// Whether a workload works on pages of files that are in memory, which are not resident in it: it gets much by read calls, and
    /// little of that from storage. (Calls that read pipes and some sockets look the same, and then it is looked at for nothing.) Who is
    /// known before memory becomes short has a meter by then.
    pub(crate) fn works_on_the_file_cache(&self, sample: &WorkloadSample) -> bool {
        let seconds = sample.interval.as_secs_f64();
        let from_memory = sample.reads.called.0.saturating_sub(sample.reads.from_storage.0);
        seconds > 0.0
            && from_memory as f64 >= FROM_MEMORY_MIN * seconds
            && sample.cpu.as_secs_f64() >= self.policy.cpu_min * seconds
    }

    /// Whether it did so in the last minutes. Who is contained, or reads what it finds in memory for a while, is the same
    /// reader as before: it is not to be looked at and left alone in turns.
    pub(crate) fn lived_on_the_file_cache(&self, w: &Watched) -> bool {
        w.used_files_at.is_some_and(|at| self.now - at < USES_FILES_FOR)
    }

    /// Asks the strategies that protect. Returns whether one of them proposes something.
    pub(crate) fn seek_relief(&mut self, id: &WorkloadId) -> bool {
        if self.paused || self.stopping.is_some() || self.policy.mode != Mode::Act {
            return false;
        }
        if !self.short_of_memory() && !self.expects_loss(id) {
            return false;
        }
        let is_asked = self.workloads.get(id).is_some_and(|w| {
            w.meter.is_some()
                && !w.gone
                && !w.inspecting
                && self.now >= w.relief_at
                && !w.proposed.as_ref().is_some_and(|p| p.proposal.urgent)
        });
        if !is_asked || self.something_leaves(id) {
            return false;
        }
        for index in 0..self.strategies.len() {
            if !self.strategies[index].relieves() {
                continue;
            }
            let strategy = self.strategies[index].id();
            if self.relief_refusal(id, &strategy).is_some() {
                continue;
            }
            let proposal = match self.opinion(id, index) {
                Some(Opinion::Propose(proposal)) => proposal,
                // What a person can do about it is of use now, not when the strategies are asked the next time.
                Some(Opinion::Decline(declined)) => {
                    self.advise(declined.advice);
                    continue;
                }
                _ => continue,
            };
            if proposal.urgent
                && !self.in_force_already(id, &proposal)
                && self.may_be_added(id, &strategy, &proposal)
            {
                // What was proven for these two is not proven once more.
                if let Some(pair) = self.proven_pair(id, &strategy, &proposal) {
                    return self.make_again(id, &pair, &proposal);
                }
                self.propose_relief(id, strategy, *proposal);
                return true;
            }
        }
        false
    }

    /// Whether a change of a strategy may be made beside what is in force of it. Another reader is another change, and no time
    /// is to be lost; for all else the strategy waits as for any workload that has what it proposed.
    fn may_be_added(&self, id: &WorkloadId, strategy: &StrategyId, proposal: &Proposal) -> bool {
        match proposal.target {
            Target::Reader(_) => {
                let of_it = self.guards.of(id).filter(|g| g.strategy == *strategy);
                of_it.count() < READERS_MAX
            }
            _ => self.has_enough(id, strategy).is_none(),
        }
    }

    /// Why a workload is not tried as a reader yet: those of its program were over before a trial showed anything, and it is
    /// not much older than they became.
    pub(crate) fn over_too_soon(&self, w: &Watched) -> Option<String> {
        let (lived, since) = self.short_lived.get(&w.workload.executable)?;
        let awaited = (*lived * SHORT_LIFE_TIMES).min(SHORT_LIFE_AWAITED_MAX);
        let age = w.sample.as_ref().map_or(Nanoseconds::ZERO, |s| s.age);
        (self.now - *since < SHORT_LIFE_FOR && age < awaited).then(|| {
            format!(
                "what {} reads was over before a trial showed anything, {lived} after its start or soon after; one that runs \
                 for {awaited} is tried",
                w.workload.program
            )
        })
    }

    /// A workload is gone. Where it is a reader that is being tried the trial is over, so that the next one is not left alone
    /// until the next coin.
    pub(crate) fn reader_is_gone(&mut self, id: &WorkloadId, gone: Gone) {
        let is_it = |action: &ActionId| {
            let target = self.changes.get(action).map(|c| &c.action.target);
            matches!(target, Some(Target::Reader(r)) if r.workload == *id)
        };
        let trials: Vec<ExperimentId> = self
            .experiments
            .iter()
            .filter(|(_, e)| e.setup.urgent && e.actions().iter().any(is_it))
            .map(|(trial, _)| *trial)
            .collect();
        if !trials.is_empty() {
            self.note_short_life(id);
        }
        for trial in trials {
            self.abort(trial, gone.of_the_reader(id));
        }
    }

    /// Remembers how old a reader was that ended while it was tried.
    pub(crate) fn note_short_life(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let age = w.sample.as_ref().map_or(Nanoseconds::ZERO, |s| s.age);
        let executable = w.workload.executable.clone();
        if age >= SHORT_LIFE {
            self.short_lived.remove(&executable);
            return;
        }
        let now = self.now;
        self.short_lived
            .retain(|_, (_, since)| now - *since < SHORT_LIFE_FOR);
        if self.short_lived.len() < SHORT_LIVED_MAX || self.short_lived.contains_key(&executable) {
            let (oldest, _) = self.short_lived.entry(executable).or_insert((age, now));
            *oldest = age.max(*oldest);
        }
    }

    /// A reader that a person wants to be left alone, or that is another owner's by now, is released, also while it is contained.
    pub(crate) fn release_readers_left_alone(&mut self) {
        let released: Vec<(ActionId, String)> = self
            .changes
            .iter()
            .filter(|(_, c)| !c.leaving)
            .filter_map(|(action, c)| {
                let Target::Reader(r) = &c.action.target else {
                    return None;
                };
                let reader = self.workloads.get(&r.workload)?;
                let why = match self.opted_out(&reader.workload) {
                    Some(why) => format!("its reader {} is {why}", r.workload),
                    None => self.strangers(&r.workload, &c.action.workload)?,
                };
                Some((*action, why))
            })
            .collect();
        for (action, why) in released {
            self.withdraw(action, &why);
        }
    }

    /// What a person took back is not made again at once, however short memory is: for this workload, or for all.
    pub(crate) fn hold_relief(&mut self, whose: Option<&WorkloadId>) {
        let until = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        for (id, w) in &mut self.workloads {
            if whose.is_none_or(|whose| whose == id) {
                w.relief_at = until;
            }
        }
    }

    fn propose_relief(&mut self, id: &WorkloadId, strategy: StrategyId, proposal: Proposal) {
        let now = self.now;
        let mut text = proposal.hypothesis.clone();
        if let Some(why) = self.tried_again(id, &strategy) {
            text.push_str("; ");
            text.push_str(&why);
        }
        let advice = proposal.advice.clone();
        self.open_own_meter(id);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.lost_when_proposed = w.lost_lately();
        w.proposed = Some(Proposed {
            strategy,
            proposal,
            at: now,
        });
        w.seeking = false;
        w.relief_at = now + AGAIN;
        w.forget_inspections();
        self.advise(advice);
        self.decide(id, Stage::Proposed, text, false);
    }

    /// The workload for whose sake something urgent waits to be tried: of several, that which loses most.
    pub(crate) fn relief_waits(&self) -> Option<WorkloadId> {
        self.workloads
            .iter()
            .filter(|(id, w)| {
                w.stage == Stage::Proposed
                    && !w.gone
                    && w.proposed.as_ref().is_some_and(|p| p.proposal.urgent)
                    && !self.something_leaves(id)
            })
            .max_by(|(a, _), (b, _)| self.loses(a).total_cmp(&self.loses(b)))
            .map(|(id, _)| id.clone())
    }

    /// Trials of other things end: their workloads lose memory, too, and what is measured now says nothing.
    pub(crate) fn make_way(&mut self, why: &str) {
        let running: Vec<ExperimentId> = self
            .experiments
            .iter()
            .filter(|(_, e)| {
                e.setup.kind != ExperimentKind::Placebo
                    && !e.setup.urgent
                    && !matches!(e.phase, Phase::Concluding)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in running {
            self.abort(id, why.to_owned());
        }
    }

    /// Neighbours whose meter was found since the trial began become guardrails of it.
    pub(crate) fn join_guardrails(&mut self, id: ExperimentId) {
        let Some(e) = self.experiments.get(&id).filter(|e| e.setup.urgent) else {
            return;
        };
        let room = BYSTANDERS_MAX.saturating_sub(e.rails.len());
        let joining: Vec<Guardrail> = self
            .bystanders(&e.setup.panel)
            .into_iter()
            .filter(|m| !e.rails.iter().any(|r| *r.workload() == m.workload))
            .take(room)
            .map(|m| self.rail_of_a_neighbour(m, Objective::WorkPerSecond, e.setup.contained.as_ref()))
            .collect();
        if let Some(e) = self.experiments.get_mut(&id) {
            e.rails.extend(joining);
        }
    }

    /// Leaves the meter of a workload open for a trial that looks at it as a guardrail, until that trial ends. Returns
    /// whether it does.
    pub(crate) fn lend_meter(&mut self, id: &WorkloadId) -> bool {
        let Some(w) = self.workloads.get_mut(id) else {
            return false;
        };
        let Some(meter) = w.meter.as_ref().map(|c| c.candidate.id.clone()) else {
            return false;
        };
        if !w.open.contains(&meter) {
            return false;
        }
        let looks = |e: &&mut Experiment| !e.setup.panel.has(id) && e.looks_at().any(|other| other == id);
        let Some(e) = self.experiments.values_mut().find(looks) else {
            return false;
        };
        e.borrowed.push((id.clone(), meter.clone()));
        let (kept, closed): (Vec<_>, Vec<_>) = w.open.drain(..).partition(|m| *m == meter);
        w.open = kept;
        for other in closed {
            self.out.push(Command::CloseMeter(id.clone(), other));
        }
        true
    }
}

/// Blocks for an urgent trial: no passive history tells how long they must be.
pub(crate) fn choice(policy: &Policy) -> Choice {
    let mut lengths = policy.measured_candidates_s.clone();
    lengths.sort_by(f64::total_cmp);
    let measured_s = lengths
        .iter()
        .copied()
        .find(|s| *s >= MEASURED_S)
        .or(lengths.last().copied())
        .unwrap_or(MEASURED_S);
    Choice {
        measured_s,
        scale: SCALE,
        spread: SCALE,
        scale_breaker: SCALE,
        pairs: 0.0,
        predicted_s: 0.0,
        provable: 0.0,
        history_pairs: 0.0,
    }
}

/// Shortest washout of what protects: it is seen in windows whether a program is back at its speed.
pub(crate) fn washout_min(policy: &Policy) -> Nanoseconds {
    Nanoseconds::from_secs_f64(policy.washout_min_s).max(recovery::WINDOW)
}

/// The same workloads, judged by their work per second: what waits uses no CPU time.
pub(crate) fn by_work(panel: Panel) -> Panel {
    let mut members = panel.members().iter().map(crate::panel::Member::by_work);
    match members.next() {
        Some(lead) => Panel::new(lead, members.collect()),
        None => panel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_shortest_that_last_long_enough() {
        let with = |candidates: &[f64]| {
            choice(&Policy {
                measured_candidates_s: candidates.to_vec(),
                ..Policy::default()
            })
            .measured_s
        };
        assert_eq!(with(&[4.0, 6.0, 10.0, 20.0]), 6.0);
        assert_eq!(with(&[4.0, 2.0, 3.0]), 4.0);
    }
}
