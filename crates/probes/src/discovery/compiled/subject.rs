//! Counts at a site in generated code.

use crate::concern::threads;
use crate::discovery::active::failed;
use crate::discovery::compiled::{Instruction, Memory, Set, Switches, cost_now, runs, switch_cost};
use crate::discovery::probes::Watch;
use crate::turns::{Hits, Lost, Subject, Unpaid, Window};
use homeostat_kernel::Root;
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::process::{numbers_in, open_process};
use homeostat_meters::code_file::executable;
use homeostat_meters::common::ENTRIES_MAX;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most threads with breakpoints, two descriptors each.
pub(crate) const THREADS_MAX: usize = 128;

/// The site and its witness, as a subject of sampling.
pub(crate) struct Compiled {
    root: Root,
    main: ProcessId,
    executable: (u64, u64),
    places: Vec<Instruction>,
    point: Arc<Point>,
    watch: Watch,
    pace: Pace,
}

/// Checks that the site keeps its pace. A compiler leaves old code in place, and a thread may stay in it for long while
/// all others run the new code. Then the site hardly runs, and its witness in the same code as little.
#[derive(Default)]
struct Pace {
    /// Hits and CPU time of the first windows.
    first: (u64, f64),
    /// Windows in a row in which it hardly ran.
    slow: u32,
}

/// Hits in the first windows that establish its rate.
const FIRST_HITS: u64 = 400;
/// The site hardly runs below this share of its rate. Trials nearly always change a rate per CPU second by less. A
/// change that removes three quarters (a reader without its page cache) looks like replaced code and ends its trial.
const HARDLY: f64 = 0.25;
/// … in this many windows in a row, each long enough for this many hits at the old rate.
const SLOW_MAX: u32 = 3;
const EXPECTED_MIN: f64 = 20.0;

impl Pace {
    fn judge(&mut self, name: &str, window: &Window) -> Result<(), String> {
        if self.first.0 < FIRST_HITS {
            self.first.0 = self.first.0.saturating_add(window.hits[0]);
            self.first.1 += window.cpu;
            return Ok(());
        }
        let expected = self.first.0 as f64 / self.first.1.max(1e-9) * window.cpu;
        if expected < EXPECTED_MIN {
            return Ok(());
        }
        self.slow = if (window.hits[0] as f64) < HARDLY * expected {
            self.slow + 1
        } else {
            0
        };
        if self.slow < SLOW_MAX {
            return Ok(());
        }
        Err(format!(
            "{name} has run less than a quarter as often as at first in {SLOW_MAX} turns of counting: its code was probably made anew"
        ))
    }
}

impl Compiled {
    pub(crate) fn new(
        root: &Root,
        main: ProcessId,
        executable: (u64, u64),
        places: Vec<Instruction>,
    ) -> Self {
        Self {
            root: root.clone(),
            main,
            executable,
            point: Arc::new(Point::new(root, main, &places)),
            places,
            watch: Watch::default(),
            pace: Pace::default(),
        }
    }

    pub(crate) fn hits(&self) -> Arc<Point> {
        Arc::clone(&self.point)
    }
}

/// The breakpoints of a site and its witness on all threads of a process, and how often these run.
pub(crate) struct Point {
    root: Root,
    process: ProcessId,
    set: Set,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    on: bool,
    /// Of the threads with breakpoints.
    switches: Switches,
    /// Runs so far of threads without breakpoints, which were about to end.
    without: BTreeMap<i32, u64>,
}

impl Point {
    fn new(root: &Root, process: ProcessId, places: &[Instruction]) -> Self {
        Self {
            root: root.clone(),
            process,
            set: Set::new(places.iter().map(|p| p.address).collect()),
            threads: Mutex::default(),
        }
    }

    fn hold(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn be_on(&self) -> Result<(), PlatformError> {
        let all = threads_of(&self.root, self.process)?;
        self.set.be_on(&all).map_err(failed)?;
        let with = self.set.threads();
        if with.is_empty() {
            return Err(failed(OpenError::Vanished));
        }
        self.set.switch(true);
        let dir = open_process(&self.root, self.process)?;
        let (counted, without) = runs(dir, all)
            .into_iter()
            .partition(|(thread, _)| with.contains(thread));
        let mut threads = self.hold();
        threads.switches.look(counted);
        threads.without = without;
        threads.on = true;
        Ok(())
    }

    fn look(&self) {
        if let Ok(dir) = open_process(&self.root, self.process) {
            let now = runs(dir, self.set.threads());
            self.hold().switches.look(now);
        }
    }

    /// Frees the breakpoints, even if inactive: a thread has only four, and debuggers need them.
    fn close(&self) {
        if std::mem::take(&mut self.hold().on) {
            self.look();
        }
        self.set.close();
        self.hold().switches.look(BTreeMap::new());
    }

    /// Runs of threads with breakpoints since the last call.
    fn switched(&self) -> u64 {
        if self.hold().on {
            self.look();
        }
        self.hold().switches.take()
    }
}

impl Hits for Point {
    fn hits(&self) -> [u64; 2] {
        let read = self.set.read();
        [0, 1].map(|i| read.get(i).copied().unwrap_or(0))
    }

    /// Threads created after attaching have no breakpoints, but their CPU time counts as the program's.
    fn is_whole(&self) -> bool {
        let threads = self.hold();
        if !threads.on {
            return true;
        }
        let with = self.set.threads();
        // Another check reports an ended process.
        let Ok(dir) = open_process(&self.root, self.process) else {
            return true;
        };
        let Ok((all, _)) = numbers_in(&dir, "task", ENTRIES_MAX) else {
            return true;
        };
        let others = all.into_iter().filter(|thread| !with.contains(thread));
        let have_run = runs(&dir, others)
            .iter()
            .any(|(thread, times)| threads.without.get(thread).copied().unwrap_or(0) < *times);
        !have_run && !self.set.is_unread()
    }
}

/// Threads of a process.
///
/// # Errors
/// The process ended, or has too many threads.
pub(crate) fn threads_of(root: &Root, process: ProcessId) -> Result<BTreeSet<i32>, PlatformError> {
    let dir = open_process(root, process)?;
    let (threads, _) = numbers_in(&dir, "task", ENTRIES_MAX).map_err(|_| failed(OpenError::Vanished))?;
    if threads.len() > THREADS_MAX {
        return Err(PlatformError::Unsupported {
            what: "counting a progress point".to_owned(),
            why: format!(
                "process {process} has {} threads; in code that no file holds at most {THREADS_MAX} are counted",
                threads.len()
            ),
        });
    }
    Ok(threads.into_iter().collect())
}

impl Subject for Compiled {
    fn name(&self) -> &str {
        self.places.first().map_or("", |p| &p.name)
    }

    fn check(&mut self, workload: &Workload) -> Result<(), Lost> {
        match executable(&self.root, self.main) {
            None => {
                return Err(Lost::Vanished(PlatformError::Vanished {
                    target: format!("process {}", self.main),
                }));
            }
            Some(now) if now != self.executable => {
                return Err(Lost::Changed(format!(
                    "process {} runs another program now",
                    self.main
                )));
            }
            Some(_) => {}
        }
        if workload.processes != [self.main] {
            // This may be a short-lived child.
            return Err(Lost::Paused(
                "it has several processes now, and code that one of them has made is counted in that one only"
                    .to_owned(),
            ));
        }
        let lost = |why| match why {
            Refusal::Now(why) => Lost::Paused(why),
            Refusal::Lasting(why) => Lost::Changed(why),
        };
        let memory = Memory::open(&self.root, self.main).map_err(lost)?;
        for place in &self.places {
            if !memory.holds(place).map_err(lost)? {
                return Err(Lost::Changed(format!("the code at {} was made anew", place.name)));
            }
        }
        threads::at_liberty(&self.root, self.main).map_err(|why| Lost::Paused(why.to_string()))
    }

    fn attach(&mut self, _: &[ProcessId]) -> Result<(), PlatformError> {
        self.point.be_on()
    }

    fn off(&mut self) -> Result<(), Refusal> {
        self.point.close();
        Ok(())
    }

    fn at_liberty(&mut self) -> bool {
        threads::at_liberty(&self.root, self.main).is_ok()
    }

    fn judge(&mut self, window: &Window) -> Result<(), String> {
        let name = self.places.first().map_or("", |p| p.name.as_str());
        self.pace.judge(name, window)?;
        self.watch.judge(name, window.cpu, window.hits)
    }

    fn unpaid(&mut self, _: &[ProcessId]) -> Unpaid {
        // Children do not inherit hardware breakpoints.
        Unpaid::default()
    }

    fn cost_now(&mut self) -> Result<Option<f64>, Refusal> {
        cost_now()
    }

    fn beside(&mut self) -> f64 {
        self.point.switched() as f64 * switch_cost(self.places.len())
    }

    fn allowance(&self) -> f64 {
        0.0
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        // The reader holds the point, too.
        self.point.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turns::{Beginning, Counting, Rest};
    use homeostat_kernel::process::start_ticks;
    use homeostat_meters::PROBE_COST_MAX as COST_MAX;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn what_a_hit_costs_now_is_known_of_compiled_code() {
        if let Err(why) = crate::discovery::compiled::cost() {
            eprintln!("skipped: {why}");
            return;
        }
        let own = ProcessId {
            pid: i32::try_from(std::process::id()).unwrap(),
            start_ticks: 0,
        };
        let mut subject = Compiled::new(&Root::default(), own, (0, 0), Vec::new());
        let begun = Instant::now();
        // Another test may be finding it out at this moment.
        let cost = loop {
            match subject.cost_now() {
                Ok(Some(cost)) => break cost,
                Ok(None) | Err(Refusal::Now(_)) if begun.elapsed() < Duration::from_secs(60) => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => panic!("{other:?}"),
            }
        };
        assert!((1e-6..=200e-6).contains(&cost), "{cost}");
    }

    /// Makes its code in memory of no file and tells where two of its functions begin there; units that are so long that their hits cost next to
    /// nothing. After each of them two threads pass a byte to and fro, a hundred times.
    const SWITCHING: &str = r#"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MADE __attribute__((noinline, noclone, section("made")))

extern const char __start_made[], __stop_made[];

MADE uint64_t mix(uint64_t x)
{
    int i;
    for (i = 0; i < 2000000; i++)
        x = x * 6364136223846793005u + 1442695040888963407u, x ^= x >> 29;
    return x;
}

MADE uint64_t unit(uint64_t x)
{
    return mix(x) + mix(x + 1);
}

typedef uint64_t made(uint64_t);

static int to[2], fro[2];

static void *answer(void *p)
{
    char c;
    while (read(to[0], &c, 1) == 1 && write(fro[1], &c, 1) == 1)
        ;
    return p;
}

int main(void)
{
    size_t size = __stop_made - __start_made;
    volatile uint64_t sum = 0;
    int i;
    pthread_t t;
    char c = 0, *code = mmap(NULL, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    made *begin = (made *)(code + ((char *)unit - __start_made));
    if (code == MAP_FAILED || pipe(to) != 0 || pipe(fro) != 0)
        return 1;
    memcpy(code, __start_made, size);
    printf("%zx %zx\n", (size_t)begin, (size_t)(code + ((char *)mix - __start_made)));
    fflush(stdout);
    pthread_create(&t, NULL, answer, NULL);
    for (;;) {
        sum += begin(sum);
        for (i = 0; i < 100; i++)
            if (write(to[1], &c, 1) != 1 || read(fro[0], &c, 1) != 1)
                return 1;
    }
}
"#;

    struct Victim(Child);

    impl Drop for Victim {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn what_switches_of_counted_threads_cost_is_kept_to_the_limit_too() {
        if let Err(why) = crate::discovery::compiled::cost() {
            eprintln!("skipped: {why}");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (source, program) = (directory.path().join("made.c"), directory.path().join("made"));
        std::fs::write(&source, SWITCHING).unwrap();
        let built = Command::new("cc")
            .args(["-std=gnu99", "-O2", "-w", "-pthread", "-o"])
            .args([&program, &source])
            .status();
        if !built.is_ok_and(|s| s.success()) {
            eprintln!("skipped: no C compiler");
            return;
        }
        let mut victim = Victim(Command::new(&program).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(victim.0.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let pid = i32::try_from(victim.0.id()).unwrap();
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        let process = ProcessId {
            pid,
            start_ticks: start_ticks(&stat).unwrap(),
        };
        let root = Root::default();
        let memory = match Memory::open(&root, process) {
            Ok(memory) => memory,
            Err(why) => {
                eprintln!("skipped: {why}");
                return;
            }
        };
        let places: Vec<Instruction> = line
            .split_ascii_whitespace()
            .map(|address| {
                let address = u64::from_str_radix(address, 16).unwrap();
                memory.instruction(address, "made".to_owned()).unwrap().unwrap()
            })
            .collect();
        let compiled = Compiled::new(&root, process, executable(&root, process).unwrap(), places);
        let how = Beginning {
            root: root.clone(),
            counters: compiled.hits(),
            hit_cost: 10e-6,
            cost_max: COST_MAX,
            share: 1.0,
            cpus: 1.0,
            rest: Rest::CpuTime,
        };
        let workload = Workload {
            id: "x".into(),
            kind: homeostat_model::WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: homeostat_model::Fingerprint::new("x"),
            program: "made".into(),
            executable: String::new(),
            processes: vec![process],
            choice: homeostat_model::OperatorChoice::default(),
        };
        let mut counting = Counting::begin(&workload, compiled, how).unwrap();
        let begun = Instant::now();
        let told = loop {
            std::thread::sleep(Duration::from_millis(200));
            match counting.read(&workload) {
                Ok(_) | Err(Lost::Paused(_)) => {}
                // As dear as that even in turns.
                Err(Lost::Changed(why)) => break why,
                Err(why) => panic!("{why:?}"),
            }
            if let Some(share) = counting.share().filter(|share| *share < 0.9) {
                break share.to_string();
            }
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it goes on being counted all the time"
            );
        };
        eprintln!("{told} after {:?}", begun.elapsed());
    }

    #[test]
    fn a_thread_that_runs_without_breakpoints_is_seen_and_switches_of_the_others_are_counted() {
        let tree = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| {
            let path = tree.path().join("proc/7").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let ran =
            |thread: i32, times: u64| put(&format!("task/{thread}/schedstat"), &format!("1 2 {times}\n"));
        put(
            "stat",
            "7 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 42 20 21",
        );
        let process = ProcessId {
            pid: 7,
            start_ticks: 42,
        };
        // At no place: nothing is asked of the processor.
        let point = Point::new(&Root::new(tree.path()), process, &[]);
        ran(7, 100);
        ran(8, 50);
        point.be_on().unwrap();
        assert!(point.is_whole());
        assert_eq!(point.switched(), 0, "what was before is not ours");
        ran(7, 110);
        ran(8, 53);
        assert_eq!(point.switched(), 13);
        // One that was about to end has no breakpoints, and does nothing. Then one comes that works.
        point.hold().without.insert(9, 4);
        ran(9, 4);
        ran(10, 0);
        assert!(point.is_whole());
        ran(10, 1);
        assert!(!point.is_whole());
        point.be_on().unwrap();
        assert!(point.is_whole(), "it has them from now on");
        ran(10, 5);
        ran(7, 120);
        point.close();
        ran(11, 9);
        assert!(point.is_whole(), "nothing is counted");
        ran(7, 900);
        assert_eq!(point.switched(), 14, "until they were given back");
        assert_eq!(point.hits(), [0, 0]);
    }

    #[test]
    fn a_point_that_hardly_runs_any_more_is_lost() {
        let window = |cpu, hits| Window { cpu, hits: [hits, 0] };
        let mut pace = Pace::default();
        for _ in 0..20 {
            assert!(pace.judge("x", &window(0.1, 100)).is_ok());
        }
        // A change makes it slower; it rests; one thread is late.
        for _ in 0..20 {
            assert!(pace.judge("x", &window(0.1, 40)).is_ok());
            assert!(pace.judge("x", &window(0.01, 0)).is_ok());
            assert!(pace.judge("x", &window(0.1, 5)).is_ok());
        }
        assert!(pace.judge("x", &window(0.1, 50)).is_ok());
        for _ in 1..SLOW_MAX {
            assert!(pace.judge("x", &window(0.1, 5)).is_ok());
        }
        assert!(
            pace.judge("x", &window(0.1, 5))
                .unwrap_err()
                .contains("made anew")
        );
    }
}
