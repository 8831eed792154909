//! `homeostat prepare-downgrade`: what a package does before an older version takes its place.

use crate::Context;
use crate::commands::restore;
use crate::commands::switch::standing;
use crate::failure::Failure;
use clap::Args;
use homeostat_daemon::settings::MAIN_FILE;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the drop-in. Of drop-ins the last in the order of their names wins.
const DROP_IN: &str = "zz-switched-off.toml";

/// Undo everything, and keep an older version from acting where this one is switched off.
///
/// Versions before the switch act whenever they run. They read drop-ins of the configuration, so one says for them what the switch says
/// here. No daemon may run.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat prepare-downgrade                before an older version is installed; the Debian package does it by itself")]
pub struct Downgrade {}

impl Downgrade {
    /// Undoes, writes the drop-in where it is needed, and says what the older version will do.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let restored = restore::by_hand(context, true, false)?;
        let off = standing(context, &context.state_directory()).is_off();
        let says = if off {
            let main = context.sources.file.clone();
            let directory = main
                .unwrap_or_else(|| PathBuf::from(MAIN_FILE))
                .with_extension("d");
            let file = directory.join(DROP_IN);
            write(&directory, &file).map_err(|e| {
                Failure::failed(format!(
                    "{}: {e}, so an older version would act\n  hint: keep its service from starting (`systemctl mask homeostat`)",
                    file.display()
                ))
            })?;
            format!(
                "An older version knows no switch: {} keeps it to advice. Let it act: remove that file.",
                file.display()
            )
        } else {
            "An older version acts as soon as it runs, as this one did; `homeostat off` is not known to it."
                .to_owned()
        };
        context
            .terminal
            .show(&restored, |_| format!("{}\n{says}", restored.human()))?;
        restored.verdict()
    }
}

fn write(directory: &Path, file: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)?;
    let text = "# homeostat was switched off (`homeostat off`) when an older version was installed, which knows no switch. Remove this\n\
                # file to let homeostat act.\n[policy]\nmode = \"advise-only\"\n";
    std::fs::write(file, text)
}
