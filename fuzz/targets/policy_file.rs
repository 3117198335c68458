//! The router's policy file.
#![no_main]

use fuzz::{SMALL_BYTES, TOML_FACTOR, holding_at_most};
use libfuzzer_sys::fuzz_target;
use router::fuzzing::policy;

fuzz_target!(|text: &str| {
    let memory = TOML_FACTOR * text.len() + SMALL_BYTES;
    match holding_at_most(memory, || policy(text)) {
        Ok(policy) => assert!(policy.local_below_tokens <= 1 << 24),
        Err(error) => assert!(error.to_string().starts_with("policy.toml: ")),
    }
});
