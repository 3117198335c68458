//! Server-sent events: where a stream is cut changes nothing, and nothing that a
//! server writes makes a line of the report long.
#![no_main]

use bench::fuzzing::{ends, events};
use fuzz::{SMALL_BYTES, TREE_FACTOR, choice, holding_at_most};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((piece_bytes, stream)) = choice(input) else { return };
    let memory = 16 * stream.len() + SMALL_BYTES;
    let whole = holding_at_most(memory, || events(stream, usize::MAX)).expect("shorter than the bound");
    let pieces = events(stream, usize::from(piece_bytes) + 1).expect("shorter than the bound");
    assert_eq!(whole, pieces);
    for event in whole {
        let memory = TREE_FACTOR * event.len() + SMALL_BYTES;
        if let Err(message) = holding_at_most(memory, || ends(&event)) {
            assert!(message.chars().count() <= 320 && !message.contains('\n'), "{message:?}");
        }
    }
});
