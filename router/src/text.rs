//! Generated tokens to the text that the client sees.

use engine::Vocabulary;
use kv_block::Token;

use crate::detokenize::Detokenizer;
use crate::stop::{Scanned, StopScanner};

/// Detokenises and watches for stop strings.
#[derive(Debug)]
pub(crate) struct TextOutput {
    detokenizer: Detokenizer,
    scanner: StopScanner,
}

impl TextOutput {
    pub(crate) fn new(stops: &[String]) -> Self {
        Self { detokenizer: Detokenizer::default(), scanner: StopScanner::new(stops) }
    }

    /// Appends one token.
    pub(crate) fn push(&mut self, vocabulary: &dyn Vocabulary, token: Token) -> Scanned {
        let piece = self.detokenizer.push(&vocabulary.piece(token, false));
        self.scanner.push(&piece)
    }

    /// What is left when generation ended by itself. `Stopped` if a replaced
    /// tail completes a stop string.
    pub(crate) fn finish(&mut self) -> Scanned {
        match self.scanner.push(self.detokenizer.finish()) {
            Scanned::Text(mut text) => {
                text.push_str(&self.scanner.finish());
                Scanned::Text(text)
            }
            stopped => stopped,
        }
    }
}
