//! The loop's published state and log of lines. Readers never block the loop: they request a new view and wait briefly.

use crate::api::{SCHEMA, Status, StoryLine, Switch};
use crate::control::{Ask, Errand, Post};
use std::collections::VecDeque;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Remembered lines: hours at rest, and a bound.
const STORY_LINES_MAX: usize = 512;
/// A view that was published longer ago than this is old.
pub const FRESH: Duration = Duration::from_secs(1);
/// Age of a view from which the loop counts as hanging. The loop publishes at least every [`PUBLISH_EVERY`], and
/// readers of a view older than [`FRESH`] request a new one.
pub const HANGS_AFTER: Duration = PUBLISH_EVERY.saturating_add(FRESH);
/// Longest time between two publications without news or requests. One costs 0.2 ms on a small machine.
pub const PUBLISH_EVERY: Duration = Duration::from_secs(10);
/// Longest wait of a reader for a new view, and shortest time between two requests to a busy loop.
const LOOK_PATIENCE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Shown {
    view: Arc<Status>,
    published: Option<Instant>,
    asked: Option<Instant>,
    /// Sends a request to the loop. Weak: the loop must end when nobody can ask any more.
    post: Option<Weak<dyn Fn(Errand) -> bool + Send + Sync>>,
    notes: Arc<Vec<String>>,
    switch: Option<Switch>,
    story: VecDeque<StoryLine>,
    next: u64,
    closed: bool,
}

/// The state as it was last published.
#[derive(Default)]
pub struct Board {
    shown: Mutex<Shown>,
    told: Condvar,
}

/// The age of that state, where the loop of the daemon should long have published a newer one.
pub fn hangs_for(status: &Status) -> Option<Duration> {
    let age = Duration::try_from_secs_f64(status.view_age_s?).unwrap_or(Duration::MAX);
    (age > HANGS_AFTER).then_some(age)
}

impl Board {
    /// The data is replaced whole, so it stays sound when a thread dies with the lock.
    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the view.
    pub fn publish(&self, view: Status) {
        let mut shown = self.lock();
        let old = std::mem::replace(&mut shown.view, Arc::new(view));
        shown.published = Some(Instant::now());
        drop(shown);
        // Dropped outside the lock, because it is large.
        drop(old);
    }

    /// From now on the loop is asked in this way for a view where the last one is old.
    pub fn ask_by(&self, post: &Post) {
        self.lock().post = Some(Arc::downgrade(post));
    }

    /// Replaces the notes about the daemon itself.
    pub fn set_notes(&self, notes: Vec<String>) {
        self.lock().notes = Arc::new(notes);
    }

    /// Replaces what is known of the switch.
    pub fn set_switch(&self, switch: Switch) {
        self.lock().switch = Some(switch);
    }

    /// Adds a line to the log and wakes its followers.
    pub fn tell(&self, line: StoryLine) {
        let mut shown = self.lock();
        if shown.story.len() == STORY_LINES_MAX {
            shown.story.pop_front();
        }
        shown.story.push_back(line);
        shown.next += 1;
        self.told.notify_all();
    }

    /// Ends publishing and releases the followers.
    pub fn close(&self) {
        self.lock().closed = true;
        self.told.notify_all();
    }

    /// The latest view, which may be some seconds old.
    pub fn view(&self) -> Arc<Status> {
        self.lock().view.clone()
    }

    /// The latest state of this daemon.
    pub fn status(&self) -> Status {
        self.wait_for_fresh();
        let shown = self.lock();
        let (view, notes) = (shown.view.clone(), shown.notes.clone());
        let (published, switch) = (shown.published, shown.switch.clone());
        // Copied outside the lock, because it is large.
        drop(shown);
        Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: i64::from(std::process::id()),
            view_age_s: published.map(|at| at.elapsed().as_secs_f64()),
            switch,
            notes: notes.to_vec(),
            ..Status::clone(&view)
        }
    }

    /// A view that is not old, where the loop can be asked for one and has the time; else the latest.
    pub fn fresh_view(&self) -> Arc<Status> {
        self.wait_for_fresh();
        self.view()
    }

    fn wait_for_fresh(&self) {
        if let Some(post) = self.whom_to_ask() {
            let (answer, reply) = sync_channel(1);
            if post(Errand {
                ask: Ask::Look,
                answer,
            }) {
                // If the answer is late, the latest view will do.
                let _ = reply.recv_timeout(LOOK_PATIENCE);
            }
        }
    }

    /// How to request a view, if the last is old and nobody has just asked. So readers do not fill the loop's queue.
    fn whom_to_ask(&self) -> Option<Post> {
        let mut shown = self.lock();
        let is_fresh = shown.published.is_some_and(|at| at.elapsed() < FRESH);
        let is_asked = shown.asked.is_some_and(|at| at.elapsed() < LOOK_PATIENCE);
        if is_fresh || is_asked {
            return None;
        }
        let post = shown.post.as_ref()?.upgrade()?;
        shown.asked = Some(Instant::now());
        Some(post)
    }

    /// Lines from `since` on, the next line's number, and whether more may come. Waits up to `patience` for the first.
    pub fn story_since(&self, since: u64, patience: Duration) -> (Vec<StoryLine>, u64, bool) {
        let shown = self.lock();
        let (shown, _) = self
            .told
            .wait_timeout_while(shown, patience, |s| s.next <= since && !s.closed)
            .unwrap_or_else(PoisonError::into_inner);
        let first = shown.next - shown.story.len() as u64;
        let skip = usize::try_from(since.saturating_sub(first)).unwrap_or(usize::MAX);
        (
            shown.story.iter().skip(skip).cloned().collect(),
            shown.next,
            !shown.closed,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> StoryLine {
        StoryLine {
            schema: 1,
            at_unix: 0,
            workload: None,
            stage: "observed".into(),
            text: text.into(),
            warning: false,
        }
    }

    #[test]
    fn the_story_is_bounded_and_read_by_number() {
        let board = Board::default();
        for i in 0..STORY_LINES_MAX + 10 {
            board.tell(line(&i.to_string()));
        }
        let (lines, next, more) = board.story_since(0, Duration::ZERO);
        assert_eq!(
            (lines.len(), next, more),
            (STORY_LINES_MAX, STORY_LINES_MAX as u64 + 10, true)
        );
        assert_eq!(lines[0].text, "10");
        let (lines, _, _) = board.story_since(next - 1, Duration::ZERO);
        assert_eq!(lines.len(), 1);
        let (lines, again, _) = board.story_since(next + 100, Duration::ZERO);
        assert_eq!((lines.len(), again), (0, next));
    }

    #[test]
    fn the_loop_is_asked_for_a_view_where_the_last_one_is_old_and_only_once_at_a_time() {
        let board = Arc::new(Board::default());
        let seen = board.clone();
        let asked = Arc::new(Mutex::new(0));
        let count = asked.clone();
        // The loop publishes before it answers.
        let post: Post = Arc::new(move |errand: Errand| {
            *count.lock().unwrap() += 1;
            seen.publish(Status {
                at_unix: 7,
                ..Status::default()
            });
            errand.answer.try_send(crate::control::Answer::Taken).is_ok()
        });
        assert_eq!(board.fresh_view().at_unix, 0, "nobody to ask yet");
        board.ask_by(&post);
        assert_eq!(board.fresh_view().at_unix, 7);
        assert_eq!(*asked.lock().unwrap(), 1);
        // Of many that read while the loop has not published yet, one asks.
        board.lock().published = None;
        assert!(board.whom_to_ask().is_none() || *asked.lock().unwrap() == 1);
        board.lock().asked = None;
        assert!(board.whom_to_ask().is_some());
        assert!(board.whom_to_ask().is_none());
        // A fresh one is taken as it is.
        board.publish(Status::default());
        board.lock().asked = None;
        assert!(board.whom_to_ask().is_none());
        // Who served the readers has ended: the loop is not kept.
        board.lock().published = None;
        drop(post);
        assert_eq!(board.fresh_view().at_unix, 0);
    }

    #[test]
    fn closing_releases_a_follower() {
        let board = Arc::new(Board::default());
        let follower = {
            let board = board.clone();
            std::thread::spawn(move || board.story_since(0, Duration::from_secs(3600)))
        };
        board.close();
        let (lines, _, more) = follower.join().unwrap();
        assert!(lines.is_empty() && !more);
    }
}
