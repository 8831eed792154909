//! One workload as the mind follows it: from first sight to a change in force or a reasoned refusal.

use crate::blocks::Objective;
use crate::growth::Growth;
use crate::losses::Rereads;
use crate::meters::Assessment;
use crate::places::Refused;
use crate::series::Series;
use crate::strategy::{Load, Proposal};
use crate::view::{Decision, Stage};
use homeostat_model::{
    ActionId, Locality, MemoryMap, MeterCandidate, MeterId, Nanoseconds, StrategyId, Workload, WorkloadSample,
};
use std::collections::{BTreeMap, VecDeque};

/// Decisions kept per workload for `explain`.
const DECISIONS_MAX: usize = 48;
/// A meter that judges and was lost is opened again after so long …
const REOPEN: Nanoseconds = Nanoseconds::from_secs(60);
/// … and after twice as long each time that this fails or it is lost again soon, so many times at most.
const REOPEN_DOUBLINGS: u32 = 10;

/// The meter that judges.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    pub(crate) candidate: MeterCandidate,
    pub(crate) assessment: Assessment,
    /// Whether it varies more than it may, and was taken all the same because the program lost its pages while it was judged. Until it
    /// was judged without that it judges what is done against the loss, by coins and per second, and nothing else.
    pub(crate) in_a_loss: bool,
}

/// A proposal and whose it is.
#[derive(Clone, Debug)]
pub(crate) struct Proposed {
    pub(crate) strategy: StrategyId,
    pub(crate) proposal: Proposal,
    /// When it was made.
    pub(crate) at: Nanoseconds,
}

/// When the meter that judges is opened again, after it was lost or could not be opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reopening {
    /// When the next try is due.
    at: Option<Nanoseconds>,
    /// How often it was lost or could not be opened since it was read for long.
    failures: u32,
    /// When it was opened last; `None` since it was lost.
    opened_at: Option<Nanoseconds>,
}

impl Reopening {
    /// It was lost, or could not be opened. `longest`: no wait is longer, and what was read for so long was not lost soon.
    pub(crate) fn put_off(&mut self, now: Nanoseconds, longest: Nanoseconds) {
        let longest = longest.max(REOPEN);
        if self.opened_at.is_some_and(|at| now - at >= longest) {
            self.failures = 0;
        }
        let wait = REOPEN * (1 << self.failures.min(REOPEN_DOUBLINGS));
        self.failures = self.failures.saturating_add(1);
        self.at = Some(now + wait.min(longest));
        self.opened_at = None;
    }

    /// It is open.
    pub(crate) fn note_opened(&mut self, now: Nanoseconds) {
        self.at = None;
        self.opened_at = Some(now);
    }

    /// Whether it is to be opened again now.
    pub(crate) fn is_due(&self, now: Nanoseconds) -> bool {
        self.at.is_some_and(|at| now >= at)
    }
}

/// State of one workload.
pub(crate) struct Watched {
    pub(crate) workload: Workload,
    pub(crate) stage: Stage,
    pub(crate) summary: String,
    /// Whether it is declined because a person had its change undone.
    pub(crate) undone_by_a_person: bool,
    pub(crate) decisions: VecDeque<Decision>,
    pub(crate) series: Series,
    pub(crate) sample: Option<WorkloadSample>,
    /// How often its main process had executed a program at the last sample; `None` before the first.
    pub(crate) executions: Option<u32>,
    pub(crate) load: Load,
    /// Meters found, with refusals filled in as they are judged.
    pub(crate) candidates: Vec<MeterCandidate>,
    /// Whether `FindMeters` was sent and not answered.
    pub(crate) finding: bool,
    /// Tier of meters being judged.
    pub(crate) tier: usize,
    /// Since when the readings of this tier count.
    pub(crate) judging_since: Nanoseconds,
    pub(crate) open: Vec<MeterId>,
    /// Those that were lost since they were opened last, and why.
    pub(crate) lost: BTreeMap<MeterId, String>,
    /// When that which judges is opened again; this is done where something is in force.
    pub(crate) reopening: Reopening,
    /// Why they are read for longer than others before they are judged …
    pub(crate) reads_on: Option<String>,
    /// … and that they are not looked at before so many samples.
    pub(crate) judged_after: usize,
    pub(crate) meter: Option<Chosen>,
    /// The other kind of kernel work by whose constant ratio that one qualified, if it is kernel work.
    pub(crate) confirming: Option<MeterId>,
    pub(crate) objective: Objective,
    /// Why that one judges.
    pub(crate) objective_reason: &'static str,
    /// Whether a trial has shown that its work is what is asked of it, however busy it looked.
    pub(crate) offered: bool,
    /// Since when the chosen meter is read without anything being tried.
    pub(crate) observed_since: Nanoseconds,
    /// The passive history on which the strategies were asked early and promised nothing large: when it began.
    pub(crate) asked_early: Option<Nanoseconds>,
    /// How often a change that reaches others went because this one did nothing.
    pub(crate) idled: u32,
    /// Memory map for the decision at hand.
    pub(crate) memory: Option<MemoryMap>,
    /// Places of threads and memory for the decision at hand.
    pub(crate) locality: Option<Locality>,
    /// Why the memory could not be inspected for the decision at hand.
    pub(crate) memory_refused: Option<String>,
    /// Why the places could not be inspected for the decision at hand.
    pub(crate) locality_refused: Option<String>,
    /// Whether an inspection is under way.
    pub(crate) inspecting: bool,
    /// The guard of the accepted change for whose review the inspection is made; `None`: for the decision at hand.
    pub(crate) review: Option<ActionId>,
    /// Whether something further is looked for, with changes already in force.
    pub(crate) seeking: bool,
    /// When something further is looked for next.
    pub(crate) more_at: Nanoseconds,
    /// Why nothing further was found, as it was last told.
    pub(crate) nothing_further: String,
    pub(crate) proposed: Option<Proposed>,
    /// Until when it is not tried together with others.
    pub(crate) alone_until: Nanoseconds,
    /// Times in a row that a trial of it could not begin because its effector said "not now".
    pub(crate) postponed: u32,
    /// When a refusal is looked at again.
    pub(crate) retry_at: Nanoseconds,
    /// From when relief from a loss of memory is sought again.
    pub(crate) relief_at: Nanoseconds,
    /// Start of the observation window that goes to the history next.
    pub(crate) window_from: Nanoseconds,
    /// When it used memory last that is not resident in it, while memory was short; or worked on what is in memory of its files.
    pub(crate) used_files_at: Option<Nanoseconds>,
    /// When it waited for storage last while memory was short.
    pub(crate) lost_at: Option<Nanoseconds>,
    /// What it read again of what was taken from it, by its last two samples, the last one last.
    pub(crate) rereads: [Rereads; 2],
    /// What it lost when its protection was proposed last.
    pub(crate) lost_when_proposed: Rereads,
    /// Until when strategies that have something in force are not asked for a further step, since one was refused.
    pub(crate) no_steps_until: BTreeMap<StrategyId, Nanoseconds>,
    /// Places that were refused, by who proposed them.
    pub(crate) refused_places: BTreeMap<StrategyId, Vec<Refused>>,
    /// Its resident memory over a long time.
    pub(crate) growth: Growth,
    /// Gone from the machine; kept until its changes are closed.
    pub(crate) gone: bool,
}

impl Watched {
    /// What it loses by both of its last two samples: one may be a lump.
    pub(crate) fn lost_lately(&self) -> Rereads {
        self.rereads[0].least(self.rereads[1])
    }

    pub(crate) fn new(workload: Workload, now: Nanoseconds) -> Self {
        Self {
            workload,
            stage: Stage::Ignored,
            summary: String::new(),
            undone_by_a_person: false,
            decisions: VecDeque::new(),
            series: Series::default(),
            sample: None,
            executions: None,
            load: Load::default(),
            candidates: Vec::new(),
            finding: false,
            tier: 0,
            judging_since: now,
            open: Vec::new(),
            lost: BTreeMap::new(),
            reopening: Reopening::default(),
            reads_on: None,
            judged_after: 0,
            meter: None,
            confirming: None,
            objective: Objective::WorkPerSecond,
            objective_reason: "",
            offered: false,
            observed_since: now,
            asked_early: None,
            idled: 0,
            memory: None,
            locality: None,
            memory_refused: None,
            locality_refused: None,
            inspecting: false,
            review: None,
            seeking: false,
            more_at: Nanoseconds::ZERO,
            nothing_further: String::new(),
            proposed: None,
            alone_until: Nanoseconds::ZERO,
            postponed: 0,
            retry_at: Nanoseconds::ZERO,
            relief_at: Nanoseconds::ZERO,
            window_from: now,
            used_files_at: None,
            lost_at: None,
            rereads: [Rereads::default(); 2],
            lost_when_proposed: Rereads::default(),
            no_steps_until: BTreeMap::new(),
            refused_places: BTreeMap::new(),
            growth: Growth::default(),
            gone: false,
        }
    }

    /// Moves to a stage with a sentence. Returns whether people should be told: not when the sentence differs from
    /// the last one in numbers only.
    pub(crate) fn decide(&mut self, at_unix: u64, stage: Stage, text: &str) -> bool {
        let news = self.stage != stage || skeleton(&self.summary) != skeleton(text);
        let returning = stage == Stage::Declined
            && self
                .decisions
                .iter()
                .rev()
                .find(|d| d.stage == Stage::Declined)
                .is_some_and(|d| skeleton(&d.text) == skeleton(text));
        if (stage, text) != (self.stage, &self.summary) {
            self.undone_by_a_person = false;
        }
        self.stage = stage;
        self.summary = text.to_owned();
        if news && !returning {
            if self.decisions.len() == DECISIONS_MAX {
                self.decisions.pop_front();
            }
            self.decisions.push_back(Decision {
                at_unix,
                stage,
                text: text.to_owned(),
            });
        }
        news && !returning
    }

    /// Adds to the chain of decisions what people need to know only when they ask.
    pub(crate) fn note(&mut self, at_unix: u64, text: String) {
        let said = self
            .decisions
            .iter()
            .any(|d| skeleton(&d.text) == skeleton(&text));
        if said {
            return;
        }
        if self.decisions.len() == DECISIONS_MAX {
            self.decisions.pop_front();
        }
        self.decisions.push_back(Decision {
            at_unix,
            stage: self.stage,
            text,
        });
    }

    /// Whether a further step of that strategy was refused not long ago.
    pub(crate) fn rests_from(&self, strategy: &StrategyId, now: Nanoseconds) -> bool {
        self.no_steps_until
            .get(strategy)
            .is_some_and(|until| now < *until)
    }

    /// Whether it is tried by itself only.
    pub(crate) fn alone(&self, now: Nanoseconds) -> bool {
        now < self.alone_until
    }

    /// Forgets what was gathered for one decision.
    pub(crate) fn forget_inspections(&mut self) {
        self.memory = None;
        self.locality = None;
        self.memory_refused = None;
        self.locality_refused = None;
    }

    /// Remembers why nothing further was found; whether that differs from the last time in more than numbers.
    pub(crate) fn nothing_further(&mut self, why: &str) -> bool {
        let news = skeleton(&self.nothing_further) != skeleton(why);
        self.nothing_further = why.to_owned();
        news
    }

    /// Whether that meter judges it.
    pub(crate) fn is_judged_by(&self, meter: &MeterId) -> bool {
        self.meter.as_ref().is_some_and(|m| m.candidate.id == *meter)
    }

    /// Whether the meter that judges it can be read no more, so that nothing can be tried until it is opened again or another is found.
    pub(crate) fn has_lost_its_meter(&self) -> bool {
        let judge = self.meter.as_ref();
        judge.is_some_and(|m| self.lost.contains_key(&m.candidate.id))
    }

    /// Whether that one is being opened again, and the answer has not come yet.
    pub(crate) fn reopens_its_meter(&self) -> bool {
        let judge = self.meter.as_ref().filter(|_| self.has_lost_its_meter());
        judge.is_some_and(|m| self.open.contains(&m.candidate.id))
    }

    /// Whether its meter was taken in a loss and may judge nothing else yet.
    pub(crate) fn judges_a_loss_only(&self) -> bool {
        self.meter.as_ref().is_some_and(|m| m.in_a_loss)
    }

    /// Its meters are judged by what is read from now on.
    pub(crate) fn judge_from(&mut self, now: Nanoseconds) {
        self.judging_since = now;
        self.reads_on = None;
        self.judged_after = 0;
    }

    /// Starts over from first sight, keeping the story and the load.
    pub(crate) fn reset(&mut self) {
        self.stage = Stage::Ignored;
        self.candidates.clear();
        self.finding = false;
        self.tier = 0;
        self.lost.clear();
        self.reopening = Reopening::default();
        self.reads_on = None;
        self.judged_after = 0;
        self.meter = None;
        self.confirming = None;
        self.forget_inspections();
        self.inspecting = false;
        self.review = None;
        self.seeking = false;
        self.proposed = None;
    }
}

/// The text without its numbers.
fn skeleton(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_ascii_digit() && *c != '.' && *c != '-' && *c != '+')
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Fingerprint, OperatorChoice, ProcessId, WorkloadKind};

    #[test]
    fn a_meter_that_is_lost_again_and_again_is_opened_again_ever_more_seldom() {
        let (minute, longest) = (Nanoseconds::from_secs(60), Nanoseconds::from_secs(600));
        let mut now = Nanoseconds::from_secs(1000);
        // Seconds until the next try.
        let wait = |reopening: &Reopening, now: Nanoseconds| {
            let is_due = |s: &u64| reopening.is_due(now + Nanoseconds::from_secs(*s));
            (0..10_000).find(is_due).unwrap()
        };
        let mut reopening = Reopening::default();
        let mut waits = Vec::new();
        for _ in 0..6 {
            reopening.put_off(now, longest);
            let seconds = wait(&reopening, now);
            now += Nanoseconds::from_secs(seconds);
            waits.push(seconds);
        }
        assert_eq!(waits, [60, 120, 240, 480, 600, 600]);
        // It is open, and lost again soon …
        reopening.note_opened(now);
        assert!(!reopening.is_due(now + longest * 9));
        now += minute;
        reopening.put_off(now, longest);
        assert_eq!(wait(&reopening, now), 600);
        // … and after long.
        reopening.note_opened(now + longest);
        now += longest * 2;
        reopening.put_off(now, longest);
        assert_eq!(wait(&reopening, now), 60);
        // However often, and however soon what was refused is looked at again.
        for _ in 0..100 {
            reopening.put_off(now, Nanoseconds::ZERO);
            assert_eq!(wait(&reopening, now), 60);
        }
    }

    #[test]
    fn the_story_does_not_repeat_itself() {
        let mut w = Watched::new(
            Workload {
                id: "w".into(),
                kind: WorkloadKind::ProcessGroup,
                former: None,
                owner: homeostat_model::Owner::Machine,
                others: Vec::new(),
                fingerprint: Fingerprint::new("w"),
                program: "w".into(),
                executable: String::new(),
                processes: vec![ProcessId {
                    pid: 1,
                    start_ticks: 1,
                }],
                choice: OperatorChoice::default(),
            },
            Nanoseconds::ZERO,
        );
        assert!(w.decide(1, Stage::Declined, "only 10 MiB resident"));
        assert!(!w.decide(2, Stage::Declined, "only 11 MiB resident"));
        assert!(w.decide(3, Stage::Considered, "looking for a meter"));
        assert!(
            !w.decide(4, Stage::Declined, "only 12 MiB resident"),
            "said before"
        );
        assert!(w.decide(5, Stage::Declined, "no meter"));
        assert_eq!(w.decisions.len(), 3);
    }
}
