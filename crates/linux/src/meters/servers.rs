//! Servers of a workload's processes, each of which is asked at every reading how much it has done.

use super::Meter;
use super::common::{Cumulative, living};
use super::connection::Deadline;
use crate::Root;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Longest time that a reading takes, however many are asked.
const READING: Duration = Duration::from_millis(400);
/// Longest wait for a connection and an answer.
pub(super) const WAIT: Duration = Duration::from_millis(200);
/// Most servers of one workload that are asked.
const SERVERS_MAX: usize = 16;

/// How a kind of server is found and asked. `Busy`: it may answer in a moment.
pub(super) trait Ask {
    /// What is kept of one.
    type Server;
    /// Finds the socket of a process on which such a server answers, and what it has done.
    fn find(&mut self, process: ProcessId, deadline: Deadline) -> Result<(Self::Server, u64), PlatformError>;
    /// What it has done since.
    fn ask(
        &mut self,
        process: ProcessId,
        server: &mut Self::Server,
        deadline: Deadline,
    ) -> Result<u64, PlatformError>;
    /// Forgets all processes but these.
    fn keep(&mut self, processes: &BTreeSet<ProcessId>) {
        let _ = processes;
    }
}

/// The servers of a workload, as a meter.
pub(super) struct Servers<A: Ask> {
    root: Root,
    asker: A,
    found: BTreeMap<ProcessId, A::Server>,
    /// Processes without a server (a child that saves the data set), while others answer.
    silent: BTreeSet<ProcessId>,
    sum: Cumulative<ProcessId>,
}

impl<A: Ask> Servers<A> {
    /// Finds them.
    ///
    /// # Errors
    /// None answers; or one does not in time.
    pub(super) fn open(root: &Root, workload: &Workload, asker: A) -> Result<Self, PlatformError> {
        let mut servers = Self {
            root: root.clone(),
            asker,
            found: BTreeMap::new(),
            silent: BTreeSet::new(),
            sum: Cumulative::new(),
        };
        servers.read(workload)?;
        Ok(servers)
    }

    fn keep(&mut self, processes: &BTreeSet<ProcessId>) {
        self.found.retain(|p, _| processes.contains(p));
        self.silent.retain(|p| processes.contains(p));
        self.sum.retain(|p| processes.contains(p));
        self.asker.keep(processes);
    }
}

/// Those that are asked.
fn asked(workload: &Workload) -> BTreeSet<ProcessId> {
    workload.processes.iter().take(SERVERS_MAX).copied().collect()
}

impl<A: Ask> Meter for Servers<A> {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let deadline = Deadline::after(READING);
        let processes = asked(workload);
        self.keep(&processes);
        let mut why = None;
        let mut answered = false;
        for process in &processes {
            let count = match self.found.get_mut(process) {
                Some(server) => self.asker.ask(*process, server, deadline),
                None if self.silent.contains(process) => continue,
                None => self.asker.find(*process, deadline).map(|(server, count)| {
                    self.found.insert(*process, server);
                    count
                }),
            };
            let failed = match count {
                Ok(count) => {
                    answered = true;
                    self.sum.set(process, count as f64, false);
                    continue;
                }
                // One server that does not answer in time spoils the sum of this interval.
                Err(e @ PlatformError::Busy { .. }) => return Err(e),
                // The end of the process explains whatever its connection says.
                Err(e) => match living(&self.root, *process) {
                    Err(gone @ PlatformError::Vanished { .. }) => gone,
                    Ok(()) | Err(_) => e,
                },
            };
            self.found.remove(process);
            if !self.sum.knows(process) {
                self.silent.insert(*process);
            } else if !matches!(failed, PlatformError::Vanished { .. }) {
                // So does one that has answered before and answers otherwise now: it is looked for anew at the next reading.
                return Err(failed);
            }
            // The main process speaks for the workload.
            if why.is_none() || Some(process) == workload.processes.first() {
                why = Some(failed);
            }
        }
        if answered {
            return Ok(self.sum.total());
        }
        // Without any, whoever was silent is asked again at the next reading.
        self.silent.clear();
        Err(why.unwrap_or_else(|| PlatformError::Vanished {
            target: workload.id.to_string(),
        }))
    }

    fn forget_ended(&mut self, workload: &Workload) {
        self.keep(&asked(workload));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{own, workload};
    use super::*;

    fn refused() -> PlatformError {
        PlatformError::Unsupported {
            what: "asking it".to_owned(),
            why: "it refuses".to_owned(),
        }
    }

    /// What the next questions are answered, by process; without: refused.
    #[derive(Default)]
    struct Fake {
        answers: BTreeMap<ProcessId, Result<u64, PlatformError>>,
        sought: usize,
    }

    impl Fake {
        fn answer(&self, process: ProcessId) -> Result<u64, PlatformError> {
            self.answers
                .get(&process)
                .cloned()
                .unwrap_or_else(|| Err(refused()))
        }
    }

    impl Ask for Fake {
        type Server = ();
        fn find(&mut self, process: ProcessId, _: Deadline) -> Result<((), u64), PlatformError> {
            self.sought += 1;
            self.answer(process).map(|count| ((), count))
        }
        fn ask(&mut self, process: ProcessId, _: &mut (), _: Deadline) -> Result<u64, PlatformError> {
            self.answer(process)
        }
    }

    /// This process, and one that is gone.
    fn two() -> (Workload, ProcessId, ProcessId) {
        let here = own().processes[0];
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        (workload("two", vec![here, gone]), here, gone)
    }

    fn with(answers: &[(ProcessId, u64)]) -> Fake {
        Fake {
            answers: answers
                .iter()
                .map(|(process, count)| (*process, Ok(*count)))
                .collect(),
            sought: 0,
        }
    }

    #[test]
    fn one_that_answered_before_is_looked_for_again_and_counts_on() {
        let (w, here, _) = two();
        let mut servers = Servers::open(&Root::default(), &w, with(&[(here, 100)])).unwrap();
        servers.asker.answers.insert(here, Ok(110));
        assert_eq!(servers.read(&w), Ok(10.0));
        let sought = servers.asker.sought;
        assert_eq!(servers.read(&w), Ok(10.0));
        assert_eq!(
            servers.asker.sought, sought,
            "whoever is silent is not asked again"
        );
        servers.asker.answers.clear();
        for _ in 0..3 {
            assert_eq!(servers.read(&w), Err(refused()));
        }
        assert!(servers.asker.sought > sought);
        servers.asker.answers.insert(here, Ok(115));
        assert_eq!(servers.read(&w), Ok(15.0), "what it did meanwhile is counted");
    }

    #[test]
    fn one_that_fails_spoils_the_sum_and_one_that_is_gone_does_not() {
        let (w, here, gone) = two();
        let answers = with(&[(here, 100), (gone, 1000)]);
        let mut servers = Servers::open(&Root::default(), &w, answers).unwrap();
        servers.asker.answers = with(&[(here, 101), (gone, 1001)]).answers;
        assert_eq!(servers.read(&w), Ok(2.0));
        // Whose process has ended it has ended itself, whatever its connection says.
        servers.asker.answers = with(&[(here, 104)]).answers;
        assert_eq!(servers.read(&w), Ok(5.0));
        servers.asker.answers = with(&[(gone, 1001)]).answers;
        assert_eq!(servers.read(&w), Err(refused()));
        let not_now = PlatformError::Busy {
            what: "asking it".to_owned(),
            why: "it is late".to_owned(),
        };
        servers.asker.answers.insert(here, Err(not_now.clone()));
        assert_eq!(servers.read(&w), Err(not_now));
    }

    #[test]
    fn when_nobody_answers_all_are_asked_again() {
        let (w, here, gone) = two();
        let mut servers = Servers::open(&Root::default(), &w, with(&[(gone, 1)])).unwrap();
        servers.asker.answers.clear();
        // Silent so far, it is asked once the other is gone.
        assert!(servers.read(&w).is_err());
        servers.asker.answers.insert(here, Ok(5));
        assert_eq!(servers.read(&w), Ok(0.0));
        servers.forget_ended(&workload("two", vec![gone]));
        assert!(servers.found.is_empty());
    }
}
