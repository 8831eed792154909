//! Experiments from start to verdict, and the changes they leave behind.

use crate::blocks::{Lengths, Objective};
use crate::engine::{Change, Engine, UNDONE_BY_A_PERSON};
use crate::experiment::{Experiment, Need, Phase, Setup};
use crate::guard::{self, Guard, PROPOSAL_STALE};
use crate::meaning::{self, Meaning};
use crate::meters;
use crate::panel::{self, Gauge, Guardrail, Member, Panel};
use crate::policy::Mode;
use crate::protocol::{Attempt, Command, Fault, FaultKind, Prior};
use crate::relief;
use crate::rollout::{self, Piece, Staged, Wish};
use crate::spans::{self, SpanRail};
use crate::strategy::{Declined, Proposal};
use crate::view::{Outcome, Stage};
use crate::watched::Watched;
use homeostat_model::action::Target;
use homeostat_model::{
    ActionId, Direction, Effect, EffectorId, ExperimentId, ExperimentKind, ExperimentRecord, Fingerprint,
    MeaningAccount, MemberOutcome, MeterId, Nanoseconds, Progress, StrategyId, Verdict, WorkloadId,
};
use homeostat_statistics::TrialParameters;
use homeostat_statistics::block_length::{self, Choice, Unmeasurable};
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::onset;
use homeostat_statistics::schedule::{self, SETTLING_CONSTANTS};
use homeostat_statistics::staged;
use homeostat_statistics::trimmed::Comparison;
use std::collections::{BTreeMap, BTreeSet};

/// A change must reach at least this share of what it aimed at to be worth testing.
const CONVERTED_MIN: f64 = 0.5;
/// Failed undos before the operator is told that it does not work.
pub(crate) const UNDO_ATTEMPTS_MAX: u32 = 5;
/// Wait between attempts to undo.
const UNDO_RETRY: Nanoseconds = Nanoseconds::from_secs(10);
/// … and after it was reported.
const UNDO_RETRY_SLOW: Nanoseconds = Nanoseconds::from_secs(60);
/// No trial starts while tasks are stalled for memory more than this share of the time.
const PRESSURE_MEMORY_MAX: f64 = 0.10;
/// Passive history that the circuit breaker takes as the level before.
const PASSIVE_LEVEL_SPAN: Nanoseconds = Nanoseconds::from_secs(60);
/// At least this share of an effect is taken to show in a block.
const SHOWN_MIN: f64 = 0.5;
/// A running trial is written to the history every so many blocks.
const RECORDED_BLOCKS: u32 = 32;
/// Starts of experiments are counted over this.
pub(crate) const HOUR: Nanoseconds = Nanoseconds::from_secs(3600);
/// Effector that does nothing.
const PLACEBO: &str = "placebo";
/// A proposal that may be tried together with others waits this long for workloads about which the strategies are yet
/// to be asked.
const COMPANY_AWAITED: Nanoseconds = Nanoseconds::from_secs(30);
/// Workloads tried as one change at most.
const COMPANY_MAX: usize = 64;
/// A change that was sent on or off and makes no progress for so long is stuck.
const STUCK: Nanoseconds = Nanoseconds::from_secs(600);
/// … after so many times that long an undo holds nothing else up any more.
const STUCK_MAX: u32 = 3;
/// After a joint trial that proved nothing its members are tried one by one for so long.
pub(crate) const ALONE: Nanoseconds = Nanoseconds::from_secs(3600);
/// A trial that could not begin because an effector said "not now" is put off so many times at most …
const POSTPONED_MAX: u32 = 5;
/// … at first for so long, and for twice as long each time: a quarter of an hour in all.
const POSTPONED: Nanoseconds = Nanoseconds::from_secs(30);
/// A predicted gain of at least this (log units, lower end; 16.2 % more) is plain: it is tried after a shorter passive history.
const PLAIN_GAIN: f64 = 0.15;
/// A member of a joint trial that proved no gain is tried alone unless its own estimate is this many standard errors below
/// nothing.
const LOST_ERRORS: f64 = 2.0;

/// What is tried, and on whom.
struct Launch<'a> {
    kind: ExperimentKind,
    strategy: StrategyId,
    panel: Panel,
    /// The pieces that are switched on and off together; none for a rollout, which makes its parts one by one.
    pieces: Vec<Piece>,
    hypothesis: String,
    predicted: Effect,
    settling: Nanoseconds,
    alpha: f64,
    choice: &'a Choice,
    /// What the length of blocks is chosen from again when it is known what a switch costs.
    lengths: Option<Lengths>,
    /// It protects from a loss that happens now.
    urgent: bool,
}

/// How much is left out of each block for a neighbour's meter that tells so late: half of the measured part may be of before.
pub(crate) fn left_out_for(lag: Nanoseconds, measured: Nanoseconds) -> Nanoseconds {
    lag - Nanoseconds(measured.0 / 2)
}

impl Engine {
    // ---- starting -----------------------------------------------------------------------------------------------

    /// The arbiter: at most one real trial at a time on the host, since last-level cache, memory bandwidth and free
    /// memory are shared by all workloads; protection from a loss first, then known gains, then who loses most, or the largest
    /// predicted gain in CPUs.
    pub(crate) fn start_next(&mut self) {
        if self.paused || self.stopping.is_some() || self.policy.mode != Mode::Act {
            return;
        }
        if self.real_trial_running() {
            if let Some(whom) = self.relief_waits() {
                self.make_way(&format!("memory is short, and protecting {whom} comes first"));
            }
            return;
        }
        let rank = |id: &WorkloadId, w: &Watched| {
            let p = w.proposed.as_ref()?;
            let known = self
                .priors
                .get(&(w.workload.fingerprint.clone(), p.strategy.clone()))
                .is_some_and(|p| p.verdict == Verdict::Accepted);
            // What is lost is not what is used: a program that lost everything waits, and uses next to no CPU.
            let size = if p.proposal.urgent {
                self.loses(id)
            } else {
                p.proposal.predicted.estimate * w.load.cpus
            };
            // Owners take turns, so that the trials of one do not keep another waiting for ever.
            let rest = self.rest_of(&self.domain(&w.workload));
            Some((p.proposal.urgent, rest, known, size))
        };
        let best = self
            .workloads
            .iter()
            .filter(|(id, w)| {
                w.stage == Stage::Proposed
                    && !w.gone
                    && !w.reopens_its_meter()
                    && !self.something_leaves(id)
                    && !self.awaits_company(id, w)
                    && self.share_used_up(&self.domain(&w.workload)).is_none()
            })
            .filter_map(|(id, w)| rank(id, w).map(|r| (r, id.clone())))
            .max_by(|(a, _), (b, _)| (a.0, a.1, a.2).cmp(&(b.0, b.1, b.2)).then(a.3.total_cmp(&b.3)));
        let Some(((urgent, ..), id)) = best else {
            return;
        };
        // What looks like a loss stays on for as long as something else is tried.
        if !urgent && self.guards.all().any(|g| g.suspects(self.now)) {
            return;
        }
        if self.stale(&id) {
            self.ask_again(&id);
            return;
        }
        let again = self
            .workloads
            .get(&id)
            .and_then(|w| w.proposed.as_ref())
            .is_some_and(|p| self.in_force_already(&id, &p.proposal));
        if again {
            let why = "what was proposed is in force by now, for a neighbour";
            self.refuse(&id, Declined::because(why), false);
            return;
        }
        if let Some(why) = self.no_trial_now(urgent) {
            self.tell_host(why, false);
            return;
        }
        let company = self.company(&id);
        self.start_trial(&company, &id);
    }

    /// Whether a proposal waits for others of its kind: its gain depends on where they go.
    fn awaits_company(&self, id: &WorkloadId, w: &Watched) -> bool {
        let Some(p) = &w.proposed else { return false };
        p.proposal.joint
            && !self.tried_alone(w)
            && self.now - p.at < COMPANY_AWAITED
            && self.workloads.iter().any(|(other, o)| {
                other != id
                    && !o.gone
                    && !self.tried_alone(o)
                    && self.domain(&o.workload) == self.domain(&w.workload)
                    && (matches!(o.stage, Stage::Considered | Stage::Observed)
                        || (o.stage == Stage::Improved && o.seeking))
            })
    }

    /// Whether a workload is tried by itself only.
    fn tried_alone(&self, w: &Watched) -> bool {
        let restless = self.restless.get(&w.workload.fingerprint);
        w.alone(self.now) || restless.is_some_and(|(_, until)| self.now < *until)
    }

    /// The workloads that are tried as one change with this one: those for which the same strategy proposes the same kind
    /// of change, and says that such changes act on each other. By name, so that the same ones make the same trial.
    fn company(&self, lead: &WorkloadId) -> Vec<WorkloadId> {
        let mut company = vec![lead.clone()];
        let Some(w) = self.workloads.get(lead) else {
            return company;
        };
        let Some(p) = w
            .proposed
            .as_ref()
            .filter(|p| p.proposal.joint && !self.tried_alone(w))
        else {
            return company;
        };
        let alike = |other: &WorkloadId, o: &Watched| {
            o.stage == Stage::Proposed
                && !o.gone
                && !self.tried_alone(o)
                && self.domain(&o.workload) == self.domain(&w.workload)
                && o.meter.is_some()
                && !o.reopens_its_meter()
                && !self.something_leaves(other)
                && !self.stale(other)
                && o.proposed.as_ref().is_some_and(|q| {
                    q.strategy == p.strategy
                        && q.proposal.joint
                        && q.proposal.reversible == p.proposal.reversible
                })
        };
        company.extend(
            self.workloads
                .iter()
                .filter(|(other, o)| *other != lead && alike(other, o))
                .map(|(other, _)| other.clone())
                .take(COMPANY_MAX - 1),
        );
        company.sort();
        company
    }

    /// Whether a change of this workload is still on its way out: what a new one found there would be ours.
    pub(crate) fn something_leaves(&self, id: &WorkloadId) -> bool {
        self.changes
            .values()
            .any(|c| c.action.workload == *id && c.leaving)
    }

    /// Whether a trial could start now, were it not for the guards and for others.
    pub(crate) fn may_try(&self) -> bool {
        !self.paused && self.policy.mode == Mode::Act && self.no_trial_now(false).is_none()
    }

    /// Whether something waits to be tried.
    pub(crate) fn proposal_waits(&self) -> bool {
        self.workloads
            .values()
            .any(|w| w.stage == Stage::Proposed && !w.gone && !self.something_leaves(&w.workload.id))
    }

    /// What a proposal waits for, and what a person can do about it; `None` when it is its turn.
    pub(crate) fn waits_for(&self, id: &WorkloadId) -> Option<String> {
        let w = self.workloads.get(id)?;
        let p = w.proposed.as_ref().filter(|_| w.stage == Stage::Proposed)?;
        if self.policy.mode != Mode::Act {
            return None;
        }
        if self.paused {
            return Some("homeostat is paused; `homeostat resume` ends that".to_owned());
        }
        if let Some(e) = self
            .experiments
            .values()
            .find(|e| e.setup.kind != ExperimentKind::Placebo)
        {
            let left = (e.setup.started + e.setup.budget).saturating_sub(self.now);
            return Some(format!(
                "experiment {} ({} on {}) comes first, since caches and memory are shared; it takes {left} more at most",
                e.setup.id,
                e.setup.strategy,
                e.setup.panel.lead().workload
            ));
        }
        if let Some(g) = self.busy_guard().and_then(|key| self.guards.get(key)) {
            return Some(format!("a probe of {} comes first", g.strategy));
        }
        if self.something_leaves(id) {
            return Some("an earlier change of it is still on its way out".to_owned());
        }
        if let Some(why) = self.no_trial_now(p.proposal.urgent) {
            let free = self.starts.first().map_or(self.now, |t| t + HOUR);
            return Some(
                if self.starts.total() as u32 >= self.policy.experiments_per_hour_max {
                    let left = free.saturating_sub(self.now);
                    format!("{why} {left} more (`experiments_per_hour_max` allows more)")
                } else {
                    why
                },
            );
        }
        if let Some(why) = self.share_used_up(&self.domain(&w.workload)) {
            return Some(why);
        }
        if self.awaits_company(id, w) {
            let left = (p.at + COMPANY_AWAITED).saturating_sub(self.now);
            return Some(format!(
                "proposals for its neighbours, which act on it, are about to come; at most {left} more"
            ));
        }
        Some("proposals that promise more come first, or its passive history is still too short".to_owned())
    }

    /// Whether the proposal of a workload was made so long ago that it may rest on what is no longer so.
    fn stale(&self, id: &WorkloadId) -> bool {
        self.workloads
            .get(id)
            .and_then(|w| w.proposed.as_ref())
            .is_some_and(|p| self.now - p.at >= PROPOSAL_STALE)
    }

    /// Puts the question to the strategies once more.
    fn ask_again(&mut self, id: &WorkloadId) {
        let now = self.now;
        let improved = self.guards.any(id);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        w.proposed = None;
        w.forget_inspections();
        if w.judges_a_loss_only() {
            // What it waited for is not what the program waited for.
            w.observed_since = now;
        }
        let text = "its turn has come after a long wait: the strategies are asked once more";
        if improved {
            // Probes ran meanwhile: the passive history begins anew.
            w.seeking = true;
            w.more_at = now;
            w.observed_since = now;
            self.decide(id, Stage::Improved, text, false);
        } else {
            self.decide(id, Stage::Observed, text, false);
        }
    }

    pub(crate) fn real_trial_running(&self) -> bool {
        self.experiments
            .values()
            .any(|e| e.setup.kind != ExperimentKind::Placebo)
            || self.busy_guard().is_some()
    }

    /// A budget or the state of the machine that forbids any trial now; of what is urgent the budgets only.
    fn no_trial_now(&self, urgent: bool) -> Option<String> {
        if self.starts.total() as u32 >= self.policy.experiments_per_hour_max {
            return Some(format!(
                "the budget of {} experiments per hour is used up; the next waits",
                self.policy.experiments_per_hour_max
            ));
        }
        if self.exposure.total() > self.policy.harm_exposure_per_day_max {
            return Some(format!(
                "the trials of the last 24 hours have cost {} of lost work, and {} are allowed; no new trial for now",
                Nanoseconds::from_secs_f64(self.exposure.total() / 100.0),
                Nanoseconds::from_secs_f64(self.policy.harm_exposure_per_day_max / 100.0)
            ));
        }
        let stalled = self.machine_sample.stalled_for_memory(self.machine_interval);
        if !urgent && stalled > PRESSURE_MEMORY_MAX {
            return Some("tasks wait for memory: trials are put off until the pressure is gone".into());
        }
        None
    }

    /// Those workloads as they are measured now; `None` when one has no meter.
    pub(crate) fn panel_of(&self, ids: &[WorkloadId]) -> Option<Panel> {
        self.panel_judged(ids, |w| w.objective)
    }

    /// The same, each judged by what is said here.
    fn panel_judged(&self, ids: &[WorkloadId], objective: impl Fn(&Watched) -> Objective) -> Option<Panel> {
        let joint = ids.len() > 1;
        let mut members = ids.iter().map(|id| {
            let w = self.workloads.get(id)?;
            let objective = objective(w);
            let meter = w.meter.as_ref()?.candidate.id.clone();
            let from = w.observed_since.max(self.now.saturating_sub(PASSIVE_LEVEL_SPAN));
            let level = objective.score(&w.series.sums(&meter, from, self.now));
            let member = Member::new(
                id.clone(),
                w.workload.fingerprint.clone(),
                meter,
                objective,
                w.load.cpus,
            );
            Some(match level {
                Some(level) if joint => member.with_level(level),
                _ => member,
            })
        });
        let lead = members.next()??;
        Some(Panel::new(lead, members.collect::<Option<_>>()?))
    }

    /// Since when nothing was tried on any of them.
    fn observed_since(&self, panel: &Panel) -> Nanoseconds {
        panel
            .workloads()
            .filter_map(|id| self.workloads.get(id))
            .map(|w| w.observed_since)
            .max()
            .unwrap_or(self.now)
    }

    pub(crate) fn gauge<'a>(&'a self, panel: &'a Panel) -> Option<Gauge<'a>> {
        Gauge::new(panel, |id| self.workloads.get(id).map(|w| &w.series))
    }

    /// When the passive history begins.
    pub(crate) fn passive_since(&self, panel: &Panel) -> Nanoseconds {
        let kept = Nanoseconds::from_secs_f64(self.policy.observe_max_s);
        self.observed_since(panel).max(self.now.saturating_sub(kept))
    }

    /// Passive history: work and what the objective divides it by, per interval.
    fn passive(&self, panel: &Panel) -> Vec<(f64, f64)> {
        let since = self.passive_since(panel);
        self.gauge(panel)
            .map(|gauge| gauge.history(since, self.policy.detail_interval_s))
            .unwrap_or_default()
    }

    /// What the meters of these workloads say may be about so long before: as is known of them ([`MeterCandidate::lag`]), or as their
    /// readings say ([`homeostat_model::MeterReading::lag`]).
    pub(crate) fn lag(&self, panel: &Panel) -> Nanoseconds {
        let lags = panel.members().iter().map(|m| self.lag_of(m));
        lags.max().unwrap_or(Nanoseconds::ZERO)
    }

    /// The same of one of them.
    fn lag_of(&self, member: &Member) -> Nanoseconds {
        let Some(w) = self.workloads.get(&member.workload) else {
            return Nanoseconds::ZERO;
        };
        let candidate = w.meter.as_ref().map(|m| &m.candidate);
        let its_own = candidate.filter(|c| c.id == member.meter);
        its_own.map_or_else(|| w.series.lag(&member.meter), |c| meters::lag(c, &w.series))
    }

    /// How much is left out of each block, so that half at least of its measured part is its own by what these neighbours' meters tell.
    pub(crate) fn lag_of_neighbours<'a>(
        &self,
        neighbours: impl Iterator<Item = &'a Member>,
        measured: Nanoseconds,
    ) -> Nanoseconds {
        let lags = neighbours.map(|m| left_out_for(self.lag_of(m), measured));
        lags.max().unwrap_or(Nanoseconds::ZERO)
    }

    /// What is left out of each block at least, of a change that settles so (seconds).
    fn washout(&self, panel: &Panel, settling: Nanoseconds) -> f64 {
        let settles = settling.as_secs_f64() * SETTLING_CONSTANTS;
        self.policy.washout_min_s.max(settles) + self.lag(panel).as_secs_f64()
    }

    /// Chooses the block length from the passive history and the least gain that is predicted (log units); `Err` says why
    /// nothing can be proven now.
    fn design(
        &self,
        panel: &Panel,
        alpha: f64,
        settling: Nanoseconds,
        least: f64,
    ) -> Result<(Choice, Option<Lengths>), Unmeasurable> {
        let seconds = self.passive(panel);
        let interval = self.policy.detail_interval_s;
        let lengths = Lengths {
            seconds,
            interval,
            few: self.lag(panel) > Nanoseconds::ZERO,
            least,
            candidates: self.policy.measured_candidates_s.clone(),
            budget: self.policy.experiment_max_s,
        };
        let parameters = TrialParameters {
            alpha,
            ..self.policy.trial.clone()
        };
        let choice = lengths.choose(self.washout(panel, settling), 0.0, &parameters)?;
        Ok((choice, Some(lengths)))
    }

    /// The time constant of such a change as an earlier trial of it measured it on this kind of workload.
    fn known_settling(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<Nanoseconds> {
        let fingerprint = self.workloads.get(id)?.workload.fingerprint.clone();
        self.priors.get(&(fingerprint, strategy.clone()))?.settling
    }

    /// Starts the trial of what is proposed for these workloads, as one change; if that cannot be measured, of what is
    /// proposed for `best` alone.
    fn start_trial(&mut self, ids: &[WorkloadId], best: &WorkloadId) {
        if self.refuse_unread(ids) {
            return;
        }
        let proposals: Vec<(WorkloadId, StrategyId, Proposal)> = ids
            .iter()
            .filter_map(|id| {
                let p = self.workloads.get(id)?.proposed.as_ref()?;
                Some((id.clone(), p.strategy.clone(), p.proposal.clone()))
            })
            .collect();
        // More room shows in the work per second.
        let judged = |w: &Watched| match &w.proposed {
            Some(p) if p.proposal.makes_room => Objective::WorkPerSecond,
            _ => w.objective,
        };
        let (Some(panel), Some((_, strategy, first))) = (self.panel_judged(ids, judged), proposals.first())
        else {
            return;
        };
        if proposals.len() != ids.len() {
            return;
        }
        let urgent = first.urgent;
        let panel = if urgent { relief::by_work(panel) } else { panel };
        let alpha = self.discovery.next_alpha();
        let settling = proposals
            .iter()
            .map(|(id, strategy, p)| self.known_settling(id, strategy).unwrap_or(p.settling))
            .max()
            .unwrap_or(Nanoseconds::ZERO);
        let predicted = mean_effect(&panel, proposals.iter().map(|(_, _, p)| p.predicted));
        let least = panel::log_gain(predicted.lower);
        let designed = if urgent {
            Ok((relief::choice(&self.policy), None))
        } else {
            self.design(&panel, alpha, settling, least)
        };
        let (choice, lengths) = match designed {
            Ok(designed) => designed,
            // More history comes by waiting.
            Err(Unmeasurable::HistoryTooShort { .. }) => return,
            Err(_) if panel.is_joint() => return self.start_trial(std::slice::from_ref(best), best),
            Err(why) => {
                self.refuse(best, Declined::because(format!("not tried: {why}")), false);
                return;
            }
        };
        let hypothesis = if panel.is_joint() {
            let others: Vec<String> = panel.others().iter().map(ToString::to_string).collect();
            format!(
                "one change for {} workloads, since they act on each other: {}; likewise {}",
                ids.len(),
                first.hypothesis,
                others.join(", ")
            )
        } else {
            first.hypothesis.clone()
        };
        let reversible = first.reversible;
        let mut parts = rollout::interleave(proposals.iter().map(|(id, _, p)| Piece::of(id, p)).collect());
        let launch = Launch {
            kind: ExperimentKind::Switchback,
            strategy: strategy.clone(),
            panel,
            pieces: Vec::new(),
            hypothesis,
            predicted,
            settling,
            alpha,
            choice: &choice,
            lengths,
            urgent,
        };
        if !reversible {
            parts.truncate(rollout::STAGES_MAX);
            self.start_rollout(parts, launch, best);
            return;
        }
        let costs = self.proof_costs(&launch.panel, first, predicted.estimate, settling, alpha, &choice);
        let text = format!(
            "{}{} in randomised on/off blocks of {} s, washout at least {} s, at level {alpha:.4}; {}",
            launch.strategy,
            as_one(&launch.panel),
            choice.measured_s,
            self.washout(&launch.panel, Nanoseconds::ZERO),
            costs
        );
        let rest: Vec<Piece> = parts.drain(1..).flatten().collect();
        let pieces = parts.pop().unwrap_or_default();
        if let Some(id) = self.launch(Launch { pieces, ..launch }) {
            if let Some(e) = self.experiments.get_mut(&id) {
                e.rest = rest;
            }
            self.starts.note(self.now, self.domain_of(best), 1.0);
            self.decide_all(ids, Stage::Trying, &text, false);
        }
    }

    /// Parameters of a switched trial. In what protects from a loss, off blocks are rare.
    fn usual_parameters(&self, urgent: bool, contains: bool) -> TrialParameters {
        if urgent {
            relief::parameters(&self.policy.trial)
        } else if contains {
            relief::sparing(&self.policy.trial)
        } else {
            self.policy.trial.clone()
        }
    }

    /// What the proof of such a gain is expected to cost, for people: work, without the standstill of switches, which the trial
    /// measures. Off blocks cost it where the change protects from a loss. Else the pairs right after the acceptance do:
    /// the trial itself only delays the gain.
    fn proof_costs(
        &self,
        panel: &Panel,
        proposal: &Proposal,
        gain: f64,
        settling: Nanoseconds,
        alpha: f64,
        choice: &Choice,
    ) -> String {
        let contains = contained_by(&proposal.target).is_some();
        let least = if proposal.urgent {
            relief::washout_min(&self.policy).as_secs_f64()
        } else {
            0.0
        };
        let off = self.washout(panel, settling).max(least) + choice.measured_s;
        let blocks = if proposal.urgent || contains {
            let usual = self.usual_parameters(proposal.urgent, contains);
            let ratio = panel::log_gain(gain) / choice.scale;
            usual.off_chance * block_length::blocks_needed(usual.design, alpha, ratio)
        } else {
            let pairs = schedule::fresh_pairs(choice.spread, gain);
            let earned_in = guard::fresh_earned_in_s(panel);
            if schedule::is_cheap(pairs, gain, off, 0.0, earned_in) {
                f64::from(pairs)
            } else {
                0.0
            }
        };
        let costs = Nanoseconds::from_secs_f64(schedule::lost_by_s(blocks, gain, off, 0.0));
        format!("the proof is expected to cost {costs} of lost work, without standstill")
    }

    /// What the proof of a waiting proposal is expected to cost, for people; `None` if it is made in stages, which cost
    /// nothing if the prediction holds, or if nothing can be proven now.
    pub(crate) fn expected_costs(&self, id: &WorkloadId) -> Option<String> {
        let proposed = self.workloads.get(id)?.proposed.as_ref()?;
        let proposal = &proposed.proposal;
        if !proposal.reversible || proposal.urgent {
            return None;
        }
        let panel = self.panel_of(std::slice::from_ref(id))?;
        let alpha = self.discovery.next_alpha();
        let known = self.known_settling(id, &proposed.strategy);
        let settling = known.unwrap_or(proposal.settling);
        let least = panel::log_gain(proposal.predicted.lower);
        let (choice, _) = self.design(&panel, alpha, settling, least).ok()?;
        let gain = proposal.predicted.estimate;
        Some(self.proof_costs(&panel, proposal, gain, settling, alpha, &choice))
    }

    /// Starts the trial of a change that cannot be switched back cheaply: part by part, at times that coins decide.
    /// Where that cannot be planned for all, what is proposed for `best` is tried alone.
    fn start_rollout(&mut self, parts: Vec<Vec<Piece>>, launch: Launch<'_>, best: &WorkloadId) {
        let sizes: Vec<f64> = parts
            .iter()
            .map(|part| part.iter().map(|p| guard::size(&p.target) as f64).sum())
            .collect();
        let shares = staged::shares(&sizes);
        let seconds = self.passive(&launch.panel);
        let interval = self.policy.detail_interval_s;
        let plan = rollout::plan(&Wish {
            seconds: &seconds,
            interval,
            discard: self.washout(&launch.panel, launch.settling),
            lag: self.lag(&launch.panel).as_secs_f64(),
            candidates: &self.policy.measured_candidates_s,
            shares: &shares,
            theta: panel::log_gain(launch.predicted.estimate),
            alpha: launch.alpha,
            budget: self.policy.experiment_max_s,
        });
        let stages = parts.len();
        let ids: Vec<WorkloadId> = launch.panel.workloads().cloned().collect();
        let Some(plan) = plan else {
            if launch.panel.is_joint() {
                return self.start_trial(std::slice::from_ref(best), best);
            }
            let text = format!(
                "not tried: {stages} stages of a one-way change do not fit into the budget of {:.0} s, or the history is too broken to plan them",
                self.policy.experiment_max_s
            );
            self.refuse(best, Declined::because(text), false);
            return;
        };
        let text = format!(
            "{}{} in {stages} stages with randomised onset, 9 slots of {:.0} s each, at level {:.4}",
            launch.strategy,
            as_one(&launch.panel),
            (plan.measured + plan.discard).as_secs_f64(),
            launch.alpha
        );
        let started = self.launch(Launch {
            kind: ExperimentKind::StagedRollout,
            ..launch
        });
        let now = self.now;
        if let Some(experiment) = started {
            if let Some(e) = self.experiments.get_mut(&experiment) {
                let staged = Staged::new(parts, shares, plan, Nanoseconds::from_secs_f64(interval));
                let need = e.roll_out(staged, now);
                self.starts.note(now, self.domain_of(best), 1.0);
                self.decide_all(&ids, Stage::Trying, &text, false);
                self.meet(experiment, need);
            }
        }
    }

    /// Makes a part of a rollout.
    fn make_part(&mut self, id: ExperimentId, index: usize) {
        let Some(e) = self.experiments.get_mut(&id) else {
            return;
        };
        let Some(pieces) = e.staged.as_ref().and_then(|s| s.parts.get(index)).cloned() else {
            return;
        };
        let stages = e.staged.as_ref().map_or(1, |s| s.parts.len());
        let why = format!("part {} of {stages}: {}", index + 1, e.setup.hypothesis);
        let strategy = e.setup.strategy.clone();
        // The first number was given away when the trial began.
        let mut reserved = (index == 0).then_some(e.setup.action);
        let mut actions = Vec::new();
        for piece in pieces {
            let action_id = reserved.take().unwrap_or_else(|| {
                self.next_action += 1;
                ActionId(self.next_action - 1)
            });
            actions.push(piece.action(action_id, why.clone()));
        }
        e.parts.push(actions.iter().map(|a| a.id).collect());
        for action in actions {
            self.make(action, strategy.clone());
        }
    }

    /// Makes a change for the first time.
    pub(crate) fn make(&mut self, action: homeostat_model::Action, strategy: StrategyId) {
        let change = Change::new(action.clone(), strategy, self.now, self.unix);
        self.changes.insert(action.id, change);
        self.out.push(Command::Apply(Box::new(action)));
    }

    /// Whether a placebo should run on this workload now.
    pub(crate) fn placebo_wanted(&self, id: &WorkloadId) -> bool {
        if self.paused || self.stopping.is_some() || self.policy.mode == Mode::AdviseOnly {
            return false;
        }
        if self.guards.all().any(|g| g.suspects(self.now)) {
            return false;
        }
        if self.policy.mode == Mode::Calibrate {
            return true;
        }
        // Never as the first thing that a new workload sees: improving it comes first.
        let seen_before = self.workloads.get(id).is_some_and(|w| {
            w.decisions
                .iter()
                .any(|d| matches!(d.stage, Stage::Declined | Stage::Improved))
        });
        self.policy.placebo_every_s > 0.0 && self.now >= self.placebo_due && seen_before
    }

    pub(crate) fn start_placebo(&mut self, id: &WorkloadId) {
        if self.refuse_unread(std::slice::from_ref(id)) {
            return;
        }
        let Some(panel) = self.panel_of(std::slice::from_ref(id)) else {
            return;
        };
        let (choice, lengths) = match self.design(&panel, self.policy.placebo_alpha, Nanoseconds::ZERO, 0.0) {
            Ok(designed) => designed,
            Err(Unmeasurable::HistoryTooShort { .. }) => return,
            Err(why) => {
                self.refuse(id, Declined::because(format!("no placebo trial: {why}")), false);
                return;
            }
        };
        self.placebo_due = self.now + Nanoseconds::from_secs_f64(self.policy.placebo_every_s);
        let none = Effect {
            estimate: 0.0,
            lower: 0.0,
            upper: 0.0,
            confidence: 1.0,
        };
        let hypothesis = "placebo: nothing is changed; measures how often homeostat accepts by mistake";
        let started = self.launch(Launch {
            kind: ExperimentKind::Placebo,
            strategy: StrategyId::from(PLACEBO),
            panel,
            pieces: vec![Piece {
                workload: id.clone(),
                effector: EffectorId::from(PLACEBO),
                target: Target::Nothing,
                arguments: BTreeMap::new(),
            }],
            hypothesis: hypothesis.to_owned(),
            predicted: none,
            settling: Nanoseconds::ZERO,
            alpha: self.policy.placebo_alpha,
            choice: &choice,
            lengths,
            urgent: false,
        });
        if started.is_some() {
            self.decide(id, Stage::Trying, hypothesis.to_owned(), false);
        }
    }

    fn launch(&mut self, launch: Launch<'_>) -> Option<ExperimentId> {
        let Launch {
            kind,
            strategy,
            panel,
            pieces,
            hypothesis,
            predicted,
            settling,
            alpha,
            choice,
            lengths,
            urgent,
        } = launch;
        let mut breaker = Breaker::new(choice.scale_breaker);
        // Until the first off block the passive history is what a fall is measured against.
        let from = self
            .observed_since(&panel)
            .max(self.now.saturating_sub(PASSIVE_LEVEL_SPAN));
        let level = self.gauge(&panel)?.read(from, self.now).score;
        // What it lost was lost before: no level to fall from.
        if let Some(level) = level.filter(|_| !urgent) {
            breaker.off_block(level);
        }
        let experiment_id = ExperimentId(self.next_experiment);
        self.next_experiment += 1;
        let contains = pieces.iter().any(|p| contained_by(&p.target).is_some());
        let usual = self.usual_parameters(urgent, contains);
        let washout = self.washout(&panel, settling) - self.lag(&panel).as_secs_f64();
        let shown = onset::shown(settling.as_secs_f64(), washout, choice.measured_s).max(SHOWN_MIN);
        let parameters = TrialParameters {
            alpha,
            scale_prior: choice.scale,
            // What rules a gain out is what would show of it.
            delta: (usual.delta * shown).max(usual.gate),
            ..usual
        };
        let first = self.next_action;
        // A rollout makes its first part later, under the number that is given away here.
        self.next_action += pieces.len().max(1) as u64;
        let reader = pieces.iter().find_map(|p| self.reader_of(&p.target));
        let contained = pieces.iter().find_map(|p| contained_by(&p.target));
        let places = self.places_of(&pieces);
        let (rails, borrowed) = if kind == ExperimentKind::Placebo {
            (Vec::new(), Vec::new())
        } else {
            let borrowed = self.borrow_meters(&panel);
            (self.guardrails(&panel, contained.as_ref()), borrowed)
        };
        let measured = Nanoseconds::from_secs_f64(choice.measured_s);
        let of_neighbours = self.lag_of_neighbours(rails.iter().map(Guardrail::member), measured);
        let lag = self.lag(&panel).max(of_neighbours);
        let setup = Setup {
            id: experiment_id,
            kind,
            strategy: strategy.clone(),
            panel,
            action: ActionId(first),
            hypothesis: hypothesis.clone(),
            predicted,
            seed: self.policy.seed,
            settling,
            washout_min: if urgent {
                relief::washout_min(&self.policy)
            } else {
                Nanoseconds::from_secs_f64(self.policy.washout_min_s)
            },
            washout_max: Nanoseconds::from_secs_f64(self.policy.washout_max_s),
            lag,
            measured,
            budget: Nanoseconds::from_secs_f64(self.policy.experiment_max_s),
            parameters,
            shown,
            spread: choice.spread,
            started: self.now,
            started_unix: self.unix,
            urgent,
            lengths,
            reader,
            contained,
            places,
        };
        if kind != ExperimentKind::Placebo {
            self.probes_since_trial = 0;
        }
        let mut experiment = Experiment::new(setup, breaker);
        // What led to it belongs to it, though it may be over by now.
        experiment.most_lost = self
            .workloads
            .get(&experiment.setup.panel.lead().workload)
            .map(|w| w.lost_when_proposed)
            .unwrap_or_default();
        experiment.beside.levels = self.levels_before(&experiment);
        experiment.rails = rails;
        experiment.spans = self.span_rails(&experiment);
        experiment.span_rise_max = self.policy.span_rise_max;
        experiment.meanings = self.read_beside(&experiment);
        experiment.borrowed = borrowed;
        let actions: Vec<_> = pieces
            .into_iter()
            .zip(first..)
            .map(|(piece, id)| piece.action(ActionId(id), hypothesis.clone()))
            .collect();
        if !actions.is_empty() {
            experiment.parts.push(actions.iter().map(|a| a.id).collect());
        }
        self.out.push(Command::RecordExperiment(Box::new(
            self.record(&experiment, None),
        )));
        self.experiments.insert(experiment_id, experiment);
        for action in actions {
            self.make(action, strategy.clone());
        }
        Some(experiment_id)
    }

    /// How long those that are tried and their neighbours work at once, as guardrails.
    fn span_rails(&self, experiment: &Experiment) -> Vec<SpanRail> {
        if experiment.setup.kind == ExperimentKind::Placebo || self.policy.span_rise_max <= 0.0 {
            return Vec::new();
        }
        let members = busiest(&experiment.setup.panel);
        let mut spans: Vec<SpanRail> = members.into_iter().map(SpanRail::new).collect();
        // While memory is short the machine has enough to do. Who is contained is meant to be held up.
        let setup = &experiment.setup;
        let held_up = |id: &WorkloadId| setup.contained.as_ref() == Some(id);
        let mut seen = BTreeSet::new();
        let neighbours = experiment
            .rails
            .iter()
            .filter(|r| r.is_neighbour() && !setup.urgent && !held_up(r.workload()))
            .filter(|r| seen.insert(r.workload().clone()))
            .take(spans::NEIGHBOURS_MAX)
            .map(|r| SpanRail::of_a_neighbour(r.member().clone()));
        spans.extend(neighbours);
        spans
    }

    /// Takes note of spans that cannot be followed, and tells it: the trial goes on without them.
    fn note_unseen_spans(&mut self, id: ExperimentId) {
        let Some(e) = self.experiments.get_mut(&id) else {
            return;
        };
        let mut told = Vec::new();
        for rail in &mut e.spans {
            let sample = self
                .workloads
                .get(rail.workload())
                .and_then(|w| w.sample.as_ref());
            if let Some(Err(why)) = sample.and_then(|s| s.spans.as_ref()) {
                if rail.refuse(why) {
                    told.push((rail.workload().clone(), why.clone()));
                }
            }
        }
        for (workload, why) in told {
            let text = format!("how long it works at once is not watched in this trial: {why}");
            self.narrate(&workload, text, false);
        }
    }

    /// Opens, beside meters of kernel work that judge a trial, the kinds by whose constant ratio they qualified: reading
    /// them costs the workload nothing. Where that cannot be, the trial's account says why.
    fn read_beside(&mut self, experiment: &Experiment) -> Vec<Meaning> {
        let setup = &experiment.setup;
        let mut meanings = Vec::new();
        for m in setup.panel.members() {
            let Some(w) = self.workloads.get_mut(&m.workload) else {
                continue;
            };
            let Some(beside) = w.confirming.clone() else {
                continue;
            };
            let mut meaning = Meaning::new(m.workload.clone(), m.meter.clone(), beside.clone());
            if let Some(why) = meaning::unwatched(setup.urgent, &beside) {
                meaning.refuse(why);
            } else if !w.open.contains(&beside) {
                meaning.opened();
                w.open.push(beside.clone());
                self.out.push(Command::OpenMeter(m.workload.clone(), beside));
            }
            meanings.push(meaning);
        }
        meanings
    }

    /// Takes note that a kind of kernel work cannot be read that was to be read beside what judges: the account of the trial tells it.
    pub(crate) fn note_unread(&mut self, id: &WorkloadId, meter: &MeterId, why: &str) {
        let all = self.experiments.values_mut().flat_map(|e| &mut e.meanings);
        for meaning in all.filter(|m| m.workload() == id && m.beside() == meter) {
            meaning.refuse(format!("{meter}, by which it qualified, cannot be read: {why}"));
        }
    }

    fn stop_reading_beside(&mut self, e: &Experiment) {
        // Whoever has the name of one that ended is another, with meters of its own.
        let own = |m: &&Meaning| m.has_opened() && !e.orphans.contains(m.workload());
        for meaning in e.meanings.iter().filter(own) {
            if let Some(w) = self.workloads.get_mut(meaning.workload()) {
                if w.open.contains(meaning.beside()) {
                    w.open.retain(|m| m != meaning.beside());
                    let (id, meter) = (meaning.workload().clone(), meaning.beside().clone());
                    self.out.push(Command::CloseMeter(id, meter));
                }
            }
        }
    }

    /// Opens the meters of neighbours for which nothing is planned, so that the trial sees whether it harms them. Not what was lost: for
    /// them another is looked for before long.
    pub(crate) fn borrow_meters(&mut self, panel: &Panel) -> Vec<(WorkloadId, MeterId)> {
        let least = self.policy.cpu_min;
        let mut idle: Vec<(f64, WorkloadId, MeterId)> = self
            .workloads
            .iter()
            .filter(|(id, w)| {
                w.stage == Stage::Declined
                    && !w.gone
                    && w.open.is_empty()
                    && !w.has_lost_its_meter()
                    && w.load.cpus >= least
                    && !panel.has(id)
            })
            .filter_map(|(id, w)| Some((w.load.cpus, id.clone(), w.meter.as_ref()?.candidate.id.clone())))
            .collect();
        idle.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        idle.truncate(panel::BYSTANDERS_MAX);
        for (_, id, meter) in &idle {
            if let Some(w) = self.workloads.get_mut(id) {
                w.open.push(meter.clone());
                self.out.push(Command::OpenMeter(id.clone(), meter.clone()));
            }
        }
        idle.into_iter().map(|(_, id, meter)| (id, meter)).collect()
    }

    /// Closes the meters that a trial had opened, unless their workloads are looked at themselves by now.
    pub(crate) fn return_meters(&mut self, borrowed: &[(WorkloadId, MeterId)]) {
        for (id, meter) in borrowed {
            if let Some(w) = self.workloads.get_mut(id) {
                if !w.gone && matches!(w.stage, Stage::Declined | Stage::Ignored) && w.open.contains(meter) {
                    w.open.retain(|m| m != meter);
                    self.out.push(Command::CloseMeter(id.clone(), meter.clone()));
                }
            }
        }
    }

    /// What the trial must not harm: its members by themselves where several are tried as one, the work per second of
    /// those that are judged by their CPU time, and the neighbours whose work is measured, by both where both can be lost.
    fn guardrails(&self, panel: &Panel, reader: Option<&WorkloadId>) -> Vec<Guardrail> {
        let mut rails = Vec::new();
        for m in panel.members() {
            if panel.is_joint() {
                rails.push(Guardrail::new(m.clone(), m.objective));
            }
            if m.objective == Objective::CpuPerWork {
                rails.push(Guardrail::new(m.clone(), Objective::WorkPerSecond));
            }
        }
        let bystanders = self.bystanders(panel);
        let harmed = |m: Member| {
            let objective = m.objective;
            self.rail_of_a_neighbour(m, objective, reader)
        };
        rails.extend(bystanders.iter().flat_map(Member::as_neighbour).map(harmed));
        rails
    }

    /// A neighbour as a guardrail. `reader`: whom the change contains, if it does that.
    pub(crate) fn rail_of_a_neighbour(
        &self,
        m: Member,
        objective: Objective,
        reader: Option<&WorkloadId>,
    ) -> Guardrail {
        let is_reader = reader == Some(&m.workload);
        let rail = Guardrail::new(m, objective).of_a_neighbour();
        if is_reader {
            rail.of_the_reader(self.policy.reader_loss_max)
        } else {
            rail
        }
    }

    /// Whether anybody works who is not of the change, measured or not.
    pub(crate) fn others_work(&self, members: &[WorkloadId]) -> bool {
        self.workloads
            .iter()
            .any(|(id, w)| !w.gone && !members.contains(id) && w.load.cpus >= self.policy.cpu_min)
    }

    /// The neighbours whose work is measured, those that use most CPU first. Not by what was taken in a loss: who varies so much would
    /// show no harm, and others would have less of the level. Nor by what was lost, which shows nothing.
    pub(crate) fn bystanders(&self, panel: &Panel) -> Vec<Member> {
        let mut bystanders: Vec<Member> = self
            .workloads
            .iter()
            .filter(|(id, w)| {
                !w.gone
                    && !w.open.is_empty()
                    && !w.has_lost_its_meter()
                    && !w.judges_a_loss_only()
                    && !panel.has(id)
                    && w.load.cpus >= self.policy.cpu_min
            })
            .filter_map(|(id, _)| self.panel_of(std::slice::from_ref(id)))
            .flat_map(|p| p.members().to_vec())
            .collect();
        bystanders.sort_by(|a, b| {
            b.cpus
                .total_cmp(&a.cpus)
                .then_with(|| a.workload.cmp(&b.workload))
        });
        bystanders.truncate(panel::BYSTANDERS_MAX);
        bystanders
    }

    // ---- running ------------------------------------------------------------------------------------------------

    pub(crate) fn poll_experiments(&mut self) {
        let ids: Vec<ExperimentId> = self.experiments.keys().copied().collect();
        for id in ids {
            if self.ends_by_a_lost_meter(id) {
                continue;
            }
            self.join_guardrails(id);
            self.note_unseen_spans(id);
            let Some(e) = self.experiments.get_mut(&id) else {
                continue;
            };
            let workloads = &self.workloads;
            let series = |id: &WorkloadId| workloads.get(id).map(|w| &w.series);
            let panel = e.setup.panel.clone();
            let Some(gauge) = Gauge::new(&panel, series) else {
                continue;
            };
            let need = e.poll(self.now, &gauge, series);
            self.meet(id, need);
        }
    }

    /// The members whose work can be read no more, since the meter that judges it was lost, and why.
    fn lost_meters(&self, panel: &Panel) -> Vec<(WorkloadId, String)> {
        let lost = |m: &Member| {
            let (id, meter) = (&m.workload, &m.meter);
            let why = self.workloads.get(id)?.lost.get(meter)?;
            Some((id.clone(), format!("{id}: the meter {meter} was lost: {why}")))
        };
        panel.members().iter().filter_map(lost).collect()
    }

    /// Refuses those of whom nothing can be read any more. Whether there are any.
    fn refuse_unread(&mut self, ids: &[WorkloadId]) -> bool {
        let Some(panel) = self.panel_of(ids) else {
            return false;
        };
        let lost = self.lost_meters(&panel);
        for (id, why) in &lost {
            self.refuse(id, Declined::because(format!("not tried: {why}")), false);
        }
        !lost.is_empty()
    }

    /// Ends a trial that is judged by a meter that was lost: no block can be measured any more, and what was read last may have been too
    /// little already. Whether it does.
    fn ends_by_a_lost_meter(&mut self, id: ExperimentId) -> bool {
        let now = self.now;
        let lost = match self.experiments.get(&id) {
            Some(e) if !matches!(e.phase, Phase::Concluding) => self.lost_meters(&e.setup.panel),
            _ => return false,
        };
        let (Some((_, why)), Some(e)) = (lost.first().cloned(), self.experiments.get_mut(&id)) else {
            return false;
        };
        e.blamed.extend(lost.into_iter().map(|(workload, _)| workload));
        let need = if e.setup.panel.is_joint() {
            // The others are not to blame, and are tried as one again.
            e.conclude(now, Verdict::Aborted, why)
        } else {
            e.give_up(now, why)
        };
        self.meet(id, need);
        true
    }

    fn meet(&mut self, id: ExperimentId, need: Need) {
        let Some(e) = self.experiments.get(&id) else {
            return;
        };
        let switched = e.switched().to_vec();
        match need {
            Need::Stage { stage, onset } => self.out.push(Command::NoteCoin {
                experiment: id,
                block: stage * rollout::BLOCKS_PER_STAGE + onset,
                on: true,
            }),
            Need::Part { index } => self.make_part(id, index),
            Need::Nothing => {}
            Need::Switch { on } => self.switch_all(&switched, on),
            Need::Begin { block, on, switch } => {
                let record = (block > 0 && block % RECORDED_BLOCKS == 0).then(|| self.record(e, None));
                self.out.push(Command::NoteCoin {
                    experiment: id,
                    block,
                    on,
                });
                if switch {
                    self.switch_all(&switched, on);
                }
                if let Some(record) = record {
                    self.out.push(Command::RecordExperiment(Box::new(record)));
                }
            }
            // A rollout ends with all its parts made, unless the last one is on a round trip.
            Need::Conclude { on: true } if self.all_made(id) => self.conclude(id),
            Need::Conclude { on: true } => self.switch_all(&switched, true),
            Need::Conclude { on: false } => {
                let actions = e.actions();
                for action in actions.iter().rev() {
                    if let Some(c) = self.changes.get_mut(action) {
                        c.leaving = true;
                    }
                }
                for action in actions.iter().rev() {
                    self.leave(*action);
                }
                self.conclude_when_gone(id);
            }
        }
    }

    /// Drives changes to on, in the order in which they were made, or to off, in reverse.
    fn switch_all(&mut self, actions: &[ActionId], on: bool) {
        let mut order = actions.to_vec();
        if !on {
            order.reverse();
        }
        for action in order {
            self.switch(action, on);
        }
    }

    /// Drives a change to on or off.
    pub(crate) fn switch(&mut self, action: ActionId, on: bool) {
        let now = self.now;
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        c.on = on;
        c.settled = false;
        c.moved_at = now;
        let direction = if on { Direction::Apply } else { Direction::Undo };
        self.out.push(Command::Switch(action, direction));
    }

    pub(crate) fn on_advanced(&mut self, action: ActionId, direction: Direction, progress: &Progress) {
        self.account(action, progress);
        if direction == Direction::Apply {
            if let Some(e) = self.experiments.values_mut().find(|e| e.owns(action)) {
                if matches!(e.phase, Phase::Preparing) && progress.total > 0 {
                    e.prepared = progress.finished as f64 / progress.total as f64;
                }
            }
        }
    }

    /// Adds the cost of a slice to the books.
    fn account(&mut self, action: ActionId, progress: &Progress) {
        self.stalled += progress.stalled;
        let now = self.now;
        if let Some(c) = self.changes.get_mut(&action) {
            c.bloat = progress.bloat;
            if c.finished != progress.finished {
                c.finished = progress.finished;
                c.moved_at = now;
            }
        }
        if let Some(e) = self.experiments.values_mut().find(|e| e.owns(action)) {
            e.stalled += progress.stalled;
            e.bloat = e.bloat.max(progress.bloat);
        }
    }

    pub(crate) fn on_settled(
        &mut self,
        action: ActionId,
        direction: Direction,
        result: Result<Progress, Fault>,
    ) {
        if let Ok(progress) = &result {
            self.account(action, progress);
        }
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        let expected = if c.on { Direction::Apply } else { Direction::Undo };
        if direction != expected {
            return;
        }
        match (direction, result) {
            (Direction::Apply, Ok(progress)) => {
                c.settled = true;
                self.applied(action, &progress);
            }
            (Direction::Apply, Err(fault)) => self.apply_failed(action, &fault),
            (Direction::Undo, Ok(progress)) => {
                c.settled = true;
                if c.leaving {
                    let workload = c.action.workload.clone();
                    self.tell_what_was_left(&workload, action, &progress);
                    self.out.push(Command::Close(action));
                    self.changes.remove(&action);
                    self.guard_loses(&workload, action, "it is gone");
                    self.release();
                    self.conclude_of(action);
                    self.bring_files();
                } else {
                    self.experiment_settled(action);
                    self.guard_settled(action);
                }
            }
            (Direction::Undo, Err(fault)) => self.undo_failed(action, &fault),
        }
    }

    /// Where nothing of a change was put back, since it is somebody else's by now, that is told: nobody looks after it any more.
    fn tell_what_was_left(&mut self, workload: &WorkloadId, action: ActionId, progress: &Progress) {
        if progress.finished > 0 || progress.skipped.is_empty() {
            return;
        }
        let why: Vec<&str> = progress.skipped.keys().map(String::as_str).collect();
        let text = format!(
            "action {action} is left as it is, not put back: {}",
            why.join("; ")
        );
        self.narrate(workload, text, true);
    }

    fn applied(&mut self, action: ActionId, progress: &Progress) {
        let found = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, e)| {
                (
                    *id,
                    // Also each part of a rollout is made for the first time.
                    matches!(e.phase, Phase::Preparing | Phase::Stage),
                    matches!(e.phase, Phase::Concluding),
                )
            });
        let Some((id, preparing, concluding)) = found else {
            if self.stopping == Some(true) && self.guarded(action) {
                self.out.push(Command::Keep(action));
                self.changes.remove(&action);
                return;
            }
            self.guard_settled(action);
            return;
        };
        if concluding {
            self.conclude_of(action);
            return;
        }
        let share = if progress.total == 0 {
            1.0
        } else {
            progress.finished as f64 / progress.total as f64
        };
        if preparing && share < CONVERTED_MIN {
            let why = progress
                .skipped
                .iter()
                .map(|(reason, n)| format!("{n} {reason}"))
                .collect::<Vec<_>>()
                .join(", ");
            let text = format!(
                "only {} of {} pieces could be converted ({why})",
                progress.finished, progress.total
            );
            self.blame(id, action);
            self.abort(id, text);
            return;
        }
        self.experiment_settled(action);
    }

    fn experiment_settled(&mut self, action: ActionId) {
        let now = self.now;
        let Some((id, e)) = self.experiments.iter_mut().find(|(_, e)| e.owns(action)) else {
            return;
        };
        let id = *id;
        // All that is switched together has to be there.
        let there = e
            .moving()
            .iter()
            .all(|a| self.changes.get(a).is_none_or(|c| c.settled));
        if there {
            let need = e.settled(now);
            self.meet(id, need);
        }
    }

    fn apply_failed(&mut self, action: ActionId, fault: &Fault) {
        let id = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, _)| *id);
        // Nothing was done when the record never reached the journal, or preparation was refused; the undo that
        // follows finds nothing to do and closes the record if there is one.
        let text = match fault.kind {
            FaultKind::Conflict => format!("a person or another program chose otherwise: {}", fault.text),
            _ => fault.text.clone(),
        };
        match id {
            Some(id) => {
                let reader = match self.changes.get(&action).map(|c| &c.action.target) {
                    Some(Target::Reader(r)) if fault.kind == FaultKind::Vanished => Some(r.workload.clone()),
                    _ => None,
                };
                // It has ended, and no scan has seen that yet.
                if let Some(reader) = reader {
                    self.note_short_life(&reader);
                }
                self.blame(id, action);
                if let Some(e) = self.experiments.get_mut(&id) {
                    e.not_now |= fault.kind == FaultKind::Busy && e.begins();
                }
                self.abort(id, text);
            }
            None => {
                self.steering_failed(action, fault);
                self.withdraw(action, &text);
            }
        }
    }

    fn undo_failed(&mut self, action: ActionId, fault: &Fault) {
        let now = self.now;
        if self.changes.get(&action).is_some_and(|c| !c.leaving) {
            // It was to be off for a block only. A change that cannot be switched off when asked is none to test or to
            // guard: its trial ends, or its guard lets go of it, and it leaves for good.
            let why = format!("it could not be switched off: {}", fault.text);
            if let Some((_, e)) = self.experiments.iter_mut().find(|(_, e)| e.owns(action)) {
                e.own_end = true;
            }
            self.withdraw(action, &why);
        }
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        c.leaving = true;
        c.failures += 1;
        let workload = c.action.workload.clone();
        let failures = c.failures;
        let given_up = c.failures >= UNDO_ATTEMPTS_MAX;
        // Never given up for good: what stands in the way (a snapshot by fork, a pin) may go.
        c.retry_at = Some(now + if given_up { UNDO_RETRY_SLOW } else { UNDO_RETRY });
        let text = if given_up {
            format!(
                "action {action} could not be undone after {UNDO_ATTEMPTS_MAX} attempts: {}; it stays in the journal and is tried again every minute",
                fault.text
            )
        } else {
            format!(
                "action {action} could not be undone yet: {}; trying again",
                fault.text
            )
        };
        // What stays in the way for hours is told ever more rarely.
        if !given_up || failures == UNDO_ATTEMPTS_MAX || failures.is_power_of_two() {
            self.narrate(&workload, text, true);
        }
        if failures == 1 || failures == UNDO_ATTEMPTS_MAX {
            self.release();
        }
        if failures == UNDO_ATTEMPTS_MAX {
            self.conclude_of(action);
        }
    }

    /// Whether `later` may set the same thing as `earlier`, on top of it: then it is undone first, since what it found
    /// is what the earlier one had set.
    pub(crate) fn lies_over(&self, later: ActionId, earlier: ActionId) -> bool {
        match (self.changes.get(&later), self.changes.get(&earlier)) {
            (Some(later), Some(earlier)) => later.action.lies_over(&earlier.action),
            _ => false,
        }
    }

    /// Whether the undo of a change must wait for that of a later one. What cannot be undone stands in nobody's way, but for
    /// moved memory: what a later change moved on would be left there for good, taken for moved by somebody else. Where
    /// threads are kept the effector knows best: those of the later change may be back while its memory finds no room for
    /// hours, and until they are it refuses.
    fn must_wait(&self, action: ActionId) -> bool {
        let target = |id: &ActionId| self.changes.get(id).map(|c| &c.action.target);
        let attempts = |c: &Change| match (&c.action.target, target(&action)) {
            (_, Some(Target::Pages(_))) => u32::MAX,
            (Target::Cpus(_), _) => 1,
            _ => UNDO_ATTEMPTS_MAX,
        };
        self.changes
            .range((std::ops::Bound::Excluded(action), std::ops::Bound::Unbounded))
            .any(|(later, c)| c.leaving && c.failures < attempts(c) && self.lies_over(*later, action))
    }

    /// Whether a change that is on its way out gets no further for now: all attempts to undo it failed, or it waits for one of
    /// which that is so. Nothing else waits for it any longer; it is still tried, and stays in the journal.
    pub(crate) fn cannot_go(&self, action: ActionId) -> bool {
        let mut all: BTreeSet<ActionId> = BTreeSet::new();
        // From the newest on: a change waits for later ones only.
        let range = (std::ops::Bound::Included(action), std::ops::Bound::Unbounded);
        for (id, c) in self.changes.range(range).rev().filter(|(_, c)| c.leaving) {
            let given_up = c.failures >= UNDO_ATTEMPTS_MAX;
            if given_up || (c.waits && all.iter().any(|later| self.lies_over(*later, *id))) {
                all.insert(*id);
            }
        }
        all.contains(&action)
    }

    /// Undoes a change for good, after the later ones that lie over it.
    fn leave(&mut self, action: ActionId) {
        let waits = self.must_wait(action);
        if let Some(c) = self.changes.get_mut(&action) {
            c.leaving = true;
            c.waits = waits;
            if !waits {
                self.switch(action, false);
            }
        }
    }

    /// Undoes what waited for a change that is gone now.
    fn release(&mut self) {
        let waiting: Vec<ActionId> = self
            .changes
            .iter()
            .rev()
            .filter(|(_, c)| c.waits)
            .map(|(id, _)| *id)
            .collect();
        for action in waiting {
            self.leave(action);
        }
    }

    /// Changes that are on their way and get nowhere: what was to be made is given up, what was to be undone is told.
    pub(crate) fn poll_changes(&mut self) {
        let now = self.now;
        let stuck: Vec<ActionId> = self
            .changes
            .iter()
            .filter(|(_, c)| !c.settled && !c.waits && c.retry_at.is_none() && now - c.moved_at >= STUCK)
            .map(|(id, _)| *id)
            .collect();
        for action in stuck {
            let Some(c) = self.changes.get_mut(&action) else {
                continue;
            };
            c.moved_at = now;
            if !c.leaving {
                self.withdraw(action, &format!("it made no progress for {STUCK}"));
                continue;
            }
            c.stuck += 1;
            if c.stuck >= STUCK_MAX && c.failures < UNDO_ATTEMPTS_MAX {
                // Nothing else waits for it any longer; it is still tried, and stays in the journal.
                c.failures = UNDO_ATTEMPTS_MAX;
                self.release();
                self.conclude_of(action);
                continue;
            }
            let workload = c.action.workload.clone();
            let text = format!(
                "the undo of action {action} has made no progress for {STUCK}; it goes on, and stays in the journal until it is done"
            );
            self.narrate(&workload, text, true);
        }
    }

    pub(crate) fn retry_undos(&mut self) {
        let now = self.now;
        let due: Vec<ActionId> = self
            .changes
            .iter_mut()
            // What lies over others goes first.
            .rev()
            .filter(|(_, c)| c.retry_at.is_some_and(|t| now >= t))
            .map(|(id, c)| {
                c.retry_at = None;
                *id
            })
            .collect();
        for action in due {
            self.leave(action);
        }
    }

    // ---- ending -------------------------------------------------------------------------------------------------

    pub(crate) fn abort(&mut self, id: ExperimentId, why: String) {
        let now = self.now;
        let Some(e) = self.experiments.get_mut(&id) else {
            return;
        };
        let need = e.conclude(now, Verdict::Aborted, why);
        self.meet(id, need);
    }

    pub(crate) fn abort_all(&mut self, why: &str) {
        for id in self.experiments.keys().copied().collect::<Vec<_>>() {
            self.abort(id, why.to_owned());
        }
    }

    pub(crate) fn abort_workload(&mut self, workload: &WorkloadId, why: &str) {
        let ids: Vec<ExperimentId> = self
            .experiments
            .iter()
            .filter(|(_, e)| e.setup.panel.has(workload))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.abort(id, why.to_owned());
        }
    }

    /// Remembers for whose sake a trial ends: of several that are tried as one the others are not to blame.
    fn blame(&mut self, id: ExperimentId, action: ActionId) {
        let workload = self.changes.get(&action).map(|c| c.action.workload.clone());
        if let (Some(e), Some(workload)) = (self.experiments.get_mut(&id), workload) {
            e.blamed.insert(workload);
        }
    }

    /// Takes a change back for good.
    pub(crate) fn withdraw(&mut self, action: ActionId, why: &str) {
        if let Some(id) = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, _)| *id)
        {
            self.blame(id, action);
            self.abort(id, why.to_owned());
            return;
        }
        let Some(c) = self.changes.get_mut(&action) else {
            return;
        };
        if c.leaving && c.failures == 0 {
            return;
        }
        c.leaving = true;
        c.failures = 0;
        c.retry_at = None;
        let workload = c.action.workload.clone();
        let places = matches!(c.action.target, Target::Cpus(_) | Target::Files(_));
        self.narrate(&workload, format!("action {action} is undone: {why}"), false);
        // What was set on top of it found its value, not that of a person: it goes first. Of moved pages only a placement that
        // took them along does.
        let over: Vec<ActionId> = self
            .changes
            .keys()
            .rev()
            .copied()
            .filter(|later| (places || self.is_a_place(*later)) && self.lies_over(*later, action))
            .collect();
        for later in over {
            self.withdraw(later, "it was set on top of a change that is undone");
        }
        // The parts that followed it go first.
        self.guard_loses(&workload, action, why);
        self.leave(action);
    }

    /// Whether all parts of a rollout are made and stay.
    fn all_made(&self, id: ExperimentId) -> bool {
        self.experiments.get(&id).is_some_and(Experiment::is_staged) && self.all_on(id)
    }

    /// Whether all changes of an experiment are on.
    fn all_on(&self, id: ExperimentId) -> bool {
        self.experiments.get(&id).is_some_and(|e| {
            e.actions()
                .iter()
                .all(|a| self.changes.get(a).is_some_and(|c| c.on && c.settled))
        })
    }

    /// A change of an experiment reached its final state.
    fn conclude_of(&mut self, action: ActionId) {
        let found = self
            .experiments
            .iter()
            .find(|(_, e)| e.owns(action))
            .map(|(id, e)| (*id, e.on));
        match found {
            Some((id, true)) if self.all_on(id) => self.conclude(id),
            Some((_, true)) => {}
            Some((id, false)) => self.conclude_when_gone(id),
            None => {}
        }
    }

    /// Ends an experiment whose changes are all undone, or cannot be.
    fn conclude_when_gone(&mut self, id: ExperimentId) {
        let gone = self.experiments.get(&id).is_some_and(|e| {
            let is_over = |a: &ActionId| !self.changes.contains_key(a) || self.cannot_go(*a);
            e.actions().iter().all(is_over)
        });
        if gone {
            self.conclude(id);
        }
    }

    /// All changes of an experiment reached their final state: write the verdict down.
    fn conclude(&mut self, id: ExperimentId) {
        let Some(e) = self.experiments.remove(&id) else {
            return;
        };
        self.return_meters(&e.borrowed);
        self.stop_reading_beside(&e);
        let verdict = e.verdict.unwrap_or(Verdict::Aborted);
        let record = ExperimentRecord {
            members: self.member_outcomes(&e, verdict),
            spans: e.spans.iter().filter_map(SpanRail::account).collect(),
            meanings: e.meanings.iter().filter_map(Meaning::account).collect(),
            ..self.record(&e, Some(verdict))
        };
        self.out.push(Command::RecordExperiment(Box::new(record.clone())));
        for spans in &record.spans {
            self.narrate(&spans.workload, spans.to_string(), false);
        }
        // Of a trial that could not begin there is nothing to tell, and the next one tells it.
        let told = |m: &&MeaningAccount| !e.not_now && !e.orphans.contains(&m.workload);
        for meaning in record.meanings.iter().filter(told) {
            self.narrate(&meaning.workload, meaning.to_string(), false);
        }
        if let Some(scar) = record.off_level.filter(|level| level.may_be_a_scar) {
            self.narrate(&record.workload, scar.to_string(), true);
        }
        let placebo = e.setup.kind == ExperimentKind::Placebo;
        let panel = e.setup.panel.clone();
        // Whoever has the name of one that ended is another.
        let living: Vec<Member> = panel
            .members()
            .iter()
            .filter(|m| !e.orphans.contains(&m.workload))
            .cloned()
            .collect();
        self.outcomes.push_front(Outcome {
            id,
            workload: record.workload.clone(),
            others: panel.others(),
            strategy: e.setup.strategy.clone(),
            verdict,
            effect: (!e.blocks.is_empty()).then(|| e.effect().into()),
            blocks: e.blocks.len() as u32,
            ended_unix: self.unix,
            reason: e.reason.clone(),
            off_level: record.off_level,
            not_excluded: record.not_excluded.clone(),
        });
        if placebo {
            if let Some(m) = living.first() {
                self.conclude_placebo(&m.workload, verdict);
            }
            return;
        }
        let owner = self.domain_of(&e.setup.panel.lead().workload);
        self.exposure.note(self.now, owner, e.harm_exposure());
        if verdict != Verdict::Aborted || !e.blocks.is_empty() {
            // A try that was broken off could have been accepted until then: its level is used up.
            let kind = Attempt::of(&record.fingerprint, &e.setup.strategy);
            self.discovery.record(&kind, verdict == Verdict::Accepted);
        }
        if !e.not_now {
            for m in &living {
                if let Some(w) = self.workloads.get_mut(&m.workload) {
                    w.postponed = 0;
                }
            }
        }
        if let Some(pair) = e.setup.pair() {
            self.recall.note_verdict(&pair, verdict, e.effect(), e.washout);
        }
        if verdict == Verdict::Accepted {
            self.accept(&e, record, &living);
            self.neighbours_moved(&e, &living);
        } else if e.not_now && verdict == Verdict::Aborted {
            self.postpone(&e, &living);
        } else if panel.is_joint() {
            self.refuse_joint(&e, verdict, &living);
        } else if let (true, Verdict::Rejected | Verdict::Inconclusive, Some(m)) =
            (e.shows_an_offered_load(panel.lead()), verdict, living.first())
        {
            let text = format!(
                "{verdict} by experiment {id}: {}; the change was undone",
                e.reason
            );
            self.judge_by_cpu(&e, &m.workload, &text);
        } else {
            if verdict != Verdict::Aborted || e.own_end {
                self.remember(&e, panel.members(), verdict, e.effect());
            }
            if let Some(m) = living.first() {
                let text = if e.reason == UNDONE_BY_A_PERSON {
                    format!("{UNDONE_BY_A_PERSON} in experiment {id} and is not tried again for now")
                } else {
                    format!(
                        "{verdict} by experiment {id}: {}; the change was undone",
                        e.reason
                    )
                };
                self.refuse_tried(&e, &m.workload, verdict, text);
            }
        }
        self.note_hindered(&e, &living);
        self.note_refused_loss(&e);
    }

    /// The change stays, under guard.
    fn accept(&mut self, e: &Experiment, record: ExperimentRecord, living: &[Member]) {
        let panel = &e.setup.panel;
        self.remember(e, panel.members(), Verdict::Accepted, e.effect());
        for m in panel.members() {
            self.forget_refused_places(&m.workload, &e.setup.strategy);
        }
        let text = format!(
            "{}{} {} by experiment {}, {}; the change stays and is {}",
            e.setup.strategy,
            as_one(panel),
            panel.gain(&e.effect()),
            e.setup.id,
            e.reason,
            if e.is_staged() {
                "not probed, since it is one-way"
            } else {
                "guarded"
            }
        );
        let members: Vec<WorkloadId> = panel.workloads().cloned().collect();
        let others_work = self.others_work(&members);
        let mut guard = Guard::new(e, record, text.clone(), self.now, &self.policy)
            .measured_afresh(others_work, self.now);
        for gone in &e.orphans {
            guard.lose_workload(gone, &self.changes, self.now);
        }
        if living.is_empty() || guard.is_empty() {
            return;
        }
        for action in &guard.tried {
            if let Some(c) = self.changes.get_mut(action) {
                c.since_unix = self.unix;
            }
        }
        self.guards.insert(guard);
        let ids: Vec<WorkloadId> = living.iter().map(|m| m.workload.clone()).collect();
        self.decide_all(&ids, Stage::Improved, &text, false);
        for id in &ids {
            if self.anyone_to_ask(id, None) {
                self.look_further(id, e.washout);
            } else if let Some(w) = self.workloads.get_mut(id) {
                w.proposed = None;
                w.seeking = false;
                w.more_at = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
            }
            self.summarise(id);
        }
    }

    /// A trial that could not begin, because an effector said "not now", is put off: after a wait the strategies are asked
    /// anew. Whoever stood in the way too often is refused for longer; who was to be tried with it goes on without it. It
    /// counts as one of the trials of its hour: the bound is on what is begun, whatever comes of it.
    fn postpone(&mut self, e: &Experiment, living: &[Member]) {
        let may_go_on = !self.paused && self.stopping.is_none() && self.policy.mode == Mode::Act;
        for m in living {
            let id = &m.workload;
            let blamed = e.blamed.contains(id);
            let Some(w) = self.workloads.get_mut(id) else {
                continue;
            };
            let times = w.postponed;
            if blamed {
                w.postponed = times.saturating_add(1);
                w.alone_until = self.now + ALONE;
            }
            if !may_go_on || (blamed && times >= POSTPONED_MAX) {
                let times = if blamed { times } else { 0 };
                if let Some(w) = self.workloads.get_mut(id) {
                    w.postponed = 0;
                }
                let text = format!(
                    "aborted by experiment {}: {}{}; nothing was changed",
                    e.setup.id,
                    e.reason,
                    if times > 0 {
                        format!(", for the {times}th time in a row after it was put off")
                    } else {
                        String::new()
                    }
                );
                self.refuse_tried(e, id, Verdict::Aborted, text);
                continue;
            }
            let wait = if blamed {
                POSTPONED * (1 << times.min(POSTPONED_MAX))
            } else {
                Nanoseconds::ZERO
            };
            let text = if blamed {
                format!(
                    "experiment {} is put off for {wait} ({} of {POSTPONED_MAX} times): {}; nothing was changed",
                    e.setup.id,
                    times + 1,
                    e.reason
                )
            } else {
                format!(
                    "experiment {}{} is put off: {}; nothing was changed, and it is tried without whom that was about",
                    e.setup.id,
                    as_one(&e.setup.panel),
                    e.reason
                )
            };
            let stage = if self.guards.any(id) {
                Stage::Improved
            } else {
                Stage::Observed
            };
            self.decide(id, stage, text, false);
            self.ask_after(id, wait);
            self.summarise(id);
        }
    }

    /// A trial proved no gain for this workload; the change is undone, and the other strategies are asked.
    fn refuse_tried(&mut self, e: &Experiment, workload: &WorkloadId, verdict: Verdict, text: String) {
        self.note_refused_place(e, workload, verdict);
        // The strategy itself may know of another place.
        let except = (!self.another_place_is_open(workload, &e.setup.strategy)).then_some(&e.setup.strategy);
        let own_end = verdict != Verdict::Aborted || e.own_end;
        let is_read = self
            .workloads
            .get(workload)
            .is_some_and(|w| !w.has_lost_its_meter());
        let on = own_end
            && is_read
            && !self.paused
            && self.stopping.is_none()
            && self.policy.mode == Mode::Act
            && self.anyone_to_ask(workload, except);
        let warning = verdict == Verdict::Harmful;
        if !on {
            self.refuse(workload, Declined::because(text), warning);
            if let Some(w) = self.workloads.get_mut(workload) {
                w.undone_by_a_person = w.stage == Stage::Declined && e.reason == UNDONE_BY_A_PERSON;
            }
            return;
        }
        let stage = if self.guards.any(workload) {
            Stage::Improved
        } else {
            Stage::Declined
        };
        self.decide(workload, stage, text, warning);
        self.look_further(workload, e.washout);
        self.summarise(workload);
    }

    /// The trial asked the wrong question: the work of this workload is what is offered to it, and from now on its CPU time
    /// per unit of work judges. Nothing is held against the change; the strategies are asked again.
    fn judge_by_cpu(&mut self, e: &Experiment, workload: &WorkloadId, text: &str) {
        let improved = self.guards.any(workload);
        let Some(w) = self.workloads.get_mut(workload) else {
            return;
        };
        w.offered = true;
        (w.objective, w.objective_reason) = Objective::of(&w.load, true);
        let text = format!(
            "{text}. From now on its work per CPU second judges, because {}",
            w.objective_reason
        );
        let stage = if improved {
            Stage::Improved
        } else {
            Stage::Observed
        };
        self.decide(workload, stage, text, false);
        self.look_further(workload, e.washout);
        self.summarise(workload);
    }

    /// Whether a member of a joint trial that proved no gain is tried once more: those whose own work does not speak against
    /// it, since what became of the whole says little of each; and all but the one to blame when the trial was broken off for
    /// a reason that lies in the whole.
    fn goes_on_alone(&self, e: &Experiment, verdict: Verdict, m: &Member) -> bool {
        let gate = e.setup.parameters.gate;
        let lost = |own: Comparison| own.change <= -gate && own.change <= -LOST_ERRORS * own.error;
        let open = !e.own_change(m).is_some_and(lost);
        let cut_short =
            verdict == Verdict::Aborted && (e.own_end || !e.orphans.is_empty() || !e.blamed.is_empty());
        let may_go_on = !self.paused && self.stopping.is_none() && self.policy.mode == Mode::Act;
        may_go_on && !e.blamed.contains(&m.workload) && (cut_short || (verdict != Verdict::Aborted && open))
    }

    /// What a joint trial showed of each member; nothing of a trial of one.
    fn member_outcomes(&self, e: &Experiment, verdict: Verdict) -> Vec<MemberOutcome> {
        let panel = &e.setup.panel;
        if !panel.is_joint() {
            return Vec::new();
        }
        let outcome = |m: &Member| MemberOutcome {
            workload: m.workload.clone(),
            verdict: if verdict != Verdict::Accepted
                && (e.orphans.contains(&m.workload)
                    || self.goes_on_alone(e, verdict, m)
                    || e.shows_an_offered_load(m))
            {
                Verdict::Aborted
            } else {
                verdict
            },
            effect: e.own_change(m).map(panel::effect_of),
        };
        panel.members().iter().map(outcome).collect()
    }

    /// A joint trial proved no gain; the change is undone. Members whose own work speaks for it are tried alone, and so
    /// are all when the trial was broken off for a reason that lies in the whole: nothing is known of them then.
    fn refuse_joint(&mut self, e: &Experiment, verdict: Verdict, living: &[Member]) {
        let now = self.now;
        for m in living {
            let id = &m.workload;
            let own = e.own_change(m);
            let own_text = own.map_or_else(String::new, |own| {
                format!(
                    " ({:+.1} % of its own)",
                    homeostat_statistics::robust::exp_m1(own.change) * 100.0
                )
            });
            let text = format!(
                "{verdict} by experiment {}{}: {}{own_text}; the change was undone",
                e.setup.id,
                as_one(&e.setup.panel),
                e.reason
            );
            let blamed = e.blamed.contains(id);
            if !blamed && verdict != Verdict::Aborted && e.shows_an_offered_load(m) {
                self.judge_by_cpu(e, id, &text);
                continue;
            }
            if blamed {
                if let Some(w) = self.workloads.get_mut(id) {
                    w.alone_until = now + ALONE;
                }
            }
            if !self.goes_on_alone(e, verdict, m) {
                if verdict != Verdict::Aborted {
                    let effect = own.map_or(e.effect(), panel::effect_of);
                    self.remember(e, std::slice::from_ref(m), verdict, effect);
                }
                self.refuse_tried(e, id, verdict, text);
                continue;
            }
            let stage = if self.guards.any(id) {
                Stage::Improved
            } else {
                Stage::Observed
            };
            // What a trial of all has refused is not tried with all again so soon.
            let apart = if verdict == Verdict::Aborted {
                ALONE
            } else {
                self.back_off(Verdict::Inconclusive, 1).max(ALONE)
            };
            if let Some(w) = self.workloads.get_mut(id) {
                if e.own_end || verdict != Verdict::Aborted {
                    w.alone_until = now + apart;
                }
            }
            self.decide(id, stage, text, false);
            self.look_further(id, e.washout);
            self.summarise(id);
        }
    }

    fn conclude_placebo(&mut self, workload: &WorkloadId, verdict: Verdict) {
        if verdict != Verdict::Aborted {
            self.placebos += 1;
            if verdict == Verdict::Accepted {
                self.false_accepts += 1;
            }
        }
        let text = format!(
            "placebo trial {}: {} of {} accepted so far (at most {:.0} % expected)",
            if verdict == Verdict::Accepted {
                "accepted by mistake"
            } else {
                "not accepted, as it should be"
            },
            self.false_accepts,
            self.placebos,
            self.policy.placebo_alpha * 100.0
        );
        self.decide(workload, Stage::Observed, text, false);
        let now = self.now;
        if let Some(w) = self.workloads.get_mut(workload) {
            if self.policy.mode != Mode::Calibrate {
                // A placebo changes nothing: what was read meanwhile is passive history.
                w.retry_at = now;
            }
        }
    }

    fn remember(&mut self, e: &Experiment, members: &[Member], verdict: Verdict, effect: Effect) {
        let strategy = &e.setup.strategy;
        let mut fingerprints: Vec<&Fingerprint> = members.iter().map(|m| &m.fingerprint).collect();
        fingerprints.sort();
        fingerprints.dedup();
        // A further placement on top of one in force was refused: that one was proven, and stays so. The workload itself has a
        // rest from the strategy.
        if verdict != Verdict::Accepted && self.rest_from_steps(strategy, members, verdict) {
            return;
        }
        // Several places that are tried one after the other are one failure.
        let same_round = members
            .iter()
            .any(|m| self.another_place_is_open(&m.workload, strategy));
        for fingerprint in fingerprints {
            let key = (fingerprint.clone(), strategy.clone());
            self.hindered.remove(&key);
            // One that is tried again for a far larger loss is no failure of the same thing.
            let is_another_loss = self.losses.contains_key(&key) && self.backs_off(&key).is_some();
            let failures = match verdict {
                Verdict::Accepted => 0,
                _ if same_round || is_another_loss => self.priors.get(&key).map_or(1, |p| p.failures.max(1)),
                _ => self.priors.get(&key).map_or(0, |p| p.failures) + 1,
            };
            self.priors.insert(
                key,
                Prior {
                    fingerprint: fingerprint.clone(),
                    strategy: strategy.clone(),
                    verdict,
                    effect: Some(effect),
                    unix_seconds: self.unix,
                    failures,
                    settling: Some(e.settling()),
                },
            );
        }
    }

    /// Members whose threads the strategy keeps already are not asked about again for a while, after a further step was refused.
    /// Whether there are such members.
    fn rest_from_steps(&mut self, strategy: &StrategyId, members: &[Member], verdict: Verdict) -> bool {
        let until = self.now + self.back_off(verdict, 1);
        let has_one = |id: &WorkloadId| {
            let mut own = self.guards.of(id).filter(|g| g.strategy == *strategy);
            own.any(|g| g.members().any(|a| self.is_a_place(a)))
        };
        let of_it: Vec<WorkloadId> = members
            .iter()
            .map(|m| m.workload.clone())
            .filter(has_one)
            .collect();
        for id in &of_it {
            if let Some(w) = self.workloads.get_mut(id) {
                w.no_steps_until.insert(strategy.clone(), until);
            }
        }
        !of_it.is_empty()
    }

    /// The experiment as the history keeps it.
    pub(crate) fn record(&self, e: &Experiment, verdict: Option<Verdict>) -> ExperimentRecord {
        let s = &e.setup;
        let lead = s.panel.lead();
        let shown = verdict.filter(|_| !e.blocks.is_empty()).map(|_| e.effect());
        let gain = shown
            .filter(|_| s.kind != ExperimentKind::Placebo)
            .map(|x| x.estimate);
        ExperimentRecord {
            id: s.id,
            kind: s.kind,
            strategy: s.strategy.clone(),
            workload: lead.workload.clone(),
            fingerprint: lead.fingerprint.clone(),
            others: s
                .panel
                .members()
                .iter()
                .skip(1)
                .map(|m| (m.workload.clone(), m.fingerprint.clone()))
                .collect(),
            members: Vec::new(),
            spans: Vec::new(),
            meanings: Vec::new(),
            reader: s.reader.clone(),
            machine: self.machine.fingerprint(),
            action: s.action,
            hypothesis: s.hypothesis.clone(),
            predicted: s.predicted,
            meter: lead.meter.clone(),
            objective: s.panel.words(),
            seed: s.seed,
            alpha: s.parameters.alpha,
            washout: e.washout,
            measured: e.measured(),
            started_unix: s.started_unix,
            ended_unix: if verdict.is_some() { self.unix } else { 0 },
            verdict,
            reason: e.reason.clone(),
            effect: match verdict {
                Some(_) => shown,
                None => e.effect_told(),
            },
            fresh: None,
            off_level: verdict.and_then(|_| e.beside.levels.compare(gain)),
            not_excluded: match verdict {
                Some(Verdict::Accepted) => e.not_excluded(),
                _ => Vec::new(),
            },
            settling: Some(e.settling()),
            evidence: e.evidence(),
            stalled: e.stalled,
            bloat: e.bloat,
            harm_exposure: e.harm_exposure(),
            blocks: e.blocks.clone(),
        }
    }
}

/// The members of a trial that use most CPU: those whose spans are followed.
fn busiest(panel: &Panel) -> Vec<Member> {
    let mut members = panel.members().to_vec();
    members.sort_by(|a, b| {
        b.cpus
            .total_cmp(&a.cpus)
            .then_with(|| a.workload.cmp(&b.workload))
    });
    members.truncate(spans::MEMBERS_MAX);
    members
}

/// The reader that such a change contains.
pub(crate) fn contained_by(target: &Target) -> Option<WorkloadId> {
    match target {
        Target::Reader(r) => Some(r.workload.clone()),
        _ => None,
    }
}

/// Whether a predicted gain (log units, lower end) is plain to see.
pub(crate) fn is_plain(least: f64) -> bool {
    least >= PLAIN_GAIN
}

/// What is said of a trial of several workloads.
fn as_one(panel: &Panel) -> String {
    if !panel.is_joint() {
        return String::new();
    }
    let names: Vec<&str> = panel.workloads().map(WorkloadId::as_str).collect();
    format!(", one change for {},", names.join(", "))
}

/// The mean of the effects predicted for the members, by the CPUs that they use.
fn mean_effect(panel: &Panel, of: impl Iterator<Item = Effect>) -> Effect {
    let effects: Vec<Effect> = of.collect();
    if let [one] = effects.as_slice() {
        return *one;
    }
    let mean = |end: fn(&Effect) -> f64| {
        let sum: f64 = panel
            .members()
            .iter()
            .zip(&effects)
            .map(|(m, e)| m.weight() * homeostat_statistics::robust::ln_1p(end(e).max(-0.99)))
            .sum();
        homeostat_statistics::robust::exp_m1(sum)
    };
    Effect {
        estimate: mean(|e| e.estimate),
        lower: mean(|e| e.lower),
        upper: mean(|e| e.upper),
        confidence: effects.iter().map(|e| e.confidence).fold(1.0, f64::min),
    }
}
