//! The metrics of a real daemon: read as a monitoring system reads them, and all that the dashboard asks for.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    fn start(settings: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("homeostat.toml");
        std::fs::write(&config, "").unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_homeostat"));
        command.arg("--socket").arg(directory.path().join("io.homeostat"));
        command.arg("--state-dir").arg(directory.path().join("state"));
        command.arg("--config").arg(config);
        command.args(["run", "--advise-only", "--log", "human"]);
        for setting in settings {
            command.args(["--set", setting]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("JOURNAL_STREAM")
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// Waits for something in the log and returns what follows it in its line.
    fn told(&self, beginning: &str) -> String {
        let begin = Instant::now();
        loop {
            let log = self.log();
            if let Some((_, rest)) = log.split_once(beginning) {
                if let Some((rest, _)) = rest.split_once('\n') {
                    return rest.to_owned();
                }
            }
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "{beginning:?} in {log}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: */*\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// The families with the number of their samples, read by the rules of OpenMetrics 1.0 that a text can break.
fn families(text: &str) -> BTreeMap<String, usize> {
    let mut families: BTreeMap<String, usize> = BTreeMap::new();
    let mut series = BTreeSet::new();
    let (mut current, mut kind) = (String::new(), String::new());
    let body = text
        .strip_suffix("# EOF\n")
        .unwrap_or_else(|| panic!("no end: {text}"));
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, type_) = rest.split_once(' ').unwrap();
            assert!(["info", "gauge", "counter"].contains(&type_), "{line}");
            let before = families.insert(name.to_owned(), 0);
            assert_eq!(before, None, "a family stands in one piece: {line}");
            (current, kind) = (name.to_owned(), type_.to_owned());
        } else if let Some(rest) = line.strip_prefix("# UNIT ") {
            let (name, unit) = rest.split_once(' ').unwrap();
            assert_eq!(name, current);
            assert!(name.ends_with(&format!("_{unit}")), "{line}");
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            assert!(rest.starts_with(&format!("{current} ")), "{line}");
        } else {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().unwrap().is_finite(), "{line}");
            assert!(series.insert(name.to_owned()), "twice: {line}");
            let suffix = match kind.as_str() {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            let expected = format!("{current}{suffix}");
            assert!(
                name == expected || name.starts_with(&format!("{expected}{{")),
                "{line} is not of {current}"
            );
            *families.get_mut(&current).unwrap() += 1;
        }
    }
    families
}

/// Names of metrics in a query.
fn names(query: &str) -> Vec<String> {
    query
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("homeostat_"))
        .map(str::to_owned)
        .collect()
}

fn queries(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, inner) in map {
                match (key.as_str(), inner) {
                    ("expr" | "query" | "definition", serde_json::Value::String(text)) => {
                        found.push(text.clone())
                    }
                    _ => queries(inner, found),
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|inner| queries(inner, found)),
        _ => {}
    }
}

#[test]
fn a_monitoring_system_reads_all_that_the_dashboard_shows() {
    let daemon = Daemon::start(&["metrics.listen=127.0.0.1:0", "policy.age_min_s=0"]);
    let url = daemon.told("metrics can be read at http://");
    let address = url.strip_suffix("/metrics").unwrap();
    let (head, text) = get(address, "/metrics");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(
        head.contains("application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    let families = families(&text);
    for always in [
        "homeostat_host_cpus",
        "homeostat_own_resident_bytes",
        "homeostat_workloads",
    ] {
        assert!(families[always] > 0, "{always} has a sample: {text}");
    }

    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../packaging/grafana-dashboard.json"
    );
    let dashboard: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let mut asked = Vec::new();
    queries(&dashboard, &mut asked);
    let asked: BTreeSet<String> = asked.iter().flat_map(|q| names(q)).collect();
    assert!(asked.len() > 15, "{asked:?}");
    for name in &asked {
        let family = name
            .strip_suffix("_total")
            .or(name.strip_suffix("_info"))
            .unwrap_or(name);
        assert!(
            families.contains_key(family),
            "the dashboard asks for {name}, which is not served"
        );
    }

    let (head, _) = get(address, "/");
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
}

#[test]
fn a_port_that_is_taken_is_told_and_no_reason_not_to_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let setting = format!("metrics.listen={}", taken.local_addr().unwrap());
    let daemon = Daemon::start(&[&setting, "policy.workloads=[{match=\"*\",never=true}]"]);
    let told = daemon.told("metrics can not be read at ");
    assert!(told.contains("in use"), "{told}");
}

#[test]
fn an_address_that_others_could_reach_is_refused_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("homeostat.toml");
    std::fs::write(&config, "[metrics]\nlisten = \"0.0.0.0:9464\"\n").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .arg("--config")
        .arg(&config)
        .args(["config", "check"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("homeostat.toml:2:1") && said.contains("loopback"),
        "{said}"
    );
}
