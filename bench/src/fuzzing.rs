//! The stream parser, for `fuzz/`: everywhere else its bytes come from a server.

use crate::chunk::{StreamEvent, read_event};
use crate::sse::SseParser;

/// The events of a stream that arrives in pieces of `piece_bytes`.
pub fn events(stream: &[u8], piece_bytes: usize) -> Result<Vec<String>, String> {
    let mut parser = SseParser::default();
    let mut events = Vec::new();
    for piece in stream.chunks(piece_bytes) {
        events.extend(parser.push(piece).map_err(|error| error.to_string())?);
    }
    Ok(events)
}

/// Whether an event ends the stream; the error that it carries, if it does.
pub fn ends(data: &str) -> Result<bool, String> {
    match read_event(data) {
        StreamEvent::Done => Ok(true),
        StreamEvent::Chunk { .. } => Ok(false),
        StreamEvent::Error(message) => Err(message),
    }
}
