//! Runs all of homeostat on simulated machines, with the daemon's engine, strategies, runtime and journal.
//!
//! Scenarios, the published table, swarms of random machines, and fault campaigns with independent checkers. [`proof`]
//! needs no simulated machine: it runs the statistics on records of real noise.

pub mod campaign;
pub mod checkers;
pub mod exact;
pub mod faults;
pub mod oracle;
mod parallel;
pub mod proof;
pub mod published;
pub mod report;
pub mod run;
pub mod scenario;
pub mod swarm;
