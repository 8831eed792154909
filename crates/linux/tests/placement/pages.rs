//! Pages.

use crate::victim::{Victim, masks};
use crate::{Hands, drive, is_root, skipped};
use homeostat_kernel::clock::MonotonicClock;
use homeostat_kernel::memory::{BASE_PAGE, PIECE};
use homeostat_kernel::numa::{CpuMask, PageStatus};
use homeostat_model::action::{PageMove, Target};
use homeostat_model::{Action, ActionId, Bytes, CpuId, Direction, NodeId, ProcessId, UndoRecord};
use homeostat_platform::{Effectors, PlatformError, conformance};
use std::collections::BTreeMap;
use std::time::Instant;

const PAGES: u64 = PIECE / BASE_PAGE;

/// Nodes with memory, in order.
fn nodes() -> Vec<u32> {
    let text = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    text.trim()
        .split(',')
        .filter(|part| !part.is_empty())
        .flat_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            first.parse::<u32>().unwrap()..=last.parse::<u32>().unwrap()
        })
        .collect()
}

/// Two nodes with memory, if there are two.
fn two_nodes() -> Option<(u32, u32)> {
    if !is_root() {
        return None;
    }
    match nodes().as_slice() {
        [first, second, ..] => Some((*first, *second)),
        _ => {
            eprintln!("skipped: one NUMA node with memory; make vm-test has several");
            None
        }
    }
}

fn action(node: u32, bytes: u64) -> Action {
    Action {
        id: ActionId(2),
        effector: "page_placement".into(),
        workload: "victim".into(),
        target: Target::Pages(PageMove {
            node: NodeId(node),
            bytes: Bytes(bytes),
            shared: false,
        }),
        arguments: BTreeMap::from([
            ("duty".to_owned(), "1".to_owned()),
            ("free_memory_min".to_owned(), "0".to_owned()),
        ]),
        why: "test".into(),
    }
}

fn with_argument(mut action: Action, name: &str, value: impl ToString) -> Action {
    action.arguments.insert(name.to_owned(), value.to_string());
    action
}

fn with_shared(mut action: Action) -> Action {
    if let Target::Pages(wanted) = &mut action.target {
        wanted.shared = true;
    }
    action
}

const ALL: u64 = 1 << 40;

/// The record of an action whose plan is whole: a plan is bounded in time, and a busy machine may need several attempts.
fn planned(hands: &mut Hands, action: &Action) -> UndoRecord {
    for _ in 0..100 {
        let record = hands.prepare(action).unwrap();
        if !["unseen_bytes", "processes_unseen"]
            .iter()
            .any(|name| record.found.contains_key(*name))
        {
            return record;
        }
    }
    panic!("the machine is too busy to make a plan");
}

fn on(node: u32, pages: u64) -> Vec<PageStatus> {
    vec![PageStatus::On(node); pages as usize]
}

fn count_on(victim: &Victim, node: u32) -> u64 {
    let there = |s: &&PageStatus| **s == PageStatus::On(node);
    victim.nodes().iter().filter(there).count() as u64
}

#[test]
fn conformance_on_private_memory_of_two_nodes() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(1, 8);
    victim.tell(&format!("fill 0 3 {first}"));
    victim.tell(&format!("fill 3 5 {second}"));
    let found = victim.nodes();
    assert_eq!(found, [on(first, 3 * PAGES), on(second, 5 * PAGES)].concat());
    let (mut hands, mut fresh) = (Hands::new(&[victim.id()]), Hands::new(&[]));
    let broken = conformance::acting_patiently(&mut hands, &mut fresh, &action(first, ALL), &MonotonicClock);
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!((victim.nodes(), victim.tell("check")), (found, 0));
}

#[test]
fn pages_go_to_the_node_and_each_back_to_where_it_was_found() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 8);
    victim.tell(&format!("fill 0 3 {first}"));
    victim.tell(&format!("fill 3 5 {second}"));
    let found = victim.nodes();
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &action(first, ALL));
    assert_eq!(victim.nodes(), found, "prepare changes nothing");
    for _ in 0..3 {
        let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
        assert!(applied.total >= 5 * PAGES, "{applied:?}");
        assert!(applied.finished * 100 >= applied.total * 99, "{applied:?}");
        assert_eq!(victim.nodes(), on(first, 8 * PAGES));
        let undone = drive(&mut hands, &record, Direction::Undo).unwrap();
        assert!(undone.finished * 100 >= undone.total * 99, "{undone:?}");
        assert_eq!(victim.nodes(), found);
    }
    assert_eq!(victim.tell("check"), 0);
}

#[test]
fn a_plan_takes_no_more_than_it_was_given_and_no_more_than_its_share() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 8);
    victim.tell(&format!("fill 0 8 {second}"));
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &action(first, 3 * PIECE + 5 * BASE_PAGE + 1));
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(applied.total, 3 * PAGES + 5);
    drive(&mut hands, &record, Direction::Undo).unwrap();
    let half = with_argument(action(first, ALL), "private_share_max", 0.5);
    let record = planned(&mut hands, &half);
    let planned: u64 = record.found["planned_bytes"].parse().unwrap();
    // The process has some memory besides the area.
    assert!((3 * PIECE..=6 * PIECE).contains(&planned), "{planned}");
    drive(&mut hands, &record, Direction::Apply).unwrap();
    assert!(count_on(&victim, second) >= 2 * PAGES);
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(victim.nodes(), on(second, 8 * PAGES));
}

#[test]
fn memory_is_shared_out_among_nodes_and_comes_back_from_all_of_them() {
    let all = nodes();
    let (true, [first, second, third, ..]) = (is_root(), all.as_slice()) else {
        eprintln!("skipped: less than three NUMA nodes with memory, or not root");
        return;
    };
    let mut victim = Victim::start(0, 9);
    victim.tell(&format!("fill 0 8 {third}"));
    victim.tell(&format!("fill 8 1 {second}"));
    let found = victim.nodes();
    let mut hands = Hands::new(&[victim.id()]);
    let spread = with_argument(action(*first, ALL), "spread_over", format!("{first},{second}"));
    let record = planned(&mut hands, &spread);
    drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(count_on(&victim, *first), 4 * PAGES);
    assert_eq!(count_on(&victim, *second), 5 * PAGES, "and what lay there stays");
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!((victim.nodes(), victim.tell("check")), (found, 0));
}

/// Large pages of the host, by what can be told from outside: `AnonHugePages` of a process in pages.
fn large(victim: &Victim) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", victim.pid())).unwrap();
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix("AnonHugePages:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024 / BASE_PAGE
}

#[test]
fn large_pages_move_whole_where_the_action_says_so_and_come_back_whole() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 6);
    victim.tell(&format!("fill 0 6 {second}"));
    victim.tell("huge 2 4");
    assert_eq!(large(&victim), 4 * PAGES);
    let (found, contents) = (victim.nodes(), victim.tell("check"));
    assert_eq!((count_on(&victim, second), contents), (6 * PAGES, 0));
    let whole = with_argument(action(first, ALL), "large_pages", "move");
    let (mut hands, mut fresh) = (Hands::new(&[victim.id()]), Hands::new(&[]));
    let broken = conformance::acting_patiently(&mut hands, &mut fresh, &whole, &MonotonicClock);
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!((victim.nodes(), large(&victim)), (found.clone(), 4 * PAGES));

    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &whole);
    assert!(
        !record.found.contains_key("huge_bytes_left"),
        "{:?}",
        record.found
    );
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert!(applied.finished >= 6 * PAGES, "{applied:?}");
    assert_eq!((count_on(&victim, first), large(&victim)), (6 * PAGES, 4 * PAGES));
    // The program divides one of them meanwhile: its pages go back one by one.
    victim.tell("drop 2 1");
    victim.tell(&format!("fill 2 1 {first}"));
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!((victim.nodes(), victim.tell("check")), (found, 0));
    assert!(large(&victim) >= 3 * PAGES, "{}", large(&victim));
}

#[test]
fn a_plan_that_is_too_small_for_a_large_page_leaves_it() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 2);
    victim.tell(&format!("fill 0 2 {second}"));
    victim.tell("huge 0 2");
    let mut hands = Hands::new(&[victim.id()]);
    let whole = with_argument(action(first, PIECE + PIECE / 2), "large_pages", "move");
    let record = planned(&mut hands, &whole);
    drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!((count_on(&victim, first), large(&victim)), (PAGES, 2 * PAGES));
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(
        (count_on(&victim, second), large(&victim)),
        (2 * PAGES, 2 * PAGES)
    );
}

/// CPUs of a node.
fn cpus_of(node: u32) -> Vec<CpuId> {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let list = std::fs::read_to_string(path).unwrap();
    CpuMask::from_list(list.trim())
        .unwrap()
        .iter()
        .map(CpuId)
        .collect()
}

/// Threads to these CPUs, and memory along with them.
fn with_threads(cpus: Vec<CpuId>, memory: &str) -> Action {
    let mut action = action(0, 0);
    action.effector = "thread_placement".into();
    action.target = Target::Cpus(cpus);
    let action = with_argument(action, "memory", memory);
    with_argument(action, "memory_bytes", ALL)
}

#[test]
fn threads_and_their_memory_go_in_one_change_and_come_back_in_one() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    if cpus_of(first).is_empty() {
        eprintln!("skipped: the first node has no CPUs");
        return;
    }
    let mut victim = Victim::start(3, 6);
    victim.tell(&format!("fill 0 6 {second}"));
    victim.tell("huge 4 2");
    let found = (masks(victim.pid()), victim.nodes());
    let along = with_threads(cpus_of(first), "private");
    let (mut hands, mut fresh) = (Hands::new(&[victim.id()]), Hands::new(&[]));
    let broken = conformance::acting_patiently(&mut hands, &mut fresh, &along, &MonotonicClock);
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!((masks(victim.pid()), victim.nodes()), found);

    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &with_argument(along.clone(), "large_pages", "move"));
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    let kept = CpuMask::of(cpus_of(first).iter().map(|c| c.0)).to_string();
    assert!(masks(victim.pid()).iter().all(|(_, mask)| *mask == kept));
    assert_eq!(count_on(&victim, first), 6 * PAGES, "{applied:?}");
    assert!(
        applied.finished >= 6 * PAGES + found.0.len() as u64,
        "{applied:?}"
    );
    // From the record alone, as after kill -9.
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!((masks(victim.pid()), victim.nodes()), found);
    assert_eq!(victim.tell("check"), 0);

    // Half way: the threads are placed, the memory is on its way.
    let slow = with_argument(along, "bytes_per_second", 16 * PIECE);
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &slow);
    while count_on(&victim, first) == 0 {
        assert!(!hands.advance(&record, Direction::Apply).unwrap().done);
    }
    assert!(count_on(&victim, first) < 4 * PAGES);
    assert!(masks(victim.pid()).iter().all(|(_, mask)| *mask == kept));
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!((masks(victim.pid()), victim.nodes()), found);
}

#[test]
fn processes_that_are_split_have_their_memory_beside_them() {
    let all = nodes();
    let with_cpus: Vec<u32> = all.iter().copied().filter(|n| !cpus_of(*n).is_empty()).collect();
    let (true, [first, second, ..]) = (is_root(), with_cpus.as_slice()) else {
        eprintln!("skipped: less than two NUMA nodes with memory and CPUs, or not root");
        return;
    };
    let (mut a, mut b) = (Victim::start(0, 4), Victim::start(0, 4));
    // Most of each lies on one node, and not all of it.
    a.tell(&format!("fill 0 1 {first}"));
    a.tell(&format!("fill 1 3 {second}"));
    b.tell(&format!("fill 0 3 {first}"));
    b.tell(&format!("fill 3 1 {second}"));
    let found = (a.nodes(), b.nodes(), masks(a.pid()), masks(b.pid()));
    let cpus = [cpus_of(*first), cpus_of(*second)].concat();
    let split = with_argument(with_threads(cpus, "private"), "split_by", "process");
    let mut hands = Hands::new(&[a.id(), b.id()]);
    let record = planned(&mut hands, &split);
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(
        (a.nodes(), b.nodes()),
        (on(*second, 4 * PAGES), on(*first, 4 * PAGES)),
        "{applied:?}"
    );
    let mask = |node: u32| CpuMask::of(cpus_of(node).iter().map(|c| c.0)).to_string();
    assert!(
        masks(a.pid()).iter().all(|(_, m)| *m == mask(*second)),
        "{:?}",
        masks(a.pid())
    );
    assert!(
        masks(b.pid()).iter().all(|(_, m)| *m == mask(*first)),
        "{:?}",
        masks(b.pid())
    );
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!((a.nodes(), b.nodes(), masks(a.pid()), masks(b.pid())), found);
    assert_eq!((a.tell("check"), b.tell("check")), (0, 0));
}

#[test]
fn the_budget_of_bytes_is_never_exceeded() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 4);
    victim.tell(&format!("fill 0 4 {second}"));
    let mut hands = Hands::new(&[victim.id()]);
    let rate = 4 * PIECE;
    let record = planned(
        &mut hands,
        &with_argument(action(first, ALL), "bytes_per_second", rate),
    );
    let begun = Instant::now();
    loop {
        let progress = hands.advance(&record, Direction::Apply).unwrap();
        let moved = count_on(&victim, first) * BASE_PAGE;
        // A slice may come first and its pause after it: one slice of 20 ms ahead at most, and a call of 64 pages.
        let allowed = rate as f64 * (begun.elapsed().as_secs_f64() + 0.02) + (64 * BASE_PAGE) as f64;
        assert!((moved as f64) <= allowed, "{moved} of {allowed}");
        if progress.done {
            break;
        }
        std::thread::sleep(std::time::Duration::from_nanos(progress.pause.0));
    }
    assert!(begun.elapsed().as_secs_f64() >= 0.9 * (4 * PIECE) as f64 / rate as f64);
    assert_eq!(victim.nodes(), on(first, 4 * PAGES));
}

#[test]
fn an_undo_half_way_takes_back_what_was_moved() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 8);
    victim.tell(&format!("fill 0 8 {second}"));
    let mut hands = Hands::new(&[victim.id()]);
    let slow = with_argument(action(first, ALL), "bytes_per_second", 16 * PIECE);
    let record = planned(&mut hands, &slow);
    for _ in 0..5 {
        assert!(!hands.advance(&record, Direction::Apply).unwrap().done);
    }
    let moved = count_on(&victim, first);
    assert!(moved > 0 && moved < 8 * PAGES, "{moved}");
    // From the record alone, as after kill -9.
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!((victim.nodes(), victim.tell("check")), (on(second, 8 * PAGES), 0));
}

#[test]
fn what_somebody_else_moved_stays_there() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 8);
    victim.tell(&format!("fill 0 8 {second}"));
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &action(first, ALL));
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert!(applied.finished >= 8 * PAGES, "{applied:?}");
    // A part of it: the rest is still ours.
    victim.moved_by_a_person(0, 2, second);
    let again = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert!(skipped(&again, "moved by somebody else") >= PAGES, "{again:?}");
    assert_eq!(count_on(&victim, second), 2 * PAGES);
    // Most of it: that is a decision.
    victim.moved_by_a_person(2, 4, second);
    let error = drive(&mut hands, &record, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(victim.nodes(), on(second, 8 * PAGES));
}

#[test]
fn memory_given_back_or_on_large_pages_is_skipped() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 8);
    victim.tell(&format!("fill 0 8 {second}"));
    victim.tell("huge 6 2");
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &action(first, ALL));
    assert_eq!(record.found["huge_bytes_left"], (2 * PIECE).to_string());
    victim.tell("drop 0 1");
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(skipped(&applied, "not in memory any more"), PAGES, "{applied:?}");
    let now = victim.nodes();
    assert_eq!(now[PAGES as usize..6 * PAGES as usize], on(first, 5 * PAGES));
    assert_eq!(
        now[6 * PAGES as usize..],
        on(second, 2 * PAGES),
        "large pages stay"
    );
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(victim.nodes()[PAGES as usize..], on(second, 7 * PAGES));
}

#[test]
fn pages_that_became_large_since_are_left_whole() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 4);
    victim.tell(&format!("fill 0 4 {second}"));
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &action(first, ALL));
    victim.tell("huge 1 1");
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(skipped(&applied, "on a large page now"), PAGES, "{applied:?}");
    assert_eq!(count_on(&victim, second), PAGES);
    // One that became large at the new place goes back whole.
    victim.tell("huge 2 1");
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!((victim.nodes(), victim.tell("check")), (on(second, 4 * PAGES), 0));
}

#[test]
fn shared_memory_moves_only_when_the_action_says_so_and_once_for_all_processes() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let file = rustix::fs::memfd_create("homeostat-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4 * PIECE).unwrap();
    let mut a = Victim::start_on(0, 4, Some(&file));
    let mut b = Victim::start_on(0, 4, Some(&file));
    a.tell(&format!("fill 0 4 {second}"));
    b.tell("fill 0 4");
    let members = [a.id(), b.id()];
    let mut hands = Hands::new(&members);
    match hands.prepare(&action(first, ALL)) {
        // Some pages of the programs themselves may lie there.
        Ok(record) => {
            drive(&mut hands, &record, Direction::Apply).unwrap();
            assert_eq!(a.nodes(), on(second, 4 * PAGES));
            drive(&mut hands, &record, Direction::Undo).unwrap();
        }
        Err(error) => assert!(matches!(error, PlatformError::Busy { .. }), "{error}"),
    }
    let record = planned(&mut hands, &with_shared(action(first, ALL)));
    let shared: Vec<&String> = record.found.keys().filter(|k| k.starts_with("shared.")).collect();
    assert_eq!(shared.len(), 1, "{shared:?}");
    drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(
        (a.nodes(), b.nodes()),
        (on(first, 4 * PAGES), on(first, 4 * PAGES))
    );
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!(
        (a.nodes(), b.nodes()),
        (on(second, 4 * PAGES), on(second, 4 * PAGES))
    );
    assert_eq!((a.tell("check"), b.tell("check")), (0, 0));
}

#[test]
fn pages_shared_with_a_forked_process_stay() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 2);
    victim.tell(&format!("fill 0 2 {second}"));
    victim.tell("fork");
    let mut hands = Hands::new(&[victim.id()]);
    let record = planned(&mut hands, &action(first, ALL));
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert!(
        skipped(&applied, "shared with a forked process") > 0,
        "{applied:?}"
    );
    assert_eq!(victim.nodes(), on(second, 2 * PAGES));
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(victim.nodes(), on(second, 2 * PAGES));
}

#[test]
fn the_processes_of_a_workload_take_turns() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let (mut a, mut b) = (Victim::start(0, 4), Victim::start(0, 4));
    for victim in [&mut a, &mut b] {
        victim.tell(&format!("fill 0 4 {second}"));
    }
    let mut hands = Hands::new(&[a.id(), b.id()]);
    let record = planned(&mut hands, &action(first, 4 * PIECE));
    drive(&mut hands, &record, Direction::Apply).unwrap();
    for victim in [&a, &b] {
        let there = count_on(victim, first);
        assert!((PAGES..=3 * PAGES).contains(&there), "{there}");
    }
    // One of them ends: what is owed to it is void, the other gets all back.
    a.kill();
    let undone = drive(&mut hands, &record, Direction::Undo).unwrap();
    assert!(skipped(&undone, "process ended") > 0, "{undone:?}");
    assert_eq!(b.nodes(), on(second, 4 * PAGES));
}

#[test]
fn a_node_without_room_is_busy_and_one_that_fills_up_gets_a_part() {
    let Some((first, second)) = two_nodes() else {
        return;
    };
    let mut victim = Victim::start(0, 4);
    victim.tell(&format!("fill 0 4 {second}"));
    let mut hands = Hands::new(&[victim.id()]);
    let outcome = hands.prepare(&with_argument(action(first, ALL), "free_memory_min", 1u64 << 50));
    assert!(matches!(outcome, Err(PlatformError::Busy { .. })), "{outcome:?}");
    assert_eq!(victim.nodes(), on(second, 4 * PAGES));
}

/// These need one node only.
fn has_numa() -> bool {
    let has = is_root() && std::path::Path::new("/proc/self/numa_maps").exists() && !nodes().is_empty();
    if !has {
        eprintln!("skipped: no NUMA in this kernel, or not root");
    }
    has
}

#[test]
fn memory_that_lies_there_already_leaves_nothing_to_move() {
    if !has_numa() || nodes().len() > 1 {
        return;
    }
    let mut victim = Victim::start(0, 2);
    victim.tell("fill 0 2");
    let outcome = Hands::new(&[victim.id()]).prepare(&action(nodes()[0], ALL));
    assert!(
        matches!(&outcome, Err(PlatformError::Busy { why, .. }) if why.contains("lies elsewhere")),
        "{outcome:?}"
    );
}

#[test]
fn a_memory_policy_is_a_person_s_choice() {
    if !has_numa() {
        return;
    }
    let node = nodes()[0];
    let outcome = |victim: &Victim| Hands::new(&[victim.id()]).prepare(&action(node, ALL));
    let by_person = Victim::start_bound(node);
    let mut by_program = Victim::start(0, 2);
    by_program.tell("fill 0 2");
    by_program.tell(&format!("policy {node}"));
    for victim in [&by_person, &by_program] {
        let outcome = outcome(victim);
        assert!(
            matches!(&outcome, Err(PlatformError::Conflict { found, .. }) if found.contains("bind")),
            "{outcome:?}"
        );
    }
}

#[test]
fn impossible_moves_are_rejected_and_ended_processes_have_vanished() {
    if !has_numa() {
        return;
    }
    let mut victim = Victim::start(0, 1);
    let mut hands = Hands::new(&[victim.id()]);
    let mut nothing = action(nodes()[0], ALL);
    nothing.target = Target::Nothing;
    for wrong in [
        nothing,
        action(1023, ALL),
        with_argument(action(nodes()[0], ALL), "duty", 0),
    ] {
        let outcome = hands.prepare(&wrong);
        assert!(
            matches!(outcome, Err(PlatformError::Rejected { .. })),
            "{outcome:?}"
        );
    }
    let other = ProcessId {
        start_ticks: victim.id().start_ticks + 1,
        ..victim.id()
    };
    victim.kill();
    for members in [&[][..], &[other]] {
        let outcome = Hands::new(members).prepare(&action(nodes()[0], ALL));
        assert!(
            matches!(outcome, Err(PlatformError::Vanished { .. })),
            "{outcome:?}"
        );
    }
}
