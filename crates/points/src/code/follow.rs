//! Following the code of a function from its start, and from where it was seen at work.

use iced_x86::{Decoder, DecoderError, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};
use std::collections::BTreeSet;

/// One instruction, by its place in the function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) at: u32,
    length: u8,
    pub(super) flow: Flow,
    /// Target of a jump within the function.
    pub(super) to: Option<u32>,
    /// It says itself that jumps to addresses which only running tells may lead to it (`endbr64`).
    pub(super) lands: bool,
    /// Nothing leads to it but that the program was seen at work there or before it.
    pub(super) seen: bool,
    /// Whether it is offered: counting it is cheap, as far as anything is there.
    pub(super) cheap: bool,
}

impl Step {
    pub(super) fn next(&self) -> u32 {
        self.at.saturating_add(u32::from(self.length))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// Goes on.
    On,
    /// Jumps, or goes on.
    Branch,
    /// Jumps to a known place.
    Jump,
    /// Calls a function that is known to be one, or one that only running tells.
    Call,
    /// Calls a place that is not known to be a function.
    Step,
    /// Jumps to where only running tells: through a table, or out of the function.
    Somewhere,
    /// Returns, or ends.
    Away,
}

/// Follows the code of one function.
struct Follower<'a> {
    start: u64,
    code: &'a [u8],
    /// Whether a function begins at an address: a call of one comes back, as far as anybody knows; a call of another place may
    /// step over data.
    begins: &'a dyn Fn(u64) -> bool,
    /// Whether an instruction with these bytes is offered.
    cheap: &'a dyn Fn(&[u8]) -> bool,
    /// What stands behind a call is followed after all else, and left out where it is no code.
    calls_may_end: bool,
    /// What stands behind calls and was not followed yet.
    behind_calls: BTreeSet<u32>,
    /// Instructions that may still be followed.
    left: usize,
    /// For each byte: 0 not reached, 1 an instruction begins, 2 within one.
    reached: Vec<u8>,
    steps: Vec<Step>,
}

impl Follower<'_> {
    /// Everything that can be reached from a place at which an instruction begins. `None`: it contradicts what was reached before,
    /// or leads to bytes that are no instruction.
    fn follow(&mut self, from: u32) -> Option<()> {
        let mut ways = vec![from];
        while let Some(at) = ways.pop() {
            let Some(mark) = self.reached.get(at as usize) else {
                // Behind the end: the last call of a function may never come back.
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

    /// Follows what stands behind calls, of which nobody knows whether they come back. One that does not is the last instruction of its
    /// piece, and behind it are tables: what contradicts the rest is taken back.
    fn follow_behind_calls(&mut self) {
        // Some four times as many as there are: who is led on and on, and taken back each time, is kept busy on purpose.
        self.left = self.code.len();
        let mut places = std::mem::take(&mut self.behind_calls);
        // What the code that was seen goes on with before what that leads to.
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

    /// `None`: no instruction begins there. `Some(None)`: the bytes end before it does, where they may be cut anywhere.
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

/// The instructions of a function that its entry leads to, if that is known, and the places at which it was seen at work, ascending. `begins`: whether
/// a function begins at an address; `cheap`: whether an instruction is offered. Without an entry nobody knows either which calls come back. `None`: two ways contradict each other, or lead to bytes that are no instruction.
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
        // What lies in another function is not ours to follow.
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

/// How an instruction goes on, and the target of a jump or call that is written in it.
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
        // `syscall` and its like are calls to the decoder, but nothing returns from them through the stack.
        FlowControl::Call | FlowControl::IndirectCall if instruction.mnemonic() == Mnemonic::Call => {
            Flow::Call
        }
        _ if instruction.mnemonic() == Mnemonic::Hlt => Flow::Away,
        _ => Flow::On,
    };
    (flow, target)
}
