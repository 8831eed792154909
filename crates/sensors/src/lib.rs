//! Sensors of the machine, one file each. Parsers take bytes and are public, so that tests run them on captured trees
//! and on damaged input. [`settings`] watches the kernel's settings: who writes and who configured them.

pub mod choice;
#[cfg(test)]
#[expect(unsafe_code, reason = "an allocator that counts, for tests")]
mod counted;
pub mod counters;
mod elsewhere;
pub mod group_memory;
pub mod group_view;
pub mod grouping;
pub mod host;
pub mod huge_pages;
pub mod kernel_balancing;
mod live_environment;
pub mod locality;
pub mod memory_group;
pub mod memory_settings;
pub mod numa_maps;
pub mod paging;
pub mod parsers;
pub mod patient;
pub mod pressure;
pub mod processes;
pub mod processor;
pub mod reader;
pub mod reads;
pub mod regions;
pub mod settings;
pub mod storage;
pub mod topology;
pub mod tuners;
pub mod units;
pub mod walks;
