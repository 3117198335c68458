//! Length-prefixed messages on a bidirectional stream.
//!
//! ```text
//!  u32 length (little-endian) │ u8 kind │ rkyv encoding of one message │ u32 length │ …
//! ```
//!
//! rkyv's bytes do not say what they are, and the tail of a long message may
//! well be valid as another: the kind says it.
//!
//! The length is checked against the type's bound before anything is
//! allocated, and memory grows with the bytes that came, not with the bytes
//! that were announced.

use bytes::Bytes;
use rkyv::rancor;

use crate::connection::{CODE_CANCELLED, read_error, write_error};
use crate::{ControlMessage, Generate, HandoffMessage, PrefillRequest, RequestEvent, TransferError};

/// A type that may be sent whole on a stream.
pub trait Message: Sized + Send {
    /// First byte of the encoding, different for each type.
    const KIND: u8;
    /// Name in errors.
    const NAME: &'static str;
    /// Longest encoding accepted, in bytes.
    const BYTES_MAX: usize;
    /// Encodes for the wire.
    fn encode(&self) -> Vec<u8>;
    /// Validates and decodes peer bytes; never panics.
    fn decode(bytes: &[u8]) -> Result<Self, TransferError>;
}

/// Room for everything in a message but its long list: names, reasons, numbers.
const SMALL_BYTES_MAX: usize = 64 << 10;
/// 1,048,576 tokens: the longest context that any model has today.
const TOKENS_BYTES_MAX: usize = 4 << 20;
/// 65,536 block hashes: that context in blocks of 16 tokens.
const HASHES_BYTES_MAX: usize = 2 << 20;

macro_rules! message {
    ($type:ty, $kind:literal, $name:literal, $bytes_max:expr) => {
        impl Message for $type {
            const KIND: u8 = $kind;
            const NAME: &'static str = $name;
            const BYTES_MAX: usize = $bytes_max;

            fn encode(&self) -> Vec<u8> {
                rkyv::api::high::to_bytes_in::<_, rancor::Error>(self, vec![Self::KIND])
                    .expect("encoding into memory cannot fail")
            }

            fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
                let archived = strip_kind::<Self>(bytes)?;
                // No words of rkyv's: without debug assertions it has none, with them
                // they hold addresses of this process.
                rkyv::from_bytes::<Self, rancor::Failure>(archived)
                    .map_err(|_| malformed(Self::NAME, "the bytes hold no such message"))
            }
        }
    };
}

message!(ControlMessage, 1, "control message", HASHES_BYTES_MAX + SMALL_BYTES_MAX);
message!(Generate, 2, "generate request", TOKENS_BYTES_MAX + SMALL_BYTES_MAX);
message!(RequestEvent, 3, "request event", SMALL_BYTES_MAX);
message!(PrefillRequest, 4, "prefill request", TOKENS_BYTES_MAX + SMALL_BYTES_MAX);
message!(HandoffMessage, 5, "handoff message", SMALL_BYTES_MAX);

fn strip_kind<M: Message>(bytes: &[u8]) -> Result<&[u8], TransferError> {
    match bytes.split_first() {
        Some((&kind, archived)) if kind == M::KIND => Ok(archived),
        Some((kind, _)) => Err(malformed(M::NAME, format!("kind is {kind}, expected {}", M::KIND))),
        None => Err(malformed(M::NAME, "it is empty")),
    }
}

/// Sending half of a message stream. Dropping it without `finish` resets the stream.
pub struct MessageSender {
    stream: quinn::SendStream,
    finished: bool,
    /// A `send` began and did not end: it failed, or its future was dropped.
    /// Part of a message may be on its way, so nothing may follow it.
    cut: bool,
}

impl MessageSender {
    pub(crate) fn new(stream: quinn::SendStream) -> Self {
        Self { stream, finished: false, cut: false }
    }

    /// Sends one message; waits while the peer's window is full.
    ///
    /// Not cancel-safe: if the future is dropped the stream can only be reset.
    pub async fn send<M: Message>(&mut self, message: &M) -> Result<(), TransferError> {
        let framed = frame(message)?;
        if self.cut {
            return Err(TransferError::Lost("an earlier message was cut off".into()));
        }
        self.cut = true;
        self.stream.write_chunk(framed).await.map_err(write_error)?;
        self.cut = false;
        Ok(())
    }

    /// Ends the stream in order.
    pub fn finish(mut self) {
        if !self.cut {
            // An error means that the peer stopped or the connection is gone:
            // the stream has ended already.
            let _ = self.stream.finish();
            self.finished = true;
        }
    }

    /// Ends the stream at once; unsent bytes are dropped.
    pub fn reset(self) {}

    /// Resolves when the peer stopped reading or the connection is gone.
    pub async fn stopped(&mut self) {
        let _ = self.stream.stopped().await;
    }
}

impl Drop for MessageSender {
    fn drop(&mut self) {
        // quinn would finish the stream, and the peer would take what came for
        // everything.
        if !self.finished {
            let _ = self.stream.reset(CODE_CANCELLED);
        }
    }
}

/// Receiving half of a message stream. Dropping it tells the peer to stop.
pub struct MessageReceiver {
    stream: quinn::RecvStream,
    pending: Pending,
}

impl MessageReceiver {
    pub(crate) fn new(stream: quinn::RecvStream) -> Self {
        Self { stream, pending: Pending::default() }
    }

    /// Next message; `None` after the peer finished in order. Cancel-safe.
    pub async fn recv<M: Message>(&mut self) -> Result<Option<M>, TransferError> {
        loop {
            let missing = match self.pending.next::<M>()? {
                Next::Message(message) => return Ok(Some(message)),
                Next::Missing(bytes) => bytes,
            };
            match self.stream.read_chunk(missing, true).await.map_err(read_error)? {
                Some(chunk) => self.pending.push(&chunk.bytes),
                None if self.pending.is_empty() => return Ok(None),
                None => return Err(malformed(M::NAME, "the stream ended inside it")),
            }
        }
    }
}

/// Bytes of a message that is not complete yet, its length prefix first.
#[derive(Default)]
pub(crate) struct Pending(Vec<u8>);

pub(crate) enum Next<M> {
    Message(M),
    Missing(usize),
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Bytes of memory held.
    pub(crate) fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// The message, if it is complete; else how many bytes to read next.
    pub(crate) fn next<M: Message>(&mut self) -> Result<Next<M>, TransferError> {
        let Some((prefix, body)) = self.0.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(Next::Missing(PREFIX_BYTES - self.0.len()));
        };
        let announced = u32::from_le_bytes(*prefix) as usize;
        check_length::<M>(announced)?;
        if body.len() < announced {
            return Ok(Next::Missing(announced - body.len()));
        }
        let message = M::decode(body);
        // One long prompt must not hold its memory for the life of the stream.
        self.0 = Vec::new();
        message.map(Next::Message)
    }
}

const PREFIX_BYTES: usize = size_of::<u32>();

fn frame<M: Message>(message: &M) -> Result<Bytes, TransferError> {
    let body = message.encode();
    check_length::<M>(body.len())?;
    let mut framed = Vec::with_capacity(PREFIX_BYTES + body.len());
    framed.extend_from_slice(&(body.len() as u32).to_le_bytes());
    framed.extend_from_slice(&body);
    Ok(framed.into())
}

fn check_length<M: Message>(bytes: usize) -> Result<(), TransferError> {
    if bytes > M::BYTES_MAX {
        return Err(TransferError::TooLarge {
            what: M::NAME,
            bytes: bytes as u64,
            limit: M::BYTES_MAX as u64,
        });
    }
    Ok(())
}

pub(crate) fn malformed(what: &'static str, reason: impl Into<String>) -> TransferError {
    TransferError::Malformed { what, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(pending: &mut Pending) -> Result<Next<HandoffMessage>, TransferError> {
        pending.next()
    }

    #[test]
    fn a_length_above_the_bound_is_refused_before_anything_is_allocated() {
        let mut pending = Pending::default();
        pending.push(&u32::MAX.to_le_bytes());
        let error = next(&mut pending).err().unwrap();
        assert_eq!(error.to_string(), "handoff message of 4294967295 bytes, allowed at most 65536");
        assert!(pending.capacity() < 64);
    }

    #[test]
    fn memory_grows_with_the_bytes_that_came_not_with_the_announced_length() {
        let mut pending = Pending::default();
        pending.push(&60_000u32.to_le_bytes());
        pending.push(&[0; 10]);
        assert!(matches!(next(&mut pending), Ok(Next::Missing(59_990))));
        assert!(pending.capacity() < 64);
    }

    #[test]
    fn a_message_that_comes_byte_by_byte_is_whole_in_the_end() {
        let sent = HandoffMessage::Credit { bytes: 7 };
        let framed = frame(&sent).unwrap();
        let mut pending = Pending::default();
        for (index, byte) in framed.iter().enumerate() {
            assert!(matches!(next(&mut pending), Ok(Next::Missing(1..))), "complete after {index} bytes");
            pending.push(&[*byte]);
        }
        assert!(matches!(next(&mut pending), Ok(Next::Message(message)) if message == sent));
        assert!(pending.is_empty());
    }

    #[test]
    fn an_empty_message_is_malformed() {
        let mut pending = Pending::default();
        pending.push(&[0; 4]);
        assert!(matches!(next(&mut pending), Err(TransferError::Malformed { .. })));
    }

    #[test]
    fn a_refusal_is_the_same_wherever_the_bytes_lie() {
        let mut bytes = RequestEvent::Tokens(vec![5, 6, 7]).encode();
        // The list's place, beyond the bytes.
        let last = bytes.len() - 1;
        bytes[1..last].fill(0x7f);
        let refused = RequestEvent::decode(&bytes).unwrap_err().to_string();
        assert_eq!(refused, "malformed request event: the bytes hold no such message");
    }

    #[test]
    fn a_message_above_its_bound_is_not_sent() {
        let tokens = RequestEvent::Tokens(vec![0; 1 << 20]);
        assert!(matches!(frame(&tokens), Err(TransferError::TooLarge { .. })));
    }
}
