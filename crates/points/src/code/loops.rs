//! The loops of a function, and which of them only wait.

use super::follow::Step;
use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register,
};
use std::collections::BTreeSet;

/// A loop is looked at for waiting up to this many instructions.
const WAITING_MAX: usize = 48;

/// A loop: from its head to the last jump back to it (places in the function).
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

/// For each step the innermost (shortest) loop around it and the number of loops. In one pass over the steps for all loops
/// together: a function may be made of nothing but loops.
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
    // The next step, from each on, that belongs to no loop yet.
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

/// The instructions of a loop, one more than it may have to be looked at for waiting.
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

/// Whether a loop only waits.
pub(super) fn only_waits(start: u64, code: &[u8], steps: &[Step], turn: &Turn) -> bool {
    waits(&body(start, code, steps, turn))
}

/// Whether a loop only waits: it says so (`pause`), or all it does is look at the same place until something changes
/// there (loads from addresses that it does not compute, comparisons, attempts to take a lock).
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
            // A load; a store of a value would be work.
            Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Movsx | Mnemonic::Movsxd => {
                instruction.op0_kind() == OpKind::Register
            }
            Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Nop | Mnemonic::Bt => true,
            Mnemonic::Xor => {
                instruction.op0_kind() == OpKind::Register
                    && instruction.op1_kind() == OpKind::Register
                    && instruction.op0_register() == instruction.op1_register()
            }
            // The two ways to try to take a lock.
            Mnemonic::Xchg | Mnemonic::Cmpxchg => true,
            // The way back; what is done behind a jump through a table is not known.
            Mnemonic::Jmp => instruction.op0_kind() == OpKind::NearBranch64,
            _ => instruction.condition_code() != ConditionCode::None,
        };
        if !harmless {
            return false;
        }
    }
    // A chain of pointers is followed through registers that the loop itself sets: that is work.
    looks && addresses.is_disjoint(&written)
}
