//! Changes by people and hardware.

use super::{Alive, PersonChange, World, WorldError};
use homeostat_model::CpuId;
use std::collections::BTreeSet;

impl World {
    pub(super) fn cpu_list(&self, cpus: &[u32]) -> Result<Vec<CpuId>, WorldError> {
        let all: BTreeSet<u32> = cpus.iter().copied().collect();
        match all.iter().find(|c| **c as usize >= self.online.len()) {
            Some(cpu) => Err(WorldError::NoSuchPlace(format!("CPU {cpu}"))),
            None if all.is_empty() => Err(WorldError::Values("an empty list of CPUs".into())),
            None => Ok(all.into_iter().map(CpuId).collect()),
        }
    }

    pub(super) fn check_nodes(&self, nodes: &[u32]) -> Result<(), WorldError> {
        match nodes.iter().find(|n| self.memory.node(**n as usize).is_none()) {
            Some(node) => Err(WorldError::NoSuchPlace(format!("node {node}"))),
            None if nodes.is_empty() => Err(WorldError::Values("an empty list of nodes".into())),
            None => Ok(()),
        }
    }

    pub(super) fn check_change(&self, change: &PersonChange) -> Result<(), WorldError> {
        if let Some(program) = change.program() {
            self.members(program)?;
        }
        match change {
            PersonChange::BindThreads { cpus: Some(cpus), .. }
            | PersonChange::Prefetch { cpus: Some(cpus), .. }
            | PersonChange::Cpus { cpus, .. } => self.cpu_list(cpus).map(|_| ()),
            PersonChange::BindMemory {
                nodes: Some(nodes), ..
            } => self.check_nodes(nodes),
            PersonChange::MovePages { node, .. } | PersonChange::Node { node, .. } => {
                self.check_nodes(&[*node])
            }
            PersonChange::Phase {
                program,
                profile: Some(name),
                ..
            } if self.profile_named(name).is_none() => Err(WorldError::NoSuchProfile {
                program: program.clone(),
                name: name.clone(),
            }),
            PersonChange::LargePageSwitch { enabled }
                if !["always", "madvise", "never"].contains(&enabled.as_str()) =>
            {
                Err(WorldError::Values(format!(
                    "large pages {enabled:?}: always, madvise or never"
                )))
            }
            _ => Ok(()),
        }
    }

    /// An event outside homeostat.
    ///
    /// # Errors
    /// Its target does not exist, or it is impossible.
    pub fn person(&mut self, change: PersonChange) -> Result<(), WorldError> {
        self.check_change(&change)?;
        match &change {
            PersonChange::LargePageSwitch { enabled } => {
                self.surroundings.large_page_switch.clone_from(enabled);
            }
            PersonChange::Prefetch { cpus, on } => {
                let cpus = match cpus {
                    Some(cpus) => self.cpu_list(cpus)?,
                    None => (0..self.online.len() as u32).map(CpuId).collect(),
                };
                self.set_prefetch(&cpus, *on);
            }
            PersonChange::Cpus { cpus, online } => self.set_online(cpus, *online)?,
            PersonChange::Node { node, online } => self.set_node_online(*node as usize, *online)?,
            PersonChange::OtherTuner { name, running: true } => drop(self.tuners.insert(name.clone())),
            PersonChange::OtherTuner { name, running: false } => drop(self.tuners.remove(name)),
            _ => {}
        }
        if let Some(program) = change.program() {
            for p in self.members(program)? {
                self.person_to(p, &change)?;
            }
        }
        Ok(())
    }

    fn person_to(&mut self, p: usize, change: &PersonChange) -> Result<(), WorldError> {
        match change {
            PersonChange::BindThreads { cpus, .. } => {
                let mask = cpus.as_ref().map(|c| self.cpu_list(c)).transpose()?;
                self.set_mask(p, mask, false, true);
            }
            PersonChange::BindMemory { nodes, .. } => {
                if let Some(nodes) = nodes {
                    self.move_share(p, nodes, 1.0);
                }
                if let Some(program) = self.programs.get_mut(p) {
                    program.nodes.clone_from(nodes);
                }
            }
            PersonChange::MovePages { node, share, .. } => {
                self.move_share(p, &[*node], share.clamp(0.0, 1.0))
            }
            PersonChange::LargePages { share, .. } => self.large_share_of(p, share.clamp(0.0, 1.0), true),
            PersonChange::Choose { never, .. } => {
                if let Some(program) = self.programs.get_mut(p) {
                    program.never = *never;
                }
            }
            PersonChange::Start { .. } if self.programs.get(p).is_some_and(|p| p.alive.is_none()) => {
                self.start(p)?;
            }
            PersonChange::Stop { .. } => self.end(p),
            PersonChange::Restart { .. } => {
                self.end(p);
                self.start(p)?;
            }
            PersonChange::Execute { .. } => self.execute(p)?,
            PersonChange::Fork { processes, .. } => self.fork(p, *processes)?,
            PersonChange::Phase { profile, load, .. } => self.change_phase(p, profile.as_deref(), *load),
            _ => {}
        }
        Ok(())
    }

    fn move_share(&mut self, p: usize, nodes: &[u32], share: f64) {
        self.settle();
        let memory = &mut self.memory;
        let Some(alive) = self.programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
            return;
        };
        for s in alive.private.iter_mut().chain(&mut alive.shared) {
            let remote: Vec<usize> = (0..s.pieces())
                .filter(|i| !nodes.contains(&(s.node_of(*i) as u32)))
                .collect();
            let count = (remote.len() as f64 * share).round() as usize;
            for (turn, piece) in remote.into_iter().take(count).enumerate() {
                for offset in 0..nodes.len() {
                    let to = nodes
                        .get((turn + offset) % nodes.len())
                        .map_or(0, |n| *n as usize);
                    // Without room it stays in place, as with `migratepages`.
                    if memory.move_piece(s, piece, to).is_ok() {
                        break;
                    }
                }
            }
        }
        self.rates.dirty = true;
    }

    fn large_share_of(&mut self, p: usize, share: f64, shared_too: bool) {
        self.settle();
        let memory = &mut self.memory;
        let Some(alive) = self.programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
            return;
        };
        let shared = alive.shared.iter_mut().filter(|_| shared_too);
        for s in alive.private.iter_mut().chain(shared) {
            let wanted = (s.pieces() as f64 * share).round() as usize;
            for piece in 0..s.pieces() {
                if piece < wanted {
                    // Without a free block it stays small, as with khugepaged.
                    let _refused = memory.convert(s, piece);
                } else {
                    memory.split(s, piece);
                }
            }
        }
        self.rates.dirty = true;
    }

    /// Puts all memory that can be split again on large pages: with several mappers, if the machine can split it.
    ///
    /// # Errors
    /// There is no such program.
    pub fn large_pages_undoable(&mut self, program: &str) -> Result<(), WorldError> {
        let split_shared = self.layout.split_shared;
        for p in self.members(program)? {
            let alone = self
                .programs
                .get(p)
                .and_then(|p| p.alive.as_ref())
                .is_none_or(|a| a.processes.len() <= 1);
            self.large_share_of(p, 1.0, split_shared || alone);
        }
        Ok(())
    }

    fn set_online(&mut self, cpus: &[u32], online: bool) -> Result<(), WorldError> {
        self.settle();
        let mut then = self.online.clone();
        for cpu in cpus {
            if let Some(o) = then.get_mut(*cpu as usize) {
                *o = online;
            }
        }
        if !then.iter().any(|o| *o) {
            return Err(WorldError::Impossible("the last CPU cannot go offline".into()));
        }
        self.online = then;
        self.begin_shift();
        self.rates.dirty = true;
        Ok(())
    }

    fn set_node_online(&mut self, node: usize, online: bool) -> Result<(), WorldError> {
        self.settle();
        if online {
            self.memory.set_online(node, true);
            return Ok(());
        }
        let others: Vec<u32> = (0..self.memory.nodes().len() as u32)
            .filter(|n| *n as usize != node && self.memory.node(*n as usize).is_some_and(|n| n.online))
            .collect();
        if others.is_empty() {
            return Err(WorldError::Impossible(
                "the last memory node cannot go offline".into(),
            ));
        }
        for p in 0..self.programs.len() {
            self.move_share(p, &others, 1.0);
        }
        let left = self
            .programs
            .iter()
            .filter_map(|p| p.alive.as_ref())
            .flat_map(Alive::segments)
            .any(|s| s.pages_on().get(node).is_some_and(|n| *n > 0));
        if left {
            return Err(WorldError::Impossible(format!(
                "the memory of node {node} does not fit elsewhere"
            )));
        }
        self.memory.set_online(node, false);
        Ok(())
    }

    pub(crate) fn set_prefetch(&mut self, cpus: &[CpuId], on: bool) {
        self.settle();
        for cpu in cpus {
            if let Some(p) = self.prefetch_on.get_mut(cpu.0 as usize) {
                *p = on;
            }
        }
        self.rates.dirty = true;
    }
}
