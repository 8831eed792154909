//! Events outside homeostat.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Something that a person, another tool, a program or the hardware does; never homeostat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PersonChange {
    /// Binds the threads of a program to CPUs, or frees them (`cpus` absent).
    BindThreads {
        /// Program or workload.
        program: String,
        /// CPUs; absent = all.
        #[serde(default)]
        cpus: Option<Vec<u32>>,
    },
    /// Binds the memory of a program to nodes and moves it there. `nodes` absent: frees it, and it stays.
    BindMemory {
        /// Program or workload.
        program: String,
        /// Nodes; absent = all.
        #[serde(default)]
        nodes: Option<Vec<u32>>,
    },
    /// Moves a share of the memory of a program to a node, hottest first, without binding it.
    MovePages {
        /// Program or workload.
        program: String,
        /// Node.
        node: u32,
        /// Share of what lies elsewhere, 0..1.
        share: f64,
    },
    /// Puts a share of the memory of a program on large pages (0 = splits all).
    LargePages {
        /// Program or workload.
        program: String,
        /// Share of its full pieces, 0..1.
        share: f64,
    },
    /// Sets the system-wide switch of large pages: `always`, `madvise` or `never`.
    LargePageSwitch {
        /// Value.
        enabled: String,
    },
    /// Switches the hardware prefetch of CPUs on or off.
    Prefetch {
        /// CPUs; absent = all.
        #[serde(default)]
        cpus: Option<Vec<u32>>,
        /// On or off.
        on: bool,
    },
    /// Chooses whether homeostat may touch a program.
    Choose {
        /// Program or workload.
        program: String,
        /// Leave it alone.
        never: bool,
    },
    /// Starts a program that is not running.
    Start {
        /// Program or workload.
        program: String,
    },
    /// Ends a program.
    Stop {
        /// Program or workload.
        program: String,
    },
    /// Ends a program and starts it again.
    Restart {
        /// Program or workload.
        program: String,
    },
    /// A program executes itself anew in the same processes: its memory is replaced, its threads' bindings stay.
    Execute {
        /// Program or workload.
        program: String,
    },
    /// A program forks.
    Fork {
        /// Program or workload.
        program: String,
        /// Processes that appear.
        processes: u32,
    },
    /// A program changes what it does.
    Phase {
        /// Program or workload.
        program: String,
        /// Name of the profile from now on; absent = as before.
        #[serde(default)]
        profile: Option<String>,
        /// Factor on the load from now on; absent = as before.
        #[serde(default)]
        load: Option<f64>,
    },
    /// CPUs go offline or come back.
    Cpus {
        /// CPUs.
        cpus: Vec<u32>,
        /// Online or offline.
        online: bool,
    },
    /// A memory node goes offline (its pages move elsewhere first) or comes back.
    Node {
        /// Node.
        node: u32,
        /// Online or offline.
        online: bool,
    },
    /// Another tuner runs or ends.
    OtherTuner {
        /// Its name.
        name: String,
        /// Whether it runs.
        running: bool,
    },
}

impl PersonChange {
    /// The program it is about.
    pub fn program(&self) -> Option<&str> {
        match self {
            Self::BindThreads { program, .. }
            | Self::BindMemory { program, .. }
            | Self::MovePages { program, .. }
            | Self::LargePages { program, .. }
            | Self::Choose { program, .. }
            | Self::Start { program }
            | Self::Stop { program }
            | Self::Restart { program }
            | Self::Execute { program }
            | Self::Fork { program, .. }
            | Self::Phase { program, .. } => Some(program),
            Self::LargePageSwitch { .. }
            | Self::Prefetch { .. }
            | Self::Cpus { .. }
            | Self::Node { .. }
            | Self::OtherTuner { .. } => None,
        }
    }
}

impl fmt::Display for PersonChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |n: &Option<Vec<u32>>| match n {
            Some(n) => n.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
            None => "all".to_owned(),
        };
        let state = |on: &bool| if *on { "on" } else { "off" };
        match self {
            Self::BindThreads { program, cpus } => {
                write!(f, "a person binds {program} to CPUs {}", list(cpus))
            }
            Self::BindMemory { program, nodes } => {
                write!(
                    f,
                    "a person binds the memory of {program} to nodes {}",
                    list(nodes)
                )
            }
            Self::MovePages { program, node, share } => {
                write!(
                    f,
                    "a person moves {:.0} % of the remote memory of {program} to node {node}",
                    share * 100.0
                )
            }
            Self::LargePages { program, share } => {
                write!(
                    f,
                    "a person puts {:.0} % of {program} on large pages",
                    share * 100.0
                )
            }
            Self::LargePageSwitch { enabled } => write!(f, "a person sets large pages to {enabled}"),
            Self::Prefetch { cpus, on } => write!(
                f,
                "a person switches prefetch {} on CPUs {}",
                state(on),
                list(cpus)
            ),
            Self::Choose { program, never } => {
                write!(
                    f,
                    "a person says {} for {program}",
                    if *never { "never" } else { "as you like" }
                )
            }
            Self::Start { program } => write!(f, "{program} starts"),
            Self::Stop { program } => write!(f, "{program} ends"),
            Self::Restart { program } => write!(f, "{program} restarts"),
            Self::Execute { program } => write!(f, "{program} executes itself anew"),
            Self::Fork { program, processes } => write!(f, "{program} forks {processes} processes"),
            Self::Phase {
                program,
                profile,
                load,
            } => {
                let profile = profile
                    .as_ref()
                    .map_or_else(String::new, |p| format!(", profile {p}"));
                let load = load.map_or_else(String::new, |l| format!(", load {l}"));
                write!(f, "{program} changes phase{profile}{load}")
            }
            Self::Cpus { cpus, online } => {
                write!(f, "CPUs {} go {}line", list(&Some(cpus.clone())), state(online))
            }
            Self::Node { node, online } => write!(f, "node {node} goes {}line", state(online)),
            Self::OtherTuner { name, running } => {
                write!(f, "{name} {}", if *running { "runs" } else { "ends" })
            }
        }
    }
}

/// A change at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedChange {
    /// Seconds since the start.
    pub at_s: f64,
    /// The event.
    pub change: PersonChange,
}
