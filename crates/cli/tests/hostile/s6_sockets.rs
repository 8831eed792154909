//! S6: a server's socket leads to a socket of somebody else, who is to be neither asked nor quoted.

use crate::plant::{ATTACKER, Options, Plant, Running, assert_unharmed};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Whose socket is led to.
const VICTIM: u32 = 1001;
const SECRET: &str = "hunter2";
/// Long enough for several scans and a meter opened in each.
const ATTACK: Duration = Duration::from_secs(12);

/// Listens at PATH, writes down in FILE that somebody came and what was said, and answers with a secret.
const LISTENER: &str = r#"
import os, socket, sys
path, file = sys.argv[1:3]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
os.chmod(path, 0o777)
listener.listen(64)
print("ready", flush=True)
while True:
    came, _ = listener.accept()
    came.settimeout(2)
    try:
        said = came.recv(4096)
        came.sendall(b"-NOAUTH the password is hunter2\r\n")
    except OSError:
        said = b""
    with open(file, "ab") as f:
        f.write(said)
    came.close()
"#;

/// Binds PATH and puts VICTIM in its place, by a link or a mount; or stays there and answers with a secret itself.
const DEPUTY: &str = r#"
import ctypes, os, socket, sys, threading, time
path, victim, way = sys.argv[1:4]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen(64)
if way == "link":
    os.unlink(path)
    os.symlink(victim, path)
elif way == "mount":
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(victim.encode(), path.encode(), None, 4096, None) != 0:
        print(f"cannot mount: {os.strerror(ctypes.get_errno())}", flush=True)
        sys.exit(1)
else:
    def answer():
        while True:
            came, _ = listener.accept()
            came.sendall(b"-ERR my own word is hunter2\r\nhunter2\r\n")
            came.close()
    threading.Thread(target=answer, daemon=True).start()
print("ready", flush=True)
ballast = bytearray(os.urandom(1 << 20)) * 16
while True:
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
    time.sleep(0.08)
"#;

fn script(plant: &Plant, name: &str, text: &str) -> PathBuf {
    let path = plant.home().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn words(parts: &[&Path]) -> Vec<String> {
    parts
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect()
}

fn ready(command: &mut Command) -> Running {
    let mut running = Running::start(command.stdout(Stdio::piped()));
    let mut said = [0; 6];
    running
        .child()
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut said)
        .expect("it is ready");
    assert_eq!(&said, b"ready\n");
    running
}

#[test]
fn a_server_leads_nobody_to_the_socket_of_another_user_and_no_answer_is_quoted() {
    let Some(mut plant) = Plant::start(&Options::touching(&[
        "*/programs/redis-server",
        "*/programs/memcached",
    ])) else {
        return;
    };
    let python = Path::new("/usr/bin/python3");
    let listener = script(&plant, "listener.py", LISTENER);
    let deputy = script(&plant, "deputy.py", DEPUTY);
    let theirs = plant.directory(VICTIM, "victim");
    let (victim, heard) = (theirs.join("socket"), theirs.join("heard"));
    let _victim = ready(&mut plant.as_user(VICTIM, words(&[python, &listener, &victim, &heard])));
    let mut programs = Vec::new();
    for name in ["redis-server", "memcached"] {
        let program = plant.program(python, name);
        for way in ["link", "mount", "own"] {
            let directory = plant.directory(ATTACKER, &format!("{name}-{way}"));
            let all = words(&[
                &program,
                &deputy,
                &directory.join("socket"),
                &victim,
                Path::new(way),
            ]);
            let mut command = if way == "mount" {
                plant.as_user_in_own_namespaces(ATTACKER, all)
            } else {
                plant.as_user(ATTACKER, all)
            };
            programs.push(ready(&mut command));
        }
    }
    plant.begin();
    std::thread::sleep(ATTACK);
    assert_unharmed(&plant.attacked, &plant.control);
    let said = std::fs::read(&heard).unwrap_or_default();
    assert_eq!(String::from_utf8_lossy(&said), "", "the victim was asked");
    plant.attacked.assert_never_logged(SECRET);
    let mut reasons = 0;
    for program in &programs {
        let pid = program.pid().to_string();
        for question in [
            vec!["explain", &pid, "--json"],
            vec!["meter", "list", &pid, "--json"],
        ] {
            let answer = plant.attacked.ask(&question);
            let text = [answer.stdout, answer.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            assert!(!text.contains(SECRET), "{question:?}: {text}");
            reasons += usize::from(text.contains("no socket of the process's user"));
        }
    }
    // They were looked at: two ways for each of two kinds of server say why they were not asked.
    assert!(reasons >= 4, "{reasons}");
    let said = std::fs::read(&heard).unwrap_or_default();
    assert_eq!(
        String::from_utf8_lossy(&said),
        "",
        "the victim was asked by a command"
    );
    plant.attacked.assert_restores_and_restarts();
}
