//! Two-pool paging: memory that a program wrote and pages of files compete for the same frames.
//!
//! machine-model B.1 point 11. A program that rewrites its memory touches pages at a rate; what is not resident is a
//! fault that waits for the disk. A reader of files fills the other pool; one that reads the same file over and over finds
//! it in memory once all of it is there, and not before: what a stream needs next is always what was taken first. When
//! memory is full, frames are taken from the file pool while it is above its ceiling, else from both in proportion to
//! their size.

use crate::disk::Disk;
use homeostat_model::Bytes;
use serde::{Deserialize, Serialize};

/// Length of a tick in seconds.
pub const TICK_S: f64 = 0.1;
/// Fewer page-ins per second than this are no sign of pressure (machine-model B.1 point 11).
const QUIET_FAULTS: f64 = 5.0;
/// The ceiling is never lowered below this share.
const CEILING_MIN: f64 = 0.05;
/// Pages per second that the kernel takes from the file pool while it is above its ceiling.
const DRAIN: f64 = 20_000.0;
/// Quiet periods after which the ceiling is raised by a quarter step.
const QUIET_PERIODS: u32 = 12;

/// The pools and who uses them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PagingSpec {
    /// Memory of both pools and the reserve, in MiB.
    pub memory_mib: u64,
    /// Reserve of the kernel in pages.
    pub reserve_pages: u64,
    /// Page size in bytes.
    pub page_bytes: u64,
    /// Ceiling of the file pool as found, share of the memory, 0.05..1.
    pub file_ceiling: f64,
    /// The disk behind both.
    pub disk: Disk,
    /// Whether page-ins wait in the queue of the disk behind the reader's stream.
    pub queue: bool,
    /// A controller of the ceiling that somebody runs on this machine.
    pub controller: Option<Controller>,
}

impl Default for PagingSpec {
    fn default() -> Self {
        Self {
            memory_mib: 512,
            reserve_pages: 512,
            page_bytes: 4096,
            file_ceiling: 1.0,
            disk: Disk::default(),
            queue: false,
            controller: None,
        }
    }
}

impl PagingSpec {
    /// What is wrong with it.
    pub fn complaints(&self) -> Vec<String> {
        let mut wrong = self.disk.complaints();
        let mut check = |ok: bool, text: String| {
            if !ok {
                wrong.push(text);
            }
        };
        check(
            (1..=1 << 24).contains(&self.memory_mib),
            format!(
                "paging.memory_mib = {}: must be between 1 and 16777216",
                self.memory_mib
            ),
        );
        check(
            self.page_bytes.is_power_of_two() && (1024..=1 << 24).contains(&self.page_bytes),
            format!(
                "paging.page_bytes = {}: must be a power of two from 1024",
                self.page_bytes
            ),
        );
        check(
            (CEILING_MIN..=1.0).contains(&self.file_ceiling),
            format!(
                "paging.file_ceiling = {}: must be between 0.05 and 1",
                self.file_ceiling
            ),
        );
        if let Some(c) = &self.controller {
            check(
                c.every_s >= TICK_S && c.step > 0.0 && c.step < 1.0 && c.from_s >= 0.0,
                "paging.controller: every_s must be at least 0.1, step between 0 and 1, from_s not negative"
                    .into(),
            );
        }
        wrong
    }
}

/// Lowers the ceiling of the file pool while programs wait for their pages (as autotune did, seed 003).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Controller {
    /// Starts at this time in seconds.
    pub from_s: f64,
    /// Looks every so many seconds.
    pub every_s: f64,
    /// Lowers the ceiling by this share of the memory.
    pub step: f64,
}

/// What the programs want in one tick.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wants {
    /// Pages that the writers work on.
    pub working_pages: f64,
    /// Pages that they touch per second when none is missing.
    pub touches_per_s: f64,
    /// Pages of files that the readers read per second from an idle disk.
    pub file_pages_per_s: f64,
    /// Pages of the file that they read over and over; 0 = it never ends.
    pub file_pages: f64,
    /// Pages that they read per second once all of it is in memory.
    pub cached_pages_per_s: f64,
}

/// The state of the pools.
#[derive(Clone, Debug, PartialEq)]
pub struct TwoPool {
    spec: PagingSpec,
    memory_pages: f64,
    anonymous: f64,
    file: f64,
    ceiling: f64,
    next_control_s: f64,
    quiet: u32,
    speed: f64,
    read_speed: f64,
    reads: f64,
    faults: f64,
    paged_out: f64,
}

impl TwoPool {
    /// Empty pools.
    pub fn new(spec: PagingSpec) -> Self {
        Self {
            memory_pages: (spec.memory_mib * 1024 * 1024 / spec.page_bytes.max(1)) as f64,
            anonymous: 0.0,
            file: 0.0,
            ceiling: spec.file_ceiling,
            next_control_s: spec.controller.map_or(f64::INFINITY, |c| c.from_s),
            quiet: 0,
            speed: 1.0,
            read_speed: 1.0,
            reads: 0.0,
            faults: 0.0,
            paged_out: 0.0,
            spec,
        }
    }

    /// A writer starts: its working set becomes resident, as far as there is room.
    pub fn populate(&mut self, pages: f64) {
        let room = self.memory_pages - self.spec.reserve_pages as f64 - self.anonymous - self.file;
        self.anonymous += pages.min(room.max(0.0));
    }

    /// A writer asks for memory that it has not written yet: nothing has to be read, and what there is no room for is taken
    /// from both pools in the next tick.
    pub fn allocate(&mut self, pages: f64) {
        self.anonymous = (self.anonymous + pages.max(0.0)).min(self.memory_pages);
    }

    /// A writer ends: its share of the pool is free.
    pub fn free(&mut self, share: f64) {
        self.anonymous *= 1.0 - share.clamp(0.0, 1.0);
    }

    /// One tick that starts at `at_s`.
    pub fn tick(&mut self, at_s: f64, wants: Wants) {
        let page = self.spec.page_bytes as f64;
        let missing = if wants.working_pages > 0.0 {
            (1.0 - self.anonymous / wants.working_pages).max(0.0)
        } else {
            0.0
        };
        let is_cached = wants.file_pages > 0.0 && self.file >= wants.file_pages;
        let stream = if is_cached {
            0.0
        } else {
            wants.file_pages_per_s * page
        };
        let others = if self.spec.queue {
            self.spec.disk.busy(0.0, Bytes((stream * self.read_speed) as u64))
        } else {
            0.0
        };
        let wait = self.spec.disk.page_in_behind_s(others);
        self.speed = 1.0 / (1.0 + wants.touches_per_s * missing * wait);
        self.faults = self.speed * wants.touches_per_s * missing;
        self.anonymous += self.faults * TICK_S;
        let got = if self.spec.queue {
            self.spec.disk.stream_beside(stream, self.faults)
        } else {
            stream
        };
        self.read_speed = if stream > 0.0 { got / stream } else { 1.0 };
        self.reads = if is_cached {
            wants.cached_pages_per_s
        } else {
            got / page
        };
        self.file += got / page * TICK_S;
        if wants.file_pages > 0.0 && stream > 0.0 {
            self.file = self.file.min(wants.file_pages);
        }
        self.paged_out = 0.0;
        let over = (self.anonymous + self.file + self.spec.reserve_pages as f64 - self.memory_pages).max(0.0);
        if over > 0.0 {
            let both = self.anonymous + self.file;
            let share = if self.file >= self.ceiling * self.memory_pages || both <= 0.0 {
                1.0
            } else {
                self.file / both
            };
            let from_file = (over * share).min(self.file);
            self.file -= from_file;
            let from_programs = (over - from_file).min(self.anonymous);
            self.anonymous -= from_programs;
            self.paged_out = from_programs / TICK_S;
        }
        let above = self.file - self.ceiling * self.memory_pages;
        if above > 0.0 {
            self.file -= above.min(DRAIN * TICK_S);
        }
        if let Some(c) = self.spec.controller {
            if at_s + 1e-9 >= self.next_control_s {
                self.next_control_s += c.every_s;
                self.control(c.step);
            }
        }
    }

    fn control(&mut self, step: f64) {
        if self.faults > QUIET_FAULTS {
            self.quiet = 0;
            if self.ceiling > CEILING_MIN {
                self.ceiling = (self.ceiling.min(self.file_share()) - step).max(CEILING_MIN);
            }
        } else {
            self.quiet += 1;
            if self.quiet >= QUIET_PERIODS {
                self.quiet = 0;
                self.ceiling = (self.ceiling + step / 4.0).min(self.spec.file_ceiling);
            }
        }
    }

    /// Sets the ceiling of the file pool, share of the memory.
    pub fn set_ceiling(&mut self, share: f64) {
        self.ceiling = share.clamp(CEILING_MIN, 1.0);
    }
    /// Ceiling of the file pool, share of the memory.
    pub fn ceiling(&self) -> f64 {
        self.ceiling
    }
    /// Speed of the writers relative to one that never waits for a page, 0..1.
    pub fn speed(&self) -> f64 {
        self.speed
    }
    /// Speed of the readers relative to an idle disk, 0..1.
    pub fn read_speed(&self) -> f64 {
        self.read_speed
    }
    /// Pages per second that the readers get, from the disk or from memory.
    pub fn reads(&self) -> f64 {
        self.reads
    }
    /// Pages per second that are taken from the writers, and written to paging space.
    pub fn paged_out(&self) -> f64 {
        self.paged_out
    }
    /// Page-ins per second.
    pub fn faults(&self) -> f64 {
        self.faults
    }
    /// Share of the memory that holds pages of files.
    pub fn file_share(&self) -> f64 {
        self.file / self.memory_pages.max(1.0)
    }
    /// Resident memory of the writers.
    pub fn anonymous(&self) -> Bytes {
        Bytes((self.anonymous * self.spec.page_bytes as f64) as u64)
    }
    /// Memory that holds pages of files.
    pub fn file(&self) -> Bytes {
        Bytes((self.file * self.spec.page_bytes as f64) as u64)
    }
    /// Memory of both pools and the reserve.
    pub fn memory(&self) -> Bytes {
        Bytes(self.spec.memory_mib * 1024 * 1024)
    }
    /// Memory in neither pool.
    pub fn unused(&self) -> Bytes {
        let used = self.anonymous + self.file + self.spec.reserve_pages as f64;
        Bytes(((self.memory_pages - used).max(0.0) * self.spec.page_bytes as f64) as u64)
    }
    /// Page size.
    pub fn page(&self) -> Bytes {
        Bytes(self.spec.page_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T7 of machine-model B.3: 512 MiB, a writer of 60,000 pages that touches 40,000 pages a second, a reader of 2,500
    /// pages a second. The source does not say when the reader starts nor the reserve; 52 s and 2 MiB are the ones at
    /// which all five published figures come out.
    fn t7(controller: Option<Controller>, until_s: f64) -> Vec<(f64, f64, f64)> {
        let mut pools = TwoPool::new(PagingSpec {
            controller,
            ..PagingSpec::default()
        });
        pools.populate(60_000.0);
        (0..(until_s / TICK_S) as u64)
            .map(|i| {
                let at = i as f64 * TICK_S;
                pools.tick(
                    at,
                    Wants {
                        working_pages: 60_000.0,
                        touches_per_s: 40_000.0,
                        file_pages_per_s: if at >= 52.0 { 2500.0 } else { 0.0 },
                        ..Wants::default()
                    },
                );
                (at, pools.speed(), pools.file_share())
            })
            .collect()
    }

    #[test]
    fn oracle_t7_with_and_without_control() {
        let control = Controller {
            from_s: 120.0,
            every_s: 10.0,
            step: 0.05,
        };
        let with = t7(Some(control), 181.0);
        let at = |s: f64| with[(s / TICK_S) as usize];
        assert!((at(120.0).1 - 0.03).abs() < 0.002, "{:?}", at(120.0));
        assert!((at(180.0).1 - 0.995).abs() < 0.005, "{:?}", at(180.0));
        assert!((at(180.0).2 - 0.417).abs() < 0.002, "{:?}", at(180.0));
        let recovered = with.iter().find(|x| x.0 > 120.0 && x.1 > 0.95).unwrap().0 - 120.0;
        assert!((recovered - 56.8).abs() < 1.0, "{recovered}");
        let without = t7(None, 1000.0);
        assert!(
            (without.last().unwrap().1 - 0.02).abs() < 0.002,
            "{:?}",
            without.last()
        );
    }

    #[test]
    fn enough_memory_is_never_taken_and_the_ceiling_rises_again_when_it_is_quiet() {
        let spec = PagingSpec {
            memory_mib: 2048,
            controller: Some(Controller {
                from_s: 0.0,
                every_s: 1.0,
                step: 0.04,
            }),
            ..PagingSpec::default()
        };
        let mut pools = TwoPool::new(spec);
        pools.populate(1000.0);
        pools.set_ceiling(0.5);
        for i in 0..400 {
            pools.tick(
                i as f64 * TICK_S,
                Wants {
                    working_pages: 1000.0,
                    touches_per_s: 1e5,
                    file_pages_per_s: 10.0,
                    ..Wants::default()
                },
            );
        }
        assert_eq!(pools.speed(), 1.0);
        assert!((pools.ceiling() - 0.53).abs() < 1e-9, "{}", pools.ceiling());
    }

    #[test]
    fn a_reader_slows_page_ins_through_the_queue_of_the_disk() {
        let run = |queue| {
            let mut pools = TwoPool::new(PagingSpec {
                memory_mib: 64,
                queue,
                ..PagingSpec::default()
            });
            for i in 0..200 {
                pools.tick(
                    i as f64 * TICK_S,
                    Wants {
                        working_pages: 60_000.0,
                        touches_per_s: 1e4,
                        file_pages_per_s: 15_000.0,
                        ..Wants::default()
                    },
                );
            }
            pools.speed()
        };
        assert!(run(true) < run(false) * 0.8, "{} {}", run(true), run(false));
    }

    #[test]
    fn a_file_that_fits_is_read_from_memory_after_the_first_time_and_one_that_does_not_never() {
        let wants = |file_pages| Wants {
            file_pages_per_s: 2500.0,
            file_pages,
            cached_pages_per_s: 20_000.0,
            ..Wants::default()
        };
        // 512 MiB are 131,072 pages.
        for (file_pages, last) in [(50_000.0, 20_000.0), (140_000.0, 2500.0)] {
            let mut pools = TwoPool::new(PagingSpec::default());
            for i in 0..1000 {
                pools.tick(f64::from(i) * TICK_S, wants(file_pages));
                if i < 150 {
                    assert_eq!(pools.reads(), 2500.0);
                }
            }
            assert_eq!(pools.reads(), last, "{file_pages}");
            assert!(pools.file_share() <= 1.0);
        }
    }

    #[test]
    fn what_is_taken_from_the_writers_is_counted_and_nothing_else_is() {
        let mut pools = TwoPool::new(PagingSpec::default());
        pools.populate(60_000.0);
        let page = pools.page().0 as f64;
        let mut resident = 60_000.0;
        for i in 0..600 {
            let wants = Wants {
                working_pages: 60_000.0,
                touches_per_s: 40_000.0,
                file_pages_per_s: 2500.0,
                ..Wants::default()
            };
            pools.tick(f64::from(i) * TICK_S, wants);
            resident += (pools.faults() - pools.paged_out()) * TICK_S;
            assert!((resident - pools.anonymous().0 as f64 / page).abs() < 1.0, "{i}");
        }
        assert!(pools.paged_out() > 0.0);
        // New memory is there at once, and what it displaces goes in the next tick.
        pools.allocate(40_000.0);
        pools.tick(60.0, Wants::default());
        assert!(pools.paged_out() > 0.0 && pools.unused().0 == 0);
    }
}
