//! The keeper and the instruments on this machine, whatever it is: what the scenarios rely on.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

struct Keeper {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Keeper {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_keeper"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        self.line()
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A CPU on which this test may run.
fn a_cpu() -> u32 {
    let own = i32::try_from(std::process::id()).unwrap();
    let masks = homeostat_guest::instruments::masks(own).unwrap();
    *masks[&own].first().unwrap()
}

#[test]
fn a_keeper_knows_its_memory_and_runs_everywhere_again() {
    let own = i32::try_from(std::process::id()).unwrap();
    let mut keeper = Keeper::start(&["4", &a_cpu().to_string(), "2"]);
    let ready = keeper.line();
    let mut words = ready.split_whitespace().skip(1);
    let address = u64::from_str_radix(words.next().unwrap(), 16).unwrap();
    assert_eq!(address % (2 << 20), 0, "aligned to a large page: {ready}");
    assert_eq!(words.next(), Some("1024"), "pages of 4 MiB: {ready}");
    assert_eq!(keeper.ask("check"), "BROKEN 0");
    let born = keeper.ask("thread");
    let masks = homeostat_guest::instruments::masks(keeper.pid()).unwrap();
    assert_eq!(masks.len(), 4, "main thread, two readers, one more: {masks:?}");
    let tid: i32 = born.strip_prefix("THREAD ").unwrap().parse().unwrap();
    assert!(masks.contains_key(&tid), "{born}: {masks:?}");
    let here = &homeostat_guest::instruments::masks(own).unwrap()[&own];
    assert!(
        masks.values().all(|mask| mask == here),
        "{masks:?}, this test {here:?}"
    );
}

#[test]
fn wrong_arguments_are_refused() {
    for arguments in [&["4"][..], &["x", "0", "1"], &["4", "", "1"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_keeper"))
            .args(arguments)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("usage"), "{said}");
    }
}

#[test]
fn the_scenarios_program_says_how_it_is_used() {
    let output = Command::new(env!("CARGO_BIN_EXE_scenarios")).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
}
