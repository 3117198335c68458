//! A node's side of its membership: stay connected to the router and keep it
//! informed.
//!
//! [`run`] is the shell; what to say and when is decided by the pure
//! `Announcer`. One announcer lives as long as one connection, so a router that
//! was restarted is told everything again.

mod announcer;
mod recent_max;

pub use recent_max::RecentMax;

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::announcer::Announcer;
use crate::{
    Connection, ControlMessage, Endpoint, Hello, MessageReceiver, MessageSender, Role, Status, TransferError,
};

/// What the router is told about a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeState {
    /// Its figures; `sequence` is filled in when sent.
    pub status: Status,
    /// Full blocks warm in each slot; the index is the slot.
    pub warm: Vec<Vec<[u8; 32]>>,
    /// Whether it takes no new requests.
    pub draining: bool,
}

/// The router answers a `Hello` at once, unless its cores are busy.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);
/// A restarted router is found again within this time.
const BACK_OFF_MAX: Duration = Duration::from_secs(2);
const BACK_OFF_MIN: Duration = Duration::from_millis(50);
/// Someone must change a configuration before the answer can change.
const REJECTED_RETRY: Duration = Duration::from_secs(5);

/// Connects to `router` (`host:port`), registers with `hello`, hands each new
/// connection to `connections` and reports `state`; reconnects for ever.
///
/// Ends when the sender of `state` or the receiver of `connections` is dropped.
pub async fn run(
    endpoint: Endpoint,
    router: String,
    hello: Hello,
    state: watch::Receiver<NodeState>,
    connections: mpsc::Sender<Connection>,
) {
    let mut node = state.clone();
    let node_ended = async { while node.changed().await.is_ok() {} };
    tokio::select! {
        biased;
        () = node_ended => {}
        () = connections.closed() => {}
        () = stay_connected(&endpoint, &router, &hello, state, &connections) => {}
    }
}

async fn stay_connected(
    endpoint: &Endpoint,
    router: &str,
    hello: &Hello,
    mut state: watch::Receiver<NodeState>,
    connections: &mpsc::Sender<Connection>,
) {
    let mut log = Log::default();
    let mut back_off = BACK_OFF_MIN;
    let mut sequence = 0;
    loop {
        let end = match join(endpoint, router, hello).await {
            Ok(session) => {
                log.joined(router, &session.connection);
                back_off = BACK_OFF_MIN;
                // The receiver may be gone: then `run` ends on its own.
                let _ = connections.send(session.connection.clone()).await;
                session.report(&mut state, &mut sequence).await
            }
            Err(end) => end,
        };
        // Once this node stops, so may its router: that is no news.
        if !state.borrow().draining {
            log.parted(router, &end);
        }
        match end {
            End::Rejected(_) => sleep(REJECTED_RETRY).await,
            End::Lost(_) => {
                sleep(back_off).await;
                back_off = (back_off * 2).min(BACK_OFF_MAX);
            }
        }
    }
}

/// Why the node is not, or no longer, a member.
enum End {
    Rejected(String),
    Lost(String),
}

impl From<TransferError> for End {
    fn from(error: TransferError) -> Self {
        Self::Lost(error.to_string())
    }
}

/// A connection on which the router has welcomed the node.
struct Session {
    connection: Connection,
    to_router: MessageSender,
    from_router: MessageReceiver,
}

async fn join(endpoint: &Endpoint, router: &str, hello: &Hello) -> Result<Session, End> {
    let address = resolve(router, endpoint.local_address()).await?;
    let connection = endpoint.connect(address, Role::Router).await?;
    let (mut to_router, mut from_router) = connection.open().await?;
    to_router.send(&ControlMessage::Hello(hello.clone())).await?;
    match timeout(WELCOME_TIMEOUT, from_router.recv()).await {
        Ok(Ok(Some(ControlMessage::Welcome { .. }))) => Ok(Session { connection, to_router, from_router }),
        Ok(Ok(Some(ControlMessage::Rejected { reason }))) => Err(End::Rejected(reason)),
        Ok(Ok(_)) => Err(End::Lost("the router did not answer the hello with a welcome".into())),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(End::Lost("the router does not answer the hello".into())),
    }
}

/// Prefers an address of the family that the endpoint's socket has.
async fn resolve(router: &str, local: SocketAddr) -> Result<SocketAddr, End> {
    let unknown = |reason: String| End::Lost(format!("router address {router}: {reason}"));
    let addresses = tokio::net::lookup_host(router).await.map_err(|error| unknown(error.to_string()))?;
    let addresses: Vec<_> = addresses.collect();
    let same_family = addresses.iter().find(|address| address.is_ipv4() == local.is_ipv4());
    same_family.or(addresses.first()).copied().ok_or_else(|| unknown("no such host".into()))
}

impl Session {
    /// Reports until the connection ends.
    async fn report(mut self, state: &mut watch::Receiver<NodeState>, sequence: &mut u64) -> End {
        let mut announcer = Announcer::new(now());
        loop {
            let messages = announcer.due(now(), &state.borrow_and_update(), sequence);
            for message in &messages {
                if let Err(error) = self.to_router.send(message).await {
                    return error.into();
                }
            }
            tokio::select! {
                biased;
                end = heard(&mut self.from_router) => return end,
                Ok(()) = state.changed() => announcer.note_change(),
                () = sleep_until(announcer.next_deadline()) => {}
            }
        }
    }
}

/// After its welcome the router says nothing but goodbye.
async fn heard(from_router: &mut MessageReceiver) -> End {
    loop {
        match from_router.recv().await {
            Ok(Some(ControlMessage::Rejected { reason })) => return End::Rejected(reason),
            Ok(Some(_)) => {}
            Ok(None) => return End::Lost("the router ended the control stream".into()),
            Err(error) => return error.into(),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a shell: it supplies the clock")]
fn now() -> Instant {
    host::now().into()
}

/// Says everything once: a router that is down for an hour is one line.
#[derive(Default)]
struct Log {
    last: String,
}

impl Log {
    fn joined(&mut self, router: &str, connection: &Connection) {
        self.last.clear();
        tracing::info!(router, name = connection.peer_name(), "joined the mesh");
    }

    fn parted(&mut self, router: &str, end: &End) {
        let (End::Rejected(reason) | End::Lost(reason)) = end;
        if *reason == self.last {
            return;
        }
        match end {
            End::Rejected(_) => tracing::error!(router, reason, "rejected by the router, will ask again"),
            End::Lost(_) => tracing::warn!(router, reason, "not connected to the router, will try again"),
        }
        self.last.clone_from(reason);
    }
}
