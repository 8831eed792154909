//! The effector on made machines: registers are files below a root of our own, sparse ones for MSRs, read and written
//! through the same calls as the devices of the kernel. Faults are the kernel's own: a socket answers `ENXIO`, unmapped
//! memory `EIO`, a sealed file `EPERM`, and `/dev/zero` swallows what is written.

use crate::Registry;
use crate::prefetch::*;
use homeostat_model::CpuId;
use homeostat_platform::conformance;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};

const INTEL: &str = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 106\nflags : fpu ht\n";
const AMD: &str = "vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 17\nflags : fpu ht\n";
const POWER: &str = "processor : 0\ncpu : POWER9, altivec supported\n";
const INTEL_MSR: u32 = 0x1A4;
const AMD_MSR: u32 = 0xC000_0108;

struct Bench {
    directory: tempfile::TempDir,
    msr: Option<u32>,
    cpus: u32,
}

impl Bench {
    fn new(cpuinfo: &str, msr: Option<u32>, cpus: u32, value: u64) -> Self {
        let bench = Self {
            directory: tempfile::tempdir().unwrap(),
            msr,
            cpus,
        };
        bench.write("proc/cpuinfo", cpuinfo);
        bench.write("proc/sys/kernel/random/boot_id", "boot-1\n");
        bench.online(&(0..cpus).collect::<Vec<_>>());
        bench.write("sys/devices/system/cpu/present", &format!("0-{}\n", cpus - 1));
        bench.write("sys/module/msr/parameters/allow_writes", "on\n");
        for cpu in 0..cpus {
            bench.set(cpu, value);
        }
        bench
    }
    fn intel(cpus: u32) -> Self {
        Self::new(INTEL, Some(INTEL_MSR), cpus, 0)
    }
    fn path(&self, relative: &str) -> std::path::PathBuf {
        let path = self.directory.path().join(relative);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }
    fn write(&self, relative: &str, text: &str) {
        fs::write(self.path(relative), text).unwrap();
    }
    fn online(&self, cpus: &[u32]) {
        self.write("sys/devices/system/cpu/online", &format!("{}\n", text_of(cpus)));
    }
    fn register(&self, cpu: u32) -> std::path::PathBuf {
        match self.msr {
            Some(_) => self.path(&format!("dev/cpu/{cpu}/msr")),
            None => self.path(&format!("sys/devices/system/cpu/cpu{cpu}/dscr")),
        }
    }
    /// What somebody else writes.
    fn set(&self, cpu: u32, value: u64) {
        let path = self.register(cpu);
        match self.msr {
            Some(msr) => {
                let file = fs::OpenOptions::new()
                    .create(true)
                    .truncate(false)
                    .write(true)
                    .open(path)
                    .unwrap();
                file.write_all_at(&value.to_le_bytes(), u64::from(msr)).unwrap();
            }
            None => fs::write(path, format!("{value:x}\n")).unwrap(),
        }
    }
    fn get(&self, cpu: u32) -> u64 {
        let path = self.register(cpu);
        match self.msr {
            Some(msr) => {
                let mut bytes = [0; 8];
                fs::File::open(path)
                    .unwrap()
                    .read_exact_at(&mut bytes, u64::from(msr))
                    .unwrap();
                u64::from_le_bytes(bytes)
            }
            None => u64::from_str_radix(fs::read_to_string(path).unwrap().trim(), 16).unwrap(),
        }
    }
    fn all(&self) -> Vec<u64> {
        (0..self.cpus).map(|c| self.get(c)).collect()
    }
    fn replace_by_link(&self, cpu: u32, target: &str) {
        let path = self.register(cpu);
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }
    fn effector(&self) -> Prefetch {
        Prefetch::new(Root::imitating(self.directory.path()))
    }
    fn action(&self, cpus: &[u32]) -> Action {
        Action {
            id: ActionId(7),
            effector: EffectorId::from("prefetch"),
            workload: "w".into(),
            target: Target::Cpus(cpus.iter().map(|c| CpuId(*c)).collect()),
            arguments: BTreeMap::new(),
            why: "test".into(),
        }
    }
    fn everywhere(&self) -> Action {
        self.action(&(0..self.cpus).collect::<Vec<_>>())
    }
}

fn drive(
    effector: &mut Prefetch,
    record: &UndoRecord,
    direction: Direction,
) -> Result<Progress, PlatformError> {
    for _ in 0..1000 {
        let progress = effector.advance(record, direction)?;
        if progress.done {
            assert!(progress.verified);
            return Ok(progress);
        }
    }
    panic!("does not end");
}

use Direction::{Apply, Undo};

#[test]
fn every_kind_of_register_is_switched_and_comes_back_whole() {
    // Bits that are not about prefetch, and differ between CPUs, stay.
    for (cpuinfo, msr, found, ours) in [
        (INTEL, Some(INTEL_MSR), [0x0, 0x20], [0xF, 0x2F]),
        (AMD, Some(AMD_MSR), [0x3C0, 0x0], [0x3EF, 0x2F]),
        (POWER, None, [0x0, 0x10], [0x1, 0x11]),
    ] {
        let bench = Bench::new(cpuinfo, msr, 4, found[0]);
        bench.set(2, found[1]);
        let before = bench.all();
        let mut effector = bench.effector();
        let record = effector.prepare(&bench.action(&[2, 1])).unwrap();
        assert_eq!(bench.all(), before, "prepare changes nothing");
        assert_eq!(drive(&mut effector, &record, Apply).unwrap().finished, 2);
        assert_eq!(bench.all(), [found[0], ours[0], ours[1], found[0]], "{record:?}");
        drive(&mut effector, &record, Undo).unwrap();
        assert_eq!(bench.all(), before);
    }
}

#[test]
fn the_conformance_suite_passes_and_leaves_the_machine_as_found() {
    let bench = Bench::intel(4);
    let root = Root::imitating(bench.directory.path());
    let (mut first, mut fresh) = (Registry::new(&root), Registry::new(&root));
    let broken = conformance::acting(&mut first, &mut fresh, &bench.everywhere());
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!(bench.all(), [0; 4]);
}

#[test]
fn undo_needs_the_record_only_wherever_the_change_was_broken_off() {
    // A crash after each number of CPUs that were written, on the way there and on the way back.
    for written in 0..=4 {
        let bench = Bench::intel(4);
        let record = bench.effector().prepare(&bench.everywhere()).unwrap();
        for cpu in 0..written {
            bench.set(cpu, 0xF);
        }
        let mut fresh = bench.effector();
        drive(&mut fresh, &record, Undo).unwrap();
        assert_eq!(bench.all(), [0; 4], "{written} written");
        drive(&mut fresh, &record, Undo).unwrap();
        assert_eq!(bench.all(), [0; 4]);
    }
}

#[test]
fn the_choice_of_somebody_else_is_a_conflict_and_stays() {
    let bench = Bench::intel(4);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    // Between the record and the act.
    bench.set(3, 0x1);
    assert!(matches!(
        drive(&mut effector, &record, Apply),
        Err(PlatformError::Conflict { .. })
    ));
    let undone = drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0, 0, 0, 0x1]);
    assert_eq!(undone.skipped.get(CHANGED_BY_OTHERS), Some(&1));
    // While it is in force: another value, or back to what was.
    bench.set(3, 0);
    for theirs in [0x5, 0x0] {
        drive(&mut effector, &record, Apply).unwrap();
        bench.set(1, theirs);
        let error = drive(&mut effector, &record, Apply).unwrap_err();
        assert!(matches!(&error, PlatformError::Conflict { found, .. } if *found == format!("{theirs:#x}")));
        drive(&mut effector, &record, Undo).unwrap();
        assert_eq!(bench.all(), [0, theirs, 0, 0]);
        bench.set(1, 0);
        drive(&mut effector, &record, Undo).unwrap();
    }
    // Off again after we had left it on: theirs, too.
    bench.set(2, 0xF);
    let undone = drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(undone.skipped.get(CHANGED_BY_OTHERS), Some(&1));
    assert_eq!(bench.all(), [0, 0, 0xF, 0]);
}

#[test]
fn a_choice_made_while_the_change_is_in_force_is_found_and_told() {
    let bench = Bench::intel(40);
    let nobody = BTreeMap::new();
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    assert!(effector.review(&nobody).is_empty(), "nothing is in force yet");
    drive(&mut effector, &record, Apply).unwrap();
    for _ in 0..4 {
        assert!(effector.review(&nobody).is_empty());
    }
    bench.set(33, 0x3);
    // Sixteen registers a look: after three looks each has been seen.
    let told: Vec<_> = (0..3).flat_map(|_| effector.review(&nobody)).collect();
    assert!(
        told.iter()
            .any(|(w, s)| w.as_str() == "w" && s.contains("prefetch of CPU 33")),
        "{told:?}"
    );
    let undone = drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(undone.skipped.get(CHANGED_BY_OTHERS), Some(&1));
    assert!(
        effector.review(&nobody).is_empty(),
        "what is not in force is not watched"
    );
    assert_eq!((bench.get(32), bench.get(33)), (0, 0x3));
    // When they have put it back, the next block finds nothing against it.
    bench.set(33, 0);
    drive(&mut effector, &record, Apply).unwrap();
    assert!((0..3).all(|_| effector.review(&nobody).is_empty()));
}

#[test]
fn what_was_set_before_is_left_alone() {
    let bench = Bench::intel(4);
    bench.set(0, 0xF);
    bench.set(1, 0x2);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    let progress = drive(&mut effector, &record, Apply).unwrap();
    assert_eq!((progress.finished, progress.total), (2, 4));
    assert_eq!(progress.skipped.get(ALREADY_OFF), Some(&1));
    assert_eq!(progress.skipped.get(CHOSEN), Some(&1));
    assert_eq!(bench.all(), [0xF, 0x2, 0xF, 0xF]);
    drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0xF, 0x2, 0, 0]);
    for value in [0xF, 0x1] {
        let set = Bench::new(INTEL, Some(INTEL_MSR), 2, value);
        let refused = set.effector().prepare(&set.everywhere());
        assert!(
            matches!(refused, Err(PlatformError::Conflict { .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn a_core_is_switched_whole_or_not_at_all() {
    let bench = Bench::intel(4);
    for (cpu, core) in [(0, "0,2"), (2, "0,2"), (1, "1,3"), (3, "1,3")] {
        bench.write(
            &format!("sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"),
            &format!("{core}\n"),
        );
    }
    // Siblings share the register.
    for (cpu, first) in [(2, 0), (3, 1)] {
        let target = bench.register(first);
        bench.replace_by_link(cpu, target.to_str().unwrap());
    }
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.action(&[0, 1, 2])).unwrap();
    assert_eq!(record.found.get("cores").map(String::as_str), Some("0+2"));
    let progress = drive(&mut effector, &record, Apply).unwrap();
    assert_eq!(progress.skipped.get(SHARED_CORE), Some(&1));
    assert_eq!(bench.all(), [0xF, 0, 0xF, 0]);
    // One sibling goes offline: the other restores the register of both.
    bench.online(&[0, 1, 3]);
    let undone = drive(&mut bench.effector(), &record, Undo).unwrap();
    assert_eq!(undone.skipped.get(OFFLINE), Some(&1));
    assert_eq!(bench.all(), [0; 4]);
    bench.online(&[0, 1, 2, 3]);
    let none = bench.effector().prepare(&bench.action(&[1]));
    assert!(matches!(none, Err(PlatformError::Unsupported { .. })), "{none:?}");
}

#[test]
fn offline_cpus_keep_what_is_owed_to_them_until_they_are_back() {
    let bench = Bench::intel(4);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    drive(&mut effector, &record, Apply).unwrap();
    bench.online(&[0, 1, 2]);
    let error = drive(&mut effector, &record, Undo).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Busy { what, .. } if what.contains("CPUs 3")),
        "{error}"
    );
    assert_eq!(bench.all(), [0, 0, 0, 0xF], "the others are restored");
    bench.online(&[0, 1, 2, 3]);
    drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0; 4]);
}

#[test]
fn who_chooses_our_value_while_it_is_off_keeps_it() {
    for chosen in [&[0u32, 1, 2, 3][..], &[2]] {
        let bench = Bench::intel(4);
        let mut effector = bench.effector();
        let record = effector.prepare(&bench.everywhere()).unwrap();
        drive(&mut effector, &record, Apply).unwrap();
        drive(&mut effector, &record, Undo).unwrap();
        for cpu in chosen {
            bench.set(*cpu, 0xF);
        }
        let theirs = bench.all();
        let error = drive(&mut effector, &record, Apply).unwrap_err();
        assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
        assert_eq!(bench.all(), theirs, "nothing is written beside it");
        drive(&mut effector, &record, Undo).unwrap();
        assert_eq!(bench.all(), theirs);
    }
}

#[test]
fn the_look_for_a_choice_on_a_large_machine_is_made_in_slices() {
    let bench = Bench::intel(64);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    drive(&mut effector, &record, Apply).unwrap();
    drive(&mut effector, &record, Undo).unwrap();
    // The last but one was chosen, and the slice is over before any register is reached.
    bench.set(62, 0xF);
    let theirs = bench.all();
    let plan = Plan::of(&record).unwrap();
    let lists = CpuLists::read(&Root::imitating(bench.directory.path()));
    let task = effector.tasks.get_mut(&record.action.id).unwrap();
    let mut slice = Slice {
        started: Instant::now() - SLICE,
        inside: Duration::ZERO,
        longest: Duration::ZERO,
    };
    let root = Root::imitating(bench.directory.path());
    assert!(
        !task.leave_the_chosen(&root, &plan, &lists, &mut slice).unwrap(),
        "not all were looked at"
    );
    // It goes on where it was, and begins anew after a change of mind.
    task.looked = 10;
    let error = drive(&mut effector, &record, Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
    assert_eq!(effector.tasks[&record.action.id].looked, 0);
    assert_eq!(bench.all(), theirs);
    drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(bench.all(), theirs);
}

#[test]
fn a_cpu_belongs_to_one_action_at_a_time() {
    let bench = Bench::intel(4);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.action(&[0, 1])).unwrap();
    let mut other = bench.action(&[1, 2]);
    other.id = ActionId(8);
    other.workload = "another".into();
    for direction in [Apply, Undo] {
        // Also while it is off: it would find what the first one is about to set again.
        let refused = effector.prepare(&other);
        assert!(matches!(refused, Err(PlatformError::Busy { .. })), "{refused:?}");
        drive(&mut effector, &record, direction).unwrap();
    }
    let mut beside = bench.action(&[2, 3]);
    beside.id = ActionId(9);
    let beside = effector.prepare(&beside).unwrap();
    effector.forget(&beside);
    effector.forget(&record);
    effector.prepare(&other).unwrap();
}

#[test]
fn what_was_put_back_before_a_kill_and_holds_our_value_is_a_person_s() {
    let bench = Bench::intel(2);
    let record = bench.effector().prepare(&bench.everywhere()).unwrap();
    for (reached, after) in [(Reached::Made, 0), (Reached::PutBack, 0xF)] {
        bench.set(0, 0xF);
        let mut fresh = bench.effector();
        fresh.inherit(&record, reached);
        drive(&mut fresh, &record, Undo).unwrap();
        assert_eq!(bench.all(), [after, 0], "{reached:?}");
    }
}

#[test]
fn what_an_earlier_process_kept_in_force_is_looked_after() {
    let bench = Bench::intel(2);
    let record = {
        let mut earlier = bench.effector();
        let record = earlier.prepare(&bench.everywhere()).unwrap();
        drive(&mut earlier, &record, Apply).unwrap();
        record
    };
    let mut fresh = bench.effector();
    fresh.inherit(&record, Reached::Made);
    fresh.adopt(&record);
    assert!(fresh.review(&BTreeMap::new()).is_empty());
    let mut other = bench.action(&[1]);
    other.id = ActionId(8);
    assert!(matches!(fresh.prepare(&other), Err(PlatformError::Busy { .. })));
    bench.set(1, 0);
    let told = fresh.review(&BTreeMap::new());
    assert!(
        told.len() == 1 && told[0].1.contains("CPU 1 was set by somebody else"),
        "{told:?}"
    );
    drive(&mut fresh, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0, 0]);
    // What was only begun is half made, and by nobody else.
    let mut fresh = bench.effector();
    bench.set(0, 0xF);
    fresh.inherit(&record, Reached::Begun);
    fresh.adopt(&record);
    assert!(fresh.review(&BTreeMap::new()).is_empty());
    drive(&mut fresh, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0, 0]);
}

#[test]
fn who_cannot_be_told_how_to_undo_holds_no_cpu() {
    let bench = Bench::intel(2);
    let boot = bench.path("proc/sys/kernel/random/boot_id");
    let id = std::fs::read(&boot).unwrap();
    std::fs::remove_file(&boot).unwrap();
    let mut effector = bench.effector();
    assert!(effector.prepare(&bench.everywhere()).is_err());
    std::fs::write(&boot, id).unwrap();
    let mut other = bench.everywhere();
    other.id = ActionId(8);
    effector.prepare(&other).unwrap();
}

#[test]
fn a_cpu_that_comes_back_as_the_firmware_set_it_is_no_conflict() {
    let bench = Bench::intel(2);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    bench.online(&[0]);
    let progress = drive(&mut effector, &record, Apply).unwrap();
    assert_eq!(progress.skipped.get(OFFLINE), Some(&1));
    assert_eq!(bench.all(), [0xF, 0]);
    // Never written by us: nothing is owed to it.
    let undone = drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(undone.skipped.get(OFFLINE), Some(&1));
    drive(&mut effector, &record, Apply).unwrap();
    bench.online(&[0, 1]);
    drive(&mut effector, &record, Apply).unwrap();
    assert_eq!(bench.all(), [0xF, 0xF]);
    drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0, 0]);
}

#[test]
fn a_cpu_that_left_the_machine_owes_nothing() {
    let bench = Bench::intel(3);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    drive(&mut effector, &record, Apply).unwrap();
    bench.online(&[0, 1]);
    bench.write("sys/devices/system/cpu/present", "0-1\n");
    fs::remove_file(bench.register(2)).unwrap();
    let undone = drive(&mut bench.effector(), &record, Undo).unwrap();
    assert_eq!(undone.skipped.get(GONE), Some(&1));
    assert_eq!((bench.get(0), bench.get(1)), (0, 0));
}

#[test]
fn a_device_that_answers_no_such_cpu_is_a_cpu_that_went_offline() {
    let bench = Bench::intel(2);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    drive(&mut effector, &record, Apply).unwrap();
    // The list of CPUs does not show it yet.
    let path = bench.register(1);
    fs::remove_file(&path).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let error = drive(&mut effector, &record, Undo).unwrap_err();
    assert!(matches!(error, PlatformError::Busy { .. }), "{error}");
    assert_eq!(bench.get(0), 0);
}

#[test]
fn torn_and_refused_reads_change_nothing() {
    let short = Bench::intel(1);
    let file = fs::OpenOptions::new()
        .write(true)
        .open(short.register(0))
        .unwrap();
    file.set_len(u64::from(INTEL_MSR) + 4).unwrap();
    let error = short.effector().prepare(&short.everywhere()).unwrap_err();
    assert!(error.to_string().contains("4 of 8 bytes"), "{error}");
    let refused = Bench::intel(1);
    // Address 0x1A4 of our own memory is not mapped: the kernel says EIO, as it does for a register that is not there.
    refused.replace_by_link(0, "/proc/self/mem");
    let error = refused.effector().prepare(&refused.everywhere()).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Unsupported { why, .. } if why.contains("refuses")),
        "{error}"
    );
    let garbage = Bench::new(POWER, None, 1, 0);
    fs::write(garbage.register(0), "zz\n").unwrap();
    assert!(garbage.effector().prepare(&garbage.everywhere()).is_err());
    // In the middle of an undo: the other CPUs are restored, and the fault is told.
    let bench = Bench::intel(3);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    drive(&mut effector, &record, Apply).unwrap();
    bench.replace_by_link(0, "/proc/self/mem");
    assert!(drive(&mut effector, &record, Undo).is_err());
    assert_eq!((bench.get(1), bench.get(2)), (0, 0));
}

#[test]
fn a_write_that_is_refused_or_swallowed_is_an_error() {
    let bench = Bench::intel(2);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    bench.replace_by_link(0, "/dev/zero");
    let error = drive(&mut effector, &record, Apply).unwrap_err();
    assert!(error.to_string().contains("no effect"), "{error}");
    // A file that may be read and not written answers EPERM, as the kernel does with msr.allow_writes=off.
    let sealed = rustix::fs::memfd_create(
        "register",
        rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC,
    )
    .unwrap();
    rustix::fs::ftruncate(&sealed, 4096).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    bench.replace_by_link(0, &format!("/proc/self/fd/{}", sealed.as_raw_fd()));
    let error = drive(&mut effector, &record, Apply).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Denied { needs, .. } if needs.contains("allow_writes")),
        "{error}"
    );
    assert_eq!(bench.get(1), 0);
}

#[test]
fn records_of_another_boot_are_void() {
    let bench = Bench::intel(2);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    drive(&mut effector, &record, Apply).unwrap();
    bench.write("proc/sys/kernel/random/boot_id", "boot-2\n");
    bench.set(0, 0x5);
    drive(&mut effector, &record, Undo).unwrap();
    assert_eq!(bench.all(), [0x5, 0xF], "nothing is written");
    assert!(matches!(
        effector.advance(&record, Apply),
        Err(PlatformError::Vanished { .. })
    ));
}

#[test]
fn machines_without_the_means_say_what_is_missing() {
    let why = |bench: &Bench| {
        bench
            .effector()
            .prepare(&bench.everywhere())
            .unwrap_err()
            .to_string()
    };
    let guest = Bench::intel(1);
    guest.write(
        "proc/cpuinfo",
        &INTEL.replace("flags : fpu", "flags : fpu hypervisor"),
    );
    assert!(why(&guest).contains("belongs to the host"));
    let old = Bench::intel(1);
    old.write("proc/cpuinfo", &AMD.replace("25", "23"));
    assert!(why(&old).contains("no switch is documented"));
    let module = Bench::intel(1);
    fs::remove_file(module.register(0)).unwrap();
    assert!(why(&module).contains("modprobe msr"));
    let default = Bench::intel(1);
    default.write("sys/module/msr/parameters/allow_writes", "default\n");
    assert!(why(&default).contains("tainted"));
    let locked = Bench::intel(1);
    locked.write(
        "sys/kernel/security/lockdown",
        "none [integrity] confidentiality\n",
    );
    assert!(why(&locked).contains("lockdown is integrity"));
    let amd = Bench::new(AMD, Some(AMD_MSR), 1, 0);
    let leaf = fs::File::create(amd.path("dev/cpu/0/cpuid")).unwrap();
    leaf.write_all_at(&[0; 16], 0x8000_0021).unwrap();
    assert!(why(&amd).contains("CPUID"));
    leaf.write_all_at(&(1u32 << 13).to_le_bytes(), 0x8000_0021)
        .unwrap();
    amd.effector().prepare(&amd.everywhere()).unwrap();
}

#[test]
fn efficiency_cores_are_left_out() {
    let bench = Bench::intel(4);
    bench.write("sys/bus/event_source/devices/cpu_atom/cpus", "2-3\n");
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    let progress = drive(&mut effector, &record, Apply).unwrap();
    assert_eq!(progress.skipped.get(OTHER_SWITCH), Some(&2));
    assert_eq!(bench.all(), [0xF, 0xF, 0, 0]);
}

#[test]
fn targets_and_arguments_are_checked() {
    let bench = Bench::intel(2);
    let mut effector = bench.effector();
    let rejected = |effector: &mut Prefetch, action: &Action| {
        matches!(effector.prepare(action), Err(PlatformError::Rejected { .. }))
    };
    assert!(rejected(&mut effector, &bench.action(&[])));
    assert!(
        rejected(&mut effector, &bench.action(&[0, 9])),
        "CPU 9 is not there"
    );
    let mut other = bench.everywhere();
    other.target = Target::Nothing;
    assert!(rejected(&mut effector, &other));
    let mut argument = bench.everywhere();
    argument.arguments.insert("duty".into(), "1".into());
    assert!(rejected(&mut effector, &argument));
}

#[test]
fn a_record_that_is_not_understood_writes_nothing() {
    let bench = Bench::intel(2);
    let mut effector = bench.effector();
    let record = effector.prepare(&bench.everywhere()).unwrap();
    for (name, value) in [
        ("register", Some("msr 0x10")),
        ("register", None),
        ("cpus.0x0.0xf", Some("0-x")),
        ("cpus.0x0.0xf", None),
        ("cpus.0x1.0xf", Some("1")),
        ("cpus.1.f", Some("1")),
        ("cores", Some("0+x")),
    ] {
        let mut torn = record.clone();
        match value {
            Some(value) => torn.found.insert(name.into(), value.into()),
            None => torn.found.remove(name),
        };
        for direction in [Apply, Undo] {
            let outcome = effector.advance(&torn, direction);
            assert!(
                matches!(outcome, Err(PlatformError::Malformed { .. })),
                "{name}: {outcome:?}"
            );
        }
        assert_eq!(bench.all(), [0, 0]);
    }
}
