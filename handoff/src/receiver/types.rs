//! What goes into a [`Receiver`](crate::Receiver) and what comes out.

use std::sync::Arc;
use std::time::Duration;

use kv_block::{BlockHash, BlockTable, Layout, ManifestDigest, Part};

/// What the receiver expects.
#[derive(Clone, Debug)]
pub struct ReceiverPlan {
    /// Blocks of tokens `0..end`, computed here from the prompt.
    pub table: Arc<BlockTable>,
    /// Shape of the rows.
    pub layout: Arc<Layout>,
    /// Blocks that this node has already; not to be sent.
    pub first_block: usize,
    /// Encoded bytes that may be under way and not yet stored. Raised to what
    /// one block needs.
    pub credit_window_bytes: u64,
    /// Shortest silence that counts as a stall. Grows with the gaps seen, up
    /// to 16 times.
    pub stall_min: Duration,
}

/// Where a handoff stands on the decode node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverState {
    /// The request is out.
    Requested,
    /// Accepted; frames may come.
    Receiving,
    /// Everything arrived and the manifest agrees; the engine installs.
    Installing,
    /// Over; everything is freed.
    Ended,
}

/// A frame header, as far as the protocol cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameFacts {
    /// Block of the prompt.
    pub block_index: usize,
    /// The hash that the sender states.
    pub block_hash: BlockHash,
    /// Which rows.
    pub part: Part,
    /// Bytes after decoding.
    pub raw_bytes: u64,
    /// Bytes on the wire.
    pub encoded_bytes: u64,
}

/// What to do with a frame whose header arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameVerdict {
    /// Decode it into place, then report `FrameStored`.
    Store,
    /// Late or already there: skip the payload.
    Drop,
    /// The peer breaks the protocol (this handoff is ended; drain actions).
    Violation(&'static str),
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEvent {
    /// The sender took the request.
    Accepted {
        /// Until the first frame, as far as the sender knows. Bounds, with
        /// much slack, how long signs of life alone keep the handoff going.
        expected_start: Duration,
    },
    /// The sender said no.
    Refused,
    /// The sender is alive; `computed_tokens` so far (0 while queued).
    Progress {
        /// Prompt tokens computed for this handoff, reused ones not counted:
        /// while this is 0 any word counts as progress, then only growth.
        computed_tokens: usize,
    },
    /// An admitted frame's rows are in place.
    FrameStored {
        /// As in the header.
        block_index: usize,
        /// As in the header.
        part: Part,
        /// As in the header.
        encoded_bytes: u64,
        /// Whether decoding succeeded and the checksum of the rows agrees.
        intact: bool,
    },
    /// The manifest. Frames may still be under way on other streams.
    Completed {
        /// Blocks sent.
        block_count: usize,
        /// Tokens covered.
        token_count: usize,
        /// Over the hashes of the blocks sent.
        digest: ManifestDigest,
    },
    /// The engine installed the blob.
    InstallDone,
    /// The engine refused the blob.
    InstallFailed,
    /// The client left or the node stops.
    CancelRequested,
    /// The sender gave up.
    CancelReceived,
    /// Stream or connection are gone.
    PeerLost,
    /// `next_deadline` has passed.
    DeadlinePassed,
}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Send the request with this credit.
    SendRequest {
        /// Encoded bytes.
        credit_bytes: u64,
    },
    /// Allow more.
    SendCredit {
        /// Encoded bytes.
        bytes: u64,
    },
    /// Install the blob, then report `InstallDone` or `InstallFailed`.
    Install,
    /// Tell the sender that the sequence runs.
    SendInstalled,
    /// Tell the sender that the handoff is off.
    SendCancel {
        /// For logs.
        reason: &'static str,
    },
    /// So many raw bytes of staged rows are no longer owed to this handoff.
    ReleaseStaged {
        /// Raw bytes.
        bytes: u64,
    },
    /// The last action.
    End(ReceiverOutcome),
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverOutcome {
    /// The sequence can run.
    Installed,
    /// The sender said no before anything was sent.
    Refused,
    /// The sender failed; what is complete, verified and contiguous can be used.
    Broken {
        /// Blocks from the start of the prompt, those that were here before included.
        salvaged_blocks: usize,
        /// For logs and the fallback header.
        reason: &'static str,
    },
    /// This side gave up.
    Cancelled,
    /// The engine refused the blob.
    InstallFailed,
}

impl ReceiverState {
    /// For errors and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Requested => "Requested",
            Self::Receiving => "Receiving",
            Self::Installing => "Installing",
            Self::Ended => "Ended",
        }
    }
}

impl ReceiverEvent {
    /// For errors and logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Accepted { .. } => "Accepted",
            Self::Refused => "Refused",
            Self::Progress { .. } => "Progress",
            Self::FrameStored { .. } => "FrameStored",
            Self::Completed { .. } => "Completed",
            Self::InstallDone => "InstallDone",
            Self::InstallFailed => "InstallFailed",
            Self::CancelRequested => "CancelRequested",
            Self::CancelReceived => "CancelReceived",
            Self::PeerLost => "PeerLost",
            Self::DeadlinePassed => "DeadlinePassed",
        }
    }
}
