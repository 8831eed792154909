//! Whether the daemon may act: the switch in the state directory, the configuration and the command line decide. It
//! knows the mode in force and its wording.

use crate::api;
use crate::settings::{Place, Policy};
use homeostat_engine::Mode;
use homeostat_store::switch::{self, Switch, SwitchError};
use std::path::{Path, PathBuf};

const ON: &str = "homeostat on";
const OFF: &str = "homeostat off";

/// The switch as the daemon knows it.
#[derive(Clone, Debug)]
pub struct Standing {
    state_directory: PathBuf,
    /// `None`: never set, so it stops nobody from acting.
    switch: Option<Switch>,
    mode: Mode,
    mode_from: Option<Place>,
}

/// Records the first position for an installed package: off, so that a new installation only advises. A state directory
/// of an earlier version stays on if that version has acted.
///
/// # Errors
/// [`SwitchError`]; a daemon that was to advise first must not run then.
pub fn record_first(state_directory: &Path) -> Result<(), SwitchError> {
    match switch::read(state_directory) {
        Some(_) => Ok(()),
        None => switch::write(state_directory, switch::has_acted(state_directory)),
    }
}

impl Standing {
    /// Reads the switch. `mode` is that of the configuration, written at `mode_from`.
    pub fn read(state_directory: &Path, mode: Mode, mode_from: Option<Place>) -> Self {
        Self {
            state_directory: state_directory.to_owned(),
            switch: switch::read(state_directory),
            mode,
            mode_from,
        }
    }

    /// Reads the file again. Off holds however it was set; on does not, since an off may not have been recorded.
    pub fn look_again(&mut self) {
        if let Some(found) = switch::read(&self.state_directory).filter(|found| !found.on && !self.is_off()) {
            self.switch = Some(found);
        }
    }

    /// Another configuration was read.
    pub fn configure(&mut self, mode: Mode, mode_from: Option<Place>) {
        (self.mode, self.mode_from) = (mode, mode_from);
    }

    /// Whether the switch keeps the daemon from acting.
    pub fn is_off(&self) -> bool {
        self.switch.as_ref().is_some_and(|switch| !switch.on)
    }

    /// The policy in force: the configured one, reduced to advice while the switch is off.
    pub fn policy(&self, configured: &Policy) -> Policy {
        let mut policy = configured.clone();
        if self.is_off() {
            policy.mode = Mode::AdviseOnly;
        }
        policy
    }

    /// Sets the switch. Returns whether it changed.
    ///
    /// # Errors
    /// It could not be recorded. Off holds all the same until the daemon ends; on does not.
    pub fn set(&mut self, on: bool, now_unix: u64) -> Result<bool, SwitchError> {
        let is_so = |s: &Switch| s.on == on && s.trouble.is_none();
        if self.switch.as_ref().is_some_and(is_so) {
            return Ok(false);
        }
        let changed = self.is_off() == on;
        let recorded = switch::write(&self.state_directory, on);
        if recorded.is_ok() || !on {
            self.switch = Some(Switch {
                on,
                since_unix: Some(now_unix),
                trouble: recorded.as_ref().err().map(|_| {
                    "the switch could not be recorded, so it is off until the daemon ends".to_owned()
                }),
            });
        }
        recorded.map(|()| changed)
    }

    /// Why the daemon does not act although the switch allows it: the place of the mode, and the remedy.
    pub fn forbidden_by(&self) -> Option<(&'static str, String, String)> {
        let what = self.mode;
        let place = self.mode_from.as_ref().filter(|_| what != Mode::Act)?;
        Some(if place.is_command_line() {
            (
                "command line",
                format!("it was started with --{what}"),
                format!("start it without --{what}"),
            )
        } else {
            (
                "configuration",
                format!("policy.mode = \"{what}\" in {place}"),
                format!("take policy.mode out of {place}, and reload it"),
            )
        })
    }

    /// For people and programs.
    pub fn shown(&self) -> api::Switch {
        let since_unix = self.switch.as_ref().and_then(|s| s.since_unix);
        let by_switch = || match since_unix {
            Some(at) => format!("since {}", crate::log::date_and_time(at)),
            None => "by its switch".to_owned(),
        };
        let (on, by, why, change) = match (&self.switch, self.forbidden_by()) {
            (Some(switch), _) if !switch.on => {
                let why = switch.trouble.clone().unwrap_or_else(by_switch);
                (false, "switch", why, ON.to_owned())
            }
            (_, Some((by, why, change))) => (false, by, why, change),
            (Some(_), None) => (true, "switch", by_switch(), OFF.to_owned()),
            (None, None) => (
                true,
                "default",
                "nobody has switched it off".to_owned(),
                OFF.to_owned(),
            ),
        };
        api::Switch {
            on,
            by: by.to_owned(),
            since_unix: since_unix.filter(|_| by == "switch"),
            why,
            change,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_store::history::HISTORY_FILE;
    use homeostat_store::journal::JOURNAL_FILE;
    use homeostat_store::switch::SWITCH_FILE;

    fn place(layer: &str) -> Option<Place> {
        Some(Place {
            layer: layer.to_owned(),
            line: 3,
        })
    }

    #[test]
    fn a_first_start_only_advises_and_an_upgrade_of_one_that_acted_goes_on() {
        let home = tempfile::tempdir().unwrap();
        let (new, old) = (home.path().join("new"), home.path().join("old"));
        for (directory, left) in [(&new, "history.sqlite"), (&old, "journal-accepted")] {
            std::fs::create_dir(directory).unwrap();
            let file = if left == "history.sqlite" {
                HISTORY_FILE
            } else {
                JOURNAL_FILE
            };
            let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/upgrade");
            std::fs::copy(fixtures.join(left), directory.join(file)).unwrap();
        }
        for (directory, off) in [(&new, true), (&old, false)] {
            let before = Standing::read(directory, Mode::Act, None);
            assert!(!before.is_off() && before.shown().by == "default");
            record_first(directory).unwrap();
            assert_eq!(Standing::read(directory, Mode::Act, None).is_off(), off);
        }
        // It is recorded once.
        Standing::read(&new, Mode::Act, None).set(true, 1).unwrap();
        record_first(&new).unwrap();
        assert!(!Standing::read(&new, Mode::Act, None).is_off());
    }

    #[test]
    fn the_switch_forces_advice_and_says_what_changes_it() {
        let home = tempfile::tempdir().unwrap();
        let mut standing = Standing::read(home.path(), Mode::Act, None);
        let configured = Policy::default();
        assert_eq!(standing.policy(&configured), configured);
        assert!(standing.set(false, 1_700_000_000).unwrap());
        assert!(!standing.set(false, 1_700_000_100).unwrap(), "it is off already");
        assert_eq!(standing.policy(&configured).mode, Mode::AdviseOnly);
        assert_eq!(
            standing.shown().sentence(),
            "homeostat is off: it advises and changes nothing (since 2023-11-14 22:13 UTC). Let it act: homeostat on"
        );
        // Off wins over what the configuration says.
        standing.configure(Mode::AdviseOnly, place("/etc/h.toml"));
        assert_eq!(standing.shown().by, "switch");
        assert!(standing.set(true, 1_700_000_000).unwrap());
        let shown = standing.shown();
        assert!(!shown.on, "{shown:?}");
        assert_eq!(
            shown.sentence(),
            "homeostat is off: it advises and changes nothing (policy.mode = \"advise-only\" in /etc/h.toml, line 3). Let it act: \
             take policy.mode out of /etc/h.toml, line 3, and reload it"
        );
        standing.configure(Mode::AdviseOnly, place("--set policy.mode=\"advise-only\""));
        assert_eq!(standing.shown().change, "start it without --advise-only");
        standing.configure(Mode::Act, None);
        assert_eq!(
            standing.shown().sentence(),
            "homeostat is on: it tries changes and keeps what is proven to help (since 2023-11-14 22:13 UTC). Undo all: \
             homeostat off"
        );
    }

    #[test]
    fn off_is_found_in_the_file_and_on_is_not() {
        let home = tempfile::tempdir().unwrap();
        let mut standing = Standing::read(home.path(), Mode::Act, None);
        standing.set(true, 1).unwrap();
        switch::write(home.path(), false).unwrap();
        assert!(!standing.is_off());
        standing.look_again();
        assert!(standing.is_off());
        switch::write(home.path(), true).unwrap();
        standing.look_again();
        assert!(standing.is_off());
    }

    #[test]
    fn what_cannot_be_recorded_is_off_until_the_end_and_never_on() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("state");
        let mut standing = Standing::read(&directory, Mode::Act, None);
        std::fs::write(&directory, "no directory").unwrap();
        assert!(standing.set(false, 1).is_err());
        assert!(standing.is_off());
        assert!(standing.shown().why.contains("could not be recorded"));
        assert!(standing.set(true, 2).is_err());
        assert!(standing.is_off());
        // A switch that says nothing is off, and is written anew.
        let directory = home.path().join("other");
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join(SWITCH_FILE), "nonsense").unwrap();
        let mut standing = Standing::read(&directory, Mode::Act, None);
        assert!(standing.is_off() && standing.shown().why.contains("writes it anew"));
        assert!(!standing.set(false, 3).unwrap(), "it counted as off before");
        assert!(standing.set(true, 4).unwrap());
        assert!(!Standing::read(&directory, Mode::Act, None).is_off());
    }
}
