//! What it costs to find out on which nodes the memory of a very large process lies.
//!
//!     cargo run -p homeostat-linux --example locality_cost [-- GIB [MAPPINGS]]
//!
//! A child maps one shared segment of 1 GiB GIB times (100), each page present in each mapping: an address space with that
//! much resident memory, of which each page table entry is real, for the price of 1 GiB and 2 MiB of page tables per GiB. Each
//! mapping is cut into MAPPINGS pieces (1) by alternating protections. Then it measures, a few times each:
//! * counting: reading `numa_maps` whole, as `numastat -p` does;
//! * sampling: what homeostat does from 2 GiB on, with its budget and without;
//! * how long one `mmap` and `munmap` of the child takes meanwhile, at worst: they need the lock that counting holds.
#![expect(unsafe_code, reason = "maps memory by hand")]
#![expect(clippy::unwrap_used, reason = "a measurement, not a shipped path")]

use homeostat_kernel::Root;
use homeostat_model::{Bytes, NodeId, ProcessId};
use homeostat_sensors::locality::memory;
use homeostat_sensors::locality::memory::{Reading, Resident};
use homeostat_sensors::processes::parse_stat;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const GIB: usize = 1 << 30;
const PAGE: usize = 4096;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| arguments.get(i).map_or(default, |a| a.parse().unwrap());
    let (gib, pieces) = (number(0, 100), number(1, 1));
    if std::env::var_os("LOCALITY_COST_CHILD").is_some() {
        child(gib, pieces);
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([gib.to_string(), pieces.to_string()])
        .env("LOCALITY_COST_CHILD", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = output.next().unwrap().unwrap();
    let pid = child.id() as i32;
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
    let id = ProcessId {
        pid,
        start_ticks: parse_stat(&stat).unwrap().start_ticks,
    };
    let resident = Resident::parse(&std::fs::read(format!("/proc/{pid}/status")).unwrap()).unwrap();
    let mappings = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .unwrap()
        .lines()
        .count();
    println!("{ready}; resident {}, {mappings} mappings", resident.total());
    let ways = [
        (
            "counted whole (numa_maps)",
            Bytes(u64::MAX),
            Duration::from_secs(600),
        ),
        ("sampled, to its error", Bytes::ZERO, Duration::from_secs(600)),
        ("sampled, within 30 ms", Bytes::ZERO, Duration::from_millis(30)),
    ];
    // Alone first: what the child's calls take when nobody looks.
    let mut worst = |during: &mut dyn FnMut()| -> f64 {
        writeln!(input, "begin").unwrap();
        during();
        writeln!(input, "end").unwrap();
        output.next().unwrap().unwrap().parse().unwrap()
    };
    let alone = worst(&mut || std::thread::sleep(Duration::from_secs(1)));
    println!("nobody looks (1 s): worst mmap+munmap of the process {alone:.2} ms");
    for (name, exact_max, budget) in ways {
        for round in 0..3u64 {
            let mut line = String::new();
            let stalled = worst(&mut || {
                let how = Reading {
                    exact_max,
                    budget,
                    seed: round,
                    huge: false,
                };
                let (begun, cpu) = (Instant::now(), own_cpu());
                let seen = memory::read(&Root::default(), id, &resident, &how).unwrap();
                let shares: BTreeMap<NodeId, f64> = seen
                    .nodes
                    .iter()
                    .map(|(n, m)| (*n, m.total().0 as f64 / seen.total().0 as f64))
                    .collect();
                line = format!(
                    "{name}: {:.1} ms, of which CPU of ours {:.1} ms; shares {shares:.3?} +- {:.2} %",
                    begun.elapsed().as_secs_f64() * 1e3,
                    (own_cpu() - cpu) * 1e3,
                    seen.error * 100.0
                );
            });
            println!("{line}; worst mmap+munmap of the process {stalled:.2} ms");
        }
    }
    drop(input);
    let _ = child.wait();
}

fn own_cpu() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Maps, says so, and between "begin" and "end" maps and unmaps a page again and again.
fn child(gib: usize, pieces: usize) {
    // SAFETY: takes a name and flags; the descriptor is kept for the life of the process.
    let segment = unsafe { libc::memfd_create(c"locality-cost".as_ptr(), 0) };
    // SAFETY: a descriptor of our own.
    assert_eq!(unsafe { libc::ftruncate(segment, GIB as i64) }, 0);
    for _ in 0..gib {
        // SAFETY: fresh address space of the kernel's choice over our own segment.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                GIB,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                segment,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        let piece = GIB / pieces / PAGE * PAGE;
        for index in (0..pieces).step_by(2).filter(|_| pieces > 1) {
            // SAFETY: inside the mapping just made, which nobody reads or writes.
            let outcome =
                unsafe { libc::mprotect(at.cast::<u8>().add(index * piece).cast(), piece, libc::PROT_READ) };
            assert_eq!(outcome, 0, "too many mappings");
        }
    }
    println!("{gib} times 1 GiB mapped, in {pieces} pieces each");
    let (sender, orders) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            sender.send(line.unwrap()).unwrap();
        }
    });
    while let Ok(order) = orders.recv() {
        assert_eq!(order, "begin");
        let mut worst = Duration::ZERO;
        while orders.try_recv().is_err() {
            let begun = Instant::now();
            // SAFETY: a fresh page that is given back at once and never touched.
            unsafe {
                let at = libc::mmap(
                    std::ptr::null_mut(),
                    PAGE,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                libc::munmap(at, PAGE);
            }
            worst = worst.max(begun.elapsed());
            std::thread::sleep(Duration::from_micros(200));
        }
        println!("{}", worst.as_secs_f64() * 1e3);
    }
}
