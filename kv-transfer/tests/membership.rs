//! A node and its router: joining, reporting, and finding each other again.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

mod mesh;

use std::net::SocketAddr;
use std::time::Duration;

use kv_transfer::membership::{self, NodeState};
use kv_transfer::*;
use mesh::{bind, local, within};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

fn hello() -> Hello {
    Hello {
        protocol: PROTOCOL_VERSION,
        name: "decode-0".into(),
        role: "decode".into(),
        address: "127.0.0.1:1".into(),
        pid: 1,
        model: "model".into(),
        fingerprint: [1; 32],
        layout: [2; 32],
        block_tokens: 64,
        context_tokens: 8192,
        slots: 8,
        blocks_unsupported: String::new(),
    }
}

struct Node {
    state: watch::Sender<NodeState>,
    connections: mpsc::Receiver<Connection>,
    task: JoinHandle<()>,
}

fn start_node(authority: &MeshAuthority, router: SocketAddr) -> Node {
    let endpoint = bind(authority, "decode-0", Role::Decode);
    let (state, seen) = watch::channel(NodeState::default());
    let (given, connections) = mpsc::channel(4);
    let task = tokio::spawn(membership::run(endpoint, router.to_string(), hello(), seen, given));
    Node { state, connections, task }
}

/// The router's end of a node's control stream.
struct Member {
    connection: Connection,
    to_node: MessageSender,
    from_node: MessageReceiver,
}

impl Member {
    async fn take(router: &Endpoint) -> Self {
        within(10, "joining", async {
            let connection = router.accept().await.unwrap();
            let (to_node, mut from_node) = connection.accept().await.unwrap();
            assert_eq!(from_node.recv().await.unwrap(), Some(ControlMessage::Hello(hello())));
            Self { connection, to_node, from_node }
        })
        .await
    }

    async fn welcome(router: &Endpoint) -> Self {
        let mut member = Self::take(router).await;
        member.to_node.send(&ControlMessage::Welcome { protocol: PROTOCOL_VERSION }).await.unwrap();
        member
    }

    async fn next(&mut self) -> ControlMessage {
        within(2, "a report", self.from_node.recv()).await.unwrap().unwrap()
    }

    /// Skips reports up to the next that is not a status.
    async fn next_but_status(&mut self) -> ControlMessage {
        loop {
            match self.next().await {
                ControlMessage::Status(_) => {}
                other => return other,
            }
        }
    }
}

#[tokio::test]
async fn a_node_joins_reports_changes_and_keeps_reporting() {
    let authority = MeshAuthority::generate();
    let router = bind(&authority, "router", Role::Router);
    let mut node = start_node(&authority, router.local_address());
    let mut member = Member::welcome(&router).await;
    assert_eq!(within(2, "the connection", node.connections.recv()).await.unwrap().peer_role(), Role::Router);
    assert!(matches!(member.next().await, ControlMessage::Status(Status { sequence: 1, .. })));

    node.state.send_modify(|state| state.warm = vec![vec![], vec![[7; 32]]]);
    assert_eq!(member.next_but_status().await, ControlMessage::Warm { slot: 1, hashes: vec![[7; 32]] });
    node.state.send_modify(|state| state.draining = true);
    assert_eq!(member.next_but_status().await, ControlMessage::Draining);
    for _ in 0..3 {
        assert!(matches!(member.next().await, ControlMessage::Status(_)), "quiet nodes go on reporting");
    }
}

#[tokio::test]
async fn a_node_finds_a_router_that_went_away_and_tells_everything_again() {
    let authority = MeshAuthority::generate();
    let credentials = authority.issue("router", Role::Router);
    let router = Endpoint::bind(local(), &credentials, &Tuning::default()).unwrap();
    let address = router.local_address();
    let mut node = start_node(&authority, address);
    node.state.send_modify(|state| state.warm = vec![vec![[7; 32]]]);
    let mut member = Member::welcome(&router).await;
    let first = within(2, "the connection", node.connections.recv()).await.unwrap();
    assert!(matches!(member.next_but_status().await, ControlMessage::Warm { .. }));
    router.close();
    within(5, "closing", router.wait_idle()).await;
    drop((member, router));
    within(5, "noticing", first.closed()).await;
    drop(first);
    tokio::time::sleep(Duration::from_millis(300)).await;

    let router = within(5, "the port", async {
        loop {
            match Endpoint::bind(address, &credentials, &Tuning::default()) {
                Ok(router) => return router,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    let mut member = Member::welcome(&router).await;
    assert!(!within(2, "the connection", node.connections.recv()).await.unwrap().is_closed());
    let warm = member.next_but_status().await;
    assert_eq!(warm, ControlMessage::Warm { slot: 0, hashes: vec![[7; 32]] });
}

#[tokio::test]
async fn a_router_that_comes_later_is_found() {
    let authority = MeshAuthority::generate();
    let address = bind(&authority, "router", Role::Router).local_address();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _node = start_node(&authority, address);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let credentials = authority.issue("router", Role::Router);
    let router = Endpoint::bind(address, &credentials, &Tuning::default()).unwrap();
    Member::welcome(&router).await;
}

#[tokio::test]
async fn a_rejected_node_asks_again() {
    let authority = MeshAuthority::generate();
    let router = bind(&authority, "router", Role::Router);
    let _node = start_node(&authority, router.local_address());
    let mut member = Member::take(&router).await;
    let reason = "fingerprint 01, expected 02".to_owned();
    member.to_node.send(&ControlMessage::Rejected { reason }).await.unwrap();
    member.to_node.finish();
    within(2, "leaving", member.connection.closed()).await;
    Member::welcome(&router).await;
}

#[tokio::test]
async fn membership_ends_with_the_node() {
    let authority = MeshAuthority::generate();
    let router = bind(&authority, "router", Role::Router);
    let node = start_node(&authority, router.local_address());
    let mut member = Member::welcome(&router).await;
    member.next().await;
    drop(node.state);
    within(2, "the end", node.task).await.unwrap();
    let end = within(2, "the router's view", async {
        while let Ok(Some(_)) = member.from_node.recv::<ControlMessage>().await {}
    });
    end.await;
}

#[tokio::test]
async fn membership_ends_when_nobody_takes_its_connections() {
    let authority = MeshAuthority::generate();
    let node = start_node(&authority, local());
    drop(node.connections);
    within(2, "the end", node.task).await.unwrap();
}
