//! Functions and static probes, counted by a thread of their own.
//!
//! To put a probe on, to take it off, and to look whom that concerns ([`concern`](crate::concern)) may take long, and the
//! kernel waits meanwhile for whoever maps the file. Who reads the meter asks that thread and waits for a moment only.

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

/// Longest wait for a reading: it takes microseconds, unless probes come or go.
const PATIENCE: Duration = Duration::from_millis(250);
/// Time between two looks at whom the probes concern.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Time between two tries to put them on, and how long it is tried.
const TRY_EVERY: Duration = Duration::from_secs(1);
const TRY_MAX: Duration = Duration::from_secs(60);
/// How often it is asked whether a look has ended.
const BEAT: Duration = Duration::from_millis(10);
/// Readings between two looks at who else runs the file.
const EXCLUSIVE_CHECK_EVERY: u32 = 16;

/// What is to be counted, and how.
pub(super) struct Plan {
    /// The name of the meter.
    pub(super) id: String,
    pub(super) events: Vec<Counted>,
    pub(super) files: Files,
    /// A counter for each thread, within these limits; `None`: one for each CPU.
    pub(super) threads: Option<Limits>,
    /// Device and inode of the program that nobody else runs, where each CPU has a counter.
    pub(super) program: (u64, u64),
}

/// A question to the thread, and where the answer goes.
struct Question {
    workload: Workload,
    answer: SyncSender<Answer>,
}

/// What the thread answers.
struct Answer {
    reading: Result<f64, PlatformError>,
    /// Nothing will ever be read again.
    over: bool,
}

/// The meter. Its end is that of the thread.
pub(super) struct Probing {
    id: String,
    ask: SyncSender<Question>,
    /// As the last answer said.
    over: bool,
}

impl Probing {
    /// Begins to put the probes on.
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
        /// At the last look somebody else ran the program.
        strange: bool,
    },
}

enum State {
    /// They are not on yet.
    Trying {
        since: Instant,
        why: String,
    },
    Counting {
        counters: Counters,
        /// The last look has refused it for the moment. One that broke off, or found something short, says nothing of whom the
        /// probes concern: it takes two on end.
        doubtful: bool,
    },
    Over(PlatformError),
}

struct Worker {
    root: Root,
    /// As the last question said.
    workload: Workload,
    plan: Plan,
    state: State,
    /// What the counters before these had counted when it was told last.
    base: f64,
    /// What was told last.
    told: f64,
    /// Probes have been off since.
    torn: bool,
    /// Where the answer of a look comes from that is being taken: readings do not wait for it.
    looking: Option<Receiver<Result<(), Refusal>>>,
    /// When the last look ended.
    looked: Option<Instant>,
    /// Processes have come that are not counted yet.
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
                    // Who asked may have stopped to wait.
                    let _ = question.answer.try_send(Answer { reading, over });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Time until the next look.
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

    /// Begins a look.
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
                // Nobody may want to know any more.
                let _ = tell.try_send(allowed);
            });
        match begun {
            Ok(_) => self.looking = Some(told),
            Err(e) => self.ended(Some(Err(Refusal::Now(format!("no thread can be made: {e}"))))),
        }
    }

    /// A look has ended: what follows from it.
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
                    // For a lack of memory or descriptors, or of somebody who goes on, the next try may do better.
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
                        // Where nothing may be had for the moment, the next look tries again.
                        Ok(()) | Err(PlatformError::Busy { .. }) => {}
                        Err(e) => self.state = State::Over(e),
                    }
                }
            }
            (State::Counting { doubtful, .. }, Err(Refusal::Now(_))) if !*doubtful => *doubtful = true,
            // The end of the counters takes the probes off, as soon as nobody has to be waited for.
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
            // For whoever reads it, it has ended.
            self.state = State::Over(PlatformError::Vanished {
                target: format!("{what}: {why}; it"),
            });
        }
    }

    /// Writes down where breakpoints will be, and notes that some may be in.
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
                // Those that are new are counted after the next look.
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
                        // It may be a child of the workload's whose parent has ended, in the moment before it executes another
                        // program. Until that is known its hits are not told.
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
            // They went and came back since the last reading: this interval would lack what was done meanwhile.
            return Err(PlatformError::Busy {
                what: format!("meter {}", self.plan.id),
                why: "its probes were off for a moment".to_owned(),
            });
        }
        Ok(count)
    }
}
