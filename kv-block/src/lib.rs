//! What a block of KV cache *is*, without any of its bytes.
//!
//! ```text
//!  tokens   [ t0 … t63 | t64 … t127 | t128 … t150 ]
//!  blocks       B0     |     B1     |     B2 (tail)
//!  hash      h(seed,B0)  h(h0,B1)     h(h1,B2)          one chain per prompt
//! ```
//!
//! Job: the identifiers everybody uses, the layout descriptor of a model's
//! cache, and the chained hashes that bind a block to the prompt before it.
//! Not its job: storing rows, moving them, or knowing an engine.

mod hash;
mod id;
mod layout;
mod table;
#[cfg(test)]
mod tests;

pub use hash::{BlockHash, ChainSeed, Fingerprint, IsolationKey, LayoutId, ManifestDigest};
pub use id::{HandoffId, SlotId, Token};
pub use layout::{LayerSpec, Layout, LayoutError, Part, RowSpec, Section, Side};
pub use table::BlockTable;
