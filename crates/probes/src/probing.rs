//! Counts functions and static probes by perf, on a separate thread.
//!
//! Attaching, detaching and the safety checks ([`concern`](crate::concern)) may take long, because the kernel waits for
//! every process that maps the file. The reader of the meter asks that thread, with a short timeout.

use crate::concern::Files;
use crate::cpu_counters::{CpuCounters, InFiles};
use crate::owed::{Entry, On, Owed};
use homeostat_kernel::Root;
use homeostat_meters::Meter;
use homeostat_meters::tasks::{Counted, Limits, TaskCounters};
use homeostat_model::Workload;
use homeostat_platform::PlatformError;
use homeostat_sensors::storage::Refusal;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Longest wait for a reading, which takes microseconds unless probes come or go.
const PATIENCE: Duration = Duration::from_millis(250);
/// Interval of safety checks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Interval of attempts to attach, and their time limit.
const TRY_EVERY: Duration = Duration::from_secs(1);
const TRY_MAX: Duration = Duration::from_secs(60);
/// Interval of polls for the end of a check.
const BEAT: Duration = Duration::from_millis(10);
/// Readings between checks for other users of the file.
const EXCLUSIVE_CHECK_EVERY: u32 = 16;

pub(super) struct Plan {
    pub(super) id: String,
    pub(super) events: Vec<Counted>,
    pub(super) files: Files,
    /// Limits for a counter per thread. `None`: a counter per CPU.
    pub(super) threads: Option<Limits>,
    /// Device and inode of the program, which nobody else runs, for a counter per CPU.
    pub(super) program: (u64, u64),
}

struct Question {
    workload: Workload,
    answer: SyncSender<Answer>,
}

struct Answer {
    reading: Result<f64, PlatformError>,
    /// The meter has ended for good.
    over: bool,
}

/// The meter. Dropping it ends the thread.
pub(super) struct Probing {
    id: String,
    ask: SyncSender<Question>,
    /// As of the last answer.
    over: bool,
}

impl Probing {
    /// Begins to attach the probes.
    ///
    /// # Errors
    /// `Busy`: no thread can be made.
    pub(super) fn begin(root: &Root, workload: &Workload, plan: Plan) -> Result<Self, PlatformError> {
        let (ask, asked) = sync_channel(1);
        let id = plan.id.clone();
        let worker = Worker {
            root: root.clone(),
            workload: workload.clone(),
            plan,
            state: State::Trying {
                since: Instant::now(),
                why: "its probes are being put on".to_owned(),
            },
            base: 0.0,
            told: 0.0,
            torn: false,
            looking: None,
            looked: None,
            new: false,
        };
        std::thread::Builder::new()
            .name("probes".to_owned())
            .spawn(move || worker.run(&asked))
            .map_err(|e| PlatformError::Busy {
                what: format!("meter {id}"),
                why: e.to_string(),
            })?;
        Ok(Self { id, ask, over: false })
    }

    fn busy(&self) -> PlatformError {
        PlatformError::Busy {
            what: format!("meter {}", self.id),
            why: "its probes are being put on or taken off, or it is looked at whom that concerns".to_owned(),
        }
    }
}

impl Meter for Probing {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let (answer, reply) = sync_channel(1);
        let question = Question {
            workload: workload.clone(),
            answer,
        };
        let gone = || PlatformError::Vanished {
            target: format!("meter {}", self.id),
        };
        match self.ask.try_send(question) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(self.busy()),
            Err(TrySendError::Disconnected(_)) => return Err(gone()),
        }
        match reply.recv_timeout(PATIENCE) {
            Ok(Answer { reading, over }) => {
                self.over = over;
                reading
            }
            Err(RecvTimeoutError::Timeout) => Err(self.busy()),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
        }
    }

    fn is_over(&self) -> bool {
        self.over
    }
}

enum Counters {
    Threads(TaskCounters),
    Cpus {
        counters: CpuCounters,
        readings: u32,
        /// The last check found another process that runs the program.
        strange: bool,
    },
}

enum State {
    /// Not attached yet.
    Trying {
        since: Instant,
        why: String,
    },
    Counting {
        counters: Counters,
        /// The last check failed for the moment. It may have been cut short, so only two in a row count.
        doubtful: bool,
    },
    Over(PlatformError),
}

struct Worker {
    root: Root,
    /// As of the last request.
    workload: Workload,
    plan: Plan,
    state: State,
    /// Count of earlier counters.
    base: f64,
    /// Last reported count.
    told: f64,
    /// The probes were detached since the last reading.
    torn: bool,
    /// Result channel of a running check, so that readings do not wait for it.
    looking: Option<Receiver<Result<(), Refusal>>>,
    /// End of the last check.
    looked: Option<Instant>,
    /// New processes are not counted yet.
    new: bool,
}

impl Worker {
    fn run(mut self, asked: &Receiver<Question>) {
        loop {
            let look = self.looking.as_ref().map(Receiver::try_recv);
            match look {
                Some(Ok(allowed)) => self.ended(Some(allowed)),
                Some(Err(TryRecvError::Disconnected)) => self.ended(None),
                Some(Err(TryRecvError::Empty)) => {}
                None if self.due().is_zero() => self.begin(),
                None => {}
            }
            let wait = if self.looking.is_some() {
                BEAT
            } else {
                self.due().max(BEAT)
            };
            match asked.recv_timeout(wait) {
                Ok(question) => {
                    self.workload = question.workload;
                    let reading = self.read();
                    let over = matches!(self.state, State::Over(_));
                    // The reader may have timed out.
                    let _ = question.answer.try_send(Answer { reading, over });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn due(&self) -> Duration {
        let every = match &self.state {
            State::Trying { .. } => TRY_EVERY,
            State::Counting { doubtful: true, .. } => TRY_EVERY,
            State::Counting { .. } if self.new => TRY_EVERY,
            State::Counting { .. } | State::Over(_) => LOOK_EVERY,
        };
        self.looked
            .map_or(Duration::ZERO, |then| every.saturating_sub(then.elapsed()))
    }

    fn begin(&mut self) {
        let first = match self.state {
            State::Trying { .. } => true,
            State::Counting { .. } => false,
            State::Over(_) => {
                self.looked = Some(Instant::now());
                return;
            }
        };
        let (tell, told) = sync_channel(1);
        let (root, files) = (self.root.clone(), self.plan.files.clone());
        let processes = self.workload.processes.clone();
        let begun = std::thread::Builder::new()
            .name("probes-look".to_owned())
            .spawn(move || {
                let allowed = if first {
                    files.allow_first(&root, &processes)
                } else {
                    files.allow(&root, &processes)
                };
                // The receiver may be gone.
                let _ = tell.try_send(allowed);
            });
        match begun {
            Ok(_) => self.looking = Some(told),
            Err(e) => self.ended(Some(Err(Refusal::Now(format!("no thread can be made: {e}"))))),
        }
    }

    fn ended(&mut self, allowed: Option<Result<(), Refusal>>) {
        self.looking = None;
        self.looked = Some(Instant::now());
        let allowed =
            allowed.unwrap_or_else(|| Err(Refusal::Now("the look at whom it concerns broke off".to_owned())));
        let what = format!("meter {}", self.plan.id);
        match (&mut self.state, allowed) {
            (State::Trying { since, .. }, Ok(())) => {
                let since = *since;
                self.state = match self.open() {
                    Ok(counters) => State::Counting {
                        counters,
                        doubtful: false,
                    },
                    // A lack of memory or descriptors, or a blocked process, may pass.
                    Err(PlatformError::Busy { why, .. }) if since.elapsed() < TRY_MAX => {
                        State::Trying { since, why }
                    }
                    Err(e) => State::Over(e),
                };
            }
            (State::Trying { since, why }, Err(Refusal::Now(now))) if since.elapsed() < TRY_MAX => *why = now,
            (State::Trying { .. }, Err(refusal)) => {
                self.state = State::Over(PlatformError::Unsupported {
                    what: what.clone(),
                    why: refusal.to_string(),
                });
            }
            (State::Counting { counters, doubtful }, Ok(())) => {
                self.new = false;
                *doubtful = false;
                if let Counters::Threads(counters) = counters {
                    match counters.attach_new(&self.workload) {
                        // If resources are short now, the next check tries again.
                        Ok(()) | Err(PlatformError::Busy { .. }) => {}
                        Err(e) => self.state = State::Over(e),
                    }
                }
            }
            (State::Counting { doubtful, .. }, Err(Refusal::Now(_))) if !*doubtful => *doubtful = true,
            // Dropping the counters detaches the probes, as soon as that blocks nobody.
            (State::Counting { .. }, Err(Refusal::Now(why))) => {
                self.base = self.told;
                self.torn = true;
                self.state = State::Trying {
                    since: Instant::now(),
                    why,
                };
            }
            (State::Counting { .. }, Err(refusal)) => self.state = State::Over(refusal.error(&what)),
            (State::Over(_), _) => {}
        }
        if let State::Over(PlatformError::Busy { why, .. }) = &self.state {
            // For readers, the meter has vanished.
            self.state = State::Over(PlatformError::Vanished {
                target: format!("{what}: {why}; it"),
            });
        }
    }

    /// Logs the places in the clean-up log, and notes that some may be inserted.
    fn owe(&self) -> Result<On, Refusal> {
        let places = self.plan.events.iter().filter_map(|event| match event {
            Counted::Uprobe {
                offset, semaphore, ..
            } => Some((*offset, *semaphore)),
            Counted::Instructions | Counted::Cycles => None,
        });
        let places: Vec<(u64, u32)> = places.collect();
        let targets = self.plan.files.targets.iter();
        let owed = Owed::begin(
            &self.root,
            targets
                .map(|target| Entry::new(target, places.iter().copied(), &self.workload.processes))
                .collect::<Result<_, _>>()?,
        )?;
        owed.take()
    }

    fn open(&self) -> Result<Counters, PlatformError> {
        let (root, workload) = (&self.root, &self.workload);
        let Plan { events, files, .. } = &self.plan;
        let on = self
            .owe()
            .map_err(|why| why.error(&format!("meter {}", self.plan.id)))?;
        Ok(match self.plan.threads {
            Some(limits) => Counters::Threads(TaskCounters::open_with(
                root,
                workload,
                events.clone(),
                limits,
                Some(Arc::new(InFiles(files.clone(), on))),
            )?),
            None => Counters::Cpus {
                counters: CpuCounters::open_probes(root, workload, events, files, on)?,
                readings: 0,
                strange: false,
            },
        })
    }

    fn read(&mut self) -> Result<f64, PlatformError> {
        let counters = match &mut self.state {
            State::Over(e) => return Err(e.clone()),
            State::Trying { why, .. } => {
                self.torn = false;
                return Err(PlatformError::Busy {
                    what: format!("meter {}", self.plan.id),
                    why: why.clone(),
                });
            }
            State::Counting { counters, .. } => counters,
        };
        let counted = match counters {
            Counters::Threads(counters) => {
                // New processes are counted after the next check.
                self.new |= counters.lacks(&self.workload);
                counters.read_attached(&self.workload)?
            }
            Counters::Cpus {
                counters,
                readings,
                strange,
            } => {
                *readings = readings.wrapping_add(1);
                if *strange || *readings % EXCLUSIVE_CHECK_EVERY == 0 {
                    let stranger = crate::uprobe::stranger_of(&self.root, &self.workload, self.plan.program);
                    let again = std::mem::replace(strange, stranger.is_some());
                    if let Some(pid) = stranger {
                        if again {
                            let over = PlatformError::Vanished {
                                target: format!(
                                    "the workload's sole use of its program (process {pid} runs it too), so its meter"
                                ),
                            };
                            self.state = State::Over(over.clone());
                            return Err(over);
                        }
                        // It may be an orphaned child of the workload before its exec. Until then, hits are not
                        // reported.
                        return Err(PlatformError::Busy {
                            what: format!("meter {}", self.plan.id),
                            why: format!("process {pid} runs its program, too"),
                        });
                    }
                }
                counters.read()?
            }
        };
        let count = self.base + counted;
        self.told = count;
        if std::mem::take(&mut self.torn) {
            // The probes were detached for a while, so this interval is incomplete.
            return Err(PlatformError::Busy {
                what: format!("meter {}", self.plan.id),
                why: "its probes were off for a moment".to_owned(),
            });
        }
        Ok(count)
    }
}
