//! `homeostat demo file-cache`: a program on a file loses its memory to a big reader, and gets it back.
//!
//! A control group of 256 MiB plays the machine whose memory is too small for both. What the two programs do is read from
//! their own reports, and where the reader is from the kernel; neither is taken from the daemon.

use super::arena::{self, Arena};
use super::children::{Scratch, Workload};
use super::{LEVEL, LOOK_EVERY, Show, Stage, VERDICT_UNTIL, interrupted, start_daemon_with};
use crate::Context;
use crate::failure::{Failure, Kind};
use crate::render::{self, effect};
use homeostat_daemon::api::{self, Effect, Status};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Memory of the group in which both programs run, in MiB.
const ARENA_MIB: u64 = 256;
/// Working set of `file-worker`: fits, as long as nobody else wants memory.
const WORKER_MIB: u64 = 192;
/// `file-worker` pauses for so many milliseconds after every 100: as a server does between requests. One that touches its
/// pages all the time may keep them.
const WORKER_PAUSE_MS: u64 = 100;
/// File of `file-reader`: never fits.
const READER_MIB: u64 = 1024;
/// The daemon knows how the worker's work is measured after this time at the latest.
const METER_PATIENCE: Duration = Duration::from_secs(75);
/// Time alone that is shown before the reader starts.
const ALONE: Duration = Duration::from_secs(5);
/// How long the undo may take.
const UNDO_PATIENCE: Duration = Duration::from_secs(20);
/// Without a terminal a line comes this often.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The worker counts as recovered at this share of its speed alone.
const RECOVERED: f64 = 0.8;

/// What both programs did in a part of the demo: medians over seconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Part {
    /// Seconds that were read.
    seconds: usize,
    /// Touches per second of `file-worker`.
    worker_per_s: f64,
    /// MiB per second of `file-reader`.
    reader_mib_per_s: f64,
}

#[derive(Debug, Default, Serialize)]
struct Summary {
    schema: u32,
    alone: Part,
    unprotected: Part,
    protected: Part,
    /// From the first containment to 80 % of the speed alone; `null` when it did not come to that.
    recovered_after_s: Option<f64>,
    /// From the start of the reader to the first containment.
    contained_after_s: Option<f64>,
    verdict: String,
    /// Why there is no gain, where none was proven.
    reason: String,
    effect: Option<Effect>,
    blocks: u32,
    limit_bytes: Option<u64>,
    restored: bool,
    seconds: u64,
}

/// Seconds of both programs, sorted into parts.
#[derive(Debug, Default)]
struct Seconds {
    worker: Vec<f64>,
    reader: Vec<f64>,
}

impl Seconds {
    fn part(&self) -> Part {
        Part {
            seconds: self.worker.len(),
            worker_per_s: median(&self.worker),
            reader_mib_per_s: median(&self.reader) / (1024.0 * 1024.0),
        }
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// The programs, the group they run in, and what is watched of them. Declared in the order in which they must end.
struct Play {
    reader: Option<Workload>,
    worker: Workload,
    arena: Arena,
    reader_program: PathBuf,
    reader_file: PathBuf,
    reader_group: PathBuf,
}

/// Runs it.
pub(super) fn run(context: &Context) -> Result<(), Failure> {
    let begin = Instant::now();
    let (worker_program, reader_program) = programs(context)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ] {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
    }
    let scratch = Scratch::on_disk().map_err(|e| Failure::from_error(&e))?;
    let show = Show {
        look: context.terminal.look(),
        live: context.terminal.is_terminal,
        quiet: context.terminal.json,
    };
    show.write(&format!(
        "A control group with {ARENA_MIB} MiB plays a machine whose memory is too small. Making files …"
    ));
    let reader_file = scratch.path().join("backup");
    make_file(&reader_file, READER_MIB, &stop)
        .map_err(|e| Failure::failed(format!("cannot make {}: {e}", reader_file.display())))?;
    if stop.load(Ordering::Relaxed) {
        return Err(interrupted());
    }
    let mut arena = Arena::new(&format!("homeostat-demo-{}", std::process::id()), ARENA_MIB << 20)
        .map_err(Failure::failed)?;
    let group = arena.group_for("worker").map_err(Failure::failed)?;
    let worker_file = scratch.path().join("index").to_string_lossy().into_owned();
    let worker = Workload::start_in(
        &group,
        &worker_program,
        &[
            &WORKER_MIB.to_string(),
            "900",
            "--file",
            &worker_file,
            "--pause",
            &WORKER_PAUSE_MS.to_string(),
            "--report",
            "1",
        ],
        &scratch,
        "file-worker",
    )
    .map_err(|e| Failure::from_error(&e))?;
    let daemon = start_daemon_with(
        &scratch,
        &[&worker_program, &reader_program],
        None,
        context.meter_settings().0.breakpoints,
    )?;
    let mut stage = Stage {
        show,
        stop,
        next_line: 0,
        daemon,
        client: None,
    };
    let mut play = Play {
        reader: None,
        worker,
        arena,
        reader_program,
        reader_file,
        reader_group: PathBuf::new(),
    };
    let outcome = play.show(&mut stage, &scratch, begin);
    let Stage {
        show, daemon, client, ..
    } = stage;
    drop(client);
    let stopped = daemon.stop().map_err(|e| Failure::from_error(&e))?;
    let mut summary = outcome?;
    summary.restored &= stopped;
    summary.seconds = begin.elapsed().as_secs();
    drop(play);
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

impl Play {
    fn show(&mut self, stage: &mut Stage, scratch: &Scratch, begin: Instant) -> Result<Summary, Failure> {
        stage.say(&format!(
            "A private daemon runs (process {}). It may touch only the two programs of this demo.\nA gain counts as \
             proven when chance alone would show it in less than {} of 100 such tries.\n\n1. file-worker touches {WORKER_MIB} MiB \
             of a file at random, with pauses, alone.",
            stage.daemon.pid(),
            LEVEL * 100.0
        ));
        if let Some(reason) = self.await_meter(stage)? {
            stage.say(&format!("   declined: {reason}"));
            return Ok(Summary {
                schema: homeostat_daemon::api::SCHEMA,
                verdict: "declined".into(),
                reason,
                restored: true,
                ..Summary::default()
            });
        }
        let mut alone = Seconds::default();
        let since = Instant::now();
        while since.elapsed() < ALONE {
            stage.look()?;
            std::thread::sleep(Duration::from_secs(1));
            alone.worker.extend(self.worker.last_report("work_per_s"));
        }
        let alone = alone.part();
        stage.say(&format!(
            "   {} touches a second.\n\n2. file-reader reads a file of {READER_MIB} MiB over and over, as a backup would \
             once.",
            count(alone.worker_per_s)
        ));
        let group = self.arena.group_for("reader").map_err(Failure::failed)?;
        self.reader_group.clone_from(&group);
        let file = self.reader_file.to_string_lossy().into_owned();
        self.reader = Some(
            Workload::start_in(
                &group,
                &self.reader_program,
                &[&READER_MIB.to_string(), "900", "--file", &file, "--report", "1"],
                scratch,
                "file-reader",
            )
            .map_err(|e| Failure::from_error(&e))?,
        );
        self.watch(stage, alone, begin)
    }

    /// Waits until the daemon knows how the worker's work is measured: no change is made that cannot be judged. Says why not,
    /// if it finds no way.
    fn await_meter(&self, stage: &mut Stage) -> Result<Option<String>, Failure> {
        let begin = Instant::now();
        loop {
            let status = stage.look()?;
            self.alive()?;
            let found = status
                .workloads
                .iter()
                .find(|w| w.pids.contains(&i64::from(self.worker.pid())));
            if found.is_some_and(|w| w.stage > api::Stage::Considered) {
                return Ok(None);
            }
            if begin.elapsed() > METER_PATIENCE {
                let why = found.map_or("the daemon has not found it", |w| w.summary.as_str());
                return Ok(Some(format!(
                    "after {} s the daemon has no way to measure file-worker: {why}",
                    METER_PATIENCE.as_secs()
                )));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn alive(&self) -> Result<(), Failure> {
        let ended = |name: &str, w: &Workload| {
            w.ended()
                .map(|why| Failure::failed(format!("{name} ended: {why}")))
        };
        match ended("file-worker", &self.worker)
            .or_else(|| self.reader.as_ref().and_then(|r| ended("file-reader", r)))
        {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// The control group of the reader, and what it is kept to.
    fn place_of_reader(&self) -> (Option<String>, Option<u64>) {
        let pid = self.reader.as_ref().map(Workload::pid);
        (
            pid.and_then(arena::memory_group_of),
            pid.and_then(arena::kept_to)
                .filter(|limit| *limit < ARENA_MIB << 20),
        )
    }

    /// From the start of the reader to the verdict, and everything put back.
    fn watch(&mut self, stage: &mut Stage, alone: Part, begin: Instant) -> Result<Summary, Failure> {
        let started = Instant::now();
        let (mut unprotected, mut protected) = (Seconds::default(), Seconds::default());
        let mut summary = Summary {
            schema: homeostat_daemon::api::SCHEMA,
            alone,
            unprotected: Part::default(),
            protected: Part::default(),
            recovered_after_s: None,
            contained_after_s: None,
            verdict: "none in time".into(),
            reason: String::new(),
            effect: None,
            blocks: 0,
            limit_bytes: None,
            restored: true,
            seconds: 0,
        };
        let mut second = Instant::now();
        let mut told = Instant::now();
        let mut contained_at: Option<Instant> = None;
        // Since when it is as it is: the first seconds after a switch belong to neither part.
        let mut settled_since = Instant::now();
        let mut was_contained = false;
        let name = loop {
            let status = stage.look()?;
            self.alive()?;
            let name = status
                .workloads
                .iter()
                .find(|w| w.pids.contains(&i64::from(self.worker.pid())))
                .map_or_else(String::new, |w| w.name.to_string());
            let (_, limit) = self.place_of_reader();
            let is_contained = limit.is_some();
            if is_contained != was_contained {
                was_contained = is_contained;
                settled_since = Instant::now();
            }
            if is_contained && contained_at.is_none() {
                contained_at = Some(Instant::now());
                summary.contained_after_s = Some(started.elapsed().as_secs_f64());
                summary.limit_bytes = limit;
            }
            if second.elapsed() >= Duration::from_secs(1) {
                second = Instant::now();
                let worker = self.worker.last_report("work_per_s").unwrap_or(0.0);
                let reader = self
                    .reader
                    .as_ref()
                    .and_then(|r| r.last_report("work_per_s"))
                    .unwrap_or(0.0);
                if let Some(at) = contained_at {
                    if summary.recovered_after_s.is_none()
                        && is_contained
                        && worker >= RECOVERED * alone.worker_per_s
                    {
                        summary.recovered_after_s = Some(at.elapsed().as_secs_f64());
                    }
                }
                if settled_since.elapsed() > Duration::from_secs(3) {
                    let part = if is_contained {
                        &mut protected
                    } else {
                        &mut unprotected
                    };
                    part.worker.push(worker);
                    part.reader.push(reader);
                }
                let trial = status
                    .experiments
                    .iter()
                    .find(|e| *e.workload == *name)
                    .map_or_else(String::new, |e| format!("; {}", render::experiment_line(e)));
                let line = format!(
                    "   {:>5.0} s  worker {:>8}/s  reader {:>5.0} MiB/s  {}{trial}",
                    started.elapsed().as_secs_f64(),
                    count(worker),
                    reader / (1024.0 * 1024.0),
                    limit.map_or_else(|| "free".to_owned(), |l| format!("kept to {} MiB", l >> 20)),
                );
                stage.show.progress(&line);
                if !stage.show.live && told.elapsed() >= LINE_EVERY {
                    told = Instant::now();
                    stage.say(&line);
                }
            }
            if let Some(e) = status.experiments.iter().find(|e| *e.workload == *name) {
                summary.blocks = e.blocks;
            }
            if let Some(outcome) = status
                .outcomes
                .iter()
                .find(|o| *o.workload == *name && o.strategy.as_str() == "file_cache")
            {
                summary.verdict = outcome.verdict.to_string();
                summary.reason.clone_from(&outcome.reason);
                summary.effect.clone_from(&outcome.effect);
                // The last block ends with the verdict: no look has seen it as a trial.
                summary.blocks = outcome.blocks;
                break name;
            }
            if begin.elapsed() > VERDICT_UNTIL {
                let found = status.workloads.iter().find(|w| *w.name == *name);
                summary.reason = found.map_or_else(String::new, |w| w.summary.clone());
                stage.say(&format!(
                    "   no verdict after {} s; {}",
                    started.elapsed().as_secs(),
                    summary.reason
                ));
                break name;
            }
            std::thread::sleep(LOOK_EVERY / 2);
        };
        summary.unprotected = unprotected.part();
        summary.protected = protected.part();
        let gain = summary
            .effect
            .as_ref()
            .map_or_else(String::new, |e| format!(": {}", effect(e)));
        stage.say(&format!(
            "   Verdict {} s after the reader started: {}{gain}",
            started.elapsed().as_secs(),
            summary.verdict
        ));
        let status = stage.look()?;
        self.put_back(stage, &status, &name, &mut summary)?;
        summary.seconds = begin.elapsed().as_secs();
        Ok(summary)
    }

    fn put_back(
        &self,
        stage: &mut Stage,
        status: &Status,
        name: &str,
        summary: &mut Summary,
    ) -> Result<(), Failure> {
        stage.undo_changes_of(name, status)?;
        let begin = Instant::now();
        loop {
            let (now, limit) = self.place_of_reader();
            // Where it was started, as the kernel names it below its mount.
            let is_home = now
                .as_deref()
                .is_some_and(|now| self.reader_group.ends_with(now.trim_start_matches('/')));
            let is_back = is_home && limit.is_none();
            // The group that was made for it goes after it: what it read is dropped first.
            let groups = std::fs::read_dir(self.arena.path())
                .map(|list| {
                    list.filter_map(Result::ok)
                        .any(|e| e.file_name().to_string_lossy().starts_with(arena::OWN_GROUP))
                })
                .unwrap_or(false);
            if is_back && !groups || begin.elapsed() > UNDO_PATIENCE {
                summary.restored = is_back && !groups;
                stage.say(&format!(
                    "   The reader is in the control group {} {} (read from the kernel).",
                    now.unwrap_or_default(),
                    if is_back {
                        "again, without a limit of its own"
                    } else {
                        "STILL"
                    }
                ));
                return Ok(());
            }
            stage.look()?;
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

fn programs(context: &Context) -> Result<(PathBuf, PathBuf), Failure> {
    super::require_root_and_no_daemon(context)?;
    let own = std::env::current_exe().map_err(|e| Failure::failed(format!("cannot find myself: {e}")))?;
    let find = |name: &str| {
        let path = own.with_file_name(name);
        if path.is_file() {
            return Ok(path);
        }
        Err(Failure::Report(
            Kind::NotFound,
            format!(
                "the program `{name}` is not beside {}\n  hint: build it with: cargo build --release -p \
                 homeostat-workloads",
                own.display()
            ),
        ))
    };
    Ok((find("file-worker")?, find("file-reader")?))
}

/// Makes a file and lets the kernel forget its pages: the reader is to read it from storage.
fn make_file(path: &Path, mib: u64, stop: &AtomicBool) -> std::io::Result<()> {
    let mut file = std::fs::File::create_new(path)?;
    let block: Vec<u8> = (0..1u32 << 20)
        .map(|at| (at.wrapping_mul(0x9E37_79B9) >> 16) as u8)
        .collect();
    for _ in 0..mib {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        file.write_all(&block)?;
    }
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

/// A count as people read it: `3.2 million`.
fn count(per_s: f64) -> String {
    if per_s >= 1e6 {
        format!("{:.1} M", per_s / 1e6)
    } else if per_s >= 1e4 {
        format!("{:.0} k", per_s / 1e3)
    } else {
        format!("{per_s:.0}")
    }
}

fn closing(s: &Summary) -> String {
    let mut out = String::from("\nIn short                     worker (touches/s)   reader (MiB/s)\n");
    for (name, part) in [
        ("worker alone", s.alone),
        ("with the reader", s.unprotected),
        ("the reader contained", s.protected),
    ] {
        let reader = if part.reader_mib_per_s > 0.0 {
            format!("{:.0}", part.reader_mib_per_s)
        } else {
            "-".into()
        };
        out.push_str(&format!(
            "  {name:<26} {:>18} {reader:>16}\n",
            count(part.worker_per_s)
        ));
    }
    let after =
        |seconds: Option<f64>| seconds.map_or_else(|| "not".to_owned(), |s| format!("after {s:.1} s"));
    out.push_str(&format!(
        "  The reader was contained {} (from its start); the worker had recovered {} (from then).\n  Verdict: {}{}, {} \
         blocks.\n",
        after(s.contained_after_s),
        after(s.recovered_after_s),
        s.verdict,
        s.effect.as_ref().map_or_else(String::new, |e| format!(" {}", effect(e))),
        s.blocks
    ));
    if s.verdict != "accepted" {
        out.push_str(&format!(
            "    {}\n  No gain was proven here, and nothing was kept.\n",
            s.reason
        ));
    }
    out.push_str(if s.restored {
        "  The daemon has undone everything and ended; nothing stays changed.\n"
    } else {
        "  NOT everything was put back: see above.\n"
    });
    out.push_str(&format!(
        "  The demo took {} s. On your own workloads: homeostat run\n",
        s.seconds
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_medians_and_nothing_is_zero() {
        let part = Seconds {
            worker: vec![5.0, 1.0, 9.0],
            reader: vec![2097152.0],
        }
        .part();
        assert_eq!(
            (part.seconds, part.worker_per_s, part.reader_mib_per_s),
            (3, 5.0, 2.0)
        );
        assert_eq!(Seconds::default().part().worker_per_s, 0.0);
    }

    #[test]
    fn counts_are_short() {
        assert_eq!(
            [count(51_234_567.0), count(12_345.0), count(3210.4)],
            ["51.2 M", "12 k", "3210"]
        );
    }

    #[test]
    fn the_end_says_what_was_not_reached() {
        let text = closing(&Summary {
            schema: 1,
            alone: Part::default(),
            unprotected: Part::default(),
            protected: Part::default(),
            recovered_after_s: None,
            contained_after_s: Some(4.25),
            verdict: "none in time".into(),
            reason: "waits since 30 s: memory is short".into(),
            effect: None,
            blocks: 3,
            limit_bytes: None,
            restored: false,
            seconds: 7,
        });
        assert!(
            text.contains("contained after 4.2 s") || text.contains("contained after 4.3 s"),
            "{text}"
        );
        assert!(
            text.contains("recovered not")
                && text.contains("NOT everything")
                && text.contains("waits since 30 s: memory is short\n  No gain was proven"),
            "{text}"
        );
    }
}
