//! Threads.

use crate::victim::{Victim, id_of, masks};
use crate::{Hands, drive, is_root, skipped};
use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_kernel::numa::{CpuMask, affinity, set_affinity};
use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, CpuId, Direction, ProcessId, UndoRecord, WorkloadId};
use homeostat_platform::{Effectors, PlatformError, Reached, conformance};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The first two CPUs on which a new process may run, if there are two.
fn two_cpus() -> Option<(u32, u32)> {
    if !is_root() {
        return None;
    }
    let own = affinity(std::process::id() as i32).unwrap();
    let mut cpus = own.iter();
    let found = cpus.next().zip(cpus.next());
    if found.is_none() {
        eprintln!("skipped: there is one CPU only");
    }
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    if own.to_string() != online.trim() {
        eprintln!("skipped: this test process itself is bound to CPUs {own}");
        return None;
    }
    found
}

fn action(cpus: &[u32]) -> Action {
    Action {
        id: ActionId(1),
        effector: "thread_placement".into(),
        workload: "victim".into(),
        target: Target::Cpus(cpus.iter().map(|c| CpuId(*c)).collect()),
        arguments: BTreeMap::new(),
        why: "test".into(),
    }
}

/// Reviews until it is as expected. One review has little time and may not come round.
fn reviews(
    hands: &mut Hands,
    members: &[ProcessId],
    expected: impl Fn(&[(WorkloadId, String)]) -> bool,
) -> Vec<(WorkloadId, String)> {
    let mut told = Vec::new();
    for _ in 0..100 {
        told = hands.review(members);
        if expected(&told) {
            break;
        }
    }
    told
}

fn all_on(pid: i32, list: &str) {
    let found = masks(pid);
    assert!(found.iter().all(|(_, mask)| mask == list), "{found:?}");
}

#[test]
fn conformance_on_the_threads_of_a_process() {
    let Some((first, _)) = two_cpus() else { return };
    let victim = Victim::start(6, 0);
    let found = masks(victim.pid());
    assert!(found.len() >= 8);
    let (mut hands, mut fresh) = (Hands::new(&[victim.id()]), Hands::new(&[]));
    let broken = conformance::acting_patiently(&mut hands, &mut fresh, &action(&[first]), &MonotonicClock);
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!(masks(victim.pid()), found);
}

#[test]
fn every_thread_is_placed_and_each_gets_its_mask_back() {
    let Some((_, second)) = two_cpus() else { return };
    let victim = Victim::start(6, 0);
    let found = masks(victim.pid());
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[second])).unwrap();
    assert_eq!(masks(victim.pid()), found, "prepare changes nothing");
    for _ in 0..3 {
        let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
        assert_eq!(applied.finished, found.len() as u64);
        assert_eq!((applied.total, applied.skipped.len()), (applied.finished, 0));
        all_on(victim.pid(), &second.to_string());
        let undone = drive(&mut hands, &record, Direction::Undo).unwrap();
        assert_eq!(undone.finished, found.len() as u64);
        assert_eq!(masks(victim.pid()), found);
    }
}

#[test]
fn those_born_while_it_is_in_force_are_set_free_with_the_others_also_after_a_crash() {
    let Some((first, _)) = two_cpus() else { return };
    let mut victim = Victim::start(2, 0);
    let everywhere = masks(victim.pid())[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    for _ in 0..3 {
        victim.tell("thread");
    }
    let child = victim.tell("fork") as i32;
    all_on(victim.pid(), &first.to_string());
    all_on(child, &first.to_string());
    // Nobody but the record knows: as after kill -9.
    let mut fresh = Hands::new(&[]);
    let undone = drive(&mut fresh, &record, Direction::Undo).unwrap();
    all_on(victim.pid(), &everywhere);
    all_on(child, &everywhere);
    assert_eq!(
        undone.finished,
        masks(victim.pid()).len() as u64 + 1,
        "{undone:?}"
    );
}

#[test]
fn a_process_that_became_another_program_still_gets_its_mask_back() {
    let Some((first, _)) = two_cpus() else { return };
    let mut victim = Victim::start(0, 0);
    let everywhere = masks(victim.pid())[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    victim.send("exec");
    let comm = format!("/proc/{}/comm", victim.pid());
    for _ in 0..1000 {
        if std::fs::read_to_string(&comm).unwrap().trim() == "sleep" {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    all_on(victim.pid(), &first.to_string());
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    all_on(victim.pid(), &everywhere);
}

#[test]
fn a_review_places_new_processes_of_the_workload_and_the_undo_finds_them() {
    let Some((first, _)) = two_cpus() else { return };
    let stranger = Victim::start(0, 0);
    // Start times are counted in ticks of 10 ms.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let mut victim = Victim::start(1, 0);
    let everywhere = masks(victim.pid())[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    let child = victim.tell("fork") as i32;
    // As if it had been forked by a thread that was not placed yet.
    set_affinity(child, &CpuMask::from_list(&everywhere).unwrap()).unwrap();
    let members = [victim.id(), id_of(child)];
    reviews(&mut hands, &members, |_| masks(child)[0].1 == first.to_string());
    all_on(child, &first.to_string());
    assert!(hands.review(&members).is_empty());
    // One that was there before the record but is not in it is not touched: no undo would find it.
    for _ in 0..20 {
        assert!(hands.review(&[victim.id(), stranger.id()]).is_empty());
    }
    all_on(stranger.pid(), &everywhere);
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    all_on(victim.pid(), &everywhere);
    all_on(child, &everywhere);
}

#[test]
fn what_a_person_bound_before_is_left_alone() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(3, 0);
    let worker = masks(victim.pid())[2].0;
    victim.tell(&format!("bind {worker} {second}"));
    let found = masks(victim.pid());
    let error = Hands::new(&[victim.id()]).prepare(&action(&[first])).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Conflict { what, .. } if what.contains(&format!("thread {worker}"))),
        "{error}"
    );
    assert_eq!(masks(victim.pid()), found);
}

/// A second placement of the same workload, on top of the first.
fn over(cpus: &[u32]) -> Action {
    Action {
        id: ActionId(2),
        ..action(cpus)
    }
}

#[test]
fn one_that_lies_over_another_gives_back_what_that_gave_and_that_what_was_found_first() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(3, 0);
    let found = masks(victim.pid());
    let workload = WorkloadId::new("victim");
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    let above = hands.prepare(&over(&[second])).unwrap();
    assert_eq!(above.found["over"], "1");
    all_on(victim.pid(), &first.to_string());
    for _ in 0..3 {
        drive(&mut hands, &above, Direction::Apply).unwrap();
        all_on(victim.pid(), &second.to_string());
        assert_eq!(
            hands.registry.placed_on(&workload),
            [CpuMask::of([first]), CpuMask::of([second])],
            "neither is a person's choice"
        );
        // Neither finds anything to object to, and who is born is in order.
        victim.tell("thread");
        let child = id_of(victim.tell("fork") as i32);
        assert_eq!(
            reviews(&mut hands, &[victim.id(), child], |told| !told.is_empty()),
            []
        );
        drive(&mut hands, &above, Direction::Undo).unwrap();
        all_on(victim.pid(), &first.to_string());
        all_on(child.pid, &first.to_string());
        assert_eq!(
            reviews(&mut hands, &[victim.id(), child], |told| !told.is_empty()),
            []
        );
        // As a probe of the first does it.
        drive(&mut hands, &below, Direction::Undo).unwrap();
        all_on(child.pid, &found[0].1);
        drive(&mut hands, &below, Direction::Apply).unwrap();
        all_on(victim.pid(), &first.to_string());
    }
    drive(&mut hands, &below, Direction::Undo).unwrap();
    all_on(victim.pid(), &found[0].1);
    assert_eq!(hands.registry.placed_on(&workload), []);
}

#[test]
fn what_another_lies_over_is_not_moved_before_that_is_gone() {
    let Some((first, second)) = two_cpus() else { return };
    let victim = Victim::start(2, 0);
    let found = masks(victim.pid());
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    let above = hands.prepare(&over(&[second])).unwrap();
    drive(&mut hands, &above, Direction::Apply).unwrap();
    let error = hands.advance(&below, Direction::Undo).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Busy { why, .. } if why.contains("action 2 lies over it")),
        "{error}"
    );
    // Sent back on before its undo could begin, it is on.
    assert!(hands.advance(&below, Direction::Apply).unwrap().done);
    all_on(victim.pid(), &second.to_string());
    drive(&mut hands, &above, Direction::Undo).unwrap();
    drive(&mut hands, &below, Direction::Undo).unwrap();
    assert_eq!(masks(victim.pid()), found);
}

#[test]
fn who_was_born_between_two_placements_is_placed_again_by_both() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(2, 0);
    let everywhere = masks(victim.pid())[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    let worker = victim.tell("fork") as i32;
    hands.members = vec![victim.id(), id_of(worker)];
    let above = hands.prepare(&over(&[second])).unwrap();
    for _ in 0..3 {
        // As a probe of the first switches both, with no review in between.
        drive(&mut hands, &above, Direction::Apply).unwrap();
        all_on(worker, &second.to_string());
        drive(&mut hands, &above, Direction::Undo).unwrap();
        all_on(worker, &first.to_string());
        drive(&mut hands, &below, Direction::Undo).unwrap();
        all_on(worker, &everywhere);
        all_on(victim.pid(), &everywhere);
        drive(&mut hands, &below, Direction::Apply).unwrap();
        all_on(worker, &first.to_string());
    }
    drop(hands);
    drive(&mut Hands::new(&[]), &below, Direction::Undo).unwrap();
    all_on(worker, &everywhere);
    all_on(victim.pid(), &everywhere);
}

/// The record of a placement whose memory cannot go back: what it says of that is not understood.
fn with_memory_that_is_stuck(record: &UndoRecord) -> UndoRecord {
    let mut record = record.clone();
    record
        .found
        .insert("private.1.1".into(), "no plan that anybody could follow".into());
    record
}

#[test]
fn threads_that_are_back_keep_nobody_though_their_memory_finds_no_room() {
    let Some((first, second)) = two_cpus() else { return };
    let victim = Victim::start(2, 0);
    let found = masks(victim.pid());
    let everywhere = found[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    let above = hands.prepare(&over(&[second])).unwrap();
    drive(&mut hands, &above, Direction::Apply).unwrap();
    let stuck = with_memory_that_is_stuck(&above);
    for _ in 0..3 {
        drive(&mut hands, &stuck, Direction::Undo).unwrap_err();
        all_on(victim.pid(), &first.to_string());
    }
    // The threads of the one below go back, its memory waits for that which was moved on from there.
    let also = with_memory_that_is_stuck(&below);
    let error = drive(&mut hands, &also, Direction::Undo).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Busy { why, .. } if why.contains("what action 2 moved on goes back first")),
        "{error}"
    );
    assert_eq!(masks(victim.pid()), found);
    // Nobody is told to have overruled what is off.
    assert_eq!(reviews(&mut hands, &[victim.id()], |told| !told.is_empty()), []);
    drive(&mut hands, &stuck, Direction::Undo).unwrap_err();
    assert_eq!(masks(victim.pid()), found);
    // Both are done once memory has gone back.
    drive(&mut hands, &above, Direction::Undo).unwrap();
    drive(&mut hands, &below, Direction::Undo).unwrap();
    assert_eq!(masks(victim.pid()), found);
    assert_eq!(everywhere, masks(victim.pid())[0].1);
}

#[test]
fn a_restart_with_memory_that_finds_no_room_leaves_no_placement_that_nobody_made() {
    let Some((first, second)) = two_cpus() else { return };
    let victim = Victim::start(2, 0);
    let found = masks(victim.pid());
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    let above = hands.prepare(&over(&[second])).unwrap();
    drive(&mut hands, &above, Direction::Apply).unwrap();
    drop(hands);
    // As recovery does it: all are told first, the newest is undone first, and what is still owed is handed on.
    let stuck = with_memory_that_is_stuck(&above);
    let mut fresh = Hands::new(&[]);
    fresh.inherit(&below, Reached::Made);
    fresh.inherit(&stuck, Reached::Made);
    let early = fresh.advance(&below, Direction::Undo).unwrap_err();
    assert!(matches!(&early, PlatformError::Busy { why, .. } if why.contains("action 2 lies over it")));
    drive(&mut fresh, &stuck, Direction::Undo).unwrap_err();
    drive(&mut fresh, &below, Direction::Undo).unwrap();
    assert_eq!(masks(victim.pid()), found);
    fresh.adopt(&stuck);
    assert_eq!(fresh.registry.placed_on(&"victim".into()), []);
    assert_eq!(reviews(&mut fresh, &[victim.id()], |told| !told.is_empty()), []);
    // Restarted again, with the one below gone: nobody is put back into its place.
    let mut again = Hands::new(&[]);
    again.inherit(&stuck, Reached::Made);
    set_affinity(victim.pid(), &CpuMask::from_list(&second.to_string()).unwrap()).unwrap();
    drive(&mut again, &stuck, Direction::Undo).unwrap_err();
    assert_eq!(masks(victim.pid()), found);
}

#[test]
fn an_undo_that_is_turned_round_by_a_conflict_is_made_again_from_the_threads_on() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(2, 0);
    let found = masks(victim.pid());
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[first])).unwrap();
    let stuck = with_memory_that_is_stuck(&record);
    drive(&mut hands, &record, Direction::Apply).unwrap();
    drive(&mut hands, &stuck, Direction::Undo).unwrap_err();
    assert_eq!(masks(victim.pid()), found);
    // Sent on again, which places some of them and meets somebody's choice.
    victim.tell(&format!("bind {} {second}", found[1].0));
    drive(&mut hands, &record, Direction::Apply).unwrap_err();
    drive(&mut hands, &record, Direction::Undo).unwrap();
    let left = masks(victim.pid());
    assert!(
        left.iter()
            .all(|(id, mask)| *mask != first.to_string() || *id == found[1].0),
        "{left:?}"
    );
}

/// After a crash at any point of two placements, the records alone, newest first, give everything back.
#[test]
fn two_that_lie_over_each_other_are_undone_from_their_records_wherever_it_crashed() {
    let Some((first, second)) = two_cpus() else { return };
    for crash in 0..5 {
        let mut victim = Victim::start(2, 0);
        let everywhere = masks(victim.pid())[0].1.clone();
        let mut hands = Hands::new(&[victim.id()]);
        let below = hands.prepare(&action(&[first])).unwrap();
        drive(&mut hands, &below, Direction::Apply).unwrap();
        let above = hands.prepare(&over(&[second])).unwrap();
        let mut child = None;
        if crash >= 1 {
            drive(&mut hands, &above, Direction::Apply).unwrap();
            child = Some(victim.tell("fork") as i32);
        }
        if crash >= 2 {
            drive(&mut hands, &above, Direction::Undo).unwrap();
        }
        if crash >= 3 {
            drive(&mut hands, &below, Direction::Undo).unwrap();
        }
        if crash >= 4 {
            drive(&mut hands, &below, Direction::Apply).unwrap();
        }
        drop(hands);
        let mut fresh = Hands::new(&[]);
        drive(&mut fresh, &above, Direction::Undo).unwrap();
        drive(&mut fresh, &below, Direction::Undo).unwrap();
        all_on(victim.pid(), &everywhere);
        if let Some(child) = child {
            all_on(child, &everywhere);
        }
    }
}

#[test]
fn who_binds_a_thread_under_two_placements_wins_over_both() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(3, 0);
    let found = masks(victim.pid());
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    // Bound before the second is made: that is not made.
    let worker = found[2].0;
    victim.tell(&format!("bind {worker} {second}"));
    let error = hands.prepare(&over(&[second])).unwrap_err();
    assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
    victim.tell(&format!("bind {worker} {first}"));
    // Set free while both are in force: told, and kept by both undos.
    let above = hands.prepare(&over(&[second])).unwrap();
    drive(&mut hands, &above, Direction::Apply).unwrap();
    set_affinity(worker, &CpuMask::from_list(&found[2].1).unwrap()).unwrap();
    let told = reviews(&mut hands, &[victim.id()], |told| !told.is_empty());
    assert!(told.len() == 1 && told[0].1.contains("somebody else"), "{told:?}");
    let undone = drive(&mut hands, &above, Direction::Undo).unwrap();
    assert_eq!(skipped(&undone, "changed by somebody else"), 1);
    drive(&mut hands, &below, Direction::Undo).unwrap();
    assert_eq!(masks(victim.pid()), found);
}

#[test]
fn a_newcomer_that_inherited_neither_is_placed_with_the_others_and_set_free_with_them() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(1, 0);
    let everywhere = masks(victim.pid())[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let below = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &below, Direction::Apply).unwrap();
    let above = hands.prepare(&over(&[second])).unwrap();
    drive(&mut hands, &above, Direction::Apply).unwrap();
    let child = victim.tell("fork") as i32;
    set_affinity(child, &CpuMask::from_list(&everywhere).unwrap()).unwrap();
    let members = [victim.id(), id_of(child)];
    let told = reviews(&mut hands, &members, |told| {
        !told.is_empty() || masks(child)[0].1 == second.to_string()
    });
    assert_eq!(told, []);
    all_on(child, &second.to_string());
    drop(hands);
    let mut fresh = Hands::new(&[]);
    drive(&mut fresh, &above, Direction::Undo).unwrap();
    drive(&mut fresh, &below, Direction::Undo).unwrap();
    all_on(victim.pid(), &everywhere);
    all_on(child, &everywhere);
}

#[test]
fn a_memory_policy_is_a_person_s_choice() {
    let Some((first, _)) = two_cpus() else { return };
    if !Path::new("/proc/self/numa_maps").exists() {
        eprintln!("skipped: a kernel without NUMA");
        return;
    }
    let victim = Victim::start_bound(0);
    let error = Hands::new(&[victim.id()]).prepare(&action(&[first])).unwrap_err();
    assert!(
        matches!(&error, PlatformError::Conflict { found, .. } if found.contains("bind")),
        "{error}"
    );
}

#[test]
fn who_binds_a_thread_later_wins() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(4, 0);
    let found = masks(victim.pid());
    let everywhere = found[0].1.clone();
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    let worker = found[3].0;
    victim.tell(&format!("bind {worker} {second}"));
    // Noticed by the next review, with words that strategies understand.
    let told = reviews(&mut hands, &[victim.id()], |told| !told.is_empty());
    assert_eq!(told.len(), 1);
    assert!(
        told[0].1.contains("affinity") && told[0].1.contains("somebody else"),
        "{told:?}"
    );
    let error = drive(&mut hands, &record, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
    let undone = drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(skipped(&undone, "changed by somebody else"), 1);
    for (thread, mask) in masks(victim.pid()) {
        let expected = if thread == worker {
            second.to_string()
        } else {
            everywhere.clone()
        };
        assert_eq!(mask, expected, "{thread}");
    }
    // A second undo, from the record alone, changes nothing of that.
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    assert_eq!(affinity(worker), Ok(CpuMask::of([second])));
}

#[test]
fn who_sets_a_thread_free_wins_too() {
    let Some((first, _)) = two_cpus() else { return };
    let victim = Victim::start(4, 0);
    let found = masks(victim.pid());
    let mut hands = Hands::new(&[victim.id()]);
    let record = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    set_affinity(found[1].0, &CpuMask::from_list(&found[1].1).unwrap()).unwrap();
    let error = drive(&mut hands, &record, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
    drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(masks(victim.pid()), found);
}

/// A daemon that was stopped with its changes kept and started again: what it set before is not a person's choice.
#[test]
fn a_placement_that_was_left_in_force_is_known_again_and_looked_after() {
    let Some((first, second)) = two_cpus() else { return };
    let mut victim = Victim::start(2, 0);
    let found = masks(victim.pid());
    let workload = WorkloadId::new("victim");
    let mut before = Hands::new(&[victim.id()]);
    let record = before.prepare(&action(&[first])).unwrap();
    drive(&mut before, &record, Direction::Apply).unwrap();
    assert_eq!(before.registry.placed_on(&workload), [CpuMask::of([first])]);
    drop(before);

    let mut after = Hands::new(&[]);
    assert_eq!(after.registry.placed_on(&workload), []);
    assert_eq!(after.registry.masks_of(&record), [CpuMask::of([first])]);
    after.adopt(&record);
    assert_eq!(after.registry.placed_on(&workload), [CpuMask::of([first])]);
    all_on(victim.pid(), &first.to_string());
    // Nothing to say while all is as it was left; newcomers that inherited the mask are in order.
    victim.tell("thread");
    let child = id_of(victim.tell("fork") as i32);
    let members = [victim.id(), child];
    assert_eq!(reviews(&mut after, &members, |told| !told.is_empty()), []);
    // A person's choice is noticed as by the process that made the change.
    set_affinity(found[1].0, &CpuMask::of([second])).unwrap();
    let told = reviews(&mut after, &members, |told| !told.is_empty());
    assert!(told.len() == 1 && told[0].1.contains("somebody else"), "{told:?}");
    let undone = drive(&mut after, &record, Direction::Undo).unwrap();
    assert_eq!(skipped(&undone, "changed by somebody else"), 1);
    assert_eq!(after.registry.placed_on(&workload), []);
    all_on(child.pid, &found[0].1);

    // Of another boot it is nothing of ours.
    let mut old = record.clone();
    old.boot_id = "another".into();
    assert_eq!(after.registry.masks_of(&old), []);
    after.adopt(&old);
    assert_eq!(after.registry.placed_on(&workload), []);
}

/// CPUs by last-level cache, of those that have the same CPU first.
fn caches() -> Vec<CpuMask> {
    let machine = homeostat_sensors::topology::read(&Root::default()).unwrap();
    let mut by_cache: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    for cpu in &machine.cpus {
        by_cache.entry(cpu.llc).or_default().push(cpu.id.0);
    }
    by_cache.into_values().map(CpuMask::of).collect()
}

#[test]
fn each_process_is_kept_on_a_cache_of_its_own_and_all_get_their_masks_back() {
    let (Some(_), caches) = (two_cpus(), caches()) else {
        return;
    };
    if caches.len() < 2 {
        eprintln!("skipped: one last-level cache; make vm-test has several");
        return;
    }
    let mut victims: Vec<Victim> = (0..2 * caches.len()).map(|_| Victim::start(1, 0)).collect();
    let found: Vec<_> = victims.iter().map(|v| masks(v.pid())).collect();
    let members: Vec<ProcessId> = victims.iter().map(Victim::id).collect();
    let all: Vec<u32> = caches.iter().flat_map(CpuMask::iter).collect();
    let mut split = action(&all);
    split.arguments.insert("split_by".into(), "process".into());
    let (mut hands, mut fresh) = (Hands::new(&members), Hands::new(&[]));
    let broken = conformance::acting_patiently(&mut hands, &mut fresh, &split, &MonotonicClock);
    assert_eq!(broken, Vec::<String>::new());
    let now: Vec<_> = victims.iter().map(|v| masks(v.pid())).collect();
    assert_eq!(now, found);

    let mut hands = Hands::new(&members);
    let record = hands.prepare(&split).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    let mut held: BTreeMap<String, usize> = BTreeMap::new();
    for victim in &victims {
        let masks = masks(victim.pid());
        let first = masks[0].1.clone();
        assert!(masks.iter().all(|(_, mask)| *mask == first), "{masks:?}");
        *held.entry(first).or_default() += 1;
    }
    let wanted: BTreeMap<String, usize> = caches.iter().map(|cpus| (cpus.to_string(), 2)).collect();
    assert_eq!(held, wanted, "as many on each as on the others");
    let placed: std::collections::BTreeSet<CpuMask> = hands
        .registry
        .placed_on(&WorkloadId::new("victim"))
        .into_iter()
        .collect();
    assert_eq!(placed, caches.iter().cloned().collect());
    // Who is born has the place of its parent, and nobody is taken for a person's choice.
    let child = id_of(victims[0].tell("fork") as i32);
    assert_eq!(masks(child.pid)[0].1, masks(victims[0].pid())[0].1);
    let mut seen = members.clone();
    seen.push(child);
    assert_eq!(reviews(&mut hands, &seen, |told| !told.is_empty()), []);
    // After a crash, from the record alone.
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    let now: Vec<_> = victims.iter().map(|v| masks(v.pid())).collect();
    assert_eq!(now, found);
    all_on(child.pid, &found[0][0].1);
}

#[test]
fn a_process_that_is_gone_or_another_owes_nothing() {
    let Some((first, _)) = two_cpus() else { return };
    let mut victim = Victim::start(2, 0);
    let mut hands = Hands::new(&[victim.id()]);
    let mut record = hands.prepare(&action(&[first])).unwrap();
    drive(&mut hands, &record, Direction::Apply).unwrap();
    victim.kill();
    let error = drive(&mut hands, &record, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Vanished { .. }), "{error}");
    let undone = drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!((undone.finished, skipped(&undone, "process ended")), (0, 1));
    // The number is used again by a process that is bound by a person to the very CPUs.
    let other = Victim::start(2, 0);
    for (thread, _) in masks(other.pid()) {
        set_affinity(thread, &CpuMask::of([first])).unwrap();
    }
    let before = ProcessId {
        start_ticks: other.id().start_ticks - 1000,
        ..other.id()
    };
    let mask = record.found["mask"].clone();
    record.found.retain(|key, _| !key.starts_with("mask."));
    record
        .found
        .insert(format!("mask.{}.{}", before.pid, before.start_ticks), mask);
    for key in ["sessions", "groups"] {
        record.found.insert(key.into(), String::new());
    }
    drive(&mut Hands::new(&[]), &record, Direction::Undo).unwrap();
    all_on(other.pid(), &first.to_string());
    let outcome = Hands::new(&[before]).prepare(&action(&[first]));
    assert!(
        matches!(outcome, Err(PlatformError::Vanished { .. })),
        "{outcome:?}"
    );
}

#[test]
fn without_privilege_it_is_denied() {
    let Some((first, _)) = two_cpus() else { return };
    let victim = Victim::start(1, 0);
    let found = masks(victim.pid());
    let record = Hands::new(&[victim.id()]).prepare(&action(&[first])).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the raw system call changes this thread alone, which ends with the scope.
            let outcome = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(outcome, 0);
            let outcome = Hands::new(&[]).advance(&record, Direction::Apply);
            assert!(
                matches!(outcome, Err(PlatformError::Denied { .. })),
                "{outcome:?}"
            );
        });
    });
    assert_eq!(masks(victim.pid()), found);
}

#[test]
fn impossible_actions_are_rejected() {
    let Some((first, _)) = two_cpus() else { return };
    let victim = Victim::start(0, 0);
    let mut hands = Hands::new(&[victim.id()]);
    let with = |name: &str, value: &str| {
        let mut action = action(&[first]);
        action.arguments.insert(name.into(), value.into());
        action
    };
    let mut nothing = action(&[]);
    nothing.target = Target::Nothing;
    for wrong in [
        action(&[]),
        action(&[8191]),
        action(&[100_000]),
        nothing,
        with("means", "magic"),
        with("no such thing", "1"),
        with("split_by", "thread"),
        with("memory", "some"),
        with("memory", "all"),
        with("memory_bytes", "1"),
        with("bytes_per_second", "1048576"),
        // One CPU is one last-level cache: nothing to split over.
        with("split_by", "process"),
    ] {
        let outcome = hands.prepare(&wrong);
        assert!(
            matches!(outcome, Err(PlatformError::Rejected { .. })),
            "{wrong:?}: {outcome:?}"
        );
    }
    assert!(matches!(
        hands.prepare(&with("group_by", "board")),
        Err(PlatformError::Unsupported { .. })
    ));
    assert!(matches!(
        Hands::new(&[]).prepare(&action(&[first])),
        Err(PlatformError::Vanished { .. })
    ));
    let captured = Registry::new(&Root::new("some/captured/tree")).prepare_for(&action(&[first]), &[]);
    assert!(
        matches!(captured, Err(PlatformError::Unsupported { .. })),
        "{captured:?}"
    );
}

#[test]
fn a_damaged_record_is_malformed_and_nothing_is_touched() {
    let Some((first, _)) = two_cpus() else { return };
    let victim = Victim::start(0, 0);
    let found = masks(victim.pid());
    let record = Hands::new(&[victim.id()]).prepare(&action(&[first])).unwrap();
    let own = format!("mask.{}.{}", victim.id().pid, victim.id().start_ticks);
    for (key, value) in [
        ("cpus", ""),
        ("mask", "x"),
        ("since", "soon"),
        ("count", "-1"),
        ("sessions", "1,a"),
        ("mask.1", "0"),
        ("mask.1.x", "0"),
        (own.as_str(), "3-1"),
        ("cpuset", "/etc/passwd"),
        ("cpuset", "/sys/fs/cgroup/../../../etc/x"),
    ] {
        let mut damaged = record.clone();
        damaged.found.insert(key.into(), value.into());
        damaged.found.entry("cpuset.version".into()).or_insert("2".into());
        for direction in [Direction::Apply, Direction::Undo] {
            let outcome = Hands::new(&[]).advance(&damaged, direction);
            assert!(
                matches!(outcome, Err(PlatformError::Malformed { .. })),
                "{key}={value}: {outcome:?}"
            );
        }
    }
    assert_eq!(masks(victim.pid()), found);
}

/// A control group with a cpuset, made for the test. Removed when dropped, after its processes have ended.
struct Group(PathBuf);

impl Group {
    /// In version 1 or 2 of the control groups, whichever has the cpuset controller here.
    fn make(name: &str) -> Option<Self> {
        let one = Path::new("/sys/fs/cgroup/cpuset");
        let (parent, first_version) = if one.join("cpuset.cpus").exists() {
            (one.to_owned(), true)
        } else {
            let two = Path::new("/sys/fs/cgroup");
            let _ = std::fs::write(two.join("cgroup.subtree_control"), "+cpuset");
            (two.to_owned(), false)
        };
        let path = parent.join(format!("homeostat-test-{name}-{}", std::process::id()));
        if let Err(error) = std::fs::create_dir(&path) {
            eprintln!("skipped: {}: {error}", path.display());
            return None;
        }
        let group = Self(path);
        if first_version {
            for leaf in ["cpuset.cpus", "cpuset.mems"] {
                std::fs::write(group.0.join(leaf), std::fs::read(parent.join(leaf)).unwrap()).unwrap();
            }
        } else if !group.0.join("cpuset.cpus").exists() {
            eprintln!("skipped: no cpuset controller in the control groups");
            return None;
        }
        Some(group)
    }

    fn add(&self, pid: i32) {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    fn cpus(&self) -> String {
        std::fs::read_to_string(self.0.join("cpuset.cpus"))
            .unwrap()
            .trim()
            .to_owned()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..200 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        eprintln!("left behind: {}", self.0.display());
    }
}

fn by_cpuset(cpus: &[u32]) -> Action {
    let mut action = action(cpus);
    action.arguments.insert("means".into(), "cpuset".into());
    action
}

/// Whether the kernel lets a cpuset be used; prints the reason when not.
fn group_for(name: &str, members: &[&Victim]) -> Option<Group> {
    let group = Group::make(name)?;
    for victim in members {
        group.add(victim.pid());
    }
    let ids: Vec<ProcessId> = members.iter().map(|v| v.id()).collect();
    match Hands::new(&ids).prepare(&by_cpuset(&[0])) {
        Err(PlatformError::Rejected { errno, .. }) if errno.contains("6.2") => {
            eprintln!("skipped: {errno}");
            None
        }
        _ => Some(group),
    }
}

#[test]
fn a_cpuset_of_its_own_serves_as_the_means_and_reads_as_it_was_found() {
    let Some((first, second)) = two_cpus() else { return };
    let (a, b) = (Victim::start(2, 0), Victim::start(2, 0));
    let Some(group) = group_for("means", &[&a, &b]) else {
        return;
    };
    // Bound after the group, so that they end before it is removed.
    let (a, b) = (a, b);
    let text = group.cpus();
    let found = (masks(a.pid()), masks(b.pid()));
    let members = [a.id(), b.id()];
    let (mut hands, mut fresh) = (Hands::new(&members), Hands::new(&[]));
    let broken = conformance::acting_patiently(&mut hands, &mut fresh, &by_cpuset(&[first]), &MonotonicClock);
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!(
        (group.cpus(), (masks(a.pid()), masks(b.pid()))),
        (text.clone(), found.clone())
    );

    let mut hands = Hands::new(&members);
    let record = hands.prepare(&by_cpuset(&[first])).unwrap();
    let applied = drive(&mut hands, &record, Direction::Apply).unwrap();
    assert_eq!(applied.finished, applied.total);
    assert_eq!(group.cpus(), first.to_string());
    all_on(a.pid(), &first.to_string());
    // Whoever comes into the group later falls under it.
    let late = Victim::start(0, 0);
    group.add(late.pid());
    all_on(late.pid(), &first.to_string());
    assert!(hands.review(&members).is_empty());
    // A person writes something else: it stays, and a review says so.
    std::fs::write(group.0.join("cpuset.cpus"), second.to_string()).unwrap();
    assert!(hands.review(&members)[0].1.contains("affinity"));
    let error = drive(&mut hands, &record, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Conflict { .. }), "{error}");
    let undone = drive(&mut hands, &record, Direction::Undo).unwrap();
    assert_eq!(skipped(&undone, "changed by somebody else"), 1);
    assert_eq!(group.cpus(), second.to_string());
    // What somebody set is no means any more.
    let outcome = hands.prepare(&by_cpuset(&[first]));
    assert!(outcome.is_err(), "{outcome:?}");
    drop((a, b, late));
}

#[test]
fn a_cpuset_shared_with_others_is_not_used() {
    let Some((first, _)) = two_cpus() else { return };
    let (a, b) = (Victim::start(0, 0), Victim::start(0, 0));
    let Some(group) = group_for("shared", &[&a, &b]) else {
        return;
    };
    let (a, b) = (a, b);
    let text = group.cpus();
    let outcome = Hands::new(&[a.id()]).prepare(&by_cpuset(&[first]));
    assert!(
        matches!(&outcome, Err(PlatformError::Rejected { errno, .. }) if errno.contains("also holds")),
        "{outcome:?}"
    );
    assert_eq!(group.cpus(), text);
    drop((a, b));
}
