//! `homeostat completions` and `homeostat manual`: made from the same doc comments as `--help`.

use crate::failure::Failure;
use crate::{Arguments, Context};
use clap::{Args, CommandFactory};
use std::path::PathBuf;

/// Print completions for a shell.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat completions bash > /usr/share/bash-completion/completions/homeostat")]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

/// Write the manual pages into a directory.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat manual /usr/share/man/man1")]
pub struct Manual {
    /// An existing directory.
    directory: PathBuf,
}

impl Completions {
    /// Prints.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Arguments::command(), "homeostat", &mut text);
        context.terminal.print(&String::from_utf8_lossy(&text))
    }
}

impl Manual {
    /// Writes one page per command.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        clap_mangen::generate_to(Arguments::command(), &self.directory).map_err(|e| {
            Failure::from_error(&std::io::Error::new(
                e.kind(),
                format!(
                    "cannot write the manual pages into {}: {e}",
                    self.directory.display()
                ),
            ))
        })?;
        if context.terminal.json {
            return context.terminal.print("{\"schema\": 1}");
        }
        context
            .terminal
            .print(&format!("The manual pages are in {}.", self.directory.display()))
    }
}
