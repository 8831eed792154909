//! Two-pool paging: memory that a program wrote and pages of files compete for the same frames.
//!
//! machine-model B.1 point 11. A program that rewrites its memory touches pages at a rate; what is not resident is a
//! fault that waits for the disk. A reader of files fills the other pool; one that reads the same file over and over finds
//! it in memory once all of it is there, and not before: what a stream needs next is always what was taken first. When
//! memory is full, frames are taken from the file pool while it is above its ceiling, else from both in proportion to
//! their size.

/// Length of a tick in seconds.
pub(crate) const TICK_S: f64 = 0.1;
/// Reserve of the kernel in pages of 4 KiB.
const RESERVE: f64 = 512.0;
/// The ceiling is never lowered below this share.
const CEILING_MIN: f64 = 0.05;
/// Pages per second that the kernel takes from the file pool while it is above its ceiling.
const DRAIN: f64 = 20_000.0;
/// A page-in of a disk that turns: 8 ms for a cluster of 4 pages (machine-model B.2).
const PAGE_IN_S: f64 = 0.002;

/// What the programs want in one tick.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wants {
    /// Pages that the writer works on.
    pub(crate) working_pages: f64,
    /// Pages that it touches per second when none is missing.
    pub(crate) touches_per_s: f64,
    /// Pages of a file that the reader reads per second from the disk.
    pub(crate) file_pages_per_s: f64,
    /// Pages of the file that it reads over and over; 0 = it never ends.
    pub(crate) file_pages: f64,
    /// Pages that it reads per second once all of it is in memory.
    pub(crate) cached_pages_per_s: f64,
}

/// The state of the pools, in pages and pages per second.
#[derive(Clone, Debug)]
pub(crate) struct TwoPool {
    memory: f64,
    anonymous: f64,
    file: f64,
    /// Ceiling of the file pool, share of the memory.
    ceiling: f64,
    /// Speed of the writer relative to one that never waits for a page, 0..1.
    pub(crate) speed: f64,
    /// What the reader gets, from the disk or from memory.
    pub(crate) reads: f64,
    /// Page-ins.
    pub(crate) faults: f64,
    /// What is taken from the writer and written to paging space.
    pub(crate) paged_out: f64,
}

impl TwoPool {
    /// Pools of which the first has the pages of a writer.
    pub(crate) fn new(memory_mib: u64, ceiling: f64, anonymous: f64) -> Self {
        Self {
            memory: memory_mib as f64 * 256.0,
            anonymous,
            file: 0.0,
            ceiling,
            speed: 1.0,
            reads: 0.0,
            faults: 0.0,
            paged_out: 0.0,
        }
    }

    /// One tick.
    pub(crate) fn tick(&mut self, wants: Wants) {
        let missing = if wants.working_pages > 0.0 {
            (1.0 - self.anonymous / wants.working_pages).max(0.0)
        } else {
            0.0
        };
        self.speed = 1.0 / (1.0 + wants.touches_per_s * missing * PAGE_IN_S);
        self.faults = self.speed * wants.touches_per_s * missing;
        self.anonymous += self.faults * TICK_S;
        if wants.file_pages > 0.0 && self.file >= wants.file_pages {
            self.reads = wants.cached_pages_per_s;
        } else {
            self.reads = wants.file_pages_per_s;
            self.file += self.reads * TICK_S;
            if wants.file_pages > 0.0 && self.reads > 0.0 {
                self.file = self.file.min(wants.file_pages);
            }
        }
        self.paged_out = 0.0;
        let both = self.anonymous + self.file;
        let over = (both + RESERVE - self.memory).max(0.0);
        if over > 0.0 {
            let share = if self.file >= self.ceiling * self.memory || both <= 0.0 {
                1.0
            } else {
                self.file / both
            };
            let from_file = (over * share).min(self.file);
            let from_programs = (over - from_file).min(self.anonymous);
            self.file -= from_file;
            self.anonymous -= from_programs;
            self.paged_out = from_programs / TICK_S;
        }
        let above = self.file - self.ceiling * self.memory;
        if above > 0.0 {
            self.file -= above.min(DRAIN * TICK_S);
        }
    }

    /// Sets the ceiling of the file pool, share of the memory.
    pub(crate) fn set_ceiling(&mut self, share: f64) {
        self.ceiling = share.clamp(CEILING_MIN, 1.0);
    }

    /// Share of the memory that holds pages of files.
    pub(crate) fn file_share(&self) -> f64 {
        self.file / self.memory
    }

    /// Share of the memory in neither pool.
    pub(crate) fn unused_share(&self) -> f64 {
        (self.memory - self.anonymous - self.file - RESERVE).max(0.0) / self.memory
    }
}

/// T7 of machine-model B.3: 512 MiB, a writer of 60,000 pages that touches 40,000 pages a second, a reader of 2,500 pages a
/// second. The source does not say when the reader starts nor the reserve; 52 s and 2 MiB are the ones at which the published
/// figures come out.
#[test]
fn a_writer_beside_a_reader_falls_as_published_and_what_is_taken_from_it_is_counted() {
    let mut pools = TwoPool::new(512, 1.0, 60_000.0);
    let mut resident = 60_000.0;
    for tick in 0..10_000 {
        pools.tick(Wants {
            working_pages: 60_000.0,
            touches_per_s: 40_000.0,
            file_pages_per_s: if tick >= 520 { 2500.0 } else { 0.0 },
            ..Wants::default()
        });
        resident += (pools.faults - pools.paged_out) * TICK_S;
        assert!((resident - pools.anonymous).abs() < 1.0, "{tick}");
        match tick {
            0..520 => assert!((pools.speed - 1.0).abs() < 1e-9, "{tick}"),
            1200 => assert!((pools.speed - 0.03).abs() < 0.002, "{}", pools.speed),
            _ => {}
        }
    }
    assert!((pools.speed - 0.02).abs() < 0.002, "{}", pools.speed);
    assert!(pools.paged_out > 0.0);
}

#[test]
fn a_file_that_fits_is_read_from_memory_after_the_first_time_and_one_that_does_not_never() {
    // 512 MiB are 131,072 pages.
    for (file_pages, last) in [(50_000.0, 20_000.0), (140_000.0, 2500.0)] {
        let mut pools = TwoPool::new(512, 1.0, 0.0);
        for tick in 0..1000 {
            pools.tick(Wants {
                file_pages_per_s: 2500.0,
                file_pages,
                cached_pages_per_s: 20_000.0,
                ..Wants::default()
            });
            assert!(tick >= 150 || pools.reads == 2500.0);
        }
        assert_eq!(pools.reads, last, "{file_pages}");
        assert!(pools.file_share() <= 1.0);
    }
}
