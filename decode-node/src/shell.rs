//! The node as a process sees it: start, serve, drain, stop.
#![expect(clippy::disallowed_methods, reason = "a shell: it supplies the clock and starts tasks")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use engine::{EngineError, Model, SessionConfig};
use host::ThreadEnd;
use kv_transfer::membership::{self, NodeState};
use kv_transfer::{
    Connection, Credentials, Endpoint, Hello, PROTOCOL_VERSION, Shutdown, TransferError, Tuning,
};
use tokio::sync::{mpsc, watch};

use crate::config::DecodeConfig;
use crate::engine_thread::Engine;
use crate::peers::Peers;
use crate::request_task::{self, Node};
use crate::runner::{Runner, RunnerSettings};
use crate::staging::Staging;
use crate::stats::{self, Stats};

/// Most tokens of one engine step. Larger steps compute no faster, and a step
/// is what a newcomer waits for.
const BATCH_TOKENS_MAX: usize = 512;
/// Bulk transfers yield to decoding when both want the same core.
const BULK_NICE: i32 = 10;

/// Why the node cannot run or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The engine refused the configuration, or ended.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Keys or addresses are not usable.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A thread cannot be started.
    #[error("thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The engine thread ended by a panic; the reason is in the log.
    #[error("the engine thread ended")]
    EngineEnded,
}

/// Runs a decode node until `shutdown` says otherwise.
pub async fn run(
    config: DecodeConfig,
    model: Arc<dyn Model>,
    credentials: Credentials,
    mut shutdown: watch::Receiver<Shutdown>,
) -> Result<(), NodeError> {
    let started = start(&config, model.as_ref(), &credentials)?;
    let Started { node, hello, endpoint, draining, state, engine_ended } = started;
    let (connections, routers) = mpsc::channel(4);
    let kv_total = (config.slots * hello.context_tokens as usize) as u64;
    host::spawn(stats::publish(node.stats.clone(), kv_total, node.draining.clone(), state.0));
    host::spawn(membership::run(endpoint.clone(), config.router.clone(), hello, state.1, connections));
    host::spawn(accept_routers(node.clone(), routers));
    let ended = tokio::select! {
        biased;
        _ = engine_ended => Err(NodeError::EngineEnded),
        () = drained(&node, &draining, &mut shutdown, Duration::from_secs_f64(config.drain_seconds)) => Ok(()),
    };
    node.engine.stop();
    node.peers.close();
    endpoint.close();
    // Peers are told now rather than left to find out.
    let _ = tokio::time::timeout(Duration::from_secs(1), endpoint.wait_idle()).await;
    ended
}

struct Started {
    node: Arc<Node>,
    hello: Hello,
    endpoint: Endpoint,
    draining: watch::Sender<bool>,
    state: (watch::Sender<NodeState>, watch::Receiver<NodeState>),
    engine_ended: ThreadEnd,
}

fn start(config: &DecodeConfig, model: &dyn Model, credentials: &Credentials) -> Result<Started, NodeError> {
    let context_tokens = match config.context_tokens {
        0 => model.context_tokens_max(),
        tokens => tokens,
    };
    let session = model.decode_session(&SessionConfig {
        slots: config.slots,
        context_tokens,
        batch_tokens_max: BATCH_TOKENS_MAX,
        threads: threads(config),
    })?;
    let blocks = model.blocks_supported();
    if let Err(reason) = &blocks {
        tracing::warn!(reason, "this model cannot be prefilled remotely, all prompts are computed here");
    }
    let template = blocks.clone().and_then(|()| session.blob_template().map_err(|error| error.to_string()));
    let layout = session.layout().id();
    let vocabulary = model.vocabulary();
    let vocabulary_size = vocabulary.size();
    let settings = RunnerSettings {
        itl_cap_ms: config.itl_cap_ms,
        long_tokens: config.local_long_tokens,
        max_long: config.max_local_long,
        block_tokens: config.block_tokens,
    };
    let runner = Runner::new(session, vocabulary, model.fingerprint(), settings, host::now);
    let stats = Arc::new(Stats::default());
    let (engine, engine_ended) = Engine::start(runner, stats.clone())?;

    let listen: SocketAddr = config.listen.parse().map_err(|_| TransferError::Bind {
        address: config.listen.clone(),
        reason: "not ADDRESS:PORT".to_owned(),
    })?;
    let endpoint = Endpoint::bind_client(listen, credentials, &Tuning::default())?;
    let (bulk, bulk_endpoint) = start_bulk(listen.ip(), credentials)?;
    let (draining, draining_seen) = watch::channel(false);
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        name: config.name.clone(),
        role: "decode".to_owned(),
        address: endpoint.local_address().to_string(),
        pid: std::process::id(),
        model: model.name().to_owned(),
        fingerprint: model.fingerprint().0,
        layout: layout.0,
        block_tokens: config.block_tokens as u32,
        context_tokens: context_tokens as u32,
        slots: config.slots as u32,
        blocks_unsupported: template.as_ref().err().cloned().unwrap_or_default(),
    };
    let node = Arc::new(Node {
        engine,
        peers: Peers::new(bulk_endpoint, stats.clone()),
        stats,
        staging: Staging::new(config.staging_bytes),
        bulk,
        template,
        fingerprint: model.fingerprint(),
        block_tokens: config.block_tokens,
        context_tokens,
        vocabulary_size,
        credit_window_bytes: config.credit_window_bytes,
        stall_min: Duration::from_secs_f64(config.stall_seconds),
        queue_requests_max: config.queue_requests_max,
        draining: draining_seen,
        next_key: AtomicU64::new(0),
    });
    let state = watch::channel(NodeState::default());
    Ok(Started { node, hello, endpoint, draining, state, engine_ended })
}

fn threads(config: &DecodeConfig) -> usize {
    match (config.threads, config.cpus.len()) {
        (0, 0) => std::thread::available_parallelism().map_or(1, usize::from),
        (0, cpus) => cpus,
        (threads, _) => threads,
    }
}

/// A runtime of its own for connections to prefill nodes, on a thread that
/// yields to the engine: 100 MB of frames must not hold up a token.
fn start_bulk(
    ip: IpAddr,
    credentials: &Credentials,
) -> Result<(tokio::runtime::Handle, Endpoint), NodeError> {
    let runtime = host::SideRuntime::new()?;
    let endpoint = {
        let _inside = runtime.handle().enter();
        Endpoint::bind_client(SocketAddr::new(ip, 0), credentials, &Tuning::default())?
    };
    let handle = runtime.start("bulk", || {
        let thread = rustix::thread::gettid();
        if let Err(error) = rustix::process::setpriority_process(Some(thread), BULK_NICE) {
            tracing::warn!(%error, "bulk transfers keep the normal priority");
        }
    })?;
    Ok((handle, endpoint))
}

async fn accept_routers(node: Arc<Node>, mut routers: mpsc::Receiver<Connection>) {
    while let Some(router) = routers.recv().await {
        let node = node.clone();
        host::spawn(async move {
            while let Ok((sender, inbox)) = router.accept().await {
                host::spawn(request_task::serve(node.clone(), sender, inbox));
            }
        });
    }
}

/// Resolves when the node may stop: drained, out of time, or told to stop at once.
async fn drained(
    node: &Node,
    draining: &watch::Sender<bool>,
    shutdown: &mut watch::Receiver<Shutdown>,
    patience: Duration,
) {
    if shutdown.wait_for(|state| *state != Shutdown::Running).await.is_err() {
        return;
    }
    let _ = draining.send(true);
    let empty = async {
        while node.stats.requests() > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let now = async {
        let _ = shutdown.wait_for(|state| *state == Shutdown::Now).await;
    };
    tokio::select! {
        biased;
        () = empty => {}
        () = now => {}
        () = tokio::time::sleep(patience) => tracing::warn!("drain time is over, running streams are cut"),
    }
}
