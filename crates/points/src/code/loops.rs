//! Finds the loops of a function and those that only wait.

use super::follow::Step;
use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register,
};
use std::collections::BTreeSet;

/// Longest loop, in instructions, that is checked for waiting.
const WAITING_MAX: usize = 48;

/// A loop: from its head to the last jump back to it (offsets in the function).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) head: u32,
    pub(super) back: u32,
    pub(super) waits: bool,
}

impl Turn {
    pub(super) fn has(&self, at: u32) -> bool {
        (self.head..=self.back).contains(&at)
    }
    pub(super) fn length(&self) -> u32 {
        self.back - self.head
    }
}

/// For each step: its innermost (shortest) loop and nesting depth. One pass, because a function may be all loops.
pub(super) fn innermost(steps: &[Step], loops: &[Turn]) -> Vec<(Option<u32>, u8)> {
    let range = |turn: &Turn| {
        let first = steps.partition_point(|s| s.at < turn.head);
        let behind = steps.partition_point(|s| s.at <= turn.back);
        (first, behind)
    };
    let mut inner: Vec<(Option<u32>, u8)> = vec![(None, 0); steps.len()];
    let mut changes: Vec<i64> = vec![0; steps.len() + 1];
    let mut order: Vec<usize> = (0..loops.len()).collect();
    order.sort_by_key(|i| loops.get(*i).map_or(0, Turn::length));
    // For each step: the next step that belongs to no loop yet.
    let mut free: Vec<usize> = (0..=steps.len()).collect();
    let find = |free: &mut Vec<usize>, mut i: usize| {
        while let Some(next) = free.get(i).copied().filter(|next| *next != i) {
            let after = free.get(next).copied().unwrap_or(next);
            if let Some(place) = free.get_mut(i) {
                *place = after;
            }
            i = next;
        }
        i
    };
    for number in order {
        let Some((first, behind)) = loops.get(number).map(range) else {
            continue;
        };
        for (at, change) in [(first, 1), (behind, -1)] {
            if let Some(sum) = changes.get_mut(at) {
                *sum += change;
            }
        }
        let mut i = find(&mut free, first);
        while i < behind {
            if let (Some(place), Some(next)) = (inner.get_mut(i), free.get_mut(i)) {
                place.0 = u32::try_from(number).ok();
                *next = i + 1;
            }
            i = find(&mut free, i + 1);
        }
    }
    let mut around = 0i64;
    for (place, change) in inner.iter_mut().zip(changes) {
        around += change;
        place.1 = u8::try_from(around.max(0)).unwrap_or(u8::MAX);
    }
    inner
}

/// The instructions of a loop, at most one more than [`WAITING_MAX`].
fn body(start: u64, code: &[u8], steps: &[Step], turn: &Turn) -> Vec<Instruction> {
    let first = steps.partition_point(|s| s.at < turn.head);
    steps
        .get(first..)
        .unwrap_or_default()
        .iter()
        .take_while(|s| s.at <= turn.back)
        .take(WAITING_MAX + 1)
        .filter_map(|s| {
            let bytes = code.get(s.at as usize..)?;
            let mut decoder = Decoder::with_ip(64, bytes, start + u64::from(s.at), DecoderOptions::NONE);
            Some(decoder.decode())
        })
        .collect()
}

pub(super) fn only_waits(start: u64, code: &[u8], steps: &[Step], turn: &Turn) -> bool {
    waits(&body(start, code, steps, turn))
}

/// Whether a loop only waits: it has a `pause`, or polls one place by loads, comparisons and attempts to take a lock.
fn waits(body: &[Instruction]) -> bool {
    if body.len() > WAITING_MAX || body.iter().any(|i| i.mnemonic() == Mnemonic::Call) {
        return false;
    }
    if body.iter().any(|i| i.mnemonic() == Mnemonic::Pause) {
        return true;
    }
    let mut factory = InstructionInfoFactory::new();
    let mut looks = false;
    let mut written: BTreeSet<u32> = BTreeSet::new();
    let mut addresses: BTreeSet<u32> = BTreeSet::new();
    for instruction in body {
        let info = factory.info(instruction);
        for memory in info.used_memory() {
            looks = true;
            addresses.extend(
                [memory.base(), memory.index()]
                    .iter()
                    .filter(|r| **r != Register::None)
                    .map(|r| r.full_register() as u32),
            );
        }
        for register in info.used_registers() {
            if !matches!(register.access(), OpAccess::Read | OpAccess::CondRead) {
                written.insert(register.register().full_register() as u32);
            }
        }
        let harmless = match instruction.mnemonic() {
            // A load waits, while a store of a value is work.
            Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Movsx | Mnemonic::Movsxd => {
                instruction.op0_kind() == OpKind::Register
            }
            Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Nop | Mnemonic::Bt => true,
            Mnemonic::Xor => {
                instruction.op0_kind() == OpKind::Register
                    && instruction.op1_kind() == OpKind::Register
                    && instruction.op0_register() == instruction.op1_register()
            }
            // The two instructions that try to take a lock.
            Mnemonic::Xchg | Mnemonic::Cmpxchg => true,
            // The jump back. The target of an indirect jump is unknown.
            Mnemonic::Jmp => instruction.op0_kind() == OpKind::NearBranch64,
            _ => instruction.condition_code() != ConditionCode::None,
        };
        if !harmless {
            return false;
        }
    }
    // A loop that sets its own address registers follows a chain of pointers, which is work.
    looks && addresses.is_disjoint(&written)
}
