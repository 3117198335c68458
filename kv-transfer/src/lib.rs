//! Everything that crosses the network between nodes: messages, frames, QUIC
//! endpoints and mesh certificates.
//!
//! ```text
//!  node ──Hello──▶ router            control stream, opened by the node, for life
//!  node ◀─Welcome─ router
//!  node ──Status / Warm──▶ router
//!
//!  router ──Generate──▶ decode       one bidirectional stream per request
//!  router ◀─Started, Tokens…, Finished─ decode
//!
//!  decode ──PrefillRequest──▶ prefill   one bidirectional stream per handoff
//!  decode ◀─Accepted, Progress…, Complete─ prefill
//!  decode ◀═ frames ═ prefill           unidirectional streams, one per chunk
//! ```
//!
//! Not its job: codecs (payloads are opaque bytes), tensors, decisions.

mod connection;
mod endpoint;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod machine;
pub mod membership;
#[expect(missing_docs, reason = "rkyv derives archived twins of enum variants, whose fields have no docs")]
mod message;
mod shutdown;
mod stream;
mod tls;
mod transport;

pub use connection::Connection;
pub use endpoint::Endpoint;
pub use frame::{FrameHeader, FrameReader, FrameWriter};
pub use identity::{Credentials, MeshAuthority, Role, check_node_name};
pub use message::*;
pub use shutdown::Shutdown;
pub use stream::{Message, MessageReceiver, MessageSender};
pub use tls::MESH_ALPN;
pub use transport::{MTU_BYTES_MAX, MTU_BYTES_MIN, Tuning};

/// Version of every message and frame; stated in `Hello` and `PrefillRequest`.
/// Nodes of different versions refuse each other and name both.
pub const PROTOCOL_VERSION: u32 = 2;

/// Why a transfer cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// A certificate or key file is missing or not usable.
    #[error("{path}: {reason}")]
    Credentials {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The local address cannot be used.
    #[error("mesh address {address}: {reason}")]
    Bind {
        /// Address asked for.
        address: String,
        /// Why not.
        reason: String,
    },
    /// The peer cannot be reached or refused the handshake.
    #[error("connect to {address}: {reason}")]
    Connect {
        /// Address of the peer.
        address: String,
        /// Why not.
        reason: String,
    },
    /// The connection or stream ended.
    #[error("connection lost: {0}")]
    Lost(String),
    /// The peer reset the stream or stopped reading.
    #[error("stream reset by peer with code {0}")]
    Reset(u64),
    /// The peer sent bytes that are not a message of this protocol.
    #[error("malformed {what}: {reason}")]
    Malformed {
        /// Which message or frame.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The peer announced more bytes than allowed.
    #[error("{what} of {bytes} bytes, allowed at most {limit}")]
    TooLarge {
        /// Which message or frame.
        what: &'static str,
        /// Bytes announced.
        bytes: u64,
        /// Bound.
        limit: u64,
    },
}
