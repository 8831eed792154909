//! The loop of the daemon: run the due work, publish, log, wait, and take requests. One thread runs the loop and owns
//! the runtime. Requests and signals come through one bounded channel. The loop waits on it until the wake-up time.

use crate::api::StoryLine;
use crate::board::{self, Board};
use crate::control::{Answer, Ask, Errand, Post, Switched};
use crate::greeting::FirstLook;
use crate::log::{Log, Repetition};
use crate::machine_lock::Sole;
use crate::notify::Manager;
use crate::process::OwnWaits;
use crate::settings::{self, Loaded, Settings, Sources};
use crate::switch::Standing;
use crate::watch::Book;
use homeostat_engine::view::KeptSmall;
use homeostat_engine::{OperatorRequest, Stage, Status, Story};
use homeostat_linux::LinuxPlatform;
use homeostat_model::{ActionId, Machine, Nanoseconds, WorkloadId};
use homeostat_platform::{Clock, Sensors};
use homeostat_runtime::{Runtime, Turn};
use homeostat_sensors::settings::watch::ForeignWrite;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

const QUEUE: usize = 16;
/// Time limit of a stop. The rest stays in the journal for `homeostat restore`.
pub const STOP_PATIENCE: Nanoseconds = Nanoseconds::from_secs(60);
const PUBLISH_EVERY: Nanoseconds = Nanoseconds::from_secs(board::PUBLISH_EVERY.as_secs());
/// … and at first, until the first sample is reported.
const PUBLISH_EVERY_AT_FIRST: Nanoseconds = Nanoseconds::from_secs(1);
/// Retry period for notes and repeated messages.
const AGAIN: Nanoseconds = Nanoseconds::from_secs(1);
/// Period for probing again what failed for a passing reason (memory short).
const PROBE_EVERY: Nanoseconds = Nanoseconds::from_secs(180);
/// Shortest time between two probes of a machine with changing CPUs or nodes.
const PROBE_CHANGED_EVERY: Nanoseconds = Nanoseconds::from_secs(10);
/// Longest wait, so that a wrong wake-up time cannot stall the daemon for ever.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// The loop's subject: the runtime, or a stand-in in tests.
pub trait Driven {
    /// Does the due work. Returns new lines, the next call (time since boot), and whether all is over.
    fn turn(&mut self) -> Turn;
    /// Passes on what a person asked for.
    fn operator(&mut self, request: OperatorRequest);
    /// The state for people.
    fn view(&self) -> Status;
    /// The machine, probed again if a failure may have passed or the machine has changed.
    fn probe_again(&mut self) -> Option<Machine>;
    /// Whether CPUs or nodes have come or gone since the last probe.
    fn machine_changed(&mut self) -> bool {
        false
    }
    /// Withdraws homeostat's changes to a setting that somebody else has written. Returns their numbers.
    fn setting_is_others(&mut self, path: &str, why: &str) -> Vec<ActionId> {
        let _ = (path, why);
        Vec::new()
    }
    /// How well readers were limited.
    fn kept_small(&mut self) -> KeptSmall {
        KeptSmall::default()
    }
    /// Actions besides the changes since the last call, with their workloads.
    fn told(&mut self) -> Vec<(WorkloadId, String)> {
        Vec::new()
    }
    /// Whether a value of a setting is one that homeostat wrote itself, or put back.
    fn wrote_setting(&self, path: &str, value: &str) -> bool {
        let _ = (path, value);
        false
    }
}

impl<C: Clock> Driven for Runtime<LinuxPlatform, C> {
    fn turn(&mut self) -> Turn {
        Runtime::turn(self)
    }
    fn operator(&mut self, request: OperatorRequest) {
        Runtime::operator(self, request);
    }
    fn view(&self) -> Status {
        Runtime::view(self)
    }
    fn probe_again(&mut self) -> Option<Machine> {
        let platform = self.platform();
        platform
            .should_be_probed_again()
            .then(|| platform.machine().ok())
            .flatten()
    }
    fn machine_changed(&mut self) -> bool {
        self.platform().machine_changed()
    }
    fn setting_is_others(&mut self, path: &str, why: &str) -> Vec<ActionId> {
        Runtime::setting_is_others(self, path, why)
    }
    fn told(&mut self) -> Vec<(WorkloadId, String)> {
        self.platform().told()
    }
    fn kept_small(&mut self) -> KeptSmall {
        let counts = self.platform().kept_small();
        KeptSmall {
            readers: counts.groups as u64,
            looks: counts.looks,
            above: counts.above,
            stuck: counts.stuck,
        }
    }
    fn wrote_setting(&self, path: &str, value: &str) -> bool {
        Runtime::wrote_setting(self, path, value)
    }
}

/// How the loop ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Everything is settled.
    Settled,
    /// The time was up, or a person asked twice: this many changes may still be in force. The journal has them.
    Unsettled {
        /// Changes in force.
        in_force: usize,
    },
}

/// An input of the loop.
pub enum Message {
    /// A request of the control socket.
    Errand(Errand),
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP.
    Reload,
    /// Somebody else changed settings of the kernel.
    Settings(Vec<ForeignWrite>),
}

/// The channel into the loop.
pub fn channel() -> (SyncSender<Message>, Receiver<Message>) {
    sync_channel(QUEUE)
}

/// How the control socket puts its requests into that channel.
pub fn post(sender: SyncSender<Message>) -> Post {
    Arc::new(move |errand| sender.try_send(Message::Errand(errand)).is_ok())
}

/// Forwards signals into the channel until it is dropped.
pub struct Signals {
    handle: signal_hook::iterator::Handle,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Signals {
    /// Listens for SIGTERM, SIGINT and SIGHUP.
    ///
    /// # Errors
    /// The handlers could not be installed.
    pub fn listen(sender: SyncSender<Message>) -> std::io::Result<Self> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
        // SIGQUIT, SIGUSR1 and SIGUSR2 would end the daemon without an undo.
        let all = [SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2];
        let mut signals = signal_hook::iterator::Signals::new(all)?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new()
            .name("signals".into())
            .stack_size(64 * 1024)
            .spawn(move || {
                for signal in signals.forever() {
                    let message = match signal {
                        SIGHUP => Message::Reload,
                        SIGUSR1 | SIGUSR2 => continue,
                        _ => Message::Stop,
                    };
                    if sender.send(message).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            handle,
            thread: Some(thread),
        })
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The loop and what it needs.
pub struct Service<'a> {
    /// The loop's subject.
    pub driven: &'a mut dyn Driven,
    /// Time.
    pub clock: &'a dyn Clock,
    /// Destination of the state.
    pub board: Arc<Board>,
    /// Requests and signals.
    pub inbox: Receiver<Message>,
    /// The service manager.
    pub manager: Manager,
    /// The destination of lines.
    pub log: Log,
    /// The settings in force; of the policy, [`Standing::policy`] makes what the engine gets.
    pub settings: Settings,
    /// Whether it may act.
    pub standing: Standing,
    /// Their sources, for a reload.
    pub sources: Sources,
    /// Notes of the start (memory not locked …), shown in the status.
    pub notes: Vec<String>,
    /// Reports the first sample; `None` if not wanted.
    pub first_look: Option<FirstLook>,
    /// Others' changes of kernel settings; `None` when they are not watched.
    pub book: Option<Book>,
    /// The machine's lock.
    pub sole: Sole,
}

impl Service<'_> {
    /// Runs until a stop is settled.
    pub fn run(mut self) -> Ended {
        let mut repetition = Repetition::default();
        let mut published = Nanoseconds::ZERO;
        let mut stopping: Option<Nanoseconds> = None;
        let mut watched = Nanoseconds::ZERO;
        let mut probed = self.clock.now();
        for note in self.notes.clone() {
            self.tell(&mut repetition, &host_story(note, true));
        }
        self.board.set_notes(self.notes.clone());
        self.board.set_switch(self.standing.shown());
        // Of this thread: it runs the loop.
        let mut waits = OwnWaits::begin();
        self.publish(&mut waits);
        self.manager.tell("READY=1");
        loop {
            let turn = self.driven.turn();
            let news = !turn.stories.is_empty();
            for story in &turn.stories {
                self.tell(&mut repetition, story);
            }
            for (workload, sentence) in self.driven.told() {
                self.tell(
                    &mut repetition,
                    &host_story(format!("{workload}: {sentence}"), false),
                );
            }
            let now = self.clock.now();
            let publish_every = match self.first_look {
                Some(_) => PUBLISH_EVERY_AT_FIRST,
                None => PUBLISH_EVERY,
            };
            let fresh = news || turn.finished || now.saturating_sub(published) >= publish_every;
            if fresh {
                self.publish(&mut waits);
                published = now;
                self.tell_first_look(&mut repetition, now);
            }
            if turn.finished {
                return Ended::Settled;
            }
            // Probe soon after a CPU or node change, but not all the time on a machine that keeps changing.
            let since = now.saturating_sub(probed);
            let changed = since >= PROBE_CHANGED_EVERY && self.driven.machine_changed();
            if stopping.is_none() && (since >= PROBE_EVERY || changed) {
                probed = now;
                if changed {
                    let text = "CPUs or memory nodes have come or gone: the machine is looked at again";
                    self.tell(&mut repetition, &host_story(text.to_owned(), false));
                }
                self.probe_again(&mut repetition);
            }
            if let Some(since) = stopping {
                if now.saturating_sub(since) >= STOP_PATIENCE {
                    return self.unsettled(&mut repetition, "did not finish in 60 seconds");
                }
            }
            let mut wait = Duration::from_nanos(turn.wake_at.saturating_sub(now).0).min(WAIT_MAX);
            if !fresh {
                let due = publish_every.saturating_sub(now.saturating_sub(published));
                wait = wait.min(Duration::from_nanos(due.0));
            }
            if let Some(book) = &mut self.book {
                book.flush(now);
                if book.is_behind() {
                    wait = wait.min(Duration::from_nanos(AGAIN.0));
                }
            }
            if let Some(period) = self.manager.watchdog {
                let period = Nanoseconds(u64::try_from(period.as_nanos()).unwrap_or(u64::MAX));
                if now.saturating_sub(watched) >= period {
                    // Repeat soon what was not taken, before the watchdog acts.
                    watched = if self.manager.tell("WATCHDOG=1") {
                        now
                    } else {
                        now.saturating_sub(period) + AGAIN
                    };
                }
                let due = (watched + period).saturating_sub(now);
                wait = wait.min(Duration::from_nanos(due.0));
            }
            match self.inbox.recv_timeout(wait) {
                Ok(Message::Errand(errand)) => {
                    let answer = self.obey(&mut repetition, &errand.ask);
                    self.publish(&mut waits);
                    published = self.clock.now();
                    // Carry the request out even if the caller has given up.
                    let _ = errand.answer.try_send(answer);
                }
                Ok(Message::Reload) => {
                    if let Answer::BadConfiguration(text) = self.reload(&mut repetition) {
                        let text =
                            format!("the configuration is not valid; the old one stays in force: {text}");
                        self.tell(&mut repetition, &host_story(text, true));
                    }
                }
                Ok(Message::Settings(writes)) => self.yield_settings(&mut repetition, &writes),
                Ok(Message::Stop) if stopping.is_some() => {
                    return self.unsettled(&mut repetition, "was asked twice to stop");
                }
                Ok(Message::Stop) => {
                    stopping = Some(now);
                    let keep = self.settings.service.keep_on_stop;
                    let what = if keep {
                        "proven changes stay in force"
                    } else {
                        "undoing every change"
                    };
                    self.manager.tell("STOPPING=1");
                    self.tell(&mut repetition, &host_story(format!("stopping: {what}"), false));
                    self.driven.operator(OperatorRequest::Stop { keep });
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Only a bug closes the channel, and signals are lost too: restore and end.
                Err(RecvTimeoutError::Disconnected) if stopping.is_none() => {
                    stopping = Some(now);
                    self.driven.operator(OperatorRequest::Stop { keep: false });
                }
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(wait),
            }
        }
    }

    /// Withdraws our change, keeps the person's value, and reports it.
    fn yield_settings(&mut self, repetition: &mut Repetition, writes: &[ForeignWrite]) {
        for write in writes {
            // A value found without a writer reported by the kernel may be our own.
            if write.by.is_none() && self.driven.wrote_setting(&write.path, &write.to) {
                continue;
            }
            let mut text = crate::watch::sentence(write);
            let gone = self.driven.setting_is_others(&write.path, &text);
            let numbers: Vec<String> = gone.iter().map(ToString::to_string).collect();
            if !gone.is_empty() {
                text = format!("{text}, and withdraws its change {}", numbers.join(", "));
            }
            let (now, unix) = (self.clock.now(), self.clock.unix_seconds());
            let said = match &mut self.book {
                Some(book) => book.note(write, now, unix),
                None => Some(String::new()),
            };
            // Always report the loss of a change of ours.
            if said.is_some() || !gone.is_empty() {
                self.tell(repetition, &host_story(text, !gone.is_empty()));
            }
        }
    }

    fn unsettled(&mut self, repetition: &mut Repetition, why: &str) -> Ended {
        let in_force = self.driven.view().in_force.len();
        let text = format!(
            "homeostat {why} and ends now; what is not undone stands in the journal: run `homeostat restore`"
        );
        self.tell(repetition, &host_story(text, true));
        Ended::Unsettled { in_force }
    }

    /// Probes again, so that a failure at start (memory short) is not permanent.
    fn probe_again(&mut self, repetition: &mut Repetition) {
        let Some(machine) = self.driven.probe_again() else {
            return;
        };
        let before = self.driven.view().machine_refusals;
        self.driven
            .operator(OperatorRequest::Machine(Box::new(machine.clone())));
        // The engine takes it in its next turn; answer now.
        let works = homeostat_strategies::all()
            .iter()
            .filter(|s| s.usable(&machine, self.settings.policy.profile).is_ok())
            .map(|s| s.id().to_string())
            .filter(|id| {
                before
                    .iter()
                    .any(|refusal| refusal.starts_with(&format!("{id}:")))
            })
            .filter(|id| self.settings.policy.strategies.get(id) != Some(&false))
            .collect::<Vec<_>>();
        if !works.is_empty() {
            let text = format!("the machine was probed again: {} works now", works.join(", "));
            self.tell(repetition, &host_story(text, false));
        }
    }

    fn tell_first_look(&mut self, repetition: &mut Repetition, now: Nanoseconds) {
        let Some(look) = &mut self.first_look else { return };
        if let Some(lines) = look.at(&self.board.view(), now) {
            self.first_look = None;
            for line in &lines {
                self.tell(repetition, line);
            }
        }
    }

    fn publish(&mut self, waits: &mut OwnWaits) {
        let mut view = self.driven.view();
        waits.tell(&mut view.budget);
        view.budget.kept_small = self.driven.kept_small();
        self.manager.tell_state(&view);
        let not_read = homeostat_helper::refused();
        self.board
            .set_notes([self.notes.as_slice(), not_read.as_slice()].concat());
        self.board.publish(view);
    }

    fn tell(&self, repetition: &mut Repetition, story: &Story) {
        let line = StoryLine::new(self.clock.unix_seconds(), story);
        if repetition.is_news(&line) {
            let admission = repetition.admit(&line);
            for line in admission.before.iter().chain(admission.written.then_some(&line)) {
                self.log.write(line);
            }
            self.board.tell(line);
        }
    }

    fn obey(&mut self, repetition: &mut Repetition, ask: &Ask) -> Answer {
        let in_force = |view: &Status| view.in_force.iter().map(|c| c.action.0).collect::<Vec<u64>>();
        match ask {
            Ask::Pause => {
                self.driven.operator(OperatorRequest::Pause);
                Answer::Taken
            }
            Ask::Resume => {
                self.driven.operator(OperatorRequest::Resume);
                Answer::Taken
            }
            Ask::Undo(action) => {
                let known = in_force(&self.driven.view());
                if !known.contains(action) {
                    return Answer::NoSuchAction(known);
                }
                self.driven.operator(OperatorRequest::Undo(ActionId(*action)));
                Answer::Taken
            }
            Ask::UndoAll => {
                let known = in_force(&self.driven.view());
                self.driven.operator(OperatorRequest::UndoAll);
                Answer::Actions(known)
            }
            Ask::Switch(on) => self.switch(repetition, *on),
            Ask::Reload => self.reload(repetition),
            // Publish before the answer.
            Ask::Look => Answer::Taken,
        }
    }

    /// Sets the switch. The disk has it before anything is undone or tried.
    fn switch(&mut self, repetition: &mut Repetition, on: bool) -> Answer {
        let actions: Vec<u64> = self.driven.view().in_force.iter().map(|c| c.action.0).collect();
        let before = self.standing.policy(&self.settings.policy);
        // A daemon that only advised may not have the machine for itself.
        let sole = match on {
            true => self.sole.ensure(&self.settings.policy).map_err(|e| e.to_string()),
            false => Ok(None),
        };
        let set = sole.and_then(|note| {
            let set = self.standing.set(on, self.clock.unix_seconds());
            set.map(|changed| (changed, note)).map_err(|e| e.to_string())
        });
        let after = self.standing.policy(&self.settings.policy);
        // Try again what could not be undone.
        if before != after || (!on && !actions.is_empty()) {
            self.driven
                .operator(OperatorRequest::Configure(Box::new(after.clone())));
        }
        let shown = self.standing.shown();
        self.board.set_switch(shown.clone());
        let (changed, problem) = match set {
            Ok((changed, note)) => {
                if let Some(note) = note {
                    self.tell(repetition, &host_story(note, true));
                }
                let forbidden = self.standing.forbidden_by().filter(|_| on);
                let problem = forbidden.map(|(_, why, remedy)| format!("{why}\n  hint: {remedy}"));
                (changed, problem)
            }
            Err(why) => (before != after, Some(why)),
        };
        if changed {
            self.tell(repetition, &host_story(shown.sentence(), problem.is_some()));
        }
        Answer::Switched(Box::new(Switched {
            changed,
            actions,
            switch: shown,
            problem,
        }))
    }

    fn reload(&mut self, repetition: &mut Repetition) -> Answer {
        self.manager.tell("RELOADING=1");
        self.probe_again(repetition);
        let answer = match settings::load_for_daemon(&self.sources) {
            Ok(loaded) => match self.sole.ensure(&self.standing.policy(&loaded.settings.policy)) {
                Ok(note) => {
                    let mut notes = self.take_over(repetition, loaded);
                    if let Some(note) = note {
                        self.tell(repetition, &host_story(note.clone(), true));
                        notes.push(note);
                    }
                    Answer::Reloaded(notes)
                }
                // The new policy must not run together with another daemon.
                Err(e) => Answer::BadConfiguration(e.to_string()),
            },
            Err(errors) => Answer::BadConfiguration(errors.to_string()),
        };
        self.manager.tell("READY=1");
        answer
    }

    /// Applies new settings. Returns those that must wait for a restart.
    fn take_over(&mut self, repetition: &mut Repetition, loaded: Loaded) -> Vec<String> {
        let mut new = loaded.settings;
        new.policy.seed = if loaded.seed_given {
            crate::wiring::seed_of_this_machine(new.policy.seed)
        } else {
            self.settings.policy.seed
        };
        let old = &self.settings;
        let later: Vec<String> = [
            ("[paths]", old.paths != new.paths),
            ("[control]", old.control != new.control),
            ("[metrics]", old.metrics != new.metrics),
            ("[meters]", old.meters != new.meters),
            (
                "[service]",
                (
                    old.service.lock_memory,
                    old.service.raise_priority,
                    old.service.log,
                ) != (
                    new.service.lock_memory,
                    new.service.raise_priority,
                    new.service.log,
                ),
            ),
        ]
        .into_iter()
        .filter(|(_, changed)| *changed)
        .map(|(section, _)| format!("{section} takes effect after a restart"))
        .collect();
        let before = self.standing.policy(&old.policy);
        self.standing.look_again();
        self.standing.configure(new.policy.mode, loaded.mode_from);
        self.board.set_switch(self.standing.shown());
        let after = self.standing.policy(&new.policy);
        let text = if old.policy == new.policy {
            "configuration read again: the policy is unchanged".to_owned()
        } else {
            "configuration read again: the new policy is in force".to_owned()
        };
        if before != after {
            self.driven.operator(OperatorRequest::Configure(Box::new(after)));
        }
        self.settings.policy = new.policy;
        self.settings.service.keep_on_stop = new.service.keep_on_stop;
        self.tell(repetition, &host_story(text, false));
        for note in &later {
            self.tell(repetition, &host_story(note.clone(), true));
        }
        later
    }
}

pub(crate) fn host_story(text: String, warning: bool) -> Story {
    Story {
        workload: None,
        stage: Stage::Ignored,
        text,
        warning,
    }
}
