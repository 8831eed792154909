//! Parsers of hostile input in this crate, as functions of bytes, for fuzzing.

use crate::concern;
use homeostat_kernel::Parser;
use homeostat_points::code::Function;

/// Name and parser of each.
pub const ALL: &[Parser] = &[
    ("mapped-files", concern::parse_mappings),
    ("code", |bytes| {
        for every in [1u64, 2] {
            // With samples inside and outside of the function.
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
