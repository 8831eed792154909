//! Many processes and threads that do next to nothing: what a monitor costs on a crowded machine.

use clap::Parser;
use homeostat_workloads::main_of;
use std::io::Read;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

/// Starts PROCESSES processes with THREADS threads each; every thread wakes once in ten seconds.
#[derive(Parser)]
#[command(
    version,
    after_help = "EXAMPLES:\n  crowd 3000 3 --seconds 120   9,000 threads in 3,000 processes for two minutes"
)]
struct Arguments {
    /// Number of processes (1 to 30000).
    #[arg(value_parser = clap::value_parser!(u32).range(1..=30_000))]
    processes: u32,
    /// Threads in each (1 to 64).
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64), default_value_t = 1)]
    threads: u32,
    /// Length of the run in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Be one of the crowd (used by the program itself); ends with its standard input.
    #[arg(long, hide = true)]
    member: bool,
}

fn main() -> ExitCode {
    main_of("crowd", |arguments: &Arguments| {
        if arguments.member {
            member(arguments.threads);
            return Ok(());
        }
        crowd(arguments).map_err(|error| format!("cannot start a process: {error}"))
    })
}

/// Sleeps in every thread until standard input ends, which it does when the starter is gone.
fn member(threads: u32) {
    for _ in 1..threads {
        let built = std::thread::Builder::new().stack_size(16 * 1024).spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(10));
            }
        });
        if built.is_err() {
            break;
        }
    }
    let mut end = [0];
    let _ = std::io::stdin().read(&mut end);
}

fn crowd(arguments: &Arguments) -> std::io::Result<()> {
    let own = std::env::current_exe()?;
    let mut members: Vec<Child> = Vec::new();
    for _ in 0..arguments.processes {
        let child = Command::new(&own)
            .args(["--member", "1", &arguments.threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        match child {
            Ok(child) => members.push(child),
            Err(error) => {
                end(members);
                return Err(error);
            }
        }
    }
    println!(
        "ready processes={} threads={}",
        members.len(),
        members.len() as u64 * u64::from(arguments.threads)
    );
    std::thread::sleep(Duration::from_secs(arguments.seconds));
    end(members);
    Ok(())
}

fn end(members: Vec<Child>) {
    for mut member in members {
        let _ = member.kill();
        let _ = member.wait();
    }
}
