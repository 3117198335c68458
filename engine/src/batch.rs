//! Checks of a step's batch and of ranges, the same for both engines.

use std::ops::Range;

use kv_block::SlotId;

use crate::{BatchItem, EngineError, SessionConfig};

/// Everything that can be wrong with a batch before it is computed.
/// `resident` gives the tokens that a slot holds.
pub(crate) fn check(
    batch: &[BatchItem<'_>],
    config: &SessionConfig,
    vocabulary_size: usize,
    resident: impl Fn(SlotId) -> usize,
) -> Result<(), EngineError> {
    let tokens: usize = batch.iter().map(|item| item.tokens.len()).sum();
    if tokens == 0 || tokens > config.batch_tokens_max {
        let allowed = config.batch_tokens_max;
        return Err(EngineError::Batch(format!("{tokens} tokens, allowed 1 to {allowed}")));
    }
    let mut named = vec![false; config.slots];
    for item in batch {
        let slot = item.slot.0;
        let Some(seen) = named.get_mut(usize::from(slot)) else {
            return Err(EngineError::Batch(format!("slot {slot} of {}", config.slots)));
        };
        if std::mem::replace(seen, true) {
            return Err(EngineError::Batch(format!("slot {slot} is named twice")));
        }
        if item.tokens.is_empty() {
            return Err(EngineError::Batch(format!("no tokens for slot {slot}")));
        }
        if let Some(token) = item.tokens.iter().find(|token| token.0 as usize >= vocabulary_size) {
            return Err(EngineError::Batch(format!("token {} of {vocabulary_size}", token.0)));
        }
        fits(item.slot, resident(item.slot) + item.tokens.len(), config)?;
    }
    Ok(())
}

/// The items of a batch in passes through the model: those of equal length
/// together, in the order of their slots, single tokens last.
///
/// llama.cpp would cut a mixed batch too, but into the columns that all items
/// have and the rest: a prompt chunk beside a stream then loses its first token
/// to a pass of its own, and with it, at 64 tokens, the tiled attention.
/// Slots side by side share a pass; each gap between them costs one more.
#[cfg(any(feature = "llama", test))]
pub(crate) fn passes(batch: &[BatchItem<'_>]) -> Vec<Vec<usize>> {
    let mut order: Vec<_> = (0..batch.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(batch[index].tokens.len()), batch[index].slot));
    let same_length = |a: &usize, b: &usize| batch[*a].tokens.len() == batch[*b].tokens.len();
    order.chunk_by(same_length).map(<[usize]>::to_vec).collect()
}

/// Errors: `ContextFull` if a slot cannot hold `wanted` tokens.
pub(crate) fn fits(slot: SlotId, wanted: usize, config: &SessionConfig) -> Result<(), EngineError> {
    let limit = config.context_tokens;
    if wanted > limit {
        return Err(EngineError::ContextFull { slot: slot.0, wanted, limit });
    }
    Ok(())
}

/// Errors: `Range` unless `tokens` is a non-empty part of what `slot` holds and,
/// for a session that exports only whole sequences, all of it.
pub(crate) fn exportable(
    slot: SlotId,
    tokens: &Range<usize>,
    resident: usize,
    ranges: bool,
) -> Result<(), EngineError> {
    let inside = tokens.start < tokens.end && tokens.end <= resident;
    if inside && (ranges || *tokens == (0..resident)) {
        return Ok(());
    }
    Err(EngineError::Range { slot: slot.0, resident, start: tokens.start, end: tokens.end })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_block::Token;

    #[test]
    fn equal_lengths_share_a_pass_in_slot_order_and_streams_come_last() {
        let tokens = [Token(1); 8];
        let item = |slot, count| BatchItem { slot: SlotId(slot), tokens: &tokens[..count], logits: true };
        let batch = [item(5, 1), item(2, 8), item(1, 1), item(3, 3), item(0, 8)];
        assert_eq!(passes(&batch), [vec![4, 1], vec![3], vec![2, 0]]);
        assert_eq!(passes(&batch[..1]), [vec![0]]);
    }
}
