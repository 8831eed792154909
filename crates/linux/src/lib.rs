//! The real machine, below a given root path: sensors, meters, effectors, capabilities.
//!
//! The only crate that touches the kernel. Parsers read files below [`Root`], so that they are tested on captured
//! trees (`fixtures/hosts`). `unsafe` lives in [`sys`] alone.

pub mod capabilities;
pub mod effectors;
pub mod helper;
pub mod meters;
pub mod parsers;
mod platform;
pub mod root;
pub mod sensors;
pub mod settings;
pub mod sys;

pub use platform::{LinuxPlatform, MonotonicClock};
pub use root::Root;
