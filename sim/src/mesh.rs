//! The mesh of a run: a router, decode nodes and prefill nodes, each the real
//! one on a machine of its own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use decode_node::DecodeConfig;
use engine::Model;
use engine::fake::{FakeModel, FakeOptions, FakeVocabulary};
use host::{Bug, Machine};
use kv_transfer::{Credentials, MeshAuthority, Role, Shutdown};
use prefill_node::PrefillConfig;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use router::{ModelIdentity, RouterConfig, RouterCore, RouterError};
use tokio::sync::watch;

use crate::checker::Checker;
use crate::mix::Mix;
use crate::network::VirtualNetwork;

/// Prefill nodes of a mesh, and decode nodes.
pub(crate) const NODES_EACH: usize = 2;
/// Sequences on a decode node.
pub(crate) const SLOTS: usize = 4;
/// Longest sequence.
pub(crate) const CONTEXT_TOKENS: usize = 2_048;

const MESH_PORT: u16 = 7_000;
const HANDOFFS_MAX: usize = 64;
const CHUNK_TOKENS: usize = 64;
/// Encoded: two sections of one layer, K and V.
const CHUNK_BYTES: u64 = (CHUNK_TOKENS * 4) as u64 * FakeOptions::ROW_BYTES_MIN as u64;
const CREDIT_BYTES: u64 = 16 << 10;

/// Sizes that depend on the mix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Memory for handoffs on a decode node.
    pub(crate) decode_staging_bytes: u64,
    /// Memory for KV that waits for the network on a prefill node.
    pub(crate) prefill_staging_bytes: u64,
    /// Prompt tokens that wait on a prefill node.
    pub(crate) queue_tokens: usize,
    /// Requests that a decode node takes.
    pub(crate) queue_requests: usize,
    /// Sessions of a prefill node.
    pub(crate) residents: usize,
}

impl Sizes {
    /// Room for everything.
    pub(crate) const AMPLE: Self = Self {
        decode_staging_bytes: 8 << 20,
        prefill_staging_bytes: 1 << 20,
        queue_tokens: 1 << 16,
        queue_requests: 256,
        residents: 2,
    };
    /// Room for one long prompt and little more.
    pub(crate) const SCARCE: Self = Self {
        decode_staging_bytes: 128 << 10,
        prefill_staging_bytes: 16 << 10,
        queue_tokens: 3_000,
        queue_requests: 6,
        residents: 1,
    };
}

/// A machine's place in the mesh, with whatever runs there now.
pub(crate) struct Place {
    /// Name of the node.
    pub(crate) name: String,
    /// What it does.
    pub(crate) role: Role,
    /// Its address in the network.
    pub(crate) ip: IpAddr,
    credentials: Credentials,
    life: Mutex<Option<Life>>,
    /// One fault at a time.
    struck: AtomicBool,
}

/// The right to do something to a place; ends when dropped.
pub(crate) struct Claim<'a>(&'a Place);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.struck.store(false, Ordering::Relaxed);
    }
}

struct Life {
    machine: Arc<Machine>,
    model: Arc<FakeModel>,
    shutdown: watch::Sender<Shutdown>,
    /// What answers clients; routers only, and only once it listens.
    routes: Arc<Mutex<Option<axum::Router>>>,
    task: tokio::task::AbortHandle,
}

/// All places and the network between them.
pub(crate) struct Mesh {
    /// The network.
    pub(crate) network: Arc<VirtualNetwork>,
    /// Router first, then decode nodes, then prefill nodes.
    pub(crate) places: Vec<Place>,
    /// What a whole mesh answers.
    pub(crate) oracle: Arc<FakeModel>,
    sizes: Sizes,
    clients_max: usize,
    bug: Option<Bug>,
    seeds: Mutex<SmallRng>,
    checker: Arc<Checker>,
}

/// Keys cost more than a run; they differ in nothing that a run could see.
fn credentials() -> &'static [(String, Role, Credentials)] {
    static KEYS: OnceLock<Vec<(String, Role, Credentials)>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let authority = MeshAuthority::generate();
        let nodes = |role: Role| (1..=NODES_EACH).map(move |number| (format!("{role}-{number}"), role));
        let names = [("router".to_owned(), Role::Router)];
        let all = names.into_iter().chain(nodes(Role::Decode)).chain(nodes(Role::Prefill));
        all.map(|(name, role)| (name.clone(), role, authority.issue(&name, role))).collect()
    })
}

fn options() -> FakeOptions {
    FakeOptions {
        sections: 2,
        layers: 1,
        row_bytes: FakeOptions::ROW_BYTES_MIN,
        context_tokens_max: CONTEXT_TOKENS,
        step_time: Duration::from_millis(1),
        token_time: Duration::from_micros(200),
        ..FakeOptions::default()
    }
}

fn model() -> Arc<FakeModel> {
    Arc::new(FakeModel::new(options()).expect("these options are in range"))
}

impl Mesh {
    /// Nothing runs yet.
    pub(crate) fn new(seed: u64, mix: Mix, bug: Option<Bug>, checker: Arc<Checker>) -> Arc<Self> {
        let places = credentials().iter().zip(1u8..).map(|((name, role, credentials), number)| Place {
            name: name.clone(),
            role: *role,
            ip: IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)),
            credentials: credentials.clone(),
            life: Mutex::new(None),
            struck: AtomicBool::new(false),
        });
        Arc::new(Self {
            network: VirtualNetwork::new(seed),
            places: places.collect(),
            oracle: model(),
            sizes: mix.sizes(),
            clients_max: mix.clients_max(),
            bug,
            seeds: Mutex::new(SmallRng::seed_from_u64(seed)),
            checker,
        })
    }

    /// The router's place.
    pub(crate) fn router(&self) -> &Place {
        &self.places[0]
    }

    /// The places of all nodes.
    pub(crate) fn nodes(&self) -> &[Place] {
        &self.places[1..]
    }

    /// Starts whatever belongs at `place` on a fresh machine.
    pub(crate) fn start(&self, place: &Place) {
        let seed = self.seeds.lock().unwrap_or_else(PoisonError::into_inner).random();
        let machine = Machine::new(self.network.for_machines(), seed, self.bug);
        let (shutdown, order) = watch::channel(Shutdown::Running);
        let (model, routes) = (model(), Arc::default());
        let asked = order.clone();
        let credentials = place.credentials.clone();
        let task = match place.role {
            Role::Router => {
                let router = self.router_life(place, order, Arc::clone(&routes));
                self.watch(place, &machine, asked, router)
            }
            Role::Decode => {
                let node = decode_node::run(self.decode(place), model.clone(), credentials, order);
                self.watch(place, &machine, asked, node)
            }
            Role::Prefill => {
                let node = prefill_node::run(self.prefill(place), model.clone(), credentials, order);
                self.watch(place, &machine, asked, node)
            }
        };
        *place.lock() = Some(Life { machine, model, shutdown, routes, task });
    }

    fn router_life(
        &self,
        place: &Place,
        order: watch::Receiver<Shutdown>,
        routes: Arc<Mutex<Option<axum::Router>>>,
    ) -> impl Future<Output = Result<(), RouterError>> + Send + 'static {
        let (config, credentials) = (self.router_config(place), place.credentials.clone());
        let identity = ModelIdentity {
            name: self.oracle.name().to_owned(),
            alias: self.oracle.name().to_owned(),
            fingerprint: self.oracle.fingerprint(),
            context_tokens_max: CONTEXT_TOKENS,
        };
        async move {
            let vocabulary = Arc::new(FakeVocabulary);
            let mut core = RouterCore::bind(&config, vocabulary, identity, &credentials, order)?;
            *routes.lock().unwrap_or_else(PoisonError::into_inner) = Some(core.routes());
            core.attend().await;
            Ok(())
        }
    }

    /// Runs a role; an end with an error, or one that nobody asked for, is a violation.
    fn watch<E: std::fmt::Display>(
        &self,
        place: &Place,
        machine: &Arc<Machine>,
        asked: watch::Receiver<Shutdown>,
        role: impl Future<Output = Result<(), E>> + Send + 'static,
    ) -> tokio::task::AbortHandle {
        let (checker, name) = (self.checker.clone(), place.name.clone());
        let task = machine.spawn(async move {
            match role.await {
                Err(error) => checker.violation(format!("{name} ended: {error}")),
                Ok(()) if *asked.borrow() == Shutdown::Running => {
                    checker.violation(format!("{name} ended unasked"));
                }
                Ok(()) => {}
            }
        });
        task.abort_handle()
    }

    /// The machine at `place` is gone.
    pub(crate) fn kill(&self, place: &Place) {
        self.network.unplug(place.ip);
        if let Some(life) = place.lock().take() {
            life.machine.kill();
        }
    }

    fn router_config(&self, place: &Place) -> RouterConfig {
        RouterConfig {
            name: place.name.clone(),
            listen: SocketAddr::new(place.ip, 8_080),
            mesh_listen: place.mesh_address(),
            model: Default::default(),
            model_alias: None,
            keys_dir: Default::default(),
            policy: None,
            allow_route_override: true,
            body_bytes_max: 1 << 20,
            bodies_bytes_max: 16 << 20,
            connections_max: 4_096,
            client_timeout: Duration::from_secs(75),
            frozen: Duration::from_secs(4),
            node_wait: Duration::from_secs(8),
            drain: Duration::from_secs(5),
        }
    }

    fn decode(&self, place: &Place) -> DecodeConfig {
        DecodeConfig {
            name: place.name.clone(),
            listen: place.mesh_address().to_string(),
            router: self.router().mesh_address().to_string(),
            block_tokens: 16,
            slots: SLOTS,
            threads: 1,
            itl_cap_ms: 20.0,
            local_long_tokens: 256,
            staging_bytes: self.sizes.decode_staging_bytes,
            credit_window_bytes: CREDIT_BYTES,
            queue_requests_max: self.sizes.queue_requests,
            drain_seconds: 5.0,
            ..DecodeConfig::default()
        }
    }

    fn prefill(&self, place: &Place) -> PrefillConfig {
        PrefillConfig {
            name: place.name.clone(),
            listen: place.mesh_address().to_string(),
            router: self.router().mesh_address().to_string(),
            block_tokens: 16,
            chunk_tokens: CHUNK_TOKENS,
            max_resident: self.sizes.residents,
            threads: 1,
            queue_tokens_max: self.sizes.queue_tokens,
            staging_bytes: self.sizes.prefill_staging_bytes,
            handoffs_max: HANDOFFS_MAX,
            drain_seconds: 5.0,
            ..PrefillConfig::default()
        }
    }

    /// Most bytes that so many handoffs of the node may hold.
    pub(crate) fn staged_bytes_max(&self, role: Role, handoffs: u64) -> u64 {
        match role {
            Role::Decode => self.sizes.decode_staging_bytes,
            // Each may have its credit under way besides, and each session some
            // chunks that wait in any case.
            _ => {
                let free = (self.sizes.residents as u64) * 5 * CHUNK_BYTES;
                self.sizes.prefill_staging_bytes + free + handoffs * (CREDIT_BYTES + CHUNK_BYTES)
            }
        }
    }

    /// Most requests or handoffs of the node.
    pub(crate) fn requests_max(&self, role: Role) -> u64 {
        match role {
            // Those that are just being refused count as well.
            Role::Decode => (self.sizes.queue_requests + self.clients_max) as u64,
            _ => HANDOFFS_MAX as u64,
        }
    }

    /// Most prompt tokens that wait on the node.
    pub(crate) fn queue_tokens_max(&self, role: Role) -> u64 {
        match role {
            Role::Decode => ((self.sizes.queue_requests + 1) * CONTEXT_TOKENS) as u64,
            // An idle node takes any prompt.
            _ => self.sizes.queue_tokens.max(CONTEXT_TOKENS) as u64,
        }
    }
}

impl Place {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Life>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mesh_address(&self) -> SocketAddr {
        SocketAddr::new(self.ip, MESH_PORT)
    }

    /// `None` while something else is done to it.
    pub(crate) fn claim(&self) -> Option<Claim<'_>> {
        (!self.struck.swap(true, Ordering::Relaxed)).then(|| Claim(self))
    }

    /// Whether something runs here.
    pub(crate) fn is_alive(&self) -> bool {
        self.lock().as_ref().is_some_and(|life| !life.task.is_finished())
    }

    /// The machine that runs here.
    pub(crate) fn machine(&self) -> Option<Arc<Machine>> {
        self.lock().as_ref().map(|life| life.machine.clone())
    }

    /// The model of the node here, to make it fail.
    pub(crate) fn model(&self) -> Option<Arc<FakeModel>> {
        self.lock().as_ref().map(|life| life.model.clone())
    }

    /// Gives an order as a signal would.
    pub(crate) fn order(&self, order: Shutdown) {
        if let Some(life) = self.lock().as_ref() {
            let _ = life.shutdown.send(order);
        }
    }

    /// The machine, and what answers clients on it; `None` while nothing listens.
    pub(crate) fn routes(&self) -> Option<(Arc<Machine>, axum::Router)> {
        let life = self.lock();
        let life = life.as_ref()?;
        let routes = life.routes.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some((life.machine.clone(), routes))
    }
}
