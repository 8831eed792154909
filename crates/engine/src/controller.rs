//! Controllers: loops that move settings of the whole host a little at a time, without trials.
//!
//! Everything else here is tried as an experiment. The rules that a controller carries out were written by somebody for a
//! loop that answers within seconds and goes on for ever (a profile such as `autotune-classic`), so a person has to ask
//! for it: a controller works in its own profile only ([`crate::Strategy::works_in`]), and proves nothing. What holds for
//! every change holds for its changes: the undo is on disk before, somebody else's value wins and is not touched again, and
//! all is put back at the end.
//!
//! A controller says which values it *wants*; [`Engine`] brings the files there. One change at a time holds a file: for
//! another value the change in force is undone, and a new one made, so that what it found is always what was there
//! before homeostat. Trials of other things end when a controller moves: what they measure changes with it.

use crate::engine::Engine;
use crate::policy::{Mode, Policy};
use crate::protocol::{Command, DecisionRecord, Fault, FaultKind, Story};
use crate::relief;
use crate::view::Stage;
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, EffectorId, Machine, MachineSample, Nanoseconds, StrategyId, WorkloadId,
};
use std::collections::BTreeMap;

/// Effector that writes settings.
const SETTING: &str = "setting";
/// Whose the changes of a controller are: they are made for no workload.
const HOST: &str = "host";
/// Controllers at most, and files of one.
const CONTROLLERS_MAX: usize = 8;
const FILES_MAX: usize = 16;

/// What a controller sees.
pub struct HostSeen<'a> {
    /// Time since boot.
    pub now: Nanoseconds,
    /// Settings.
    pub policy: &'a Policy,
    /// The host.
    pub machine: &'a Machine,
    /// The host in the last interval.
    pub sample: &'a MachineSample,
    /// Length of that interval.
    pub interval: Nanoseconds,
}

/// Values that a controller wants, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Value by file. A file that is not in it is to be as it was found.
    pub values: BTreeMap<String, String>,
    /// One sentence with the numbers that justify it.
    pub why: String,
}

/// A loop over settings of the host. It keeps state, and is a pure function of what it was shown.
pub trait Controller: Send + Sync {
    /// How often the host must be looked at.
    fn every(&self) -> Nanoseconds;
    /// Takes a look and returns what is wanted from now on; `None`: as before.
    fn step(&mut self, seen: &HostSeen<'_>) -> Option<Wanted>;
}

/// A controller at work.
pub(crate) struct Steered {
    strategy: StrategyId,
    controller: Box<dyn Controller>,
    wanted: Wanted,
    /// The change that holds a file, and its value.
    held: BTreeMap<String, (ActionId, String)>,
    /// Files that are left alone until then, and why.
    left: BTreeMap<String, (Nanoseconds, String)>,
}

impl Steered {
    fn new(strategy: StrategyId, controller: Box<dyn Controller>) -> Self {
        Self {
            strategy,
            controller,
            wanted: Wanted {
                values: BTreeMap::new(),
                why: String::new(),
            },
            held: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    fn is_left_alone(&self, file: &str, now: Nanoseconds) -> bool {
        self.left.get(file).is_some_and(|(until, _)| now < *until)
    }
}

/// For ever: until homeostat is started again.
const FOR_EVER: Nanoseconds = Nanoseconds(u64::MAX);

impl Engine {
    /// Takes the controllers of this profile to work, and lets go of the others. Their changes go with their strategy.
    pub(crate) fn appoint_controllers(&mut self) {
        let refusals = &self.refusals;
        self.steered.retain(|s| !refusals.contains_key(&s.strategy));
        for strategy in &self.strategies {
            let id = strategy.id();
            let is_there = self.steered.iter().any(|s| s.strategy == id);
            if is_there || self.refusals.contains_key(&id) || self.steered.len() >= CONTROLLERS_MAX {
                continue;
            }
            if let Some(controller) = strategy.controller(&self.policy) {
                self.steered.push(Steered::new(id, controller));
            }
        }
    }

    /// How often the host is to be looked at, although nobody is looked at in detail: as often as the controllers want it,
    /// and often enough to see soon that memory has become short, where a strategy can do something about it.
    pub(crate) fn host_every(&self) -> Option<Nanoseconds> {
        let relieves = self
            .strategies
            .iter()
            .any(|s| s.relieves() && !self.refusals.contains_key(&s.id()));
        let relief = (relieves && self.policy.mode == Mode::Act).then_some(relief::LOOK_EVERY);
        let controllers = self.steered.iter().map(|s| s.controller.every());
        controllers.chain(relief).min()
    }

    /// Shows the controllers the last sample, and brings files to where they want them.
    pub(crate) fn steer(&mut self) {
        if self.steered.is_empty() || self.stopping.is_some() || self.policy.mode != Mode::Act {
            return;
        }
        if !self.paused {
            for index in 0..self.steered.len() {
                self.ask_controller(index);
            }
        }
        self.bring_files();
    }

    fn ask_controller(&mut self, index: usize) {
        let seen = HostSeen {
            now: self.now,
            policy: &self.policy,
            machine: &self.machine,
            sample: &self.machine_sample,
            interval: self.machine_interval,
        };
        let Some(steered) = self.steered.get_mut(index) else {
            return;
        };
        let Some(mut wanted) = steered.controller.step(&seen) else {
            return;
        };
        while wanted.values.len() > FILES_MAX {
            wanted.values.pop_last();
        }
        if wanted.values != steered.wanted.values {
            let text = format!("{}: {}", steered.strategy, wanted.why);
            self.out.push(Command::Tell(Story {
                workload: None,
                stage: Stage::Improved,
                text: text.clone(),
                warning: false,
            }));
            self.out.push(Command::RecordDecision(DecisionRecord {
                workload: None,
                stage: Stage::Improved,
                text,
            }));
        }
        steered.wanted = wanted;
    }

    /// Undoes what is not wanted any more, and makes what is, of files that nobody holds.
    pub(crate) fn bring_files(&mut self) {
        if self.stopping.is_some() || self.policy.mode != Mode::Act {
            return;
        }
        let (mut going, mut coming) = (Vec::new(), Vec::new());
        let now = self.now;
        for s in &mut self.steered {
            let changes = &self.changes;
            s.held.retain(|_, (action, _)| changes.contains_key(action));
            s.left.retain(|_, (until, _)| now < *until);
            for (file, (action, value)) in &s.held {
                let is_leaving = changes.get(action).is_some_and(|c| c.leaving);
                if s.wanted.values.get(file) != Some(value) && !is_leaving {
                    going.push((*action, s.wanted.why.clone()));
                }
            }
            for (file, value) in &s.wanted.values {
                if !s.held.contains_key(file) && !s.is_left_alone(file, now) {
                    coming.push((
                        s.strategy.clone(),
                        file.clone(),
                        value.clone(),
                        s.wanted.why.clone(),
                    ));
                }
            }
        }
        for (action, why) in going {
            self.withdraw(action, &why);
        }
        if !coming.is_empty() {
            self.make_way("settings of the whole host are moved, which changes what is measured");
        }
        for (strategy, file, value, why) in coming {
            self.hold_file(strategy, file, value, why);
        }
    }

    fn hold_file(&mut self, strategy: StrategyId, file: String, value: String, why: String) {
        let id = ActionId(self.next_action);
        self.next_action += 1;
        if let Some(s) = self.steered.iter_mut().find(|s| s.strategy == strategy) {
            s.held.insert(file.clone(), (id, value.clone()));
        }
        let action = Action {
            id,
            effector: EffectorId::from(SETTING),
            workload: WorkloadId::new(HOST),
            target: Target::Files(vec![file]),
            arguments: BTreeMap::from([("value".to_owned(), value)]),
            why,
        };
        self.make(action, strategy);
    }

    /// Whether a change is one of a controller, and whose.
    pub(crate) fn steered_by(&self, action: ActionId) -> Option<&StrategyId> {
        self.steered
            .iter()
            .find(|s| s.held.values().any(|(held, _)| *held == action))
            .map(|s| &s.strategy)
    }

    /// Somebody else took hold of what a change had set: the controller leaves that file alone.
    pub(crate) fn leave_file(&mut self, action: ActionId, why: &str) {
        self.leave_file_until(action, FOR_EVER, why);
    }

    /// A person took a change of a controller back: that file is left alone for a while.
    pub(crate) fn rest_file(&mut self, action: ActionId, why: &str) {
        let until = self.now + Nanoseconds::from_secs_f64(self.policy.reconsider_s);
        self.leave_file_until(action, until, why);
    }

    fn leave_file_until(&mut self, action: ActionId, until: Nanoseconds, why: &str) {
        for s in &mut self.steered {
            let held = s.held.iter().find(|(_, (held, _))| *held == action);
            if let Some(file) = held.map(|(file, _)| file.clone()) {
                s.left.insert(file.clone(), (until, why.to_owned()));
                let text = format!("{}: {file} is left alone: {why}", s.strategy);
                self.out.push(Command::Tell(Story {
                    workload: None,
                    stage: Stage::Declined,
                    text,
                    warning: true,
                }));
                return;
            }
        }
    }

    /// A change of a controller could not be made. Whoever chose otherwise is left to it; else it is tried again later.
    pub(crate) fn steering_failed(&mut self, action: ActionId, fault: &Fault) {
        match fault.kind {
            FaultKind::Conflict | FaultKind::Rejected | FaultKind::Unsupported => {
                self.leave_file(action, &fault.text);
            }
            _ => self.rest_file(action, &fault.text),
        }
    }
}
