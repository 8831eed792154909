//! `homeostat demo`: a real gain on real processes, proven live, and everything put back.
//!
//! There are two: large pages (below), and the protection of a program from a big reader (`file_cache`). A demo starts workloads and a private daemon of its own, in a directory of its own, and lets the daemon find
//! the workloads by itself. A rule keeps that daemon's hands off everything else on the machine. What is in large
//! pages before, during and after is read from the kernel here, not taken from the daemon.

mod arena;
mod children;
mod file_cache;
mod ground;

use crate::Context;
use crate::failure::{Failure, Kind};
use crate::render::{self, Look, bytes, effect};
use children::{Daemon, Scratch, Workload};
use clap::{Args, ValueEnum};
use ground::Ground;
use homeostat_daemon::api::{self, Effect, Status};
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::machine_lock;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Every workload has until then, counted from the beginning: its undo and the end of the daemon still fit into five
/// minutes. The first one may take all of it: on a loud host one gain that is proven says more than two that are not.
const VERDICT_UNTIL: Duration = Duration::from_secs(275);
/// The least time that is worth beginning the second one for; a quiet host needs about so long.
const REDIS_AT_LEAST: Duration = Duration::from_secs(60);
/// A host that is too loud for a trial, as after a build, often is calm again within a minute: what could not be tried is looked at again
/// so soon …
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// … as long as that is within this time from its start, so that the second program has some, too.
const LOOK_AGAIN_UNTIL: Duration = Duration::from_secs(120);
/// Time between two looks at the daemon.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Without a terminal a progress line comes this often.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// Level of each of the two tries. The daemon's own default is fifty times stricter, because it makes many tries; on a
/// loud host that needs more blocks than fit into five minutes.
const LEVEL: f64 = 0.05;
/// How long `latency` may fill its memory; an emulated CPU takes a minute or two.
const FILL_PATIENCE: Duration = Duration::from_secs(120);
/// How long an undo may take.
const UNDO_PATIENCE: Duration = Duration::from_secs(30);
/// Memory of `latency`: far more than translation buffers reach with 4 KiB pages; a switch fits blocks of 1 to 1.5 s.
const LATENCY_MIB: u64 = 512;

/// Prove a real gain on a real process, live, in under five minutes.
///
/// Needs root. large-pages starts `latency` (a pointer chase over 512 MiB) and, if it is installed, a redis-server with a
/// load generator; a private daemon finds them, tries large pages on and off in random order, judges, and undoes.
/// Where the kernel gives programs large pages from the start (THP=always), it shows shared memory, or file-cache.
/// file-cache starts a program that works on a file and one that reads a large file, in a control group with too little
/// memory for both; the daemon keeps the reader from pushing the other out, proves it, and undoes. No other process is
/// touched.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat demo
  homeostat demo --no-redis                  the first program only
  homeostat demo file-cache                  a big reader no longer pushes a program out of memory
  homeostat demo --json > demo.json

Exit status: 0 when the demo ended and everything was put back, whether a gain was proven or not; --json has the verdict.")]
pub struct Demo {
    /// What to show.
    #[arg(value_enum, default_value = "large-pages")]
    what: What,
    /// Leave redis out even if it is installed.
    #[arg(long)]
    no_redis: bool,
}

/// The demos.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Large pages for running programs.
    LargePages,
    /// A reader of files is kept to a little memory.
    FileCache,
}

/// What one workload showed.
#[derive(Clone, Debug, Serialize)]
struct Shown {
    program: String,
    verdict: String,
    /// Why there is no gain, where none was proven.
    reason: String,
    effect: Option<Effect>,
    blocks: u32,
    seconds: u64,
    huge_bytes_before: u64,
    huge_bytes_during: u64,
    huge_bytes_after: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Summary {
    schema: u32,
    workloads: Vec<Shown>,
    restored: bool,
    seconds: u64,
}

impl Demo {
    /// Runs it.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        if self.what == What::FileCache {
            return file_cache::run(context);
        }
        let begin = Instant::now();
        let latency = self.check(context)?;
        let ground = Ground::of_this_machine();
        let show = Show {
            look: context.terminal.look(),
            live: context.terminal.is_terminal,
            quiet: context.terminal.json,
        };
        if let Some(text) = ground.explanation() {
            show.write(&text);
        }
        if ground == Ground::Nothing {
            return file_cache::run(context);
        }
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [
            signal_hook::consts::SIGINT,
            signal_hook::consts::SIGTERM,
            signal_hook::consts::SIGHUP,
        ] {
            signal_hook::flag::register(signal, stop.clone())
                .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
        }
        let scratch = Scratch::new().map_err(|e| Failure::from_error(&e))?;
        let redis = if self.no_redis || ground == Ground::Shared {
            None
        } else {
            children::copy_of_redis(&scratch)
        };
        // Before the daemon looks: a program that is being filled does other work than one that is read, and what it
        // did then would count as noise.
        let filled = redis.as_deref().map(|server| {
            let keys = children::Redis::keys();
            show.write(&format!(
                "Filling a redis-server with {:.1} million keys …",
                keys as f64 / 1e6
            ));
            children::Redis::start(server, keys, &scratch, &stop)
        });
        let mib = children::memory_available_mib()
            .map_or(LATENCY_MIB, |free| LATENCY_MIB.min(free / 3))
            .max(64)
            .to_string();
        let mut arguments = vec![
            mib.as_str(),
            "64",
            "1",
            "900",
            "--order",
            "random",
            "--report",
            "1",
        ];
        arguments.extend(ground.arguments());
        show.write(&format!("Filling {mib} MiB of memory …"));
        let child = Workload::start(&latency, &arguments, &scratch, "latency")
            .map_err(|e| Failure::from_error(&e))?;
        let filling = Instant::now();
        while child.last_report("work_per_s").is_none()
            && child.ended().is_none()
            && filling.elapsed() < FILL_PATIENCE
            && !stop.load(Ordering::Relaxed)
        {
            std::thread::sleep(LOOK_EVERY);
        }
        if stop.load(Ordering::Relaxed) {
            return Err(interrupted());
        }
        let programs: Vec<&Path> = [Some(latency.as_path()), redis.as_deref()]
            .into_iter()
            .flatten()
            .collect();
        let daemon = start_daemon_with(
            &scratch,
            &programs,
            Some(LOOK_AGAIN),
            context.meter_settings().0.breakpoints,
        )?;
        let mut stage = Stage {
            show,
            stop,
            next_line: 0,
            daemon,
            client: None,
        };
        let mut summary = Summary {
            schema: homeostat_daemon::api::SCHEMA,
            workloads: vec![],
            restored: true,
            seconds: 0,
        };

        stage.say(&format!(
            "A private daemon runs (process {}). It may touch only the programs that this demo starts.\nA gain counts \
             as proven when chance alone would show it in less than {} of 100 such tries.",
            stage.daemon.pid(),
            LEVEL * 100.0
        ));
        stage.say(&format!(
            "\n1. latency: one thread follows pointers through {mib} MiB of {} memory in random order.",
            ground.memory()
        ));
        summary.workloads.push(stage.prove(
            "latency",
            (&child, ground),
            VERDICT_UNTIL.saturating_sub(begin.elapsed()),
            &mut summary.restored,
        )?);
        drop(child);

        let left = VERDICT_UNTIL.saturating_sub(begin.elapsed());
        match filled {
            Some(Ok(_)) if left < REDIS_AT_LEAST => stage.say(&format!(
                "\n2. redis-server: left out, because {} s are too little for it now.",
                left.as_secs()
            )),
            Some(Ok(mut redis)) => {
                stage.say(&format!(
                    "\n2. redis-server: {:.1} million keys, read at random by redis-benchmark, {} at a time.",
                    redis.keys_filled() as f64 / 1e6,
                    children::REDIS_KEYS_PER_READ
                ));
                match redis.start_load(&scratch) {
                    Ok(()) => summary.workloads.push(stage.prove(
                        "redis-server",
                        (&redis.server, ground),
                        VERDICT_UNTIL.saturating_sub(begin.elapsed()),
                        &mut summary.restored,
                    )?),
                    Err(e) => stage.say(&format!("   redis could not be put under load: {e}")),
                }
            }
            Some(Err(e)) => stage.say(&format!("\n2. redis could not be started: {e}")),
            None if self.no_redis => {}
            None if ground == Ground::Shared => stage.say(
                "\n2. redis-server: left out. Its memory is private, and redis itself switches large pages off where \
                 enabled is always.",
            ),
            None => stage.say("\n2. redis-server and redis-benchmark are not installed: left out."),
        }
        let Stage {
            show, daemon, client, ..
        } = stage;
        drop(client);
        summary.restored &= daemon.stop().map_err(|e| Failure::from_error(&e))?;
        summary.seconds = begin.elapsed().as_secs();
        if show.quiet {
            context.terminal.show(&summary, |_| String::new())?;
        } else {
            context.terminal.print(&closing(&summary))?;
        }
        if summary.restored {
            Ok(())
        } else {
            Err(Failure::failed("something was not put back; see above"))
        }
    }

    /// Refuses where the demo can not work, and finds `latency`.
    fn check(&self, context: &Context) -> Result<PathBuf, Failure> {
        require_root_and_no_daemon(context)?;
        let own = std::env::current_exe().map_err(|e| Failure::failed(format!("cannot find myself: {e}")))?;
        let latency = own.with_file_name("latency");
        if latency.is_file() {
            Ok(latency)
        } else {
            Err(Failure::Report(
                Kind::NotFound,
                format!(
                    "the program `latency` is not beside {}\n  hint: build it with: cargo build --release -p \
                     homeostat-workloads",
                    own.display()
                ),
            ))
        }
    }
}

/// A demo changes other processes, and two daemons would disturb each other.
fn require_root_and_no_daemon(context: &Context) -> Result<(), Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::Report(
            Kind::Permission,
            "the demo needs root\n  hint: sudo homeostat demo".into(),
        ));
    }
    let runs = |who: &str| {
        Failure::failed(format!(
            "a homeostat daemon runs on this machine{who}, and two would disturb each other\n  hint: stop it first; \
             `homeostat status` shows what it does"
        ))
    };
    // One with another socket has the machine's lock.
    if let Some(holder) = machine_lock::holder(Path::new(machine_lock::FILE)) {
        return Err(runs(&machine_lock::holder_text(&holder)));
    }
    match Client::connect(&context.socket()) {
        Err(ClientError::NotRunning(_)) => Ok(()),
        Ok(_) => Err(runs("")),
        Err(e) => Err(e.into()),
    }
}

fn interrupted() -> Failure {
    Failure::failed("interrupted; everything that the demo started was stopped and undone")
}

/// Settings that fit into five minutes, and the rule that keeps the daemon to our own programs. `reconsider`: when what was declined is
/// looked at again, if that is to be sooner than usual; `breakpoints`: as the machine's configuration has it.
fn settings(scratch: &Path, programs: &[&Path], reconsider: Option<Duration>, breakpoints: bool) -> String {
    let text = |path: &Path| format!("{:?}", path.to_string_lossy());
    let mut out = format!(
        "[paths]\nstate_directory = {}\n[control]\nsocket = {}\n[meters]\nbreakpoints = {breakpoints}\n[policy]\nage_min_s = 5\ncpu_min = 0.01\nscan_interval_s = 2\n\
         observe_min_s = 15\nmeter_samples_min = 8\n\
         experiment_max_s = 240\nplacebo_every_s = 0\nprobation_pairs = 0\n\
         discovery = {{ kind = \"fixed\", alpha = {LEVEL} }}\nbackoff_rejected_s = 600\n\
         backoff_inconclusive_s = 600\n",
        text(&scratch.join("state")),
        text(&scratch.join("io.homeostat")),
    );
    if let Some(after) = reconsider {
        out.push_str(&format!("reconsider_s = {}\n", after.as_secs()));
    }
    for program in programs {
        out.push_str(&format!("[[policy.workloads]]\nmatch = {}\n", text(program)));
    }
    out.push_str("[[policy.workloads]]\nmatch = \"*\"\nnever = true\n");
    out
}

fn start_daemon_with(
    scratch: &Scratch,
    programs: &[&Path],
    reconsider: Option<Duration>,
    breakpoints: bool,
) -> Result<Daemon, Failure> {
    let config = scratch.path().join("homeostat.toml");
    std::fs::write(
        &config,
        settings(scratch.path(), programs, reconsider, breakpoints),
    )
    .map_err(|e| Failure::failed(format!("cannot write {}: {e}", config.display())))?;
    Daemon::start(scratch, &config).map_err(|e| Failure::from_error(&e))
}

/// How the demo talks.
struct Show {
    look: Look,
    /// A terminal, on which one line can be written over and over.
    live: bool,
    quiet: bool,
}

impl Show {
    /// Messages go to standard error when standard output belongs to JSON.
    fn write(&self, text: &str) {
        let clear = if self.live { "\r\x1b[K" } else { "" };
        // Whoever closed our output does not want to see it; the demo still has to put things back.
        let _ = if self.quiet {
            writeln!(std::io::stderr(), "{}", text.trim_end())
        } else {
            writeln!(std::io::stdout(), "{clear}{}", text.trim_end())
        };
    }

    fn progress(&self, line: &str) {
        if self.live && !self.quiet {
            let cut: String = line.chars().take(self.look.width.saturating_sub(1)).collect();
            let mut out = std::io::stdout();
            let _ = write!(out, "\r\x1b[K{cut}").and_then(|()| out.flush());
        }
    }
}

/// The running demo. The daemon is stopped, and so undoes everything, when this is dropped on any path.
struct Stage {
    show: Show,
    stop: Arc<AtomicBool>,
    next_line: u64,
    daemon: Daemon,
    client: Option<Client>,
}

impl Stage {
    fn say(&self, text: &str) {
        self.show.write(text);
    }

    /// One look at the daemon: its state, after telling what is new in its story.
    fn look(&mut self) -> Result<Status, Failure> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(interrupted());
        }
        if let Some(why) = self.daemon.ended() {
            return Err(Failure::failed(format!("the private daemon ended: {why}")));
        }
        if self.client.is_none() {
            self.client = Some(self.daemon.connect()?);
        }
        let Some(client) = self.client.as_mut() else {
            return Err(Failure::failed("no connection"));
        };
        let part = client.story(self.next_line)?;
        let status = client.status()?;
        self.next_line = part.next;
        for line in part.lines.iter().filter(|l| l.workload.is_some()) {
            // What the demo told the daemon to leave alone is no news.
            if !line.text.contains("says never for") {
                self.show
                    .write(&format!("   {}", render::story(line, &self.show.look)));
            }
        }
        Ok(status)
    }

    /// Follows one workload from its start to its verdict, then takes the change back and checks that it is gone.
    fn prove(
        &mut self,
        program: &str,
        (child, ground): (&Workload, Ground),
        patience: Duration,
        restored: &mut bool,
    ) -> Result<Shown, Failure> {
        let begin = Instant::now();
        let mut shown = Shown {
            program: program.into(),
            verdict: "none in time".into(),
            reason: String::new(),
            effect: None,
            blocks: 0,
            seconds: 0,
            huge_bytes_before: 0,
            huge_bytes_during: 0,
            huge_bytes_after: None,
        };
        let mut pages = Pages::default();
        let mut told = Instant::now();
        let mut name = String::new();
        let mut was_declined = false;
        let status = loop {
            // Read before the daemon is asked: a change that it does not know of yet is not in here.
            let huge = child.huge_bytes(ground).unwrap_or(0);
            let status = self.look()?;
            if let Some(why) = child.ended() {
                return Err(Failure::failed(format!("{program} ended: {why}")));
            }
            let found = status
                .workloads
                .iter()
                .find(|w| w.pids.contains(&i64::from(child.pid())));
            if let Some(found) = found {
                name = found.name.to_string();
            }
            pages.read(huge, is_changed(&status, &name));
            if let Some(e) = status.experiments.iter().find(|e| *e.workload == *name) {
                shown.blocks = e.blocks;
                let line = format!(
                    "   {}; {} in large pages",
                    render::experiment_line(e),
                    bytes(huge)
                );
                self.show.progress(&line);
                if !self.show.live && told.elapsed() >= PROGRESS_EVERY {
                    told = Instant::now();
                    self.say(&line);
                }
            }
            if let Some(outcome) = status.outcomes.iter().find(|o| *o.workload == *name) {
                shown.verdict = outcome.verdict.to_string();
                shown.reason.clone_from(&outcome.reason);
                shown.effect.clone_from(&outcome.effect);
                shown.blocks = outcome.blocks;
                break status;
            }
            let declined = found.filter(|w| w.stage == api::Stage::Declined);
            if let Some(found) = declined.filter(|_| !was_declined) {
                self.say(&format!("   declined: {}", found.summary));
                if !is_looked_at_again(&found.summary, begin.elapsed(), patience) {
                    shown.verdict = "declined".into();
                    shown.reason.clone_from(&found.summary);
                    break status;
                }
                self.say(&format!(
                    "   It is looked at again in {} s.",
                    LOOK_AGAIN.as_secs()
                ));
            }
            was_declined = declined.is_some();
            if begin.elapsed() > patience {
                let why = status
                    .workloads
                    .iter()
                    .find(|w| *w.name == *name)
                    .map(|w| w.summary.clone());
                shown.reason = why.unwrap_or_else(|| "the daemon has not found it".into());
                self.say(&format!(
                    "   no verdict after {} s; {}",
                    patience.as_secs(),
                    shown.reason
                ));
                break status;
            }
            std::thread::sleep(LOOK_EVERY);
        };
        shown.seconds = begin.elapsed().as_secs();
        let gain = shown
            .effect
            .as_ref()
            .map_or_else(String::new, |e| format!(": {}", effect(e)));
        self.say(&format!(
            "   Verdict for {program} after {} s: {}{gain}",
            shown.seconds, shown.verdict
        ));
        (shown.huge_bytes_before, shown.huge_bytes_during) = (pages.before, pages.during);
        *restored &= self.put_back((child, ground), &status, &name, &mut shown, pages.changed)?;
        Ok(shown)
    }

    /// Has the daemon undo everything, if something of that workload is in force or on trial.
    fn undo_changes_of(&mut self, name: &str, status: &Status) -> Result<(), Failure> {
        if let (Some(client), true) = (self.client.as_mut(), is_changed(status, name)) {
            client.undo_all()?;
        }
        Ok(())
    }

    /// Takes the change back and says whether it is gone. A workload that was not changed has nothing to be put back: what the
    /// kernel does with its pages meanwhile is the kernel's.
    fn put_back(
        &mut self,
        (child, ground): (&Workload, Ground),
        status: &Status,
        name: &str,
        shown: &mut Shown,
        changed: bool,
    ) -> Result<bool, Failure> {
        self.undo_changes_of(name, status)?;
        let begin = Instant::now();
        let mut after = child.huge_bytes(ground);
        let is_left =
            |after: Option<u64>| changed && after.is_some_and(|after| after > shown.huge_bytes_before);
        while is_left(after) && begin.elapsed() < UNDO_PATIENCE {
            self.look()?;
            std::thread::sleep(LOOK_EVERY);
            after = child.huge_bytes(ground);
        }
        let is_back = !is_left(after);
        shown.huge_bytes_after = after;
        match after {
            Some(after) if changed => self.say(&format!(
                "   In large pages: {} before, {} at most during, {} after the undo (read from the kernel).",
                bytes(shown.huge_bytes_before),
                bytes(shown.huge_bytes_during),
                bytes(after)
            )),
            Some(after) => self.say(&format!(
                "   Nothing was changed. In large pages: {} (read from the kernel).",
                bytes(after)
            )),
            None => {}
        }
        Ok(is_back)
    }
}

/// Whether something of that workload is in force or on trial.
fn is_changed(status: &Status, name: &str) -> bool {
    status.in_force.iter().any(|c| *c.workload == *name)
        || status.experiments.iter().any(|e| *e.workload == *name)
}

/// Memory in large pages over the course of a demo.
#[derive(Debug, Default)]
struct Pages {
    /// The reading of the last look and that of the look before it.
    last: [u64; 2],
    before: u64,
    during: u64,
    changed: bool,
}

impl Pages {
    /// Takes a reading. The state of the daemon is up to a turn of its loop old, so that a change may have begun when it shows none:
    /// what counts as before is the reading of two looks ago.
    fn read(&mut self, huge: u64, changed: bool) {
        self.changed |= changed;
        if !self.changed {
            self.before = self.last[1];
        }
        self.during = self.during.max(huge);
        self.last = [huge, self.last[0]];
    }
}

/// Whether what was declined so long after its start is looked at again: the reason may pass, and there is time for it.
fn is_looked_at_again(why: &str, after: Duration, patience: Duration) -> bool {
    is_of_noise(why) && after + LOOK_AGAIN <= LOOK_AGAIN_UNTIL.min(patience)
}

/// Whether what was declined may be tried when the host is calmer. What is declined for another reason stays so.
fn is_of_noise(why: &str) -> bool {
    why.starts_with("not tried: too noisy")
        || why.starts_with("not touched, because its work cannot be measured")
}

fn closing(summary: &Summary) -> String {
    let mut out = String::from("\nIn short\n");
    for w in &summary.workloads {
        let gain = w
            .effect
            .as_ref()
            .map_or_else(String::new, |e| format!(" {}", effect(e)));
        out.push_str(&format!(
            "  {}: {}{gain}, {} blocks, {} s from its start to the verdict\n",
            w.program, w.verdict, w.blocks, w.seconds
        ));
        if w.verdict != "accepted" && !w.reason.is_empty() {
            out.push_str(&format!("    {}\n", w.reason));
        }
    }
    if summary.workloads.iter().all(|w| w.verdict != "accepted") {
        out.push_str("  No gain was proven here, and nothing was kept.\n");
    }
    out.push_str(if summary.restored {
        "  The daemon has undone everything and ended; nothing stays changed.\n"
    } else {
        "  NOT everything was put back: see above.\n"
    });
    out.push_str(&format!(
        "  The demo took {} s. On your own workloads: homeostat run\n",
        summary.seconds
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_daemon::settings::{Sources, load};

    #[test]
    fn the_settings_of_the_demo_are_valid_and_touch_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("homeostat.toml");
        let (latency, redis) = (
            Path::new("/opt/a \"b\"/latency"),
            Path::new("/tmp/x/redis-server"),
        );
        std::fs::write(
            &file,
            settings(directory.path(), &[latency, redis], Some(LOOK_AGAIN), false),
        )
        .unwrap();
        let loaded = load(&Sources {
            file: Some(file),
            set: vec![],
        })
        .unwrap();
        assert!(!loaded.settings.meters.breakpoints);
        let policy = &loaded.settings.policy;
        for mine in ["/opt/a \"b\"/latency", "/tmp/x/redis-server"] {
            assert!(
                policy
                    .rule_for(&["latency[7]", "latency", mine])
                    .is_some_and(|r| !r.never),
                "{mine}"
            );
        }
        assert!(
            policy
                .rule_for(&["redis-server.service", "redis-server", "/usr/bin/redis-server"])
                .unwrap()
                .never
        );
        assert_eq!(policy.reconsider_s, LOOK_AGAIN.as_secs_f64());
    }

    #[test]
    fn a_workload_was_changed_only_where_the_daemon_had_a_trial() {
        // On a machine that gives large pages by itself, memory in them grows while nothing is on trial.
        let mut pages = Pages::default();
        for huge in [0, 2, 8, 8, 8] {
            pages.read(huge, false);
        }
        assert_eq!((pages.before, pages.during, pages.changed), (8, 8, false));
        // The first reading that shows the change may come before the state that does.
        pages.read(20, false);
        pages.read(30, true);
        pages.read(12, false);
        assert_eq!((pages.before, pages.during, pages.changed), (8, 30, true));
    }

    #[test]
    fn the_end_says_why_nothing_was_proven() {
        let text = closing(&Summary {
            schema: 1,
            workloads: vec![Shown {
                program: "latency".into(),
                verdict: "declined".into(),
                reason: "0 B to convert; 1 GiB is in large pages already".into(),
                effect: None,
                blocks: 0,
                seconds: 9,
                huge_bytes_before: 0,
                huge_bytes_during: 0,
                huge_bytes_after: Some(1 << 30),
            }],
            restored: true,
            seconds: 10,
        });
        assert!(text.contains("1 GiB is in large pages already"), "{text}");
        assert!(
            text.contains("No gain was proven") && text.contains("nothing stays changed"),
            "{text}"
        );
    }

    #[test]
    fn what_was_declined_for_noise_is_looked_at_again_while_there_is_time() {
        let of_noise = [
            "not tried: too noisy: neighbouring blocks differ by 9.1 %, so only gains above 8 % could be proven in 4 min",
            "not touched, because its work cannot be measured from outside (no meter fits it). Remedy: publish a progress counter",
        ];
        let second = Duration::from_secs(1);
        for why in of_noise {
            let last = LOOK_AGAIN_UNTIL - LOOK_AGAIN;
            assert!(is_looked_at_again(why, Duration::ZERO, VERDICT_UNTIL), "{why}");
            assert!(is_looked_at_again(why, last, VERDICT_UNTIL), "{why}");
            // The second program is to have some time, too.
            assert!(!is_looked_at_again(why, last + second, VERDICT_UNTIL), "{why}");
            // Of the second one there may be less.
            let last = REDIS_AT_LEAST - LOOK_AGAIN;
            assert!(is_looked_at_again(why, last, REDIS_AT_LEAST), "{why}");
            assert!(!is_looked_at_again(why, last + second, REDIS_AT_LEAST), "{why}");
        }
        // These stay as they are.
        for why in [
            "only 10 MiB resident: too small to gain from large pages (at least 32 MiB)",
            "not tried: too many intervals without any work",
        ] {
            assert!(!is_looked_at_again(why, Duration::ZERO, VERDICT_UNTIL), "{why}");
        }
    }
}
