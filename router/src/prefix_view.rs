//! What is warm on one decode node, as it told.
//!
//! One hash chain per slot. Hashes chain their whole prefix, so the blocks that
//! a prompt shares with a slot are their common head.

use kv_block::{BlockHash, BlockTable};

/// Warm chains by slot; bounded by the node's slots and context.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixView {
    slots: Vec<Vec<BlockHash>>,
    blocks_max: usize,
}

impl PrefixView {
    /// A view of `slots` slots, each with at most `blocks_max` blocks.
    pub(crate) fn new(slots: usize, blocks_max: usize) -> Self {
        Self { slots: vec![Vec::new(); slots], blocks_max }
    }

    /// Replaces what is known of `slot`; a slot that the node does not have is
    /// ignored, a chain beyond its context is cut.
    pub(crate) fn set(&mut self, slot: usize, hashes: &[[u8; 32]]) {
        if let Some(chain) = self.slots.get_mut(slot) {
            *chain = hashes.iter().take(self.blocks_max).map(|hash| BlockHash(*hash)).collect();
        }
    }

    /// Leading prompt tokens that are warm in the best slot. The last prompt
    /// token never counts: it has to be computed to sample the first answer token.
    pub(crate) fn cached_tokens(&self, table: &BlockTable) -> usize {
        let full = &table.hashes()[..table.full_blocks()];
        let blocks = self.slots.iter().map(|chain| common(chain, full)).max().unwrap_or(0);
        (blocks * table.block_tokens()).min(table.token_count().saturating_sub(1))
    }
}

fn common(chain: &[BlockHash], prompt: &[BlockHash]) -> usize {
    chain.iter().zip(prompt).take_while(|(warm, wanted)| warm == wanted).count()
}

#[cfg(test)]
mod tests {
    use kv_block::{ChainSeed, Fingerprint, IsolationKey, LayoutId, Token};

    use super::*;

    fn table(tokens: &[u32]) -> BlockTable {
        let seed = ChainSeed::new(Fingerprint([1; 32]), LayoutId([2; 32]), IsolationKey::SHARED);
        let tokens: Vec<_> = tokens.iter().map(|&token| Token(token)).collect();
        BlockTable::new(seed, &tokens, 4)
    }

    fn chain(tokens: &[u32]) -> Vec<[u8; 32]> {
        let table = table(tokens);
        table.hashes()[..table.full_blocks()].iter().map(|hash| hash.0).collect()
    }

    #[test]
    fn the_best_slot_counts_in_whole_blocks() {
        let mut view = PrefixView::new(2, 16);
        view.set(0, &chain(&[1, 2, 3, 4]));
        view.set(1, &chain(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
        assert_eq!(view.cached_tokens(&table(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])), 8);
        assert_eq!(view.cached_tokens(&table(&[1, 2, 3, 4, 5, 6, 7, 9, 9, 10])), 4);
        assert_eq!(view.cached_tokens(&table(&[2, 2, 3, 4, 5])), 0);
    }

    #[test]
    fn the_last_prompt_token_is_never_cached() {
        let mut view = PrefixView::new(1, 16);
        view.set(0, &chain(&[1, 2, 3, 4]));
        assert_eq!(view.cached_tokens(&table(&[1, 2, 3, 4])), 3);
        assert_eq!(view.cached_tokens(&table(&[])), 0);
    }

    #[test]
    fn news_of_a_slot_replaces_the_old() {
        let mut view = PrefixView::new(1, 16);
        view.set(0, &chain(&[1, 2, 3, 4]));
        view.set(0, &[]);
        assert_eq!(view.cached_tokens(&table(&[1, 2, 3, 4, 5])), 0);
    }

    #[test]
    fn slots_and_blocks_beyond_the_announced_ones_are_ignored() {
        let mut view = PrefixView::new(1, 1);
        view.set(7, &chain(&[1, 2, 3, 4]));
        assert_eq!(view.cached_tokens(&table(&[1, 2, 3, 4, 5])), 0);
        view.set(0, &chain(&[1, 2, 3, 4, 5, 6, 7, 8]));
        assert_eq!(view.cached_tokens(&table(&[1, 2, 3, 4, 5, 6, 7, 8, 9])), 4);
    }
}
