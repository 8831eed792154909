//! How long one solution of the machine takes: ten workloads on eight chips, warm (a little has changed since the last
//! question) and cold. `cargo run --release -p homeostat-simulator --example solve-speed`

use homeostat_simulator::hardware::{Demand, Warm, solve};
use homeostat_simulator::layout::Layout;
use homeostat_simulator::profiles::profile;

#[expect(clippy::disallowed_methods, reason = "it measures time")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const ROUNDS: u32 = 20_000;
    let mut layout = Layout::named("power750-32")?;
    // Two boards of four chips.
    for board in 0..2_usize {
        for chip in 0..4 {
            if board == 1 {
                layout.chips.push(layout.chips[chip]);
                layout.node_memory.push(layout.node_memory[chip]);
            }
            let index = board * 4 + chip;
            layout.chips[index].node = index as u32;
            layout.chips[index].board = board as u32;
        }
    }
    layout.check()?;
    let names = ["oltp", "specjbb", "latency", "process-database", "tradelite"];
    let mut demands: Vec<Demand> = Vec::new();
    for i in 0..10_usize {
        let program = profile(names[i % names.len()]).ok_or("no such program")?;
        let running = (0..8).map(|chip| ((i + chip) % 5) as f64).collect();
        demands.push(Demand {
            aligned: 0.1 * i as f64,
            ..Demand::new(program, running, vec![1.0; 8])
        });
    }
    for (name, warm_start) in [("warm", true), ("cold", false)] {
        let mut warm = Warm::default();
        let mut sum = 0.0;
        let start = std::time::Instant::now();
        for round in 0..ROUNDS {
            if !warm_start {
                warm = Warm::default();
            }
            // One workload's memory moves on by a little.
            demands[0].memory[0] = 1.0 + 0.01 * f64::from(round % 100);
            let solution = solve(&layout, &demands, &mut warm);
            sum += solution.rates[0].cpi;
        }
        let each = start.elapsed().as_secs_f64() / f64::from(ROUNDS) * 1e6;
        println!(
            "{name}: {each:.1} µs per solution of 10 workloads on 8 chips (mean cpi {:.3})",
            sum / f64::from(ROUNDS)
        );
    }
    Ok(())
}
