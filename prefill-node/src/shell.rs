//! The running node: listens, checks requests, starts handoffs, drains.
#![expect(clippy::disallowed_methods, reason = "shell: starts tasks and reads the clock")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine::{EngineError, Model, SessionConfig};
use host::ThreadEnd;
use kv_block::HandoffId;
use kv_transfer::{
    Connection, Credentials, Endpoint, HandoffMessage, Hello, MessageReceiver, MessageSender,
    PROTOCOL_VERSION, PrefillRequest, RefusalReason, Role, Shutdown, TransferError, Tuning, membership,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::Instrument;

use crate::PrefillConfig;
use crate::board::{Board, HandoffGuard};
use crate::engine_thread::{self, StartError};
use crate::handoff_task::{self, Handoff};
use crate::request::{Job, NodeFacts, Refusal};
use crate::scheduler::SchedulerConfig;
use crate::work_queue::{Submitted, Ticket, WorkQueue};

/// A stream whose request does not arrive for so long is given up.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);

/// For the last messages to leave, and for the engine's running chunk to end.
const CLOSING: Duration = Duration::from_secs(1);
const LAST_CHUNK: Duration = Duration::from_secs(10);

impl From<StartError> for NodeError {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Engine(error) => Self::Engine(error),
            StartError::Thread(reason) => Self::EngineThread(reason),
        }
    }
}

/// Why the node cannot run on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The model or the sessions cannot be used as configured.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Network or certificates.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A setting that only shows to be wrong beside the model.
    #[error("{field} is {value}, allowed {allowed}")]
    Config {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Range in words.
        allowed: String,
    },
    /// The thread that computes is gone.
    #[error("engine thread: {0}")]
    EngineThread(String),
}

/// Runs a prefill node until `shutdown` says otherwise and the handoffs have
/// ended, or the engine is gone.
pub async fn run(
    config: PrefillConfig,
    model: Arc<dyn Model>,
    credentials: Credentials,
    mut shutdown: watch::Receiver<Shutdown>,
) -> Result<(), NodeError> {
    let model_name = model.name().to_owned();
    let (node, mut engine_ended) = Node::start(&config, model, shutdown.clone()).await?;
    let endpoint = bind(&config, &credentials)?;
    let mut tasks = JoinSet::new();
    // The router opens no streams to a prefill node: its connections are only kept.
    let (connections, mut router_connections) = mpsc::channel(1);
    tasks.spawn(host::task(async move { while router_connections.recv().await.is_some() {} }));
    let hello = node.hello(&config, model_name, endpoint.local_address());
    let state = node.board.subscribe();
    let member = membership::run(endpoint.clone(), config.router.clone(), hello, state, connections);
    tasks.spawn(host::task(member));
    tasks.spawn(host::task(accept(endpoint.clone(), node.clone())));
    tracing::info!(name = config.name, address = %endpoint.local_address(), "prefill node listens");
    let result = tokio::select! {
        biased;
        reason = engine_end(&mut engine_ended) => Err(NodeError::EngineThread(reason)),
        () = node.drained(&mut shutdown, Duration::from_secs_f64(config.drain_seconds)) => Ok(()),
    };
    node.stop_now(engine_ended).await;
    endpoint.close();
    let _ = timeout(CLOSING, endpoint.wait_idle()).await;
    result
}

pub(crate) fn bind(config: &PrefillConfig, credentials: &Credentials) -> Result<Endpoint, NodeError> {
    let address = config.listen.parse::<SocketAddr>().map_err(|_| NodeError::Config {
        field: "listen",
        value: config.listen.clone(),
        allowed: "ADDRESS:PORT".to_owned(),
    })?;
    Ok(Endpoint::bind(address, credentials, &Tuning::default())?)
}

/// What all connections share; cheap to clone.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) board: Board,
    facts: Arc<NodeFacts>,
    queue: WorkQueue,
    permits: Arc<Semaphore>,
    handoffs_max: usize,
    shutdown: watch::Receiver<Shutdown>,
    stop: Arc<watch::Sender<bool>>,
}

/// Resolves when the engine thread has ended; `None` where there is none to end.
pub(crate) type EngineEnded = Option<ThreadEnd>;

impl Node {
    /// Makes the sessions and starts the engine thread.
    pub(crate) async fn start(
        config: &PrefillConfig,
        model: Arc<dyn Model>,
        shutdown: watch::Receiver<Shutdown>,
    ) -> Result<(Self, EngineEnded), NodeError> {
        let context_tokens = context_tokens(config, &*model)?;
        let board = Board::new(context_tokens * config.max_resident);
        let queue = WorkQueue::new(scheduler_config(config), board.clone());
        let (fingerprint, vocabulary_size) = (model.fingerprint(), model.vocabulary().size());
        let (layout, ended) = match model.blocks_supported() {
            Ok(()) => {
                let sessions = session_config(config, context_tokens);
                let (cpus, count) = (config.cpus.clone(), config.max_resident);
                let engine =
                    engine_thread::start(model, sessions, count, cpus, queue.clone(), board.clone()).await?;
                let unsent = config.staging_bytes / engine.layout.bytes_per_token().max(1);
                queue.allow_unsent(usize::try_from(unsent).unwrap_or(usize::MAX));
                (Ok(engine.layout), Some(engine.ended))
            }
            Err(reason) => {
                tracing::warn!(reason, "this model cannot be prefilled remotely: every handoff is refused");
                (Err(reason), None)
            }
        };
        let (block_tokens, chunk_tokens) = (config.block_tokens, config.chunk_tokens);
        let facts =
            NodeFacts { fingerprint, layout, vocabulary_size, context_tokens, block_tokens, chunk_tokens };
        let node = Self {
            board,
            facts: Arc::new(facts),
            queue,
            permits: Arc::new(Semaphore::new(config.handoffs_max)),
            handoffs_max: config.handoffs_max,
            shutdown,
            stop: Arc::new(watch::Sender::new(false)),
        };
        Ok((node, ended))
    }

    fn hello(&self, config: &PrefillConfig, model: String, address: SocketAddr) -> Hello {
        let (layout, blocks_unsupported) = match &self.facts.layout {
            Ok(layout) => (layout.id().0, String::new()),
            Err(reason) => ([0; 32], reason.clone()),
        };
        Hello {
            protocol: PROTOCOL_VERSION,
            name: config.name.clone(),
            role: "prefill".to_owned(),
            address: address.to_string(),
            pid: std::process::id(),
            model,
            fingerprint: self.facts.fingerprint.0,
            layout,
            block_tokens: config.block_tokens as u32,
            context_tokens: self.facts.context_tokens as u32,
            slots: config.max_resident as u32,
            blocks_unsupported,
        }
    }

    /// Waits for the order to stop, then until no handoff is left, the time is
    /// up, or the order has become urgent.
    async fn drained(&self, shutdown: &mut watch::Receiver<Shutdown>, drain: Duration) {
        // A lost signal handler counts as an order: nobody else could give one.
        let _ = shutdown.wait_for(|order| *order != Shutdown::Running).await;
        self.board.drain();
        tracing::info!("draining");
        tokio::select! {
            biased;
            () = self.no_handoffs() => {}
            () = tokio::time::sleep(drain) => {}
            _ = shutdown.wait_for(|order| *order == Shutdown::Now) => {}
        }
    }

    /// Cancels what is left and ends the engine thread.
    pub(crate) async fn stop_now(&self, engine_ended: EngineEnded) {
        self.stop.send_replace(true);
        let _ = timeout(CLOSING, self.no_handoffs()).await;
        self.queue.stop();
        if let Some(ended) = engine_ended
            && timeout(LAST_CHUNK, ended).await.is_err()
        {
            tracing::warn!("the engine is still computing; leaving it behind");
        }
    }

    async fn no_handoffs(&self) {
        let mut state = self.board.subscribe();
        // Cannot fail: the board is the sender.
        let _ = state.wait_for(|state| state.status.handoffs_active == 0).await;
    }

    /// Everything between the request and its handoff; `Err` is the answer to the peer.
    fn admit(&self, request: PrefillRequest) -> Result<Admitted, Refusal> {
        let busy = |message| Refusal { reason: RefusalReason::Busy, message };
        if *self.shutdown.borrow() != Shutdown::Running {
            return Err(Refusal {
                reason: RefusalReason::Draining,
                message: "this prefill node is stopping".to_owned(),
            });
        }
        let job = self.facts.check(request)?;
        let limit = self.handoffs_max;
        let permit = self.permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| busy(format!("{limit} handoffs are under way, the limit")))?;
        match self.queue.submit(host::now(), job.prompt.clone()) {
            Submitted::Queued(ticket) => {
                Ok(Admitted { job: Arc::new(job), ticket, guard: self.board.handoff(), _permit: permit })
            }
            Submitted::Full(message) => Err(busy(message)),
        }
    }
}

struct Admitted {
    job: Arc<Job>,
    ticket: Ticket,
    guard: HandoffGuard,
    _permit: OwnedSemaphorePermit,
}

/// Serves decode nodes until the endpoint closes.
pub(crate) async fn accept(endpoint: Endpoint, node: Node) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // First, or a flood of newcomers would keep the ended ones in memory.
            Some(_) = connections.join_next() => {}
            connection = endpoint.accept() => match connection {
                Some(connection) => { connections.spawn(host::task(serve_connection(connection, node.clone()))); }
                None => return,
            },
        }
    }
}

async fn serve_connection(connection: Connection, node: Node) {
    if connection.peer_role() != Role::Decode {
        tracing::warn!(peer = connection.peer_name(), role = ?connection.peer_role(), "not a decode node");
        connection.close("only decode nodes may connect to a prefill node");
        return;
    }
    let mut handoffs = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(ended) = handoffs.join_next() => log_panic(ended),
            stream = connection.accept() => match stream {
                Ok(streams) => { handoffs.spawn(host::task(serve_stream(connection.clone(), streams, node.clone()))); }
                Err(error) => {
                    tracing::info!(peer = connection.peer_name(), %error, "decode node disconnected");
                    break;
                }
            },
        }
    }
    // Each sees the loss of the connection and ends in order.
    while let Some(ended) = handoffs.join_next().await {
        log_panic(ended);
    }
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "handoff task");
    }
}

async fn serve_stream(connection: Connection, streams: (MessageSender, MessageReceiver), node: Node) {
    let (mut to_peer, mut from_peer) = streams;
    let request = match timeout(REQUEST_PATIENCE, from_peer.recv::<PrefillRequest>()).await {
        Ok(Ok(Some(request))) => request,
        Ok(Err(error)) => {
            let refusal = Refusal { reason: RefusalReason::Invalid, message: error.to_string() };
            return answer_refusal(to_peer, refusal).await;
        }
        Ok(Ok(None)) | Err(_) => return to_peer.reset(),
    };
    let handoff = HandoffId(request.handoff);
    let request_id = request.request_id.clone();
    let span = tracing::debug_span!("handoff", id = %handoff, request = request_id);
    async move {
        let admitted = match node.admit(request) {
            Ok(admitted) => admitted,
            Err(refusal) => return answer_refusal(to_peer, refusal).await,
        };
        let accepted = HandoffMessage::Accepted {
            queued_tokens: admitted.ticket.tokens_ahead as u64,
            expected_start_ms: admitted.ticket.expected_start.as_millis() as u64,
            // Known when the prompt begins; `Progress` states it then.
            reused_tokens: 0,
            chunk_tokens: node.facts.chunk_tokens as u32,
        };
        if !matches!(timeout(REQUEST_PATIENCE, to_peer.send(&accepted)).await, Ok(Ok(()))) {
            return;
        }
        let Admitted { job, ticket, guard, _permit } = admitted;
        let (board, stop) = (node.board.clone(), node.stop.subscribe());
        let outcome =
            handoff_task::run(Handoff { job, ticket, guard, board, connection, to_peer, from_peer, stop })
                .await;
        tracing::debug!(?outcome, "handoff ended");
    }
    .instrument(span)
    .await;
}

async fn answer_refusal(mut to_peer: MessageSender, refusal: Refusal) {
    let Refusal { reason, message } = refusal;
    tracing::debug!(?reason, message, "handoff refused");
    let refused = HandoffMessage::Refused { reason, message };
    if let Ok(Ok(())) = timeout(REQUEST_PATIENCE, to_peer.send(&refused)).await {
        to_peer.finish();
    }
}

async fn engine_end(ended: &mut EngineEnded) -> String {
    let Some(receiver) = ended else { return std::future::pending().await };
    let result = receiver.await;
    *ended = None;
    match result {
        Ok(Err(reason)) => reason,
        Ok(Ok(())) | Err(_) => "ended".to_owned(),
    }
}

fn context_tokens(config: &PrefillConfig, model: &dyn Model) -> Result<usize, NodeError> {
    let trained = model.context_tokens_max();
    match config.context_tokens {
        0 => Ok(trained),
        tokens if tokens <= trained => Ok(tokens),
        tokens => Err(NodeError::Config {
            field: "context_tokens",
            value: tokens.to_string(),
            allowed: format!("0 to {trained}, which the model was trained for"),
        }),
    }
}

fn scheduler_config(config: &PrefillConfig) -> SchedulerConfig {
    SchedulerConfig {
        block_tokens: config.block_tokens,
        chunk_tokens: config.chunk_tokens,
        max_resident: config.max_resident,
        queue_tokens_max: config.queue_tokens_max,
        prompts_max: config.handoffs_max,
    }
}

fn session_config(config: &PrefillConfig, context_tokens: usize) -> SessionConfig {
    let threads = match (config.threads, config.cpus.len()) {
        (0, 0) => std::thread::available_parallelism().map_or(1, usize::from),
        (0, cpus) => cpus,
        (threads, _) => threads,
    };
    // A chunk never exceeds the context.
    let batch_tokens_max = config.chunk_tokens.min(context_tokens);
    SessionConfig { slots: 1, context_tokens, batch_tokens_max, threads }
}
