//! The kernel's settings on the real machine: the files behind `homeostat_tunables`, and the watch over who writes them.

mod tree;
pub mod watch;

use crate::Root;
use homeostat_tunables::{Configured, Written};

/// The line that a person wrote about a setting, whatever it says; the last one in the order of effect. `parameter` is its
/// name on the kernel's command line.
pub fn configured(root: &Root, path: &str, parameter: &str) -> Option<String> {
    let all = Configured::read(root);
    let parameter = format!("cmdline:{parameter}");
    all.about(path, root)
        .pop()
        .or_else(|| all.about(&parameter, root).pop())
        .map(Written::place)
}

/// The line that explains the value that a setting has; the last one in the order of effect.
pub fn origin(root: &Root, path: &str, parameter: &str, value: &str) -> Option<String> {
    let all = Configured::read(root);
    let parameter = format!("cmdline:{parameter}");
    let same = |w: &Written| w.value.trim() == value;
    all.origin(path, root, same)
        .or_else(|| all.origin(&parameter, root, same))
        .map(Written::place)
}
