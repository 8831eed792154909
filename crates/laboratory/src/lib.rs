//! Runs the whole of homeostat on simulated machines: the same engine, strategies, runtime and journal as the daemon.
//!
//! Scenarios, the published table, swarms of random machines, and fault campaigns with checkers of their own.

pub mod campaign;
pub mod checkers;
pub mod exact;
pub mod faults;
pub mod oracle;
mod parallel;
pub mod published;
pub mod report;
pub mod run;
pub mod scenario;
pub mod swarm;
