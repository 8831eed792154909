//! Decodes generated code, which has no function table, around sampled addresses and apparent return addresses.

use crate::discovery::atlas::Frame;
use crate::discovery::compiled::Memory;
use homeostat_points::code::{FUNCTION_MAX, Function, follows_a_call};
use homeostat_sensors::storage::Refusal;
use std::collections::BTreeMap;

/// Addresses farther apart (bytes) belong to two pieces. Code is read this far before the first and behind the last.
const APART: u64 = 4096;
const PIECE_MAX: u64 = FUNCTION_MAX as u64 / 2;
/// Most addresses from which decoding starts: the most frequent.
const PLACES_MAX: usize = 512;
/// Most code decoded per search (bytes). A piece with contradictions is decoded once per address, the rarest last.
const FOLLOWED_MAX: usize = 16 * 1024 * 1024;
/// Bytes before a return address in which its call must lie.
const CALL_MAX: u64 = 8;

/// The sampled generated code of a process.
#[derive(Default)]
pub(crate) struct Pieces(Vec<Function>);

#[derive(Clone, Copy, Default)]
struct Seen {
    /// An instruction was about to run there.
    at_work: bool,
    times: usize,
}

impl Pieces {
    /// Reads and decodes the code. `compiled`: ranges of such code. `at_work`: addresses at which an instruction was
    /// about to run. `words`: words of stacks, trusted only behind a call. `go_on`: asked before each piece.
    ///
    /// # Errors
    /// A sentence: the memory cannot or must not be read now, or `go_on` failed.
    pub(crate) fn read(
        memory: &Memory,
        compiled: &[(u64, u64)],
        at_work: impl Iterator<Item = u64>,
        words: impl Iterator<Item = u64>,
        go_on: &dyn Fn() -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let range = |address: u64| compiled.iter().find(|(from, to)| (*from..*to).contains(&address));
        let mut places: BTreeMap<u64, Seen> = BTreeMap::new();
        for address in at_work.filter(|a| range(*a).is_some()) {
            let seen = places.entry(address).or_default();
            seen.at_work = true;
            seen.times += 1;
        }
        for word in words.filter(|w| range(*w).is_some()) {
            places.entry(word).or_default().times += 1;
        }
        let mut often: Vec<(u64, Seen)> = places.into_iter().collect();
        often.sort_by_key(|(address, seen)| (!seen.at_work, std::cmp::Reverse(seen.times), *address));
        often.truncate(PLACES_MAX);
        let mut code: Vec<(u64, Seen)> = Vec::new();
        for (address, seen) in often {
            if seen.at_work
                || follows_a_call(&memory.read(address.saturating_sub(CALL_MAX), CALL_MAX as usize)?)
            {
                code.push((address, seen));
            }
        }
        code.sort_by_key(|(address, _)| *address);
        let mut groups: Vec<Vec<(u64, Seen)>> = Vec::new();
        for place in code {
            let fits = groups.last().is_some_and(|group| {
                let (first, last) = (group.first().map_or(0, |p| p.0), group.last().map_or(0, |p| p.0));
                place.0 - last <= APART && place.0 - first <= PIECE_MAX && range(place.0) == range(last)
            });
            match groups.last_mut().filter(|_| fits) {
                Some(group) => group.push(place),
                None => groups.push(vec![place]),
            }
        }
        // The most frequent pieces first, within the limit.
        groups
            .sort_by_key(|group| std::cmp::Reverse(group.iter().map(|(_, seen)| seen.times).sum::<usize>()));
        let mut left = FOLLOWED_MAX;
        let mut pieces = Vec::new();
        for group in groups {
            go_on()?;
            let (Some((first, _)), Some((last, _))) = (group.first(), group.last()) else {
                continue;
            };
            let Some((from, to)) = range(*first) else {
                continue;
            };
            // A loop may begin before the first sample and end behind the last.
            let begin = (*from).max(first.saturating_sub(APART));
            let end = (*to).min(last.saturating_add(APART));
            let code = memory.read(begin, usize::try_from(end - begin).unwrap_or(0))?;
            pieces.extend(piece(begin, &code, group, &mut left));
        }
        pieces.sort_by_key(Function::start);
        Ok(Self(pieces))
    }

    /// Resolves an address: a sampled instruction, or a return address. `None`: any other word of a stack.
    pub(crate) fn resolve(&self, address: u64) -> Option<Frame> {
        let function = self.0.iter().find(|f| f.is_boundary(address))?;
        Some(Frame {
            image: 0,
            function: function.start(),
            waits: function.waits_at(address),
            candidates: function.within(address),
        })
    }
}

/// Decodes code from all addresses at once. If they contradict each other, it adds one at a time and drops those that
/// contradict earlier ones: sampled addresses first, then the most frequent. `left`: remaining bytes to decode.
fn piece(begin: u64, code: &[u8], mut places: Vec<(u64, Seen)>, left: &mut usize) -> Option<Function> {
    let mut decode = |addresses: &[u64]| {
        *left = left.checked_sub(code.len())?;
        Function::decode_made(begin, code, addresses)
    };
    let all: Vec<u64> = places.iter().map(|p| p.0).collect();
    if let Some(function) = decode(&all) {
        return Some(function);
    }
    places.sort_by_key(|(address, seen)| (!seen.at_work, std::cmp::Reverse(seen.times), *address));
    let mut agreed: Vec<u64> = Vec::new();
    let mut found = None;
    for (address, _) in places {
        agreed.push(address);
        match decode(&agreed) {
            Some(function) => found = Some(function),
            None => {
                agreed.pop();
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_points::code::Kind;

    fn seen(at_work: bool) -> Seen {
        Seen { at_work, times: 1 }
    }

    #[test]
    fn what_contradicts_where_it_was_at_work_is_left_out() {
        // loop: mov eax, 0x90909090; dec ecx; jne loop; ret
        let code = [0xb8, 0x90, 0x90, 0x90, 0x90, 0xff, 0xc9, 0x75, 0xf7, 0xc3];
        let mut left = FOLLOWED_MAX;
        let mut piece = |places| piece(0x1000, &code, places, &mut left);
        let function = piece(vec![(0x1000, seen(true)), (0x1005, seen(true))]).unwrap();
        assert!(function.is_boundary(0x1007));
        // The head of the loop is reached from within it.
        let function = piece(vec![(0x1005, seen(true))]).unwrap();
        assert!(function.is_boundary(0x1000));
        // A stale word within the first instruction.
        let places = vec![(0x1000, seen(true)), (0x1002, seen(false)), (0x1005, seen(true))];
        let function = piece(places).unwrap();
        assert!(function.is_boundary(0x1000) && !function.is_boundary(0x1002));
        let pieces = Pieces(vec![function]);
        let frame = pieces.resolve(0x1005).unwrap();
        assert!(
            frame
                .candidates
                .iter()
                .any(|c| c.address == 0x1007 && c.kind == Kind::Loop)
        );
        assert!(frame.candidates.iter().all(|c| c.kind != Kind::Entry));
        assert!(pieces.resolve(0x1002).is_none());
    }

    #[test]
    fn code_is_followed_anew_as_often_as_it_may_and_no_more() {
        let code = [0xb8, 0x90, 0x90, 0x90, 0x90, 0xff, 0xc9, 0x75, 0xf7, 0xc3];
        let places = || vec![(0x1000, seen(true)), (0x1002, seen(false)), (0x1005, seen(true))];
        // All at once, then one after the other.
        for (times, found) in [(0, false), (1, false), (2, true), (4, true)] {
            let mut left = times * code.len() + 3;
            let function = piece(0x1000, &code, places(), &mut left);
            assert_eq!(function.is_some(), found, "{times}");
            assert_eq!(left, 3, "{times}");
        }
    }
}
