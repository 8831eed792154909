//! What it costs to look where pages lie and to place threads: `cargo run --release -p homeostat-linux --example
//! placement_cost [MIB] [THREADS]`.
//!
//! Looks at so many MiB of touched memory of its own (default 1024) and places so many idle threads of its own (default
//! 1000) on the first CPU and back. Prints one line for each: CPU time, the median and the range of five rounds.

use homeostat_kernel::memory::{BASE_PAGE, PIECE, Pagemap};
use homeostat_kernel::numa::{CpuMask, NumaError, PageCall, affinity, set_affinity};
use rustix::time::{ClockId, clock_gettime};
use std::path::Path;
use std::time::Duration;

const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<u64>());
    let mib = arguments.next().transpose()?.unwrap_or(1024);
    let threads = arguments.next().transpose()?.unwrap_or(1000);
    let own = i32::try_from(std::process::id())?;
    let memory = vec![1u8; usize::try_from(mib << 20)?];
    let start = (memory.as_ptr() as u64).next_multiple_of(PIECE);
    let pieces = (mib << 20) / PIECE - 1;
    let pages = pieces * (PIECE / BASE_PAGE);
    let gib = (pieces * PIECE) as f64 / f64::from(1 << 30);

    let mut call = PageCall::default();
    let mut addresses = Vec::new();
    let took = measure(|| {
        for piece in 0..pieces {
            let at = start + piece * PIECE;
            addresses.clear();
            addresses.extend((at..at + PIECE).step_by(BASE_PAGE as usize));
            call.nodes_of(own, &addresses)?;
        }
        Ok(())
    })?;
    tell("nodes of pages by move_pages", &took, pages, "page", gib);

    let mut pagemap = Pagemap::open(Path::new("/proc"), own)?;
    let mut frames = Vec::new();
    let took = measure(|| {
        for piece in 0..pieces {
            pagemap.frames(start + piece * PIECE, &mut frames)?;
        }
        Ok(())
    })?;
    tell("frames of pages by pagemap", &took, pages, "page", gib);
    let mut states = Vec::new();
    let took = measure(|| Ok(pagemap.piece_states(start, pieces, &mut states)?))?;
    tell("states of pieces by PAGEMAP_SCAN", &took, pages, "page", gib);

    let took = measure(|| {
        std::hint::black_box(std::fs::read("/proc/self/numa_maps")?);
        Ok(())
    })?;
    tell("numa_maps", &took, pages, "page", gib);
    std::hint::black_box(&memory);

    for _ in 0..threads {
        std::thread::Builder::new().stack_size(64 * 1024).spawn(|| {
            loop {
                std::thread::park();
            }
        })?;
    }
    let list = || -> Result<Vec<i32>, Box<dyn std::error::Error>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc/self/task")? {
            found.extend(entry?.file_name().to_str().and_then(|n| n.parse::<i32>().ok()));
        }
        Ok(found)
    };
    let took = measure(|| list().map(drop))?;
    tell("list of threads", &took, threads, "thread", 0.0);
    let found = list()?;
    let took = measure(|| Ok(found.iter().try_for_each(|t| affinity(*t).map(drop))?))?;
    tell("masks of threads", &took, threads, "thread", 0.0);
    let everywhere = affinity(own)?;
    let one = CpuMask::of(everywhere.iter().take(1));
    let place =
        |mask: &CpuMask| -> Result<(), NumaError> { found.iter().try_for_each(|t| set_affinity(*t, mask)) };
    let mut to = one.clone();
    let took = measure(|| {
        place(&to)?;
        to = if to == one {
            everywhere.clone()
        } else {
            one.clone()
        };
        Ok(())
    })?;
    place(&everywhere)?;
    tell("placing threads", &took, threads, "thread", 0.0);
    Ok(())
}

fn measure(
    mut work: impl FnMut() -> Result<(), Box<dyn std::error::Error>>,
) -> Result<Vec<Duration>, Box<dyn std::error::Error>> {
    let mut took = Vec::new();
    for _ in 0..ROUNDS {
        let begun = cpu_time();
        work()?;
        took.push(cpu_time().saturating_sub(begun));
    }
    took.sort();
    Ok(took)
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

fn tell(what: &str, took: &[Duration], count: u64, unit: &str, gib: f64) {
    let nanoseconds = |d: Option<&Duration>| d.map_or(0.0, |d| d.as_nanos() as f64 / count.max(1) as f64);
    let median = took.get(took.len() / 2);
    let per_gib = if gib > 0.0 {
        format!(
            ", {:.1} ms/GiB",
            median.map_or(0.0, |d| d.as_secs_f64() * 1e3 / gib)
        )
    } else {
        String::new()
    };
    println!(
        "{what}: {:.0} ns a {unit} ({:.0} to {:.0}){per_gib}",
        nanoseconds(median),
        nanoseconds(took.first()),
        nanoseconds(took.last())
    );
}
