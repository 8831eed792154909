//! Which instructions of a function can be counted cheaply, and what a count of them would mean.
//!
//! A probe makes the processor trap. Where the kernel can act out the instruction itself (`push` of a register,
//! one-byte `nop`, jumps and calls to fixed addresses) a hit costs 0.6 to 0.8 µs; else it has to be stepped through at
//! 7 to 10 µs. So only the former are offered: nearly every part of a program has one that runs exactly as often.
//!
//! A probe in the middle of an instruction would make the program another one. So code is followed, never read through:
//! from the start of a function, which somebody else has to know for certain, along everything that goes on or jumps to a
//! known place within the function's own range. What is not reached so may be data and is left alone. Where two ways
//! through the code disagree about where instructions begin, something that was believed is wrong, and nothing of the
//! function is offered.

use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};
use std::collections::BTreeSet;

/// Longest function that is taken apart, in bytes: interpreters have one of some hundred KiB.
pub const FUNCTION_MAX: usize = 512 * 1024;
/// Most instructions that are offered for one loop, besides its jump back.
const OF_LOOP_MAX: usize = 6;
/// … and how far from the place they are looked for, in instructions to either side.
const OF_LOOP_FAR: usize = 2048;
/// A loop is looked at for waiting up to this many instructions.
const WAITING_MAX: usize = 48;
/// Most loops around one place that are offered.
const LOOPS_AROUND_MAX: usize = 8;
/// Most loops of a function: one with more is made to keep us busy.
const LOOPS_MAX: usize = 4096;

/// What executions of an instruction would count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Entries of a function.
    Entry,
    /// Calls from one place.
    Call,
    /// Turns of a loop.
    Loop,
    /// Passages of a branch.
    Branch,
}

/// An instruction that may be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Its address, in the numbering that the function was given in.
    pub address: u64,
    /// What it would count.
    pub kind: Kind,
    /// How many loops of the function are around it.
    pub nesting: u8,
    /// It stands in a loop that seems to wait for something instead of working.
    pub waits: bool,
    /// That an instruction begins there follows from the file alone, not from where a process was seen.
    pub certain: bool,
}

/// What is known of a function beside its bytes.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Whether a function begins at an address: a call of one comes back, as far as anybody knows; a call of another
    /// place may step over data.
    pub begins: &'a dyn Fn(u64) -> bool,
    /// Addresses within the function at which an instruction was seen to begin while it ran (behind a jump through a table
    /// nothing else tells).
    pub seen: &'a [u64],
    /// Whether calls are offered: the kernel acts out a call without writing the shadow stack, so a process that has one
    /// would be ended by the return.
    pub calls: bool,
}

/// One instruction, by its place in the function.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: u32,
    length: u8,
    flow: Flow,
    /// Target of a jump within the function.
    to: Option<u32>,
    /// Whether the kernel acts it out.
    cheap: bool,
    certain: bool,
}

impl Step {
    fn next(&self) -> u32 {
        self.at.saturating_add(u32::from(self.length))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
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
    /// Goes to where only running tells, returns, or ends.
    Away,
}

/// A loop: from its head to the last jump back to it (places in the function).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    head: u32,
    back: u32,
    waits: bool,
}

impl Turn {
    fn has(&self, at: u32) -> bool {
        (self.head..=self.back).contains(&at)
    }
    fn length(&self) -> u32 {
        self.back - self.head
    }
}

/// A function, taken apart.
#[derive(Clone, Debug)]
pub struct Function {
    start: u64,
    steps: Vec<Step>,
    /// Where a sequence of instructions that run equally often begins.
    leaders: BTreeSet<u32>,
    loops: Vec<Turn>,
    /// For each step, the innermost loop around it (an index) and how many there are.
    inner: Vec<(Option<u32>, u8)>,
}

/// Follows the code of one function.
struct Follower<'a> {
    start: u64,
    code: &'a [u8],
    known: &'a Surroundings<'a>,
    /// For each byte: 0 not reached, 1 an instruction begins, 2 within one.
    reached: Vec<u8>,
    steps: Vec<Step>,
}

impl Follower<'_> {
    /// Everything that can be reached from a place. `None`: it contradicts what was reached before, or leads to bytes that
    /// are no instruction.
    fn follow(&mut self, from: u32, certain: bool) -> Option<()> {
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
            let step = self.step(at, certain)?;
            let bytes = self.reached.get_mut(at as usize..step.next() as usize)?;
            if bytes.iter().any(|b| *b != 0) {
                return None;
            }
            bytes.fill(2);
            *bytes.first_mut()? = 1;
            if !matches!(step.flow, Flow::Jump | Flow::Step | Flow::Away) {
                ways.push(step.next());
            }
            ways.extend(step.to);
            self.steps.push(step);
        }
        Some(())
    }

    fn step(&self, at: u32, certain: bool) -> Option<Step> {
        let bytes = self.code.get(at as usize..)?;
        let address = self.start.checked_add(u64::from(at))?;
        let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return None;
        }
        let (flow, target) = flow(&instruction);
        let flow = match (flow, target) {
            (Flow::Call, Some(target)) if !(self.known.begins)(target) => Flow::Step,
            (flow, _) => flow,
        };
        let to = target
            .filter(|_| matches!(flow, Flow::Jump | Flow::Branch))
            .and_then(|t| u32::try_from(t.checked_sub(self.start)?).ok())
            .filter(|t| (*t as usize) < self.code.len());
        Some(Step {
            at,
            length: u8::try_from(instruction.len()).ok()?,
            flow,
            to,
            cheap: is_emulated(bytes) && (self.known.calls || bytes.first() != Some(&0xe8)),
            certain,
        })
    }
}

impl Function {
    /// Takes the code of a function of x86-64 apart. `start` is the address of its first byte, `code` the whole of its
    /// range. `None` when it contradicts itself, is empty or too long, or has too many loops.
    pub fn decode(start: u64, code: &[u8], known: &Surroundings<'_>) -> Option<Self> {
        if code.is_empty() || code.len() > FUNCTION_MAX {
            return None;
        }
        let mut follower = Follower {
            start,
            code,
            known,
            reached: vec![0; code.len()],
            steps: Vec::new(),
        };
        follower.follow(0, true)?;
        for seen in known.seen {
            let at = u32::try_from(seen.checked_sub(start)?).ok()?;
            follower.follow(at, false)?;
        }
        let mut steps = follower.steps;
        steps.sort_unstable_by_key(|s| s.at);
        let mut leaders = BTreeSet::from([0]);
        let mut backs: Vec<(u32, u32)> = Vec::new();
        for step in &steps {
            if !matches!(step.flow, Flow::On | Flow::Call) {
                leaders.insert(step.next());
            }
            if let Some(to) = step.to {
                leaders.insert(to);
                if to <= step.at {
                    backs.push((to, step.at));
                }
            }
        }
        leaders.extend(
            known
                .seen
                .iter()
                .filter_map(|s| u32::try_from(s.checked_sub(start)?).ok()),
        );
        // Several jumps back to one head are one loop.
        backs.sort_unstable();
        let mut loops: Vec<Turn> = Vec::new();
        for (head, back) in backs {
            match loops.last_mut() {
                Some(last) if last.head == head => last.back = back,
                _ => loops.push(Turn {
                    head,
                    back,
                    waits: false,
                }),
            }
        }
        if loops.len() > LOOPS_MAX {
            return None;
        }
        for turn in &mut loops {
            turn.waits = waits(&body(start, code, &steps, turn));
        }
        let inner = innermost(&steps, &loops);
        Some(Self {
            start,
            steps,
            leaders,
            loops,
            inner,
        })
    }

    /// How many instructions were reached.
    pub fn instructions(&self) -> usize {
        self.steps.len()
    }

    /// The place of an address in the function.
    fn place(&self, address: u64) -> Option<u32> {
        u32::try_from(address.checked_sub(self.start)?).ok()
    }

    fn index(&self, at: u32) -> Option<usize> {
        self.steps.binary_search_by_key(&at, |s| s.at).ok()
    }

    /// Whether an instruction is known to begin at this address.
    pub fn is_boundary(&self, address: u64) -> bool {
        self.place(address).and_then(|at| self.index(at)).is_some()
    }

    /// Whether the instruction before this address is a call, so that the address can be where one returns to.
    pub fn returns_to(&self, address: u64) -> bool {
        let Some(at) = self.place(address) else {
            return false;
        };
        // The call may be the last instruction of the function (it never comes back).
        let before = self.steps.partition_point(|s| s.at < at);
        before
            .checked_sub(1)
            .and_then(|i| self.steps.get(i))
            .is_some_and(|s| s.next() == at && matches!(s.flow, Flow::Call | Flow::Step))
    }

    /// Whether the address lies in a loop that seems to wait for something instead of working.
    pub fn waits_at(&self, address: u64) -> bool {
        self.place(address)
            .and_then(|at| self.index(at))
            .is_some_and(|i| self.loop_of(i).is_some_and(|turn| turn.waits))
    }

    /// The innermost loop around a step.
    fn loop_of(&self, step: usize) -> Option<&Turn> {
        self.loops.get(self.inner.get(step)?.0? as usize)
    }

    fn candidate(&self, step: usize, kind: Kind) -> Option<Candidate> {
        let this = self.steps.get(step).filter(|s| s.cheap)?;
        Some(Candidate {
            address: self.start + u64::from(this.at),
            kind,
            nesting: self.inner.get(step)?.1,
            waits: self.loop_of(step).is_some_and(|turn| turn.waits),
            certain: this.certain,
        })
    }

    /// The first cheap instruction of the sequence of instructions around a place that run equally often.
    fn cheap_beside(&self, at: u32) -> Option<usize> {
        let leader = *self.leaders.range(..=at).next_back()?;
        let first = self.index(leader)?;
        let mut expected = leader;
        for (i, step) in self.steps.iter().enumerate().skip(first) {
            if step.at != expected || (i > first && self.leaders.contains(&step.at)) {
                return None;
            }
            if step.cheap {
                return Some(i);
            }
            expected = step.next();
        }
        None
    }

    /// A cheap instruction that runs once for each entry of the function.
    pub fn entry(&self) -> Option<Candidate> {
        self.candidate(self.cheap_beside(0)?, Kind::Entry)
    }

    /// What may be counted around an address at which the function was seen at work. `returns`: the address is where
    /// a call returns to.
    pub fn around(&self, address: u64, returns: bool) -> Vec<Candidate> {
        let mut found = Vec::new();
        // The call itself stands before the address that it returns to, perhaps in another sequence.
        let place = self
            .place(address)
            .and_then(|at| at.checked_sub(u32::from(returns)));
        let Some((index, step)) = place.and_then(|place| {
            let index = self.steps.partition_point(|s| s.at <= place).checked_sub(1)?;
            let step = *self.steps.get(index).filter(|s| place < s.next())?;
            Some((index, step))
        }) else {
            return found;
        };
        let kind = if returns { Kind::Call } else { Kind::Branch };
        let here = if returns && step.cheap {
            Some(index)
        } else {
            self.cheap_beside(step.at)
        };
        found.extend(here.and_then(|i| self.candidate(i, kind)));
        found.extend(self.entry());
        let mut around: Vec<(usize, &Turn)> = self
            .loops
            .iter()
            .enumerate()
            .filter(|(_, t)| t.has(step.at))
            .collect();
        around.sort_unstable_by_key(|(_, t)| t.length());
        for (number, turn) in around.into_iter().take(LOOPS_AROUND_MAX) {
            let ends = [self.index(turn.back), self.cheap_beside(turn.head)];
            found.extend(
                ends.into_iter()
                    .flatten()
                    .filter_map(|i| self.candidate(i, Kind::Loop)),
            );
            found.extend(self.of_loop(number, turn, index));
        }
        found.sort_unstable();
        found.dedup_by_key(|c| c.address);
        found
    }

    /// Branches and calls of a loop itself, not of one inside it: those nearest to a step.
    fn of_loop(&self, number: usize, turn: &Turn, step: usize) -> Vec<Candidate> {
        let first = step.saturating_sub(OF_LOOP_FAR);
        let near = self
            .steps
            .get(first..self.steps.len().min(step + OF_LOOP_FAR))
            .unwrap_or_default();
        let mut own: Vec<usize> = (first..)
            .zip(near)
            .filter(|(_, s)| s.cheap && s.flow != Flow::On && turn.has(s.at) && s.at < turn.back)
            .filter(|(i, _)| self.inner.get(*i).and_then(|l| l.0) == u32::try_from(number).ok())
            .map(|(i, _)| i)
            .collect();
        own.sort_by_key(|i| i.abs_diff(step));
        own.into_iter()
            .take(OF_LOOP_MAX)
            .filter_map(|i| {
                let call = matches!(self.steps.get(i)?.flow, Flow::Call | Flow::Step);
                self.candidate(i, if call { Kind::Call } else { Kind::Branch })
            })
            .collect()
    }
}

/// For each step the innermost (shortest) loop around it and the number of loops. In one pass over the steps for all loops
/// together: a function may be made of nothing but loops.
fn innermost(steps: &[Step], loops: &[Turn]) -> Vec<(Option<u32>, u8)> {
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
        FlowControl::IndirectBranch
        | FlowControl::Return
        | FlowControl::Exception
        | FlowControl::Interrupt => Flow::Away,
        // `syscall` and its like are calls to the decoder, but nothing returns from them through the stack.
        FlowControl::Call | FlowControl::IndirectCall if instruction.mnemonic() == Mnemonic::Call => {
            Flow::Call
        }
        _ if instruction.mnemonic() == Mnemonic::Hlt => Flow::Away,
        _ => Flow::On,
    };
    (flow, target)
}

/// Whether Linux acts the instruction out under a uprobe on x86-64 (arch/x86/kernel/uprobes.c:
/// `branch_setup_xol_ops` and `push_setup_xol_ops`): push of a register, one-byte nop, jmp and jcc, call of a fixed
/// address.
pub fn is_emulated(code: &[u8]) -> bool {
    matches!(
        code,
        [0x50..=0x57, ..]
            | [0x41, 0x50..=0x57, ..]
            | [0x90, ..]
            | [0xe8 | 0xe9 | 0xeb, ..]
            | [0x70..=0x7f, ..]
            | [0x0f, 0x80..=0x8f, ..]
    )
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
            // The two ways to try to take a lock, and the way back.
            Mnemonic::Xchg | Mnemonic::Cmpxchg | Mnemonic::Jmp => true,
            _ => instruction.condition_code() != ConditionCode::None,
        };
        if !harmless {
            return false;
        }
    }
    // A chain of pointers is followed through registers that the loop itself sets: that is work.
    looks && addresses.is_disjoint(&written)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// push rbx; loop: { call +0; inner: { dec ecx; jne inner }; dec ebx; jne loop }; pop rbx; ret
    const NESTED: &[u8] = &[
        0x53, // 0 push rbx
        0xe8, 0, 0, 0, 0, // 1 call 6
        0xff, 0xc9, // 6 dec ecx
        0x75, 0xfc, // 8 jne 6
        0xff, 0xcb, // 10 dec ebx
        0x75, 0xf3, // 12 jne 1
        0x5b, // 14 pop rbx
        0xc3, // 15 ret
    ];

    /// All that is called is a function, and nothing was seen.
    const PLAIN: Surroundings<'static> = Surroundings {
        begins: &|_| true,
        seen: &[],
        calls: true,
    };

    fn plain(start: u64, code: &[u8]) -> Option<Function> {
        Function::decode(start, code, &PLAIN)
    }

    fn nested() -> Function {
        plain(0x1000, NESTED).unwrap()
    }

    #[test]
    fn loops_and_their_nesting_are_found() {
        let f = nested();
        let loops: Vec<(u32, u32)> = f.loops.iter().map(|t| (t.head, t.back)).collect();
        assert_eq!(loops, [(1, 12), (6, 8)]);
        let around: Vec<(u32, u8)> = f
            .steps
            .iter()
            .zip(&f.inner)
            .map(|(s, (_, n))| (s.at, *n))
            .collect();
        assert_eq!(
            around,
            [(0, 0), (1, 1), (6, 2), (8, 2), (10, 1), (12, 1), (14, 0), (15, 0)]
        );
        assert!(f.returns_to(0x1006) && !f.returns_to(0x1008));
        assert!(f.is_boundary(0x1006) && !f.is_boundary(0x1007));
    }

    #[test]
    fn data_between_instructions_is_left_alone() {
        // jmp over four bytes that look like push; ret
        let jumped = plain(0, &[0xeb, 0x04, 0x55, 0x55, 0x55, 0x55, 0xc3]).unwrap();
        assert!(jumped.is_boundary(6) && !(2..6).any(|at| jumped.is_boundary(at)));
        // ret, and data behind it up to the end of the range
        let behind = plain(0, &[0x55, 0xc3, 0x55, 0x55]).unwrap();
        assert!(behind.is_boundary(1) && !behind.is_boundary(2) && !behind.is_boundary(3));
        // call over a text; pop rdi: no function begins behind the text
        let code = [0xe8, 0x04, 0, 0, 0, 0x55, 0x55, 0x55, 0x55, 0x5f, 0xc3];
        let known = Surroundings {
            begins: &|_| false,
            ..PLAIN
        };
        let over = Function::decode(0, &code, &known).unwrap();
        assert!(!over.is_boundary(5) && over.returns_to(5));
        // What nothing tells is not looked at, even where it is code: behind a jump through a table.
        assert!(!plain(0, &[0xff, 0xe0, 0x55, 0xc3]).unwrap().is_boundary(2));
    }

    #[test]
    fn where_it_was_seen_at_work_code_is_followed_too() {
        // jmp rax; push rbp; jmp to the push
        let code = [0xff, 0xe0, 0x55, 0xeb, 0xfd];
        let seen = [0x1002];
        let known = Surroundings { seen: &seen, ..PLAIN };
        let f = Function::decode(0x1000, &code, &known).unwrap();
        let found = f.around(0x1002, false);
        assert!(found.iter().any(|c| c.address == 0x1002 && c.kind == Kind::Loop));
        assert!(found.iter().all(|c| !c.certain));
        // What the file alone tells is certain.
        let certain = nested().around(0x1006, false);
        assert!(certain.len() > 3 && certain.iter().all(|c| c.certain));
    }

    #[test]
    fn a_contradiction_ends_the_belief_in_a_function() {
        // je into the middle of the mov behind it
        let inside = [0x74, 0x01, 0xb8, 0x55, 0xc3, 0x90, 0x90, 0xc3];
        assert!(plain(0, &inside).is_none());
        // Seen at work within an instruction, or where there is none.
        for (code, seen) in [(NESTED, 2u64), (&[0xc3, 0x06][..], 1)] {
            let seen = [seen];
            let known = Surroundings { seen: &seen, ..PLAIN };
            assert!(Function::decode(0, code, &known).is_none(), "{seen:?}");
        }
        // The way leads to bytes that are no instruction, or out of the range within one.
        assert!(plain(0, &[0x55, 0x06, 0x55]).is_none());
        assert!(plain(0, &[0x55, 0xb8, 0x01]).is_none());
    }

    #[test]
    fn calls_are_not_offered_where_there_is_a_shadow_stack() {
        let known = Surroundings {
            calls: false,
            ..PLAIN
        };
        let f = Function::decode(0x1000, NESTED, &known).unwrap();
        for (at, returns) in [(0x1006, true), (0x1001, false), (0x100a, false)] {
            let found = f.around(at, returns);
            assert!(!found.is_empty());
            for c in found {
                assert_ne!(NESTED[(c.address - 0x1000) as usize], 0xe8, "{c:?}");
            }
        }
        assert!(nested().around(0x1006, true).iter().any(|c| c.address == 0x1001));
    }

    #[test]
    fn a_function_of_nothing_but_loops_does_not_keep_us_busy() {
        // jne to itself, again and again: more loops than any function has.
        let many: Vec<u8> = [0x75, 0xfe].repeat(LOOPS_MAX + 1);
        assert!(plain(0, &many).is_none());
        let most: Vec<u8> = [0x75, 0xfe].repeat(LOOPS_MAX);
        let f = plain(0, &most).unwrap();
        assert!(
            f.inner
                .iter()
                .all(|(inner, around)| inner.is_some() && *around == 1)
        );
        // Loops around loops: each jne goes back one further.
        let mut nest = vec![0x90; 2000];
        for i in 0..2000i32 {
            let at = nest.len() as i32 + 6;
            nest.extend([0x0f, 0x85]);
            nest.extend((1999 - i - at).to_le_bytes());
        }
        let f = plain(0, &nest).unwrap();
        assert_eq!(f.loops.len(), 2000);
        let (inner, around) = f.inner[1999];
        assert_eq!((f.loops[inner.unwrap() as usize].head, around), (1999, u8::MAX));
        assert!(!f.around(1999, false).is_empty());
    }

    #[test]
    fn what_is_offered_is_cheap_and_begins_an_instruction() {
        let f = nested();
        let found = f.around(0x1006, false);
        let at: Vec<(u64, Kind)> = found.iter().map(|c| (c.address - 0x1000, c.kind)).collect();
        assert!(at.contains(&(0, Kind::Entry)), "{at:?}");
        assert!(
            at.contains(&(8, Kind::Loop)) || at.contains(&(8, Kind::Branch)),
            "{at:?}"
        );
        assert!(at.contains(&(12, Kind::Loop)), "{at:?}");
        assert!(
            at.contains(&(1, Kind::Loop)) || at.contains(&(1, Kind::Call)),
            "{at:?}"
        );
        for c in found {
            let offset = (c.address - 0x1000) as usize;
            assert!(f.is_boundary(c.address) && is_emulated(&NESTED[offset..]));
        }
    }

    #[test]
    fn an_entry_that_begins_with_endbr64_moves_to_the_push_behind_it() {
        // endbr64; mov rbp, rsp; push rbp; ret
        let code = [0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x89, 0xe5, 0x55, 0xc3];
        let f = plain(0, &code).unwrap();
        assert_eq!(f.entry().unwrap().address, 7);
        // A jump to the push from below: it may run more often than the entry.
        let looped = [0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0xeb, 0xfd];
        assert_eq!(plain(0, &looped).unwrap().entry(), None);
    }

    #[test]
    fn waiting_is_told_from_working() {
        let waits = |code: &[u8]| plain(0, code).unwrap().waits_at(0);
        // pause; cmp dword [rdi], 0; je 0
        assert!(waits(&[0xf3, 0x90, 0x83, 0x3f, 0x00, 0x74, 0xf9]));
        // mov eax, [rdi]; test eax, eax; je 0
        assert!(waits(&[0x8b, 0x07, 0x85, 0xc0, 0x74, 0xfa]));
        // xchg [rdi], eax; test eax, eax; jne 0
        assert!(waits(&[0x87, 0x07, 0x85, 0xc0, 0x75, 0xfa]));
        // A chain of pointers: mov rax, [rax]; test rax, rax; jne 0
        assert!(!waits(&[0x48, 0x8b, 0x00, 0x48, 0x85, 0xc0, 0x75, 0xf8]));
        // Counting: dec ecx; jne 0
        assert!(!waits(&[0xff, 0xc9, 0x75, 0xfc]));
        // Storing: mov [rdi], eax; jmp 0
        assert!(!waits(&[0x89, 0x07, 0xeb, 0xfc]));
    }

    #[test]
    fn bytes_that_are_no_code_give_nothing() {
        assert!(plain(0, &[]).is_none());
        assert!(plain(0, &[0x06]).is_none());
        assert!(plain(u64::MAX, NESTED).is_none());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_taken_apart_without_harm(
            code in proptest::collection::vec(proptest::num::u8::ANY, 1..400),
            at in 0u64..400,
            seen in proptest::collection::vec(0x1000u64..0x1200, 0..3),
            returns in proptest::bool::ANY,
            calls in proptest::bool::ANY,
        ) {
            let known = Surroundings { seen: &seen, calls, ..PLAIN };
            if let Some(f) = Function::decode(0x1000, &code, &known) {
                let mut end = 0;
                for step in &f.steps {
                    // No two instructions overlap, and none leaves the range.
                    proptest::prop_assert!(step.at >= end);
                    end = step.next();
                    proptest::prop_assert!(end as usize <= code.len());
                }
                for c in f.around(0x1000 + at, returns) {
                    let bytes = &code[(c.address - 0x1000) as usize..];
                    proptest::prop_assert!(f.is_boundary(c.address) && is_emulated(bytes));
                    proptest::prop_assert!(calls || bytes[0] != 0xe8);
                }
            }
        }
    }
}
