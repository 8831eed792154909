//! Bounded reads of the files of a process, and the meaning of kernel errors there.

use crate::Root;
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Now, in clock ticks since boot. If unreadable, the end of time: then counters start from their present values.
pub fn now_ticks(root: &Root) -> u64 {
    let seconds = std::fs::read_to_string(root.path("/proc/uptime"))
        .ok()
        .and_then(|text| text.split_ascii_whitespace().next()?.parse::<f64>().ok());
    match seconds {
        Some(s) => (s * rustix::param::clock_ticks_per_second() as f64) as u64,
        None => u64::MAX,
    }
}

/// Opens `/proc/PID` of this process, not of a later one with its number. Files read through it are of this process.
pub fn open_process(root: &Root, process: ProcessId) -> Result<OwnedFd, PlatformError> {
    let path = root.path(&format!("/proc/{}", process.pid));
    let target = format!("process {process}");
    let failed = |e| fault(e, &target, &path.display().to_string());
    let dir = rustix::fs::open(
        &path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(failed)?;
    let mut buffer = [0u8; 1024];
    let n = read_at(&dir, "stat", &mut buffer).map_err(failed)?;
    if start_ticks(&buffer[..n]) == Some(process.start_ticks) {
        Ok(dir)
    } else {
        Err(PlatformError::Vanished { target })
    }
}

/// As [`open_process`] on the running machine, with the kernel's error.
pub fn directory_of(process: ProcessId) -> Result<OwnedFd, Errno> {
    open_process(&Root::default(), process).map_err(|e| match e {
        PlatformError::Vanished { .. } => Errno::NOENT,
        PlatformError::Denied { .. } => Errno::ACCESS,
        _ => Errno::AGAIN,
    })
}

/// Checks that a process still runs; a killed one without a waiting parent does not.
///
/// # Errors
/// `Vanished`: it does not. Any other error: unknown.
pub fn living(root: &Root, process: ProcessId) -> Result<(), PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let mut buffer = [0u8; 1024];
    let n = read_at(&dir, "stat", &mut buffer).map_err(|e| fault(e, &target, "its stat file"))?;
    let stat = buffer.get(..n).unwrap_or_default();
    let after_name = stat.iter().rposition(|&c| c == b')');
    match after_name.and_then(|at| stat.get(at + 2)) {
        None | Some(b'Z' | b'X') => Err(PlatformError::Vanished { target }),
        Some(_) => Ok(()),
    }
}

/// Whether a process still runs. If a shortage here hides that, it is assumed to run.
pub fn lives(root: &Root, process: ProcessId) -> bool {
    !matches!(living(root, process), Err(PlatformError::Vanished { .. }))
}

/// Field 22 of the text of a `stat` file.
pub fn start_ticks(stat: &[u8]) -> Option<u64> {
    let after_name = stat.iter().rposition(|&c| c == b')')? + 1;
    std::str::from_utf8(&stat[after_name..])
        .ok()?
        .split_ascii_whitespace()
        .nth(19)?
        .parse()
        .ok()
}

/// Reads a complete file of a directory into `buffer`, which must be longer than the file.
///
/// # Errors
/// As of open(2) and read(2); `FBIG` if the file fills the buffer, since it may be cut then.
pub fn read_at(dir: impl AsFd, name: &str, buffer: &mut [u8]) -> Result<usize, Errno> {
    let file = rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    match read_full(&file, buffer)? {
        n if n == buffer.len() => Err(Errno::FBIG),
        n => Ok(n),
    }
}

/// The text of a file of a directory, shorter than `most` bytes.
///
/// # Errors
/// As of [`read_at`].
pub fn text_of(dir: impl AsFd, name: &str, most: usize) -> Result<String, Errno> {
    let mut buffer = vec![0; most.min(8 * 1024)];
    loop {
        match read_at(&dir, name, &mut buffer) {
            Ok(n) => {
                buffer.truncate(n);
                return Ok(String::from_utf8_lossy(&buffer).into_owned());
            }
            Err(Errno::FBIG) if buffer.len() < most => {
                buffer.resize(buffer.len().saturating_mul(4).min(most), 0);
            }
            Err(e) => return Err(e),
        }
    }
}

/// Longer than any `status` (bytes): `NGROUPS_MAX` (include/uapi/linux/limits.h) is 65,536 groups of 11 characters.
pub const STATUS_MAX: usize = 1 << 20;

/// The text of the `status` of a process or a thread.
///
/// # Errors
/// As of [`read_at`].
pub fn status_of(dir: impl AsFd, name: &str) -> Result<String, Errno> {
    text_of(dir, name, STATUS_MAX)
}

/// Reads until the buffer is full or the file ends.
pub fn read_full(file: impl AsFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    let mut used = 0;
    while used < buffer.len() {
        match rustix::io::read(&file, &mut buffer[used..]) {
            Ok(0) => break,
            Ok(n) => used += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(used)
}

/// Parent of a process: field 4 of its `stat` file.
pub fn parent(proc: &OwnedFd, pid: i32) -> Option<i32> {
    let mut buffer = [0u8; 1024];
    let n = read_at(proc, &format!("{pid}/stat"), &mut buffer).ok()?;
    let stat = &buffer[..n];
    let after_name = stat.iter().rposition(|&c| c == b')')? + 1;
    std::str::from_utf8(stat.get(after_name..)?)
        .ok()?
        .split_ascii_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

/// Numbers in a directory of numbers (`task`, `fd`), ascending, at most `limit`; the flag says whether there are more.
pub fn numbers_in(dir: impl AsFd, name: &str, limit: usize) -> Result<(Vec<i32>, bool), Errno> {
    let list = rustix::fs::openat(
        dir,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut numbers = Vec::new();
    for entry in rustix::fs::Dir::new(list)? {
        let entry = entry?;
        if let Some(n) = entry.file_name().to_str().ok().and_then(|s| s.parse().ok()) {
            if numbers.len() == limit {
                return Ok((numbers, true));
            }
            numbers.push(n);
        }
    }
    numbers.sort_unstable();
    Ok((numbers, false))
}

/// Whether a file's reads only take bytes from memory or a disk, not from the kernel, a program or another machine.
pub fn is_ordinary_storage(fd: &OwnedFd) -> bool {
    // include/uapi/linux/magic.h: tmpfs, ramfs, ext, xfs, btrfs, overlayfs, f2fs, bcachefs, squashfs, erofs; and zfs.
    const ORDINARY: [u64; 11] = [
        0x0102_1994,
        0x8584_58f6,
        0xef53,
        0x5846_5342,
        0x9123_683e,
        0x794c_7630,
        0xf2f5_2010,
        0xca45_1a4e,
        0x7371_7368,
        0xe0f5_e1e2,
        0x2fc1_2fc1,
    ];
    rustix::fs::fstatfs(fd).is_ok_and(|s| ORDINARY.contains(&(s.f_type as u64 & 0xffff_ffff)))
}

/// Whether an error means a shortage here and now, and not a fact about its object.
pub fn is_shortage(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
            | Errno::NOBUFS
            | Errno::INTR
            | Errno::BUSY
            | Errno::AGAIN
            | Errno::TIMEDOUT
    )
}

/// An error of the kernel about a process, as a [`PlatformError`].
pub fn fault(errno: Errno, target: &str, what: &str) -> PlatformError {
    match errno {
        Errno::NOENT | Errno::SRCH => PlatformError::Vanished {
            target: target.to_owned(),
        },
        Errno::ACCESS | Errno::PERM => PlatformError::Denied {
            what: what.to_owned(),
            needs: "run homeostat as root".to_owned(),
        },
        _ if is_shortage(errno) => PlatformError::Busy {
            what: what.to_owned(),
            why: errno.to_string(),
        },
        _ => PlatformError::Unsupported {
            what: what.to_owned(),
            why: errno.to_string(),
        },
    }
}

/// Real, effective, saved and file system user id.
pub fn user_ids(status: &str) -> Vec<u32> {
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("Uid:"))
        .unwrap_or_default();
    line.split_ascii_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_is_gone_has_vanished() {
        let say = |errno| fault(errno, "process 7", "its file");
        for gone in [Errno::NOENT, Errno::SRCH] {
            assert!(matches!(say(gone), PlatformError::Vanished { .. }), "{gone}");
        }
        for short in [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::NOBUFS,
            Errno::BUSY,
        ] {
            assert!(matches!(say(short), PlatformError::Busy { .. }), "{short}");
        }
        for lasting in [Errno::IO, Errno::ADDRNOTAVAIL] {
            assert!(
                matches!(say(lasting), PlatformError::Unsupported { .. }),
                "{lasting}"
            );
        }
        let start = start_ticks(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
        let own = ProcessId {
            pid: std::process::id() as i32,
            start_ticks: start,
        };
        assert_eq!(living(&Root::default(), own), Ok(()));
        let later = ProcessId {
            start_ticks: own.start_ticks + 1,
            ..own
        };
        assert!(matches!(
            living(&Root::default(), later),
            Err(PlatformError::Vanished { .. })
        ));
        assert!(!lives(&Root::default(), later));
    }

    #[test]
    fn what_fills_the_buffer_is_not_taken_for_the_whole() {
        let here = tempfile::tempdir().unwrap();
        std::fs::write(here.path().join("f"), [b'a'; 20_000]).unwrap();
        let dir = rustix::fs::open(here.path(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        assert_eq!(read_at(&dir, "f", &mut [0; 19_999]), Err(Errno::FBIG));
        assert_eq!(read_at(&dir, "f", &mut [0; 20_000]), Err(Errno::FBIG));
        assert_eq!(read_at(&dir, "f", &mut [0; 20_001]), Ok(20_000));
        for most in [1, 8_192, 20_000] {
            assert_eq!(text_of(&dir, "f", most), Err(Errno::FBIG), "{most}");
        }
        assert_eq!(text_of(&dir, "f", 20_001).map(|text| text.len()), Ok(20_000));
        let groups: String = (0..65_536)
            .map(|n| format!("{} ", 4_294_000_000u32 + n))
            .collect();
        let status = format!("Uid:\t7\t7\t7\t7\nGroups:\t{groups}\nvoluntary_ctxt_switches:\t5\n");
        std::fs::write(here.path().join("status"), &status).unwrap();
        assert_eq!(status_of(&dir, "status"), Ok(status));
    }

    #[test]
    fn start_time_is_found_behind_any_name() {
        let tail = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21";
        for name in ["a", "a b", "a) S 1 2 (b", "((("] {
            assert_eq!(
                start_ticks(format!("12 ({name}){tail}").as_bytes()),
                Some(4242),
                "{name}"
            );
        }
        assert_eq!(start_ticks(b"12 (a"), None);
        assert_eq!(start_ticks(b""), None);
        assert_eq!(start_ticks(b"1 (a) S 1"), None);
    }
}
