//! Tokens and text of a GGUF's vocabulary.

use std::sync::Arc;

use kv_block::Token;

use crate::Vocabulary;
use crate::ffi::RawModel;

pub(super) struct LlamaVocabulary {
    model: Arc<RawModel>,
    chat_template: Option<String>,
    size: usize,
}

impl LlamaVocabulary {
    pub(super) fn new(model: Arc<RawModel>) -> Self {
        let chat_template = model.chat_template();
        let size = model.vocabulary_size();
        Self { model, chat_template, size }
    }
}

impl Vocabulary for LlamaVocabulary {
    fn tokenize(&self, text: &str, add_bos: bool, parse_special: bool) -> Vec<Token> {
        // The BOS is added here: llama.cpp's own flag would add an EOS too
        // where the model asks for one, and a second BOS to a template's.
        let ids = with_stack_for(text.len(), || self.model.tokenize(text, parse_special));
        let mut tokens: Vec<Token> = ids.into_iter().map(Token).collect();
        if let (true, Some(bos)) = (add_bos && self.wants_bos(), self.bos())
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        tokens
    }

    fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        self.model.piece(token.0, special)
    }

    fn is_end(&self, token: Token) -> bool {
        self.model.is_end(token.0)
    }

    fn bos(&self) -> Option<Token> {
        self.model.bos().map(Token)
    }

    fn eos(&self) -> Option<Token> {
        self.model.eos().map(Token)
    }

    fn wants_bos(&self) -> bool {
        self.model.wants_bos()
    }

    fn size(&self) -> usize {
        self.size
    }

    fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }
}

/// Texts of this length cannot exhaust the stack of any thread.
const INLINE_BYTES_MAX: usize = 2 << 10;
/// Where llama.cpp has no splitter of its own for a model's pre-tokenizer it
/// uses `std::regex`, which recurses once per character of a match: 8 MiB of
/// stack for a word of 26,000 letters (ggml-org/llama.cpp issue 27783). Twice that.
const STACK_BYTES_PER_TEXT_BYTE: usize = 640;
const STACK_BYTES_MIN: usize = 2 << 20;

/// Runs `work` where the stack is deep enough for a text of so many bytes.
/// Memory of a stack is taken only as far as it is used.
fn with_stack_for<T: Send>(text_bytes: usize, work: impl Fn() -> T + Sync) -> T {
    if text_bytes <= INLINE_BYTES_MAX {
        return work();
    }
    let stack = STACK_BYTES_MIN.saturating_add(text_bytes.saturating_mul(STACK_BYTES_PER_TEXT_BYTE));
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("tokenize".to_owned()).stack_size(stack);
        match builder.spawn_scoped(scope, &work) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => {
                tracing::warn!(%error, stack, "no thread for a long text");
                work()
            }
        }
    })
}
