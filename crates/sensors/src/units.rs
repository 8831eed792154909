//! Settings in systemd's unit files that concern homeostat: environment and `MemoryTHP=`.
//!
//! The files are read as in systemd.unit(5): the fragment of the first directory that has it, then all drop-ins by
//! name. Only files owned by root count. Unlike systemd's socket, files also work in captured trees.

use crate::choice;
use homeostat_kernel::{Root, files};
use homeostat_model::OperatorChoice;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;

/// Directories of units, strongest first. Source: systemd.unit(5), "System Unit Search Path".
const DIRECTORIES: [&str; 12] = [
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
const DROP_INS_MAX: usize = 64;
const ENVIRONMENT_FILES_MAX: usize = 16;

/// Contents of a unit's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    /// Its environment, and the settings that homeostat respects.
    pub choice: OperatorChoice,
    /// Programs that it starts itself: the first words of `ExecStart=`.
    pub programs: Vec<String>,
    /// Everything was read, so an absent setting was not made.
    pub is_complete: bool,
}

/// Reads the files of a system unit; `None` when it has none.
pub fn read(root: &Root, name: &str) -> Option<Unit> {
    if name.contains('/') || name.is_empty() || name.len() > 255 {
        return None;
    }
    let template = name
        .split_once('@')
        .and_then(|(prefix, rest)| Some(format!("{prefix}@.{}", rest.rsplit_once('.')?.1)));
    let mut reading = Reading {
        root,
        unit: Unit {
            is_complete: true,
            ..Unit::default()
        },
        environment: BTreeMap::new(),
        files: Vec::new(),
        memory_thp: None,
    };
    let mut found = false;
    'found: for stem in std::iter::once(name).chain(template.as_deref()) {
        for directory in DIRECTORIES {
            let path = format!("{directory}/{stem}");
            if root.path(&path).exists() {
                reading.file(&path);
                found = true;
                break 'found;
            }
        }
    }
    let mut drop_ins: BTreeMap<String, String> = BTreeMap::new();
    for stem in stems(name, template.as_deref()) {
        for directory in DIRECTORIES {
            let directory = format!("{directory}/{stem}.d");
            for file in files::names(root, &directory) {
                if file.ends_with(".conf") {
                    let path = format!("{directory}/{file}");
                    drop_ins.entry(file).or_insert(path);
                }
            }
        }
    }
    if !found && drop_ins.is_empty() {
        return None;
    }
    reading.unit.is_complete &= found && drop_ins.len() <= DROP_INS_MAX;
    for path in drop_ins.values().take(DROP_INS_MAX) {
        reading.file(path);
    }
    Some(reading.finish(name))
}

/// Names for drop-ins of a unit, strongest first: its own, its template's, those of its prefixes, and its type's.
fn stems(name: &str, template: Option<&str>) -> Vec<String> {
    let mut stems = vec![name.to_owned()];
    stems.extend(template.map(str::to_owned));
    if let Some((body, kind)) = name.rsplit_once('.') {
        let mut rest = body.split('@').next().unwrap_or(body);
        while let Some((prefix, _)) = rest.trim_end_matches('-').rsplit_once('-') {
            stems.push(format!("{prefix}-.{kind}"));
            rest = prefix;
        }
        stems.push(kind.to_owned());
    }
    stems
}

struct Reading<'a> {
    root: &'a Root,
    unit: Unit,
    /// The two variables, with their places.
    environment: BTreeMap<&'static str, (String, String)>,
    /// Files with more variables, in order; without a `-` they must exist.
    files: Vec<(String, bool)>,
    memory_thp: Option<(String, String)>,
}

impl Reading<'_> {
    /// Applies one file. A file that others can write is ignored and makes the result incomplete.
    fn file(&mut self, path: &str) {
        let Some(text) = owned_text(self.root, path) else {
            self.unit.is_complete = false;
            return;
        };
        let mut section = String::new();
        for line in logical_lines(&text) {
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                name.clone_into(&mut section);
                continue;
            }
            if section == "Unit" || section == "Install" {
                continue;
            }
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            self.setting(key.trim(), value.trim(), path);
        }
    }

    fn setting(&mut self, key: &str, value: &str, path: &str) {
        match key {
            "Environment" if value.is_empty() => self.environment.clear(),
            "Environment" => {
                for word in words(value) {
                    self.variable(&word, path);
                }
            }
            "EnvironmentFile" if value.is_empty() => self.files.clear(),
            "EnvironmentFile" => {
                let (file, may_lack) = match value.strip_prefix('-') {
                    Some(file) => (file, true),
                    None => (value, false),
                };
                // Only systemd can resolve patterns and specifiers.
                if file.contains(['*', '?', '[', '%']) || self.files.len() >= ENVIRONMENT_FILES_MAX {
                    self.unit.is_complete = false;
                } else {
                    self.files.push((file.to_owned(), may_lack));
                }
            }
            "PassEnvironment" | "UnsetEnvironment" if value.contains("HOMEOSTAT") => {
                self.unit.is_complete = false;
            }
            "ExecStart" if value.is_empty() => self.unit.programs.clear(),
            "ExecStart" => {
                let command = value.trim_start_matches(['-', '@', ':', '+', '!', '|']);
                self.unit.programs.extend(words(command).into_iter().next());
                // `env HOMEOSTAT=never program`, or a shell's text.
                for word in words(command) {
                    if let Some(at) = word.find("HOMEOSTAT=") {
                        let rest = word.get(at..).unwrap_or_default();
                        self.variable(rest.split_whitespace().next().unwrap_or_default(), path);
                    }
                }
            }
            "MemoryTHP" => {
                self.memory_thp = (!value.is_empty()).then(|| (value.to_owned(), path.to_owned()));
            }
            _ => {}
        }
    }

    fn variable(&mut self, word: &str, path: &str) {
        for name in ["HOMEOSTAT", "HOMEOSTAT_STRATEGIES"] {
            if let Some(value) = word.strip_prefix(name).and_then(|w| w.strip_prefix('=')) {
                self.environment.insert(name, (value.to_owned(), path.to_owned()));
            }
        }
    }

    fn finish(mut self, name: &str) -> Unit {
        // These files override `Environment=`, and later ones earlier ones.
        for (path, may_lack) in std::mem::take(&mut self.files) {
            match owned_text(self.root, &path) {
                Some(text) => {
                    for line in logical_lines(&text) {
                        if let Some((key, value)) = line.split_once('=') {
                            let value = value.trim().trim_matches(['"', '\'']);
                            self.variable(&format!("{}={value}", key.trim()), &path);
                        }
                    }
                }
                None => self.unit.is_complete &= may_lack && !self.root.path(&path).exists(),
            }
        }
        for (variable, (value, path)) in &self.environment {
            let text = format!("{variable}={value}");
            choice::take_variable(
                &mut self.unit.choice,
                text.as_bytes(),
                &format!("{path} ({name})"),
            );
        }
        if let Some((value, path)) = self.memory_thp {
            if !matches!(value.as_str(), "inherit" | "system") {
                let sentence = format!("MemoryTHP={} in {path} ({name})", printable(&value));
                self.unit.choice.tuned.push(sentence);
            }
        }
        self.unit
    }
}

/// The text of a file that only root can write; in a captured tree, of any file.
fn owned_text(root: &Root, path: &str) -> Option<String> {
    if root.is_live() {
        let found = std::fs::metadata(root.path(path)).ok()?;
        if found.uid() != 0 || found.mode() & 0o022 != 0 || !found.is_file() {
            // `/dev/null` masks a unit, without a statement.
            return None;
        }
    }
    files::text(root, path)
}

fn logical_lines(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with(['#', ';']) {
            continue;
        }
        let mut whole = open.take().unwrap_or_default();
        match line.strip_suffix('\\') {
            Some(part) => {
                whole.push_str(part);
                whole.push(' ');
                open = Some(whole);
            }
            None => {
                whole.push_str(line);
                if !whole.is_empty() {
                    found.push(whole);
                }
            }
        }
    }
    found.extend(open);
    found
}

/// The words of a setting; quotes group words and are removed.
fn words(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (_, '\\') => word.get_or_insert_default().extend(rest.next()),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => found.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    found.extend(word);
    found
}

/// At most 32 characters that are harmless in a sentence.
fn printable(value: &str) -> String {
    value.chars().take(32).filter(char::is_ascii_graphic).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tree(list: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        for (path, text) in list {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (directory, root)
    }

    fn of(list: &[(&str, &str)], name: &str) -> Unit {
        let (_directory, root) = tree(list);
        read(&root, name).unwrap()
    }

    const REDIS: (&str, &str) = (
        "/lib/systemd/system/redis.service",
        "[Unit]\nDescription=HOMEOSTAT=never\n[Service]\nExecStart=-/usr/bin/redis-server /etc/redis.conf \\\n  --daemonize no\n",
    );

    #[test]
    fn a_unit_that_says_nothing_is_known_to_say_nothing() {
        let unit = of(&[REDIS], "redis.service");
        assert_eq!(unit.choice, OperatorChoice::default());
        assert!(unit.is_complete);
        assert_eq!(unit.programs, ["/usr/bin/redis-server"]);
        let (_directory, root) = tree(&[REDIS]);
        assert_eq!(read(&root, "other.service"), None);
        assert_eq!(read(&root, "../redis.service"), None);
    }

    #[test]
    fn a_never_is_found_wherever_a_person_writes_it() {
        let never = |extra: &[(&str, &str)], name: &str| {
            let mut list = vec![REDIS];
            list.extend(extra);
            of(&list, name).choice.never
        };
        let in_drop_in = "[Service]\nEnvironment=A=1 \"HOMEOSTAT=never\" B=2\n";
        let said = never(
            &[("/etc/systemd/system/redis.service.d/x.conf", in_drop_in)],
            "redis.service",
        );
        assert!(
            said.unwrap()
                .contains("/etc/systemd/system/redis.service.d/x.conf")
        );
        assert!(
            never(
                &[("/run/systemd/system/service.d/x.conf", in_drop_in)],
                "redis.service"
            )
            .is_some()
        );
        // The stronger directory masks a file of the same name.
        let masked = [
            ("/etc/systemd/system/redis.service.d/x.conf", "[Service]\n"),
            ("/usr/lib/systemd/system/redis.service.d/x.conf", in_drop_in),
        ];
        assert_eq!(never(&masked, "redis.service"), None);
        let with_file = [
            (
                "/etc/systemd/system/redis.service.d/x.conf",
                "[Service]\nEnvironmentFile=-/etc/default/redis\n",
            ),
            ("/etc/default/redis", "# x\nHOMEOSTAT=\"never\"\n"),
        ];
        assert!(never(&with_file, "redis.service").is_some());
        let reset = [
            ("/etc/systemd/system/redis.service.d/a.conf", in_drop_in),
            (
                "/etc/systemd/system/redis.service.d/b.conf",
                "[Service]\nEnvironment=\n",
            ),
        ];
        assert_eq!(never(&reset, "redis.service"), None);
        let shell = "[Service]\nExecStart=/bin/sh -c 'HOMEOSTAT=never exec server'\n";
        assert!(never(&[("/etc/systemd/system/sh@.service", shell)], "sh@one.service").is_some());
        let prefix = ("/etc/systemd/system/app-.service.d/x.conf", in_drop_in);
        assert!(
            never(
                &[prefix, ("/etc/systemd/system/app-one.service", "[Service]\n")],
                "app-one.service"
            )
            .is_some()
        );
    }

    #[test]
    fn what_cannot_be_read_leaves_it_incomplete() {
        let complete = |text: &str| of(&[("/etc/systemd/system/u.service", text)], "u.service").is_complete;
        assert!(complete("[Service]\nEnvironmentFile=-/etc/default/absent\n"));
        assert!(!complete("[Service]\nEnvironmentFile=/etc/default/absent\n"));
        assert!(!complete("[Service]\nEnvironmentFile=-/etc/default/%i\n"));
        assert!(!complete("[Service]\nPassEnvironment=HOMEOSTAT\n"));
    }

    #[test]
    fn the_last_memory_thp_counts() {
        let with = |text: &str| {
            let list = [REDIS, ("/etc/systemd/system/redis.service.d/x.conf", text)];
            of(&list, "redis.service").choice.tuned
        };
        assert!(with("[Service]\nMemoryTHP=madvise\n")[0].starts_with("MemoryTHP=madvise in /etc/"));
        assert_eq!(
            with("[Service]\nMemoryTHP=disable\nMemoryTHP=\n"),
            Vec::<String>::new()
        );
        assert_eq!(with("[Service]\nMemoryTHP=inherit\n"), Vec::<String>::new());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,400}") {
            let _ = of(&[("/etc/systemd/system/u.service", &text)], "u.service");
        }
    }
}
