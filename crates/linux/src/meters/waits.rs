//! How often the threads of a program have waited: their voluntary context switches, which the kernel counts anyway. Of a server that gives
//! a thread to each connection that tells what it did while nothing else of it was counted
//! ([`Calibration`](super::turns::Calibration)).

use super::common::{PROCESSES_MAX, open_process, read_at};
use super::discovery::waits_for_several;
use super::kernel::voluntary_switches;
use crate::Root;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Most threads: each costs a file of about 15 µs, also at both ends of a window of some 45 ms.
const THREADS_MAX: usize = 128;
/// What threads that have ended did since they were looked at last is not known: that may be this share of all.
const ENDED_MAX: f64 = 0.01;
/// What the busiest wait for is looked at so often at most …
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// … of so many of them …
const LOOK_AT: usize = 8;
/// … until so many were seen, the oldest forgotten by half; it is judged from half as many on.
const SEEN_MAX: f64 = 128.0;
/// Where a larger share of them waits for several connections at once, threads are not given to connections.
const SEVERAL_MAX: f64 = 0.1;

/// A thread.
type Key = (ProcessId, i32);

#[derive(Clone, Copy, Debug)]
struct Thread {
    waits: u64,
    /// Since the look before (each second).
    rate: f64,
    /// It was not there at the last look: it may have been overlooked, as threads come and go while they are listed.
    missed: bool,
}

/// The waits of a workload.
#[derive(Debug)]
pub(super) struct Waits {
    root: Root,
    threads: BTreeMap<Key, Thread>,
    /// When they were looked at last.
    at: Option<Instant>,
    total: f64,
    looked: Option<Instant>,
    /// Waits of the busiest that were looked at, and of these those for several connections at once.
    seen: (f64, f64),
}

impl Waits {
    /// Begins with nothing.
    ///
    /// # Errors
    /// A sentence: they cannot be told.
    pub(super) fn begin(root: &Root, workload: &Workload) -> Result<Self, String> {
        let mut this = Self {
            root: root.clone(),
            threads: BTreeMap::new(),
            at: None,
            total: 0.0,
            looked: None,
            seen: (0.0, 0.0),
        };
        this.read(workload).map_err(|e| e.to_string())?;
        Ok(this)
    }

    /// How often they have waited since the first look.
    ///
    /// # Errors
    /// `Busy`: how often since the last look is not known; the next look goes on from here. `Unsupported`: it does not tell its work.
    pub(super) fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let first = self.at.is_none();
        let mut now = BTreeMap::new();
        for process in workload.processes.iter().take(PROCESSES_MAX) {
            match voluntary_switches(&self.root, *process) {
                Ok(threads) => now.extend(threads.into_iter().map(|(tid, waits)| ((*process, tid), waits))),
                Err(PlatformError::Vanished { .. }) => {}
                Err(e) => {
                    // What has been done until it can be read again is not known.
                    self.threads.clear();
                    self.at = None;
                    return Err(e);
                }
            }
        }
        if now.len() > THREADS_MAX {
            return Err(unsupported(format!(
                "it has {} threads, and adding up how often each waits would cost too much (at most {THREADS_MAX})",
                now.len()
            )));
        }
        let before = self.at.replace(Instant::now());
        let seconds = before.map_or(0.0, |then| then.elapsed().as_secs_f64()).max(1e-6);
        let (mut grown, mut ended) = (0.0, 0.0);
        self.threads.retain(|key, thread| {
            if now.contains_key(key) {
                return true;
            }
            let is_new = !std::mem::replace(&mut thread.missed, true);
            if is_new {
                ended += thread.rate * seconds;
            }
            is_new
        });
        for (key, waits) in now {
            let known = self.threads.get(&key).map_or(0, |t| t.waits);
            // What was before the first look is not ours; a thread that has come since has done all since.
            let more = if first { 0 } else { waits.saturating_sub(known) };
            grown += more as f64;
            let thread = Thread {
                waits,
                rate: more as f64 / seconds,
                missed: false,
            };
            self.threads.insert(key, thread);
        }
        self.total += grown;
        self.look()?;
        if ended > ENDED_MAX * grown {
            return Err(PlatformError::Busy {
                what: "telling its work by how often it waits".to_owned(),
                why: format!(
                    "threads have ended that did {:.0} % of it",
                    100.0 * ended / (ended + grown)
                ),
            });
        }
        Ok(self.total)
    }

    /// Looks what those wait for that wait most.
    fn look(&mut self) -> Result<(), PlatformError> {
        if self.looked.is_some_and(|then| then.elapsed() < LOOK_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let mut busiest: Vec<(&Key, f64)> = self.threads.iter().map(|(key, t)| (key, t.rate)).collect();
        busiest.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut buffer = [0u8; 256];
        for ((process, tid), _) in busiest.into_iter().take(LOOK_AT).filter(|(_, rate)| *rate > 0.0) {
            // Where it is not told, or the thread has ended, nothing is known of it.
            let several = open_process(&self.root, *process)
                .ok()
                .and_then(|dir| read_at(&dir, &format!("task/{tid}/syscall"), &mut buffer).ok())
                .and_then(|n| waits_for_several(buffer.get(..n)?));
            if let Some(several) = several {
                self.seen.0 += 1.0;
                self.seen.1 += f64::from(u8::from(several));
            }
        }
        let (seen, several) = self.seen;
        if seen >= SEEN_MAX {
            self.seen = (seen / 2.0, several / 2.0);
        }
        if seen >= SEEN_MAX / 2.0 && several > SEVERAL_MAX * seen {
            return Err(unsupported(format!(
                "its threads wait for several connections at once ({:.0} % of the waits of its busiest), as those of a pool do, so they do not wait \
                 once for each command",
                100.0 * several / seen
            )));
        }
        Ok(())
    }
}

fn unsupported(why: String) -> PlatformError {
    PlatformError::Unsupported {
        what: "telling its work by how often it waits".to_owned(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Fingerprint, OperatorChoice, WorkloadKind};

    const PROCESS: ProcessId = ProcessId {
        pid: 7,
        start_ticks: 9,
    };

    /// A captured process.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            let this = Self(tempfile::tempdir().unwrap());
            std::fs::create_dir_all(this.task("")).unwrap();
            let mut stat = b"7 (x) S".to_vec();
            (4..22).for_each(|_| stat.extend_from_slice(b" 0"));
            stat.extend_from_slice(b" 9 0 0\n");
            std::fs::write(this.0.path().join("proc/7/stat"), stat).unwrap();
            this
        }
        fn task(&self, file: &str) -> std::path::PathBuf {
            self.0.path().join("proc/7/task").join(file)
        }
        fn put(&self, thread: usize, waits: u64, syscall: &str) {
            std::fs::create_dir_all(self.task(&thread.to_string())).unwrap();
            let status = format!("Name:\tx\nvoluntary_ctxt_switches:\t{waits}\n");
            std::fs::write(self.task(&format!("{thread}/status")), status).unwrap();
            std::fs::write(self.task(&format!("{thread}/syscall")), syscall).unwrap();
        }
        fn end(&self, thread: usize) {
            std::fs::remove_dir_all(self.task(&thread.to_string())).unwrap();
        }
        fn begin(&self) -> Waits {
            Waits::begin(&Root::new(self.0.path()), &workload()).unwrap()
        }
    }

    fn workload() -> Workload {
        Workload {
            id: "x".into(),
            kind: WorkloadKind::ProcessGroup,
            fingerprint: Fingerprint::new("x"),
            program: "x".into(),
            executable: String::new(),
            processes: vec![PROCESS],
            choice: OperatorChoice::default(),
        }
    }

    /// poll for one connection, and epoll_wait for up to a thousand.
    const ONE: &str = "7 0x7f 0x1 0xffff 0x0 0x0 0x0 0x7ff 0x7fe\n";
    const SEVERAL: &str = "232 0x7 0x7f 0x400 0xffff 0x0 0x0 0x7ff 0x7fe\n";

    #[test]
    fn waits_add_up_from_the_first_look_and_a_new_thread_has_done_all_since() {
        let tree = Tree::new();
        tree.put(7, 1_000, ONE);
        let mut waits = tree.begin();
        assert_eq!(waits.read(&workload()).unwrap(), 0.0);
        tree.put(7, 1_400, ONE);
        tree.put(8, 30, ONE);
        assert_eq!(waits.read(&workload()).unwrap(), 430.0);
    }

    #[test]
    fn a_busy_thread_that_has_ended_takes_its_waits_along_and_one_that_was_overlooked_does_not() {
        let tree = Tree::new();
        for thread in [7, 8, 9] {
            tree.put(thread, 0, ONE);
        }
        let mut waits = tree.begin();
        for (thread, done) in [(7, 1_000), (8, 1_000), (9, 1)] {
            tree.put(thread, done, ONE);
        }
        assert_eq!(waits.read(&workload()).unwrap(), 2_001.0);
        std::thread::sleep(Duration::from_millis(5));
        // Whoever hardly did anything may end.
        tree.put(7, 3_000, ONE);
        tree.put(8, 3_000, ONE);
        tree.end(9);
        assert_eq!(waits.read(&workload()).unwrap(), 6_001.0);
        std::thread::sleep(Duration::from_millis(5));
        tree.put(7, 5_000, ONE);
        tree.end(8);
        let why = waits.read(&workload()).unwrap_err();
        assert!(
            matches!(&why, PlatformError::Busy { why, .. } if why.contains("ended")),
            "{why}"
        );
        // It was there all the time.
        tree.put(8, 5_500, ONE);
        assert_eq!(waits.read(&workload()).unwrap(), 10_501.0);
    }

    #[test]
    fn a_pool_of_threads_and_too_many_are_refused() {
        let tree = Tree::new();
        tree.put(7, 0, SEVERAL);
        tree.put(8, 0, ONE);
        let mut waits = tree.begin();
        let mut look = |done: u64| {
            tree.put(7, done, SEVERAL);
            tree.put(8, done, ONE);
            waits.looked = None;
            waits.read(&workload())
        };
        let mut done = 0;
        let why = loop {
            done += 10;
            assert!(done < 10_000, "never refused");
            match look(done) {
                Ok(_) => {}
                Err(e) => break e,
            }
        };
        assert!(done > 100, "not by a few: {done}");
        assert!(
            matches!(&why, PlatformError::Unsupported { why, .. } if why.contains("pool") && why.contains("50 %")),
            "{why}"
        );
        (100..300).for_each(|thread| tree.put(thread, 1, ONE));
        assert!(
            Waits::begin(&Root::new(tree.0.path()), &workload())
                .unwrap_err()
                .contains("202 threads")
        );
    }
}
