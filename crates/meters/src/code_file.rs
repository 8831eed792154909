//! Files whose code a process runs, held open.
//!
//! The kernel takes the file of a breakpoint by path. A path through a process (`/proc/PID/exe`, `/proc/PID/root/…`)
//! means another file after an exec. Offsets would then be used in a wrong file, perhaps one with privileges. So a file
//! is opened once, through the mapping that the process runs (`/proc/PID/map_files/…`). It is parsed through that
//! descriptor, and passed to the kernel by it (`/proc/self/fd/N`).
//!
//! A helper process finds and opens the file, because its storage may belong to the workload and never answer. The
//! daemon gets the descriptor only if the machine itself serves the storage. A helper also parses the file, because a
//! hostile file may take endless memory and time.

use crate::code_map::{CodeMap, Told};
use crate::elf::{ElfError, Found, Wanted};
use crate::service::opener;
use crate::service::opener::Ask;
use crate::service::speaker::{Reply, Request};
use crate::{elf, service};
use homeostat_helper::{Domain, storage};
use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, is_ordinary_storage, open_process, text_of};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use homeostat_sensors::patient::patiently;
use homeostat_sensors::storage::{DeviceInode, MAPS_MAX, Refusal, maps};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Bytes of code compared between memory and file at a place.
pub const COMPARED: usize = 16;
/// Allowance for the clock of file times, which may be late by a tick of at most 10 ms.
const FILE_CLOCK: Duration = Duration::from_millis(20);
/// Breakpoint instruction of x86-64.
const BREAKPOINT: u8 = 0xcc;
const OVERLAYFS: u64 = 0x794c_7630;
/// Longest wait for a file's functions: only a search waits for it.
const MAP_PATIENCE: Duration = Duration::from_secs(10);
const BTRFS: u64 = 0x9123_683e;
/// Whether a breakpoint of ours may be at a place of a file now.
pub type IsOurs = fn(&DeviceInode, u64) -> bool;
/// File attribute with the privileges that execution gives (capabilities(7)).
const PRIVILEGES: &str = "security.capability";

/// A part of a process's address space with code of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// Offset of its start in the file.
    pub offset: u64,
    /// Major and minor number of the device, and inode.
    pub device_inode: ((u32, u32), u64),
    /// As the process sees it, for people and to find the main executable.
    pub path: String,
}

/// Code of files in a list of mappings, without writable mappings and those without a file (JIT, the kernel's page).
pub fn code_mappings(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(mapping).collect()
}

/// Parses `start-end perms offset device inode path`, for code that is not writable.
fn mapping(line: &str) -> Option<Mapping> {
    let permissions = line.split(' ').nth(1)?.as_bytes();
    let is_code = permissions.get(2) == Some(&b'x') && permissions.get(1) != Some(&b'w');
    file_mapping(line).filter(|_| is_code)
}

/// The same for any file.
fn file_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let offset = fields.nth(1)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode: u64 = fields.next()?.parse().ok()?;
    let path = fields.next()?.trim_start();
    if inode == 0 || !path.starts_with('/') || path.starts_with("/memfd:") || path.starts_with("/dev/") {
        return None;
    }
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    let number = |s: &str| u32::from_str_radix(s, 16).ok();
    let (start, end, offset) = (hex(start)?, hex(end)?, hex(offset)?);
    // Every address of it has an offset in the file.
    (start < end && offset.checked_add(end - start).is_some()).then(|| Mapping {
        start,
        end,
        offset,
        device_inode: ((number(major).unwrap_or(0), number(minor).unwrap_or(0)), inode),
        path: path.to_owned(),
    })
}

impl Mapping {
    /// Distance of a file's offset from the start of the mapping.
    fn within(&self, offset: u64) -> Option<u64> {
        offset
            .checked_sub(self.offset)
            .filter(|within| *within < self.end - self.start)
    }
}

/// Mapped code of a process. Empty if unreadable, or not in time.
pub fn mappings(root: &Root, process: ProcessId) -> Vec<Mapping> {
    open_process(root, process)
        .ok()
        .map(|dir| mapped_code(process, dir))
        .unwrap_or_default()
}

/// Pages of code that the kernel maps into processes (`[uprobes]` while probes are active).
const OF_KERNEL: [&str; 3] = ["[vdso]", "[vsyscall]", "[uprobes]"];

/// Where a process has code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Of files.
    pub files: Vec<Mapping>,
    /// Of the kernel: from and to.
    pub kernel: Vec<(u64, u64)>,
    /// Of no file, as compilers generate it at run time: from and to.
    pub compiled: Vec<(u64, u64)>,
}

impl Layout {
    /// Parses a list of mappings.
    pub fn parse(text: &str) -> Self {
        let range = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let hex = |s: &str| u64::from_str_radix(s, 16).ok();
            Some((hex(start)?, hex(end)?))
        };
        let of_kernel = |line: &&str| {
            let name = line.split_ascii_whitespace().nth(5);
            name.is_some_and(|name| OF_KERNEL.contains(&name))
        };
        // Some compilers name their generated code (`[anon: …]`, `/memfd:…`).
        let compiled = |line: &&str| {
            let executable = line.split(' ').nth(1).and_then(|p| p.as_bytes().get(2).copied()) == Some(b'x');
            executable && !of_kernel(line) && file_mapping(line).is_none()
        };
        Self {
            files: code_mappings(text),
            kernel: text.lines().filter(of_kernel).filter_map(range).collect(),
            compiled: text.lines().filter(compiled).filter_map(range).collect(),
        }
    }
}

/// Where a process has code. `None`: unreadable, not in time, or the process has ended.
pub fn layout(root: &Root, process: ProcessId) -> Option<Layout> {
    let text = maps(process, open_process(root, process).ok()?)?;
    (!text.is_empty()).then(|| Layout::parse(&text))
}

/// The first mapped code of a process's own program.
///
/// # Errors
/// A sentence: unknown.
pub fn own_code(root: &Root, process: ProcessId) -> Result<Mapping, String> {
    let dir = open_process(root, process).map_err(|e| e.to_string())?;
    let program = rustix::fs::readlinkat(&dir, "exe", Vec::new()).map_err(|e| {
        format!("the executable of process {process} cannot be looked at: {e}; run homeostat as root")
    })?;
    mapped_code(process, dir)
        .into_iter()
        .find(|m| m.path.as_bytes() == program.to_bytes())
        .ok_or_else(|| {
            format!(
                "process {process} has no code of the program that it runs mapped, as far as can be seen; run homeostat as root"
            )
        })
}

fn mapped_code(process: ProcessId, dir: OwnedFd) -> Vec<Mapping> {
    maps(process, dir)
        .map(|text| code_mappings(&text))
        .unwrap_or_default()
}

/// Device and inode of the file that a process runs.
pub fn executable(root: &Root, process: ProcessId) -> Option<(u64, u64)> {
    executable_at(open_process(root, process).ok()?)
}

/// The same by the process's directory, from cached attributes: remote or program-served storage is not asked.
pub fn executable_at(dir: impl AsFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::statx(dir, "exe", AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    Some((device, stat.stx_ino))
}

/// Selects a file of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Which {
    /// The program that it runs.
    Program,
    /// The file mapped there, from and to.
    Mapped(u64, u64),
}

/// A query of such a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// Finds a place to count.
    Place(Wanted),
    /// Finds its functions.
    Map,
}

/// A request to a helper. Without a question, it asks for the file itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Root of the machine's files.
    pub root: PathBuf,
    /// The process.
    pub process: ProcessId,
    /// Which of its files.
    pub which: Which,
    question: Option<Question>,
}

/// A helper's answer, with the state of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    state: FileState,
    findings: Option<Findings>,
}

/// The answer to a query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Findings {
    /// To [`Question::Place`].
    Place(Result<Found, ElfError>),
    /// To [`Question::Map`].
    Map(Result<Told, String>),
}

/// Identifies a state of a file: device and inode, last change, size.
pub type FileState = ((u64, u64), (i64, i64), u64);

/// Finds and opens a file of a process, in an opener. Checks first that the machine itself serves the storage.
pub fn find_file(root: &Root, process: ProcessId, which: Which) -> Result<OwnedFd, PlatformError> {
    let dir = open_process(root, process)?;
    let name = match which {
        Which::Program => "exe".to_owned(),
        Which::Mapped(start, end) => format!("map_files/{start:x}-{end:x}"),
    };
    let what = format!("opening the code of process {process}");
    let found = rustix::fs::openat(&dir, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| fault(e, &format!("the code of process {process}"), &what))?;
    storage::open_mapped(&found, &dir)
        .map(|(file, _)| file)
        .map_err(|why| PlatformError::Unsupported {
            what,
            why: format!("{why}: nothing is counted in such files"),
        })
}

/// Answers in a helper without privileges.
pub fn answer(asked: &Asked) -> Result<(Answered, Option<OwnedFd>), PlatformError> {
    let ask = Ask::Code {
        root: asked.root.clone(),
        process: asked.process,
        which: asked.which,
    };
    let what = || format!("looking into the code of process {}", asked.process);
    let (_, file) = opener::ask(&ask)?;
    let file = file
        .map(File::from)
        .ok_or_else(|| PlatformError::Vanished { target: what() })?;
    let state = rustix::fs::fstat(&file)
        .map(|stat| state_of(&stat))
        .map_err(|e| fault(e, "the file", &what()))?;
    let findings = asked.question.as_ref().map(|question| match question {
        Question::Place(wanted) => Findings::Place(elf::find(&file, wanted)),
        Question::Map => Findings::Map(CodeMap::read(&file).map(|map| map.told())),
    });
    let file = findings.is_none().then(|| OwnedFd::from(file));
    Ok((Answered { state, findings }, file))
}

fn ask(asked: &Asked, patience: Duration) -> Result<(Answered, Option<OwnedFd>), PlatformError> {
    let domain = Domain::of(&Root::new(&asked.root), asked.process)?;
    match service::call_apart(domain, &Request::Code(asked.clone()), patience)? {
        (Reply::Code(answered), file) => Ok((answered?, file)),
        _ => Err(PlatformError::Busy {
            what: format!("looking into the code of process {}", asked.process),
            why: "the helper process has answered something else".to_owned(),
        }),
    }
}

/// A file with code, open while anything in it is counted.
#[derive(Debug)]
pub struct CodeFile {
    file: File,
    /// How a helper finds it. `None`: our own executable.
    asked: Option<Asked>,
    /// Device and inode.
    identity: (u64, u64),
    /// Last change and size: a rewritten file is another one.
    state: ((i64, i64), u64),
    /// A layered file system shows one file as several, so device and inode do not show who else runs it.
    layered: bool,
    /// Path of this process's descriptor, for the kernel.
    path: CString,
}

impl CodeFile {
    /// The executable of a process, even if its file was removed.
    ///
    /// # Errors
    /// A sentence: it cannot be opened, or must not be counted.
    pub fn executable(root: &Root, process: ProcessId) -> Result<Self, String> {
        let called = format!("the executable of process {process}");
        Self::by_helper(root, process, Which::Program, &called)
    }

    /// The file that a process has mapped, whatever its path means by now.
    ///
    /// # Errors
    /// As of [`Self::executable`], or the mapping has changed.
    pub fn mapped(root: &Root, process: ProcessId, mapping: &Mapping) -> Result<Self, String> {
        let which = Which::Mapped(mapping.start, mapping.end);
        let this = Self::by_helper(root, process, which, &mapping.path)?;
        let device = (
            rustix::fs::major(this.identity.0),
            rustix::fs::minor(this.identity.0),
        );
        // Layered file systems show their own numbers, and btrfs subvolumes their own device.
        let kind = kind_of_storage(&this.file);
        let same = this.layered
            || (this.identity.1 == mapping.device_inode.1
                && (device == mapping.device_inode.0 || kind == Some(BTRFS)));
        if same {
            Ok(this)
        } else {
            Err(format!(
                "{} is no longer what process {process} has mapped there",
                mapping.path
            ))
        }
    }

    /// Our own executable, for tests on ourselves.
    pub fn own() -> Result<Self, String> {
        let proc = rustix::fs::open(
            "/proc/self",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| format!("/proc/self cannot be opened: {e}; mount proc"))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&proc, "exe", flags, Mode::empty())
            .map_err(|e| format!("our own executable cannot be opened: {e}"))?;
        Self::checked(file, None, "our own executable")
    }

    fn by_helper(root: &Root, process: ProcessId, which: Which, called: &str) -> Result<Self, String> {
        let asked = Asked {
            root: root.as_path().to_owned(),
            process,
            which,
            question: None,
        };
        let cannot = |why: String| format!("{called} cannot be opened: {why}");
        let (_, file) = ask(&asked, homeostat_helper::PATIENCE).map_err(|e| cannot(e.to_string()))?;
        let file = file.ok_or_else(|| cannot("the helper process has sent no file".to_owned()))?;
        Self::checked(file, Some(asked), called)
    }

    fn checked(fd: OwnedFd, asked: Option<Asked>, called: &str) -> Result<Self, String> {
        let say = |what: &str| format!("{called} {what}");
        let stat = rustix::fs::fstat(&fd).map_err(|e| say(&format!("cannot be looked at: {e}")))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(say("is no regular file"));
        }
        if stat.st_mode & 0o6000 != 0 || gives_privileges(&fd) {
            return Err(say(PRIVILEGED));
        }
        if !is_ordinary_storage(&fd) {
            return Err(say(
                "lies on storage that a program or another machine answers for: nothing is counted in such files",
            ));
        }
        let path = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
        let file = File::from(fd);
        Ok(Self {
            layered: kind_of_storage(&file) == Some(OVERLAYFS),
            identity: (stat.st_dev, stat.st_ino),
            state: change_and_size(&stat),
            file,
            asked,
            path,
        })
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn ask(&self, asked: &Asked, question: Question, patience: Duration) -> Result<Findings, String> {
        let asked = Asked {
            question: Some(question),
            ..asked.clone()
        };
        let (answered, _) = ask(&asked, patience).map_err(|e| e.to_string())?;
        match answered.findings {
            Some(findings) if answered.state == self.state() => Ok(findings),
            _ => Err("it is another file by now, or was written over".to_owned()),
        }
    }

    /// Finds a place that can be counted.
    ///
    /// # Errors
    /// [`ElfError`]. `Unreadable`: it could not be parsed now.
    pub fn find(&self, wanted: &Wanted) -> Result<Found, ElfError> {
        let Some(asked) = &self.asked else {
            return elf::find(&self.file, wanted);
        };
        let question = Question::Place(wanted.clone());
        match self.ask(asked, question, homeostat_helper::PATIENCE) {
            Ok(Findings::Place(Ok(found))) if !found.is_plausible(self.state.1) => Err(ElfError::Malformed(
                "what was found in it cannot be there".to_owned(),
            )),
            Ok(Findings::Place(found)) => found,
            Ok(Findings::Map(_)) => Err(ElfError::Unreadable("the helper process is confused".to_owned())),
            Err(why) => Err(ElfError::Unreadable(why)),
        }
    }

    /// Its functions.
    ///
    /// # Errors
    /// As of [`CodeMap::read`]. `Now`: it could not be parsed now.
    pub fn code_map(&self, called: &str) -> Result<CodeMap, Refusal> {
        let lasting = |why: &str| Refusal::Lasting(format!("{called}: {why}"));
        let Some(asked) = &self.asked else {
            return CodeMap::read(&self.file).map_err(|why| lasting(&why));
        };
        match self.ask(asked, Question::Map, MAP_PATIENCE) {
            Ok(Findings::Map(Ok(told))) => CodeMap::believed(told, self.state.1)
                .ok_or_else(|| lasting("what was found in it cannot be there")),
            Ok(Findings::Map(Err(why))) => Err(lasting(&why)),
            Ok(Findings::Place(_)) => Err(lasting("the helper process is confused")),
            Err(why) => Err(Refusal::Now(format!("{called}: {why}"))),
        }
    }

    /// Checks that the file is unchanged since it was opened and gives no privileges: both can change. A rewritten file
    /// has other instructions at its offsets.
    ///
    /// # Errors
    /// A sentence: it changed, gives privileges, or this is unknown.
    pub fn still_plain(&self, called: &str) -> Result<(), String> {
        let stat = rustix::fs::fstat(&self.file).map_err(|e| format!("{called} cannot be looked at: {e}"))?;
        if stat.st_mode & 0o6000 != 0 || gives_privileges(&self.file) {
            return Err(format!("{called} {PRIVILEGED}"));
        }
        if change_and_size(&stat) != self.state {
            return Err(format!("{called} was written over since it was looked into"));
        }
        Ok(())
    }

    /// Whether it is unchanged since a moment, by its times: its inode may have been another file's. False if unknown.
    pub fn is_older_than(&self, moment: SystemTime) -> bool {
        let Some(moment) = moment
            .duration_since(SystemTime::UNIX_EPOCH)
            .ok()
            .and_then(|since| since.checked_sub(FILE_CLOCK))
        else {
            return false;
        };
        rustix::fs::fstat(&self.file).is_ok_and(|stat| {
            let changed = (i128::from(stat.st_ctime), i128::from(stat.st_ctime_nsec));
            changed < (i128::from(moment.as_secs()), i128::from(moment.subsec_nanos()))
        })
    }

    /// Device and inode.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Identifies this state of this file: device, inode, last change, size.
    pub fn state(&self) -> FileState {
        (self.identity, self.state.0, self.state.1)
    }

    /// Whether a layered file system shows it as several files.
    pub fn is_layered(&self) -> bool {
        self.layered
    }

    /// Path by which the kernel finds this very file, while this value lives.
    pub fn kernel_path(&self) -> &CStr {
        &self.path
    }

    /// The bytes at an offset, fewer at the end of the file.
    pub fn bytes(&self, offset: u64) -> Option<[u8; COMPARED]> {
        let mut bytes = [0; COMPARED];
        let mut used = 0;
        while let Some(rest) = bytes.get_mut(used..).filter(|r| !r.is_empty()) {
            match self.file.read_at(rest, offset.checked_add(used as u64)?) {
                Ok(0) => break,
                Ok(n) => used += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        (used > 0).then_some(bytes)
    }
}

fn change_and_size(stat: &rustix::fs::Stat) -> ((i64, i64), u64) {
    (
        (stat.st_mtime, stat.st_mtime_nsec as i64),
        u64::try_from(stat.st_size).unwrap_or(0),
    )
}

fn state_of(stat: &rustix::fs::Stat) -> FileState {
    let (change, size) = change_and_size(stat);
    ((stat.st_dev, stat.st_ino), change, size)
}

fn kind_of_storage(file: &File) -> Option<u64> {
    rustix::fs::fstatfs(file)
        .ok()
        .map(|s| s.f_type as u64 & 0xffff_ffff)
}

/// Reason why such files are not counted.
const PRIVILEGED: &str = "gives privileges to whoever executes it (set-user-id, set-group-id or capabilities): nothing is \
                          counted in such files";

/// Whether execution gives privileges by file attributes. True if unknown.
fn gives_privileges(file: impl AsFd) -> bool {
    let mut buffer = [0u8; 64];
    !matches!(
        rustix::fs::fgetxattr(file, PRIVILEGES, &mut buffer[..]),
        Err(Errno::NODATA | Errno::OPNOTSUPP)
    )
}

/// Memory of a process, for comparison with its files.
pub struct Memory {
    file: File,
    mappings: Vec<Mapping>,
}

impl Memory {
    /// Opens the memory of a process, with its mapped code.
    ///
    /// # Errors
    /// The process ended, access is denied, or its mappings are unreadable.
    pub fn open(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        Self::open_with(root, process, code_mappings)
    }

    /// The same with all its mapped files, whether code or not.
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_all(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        Self::open_with(root, process, |text| {
            text.lines().filter_map(file_mapping).collect()
        })
    }

    fn open_with(
        root: &Root,
        process: ProcessId,
        mapped: impl FnOnce(&str) -> Vec<Mapping>,
    ) -> Result<Self, PlatformError> {
        let dir = open_process(root, process)?;
        let target = format!("process {process}");
        let what = format!("reading the memory of {target}");
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, "mem", flags, Mode::empty())
            .map(File::from)
            .map_err(|e| fault(e, &target, &what))?;
        let text = patiently(process.pid, move || text_of(&dir, "maps", MAPS_MAX))
            .map_err(|why| PlatformError::Busy {
                what: what.clone(),
                why,
            })?
            .map_err(|e| fault(e, &target, &what))?;
        Ok(Self {
            file,
            mappings: mapped(&text),
        })
    }

    /// Whether a mapping of the file holds this byte at an offset.
    ///
    /// # Errors
    /// A sentence: its memory is unreadable there.
    pub fn holds(&self, device_inode: &((u32, u32), u64), offset: u64, byte: u8) -> Result<bool, String> {
        let mut found = false;
        for mapping in self.mappings.iter().filter(|m| m.device_inode == *device_inode) {
            let Some(within) = mapping.within(offset) else {
                continue;
            };
            let mut memory = [0; 1];
            // No overflow: `within` is less than the mapping's length.
            self.file
                .read_exact_at(&mut memory, mapping.start + within)
                .map_err(|e| format!("its memory cannot be read at {:#x}: {e}", mapping.start + within))?;
            found |= memory == [byte];
        }
        Ok(found)
    }

    /// A mapping of an offset of the file.
    pub fn mapping_of(&self, device_inode: &((u32, u32), u64), offset: u64) -> Option<&Mapping> {
        self.mappings
            .iter()
            .find(|m| m.device_inode == *device_inode && m.within(offset).is_some())
    }

    /// Whether a process's code at an offset equals the file's, unpatched by anybody. `device_inode`: of the mapping
    /// through which the file was opened. A breakpoint counts as ours only while one of ours may be there.
    pub fn agrees(
        &self,
        device_inode: &((u32, u32), u64),
        offset: u64,
        bytes: &[u8; COMPARED],
        ours: IsOurs,
    ) -> bool {
        // A breakpoint of ours that was removed between the read and the ownership check is gone at the second read.
        (0..2).any(|_| self.agrees_now(device_inode, offset, bytes, ours))
    }

    fn agrees_now(
        &self,
        device_inode: &DeviceInode,
        offset: u64,
        bytes: &[u8; COMPARED],
        ours: IsOurs,
    ) -> bool {
        let mut found = false;
        for mapping in &self.mappings {
            let Some(within) = offset.checked_sub(mapping.offset) else {
                continue;
            };
            let left = (mapping.end - mapping.start).saturating_sub(within);
            if mapping.device_inode != *device_inode || left == 0 {
                continue;
            }
            found = true;
            let length = COMPARED.min(usize::try_from(left).unwrap_or(COMPARED));
            let mut memory = [0; COMPARED];
            let Some(part) = memory.get_mut(..length) else {
                return false;
            };
            // No overflow: `within` is less than the mapping's length.
            if self.file.read_exact_at(part, mapping.start + within).is_err() {
                return false;
            }
            let same = (offset..)
                .zip(part.iter().zip(bytes))
                .all(|(at, (memory, file))| {
                    memory == file || (*memory == BREAKPOINT && ours(device_inode, at))
                });
            if !same {
                return false;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_that_was_made_or_touched_since_is_not_older() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("code");
        std::fs::write(&path, "code").unwrap();
        let file = || CodeFile::checked(File::open(&path).unwrap().into(), None, "it");
        let Ok(opened) = file() else {
            eprintln!("skipped: {:?}", file().err());
            return;
        };
        let made = SystemTime::now();
        assert!(!opened.is_older_than(made));
        assert!(opened.is_older_than(made + Duration::from_secs(10)));
        assert!(!opened.is_older_than(SystemTime::UNIX_EPOCH));
        // Its last change can be set back, that it was can not.
        File::open(&path)
            .unwrap()
            .set_modified(SystemTime::UNIX_EPOCH)
            .unwrap();
        assert!(!opened.is_older_than(made));
    }

    #[test]
    fn code_of_files_is_told_from_other_mappings() {
        let text = "\
55d0-55e0 r-xp 00002000 fe:00 1234                       /usr/bin/a b
55e0-55f0 r--p 00002000 fe:00 1234                       /usr/bin/a b
7000-7100 r-xp 00000000 00:00 0                          [vdso]
7100-7200 rwxp 00000000 fe:00 99                         /tmp/jit
7200-7300 r-xp 00000000 00:01 98                         /memfd:code (deleted)
7300-7400 rwxp 00000000 00:00 0
7500-7400 r-xp 00000000 fe:00 1234                       /usr/bin/backwards
7400-7500 r-xp fffffffffffffff0 fe:00 1234               /usr/bin/beyond
nonsense
";
        let found = code_mappings(text);
        assert_eq!(
            found,
            [Mapping {
                start: 0x55d0,
                end: 0x55e0,
                offset: 0x2000,
                device_inode: ((0xfe, 0), 1234),
                path: "/usr/bin/a b".to_owned(),
            }]
        );
        let layout = Layout::parse(text);
        assert_eq!((layout.files, layout.kernel), (found, vec![(0x7000, 0x7100)]));
    }

    #[test]
    fn where_this_process_has_code_can_be_read_and_where_none_has_cannot() {
        let found = layout(&Root::default(), own()).unwrap();
        let here = code_file_test_address();
        assert!(found.files.iter().any(|m| (m.start..m.end).contains(&here)));
        let ended = ProcessId {
            start_ticks: own().start_ticks + 1,
            ..own()
        };
        assert_eq!(layout(&Root::default(), ended), None);
    }

    fn code_file_test_address() -> u64 {
        code_file_test_address as fn() -> u64 as usize as u64
    }

    fn own() -> ProcessId {
        let stat = std::fs::read("/proc/self/stat").unwrap();
        ProcessId {
            pid: std::process::id() as i32,
            start_ticks: homeostat_kernel::process::start_ticks(&stat).unwrap(),
        }
    }

    /// Our own code, where it can be opened through its mapping.
    fn own_code() -> Option<(Mapping, CodeFile)> {
        let root = Root::default();
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let mapping = mappings(&root, own())
            .into_iter()
            .find(|m| std::path::Path::new(&m.path) == exe)
            .unwrap();
        match CodeFile::mapped(&root, own(), &mapping) {
            Ok(file) => Some((mapping, file)),
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn what_is_mapped_is_opened_and_its_memory_agrees_with_it() {
        let Some((mapping, file)) = own_code() else {
            return;
        };
        assert_eq!(Some(file.identity()), executable(&Root::default(), own()));
        // The path leads to this file from inside.
        let through = std::fs::metadata(file.kernel_path().to_str().unwrap()).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::ino(&through), file.identity().1);
        let memory = Memory::open(&Root::default(), own()).unwrap();
        let bytes = file.bytes(mapping.offset).unwrap();
        assert!(memory.agrees(&mapping.device_inode, mapping.offset, &bytes, |_, _| false));
        let mut breakpoint = bytes;
        breakpoint[0] ^= 1;
        assert!(!memory.agrees(&mapping.device_inode, mapping.offset, &breakpoint, |_, _| false));
        let mut patched = bytes;
        patched[COMPARED - 1] ^= 1;
        assert!(!memory.agrees(&mapping.device_inode, mapping.offset, &patched, |_, _| false));
        assert!(
            !memory.agrees(&mapping.device_inode, u64::MAX - 8, &bytes, |_, _| false),
            "not mapped"
        );
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_nothing() {
        let memory = Memory::open_all(&Root::default(), own()).unwrap();
        let mapping = memory.mappings.first().unwrap().clone();
        let byte = |byte| memory.holds(&mapping.device_inode, mapping.offset, byte);
        assert_eq!((0..=255).filter(|b| byte(*b) == Ok(true)).count(), 1);
        // Nobody's memory lies there.
        let broken = Memory {
            file: memory.file.try_clone().unwrap(),
            mappings: vec![Mapping {
                start: 0x10,
                end: 0x1010,
                ..mapping.clone()
            }],
        };
        assert!(broken.holds(&mapping.device_inode, mapping.offset, 0).is_err());
        assert_eq!(broken.holds(&((0, 0), 0), mapping.offset, 0), Ok(false));
    }

    #[test]
    fn a_mapping_that_is_another_file_by_now_is_refused() {
        let Some((mut mapping, _)) = own_code() else {
            return;
        };
        mapping.device_inode.1 += 1;
        let refused = CodeFile::mapped(&Root::default(), own(), &mapping);
        match refused {
            Err(why) => assert!(why.contains("no longer"), "{why}"),
            Ok(file) => assert!(file.is_layered()),
        }
        mapping.end += 4096;
        assert!(CodeFile::mapped(&Root::default(), own(), &mapping).is_err());
    }

    #[test]
    fn files_that_give_privileges_and_what_is_no_file_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("program"), b"\x7fELF").unwrap();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open = |name: &str| {
            let file = rustix::fs::open(directory.path().join(name), flags, Mode::empty());
            CodeFile::checked(file.unwrap(), None, name)
        };
        if let Err(why) = open("program") {
            eprintln!("skipped: {why}");
            return;
        }
        // What was opened while it gave none is looked at again.
        let opened = open("program").unwrap();
        assert_eq!(opened.still_plain("program"), Ok(()));
        for mode in [0o4755, 0o2755, 0o6711] {
            std::fs::set_permissions(
                directory.path().join("program"),
                std::fs::Permissions::from_mode(mode),
            )
            .unwrap();
            assert!(
                opened
                    .still_plain("program")
                    .unwrap_err()
                    .contains("program gives privileges")
            );
            let why = open("program").unwrap_err();
            assert!(why.contains("gives privileges"), "{mode:o}: {why}");
        }
        // What was written over is another file.
        std::fs::set_permissions(
            directory.path().join("program"),
            std::fs::Permissions::from_mode(0o755),
        )
        .unwrap();
        assert_eq!(opened.still_plain("program"), Ok(()));
        std::fs::write(directory.path().join("program"), b"\x7fELF and more").unwrap();
        assert!(
            opened
                .still_plain("program")
                .unwrap_err()
                .contains("program was written over")
        );
        // A pipe would keep whoever opens it waiting for a writer.
        let pipe = directory.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        if made.is_ok_and(|s| s.success()) {
            assert!(open("pipe").unwrap_err().contains("no regular file"));
        }
        assert!(open(".").is_err());
        let status = File::open("/proc/self/status").unwrap();
        assert!(
            CodeFile::checked(status.into(), None, "status")
                .unwrap_err()
                .contains("storage")
        );
    }

    #[test]
    fn a_file_with_capabilities_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("program");
        std::fs::write(&file, b"\x7fELF").unwrap();
        // VFS_CAP_REVISION_2 with CAP_NET_BIND_SERVICE permitted (include/uapi/linux/capability.h).
        let mut value = Vec::new();
        for n in [0x0200_0000u32, 1 << 10, 0, 0, 0] {
            value.extend(n.to_le_bytes());
        }
        if let Err(e) = rustix::fs::setxattr(&file, PRIVILEGES, &value, rustix::fs::XattrFlags::empty()) {
            eprintln!("skipped: this user or file system cannot give a file capabilities ({e})");
            return;
        }
        assert!(
            CodeFile::checked(File::open(&file).unwrap().into(), None, "program")
                .unwrap_err()
                .contains("gives privileges")
        );
    }
}
