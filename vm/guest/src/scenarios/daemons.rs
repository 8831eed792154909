//! The whole daemon in the guest.

use super::Context;
use super::groups::Group;
use crate::daemon::{Daemon, ask, json};
use crate::instruments::rollup_kib;
use crate::keeper::program;
use crate::{Failure, ensure};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Nothing may be touched.
const HANDS_OFF: &str = "[[policy.workloads]]\nmatch = \"*\"\nnever = true\n";
/// The shortest times that the configuration allows. A verdict is not waited for.
const HURRIED: &str = "[policy]\nage_min_s = 1\nscan_interval_s = 2\nobserve_min_s = 10\nmeter_samples_min = 8\n\
                       washout_min_s = 1\nmeasured_candidates_s = [2, 3, 4]\nplacebo_every_s = 0\n\
                       meter_noise_max = 2\n";
/// From the start of the daemon to the first change: on an emulated CPU a scan takes so long that the next one is a minute
/// later (homeostat spends at most 0.1 % of a CPU on scans), and only the second tells the CPU time.
const ACT_PATIENCE: Duration = Duration::from_secs(180);

/// Starts, answers, describes this machine, stops; is killed, is restored, starts again.
pub(super) fn lives_and_dies(context: &Context) -> Result<(), Failure> {
    let daemon = Daemon::start(&context.directory, HANDS_OFF)?;
    let status = daemon.json(&["status", "--json"])?;
    ensure!(
        status["pid"].as_u64() == Some(u64::from(daemon.pid())),
        "status names process {}",
        status["pid"]
    );
    let doctor = daemon.json(&["doctor", "--json"])?;
    let nodes = context.expected.nodes.len();
    ensure!(
        doctor["nodes"].as_u64() == Some(nodes as u64),
        "built with {nodes} nodes, and doctor says {}",
        doctor["nodes"]
    );
    let ended = daemon.stop()?;
    ensure!(ended.success(), "after SIGTERM it ended with {ended}");
    ensure!(
        !context.directory.join("io.homeostat").exists(),
        "its socket stays behind"
    );

    Daemon::start(&context.directory, HANDS_OFF)?.kill()?;
    let status = ask(&context.directory, &["status"])?.status;
    ensure!(
        status.code() == Some(3),
        "status of a dead daemon ends with {status}"
    );
    json(&ask(&context.directory, &["restore", "--json"])?)?;
    let again = Daemon::start(&context.directory, HANDS_OFF)?.stop()?;
    ensure!(again.success(), "the next one ended with {again}");
    Ok(())
}

/// A program of `crates/workloads`, ended when dropped.
struct Program(Child);

impl Program {
    fn start(name: &str, arguments: &[&str]) -> Result<Self, Failure> {
        Command::new(program(name)?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map(Self)
            .map_err(Failure::system(format!("starting {name}")))
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap_or(0)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two daemons, each with a program of its own in a unit of its own: each finds its program, meters it and tries large
/// pages. One is killed while they are on, and `restore` takes them back; the other is stopped while they are on and takes
/// them back itself. Whether it helps is not asked here.
pub(super) fn acts_and_is_killed(context: &Context) -> Result<(), Failure> {
    let acting = |unit: &str| -> Result<(Acting, Daemon), Failure> {
        let group = Group::make(unit)?;
        let program = Program::start("latency", &["80", "64", "1", "900", "--order", "random"])?;
        group.enter(program.pid())?;
        let directory = context.directory.join(unit);
        let configuration = format!(
            "{HURRIED}[policy.strategies]\ncache_affinity = false\nmemory_affinity = false\n\
             [[policy.workloads]]\nmatch = {unit:?}\n{HANDS_OFF}"
        );
        let daemon = Daemon::start(&directory, &configuration)?;
        let acting = Acting {
            program,
            directory,
            _group: group,
        };
        Ok((acting, daemon))
    };
    let (one, mut killed) = acting("one.service")?;
    let (two, mut stopped) = acting("two.service")?;
    let huge = |acting: &Acting| rollup_kib(acting.program.pid(), "AnonHugePages");

    let took = killed.wait_until("it makes large pages", ACT_PATIENCE, |_| Ok(huge(&one)? > 0))?;
    killed.kill()?;
    context.note(&format!("acted after {:.0} s", took.as_secs_f64()));
    let restored = json(&ask(&one.directory, &["restore", "--json"])?)?;
    let count = |key: &str| restored[key].as_array().map_or(0, Vec::len);
    ensure!(
        count("undone") == 1 && count("failed") == 0,
        "restore after kill -9: {restored}"
    );
    ensure!(
        huge(&one)? == 0,
        "{} KiB are on large pages after the restore",
        huge(&one)?
    );

    stopped.wait_until("the other makes large pages", ACT_PATIENCE, |_| {
        Ok(huge(&two)? > 0)
    })?;
    let ended = stopped.stop()?;
    ensure!(ended.success(), "after SIGTERM it ended with {ended}");
    ensure!(
        huge(&two)? == 0,
        "{} KiB are on large pages after SIGTERM",
        huge(&two)?
    );
    Ok(())
}

/// What one of several daemons works on.
struct Acting {
    program: Program,
    directory: PathBuf,
    // Dropped last: the group cannot be removed before its process is gone.
    _group: Group,
}
