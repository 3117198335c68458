//! A deterministic twin of the real engine for tests of everything above it.
//!
//! Every KV row names its token, its position, its part of the cache and, as a
//! chained hash, all tokens before it. A session trusts nothing but the rows it
//! holds: before it answers it checks that they form one chain, and the next
//! token is a function of the last row. Rows of another prompt, position, part,
//! layer or seed therefore show in the output as [`CORRUPT`] for ever after,
//! and nothing short of the right rows gives [`FakeModel::continuation`].
//!
//! ```text
//!  row of part p at position i:  [ h_i ^ key(p) | token | i | filler(h_i, p) ]
//!  h_i = mix(h_{i-1}, token_i, i),  h_{-1} = seed
//! ```

mod rows;
mod session;
mod vocabulary;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kv_block::{Fingerprint, LayerSpec, Layout, RowSpec, Section, Token};

use crate::{EngineError, Model, Session, SessionConfig, Vocabulary};
use session::FakeSession;
pub use vocabulary::{BOS, CORRUPT, EOS, FakeVocabulary, TURN_END, TURN_START};

/// What the twin looks like and how fast it is.
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// The model's name.
    pub name: String,
    /// Stands for the weights: other seed, other fingerprint, rows and answers.
    pub seed: u64,
    /// Cache sections.
    pub sections: usize,
    /// Layers of each section.
    pub layers: usize,
    /// Bytes of one row, at least [`FakeOptions::ROW_BYTES_MIN`].
    pub row_bytes: u32,
    /// Longest context, in tokens.
    pub context_tokens_max: usize,
    /// One answer token in this many ends the answer; 0: none does.
    pub end_one_in: u64,
    /// Time that a step takes per token, slept.
    pub token_time: Duration,
    /// Time that a step takes besides, slept.
    pub step_time: Duration,
    /// Whether the twin pretends to be of a class that cannot be cut into blocks.
    pub blocks_supported: bool,
}

impl FakeOptions {
    /// Hash, token and position must fit into a row.
    pub const ROW_BYTES_MIN: u32 = 16;
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            name: "fake".to_owned(),
            seed: 0,
            sections: 2,
            layers: 2,
            row_bytes: 32,
            context_tokens_max: 8192,
            end_one_in: 64,
            token_time: Duration::ZERO,
            step_time: Duration::ZERO,
            blocks_supported: true,
        }
    }
}

/// Calls that can be made to fail, see [`FakeModel::fail_next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// [`Session::step`] fails with code -3.
    Step,
    /// [`Session::export`] fails.
    Export,
    /// [`Session::install`] fails.
    Install,
}

/// The twin of a loaded model.
pub struct FakeModel {
    options: FakeOptions,
    layout: Arc<Layout>,
    vocabulary: Arc<FakeVocabulary>,
    failures: Arc<Failures>,
}

impl FakeModel {
    /// Errors: `Config` or `Layout` if the options are out of range.
    pub fn new(options: FakeOptions) -> Result<Self, EngineError> {
        if options.row_bytes < FakeOptions::ROW_BYTES_MIN {
            return Err(EngineError::Config {
                field: "row_bytes",
                value: options.row_bytes as usize,
                allowed: format!("{} or more", FakeOptions::ROW_BYTES_MIN),
            });
        }
        let row = RowSpec { dtype: 1, row_bytes: options.row_bytes };
        let section = Section { layers: vec![LayerSpec { k: row, v: Some(row) }; options.layers] };
        let layout = Arc::new(Layout::new(vec![section; options.sections])?);
        Ok(Self { options, layout, vocabulary: Arc::new(FakeVocabulary), failures: Arc::default() })
    }

    /// The next `count` calls of this kind fail, in whichever session they come.
    pub fn fail_next(&self, failure: Failure, count: usize) {
        self.failures.counter(failure).store(count, Ordering::SeqCst);
    }

    /// The greedy answer to `prompt`, up to and without the token that ends it:
    /// what a mesh without mix-ups generates.
    pub fn continuation(&self, prompt: &[Token], count: usize) -> Vec<Token> {
        let mut chain = rows::chain_of(self.options.seed, prompt);
        let mut position = prompt.len();
        let mut answer = Vec::new();
        while answer.len() < count {
            let token = rows::next_token(chain, self.options.end_one_in);
            if self.vocabulary.is_end(token) {
                break;
            }
            chain = rows::mix(chain, token, position);
            position += 1;
            answer.push(token);
        }
        answer
    }

    fn session(&self, config: &SessionConfig, unified: bool) -> Result<Box<dyn Session>, EngineError> {
        crate::config::check(config, unified, usize::from(u16::MAX), self.options.context_tokens_max)?;
        Ok(Box::new(FakeSession::new(
            self.options.clone(),
            self.layout.clone(),
            config.clone(),
            unified,
            self.failures.clone(),
        )))
    }
}

impl Model for FakeModel {
    fn fingerprint(&self) -> Fingerprint {
        Fingerprint(blake3::derive_key("segue fake model v1", &self.options.seed.to_le_bytes()))
    }

    fn name(&self) -> &str {
        &self.options.name
    }

    fn vocabulary(&self) -> Arc<dyn Vocabulary> {
        self.vocabulary.clone()
    }

    fn context_tokens_max(&self) -> usize {
        self.options.context_tokens_max
    }

    fn blocks_supported(&self) -> Result<(), String> {
        if self.options.blocks_supported { Ok(()) } else { Err("the fake was told so".to_owned()) }
    }

    fn prefill_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError> {
        self.blocks_supported().map_err(EngineError::BlocksUnsupported)?;
        self.session(config, true)
    }

    fn decode_session(&self, config: &SessionConfig) -> Result<Box<dyn Session>, EngineError> {
        self.session(config, false)
    }
}

#[derive(Debug, Default)]
struct Failures {
    step: AtomicUsize,
    export: AtomicUsize,
    install: AtomicUsize,
}

impl Failures {
    fn counter(&self, failure: Failure) -> &AtomicUsize {
        match failure {
            Failure::Step => &self.step,
            Failure::Export => &self.export,
            Failure::Install => &self.install,
        }
    }

    /// Whether this call has to fail; counts it.
    fn take(&self, failure: Failure) -> bool {
        self.counter(failure)
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            .is_ok()
    }
}
