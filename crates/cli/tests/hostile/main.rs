//! Attacks by users without privileges against a daemon that runs and may act, one module per weakness.
//!
//! [`plant`] starts the daemon that is attacked and a second one as a control run. The control run touches no program and runs under
//! the same load, so an attack is blamed only for what it does beyond that load.
//! The tests need root, `unshare`, `nsenter` and `setpriv`; they say so when they skip.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

mod plant;
mod s0_control;
mod s1_kill;
mod s1_mounts;
mod s2_elf;
mod s3_identity;
mod s4_environment;
mod s5_thp_choice;
mod s6_sockets;
mod s7_journal;
mod s8_small;
