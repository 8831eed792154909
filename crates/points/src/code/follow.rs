//! Follows the code of a function from its start, and from addresses at which execution was sampled.

use iced_x86::{Decoder, DecoderError, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};
use std::collections::BTreeSet;

/// One instruction, identified by its offset in the function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) at: u32,
    length: u8,
    pub(super) flow: Flow,
    /// Target of a jump within the function.
    pub(super) to: Option<u32>,
    /// Marked as a target of indirect jumps (`endbr64`).
    pub(super) lands: bool,
    /// Reached only from a sampled address, at or before this instruction.
    pub(super) seen: bool,
    /// The instruction is offered: a probe on it is cheap, as far as the bytes are present.
    pub(super) cheap: bool,
}

impl Step {
    pub(super) fn next(&self) -> u32 {
        self.at.saturating_add(u32::from(self.length))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    On,
    Branch,
    /// Jump to a fixed address.
    Jump,
    /// Call of a known function, or an indirect call.
    Call,
    /// Call of an address that is not known to be a function.
    Step,
    /// Indirect jump: through a table, or out of the function.
    Somewhere,
    Away,
}

struct Follower<'a> {
    start: u64,
    code: &'a [u8],
    /// Whether a function begins at an address. Its call is assumed to return. Other calls may step over data.
    begins: &'a dyn Fn(u64) -> bool,
    cheap: &'a dyn Fn(&[u8]) -> bool,
    /// Code behind a call is followed last, and dropped where it is not code.
    calls_may_end: bool,
    behind_calls: BTreeSet<u32>,
    /// Budget of instructions that may still be followed.
    left: usize,
    /// For each byte: 0 not reached, 1 start of an instruction, 2 inside an instruction.
    reached: Vec<u8>,
    steps: Vec<Step>,
}

impl Follower<'_> {
    /// Follows all code reachable from an address. `None`: a contradiction to reached code, or invalid bytes.
    fn follow(&mut self, from: u32) -> Option<()> {
        let mut ways = vec![from];
        while let Some(at) = ways.pop() {
            let Some(mark) = self.reached.get(at as usize) else {
                // Behind the end: the last call of a function may never return.
                continue;
            };
            match mark {
                1 => continue,
                2 => return None,
                _ => {}
            }
            self.left = self.left.checked_sub(1)?;
            let Some(step) = self.step(at)? else {
                let cut = self.reached.get(at as usize..)?;
                if cut.iter().any(|b| *b != 0) {
                    return None;
                }
                continue;
            };
            let bytes = self.reached.get_mut(at as usize..step.next() as usize)?;
            if bytes.iter().any(|b| *b != 0) {
                return None;
            }
            bytes.fill(2);
            *bytes.first_mut()? = 1;
            match step.flow {
                Flow::Jump | Flow::Step | Flow::Somewhere | Flow::Away => {}
                Flow::Call if self.calls_may_end => {
                    self.behind_calls.insert(step.next());
                }
                Flow::On | Flow::Branch | Flow::Call => ways.push(step.next()),
            }
            ways.extend(step.to);
            self.steps.push(step);
        }
        Some(())
    }

    /// Follows the code behind calls. After a call that does not return, tables may follow, so contradictions are taken
    /// back.
    fn follow_behind_calls(&mut self) {
        // About four times the number of instructions. Only a hostile program exceeds it by repeated contradictions.
        self.left = self.code.len();
        let mut places = std::mem::take(&mut self.behind_calls);
        // Code behind sampled code comes before the code that it leads to.
        let mut then = BTreeSet::new();
        while let Some(place) = places.pop_first() {
            let known = self.steps.len();
            let followed = self.follow(place);
            let further = std::mem::take(&mut self.behind_calls);
            if followed.is_some() {
                then.extend(further);
            }
            if places.is_empty() {
                places = std::mem::take(&mut then);
            }
            if followed.is_some() {
                continue;
            }
            for step in self.steps.drain(known..) {
                if let Some(bytes) = self.reached.get_mut(step.at as usize..step.next() as usize) {
                    bytes.fill(0);
                }
            }
        }
    }

    /// `None`: no instruction begins there. `Some(None)`: the buffer ends inside the instruction.
    fn step(&self, at: u32) -> Option<Option<Step>> {
        let bytes = self.code.get(at as usize..)?;
        let address = self.start.checked_add(u64::from(at))?;
        let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            let is_cut = self.calls_may_end && decoder.last_error() == DecoderError::NoMoreBytes;
            return is_cut.then_some(None);
        }
        let (flow, target) = flow(&instruction);
        let flow = match (flow, target) {
            (Flow::Call, Some(target)) if !(self.begins)(target) => Flow::Step,
            (flow, _) => flow,
        };
        let to = target
            .filter(|_| matches!(flow, Flow::Jump | Flow::Branch))
            .and_then(|t| u32::try_from(t.checked_sub(self.start)?).ok())
            .filter(|t| (*t as usize) < self.code.len());
        Some(Some(Step {
            at,
            length: u8::try_from(instruction.len()).ok()?,
            flow,
            to,
            lands: instruction.mnemonic() == Mnemonic::Endbr64,
            seen: false,
            cheap: (self.cheap)(bytes),
        }))
    }
}

/// The reachable instructions of a function, ascending, from its known entry and the sampled addresses. `begins`:
/// whether a function begins at an address. `cheap`: whether an instruction is offered. Without an entry it is unknown
/// which calls return. `None`: two paths contradict each other, or lead to invalid bytes.
pub(super) fn steps(
    start: u64,
    code: &[u8],
    begins: &dyn Fn(u64) -> bool,
    cheap: &dyn Fn(&[u8]) -> bool,
    entry: Option<u32>,
    seen: &[u64],
) -> Option<Vec<Step>> {
    let mut follower = Follower {
        start,
        code,
        begins,
        cheap,
        calls_may_end: entry.is_none(),
        behind_calls: BTreeSet::new(),
        left: usize::MAX,
        reached: vec![0; code.len()],
        steps: Vec::new(),
    };
    if let Some(entry) = entry {
        follower.follow(entry)?;
    }
    let from_start = follower.steps.len();
    for address in seen {
        // Code in another function is not followed.
        if let Some(place) = address.checked_sub(start).and_then(|at| u32::try_from(at).ok()) {
            follower.follow(place)?;
        }
    }
    follower.follow_behind_calls();
    let mut steps = follower.steps;
    for step in steps.iter_mut().skip(from_start) {
        step.seen = true;
    }
    steps.sort_unstable_by_key(|s| s.at);
    Some(steps)
}

fn flow(instruction: &Instruction) -> (Flow, Option<u64>) {
    let target = match instruction.op0_kind() {
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
            Some(instruction.near_branch_target())
        }
        _ => None,
    };
    let flow = match instruction.flow_control() {
        FlowControl::ConditionalBranch | FlowControl::XbeginXabortXend => Flow::Branch,
        FlowControl::UnconditionalBranch => Flow::Jump,
        FlowControl::IndirectBranch => Flow::Somewhere,
        FlowControl::Return | FlowControl::Exception | FlowControl::Interrupt => Flow::Away,
        // The decoder reports `syscall` and similar instructions as calls, but they use no return address on the stack.
        FlowControl::Call | FlowControl::IndirectCall if instruction.mnemonic() == Mnemonic::Call => {
            Flow::Call
        }
        _ if instruction.mnemonic() == Mnemonic::Hlt => Flow::Away,
        _ => Flow::On,
    };
    (flow, target)
}
