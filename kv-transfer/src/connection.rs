//! One connection between two nodes, and what its errors are called.

use std::net::SocketAddr;
use std::sync::Arc;

use quinn::{ConnectionError, ReadError, VarInt, WriteError};
use rustls_pki_types::CertificateDer;

use crate::{
    FrameReader, FrameWriter, MessageReceiver, MessageSender, PROTOCOL_VERSION, Role, TransferError, identity,
};

/// Close code of a connection that ended in order.
pub(crate) const CODE_DONE: VarInt = VarInt::from_u32(0);
/// Reset or stop code of a stream whose work was given up.
pub(crate) const CODE_CANCELLED: VarInt = VarInt::from_u32(1);
/// Close code after a handshake that leads nowhere; the reason says why.
pub(crate) const CODE_REFUSED: VarInt = VarInt::from_u32(2);

/// Messages go before frames: a cancel or credit must not queue behind megabytes.
const MESSAGE_PRIORITY: i32 = 1;

/// Longer reasons would not fit into one packet.
const REASON_BYTES_MAX: usize = 512;

/// One connection to a peer; cheap to clone.
#[derive(Clone)]
pub struct Connection {
    quinn: quinn::Connection,
    peer: Arc<Peer>,
}

struct Peer {
    name: String,
    role: Role,
}

impl Connection {
    /// The peer's certified name.
    pub fn peer_name(&self) -> &str {
        &self.peer.name
    }

    /// The peer's certified role.
    pub fn peer_role(&self) -> Role {
        self.peer.role
    }

    /// The peer's address.
    pub fn remote_address(&self) -> SocketAddr {
        self.quinn.remote_address()
    }

    /// Opens a message stream; waits while the peer allows no more.
    ///
    /// The peer sees it when the first message is sent.
    pub async fn open(&self) -> Result<(MessageSender, MessageReceiver), TransferError> {
        Ok(messages(self.quinn.open_bi().await.map_err(lost)?))
    }

    /// Next message stream that the peer opened.
    pub async fn accept(&self) -> Result<(MessageSender, MessageReceiver), TransferError> {
        Ok(messages(self.quinn.accept_bi().await.map_err(lost)?))
    }

    /// Opens a frame stream.
    pub async fn open_frames(&self) -> Result<FrameWriter, TransferError> {
        Ok(FrameWriter::new(self.quinn.open_uni().await.map_err(lost)?))
    }

    /// Next frame stream that the peer opened.
    pub async fn accept_frames(&self) -> Result<FrameReader, TransferError> {
        Ok(FrameReader::new(self.quinn.accept_uni().await.map_err(lost)?))
    }

    /// Resolves with the reason when the connection is gone.
    pub async fn closed(&self) -> TransferError {
        lost(self.quinn.closed().await)
    }

    /// Whether the connection is gone.
    pub fn is_closed(&self) -> bool {
        self.quinn.close_reason().is_some()
    }

    /// Closes at once.
    pub fn close(&self, reason: &str) {
        self.quinn.close(CODE_DONE, clip(reason));
    }

    /// Packet size that the path carries, as far as it was probed.
    pub fn mtu_bytes(&self) -> u16 {
        self.quinn.stats().path.current_mtu
    }

    /// Round trip time and packets lost so far, for metrics.
    pub fn path(&self) -> (std::time::Duration, u64) {
        let path = self.quinn.stats().path;
        (path.rtt, path.lost_packets)
    }

    /// Reads the peer's identity from the certificate that TLS verified.
    fn identify(quinn: quinn::Connection) -> Result<Self, (quinn::Connection, String)> {
        match peer_of(&quinn) {
            Ok(peer) => Ok(Self { quinn, peer: Arc::new(peer) }),
            Err(reason) => Err((quinn, reason)),
        }
    }

    /// Acceptor's end of the handshake: tells the peer that it is in.
    ///
    /// A TLS client believes a connection is up before the server has looked at
    /// its certificate; the greeting is how it learns that it was accepted.
    pub(crate) async fn welcome(quinn: quinn::Connection) -> Result<Self, String> {
        let connection = Self::identify(quinn).map_err(|(quinn, reason)| {
            quinn.close(CODE_REFUSED, clip(&format!("certificate {reason}")));
            format!("certificate {reason}")
        })?;
        let greet = async {
            let mut stream = connection.quinn.open_uni().await.map_err(lost)?;
            stream.write_all(&greeting()).await.map_err(write_error)?;
            // An error means that the connection is gone, and the peer with it.
            let _ = stream.finish();
            Ok::<_, TransferError>(())
        };
        greet.await.map_err(|error| error.to_string())?;
        Ok(connection)
    }

    /// Opener's end of the handshake.
    pub(crate) async fn greeted(quinn: quinn::Connection) -> Result<Self, String> {
        let mut stream = quinn.accept_uni().await.map_err(|error| explain(&error))?;
        let received = stream.read_to_end(GREETING_BYTES).await.map_err(|error| error.to_string())?;
        check_greeting(&received).inspect_err(|reason| quinn.close(CODE_REFUSED, clip(reason)))?;
        Self::identify(quinn).map_err(|(quinn, reason)| {
            quinn.close(CODE_REFUSED, clip(&format!("certificate {reason}")));
            format!("the peer's certificate {reason}")
        })
    }

    /// For an acceptor that cannot keep the connection.
    pub(crate) fn refuse(&self, reason: &str) {
        self.quinn.close(CODE_REFUSED, clip(reason));
    }
}

fn messages((send, receive): (quinn::SendStream, quinn::RecvStream)) -> (MessageSender, MessageReceiver) {
    // An error means that the stream is gone, which its first use will say.
    let _ = send.set_priority(MESSAGE_PRIORITY);
    (MessageSender::new(send), MessageReceiver::new(receive))
}

fn peer_of(quinn: &quinn::Connection) -> Result<Peer, String> {
    let chain = quinn.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    let chain = chain.ok_or("is missing")?;
    let (name, role) = identity::identity_of(chain.first().ok_or("is missing")?)?;
    Ok(Peer { name, role })
}

const GREETING_MAGIC: &[u8; 5] = b"segue";
const GREETING_BYTES: usize = GREETING_MAGIC.len() + size_of::<u32>();

pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..GREETING_MAGIC.len()].copy_from_slice(GREETING_MAGIC);
    bytes[GREETING_MAGIC.len()..].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    bytes
}

pub(crate) fn check_greeting(bytes: &[u8]) -> Result<(), String> {
    let version = bytes.strip_prefix(GREETING_MAGIC).and_then(|rest| <[u8; 4]>::try_from(rest).ok());
    match version.map(u32::from_le_bytes) {
        Some(PROTOCOL_VERSION) => Ok(()),
        Some(version) => {
            Err(format!("the peer speaks protocol {version}, this node speaks {PROTOCOL_VERSION}"))
        }
        None => Err("the peer did not greet like a node of this mesh".to_owned()),
    }
}

/// Why the connection ended, in words that name a certificate trouble as such.
pub(crate) fn explain(error: &ConnectionError) -> String {
    match error {
        ConnectionError::TransportError(error) if tls_alert(error.code).is_some() => {
            format!("the peer's certificate or protocol was refused here: {}", error.reason)
        }
        ConnectionError::ConnectionClosed(close) => match tls_alert(close.error_code) {
            Some(alert) => format!("the peer refused this node's {}", alert_subject(alert)),
            None => error.to_string(),
        },
        ConnectionError::ApplicationClosed(close) if close.error_code == CODE_REFUSED => {
            format!("the peer refused: {}", String::from_utf8_lossy(&close.reason))
        }
        ConnectionError::TimedOut => "no answer".to_owned(),
        ConnectionError::Reset => "the peer was restarted".to_owned(),
        other => other.to_string(),
    }
}

/// TLS alerts travel as QUIC errors 0x100 to 0x1ff (RFC 9001, section 4.8).
fn tls_alert(code: quinn::TransportErrorCode) -> Option<u8> {
    let code = u64::from(code);
    (0x100..0x200).contains(&code).then_some(code as u8)
}

/// What a TLS alert complains about (RFC 8446, section 6).
fn alert_subject(alert: u8) -> String {
    match alert {
        42..=44 => format!("certificate (TLS alert {alert})"),
        45 => "certificate: it is expired or not yet valid (TLS alert 45)".to_owned(),
        46 => "certificate (TLS alert 46)".to_owned(),
        48 => "certificate: another authority signed it (TLS alert 48)".to_owned(),
        51 => "certificate: another authority signed it (TLS alert 51)".to_owned(),
        116 => "certificate: none was sent (TLS alert 116)".to_owned(),
        120 => "application protocol (TLS alert 120)".to_owned(),
        _ => format!("handshake (TLS alert {alert})"),
    }
}

/// `reason`, cut between characters so that it fits.
fn clip(reason: &str) -> &[u8] {
    let end = (0..=reason.len().min(REASON_BYTES_MAX)).rev().find(|&end| reason.is_char_boundary(end));
    &reason.as_bytes()[..end.unwrap_or(0)]
}

pub(crate) fn lost(error: ConnectionError) -> TransferError {
    TransferError::Lost(explain(&error))
}

pub(crate) fn read_error(error: ReadError) -> TransferError {
    match error {
        ReadError::Reset(code) => TransferError::Reset(code.into_inner()),
        ReadError::ConnectionLost(error) => lost(error),
        other => TransferError::Lost(other.to_string()),
    }
}

pub(crate) fn write_error(error: WriteError) -> TransferError {
    match error {
        WriteError::Stopped(code) => TransferError::Reset(code.into_inner()),
        WriteError::ConnectionLost(error) => lost(error),
        other => TransferError::Lost(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_protocol_version_is_refused_and_both_are_named() {
        let mut bytes = greeting();
        assert_eq!(check_greeting(&bytes), Ok(()));
        bytes[5] = 77;
        let error = check_greeting(&bytes).unwrap_err();
        assert!(
            error.contains("protocol 77") && error.contains(&format!("speaks {PROTOCOL_VERSION}")),
            "{error}"
        );
        assert!(check_greeting(b"hello").is_err());
        assert!(check_greeting(&[]).is_err());
    }

    #[test]
    fn long_reasons_are_clipped_between_characters() {
        let reason = "é".repeat(400);
        assert_eq!(clip(&reason).len(), REASON_BYTES_MAX);
        assert_eq!(clip(&format!("x{reason}")).len(), REASON_BYTES_MAX - 1);
        assert_eq!(clip("short"), b"short");
    }
}
