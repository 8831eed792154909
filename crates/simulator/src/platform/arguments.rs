//! Targets and arguments of actions, and the format of lists in undo records.

use super::nanoseconds;
use crate::world::World;
use homeostat_model::action::Target;
use homeostat_model::{Action, Bytes, CpuId, Nanoseconds};
use homeostat_platform::PlatformError;
use std::collections::BTreeSet;

const PAUSE_MAX_S: f64 = 10.0;

// ---- effectors -----------------------------------------------------------------------------------------------------

pub(super) fn rejected(what: &str, value: String, why: &str) -> PlatformError {
    PlatformError::Rejected {
        what: what.to_owned(),
        value,
        errno: why.to_owned(),
    }
}

/// The pace of an action in slices: `slice_ms` (1 to 100, default 20), `duty` (share of working time, 0.01 to 1,
/// default 0.5), `bytes_per_second` (bound), `free_memory_min` (bytes; default 2 % of the node). `several_mappers` =
/// `refuse` (default) skips segments that several processes map. As on Linux, their large pages cannot be split while
/// the processes run, unless the layout allows it.
pub(super) struct Pacing {
    pub(super) slice_s: f64,
    duty: f64,
    bytes_per_second: Option<f64>,
    pub(super) keep_free: Option<Bytes>,
    pub(super) several_mappers: bool,
}

impl Pacing {
    /// Reads the arguments, except the effector's `own`.
    pub(super) fn parse(action: &Action, own: &[&str]) -> Result<Self, PlatformError> {
        let mut pacing = Self {
            slice_s: 0.020,
            duty: 0.5,
            bytes_per_second: None,
            keep_free: None,
            several_mappers: false,
        };
        let arguments = action.arguments.iter();
        for (name, value) in arguments.filter(|(name, _)| !own.contains(&name.as_str())) {
            let wrong = |why: &str| rejected(&argument(action, name), value.clone(), why);
            let number = value.parse::<f64>().ok().filter(|n| n.is_finite());
            let within = |low: f64, high: f64| number.filter(|n| (low..=high).contains(n));
            match name.as_str() {
                "slice_ms" => {
                    pacing.slice_s =
                        within(1.0, 100.0).ok_or_else(|| wrong("expected 1 to 100 milliseconds"))? / 1e3
                }
                "duty" => {
                    pacing.duty = within(0.01, 1.0).ok_or_else(|| wrong("expected a share from 0.01 to 1"))?
                }
                "bytes_per_second" => {
                    pacing.bytes_per_second = Some(
                        within(65_536.0, 1e15)
                            .ok_or_else(|| wrong("expected a number of bytes, at least 65536"))?,
                    );
                }
                "free_memory_min" => {
                    pacing.keep_free = Some(Bytes(
                        within(0.0, 1e18).ok_or_else(|| wrong("expected a number of bytes"))? as u64,
                    ));
                }
                "several_mappers" if ["allow", "refuse"].contains(&value.as_str()) => {
                    pacing.several_mappers = value == "allow";
                }
                _ => {
                    return Err(wrong(
                        "expected slice_ms, duty, bytes_per_second, free_memory_min or several_mappers",
                    ));
                }
            }
        }
        Ok(pacing)
    }

    pub(super) fn pause(&self, worked_s: f64, bytes: u64) -> Nanoseconds {
        let for_duty = worked_s * (1.0 - self.duty) / self.duty;
        let for_rate = self
            .bytes_per_second
            .map_or(0.0, |rate| (bytes as f64 / rate - worked_s).max(0.0));
        nanoseconds(for_duty.max(for_rate).min(PAUSE_MAX_S))
    }

    /// Bytes of one slice that keep the rate with the longest pause.
    pub(super) fn bytes_per_slice(&self) -> u64 {
        self.bytes_per_second
            .map_or(u64::MAX, |rate| (rate * PAUSE_MAX_S / 2.0) as u64)
    }
}

pub(super) fn cpus_text(cpus: &[CpuId]) -> String {
    let mut out: Vec<String> = Vec::new();
    for run in cpus.chunk_by(|a, b| a.0 + 1 == b.0) {
        if let (Some(first), Some(last)) = (run.first(), run.last()) {
            out.push(if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            });
        }
    }
    out.join(",")
}

pub(super) fn numbers(text: &str) -> Option<Vec<u32>> {
    let mut out = Vec::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last - first > 1 << 20 {
            return None;
        }
        out.extend(first..=last);
    }
    Some(out)
}

/// `0-3,8`, or `all`; with ` by board` for threads kept on their boards in groups.
pub(super) fn mask_text(mask: Option<&[CpuId]>, grouped: bool) -> String {
    let cpus = mask.map_or_else(|| "all".to_owned(), cpus_text);
    if grouped { cpus + BY_BOARD } else { cpus }
}

const BY_BOARD: &str = " by board";

pub(super) fn mask_from(text: &str) -> Option<(Option<Vec<CpuId>>, bool)> {
    let (cpus, grouped) = match text.strip_suffix(BY_BOARD) {
        Some(cpus) => (cpus, true),
        None => (text, false),
    };
    if cpus == "all" {
        return Some((None, grouped));
    }
    numbers(cpus).map(|n| (Some(n.into_iter().map(CpuId).collect()), grouped))
}

pub(super) fn argument(action: &Action, name: &str) -> String {
    format!("argument {name} of {}", action.effector)
}

/// Further options of a thread placement. With `memory` it works in slices and takes their arguments, else at once.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// `group_by` = `board`: each thread stays on its board, with those that it shares data with.
    pub(super) grouped: bool,
    /// `split_by` = `process`: each process stays on one of the CPUs' chips, where most of its private memory is, as
    /// many on each as it has cores. Memory that goes along (`private` only) goes to that chip's node.
    pub(super) split: bool,
    pub(super) memory: Option<Along>,
}

/// Memory that goes along with threads to the nodes of their CPUs: `memory` = `all` or `private`, and at most
/// `memory_bytes` of what lies elsewhere.
#[derive(Debug)]
pub(super) struct Along {
    pub(super) bytes: Bytes,
    pub(super) shared: bool,
    pub(super) large: bool,
}

/// Arguments of `thread_placement` other than the pace.
pub(super) const BESIDE: [&str; 5] = ["group_by", "split_by", "memory", "memory_bytes", LARGE];

impl Beside {
    pub(super) fn parse(action: &Action) -> Result<Self, PlatformError> {
        let of = |name: &str| action.arguments.get(name);
        let wrong = |name: &str, why: &str| {
            let value = of(name).cloned().unwrap_or_default();
            rejected(&argument(action, name), value, why)
        };
        if action.effector.as_str() != "thread_placement" {
            if let Some(name) = action.arguments.keys().next() {
                return Err(wrong(name, "it takes none"));
            }
        }
        let grouped = match of("group_by").map(String::as_str) {
            None => false,
            Some("board") => true,
            Some(_) => return Err(wrong("group_by", "only group_by = board is known")),
        };
        let split = match of("split_by").map(String::as_str) {
            None => false,
            Some("process") if !grouped => true,
            Some(_) => {
                return Err(wrong(
                    "split_by",
                    "only split_by = process is known, and not with group_by",
                ));
            }
        };
        let Some(memory) = of("memory") else {
            let own = ["group_by", "split_by"];
            if let Some(name) = action.arguments.keys().find(|name| !own.contains(&name.as_str())) {
                return Err(wrong(name, "only with memory = all or private"));
            }
            return Ok(Self {
                grouped,
                split,
                memory: None,
            });
        };
        let shared = match memory.as_str() {
            "all" if split => return Err(wrong("memory", "a process takes its private memory along only")),
            "all" => true,
            "private" => false,
            _ => return Err(wrong("memory", "expected all or private")),
        };
        let bytes = of("memory_bytes")
            .and_then(|b| b.parse().ok())
            .map(Bytes)
            .ok_or_else(|| wrong("memory_bytes", "expected a number of bytes"))?;
        let large = moves_large(action)?;
        Pacing::parse(action, &BESIDE)?;
        Ok(Self {
            grouped,
            split,
            memory: Some(Along { bytes, shared, large }),
        })
    }
}

pub(super) fn target_cpus(world: &World, action: &Action) -> Result<Vec<CpuId>, PlatformError> {
    let what = format!("target of {}", action.effector);
    let Target::Cpus(cpus) = &action.target else {
        return Err(rejected(&what, "no CPUs".into(), "CPUs expected"));
    };
    let set: BTreeSet<CpuId> = cpus.iter().copied().collect();
    if set.is_empty() || !set.iter().any(|c| world.is_online(*c)) {
        return Err(rejected(&what, cpus_text(cpus), "none of these CPUs is online"));
    }
    let count = world.layout().cpus();
    if let Some(cpu) = set.iter().find(|c| c.0 >= count) {
        return Err(rejected(&what, cpu.to_string(), "the machine has no such CPU"));
    }
    Beside::parse(action)?;
    Ok(set.into_iter().collect())
}

/// Argument of page moves: `move` takes large pages along, otherwise they stay.
pub(super) const LARGE: &str = "large_pages";

pub(super) fn moves_large(action: &Action) -> Result<bool, PlatformError> {
    match action.arguments.get(LARGE).map(String::as_str) {
        None => Ok(false),
        Some("move") => Ok(true),
        Some(other) => Err(rejected(
            &argument(action, LARGE),
            other.to_owned(),
            "only large_pages = move is known",
        )),
    }
}
