//! Counts executions of a function (`uprobe:BINARY:SYMBOL`) or static probe (`usdt:BINARY:PROVIDER:NAME`) in the
//! kernel, which removes the probes whenever homeostat exits.
//!
//! Where many places can be counted at once (Linux 6.10, or a stable kernel of that time), BPF counts
//! ([`functions`](crate::functions)), sampled if needed. Otherwise perf's uprobe event source counts continuously
//! ([`probing`](crate::probing)), and closing a counter takes 75 to 95 ms. A parent's perf counter does not cover a
//! forked process, so there are two ways:
//! * One counter per thread, for workloads of few threads.
//! * One counter per CPU, for every process that runs the file. Repeated checks ensure that only the workload does.
//!
//! A separate thread attaches and detaches, when the safety checks show that this blocks nobody
//! ([`concern`](crate::concern)). A known function is not counted while others have the file mapped. For a named one,
//! others are checked like the workload. Readings show whether the place is reached at all (a function may be inlined).

use crate::concern::census::Census;
use crate::concern::threads::has_shadow_stack;
use crate::concern::{Files, Looked, Others, Target};
use crate::crowd::Crowd;
use crate::functions;
use crate::owed::is_replaced;
use crate::points::{KnownPoint, Place, coming_and_going, known_points};
use crate::probing::{Plan, Probing};
use crate::turns::lag;
use homeostat_helper::Domain;
use homeostat_kernel::Root;
use homeostat_kernel::bpf::Counters;
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::process::{open_process, parent};
use homeostat_meters::code_file::{CodeFile, FileState, Mapping, executable_at, mappings, own_code};
use homeostat_meters::common::{PROCESSES_MAX, is_program, not_mine, refused, usable};
use homeostat_meters::elf::{ElfError, Found, Site};
use homeostat_meters::service::speaker::{Reply, Request};
use homeostat_meters::tasks::{Counted, Limits, online_cpus, threads};
use homeostat_meters::{ConfiguredMeter, Meter, MeterKind, MeterSettings, elf, service};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Cost of a hit on an emulated instruction, and on a single-stepped one. Measured in loops on a virtual machine: 0.76
/// to 0.82 µs and 9.5 to 9.7 µs. With other data in the caches it is more: PostgreSQL's CPU time per query rose by 3.5
/// to 4.2 %, where 1 µs a hit would be 3.07 %. Many threads at once raise it further ([`crowd`](crate::crowd)).
const COST_EMULATED: Nanoseconds = Nanoseconds(1_300);
/// Cost on a single-stepped instruction.
const COST_STEPPED: Nanoseconds = Nanoseconds(10_000);
/// Most counters with one per thread.
const LIMITS: Limits = Limits {
    counters: 32,
    attach: 2,
};
/// Most counters with one per CPU.
const CPU_COUNTERS_MAX: usize = 1024;
/// Most processes scanned for that.
const SCAN_MAX: usize = 100_000;
/// Most cached answers about files.
const CACHE_MAX: usize = 256;

pub(super) fn is_mine(id: &str) -> bool {
    id.starts_with("uprobe:") || id.starts_with("usdt:")
}

/// Whether two ids name the same function or probe of one file, by any of its names.
fn is_same_place(root: &Root, workload: &Workload, a: &str, b: &str) -> bool {
    if a == b {
        return true;
    }
    let (Ok(a), Ok(b)) = (Wanted::parse(a), Wanted::parse(b)) else {
        return false;
    };
    let file = |wanted: &Wanted| {
        let found = Binary::find(root, workload, wanted.binary());
        found.ok().map(|binary| binary.state.0)
    };
    a.place() == b.place() && file(&a).is_some_and(|it| file(&b) == Some(it))
}

/// The place that an id names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wanted {
    Function {
        binary: String,
        symbol: String,
    },
    Static {
        binary: String,
        provider: String,
        name: String,
    },
}

impl Wanted {
    fn parse(id: &str) -> Result<Self, String> {
        let full = |parts: &[&str]| {
            parts
                .iter()
                .all(|p| !p.is_empty() && !p.chars().any(char::is_control))
        };
        if let Some(rest) = id.strip_prefix("uprobe:") {
            return match rest.rsplit_once(':') {
                Some((binary, symbol)) if full(&[binary, symbol]) => Ok(Self::Function {
                    binary: binary.to_owned(),
                    symbol: symbol.to_owned(),
                }),
                _ => Err("write uprobe:BINARY:SYMBOL, for example uprobe:postgres:ReadyForQuery".to_owned()),
            };
        }
        if let Some(rest) = id.strip_prefix("usdt:") {
            let parts: Vec<&str> = rest.rsplitn(3, ':').collect();
            if let [name, provider, binary] = parts[..] {
                if full(&[binary, provider, name]) {
                    return Ok(Self::Static {
                        binary: binary.to_owned(),
                        provider: provider.to_owned(),
                        name: name.to_owned(),
                    });
                }
            }
            return Err(
                "write usdt:BINARY:PROVIDER:NAME, for example usdt:postgres:postgresql:transaction__commit"
                    .to_owned(),
            );
        }
        Err("it begins with neither uprobe: nor usdt:".to_owned())
    }

    fn binary(&self) -> &str {
        match self {
            Self::Function { binary, .. } | Self::Static { binary, .. } => binary,
        }
    }

    /// Provider and name, without the file.
    fn place(&self) -> (Option<&str>, &str) {
        match self {
            Self::Function { symbol, .. } => (None, symbol),
            Self::Static { provider, name, .. } => (Some(provider), name),
        }
    }

    fn in_file(&self) -> elf::Wanted {
        match self {
            Self::Function { symbol, .. } => elf::Wanted::Function(symbol.clone()),
            Self::Static { provider, name, .. } => elf::Wanted::StaticProbe(provider.clone(), name.clone()),
        }
    }
}

/// Answers about files. Reading the symbols of a large file takes tens of milliseconds.
type Cache = BTreeMap<(FileState, elf::Wanted), Result<Found, ElfError>>;

/// The meter kind.
pub struct Uprobe {
    settings: MeterSettings,
    cache: Cache,
    /// Whether this kernel and user can count by BPF, once tried.
    by_bpf: Option<bool>,
}

impl Uprobe {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            settings: settings.clone(),
            cache: Cache::new(),
            by_bpf: None,
        }
    }

    /// Whether many places can be counted at once, and per process. A passing failure is not remembered.
    fn by_bpf(&mut self) -> bool {
        if let Some(known) = self.by_bpf {
            return known;
        }
        let found = Counters::possible();
        if !matches!(found, Err(OpenError::Busy(_))) {
            self.by_bpf = Some(found.is_ok());
        }
        found.is_ok()
    }

    /// Looks a place up in a file, with a cache.
    fn look(&mut self, binary: &Binary, wanted: elf::Wanted) -> Result<Found, ElfError> {
        let key = (binary.state, wanted);
        if let Some(answer) = self.cache.get(&key) {
            return answer.clone();
        }
        let answer = binary.file.find(&key.1);
        // A file that is unreadable now is retried next time.
        if matches!(answer, Err(ElfError::Unreadable(_))) {
            return answer;
        }
        if self.cache.len() >= CACHE_MAX {
            self.cache.clear();
        }
        self.cache.insert(key, answer.clone());
        answer
    }

    fn known(&mut self, root: &Root, workload: &Workload, point: &KnownPoint) -> MeterCandidate {
        let name = point
            .programs
            .iter()
            .find(|p| is_program(workload, &[p]))
            .copied()
            .unwrap_or(workload.program.as_str());
        let plain = match point.place {
            Place::Function(symbol) | Place::FunctionContaining(symbol) => format!("uprobe:{name}:{symbol}"),
            Place::StaticProbe(provider, probe) => format!("usdt:{name}:{provider}:{probe}"),
        };
        let found = Binary::main(root, workload).and_then(|binary| {
            let found = self
                .look(&binary, point.place.wanted())
                .map_err(|e| e.to_string())?;
            Ok((found.name, found.sites, binary))
        });
        let (id, checked) = match found {
            Ok((symbol, sites, binary)) => {
                let id = match point.place {
                    // The mangled name, because that is what will be opened.
                    Place::FunctionContaining(_) => format!("uprobe:{name}:{symbol}"),
                    Place::Function(_) | Place::StaticProbe(..) => plain,
                };
                let way =
                    replaced(&binary, &sites).and_then(|()| Way::choose(root, workload, &binary, &sites));
                let ready = way
                    .and_then(|_| alone(workload, &binary))
                    .and_then(|()| source(root));
                let crowd = Crowd::of(root, &workload.processes);
                let ready = ready.and_then(|_| crowd.allow().map_err(|why| why.to_string()));
                (id, ready.map(|()| cost(&sites, crowd)))
            }
            Err(why) => (plain, Err(why)),
        };
        let candidate = candidate(&id, point.unit, checked);
        self.lagging(workload, candidate)
    }

    /// Adds to the candidate how old a reading may be, where counting may be sampled.
    fn lagging(&mut self, workload: &Workload, candidate: MeterCandidate) -> MeterCandidate {
        let coming_and_going = coming_and_going(workload);
        if coming_and_going == 0.0 || !self.by_bpf() {
            return candidate;
        }
        MeterCandidate {
            lag: lag(coming_and_going, self.settings.probe_cost_max),
            ..candidate
        }
    }

    fn configured(&mut self, root: &Root, workload: &Workload, named: &ConfiguredMeter) -> MeterCandidate {
        let checked = self
            .prepare(root, workload, &named.meter)
            .map(|p| cost(&p.sites, Crowd::of(root, &workload.processes)))
            .map_err(|e| match e {
                PlatformError::Unsupported { why, .. } => why,
                other => other.to_string(),
            });
        let candidate = candidate(&named.meter, named.unit.as_deref().unwrap_or("hit"), checked);
        self.lagging(workload, candidate)
    }

    fn prepare(&mut self, root: &Root, workload: &Workload, id: &str) -> Result<Prepared, PlatformError> {
        let refuse = |why: String| PlatformError::Unsupported {
            what: format!("meter {id}"),
            why,
        };
        let wanted = Wanted::parse(id).map_err(refuse)?;
        let binary = Binary::find(root, workload, wanted.binary()).map_err(refuse)?;
        let sites = self
            .look(&binary, wanted.in_file())
            .map_err(|e| refuse(e.to_string()))?
            .sites;
        shadowed(root, workload, &binary, &sites).map_err(refuse)?;
        replaced(&binary, &sites).map_err(refuse)?;
        let way = Way::choose(root, workload, &binary, &sites).map_err(refuse)?;
        let source = source(root).map_err(refuse)?;
        Ok(Prepared {
            binary,
            sites,
            way,
            source,
        })
    }
}

impl MeterKind for Uprobe {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let mut found: Vec<MeterCandidate> = Vec::new();
        let configured: Vec<ConfiguredMeter> = self
            .settings
            .configured_for(workload)
            .into_iter()
            .filter(|named| is_mine(&named.meter))
            .cloned()
            .collect();
        for named in &configured {
            found.push(self.configured(root, workload, named));
        }
        for point in known_points().iter().filter(|p| is_program(workload, p.programs)) {
            let known = self.known(root, workload, point);
            // A person's name for the place wins, but the known unit applies where the person gives none.
            let same = found
                .iter()
                .position(|c| is_same_place(root, workload, c.id.as_str(), known.id.as_str()));
            match same {
                Some(at) if configured.get(at).is_none_or(|named| named.unit.is_none()) => {
                    found[at].unit = known.unit;
                }
                Some(_) => {}
                None => found.push(known),
            }
        }
        if found.is_empty() {
            found.push(refused(
                "uprobe",
                MeterClass::Probe,
                "hit",
                format!(
                    "no function of {} is known that runs once per unit of work; name one in the configuration \
                     (uprobe:BINARY:SYMBOL or usdt:BINARY:PROVIDER:NAME)",
                    workload.program
                ),
            ));
        }
        found
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        if !is_mine(id.as_str()) {
            return Err(not_mine(id));
        }
        let Prepared {
            binary,
            sites,
            way,
            source,
        } = self.prepare(root, workload, id.as_str())?;
        let named = self.settings.is_configured(workload, id);
        let crowd = Crowd::of(root, &workload.processes);
        if !named {
            crowd.allow().map_err(|why| why.error(&format!("meter {id}")))?;
        }
        let files = Files {
            targets: vec![binary.target()],
            others: if named { Others::LookedAt } else { Others::None },
            pages: sites.len() as u64,
            looked: Looked::default(),
        };
        if self.by_bpf() {
            let plan = functions::Plan {
                id: id.to_string(),
                file: binary.file.clone(),
                sites: sites.iter().map(|s| (s.offset, s.semaphore)).collect(),
                files,
                whose: match way {
                    Way::Threads => functions::Whose::Processes,
                    Way::Cpus => functions::Whose::Everybody(binary.state.0),
                },
                cost: cost(&sites, crowd),
                cost_max: self.settings.probe_cost_max,
                coming_and_going: coming_and_going(workload),
            };
            return Ok(Box::new(functions::Functions::begin(root, workload, plan)?));
        }
        let events: Vec<Counted> = sites
            .iter()
            .map(|s| Counted::Uprobe {
                source,
                file: binary.file.clone(),
                offset: s.offset,
                semaphore: s.semaphore,
            })
            .collect();
        let plan = Plan {
            id: id.to_string(),
            files,
            events,
            threads: (way == Way::Threads).then_some(LIMITS),
            program: binary.state.0,
        };
        Ok(Box::new(Probing::begin(root, workload, plan)?))
    }
}

/// Whether nobody else has the file mapped, by the last process map scan. Opening the meter scans again.
fn alone(workload: &Workload, binary: &Binary) -> Result<(), String> {
    let Some(census) = Census::last() else {
        return Ok(());
    };
    let family = census.family(&workload.processes);
    match census.allow(&family, &binary.mapping.device_inode, &binary.mapping.path) {
        Err(homeostat_sensors::storage::Refusal::Lasting(why)) => Err(why),
        Ok(()) | Err(homeostat_sensors::storage::Refusal::Now(_)) => Ok(()),
    }
}

struct Prepared {
    binary: Binary,
    sites: Vec<Site>,
    way: Way,
    source: u32,
}

fn candidate(id: &str, unit: &str, checked: Result<Nanoseconds, String>) -> MeterCandidate {
    match checked {
        Ok(cost) => MeterCandidate {
            cost_per_count: cost,
            ..usable(id, MeterClass::Probe, unit)
        },
        Err(why) => refused(id, MeterClass::Probe, unit, why),
    }
}

fn cost(sites: &[Site], crowd: Crowd) -> Nanoseconds {
    let alone = if sites.iter().all(|s| s.cheap) {
        COST_EMULATED
    } else {
        COST_STEPPED
    };
    Nanoseconds::from_secs_f64(alone.as_secs_f64() * crowd.beyond_few())
}

/// Whether a site is a call and a process has a shadow stack, which the emulated call skips: the return would kill it.
fn shadowed(root: &Root, workload: &Workload, binary: &Binary, sites: &[Site]) -> Result<(), String> {
    let call = |site: &Site| {
        let code = binary.file.bytes(site.offset);
        code.is_none_or(|c| c.first() == Some(&0xe8))
    };
    if !sites.iter().any(call) {
        return Ok(());
    }
    let with = workload
        .processes
        .iter()
        .take(PROCESSES_MAX)
        .find(|p| has_shadow_stack(root, **p, 1));
    match with {
        None => Ok(()),
        Some(process) => Err(format!(
            "it begins with a call, which cannot be counted in process {process}: it has a shadow stack"
        )),
    }
}

/// Whether the kernel would write more than a breakpoint at a site.
fn replaced(binary: &Binary, sites: &[Site]) -> Result<(), String> {
    let code = |site: &Site| binary.file.bytes(site.offset);
    if sites.iter().filter_map(code).any(|code| is_replaced(&code)) {
        return Err(
            "it begins with a nop of five bytes, which this kernel would replace by a call that may write over what the program \
             keeps below its stack pointer"
                .to_owned(),
        );
    }
    Ok(())
}

/// Number of the uprobe event source.
pub(super) fn source(root: &Root) -> Result<u32, String> {
    if !root.is_live() {
        return Err("this is a captured tree, not the running machine".to_owned());
    }
    std::fs::read_to_string(root.path("/sys/bus/event_source/devices/uprobe/type"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .ok_or_else(|| "the kernel has no uprobe event source; it needs CONFIG_UPROBE_EVENTS".to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Threads,
    Cpus,
}

impl Way {
    fn choose(root: &Root, workload: &Workload, binary: &Binary, sites: &[Site]) -> Result<Self, String> {
        if workload.processes.len() > PROCESSES_MAX {
            return Err(format!(
                "it has more than {PROCESSES_MAX} processes; split the workload into units"
            ));
        }
        let limit = LIMITS.counters / sites.len().max(1);
        let threads = threads(root, workload, limit);
        let few = threads <= limit;
        let single = workload.processes.len() == 1;
        let cpus = online_cpus(root).len();
        if few && single && threads <= cpus.max(4) {
            return Ok(Self::Threads);
        }
        // On a layered file system, other users of the file are unknown.
        let whole = binary.is_main && !binary.file.is_layered();
        let stranger = if whole {
            stranger_of(root, workload, binary.file.identity())
        } else {
            None
        };
        if whole && stranger.is_none() && cpus > 0 && cpus.saturating_mul(sites.len()) <= CPU_COUNTERS_MAX {
            return Ok(Self::Cpus);
        }
        if few {
            return Ok(Self::Threads);
        }
        Err(match stranger {
            Some(pid) => format!(
                "it has more than {limit} threads, and process {pid} of another workload runs the same file, so that \
                 its hits could not be told apart; run them from different files, or use a counter of its own"
            ),
            None => format!(
                "it has more than {limit} threads, too many for a counter each; use a counter of its own"
            ),
        })
    }
}

/// A process outside the workload that runs the file with this device and inode.
pub(super) fn stranger_of(root: &Root, workload: &Workload, file: (u64, u64)) -> Option<i32> {
    let mut own: Vec<i32> = workload.processes.iter().map(|p| p.pid).collect();
    own.sort_unstable();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let proc = rustix::fs::open(root.path("/proc"), flags, rustix::fs::Mode::empty()).ok()?;
    let (pids, _) = homeostat_kernel::process::numbers_in(&proc, ".", SCAN_MAX).ok()?;
    pids.into_iter()
        .filter(|pid| own.binary_search(pid).is_err())
        .find(|pid| {
            let dir = rustix::fs::openat(&proc, pid.to_string(), flags, rustix::fs::Mode::empty());
            dir.is_ok_and(|dir| executable_at(dir) == Some(file))
            // A process just forked by the workload belongs to it, though no scan has seen it yet.
            && parent(&proc, *pid).is_none_or(|p| own.binary_search(&p).is_err())
        })
}

/// A file that the workload runs or has mapped, held open.
struct Binary {
    file: Arc<CodeFile>,
    state: FileState,
    /// Part of the file that the workload has mapped.
    mapping: Mapping,
    is_main: bool,
}

impl Binary {
    fn new(file: CodeFile, mapping: Mapping, is_main: bool) -> Self {
        Self {
            state: file.state(),
            file: Arc::new(file),
            mapping,
            is_main,
        }
    }

    fn target(&self) -> Target {
        Target {
            device_inode: self.mapping.device_inode,
            path: self.mapping.path.clone(),
            file: self.file.clone(),
        }
    }

    fn process(root: &Root, workload: &Workload) -> Result<ProcessId, String> {
        let mut why = "it has no process".to_owned();
        for process in workload.processes.iter().take(PROCESSES_MAX) {
            match open_process(root, *process) {
                Ok(_) => return Ok(*process),
                Err(e) => why = e.to_string(),
            }
        }
        Err(why)
    }

    /// The main executable, even if its file was removed.
    fn main(root: &Root, workload: &Workload) -> Result<Self, String> {
        let process = Self::process(root, workload)?;
        let file = CodeFile::executable(root, process)?;
        Ok(Self::new(file, own_code(root, process)?, true))
    }

    /// Target of a path that is a link.
    fn behind(root: &Root, process: ProcessId, name: &str) -> Option<String> {
        if !root.is_live() || !name.starts_with('/') {
            return None;
        }
        let domain = Domain::of(root, process).ok()?;
        let request = Request::Behind(root.path(name), process);
        match service::call_apart(domain, &request, homeostat_helper::PATIENCE) {
            Ok((Reply::Behind(path), _)) => path,
            Ok(_) | Err(_) => None,
        }
    }

    /// The file that an id names: the main executable by name or path, or a mapped library.
    fn find(root: &Root, workload: &Workload, name: &str) -> Result<Self, String> {
        let executable = workload
            .executable
            .strip_suffix(" (deleted)")
            .unwrap_or(&workload.executable);
        let base = executable.rsplit('/').next().unwrap_or_default();
        if name == executable || (!name.contains('/') && (name == base || name == workload.program)) {
            return Self::main(root, workload);
        }
        let process = Self::process(root, workload)?;
        let all = mappings(root, process);
        let named = all
            .iter()
            .find(|m| m.path == name || (!name.contains('/') && m.path.rsplit('/').next() == Some(name)));
        let mapping = if let Some(named) = named {
            named.clone()
        } else {
            // A well-known path may be a link: Debian's redis-server links to redis-check-rdb. It is resolved where
            // homeostat runs, but only selects a mapping, which is opened through the process.
            let behind = Self::behind(root, process, name);
            if behind.as_deref() == Some(executable) {
                return Self::main(root, workload);
            }
            all.into_iter()
                .find(|m| behind.as_deref() == Some(m.path.as_str()))
                .ok_or_else(|| {
                    format!(
                        "process {process} has no code of {name} mapped that can be seen; name the program or one of its libraries (by \
                         its bare name where the path is a link inside a container), and run homeostat as root"
                    )
                })?
        };
        let file = CodeFile::mapped(root, process, &mapping)?;
        Ok(Self::new(file, mapping, false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_parsed_and_wrong_ones_explained() {
        assert_eq!(
            Wanted::parse("uprobe:/usr/bin/x:f"),
            Ok(Wanted::Function {
                binary: "/usr/bin/x".into(),
                symbol: "f".into()
            })
        );
        assert_eq!(
            Wanted::parse("usdt:libx.so:prov:n"),
            Ok(Wanted::Static {
                binary: "libx.so".into(),
                provider: "prov".into(),
                name: "n".into()
            })
        );
        for bad in ["uprobe:", "uprobe:x", "uprobe::f", "uprobe:x:", "uprobe:x:\x07"] {
            assert!(
                Wanted::parse(bad).unwrap_err().contains("uprobe:BINARY:SYMBOL"),
                "{bad}"
            );
        }
        for bad in ["usdt:", "usdt:x", "usdt:x:y", "usdt:x::z", "usdt::y:z"] {
            assert!(
                Wanted::parse(bad)
                    .unwrap_err()
                    .contains("usdt:BINARY:PROVIDER:NAME"),
                "{bad}"
            );
        }
        assert!(Wanted::parse("x").is_err());
    }
}
