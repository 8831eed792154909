//! `homeostat plan`: what would be tried, changing no setting and no memory.

use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::api;
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::places::{self, Observer, Wanted};
use homeostat_daemon::wiring::{self, RunError};
use homeostat_model::Nanoseconds;
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Nothing is decided before the machine was looked at a few times.
const LOOK_MIN: Nanoseconds = Nanoseconds::from_secs(20);
/// How long files of another machine are looked at.
const FILES_LOOK: Nanoseconds = Nanoseconds::from_secs(3);
/// How long threads are watched for the placement scores.
const PLACES_LOOK: Nanoseconds = Nanoseconds::from_secs(2);

/// Show what would be tried and why, changing no setting and no memory.
///
/// Asks the daemon if one runs. Otherwise the same mind looks at the machine for a while, without acting and
/// without touching journal or history.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat plan
  homeostat plan --root captured/            what can be told of another machine from its files
  homeostat plan --seconds 200               look longer, for workloads whose work is uneven")]
pub struct Plan {
    /// How long to look when no daemon runs; ends early when everything is decided.
    #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u32).range(5..=3600))]
    seconds: u32,
    /// Directory that holds the /proc, /sys and /etc of another machine: shows what can be told from files.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "seconds")]
    root: Option<PathBuf>,
}

/// The plan with the placement scores beside it.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    plan: &'a api::Plan,
    /// Absent on a machine with one cache and one memory node.
    placement: Option<&'a [places::WorkloadPlaces]>,
}

impl Plan {
    /// Finds out and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let plan = match (&self.root, Client::connect(&context.socket())) {
            // The daemon looks at another machine.
            (Some(_), _) | (None, Err(ClientError::NotRunning(_))) => self.rehearse(context)?,
            (None, Ok(mut client)) => client.plan()?,
            (None, Err(e)) => return Err(e.into()),
        };
        let placement = self.placement(context);
        let shown = Shown {
            plan: &plan,
            placement: placement.as_ref().map(|l| l.workloads.as_slice()),
        };
        context.terminal.show(&shown, |look| {
            let placement = placement
                .as_ref()
                .map_or_else(String::new, |l| render::placement(l, look));
            render::plan(&plan, &placement, look)
        })
    }

    /// Placement scores, where the machine has places to tell apart. That they cannot be seen is no reason to keep the
    /// plan back.
    fn placement(&self, context: &Context) -> Option<places::Locality> {
        let root = self.root.as_deref();
        if !places::are_several(root) {
            return None;
        }
        let seen = Observer::begin(root, &context.state_directory())
            .and_then(|mut observer| observer.watch(&Wanted::Largest(places::SHOWN), PLACES_LOOK, || true));
        match seen {
            Ok(seen) => Some(seen),
            Err(e) => {
                context.terminal.warn(&format!("no placement scores: {e}"));
                None
            }
        }
    }

    fn rehearse(&self, context: &Context) -> Result<api::Plan, Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, interrupted.clone())
                .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
        }
        // Files do not change: two looks tell all.
        let length = match self.root {
            Some(_) => FILES_LOOK,
            None => Nanoseconds::from_secs(u64::from(self.seconds)),
        };
        let progress = context.terminal.is_terminal && !context.terminal.json;
        if !context.terminal.json && self.root.is_none() {
            let _ = writeln!(
                std::io::stderr(),
                "No daemon runs: looking at this machine for at most {} s. Nothing is changed.",
                self.seconds
            );
        }
        let view = wiring::rehearse(&context.sources, self.root.as_deref(), length, |view, elapsed| {
            let plan = api::Plan::new(view);
            if progress {
                let line = render::plan_progress(&plan, elapsed, length);
                let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
            }
            let seen = !(plan.proposed.is_empty() && plan.declined.is_empty());
            let decided = elapsed >= LOOK_MIN && seen && plan.is_settled();
            !decided && !interrupted.load(Ordering::Relaxed)
        });
        if progress {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        let view = view.map_err(|e| match e {
            RunError::Settings(errors) => Failure::Configuration(errors),
            e => Failure::from_error(&e),
        })?;
        Ok(api::Plan::new(&view))
    }
}
