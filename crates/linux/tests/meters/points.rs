//! Progress points of programs that tell nothing: stripped, without symbols. What is found, if anything is, follows the
//! work; what only waits is never taken.

use super::*;

/// `work`: units of some tens of microseconds, counted in the file that it is given. `spin`: two threads wait for each
/// other and for nothing else.
const PROGRAM: &str = r#"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static volatile uint64_t sink;
static volatile int flag;

__attribute__((noinline)) static uint64_t mix(uint64_t x)
{
    int i;
    for (i = 0; i < 400; i++)
        x = x * 6364136223846793005u + 1442695040888963407u, x ^= x >> 29;
    return x;
}

__attribute__((noinline)) static uint64_t unit(uint64_t n)
{
    uint64_t sum = 0;
    int i;
    for (i = 0; i < 50; i++)
        sum += mix(n + i);
    return sum;
}

static void *never(void *p)
{
    while (!flag)
        __builtin_ia32_pause();
    return p;
}

static char **arguments;

/* Becomes the program that the third argument names. */
static void become(int number)
{
    char *other[] = {arguments[3], "work", arguments[2], NULL};
    (void)number;
    execv(other[0], other);
    _exit(1);
}

int main(int argc, char **argv)
{
    arguments = argv;
    if (argc > 3)
        signal(SIGUSR1, become);
    if (argc > 2 && strcmp(argv[1], "work") == 0) {
        int fd = open(argv[2], O_RDWR | O_CREAT, 0600);
        uint64_t *count;
        if (fd < 0 || ftruncate(fd, 8) != 0)
            return 1;
        count = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        for (;;) {
            sink += unit(*count);
            __atomic_fetch_add(count, 1, __ATOMIC_RELEASE);
        }
    } else {
        pthread_t t;
        pthread_create(&t, NULL, never, NULL);
        never(NULL);
    }
    return 0;
}
"#;

/// An interpreter whose operations are reached through a table only; units of some 0.3 ms, counted in the file that it is given by an
/// operation that hardly ever is at work.
const INTERPRETER: &str = r#"
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static volatile uint64_t even, odd;

__attribute__((noinline)) static void run(const uint8_t *code, uint64_t *count)
{
    static const void *const table[] = {&&add, &&mix, &&fold, &&again, &&unit};
    const uint8_t *next = code;
    uint64_t x = 1, sum = 0, turns = 0;
#define NEXT goto *table[*next++]
    NEXT;
add:
    sum += x;
    NEXT;
mix:
    x = x * 6364136223846793005u + 1442695040888963407u;
    NEXT;
fold:
    sum ^= sum >> 29;
    NEXT;
again:
    /* Slow, so that it is seen at work here, before its two ways part. */
    turns++;
    sum += x / (turns | 1);
    if (__builtin_expect(turns < 20000, 1)) {
        next = code;
        NEXT;
    }
    turns = 0;
    if (sum & 1)
        odd += sum;
    else
        even += x;
    NEXT;
unit:
    __atomic_fetch_add(count, 1, __ATOMIC_RELEASE);
    next = code;
    NEXT;
}

int main(int argc, char **argv)
{
    static const uint8_t code[] = {1, 0, 2, 1, 1, 0, 2, 0, 3, 4};
    int fd = open(argv[argc > 2 ? 2 : 0], O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, 8) != 0)
        return 1;
    run(code, mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    return 0;
}
"#;

/// A program that makes its code as it runs: it lies in memory of no file. Units of some 0.3 ms, counted in the file that it is given. A
/// signal has it make the code anew, elsewhere.
const COMPILER: &str = r#"
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MADE __attribute__((noinline, noclone, section("made")))

extern const char __start_made[], __stop_made[];

MADE uint64_t mix(uint64_t x)
{
    int i;
    for (i = 0; i < 400; i++)
        x = x * 6364136223846793005u + 1442695040888963407u, x ^= x >> 29;
    return x;
}

MADE uint64_t unit(uint64_t n)
{
    uint64_t sum = 0;
    int i;
    for (i = 0; i < 500; i++)
        sum += mix(n + i);
    return sum;
}

MADE uint64_t run(uint64_t *count, volatile sig_atomic_t *anew)
{
    uint64_t sum = 0;
    while (!*anew) {
        sum += unit(*count);
        __atomic_fetch_add(count, 1, __ATOMIC_RELEASE);
    }
    return sum;
}

static volatile sig_atomic_t anew;
static volatile uint64_t sink;

static void told(int number)
{
    (void)number;
    anew = 1;
}

int main(int argc, char **argv)
{
    size_t size = __stop_made - __start_made;
    int fd = open(argv[argc > 2 ? 2 : 0], O_RDWR | O_CREAT, 0600);
    uint64_t *count;
    char *code;
    if (fd < 0 || ftruncate(fd, 8) != 0)
        return 1;
    count = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    signal(SIGUSR1, told);
    for (;;) {
        code = mmap(NULL, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (code == MAP_FAILED)
            return 1;
        memcpy(code, __start_made, size);
        anew = 0;
        sink = ((uint64_t(*)(uint64_t *, volatile sig_atomic_t *))(code + ((char *)run - __start_made)))(count, &anew);
        memset(code, 0xcc, size);
    }
}
"#;

/// Ends with the test, however it ends.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Victim {
    /// Works, and counts in the file. It becomes `other` when it is told to.
    fn work(program: &Path, file: &Path, other: &Path) -> Self {
        let child = Command::new(program).arg("work").arg(file).arg(other).spawn();
        let this = Self(child.unwrap());
        // `spawn` returns as soon as the memory of the new process is its own, before the program is mapped into it.
        let begun = Instant::now();
        while this.own_code(program).is_none() {
            assert!(begun.elapsed() < PATIENCE, "it was never mapped");
            std::thread::sleep(Duration::from_millis(1));
        }
        this
    }

    fn become_another(&self) {
        let signalled = Command::new("kill")
            .args(["-USR1", &self.0.id().to_string()])
            .status();
        assert!(signalled.unwrap().success());
    }

    /// Memory of its own, in KiB, within the code of the program that it runs: a page into which a breakpoint was put is its own
    /// as long as that is there. `None` unless it runs this program.
    fn own_code(&self, program: &Path) -> Option<u64> {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.0.id())).unwrap();
        let mut mine = false;
        let mut found = None;
        for line in smaps.lines() {
            if let Some(permissions) = line
                .split_once(' ')
                .filter(|(range, _)| range.contains('-'))
                .map(|(_, rest)| rest)
            {
                mine = permissions.starts_with("r-xp") && line.ends_with(&*program.to_string_lossy());
            } else if mine {
                if let Some(kib) = line.strip_prefix("Anonymous:") {
                    let kib: u64 = kib.trim().trim_end_matches(" kB").parse().unwrap();
                    found = Some(found.unwrap_or(0) + kib);
                }
            }
        }
        found
    }
}

impl Victim {
    /// The code of the program in its memory.
    fn text(&self, program: &Path) -> Vec<u8> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.0.id())).unwrap();
        let line = maps
            .lines()
            .find(|l| l.contains(" r-xp ") && l.ends_with(&*program.to_string_lossy()))
            .unwrap();
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let number = |n| u64::from_str_radix(n, 16).unwrap();
        let mut code = vec![0; (number(end) - number(start)) as usize];
        let memory = std::fs::File::open(format!("/proc/{}/mem", self.0.id())).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&memory, &mut code, number(start)).unwrap();
        code
    }
}

/// The stripped program, or why there is none.
fn build(directory: &Path) -> Option<PathBuf> {
    compile(directory, PROGRAM)
}

fn compile(directory: &Path, text: &str) -> Option<PathBuf> {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("skipped: points are found in code of x86-64 only");
        return None;
    }
    let (source, program) = (directory.join("victim.c"), directory.join("victim"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("cc")
        .args(["-O2", "-s", "-pthread", "-o"])
        .args([&program, &source])
        .status();
    match built {
        Ok(status) if status.success() => Some(program),
        _ => {
            eprintln!("skipped: no C compiler");
            None
        }
    }
}

#[test]
fn points_are_not_looked_for_when_a_person_says_no() {
    let own = workload("test", &[std::process::id()]);
    let settings = MeterSettings {
        progress_points: PointsWish::Never,
        ..MeterSettings::default()
    };
    let why = Meters::new(&settings).refusal(&own, "points");
    assert!(why.contains("meters.progress_points = false"), "{why}");
}

/// As a person sets it who wants points to be looked for.
fn wanted() -> MeterSettings {
    MeterSettings {
        progress_points: PointsWish::Always,
        ..MeterSettings::default()
    }
}

fn points() -> Box<dyn MeterKind> {
    let own = workload("test", &[std::process::id()]);
    kinds(&wanted())
        .into_iter()
        .find_map(|mut kind| {
            let mine = kind
                .find(&Root::default(), &own)
                .iter()
                .any(|c| c.id.as_str() == "points");
            mine.then_some(kind)
        })
        .unwrap()
}

/// Opens the meter and waits until the search is over: the meter, or why there is none.
fn search(victim: &Workload) -> Result<Box<dyn Meter>, String> {
    search_by(&mut *points(), victim)
}

/// The same by a kind that remembers what was found.
fn search_by(kind: &mut dyn MeterKind, victim: &Workload) -> Result<Box<dyn Meter>, String> {
    let root = Root::default();
    let id = MeterId::from("points");
    let mut meter = kind.open(&root, victim, &id).map_err(|e| e.to_string())?;
    let begun = Instant::now();
    loop {
        match meter.read(victim) {
            Ok(_) => return Ok(meter),
            Err(PlatformError::Busy { .. }) => {}
            Err(e) => {
                // What was found out is remembered, and told instead of another search; a point that was found and then
                // lost is looked for anew.
                let why = e.to_string();
                if let Some(told) = kind.find(&root, victim).first().and_then(|c| c.refused.clone()) {
                    assert!(why.contains(&told), "{why}; {told}");
                }
                return Err(why);
            }
        }
        // The search has its own limit of time, of half a minute: only a machine that hardly runs us comes here.
        assert!(begun.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_point_follows_the_work_of_a_stripped_program() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = build(directory.path()) else {
        return;
    };
    let (file, other) = (directory.path().join("count"), directory.path().join("other"));
    std::fs::copy(&program, &other).unwrap();
    let victim = Victim::work(&program, &file, &other);
    let subject = workload("victim", &[victim.0.id()]);
    let mut meter = match search(&subject) {
        Ok(meter) => meter,
        Err(why) => {
            // On a machine that is too busy, or does not permit it, nothing is found; never something wrong.
            eprintln!("skipped: {why}");
            return;
        }
    };
    let Some((early, late, ratios)) = hits_per_unit(&mut *meter, &subject, &file) else {
        return;
    };
    assert!(
        early > 0.0 && early < 2.0 * late && late < 2.0 * early,
        "hits per unit of work: {early}, {late} ({ratios:?})"
    );
    // It becomes another program while it is counted: not a byte of that one is changed, and the meter ends.
    let begun = Instant::now();
    while victim.own_code(&program) == Some(0) {
        assert!(
            begun.elapsed() < Duration::from_secs(600),
            "no breakpoint was ever there"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    victim.become_another();
    let ended = ends_without_touching(&mut *meter, &subject, &victim, &other);
    assert!(ended.contains("another program"), "{ended}");
}

/// What is found is counted by whoever opens the meter next, without another search. It happens in a thread of its own: one that stands
/// still for good must not keep the test from ending.
#[test]
fn a_point_that_was_found_is_counted_again_when_it_was_closed_and_is_opened_once_more() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = build(directory.path()) else {
        return;
    };
    let file = directory.path().join("count");
    let victim = Victim::work(&program, &file, &file);
    let subject = workload("victim", &[victim.0.id()]);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // Whoever listened may have given up.
        let tell = |step| drop(tell.send(step));
        let mut kind = points();
        let closed = search_by(&mut *kind, &subject).map(drop);
        let found = closed.is_ok();
        tell(closed.map(|()| None));
        if !found {
            return;
        }
        for _ in 0..2 {
            let opened = kind.open(&Root::default(), &subject, &MeterId::from("points"));
            let counted = opened.and_then(|mut meter| {
                let first = reading(&mut *meter, &subject)?;
                let begun = Instant::now();
                loop {
                    // Where it is counted in turns, not every reading tells something.
                    let now = reading(&mut *meter, &subject)?;
                    if now > first || begun.elapsed() > Duration::from_secs(60) {
                        return Ok(now - first);
                    }
                    std::thread::sleep(Duration::from_millis(500));
                }
            });
            tell(counted.map(Some).map_err(|e| e.to_string()));
        }
    });
    // The search has its own limit of time, of half a minute.
    match told.recv_timeout(Duration::from_secs(600)).unwrap() {
        Ok(_) => {}
        Err(why) => {
            // On a machine that is too busy, or does not permit it.
            eprintln!("skipped: {why}");
            return;
        }
    }
    for time in ["second", "third"] {
        // No search; two minutes at most for a reading, and some more for one that tells something.
        let step = told.recv_timeout(Duration::from_secs(330));
        match step.unwrap_or_else(|_| panic!("opened a {time} time it stands still")) {
            Ok(hits) => assert!(
                hits.is_some_and(|h| h > 0.0),
                "opened a {time} time it counts {hits:?}"
            ),
            Err(why) => {
                // Found and not counted, for example because a tracer came: told, and no reason to stand still.
                eprintln!("skipped: opened a {time} time it is not counted: {why}");
                return;
            }
        }
    }
}

#[test]
fn a_point_is_found_in_code_that_only_a_table_leads_to() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile(directory.path(), INTERPRETER) else {
        return;
    };
    let file = directory.path().join("count");
    let mut victim = Victim::work(&program, &file, &file);
    let subject = workload("victim", &[victim.0.id()]);
    let mut meter = match search(&subject) {
        Ok(meter) => meter,
        Err(why) => {
            // It works nowhere else.
            assert!(
                !why.contains("seen at work runs") && !why.contains("can be counted"),
                "{why}"
            );
            eprintln!("skipped: {why}");
            return;
        }
    };
    let found = hits_per_unit(&mut *meter, &subject, &file);
    drop(meter);
    // A breakpoint within an instruction would have ended it.
    assert!(victim.0.try_wait().unwrap().is_none());
    if let Some((early, late, ratios)) = found {
        assert!(
            early > 0.0 && early < 2.0 * late && late < 2.0 * early,
            "hits per unit of work: {early}, {late} ({ratios:?})"
        );
    }
}

#[test]
fn a_point_is_found_in_code_that_no_file_holds_and_lost_when_that_is_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile(directory.path(), COMPILER) else {
        return;
    };
    let file = directory.path().join("count");
    let mut victim = Victim::work(&program, &file, &file);
    let subject = workload("victim", &[victim.0.id()]);
    let mut meter = match search(&subject) {
        Ok(meter) => meter,
        Err(why) => {
            // It works nowhere else, and there are places enough. On a busy machine they may not keep their ratios.
            assert!(!why.contains("no place was found"), "{why}");
            eprintln!("skipped: {why}");
            return;
        }
    };
    let found = hits_per_unit(&mut *meter, &subject, &file);
    // The processor's breakpoints change nothing in its memory.
    assert_eq!(victim.own_code(&program), Some(0));
    assert!(victim.0.try_wait().unwrap().is_none());
    let Some((early, late, ratios)) = found else {
        return;
    };
    assert!(
        early > 0.0 && early < 2.0 * late && late < 2.0 * early,
        "hits per unit of work: {early}, {late} ({ratios:?})"
    );
    victim.become_another();
    let begun = Instant::now();
    let ended = loop {
        match meter.read(&subject) {
            Ok(_) | Err(PlatformError::Busy { .. }) => {}
            Err(e) => break e.to_string(),
        }
        assert!(begun.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(
        ended.contains("was made anew") || ended.contains("has not run in"),
        "{ended}"
    );
}

/// Hits of a meter per unit of work early and late, and all that was read; `None` where the machine does not let that be seen.
fn hits_per_unit(meter: &mut dyn Meter, subject: &Workload, file: &Path) -> Option<(f64, f64, Vec<f64>)> {
    let truth = || {
        let bytes = std::fs::read(file).unwrap();
        u64::from_ne_bytes(bytes.try_into().unwrap())
    };
    // Where it is counted in turns, each reading speaks for the time since the one before, or for none. The number of hits per unit of
    // work is the same early and late, as far as a busy machine lets that be seen in time.
    let mut ratios: Vec<f64> = Vec::new();
    // On a busy machine it may be given up as early as this.
    let mut last = match meter.read(subject) {
        Ok(count) => (truth(), count),
        Err(e) => {
            eprintln!("skipped: it was given up: {e}");
            return None;
        }
    };
    let begun = Instant::now();
    while ratios.len() < 8 {
        if begun.elapsed() > Duration::from_secs(60) {
            eprintln!("skipped: on this machine it is counted too seldom: {ratios:?}");
            return None;
        }
        std::thread::sleep(Duration::from_millis(900));
        let count = match meter.read(subject) {
            Ok(count) => count,
            Err(e) => {
                eprintln!("skipped: it was given up: {e}");
                return None;
            }
        };
        let done = truth();
        if meter.counted().is_some() && count > last.1 {
            ratios.push((count - last.1) / done.saturating_sub(last.0).max(1) as f64);
        }
        last = (done, count);
    }
    // The middle one: of the time of a single reading the program may have had next to nothing.
    let middle = |part: &[f64]| {
        let mut sorted = part.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    let (early, late) = (middle(&ratios[..4]), middle(&ratios[4..]));
    Some((early, late, ratios))
}

/// Why the meter ended. Until then there was no breakpoint in the code of the program that it had become.
fn ends_without_touching(meter: &mut dyn Meter, subject: &Workload, victim: &Victim, other: &Path) -> String {
    let begun = Instant::now();
    loop {
        let own = victim.own_code(other);
        assert!(own.unwrap_or(0) == 0, "a breakpoint in another program: {own:?}");
        match meter.read(subject) {
            Ok(_) | Err(PlatformError::Busy { .. }) => {}
            Err(e) => return e.to_string(),
        }
        assert!(begun.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_program_that_becomes_another_during_the_search_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = build(directory.path()) else {
        return;
    };
    let (file, other) = (directory.path().join("count"), directory.path().join("other"));
    std::fs::copy(&program, &other).unwrap();
    let victim = Victim::work(&program, &file, &other);
    let subject = workload("victim", &[victim.0.id()]);
    let mut meter = match points().open(&Root::default(), &subject, &MeterId::from("points")) {
        Ok(meter) => meter,
        Err(e) => {
            eprintln!("skipped: {e}");
            return;
        }
    };
    // As soon as the first breakpoint was put into it.
    let begun = Instant::now();
    while victim.own_code(&program) == Some(0) {
        match meter.read(&subject) {
            Err(PlatformError::Busy { .. }) => {}
            other => {
                eprintln!("skipped: the search ended before a breakpoint was seen: {other:?}");
                return;
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(1));
    }
    victim.become_another();
    let ended = ends_without_touching(&mut *meter, &subject, &victim, &other);
    assert!(ended.contains("another program"), "{ended}");
}

/// A control group that can be frozen, of this process's making; gone with its end. Version one, or two.
struct Freezer {
    pid: u32,
    directory: PathBuf,
    state: PathBuf,
    frozen: &'static str,
    thawed: &'static str,
}

impl Freezer {
    /// Puts a process into it.
    fn of(pid: u32) -> Result<Self, std::io::Error> {
        let name = format!("homeostat-test-{}", std::process::id());
        let one = Path::new("/sys/fs/cgroup/freezer");
        let this = if one.is_dir() {
            let directory = one.join(name);
            Self {
                pid,
                state: directory.join("freezer.state"),
                frozen: "FROZEN",
                thawed: "THAWED",
                directory,
            }
        } else {
            let directory = Path::new("/sys/fs/cgroup").join(name);
            Self {
                pid,
                state: directory.join("cgroup.freeze"),
                frozen: "1",
                thawed: "0",
                directory,
            }
        };
        std::fs::create_dir(&this.directory)?;
        std::fs::write(this.directory.join("cgroup.procs"), pid.to_string())?;
        Ok(this)
    }

    fn freeze(&self) {
        std::fs::write(&self.state, self.frozen).unwrap();
    }

    fn thaw(&self) {
        let _ = std::fs::write(&self.state, self.thawed);
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        if let Some(above) = self.directory.parent() {
            let _ = std::fs::write(above.join("cgroup.procs"), self.pid.to_string());
        }
        let begun = Instant::now();
        while std::fs::remove_dir(&self.directory).is_err() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_program_that_is_frozen_during_the_search_is_left_with_no_breakpoint_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = build(directory.path()) else {
        return;
    };
    let (file, other) = (directory.path().join("count"), directory.path().join("other"));
    let victim = Victim::work(&program, &file, &other);
    let freezer = match Freezer::of(victim.0.id()) {
        Ok(freezer) => freezer,
        Err(e) => {
            eprintln!("skipped: no control group to freeze: {e}");
            return;
        }
    };
    let subject = workload("victim", &[victim.0.id()]);
    let original = victim.text(&program);
    let mut meter = match points().open(&Root::default(), &subject, &MeterId::from("points")) {
        Ok(meter) => meter,
        Err(e) => {
            eprintln!("skipped: {e}");
            return;
        }
    };
    let begun = Instant::now();
    while victim.own_code(&program) == Some(0) {
        match meter.read(&subject) {
            Err(PlatformError::Busy { .. }) => {}
            other => {
                eprintln!("skipped: the search ended before a breakpoint was seen: {other:?}");
                return;
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(1));
    }
    freezer.freeze();
    let ended = loop {
        match meter.read(&subject) {
            Ok(_) | Err(PlatformError::Busy { .. }) => {}
            Err(e) => break e.to_string(),
        }
        assert!(begun.elapsed() < Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(ended.contains("frozen"), "{ended}");
    // Whoever writes its state to disk now finds its own code and nothing else.
    assert!(
        victim.text(&program) == original,
        "a breakpoint is left in a frozen program"
    );
}

#[test]
fn a_program_that_only_waits_has_no_point() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = build(directory.path()) else {
        return;
    };
    let victim = Victim(Command::new(&program).arg("spin").spawn().unwrap());
    let subject = workload("victim", &[victim.0.id()]);
    let Err(why) = search(&subject) else {
        panic!("a point of a program that does nothing")
    };
    eprintln!("refused: {why}");
    assert!(why.len() > 20);
}

#[test]
fn the_platform_opens_a_meter_that_has_to_be_found_first() {
    use homeostat_linux::LinuxPlatform;
    use homeostat_platform::{SampleRequest, Sensors};

    let directory = tempfile::tempdir().unwrap();
    let Some(program) = build(directory.path()) else {
        return;
    };
    let file = directory.path().join("count");
    let victim = Victim(Command::new(&program).arg("work").arg(&file).spawn().unwrap());
    let pid = victim.0.id() as i32;
    let mut platform = LinuxPlatform::with_meters(Root::default(), &wanted());
    let snapshot = platform
        .sample(&SampleRequest {
            scan: true,
            detail: vec![],
        })
        .unwrap();
    let found = snapshot.workloads.unwrap_or_default();
    let Some(subject) = found.iter().find(|w| w.processes.iter().any(|p| p.pid == pid)) else {
        eprintln!("skipped: the scan does not show the program as a workload");
        return;
    };
    let id = MeterId::from("points");
    let offered = platform.find_meters(&subject.id).unwrap();
    let candidate = offered.iter().find(|c| c.id == id).unwrap();
    if let Some(why) = &candidate.refused {
        eprintln!("skipped: {why}");
        return;
    }
    // It is still being looked for, and open all the same.
    platform.open_meter(&subject.id, &id).unwrap();
    platform.close_meter(&subject.id, &id);
}
