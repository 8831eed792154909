//! Where files come from, and what the catalogue must know of a machine.

use std::collections::BTreeSet;

/// Why a file could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// There is no such file.
    Absent,
    /// It may not be read by this user.
    Denied,
    /// It is there and cannot be read (a link without carrier has no speed, for example).
    Failed,
}

/// The files of a machine, by absolute path.
pub trait Tree {
    /// A file whole, up to a bound of the implementation.
    ///
    /// # Errors
    /// [`Unreadable`].
    fn read(&self, path: &str) -> Result<Vec<u8>, Unreadable>;
    /// Names in a directory, sorted; empty when it is absent.
    fn names(&self, directory: &str) -> Vec<String>;
    /// The configuration that the running kernel was built with, as text; `None` when it is nowhere to be found.
    fn kernel_configuration(&self) -> Option<Vec<u8>> {
        None
    }

    /// Where a path leads when all links are followed, within the tree; `None` when that is not known.
    fn real_path(&self, _path: &str) -> Option<String> {
        None
    }

    /// A file as text; what is not UTF-8 is replaced.
    fn text(&self, path: &str) -> Option<String> {
        self.read(path)
            .ok()
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The machine's architecture as `uname -m` names it; `None` when the files do not tell.
pub fn architecture(tree: &dyn Tree) -> Option<String> {
    if let Some(name) = tree.text("/proc/sys/kernel/arch") {
        return Some(name.trim().to_owned());
    }
    let cpuinfo = tree.text("/proc/cpuinfo")?;
    let has = |key: &str| {
        cpuinfo
            .lines()
            .any(|l| l.split(':').next().is_some_and(|k| k.trim() == key))
    };
    if has("flags") {
        Some("x86_64".to_owned())
    } else if has("CPU implementer") {
        Some("aarch64".to_owned())
    } else {
        None
    }
}

/// A release of the kernel: 6.18.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release(pub u32, pub u32);

impl Release {
    /// From `6.18.44-x`, `6.18`, or `6`; `None` when it does not begin with a number.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split(['.', '-', '+', '~']);
        let first = parts.next()?.parse().ok()?;
        let second = parts
            .next()
            .map(|t| t.chars().take_while(char::is_ascii_digit).collect::<String>())
            .and_then(|digits| digits.parse().ok())
            .unwrap_or(0);
        Some(Self(first, second))
    }
}

impl std::fmt::Display for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// What defaults and rules depend on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The running kernel.
    pub release: Release,
    /// Its release in full.
    pub release_text: String,
    /// Memory, in bytes.
    pub memory: u64,
    /// CPUs online.
    pub cpus: u32,
    /// Memory nodes.
    pub nodes: u32,
    /// Size of a page, in bytes.
    pub page: u64,
    /// Options that the kernel was built with (`CONFIG_X` or `CONFIG_X=value`); `None` when not known.
    pub options: Option<BTreeSet<String>>,
}

/// Most CPUs or nodes that a list is counted up to.
const LIST_MAX: u32 = 1 << 16;

/// How many numbers a list such as `0-3,8` names.
fn count(list: &str) -> u32 {
    list.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            last.checked_sub(first)?.checked_add(1)
        })
        .fold(0u32, |sum, n| sum.saturating_add(n).min(LIST_MAX))
}

impl Facts {
    /// Reads them. What cannot be read is zero; pages are taken for 4096 bytes, which holds on x86-64 and on most arm64.
    pub fn read(tree: &dyn Tree) -> Self {
        let text = |path: &str| tree.text(path).unwrap_or_default();
        let release_text = text("/proc/sys/kernel/osrelease").trim().to_owned();
        let memory = text("/proc/meminfo")
            .lines()
            .find_map(|l| {
                l.strip_prefix("MemTotal:")?
                    .split_whitespace()
                    .next()?
                    .parse::<u64>()
                    .ok()
            })
            .unwrap_or(0)
            .saturating_mul(1024);
        Self {
            release: Release::parse(&release_text).unwrap_or_default(),
            release_text,
            memory,
            cpus: count(&text("/sys/devices/system/cpu/online")),
            nodes: count(&text("/sys/devices/system/node/online")),
            page: 4096,
            options: tree.kernel_configuration().map(|bytes| {
                String::from_utf8_lossy(&bytes)
                    .lines()
                    .filter_map(|l| l.strip_suffix("=y").or_else(|| l.contains('=').then_some(l)))
                    .filter(|l| l.starts_with("CONFIG_"))
                    .map(str::to_owned)
                    .collect()
            }),
        }
    }

    /// Whether the kernel was built with an option; `None` when that is not known.
    pub fn has_option(&self, option: &str) -> Option<bool> {
        self.options.as_ref().map(|set| set.contains(option))
    }

    /// The value of an option that has one, without quotation marks.
    pub fn option_value(&self, option: &str) -> Option<String> {
        let start = format!("{option}=");
        let line = self.options.as_ref()?.iter().find(|o| o.starts_with(&start))?;
        line.strip_prefix(&start).map(|v| v.trim_matches('"').to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn releases_are_understood_and_ordered() {
        assert_eq!(Release::parse("6.18.44-fc"), Some(Release(6, 18)));
        assert_eq!(Release::parse("6.1-rc3"), Some(Release(6, 1)));
        assert_eq!(Release::parse("5"), Some(Release(5, 0)));
        assert_eq!(Release::parse("x"), None);
        assert!(Release(5, 14) < Release(6, 0) && Release(6, 2) < Release(6, 11));
    }

    #[test]
    fn facts_come_from_the_tree() {
        let tree = Files::new(&[
            ("/proc/sys/kernel/osrelease", "6.1.0-13-amd64\n"),
            ("/proc/meminfo", "MemTotal:       2048 kB\nMemFree: 1 kB\n"),
            ("/sys/devices/system/cpu/online", "0-3,8\n"),
            ("/sys/devices/system/node/online", "0\n"),
        ])
        .with_configuration("CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_HZ=250\n");
        let facts = Facts::read(&tree);
        assert_eq!(
            (facts.release, facts.memory, facts.cpus, facts.nodes),
            (Release(6, 1), 2 << 20, 5, 1)
        );
        assert_eq!(facts.has_option("CONFIG_A"), Some(true));
        assert_eq!(facts.has_option("CONFIG_B"), Some(false));
        assert_eq!(facts.has_option("CONFIG_HZ=250"), Some(true));
        assert_eq!(facts.option_value("CONFIG_HZ").as_deref(), Some("250"));
        assert_eq!(facts.option_value("CONFIG_A"), None);
        assert_eq!(Facts::read(&Files::new(&[])).has_option("CONFIG_A"), None);
        assert_eq!(count("0-4294967295"), 0);
    }
}
