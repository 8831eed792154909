//! The file layout, version 1. All numbers are in the byte order of the machine: writer and reader share it.
//!
//! | offset | bytes | content |
//! |-------:|------:|---------|
//! | 0      | 8     | magic `HSPROG\r\n` ([`MAGIC`]); written last, so a file that has it is complete |
//! | 8      | 4     | version, 1 |
//! | 12     | 4     | number of slots, 1 to [`SLOTS_MAX`] |
//! | 16     | 4     | bytes from the file's start to slot 0, [`HEADER_SIZE`] |
//! | 20     | 4     | bytes from one slot to the next, [`SLOT_STRIDE`] |
//! | 24     | 4     | process id, as the process itself sees it |
//! | 28     | 4     | zero |
//! | 32     | 8     | start time of the process in clock ticks since boot, field 22 of `/proc/self/stat` |
//! | 40     | 8     | inode of `/proc/self/ns/pid`, the namespace in which the process id holds; 0 = unknown |
//! | 48     | 32    | what one count is, UTF-8, padded with zero bytes: `operation` |
//! | 80     | 48    | name of the program or counter for people, UTF-8, padded with zero bytes |
//! | 128    | 128 × slots | slots: a `u64` that only grows (and may wrap), then 120 unused bytes |
//!
//! The file is `PID-START` (both decimal, as in the header) in the progress directory, and its size is a
//! multiple of 4,096 bytes. Slots are 128 bytes apart because processors fetch lines of 64 bytes in pairs (and
//! some have lines of 128), so that threads with slots of their own never share one.

/// First eight bytes of the file. The line end shows a transfer that changed text.
pub const MAGIC: [u8; 8] = *b"HSPROG\r\n";
/// Version of the layout.
pub const VERSION: u32 = 1;
/// Bytes before slot 0.
pub const HEADER_SIZE: usize = 128;
/// Bytes from one slot to the next.
pub const SLOT_STRIDE: usize = 128;
/// Largest number of slots: the file then has nine pages of 4 KiB.
pub const SLOTS_MAX: usize = 256;
/// Bytes kept for the unit; one of them stays zero.
pub const UNIT_SIZE: usize = 32;
/// Bytes kept for the name; one of them stays zero.
pub const NAME_SIZE: usize = 48;
/// The file size is a multiple of this.
pub const PAGE: usize = 4096;
/// Where the files lie unless [`DIRECTORY_VARIABLE`] says otherwise.
pub const DIRECTORY: &str = "/run/homeostat/progress";
/// Environment variable that names another directory.
pub const DIRECTORY_VARIABLE: &str = "HOMEOSTAT_PROGRESS_DIR";

const AT_VERSION: usize = 8;
const AT_SLOTS: usize = 12;
const AT_HEADER_SIZE: usize = 16;
const AT_STRIDE: usize = 20;
const AT_PID: usize = 24;
const AT_START: usize = 32;
const AT_NAMESPACE: usize = 40;
const AT_UNIT: usize = 48;
const AT_NAME: usize = 80;

/// What a progress file says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of slots.
    pub slots: usize,
    /// Process id as the process itself sees it.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Inode of the process's pid namespace; 0 when unknown.
    pub pid_namespace: u64,
    /// What one count is.
    pub unit: String,
    /// Name for people.
    pub name: String,
}

/// Why bytes are not a progress file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// Shorter than a header, or than its slots need.
    Short,
    /// The magic is missing: no progress file, or not complete yet.
    Magic,
    /// Another version.
    Version(u32),
    /// A number is outside its limits.
    Limits,
    /// The unit or name is not UTF-8, or has control characters.
    Text,
}
impl std::fmt::Display for LayoutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Short => f.write_str("the file is shorter than its header says"),
            Self::Magic => f.write_str("the file has no progress header (yet)"),
            Self::Version(v) => write!(f, "the file has layout version {v}, understood is {VERSION}"),
            Self::Limits => f.write_str("a number in the header is outside its limits"),
            Self::Text => f.write_str("the unit or name is not plain text"),
        }
    }
}
impl std::error::Error for LayoutError {}

/// Size of a file with that many slots.
pub const fn file_size(slots: usize) -> usize {
    (HEADER_SIZE + slots * SLOT_STRIDE).div_ceil(PAGE) * PAGE
}

/// Name of the file in the progress directory.
pub fn file_name(pid: u32, start_ticks: u64) -> String {
    format!("{pid}-{start_ticks}")
}

/// The reverse of [`file_name`].
pub fn parse_file_name(name: &str) -> Option<(u32, u64)> {
    let (pid, start) = name.split_once('-')?;
    let ids = (pid.parse().ok()?, start.parse().ok()?);
    // Only the canonical spelling, so that one process has one file.
    (file_name(ids.0, ids.1) == name).then_some(ids)
}

impl Header {
    /// The header as bytes, with the magic.
    ///
    /// Unit and name are cut to their fields at a character boundary.
    pub fn to_bytes(&self) -> [u8; HEADER_SIZE] {
        let mut b = [0u8; HEADER_SIZE];
        b[..MAGIC.len()].copy_from_slice(&MAGIC);
        b[AT_VERSION..][..4].copy_from_slice(&VERSION.to_ne_bytes());
        b[AT_SLOTS..][..4].copy_from_slice(&(self.slots as u32).to_ne_bytes());
        b[AT_HEADER_SIZE..][..4].copy_from_slice(&(HEADER_SIZE as u32).to_ne_bytes());
        b[AT_STRIDE..][..4].copy_from_slice(&(SLOT_STRIDE as u32).to_ne_bytes());
        b[AT_PID..][..4].copy_from_slice(&self.pid.to_ne_bytes());
        b[AT_START..][..8].copy_from_slice(&self.start_ticks.to_ne_bytes());
        b[AT_NAMESPACE..][..8].copy_from_slice(&self.pid_namespace.to_ne_bytes());
        put_text(&mut b[AT_UNIT..][..UNIT_SIZE], &self.unit);
        put_text(&mut b[AT_NAME..][..NAME_SIZE], &self.name);
        b
    }

    /// Reads and checks a header. `size` is the size of the whole file.
    ///
    /// # Errors
    /// [`LayoutError`] says what is wrong; the bytes may come from anybody.
    pub fn parse(bytes: &[u8], size: u64) -> Result<Self, LayoutError> {
        let b = bytes.get(..HEADER_SIZE).ok_or(LayoutError::Short)?;
        if b[..MAGIC.len()] != MAGIC {
            return Err(LayoutError::Magic);
        }
        let version = u32_at(b, AT_VERSION);
        if version != VERSION {
            return Err(LayoutError::Version(version));
        }
        let slots = u32_at(b, AT_SLOTS) as usize;
        if slots == 0
            || slots > SLOTS_MAX
            || u32_at(b, AT_HEADER_SIZE) as usize != HEADER_SIZE
            || u32_at(b, AT_STRIDE) as usize != SLOT_STRIDE
        {
            return Err(LayoutError::Limits);
        }
        if size < file_size(slots) as u64 {
            return Err(LayoutError::Short);
        }
        Ok(Self {
            slots,
            pid: u32_at(b, AT_PID),
            start_ticks: u64_at(b, AT_START),
            pid_namespace: u64_at(b, AT_NAMESPACE),
            unit: text_at(&b[AT_UNIT..][..UNIT_SIZE])?,
            name: text_at(&b[AT_NAME..][..NAME_SIZE])?,
        })
    }
}

/// Adds the slots of a file whose first bytes are `bytes`; `None` if they are too few. Wraps like the slots.
pub fn sum_slots(bytes: &[u8], slots: usize) -> Option<u64> {
    let body = bytes.get(HEADER_SIZE..HEADER_SIZE + slots * SLOT_STRIDE)?;
    Some(
        body.chunks_exact(SLOT_STRIDE)
            .fold(0u64, |sum, slot| sum.wrapping_add(u64_at(slot, 0))),
    )
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    let mut x = [0; 4];
    x.copy_from_slice(&b[at..at + 4]);
    u32::from_ne_bytes(x)
}
fn u64_at(b: &[u8], at: usize) -> u64 {
    let mut x = [0; 8];
    x.copy_from_slice(&b[at..at + 8]);
    u64::from_ne_bytes(x)
}
fn put_text(field: &mut [u8], text: &str) {
    let mut end = text.len().min(field.len() - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    field[..end].copy_from_slice(&text.as_bytes()[..end]);
}
fn text_at(field: &[u8]) -> Result<String, LayoutError> {
    let end = field.iter().position(|&c| c == 0).ok_or(LayoutError::Text)?;
    let text = std::str::from_utf8(&field[..end]).map_err(|_| LayoutError::Text)?;
    // The text reaches logs and terminals of the operator.
    if text.chars().any(char::is_control) {
        Err(LayoutError::Text)
    } else {
        Ok(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            slots: 3,
            pid: 4711,
            start_ticks: 99,
            pid_namespace: 5,
            unit: "operation".into(),
            name: "latency".into(),
        }
    }

    #[test]
    fn header_survives_the_bytes() {
        let h = header();
        assert_eq!(Header::parse(&h.to_bytes(), file_size(3) as u64), Ok(h));
    }

    #[test]
    fn long_text_is_cut_at_a_character() {
        let h = Header {
            unit: "ä".repeat(40),
            ..header()
        };
        let back = Header::parse(&h.to_bytes(), 4096).unwrap();
        assert_eq!(back.unit, "ä".repeat(15));
    }

    #[test]
    fn every_single_changed_byte_is_harmless() {
        let good = header().to_bytes();
        for at in 0..HEADER_SIZE {
            for value in [0, 1, 10, 0x7f, 0x80, 0xff] {
                let mut b = good;
                b[at] = value;
                if let Ok(h) = Header::parse(&b, 4096) {
                    assert!((1..=SLOTS_MAX).contains(&h.slots));
                    assert!(file_size(h.slots) <= 4096);
                }
            }
        }
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        let good = header().to_bytes();
        assert_eq!(Header::parse(&good[..127], 4096), Err(LayoutError::Short));
        assert_eq!(Header::parse(&good, 4095), Err(LayoutError::Short));
        let change = |at: usize, v: u8| {
            let mut b = good;
            b[at] = v;
            Header::parse(&b, 4096)
        };
        assert_eq!(change(0, 0), Err(LayoutError::Magic));
        assert_eq!(change(AT_SLOTS, 0), Err(LayoutError::Limits));
        assert_eq!(change(AT_STRIDE, 64), Err(LayoutError::Limits));
        assert_eq!(change(AT_UNIT, 0x1b), Err(LayoutError::Text));
        assert_eq!(change(AT_UNIT, 0xff), Err(LayoutError::Text));
    }

    #[test]
    fn sizes_are_pages() {
        assert_eq!(file_size(1), 4096);
        assert_eq!(file_size(31), 4096);
        assert_eq!(file_size(32), 8192);
        assert_eq!(file_size(SLOTS_MAX), 9 * 4096);
    }

    #[test]
    fn slots_are_added() {
        let mut b = vec![0u8; file_size(3)];
        for (i, v) in [5u64, 7, u64::MAX].iter().enumerate() {
            b[HEADER_SIZE + i * SLOT_STRIDE..][..8].copy_from_slice(&v.to_ne_bytes());
        }
        assert_eq!(sum_slots(&b, 2), Some(12));
        assert_eq!(sum_slots(&b, 3), Some(11));
        assert_eq!(sum_slots(&b[..300], 3), None);
    }

    #[test]
    fn file_names_have_one_spelling() {
        assert_eq!(parse_file_name("12-345"), Some((12, 345)));
        for bad in ["", "12", "012-345", "+12-345", "12-345-6", "-12-3", "12-345.new"] {
            assert_eq!(parse_file_name(bad), None, "{bad}");
        }
    }
}
