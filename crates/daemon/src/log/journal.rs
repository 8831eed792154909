//! Structured entries for systemd's journal, over its socket (systemd, "Native Journal Protocol"). Entries on standard
//! error are text with a priority. Entries on the socket have fields: workload, stage, and a message id per stage. So
//! `journalctl MESSAGE_ID=…` finds every verdict of a year.

use crate::api::StoryLine;
use crate::printable;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

const SOCKET: &str = "/run/systemd/journal/socket";

/// Stage and message id. An id is never changed or used again: people's alerts name it.
pub const MESSAGE_IDS: [(&str, &str); 7] = [
    ("ignored", "f438e5f77a7445b5992789a0ce73ec15"),
    ("considered", "c83be05c5e724f6ea0a390fba56517ae"),
    ("observed", "d7fc9af6d29b46e289a4d9112ddb828c"),
    ("proposed", "0473cae2c2484c249c29c5cc2d983f24"),
    ("trying", "101453f6873647aeae0c74632bddcc3c"),
    ("improved", "313531ab757247afb16adc83e7a9aff1"),
    ("declined", "0e922adf64ff4d1db88abba7bf65db89"),
];

/// The journal's socket.
pub struct JournalSocket(UnixDatagram);

impl JournalSocket {
    /// The journal, if standard error goes there: `JOURNAL_STREAM` (sd-daemon) names its device and inode.
    pub fn of_standard_error() -> Option<Self> {
        let named = std::env::var("JOURNAL_STREAM").ok()?;
        let stat = rustix::fs::fstat(io::stderr().as_fd()).ok()?;
        (named == format!("{}:{}", stat.st_dev, stat.st_ino))
            .then(|| Self::connect(Path::new(SOCKET)).ok())
            .flatten()
    }

    /// A journal that listens there.
    ///
    /// # Errors
    /// Nobody listens.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        // A journal that hangs must not hold up the loop.
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Sends one entry.
    ///
    /// # Errors
    /// The journal is gone, busy, or refuses an entry of this length.
    pub fn send(&self, line: &StoryLine) -> io::Result<()> {
        self.0.send(&entry(line)).map(|_| ())
    }
}

/// The entry: `NAME=value` lines. A value with a line break has its length in front instead.
fn entry(line: &StoryLine) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    let mut field = |name: &str, value: &str| {
        out.extend_from_slice(name.as_bytes());
        if value.contains('\n') {
            out.push(b'\n');
            out.extend_from_slice(&(value.len() as u64).to_le_bytes());
        } else {
            out.push(b'=');
        }
        out.extend_from_slice(value.as_bytes());
        out.push(b'\n');
    };
    field("MESSAGE", &printable::for_log(&line.sentence()));
    field("PRIORITY", if line.warning { "4" } else { "6" });
    field("SYSLOG_IDENTIFIER", "homeostat");
    if let Some((_, id)) = MESSAGE_IDS.iter().find(|(stage, _)| *stage == line.stage) {
        field("MESSAGE_ID", id);
    }
    field("HOMEOSTAT_STAGE", &line.stage);
    if let Some(workload) = &line.workload {
        field("HOMEOSTAT_WORKLOAD", &printable::for_log(workload));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_engine::Stage;
    use std::collections::BTreeSet;

    fn line(workload: Option<&str>, text: &str) -> StoryLine {
        StoryLine {
            schema: 1,
            at_unix: 1_700_000_000,
            workload: workload.map(Into::into),
            stage: "declined".into(),
            text: text.into(),
            warning: true,
        }
    }

    #[test]
    fn every_stage_has_an_id_of_its_own() {
        let stages = [
            Stage::Ignored,
            Stage::Considered,
            Stage::Observed,
            Stage::Proposed,
            Stage::Trying,
            Stage::Improved,
            Stage::Declined,
        ];
        let named: Vec<String> = MESSAGE_IDS.iter().map(|(s, _)| (*s).to_owned()).collect();
        assert_eq!(named, stages.map(|s| s.to_string()));
        let ids: BTreeSet<_> = MESSAGE_IDS.iter().map(|(_, id)| id).collect();
        assert_eq!(ids.len(), MESSAGE_IDS.len());
        assert!(
            ids.iter()
                .all(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()))
        );
    }

    #[test]
    fn an_entry_arrives_with_its_fields() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let journal = UnixDatagram::bind(&path).unwrap();
        let socket = JournalSocket::connect(&path).unwrap();
        socket.send(&line(Some("redis"), "no gain")).unwrap();
        let mut buffer = [0; 1024];
        let length = journal.recv(&mut buffer).unwrap();
        assert_eq!(
            std::str::from_utf8(&buffer[..length]).unwrap(),
            "MESSAGE=redis declined: no gain\nPRIORITY=4\nSYSLOG_IDENTIFIER=homeostat\n\
             MESSAGE_ID=0e922adf64ff4d1db88abba7bf65db89\nHOMEOSTAT_STAGE=declined\nHOMEOSTAT_WORKLOAD=redis\n"
        );
        drop(journal);
        assert!(socket.send(&line(None, "x")).is_err());
    }

    #[test]
    fn no_name_and_no_text_adds_a_field() {
        let made = entry(&line(Some("a\nMESSAGE_ID=x"), "b\nPRIORITY=0\n  hint: c"));
        let text = String::from_utf8_lossy(&made);
        // The line break of ours is inside a value whose length is given; no line of the entry is of their making.
        assert!(text.starts_with("MESSAGE\n"), "{text}");
        assert!(text.contains("\nHOMEOSTAT_WORKLOAD=a\\nMESSAGE_ID=x\n"), "{text}");
        assert_eq!(
            text.lines().filter(|l| l.starts_with("PRIORITY=")).count(),
            1,
            "{text}"
        );
        assert_eq!(
            text.lines().filter(|l| l.starts_with("MESSAGE_ID=")).count(),
            1,
            "{text}"
        );
    }
}
