//! The watch over accepted changes: one guard for each.
//!
//! First *probation*: probe pairs (one block on, one off, in random order) interleaved one in four or, for large gains,
//! rarer, so that they cost at most half a percent of the work and a twentieth of the gain. They catch a change that
//! helps a little often and hurts a lot rarely. Then *holdback*: a probe pair every half hour, for ever, with a detector
//! whose false alarms are rare by construction. An alarm undoes the change at once; it may be tried afresh after the
//! back-off. Where an off block is damage (a change that protects), fine pairs come ever rarer, up to one a day, and wait for
//! the daily budget of lost work. After a pair that lost beyond the noise the next one comes as soon as in the probation, until it is clear
//! what it was: what a change costs, a probe does not. Members of a joint change by themselves and neighbours are watched
//! in the same pairs (`watch.rs`).
//!
//! While nobody works whose change it is, nothing can be learnt and probes wait; now and then one is made all the same,
//! since it may be the change that keeps a program from its work. A change that works and cannot be measured any more, pair
//! after pair, is undone: nothing stays that nobody can watch. Until then a meter that was lost is opened again and again
//! ([`crate::watched::Reopening`]), since one hiccup is no reason to give up what was proven.
//!
//! Parts that followed the tried part are switched together with it, so the guard's evidence covers them too, as long
//! as the whole can be switched within the longest washout; else only the tried part is probed, and `status` says so.
//! A one-way change is not probed: its guard keeps asking the strategy whether it is still wanted, and nothing more.
//! No probe runs while something further is looked for or tried on the same workload, unless it has waited for long.
//!
//! What was tried as one change of several workloads has one guard, is probed as one and undone as one; when one of the
//! workloads ends, or a person takes hold of it, the others keep the rest.

use crate::blocks::{BREAKER_SPAN, Block, BlockState};
use crate::canary::CanaryLog;
use crate::coins::Coins;
use crate::engine::{Change, Engine, UNDONE_BY_A_PERSON};
use crate::experiment::Experiment;
use crate::panel::{Member, Panel, log_gain};
use crate::policy::{Mode, Policy};
use crate::protocol::{Attempt, Command};
use crate::recall::Pair;
use crate::rollout::Piece;
use crate::series::{LOAD_SPAN, Series};
use crate::strategy::{Held, Load, Opinion};
use crate::view::Stage;
use crate::watch::{Found, Scores, Watch};
use crate::watched::Watched;
use homeostat_model::action::{PageMove, Target};
use homeostat_model::{
    ActionId, Bytes, Effect, ExperimentId, ExperimentRecord, Fingerprint, FreshGain, MemberOutcome, MeterId,
    Nanoseconds, Owner, StrategyId, Verdict, WorkloadId,
};
use homeostat_statistics::robust::ln;
use homeostat_statistics::schedule::{self, PROBATION_SPACING, SWITCH_MARGIN};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// After a pair that lost beyond the noise the next one comes after so many pair lengths …
const SUSPECT_SPACING: u64 = 1;
/// … and so many times the standstill that it causes, though no later than in the probation.
const STALL_SPACING: u64 = 10;
/// So many pairs are made at once when others begin to work on the machine: what they lose by it is not known yet.
const PAIRS_AT_ONCE: u32 = 3;
/// The coins of probes are journalled as blocks of the experiment that proved the change, from this number on.
const PROBES_FROM: u32 = 1 << 20;
/// Probe pairs in a row that were lost because the switch outlasted its block, after which the change is not probed.
const OUTLASTED_MAX: u32 = 3;
/// Probe pairs in a row that could not be measured although somebody worked, after which the change goes: nobody can watch
/// it.
const UNREAD_MAX: u32 = 24;
/// While everybody rests whose change it is, or the budget has no room, a probe that is due looks again after this …
const RESTING_LOOK: Nanoseconds = Nanoseconds::from_secs(60);
/// … and while they rest is made all the same after this, twice as long after each that found nobody at work …
const RESTING_PROBE: Nanoseconds = Nanoseconds::from_secs(3600);
/// … up to so many times.
const RESTING_DOUBLINGS: u32 = 4;
/// A probe that has been due for so long is held back by nothing that may wait.
const OVERDUE: Nanoseconds = Nanoseconds::from_secs(600);
/// Memory of an improved workload is inspected again this often, for parts that came later.
const REVIEW: Nanoseconds = Nanoseconds::from_secs(600);
/// New parts are added when they make up at least this share of what is converted.
const GROWTH_MIN: f64 = 0.05;
/// Parts that may wait for their stage.
const STAGES_MAX: usize = 16;
/// Parts that may follow.
const FOLLOWERS_MAX: usize = 256;
/// A change that leaves a workload too little for so long goes: longer than what waited in a block without it takes to be
/// done, and not much, since threads wait meanwhile.
const OUTGROWN_FOR: Nanoseconds = Nanoseconds::from_secs(20);
/// However long threads waited when a change was proven, no more than this, relative to running, is taken for what it was.
const WAITED_MAX: f64 = 2.0;
/// Who uses so many times more or fewer CPUs than when the change was last proven or probed, or whose threads take so many times as
/// long, waiting included, works in another way: what was proven holds of the way it worked …
const REGIME_TIMES: f64 = 1.25;
/// … and so does who has more or less room beside it, by this share of the machine's CPUs …
const REGIME_ROOM: f64 = 0.15;
/// … for so long.
const REGIME_FOR: Nanoseconds = Nanoseconds::from_secs(20);
/// However dear a probe is (one that moves memory back and forth), after so long the next may come for that.
const REGIME_PROBE_MAX: Nanoseconds = Nanoseconds::from_secs(600);
/// Probe pairs that may run between two trials while a proposal waits for its turn.
const PROBES_BETWEEN_TRIALS: u32 = 3;
/// A proposal older than this no longer holds the probes of its workload back.
pub(crate) const PROPOSAL_STALE: Nanoseconds = Nanoseconds::from_secs(600);

/// A probe pair in the making.
struct Probe {
    block: Block,
    /// Of both blocks, fixed before the coin is tossed.
    washout: Nanoseconds,
    /// Whether that is the long one, which a scar of the undo does not outlast.
    is_long: bool,
    /// Whether the first block was on, and what it showed.
    first: Option<(bool, Scores)>,
    switch_started: Nanoseconds,
}

/// The guard of one accepted change.
pub(crate) struct Guard {
    pub(crate) strategy: StrategyId,
    /// Its name: the first action that was tried.
    pub(crate) key: ActionId,
    /// What was tried, in the order in which it was made: an action for each workload. The guard goes when the last of
    /// them goes.
    pub(crate) tried: Vec<ActionId>,
    /// Parts that followed.
    pub(crate) followers: Vec<ActionId>,
    /// Whose work judges, and what it shows.
    watch: Watch,
    pub(crate) effect: Effect,
    /// When it was accepted.
    pub(crate) since: Nanoseconds,
    /// What was proven, for people.
    pub(crate) sentence: String,
    /// The experiment that accepted the change, rewritten when the change is revoked.
    record: ExperimentRecord,
    /// Whose memory and who takes it, if the change is to contain a reader.
    pair: Option<Pair>,
    /// Parts that wait for their turn.
    stages: VecDeque<Piece>,
    stage_due: Nanoseconds,
    stage_running: Option<ActionId>,
    /// Whether the change can be switched back and forth for probes.
    switchable: bool,
    /// Whether the parts that followed are switched together with the tried one.
    together: bool,
    washout: Nanoseconds,
    /// How much of that is for meters that tell late.
    lag: Nanoseconds,
    measured: Nanoseconds,
    coins: Coins,
    /// Probe pairs begun, for the numbers of their coins.
    pairs: u32,
    /// Probe pairs in a row that were lost because the switch outlasted its block.
    outlasted: u32,
    /// … because there were no readings.
    unread: u32,
    /// … because nobody worked.
    resting: u32,
    /// Since when nobody works although a probe is due.
    resting_since: Option<Nanoseconds>,
    /// Meters of neighbours that were opened for the probe that runs.
    borrowed: Vec<(WorkloadId, MeterId)>,
    /// Standstill that switching off and on again causes.
    stall: Nanoseconds,
    next_probe: Nanoseconds,
    probe: Option<Probe>,
    pieces: u64,
    review_at: Nanoseconds,
    /// Gain and standstill of what lay over it at its last probe, which a probe switches too.
    over_gain: f64,
    over_stall: Nanoseconds,
    /// The reader that it contains.
    contained: Option<WorkloadId>,
    /// So many probe pairs are made at once, without a pause between them.
    at_once: u32,
    /// Whether it protects from a loss, so that to be without it is damage.
    protects: bool,
    /// Probe pairs in a row after the probation in which nothing was suspected, since the regime last changed.
    fine_pairs: u32,
    /// Since when the probe that is due waits for the daily budget of lost work.
    short_since: Option<Nanoseconds>,
    /// Work that the last probe pair cost (seconds).
    lost: f64,
    /// Most of its work that a reader may lose by being contained.
    reader_loss_max: f64,
    /// Since when it leaves each of these too little.
    outgrown_since: BTreeMap<WorkloadId, Nanoseconds>,
    /// Since when none of its workloads does anything.
    pub(crate) idle_since: Option<Nanoseconds>,
    /// How long threads waited for a CPU soon after the acceptance, and how long they ran: sums over the samples.
    waited: BTreeMap<WorkloadId, (f64, f64)>,
    /// Since when that is noted.
    waits_from: Option<Nanoseconds>,
    /// Share of the machine's CPUs that was busy then: sum over the samples, and their number.
    busy_then: (f64, u32),
    /// How the machine and they worked when the change was last proven or probed.
    regime: Option<Regime>,
    /// Since when they work in another way.
    other_since: Option<Nanoseconds>,
    /// Whether others worked beside it.
    others_worked: bool,
    /// When the last pair ended in which nothing was suspected; at first, when it was accepted.
    fine_at: Nanoseconds,
    /// When the last probe pair ended; at first, when it was accepted.
    probed_at: Nanoseconds,
    /// Threads of each workload that ran or waited for a CPU before its place was tried.
    runnable: BTreeMap<WorkloadId, f64>,
}

impl Guard {
    pub(crate) fn new(
        e: &Experiment,
        record: ExperimentRecord,
        sentence: String,
        now: Nanoseconds,
        policy: &Policy,
    ) -> Self {
        // Those of the trial.
        let (washout, measured) = (e.washout, e.setup.measured);
        let pair = (washout + measured) * 2;
        let (tried, followers) = match e.parts.split_first() {
            Some((first, further)) => (first.clone(), further.iter().flatten().copied().collect()),
            None => (vec![e.setup.action], Vec::new()),
        };
        Self {
            reader_loss_max: policy.reader_loss_max,
            strategy: e.setup.strategy.clone(),
            key: e.setup.action,
            tried,
            followers,
            watch: Watch::new(e, policy.probation_pairs, policy.cpu_min),
            effect: e.effect(),
            since: now,
            sentence,
            record,
            pair: e.setup.pair(),
            stages: e.rest().into(),
            stage_due: now + pair,
            stage_running: None,
            switchable: !e.is_staged(),
            together: true,
            washout,
            lag: e.setup.lag,
            measured,
            // A stream of coins apart from that of the experiment.
            coins: Coins::new(e.setup.seed ^ 0x6775_6172_6400_0000, e.setup.id),
            pairs: 0,
            outlasted: 0,
            unread: 0,
            resting: 0,
            resting_since: None,
            borrowed: Vec::new(),
            stall: e.stall_per_round(),
            next_probe: now + probe_interval(pair, e.effect().estimate, e.stall_per_round()),
            contained: e.setup.contained.clone(),
            over_gain: 0.0,
            over_stall: Nanoseconds::ZERO,
            at_once: 0,
            protects: e.protects(),
            fine_pairs: 0,
            short_since: None,
            lost: 0.0,
            probe: None,
            pieces: 0,
            review_at: now + REVIEW,
            outgrown_since: BTreeMap::new(),
            idle_since: None,
            waited: BTreeMap::new(),
            waits_from: None,
            busy_then: (0.0, 0),
            regime: None,
            other_since: None,
            others_worked: false,
            fine_at: now,
            probed_at: now,
            runnable: e.setup.places.runnable(),
        }
        .conceding()
    }

    /// How much it gains is told by probe pairs that are made at once, since the trial stopped when it looked best; if they do not cost
    /// too much work, as they do where being off is what the change protects from.
    pub(crate) fn measured_afresh(mut self, others_work: bool, now: Nanoseconds) -> Self {
        let earned_in = fresh_earned_in_s(self.panel());
        let pairs = if self.is_cheap(self.watch.fresh_pairs, earned_in) {
            self.watch.fresh_pairs
        } else {
            0
        };
        if self.switchable && !self.protects && self.watch.in_probation() && pairs > 0 {
            self.at_once = pairs;
            self.next_probe = now;
        }
        self.others_worked = others_work;
        self
    }

    /// Whether so many pairs at once cost little enough.
    fn is_cheap(&self, pairs: u32, earned_in: f64) -> bool {
        let off = (self.washout + self.measured).as_secs_f64();
        schedule::is_cheap(
            pairs,
            self.effect.estimate,
            off,
            self.stall.as_secs_f64(),
            earned_in,
        )
    }

    /// Work that a pair costs that is off for so long (seconds).
    fn lost_in(&self, off: Nanoseconds) -> f64 {
        schedule::lost_by_s(
            1.0,
            self.effect.estimate,
            off.as_secs_f64(),
            self.stall.as_secs_f64(),
        )
    }

    /// Who is contained may lose what is sure to be gained by it.
    fn conceding(mut self) -> Self {
        if let Some(reader) = &self.contained {
            let gained = log_gain(self.effect.lower);
            self.watch.concede(reader.clone(), self.reader_loss_max, gained);
        }
        self
    }

    /// The same of a change that is being made again, on an effect that was proven earlier, by which its probes are spaced.
    pub(crate) fn of_recall(mut self, effect: Effect, now: Nanoseconds) -> Self {
        self.effect = effect;
        self.next_probe = now + self.probe_interval();
        // As while a further part is made: nobody probes or tries anything beside it.
        self.stage_running = Some(self.key);
        self.conceding()
    }

    /// Whether a probe is under way.
    pub(crate) fn probes(&self) -> bool {
        self.probe.is_some()
    }

    /// Whether a probe or a stage is under way, or what it guards is being made: then no other trial or probe starts.
    pub(crate) fn busy(&self) -> bool {
        self.probe.is_some() || self.stage_running.is_some()
    }

    /// Whether parts wait for their turn.
    pub(crate) fn parts_wait(&self) -> bool {
        !self.stages.is_empty()
    }

    /// The actions of this change, in the order in which they were made.
    pub(crate) fn members(&self) -> impl Iterator<Item = ActionId> + '_ {
        self.tried.iter().chain(&self.followers).copied()
    }

    /// Whether nothing of what was tried is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.tried.is_empty()
    }

    /// The workloads whose change it guards.
    pub(crate) fn workloads(&self) -> impl Iterator<Item = &WorkloadId> {
        self.panel().workloads()
    }

    fn panel(&self) -> &Panel {
        self.watch.panel()
    }

    /// The workloads that the probe that runs looks at; none without one.
    pub(crate) fn looks_at(&self) -> impl Iterator<Item = &WorkloadId> {
        self.probe.iter().flat_map(|_| self.watch.looks_at())
    }

    /// The workloads whose spans are to be followed: while a probe runs.
    pub(crate) fn follows(&self) -> impl Iterator<Item = &WorkloadId> {
        self.probe.iter().flat_map(|_| self.watch.follows())
    }

    /// Lets go of a workload and its actions; what is left of a probe says nothing any more.
    pub(crate) fn lose_workload(
        &mut self,
        id: &WorkloadId,
        changes: &BTreeMap<ActionId, Change>,
        now: Nanoseconds,
    ) {
        let others = |a: &ActionId| changes.get(a).is_some_and(|c| c.action.workload != *id);
        self.tried.retain(others);
        self.followers.retain(others);
        self.stages.retain(|p| p.workload != *id);
        // A part that was being made for it is nobody's any more: the guard must not wait for it.
        if self.stage_running.is_some_and(|a| self.members().all(|m| m != a)) {
            self.stage_running = None;
        }
        if !self.watch.lose(id) {
            self.tried.clear();
        }
        // What was proven was proven of all: what is left is asked soon.
        self.next_probe = self.next_probe.min(now + self.pair());
        self.fine_pairs = 0;
        self.resting_since = None;
        self.probe = None;
    }

    /// What a probe switches, in the order in which it is made.
    fn switched(&self) -> Vec<ActionId> {
        if self.together {
            self.members().collect()
        } else {
            self.tried.clone()
        }
    }

    pub(crate) fn wants_detail(&self, now: Nanoseconds) -> bool {
        // The readings of the first block need a sample to start from.
        let comes = self.switchable && now + Nanoseconds::from_secs(3) >= self.next_probe;
        // Whether a place has become too small is for seconds to tell.
        self.busy() || comes || !self.outgrown_since.is_empty() || self.other_since.is_some()
    }

    pub(crate) fn describe(&self, now: Nanoseconds) -> String {
        if !self.switchable && self.outlasted >= OUTLASTED_MAX {
            return "switching takes too long: not probed, withdrawn when it is no longer wanted".to_owned();
        }
        if !self.switchable {
            return "one-way change: not probed, withdrawn when it is no longer wanted".to_owned();
        }
        let next = self.next_probe.saturating_sub(now);
        let (pairs, lately) = (self.watch.pairs(), self.watch.lately());
        let when = match (self.resting_since, self.short_since) {
            (Some(since), _) => format!("the next waits for it to work, since {}", now - since),
            (None, Some(since)) => format!(
                "the next waits for the daily budget of lost work (`harm_exposure_per_day_max`), since {}",
                now - since
            ),
            (None, None) if next == Nanoseconds::ZERO && self.probe.is_none() => {
                format!("the next is due since {}", now.saturating_sub(self.next_probe))
            }
            (None, None) => format!("next in {next}"),
        };
        let mut text = if self.probe.is_some() {
            format!("probing (pair {}{lately})", pairs + 1)
        } else if self.watch.in_probation() {
            format!("probation: {pairs} probe pairs done{lately}, {when}")
        } else {
            format!("passed probation; {pairs} probe pairs done{lately}, {when}")
        };
        if !self.together && !self.followers.is_empty() {
            text.push_str("; only the tried part is probed, the whole takes too long to switch");
        }
        text
    }

    fn probe_interval(&self) -> Nanoseconds {
        // What lies over it goes and comes back with it.
        let gain = (1.0 + self.effect.estimate) * (1.0 + self.over_gain) - 1.0;
        probe_interval(self.next_pair(), gain, self.stall + self.over_stall)
    }

    /// Length of a pair with the usual washout.
    fn pair(&self) -> Nanoseconds {
        (self.washout + self.measured) * 2
    }

    /// Whether the pair to come begins late. Whether the change does harm is to be known sooner than what its undo leaves.
    fn is_long_next(&self) -> bool {
        let looks = self.watch.in_probation() && self.watch.looks_for_a_scar();
        looks && !self.watch.suspicious() && self.other_since.is_none()
    }

    /// Length of the pair to come.
    fn next_pair(&self) -> Nanoseconds {
        let washout = if self.is_long_next() {
            self.long_washout()
        } else {
            self.washout
        };
        (washout + self.measured) * 2
    }

    /// Meters that tell late tell no later then.
    fn long_washout(&self) -> Nanoseconds {
        let own = self.washout.saturating_sub(self.lag);
        self.lag + Nanoseconds::from_secs_f64(schedule::long_washout_s(own.as_secs_f64()))
    }

    /// What was proven holds of the way in which the program worked then. Where it works in another, the next probe comes as soon as
    /// in the probation, or ten minutes after the last one, however dear it is.
    fn hasten(&mut self, regime: Regime, others_work: bool, now: Nanoseconds) {
        if others_work && !std::mem::replace(&mut self.others_worked, others_work) {
            self.at_once = self.watch.pairs().saturating_add(PAIRS_AT_ONCE);
            self.next_probe = self.next_probe.min(now + self.pair());
            self.fine_pairs = 0;
        }
        if now < self.since + LOAD_SPAN || now < self.probed_at + LOAD_SPAN {
            return;
        }
        let Some(then) = &self.regime else {
            self.regime = Some(regime);
            return;
        };
        if !regime.differs(then) {
            self.other_since = None;
            return;
        }
        let since = *self.other_since.get_or_insert(now);
        if now - since >= REGIME_FOR {
            self.fine_pairs = 0;
            let soonest = self.probed_at + self.probe_interval().min(REGIME_PROBE_MAX);
            self.next_probe = self.next_probe.min(soonest.max(now));
        }
    }

    /// Soon after the acceptance, when the recent load holds nothing of the trial any more: what was proven with so much waiting
    /// is outgrown by more only. Whether it is still too soon to say that it is outgrown.
    fn learns_waits(&mut self, loads: &[(WorkloadId, Load)], machine_busy: f64, now: Nanoseconds) -> bool {
        if now < self.since + LOAD_SPAN {
            return true;
        }
        let from = *self.waits_from.get_or_insert(now);
        if now - from >= OUTGROWN_FOR {
            return false;
        }
        if machine_busy.is_finite() {
            self.busy_then = (
                self.busy_then.0 + machine_busy,
                self.busy_then.1.saturating_add(1),
            );
        }
        for (id, load) in loads {
            // Weighted by how much it ran: who rests says nothing.
            let (waited, ran) = self.waited.entry(id.clone()).or_default();
            if load.runqueue_wait.is_finite() && load.cpus.is_finite() {
                *waited += load.runqueue_wait * load.cpus;
                *ran += load.cpus;
            }
        }
        true
    }

    /// Whether something looks like a loss, and the probe that will tell comes soon: nothing else starts before it.
    pub(crate) fn suspects(&self, now: Nanoseconds) -> bool {
        self.watch.suspicious()
            && self.switchable
            && self.resting_since.is_none()
            && now < self.next_probe + OVERDUE
    }

    /// What it has cost since nothing was suspected, in percent × seconds.
    fn harm(&self, now: Nanoseconds) -> f64 {
        100.0 * self.watch.loss() * (now - self.fine_at).as_secs_f64()
    }

    /// Share of the machine's CPUs that was busy soon after the acceptance; none where that is not known.
    fn machine_busy(&self) -> f64 {
        match self.busy_then {
            (_, 0) => 0.0,
            (sum, samples) => sum / f64::from(samples),
        }
    }

    fn waited(&self, id: &WorkloadId) -> f64 {
        match self.waited.get(id) {
            Some((waited, ran)) if *ran > 0.0 => (waited / ran).min(WAITED_MAX),
            _ => 0.0,
        }
    }
}

/// Time between two probe pairs of the probation: `pair` is the length of one, `gain` the proven relative gain, `stall` the
/// standstill that switching off and on again causes.
fn probe_interval(pair: Nanoseconds, gain: f64, stall: Nanoseconds) -> Nanoseconds {
    let apart = schedule::probe_interval_s(pair.as_secs_f64(), gain, stall.as_secs_f64());
    Nanoseconds::from_secs_f64(apart).max(pair * PROBATION_SPACING)
}

/// The pairs right after the acceptance may cost what the change earns in this (seconds). A quick verdict says little of what
/// one of several loses.
pub(crate) fn fresh_earned_in_s(panel: &Panel) -> f64 {
    let times = if panel.is_joint() { 5.0 } else { 1.0 };
    times * schedule::FRESH_EARNED_IN_S
}

/// What a guard found.
enum Finding {
    Nothing,
    Switch(bool),
    Alarm(String, Verdict),
    Passed,
}

/// How a machine and some of its workloads work: the level of each is a mean over the last half minute.
#[derive(Clone, Debug, PartialEq)]
struct Regime {
    /// CPUs that each uses, and how long its threads wait for one relative to the time they run.
    loads: BTreeMap<WorkloadId, (f64, f64)>,
    /// Share of the machine's CPUs that is busy.
    machine_busy: f64,
    /// What else is in force: others' places may keep them from what this change takes from them.
    beside: BTreeSet<ActionId>,
}

impl Regime {
    fn of(loads: &[(WorkloadId, Load)], machine_busy: f64, beside: BTreeSet<ActionId>) -> Self {
        let of = |(id, load): &(WorkloadId, Load)| (id.clone(), (load.cpus, load.runqueue_wait));
        Self {
            loads: loads.iter().map(of).collect(),
            machine_busy,
            beside,
        }
    }

    /// Whether one that works now works in another way than then, or there is another amount of room beside it.
    fn differs(&self, then: &Self) -> bool {
        let apart = |now: f64, then: f64| ln((now + 0.1) / (then + 0.1)).abs() > ln(REGIME_TIMES);
        let others = |(id, (cpus, wait)): (&WorkloadId, &(f64, f64))| {
            then.loads
                .get(id)
                .is_some_and(|t| apart(*cpus, t.0) || apart(1.0 + wait, 1.0 + t.1))
        };
        let beside = self.beside != then.beside;
        beside || self.loads.iter().any(others) || (self.machine_busy - then.machine_busy).abs() > REGIME_ROOM
    }
}

/// A coin as it is journalled: whose, its number, its face.
type Coin = (ExperimentId, u32, bool);

/// Whether the probes of a workload must wait: something further is looked for or tried on it. `overdue`: a probe has waited
/// for long; `may_try`: a trial could start now.
fn held_back(w: &Watched, now: Nanoseconds, overdue: bool, may_try: bool) -> bool {
    match w.stage {
        Stage::Trying => true,
        // What waits for a budget may wait for a day.
        Stage::Proposed => {
            may_try && !overdue && w.proposed.as_ref().is_some_and(|p| now - p.at < PROPOSAL_STALE)
        }
        _ => w.seeking && !overdue,
    }
}

/// All guards, by name, and which of them watch over a workload.
#[derive(Default)]
pub(crate) struct Guards {
    by_key: BTreeMap<ActionId, Guard>,
    of: BTreeMap<WorkloadId, BTreeSet<ActionId>>,
}

impl Guards {
    pub(crate) fn insert(&mut self, guard: Guard) {
        for id in guard.workloads() {
            self.of.entry(id.clone()).or_default().insert(guard.key);
        }
        self.by_key.insert(guard.key, guard);
    }

    pub(crate) fn get(&self, key: ActionId) -> Option<&Guard> {
        self.by_key.get(&key)
    }

    pub(crate) fn get_mut(&mut self, key: ActionId) -> Option<&mut Guard> {
        self.by_key.get_mut(&key)
    }

    /// All of them, oldest first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Guard> {
        self.by_key.values()
    }

    /// Those that watch over a workload, oldest first.
    pub(crate) fn of(&self, id: &WorkloadId) -> impl Iterator<Item = &Guard> {
        self.of
            .get(id)
            .into_iter()
            .flatten()
            .filter_map(|key| self.by_key.get(key))
    }

    /// Whether something is in force for a workload.
    pub(crate) fn any(&self, id: &WorkloadId) -> bool {
        self.of.contains_key(id)
    }

    /// A guard lets go of a workload; without any left it goes.
    fn release(
        &mut self,
        key: ActionId,
        id: &WorkloadId,
        changes: &BTreeMap<ActionId, Change>,
        now: Nanoseconds,
    ) {
        if let Some(of) = self.of.get_mut(id) {
            of.remove(&key);
            if of.is_empty() {
                self.of.remove(id);
            }
        }
        if let Some(g) = self.by_key.get_mut(&key) {
            g.lose_workload(id, changes, now);
            if g.is_empty() {
                self.by_key.remove(&key);
            }
        }
    }

    /// All guards let go of a workload.
    pub(crate) fn release_all(
        &mut self,
        id: &WorkloadId,
        changes: &BTreeMap<ActionId, Change>,
        now: Nanoseconds,
    ) {
        for key in self.of.get(id).cloned().unwrap_or_default() {
            self.release(key, id, changes, now);
        }
    }
}

impl Engine {
    pub(crate) fn poll_guards(&mut self) {
        let keys: Vec<ActionId> = self.guards.all().map(|g| g.key).collect();
        if keys.is_empty() {
            return;
        }
        // Many guards together always have a probe that is due; proposals must get their turn all the same, and a proposal
        // that does not take it must not hold the guards up.
        let may_try = self.may_try();
        let turn_over = may_try && self.probes_since_trial >= PROBES_BETWEEN_TRIALS && self.proposal_waits();
        match (turn_over, self.turn_over_since) {
            (false, _) => self.turn_over_since = None,
            (true, None) => self.turn_over_since = Some(self.now),
            (true, Some(since)) if self.now - since >= OVERDUE => {
                self.turn_over_since = None;
                self.probes_since_trial = 0;
            }
            (true, Some(_)) => {}
        }
        let mut busy = self.busy_guard();
        for key in keys {
            if self.stopping.is_some() {
                return;
            }
            self.withdraw_if_unwanted(key);
            let over = may_try && self.probes_since_trial >= PROBES_BETWEEN_TRIALS && turn_over;
            self.poll_guard(key, over, busy.is_some_and(|other| other != key), may_try);
            let is_busy = |key: &ActionId| self.guards.get(*key).is_some_and(Guard::busy);
            busy = busy.filter(is_busy).or(Some(key).filter(is_busy));
        }
    }

    /// A guard that probes or adds a part, if any.
    pub(crate) fn busy_guard(&self) -> Option<ActionId> {
        self.guards.all().find(|g| g.busy()).map(|g| g.key)
    }

    /// What is in force for a workload, in the order of acceptance.
    pub(crate) fn held(&self, id: &WorkloadId) -> Vec<Held> {
        let mut guards: Vec<&Guard> = self.guards.of(id).collect();
        guards.sort_by_key(|g| (g.since, g.key));
        guards
            .into_iter()
            .filter_map(|g| {
                Some(Held {
                    strategy: g.strategy.clone(),
                    target: self.whole_target(g, id)?,
                    effect: g.effect,
                    waited: g.waited(id),
                    runnable: g.runnable.get(id).copied().unwrap_or(0.0),
                    machine_busy: g.machine_busy(),
                })
            })
            .collect()
    }

    /// The target of a change of this workload with its further parts: pages on the way to one node are added up; else
    /// that of the tried part.
    fn whole_target(&self, g: &Guard, id: &WorkloadId) -> Option<Target> {
        let mut own = g
            .members()
            .filter_map(|a| self.changes.get(&a))
            .filter(|c| c.action.workload == *id)
            .map(|c| &c.action.target);
        let first = own.next()?;
        let Target::Pages(first) = first else {
            return Some(first.clone());
        };
        let further: Bytes = own
            .filter_map(|target| match target {
                Target::Pages(p) if p.node == first.node => Some(p.bytes),
                _ => None,
            })
            .sum();
        Some(Target::Pages(PageMove {
            bytes: first.bytes + further,
            ..*first
        }))
    }

    /// A person chose otherwise since: ours goes first, for the workload that the choice is about. Or it has left one too
    /// little for a while.
    fn withdraw_if_unwanted(&mut self, key: ActionId) {
        let Some(g) = self.guards.get(key) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        // Where it was off until a moment ago, what waited is being done. And of several that lie over each other the topmost is
        // what holds.
        let is_on = |a: ActionId| self.changes.get(&a).is_none_or(|c| c.on);
        let steady =
            g.probe.is_none() && self.all_settled(g) && g.members().all(is_on) && self.over(g).is_empty();
        let mut outgrown = BTreeMap::new();
        let members: Vec<WorkloadId> = g.workloads().cloned().collect();
        for id in members.clone() {
            let change = self
                .tried_on(key, &id)
                .and_then(|action| self.changes.get(&action));
            let (unwanted, small) = self
                .ask(&id, index, Vec::new(), |strategy, seen| {
                    let unwanted = match change {
                        Some(change) => strategy.unwanted_change(seen, &change.action.target),
                        None => strategy.unwanted(seen),
                    };
                    (unwanted, strategy.outgrown(seen))
                })
                .unwrap_or_default();
            match (unwanted, small) {
                (Some(why), _) => self.withdraw_from(key, &id, &why),
                (None, Some(why)) if steady => {
                    outgrown.insert(id, why);
                }
                (None, _) => {}
            }
        }
        let now = self.now;
        let loads: Vec<(WorkloadId, Load)> = members
            .iter()
            .filter_map(|id| Some((id.clone(), self.workloads.get(id)?.load.clone())))
            .collect();
        let machine_busy = self.machine_busy();
        let works = |(_, load): &(WorkloadId, Load)| load.cpus >= self.policy.cpu_min;
        let anybody = loads.iter().any(works);
        let others_work = self.others_work(&members);
        let beside: BTreeSet<ActionId> = self.guards.all().map(|g| g.key).collect();
        if self.withdraw_if_idle(key, anybody) {
            return;
        }
        let Some(g) = self.guards.get_mut(key) else { return };
        if steady {
            if anybody {
                g.hasten(Regime::of(&loads, machine_busy, beside), others_work, now);
            } else {
                g.other_since = None;
            }
            if g.learns_waits(&loads, machine_busy, now) {
                return;
            }
        }
        g.outgrown_since.retain(|id, _| outgrown.contains_key(id));
        let mut long = None;
        for (id, why) in outgrown {
            let since = *g.outgrown_since.entry(id.clone()).or_insert(now);
            if now - since >= OUTGROWN_FOR {
                long = long.or(Some((id, why)));
            }
        }
        // One at a time: the others may have enough without it.
        if let Some((id, why)) = long {
            g.outgrown_since.clear();
            self.withdraw_from(self.lowest_as_small(key, &id), &id, &why);
        }
    }

    /// Of the places of a workload that lie over each other, the lowest with no more CPUs than that of this guard: to go back to
    /// such a one would give it no more room. What lies over it goes with it.
    fn lowest_as_small(&self, key: ActionId, id: &WorkloadId) -> ActionId {
        let cpus = |g: &Guard| match self.whole_target(g, id) {
            Some(Target::Cpus(cpus)) => Some(self.machine.online_among(&cpus)),
            _ => None,
        };
        let Some(own) = self.guards.get(key).and_then(cpus) else {
            return key;
        };
        let small = |g: &&Guard| g.key < key && cpus(g).is_some_and(|count| count <= own);
        self.guards
            .of(id)
            .filter(small)
            .map(|g| g.key)
            .min()
            .unwrap_or(key)
    }

    /// Takes the change back from one of its workloads.
    pub(crate) fn withdraw_from(&mut self, key: ActionId, id: &WorkloadId, why: &str) {
        if let Some(action) = self.tried_on(key, id) {
            let why = format!("withdrawn: {why}");
            self.narrate(id, why.clone(), true);
            self.withdraw(action, &why);
        }
    }

    /// The action of a guard that was tried on this workload.
    fn tried_on(&self, key: ActionId, id: &WorkloadId) -> Option<ActionId> {
        let on = |a: &ActionId| self.changes.get(a).is_some_and(|c| c.action.workload == *id);
        self.guards.get(key)?.tried.iter().copied().find(on)
    }

    /// What a probe of this change switches, in the order in which it was made: the change itself, and what others have set
    /// on top of it, which goes before it and comes back after it.
    fn switched_by(&self, g: &Guard) -> Vec<ActionId> {
        let mut all = g.switched();
        all.extend(self.over(g));
        all.sort_unstable();
        all
    }

    /// The guard of the newest change that lies over those of this one.
    fn topmost_over(&self, key: ActionId) -> Option<ActionId> {
        let over = self.over(self.guards.get(key)?);
        over.iter().rev().find_map(|a| Some(self.guard_of(*a)?.key))
    }

    /// Whether a later change of memory of the same workload lies over this one, so that it cannot be switched alone.
    fn covered(&self, g: &Guard) -> bool {
        g.workloads().any(|id| {
            self.guards.of(id).filter(|later| later.key > g.key).any(|later| {
                g.members().any(|a| {
                    later
                        .members()
                        .any(|b| !(self.is_a_place(a) && self.is_a_place(b)) && self.lies_over(b, a))
                })
            })
        })
    }

    /// Whether a change sets CPUs or files, so that several that lie over each other are switched together.
    pub(crate) fn is_a_place(&self, action: ActionId) -> bool {
        let target = self.changes.get(&action).map(|c| &c.action.target);
        matches!(target, Some(Target::Cpus(_) | Target::Files(_)))
    }

    /// Accepted changes of places that lie over those of this guard.
    fn over(&self, g: &Guard) -> Vec<ActionId> {
        let own: Vec<ActionId> = g.switched();
        let mut over: BTreeSet<ActionId> = BTreeSet::new();
        for id in g.workloads() {
            let later = self.guards.of(id).filter(|later| later.key > g.key);
            over.extend(
                later
                    .flat_map(Guard::members)
                    .filter(|b| self.is_a_place(*b))
                    .filter(|b| own.iter().any(|a| self.is_a_place(*a) && self.lies_over(*b, *a))),
            );
        }
        over.into_iter().collect()
    }

    /// `turn_over`: a trial is due before the next probe; `elsewhere`: another guard is busy; `may_try`: a trial could start
    /// now.
    fn poll_guard(&mut self, key: ActionId, turn_over: bool, elsewhere: bool, may_try: bool) {
        let now = self.now;
        let Some(guard) = self.guards.get(key) else {
            return;
        };
        if guard.stage_running.is_some() {
            return;
        }
        let was_probing = guard.probe.is_some();
        let mut finding = Finding::Nothing;
        let mut coin = None;
        if was_probing {
            let settled = self.all_settled(guard);
            let workloads = &self.workloads;
            let series = |id: &WorkloadId| workloads.get(id).map(|w| &w.series);
            if let Some(g) = self.guards.get_mut(key) {
                (finding, coin) = g.poll_probe(series, now, settled, &self.own.canary, &self.policy);
            }
        } else if !self.paused && self.policy.mode == Mode::Act && self.experiments.is_empty() && !elsewhere {
            (finding, coin) = self.poll_idle_guard(key, turn_over, may_try);
        }
        if was_probing && self.guards.get(key).is_some_and(|g| g.probe.is_none()) {
            self.end_probe(key);
            self.note_fresh(key, matches!(finding, Finding::Passed));
        }
        if let Some((experiment, block, on)) = coin {
            // On disk before the switch, like the coins of a trial.
            self.out.push(Command::NoteCoin {
                experiment,
                block,
                on,
            });
        }
        match finding {
            Finding::Nothing => {}
            Finding::Switch(on) => self.switch_group(key, on),
            Finding::Alarm(why, verdict) => match self.topmost_over(key) {
                // All that was switched is meant, and the last step is the one that is least proven.
                Some(over) => {
                    self.switch_group(key, true);
                    if let Some(g) = self.guards.get_mut(key) {
                        g.watch.start_over();
                    }
                    let why = format!("{why}, in the probes of what it lies over");
                    self.revoke(over, &why, verdict);
                }
                None => self.revoke(key, &why, verdict),
            },
            Finding::Passed => {
                self.switch_group(key, true);
                if let Some(g) = self.guards.get_mut(key) {
                    let text = format!(
                        "guarded: probation passed after {} probe pairs; {} stays",
                        g.watch.pairs(),
                        g.effect
                    );
                    g.sentence = format!("{} {text}", g.strategy);
                    let ids: Vec<WorkloadId> = g.workloads().cloned().collect();
                    self.decide_all(&ids, Stage::Improved, &text, false);
                }
            }
        }
    }

    /// Whether all that a probe of this guard switches is where it was sent.
    fn all_settled(&self, guard: &Guard) -> bool {
        self.switched_by(guard)
            .iter()
            .all(|a| self.changes.get(a).is_none_or(|c| c.settled))
    }

    /// What is due for a guard that probes nothing: a further part, a probe, a look for memory that came later. Returns what
    /// to switch and the coin that was tossed.
    fn poll_idle_guard(&mut self, key: ActionId, turn_over: bool, may_try: bool) -> (Finding, Option<Coin>) {
        let nothing = (Finding::Nothing, None);
        let now = self.now;
        let Some(guard) = self.guards.get(key) else {
            return nothing;
        };
        // What may do harm waits for nothing that may wait.
        let suspects = guard.suspects(now);
        let (turn_over, may_try) = (turn_over && !suspects, may_try && !suspects);
        let overdue = suspects || now >= guard.next_probe + OVERDUE;
        let held_back = guard
            .workloads()
            .filter_map(|id| self.workloads.get(id))
            .any(|w| held_back(w, now, overdue, may_try));
        if held_back {
            return nothing;
        }
        let settled = self.all_settled(guard);
        if guard.parts_wait() && now >= guard.stage_due {
            let stage = self.guards.get_mut(key).and_then(|g| g.stages.pop_front());
            if let Some(piece) = stage {
                self.add_part(key, piece);
            }
            return nothing;
        }
        let due = guard.switchable && settled && !turn_over && now >= guard.next_probe;
        let is_short = due && self.is_short_of_budget(guard);
        // What is on its way out, and may wait for its next try, stands over what is below it.
        let leaves = || guard.workloads().any(|id| self.something_leaves(id));
        if due && !self.covered(guard) && !leaves() {
            // Of whom nothing is known, that it rests is not known either.
            let known = |id: &WorkloadId| self.workloads.get(id).filter(|w| w.load.known);
            let cpus = |id: &WorkloadId| known(id).map(|w| w.load.cpus);
            let rest = guard.watch.all_rest(cpus);
            if let Some(g) = self.guards.get_mut(key) {
                if g.waits_for_work(rest, now) || g.waits_for_budget(is_short, now) {
                    return nothing;
                }
            }
            return self.begin_probe(key);
        }
        let lead = guard.panel().lead().workload.clone();
        let review = settled && now >= guard.review_at && guard.pieces_grow(&self.changes);
        if review {
            if let Some(w) = self.workloads.get_mut(&lead) {
                if !w.inspecting {
                    w.inspecting = true;
                    w.review = Some(key);
                    self.out.push(Command::InspectMemory(lead));
                    if let Some(g) = self.guards.get_mut(key) {
                        g.review_at = now + REVIEW;
                    }
                }
            }
        }
        nothing
    }

    /// Whether the damage of the next probe exceeds what is left of the daily budget of lost work. A suspicion does not wait:
    /// the change may be what does harm.
    fn is_short_of_budget(&self, guard: &Guard) -> bool {
        let costs = 100.0 * guard.lost_in(Nanoseconds(guard.next_pair().0 / 2));
        let owner = guard
            .workloads()
            .next()
            .map_or(Owner::Machine, |id| self.domain_of(id));
        guard.protects
            && !guard.watch.suspicious()
            && self
                .exposure
                .has_no_room(&owner, self.policy.harm_exposure_per_day_max, costs)
    }

    /// Tosses the coin of a probe pair and begins its first block.
    fn begin_probe(&mut self, key: ActionId) -> (Finding, Option<Coin>) {
        let now = self.now;
        let Some(panel) = self.guards.get(key).map(|g| g.panel().clone()) else {
            return (Finding::Nothing, None);
        };
        self.probes_since_trial = self.probes_since_trial.saturating_add(1);
        let borrowed = self.borrow_meters(&panel);
        let neighbours: Vec<(Member, f64)> = self
            .bystanders(&panel)
            .iter()
            .filter_map(|m| {
                let noise = self.workloads.get(&m.workload)?.meter.as_ref()?.assessment.noise;
                Some(m.as_neighbour().map(move |m| (m, noise)))
            })
            .flatten()
            .collect();
        // What lies over it goes and comes back with it.
        let over: Vec<(Nanoseconds, f64, Nanoseconds)> = self
            .guards
            .get(key)
            .map(|g| self.over(g))
            .unwrap_or_default()
            .into_iter()
            .filter_map(|a| self.guard_of(a))
            .map(|o| (o.washout, o.effect.estimate, o.stall))
            .collect();
        // Another meter may judge than when it was proven.
        let measured = self.guards.get(key).map_or(Nanoseconds::ZERO, |g| g.measured);
        let lag = self
            .lag(&panel)
            .max(self.lag_of_neighbours(neighbours.iter().map(|n| &n.0), measured));
        let least = Nanoseconds::from_secs_f64(self.policy.washout_min_s) + lag;
        let Some(g) = self.guards.get_mut(key) else {
            return (Finding::Nothing, None);
        };
        // It takes as long to settle as before.
        g.washout += lag - g.lag;
        g.lag = g.lag.max(lag);
        g.washout = over
            .iter()
            .map(|o| o.0)
            .fold(g.washout.max(least), Nanoseconds::max);
        g.over_gain = over.iter().map(|o| 1.0 + o.1.max(0.0)).product::<f64>() - 1.0;
        g.over_stall = over
            .iter()
            .map(|o| o.2)
            .fold(Nanoseconds::ZERO, |sum, stall| sum + stall);
        // Who is watched is fixed before the coin is tossed.
        g.watch.set_neighbours(neighbours);
        g.borrowed = borrowed;
        let on = g.coins.toss();
        // Those at once tell how much is gained, the later ones whether it was the undo that looked like a gain.
        let is_long = g.is_long_next() && g.watch.pairs() >= g.at_once;
        let washout = if is_long { g.long_washout() } else { g.washout };
        g.pairs += 1;
        g.watch.block_started();
        g.probe = Some(Probe {
            block: Block::start(0, on, now, washout, g.measured),
            washout,
            is_long,
            first: None,
            switch_started: now,
        });
        let coin = (g.record.id, g.coin_number(), on);
        let after = now + g.pair();
        // What was gathered for the next proposal mixes both arms now.
        for id in panel.workloads() {
            if let Some(w) = self.workloads.get_mut(id).filter(|w| w.seeking) {
                w.seeking = false;
                w.more_at = after;
            }
        }
        let finding = if on {
            Finding::Nothing
        } else {
            Finding::Switch(false)
        };
        (finding, Some(coin))
    }

    /// What is gained is what the pairs after the acceptance show. `passed`: the probation is over.
    fn note_fresh(&mut self, key: ActionId, passed: bool) {
        let Some(g) = self.guards.get_mut(key) else { return };
        let pairs = g.watch.pairs();
        let Some(effect) = g.watch.fresh().filter(|_| pairs >= g.watch.fresh_pairs) else {
            return;
        };
        g.effect = effect;
        if pairs != g.watch.fresh_pairs && !passed {
            return;
        }
        g.record.fresh = Some(FreshGain { effect, pairs });
        let record = g.record.clone();
        let text = format!(
            "{} {} by {pairs} pairs after the acceptance",
            g.strategy,
            g.panel().gain(&effect)
        );
        g.sentence.clone_from(&text);
        let ids: Vec<WorkloadId> = g.workloads().cloned().collect();
        for fingerprint in self.fingerprints(&ids) {
            if let Some(p) = self.priors.get_mut(&(fingerprint, record.strategy.clone())) {
                p.effect = Some(effect);
            }
        }
        self.out.push(Command::RecordExperiment(Box::new(record)));
        self.decide_all(&ids, Stage::Improved, &text, false);
    }

    /// The kinds of these workloads.
    fn fingerprints(&self, ids: &[WorkloadId]) -> BTreeSet<Fingerprint> {
        ids.iter()
            .filter_map(|id| self.workloads.get(id))
            .map(|w| w.workload.fingerprint.clone())
            .collect()
    }

    /// A probe is over: its coins need not be kept, and meters that were opened for it are closed.
    fn end_probe(&mut self, key: ActionId) {
        self.drop_coins(key);
        let lead = self.guards.get(key).and_then(|g| g.workloads().next());
        let owner = lead.map_or(Owner::Machine, |id| self.domain_of(id));
        if let Some(g) = self.guards.get_mut(key) {
            // A probe that was cut off has cost nothing yet.
            let lost = std::mem::take(&mut g.lost);
            self.exposure.note(self.now, owner, 100.0 * lost);
            let borrowed = std::mem::take(&mut g.borrowed);
            self.return_meters(&borrowed);
        }
    }

    /// The coins of a probe that is over need not be kept.
    fn drop_coins(&mut self, key: ActionId) {
        if let Some(g) = self.guards.get(key) {
            self.out.push(Command::DropCoins(g.record.id));
        }
    }

    /// Whether a change is in force by an accepting verdict.
    pub(crate) fn guarded(&self, action: ActionId) -> bool {
        self.guard_of(action).is_some()
    }

    /// Switches what a probe of this change switches: made in order, undone in reverse.
    fn switch_group(&mut self, key: ActionId, on: bool) {
        let Some(g) = self.guards.get(key) else { return };
        let mut members: Vec<ActionId> = self.switched_by(g);
        if on {
            // On is for all: parts that went off before it was learnt that they are too slow for probes come back too.
            members.extend(g.members());
            members.sort_unstable();
            members.dedup();
        }
        if !on {
            members.reverse();
        }
        for action in members {
            if self
                .changes
                .get(&action)
                .is_some_and(|c| !c.leaving && (c.on != on || !c.settled))
            {
                self.switch(action, on);
            }
        }
    }

    /// Makes the change on one more part of a workload.
    fn add_part(&mut self, key: ActionId, piece: Piece) {
        let action = ActionId(self.next_action);
        let Some(g) = self.guards.get_mut(key) else {
            return;
        };
        g.stage_running = Some(action);
        g.followers.push(action);
        let text = format!("next part, on the evidence of action {} ({})", g.key, g.effect);
        let strategy = g.strategy.clone();
        let id = piece.workload.clone();
        self.next_action += 1;
        self.decide(&id, Stage::Improved, format!("extending: {text}"), false);
        self.make(piece.action(action, text), strategy);
    }

    /// A change under guard reached the state it was sent to.
    pub(crate) fn guard_settled(&mut self, action: ActionId) {
        let now = self.now;
        let washout_max = Nanoseconds::from_secs_f64(self.policy.washout_max_s);
        let Some(key) = self.guard_of(action).map(|g| g.key) else {
            return;
        };
        let Some(g) = self.guards.get_mut(key) else { return };
        if g.stage_running == Some(action) {
            g.stage_running = None;
            g.stage_due = now + g.pair();
            // What was tried is made under guard only where it was proven earlier.
            if let Some(pair) = g.pair.as_ref().filter(|_| g.tried.contains(&action)) {
                self.recall.note_made(pair);
            }
        }
        // The guard that probes learns from it, also where it is another's change on top of its own.
        let probing = self.guards.all().find(|g| g.probe.is_some());
        let Some((key, started)) = probing.and_then(|g| Some((g.key, g.probe.as_ref()?.switch_started)))
        else {
            return;
        };
        let all_there = self.guards.get(key).is_some_and(|g| {
            let switched = self.switched_by(g);
            let is_there = |a: &ActionId| self.changes.get(a).is_none_or(|c| c.settled);
            switched.contains(&action) && switched.iter().all(is_there)
        });
        if all_there {
            if let Some(g) = self.guards.get_mut(key) {
                g.learn_switch(now - started, washout_max);
            }
        }
    }

    /// A change of this workload that was under guard is on its way out.
    pub(crate) fn guard_loses(&mut self, id: &WorkloadId, action: ActionId, why: &str) {
        let Some(key) = self.guard_of_any(id, action) else {
            return;
        };
        let Some(g) = self.guards.get_mut(key) else { return };
        if g.stage_running == Some(action) {
            g.stage_running = None;
        }
        if !g.tried.contains(&action) {
            g.followers.retain(|a| *a != action);
            return;
        }
        let strategy = g.strategy.clone();
        self.forget_refused_places(id, &strategy);
        let Some(g) = self.guards.get_mut(key) else { return };
        let followers: Vec<ActionId> = g
            .followers
            .iter()
            .rev()
            .copied()
            .filter(|a| self.changes.get(a).is_some_and(|c| c.action.workload == *id))
            .collect();
        // A probe that runs is cut off: what it switched comes back for those that stay.
        if g.probe.is_some() {
            self.end_probe(key);
            self.guards.release(key, id, &self.changes, self.now);
            self.switch_group(key, true);
        } else {
            self.guards.release(key, id, &self.changes, self.now);
        }
        for follower in followers {
            self.withdraw(follower, "the change it followed was undone");
        }
        let retry = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        let last = !self.guards.any(id);
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if w.stage != Stage::Improved {
            return;
        }
        if w.review == Some(key) {
            w.review = None;
            w.inspecting = false;
        }
        w.proposed = None;
        w.seeking = false;
        if last {
            w.retry_at = retry;
            self.close_meters(id);
            let by_a_person = why == UNDONE_BY_A_PERSON;
            let what = if by_a_person { why } else { "the change was undone" };
            self.decide(
                id,
                Stage::Declined,
                format!("{what} and is not tried again for now"),
                false,
            );
            if let Some(w) = self.workloads.get_mut(id) {
                w.undone_by_a_person = by_a_person;
            }
        } else {
            w.more_at = retry;
            let text = format!(
                "the change of {strategy} was undone and is not tried again for now; what else was accepted stays on its own evidence"
            );
            self.decide(id, Stage::Improved, text, false);
            self.summarise(id);
        }
    }

    /// Undoes what was accepted, since a guard found that it does not hold.
    fn revoke(&mut self, key: ActionId, why: &str, verdict: Verdict) {
        let Some(g) = self.guards.get(key) else { return };
        let (strategy, accepted) = (g.strategy.clone(), g.record.clone());
        // What a guard comes too late for comes out of the day's budget, too.
        let harm = g.harm(self.now);
        let owner = g
            .workloads()
            .next()
            .map_or(Owner::Machine, |id| self.domain_of(id));
        self.exposure.note(self.now, owner, harm);
        if let Some(pair) = &g.pair {
            self.recall.forget(pair);
        }
        let (ids, tried): (Vec<WorkloadId>, Vec<ActionId>) =
            (g.workloads().cloned().collect(), g.tried.clone());
        // The history must not take it for a known gain after a restart.
        let members = accepted
            .members
            .iter()
            .map(|m| MemberOutcome { verdict, ..m.clone() })
            .collect();
        let record = ExperimentRecord {
            members,
            verdict: Some(verdict),
            reason: why.to_owned(),
            ended_unix: self.unix,
            ..accepted
        };
        self.out.push(Command::RecordExperiment(Box::new(record)));
        for fingerprint in self.fingerprints(&ids) {
            self.discovery.revoke(&Attempt::of(&fingerprint, &strategy));
            let unix = self.unix;
            if let Some(p) = self.priors.get_mut(&(fingerprint, strategy.clone())) {
                p.verdict = verdict;
                p.failures += 1;
                p.unix_seconds = unix;
            }
        }
        for id in &ids {
            self.narrate(id, why.to_owned(), true);
        }
        for action in tried.into_iter().rev() {
            self.withdraw(action, why);
        }
    }

    /// The memory of an improved workload was inspected again for this change: add what came since.
    pub(crate) fn extend(&mut self, id: &WorkloadId, key: ActionId) {
        let Some(g) = self.guards.get(key) else { return };
        let Some(index) = self.strategies.iter().position(|s| s.id() == g.strategy) else {
            return;
        };
        self.withdraw_if_unwanted(key);
        let opinion = self.opinion(id, index);
        if let Some(w) = self.workloads.get_mut(id) {
            w.memory = None;
        }
        let Some(Opinion::Propose(p)) = opinion else {
            return;
        };
        let Some(g) = self.guards.get_mut(key) else {
            return;
        };
        let pieces = Piece::of(id, &p);
        let new: u64 = pieces.iter().map(|p| size(&p.target)).sum();
        if (new as f64) < GROWTH_MIN * g.pieces.max(1) as f64 && g.pieces > 0 {
            return;
        }
        g.pieces += new;
        for piece in pieces {
            if g.stages.len() < STAGES_MAX && g.followers.len() < FOLLOWERS_MAX {
                g.stages.push_back(piece);
            }
        }
    }

    /// Which guard watches the change.
    pub(crate) fn guard_of(&self, action: ActionId) -> Option<&Guard> {
        let workload = &self.changes.get(&action)?.action.workload;
        self.guards
            .of(workload)
            .find(|g| g.members().any(|a| a == action))
    }

    /// The name of the guard that watched this change of the workload, also when the change is gone already.
    fn guard_of_any(&self, id: &WorkloadId, action: ActionId) -> Option<ActionId> {
        self.guards
            .of(id)
            .find(|g| g.members().any(|a| a == action))
            .map(|g| g.key)
    }
}

impl Guard {
    /// Later probes wait for as long as a switch was seen to take. What takes longer than the longest washout is not
    /// switched as a whole any more.
    fn learn_switch(&mut self, took: Nanoseconds, washout_max: Nanoseconds) {
        let wanted = Nanoseconds::from_secs_f64(took.as_secs_f64() * SWITCH_MARGIN);
        if wanted > washout_max && self.together && !self.followers.is_empty() {
            self.together = false;
        } else {
            self.washout = self.washout.max(wanted.min(washout_max) + self.lag);
        }
    }

    /// Whether this change grows with the memory of its workload.
    pub(crate) fn pieces_grow(&self, changes: &BTreeMap<ActionId, Change>) -> bool {
        let target = self
            .tried
            .first()
            .and_then(|a| changes.get(a))
            .map(|c| &c.action.target);
        matches!(target, Some(Target::Memory(_)))
    }

    /// Number under which the first coin of the probe pair that runs is journalled; the second block, whose arm is the
    /// other one, has the next.
    fn coin_number(&self) -> u32 {
        PROBES_FROM.saturating_add(self.pairs.saturating_sub(1).saturating_mul(2))
    }

    /// Whether a probe that is due waits, because nobody works whose change it is.
    fn waits_for_work(&mut self, rest: bool, now: Nanoseconds) -> bool {
        if !rest {
            self.resting_since = None;
            return false;
        }
        let since = *self.resting_since.get_or_insert(now);
        let patience = RESTING_PROBE * (1 << self.resting.min(RESTING_DOUBLINGS));
        let waits = now - since < patience;
        if waits {
            self.next_probe = now + RESTING_LOOK;
        } else {
            self.resting_since = None;
        }
        waits
    }

    /// Whether a probe that is due waits, because the daily budget of lost work has no room for it.
    fn waits_for_budget(&mut self, is_short: bool, now: Nanoseconds) -> bool {
        if is_short {
            self.short_since.get_or_insert(now);
            self.next_probe = now + RESTING_LOOK;
        } else {
            self.short_since = None;
        }
        is_short
    }

    /// Drives the probe that runs. Returns what to do, and the coin of a second block that begins.
    fn poll_probe<'a>(
        &mut self,
        series: impl Fn(&WorkloadId) -> Option<&'a Series>,
        now: Nanoseconds,
        settled: bool,
        canary: &CanaryLog,
        policy: &Policy,
    ) -> (Finding, Option<Coin>) {
        let Some(probe) = &mut self.probe else {
            return (Finding::Nothing, None);
        };
        let (on, from, left_out) = (probe.block.on, probe.block.measure_from, self.lag);
        if on && probe.block.measuring(now) {
            if let Some((_, off)) = &probe.first {
                if self
                    .watch
                    .trips(&series, from.max(now.saturating_sub(BREAKER_SPAN)), now)
                {
                    let scores = self
                        .watch
                        .broken(self.watch.read(&series, left_out, from, now), off);
                    return self.block_done(true, scores, now, policy);
                }
            }
        }
        let watch = &self.watch;
        let state = probe.block.poll_reading(now, |from| {
            (
                watch.reading(&series, left_out, from, now),
                "of its work".to_owned(),
            )
        });
        match state {
            BlockState::Running => (Finding::Nothing, None),
            BlockState::Idle if settled => {
                let scores = self.watch.resting();
                self.block_done(on, scores, now, policy)
            }
            BlockState::Idle => (Finding::Nothing, None),
            BlockState::Unmeasurable(_) => {
                self.unread += 1;
                self.give_probe_up(now);
                if self.unread >= UNREAD_MAX {
                    let text = format!(
                        "its work could not be measured in {} probe pairs in a row: nobody can watch it any more",
                        self.unread
                    );
                    return (Finding::Alarm(text, Verdict::Inconclusive), None);
                }
                (Finding::Switch(true), None)
            }
            BlockState::Finished(_) if !settled => {
                // The switch outlasted its block, which then mixes both arms: the pair says nothing. Later ones wait
                // longer, or switch the tried part only, and after some the change is not probed.
                let took = now - probe.switch_started;
                let washout_max = Nanoseconds::from_secs_f64(policy.washout_max_s);
                self.outlasted += 1;
                self.learn_switch(took, washout_max);
                self.switchable = self.outlasted < OUTLASTED_MAX;
                self.give_probe_up(now);
                (Finding::Switch(true), None)
            }
            BlockState::Finished(record) => {
                self.outlasted = 0;
                let scores = self.watch.read(&series, left_out, record.measured_from, now);
                let scores = scores.beside(canary.speed(record.measured_from, now));
                self.block_done(record.on, scores, now, policy)
            }
        }
    }

    /// The pair that runs says nothing.
    fn give_probe_up(&mut self, now: Nanoseconds) {
        self.probe_over(now);
        self.next_probe = now + self.probe_interval();
    }

    fn probe_over(&mut self, now: Nanoseconds) {
        self.probe = None;
        self.probed_at = now;
        self.regime = None;
        self.other_since = None;
    }

    fn block_done(
        &mut self,
        on: bool,
        scores: Scores,
        now: Nanoseconds,
        policy: &Policy,
    ) -> (Finding, Option<Coin>) {
        if !on {
            self.watch.off_block(&scores);
        }
        let Some(probe) = &mut self.probe else {
            return (Finding::Nothing, None);
        };
        let Some((first_on, first)) = probe.first.take() else {
            // The second block is the other arm.
            probe.first = Some((on, scores));
            probe.block = Block::start(1, !on, now, probe.washout, self.measured);
            probe.switch_started = now;
            self.watch.block_started();
            let coin = (self.record.id, self.coin_number() + 1, !on);
            return (Finding::Switch(!on), Some(coin));
        };
        let (is_long, off) = (probe.is_long, probe.washout + self.measured);
        self.probe_over(now);
        self.lost = self.lost_in(off);
        self.unread = 0;
        let (on, off) = if first_on {
            (first, scores)
        } else {
            (scores, first)
        };
        let found = self.watch.observe(&on, &off, is_long);
        if found == Found::Fine && !self.watch.suspicious() {
            self.fine_at = now;
        }
        let often = self.probe_interval();
        let seldom = often.max(Nanoseconds::from_secs_f64(policy.probe_every_s));
        if found == Found::Nothing {
            self.resting = self.resting.saturating_add(1);
            self.next_probe = now + seldom;
            return (Finding::Switch(true), None);
        }
        self.resting = 0;
        // The pairs of the probation tell nothing of how long it lasts.
        let fine_before = self.fine_pairs;
        let is_calm = !self.watch.suspicious() && !self.watch.in_probation();
        self.fine_pairs = u32::from(is_calm) * fine_before.saturating_add(1);
        self.next_probe = now
            + if self.watch.suspicious() {
                // It is on meanwhile, and may do harm: no longer than it takes that to be seen, with most of the time left for work.
                let work = (self.stall + self.over_stall) * STALL_SPACING;
                work.clamp(self.pair() * SUSPECT_SPACING, self.pair() * PROBATION_SPACING)
            } else if self.watch.pairs() < self.at_once {
                Nanoseconds::ZERO
            } else if self.watch.in_probation() {
                often
            } else if self.protects {
                let first = seldom.as_secs_f64();
                Nanoseconds::from_secs_f64(schedule::doubled_interval_s(first, fine_before))
            } else {
                seldom
            };
        let finding = match found {
            Found::Alarm(why, verdict) => Finding::Alarm(why, verdict),
            Found::Passed => Finding::Passed,
            Found::Fine | Found::Nothing => Finding::Switch(true),
        };
        (finding, None)
    }
}

/// How much a target changes, in its own unit: pieces of memory, CPUs, bytes, files, processes.
pub(crate) fn size(target: &Target) -> u64 {
    match target {
        Target::Memory(m) => m.iter().map(|t| t.pieces.len() as u64).sum(),
        Target::Pages(p) => p.bytes.0,
        Target::Cpus(cpus) => cpus.len() as u64,
        Target::Files(files) => files.len() as u64,
        Target::Reader(reader) => reader.processes.len() as u64,
        Target::Nothing => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_statistics::schedule::{PROBE_COST_MAX, PROBE_GAIN_MAX, PROBE_INTERVAL_MAX_S};

    #[test]
    fn probes_are_rare_enough_to_cost_half_a_percent_and_a_twentieth_of_the_gain() {
        let pair = Nanoseconds::from_secs(20);
        let none = Nanoseconds::ZERO;
        for gain in [0.0, -0.5, f64::NAN] {
            assert_eq!(
                probe_interval(pair, gain, none),
                pair * PROBATION_SPACING,
                "{gain}"
            );
        }
        for gain in [0.015, 0.05, 0.25, 1.0, 10.0] {
            for stall in [0, 1] {
                let apart = probe_interval(pair, gain, Nanoseconds::from_secs(stall));
                let lost = gain / (1.0 + gain) * 20.0 + stall as f64;
                assert!(
                    lost / apart.as_secs_f64() <= PROBE_COST_MAX + 1e-9,
                    "{gain} {stall}"
                );
                assert!(
                    lost / apart.as_secs_f64() <= PROBE_GAIN_MAX * gain / (1.0 + gain) + 1e-9,
                    "{gain} {stall}"
                );
            }
        }
        assert_eq!(
            probe_interval(pair, 1.0, Nanoseconds::from_secs(1 << 30)),
            Nanoseconds::from_secs_f64(PROBE_INTERVAL_MAX_S)
        );
    }
}
