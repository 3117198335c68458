//! TLS 1.3 with certificates on both sides, under the mesh's own authority.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::UnixTime;

use crate::Credentials;

/// ALPN of every mesh connection.
pub const MESH_ALPN: &[u8] = b"segue";

pub(crate) fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    // ring puts AES-256 first, which costs more per byte and buys nothing here.
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

/// For connections that this node opens.
pub(crate) fn client_config(credentials: &Credentials) -> Result<ClientConfig, String> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(text)?
        .with_root_certificates(roots(credentials)?)
        .with_client_auth_cert(vec![credentials.certificate()?], credentials.key()?)
        .map_err(text)?;
    config.alpn_protocols = vec![MESH_ALPN.to_vec()];
    // Connections live long: a ticket would only be one more way in.
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// For connections that peers open.
pub(crate) fn server_config(credentials: &Credentials) -> Result<ServerConfig, String> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(text)?
        .with_client_cert_verifier(client_verifier(credentials)?)
        .with_single_cert(vec![credentials.certificate()?], credentials.key()?)
        .map_err(text)?;
    config.alpn_protocols = vec![MESH_ALPN.to_vec()];
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Whether the certificate is signed by the authority beside it, and valid now.
pub(crate) fn check_signature(credentials: &Credentials) -> Result<(), String> {
    client_verifier(credentials)?
        .verify_client_cert(&credentials.certificate()?, &[], UnixTime::now())
        .map(drop)
        .map_err(|error| format!("is not accepted by the authority beside it (ca.pem): {error}"))
}

fn client_verifier(credentials: &Credentials) -> Result<Arc<dyn ClientCertVerifier>, String> {
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots(credentials)?), provider())
        .build()
        .map_err(text)
}

fn roots(credentials: &Credentials) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    roots.add(credentials.authority()?).map_err(text)?;
    Ok(roots)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
