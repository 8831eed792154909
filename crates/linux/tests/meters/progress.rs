//! The progress counter of C and Rust programs, and files that are not what they claim.

use super::*;
use homeostat_progress::layout::{self, Header};

const PROGRAM: &str = r#"
#include "homeostat_progress.h"
int main(void)
{
    struct homeostat_progress progress;
    char line[64];
    int r = homeostat_progress_open(&progress, "c \033program", "request \xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4", 3);
    printf("%d\n", r);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long i, n = strtoul(line, NULL, 10);
        if (line[0] == 'q')
            break;
        for (i = 0; i < n; i++)
            homeostat_progress_add(&progress, (unsigned)i, 1);
        printf("done\n");
        fflush(stdout);
    }
    homeostat_progress_close(&progress);
    homeostat_progress_add(&progress, 0, 1);
    printf("closed\n");
    return 0;
}
"#;

fn with(directory: &Path) -> Meters {
    let settings = MeterSettings {
        progress_directory: directory.to_owned(),
        ..MeterSettings::default()
    };
    Meters::new(&settings)
}

#[test]
fn a_c_program_is_counted_exactly_through_its_header() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(dir.path(), "counter", PROGRAM, &["-O2"]) else {
        return;
    };
    let mut c = Servant::start(Command::new(program).env("HOMEOSTAT_PROGRESS_DIR", dir.path()));
    assert_eq!(c.answer(), "0");
    let w = workload("counter", &[c.pid()]);
    let mut meters = with(dir.path());
    let found = meters.find(&w, "progress").unwrap();
    assert_eq!(found.refused, None);
    assert!(
        found.unit.starts_with("request ä") && found.unit.len() <= 31,
        "{}",
        found.unit
    );
    let mut meter = meters.open(&w, "progress").unwrap();
    let before = meter.read(&w).unwrap();
    assert_eq!(c.order("100000"), "done");
    assert_eq!(meter.read(&w).unwrap() - before, 100_000.0);
    assert_eq!(c.order("7"), "done");
    assert_eq!(meter.read(&w).unwrap() - before, 100_007.0);
    assert_eq!(c.order("q"), "closed");
    let files = std::fs::read_dir(dir.path()).unwrap();
    let left: Vec<_> = files
        .flatten()
        .map(|f| f.file_name())
        .filter(|n| n != "counter" && n != "counter.c")
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_c_program_that_cannot_publish_runs_on() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = compile(dir.path(), "counter", PROGRAM, &["-O2"]) else {
        return;
    };
    let mut c =
        Servant::start(Command::new(program).env("HOMEOSTAT_PROGRESS_DIR", dir.path().join("absent")));
    assert_eq!(c.answer(), "-2", "ENOENT");
    assert_eq!(c.order("1000"), "done");
    let w = workload("counter", &[c.pid()]);
    assert!(
        with(dir.path())
            .refusal(&w, "progress")
            .contains("homeostat_progress.h")
    );
}

#[test]
fn the_header_is_a_c_plus_plus_header_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_) = installed("g++") else { return };
    let source = dir.path().join("x.cc");
    std::fs::write(&source, PROGRAM).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../progress/include");
    let out = Command::new("g++")
        .args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
        .arg(include)
        .arg(source)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// One progress file per process: the parts share this process, so they are one test.
#[test]
fn a_rust_program_is_counted_and_foreign_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let own = workload("own", &[std::process::id()]);
    let publisher = homeostat_progress::Publisher::create_in(dir.path(), "own", "turn", 2).unwrap();
    let mut meters = with(dir.path());
    let mut meter = meters.open(&own, "progress").unwrap();
    let before = meter.read(&own).unwrap();
    publisher.counter(0).add(40);
    publisher.counter(1).add(2);
    assert_eq!(meter.read(&own).unwrap() - before, 42.0);

    // Somebody shortens the file under us: the last value stands, nothing breaks.
    let path = publisher.path().to_owned();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(64)
        .unwrap();
    assert_eq!(meter.read(&own).unwrap() - before, 42.0);
    // (The mapping of a shortened file must not be touched again, not even by the publisher.)
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    drop(publisher);
    // The file is gone, but we hold it open: silent, not wrong.
    assert_eq!(meter.read(&own).unwrap() - before, 42.0);

    let p = own.processes[0];
    let good = Header {
        slots: 1,
        pid: p.pid as u32,
        start_ticks: p.start_ticks,
        pid_namespace: 0,
        unit: "x".into(),
        name: "y".into(),
    };
    let bytes = |h: &Header| {
        let mut b = h.to_bytes().to_vec();
        b.resize(layout::file_size(h.slots), 0);
        b
    };
    let mut why = |make: &dyn Fn()| {
        let _ = std::fs::remove_file(&path);
        make();
        meters.refusal(&own, "progress")
    };
    assert!(why(&|| std::fs::write(&path, "short").unwrap()).contains("shorter"));
    assert!(why(&|| std::fs::write(&path, [0; 4096]).unwrap()).contains("no progress header"));
    let other = bytes(&Header {
        start_ticks: 1,
        ..good.clone()
    });
    assert!(why(&|| std::fs::write(&path, &other).unwrap()).contains("another process"));
    let target = dir.path().join("elsewhere");
    std::fs::write(&target, bytes(&good)).unwrap();
    assert!(why(&|| std::os::unix::fs::symlink(&target, &path).unwrap()).contains("not a regular file"));
    assert!(why(&|| std::fs::create_dir(&path).unwrap()).contains("not a regular file"));
    std::fs::remove_dir(&path).unwrap();
    if let Some(mkfifo) = installed("mkfifo") {
        // Opening must not wait for a writer.
        let fifo = || assert!(Command::new(&mkfifo).arg(&path).status().unwrap().success());
        assert!(why(&fifo).contains("not a regular file"));
    }
    if is_root() {
        let foreign = || {
            std::fs::write(&path, bytes(&good)).unwrap();
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        };
        assert!(why(&foreign).contains("belongs to user 65534"));
    }
    assert_eq!(why(&|| std::fs::write(&path, bytes(&good)).unwrap()), "");
}
