//! Functions and static probes of small C programs that are called a known number of times.

use super::*;

/// Orders: `wN` calls work() N times; `fN` does so in a forked child; `tN` in each of three threads that were made
/// at the start; `pN` passes the static probes N times; `s` tells the semaphore; `v` stands still in the kernel until a byte comes; `mPATH` goes on calling
/// work() for ever, some ten thousand times a second, and counts in that file.
const PROGRAM: &str = r#"
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

volatile unsigned short semaphore_of_two __attribute__((section(".probes"), used));
volatile unsigned long sink;
static sem_t go[3], ready;
static unsigned long turns;

__attribute__((noinline)) void inner(unsigned long n) { sink += n; __asm__ volatile("" ::: "memory"); }
__attribute__((noinline)) void work(unsigned long n) { inner(n); inner(n + 1); __asm__ volatile("" ::: "memory"); }

#if defined __x86_64__ || defined __aarch64__
#define NOTE(provider, name, semaphore)                                       \
    __asm__ volatile("1: nop\n"                                               \
                     ".pushsection .note.stapsdt,\"\",\"note\"\n"             \
                     ".balign 4\n.4byte 8\n.4byte 3f-2f\n.4byte 3\n"          \
                     ".asciz \"stapsdt\"\n"                                   \
                     "2: .8byte 1b\n.8byte 0\n.8byte " semaphore "\n"         \
                     ".asciz \"" provider "\"\n.asciz \"" name "\"\n.asciz \"\"\n" \
                     "3: .balign 4\n.popsection\n")
#endif

static void go_on(char *path, int waits)
{
    volatile unsigned long *count;
    unsigned long i, x = 1;
    int fd;
    path[strcspn(path, "\n")] = 0;
    fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *count) != 0)
        exit(1);
    count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if ((void *)count == MAP_FAILED)
        exit(1);
    for (;;) {
        for (i = 0; i < 60000; i++)
            x = x * 2862933555777941757u + 3037000493u;
        work(x);
        (*count)++;
        if (waits) {
            sem_post(&go[0]);
            sem_wait(&ready);
        }
    }
}

static void *thread(void *p)
{
    unsigned long i, number = (unsigned long)p;
    for (;;) {
        sem_wait(&go[number]);
        for (i = 0; i < turns; i++)
            work(i);
        sem_post(&ready);
    }
    return NULL;
}

int main(void)
{
    char line[512];
    unsigned long i;
    pthread_t t;
    sem_init(&ready, 0, 0);
    for (i = 0; i < 3; i++) {
        sem_init(&go[i], 0, 0);
        if (getenv("THREADS") && pthread_create(&t, NULL, thread, (void *)i))
            return 1;
    }
    printf("here\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long n = strtoul(line + 1, NULL, 10);
        switch (line[0]) {
        case 'w':
            for (i = 0; i < n; i++)
                work(i);
            break;
        case 'f':
            if (fork() == 0) {
                for (i = 0; i < n; i++)
                    work(i);
                _exit(0);
            }
            wait(NULL);
            break;
        case 't':
            turns = n;
            for (i = 0; i < 3; i++)
                sem_post(&go[i]);
            for (i = 0; i < 3; i++)
                sem_wait(&ready);
            break;
        case 'p':
            for (i = 0; i < n; i++) {
                NOTE("shop", "one", "0");
                NOTE("shop", "two", "semaphore_of_two");
                if (i % 2)
                    NOTE("shop", "one", "0");
            }
            break;
        case 'v':
            if (vfork() == 0) {
                char end;
                _exit(read(0, &end, 1) < 0);
            }
            break;
        case 'm':
            go_on(line + 1, 0);
            break;
        case 'a':
            go_on(line + 1, 1);
            break;
        case 's':
            printf("%d\n", semaphore_of_two);
            fflush(stdout);
            continue;
        }
        printf("done\n");
        fflush(stdout);
    }
    return 0;
}
"#;

/// Waits until something asynchronous has happened; far longer than it ever takes.
fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts the program; `None`, with a printed reason, where probes cannot be tried.
pub(super) fn start(dir: &Path, name: &str, flags: &[&str]) -> Option<Servant> {
    let program = build(dir, name, flags)?;
    Some(run(&program, false))
}

fn build(dir: &Path, name: &str, flags: &[&str]) -> Option<PathBuf> {
    if !is_root() {
        println!("skipped: probes need root");
        return None;
    }
    if !Path::new("/sys/bus/event_source/devices/uprobe/type").exists() {
        println!("skipped: this kernel has no uprobe event source");
        return None;
    }
    let mut all = vec!["-O2", "-no-pie"];
    all.extend(flags);
    compile(dir, name, PROGRAM, &all)
}

fn run(program: &Path, threads: bool) -> Servant {
    let mut command = Command::new(program);
    if threads {
        command.env("THREADS", "1");
    }
    let mut s = Servant::start(&mut command);
    assert_eq!(s.answer(), "here");
    s
}

/// Whether this kernel counts many places at once, by process; prints a reason where it does not. What searching for points needs is
/// what counting in turns needs.
fn counts_many_at_once(w: &Workload) -> bool {
    let points = Meters::new(&MeterSettings {
        progress_points: PointsWish::Always,
        ..MeterSettings::default()
    })
    .refusal(w, "points");
    let lacks = points.contains("counting many places at once needs");
    if lacks {
        println!("skipped: {points}");
    }
    !lacks
}

#[test]
fn calls_of_a_function_are_counted_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let variants: [&[&str]; 3] = [
        &["-fcf-protection=none"],
        &["-fcf-protection=full", "-fno-omit-frame-pointer"],
        &["-pie", "-fPIE"],
    ];
    for (n, flags) in variants.iter().enumerate() {
        let flags: &[&str] = if cfg!(target_arch = "x86_64") { flags } else { &[] };
        let name = format!("caller{n}");
        let Some(mut c) = start(dir.path(), &name, flags) else {
            return;
        };
        let w = workload(&name, &[c.pid()]);
        let id = format!("uprobe:{name}:work");
        let mut meters = Meters::configured(&name, &[&id]);
        let found = meters.find(&w, &id).unwrap();
        assert_eq!(found.refused, None);
        println!("{flags:?}: {} a hit", found.cost_per_count.0);
        assert!(found.cost_per_count.0 > 0);
        let mut m = meters.open(&w, &id).unwrap();
        assert_eq!(reading(&mut *m, &w).unwrap(), 0.0);
        assert_eq!(c.order("w1234"), "done");
        assert_eq!(reading(&mut *m, &w).unwrap(), 1234.0);
        assert_eq!(c.order("w1"), "done");
        assert_eq!(reading(&mut *m, &w).unwrap(), 1235.0);
        // One counter per thread: a forked child counts only from when it is part of the workload.
        assert_eq!(c.order("f500"), "done");
        assert_eq!(reading(&mut *m, &w).unwrap(), 1235.0);
    }
}

#[test]
fn threads_made_before_the_opening_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "threads", &[]) else {
        return;
    };
    let mut c = run(&program, true);
    let w = workload("threads", &[c.pid()]);
    let mut m = Meters::configured("threads", &["uprobe:threads:work"])
        .open(&w, "uprobe:threads:work")
        .unwrap();
    assert_eq!(c.order("t300"), "done");
    assert_eq!(c.order("w5"), "done");
    assert_eq!(reading(&mut *m, &w).unwrap(), 905.0);
}

#[test]
fn several_processes_and_their_children_are_counted_when_nobody_else_runs_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "several", &[]) else {
        return;
    };
    let (mut a, mut b) = (run(&program, false), run(&program, false));
    let both = workload("several", &[a.pid(), b.pid()]);
    let id = "uprobe:several:work";
    let mut meters = Meters::configured("several", &[id]);
    let mut m = meters.open(&both, id).unwrap();
    assert_eq!(a.order("w10"), "done");
    assert_eq!(b.order("w200"), "done");
    assert_eq!(b.order("f3000"), "done");
    assert_eq!(reading(&mut *m, &both).unwrap(), 3210.0);
    // A third process of the file, of another workload: its hits cannot be told apart, so the meter ends.
    let _stranger = run(&program, false);
    let mut ended = Ok(0.0);
    eventually("the meter ends", || {
        ended = reading(&mut *m, &both);
        ended.is_err()
    });
    assert!(matches!(ended, Err(PlatformError::Vanished { .. })), "{ended:?}");
    // Opened now, each process is counted by itself, which tells them apart.
    let mut m = meters.open(&both, id).unwrap();
    assert_eq!(a.order("w11"), "done");
    assert_eq!(reading(&mut *m, &both).unwrap(), 11.0);
    // The end of one of them does not take its counts away.
    drop(a);
    let rest = workload("several", &[b.pid()]);
    assert_eq!(reading(&mut *m, &rest).unwrap(), 11.0);
    assert_eq!(b.order("w3"), "done");
    assert_eq!(reading(&mut *m, &rest).unwrap(), 14.0);
}

#[test]
fn static_probes_are_counted_at_all_their_places_and_with_their_semaphore() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut c) = start(dir.path(), "shop", &[]) else {
        return;
    };
    let w = workload("shop", &[c.pid()]);
    let (one, two) = ("usdt:shop:shop:one", "usdt:shop:shop:two");
    let mut meters = Meters::configured("shop", &[one, two, "usdt:shop:shop:none"]);
    assert!(
        meters
            .refusal(&w, "usdt:shop:shop:none")
            .contains("no static probe shop:none")
    );
    if cfg!(target_arch = "x86_64") {
        assert_eq!(
            meters.find(&w, one).unwrap().cost_per_count.0,
            1300,
            "a nop is emulated"
        );
    }
    let mut first = meters.open(&w, one).unwrap();
    assert_eq!(c.order("s"), "0");
    let mut second = meters.open(&w, two).unwrap();
    assert_ne!(
        c.order("s"),
        "0",
        "the kernel raises the semaphore while we count"
    );
    assert_eq!(c.order("p100"), "done");
    assert_eq!(reading(&mut *first, &w).unwrap(), 150.0);
    assert_eq!(reading(&mut *second, &w).unwrap(), 100.0);
    drop(second);
    eventually("the semaphore falls after the meter is closed", || {
        c.order("s") == "0"
    });
    assert_eq!(c.order("p2"), "done");
    assert_eq!(reading(&mut *first, &w).unwrap(), 153.0);
}

#[test]
fn what_cannot_be_counted_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let Some(c) = start(dir.path(), "stripped", &["-s"]) else {
        return;
    };
    let w = workload("stripped", &[c.pid()]);
    let ids = [
        "uprobe:stripped:work",
        "usdt:stripped:shop:none",
        "uprobe:libnothing.so:f",
        "uprobe:/etc/passwd:f",
        "uprobe:nothing",
        "urpobe:stripped:work",
        "uprobe:stripped:sink",
    ];
    let mut meters = Meters::configured("stripped", &ids);
    let mut why = |id: &str| meters.refusal(&w, id);
    assert!(
        why(ids[0]).contains("install a build with symbols"),
        "{}",
        why(ids[0])
    );
    assert!(why(ids[1]).contains("no static probe"));
    assert!(why(ids[2]).contains("name the program or one of its libraries"));
    assert!(why(ids[3]).contains("no code"));
    assert!(why(ids[4]).contains("write uprobe:BINARY:SYMBOL"));
    assert!(why(ids[5]).contains("begins with uprobe:"));
    assert!(!why(ids[6]).is_empty());
    for id in ids {
        assert!(meters.open(&w, id).is_err(), "{id}");
    }
}

#[test]
fn a_function_of_a_library_is_counted_in_this_process_alone() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "library", &[]) else {
        return;
    };
    let (mut a, mut b) = (run(&program, false), run(&program, false));
    let w = workload("library", &[a.pid()]);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", a.pid())).unwrap();
    let Some(libc) = maps
        .lines()
        .filter_map(|l| l.split_whitespace().nth(5))
        .find(|p| p.contains("/libc"))
    else {
        println!("skipped: the C library is linked in");
        return;
    };
    let id = format!("uprobe:{}:fflush", libc.rsplit('/').next().unwrap());
    let mut meters = Meters::configured("library", &[&id]);
    let mut m = match meters.open(&w, &id) {
        Ok(m) => m,
        // All who have the library mapped are looked at, whoever runs on this machine.
        Err(e) => {
            println!("skipped: {e}");
            return;
        }
    };
    for _ in 0..5 {
        assert_eq!(a.order("w1"), "done");
        assert_eq!(b.order("w1"), "done");
    }
    // One flush per answer.
    assert_eq!(reading(&mut *m, &w).unwrap(), 5.0);
}

#[test]
fn a_known_function_is_not_counted_while_others_have_the_program_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "redis-server", &["-Dwork=readQueryFromClient"]) else {
        return;
    };
    let mut alone = run(&program, false);
    let w = workload("redis-server", &[alone.pid()]);
    let id = "uprobe:redis-server:readQueryFromClient";
    // By whichever of its names a person knows the file, there is one meter of the function, and what it counts is known.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&program, &link).unwrap();
    for path in [&program, &link] {
        let named = format!("uprobe:{}:readQueryFromClient", path.display());
        let mut meters = Meters::configured("redis-server", &[&named]);
        let found = meters.find(&w, &named).expect("it is found by this name");
        assert_eq!(
            (found.unit.as_str(), found.refused),
            ("request batch", None),
            "{named}"
        );
        assert!(meters.find(&w, id).is_none(), "{named} is there twice");
    }
    // No person has named it: it is known.
    let mut m = match Meters::plain().open(&w, id) {
        Ok(m) => m,
        // All who run on this machine are looked at, and may be in the way; but nobody else has this program.
        Err(e) => {
            assert!(!e.to_string().contains("is mapped by"), "{e}");
            println!("skipped: {e}");
            return;
        }
    };
    assert_eq!(alone.order("w12"), "done");
    assert_eq!(reading(&mut *m, &w).unwrap(), 12.0);
    drop(m);
    let other = run(&program, false);
    let why = Meters::plain().open(&w, id).err().map(|e| e.to_string());
    let why = why.expect("it is counted though another process has the program mapped");
    if !why.contains(&format!("process {}", other.pid())) {
        assert!(!why.contains("is mapped by"), "{why}");
        println!("skipped: {why}");
        return;
    }
    // Where a person has named it, others are looked at like the workload.
    let mut m = Meters::configured("redis-server", &[id]).open(&w, id).unwrap();
    assert_eq!(alone.order("w3"), "done");
    assert_eq!(reading(&mut *m, &w).unwrap(), 3.0);
}

#[test]
fn a_function_that_would_cost_too_much_is_counted_in_turns_and_follows_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut c) = start(dir.path(), "often", &[]) else {
        return;
    };
    let w = workload("often", &[c.pid()]);
    if !counts_many_at_once(&w) {
        return;
    }
    let code = code_of_work(&dir.path().join("often"), c.pid());
    let original = code();
    let id = "uprobe:often:work";
    let file = dir.path().join("count");
    let mut m = Meters::configured("often", &[id]).open(&w, id).unwrap();
    writeln!(c.input, "m{}", file.display()).unwrap();
    c.input.flush().unwrap();
    eventually("it works", || file.metadata().is_ok_and(|f| f.len() == 8));
    let truth = || u64::from_ne_bytes(std::fs::read(&file).unwrap().try_into().unwrap());
    let mut last = (truth(), reading(&mut *m, &w).unwrap());
    let mut ratios = Vec::new();
    let begun = Instant::now();
    while ratios.len() < 5 {
        if begun.elapsed() > Duration::from_secs(60) {
            println!("skipped: on this machine it hardly runs: {ratios:?}");
            return;
        }
        std::thread::sleep(Duration::from_millis(900));
        let now = (truth(), reading(&mut *m, &w).unwrap());
        assert!(now.1 >= last.1);
        // Of a part of the time, which was long enough to say something.
        if m.counted().is_some_and(|share| share < 0.9) {
            ratios.push((now.1 - last.1) / now.0.saturating_sub(last.0).max(1) as f64);
        }
        last = now;
    }
    // The middle one: what was read and what was done are not looked at in the same moment.
    ratios.sort_by(f64::total_cmp);
    assert!((0.5..2.0).contains(&ratios[2]), "hits per call: {ratios:?}");
    eventually("between its turns the code is as it was", || code() == original);
    eventually("in its turn it is counted", || code() != original);
    drop(m);
    eventually("the breakpoint goes with the meter", || code() == original);
}

/// Where each coming and going of a breakpoint is known to cost something the time between windows is told by how often the threads
/// waited: known is that by the name of the program.
#[test]
fn what_is_told_by_waits_follows_the_work_of_who_waits_for_each_unit_and_of_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "mariadbd", &[]) else {
        return;
    };
    for waits in [true, false] {
        let mut c = run(&program, true);
        let w = workload("mariadbd", &[c.pid()]);
        if !counts_many_at_once(&w) {
            return;
        }
        let id = "uprobe:mariadbd:work";
        let file = dir.path().join(format!("count{waits}"));
        let mut meters = Meters::configured("mariadbd", &[id]);
        let lag = meters.find(&w, id).unwrap().lag;
        assert!(lag.as_secs_f64() > 2.0, "a trial leaves that out: {lag}");
        let mut m = meters.open(&w, id).unwrap();
        writeln!(c.input, "{}{}", if waits { 'a' } else { 'm' }, file.display()).unwrap();
        c.input.flush().unwrap();
        eventually("it works", || file.metadata().is_ok_and(|f| f.len() == 8));
        let truth = || u64::from_ne_bytes(std::fs::read(&file).unwrap().try_into().unwrap());
        let mut ratios = Vec::new();
        let mut last = None;
        let begun = Instant::now();
        let lost = loop {
            std::thread::sleep(Duration::from_millis(500));
            let now = match m.read(&w) {
                Ok(count) => (truth(), count),
                Err(PlatformError::Busy { .. }) => continue,
                Err(e) => break Some(e.to_string()),
            };
            // Most readings have no window in them: they tell something all the same.
            if let Some((done, count)) = last.replace(now) {
                if m.counted().is_some_and(|share| share < 0.001) {
                    ratios.push((now.1 - count) / now.0.saturating_sub(done).max(1) as f64);
                }
            }
            if ratios.len() == 9 {
                break None;
            }
            if begun.elapsed() > Duration::from_secs(90) {
                println!("skipped: on this machine it hardly runs: {ratios:?}");
                return;
            }
        };
        if waits && lost.is_none() {
            ratios.sort_by(f64::total_cmp);
            assert!((0.5..2.0).contains(&ratios[4]), "hits per call: {ratios:?}");
        } else if waits {
            // On a machine that is too busy: never for what it waits for.
            println!("skipped: {lost:?}");
            assert!(!lost.unwrap().contains("several connections"));
        } else {
            let why = lost.expect("nothing waits here for what it does");
            assert!(why.contains("in turns it cannot be counted"), "{why}");
            assert!(
                ratios.is_empty(),
                "nothing is told by waits that are none: {ratios:?}"
            );
        }
    }
}

/// Opens a probe and waits to be killed: the other half of the next test.
#[test]
#[ignore = "a helper process of another test"]
fn prober() {
    let Ok(pid) = std::env::var("PROBER_TARGET") else {
        return;
    };
    let w = workload("prey", &[pid.parse().unwrap()]);
    let m = Meters::configured("prey", &["uprobe:prey:work"])
        .open(&w, "uprobe:prey:work")
        .unwrap();
    std::fs::write(std::env::var("PROBER_READY").unwrap(), "").unwrap();
    std::thread::sleep(Duration::from_secs(600));
    drop(m);
}

/// Reads the first bytes of work() in the memory of a process. The program is not position independent: its addresses are those of
/// the symbol table.
fn code_of_work(program: &Path, pid: u32) -> impl Fn() -> [u8; 8] + use<> {
    let nm = Command::new("nm").arg(program).output().unwrap();
    let nm = String::from_utf8(nm.stdout).unwrap();
    let line = nm.lines().find(|l| l.ends_with(" T work")).unwrap();
    let address = u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    move || {
        let mut b = [0u8; 8];
        std::os::unix::fs::FileExt::read_exact_at(&memory, &mut b, address).unwrap();
        b
    }
}

#[test]
fn while_a_process_stands_still_its_breakpoints_stay_and_go_when_it_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut c) = start(dir.path(), "still", &[]) else {
        return;
    };
    let code = code_of_work(&dir.path().join("still"), c.pid());
    let original = code();
    let w = workload("still", &[c.pid()]);
    let id = "uprobe:still:work";
    let mut m = Meters::configured("still", &[id]).open(&w, id).unwrap();
    assert_eq!(c.order("w5"), "done");
    assert_eq!(reading(&mut *m, &w).unwrap(), 5.0);
    assert_ne!(code(), original);
    // The parent of a process that was made by vfork waits for it as for a device.
    writeln!(c.input, "v").unwrap();
    c.input.flush().unwrap();
    let state = |c: &Servant| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", c.pid())).unwrap();
        stat.rsplit(')').next().unwrap().trim().chars().next()
    };
    eventually("it stands still", || state(&c) == Some('D'));
    // What was seen just before it did holds for a moment.
    std::thread::sleep(Duration::from_millis(500));
    drop(m);
    // Longer than it is waited for.
    std::thread::sleep(Duration::from_secs(4));
    assert_ne!(code(), original, "to let go of it would have been to wait for it");
    c.input.write_all(b"x").unwrap();
    c.input.flush().unwrap();
    assert_eq!(c.answer(), "done");
    eventually("the breakpoint goes when it goes on", || code() == original);
}

#[test]
fn what_stays_on_because_somebody_stands_still_is_paid_for() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "payer", &[]) else {
        return;
    };
    let (mut still, mut busy) = (run(&program, false), run(&program, false));
    let both = workload("payer", &[still.pid(), busy.pid()]);
    if !counts_many_at_once(&both) {
        return;
    }
    let id = "uprobe:payer:work";
    let mut m = Meters::configured("payer", &[id]).open(&both, id).unwrap();
    // It waits for its child as for a device.
    writeln!(still.input, "v").unwrap();
    still.input.flush().unwrap();
    eventually(
        "it is seen that one of them stands still",
        || matches!(m.read(&both), Err(PlatformError::Busy { why, .. }) if why.contains("does not go on")),
    );
    // The breakpoints cannot go now, and the other passes one all the time.
    writeln!(busy.input, "w2000000000").unwrap();
    busy.input.flush().unwrap();
    let mut ended = String::new();
    eventually("counting is given up, for what it costs", || {
        match m.read(&both) {
            Ok(_) | Err(PlatformError::Busy { .. }) => false,
            Err(e) => {
                ended = e.to_string();
                true
            }
        }
    });
    assert!(ended.contains("to make up for"), "{ended}");
}

/// Traces a process, which goes on meanwhile, until it is killed itself.
const TRACER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int traces = argc == 2 && ptrace(PTRACE_SEIZE, (pid_t)atoi(argv[1]), NULL, NULL) == 0;
    puts(traces ? "here" : "not permitted");
    fflush(stdout);
    while (traces)
        pause();
    return 0;
}
"#;

#[test]
fn whichever_process_is_traced_the_breakpoints_go_soon_and_come_back_after_that() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = build(dir.path(), "traced", &[]) else {
        return;
    };
    let Some(tracing) = compile(dir.path(), "tracing", TRACER, &[]) else {
        return;
    };
    // More than are looked at at once.
    let mut all: Vec<Servant> = (0..20).map(|_| run(&program, false)).collect();
    let pids: Vec<u32> = all.iter().map(Servant::pid).collect();
    let w = workload("traced", &pids);
    if !counts_many_at_once(&w) {
        return;
    }
    let last = all.last_mut().unwrap();
    let code = code_of_work(&program, last.pid());
    let original = code();
    let id = "uprobe:traced:work";
    let mut m = Meters::configured("traced", &[id]).open(&w, id).unwrap();
    // Everybody has been looked at just before counting begins, and is again five seconds later. Whoever is noticed long before that was
    // looked for. What else runs on this machine may hold that up: once in some times is enough.
    let mut took: Vec<Duration> = Vec::new();
    while took.iter().all(|time| *time >= Duration::from_secs(2)) {
        assert!(took.len() < 5, "the breakpoint stayed: {took:?}");
        eventually("it is counted", || code() != original);
        let begun = Instant::now();
        let mut tracer = Servant::start(Command::new(&tracing).arg(last.pid().to_string()));
        if tracer.answer() != "here" {
            println!("skipped: nobody may trace a process here");
            return;
        }
        eventually("the breakpoint goes from who is traced", || code() == original);
        took.push(begun.elapsed());
        eventually(
            "it is told why nothing is counted",
            || matches!(m.read(&w), Err(PlatformError::Busy { why, .. }) if why.contains("is being traced")),
        );
        // Others who are looked at are traced by nobody.
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(code(), original, "it came back while somebody traces the process");
    }
    // The last tracer is gone.
    eventually("it is counted again", || code() != original);
    let mut told = reading(&mut *m, &w).unwrap();
    eventually("what it does is told again, to the hit", || {
        assert_eq!(last.order("w7"), "done");
        let now = reading(&mut *m, &w).unwrap();
        std::mem::replace(&mut told, now) + 7.0 == now
    });
}

#[test]
fn a_killed_prober_leaves_no_breakpoint() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut c) = start(dir.path(), "prey", &[]) else {
        return;
    };
    let code = code_of_work(&dir.path().join("prey"), c.pid());
    let original = code();
    let ready = dir.path().join("ready");
    let mut prober = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "probes::prober"])
        .env("PROBER_TARGET", c.pid().to_string())
        .env("PROBER_READY", &ready)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the prober is ready", || {
        ready.exists() || prober.try_wait().unwrap().is_some()
    });
    let probed = code();
    prober.kill().unwrap();
    prober.wait().unwrap();
    assert_ne!(probed, original, "the breakpoint was there");
    eventually("the breakpoint goes with its prober", || code() == original);
    assert_eq!(c.order("w10"), "done");
}
