//! The life of one answer: placed, run, and placed again when its node fails.
//!
//! ```text
//!  choose ──▶ open stream, Generate ──▶ Started ──▶ Tokens… ──▶ Finished
//!     ▲                                    │           │
//!     └──── another decode node ◀── failed ┴───────────┘
//! ```
//!
//! A node that fails before the first token is replaced and the client sees
//! nothing. One that fails later is replaced too: the next node gets the prompt
//! with the tokens so far behind it and goes on from there. Where no node is
//! left, the answer waits a while for one to come back. Dropping a
//! [`Running`] resets the stream, which tells the node at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use host::Bug;
use kv_block::{IsolationKey, Token};
use kv_transfer::{
    FailureKind, FinishReason, Generate, MessageReceiver, MessageSender, RequestEvent, Sampling,
    TransferError,
};
use tokio::time::{sleep, timeout, timeout_at};

use crate::app::App;
use crate::clock;
use crate::openai::ApiError;
use crate::policy::{self, Arm, Decision, Fallback, Prefill, Refusal, RequestView};
use crate::registry::{Registration, Reservation};

/// What is to be generated.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) request_id: String,
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) sampling: Sampling,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) ignore_end: bool,
    pub(crate) isolation: IsolationKey,
    pub(crate) arm: Option<Arm>,
    /// When the client's request came in.
    pub(crate) accepted: Instant,
}

/// What comes out of a running answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The prompt is complete.
    Started,
    /// Generated tokens.
    Tokens(Vec<Token>),
    /// The end.
    Finished(FinishReason),
}

/// An answer that a decode node has taken.
pub(crate) struct Running {
    app: Arc<App>,
    job: Job,
    attempt: Attempt,
    /// Nodes that failed. One that has registered again is another one.
    tried: Vec<Registration>,
    generated: Vec<u32>,
    answer_tokens_max: u32,
    cached_tokens: u32,
    /// Read while settling, not yet handed out.
    ready: Option<Progress>,
    last_token: Option<Instant>,
}

/// One node's turn.
struct Attempt {
    decision: Decision,
    node: Registration,
    to_node: MessageSender,
    from_node: MessageReceiver,
    decode_load: Reservation,
    prefill_load: Option<Reservation>,
}

/// What came of waiting for a node.
enum Heard {
    Word(Result<Option<RequestEvent>, TransferError>),
    Nothing(Failure),
}

/// Why a node's turn ended.
enum Failure {
    /// Its engine has work and makes no steps.
    Frozen,
    /// It has not told its status for seconds, and another node could go on.
    Silent,
    /// The node said so.
    Told(FailureKind, String),
    /// The stream or connection broke.
    Broken(TransferError),
    /// The stream ended in order, but before the answer did.
    CutShort,
    /// The node does not take the request in time.
    NotTaken,
}

/// Nodes tried before the failure goes to the client: a request that kills
/// nodes must not go through the whole mesh.
const ATTEMPTS_MAX: usize = 3;
/// How often a silent node's health is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A node whose receive windows are full for so long does not run.
const TAKE_TIMEOUT: Duration = Duration::from_secs(5);

impl Running {
    /// Places the answer on a decode node, or says why that is not possible.
    pub(crate) async fn start(app: Arc<App>, job: Job) -> Result<Self, ApiError> {
        let mut tried = Vec::new();
        let mut failure = None;
        let began = clock::now();
        loop {
            let (attempt, answer_tokens_max) =
                match place(&app, &job, &[], job.max_tokens, u32::MAX, &tried).await {
                    Ok(placed) => placed,
                    Err(Unplaced::Failed(node, reason)) if tried.len() + 1 < ATTEMPTS_MAX => {
                        failure = Some(reason.api_error(node.name()));
                        tried.push(node);
                        continue;
                    }
                    Err(Unplaced::Failed(node, reason)) => return Err(reason.api_error(node.name())),
                    Err(Unplaced::Refused(refusal)) if worth_waiting(&app, refusal, began) => {
                        sleep(NODE_POLL).await;
                        continue;
                    }
                    Err(Unplaced::Refused(refusal)) => {
                        return Err(failure.unwrap_or_else(|| refused(&job, refusal)));
                    }
                };
            tracing::debug!(
                request = job.request_id,
                rule = attempt.decision.rule,
                decode = attempt.node.name(),
                "placed"
            );
            return Ok(Self {
                app,
                job,
                attempt,
                tried,
                generated: Vec::new(),
                answer_tokens_max,
                cached_tokens: 0,
                ready: None,
                last_token: None,
            });
        }
    }

    /// Waits until the node has begun, failed for good, or `deadline` passes: a
    /// refusal that comes at once shall have its own status, but a long prefill
    /// shall not hold the response back.
    pub(crate) async fn settle(&mut self, deadline: tokio::time::Instant) -> Result<(), ApiError> {
        while self.ready.is_none() {
            match timeout_at(deadline, self.attempt.from_node.recv()).await {
                Ok(received) => self.ready = self.digest(received).await?,
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// What comes next.
    pub(crate) async fn next(&mut self) -> Result<Progress, ApiError> {
        loop {
            if let Some(ready) = self.ready.take() {
                return Ok(ready);
            }
            self.ready = match self.hear().await {
                Heard::Word(received) => self.digest(received).await?,
                Heard::Nothing(failure) => self.replace(failure).await?,
            };
        }
    }

    /// The node's next word. A node whose engine stands still may go on telling
    /// its status for ever, so silence is no reason to wait on.
    async fn hear(&mut self) -> Heard {
        loop {
            match timeout(LOOK_EVERY, self.attempt.from_node.recv()).await {
                Ok(received) => return Heard::Word(received),
                Err(_) => {
                    if let Some(failure) = self.suspect(clock::now()) {
                        return Heard::Nothing(failure);
                    }
                }
            }
        }
    }

    /// What speaks against waiting on for the node.
    fn suspect(&self, now: Instant) -> Option<Failure> {
        let registry = self.app.registry();
        let node = registry.node(&self.attempt.decision.decode)?;
        if !node.silent(now) {
            return node.frozen(now).then_some(Failure::Frozen);
        }
        // A cut link may be mended in time, so the answer leaves only for a better chance.
        let without: Vec<_> = self.tried.iter().chain([&self.attempt.node]).cloned().collect();
        let better = without.len() < ATTEMPTS_MAX && registry.has_free_decode_node(now, &without);
        better.then_some(Failure::Silent)
    }

    /// The decision in force.
    pub(crate) fn decision(&self) -> &Decision {
        &self.attempt.decision
    }

    /// Prompt tokens that nobody computed for this request.
    pub(crate) fn cached_tokens(&self) -> u64 {
        u64::from(self.cached_tokens)
    }

    /// Ends the stream in order: the answer is complete.
    pub(crate) fn finish(self) {
        self.attempt.to_node.finish();
    }

    /// Takes one event; `None` if there is nothing for the client in it.
    async fn digest(
        &mut self,
        received: Result<Option<RequestEvent>, TransferError>,
    ) -> Result<Option<Progress>, ApiError> {
        let failure = match received {
            Ok(Some(RequestEvent::Started { cached_tokens, fallback_reason, .. })) => {
                return Ok(Some(self.started(cached_tokens, &fallback_reason)));
            }
            Ok(Some(RequestEvent::Tokens(tokens))) => return Ok(Some(self.tokens(tokens))),
            Ok(Some(RequestEvent::Finished(reason))) => return Ok(Some(Progress::Finished(reason))),
            Ok(Some(RequestEvent::Failed { kind, message })) => Failure::Told(kind, message),
            Ok(None) => Failure::CutShort,
            Err(error) => Failure::Broken(error),
        };
        self.replace(failure).await
    }

    fn started(&mut self, cached_tokens: u32, fallback_reason: &str) -> Progress {
        self.attempt.decode_load.prompt_done();
        self.attempt.prefill_load = None;
        if !fallback_reason.is_empty() {
            tracing::warn!(
                request = self.job.request_id,
                reason = fallback_reason,
                "prefilled locally instead"
            );
            self.app.metrics.fallbacks.increment(1);
        }
        // What a replacing node has of the answer is not part of the prompt.
        if self.generated.is_empty() {
            self.cached_tokens = cached_tokens.min(self.job.tokens.len() as u32);
            self.app.metrics.cached_tokens.increment(self.cached_tokens());
        }
        Progress::Started
    }

    fn tokens(&mut self, tokens: Vec<u32>) -> Progress {
        let now = clock::now();
        match self.last_token.replace(now) {
            None => self.app.metrics.ttft.record(now.duration_since(self.job.accepted)),
            Some(last) => self.app.metrics.itl.record(now.duration_since(last)),
        }
        self.app.metrics.completion_tokens.increment(tokens.len() as u64);
        self.generated.extend_from_slice(&tokens);
        Progress::Tokens(tokens.into_iter().map(Token).collect())
    }

    /// Another node's turn, if that can help.
    async fn replace(&mut self, failure: Failure) -> Result<Option<Progress>, ApiError> {
        let failed = self.attempt.decision.decode.clone();
        let error = failure.api_error(&failed);
        tracing::warn!(
            request = self.job.request_id,
            node = failed,
            error = error.message(),
            "decode node failed"
        );
        self.tried.push(self.attempt.node.clone());
        let left = self.answer_tokens_max.saturating_sub(self.generated.len() as u32);
        if left == 0 && !self.generated.is_empty() {
            return Ok(Some(Progress::Finished(FinishReason::Length)));
        }
        if !failure.may_go_elsewhere() {
            return Err(error);
        }
        let began = clock::now();
        while self.tried.len() < ATTEMPTS_MAX {
            let asked = self.job.max_tokens.map(|_| left);
            match place(&self.app, &self.job, &self.generated, asked, left, &self.tried).await {
                Ok((attempt, room)) => {
                    self.attempt = attempt;
                    self.answer_tokens_max = self.generated.len() as u32 + room;
                    self.app.metrics.replacements.increment(1);
                    return Ok(None);
                }
                Err(Unplaced::Failed(node, _)) => self.tried.push(node),
                Err(Unplaced::Refused(refusal))
                    if failure.node_is_gone() && worth_waiting(&self.app, refusal, began) =>
                {
                    sleep(NODE_POLL).await;
                }
                Err(Unplaced::Refused(_)) => break,
            }
        }
        if matches!(failure, Failure::Silent) {
            // It was not given up yet, and may still speak.
            self.tried.retain(|tried| *tried != self.attempt.node);
            return Ok(None);
        }
        Err(error)
    }
}

/// How often a request without a node looks for one.
const NODE_POLL: Duration = Duration::from_millis(100);

/// Whether a node may soon be there: one was a moment ago, and a restart takes
/// seconds. A mesh that has had none for long refuses at once.
fn worth_waiting(app: &App, refusal: Refusal, began: Instant) -> bool {
    let now = clock::now();
    refusal == Refusal::NoDecodeNode
        && now.saturating_duration_since(began) < app.node_wait
        && app.registry().had_decode_node(now, NODE_MISSED_FOR)
}

/// A node that was there so long ago is not coming back by itself.
const NODE_MISSED_FOR: Duration = Duration::from_secs(60);

/// Why no node took the answer.
enum Unplaced {
    /// The policy found none.
    Refused(Refusal),
    /// The node chosen did not take it.
    Failed(Registration, Failure),
}

/// Chooses a node and hands it the prompt with the tokens `generated` so far.
/// Returns the node's turn and the most tokens that it will generate: those asked
/// for, or what its context leaves, and never more than `most`.
async fn place(
    app: &App,
    job: &Job,
    generated: &[u32],
    max_tokens: Option<u32>,
    most: u32,
    tried: &[Registration],
) -> Result<(Attempt, u32), Unplaced> {
    let mut tokens = job.tokens.to_vec();
    tokens.extend(replayed(generated).iter().map(|token| Token(*token)));
    let chosen = choose(app, job, &tokens, max_tokens, tried).map_err(Unplaced::Refused)?;
    let node = chosen.node;
    let room = u32::try_from(chosen.context_tokens - tokens.len()).unwrap_or(u32::MAX);
    let answer_tokens_max = max_tokens.unwrap_or(room).min(most);
    let generate = Generate {
        request_id: job.request_id.clone(),
        tokens: tokens.iter().map(|token| token.0).collect(),
        // Draws depend on seed and position only, so a replay goes on as if
        // nothing had happened.
        sampling: job.sampling.clone(),
        max_tokens: answer_tokens_max,
        ignore_end: job.ignore_end,
        isolation: job.isolation.0,
        prefill: chosen.candidates,
        fallback_local: chosen.fallback_local,
    };
    let hand_over = async {
        let (mut to_node, from_node) = chosen.link.open().await?;
        to_node.send(&generate).await?;
        Ok((to_node, from_node))
    };
    let (to_node, from_node) = match timeout(TAKE_TIMEOUT, hand_over).await {
        Ok(Ok(streams)) => streams,
        Ok(Err(error)) => return Err(Unplaced::Failed(node, Failure::Broken(error))),
        Err(_) => return Err(Unplaced::Failed(node, Failure::NotTaken)),
    };
    let (decision, decode_load, prefill_load) = (chosen.decision, chosen.decode_load, chosen.prefill_load);
    let attempt = Attempt { decision, node, to_node, from_node, decode_load, prefill_load };
    Ok((attempt, answer_tokens_max))
}

/// What the next node gets of the answer so far: all of it.
fn replayed(generated: &[u32]) -> &[u32] {
    match generated {
        _ if host::has(Bug::ReplayForgetsAnswer) => &[],
        [before @ .., _] if host::has(Bug::ReplayDropsToken) => before,
        all => all,
    }
}

/// A decision with everything needed to carry it out.
struct Chosen {
    decision: Decision,
    node: Registration,
    link: kv_transfer::Connection,
    candidates: Vec<kv_transfer::PrefillCandidate>,
    context_tokens: usize,
    fallback_local: bool,
    decode_load: Reservation,
    prefill_load: Option<Reservation>,
}

/// Decides and reserves in one step, so that no other request sees the mesh in
/// between.
fn choose(
    app: &App,
    job: &Job,
    tokens: &[Token],
    max_tokens: Option<u32>,
    tried: &[Registration],
) -> Result<Chosen, Refusal> {
    let rules = *app.policy.borrow();
    let view = RequestView {
        prompt_tokens: tokens.len(),
        needed_tokens: tokens.len() + max_tokens.unwrap_or(1) as usize,
        arm: job.arm,
    };
    let registry = app.registry();
    let nodes = registry.decode_views(clock::now(), tokens, job.isolation, tried);
    let decision = policy::choose(&rules, &view, &nodes, clock::random())?;
    let node = registry.node(&decision.decode).ok_or(Refusal::NoDecodeNode)?;
    let uncached = decision.estimates.uncached_tokens as u64;
    let names: &[String] = match &decision.prefill {
        Prefill::Local => &[],
        Prefill::Remote(names) => names,
    };
    let first = names.first().and_then(|name| registry.node(name));
    let own_tokens = if names.is_empty() { uncached } else { 0 };
    Ok(Chosen {
        node: node.registration(),
        link: node.link.clone(),
        candidates: registry.candidates(names),
        context_tokens: node.hello.context_tokens as usize,
        fallback_local: rules.fallback == Fallback::Local,
        decode_load: Reservation::new(&node.load, own_tokens),
        prefill_load: first.map(|prefill| Reservation::new(&prefill.load, uncached)),
        decision,
    })
}

fn refused(job: &Job, refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::NoDecodeNode => ApiError::unavailable("no_decode_node", refusal.to_string()),
        Refusal::NoPrefillNode => ApiError::unavailable("prefill_unavailable", refusal.to_string()),
        Refusal::TooLong { longest, .. } => ApiError::context(job.tokens.len(), job.max_tokens, longest),
    }
}

impl Failure {
    /// Whether another node may do better.
    fn may_go_elsewhere(&self) -> bool {
        match self {
            Self::Told(FailureKind::Invalid | FailureKind::PrefillUnavailable, _) => false,
            Self::Told(FailureKind::Busy | FailureKind::Draining | FailureKind::Internal, _) => true,
            Self::Broken(_) | Self::CutShort | Self::NotTaken | Self::Frozen | Self::Silent => true,
        }
    }

    /// Whether it may come back as another one.
    fn node_is_gone(&self) -> bool {
        match self {
            Self::Told(kind, _) => *kind == FailureKind::Draining,
            Self::Broken(_) | Self::CutShort | Self::NotTaken | Self::Frozen => true,
            Self::Silent => false,
        }
    }

    fn api_error(&self, node: &str) -> ApiError {
        match self {
            Self::Told(FailureKind::Invalid, message) => ApiError::malformed(message),
            Self::Told(FailureKind::Busy, message) => {
                ApiError::unavailable("busy", format!("decode node {node} is busy: {message}"))
            }
            Self::Told(FailureKind::PrefillUnavailable, message) => {
                ApiError::unavailable("prefill_unavailable", format!("remote prefill failed: {message}"))
            }
            Self::Told(FailureKind::Draining, _) => {
                ApiError::unavailable("draining", format!("decode node {node} is stopping"))
            }
            Self::Told(FailureKind::Internal, message) => {
                ApiError::internal(format!("decode node {node} failed: {message}"))
            }
            Self::Broken(error) => {
                ApiError::unavailable("node_lost", format!("decode node {node} was lost: {error}"))
            }
            Self::CutShort => {
                ApiError::unavailable("node_lost", format!("decode node {node} ended its answer too early"))
            }
            Self::Frozen => {
                ApiError::unavailable("node_lost", format!("the engine of decode node {node} stands still"))
            }
            Self::Silent => {
                ApiError::unavailable("node_lost", format!("decode node {node} has fallen silent"))
            }
            Self::NotTaken => {
                ApiError::unavailable("busy", format!("decode node {node} does not take requests"))
            }
        }
    }
}
