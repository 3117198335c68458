//! Which frames of a handoff were admitted and which are in place.

use std::sync::Arc;

use kv_block::{BlockTable, Layout, Part};

use super::types::FrameFacts;

/// Bytes that a codec may add to the rows (headers, incompressible input).
/// Bounds what a frame may make the shell allocate.
pub(super) const ENCODED_OVERHEAD_BYTES: u64 = 64;

/// Position of a frame: block counted from the first one expected, and part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    block: usize,
    part: usize,
}

/// Two bits per expected frame, and how much each block lacks.
#[derive(Debug)]
pub(super) struct Frames {
    table: Arc<BlockTable>,
    layout: Arc<Layout>,
    first_block: usize,
    admitted: Vec<bool>,
    stored: Vec<bool>,
    /// Parts not yet stored, per block.
    missing: Vec<usize>,
    /// Frames not yet stored, over all blocks.
    missing_total: usize,
    /// Frames admitted and not yet stored.
    pending: usize,
    /// Blocks of which some parts are stored and some are not.
    partial: usize,
}

impl Frames {
    pub(super) fn new(table: Arc<BlockTable>, layout: Arc<Layout>, first_block: usize) -> Self {
        let first_block = first_block.min(table.block_count());
        let blocks = table.block_count() - first_block;
        let parts = layout.parts().len();
        Self {
            table,
            layout,
            first_block,
            admitted: vec![false; blocks * parts],
            stored: vec![false; blocks * parts],
            missing: vec![parts; blocks],
            missing_total: blocks * parts,
            pending: 0,
            partial: 0,
        }
    }

    /// Encoded bytes that the longest block can have.
    pub(super) fn block_bytes_max(&self) -> u64 {
        let tokens = self.table.block_tokens().min(self.table.token_count()) as u64;
        let overhead = ENCODED_OVERHEAD_BYTES * self.layout.parts().len() as u64;
        tokens.saturating_mul(self.layout.bytes_per_token()).saturating_add(overhead)
    }

    /// Where a frame belongs, if everything that its header says is right.
    pub(super) fn check(&self, frame: &FrameFacts) -> Result<Place, &'static str> {
        let place = self.place(frame.block_index, frame.part)?;
        if self.table.hash(frame.block_index) != Some(frame.block_hash) {
            return Err("frame is of another prompt");
        }
        if frame.raw_bytes != self.raw_bytes(place) {
            return Err("frame has a wrong raw size");
        }
        if frame.encoded_bytes > frame.raw_bytes + ENCODED_OVERHEAD_BYTES {
            return Err("frame is longer than its rows allow");
        }
        Ok(place)
    }

    /// Where the frame of this block and part belongs.
    pub(super) fn place(&self, block_index: usize, part: Part) -> Result<Place, &'static str> {
        if block_index < self.first_block || block_index >= self.table.block_count() {
            return Err("frame is of a block not asked for");
        }
        let part = self.layout.part_index(part).ok_or("frame is of a part that the layout lacks")?;
        Ok(Place { block: block_index - self.first_block, part })
    }

    /// Whether the frame may be stored; false if it came before.
    pub(super) fn admit(&mut self, place: Place) -> bool {
        let bit = self.bit(place);
        let fresh = !self.admitted[bit];
        self.admitted[bit] = true;
        self.pending += usize::from(fresh);
        fresh
    }

    /// Whether the frame was admitted and is not stored yet.
    pub(super) fn is_pending(&self, place: Place) -> bool {
        self.admitted[self.bit(place)] && !self.stored[self.bit(place)]
    }

    /// Marks a pending frame as stored. Returns its raw bytes.
    pub(super) fn store(&mut self, place: Place) -> u64 {
        assert!(self.is_pending(place), "stored frame {place:?} is not pending");
        let bit = self.bit(place);
        let parts = self.layout.parts().len();
        self.stored[bit] = true;
        self.pending -= 1;
        self.missing_total -= 1;
        self.partial += usize::from(self.missing[place.block] == parts);
        self.missing[place.block] -= 1;
        self.partial -= usize::from(self.missing[place.block] == 0);
        self.raw_bytes(place)
    }

    /// Frames not yet stored.
    pub(super) fn missing_total(&self) -> usize {
        self.missing_total
    }

    /// Nothing is being read and no block is half there: whatever else the
    /// sender sent comes in whole blocks.
    pub(super) fn is_between_blocks(&self) -> bool {
        self.pending == 0 && self.partial == 0
    }

    /// Blocks from the start of the prompt without a gap, those that were here
    /// before included.
    pub(super) fn contiguous_blocks(&self) -> usize {
        self.first_block + self.missing.iter().take_while(|missing| **missing == 0).count()
    }

    /// Blocks expected.
    pub(super) fn block_count(&self) -> usize {
        self.missing.len()
    }

    /// Raw bytes of everything stored, counted anew.
    pub(super) fn stored_bytes(&self) -> u64 {
        let parts = self.layout.parts().len();
        let places = (0..self.stored.len()).filter(|bit| self.stored[*bit]);
        places.map(|bit| self.raw_bytes(Place { block: bit / parts, part: bit % parts })).sum()
    }

    fn bit(&self, place: Place) -> usize {
        place.block * self.layout.parts().len() + place.part
    }

    fn raw_bytes(&self, place: Place) -> u64 {
        let tokens = self.table.tokens_of(self.first_block + place.block).len() as u64;
        tokens * u64::from(self.layout.parts()[place.part].1.row_bytes)
    }
}
