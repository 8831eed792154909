//! S1: what lies on the progress directory of a program was mounted by its user, and never answers.

use crate::plant::{ATTACKER, Options, Plant, Running, assert_unharmed, descendants};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Another user, who is to be read whatever the attacker does.
pub(crate) const HONEST: u32 = 1001;
/// How long an attack goes on before anybody looks.
const ATTACK: Duration = Duration::from_secs(12);

/// Counts its turns in a progress file.
const PUBLISHER: &str = r#"
#include "homeostat_progress.h"
#include <time.h>
#include <unistd.h>
int main(void)
{
    struct homeostat_progress progress;
    if (homeostat_progress_open(&progress, "honest", "turn", 1) != 0)
        return 1;
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        clock_t end = clock() + CLOCKS_PER_SEC / 50;
        while (clock() < end)
            homeostat_progress_add(&progress, 0, 1);
        usleep(80000);
    }
}
"#;

/// Compiles a program that publishes its progress, and installs it under that name.
pub(crate) fn built(plant: &Plant, text: &str, name: &str) -> PathBuf {
    let directory = plant.directory(0, "source");
    let source = directory.join(format!("{name}.c"));
    std::fs::write(&source, text).unwrap();
    let built = directory.join(name);
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../progress/include");
    let status = Command::new("cc")
        .args(["-O1", "-I"])
        .arg(include)
        .arg("-o")
        .args([&built, &source])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    plant.program(&built, name)
}

/// Starts a program and waits until it says that it is ready. `None`: it says why it cannot be.
pub(crate) fn ready(command: &mut Command) -> Option<Running> {
    let mut running = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut said = String::new();
    let mut pipe = running.child().stdout.take().unwrap();
    let mut byte = [0];
    while !said.ends_with('\n') && pipe.read(&mut byte).unwrap() == 1 {
        said.push(char::from(byte[0]));
    }
    if said == "ready\n" {
        return Some(running);
    }
    eprintln!("skipped: {said}");
    None
}

/// The directory of the programs' counters, where everybody may publish.
pub(crate) fn progress_directory(plant: &Plant) {
    let words = ["install", "-d", "-m", "1777", "/run/homeostat/progress"];
    assert!(plant.as_user(0, words).status().unwrap().success());
}

/// Starts the attack of that kind, as [`never_answers.py`](never_answers.py) describes it.
pub(crate) fn attack(plant: &Plant, kind: &str, more: &[&str]) -> Option<Running> {
    let device = plant.home().join("fuse");
    if !device.exists() {
        // Distributions let every user open it; a bare machine may not.
        let made = Command::new("mknod")
            .args(["-m", "666"])
            .arg(&device)
            .args(["c", "10", "229"])
            .status();
        assert!(made.unwrap().success());
    }
    let work = plant.directory(ATTACKER, &format!("work-{kind}"));
    let python = plant.program("/usr/bin/python3", &format!("s1-{kind}"));
    let script = plant.home().join("never_answers.py");
    std::fs::write(&script, include_str!("never_answers.py")).unwrap();
    let words: Vec<String> = [python.as_path(), &script, &device, &work]
        .iter()
        .map(|path| path.to_string_lossy().into_owned())
        .chain([kind.to_owned(), "/run/homeostat/progress".to_owned()])
        .chain(more.iter().map(|word| (*word).to_owned()))
        .collect();
    ready(&mut plant.as_user_in_own_namespaces(ATTACKER, words))
}

/// Processes among the daemon's that wait for the file system: until they are killed, and for good afterwards.
fn stuck(daemon: u32) -> usize {
    let is_stuck = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let waits_in = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        let is_in_fuse = waits_in == "request_wait_answer";
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| is_in_fuse || rest.starts_with('D'))
    };
    descendants(daemon).into_iter().filter(is_stuck).count()
}

/// The meter by which the honest program's work is counted.
fn honest_meter(status: &serde_json::Value) -> Option<String> {
    let workloads = status["workloads"].as_array()?;
    let honest = workloads.iter().find(|w| w["program"] == "s1-honest")?;
    Some(honest["meter"]["id"].as_str()?.to_owned())
}

/// Waits until the daemon knows the program: a build for tests looks at all processes every few seconds.
fn seen(plant: &Plant, program: &str) {
    let knows = |status: &serde_json::Value| {
        let workloads = status["workloads"].as_array();
        workloads.is_some_and(|all| all.iter().any(|w| w["program"] == program))
    };
    plant
        .attacked
        .wait_for(&format!("{program} is seen"), Duration::from_secs(120), knows);
}

#[test]
fn a_file_system_that_never_answers_hangs_helpers_and_neither_the_loop_nor_others() {
    let options = Options::touching(&["*/programs/s1-*"]).set("meters.breakpoints=false");
    let Some(mut plant) = Plant::start(&options) else {
        return;
    };
    progress_directory(&plant);
    let publisher = built(&plant, PUBLISHER, "s1-honest");
    let Some(_attack) = attack(&plant, "overlay", &[]) else {
        return;
    };
    // It hangs who reads it, which is what this test is about: a thread of this test.
    let _honest = ready(&mut plant.as_user(HONEST, [&publisher])).unwrap();
    plant.begin();
    seen(&plant, "s1-overlay");
    let begun = Instant::now();
    let mut most = 0;
    // The program's meters are looked for first.
    while begun.elapsed() < ATTACK || (most == 0 && begun.elapsed() < ATTACK * 5) {
        most = most.max(stuck(plant.attacked.pid()));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(
        most > 0,
        "nobody hangs, so nothing was attacked:\n{}",
        plant.attacked.log()
    );
    assert!(most <= 4, "{most} helpers hang");
    assert_unharmed(&plant.attacked, &plant.control);
    let read = |status: &serde_json::Value| honest_meter(status).as_deref() == Some("progress");
    plant
        .attacked
        .wait_for("another user's program is read", Duration::from_secs(120), read);
    assert_unharmed(&plant.attacked, &plant.control);
    plant.attacked.assert_restores_and_restarts();
    std::thread::sleep(Duration::from_secs(3));
    assert!(plant.attacked.lives());
}

#[test]
fn nothing_but_an_ordinary_file_of_its_user_is_read() {
    let options = Options::touching(&["*/programs/s1-*"]).set("meters.breakpoints=false");
    let Some(mut plant) = Plant::start(&options) else {
        return;
    };
    progress_directory(&plant);
    let kinds = ["fuse", "fifo", "socket", "symlink"];
    let attacks: Vec<_> = kinds
        .iter()
        .filter_map(|kind| attack(&plant, kind, &[]))
        .collect();
    assert_eq!(attacks.len(), kinds.len());
    plant.begin();
    for kind in kinds {
        seen(&plant, &format!("s1-{kind}"));
    }
    std::thread::sleep(ATTACK);
    assert_unharmed(&plant.attacked, &plant.control);
    // A link leads to a file of root, whose text is nobody's business.
    let shadow = std::fs::read_to_string("/etc/shadow").unwrap();
    let secret = shadow.lines().next().unwrap();
    plant.attacked.assert_never_logged(secret);
    for kind in kinds {
        let explained = plant.attacked.ask(&["explain", &format!("s1-{kind}"), "--json"]);
        let text = String::from_utf8_lossy(&explained.stdout);
        assert!(!text.contains(secret), "{kind}: {text}");
        let said = String::from_utf8_lossy(&explained.stderr);
        let Ok(explained) = serde_json::from_str::<serde_json::Value>(&text) else {
            panic!("{kind}: {text}{said}\n{}", plant.attacked.log());
        };
        let meters = explained["meters"].as_array().unwrap();
        let progress = meters.iter().find(|meter| meter["id"] == "progress").unwrap();
        assert!(progress["refused"].is_string(), "{kind}: {text}");
    }
    plant.attacked.assert_restores_and_restarts();
}
