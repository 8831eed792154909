//! What the kernel was built with.

use crate::release::kernel_release;
use crate::{Root, files};

/// The kernel's configuration (`CONFIG_X=y`) from `/boot`, the modules' directory, or `/proc/config.gz`, if any.
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
        crate::gzip::unpack(&packed, files::LARGE_FILE_MAX)
    })
}
