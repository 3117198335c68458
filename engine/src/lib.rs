//! llama.cpp behind two nouns: a [`Model`] (weights, vocabulary, identity) and
//! a [`Session`] (slots with KV, one batch step at a time).
//!
//! ```text
//!  Model ──prefill_session──▶ Session   1 slot, exports ranges of tokens
//!    │────decode_session────▶ Session   n slots with streams of their own, installs prefixes
//!    └────vocabulary────────▶ Vocabulary  tokens ⇄ bytes, chat template
//! ```
//!
//! Job: everything that touches llama.cpp, and all `unsafe` of the CPU path.
//! [`fake`] is a deterministic twin with the same interface: its "KV" and its
//! "logits" are functions of the tokens, so any mix-up shows in the output.
//! Without the feature `llama` (on by default) the crate is this interface, the
//! twin and the parser of llama.cpp's state bytes, and compiles in seconds.
//! Not its job: scheduling, sampling, networks.

mod batch;
mod config;
pub mod fake;
#[cfg(feature = "llama")]
mod ffi;
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "llama")]
pub mod llama;
mod rows;
mod state;

#[cfg(feature = "llama")]
pub use llama::fingerprint;
pub use rows::{BlobTemplate, ExportedRows, InstallBlob};

use std::ops::Range;
use std::sync::Arc;

use kv_block::{Fingerprint, Layout, LayoutError, SlotId, Token};

/// What a session is made for. Sizes are checked when it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// Sequences that can be resident at once. A prefill session has one.
    pub slots: usize,
    /// Tokens that each slot can hold.
    pub context_tokens: usize,
    /// Most tokens of one [`Session::step`].
    pub batch_tokens_max: usize,
    /// Compute threads.
    pub threads: usize,
}

/// One slot's share of a step.
#[derive(Clone, Copy, Debug)]
pub struct BatchItem<'a> {
    /// The slot whose sequence grows.
    pub slot: SlotId,
    /// Tokens to append; must not be empty.
    pub tokens: &'a [Token],
    /// Whether the logits after the last of them are wanted.
    pub logits: bool,
}

/// Weights loaded once; sessions share them.
pub trait Model: Send + Sync {
    /// Hash over metadata, tensor table and a sample of every tensor.
    fn fingerprint(&self) -> Fingerprint;
    /// The model's own name (`general.name`), for people.
    fn name(&self) -> &str;
    /// Tokens, text and the chat template.
    fn vocabulary(&self) -> Arc<dyn Vocabulary>;
    /// Longest context the model was trained for, in tokens.
    fn context_tokens_max(&self) -> usize;
    /// `Err` with the reason when this model class cannot be cut into token
    /// blocks (recurrent, hybrid, compressed cache): it runs local only.
    fn blocks_supported(&self) -> Result<(), String>;
    /// A session that computes one prompt at a time and exports its rows.
    fn prefill_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError>;
    /// A session that serves many sequences and installs prefixes.
    fn decode_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError>;
}

/// Tokens and text. Loadable without weights, for the router.
pub trait Vocabulary: Send + Sync {
    /// Tokens of `text`. `add_bos`: put the BOS first if the model wants one and
    /// `text` does not already begin with it. `parse_special`: read control tokens
    /// written as text as such (templates need this).
    fn tokenize(&self, text: &str, add_bos: bool, parse_special: bool) -> Vec<Token>;
    /// Bytes of one token; not always whole characters. Control tokens give
    /// nothing unless `special`.
    fn piece(&self, token: Token, special: bool) -> Vec<u8>;
    /// Whether generation ends with this token.
    fn is_end(&self, token: Token) -> bool;
    /// Beginning-of-sequence token.
    fn bos(&self) -> Option<Token>;
    /// End-of-sequence token.
    fn eos(&self) -> Option<Token>;
    /// Whether the model wants a BOS before every text.
    fn wants_bos(&self) -> bool;
    /// Number of tokens; valid ids are below it.
    fn size(&self) -> usize;
    /// Jinja source of the chat template, if the model has one.
    fn chat_template(&self) -> Option<&str>;
}

/// Running sequences in slots. Not shared: one thread owns it.
pub trait Session: Send {
    /// Shape of the cache, probed when the session was made.
    fn layout(&self) -> &Arc<Layout>;
    /// Maker of install blobs for this session; `Err` with the reason where
    /// the model class cannot be installed in blocks.
    fn blob_template(&self) -> Result<Arc<BlobTemplate>, EngineError>;
    /// The configuration in force.
    fn config(&self) -> &SessionConfig;
    /// Tokens now resident in `slot`.
    fn resident(&self, slot: SlotId) -> usize;
    /// Appends tokens to slots and computes them: items of equal length in
    /// neighbouring slots go through the model together, others one after the
    /// other. On error the slots named keep what they had before, as far as the
    /// engine can say; the caller clears them.
    fn step(&mut self, batch: &[BatchItem<'_>]) -> Result<(), EngineError>;
    /// Logits of batch item `item` of the last step, `[vocabulary]`.
    /// Panics if that item did not ask for them.
    fn logits(&self, item: usize) -> &[f32];
    /// Copies the rows of `tokens` out of `slot`. A decode session exports
    /// only whole sequences (`0..resident`).
    fn export(&mut self, slot: SlotId, tokens: Range<usize>) -> Result<ExportedRows, EngineError>;
    /// Replaces the content of `slot` by the rows of `blob`.
    fn install(&mut self, slot: SlotId, blob: &InstallBlob) -> Result<(), EngineError>;
    /// Forgets all but the first `keep` tokens of `slot`.
    fn truncate(&mut self, slot: SlotId, keep: usize) -> Result<(), EngineError>;
    /// Forgets everything in `slot`.
    fn clear(&mut self, slot: SlotId);
}

/// What the engine refuses or cannot do.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model file is missing, unreadable or not a model.
    #[error("model {path}: {reason}")]
    Load {
        /// File asked for.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A configured size is out of range.
    #[error("{field} is {value}, allowed {allowed}")]
    Config {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// Range in words.
        allowed: String,
    },
    /// The engine has no memory or context for the session.
    #[error("session: {0}")]
    Session(String),
    /// A batch that is empty, too large, or names a slot that does not exist.
    #[error("batch: {0}")]
    Batch(String),
    /// The sequence would outgrow its slot.
    #[error("slot {slot} would hold {wanted} tokens, limit {limit}")]
    ContextFull {
        /// The slot.
        slot: u16,
        /// Tokens it would hold.
        wanted: usize,
        /// Tokens it can hold.
        limit: usize,
    },
    /// llama.cpp failed to compute the batch.
    #[error("decode failed with code {0}")]
    Decode(i32),
    /// A range that the slot does not hold.
    #[error("slot {slot} holds {resident} tokens, asked for {start}..{end}")]
    Range {
        /// The slot.
        slot: u16,
        /// Tokens it holds.
        resident: usize,
        /// First token asked for.
        start: usize,
        /// End of the range asked for.
        end: usize,
    },
    /// The state bytes do not have the expected form.
    #[error("state: {0}")]
    State(String),
    /// The cache layout is outside the bounds.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// This model class cannot be cut into token blocks.
    #[error("this model cannot be cut into token blocks: {0}")]
    BlocksUnsupported(String),
}
