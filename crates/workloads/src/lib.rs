//! Real programs that stress one thing each: what demo, tests and benchmarks run.
//!
//! | program | stresses | unit of work | large pages |
//! |---|---|---|---|
//! | `latency` | address translation and memory latency: a chain of dependent loads | load | help |
//! | `memory-writer` | memory bandwidth: rewrites all of its memory | byte | help a little |
//! | `file-reader` | the file cache: reads one file over and over | byte | nothing to convert |
//! | `file-worker` | the file cache: touches a file here and there, mapped or by read calls | touch | nothing to convert |
//! | `sparse` | nothing: one 4 KiB page touched of every 2 MiB | touch | would only bloat |
//! | `short-lived` | process creation, as the SPEC SDET mix does | process | nothing to convert |
//!
//! `collapse` is the odd one out: it does by hand, to one process and at once, what homeostat does carefully. The
//! benchmark uses it to know the best that could have been had.
//!
//! All programs count their work with `homeostat-progress`, print one line per report interval when asked with
//! `--report`, end at SIGTERM or SIGINT as they would at their time limit, and print a summary. Lines are made of
//! `key=value` words, so that a shell can take them apart: `work` is in the unit that the first line names, the
//! units of time and size are part of the key.

pub mod chain;
pub mod file;
pub mod maps;
pub mod memory;
pub mod pace;
pub mod program;
pub mod session;
mod sys;

pub use chain::{Chain, Order};
pub use file::{FileError, WorkFile};
pub use memory::{Backing, MemoryError, PageAdvice, Region};
pub use pace::Duty;
pub use program::{Pausing, ProgramError, Share, Timing, main_of};
pub use session::{Outcome, Plan, Session, SessionError, Work};
pub use sys::{Advice, advise_process};

/// Bytes in a MiB.
pub const MIB: u64 = 1024 * 1024;

/// Size in bytes of a base page on the supported machines (x86-64, arm64 with 4 KiB granule).
pub const BASE_PAGE_BYTES: usize = 4096;

/// Size in bytes of a large page: one PMD entry with 4 KiB base pages.
pub const LARGE_PAGE_BYTES: usize = 2 * 1024 * 1024;
