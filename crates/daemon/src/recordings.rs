//! Engine recordings, made by `homeostat record` and `homeostat run --record` and replayed anywhere.

pub use homeostat_runtime::recording::{Difference, EndReason, Ending, LIMIT_DEFAULT, Replay};
pub use homeostat_runtime::{Recorder, RecordingError};

use crate::api::{Status, StoryLine};
use homeostat_engine::Command;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Replays a recording with this program's strategies. Touches only the file.
///
/// # Errors
/// The file cannot be read, is no recording, or is damaged in the middle.
pub fn replay(path: &Path) -> Result<Replay, RecordingError> {
    let file = File::open(path).map_err(RecordingError::Read)?;
    homeostat_runtime::recording::replay(BufReader::new(file), homeostat_strategies::all())
}

/// Replays a recording as the daemon's view: the state every `every_s` seconds, and the lines since.
///
/// # Errors
/// As [`replay`].
pub fn watch(
    path: &Path,
    every_s: u64,
    mut each: impl FnMut(Status, Vec<StoryLine>),
) -> Result<Ending, RecordingError> {
    let file = File::open(path).map_err(RecordingError::Read)?;
    let mut lines = Vec::new();
    let mut due = 0;
    homeostat_runtime::recording::watch(
        BufReader::new(file),
        homeostat_strategies::all(),
        |unix, engine, commands| {
            for command in commands {
                if let Command::Tell(story) = command {
                    lines.push(StoryLine::new(unix, story));
                }
            }
            if unix >= due {
                due = unix.saturating_add(every_s);
                each(engine.view(), std::mem::take(&mut lines));
            }
        },
    )
}
