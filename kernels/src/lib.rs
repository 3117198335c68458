//! KV block codecs: one answer, several ways.
//!
//! A codec turns the rows of one block part into a payload and back. Only
//! `raw` exists so far; the trait and the registry are what later codecs plug
//! into. See docs/codecs.md for the ids.
//!
//! Not its job: choosing a codec, moving payloads, knowing an engine.

mod raw;

use bytes::Bytes;
use kv_block::RowSpec;

/// Codec ids on the wire. Never reused.
pub const RAW: u16 = 0;

/// A payload that cannot be decoded, or a shape that a codec cannot take.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// No such codec here.
    #[error("unknown codec id {0}")]
    Unknown(u16),
    /// The payload does not have the length that the shape demands.
    #[error("payload has {got} bytes, expected {expected}")]
    Length {
        /// Bytes given.
        got: usize,
        /// Bytes expected.
        expected: usize,
    },
}

/// Rows of one part of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsShape {
    /// Type and width of a row.
    pub row: RowSpec,
    /// Rows, one per token.
    pub tokens: usize,
}

impl RowsShape {
    /// Bytes of all rows. Saturates, so that an absurd shape fits no buffer.
    pub fn raw_bytes(&self) -> usize {
        (self.row.row_bytes as usize).saturating_mul(self.tokens)
    }
}

/// One way to write rows as a payload.
pub trait Codec: Send + Sync {
    /// Id on the wire.
    fn id(&self) -> u16;
    /// Name in configs and logs.
    fn name(&self) -> &'static str;
    /// Encodes; may return `rows` itself, without a copy.
    fn encode(&self, shape: RowsShape, rows: Bytes) -> Result<Bytes, CodecError>;
    /// Decodes into `rows`, which has exactly the shape's size. Never panics on any payload.
    fn decode(&self, shape: RowsShape, payload: &[u8], rows: &mut [u8]) -> Result<(), CodecError>;
    /// Whether the payload *is* the rows, so that it can be read straight into place.
    fn is_identity(&self) -> bool {
        false
    }
}

/// Every codec of this build, in the order of their ids.
static CODECS: [&dyn Codec; 1] = [&raw::Raw];

/// All codecs that this build can encode and decode.
pub fn codecs() -> &'static [&'static dyn Codec] {
    &CODECS
}

/// The codec with this id.
pub fn codec(id: u16) -> Result<&'static dyn Codec, CodecError> {
    CODECS.iter().copied().find(|codec| codec.id() == id).ok_or(CodecError::Unknown(id))
}

/// XXH3-64 of decoded rows, as stated in every frame.
pub fn checksum(rows: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(rows)
}

/// Rows must have exactly their shape's size; the shape may come from a peer.
fn check_length(got: usize, shape: RowsShape) -> Result<(), CodecError> {
    let expected = shape.raw_bytes();
    if got == expected { Ok(()) } else { Err(CodecError::Length { got, expected }) }
}

#[cfg(test)]
mod tests;
