//! A simulated machine behind the same traits as Linux, meaner than the real one.
//!
//! Hardware (`layout`, `hardware`, `scheduler`, `profiles`), kernel and programs (`memory`, `behaviour`,
//! `world`), and the seam (`platform`). Virtual time only: nothing here reads a clock, and one seed gives one run, byte
//! for byte.
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
