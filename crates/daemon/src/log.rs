//! The log on standard error or in systemd's journal: one entry per event, without repetitions.

pub mod journal;

use crate::api::StoryLine;
use crate::printable;
use crate::settings::LogFormat;
use journal::JournalSocket;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::Write;

/// Sentences per workload that count as repeated.
const REMEMBERED: usize = 4;
/// Remembered workloads; beyond it memory starts afresh.
const WORKLOADS_MAX: usize = 1024;

/// Logged first lines of one program's short-lived processes in [`CROWD_PERIOD`]: those of two or three processes.
const CROWD_LINES: u32 = 6;
/// … in seconds.
const CROWD_PERIOD: u64 = 3600;
/// Counted programs; beyond it counting starts afresh.
const CROWD_PROGRAMS_MAX: usize = 256;

/// Drops repeated lines.
///
/// For a workload the last few sentences count as repeated, so that alternating reasons do not fill the log. For the
/// host only the last one does: paused, resumed and paused again is news.
#[derive(Default)]
pub struct Repetition {
    said: BTreeMap<Option<String>, VecDeque<String>>,
    crowds: BTreeMap<String, Crowd>,
}

struct Crowd {
    since_unix: u64,
    told: u32,
    kept_back: u32,
}

/// The log's treatment of a line.
#[derive(Clone, Debug, PartialEq)]
pub struct Admission {
    /// To be written before it.
    pub before: Option<StoryLine>,
    /// Whether it is written itself.
    pub written: bool,
}

impl Repetition {
    /// Whether the line is news; remembers it.
    pub fn is_news(&mut self, line: &StoryLine) -> bool {
        if self.said.len() >= WORKLOADS_MAX && !self.said.contains_key(&line.workload) {
            self.said.clear();
        }
        let keep = if line.workload.is_some() { REMEMBERED } else { 1 };
        let said = self.said.entry(line.workload.clone()).or_default();
        let sentence = format!("{}: {}", line.stage, line.text);
        if said.contains(&sentence) {
            return false;
        }
        if said.len() == keep {
            said.pop_front();
        }
        said.push_back(sentence);
        true
    }

    /// Whether the line belongs in the log.
    ///
    /// A build server starts a compiler for every file. Each process above the floors is a workload with two or three
    /// lines (considered, observed, declined): hundreds an hour that nobody can act on. For single processes of one
    /// program only the first lines are logged, then their number. Warnings, units and containers, and every line from
    /// a proposal on are always logged. `status`, `explain` and `history` have every line.
    pub fn admit(&mut self, line: &StoryLine) -> Admission {
        let all = Admission {
            before: None,
            written: true,
        };
        let first_step = matches!(
            line.stage.as_str(),
            "ignored" | "considered" | "observed" | "declined"
        );
        let Some(program) = line.workload.as_deref().and_then(program_of_process) else {
            return all;
        };
        if line.warning || !first_step {
            return all;
        }
        if self.crowds.len() >= CROWD_PROGRAMS_MAX && !self.crowds.contains_key(program) {
            self.crowds.clear();
        }
        let crowd = self.crowds.entry(program.to_owned()).or_insert(Crowd {
            since_unix: line.at_unix,
            told: 0,
            kept_back: 0,
        });
        let mut before = None;
        if line.at_unix.saturating_sub(crowd.since_unix) >= CROWD_PERIOD {
            before = (crowd.kept_back > 0).then(|| StoryLine {
                workload: None,
                text: format!(
                    "{} more lines about first steps of processes of {program} were not written since {} (`homeostat history` has what was tried)",
                    crowd.kept_back,
                    time_of_day(crowd.since_unix)
                ),
                ..line.clone()
            });
            *crowd = Crowd {
                since_unix: line.at_unix,
                told: 0,
                kept_back: 0,
            };
        }
        let written = crowd.told < CROWD_LINES;
        if written {
            crowd.told += 1;
        } else {
            crowd.kept_back = crowd.kept_back.saturating_add(1);
        }
        Admission { before, written }
    }
}

/// The program of a workload that is one process, `cc1plus[4711]`; `None` of others.
fn program_of_process(workload: &str) -> Option<&str> {
    let (program, pid) = workload.strip_suffix(']')?.rsplit_once('[')?;
    (!pid.is_empty() && pid.bytes().all(|c| c.is_ascii_digit())).then_some(program)
}

/// The destination of lines.
pub struct Log {
    format: LogFormat,
    /// Standard error goes to systemd's journal, which reads the priority from `<N>` and has a clock.
    journal: bool,
    /// The same journal's socket, for entries with fields.
    socket: Option<JournalSocket>,
}

impl Log {
    /// A log on standard error.
    pub fn new(format: LogFormat, journal: bool) -> Self {
        Self {
            format,
            journal,
            socket: None,
        }
    }

    /// The log of this process: the format of systemd's journal if standard error goes there, unless JSON is wanted.
    pub fn of_this_process(format: LogFormat) -> Self {
        let mut log = Self::new(format, std::env::var_os("JOURNAL_STREAM").is_some());
        if format == LogFormat::Human {
            log.socket = JournalSocket::of_standard_error();
        }
        log
    }

    /// The line as text.
    pub fn render(&self, line: &StoryLine) -> String {
        let mut out = String::new();
        if self.journal {
            out.push_str(if line.warning { "<4>" } else { "<6>" });
        }
        if self.format == LogFormat::Json {
            out.push_str(&printable::for_json(
                &serde_json::to_string(line).unwrap_or_default(),
            ));
            return out;
        }
        if !self.journal {
            let _ = write!(out, "{} ", time_of_day(line.at_unix));
        }
        if line.warning {
            out.push_str("warning: ");
        }
        out.push_str(&printable::for_log(&line.sentence()));
        out
    }

    /// Writes the line. A failing log does not stop the daemon.
    pub fn write(&self, line: &StoryLine) {
        if self
            .socket
            .as_ref()
            .is_some_and(|journal| journal.send(line).is_ok())
        {
            return;
        }
        let mut text = self.render(line);
        text.push('\n');
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

/// `HH:MM:SSZ`: in UTC, and it says so.
pub fn time_of_day(unix_seconds: u64) -> String {
    let s = unix_seconds % 86_400;
    format!("{:02}:{:02}:{:02}Z", s / 3600, s / 60 % 60, s % 60)
}

/// `2026-11-22 05:31 UTC`.
pub fn date_and_time(unix: u64) -> String {
    // Days to a Gregorian date, years beginning in March (Hinnant, "chrono-compatible low-level date algorithms").
    let days = unix / 86_400 + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02} UTC",
        unix / 3600 % 24,
        unix / 60 % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(workload: Option<&str>, text: &str) -> StoryLine {
        StoryLine {
            schema: 1,
            at_unix: 1_700_000_000,
            workload: workload.map(Into::into),
            stage: "trying".into(),
            text: text.into(),
            warning: false,
        }
    }

    #[test]
    fn nothing_is_said_twice_about_a_workload() {
        let mut repetition = Repetition::default();
        assert!(repetition.is_news(&line(Some("a"), "x")));
        assert!(!repetition.is_news(&line(Some("a"), "x")));
        assert!(repetition.is_news(&line(Some("b"), "x")));
        assert!(repetition.is_news(&line(Some("a"), "y")));
        assert!(!repetition.is_news(&line(Some("a"), "x")));
        for host in ["paused", "resumed", "paused"] {
            assert!(repetition.is_news(&line(None, host)));
        }
        assert!(!repetition.is_news(&line(None, "paused")));
    }

    #[test]
    fn of_many_processes_of_one_program_the_log_tells_the_first_and_what_matters() {
        let mut repetition = Repetition::default();
        let step = |pid: u32, stage: &str, at: u64| StoryLine {
            stage: stage.into(),
            at_unix: at,
            ..line(Some(&format!("cc1plus[{pid}]")), &format!("cc1plus {pid}"))
        };
        let mut written = 0;
        for pid in 0..1000 {
            for stage in ["considered", "declined"] {
                written += u32::from(repetition.admit(&step(pid, stage, 1000)).written);
            }
        }
        assert_eq!(written, CROWD_LINES);
        // What comes to a trial, what is wrong, and others.
        assert!(repetition.admit(&step(7, "proposed", 1000)).written);
        assert!(repetition.admit(&step(7, "trying", 1000)).written);
        let warning = StoryLine {
            warning: true,
            ..step(8, "declined", 1000)
        };
        assert!(repetition.admit(&warning).written);
        for other in ["ld[7]", "redis.service", "odd[x]", "odd[]"] {
            let considered = StoryLine {
                stage: "considered".into(),
                ..line(Some(other), "x")
            };
            assert!(repetition.admit(&considered).written, "{other}");
        }
        // An hour later it is told how many there were, and the first are told again.
        let later = repetition.admit(&step(2000, "considered", 1000 + CROWD_PERIOD));
        assert!(later.written);
        let told = later.before.unwrap();
        assert_eq!(told.workload, None);
        assert!(
            told.text.starts_with("1994 more lines") && told.text.contains("cc1plus"),
            "{}",
            told.text
        );
        assert_eq!(
            repetition
                .admit(&step(2001, "considered", 1000 + CROWD_PERIOD))
                .before,
            None
        );
        for program in 0..3 * CROWD_PROGRAMS_MAX {
            repetition.admit(&StoryLine {
                stage: "considered".into(),
                ..line(Some(&format!("p{program}[1]")), "x")
            });
        }
        assert!(repetition.crowds.len() <= CROWD_PROGRAMS_MAX);
    }

    #[test]
    fn memory_of_what_was_said_is_bounded() {
        let mut repetition = Repetition::default();
        for i in 0..3 * WORKLOADS_MAX {
            repetition.is_news(&line(Some(&i.to_string()), "x"));
            assert!(repetition.said.len() <= WORKLOADS_MAX);
        }
    }

    #[test]
    fn lines_look_right_for_people_for_systemd_and_for_programs() {
        let mut said = line(Some("redis"), "block 3");
        assert_eq!(
            Log::new(LogFormat::Human, false).render(&said),
            "22:13:20Z redis trying: block 3"
        );
        assert_eq!(
            line(Some("redis"), "trying: block 3").sentence(),
            "redis trying: block 3"
        );
        assert_eq!(
            Log::new(LogFormat::Human, true).render(&line(Some("a\x1b[2J\n<2>b[7]"), "c")),
            "<6>a\\u{1b}[2J\\n<2>b[7] trying: c"
        );
        said.warning = true;
        assert_eq!(
            Log::new(LogFormat::Human, true).render(&said),
            "<4>warning: redis trying: block 3"
        );
        let json = Log::new(LogFormat::Json, false).render(&said);
        assert_eq!(serde_json::from_str::<StoryLine>(&json).unwrap(), said);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date_and_time(unix), text);
        }
    }
}
