//! Models in GGUF files, run by llama.cpp.

mod file;
mod session;
mod vocabulary;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use kv_block::Fingerprint;

use crate::ffi::{self, QuantizeTo, RawModel};
use crate::{EngineError, Model, Session, SessionConfig, Vocabulary};
pub use file::{ModelSummary, fingerprint, model_summary};
use session::{LlamaSession, Mode};
use vocabulary::LlamaVocabulary;

/// Loads weights and vocabulary, mapped into memory. Errors: `Load`.
pub fn load(path: &Path) -> Result<Arc<dyn Model>, EngineError> {
    // Read first: it refuses what is not a whole GGUF file with a clear reason.
    let fingerprint = fingerprint(path)?;
    let summary = model_summary(path)?;
    let raw = RawModel::load(path, false).map_err(|reason| file::load_error(path, &reason))?;
    let raw = Arc::new(raw);
    let vocabulary = Arc::new(LlamaVocabulary::new(raw.clone()));
    Ok(Arc::new(LlamaModel { raw, name: summary.name, fingerprint, vocabulary, blocks: OnceLock::new() }))
}

/// Loads the vocabulary alone, in a few milliseconds. Errors: `Load`.
pub fn load_vocabulary(path: &Path) -> Result<Arc<dyn Vocabulary>, EngineError> {
    model_summary(path)?;
    let raw = RawModel::load(path, true).map_err(|reason| file::load_error(path, &reason))?;
    Ok(Arc::new(LlamaVocabulary::new(Arc::new(raw))))
}

/// Weight types that [`requantize`] can write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// 8 bits with a scale per 32 weights: the fastest to decode with on a CPU.
    Q8_0,
    /// Half precision: no quantised activations either, for comparing logits.
    F16,
    /// Brain floating point: the fastest to prefill with on a CPU.
    BF16,
}

/// Writes the model `from` with other weight types to `to`, also from an
/// already quantised one. `to` appears only when it is complete.
/// Errors: `Load` naming the source; `Config` if `threads` is 0.
pub fn requantize(from: &Path, to: &Path, weights: WeightType, threads: usize) -> Result<(), EngineError> {
    model_summary(from)?;
    let within = i32::try_from(threads).ok().filter(|threads| (1..=512).contains(threads));
    let Some(count) = within else {
        return Err(EngineError::Config { field: "threads", value: threads, allowed: "1 to 512".to_owned() });
    };
    let kind = match weights {
        WeightType::Q8_0 => QuantizeTo::Q8_0,
        WeightType::F16 => QuantizeTo::F16,
        WeightType::BF16 => QuantizeTo::Bf16,
    };
    let mut partial = to.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = Path::new(&partial);
    let written = ffi::quantize(from, partial, kind, count)
        .and_then(|()| std::fs::rename(partial, to).map_err(|error| error.to_string()));
    written.map_err(|reason| {
        // Best effort: the error that matters is the one reported.
        let _ = std::fs::remove_file(partial);
        file::load_error(from, &reason)
    })
}

struct LlamaModel {
    raw: Arc<RawModel>,
    name: String,
    fingerprint: Fingerprint,
    vocabulary: Arc<LlamaVocabulary>,
    /// Found with a small context when first asked for.
    blocks: OnceLock<Result<(), String>>,
}

impl LlamaModel {
    fn session(&self, config: &SessionConfig, mode: Mode) -> Result<LlamaSession, EngineError> {
        let context_tokens_max = self.context_tokens_max();
        crate::config::check(config, mode == Mode::Prefill, ffi::sequences_max(), context_tokens_max)?;
        LlamaSession::new(self.raw.clone(), config.clone(), mode)
    }

    fn try_blocks(&self) -> Result<(), String> {
        if let Some(reason) = self.raw.class_without_rows() {
            return Err(reason.to_owned());
        }
        // A session probes its layout and its ranges when it is made.
        let tokens = self.context_tokens_max().min(64);
        let config = SessionConfig { slots: 1, context_tokens: tokens, batch_tokens_max: 16, threads: 1 };
        self.session(&config, Mode::Prefill).map(drop).map_err(|error| error.to_string())
    }
}

impl Model for LlamaModel {
    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn vocabulary(&self) -> Arc<dyn Vocabulary> {
        self.vocabulary.clone()
    }

    fn context_tokens_max(&self) -> usize {
        self.raw.context_tokens_trained()
    }

    fn blocks_supported(&self) -> Result<(), String> {
        self.blocks.get_or_init(|| self.try_blocks()).clone()
    }

    fn prefill_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError> {
        self.blocks_supported().map_err(EngineError::BlocksUnsupported)?;
        Ok(Box::new(self.session(config, Mode::Prefill)?))
    }

    fn decode_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError> {
        match self.blocks_supported() {
            Ok(()) => Ok(Box::new(self.session(config, Mode::Decode)?)),
            Err(reason) => Ok(Box::new(self.session(config, Mode::DecodeOnly(reason))?)),
        }
    }
}
