//! Table for people: programs that are counted without configuration. A test compares it with what the kinds look for.

use crate::points::{KnownPoint, Place, known_points};
use serde::{Deserialize, Serialize};

/// One way to count a known program's work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownMeter {
    /// Names of the program: process or executable file.
    pub programs: Vec<String>,
    /// Name of the meter.
    pub meter: String,
    /// What one count is.
    pub unit: String,
    /// What counting costs the program.
    pub cost: String,
    /// When it counts, and what it needs.
    pub remark: String,
}

/// Cost with an emulated instruction. At other first instructions, the probe moves or costs ten times as much.
const PROBE_COST: &str = "0.8 to 1.3 µs a count (10 µs where its first instruction has to be stepped)";

const POINTS_COST: &str = "at most 0.5 % of its CPU time; the search at most 1 s of it";

fn own(programs: &[&str], meter: &str, unit: &str, cost: &str, remark: &str) -> KnownMeter {
    KnownMeter {
        programs: programs.iter().map(|p| (*p).to_owned()).collect(),
        meter: meter.to_owned(),
        unit: unit.to_owned(),
        cost: cost.to_owned(),
        remark: remark.to_owned(),
    }
}

/// The table by program, with the closest to the work first.
pub fn known_meters() -> Vec<KnownMeter> {
    let mut all = vec![
        own(
            &["(any)"],
            "progress",
            "what the program says",
            "nothing: one atomic addition by the program",
            "the program publishes a counter with the homeostat-progress crate or homeostat_progress.h",
        ),
        own(
            &["redis-server", "valkey-server", "keydb-server", "dragonfly"],
            "redis",
            "command",
            "one INFO a second: 50 µs",
            "total_commands_processed; a password is named in [meters.redis_password_files]",
        ),
        own(
            &["memcached"],
            "memcached",
            "operation",
            "one stats a second: 30 µs",
            "sum of the cmd_* and result counters",
        ),
        own(
            &["java"],
            "jvm",
            "count",
            "nothing",
            "its performance data (collections, classes, safepoints) does not follow work, so it is never used; name a \
             Prometheus counter of the program",
        ),
        own(
            &["node", "nodejs"],
            "io.*, sockets.*, points",
            "kernel work, or turn of its work",
            POINTS_COST,
            "nothing of its own since version 16, which has no static probes: what its connections carry, where a second \
             kind of kernel work confirms that, else places in its code; name a Prometheus counter of the program",
        ),
        own(
            &["python3"],
            "points",
            "turn of its work",
            POINTS_COST,
            "nothing of CPython's own: places in the loop of its interpreter that follow its work, in a program of one \
             process whose interpreter nobody else runs; others publish a counter",
        ),
        own(
            &["(any)"],
            "prometheus:URL#METRIC",
            "count",
            "one scrape a second",
            "a counter of an endpoint that the configuration names",
        ),
    ];
    all.extend(known_points().iter().map(known_point));
    all.push(own(
        &["(any)"],
        "io.*, sockets.*, switches.voluntary",
        "kernel work",
        "nothing",
        "used when two kinds of it keep a constant ratio to each other",
    ));
    all.push(own(
        &["(any)"],
        "points",
        "turn of its work",
        POINTS_COST,
        "places in its own code that follow its work, looked for when nothing else will do: compiled programs, Go, \
         interpreters; and code that a compiler makes while it runs (Java, Node, .NET), where its units are no more \
         than some 10,000 a second",
    ));
    all
}

fn known_point(point: &KnownPoint) -> KnownMeter {
    let name = point.programs.first().copied().unwrap_or_default();
    let meter = match point.place {
        Place::Function(symbol) => format!("uprobe:{name}:{symbol}"),
        Place::FunctionContaining(text) => format!("uprobe:{name}:*{text}*"),
        Place::StaticProbe(provider, probe) => format!("usdt:{name}:{provider}:{probe}"),
    };
    own(point.programs, &meter, point.unit, PROBE_COST, point.remark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_function_and_every_kind_is_in_the_table() {
        let table = known_meters();
        for point in known_points() {
            assert!(
                table
                    .iter()
                    .any(|m| m.programs == point.programs && m.remark == point.remark),
                "{point:?}"
            );
        }
        for m in &table {
            assert!(
                !m.programs.is_empty() && !m.unit.is_empty() && m.remark.len() > 15,
                "{m:?}"
            );
        }
        // Of programs that many run, also where they tell nothing and have no function that is known.
        for program in ["python3", "node"] {
            assert!(
                table
                    .iter()
                    .any(|m| m.programs.iter().any(|p| p == program) && m.remark.contains("nothing of")),
                "{program}"
            );
        }
        let mut names: Vec<(&str, &[String])> = table
            .iter()
            .map(|m| (m.meter.as_str(), m.programs.as_slice()))
            .collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "nothing stands there twice");
    }
}
