//! Finds the instructions of a function that are cheap to count, and what their counts mean.
//!
//! A probe traps the processor. A hit costs 0.6 to 0.8 µs if the kernel emulates the instruction, and 7 to 10 µs for a
//! single step. It emulates `push` of a register, one-byte `nop`, direct jumps and calls. Only these are offered:
//! nearly every part of a program has one with the same count.
//!
//! A probe inside an instruction would corrupt the program. So the decoder follows control flow from a certain function
//! start and never scans linearly, because unreached bytes may be data. If two paths disagree about instruction
//! boundaries, nothing of the function is offered.
//!
//! Tables of indirect jumps are not guessed. Interpreter loops consist of such jumps, so decoding also starts at
//! sampled addresses, where an instruction certainly begins. Code between a jump's target and the first sample behind
//! it stays unknown. A jump may enter the middle of a sequence, so each instruction is judged by its own counts.

mod follow;
mod loops;

use follow::{Flow, Step};
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use loops::Turn;
use std::collections::{BTreeSet, VecDeque};

/// Longest function that is decoded, in bytes: interpreters have functions of some hundred KiB.
pub const FUNCTION_MAX: usize = 512 * 1024;
/// Most instructions that are offered for one loop, besides its jump back.
const OF_LOOP_MAX: usize = 6;
/// … and the distance of the search from the address, in instructions to either side.
const OF_LOOP_FAR: usize = 2048;
/// Most sequences that are offered between an address and the next indirect jump.
const AHEAD_MAX: usize = 16;
/// … and the number of instructions searched for them.
const AHEAD_FAR: usize = 512;
/// Most loops around one address that are offered.
const LOOPS_AROUND_MAX: usize = 8;
/// Most loops of a function. Only a hostile program has more.
const LOOPS_MAX: usize = 4096;

/// What the executions of an instruction count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Entries of a function.
    Entry,
    /// Calls from one place.
    Call,
    /// Iterations of a loop.
    Loop,
    /// Executions of a branch.
    Branch,
}

/// An instruction that may be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Its address, relative to the same base as the function's.
    pub address: u64,
    /// What it would count.
    pub kind: Kind,
    /// Number of loops of the function around it.
    pub nesting: u8,
    /// Start of the innermost loop.
    pub innermost_loop: Option<u64>,
    /// The instruction is in a loop that seems to wait instead of working.
    pub waits: bool,
    /// The instruction leads to an indirect jump, perhaps in an interpreter's loop that all samples of the function
    /// share.
    pub dispatched: bool,
    /// Only the program's execution shows that an instruction begins there: a sample at or before it.
    pub seen: bool,
}

/// A decoded function.
#[derive(Clone, Debug)]
pub struct Function {
    start: u64,
    steps: Vec<Step>,
    /// Starts of sequences whose instructions run equally often.
    leaders: BTreeSet<u32>,
    loops: Vec<Turn>,
    /// For each step: its innermost loop (an index) and the nesting depth.
    inner: Vec<(Option<u32>, u8)>,
}

impl Function {
    /// Decodes the code of an x86-64 function. `start` is the address of its first byte, and `code` is its whole range.
    /// `begins` says whether a function begins at an address. An instruction was about to run at each address in
    /// `seen`. `None`: the code contradicts itself, is empty or too long, or has too many loops.
    pub fn decode(start: u64, code: &[u8], begins: &dyn Fn(u64) -> bool, seen: &[u64]) -> Option<Self> {
        // The kernel emulates a call without the shadow stack. The return would kill a thread that has or gets one.
        let cheap = |bytes: &[u8]| is_emulated(bytes) && bytes.first() != Some(&0xe8);
        Self::decode_with(start, code, begins, &cheap, Some(0), seen)
    }

    /// Decodes generated code, where function starts are unknown: every call target counts as one, and `start` is only
    /// the address of the first byte. Hardware breakpoints count there, at equal cost for all instructions.
    pub fn decode_made(start: u64, code: &[u8], seen: &[u64]) -> Option<Self> {
        Self::decode_with(start, code, &|_| true, &|_| true, None, seen)
    }

    fn decode_with(
        start: u64,
        code: &[u8],
        begins: &dyn Fn(u64) -> bool,
        cheap: &dyn Fn(&[u8]) -> bool,
        entry: Option<u32>,
        seen: &[u64],
    ) -> Option<Self> {
        if code.is_empty() || code.len() > FUNCTION_MAX {
            return None;
        }
        let steps = follow::steps(start, code, begins, cheap, entry, seen)?;
        let mut leaders = BTreeSet::from([0]);
        let mut backs: Vec<(u32, u32)> = Vec::new();
        let mut behind = 0;
        for step in &steps {
            // The path to this sampled instruction is unknown, so a sequence begins here.
            if step.at != behind || step.lands {
                leaders.insert(step.at);
            }
            behind = step.next();
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
        // Several jumps back to one head form one loop.
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
            turn.waits = loops::only_waits(start, code, &steps, turn);
        }
        let inner = loops::innermost(&steps, &loops);
        Some(Self {
            start,
            steps,
            leaders,
            loops,
            inner,
        })
    }

    /// The address of its first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Number of reached instructions.
    pub fn instructions(&self) -> usize {
        self.steps.len()
    }

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

    /// Whether the instruction before this address is a call, so that the address can be a return address.
    pub fn returns_to(&self, address: u64) -> bool {
        let Some(at) = self.place(address) else {
            return false;
        };
        // The call may be the last instruction of the function and never return.
        let before = self.steps.partition_point(|s| s.at < at);
        before
            .checked_sub(1)
            .and_then(|i| self.steps.get(i))
            .is_some_and(|s| s.next() == at && matches!(s.flow, Flow::Call | Flow::Step))
    }

    /// Whether the address is in a loop that seems to wait instead of working.
    pub fn waits_at(&self, address: u64) -> bool {
        self.place(address)
            .and_then(|at| self.index(at))
            .is_some_and(|i| self.loop_of(i).is_some_and(|turn| turn.waits))
    }

    fn loop_of(&self, step: usize) -> Option<&Turn> {
        self.loops.get(self.inner.get(step)?.0? as usize)
    }

    fn candidate(&self, step: usize, kind: Kind) -> Option<Candidate> {
        let this = self.steps.get(step).filter(|s| s.cheap)?;
        Some(Candidate {
            address: self.start + u64::from(this.at),
            kind,
            nesting: self.inner.get(step)?.1,
            innermost_loop: self.loop_of(step).map(|turn| self.start + u64::from(turn.head)),
            waits: self.loop_of(step).is_some_and(|turn| turn.waits),
            dispatched: false,
            seen: this.seen,
        })
    }

    /// The first cheap instruction of the sequence around an offset.
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

    /// A cheap instruction that runs once per entry, or more often if an indirect jump leads back before it.
    pub fn entry(&self) -> Option<Candidate> {
        self.candidate(self.cheap_beside(0)?, Kind::Entry)
    }

    /// Candidates around an address at which the function was sampled. `returns`: the address is a return address.
    pub fn around(&self, address: u64, returns: bool) -> Vec<Candidate> {
        self.candidates(address, returns, self.entry())
    }

    /// Candidates around an instruction of generated code, which has no function entry.
    pub fn within(&self, address: u64) -> Vec<Candidate> {
        self.candidates(address, false, None)
    }

    fn candidates(&self, address: u64, returns: bool, entry: Option<Candidate>) -> Vec<Candidate> {
        let mut found = Vec::new();
        // The call is before its return address, and may be in another sequence.
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
        found.extend(entry);
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
        // Code reached from the function's start is covered by its loops.
        if step.seen {
            found.extend(self.ahead(index));
        }
        // An instruction that is also in a loop of either kind is offered with that loop.
        found.sort_unstable_by_key(|c| (c.address, !c.dispatched, c.kind));
        found.dedup_by_key(|c| c.address);
        found
    }

    /// Candidates on the paths from a step to the next indirect jump. In an interpreter, these lead through the sampled
    /// operation, some rarely (end of a loop, new memory). That jump closes a loop. Empty if the paths only return.
    fn ahead(&self, from: usize) -> Vec<Candidate> {
        let mut pieces = Vec::new();
        let mut somewhere = false;
        let mut known = BTreeSet::from([from]);
        let mut ways = VecDeque::from([from]);
        while let Some(i) = ways.pop_front() {
            let Some(step) = self.steps.get(i) else { continue };
            if self.leaders.contains(&step.at) {
                pieces.push(step.at);
            }
            somewhere |= step.flow == Flow::Somewhere;
            let next = matches!(step.flow, Flow::On | Flow::Call | Flow::Branch).then(|| step.next());
            for at in next.into_iter().chain(step.to) {
                if known.len() < AHEAD_FAR {
                    if let Some(to) = self.index(at) {
                        if known.insert(to) {
                            ways.push_back(to);
                        }
                    }
                }
            }
        }
        if !somewhere {
            return Vec::new();
        }
        pieces
            .into_iter()
            .filter_map(|at| self.candidate(self.cheap_beside(at)?, Kind::Branch))
            .map(|candidate| Candidate {
                dispatched: true,
                ..candidate
            })
            .take(AHEAD_MAX)
            .collect()
    }

    /// Branches and calls of a loop, without its nested loops: the nearest to a step.
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

/// Whether Linux emulates the instruction under a uprobe on x86-64: push of a register, one-byte nop, jmp and jcc,
/// direct call (arch/x86/kernel/uprobes.c: `branch_setup_xol_ops` and `push_setup_xol_ops`).
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

/// Length of the instruction at the start of these bytes. `None`: invalid.
pub fn length(code: &[u8]) -> Option<usize> {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then(|| instruction.len())
}

/// Whether these bytes can end with a call, direct or indirect, so that the next address may be a return address.
pub fn follows_a_call(before: &[u8]) -> bool {
    (2..=7).any(|length| {
        let Some(call) = before
            .len()
            .checked_sub(length)
            .and_then(|from| before.get(from..))
        else {
            return false;
        };
        let mut decoder = Decoder::new(64, call, DecoderOptions::NONE);
        let instruction = decoder.decode();
        !instruction.is_invalid() && instruction.len() == length && instruction.mnemonic() == Mnemonic::Call
    })
}

#[cfg(test)]
mod tests;
