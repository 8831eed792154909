//! Unpacking `/proc/config.gz`.

/// The contents of a gzip file (RFC 1952), at most `limit` bytes; `None` when it is damaged or larger. The checksum is
/// not verified: the kernel made the file in memory.
pub(crate) fn unpack(packed: &[u8], limit: usize) -> Option<Vec<u8>> {
    const TEXT_FIELDS: [u8; 2] = [0x08, 0x10]; // name, comment: each ends with a zero byte
    let flags = match packed {
        [0x1f, 0x8b, 8, flags, ..] => *flags,
        _ => return None,
    };
    let mut at = 10;
    if flags & 0x04 != 0 {
        let length = packed.get(at..at + 2)?;
        at += 2 + usize::from(u16::from_le_bytes([*length.first()?, *length.get(1)?]));
    }
    for field in TEXT_FIELDS {
        if flags & field != 0 {
            at += packed.get(at..)?.iter().position(|&b| b == 0)? + 1;
        }
    }
    if flags & 0x02 != 0 {
        at += 2;
    }
    miniz_oxide::inflate::decompress_to_vec_with_limit(packed.get(at..)?, limit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `printf 'CONFIG_A=y\n' | gzip -n`.
    const PACKED: &[u8] = &[
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x73, 0xf6, 0xf7, 0x73, 0xf3, 0x74, 0x8f,
        0x77, 0xb4, 0xad, 0xe4, 0x02, 0x00, 0x8e, 0xb1, 0x80, 0xda, 0x0b, 0x00, 0x00, 0x00,
    ];

    #[test]
    fn unpacks_and_refuses_cut_files() {
        assert_eq!(unpack(PACKED, 100).as_deref(), Some(&b"CONFIG_A=y\n"[..]));
        assert_eq!(unpack(PACKED, 3), None);
        assert_eq!(unpack(&PACKED[..14], 100), None);
        assert_eq!(unpack(b"", 100), None);
    }

    proptest! {
        #[test]
        fn never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), header in any::<bool>()) {
            if header {
                bytes.splice(0..0, [0x1f, 0x8b, 8]);
            }
            let _ = unpack(&bytes, 1 << 16);
        }
    }
}
