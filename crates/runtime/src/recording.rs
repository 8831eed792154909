//! Recordings of an engine's events and commands, so that a decision can be examined on another machine. The engine is
//! deterministic: events suffice for replay, and the recorded commands are the proof.
//!
//! JSON Lines, version [`VERSION`]:
//! 1. the header with all arguments of [`Engine::new`]: `{"format":"homeostat
//!    recording","version":1,"program":…,"machine":…,"policy":…,"strategies":[…],"memory":…}`;
//! 2. a line for each [`Engine::step`]: `{"now":ns,"unix":s,"event":…,"hash":"16 hex digits","commands":[…]}`. The hash
//!    is FNV-1a over the bytes of the command array. [`Recorder::without_texts`] drops the commands and keeps the hash;
//! 3. at most one end marker, which is last: `{"end":{"reason":"limit|finished|stopped","steps":n}}`. Without it the
//!    recorder was killed. A torn last line is then skipped and reported.
//!
//! Each line is one write. A recording never exceeds its limit. Only its owner may read it: it contains program and
//! unit names, paths of executables and telling arguments.

use homeostat_engine::{Command, Engine, Event, Memory, Policy, Strategy};
use homeostat_model::{Bytes, Machine, Nanoseconds, StrategyId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{BufRead, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// First words of every recording.
pub const FORMAT: &str = "homeostat recording";
/// Version of the format. Raised when an older reader would misunderstand it.
pub const VERSION: u32 = 1;
/// Default size limit: about a week of a machine at rest.
pub const LIMIT_DEFAULT: Bytes = Bytes::from_mib(256);
const END_BYTES: u64 = 128;
/// Longest line read: a scan of the most workloads that the engine follows, with thousands of processes each.
const LINE_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Why a recording cannot be made or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be made.
    #[error("cannot make the recording {}: {source}{}", path.display(), create_hint(source))]
    Create {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It cannot be written.
    #[error("the recording cannot be written: {0}")]
    Write(std::io::Error),
    /// Something cannot be expressed in the format.
    #[error("cannot be recorded: {0}")]
    Encode(serde_json::Error),
    /// Its limit is too small for the header alone.
    #[error("a limit of {limit} is too small: the description of the machine alone takes {header}")]
    Limit {
        /// Chosen limit.
        limit: Bytes,
        /// Size of the header.
        header: Bytes,
    },
    /// It cannot be read.
    #[error("the recording cannot be read: {0}")]
    Read(std::io::Error),
    /// Not a recording.
    #[error("this is not a recording of homeostat: {0}")]
    NotARecording(String),
    /// Another version.
    #[error("the recording has version {found} of the format; this program reads version {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// The recorded engine had a strategy that this program lacks.
    #[error("the recording needs the strategy {missing}, which this program does not have (it has: {})", have.join(", "))]
    Strategy {
        /// The strategy.
        missing: StrategyId,
        /// Those that are there.
        have: Vec<String>,
    },
    /// A line in the middle is damaged.
    #[error("line {line} of the recording cannot be understood: {why}")]
    Malformed {
        /// Line number, from 1.
        line: u64,
        /// The fault.
        why: String,
    },
}

fn create_hint(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::AlreadyExists => "\n  hint: name another file, or remove this one",
        std::io::ErrorKind::NotFound => "\n  hint: the directory must exist",
        _ => "",
    }
}

/// The engine's arguments at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// Version of the program that recorded.
    pub program: String,
    /// The host.
    pub machine: Machine,
    /// Settings, with the seed of all random assignments.
    pub policy: Policy,
    /// Strategies in the order in which they were considered.
    pub strategies: Vec<StrategyId>,
    /// The memory.
    pub memory: Memory,
}

#[derive(Deserialize)]
struct FirstWords {
    format: String,
    version: u32,
}

/// Why a recording ends where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// It reached its limit; the daemon ran on.
    Limit,
    /// The engine had to stop, and everything was settled.
    Finished,
    /// The recorder was closed before.
    Stopped,
}

#[derive(Serialize, Deserialize)]
struct End {
    reason: EndReason,
    steps: u64,
}

#[derive(Serialize, Deserialize)]
struct EndLine {
    end: End,
}

/// FNV-1a, 64 bits: a check against accidents, not against forgers.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

// ---- recording ------------------------------------------------------------------------------------------------------

/// Writes a recording.
pub struct Recorder {
    out: Box<dyn Write + Send>,
    limit: u64,
    written: u64,
    steps: u64,
    texts: bool,
    ended: bool,
    event: String,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder")
            .field("written", &self.written)
            .field("limit", &self.limit)
            .field("steps", &self.steps)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Recorder {
    /// Makes a new file, readable for its owner only.
    ///
    /// # Errors
    /// It exists already, or cannot be made.
    pub fn create(path: &Path, limit: Bytes) -> Result<Self, RecordingError> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|source| RecordingError::Create {
                path: path.to_owned(),
                source,
            })?;
        Ok(Self::to(file, limit))
    }

    /// Writes anywhere, at most `limit` in all.
    pub fn to(out: impl Write + Send + 'static, limit: Bytes) -> Self {
        Self {
            out: Box::new(out),
            limit: limit.0,
            written: 0,
            steps: 0,
            texts: true,
            ended: false,
            event: String::new(),
        }
    }

    /// Drops the commands and keeps their hash: smaller, but a difference is only located, not shown.
    #[must_use]
    pub fn without_texts(mut self) -> Self {
        self.texts = false;
        self
    }

    /// Writes the header: the arguments of the engine.
    ///
    /// # Errors
    /// It cannot be written, or is larger than the limit.
    pub fn begin(
        &mut self,
        machine: &Machine,
        policy: &Policy,
        strategies: &[Box<dyn Strategy>],
        memory: &Memory,
    ) -> Result<(), RecordingError> {
        let header = Header {
            format: FORMAT.to_owned(),
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            machine: machine.clone(),
            policy: policy.clone(),
            strategies: strategies.iter().map(|s| s.id()).collect(),
            memory: memory.clone(),
        };
        let mut line = serde_json::to_string(&header).map_err(RecordingError::Encode)?;
        line.push('\n');
        if line.len() as u64 + END_BYTES > self.limit {
            self.ended = true;
            return Err(RecordingError::Limit {
                limit: Bytes(self.limit),
                header: Bytes(line.len() as u64 + END_BYTES),
            });
        }
        self.write(&line)
    }

    /// Notes an event before the engine gets it.
    ///
    /// # Errors
    /// It cannot be expressed.
    pub fn event(&mut self, event: &Event) -> Result<(), RecordingError> {
        self.event = serde_json::to_string(event).map_err(RecordingError::Encode)?;
        Ok(())
    }

    /// Writes the noted event and the answer. `false`: it did not fit, the end marker was written, nothing follows.
    ///
    /// # Errors
    /// It cannot be written. Nothing more will be.
    pub fn step(
        &mut self,
        now: Nanoseconds,
        unix_seconds: u64,
        commands: &[Command],
    ) -> Result<bool, RecordingError> {
        if self.ended {
            return Ok(false);
        }
        let texts = serde_json::to_string(commands).map_err(RecordingError::Encode)?;
        let mut line = format!(
            "{{\"now\":{},\"unix\":{unix_seconds},\"event\":{},\"hash\":\"{:016x}\"",
            now.0,
            self.event,
            hash(texts.as_bytes()),
        );
        if self.texts {
            line.push_str(",\"commands\":");
            line.push_str(&texts);
        }
        line.push_str("}\n");
        if self.written + line.len() as u64 + END_BYTES > self.limit {
            self.end(EndReason::Limit)?;
            return Ok(false);
        }
        self.write(&line)?;
        self.steps += 1;
        if commands.contains(&Command::Finished) {
            self.end(EndReason::Finished)?;
        }
        Ok(true)
    }

    /// Steps written.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Size so far.
    pub fn written(&self) -> Bytes {
        Bytes(self.written)
    }

    /// Writes the end marker, once.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn end(&mut self, reason: EndReason) -> Result<(), RecordingError> {
        if self.ended || self.written == 0 {
            return Ok(());
        }
        let end = EndLine {
            end: End {
                reason,
                steps: self.steps,
            },
        };
        let mut line = serde_json::to_string(&end).map_err(RecordingError::Encode)?;
        line.push('\n');
        let result = self.write(&line);
        self.ended = true;
        result
    }

    fn write(&mut self, line: &str) -> Result<(), RecordingError> {
        let result = self
            .out
            .write_all(line.as_bytes())
            .and_then(|()| self.out.flush())
            .map_err(RecordingError::Write);
        match result {
            Ok(()) => self.written += line.len() as u64,
            // A part of the line may be written, and a reader would take more text for its continuation.
            Err(_) => self.ended = true,
        }
        result
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Errors were reported by `step`, and a reader is warned of a missing marker.
        let _ = self.end(EndReason::Stopped);
    }
}

// ---- replaying ------------------------------------------------------------------------------------------------------

#[derive(Deserialize)]
struct StepLine {
    now: Nanoseconds,
    unix: u64,
    event: Event,
    hash: String,
    commands: Option<Vec<serde_json::Value>>,
}

/// How a recording ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "how")]
pub enum Ending {
    /// With its marker.
    Marked {
        /// Why there.
        reason: EndReason,
    },
    /// Without: the recorder was killed between two lines.
    Missing,
    /// In the middle of a line, which was left out.
    Torn {
        /// Line number, from 1.
        line: u64,
        /// Its remaining bytes.
        bytes: u64,
    },
}

/// The first command that came out otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Step, from 1.
    pub step: u64,
    /// Line of the file, from 1.
    pub line: u64,
    /// Time of the step (since boot).
    pub now: Nanoseconds,
    /// Time of the step (seconds since the epoch).
    pub unix_seconds: u64,
    /// Kind of event.
    pub event: String,
    /// Position of the command in the answer, from 1. `None` without recorded texts, or if only the form differs.
    pub command: Option<usize>,
    /// The command recorded; `None` when there was none at this place, or no texts.
    pub recorded: Option<String>,
    /// The command now; `None` when there is none at this place.
    pub replayed: Option<String>,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replay {
    /// Version of the program that recorded.
    pub program: String,
    /// Kernel and processor of the machine.
    pub machine: String,
    /// Strategies of the engine.
    pub strategies: Vec<StrategyId>,
    /// Steps that were compared.
    pub steps: u64,
    /// Commands in them.
    pub commands: u64,
    /// Commands by kind.
    pub kinds: BTreeMap<String, u64>,
    /// Whether the texts of the commands were recorded, or their hashes only.
    pub texts: bool,
    /// From the first step to the last.
    pub length: Nanoseconds,
    /// How the recording ends; `None` when a difference came first.
    pub ending: Option<Ending>,
    /// The first difference; `None` = identical, byte for byte.
    pub difference: Option<Difference>,
}

fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    let end = text.find(|c: char| !c.is_alphanumeric()).unwrap_or(text.len());
    text[..end].to_owned()
}

/// Reads a line without its newline: whether it is whole, or `None` at the end.
fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> Result<Option<bool>, RecordingError> {
    line.clear();
    let read = input
        .by_ref()
        .take(LINE_BYTES_MAX)
        .read_until(b'\n', line)
        .map_err(RecordingError::Read)?;
    if read == 0 {
        return Ok(None);
    }
    let whole = line.last() == Some(&b'\n');
    if whole {
        line.pop();
    }
    Ok(Some(whole))
}

fn read_header(line: &[u8]) -> Result<Header, RecordingError> {
    let first: FirstWords =
        serde_json::from_slice(line).map_err(|e| RecordingError::NotARecording(e.to_string()))?;
    if first.format != FORMAT {
        return Err(RecordingError::NotARecording(format!(
            "its format is {:?}",
            first.format
        )));
    }
    if first.version != VERSION {
        return Err(RecordingError::Version { found: first.version });
    }
    serde_json::from_slice(line).map_err(|e| RecordingError::Malformed {
        line: 1,
        why: e.to_string(),
    })
}

/// Takes the recorded engine's strategies from the registry, in their order.
fn select(
    wanted: &[StrategyId],
    mut registry: Vec<Box<dyn Strategy>>,
) -> Result<Vec<Box<dyn Strategy>>, RecordingError> {
    let have: Vec<String> = registry.iter().map(|s| s.id().to_string()).collect();
    wanted
        .iter()
        .map(|id| {
            let at = registry.iter().position(|s| s.id() == *id);
            at.map(|at| registry.swap_remove(at))
                .ok_or_else(|| RecordingError::Strategy {
                    missing: id.clone(),
                    have: have.clone(),
                })
        })
        .collect()
}

struct Reader<R> {
    input: R,
    header: Header,
    line: Vec<u8>,
    number: u64,
    steps: u64,
}

enum Next {
    Step(Box<StepLine>),
    End(Ending),
}

impl<R: BufRead> Reader<R> {
    fn open(mut input: R) -> Result<Self, RecordingError> {
        let mut line = Vec::new();
        if read_line(&mut input, &mut line)? != Some(true) {
            return Err(RecordingError::NotARecording(
                "its first line is not whole".into(),
            ));
        }
        Ok(Self {
            header: read_header(&line)?,
            input,
            line,
            number: 1,
            steps: 0,
        })
    }

    fn malformed(&self, why: impl Into<String>) -> RecordingError {
        RecordingError::Malformed {
            line: self.number,
            why: why.into(),
        }
    }

    fn next(&mut self) -> Result<Next, RecordingError> {
        let Some(whole) = read_line(&mut self.input, &mut self.line)? else {
            return Ok(Next::End(Ending::Missing));
        };
        self.number += 1;
        let bytes = self.line.len() as u64;
        if !whole && bytes >= LINE_BYTES_MAX {
            return Err(self.malformed(format!("it is longer than {}", Bytes(LINE_BYTES_MAX))));
        }
        if !whole {
            return Ok(Next::End(Ending::Torn {
                line: self.number,
                bytes,
            }));
        }
        if self.line.starts_with(b"{\"end\":") {
            return self.end();
        }
        self.steps += 1;
        serde_json::from_slice(&self.line)
            .map(|step| Next::Step(Box::new(step)))
            .map_err(|e| self.malformed(e.to_string()))
    }

    fn end(&mut self) -> Result<Next, RecordingError> {
        let EndLine { end } =
            serde_json::from_slice(&self.line).map_err(|e| self.malformed(e.to_string()))?;
        if end.steps != self.steps {
            return Err(self.malformed(format!(
                "the end marker counts {} steps, but there are {}",
                end.steps, self.steps
            )));
        }
        if read_line(&mut self.input, &mut self.line)?.is_some() {
            self.number += 1;
            return Err(self.malformed("something follows the end marker"));
        }
        Ok(Next::End(Ending::Marked { reason: end.reason }))
    }
}

/// Replays the events to an engine made as recorded and compares its answers, byte for byte, up to the first
/// difference. `registry` holds today's strategies.
///
/// # Errors
/// The recording cannot be read or understood, or needs a strategy that is not there.
pub fn replay(input: impl BufRead, registry: Vec<Box<dyn Strategy>>) -> Result<Replay, RecordingError> {
    let mut reader = Reader::open(input)?;
    let header = reader.header.clone();
    let mut found = Replay {
        program: header.program,
        machine: format!("Linux {}, {}", header.machine.kernel, header.machine.cpu_model),
        strategies: header.strategies.clone(),
        steps: 0,
        commands: 0,
        kinds: BTreeMap::new(),
        texts: true,
        length: Nanoseconds::ZERO,
        ending: None,
        difference: None,
    };
    let strategies = select(&header.strategies, registry)?;
    let mut engine = Engine::new(header.machine, strategies, header.policy, header.memory);
    let mut started = None;
    loop {
        let step = match reader.next()? {
            Next::Step(step) => *step,
            Next::End(ending) => {
                found.ending = Some(ending);
                return Ok(found);
            }
        };
        let event = variant(&step.event);
        let commands = engine.step(step.now, step.unix, step.event);
        let text = serde_json::to_string(&commands).map_err(RecordingError::Encode)?;
        let same_hash = step.hash == format!("{:016x}", hash(text.as_bytes()));
        // The commands come last, so the written bytes are compared and not a parser's view of them.
        let written = format!(",\"commands\":{text}}}");
        let same_text = step.commands.is_none() || reader.line.ends_with(written.as_bytes());
        if !(same_hash && same_text) {
            let (command, recorded, replayed) = first_difference(step.commands.as_deref(), &commands)?;
            found.difference = Some(Difference {
                step: found.steps + 1,
                line: reader.number,
                now: step.now,
                unix_seconds: step.unix,
                event,
                command,
                recorded,
                replayed,
            });
            return Ok(found);
        }
        found.texts &= step.commands.is_some();
        found.steps += 1;
        found.commands += commands.len() as u64;
        for command in &commands {
            *found.kinds.entry(variant(command)).or_default() += 1;
        }
        let start = *started.get_or_insert(step.now);
        found.length = step.now.saturating_sub(start);
    }
}

/// Replays the events to an engine made as recorded, and records its new answers. The events stay those of the recorded
/// run: how the world would have answered other commands is unknown.
///
/// # Errors
/// As [`replay`], or the new recording cannot be written.
pub fn answer_again(
    input: impl BufRead,
    registry: Vec<Box<dyn Strategy>>,
    recorder: &mut Recorder,
) -> Result<Ending, RecordingError> {
    let mut reader = Reader::open(input)?;
    let header = reader.header.clone();
    let strategies = select(&header.strategies, registry)?;
    recorder.begin(&header.machine, &header.policy, &strategies, &header.memory)?;
    let mut engine = Engine::new(header.machine, strategies, header.policy, header.memory);
    loop {
        match reader.next()? {
            Next::Step(step) => {
                recorder.event(&step.event)?;
                let commands = engine.step(step.now, step.unix, step.event);
                if !recorder.step(step.now, step.unix, &commands)? {
                    return Ok(Ending::Marked {
                        reason: EndReason::Limit,
                    });
                }
            }
            Next::End(ending) => return Ok(ending),
        }
    }
}

/// Replays the events to an engine made as recorded. After every step `each` gets the time (seconds since the epoch),
/// the engine and its answer. Compares nothing; [`replay`] does.
///
/// # Errors
/// As [`replay`].
pub fn watch(
    input: impl BufRead,
    registry: Vec<Box<dyn Strategy>>,
    mut each: impl FnMut(u64, &Engine, &[Command]),
) -> Result<Ending, RecordingError> {
    let mut reader = Reader::open(input)?;
    let header = reader.header.clone();
    let strategies = select(&header.strategies, registry)?;
    let mut engine = Engine::new(header.machine, strategies, header.policy, header.memory);
    loop {
        match reader.next()? {
            Next::Step(step) => {
                let commands = engine.step(step.now, step.unix, step.event);
                each(step.unix, &engine, &commands);
            }
            Next::End(ending) => return Ok(ending),
        }
    }
}

type Texts = (Option<usize>, Option<String>, Option<String>);

/// The first difference: position from 1, and both texts.
fn first_difference(
    recorded: Option<&[serde_json::Value]>,
    replayed: &[Command],
) -> Result<Texts, RecordingError> {
    let now: Vec<serde_json::Value> = replayed
        .iter()
        .map(serde_json::to_value)
        .collect::<Result<_, _>>()
        .map_err(RecordingError::Encode)?;
    let join = |values: &[serde_json::Value]| {
        let all: Vec<String> = values.iter().map(ToString::to_string).collect();
        all.join("\n")
    };
    let Some(then) = recorded else {
        return Ok((None, None, Some(join(&now))));
    };
    let at = (0..then.len().max(now.len())).find(|i| then.get(*i) != now.get(*i));
    Ok(match at {
        Some(at) => (
            Some(at + 1),
            then.get(at).map(ToString::to_string),
            now.get(at).map(ToString::to_string),
        ),
        None => (None, Some(join(then)), Some(join(&now))),
    })
}
