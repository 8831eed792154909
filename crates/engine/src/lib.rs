//! The mind: recognises what could be improved, tries it as an experiment, judges, keeps or undoes, remembers,
//! explains.
//!
//! [`Engine::step`] takes what happened and returns what to do. It does no I/O, reads no clock and draws no
//! randomness of its own: time comes with each event, coins come from a generator seeded by the policy, so the same
//! events give the same commands, byte for byte. It cannot fail: what goes wrong in the world is an [`Event`].
//!
//! The engine receives a list of strategies and does not know which exist.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod controller;
pub mod policy;
mod protocol;
pub mod retrace;
pub mod strategy;
pub mod view;

pub use controller::{Controller, HostSeen, Wanted};
pub use homeostat_model::ProvenReader;
pub use policy::{Mode, Policy, Profile, WorkloadRule};
pub use protocol::{
    Attempt, Command, DecisionRecord, Event, Fault, FaultKind, Memory, OperatorRequest, Prior, SamplingPlan,
    Story,
};
pub use strategy::{
    Declined, Held, Load, Neighbour, Opinion, Proposal, RefusedPlace, Seen, Setting, Strategy,
};
pub use view::{Stage, Status};

mod blocks;
mod canary;
mod coins;
mod control;
mod engine;
mod experiment;
mod growth;
mod guard;
mod harm;
mod hindered;
mod losses;
mod meaning;
mod meters;
mod off_level;
mod owners;
mod panel;
mod places;
mod reach;
mod recall;
mod recovery;
mod relief;
mod rollout;
mod series;
mod spans;
mod trials;
mod views;
mod watch;
mod watched;

pub use engine::{Engine, UNDONE_BY_A_PERSON};
pub use meters::{JudgedMeter, MeterInterval, judge_meters, readings_wanted};
