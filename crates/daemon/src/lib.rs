//! The daemon: settings, control socket, signals, privileges, and the stable JSON shapes for scripts.
//!
//! It decides nothing. It connects engine and strategies, effectors (runtime) and machine (linux), provides time and
//! settings, publishes the state on a [`board`], and passes on requests.

pub mod api;
pub mod board;
pub mod client;
pub mod control;
pub mod dossier;
pub mod greeting;
pub mod log;
pub mod machine_lock;
pub mod memory;
pub mod meters;
pub mod metrics;
pub mod notify;
pub mod places;
pub mod printable;
pub mod privileges;
pub mod process;
pub mod progress_place;
pub mod recordings;
pub mod report;
pub mod service;
pub mod settings;
pub mod switch;
pub mod tunables;
pub mod watch;
pub mod wiring;
