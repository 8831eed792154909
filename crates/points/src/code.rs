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
//!
//! Behind a jump through a table nothing is known of where the program goes on: tables are not guessed at. The loop of an
//! interpreter is made of such jumps. But where the processor was interrupted in the program's own code an instruction begins,
//! or the program would not run; so code is followed from those places as well. What lies between the target of such a
//! jump and the first place seen behind it stays unknown.
//!
//! In a function with such jumps any instruction may be the target of one. A sequence of instructions may then be entered in
//! its middle, and one further down runs more often than one further up. An instruction that is offered instead of another
//! of its sequence is one all the same, and what it counts is found out by counting it: nobody takes the two for equal.

mod follow;
mod loops;

use follow::{Flow, Step};
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use loops::Turn;
use std::collections::{BTreeSet, VecDeque};

/// Longest function that is taken apart, in bytes: interpreters have one of some hundred KiB.
pub const FUNCTION_MAX: usize = 512 * 1024;
/// Most instructions that are offered for one loop, besides its jump back.
const OF_LOOP_MAX: usize = 6;
/// … and how far from the place they are looked for, in instructions to either side.
const OF_LOOP_FAR: usize = 2048;
/// Most sequences of instructions that are offered of what a place leads to until only running tells where it goes on.
const AHEAD_MAX: usize = 16;
/// … and how many instructions are looked through for them.
const AHEAD_FAR: usize = 512;
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
    /// Where the innermost of them begins.
    pub innermost_loop: Option<u64>,
    /// It stands in a loop that seems to wait for something instead of working.
    pub waits: bool,
    /// It is one of the ways to a jump of which only running tells where it leads, so perhaps in the loop of an interpreter. Who
    /// is at work elsewhere in the function is then in the same loop.
    pub dispatched: bool,
    /// That an instruction begins there is known from the program's own doing only: from where it was seen at work.
    pub seen: bool,
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

impl Function {
    /// Takes the code of a function of x86-64 apart. `start` is the address of its first byte, `code` the whole of its
    /// range; `begins` says whether a function begins at an address; at the addresses `seen` an instruction was about to be
    /// executed. `None` when it contradicts itself, is empty or too long, or has too many loops.
    pub fn decode(start: u64, code: &[u8], begins: &dyn Fn(u64) -> bool, seen: &[u64]) -> Option<Self> {
        // A call is acted out without writing the shadow stack, so that a thread which has one, or comes to have one, would be ended
        // by the return.
        let cheap = |bytes: &[u8]| is_emulated(bytes) && bytes.first() != Some(&0xe8);
        Self::decode_with(start, code, begins, &cheap, Some(0), seen)
    }

    /// The same of code of which nobody knows where functions begin: whatever is called is taken for one, and `start` is just where
    /// these bytes begin. The processor's own breakpoints count there, to which all instructions are alike.
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
            // Known from here on only: it was seen at work, and who leads here is hidden.
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
            innermost_loop: self.loop_of(step).map(|turn| self.start + u64::from(turn.head)),
            waits: self.loop_of(step).is_some_and(|turn| turn.waits),
            dispatched: false,
            seen: this.seen,
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

    /// A cheap instruction that runs once for each entry of the function; more often where a table leads back between its beginning
    /// and that.
    pub fn entry(&self) -> Option<Candidate> {
        self.candidate(self.cheap_beside(0)?, Kind::Entry)
    }

    /// What may be counted around an address at which the function was seen at work. `returns`: the address is where
    /// a call returns to.
    pub fn around(&self, address: u64, returns: bool) -> Vec<Candidate> {
        self.candidates(address, returns, self.entry())
    }

    /// The same around an instruction of code that is no function: where it begins nothing is entered.
    pub fn within(&self, address: u64) -> Vec<Candidate> {
        self.candidates(address, false, None)
    }

    fn candidates(&self, address: u64, returns: bool, entry: Option<Candidate>) -> Vec<Candidate> {
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
        // What the start leads to has its loops for that.
        if step.seen {
            found.extend(self.ahead(index));
        }
        // What stands in a loop of either kind is offered as of that.
        found.sort_unstable_by_key(|c| (c.address, !c.dispatched, c.kind));
        found.dedup_by_key(|c| c.address);
        found
    }

    /// What a step leads to until only running tells where it goes on: in an interpreter the ways through the operation that was
    /// seen at work, some of which are taken once in a while (the end of a loop, a new block of memory). The jump behind them is
    /// the loop that no jump back shows. Nothing where the ways only return.
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

/// Length of the instruction that these bytes begin with; `None` when they are none.
pub fn length(code: &[u8]) -> Option<usize> {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then(|| instruction.len())
}

/// Whether these bytes can end with a call, so that a call may return to the address behind them: of a fixed address, or of what a
/// register or a place in memory holds.
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
