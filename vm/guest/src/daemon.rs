//! The whole daemon, in a directory of its own.

use crate::driver::private_directory;
use crate::keeper::program;
use crate::{Failure, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// The emulated machine is slow, and the daemon probes it before it listens.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// It may take its own 60 s to undo everything.
const STOP_PATIENCE: Duration = Duration::from_secs(90);
const TICK: Duration = Duration::from_millis(100);

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    directory: PathBuf,
}

impl Daemon {
    /// Starts one with this configuration and waits until it answers. The directory keeps its state from one daemon to
    /// the next.
    ///
    /// # Errors
    /// It does not answer in time.
    pub fn start(directory: &Path, configuration: &str) -> Result<Self, Failure> {
        private_directory(directory)?;
        let path = directory.join("homeostat.toml");
        std::fs::write(&path, configuration)
            .map_err(Failure::system(format!("writing {}", path.display())))?;
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(directory.join("log"))
            .map_err(Failure::system("making the daemon's log"))?;
        let child = command(directory, &["run"])?
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(Failure::system("starting the daemon"))?;
        let mut daemon = Self {
            child,
            directory: directory.to_owned(),
        };
        daemon.wait_until("it answers", START_PATIENCE, |d| {
            Ok(d.ask(&["status"])?.status.success())
        })?;
        Ok(daemon)
    }

    /// Runs `homeostat` with these arguments against it.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn ask(&self, arguments: &[&str]) -> Result<Output, Failure> {
        ask(&self.directory, arguments)
    }

    /// What `homeostat … --json` prints.
    ///
    /// # Errors
    /// It fails, or prints something else.
    pub fn json(&self, arguments: &[&str]) -> Result<Value, Failure> {
        json(&self.ask(arguments)?)
    }

    /// Waits until something holds.
    ///
    /// # Errors
    /// The daemon ends, or the time is over.
    pub fn wait_until(
        &mut self,
        what: &str,
        patience: Duration,
        holds: impl FnMut(&Self) -> Result<bool, Failure>,
    ) -> Result<Duration, Failure> {
        self.wait_every(TICK, what, patience, holds)
    }

    /// The same with this time between two looks. Whoever looks often on an emulated CPU is a program that works on the machine, which a
    /// change of the whole machine is not to reach.
    ///
    /// # Errors
    /// As [`Daemon::wait_until`].
    pub fn wait_every(
        &mut self,
        tick: Duration,
        what: &str,
        patience: Duration,
        mut holds: impl FnMut(&Self) -> Result<bool, Failure>,
    ) -> Result<Duration, Failure> {
        let begin = Instant::now();
        loop {
            self.must_live(what)?;
            if holds(self)? {
                return Ok(begin.elapsed());
            }
            ensure!(
                begin.elapsed() < patience,
                "not within {} s: {what}; the daemon's log:\n{}",
                patience.as_secs(),
                self.log()
            );
            std::thread::sleep(tick);
        }
    }

    /// Fails when it has ended by itself.
    ///
    /// # Errors
    /// It has, with its log.
    pub fn must_live(&mut self, before: &str) -> Result<(), Failure> {
        match self.child.try_wait() {
            Ok(Some(status)) => Err(Failure::Broken(format!(
                "the daemon ended ({status}) before {before}; its log:\n{}",
                self.log()
            ))),
            _ => Ok(()),
        }
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        kill_process(Pid::from_child(&self.child), signal).map_err(Failure::call("sending a signal"))
    }

    /// SIGTERM; waits for its end.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop(mut self) -> Result<ExitStatus, Failure> {
        self.signal(Signal::TERM)?;
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().map_err(Failure::system("waiting"))? {
                return Ok(status);
            }
            ensure!(
                begin.elapsed() < STOP_PATIENCE,
                "the daemon does not end after SIGTERM; its log:\n{}",
                self.log()
            );
            std::thread::sleep(TICK);
        }
    }

    /// kill -9.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill(mut self) -> Result<(), Failure> {
        self.signal(Signal::KILL)?;
        self.child.wait().map_err(Failure::system("waiting")).map(|_| ())
    }

    /// What it said so far, indented, as the rest of a sentence.
    pub fn log(&self) -> String {
        log(&self.directory)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(directory: &Path, arguments: &[&str]) -> Result<Command, Failure> {
    let mut command = Command::new(program("homeostat")?);
    command
        .arg("--socket")
        .arg(directory.join("io.homeostat"))
        .arg("--state-dir")
        .arg(directory.join("state"))
        .arg("--config")
        .arg(directory.join("homeostat.toml"))
        .args(arguments)
        .stdin(Stdio::null());
    Ok(command)
}

/// What the daemons in that directory said so far, indented, as the rest of a sentence.
pub fn log(directory: &Path) -> String {
    let text = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Runs `homeostat` with these arguments and the paths of the daemon in that directory, whether or not it lives.
///
/// # Errors
/// The program cannot be started.
pub fn ask(directory: &Path, arguments: &[&str]) -> Result<Output, Failure> {
    command(directory, arguments)?
        .output()
        .map_err(Failure::system("starting homeostat"))
}

/// What a command printed as JSON.
///
/// # Errors
/// It failed, or printed something else.
pub fn json(output: &Output) -> Result<Value, Failure> {
    ensure!(
        output.status.success(),
        "homeostat failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}
