//! What is touched and locked in advance is there when it is needed. One test, and so a process of its own: others would
//! use the same allocator.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_kernel::residence;
use homeostat_sensors::processes::parse_stat;
use std::hint::black_box;

const HEAP: usize = 8 << 20;
const PAGE: usize = 4096;

/// Page faults of this thread.
fn faults() -> u64 {
    let stat = std::fs::read("/proc/thread-self/stat").unwrap();
    let stat = parse_stat(&stat).unwrap();
    stat.faults_minor + stat.faults_major
}

/// Locked memory of this process in bytes.
fn locked() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmLck:")).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Page faults of a heap that grows by three quarters of [`HEAP`] in pieces, and is written to.
fn faults_of_growth() -> u64 {
    let before = faults();
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for _ in 0..96 {
        let mut piece: Vec<u8> = Vec::with_capacity(64 << 10);
        for byte in piece.spare_capacity_mut().iter_mut().step_by(PAGE) {
            byte.write(1);
        }
        pieces.push(piece);
    }
    black_box(&mut pieces);
    faults() - before
}

#[test]
fn what_is_touched_and_locked_is_there() {
    if residence::keep_heap() {
        assert!(residence::touch_heap(HEAP));
        let pages = (HEAP / PAGE * 3 / 4) as u64;
        // Again and again, since what is freed stays with the allocator. A few are those of the thread itself.
        for round in 0..3 {
            let faults = faults_of_growth();
            assert!(
                faults < pages / 4,
                "{faults} faults for {pages} pages in round {round}"
            );
        }
    } else {
        eprintln!("skipped: the allocator of this C library cannot be told to keep what is freed");
    }
    let before = locked();
    match residence::lock_code(usize::MAX) {
        Ok(bytes) => {
            assert!(bytes > 0);
            assert!(locked() >= before + bytes, "{bytes} bytes, {} locked", locked());
        }
        Err(e) => eprintln!("skipped: locking memory is not allowed here ({e})"),
    }
}
