//! Why the router cannot run.

use settings::SettingsError;

/// The router does not start, or stops.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// A configuration or policy file is not usable.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The HTTP address cannot be used.
    #[error("HTTP address {address} (port {port}): {reason}", port = .address.port())]
    Bind {
        /// Address asked for.
        address: std::net::SocketAddr,
        /// Why not.
        reason: std::io::Error,
    },
    /// The mesh address or the credentials cannot be used.
    #[error(transparent)]
    Mesh(#[from] kv_transfer::TransferError),
    /// The model's chat template cannot be parsed.
    #[error("chat template of the model: {0}")]
    Template(String),
    /// The metrics recorder refuses its settings.
    #[error("metrics: {0}")]
    Metrics(String),
}
