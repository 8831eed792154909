//! Configuration of meters.

use homeostat_model::{MeterId, Workload};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Default share of a program's CPU time that counting may cost.
pub const PROBE_COST_MAX: f64 = 0.005;

/// Whether probe sites are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PointsWish {
    /// While no untrusted user has a process (docs/security.md).
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

/// A meter that a person names: its id, optionally in a table with its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredMeter {
    /// Its id.
    pub meter: String,
    /// The unit of one count, if configured.
    pub unit: Option<String>,
}

impl From<&str> for ConfiguredMeter {
    fn from(meter: &str) -> Self {
        Self {
            meter: meter.to_owned(),
            unit: None,
        }
    }
}

impl Serialize for ConfiguredMeter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(unit) = &self.unit else {
            return serializer.serialize_str(&self.meter);
        };
        let mut table = serializer.serialize_struct("ConfiguredMeter", 2)?;
        table.serialize_field("meter", &self.meter)?;
        table.serialize_field("unit", unit)?;
        table.end()
    }
}

impl<'de> Deserialize<'de> for ConfiguredMeter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            meter: String,
            unit: Option<String>,
        }
        struct TextOrTable;
        impl<'de> Visitor<'de> for TextOrTable {
            type Value = ConfiguredMeter;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a meter, or a table of `meter` and `unit`")
            }
            fn visit_str<E: serde::de::Error>(self, meter: &str) -> Result<ConfiguredMeter, E> {
                Ok(ConfiguredMeter::from(meter))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ConfiguredMeter, A::Error> {
                let Table { meter, unit } = Table::deserialize(MapAccessDeserializer::new(map))?;
                Ok(ConfiguredMeter { meter, unit })
            }
        }
        deserializer.deserialize_any(TextOrTable)
    }
}

/// Settings of the meters. Workloads are named by their id, by their program, or by a pattern with `*` and `?`
/// over either.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeterSettings {
    /// Further meters by workload: `uprobe:BINARY:SYMBOL`, `usdt:BINARY:PROVIDER:NAME`,
    /// `prometheus:http://ADDRESS:PORT/PATH#METRIC{LABEL="VALUE"}`. On the left stands a workload's id or its program, as `homeostat status`
    /// and `homeostat meter list` show them; `*` is any text, `?` one character. BINARY is the name of the program or of a library that it
    /// has loaded, or the whole path of either. A library is named by the file that is mapped (`/proc/PID/maps`), a link to it by its
    /// whole path. What a person names may be counted while others run the same file, and what one count is that person knows best:
    /// `{ meter = "uprobe:shop:handle_order", unit = "order" }` says it, in 1 to 40 characters, and so it is called wherever the meter is
    /// shown. Without a unit it is called what homeostat knows of the function, else a hit, of a Prometheus metric a count. Two
    /// units of one meter are an error where one of their patterns fits the other; where both fit a workload otherwise the first counts. What a count costs cannot be configured: homeostat measures it.
    pub configured: BTreeMap<String, Vec<ConfiguredMeter>>,
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
    /// Run the memory canary during trials and probes: a process that measures how fast the machine's memory is, so that noise of
    /// the memory can be taken out. It needs 67 MiB of memory and about 0.8 % of a CPU, and is off while memory is short.
    pub canary: bool,
}

impl Default for MeterSettings {
    fn default() -> Self {
        Self {
            configured: BTreeMap::new(),
            redis_password_files: BTreeMap::new(),
            progress_directory: PathBuf::from(homeostat_progress::layout::DIRECTORY),
            breakpoints: true,
            progress_points: PointsWish::Auto,
            probe_cost_max: PROBE_COST_MAX,
            canary: true,
        }
    }
}

impl MeterSettings {
    /// Errors in the values, as `name = value: rule`.
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

    /// Pairs of entries, each with its pattern, that give two units to one meter and may apply to one workload: one
    /// pattern matches the other. (If other patterns overlap at some workload, the first counts.)
    pub fn contradictions(&self) -> Vec<[(&str, &ConfiguredMeter); 2]> {
        let mut said: BTreeMap<&str, Vec<(&str, &ConfiguredMeter)>> = BTreeMap::new();
        let mut found = Vec::new();
        for (pattern, entries) in &self.configured {
            for entry in entries.iter().filter(|entry| entry.unit.is_some()) {
                let before = said.entry(entry.meter.as_str()).or_default();
                let other = before
                    .iter()
                    .find(|(other, earlier)| earlier.unit != entry.unit && meet(other, pattern));
                if let Some(&other) = other {
                    found.push([other, (pattern.as_str(), entry)]);
                }
                before.push((pattern.as_str(), entry));
            }
        }
        found
    }

    /// Meters configured for a workload, without repetition, in configuration order. The first unit counts.
    pub fn configured_for<'a>(&'a self, workload: &Workload) -> Vec<&'a ConfiguredMeter> {
        let mut found: Vec<&ConfiguredMeter> = Vec::new();
        for entry in self
            .configured
            .iter()
            .filter(|(name, _)| names(name, workload))
            .flat_map(|(_, entries)| entries)
        {
            match found.iter().position(|earlier| earlier.meter == entry.meter) {
                None => found.push(entry),
                Some(at) if found[at].unit.is_none() => found[at] = entry,
                Some(_) => {}
            }
        }
        found
    }

    /// Whether a person named that meter for the workload.
    pub fn is_configured(&self, workload: &Workload, id: &MeterId) -> bool {
        self.configured_for(workload)
            .iter()
            .any(|entry| entry.meter == id.as_str())
    }

    /// Password file for a workload. An exact name goes before a pattern.
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

/// Whether one of two patterns matches the other, so that both match some name.
fn meet(a: &str, b: &str) -> bool {
    matches(a.as_bytes(), b.as_bytes()) || matches(b.as_bytes(), a.as_bytes())
}

/// Whether a text matches a pattern of `*` (any text) and `?` (one byte). Linear in the text for each star.
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
    use super::*;
    use crate::testing::workload;

    fn entry(meter: &str, unit: Option<&str>) -> ConfiguredMeter {
        ConfiguredMeter {
            meter: meter.to_owned(),
            unit: unit.map(str::to_owned),
        }
    }

    /// A meter, and what its count is said to be.
    type Said<'a> = (&'a str, Option<&'a str>);

    fn settings(configured: &[(&str, &[Said<'_>])]) -> MeterSettings {
        let mut settings = MeterSettings::default();
        for (pattern, entries) in configured {
            let entries = entries.iter().map(|(meter, unit)| entry(meter, *unit)).collect();
            settings.configured.insert((*pattern).to_owned(), entries);
        }
        settings
    }

    #[test]
    fn a_meter_is_text_or_a_table_and_stays_what_it_was() {
        for (text, expected) in [
            (r#""uprobe:shop:f""#, entry("uprobe:shop:f", None)),
            (
                r#"{"meter":"uprobe:shop:f","unit":"order"}"#,
                entry("uprobe:shop:f", Some("order")),
            ),
        ] {
            let read: ConfiguredMeter = serde_json::from_str(text).unwrap();
            assert_eq!(read, expected);
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
        for (text, why) in [
            ("5", "a meter, or a table of `meter` and `unit`"),
            ("[]", "a meter, or a table of `meter` and `unit`"),
            (r#"{"unit":"order"}"#, "missing field `meter`"),
            (r#"{"meter":"m","unit":5}"#, "expected a string"),
            (r#"{"meter":"m","cost":5}"#, "unknown field `cost`"),
        ] {
            let e = serde_json::from_str::<ConfiguredMeter>(text).unwrap_err();
            assert!(e.to_string().contains(why), "{text}: {e}");
        }
    }

    #[test]
    fn meters_of_all_patterns_that_fit_are_there_once_with_the_unit_that_one_of_them_says() {
        let settings = settings(&[
            ("other", &[("c", Some("page"))]),
            ("shop", &[("a", None), ("b", None)]),
            ("shop*", &[("b", Some("order")), ("a", None), ("d", Some("call"))]),
        ]);
        let shop = workload("shop", vec![]);
        let found: Vec<(&str, Option<&str>)> = settings
            .configured_for(&shop)
            .iter()
            .map(|entry| (entry.meter.as_str(), entry.unit.as_deref()))
            .collect();
        assert_eq!(found, [("a", None), ("b", Some("order")), ("d", Some("call"))]);
        assert!(settings.is_configured(&shop, &MeterId::from("d")));
        assert!(!settings.is_configured(&shop, &MeterId::from("c")));
    }

    #[test]
    fn two_units_contradict_each_other_where_they_may_be_said_of_one_workload() {
        let (order, page) = (("m", Some("order")), ("m", Some("page")));
        for (first, second, contradict) in [
            (("shop", order), ("shop*", page), true),
            (("shop*", order), ("shop.service", page), true),
            (("shop", order), ("shop*", order), false),
            (("shop", order), ("shop*", ("m", None)), false),
            (("shop", order), ("shop*", ("n", Some("page"))), false),
            // One program may do other work in each of two services.
            (("work@a.service", order), ("work@b.service", page), false),
        ] {
            let settings = settings(&[(first.0, &[first.1]), (second.0, &[second.1])]);
            let expected = if contradict {
                vec![[
                    (first.0, &settings.configured[first.0][0]),
                    (second.0, &settings.configured[second.0][0]),
                ]]
            } else {
                vec![]
            };
            assert_eq!(settings.contradictions(), expected);
        }
        assert_eq!(settings(&[("shop", &[order, page])]).contradictions().len(), 1);
        assert!(settings(&[("shop", &[order, order])]).contradictions().is_empty());
    }

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
