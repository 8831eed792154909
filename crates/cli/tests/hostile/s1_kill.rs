//! S1: the daemon is killed at random moments of a trial, while a file system of a user never answers. The machine is as found after
//! `homeostat restore`, each time.
//!
//! One victim lives through all kills. The first comes while a change is in force. `HOMEOSTAT_KILLS` says how many there are (1 if
//! absent), `HOMEOSTAT_KILLS_SEED` chooses the moments of the others.

use crate::plant::{Options, Plant};
use crate::s1_mounts::{HONEST, attack, built, progress_directory, ready};
use homeostat_store::journal;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Kills where `HOMEOSTAT_KILLS` is absent.
const KILLS: u64 = 1;
/// A kill comes so long after the trial was seen, at most. That is some blocks of it.
const MOMENTS: Duration = Duration::from_secs(3);
/// Longest wait for a trial: a busy machine makes the meters vary, and those are looked at again.
const TRIAL_PATIENCE: Duration = Duration::from_secs(120);

/// Follows random addresses in much memory, for which large pages help, and counts its loads.
const VICTIM: &str = r#"
#include "homeostat_progress.h"
#include <string.h>
#include <sys/mman.h>
#define WORDS (1UL << 24)
int main(void)
{
    struct homeostat_progress progress;
    unsigned long state = 1, at = 0;
    unsigned long *words = mmap(0, 8 * WORDS + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED || homeostat_progress_open(&progress, "victim", "load", 1) != 0)
        return 1;
    words = (unsigned long *)(((unsigned long)words + (2UL << 20) - 1) & ~((2UL << 20) - 1));
    memset(words, 1, 8 * WORDS);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        for (int i = 0; i < 1 << 14; i++) {
            state = state * 6364136223846793005UL + 1442695040888963407UL;
            at = (words[at] + (state >> 33)) & (WORDS - 1);
        }
        homeostat_progress_add(&progress, 0, 1 << 14);
    }
}
"#;

/// What a trial of large pages changes, as the kernel tells it.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// `AnonHugePages` of the victim.
    huge: String,
    /// Mappings of the victim by what was advised for them: `hg`, `nh`.
    advised: [usize; 2],
    /// Settings of large pages of the machine.
    settings: BTreeMap<String, String>,
}

impl Found {
    fn now(victim: u32) -> Self {
        let smaps = fs::read_to_string(format!("/proc/{victim}/smaps")).unwrap();
        let flags = |flag| {
            let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
            flags
                .filter(|flags| flags.split_whitespace().any(|one| one == flag))
                .count()
        };
        let mut settings = BTreeMap::new();
        gather(Path::new("/sys/kernel/mm/transparent_hugepage"), &mut settings);
        assert!(settings.keys().any(|name| name.ends_with("/enabled")));
        Self {
            huge: huge(victim),
            advised: [flags("hg"), flags("nh")],
            settings,
        }
    }
}

/// `AnonHugePages` of a process.
fn huge(pid: u32) -> String {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = rollup.lines().find(|line| line.starts_with("AnonHugePages:"));
    line.unwrap().to_owned()
}

/// The files of a directory that can be written, and those below it. Others are counters.
fn gather(directory: &Path, into: &mut BTreeMap<String, String>) {
    use std::os::unix::fs::PermissionsExt;
    for entry in fs::read_dir(directory).unwrap().flatten() {
        let about = entry.metadata().unwrap();
        if about.is_dir() {
            gather(&entry.path(), into);
        } else if about.permissions().mode() & 0o200 != 0 {
            if let Ok(text) = fs::read_to_string(entry.path()) {
                into.insert(entry.path().to_string_lossy().into_owned(), text);
            }
        }
    }
}

/// A number from the environment.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

#[test]
fn a_daemon_that_is_killed_in_a_trial_leaves_the_machine_as_found() {
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !enabled.contains("[madvise]") {
        eprintln!("skipped: needs transparent huge pages on request (enabled = madvise), found {enabled:?}");
        return;
    }
    let options = Options::touching(&["*/programs/s1-*"])
        .set("meters.breakpoints=false")
        .set("policy.observe_min_s=10.0")
        .set("policy.meter_samples_min=10")
        .set("policy.meter_noise_max=5.0")
        .set("policy.washout_min_s=0.5")
        .set("policy.measured_candidates_s=[1,2]")
        .set("policy.placebo_every_s=0.0")
        .set("policy.probation_pairs=0")
        .set("policy.reconsider_s=30.0")
        .set("policy.discovery={kind=\"fixed\",alpha=0.05}");
    let Some(mut plant) = Plant::start(&options) else {
        return;
    };
    progress_directory(&plant);
    let program = built(&plant, VICTIM, "s1-victim");
    let Some(_attack) = attack(&plant, "overlay", &[]) else {
        return;
    };
    let victim = ready(&mut plant.as_user(HONEST, [&program])).unwrap();
    // What others do on this machine makes its work vary, and a trial would be put off.
    let pid = rustix::process::Pid::from_raw(i32::try_from(victim.pid()).unwrap());
    rustix::process::setpriority_process(pid, -15).unwrap();
    let found = Found::now(victim.pid());
    let kills = number("HOMEOSTAT_KILLS", KILLS);
    let mut random = number("HOMEOSTAT_KILLS_SEED", 43);
    let mut changed = 0;
    for kill in 1..=kills {
        let begun = Instant::now();
        let is_tried = |status: &serde_json::Value| {
            let experiments = status["experiments"].as_array().unwrap();
            experiments.iter().any(|experiment| {
                let workload = experiment["workload"].as_str().unwrap_or_default();
                workload.contains("s1-victim") && experiment["phase"] != "reverting"
            })
        };
        plant.attacked.wait_for("a trial", TRIAL_PATIENCE, is_tried);
        let trial = begun.elapsed();
        // Knuth's generator, in the moments of MOMENTS.
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let moment = MOMENTS.mul_f64((random >> 33) as f64 / f64::from(1u32 << 31));
        std::thread::sleep(moment);
        if kill == 1 {
            // In a block in which the change is in force, wholly or in part.
            let waited = Instant::now();
            while huge(victim.pid()) == found.huge {
                assert!(waited.elapsed() < TRIAL_PATIENCE, "the trial changes something");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        let killed = begun.elapsed();
        plant.attacked.kill9();
        let left = Found::now(victim.pid());
        let owed = journal::read(&plant.attacked.state()).unwrap().owed.len();
        changed += u64::from(left != found);
        let restored = plant.attacked.restore();
        assert!(
            restored.status.success(),
            "kill {kill}: {restored:?}\n{}",
            plant.attacked.log()
        );
        assert_eq!(Found::now(victim.pid()), found, "kill {kill}: {restored:?}");
        let after = journal::read(&plant.attacked.state()).unwrap();
        assert!(
            after.owed.is_empty() && after.is_whole(),
            "kill {kill}: {after:?}"
        );
        println!(
            "kill {kill} of {kills}: trial after {:.1} s, killed {:.3} s after that wait began, {owed} owed, {} left; as found after restore",
            trial.as_secs_f64(),
            killed.as_secs_f64(),
            left.huge
        );
        if kill < kills {
            // What a daemon has learnt of the victim would keep the next from trying the same again.
            fs::remove_dir_all(plant.attacked.state()).unwrap();
            plant.attacked.restart();
        }
    }
    println!(
        "{kills} of {kills}: the machine is as found; {changed} times a change was in force at the kill"
    );
    assert!(
        changed > 0,
        "nothing was in force at any kill, so nothing was put back"
    );
}
