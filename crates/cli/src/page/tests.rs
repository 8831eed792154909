use super::*;
use serde_json::json;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A name that tries everything: markup, attributes, comments, control characters, turned writing, entities.
const HOSTILE: &str =
    "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;<!--\u{202e}\u{1b}[2J\u{0}";

fn effect(estimate: f64, lower: f64, upper: f64) -> serde_json::Value {
    json!({"estimate": estimate, "lower": lower, "upper": upper, "confidence": 0.9})
}

/// An experiment as the history has it; every text is `name`.
fn experiment(id: u64, name: &str, verdict: &str, blocks: usize) -> serde_json::Value {
    let blocks: Vec<_> = (0..blocks)
        .map(|i| {
            json!({"index": i, "on": i % 2 == 0, "measured_s": 4.0, "work": 4e6, "cpu_s": 4.0,
                "score": 13.0 + if i % 2 == 0 { 0.2 } else { 0.0 }, "broken": i == 2})
        })
        .collect();
    let trace: Vec<_> = (0..blocks.len())
        .map(|i| json!({"effect": effect(0.2, 0.1 - 0.3 / (i + 1) as f64, 0.4), "evidence": 2f64.powi(i as i32)}))
        .collect();
    json!({
        "id": id, "kind": "switchback", "strategy": "large_pages", "workload": name, "fingerprint": name,
        "machine": name, "hypothesis": name, "predicted": effect(0.1, 0.0, 0.2), "meter": name, "objective": name,
        "seed": 7, "alpha": 0.001, "washout_s": 2.0, "measured_s": 4.0, "started_unix": 1_700_000_000u64,
        "ended_unix": 1_700_000_100u64, "verdict": verdict, "reason": name, "effect": effect(0.2, 0.1, 0.3),
        "evidence": 1100.0, "stalled_s": 1.5, "bloat_bytes": 0, "harm_exposure": 12.0, "blocks": blocks,
        "action": 3, "members": [{"workload": name, "verdict": "accepted", "effect": null}], "trace": trace
    })
}

fn dossier(name: &str) -> Dossier {
    let workload = json!({
        "name": name, "kind": "unit", "program": name, "fingerprint": name, "pids": [1], "processes": 1, "age_s": 60.0,
        "cpus": 1.0, "resident_bytes": 1 << 30, "huge_bytes": 1 << 29, "stage": "improved", "summary": name,
        "meter": {"id": name, "unit": name, "rate": 1.0, "noise": 0.1, "cost": 0.0, "counted": 1.0, "objective": name,
            "objective_reason": name},
        "proposal": {"id": name, "strategy": name, "hypothesis": name, "predicted": effect(0.1, 0.0, 0.2), "risk": name,
            "design": name}
    });
    let windows: Vec<_> = (0..600)
        .map(|i| {
            json!({"workload": name, "started_unix": 1_700_000_000u64 + i * 60, "length_s": 60.0, "meter": name,
                "rate": 1e6 + i as f64, "cpus": 1.0, "waited": 0.1, "resident_bytes": 1 << 30, "huge_bytes": (1 << 20) * i})
        })
        .collect();
    let running = json!({
        "id": 9, "kind": "switchback", "strategy": name, "workload": name, "others": [name], "phase": name,
        "prepared": 1.0, "blocks": 3, "on": true, "washout_s": 2.0, "measured_s": 4.0,
        "effect": effect(0.1, -0.1, 0.3), "evidence": 3.0, "evidence_needed": 1000.0, "elapsed_s": 30.0,
        "budget_s": 3600.0,
        "latest": [
            {"on": true, "broken": false, "score": 1.1, "effect": effect(0.0, -1.0, 1.0), "evidence": 1.0},
            {"on": false, "broken": false, "score": 1.0, "effect": effect(0.1, -0.3, 0.5), "evidence": 1.9},
            {"on": true, "broken": true, "score": null, "effect": effect(0.1, -0.1, 0.3), "evidence": 3.0}
        ]
    });
    let status = json!({
        "schema": 1, "version": "0", "pid": 1, "at_unix": 1, "mode": name, "paused": false, "machine": name,
        "machine_refusals": [name], "workloads": [workload], "workloads_ignored": 3,
        "experiments": [running],
        "in_force": [{"action": 3, "strategy": name, "workload": name, "text": name, "effect": effect(0.2, 0.1, 0.3),
            "since_unix": 1, "guard": name, "on": true}],
        "outcomes": [], "advice": [{"id": name, "workload": name, "finding": name, "remedy": name, "risk": name}],
        "budget": {"own_cpu": 0.01, "own_resident_bytes": 1, "experiments_last_hour": 1, "experiments_per_hour_max": 6,
            "harm_exposure_day": 1.0, "harm_exposure_per_day_max": 2.0, "stalled_s": 1.0, "bloat_bytes": 0},
        "calibration": {"placebos": 4, "false_accepts": 0, "tries": 5, "accepts": 1, "alpha_next": 0.001},
        "notes": [name]
    });
    serde_json::from_value(json!({
        "schema": 1, "version": "0", "at_unix": 1_763_789_460u64,
        "status": status,
        "explanations": [{"schema": 1, "workload": workload, "meters": [{"id": name, "unit": name, "cost_per_count_ns": 0,
            "refused": name}], "decisions": [], "experiments": [], "in_force": [], "outcomes": [], "advice": []}],
        "story": [], "experiments": [experiment(1, name, "accepted", 12), experiment(2, name, "harmful", 500)],
        "windows": windows,
        "decisions": [{"at_unix": 1, "workload": name, "stage": name, "text": name}],
        "notes": [name]
    }))
    .expect("the shapes are those of the dossier")
}

/// The tags of a page, without the constants of ours.
fn tags(page: &str) -> Vec<&str> {
    page.split('<')
        .skip(1)
        .filter_map(|t| t.split('>').next())
        .collect()
}

#[test]
fn nothing_that_a_workload_chooses_becomes_markup() {
    let (tame, wild) = (page(&dossier("latency")), page(&dossier(HOSTILE)));
    // The same tags in the same order, and the same attributes in each, whatever the names are.
    let shape = |page: &str| -> Vec<String> {
        tags(page)
            .iter()
            .map(|t| {
                let names: Vec<&str> = t.split('"').step_by(2).collect();
                names.join("")
            })
            .collect()
    };
    assert_eq!(shape(&tame), shape(&wild));
    assert!(!wild.contains("<script") && !wild.contains("<img"));
    assert!(!wild.contains(['\u{202e}', '\u{1b}', '\0']));
    assert!(wild.contains("&lt;script&gt;"), "the name is shown as it is");
}

#[test]
fn the_page_loads_nothing() {
    let page = page(&dossier("latency"));
    for forbidden in [
        "http://",
        "https://",
        "//cdn",
        "url(",
        "@import",
        "<link",
        "<script",
        "src=",
        "javascript:",
    ] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert!(page.contains("default-src &#39;none&#39;"));
    for tag in tags(&page) {
        assert!(!tag.starts_with("iframe"), "{tag}");
        let mut attributes = tag.split('"').step_by(2);
        assert!(
            attributes.all(|name| !name.trim_start().starts_with("on")),
            "{tag}"
        );
    }
}

#[test]
fn every_element_is_closed_and_every_link_leads_somewhere() {
    let page = page(&dossier("latency"));
    let mut open: Vec<&str> = Vec::new();
    for tag in tags(&page) {
        let name = tag.split(' ').next().unwrap_or_default();
        match name.strip_prefix('/') {
            Some(end) => assert_eq!(open.pop(), Some(end), "{tag}"),
            None if matches!(name, "meta" | "br" | "!doctype") => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    for link in page.split("href=\"#").skip(1) {
        let id = link.split('"').next().unwrap_or_default();
        assert!(page.contains(&format!("id=\"{id}\"")), "{id}");
    }
}

#[test]
fn each_part_says_what_it_knows() {
    let full = page(&dossier("latency"));
    for text in [
        "latency does 20 % more work, proven on this machine",
        "1100 of 1000 needed",
        "homeostat undo 3",
        "Do or undo it by hand",
        "What a person could do",
        "0 of 4",
        "In force",
        "Being tried now",
        "2025-11-22 05:31 UTC",
    ] {
        assert!(full.contains(text), "{text}");
    }
    let mut dead = dossier("latency");
    dead.status = None;
    let dead = page(&dead);
    assert!(
        dead.contains("no daemon runs") && dead.contains("What was tried"),
        "from the history alone"
    );
    let empty = page(&Dossier::empty(0));
    assert!(empty.contains("Nothing was tried yet") && empty.contains("1970-01-01 00:00 UTC"));
}

fn browser() -> Option<PathBuf> {
    let found = ["chromium", "chromium-browser", "google-chrome"]
        .iter()
        .find_map(|name| {
            std::env::split_paths(&std::env::var_os("PATH")?)
                .map(|d| d.join(name))
                .find(|p| p.is_file())
        });
    if found.is_none() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: no chromium here, so the report was not opened in a browser"
        );
    }
    found
}

/// Opens the page in a frame of that width and asks the browser what became of it.
fn measured(browser: &Path, page: &str, width: u32) -> serde_json::Value {
    let directory = tempfile::tempdir().unwrap();
    let inner = page.replace('&', "&amp;").replace('"', "&quot;");
    let script = r#"
addEventListener("load", () => {
  const view = document.getElementById("f").contentWindow, d = view.document, root = d.documentElement;
  const outside = [...d.querySelectorAll("body *")].filter(e => !e.closest(".scroll, svg"))
    .filter(e => e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.tagName + "." + e.className);
  const letters = [...d.querySelectorAll("p, td, dd, figcaption, text, small")]
    .map(e => parseFloat(view.getComputedStyle(e).fontSize) *
      (e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1));
  document.getElementById("out").textContent = JSON.stringify({
    width: root.clientWidth, scroll: root.scrollWidth, outside, smallest: Math.min(...letters),
    plots: d.querySelectorAll("svg").length, sections: d.querySelectorAll("h2").length,
    loaded: view.performance.getEntriesByType("resource").length, scripts: d.scripts.length,
    policy: d.querySelector("meta[http-equiv]").content });
});"#;
    let wrapper = format!(
        "<!doctype html><body style=\"margin:0\"><iframe id=\"f\" style=\"border:0;width:{width}px;height:2000px\" \
         srcdoc=\"{inner}\"></iframe><pre id=\"out\"></pre><script>{script}</script>"
    );
    let file = directory.path().join("wrapper.html");
    std::fs::write(&file, wrapper).unwrap();
    let output = Command::new("timeout")
        .arg("120")
        .arg(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--dump-dom",
        ])
        .args(["--window-size=1400,2200", "--virtual-time-budget=10000"])
        .arg(format!(
            "--user-data-dir={}",
            directory.path().join("profile").display()
        ))
        .arg(format!("file://{}", file.display()))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .unwrap();
    let dom = String::from_utf8(output.stdout).unwrap();
    let out = dom
        .split("<pre id=\"out\">")
        .nth(1)
        .unwrap()
        .split("</pre>")
        .next()
        .unwrap();
    serde_json::from_str(
        &out.replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&amp;", "&"),
    )
    .unwrap()
}

#[test]
fn a_browser_shows_it_on_a_phone_and_on_a_desk() {
    let Some(browser) = browser() else { return };
    let long = "a-workload-with-a-name-that-nobody-would-choose-but-that-is-possible.service".repeat(2);
    for (width, name) in [(360, long.as_str()), (1200, "latency")] {
        let seen = measured(&browser, &page(&dossier(name)), width);
        assert_eq!(
            seen["outside"],
            json!([]),
            "{width}: nothing reaches out of the page"
        );
        assert!(
            seen["scroll"].as_u64() <= seen["width"].as_u64(),
            "{width}: {seen}"
        );
        assert_eq!(
            (seen["loaded"].as_u64(), seen["scripts"].as_u64()),
            (Some(0), Some(0)),
            "{seen}"
        );
        assert!(
            seen["plots"].as_u64() >= Some(8) && seen["sections"].as_u64() >= Some(7),
            "{seen}"
        );
        assert!(
            seen["smallest"].as_f64() >= Some(9.0),
            "{width}: letters can be read: {seen}"
        );
    }
}
