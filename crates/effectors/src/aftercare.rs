//! Repairs the damage to a program once its streaming reader is limited. First it drops the reader's pages
//! ([`GivingBack`]), then it reads the program's lost pages again ([`BringingBack`]).
//!
//! Once is not always enough. Pages ahead of the reader lie behind it a moment later. While a process cannot be checked
//! nothing is dropped, and if the group of both stays full, the kernel goes on taking the program's pages. So homeostat
//! watches the program's reads from storage (`read_bytes` in `/proc/PID/io`, page faults included). The first check is
//! two seconds after a pass, later ones at growing intervals while reads are few. If they are many, a pass follows.
//!
//! A program may always read much from storage, and then a pass is useless. A pass is in vain unless it halves the
//! reads. After each such pass the next one waits twice as long ([`Watch`]). A program that reads in bursts looks
//! helped. So later passes bring at most 1 GiB plus what storage has since delivered: the load at most doubles.

use crate::bringing_back::{BROUGHT_AGAIN_MAX, BringingBack, Limits, PROCESSES_MAX};
use crate::fetcher::{FetchError, Fetcher, Launch};
use crate::giving_back::{GivingBack, Rounds, Seen};
use crate::lost_parts::Known;
use homeostat_kernel::Root;
use homeostat_model::{ActionId, Bytes, ProcessId, WorkloadId};
use homeostat_sensors::reader::{PATIENCE, Reader};
use homeostat_sensors::reads::parse_io;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

/// Storage reads in bytes a second above which the program is reading lost pages: 64 single pages.
const LOSS_MIN: f64 = 256.0 * 1024.0;
/// Shortest time between checks, and from the end of a pass to the check that judges it.
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// Longest time between checks.
const PAUSE_MAX: Duration = Duration::from_secs(32);
/// Longest wait after a pass in vain.
const REST_MAX: Duration = Duration::from_secs(600);
/// Bytes that later passes may bring before the program's own reads add to that.
const ALLOWED_FIRST: u64 = 1 << 30;
/// Less than this is not worth a pass.
const ALLOWED_MIN: u64 = 1 << 20;
/// When a process that could not be checked is tried again. Meanwhile nothing is dropped.
const REST: Duration = Duration::from_secs(2);

/// Actions remembered from pass to pass.
const REMEMBERED_MAX: usize = 8;
/// Shortest time between two reports on later passes.
const TOLD_EVERY: Duration = Duration::from_secs(60);

pub(super) struct Wanted {
    /// The processes of the reader, if its pages are to be dropped.
    pub(super) give_back: Option<BTreeSet<i32>>,
    /// The processes of the program, oldest first, if its lost pages are to be read.
    pub(super) bring_back: Option<Vec<ProcessId>>,
}

/// Aftercare of all limited readers.
pub(super) struct Aftercare {
    root: Root,
    works: BTreeMap<ActionId, Work>,
    watches: BTreeMap<ActionId, Watch>,
    fetcher: Fetcher,
    /// Open files of others, as last checked.
    seen: Seen,
    /// Memory from pass to pass, by action.
    memory: BTreeMap<ActionId, Memory>,
    /// Finished passes not reported yet.
    accounts: Vec<(ActionId, Account)>,
    patience: Reader,
}

/// Remembered for an action from pass to pass, also while its reader is not limited.
#[derive(Default)]
struct Memory {
    /// Parts read for the program, or chosen for reading.
    known: Known,
    /// How far the reader was in its files.
    rounds: Rounds,
    /// Later passes not reported yet.
    untold: Option<Account>,
    /// Time of the last report.
    told: Option<Instant>,
}

/// Result of a pass, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Account {
    /// Whether it was the first one of a limitation.
    is_first: bool,
    /// Number of passes in this account.
    passes: u32,
    took: Duration,
    /// Bytes of the reader's files handled for dropping, and files dropped ahead. `None`: not wanted.
    given: Option<(u64, usize)>,
    /// Bytes requested for the program, and how many of them in large units. `None`: no reading was wanted.
    brought: Option<(u64, u64)>,
    /// Files left as they are in the last pass, by reason.
    left: BTreeMap<String, u64>,
}

impl Account {
    fn add(&mut self, later: Self) {
        self.passes += later.passes;
        self.took += later.took;
        self.given = match (self.given, later.given) {
            (Some((all, rounds)), Some((bytes, more))) => Some((all + bytes, rounds + more)),
            (one, other) => one.or(other),
        };
        self.brought = match (self.brought, later.brought) {
            (Some((all, units)), Some((bytes, more))) => Some((all + bytes, units + more)),
            (one, other) => one.or(other),
        };
        self.left = later.left;
    }

    /// The sentence about the program. Its subject stands before it; the reader is named.
    pub(super) fn sentence(&self, reader: &WorkloadId) -> String {
        let mut text = match self.passes {
            _ if self.is_first => format!("{reader} is contained"),
            1 => format!("it still waited for storage beside {reader}"),
            passes => format!("it still waited for storage beside {reader}, {passes} times"),
        };
        match self.brought {
            Some((0, _)) => text.push_str("; nothing that it lost was to be read again"),
            Some((bytes, units)) => {
                let _ = write!(text, "; {} that it lost were read again", Bytes(bytes));
                if units > 0 {
                    let _ = write!(text, ", {} of that in large units", Bytes(units));
                }
            }
            None => {}
        }
        if let Some((bytes, rounds)) = self.given.filter(|(bytes, _)| *bytes > 0) {
            let ahead = match rounds {
                0 => "",
                _ => ", also ahead of it where it has begun anew",
            };
            let _ = write!(
                text,
                "; what is in memory of {} that the reader had read was dropped{ahead}",
                Bytes(bytes)
            );
        }
        let _ = write!(text, "; {:.1} s", self.took.as_secs_f64());
        for (why, count) in &self.left {
            let _ = write!(text, "; {why} ({count})");
        }
        text
    }
}

/// One pass, as far as it got.
struct Work {
    begun: Instant,
    /// The pass belongs to the limiting itself, which is not done before. No tick continues it.
    is_first: bool,
    giving: Option<GivingBack>,
    bringing: Option<BringingBack>,
    /// Steps of the finished half.
    past: u64,
    given: Option<(u64, usize)>,
    brought: Option<(u64, u64)>,
    left: BTreeMap<String, u64>,
}

pub(super) enum Pass {
    /// Under way: steps done, and the total as far as is known.
    On(u64, u64),
    /// Finished: files left as they are, by reason.
    Over(BTreeMap<String, u64>),
}

impl Aftercare {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            works: BTreeMap::new(),
            watches: BTreeMap::new(),
            fetcher: Fetcher::default(),
            seen: Seen::default(),
            memory: BTreeMap::new(),
            accounts: Vec::new(),
            patience: Reader::with_rest(REST),
        }
    }

    pub(super) fn start_fetcher(&mut self, launch: Launch) -> Result<(), FetchError> {
        self.fetcher.start(&self.root, launch)
    }

    /// The process that reads for the programs.
    pub(super) fn helper(&self) -> Option<i32> {
        self.fetcher.pid()
    }

    /// Whether anything can be read again.
    pub(super) fn can_bring(&self) -> bool {
        self.fetcher.is_there()
    }

    /// Whether a pass is under way for this action.
    pub(super) fn is_at_work(&self, action: ActionId) -> bool {
        self.works.contains_key(&action)
    }

    /// Begins the first pass. Each time that the reader is limited, everything is checked anew.
    pub(super) fn begin(&mut self, action: ActionId, wanted: Wanted) {
        self.stop(action);
        self.begin_pass(action, wanted, None);
    }

    /// Begins a pass: the first, or a later one that may bring so many bytes.
    fn begin_pass(&mut self, action: ActionId, wanted: Wanted, allowed: Option<u64>) {
        let is_first = allowed.is_none();
        let limits = allowed.map_or(Limits::FIRST, Limits::again);
        self.make_room_to_remember(action);
        let memory = self.memory.entry(action).or_default();
        if is_first {
            memory.rounds.begin();
        }
        let giving = wanted.give_back.map(|own| {
            let (seen, rounds) = (std::mem::take(&mut self.seen), std::mem::take(&mut memory.rounds));
            GivingBack::new(own, seen, rounds)
        });
        let bringing = wanted
            .bring_back
            .map(|members| BringingBack::new(action, members, limits, std::mem::take(&mut memory.known)));
        let work = Work {
            begun: Instant::now(),
            is_first,
            given: giving.is_some().then_some((0, 0)),
            brought: bringing.is_some().then_some((0, 0)),
            giving,
            bringing,
            past: 0,
            left: BTreeMap::new(),
        };
        self.works.insert(action, work);
    }

    /// One slice of an action's pass.
    pub(super) fn go_on(&mut self, action: ActionId) -> Pass {
        let Some(work) = self.works.get_mut(&action) else {
            return Pass::Over(BTreeMap::new());
        };
        if let Some(giving) = &mut work.giving {
            if let Some((left, others)) = giving.go_on(&self.root, &mut self.patience) {
                work.past += giving.steps().0;
                work.given = Some((giving.given(), giving.rounds_dropped()));
                self.memory.entry(action).or_default().rounds = giving.take_rounds();
                work.giving = None;
                self.seen = others;
                work.left.extend(left);
            }
        }
        if work.giving.is_none() {
            if let Some(bringing) = &mut work.bringing {
                if let Some(left) = bringing.go_on(&self.root, &mut self.patience, &mut self.fetcher) {
                    // The first pass has no watch over it yet.
                    if let Some(watch) = self.watches.get_mut(&action) {
                        watch.allowed = watch.allowed.saturating_sub(bringing.asked());
                    }
                    work.brought = Some((bringing.asked(), bringing.asked_in_units()));
                    self.memory.entry(action).or_default().known = bringing.take_known();
                    work.bringing = None;
                    work.left.extend(left);
                }
            }
        }
        if work.giving.is_none() && work.bringing.is_none() {
            let account = Account {
                is_first: work.is_first,
                passes: 1,
                took: work.begun.elapsed(),
                given: work.given,
                brought: work.brought,
                left: std::mem::take(&mut work.left),
            };
            self.works.remove(&action);
            let left = account.left.clone();
            self.note_down(action, account);
            return Pass::Over(left);
        }
        let giving = work.giving.as_ref().map_or((0, 0), GivingBack::steps);
        let bringing = work.bringing.as_ref().map_or((0, 0), BringingBack::steps);
        Pass::On(
            work.past + giving.0 + bringing.0,
            work.past + giving.1 + bringing.1,
        )
    }

    /// At every sample while the reader is limited: continues a pass, or checks whether one is due. `wanted`: its work.
    pub(super) fn tick(&mut self, action: ActionId, program: &[ProcessId], wanted: impl FnOnce() -> Wanted) {
        match self.works.get(&action) {
            Some(work) if work.is_first => return,
            Some(_) => {
                if let Pass::Over(_) = self.go_on(action) {
                    if let Some(delivered) = self.delivered(program) {
                        if let Some(watch) = self.watches.get_mut(&action) {
                            watch.begin_anew(Instant::now(), delivered);
                        }
                    }
                }
                return;
            }
            None => {}
        }
        let now = Instant::now();
        if self.watches.get(&action).is_some_and(|watch| !watch.is_due(now)) {
            return;
        }
        let Some(delivered) = self.delivered(program) else {
            return;
        };
        let watch = match self.watches.entry(action) {
            Entry::Occupied(watch) => watch.into_mut(),
            Entry::Vacant(place) => {
                place.insert(Watch::new(now, delivered));
                return;
            }
        };
        if watch.look(now, delivered) {
            let allowed = watch.allowed.min(BROUGHT_AGAIN_MAX);
            self.begin_pass(action, wanted(), Some(allowed));
        }
    }

    /// Bytes delivered by storage to the program. `None` if it cannot be checked now.
    fn delivered(&mut self, program: &[ProcessId]) -> Option<BTreeMap<ProcessId, u64>> {
        let first = program.first()?.pid;
        let (root, program) = (self.root.clone(), program.to_vec());
        // A process in `execve` may make this read wait.
        self.patience
            .run(first, PATIENCE, move || delivered(&root, &program))
            .ok()
    }

    /// Takes note of a finished pass: the first is reported at once, later ones together and seldom.
    fn note_down(&mut self, action: ActionId, account: Account) {
        let memory = self.memory.entry(action).or_default();
        match &mut memory.untold {
            Some(untold) if untold.is_first == account.is_first => untold.add(account),
            untold => {
                if let Some(before) = untold.replace(account) {
                    self.accounts.push((action, before));
                }
            }
        }
    }

    /// New reports on finished passes.
    pub(super) fn take_accounts(&mut self) -> Vec<(ActionId, Account)> {
        let mut accounts = std::mem::take(&mut self.accounts);
        let now = Instant::now();
        for (action, memory) in &mut self.memory {
            let is_due = |account: &mut Account| {
                let rests = memory.told.is_none_or(|told| now >= told + TOLD_EVERY);
                account.is_first || rests
            };
            if let Some(account) = memory.untold.take_if(is_due) {
                memory.told = Some(now);
                accounts.push((*action, account));
            }
        }
        accounts
    }

    /// Ends it for good.
    pub(super) fn forget(&mut self, action: ActionId) {
        self.stop(action);
        self.memory.remove(&action);
    }

    /// Forgets the oldest actions for which nothing is under way.
    fn make_room_to_remember(&mut self, action: ActionId) {
        while self.memory.len() >= REMEMBERED_MAX && !self.memory.contains_key(&action) {
            let is_idle = |id: &&ActionId| !self.works.contains_key(id) && !self.watches.contains_key(id);
            let Some(oldest) = self.memory.keys().find(is_idle).copied() else {
                return;
            };
            self.memory.remove(&oldest);
        }
    }

    /// Ends a pass where it is. Its results about others serve the next time.
    pub(super) fn stop(&mut self, action: ActionId) {
        self.watches.remove(&action);
        let Some(work) = self.works.remove(&action) else {
            return;
        };
        let memory = self.memory.entry(action).or_default();
        if let Some(mut giving) = work.giving {
            self.seen = giving.take_seen();
            memory.rounds = giving.take_rounds();
        }
        if let Some(mut bringing) = work.bringing {
            memory.known = bringing.take_known();
            bringing.stop(&self.root, &mut self.fetcher);
        }
    }
}

/// Bytes delivered by storage to each process since its start.
fn delivered(root: &Root, program: &[ProcessId]) -> BTreeMap<ProcessId, u64> {
    let of = |process: &ProcessId| {
        let text = fs::read(root.path(&format!("/proc/{}/io", process.pid))).ok()?;
        Some((*process, parse_io(&text)?.from_storage))
    };
    program.iter().take(PROCESSES_MAX).filter_map(of).collect()
}

/// Decides whether there is another pass.
struct Watch {
    /// Time of the next check.
    at: Instant,
    pause: Duration,
    /// Time of the last check.
    since: Instant,
    /// Bytes delivered to each process by then.
    delivered: BTreeMap<ProcessId, u64>,
    /// Bytes a second before the last pass, until that pass is judged.
    before: Option<f64>,
    /// Passes in vain. A useful pass halves the count.
    in_vain: u32,
    /// No further pass before this time.
    rests_until: Instant,
    /// Bytes that later passes may still bring.
    allowed: u64,
}

impl Watch {
    fn new(now: Instant, delivered: BTreeMap<ProcessId, u64>) -> Self {
        Self {
            at: now + PAUSE_MIN,
            pause: PAUSE_MIN,
            since: now,
            delivered,
            before: None,
            in_vain: 0,
            rests_until: now,
            allowed: ALLOWED_FIRST,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.at
    }

    /// A pass is over: reads from now on judge it.
    fn begin_anew(&mut self, now: Instant, delivered: BTreeMap<ProcessId, u64>) {
        self.since = now;
        self.delivered = delivered;
        self.at = now + PAUSE_MIN;
    }

    /// Checks the reads since the last time. True: another pass is due.
    fn look(&mut self, now: Instant, delivered: BTreeMap<ProcessId, u64>) -> bool {
        let seconds = now.saturating_duration_since(self.since).as_secs_f64();
        let bytes: u64 = delivered
            .iter()
            .filter_map(|(process, bytes)| Some(bytes.saturating_sub(*self.delivered.get(process)?)))
            .sum();
        let rate = if seconds > 0.0 {
            bytes as f64 / seconds
        } else {
            0.0
        };
        self.since = now;
        self.delivered = delivered;
        self.allowed = self.allowed.saturating_add(bytes);
        if let Some(before) = self.before.take() {
            if rate > before / 2.0 {
                self.in_vain += 1;
                let rest = PAUSE_MIN * 2_u32.saturating_pow(self.in_vain.min(16));
                self.rests_until = now + rest.min(REST_MAX);
            } else {
                self.in_vain /= 2;
            }
        }
        let lacks_nothing = rate < LOSS_MIN;
        if lacks_nothing || now < self.rests_until || self.allowed < ALLOWED_MIN {
            self.pause = (self.pause * 2).min(PAUSE_MAX);
            // No later than the next pass is allowed.
            let rest = self.rests_until.saturating_duration_since(now);
            let pause = if rest.is_zero() {
                self.pause
            } else {
                self.pause.min(rest)
            };
            self.at = now + pause.max(PAUSE_MIN);
            return false;
        }
        self.pause = PAUSE_MIN;
        self.before = Some(rate);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_kept_for_those_at_work_and_the_latest() {
        let mut aftercare = Aftercare::new(Root::default());
        let nothing = || Wanted {
            give_back: None,
            bring_back: None,
        };
        aftercare
            .watches
            .insert(ActionId(1), Watch::new(Instant::now(), sum(0)));
        for id in 1..=20 {
            aftercare.begin_pass(ActionId(id), nothing(), None);
            assert!(matches!(aftercare.go_on(ActionId(id)), Pass::Over(_)));
        }
        let remembered: Vec<u64> = aftercare.memory.keys().map(|id| id.0).collect();
        assert_eq!(remembered, [1, 14, 15, 16, 17, 18, 19, 20]);
        aftercare.forget(ActionId(20));
        assert!(!aftercare.memory.contains_key(&ActionId(20)));
    }

    #[test]
    fn how_far_the_reader_was_outlives_a_pass_that_is_ended_before() {
        let mut aftercare = Aftercare::new(Root::default());
        let wanted = || Wanted {
            give_back: Some(BTreeSet::from([i32::MAX])),
            bring_back: Some(Vec::new()),
        };
        let action = ActionId(1);
        aftercare.begin(action, wanted());
        // Ended in the middle, and begun anew: nothing is lost on the way.
        let known = |aftercare: &Aftercare| aftercare.works[&action].giving.as_ref().unwrap().looks_so_far();
        if let Some(giving) = aftercare
            .works
            .get_mut(&action)
            .and_then(|work| work.giving.as_mut())
        {
            giving.note_for_a_test();
        }
        assert_eq!(known(&aftercare), 1);
        aftercare.stop(action);
        aftercare.begin(action, wanted());
        assert_eq!(known(&aftercare), 1);
        aftercare.begin(action, wanted());
        assert_eq!(known(&aftercare), 1);
    }

    #[test]
    fn later_passes_are_told_of_together_and_first_ones_at_once() {
        let mut aftercare = Aftercare::new(Root::default());
        let pass = |is_first, brought| Account {
            is_first,
            passes: 1,
            took: Duration::from_millis(300),
            given: Some((3 << 20, usize::from(is_first))),
            brought: Some((brought, if is_first { brought / 5 * 4 } else { 0 })),
            left: BTreeMap::new(),
        };
        let reader = WorkloadId::from("tar[7]");
        let told = |aftercare: &mut Aftercare| -> Vec<String> {
            let accounts = aftercare.take_accounts();
            accounts
                .iter()
                .map(|(_, account)| account.sentence(&reader))
                .collect()
        };
        let action = ActionId(1);
        aftercare.note_down(action, pass(true, 5 << 20));
        let expected = "tar[7] is contained; 5.0 MiB that it lost were read again, 4.0 MiB of that in large units; what is in memory of 3.0 MiB \
            that the reader had read was dropped, also ahead of it where it has begun anew; 0.3 s";
        assert_eq!(told(&mut aftercare), [expected]);
        aftercare.note_down(action, pass(false, 0));
        aftercare.note_down(action, pass(false, 1 << 20));
        assert_eq!(told(&mut aftercare), [""; 0]);
        // A minute later.
        let before = Instant::now().checked_sub(TOLD_EVERY);
        aftercare.memory.get_mut(&action).unwrap().told = before;
        let expected = "it still waited for storage beside tar[7], 2 times; 1.0 MiB that it lost were read again; what is in memory of \
            6.0 MiB that the reader had read was dropped; 0.6 s";
        assert_eq!(told(&mut aftercare), [expected]);
        // Contained anew: what was not told yet comes first.
        aftercare.note_down(action, pass(false, 0));
        aftercare.note_down(action, pass(true, 0));
        let told = told(&mut aftercare);
        assert!(told[0].starts_with("it still waited") && told[1].starts_with("tar[7] is contained"));
    }

    const PROGRAM: ProcessId = ProcessId {
        pid: 7,
        start_ticks: 1,
    };

    fn sum(bytes: u64) -> BTreeMap<ProcessId, u64> {
        BTreeMap::from([(PROGRAM, bytes)])
    }

    /// A program that storage delivers to at a rate, in MiB/s, that the passes so far decide; returns the seconds at which passes
    /// began within the hour, each of which takes half a second.
    fn passes(rate: impl Fn(usize, f64) -> f64) -> Vec<f64> {
        let begun = Instant::now();
        let at = |seconds: f64| begun + Duration::from_secs_f64(seconds);
        let mut watch = Watch::new(at(0.0), sum(0));
        let (mut bytes, mut begins) = (0.0, Vec::new());
        for tick in 1..7200 {
            let now = f64::from(tick) * 0.5;
            bytes += 0.5 * rate(begins.len(), now) * 1024.0 * 1024.0;
            if begins.last() == Some(&(now - 0.5)) {
                watch.begin_anew(at(now), sum(bytes as u64));
            } else if watch.is_due(at(now)) && watch.look(at(now), sum(bytes as u64)) {
                begins.push(now);
            }
        }
        begins
    }

    #[test]
    fn nothing_more_is_done_for_a_program_that_lacks_nothing() {
        assert_eq!(passes(|_, _| 0.0), Vec::<f64>::new());
    }

    #[test]
    fn what_is_missing_after_the_first_pass_is_brought_two_seconds_later_and_once() {
        let begins = passes(|done, _| if done == 0 { 9.0 } else { 0.01 });
        assert_eq!(begins, [2.0]);
    }

    #[test]
    fn what_is_lost_much_later_is_seen_within_the_longest_pause() {
        let begins = passes(|done, now| if done == 0 && now > 1000.0 { 9.0 } else { 0.0 });
        assert_eq!(begins.len(), 1, "{begins:?}");
        assert!(begins[0] > 1000.0 && begins[0] <= 1033.0, "{begins:?}");
    }

    #[test]
    fn a_program_that_always_reads_from_storage_is_read_for_less_and_less() {
        let begins = passes(|_, _| 40.0);
        let gaps: Vec<f64> = begins.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.windows(2).all(|pair| pair[1] >= pair[0]), "{gaps:?}");
        assert!(begins.len() <= 14, "{begins:?}");
        assert!(gaps.last().is_some_and(|gap| *gap >= 600.0), "{gaps:?}");
    }

    #[test]
    fn for_a_program_that_reads_in_bursts_no_more_is_brought_than_it_reads_itself_and_the_first_gigabyte() {
        let begun = Instant::now();
        let mut watch = Watch::new(begun, sum(0));
        let (mut bytes, mut brought) = (0u64, 0u64);
        let mut since: Option<u32> = None;
        for tick in 1..7200 {
            let now = begun + Duration::from_millis(500) * tick;
            // One second of four, 40 MiB/s.
            bytes += if tick % 8 < 2 { 20 << 20 } else { 0 };
            if since == Some(tick - 1) {
                watch.begin_anew(now, sum(bytes));
            } else if watch.is_due(now) && watch.look(now, sum(bytes)) {
                let most = watch.allowed.min(BROUGHT_AGAIN_MAX);
                watch.allowed -= most;
                brought += most;
                since = Some(tick);
            }
        }
        assert!(
            since.is_some() && brought <= ALLOWED_FIRST + bytes,
            "{brought} {bytes}"
        );
    }

    #[test]
    fn a_pass_that_helps_after_others_that_did_not_is_followed_as_the_first_one() {
        // In vain while the group was full, up to the second minute.
        let begins = passes(|done, now| match (now < 120.0, done) {
            (true, _) => 9.0,
            (false, _) if now < 200.0 => 9.0,
            _ => 0.0,
        });
        assert!(
            begins.len() >= 4 && begins.iter().all(|at| *at < 260.0),
            "{begins:?}"
        );
    }

    #[test]
    fn a_process_that_was_born_since_does_not_count_with_all_that_it_ever_read() {
        let begun = Instant::now();
        let mut watch = Watch::new(begun, sum(0));
        let other = ProcessId {
            pid: 8,
            start_ticks: 2,
        };
        let now = begun + PAUSE_MIN;
        let delivered = BTreeMap::from([(PROGRAM, 10), (other, 1 << 30)]);
        assert!(!watch.look(now, delivered));
    }
}
