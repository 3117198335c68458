//! KV frames on unidirectional streams.
//!
//! ```text
//!   0 handoff 16 │ 16 block hash 32 │ 48 block index 4 │ 52 section 2 │ 54 layer 2
//!  56 side 1 │ 57 zero 1 │ 58 codec 2 │ 60 raw bytes 4 │ 64 encoded bytes 4
//!  68 checksum 8 │ 76 payload: encoded bytes
//! ```
//!
//! All numbers are little-endian. The layout is fixed, so that reading a header
//! costs nothing beside the payload.

use bytes::Bytes;
use kv_block::{BlockHash, HandoffId, Part, Side};

use crate::TransferError;
use crate::connection::{CODE_CANCELLED, read_error, write_error};
use crate::stream::malformed;

/// Everything about one frame but its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The handoff it belongs to.
    pub handoff: HandoffId,
    /// Block of the prompt.
    pub block_index: u32,
    /// That block's hash.
    pub block_hash: BlockHash,
    /// Which rows.
    pub part: Part,
    /// Codec of the payload.
    pub codec: u16,
    /// Bytes after decoding.
    pub raw_bytes: u32,
    /// Bytes of the payload.
    pub encoded_bytes: u32,
    /// XXH3-64 of the *decoded* rows.
    pub checksum: u64,
}

impl FrameHeader {
    /// Bytes of a header on the wire.
    pub const BYTES: usize = 76;
    /// Bound of `raw_bytes` and `encoded_bytes`: one block of one layer's K or
    /// V. The widest row allowed (1 MiB) times 64 tokens.
    pub const PAYLOAD_BYTES_MAX: u32 = 64 << 20;

    /// Encodes for the wire.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..16].copy_from_slice(&self.handoff.0);
        bytes[16..48].copy_from_slice(&self.block_hash.0);
        bytes[48..52].copy_from_slice(&self.block_index.to_le_bytes());
        bytes[52..54].copy_from_slice(&self.part.section.to_le_bytes());
        bytes[54..56].copy_from_slice(&self.part.layer.to_le_bytes());
        bytes[56] = match self.part.side {
            Side::K => 0,
            Side::V => 1,
        };
        bytes[58..60].copy_from_slice(&self.codec.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.raw_bytes.to_le_bytes());
        bytes[64..68].copy_from_slice(&self.encoded_bytes.to_le_bytes());
        bytes[68..76].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Decodes and checks form and bounds. Whether such a block and part exist
    /// is for the reader of the handoff to say.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, TransferError> {
        let header = Self {
            handoff: HandoffId(field(bytes, 0)),
            block_hash: BlockHash(field(bytes, 16)),
            block_index: u32::from_le_bytes(field(bytes, 48)),
            part: Part {
                section: u16::from_le_bytes(field(bytes, 52)),
                layer: u16::from_le_bytes(field(bytes, 54)),
                side: side(bytes[56])?,
            },
            codec: u16::from_le_bytes(field(bytes, 58)),
            raw_bytes: u32::from_le_bytes(field(bytes, 60)),
            encoded_bytes: u32::from_le_bytes(field(bytes, 64)),
            checksum: u64::from_le_bytes(field(bytes, 68)),
        };
        if bytes[57] != 0 {
            return Err(malformed("frame header", format!("byte 57 is {}, expected 0", bytes[57])));
        }
        check_bounds(&header)?;
        Ok(header)
    }
}

/// `N` bytes at a fixed offset; offsets and lengths are constants of the layout.
fn field<const N: usize>(bytes: &[u8; FrameHeader::BYTES], offset: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[offset + index])
}

fn side(byte: u8) -> Result<Side, TransferError> {
    match byte {
        0 => Ok(Side::K),
        1 => Ok(Side::V),
        other => Err(malformed("frame header", format!("side is {other}, allowed 0 and 1"))),
    }
}

fn check_bounds(header: &FrameHeader) -> Result<(), TransferError> {
    let limit = FrameHeader::PAYLOAD_BYTES_MAX;
    if header.raw_bytes == 0 {
        return Err(malformed("frame header", format!("raw_bytes is 0, allowed 1 to {limit}")));
    }
    for (what, bytes) in [("decoded frame", header.raw_bytes), ("frame payload", header.encoded_bytes)] {
        if bytes > limit {
            return Err(TransferError::TooLarge { what, bytes: bytes.into(), limit: limit.into() });
        }
    }
    Ok(())
}

/// Writes frames; one per chunk of a prompt. Dropping it without `finish` resets the stream.
pub struct FrameWriter {
    stream: quinn::SendStream,
    finished: bool,
    /// A `send` began and did not end, so nothing may follow it.
    cut: bool,
}

impl FrameWriter {
    pub(crate) fn new(stream: quinn::SendStream) -> Self {
        Self { stream, finished: false, cut: false }
    }

    /// Sends header and payload without copying the payload.
    /// Panics if `payload.len() != header.encoded_bytes`.
    ///
    /// Not cancel-safe: if the future is dropped the stream can only be reset.
    pub async fn send(&mut self, header: &FrameHeader, payload: Bytes) -> Result<(), TransferError> {
        assert_eq!(payload.len(), header.encoded_bytes as usize, "payload is not the one announced");
        if self.cut {
            return Err(TransferError::Lost("an earlier frame was cut off".into()));
        }
        self.cut = true;
        let mut chunks = [Bytes::copy_from_slice(&header.encode()), payload];
        self.stream.write_all_chunks(&mut chunks).await.map_err(write_error)?;
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

    /// Ends the stream at once.
    pub fn reset(self) {}
}

impl Drop for FrameWriter {
    fn drop(&mut self) {
        if !self.finished {
            let _ = self.stream.reset(CODE_CANCELLED);
        }
    }
}

/// Reads frames of one stream. Dropping it tells the peer to stop.
pub struct FrameReader {
    stream: quinn::RecvStream,
    header: [u8; FrameHeader::BYTES],
    /// Bytes of `header` that came.
    header_filled: usize,
    /// Length of the payload whose header was returned last.
    payload_bytes: usize,
    /// Bytes of it that came.
    payload_filled: usize,
}

impl FrameReader {
    pub(crate) fn new(stream: quinn::RecvStream) -> Self {
        let header = [0; FrameHeader::BYTES];
        Self { stream, header, header_filled: 0, payload_bytes: 0, payload_filled: 0 }
    }

    /// Next header, checked for form; `None` after the last frame. The payload
    /// must be read or skipped before the next call. Cancel-safe.
    pub async fn next_header(&mut self) -> Result<Option<FrameHeader>, TransferError> {
        assert_eq!(self.payload_filled, self.payload_bytes, "the payload before was not read");
        while self.header_filled < FrameHeader::BYTES {
            let place = &mut self.header[self.header_filled..];
            match self.stream.read(place).await.map_err(read_error)? {
                Some(bytes) => self.header_filled += bytes,
                None if self.header_filled == 0 => return Ok(None),
                None => return Err(malformed("frame header", "the stream ended inside it")),
            }
        }
        let header = FrameHeader::decode(&self.header)?;
        self.header_filled = 0;
        self.payload_bytes = header.encoded_bytes as usize;
        self.payload_filled = 0;
        Ok(Some(header))
    }

    /// Reads the payload straight into `place`.
    /// Panics if `place.len()` is not the header's `encoded_bytes`.
    ///
    /// If the future is dropped, a later call with the same place goes on where
    /// this one stopped.
    pub async fn read_payload(&mut self, place: &mut [u8]) -> Result<(), TransferError> {
        assert_eq!(place.len(), self.payload_bytes, "place does not have the payload's length");
        while self.payload_filled < self.payload_bytes {
            let rest = &mut place[self.payload_filled..];
            match self.stream.read(rest).await.map_err(read_error)? {
                Some(bytes) => self.payload_filled += bytes,
                None => return Err(malformed("frame payload", "the stream ended inside it")),
            }
        }
        Ok(())
    }

    /// Reads and drops the payload. Cancel-safe.
    pub async fn skip_payload(&mut self) -> Result<(), TransferError> {
        while self.payload_filled < self.payload_bytes {
            let missing = self.payload_bytes - self.payload_filled;
            match self.stream.read_chunk(missing, true).await.map_err(read_error)? {
                Some(chunk) => self.payload_filled += chunk.bytes.len(),
                None => return Err(malformed("frame payload", "the stream ended inside it")),
            }
        }
        Ok(())
    }

    /// Tells the peer to stop sending on this stream.
    pub fn stop(mut self) {
        // An error means that the stream has ended already.
        let _ = self.stream.stop(CODE_CANCELLED);
    }
}
