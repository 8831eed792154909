//! Counts continuously if the overhead budget allows. Otherwise counting is sampled: for a part of each turn (1 s).
//!
//! A separate thread attaches and detaches probes ([`Subject`]), because the kernel may wait for the program's memory.
//! Each turn measures the counting cost: all hits, also during attach and detach, times the cost of a hit here. Its
//! share of the CPU time sets the share of the next turn ([`schedule`]), so the limit holds when the rate changes. A
//! turn with too many hits ends early, and a rest repays the excess ([`debt`]). The cost includes uncounted children
//! ([`children`]) and costs without hits ([`Subject::beside`]). If attaching is costly, windows are seconds apart
//! ([`Rest::Waits`]).
//!
//! A turn begins with a reading. Its window normally ends before the next reading, or is divided there. So the estimate
//! ([`estimate`]) uses only counts between its readings, except with [`Rest::Waits`] and [`Rest::LastWindow`]. Only the
//! turn's number places the window, never the current trial.
//!
//! The safety checks before attaching ([`concern`](crate::concern)) find processes that would be blocked. While there
//! is one, attached probes stay attached, detached ones stay detached, and the check repeats.

mod calibration;
mod children;
mod debt;
mod estimate;
mod schedule;
mod urgency;

use calibration::Waited;
pub(super) use children::{Children, FORKS_MAX, Unpaid};
use debt::Debt;
pub(super) use estimate::TAKEN_MAX;
use estimate::{Ledger, Moment};
use homeostat_kernel::Root;
use homeostat_kernel::bpf::Counters;
use homeostat_meters::cpu_time::{CpuTime, tick, ticks, up_to_date};
use homeostat_meters::waits::Waits;
use homeostat_model::{Nanoseconds, ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_sensors::storage::Refusal;
use schedule::{Share, Spacing, TURN};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
pub(super) use urgency::Urgent;

/// Charge for a hit, as a multiple of its measured cost: competition for caches makes it costlier. On a quiet machine,
/// continuous counting made a MariaDB statement cost 2.4 µs [1.8, 3.0] more, where 1.3 µs was measured. At a charge of
/// 1.5, it lost 0.72 % [0.53, 0.90] instead of 0.5 %. 2.75 covers the interval's end (2.3), plus a fifth for worse
/// programs. PostgreSQL beside compilers, charged 1 µs, lost 1.3 ± 0.4 %.
pub(super) const CHARGED: f64 = 2.75;
/// A smaller share of the time gives no useful count.
const SHARE_MIN: f64 = 0.01;
/// Counting ends after this many turns in a row that allow less than half of [`SHARE_MIN`]. One turn proves little for
/// a program that shares its CPU, because the cost of a moment is divided by the little CPU time of that second.
const TURNS_DEAR: u32 = 3;
/// Indexes of the two counters: the probe site, and its witness, which is only compared with it.
pub(super) const COUNTED: u32 = 0;
pub(super) const WITNESS: u32 = 1;
/// Interval between checks of a turn's cost so far, and its minimum.
const BEAT: Duration = Duration::from_millis(20);
const BEAT_MIN: Duration = Duration::from_millis(2);
/// A turn ends early at this multiple of its share's cost.
const BURST: f64 = 2.0;
/// Lower bound of the CPUs of a program, which may have resumed work since an idle turn.
const CPUS_MIN: f64 = 0.2;
/// CPU time in a window (seconds) from which the program counts as active.
pub(super) const WORKED: f64 = 0.02;
/// A turn without a reading ends after this time (seconds).
const READING_MAX: f64 = 1.5;
/// Longest pause before counting ends. A process that blocked its observer is left alone for 30 s
/// ([`reader`](homeostat_sensors::reader)), and the pause is several times that.
const PAUSE_MAX: Duration = Duration::from_secs(180);
/// Longest distance between two windows (seconds). A comparison drops as much from each block.
const APART_MAX: f64 = 5.0;
/// … and the longest turn until its window has ended: it waits for a reading, and begins in the first half.
const APART_AND: f64 = 2.0;
/// With [`Rest::LastWindow`], a window stays valid for this multiple of the planned distance, plus [`APART_AND`].
const SPEAKS: f64 = 1.25;
/// A window with less CPU time (seconds) does not measure the cost.
const WINDOW_MIN: f64 = 0.002;
/// A share that grows by more than this factor per turn is still settling.
const GROWS: f64 = 1.2;
/// Delay in a window until the costs without hits are read (seconds). It doubles each time: a reading is costly.
const BESIDE_FIRST: f64 = 0.02;

#[derive(Clone, Debug)]
pub(super) enum Lost {
    /// The program ended or cannot be read now.
    Vanished(PlatformError),
    /// The count has changed its meaning, or is forbidden.
    Changed(String),
    /// Counting is forbidden now. The next turn checks again.
    Paused(String),
}

/// The counters of hits.
pub(super) trait Hits: Send + Sync {
    /// Cumulative hits of the probe site and its witness.
    fn hits(&self) -> [u64; 2];
    /// Whether the count includes every thread that could hit the probes since they were attached.
    fn is_whole(&self) -> bool {
        true
    }
}

impl Hits for Counters {
    fn hits(&self) -> [u64; 2] {
        let size = self.size();
        [COUNTED, WITNESS].map(|n| if n < size { self.read(n).unwrap_or(0) } else { 0 })
    }
}

/// A window in which hits were counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    /// CPU time of the program in the window (seconds).
    pub(super) cpu: f64,
    pub(super) hits: [u64; 2],
}

/// A probe site and its probes. Dropping it detaches the probes.
pub(super) trait Subject: Send + 'static {
    /// Name for people.
    fn name(&self) -> &str;
    /// Checks that the program is unchanged and that probes may be attached now.
    ///
    /// # Errors
    /// [`Lost`].
    fn check(&mut self, workload: &Workload) -> Result<(), Lost>;
    /// Attaches probes where they are missing, and releases those of ended processes.
    ///
    /// # Errors
    /// `Busy`: the next turn tries again. All other errors are final.
    fn attach(&mut self, processes: &[ProcessId]) -> Result<(), PlatformError>;
    /// Detaches the probes, unless that could block: then they stay.
    ///
    /// # Errors
    /// Names the process that stands still.
    fn off(&mut self) -> Result<(), Refusal>;
    /// Whether counting may go on within a window.
    fn at_liberty(&mut self) -> bool;
    /// Judges the result of a window.
    ///
    /// # Errors
    /// A sentence: the count has changed its meaning.
    fn judge(&mut self, window: &Window) -> Result<(), String>;
    /// Activity since the last call of uncounted children of these processes that hit the probes.
    fn unpaid(&mut self, processes: &[ProcessId]) -> Unpaid;
    fn begin(&mut self) {}
    /// Cost of a hit since the window began or the last call (seconds of CPU time), if known from the threads that ran.
    fn hit_cost(&mut self) -> Option<f64> {
        None
    }
    /// Cost of a hit now (seconds of CPU time), if it is measured repeatedly. It sets the charge. The estimate keeps
    /// the cost from the search, because measurement errors would move it.
    ///
    /// # Errors
    /// Lasting: above the allowed maximum.
    fn cost_now(&mut self) -> Result<Option<f64>, Refusal> {
        Ok(None)
    }
    /// Cost without hits since the last call (seconds of CPU time).
    fn beside(&mut self) -> f64 {
        0.0
    }
    /// Acceptable cost of a turn (seconds of CPU time), however little CPU time the program uses.
    fn allowance(&self) -> f64;
}

/// State shared by the thread and the reader.
struct Tally {
    /// Processes to be counted, as of the last reading.
    workload: Workload,
    cpu: CpuTime,
    ledger: Ledger,
    /// The probes have been attached once.
    begun: bool,
    readings: u64,
    lost: Option<Lost>,
    /// Why counting is forbidden now.
    paused: Option<String>,
    /// Why its waits cannot estimate the uncounted work.
    no_waits: Option<String>,
}

struct Shared {
    tally: Mutex<Tally>,
    /// Number of waits, for [`Rest::Waits`]. Not under the tally's lock: reading all threads takes milliseconds.
    waits: Mutex<Option<Waits>>,
    counters: Arc<dyn Hits>,
    since: Instant,
}

impl Shared {
    fn hold(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hits(&self) -> [u64; 2] {
        self.counters.hits()
    }

    fn moment(&self, tally: &mut Tally) -> (Moment, [u64; 2]) {
        // The same order at both ends of a window, so that the time in between cancels out.
        let hits = self.hits();
        let cpu = tally.cpu.read(&tally.workload.processes);
        let moment = Moment {
            at: self.since.elapsed().as_secs_f64(),
            cpu,
            hits: hits[COUNTED as usize],
            witnessed: hits[WITNESS as usize],
            waited: None,
        };
        (moment, hits)
    }

    /// The tally and a moment, with the number of waits if the ledger asks for it.
    fn hold_for_the_ledger(&self) -> (MutexGuard<'_, Tally>, Moment, [u64; 2]) {
        let asks = {
            let tally = self.hold();
            tally.ledger.asks_for_waits().then(|| tally.workload.clone())
        };
        let waited = asks.and_then(|workload| self.waited(&workload));
        let mut tally = self.hold();
        let (mut moment, hits) = self.moment(&mut tally);
        moment.waited = waited;
        (tally, moment, hits)
    }

    /// `None`: unknown, or another thread is reading.
    fn waited(&self, workload: &Workload) -> Option<Waited> {
        let mut waits = match self.waits.try_lock() {
            Ok(waits) => waits,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let begun = Instant::now();
        let before = self.hits()[COUNTED as usize];
        let read = waits.as_mut()?.read(workload);
        let after = self.hits()[COUNTED as usize];
        match read {
            Ok(waits) => Some(Waited {
                waits,
                hits: f64::midpoint(before as f64, after as f64),
                took: begun.elapsed().as_secs_f64(),
            }),
            Err(e) => {
                if let PlatformError::Unsupported { why, .. } = e {
                    self.hold().no_waits = Some(why);
                }
                None
            }
        }
    }
}

/// Basis for estimating the work while nothing is counted.
pub(super) enum Rest {
    /// CPU time, with a window in each second.
    CpuTime,
    /// CPU time at the last window's rate, for a site so busy that its share of each second is too short for a window.
    LastWindow {
        /// Shortest window, as a share of a turn.
        share_min: f64,
        /// Initial distance between the starts of two windows (seconds).
        apart: f64,
    },
    /// Number of waits of the threads, for a program in which attaching and detaching are costly.
    Waits {
        /// Cost without hits (seconds of CPU time per CPU that the program uses).
        coming_and_going: f64,
        /// The meter of waits, or why they cannot be counted.
        waits: Result<Waits, String>,
    },
}

/// A running count. Dropping it ends the thread, which detaches the probes.
pub(super) struct Counting {
    shared: Arc<Shared>,
    /// Reports each reading to the thread.
    read: SyncSender<()>,
    share: Option<f64>,
    lag: Nanoseconds,
}

pub(super) struct Beginning {
    pub(super) root: Root,
    pub(super) counters: Arc<dyn Hits>,
    /// Largest cost of a hit (seconds of CPU time). It applies where the subject reports no cost.
    pub(super) hit_cost: f64,
    pub(super) cost_max: f64,
    /// Initial share of the time that is counted. 1: continuously.
    pub(super) share: f64,
    /// CPUs that the program uses, if known.
    pub(super) cpus: f64,
    pub(super) rest: Rest,
}

impl Counting {
    /// Begins to count.
    ///
    /// # Errors
    /// `Busy`: no thread can be made.
    pub(super) fn begin<S: Subject>(
        workload: &Workload,
        subject: S,
        how: Beginning,
    ) -> Result<Self, PlatformError> {
        let what = format!("counting at {}", subject.name());
        let (mut spacing, mut told_late) = (None, Nanoseconds::ZERO);
        let (apart, waits, ledger) = match how.rest {
            Rest::CpuTime => (Ok(0.0), None, Ledger::new(how.hit_cost)),
            Rest::LastWindow { share_min, apart } => {
                let speaks = SPEAKS * apart.max(TURN) + APART_AND * TURN;
                told_late = Nanoseconds::from_secs_f64(speaks);
                spacing = Some(Spacing::new((share_min, apart), how.cpus, how.cost_max, speaks));
                (Ok(0.0), None, Ledger::by_last_window(how.hit_cost, speaks))
            }
            Rest::Waits {
                coming_and_going,
                waits,
            } => {
                let (apart, waits) = match waits {
                    Ok(waits) => (apart(coming_and_going, how.cost_max), Some(waits)),
                    Err(why) => (Err(why), None),
                };
                told_late = lag(coming_and_going, how.cost_max);
                let ledger = Ledger::by_waits(how.hit_cost, told_late.as_secs_f64());
                (apart, waits, ledger)
            }
        };
        let shared = Arc::new(Shared {
            tally: Mutex::new(Tally {
                workload: workload.clone(),
                cpu: CpuTime::default(),
                ledger,
                begun: false,
                readings: 0,
                lost: None,
                paused: None,
                no_waits: None,
            }),
            waits: Mutex::new(waits),
            counters: how.counters,
            since: Instant::now(),
        });
        let turns = Turns {
            root: how.root,
            subject,
            shared: shared.clone(),
            hit_cost: CHARGED * how.hit_cost,
            hit_cost_max: CHARGED * how.hit_cost,
            cost_max: how.cost_max,
            share: Share::new(how.share.max(spacing.as_ref().map_or(0.0, |s| s.share_min))),
            spacing,
            window_cpu: 0.0,
            cpus: how.cpus,
            share_before: 0.0,
            dear: 0,
            overdrawn: 0,
            apart,
            debt: Debt::default(),
            beside: 0.0,
            paused: None,
            number: 0,
        };
        let (read, told) = sync_channel(1);
        std::thread::Builder::new()
            .name("probes".to_owned())
            .spawn(move || turns.run(&told))
            .map_err(|e| PlatformError::Busy {
                what,
                why: e.to_string(),
            })?;
        Ok(Self {
            shared,
            read,
            share: None,
            lag: told_late,
        })
    }

    /// Cumulative hits, including the estimate for the uncounted time. `None` until the probes have been attached.
    ///
    /// # Errors
    /// [`Lost`].
    pub(super) fn read(&mut self, workload: &Workload) -> Result<Option<f64>, Lost> {
        self.share = None;
        let mut tally = self.shared.hold();
        if let Some(lost) = &tally.lost {
            return Err(lost.clone());
        }
        if tally.workload.processes != workload.processes {
            tally.workload = workload.clone();
        }
        if let Some(why) = &tally.paused {
            return Err(Lost::Paused(why.clone()));
        }
        if !tally.begun {
            return Ok(None);
        }
        if !self.shared.counters.is_whole() {
            tally.ledger.lack();
        }
        drop(tally);
        let (mut tally, now, _) = self.shared.hold_for_the_ledger();
        let told = tally.ledger.read(now);
        tally.readings += 1;
        drop(tally);
        // A full channel already holds that message.
        let _ = self.read.try_send(());
        self.share = told.share;
        Ok(Some(told.work))
    }

    pub(super) fn is_over(&self) -> bool {
        self.shared.hold().lost.is_some()
    }

    /// Share of the CPU time before the last reading that was counted. `None`: too little, so that reading is invalid.
    pub(super) fn share(&self) -> Option<f64> {
        self.share
    }

    /// Largest age of the count behind a reading.
    pub(super) fn lag(&self) -> Nanoseconds {
        self.lag
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Whole,
    /// Early: it cost too much.
    Dear,
    /// Early: the probes go at once, and the count is void.
    Disturbed,
    /// The reader has gone.
    Stopped,
}

/// State of the counting thread.
struct Turns<S> {
    root: Root,
    subject: S,
    shared: Arc<Shared>,
    /// Charge for a hit (seconds of CPU time) …
    hit_cost: f64,
    /// … and the charge where the cost was not measured.
    hit_cost_max: f64,
    cost_max: f64,
    spacing: Option<Spacing>,
    /// CPU time of the last window (seconds).
    window_cpu: f64,
    share: Share,
    /// CPUs that the program used in the last turn.
    cpus: f64,
    share_before: f64,
    /// Turns in a row that allow hardly any counting …
    dear: u32,
    /// … and turns in a row whose debt exceeds the longest rest.
    overdrawn: u32,
    /// Detached time after each window (seconds), or why sampling is impossible.
    apart: Result<f64, String>,
    debt: Debt,
    /// Cost without hits that is not charged yet (seconds of CPU time).
    beside: f64,
    /// Start of the current pause.
    paused: Option<Instant>,
    number: u64,
}

impl<S: Subject> Turns<S> {
    /// Counts until the reader goes or the count is lost.
    fn run(mut self, told: &Receiver<()>) {
        loop {
            match self.turn(told) {
                Ok(true) => {}
                // Dropping the subject detaches the probes.
                Ok(false) => return,
                Err(lost) => {
                    let Self { subject, shared, .. } = self;
                    // Detach before reporting the loss.
                    drop(subject);
                    shared.hold().lost = Some(lost);
                    return;
                }
            }
        }
    }

    /// Runs one turn. False: the reader has gone.
    fn turn(&mut self, told: &Receiver<()>) -> Result<bool, Lost> {
        let begun = Instant::now();
        let (before, hits_before) = {
            let mut tally = self.shared.hold();
            self.shared.moment(&mut tally)
        };
        if let Some(spacing) = &mut self.spacing {
            spacing.begins(before.at, before.cpu);
        }
        let always = self.share.always();
        if !always && self.number > 0 && !wait(told, schedule::begins_at(self.number)) {
            return Ok(false);
        }
        let workload = self.shared.hold().workload.clone();
        match self.subject.check(&workload) {
            Ok(()) => self.resume(),
            Err(Lost::Paused(why)) => {
                return self.pause(why, &workload.processes, &before, hits_before, told);
            }
            Err(lost) => return Err(lost),
        }
        // With waits as the basis, the CPU clocks do not matter.
        let by_cpu_time = !self.shared.hold().ledger.is_by_waits();
        if by_cpu_time && !always {
            ticks(&self.root, &workload.processes).map_err(|why| Lost::Changed(self.not_in_turns(&why)))?;
        }
        let urgent = Urgent::begin();
        // In continuous counting, processes that came since the last turn are counted only from now on.
        self.note_what_lacks();
        match self.subject.attach(&workload.processes) {
            Ok(()) => {}
            // A lack of memory, descriptors or breakpoints may pass, so later turns try again for a while. This turn
            // reports nothing: a partial count would look like less work.
            Err(e @ PlatformError::Busy { .. }) => {
                drop(urgent);
                return self.pause(e.to_string(), &workload.processes, &before, hits_before, told);
            }
            Err(e @ PlatformError::Unsupported { .. }) => return Err(Lost::Changed(e.to_string())),
            Err(e) => return Err(Lost::Vanished(e)),
        }
        if !always {
            self.subject.begin();
        }
        if by_cpu_time && !always {
            up_to_date();
        }
        let (start, at_start) = self.switch(true);
        let how = self.count(&start, at_start, told);
        if how == Ended::Disturbed {
            // A disturbed window does not wait for the clocks.
            self.shared.hold().ledger.lack();
        }
        let is_whole = self.note_what_lacks() && how != Ended::Disturbed;
        if let Some(cost) = self.subject.hit_cost() {
            self.hit_cost = CHARGED * cost;
            self.shared.hold().ledger.costs(cost);
        }
        let stays_on = always && how == Ended::Whole;
        if by_cpu_time && !stays_on && how != Ended::Disturbed && how != Ended::Stopped {
            up_to_date();
        }
        let (end, at_end) = if stays_on {
            let mut tally = self.shared.hold();
            self.shared.moment(&mut tally)
        } else {
            let moment = self.switch(false);
            if how == Ended::Disturbed {
                // A reading may have come meanwhile. The rest of the window belongs to the next reading.
                self.shared.hold().ledger.lack();
            }
            // If this fails now, the next turn tries again.
            let _ = self.subject.off();
            moment
        };
        drop(urgent);
        if how == Ended::Stopped || (!always && !self.rest_of_the_turn(begun, told)) {
            return Ok(false);
        }
        // Update the cost first, so that its own hits are charged.
        self.look_at_the_price()?;
        let (now, hits) = {
            let mut tally = self.shared.hold();
            self.shared.moment(&mut tally)
        };
        let cpu = now.cpu - before.cpu;
        self.cpus = cpu.max(0.0) / begun.elapsed().as_secs_f64().max(schedule::TURN / 20.0);
        // A window with missing hits does not judge the site.
        if is_whole {
            self.subject
                .judge(&Window {
                    cpu: (end.cpu - start.cpu).max(0.0),
                    hits: [0, 1].map(|i| at_end[i].saturating_sub(at_start[i])),
                })
                .map_err(Lost::Changed)?;
        }
        if !always {
            let grows =
                self.share.value() > GROWS * std::mem::replace(&mut self.share_before, self.share.value());
            let judged = {
                let mut tally = self.shared.hold();
                if cpu < WORKED || grows {
                    tally.ledger.excuse();
                }
                tally
                    .no_waits
                    .clone()
                    .map_or_else(|| tally.ledger.judge_waits(), Err)
            };
            judged.map_err(|why| Lost::Changed(self.not_in_turns(&why)))?;
        }
        self.number += 1;
        self.window_cpu = (end.cpu - start.cpu).max(0.0);
        self.pay(
            begun,
            &workload.processes,
            hits_of(hits_before, hits),
            cpu,
            how != Ended::Dear,
            told,
        )
    }

    /// Notes whether threads ran uncounted while the probes were attached. False: some did.
    fn note_what_lacks(&self) -> bool {
        let is_whole = self.shared.counters.is_whole();
        if !is_whole {
            self.shared.hold().ledger.lack();
        }
        is_whole
    }

    /// Updates the charge to the present cost of a hit.
    fn look_at_the_price(&mut self) -> Result<(), Lost> {
        match self.subject.cost_now() {
            Ok(Some(cost)) => self.hit_cost = CHARGED * cost,
            Err(Refusal::Lasting(why)) => return Err(Lost::Changed(why)),
            Ok(None) | Err(Refusal::Now(_)) => {}
        }
        Ok(())
    }

    /// Adds the costs without hits since the last call.
    fn look_beside(&mut self) {
        self.beside += CHARGED * self.subject.beside();
    }

    /// Notes that the probes are attached, or are about to be detached.
    fn switch(&self, on: bool) -> (Moment, [u64; 2]) {
        let (mut tally, moment, hits) = self.shared.hold_for_the_ledger();
        tally.ledger.switch(on, self.share.value(), moment);
        if on && !tally.begun {
            tally.begun = true;
            tally.ledger.forget(moment);
        }
        (moment, hits)
    }

    /// Counts until the program has used the window's CPU time, it costs too much, or another tracer appears.
    fn count(&mut self, start: &Moment, at_start: [u64; 2], told: &Receiver<()>) -> Ended {
        let always = self.share.always();
        let begun = Instant::now();
        let (mut enough, longest) = schedule::window(self.share.value(), self.cpus);
        // A window may cost the budget of all turns until the next window.
        let turns = self.spacing.as_ref().map_or(1.0, Spacing::turns);
        let budget = (BURST * self.cost_max * self.cpus.max(CPUS_MIN) * TURN * turns)
            .max(BURST * self.subject.allowance());
        let (readings, by_waits, by_reading) = {
            let tally = self.shared.hold();
            let ledger = &tally.ledger;
            (tally.readings, ledger.is_by_waits(), ledger.is_by_reading())
        };
        if !by_waits {
            // The end of the window waits for a clock tick.
            let beside = tick().map_or(0.0, |tick| tick.as_secs_f64()) * self.cpus;
            enough = (enough - beside).max(enough / 2.0);
        }
        let mut divided = false;
        let mut used = 0.0;
        let mut look_beside = BESIDE_FIRST;
        loop {
            let elapsed = begun.elapsed().as_secs_f64();
            let left = if always {
                TURN - elapsed
            } else {
                ((enough - used) / self.cpus.max(0.01)).min(longest - elapsed)
            };
            if left <= 0.0 {
                return Ended::Whole;
            }
            if !wait(told, left.clamp(BEAT_MIN.as_secs_f64(), BEAT.as_secs_f64())) {
                return Ended::Stopped;
            }
            if elapsed >= look_beside {
                look_beside *= 2.0;
                self.look_beside();
            }
            if hits_of(at_start, self.shared.hits()) as f64 * self.hit_cost + self.beside > budget {
                return Ended::Dear;
            }
            // A frozen process may be about to be saved to disk, breakpoints included.
            if !self.subject.at_liberty() {
                return Ended::Disturbed;
            }
            if !always {
                let mut tally = self.shared.hold();
                let processes = tally.workload.processes.clone();
                used = tally.cpu.read(&processes) - start.cpu;
                // Only the part after a reading is left for the next reading.
                if tally.readings != readings && !divided && by_reading {
                    divided = true;
                    enough += used;
                }
            }
        }
    }

    /// Waits for the next reading, for a limited time.
    fn rest_of_the_turn(&self, begun: Instant, told: &Receiver<()>) -> bool {
        let left = READING_MAX * TURN - begun.elapsed().as_secs_f64();
        // A reading from before the window is not the next one.
        match told.recv_timeout(Duration::from_secs_f64(left.max(0.0))) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Pauses: detaches unless somebody stands still. Probes that stay are charged since the start of the turn.
    fn pause(
        &mut self,
        why: String,
        processes: &[ProcessId],
        before: &Moment,
        hits_before: [u64; 2],
        told: &Receiver<()>,
    ) -> Result<bool, Lost> {
        let since = *self.paused.get_or_insert_with(Instant::now);
        let off = self.subject.off();
        if off.is_ok() && since.elapsed() > PAUSE_MAX {
            return Err(Lost::Changed(format!(
                "nothing could be counted for {} s: {why}",
                PAUSE_MAX.as_secs()
            )));
        }
        self.shared.hold().paused = Some(why);
        if !wait(told, TURN) {
            return Ok(false);
        }
        let (now, hits) = {
            let mut tally = self.shared.hold();
            self.shared.moment(&mut tally)
        };
        let (paid, cpu) = (hits_of(hits_before, hits), now.cpu - before.cpu);
        self.look_beside();
        if off.is_ok() && paid == 0 && self.beside == 0.0 {
            // Nothing was attached: children cost nothing meanwhile, and time repays the debt.
            let _ = self.subject.unpaid(processes);
            self.debt.add(-self.subject.allowance(), cpu, self.cost_max);
            return Ok(true);
        }
        self.hit_cost = self.hit_cost.max(self.hit_cost_max);
        let (_, rest) = self.charge(processes, paid, cpu)?;
        Ok(off.is_err() || self.make_up(rest, told))
    }

    /// Resumes after a pause, whose work is unknown.
    fn resume(&mut self) {
        if self.paused.take().is_none() {
            return;
        }
        self.dear = 0;
        let (mut tally, moment, _) = self.shared.hold_for_the_ledger();
        tally.paused = None;
        tally.ledger.forget(moment);
    }

    /// Charges the turn: a rest if it cost far too much, and the share of the next turn.
    fn pay(
        &mut self,
        begun: Instant,
        processes: &[ProcessId],
        paid: u64,
        cpu: f64,
        whole: bool,
        told: &Receiver<()>,
    ) -> Result<bool, Lost> {
        let (cost, rest) = self.charge(processes, paid, cpu)?;
        if let Some(apart) = self.spacing.as_ref().map(Spacing::apart) {
            self.space(cost, paid as f64 * self.hit_cost)?;
            return Ok(self.share.always()
                || self.off().is_err()
                || self.wait_for_the_next(begun, apart, told)?);
        }
        self.share_of_the_next(cost, cpu, whole)?;
        let apart = match &self.apart {
            Ok(apart) if !self.share.always() => *apart,
            _ => 0.0,
        };
        let rest = rest.max(apart);
        // Probes that cannot be detached now are hit meanwhile. The next turn tries again.
        Ok((rest > 0.0 && self.off().is_err()) || self.make_up(rest, told))
    }

    fn not_in_turns(&self, why: &str) -> String {
        format!(
            "counting at {} all the time would cost more than {:.1} % of its CPU time (meters.probe_cost_max), and in turns it cannot be \
             counted: {why}; connections by TCP can be counted without",
            self.subject.name(),
            self.cost_max * 100.0
        )
    }

    /// Charges `paid` hits and the costs without hits over `cpu` seconds. Returns the cost (seconds of CPU time) and
    /// the rest that repays it (seconds).
    fn charge(&mut self, processes: &[ProcessId], paid: u64, cpu: f64) -> Result<(f64, f64), Lost> {
        self.look_beside();
        let beside = std::mem::take(&mut self.beside);
        let unpaid = self.subject.unpaid(processes);
        let name = self.subject.name();
        let cost = cost_of(paid as f64 * self.hit_cost + beside, cpu, unpaid)
            .map_err(|why| Lost::Changed(format!("counting at {name} was given up: {why}")))?;
        if let Some(spacing) = &mut self.spacing {
            // The time until the next window repays this, extended if needed.
            spacing.owe(cost - self.subject.allowance());
            return Ok((cost, 0.0));
        }
        self.debt.add(cost - self.subject.allowance(), cpu, self.cost_max);
        // The allowance repays debt too, as if the program used more CPUs.
        let cpus = self.cpus + self.subject.allowance() / self.cost_max;
        match self.debt.rest(cpus, self.cost_max) {
            Ok(rest) => {
                self.overdrawn = 0;
                Ok((cost, rest))
            }
            // An idle program may work again soon.
            Err(_) if self.overdrawn + 1 < TURNS_DEAR => {
                self.overdrawn += 1;
                Ok((cost, debt::MAKE_UP_MAX))
            }
            Err(seconds) => Err(Lost::Changed(format!(
                "counting at {name} has cost so much of its CPU time that it would take {seconds:.0} s to make up for, and {cost:.2} s of \
                 that in the last turn",
            ))),
        }
    }

    /// Rests for this many seconds with nothing attached. False: the reader has gone.
    fn make_up(&mut self, rest: f64, told: &Receiver<()>) -> bool {
        if rest == 0.0 {
            return true;
        }
        let before = self.cpu();
        if !wait(told, rest) {
            return false;
        }
        let used = self.cpu() - before;
        self.debt
            .add(-self.subject.allowance() * rest, used, self.cost_max);
        true
    }

    /// CPU time of all present processes, including new ones (seconds since a fixed moment).
    fn cpu(&self) -> f64 {
        let mut tally = self.shared.hold();
        self.shared.moment(&mut tally).0.cpu
    }

    /// Waits with nothing attached until the next window is due, where windows are seconds apart. False: the reader has
    /// gone. The last window does not set the distance: a longer time after a costly window would bias the estimate.
    /// The wait grows, within limits, only for a debt beyond chance. Each second it checks that the program is the
    /// same.
    fn wait_for_the_next(&mut self, begun: Instant, apart: f64, told: &Receiver<()>) -> Result<bool, Lost> {
        let (mut cpu, mut at) = (self.cpu(), Instant::now());
        if let Some(spacing) = &mut self.spacing {
            spacing.earn(cpu);
        }
        loop {
            let elapsed = begun.elapsed().as_secs_f64();
            let owes = self.spacing.as_ref().is_some_and(|s| s.owes(elapsed - apart));
            let step = if elapsed < apart {
                (apart - elapsed).min(TURN)
            } else if owes {
                TURN
            } else {
                return Ok(true);
            };
            if !wait(told, step) {
                return Ok(false);
            }
            let (now, seconds) = (self.cpu(), at.elapsed().as_secs_f64());
            if seconds > TURN / 2.0 {
                self.cpus = (now - cpu).max(0.0) / seconds;
                (cpu, at) = (now, Instant::now());
            }
            if let Some(spacing) = &mut self.spacing {
                spacing.earn(now);
                spacing.owe(-self.subject.allowance() * step);
            }
            let workload = self.shared.hold().workload.clone();
            // Nothing is attached, so children cost nothing.
            let _ = self.subject.unpaid(&workload.processes);
            match self.subject.check(&workload) {
                Ok(()) | Err(Lost::Paused(_)) => {}
                Err(lost) => return Err(lost),
            }
        }
    }

    /// Sets the share of the next turn from this turn's cost and CPU time (seconds).
    fn share_of_the_next(&mut self, cost: f64, cpu: f64, whole: bool) -> Result<(), Lost> {
        // An idle program says nothing about its rate.
        if cpu < WORKED {
            return Ok(());
        }
        // A turn cut short by a late reading is followed by a full rest.
        let spread = if self.apart.as_ref().is_ok_and(|apart| *apart > 0.0) {
            cpu.max(self.cpus * TURN)
        } else {
            cpu
        };
        let cost = cost / spread;
        let always = self.share.always();
        self.share = self.share.next(cost, self.cost_max, whole);
        let is_dear = self.share.value() < SHARE_MIN / 2.0;
        self.dear = if is_dear { self.dear + 1 } else { 0 };
        if self.dear >= TURNS_DEAR {
            return Err(self.too_dear(cost));
        }
        if is_dear {
            // Rests repay the excess cost.
            self.share = Share::new(SHARE_MIN / 2.0);
        }
        if let Err(why) = &self.apart {
            if !self.share.always() {
                return Err(Lost::Changed(self.not_in_turns(why)));
            }
        }
        if always && !self.share.always() {
            // The next turn attaches them for its share. If detaching fails now, that turn tries again.
            let _ = self.off();
        }
        Ok(())
    }

    /// Sets the next windows' distance and length from the turn's cost, in all and by hits (seconds of CPU time).
    fn space(&mut self, cost: f64, of_hits: f64) -> Result<(), Lost> {
        let Some(spacing) = &mut self.spacing else {
            return Ok(());
        };
        let while_on = (self.window_cpu >= WINDOW_MIN).then(|| of_hits / self.window_cpu);
        spacing.note(cost, self.share.value(), while_on);
        let (is_too_far, share, cost) = (spacing.is_too_far(), spacing.share(), spacing.cost());
        if is_too_far {
            return Err(self.too_dear(cost));
        }
        self.share = self.share.of(share);
        Ok(())
    }

    fn too_dear(&self, cost: f64) -> Lost {
        Lost::Changed(format!(
            "counting at {} has come to cost {:.1} % of its CPU time (limit {:.1} %), too much even part of the time",
            self.subject.name(),
            cost * 100.0,
            self.cost_max * 100.0
        ))
    }

    /// Detaches the probes and notes it.
    ///
    /// # Errors
    /// Detaching is impossible now.
    fn off(&mut self) -> Result<(), Refusal> {
        if self.shared.hold().ledger.is_on() {
            self.switch(false);
        }
        self.subject.off()
    }
}

/// Detached time after each window (seconds), given the cost of attaching and detaching.
///
/// # Errors
/// A sentence: the distance is too long for a window to represent.
fn apart(coming_and_going: f64, cost_max: f64) -> Result<f64, String> {
    let apart = coming_and_going / cost_max.max(1e-9);
    if apart <= APART_MAX {
        Ok(apart)
    } else {
        Err(format!(
            "each coming and going of its probe costs it {:.1} % of a second's CPU time, so {apart:.0} s would have to lie between two of them",
            coming_and_going * 100.0
        ))
    }
}

/// How long after a change the estimate may still use an older window, given the cost of attaching and detaching.
pub(super) fn lag(coming_and_going: f64, cost_max: f64) -> Nanoseconds {
    match apart(coming_and_going, cost_max) {
        Ok(apart) if apart > 0.0 => Nanoseconds::from_secs_f64(apart + APART_AND * TURN),
        // A window in each second, continuous counting, or none.
        Ok(_) | Err(_) => Nanoseconds::ZERO,
    }
}

/// Hits of both sites between two readings.
fn hits_of(before: [u64; 2], after: [u64; 2]) -> u64 {
    after.iter().zip(before).fold(0, |sum, (after, before)| {
        sum.saturating_add(after.saturating_sub(before))
    })
}

/// Total cost of a turn (seconds of CPU time), of the counted processes (which used `cpu` seconds) and children.
///
/// # Errors
/// A sentence: children do more work than the counted processes, or are forked too often.
fn cost_of(counted: f64, cpu: f64, unpaid: Unpaid) -> Result<f64, String> {
    if unpaid.forks > FORKS_MAX {
        return Err(format!(
            "{} processes were forked in a turn, each of which has to copy what is counted with",
            unpaid.forks
        ));
    }
    if unpaid.cpu > cpu.max(WORKED) {
        return Err(format!(
            "children that are not counted used {:.2} s of CPU time while it used {cpu:.2} s, and paid for it as well",
            unpaid.cpu
        ));
    }
    Ok(if cpu > 0.0 {
        counted * (1.0 + unpaid.cpu / cpu)
    } else {
        counted
    })
}

/// Waits this many seconds. False: the reader has gone. Readings meanwhile are noticed elsewhere.
fn wait(told: &Receiver<()>, seconds: f64) -> bool {
    let begun = Instant::now();
    let time = Duration::from_secs_f64(seconds.max(0.0));
    loop {
        let left = time.saturating_sub(begun.elapsed());
        match told.recv_timeout(left) {
            Ok(()) if !left.is_zero() => {}
            Ok(()) | Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_meters::PROBE_COST_MAX as COST_MAX;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// At no place: whether it can be attached, and what it costs beside its hits.
    struct Fake {
        attached: Arc<AtomicU32>,
        attaches: bool,
        beside: f64,
        /// Somebody begins to look into it while it is counted.
        disturbed: bool,
        /// What it says of its price, the last first.
        prices: Vec<Result<Option<f64>, Refusal>>,
    }

    impl Hits for Fake {
        fn hits(&self) -> [u64; 2] {
            [3, 7]
        }
    }

    impl Subject for Fake {
        fn name(&self) -> &str {
            "fake"
        }
        fn check(&mut self, _: &Workload) -> Result<(), Lost> {
            Ok(())
        }
        fn attach(&mut self, _: &[ProcessId]) -> Result<(), PlatformError> {
            self.attached.fetch_add(1, Ordering::Relaxed);
            if self.attaches {
                return Ok(());
            }
            Err(PlatformError::Busy {
                what: "counting".to_owned(),
                why: "a debugger has them".to_owned(),
            })
        }
        fn off(&mut self) -> Result<(), Refusal> {
            Ok(())
        }
        fn at_liberty(&mut self) -> bool {
            !self.disturbed
        }
        fn judge(&mut self, _: &Window) -> Result<(), String> {
            Ok(())
        }
        fn unpaid(&mut self, _: &[ProcessId]) -> Unpaid {
            Unpaid::default()
        }
        fn cost_now(&mut self) -> Result<Option<f64>, Refusal> {
            self.prices.pop().unwrap_or(Ok(None))
        }
        fn beside(&mut self) -> f64 {
            std::mem::take(&mut self.beside)
        }
        fn allowance(&self) -> f64 {
            0.0
        }
    }

    fn workload() -> Workload {
        Workload {
            id: "x".into(),
            kind: homeostat_model::WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: homeostat_model::Fingerprint::new("x"),
            program: "x".into(),
            executable: String::new(),
            processes: Vec::new(),
            choice: homeostat_model::OperatorChoice::default(),
        }
    }

    fn fake(attaches: bool, beside: f64) -> Fake {
        Fake {
            attached: Arc::default(),
            attaches,
            beside,
            disturbed: false,
            prices: Vec::new(),
        }
    }

    /// Counted for such a share of the time.
    fn turns(root: Root, workload: Workload, subject: Fake, share: f64) -> Turns<Fake> {
        let shared = Arc::new(Shared {
            tally: Mutex::new(Tally {
                workload,
                cpu: CpuTime::default(),
                ledger: Ledger::new(1e-6),
                begun: false,
                readings: 0,
                lost: None,
                paused: None,
                no_waits: None,
            }),
            waits: Mutex::new(None),
            counters: Arc::new(fake(true, 0.0)),
            since: Instant::now(),
        });
        Turns {
            root,
            subject,
            shared,
            hit_cost: 1e-6,
            hit_cost_max: 1e-6,
            cost_max: COST_MAX,
            share: Share::new(share),
            spacing: None,
            window_cpu: 0.0,
            cpus: 1.0,
            share_before: 0.0,
            dear: 0,
            overdrawn: 0,
            apart: Ok(0.0),
            debt: Debt::default(),
            beside: 0.0,
            paused: None,
            number: 0,
        }
    }

    #[test]
    fn what_cannot_be_attached_in_the_first_turn_is_tried_again_and_not_for_ever() {
        let subject = fake(false, 0.0);
        let attached = Arc::clone(&subject.attached);
        let how = Beginning {
            root: Root::default(),
            counters: Arc::new(fake(false, 0.0)),
            hit_cost: 1e-6,
            cost_max: COST_MAX,
            share: 1.0,
            cpus: 1.0,
            rest: Rest::CpuTime,
        };
        let mut counting = Counting::begin(&workload(), subject, how).unwrap();
        let begun = Instant::now();
        // A pause, which ends by itself: after three minutes it is told that it is over. While it is tried again nothing is said against it.
        loop {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it was given up, or never told"
            );
            let tried_again = attached.load(Ordering::Relaxed) >= 2;
            match counting.read(&workload()) {
                Err(Lost::Paused(why)) if tried_again => {
                    assert!(why.contains("debugger"), "{why}");
                    break;
                }
                Ok(None) | Err(Lost::Paused(_)) => {}
                other => panic!("{other:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn what_counting_costs_beside_its_hits_is_charged_and_ends_a_turn_before_its_time() {
        let mut turns = turns(Root::default(), workload(), fake(true, 0.04), 1.0);
        let (_read, told) = sync_channel(1);
        let (start, hits) = turns.switch(true);
        // The ledger is told of both counters.
        assert_eq!((start.hits, start.witnessed), (3, 7));
        // 40 ms in a turn that may cost 10.
        assert_eq!(turns.count(&start, hits, &told), Ended::Dear);
        let (cost, rest) = turns.charge(&[], 1_000, 1.0).unwrap();
        assert!((cost - (CHARGED * 0.04 + 0.001)).abs() < 1e-9, "{cost}");
        assert!(rest > 5.0, "{rest}");
        assert_eq!(turns.charge(&[], 1_000, 1.0).unwrap().0, 0.001, "once");
        // Where waits cannot be told it is not counted in turns, and all the time it is.
        turns.apart = Err("it has too many threads".to_owned());
        turns.share = Share::new(1.0);
        assert!(turns.share_of_the_next(0.001, 1.0, true).is_ok(), "it stays on");
        let over = |turns: &mut Turns<Fake>| turns.share_of_the_next(0.02, 1.0, false);
        let why = over(&mut turns).unwrap_err();
        assert!(
            matches!(&why, Lost::Changed(why) if why.contains("too many threads") && why.contains("probe_cost_max")),
            "{why:?}"
        );
        turns.share = Share::new(1.0);
        turns.apart = Ok(0.0);
        assert!(over(&mut turns).is_ok() && !turns.share.always());
    }

    #[test]
    fn one_dear_turn_is_made_up_for_and_only_three_in_a_row_end_it() {
        let mut turns = turns(Root::default(), workload(), fake(true, 0.0), 0.03);
        // Ten times what it may: of a program that was given little of its CPU in that second.
        let dear = |turns: &mut Turns<Fake>| turns.share_of_the_next(0.05, 1.0, true);
        for _ in 0..2 {
            assert!(dear(&mut turns).is_ok());
            assert_eq!(turns.share.value(), SHARE_MIN / 2.0);
        }
        // As dear as it may be, so not dearer than half of the least.
        assert!(turns.share_of_the_next(COST_MAX, 1.0, true).is_ok());
        for _ in 0..2 {
            assert!(dear(&mut turns).is_ok());
        }
        let why = dear(&mut turns).unwrap_err();
        assert!(
            matches!(&why, Lost::Changed(why) if why.contains("5.0 % of its CPU time")),
            "{why:?}"
        );
        // What such a turn costs is made up for by a rest, whatever share it has next.
        let (cost, rest) = turns.charge(&[], 50_000, 1.0).unwrap();
        assert!(cost > 0.04 && rest > 5.0, "{cost} {rest}");
        // Where a minute is not enough there is another, and after the third turn no more; nothing of the debt is forgotten.
        for _ in 0..2 {
            assert_eq!(turns.charge(&[], 1_000_000, 1.0).unwrap().1, debt::MAKE_UP_MAX);
        }
        let why = turns.charge(&[], 0, 1.0).unwrap_err();
        assert!(
            matches!(&why, Lost::Changed(why) if why.contains("to make up for")),
            "{why:?}"
        );
    }

    /// Windows of 30 ms of a program on one CPU, at 1 µs a hit; three seconds apart at first.
    fn spaced() -> Turns<Fake> {
        let mut turns = turns(Root::default(), workload(), fake(true, 0.0), 0.03);
        turns.spacing = Some(Spacing::new((0.03, 3.0), 1.0, COST_MAX, 5.75));
        turns
    }

    #[test]
    fn windows_that_are_to_be_no_shorter_lie_as_far_apart_as_they_cost() {
        let mut turns = spaced();
        let mut at = 0.0;
        // Each is so much longer than it is meant to be.
        let mut window = |turns: &mut Turns<Fake>, rate: f64, longer: f64| {
            let spacing = turns.spacing.as_mut().unwrap();
            spacing.begins(at, at);
            let apart = spacing.apart().max(TURN);
            turns.window_cpu = longer * turns.share.value();
            let hits = (rate * turns.window_cpu) as u64;
            let (cost, rest) = turns.charge(&[], hits, 1.0).unwrap();
            assert_eq!(rest, 0.0, "it is made up for by the time until the next");
            turns.space(cost, cost)?;
            at += apart;
            Ok::<_, Lost>((cost, apart))
        };
        // What it costs while it is on it may cost in the hundredth part of the time.
        assert!((window(&mut turns, 500_000.0, 1.0).unwrap().1 - 3.0).abs() < 1e-9);
        // The rate goes up and down: how far the next one is does not follow from what this one has shown.
        let (mut paid, mut passed, mut after) = (0.0, 0.0, [0.0; 2]);
        for n in 0..400 {
            let is_dear = n % 2 == 0;
            let rate = if is_dear { 800_000.0 } else { 200_000.0 };
            let (cost, apart) = window(&mut turns, rate, 1.1).unwrap();
            paid += cost;
            passed += apart;
            after[usize::from(is_dear)] += apart;
            assert!(!turns.spacing.as_ref().unwrap().owes(0.0), "{n}");
        }
        assert!((paid / passed / COST_MAX - 1.0).abs() < 0.05, "{}", paid / passed);
        assert!((after[1] / after[0] - 1.0).abs() < 0.2, "{after:?}");
        assert_eq!(turns.share.value(), 0.03);
        // What is hit less often has a window in each turn, a longer one, and at last is counted all the time.
        for _ in 0..60 {
            window(&mut turns, 50_000.0, 1.0).unwrap();
        }
        assert!((turns.share.value() - 0.1).abs() < 0.01, "{:?}", turns.share);
        assert_eq!(turns.spacing.as_ref().unwrap().apart(), 0.0);
        for _ in 0..60 {
            window(&mut turns, 1_000.0, 1.0).unwrap();
        }
        assert!(turns.share.always());
        // What has to be so far apart that it hardly tells anything is given up, but not for one window that says so.
        let mut turns = spaced();
        assert!(window(&mut turns, 2_000_000.0, 1.0).is_ok());
        let why = (0..20)
            .find_map(|_| window(&mut turns, 2_000_000.0, 1.0).err())
            .unwrap();
        assert!(
            matches!(&why, Lost::Changed(why) if why.contains("too much")),
            "{why:?}"
        );
    }

    #[test]
    fn a_program_that_does_less_is_looked_at_as_often() {
        let mut spacing = Spacing::new((0.03, 6.0), 1.0, COST_MAX, 9.5);
        // Windows cost in proportion to the CPU time that it uses.
        let (mut at, mut used) = (0.0, 0.0);
        for cpus in std::iter::repeat_n(1.0, 20).chain(std::iter::repeat_n(0.02, 60)) {
            spacing.begins(at, used);
            let cost = 0.03 * cpus;
            spacing.owe(cost);
            spacing.note(cost, 0.03, Some(1.0));
            let apart = spacing.apart();
            assert!(apart > 5.0 && apart < 7.0 && !spacing.is_too_far(), "{apart}");
            at += apart;
            used += cpus * apart;
            spacing.earn(used);
            assert!(!spacing.owes(0.0) || cpus < 1.0);
        }
        // What is owed from before is waited for, not for ever.
        spacing.owe(1.0);
        assert!(spacing.owes(0.0) && spacing.owes(9.0) && !spacing.owes(9.5));
        spacing.earn(used + 200.0);
        assert!(!spacing.owes(0.0));
    }

    #[test]
    fn a_program_that_works_now_and_then_is_as_dear_as_it_is_on_average() {
        // Two seconds of ten it uses a CPU, and a window then costs what it may in six seconds of that.
        let mut spacing = Spacing::new((0.03, 6.0), 0.2, COST_MAX, 9.5);
        let busy = |at: f64| at.rem_euclid(10.0) < 2.0;
        let used_until = |at: f64| 2.0 * (at / 10.0).floor() + at.rem_euclid(10.0).min(2.0);
        let (mut at, mut paid) = (0.0, 0.0);
        while at < 2_000.0 {
            spacing.begins(at, used_until(at));
            let (cost, while_on) = if busy(at) { (0.03, Some(1.0)) } else { (0.0, None) };
            spacing.owe(cost);
            spacing.note(cost, 0.03, while_on);
            assert!(!spacing.is_too_far(), "{at} {spacing:?}");
            at += spacing.apart().max(TURN) + 0.01;
            paid += cost;
        }
        let share = paid / used_until(at);
        assert!((share / COST_MAX - 1.0).abs() < 0.2, "{share}");
        // One that rests altogether says nothing.
        for second in 1..3 {
            let before = spacing.apart();
            spacing.begins(at + 10.0 * f64::from(second), used_until(at));
            spacing.note(0.0, 0.03, None);
            assert!(second == 1 || (spacing.apart() - before).abs() < 1e-9);
        }
    }

    #[test]
    fn who_is_within_the_budget_waits_for_nothing() {
        for share in [0.03, 0.12, 0.8] {
            let mut spacing = Spacing::new((0.03, 0.03 / share), 1.0, COST_MAX, 5.75);
            let mut used = 0.0;
            for turn in 0..50 {
                spacing.begins(f64::from(turn), used);
                let cost = COST_MAX * (1.0 + 0.1 * f64::from(turn % 3 - 1));
                spacing.owe(cost);
                spacing.note(cost, share, Some(COST_MAX / share));
                used += 1.0;
                assert!(!spacing.owes(0.0), "{share} {turn}");
                spacing.earn(used);
            }
            assert!((spacing.share() / share - 1.0).abs() < 0.1, "{spacing:?}");
        }
    }

    #[test]
    fn hits_are_charged_at_what_they_cost_now() {
        let mut subject = fake(true, 0.0);
        subject.prices = vec![
            Err(Refusal::Lasting("too dear".to_owned())),
            Err(Refusal::Now("somebody has them".to_owned())),
            Ok(Some(5e-6)),
            Ok(None),
        ];
        let mut turns = turns(Root::default(), workload(), subject, 1.0);
        let charged = |turns: &mut Turns<Fake>| {
            turns.look_at_the_price()?;
            turns.charge(&[], 100, 1.0).map(|(cost, _)| cost)
        };
        let at_first = charged(&mut turns).unwrap();
        assert!((at_first - 100.0 * 1e-6).abs() < 1e-12, "{at_first}");
        for what in [
            "it costs five times as much",
            "that is not known now, and it stays so",
        ] {
            let cost = charged(&mut turns).unwrap();
            assert!((cost - CHARGED * 100.0 * 5e-6).abs() < 1e-12, "{what}: {cost}");
        }
        let why = charged(&mut turns).unwrap_err();
        assert!(matches!(&why, Lost::Changed(why) if why == "too dear"), "{why:?}");
        // Each turn asks.
        turns.subject.prices = vec![Err(Refusal::Lasting("too dear".to_owned()))];
        turns.share = Share::new(0.1);
        let (read, told) = sync_channel(1);
        read.send(()).unwrap();
        assert!(matches!(turns.turn(&told), Err(Lost::Changed(why)) if why == "too dear"));
    }

    #[test]
    fn the_next_window_waits_for_its_time_and_for_what_is_owed_beyond_chance() {
        let mut turns = spaced();
        let (read, told) = sync_channel::<()>(1);
        let begun = Instant::now();
        assert!(matches!(turns.wait_for_the_next(begun, 1.2, &told), Ok(true)));
        assert!(begun.elapsed() >= Duration::from_millis(1_200));
        // No program can be seen that would make up for it: it ends when nobody wants to know.
        assert_eq!(turns.charge(&[], 1_000_000, 0.0).unwrap().1, 0.0);
        std::thread::scope(|s| {
            s.spawn(move || {
                std::thread::sleep(Duration::from_millis(1_200));
                drop(read);
            });
            let begun = Instant::now();
            assert!(matches!(turns.wait_for_the_next(begun, 0.0, &told), Ok(false)));
            assert!(begun.elapsed() > Duration::from_secs(1));
        });
    }

    #[test]
    fn who_tells_the_rest_by_the_last_window_says_how_long_it_speaks() {
        let lag = |rest| {
            let how = Beginning {
                root: Root::default(),
                counters: Arc::new(fake(true, 0.0)),
                hit_cost: 1e-6,
                cost_max: COST_MAX,
                share: 0.01,
                cpus: 1.0,
                rest,
            };
            Counting::begin(&workload(), fake(true, 0.0), how).unwrap().lag()
        };
        assert_eq!(lag(Rest::CpuTime), Nanoseconds::ZERO);
        let apart = Rest::LastWindow {
            share_min: 0.03,
            apart: 3.0,
        };
        assert_eq!(lag(apart), Nanoseconds::from_secs_f64(5.75));
    }

    #[test]
    fn a_window_that_somebody_disturbs_says_nothing() {
        for disturbed in [false, true] {
            let subject = Fake {
                disturbed,
                ..fake(true, 0.0)
            };
            let mut turns = turns(Root::default(), workload(), subject, 0.1);
            let (_read, told) = sync_channel(1);
            assert!(turns.turn(&told).is_ok_and(|go_on| go_on));
            let (mut tally, now, _) = turns.shared.hold_for_the_ledger();
            assert!(tally.begun);
            // Nothing was done, and nothing has run: that is a reading, where it was counted.
            assert_eq!(tally.ledger.read(now).share.is_none(), disturbed);
        }
    }

    #[test]
    fn who_may_run_on_a_cpu_without_ticks_is_not_counted_in_turns() {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let own = ProcessId {
            pid: std::process::id() as i32,
            start_ticks: 1,
        };
        write(
            &format!("proc/{own}/stat"),
            &format!("{own} (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 1 20 21"),
        );
        write(&format!("proc/{own}/task/{own}/stat"), "");
        write("sys/devices/system/cpu/nohz_full", "0-8191\n");
        let workload = Workload {
            processes: vec![own],
            ..workload()
        };
        let (_read, told) = sync_channel(1);
        let turn = |share| {
            let root = Root::new(tree.path());
            turns(root, workload.clone(), fake(true, 0.0), share).turn(&told)
        };
        let why = turn(0.1).unwrap_err();
        assert!(
            matches!(&why, Lost::Changed(why) if why.contains("nohz_full")),
            "{why:?}"
        );
        assert!(turn(1.0).is_ok(), "what is counted all the time asks no clock");
    }

    #[test]
    fn what_each_coming_costs_is_made_up_for_by_the_time_between_windows() {
        assert_eq!(apart(0.0, COST_MAX), Ok(0.0));
        assert!((apart(0.015, 0.005).unwrap() - 3.0).abs() < 1e-9);
        assert!(apart(0.015, 0.001).unwrap_err().contains("15 s"));
        assert!(apart(0.015, 0.0).is_err());
        assert_eq!(lag(0.015, 0.005), Nanoseconds::from_secs(5));
        assert_eq!(lag(0.0, 0.005), Nanoseconds::ZERO);
        assert_eq!(lag(0.015, 0.001), Nanoseconds::ZERO);
        const { assert!(APART_AND >= READING_MAX + 0.5) };
    }

    #[test]
    fn what_children_do_is_paid_for_too() {
        let unpaid = |cpu, forks| Unpaid { cpu, forks };
        assert_eq!(cost_of(0.004, 1.0, Unpaid::default()), Ok(0.004));
        assert_eq!(cost_of(0.004, 1.0, unpaid(0.5, 1)), Ok(0.006));
        assert_eq!(cost_of(0.004, 0.0, Unpaid::default()), Ok(0.004));
        assert!(
            cost_of(0.004, 1.0, unpaid(1.5, 1))
                .unwrap_err()
                .contains("children")
        );
        assert!(
            cost_of(0.0, 1.0, unpaid(0.0, FORKS_MAX + 1))
                .unwrap_err()
                .contains("forked")
        );
        // A parent that only waits: what is done is done by children.
        assert!(cost_of(0.0, 0.0, unpaid(0.5, 1)).is_err());
    }
}
