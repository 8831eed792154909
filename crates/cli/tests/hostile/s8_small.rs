//! Small ways to mislead a daemon, to fill its disk or to hold it up.

use crate::plant::{ATTACKER, Options, PATIENCE, Plant, Running, assert_unharmed, bounded};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Output;
use std::time::{Duration, Instant};

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// A program calls itself what turns, hides or breaks lines, or nothing at all.
#[test]
fn no_name_reaches_a_terminal_or_the_log_as_it_is() {
    let Some(plant) = Plant::start(&Options::touching(&["*61c*", "hidden*"])) else {
        return;
    };
    let names = ["\u{61c}\u{2028}x", "hid\u{200b}\u{2060}", "", "\u{feff}\u{202e}a"];
    let code = "import ctypes, sys\n\
                ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)\n\
                block = bytearray(64 << 20)\n\
                while True: sum(range(10000))";
    let running: Vec<Running> = names
        .iter()
        .map(|name| {
            let mut command = plant.as_user(ATTACKER, ["/usr/bin/python3", "-c", code, name]);
            Running::start(&mut command)
        })
        .collect();
    plant.begin();
    plant
        .attacked
        .wait_for("the programs are seen", Duration::from_secs(120), |status| {
            let workloads = status["workloads"].as_array().unwrap();
            running.iter().all(|program| {
                let pid = u64::from(program.pid());
                workloads.iter().any(|w| {
                    w["pids"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .any(|p| p.as_u64() == Some(pid))
                })
            })
        });
    let page = plant.directory(0, "page").join("report.html");
    let page_name = page.display().to_string();
    let report = plant.attacked.ask(&["report", "--output", &page_name]);
    let texts = [
        said(&plant.attacked.ask(&["status", "--all"])),
        said(&plant.attacked.ask(&["status", "--all", "--json"])),
        said(&plant.attacked.ask(&["plan"])),
        plant.attacked.log(),
        said(&report),
        fs::read_to_string(&page).unwrap_or_default(),
    ];
    for text in texts {
        let hidden = |c: char| "\u{61c}\u{2028}\u{200b}\u{2060}\u{feff}\u{202e}".contains(c);
        assert!(!text.contains(hidden), "{text}");
    }
    for workload in plant.attacked.status()["workloads"].as_array().unwrap() {
        assert!(
            !workload["program"].as_str().unwrap().trim().is_empty(),
            "{workload}"
        );
    }
    assert_unharmed(&plant.attacked, &plant.control);
}

/// What others may write is not what root is told.
#[test]
fn a_configuration_that_others_may_write_is_refused() {
    let Some(mut plant) = Plant::start(&Options::default()) else {
        return;
    };
    let config = plant.attacked.config();
    let drop_ins = config.with_extension("d");
    let drop_in = drop_ins.join("50.toml");
    fs::create_dir(&drop_ins).unwrap();
    fs::write(&drop_in, "").unwrap();
    let set =
        |path: &std::path::Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let give = |path: &std::path::Path, user, group| chown(path, Some(user), Some(group)).unwrap();
    let home = config.parent().unwrap().to_owned();
    assert!(plant.attacked.ask(&["config", "check"]).status.success());
    for path in [&config, &drop_in, &drop_ins, &home] {
        let usual = fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let tries: [(&str, &dyn Fn()); 3] = [
            ("every user", &|| set(path, usual | 0o006)),
            ("group 1000", &|| {
                give(path, 0, 1000);
                set(path, usual | 0o060);
            }),
            ("belongs to user 1000", &|| give(path, 1000, 0)),
        ];
        for (why, spoil) in tries {
            spoil();
            for command in [
                &["config", "check"][..],
                &["config", "reload"],
                &["run", "--advise-only"],
            ] {
                let output = plant.attacked.ask(command);
                let text = said(&output);
                assert_eq!(output.status.code(), Some(2), "{command:?} {why}: {text}");
                assert!(
                    text.contains(&path.display().to_string()) && text.contains(why),
                    "{text}"
                );
                assert!(
                    text.contains("hint: chmod") || text.contains("hint: give it"),
                    "{text}"
                );
            }
            give(path, 0, 0);
            set(path, usual);
        }
    }
    let told = plant.attacked.ask(&["config", "check"]);
    assert!(told.status.success(), "{}", said(&told));
    plant.attacked.assert_restores_and_restarts();
}

#[test]
fn a_fifo_in_place_of_the_history_does_not_hold_up_the_start() {
    let Some(mut plant) = Plant::start(&Options::default()) else {
        return;
    };
    plant.attacked.kill9();
    for suffix in ["", "-wal"] {
        let file = plant.attacked.state().join(format!("history.sqlite{suffix}"));
        let _ = fs::remove_file(&file);
        let made = std::process::Command::new("mkfifo").arg(&file).status().unwrap();
        assert!(made.success());
        plant.attacked.restart();
        // It says so with its first record.
        let begin = Instant::now();
        while !plant.attacked.log().contains("not a regular file") {
            assert!(begin.elapsed() < PATIENCE, "{suffix}: {}", plant.attacked.log());
            std::thread::sleep(Duration::from_millis(100));
        }
        plant.attacked.kill9();
        fs::remove_file(&file).unwrap();
    }
    plant.attacked.restart();
}

#[test]
fn what_users_publish_has_a_file_system_of_its_own_and_run_is_not_filled() {
    let Some(plant) = Plant::start(&Options::default()) else {
        return;
    };
    let script = "cd /run/homeostat/progress && dd if=/dev/zero of=fill bs=1M count=64 2>/dev/null; \
                  stat -f -c %T . ; du -m fill | cut -f1; df -m --output=used /run | tail -1";
    let output = bounded(
        &mut plant.as_user(ATTACKER, ["sh", "-c", script]),
        Duration::from_secs(20),
    );
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    assert_eq!(lines[0], "tmpfs", "{output:?}");
    assert!(lines[1].parse::<u64>().unwrap() <= 4, "{text}");
    assert!(lines[2].parse::<u64>().unwrap() <= 4, "{text}");
    assert!(plant.attacked.ask(&["status"]).status.success());
}

/// `run` says what it cannot do, and does not begin.
#[test]
fn without_privileges_a_daemon_that_is_to_act_is_refused() {
    let Some(plant) = Plant::start(&Options::default()) else {
        return;
    };
    let program = plant.program(env!("CARGO_BIN_EXE_homeostat"), "homeostat");
    let state = plant.directory(ATTACKER, "own");
    let config = state.join("homeostat.toml");
    fs::write(&config, "").unwrap();
    let text = |p: &std::path::Path| p.display().to_string();
    let words = [
        text(&program),
        "--state-dir".to_owned(),
        text(&state.join("state")),
        "--socket".to_owned(),
        text(&state.join("socket")),
        "--config".to_owned(),
        text(&config),
        "run".to_owned(),
    ];
    let refused = bounded(&mut plant.as_user(ATTACKER, &words), Duration::from_secs(20));
    assert_eq!(refused.status.code(), Some(5), "{}", said(&refused));
    assert!(said(&refused).contains("as root"), "{}", said(&refused));
}

/// A loop that hangs is told, by the exit code too, though the daemon answers: its loop waits in `ptrace` while all other threads run.
#[test]
fn a_loop_that_hangs_is_told_by_status() {
    let Some(plant) = Plant::start(&Options::default()) else {
        return;
    };
    // A tracer that stops the first thread alone, which runs the loop.
    let code = "import ctypes, sys, time\n\
                c = ctypes.CDLL(None, use_errno=True)\n\
                c.ptrace.argtypes = [ctypes.c_long] * 4\n\
                pid = int(sys.argv[1])\n\
                assert c.ptrace(0x4206, pid, 0, 0) == 0\n\
                assert c.ptrace(0x4207, pid, 0, 0) == 0\n\
                time.sleep(14)";
    let pid = plant.attacked.pid().to_string();
    let mut command = std::process::Command::new("/usr/bin/python3");
    let tracer = Running::start(command.args(["-c", code, &pid]));
    std::thread::sleep(Duration::from_secs(12));
    let hanging = plant.attacked.ask(&["status", "--json"]);
    assert_eq!(hanging.status.code(), Some(6), "{}", said(&hanging));
    let seen: serde_json::Value = serde_json::from_slice(&hanging.stdout).unwrap();
    assert!(seen["view_age_s"].as_f64().unwrap() > 11.0);
    assert!(said(&plant.attacked.ask(&["status"])).contains("The loop hangs"));
    drop(tracer);
    plant
        .attacked
        .wait_for("the loop goes on", Duration::from_secs(20), |status| {
            status["view_age_s"].as_f64().is_some_and(|age| age < 2.0)
        });
    assert!(plant.attacked.ask(&["status"]).status.success());
}
