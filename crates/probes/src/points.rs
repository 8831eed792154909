//! Functions and static probes of well-known programs that run once per unit of work.
//!
//! A hit costs about 1 µs, so once per batch is better than once per item. The cost shows above 50,000 hits a second.
//! On redis, 360,000 hits/s of `processCommand` took 35 % of its throughput, and 32,000 hits/s of `readQueryFromClient`
//! took nothing measurable.

use homeostat_meters::common::is_program;
use homeostat_meters::elf::Wanted;
use homeostat_model::Workload;

/// A place in a program to count work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Entry of the function with this symbol.
    Function(&'static str),
    /// Entry of the function with the shortest symbol that contains this text (mangled C++).
    FunctionContaining(&'static str),
    /// Static probe: provider and name.
    StaticProbe(&'static str, &'static str),
}

impl Place {
    pub(super) fn wanted(&self) -> Wanted {
        match *self {
            Self::Function(name) => Wanted::Function(name.to_owned()),
            Self::FunctionContaining(text) => Wanted::Containing(text.to_owned()),
            Self::StaticProbe(provider, name) => Wanted::StaticProbe(provider.to_owned(), name.to_owned()),
        }
    }
}

/// A good place to count a well-known program's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownPoint {
    /// Names of the program (process or executable file).
    pub programs: &'static [&'static str],
    /// The place.
    pub place: Place,
    /// What one count is.
    pub unit: &'static str,
    /// When it runs, and its usual rate.
    pub remark: &'static str,
}

const POSTGRESQL: &[&str] = &["postgres", "postmaster"];
const MYSQL: &[&str] = &["mysqld", "mariadbd"];
const REDIS: &[&str] = &[
    "redis-server",
    "valkey-server",
    "redis-check-rdb",
    "valkey-check-rdb",
];

/// Go servers whose work is answering through `net/http`. Most Go programs contain that server, but only for metrics or
/// health checks, whose steady requests would look like work. Servers that also work otherwise are excluded: Prometheus
/// scrapes its targets, and etcd, Consul and Nomad also answer RPC.
const GO_SERVERS: &[&str] = &[
    "caddy",
    "traefik",
    "grafana",
    "grafana-server",
    "minio",
    "gitea",
    "vault",
    "influxd",
    "loki",
    "registry",
];
/// Programs with RocksDB linked in.
const ROCKSDB: &[&str] = &["kvrocks", "tikv-server", "arangod", "db_bench"];

const POINTS: &[KnownPoint] = &[
    KnownPoint {
        programs: REDIS,
        place: Place::Function("readQueryFromClient"),
        unit: "request batch",
        remark: "once per readable client and turn of the event loop: requests per second divided by the pipeline \
                 depth, and fewer when the server is saturated. (Debian's redis-server is a link to redis-check-rdb)",
    },
    KnownPoint {
        programs: POSTGRESQL,
        place: Place::Function("ReadyForQuery"),
        unit: "query",
        remark: "once per finished query message, 1,000 to 50,000 a second",
    },
    KnownPoint {
        programs: POSTGRESQL,
        place: Place::StaticProbe("postgresql", "transaction__commit"),
        unit: "transaction",
        remark: "once per committed transaction; in builds with --enable-dtrace (Debian's, Red Hat's)",
    },
    KnownPoint {
        programs: MYSQL,
        place: Place::FunctionContaining("dispatch_command"),
        unit: "command",
        remark: "once per client command; above some 1,400 in a second of its CPU time in a window every few seconds only, since each coming \
                 and going of the breakpoint costs it, too: between them by how often its threads have waited. With a pool of threads, whose \
                 threads wait for several connections at once, not then",
    },
    KnownPoint {
        programs: &["memcached"],
        place: Place::Function("process_command_ascii"),
        unit: "command",
        remark: "once per text command; stripped in most distributions, where the statistics of the server count",
    },
    KnownPoint {
        programs: &["memcached"],
        place: Place::StaticProbe("memcached", "process__command__start"),
        unit: "command",
        remark: "once per text command in builds with --enable-dtrace",
    },
    KnownPoint {
        programs: &["nginx"],
        place: Place::Function("ngx_http_free_request"),
        unit: "request",
        remark: "once per finished request, 1,000 to 50,000 a second",
    },
    KnownPoint {
        programs: &["apache2", "httpd"],
        place: Place::Function("ap_read_request"),
        unit: "request",
        remark: "once per request that begins (and once per idle connection that ends)",
    },
    KnownPoint {
        programs: &["haproxy"],
        place: Place::Function("http_create_txn"),
        unit: "HTTP request",
        remark: "once per HTTP request since version 2.1; in builds that export their symbols (USE_BACKTRACE, the default on \
                 Linux with glibc)",
    },
    KnownPoint {
        programs: GO_SERVERS,
        place: Place::Function("net/http.serverHandler.ServeHTTP"),
        unit: "HTTP request",
        remark: "once per HTTP request of Go's own server; found in stripped programs, too, which keep Go's table of functions. Of \
                 other Go servers name it: uprobe:BINARY:net/http.serverHandler.ServeHTTP",
    },
    KnownPoint {
        programs: ROCKSDB,
        place: Place::FunctionContaining("7rocksdb6DBImpl9WriteImpl"),
        unit: "batch of writes",
        remark: "once per batch that is written, where the engine is linked into the program and its symbols are there; not tried with a real \
                 program yet",
    },
    KnownPoint {
        programs: ROCKSDB,
        place: Place::FunctionContaining("7rocksdb6DBImpl7GetImpl"),
        unit: "read",
        remark: "once per key that is read, where the engine is linked into the program and its symbols are there; not tried with a real \
                 program yet",
    },
    KnownPoint {
        programs: &["node", "nodejs"],
        place: Place::StaticProbe("node", "http__server__response"),
        unit: "response",
        remark: "once per HTTP response; in builds with static probes (before version 16)",
    },
];

/// CPU time that attaching and detaching cost a program without hits, where seen (seconds per CPU that it uses). In
/// MariaDB, statements cost a tenth more in the first 20 to 50 ms after attaching and 60 ms after detaching. A
/// breakpoint on a never executed instruction of the page does the same, for unknown reasons. With a window each second
/// it lost 1.40 ± 0.10 %, of which hits explain 0.2 to 0.4. With one every fourth second, as at the default budget, it
/// lost 0.23 ± 0.08 %. Not seen in PostgreSQL (+0.07 ± 0.09 %) and `CPython` (docs/meters.md).
///
/// The number of waits estimates the rest: both servers have a thread per connection, which waits for each command.
pub(super) fn coming_and_going(workload: &Workload) -> f64 {
    if is_program(workload, MYSQL) { 0.015 } else { 0.0 }
}

/// The table, for the book and for `find`.
pub fn known_points() -> &'static [KnownPoint] {
    POINTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_meters::elf;
    use std::path::PathBuf;

    /// Where Debian keeps a server, if it is installed.
    fn installed(program: &str) -> Option<PathBuf> {
        let versions = std::fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten()
            .flatten();
        let mut places: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
        places.extend(["/usr/sbin".into(), "/usr/bin".into()]);
        places
            .into_iter()
            .map(|place| place.join(program))
            .find(|file| file.is_file())
    }

    #[test]
    fn servers_of_debian_have_the_functions_and_probes_that_are_known_of_them() {
        // Others may build them without.
        let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        if !release.lines().any(|line| line == "ID=debian") {
            return;
        }
        let mut missing = Vec::new();
        for point in POINTS {
            for program in point.programs {
                // Debian's is stripped, and builds without static probes; its own counters are there.
                let is_in_vain = *program == "memcached"
                    || point.place == Place::StaticProbe("node", "http__server__response");
                // RocksDB is a library of its own there.
                let Some(path) = installed(program).filter(|_| !is_in_vain && *program != "db_bench") else {
                    continue;
                };
                let file = std::fs::File::open(&path).unwrap();
                let found = elf::find(&file, &point.place.wanted()).map(|found| found.sites);
                if !found.as_ref().is_ok_and(|sites| !sites.is_empty()) {
                    missing.push(format!("{}: {:?}: {found:?}", path.display(), point.place));
                }
            }
        }
        assert!(missing.is_empty(), "{missing:#?}");
    }

    #[test]
    fn the_table_is_in_order() {
        let mut seen = std::collections::BTreeSet::new();
        for p in POINTS {
            assert!(!p.programs.is_empty() && !p.unit.is_empty() && p.remark.len() > 20);
            for program in p.programs {
                assert!(
                    seen.insert((*program, format!("{:?}", p.place))),
                    "{program} {:?} twice",
                    p.place
                );
            }
        }
    }
}
