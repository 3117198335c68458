//! `prefill.toml`, read and checked once.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use settings::{Problems, SettingsError};

/// A prefill node's configuration, checked. Sizes are in the unit of their name.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct PrefillConfig {
    /// Name of the node, unique in the mesh; also the name of its key files.
    pub name: String,
    /// Mesh address that decode nodes connect to. Port 0 lets the system choose.
    pub listen: String,
    /// Mesh address of the router.
    pub router: String,
    /// GGUF file.
    pub model: PathBuf,
    /// Directory with `ca.pem`, `NAME.pem` and `NAME.key`.
    pub keys_dir: PathBuf,
    /// Tokens per KV block; all nodes of a mesh must agree.
    pub block_tokens: usize,
    /// Tokens per engine step; a multiple of `block_tokens`. Between two chunks
    /// a shorter prompt may go first, and a departed client is noticed.
    pub chunk_tokens: usize,
    /// Partly computed prompts at once, each with a context of its own.
    pub max_resident: usize,
    /// Tokens that one prompt may have; 0 is what the model was trained for.
    pub context_tokens: usize,
    /// Compute threads; 0 is one per CPU in `cpus`, or one per CPU of the machine.
    pub threads: usize,
    /// CPUs for the engine; empty is all.
    pub cpus: Vec<usize>,
    /// Prompt tokens that may wait or be under way. An idle node takes any
    /// prompt that fits its context.
    pub queue_tokens_max: usize,
    /// Memory for KV that is computed and waits for the network: so much a slow
    /// receiver may cost before it costs others their turn. 0: a few chunks.
    pub staging_bytes: u64,
    /// Handoffs that may wait or be under way.
    pub handoffs_max: usize,
    /// After SIGTERM, running handoffs get so long to finish.
    pub drain_seconds: f64,
}

impl Default for PrefillConfig {
    fn default() -> Self {
        Self {
            name: "prefill-1".to_owned(),
            listen: "127.0.0.1:0".to_owned(),
            router: "127.0.0.1:7000".to_owned(),
            model: PathBuf::new(),
            keys_dir: PathBuf::from("keys"),
            block_tokens: 64,
            chunk_tokens: 256,
            max_resident: 1,
            context_tokens: 0,
            threads: 0,
            cpus: Vec::new(),
            // About an hour of work for the demo model on one core: beyond that,
            // refusing is kinder than queueing.
            queue_tokens_max: 1 << 20,
            staging_bytes: 2 << 30,
            handoffs_max: 256,
            drain_seconds: 30.0,
        }
    }
}

impl PrefillConfig {
    /// Reads and checks a file; reports all mistakes at once.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let (config, problems) = settings::read_file::<Self>(path)?;
        config.check(problems)?;
        Ok(config)
    }

    /// As [`PrefillConfig::read`], from the file's text.
    #[doc(hidden)]
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let (config, problems) = settings::read_text::<Self>(text, "prefill.toml")?;
        config.check(problems)?;
        Ok(config)
    }

    fn check(&self, mut problems: Problems) -> Result<(), SettingsError> {
        problems.require(!self.name.is_empty(), "name", "is empty");
        match self.listen.parse::<SocketAddr>() {
            // Peers are told this address, so it must lead somewhere.
            Ok(address) => problems.require(
                !address.ip().is_unspecified(),
                "listen",
                format!("is {address}; name the address that decode nodes connect to"),
            ),
            Err(_) => problems.require(false, "listen", format!("is \"{}\", not ADDRESS:PORT", self.listen)),
        }
        problems.require(
            self.router.contains(':'),
            "router",
            format!("is \"{}\", not HOST:PORT", self.router),
        );
        problems.require(!self.model.as_os_str().is_empty(), "model", "is missing");
        problems.range("block_tokens", self.block_tokens, 16, 1024);
        problems.range("chunk_tokens", self.chunk_tokens, 16, 16_384);
        problems.require(
            self.block_tokens > 0 && self.chunk_tokens.is_multiple_of(self.block_tokens),
            "chunk_tokens",
            format!("is {}, not a multiple of `block_tokens` = {}", self.chunk_tokens, self.block_tokens),
        );
        problems.range("max_resident", self.max_resident, 1, 64);
        if self.context_tokens != 0 {
            problems.range("context_tokens", self.context_tokens, 64, 1 << 22);
        }
        problems.range("threads", self.threads, 0, 1024);
        problems.require(
            self.cpus.iter().all(|&cpu| cpu < CPUS_MAX),
            "cpus",
            format!("names a CPU outside 0 to {}", CPUS_MAX - 1),
        );
        problems.range("queue_tokens_max", self.queue_tokens_max, 1, 1 << 32);
        problems.range("staging_bytes", self.staging_bytes, 0, 1 << 42);
        problems.range("handoffs_max", self.handoffs_max, 1, 65_536);
        problems.range("drain_seconds", self.drain_seconds, 0.0, 3600.0);
        problems.finish()
    }
}

/// As many as the system's own CPU sets hold.
const CPUS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<(), String> {
        PrefillConfig::parse(text).map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_need_only_a_model() {
        assert_eq!(check("model = \"m.gguf\""), Ok(()));
        assert_eq!(check(""), Err("prefill.toml: `model` is missing".to_owned()));
    }

    #[test]
    fn mistakes_are_reported_together_with_their_range() {
        let message = check(
            "model = \"m\"\nblock_tokens = 100\nchunk_token = 1\nmax_resident = 0\nstaging_bytes = 5000000000000\nlisten = \"0.0.0.0:1\"",
        )
        .unwrap_err();
        for part in [
            "unknown key `chunk_token`",
            "`chunk_tokens` is 256, not a multiple of `block_tokens` = 100",
            "`max_resident` is 0, allowed 1 to 64",
            "`staging_bytes` is 5000000000000, allowed 0 to 4398046511104",
            "`listen` is 0.0.0.0:1; name the address",
        ] {
            assert!(message.contains(part), "{part} not in {message}");
        }
    }

    #[test]
    fn zero_block_tokens_is_a_message_and_no_panic() {
        assert!(check("model = \"m\"\nblock_tokens = 0").unwrap_err().contains("`block_tokens` is 0"));
    }
}
