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
        let mut tokens: Vec<Token> =
            self.model.tokenize(text, parse_special).into_iter().map(Token).collect();
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
