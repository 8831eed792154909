//! Kernel settings of memory reclaim that a controller may change: their values, and who chose them. Sources: files in
//! `/proc/sys/vm`, configuration files (`homeostat_tunables`: sysctl.d, tuned, …), and the catalogue's defaults. Read
//! only with the scans. Configuration files are read again after a change of value, at most once a minute, else every
//! five minutes.

use crate::settings::Holder;
use homeostat_kernel::bytes::number;
use homeostat_kernel::{Root, files};
use homeostat_model::{MemorySetting, Nanoseconds};
use homeostat_tunables::{Catalogue, Facts};

/// The settings (Documentation/admin-guide/sysctl/vm.rst).
pub const FILES: [&str; 3] = [
    "/proc/sys/vm/swappiness",
    "/proc/sys/vm/vfs_cache_pressure",
    "/proc/sys/vm/watermark_scale_factor",
];
/// Interval of reading configuration files: a hundred files and more, some 6 ms.
const CONFIGURED_EVERY: Nanoseconds = Nanoseconds::from_secs(300);
/// Interval of reading configuration files after a change of value.
const CONFIGURED_AFTER_A_CHANGE: Nanoseconds = Nanoseconds::from_secs(60);

/// Configuration file and line of each setting, in the order of [`FILES`].
#[derive(Clone, Debug)]
struct WrittenDown {
    at: Nanoseconds,
    values: Vec<(usize, u64)>,
    places: [Option<String>; FILES.len()],
}

/// Samples these settings.
#[derive(Debug)]
pub struct MemorySettings {
    root: Root,
    /// The kernel's own values; read once. The inner `None`: not known.
    defaults: Option<[Option<String>; FILES.len()]>,
    written: Option<WrittenDown>,
}

impl MemorySettings {
    /// A sensor without samples.
    pub fn new(root: Root) -> Self {
        Self {
            root,
            defaults: None,
            written: None,
        }
    }

    /// The settings that this kernel has. `holder`: the effectors' knowledge of who set a file.
    pub fn look(&mut self, now: Nanoseconds, holder: impl Fn(&str) -> Holder) -> Vec<MemorySetting> {
        let present: Vec<(usize, u64)> = FILES
            .iter()
            .enumerate()
            .filter_map(|(i, file)| Some((i, number(files::text(&self.root, file)?.as_bytes())?)))
            .collect();
        if present.is_empty() {
            return Vec::new();
        }
        let is_due = self.written.as_ref().is_none_or(|w| {
            let every = if w.values == present {
                CONFIGURED_EVERY
            } else {
                CONFIGURED_AFTER_A_CHANGE
            };
            now.saturating_sub(w.at) >= every
        });
        if is_due {
            self.written = Some(WrittenDown {
                at: now,
                values: present.clone(),
                places: configured(&self.root),
            });
        }
        let root = &self.root;
        let defaults = self.defaults.get_or_insert_with(|| defaults(root));
        let places = self.written.as_ref().map(|w| &w.places);
        present
            .into_iter()
            .map(|(i, value)| {
                let holder = holder(FILES[i]);
                let place = places.and_then(|p| p[i].clone());
                // An unknown default does not count as nobody's choice.
                let is_default = defaults[i].as_ref().is_some_and(|d| *d == value.to_string());
                let set_by = match (place, holder) {
                    (Some(place), _) => Some(place),
                    (None, Holder::Homeostat) => None,
                    (None, Holder::SomebodyElse) => Some("at run time".to_owned()),
                    (None, Holder::Unknown) => (!is_default).then(|| "at run time".to_owned()),
                };
                MemorySetting {
                    path: FILES[i].to_owned(),
                    value,
                    set_by,
                    ours: holder == Holder::Homeostat,
                }
            })
            .collect()
    }
}

fn configured(root: &Root) -> [Option<String>; FILES.len()] {
    let mut found = crate::settings::lines(root, &FILES).into_iter();
    FILES.map(|_| found.next().flatten())
}

fn defaults(root: &Root) -> [Option<String>; FILES.len()] {
    let Ok(catalogue) = Catalogue::load() else {
        return FILES.map(|_| None);
    };
    let facts = Facts::read(root);
    FILES.map(|file| {
        let entry = catalogue.tunables.iter().find(|t| t.path == file)?;
        entry.standard(&facts).shown()
    })
}

/// Whether one of them can be written here, or why not.
///
/// # Errors
/// The reason, for people.
pub fn can_be_moved(root: &Root) -> Result<Vec<&'static str>, String> {
    if !root.is_live() {
        return Err("the files below the root are not those of the running kernel".into());
    }
    let there: Vec<&str> = FILES
        .into_iter()
        .filter(|file| root.path(file).exists())
        .collect();
    if there.is_empty() {
        return Err("/proc/sys/vm has none of them".into());
    }
    let writable = |file: &&&str| rustix::fs::access(root.path(file), rustix::fs::Access::WRITE_OK).is_ok();
    match there.iter().find(|file| !writable(file)) {
        Some(file) => Err(format!("{file} cannot be written")),
        None => Ok(there),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(swappiness: &str) -> (tempfile::TempDir, MemorySettings) {
        let tree = tempfile::tempdir().unwrap();
        let sensor = MemorySettings::new(Root::new(tree.path()));
        write(&tree, "proc/sys/vm/swappiness", swappiness);
        write(&tree, "proc/sys/vm/vfs_cache_pressure", "100\n");
        (tree, sensor)
    }

    fn write(tree: &tempfile::TempDir, path: &str, text: &str) {
        let file = tree.path().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }

    fn set_by(sensor: &mut MemorySettings, second: u64, holder: Holder) -> Option<String> {
        let seen = sensor.look(Nanoseconds::from_secs(second), |_| holder);
        seen.into_iter().find(|s| s.path == FILES[0]).unwrap().set_by
    }

    #[test]
    fn the_kernel_s_own_values_are_nobody_s_and_others_were_set_at_run_time() {
        let (_tree, mut sensor) = host("60\n");
        let seen = sensor.look(Nanoseconds::ZERO, |_| Holder::Unknown);
        assert_eq!(seen.len(), 2, "a file that is not there is left out");
        assert!(seen.iter().all(|s| s.set_by.is_none() && !s.ours), "{seen:?}");
        assert_eq!((seen[0].value, seen[1].value), (60, 100));
        let (_tree, mut sensor) = host("10\n");
        assert_eq!(
            set_by(&mut sensor, 0, Holder::Unknown).as_deref(),
            Some("at run time")
        );
        assert_eq!(
            set_by(&mut sensor, 1, Holder::Homeostat),
            None,
            "ten is what homeostat set"
        );
        assert!(set_by(&mut sensor, 2, Holder::SomebodyElse).is_some());
    }

    #[test]
    fn what_somebody_wrote_down_is_theirs_also_where_it_is_the_default() {
        let (tree, mut sensor) = host("60\n");
        assert_eq!(set_by(&mut sensor, 0, Holder::Unknown), None);
        write(&tree, "etc/sysctl.d/90-mine.conf", "vm.swappiness = 60\n");
        assert_eq!(
            set_by(&mut sensor, 299, Holder::Unknown),
            None,
            "read every five minutes"
        );
        let place = set_by(&mut sensor, 301, Holder::Homeostat).unwrap();
        assert!(place.contains("90-mine.conf"), "{place}");
    }

    #[test]
    fn a_machine_without_them_shows_none() {
        let tree = tempfile::tempdir().unwrap();
        let mut sensor = MemorySettings::new(Root::new(tree.path()));
        assert!(sensor.look(Nanoseconds::ZERO, |_| Holder::Unknown).is_empty());
        assert!(can_be_moved(&Root::new(tree.path())).is_err());
    }
}
