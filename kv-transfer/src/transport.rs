//! Settings of the QUIC transport and its socket, each with its reason.
//!
//! Measured with quinn 0.11 on loopback, both ends on one core: the packet size
//! is the lever. Default settings reach a third of TCP with TLS, 6,500-byte
//! packets with a 4 MB stream window, an 8 MB send window and 8 MB socket
//! buffers nine tenths. More streams, rarer acknowledgements and larger windows
//! do not help; windows of 64 MB overrun the socket buffer and lose packets.

use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Once};
use std::time::Duration;

use quinn::crypto::{CryptoError, HmacKey};
use quinn::{
    ConnectionId, ConnectionIdGenerator, EndpointConfig, MtuDiscoveryConfig, TransportConfig, VarInt,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Credentials;

/// Smallest packet that QUIC works with.
pub const MTU_BYTES_MIN: u16 = 1_200;
/// Largest packet that gets through: quinn hands up to 10 packets to the kernel
/// in one segmented send without looking at their sum, the kernel refuses more
/// than 64 KiB, and the refusal is taken for a lost probe.
pub const MTU_BYTES_MAX: u16 = 6_500;

/// Transport settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Largest UDP payload, 1,200 to 6,500. The path decides how much of it is
    /// used: larger packets are probed after the handshake.
    pub mtu_bytes: u16,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { mtu_bytes: MTU_BYTES_MAX }
    }
}

impl Tuning {
    pub(crate) fn check(&self) -> Result<(), String> {
        if (MTU_BYTES_MIN..=MTU_BYTES_MAX).contains(&self.mtu_bytes) {
            return Ok(());
        }
        Err(format!(
            "mtu_bytes is {}, allowed {MTU_BYTES_MIN} to {MTU_BYTES_MAX}: with segmentation offload (GSO) \
             the kernel silently drops batches of larger packets",
            self.mtu_bytes
        ))
    }
}

/// Message streams that a peer may have open: a router has one per request, a
/// decode node one per handoff. Far above what any queue admits.
const MESSAGE_STREAMS_MAX: u32 = 8192;
/// Frame streams that a peer may have open: one per chunk, and chunks of one
/// prompt follow each other.
const FRAME_STREAMS_MAX: u32 = 64;
/// Bytes in flight on one stream, see the module's measurements.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// Bytes sent and not acknowledged on one connection.
const SEND_WINDOW_BYTES: u64 = 8 << 20;
/// Bytes received and not read on one connection. All frame streams can be full
/// and messages still get through; credit keeps it far below that.
const RECEIVE_WINDOW_BYTES: u32 = FRAME_STREAMS_MAX * STREAM_WINDOW_BYTES + (64 << 20);
/// Fits the send window, so that a burst does not overrun a reader that waits
/// for a core.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;
/// Several of these fit into the idle timeout.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Engines take all cores for seconds: a shorter time would cut connections
/// whose ends are both alive.
const IDLE_TIMEOUT: Duration = Duration::from_secs(12);
/// Before the first measurement; quinn's 333 ms is made for the internet, and
/// makes the first retransmission take a second.
const INITIAL_RTT: Duration = Duration::from_millis(100);
/// A starved reader can look like a path that drops large packets; the default
/// of a minute would leave the link slow for that long.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(5);

pub(crate) fn transport_config(tuning: &Tuning) -> TransportConfig {
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(tuning.mtu_bytes).black_hole_cooldown(BLACK_HOLE_COOLDOWN);
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(MESSAGE_STREAMS_MAX.into())
        .max_concurrent_uni_streams(FRAME_STREAMS_MAX.into())
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(RECEIVE_WINDOW_BYTES.into())
        .send_window(SEND_WINDOW_BYTES)
        // Chunks are needed in order: finishing one beats starting three.
        .send_fairness(false)
        .mtu_discovery_config(Some(discovery))
        .initial_rtt(INITIAL_RTT)
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(Some(VarInt::from_u32(IDLE_TIMEOUT.as_millis() as u32).into()))
        // No datagrams in this protocol.
        .datagram_receive_buffer_size(None);
    config
}

/// What holds for all connections of an endpoint.
pub(crate) fn endpoint_config(credentials: &Credentials, tuning: &Tuning) -> Result<EndpointConfig, String> {
    let secret = blake3_key(credentials)?;
    let mut config = EndpointConfig::new(Arc::new(ResetKey(secret)));
    config.cid_generator(|| Box::new(RandomIds)).rng_seed(Some(host::random_bytes()));
    // Both ends must allow large packets, or discovery stops at 1,472.
    config.max_udp_payload_size(tuning.mtu_bytes).map_err(|error| error.to_string())?;
    Ok(config)
}

/// Binds a UDP socket with large buffers.
pub(crate) fn socket(address: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
    warn_of_small_buffers(socket.recv_buffer_size()?.min(socket.send_buffer_size()?));
    socket.bind(&address.into())?;
    Ok(socket.into())
}

fn warn_of_small_buffers(bytes: usize) {
    static WARNED: Once = Once::new();
    if bytes < SOCKET_BUFFER_BYTES {
        WARNED.call_once(|| {
            tracing::warn!(
                asked_bytes = SOCKET_BUFFER_BYTES,
                given_bytes = bytes,
                "small UDP socket buffers, transfers may lose packets: raise net.core.rmem_max and net.core.wmem_max"
            );
        });
    }
}

/// Key of stateless resets, the same after a restart.
///
/// A peer that still believes in a connection of the process before gets a
/// reset it can verify, and reconnects at once instead of after the idle time.
struct ResetKey([u8; 32]);

fn blake3_key(credentials: &Credentials) -> Result<[u8; 32], String> {
    Ok(blake3::derive_key("segue stateless reset v1", credentials.key()?.secret_der()))
}

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        blake3::Hasher::new_keyed(&self.0).update(data).finalize_xof().fill(signature_out);
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        let expected = blake3::Hasher::new_keyed(&self.0).update(data).finalize();
        // `blake3::Hash` compares in constant time.
        match <[u8; 32]>::try_from(signature) {
            Ok(given) if expected == given => Ok(()),
            _ => Err(CryptoError),
        }
    }
}

/// Random connection ids. quinn's default ids carry a checksum under a random
/// key, and a restarted process would ignore the ids of the one before instead
/// of resetting them.
struct RandomIds;

const CONNECTION_ID_BYTES: usize = 8;

impl ConnectionIdGenerator for RandomIds {
    fn generate_cid(&mut self) -> ConnectionId {
        ConnectionId::new(&host::random_bytes::<CONNECTION_ID_BYTES>())
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_segmentation_offload_would_lose_are_refused_with_the_reason() {
        let error = Tuning { mtu_bytes: 9_000 }.check().unwrap_err();
        assert!(error.contains("9000") && error.contains("6500") && error.contains("GSO"), "{error}");
        assert!(Tuning::default().check().is_ok());
    }

    #[test]
    fn reset_tokens_verify_only_under_their_own_key() {
        let (key, other) = (ResetKey([1; 32]), ResetKey([2; 32]));
        let mut signature = [0; 32];
        key.sign(b"id", &mut signature);
        assert!(key.verify(b"id", &signature).is_ok());
        assert!(key.verify(b"di", &signature).is_err());
        assert!(other.verify(b"id", &signature).is_err());
        assert!(key.verify(b"id", &signature[..16]).is_err());
    }
}
