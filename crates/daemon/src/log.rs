//! The story on standard error, or in systemd's journal: one entry per event, nothing said twice.

pub mod journal;

use crate::api::StoryLine;
use crate::printable;
use crate::settings::LogFormat;
use journal::JournalSocket;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::Write;

/// How many sentences per workload are remembered in order not to be said again.
const REMEMBERED: usize = 4;
/// Workloads whose sentences are remembered; beyond it memory starts afresh.
const WORKLOADS_MAX: usize = 1024;

/// Drops what was said already.
///
/// About a workload the last few sentences are not repeated, so that one that goes back and forth between two
/// reasons does not fill the log. About the host only the last one is not: paused, resumed and paused again is news.
#[derive(Default)]
pub struct Repetition {
    said: BTreeMap<Option<String>, VecDeque<String>>,
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
}

/// Where lines go.
pub struct Log {
    format: LogFormat,
    /// Standard error goes to systemd's journal, which takes the priority from `<N>` and has its own clock.
    journal: bool,
    /// The same journal by its own socket: entries with fields.
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

    /// The log of this process: where standard error goes to systemd's journal, that is used for what it is. Whoever asks
    /// for JSON gets lines of JSON there, too.
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
            out.push_str(&serde_json::to_string(line).unwrap_or_default());
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

    /// Writes the line. A log that can not be written is no reason to stop.
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
}
