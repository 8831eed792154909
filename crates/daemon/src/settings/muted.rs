//! Muted advice, in a drop-in of its own, so that a person sees it and can edit it.

use super::{MAIN_FILE, SettingsErrors, Sources, load};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Longest id in bytes: a topic and a workload's name.
const ID_BYTES_MAX: usize = 400;

/// Name of the drop-in: last in order, so that none overrides it.
const FILE: &str = "zz-muted-advice.toml";

/// Why advice could not be muted. The configuration is as it was.
#[derive(Debug, thiserror::Error)]
pub enum MuteError {
    /// The configuration cannot be read as it is.
    #[error(transparent)]
    Configuration(#[from] SettingsErrors),
    /// The drop-in cannot be written.
    #[error("{}: cannot be written: {source}\n  hint: as root; or write policy.muted_advice into your configuration by hand", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not the id of any advice.
    #[error(
        "{0:?} is no id of advice: those have 1 to {ID_BYTES_MAX} bytes and no control characters\n  hint: `homeostat advice` shows them"
    )]
    NoId(String),
    /// No advice has that name.
    #[error("there is no advice {id:?}\n  hint: known are {}", known.join(", "))]
    Unknown {
        /// The requested id.
        id: String,
        /// Advice of now, what is muted, and the kinds that there are.
        known: Vec<String>,
    },
    /// Another file says otherwise, and it is read later.
    #[error("{}: written, but a file that is read later sets policy.muted_advice, too\n  hint: move the list from there to here, or the id into that list", .0.display())]
    Overridden(PathBuf),
    /// It is not muted.
    #[error("{id:?} is not muted{}", if .muted.is_empty() { "; nothing is".to_owned() } else { format!("; muted: {}", .muted.join(", ")) })]
    NotMuted {
        /// The requested id.
        id: String,
        /// The muted ids.
        muted: Vec<String>,
    },
}

/// The ids that are muted.
///
/// # Errors
/// The configuration cannot be read.
pub fn muted(sources: &Sources) -> Result<Vec<String>, MuteError> {
    Ok(load(sources)?.settings.policy.muted_advice)
}

/// The kinds of advice: ids, or prefixes of a workload's name. A test finds each in its source.
const KINDS: [(&str, bool); 6] = [
    ("file_cache/reader/", true),
    ("large_pages/enabled-never", false),
    ("large_pages/shared-memory-alignment/", true),
    ("large_pages/shared-memory-of-several/", true),
    ("memory/growth/", true),
    ("prefetch/counters", false),
];

/// Whether such advice can exist, even if there is none now.
fn is_of_a_kind(id: &str) -> bool {
    KINDS
        .iter()
        .any(|(kind, of_a_workload)| match id.strip_prefix(kind) {
            Some(rest) => *of_a_workload != rest.is_empty(),
            None => false,
        })
}

/// Mutes or unmutes an id. Returns the drop-in. `shown`: the advice of a running daemon.
///
/// # Errors
/// [`MuteError`].
pub fn set_muted(sources: &Sources, id: &str, mute: bool, shown: &[String]) -> Result<PathBuf, MuteError> {
    if id.is_empty() || id.len() > ID_BYTES_MAX || id.chars().any(char::is_control) {
        return Err(MuteError::NoId(id.to_owned()));
    }
    let main = sources.file.clone().unwrap_or_else(|| PathBuf::from(MAIN_FILE));
    let path = main.with_extension("d").join(FILE);
    let failed = |source| MuteError::File {
        path: path.clone(),
        source,
    };
    // Concurrent callers wait: otherwise one of two lists is lost.
    let _lock = lock(&path).map_err(failed)?;
    let mut ids = muted(sources)?;
    let was = ids.iter().any(|known| known == id);
    if mute && !was && !shown.iter().any(|known| known == id) && !is_of_a_kind(id) {
        let kinds = KINDS.iter().map(|(kind, of_a_workload)| {
            let name = if *of_a_workload { "WORKLOAD" } else { "" };
            format!("{kind}{name}")
        });
        let known: std::collections::BTreeSet<String> =
            shown.iter().cloned().chain(ids).chain(kinds).collect();
        return Err(MuteError::Unknown {
            id: id.to_owned(),
            known: known.into_iter().collect(),
        });
    }
    match (mute, was) {
        (true, false) => ids.push(id.to_owned()),
        (false, true) => ids.retain(|known| known != id),
        (true, true) => {}
        (false, false) => {
            return Err(MuteError::NotMuted {
                id: id.to_owned(),
                muted: ids,
            });
        }
    }
    write(&path, &text(&ids)).map_err(failed)?;
    if muted(sources)?.iter().any(|known| known == id) != mute {
        return Err(MuteError::Overridden(path));
    }
    Ok(path)
}

/// Locks the directory of drop-ins, created if needed, until dropped.
fn lock(path: &Path) -> io::Result<File> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(directory)?;
    let directory = File::open(directory)?;
    rustix::fs::flock(&directory, FlockOperation::LockExclusive)?;
    Ok(directory)
}

fn text(ids: &[String]) -> String {
    let mut text = String::from(
        "# Advice that nobody wants to see again. `homeostat advice mute ID` adds to it, `unmute ID` takes one out.\n[policy]\nmuted_advice = [\n",
    );
    for id in ids {
        text.push_str(&format!("    {},\n", toml::Value::String(id.clone())));
    }
    text.push_str("]\n");
    text
}

/// Writes atomically: a daemon that reads the configuration must not find half a file.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Advice that a daemon shows.
    fn shown() -> Vec<String> {
        let ids = (0..8).map(|i| format!("id{i}"));
        ids.chain(["a", "b/\"c\"", "late"].map(str::to_owned)).collect()
    }

    #[test]
    fn every_kind_of_advice_is_known_and_nothing_else_is() {
        let sources = [
            include_str!("../../../strategies/src/large_pages.rs"),
            include_str!("../../../strategies/src/prefetch.rs"),
            include_str!("../../../strategies/src/file_cache.rs"),
            include_str!("../../../engine/src/growth.rs"),
        ];
        for (kind, _) in KINDS {
            assert!(sources.iter().any(|s| s.contains(&format!("\"{kind}"))), "{kind}");
        }
        for known in [
            "prefetch/counters",
            "memory/growth/x.service",
            "large_pages/shared-memory-of-several/x",
        ] {
            assert!(is_of_a_kind(known), "{known}");
        }
        for unknown in [
            "nosuch",
            "x/y",
            "memory/growth/",
            "prefetch/counters/x",
            "prefetch",
        ] {
            assert!(!is_of_a_kind(unknown), "{unknown}");
        }
        let directory = tempfile::tempdir().unwrap();
        let sources = Sources {
            file: Some(directory.path().join("homeostat.toml")),
            set: Vec::new(),
        };
        std::fs::write(sources.file.as_ref().unwrap(), "").unwrap();
        let refused = set_muted(&sources, "nosuch", true, &[]).unwrap_err().to_string();
        assert!(refused.contains("memory/growth/WORKLOAD"), "{refused}");
        assert!(muted(&sources).unwrap().is_empty());
    }

    #[test]
    fn an_id_is_muted_and_speaks_again() {
        let directory = tempfile::tempdir().unwrap();
        let main = directory.path().join("homeostat.toml");
        std::fs::write(&main, "[policy]\nmuted_advice = [\"a\"]\n").unwrap();
        let sources = Sources {
            file: Some(main),
            set: Vec::new(),
        };
        let file = set_muted(&sources, "b/\"c\"", true, &shown()).unwrap();
        assert_eq!(muted(&sources).unwrap(), ["a", "b/\"c\""]);
        set_muted(&sources, "a", true, &shown()).unwrap();
        set_muted(&sources, "a", false, &shown()).unwrap();
        assert_eq!(muted(&sources).unwrap(), ["b/\"c\""]);
        let said = set_muted(&sources, "z", false, &shown()).unwrap_err().to_string();
        assert!(said.starts_with("\"z\" is not muted; muted: b/"), "{said}");
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("# Advice"));
        assert_eq!(
            std::fs::read_dir(file.parent().unwrap()).unwrap().count(),
            1,
            "no half file stays"
        );
    }

    #[test]
    fn a_broken_configuration_is_not_written_over() {
        let directory = tempfile::tempdir().unwrap();
        let main = directory.path().join("homeostat.toml");
        std::fs::write(&main, "[policy\n").unwrap();
        let sources = Sources {
            file: Some(main),
            set: Vec::new(),
        };
        assert!(matches!(
            set_muted(&sources, "a", true, &shown()),
            Err(MuteError::Configuration(_))
        ));
        assert!(!directory.path().join("homeostat.d").join(FILE).exists());
        for wrong in ["", "a\nb", &"x".repeat(401)] {
            assert!(matches!(
                set_muted(&sources, wrong, true, &shown()),
                Err(MuteError::NoId(_))
            ));
        }
    }

    #[test]
    fn many_at_once_are_all_muted_and_a_later_file_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let main = directory.path().join("homeostat.toml");
        std::fs::write(&main, "").unwrap();
        let sources = Sources {
            file: Some(main),
            set: Vec::new(),
        };
        std::thread::scope(|scope| {
            for i in 0..8 {
                let sources = &sources;
                scope.spawn(move || set_muted(sources, &format!("id{i}"), true, &shown()).unwrap());
            }
        });
        assert_eq!(muted(&sources).unwrap().len(), 8);
        let later = directory.path().join("homeostat.d/zzz.toml");
        std::fs::write(later, "[policy]\nmuted_advice = []\n").unwrap();
        assert!(matches!(
            set_muted(&sources, "late", true, &shown()),
            Err(MuteError::Overridden(_))
        ));
    }
}
