//! The switch, and what an earlier version has left: a journal with a change in force, a history, a configuration.
//!
//! The victim is a program with large pages at the addresses of the recorded change. The journal is the recorded one, with the
//! victim's process in it. The daemons may act on nobody (`never`), so what they undo is what the journal says.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const IN_TRIAL: &str = "journal-in-trial";
const ACCEPTED: &str = "journal-accepted";
/// Memory of the recorded change: 32 large pages.
const CHANGED_KIB: u64 = 64 << 10;
/// A start on a busy machine takes some seconds.
const PATIENCE: Duration = Duration::from_secs(120);
/// Moments at which `homeostat off` is killed.
const KILLS: u32 = 10;

/// Memory at a given place, made large pages by the program itself: at the start, and after each line that it is sent.
const VICTIM: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
int main(int count, char **words)
{
    unsigned long base = strtoul(words[1], 0, 10), size = strtoul(words[2], 0, 10);
    char line[16];
    char *at = mmap((void *)base, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != (char *)base)
        return 1;
    do {
        memset(at, 1, size);
        if (madvise(at, size, 25 /* MADV_COLLAPSE */)) {
            perror("MADV_COLLAPSE");
            return 2;
        }
        puts("ready");
        fflush(stdout);
    } while (fgets(line, sizeof line, stdin));
    return 0;
}
"#;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/upgrade")
        .join(name)
}

/// The records of a journal without their checksums.
fn records(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(&line[9..]).unwrap())
        .collect()
}

struct Victim {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Victim {
    /// With large pages at the addresses of that journal.
    fn start(directory: &Path, journal: &str) -> Self {
        let source = directory.join("victim.c");
        let program = directory.join("switch-victim");
        if !program.exists() {
            std::fs::write(&source, VICTIM).unwrap();
            let built = Command::new("cc").arg("-o").args([&program, &source]).status();
            assert!(built.unwrap().success());
        }
        let intended = records(journal)
            .into_iter()
            .rfind(|r| !r["event"]["intend"].is_null());
        let pieces = &intended.unwrap()["event"]["intend"]["action"]["target"]["memory"][0]["pieces"];
        let base = pieces[0].as_u64().unwrap();
        // The loader may have put something there.
        for _ in 0..8 {
            let mut child = Command::new(&program)
                .args([base.to_string(), (CHANGED_KIB << 10).to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let said = BufReader::new(child.stdout.take().unwrap());
            let mut victim = Self { child, said };
            if victim.hears_ready() {
                assert_eq!(victim.large_kib(), CHANGED_KIB);
                return victim;
            }
        }
        panic!("the victim has no large pages at {base}");
    }

    fn hears_ready(&mut self) -> bool {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line == "ready\n"
    }

    /// Makes large pages of its memory once more.
    fn again(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"again\n").unwrap();
        assert!(self.hears_ready());
        assert_eq!(self.large_kib(), CHANGED_KIB);
    }

    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }

    fn large_kib(&self) -> u64 {
        let text = self.proc("smaps_rollup");
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("AnonHugePages:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An installation: state directory, socket, configuration.
struct Installation {
    home: tempfile::TempDir,
}

impl Installation {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("homeostat.toml"), "").unwrap();
        Self { home }
    }

    fn state(&self) -> PathBuf {
        self.home.path().join("state")
    }

    fn switch(&self) -> String {
        std::fs::read_to_string(self.state().join("switch")).unwrap_or_default()
    }

    /// Puts the journal there as the earlier version left it when it was killed, with the victim as the program that it changed.
    fn leave(&self, journal: &str, victim: &Victim) {
        let stat = victim.proc("stat");
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_ascii_whitespace()
            .collect();
        // Fields 22, 26 and 28 of proc_pid_stat(5).
        let (ticks, code, stack) = (fields[19], fields[23], fields[25]);
        let link = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap();
        let namespaces = format!("{} {}", link("pid").display(), link("time").display());
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let mut bytes = Vec::new();
        for mut record in records(journal) {
            if let Some(intend) = record["event"].get_mut("intend") {
                let process = &mut intend["action"]["target"]["memory"][0]["process"];
                let was = format!("{}.{}", process["pid"], process["start_ticks"]);
                process["pid"] = victim.child.id().into();
                process["start_ticks"] = ticks.parse::<u64>().unwrap().into();
                intend["boot_id"] = boot.trim().into();
                let found = intend["found"].as_object_mut().unwrap();
                for (key, value) in std::mem::take(found) {
                    let key = key.replace(&was, &format!("{}.{ticks}", victim.child.id()));
                    let value = match key.split('.').next().unwrap() {
                        "image" => format!("{code}-{stack}").into(),
                        "namespaces" => namespaces.clone().into(),
                        _ => value,
                    };
                    found.insert(key, value);
                }
            }
            // A record begins with its version.
            let text = format!(
                r#"{{"v":{},"n":{},"a":{},"e":{},"event":{}}}"#,
                record["v"], record["n"], record["a"], record["e"], record["event"]
            );
            let line = format!("{:08x} {text}\n", crc32fast::hash(text.as_bytes()));
            bytes.extend(line.into_bytes());
        }
        // The space that the journal reserves.
        bytes.resize(bytes.len() + (64 << 10), 0);
        let state = self.state();
        let _ = std::fs::remove_dir_all(&state);
        std::fs::create_dir(&state).unwrap();
        std::fs::set_permissions(&state, PermissionsExt::from_mode(0o700)).unwrap();
        std::fs::write(state.join("journal"), bytes).unwrap();
    }

    fn leave_history(&self) {
        std::fs::copy(fixture("history.sqlite"), self.state().join("history.sqlite")).unwrap();
    }

    fn command(&self, mut command: Command, arguments: &[&str]) -> Command {
        command
            .arg("--socket")
            .arg(self.home.path().join("s"))
            .arg("--state-dir")
            .arg(self.state())
            .arg("--config")
            .arg(self.home.path().join("homeostat.toml"))
            .args(arguments)
            .stdin(Stdio::null())
            .env_remove("NOTIFY_SOCKET")
            .env_remove("JOURNAL_STREAM");
        command
    }

    fn homeostat(&self, arguments: &[&str]) -> Command {
        self.command(Command::new(env!("CARGO_BIN_EXE_homeostat")), arguments)
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        self.homeostat(arguments).output().unwrap()
    }

    /// The program, run with these rights removed.
    fn without(&self, rights: &[&str], arguments: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        let removed: Vec<String> = rights.iter().map(|right| format!("-{right}")).collect();
        command
            .arg(format!("--bounding-set={}", removed.join(",")))
            .arg("--")
            .arg(env!("CARGO_BIN_EXE_homeostat"));
        self.command(command, arguments)
    }

    fn run(&self, arguments: &[&str]) -> Daemon<'_> {
        let mut command = self.homeostat(&["run", "--log", "json"]);
        command.args(arguments);
        self.start(command)
    }

    fn start(&self, mut command: Command) -> Daemon<'_> {
        let log = self.home.path().join("log");
        let child = command
            .args(["--set", "policy.workloads=[{match=\"*\",never=true}]"])
            .args(["--set", "service.lock_memory=false"])
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let daemon = Daemon { child, of: self };
        let begin = Instant::now();
        while !self.ask(&["status"]).status.success() {
            assert!(
                begin.elapsed() < PATIENCE,
                "it listens: {}",
                std::fs::read_to_string(&log).unwrap()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        daemon
    }
}

struct Daemon<'a> {
    child: Child,
    of: &'a Installation,
}

impl Daemon<'_> {
    fn switch(&self) -> Value {
        json(&self.of.ask(&["status", "--json"]))["switch"].clone()
    }

    fn first_line(&self) -> String {
        text(&self.of.ask(&["status"]).stdout)
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned()
    }

    /// As a reboot or the kernel does it.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)))
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: the switch is root's");
    }
    root
}

#[test]
fn a_package_advises_first_and_the_switch_holds_over_kills_and_starts() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    let daemon = here.run(&["--advise-first"]);
    assert_eq!(here.switch(), "off\n");
    let line = daemon.first_line();
    assert!(
        line.starts_with("homeostat is off: it advises and changes nothing (since ")
            && line.ends_with("Let it act: homeostat on"),
        "{line}"
    );
    let status = json(&here.ask(&["status", "--json"]));
    assert_eq!(status["mode"], "advise-only");
    let on = here.ask(&["on"]);
    assert!(on.status.success(), "{}", text(&on.stderr));
    assert!(
        text(&on.stdout).starts_with("homeostat is on: "),
        "{}",
        text(&on.stdout)
    );
    assert_eq!(here.switch(), "on\n");
    assert_eq!(daemon.switch()["on"], true);
    let again = here.ask(&["on"]);
    assert!(again.status.success() && text(&again.stdout).starts_with("It was on already: "));
    daemon.kill();
    let daemon = here.run(&["--advise-first"]);
    assert_eq!(daemon.switch()["on"], true, "it was recorded once");
    let off = here.ask(&["--json", "off"]);
    assert!(off.status.success(), "{}", text(&off.stderr));
    let off = json(&off);
    assert_eq!(off["changed"], true);
    assert_eq!(off["by"], "daemon");
    assert_eq!(off["undone"], Value::Array(vec![]));
    daemon.kill();
    // Off holds also where nobody asked for advice first, and the greeting says how to change it.
    let daemon = here.run(&[]);
    assert!(daemon.first_line().starts_with("homeostat is off: "));
    let log = std::fs::read_to_string(here.home.path().join("log")).unwrap();
    assert!(
        log.lines().next().unwrap().contains("Let it act: homeostat on"),
        "{log}"
    );
    daemon.kill();
    // Without a daemon.
    let again = here.ask(&["off"]);
    assert!(again.status.success());
    let said = text(&again.stdout);
    assert!(
        said.starts_with("It was off already: ") && said.contains("Nothing to undo"),
        "{said}"
    );
    let doctor = json(&here.ask(&["--json", "doctor"]));
    assert_eq!(doctor["switch"]["on"], false);
    assert_eq!(doctor["switch"]["by"], "switch");
    // What nobody can read counts as off.
    std::fs::write(here.state().join("switch"), "maybe\n").unwrap();
    let daemon = here.run(&[]);
    let switch = daemon.switch();
    assert_eq!(switch["on"], false);
    assert!(
        switch["why"].as_str().unwrap().contains("writes it anew"),
        "{switch}"
    );
    assert!(here.ask(&["on"]).status.success());
    assert_eq!(
        (daemon.switch()["on"].as_bool(), here.switch()),
        (Some(true), "on\n".into())
    );
}

#[test]
fn on_names_the_line_that_forbids_it() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    let config = here.home.path().join("homeostat.toml");
    std::fs::write(&config, "# first\n[policy]\nmode = \"advise-only\"\n").unwrap();
    let on = here.ask(&["on"]);
    assert_eq!(on.status.code(), Some(1));
    let why = text(&on.stderr);
    assert!(
        why.contains("homeostat.toml, line 3") && why.contains("advise-only"),
        "{why}"
    );
    assert_eq!(here.switch(), "on\n");
    let daemon = here.run(&[]);
    assert_eq!(daemon.switch()["by"], "configuration");
    assert_eq!(here.ask(&["on"]).status.code(), Some(1));
    drop(daemon);
    std::fs::write(&config, "").unwrap();
    let _daemon = here.run(&["--advise-only"]);
    let on = here.ask(&["on"]);
    assert_eq!(on.status.code(), Some(1));
    assert!(
        text(&on.stderr).contains("start it without --advise-only"),
        "{}",
        text(&on.stderr)
    );
}

#[test]
fn a_daemon_that_could_not_act_ends_with_5_and_says_what_is_missing() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    for (rights, named) in [
        (&["sys_ptrace"][..], "CAP_SYS_PTRACE"),
        (&["dac_override", "dac_read_search"][..], "CAP_DAC_READ_SEARCH"),
        (&["all"][..], "CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH"),
    ] {
        let refused = here.without(rights, &["run"]).output().unwrap();
        let why = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(5), "{why}");
        assert!(why.contains(named) && why.contains("--advise-only"), "{why}");
        assert!(!here.state().exists(), "nothing was begun");
    }
    // Also while it is off: switched on, it could not act.
    assert!(here.ask(&["off"]).status.success());
    let refused = here
        .without(&["sys_ptrace"], &["run", "--advise-first"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(5));
    assert!(here.ask(&["on"]).status.success());
    let narrow = here.without(&["sys_ptrace"], &["run", "--advise-only"]);
    let daemon = here.start(narrow);
    assert_eq!(daemon.switch()["by"], "command line");
    drop(daemon);
    // What only some strategies need is theirs to say.
    let without = [
        "sys_rawio",
        "bpf",
        "perfmon",
        "sys_nice",
        "sys_admin",
        "dac_override",
    ];
    let daemon = here.start(here.without(&without, &["run"]));
    assert_eq!(daemon.switch()["on"], true);
    drop(daemon);
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    for command in ["on", "off"] {
        let mut setpriv = Command::new("setpriv");
        setpriv.args(nobody).arg(env!("CARGO_BIN_EXE_homeostat"));
        let refused = here.command(setpriv, &[command]).output().unwrap();
        // The program may lie where only root can reach it.
        let code = refused.status.code();
        assert!(
            matches!(code, Some(5 | 126 | 127)),
            "{command}: {code:?} {}",
            text(&refused.stderr)
        );
        assert_eq!(here.switch(), "on\n");
    }
}

#[test]
fn what_an_earlier_version_has_in_force_is_undone() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    for (journal, action) in [(IN_TRIAL, 1), (ACCEPTED, 2)] {
        let victim = Victim::start(here.home.path(), journal);
        here.leave(journal, &victim);
        let restored = here.ask(&["--json", "restore"]);
        assert!(restored.status.success(), "{journal}: {}", text(&restored.stderr));
        assert_eq!(json(&restored)["undone"][0]["action"], action, "{journal}");
        assert_eq!(victim.large_kib(), 0, "{journal}");
    }
}

#[test]
fn a_daemon_goes_on_where_an_earlier_version_was_killed() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    let victim = Victim::start(here.home.path(), ACCEPTED);
    here.leave(ACCEPTED, &victim);
    here.leave_history();
    std::fs::copy(fixture("homeostat.toml"), here.home.path().join("homeostat.toml")).unwrap();
    let valid = here.ask(&["config", "check"]);
    assert!(valid.status.success(), "{}", text(&valid.stderr));
    let daemon = here.run(&["--advise-first"]);
    assert_eq!(victim.large_kib(), 0, "recovery undid it before the first sample");
    assert_eq!(
        here.switch(),
        "on\n",
        "the earlier version acted, so this one may"
    );
    assert_eq!(daemon.switch()["on"], true);
    let past = json(&here.ask(&["--json", "history"]));
    let verdicts: Vec<&Value> = past["experiments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| &e["verdict"])
        .collect();
    assert_eq!(verdicts.len(), 2);
    assert_eq!(verdicts[0], "accepted");
    assert!(here.ask(&["off"]).status.success());
    assert_eq!(here.switch(), "off\n");
}

#[test]
fn before_a_downgrade_everything_is_undone_and_off_is_said_in_words_of_the_older_version() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    let mut victim = Victim::start(here.home.path(), ACCEPTED);
    let drop_in = here.home.path().join("homeostat.d/zz-switched-off.toml");
    here.leave(ACCEPTED, &victim);
    let on = here.ask(&["prepare-downgrade"]);
    assert!(on.status.success(), "{}", text(&on.stderr));
    assert!(text(&on.stdout).contains("acts as soon as it runs") && !drop_in.exists());
    assert_eq!(victim.large_kib(), 0);
    victim.again();
    here.leave(ACCEPTED, &victim);
    std::fs::write(here.state().join("switch"), "off\n").unwrap();
    let off = here.ask(&["prepare-downgrade"]);
    assert!(off.status.success(), "{}", text(&off.stderr));
    assert!(text(&off.stdout).contains("zz-switched-off.toml keeps it to advice"));
    assert_eq!(victim.large_kib(), 0);
    // What an older version reads, too.
    let shown = text(&here.ask(&["config", "show"]).stdout);
    assert!(shown.contains("mode = \"advise-only\""), "{shown}");
    let upgraded = here.ask(&["on"]);
    assert!(
        text(&upgraded.stderr).contains("zz-switched-off.toml, line 4"),
        "{}",
        text(&upgraded.stderr)
    );
}

/// The switch is on the disk before anything is undone, so whatever a kill leaves is undone by the next start, which is off.
#[test]
fn off_that_is_killed_at_any_moment_is_finished_by_the_next_start() {
    if !is_root() {
        return;
    }
    let here = Installation::new();
    let mut victim = Victim::start(here.home.path(), ACCEPTED);
    let mut seen = [0, 0];
    let mut length = Duration::ZERO;
    for kill in 0..=KILLS {
        here.leave(ACCEPTED, &victim);
        let begin = Instant::now();
        let mut off = here.homeostat(&["off"]).stdout(Stdio::null()).spawn().unwrap();
        if kill == 0 {
            assert!(off.wait().unwrap().success());
            length = begin.elapsed();
            assert_eq!((victim.large_kib(), here.switch()), (0, "off\n".into()));
            victim.again();
            continue;
        }
        std::thread::sleep(length * kill / KILLS);
        let _ = off.kill();
        off.wait().unwrap();
        let recorded = here.switch();
        seen[usize::from(recorded == "off\n")] += 1;
        if victim.large_kib() == 0 {
            assert_eq!(recorded, "off\n", "first the switch, then the undo");
        }
        let daemon = here.run(&[]);
        assert_eq!(victim.large_kib(), 0, "recovery finished it");
        assert_eq!(daemon.switch()["on"], recorded != "off\n");
        daemon.kill();
        victim.again();
    }
    eprintln!(
        "killed before the switch was written: {}, after it: {}",
        seen[0], seen[1]
    );
    assert!(seen[1] > 0, "no kill came after the switch was written");
}
