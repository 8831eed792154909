//! The real machine, below a given root path: its sensors, meters and effectors behind the traits of the seam, and what of them
//! this machine has.
//!
//! Parsers read files below [`Root`], so that they are tested on captured trees (`fixtures/hosts`).

pub mod capabilities;
mod kinds;
pub mod parsers;
mod platform;

pub use homeostat_kernel::Root;
pub use homeostat_kernel::clock::MonotonicClock;
pub use kinds::kinds;
pub use platform::LinuxPlatform;
