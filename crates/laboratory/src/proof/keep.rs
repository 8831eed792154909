//! Finished cells in files, so that an interrupted run goes on where it ended.

use super::{Cell, Options, ProofError, Rules, Run};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A cell with everything that its runs depend on.
#[derive(Serialize, Deserialize)]
struct Kept {
    cell: Cell,
    seed: u64,
    rules: Rules,
    rows: usize,
    runs: Vec<Run>,
}

/// The runs of a finished cell; `None` if there is no file.
pub(super) fn read(
    file: &Path,
    cell: &Cell,
    options: &Options,
    rows: usize,
) -> Result<Option<Vec<Run>>, ProofError> {
    let stale = |why: String| ProofError::Stale {
        path: file.to_owned(),
        why,
    };
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(ProofError::Read {
                path: file.to_owned(),
                source,
            });
        }
    };
    let kept: Kept = serde_json::from_str(&text).map_err(|e| stale(e.to_string()))?;
    // Compared as text: numbers may lose their last digit in the file.
    let same = |a: &dyn Fn() -> Result<String, serde_json::Error>, b: Result<String, serde_json::Error>| matches!((a(), b), (Ok(a), Ok(b)) if a == b);
    let is_same = kept.seed == options.seed
        && kept.rows == rows
        && same(&|| serde_json::to_string(&kept.cell), serde_json::to_string(cell))
        && same(
            &|| serde_json::to_string(&kept.rules),
            serde_json::to_string(&options.rules),
        );
    if !is_same || kept.runs.len() as u64 != cell.runs {
        return Err(stale("seed, number of runs, record or procedure differ".into()));
    }
    Ok(Some(kept.runs))
}

/// Writes a finished cell: first beside its place, so that an interruption leaves no half file.
pub(super) fn write(
    file: &Path,
    cell: &Cell,
    options: &Options,
    rows: usize,
    runs: &[Run],
) -> Result<(), ProofError> {
    let failed = |source| ProofError::Write {
        path: file.to_owned(),
        source,
    };
    let kept = Kept {
        cell: cell.clone(),
        seed: options.seed,
        rules: options.rules.clone(),
        rows,
        runs: runs.to_vec(),
    };
    let text = serde_json::to_string(&kept).map_err(|e| failed(e.into()))?;
    if let Some(directory) = file.parent() {
        std::fs::create_dir_all(directory).map_err(failed)?;
    }
    let unfinished = file.with_extension("new");
    std::fs::write(&unfinished, text).map_err(failed)?;
    std::fs::rename(&unfinished, file).map_err(failed)
}
