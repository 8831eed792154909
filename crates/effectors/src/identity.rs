//! Identity checks for effectors on processes: each must act on the process, boot and namespaces of its record.

use homeostat_kernel::Root;
use homeostat_model::{Direction, Nanoseconds, ProcessId, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use std::fs;
use std::io;
use std::time::Duration;

/// Name of the namespaces in a record.
pub(super) const NAMESPACES: &str = "namespaces";

/// The pid and time namespaces in which process numbers and start times have their meaning.
pub(super) fn namespaces(root: &Root) -> String {
    ["pid", "time"]
        .map(|kind| {
            fs::read_link(root.link_path(&format!("/proc/self/ns/{kind}"))).map_or_else(
                |_| format!("{kind}:?"),
                |link| link.to_string_lossy().into_owned(),
            )
        })
        .join(" ")
}

/// In other namespaces the process of the record seems gone, and its undo would be struck off undone.
pub(super) fn require_namespaces(root: &Root, record: &UndoRecord) -> Result<(), PlatformError> {
    let here = namespaces(root);
    match record.found.get(NAMESPACES) {
        Some(there) if *there != here => Err(PlatformError::Denied {
            what: format!(
                "undoing action {} from other namespaces ({here})",
                record.action.id
            ),
            needs: format!(
                "run it where the change was made ({there}), usually on the host and not in a container"
            ),
        }),
        _ => Ok(()),
    }
}

/// The id of the running boot: records of another boot are void.
pub(super) fn boot_id(root: &Root) -> Result<String, PlatformError> {
    let path = root.path("/proc/sys/kernel/random/boot_id");
    match fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => Ok(text.trim().to_owned()),
        Ok(line) => Err(PlatformError::Malformed { path, line }),
        Err(e) => Err(PlatformError::Unsupported {
            what: "telling one boot from another".into(),
            why: format!("{}: {e}", path.display()),
        }),
    }
}

/// The answer for a record of another boot, whose memory and processes are gone. `None` for this boot.
pub(super) fn of_another_boot(
    root: &Root,
    record: &UndoRecord,
    direction: Direction,
) -> Result<Option<Progress>, PlatformError> {
    if record.boot_id == boot_id(root)? {
        return Ok(None);
    }
    match direction {
        Direction::Undo => Ok(Some(Progress {
            done: true,
            verified: true,
            ..Progress::default()
        })),
        Direction::Apply => Err(PlatformError::Vanished {
            target: format!("boot {}", record.boot_id),
        }),
    }
}

/// Name of a record's value about one process: `name.PID.START`.
pub(super) fn process_key(name: &str, id: ProcessId) -> String {
    format!("{name}.{}.{}", id.pid, id.start_ticks)
}

/// The values of that name in the record, by process, as [`process_key`] named them.
pub(super) fn by_process<'r>(
    record: &'r UndoRecord,
    name: &'static str,
) -> impl Iterator<Item = Result<(ProcessId, &'r str), PlatformError>> {
    record.found.iter().filter_map(move |(key, value)| {
        let whose = key.strip_prefix(name)?.strip_prefix('.')?;
        let id = whose.split_once('.').and_then(|(pid, start)| {
            Some(ProcessId {
                pid: pid.parse().ok()?,
                start_ticks: start.parse().ok()?,
            })
        });
        Some(
            id.map(|id| (id, value.as_str()))
                .ok_or_else(|| malformed(record, key)),
        )
    })
}

/// The error for a value of the record that is not understood.
pub(super) fn malformed(record: &UndoRecord, key: &str) -> PlatformError {
    /// Most characters of the value that are shown.
    const SHOWN_MAX: usize = 120;
    let value = record.found.get(key).map_or("(absent)", String::as_str);
    PlatformError::Malformed {
        path: format!("undo record {}", record.action.id).into(),
        line: format!("{key} = {value}").chars().take(SHOWN_MAX).collect(),
    }
}

pub(super) fn nanoseconds(time: Duration) -> Nanoseconds {
    Nanoseconds(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// `total` of the `full` line, in microseconds (Documentation/accounting/psi.rst).
pub(super) fn full_stall_microseconds(root: &Root) -> Option<u64> {
    let text = fs::read_to_string(root.path("/proc/pressure/memory")).ok()?;
    text.lines()
        .find(|line| line.starts_with("full"))?
        .split("total=")
        .nth(1)?
        .trim()
        .parse()
        .ok()
}

/// The fields of `/proc/PID/stat` about identity.
pub(super) struct ProcessStat {
    pub(super) start_ticks: u64,
    pub(super) ended: bool,
    /// Where code and stack begin. With randomised addresses `execve` changes these, not pid or start time.
    pub(super) image: String,
}

impl ProcessStat {
    pub(super) fn read(root: &Root, id: ProcessId) -> Result<Self, PlatformError> {
        let path = root.path(&format!("/proc/{}/stat", id.pid));
        let text = fs::read_to_string(&path).map_err(|e| read_error(id, &e))?;
        Self::parse(&text).ok_or(PlatformError::Malformed { path, line: text })
    }

    /// Field numbers as in proc_pid_stat(5). The program name (field 2) may contain anything, so counting starts after
    /// its last parenthesis, at field 3.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text
            .get(text.rfind(')')? + 1..)?
            .split_ascii_whitespace()
            .collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            start_ticks: field(22)?.parse().ok()?,
            ended: matches!(field(3)?, "Z" | "X" | "x"),
            image: format!("{}-{}", field(26)?, field(28)?),
        })
    }
}

/// Meaning of a failure to read below `/proc/PID`.
pub(super) fn read_error(id: ProcessId, error: &io::Error) -> PlatformError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => denied(id),
        Some(libc::ENOENT | libc::ESRCH) => PlatformError::Vanished {
            target: format!("process {id}"),
        },
        _ => PlatformError::Busy {
            what: format!("reading process {id}"),
            why: error.to_string(),
        },
    }
}

/// A privilege over that process is missing.
pub(super) fn denied(id: ProcessId) -> PlatformError {
    PlatformError::Denied {
        what: format!("changing process {id}"),
        needs: "run as root, or with CAP_SYS_PTRACE and CAP_SYS_NICE".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_can_not_forge_the_start_time() {
        let tail =
            "S 1 7 7 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 4242 9 9 18446744073709551615 1111 2 3333 0";
        for name in ["latency", "a b", ") Z 1 2 (", "x) S 1 7 7 0 -1"] {
            let stat = ProcessStat::parse(&format!("12 ({name}) {tail}\n")).unwrap();
            assert_eq!(
                (stat.start_ticks, stat.ended, stat.image.as_str()),
                (4242, false, "1111-3333"),
                "{name}"
            );
        }
        assert!(
            ProcessStat::parse("12 (x) Z 1 7 7 0 -1 0 1 0 0 0 1 2 0 0 20 0 1 0 42 9 9 9 1 2 3 0")
                .unwrap()
                .ended
        );
        for text in ["", "12 (x", "12 (x)", "12 (x) S 1 2 3"] {
            assert!(ProcessStat::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn stalls_of_the_whole_machine_are_read_from_the_full_line() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        assert_eq!(full_stall_microseconds(&root), None);
        fs::create_dir_all(root.path("/proc/pressure")).unwrap();
        let text = "some avg10=1.00 avg60=0.00 avg300=0.00 total=99\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=42\n";
        fs::write(root.path("/proc/pressure/memory"), text).unwrap();
        assert_eq!(full_stall_microseconds(&root), Some(42));
    }
}
