//! `homeostat privileges`.

use crate::Context;
use crate::failure::Failure;
use crate::render;
use clap::Args;
use homeostat_daemon::privileges::Privileges;
use homeostat_daemon::settings;

/// Show which privileges homeostat needs, for what and why, and make the files that grant them.
///
/// The configuration counts: what only a strategy needs that is switched off there is left out. Needs no daemon and no privilege.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat privileges
  homeostat privileges --json | jq '.rows[] | select(.kind == \"capability\")'
  mkdir -p /etc/systemd/system/homeostat.service.d
  homeostat privileges --drop-in > /etc/systemd/system/homeostat.service.d/privileges.conf
                                             less for the service, once strategies are off
  homeostat privileges --seccomp > seccomp.json
                                             the filter of system calls for a container")]
pub struct Show {
    #[command(flatten)]
    file: File,
}

/// Which file.
#[derive(Debug, Args)]
#[group(multiple = false)]
struct File {
    /// Print the systemd unit.
    #[arg(long)]
    unit: bool,
    /// Print a drop-in that leaves the shipped unit these privileges alone.
    #[arg(long)]
    drop_in: bool,
    /// Print the file of a container image, with the command that runs it.
    #[arg(long)]
    container: bool,
    /// Print the container's filter of system calls.
    #[arg(long)]
    seccomp: bool,
}

impl Show {
    /// Shows, or makes a file.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let loaded = settings::load(&context.sources).map_err(Failure::Configuration)?;
        let privileges = Privileges::of(&loaded.settings);
        let file = &self.file;
        let text = if file.unit {
            privileges.unit()
        } else if file.drop_in {
            privileges.drop_in()
        } else if file.container {
            privileges.container()
        } else if file.seccomp {
            privileges.seccomp()
        } else {
            return context
                .terminal
                .show(&privileges, |look| render::privileges(&privileges, look));
        };
        // A file is the same for people and programs.
        context.terminal.print(&text)
    }
}
