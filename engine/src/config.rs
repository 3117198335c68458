//! Bounds of a session's sizes, the same for both engines.

use crate::{EngineError, SessionConfig};

/// ggml's own limit (`GGML_MAX_N_THREADS`): above it it stops the process.
const THREADS_MAX: usize = 512;

/// Far above any useful batch; keeps products of sizes inside 32 bits.
const BATCH_TOKENS_MAX: usize = 1 << 16;

/// Errors: `Config` naming the first field that is out of range.
pub(crate) fn check(
    config: &SessionConfig,
    unified: bool,
    slots_max: usize,
    context_tokens_max: usize,
) -> Result<(), EngineError> {
    let slots_max = if unified { 1 } else { slots_max };
    within("slots", config.slots, slots_max)?;
    within("context_tokens", config.context_tokens, context_tokens_max)?;
    within("batch_tokens_max", config.batch_tokens_max, BATCH_TOKENS_MAX)?;
    within("threads", config.threads, THREADS_MAX)
}

fn within(field: &'static str, value: usize, max: usize) -> Result<(), EngineError> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(EngineError::Config { field, value, allowed: format!("1 to {max}") })
}
