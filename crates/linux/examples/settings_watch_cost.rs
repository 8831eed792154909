//! What the watch over settings costs: its beginning, a look at all values, and the time from a write to its notice.
//!
//! `cargo run --release -p homeostat-linux --example settings_watch_cost` as root. Writes `vm.stat_interval` from another
//! process, the value it has and one more in turn, and puts it back.
#![expect(clippy::unwrap_used, reason = "a measurement that fails says so")]

use homeostat_kernel::Root;
use homeostat_sensors::settings::watch::{Stopper, Watch};
use homeostat_tunables::Catalogue;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const FILE: &str = "/proc/sys/vm/stat_interval";
const WRITES: usize = 200;

fn main() {
    let begin = Instant::now();
    let catalogue = Catalogue::load().unwrap();
    println!("catalogue read in {:?}", begin.elapsed());
    let begin = Instant::now();
    let mut watch = Watch::begin(Root::default(), &catalogue);
    println!("{} settings watched, begun in {:?}", watch.len(), begin.elapsed());
    println!("writes are told: {}", watch.why_not().unwrap_or("yes"));
    let mut looks: Vec<Duration> = (0..20)
        .map(|_| {
            let begin = Instant::now();
            assert_eq!(watch.look_now(), Vec::new());
            begin.elapsed()
        })
        .collect();
    looks.sort_unstable();
    println!("a look at all values: median {:?}", looks[looks.len() / 2]);
    let before: u32 = std::fs::read_to_string(FILE).unwrap().trim().parse().unwrap();
    // The writer says when it has written; both clocks are this process's.
    let mut child = Command::new("sh")
        .args([
            "-c",
            &format!("while read v; do echo $v > {FILE}; echo done; done"),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let (_hold, stop) = Stopper::new().unwrap();
    let mut times = Vec::new();
    for turn in 0..WRITES {
        let value = if turn % 2 == 0 { before + 1 } else { before };
        let begin = Instant::now();
        writeln!(input, "{value}").unwrap();
        let mut noticed = false;
        while !noticed {
            let writes = watch.wait(&stop, Duration::from_secs(5)).unwrap();
            noticed = writes.iter().any(|w| w.path == FILE && w.to == value.to_string());
        }
        times.push(begin.elapsed());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
    }
    drop(input);
    child.wait().unwrap();
    times.sort_unstable();
    println!(
        "from asking another process to write until the write is noticed: median {:?}, 99 of 100 within {:?}, longest {:?}",
        times[WRITES / 2],
        times[WRITES * 99 / 100],
        times[WRITES - 1]
    );
    let now = std::fs::read_to_string(FILE).unwrap();
    assert_eq!(now.trim(), before.to_string(), "put back");
}
