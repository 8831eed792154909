//! Counts what a test allocates: an allocator that is the system's and counts the calls of each thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted.
struct Counted;

#[global_allocator]
static COUNTED: Counted = Counted;

fn count() {
    // A thread that ends has no count any more.
    let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
}

// SAFETY: everything is the system allocator's; counting allocates nothing (a constant thread-local without a destructor).
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller; all memory comes from there.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as promised by the caller; all memory comes from there.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// What it returns, and how often it allocated on this thread.
pub(crate) fn of<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let now = || ALLOCATIONS.with(Cell::get);
    let before = now();
    let done = work();
    (done, now() - before)
}

#[cfg(test)]
mod tests {
    #[test]
    fn allocations_are_seen() {
        let (list, allocated) = super::of(|| vec![1u8; 100]);
        assert_eq!((list.len(), allocated), (100, 1));
        assert_eq!(super::of(|| 1 + 1), (2, 0));
    }
}
