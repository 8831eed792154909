//! kill -9 at every step of the journal with the prefetchers of a made machine: restart, and every register is as it was
//! found.
//!
//! The machine is a directory: `/dev/cpu/N/msr` are sparse files, read and written by the effector as it reads and writes
//! the kernel's devices. For each fault point this test binary is started again as a *child* that carries out an action
//! through journal and effector and is killed by SIGKILL at that point, or in the middle of a slice: there the register of
//! one CPU is a pipe, which lets nobody in, until the child is dead. Then a fresh journal and fresh effectors restore.

use crate::recovery::restore;
use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_model::action::Target;
use homeostat_model::{Action, CpuId, Direction, ExperimentId};
use homeostat_platform::Effectors;
use homeostat_store::journal::{Coin, FAULT_POINTS, Note};
use homeostat_store::{Journal, JournalOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const CRASH: &str = "HOMEOSTAT_TEST_REGISTER_CRASH";
const BOOT: &str = "boot-of-registers";
const CPUS: u32 = 24;
/// Where a slice is broken off.
const STUCK: u32 = 10;
/// MSR_MISC_FEATURE_CONTROL of Intel.
const REGISTER: u64 = 0x1A4;
/// What the registers hold: a bit that is not about prefetch on every third CPU.
fn found(cpu: u32) -> u64 {
    if cpu % 3 == 0 { 0x20 } else { 0 }
}

fn register(machine: &Path, cpu: u32) -> PathBuf {
    machine.join(format!("dev/cpu/{cpu}/msr"))
}

fn value(machine: &Path, cpu: u32) -> u64 {
    let mut bytes = [0; 8];
    std::fs::File::open(register(machine, cpu))
        .unwrap()
        .read_exact_at(&mut bytes, REGISTER)
        .unwrap();
    u64::from_le_bytes(bytes)
}

fn make_machine(machine: &Path) {
    let write = |path: &str, text: &str| {
        let path = machine.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write(
        "proc/cpuinfo",
        "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 85\nflags : fpu\n",
    );
    write("proc/sys/kernel/random/boot_id", BOOT);
    let all = format!("0-{}\n", CPUS - 1);
    write("sys/devices/system/cpu/online", &all);
    write("sys/devices/system/cpu/present", &all);
    write("sys/module/msr/parameters/allow_writes", "on\n");
    for cpu in 0..CPUS {
        let path = register(machine, cpu);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(path).unwrap();
        file.write_all_at(&found(cpu).to_le_bytes(), REGISTER).unwrap();
    }
}

fn kill_self() -> ! {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}

/// Makes the register of one CPU let nobody in, and kills this process when the CPU before it was switched.
fn die_half_way(machine: &Path, switched: bool) {
    let path = register(machine, STUCK);
    std::fs::rename(&path, path.with_extension("kept")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let machine = machine.to_owned();
    std::thread::spawn(move || {
        while (value(&machine, STUCK - 1) & 0xF == 0xF) != switched {
            std::thread::yield_now();
        }
        kill_self();
    });
}

/// Puts the register back as it was.
fn let_in(machine: &Path) {
    let path = register(machine, STUCK);
    let kept = path.with_extension("kept");
    if kept.exists() {
        std::fs::rename(kept, path).unwrap();
    }
}

/// The child: applies and undoes through the journal, and dies at the named point.
#[test]
#[ignore = "started by the crash test, not by itself"]
fn register_crash_child() {
    let Ok(plan) = std::env::var(CRASH) else { return };
    let (point, directory) = plan.split_once(' ').unwrap();
    let directory = Path::new(directory);
    let machine = directory.join("machine");
    let wanted = point.to_owned();
    let options = JournalOptions {
        fault: Some(Box::new(move |at: &'static str| {
            if at == wanted {
                kill_self();
            }
            Ok(())
        })),
        compact_bytes: Some(1),
    };
    let (mut journal, _) = Journal::open(&directory.join("state"), options).unwrap();
    let action = Action {
        id: journal.next_action_id(),
        effector: "prefetch".into(),
        workload: "w".into(),
        target: Target::Cpus((0..CPUS).map(CpuId).collect()),
        arguments: std::collections::BTreeMap::new(),
        why: "crash test".into(),
    };
    let mut effectors = Registry::new(&Root::new(&machine));
    let record = effectors.prepare(&action).unwrap();
    journal.intend(&record).unwrap();
    journal
        .note(Note::Coin(Coin {
            experiment: ExperimentId(1),
            block: 0,
            on: true,
        }))
        .unwrap();
    let drive = |effectors: &mut Registry, direction| {
        while !effectors.advance(&record, direction).unwrap().done {}
    };
    if point == "own.apply_half" {
        die_half_way(&machine, true);
    }
    drive(&mut effectors, Direction::Apply);
    journal.applied(record.action.id).unwrap();
    if point == "own.applied" {
        kill_self();
    }
    journal.undoing(record.action.id).unwrap();
    if point == "own.undo_half" {
        die_half_way(&machine, false);
    }
    drive(&mut effectors, Direction::Undo);
    journal.put_back(record.action.id).unwrap();
    journal.closed(record.action.id).unwrap();
    println!("SURVIVED");
}

#[test]
fn killed_at_every_step_the_registers_are_as_they_were_found() {
    let own = ["own.apply_half", "own.applied", "own.undo_half", "own.never"];
    let mut died = 0;
    let mut left_switched = 0;
    for point in FAULT_POINTS.iter().chain(&own) {
        let directory = tempfile::tempdir().unwrap();
        let machine = directory.path().join("machine");
        make_machine(&machine);
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "register_crash_tests::register_crash_child",
                "--exact",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CRASH, format!("{point} {}", directory.path().display()))
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let killed = !output.status.success();
        died += usize::from(killed);
        assert!(killed || text.contains("SURVIVED"), "{point}: {text}");
        assert!(!killed || !text.contains("panicked"), "{point}: {text}");
        let_in(&machine);
        let switched = (0..CPUS).filter(|c| value(&machine, *c) & 0xF == 0xF).count();
        left_switched += usize::from(switched > 0);
        match *point {
            "own.apply_half" => assert_eq!(switched as u32, STUCK),
            "own.undo_half" => assert_eq!(switched as u32, CPUS - STUCK),
            _ => {}
        }

        let (mut journal, _) =
            Journal::open(&directory.path().join("state"), JournalOptions::default()).unwrap();
        let mut effectors = Registry::new(&Root::new(&machine));
        let report = restore(&mut journal, &mut effectors, &MonotonicClock, BOOT, false);
        assert!(report.complete(), "{point}: {report:?}");
        assert_eq!(journal.owed().count(), 0, "{point}");
        for cpu in 0..CPUS {
            assert_eq!(value(&machine, cpu), found(cpu), "{point}: CPU {cpu}");
        }
        println!("{point}: killed {killed}, {switched} of {CPUS} CPUs were switched off");
    }
    assert!(died >= 9, "only {died} fault points were reached");
    assert!(
        left_switched >= 3,
        "only {left_switched} crashes left anything to undo"
    );
}
