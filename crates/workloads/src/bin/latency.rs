//! `latency`: dependent loads through a piece of memory, after Example C-3 of the Redbook SG24-8171.

use clap::Parser;
use homeostat_workloads::chain::{LOADS_PER_BATCH, LOADS_PER_TRANSACTION};
use homeostat_workloads::session::THREADS_MAX;
use homeostat_workloads::{
    Backing, Chain, Order, Outcome, PageAdvice, ProgramError, Region, Session, Share, Timing, Work, main_of,
};
use std::process::ExitCode;

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
    #[command(flatten)]
    timing: Timing,
    /// Order in which the memory is visited.
    #[arg(long, value_enum, default_value = "stride")]
    order: Order,
    #[command(flatten)]
    pace: Share,
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
}

fn main() -> ExitCode {
    main_of("latency", run)
}

fn run(arguments: &Arguments) -> Result<(), ProgramError> {
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
    let worker = |thread: usize| {
        let mut duty = arguments.pace.duty();
        let mut place = chain.start(thread, threads);
        while !session.stopping() && loads_max.is_none_or(|max| work.total() < max) {
            place = std::hint::black_box(chain.follow(place, LOADS_PER_BATCH));
            work.add(thread, LOADS_PER_BATCH);
            duty.rest();
        }
        Ok(())
    };
    session.run(arguments.timing.plan(threads), &work, worker, transactions)?;
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
