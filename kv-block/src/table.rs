//! A prompt cut into blocks, with the hash of each.

use std::ops::Range;

use crate::Token;
use crate::hash::{self, BlockHash, ChainSeed, ManifestDigest};

/// The blocks of one token sequence. The last one may be shorter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTable {
    block_tokens: usize,
    token_count: usize,
    hashes: Vec<BlockHash>,
}

impl BlockTable {
    /// Cuts `tokens` into blocks of `block_tokens`; a remainder becomes a
    /// shorter tail block.
    ///
    /// Panics if `block_tokens` is 0: configuration is checked before.
    pub fn new(seed: ChainSeed, tokens: &[Token], block_tokens: usize) -> Self {
        assert!(block_tokens > 0, "block_tokens must be positive");
        let mut parent = seed.root();
        let hashes = tokens
            .chunks(block_tokens)
            .map(|block| {
                parent = hash::chain(parent, block);
                parent
            })
            .collect();
        Self { block_tokens, token_count: tokens.len(), hashes }
    }

    /// Tokens covered by all blocks.
    pub fn token_count(&self) -> usize {
        self.token_count
    }

    /// Length of every block but a shorter tail.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Blocks, the tail included.
    pub fn block_count(&self) -> usize {
        self.hashes.len()
    }

    /// Blocks that are full: these can be reused as a prefix.
    pub fn full_blocks(&self) -> usize {
        self.token_count / self.block_tokens
    }

    /// All hashes in order.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Hash of block `index`, or `None` past the end.
    pub fn hash(&self, index: usize) -> Option<BlockHash> {
        self.hashes.get(index).copied()
    }

    /// Tokens of block `index`. Empty past the end.
    pub fn tokens_of(&self, index: usize) -> Range<usize> {
        let start = index.saturating_mul(self.block_tokens).min(self.token_count);
        start..start.saturating_add(self.block_tokens).min(self.token_count)
    }

    /// Hash over the hashes of blocks `first..`: what a manifest states.
    pub fn digest(&self, first: usize) -> ManifestDigest {
        hash::digest(self.hashes.get(first..).unwrap_or(&[]))
    }
}
