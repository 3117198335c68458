//! `decode.toml`, read and checked once.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use settings::{Problems, SettingsError};

/// A decode node's configuration, checked. Sizes are in the unit of their name.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct DecodeConfig {
    /// Name of the node, unique in the mesh; also the name of its key files.
    pub name: String,
    /// Mesh address that peers connect to. Port 0 lets the system choose.
    pub listen: String,
    /// Mesh address of the router.
    pub router: String,
    /// GGUF file.
    pub model: PathBuf,
    /// Directory with `ca.pem`, `NAME.pem` and `NAME.key`.
    pub keys_dir: PathBuf,
    /// Tokens per KV block; all nodes of a mesh must agree.
    pub block_tokens: usize,
    /// Sequences that can run at once.
    pub slots: usize,
    /// Tokens that one sequence may have; 0 is what the model was trained for.
    pub context_tokens: usize,
    /// Compute threads; 0 is one per CPU in `cpus`, or one per CPU of the machine.
    pub threads: usize,
    /// CPUs to run on; empty is all.
    pub cpus: Vec<usize>,
    /// A step with running streams aims to stay below this.
    pub itl_cap_ms: f64,
    /// From so many uncached tokens on, a local prompt counts as long.
    pub local_long_tokens: usize,
    /// Long prompts that may be prefilled here at once.
    pub max_local_long: usize,
    /// Memory for handoffs under way. A prompt whose KV is larger is never
    /// prefilled remotely.
    pub staging_bytes: u64,
    /// Encoded bytes that one handoff may have under way on the network.
    pub credit_window_bytes: u64,
    /// Shortest silence of a prefill node that counts as a stall.
    pub stall_seconds: f64,
    /// Requests that may wait or run here at once.
    pub queue_requests_max: usize,
    /// After SIGTERM, running streams get so long to finish.
    pub drain_seconds: f64,
}

impl Default for DecodeConfig {
    fn default() -> Self {
        Self {
            name: "decode-1".to_owned(),
            listen: "127.0.0.1:0".to_owned(),
            router: "127.0.0.1:7000".to_owned(),
            model: PathBuf::new(),
            keys_dir: PathBuf::from("keys"),
            block_tokens: 64,
            slots: 8,
            context_tokens: 0,
            threads: 0,
            cpus: Vec::new(),
            itl_cap_ms: 100.0,
            local_long_tokens: 512,
            max_local_long: 1,
            staging_bytes: 2 << 30,
            // Deep enough to keep a fast link busy over a round trip and the
            // decode of a few blocks; small beside the staging memory.
            credit_window_bytes: 64 << 20,
            // A node that is gone costs no more than this. A busy one gives itself
            // more time: patience is at least four of its longest gaps.
            stall_seconds: 2.0,
            queue_requests_max: 1024,
            drain_seconds: 30.0,
        }
    }
}

impl DecodeConfig {
    /// Reads and checks a file; reports all mistakes at once.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let (config, problems) = settings::read_file::<Self>(path)?;
        config.check(problems)?;
        Ok(config)
    }

    /// As [`DecodeConfig::read`], from the file's text.
    #[doc(hidden)]
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let (config, problems) = settings::read_text::<Self>(text, "decode.toml")?;
        config.check(problems)?;
        Ok(config)
    }

    fn check(&self, mut problems: Problems) -> Result<(), SettingsError> {
        problems.require(!self.name.is_empty(), "name", "is empty");
        // Peers are told this address, so it must lead somewhere.
        let listen = self.listen.parse::<SocketAddr>();
        problems.require(
            listen.is_ok_and(|address| !address.ip().is_unspecified()),
            "listen",
            "is not ADDRESS:PORT with an address of this machine",
        );
        problems.require(self.router.contains(':'), "router", "is not HOST:PORT");
        problems.require(!self.model.as_os_str().is_empty(), "model", "is missing");
        problems.range("block_tokens", self.block_tokens, 16, 1024);
        problems.range("slots", self.slots, 1, 256);
        if self.context_tokens != 0 {
            problems.range("context_tokens", self.context_tokens, 64, 1 << 22);
        }
        problems.range("threads", self.threads, 0, 1024);
        problems.range("itl_cap_ms", self.itl_cap_ms, 1.0, 60_000.0);
        problems.range("local_long_tokens", self.local_long_tokens, 1, 1 << 22);
        problems.range("max_local_long", self.max_local_long, 1, self.slots.max(1));
        problems.range("staging_bytes", self.staging_bytes, 1 << 20, 1 << 42);
        problems.range("credit_window_bytes", self.credit_window_bytes, 1 << 20, 1 << 36);
        // Prefill nodes give a sign of life each half second.
        problems.range("stall_seconds", self.stall_seconds, 1.0, 3600.0);
        // A router may have no more request streams open, see kv-transfer/src/transport.rs.
        problems.range("queue_requests_max", self.queue_requests_max, 1, 4096);
        problems.range("drain_seconds", self.drain_seconds, 0.0, 3600.0);
        problems.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_reported_together_with_their_range() {
        let text = "model = \"m.gguf\"\nslots = 0\nslot = 3\nitl_cap_ms = 0.0\nstall_seconds = 0.5\n";
        let message = DecodeConfig::parse(text).unwrap_err().to_string();
        for part in [
            "unknown key `slot`",
            "`slots` is 0, allowed 1 to 256",
            "`itl_cap_ms` is 0, allowed 1 to 60000",
            "`stall_seconds` is 0.5, allowed 1 to 3600",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
