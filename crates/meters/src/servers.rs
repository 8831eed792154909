//! Asks the servers of a workload's processes, at every reading, for their counters.

use crate::Meter;
use crate::common::Cumulative;
use crate::connection::Deadline;
use crate::listeners::{Says, Unanswered};
use crate::service::opener::{lives, living};
use homeostat_kernel::Root;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Longest reading, however many servers are asked.
const READING: Duration = Duration::from_millis(400);
/// Longest wait for a connection and an answer.
pub(super) const WAIT: Duration = Duration::from_millis(200);
pub(super) const STRANGER: &str = "what listens there is no socket of the process's user, or its path leads over a link; give the \
                                   server a socket that its own user makes, at a path without links";
/// Most servers of one workload.
const SERVERS_MAX: usize = 16;
/// Delay before a process without a server is asked again.
const SILENT: Duration = Duration::from_secs(30);

/// How a kind of server is found and asked. `Busy`: it may answer in a moment.
pub(super) trait Ask {
    type Server;
    /// Finds the socket of a process with such a server, and its count.
    fn find(&mut self, process: ProcessId, deadline: Deadline) -> Result<(Self::Server, u64), Unanswered>;
    fn ask(
        &mut self,
        process: ProcessId,
        server: &mut Self::Server,
        deadline: Deadline,
    ) -> Result<u64, Unanswered>;
    /// Forgets all other processes.
    fn keep(&mut self, processes: &BTreeSet<ProcessId>) {
        let _ = processes;
    }
}

pub(super) struct Servers<A: Ask> {
    root: Root,
    asker: A,
    found: BTreeMap<ProcessId, A::Server>,
    /// Processes without a server (a child that saves the data set), each with the time of the next question.
    silent: BTreeMap<ProcessId, Instant>,
    sum: Cumulative<ProcessId>,
}

impl<A: Ask> Servers<A> {
    /// Finds the servers.
    ///
    /// # Errors
    /// None answers, or one does not in time.
    pub(super) fn open(root: &Root, workload: &Workload, asker: A) -> Result<Self, PlatformError> {
        let mut servers = Self {
            root: root.clone(),
            asker,
            found: BTreeMap::new(),
            silent: BTreeMap::new(),
            sum: Cumulative::new(),
        };
        servers.read(workload)?;
        Ok(servers)
    }

    fn keep(&mut self, processes: &BTreeSet<ProcessId>) {
        self.found.retain(|p, _| processes.contains(p));
        self.silent.retain(|p, _| processes.contains(p));
        self.sum.retain(|p| processes.contains(p));
        self.asker.keep(processes);
    }
}

/// The error of a living process: even if something vanished, the process may be asked again.
fn of_the_living(process: ProcessId, error: PlatformError) -> PlatformError {
    match error {
        PlatformError::Vanished { target } => PlatformError::Unsupported {
            what: format!("asking the server of process {process}"),
            why: format!("{target} is gone; let it listen again"),
        },
        other => other,
    }
}

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
            let is_silent = self
                .silent
                .get(process)
                .is_some_and(|until| Instant::now() < *until);
            let count = match self.found.get_mut(process) {
                Some(server) => self.asker.ask(*process, server, deadline),
                None if is_silent => continue,
                None => self.asker.find(*process, deadline).map(|(server, count)| {
                    self.found.insert(*process, server);
                    count
                }),
            };
            let Unanswered { says, error } = match count {
                Ok(count) => {
                    answered = true;
                    self.silent.remove(process);
                    self.sum.set(process, count as f64, false);
                    continue;
                }
                Err(e) => e,
            };
            // A server that times out spoils the sum of this interval.
            if matches!(error, PlatformError::Busy { .. }) {
                return Err(error);
            }
            // If the process has ended, that explains the connection's error.
            let failed = match living(&self.root, *process) {
                Err(gone @ PlatformError::Vanished { .. }) => gone,
                Ok(()) => of_the_living(*process, error),
                Err(_) => error,
            };
            let is_gone = matches!(failed, PlatformError::Vanished { .. });
            self.found.remove(process);
            if self.sum.knows(process) {
                // A server that answered before and fails now also spoils it. The next reading searches it again.
                if !is_gone {
                    return Err(failed);
                }
            } else if is_gone || says == Says::NoServer {
                self.silent.insert(*process, Instant::now() + SILENT);
            }
            // The error of the main process counts, as long as it lives.
            if !is_gone && (why.is_none() || Some(process) == workload.processes.first()) {
                why = Some(failed);
            }
        }
        if answered {
            return Ok(self.sum.total());
        }
        // Without any server, the next reading asks the silent ones again.
        self.silent.clear();
        let target = workload.id.to_string();
        Err(match why {
            Some(why) => why,
            // The next scan finds a restarted process.
            None if workload.processes.iter().any(|p| lives(&self.root, *p)) => PlatformError::Unsupported {
                what: format!("asking the servers of {target}"),
                why: "those that answered have ended; wait until another one runs".to_owned(),
            },
            None => PlatformError::Vanished { target },
        })
    }

    fn forget_ended(&mut self, workload: &Workload) {
        self.keep(&asked(workload));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{own, workload};

    fn refused() -> PlatformError {
        PlatformError::Unsupported {
            what: "asking it".to_owned(),
            why: "it refuses".to_owned(),
        }
    }

    /// What the next questions are answered, by process; without, it is no server.
    #[derive(Default)]
    struct Fake {
        answers: BTreeMap<ProcessId, Result<u64, PlatformError>>,
        sought: usize,
    }

    impl Fake {
        fn answer(&self, process: ProcessId) -> Result<u64, Unanswered> {
            match self.answers.get(&process) {
                Some(answer) => answer.clone().map_err(Unanswered::from),
                None => Err(Unanswered::new(Says::NoServer, refused())),
            }
        }
    }

    impl Ask for Fake {
        type Server = ();
        fn find(&mut self, process: ProcessId, _: Deadline) -> Result<((), u64), Unanswered> {
            self.sought += 1;
            self.answer(process).map(|count| ((), count))
        }
        fn ask(&mut self, process: ProcessId, _: &mut (), _: Deadline) -> Result<u64, Unanswered> {
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
        // Silent so far, it is asked once the other is gone; it lives, so the workload does.
        let none = servers.read(&w);
        assert!(matches!(none, Err(PlatformError::Unsupported { .. })), "{none:?}");
        servers.asker.answers.insert(here, Ok(5));
        assert_eq!(servers.read(&w), Ok(0.0));
        servers.forget_ended(&workload("two", vec![gone]));
        assert!(servers.found.is_empty());
    }

    #[test]
    fn a_workload_is_gone_with_its_last_process() {
        let (_, _, gone) = two();
        let w = workload("one", vec![gone]);
        let mut servers = Servers::open(&Root::default(), &w, with(&[(gone, 1)])).unwrap();
        servers.asker.answers.clear();
        let target = w.id.to_string();
        assert_eq!(servers.read(&w), Err(PlatformError::Vanished { target }));
    }

    #[test]
    fn whatever_is_gone_of_a_process_that_lives_may_come_back() {
        let (w, here, gone) = two();
        let answers = with(&[(here, 100), (gone, 1000)]);
        let mut servers = Servers::open(&Root::default(), &w, answers).unwrap();
        let vanished = PlatformError::Vanished {
            target: "the server".to_owned(),
        };
        servers.asker.answers = with(&[(gone, 1001)]).answers;
        servers.asker.answers.insert(here, Err(vanished));
        for _ in 0..2 {
            let told = servers.read(&w);
            assert!(
                matches!(&told, Err(PlatformError::Unsupported { why, .. }) if why.contains("the server")),
                "{told:?}"
            );
        }
        servers.asker.answers.insert(here, Ok(103));
        assert_eq!(servers.read(&w), Ok(4.0));
    }

    #[test]
    fn who_was_no_server_is_asked_again_after_a_while_and_who_refused_at_once() {
        let (w, here, gone) = two();
        let mut servers = Servers::open(&Root::default(), &w, with(&[(gone, 1)])).unwrap();
        servers.asker.answers.insert(here, Ok(50));
        assert_eq!(servers.read(&w), Ok(0.0));
        assert!(servers.silent.contains_key(&here), "it is not asked yet");
        servers.silent.insert(here, Instant::now());
        assert_eq!(servers.read(&w), Ok(0.0));
        servers.asker.answers.insert(here, Ok(52));
        assert_eq!(servers.read(&w), Ok(2.0));

        let mut answers = with(&[(gone, 1)]);
        answers.answers.insert(here, Err(refused()));
        let mut servers = Servers::open(&Root::default(), &w, answers).unwrap();
        assert!(servers.silent.is_empty());
        servers.asker.answers.insert(here, Ok(50));
        assert_eq!(servers.read(&w), Ok(0.0));
        servers.asker.answers.insert(here, Ok(53));
        assert_eq!(servers.read(&w), Ok(3.0));
    }
}
