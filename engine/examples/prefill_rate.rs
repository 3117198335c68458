//! How fast the engine alone prefills: the baseline that a mesh is held against.
//!
//! `cargo run --release -p engine --example prefill_rate -- MODEL TOKENS CHUNK THREADS`
#![expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use engine::{BatchItem, EngineError, SessionConfig};
use kv_block::{SlotId, Token};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Option<Vec<usize>> =
        arguments.iter().skip(1).map(|argument| argument.parse().ok().filter(|&n| n > 0)).collect();
    let (Some(model), Some([tokens, chunk, threads])) = (arguments.first(), numbers.as_deref()) else {
        eprintln!("usage: prefill_rate MODEL TOKENS CHUNK THREADS (positive numbers)");
        return ExitCode::from(2);
    };
    match measure(Path::new(model), *tokens, *chunk, *threads) {
        Ok(seconds) => {
            println!("{tokens} tokens in {seconds:.3} s: {:.1} tok/s", *tokens as f64 / seconds);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Seconds that prefilling takes, session made and warmed up before.
fn measure(path: &Path, count: usize, chunk: usize, threads: usize) -> Result<f64, EngineError> {
    let model = engine::llama::load(path)?;
    let config = SessionConfig { slots: 1, context_tokens: count, batch_tokens_max: chunk, threads };
    let mut session = model.prefill_session(&config)?;
    let ordinary = model.vocabulary().size().min(10_000);
    let tokens: Vec<Token> = (0..count).map(|index| Token((index * 7919 % ordinary) as u32)).collect();
    let slot = SlotId(0);
    session.step(&[BatchItem { slot, tokens: &tokens[..chunk.min(count)], logits: false }])?;
    session.clear(slot);
    let start = Instant::now();
    for chunk in tokens.chunks(chunk) {
        session.step(&[BatchItem { slot, tokens: chunk, logits: false }])?;
    }
    Ok(start.elapsed().as_secs_f64())
}
