//! What goes into a [`Sender`](crate::Sender) and what comes out.

use std::time::Duration;

use kv_block::ManifestDigest;

/// What the sender has to deliver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SenderPlan {
    /// First block to send; the receiver has those before it.
    pub first_block: usize,
    /// Blocks of the prompt part wanted, `first_block..block_count` are sent.
    pub block_count: usize,
    /// Tokens that all those blocks cover.
    pub token_count: usize,
    /// Over the hashes of the blocks sent.
    pub digest: ManifestDigest,
    /// Encoded bytes that may be sent at first.
    pub credit_bytes: u64,
    /// No credit and no other word from the receiver for so long, while
    /// something waits for it: the handoff has stalled.
    pub stall: Duration,
}

/// Where a handoff stands on the prefill node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SenderState {
    /// Waiting for its turn to compute.
    Queued,
    /// Chunks are computed; finished blocks are sent as credit allows.
    Computing,
    /// Everything is computed, not everything is sent.
    Draining,
    /// The manifest is out; waiting for `Installed`.
    AwaitingInstall,
    /// Over; everything is freed.
    Ended,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEvent {
    /// The engine took the prompt up.
    ComputeStarted,
    /// A block's rows are exported and encoded; blocks come in order.
    BlockEncoded {
        /// Block of the prompt.
        index: usize,
        /// Encoded bytes of all its parts.
        bytes: u64,
    },
    /// All tokens are computed and all blocks encoded.
    ComputeFinished,
    /// The engine could not compute the prompt.
    ComputeFailed,
    /// The stream took the block's bytes.
    BlockSent {
        /// Block of the prompt.
        index: usize,
    },
    /// The receiver allows more bytes.
    CreditReceived {
        /// Encoded bytes.
        bytes: u64,
    },
    /// The receiver runs the sequence.
    InstalledReceived,
    /// The receiver gave up.
    CancelReceived,
    /// This node gives up (it stops).
    CancelRequested,
    /// Stream or connection are gone.
    PeerLost,
    /// `next_deadline` has passed.
    DeadlinePassed,
}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderAction {
    /// Send all frames of this block, then report `BlockSent`.
    SendBlock {
        /// Block of the prompt.
        index: usize,
    },
    /// Send the manifest.
    SendComplete {
        /// Blocks sent.
        block_count: usize,
        /// Tokens covered, with the blocks that the receiver had.
        token_count: usize,
        /// Over the hashes of the blocks sent.
        digest: ManifestDigest,
    },
    /// Tell the receiver that the handoff is off; reset frame streams.
    SendCancel {
        /// For logs.
        reason: &'static str,
    },
    /// Take the prompt out of the queue, or stop before its next chunk.
    StopComputing,
    /// Drop so many encoded bytes.
    ReleaseStaged {
        /// Encoded bytes.
        bytes: u64,
    },
    /// The last action.
    End(SenderOutcome),
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SenderOutcome {
    /// The receiver runs the sequence.
    Installed,
    /// The receiver or this node gave up.
    Cancelled,
    /// The receiver is gone.
    PeerLost,
    /// The receiver gave neither credit nor any other word in time.
    Stalled,
    /// The engine could not compute the prompt.
    ComputeFailed,
}

impl SenderState {
    /// For errors and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Queued => "Queued",
            Self::Computing => "Computing",
            Self::Draining => "Draining",
            Self::AwaitingInstall => "AwaitingInstall",
            Self::Ended => "Ended",
        }
    }
}

impl SenderEvent {
    /// For errors and logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::ComputeStarted => "ComputeStarted",
            Self::BlockEncoded { .. } => "BlockEncoded",
            Self::ComputeFinished => "ComputeFinished",
            Self::ComputeFailed => "ComputeFailed",
            Self::BlockSent { .. } => "BlockSent",
            Self::CreditReceived { .. } => "CreditReceived",
            Self::InstalledReceived => "InstalledReceived",
            Self::CancelReceived => "CancelReceived",
            Self::CancelRequested => "CancelRequested",
            Self::PeerLost => "PeerLost",
            Self::DeadlinePassed => "DeadlinePassed",
        }
    }
}
