//! The plant itself: it reports harm where there is some, and none where there is none.

use crate::plant::{
    ATTACKER, LATE_MAX, Options, Plant, Running, assert_unharmed, bounded, resident, unharmed,
};
use std::process::Stdio;
use std::time::Duration;

#[test]
fn a_daemon_that_stands_still_is_reported_late_and_one_that_runs_is_not() {
    let Some(mut plant) = Plant::start(&Options::default()) else {
        return;
    };
    std::thread::sleep(Duration::from_secs(2));
    assert_unharmed(&plant.attacked, &plant.control);

    let pid = rustix::process::Pid::from_raw(plant.attacked.pid().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    let while_stopped = unharmed(&plant.attacked, &plant.control);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(
        while_stopped.as_ref().is_err_and(|harm| harm.contains("late")),
        "{while_stopped:?}"
    );
    plant
        .attacked
        .wait_for("an answer", Duration::from_secs(20), |status| {
            status["view_age_s"].as_f64().is_some_and(|age| age < 2.0)
        });
    let afterwards = unharmed(&plant.attacked, &plant.control);
    assert!(
        afterwards.is_err() && plant.attacked.lateness() > LATE_MAX,
        "it stays reported: {afterwards:?}"
    );

    plant.begin();
    plant.attacked.assert_restores_and_restarts();
    assert!(plant.attacked.lives());
    plant.attacked.kill9();
    let gone = unharmed(&plant.attacked, &plant.control);
    assert!(gone.is_err_and(|harm| harm.contains("ended")));
}

#[test]
fn an_attacker_is_another_user_in_the_namespace_of_the_daemons_and_may_have_namespaces_of_its_own() {
    let Some(plant) = Plant::start(&Options::touching(&["/nowhere/own"])) else {
        return;
    };
    let said = |mut command: std::process::Command| {
        let output = bounded(&mut command, Duration::from_secs(10));
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        )
    };
    let id = said(plant.as_user(
        ATTACKER,
        ["sh", "-c", "id -u; id -G; grep CapEff /proc/self/status"],
    ));
    assert_eq!(id, (true, "1000\n1000\nCapEff:\t0000000000000000".to_owned()));
    let script = "id -u; mount -t tmpfs none /run && touch /run/mine && cat /proc/self/uid_map";
    let inside = said(plant.as_user_in_own_namespaces(ATTACKER, ["sh", "-c", script]));
    assert!(
        inside.0 && inside.1.starts_with('0') && inside.1.contains("1000"),
        "{inside:?}"
    );
    let touched = said(plant.as_user(ATTACKER, ["sh", "-c", "touch /run/homeostat/mine"]));
    assert!(!touched.0, "the daemon's own directory is closed to it");

    // Memory of children counts: this one keeps 96 MiB.
    let eats = "x = bytearray(96 << 20); print('there', flush=True); import time; time.sleep(60)";
    let mut command = plant.as_user(ATTACKER, ["/usr/bin/python3", "-c", eats]);
    let mut eater = Running::start(command.stdout(Stdio::piped()));
    let mut pipe = eater.child().stdout.take().unwrap();
    let mut said = [0; 5];
    std::io::Read::read_exact(&mut pipe, &mut said).unwrap();
    assert!(resident(eater.pid()) > 96 << 20 && eater.lives());
    assert!(resident(std::process::id()) > resident(plant.attacked.pid()) + (96 << 20));
}
