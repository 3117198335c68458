//! The demo models, and small things that several tests do with sessions.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test file uses some of it")]

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use engine::{BatchItem, InstallBlob, Model, Session, SessionConfig};
use kv_block::{SlotId, Token};

pub const SMOLLM: &str = "smollm2-135m-q4_1.gguf";
pub const GEMMA: &str = "gemma3-270m-q4_k_m.gguf";

/// Fails, rather than skips, where the file is missing.
pub fn model_path(file: &str) -> PathBuf {
    let cache = std::env::var_os("SEGUE_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        PathBuf::from(std::env::var_os("HOME").expect("HOME or SEGUE_CACHE is set")).join(".cache/segue")
    });
    let path = cache.join("models").join(file);
    assert!(path.is_file(), "{} is missing: run `make models`", path.display());
    path
}

/// Loaded once per test process.
#[cfg(feature = "llama")]
pub fn model(file: &'static str) -> Arc<dyn Model> {
    static SMOLLM_MODEL: OnceLock<Arc<dyn Model>> = OnceLock::new();
    static GEMMA_MODEL: OnceLock<Arc<dyn Model>> = OnceLock::new();
    let place = if file == SMOLLM { &SMOLLM_MODEL } else { &GEMMA_MODEL };
    place.get_or_init(|| engine::llama::load(&model_path(file)).expect("the model loads")).clone()
}

pub const SLOT: SlotId = SlotId(0);

pub fn config(slots: usize, context_tokens: usize) -> SessionConfig {
    SessionConfig { slots, context_tokens, batch_tokens_max: 256, threads: 1 }
}

/// Text of about `count` tokens that does not repeat exactly.
pub fn prompt(model: &dyn Model, count: usize) -> Vec<Token> {
    let mut text = String::new();
    for number in 0..count / 6 + 8 {
        text.push_str(&format!("Stone {number} lies north of the {} mill. ", number * 7 % 31));
    }
    let mut tokens = model.vocabulary().tokenize(&text, true, false);
    assert!(tokens.len() >= count);
    tokens.truncate(count);
    tokens
}

/// Appends `tokens` in chunks; the last one asks for logits if `logits`.
pub fn prefill(session: &mut dyn Session, slot: SlotId, tokens: &[Token], chunk: usize, logits: bool) {
    let mut rest = tokens;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(chunk.min(rest.len()));
        let item = BatchItem { slot, tokens: now, logits: logits && later.is_empty() };
        session.step(&[item]).expect("the chunk is computed");
        rest = later;
    }
}

/// Greedy continuation: feeds `first`, then each choice. Returns the tokens
/// and the logits behind each of them.
pub fn greedy(
    session: &mut dyn Session,
    slot: SlotId,
    first: Token,
    count: usize,
) -> (Vec<Token>, Vec<Vec<f32>>) {
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    let mut next = first;
    for _ in 0..count {
        session.step(&[BatchItem { slot, tokens: &[next], logits: true }]).expect("the step is computed");
        let row = session.logits(0).to_vec();
        next = argmax(&row);
        tokens.push(next);
        logits.push(row);
    }
    (tokens, logits)
}

pub fn argmax(logits: &[f32]) -> Token {
    let best = (0u32..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1)).expect("a vocabulary is not empty");
    Token(best.0)
}

/// Moves tokens `0..count` of `from`'s prompt into `slot` of `to`, in ranges of
/// `chunk`, as a mesh would.
pub fn hand_over(
    from: &mut dyn Session,
    to: &mut dyn Session,
    slot: SlotId,
    count: usize,
    chunk: usize,
) -> InstallBlob {
    let mut blob = to.blob_template().expect("blocks are supported").blob(count);
    for start in (0..count).step_by(chunk) {
        let range = start..(start + chunk).min(count);
        let exported = from.export(SLOT, range.clone()).expect("the range is resident");
        for &(part, _) in from.layout().parts() {
            let place = blob.rows_mut(part, range.clone()).expect("same layout");
            place.copy_from_slice(&exported.rows(part, range.clone()));
        }
    }
    to.install(slot, &blob).expect("the blob fits");
    blob
}
