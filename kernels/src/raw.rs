//! `raw`: the payload is the rows. Lossless, free, and the measure of the others.

use bytes::Bytes;

use crate::{Codec, CodecError, RAW, RowsShape, check_length};

/// The codec that changes nothing.
pub(crate) struct Raw;

impl Codec for Raw {
    fn id(&self) -> u16 {
        RAW
    }

    fn name(&self) -> &'static str {
        "raw"
    }

    fn encode(&self, shape: RowsShape, rows: Bytes) -> Result<Bytes, CodecError> {
        check_length(rows.len(), shape)?;
        Ok(rows)
    }

    fn decode(&self, shape: RowsShape, payload: &[u8], rows: &mut [u8]) -> Result<(), CodecError> {
        check_length(payload.len(), shape)?;
        check_length(rows.len(), shape)?;
        rows.copy_from_slice(payload);
        Ok(())
    }

    fn is_identity(&self) -> bool {
        true
    }
}
