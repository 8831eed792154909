//! System calls without a safe wrapper in a library. The only module of the workspace's daemon side with
//! `unsafe`; every function is a thin, safe wrapper that states its argument.
#![expect(unsafe_code, reason = "the one place where system calls are made by hand")]

pub mod bpf;
pub mod breakpoints;
pub mod cache;
#[cfg(test)]
pub mod counted;
pub mod fanotify;
pub mod helper;
pub mod internal_files;
pub mod interrupt;
pub mod memory;
pub mod moves;
pub mod numa;
pub mod other_memory;
pub mod perf;
pub mod probe;
pub mod residence;
mod ring;
pub mod stacks;
pub mod switches;
