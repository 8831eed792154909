//! What the loop publishes and others read: the latest view, and the story so far. Readers never touch the loop.

use crate::api::StoryLine;
use homeostat_engine::View;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lines of the story that are remembered: hours at rest, and a bound.
const STORY_LINES_MAX: usize = 512;

#[derive(Default)]
struct Shown {
    view: Arc<View>,
    notes: Arc<Vec<String>>,
    story: VecDeque<StoryLine>,
    /// Number of the next line.
    next: u64,
    closed: bool,
}

/// The state as it was last published.
#[derive(Default)]
pub struct Board {
    shown: Mutex<Shown>,
    told: Condvar,
}

impl Board {
    /// Data behind this lock is replaced whole, so it is sound even after a thread died while holding it.
    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the view.
    pub fn publish(&self, view: View) {
        self.lock().view = Arc::new(view);
    }

    /// Replaces the notes about the daemon itself.
    pub fn set_notes(&self, notes: Vec<String>) {
        self.lock().notes = Arc::new(notes);
    }

    /// Adds a line to the story and wakes those who follow it.
    pub fn tell(&self, line: StoryLine) {
        let mut shown = self.lock();
        if shown.story.len() == STORY_LINES_MAX {
            shown.story.pop_front();
        }
        shown.story.push_back(line);
        shown.next += 1;
        self.told.notify_all();
    }

    /// Nothing more will be published; those who follow the story are released.
    pub fn close(&self) {
        self.lock().closed = true;
        self.told.notify_all();
    }

    /// The latest view.
    pub fn view(&self) -> Arc<View> {
        self.lock().view.clone()
    }

    /// Notes about the daemon itself.
    pub fn notes(&self) -> Arc<Vec<String>> {
        self.lock().notes.clone()
    }

    /// The lines from number `since` on, the number of the line after them, and whether more may come. Waits at
    /// most `patience` when there are none yet.
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
