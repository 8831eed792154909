//! What a person may configure about meters.

use homeostat_model::Workload;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Whether progress points are looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PointsWish {
    /// As long as nobody is here who is not trusted with it (docs/security.md).
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Serialize for PointsWish {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Always => serializer.serialize_bool(true),
            Self::Never => serializer.serialize_bool(false),
        }
    }
}

impl<'de> Deserialize<'de> for PointsWish {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Wish;
        impl Visitor<'_> for Wish {
            type Value = PointsWish;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("\"auto\", true or false")
            }
            fn visit_bool<E: serde::de::Error>(self, wish: bool) -> Result<PointsWish, E> {
                Ok(if wish {
                    PointsWish::Always
                } else {
                    PointsWish::Never
                })
            }
            fn visit_str<E: serde::de::Error>(self, wish: &str) -> Result<PointsWish, E> {
                match wish {
                    "auto" => Ok(PointsWish::Auto),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(wish), &self)),
                }
            }
        }
        deserializer.deserialize_any(Wish)
    }
}

/// Settings of the meters. Workloads are named by their id, by their program, or by a pattern with `*` and `?`
/// over either.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeterSettings {
    /// Further meters by workload: `uprobe:BINARY:SYMBOL`, `usdt:BINARY:PROVIDER:NAME`,
    /// `prometheus:http://ADDRESS:PORT/PATH#METRIC{LABEL="VALUE"}`. On the left stands a workload's id or its program, as `homeostat list`
    /// and `homeostat meter list` show them; `*` is any text, `?` one character. BINARY is the name of the program or of a library that it
    /// has loaded, or the whole path of either. What a person names may be counted while others run the same file, and what one count
    /// is only that person knows: it is called a hit where homeostat does not know the function either. A library is named by the file that is
    /// mapped (`/proc/PID/maps`), a link to it by its whole path.
    pub configured: BTreeMap<String, Vec<String>>,
    /// File with the password of a Redis server, by workload: one line, `PASSWORD` or `USER PASSWORD`. The file must
    /// belong to the user that the server runs as (`chown redis`): a process chooses its own name, and only one of that
    /// user is told the password.
    pub redis_password_files: BTreeMap<String, PathBuf>,
    /// Directory of the progress files, as the programs see it.
    pub progress_directory: PathBuf,
    /// Count through breakpoints (docs/meters.md): functions and static probes that are known or configured, and progress points. `false`: none
    /// is put into any program, in no mode and by no command; what programs and the kernel count themselves is left, and a program
    /// without that is not touched.
    pub breakpoints: bool,
    /// Look for progress points in the code of programs that tell nothing (docs/meters.md): some places are counted through
    /// breakpoints that the kernel keeps, at a cost of at most 0.5 % of the program's CPU time; the search takes 15 to 40 s and up to 1.2 s
    /// of it. `"auto"`: as long as nobody is here who may not become root (docs/security.md). `true`: always. `false`: such
    /// programs are not touched (those with functions that are known are counted all the same, see `breakpoints`); `homeostat meter test --class points` looks all the same, when a person asks.
    pub progress_points: PointsWish,
    /// Share of a program's CPU time that counting through breakpoints may cost it (0.0001 to 1, at most `policy.meter_cost_max`): functions, static probes and
    /// progress points that would cost more are counted in turns, for a part of each second, and the rest is estimated
    /// (docs/meters.md).
    pub probe_cost_max: f64,
}

impl Default for MeterSettings {
    fn default() -> Self {
        Self {
            configured: BTreeMap::new(),
            redis_password_files: BTreeMap::new(),
            progress_directory: PathBuf::from(homeostat_progress::layout::DIRECTORY),
            breakpoints: true,
            progress_points: PointsWish::Auto,
            probe_cost_max: super::turns::COST_MAX,
        }
    }
}

impl MeterSettings {
    /// What is wrong with the values, as `name = value: rule`.
    pub fn validate(&self) -> Vec<String> {
        if (0.0001..=1.0).contains(&self.probe_cost_max) {
            Vec::new()
        } else {
            vec![format!(
                "probe_cost_max = {}: must be between 0.0001 and 1",
                self.probe_cost_max
            )]
        }
    }

    /// Meters configured for a workload, without repetition, in the order of the configuration.
    pub(super) fn configured_for<'a>(&'a self, workload: &Workload) -> Vec<&'a str> {
        let mut ids: Vec<&str> = Vec::new();
        for id in self
            .configured
            .iter()
            .filter(|(name, _)| names(name, workload))
            .flat_map(|(_, ids)| ids)
        {
            if !ids.contains(&id.as_str()) {
                ids.push(id);
            }
        }
        ids
    }

    /// Password file for a workload; an exact name goes before a pattern.
    pub(super) fn redis_password_file(&self, workload: &Workload) -> Option<&PathBuf> {
        self.redis_password_files.get(workload.id.as_str()).or_else(|| {
            self.redis_password_files
                .iter()
                .find(|(name, _)| names(name, workload))
                .map(|(_, file)| file)
        })
    }
}

fn names(pattern: &str, workload: &Workload) -> bool {
    matches(pattern.as_bytes(), workload.id.as_str().as_bytes())
        || matches(pattern.as_bytes(), workload.program.as_bytes())
}

/// Whether a text fits a pattern of `*` (any text) and `?` (one byte). Linear in the text for each star.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == b'?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        let fits = |p: &str, t: &str| matches(p.as_bytes(), t.as_bytes());
        assert!(fits("redis", "redis") && fits("*", "") && fits("r*s", "redis") && fits("re?is", "redis"));
        assert!(
            fits("*.service", "a.service") && fits("a*b*c", "aXbYbZc") && fits("latency[*", "latency[12]")
        );
        assert!(!fits("redis", "redis2") && !fits("", "a") && !fits("?", "") && !fits("a*b", "aXc"));
    }
}
