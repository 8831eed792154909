//! The privileges that homeostat needs: one table generates the systemd unit and the container's files. A row of
//! [`TABLE`] names a privilege, its user and the reason. Switching a strategy off removes the rows that only it has.
//! Rows of later work say whether their privilege is given now. Path rules stop faults of homeostat, not a hijacked
//! daemon: `CAP_SYS_PTRACE` reaches another process's file system.

mod calls;
mod container;
mod table;
mod unit;

use crate::settings::{Paths, Settings};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

pub use table::TABLE;

const RUN: [&str; 2] = ["run", "--advise-first"];

/// One privilege.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A capability (`capabilities(7)`).
    Capability(&'static str),
    /// A system call beyond those that every service makes.
    Call(&'static str),
    /// A file or directory of `/proc/sys` or `/sys` that is written.
    Write(&'static str),
    /// A device.
    Device {
        /// As `DeviceAllow=` of a unit names it.
        name: &'static str,
        /// Its files.
        path: &'static str,
        /// `r`, `w` or both.
        access: &'static str,
    },
    /// A family of socket addresses.
    Family(&'static str),
    /// A kind of namespace that is entered.
    Namespace(&'static str),
    /// A socket of the service manager.
    Socket(&'static str),
}

/// The user of the privilege.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The daemon as a process, whatever is switched on.
    Always,
    /// Sensors.
    Sensors,
    /// Meters of useful work.
    Meters,
    /// These strategies, by id.
    Strategies(&'static [&'static str]),
    /// Work that does not exist yet.
    Later(&'static str),
}

/// Whether it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    /// Given.
    Given,
    /// Another row gives it, or no privilege is needed.
    Covered,
    /// Refused until something needs it.
    Withheld,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The privilege.
    pub need: Need,
    /// The user of the privilege.
    pub by: By,
    /// Whether it is given.
    pub decision: Decision,
    /// For people: a sentence.
    pub why: &'static str,
}

impl Need {
    /// The kind of privilege.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Capability(_) => "capability",
            Self::Call(_) => "system call",
            Self::Write(_) => "path written",
            Self::Device { .. } => "device",
            Self::Family(_) => "address family",
            Self::Namespace(_) => "namespace",
            Self::Socket(_) => "socket",
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Capability(name)
            | Self::Call(name)
            | Self::Write(name)
            | Self::Family(name)
            | Self::Namespace(name)
            | Self::Socket(name) => name,
            Self::Device { path, .. } => path,
        }
    }
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always => f.write_str("always"),
            Self::Sensors => f.write_str("sensors"),
            Self::Meters => f.write_str("meters"),
            Self::Strategies(ids) => f.write_str(&ids.join(", ")),
            Self::Later(what) => write!(f, "later: {what}"),
        }
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let strategies: &[&str] = match self.by {
            By::Strategies(ids) => ids,
            _ => &[],
        };
        let mut row = serializer.serialize_struct("Row", 6)?;
        row.serialize_field("kind", self.need.kind())?;
        row.serialize_field("name", self.need.name())?;
        row.serialize_field("by", &self.by.to_string())?;
        row.serialize_field("strategies", strategies)?;
        row.serialize_field("decision", &self.decision)?;
        row.serialize_field("why", self.why)?;
        row.end()
    }
}

/// The rows that a configuration leaves.
#[derive(Clone, Debug, Serialize)]
pub struct Privileges {
    schema: u32,
    off: Vec<&'static str>,
    rows: Vec<Row>,
    /// Configured directories that the unit would not make writable by itself.
    directories: Vec<PathBuf>,
}

/// The state and run directories that differ from those the unit makes.
fn directories(paths: &Paths) -> Vec<PathBuf> {
    let usual = Paths::default();
    [
        (&paths.state_directory, usual.state_directory),
        (&paths.run_directory, usual.run_directory),
    ]
    .into_iter()
    .filter(|(path, usual)| *path != usual)
    .map(|(path, _)| path.clone())
    .collect()
}

impl Privileges {
    /// Those of a configuration: a strategy that is off for all workloads needs nothing.
    pub fn of(settings: &Settings) -> Self {
        let policy = &settings.policy;
        let used = |id: &str| {
            policy.strategies.get(id).copied().unwrap_or(true)
                || policy
                    .workloads
                    .iter()
                    .any(|rule| rule.strategies.get(id) == Some(&true))
        };
        let is_left = |row: &&Row| match row.by {
            By::Strategies(ids) => ids.iter().any(|id| used(id)),
            By::Always | By::Sensors | By::Meters | By::Later(_) => true,
        };
        let named: BTreeSet<&'static str> = TABLE
            .iter()
            .filter_map(|row| match row.by {
                By::Strategies(ids) => Some(ids),
                _ => None,
            })
            .flatten()
            .copied()
            .collect();
        Self {
            schema: crate::api::SCHEMA,
            off: named.into_iter().filter(|id| !used(id)).collect(),
            rows: TABLE.iter().filter(is_left).copied().collect(),
            directories: directories(&settings.paths),
        }
    }

    /// The rows, in the order of the table.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Strategies that are switched off for all workloads.
    pub fn off(&self) -> &[&'static str] {
        &self.off
    }

    fn given(&self) -> Vec<Need> {
        let mut seen = BTreeSet::new();
        self.rows
            .iter()
            .filter(|row| row.decision == Decision::Given && seen.insert(row.need))
            .map(|row| row.need)
            .collect()
    }

    fn reasons(&self, need: Need) -> impl Iterator<Item = &Row> {
        self.rows
            .iter()
            .filter(move |row| row.need == need && row.decision == Decision::Given)
    }

    /// The systemd unit.
    pub fn unit(&self) -> String {
        unit::whole(self)
    }

    /// A drop-in for the shipped unit that leaves only these rows.
    pub fn drop_in(&self) -> String {
        unit::drop_in(self)
    }

    /// The file from which a container image is made, with the command that runs it.
    pub fn container(&self) -> String {
        container::file(self)
    }

    /// The container's filter of system calls.
    pub fn seccomp(&self) -> String {
        container::seccomp(self)
    }
}

#[cfg(test)]
mod tests;
