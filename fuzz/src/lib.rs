//! What the targets share: memory that is counted, and inputs that say how they
//! want to be read.

pub mod asked;
pub mod states;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static HELD_MAX: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; the counters
// allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        HELD_MAX.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        HELD_MAX.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `decode` and fails if it holds more than `bytes_max` at any time.
pub fn holding_at_most<T>(bytes_max: usize, decode: impl FnOnce() -> T) -> T {
    let before = HELD.load(Ordering::Relaxed);
    HELD_MAX.store(before, Ordering::Relaxed);
    let decoded = decode();
    let held = HELD_MAX.load(Ordering::Relaxed) - before;
    assert!(held <= bytes_max, "{held} bytes of memory, allowed {bytes_max}");
    decoded
}

/// Room for error texts and other things that do not grow with the input.
pub const SMALL_BYTES: usize = 64 << 10;

/// What JSON may take per byte: an object of three bytes is a map.
pub const TREE_FACTOR: usize = 512;

/// What TOML may take per byte, which comes from the operator: its parser keeps
/// several events and an error for each wrong byte.
pub const TOML_FACTOR: usize = 4096;

/// The first byte of an input, which says how the rest is read.
pub fn choice(input: &[u8]) -> Option<(u8, &[u8])> {
    input.split_first().map(|(&choice, rest)| (choice, rest))
}

/// `N` numbers from the start of an input.
pub fn numbers<const N: usize>(input: &[u8]) -> Option<([usize; N], &[u8])> {
    let (head, rest) = input.split_at_checked(2 * N)?;
    let number = |index| u16::from_le_bytes([head[2 * index], head[2 * index + 1]]).into();
    Some((std::array::from_fn(number), rest))
}
