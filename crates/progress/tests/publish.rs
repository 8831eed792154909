//! One process, one publisher at a time: the tests of this file share a lock.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_progress::Publisher;
use homeostat_progress::layout::{self, Header};
use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn read(path: &std::path::Path) -> (Header, u64) {
    let bytes = std::fs::read(path).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let sum = layout::sum_slots(&bytes, header.slots).unwrap();
    (header, sum)
}

#[test]
fn counts_of_all_threads_are_in_the_file() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let p = Publisher::create_in(dir.path(), "test", "turn", 3).unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let p = &p;
            s.spawn(move || (0..10_000).for_each(|_| p.counter(t).add(2)));
        }
    });
    let (header, sum) = read(p.path());
    assert_eq!(sum, 160_000);
    assert_eq!(
        (header.unit.as_str(), header.name.as_str(), header.slots),
        ("turn", "test", 3)
    );
    assert_eq!(header.pid, std::process::id());
    assert_eq!(
        p.counter(0).get() + p.counter(1).get() + p.counter(2).get(),
        160_000
    );
}

#[test]
fn the_file_goes_with_the_publisher_and_a_new_one_may_come() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let p = Publisher::create_in(dir.path(), "a", "x", 1).unwrap();
    let second = Publisher::create_in(dir.path(), "b", "x", 1).unwrap_err();
    assert_eq!(second.kind(), std::io::ErrorKind::AlreadyExists);
    let path = p.path().to_owned();
    assert!(
        path.exists(),
        "the refused second publisher left the first one alone"
    );
    drop(p);
    assert!(!path.exists());
    Publisher::create_in(dir.path(), "c", "x", 1).unwrap();
}

#[test]
fn files_of_ended_processes_are_removed_and_others_stay() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let mine = Publisher::create_in(dir.path(), "a", "x", 1).unwrap();
    let own = read(mine.path()).0;
    drop(mine);
    let write = |header: &Header| {
        let mut bytes = header.to_bytes().to_vec();
        bytes.resize(layout::file_size(header.slots), 0);
        let path = dir.path().join(layout::file_name(header.pid, header.start_ticks));
        std::fs::write(&path, bytes).unwrap();
        path
    };
    // Process 1 started at another time than tick 1 000 000 000 000.
    let stale = write(&Header {
        pid: 1,
        start_ticks: 1_000_000_000_000,
        ..own.clone()
    });
    let elsewhere = write(&Header {
        pid: 1,
        start_ticks: 1_000_000_000_001,
        pid_namespace: 7,
        ..own.clone()
    });
    let foreign = dir.path().join("notes.txt");
    std::fs::write(&foreign, "not ours").unwrap();
    let _p = Publisher::create_in(dir.path(), "b", "x", 1).unwrap();
    assert!(!stale.exists());
    assert!(
        elsewhere.exists(),
        "a process id of another namespace says nothing here"
    );
    assert!(foreign.exists());
}

#[test]
fn a_file_left_by_this_process_before_exec_is_replaced() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let p = Publisher::create_in(dir.path(), "a", "x", 1).unwrap();
    let path = p.path().to_owned();
    drop(p);
    std::fs::write(&path, "left").unwrap();
    let p = Publisher::create_in(dir.path(), "a", "x", 1).unwrap();
    p.counter(0).add(3);
    assert_eq!(read(&path).1, 3);
}

#[test]
fn what_cannot_be_published_is_an_error_and_nothing_else() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    for slots in [0, layout::SLOTS_MAX + 1, usize::MAX] {
        assert!(Publisher::create_in(dir.path(), "a", "x", slots).is_err());
    }
    assert!(Publisher::create_in(std::path::Path::new("/proc/1/nowhere/x"), "a", "x", 1).is_err());
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(Publisher::create_in(&file, "a", "x", 1).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    // After refusals one can still publish, and control characters do not reach the file.
    let p = Publisher::create_in(dir.path(), "a\x1b[31m", "x\n", 1).unwrap();
    let header = read(p.path()).0;
    assert_eq!((header.name.as_str(), header.unit.as_str()), ("a[31m", "x"));
}

#[test]
fn a_symbolic_link_in_the_way_is_not_followed() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let p = Publisher::create_in(dir.path(), "a", "x", 1).unwrap();
    let path = p.path().to_owned();
    drop(p);
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    let p = Publisher::create_in(dir.path(), "a", "x", 1).unwrap();
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    assert!(p.path().symlink_metadata().unwrap().is_file());
}

/// The one for all users is made by the daemon, with a limited size.
#[test]
fn a_directory_that_a_publisher_makes_is_for_its_user_alone() {
    let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let progress = dir.path().join("run/homeostat/progress");
    let _p = Publisher::create_in(&progress, "a", "x", 1).unwrap();
    let mode = progress.metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode & 0o1022, 0, "{mode:o}");
}
