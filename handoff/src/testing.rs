//! What the tests of both machines share.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kv_block::{
    BlockTable, ChainSeed, Fingerprint, IsolationKey, LayerSpec, Layout, LayoutId, RowSpec, Section, Token,
};

use crate::{FrameFacts, ReceiverEvent, ReceiverPlan};

pub(crate) const STALL: Duration = Duration::from_millis(2000);

/// Time zero of every test.
#[expect(clippy::disallowed_methods, reason = "virtual time needs an origin, and Instant has no other one")]
pub(crate) fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

pub(crate) fn at(millis: u64) -> Instant {
    epoch() + Duration::from_millis(millis)
}

/// Two layers, the second with keys only: three parts of 16, 8 and 4 bytes.
pub(crate) fn layout() -> Arc<Layout> {
    let row = |row_bytes| RowSpec { dtype: 1, row_bytes };
    let layers = vec![LayerSpec { k: row(16), v: Some(row(8)) }, LayerSpec { k: row(4), v: None }];
    Arc::new(Layout::new(vec![Section { layers }]).unwrap())
}

pub(crate) const PARTS: usize = 3;

/// Blocks of four tokens.
pub(crate) fn table(tokens: usize) -> Arc<BlockTable> {
    let seed = ChainSeed::new(Fingerprint([1; 32]), LayoutId([2; 32]), IsolationKey::SHARED);
    let tokens: Vec<Token> = (0..tokens as u32).map(Token).collect();
    Arc::new(BlockTable::new(seed, &tokens, 4))
}

pub(crate) fn receiver_plan(tokens: usize, first_block: usize, credit_window_bytes: u64) -> ReceiverPlan {
    ReceiverPlan {
        table: table(tokens),
        layout: layout(),
        first_block,
        credit_window_bytes,
        stall_min: STALL,
    }
}

/// A right header for this block and part, encoded as raw.
pub(crate) fn frame(table: &BlockTable, block_index: usize, part_index: usize) -> FrameFacts {
    let (part, row) = layout().parts()[part_index];
    let raw_bytes = table.tokens_of(block_index).len() as u64 * u64::from(row.row_bytes);
    FrameFacts {
        block_index,
        block_hash: table.hash(block_index).unwrap(),
        part,
        raw_bytes,
        encoded_bytes: raw_bytes,
    }
}

pub(crate) fn stored(frame: &FrameFacts, intact: bool) -> ReceiverEvent {
    ReceiverEvent::FrameStored {
        block_index: frame.block_index,
        part: frame.part,
        encoded_bytes: frame.encoded_bytes,
        intact,
    }
}

/// The right manifest of blocks `first_block..`.
pub(crate) fn completed(table: &BlockTable, first_block: usize) -> ReceiverEvent {
    ReceiverEvent::Completed {
        block_count: table.block_count() - first_block,
        token_count: table.token_count(),
        digest: table.digest(first_block),
    }
}
