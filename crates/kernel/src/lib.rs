//! System calls without a safe wrapper in a library: only here does the daemon have `unsafe`, in thin, safe functions.
//! Also the basics of all readers: the tree to read ([`Root`]), the files of a process, and the text of kernel files.
#![expect(unsafe_code, reason = "the one place where system calls are made by hand")]

pub mod bpf;
pub mod breakpoints;
pub mod bytes;
pub mod cache;
pub mod clock;
pub mod fanotify;
pub mod files;
mod gzip;
pub mod helper;
pub mod internal_files;
pub mod interrupt;
pub mod kernel_config;
pub mod memory;
pub mod moves;
pub mod numa;
pub mod other_memory;
pub mod perf;
pub mod privileges;
pub mod probe;
pub mod process;
pub mod release;
pub mod residence;
mod ring;
pub mod root;
pub mod stacks;
pub mod switches;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;

pub use root::Root;

/// A name, and a parser that takes any bytes and may only refuse them.
pub type Parser = (&'static str, fn(&[u8]));
