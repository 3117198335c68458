//! Where a request is prefilled and decoded, and why. Pure.
//!
//! ```text
//!  decode nodes ──fits, room, warm prefix, load──▶ one
//!  mode + uncached tokens on it ──▶ local | remote(candidates) + rule
//! ```
//!
//! The unit is *uncached tokens on the chosen decode node*, absolute and never
//! as a share of the prompt: a rule by ratio sends cold short prompts to the
//! prefill nodes, behind the long ones (NVIDIA Dynamo's disaggregation router
//! asks for both). Ties are broken by the seed, never by position.

mod choose;
pub(crate) mod file;

pub use choose::choose;
pub use file::PolicyFile;

/// When prompts are prefilled away from the decode node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Never.
    AlwaysLocal,
    /// Whenever there is something to compute.
    AlwaysRemote,
    /// From `local_below_tokens` uncached tokens on.
    Threshold,
}

/// What happens when no prefill node can take a prompt meant for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The decode node prefills it in bounded chunks.
    Local,
    /// The request is refused.
    Refuse,
}

/// The operator's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Which rule applies.
    pub mode: Mode,
    /// Prompts with fewer uncached tokens stay local in `Threshold` mode.
    pub local_below_tokens: usize,
    /// When no prefill node can.
    pub fallback: Fallback,
}

impl Default for Policy {
    /// 512 tokens: about what a decode node prefills in the time that two round
    /// trips and the start of a chunk cost on a remote node.
    fn default() -> Self {
        Self { mode: Mode::Threshold, local_below_tokens: 512, fallback: Fallback::Local }
    }
}

/// The arm that a client asked for, where the operator allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Prefill on the decode node.
    Local,
    /// Prefill on a prefill node.
    Remote,
}

/// What the policy sees of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestView {
    /// Prompt length.
    pub prompt_tokens: usize,
    /// Context that the sequence needs: prompt plus the answer asked for.
    pub needed_tokens: usize,
    /// The client's own wish.
    pub arm: Option<Arm>,
}

/// What the policy sees of a decode node that can take requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeView {
    /// Its name.
    pub name: String,
    /// Leading prompt tokens that are warm on it.
    pub cached_tokens: usize,
    /// Requests that it has and not ended.
    pub requests_in_flight: usize,
    /// Prompt tokens waiting or being computed on it.
    pub queue_tokens: u64,
    /// Sequences that can run on it at once.
    pub slots: usize,
    /// Of those, in use.
    pub slots_used: usize,
    /// Tokens that one sequence may have.
    pub context_tokens: usize,
    /// Whether its model can be prefilled elsewhere.
    pub installs_blocks: bool,
    /// Ready prefill nodes with the same model, layout and block length.
    pub prefill: Vec<PrefillView>,
}

/// What the policy sees of a prefill node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillView {
    /// Its name.
    pub name: String,
    /// Prompt tokens waiting or being computed on it.
    pub queue_tokens: u64,
    /// Tokens that one prompt may have.
    pub context_tokens: usize,
}

/// Who computes the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// The decode node itself.
    Local,
    /// One of these prefill nodes, best first. Never empty.
    Remote(Vec<String>),
}

/// The figures that a decision rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimates {
    /// Prompt length.
    pub prompt_tokens: usize,
    /// Of those, not warm on the chosen decode node.
    pub uncached_tokens: usize,
    /// Tokens queued on the best prefill node; 0 when local.
    pub prefill_queue_tokens: u64,
}

/// A choice and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The decode node.
    pub decode: String,
    /// Who computes the prompt.
    pub prefill: Prefill,
    /// Name of the rule that decided: in the header, the log, the metrics.
    pub rule: &'static str,
    /// What it rests on.
    pub estimates: Estimates,
}

/// Why no choice is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// None is ready.
    #[error("no decode node is ready")]
    NoDecodeNode,
    /// None has a context that long.
    #[error("the request needs {needed} tokens, the longest context of a ready decode node is {longest}")]
    TooLong {
        /// Tokens needed.
        needed: usize,
        /// Longest context.
        longest: usize,
    },
    /// None is ready and the policy forbids local prefill instead.
    #[error("no prefill node is ready, and the policy refuses local prefill instead")]
    NoPrefillNode,
}
