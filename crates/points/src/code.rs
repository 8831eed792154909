//! Which instructions of a function can be counted cheaply, and what a count of them would mean.
//!
//! A probe makes the processor trap. Where the kernel can act out the instruction itself (`push` of a register,
//! one-byte `nop`, jumps and calls to fixed addresses) a hit costs 0.6 to 0.8 µs; else it has to be stepped through at
//! 7 to 10 µs. So only the former are offered: nearly every part of a program has one that runs exactly as often.
//!
//! Instructions are taken apart one after the other from the start of a function, which somebody else has to know for
//! certain: a probe in the middle of an instruction would make the program another one.

use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};
use std::collections::BTreeSet;

/// Longest function that is taken apart, in bytes: interpreters have one of some hundred KiB.
pub const FUNCTION_MAX: usize = 512 * 1024;
/// Most instructions that are offered for one loop, besides its jump back.
const OF_LOOP_MAX: usize = 6;
/// A loop is looked at for waiting up to this many instructions.
const WAITING_MAX: usize = 48;
/// Most loops around one place.
const LOOPS_MAX: usize = 8;

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
}

/// One instruction.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: u64,
    next: u64,
    flow: Flow,
    /// Whether the kernel acts it out.
    cheap: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// Goes on.
    On,
    /// A jump to a known address, always or not.
    Jump {
        to: u64,
        always: bool,
    },
    /// A jump to an address that is not known.
    Away,
    Call,
    Return,
}

/// A loop: from its head to the last jump back to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    head: u64,
    back: u64,
}

impl Turn {
    fn has(&self, address: u64) -> bool {
        (self.head..=self.back).contains(&address)
    }
    fn length(&self) -> u64 {
        self.back - self.head
    }
}

/// A function, taken apart.
#[derive(Clone, Debug)]
pub struct Function {
    start: u64,
    steps: Vec<Step>,
    /// Where a sequence of instructions that run equally often begins.
    leaders: BTreeSet<u64>,
    loops: Vec<Turn>,
    /// Addresses of the loops' heads that wait.
    waiting: BTreeSet<u64>,
}

impl Function {
    /// Takes the code of a function of x86-64 apart, up to the first bytes that are no instruction. `start` is the
    /// address of its first byte. `None` when it begins with none, or is too long.
    pub fn decode(start: u64, code: &[u8]) -> Option<Self> {
        if code.len() > FUNCTION_MAX {
            return None;
        }
        let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
        let mut steps = Vec::new();
        let mut instructions = Vec::new();
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                break;
            }
            let offset = usize::try_from(instruction.ip() - start).ok()?;
            steps.push(Step {
                at: instruction.ip(),
                next: instruction.next_ip(),
                flow: flow(&instruction),
                cheap: is_emulated(code.get(offset..).unwrap_or_default()),
            });
            instructions.push(instruction);
        }
        let end = steps.last()?.next;
        let mut leaders = BTreeSet::from([start]);
        let mut backs: Vec<Turn> = Vec::new();
        for step in &steps {
            if !matches!(step.flow, Flow::On | Flow::Call) {
                leaders.insert(step.next);
            }
            if let Flow::Jump { to, .. } = step.flow
                && (start..end).contains(&to)
            {
                leaders.insert(to);
                if to <= step.at {
                    backs.push(Turn {
                        head: to,
                        back: step.at,
                    });
                }
            }
        }
        // Several jumps back to one head are one loop.
        backs.sort_unstable_by_key(|t| (t.head, t.back));
        let mut loops: Vec<Turn> = Vec::new();
        for back in backs {
            match loops.last_mut() {
                Some(last) if last.head == back.head => last.back = back.back,
                _ => loops.push(back),
            }
        }
        let waiting = loops
            .iter()
            .filter(|turn| waits(&instructions, turn))
            .map(|turn| turn.head)
            .collect();
        Some(Self {
            start,
            steps,
            leaders,
            loops,
            waiting,
        })
    }

    /// Address behind the last instruction that was understood.
    pub fn end(&self) -> u64 {
        self.steps.last().map_or(self.start, |s| s.next)
    }

    fn index(&self, address: u64) -> Option<usize> {
        self.steps.binary_search_by_key(&address, |s| s.at).ok()
    }

    /// Whether an instruction begins at this address.
    pub fn is_boundary(&self, address: u64) -> bool {
        self.index(address).is_some()
    }

    /// Whether the instruction before this address is a call, so that the address can be where one returns to.
    pub fn returns_to(&self, address: u64) -> bool {
        // The call may be the last instruction of the function (it never comes back).
        let at = self.steps.partition_point(|s| s.at < address);
        at.checked_sub(1)
            .and_then(|i| self.steps.get(i))
            .is_some_and(|s| s.next == address && s.flow == Flow::Call)
    }

    /// Whether the address lies in a loop that seems to wait for something instead of working.
    pub fn waits_at(&self, address: u64) -> bool {
        self.innermost(address)
            .is_some_and(|turn| self.waiting.contains(&turn.head))
    }

    fn innermost(&self, address: u64) -> Option<&Turn> {
        self.loops
            .iter()
            .filter(|t| t.has(address))
            .min_by_key(|t| t.length())
    }

    fn nesting(&self, address: u64) -> u8 {
        let around = self.loops.iter().filter(|t| t.has(address)).count();
        u8::try_from(around).unwrap_or(u8::MAX)
    }

    fn candidate(&self, address: u64, kind: Kind) -> Candidate {
        Candidate {
            address,
            kind,
            nesting: self.nesting(address),
            waits: self.waits_at(address),
        }
    }

    /// The first cheap instruction of the sequence of instructions around an address that run equally often.
    fn cheap_beside(&self, address: u64) -> Option<u64> {
        let leader = *self.leaders.range(..=address).next_back()?;
        let first = self.index(leader)?;
        for (i, step) in self.steps.get(first..)?.iter().enumerate() {
            if i > 0 && self.leaders.contains(&step.at) {
                return None;
            }
            if step.cheap {
                return Some(step.at);
            }
        }
        None
    }

    /// A cheap instruction that runs once for each entry of the function.
    pub fn entry(&self) -> Option<Candidate> {
        self.cheap_beside(self.start)
            .map(|at| self.candidate(at, Kind::Entry))
    }

    /// What may be counted around an address at which the function was seen at work. `returns`: the address is where
    /// a call returns to.
    pub fn around(&self, address: u64, returns: bool) -> Vec<Candidate> {
        let mut found = Vec::new();
        // The call itself stands before the address that it returns to, perhaps in another sequence.
        let place = if returns {
            address.saturating_sub(1)
        } else {
            address
        };
        let Some(step) = self
            .steps
            .partition_point(|s| s.at <= place)
            .checked_sub(1)
            .and_then(|i| self.steps.get(i))
            .filter(|s| place < s.next)
        else {
            return found;
        };
        let kind = if returns { Kind::Call } else { Kind::Branch };
        let here = if returns && step.cheap {
            Some(step.at)
        } else {
            self.cheap_beside(step.at)
        };
        found.extend(here.map(|at| self.candidate(at, kind)));
        found.extend(self.entry());
        let mut around: Vec<&Turn> = self.loops.iter().filter(|t| t.has(step.at)).collect();
        around.sort_unstable_by_key(|t| t.length());
        for turn in around.into_iter().take(LOOPS_MAX) {
            found.push(self.candidate(turn.back, Kind::Loop));
            found.extend(
                self.cheap_beside(turn.head)
                    .map(|at| self.candidate(at, Kind::Loop)),
            );
            let first = self.steps.partition_point(|s| s.at < turn.head);
            let own = self
                .steps
                .get(first..)
                .unwrap_or_default()
                .iter()
                .take_while(|s| s.at < turn.back)
                .filter(|s| s.cheap && s.flow != Flow::On)
                // Of this loop itself, not of one inside it.
                .filter(|s| self.innermost(s.at) == Some(turn));
            // Those nearest to where the program was seen.
            let mut own: Vec<&Step> = own.collect();
            own.sort_by_key(|s| s.at.abs_diff(step.at));
            found.extend(own.into_iter().take(OF_LOOP_MAX).map(|s| {
                let kind = if s.flow == Flow::Call {
                    Kind::Call
                } else {
                    Kind::Branch
                };
                self.candidate(s.at, kind)
            }));
        }
        found.retain(|c| {
            self.index(c.address)
                .and_then(|i| self.steps.get(i))
                .is_some_and(|s| s.cheap)
        });
        found.sort_unstable();
        found.dedup_by_key(|c| c.address);
        found
    }
}

fn flow(instruction: &Instruction) -> Flow {
    let target = || match instruction.op0_kind() {
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
            Some(instruction.near_branch_target())
        }
        _ => None,
    };
    match instruction.flow_control() {
        FlowControl::ConditionalBranch => match target() {
            Some(to) => Flow::Jump { to, always: false },
            None => Flow::On,
        },
        FlowControl::UnconditionalBranch => match target() {
            Some(to) => Flow::Jump { to, always: true },
            None => Flow::Away,
        },
        FlowControl::IndirectBranch => Flow::Away,
        FlowControl::Call | FlowControl::IndirectCall => {
            // `syscall` and its like are calls to the decoder, but nothing returns from them through the stack.
            if instruction.mnemonic() == Mnemonic::Call {
                Flow::Call
            } else {
                Flow::On
            }
        }
        FlowControl::Return | FlowControl::Exception | FlowControl::Interrupt => Flow::Return,
        _ => Flow::On,
    }
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
fn waits(instructions: &[Instruction], turn: &Turn) -> bool {
    let first = instructions.partition_point(|i| i.ip() < turn.head);
    let body: Vec<&Instruction> = instructions
        .get(first..)
        .unwrap_or_default()
        .iter()
        .take_while(|i| i.ip() <= turn.back)
        .take(WAITING_MAX + 1)
        .collect();
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
    for instruction in &body {
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

    fn nested() -> Function {
        Function::decode(0x1000, NESTED).unwrap()
    }

    #[test]
    fn loops_and_their_nesting_are_found() {
        let f = nested();
        assert_eq!(f.end(), 0x1010);
        assert_eq!(
            f.loops,
            [
                Turn {
                    head: 0x1001,
                    back: 0x100c
                },
                Turn {
                    head: 0x1006,
                    back: 0x1008
                }
            ]
        );
        assert_eq!(f.nesting(0x1006), 2);
        assert_eq!(f.nesting(0x100a), 1);
        assert_eq!(f.nesting(0x1000), 0);
        assert!(f.returns_to(0x1006) && !f.returns_to(0x1008));
        assert!(f.is_boundary(0x1006) && !f.is_boundary(0x1007));
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
        let f = Function::decode(0, &code).unwrap();
        assert_eq!(f.entry().unwrap().address, 7);
        // A jump to the push from below: it may run more often than the entry.
        let looped = [0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0xeb, 0xfd];
        assert_eq!(Function::decode(0, &looped).unwrap().entry(), None);
    }

    #[test]
    fn waiting_is_told_from_working() {
        let waits = |code: &[u8]| Function::decode(0, code).unwrap().waits_at(0);
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
        assert!(Function::decode(0, &[]).is_none());
        assert!(Function::decode(0, &[0x06]).is_none());
        let f = Function::decode(0, &[0x55, 0x06, 0x55]).unwrap();
        assert_eq!(f.end(), 1);
        assert!(!f.is_boundary(2));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_taken_apart_without_harm(
            code in proptest::collection::vec(proptest::num::u8::ANY, 1..400),
            at in 0u64..400,
            returns in proptest::bool::ANY,
        ) {
            if let Some(f) = Function::decode(0x1000, &code) {
                proptest::prop_assert!(f.end() <= 0x1000 + code.len() as u64);
                for c in f.around(0x1000 + at, returns) {
                    proptest::prop_assert!(f.is_boundary(c.address));
                    proptest::prop_assert!(is_emulated(&code[(c.address - 0x1000) as usize..]));
                }
            }
        }
    }
}
