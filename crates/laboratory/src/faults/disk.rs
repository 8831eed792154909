//! The state directory after a crash, and other damage to files.

use homeostat_statistics::simulation::Random;
use std::io;
use std::path::Path;

/// Makes a private directory, as the journal demands.
pub(crate) fn private_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
}

pub(super) fn copy_directory(from: &Path, to: &Path) -> io::Result<()> {
    private_directory(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        // SQLite's shared-memory index does not survive a crash: the log rebuilds it.
        if entry.file_type()?.is_file() && !name.to_string_lossy().ends_with("-shm") {
            std::fs::copy(entry.path(), to.join(name))?;
        }
    }
    Ok(())
}

/// Tears the last `records` unsynced records: a prefix survives; the rest is zero (allocated), gone or partly wrong.
pub(super) fn tear(path: &Path, records: usize, random: &mut Random) -> io::Result<()> {
    let mut bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let used = bytes.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
    let mut starts: Vec<usize> = vec![0];
    starts.extend(
        bytes[..used]
            .iter()
            .enumerate()
            .filter(|(i, b)| **b == b'\n' && i + 1 < used)
            .map(|(i, _)| i + 1),
    );
    // The first record of a file is synced at its creation.
    let first = starts.len().saturating_sub(records).max(1);
    let Some(from) = starts.get(first).copied() else {
        return Ok(());
    };
    let at = from + (random.next_u64() as usize) % (used - from).max(1);
    match random.next_u64() % 3 {
        0 => bytes[at..used].fill(0),
        1 => bytes.truncate(at),
        _ => {
            for _ in 0..=(random.next_u64() % 8) {
                let i = from + (random.next_u64() as usize) % (used - from).max(1);
                bytes[i] ^= (random.next_u64() % 255) as u8 + 1;
            }
        }
    }
    std::fs::write(path, bytes)
}

pub(super) fn damage(path: &Path, random: &mut Random) -> io::Result<()> {
    let mut bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    damage_bytes(&mut bytes, random);
    std::fs::write(path, bytes)
}

/// Wrong bytes, a torn end, a hole of zeros, or nothing left.
pub(crate) fn damage_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    let n = bytes.len().max(1) as u64;
    match random.next_u64() % 8 {
        0 => bytes.clear(),
        1 | 2 => bytes.truncate((random.next_u64() % n) as usize),
        3 => {
            let from = (random.next_u64() % n) as usize;
            let to = (from + 4096).min(bytes.len());
            bytes[from.min(to)..to].fill(0);
        }
        _ => {
            for _ in 0..=(random.next_u64() % 16) {
                let i = (random.next_u64() % n) as usize;
                if let Some(byte) = bytes.get_mut(i) {
                    *byte ^= (random.next_u64() % 255) as u8 + 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn only_what_was_not_synced_is_torn() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let mut seen = BTreeSet::new();
        for seed in 0..200 {
            let mut bytes = b"one\ntwo\nthree\nfour\n".to_vec();
            bytes.resize(64, 0);
            std::fs::write(&path, &bytes).unwrap();
            tear(&path, 2, &mut Random::new(seed)).unwrap();
            let torn = std::fs::read(&path).unwrap();
            assert!(torn.starts_with(b"one\ntwo\n"), "{torn:?}");
            seen.insert(torn);
        }
        assert!(seen.len() > 20);
    }
}
