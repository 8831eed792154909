//! The opt-out in the environment holds for programs that overwrite it, and an environment made to hurt does not hold up the loop.

use crate::plant::{ATTACKER, Options, Plant, Running, assert_unharmed};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);

/// The last sentence about the workload of a process.
fn summary(status: &Value, pid: u32) -> Option<String> {
    let list = status["workloads"].as_array()?;
    let own = |w: &&Value| {
        w["pids"]
            .as_array()
            .is_some_and(|pids| pids.iter().any(|p| *p == pid))
    };
    list.iter().find(own)?["summary"].as_str().map(str::to_owned)
}

fn wait_for_summary(plant: &Plant, pid: u32, text: &str) {
    plant
        .attacked
        .wait_for(&format!("{text:?} about process {pid}"), PATIENCE, |status| {
            summary(status, pid).is_some_and(|said| said.contains(text))
        });
}

/// The process that runs a program below the commands that start it.
fn program_below(pid: u32, name: &str) -> u32 {
    let begin = std::time::Instant::now();
    loop {
        let all = std::iter::once(pid).chain(crate::plant::descendants(pid));
        let is = |p: &u32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == name);
        if let Some(found) = all.into_iter().find(is) {
            return found;
        }
        assert!(begin.elapsed() < PATIENCE, "{name} starts");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn redis_that_overwrites_its_environment_is_left_alone_and_the_loop_goes_on() {
    if !Path::new("/usr/bin/redis-server").exists() {
        println!("SKIPPED: redis-server is not installed");
        return;
    }
    let Some(plant) = Plant::start(&Options::touching(&["s4-redis", "s4-wiped"])) else {
        return;
    };
    let redis = plant.program("/usr/bin/redis-server", "s4-redis");
    let home = plant.directory(ATTACKER, "s4");
    let socket = home.join("socket");
    let start = |extra: &[&str]| {
        let mut words = vec!["env".to_owned(), "SECRET=hunter2".to_owned()];
        words.extend(extra.iter().map(|w| (*w).to_owned()));
        words.push(redis.display().to_string());
        words.extend(["--port", "0", "--save", "", "--unixsocket"].map(str::to_owned));
        words.push(socket.display().to_string());
        let mut command = plant.as_user(ATTACKER, words);
        Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()))
    };
    let long = format!("LONG={}", "x".repeat(100_000));
    let never = start(&[&long, "HOMEOSTAT=never"]);
    wait_for_summary(&plant, program_below(never.pid(), "s4-redis"), "HOMEOSTAT=never");
    drop(never);
    // Who says nothing is not left alone.
    let silent = start(&[&long]);
    let pid = program_below(silent.pid(), "s4-redis");
    plant.attacked.wait_for("an ordinary redis", PATIENCE, |status| {
        summary(status, pid).is_some_and(|said| !said.contains("left alone") && !said.contains("not known"))
    });
    drop(silent);
    // Nothing is left of this one's, and many environments of the largest size come and go beside it.
    let python = plant.program("/usr/bin/python3", "s4-wiped");
    let script = r"
import ctypes, os, time
f = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
ctypes.memset(int(f[47]), 0, int(f[48]) - int(f[47]))
large = {'V%d' % n: 'x' * 120000 for n in range(14)}
end = time.time() + 12
while time.time() < end:
    children = []
    for n in range(20):
        if (p := os.fork()) == 0: os.execve('/bin/sleep', ['sleep', '0.5'], large)
        children.append(p)
    for p in children: os.waitpid(p, 0)
time.sleep(60)
";
    let words = [
        "env",
        "HOMEOSTAT=never",
        &python.display().to_string(),
        "-c",
        script,
    ]
    .map(str::to_owned);
    let wiped = Running::start(&mut plant.as_user(ATTACKER, words));
    let pid = program_below(wiped.pid(), "s4-wiped");
    wait_for_summary(&plant, pid, "is not known: the program overwrote");
    std::thread::sleep(Duration::from_secs(6));
    assert_unharmed(&plant.attacked, &plant.control);
    plant.attacked.assert_never_logged("hunter2");
}
