//! The router's side of membership: one task per connected node.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::{
    Connection, ControlMessage, Endpoint, Hello, MessageReceiver, MessageSender, PROTOCOL_VERSION,
    TransferError,
};
use tokio::time::timeout;

use crate::app::App;
use crate::clock;
use crate::registry::{Peer, Registration};

/// A node says hello as soon as it is connected, unless its cores are busy.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a refusal to arrive before the connection is closed.
const FAREWELL: Duration = Duration::from_secs(2);

/// Takes nodes in until the endpoint is closed.
#[expect(clippy::disallowed_methods, reason = "the shell that serves nodes")]
pub(crate) async fn serve(app: Arc<App>, endpoint: Endpoint) {
    while let Some(connection) = endpoint.accept().await {
        host::spawn(attend(app.clone(), connection));
    }
}

async fn attend(app: Arc<App>, connection: Connection) {
    let name = connection.peer_name().to_owned();
    match timeout(HELLO_TIMEOUT, greet(&app, &connection)).await {
        Ok(Ok(Greeted::Member(registration, _to_node, from_node))) => {
            tracing::info!(node = name, address = %connection.remote_address(), "node joined");
            let end = listen(&app, &registration, from_node).await;
            let announced = app.registry().disconnected(&registration);
            let reason = end.map_or_else(|error| error.to_string(), |()| "control stream ended".into());
            if announced || app.draining() {
                tracing::info!(node = name, "node left after draining");
            } else {
                tracing::warn!(node = name, reason, "node left");
            }
            connection.close("the control stream ended");
        }
        Ok(Ok(Greeted::Rejected(reason))) => {
            tracing::error!(node = name, reason, "node rejected");
            let _ = timeout(FAREWELL, connection.closed()).await;
            connection.close("rejected");
        }
        Ok(Err(error)) => {
            tracing::warn!(node = name, error = %error, "node did not register");
            connection.close("no valid hello");
        }
        Err(_) => {
            tracing::warn!(node = name, "node did not say hello");
            connection.close("no hello");
        }
    }
}

enum Greeted {
    /// The sending half is kept: dropping it would reset the control stream.
    Member(Registration, MessageSender, MessageReceiver),
    Rejected(String),
}

async fn greet(app: &App, connection: &Connection) -> Result<Greeted, TransferError> {
    let (mut to_node, mut from_node) = connection.accept().await?;
    let Some(ControlMessage::Hello(hello)) = from_node.recv().await? else {
        return Err(TransferError::Malformed { what: "hello", reason: "another message came first".into() });
    };
    match register(app, connection, hello) {
        Ok(registration) => {
            let welcome = ControlMessage::Welcome { protocol: PROTOCOL_VERSION };
            if let Err(error) = to_node.send(&welcome).await {
                app.registry().disconnected(&registration);
                return Err(error);
            }
            Ok(Greeted::Member(registration, to_node, from_node))
        }
        Err(reason) => {
            to_node.send(&ControlMessage::Rejected { reason: reason.clone() }).await?;
            to_node.finish();
            Ok(Greeted::Rejected(reason))
        }
    }
}

fn register(app: &App, connection: &Connection, hello: Hello) -> Result<Registration, String> {
    let peer = Peer {
        name: connection.peer_name(),
        role: connection.peer_role(),
        address: connection.remote_address(),
    };
    let link = connection.clone();
    let (registration, replaced) = app.registry().register(clock::now(), peer, hello, link)?;
    if let Some(old) = replaced {
        old.close("another connection of the same node replaced this one");
    }
    Ok(registration)
}

async fn listen(
    app: &App,
    registration: &Registration,
    mut from_node: MessageReceiver,
) -> Result<(), TransferError> {
    while let Some(message) = from_node.recv().await? {
        match message {
            ControlMessage::Status(status) => app.registry().status(clock::now(), registration, status),
            ControlMessage::Warm { slot, hashes } => app.registry().warm(registration, slot, &hashes),
            ControlMessage::Draining => app.registry().draining(registration),
            ControlMessage::Hello(_) | ControlMessage::Welcome { .. } | ControlMessage::Rejected { .. } => {
                return Err(TransferError::Malformed {
                    what: "control message",
                    reason: "not one that a member sends".into(),
                });
            }
        }
    }
    Ok(())
}
