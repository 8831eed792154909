//! The parsers of what probes read, as functions of bytes.

use crate::concern;
use homeostat_kernel::Parser;
use homeostat_points::code::Function;

/// A name, and a parser of whatever bytes there are.
pub const ALL: &[Parser] = &[
    ("mapped-files", concern::parse_mappings),
    ("code", |bytes| {
        for every in [1u64, 2] {
            // As if it was seen at work somewhere, in this function or not.
            let seen: Vec<u64> = bytes
                .last_chunk::<2>()
                .into_iter()
                .flatten()
                .map(|b| 0xff8 + u64::from(*b))
                .collect();
            if let Some(function) = Function::decode(0x1000, bytes, &|at| at % every == 0, &seen) {
                for at in [0, 1, bytes.len() as u64 / 2, bytes.len() as u64] {
                    let _ = function.around(0x1000 + at, at % 2 == 0);
                }
            }
        }
    }),
];
