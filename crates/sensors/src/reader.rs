//! Reads that may block, in a separate thread and with a time limit.
//!
//! The kernel reads `cmdline`, `environ`, `maps`, `smaps` and page tables of a process under its `mmap_lock`. A process
//! in a page fault on a hanging file system, or in a huge `mmap`, keeps that lock, and readers wait with it. The loop
//! must not wait, so it gives such reads to one thread here, with a limit. A late thread is abandoned and ends by
//! itself when the lock is released. The process then rests, and a new thread takes over, as long as few are stuck.
//!
//! Killing the daemon ends every such wait and frees its locks: SIGKILL interrupts the kernel's wait for the lock. The
//! kernel does not read `cmdline` and `environ` from mapped files at all (Linux 4.17). Helper processes open files
//! whose file system could hang for ever (`homeostat_helper`).

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Limit for reading a few files of one process: they take microseconds, unless the lock is held.
pub const PATIENCE: Duration = Duration::from_millis(250);
/// Rest of a process after a late read.
const REST: Duration = Duration::from_secs(30);
/// Most threads stuck at the same time. Beyond it nothing is read until one of them returns.
const STUCK_MAX: usize = 4;
/// Most processes remembered as stuck: each costs [`PATIENCE`], so there cannot be many at a time.
const SUSPECTS_MAX: usize = 1024;
/// Stack of the thread: the parsers keep their data on the heap.
const STACK_BYTES: usize = 256 * 1024;

type Job = Box<dyn FnOnce() + Send>;

/// The process cannot be inspected now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("process {pid} cannot be inspected now: {why}")]
pub struct NotNow {
    /// Process id.
    pub pid: i32,
    /// Reason.
    pub why: WhyNotNow,
}

/// Reason why a process cannot be inspected now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyNotNow {
    /// The read did not return in time. From outside its two possible reasons look the same.
    #[error(
        "reading it took longer than {0:?}, because it keeps its address space locked (mmap_lock) or the machine is too busy"
    )]
    Slow(Duration),
    /// Its last read was late a short while ago.
    #[error("reading it took too long a short while ago; it is asked again after a rest")]
    Resting,
    /// A read of it has not returned yet.
    #[error("an earlier read of it has not come back yet")]
    Waiting,
    /// The largest number of reads has not returned.
    #[error("reads of {STUCK_MAX} other processes have not come back yet")]
    Full,
    /// No thread could be started, or it broke off.
    #[error("the reading thread is gone")]
    NoThread,
}

struct Worker {
    jobs: SyncSender<Job>,
    thread: JoinHandle<()>,
}

/// Runs reads that may block, one at a time.
pub struct Reader {
    worker: Option<Worker>,
    stuck: Vec<(i32, JoinHandle<()>)>,
    suspects: BTreeMap<i32, Instant>,
    /// Rest of a process after a late read.
    rest: Duration,
}

impl Default for Reader {
    fn default() -> Self {
        Self::with_rest(REST)
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("stuck", &self.stuck.len())
            .field("suspects", &self.suspects)
            .finish_non_exhaustive()
    }
}

impl Reader {
    /// A reader with this rest of a process after a late read.
    pub fn with_rest(rest: Duration) -> Self {
        Self {
            worker: None,
            stuck: Vec::new(),
            suspects: BTreeMap::new(),
            rest,
        }
    }

    /// Runs the job about this process and waits at most `patience`. A late job's result is dropped when it returns.
    ///
    /// # Errors
    /// [`NotNow`].
    pub fn run<T: Send + 'static>(
        &mut self,
        pid: i32,
        patience: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotNow> {
        let not_now = |why| Err(NotNow { pid, why });
        let now = Instant::now();
        if !self.suspects.is_empty() {
            self.suspects.retain(|_, until| *until > now);
            if self.suspects.contains_key(&pid) {
                return not_now(WhyNotNow::Resting);
            }
        }
        // At most one thread waits for a process, however long it hangs.
        self.stuck.retain(|(_, thread)| !thread.is_finished());
        if self.stuck.iter().any(|(waiting_for, _)| *waiting_for == pid) {
            return not_now(WhyNotNow::Waiting);
        }
        let (answer, reply) = sync_channel(1);
        let job: Job = Box::new(move || {
            // The caller may have given up.
            let _ = answer.try_send(job());
        });
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => match self.hire() {
                Ok(worker) => worker,
                Err(why) => return not_now(why),
            },
        };
        if worker.jobs.send(job).is_err() {
            return not_now(WhyNotNow::NoThread);
        }
        match reply.recv_timeout(patience) {
            Ok(done) => {
                self.worker = Some(worker);
                Ok(done)
            }
            Err(error) => {
                // Dropping the sender closes its queue, so the thread ends when it returns.
                self.stuck.push((pid, worker.thread));
                if self.suspects.len() < SUSPECTS_MAX {
                    self.suspects.insert(pid, Instant::now() + self.rest);
                }
                not_now(match error {
                    RecvTimeoutError::Timeout => WhyNotNow::Slow(patience),
                    RecvTimeoutError::Disconnected => WhyNotNow::NoThread,
                })
            }
        }
    }

    /// Whether a process rests after a late read.
    pub fn suspects(&self, pid: i32) -> bool {
        self.suspects
            .get(&pid)
            .is_some_and(|until| *until > Instant::now())
    }

    fn hire(&mut self) -> Result<Worker, WhyNotNow> {
        if self.stuck.len() >= STUCK_MAX {
            return Err(WhyNotNow::Full);
        }
        let (jobs, inbox): (SyncSender<Job>, Receiver<Job>) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("reader".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                while let Ok(job) = inbox.recv() {
                    job();
                }
            })
            .map_err(|_| WhyNotNow::NoThread)?;
        Ok(Worker { jobs, thread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_blocks_costs_its_patience_once_and_others_go_on() {
        let mut reader = Reader::default();
        assert_eq!(reader.run(1, PATIENCE * 40, || 5), Ok(5));
        let (release, held) = sync_channel::<()>(0);
        let blocked = reader.run(7, Duration::from_millis(10), move || {
            let _ = held.recv();
        });
        let why = |outcome: Result<(), NotNow>| outcome.map_err(|not_now| (not_now.pid, not_now.why));
        let slow = WhyNotNow::Slow(Duration::from_millis(10));
        assert_eq!(why(blocked), Err((7, slow)));
        let text = blocked.unwrap_err().to_string();
        assert!(
            text.contains("longer than 10ms") && text.contains("too busy"),
            "{text}"
        );
        assert!(reader.suspects(7) && !reader.suspects(1));
        assert_eq!(
            why(reader.run(7, PATIENCE, || ())),
            Err((7, WhyNotNow::Resting)),
            "it is not asked again at once"
        );
        assert_eq!(
            reader.run(1, PATIENCE * 40, || 6),
            Ok(6),
            "a new thread took over"
        );
        drop(release);
        for (_, thread) in reader.stuck.drain(..) {
            thread.join().unwrap();
        }
    }

    #[test]
    fn stuck_threads_are_bounded_and_come_back() {
        let mut reader = Reader::default();
        let mut releases = Vec::new();
        for pid in 0..STUCK_MAX as i32 {
            let (release, held) = sync_channel::<()>(0);
            releases.push(release);
            let outcome = reader.run(pid, Duration::from_millis(1), move || {
                let _ = held.recv();
            });
            let why = WhyNotNow::Slow(Duration::from_millis(1));
            assert_eq!(outcome, Err(NotNow { pid, why }));
        }
        let why = WhyNotNow::Full;
        assert_eq!(reader.run(99, PATIENCE * 40, || ()), Err(NotNow { pid: 99, why }));
        releases.clear();
        let deadline = Instant::now() + Duration::from_secs(60);
        while reader.run(99, PATIENCE * 40, || ()).is_err() {
            assert!(Instant::now() < deadline, "threads that came back make room");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_job_that_panics_is_not_now() {
        let mut reader = Reader::default();
        let outcome = reader.run(3, PATIENCE * 40, || -> u8 { panic!("a bug in a parser") });
        let why = WhyNotNow::NoThread;
        assert_eq!(outcome, Err(NotNow { pid: 3, why }));
        assert_eq!(reader.run(4, PATIENCE * 40, || 1), Ok(1));
    }
}
