//! Server-sent events from bytes that arrive in arbitrary pieces.
//!
//! Only the `data` field matters here. Lines end with LF or CR LF; a lone CR, which the standard
//! allows too, is sent by no server we know and would cost a look-ahead across pieces.

/// No honest event of a chat stream is larger.
const EVENT_BYTES_MAX: usize = 8 << 20;

/// Keeps the unfinished tail between pieces.
#[derive(Debug, Default)]
pub(crate) struct SseParser {
    line: Vec<u8>,
    data: Option<Vec<u8>>,
}

/// An event grew beyond 8 MiB, so this is not a chat stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EventTooLong;

impl std::fmt::Display for EventTooLong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an event is longer than {EVENT_BYTES_MAX} bytes")
    }
}

impl std::error::Error for EventTooLong {}

impl SseParser {
    /// Takes the next piece and returns the `data` of every event that it completes.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<Vec<String>, EventTooLong> {
        let mut events = Vec::new();
        let mut rest = piece;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            self.line.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            events.extend(self.end_line());
            self.check_size()?;
        }
        self.line.extend_from_slice(rest);
        self.check_size()?;
        Ok(events)
    }

    fn end_line(&mut self) -> Option<String> {
        let mut line = std::mem::take(&mut self.line);
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        if line.is_empty() {
            return self.data.take().map(|data| String::from_utf8_lossy(&data).into_owned());
        }
        if let Some(value) = line.strip_prefix(b"data:".as_slice()) {
            let value = value.strip_prefix(b" ".as_slice()).unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
                None => self.data = Some(value.to_vec()),
            }
        }
        None
    }

    fn check_size(&self) -> Result<(), EventTooLong> {
        let held = self.line.len() + self.data.as_ref().map_or(0, Vec::len);
        if held > EVENT_BYTES_MAX { Err(EventTooLong) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str =
        ": hello\r\ndata: {\"a\":\"é\"}\r\n\r\nevent: x\ndata:one\ndata: two\n\n\n\ndata: [DONE]\n\n";

    #[test]
    fn every_split_gives_the_same_events() {
        let expected = vec!["{\"a\":\"é\"}", "one\ntwo", "[DONE]"];
        for size in 1..=STREAM.len() {
            let mut parser = SseParser::default();
            let events: Vec<String> =
                STREAM.as_bytes().chunks(size).flat_map(|piece| parser.push(piece).unwrap()).collect();
            assert_eq!(events, expected, "pieces of {size} bytes");
        }
    }

    #[test]
    fn an_unfinished_event_is_not_reported() {
        let mut parser = SseParser::default();
        assert_eq!(parser.push(b"data: half\n").unwrap(), Vec::<String>::new());
        assert_eq!(parser.push(b"\n").unwrap(), vec!["half"]);
    }

    #[test]
    fn a_line_without_end_is_an_error_and_not_a_full_memory() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; 1 << 20];
        let outcome = (0..16).map(|_| parser.push(&piece)).find(Result::is_err);
        assert_eq!(outcome, Some(Err(EventTooLong)));
    }
}
