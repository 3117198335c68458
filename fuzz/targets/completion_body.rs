//! Bodies of completion requests: what is taken keeps every bound.
#![no_main]

use fuzz::{SMALL_BYTES, TREE_FACTOR, holding_at_most};
use libfuzzer_sys::fuzz_target;
use router::fuzzing::{completion, containers};
use serde_json::Value;

const VOCABULARY_TOKENS: usize = 1000;

fuzz_target!(|body: &[u8]| {
    let memory = TREE_FACTOR * body.len() + SMALL_BYTES;
    match holding_at_most(memory, || completion(body, VOCABULARY_TOKENS)) {
        Ok(asked) => {
            fuzz::asked::check(&asked);
            let prompts = asked.texts.len() + asked.tokens.len();
            assert!((1..=64).contains(&prompts), "{prompts} prompts");
            assert!(asked.tokens.iter().flatten().all(|&token| (token as usize) < VOCABULARY_TOKENS));
            assert!(asked.tokens.iter().all(|prompt| !prompt.is_empty()));
            assert!(asked.texts.iter().all(|prompt| !prompt.is_empty()));
        }
        Err((status, message)) => assert!(status == 400 && !message.is_empty(), "{status} {message}"),
    }
    // The bound on memory counts at least what the parser makes.
    if let Ok(value) = serde_json::from_slice(body) {
        assert!(containers(body) >= count(&value));
    }
});

fn count(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(count).sum::<usize>(),
        _ => 0,
    }
}
