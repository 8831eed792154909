//! The settings of the kernel that matter: what each does, what it is by itself, what it is here, and who set it.
//!
//! Pure: files come through [`Tree`], so that everything works on a captured tree as on the running machine, and is
//! tested there. The parts:
//!
//! | module | what it holds |
//! |---|---|
//! | [`catalogue`] | the settings, as data (`catalogue.toml`) |
//! | [`values`] | which values a setting takes |
//! | [`expression`] | defaults and rules that depend on the machine |
//! | [`configured`] | what is written down on the machine: sysctl.d, tmpfiles.d, udev rules, units, tuned … |
//! | [`reading`] | what the kernel makes of a text that is written into a setting |
//! | [`kernel`] | what the kernel does to a setting by itself |
//! | [`settings`] | the settings as they are, and the origin of each |
//! | [`snapshot`] | one machine compared with another |
//! | [`stale`] | what this kernel ignores and what works against it |
//! | [`markdown`] | the reference in docs/tunables.md |
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod catalogue;
pub mod configured;
pub mod expression;
pub mod kernel;
pub mod markdown;
pub mod reading;
pub mod settings;
pub mod snapshot;
pub mod stale;
#[cfg(test)]
mod testing;
pub mod tree;
pub mod values;

pub use catalogue::{Catalogue, Kind, Tunable};
pub use configured::{Applies, Configured, Way, Written};
pub use settings::{Found, Origin, Setting};
pub use tree::{Facts, Release, Tree, Unreadable};
pub use values::Values;
