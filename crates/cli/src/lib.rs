//! The `homeostat` program: one file per subcommand in [`commands`], what people see in [`render`].
//!
//! It talks to the daemon through the control socket, reads the history file, and with the daemon dead carries out
//! `restore`, `plan` and `doctor` itself. It decides nothing.

pub mod commands;
pub mod failure;
pub mod page;
pub mod render;
pub mod terminal;
pub mod top;

use clap::{Parser, Subcommand};
use failure::Failure;
use homeostat_daemon::settings::{self, Settings, Sources};
use std::path::PathBuf;
use std::process::ExitCode;
use terminal::Terminal;

/// Name of the program.
const NAME: &str = "homeostat";

const EXIT_CODES: &str = "\
EXIT CODES
  0  all is well
  1  it failed; the message says why
  2  the command line or the configuration is wrong
  3  no daemon runs
  4  no such workload, change or experiment
  5  permission denied
  6  the loop of the daemon hangs, so what `status` shows is old

ERRORS
  With --json each error and warning is one line on standard error:
  {\"schema\": 1, \"error\": {\"kind\": \"not_running\", \"exit_code\": 3, \"message\": \"...\", \"hint\": \"...\"}}
  kind is failed, usage, not_running, not_found, permission or hangs, in the order of the exit codes; hint may be null.
  An error of the configuration has a list \"places\" with file, line, column, key, value, problem and remedy.
  A warning stands under \"warning\" instead and has no kind and no exit_code.

FILES
  /etc/homeostat/homeostat.toml   configuration (optional), with drop-ins in homeostat.d/
  /var/lib/homeostat              journal, history and switch
  /run/homeostat/io.homeostat     control socket (Varlink)

EXAMPLES
  homeostat run                   start the daemon in the foreground (as root)
  homeostat on                    let it act, also after a reboot; `homeostat off` undoes all
  homeostat status                what it does at the moment
  homeostat explain redis-server  why, step by step
  homeostat undo --all            take everything back";

/// Makes running programs faster, one proven change at a time.
///
/// homeostat finds the long-running workloads of this machine, measures their useful work from outside, tries one
/// change at a time as a randomised experiment, keeps it only if it helped, and can undo everything it did.
#[derive(Debug, Parser)]
#[command(name = "homeostat", version, after_help = EXIT_CODES, max_term_width = 110)]
pub struct Arguments {
    /// Print JSON with a stable schema instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Configuration file instead of /etc/homeostat/homeostat.toml; drop-ins are read from FILE with the ending .d.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Control socket of the daemon.
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Directory of the journal and the history.
    #[arg(long, global = true, value_name = "DIRECTORY")]
    pub state_dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands. Each is described where its arguments are; a description here would hide the longer one there.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "described at the arguments")]
pub enum Command {
    Run(commands::run::Run),
    Status(commands::status::Status),
    Top(commands::top::Top),
    Explain(commands::explain::Explain),
    History(commands::history::History),
    Report(commands::report::Report),
    Plan(commands::plan::Plan),
    Advice(commands::advice::Advice),
    On(commands::switch::On),
    Off(commands::switch::Off),
    Undo(commands::undo::Undo),
    Restore(commands::restore::Restore),
    #[command(name = "prepare-downgrade")]
    Downgrade(commands::downgrade::Downgrade),
    Pause(commands::pause::Pause),
    Resume(commands::pause::Resume),
    Doctor(commands::doctor::Doctor),
    Privileges(commands::privileges::Show),
    Topology(commands::topology::Topology),
    Locality(commands::locality::Locality),
    Memory(commands::memory::Memory),
    Meter(commands::meter::Meter),
    Tunable(commands::tunable::Tunable),
    Record(commands::record::Record),
    Replay(commands::replay::Replay),
    Demo(commands::demo::Demo),
    Config(commands::config::Config),
    Completions(commands::documents::Completions),
    #[command(visible_alias = "man")]
    Manual(commands::documents::Manual),
    /// Names the program that has taken over the simulated machine.
    #[command(hide = true, alias = "lab", disable_help_flag = true)]
    Simulate {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<std::ffi::OsString>,
    },
    /// Started by the daemon alone: reads parts of files in the control groups of others.
    #[command(hide = true, name = homeostat_daemon::wiring::FETCHER)]
    Fetch,
}

/// What every command may use.
pub struct Context {
    /// Where output goes.
    pub terminal: Terminal,
    /// Where the settings come from.
    pub sources: Sources,
    socket: Option<PathBuf>,
    state_directory: Option<PathBuf>,
}

impl Context {
    /// The settings for finding the daemon. A broken configuration must not keep anybody from looking or undoing,
    /// so it gives a warning and the defaults.
    fn lenient_settings(&self) -> Settings {
        match settings::load(&self.sources) {
            Ok(loaded) => loaded.settings,
            Err(e) => {
                self.terminal.warn(&format!("{e}\nusing the default paths"));
                Settings::default()
            }
        }
    }

    /// Whether the state directory in use is the one that was meant: named, or in a configuration that can be read.
    pub fn settings_are_readable(&self) -> bool {
        self.state_directory.is_some() || settings::load(&self.sources).is_ok()
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.socket
            .clone()
            .unwrap_or_else(|| self.lenient_settings().socket())
    }

    /// The directory of what the daemon keeps for this boot.
    pub fn run_directory(&self) -> PathBuf {
        self.lenient_settings().paths.run_directory
    }

    /// What a person configured about meters, and by which policy they are judged. Where that cannot be read they may have wanted no
    /// breakpoints: then there are none.
    pub fn meter_settings(&self) -> (settings::MeterSettings, settings::Policy) {
        match settings::load(&self.sources) {
            Ok(loaded) => (loaded.settings.meters, loaded.settings.policy),
            Err(e) => {
                self.terminal.warn(&format!(
                    "{e}\nusing the defaults; nothing is counted through breakpoints as long as it cannot be read whether that is wanted"
                ));
                let meters = settings::MeterSettings {
                    breakpoints: false,
                    ..settings::MeterSettings::default()
                };
                (meters, settings::Policy::default())
            }
        }
    }

    /// The directory of the journal and the history.
    pub fn state_directory(&self) -> PathBuf {
        self.state_directory
            .clone()
            .unwrap_or_else(|| self.lenient_settings().paths.state_directory)
    }
}

/// Parses, runs, and turns the result into an exit code.
pub fn main() -> ExitCode {
    // Nobody but the owner writes what root makes, whatever the shell's mask is.
    let others = rustix::fs::Mode::WGRP | rustix::fs::Mode::WOTH;
    rustix::process::umask(rustix::process::umask(others) | others);
    answer(NAME, |arguments| {
        let (context, command) = prepare(arguments);
        let result = command.run(&context);
        // Whatever was counted with breakpoints: the kernel must not be in the middle of one when this process ends.
        homeostat_daemon::meters::end();
        (context.terminal, result)
    })
}

/// Parses the command line of a program, runs it, and turns the result into an exit code.
pub fn answer<A: Parser>(
    program: &'static str,
    run: impl FnOnce(A) -> (Terminal, Result<(), Failure>),
) -> ExitCode {
    let arguments = match A::try_parse() {
        Ok(arguments) => arguments,
        Err(e) if e.use_stderr() && std::env::args_os().any(|a| a == "--json") => {
            // What was parsed is lost with the error: whoever wrote --json wants JSON.
            let text = e.render().to_string();
            let message = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
            let failure = Failure::Report(failure::Kind::Usage, message.to_owned());
            failure.report(&Terminal::detect(program, true));
            return failure.exit_code();
        }
        Err(e) => {
            // Help that nobody reads to its end is no failure.
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
        }
    };
    match run(arguments) {
        (_, Ok(())) => ExitCode::SUCCESS,
        (terminal, Err(failure)) => {
            failure.report(&terminal);
            failure.exit_code()
        }
    }
}

fn prepare(arguments: Arguments) -> (Context, Command) {
    let Arguments {
        json,
        config,
        socket,
        state_dir,
        command,
    } = arguments;
    let mut set = Vec::new();
    for (key, path) in [("control.socket", &socket), ("paths.state_directory", &state_dir)] {
        if let Some(path) = path {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            set.push(settings::assignment(key, &path.to_string_lossy()));
        }
    }
    let context = Context {
        terminal: Terminal::detect(NAME, json),
        sources: Sources { file: config, set },
        socket,
        state_directory: state_dir,
    };
    (context, command)
}

impl Command {
    fn run(self, context: &Context) -> Result<(), Failure> {
        match self {
            Self::Run(c) => c.run(context),
            Self::Status(c) => c.run(context),
            Self::Top(c) => c.run(context),
            Self::Explain(c) => c.run(context),
            Self::History(c) => c.run(context),
            Self::Report(c) => c.run(context),
            Self::Plan(c) => c.run(context),
            Self::Advice(c) => c.run(context),
            Self::On(c) => c.run(context),
            Self::Off(c) => c.run(context),
            Self::Undo(c) => c.run(context),
            Self::Restore(c) => c.run(context),
            Self::Pause(c) => c.run(context),
            Self::Resume(c) => c.run(context),
            Self::Doctor(c) => c.run(context),
            Self::Privileges(c) => c.run(context),
            Self::Topology(c) => c.run(context),
            Self::Locality(c) => c.run(context),
            Self::Memory(c) => c.run(context),
            Self::Meter(c) => c.run(context),
            Self::Tunable(c) => c.run(context),
            Self::Record(c) => c.run(context),
            Self::Replay(c) => c.run(context),
            Self::Demo(c) => c.run(context),
            Self::Config(c) => c.run(context),
            Self::Completions(c) => c.run(context),
            Self::Manual(c) => c.run(context),
            Self::Downgrade(c) => c.run(context),
            Self::Simulate { .. } => Err(Failure::Report(
                failure::Kind::Usage,
                "the simulated machine is a program of its own\n  hint: homeostat-lab takes the same arguments; `make lab` in the sources builds it".into(),
            )),
            Self::Fetch => homeostat_daemon::wiring::fetch().map_err(|e| {
                Failure::Report(
                    failure::Kind::Failed,
                    format!(
                        "the daemon starts this command, and tells it what to read through a socket: {e}"
                    ),
                )
            }),
        }
    }
}
