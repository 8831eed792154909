//! The subcommands, one file each. To add one: a file here, a variant of [`crate::Command`].

pub mod advice;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod documents;
pub mod downgrade;
pub mod explain;
pub mod history;
pub mod locality;
pub mod memory;
pub mod meter;
pub mod pause;
pub mod plan;
pub mod privileges;
pub mod record;
pub mod replay;
pub mod report;
pub mod restore;
pub mod run;
pub mod status;
pub mod switch;
pub mod top;
pub mod topology;
pub mod tunable;
pub mod undo;
