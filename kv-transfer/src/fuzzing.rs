//! Decoders without a public name, for `fuzz/`: everywhere else they run behind
//! a connection or a file.

use std::path::Path;
use std::sync::Arc;

use rustls_pki_types::CertificateDer;

use crate::identity::{self, Credentials, MeshAuthority, Role};
use crate::stream::{Next, Pending};
use crate::{Message, TransferError, connection};

/// The greeting that this version sends.
pub fn greeting() -> Vec<u8> {
    connection::greeting().to_vec()
}

/// What a node says to the greeting of another.
pub fn check_greeting(bytes: &[u8]) -> Result<(), String> {
    connection::check_greeting(bytes)
}

/// Name and role in a certificate.
pub fn identity_of(der: &[u8]) -> Result<(String, Role), String> {
    identity::identity_of(&CertificateDer::from(der))
}

/// Name and role that the three PEM files of a node give, if they are usable.
pub fn credentials(authority: &str, certificate: &str, key: &str) -> Result<(String, Role), TransferError> {
    let [authority, certificate, key] = [authority, certificate, key].map(str::to_owned);
    let credentials = Credentials { pem: Arc::new(identity::Pem { authority, certificate, key }) };
    credentials.check(Path::new("ca.pem"), Path::new("node.pem"), Path::new("node.key"))?;
    credentials.identity()
}

/// Whether the two PEM files are those of an authority.
pub fn authority(certificate: &str, key: &str) -> Result<(), TransferError> {
    MeshAuthority::parse(certificate.to_owned(), key, Path::new("ca.pem"), Path::new("ca.key")).map(drop)
}

/// Messages of a stream that arrives in pieces of at most `piece_bytes`.
/// Returns also the most memory that was held for one that was not complete.
pub fn read_stream<M: Message>(
    mut bytes: &[u8],
    piece_bytes: usize,
) -> (Vec<M>, Option<TransferError>, usize) {
    let (mut pending, mut messages, mut held_max) = (Pending::default(), Vec::new(), 0);
    loop {
        let missing = match pending.next::<M>() {
            Ok(Next::Message(message)) => {
                messages.push(message);
                continue;
            }
            Ok(Next::Missing(missing)) => missing,
            Err(error) => return (messages, Some(error), held_max),
        };
        let (piece, rest) = bytes.split_at(missing.min(piece_bytes).min(bytes.len()));
        if piece.is_empty() {
            return (messages, None, held_max);
        }
        pending.push(piece);
        held_max = held_max.max(pending.capacity());
        bytes = rest;
    }
}
