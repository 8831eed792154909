//! What people say about programs is seen, on the running machine and with the real programs that overwrite their environment.
//! Needs root, Linux, python3, redis-server and nginx.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_kernel::Root;
use homeostat_model::{Nanoseconds, OperatorChoice, Workload};
use homeostat_sensors::processes::ProcessTable;
use homeostat_sensors::reader::Reader;
use homeostat_sensors::regions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Programs of one executable below one parent are one workload: one test at a time has some.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    /// Starts a script of Python that says a line when it is ready and after each line that it is given.
    fn script(text: &str, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new("/usr/bin/python3");
        command
            .args(["-c", &format!("{PRELUDE}{text}")])
            .env_clear()
            .envs(environment.iter().copied());
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut program = Self(child);
        program.line();
        program
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let out = self.0.stdout.as_mut().unwrap();
        BufReader::with_capacity(1, out).read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the script ended");
        line.trim().to_owned()
    }

    fn go_on(&mut self) -> String {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.line()
    }
}

const PRELUDE: &str = r"
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def ready(text='ok'):
    print(text, flush=True)
    if not sys.stdin.readline(): sys.exit()
def overwrite(byte=0):
    f = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
    begin, end = int(f[47]), int(f[48])
    ctypes.memset(begin, byte, end - begin)
";

struct Table(ProcessTable);

impl Table {
    fn new() -> Self {
        Self(ProcessTable::new(Root::default()).unwrap())
    }

    fn workload(&mut self, pid: i32) -> Workload {
        let text = std::fs::read_to_string("/proc/uptime").unwrap();
        let seconds: f64 = text.split_whitespace().next().unwrap().parse().unwrap();
        self.0.pass(Nanoseconds::from_secs_f64(seconds)).unwrap();
        let all = self.0.workloads(None);
        let of = all.into_iter().find(|w| w.processes.iter().any(|p| p.pid == pid));
        of.unwrap_or_else(|| panic!("process {pid} is in no workload"))
    }

    fn choice(&mut self, pid: i32) -> OperatorChoice {
        self.workload(pid).choice
    }
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether the environment that the kernel shows is overwritten.
fn is_overwritten(pid: i32) -> bool {
    std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|text| text.windows(2).any(|w| w == [0, 0]))
}

fn children_of(pid: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|p| p.parse().unwrap()).collect()
}

/// Starts a server, with and without a choice, and looks at what is known of it and of its children.
fn check_server(mut start: impl FnMut(&Path) -> Command) {
    for says in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = start(directory.path());
        command
            .env_remove("HOMEOSTAT")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if says {
            command.env("HOMEOSTAT", "never");
        }
        // Of its own session: it is a workload of its own.
        let server = Program(command.spawn().unwrap());
        wait_until("it overwrites its environment", || is_overwritten(server.pid()));
        let mut table = Table::new();
        for pid in std::iter::once(server.pid()).chain(children_of(server.pid())) {
            let _ = table.choice(pid);
            let choice = table.choice(pid);
            assert_eq!(choice.never.is_some(), says, "{pid}: {choice:?}");
            assert_eq!(choice.unknown, None, "{pid}: it kept a copy");
        }
    }
}

#[test]
fn redis_is_read_although_it_overwrites_its_environment() {
    let _alone = alone();
    check_server(|directory| {
        let mut command = Command::new("redis-server");
        command
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(directory.join("socket"));
        command
    });
}

#[test]
fn nginx_and_its_workers_are_read_although_they_overwrite_their_environment() {
    let _alone = alone();
    check_server(|directory| {
        let here = directory.display();
        let text = format!(
            "daemon off; pid {here}/pid; error_log {here}/errors; worker_processes 2;\nevents {{}}\n\
             http {{ access_log off; server {{ listen unix:{here}/socket; }} }}\n"
        );
        std::fs::write(directory.join("nginx.conf"), text).unwrap();
        let mut command = Command::new("/usr/sbin/nginx");
        command.arg("-c").arg(directory.join("nginx.conf"));
        command
    });
}

#[test]
fn an_overwritten_environment_without_a_copy_is_not_known() {
    let _alone = alone();
    let program = Program::script(
        "overwrite()\nready()\nready()",
        &[("A", "1"), ("HOMEOSTAT", "never")],
    );
    let choice = Table::new().choice(program.pid());
    let why = choice.unknown.expect("nothing of it is left");
    assert!(why.contains("overwrote"), "{why}");
}

#[test]
fn a_never_stays_until_another_program_is_executed_and_holds_for_forks() {
    let _alone = alone();
    let text = "
ready()
overwrite(32)
child = os.fork()
if child == 0: time.sleep(60); os._exit(0)
ready(str(child))
os.kill(child, 9)
os.execve('/usr/bin/python3', ['python3', '-c', 'import sys; print(1, flush=True); sys.stdin.readline()'], {'A': '1'})
";
    let mut program = Program::script(text, &[("A", "1"), ("HOMEOSTAT", "never")]);
    let mut table = Table::new();
    assert!(table.choice(program.pid()).never.is_some());
    let child: i32 = program.go_on().parse().unwrap();
    for pid in [program.pid(), child, program.pid(), child] {
        let choice = table.choice(pid);
        assert!(choice.never.is_some(), "{pid}: {choice:?}");
    }
    program.go_on();
    let choice = table.choice(program.pid());
    assert_eq!((choice.never, choice.unknown), (None, None), "another program");
}

#[test]
fn an_environment_of_any_length_is_read() {
    let _alone = alone();
    let long = "x".repeat(100_000);
    // The variable of ours comes last.
    let program = Program::script(
        "ready()\nready()",
        &[("A", &long), ("B", &long), ("HOMEOSTAT", "never")],
    );
    assert!(Table::new().choice(program.pid()).never.is_some());
    drop(program);
    let program = Program::script("ready()\nready()", &[("A", &long), ("B", &long)]);
    let choice = Table::new().choice(program.pid());
    assert_eq!((choice.never, choice.unknown), (None, None));
}

#[test]
fn disabled_large_pages_are_seen_behind_a_long_list_of_groups() {
    let _alone = alone();
    let program = Program::script(
        "os.setgroups([1532000000 + i * 37 for i in range(2000)])\nlibc.prctl(41, 1, 0, 0, 0)\nready()\nready()",
        &[("A", "1")],
    );
    let mut table = Table::new();
    let workload = table.workload(program.pid());
    assert!(
        workload
            .choice
            .tuned
            .iter()
            .any(|t| t.contains("PR_SET_THP_DISABLE")),
        "{:?}",
        workload.choice
    );
    let map = regions::inspect(&Root::default(), &workload, &mut Reader::default()).unwrap();
    assert_eq!(
        map.disabled.iter().map(|p| p.pid).collect::<Vec<_>>(),
        [program.pid()]
    );
}

const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Puts the setting of the machine back.
struct Enabled(String);

impl Drop for Enabled {
    fn drop(&mut self) {
        std::fs::write(ENABLED, &self.0).unwrap();
    }
}

#[test]
fn a_process_that_wants_large_pages_only_where_it_advises_them_is_seen_where_all_get_them() {
    let _alone = alone();
    // The mapping is too large for a look by `smaps`; the heap before it tells.
    let text = std::fs::read_to_string(ENABLED).unwrap();
    let word = text.split(['[', ']']).nth(1).unwrap().to_owned();
    let program = |flags: u32| {
        let text = format!(
            "r = libc.prctl(41, 1, {flags}, 0, 0) if {flags} else 0\nheap = [bytearray(100000) for i in range(100)]\nm = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | \
             mmap.MAP_ANONYMOUS)\nfor i in range(0, 128 << 20, 4096): m[i] = 1\nready(str(r))\nready()"
        );
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", &format!("{PRELUDE}{text}")]).env_clear();
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut program = Program(child);
        let said = program.line();
        (program, said == "0")
    };
    let (excepted, is_known) = program(2);
    let (ordinary, _) = program(0);
    if !is_known {
        println!("SKIPPED: this kernel has no PR_THP_DISABLE_EXCEPT_ADVISED (it came with Linux 6.18)");
        return;
    }
    let _back = Enabled(word);
    std::fs::write(ENABLED, "always").unwrap();
    let mut table = Table::new();
    let mut disabled = |pid| {
        let mut workload = table.workload(pid);
        workload.processes.retain(|p| p.pid == pid);
        let map = regions::inspect(&Root::default(), &workload, &mut Reader::default()).unwrap();
        map.disabled.iter().any(|p| p.pid == pid)
    };
    assert!(disabled(excepted.pid()));
    // The other one is a member of the same workload, and told apart from it.
    assert!(!disabled(ordinary.pid()));
}

#[test]
fn a_variable_behind_64_kib_is_seen_and_what_cannot_be_read_is_not_known() {
    let directory = tempfile::tempdir().unwrap();
    let put = |file: &str, text: &[u8]| {
        let path = directory.path().join("proc/70").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    put(
        "stat",
        b"70 (server) S 1 70 70 0 -1 4194560 100 0 0 0 500 100 0 0 20 0 4 0 70 300000000 100000 18446744073709551615 1 1 0 0 0 \
          0 0 0 0 0 0 0 17 0 0 0 0 0 0\n",
    );
    put("cgroup", b"0::/\n");
    let services = (0..2200).map(|n| format!("SVC_{n:04}_PORT_80_TCP_ADDR=10.0.{}.{}\0", n / 256, n % 256));
    let services: String = services.collect();
    let look = || {
        let mut table = ProcessTable::new(Root::new(directory.path())).unwrap();
        table.pass(Nanoseconds::from_secs(1000)).unwrap();
        table.workloads(None)[0].choice.clone()
    };
    for (environment, says, is_known) in [
        (format!("{services}HOMEOSTAT=never\0"), true, true),
        (format!("HOMEOSTAT=never\0{services}"), true, true),
        (services.clone(), false, true),
        (services[..services.len() - 3].to_owned(), false, false),
        (String::new(), false, false),
    ] {
        put("environ", environment.as_bytes());
        let choice = look();
        assert_eq!(
            (choice.never.is_some(), choice.unknown.is_none()),
            (says, is_known)
        );
    }
    // Reading fails: nothing is known, and that is no consent.
    let environ = directory.path().join("proc/70/environ");
    std::fs::remove_file(&environ).unwrap();
    std::fs::create_dir(&environ).unwrap();
    let choice = look();
    assert!(
        choice
            .unknown
            .as_ref()
            .is_some_and(|why| why.contains("cannot be read")),
        "{choice:?}"
    );
}
