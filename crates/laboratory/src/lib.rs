//! Runs the whole of homeostat on simulated machines: the same engine, strategies, runtime and journal as the daemon.
//!
//! Scenarios, the published table, swarms of random machines, fault campaigns with checkers of their own.

pub mod checkers;
pub mod faults;
