//! Counts the waits of a program's threads: voluntary context switches, which the kernel counts anyway. In a server
//! with a thread per connection, they estimate the work while nothing else is counted
//! (`Calibration` in `homeostat_probes::turns`).

use crate::common::PROCESSES_MAX;
use crate::kernel::voluntary_switches;
use homeostat_kernel::Root;
use homeostat_kernel::process::{open_process, read_at};
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Most threads: each costs about 15 µs for a file, also at both ends of a window of about 45 ms.
const THREADS_MAX: usize = 128;
/// Readings in a row that may find more threads.
const CROWDED_MAX: u32 = 20;
/// Largest unknown share: waits of threads that ended or came since the last reading.
const UNKNOWN_MAX: f64 = 0.01;
/// Shortest interval between samples of what threads wait for: in less time, a single wait weighs too much.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Number of threads sampled: those that wait most …
const LOOK_AT: usize = 8;
/// … and samples needed for a verdict. Older samples are discounted by half.
const LOOKS: u32 = 16;
/// Above this share of waits for several connections at once, the server has no thread per connection.
const SEVERAL_MAX: f64 = 0.1;

type Key = (ProcessId, i32);

#[derive(Clone, Copy, Debug, Default)]
struct Thread {
    waits: u64,
    then: u64,
    /// Waits per second before the last sample.
    rate: f64,
    /// Absent at the last reading: it may have been overlooked, as threads come and go during the listing.
    missed: bool,
}

/// The waits of a workload.
#[derive(Debug)]
pub struct Waits {
    root: Root,
    threads: BTreeMap<Key, Thread>,
    total: f64,
    at: Option<Instant>,
    crowded: u32,
    looked: Option<Instant>,
    looks: u32,
    /// Sampled waits, and those for several connections at once among them.
    seen: (f64, f64),
}

impl Waits {
    /// Begins at zero.
    ///
    /// # Errors
    /// A sentence: waits cannot be counted.
    pub fn begin(root: &Root, workload: &Workload) -> Result<Self, String> {
        let mut this = Self {
            root: root.clone(),
            threads: BTreeMap::new(),
            total: 0.0,
            at: None,
            crowded: 0,
            looked: None,
            looks: 0,
            seen: (0.0, 0.0),
        };
        this.read(workload).map_err(|e| e.to_string())?;
        Ok(this)
    }

    /// Number of waits since the first reading.
    ///
    /// # Errors
    /// `Busy`: the waits since the last reading are unknown, and counting resumes from here. `Unsupported`: waits do
    /// not measure its work.
    pub fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let mut now = BTreeMap::new();
        for process in workload.processes.iter().take(PROCESSES_MAX) {
            match voluntary_switches(&self.root, *process) {
                Ok(threads) => now.extend(threads.into_iter().map(|(tid, waits)| ((*process, tid), waits))),
                Err(PlatformError::Vanished { .. }) => {}
                Err(e) => {
                    self.at = None;
                    return Err(e);
                }
            }
        }
        if now.len() > THREADS_MAX {
            self.at = None;
            self.crowded += 1;
            let why = format!(
                "it has {} threads, and adding up how often each waits would cost too much (at most {THREADS_MAX})",
                now.len()
            );
            return Err(if self.crowded >= CROWDED_MAX {
                unsupported(why)
            } else {
                busy(why)
            });
        }
        self.crowded = 0;
        // The waits during unreadable time are unknown.
        let before = self.at.replace(Instant::now());
        if before.is_none() {
            self.threads.clear();
        }
        let seconds = before.map_or(0.0, |then| then.elapsed().as_secs_f64());
        let (grown, unknown) = self.take(now, seconds);
        self.total += grown;
        self.look()?;
        if unknown > UNKNOWN_MAX * grown {
            return Err(busy(format!(
                "threads have come or ended that did about {:.0} % of it",
                100.0 * unknown / (unknown + grown)
            )));
        }
        Ok(self.total)
    }

    /// Waits of the known threads, and the estimated waits of threads that ended or came in this time.
    fn take(&mut self, now: BTreeMap<Key, u64>, seconds: f64) -> (f64, f64) {
        let (mut grown, mut unknown) = (0.0, 0.0);
        self.threads.retain(|key, thread| {
            if now.contains_key(key) {
                return true;
            }
            let is_new = !std::mem::replace(&mut thread.missed, true);
            if is_new {
                unknown += thread.rate * seconds;
            }
            is_new
        });
        for (key, waits) in now {
            if let Some(thread) = self.threads.get_mut(&key) {
                grown += waits.saturating_sub(thread.waits) as f64;
                thread.waits = waits;
                thread.missed = false;
            } else {
                // This thread may be new, or was overlooked before.
                if seconds > 0.0 {
                    unknown += waits as f64;
                }
                let thread = Thread {
                    waits,
                    then: waits,
                    ..Thread::default()
                };
                self.threads.insert(key, thread);
            }
        }
        (grown, unknown)
    }

    /// Samples which threads wait most, and what they wait for.
    fn look(&mut self) -> Result<(), PlatformError> {
        let seconds = self.looked.map(|then| then.elapsed());
        if seconds.is_some_and(|time| time < LOOK_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        for thread in self.threads.values_mut() {
            let more = thread.waits.saturating_sub(thread.then);
            thread.then = thread.waits;
            thread.rate = seconds.map_or(0.0, |time| more as f64 / time.as_secs_f64());
        }
        let mut busiest: Vec<(Key, f64)> = self.threads.iter().map(|(key, t)| (*key, t.rate)).collect();
        busiest.sort_by(|a, b| b.1.total_cmp(&a.1));
        for ((process, tid), rate) in busiest.into_iter().take(LOOK_AT) {
            if let Some(several) = waits_for_several(&self.root, process, tid) {
                self.seen.0 += rate;
                self.seen.1 += if several { rate } else { 0.0 };
            }
        }
        self.looks += 1;
        let (seen, several) = self.seen;
        if self.looks >= LOOKS && several > SEVERAL_MAX * seen {
            return Err(unsupported(format!(
                "its threads wait for several connections at once ({:.0} % of its waits), as those of a pool do, so they do not wait once for \
                 each command",
                100.0 * several / seen
            )));
        }
        if self.looks >= 2 * LOOKS {
            self.looks = LOOKS;
            self.seen = (seen / 2.0, several / 2.0);
        }
        Ok(())
    }
}

fn busy(why: String) -> PlatformError {
    PlatformError::Busy {
        what: "telling its work by how often it waits".to_owned(),
        why,
    }
}

/// Whether a thread now waits for several connections at once. `None`: it does not wait, has ended, or this is unknown.
pub fn waits_for_several(root: &Root, process: ProcessId, thread: i32) -> Option<bool> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let mut buffer = [0u8; 256];
    let dir = open_process(root, process).ok()?;
    let n = read_at(&dir, &format!("task/{thread}/syscall"), &mut buffer).ok()?;
    for_several(buffer.get(..n)?)
}

/// The same from `/proc/PID/task/TID/syscall`: call (x86-64) and arguments. `None`: it runs, or waits for a page.
fn for_several(text: &[u8]) -> Option<bool> {
    let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
    let call: u16 = words.next()?.parse().ok()?;
    let mut argument = |which: usize| {
        let word = words.nth(which)?;
        u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
    };
    Some(match call {
        // epoll_wait, epoll_pwait, epoll_pwait2, io_getevents, io_pgetevents, recvmmsg: the most events taken.
        // (PostgreSQL takes one, because its process serves one connection.)
        232 | 281 | 441 | 208 | 333 | 299 => argument(2)? > 1,
        // poll, ppoll: number of descriptors. (A thread of MariaDB waits for its own connection.)
        7 | 271 => argument(1)? > 1,
        // select, pselect6: the highest descriptor plus one. 0 is a sleep.
        23 | 270 => argument(0)? > 0,
        // io_uring_enter: unknown, so assumed.
        426 => true,
        _ => false,
    })
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
        /// With these threads, which have not waited yet.
        fn begin_with(&self, threads: &[usize]) -> Waits {
            threads.iter().for_each(|thread| self.put(*thread, 0, ONE));
            self.begin()
        }
        fn begin(&self) -> Waits {
            Waits::begin(&Root::new(self.0.path()), &workload()).unwrap()
        }
    }

    fn workload() -> Workload {
        Workload {
            id: "x".into(),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
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
    fn who_waits_for_several_connections_is_told_by_the_call_and_its_arguments() {
        for (text, several) in [
            ("running\n", None),
            // It waits for a page.
            ("-1 0x7ffc58d0a1b8 0x7f3a0c1172f7\n", None),
            ("", None),
            // As of nginx, and of PostgreSQL.
            (
                "232 0x8 0x55d0c8 0x200 0xffffffff 0x0 0x0 0x7ffc 0x7f3a\n",
                Some(true),
            ),
            (
                "232 0x8 0x55d0c8 0x1 0xffffffff 0x0 0x0 0x7ffc 0x7f3a\n",
                Some(false),
            ),
            (
                "7 0x7f0c2e7fbb40 0x1 0xffffffff 0x0 0x0 0x0 0x7ffc 0x7f3a\n",
                Some(false),
            ),
            (
                "271 0x7f0c2e7fbb40 0x3 0x0 0x0 0x8 0x0 0x7ffc 0x7f3a\n",
                Some(true),
            ),
            ("23 0x9 0x7ffd 0x0 0x0 0x0 0x0 0x7ffc 0x7f3a\n", Some(true)),
            ("23 0x0 0x0 0x0 0x0 0x7ffd 0x0 0x7ffc 0x7f3a\n", Some(false)),
            // recvfrom and futex.
            ("45 0x5 0x55 0x4000 0x0 0x0 0x0 0x7ffc 0x7f3a\n", Some(false)),
            (
                "202 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7ffc 0x7f3a\n",
                Some(false),
            ),
            ("232 0x8\n", None),
        ] {
            assert_eq!(for_several(text.as_bytes()), several, "{text}");
        }
    }

    #[test]
    fn waits_add_up_from_the_first_time_on() {
        let tree = Tree::new();
        tree.put(7, 1_000, ONE);
        tree.put(8, 50, ONE);
        let mut waits = tree.begin();
        assert_eq!(waits.read(&workload()).unwrap(), 0.0);
        tree.put(7, 1_400, ONE);
        tree.put(8, 80, ONE);
        assert_eq!(waits.read(&workload()).unwrap(), 430.0);
    }

    #[test]
    fn what_comes_or_ends_is_not_known_and_what_was_overlooked_is_known_again() {
        let tree = Tree::new();
        let mut waits = tree.begin_with(&[7, 8, 9]);
        let key = |tid| (PROCESS, tid);
        let mut take = |now: &[(i32, u64)]| {
            let now = now.iter().map(|(tid, waits)| (key(*tid), *waits)).collect();
            waits.take(now, 1.0)
        };
        assert_eq!(take(&[(7, 1_000), (8, 1_000), (9, 0)]), (2_000.0, 0.0));
        // It did nothing when it was looked at last: nothing of it is missed.
        assert_eq!(take(&[(7, 2_000), (8, 2_000)]), (2_000.0, 0.0));
        // It was overlooked for a moment.
        assert_eq!(take(&[(7, 3_000)]), (1_000.0, 0.0));
        assert_eq!(take(&[(7, 4_000), (8, 3_500)]), (2_500.0, 0.0));
        // One that has waited a million times is new, or was overlooked from the beginning.
        assert_eq!(
            take(&[(7, 5_000), (8, 4_500), (10, 1_000_000)]),
            (2_000.0, 1_000_000.0)
        );
        assert_eq!(take(&[(7, 6_000), (8, 5_500), (10, 1_000_500)]), (2_500.0, 0.0));
        for thread in waits.threads.values_mut() {
            thread.rate = 500.0;
        }
        let now = BTreeMap::from([(key(7), 7_000), (key(8), 6_500)]);
        assert_eq!(waits.take(now, 2.0), (2_000.0, 1_000.0), "as often as before");
    }

    #[test]
    fn a_second_in_which_busy_threads_came_is_not_told_and_the_next_one_is() {
        let tree = Tree::new();
        let mut waits = tree.begin_with(&[7]);
        tree.put(7, 100, ONE);
        tree.put(8, 50, ONE);
        let why = waits.read(&workload()).unwrap_err();
        assert!(
            matches!(&why, PlatformError::Busy { why, .. } if why.contains("33 %")),
            "{why}"
        );
        tree.put(8, 60, ONE);
        assert_eq!(waits.read(&workload()).unwrap(), 110.0);
    }

    #[test]
    fn a_pool_of_threads_and_too_many_are_refused() {
        let tree = Tree::new();
        // A thread that accepts connections now and then waits for several, too.
        let looked = |pool: u64| {
            let mut waits = tree.begin_with(&[7, 8]);
            for done in 1..=40 {
                tree.put(7, done * 10 * pool, SEVERAL);
                tree.put(8, done * 100, ONE);
                waits.looked = waits.looked.and_then(|then| then.checked_sub(LOOK_EVERY));
                match waits.read(&workload()) {
                    Ok(_) => {}
                    Err(e) => return Err((done, e.to_string())),
                }
            }
            Ok(())
        };
        assert_eq!(looked(1), Ok(()));
        // What threads wait for is told by the numbers of system calls of x86-64.
        if cfg!(target_arch = "x86_64") {
            let (done, why) = looked(10).unwrap_err();
            assert!(done >= u64::from(LOOKS) - 1, "not by a few looks: {done}");
            assert!(why.contains("pool") && why.contains("50 %"), "{why}");
        }
        let mut waits = tree.begin_with(&[7, 8]);
        (100..300).for_each(|thread| tree.put(thread, 1, ONE));
        for _ in 1..CROWDED_MAX {
            let why = waits.read(&workload()).unwrap_err();
            assert!(matches!(why, PlatformError::Busy { .. }), "{why}");
        }
        let why = waits.read(&workload()).unwrap_err();
        assert!(
            matches!(&why, PlatformError::Unsupported { why, .. } if why.contains("202 threads")),
            "{why}"
        );
    }
}
