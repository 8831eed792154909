//! What `homeostat top` knows and where its reader is: moments in time, a place among them, a selection. It draws nothing
//! and reads nothing, so that the living daemon and a recording are watched by the same rules.

use homeostat_daemon::api::{Experiment, ExperimentKind, Stage, Status, StoryLine, Workload};
use std::sync::Arc;

/// Moments that are kept; when there are more, every second one goes and the next come half as often.
const MOMENTS_MAX: usize = 400;
/// Lines of the story that are kept.
const STORY_MAX: usize = 4000;

/// One look at the daemon.
#[derive(Clone, Debug)]
pub struct Moment {
    /// When, seconds since the epoch.
    pub at_unix: u64,
    /// The state.
    pub status: Arc<Status>,
}

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// All of it, briefly.
    Overview,
    /// The trial that runs, with its blocks.
    Trial,
    /// The selected workload.
    Workload,
    /// The decisions as a story.
    Story,
}

/// The pages in the order of their numbers.
pub const PAGES: [Page; 4] = [Page::Overview, Page::Trial, Page::Workload, Page::Story];

impl Page {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overview => "overview",
            Self::Trial => "trial",
            Self::Workload => "workload",
            Self::Story => "story",
        }
    }
}

/// What a reader wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Leave.
    Quit,
    /// Help on or off.
    Help,
    /// Leave help or a page.
    Back,
    /// The selected thing in full.
    Open,
    /// That page.
    Go(Page),
    /// The next page.
    NextPage,
    /// Selection or text, by so many lines.
    Move(i32),
    /// Selection or text, by so many screens.
    Screen(i32),
    /// Time, by so many moments; negative = back.
    Time(i32),
    /// The first moment.
    First,
    /// The last one, and every new one.
    Live,
    /// Stop or go on.
    Hold,
    /// The whole picture again: something else wrote on the terminal.
    Repaint,
}

/// Where the moments come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The daemon, now.
    Daemon,
    /// A recording of this name.
    Recording(String),
}

/// The state of the reader.
#[derive(Clone, Debug)]
pub struct Model {
    origin: Origin,
    moments: Vec<Moment>,
    /// Every how many-th moment is kept.
    stride: u64,
    /// Moments that came so far.
    came: u64,
    /// The moment that is shown; `None` = the latest.
    place: Option<usize>,
    story: Vec<StoryLine>,
    page: Page,
    /// Name of the selected workload.
    selected: Option<String>,
    /// Lines by which the text of a page is scrolled. In the story from its end.
    scroll: usize,
    /// Lines that a screen holds, as last drawn.
    screen: usize,
    help: bool,
    /// Whether a recording runs by itself.
    playing: bool,
    /// Why nothing comes at the moment.
    trouble: Option<String>,
    quit: bool,
}

impl Model {
    /// One that knows nothing yet.
    pub fn new(origin: Origin) -> Self {
        let playing = origin == Origin::Daemon;
        Self {
            origin,
            moments: Vec::new(),
            stride: 1,
            came: 0,
            place: None,
            story: Vec::new(),
            page: Page::Overview,
            selected: None,
            scroll: 0,
            screen: 10,
            help: false,
            playing,
            trouble: None,
            quit: false,
        }
    }

    /// A new look at the daemon, and the lines that it told since the last one.
    pub fn learn(&mut self, status: Status, lines: Vec<StoryLine>) {
        self.trouble = None;
        self.tell(lines);
        let moment = Moment {
            at_unix: status.at_unix,
            status: Arc::new(status),
        };
        // The latest is always there; it gives way to the next one unless its turn to stay has come.
        let stays = self.came.saturating_sub(1) % self.stride == 0;
        self.came += 1;
        if !stays && self.place.is_none_or(|p| p + 1 < self.moments.len()) {
            self.moments.pop();
        }
        self.moments.push(moment);
        if self.moments.len() > MOMENTS_MAX {
            self.thin();
        }
        self.keep_selection();
    }

    /// Every second moment goes, the latest and the shown one stay.
    fn thin(&mut self) {
        let shown = self.place.and_then(|p| self.moments.get(p)).map(|m| m.at_unix);
        let (last, held) = (self.moments.len() - 1, self.place);
        let mut index = 0;
        self.moments.retain(|_| {
            let keep = index % 2 == 0 || index == last || Some(index) == held;
            index += 1;
            keep
        });
        self.stride *= 2;
        if let Some(at) = shown {
            self.place = Some(
                self.moments
                    .partition_point(|m| m.at_unix < at)
                    .min(self.moments.len() - 1),
            );
        }
    }

    /// Lines of the story.
    pub fn tell(&mut self, lines: Vec<StoryLine>) {
        self.story.extend(lines);
        let surplus = self.story.len().saturating_sub(STORY_MAX);
        self.story.drain(..surplus);
    }

    /// Nothing comes; what is there stays.
    pub fn lose(&mut self, why: String) {
        self.trouble = Some(why);
    }

    /// A recording is read: it begins at its end or at its start.
    pub fn rewind(&mut self) {
        self.place = (!self.moments.is_empty()).then_some(0);
    }

    /// A step of a recording that runs by itself. Whether anything changed.
    pub fn play(&mut self) -> bool {
        match self.place {
            Some(place) if self.playing && self.origin != Origin::Daemon => {
                if place + 1 < self.moments.len() {
                    self.place = Some(place + 1);
                    self.keep_selection();
                } else {
                    self.playing = false;
                }
                true
            }
            _ => false,
        }
    }

    fn keep_selection(&mut self) {
        let names: Vec<&str> = self.workloads().iter().map(|w| w.name.as_str()).collect();
        if self.selected.as_deref().is_none_or(|s| !names.contains(&s)) {
            self.selected = names.first().map(|n| (*n).to_owned());
        }
    }

    /// What a reader wants.
    pub fn wish(&mut self, wish: Wish) {
        match wish {
            Wish::Quit => self.quit = true,
            Wish::Repaint => {}
            Wish::Help => self.help = !self.help,
            Wish::Back if self.help => self.help = false,
            Wish::Back => self.go(Page::Overview),
            Wish::Open if self.page == Page::Overview => self.go(Page::Workload),
            Wish::Open => {}
            Wish::Go(page) => self.go(page),
            Wish::NextPage => {
                let at = PAGES.iter().position(|p| *p == self.page).unwrap_or(0);
                self.go(PAGES[(at + 1) % PAGES.len()]);
            }
            Wish::Move(by) => self.shift(by),
            Wish::Screen(by) => self.shift(by.saturating_mul(self.screen.max(1) as i32)),
            Wish::Time(by) => self.travel(by),
            Wish::First => {
                self.playing = false;
                self.place = (!self.moments.is_empty()).then_some(0);
            }
            Wish::Live => {
                self.place = match self.origin {
                    Origin::Daemon => None,
                    Origin::Recording(_) => self.moments.len().checked_sub(1),
                };
                self.playing = self.origin == Origin::Daemon;
                self.keep_selection();
            }
            Wish::Hold => match self.origin {
                Origin::Daemon if self.place.is_some() => self.wish(Wish::Live),
                Origin::Daemon => self.place = self.moments.len().checked_sub(1),
                Origin::Recording(_) => {
                    if self.place.is_some_and(|p| p + 1 >= self.moments.len()) {
                        self.rewind();
                    }
                    self.playing = !self.playing;
                }
            },
        }
    }

    fn go(&mut self, page: Page) {
        self.help = false;
        self.page = page;
        self.scroll = 0;
    }

    fn shift(&mut self, by: i32) {
        match self.page {
            Page::Overview => {
                let names: Vec<String> = self.workloads().iter().map(|w| w.name.to_string()).collect();
                let at = self
                    .selected
                    .as_ref()
                    .and_then(|s| names.iter().position(|n| n == s))
                    .unwrap_or(0);
                let to = moved(at, by, names.len().saturating_sub(1));
                self.selected = names.get(to).cloned();
            }
            // Upwards in the story is back in time.
            Page::Story => {
                self.scroll = moved(
                    self.scroll,
                    by.saturating_neg(),
                    self.told().len().saturating_sub(1),
                )
            }
            Page::Trial | Page::Workload => self.scroll = moved(self.scroll, by, 500),
        }
    }

    fn travel(&mut self, by: i32) {
        let Some(last) = self.moments.len().checked_sub(1) else {
            return;
        };
        self.playing = false;
        let to = moved(self.place.unwrap_or(last), by, last);
        let arrived = to == last && self.origin == Origin::Daemon;
        self.place = (!arrived).then_some(to);
        self.keep_selection();
    }

    /// The moment that is shown.
    pub fn moment(&self) -> Option<&Moment> {
        match self.place {
            Some(place) => self.moments.get(place),
            None => self.moments.last(),
        }
    }

    /// Its state.
    pub fn status(&self) -> Option<&Status> {
        self.moment().map(|m| m.status.as_ref())
    }

    /// The workloads that are shown, those that matter first.
    pub fn workloads(&self) -> Vec<&Workload> {
        let mut list: Vec<&Workload> = self
            .status()
            .map(|s| s.workloads.iter().filter(|w| w.stage != Stage::Ignored).collect())
            .unwrap_or_default();
        // Sorted by what is going on, and within that as the daemon sorts: by load.
        list.sort_by_key(|w| match w.stage.as_str() {
            "trying" => 0,
            "improved" | "proposed" => 1,
            "observed" | "considered" => 2,
            _ => 3,
        });
        list
    }

    /// The selected workload.
    pub fn workload(&self) -> Option<&Workload> {
        let name = self.selected.as_deref()?;
        self.status()?.workloads.iter().find(|w| *w.name == *name)
    }

    /// The trials that run, real ones first.
    pub fn trials(&self) -> Vec<&Experiment> {
        let mut list: Vec<&Experiment> = self
            .status()
            .map(|s| s.experiments.iter().collect())
            .unwrap_or_default();
        list.sort_by_key(|e| e.kind == ExperimentKind::Placebo);
        list
    }

    /// The story up to the moment that is shown.
    pub fn told(&self) -> &[StoryLine] {
        match (self.place, self.moment()) {
            (Some(_), Some(moment)) => {
                let end = self.story.partition_point(|l| l.at_unix <= moment.at_unix);
                &self.story[..end]
            }
            _ => &self.story,
        }
    }

    /// Where the moments come from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Number of the moment that is shown, from 1, and of all; `None` when it is the latest of a daemon.
    pub fn place(&self) -> Option<(usize, usize)> {
        self.place.map(|p| (p + 1, self.moments.len()))
    }

    /// Seconds between the moment that is shown and the latest.
    pub fn behind(&self) -> u64 {
        match (self.moment(), self.moments.last()) {
            (Some(shown), Some(last)) => last.at_unix.saturating_sub(shown.at_unix),
            _ => 0,
        }
    }

    /// What is shown.
    pub fn page(&self) -> Page {
        self.page
    }

    /// Name of the selected workload.
    pub fn selected(&self) -> Option<&str> {
        self.selected.as_deref()
    }

    /// Lines by which the page is scrolled.
    pub fn scroll(&self) -> usize {
        self.scroll
    }

    /// Tells how many lines a screen holds and how far the page can be scrolled.
    pub fn drawn(&mut self, screen: usize, scroll_max: usize) {
        self.screen = screen;
        self.scroll = self.scroll.min(scroll_max);
    }

    /// Whether help is shown.
    pub fn help(&self) -> bool {
        self.help
    }

    /// Whether a recording runs by itself.
    pub fn playing(&self) -> bool {
        self.playing
    }

    /// Why nothing comes at the moment.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Whether the reader wants to leave.
    pub fn quit(&self) -> bool {
        self.quit
    }
}

fn moved(at: usize, by: i32, last: usize) -> usize {
    let to = if by < 0 {
        at.saturating_sub(by.unsigned_abs() as usize)
    } else {
        at.saturating_add(by.unsigned_abs() as usize)
    };
    to.min(last)
}
