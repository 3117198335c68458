//! The network between simulated machines: packets with delay, bandwidth,
//! loss, reordering, and links that are cut.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use host::{Datagrams, Network};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::sync::Notify;

use crate::now;

/// What every packet meets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weather {
    /// Shortest way.
    pub(crate) delay: Duration,
    /// Up to so much longer, drawn for each packet: packets overtake each other.
    pub(crate) jitter: Duration,
    /// Share of packets lost, 0 to 1.
    pub(crate) loss: f64,
    /// Time that a link takes for 1,500 bytes.
    pub(crate) per_packet: Duration,
}

impl Weather {
    /// A switch between machines in one room.
    pub(crate) const FAIR: Self = Self {
        delay: Duration::from_micros(200),
        jitter: Duration::ZERO,
        loss: 0.0,
        per_packet: Duration::from_micros(2),
    };
}

/// Bytes that cost a link one `per_packet`. Coarse on purpose: a signature in a
/// handshake is a byte longer or shorter by chance, and a seed must not notice.
const PACKET_BYTES: usize = 1_500;
/// Packets that wait in a socket nobody reads; more are lost.
const SOCKET_PACKETS_MAX: usize = 4_096;
/// First port that the network gives by itself.
const PORT_MIN: u16 = 40_000;

/// All links and sockets.
pub(crate) struct VirtualNetwork {
    state: Mutex<State>,
    sent: Notify,
}

struct State {
    rng: SmallRng,
    weather: Weather,
    sockets: BTreeMap<SocketAddr, Weak<Socket>>,
    /// Directions in which nothing passes.
    cut: BTreeSet<(IpAddr, IpAddr)>,
    /// Until when each direction of a link is busy.
    busy: BTreeMap<(IpAddr, IpAddr), Instant>,
    under_way: BinaryHeap<Reverse<Packet>>,
    packets: u64,
    next_port: u16,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    arrives: Instant,
    number: u64,
    from: SocketAddr,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl VirtualNetwork {
    /// A network in fair weather. All its chance follows from `seed`.
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        let state = State {
            rng: SmallRng::seed_from_u64(seed),
            weather: Weather::FAIR,
            sockets: BTreeMap::new(),
            cut: BTreeSet::new(),
            busy: BTreeMap::new(),
            under_way: BinaryHeap::new(),
            packets: 0,
            next_port: PORT_MIN,
        };
        Arc::new(Self { state: Mutex::new(state), sent: Notify::new() })
    }

    /// The network as machines see it.
    pub(crate) fn for_machines(self: &Arc<Self>) -> Arc<dyn Network> {
        Arc::new(Handle(self.clone()))
    }

    /// From now on.
    pub(crate) fn set_weather(&self, weather: Weather) {
        self.state().weather = weather;
    }

    /// Nothing passes from one to the other any more.
    pub(crate) fn cut(&self, from: IpAddr, to: IpAddr) {
        self.state().cut.insert((from, to));
    }

    /// The link between these two carries again.
    pub(crate) fn mend_between(&self, one: IpAddr, other: IpAddr) {
        self.state().cut.retain(|way| *way != (one, other) && *way != (other, one));
    }

    /// All links carry again.
    pub(crate) fn mend(&self) {
        self.state().cut.clear();
    }

    /// The machine at `address` is gone, and its sockets with it.
    pub(crate) fn unplug(&self, address: IpAddr) {
        self.state().sockets.retain(|socket, _| socket.ip() != address);
    }

    /// Brings packets to their sockets, for ever.
    pub(crate) async fn carry(&self) {
        loop {
            let next = self.deliver(now());
            tokio::select! {
                biased;
                () = self.sent.notified() => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// Delivers what is due; returns when the next packet is.
    fn deliver(&self, now: Instant) -> Option<Instant> {
        loop {
            let mut state = self.state();
            if state.under_way.peek().is_none_or(|Reverse(packet)| packet.arrives > now) {
                return state.under_way.peek().map(|Reverse(packet)| packet.arrives);
            }
            let Some(Reverse(packet)) = state.under_way.pop() else { continue };
            let socket = state.sockets.get(&packet.to).and_then(Weak::upgrade);
            drop(state);
            if let Some(socket) = socket {
                socket.take(packet.from, packet.bytes);
            }
        }
    }

    fn send(&self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        let mut guard = self.state();
        let state = &mut *guard;
        state.packets += 1;
        let way = (from.ip(), to.ip());
        // Drawn in any case, so that a cut changes nothing for other packets.
        let (luck, jitter) = (state.rng.random::<f64>(), state.rng.random::<f64>());
        if state.cut.contains(&way) || luck < state.weather.loss {
            return;
        }
        let now = now();
        let free = state.busy.get(&way).copied().unwrap_or(now).max(now);
        let sent = free + state.weather.per_packet * bytes.len().div_ceil(PACKET_BYTES) as u32;
        state.busy.insert(way, sent);
        let arrives = sent + state.weather.delay + state.weather.jitter.mul_f64(jitter);
        let packet = Packet { arrives, number: state.packets, from, to, bytes: bytes.to_vec() };
        state.under_way.push(Reverse(packet));
        drop(guard);
        self.sent.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Handle(Arc<VirtualNetwork>);

impl Network for Handle {
    fn bind(&self, mut address: SocketAddr) -> io::Result<Arc<dyn Datagrams>> {
        let mut state = self.0.state();
        if address.port() == 0 {
            address.set_port(state.next_port);
            state.next_port = state.next_port.checked_add(1).unwrap_or(PORT_MIN);
        }
        if state.sockets.get(&address).is_some_and(|socket| socket.strong_count() > 0) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let socket = Arc::new(Socket { network: self.0.clone(), address, inbox: Mutex::default() });
        state.sockets.insert(address, Arc::downgrade(&socket));
        Ok(socket)
    }
}

struct Socket {
    network: Arc<VirtualNetwork>,
    address: SocketAddr,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
struct Inbox {
    packets: VecDeque<(SocketAddr, Vec<u8>)>,
    reader: Option<Waker>,
}

impl Socket {
    fn take(&self, from: SocketAddr, bytes: Vec<u8>) {
        let mut inbox = self.inbox();
        if inbox.packets.len() < SOCKET_PACKETS_MAX {
            inbox.packets.push_back((from, bytes));
        }
        let reader = inbox.reader.take();
        drop(inbox);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Datagrams for Socket {
    fn local_address(&self) -> SocketAddr {
        self.address
    }

    fn send(&self, to: SocketAddr, bytes: &[u8]) {
        self.network.send(self.address, to, bytes);
    }

    fn poll_receive(&self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<(usize, SocketAddr)> {
        let mut inbox = self.inbox();
        let Some((from, bytes)) = inbox.packets.pop_front() else {
            inbox.reader = Some(context.waker().clone());
            return Poll::Pending;
        };
        let length = bytes.len().min(buffer.len());
        buffer[..length].copy_from_slice(&bytes[..length]);
        Poll::Ready((length, from))
    }
}

async fn sleep_until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment.into()).await,
        None => std::future::pending().await,
    }
}
