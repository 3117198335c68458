//! The hashes that name a model, a layout, a block and a whole handoff.
//!
//! A block's hash chains its tokens with its parent's hash, so equal hashes
//! mean equal prefixes. The chain starts from a seed that folds in the model
//! fingerprint, the KV layout and the isolation key: blocks of another model,
//! cache type or tenant can never be taken for these.

use std::fmt;

use crate::Token;

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 32]);

        impl fmt::Display for $name {
            /// The first 8 bytes in hex: enough to tell two apart in a log.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

digest! {
    /// A model's weights and metadata, see `engine::Model::fingerprint`.
    Fingerprint
}
digest! {
    /// The shape of a model's KV cache, see [`crate::Layout::id`].
    LayoutId
}
digest! {
    /// Who may share cached blocks; equal keys share.
    IsolationKey
}
digest! {
    /// A block's tokens chained with all blocks before it.
    BlockHash
}
digest! {
    /// Hash over all block hashes of a handoff.
    ManifestDigest
}

impl IsolationKey {
    /// The key of requests that name none: they share with each other.
    pub const SHARED: Self = Self([0; 32]);

    /// The key for a caller's own salt.
    pub fn from_salt(salt: &str) -> Self {
        Self(blake3::derive_key("segue isolation key v1", salt.as_bytes()))
    }
}

/// Start of a block chain: everything besides the tokens that KV depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSeed([u8; 32]);

impl ChainSeed {
    /// Folds model, layout and isolation key into one seed.
    pub fn new(fingerprint: Fingerprint, layout: LayoutId, isolation: IsolationKey) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("segue block chain seed v1");
        hasher.update(&fingerprint.0);
        hasher.update(&layout.0);
        hasher.update(&isolation.0);
        Self(*hasher.finalize().as_bytes())
    }

    pub(crate) fn root(self) -> BlockHash {
        BlockHash(self.0)
    }
}

/// Hash of `tokens` behind `parent`. The count is part of the input, so a
/// short tail block never equals a full one.
pub(crate) fn chain(parent: BlockHash, tokens: &[Token]) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key("segue block v1");
    hasher.update(&parent.0);
    hasher.update(&(tokens.len() as u64).to_le_bytes());
    for token in tokens {
        hasher.update(&token.0.to_le_bytes());
    }
    BlockHash(*hasher.finalize().as_bytes())
}

pub(crate) fn digest(hashes: &[BlockHash]) -> ManifestDigest {
    let mut hasher = blake3::Hasher::new_derive_key("segue manifest v1");
    hasher.update(&(hashes.len() as u64).to_le_bytes());
    for hash in hashes {
        hasher.update(&hash.0);
    }
    ManifestDigest(*hasher.finalize().as_bytes())
}
