//! Privileges of this process.

use crate::bytes::{hexadecimal, lines};
use crate::{Root, files};

/// Number of the capability to look at any process (`include/uapi/linux/capability.h`).
pub const CAP_SYS_PTRACE: u32 = 19;

/// Whether this process holds a capability in effect (`CapEff` of `/proc/self/status`).
pub fn may(root: &Root, capability: u32) -> bool {
    let status = files::bytes(root, "/proc/self/status", files::SMALL_FILE_MAX).unwrap_or_default();
    lines(&status)
        .find_map(|l| l.strip_prefix(b"CapEff:"))
        .and_then(|v| hexadecimal(v.trim_ascii()))
        .is_some_and(|set| set >> capability & 1 == 1)
}
