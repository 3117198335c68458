//! QUIC endpoints with mutual TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Incoming, ServerConfig};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::connection::{CODE_DONE, explain};
use crate::{Connection, Credentials, Role, TransferError, Tuning, machine, tls, transport};

/// One UDP socket that accepts and opens mesh connections.
///
/// Connections outlive it: only [`Endpoint::close`] ends them.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    quinn: quinn::Endpoint,
    client: ClientConfig,
    local_address: SocketAddr,
    accepted: Mutex<mpsc::Receiver<Connection>>,
    accept_loop: JoinHandle<()>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.accept_loop.abort();
    }
}

/// Handshakes that run at once.
const HANDSHAKES_MAX: usize = 64;
/// Of those, handshakes with addresses that have not proved to be real. Beyond
/// it a peer must first echo a token, which costs nothing to keep.
const HANDSHAKES_UNPROVED_MAX: usize = 16;
/// A handshake takes two round trips; the rest is for busy cores.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that passed the handshake and were not yet taken by `accept`.
const ACCEPTED_MAX: usize = 256;
/// First packets that wait for the accept loop.
const INCOMING_MAX: usize = 1024;

impl Endpoint {
    /// Binds `address`; must run inside a tokio runtime.
    pub fn bind(
        address: SocketAddr,
        credentials: &Credentials,
        tuning: &Tuning,
    ) -> Result<Self, TransferError> {
        Self::bind_as(address, credentials, tuning, true)
    }

    /// Like [`Endpoint::bind`], for an endpoint that only connects: whoever
    /// connects to it gets no answer, and costs nothing.
    pub fn bind_client(
        address: SocketAddr,
        credentials: &Credentials,
        tuning: &Tuning,
    ) -> Result<Self, TransferError> {
        Self::bind_as(address, credentials, tuning, false)
    }

    fn bind_as(
        address: SocketAddr,
        credentials: &Credentials,
        tuning: &Tuning,
        accepts: bool,
    ) -> Result<Self, TransferError> {
        Self::try_bind(address, credentials, tuning, accepts)
            .map_err(|reason| TransferError::Bind { address: address.to_string(), reason })
    }

    #[expect(clippy::disallowed_methods, reason = "the shell that accepts connections")]
    fn try_bind(
        address: SocketAddr,
        credentials: &Credentials,
        tuning: &Tuning,
        accepts: bool,
    ) -> Result<Self, String> {
        tuning.check()?;
        let transport = Arc::new(transport::transport_config(tuning));
        let quinn = quinn::Endpoint::new_with_abstract_socket(
            transport::endpoint_config(credentials, tuning)?,
            accepts.then(|| server_config(credentials, &transport)).transpose()?,
            machine::socket(address).map_err(text)?,
            Arc::new(machine::Tasks),
        )
        .map_err(text)?;
        let local_address = quinn.local_addr().map_err(text)?;
        let (accepted_in, accepted) = mpsc::channel(ACCEPTED_MAX);
        let accept_loop = host::spawn(accept_loop(quinn.clone(), accepted_in));
        let client = client_config(credentials, &transport)?;
        let accepted = Mutex::new(accepted);
        Ok(Self { inner: Arc::new(Inner { quinn, client, local_address, accepted, accept_loop }) })
    }

    /// The address in use (with the port that the system chose).
    pub fn local_address(&self) -> SocketAddr {
        self.inner.local_address
    }

    /// Connects to a peer whose certificate must carry `role`.
    ///
    /// Resolves when the peer has accepted this node's certificate too.
    pub async fn connect(&self, address: SocketAddr, role: Role) -> Result<Connection, TransferError> {
        let handshake = timeout(HANDSHAKE_TIMEOUT, self.handshake(address, role));
        let result = handshake.await.unwrap_or_else(|_| Err("no answer".to_owned()));
        result.map_err(|reason| TransferError::Connect { address: format!("{role} at {address}"), reason })
    }

    async fn handshake(&self, address: SocketAddr, role: Role) -> Result<Connection, String> {
        let client = self.inner.client.clone();
        let connecting = self.inner.quinn.connect_with(client, address, role.server_name()).map_err(text)?;
        Connection::greeted(connecting.await.map_err(|error| explain(&error))?).await
    }

    /// Next peer that passed the handshake; `None` after `close`. Handshakes
    /// run beside each other; failed ones are logged and dropped.
    pub async fn accept(&self) -> Option<Connection> {
        self.inner.accepted.lock().await.recv().await
    }

    /// Closes all connections and stops accepting.
    pub fn close(&self) {
        self.inner.quinn.close(CODE_DONE, b"the node stopped");
    }

    /// Resolves when the peers of all closed connections have been told, or
    /// after a few round trips. Call it between `close` and the end of the process.
    pub async fn wait_idle(&self) {
        self.inner.quinn.wait_idle().await;
    }
}

#[expect(clippy::disallowed_methods, reason = "the shell that accepts connections")]
async fn accept_loop(quinn: quinn::Endpoint, accepted: mpsc::Sender<Connection>) {
    let permits = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    while let Some(incoming) = quinn.accept().await {
        let running = HANDSHAKES_MAX - permits.available_permits();
        if running >= HANDSHAKES_UNPROVED_MAX && incoming.may_retry() {
            // An error hands `incoming` back, and dropping it refuses the peer.
            let _ = incoming.retry();
            continue;
        }
        match permits.clone().try_acquire_owned() {
            Ok(permit) => drop(host::spawn(answer(incoming, accepted.clone(), permit))),
            // The peer sends its first packet again in a moment.
            Err(_) => incoming.ignore(),
        }
    }
}

async fn answer(incoming: Incoming, accepted: mpsc::Sender<Connection>, _permit: OwnedSemaphorePermit) {
    let peer = incoming.remote_address();
    let handshake = async {
        let quinn = incoming.await.map_err(|error| explain(&error))?;
        Connection::welcome(quinn).await
    };
    match timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(Ok(connection)) => {
            if let Err(error) = accepted.try_send(connection) {
                error.into_inner().refuse("too many connections wait to be taken");
                tracing::warn!(%peer, "connection refused, too many wait to be taken");
            }
        }
        Ok(Err(reason)) => tracing::warn!(%peer, reason, "mesh handshake failed"),
        Err(_) => tracing::warn!(%peer, reason = "it took too long", "mesh handshake failed"),
    }
}

fn server_config(
    credentials: &Credentials,
    transport: &Arc<quinn::TransportConfig>,
) -> Result<ServerConfig, String> {
    let crypto = QuicServerConfig::try_from(tls::server_config(credentials)?).map_err(text)?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(transport.clone()).max_incoming(INCOMING_MAX);
    // A node that moves connects again: its address is part of its membership.
    config.migration(false);
    Ok(config)
}

fn client_config(
    credentials: &Credentials,
    transport: &Arc<quinn::TransportConfig>,
) -> Result<ClientConfig, String> {
    let crypto = QuicClientConfig::try_from(tls::client_config(credentials)?).map_err(text)?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport.clone());
    Ok(config)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
