//! Configuration files of router, prefill node and decode node.
#![no_main]

use decode_node::DecodeConfig;
use fuzz::{SMALL_BYTES, TOML_FACTOR, choice, holding_at_most};
use libfuzzer_sys::fuzz_target;
use prefill_node::PrefillConfig;

fuzz_target!(|input: &[u8]| {
    let Some((role, text)) = choice(input) else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let memory = TOML_FACTOR * text.len() + SMALL_BYTES;
    match role {
        b'd' => {
            if let Ok(config) = holding_at_most(memory, || DecodeConfig::parse(text)) {
                assert!((16..=1024).contains(&config.block_tokens) && (1..=256).contains(&config.slots));
                assert!(config.max_local_long <= config.slots);
                assert!(config.staging_bytes <= 1 << 42 && config.queue_requests_max <= 4096);
                assert!(config.itl_cap_ms.is_finite() && config.stall_seconds >= 1.0);
                assert!((0.0..=3600.0).contains(&config.drain_seconds));
            }
        }
        b'p' => {
            if let Ok(config) = holding_at_most(memory, || PrefillConfig::parse(text)) {
                assert!(config.chunk_tokens.is_multiple_of(config.block_tokens));
                assert!((16..=16_384).contains(&config.chunk_tokens) && config.max_resident <= 64);
                assert!(config.staging_bytes <= 1 << 42 && config.handoffs_max <= 65_536);
                assert!((0.0..=3600.0).contains(&config.drain_seconds));
            }
        }
        _ => {
            if let Ok(config) = holding_at_most(memory, || router::fuzzing::config(text)) {
                kv_transfer::check_node_name(&config.name).expect("a name that a node may have");
                assert!((1 << 10..=1 << 30).contains(&config.body_bytes_max));
                assert!((1..=1 << 20).contains(&config.connections_max));
                assert!(config.frozen.as_secs() <= 3600 && config.drain.as_secs() <= 86_400);
            }
        }
    }
});
