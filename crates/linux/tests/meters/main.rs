//! The meters against real programs on the running machine. What is not installed, or not permitted, is skipped
//! with a printed reason; nothing here depends on how fast the machine is.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests and their helpers"
)]

mod costs;
mod kernel;
mod networks;
mod points;
mod probes;
mod progress;
mod servers;

use homeostat_kernel::Root;
use homeostat_linux::kinds;
use homeostat_meters::{Meter, MeterKind, MeterSettings, PointsWish};
use homeostat_model::{
    Fingerprint, MeterCandidate, MeterId, OperatorChoice, ProcessId, Workload, WorkloadId, WorkloadKind,
};
use homeostat_platform::PlatformError;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for what is busy for a moment: far longer than it ever takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Identity of a running process.
fn process(pid: u32) -> ProcessId {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .nth(19)
        .unwrap();
    ProcessId {
        pid: pid as i32,
        start_ticks: start.parse().unwrap(),
    }
}

/// A workload of running processes, oldest first.
fn workload(name: &str, pids: &[u32]) -> Workload {
    let executable = pids
        .first()
        .and_then(|p| std::fs::read_link(format!("/proc/{p}/exe")).ok())
        .map_or_else(String::new, |p| p.to_string_lossy().into_owned());
    Workload {
        id: WorkloadId::from(name),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::from(name),
        program: name.to_owned(),
        executable,
        processes: pids.iter().map(|p| process(*p)).collect(),
        choice: OperatorChoice::default(),
    }
}

/// All kinds with their settings, as the platform uses them.
struct Meters(Vec<Box<dyn MeterKind>>);

impl Meters {
    fn new(settings: &MeterSettings) -> Self {
        Self(kinds(settings))
    }
    fn plain() -> Self {
        Self::new(&MeterSettings::default())
    }
    /// With these meters configured for the workload of that name.
    fn configured(name: &str, ids: &[&str]) -> Self {
        let mut settings = MeterSettings::default();
        settings
            .configured
            .insert(name.to_owned(), ids.iter().map(|i| (*i).into()).collect());
        Self::new(&settings)
    }
    fn find(&mut self, w: &Workload, id: &str) -> Option<MeterCandidate> {
        self.0
            .iter_mut()
            .flat_map(|k| k.find(&Root::default(), w))
            .find(|c| c.id.as_str() == id)
    }
    /// Why the meter is refused; empty when it is not.
    fn refusal(&mut self, w: &Workload, id: &str) -> String {
        self.find(w, id)
            .unwrap_or_else(|| panic!("no candidate {id}"))
            .refused
            .unwrap_or_default()
    }
    /// The same, once nothing is in the way that passes: a server that is not given a CPU in time.
    fn lasting_refusal(&mut self, w: &Workload, id: &str) -> String {
        let begun = Instant::now();
        loop {
            let why = self.refusal(w, id);
            if !why.contains("is not possible now") || begun.elapsed() > PATIENCE {
                return why;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    /// Opens a meter as soon as nothing is in the way that passes.
    fn open_patiently(&mut self, w: &Workload, id: &str) -> Result<Box<dyn Meter>, PlatformError> {
        let begun = Instant::now();
        loop {
            match self.open(w, id) {
                Err(PlatformError::Busy { .. }) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => return other,
            }
        }
    }
    fn open(&mut self, w: &Workload, id: &str) -> Result<Box<dyn Meter>, PlatformError> {
        let mut last = None;
        for kind in &mut self.0 {
            if kind.find(&Root::default(), w).iter().any(|c| c.id.as_str() == id) {
                last = Some(kind.open(&Root::default(), w, &MeterId::from(id)));
            }
        }
        let mut meter = last.unwrap_or_else(|| panic!("no candidate {id}"))?;
        if id.starts_with("uprobe:") || id.starts_with("usdt:") {
            // Its probes are put on by a thread of its own.
            let begun = Instant::now();
            while let Err(e) = meter.read(w) {
                if !matches!(e, PlatformError::Busy { .. }) || begun.elapsed() > PATIENCE {
                    return Err(e);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(meter)
    }
}

/// What a meter says as soon as it is not busy with something else.
fn reading(meter: &mut dyn Meter, w: &Workload) -> Result<f64, PlatformError> {
    let begun = Instant::now();
    loop {
        match meter.read(w) {
            Err(PlatformError::Busy { .. }) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// A process of ours that takes orders by lines on its input and answers by lines. Killed at the end.
struct Servant {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Servant {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }
    fn pid(&self) -> u32 {
        self.child.id()
    }
    /// Sends a line and waits for the answer.
    fn order(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.input.flush().unwrap();
        self.answer()
    }
    fn answer(&mut self) -> String {
        let mut text = String::new();
        self.output.read_line(&mut text).unwrap();
        text.trim().to_owned()
    }
}

impl Drop for Servant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compiles a C program; `None`, with a printed reason, without a compiler.
fn compile(directory: &Path, name: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
    let (c, program) = (directory.join(format!("{name}.c")), directory.join(name));
    std::fs::write(&c, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../progress/include");
    let result = Command::new("cc")
        .args(["-std=gnu99", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(include)
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(&c)
        .output();
    match result {
        Ok(out) => {
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            Some(program)
        }
        Err(e) => {
            println!("skipped: no C compiler: {e}");
            None
        }
    }
}

fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0
}

/// A program that is installed; `None`, with a printed reason, when it is not.
fn installed(name: &str) -> Option<PathBuf> {
    let found = ["/usr/bin", "/usr/local/bin", "/usr/sbin", "/bin"]
        .iter()
        .map(|d| Path::new(d).join(name))
        .find(|p| p.exists());
    if found.is_none() {
        println!("skipped: {name} is not installed");
    }
    found
}
