//! What the kernel was built with.

use super::files;
use super::topology::kernel_release;
use crate::Root;

/// The kernel's configuration, as text of lines `CONFIG_X=y`: from `/boot`, from the modules' directory, or from the kernel
/// itself (`/proc/config.gz`). `None` where none of them is there.
pub fn read(root: &Root) -> Option<Vec<u8>> {
    let release = kernel_release(root);
    [
        format!("/boot/config-{release}"),
        format!("/lib/modules/{release}/config"),
    ]
    .iter()
    .find_map(|path| files::bytes(root, path, files::LARGE_FILE_MAX))
    .or_else(|| {
        let packed = files::bytes(root, "/proc/config.gz", files::LARGE_FILE_MAX)?;
        super::gzip::unpack(&packed, files::LARGE_FILE_MAX)
    })
}
