//! What a homeostat that is killed leaves behind, and that it is taken out.

use crate::owed::*;
use homeostat_kernel::bpf::Counters;
use homeostat_kernel::process::start_ticks;
use homeostat_meters::code_file::{CodeFile, Memory, mappings, own_code};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

#[test]
fn who_ends_waits_for_what_has_begun_and_nothing_begins_after() {
    let gate = Gate::new();
    assert!(gate.wait(Duration::ZERO));
    gate.enter().unwrap();
    assert!(!gate.wait(Duration::ZERO));
    gate.end();
    assert!(gate.enter().is_err() && gate.open().is_err());
    assert!(!gate.wait(Duration::ZERO), "the first is on still");
    gate.leave();
    assert!(gate.wait(Duration::ZERO), "the refused one is not waited for");
}

#[test]
fn a_nop_of_five_bytes_is_told_from_others() {
    let nop = [0x0f, 0x1f, 0x44, 0x00, 0x00, 0xc3, 0, 0];
    assert_eq!(looks_replaceable(&nop), cfg!(target_arch = "x86_64"));
    for other in [[0x90; 8], [0x0f, 0x1f, 0x40, 0, 0x55, 0, 0, 0]] {
        assert!(!looks_replaceable(&other) && !is_replaced(&other));
    }
    assert!(!looks_replaceable(&nop[..4]));
}

#[test]
fn a_killed_writer_that_nobody_has_waited_for_does_not_keep_its_record() {
    let state = tempfile::tempdir().unwrap();
    let directory = record::directory_of(state.path());
    std::fs::create_dir(&directory).unwrap();
    let dir = record::open_private(&directory).unwrap();
    let Ok(mut writer) = Command::new("sleep").arg("600").spawn() else {
        println!("skipped: no sleep to start");
        return;
    };
    let boot = record::boot_id().unwrap();
    let record = record::Record::new(boot, process(writer.id()), vec![nowhere()]);
    record::write(&dir, &record, false).unwrap();
    mend(state.path());
    assert_eq!(record::names(&dir).unwrap().len(), 1, "it lives");
    writer.kill().unwrap();
    // It has ended, and is there until it is waited for.
    let begun = Instant::now();
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", writer.id())).unwrap();
        if stat.contains(") Z ") {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{stat}");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Whom the look at all processes cannot see may change while it is taken.
    while !mend(state.path()).left.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(120));
    }
    let left = record::names(&dir).unwrap();
    writer.wait().unwrap();
    if cfg!(target_arch = "x86_64") {
        assert_eq!(left, Vec::<String>::new());
    }
}

fn process(pid: u32) -> ProcessId {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
    ProcessId {
        pid: i32::try_from(pid).unwrap(),
        start_ticks: start_ticks(&stat).unwrap(),
    }
}

/// An entry of a file that nobody has mapped.
fn nowhere() -> Entry {
    Entry {
        processes: vec![ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        }],
        device_inode: ((0, 0), u64::MAX),
        path: "/no/such/program".to_owned(),
        breakpoints: vec![Breakpoint {
            offset: 0,
            semaphore: 0,
            code: [0x90; CODE],
        }],
    }
}

#[test]
fn records_of_the_living_are_left_alone_and_those_of_the_dead_are_settled() {
    let state = tempfile::tempdir().unwrap();
    assert_eq!(mend(state.path()), Mended::default(), "homeostat was never here");
    let directory = record::directory_of(state.path());
    std::fs::create_dir(&directory).unwrap();
    let dir = record::open_private(&directory).unwrap();
    let boot = record::boot_id().unwrap();
    let living = process(std::process::id());
    let dead = |n| ProcessId {
        pid: i32::MAX - n,
        start_ticks: 1,
    };
    let write = |boot: &str, writer| {
        let record = record::Record::new(boot.to_owned(), writer, vec![nowhere()]);
        record::write(&dir, &record, false).unwrap();
    };
    write(&boot, living);
    write(&boot, dead(1));
    write("another boot", dead(2));
    assert_eq!(record::names(&dir).unwrap().len(), 3);
    assert_eq!(mend(state.path()), Mended::default());
    let left = record::names(&dir).unwrap();
    assert_eq!(
        left,
        [format!("{}-{}.json", living.pid, living.start_ticks)],
        "only that of the living"
    );
}

/// Runs through a page of `nop`, again and again, and tells where it is.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <unistd.h>
__attribute__((noinline, aligned(4096))) void places(void) { __asm__ volatile(".rept 400\n nop\n .endr\n"); }
int main(void)
{
    printf("%lx\n", (unsigned long)places);
    fflush(stdout);
    for (;;) {
        places();
        usleep(10000);
    }
}
"#;
/// Places of it that are counted.
const PLACES: usize = 400;

struct Victim {
    child: Child,
    address: u64,
}

impl Victim {
    fn start(program: &Path) -> Self {
        let mut child = Command::new(program).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let start = u64::from_str_radix(line.trim(), 16).unwrap();
        let mut this = Self {
            child,
            address: start,
        };
        // Behind what the function begins with.
        let code = this.code();
        let before = code.iter().take_while(|byte| **byte != 0x90).count();
        this.address += before as u64;
        assert_eq!(this.code(), [0x90; PLACES]);
        this
    }

    fn code(&self) -> [u8; PLACES] {
        let memory = std::fs::File::open(format!("/proc/{}/mem", self.child.id())).unwrap();
        let mut code = [0; PLACES];
        memory.read_exact_at(&mut code, self.address).unwrap();
        code
    }

    fn left(&self) -> usize {
        self.code().iter().filter(|byte| **byte == 0xcc).count()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Puts breakpoints in and takes them out, all the time: the other half of the next test, which kills it.
#[test]
#[ignore = "a helper process of another test"]
fn attacher() {
    let (Ok(pid), Ok(address), Ok(state)) = (
        std::env::var("ATTACHER_TARGET"),
        std::env::var("ATTACHER_ADDRESS"),
        std::env::var("ATTACHER_STATE"),
    ) else {
        return;
    };
    write_breakpoints_down_in(Path::new(&state));
    let process = process(pid.parse().unwrap());
    let address: u64 = address.parse().unwrap();
    let root = Root::default();
    let mapping = mappings(&root, process)
        .into_iter()
        .find(|m| (m.start..m.end).contains(&address))
        .unwrap();
    let target = Target {
        device_inode: mapping.device_inode,
        path: mapping.path.clone(),
        file: Arc::new(CodeFile::mapped(&root, process, &mapping).unwrap()),
    };
    let offset = address - mapping.start + mapping.offset;
    let places: Vec<(u64, u32)> = (0..PLACES as u64).map(|n| (offset + n, 0)).collect();
    let entry = Entry::new(&target, places.iter().copied(), &[process]).unwrap();
    let owed = Owed::begin(&root, vec![entry]).unwrap();
    let counters = Counters::new(1).unwrap();
    // Until it is killed, or whoever started it is gone.
    for round in 0..3_000 {
        let _on = owed.take().unwrap();
        let link = counters
            .attach_static(target.file.kernel_path(), &places, 0, Some(process.pid))
            .unwrap();
        std::thread::sleep(Duration::from_millis(10));
        drop(link);
        if round == 0 {
            std::fs::write(Path::new(&state).join("ready"), "").unwrap();
        }
    }
}

#[test]
fn what_a_kill_has_left_in_a_program_is_taken_out() {
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: breakpoints are known on x86-64 only");
        return;
    }
    if let Err(e) = Counters::new(1).and_then(|c| c.reliable()) {
        println!("skipped: this kernel or this user cannot count many places ({e})");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("places.c"), directory.path().join("places"));
    std::fs::write(&source, PROGRAM).unwrap();
    let built = Command::new("cc")
        .args(["-O2", "-fno-omit-frame-pointer", "-o"])
        .args([&program, &source])
        .status();
    if !built.is_ok_and(|s| s.success()) {
        println!("skipped: no C compiler");
        return;
    }
    let mut victim = Victim::start(&program);
    let original = victim.code();
    let (mut killed, mut seen) = (0, 0);
    for _ in 0..20 {
        let state = tempfile::tempdir().unwrap();
        let mut attacher = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "meters::owed::tests::attacher"])
            .env("ATTACHER_TARGET", victim.child.id().to_string())
            .env("ATTACHER_ADDRESS", victim.address.to_string())
            .env("ATTACHER_STATE", state.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let ready = state.path().join("ready");
        let begun = Instant::now();
        let mut ended = false;
        while !ready.exists() && !ended {
            assert!(begun.elapsed() < Duration::from_secs(120), "it never counted");
            ended = attacher.try_wait().unwrap().is_some();
            std::thread::sleep(Duration::from_millis(1));
        }
        // In the middle of putting them in or taking them out, where that is seen.
        let begun = Instant::now();
        while !(1..PLACES).contains(&victim.left()) && begun.elapsed() < Duration::from_secs(2) {}
        let _ = attacher.kill();
        attacher.wait().unwrap();
        if ended {
            println!("skipped: it cannot count in this program here");
            return;
        }
        killed += 1;
        let left = victim.left();
        // Whom the mending would have to wait for may be many things on a busy machine: it is tried again.
        let begun = Instant::now();
        let mut taken_out = Vec::new();
        loop {
            let mended = mend(state.path());
            taken_out.extend(mended.taken_out);
            if mended.left.is_empty() {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", mended.left);
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(victim.code(), original, "{left} had been left; {taken_out:?}");
        assert_eq!(taken_out.is_empty(), left == 0, "{left} were left; {taken_out:?}");
        assert_eq!(
            mend(state.path()),
            Mended::default(),
            "nothing is written down any more"
        );
        if left > 0 {
            println!("kill {killed}: {left} of {PLACES} breakpoints were left");
            seen += 1;
        }
        if seen == 2 {
            break;
        }
    }
    if seen == 0 {
        println!("skipped: after {killed} kills nothing was ever left");
    }
    assert!(
        victim.child.try_wait().unwrap().is_none(),
        "the program has survived"
    );
}

#[test]
fn a_breakpoint_is_taken_for_ours_only_while_ours_may_be_there() {
    let stat = std::fs::read("/proc/self/stat").unwrap();
    let own = ProcessId {
        pid: std::process::id() as i32,
        start_ticks: start_ticks(&stat).unwrap(),
    };
    let root = Root::default();
    let mapping = own_code(&root, own).unwrap();
    let Ok(file) = CodeFile::mapped(&root, own, &mapping) else {
        eprintln!("skipped: the file of this program may not be counted in");
        return;
    };
    // A byte of our own code that looks like one, as if the file held something else there.
    let mut code = vec![0; usize::try_from(mapping.end - mapping.start).unwrap()];
    let n = file.file().read_at(&mut code, mapping.offset).unwrap();
    let looks_like_one = code[..n.saturating_sub(16)].iter().position(|byte| *byte == 0xcc);
    let Some(within) = looks_like_one else {
        println!("skipped: no such byte in this program");
        return;
    };
    let offset = mapping.offset + within as u64;
    let mut bytes = file.bytes(offset).unwrap();
    bytes[0] = 0x90;
    let memory = Memory::open(&root, own).unwrap();
    let agrees = || memory.agrees(&mapping.device_inode, offset, &bytes, is_on);
    assert!(!agrees(), "nobody counts there");
    let target = crate::concern::Target {
        device_inode: mapping.device_inode,
        path: mapping.path.clone(),
        file: std::sync::Arc::new(file),
    };
    let entry = Entry::new(&target, [(offset, 0)], &[own]).unwrap();
    let ours = Owed::unwritten(vec![entry]).unwrap();
    assert!(!agrees(), "it may come, and is not there yet");
    let on = ours.take().unwrap();
    assert!(agrees());
    let second = on.clone();
    drop(on);
    assert!(agrees());
    drop(second);
    assert!(!agrees(), "it is gone");
}
