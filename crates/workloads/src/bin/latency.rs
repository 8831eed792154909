//! `latency`: dependent loads through a piece of memory, after Example C-3 of the Redbook SG24-8171.

use clap::Parser;
use homeostat_workloads::chain::{ChainError, LOADS_PER_BATCH, LOADS_PER_TRANSACTION};
use homeostat_workloads::session::{SECONDS_MAX, THREADS_MAX};
use homeostat_workloads::{
    Backing, Chain, Duty, MemoryError, Order, Outcome, PageAdvice, Plan, Region, Session, SessionError, Work,
};
use std::process::ExitCode;
use std::time::Duration;

/// Measures memory latency: every thread follows one chain of dependent loads through the same memory.
///
/// One transaction is 16,777,216 loads. The progress counter and the reports count single loads. latency_ns is CPU
/// time per load, so that neither --duty nor a busy machine is mistaken for slow memory.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: latency 512 64 1 60 --order random --report 1"
)]
struct Arguments {
    /// Memory to go through, in MiB.
    #[arg(value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..))]
    mib: u64,
    /// Distance between two places visited, in bytes; a multiple of 8.
    step: usize,
    /// Threads, all in the same memory.
    #[arg(value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX as i64))]
    threads: u16,
    /// Time to run, in seconds, after the memory has been prepared.
    #[arg(value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    seconds: u64,
    /// Order in which the memory is visited.
    #[arg(long, value_enum, default_value = "stride")]
    order: Order,
    /// CPU time to use, in percent of one CPU, per thread.
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    duty: u32,
    /// Ask for large pages before the first touch (MADV_HUGEPAGE): a control.
    #[arg(long, conflicts_with = "nohuge")]
    huge: bool,
    /// Refuse large pages for good (MADV_NOHUGEPAGE): a control.
    #[arg(long)]
    nohuge: bool,
    /// Kind of memory.
    #[arg(long, value_enum, default_value = "anon")]
    shared: Backing,
    /// End after so many transactions of all threads together, if that is before the time.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    transactions: Option<u64>,
    /// Print a line every so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    report: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
enum LatencyError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("latency: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), LatencyError> {
    let session = Session::prepare()?;
    let advice = match (arguments.huge, arguments.nohuge) {
        (true, _) => PageAdvice::Large,
        (false, true) => PageAdvice::Small,
        (false, false) => PageAdvice::None,
    };
    let region = Region::map(arguments.mib, arguments.shared, advice)?;
    let chain = Chain::lay(region.words(), arguments.step, arguments.order)?;
    let threads = usize::from(arguments.threads);
    let work = Work::publish("latency", "load", threads);
    let loads_max = arguments
        .transactions
        .map(|count| count.saturating_mul(LOADS_PER_TRANSACTION));
    let plan = Plan {
        threads,
        duration: Duration::from_secs(arguments.seconds),
        report: arguments.report.map(Duration::from_secs),
    };
    let worker = |thread: usize| {
        let mut duty = Duty::new(arguments.duty);
        let mut place = chain.start(thread, threads);
        while !session.stopping() && loads_max.is_none_or(|max| work.total() < max) {
            place = std::hint::black_box(chain.follow(place, LOADS_PER_BATCH));
            work.add(thread, LOADS_PER_BATCH);
            duty.rest();
        }
        Ok(())
    };
    session.run(plan, &work, worker, transactions)?;
    Ok(())
}

/// The figures of the Redbook's program: transactions, transactions per second, average latency of a load.
fn transactions(outcome: &Outcome) -> String {
    let per_transaction = LOADS_PER_TRANSACTION as f64;
    format!(
        "transactions={:.3} tps={:.4} latency_ns={:.2}",
        outcome.work as f64 / per_transaction,
        outcome.work_per_s() / per_transaction,
        outcome.cpu_ns_per_unit()
    )
}
