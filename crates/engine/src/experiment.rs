//! A running experiment: its clockwork, its coins, its test, and how it ends.
//!
//! The state machine is pure and small: it is told that a switch settled or that time passed, and answers with what
//! it needs next ([`Need`]). The engine turns needs into commands.

use crate::blocks::{BREAKER_SPAN, Block, BlockState, Lengths, Objective, next_switch};
use crate::coins::Coins;
use crate::control::Beside;
use crate::harm::{By, Hurt};
use crate::losses::Rereads;
use crate::meaning::{LastLook, Meaning};
use crate::panel::{self, Gauge, Guardrail, Member, Panel};
use crate::places::Places;
use crate::recall::Pair;
use crate::recovery::{self, Recovery};
use crate::retrace::{Traced, is_told};
use crate::rollout::{Piece, ROUND_TRIPS_FROM, Staged, StagedState};
use crate::series::{EDGE_TOLERANCE, Series, Sums};
use crate::spans::SpanRail;
use crate::trials::left_out_for;
use homeostat_model::{
    ActionId, BlockRecord, Bytes, Effect, ExperimentId, ExperimentKind, Fingerprint, MeterId, Nanoseconds,
    StrategyId, Verdict, WorkloadId,
};
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::onset::Onset;
use homeostat_statistics::schedule::{SETTLING_CONSTANTS, SWITCH_MARGIN};
use homeostat_statistics::staged::StagedAdvice;
use homeostat_statistics::trimmed::Comparison;
use homeostat_statistics::{Arm, Decision, Trial, TrialParameters};
use std::collections::{BTreeSet, VecDeque};

/// A switch may take this many times the washout before the experiment gives up on it.
const SWITCH_PATIENCE: u64 = 20;
/// A longer time constant than this is mostly the time that the change itself takes (pages that move), which the slowest
/// switch seen tells better.
const EFFECT_SETTLING_MAX: Nanoseconds = Nanoseconds::from_millis(1500);
/// The length of blocks is chosen again when the washout has changed by this share.
const WASHOUT_CHANGED: f64 = 0.2;
/// A fall by this share while the change is being made ends the trial …
const STANDSTILL: f64 = 0.80;
/// … over so long, …
const STANDSTILL_SPAN: Nanoseconds = Nanoseconds::from_secs(5);
/// … if it lasts for so long.
const STANDSTILL_FOR: Nanoseconds = Nanoseconds::from_secs(10);
/// Switches that are remembered.
const SWITCHES: usize = 6;
/// The first switch is taken to be at most this many times as slow as those to come.
const FIRST_SWITCH_SLOWER: u64 = 4;
/// A change that took longer than this to make is switched off and on once before the first coin, so that the
/// washout is right from the first block: blocks that a switch outlasts show less than there is.
const REHEARSAL_FROM: Nanoseconds = Nanoseconds::from_secs(40);
/// What protects from a loss stays on for so long before the first coin may release it …
const FIRST_RELIEF: Nanoseconds = Nanoseconds::from_secs(10);
/// … and for so long at most, if the program still gets faster …
const FIRST_RELIEF_MAX: Nanoseconds = Nanoseconds::from_secs(60);
/// … or where its meter was read for the first time when it was lost: it may have come back at once, or not begun to.
const FIRST_RELIEF_UNSEEN: Nanoseconds = Nanoseconds::from_secs(30);
/// What a protected program takes to come back is waited for with this much more: the next times are not all as quick.
const RECOVERY_MARGIN: Nanoseconds = Nanoseconds::from_secs(1);
/// A block is measured at least this share of its washout, or most of the trial would be waiting …
const MEASURED_SHARE: f64 = 0.5;

/// The interval of a rollout's estimate reaches this many of its standard errors to either side. Simulated with a history
/// of 24 slots, it holds the truth in 88–96 % of rollouts (white, heavy, wandering noise), and in 58 % where the load steps.
const ROLLOUT_ERRORS: f64 = 2.5;
/// Largest level of the trial that ends a rollout by round trips.
const ALPHA_MAX: f64 = 0.5;
/// CPU time counts as saved when it is proven by so many standard errors …
const SAVED_ERRORS: f64 = 4.0;
/// … and work as the same when it moved by at most this share of what was saved.
const WORK_STAYED: f64 = 0.25;

/// Where the experiment is.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// The change is made for the first time.
    Preparing,
    /// A stage of a rollout runs.
    Stage,
    /// A block runs.
    Block(Block),
    /// The verdict is known; the change goes to its final state.
    Concluding,
}

/// What an experiment needs done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Need {
    /// Nothing now.
    Nothing,
    /// Journal the coin of this block, then switch if it differs from the present state.
    Begin { block: u32, on: bool, switch: bool },
    /// Journal the onset slot of this stage.
    Stage { stage: u32, onset: u32 },
    /// Make this part of a rollout, for the first time.
    Part { index: usize },
    /// Drive the change to this state, before the first block.
    Switch { on: bool },
    /// Drive the change to this final state.
    Conclude { on: bool },
}

/// What is fixed when an experiment starts.
pub(crate) struct Setup {
    pub(crate) id: ExperimentId,
    pub(crate) kind: ExperimentKind,
    pub(crate) strategy: StrategyId,
    /// Whose work judges.
    pub(crate) panel: Panel,
    /// The first of its actions.
    pub(crate) action: ActionId,
    pub(crate) hypothesis: String,
    pub(crate) predicted: Effect,
    pub(crate) seed: u64,
    pub(crate) settling: Nanoseconds,
    pub(crate) washout_min: Nanoseconds,
    pub(crate) washout_max: Nanoseconds,
    /// What the meters say may be about so long before: added to every washout.
    pub(crate) lag: Nanoseconds,
    pub(crate) measured: Nanoseconds,
    pub(crate) budget: Nanoseconds,
    pub(crate) parameters: TrialParameters,
    /// The share of an effect that a block shows, as its strategy tells how fast it sets in.
    pub(crate) shown: f64,
    /// Standard deviation of a pair's difference, its rare large ones included (log units).
    pub(crate) spread: f64,
    pub(crate) started: Nanoseconds,
    pub(crate) started_unix: u64,
    /// It protects from a loss that happens now.
    pub(crate) urgent: bool,
    /// What the length of blocks is chosen from; none where it is fixed.
    pub(crate) lengths: Option<Lengths>,
    /// The identity of the reader that is contained, if that is the change.
    pub(crate) reader: Option<Fingerprint>,
    /// … and which of those that have it.
    pub(crate) contained: Option<WorkloadId>,
    /// Where its members are kept, if that is the change.
    pub(crate) places: Places,
}

impl Setup {
    /// Whose memory and who takes it, if the change is to contain a reader.
    pub(crate) fn pair(&self) -> Option<Pair> {
        let reader = self.reader.clone()?;
        Some((
            self.panel.lead().fingerprint.clone(),
            reader,
            self.strategy.clone(),
        ))
    }
}

/// A running experiment.
pub(crate) struct Experiment {
    pub(crate) setup: Setup,
    pub(crate) phase: Phase,
    pub(crate) trial: Trial,
    pub(crate) blocks: Vec<BlockRecord>,
    /// What was known after each block of the trial, for people.
    pub(crate) known: Vec<Traced>,
    /// Share of the first conversion that is done.
    pub(crate) prepared: f64,
    /// State the change was last sent to.
    pub(crate) on: bool,
    pub(crate) settled: bool,
    pub(crate) washout: Nanoseconds,
    /// What neighbours' meters need left out of each block, as their readings said so far.
    lag_seen: Nanoseconds,
    pub(crate) stalled: Nanoseconds,
    pub(crate) bloat: Bytes,
    pub(crate) beside: Beside,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) reason: String,
    /// It ended for a reason of its own (not an operator, a stop, or the end of the workload): not tried again at once.
    pub(crate) own_end: bool,
    pub(crate) breaker: Breaker,
    /// The actions of each part that was made, in order; only a staged rollout has several. A part of a joint trial has
    /// an action for every workload.
    pub(crate) parts: Vec<Vec<ActionId>>,
    /// What must not be harmed meanwhile.
    pub(crate) rails: Vec<Guardrail>,
    /// How long its members work at once, which must not get longer.
    pub(crate) spans: Vec<SpanRail>,
    /// The share from which they count as longer.
    pub(crate) span_rise_max: f64,
    /// What members that are judged by their work per second save of their CPU time.
    savings: Vec<Saving>,
    /// Whether meters of kernel work keep their meaning.
    pub(crate) meanings: Vec<Meaning>,
    /// Meters of neighbours that were opened for that.
    pub(crate) borrowed: Vec<(WorkloadId, MeterId)>,
    /// Pieces that follow what was tried once it has proven a gain.
    pub(crate) rest: Vec<Piece>,
    /// The rollout, of a change that cannot be switched back cheaply.
    pub(crate) staged: Option<Staged>,
    /// The part of a rollout that goes on round trips.
    pub(crate) trip: Option<usize>,
    /// Its workloads that ended, whose names others may have.
    pub(crate) orphans: BTreeSet<WorkloadId>,
    /// Its workloads for whose sake it was broken off.
    pub(crate) blamed: BTreeSet<WorkloadId>,
    /// It ended because a neighbour lost by it.
    pub(crate) hindered: bool,
    /// The most that its workload lost, of a protection from a loss (`losses.rs`).
    pub(crate) most_lost: Rereads,
    /// Its change could not be made now, and may be later.
    pub(crate) not_now: bool,
    /// Whether the change was sent off and on before the first block.
    rehearsal: bool,
    /// Blocks begun, for their numbers.
    begun: u32,
    /// Since when work has fallen while the change is being made.
    fallen_since: Option<Nanoseconds>,
    /// The washout for which the length of blocks was chosen last.
    chosen_for: Nanoseconds,
    /// How fast the effect sets in, by the switches so far.
    onset: Onset,
    /// Since when the last switch is done.
    settled_at: Option<Nanoseconds>,
    coins: Coins,
    switch_started: Nanoseconds,
    /// How long the last switches took.
    switches: VecDeque<Nanoseconds>,
}

/// The work of a member per second and per CPU second, to be compared.
#[derive(Clone, Debug)]
struct Saving {
    work: Guardrail,
    cpu: Guardrail,
}

impl Saving {
    fn of(member: &Member) -> Option<Self> {
        let by = |objective| Guardrail::new(member.clone(), objective);
        (member.objective == Objective::WorkPerSecond).then(|| Self {
            work: by(Objective::WorkPerSecond),
            cpu: by(Objective::CpuPerWork),
        })
    }
}

/// How long an effect with this time constant is given to set in.
pub(crate) fn settles(settling: Nanoseconds) -> Nanoseconds {
    Nanoseconds::from_secs_f64(settling.as_secs_f64() * SETTLING_CONSTANTS)
}

impl Experiment {
    pub(crate) fn new(setup: Setup, breaker: Breaker) -> Self {
        let savings = setup.panel.members().iter().filter_map(Saving::of).collect();
        Self {
            savings,
            coins: Coins::new(setup.seed, setup.id),
            trial: Trial::new(setup.parameters.clone()),
            breaker,
            parts: Vec::new(),
            rails: Vec::new(),
            spans: Vec::new(),
            span_rise_max: 0.0,
            meanings: Vec::new(),
            borrowed: Vec::new(),
            rest: Vec::new(),
            staged: None,
            trip: None,
            orphans: BTreeSet::new(),
            blamed: BTreeSet::new(),
            hindered: false,
            most_lost: Rereads::default(),
            not_now: false,
            rehearsal: false,
            begun: 0,
            fallen_since: None,
            phase: Phase::Preparing,
            blocks: Vec::new(),
            known: Vec::new(),
            prepared: 0.0,
            on: true,
            settled: false,
            washout: setup.washout_min + setup.lag,
            lag_seen: Nanoseconds::ZERO,
            stalled: Nanoseconds::ZERO,
            bloat: Bytes::ZERO,
            beside: Beside::default(),
            verdict: None,
            reason: String::new(),
            own_end: false,
            chosen_for: Nanoseconds::ZERO,
            onset: Onset::default(),
            settled_at: None,
            switch_started: setup.started,
            switches: VecDeque::new(),
            setup,
        }
    }

    /// The actions that are switched: those of the part of a rollout that goes on round trips, else of the first part.
    pub(crate) fn switched(&self) -> &[ActionId] {
        self.parts.get(self.trip.unwrap_or(0)).map_or(&[], Vec::as_slice)
    }

    /// The part that is being made or switched.
    pub(crate) fn moving(&self) -> &[ActionId] {
        match (&self.staged, self.trip) {
            (Some(s), None) => self.parts.get(s.stage).map_or(&[], Vec::as_slice),
            _ => self.switched(),
        }
    }

    /// Measured part of the blocks or slots that run.
    pub(crate) fn measured(&self) -> Nanoseconds {
        match &self.staged {
            Some(s) if self.begun == 0 => s.measured(),
            _ => self.setup.measured,
        }
    }

    /// All its actions, in the order in which they are made.
    pub(crate) fn actions(&self) -> Vec<ActionId> {
        self.parts.iter().flatten().copied().collect()
    }

    /// What follows on its evidence: the pieces that were not tried, or the parts of a rollout that were not made.
    pub(crate) fn rest(&self) -> Vec<Piece> {
        let unmade = self
            .staged
            .iter()
            .flat_map(|s| s.parts.iter().skip(self.parts.len()));
        self.rest.iter().chain(unmade.flatten()).cloned().collect()
    }

    /// Evidence for a gain (e-value).
    pub(crate) fn evidence(&self) -> f64 {
        let trial = self.trial.evidence();
        match &self.staged {
            // One process with one threshold: half of the capital is bet on the stages, and what there is after them on
            // the round trips, if it comes to that.
            Some(s) if matches!(self.phase, Phase::Stage) || self.begun == 0 => s.capital(),
            Some(s) => s.capital() * trial,
            None => trial,
        }
    }

    /// Begins a rollout.
    pub(crate) fn roll_out(&mut self, staged: Staged, now: Nanoseconds) -> Need {
        self.staged = Some(staged);
        self.on = false;
        self.settled = true;
        self.begin_stage(0, now)
    }

    fn begin_stage(&mut self, stage: usize, now: Nanoseconds) -> Need {
        let left = (self.setup.started + self.setup.budget).saturating_sub(now);
        let Some(s) = &mut self.staged else {
            return Need::Nothing;
        };
        s.begin(stage, now, left, settles(self.setup.settling));
        self.washout = s.discard;
        let onset = self.coins.onset();
        s.set_onset(onset);
        self.phase = Phase::Stage;
        Need::Stage {
            stage: stage as u32,
            onset: onset as u32,
        }
    }

    /// Whether it is a rollout in stages.
    pub(crate) fn is_staged(&self) -> bool {
        self.setup.kind == ExperimentKind::StagedRollout
    }

    /// Whether its change is being made for the first time: if it cannot be made now, nothing was tried yet.
    pub(crate) fn begins(&self) -> bool {
        match self.phase {
            Phase::Preparing => true,
            Phase::Stage => self.parts.len() <= 1,
            Phase::Block(_) | Phase::Concluding => false,
        }
    }

    /// Whether an action belongs to it.
    pub(crate) fn owns(&self, action: ActionId) -> bool {
        self.setup.action == action || self.parts.iter().any(|p| p.contains(&action))
    }

    /// The change, with all that is switched with it, reached the state it was sent to.
    pub(crate) fn settled(&mut self, now: Nanoseconds) -> Need {
        self.settled = true;
        let took = now - self.switch_started;
        match self.phase {
            Phase::Preparing => {
                // The first conversion may take frames that were never used before, ten times as slow as later
                // ones: it says little about the switches to come, which are measured as they happen.
                self.prepared = 1.0;
                match (self.rehearsal, self.on) {
                    (false, _) if took > REHEARSAL_FROM => {
                        self.rehearsal = true;
                        self.rehearse(now, false)
                    }
                    (false, _) => {
                        self.note_switch(Nanoseconds(took.0 / FIRST_SWITCH_SLOWER));
                        if self.setup.urgent {
                            // First it protects; the coins come later.
                            return Need::Nothing;
                        }
                        self.begin(now)
                    }
                    (true, false) => {
                        self.note_switch(took);
                        self.rehearse(now, true)
                    }
                    (true, true) => {
                        self.note_switch(took);
                        self.begin(now)
                    }
                }
            }
            Phase::Block(_) => {
                self.note_switch(took);
                self.settled_at = Some(now);
                Need::Nothing
            }
            Phase::Stage => {
                if let Some(s) = &mut self.staged {
                    s.made(now);
                    let all = s.shares.get(s.stage).copied();
                    self.prepared = all.unwrap_or(1.0);
                }
                Need::Nothing
            }
            Phase::Concluding => Need::Nothing,
        }
    }

    /// Switches during the rehearsal.
    fn rehearse(&mut self, now: Nanoseconds, on: bool) -> Need {
        self.on = on;
        self.settled = false;
        self.switch_started = now;
        Need::Switch { on }
    }

    /// Whether the last seconds are a fall that the circuit breaker ends. A lull in the load is not a fall.
    fn falls(&mut self, from: Nanoseconds, now: Nanoseconds, gauge: &Gauge<'_>) -> bool {
        let span = BREAKER_SPAN.min(self.measured());
        let from = from.max(now.saturating_sub(span));
        gauge
            .last_seconds(from, now, span)
            .is_some_and(|score| self.breaker.trips(score))
    }

    /// Making the change for the first time is watched against the level before. It stops the program for up to half of
    /// the time (an effector's pace), which is the price of the trial and not its outcome; a program that comes nearly
    /// to a standstill for long is let go.
    fn poll_making(&mut self, now: Nanoseconds, gauge: &Gauge<'_>) -> Need {
        let from = now.saturating_sub(STANDSTILL_SPAN).max(self.setup.started);
        let score = gauge.last_seconds(from, now, STANDSTILL_SPAN);
        if !score.is_some_and(|s| self.breaker.below(s, STANDSTILL)) {
            self.fallen_since = None;
            return Need::Nothing;
        }
        let since = *self.fallen_since.get_or_insert(now);
        if now - since < STANDSTILL_FOR {
            return Need::Nothing;
        }
        let text = format!(
            "work fell by more than {:.0} % while the change was being made",
            STANDSTILL * 100.0
        );
        self.give_up(now, text)
    }

    fn fell(&self, when: &str) -> String {
        let share = 1.0 - homeostat_statistics::robust::exp(-self.breaker.fall());
        format!("work fell by more than {:.0} % {when}", share * 100.0)
    }

    fn poll_stage<'a>(
        &mut self,
        now: Nanoseconds,
        gauge: &Gauge<'_>,
        series: impl Fn(&WorkloadId) -> Option<&'a Series>,
        over_budget: bool,
    ) -> Need {
        let Some(s) = &mut self.staged else {
            return Need::Nothing;
        };
        let measuring = s.measuring_since(now);
        let making = s.moving.is_some();
        let part_on = self.on && !making;
        let slots_before = self.blocks.len();
        let state = s.poll(now, gauge, &mut self.blocks);
        let slots = self.blocks.get(slots_before..).unwrap_or_default();
        for slot in slots {
            let Some(span) = s.span_of(slot) else {
                continue;
            };
            for meaning in &mut self.meanings {
                if let Some(series) = series(meaning.workload()) {
                    meaning.observe_slot(series, span);
                }
            }
            // What their meters tell of the time before the slot is not this slot's.
            let left_out = self.setup.lag;
            let own_from =
                |member: &Member, series: &Series| member.own_from(series, span.from, left_out, span.to);
            for rail in &mut self.rails {
                if let Some(series) = series(rail.workload()) {
                    let from = own_from(rail.member(), series);
                    rail.observe_slot(series, span, from);
                }
            }
            for rail in &mut self.spans {
                if let Some(series) = series(rail.workload()) {
                    let from = own_from(rail.member(), series);
                    rail.observe_slot(series, span, from);
                }
            }
        }
        // At the end of a stage its loss is asked for first.
        let asks = !slots.is_empty() && !matches!(state, StagedState::Complete);
        if let Some(level) = s.level_before() {
            self.breaker.off_block(level);
        }
        self.breaker.block_started();
        if part_on {
            if let Some(from) = measuring {
                if self.falls(from, now, gauge) {
                    return self.give_up(now, self.fell("after a part of the change was made"));
                }
            }
        }
        if asks {
            if let Some(why) = self.changed_in_stages(None) {
                return self.give_up(now, why);
            }
        }
        if making {
            let need = self.poll_making(now, gauge);
            if need != Need::Nothing {
                return need;
            }
        }
        match state {
            StagedState::Broken(why) => self.give_up(now, why),
            _ if over_budget => self.end_rollout(now, true),
            StagedState::Running => Need::Nothing,
            StagedState::Onset => {
                let Some(s) = &mut self.staged else {
                    return Need::Nothing;
                };
                s.ordered = true;
                s.moving = Some(now);
                self.on = true;
                self.settled = false;
                self.switch_started = now;
                Need::Part { index: s.stage }
            }
            StagedState::Complete => match self.staged.as_mut().map(Staged::count) {
                Some(Err(why)) => self.give_up(now, why),
                _ => self.end_rollout(now, false),
            },
        }
    }

    /// What to say when a meter no longer means what it did, by the slots of the rollout.
    fn changed_in_stages(&self, at_last: Option<LastLook>) -> Option<String> {
        let asked = self.meanings.iter().filter(|m| m.watches()).count().max(1) as f64;
        let early = panel::GUARDRAIL_LEVEL_EARLY / asked;
        let at_last = at_last.map(|look| LastLook {
            level: look.level / asked,
            ..look
        });
        self.meanings
            .iter()
            .find_map(|m| m.changed_in_stages(early, at_last))
    }

    /// After a stage: goes on, ends, or decides. `over_budget`: with the evidence there is.
    fn end_rollout(&mut self, now: Nanoseconds, over_budget: bool) -> Need {
        let Some(s) = &self.staged else {
            return Need::Nothing;
        };
        let (estimate, advice, last, moving) = (
            s.rollout.estimate(),
            s.rollout.advice(),
            s.is_last(),
            s.moving.is_some(),
        );
        let (stage, stages, capital) = (s.stage, s.parts.len(), s.capital());
        let longest = self
            .setup
            .washout_max
            .saturating_sub(settles(self.setup.settling));
        let trip = s.round_trip(longest, SWITCH_MARGIN);
        let effect = self.effect();
        let parameters = &self.setup.parameters;
        let needed = 1.0 / parameters.alpha;
        let is_proven = capital >= needed && estimate.theta >= parameters.gate && !moving;
        let hurt = if is_proven {
            let gained = Some(panel::log_gain(effect.lower));
            self.hurt(By::Slots, panel::GUARDRAIL_LEVEL, gained)
        } else {
            self.hurt(By::Slots, panel::GUARDRAIL_LEVEL_EARLY, None)
        };
        if let Some(hurt) = hurt {
            return self.end_by_harm(now, effect, hurt);
        }
        if is_proven {
            let look = LastLook {
                gain: panel::log_gain(effect.estimate),
                share: s.shares.get(stage).copied().unwrap_or(1.0),
                level: panel::GUARDRAIL_LEVEL,
            };
            if let Some(why) = self.changed_in_stages(Some(look)) {
                return self.give_up(now, why);
            }
            let reason = format!(
                "evidence {capital:.0} (needed {needed:.0}) in {} of {stages} stages{}",
                stage + 1,
                self.largest_not_excluded()
            );
            return self.conclude(now, Verdict::Accepted, reason);
        }
        match advice {
            StagedAdvice::Undo => {
                let text = format!("{effect} after {} of {stages} stages: a loss", stage + 1);
                return self.conclude(now, Verdict::Harmful, text);
            }
            StagedAdvice::Freeze => {
                let text = format!("{effect}: the last of {} stages lost", stage + 1);
                return self.conclude(now, Verdict::Rejected, text);
            }
            StagedAdvice::Proceed => {}
        }
        if let Some(why) = self.changed_in_stages(None) {
            return self.give_up(now, why);
        }
        if over_budget {
            let length = now - self.setup.started;
            let text = format!("{effect} after {length}: not decided within the budget");
            return self.conclude(now, Verdict::Inconclusive, text);
        }
        if !last {
            return self.begin_stage(stage + 1, now);
        }
        let between = format!("{effect}, evidence {capital:.1} of {needed:.0} after {stages} stages");
        if estimate.theta < parameters.gate {
            return self.conclude(
                now,
                Verdict::Rejected,
                format!("{between}: no useful gain was seen"),
            );
        }
        let Some((part, took)) = trip else {
            let text = format!("{between}, and every part takes too long to be switched back and forth");
            return self.conclude(now, Verdict::Inconclusive, text);
        };
        let share = s.share_of(part).clamp(0.01, 1.0);
        self.trip = Some(part);
        // Round trips of one part. The capital is known before the first coin: the trial needs to bring the rest. A
        // part shows its share of the whole, so what counts as a gain or a loss is in proportion.
        let level = (parameters.alpha * capital).min(ALPHA_MAX);
        self.trial = Trial::new(TrialParameters {
            alpha: level,
            delta: parameters.delta * share,
            gate: parameters.gate * share,
            harm_margin: parameters.harm_margin * share,
            ..self.setup.parameters.clone()
        });
        self.washout = self.setup.washout_min + self.setup.lag;
        self.note_switch(took);
        self.begin(now)
    }

    /// Time passed and perhaps a sample came. `series` finds the readings of any workload.
    pub(crate) fn poll<'a>(
        &mut self,
        now: Nanoseconds,
        gauge: &Gauge<'_>,
        series: impl Fn(&WorkloadId) -> Option<&'a Series>,
    ) -> Need {
        let over_budget = now - self.setup.started > self.setup.budget;
        match &mut self.phase {
            Phase::Concluding => Need::Nothing,
            Phase::Preparing if over_budget => {
                self.give_up(now, "the change could not be made within the budget".into())
            }
            Phase::Preparing
                if self.setup.urgent && self.settled && now - self.setup.started >= FIRST_RELIEF =>
            {
                match recovery::seen(gauge, self.switch_started, now) {
                    Recovery::Took(time) => {
                        let constants = (time + RECOVERY_MARGIN).as_secs_f64() / SETTLING_CONSTANTS;
                        self.setup.settling = Nanoseconds::from_secs_f64(constants);
                    }
                    Recovery::UnderWay if now - self.setup.started < FIRST_RELIEF_MAX => {
                        return Need::Nothing;
                    }
                    Recovery::Unseen if now - self.setup.started < FIRST_RELIEF_UNSEEN => {
                        return Need::Nothing;
                    }
                    // What the strategy expects stands.
                    Recovery::UnderWay | Recovery::Unseen => {}
                }
                self.begin(now)
            }
            Phase::Preparing => self.poll_making(now, gauge),
            Phase::Stage => self.poll_stage(now, gauge, series, over_budget),
            Phase::Block(block) => {
                if !self.settled
                    && now - self.switch_started
                        > (self.washout - self.setup.lag).max(Nanoseconds::from_secs(1)) * SWITCH_PATIENCE
                {
                    let took = now - self.switch_started;
                    return self.give_up(
                        now,
                        format!(
                            "switching took longer than {took}: the change cannot be compared on and off"
                        ),
                    );
                }
                let measured_from = block.measure_from;
                if block.on && block.measuring(now) && self.falls(measured_from, now, gauge) {
                    return self.break_off(now, gauge, over_budget);
                }
                let Phase::Block(block) = &mut self.phase else {
                    return Need::Nothing;
                };
                let measured_from = block.measure_from;
                match block.poll(now, gauge) {
                    BlockState::Running => Need::Nothing,
                    // Idle again after one extension while the change is on, and never while it was off: that may be
                    // the change standing in the way of the work. It counts as broken; under no effect that only makes
                    // an accept less likely.
                    BlockState::Idle if block.on && self.blocks.iter().any(|b| !b.on) => {
                        self.break_off(now, gauge, over_budget)
                    }
                    BlockState::Idle => Need::Nothing,
                    BlockState::Unmeasurable(why) => self.give_up(now, why),
                    BlockState::Finished(record) => {
                        if !record.on {
                            self.breaker.off_block(record.score);
                        }
                        // What their meters tell of the time before the switch is not this block's.
                        let left_out = self.setup.lag;
                        let own_from = |member: &Member, series: &Series| {
                            member.own_from(series, measured_from, left_out, now)
                        };
                        let savings = self.savings.iter_mut().flat_map(|s| [&mut s.work, &mut s.cpu]);
                        for rail in self.rails.iter_mut().chain(savings) {
                            if let Some(series) = series(rail.workload()) {
                                let from = own_from(rail.member(), series);
                                rail.observe(series, record.on, from, now);
                                let lag = left_out_for(series.lag(&rail.member().meter), self.setup.measured);
                                self.lag_seen = self.lag_seen.max(lag);
                            }
                        }
                        for rail in &mut self.spans {
                            if let Some(series) = series(rail.workload()) {
                                let from = own_from(rail.member(), series);
                                rail.observe(series, record.on, from, now);
                            }
                        }
                        for meaning in &mut self.meanings {
                            if let Some(series) = series(meaning.workload()) {
                                meaning.observe(series, record.on, measured_from, now);
                            }
                        }
                        if let Some(series) = series(&self.setup.panel.lead().workload) {
                            self.learn_onset(series, record.on);
                        }
                        let decision = self.judge(record, now);
                        self.act_on(decision, now, over_budget)
                    }
                }
            }
        }
    }

    /// Ends an on block before its time; it counts as a loss.
    fn break_off(&mut self, now: Nanoseconds, gauge: &Gauge<'_>, over_budget: bool) -> Need {
        if let Phase::Block(block) = &self.phase {
            let record = block.broken(now, gauge);
            self.blocks.push(record);
        }
        let decision = self.trial.observe_broken();
        self.act_on(decision, now, over_budget)
    }

    fn act_on(&mut self, decision: Decision, now: Nanoseconds, over_budget: bool) -> Need {
        let decision = if decision == Decision::Continue && over_budget {
            self.trial.budget_exhausted()
        } else {
            decision
        };
        let told = self.effect_told();
        let effect = match told {
            Some(told) if decision == Decision::Continue && !is_told(self.blocks.len()) => told,
            _ => self.effect(),
        };
        let evidence = self.evidence();
        self.known.push(Traced { effect, evidence });
        let parameters = &self.setup.parameters;
        // One look at the end; before it only what is beyond doubt.
        let level = if decision == Decision::Benefit {
            panel::GUARDRAIL_LEVEL
        } else {
            panel::GUARDRAIL_LEVEL_EARLY
        };
        let asked_level = level;
        let gained = (decision == Decision::Benefit).then(|| panel::log_gain(effect.lower));
        // A part on round trips: what the stages say of others is asked, too.
        let by_stages = gained.is_some() && self.trip.is_some();
        let level = if by_stages { level / 2.0 } else { level };
        let hurt = self.hurt(By::Blocks, level, gained);
        let hurt = hurt.or_else(|| by_stages.then(|| self.hurt(By::Slots, level, gained))?);
        if let Some(hurt) = hurt {
            return self.end_by_harm(now, effect, hurt);
        }
        // After what others and response times say, which other readings tell; before a gain is believed. A loss is one either way.
        let asked = self.meanings.iter().filter(|m| m.watches()).count().max(1) as f64;
        let whole = (decision == Decision::Benefit).then(|| panel::log_gain(effect.estimate));
        // A part on round trips shows its share of the whole.
        let share = match (&self.staged, self.trip) {
            (Some(s), Some(part)) => s.share_of(part),
            _ => 1.0,
        };
        // Both questions together keep the level.
        let questions = if self.trip.is_some() { 2.0 } else { 1.0 };
        let changed =
            |m: &Meaning| m.changed(asked_level / asked / questions, whole.map(|gain| gain * share));
        let by_stages = || {
            let gain = whole.filter(|_| self.trip.is_some())?;
            self.changed_in_stages(Some(LastLook {
                gain,
                share: 1.0,
                level: panel::GUARDRAIL_LEVEL / questions,
            }))
        };
        if decision != Decision::Harm {
            if let Some(why) = self.meanings.iter().find_map(changed).or_else(by_stages) {
                return self.give_up(now, why);
            }
        }
        match decision {
            Decision::Continue => self.begin(now),
            Decision::Benefit => self.conclude(
                now,
                Verdict::Accepted,
                format!(
                    "evidence {:.0} (needed {:.0}) in {} blocks{}",
                    self.evidence(),
                    1.0 / parameters.alpha,
                    self.blocks.len(),
                    self.beside.told() + &self.price() + &self.largest_not_excluded()
                ),
            ),
            Decision::Harm | Decision::Futile if self.trip.is_some() => {
                // One part speaks for itself; what the whole does stands beside it.
                let part = self.trial.estimate();
                let (verdict, what) = match decision {
                    Decision::Harm => (Verdict::Harmful, "a loss"),
                    _ => (Verdict::Inconclusive, "too little to prove the whole by"),
                };
                let text = format!(
                    "{effect} by the stages; the part on round trips {:+.1} %: {what}",
                    part.effect * 100.0
                );
                self.conclude(now, verdict, text)
            }
            Decision::Harm => self.conclude(now, Verdict::Harmful, format!("{effect}: a loss")),
            Decision::Futile => self.conclude(
                now,
                Verdict::Rejected,
                format!(
                    "{effect}: a gain of {:.0} % or more is ruled out",
                    parameters.delta / self.setup.shown * 100.0
                ),
            ),
            Decision::Exhausted => {
                let length = now - self.setup.started;
                self.conclude(
                    now,
                    Verdict::Inconclusive,
                    format!("{effect} after {length}: not decided within the budget"),
                )
            }
        }
    }

    /// Ends it for the sake of somebody who lost by it.
    fn end_by_harm(&mut self, now: Nanoseconds, effect: Effect, hurt: Hurt) -> Need {
        self.hindered = hurt.is_neighbour;
        // Which neighbours there are is chance: the change itself may be good another time.
        let verdict = if hurt.is_neighbour {
            Verdict::Inconclusive
        } else {
            Verdict::Harmful
        };
        self.conclude(now, verdict, format!("{effect}, but {}", hurt.text))
    }

    /// The last switches say how long the next ones may take.
    fn note_switch(&mut self, took: Nanoseconds) {
        if self.switches.len() == SWITCHES {
            self.switches.pop_front();
        }
        self.switches.push_back(took);
    }

    fn begin(&mut self, now: Nanoseconds) -> Need {
        let mut underway = Nanoseconds::ZERO;
        if !self.settled {
            // A switch that is still under way has taken at least so long.
            underway = now - self.switch_started;
        }
        let coin = if self.trial.needs_coin() {
            let slowest = next_switch(self.switches.iter().copied()).max(underway);
            let margin = Nanoseconds::from_secs_f64(slowest.as_secs_f64() * SWITCH_MARGIN);
            let settling = self.settling();
            let wanted = (margin + settles(settling.min(EFFECT_SETTLING_MAX)))
                .max(settles(settling))
                .max(self.setup.washout_min);
            // Fixed before the coin is tossed, from the past only, and for both blocks of a pair: whether the first
            // of them needs a switch depends on the coin.
            if wanted > self.setup.washout_max {
                let max = self.setup.washout_max;
                return self.give_up(
                    now,
                    format!("it needs {wanted} to take effect, more than the longest washout ({max}): not comparable"),
                );
            }
            // A neighbour's meter may have been opened for this trial only.
            self.setup.lag = self.setup.lag.max(self.lag_seen);
            self.washout = wanted + self.setup.lag;
            self.choose_length();
            self.beside.fix();
            self.coins.toss_with(self.trial.chance_on())
        } else {
            false
        };
        let on = self.trial.next_arm(coin) == Arm::On;
        let index = if self.is_staged() {
            ROUND_TRIPS_FROM + self.begun
        } else {
            self.blocks.len() as u32
        };
        self.begun += 1;
        self.phase = Phase::Block(Block::start(index, on, now, self.washout, self.setup.measured));
        self.breaker.block_started();
        let switch = on != self.on;
        if switch {
            self.switch_started = now;
            self.settled = false;
            self.settled_at = None;
            self.on = on;
        }
        Need::Begin {
            block: index,
            on,
            switch,
        }
    }

    /// Time constant of the effect: as the switches so far show it, or as its strategy told it.
    pub(crate) fn settling(&self) -> Nanoseconds {
        let told = self.setup.settling.as_secs_f64();
        Nanoseconds::from_secs_f64(self.onset.constant(told))
    }

    /// The block that ended was the first one on after one that was off: what it shows of how the effect sets in.
    fn learn_onset(&mut self, series: &Series, on: bool) {
        let (Some(settled), Some(before)) = (self.settled_at.take(), self.blocks.last()) else {
            return;
        };
        let panel = &self.setup.panel;
        if !on || before.on || before.broken || panel.is_joint() || self.setup.urgent {
            return;
        }
        let member = panel.lead();
        // As it was read, with the noise that a control series may have taken out of its score.
        let sums = Sums {
            cpu: before.cpu.as_secs_f64(),
            work: before.work,
            work_seconds: before.measured.as_secs_f64(),
            intervals: 1,
            ..Sums::default()
        };
        let Some(level) = member.objective.score(&sums) else {
            return;
        };
        let readings = series.since(settled).filter_map(|i| {
            let begin = i.end.saturating_sub(Nanoseconds::from_secs_f64(i.seconds));
            let after = (begin.saturating_sub(settled)).as_secs_f64() + i.seconds / 2.0;
            let score = member.objective.score(&i.sums(&member.meter)?)?;
            (begin + EDGE_TOLERANCE >= settled).then_some((after, score - level))
        });
        self.onset.edge(readings);
    }

    /// Chooses how long the blocks to come are measured, when the washout is another than when that was done last.
    fn choose_length(&mut self) {
        let (washout, before) = (self.washout.as_secs_f64(), self.chosen_for.as_secs_f64());
        if (washout - before).abs() <= WASHOUT_CHANGED * before {
            return;
        }
        self.chosen_for = self.washout;
        let standstill = self.stall_per_round().as_secs_f64() / 2.0;
        let chosen = match &self.setup.lengths {
            Some(lengths) => lengths.choose(washout, standstill, &self.setup.parameters).ok(),
            None => None,
        };
        // Where the history is too short for blocks that a slow switch asks for, they are long all the same.
        let measured = chosen.map_or_else(
            || {
                self.setup
                    .measured
                    .as_secs_f64()
                    .max((washout * MEASURED_SHARE).ceil())
            },
            |choice| choice.measured_s,
        );
        self.setup.measured = Nanoseconds::from_secs_f64(measured);
    }

    /// The effect as it was told last: not after each block, since an interval is dear.
    pub(crate) fn effect_told(&self) -> Option<Effect> {
        self.known.last().map(|known| known.effect)
    }

    /// Ends the experiment for a reason that lies in the change or the load.
    pub(crate) fn give_up(&mut self, now: Nanoseconds, why: String) -> Need {
        self.own_end = true;
        self.conclude(now, Verdict::Aborted, why)
    }

    /// Ends the experiment; the change goes to its final state.
    pub(crate) fn conclude(&mut self, now: Nanoseconds, verdict: Verdict, reason: String) -> Need {
        // A change that was to stay and now cannot be made, or is no longer wanted, goes after all.
        if matches!(self.phase, Phase::Concluding) && (!self.on || verdict == Verdict::Accepted) {
            return Need::Nothing;
        }
        self.phase = Phase::Concluding;
        self.verdict = Some(verdict);
        self.reason = reason;
        self.on = verdict == Verdict::Accepted && self.setup.kind != ExperimentKind::Placebo;
        self.switch_started = now;
        self.settled = false;
        Need::Conclude { on: self.on }
    }

    pub(crate) fn effect(&self) -> Effect {
        if let Some(s) = &self.staged {
            let e = s.rollout.estimate();
            let end =
                |sign: f64| homeostat_statistics::robust::exp_m1(e.theta + sign * ROLLOUT_ERRORS * e.error);
            return Effect {
                estimate: e.effect,
                lower: end(-1.0),
                upper: end(1.0),
                confidence: panel::INTERVAL_CONFIDENCE,
            };
        }
        let e = self.trial.estimate();
        Effect {
            estimate: e.effect,
            lower: e.lower,
            upper: e.upper,
            confidence: e.confidence,
        }
    }

    /// Whether a member that was judged by its work per second turned out to have a load that is limited by what is offered:
    /// with the change on it used less CPU time for its work, and did no more of it. Whoever is saturated would have done
    /// more.
    pub(crate) fn shows_an_offered_load(&self, member: &Member) -> bool {
        let Some(seen) = self.savings.iter().find(|s| s.work.is_of(member)) else {
            return false;
        };
        seen.work
            .change()
            .zip(seen.cpu.change())
            .is_some_and(|(work, saved)| {
                saved.change >= panel::GUARDRAIL_FALL
                    && saved.change >= SAVED_ERRORS * saved.error
                    && work.change.abs() <= saved.change * WORK_STAYED
            })
    }

    /// What a member of a joint trial gained by itself (log units).
    pub(crate) fn own_change(&self, member: &Member) -> Option<Comparison> {
        self.rails.iter().find(|r| r.is_of(member))?.change()
    }

    /// The workloads that the trial looks at, as members or so as not to harm them.
    pub(crate) fn looks_at(&self) -> impl Iterator<Item = &WorkloadId> {
        self.setup
            .panel
            .workloads()
            .chain(self.rails.iter().map(Guardrail::workload))
    }

    /// Whether harm to a neighbour is seen by this meter.
    pub(crate) fn guards_by(&self, id: &WorkloadId, meter: &MeterId) -> bool {
        let guards = |r: &Guardrail| r.is_neighbour() && r.workload() == id && r.member().meter == *meter;
        !matches!(self.phase, Phase::Concluding) && self.rails.iter().any(guards)
    }

    /// The workloads whose spans are to be followed.
    pub(crate) fn follows(&self) -> impl Iterator<Item = &WorkloadId> {
        let over = matches!(self.phase, Phase::Concluding);
        self.spans
            .iter()
            .filter(move |s| !over && s.wanted())
            .map(SpanRail::workload)
    }

    /// What the change costs the reader that it contains, to be told with its verdict.
    fn price(&self) -> String {
        let Some(reader) = &self.setup.contained else {
            return String::new();
        };
        let of_it = || self.rails.iter().filter(|r| r.workload() == reader);
        let told: Vec<String> = of_it().filter_map(Guardrail::conceded).collect();
        match told.first() {
            Some(_) => format!("; {}", told.join(", ")),
            None if of_it().any(Guardrail::knows_the_reader) => String::new(),
            None => format!("; what {reader} lost by it is not known"),
        }
    }

    /// Standstill for one switch on and one off, on average.
    pub(crate) fn stall_per_round(&self) -> Nanoseconds {
        let switched_on = self.blocks.windows(2).filter(|b| b[1].on && !b[0].on).count() as u64;
        // It was made once before the first block, and once more in a rehearsal.
        Nanoseconds(self.stalled.0 / (1 + u64::from(self.rehearsal) + switched_on))
    }

    /// Whether its change protects from a loss, so that blocks without it are damage.
    pub(crate) fn protects(&self) -> bool {
        self.setup.urgent || self.setup.contained.is_some()
    }

    /// Harm exposure in percent × seconds: what the on blocks lost against off (off against on, of what protects), and the standstill of
    /// one of the threads that run for every second of a call that stops it.
    pub(crate) fn harm_exposure(&self) -> f64 {
        // A call stops the threads that need the piece it works on: one of those that run, it is taken.
        let stood = self.stalled.as_secs_f64() * 100.0 / self.setup.panel.cpus().max(1.0);
        let seconds = |on: bool| -> f64 {
            let blocks = self.blocks.iter().filter(|b| b.on == on);
            blocks.map(|b| (b.measured + self.washout).as_secs_f64()).sum()
        };
        let on_seconds = seconds(true);
        if let Some(s) = &self.staged {
            let loss = (-s.rollout.estimate().effect).clamp(0.0, 1.0);
            return loss * 100.0 * on_seconds + stood;
        }
        // From the scores themselves, not from the test, which bounds the influence of every block.
        let mean = |on: bool| {
            let scores: Vec<f64> = self
                .blocks
                .iter()
                .filter(|b| b.on == on && b.score.is_finite())
                .map(|b| b.score)
                .collect();
            (!scores.is_empty()).then(|| homeostat_statistics::robust::mean(&scores))
        };
        let (Some(on), Some(off)) = (mean(true), mean(false)) else {
            return stood;
        };
        let below =
            |low: f64, high: f64| (1.0 - homeostat_statistics::robust::exp(low - high)).clamp(0.0, 1.0);
        // What protects is made at once, and to be without it is the loss.
        let without = if self.protects() {
            below(off, on) * seconds(false)
        } else {
            0.0
        };
        100.0 * (below(on, off) * on_seconds + without) + stood
    }
}
