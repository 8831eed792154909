//! What can be seen of the machine, one file each. Parsers take bytes and are public, so that they are tested on
//! captured trees and on rubbish.

pub mod bytes;
pub mod choice;
pub mod counters;
mod elsewhere;
pub mod files;
pub mod group_memory;
pub mod group_view;
pub mod grouping;
pub mod gzip;
pub mod host;
pub mod huge_pages;
pub mod kernel_balancing;
pub mod kernel_config;
mod live_environment;
pub mod locality;
pub mod memory_settings;
pub mod numa_maps;
pub mod paging;
pub mod pressure;
pub mod processes;
pub mod processor;
pub mod reader;
pub mod reads;
pub mod regions;
pub mod topology;
pub mod tuners;
pub mod units;
pub mod walks;
