//! The catalogue on the machine that the tests run on, and the watch over a setting of its kernel. What is changed is put
//! back.

use homeostat_kernel::Root;
use homeostat_sensors::settings::watch::{ForeignWrite, Stopper, Watch};
use homeostat_tunables::settings::{Host, Known};
use homeostat_tunables::{Catalogue, Found, Origin};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn what_exists_here_is_readable_within_its_range_and_has_an_origin() {
    let catalogue = Catalogue::load().unwrap();
    let root = Root::default();
    let host = Host::read(&root);
    let settings = host.settings(&catalogue);
    let mut with_value = 0;
    let mut origins = std::collections::BTreeMap::new();
    for setting in &settings {
        let Found::Value(value) = &setting.found else {
            continue;
        };
        with_value += 1;
        assert_eq!(
            setting.tunable.values.check(value, &setting.shown),
            Ok(value.clone()),
            "{} = {:?}, expected {}",
            setting.name,
            setting.shown,
            setting.tunable.values
        );
        let origin = host.origin(setting, &Known::default()).unwrap();
        *origins.entry(origin.kind()).or_insert(0) += 1;
    }
    eprintln!(
        "{with_value} of {} settings have a value here: {origins:?}",
        settings.len()
    );
    // A container may hide most of them.
    assert!(with_value > 0);
}

/// Puts a file back whatever happens.
struct PutBack(&'static str, String);

impl Drop for PutBack {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0, &self.1);
    }
}

#[test]
fn a_write_into_a_setting_of_the_kernel_is_noticed_with_its_writer_and_its_origin_is_told() {
    const FILE: &str = "/proc/sys/vm/stat_interval";
    let writable = std::fs::OpenOptions::new().write(true).open(FILE).is_ok();
    if !rustix::process::geteuid().is_root() || !writable {
        eprintln!("skipped: needs root and a writable {FILE}");
        return;
    }
    let catalogue = Catalogue::load().unwrap();
    let before = std::fs::read_to_string(FILE).unwrap();
    let other = if before.trim() == "2" { "3" } else { "2" };
    let begun = Instant::now();
    let mut watch = Watch::begin(Root::default(), &catalogue);
    let took = begun.elapsed();
    if let Some(why) = watch.why_not() {
        eprintln!("skipped: {why}");
        return;
    }
    let (_hold, stop) = Stopper::new().unwrap();
    let put_back = PutBack(FILE, before);
    // It lives on after its write, so that its name can be read.
    let mut child = Command::new("sh")
        .args(["-c", &format!("echo {other} > {FILE}; exec cat")])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut found: Option<ForeignWrite> = None;
    while found.is_none() && Instant::now() < deadline {
        let writes = watch.wait(&stop, Duration::from_secs(1)).unwrap();
        found = writes.into_iter().find(|w| w.path == FILE);
    }
    drop(child.stdin.take());
    child.wait().unwrap();
    let found = found.expect("the write was noticed");
    assert_eq!(found.to, other);
    let by = found.by.unwrap();
    assert!(by.contains(&format!("pid {}", child.id())), "{by}");
    let root = Root::default();
    let host = Host::read(&root);
    let settings = host.settings(&catalogue);
    let setting = settings.iter().find(|s| s.path == FILE).unwrap();
    let origin = host.origin(setting, &Known::default()).unwrap();
    assert!(matches!(origin, Origin::RunTime { .. }), "{origin:?}");
    eprintln!("{} settings watched, begun in {took:?}", watch.len());
    drop(put_back);
}
