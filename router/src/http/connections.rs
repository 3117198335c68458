//! Client connections: how many there may be, and how long one may keep silent.
//!
//! Limits are those that an nginx has by default. A connection that is over its
//! limit harms only itself: those beyond `connections_max` wait in the kernel's
//! queue until another one ends.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// What clients are allowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// Connections at once.
    pub(crate) connections_max: usize,
    /// From the first moment of a connection, or the end of its last response,
    /// to a complete request head; and from a byte sent to its acknowledgement,
    /// which a client that does not read withholds.
    pub(crate) silence_max: Duration,
}

/// Without descriptors every `accept` fails at once; running answers go on and
/// free some.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop`, then ends idle connections and lets the others finish.
pub(crate) async fn serve(
    listener: TcpListener,
    routes: Router,
    limits: ConnectionLimits,
    stop: impl Future<Output = ()>,
) {
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let (permit, stream) = tokio::select! {
            biased;
            () = &mut stop => break,
            next = next_connection(&listener, &permits, limits.silence_max) => next,
        };
        let service = TowerToHyperService::new(routes.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.silence_max)
            .serve_connection(TokioIo::new(stream), service);
        attend(graceful.watch(connection), permit);
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn next_connection(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
    silence_max: Duration,
) -> (Option<OwnedSemaphorePermit>, TcpStream) {
    // Nobody closes the semaphore.
    let permit = permits.clone().acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                prepare(&stream, silence_max);
                return (permit, stream);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Neither is possible on a socket that is dead already; then the first read says so.
fn prepare(stream: &TcpStream, silence_max: Duration) {
    // Tokens are small; waiting to fill a packet would be felt.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(silence_max));
}

/// On a task of its own; the permit comes back with its end.
#[expect(clippy::disallowed_methods, reason = "the shell that serves clients")]
fn attend(
    connection: impl Future<Output = Result<(), hyper::Error>> + Send + 'static,
    permit: Option<OwnedSemaphorePermit>,
) {
    host::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "client connection ended early");
        }
        drop(permit);
    });
}
