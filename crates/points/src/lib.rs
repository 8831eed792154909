//! Probe sites: instructions of a program whose executions count its useful work, found without the program's help.
//!
//! This crate is pure. [`code`] finds the instructions of a function that are worth counting and cheap to count.
//! [`choice`] decides which counts to trust, if any. Other crates sample stacks, read files and set probes.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod choice;
pub mod code;

/// Cost of one hit on an emulated instruction, in seconds of CPU time (0.62 µs by BPF on a virtual machine, rounded
/// up).
pub const HIT_COST: f64 = 0.7e-6;
