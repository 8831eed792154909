//! Does what homeostat does on Linux about the file cache swing? The mind and its strategy over random loads, on the small plant
//! in virtual time. Of each load it is checked what their rules bound.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod plant;

use homeostat_engine::{Memory, Policy};
use homeostat_model::Verdict;
use homeostat_statistics::robust::{exp, ln};
use homeostat_statistics::simulation::Random;
use plant::{Conditions, Containment, Plant, Switch};

/// How many loads there are, and the seed from which all of them follow.
const LOADS: u64 = 100;
const SEED: u64 = 1;
/// Seconds of a load. With what comes before and after it is less than the shortest back-off after a refusal, six hours.
const LENGTH_S: u64 = 7200;
/// The program is alone for so long at least, and for up to so much longer.
const ALONE_S: u64 = 300;
const ALONE_MORE_S: f64 = 600.0;
/// What happens after the reader's end is looked at for so long.
const AFTER_S: u64 = 60;
const HOUR_S: u64 = 3600;

// The rules of the engine that bound what happens.
/// A trial protects for so long before its first coin (`FIRST_RELIEF` in experiment.rs).
const FIRST_RELIEF_S: u64 = 10;
/// A block discards 2 s at least (`washout_min_s`) and measures 6 (`relief::choice`) …
const BLOCK_S: u64 = 8;
/// … unless the circuit breaker ends it, which looks at 4 s of readings at least (`Gauge::last_seconds`).
const BROKEN_BLOCK_S: u64 = 6;
/// How often a reader is contained on earlier trials, by the number of those that accepted it in a row (`Proven::recalls_of` in
/// recall.rs).
const RECALLS: [u32; 3] = [0, 2, 4];
/// Blocks between the verdict and the first probe: three pairs at least (`PROBATION_SPACING` in guard.rs) …
const TO_THE_FIRST_PROBE: f64 = 6.0;
/// … and from one release by a probe to the next: a pair lies between them at least (`SUSPECT_SPACING`), and of its own pair the
/// block that is not released may have come before.
const TO_THE_NEXT_PROBE: f64 = 3.0;

/// What the program loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// It waits for pages, and loses no work by that.
    Nothing,
    /// The same, and it loses work while the reader is contained.
    ByContainment,
    Little,
    Much,
    NearlyAll,
}

impl Loss {
    const ALL: [Self; 5] = [
        Self::Nothing,
        Self::ByContainment,
        Self::Little,
        Self::Much,
        Self::NearlyAll,
    ];

    /// What is left of its work without its pages.
    fn left(self) -> f64 {
        match self {
            Self::Nothing | Self::ByContainment => 1.0,
            Self::Little => 0.7,
            Self::Much => 0.4,
            Self::NearlyAll => 0.05,
        }
    }
}

/// How the reader goes about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    /// One that reads all the time.
    Stays,
    /// One that pauses.
    Pauses,
    /// One after another.
    Comes,
}

impl Habit {
    /// Half of the loads have readers that come and go.
    const ALL: [Self; 4] = [Self::Stays, Self::Pauses, Self::Comes, Self::Comes];
}

/// A load.
struct Draw {
    index: u64,
    loss: Loss,
    habit: Habit,
    conditions: Conditions,
    policy: Policy,
    /// From which the noise comes.
    seed: u64,
    /// Seconds until the first reader comes.
    alone_s: u64,
    /// Seconds in which it is read, and in which it is not after them.
    schedule: Vec<(u64, u64)>,
}

impl Draw {
    fn new(index: u64) -> Self {
        // Streams whose seeds are steps of the generator apart would be one stream.
        let mut random = Random::new(SEED ^ index.wrapping_mul(0xbf58_476d_1ce4_e5b9));
        let losses = Loss::ALL.len() as u64;
        let loss = Loss::ALL[(index % losses) as usize];
        let habit = Habit::ALL[(index / losses) as usize % Habit::ALL.len()];
        let read_mib = between(&mut random, 20.0, 2000.0);
        let schedule = schedule(&mut random, habit);
        let reads = schedule.iter().map(|(reads_s, _)| *reads_s);
        // What a reader leaves behind stays there until it ends.
        let longest_s: u64 = match habit {
            Habit::Comes => reads.max().unwrap_or_default(),
            Habit::Stays | Habit::Pauses => reads.sum(),
        };
        let longest_s = longest_s as f64;
        let kind = random.uniform();
        let lasts_s = if kind < 0.2 {
            0.0
        } else if kind < 0.35 {
            1.5 * longest_s
        } else {
            between(&mut random, 1.0, longest_s.max(2.0))
        };
        let hurt = 0.1 + 0.4 * random.uniform();
        let conditions = Conditions {
            read_mib,
            unused_mib: lasts_s * read_mib,
            left: loss.left(),
            cpus_left: Conditions::cpus_of(loss.left()),
            comes_back_s: between(&mut random, 1.0, 60.0).round() as u64,
            hurt: if loss == Loss::ByContainment { hurt } else { 0.0 },
            noise: 0.3 * random.uniform(),
        };
        Self {
            index,
            loss,
            habit,
            conditions,
            policy: Policy {
                seed: random.next_u64(),
                // The plant knows no change that does nothing.
                placebo_every_s: 0.0,
                ..Policy::default()
            },
            seed: random.next_u64(),
            alone_s: ALONE_S + (ALONE_MORE_S * random.uniform()) as u64,
            schedule,
        }
    }

    fn machine(&self) -> Plant {
        Plant::of(Memory::default(), self.policy.clone(), self.conditions, self.seed)
    }

    /// Lets it happen on a machine, on which time passes so.
    fn happen(&self, plant: &mut Plant, pass: fn(&mut Plant, u64)) {
        pass(plant, self.alone_s);
        for (reads_s, rests_s) in &self.schedule {
            if plant.reader.is_none() {
                plant.starts_to_read();
            }
            plant.reads = true;
            pass(plant, *reads_s);
            match self.habit {
                Habit::Comes => plant.ends(),
                Habit::Stays | Habit::Pauses => plant.reads = false,
            }
            pass(plant, *rests_s);
        }
        plant.ends();
        pass(plant, AFTER_S);
    }

    fn name(&self) -> String {
        let Self {
            index,
            loss,
            habit,
            conditions,
            ..
        } = self;
        format!("load {index}, {loss:?}, {habit:?}, {conditions:?}")
    }
}

/// When a reader reads: all the time, or for a fifth to nine tenths of 20 s to ten minutes, each time by up to a half more or less.
fn schedule(random: &mut Random, habit: Habit) -> Vec<(u64, u64)> {
    let period_s = between(random, 20.0, 600.0);
    let share = 0.2 + 0.7 * random.uniform();
    if habit == Habit::Stays {
        return vec![(LENGTH_S, 0)];
    }
    let mut left_s = LENGTH_S;
    let mut about = |seconds: f64| {
        let drawn = (seconds * (0.5 + random.uniform())).round().max(1.0) as u64;
        let length_s = drawn.min(left_s);
        left_s -= length_s;
        (length_s, left_s)
    };
    let mut schedule = Vec::new();
    loop {
        let (reads_s, _) = about(period_s * share);
        let (rests_s, left_s) = about(period_s * (1.0 - share));
        schedule.push((reads_s, rests_s));
        if left_s == 0 {
            return schedule;
        }
    }
}

/// Between two positive numbers, evenly on the scale of logarithms.
fn between(random: &mut Random, low: f64, high: f64) -> f64 {
    exp(ln(low) + (ln(high) - ln(low)) * random.uniform())
}

/// No hour has more trials than the policy allows (`no_trial_now`): the one that would be too many comes when the first of them
/// lies an hour back.
fn trials_are_few(draw: &Draw, all: &[&Containment]) {
    let most = draw.policy.experiments_per_hour_max as usize;
    let began: Vec<u64> = all.iter().filter(|c| c.is_trial).map(|c| c.began).collect();
    for hour in began.windows(most + 1) {
        assert!(hour[most] - hour[0] > HOUR_S, "{}: {hour:?}", draw.name());
    }
}

/// Without a trial a reader is contained on a verdict that holds, and so often only ([`RECALLS`]).
fn recalls_are_few(draw: &Draw, all: &[&Containment]) {
    let (mut proven, mut recalls) = (0, 0);
    for c in all {
        if c.is_trial && c.kept_at().is_some() {
            (proven, recalls) = (proven + 1, 0);
        } else if !c.is_trial && c.is_made() {
            recalls += 1;
        }
        let most = RECALLS[proven.min(RECALLS.len() - 1)];
        assert!(
            recalls <= most,
            "{}: {recalls} after {proven}: {c:?}",
            draw.name()
        );
    }
}

/// Whether a switch is the last thing that happens to a containment.
fn is_end(c: &Containment, s: &Switch) -> bool {
    !s.on && c.closed == Some(s.at)
}

/// Whoever is contained is released by a coin, or for good; and is contained again by a coin, by a verdict, or at the end of a probe.
/// The first coin comes after [`FIRST_RELIEF_S`], and between two switches lies a block.
fn switches_are_by_coin(draw: &Draw, c: &Containment) {
    let is_broken = c.told.iter().any(|t| t.is_broken);
    let least = if is_broken { BROKEN_BLOCK_S } else { BLOCK_S };
    for pair in c.switches.windows(2) {
        let (before, after) = (pair[0], pair[1]);
        let is_kept = after.on && c.kept_at().is_some_and(|at| at <= after.at);
        let is_due = after.by_coin || is_kept || is_end(c, &after);
        let is_apart = after.at - before.at >= least || is_end(c, &after);
        assert!(
            before.on != after.on && is_due && is_apart,
            "{}: {after:?} of {c:?}",
            draw.name()
        );
    }
    if let Some(first) = c.switches.get(1).filter(|s| c.is_trial && !is_end(c, s)) {
        assert!(first.at - c.began >= FIRST_RELIEF_S, "{}: {c:?}", draw.name());
    }
}

/// What is kept stays until its reader ends or its guard takes it back: a probe releases it for a block, and probes are rare.
fn what_is_kept_stays(draw: &Draw, c: &Containment, block_s: f64, ended: Option<u64>) {
    let name = || format!("{}, blocks of {block_s} s: {c:?}", draw.name());
    if let Some(closed) = c.closed {
        let is_over = ended.is_some_and(|at| at < closed);
        let is_taken_back = c
            .told
            .iter()
            .any(|t| t.at == closed && t.verdict != Verdict::Accepted);
        assert!(is_over || is_taken_back, "{}", name());
    }
    let Some(kept) = c.kept_at() else { return };
    let after: Vec<Switch> = c.switches.iter().copied().filter(|s| s.at > kept).collect();
    // Looks are a second apart.
    let mut earliest = kept as f64 + TO_THE_FIRST_PROBE * block_s - 1.0;
    for (index, s) in after.iter().enumerate() {
        if s.on || is_end(c, s) {
            continue;
        }
        let back = after.get(index + 1).map(|s| s.at).or(c.closed);
        let is_short = back.is_some_and(|back| (back - s.at) as f64 <= block_s.ceil());
        assert!(s.at as f64 >= earliest && is_short, "{s:?} in {}", name());
        earliest = s.at as f64 + TO_THE_NEXT_PROBE * block_s - 1.0;
    }
}

/// When a containment was refused or taken back. Broken off while the reader lives, it was for a reason of its own.
fn refused_at(c: &Containment, ended: Option<u64>) -> Option<u64> {
    let is_refused = |verdict: Verdict, at: u64| match verdict {
        Verdict::Accepted => false,
        Verdict::Rejected | Verdict::Harmful | Verdict::Inconclusive => true,
        Verdict::Aborted => ended.is_none_or(|ended| at <= ended),
    };
    c.told.iter().find(|t| is_refused(t.verdict, t.at)).map(|t| t.at)
}

/// After a refusal nothing begins for the program: the shortest back-off is longer than a load.
fn what_is_refused_stays_away(draw: &Draw, plant: &Plant, all: &[&Containment]) {
    assert!(draw.policy.backoff_inconclusive_s > plant.second as f64);
    let refused = all
        .iter()
        .filter_map(|c| refused_at(c, plant.ended.get(&c.reader).copied()))
        .min();
    if let Some(at) = refused {
        let later: Vec<&&Containment> = all.iter().filter(|c| c.began > at).collect();
        assert!(later.is_empty(), "{}: refused at {at}: {later:?}", draw.name());
    }
}

/// A trial ends with the block in which its budget does, and nothing stays for longer after its reader's end than until the next
/// scan.
fn everything_ends(draw: &Draw, c: &Containment, ended: Option<u64>) {
    if let Some(told) = c.told.first().filter(|_| c.is_trial) {
        let most = draw.policy.experiment_max_s + told.block_s.ceil() + 2.0;
        assert!((told.at - c.began) as f64 <= most, "{}: {c:?}", draw.name());
    }
    let scan_s = draw.policy.scan_interval_s as u64;
    let latest = ended.map(|ended| (ended + scan_s).max(c.began));
    assert!(
        c.closed.is_some() && c.closed <= latest,
        "{}: {latest:?}: {c:?}",
        draw.name()
    );
}

/// Whoever loses nothing without its pages is not protected for long, and nobody loses by all this what was not to be lost anyway.
fn nothing_is_lost_by_it(draw: &Draw, plant: &Plant, alone: &Plant, all: &[&Containment]) {
    let name = draw.name();
    if alone.lacked_s == 0 {
        assert!(all.is_empty(), "{name}: {all:?}");
    }
    assert!(plant.lacked_s <= alone.lacked_s, "{name}");
    match draw.loss {
        Loss::Nothing | Loss::ByContainment => {
            // By the level of the trials one in a thousand may be, at most; with this seed none is.
            let kept: Vec<&&Containment> = all.iter().filter(|c| c.kept_at().is_some()).collect();
            assert!(kept.is_empty(), "{name}: {kept:?}");
        }
        Loss::Little | Loss::Much | Loss::NearlyAll => {
            assert!(plant.lost_s <= alone.lost_s + 1e-6, "{name}");
        }
    }
}

/// What came of a load.
struct Outcome {
    index: u64,
    name: String,
    trials: usize,
    kept: usize,
    refused: usize,
    /// Kept, and taken back by the guard.
    taken_back: usize,
    /// Contained without a trial.
    recalls: usize,
    /// Most containments that began within an hour.
    most: usize,
    /// Shortest time between two switches of a reader that stayed in trial or under guard.
    shortest_s: Option<u64>,
    /// Work lost without homeostat and with it, in seconds.
    alone_s: f64,
    lost_s: f64,
    /// Seconds in which a reader was contained while it read.
    held_s: u64,
}

impl Outcome {
    fn of(index: u64) -> Self {
        let draw = Draw::new(index);
        let (mut plant, mut alone) = (draw.machine(), draw.machine());
        draw.happen(&mut plant, Plant::run);
        draw.happen(&mut alone, Plant::run_alone);
        let all: Vec<&Containment> = plant.log.values().collect();
        trials_are_few(&draw, &all);
        recalls_are_few(&draw, &all);
        what_is_refused_stays_away(&draw, &plant, &all);
        nothing_is_lost_by_it(&draw, &plant, &alone, &all);
        // That of the last trial that accepted, which its recalls have, too.
        let mut block_s = 0.0;
        for c in &all {
            let told = c.told.first().filter(|t| t.verdict == Verdict::Accepted);
            block_s = told.map_or(block_s, |t| t.block_s);
            let ended = plant.ended.get(&c.reader).copied();
            switches_are_by_coin(&draw, c);
            what_is_kept_stays(&draw, c, block_s, ended);
            everything_ends(&draw, c, ended);
        }
        let refused = |c: &&&Containment| {
            let ended = plant.ended.get(&c.reader).copied();
            refused_at(c, ended).is_some()
        };
        let is_kept = |c: &&&Containment| c.is_trial && c.kept_at().is_some();
        Self {
            index,
            name: draw.name(),
            trials: all.iter().filter(|c| c.is_trial).count(),
            kept: all.iter().filter(is_kept).count(),
            refused: all
                .iter()
                .filter(refused)
                .filter(|c| c.kept_at().is_none())
                .count(),
            taken_back: all
                .iter()
                .filter(refused)
                .filter(|c| c.kept_at().is_some())
                .count(),
            recalls: all.iter().filter(|c| !c.is_trial && c.is_made()).count(),
            most: most_in_an_hour(&all),
            shortest_s: shortest(&all),
            alone_s: alone.lost_s,
            lost_s: plant.lost_s,
            held_s: plant.held_s,
        }
    }

    /// All loads, on as many threads as there are CPUs; the result does not depend on how many those are.
    fn all() -> Vec<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut all: Vec<Self> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads as u64)
                .map(|first| {
                    let own = (first..LOADS).step_by(threads);
                    scope.spawn(move || own.map(Self::of).collect::<Vec<Self>>())
                })
                .collect();
            workers.into_iter().flat_map(|w| w.join().unwrap()).collect()
        });
        all.sort_by_key(|o| o.index);
        all
    }

    fn line(&self) -> String {
        format!(
            "{}: {} trials, {} kept, {} refused, {} taken back, {} recalled, {} in an hour, switches {:?} s apart, held for {} s, \
             lost {:.1} s and {:.1} s without homeostat",
            self.name,
            self.trials,
            self.kept,
            self.refused,
            self.taken_back,
            self.recalls,
            self.most,
            self.shortest_s,
            self.held_s,
            self.lost_s,
            self.alone_s
        )
    }
}

fn most_in_an_hour(all: &[&Containment]) -> usize {
    let began: Vec<u64> = all.iter().filter(|c| c.is_made()).map(|c| c.began).collect();
    let from = |first: u64| {
        began
            .iter()
            .filter(move |at| (first..first + HOUR_S).contains(*at))
    };
    began.iter().map(|first| from(*first).count()).max().unwrap_or(0)
}

fn shortest(all: &[&Containment]) -> Option<u64> {
    let of = |c: &&Containment| -> Option<u64> {
        c.switches
            .windows(2)
            .filter(|pair| !is_end(c, &pair[1]))
            .map(|pair| pair[1].at - pair[0].at)
            .min()
    };
    all.iter().filter_map(of).min()
}

#[test]
fn over_random_loads_it_keeps_what_helps_lets_go_of_what_does_not_and_never_swings() {
    let all = Outcome::all();
    for outcome in &all {
        println!("{}", outcome.line());
    }
    // It is about what happens, so something must.
    let sum = |count: fn(&Outcome) -> usize| all.iter().map(count).sum::<usize>();
    let (kept, refused, recalls) = (sum(|o| o.kept), sum(|o| o.refused), sum(|o| o.recalls));
    assert!(
        kept >= 10 && refused >= 5 && recalls >= 3,
        "{kept} {refused} {recalls}"
    );
}
