//! The running router: sockets, tasks, and their end.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine::Vocabulary;
use kv_transfer::{Credentials, Endpoint, Shutdown, Tuning};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::app::{App, Parts};
use crate::chat_template::ChatTemplate;
use crate::config::{ModelIdentity, RouterConfig};
use crate::error::RouterError;
use crate::http::bodies::BodyBudget;
use crate::http::connections::{self, ConnectionLimits};
use crate::metrics::RouterMetrics;
use crate::policy::{Policy, PolicyFile};
use crate::{http, membership};

/// A router that has its sockets and can serve.
pub struct Router {
    core: RouterCore,
    listener: TcpListener,
    http_address: SocketAddr,
    limits: ConnectionLimits,
    drain: Duration,
}

/// A router without a socket for clients: requests reach it through
/// [`RouterCore::routes`].
pub struct RouterCore {
    app: Arc<App>,
    endpoint: Endpoint,
    policy: watch::Sender<Policy>,
    policy_file: Option<PolicyFile>,
}

/// Binds and serves until `shutdown` says otherwise.
pub async fn run(
    config: RouterConfig,
    vocabulary: Arc<dyn Vocabulary>,
    model: ModelIdentity,
    credentials: Credentials,
    shutdown: watch::Receiver<Shutdown>,
) -> Result<(), RouterError> {
    Router::bind(&config, vocabulary, model, &credentials, shutdown).await?.serve().await
}

/// How often the policy file is looked at.
const POLICY_POLL: Duration = Duration::from_secs(1);
/// How often collected histograms are folded.
const UPKEEP: Duration = Duration::from_secs(5);
/// Time for last bytes to leave after the last answer has ended.
const FLUSH: Duration = Duration::from_secs(1);
/// How often a draining router looks whether it is idle.
const DRAIN_POLL: Duration = Duration::from_millis(20);

impl RouterCore {
    /// Reads the policy and binds the mesh address. `shutdown` is watched from here on.
    pub fn bind(
        config: &RouterConfig,
        vocabulary: Arc<dyn Vocabulary>,
        model: ModelIdentity,
        credentials: &Credentials,
        shutdown: watch::Receiver<Shutdown>,
    ) -> Result<Self, RouterError> {
        let (policy_file, policy) = match &config.policy {
            Some(path) => PolicyFile::open(path).map(|(file, policy)| (Some(file), policy))?,
            None => (None, Policy::default()),
        };
        let (policy, policy_seen) = watch::channel(policy);
        let template = template(vocabulary.as_ref())?;
        let endpoint = Endpoint::bind(config.mesh_listen, credentials, &Tuning::default())?;
        let app = Arc::new(App::new(Parts {
            model,
            vocabulary,
            template,
            allow_route_override: config.allow_route_override,
            body_bytes_max: config.body_bytes_max,
            bodies: BodyBudget::new(config.bodies_bytes_max),
            client_timeout: config.client_timeout,
            frozen_after: config.frozen,
            node_wait: config.node_wait,
            policy: policy_seen,
            shutdown,
            metrics: RouterMetrics::new()?,
        }));
        Ok(Self { app, endpoint, policy, policy_file })
    }

    /// What answers the requests of clients.
    pub fn routes(&self) -> axum::Router {
        http::routes(self.app.clone())
    }

    /// Takes nodes in and follows the policy file, for ever.
    pub async fn attend(&mut self) {
        tokio::join!(
            membership::serve(self.app.clone(), self.endpoint.clone()),
            watch_policy(&self.policy, self.policy_file.take()),
            upkeep(&self.app),
        );
    }
}

impl Router {
    /// Reads the policy and binds both addresses. `shutdown` is watched from here on.
    pub async fn bind(
        config: &RouterConfig,
        vocabulary: Arc<dyn Vocabulary>,
        model: ModelIdentity,
        credentials: &Credentials,
        shutdown: watch::Receiver<Shutdown>,
    ) -> Result<Self, RouterError> {
        let address = config.listen;
        let listener =
            TcpListener::bind(address).await.map_err(|reason| RouterError::Bind { address, reason })?;
        let http_address = listener.local_addr().map_err(|reason| RouterError::Bind { address, reason })?;
        let core = RouterCore::bind(config, vocabulary, model, credentials, shutdown)?;
        let limits =
            ConnectionLimits { connections_max: config.connections_max, silence_max: config.client_timeout };
        Ok(Self { core, listener, http_address, limits, drain: config.drain })
    }

    /// The HTTP address in use.
    pub fn http_address(&self) -> SocketAddr {
        self.http_address
    }

    /// The mesh address in use.
    pub fn mesh_address(&self) -> SocketAddr {
        self.core.endpoint.local_address()
    }

    /// Serves until shut down: when draining, new requests are refused and
    /// running ones have the configured time to finish.
    pub async fn serve(mut self) -> Result<(), RouterError> {
        tracing::info!(http = %self.http_address, mesh = %self.mesh_address(), "router is listening");
        let (app, endpoint) = (self.core.app.clone(), self.core.endpoint.clone());
        let (stop, mut stopped) = watch::channel(false);
        let idle = async move { while !*stopped.borrow_and_update() && stopped.changed().await.is_ok() {} };
        let served = connections::serve(self.listener, self.core.routes(), self.limits, idle);
        let mut served = std::pin::pin!(served);
        tokio::select! {
            biased;
            () = &mut served => {}
            () = self.core.attend() => {}
            () = drained(&app, self.drain) => {
                let _ = stop.send(true);
                // Idle connections are closed at once; one that still sends its
                // last bytes has a moment.
                let _ = timeout(FLUSH, &mut served).await;
            }
        }
        endpoint.close();
        let _ = timeout(FLUSH, endpoint.wait_idle()).await;
        Ok(())
    }
}

fn template(vocabulary: &dyn Vocabulary) -> Result<Option<ChatTemplate>, RouterError> {
    let Some(source) = vocabulary.chat_template() else {
        tracing::warn!("the model has no chat template: only /v1/completions will work");
        return Ok(None);
    };
    let text = |token: Option<kv_block::Token>| {
        let bytes = token.map(|token| vocabulary.piece(token, true)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (bos, eos) = (text(vocabulary.bos()), text(vocabulary.eos()));
    ChatTemplate::new(source, bos, eos).map(Some).map_err(RouterError::Template)
}

/// Follows the policy file for ever; a version that cannot be used changes nothing.
async fn watch_policy(policy: &watch::Sender<Policy>, file: Option<PolicyFile>) {
    let Some(mut file) = file else { return pending().await };
    loop {
        sleep(POLICY_POLL).await;
        match file.changed() {
            None => {}
            Some(Ok(new)) => {
                tracing::info!(file = %file.path().display(), policy = ?new, "policy changed");
                policy.send_replace(new);
            }
            Some(Err(error)) => {
                tracing::error!(error = %error, "the new policy cannot be used, the old one stays in force");
            }
        }
    }
}

async fn upkeep(app: &App) {
    loop {
        sleep(UPKEEP).await;
        app.metrics.upkeep();
    }
}

/// Resolves when it is time to stop: at once on `Now`, or when draining and
/// either nothing runs any more or the drain time is over.
async fn drained(app: &App, drain: Duration) {
    let mut shutdown = app.shutdown.clone();
    if shutdown.wait_for(|state| *state != Shutdown::Running).await.is_err() {
        // Nobody is left who could say so.
        return pending().await;
    }
    tracing::info!(requests = app.requests_in_flight(), "draining");
    let idle = async {
        while app.requests_in_flight() > 0 {
            sleep(DRAIN_POLL).await;
        }
    };
    let now = async {
        if shutdown.wait_for(|state| *state == Shutdown::Now).await.is_err() {
            pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        result = timeout(drain, idle) => {
            if result.is_err() {
                tracing::warn!(requests = app.requests_in_flight(), "the drain time is over");
            }
        }
        () = now => tracing::warn!(requests = app.requests_in_flight(), "stopping at once"),
    }
}
