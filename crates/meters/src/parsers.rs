//! Parsers of hostile input in this crate, as functions of bytes, for fuzzing.

use crate::bounded::{Bounded, ReadAt};
use crate::code_map::CodeMap;
use crate::connection::{Connection, Deadline};
use crate::ranges::Ranges;
use crate::{code_file, elf, go, kernel, listeners, memcached, prometheus, redis, sockets, unwind};
use homeostat_kernel::Parser;
use homeostat_model::ProcessId;
use homeostat_progress::layout;
use std::collections::BTreeSet;
use std::time::Duration;

/// Name and parser of each.
pub const ALL: &[Parser] = &[
    ("elf", executable),
    ("memcached", |bytes| {
        with_connection(bytes, |connection, deadline| {
            let _ = memcached::answer(connection, deadline);
        });
    }),
    ("prometheus", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let (selector, page) = text.split_once('\n').unwrap_or((&text, ""));
        if let Some((metric, labels)) = prometheus::parse_selector(selector) {
            let _ = prometheus::sum_series(page, &metric, &labels);
        }
    }),
    ("prometheus-chunks", |bytes| {
        with_connection(bytes, |connection, deadline| {
            let _ = prometheus::chunks(connection, deadline);
        });
    }),
    ("redis", |bytes| {
        with_connection(bytes, |connection, deadline| {
            if let Ok(info) = redis::answer(connection, deadline) {
                let _ = redis::commands(&String::from_utf8_lossy(&info));
            }
        });
    }),
    ("sockets", |bytes| {
        let _ = sockets::messages(bytes, &mut |_| {});
    }),
    ("tcp-listeners", |bytes| {
        let _ = listeners::tcp_listeners(&String::from_utf8_lossy(bytes), &BTreeSet::from([0, 1, 12345]));
    }),
    ("unix-listeners", |bytes| {
        let process = ProcessId {
            pid: 1,
            start_ticks: 1,
        };
        let inodes = BTreeSet::from([0, 1, 12345]);
        let _ = listeners::unix_listeners(&String::from_utf8_lossy(bytes), &inodes, process);
    }),
    ("code-mappings", |bytes| {
        let _ = code_file::code_mappings(&String::from_utf8_lossy(bytes));
    }),
    ("code-functions", |bytes| {
        for beginning in [
            None,
            Some(go::Beginning {
                text: 0x1000,
                entry: 0x1020,
            }),
        ] {
            let size = bytes.len() as u64;
            let (Ok(file), Some(mut ranges)) = (Bounded::new(&bytes), Ranges::of_code(&[(0, 1 << 31)]))
            else {
                return;
            };
            let part = |from, to| file.region(from, to - from);
            let (Some(all), Some(again), Some(header), Some(frames)) = (
                part(0, size),
                part(0, size),
                part(0, size / 2),
                part(size / 2, size),
            ) else {
                return;
            };
            let _ = go::functions(all, beginning, &mut ranges);
            let _ = go::function(again, "main.main", beginning);
            let part = |address, data| unwind::Section { address, data };
            let _ = unwind::functions(part(0x1000, header), part(0x2000, frames), &mut ranges);
            let _ = ranges.finish();
        }
    }),
    ("io", |bytes| {
        let _ = kernel::parse_switches(&String::from_utf8_lossy(bytes));
    }),
    ("progress", |bytes| {
        if let Ok(header) = layout::Header::parse(bytes, bytes.len() as u64) {
            let _ = layout::sum_slots(bytes, header.slots);
        }
    }),
    ("progress-file-name", |bytes| {
        let _ = layout::parse_file_name(&String::from_utf8_lossy(bytes));
    }),
];

fn with_connection(bytes: &[u8], parse: impl FnOnce(&mut Connection, Deadline)) {
    if let Ok(mut connection) = Connection::received(bytes) {
        parse(&mut connection, Deadline::after(Duration::from_secs(1)));
    }
}

fn executable(bytes: &[u8]) {
    file(&bytes);
}

/// Runs all queries on an executable file.
pub fn file(file: &dyn ReadAt) {
    use elf::Wanted;
    for wanted in [
        Wanted::Function("main".to_owned()),
        Wanted::Containing("main".to_owned()),
        Wanted::StaticProbe("a".to_owned(), "b".to_owned()),
    ] {
        let _ = elf::find(file, &wanted);
    }
    let _ = CodeMap::read(file);
}
