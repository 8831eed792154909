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

/// As if all that is called were a function.
fn plain(start: u64, code: &[u8]) -> Option<Function> {
    Function::decode(start, code, &|_| true)
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
    let over = Function::decode(0, &code, &|_| false).unwrap();
    assert!(!over.is_boundary(5) && over.returns_to(5));
    // What nothing tells is not looked at, even where it is code: behind a jump through a table.
    assert!(!plain(0, &[0xff, 0xe0, 0x55, 0xc3]).unwrap().is_boundary(2));
}

#[test]
fn a_contradiction_ends_the_belief_in_a_function() {
    // je into the middle of the mov behind it
    let inside = [0x74, 0x01, 0xb8, 0x55, 0xc3, 0x90, 0x90, 0xc3];
    assert!(plain(0, &inside).is_none());
    // The way leads to bytes that are no instruction, or out of the range within one.
    assert!(plain(0, &[0x55, 0x06, 0x55]).is_none());
    assert!(plain(0, &[0x55, 0xb8, 0x01]).is_none());
}

#[test]
fn calls_are_not_offered() {
    let f = nested();
    for (at, returns) in [(0x1006, true), (0x1001, false), (0x100a, false)] {
        let found = f.around(at, returns);
        assert!(!found.is_empty());
        for c in found {
            assert_ne!(NESTED[(c.address - 0x1000) as usize], 0xe8, "{c:?}");
        }
    }
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
    assert!(at.iter().all(|(address, _)| *address != 1), "a call: {at:?}");
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
        returns in proptest::bool::ANY,
    ) {
        if let Some(f) = plain(0x1000, &code) {
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
                proptest::prop_assert!(bytes[0] != 0xe8);
            }
        }
    }
}
