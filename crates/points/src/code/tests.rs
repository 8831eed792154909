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
    Function::decode(start, code, &|_| true, &[])
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
    let over = Function::decode(0, &code, &|_| false, &[]).unwrap();
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

/// As if all that is called were a function, and it was seen at work at these addresses.
fn seen(code: &[u8], seen: &[u64]) -> Option<Function> {
    Function::decode(0x1000, code, &|_| true, seen)
}

/// jmp rax; then two operations that only a table leads to: { dec ecx; je rare; nop; jmp rax; rare: push rbp; pop rbp;
/// jmp rax } and { mov rbp, rsp; nop; jmp rax }
const INTERPRETER: &[u8] = &[
    0xff, 0xe0, // 0 jmp rax
    0xff, 0xc9, // 2 dec ecx
    0x74, 0x03, // 4 je 9
    0x90, // 6 nop
    0xff, 0xe0, // 7 jmp rax
    0x55, // 9 push rbp
    0x5d, // 10 pop rbp
    0xff, 0xe0, // 11 jmp rax
    0x48, 0x89, 0xe5, // 13 mov rbp, rsp
    0x90, // 16 nop
    0xff, 0xe0, // 17 jmp rax
];

#[test]
fn what_only_a_table_leads_to_is_followed_from_where_it_was_seen() {
    let reached = |places: &[u64]| -> Vec<u32> {
        let seen = seen(INTERPRETER, places).unwrap();
        seen.steps.iter().map(|s| s.at).collect()
    };
    assert_eq!(reached(&[]), [0]);
    assert_eq!(reached(&[0x1002]), [0, 2, 4, 6, 7, 9, 10, 11]);
    // What was seen in the middle of an operation says nothing of how it begins.
    assert_eq!(reached(&[0x1010, 0x1004]), [0, 4, 6, 7, 9, 10, 11, 16, 17]);
    // Neither do places in other functions.
    assert_eq!(reached(&[0, 0xfff, 0x1013, u64::MAX]), [0]);
}

#[test]
fn where_it_was_seen_and_what_was_followed_must_agree() {
    // Within the call that the start leads to.
    assert!(seen(NESTED, &[0x1001]).is_some());
    assert!(seen(NESTED, &[0x1003]).is_none());
    // Two places, one within the instruction at the other: mov eax, …; ret
    let code = [0xff, 0xe0, 0xb8, 0x55, 0xc3, 0x90, 0x90, 0xc3];
    assert!(seen(&code, &[0x1002]).is_some() && seen(&code, &[0x1003]).is_some());
    for places in [[0x1002, 0x1003], [0x1003, 0x1002]] {
        assert!(seen(&code, &places).is_none());
    }
    // What it leads to is within what was reached before, or no instruction.
    assert!(seen(&[0x55, 0xb8, 0xeb, 0xfd, 0, 0, 0xc3, 0xeb, 0xfa], &[0x1007]).is_none());
    assert!(seen(&[0xc3, 0x55, 0x06], &[0x1001]).is_none());
}

#[test]
fn the_ways_through_an_operation_are_offered_where_a_table_leads_on() {
    let offered = |code: &[u8], at: u64| -> Vec<u64> {
        let f = seen(code, &[0x1002, 0x100d]).unwrap();
        f.around(at, false).iter().map(|c| c.address - 0x1000).collect()
    };
    assert_eq!(offered(INTERPRETER, 0x1002), [4, 6, 9]);
    assert_eq!(offered(INTERPRETER, 0x100d), [16]);
    let f = seen(INTERPRETER, &[0x1002]).unwrap();
    assert!(f.around(0x1002, false).iter().all(|c| c.dispatched && c.seen));
    // What the start leads to is known from that, wherever else it was seen.
    let f = seen(NESTED, &[0x1006, 0x100e]).unwrap();
    assert!(f.around(0x1006, true).iter().all(|c| !c.dispatched && !c.seen));
    // The start leads to it: test edi, edi; je 6; jmp rax; nop; ret
    let known = plain(0x1000, &[0x85, 0xff, 0x74, 0x02, 0xff, 0xe0, 0x90, 0xc3]).unwrap();
    assert!(known.around(0x1000, false).iter().all(|c| !c.dispatched));
    // Each of the ways returns: then who called it is the loop.
    let mut returns = INTERPRETER.to_vec();
    for at in [7, 11, 17] {
        returns[at..at + 2].copy_from_slice(&[0xc3, 0xc3]);
    }
    assert_eq!(offered(&returns, 0x1002), [4]);
}

#[test]
fn an_instruction_is_moved_within_what_is_known_of_its_sequence_only() {
    // Seen at the nop: the mov before it may be the target of the table, or data.
    let f = seen(INTERPRETER, &[0x1010]).unwrap();
    let at: Vec<u64> = f.around(0x1010, false).iter().map(|c| c.address).collect();
    assert_eq!(at, [0x1010]);
    // mov rbp, rsp; endbr64; push rbp; ret: what may be jumped to begins a sequence.
    let lands = [0x48, 0x89, 0xe5, 0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0xc3];
    assert_eq!(plain(0, &lands).unwrap().entry(), None);
}

#[test]
fn a_call_in_compiled_code_may_be_its_end() {
    // loop: { call [r13+8]; test eax, eax; je leave; dec ebx; jne loop }; ret; leave: call [r13+16], and a table: 06 is no instruction
    let code = [
        0x41, 0xff, 0x55, 0x08, // 0 call [r13+8]
        0x85, 0xc0, // 4 test eax, eax
        0x74, 0x05, // 6 je 13
        0xff, 0xcb, // 8 dec ebx
        0x75, 0xf4, // 10 jne 0
        0xc3, // 12 ret
        0x41, 0xff, 0x55, 0x10, // 13 call [r13+16]
        0x55, 0x06, 0x00, // 17 what looks like push rbp, and no instruction
    ];
    let made = Function::decode_made(0x1000, &code, &[0x1000]).unwrap();
    assert!(made.is_boundary(0x1004) && made.is_boundary(0x100d));
    assert!(
        !made.is_boundary(0x1011),
        "nothing of what was followed into the table stays"
    );
    assert_eq!(made.loops.len(), 1);
    // What jumps lead to is code for certain.
    let mut odd = code;
    odd[13] = 0x06;
    assert!(Function::decode_made(0x1000, &odd, &[0x1004]).is_none());
    // Where a function is known to begin its calls are known as well.
    assert!(plain(0x1000, &code).is_none());
    // Where the bytes end within an instruction they were cut there, as they may be anywhere.
    let cut = [&code[..13], &[0xe9, 0x00]].concat();
    let made = Function::decode_made(0x1000, &cut, &[0x1000]).unwrap();
    assert!(made.is_boundary(0x100c) && !made.is_boundary(0x100d));
    assert!(
        plain(0x1000, &[0x55, 0xe9, 0x00]).is_none(),
        "of a function all bytes are known"
    );
    // … but not where one begins within it.
    assert!(Function::decode_made(0x1000, &[0x90, 0xe9, 0xc3], &[0x1002, 0x1000]).is_none());
    // What was seen goes before what stands behind a call: with the bytes read from there on, je would begin within an instruction.
    let mut other = code;
    other[4] = 0xb8;
    let made = Function::decode_made(0x1000, &other, &[0x1000, 0x1006]).unwrap();
    assert!(made.is_boundary(0x1000) && made.is_boundary(0x1006) && !made.is_boundary(0x1004));
}

#[test]
fn code_that_leads_on_and_on_behind_calls_does_not_keep_us_busy() {
    // Links of `jnz over; call rax; over: nop`, of which each leads on to the next, and the last to what is no instruction; then `call rax; ret`.
    let chain = |links: usize| -> Vec<u8> {
        let mut code = [0x75, 0x02, 0xff, 0xd0, 0x90].repeat(links);
        code.extend(vec![0x90; links]);
        code.extend([0x06, 0xff, 0xd0, 0xc3]);
        code
    };
    // Seen at its calls, what stands behind each of which is followed to the end and taken back.
    let is_followed_to_the_last = |links: usize| {
        let code = chain(links);
        let last = 0x1000 + code.len() as u64 - 3;
        let calls = (0..links as u64).map(|link| 0x1000 + 5 * link + 2);
        let seen: Vec<u64> = calls.chain([last]).collect();
        let made = Function::decode_made(0x1000, &code, &seen).unwrap();
        assert!(seen.iter().all(|at| made.is_boundary(*at)), "what was seen stays");
        made.is_boundary(last + 2)
    };
    assert!(is_followed_to_the_last(3));
    assert!(!is_followed_to_the_last(200));
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
    // Nobody knows what is done behind a table: mov eax, [rdi]; test eax, eax; je 8; jmp rax; 8: jmp 0
    assert!(!waits(&[
        0x8b, 0x07, 0x85, 0xc0, 0x74, 0x02, 0xff, 0xe0, 0xeb, 0xf6
    ]));
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
        places in proptest::collection::vec(0xff8u64..0x1198, 0..4),
    ) {
        if let Some(f) = seen(&code, &places) {
            for place in places {
                let within = (0x1000..0x1000 + code.len() as u64).contains(&place);
                proptest::prop_assert!(!within || f.is_boundary(place));
            }
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

#[test]
fn an_address_behind_a_call_is_told_from_others() {
    // call rel32; call rax; call [rbx+8]; call [rip+x]; call r10
    let calls: [&[u8]; 5] = [
        &[0x90, 0xe8, 1, 2, 3, 4],
        &[0x90, 0xff, 0xd0],
        &[0xff, 0x53, 0x08],
        &[0xff, 0x15, 1, 0, 0, 0],
        &[0x41, 0xff, 0xd2],
    ];
    for call in calls {
        assert!(follows_a_call(call), "{call:x?}");
    }
    // jmp rax; mov; push; nothing
    let others: [&[u8]; 4] = [&[0x90, 0xff, 0xe0], &[0x48, 0x89, 0xd8], &[0x55], &[]];
    for other in others {
        assert!(!follows_a_call(other), "{other:x?}");
    }
    assert_eq!(length(&[0x48, 0x89, 0xd8, 0x90]), Some(3));
    assert_eq!(length(&[0x48]), None);
}
