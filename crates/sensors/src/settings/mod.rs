//! The kernel's settings on the real machine: the files behind `homeostat_tunables`, and the watch over who writes them.

pub mod watch;

use homeostat_kernel::Root;
use homeostat_tunables::settings::{Host, Known};
use homeostat_tunables::{Catalogue, Origin};

/// Whose value a setting has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// Not ours; whoever set it.
    #[default]
    Unknown,
    /// Ours.
    Homeostat,
    /// That of somebody who set it while it was ours.
    SomebodyElse,
}

/// The line that a person wrote about a setting, whatever it says; the last one in the order of effect.
pub fn configured(root: &Root, path: &str) -> Option<String> {
    lines(root, &[path]).pop().flatten()
}

/// As [`configured`], for several settings at once.
pub fn lines(root: &Root, paths: &[&str]) -> Vec<Option<String>> {
    let Ok(catalogue) = Catalogue::load() else {
        return paths.iter().map(|_| None).collect();
    };
    let host = Host::read(root);
    let of = |path: &&str| {
        let setting = host.setting_at(&catalogue, path)?;
        host.lines_about(&setting).pop().map(|said| said.written.place())
    };
    paths.iter().map(of).collect()
}

/// Who chose the value that a setting has, as far as it is written down; `at run time` where it is neither written down nor
/// the kernel's own. `None`: nobody, or it is not known.
pub fn origin(root: &Root, path: &str) -> Option<String> {
    let catalogue = Catalogue::load().ok()?;
    let host = Host::read(root);
    let setting = host.setting_at(&catalogue, path)?;
    match host.origin(&setting, &Known::default())? {
        Origin::Configured { place, .. } => Some(place),
        Origin::RunTime { .. } => Some("at run time".to_owned()),
        Origin::Kernel { place, .. } => place,
        Origin::Default | Origin::Command { .. } | Origin::Homeostat { .. } | Origin::Unknown => None,
    }
}
