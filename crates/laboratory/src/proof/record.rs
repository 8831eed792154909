//! Records of real noise: work, CPU time and length of each row of an undisturbed workload.

use super::ProofError;
use homeostat_statistics::robust::{ln, median};
use std::path::{Path, PathBuf};

/// The records that ship with the program: name and text.
const BUILT_IN: [(&str, &str); 6] = [
    ("noisy1", include_str!("../../../../fixtures/noise/noisy1.csv")),
    ("noisy2", include_str!("../../../../fixtures/noise/noisy2.csv")),
    ("jvm", include_str!("../../../../fixtures/traces/jvm.csv")),
    ("latency", include_str!("../../../../fixtures/traces/latency.csv")),
    (
        "postgresql",
        include_str!("../../../../fixtures/traces/postgresql.csv"),
    ),
    ("redis", include_str!("../../../../fixtures/traces/redis.csv")),
];
/// A record must be at least this long (seconds): the history and a few blocks.
const LENGTH_MIN_S: f64 = 300.0;
/// Rows are between this short and this long (seconds).
const ROW_S: std::ops::RangeInclusive<f64> = 0.05..=5.0;
/// Largest file that is read (bytes).
const SIZE_MAX: u64 = 64 << 20;
/// Row lengths are rounded to this (seconds).
const ROW_STEP_S: f64 = 0.05;

/// What work is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// CPU seconds of the workload.
    Cpu,
    /// Seconds by the clock.
    Wall,
}

/// One record.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Name in tables: the file's name without its extension.
    pub name: String,
    /// Usual length of a row (seconds).
    pub row_s: f64,
    /// (length in seconds, work, CPU seconds) of each row.
    rows: Vec<(f64, f64, f64)>,
    /// (loads, their CPU seconds) of the memory canary in each row; empty without one.
    canary: Vec<(f64, f64)>,
}

impl Record {
    /// The records that ship with the program.
    ///
    /// # Errors
    /// [`ProofError::Row`] if one of them is damaged.
    pub fn built_in() -> Result<Vec<Self>, ProofError> {
        BUILT_IN
            .iter()
            .map(|(name, text)| Self::parse(Path::new(name), text))
            .collect()
    }

    /// Reads a file with the columns `t,dt,work,cpu` or `t_s,interval_s,work,cpu_s`, and any others. The columns `mem_n` and
    /// `mem_cpu` are the loads of a memory canary and their CPU seconds.
    ///
    /// # Errors
    /// [`ProofError`] names the file, the line and a remedy.
    pub fn read(path: &Path) -> Result<Self, ProofError> {
        let failed = |source| ProofError::Read {
            path: path.to_owned(),
            source,
        };
        let size = std::fs::metadata(path).map_err(failed)?.len();
        if size > SIZE_MAX {
            return Err(wrong(
                path,
                1,
                format!("the file has {size} bytes; at most {SIZE_MAX} are read. Cut it"),
            ));
        }
        Self::parse(path, &std::fs::read_to_string(path).map_err(failed)?)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ProofError> {
        let mut lines = text.lines().enumerate();
        let header: Vec<&str> = lines
            .next()
            .map_or("", |(_, line)| line)
            .split(',')
            .map(str::trim)
            .collect();
        let column = |names: [&str; 2]| {
            header.iter().position(|c| names.contains(c)).ok_or_else(|| {
                wrong(
                    path,
                    1,
                    format!(
                        "no column {} or {}. Name it in the first line",
                        names[0], names[1]
                    ),
                )
            })
        };
        let columns = [
            column(["dt", "interval_s"])?,
            column(["work", "work"])?,
            column(["cpu", "cpu_s"])?,
        ];
        let place = |name: &str| header.iter().position(|c| *c == name);
        let of_canary = place("mem_n").zip(place("mem_cpu"));
        let (mut rows, mut canary) = (Vec::new(), Vec::new());
        for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let damaged = |what| wrong(path, index + 1, what);
            let [length, work, cpu] = row(line, header.len(), columns).map_err(damaged)?;
            if length <= 0.0 {
                return Err(damaged(
                    "the row has no length. Correct or delete the line".into(),
                ));
            }
            rows.push((length, work, cpu));
            if let Some((loads, loading)) = of_canary {
                let [loads, loading] = row(line, header.len(), [loads, loading]).map_err(damaged)?;
                canary.push((loads, loading));
            }
        }
        let lengths: Vec<f64> = rows.iter().map(|r| r.0).collect();
        let row_s = (median(&lengths) / ROW_STEP_S).round() * ROW_STEP_S;
        let total: f64 = lengths.iter().sum();
        if !ROW_S.contains(&row_s) || total < LENGTH_MIN_S {
            let what = format!(
                "{} rows of {row_s:.2} s. Record at least {LENGTH_MIN_S:.0} s in rows of {} to {} s",
                rows.len(),
                ROW_S.start(),
                ROW_S.end()
            );
            return Err(wrong(path, rows.len() + 1, what));
        }
        let name = path
            .file_stem()
            .unwrap_or(path.as_os_str())
            .to_string_lossy()
            .into_owned();
        Ok(Self {
            name,
            row_s,
            rows,
            canary,
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The record in one measure, as a ring.
    pub fn ring(&self, objective: Objective) -> Ring {
        let rows = self.rows.iter().map(|(length, work, cpu)| match objective {
            Objective::Cpu => (*work, *cpu),
            Objective::Wall => (*work, *length),
        });
        Ring::new(rows.collect(), &self.canary, self.row_s)
    }
}

fn wrong(path: &Path, line: usize, what: String) -> ProofError {
    ProofError::Row {
        path: PathBuf::from(path),
        line,
        what,
    }
}

/// The numbers in these columns.
fn row<const N: usize>(line: &str, fields: usize, columns: [usize; N]) -> Result<[f64; N], String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    if cells.len() != fields {
        return Err(format!(
            "{} columns instead of {fields}. Delete the line if it was cut off",
            cells.len()
        ));
    }
    let mut numbers = [0.0; N];
    for (number, column) in numbers.iter_mut().zip(columns) {
        let text = cells.get(column).copied().unwrap_or_default();
        *number = text
            .parse()
            .ok()
            .filter(|n: &f64| n.is_finite() && *n >= 0.0)
            .ok_or_else(|| format!("\"{text}\" is not a number of 0 or more. Correct or delete the line"))?;
    }
    Ok(numbers)
}

/// Work and denominator of each row, and prefix sums over two rounds: any stretch costs one subtraction.
#[derive(Clone, Debug)]
pub struct Ring {
    /// Length of a row (seconds).
    pub row_s: f64,
    rows: Vec<(f64, f64)>,
    sums: Vec<(f64, f64)>,
    /// The same sums of the canary's loads and their CPU seconds; zeros without a canary.
    canary: Vec<(f64, f64)>,
}

/// Prefix sums over two rounds.
fn sums(rows: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0, 0.0)];
    let mut total = (0.0, 0.0);
    for (a, b) in rows.iter().chain(rows) {
        total = (total.0 + a, total.1 + b);
        sums.push(total);
    }
    sums
}

impl Ring {
    fn new(rows: Vec<(f64, f64)>, canary: &[(f64, f64)], row_s: f64) -> Self {
        Self {
            row_s,
            sums: sums(&rows),
            canary: sums(canary),
            rows,
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Rows for a length in seconds, rounded up to whole rows.
    pub fn rows_for(&self, seconds: f64) -> usize {
        (seconds / self.row_s - 1e-6).ceil().max(0.0) as usize
    }

    /// Work and denominator of `n` rows from row `at`; at most one round.
    pub fn sum(&self, at: usize, n: usize) -> (f64, f64) {
        self.between(&self.sums, at, n)
    }

    /// The canary's speed over `n` rows from row `at`: the logarithm of loads per CPU second.
    pub fn canary(&self, at: usize, n: usize) -> Option<f64> {
        let (loads, loading) = self.between(&self.canary, at, n);
        (loads > 0.0 && loading > 0.0).then(|| ln(loads / loading))
    }

    fn between(&self, sums: &[(f64, f64)], at: usize, n: usize) -> (f64, f64) {
        let from = at % self.len().max(1);
        let (Some(a), Some(b)) = (sums.get(from), sums.get(from + n.min(self.len()))) else {
            return (0.0, 0.0);
        };
        (b.0 - a.0, b.1 - a.1)
    }

    /// Work and denominator of one row.
    pub fn row(&self, at: usize) -> (f64, f64) {
        self.rows.get(at % self.len().max(1)).copied().unwrap_or_default()
    }

    /// The rows before `at` in intervals of a second, oldest first: what a daemon has before a trial.
    pub fn history(&self, at: usize, seconds: f64) -> Vec<(f64, f64)> {
        let each = self.rows_for(1.0).max(1);
        let count = (seconds / (each as f64 * self.row_s)) as usize;
        let count = count.min(self.len() / each);
        let from = at + self.len() - count * each;
        (0..count).map(|i| self.sum(from + i * each, each)).collect()
    }
}

/// The score of a stretch: ln(work / denominator). −∞ without work.
pub(super) fn score((work, denominator): (f64, f64)) -> f64 {
    if denominator > 0.0 {
        ln(work.max(0.0) / denominator)
    } else {
        f64::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_are_read() {
        let records = Record::built_in().unwrap();
        let seen: Vec<(&str, f64, usize)> = records
            .iter()
            .map(|r| (r.name.as_str(), r.row_s, r.len()))
            .collect();
        assert_eq!(
            seen,
            [
                ("noisy1", 0.25, 1800),
                ("noisy2", 0.25, 1800),
                ("jvm", 1.0, 3600),
                ("latency", 1.0, 3600),
                ("postgresql", 1.0, 3599),
                ("redis", 1.0, 3600)
            ]
        );
    }

    #[test]
    fn a_bad_file_is_refused_with_its_line_and_a_remedy() {
        let good = "dt,work,cpu\n".to_owned() + &"1.0,5,0.5\n".repeat(400);
        assert_eq!(
            Record::parse(Path::new("x/good.csv"), &good).unwrap().name,
            "good"
        );
        for (text, part) in [
            (String::new(), "line 1: no column dt or interval_s"),
            (
                good.replacen("1.0,5", "1.0,-5", 1),
                "line 2: \"-5\" is not a number",
            ),
            (good.clone() + "1.0,5", "line 402: 2 columns instead of 3"),
            (good.clone() + "0,5,1", "line 402: the row has no length"),
            ("dt,work,cpu\n1.0,5,0.5\n".into(), "line 2: 1 rows of 1.00 s"),
        ] {
            let error = Record::parse(Path::new("bad.csv"), &text)
                .unwrap_err()
                .to_string();
            assert!(error.contains(part) && error.contains("bad.csv"), "{error}");
        }
    }

    #[test]
    fn stretches_and_the_history_go_round_the_ring() {
        let rows: Vec<(f64, f64)> = (0..8).map(|i| (f64::from(i), 0.25)).collect();
        let ring = Ring::new(rows.clone(), &rows, 0.25);
        assert_eq!(ring.sum(6, 4), (6.0 + 7.0 + 0.0 + 1.0, 1.0));
        assert_eq!(ring.canary(6, 4), Some(ln(14.0)));
        assert_eq!(Ring::new(rows, &[], 0.25).canary(6, 4), None);
        assert_eq!(
            (ring.rows_for(0.5), ring.rows_for(0.6), ring.rows_for(0.0)),
            (2, 3, 0)
        );
        // Two seconds before row 2: rows 2 to 5 of the round before, then 6, 7, 0 and 1.
        assert_eq!(ring.history(2, 2.0), [(14.0, 1.0), (14.0, 1.0)]);
        assert_eq!(score((0.0, 1.0)), f64::NEG_INFINITY);
    }
}
