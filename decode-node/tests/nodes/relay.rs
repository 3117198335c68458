//! A road between two UDP sockets that is as bad as a test wants it.
//!
//! ```text
//!  client ──▶ relay ──▶ server        each way: lost, delayed, or let pass
//!         ◀──       ◀──
//! ```

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::UdpSocket;

/// What happens to a packet. Shares are of 1,000.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Road {
    /// Packets that never arrive.
    pub(crate) lost: u64,
    /// Least delay.
    pub(crate) delay: Duration,
    /// Most that comes on top, different for each packet: later ones overtake.
    pub(crate) jitter: Duration,
}

impl Road {
    /// Nothing gets through.
    pub(crate) const CUT: Self = Self { lost: 1000, delay: Duration::ZERO, jitter: Duration::ZERO };
}

/// A running relay; ends with the test's runtime.
pub(crate) struct Relay {
    /// Where clients send.
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    road: Road,
    random: u64,
    passed: u64,
    lost: u64,
}

impl Relay {
    pub(crate) async fn to(server: &str, road: Road) -> Self {
        let server: SocketAddr = server.parse().unwrap();
        let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let address = front.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State { road, random: 1, passed: 0, lost: 0 }));
        tokio::spawn(forward(front, server, state.clone()));
        Self { address, state }
    }

    /// From now on.
    pub(crate) fn set(&self, road: Road) {
        self.state.lock().unwrap().road = road;
    }

    /// Packets that passed and that were lost.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock().unwrap();
        (state.passed, state.lost)
    }
}

impl State {
    /// The packet's delay; `None` if it is lost.
    fn judge(&mut self) -> Option<Duration> {
        if self.below(1000) < self.road.lost {
            self.lost += 1;
            return None;
        }
        self.passed += 1;
        let jitter_micros = self.road.jitter.as_micros() as u64;
        let extra = if jitter_micros == 0 { 0 } else { self.below(jitter_micros) };
        Some(self.road.delay + Duration::from_micros(extra))
    }

    /// xorshift: all that matters is that it can be repeated.
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % bound
    }
}

async fn forward(front: Arc<UdpSocket>, server: SocketAddr, state: Arc<Mutex<State>>) {
    let mut backs: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let Ok((length, client)) = front.recv_from(&mut buffer).await else { continue };
        let back = match backs.get(&client) {
            Some(back) => back.clone(),
            None => {
                let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                tokio::spawn(return_packets(back.clone(), front.clone(), client, state.clone()));
                backs.insert(client, back.clone());
                back
            }
        };
        carry(&state, back, server, &buffer[..length]);
    }
}

async fn return_packets(
    back: Arc<UdpSocket>,
    front: Arc<UdpSocket>,
    client: SocketAddr,
    state: Arc<Mutex<State>>,
) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        if let Ok((length, _)) = back.recv_from(&mut buffer).await {
            carry(&state, front.clone(), client, &buffer[..length]);
        }
    }
}

fn carry(state: &Mutex<State>, socket: Arc<UdpSocket>, to: SocketAddr, packet: &[u8]) {
    let Some(delay) = state.lock().unwrap().judge() else { return };
    let packet = packet.to_vec();
    tokio::spawn(async move {
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let _ = socket.send_to(&packet, to).await;
    });
}
