//! `homeostat-lab`: the engine of the daemon on a simulated machine, hours in seconds.
//!
//! It reads and changes nothing of this machine. The journal of a run lies in a temporary directory that goes with it.

mod proof;

use clap::{Parser, Subcommand, ValueEnum};
use homeostat_cli::failure::{Failure, Kind};
use homeostat_cli::terminal::Terminal;
use homeostat_laboratory::campaign;
use homeostat_laboratory::published::{self, Entry, PublishedError};
use homeostat_laboratory::report;
use homeostat_laboratory::run::{self, Arm, Outcome, Progress, RunError};
use homeostat_laboratory::scenario::{self, Scenario, ScenarioError};
use homeostat_laboratory::swarm;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What runs when nothing is named.
const DEFAULT_SCENARIO: &str = "p15";
/// Seeds of each published result.
const PUBLISHED_SEEDS: u64 = 5;

/// Run homeostat on a simulated machine and show what it decides there.
///
/// The same engine, strategies and journal as the daemon, on a simulated machine and in virtual time: hours pass in
/// seconds. Prints what happened as the daemon's log would, and a table before and after. Nothing of this machine is
/// changed.
#[derive(Debug, Parser)]
#[command(
    name = "homeostat-lab",
    version,
    max_term_width = 110,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    after_help = "EXAMPLES
  homeostat-lab                        two memory chases on two distant chips
  homeostat-lab --list                 the scenarios that ship with the program
  homeostat-lab p8 --plot              with curves in the terminal
  homeostat-lab my.toml --seed 7 --hours 3
  homeostat-lab --published --seeds 5  every published result, reproduced with five seeds
  homeostat-lab --swarm                a thousand random machines against the best placement
  homeostat-lab --swarm --machines 50 --rough
  homeostat-lab --campaign             faults of every kind, invariants checked after each step
  homeostat-lab proof                  how fast a gain is proven in records of real noise"
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print JSON with a stable schema instead of text.
    #[arg(long)]
    json: bool,
    /// A scenario by name, or a file; p15 when absent.
    #[arg(value_name = "NAME|FILE", conflicts_with_all = ["list", "published", "campaign", "swarm"])]
    scenario: Option<String>,
    /// Seed of the noise and of the coins, instead of the scenario's; first seed of a campaign, seed of a swarm.
    #[arg(long, conflicts_with_all = ["list", "published"])]
    seed: Option<u64>,
    /// Simulated hours, instead of the scenario's, or of each seed.
    #[arg(long, conflicts_with_all = ["list", "published"])]
    hours: Option<f64>,
    /// Thresholds of the strategies, instead of the scenario's.
    #[arg(long, value_enum, conflicts_with_all = ["list", "published", "campaign"])]
    profile: Option<ProfileName>,
    /// Draw the curves in the terminal.
    #[arg(long, conflicts_with_all = ["list", "published", "campaign", "swarm"])]
    plot: bool,
    /// List the scenarios that ship with the program.
    #[arg(long, conflicts_with = "published")]
    list: bool,
    /// Reproduce every published result and print the table.
    #[arg(long)]
    published: bool,
    /// Put homeostat through faults of every kind on random machines and check the invariants after each step.
    #[arg(long, conflicts_with_all = ["list", "published", "swarm"])]
    campaign: bool,
    /// Compare what homeostat reaches on random machines with the best placement there is.
    #[arg(long, conflicts_with_all = ["list", "published"])]
    swarm: bool,
    /// Seeds of each published result (default 5), lives of a campaign, or machines of a swarm.
    #[arg(long, visible_alias = "machines", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    seeds: Option<u64>,
    /// First machine of a swarm; its machines are numbered from 0.
    #[arg(long, value_name = "N", requires = "swarm", conflicts_with = "scenario")]
    from: Option<u64>,
    /// Rough signals: load and counters as noisy, stepping and biased as on a bad day. What a change really gains is the
    /// same.
    #[arg(long, conflicts_with = "list")]
    rough: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Proof(Box<proof::Proof>),
}

/// Thresholds of the strategies.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProfileName {
    /// homeostat's own.
    Homeostat,
    /// Those of the original.
    AsoClassic,
}

impl ProfileName {
    fn thresholds(self) -> scenario::Profile {
        match self {
            Self::Homeostat => scenario::Profile::Homeostat,
            Self::AsoClassic => scenario::Profile::AsoClassic,
        }
    }
}

/// A scenario in the list.
#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    title: String,
    source: String,
    hours: f64,
}

#[derive(Debug, Serialize)]
struct Listing {
    schema: u32,
    scenarios: Vec<Listed>,
}

#[derive(Debug, Serialize)]
struct Shown<'a> {
    schema: u32,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

#[derive(Debug, Serialize)]
struct Table<'a> {
    schema: u32,
    entries: &'a [Entry],
}

#[derive(Debug, Serialize)]
struct Campaign<'a> {
    schema: u32,
    passed: bool,
    seeds: u64,
    hours: f64,
    turns: u64,
    trials: u64,
    crashes: u64,
    faults: BTreeMap<String, u64>,
    verdicts: &'a BTreeMap<String, u64>,
    /// Commands that reproduce what failed.
    failures: Vec<&'a str>,
}

#[derive(Debug, Serialize)]
struct Swarm<'a> {
    schema: u32,
    summary: swarm::Summary,
    #[serde(flatten)]
    report: &'a swarm::Report,
}

/// Version of the JSON of this command.
const SCHEMA: u32 = 1;

fn unknown(e: ScenarioError) -> Failure {
    Failure::Report(Kind::Usage, e.to_string())
}

fn failed(e: &RunError) -> Failure {
    match e {
        RunError::Scenario { .. } | RunError::World { .. } => Failure::Report(Kind::Usage, e.to_string()),
        e => Failure::from_error(e),
    }
}

fn main() -> ExitCode {
    homeostat_cli::answer("homeostat-lab", |arguments: Arguments| {
        let json = match &arguments.command {
            Some(Command::Proof(proof)) => proof.json(),
            None => arguments.json,
        };
        let terminal = Terminal::detect("homeostat-lab", json);
        let result = arguments.run(&terminal);
        (terminal, result)
    })
}

impl Arguments {
    fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        if self.list {
            return list(terminal);
        }
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, interrupted.clone())
                .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
        }
        if let Some(Command::Proof(proof)) = &self.command {
            return proof.run(terminal, &interrupted);
        }
        if self.published {
            return self.table(terminal, &interrupted);
        }
        if self.campaign {
            return self.campaign(terminal, &interrupted);
        }
        if self.swarm {
            return self.swarm(terminal, &interrupted);
        }
        if self.seeds.is_some() {
            let why =
                "--seeds goes with --published, --campaign or --swarm; a scenario has one seed (--seed)";
            return Err(Failure::Report(Kind::Usage, why.into()));
        }
        let scenario = self.chosen()?;
        self.show(terminal, &scenario, &interrupted)
    }

    /// The scenario with what the command line changes.
    fn chosen(&self) -> Result<Scenario, Failure> {
        let mut scenario =
            scenario::find(self.scenario.as_deref().unwrap_or(DEFAULT_SCENARIO)).map_err(unknown)?;
        if let Some(seed) = self.seed {
            scenario.seed = seed;
        }
        if let Some(profile) = self.profile {
            scenario.profile = profile.thresholds();
        }
        if self.rough {
            scenario.roughen();
        }
        if let Some(hours) = self.hours {
            scenario
                .shorten_or_extend(hours)
                .map_err(|why| Failure::Report(Kind::Usage, format!("--hours {hours}: {why}")))?;
        }
        Ok(scenario)
    }

    fn show(
        &self,
        terminal: &Terminal,
        scenario: &Scenario,
        interrupted: &AtomicBool,
    ) -> Result<(), Failure> {
        let live = terminal.is_terminal && !terminal.json;
        if !terminal.json {
            terminal.print(&format!(
                "{}: {}\n{}{} simulated hours, seed {}\n",
                scenario.name,
                scenario.title,
                if scenario.source.is_empty() {
                    String::new()
                } else {
                    format!("{}\n", scenario.source)
                },
                scenario.hours,
                scenario.seed
            ))?;
        }
        let mut gone = None;
        let outcome = run::run_all(scenario, &mut |p: Progress<'_>| {
            if !terminal.json && p.arm == Arm::Homeostat && !p.lines.is_empty() {
                clear(live);
                if let Err(e) = terminal.print(&report::story(p.lines)) {
                    gone = Some(e);
                    return false;
                }
            }
            progress(
                live,
                &format!("{}: {:3.0} %", p.arm.words(), 100.0 * p.at_s / p.length_s),
            );
            !interrupted.load(Ordering::Relaxed)
        })
        .map_err(|e| failed(&e))?;
        clear(live);
        if let Some(e) = gone {
            return Err(e);
        }
        let shown = Shown {
            schema: SCHEMA,
            outcome: &outcome,
        };
        terminal.show(&shown, |look| self.text(scenario, &outcome, look.width))?;
        if outcome.tracks.iter().any(|t| t.broken_off) {
            return Err(Failure::failed(
                "broken off; shown is what was simulated until then",
            ));
        }
        Ok(())
    }

    fn campaign(&self, terminal: &Terminal, interrupted: &AtomicBool) -> Result<(), Failure> {
        let usual = campaign::Options::default();
        let options = campaign::Options {
            seed: self.seed.unwrap_or(usual.seed),
            seeds: self.seeds.unwrap_or(usual.seeds),
            hours: self.hours.unwrap_or(usual.hours),
            rough: self.rough,
            ..usual
        };
        let live = terminal.is_terminal && !terminal.json;
        let report = campaign::run(&options, threads(), &mut |p| {
            progress(
                live,
                &format!(
                    "{} of {} seeds, {:.0} hours, {} failed",
                    p.done, p.of, p.hours, p.failures
                ),
            );
            !interrupted.load(Ordering::Relaxed)
        });
        clear(live);
        let report = report.map_err(|e| match e {
            e @ campaign::CampaignError::Options(_) => Failure::Report(Kind::Usage, e.to_string()),
            e => Failure::from_error(&e),
        })?;
        let shown = Campaign {
            schema: SCHEMA,
            passed: report.passed(),
            seeds: report.seeds,
            hours: report.counts.hours,
            turns: report.counts.turns,
            trials: report.counts.trials,
            crashes: report.counts.crashes,
            faults: report
                .counts
                .injected
                .iter()
                .map(|(k, n)| (campaign::kind_name(*k), *n))
                .collect(),
            verdicts: &report.counts.verdicts,
            failures: report.failures.iter().map(|f| f.reproduction.as_str()).collect(),
        };
        terminal.show(&shown, |_| report.text())?;
        if report.passed() {
            Ok(())
        } else {
            Err(Failure::failed(format!("{} seeds failed", report.failures.len())))
        }
    }

    fn swarm(&self, terminal: &Terminal, interrupted: &AtomicBool) -> Result<(), Failure> {
        let usual = swarm::Options::default();
        let options = swarm::Options {
            seed: self.seed.unwrap_or(usual.seed),
            count: self.seeds.unwrap_or(usual.count),
            from: self.from.unwrap_or(usual.from),
            hours: self.hours.unwrap_or(usual.hours),
            profile: self.profile.map_or(usual.profile, ProfileName::thresholds),
            rough: self.rough,
        };
        let live = terminal.is_terminal && !terminal.json;
        let (mut done, mut share) = (0u64, 0.0);
        let report = swarm::run(&options, threads(), &mut |case| {
            done += 1;
            share += case.share;
            progress(
                live,
                &format!(
                    "{done} of {} machines, {:.1} % of the best on average",
                    options.count,
                    100.0 * share / done as f64
                ),
            );
            !interrupted.load(Ordering::Relaxed)
        });
        clear(live);
        let report = report.map_err(|e| match e {
            e @ swarm::SwarmError::Options(_) => Failure::Report(Kind::Usage, e.to_string()),
            e => Failure::from_error(&e),
        })?;
        let shown = Swarm {
            schema: SCHEMA,
            summary: report.summary(),
            report: &report,
        };
        terminal.show(&shown, |_| report.text())
    }

    fn table(&self, terminal: &Terminal, interrupted: &AtomicBool) -> Result<(), Failure> {
        let options = published::Options {
            seeds: self.seeds.unwrap_or(PUBLISHED_SEEDS),
            rough: self.rough,
            threads: threads(),
        };
        if options.seeds > published::SEEDS_MAX {
            return Err(Failure::Report(
                Kind::Usage,
                format!(
                    "--seeds {}: at most {} with --published",
                    options.seeds,
                    published::SEEDS_MAX
                ),
            ));
        }
        let live = terminal.is_terminal && !terminal.json;
        let entries = published::run(&options, &|name, done| {
            progress(live, &format!("{name}: {:3.0} %", done * 100.0));
            !interrupted.load(Ordering::Relaxed)
        });
        clear(live);
        let entries = entries.map_err(|e| match e {
            PublishedError::Scenario(e) => unknown(e),
            PublishedError::Run { source, .. } => failed(&source),
            e => Failure::failed(e.to_string()),
        })?;
        let shown = Table {
            schema: SCHEMA,
            entries: &entries,
        };
        terminal.show(&shown, |_| published::text(&entries))?;
        let complaints = published::complaints(&entries);
        // What is known to be missed was looked at with usual signals.
        if complaints.is_empty() || self.rough {
            return Ok(());
        }
        Err(Failure::failed(format!(
            "{} numbers are missed that are not known to be, or farther off than known",
            complaints.len()
        )))
    }

    fn text(&self, scenario: &Scenario, outcome: &Outcome, width: usize) -> String {
        let mut out = String::new();
        if self.plot {
            let tracks: Vec<_> = outcome.tracks.iter().collect();
            out.push('\n');
            out.push_str(&report::plot(&tracks, width, unicode()));
        }
        let windows = scenario.windows();
        if !outcome.comparisons.is_empty() {
            out.push_str(&format!(
                "\nBefore: {}, {} to {}. After: with homeostat, {} to {}.\n\n",
                windows.baseline,
                report::moment(windows.before.from_s),
                report::moment(windows.before.to_s),
                report::moment(windows.after.from_s),
                report::moment(windows.after.to_s)
            ));
            out.push_str(&report::before_after(&outcome.comparisons));
        }
        out.push('\n');
        for track in &outcome.tracks {
            out.push_str(&track.summary());
            out.push('\n');
        }
        out
    }
}

/// Whether the terminal shows more than ASCII.
fn unicode() -> bool {
    ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
        .is_some_and(|v| v.to_ascii_lowercase().replace('-', "").contains("utf8"))
}

fn progress(live: bool, text: &str) {
    if live {
        let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
    }
}

/// As many as there are CPUs for this process.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

fn clear(live: bool) {
    progress(live, "");
}

fn list(terminal: &Terminal) -> Result<(), Failure> {
    let scenarios: Vec<Listed> = scenario::built_in()
        .map_err(unknown)?
        .into_iter()
        .map(|s| Listed {
            name: s.name,
            title: s.title,
            source: s.source,
            hours: s.hours,
        })
        .collect();
    let listing = Listing {
        schema: SCHEMA,
        scenarios,
    };
    terminal.show(&listing, |_| {
        let mut out = String::from("Scenarios (homeostat-lab NAME)\n\n");
        for s in &listing.scenarios {
            out.push_str(&format!("  {:<14} {} ({} h)\n", s.name, s.title, s.hours));
        }
        out.push_str("\nMachines for scenario files of your own\n\n");
        for name in scenario::machines() {
            out.push_str(&format!("  {name}\n"));
        }
        out
    })
}
