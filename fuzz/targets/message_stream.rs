//! Length-prefixed messages that arrive in pieces: where they are cut changes
//! nothing, and memory grows with the bytes that came.
#![no_main]

use fuzz::choice;
use kv_transfer::fuzzing::read_stream;
use kv_transfer::{ControlMessage, Generate, HandoffMessage, Message, PrefillRequest, RequestEvent};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((piece_bytes, stream)) = choice(input) else { return };
    let piece_bytes = usize::from(piece_bytes) + 1;
    // The kind that the first message claims.
    match stream.get(4) {
        Some(2) => check::<Generate>(stream, piece_bytes),
        Some(3) => check::<RequestEvent>(stream, piece_bytes),
        Some(4) => check::<PrefillRequest>(stream, piece_bytes),
        Some(5) => check::<HandoffMessage>(stream, piece_bytes),
        _ => check::<ControlMessage>(stream, piece_bytes),
    }
});

fn check<M: Message>(stream: &[u8], piece_bytes: usize) {
    let (whole, whole_error, whole_held) = read_stream::<M>(stream, usize::MAX);
    let (pieces, pieces_error, pieces_held) = read_stream::<M>(stream, piece_bytes);
    assert_eq!(encodings(&whole), encodings(&pieces));
    assert_eq!(whole_error.map(|error| error.to_string()), pieces_error.map(|error| error.to_string()));
    for held in [whole_held, pieces_held] {
        // Twice: a vector doubles when it grows, and begins with eight bytes.
        assert!(held <= 2 * stream.len() + 8, "{held} bytes held of {}", stream.len());
        assert!(held <= 2 * (M::BYTES_MAX + 4), "{held} bytes held");
    }
}

fn encodings<M: Message>(messages: &[M]) -> Vec<Vec<u8>> {
    messages.iter().map(Message::encode).collect()
}
