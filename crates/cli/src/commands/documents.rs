//! `homeostat completions` and `homeostat manual`: made from the same doc comments as `--help`.

mod page;

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
  homeostat manual /usr/local/share/man      into man1, man5 and man8 below it
  man homeostat.toml                         the configuration, once the pages are there")]
pub struct Manual {
    /// An existing directory; man1, man5 and man8 are made in it.
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
    /// Writes one page per command, and that of the configuration.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let mut command = Arguments::command().disable_help_subcommand(true);
        command.build();
        self.write(&command).map_err(|e| {
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

    fn write(&self, command: &clap::Command) -> std::io::Result<()> {
        let mut pages = vec![page::of_configuration()];
        page::of_command(command, &[], &mut pages)?;
        for page in pages {
            let directory = self.directory.join(format!("man{}", page.section));
            match std::fs::create_dir(&directory) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            std::fs::write(
                directory.join(format!("{}.{}", page.name, page.section)),
                page.text,
            )?;
        }
        Ok(())
    }
}
