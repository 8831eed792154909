//! How fast simulated hours pass: a machine at rest, scanned every ten seconds, and one that is measured every second.
//!
//! `cargo run --release -p homeostat-simulator --example hours`

use homeostat_model::Nanoseconds;
use homeostat_platform::{SampleRequest, Sensors};
use homeostat_simulator::behaviour::ProgramSpec;
use homeostat_simulator::hardware::Profile;
use homeostat_simulator::layout::Layout;
use homeostat_simulator::platform::SimPlatform;
use homeostat_simulator::scheduler::SchedulerKind;
use homeostat_simulator::world::{World, WorldSpec};
use std::error::Error;

fn machine(programs: u32) -> Result<SimPlatform, Box<dyn Error>> {
    let spec = WorldSpec {
        programs: vec![ProgramSpec {
            name: "db".into(),
            profile: "oltp".into(),
            instances: programs,
            threads: 4,
            private_mib: 1024,
            ..ProgramSpec::default()
        }],
        profiles: vec![Profile::new("oltp", 2.0, 0.3, 0.5)],
        ..WorldSpec::new(Layout::named("epyc-2s-8llc")?, SchedulerKind::Linux)
    };
    Ok(SimPlatform::new(World::new(spec)?))
}

fn main() -> Result<(), Box<dyn Error>> {
    for programs in [1, 10] {
        for (what, step_s, detail) in [
            ("nobody looks", 3600, false),
            ("a scan every 10 s", 10, false),
            ("measured every second", 1, true),
        ] {
            let mut platform = machine(programs)?;
            let request = SampleRequest {
                scan: step_s == 10,
                detail: if detail {
                    platform
                        .with_world(|w| w.workloads())
                        .iter()
                        .map(|n| n.as_str().into())
                        .collect()
                } else {
                    Vec::new()
                },
            };
            if detail {
                platform.sample(&SampleRequest {
                    scan: true,
                    detail: Vec::new(),
                })?;
            }
            #[expect(clippy::disallowed_methods, reason = "this example measures real time")]
            let begin = std::time::Instant::now();
            for step in 1..=(3600 / step_s) {
                platform.advance_to(Nanoseconds::from_secs(step * step_s));
                if step_s < 3600 {
                    platform.sample(&request)?;
                }
            }
            let took = begin.elapsed().as_secs_f64();
            println!(
                "{programs:3} programs, {what:22}: an hour in {:8.2} ms, {:.0} simulated seconds per second",
                took * 1e3,
                3600.0 / took
            );
        }
    }
    Ok(())
}
