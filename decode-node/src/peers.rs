//! Connections to prefill nodes, one per node, and the way of frame streams to
//! the handoff they belong to.
#![expect(clippy::disallowed_methods, reason = "a shell: it starts tasks")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_block::HandoffId;
use kv_transfer::{Connection, Endpoint, FrameHeader, FrameReader, Role, TransferError};
use tokio::sync::mpsc;

use crate::stats::Stats;

/// A prefill node that does not answer for so long is skipped for this request.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A frame stream whose first header has been read.
pub(crate) struct ArrivedStream {
    pub(crate) header: FrameHeader,
    pub(crate) reader: FrameReader,
}

/// Which running handoff gets a frame stream.
#[derive(Default)]
struct Routes {
    handoffs: Mutex<HashMap<HandoffId, mpsc::UnboundedSender<ArrivedStream>>>,
}

/// A running handoff's claim to its frames; gone when dropped.
pub(crate) struct Arrivals {
    routes: Arc<Routes>,
    handoff: HandoffId,
    streams: mpsc::UnboundedReceiver<ArrivedStream>,
}

impl Arrivals {
    pub(crate) async fn next(&mut self) -> Option<ArrivedStream> {
        self.streams.recv().await
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.routes.lock().remove(&self.handoff);
    }
}

impl Routes {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<HandoffId, mpsc::UnboundedSender<ArrivedStream>>> {
        self.handoffs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Place = Arc<tokio::sync::Mutex<Option<Connection>>>;

/// All prefill nodes that this node has talked to.
pub(crate) struct Peers {
    endpoint: Endpoint,
    connections: Arc<Mutex<HashMap<String, Place>>>,
    routes: Arc<Routes>,
    stats: Arc<Stats>,
}

impl Peers {
    pub(crate) fn new(endpoint: Endpoint, stats: Arc<Stats>) -> Self {
        Self { endpoint, connections: Arc::default(), routes: Arc::default(), stats }
    }

    /// Must be claimed before the prefill node can send a frame.
    pub(crate) fn arrivals(&self, handoff: HandoffId) -> Arrivals {
        // Unbounded here, bounded by the number of streams that QUIC lets a peer open.
        let (sender, streams) = mpsc::unbounded_channel();
        self.routes.lock().insert(handoff, sender);
        Arrivals { routes: self.routes.clone(), handoff, streams }
    }

    /// The connection to `address`, opened if there is none. Simultaneous
    /// callers for one address share one attempt and its time-out; others do not
    /// wait for it.
    pub(crate) async fn connection(&self, address: &str) -> Result<Connection, TransferError> {
        match tokio::time::timeout(CONNECT_TIMEOUT, self.connected(address)).await {
            Ok(result) => result,
            Err(_) => {
                let reason = format!("no answer within {} s", CONNECT_TIMEOUT.as_secs());
                Err(TransferError::Connect { address: address.to_owned(), reason })
            }
        }
    }

    async fn connected(&self, address: &str) -> Result<Connection, TransferError> {
        let place = {
            let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            connections.entry(address.to_owned()).or_default().clone()
        };
        let mut held = place.lock().await;
        if let Some(connection) = held.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let connection = self.connect(address).await?;
        *held = Some(connection.clone());
        let (routes, stats) = (self.routes.clone(), self.stats.clone());
        let (known, address, routed) = (self.connections.clone(), address.to_owned(), connection.clone());
        let place = place.clone();
        host::spawn(async move {
            route_frames(routed, routes, stats).await;
            forget(&known, &address, &place);
        });
        Ok(connection)
    }

    async fn connect(&self, address: &str) -> Result<Connection, TransferError> {
        let socket: SocketAddr = address.parse().map_err(|_| TransferError::Connect {
            address: address.to_owned(),
            reason: "not ADDRESS:PORT".to_owned(),
        })?;
        self.endpoint.connect(socket, Role::Prefill).await
    }

    /// Tells all peers that this node is going.
    pub(crate) fn close(&self) {
        self.endpoint.close();
    }
}

/// Takes a place whose connection has ended out of the map, unless somebody
/// connects there anew: a node that comes back may have another address.
fn forget(known: &Mutex<HashMap<String, Place>>, address: &str, place: &Place) {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    let ours = known.get(address).is_some_and(|now| Arc::ptr_eq(now, place));
    let unused = place.try_lock().is_ok_and(|held| held.as_ref().is_none_or(Connection::is_closed));
    if ours && unused {
        known.remove(address);
    }
}

async fn route_frames(connection: Connection, routes: Arc<Routes>, stats: Arc<Stats>) {
    while let Ok(reader) = connection.accept_frames().await {
        // A task of its own: a stream whose header is slow must not hold others.
        host::spawn(route_stream(reader, routes.clone(), stats.clone()));
    }
}

async fn route_stream(mut reader: FrameReader, routes: Arc<Routes>, stats: Arc<Stats>) {
    let header = match reader.next_header().await {
        Ok(Some(header)) => header,
        Ok(None) => return,
        Err(error) => {
            tracing::debug!(%error, "frame stream ended before its first frame");
            return;
        }
    };
    let route = routes.lock().get(&header.handoff).cloned();
    let refused = match route {
        Some(route) => route.send(ArrivedStream { header, reader }).err().map(|refused| refused.0.reader),
        None => Some(reader),
    };
    if let Some(reader) = refused {
        stats.late_frames.fetch_add(1, Relaxed);
        reader.stop();
    }
}
