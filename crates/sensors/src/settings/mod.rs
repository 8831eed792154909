//! The kernel's settings on the real machine: files behind `homeostat_tunables`, and the watch over their writers.

pub mod watch;

use homeostat_kernel::Root;
use homeostat_tunables::settings::{Host, Known};
use homeostat_tunables::{Catalogue, Origin};

/// Owner of a setting's value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holder {
    /// Somebody else's, or unknown.
    #[default]
    Unknown,
    /// homeostat's.
    Homeostat,
    /// Somebody set it while it was homeostat's.
    SomebodyElse,
}

/// The configured line about a setting, whatever it says; the last one in the order of effect.
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

/// Who configured the present value, `at run time` if that is neither configured nor the kernel's; `None`: unknown.
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
