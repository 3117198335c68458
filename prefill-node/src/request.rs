//! Checks a decode node's request: nothing in it is trusted. Pure.

use std::sync::Arc;

use kernels::Codec;
use kv_block::{BlockTable, ChainSeed, Fingerprint, HandoffId, IsolationKey, Layout, LayoutId, Token};
use kv_transfer::{PROTOCOL_VERSION, PrefillRequest, RefusalReason};

use crate::scheduler::Prompt;

/// More codecs than anybody has; the rest of a longer list is ignored.
const CODECS_MAX: usize = 64;

/// What this node is.
#[derive(Clone, Debug)]
pub(crate) struct NodeFacts {
    pub(crate) fingerprint: Fingerprint,
    /// `Err` with the reason for models that cannot be cut into blocks.
    pub(crate) layout: Result<Arc<Layout>, String>,
    pub(crate) vocabulary_size: usize,
    pub(crate) context_tokens: usize,
    pub(crate) block_tokens: usize,
    pub(crate) chunk_tokens: usize,
}

/// A request that can be served.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) handoff: HandoffId,
    pub(crate) prompt: Prompt,
    pub(crate) layout: Arc<Layout>,
    pub(crate) table: Arc<BlockTable>,
    pub(crate) first_block: usize,
    pub(crate) codec: &'static dyn Codec,
    /// Whether the receiver takes raw rows where `codec` cannot encode.
    pub(crate) raw_allowed: bool,
    pub(crate) credit_bytes: u64,
}

/// Why not, for the peer: names both values, or the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: RefusalReason,
    pub(crate) message: String,
}

impl NodeFacts {
    /// Checks everything about `request` that does not depend on the load.
    pub(crate) fn check(&self, request: PrefillRequest) -> Result<Job, Refusal> {
        let layout = self.check_identity(&request)?;
        self.check_sizes(&request)?;
        let codec = choose_codec(&request.codecs)?;
        let end = request.end as usize;
        let tokens: Arc<[Token]> = request.tokens[..end].iter().copied().map(Token).collect();
        let isolation = IsolationKey(request.isolation);
        let seed = ChainSeed::new(self.fingerprint, layout.id(), isolation);
        let table = Arc::new(BlockTable::new(seed, &tokens, self.block_tokens));
        let first_block = request.have_blocks as usize;
        Ok(Job {
            handoff: HandoffId(request.handoff),
            prompt: Prompt { tokens, export_from: first_block * self.block_tokens, isolation },
            layout,
            table,
            first_block,
            codec,
            raw_allowed: request.codecs.contains(&kernels::RAW),
            credit_bytes: request.credit_bytes,
        })
    }

    fn check_identity(&self, request: &PrefillRequest) -> Result<Arc<Layout>, Refusal> {
        let differ = |what: &str, theirs: &dyn std::fmt::Display, ours: &dyn std::fmt::Display| {
            refuse(RefusalReason::Mismatch, format!("{what} is {theirs} in the request, {ours} on this node"))
        };
        if request.protocol != PROTOCOL_VERSION {
            return differ("protocol", &request.protocol, &PROTOCOL_VERSION);
        }
        let layout = match &self.layout {
            Ok(layout) => layout,
            Err(reason) => return refuse(RefusalReason::Mismatch, unsupported(reason)),
        };
        let (fingerprint, layout_id) = (Fingerprint(request.fingerprint), LayoutId(request.layout));
        if fingerprint != self.fingerprint {
            return differ("model fingerprint", &fingerprint, &self.fingerprint);
        }
        if layout_id != layout.id() {
            return differ("KV layout", &layout_id, &layout.id());
        }
        if request.block_tokens as usize != self.block_tokens {
            return differ("block_tokens", &request.block_tokens, &self.block_tokens);
        }
        Ok(layout.clone())
    }

    fn check_sizes(&self, request: &PrefillRequest) -> Result<(), Refusal> {
        let invalid = |message| refuse(RefusalReason::Invalid, message);
        let (end, count, have) = (request.end as usize, request.tokens.len(), request.have_blocks as usize);
        if end == 0 || end > count {
            return invalid(format!("KV is wanted for tokens 0..{end} of a prompt of {count} tokens"));
        }
        if end > self.context_tokens {
            let limit = self.context_tokens;
            return refuse(RefusalReason::TooLong, format!("prompt has {end} tokens, the context {limit}"));
        }
        // The product stays far below overflow: u32 blocks of at most 1024 tokens.
        if have * self.block_tokens >= end {
            let size = self.block_tokens;
            return invalid(format!(
                "{have} blocks of {size} tokens are said to be there already, of {end} tokens"
            ));
        }
        let vocabulary = self.vocabulary_size;
        // The position only: token ids are the prompt, and prompts stay out of messages.
        match request.tokens.iter().position(|&token| token as usize >= vocabulary) {
            Some(at) => {
                invalid(format!("token {at} of the prompt is outside the vocabulary of {vocabulary}"))
            }
            None => Ok(()),
        }
    }
}

/// For refusals and the log.
pub(crate) fn unsupported(reason: &str) -> String {
    format!("this model cannot be prefilled remotely: {reason}")
}

fn choose_codec(theirs: &[u16]) -> Result<&'static dyn Codec, Refusal> {
    let theirs = &theirs[..theirs.len().min(CODECS_MAX)];
    match theirs.iter().find_map(|&id| kernels::codec(id).ok()) {
        Some(codec) => Ok(codec),
        None => refuse(
            RefusalReason::NoCodec,
            format!("none of the codecs {theirs:?} in the request is known here; {} (raw) is", kernels::RAW),
        ),
    }
}

fn refuse<T>(reason: RefusalReason, message: String) -> Result<T, Refusal> {
    Err(Refusal { reason, message })
}
