//! The daemon's side: helpers, stuck helpers, and domains that are not read meanwhile.

use crate::mother::{Answer, Make, Mother, fork_mother};
use crate::wire::{Line, wait};
use crate::{Domain, GRACE, PATIENCE, STUCK_MAX, STUCK_OF_ONE, Service};
use homeostat_platform::PlatformError;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Most helpers at the same time. Beyond it the longest unused one ends. Each has 0.5 MiB of its own.
const HELPERS_MAX: usize = 8;
/// Longest wait for a new helper: two forks of a small process.
const MAKING: Duration = Duration::from_secs(1);
/// Time without requests after which a helper ends.
const IDLE: Duration = Duration::from_secs(120);
/// Time in which a killed process without a wait ends.
const DYING: Duration = Duration::from_secs(1);
/// Rest of a domain after a late answer, doubled at each repetition: short, as measured servers are asked each second.
const REST: Duration = Duration::from_secs(2);
const REST_MAX: Duration = Duration::from_secs(256);
/// Longest wait of the loop for requests about files of one non-root user, per period. Source: the loop may be late by
/// a second, and a request in progress may take [`PATIENCE`] more.
const WAITING_MAX: Duration = Duration::from_millis(250);
const WAITING_WITHIN: Duration = Duration::from_secs(30);
/// The same for requests of meters: two late answers, or more that were nearly late. The loop may be late by a second.
const LATE_MAX: Duration = Duration::from_secs(1);
/// An answer within this time counts as no wait: on a busy machine an honest one takes some milliseconds.
const AT_ONCE: Duration = Duration::from_millis(50);
/// Time without delay after which delays are forgotten.
const FORGET: Duration = Duration::from_secs(600);

static POOL: OnceLock<Mutex<Pool>> = OnceLock::new();

/// Reason why a helper was not asked, or has not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The answer did not come in time.
    #[error(
        "a file system or a lock that its programs brought along did not answer within {PATIENCE:?}, or the machine is too busy; it is \
         asked again"
    )]
    Late,
    /// The helper ended or sent an invalid answer.
    #[error("the helper process that reads for it broke off; another one reads after a rest")]
    BrokeOff,
    /// The answer to a single request did not come within this time.
    #[error(
        "its files could not be looked into within {0:?}: they are large, or their storage is slow; they are looked into again after a rest"
    )]
    Slow(Duration),
    /// Its helper was late a short while ago.
    #[error("it kept a helper process waiting a short while ago; it is asked again after a rest")]
    Resting,
    /// Number of its helpers that cannot be killed.
    #[error(
        "{0} helper processes hang for good in a file system that its programs brought along; they are read again when it answers \
         or is unmounted"
    )]
    Stuck(usize),
    /// Too many helpers of others cannot be killed.
    #[error(
        "{STUCK_MAX} helper processes hang for good in file systems of other users; it is read again when one comes back"
    )]
    Full,
    /// No helper can be made.
    #[error("no helper process can be had ({0}); restart homeostat if this lasts")]
    None(Errno),
}

/// Starts the mother of helpers. Call it with one thread and no lock; otherwise the first use does it.
pub fn start(service: &'static Service) {
    let mut pool = lock(service);
    if pool.mother.is_none() {
        pool.mother = fork_mother(service).ok();
    }
}

/// Domains whose programs are not read now, as sentences for people.
pub fn refused() -> Vec<String> {
    there().map_or_else(Vec::new, |mut pool| pool.refused(Instant::now()))
}

/// Asks the helper of a domain.
///
/// # Errors
/// `Busy`: the domain cannot be read now.
pub fn call<Q: Serialize, R: DeserializeOwned>(
    service: &'static Service,
    domain: Domain,
    request: &Q,
) -> Result<R, PlatformError> {
    lock(service)
        .call(domain, request)
        .map_err(|why| PlatformError::Busy {
            what: format!("reading what programs of {domain} publish"),
            why: why.to_string(),
        })
}

/// Asks a new helper for this one request, with its own time limit; meters go on. A descriptor may come with the reply.
///
/// # Errors
/// `Busy`: the domain cannot be asked now.
pub fn call_apart<Q: Serialize, R: DeserializeOwned>(
    service: &'static Service,
    domain: Domain,
    request: &Q,
    patience: Duration,
) -> Result<(R, Option<OwnedFd>), PlatformError> {
    let busy = |why: Refusal| PlatformError::Busy {
        what: format!("looking into programs of {domain}"),
        why: why.to_string(),
    };
    let helper = lock(service).apart(domain).map_err(busy)?;
    let begun = Instant::now();
    let deadline = Some(begun + patience);
    let said = helper
        .line
        .send(request, &[], deadline)
        .and_then(|()| helper.line.receive_with::<R>(deadline));
    let served = said.is_ok();
    let waited = (patience <= PATIENCE).then(|| begun.elapsed());
    lock(service).ended_apart(domain, helper, served, waited.unwrap_or_default());
    match said {
        Ok((reply, files)) => Ok((reply, files.into_iter().next())),
        Err(Errno::TIMEDOUT) => Err(busy(Refusal::Slow(patience))),
        Err(_) => Err(busy(Refusal::BrokeOff)),
    }
}

/// Notifies the helper of a domain, if there is one.
pub fn tell<Q: Serialize>(domain: Domain, request: &Q) {
    let Some(mut pool) = there() else { return };
    if let Some(helper) = pool.helpers.get(&domain) {
        if helper
            .line
            .send(request, &[], Some(Instant::now() + PATIENCE))
            .is_err()
        {
            pool.abandon(domain);
        }
    }
}

fn lock(service: &'static Service) -> MutexGuard<'static, Pool> {
    let pool = POOL.get_or_init(|| Mutex::new(Pool::new(service)));
    // A panicking thread left it consistent.
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pool, if there was a request or a mother was started.
pub(crate) fn there() -> Option<MutexGuard<'static, Pool>> {
    POOL.get()
        .map(|pool| pool.lock().unwrap_or_else(PoisonError::into_inner))
}

#[derive(Debug)]
struct Helper {
    line: Line,
    /// A descriptor for each of its processes.
    processes: Vec<OwnedFd>,
    asked: Instant,
    /// Since when an abandoned answer is late.
    owes: Option<Instant>,
}

enum Unanswered {
    /// It may still come.
    Yet,
    /// It will not come.
    For(Errno),
}

impl Helper {
    /// Asks, and waits for [`PATIENCE`]. Owed answers come first, and are dropped. `may_ask`: whether to ask again.
    fn answer_to<Q: Serialize, R: DeserializeOwned>(
        &mut self,
        request: &Q,
        now: Instant,
        may_ask: bool,
    ) -> Result<R, Unanswered> {
        if let Some(since) = self.owes {
            match wait(&self.line.0, PollFlags::IN, Some(now)) {
                Err(Errno::TIMEDOUT) if now < since + GRACE => return Err(Unanswered::Yet),
                Err(e) => return Err(Unanswered::For(e)),
                Ok(()) => {
                    self.receive::<IgnoredAny>()?;
                    self.owes = None;
                }
            }
        }
        if !may_ask {
            return Err(Unanswered::Yet);
        }
        let deadline = Some(Instant::now() + PATIENCE);
        self.line.send(request, &[], deadline).map_err(Unanswered::For)?;
        match wait(&self.line.0, PollFlags::IN, deadline) {
            Ok(()) => self.receive(),
            Err(Errno::TIMEDOUT) => {
                self.owes = Some(Instant::now());
                Err(Unanswered::Yet)
            }
            Err(e) => Err(Unanswered::For(e)),
        }
    }

    /// Receives an answer that has begun.
    fn receive<R: DeserializeOwned>(&self) -> Result<R, Unanswered> {
        let deadline = Some(Instant::now() + PATIENCE);
        self.line.receive(deadline).map_err(Unanswered::For)
    }
}

#[derive(Debug)]
struct Abandoned {
    domain: Domain,
    processes: Vec<OwnedFd>,
    at: Instant,
}

impl Abandoned {
    /// Whether it has not ended, although it was killed a while ago.
    fn is_stuck(&self, now: Instant) -> bool {
        now > self.at + DYING
    }
}

/// How often a domain has kept a helper waiting.
#[derive(Debug)]
struct Lateness {
    times: u32,
    rests_until: Instant,
    last: Instant,
}

/// The helpers of this program.
#[derive(Debug)]
pub struct Pool {
    service: &'static Service,
    mother: Option<Mother>,
    helpers: BTreeMap<Domain, Helper>,
    /// Killed helpers that have not ended yet.
    dying: Vec<Abandoned>,
    late: BTreeMap<Domain, Lateness>,
    /// Delays of helpers for single requests.
    late_apart: BTreeMap<Domain, Lateness>,
    /// Wait for them since then, by domain.
    waited: BTreeMap<Domain, (Instant, Duration)>,
    /// The same for requests of meters.
    waited_for_meters: BTreeMap<Domain, (Instant, Duration)>,
}

impl Pool {
    /// A pool without helpers.
    pub fn new(service: &'static Service) -> Self {
        Self {
            service,
            mother: None,
            helpers: BTreeMap::new(),
            dying: Vec::new(),
            late: BTreeMap::new(),
            late_apart: BTreeMap::new(),
            waited: BTreeMap::new(),
            waited_for_meters: BTreeMap::new(),
        }
    }

    /// Asks the helper of a domain.
    ///
    /// # Errors
    /// It was not asked, or has not answered.
    pub fn call<Q: Serialize, R: DeserializeOwned>(
        &mut self,
        domain: Domain,
        request: &Q,
    ) -> Result<R, Refusal> {
        let now = Instant::now();
        self.forget(now);
        if let Some(why) = self.why_not(domain, now) {
            return Err(why);
        }
        if !self.helpers.contains_key(&domain) {
            let helper = self.make(domain).map_err(Refusal::None)?;
            self.helpers.insert(domain, helper);
        }
        let Some(helper) = self.helpers.get_mut(&domain) else {
            return Err(Refusal::None(Errno::SRCH));
        };
        helper.asked = now;
        let waited = self.waited_for_meters.get(&domain);
        let may_ask = domain == Domain(0) || waited.is_none_or(|(_, waited)| *waited <= LATE_MAX);
        let answer = helper.answer_to(request, now, may_ask);
        let waited = now.elapsed();
        if waited > AT_ONCE {
            self.waited_for_meters
                .entry(domain)
                .or_insert((now, Duration::ZERO))
                .1 += waited;
        }
        match answer {
            Ok(reply) => Ok(reply),
            Err(Unanswered::Yet) => Err(Refusal::Late),
            Err(Unanswered::For(errno)) => {
                self.was_late(domain);
                Err(if errno == Errno::TIMEDOUT {
                    Refusal::Late
                } else {
                    Refusal::BrokeOff
                })
            }
        }
    }

    fn forget(&mut self, now: Instant) {
        self.dying
            .retain(|helper| !helper.processes.iter().all(has_ended));
        self.late.retain(|_, late| now < late.last + FORGET);
        self.late_apart.retain(|_, late| now < late.last + FORGET);
        for waited in [&mut self.waited, &mut self.waited_for_meters] {
            waited.retain(|_, (since, _)| now < *since + WAITING_WITHIN);
        }
        let idle = |helper: &Helper| now > helper.asked + IDLE;
        let ended: Vec<Domain> = self
            .helpers
            .iter()
            .filter_map(|(domain, helper)| idle(helper).then_some(*domain))
            .collect();
        for domain in ended {
            self.abandon(domain);
        }
    }

    fn stuck(&self, domain: Domain, now: Instant) -> usize {
        let of_it = |helper: &&Abandoned| helper.domain == domain && helper.is_stuck(now);
        self.dying.iter().filter(of_it).count()
    }

    /// A helper for a single request.
    fn apart(&mut self, domain: Domain) -> Result<Helper, Refusal> {
        let now = Instant::now();
        self.forget(now);
        let waited = self
            .waited
            .get(&domain)
            .is_some_and(|(_, waited)| *waited > WAITING_MAX);
        if waited && domain != Domain(0) {
            return Err(Refusal::Resting);
        }
        if let Some(why) = self.why_not_by(&self.late_apart, domain, now) {
            return Err(why);
        }
        self.fork(domain).map_err(Refusal::None)
    }

    /// A helper for a single request has served and ends by itself; otherwise it is killed.
    fn ended_apart(&mut self, domain: Domain, helper: Helper, served: bool, waited: Duration) {
        let now = Instant::now();
        self.waited.entry(domain).or_insert((now, Duration::ZERO)).1 += waited;
        if !served {
            self.kill(domain, helper);
            note(&mut self.late_apart, domain, now);
        }
    }

    fn why_not(&self, domain: Domain, now: Instant) -> Option<Refusal> {
        self.why_not_by(&self.late, domain, now)
    }

    fn why_not_by(&self, late: &BTreeMap<Domain, Lateness>, domain: Domain, now: Instant) -> Option<Refusal> {
        let stuck = self.stuck(domain, now);
        if stuck >= STUCK_OF_ONE {
            return Some(Refusal::Stuck(stuck));
        }
        if self.dying.iter().filter(|helper| helper.is_stuck(now)).count() >= STUCK_MAX {
            return Some(Refusal::Full);
        }
        let late = late.get(&domain)?;
        (now < late.rests_until).then_some(Refusal::Resting)
    }

    /// Domains whose programs are not read now, as sentences for people.
    pub fn refused(&mut self, now: Instant) -> Vec<String> {
        self.forget(now);
        let known: std::collections::BTreeSet<Domain> = self
            .late
            .keys()
            .copied()
            .chain(self.dying.iter().map(|helper| helper.domain))
            .collect();
        known
            .into_iter()
            .filter_map(|domain| {
                let why = self.why_not(domain, now)?;
                Some(format!("what programs of {domain} publish is not read: {why}"))
            })
            .collect()
    }

    /// Kills the helper of a domain, without a wait.
    fn abandon(&mut self, domain: Domain) {
        if let Some(helper) = self.helpers.remove(&domain) {
            self.kill(domain, helper);
        }
    }

    fn kill(&mut self, domain: Domain, helper: Helper) {
        for process in &helper.processes {
            // An error means that it has ended.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        self.dying.push(Abandoned {
            domain,
            processes: helper.processes,
            at: Instant::now(),
        });
    }

    fn was_late(&mut self, domain: Domain) {
        self.abandon(domain);
        note(&mut self.late, domain, Instant::now());
    }

    fn make(&mut self, domain: Domain) -> Result<Helper, Errno> {
        while self.helpers.len() >= HELPERS_MAX {
            let oldest = self.helpers.iter().min_by_key(|(_, helper)| helper.asked);
            let Some(oldest) = oldest.map(|(domain, _)| *domain) else {
                break;
            };
            self.abandon(oldest);
        }
        self.fork(domain)
    }

    /// Drops a mother who has ended or was late, and her helpers. The next use forks another. Her late answer must not
    /// pass for the next one: it is the helper of another domain.
    fn lose_mother(&mut self) {
        self.mother = None;
        for (domain, helper) in std::mem::take(&mut self.helpers) {
            self.kill(domain, helper);
        }
    }

    fn fork(&mut self, domain: Domain) -> Result<Helper, Errno> {
        let (_, descriptors) = self.ask_mother(&Make::Helper(domain))?;
        let mut descriptors = descriptors.into_iter();
        let line = Line(descriptors.next().ok_or(Errno::PROTO)?);
        Ok(Helper {
            line,
            processes: descriptors.collect(),
            asked: Instant::now(),
            owes: None,
        })
    }

    /// Has the mother make something. Returns her answer and its descriptors.
    pub(crate) fn ask_mother(&mut self, make: &Make) -> Result<(Answer, Vec<OwnedFd>), Errno> {
        let mother = match &self.mother {
            Some(mother) => mother,
            None => self.mother.insert(fork_mother(self.service)?),
        };
        let deadline = Some(Instant::now() + MAKING);
        let answer = mother
            .line
            .send(make, &[], deadline)
            .and_then(|()| mother.line.receive_with::<Answer>(deadline));
        let (answer, descriptors) = answer.inspect_err(|_| self.lose_mother())?;
        if let Answer::Failed(errno) = answer {
            return Err(Errno::from_raw_os_error(errno));
        }
        Ok((answer, descriptors))
    }
}

fn note(late: &mut BTreeMap<Domain, Lateness>, domain: Domain, now: Instant) {
    let late = late.entry(domain).or_insert(Lateness {
        times: 0,
        rests_until: now,
        last: now,
    });
    let rest = REST * 2u32.saturating_pow(late.times.min(7));
    late.times += 1;
    late.last = now;
    late.rests_until = now + rest.min(REST_MAX);
}

#[cfg(feature = "testing")]
impl Pool {
    /// The processes of a domain's helper: its opener and its speaker.
    pub fn processes(&self, domain: Domain) -> impl Iterator<Item = &OwnedFd> {
        self.helpers
            .get(&domain)
            .into_iter()
            .flat_map(|helper| &helper.processes)
    }

    /// The process of the mother.
    pub fn mother(&self) -> Option<&OwnedFd> {
        self.mother.as_ref().map(|mother| &mother.process)
    }

    /// Sets the time waited for answers of a domain.
    pub fn wait_for(&mut self, domain: Domain, waited: Duration) {
        self.waited_for_meters.insert(domain, (Instant::now(), waited));
    }

    /// Adds a process that was killed and does not end.
    pub fn hang(&mut self, domain: Domain, process: OwnedFd) {
        self.dying.push(Abandoned {
            domain,
            processes: vec![process],
            at: Instant::now() - DYING * 2,
        });
    }
}

/// Whether a process has ended, by its descriptor.
pub(crate) fn has_ended(process: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}
