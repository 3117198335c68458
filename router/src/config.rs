//! The router's configuration file and the model it serves.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv_block::Fingerprint;
use serde::Deserialize;
use settings::{Problems, SettingsError};

/// The model that this router serves. Nodes with another one are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    /// The model's own name.
    pub name: String,
    /// The id in `/v1/models`.
    pub alias: String,
    /// Of the weights.
    pub fingerprint: Fingerprint,
    /// Longest context the model was trained for.
    pub context_tokens_max: usize,
}

/// The checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// Name of the router; its certificate is `NAME.pem`.
    pub name: String,
    /// HTTP address.
    pub listen: SocketAddr,
    /// Address that nodes connect to.
    pub mesh_listen: SocketAddr,
    /// GGUF file; only its vocabulary is loaded.
    pub model: PathBuf,
    /// Model id for clients; without it the file's stem is taken.
    pub model_alias: Option<String>,
    /// Directory with `ca.pem`, `NAME.pem` and `NAME.key`.
    pub keys_dir: PathBuf,
    /// Policy file; without it the default policy applies.
    pub policy: Option<PathBuf>,
    /// Whether clients may choose the arm with `x-segue-prefill`.
    pub allow_route_override: bool,
    /// Longest request body.
    pub body_bytes_max: usize,
    /// Bytes of all request bodies under way together; the first 64 KiB of each are free.
    pub bodies_bytes_max: usize,
    /// Client connections at once; more wait until one ends.
    pub connections_max: usize,
    /// A client that owes a request, or the rest of one, and is silent for so
    /// long is disconnected.
    pub client_timeout: Duration,
    /// A node whose engine has work and makes no step for so long is frozen:
    /// nothing new goes there, and what runs there moves to another.
    pub frozen: Duration,
    /// A request that finds no decode node waits so long for one that was there a
    /// moment ago; then 503.
    pub node_wait: Duration,
    /// Time that running requests have after the first SIGTERM.
    pub drain: Duration,
}

#[derive(Deserialize)]
#[serde(default)]
struct Raw {
    name: String,
    listen: String,
    mesh_listen: String,
    model: Option<PathBuf>,
    model_alias: Option<String>,
    keys_dir: Option<PathBuf>,
    policy: Option<PathBuf>,
    allow_route_override: bool,
    body_bytes_max: u64,
    bodies_bytes_max: u64,
    connections_max: usize,
    client_timeout_seconds: u64,
    frozen_seconds: u64,
    node_wait_seconds: u64,
    drain_seconds: u64,
}

impl Default for Raw {
    fn default() -> Self {
        Self {
            name: "router".into(),
            // Loopback: there is no access control before API keys.
            listen: "127.0.0.1:8080".into(),
            mesh_listen: "127.0.0.1:7000".into(),
            model: None,
            model_alias: None,
            keys_dir: None,
            policy: None,
            allow_route_override: false,
            // A prompt of a million tokens has about 4 MB; escapes and frames of
            // messages several times that.
            body_bytes_max: 16 << 20,
            // Sixteen of the largest at once.
            bodies_bytes_max: 256 << 20,
            connections_max: 4096,
            // As nginx by default keeps idle connections.
            client_timeout_seconds: 75,
            // A chunk of a large model on a slow machine takes seconds.
            frozen_seconds: 15,
            // A supervisor starts a small model anew in a few seconds.
            node_wait_seconds: 15,
            drain_seconds: 30,
        }
    }
}

/// Above this a single request could exhaust the memory of a small machine.
const BODY_BYTES_MAX: u64 = 1 << 30;
/// Below this not even a small request fits.
const BODY_BYTES_MIN: u64 = 1 << 10;
/// No machine that a router runs on has more memory.
const BODIES_BYTES_MAX: u64 = 1 << 40;
const DRAIN_SECONDS_MAX: u64 = 86_400;
/// Each may take a descriptor and some 20 kB.
const CONNECTIONS_MAX: usize = 1 << 20;
const CLIENT_TIMEOUT_SECONDS_MAX: u64 = 86_400;
const FROZEN_SECONDS_MAX: u64 = 3600;
const NODE_WAIT_SECONDS_MAX: u64 = 3600;

impl RouterConfig {
    /// Reads and checks `path`; reports all mistakes at once.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let (raw, problems) = settings::read_file(path)?;
        check(raw, problems)
    }

    /// As [`RouterConfig::read`], from the file's text.
    pub(crate) fn parse(text: &str) -> Result<Self, SettingsError> {
        let (raw, problems) = settings::read_text(text, "router.toml")?;
        check(raw, problems)
    }

    /// The model id for clients.
    pub fn alias(&self) -> String {
        let stem = || self.model.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        self.model_alias.clone().or_else(stem).unwrap_or_default()
    }
}

fn check(raw: Raw, mut problems: Problems) -> Result<RouterConfig, SettingsError> {
    let name = kv_transfer::check_node_name(&raw.name);
    problems.require(name.is_ok(), "name", format!("is {:?}: {}", raw.name, name.err().unwrap_or_default()));
    let listen = address("listen", &raw.listen, &mut problems);
    let mesh_listen = address("mesh_listen", &raw.mesh_listen, &mut problems);
    problems.require(raw.model.is_some(), "model", "is missing: the path of a GGUF file");
    problems.require(raw.keys_dir.is_some(), "keys_dir", "is missing: the directory with ca.pem");
    let alias_fits = raw.model_alias.as_ref().is_none_or(|alias| !alias.trim().is_empty());
    problems.require(alias_fits, "model_alias", "is empty");
    problems.range("body_bytes_max", raw.body_bytes_max, BODY_BYTES_MIN, BODY_BYTES_MAX);
    let one_body = raw.body_bytes_max.clamp(BODY_BYTES_MIN, BODY_BYTES_MAX);
    problems.range("bodies_bytes_max", raw.bodies_bytes_max, one_body, BODIES_BYTES_MAX);
    problems.range("connections_max", raw.connections_max, 1, CONNECTIONS_MAX);
    problems.range("client_timeout_seconds", raw.client_timeout_seconds, 1, CLIENT_TIMEOUT_SECONDS_MAX);
    problems.range("frozen_seconds", raw.frozen_seconds, 1, FROZEN_SECONDS_MAX);
    problems.range("node_wait_seconds", raw.node_wait_seconds, 0, NODE_WAIT_SECONDS_MAX);
    problems.range("drain_seconds", raw.drain_seconds, 0, DRAIN_SECONDS_MAX);
    problems.finish()?;
    Ok(RouterConfig {
        name: raw.name,
        listen,
        mesh_listen,
        model: raw.model.unwrap_or_default(),
        model_alias: raw.model_alias,
        keys_dir: raw.keys_dir.unwrap_or_default(),
        policy: raw.policy,
        allow_route_override: raw.allow_route_override,
        body_bytes_max: raw.body_bytes_max as usize,
        bodies_bytes_max: raw.bodies_bytes_max as usize,
        connections_max: raw.connections_max,
        client_timeout: Duration::from_secs(raw.client_timeout_seconds),
        frozen: Duration::from_secs(raw.frozen_seconds),
        node_wait: Duration::from_secs(raw.node_wait_seconds),
        drain: Duration::from_secs(raw.drain_seconds),
    })
}

/// The address, or any address and a problem.
fn address(key: &str, text: &str, problems: &mut Problems) -> SocketAddr {
    let parsed = text.parse();
    problems.require(parsed.is_ok(), key, format!("is {text:?}, expected IP:PORT such as 127.0.0.1:8080"));
    parsed.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RouterConfig, String> {
        RouterConfig::parse(text).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_fill_everything_but_model_and_keys() {
        let config = parse("model = \"/m/tiny-q8_0.gguf\"\nkeys_dir = \"/k\"").unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
        assert_eq!(config.mesh_listen.to_string(), "127.0.0.1:7000");
        assert_eq!(config.alias(), "tiny-q8_0");
        assert_eq!((config.body_bytes_max, config.bodies_bytes_max), (16_777_216, 268_435_456));
        assert_eq!((config.connections_max, config.client_timeout), (4096, Duration::from_secs(75)));
        assert_eq!((config.frozen, config.node_wait), (Duration::from_secs(15), Duration::from_secs(15)));
        assert_eq!(config.drain, Duration::from_secs(30));
        assert!(!config.allow_route_override);
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let text = "frozen_seconds = 0\nnode_wait_seconds = 9999\nconnections_max = 0\nclient_timeout_seconds = 0\nname = \"\"\nlisten = \"8080\"\nbody_bytes_max = 3\nbodies_bytes_max = 4\nmodel_alias = \" \"\nprt = 1";
        let error = parse(text).unwrap_err();
        for part in [
            "unknown key `prt`",
            "`name` is \"\"",
            "`listen` is \"8080\", expected IP:PORT",
            "`model` is missing",
            "`keys_dir` is missing",
            "`model_alias` is empty",
            "`frozen_seconds` is 0, allowed 1 to 3600",
            "`node_wait_seconds` is 9999, allowed 0 to 3600",
            "`connections_max` is 0, allowed 1 to 1048576",
            "`client_timeout_seconds` is 0, allowed 1 to 86400",
            "`body_bytes_max` is 3, allowed 1024 to 1073741824",
            "`bodies_bytes_max` is 4, allowed 1024 to 1099511627776",
        ] {
            assert!(error.contains(part), "{part:?} in {error}");
        }
    }
}
