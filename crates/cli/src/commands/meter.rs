//! `homeostat meter`: how the work of programs can be counted from outside, and how well.

use crate::failure::{Failure, Kind};
use crate::{Context, render};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use homeostat_daemon::machine_lock::Measuring;
use homeostat_daemon::meters::{self, Observer, PointsWish};
use homeostat_daemon::{api::Found, client::ClientError};
use homeostat_model::{MeterClass, Nanoseconds, WorkloadId};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Show how the work of programs can be counted from outside, and try it live.
///
/// Works with and without the daemon, and changes no program; counting through probes costs the program a little
/// while it lasts. As root it sees every workload, else those of the user.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat meter list                     the busiest workloads and what could count their work
  homeostat meter test redis-server        all meters of one workload, live: rate, noise, cost
  homeostat meter test 4711 --seconds 60   the workload of a process, for as long
  homeostat meter known                    programs whose work is counted without configuration")]
pub struct Meter {
    /// What to do.
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List which meters could count the work of workloads; nothing is opened.
    #[command(after_help = "EXAMPLES
  homeostat meter list
  homeostat meter list postgres
  homeostat meter list --json | jq '.workloads[].meters[] | select(.refused == null)'")]
    List {
        /// A workload's name, a process id, or a program; without it the busiest.
        workload: Option<String>,
        /// Every workload, not only the busiest.
        #[arg(long, short, conflicts_with = "workload")]
        all: bool,
    },
    /// Open all meters of a workload and judge them as the daemon would: rate, noise, smallest provable effect, cost.
    ///
    /// Progress points have to be found first, which takes some twenty seconds and about one second of the program's CPU
    /// time. Without --class all are opened that may be taken, so not `hardware` (instructions and cycles never judge, and
    /// counting them may cost a server that waits several percent).
    #[command(after_help = "EXAMPLES
  homeostat meter test redis-server
  homeostat meter test 4711 --seconds 60          as long as that
  homeostat meter test 4711 --class points        only what can be found in its code
  homeostat meter test 4711 --json | jq '.meters[] | select(.taken)'")]
    Test {
        /// A workload's name, a process id, or a program.
        workload: String,
        /// Seconds to watch. Without it 45, and on until points that are looked for were found and read for 24 s, or were not
        /// found, 120 at most.
        #[arg(long, value_parser = clap::value_parser!(u32).range(i64::from(meters::SECONDS_MIN)..=3600))]
        seconds: Option<u32>,
        /// Open meters of these classes only.
        #[arg(long, value_name = "CLASS", value_parser = PossibleValuesParser::new(MeterClass::ALL.iter().map(|c| c.as_str())))]
        class: Vec<String>,
    },
    /// Show the table of programs whose work is counted without configuration, and the meters that the configuration names.
    #[command(after_help = "EXAMPLES
  homeostat meter known
  homeostat meter known --json | jq '.meters[] | {programs, meter, unit}'")]
    Known,
}

impl Meter {
    /// Looks and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        match self.what {
            What::Known => {
                let (settings, _) = context.meter_settings();
                let table = meters::known(&settings);
                context
                    .terminal
                    .show(&table, |look| render::known_meters(&table, look))
            }
            What::List { workload, all } => {
                let mut observer = begin(context, false)?;
                let id = workload.map(|name| find(&observer, &name)).transpose()?;
                let most = if all { usize::MAX } else { meters::SHOWN };
                let listing = observer
                    .list(id.as_ref(), most)
                    .map_err(|e| Failure::from_error(&e))?;
                context
                    .terminal
                    .show(&listing, |look| render::meter_list(&listing, id.is_some(), look))
            }
            What::Test {
                workload,
                seconds,
                class,
            } => test(context, &workload, seconds, &class),
        }
    }
}

fn test(context: &Context, workload: &str, seconds: Option<u32>, classes: &[String]) -> Result<(), Failure> {
    let interrupted = Arc::new(AtomicBool::new(false));
    // Whatever would end it orderly: breakpoints must not be on their way meanwhile.
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, interrupted.clone())
            .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
    }
    // What one before this has left, which was killed.
    let mended = meters::mend(&context.state_directory());
    for text in mended.taken_out.iter().chain(&mended.left) {
        context.terminal.warn(text);
    }
    // Whoever asks for points by name wants them looked for, whatever the daemon does.
    let mut observer = begin(context, classes.iter().any(|c| c == "points"))?;
    let id = find(&observer, workload)?;
    let _measuring = Measuring::begin(id.as_str(), &context.state_directory()).map_err(|holder| {
        let who = holder.pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
        Failure::failed(format!(
            "another `homeostat meter test`{who} measures {id}, and each would take what the other puts in for a change of \
             the program\n  hint: wait until it has ended, or end it"
        ))
    })?;
    let terminal = &context.terminal;
    let live = terminal.is_terminal && !terminal.json;
    let seen = observer
        .test(
            &id,
            classes,
            seconds.map(|s| Nanoseconds::from_secs(u64::from(s))),
            |test| {
                let shown = !live
                    || terminal
                        .clear()
                        .and_then(|()| terminal.show(test, |look| render::meter_test(test, look)))
                        .is_ok();
                shown && !interrupted.load(Ordering::Relaxed)
            },
        )
        .map_err(|e| Failure::from_error(&e))?;
    if live {
        terminal.clear()?;
    }
    let cut_short = interrupted.load(Ordering::Relaxed);
    terminal.show(
        &Tested {
            test: &seen,
            interrupted: cut_short,
        },
        |look| render::meter_test(&seen, look),
    )?;
    if cut_short {
        let all = seconds.map_or_else(String::new, |all| format!(" of {all}"));
        return Err(Failure::failed(format!(
            "interrupted after {:.0}{all} s: what is shown is what was seen until then, and everything that was \
             counted with is closed",
            seen.seconds
        )));
    }
    Ok(())
}

/// A test as JSON, and whether it ended before its time.
#[derive(Serialize)]
struct Tested<'a> {
    #[serde(flatten)]
    test: &'a meters::Test,
    interrupted: bool,
}

fn begin(context: &Context, points: bool) -> Result<Observer, Failure> {
    let (mut settings, policy) = context.meter_settings();
    if points {
        settings.progress_points = PointsWish::Always;
    }
    meters::write_breakpoints_down_in(&context.state_directory());
    Observer::begin(&settings, &policy).map_err(|e| Failure::from_error(&e))
}

/// Why the number is none of a program that works; `None` where it is one.
fn not_a_program(pid: u32) -> Option<&'static str> {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return Some("there is no such process");
    };
    let state = stat.rsplit_once(')').map_or("", |(_, rest)| rest.trim_start());
    if state.starts_with(['Z', 'X']) {
        return Some("that process has ended, and its parent has not taken note of it (a zombie)");
    }
    let is_kernel = std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|text| text.is_empty());
    is_kernel.then_some("that is a thread of the kernel, which has no code of a program")
}

fn find(observer: &Observer, name: &str) -> Result<WorkloadId, Failure> {
    let (near, ambiguous) = match observer.find(name) {
        Found::One(w) => return Ok(w.id.clone()),
        Found::Near(near) => (near, false),
        Found::Several(several) => (several, true),
    };
    let why = match name.parse::<u32>() {
        Ok(pid) => not_a_program(pid).map(|why| format!("{name}: {why}")),
        Err(_) => near.is_empty().then(|| format!("no workload is called {name:?}")),
    };
    if let Some(why) = why {
        let hint = "`homeostat meter list --all` lists what can be measured";
        return Err(Failure::Report(Kind::NotFound, format!("{why}\n  hint: {hint}")));
    }
    Err(ClientError::WorkloadNotFound {
        workload: name.to_owned(),
        near,
        ambiguous,
    }
    .into())
}
