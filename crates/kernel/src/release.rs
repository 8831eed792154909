//! Which kernel runs.

use crate::{Root, files};

/// Major and minor number of a kernel release such as `6.1.0-21-amd64`.
pub fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse::<u32>().ok());
    Some((numbers.next()?, numbers.next()?))
}

/// `uname -r` of the machine below the root.
pub fn kernel_release(root: &Root) -> String {
    files::text(root, "/proc/sys/kernel/osrelease")
        .or_else(|| {
            // "Linux version 6.1.0-13-amd64 (…": the third word.
            files::text(root, "/proc/version").and_then(|t| t.split_whitespace().nth(2).map(str::to_owned))
        })
        .filter(|t| !t.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}
