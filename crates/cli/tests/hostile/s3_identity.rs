//! S3: nobody becomes the meter of a stranger's workload, by the name of a group or by a process in it.

use crate::plant::{ATTACKER, Options, Plant, Running, assert_unharmed};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time until the daemon has looked for meters. A debug build on a busy machine takes some seconds.
const PATIENCE: Duration = Duration::from_secs(120);
/// A service account, which is nobody's login.
const SERVICE: u32 = 998;

/// Works a little all the time.
const WORKS: &str = "import time\nwhile True:\n    sum(range(20000))\n    time.sleep(0.02)\n";
/// Publishes a progress counter that says whatever it likes, and works a little.
const LIES: &str = r#"
import os, struct, time
start = open("/proc/self/stat").read().rsplit(") ", 1)[1].split()[19]
head = b"HSPROG\r\n" + struct.pack("=IIIIII", 1, 1, 128, 128, os.getpid(), 0) + struct.pack("=QQ", int(start), 0)
head += b"lie".ljust(32, b"\0") + b"liar".ljust(48, b"\0")
path = "/run/homeostat/progress/%d-%s" % (os.getpid(), start)
with open(path, "wb") as file:
    file.write(head.ljust(4096, b"\0"))
count = 0
with open(path, "r+b", buffering=0) as file:
    while True:
        sum(range(20000))
        count += 1000
        file.seek(128)
        file.write(struct.pack("=Q", count))
        time.sleep(0.02)
"#;

/// Groups of this test in the hierarchy that names processes. They are removed when it is dropped, the innermost first.
struct Groups {
    base: PathBuf,
}

impl Groups {
    fn make(name: &str) -> Self {
        let named = Path::new("/sys/fs/cgroup/systemd");
        let hierarchy = if named.join("cgroup.procs").exists() {
            named
        } else {
            Path::new("/sys/fs/cgroup")
        };
        let base = hierarchy.join(format!("{name}-{}.slice", std::process::id()));
        fs::create_dir(&base).unwrap();
        Self { base }
    }

    fn group(&self, path: &str) -> PathBuf {
        let group = self.base.join(path);
        fs::create_dir_all(&group).unwrap();
        group
    }

    /// A group that belongs to a user, as systemd delegates one.
    fn delegated(&self, path: &str, user: u32) -> PathBuf {
        let group = self.group(path);
        for file in [
            "",
            "cgroup.procs",
            "tasks",
            "cgroup.subtree_control",
            "cgroup.threads",
        ] {
            let path = group.join(file);
            if path.exists() {
                chown(&path, Some(user), Some(user)).unwrap();
            }
        }
        group
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        fn remove(path: &Path) {
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    remove(&entry.path());
                }
            }
            // The last process may take a moment to leave.
            for _ in 0..100 {
                if fs::remove_dir(path).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        remove(&self.base);
    }
}

fn join(group: &Path, process: &Running) {
    fs::write(group.join("cgroup.procs"), process.pid().to_string()).unwrap();
}

fn named(status: &Value, pid: u32) -> Option<&Value> {
    let has = |w: &&Value| {
        let pids = w["pids"].as_array();
        pids.is_some_and(|pids| pids.iter().any(|p| p.as_u64() == Some(pid.into())))
    };
    status["workloads"].as_array()?.iter().find(has)
}

fn name_of(status: &Value, pid: u32) -> Option<&str> {
    named(status, pid)?["name"].as_str()
}

/// Why the progress counter is refused for the workload of a process; an empty text where it may be used.
fn progress_refusal(plant: &Plant, pid: u32) -> Option<String> {
    let status = plant.attacked.status();
    let output = plant.attacked.ask(&["explain", name_of(&status, pid)?, "--json"]);
    let told: Value = serde_json::from_slice(&output.stdout).ok()?;
    let meter = told["meters"]
        .as_array()?
        .iter()
        .find(|m| m["id"] == "progress")?;
    Some(meter["refused"].as_str().unwrap_or_default().to_owned())
}

fn wait_for_refusal(plant: &Plant, pid: u32) -> String {
    let begin = std::time::Instant::now();
    loop {
        if let Some(refusal) = progress_refusal(plant, pid) {
            return refusal;
        }
        assert!(
            begin.elapsed() < PATIENCE,
            "meters of {pid} are looked for: {:#}",
            plant.attacked.status()
        );
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_group_called_like_somebodys_container_is_another_workload_and_its_counter_decides_nothing() {
    let short = format!("{:012x}", 0xfeed_0000_0000_u64 | u64::from(std::process::id()));
    let Some(plant) = Plant::start(&Options::touching(&[&format!("*{short}*")])) else {
        return;
    };
    let groups = Groups::make("hs3-name");
    let victims = groups.group(&format!("docker-{short}{}.scope", "a".repeat(52)));
    let delegated = groups.delegated(&format!("user@{ATTACKER}.service"), ATTACKER);
    let plain = groups.delegated("batch", ATTACKER);

    let victim = Running::start(&mut plant.as_user(SERVICE, ["/usr/bin/python3", "-c", WORKS]));
    join(&victims, &victim);
    // The attacker makes the group and goes there itself, once root has put it into what is delegated to it.
    let attack = |own: &Path, tail: &str| {
        let forged = own.join(format!("docker-{short}{}.scope", tail.repeat(52)));
        let script = format!(
            "until grep -q '{}' /proc/$$/cgroup; do sleep 0.1; done; mkdir '{forged}' && echo $$ > '{forged}/cgroup.procs' && \
             exec /usr/bin/python3 -c \"$0\"",
            own.file_name().unwrap().to_str().unwrap(),
            forged = forged.display()
        );
        let process = Running::start(&mut plant.as_user(ATTACKER, ["sh", "-c", &script, LIES]));
        join(own, &process);
        process
    };
    let attackers = [attack(&delegated, "b"), attack(&plain, "a")];

    for attacker in &attackers {
        let own = wait_for_refusal(&plant, attacker.pid());
        assert_eq!(own, "", "the attack is armed: its counter may count its own work");
    }
    let refusal = wait_for_refusal(&plant, victim.pid());
    assert!(
        !refusal.is_empty(),
        "the counter of a stranger is none of the victim's"
    );
    let status = plant.attacked.status();
    let own = named(&status, victim.pid()).unwrap();
    assert_eq!(own["name"], format!("docker-{short}"), "it keeps its name");
    assert_eq!(
        (&own["owner"], &own["processes"]),
        (&Value::from("machine"), &Value::from(1))
    );
    assert_eq!(own["kind"], "container");
    for attacker in &attackers {
        let theirs = named(&status, attacker.pid()).unwrap();
        assert_eq!(theirs["owner"], format!("user:{ATTACKER}"), "{theirs:#}");
        assert_ne!(theirs["kind"], "container");
        assert_ne!(theirs["fingerprint"], own["fingerprint"]);
    }
    assert_unharmed(&plant.attacked, &plant.control);
    drop((attackers, victim));
    drop(groups);
}

#[test]
fn a_process_of_another_user_in_the_group_is_no_meter_of_it() {
    let unit = format!("hs3hub{}.service", std::process::id());
    let Some(plant) = Plant::start(&Options::touching(&[&format!("{unit}*")])) else {
        return;
    };
    let groups = Groups::make("hs3-user");
    let group = groups.group(&unit);
    // The eldest is the main process; the others come later and publish what they like.
    let main = Running::start(&mut plant.as_user(SERVICE - 1, ["/usr/bin/python3", "-c", WORKS]));
    join(&group, &main);
    std::thread::sleep(Duration::from_millis(100));
    let account = Running::start(&mut plant.as_user(SERVICE, ["/usr/bin/python3", "-c", LIES]));
    join(&group, &account);
    let person = Running::start(&mut plant.as_user(ATTACKER, ["/usr/bin/python3", "-c", LIES]));
    join(&group, &person);

    assert_eq!(
        wait_for_refusal(&plant, person.pid()),
        "",
        "a person is a workload of his own"
    );
    plant
        .attacked
        .wait_for("both accounts are one workload", PATIENCE, |status| {
            named(status, main.pid()).is_some_and(|w| w["processes"] == 2)
        });
    let refusal = wait_for_refusal(&plant, main.pid());
    assert!(
        refusal.contains("belong to other users than its main process"),
        "{refusal}"
    );
    let status = plant.attacked.status();
    assert_eq!(name_of(&status, main.pid()), Some(unit.as_str()));
    assert_eq!(
        name_of(&status, person.pid()),
        Some(format!("{unit}/user-{ATTACKER}").as_str())
    );
    assert_eq!(
        named(&status, person.pid()).unwrap()["owner"],
        format!("user:{ATTACKER}")
    );
    assert_unharmed(&plant.attacked, &plant.control);
    drop((main, account, person));
    drop(groups);
}
