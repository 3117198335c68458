//! Weights and vocabulary.

use std::path::Path;
use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

use super::{c_path, c_text, start, take_error};

/// A loaded model, or only its vocabulary.
pub(crate) struct RawModel {
    pub(super) model: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
}

// SAFETY: after loading, a llama_model is read-only; llama.cpp itself shares
// one between contexts on several threads, and its vocabulary functions are
// const and keep no state between calls.
unsafe impl Send for RawModel {}
// SAFETY: as above.
unsafe impl Sync for RawModel {}

impl Drop for RawModel {
    fn drop(&mut self) {
        // SAFETY: we own the model and contexts hold an `Arc` of it, so none is left.
        unsafe { sys::llama_model_free(self.model.as_ptr()) }
    }
}

impl RawModel {
    /// `Err` with llama.cpp's reason.
    pub(crate) fn load(path: &Path, vocabulary_only: bool) -> Result<Self, String> {
        start();
        let path = c_path(path).ok_or("its name contains a zero byte")?;
        // SAFETY: default params are plain data; the path is zero-terminated.
        let model = unsafe {
            let mut params = sys::llama_model_default_params();
            params.vocab_only = vocabulary_only;
            params.load_mode = sys::LLAMA_LOAD_MODE_MMAP;
            sys::llama_model_load_from_file(path.as_ptr(), params)
        };
        let model = NonNull::new(model).ok_or_else(|| take_error("llama.cpp cannot load it"))?;
        // SAFETY: the model is live; its vocabulary lives as long as it does.
        let vocab = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        let vocab = NonNull::new(vocab.cast_mut()).ok_or("it has no vocabulary")?;
        Ok(Self { model, vocab })
    }

    pub(crate) fn context_tokens_trained(&self) -> usize {
        // SAFETY: the model is live.
        let tokens = unsafe { sys::llama_model_n_ctx_train(self.model.as_ptr()) };
        usize::try_from(tokens).unwrap_or(0)
    }

    /// Tokens that a sliding window spans; 0 without one.
    pub(crate) fn window_tokens(&self) -> usize {
        // SAFETY: the model is live.
        let tokens = unsafe { sys::llama_model_n_swa(self.model.as_ptr()) };
        usize::try_from(tokens).unwrap_or(0)
    }

    /// Why this class of model has no cache of token rows, if it has none.
    pub(crate) fn class_without_rows(&self) -> Option<&'static str> {
        let model = self.model.as_ptr();
        // SAFETY: the model is live; these only read it.
        unsafe {
            if sys::llama_model_is_hybrid(model) {
                Some("it is a hybrid of attention and recurrent layers")
            } else if sys::llama_model_is_recurrent(model) {
                Some("it is recurrent")
            } else if sys::llama_model_is_diffusion(model) {
                Some("it is a diffusion model")
            } else if sys::llama_model_has_encoder(model) {
                Some("it has an encoder")
            } else {
                None
            }
        }
    }

    pub(crate) fn chat_template(&self) -> Option<String> {
        // SAFETY: the model is live; a null name asks for the default template.
        c_text(unsafe { sys::llama_model_chat_template(self.model.as_ptr(), std::ptr::null()) })
    }

    pub(crate) fn vocabulary_size(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        let size = unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) };
        usize::try_from(size).unwrap_or(0)
    }

    pub(crate) fn bos(&self) -> Option<u32> {
        // SAFETY: the vocabulary lives as long as the model.
        u32::try_from(unsafe { sys::llama_vocab_bos(self.vocab.as_ptr()) }).ok()
    }

    pub(crate) fn eos(&self) -> Option<u32> {
        // SAFETY: the vocabulary lives as long as the model.
        u32::try_from(unsafe { sys::llama_vocab_eos(self.vocab.as_ptr()) }).ok()
    }

    pub(crate) fn wants_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { sys::llama_vocab_get_add_bos(self.vocab.as_ptr()) }
    }

    pub(crate) fn is_end(&self, token: u32) -> bool {
        if token as usize >= self.vocabulary_size() {
            return false;
        }
        // SAFETY: the vocabulary lives as long as the model; the id is in range.
        unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token.cast_signed()) }
    }

    /// Tokens of `text` without any added ones. Text beyond 2 GiB has none.
    pub(crate) fn tokenize(&self, text: &str, parse_special: bool) -> Vec<u32> {
        let Ok(length) = i32::try_from(text.len()) else { return Vec::new() };
        // A token is rarely shorter than a byte; the second try is exact.
        let mut tokens = vec![0i32; text.len() + 8];
        for _ in 0..2 {
            let room = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            // SAFETY: pointers and lengths describe live buffers; llama.cpp
            // writes at most `room` tokens.
            let count = unsafe {
                sys::llama_tokenize(
                    self.vocab.as_ptr(),
                    text.as_ptr().cast(),
                    length,
                    tokens.as_mut_ptr(),
                    room,
                    false,
                    parse_special,
                )
            };
            if let Ok(count) = usize::try_from(count) {
                tokens.truncate(count);
                return tokens.into_iter().map(i32::cast_unsigned).collect();
            }
            tokens = vec![0; count.unsigned_abs() as usize];
        }
        Vec::new()
    }

    /// Bytes of one token; nothing for an id that does not exist.
    pub(crate) fn piece(&self, token: u32, special: bool) -> Vec<u8> {
        if token as usize >= self.vocabulary_size() {
            return Vec::new();
        }
        let mut piece = vec![0u8; 32];
        for _ in 0..2 {
            let room = i32::try_from(piece.len()).unwrap_or(i32::MAX);
            // SAFETY: the id is in range; llama.cpp writes at most `room` bytes.
            let count = unsafe {
                sys::llama_token_to_piece(
                    self.vocab.as_ptr(),
                    token.cast_signed(),
                    piece.as_mut_ptr().cast(),
                    room,
                    0,
                    special,
                )
            };
            if let Ok(count) = usize::try_from(count) {
                piece.truncate(count);
                return piece;
            }
            piece = vec![0; count.unsigned_abs() as usize];
        }
        Vec::new()
    }
}
