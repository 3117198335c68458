//! A sequence as it enters the engine thread, and what comes back from it.

use std::sync::Arc;

use engine::InstallBlob;
use kv_block::{IsolationKey, Token};
use kv_transfer::{FailureKind, FinishReason, Sampling};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

/// One request on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey(pub u64);

/// Everything that the engine thread needs to run a request.
#[derive(Debug)]
pub struct NewSequence {
    /// The request.
    pub key: RequestKey,
    /// The prompt; never empty.
    pub tokens: Arc<[Token]>,
    /// Who may continue this sequence's KV later.
    pub isolation: IsolationKey,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to generate at most; at least 1.
    pub max_tokens: usize,
    /// Go on after an end token.
    pub ignore_end: bool,
    /// KV of the first prompt tokens, from a prefill node.
    pub prefix: Option<Prefix>,
    /// Where events go. When the receiver is gone, nobody wants them.
    pub events: mpsc::UnboundedSender<SequenceEvent>,
}

/// KV computed elsewhere.
#[derive(Debug)]
pub struct Prefix {
    /// The rows; covers fewer tokens than the prompt has.
    pub blob: InstallBlob,
    /// Told once whether the engine took it.
    pub installed: oneshot::Sender<bool>,
    /// Staging memory that is free again once the rows are installed; `None`
    /// where the handoff still holds it.
    pub room: Option<OwnedSemaphorePermit>,
}

/// What happens to a sequence, in order: `Started`, `Token`…, then one of the last two.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    /// The prompt is complete.
    Started {
        /// Prompt tokens found warm in the slot.
        cached: usize,
        /// Prompt tokens installed from `prefix`.
        installed: usize,
    },
    /// A generated token.
    Token(Token),
    /// It ended well.
    Finished(FinishReason),
    /// It ended otherwise.
    Failed {
        /// What kind.
        kind: FailureKind,
        /// For people.
        message: String,
    },
}
