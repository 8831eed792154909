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

/// Date of the manual pages; changed with their contents.
const DATE: &str = "2026-11-22";

impl Manual {
    /// Writes one page per command.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let mut command = Arguments::command().disable_help_subcommand(true);
        command.build();
        self.write(command).map_err(|e| {
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

    /// Writes the page of a command and those of its subcommands.
    fn write(&self, command: clap::Command) -> std::io::Result<()> {
        for inner in command.get_subcommands().filter(|c| !c.is_hide_set()).cloned() {
            self.write(inner)?;
        }
        let name = command
            .get_display_name()
            .unwrap_or(command.get_name())
            .to_owned();
        let mut page = Vec::new();
        // Without a date the generator leaves its place empty, and readers take the version for it.
        clap_mangen::Man::new(command)
            .title(name.to_uppercase())
            .date(DATE)
            .source(concat!("homeostat ", env!("CARGO_PKG_VERSION")))
            .manual("homeostat")
            .render(&mut page)?;
        let mut text = String::new();
        for line in String::from_utf8_lossy(&page).lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        std::fs::write(self.directory.join(format!("{name}.1")), text)
    }
}
