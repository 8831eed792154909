//! Scenarios that run inside an emulated machine with several NUMA nodes, on a real kernel.
//!
//! The machine is built and booted by `vm/vm-test`; its first process starts [`scenarios::run_all`]. What homeostat
//! does is checked with instruments of our own ([`instruments`]): masks from `/proc/PID/task/*/status`, nodes of pages
//! from the page tables and the kernel's list of memory blocks. They share no code with the sensors and effectors under
//! test. The emulation shows no cost of distance, so nothing here judges speed.

pub mod crash;
pub mod daemon;
pub mod driver;
pub mod expected;
pub mod failure;
pub mod instruments;
pub mod keeper;
pub mod scenarios;

pub use failure::Failure;
