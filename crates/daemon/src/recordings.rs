//! Recordings of the mind: made by `homeostat record` and `homeostat run --record`, replayed anywhere.

pub use homeostat_runtime::recording::{Difference, EndReason, Ending, LIMIT_DEFAULT, Replay};
pub use homeostat_runtime::{Recorder, RecordingError};

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Replays a recording with the strategies of this program. Touches nothing but the file.
///
/// # Errors
/// The file cannot be read, is no recording, or is damaged in the middle.
pub fn replay(path: &Path) -> Result<Replay, RecordingError> {
    let file = File::open(path).map_err(RecordingError::Read)?;
    homeostat_runtime::recording::replay(BufReader::new(file), homeostat_strategies::all())
}
