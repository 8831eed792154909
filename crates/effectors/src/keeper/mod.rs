//! Keeps a control group of version 1 small without a lasting limit.
//!
//! A growing program cannot bear a version 1 limit (`memory.limit_in_bytes`). If nothing is left to drop, the kernel
//! kills a process. Where `memory.oom_control` forbids that, system calls fail with `ENOMEM` and `EFAULT`, and page
//! faults hang (docs/file-cache.md: a reader grew by 100 MiB). Version 2's `memory.high` refuses nothing.
//!
//! A thread does the same by hand. The kernel sets a limit below the use only after it has reclaimed that much, or not
//! at all (`mem_cgroup_resize_max` in Linux `mm/memcontrol.c`). The thread lifts the limit at once, so between two such
//! moments nothing limits the group, even after a kill. The next moment comes when the group has grown by [`GROWTH`] of
//! the limit. A moment lasts microseconds, or while the thread waits for a CPU. So much of the group stays droppable.
//!
//! A second thread takes over as soon as the first has been at a group for [`LATE`], and the other way round. Both cost
//! some 4 % of a CPU for a reader of 3.3 GB/s (docs/file-cache.md). Otherwise the reader would pay that.

mod look;
mod pace;

use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_kernel::interrupt::{interrupt, own_number};
use homeostat_model::ActionId;
use homeostat_platform::Clock;
use homeostat_sensors::memory_group::MemoryGroup;
pub(super) use look::is_of_a_moment;
use look::{Files, GROWTH, Look, Moment, View, allowed, allowed_when_stuck, moment};
use pace::{PAUSE_MIN, Pace, REST, STUCK_AFTER, STUCK_MAX, STUCK_MIN, found_nothing, rest};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often undroppable memory is measured.
const HELD_EVERY: Duration = Duration::from_millis(200);
/// How often if the group is above its allowance: undroppable memory may have grown, and must not be swapped out.
const HELD_ABOVE_EVERY: Duration = Duration::from_millis(20);
/// After so long at a group the other thread takes over. It checks for that as often.
///
/// The kernel makes a reclaimer wait for a tenth of a second, uninterruptibly, if all that it meets must be written
/// first (`VMSCAN_THROTTLE_WRITEBACK`). One page of the reader's own output a second is enough. A reader of 3.3 GB/s
/// grows by 300 MiB meanwhile. The late thread is interrupted: it sets no limit, and its result does not count.
const LATE: Duration = Duration::from_millis(5);
/// The working thread, and its stand-by.
const THREADS: usize = 2;
/// The kernel is [interrupted](interrupt) after so long, and continues the next time. It reclaims as long as it finds
/// anything, and waits for pages under write. In a group that writes as much as it reads that may take long.
const LONG: Duration = Duration::from_millis(100);
/// Longest wait for the threads at the end.
const END: Duration = Duration::from_secs(2);

/// The groups kept small, and the threads that do it.
#[derive(Default)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// [`moment`]. Tests replace it to control how long it takes.
    moment: Box<OneMoment>,
}

type OneMoment = dyn Fn(&Files, &View) -> io::Result<Moment> + Send + Sync;

impl Default for Shared {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            moment: Box::new(moment),
        }
    }
}

#[derive(Default)]
struct State {
    groups: BTreeMap<ActionId, Kept>,
    /// Groups being checked now, without the lock.
    busy: Vec<Busy>,
    is_over: bool,
    counts: KeepCounts,
}

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
    /// Number of checks.
    pub looks: u64,
    /// Checks that found more than a quarter above the target (the limit, plus undroppable memory if that is much). A
    /// fast reader is above by less between any two checks.
    pub above: u64,
    /// Checks that left more than the target, because the kernel had found nothing more to take.
    pub stuck: u64,
}

/// A group that is kept small.
struct Kept {
    root: Root,
    group: MemoryGroup,
    /// Its limit, as it was given.
    limit: u64,
    /// The limit plus undroppable memory.
    allowed: u64,
    /// Target use by the last check.
    meant: u64,
    /// Undroppable memory, or memory treated as such.
    held: u64,
    /// Open for each thread: the kernel serves one user of an open file at a time (`kernfs_fop_write_iter`).
    files: [Arc<Files>; THREADS],
    pace: Pace,
    /// Finished checks. Of two at the same time only the one that ends first counts.
    looks: u64,
    due: Instant,
    held_at: Instant,
    /// Consecutive checks in which the kernel found nothing more.
    found_nothing: u32,
    /// Until then memory that the kernel did not find stays allowed.
    stuck_until: Instant,
    /// Length of the next such period.
    stuck_for: Duration,
}

impl Keeper {
    /// Starts the threads ahead of need: when memory is short, a new thread may have to wait for memory itself.
    ///
    /// # Errors
    /// No thread can be had.
    pub(super) fn stand_by(&mut self) -> io::Result<()> {
        while self.threads.len() < THREADS {
            let (shared, thread) = (Arc::clone(&self.shared), self.threads.len());
            let builder = std::thread::Builder::new().name("keeper".into());
            match builder.spawn(move || shared.run(thread)) {
                Ok(handle) => self.threads.push(handle),
                Err(why) if self.threads.is_empty() => return Err(why),
                // The first one is alone until the next group is held.
                Err(_) => break,
            }
        }
        Ok(())
    }

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
        // A daemon killed in such a moment has left it.
        let [first, ..] = &files;
        if is_of_a_moment(first.limit()?) {
            first.lift()?;
        }
        self.stand_by()?;
        // In a group that was kept before, much may be undroppable.
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

    pub(super) fn holds(&self, action: ActionId) -> bool {
        self.shared.hold().groups.contains_key(&action)
    }

    /// Lets go of a group. False while its limit may still be in force for a moment.
    pub(super) fn release(&self, action: ActionId) -> bool {
        let mut state = self.shared.hold();
        state.groups.remove(&action);
        state.interrupt(action);
        !state.busy.iter().any(|busy| busy.action == action)
    }

    pub(super) fn counts(&self) -> KeepCounts {
        let state = self.shared.hold();
        KeepCounts {
            groups: state.groups.len(),
            ..state.counts
        }
    }

    /// Interrupts the kernel if it has been at a group for too long. Called now and then.
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
        // No limit is left in force: the threads end after their current moment, or with the process.
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
    /// Makes the threads at this group come back without a limit.
    fn interrupt(&self, action: ActionId) {
        for busy in self.busy.iter().filter(|busy| busy.action == action) {
            interrupt(busy.number);
        }
    }

    /// The next group for a thread, and when. `None`: there is no group at all.
    fn next(&self, thread: usize, now: Instant) -> Option<(Option<ActionId>, Instant)> {
        let due = |(action, kept): (&ActionId, &Kept)| {
            let of_this = self.busy.iter().filter(|busy| busy.action == *action);
            // The stand-by does all work while the other thread is late, at whatever group.
            let of_any = self.busy.iter().filter(|_| thread != 0);
            let latest = |busy: &Busy| busy.since;
            let since = of_this.map(latest).max().or_else(|| of_any.map(latest).max());
            match since {
                Some(since) => (Some(*action), kept.due.max(since + LATE)),
                None if thread == 0 => (Some(*action), kept.due),
                // The stand-by checks whether the other thread is late.
                None => (None, kept.due.max(now) + LATE),
            }
        };
        self.groups.iter().map(due).min_by_key(|(_, due)| *due)
    }
}

impl KeepCounts {
    /// Counts a check of a group with this target and this present allowance.
    fn add(&mut self, look: &Look, meant: u64, allowed: u64) {
        self.looks += 1;
        self.above += u64::from(look.found > meant.saturating_add(meant / GROWTH));
        self.stuck += u64::from(look.left > meant && allowed > meant);
    }
}

impl Shared {
    fn hold(&self) -> MutexGuard<'_, State> {
        // A thread that panicked has at worst not noted the result of a check.
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
        // Repeated each time, because a signal before the call is lost.
        state.interrupt(action);
        state.busy.push(Busy {
            thread,
            number,
            action,
            since: begun,
        });
        drop(state);
        let before = cpu_time();
        let looked = (self.moment)(&files, &view);
        let spent = cpu_time().saturating_sub(before);
        let now = Instant::now();
        let mut state = self.hold();
        state.busy.retain(|busy| busy.thread != thread);
        if thread != 0 {
            // The first thread may have come back, and have decided by the state at the start of this check.
            self.changed.notify_all();
        }
        let has_others = state.groups.len() > 1;
        let is_alone = !state.busy.iter().any(|busy| busy.action == action);
        let State { groups, counts, .. } = &mut *state;
        // The group was released in between, and perhaps held again.
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
            // Somebody's limit, or no group any more: the review reports it.
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
                // Whether the check also tried for memory not found before. Only then a success proves anything.
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
                    // It may be fresh read-ahead: the next check finds it.
                } else if look.is_stuck {
                    // A try costs most where nothing is found.
                    kept.stuck_until = now + kept.stuck_for;
                    kept.stuck_for = (kept.stuck_for * 2).min(STUCK_MAX);
                    kept.allowed = allowed_when_stuck(kept.allowed, look.left, limit);
                    // The group keeps whatever stays.
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

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    Duration::from_nanos(MonotonicClock.cpu_time().0)
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

#[cfg(test)]
mod tests {
    use super::look::MIB;
    use super::*;
    use std::fs::File;

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
                version: homeostat_sensors::memory_group::Version::One,
            },
            limit: 37 * MIB,
            allowed: 37 * MIB,
            meant: 37 * MIB,
            held: 0,
            files: [(); THREADS].map(|()| Arc::new(Files::of(file(), file()))),
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

    /// Waits for what the threads do; they have long enough on any machine.
    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "not in a minute: {what}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn while_one_thread_is_kept_waiting_the_other_takes_over_and_what_the_late_one_found_does_not_count() {
        let tree = tempfile::tempdir().unwrap();
        std::fs::write(tree.path().join("memory.usage_in_bytes"), "0").unwrap();
        std::fs::write(tree.path().join("memory.limit_in_bytes"), u64::MAX.to_string()).unwrap();
        let group = MemoryGroup {
            path: String::new(),
            version: homeostat_sensors::memory_group::Version::One,
        };
        // The first look comes back when it is let go, and has found more than any other.
        let (let_go, is_let_go) = std::sync::mpsc::channel::<()>();
        let is_let_go = Mutex::new(Some(is_let_go));
        let who = Arc::new(Mutex::new(Vec::new()));
        let looks = Arc::clone(&who);
        let moment = move |_: &Files, _: &View| {
            looks.lock().unwrap().push(std::thread::current().id());
            let first = is_let_go.lock().unwrap().take();
            let found = first.map_or(10 * MIB, |is_let_go| {
                is_let_go.recv().unwrap();
                1000 * MIB
            });
            Ok(Moment::Look(Look {
                found,
                left: found,
                held: None,
                is_stuck: false,
            }))
        };
        let mut keeper = Keeper {
            shared: Arc::new(Shared {
                moment: Box::new(moment),
                ..Shared::default()
            }),
            threads: Vec::new(),
        };
        let root = Root::new(tree.path());
        keeper.hold(&root, ActionId(1), &group, 37 * MIB).unwrap();
        until("somebody begins", || !who.lock().unwrap().is_empty());
        let late = who.lock().unwrap()[0];
        until("the other one goes on", || keeper.counts().looks >= 5);
        assert!(
            who.lock().unwrap().iter().skip(1).all(|one| *one != late),
            "one thread is late"
        );
        assert_eq!(
            keeper
                .shared
                .hold()
                .busy
                .iter()
                .filter(|busy| busy.thread == 0)
                .count(),
            1
        );
        let before = who.lock().unwrap().len();
        let_go.send(()).unwrap();
        until("the first one does it again", || {
            who.lock().unwrap()[before..].contains(&late)
        });
        until("its look is over", || keeper.counts().looks > 10);
        assert_eq!(keeper.counts().above, 0, "what the late one found is old");
    }
}
