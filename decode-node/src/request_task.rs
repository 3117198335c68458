//! One request's shell: from `Generate` to the last event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine::{BlobTemplate, InstallBlob};
use kv_block::{BlockTable, ChainSeed, Fingerprint, HandoffId, IsolationKey, Token};
use kv_transfer::{
    FailureKind, Generate, MessageReceiver, MessageSender, PROTOCOL_VERSION, PrefillCandidate,
    PrefillRequest, RequestEvent, TransferError,
};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::engine_thread::Engine;
use crate::handoff_task::{self, HandoffEnd, HandoffJob};
use crate::peers::Peers;
use crate::sequence::{NewSequence, Prefix, RequestKey, SequenceEvent};
use crate::staging::Staging;
use crate::stats::Stats;

/// Tokens that may be joined into one message; bounds its size, not its delay.
const TOKENS_PER_MESSAGE: usize = 64;

/// Handoffs at a slow prefill node can hold the staging memory for long;
/// computing here is then the better way.
const STAGING_PATIENCE: Duration = Duration::from_secs(30);

/// What all requests of a node share.
pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) stats: Arc<Stats>,
    pub(crate) peers: Peers,
    pub(crate) staging: Staging,
    /// Where bulk transfers run, apart from streams that people wait for.
    pub(crate) bulk: tokio::runtime::Handle,
    /// `Err` with the reason where prefixes cannot be installed.
    pub(crate) template: Result<Arc<BlobTemplate>, String>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) block_tokens: usize,
    pub(crate) context_tokens: usize,
    pub(crate) vocabulary_size: usize,
    pub(crate) credit_window_bytes: u64,
    pub(crate) stall_min: Duration,
    pub(crate) queue_requests_max: usize,
    pub(crate) draining: watch::Receiver<bool>,
    pub(crate) next_key: AtomicU64,
}

/// Where the prompt was computed, for the `Started` event.
#[derive(Default)]
struct Prefilled {
    by: String,
    reused_tokens: usize,
    fallback_reason: String,
}

type Failure = (FailureKind, String);

/// Serves one request stream to its end. Whatever way it ends, the engine
/// forgets the request.
pub(crate) async fn serve(node: Arc<Node>, mut sender: MessageSender, mut inbox: MessageReceiver) {
    let _counted = node.stats.request();
    let request = match inbox.recv::<Generate>().await {
        Ok(Some(request)) => request,
        Ok(None) => return,
        Err(error) => {
            tracing::warn!(%error, "request stream without a request");
            return;
        }
    };
    let cancel = CancellationToken::new();
    let _cancel_on_return = cancel.clone().drop_guard();
    let events = async {
        match node.admit(&request) {
            Ok(()) => node.clone().generate(request, &mut sender, cancel).await,
            Err(failure) => fail(&mut sender, failure).await,
        }
    };
    tokio::select! {
        biased;
        result = events => match result {
            Ok(()) => sender.finish(),
            Err(error) => tracing::debug!(%error, "router is gone"),
        },
        // The router has nothing more to say: an end of its side is a reset.
        () = gone(&mut inbox) => {}
    }
}

/// Resolves when the router gave the request up.
async fn gone(inbox: &mut MessageReceiver) {
    loop {
        match inbox.recv::<Generate>().await {
            // A finished sending side is in order: the request was all it had to say.
            Ok(None) => return std::future::pending().await,
            Ok(Some(_)) => {}
            Err(_) => return,
        }
    }
}

async fn fail(sender: &mut MessageSender, (kind, message): Failure) -> Result<(), TransferError> {
    sender.send(&RequestEvent::Failed { kind, message }).await
}

impl Node {
    fn admit(&self, request: &Generate) -> Result<(), Failure> {
        let invalid = |message: String| Err((FailureKind::Invalid, message));
        let prompt = request.tokens.len();
        if *self.draining.borrow() {
            return Err((FailureKind::Draining, "the node is stopping".to_owned()));
        }
        if self.stats.requests() > self.queue_requests_max {
            let message =
                format!("{} requests are waiting or running, limit reached", self.queue_requests_max);
            return Err((FailureKind::Busy, message));
        }
        if prompt == 0 || prompt >= self.context_tokens {
            return invalid(format!("prompt has {prompt} tokens, allowed 1 to {}", self.context_tokens - 1));
        }
        // The position only: token ids are the prompt, and prompts stay out of messages.
        let vocabulary = self.vocabulary_size;
        if let Some(at) = request.tokens.iter().position(|token| *token as usize >= vocabulary) {
            return invalid(format!("token {at} of the prompt is outside the vocabulary of {vocabulary}"));
        }
        if request.max_tokens == 0 {
            return invalid("max_tokens is 0, allowed from 1".to_owned());
        }
        let sampling = &request.sampling;
        if ![sampling.temperature, sampling.top_p, sampling.min_p].iter().all(|value| value.is_finite()) {
            return invalid("sampling parameters must be finite".to_owned());
        }
        Ok(())
    }

    async fn generate(
        self: Arc<Self>,
        request: Generate,
        sender: &mut MessageSender,
        cancel: CancellationToken,
    ) -> Result<(), TransferError> {
        let key = RequestKey(self.next_key.fetch_add(1, Relaxed));
        let (events, mut inbox) = mpsc::unbounded_channel();
        let _forget = Forget { engine: self.engine.clone(), key };
        let sequence = Sequence::new(key, &request, events);
        let prefilled = if request.prefill.is_empty() {
            self.engine.run(sequence.with(None));
            drop(sequence);
            Prefilled::default()
        } else {
            match self.clone().prefill_remotely(request, sequence, cancel).await {
                Ok(prefilled) => prefilled,
                Err(failure) => return fail(sender, failure).await,
            }
        };
        forward(&mut inbox, sender, &prefilled).await
    }

    /// On the bulk runtime, so that frames never delay tokens.
    async fn prefill_remotely(
        self: Arc<Self>,
        request: Generate,
        sequence: Sequence,
        cancel: CancellationToken,
    ) -> Result<Prefilled, Failure> {
        let bulk = self.bulk.clone();
        let task = host::spawn_on(&bulk, async move { self.remote(request, sequence, cancel).await });
        task.await.unwrap_or_else(|error| Err((FailureKind::Internal, format!("handoff task: {error}"))))
    }

    async fn remote(
        &self,
        request: Generate,
        sequence: Sequence,
        cancel: CancellationToken,
    ) -> Result<Prefilled, Failure> {
        let template = match &self.template {
            Ok(template) => template.clone(),
            Err(reason) => return self.fall_back(&request, &sequence, None, reason.clone()),
        };
        let end = sequence.tokens.len() - 1;
        let bytes = template.blob_bytes(end);
        let room = tokio::select! {
            biased;
            room = timeout(STAGING_PATIENCE, self.staging.reserve(bytes)) => room,
            () = cancel.cancelled() => return Ok(Prefilled::default()),
        };
        let room = match room {
            Ok(Some(room)) => room,
            Ok(None) => {
                let reason = format!("its KV of {bytes} bytes is larger than the staging memory");
                return self.fall_back(&request, &sequence, None, reason);
            }
            Err(_) => {
                let reason = format!("no staging memory became free for {} s", STAGING_PATIENCE.as_secs());
                return self.fall_back(&request, &sequence, None, reason);
            }
        };
        let seed = ChainSeed::new(self.fingerprint, template.layout().id(), IsolationKey(request.isolation));
        let table = Arc::new(BlockTable::new(seed, &sequence.tokens[..end], self.block_tokens));
        let mut work = Work { blob: template.blob(end), salvaged_blocks: 0, table, template };
        let mut reason = String::new();
        for candidate in &request.prefill {
            match self.try_candidate(candidate, &request, &sequence, work, &cancel).await {
                Tried::Ended(prefilled) => return Ok(prefilled),
                Tried::Broken(rest, why) => {
                    tracing::warn!(
                        prefill = candidate.name,
                        reason = why,
                        request = request.request_id,
                        "handoff ended early"
                    );
                    reason = format!("{}: {why}", candidate.name);
                    work = rest;
                }
            }
            if work.salvaged_blocks == work.table.block_count() {
                break;
            }
        }
        // It copies up to the whole prefix, and others' frames come in on this thread.
        let salvaged = host::blocking(move || work.salvage()).await.ok().flatten();
        let salvage = salvaged.map(|blob| (blob, room));
        self.fall_back(&request, &sequence, salvage, reason)
    }

    async fn try_candidate(
        &self,
        candidate: &PrefillCandidate,
        request: &Generate,
        sequence: &Sequence,
        work: Work,
        cancel: &CancellationToken,
    ) -> Tried {
        let streams = async {
            let connection = self.peers.connection(&candidate.address).await?;
            if connection.peer_name() != candidate.name {
                // Its address has gone to another node meanwhile.
                let reason = format!("{} answers there, not {}", connection.peer_name(), candidate.name);
                return Err(TransferError::Connect { address: candidate.address.clone(), reason });
            }
            connection.open().await
        };
        let (messages, inbox) = tokio::select! {
            biased;
            opened = streams => match opened {
                Ok(streams) => streams,
                Err(error) => return Tried::Broken(work, error.to_string()),
            },
            () = cancel.cancelled() => return Tried::Ended(Prefilled::default()),
        };
        let id = HandoffId(host::random_bytes());
        let arrivals = self.peers.arrivals(id);
        let Work { blob, salvaged_blocks, table, template } = work;
        let job = HandoffJob {
            id,
            request: self.prefill_request(id, request, &table, &template, salvaged_blocks),
            table: table.clone(),
            layout: template.layout().clone(),
            blob,
            first_block: salvaged_blocks,
            credit_window_bytes: self.credit_window_bytes,
            stall_min: self.stall_min,
            install: sequence.install_order(self.engine.clone()),
            cancel: cancel.clone(),
            stats: self.stats.clone(),
        };
        let by = candidate.name.clone();
        match handoff_task::run(job, messages, inbox, arrivals).await {
            HandoffEnd::Installed { reused_tokens } => {
                Tried::Ended(Prefilled { by, reused_tokens, fallback_reason: String::new() })
            }
            // The engine has the sequence and computes the prompt itself.
            HandoffEnd::InstallFailed => Tried::Ended(Prefilled {
                fallback_reason: format!("{by}: the engine refused the KV"),
                ..Prefilled::default()
            }),
            HandoffEnd::Cancelled => Tried::Ended(Prefilled::default()),
            HandoffEnd::NotDone { blob, salvaged_blocks, reason } => {
                Tried::Broken(Work { blob, salvaged_blocks, table, template }, reason)
            }
        }
    }

    fn prefill_request(
        &self,
        id: HandoffId,
        request: &Generate,
        table: &BlockTable,
        template: &BlobTemplate,
        have_blocks: usize,
    ) -> PrefillRequest {
        PrefillRequest {
            protocol: PROTOCOL_VERSION,
            handoff: id.0,
            request_id: request.request_id.clone(),
            fingerprint: self.fingerprint.0,
            layout: template.layout().id().0,
            isolation: request.isolation,
            block_tokens: self.block_tokens as u32,
            tokens: request.tokens.clone(),
            have_blocks: have_blocks as u32,
            end: table.token_count() as u32,
            codecs: vec![kernels::RAW],
            credit_bytes: self.credit_window_bytes,
        }
    }

    /// Computes here what no prefill node did, in bounded chunks, if allowed.
    fn fall_back(
        &self,
        request: &Generate,
        sequence: &Sequence,
        salvage: Option<(InstallBlob, OwnedSemaphorePermit)>,
        reason: String,
    ) -> Result<Prefilled, Failure> {
        if !request.fallback_local {
            return Err((FailureKind::PrefillUnavailable, format!("remote prefill failed: {reason}")));
        }
        let prefix = salvage.map(|(blob, room)| Prefix {
            blob,
            installed: oneshot::channel().0,
            // The rows wait for a slot, and count until they are installed.
            room: Some(room),
        });
        self.engine.run(sequence.with(prefix));
        Ok(Prefilled { fallback_reason: reason, ..Prefilled::default() })
    }
}

/// The rows of a prompt under construction, across candidates.
struct Work {
    blob: InstallBlob,
    salvaged_blocks: usize,
    table: Arc<BlockTable>,
    template: Arc<BlobTemplate>,
}

impl Work {
    /// The verified part as a blob of its own.
    fn salvage(self) -> Option<InstallBlob> {
        let last = self.salvaged_blocks.checked_sub(1)?;
        Some(self.blob.prefix(&self.template, self.table.tokens_of(last).end))
    }
}

enum Tried {
    /// The engine has the sequence, or nobody wants it.
    Ended(Prefilled),
    /// Not this candidate; why.
    Broken(Work, String),
}

/// What stays the same of a sequence whatever way it reaches the engine.
struct Sequence {
    key: RequestKey,
    tokens: Arc<[Token]>,
    isolation: IsolationKey,
    sampling: kv_transfer::Sampling,
    max_tokens: usize,
    ignore_end: bool,
    events: mpsc::UnboundedSender<SequenceEvent>,
}

impl Sequence {
    fn new(key: RequestKey, request: &Generate, events: mpsc::UnboundedSender<SequenceEvent>) -> Self {
        Self {
            key,
            tokens: request.tokens.iter().map(|token| Token(*token)).collect(),
            isolation: IsolationKey(request.isolation),
            sampling: request.sampling.clone(),
            max_tokens: request.max_tokens as usize,
            ignore_end: request.ignore_end,
            events,
        }
    }

    fn with(&self, prefix: Option<Prefix>) -> NewSequence {
        NewSequence {
            key: self.key,
            tokens: self.tokens.clone(),
            isolation: self.isolation,
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            ignore_end: self.ignore_end,
            prefix,
            events: self.events.clone(),
        }
    }

    fn install_order(&self, engine: Engine) -> handoff_task::InstallOrder {
        let mut sequence = self.with(None);
        Box::new(move |blob| {
            let (installed, answer) = oneshot::channel();
            sequence.prefix = Some(Prefix { blob, installed, room: None });
            engine.run(sequence);
            answer
        })
    }
}

/// Tells the engine to forget the request, whatever way the task ends.
struct Forget {
    engine: Engine,
    key: RequestKey,
}

impl Drop for Forget {
    fn drop(&mut self) {
        self.engine.cancel(self.key);
    }
}

/// Passes engine events on, as many tokens per message as are there.
async fn forward(
    inbox: &mut mpsc::UnboundedReceiver<SequenceEvent>,
    sender: &mut MessageSender,
    prefilled: &Prefilled,
) -> Result<(), TransferError> {
    let mut events = Vec::with_capacity(TOKENS_PER_MESSAGE);
    while inbox.recv_many(&mut events, TOKENS_PER_MESSAGE).await > 0 {
        let mut tokens = Vec::new();
        for event in events.drain(..) {
            let SequenceEvent::Token(token) = event else {
                flush(&mut tokens, sender).await?;
                let last = !matches!(event, SequenceEvent::Started { .. });
                sender.send(&translate(event, prefilled)).await?;
                if last {
                    return Ok(());
                }
                continue;
            };
            tokens.push(token.0);
        }
        flush(&mut tokens, sender).await?;
    }
    fail(sender, (FailureKind::Internal, "the engine stopped".to_owned())).await
}

async fn flush(tokens: &mut Vec<u32>, sender: &mut MessageSender) -> Result<(), TransferError> {
    if tokens.is_empty() {
        return Ok(());
    }
    sender.send(&RequestEvent::Tokens(std::mem::take(tokens))).await
}

fn translate(event: SequenceEvent, prefilled: &Prefilled) -> RequestEvent {
    match event {
        SequenceEvent::Started { cached, installed } => RequestEvent::Started {
            cached_tokens: (cached + prefilled.reused_tokens) as u32,
            prefilled_by: if installed > 0 { prefilled.by.clone() } else { String::new() },
            fallback_reason: prefilled.fallback_reason.clone(),
            installed_tokens: installed as u32,
        },
        SequenceEvent::Token(token) => RequestEvent::Tokens(vec![token.0]),
        SequenceEvent::Finished(reason) => RequestEvent::Finished(reason),
        SequenceEvent::Failed { kind, message } => RequestEvent::Failed { kind, message },
    }
}
