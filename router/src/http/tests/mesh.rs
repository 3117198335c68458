//! A router with scripted nodes that register over QUIC.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::fake::{FakeModel, FakeOptions};
use engine::{Model, Vocabulary};
use kv_transfer::membership::{self, NodeState};
use kv_transfer::{
    Connection, ControlMessage, Endpoint, FailureKind, FinishReason, Generate, Hello, MeshAuthority,
    PROTOCOL_VERSION, RequestEvent, Role, Shutdown, Status, Tuning,
};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::client;
use crate::config::{ModelIdentity, RouterConfig};
use crate::error::RouterError;
use crate::shell::Router;

pub(super) const CONTEXT_TOKENS: u32 = 2048;

/// What a scripted decode node does with a request, step by step.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Send(RequestEvent),
    Sleep(u64),
    /// Waits until the router ends the stream.
    Hang,
    /// Breaks the stream.
    Reset,
    /// Breaks the connection, as a dying process does.
    Die,
}

pub(super) fn started(cached_tokens: u32) -> Act {
    let (prefilled_by, fallback_reason) = Default::default();
    Act::Send(RequestEvent::Started { cached_tokens, prefilled_by, fallback_reason, installed_tokens: 0 })
}

/// One byte per token, one token per event.
pub(super) fn say(text: &str) -> Vec<Act> {
    text.bytes().map(|byte| Act::Send(RequestEvent::Tokens(vec![u32::from(byte)]))).collect()
}

pub(super) fn finished(reason: FinishReason) -> Act {
    Act::Send(RequestEvent::Finished(reason))
}

pub(super) fn failed(kind: FailureKind) -> Act {
    Act::Send(RequestEvent::Failed { kind, message: "scripted".into() })
}

/// A whole answer.
pub(super) fn answer(text: &str) -> Vec<Act> {
    [vec![started(0)], say(text), vec![finished(FinishReason::Stop)]].concat()
}

pub(super) struct Mesh {
    pub(super) http: SocketAddr,
    mesh: SocketAddr,
    authority: MeshAuthority,
    model: FakeModel,
    pub(super) shutdown: watch::Sender<Shutdown>,
    pub(super) served: JoinHandle<Result<(), RouterError>>,
}

/// A registered node; leaves when dropped.
pub(super) struct Node {
    pub(super) seen: Arc<Mutex<Seen>>,
    pub(super) state: watch::Sender<NodeState>,
    tasks: Vec<JoinHandle<()>>,
}

/// What a node was asked, and how many requests the router ended early.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) requests: Vec<Generate>,
    pub(super) resets: usize,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Node {
    pub(super) fn requests(&self) -> Vec<Generate> {
        self.seen.lock().unwrap().requests.clone()
    }

    pub(super) fn resets(&self) -> usize {
        self.seen.lock().unwrap().resets
    }
}

pub(super) fn config() -> RouterConfig {
    RouterConfig {
        name: "router".into(),
        listen: "127.0.0.1:0".parse().unwrap(),
        mesh_listen: "127.0.0.1:0".parse().unwrap(),
        model: "unused.gguf".into(),
        model_alias: None,
        keys_dir: "unused".into(),
        policy: None,
        allow_route_override: true,
        body_bytes_max: 100_000,
        bodies_bytes_max: 40_000,
        connections_max: 8,
        client_timeout: Duration::from_secs(1),
        frozen: Duration::from_secs(1),
        node_wait: Duration::from_secs(2),
        drain: Duration::from_secs(5),
    }
}

impl Mesh {
    pub(super) async fn start() -> Self {
        Self::with(config()).await
    }

    /// A router with one decode node that does the same with every request.
    pub(super) async fn of_one(acts: Vec<Act>) -> (Self, Node) {
        let mesh = Self::start().await;
        let node = mesh.decode("d0", move |_| acts.clone()).await;
        (mesh, node)
    }

    pub(super) async fn with(config: RouterConfig) -> Self {
        let model = FakeModel::new(FakeOptions::default()).unwrap();
        let authority = MeshAuthority::generate();
        let (shutdown, watched) = watch::channel(Shutdown::Running);
        let identity = ModelIdentity {
            name: "Tiny Model".into(),
            alias: "tiny".into(),
            fingerprint: model.fingerprint(),
            context_tokens_max: model.context_tokens_max(),
        };
        let credentials = authority.issue("router", Role::Router);
        let vocabulary: Arc<dyn Vocabulary> = model.vocabulary();
        let router = Router::bind(&config, vocabulary, identity, &credentials, watched).await.unwrap();
        let (http, mesh) = (router.http_address(), router.mesh_address());
        #[expect(clippy::disallowed_methods, reason = "the router under test")]
        let served = tokio::spawn(router.serve());
        Self { http, mesh, authority, model, shutdown, served }
    }

    /// A decode node that does what `script` says with each request.
    pub(super) async fn decode(
        &self,
        name: &str,
        script: impl Fn(&Generate) -> Vec<Act> + Send + Sync + 'static,
    ) -> Node {
        self.node(name, Role::Decode, Arc::new(script)).await
    }

    pub(super) async fn prefill(&self, name: &str) -> Node {
        self.node(name, Role::Prefill, Arc::new(|_: &Generate| Vec::new())).await
    }

    #[expect(clippy::disallowed_methods, reason = "scripted nodes run beside the router")]
    async fn node(&self, name: &str, role: Role, script: Arc<Script>) -> Node {
        let credentials = self.authority.issue(name, role);
        let endpoint =
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), &credentials, &Tuning::default()).unwrap();
        let hello = self.hello(name, role, endpoint.local_address());
        let (state, state_seen) =
            watch::channel(NodeState { warm: vec![Vec::new(); 8], ..NodeState::default() });
        let (connected, mut connections) = mpsc::channel(4);
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let member = membership::run(endpoint, self.mesh.to_string(), hello, state_seen, connected);
        let record = seen.clone();
        let serving = async move {
            while let Some(connection) = connections.recv().await {
                tokio::spawn(serve(connection, script.clone(), record.clone()));
            }
        };
        let node = Node { seen, state, tasks: vec![tokio::spawn(member), tokio::spawn(serving)] };
        self.wait_for(name, |node| node["healthy"] == true).await;
        node
    }

    fn hello(&self, name: &str, role: Role, address: SocketAddr) -> Hello {
        Hello {
            protocol: PROTOCOL_VERSION,
            name: name.into(),
            role: role.as_str().into(),
            address: address.to_string(),
            pid: 42,
            model: "Tiny Model".into(),
            fingerprint: self.model.fingerprint().0,
            layout: [5; 32],
            block_tokens: 64,
            context_tokens: CONTEXT_TOKENS,
            slots: 8,
            blocks_unsupported: String::new(),
        }
    }

    /// The router's answer to a node with other weights.
    pub(super) async fn join_with_fingerprint(&self, name: &str, fingerprint: [u8; 32]) -> String {
        let credentials = self.authority.issue(name, Role::Decode);
        let endpoint =
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), &credentials, &Tuning::default()).unwrap();
        let hello = Hello { fingerprint, ..self.hello(name, Role::Decode, endpoint.local_address()) };
        let connection = endpoint.connect(self.mesh, Role::Router).await.unwrap();
        let (mut to_router, mut from_router) = connection.open().await.unwrap();
        to_router.send(&ControlMessage::Hello(hello)).await.unwrap();
        match from_router.recv().await.unwrap() {
            Some(ControlMessage::Rejected { reason }) => reason,
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn status(&self) -> Value {
        client::get(self.http, "/mesh/status").await.json()
    }

    /// Waits until the node of that name is known and `holds` for it.
    pub(super) async fn wait_for(&self, name: &str, holds: impl Fn(&Value) -> bool) {
        eventually(async || {
            let status = self.status().await;
            let nodes = status["nodes"].as_array().unwrap();
            nodes.iter().any(|node| node["name"] == name && holds(node))
        })
        .await;
    }

    pub(super) fn warm_hashes(&self, text: &str) -> Vec<[u8; 32]> {
        use kv_block::{BlockTable, ChainSeed, IsolationKey, LayoutId};
        let tokens = self.model.vocabulary().tokenize(text, true, true);
        let seed = ChainSeed::new(self.model.fingerprint(), LayoutId([5; 32]), IsolationKey::SHARED);
        let table = BlockTable::new(seed, &tokens, 64);
        table.hashes()[..table.full_blocks()].iter().map(|hash| hash.0).collect()
    }

    pub(super) fn set_status(node: &Node, status: Status) {
        node.state.send_modify(|state| state.status = status);
    }
}

type Script = dyn Fn(&Generate) -> Vec<Act> + Send + Sync;

/// Polls until `holds`; fails after 5 s.
pub(super) async fn eventually(mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..250 {
        if holds().await {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("it never came true");
}

#[expect(clippy::disallowed_methods, reason = "each scripted request runs on its own")]
async fn serve(connection: Connection, script: Arc<Script>, seen: Arc<Mutex<Seen>>) {
    while let Ok(streams) = connection.accept().await {
        tokio::spawn(play(connection.clone(), streams, script.clone(), seen.clone()));
    }
}

async fn play(
    connection: Connection,
    (mut to_router, mut from_router): (kv_transfer::MessageSender, kv_transfer::MessageReceiver),
    script: Arc<Script>,
    seen: Arc<Mutex<Seen>>,
) {
    let Ok(Some(generate)) = from_router.recv::<Generate>().await else { return };
    let acts = script(&generate);
    seen.lock().unwrap().requests.push(generate);
    for act in acts {
        match act {
            Act::Send(event) => {
                if to_router.send(&event).await.is_err() {
                    seen.lock().unwrap().resets += 1;
                    return;
                }
            }
            Act::Sleep(millis) => sleep(Duration::from_millis(millis)).await,
            Act::Hang => {
                let end = from_router.recv::<Generate>().await;
                assert!(end.is_err(), "the router resets the stream");
                seen.lock().unwrap().resets += 1;
                return;
            }
            Act::Reset => return to_router.reset(),
            Act::Die => return connection.close("died"),
        }
    }
    to_router.finish();
    if from_router.recv::<Generate>().await.is_err() {
        seen.lock().unwrap().resets += 1;
    }
}
