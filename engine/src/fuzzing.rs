//! The state parser and the blobs, for `fuzz/`: outside of it nobody may call
//! them with bytes of their own.

use std::ops::Range;
use std::sync::Arc;

use kv_block::Layout;

use crate::state::{Expected, StateFormat};
use crate::{BlobTemplate, EngineError, InstallBlob};

/// What a probe found.
pub struct ProbedFormat(StateFormat);

impl ProbedFormat {
    /// As a session does with its first state.
    pub fn probe(bytes: &[u8], sequence: u32, stream: u32) -> Result<Self, EngineError> {
        StateFormat::probe(bytes, sequence, stream).map(Self)
    }

    /// Shape of the cache.
    pub fn layout(&self) -> &Layout {
        self.0.layout()
    }

    /// Offset of each part's first row in the state of one sequence.
    pub fn parse(
        &self,
        bytes: &[u8],
        sequence: u32,
        stream: u32,
        positions: Range<usize>,
    ) -> Result<Vec<usize>, EngineError> {
        self.0.parse(bytes, &Expected { sequence, stream, positions })
    }

    /// The same in the state of a whole context.
    pub fn parse_whole(
        &self,
        bytes: &[u8],
        residents: &[usize],
        slot: usize,
    ) -> Result<Vec<usize>, EngineError> {
        self.0.parse_whole(bytes, residents, slot)
    }

    /// A maker of blobs of this form.
    pub fn template(&self) -> BlobTemplate {
        BlobTemplate::new(Arc::new(self.0.layout().clone()), Box::new(self.0.blob_format()))
    }
}

/// What the engine would be given of `blob`.
pub fn state_of(blob: &InstallBlob) -> &[u8] {
    blob.state()
}
