//! What all requests share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use engine::Vocabulary;
use kv_transfer::{Connection, Shutdown};
use tokio::sync::watch;

use crate::chat_template::ChatTemplate;
use crate::clock;
use crate::config::ModelIdentity;
use crate::http::bodies::BodyBudget;
use crate::metrics::{RouterMetrics, lock};
use crate::policy::Policy;
use crate::registry::Registry;

/// One router's state.
pub(crate) struct App {
    pub(crate) model: ModelIdentity,
    pub(crate) vocabulary: Arc<dyn Vocabulary>,
    /// Absent if the model has none.
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) allow_route_override: bool,
    pub(crate) body_bytes_max: usize,
    pub(crate) bodies: BodyBudget,
    pub(crate) client_timeout: Duration,
    pub(crate) node_wait: Duration,
    pub(crate) policy: watch::Receiver<Policy>,
    pub(crate) shutdown: watch::Receiver<Shutdown>,
    pub(crate) metrics: RouterMetrics,
    registry: Mutex<Registry<Connection>>,
    in_flight: Arc<AtomicU64>,
}

/// One generation request in flight; counted until dropped, on whatever path
/// that happens.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<AtomicU64>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What an [`App`] is made of.
pub(crate) struct Parts {
    pub(crate) model: ModelIdentity,
    pub(crate) vocabulary: Arc<dyn Vocabulary>,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) allow_route_override: bool,
    pub(crate) body_bytes_max: usize,
    pub(crate) bodies: BodyBudget,
    pub(crate) client_timeout: Duration,
    pub(crate) node_wait: Duration,
    pub(crate) frozen_after: Duration,
    pub(crate) policy: watch::Receiver<Policy>,
    pub(crate) shutdown: watch::Receiver<Shutdown>,
    pub(crate) metrics: RouterMetrics,
}

impl App {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            registry: Mutex::new(Registry::new(parts.model.fingerprint, parts.frozen_after)),
            model: parts.model,
            vocabulary: parts.vocabulary,
            template: parts.template,
            allow_route_override: parts.allow_route_override,
            body_bytes_max: parts.body_bytes_max,
            bodies: parts.bodies,
            client_timeout: parts.client_timeout,
            node_wait: parts.node_wait,
            policy: parts.policy,
            shutdown: parts.shutdown,
            metrics: parts.metrics,
            in_flight: Arc::default(),
        }
    }

    /// Counts one request in.
    pub(crate) fn enter(&self) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self.in_flight.clone())
    }

    pub(crate) fn requests_in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn draining(&self) -> bool {
        *self.shutdown.borrow() != Shutdown::Running
    }

    /// Held for single steps only, never across an await.
    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry<Connection>> {
        lock(&self.registry)
    }

    /// Whether a request could be placed now.
    pub(crate) fn ready(&self) -> bool {
        !self.draining() && self.registry().context_tokens(clock::now()).is_some()
    }

    /// Longest sequence that can be served now; the model's own limit while no
    /// decode node is ready.
    pub(crate) fn context_tokens(&self) -> usize {
        self.registry().context_tokens(clock::now()).unwrap_or(self.model.context_tokens_max)
    }

    /// The ids that requests may name; the alias first.
    pub(crate) fn model_ids(&self) -> Vec<&str> {
        let mut ids = vec![self.model.alias.as_str()];
        if self.model.name != self.model.alias && !self.model.name.is_empty() {
            ids.push(&self.model.name);
        }
        ids
    }

    pub(crate) fn render_metrics(&self) -> String {
        self.metrics.render(clock::now(), self.requests_in_flight(), &self.registry)
    }
}
