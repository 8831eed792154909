//! The wrapper around a platform, and the faults of its calls.

use super::{Breach, CALLS_MAX, Faults, Kind, State, pick};
use crate::checkers::{Call, Hand, Picture};
use homeostat_model::{
    Action, Direction, Locality, Machine, MemoryMap, MeterCandidate, MeterId, Nanoseconds, Progress,
    Snapshot, UndoRecord, WorkloadId,
};
use homeostat_platform::{Clock, Effectors, LostMeter, PlatformError, SampleRequest, Sensors};
use homeostat_statistics::simulation::Random;

fn killed() -> PlatformError {
    PlatformError::Busy {
        what: "any call".into(),
        why: "the daemon was killed".into(),
    }
}

/// A platform whose calls may fail, lie as real machines do, or be the daemon's last.
pub struct Faulty<P, C> {
    inner: P,
    clock: C,
    faults: Faults,
    picture: PictureOf,
}

/// Takes a picture of the machine.
pub type PictureOf = std::rc::Rc<dyn Fn() -> Picture>;

impl<P: Clone, C: Clone> Clone for Faulty<P, C> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            clock: self.clock.clone(),
            faults: self.faults.clone(),
            picture: self.picture.clone(),
        }
    }
}

impl<P, C: Clock> Faulty<P, C> {
    /// Wraps a platform. `clock` advances in slow calls; `picture` attributes changes.
    pub fn new(inner: P, clock: C, faults: Faults, picture: PictureOf) -> Self {
        Self {
            inner,
            clock,
            faults,
            picture,
        }
    }

    /// A sensor call other than `sample`: killed, refused or passed on.
    fn sense<T>(
        &mut self,
        refusal: Kind,
        what: &str,
        call: impl FnOnce(&mut P) -> Result<T, PlatformError>,
    ) -> Result<T, PlatformError> {
        {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if s.strikes(refusal) || now < s.sensors_out_until {
                return Err(refused(&mut s.random, what));
            }
        }
        let result = call(&mut self.inner);
        if self.faults.lock().call_ends() {
            return Err(killed());
        }
        result
    }
}

fn refused(random: &mut Random, what: &str) -> PlatformError {
    let what = what.to_owned();
    match random.next_u64() % 4 {
        0 => PlatformError::Denied {
            what,
            needs: "CAP_SYS_PTRACE".into(),
        },
        1 => PlatformError::Vanished { target: what },
        2 => PlatformError::Malformed {
            path: "/proc".into(),
            line: "\u{fffd}\u{fffd}".into(),
        },
        _ => PlatformError::Busy {
            what,
            why: "ENOMEM".into(),
        },
    }
}

impl<P: Sensors, C: Clock> Sensors for Faulty<P, C> {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        self.sense(Kind::SampleLost, "the machine", Sensors::machine)
    }

    fn keep_canary(&mut self, wanted: bool) {
        self.inner.keep_canary(wanted);
    }

    fn sample(&mut self, request: &SampleRequest) -> Result<Snapshot, PlatformError> {
        {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if s.strikes(Kind::SampleLost) || now < s.sensors_out_until {
                return Err(refused(&mut s.random, "a sample"));
            }
            if s.strikes(Kind::StaleSample) {
                if let Some(stale) = s.last.clone() {
                    return Ok(stale);
                }
            }
        }
        let result = self.inner.sample(request);
        let mut s = self.faults.lock();
        if s.call_ends() {
            return Err(killed());
        }
        let mut snapshot = result?;
        let offset = s.wall_offset;
        snapshot.unix_seconds = snapshot.unix_seconds.saturating_add_signed(offset);
        s.spoil(&mut snapshot);
        if s.plan.rate(Kind::StaleSample) > 0.0 {
            s.last = Some(snapshot.clone());
        }
        Ok(snapshot)
    }

    fn inspect_memory(&mut self, workload: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        let mut map = self.sense(Kind::InspectionRefused, "its memory", |p| {
            p.inspect_memory(workload)
        })?;
        let mut s = self.faults.lock();
        if s.strikes(Kind::InspectionGarbage) {
            map.truncated = true;
            for region in &mut map.regions {
                match s.random.next_u64() % 5 {
                    0 => region.resident.0 = u64::MAX,
                    1 => region.referenced.0 = u64::MAX,
                    2 => region.resident.0 = 0,
                    3 => region.pieces.full = u32::MAX,
                    _ => region.convertible.clear(),
                }
            }
        }
        Ok(map)
    }

    fn inspect_locality(&mut self, workload: &WorkloadId) -> Result<Locality, PlatformError> {
        let mut locality = self.sense(Kind::InspectionRefused, "its places", |p| {
            p.inspect_locality(workload)
        })?;
        let mut s = self.faults.lock();
        if s.strikes(Kind::InspectionGarbage) {
            let bad = bad_number(&mut s.random);
            for running in locality.running.values_mut() {
                *running = bad;
            }
            match s.random.next_u64() % 4 {
                0 => locality.running.clear(),
                1 => locality.private.clear(),
                2 => locality.private.values_mut().for_each(|b| b.0 = u64::MAX),
                _ => locality.threads = 0,
            }
            if let Some(counters) = &mut locality.counters {
                counters.local_share = bad;
                counters.memory_stall_share = bad;
                counters.prefetch_share = bad;
            }
        }
        Ok(locality)
    }

    fn find_meters(&mut self, workload: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        self.sense(Kind::MeterRefused, "its meters", |p| p.find_meters(workload))
    }

    fn open_meter(&mut self, workload: &WorkloadId, meter: &MeterId) -> Result<(), PlatformError> {
        self.sense(Kind::MeterRefused, "a meter", |p| p.open_meter(workload, meter))
    }

    fn close_meter(&mut self, workload: &WorkloadId, meter: &MeterId) {
        if !self.faults.lock().call_begins() {
            self.inner.close_meter(workload, meter);
        }
    }

    fn take_lost_meters(&mut self) -> Vec<LostMeter> {
        self.inner.take_lost_meters()
    }
}

fn bad_number(random: &mut Random) -> f64 {
    const BAD: [f64; 8] = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -1.0,
        -1e30,
        1e300,
        0.0,
        f64::MIN_POSITIVE,
    ];
    pick(random, &BAD).copied().unwrap_or(f64::NAN)
}

fn bad_amount(random: &mut Random) -> u64 {
    const BAD: [u64; 6] = [0, 1, u64::MAX, u64::MAX / 2, 1 << 63, u64::MAX - 1000];
    pick(random, &BAD).copied().unwrap_or(0)
}

impl State {
    fn spoil(&mut self, snapshot: &mut Snapshot) {
        if self.strikes(Kind::TimeStandsStill) {
            snapshot.interval = Nanoseconds::ZERO;
            if let Some(last) = &self.last {
                snapshot.at = last.at;
            }
            for sample in &mut snapshot.samples {
                sample.interval = Nanoseconds::ZERO;
                sample
                    .meters
                    .iter_mut()
                    .for_each(|m| m.interval = Nanoseconds::ZERO);
            }
        }
        if self.strikes(Kind::MetersSilent) {
            snapshot.samples.iter_mut().for_each(|s| s.meters.clear());
        }
        if self.strikes(Kind::CounterWrap) {
            let near = u64::MAX - self.random.next_u64() % 1_000_000;
            for sample in &mut snapshot.samples {
                match self.random.next_u64() % 4 {
                    0 => sample.cpu = Nanoseconds(near),
                    1 => sample.faults_minor = near,
                    2 => sample.runqueue_wait = Nanoseconds(near),
                    _ => sample.meters.iter_mut().for_each(|m| m.work = near as f64),
                }
            }
        }
        if self.strikes(Kind::GarbageValues) {
            self.garble(snapshot);
        }
        if self.strikes(Kind::WorkloadMissed) {
            let n = self.random.next_u64() as usize;
            if let Some(list) = &mut snapshot.workloads {
                if !list.is_empty() {
                    let gone = list.remove(n % list.len());
                    snapshot.samples.retain(|s| s.id != gone.id);
                }
            }
        }
        if self.strikes(Kind::DuplicateWorkloads) {
            if let Some(list) = &mut snapshot.workloads {
                if let Some(one) = list.first().cloned() {
                    list.push(one);
                }
            }
            if let Some(one) = snapshot.samples.first().cloned() {
                snapshot.samples.push(one.clone());
                let mut stranger = one;
                stranger.id = "stranger".into();
                snapshot.samples.push(stranger);
            }
        }
    }

    fn garble(&mut self, snapshot: &mut Snapshot) {
        let random = &mut self.random;
        match random.next_u64() % 6 {
            0 => snapshot.interval = Nanoseconds(bad_amount(random)),
            1 => snapshot.machine.cpu_busy = Nanoseconds(bad_amount(random)),
            2 => snapshot.machine.memory_free.0 = bad_amount(random),
            3 => snapshot.machine.pressure_memory.some = Nanoseconds(bad_amount(random)),
            4 => snapshot.own_cpu = Nanoseconds(bad_amount(random)),
            _ => snapshot.unix_seconds = bad_amount(random),
        }
        for sample in &mut snapshot.samples {
            match random.next_u64() % 10 {
                0 => sample.interval = Nanoseconds(bad_amount(random)),
                1 => sample.cpu = Nanoseconds(bad_amount(random)),
                2 => sample.runqueue_wait = Nanoseconds(bad_amount(random)),
                3 => sample.resident.0 = bad_amount(random),
                4 => sample.age = Nanoseconds(bad_amount(random)),
                5 => sample.threads = 0,
                6 => sample.churn = u32::MAX,
                7 => sample
                    .meters
                    .iter_mut()
                    .for_each(|m| m.interval = Nanoseconds(bad_amount(random))),
                _ => sample.meters.iter_mut().for_each(|m| m.work = bad_number(random)),
            }
        }
        if let Some(list) = &mut snapshot.workloads {
            if random.next_u64() % 4 == 0 {
                if let Some(one) = list.first_mut() {
                    one.processes.clear();
                }
            }
        }
    }

    fn refusal(
        &mut self,
        record: &Action,
        direction: Option<Direction>,
        now: Nanoseconds,
    ) -> Option<PlatformError> {
        let what = || format!("{} on {}", record.effector, record.workload);
        if now < self.effectors_out_until {
            return Some(PlatformError::Busy {
                what: what(),
                why: "EBUSY for some time".into(),
            });
        }
        if self.strikes(Kind::Denied) {
            return Some(PlatformError::Denied {
                what: what(),
                needs: "CAP_SYS_NICE".into(),
            });
        }
        if self.strikes(Kind::Busy) {
            return Some(PlatformError::Busy {
                what: what(),
                why: "EBUSY".into(),
            });
        }
        if self.strikes(Kind::NoMemory) {
            return Some(PlatformError::Rejected {
                what: what(),
                value: "1".into(),
                errno: "ENOMEM".into(),
            });
        }
        if direction != Some(Direction::Undo) {
            if self.strikes(Kind::Vanished) {
                return Some(PlatformError::Vanished {
                    target: record.workload.to_string(),
                });
            }
            if self.strikes(Kind::Unsupported) {
                return Some(PlatformError::Unsupported {
                    what: what(),
                    why: "ENOSYS".into(),
                });
            }
        }
        None
    }

    /// Looks for an action's record on disk, not in the memory of the code under test.
    fn must_be_recorded(&mut self, action: &Action) {
        let on_disk = homeostat_store::journal::read(&self.disk.directory)
            .is_ok_and(|found| found.owed.contains_key(&action.id));
        if !on_disk {
            self.broken.push((
                Breach::Unrecorded,
                format!(
                    "action {} ({} on {}) reached the machine before its undo record was on disk",
                    action.id, action.effector, action.workload
                ),
            ));
        }
    }

    fn slowed(&mut self, record: &UndoRecord, direction: Direction, mut progress: Progress) -> Progress {
        // Only for a change: no kernel denies a finished undo.
        if direction == Direction::Apply
            && (self.never_done.contains(&record.action.id.0) || self.strikes(Kind::NeverDone))
        {
            self.never_done.insert(record.action.id.0);
            progress.done = false;
        } else if progress.done && direction == Direction::Apply && self.strikes(Kind::Partial) {
            let lost = progress.total - progress.total / 3;
            progress.finished = progress.total - lost;
            progress.skipped.insert("EIO".into(), lost);
        }
        if !progress.done && self.strikes(Kind::EndlessPause) {
            progress.pause = Nanoseconds(u64::MAX);
        }
        progress
    }

    fn log(&mut self, call: Call, outcome: &str) {
        let direction = match call.direction {
            None => "prepare",
            Some(Direction::Apply) => "apply",
            Some(Direction::Undo) => "undo",
        };
        self.trace.line(format!(
            "{direction} {} {} {}: {outcome}",
            call.action, call.effector, call.workload
        ));
        if self.calls.len() < CALLS_MAX {
            self.calls.push(call);
        }
    }
}

impl<P: Effectors, C: Clock> Effectors for Faulty<P, C> {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        let call = Call::of(action, None);
        {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if let Some(error) = s.refusal(action, None, now) {
                s.log(call, &error.to_string());
                return Err(error);
            }
        }
        let before = (self.picture)();
        self.faults.lock().note(Hand::Machine, before.clone());
        let result = self.inner.prepare(action);
        let after = (self.picture)();
        let mut s = self.faults.lock();
        // Preparing must change nothing: a change now is ours and nothing will undo it.
        s.note(Hand::Ours, after);
        let outcome = result
            .as_ref()
            .map_or_else(ToString::to_string, |_| "prepared".to_owned());
        s.log(call, &outcome);
        if s.call_ends() {
            return Err(killed());
        }
        result
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let action = &record.action;
        let mut call = Call::of(action, Some(direction));
        let slow = {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if let Some(error) = s.refusal(action, Some(direction), now) {
                s.log(call, &error.to_string());
                return Err(error);
            }
            if direction == Direction::Apply && s.covered.insert(action.id.0) {
                s.must_be_recorded(action);
            }
            let slow = s.strikes(Kind::SlowSlice).then(|| s.random.uniform() * 30.0);
            slow.map(Nanoseconds::from_secs_f64)
        };
        if let Some(length) = slow {
            self.clock.sleep(length);
        }
        let before = (self.picture)();
        self.faults.lock().note(Hand::Machine, before);
        let result = self.inner.advance(record, direction);
        let after = (self.picture)();
        let mut s = self.faults.lock();
        s.note(Hand::Ours, after);
        let result = result.map(|progress| s.slowed(record, direction, progress));
        call.reached = !matches!(&result, Err(PlatformError::Vanished { .. }));
        call.done = match &result {
            Ok(progress) => progress.done,
            // A vanished target has nothing to undo.
            Err(PlatformError::Vanished { .. }) => true,
            Err(_) => false,
        };
        let outcome = match &result {
            Ok(p) if p.done => format!("done {}/{} {:?}", p.finished, p.total, p.skipped),
            Ok(p) => format!("{}/{}", p.finished, p.total),
            Err(e) => e.to_string(),
        };
        s.log(call, &outcome);
        if s.call_ends() {
            return Err(killed());
        }
        result
    }

    fn forget(&mut self, record: &UndoRecord) {
        let mut s = self.faults.lock();
        s.never_done.remove(&record.action.id.0);
        if !s.call_begins() {
            drop(s);
            self.inner.forget(record);
        }
    }
}

/// The clock of a faulty platform: the wall clock may jump.
#[derive(Clone, Debug)]
pub struct FaultyClock<C> {
    inner: C,
    faults: Faults,
}

impl<C> FaultyClock<C> {
    /// Wraps a clock.
    pub fn new(inner: C, faults: Faults) -> Self {
        Self { inner, faults }
    }
}

impl<C: Clock> Clock for FaultyClock<C> {
    fn now(&self) -> Nanoseconds {
        self.inner.now()
    }
    fn unix_seconds(&self) -> u64 {
        let offset = self.faults.lock().wall_offset;
        self.inner.unix_seconds().saturating_add_signed(offset)
    }
    fn sleep(&self, length: Nanoseconds) {
        self.inner.sleep(length);
    }
}
