//! A simulated machine behind the traits of Linux, meaner than the real one: hardware (`layout`, `hardware`,
//! `scheduler`, `profiles`), kernel and programs (`memory`, `behaviour`, `world`), and the seam (`platform`). Time is
//! virtual, and one seed gives one run, byte for byte.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod behaviour;
pub mod hardware;
pub mod layout;
pub mod memory;
pub mod noise;
pub mod platform;
pub mod profiles;
pub mod rough;
pub mod scheduler;
pub mod world;
