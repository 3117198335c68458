//! KV rows on their way out of one session and into another.
//!
//! [`ExportedRows`] is one contiguous copy of a token range; [`InstallBlob`] is
//! the engine's own state format, with header and cell tables written by us
//! from a probe, and row areas that frames are decoded straight into. Peer
//! bytes only ever reach row areas: the engine's parser never sees them as
//! structure.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kv_block::{Layout, Part};

use crate::EngineError;

/// The rows of a token range, all parts, copied out of a session.
#[derive(Clone, Debug)]
pub struct ExportedRows {
    layout: Arc<Layout>,
    tokens: Range<usize>,
    bytes: Bytes,
    /// Byte offset of each part's first row, in the order of `Layout::parts`.
    offsets: Arc<[usize]>,
}

impl ExportedRows {
    /// `offsets` has one entry per part. Errors: `State` if a part's rows
    /// would leave `bytes`.
    pub fn new(
        layout: Arc<Layout>,
        tokens: Range<usize>,
        bytes: Bytes,
        offsets: Arc<[usize]>,
    ) -> Result<Self, EngineError> {
        if offsets.len() != layout.parts().len() {
            return Err(EngineError::State(format!(
                "{} row offsets for {} parts",
                offsets.len(),
                layout.parts().len()
            )));
        }
        for ((part, row), &offset) in layout.parts().iter().zip(offsets.iter()) {
            let end = offset.saturating_add(tokens.len().saturating_mul(row.row_bytes as usize));
            if end > bytes.len() {
                return Err(EngineError::State(format!("rows of {part} end at {end} of {}", bytes.len())));
            }
        }
        Ok(Self { layout, tokens, bytes, offsets })
    }

    /// The token range exported.
    pub fn tokens(&self) -> Range<usize> {
        self.tokens.clone()
    }

    /// Rows of `part` for `tokens` (positions in the sequence), without a copy.
    /// Panics if the range was not exported or the layout has no such part.
    pub fn rows(&self, part: Part, tokens: Range<usize>) -> Bytes {
        assert!(
            self.tokens.start <= tokens.start && tokens.end <= self.tokens.end && tokens.start <= tokens.end,
            "rows {tokens:?} of an export of {:?}",
            self.tokens
        );
        let index = self.layout.part_index(part).expect("part of this layout");
        let row_bytes = self.layout.parts()[index].1.row_bytes as usize;
        let start = self.offsets[index] + (tokens.start - self.tokens.start) * row_bytes;
        self.bytes.slice(start..start + tokens.len() * row_bytes)
    }
}

/// Makes install blobs for one session; cheap to share with other threads.
#[derive(Debug)]
pub struct BlobTemplate {
    layout: Arc<Layout>,
    format: Box<dyn BlobFormat>,
}

/// How a session lays out a state of `token_count` tokens.
pub(crate) trait BlobFormat: Send + Sync + std::fmt::Debug {
    /// Bytes of the whole state, and the offset of each part's first row.
    fn plan(&self, layout: &Layout, token_count: usize) -> (usize, Vec<usize>);
    /// Writes everything that is not a row into a zeroed buffer.
    fn write_structure(&self, layout: &Layout, token_count: usize, state: &mut [u8]);
}

impl BlobTemplate {
    pub(crate) fn new(layout: Arc<Layout>, format: Box<dyn BlobFormat>) -> Self {
        Self { layout, format }
    }

    /// The layout that blobs have.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Bytes that a blob for `token_count` tokens takes.
    pub fn blob_bytes(&self, token_count: usize) -> usize {
        self.format.plan(&self.layout, token_count).0
    }

    /// A blob for tokens `0..token_count` with all rows still zero. The memory
    /// is mapped lazily, so an unused blob costs little.
    pub fn blob(&self, token_count: usize) -> InstallBlob {
        let (bytes, offsets) = self.format.plan(&self.layout, token_count);
        let mut state = vec![0; bytes];
        self.format.write_structure(&self.layout, token_count, &mut state);
        InstallBlob { layout: self.layout.clone(), token_count, state, offsets }
    }
}

/// A whole-prefix state under construction: structure is ours, rows are filled in.
#[derive(Debug)]
pub struct InstallBlob {
    layout: Arc<Layout>,
    token_count: usize,
    state: Vec<u8>,
    offsets: Vec<usize>,
}

impl InstallBlob {
    /// Tokens of the prefix.
    pub fn token_count(&self) -> usize {
        self.token_count
    }

    /// Bytes of memory held.
    pub fn len(&self) -> usize {
        self.state.len()
    }

    /// Whether the blob holds no bytes at all; it never does.
    pub fn is_empty(&self) -> bool {
        self.state.is_empty()
    }

    /// Place of `part`'s rows for `tokens`, or `None` if there is no such part
    /// or the range is outside the prefix.
    pub fn rows_mut(&mut self, part: Part, tokens: Range<usize>) -> Option<&mut [u8]> {
        let range = self.byte_range(part, tokens)?;
        Some(&mut self.state[range])
    }

    /// Rows of `part` for `tokens`, as [`InstallBlob::rows_mut`].
    pub fn rows(&self, part: Part, tokens: Range<usize>) -> Option<&[u8]> {
        let range = self.byte_range(part, tokens)?;
        Some(&self.state[range])
    }

    /// The blob cut to its first `token_count` tokens: what is kept of a
    /// handoff that broke off (salvage). `template` must be the one that made it.
    pub fn prefix(&self, template: &BlobTemplate, token_count: usize) -> InstallBlob {
        assert!(token_count <= self.token_count, "prefix {token_count} of {}", self.token_count);
        let mut shorter = template.blob(token_count);
        for &(part, _) in self.layout.parts() {
            let from = self.rows(part, 0..token_count).expect("own part and range");
            shorter.rows_mut(part, 0..token_count).expect("same layout").copy_from_slice(from);
        }
        shorter
    }

    pub(crate) fn state(&self) -> &[u8] {
        &self.state
    }

    fn byte_range(&self, part: Part, tokens: Range<usize>) -> Option<Range<usize>> {
        if tokens.start > tokens.end || tokens.end > self.token_count {
            return None;
        }
        let index = self.layout.part_index(part)?;
        let row_bytes = self.layout.parts()[index].1.row_bytes as usize;
        let start = self.offsets[index] + tokens.start * row_bytes;
        Some(start..start + tokens.len() * row_bytes)
    }
}

#[cfg(test)]
mod tests {
    use kv_block::{LayerSpec, RowSpec, Section};

    use super::*;

    #[test]
    fn an_export_whose_rows_would_leave_the_bytes_is_an_error() {
        let k = RowSpec { dtype: 1, row_bytes: 8 };
        let section = Section { layers: vec![LayerSpec { k, v: None }] };
        let layout = Arc::new(Layout::new(vec![section]).unwrap());
        let export = |tokens, offset| {
            let bytes = Bytes::from_static(&[0; 32]);
            ExportedRows::new(layout.clone(), tokens, bytes, Arc::new([offset])).map(drop)
        };
        assert!(export(0..3, 8).is_ok());
        for (tokens, offset) in [(0..3, 9), (0..4, 1), (0..1, usize::MAX), (0..usize::MAX, 0)] {
            let error = export(tokens.clone(), offset).unwrap_err().to_string();
            assert!(
                error.starts_with("state: rows of section 0 layer 0 K end at"),
                "{tokens:?} {offset}: {error}"
            );
        }
    }
}
