//! The readers of configuration against the tools that carry it out, on generated files: systemd-sysctl, `sysctl -p`,
//! systemd-tmpfiles, and the loader of tuned. The tools write into plain files below a directory of the test.
//!
//! Needs root (a mount namespace of its own) and the tools; `make test` installs them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_kernel::Root;
use homeostat_tunables::configured::Form;
use homeostat_tunables::reading::{self, Reading};
use homeostat_tunables::{Applies, Configured, Way};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Generated configurations for each tool.
const CASES: u32 = 120;

fn config() -> Config {
    Config {
        failure_persistence: None,
        ..Config::with_cases(CASES)
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The first of these files that is there; says so loudly where none is.
fn tool(paths: &[&str]) -> Option<PathBuf> {
    let found = paths.iter().map(PathBuf::from).find(|p| p.exists());
    if found.is_none() || !is_root() {
        eprintln!("SKIPPED: needs root and {} (make test-tools)", paths.join(" or "));
        return None;
    }
    found
}

/// A directory that stands for `/`.
struct Tree {
    keep: tempfile::TempDir,
}

impl Tree {
    fn new(files: &[(String, String)]) -> Self {
        let tree = Self {
            keep: tempfile::tempdir().unwrap(),
        };
        for (path, text) in files {
            tree.write(path, text);
        }
        tree
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.keep.path().join(absolute.trim_start_matches('/'))
    }

    fn write(&self, path: &str, text: &str) {
        let file = self.path(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }

    fn root(&self) -> Root {
        Root::new(self.keep.path())
    }

    /// Runs a shell's text in a mount namespace of its own, where $R is the tree.
    fn run(&self, text: &str) -> std::process::Output {
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-e", "-c", text])
            .env("R", self.keep.path())
            .env("SYSTEMD_LOG_TARGET", "console")
            .env("LC_ALL", "C")
            .output()
            .unwrap();
        assert!(
            !output.stderr.starts_with(b"mount:"),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        output
    }
}

/// The value that our reader says comes last, of lines that apply.
fn last(configured: &Configured, root: &Root, path: &str) -> Option<String> {
    let about = configured.about(path, root);
    let of = about.iter().rev().find(|c| c.applies == Applies::Yes)?;
    Some(of.written.value.clone())
}

fn pick(words: &'static [&'static str]) -> impl Strategy<Value = String> {
    proptest::sample::select(words).prop_map(str::to_owned)
}

/// Files of a kind of configuration, in the directories where it may lie.
fn files(
    directories: &'static [&'static str],
    names: &'static [&'static str],
    line: impl Strategy<Value = String> + 'static,
) -> impl Strategy<Value = Vec<(String, String)>> {
    let file = (
        pick(directories),
        pick(names),
        proptest::collection::vec(line, 0..6),
    )
        .prop_map(|(directory, name, lines)| (format!("{directory}/{name}"), lines.join("\n") + "\n"));
    proptest::collection::vec(file, 1..6)
}

const SYSCTLS: &[&str] = &[
    "vm/aa",
    "vm/ab",
    "net/conf/all/rp",
    "net/conf/eth0/rp",
    "net/conf/eth0.1/rp",
];

fn sysctl_line(names: &'static [&'static str]) -> impl Strategy<Value = String> {
    let set = (
        pick(&["", "-", " ", "- "]),
        pick(names),
        pick(&["=", " = ", "\t=  "]),
        pick(&["101", "102", "103", "104", "105  "]),
    )
        .prop_map(|(before, name, equals, value)| format!("{before}{name}{equals}{value}"));
    prop_oneof![
        6 => set,
        1 => pick(names).prop_map(|name| format!("-{name}")),
        1 => pick(&["# vm.aa=109", "; vm.aa=109", "nonsense", "", "[x]", "vm.none = 1", "\u{feff}vm.aa = 109"]),
    ]
}

const PLAIN_NAMES: &[&str] = &[
    "vm.aa",
    "vm/aa",
    "vm.ab",
    "/vm/ab",
    "net.conf.eth0.rp",
    "net/conf/eth0.1/rp",
    "net.conf.eth0/1.rp",
    "net.conf.all.rp",
];
const NAMES: &[&str] = &[
    "vm.aa",
    "vm/aa",
    "vm.ab",
    "vm//ab",
    "vm.a*",
    "vm/?b",
    "net.conf.eth0.rp",
    "net/conf/eth0.1/rp",
    "net.conf.eth0/1.rp",
    "net.conf.*.rp",
    "net.conf.eth*.rp",
    "net.conf.all.rp",
];

fn sysctls(tree: &Tree) {
    for name in SYSCTLS {
        tree.write(&format!("/proc/sys/{name}"), "000\n");
    }
}

#[test]
fn sysctl_d_is_read_as_systemd_sysctl_reads_it() {
    let Some(program) = tool(&["/usr/lib/systemd/systemd-sysctl", "/lib/systemd/systemd-sysctl"]) else {
        return;
    };
    let directories = &[
        "/etc/sysctl.d",
        "/run/sysctl.d",
        "/usr/local/lib/sysctl.d",
        "/usr/lib/sysctl.d",
    ];
    let names = &[
        "10-a.conf",
        "20-b.conf",
        "50-c.conf",
        "99-z.conf",
        "note.txt",
        ".hidden.conf",
    ];
    let mounts: String = directories
        .iter()
        .map(|d| format!("mkdir -p {d}; mount --bind $R{d} {d}; "))
        .collect();
    let script = format!(
        "mount -t tmpfs none /run; mount -t tmpfs none /usr/local; {mounts}mount --bind $R/proc/sys /proc/sys; \
         {0} --cat-config --no-pager || true; {0} || true",
        program.display()
    );
    proptest!(config(), |(files in files(directories, names, sysctl_line(NAMES)))| {
        let tree = Tree::new(&files);
        sysctls(&tree);
        tree.write("/usr/lib/systemd/systemd-sysctl", "");
        for directory in directories {
            std::fs::create_dir_all(tree.path(directory)).unwrap();
        }
        let output = tree.run(&script);
        let root = tree.root();
        let configured = Configured::read(&root);
        // Whatever line we read stands in a file that the tool reads.
        let shown = String::from_utf8_lossy(&output.stdout);
        for written in configured.all() {
            let header = format!("# {}\n", written.file);
            prop_assert!(shown.contains(&header), "{} is not read: {shown}", written.file);
        }
        for name in SYSCTLS {
            let path = format!("/proc/sys/{name}");
            let real = std::fs::read_to_string(tree.path(&path)).unwrap();
            let ours = last(&configured, &root, &path).unwrap_or_else(|| "000".to_owned());
            prop_assert_eq!(real.trim(), ours, "{} with {:#?}\n{}", name, files, String::from_utf8_lossy(&output.stderr));
        }
    });
}

#[test]
fn files_of_sysctls_are_read_as_sysctl_reads_them() {
    let Some(program) = tool(&["/usr/sbin/sysctl", "/sbin/sysctl"]) else {
        return;
    };
    let script = format!(
        "mount --bind $R/proc/sys /proc/sys; {} --dry-run -p $R/etc/x.conf || true",
        program.display()
    );
    let lines = proptest::collection::vec(sysctl_line(PLAIN_NAMES), 0..8);
    proptest!(config(), |(lines in lines)| {
        let text = lines.join("\n") + "\n";
        let tree = Tree::new(&[
            ("/etc/x.conf".to_owned(), text),
            (
                "/etc/systemd/system/x.service".to_owned(),
                "[Service]\nExecStart=/usr/sbin/sysctl -p /etc/x.conf\n".to_owned(),
            ),
        ]);
        sysctls(&tree);
        let output = tree.run(&script);
        let real: Vec<(String, String)> = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|l| l.split_once(" = "))
            .map(|(name, value)| (homeostat_tunables::configured::sysctl_path(name), value.to_owned()))
            .collect();
        let root = tree.root();
        let ours: Vec<(String, String)> = Configured::read(&root)
            .all()
            .iter()
            .filter(|w| w.way == Way::SystemdUnit)
            .filter(|w| SYSCTLS.iter().any(|name| w.path == format!("/proc/sys/{name}")))
            .map(|w| (w.path.clone(), w.value.clone()))
            .collect();
        prop_assert_eq!(real, ours, "{:#?}\n{}", lines, String::from_utf8_lossy(&output.stderr));
    });
}

#[test]
fn tmpfiles_d_is_read_as_systemd_tmpfiles_reads_it() {
    let Some(program) = tool(&["/usr/bin/systemd-tmpfiles", "/bin/systemd-tmpfiles"]) else {
        return;
    };
    let directories = &[
        "/etc/tmpfiles.d",
        "/run/tmpfiles.d",
        "/usr/local/lib/tmpfiles.d",
        "/usr/lib/tmpfiles.d",
    ];
    let names = &["10-a.conf", "20-b.conf", "50-c.conf", "99-z.conf", "note.txt"];
    const PATHS: &[&str] = &["/sys/a/x", "/sys/a/yy", "/sys/b/x"];
    let line = prop_oneof![
        8 => (
            pick(&["w", "w!", "w-", "w!-"]),
            pick(&["/sys/a/x", "/sys/a/yy", "/sys//a/x", "\"/sys/a/x\"", "'/sys/a/yy'", "/sys/a/*", "/sys/?/x", "/sys/a/\\x78"]),
            pick(&["- - - -", "0644 - - -", "-\t-  - -"]),
            pick(&["101", "102", "103", "\\x31\\x30\\x34", "1%%", "105 "]),
        )
            .prop_map(|(kind, path, fields, value)| format!("{kind} {path} {fields} {value}")),
        1 => pick(&["# w /sys/a/x - - - - 109", "w /sys/a/x - - - -", "w /sys/a/x - - - - -", "d /run/z", "w", ""]),
    ];
    proptest!(config(), |(files in files(directories, names, line))| {
        let tree = Tree::new(&files);
        for path in PATHS {
            tree.write(path, "000");
        }
        let script = format!("{} --create --boot --root=$R || true", program.display());
        let output = tree.run(&script);
        let root = tree.root();
        let configured = Configured::read(&root);
        for path in PATHS {
            let real = std::fs::read_to_string(tree.path(path)).unwrap();
            let ours = last(&configured, &root, path).unwrap_or_else(|| "000".to_owned());
            // The tool does not cut a plain file: a shorter value stands before what was there.
            prop_assert_eq!(real.get(..ours.len()), Some(ours.as_str()), "{} with {:#?}\n{}", path, files, String::from_utf8_lossy(&output.stderr));
        }
    });
}

/// Loads profiles below each directory with tuned's own classes, and prints what it would set.
const TUNED: &str = r#"
import logging, re, sys
sys.dont_write_bytecode = True
import tuned.profiles as p
import tuned.profiles.variables as variables
logging.disable(logging.CRITICAL)
for number, root in enumerate(sys.argv[1:]):
    v = variables.Variables()
    loader = p.Loader(p.Locator([root + "/usr/lib/tuned", root + "/etc/tuned"]), p.Factory(), p.Merger(), None, v)
    try:
        units = loader.load(open(root + "/etc/tuned/active_profile").read().split()).units
    except Exception:
        continue
    for unit in units.values():
        if unit.enabled and unit.type == "sysctl" and re.search(unit.uname_regex or "", "Linux vm 6.12.0 v x86_64"):
            for key, value in unit.options.items():
                value = re.sub("^\"(.*)\"$", r"\1", value)
                if key != "priority":
                    print(number, "/proc/sys/" + key.replace(".", "/"), v.expand(value).replace("\n", "~"), sep="\t")
"#;

#[test]
fn profiles_of_tuned_are_loaded_as_tuned_loads_them() {
    let python = Path::new("/usr/bin/python3");
    let has_tuned = Command::new(python)
        .args(["-B", "-c", "import tuned.profiles"])
        .output()
        .is_ok_and(|o| o.status.success());
    if !has_tuned {
        eprintln!("SKIPPED: needs tuned of Debian (make test-tools)");
        return;
    }
    let option = prop_oneof![
        8 => (
            pick(&["vm.aa", "vm.ab", "net.conf.eth0.rp", "kernel/x"]),
            pick(&["=", " = ", "=  "]),
            pick(&["101", "102 # c", "103", "\"104\"", "10${v}", "105#", ">106", "${none}", "; 7"]),
        )
            .prop_map(|(key, equals, value)| format!("{key}{equals}{value}")),
        1 => pick(&["replace=true", "replace=1", "drop=vm.aa", "drop=vm.ab,kernel/x", "enabled=false", "enabled=1",
                     "uname_regex=aarch64", "uname_regex=x86_64$", "uname_regex=${v}", "type=sysctl", "type=vm"]),
        1 => pick(&["# c", "; c", "", "  more", "nonsense"]),
    ];
    let section = (
        pick(&[
            "[sysctl]",
            "[sysctl]",
            "[sysctl.b]\ntype=sysctl",
            "[other]",
            "[variables]\nv=9",
            "[variables]\nv=8 # c",
            "[main]\nsummary=x",
        ]),
        proptest::collection::vec(option, 0..4),
    )
        .prop_map(|(name, options)| format!("{name}\n{}\n", options.join("\n")));
    let profile = (
        pick(&[
            "/etc/tuned/p",
            "/etc/tuned/q",
            "/usr/lib/tuned/p",
            "/usr/lib/tuned/q",
            "/usr/lib/tuned/r",
        ]),
        pick(&[
            "",
            "",
            "[main]\ninclude=p\n",
            "[main]\ninclude = q , r\n",
            "[main]\ninclude=-nosuch\n",
            "[main]\ninclude=q;r # c\n",
        ]),
        proptest::collection::vec(section, 0..4),
    )
        .prop_map(|(place, main, sections)| (format!("{place}/tuned.conf"), main + &sections.concat()));
    let case = (
        proptest::collection::vec(profile, 1..6),
        pick(&["p", "q", "p r", "q p", "r", "nosuch"]),
    );
    let mut runner = TestRunner::deterministic();
    let trees: Vec<(Vec<(String, String)>, Tree)> = (0..CASES * 4)
        .map(|_| {
            let (mut files, active) = case.new_tree(&mut runner).unwrap().current();
            files.push(("/etc/tuned/active_profile".to_owned(), active));
            files.push(("/proc/sys/kernel/osrelease".to_owned(), "6.12.0\n".to_owned()));
            files.push(("/proc/sys/kernel/arch".to_owned(), "x86_64\n".to_owned()));
            let tree = Tree::new(&files);
            (files, tree)
        })
        .collect();
    let output = Command::new(python)
        .args(["-B", "-c", TUNED])
        .args(trees.iter().map(|(_, t)| t.keep.path()))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut real: BTreeMap<usize, Vec<(String, String)>> = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let mut words = line.splitn(3, '\t');
        let number = words.next().unwrap().parse().unwrap();
        let (path, value) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
        real.entry(number).or_default().push((path, value));
    }
    let mut compared = 0;
    for (number, (files, tree)) in trees.iter().enumerate() {
        let root = tree.root();
        let ours: Vec<(String, String)> = Configured::read(&root)
            .all()
            .iter()
            .filter(|w| w.way == Way::TunedSysctl && w.applies == Applies::Yes)
            .map(|w| {
                let mark = if w.form == Form::AtLeast { ">" } else { "" };
                (w.path.clone(), format!("{mark}{}", w.value.replace('\n', "~")))
            })
            .collect();
        let real = real.remove(&number).unwrap_or_default();
        compared += real.len();
        assert_eq!(real, ours, "{files:#?}");
    }
    assert!(compared > 100, "only {compared} settings were compared");
}

/// Writes texts into files of a network namespace of its own: first what stands in `before`, then each text. Prints whether the
/// kernel took it, and what the file reads then.
const WRITES: &str = "mount -t sysfs none /sys; for i in $(seq 0 $(($N - 1))); do cat $R/before > $F; \
     if cat $R/$i > $F 2> /dev/null; then echo ok $(cat $F); else echo no $(cat $F); fi; done";

#[test]
fn numbers_are_read_as_the_kernel_reads_them() {
    if !is_root() {
        eprintln!("SKIPPED: needs root for a network namespace");
        return;
    }
    let text = proptest::string::string_regex("[ \t]?[-+]?(0x)?[0-9a-f]{0,5}([ \t#]{1,2}[-0-9#x]{0,4}){0,3}")
        .unwrap();
    let catalogue = homeostat_tunables::Catalogue::load().unwrap();
    let mut runner = TestRunner::deterministic();
    for (path, name, before) in [
        ("/proc/sys/net/core/somaxconn", "net.core.somaxconn", "4321"),
        (
            "/proc/sys/net/ipv4/tcp_keepalive_probes",
            "net.ipv4.tcp_keepalive_probes",
            "77",
        ),
        (
            "/proc/sys/net/ipv4/tcp_rmem",
            "net.ipv4.tcp_rmem",
            "4321 54321 654321",
        ),
        ("/sys/class/net/lo/tx_queue_len", "link.*.tx_queue_len", "4321"),
    ] {
        let tunable = catalogue.tunables.iter().find(|t| t.name == name).unwrap();
        let texts: Vec<String> = (0..300)
            .map(|_| text.new_tree(&mut runner).unwrap().current())
            .collect();
        let mut files = vec![("/before".to_owned(), format!("{before}\n"))];
        files.extend(
            texts
                .iter()
                .enumerate()
                .map(|(i, t)| (format!("/{i}"), format!("{t}\n"))),
        );
        let tree = Tree::new(&files);
        let output = Command::new("unshare")
            .args(["--net", "--mount", "--propagation", "private", "sh", "-c", WRITES])
            .env("R", tree.keep.path())
            .env("F", path)
            .env("N", texts.len().to_string())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            said.lines().count(),
            texts.len(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let mut taken = 0;
        for (text, line) in texts.iter().zip(said.lines()) {
            let (state, after) = line.split_once(' ').unwrap();
            let of = |shown: &str| reading::of(tunable, path, Form::Plain, text, shown, &Root::default());
            let now = of(after);
            match state {
                "ok" => {
                    taken += 1;
                    assert!(
                        matches!(now, Reading::Equal | Reading::Unknown(_)),
                        "{path} takes {text:?} as {after}: {now:?}"
                    );
                    let then = of(before);
                    let differs = matches!(then, Reading::Different(_) | Reading::Unknown(_));
                    assert!(
                        after == before || differs,
                        "{path} takes {text:?} as {after}: {then:?}"
                    );
                }
                _ => assert!(
                    // Of several numbers those before a fault are set, and may be what stood there.
                    matches!(now, Reading::Refused(_) | Reading::Unknown(_))
                        || after != before
                        || (now == Reading::Equal && before.contains(' ')),
                    "{path} refuses {text:?} and reads {after}: {now:?}"
                ),
            }
        }
        assert!(taken >= 10, "{path}: only {taken} texts were taken");
    }
}
