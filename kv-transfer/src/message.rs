//! The messages, as rkyv sees them. Field order is wire format: golden bytes in
//! the tests fail when it changes, and then [`crate::PROTOCOL_VERSION`] must too.
//!
//! Hashes travel as bare arrays and tokens as `u32`; the nodes turn them into
//! `kv-block` types at once.

use rkyv::{Archive, Deserialize, Serialize};

/// First message of a node on its control stream to the router.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Hello {
    /// The sender's [`crate::PROTOCOL_VERSION`].
    pub protocol: u32,
    /// Name of the node, unique in the mesh.
    pub name: String,
    /// `"prefill"` or `"decode"`.
    pub role: String,
    /// Address that peers connect to.
    pub address: String,
    /// Operating system process.
    pub pid: u32,
    /// Model name for people.
    pub model: String,
    /// `kv_block::Fingerprint`.
    pub fingerprint: [u8; 32],
    /// `kv_block::LayoutId`.
    pub layout: [u8; 32],
    /// Tokens per block.
    pub block_tokens: u32,
    /// Tokens that one sequence may have.
    pub context_tokens: u32,
    /// Running sequences (decode) or resident prompts (prefill).
    pub slots: u32,
    /// Why this model cannot be prefilled remotely; empty if it can.
    pub blocks_unsupported: String,
}

/// What a node is doing now; sent when it changes and at least every 250 ms.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Default)]
pub struct Status {
    /// Goes up by one per status.
    pub sequence: u64,
    /// Slots with a running sequence.
    pub slots_used: u32,
    /// Requests that the node has taken and not ended.
    pub requests_in_flight: u32,
    /// Handoffs that the node has begun and not ended.
    pub handoffs_active: u32,
    /// KV bytes received and not yet installed, or encoded and not yet sent.
    pub staged_bytes: u64,
    /// Prompt tokens waiting or being computed.
    pub queue_tokens: u64,
    /// Tokens resident in slots, running or warm.
    pub kv_used_tokens: u64,
    /// Tokens that all slots can hold.
    pub kv_total_tokens: u64,
    /// Prompt tokens computed here since the start.
    pub prefill_tokens_total: u64,
    /// Prompt tokens whose KV was installed from a peer since the start.
    pub installed_tokens_total: u64,
    /// Tokens generated since the start.
    pub generated_tokens_total: u64,
    /// KV bytes sent to or received from peers, as encoded, since the start.
    pub transfer_bytes_total: u64,
    /// Handoffs ended well since the start.
    pub handoffs_completed_total: u64,
    /// Handoffs ended otherwise since the start.
    pub handoffs_failed_total: u64,
    /// Time that the installed ones took on the decode node, from the request to
    /// the install.
    pub handoff_micros_total: u64,
    /// Of that, the time after the last token was computed: what the transfer
    /// and the install add to the prefill.
    pub handoff_tail_micros_total: u64,
    /// Frames that came for a handoff already ended.
    pub late_frames_total: u64,
    /// Engine steps since the start; a node whose work waits while this stands
    /// still is frozen.
    pub steps_total: u64,
    /// Longest recent engine step in microseconds.
    pub step_micros_max: u64,
}

/// Control stream, both directions.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum ControlMessage {
    /// Node → router, first.
    Hello(Hello),
    /// Router → node: registered.
    Welcome {
        /// The router's protocol version.
        protocol: u32,
    },
    /// Router → node: not registered; the router closes after it.
    Rejected {
        /// Names both values of what differs.
        reason: String,
    },
    /// Node → router.
    Status(Status),
    /// Node → router: the full blocks now warm in a slot, replacing what was
    /// said of it before. Empty: nothing.
    Warm {
        /// The slot.
        slot: u16,
        /// `kv_block::BlockHash` chain.
        hashes: Vec<[u8; 32]>,
    },
    /// Node → router: takes no new requests (SIGTERM).
    Draining,
}

/// How the next token is chosen.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus; 1 is off.
    pub top_p: f32,
    /// Keep this many; 0 is off.
    pub top_k: u32,
    /// Drop tokens below this share of the best; 0 is off.
    pub min_p: f32,
    /// Same seed and same logits give the same tokens.
    pub seed: u64,
}

/// A prefill node that the router proposes.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct PrefillCandidate {
    /// Its name.
    pub name: String,
    /// Where it listens.
    pub address: String,
}

/// First message on a request stream, router → decode node. The router ends a
/// request early by resetting the stream.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Generate {
    /// For logs.
    pub request_id: String,
    /// The whole prompt.
    pub tokens: Vec<u32>,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// Go on after an end token.
    pub ignore_end: bool,
    /// `kv_block::IsolationKey`.
    pub isolation: [u8; 32],
    /// Prefill nodes in order of preference; empty means prefill locally.
    pub prefill: Vec<PrefillCandidate>,
    /// Whether to prefill locally when no candidate can.
    pub fallback_local: bool,
}

/// Decode node → router on a request stream.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// The prompt is complete; tokens follow.
    Started {
        /// Prompt tokens that nobody computed for this request.
        cached_tokens: u32,
        /// Where the prefill was done in the end: a node name, or empty for
        /// locally.
        prefilled_by: String,
        /// Why it was not done where the router wanted, or empty.
        fallback_reason: String,
        /// Tokens whose KV came from the prefill node.
        installed_tokens: u32,
    },
    /// Generated tokens, in order. An end token is not sent.
    Tokens(Vec<u32>),
    /// The last event of a request that went well.
    Finished(FinishReason),
    /// The last event of one that did not.
    Failed {
        /// What kind of failure.
        kind: FailureKind,
        /// For people; never prompt text.
        message: String,
    },
}

/// Why generation ended.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model said so.
    Stop,
    /// `max_tokens` or the context.
    Length,
}

/// Kinds of failure, each with its HTTP status.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The request cannot be served as it is (400).
    Invalid,
    /// No room now; try again (503).
    Busy,
    /// Remote prefill failed and local fallback is not allowed (503).
    PrefillUnavailable,
    /// The node is stopping (503).
    Draining,
    /// The engine failed (500).
    Internal,
}

/// First message on a handoff stream, decode → prefill.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct PrefillRequest {
    /// The sender's [`crate::PROTOCOL_VERSION`].
    pub protocol: u32,
    /// `kv_block::HandoffId`.
    pub handoff: [u8; 16],
    /// For logs.
    pub request_id: String,
    /// `kv_block::Fingerprint`.
    pub fingerprint: [u8; 32],
    /// `kv_block::LayoutId`.
    pub layout: [u8; 32],
    /// `kv_block::IsolationKey`.
    pub isolation: [u8; 32],
    /// Tokens per block.
    pub block_tokens: u32,
    /// The whole prompt.
    pub tokens: Vec<u32>,
    /// Leading blocks that the decode node has; they are not sent.
    pub have_blocks: u32,
    /// KV is wanted for tokens `0..end`.
    pub end: u32,
    /// Codec ids that the decode node can decode, best first.
    pub codecs: Vec<u16>,
    /// Encoded bytes that may be sent before more credit is given.
    pub credit_bytes: u64,
}

/// Handoff stream, both directions, after the request.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum HandoffMessage {
    /// Prefill → decode.
    Accepted {
        /// Tokens queued before this prompt.
        queued_tokens: u64,
        /// Milliseconds until the first frame, as far as the node knows.
        expected_start_ms: u64,
        /// Prompt tokens whose KV the node still has and will not compute.
        reused_tokens: u32,
        /// Tokens per chunk.
        chunk_tokens: u32,
    },
    /// Prefill → decode, last message.
    Refused {
        /// Why.
        reason: RefusalReason,
        /// Names the values that differ or the limit.
        message: String,
    },
    /// Prefill → decode: still alive; sent per chunk, and each second while
    /// queued or computing.
    Progress {
        /// Prompt tokens computed (or reused) so far.
        computed_tokens: u32,
        /// Prompt tokens that the node will not compute because it has them.
        reused_tokens: u32,
    },
    /// Decode → prefill: further encoded bytes that may be sent.
    Credit {
        /// Bytes.
        bytes: u64,
    },
    /// Prefill → decode: the manifest. Everything was sent.
    Complete {
        /// Blocks sent.
        block_count: u32,
        /// Tokens that those blocks and the ones before cover.
        token_count: u32,
        /// `kv_block::ManifestDigest` of the blocks sent.
        digest: [u8; 32],
    },
    /// Decode → prefill, last message: the sequence runs.
    Installed,
    /// Either side, last message.
    Cancel {
        /// For logs.
        reason: String,
    },
}

/// Why a prefill node says no. None of these is an error of the node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The queue is full.
    Busy,
    /// Protocol, fingerprint, layout or block length differ.
    Mismatch,
    /// The prompt does not fit the context.
    TooLong,
    /// No codec in common.
    NoCodec,
    /// The node is stopping.
    Draining,
    /// The request makes no sense.
    Invalid,
}
