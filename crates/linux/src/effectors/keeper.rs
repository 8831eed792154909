//! Keeping a control group of version 1 small without a limit that stays.
//!
//! A limit of version 1 (`memory.limit_in_bytes`) cannot be borne by a program that grows: where its group is full of what cannot be
//! dropped, the kernel ends a process, or, where it must not (`memory.oom_control`), has system calls fail with `ENOMEM` and `EFAULT` and
//! leaves who touches new memory standing still. Measured: a contained reader that grew by 100 MiB got such errors (docs/file-cache.md).
//! Version 2 has `memory.high`, which takes memory away and refuses nothing.
//!
//! So a thread does by hand what that does. A limit below what a group uses is set by the kernel only after it has taken so much
//! memory away, and not at all where it cannot (`mem_cgroup_resize_max` in Linux `mm/memcontrol.c`); it is lifted again at once. Between
//! two such moments nothing limits the group, also when the daemon is killed. How far apart they are follows from how fast the group
//! grows: by [`GROWTH`] of the limit, from one to the next. A fast reader grows by more, in leaps of what its disk reads ahead, and a thread has to wait for
//! a CPU: so it is left with as much less as it has grown by lately, that it comes to its limit and not beyond.
//! What cannot be dropped is left to it beside the limit as soon as it is half of that; and [`GROWTH`] of the limit is left that can be, so while one is in force there is always something to drop for
//! who grows. That is some microseconds, or as long as this thread has to wait for a CPU in between.
//!
//! The kernel goes on as long as it finds anything to take, and waits for pages that are being written: beside a group that writes as
//! much as it reads that may be long. So it is [interrupted](interrupt) then, and takes what it can the next time.
//!
//! Who takes memory away the kernel also has wait for a tenth of a second, which nothing interrupts, where all that it came upon is to be
//! written first (`VMSCAN_THROTTLE_WRITEBACK`): one page of the reader's own output a second is enough. A reader of 3.3 GB/s grows
//! by 300 MiB meanwhile. So a second thread goes on for the first one as soon as that has been at a group for [`LATE`], and the
//! other way round. Each has the files open for itself: the kernel lets one at a time use one that is open (`kernfs_fop_write_iter`). The one that is late is
//! interrupted, so that it sets no limit any more when it comes back, and what it found does not count.
//!
//! What the kernel does for that is done on these threads: some 4 % of a CPU beside a reader of 3.3 GB/s (docs/file-cache.md). Under a
//! limit that stays the reader does it itself.

use super::memory_group::{MemoryGroup, UNLIMITED_FROM};
use crate::Root;
use crate::platform::MonotonicClock;
use crate::sys::interrupt::{interrupt, own_number};
use homeostat_model::ActionId;
use homeostat_platform::Clock;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A group is to grow by this share of its limit from one moment to the next: what lies between that and the limit is taken away.
const GROWTH: u64 = 4;
/// By how much it has grown most is forgotten by this share with each moment.
const FORGOTTEN: u64 = 16;
/// Between two moments at least: with 4 ms a reader of 3.3 GB/s whose disk reads 8 MiB ahead came to 56 MiB in nearly every tenth of a
/// second, where 37 are meant, with this to 40, for no more CPU time …
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// … and at most: who does nothing now may begin to read.
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// One is longer than the one before by this share of it at most.
const LONGER: u32 = 4;
/// Memory that cannot be dropped is looked at so often …
const HELD_EVERY: Duration = Duration::from_millis(200);
/// … and so often where the group is above what it is allowed: it may be that which has grown, and that is not to be swapped out.
const HELD_ABOVE_EVERY: Duration = Duration::from_millis(20);
/// Where all that is there has just been read ahead, the kernel finds nothing for some milliseconds (measured: seven times a second beside
/// a reader of 3.3 GB/s whose disk reads 8 MiB ahead, which comes to 100 MiB where it is let go for 50 ms each time). Only when it
/// has found nothing so often on end …
const STUCK_AFTER: u32 = 4;
/// … what it did not find is left to the group for so long, and twice as long each time that nothing is found again …
const STUCK_MIN: Duration = Duration::from_millis(50);
/// … and this at most.
const STUCK_MAX: Duration = Duration::from_secs(3);
/// After a look there is a rest of so many times the CPU time that it took: a third of a CPU at most for each group. (With a fifth a
/// reader of 3.3 GB/s had time to come to 60 MiB several times a second.)
const REST: u32 = 2;
/// Beside that the kernel waits for what is being written, the thread for a CPU, and a daemon may have been stopped in the middle
/// (`SIGSTOP`, the freezer).
/// So much of that counts at most: other groups are to have their turn, and nobody is let go for minutes.
const WAITED_MAX: Duration = Duration::from_secs(1);
/// Who has been at a group for so long is gone on for by the other thread, which looks as often whether there is somebody.
const LATE: Duration = Duration::from_millis(5);
/// The one who does it, and the one who stands by.
const THREADS: usize = 2;
/// The kernel is interrupted after so long.
const LONG: Duration = Duration::from_millis(100);
/// At the end it is waited for so long.
const END: Duration = Duration::from_secs(2);
const MIB: u64 = 1 << 20;
/// What ends a limit in version 1.
const UNLIMITED: &[u8] = b"-1";

/// What is written as a limit is so much less than whole MiB, which hardly anybody else does: a page, since the kernel rounds to pages.
fn less() -> u64 {
    rustix::param::page_size() as u64
}

/// The groups that are kept small, and the threads that do it.
#[derive(Default)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    groups: BTreeMap<ActionId, Kept>,
    /// Groups that are being looked at now, without the lock.
    busy: Vec<Busy>,
    is_over: bool,
    counts: KeepCounts,
}

/// A group that is being looked at now.
#[derive(Clone, Copy)]
struct Busy {
    thread: usize,
    /// The kernel's number of that thread.
    number: i32,
    action: ActionId,
    since: Instant,
}

/// How well groups have been kept small, all of them since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepCounts {
    /// Groups that are kept small now.
    pub groups: usize,
    /// How often one was looked at …
    pub looks: u64,
    /// … found more than a quarter above what it is meant to use (its limit, with what cannot be dropped where that is much): by less
    /// who reads fast is between any two looks …
    pub above: u64,
    /// … and left with more than it is meant to use, since the kernel had found nothing more to take.
    pub stuck: u64,
}

/// A group that is kept small.
struct Kept {
    root: Root,
    group: MemoryGroup,
    /// Its limit, as it was given …
    limit: u64,
    /// … and with what cannot be dropped.
    allowed: u64,
    /// What it is meant to use by what was seen last …
    meant: u64,
    /// … and what cannot be dropped, or is left to it as if it could not.
    held: u64,
    /// Open for each thread.
    files: [Arc<Files>; THREADS],
    pace: Pace,
    /// Looks that are over: of two at the same time the one that is over first counts.
    looks: u64,
    due: Instant,
    held_at: Instant,
    /// How often on end the kernel found nothing more.
    found_nothing: u32,
    /// Until then what the kernel did not find stays allowed …
    stuck_until: Instant,
    /// … and so long the next time.
    stuck_for: Duration,
}

/// What is read and written again and again stays open.
struct Files {
    usage: File,
    limit: File,
}

/// What a group is left with that may grow to `allowed`, holds so much that cannot be dropped, and has grown by so much at a time.
fn tight(allowed: u64, held: u64, limit: u64, growth: u64) -> u64 {
    let least = limit / GROWTH;
    let most = allowed.saturating_sub(held).saturating_sub(least).max(least);
    (allowed.saturating_sub(growth.clamp(least, most)) / MIB * MIB).saturating_sub(less())
}

/// Whether a limit is one that is in force for a moment, which a daemon that was killed in it has left.
pub(super) fn is_of_a_moment(found: u64) -> bool {
    // What version 1 shows where nothing limits is a page less than whole MiB as well.
    found < UNLIMITED_FROM && (found + less()).is_multiple_of(MIB)
}

/// How fast a group grows.
#[derive(Clone, Copy)]
struct Pace {
    /// When it was looked at last, and what it used then.
    at: Instant,
    used: u64,
    pause: Duration,
    /// By how much it has grown from one look to the next lately: the most of it, and ever less.
    growth: u64,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self {
            at: now,
            used: 0,
            pause: PAUSE_MIN,
            growth: 0,
        }
    }

    /// After a look that found so much, when so much is left.
    fn next(&mut self, now: Instant, found: u64, left: u64, limit: u64) -> Duration {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64().max(1e-4);
        let grown = found.saturating_sub(self.used);
        let rate = grown as f64 / seconds;
        // What it had used before it was looked at for the first time is no growth.
        if self.used > 0 {
            self.growth = grown.max(self.growth - self.growth / FORGOTTEN);
        }
        let room = (limit / GROWTH) as f64;
        // Who has stood still begins slowly, too; and a disk that reads ahead delivers in leaps, between which the group stands still.
        let wanted = if rate > 0.0 {
            Duration::try_from_secs_f64(room / rate).unwrap_or(PAUSE_MAX)
        } else {
            PAUSE_MAX
        };
        self.pause = wanted
            .min(self.pause + self.pause / LONGER)
            .clamp(PAUSE_MIN, PAUSE_MAX);
        (self.at, self.used) = (now, left);
        self.pause
    }
}

impl Files {
    fn open(root: &Root, group: &MemoryGroup) -> io::Result<Self> {
        let path = |leaf: &str| root.path(&format!("{}/{leaf}", group.path));
        Ok(Self {
            usage: File::open(path("memory.usage_in_bytes"))?,
            limit: OpenOptions::new()
                .read(true)
                .write(true)
                .open(path("memory.limit_in_bytes"))?,
        })
    }

    fn number(file: &File) -> io::Result<u64> {
        let mut text = [0; 32];
        let length = loop {
            match file.read_at(&mut text, 0) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        let text = text.get(..length).unwrap_or_default();
        crate::sensors::bytes::number(text.trim_ascii())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no number"))
    }

    /// Takes memory away until no more than this is left; false where the kernel finds nothing more.
    fn take(&self, bytes: u64) -> io::Result<bool> {
        match self.limit.write_at(bytes.to_string().as_bytes(), 0) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Ok(false),
            // It has taken what it could until then, and set nothing.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(e) => return Err(e),
        }
        // Lifted also when a signal comes now, and where it cannot be read; not where somebody else has set another one in between.
        if Self::number(&self.limit).map_or(true, |now| now == bytes) {
            self.limit.write_all_at(UNLIMITED, 0)?;
        }
        Ok(true)
    }
}

impl Keeper {
    /// Keeps a group to this limit from now on.
    ///
    /// # Errors
    /// The group is gone, or no thread can be had.
    pub(super) fn hold(
        &mut self,
        root: &Root,
        action: ActionId,
        group: &MemoryGroup,
        limit: u64,
    ) -> io::Result<()> {
        let open = || Files::open(root, group).map(Arc::new);
        let files: [Arc<Files>; THREADS] = [open()?, open()?];
        // A daemon that was killed in such a moment has left it.
        let [first, ..] = &files;
        if is_of_a_moment(Files::number(&first.limit)?) {
            first.limit.write_all_at(UNLIMITED, 0)?;
        }
        while self.threads.len() < THREADS {
            let (shared, thread) = (Arc::clone(&self.shared), self.threads.len());
            let builder = std::thread::Builder::new().name("keeper".into());
            match builder.spawn(move || shared.run(thread)) {
                Ok(handle) => self.threads.push(handle),
                Err(why) if self.threads.is_empty() => return Err(why),
                // Nobody stands by.
                Err(_) => break,
            }
        }
        // Of a group that was kept before, much may be what cannot be dropped.
        let held = group.held(root).unwrap_or(limit / 2);
        let now = Instant::now();
        let kept = Kept {
            root: root.clone(),
            group: group.clone(),
            limit,
            allowed: allowed(held, limit),
            meant: allowed(held, limit),
            files,
            held,
            pace: Pace::new(now),
            looks: 0,
            due: now,
            held_at: now,
            found_nothing: 0,
            stuck_until: now,
            stuck_for: STUCK_MIN,
        };
        self.shared.hold().groups.insert(action, kept);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Whether it is kept to a limit now.
    pub(super) fn holds(&self, action: ActionId) -> bool {
        self.shared.hold().groups.contains_key(&action)
    }

    /// Lets go of a group; false while its limit may be in force for a moment yet.
    pub(super) fn release(&self, action: ActionId) -> bool {
        let mut state = self.shared.hold();
        state.groups.remove(&action);
        state.interrupt(action);
        !state.busy.iter().any(|busy| busy.action == action)
    }

    /// How well it has gone so far.
    pub(super) fn counts(&self) -> KeepCounts {
        let state = self.shared.hold();
        KeepCounts {
            groups: state.groups.len(),
            ..state.counts
        }
    }

    /// Interrupts the kernel where it has been at a group for long. Called now and then.
    pub(super) fn watch(&self) {
        for busy in &self.shared.hold().busy {
            if busy.since.elapsed() >= LONG {
                interrupt(busy.number);
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        {
            let mut state = self.shared.hold();
            state.is_over = true;
            state.groups.clear();
        }
        self.shared.changed.notify_all();
        // No limit is left in force: they end after the moment that they are in. The end of the process ends them as well.
        let begun = Instant::now();
        while !self.threads.iter().all(JoinHandle::is_finished) && begun.elapsed() < END {
            for busy in &self.shared.hold().busy {
                interrupt(busy.number);
            }
            std::thread::sleep(PAUSE_MIN);
        }
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

impl State {
    /// Has who is at this group come back without a limit.
    fn interrupt(&self, action: ActionId) {
        for busy in self.busy.iter().filter(|busy| busy.action == action) {
            interrupt(busy.number);
        }
    }

    /// Which group a thread is to look at, and when; `None`: there is none at all.
    fn next(&self, thread: usize, now: Instant) -> Option<(Option<ActionId>, Instant)> {
        let due = |(action, kept): (&ActionId, &Kept)| {
            let of_this = self.busy.iter().filter(|busy| busy.action == *action);
            // Who stands by does all that is to be done while the other one is late, wherever that is.
            let of_any = self.busy.iter().filter(|_| thread != 0);
            let latest = |busy: &Busy| busy.since;
            let since = of_this.map(latest).max().or_else(|| of_any.map(latest).max());
            match since {
                Some(since) => (Some(*action), kept.due.max(since + LATE)),
                None if thread == 0 => (Some(*action), kept.due),
                // Who stands by looks whether the other one is late.
                None => (None, kept.due.max(now) + LATE),
            }
        };
        self.groups.iter().map(due).min_by_key(|(_, due)| *due)
    }
}

impl KeepCounts {
    /// Adds a look at a group that is meant to use so much, and may use so much at present.
    fn add(&mut self, look: &Look, meant: u64, allowed: u64) {
        self.looks += 1;
        self.above += u64::from(look.found > meant.saturating_add(meant / GROWTH));
        self.stuck += u64::from(look.left > meant && allowed > meant);
    }
}

impl Shared {
    fn hold(&self) -> MutexGuard<'_, State> {
        // Whoever panicked has at worst not noted what a look has found.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, thread: usize) {
        let number = own_number();
        let mut state = self.hold();
        while !state.is_over {
            let now = Instant::now();
            state = match state.next(thread, now) {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some((Some(action), due)) if due <= now => self.look(state, (thread, number), action),
                Some((_, due)) => {
                    let waited = self
                        .changed
                        .wait_timeout(state, due.saturating_duration_since(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// One moment of one group.
    fn look<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        (thread, number): (usize, i32),
        action: ActionId,
    ) -> MutexGuard<'a, State> {
        let Some((kept, files)) = state
            .groups
            .get(&action)
            .and_then(|kept| Some((kept, Arc::clone(kept.files.get(thread)?))))
        else {
            return state;
        };
        let begun = Instant::now();
        let view = kept.view(begun);
        let (limit, looks) = (kept.limit, kept.looks);
        // Again each time, for a signal that comes before the call is lost.
        state.interrupt(action);
        state.busy.push(Busy {
            thread,
            number,
            action,
            since: begun,
        });
        drop(state);
        let before = cpu_time();
        let looked = moment(&files, &view);
        let spent = cpu_time().saturating_sub(before);
        let now = Instant::now();
        let mut state = self.hold();
        state.busy.retain(|busy| busy.thread != thread);
        if thread != 0 {
            // The first one may have come back, and has gone by when this look began.
            self.changed.notify_all();
        }
        let has_others = state.groups.len() > 1;
        let is_alone = !state.busy.iter().any(|busy| busy.action == action);
        let State { groups, counts, .. } = &mut *state;
        // It was let go in between, and perhaps held again.
        let Some(kept) = groups
            .get_mut(&action)
            .filter(|kept| kept.files.get(thread).is_some_and(|now| Arc::ptr_eq(now, &files)))
        else {
            return state;
        };
        let is_overtaken = kept.looks != looks;
        match looked {
            Ok(Moment::Limited { is_of_a_moment: true }) if is_overtaken || !is_alone => {
                kept.due = now + PAUSE_MIN;
            }
            // Somebody's limit, or no group any more: whoever reviews it says so.
            Ok(Moment::Limited { .. }) | Err(_) => {
                state.interrupt(action);
                state.groups.remove(&action);
                return state;
            }
            Ok(Moment::Look(_)) if is_overtaken => {
                kept.due = kept.due.max(now + spent * REST);
            }
            Ok(Moment::Look(look)) => {
                kept.looks += 1;
                // Whether more was taken than what it did not find before: that alone tells that it is found again.
                let is_bare = kept.held_at >= kept.stuck_until || view.forgets && look.held.is_some();
                let pause = kept.pace.next(now, look.found, look.left, limit);
                kept.due = now + pause.max(rest(spent, now - begun, has_others));
                if let Some(held) = look.held {
                    let is_stuck = now < kept.stuck_until;
                    let (least_held, least_allowed) = if is_stuck {
                        (kept.held, kept.allowed)
                    } else {
                        (0, 0)
                    };
                    kept.held_at = now;
                    kept.meant = allowed(held, limit);
                    kept.held = held.max(least_held);
                    kept.allowed = allowed(held, limit).max(least_allowed);
                }
                kept.found_nothing = found_nothing(kept.found_nothing, &look, is_bare, now - begun);
                if look.is_stuck && kept.found_nothing < STUCK_AFTER {
                    // It may be what has just been read ahead: the next look finds it.
                } else if look.is_stuck {
                    // To try costs most where nothing is found.
                    kept.stuck_until = now + kept.stuck_for;
                    kept.stuck_for = (kept.stuck_for * 2).min(STUCK_MAX);
                    kept.allowed = allowed_when_stuck(kept.allowed, look.left, limit);
                    // Whatever it is that stays: it is left to the group.
                    kept.held = kept.held.max(look.left);
                } else if is_bare && look.left < look.found {
                    kept.stuck_for = STUCK_MIN;
                }
                counts.add(&look, kept.meant, kept.allowed);
            }
        }
        state
    }
}

/// How often on end the kernel has found nothing more, with this look, which took what it had not found before if it is `is_bare`.
fn found_nothing(before: u32, look: &Look, is_bare: bool, lasted: Duration) -> u32 {
    if look.is_stuck && lasted >= STUCK_MIN {
        // It has waited for what is being written: that is not what has just been read ahead.
        STUCK_AFTER
    } else if look.is_stuck {
        before.saturating_add(1)
    } else if look.left < look.found && is_bare {
        0
    } else {
        // Nothing was to be taken, which says nothing.
        before
    }
}

/// How long a group is left alone after a look that used so much CPU time and was over after so long.
fn rest(spent: Duration, lasted: Duration, has_others: bool) -> Duration {
    let waited = lasted.saturating_sub(spent).min(WAITED_MAX);
    (spent * REST).max(if has_others { waited * REST } else { waited })
}

/// What this thread has used of CPU time so far.
fn cpu_time() -> Duration {
    Duration::from_nanos(MonotonicClock.cpu_time().0)
}

/// What a look needs to know.
struct View {
    root: Root,
    group: MemoryGroup,
    limit: u64,
    allowed: u64,
    held: u64,
    growth: u64,
    /// What cannot be dropped is to be looked at in any case, or where the group is above what it is allowed or left with little.
    asks: bool,
    asks_above: bool,
    /// What the kernel did not find is to be looked for again.
    forgets: bool,
}

impl Kept {
    fn view(&self, now: Instant) -> View {
        let since = now.saturating_duration_since(self.held_at);
        let is_stuck = now < self.stuck_until;
        View {
            root: self.root.clone(),
            group: self.group.clone(),
            limit: self.limit,
            allowed: self.allowed,
            held: self.held,
            growth: self.pace.growth,
            asks: since >= HELD_EVERY,
            forgets: since >= HELD_EVERY && !is_stuck,
            asks_above: since >= HELD_ABOVE_EVERY,
        }
    }
}

/// What a group may use of which so much cannot be dropped: that is left to it besides, where it is much.
fn allowed(held: u64, limit: u64) -> u64 {
    if held > limit / 2 {
        held.saturating_add(limit)
    } else {
        limit
    }
}

/// What a group may use when the kernel found nothing more and has left so much. What has just been read ahead cannot be dropped for
/// some milliseconds: where as much as half of the limit is free beside it, all is well, and [`tight`] leaves a quarter beside it.
fn allowed_when_stuck(allowed: u64, left: u64, limit: u64) -> u64 {
    if left.saturating_add(limit / 2) > allowed {
        left.saturating_add(limit)
    } else {
        allowed
    }
}

/// What has come of one moment.
enum Moment {
    Look(Look),
    /// A limit is in force, perhaps that of the other thread.
    Limited {
        is_of_a_moment: bool,
    },
}

/// What one moment has found.
struct Look {
    found: u64,
    left: u64,
    /// What cannot be dropped, if that was looked at.
    held: Option<u64>,
    /// Whether the kernel found nothing to take any more before all was taken that should be.
    is_stuck: bool,
}

/// Looks at a group and takes away what it has too much, unless somebody limits it.
fn moment(files: &Files, view: &View) -> io::Result<Moment> {
    let found = Files::number(&files.usage)?;
    let limit = Files::number(&files.limit)?;
    if limit < UNLIMITED_FROM {
        let is_of_a_moment = is_of_a_moment(limit);
        return Ok(Moment::Limited { is_of_a_moment });
    }
    // Whoever is left with little is asked as often as who is above: what is left has to be more than what cannot be dropped.
    let is_tight = view.growth > view.limit / GROWTH;
    let asks = view.asks || view.asks_above && (found > view.allowed || is_tight);
    let held = asks.then(|| view.group.held(&view.root)).flatten();
    let now_allowed = held.map_or(view.allowed, |held| allowed(held, view.limit));
    // What the kernel did not find before is not looked for again at once.
    let (least_held, least_allowed) = if view.forgets {
        (0, 0)
    } else {
        (view.held, view.allowed)
    };
    let wanted = tight(
        now_allowed.max(least_allowed),
        held.map_or(view.held, |held| held.max(least_held)),
        view.limit,
        view.growth,
    );
    let mut look = Look {
        found,
        left: found,
        held,
        is_stuck: false,
    };
    if found > wanted {
        look.is_stuck = !files.take(wanted)?;
        look.left = Files::number(&files.usage)?;
    }
    Ok(Moment::Look(look))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_for_a_moment_is_no_limit_that_a_person_writes() {
        for limit in [16, 33, 37, 48] {
            for held in [0, 5, limit / 2, limit / 2 + 1, 100, 1000] {
                for growth in [0, 9, 20, 5000] {
                    let (limit, held) = (limit * MIB, held * MIB);
                    let allowed = allowed(held, limit);
                    let tight = tight(allowed, held, limit, growth * MIB);
                    assert!(is_of_a_moment(tight) && tight <= allowed - limit / 4);
                    assert!(
                        tight + 2 * MIB >= held + limit / 4,
                        "who grows finds something to drop"
                    );
                }
            }
        }
        for theirs in [
            50_000_000,
            64 << 20,
            150 << 20,
            1 << 30,
            (1 << 20) + 4096,
            (1 << 63) - 4096,
        ] {
            assert!(!is_of_a_moment(theirs), "{theirs}");
        }
    }

    #[test]
    fn a_group_that_is_left_with_more_than_meant_counts_as_above_also_while_that_is_allowed() {
        let mut counts = KeepCounts::default();
        let (limit, stuck_at) = (37 * MIB, 50 * MIB);
        let mut add = |found, left, allowed| {
            let look = Look {
                found,
                left,
                held: None,
                is_stuck: false,
            };
            counts.add(&look, limit, allowed);
            (counts.looks, counts.above, counts.stuck)
        };
        assert_eq!(add(limit, limit, limit), (1, 0, 0));
        let above = limit + limit / 4;
        assert_eq!(add(above, limit / 2, limit), (2, 0, 0));
        assert_eq!(add(above + 1, limit / 2, limit), (3, 1, 0));
        // For three seconds nothing is taken below this.
        let allowed = allowed_when_stuck(limit, stuck_at, limit);
        assert_eq!(add(stuck_at + MIB, stuck_at, allowed), (4, 2, 1));
        // It uses no more than meant.
        assert_eq!(add(limit - 1, limit - 1, allowed), (5, 2, 1));
    }

    #[test]
    fn only_a_group_of_which_nothing_is_found_time_after_time_is_left_with_more() {
        let look = |found, left, is_stuck| Look {
            found,
            left,
            held: None,
            is_stuck,
        };
        let mut times = 0;
        for _ in 1..STUCK_AFTER {
            times = found_nothing(times, &look(56, 24, true), true, LATE / 5);
            assert!(times < STUCK_AFTER);
        }
        // Nothing to be taken in between.
        times = found_nothing(times, &look(20, 20, false), true, LATE / 5);
        assert_eq!(
            found_nothing(times, &look(56, 24, true), true, LATE / 5),
            STUCK_AFTER
        );
        // What was read ahead is there; what was taken beside what is left to it tells nothing.
        assert_eq!(found_nothing(times, &look(56, 20, false), true, LATE / 5), 0);
        assert_eq!(found_nothing(times, &look(56, 20, false), false, LATE / 5), times);
        // What is being written takes longer.
        assert_eq!(
            found_nothing(0, &look(56, 24, true), true, LATE * 20),
            STUCK_AFTER
        );
    }

    #[test]
    fn who_is_late_is_gone_on_for_by_the_other_wherever_something_is_due() {
        let begun = Instant::now();
        let ms = |ms| begun + Duration::from_millis(ms);
        let action = ActionId(1);
        let mut state = State::default();
        assert!(state.next(0, begun).is_none() && state.next(1, begun).is_none());
        let file = || File::open("/dev/null").unwrap();
        let kept = Kept {
            root: Root::default(),
            group: MemoryGroup {
                path: "/x".into(),
                version: super::super::memory_group::Version::One,
            },
            limit: 37 * MIB,
            allowed: 37 * MIB,
            meant: 37 * MIB,
            held: 0,
            files: [(); THREADS].map(|()| {
                Arc::new(Files {
                    usage: file(),
                    limit: file(),
                })
            }),
            pace: Pace::new(begun),
            looks: 0,
            due: ms(3),
            held_at: begun,
            found_nothing: 0,
            stuck_until: begun,
            stuck_for: STUCK_MIN,
        };
        state.groups.insert(action, kept);
        // The first one does it, the second one looks in from time to time.
        assert_eq!(state.next(0, begun), Some((Some(action), ms(3))));
        assert_eq!(state.next(1, begun), Some((None, ms(3) + LATE)));
        let busy = |thread, since| Busy {
            thread,
            number: 0,
            action,
            since: ms(since),
        };
        state.busy.push(busy(0, 3));
        assert_eq!(state.next(1, ms(4)), Some((Some(action), ms(3) + LATE)));
        // It goes on as often as is due, while the first one is kept waiting.
        state.groups.get_mut(&action).unwrap().due = ms(20);
        assert_eq!(state.next(1, ms(12)), Some((Some(action), ms(20))));
        // Where the second one is late as well, the first one goes on when it is back.
        state.busy = vec![busy(1, 20)];
        assert_eq!(state.next(0, ms(21)), Some((Some(action), ms(20) + LATE)));
        // While the first one is late with one group the second one does the others as well; and the first one while the second one is.
        let another = Kept {
            due: ms(4),
            ..state.groups.remove(&action).unwrap()
        };
        state.groups.insert(ActionId(2), another);
        state.busy = vec![busy(0, 3)];
        assert_eq!(state.next(1, ms(5)), Some((Some(ActionId(2)), ms(3) + LATE)));
        state.busy = vec![busy(1, 3)];
        assert_eq!(state.next(0, ms(5)), Some((Some(ActionId(2)), ms(4))));
    }

    #[test]
    fn who_grows_fast_is_looked_at_often_and_who_stands_still_within_fifty_milliseconds() {
        let begun = Instant::now();
        let mut pace = Pace::new(begun);
        let limit = 40 << 20;
        let mut at = begun;
        // Nothing read: ever more rarely, within four tenths of a second.
        for _ in 0..20 {
            at += pace.next(at, 0, 0, limit);
        }
        assert_eq!(pace.pause, PAUSE_MAX);
        assert!(at - begun < Duration::from_millis(400), "{:?}", at - begun);
        // 100 MB/s: a quarter of the limit lasts for 0.1 s.
        at += PAUSE_MAX;
        assert_eq!(pace.next(at, 5_000_000, 0, limit), PAUSE_MAX);
        // 1 GB/s: 10 ms.
        at += PAUSE_MAX;
        let pause = pace.next(at, 50_000_000, 0, limit).as_secs_f64();
        assert!((pause - 0.0105).abs() < 0.001, "{pause}");
        // More than can be followed.
        at += PAUSE_MIN;
        assert_eq!(pace.next(at, 1 << 30, 0, limit), PAUSE_MIN);
        // 3.3 GB/s: a quarter of the limit lasts for 3 ms.
        at += Duration::from_millis(3);
        let pause = pace.next(at, 9_900_000, 0, limit);
        assert!(pause <= Duration::from_millis(4), "{pause:?}");
    }

    #[test]
    fn a_look_that_used_or_waited_for_much_is_followed_by_a_rest_and_one_that_was_stopped_by_a_short_one() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(1), ms(1), false), ms(2));
        // The kernel waits for what is being written: as long as that, and others have two thirds of the time.
        assert_eq!(rest(ms(1), ms(101), false), ms(100));
        assert_eq!(rest(ms(1), ms(101), true), ms(200));
        // Stopped for an hour.
        assert_eq!(rest(ms(1), ms(3_600_000), false), ms(1_000));
        assert_eq!(rest(ms(1), ms(3_600_000), true), ms(2_000));
    }

    #[test]
    fn a_reader_is_left_with_more_where_the_kernel_leaves_more_than_half_and_always_with_something_to_drop() {
        let limit = 37 * MIB;
        for left in 0..=80 {
            for growth in [0, 9, 17, 5000] {
                let left = left * MIB;
                let wanted = tight(allowed_when_stuck(limit, left, limit), left, limit, growth * MIB);
                assert!(wanted + 2 * MIB >= left + limit / GROWTH, "{left}: {wanted}");
            }
        }
        // What is being read ahead, 16 MiB, and no more.
        assert_eq!(allowed_when_stuck(limit, 16 * MIB, limit), limit);
        assert_eq!(allowed_when_stuck(limit, 19 * MIB, limit), 56 * MIB);
        assert_eq!(allowed_when_stuck(limit, 50 * MIB, limit), 87 * MIB);
    }

    #[test]
    fn a_reader_that_leaps_is_left_with_so_much_less_that_it_comes_to_its_limit() {
        let mut pace = Pace::new(Instant::now());
        let (limit, leap) = (37 * MIB, 16 * MIB);
        let mut left = 28 * MIB;
        for moment in 0..50 {
            let found = left + leap;
            left = found.min(tight(limit, 3 * MIB, limit, pace.growth));
            pace.next(pace.at + PAUSE_MIN, found, left, limit);
            assert!(moment < 3 || found <= limit + MIB, "{moment}: {found}");
        }
        // It slows down.
        for _ in 0..50 {
            pace.next(pace.at + PAUSE_MIN, left + MIB, left, limit);
        }
        assert_eq!(tight(limit, 3 * MIB, limit, pace.growth), 27 * MIB - less());
    }
}
