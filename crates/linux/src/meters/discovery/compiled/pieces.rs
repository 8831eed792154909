//! Code without functions, in pieces that lie together: followed from the places at which the program was seen at work, and from
//! where calls seem to return to.

use super::super::atlas::Frame;
use super::Memory;
use homeostat_points::code::{FUNCTION_MAX, Function, follows_a_call};
use std::collections::BTreeMap;

/// Places that are farther apart are of two pieces (bytes); so far before the first one and behind the last code is read.
const APART: u64 = 4096;
/// Longest piece.
const PIECE_MAX: u64 = FUNCTION_MAX as u64 / 2;
/// Most places that are followed: those that were seen most often.
const PLACES_MAX: usize = 512;
/// Bytes before an address in which the call that returns to it must lie.
const CALL_MAX: u64 = 8;

/// The code that a process was seen to run and that no file holds.
#[derive(Default)]
pub(in crate::meters::discovery) struct Pieces(Vec<Function>);

/// A place, and how it was seen.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// The program was about to execute an instruction there.
    at_work: bool,
    times: usize,
}

impl Pieces {
    /// Reads and follows it. `compiled`: where such code lies. `at_work`: addresses at which an instruction was about to be executed;
    /// `words`: what lay on stacks, of which only what stands behind a call is believed to be code.
    pub(in crate::meters::discovery) fn read(
        memory: &Memory,
        compiled: &[(u64, u64)],
        at_work: impl Iterator<Item = u64>,
        words: impl Iterator<Item = u64>,
    ) -> Self {
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
        often.retain(|(address, seen)| {
            let before = |length: u64| memory.read(address.saturating_sub(length), length as usize);
            seen.at_work || follows_a_call(&before(CALL_MAX))
        });
        often.sort_by_key(|(address, _)| *address);
        let mut groups: Vec<Vec<(u64, Seen)>> = Vec::new();
        for place in often {
            let fits = groups.last().is_some_and(|group| {
                let (first, last) = (group.first().map_or(0, |p| p.0), group.last().map_or(0, |p| p.0));
                place.0 - last <= APART && place.0 - first <= PIECE_MAX && range(place.0) == range(last)
            });
            match groups.last_mut().filter(|_| fits) {
                Some(group) => group.push(place),
                None => groups.push(vec![place]),
            }
        }
        Self(
            groups
                .into_iter()
                .filter_map(|group| {
                    let (first, last) = (group.first()?.0, group.last()?.0);
                    let (from, to) = *range(first)?;
                    // A loop may begin before the first place at which it was seen, and end behind the last.
                    let begin = from.max(first.saturating_sub(APART));
                    let end = to.min(last.saturating_add(APART));
                    let code = memory.read(begin, usize::try_from(end - begin).ok()?);
                    piece(begin, &code, group)
                })
                .collect(),
        )
    }

    /// What an address is: an instruction at work, or the one behind a call. `None` for everything else that lies on a stack.
    pub(in crate::meters::discovery) fn resolve(&self, address: u64) -> Option<Frame> {
        let function = self.0.iter().find(|f| f.is_boundary(address))?;
        Some(Frame {
            image: 0,
            function: function.start(),
            waits: function.waits_at(address),
            candidates: function.within(address),
        })
    }
}

/// Follows code from all its places at once; where they contradict each other, from one after the other, and leaves out those that
/// contradict the ones before: first come those at which it was at work, and of the others those that were seen most often.
fn piece(begin: u64, code: &[u8], mut places: Vec<(u64, Seen)>) -> Option<Function> {
    let decode = |addresses: &[u64]| Function::decode_made(begin, code, addresses);
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
        let function = piece(0x1000, &code, vec![(0x1000, seen(true)), (0x1005, seen(true))]).unwrap();
        assert!(function.is_boundary(0x1007));
        // The head of the loop is reached from within it.
        let function = piece(0x1000, &code, vec![(0x1005, seen(true))]).unwrap();
        assert!(function.is_boundary(0x1000));
        // A stale word within the first instruction.
        let places = vec![(0x1000, seen(true)), (0x1002, seen(false)), (0x1005, seen(true))];
        let function = piece(0x1000, &code, places).unwrap();
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
}
