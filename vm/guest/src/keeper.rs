//! The keeper: a program whose memory has a known content, and how scenarios start and ask it.
//!
//! `keeper MIB CPUS THREADS` touches its memory for the first time from the named CPUs, so that it lies on their node
//! without a memory policy; then it may run everywhere again, starts threads that read the memory now and then, and
//! obeys one-word commands on its standard input: `check` (answers `BROKEN n`) and `thread` (one more thread, answers
//! `THREAD tid`). It ends with its standard input.

use crate::instruments::{Frames, PAGE, numbers, process};
use crate::{Failure, ensure};
use homeostat_model::ProcessId;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Pages of a large page of x86-64.
pub const PAGES_PER_PIECE: u64 = 512;
/// Words of a page that are filled and checked: one per 512 bytes, so that an emulated CPU is done soon.
const WORDS_CHECKED: usize = 8;
const WORDS_PER_PAGE: usize = 512;
/// A thread reads a few pages and rests this long: it shows up as running, and leaves the CPU to others.
const REST: Duration = Duration::from_millis(4);
/// Pages that a thread reads between two rests.
const PAGES_PER_TURN: usize = 64;

/// One page of the kept memory.
#[repr(align(4096))]
struct Page([AtomicU64; WORDS_PER_PAGE]);

/// What stands in a word. Never zero: the kernel may free pages of zeros.
fn content(page: usize, word: usize) -> u64 {
    ((page * WORDS_PER_PAGE + word) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

fn checked_words() -> impl Iterator<Item = usize> {
    (0..WORDS_PER_PAGE).step_by(WORDS_PER_PAGE / WORDS_CHECKED)
}

/// A set for `sched_setaffinity`.
pub fn cpu_set(cpus: &BTreeSet<u32>) -> CpuSet {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu as usize);
    }
    set
}

/// The program.
///
/// # Errors
/// The arguments are wrong, or the mask of CPUs cannot be set.
pub fn main(arguments: &[String]) -> Result<(), Failure> {
    let usage = || Failure::Broken("usage: keeper MIB CPUS THREADS".into());
    let [mib, cpus, threads] = arguments else {
        return Err(usage());
    };
    let mib: usize = mib.parse().map_err(|_| usage())?;
    let threads: usize = threads.parse().map_err(|_| usage())?;
    let first_touch = numbers(cpus).filter(|c| !c.is_empty()).ok_or_else(usage)?;
    let everywhere = sched_getaffinity(None).map_err(Failure::call("reading my mask"))?;
    sched_setaffinity(None, &cpu_set(&first_touch)).map_err(Failure::call(format!("running on {cpus}")))?;
    let pages = mib * 256;
    let piece = PAGES_PER_PIECE as usize;
    // One piece more, so that there is an aligned beginning.
    let memory: Arc<Vec<Page>> = Arc::new(
        (0..pages + piece)
            .map(|page| {
                let words = Page([const { AtomicU64::new(0) }; WORDS_PER_PAGE]);
                for word in checked_words() {
                    words.0[word].store(content(page, word), Ordering::Relaxed);
                }
                words
            })
            .collect(),
    );
    sched_setaffinity(None, &everywhere).map_err(Failure::call("running everywhere again"))?;
    let address = memory.as_ptr() as usize;
    let skipped = (address.next_multiple_of(piece * PAGE as usize) - address) / PAGE as usize;
    for _ in 0..threads {
        start_reader(&memory)?;
    }
    answer(&format!("READY {:x} {pages}", address + skipped * PAGE as usize))?;
    for line in io::stdin().lock().lines() {
        match line.map_err(Failure::system("reading commands"))?.as_str() {
            "check" => answer(&format!("BROKEN {}", broken(&memory)))?,
            "thread" => answer(&format!("THREAD {}", start_reader(&memory)?))?,
            other => answer(&format!("UNKNOWN {other}"))?,
        }
    }
    Ok(())
}

/// Pages that do not hold what was put there.
fn broken(memory: &[Page]) -> usize {
    let as_filled = |page: usize, words: &Page| {
        checked_words().all(|word| words.0[word].load(Ordering::Relaxed) == content(page, word))
    };
    memory
        .iter()
        .enumerate()
        .filter(|(page, words)| !as_filled(*page, words))
        .count()
}

/// Starts a thread that reads the memory for ever, a little at a time, and returns its number.
fn start_reader(memory: &Arc<Vec<Page>>) -> Result<i32, Failure> {
    let memory = Arc::clone(memory);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::Builder::new()
        .spawn(move || {
            let _ = tell.send(rustix::thread::gettid().as_raw_nonzero().get());
            let mut page = 0;
            loop {
                for _ in 0..PAGES_PER_TURN {
                    std::hint::black_box(memory[page].0[0].load(Ordering::Relaxed));
                    page = (page + 1) % memory.len();
                }
                std::thread::sleep(REST);
            }
        })
        .map_err(Failure::system("starting a thread"))?;
    told.recv()
        .map_err(|_| Failure::Broken("the thread ended at once".into()))
}

fn answer(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(Failure::system("answering"))
}

/// A keeper that was started; ended when dropped.
#[derive(Debug)]
pub struct Keeper {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Who it is.
    pub process: ProcessId,
    /// Where its memory begins, aligned to a large page.
    pub address: u64,
    /// How many pages it has from there.
    pub pages: u64,
}

impl Keeper {
    /// Starts one that touches `mib` of memory from these CPUs, and has so many threads besides its main one.
    ///
    /// # Errors
    /// It cannot be started or ended at once.
    pub fn start(mib: u64, first_touch: &BTreeSet<u32>, threads: u32) -> Result<Self, Failure> {
        Self::start_under(&[], mib, first_touch, threads)
    }

    /// The same, started by another program with its arguments (`numactl --membind=1`), which it replaces.
    ///
    /// # Errors
    /// As [`Keeper::start`].
    pub fn start_under(
        prefix: &[&str],
        mib: u64,
        first_touch: &BTreeSet<u32>,
        threads: u32,
    ) -> Result<Self, Failure> {
        let keeper = program("keeper")?;
        let mut command = match prefix.split_first() {
            None => Command::new(keeper),
            Some((first, rest)) => {
                let mut command = Command::new(program(first)?);
                command.args(rest).arg(keeper);
                command
            }
        };
        let mut child = command
            .args([
                mib.to_string(),
                crate::instruments::list(first_touch),
                threads.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Failure::system("starting the keeper"))?;
        let pid = i32::try_from(child.id()).unwrap_or(0);
        let (Some(commands), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Broken("the keeper has no pipes".into()));
        };
        let mut keeper = Self {
            child,
            commands,
            answers: BufReader::new(answers),
            process: process(pid)?,
            address: 0,
            pages: 0,
        };
        let ready = keeper.hear("READY ")?;
        let mut words = ready.split_whitespace();
        let address = words.next().and_then(|w| u64::from_str_radix(w, 16).ok());
        let pages = words.next().and_then(|w| w.parse().ok());
        let (Some(address), Some(pages)) = (address, pages) else {
            return Err(Failure::Broken(format!("the keeper said READY {ready}")));
        };
        (keeper.address, keeper.pages) = (address, pages);
        Ok(keeper)
    }

    /// Its process number.
    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    fn hear(&mut self, word: &str) -> Result<String, Failure> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .map_err(Failure::system("listening to the keeper"))?;
        line.trim()
            .strip_prefix(word)
            .map(str::to_owned)
            .ok_or_else(|| Failure::Broken(format!("the keeper said {line:?} instead of {word}")))
    }

    fn ask(&mut self, command: &str, word: &str) -> Result<i64, Failure> {
        writeln!(self.commands, "{command}").map_err(Failure::system("asking the keeper"))?;
        let answer = self.hear(word)?;
        answer
            .parse()
            .map_err(|_| Failure::Broken(format!("the keeper said {word}{answer}")))
    }

    /// Fails when a page of its memory does not hold what was put there.
    ///
    /// # Errors
    /// Pages are broken, or the keeper is gone.
    pub fn check(&mut self) -> Result<(), Failure> {
        let broken = self.ask("check", "BROKEN ")?;
        ensure!(broken == 0, "{broken} pages of the keeper's memory are broken");
        Ok(())
    }

    /// Starts one more thread and returns its number.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn thread(&mut self) -> Result<i32, Failure> {
        let tid = self.ask("thread", "THREAD ")?;
        i32::try_from(tid).map_err(|_| Failure::Broken(format!("thread {tid}")))
    }

    /// The node of each of its pages.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn nodes(&self, frames: &Frames) -> Result<Vec<Option<u32>>, Failure> {
        frames.of_pages(self.pid(), self.address, self.pages)
    }

    /// The addresses of its pieces of the large-page size.
    pub fn pieces(&self) -> Vec<u64> {
        let bytes = PAGES_PER_PIECE * PAGE;
        (0..self.pages / PAGES_PER_PIECE)
            .map(|i| self.address + i * bytes)
            .collect()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that lies beside this one.
///
/// # Errors
/// It is not known where this program lies.
pub fn program(name: &str) -> Result<std::path::PathBuf, Failure> {
    std::env::current_exe()
        .map(|own| own.with_file_name(name))
        .map_err(Failure::system("finding my own place"))
}
