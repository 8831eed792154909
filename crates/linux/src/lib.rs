//! The real machine below a root path: sensors, meters and effectors behind the `platform` traits, and its abilities.

mod canary;
pub mod capabilities;
mod kinds;
pub mod parsers;
mod platform;

pub use homeostat_kernel::Root;
pub use homeostat_kernel::clock::MonotonicClock;
pub use kinds::kinds;
pub use platform::LinuxPlatform;
