//! The whole daemon in the guest.

use super::Context;
use crate::daemon::{Daemon, ask, json};
use crate::{Failure, ensure};

/// Nothing may be touched.
const HANDS_OFF: &str = "[[policy.workloads]]\nmatch = \"*\"\nnever = true\n";
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
