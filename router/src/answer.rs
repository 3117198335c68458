//! One answer as text: tokens in, pieces for the client out.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::Vocabulary;
use futures_util::{Stream, StreamExt, stream};
use kv_block::Token;
use kv_transfer::FinishReason;

use crate::openai::{ApiError, Choice, Usage};
use crate::request::{Progress, Running};
use crate::stop::Scanned;
use crate::text::TextOutput;

/// What the client gets, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// More text. Empty for a token that has none of its own: a part of a
    /// character, a control token, or what may become a stop string. It still
    /// tells the client that the answer goes on, as vLLM does.
    Text(String),
    /// The last piece.
    Finish(&'static str, Usage),
}

/// An answer under way.
pub(crate) struct Answer {
    vocabulary: Arc<dyn Vocabulary>,
    /// Gone once the answer is complete.
    running: Option<Running>,
    output: TextOutput,
    usage: Usage,
    pieces: VecDeque<Piece>,
}

impl Answer {
    /// `prompt_tokens` is what this answer adds to the usage: with several
    /// answers to one prompt only the first counts it.
    pub(crate) fn new(
        vocabulary: Arc<dyn Vocabulary>,
        running: Running,
        stops: &[String],
        prompt_tokens: u64,
    ) -> Self {
        Self {
            vocabulary,
            running: Some(running),
            output: TextOutput::new(stops),
            usage: Usage { prompt_tokens, ..Usage::default() },
            pieces: VecDeque::new(),
        }
    }

    /// The next piece; `None` after the last. Dropping the future in between
    /// loses nothing but the answer itself must then be dropped too.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Some(piece));
            }
            let Some(running) = &mut self.running else { return Ok(None) };
            match running.next().await? {
                Progress::Started => {}
                Progress::Tokens(tokens) => self.take_tokens(&tokens),
                Progress::Finished(reason) => self.take_end(reason),
            }
        }
    }

    /// The pieces as a stream; an error is its last item.
    pub(crate) fn into_stream(self) -> impl Stream<Item = Result<Piece, ApiError>> + Send {
        stream::unfold(Some(self), |answer| async move {
            let mut answer = answer?;
            match answer.next().await {
                Ok(piece) => Some((Ok(piece?), Some(answer))),
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    /// Runs to the end.
    pub(crate) async fn collect(self) -> Result<(Choice, Usage), ApiError> {
        let mut choice = Choice::default();
        let mut total = Usage::default();
        let mut pieces = std::pin::pin!(self.into_stream());
        while let Some(piece) = pieces.next().await {
            match piece? {
                Piece::Text(text) => choice.text.push_str(&text),
                Piece::Finish(reason, usage) => {
                    choice.finish_reason = reason;
                    total = usage;
                }
            }
        }
        Ok((choice, total))
    }

    fn take_tokens(&mut self, tokens: &[Token]) {
        for token in tokens {
            self.usage.completion_tokens += 1;
            match self.output.push(self.vocabulary.as_ref(), *token) {
                Scanned::Text(text) => self.pieces.push_back(Piece::Text(text)),
                Scanned::Stopped(text) => {
                    self.last_text(text);
                    // Dropping it resets the stream: the node need not go on.
                    if let Some(running) = self.running.take() {
                        self.end("stop", running.cached_tokens());
                    }
                    return;
                }
            }
        }
    }

    fn take_end(&mut self, reason: FinishReason) {
        let (tail, stopped) = match self.output.finish() {
            Scanned::Text(tail) => (tail, false),
            Scanned::Stopped(tail) => (tail, true),
        };
        self.last_text(tail);
        let reason = match reason {
            FinishReason::Length if !stopped => "length",
            _ => "stop",
        };
        if let Some(running) = self.running.take() {
            self.end(reason, running.cached_tokens());
            running.finish();
        }
    }

    /// Text that belongs to no token of its own.
    fn last_text(&mut self, text: String) {
        if !text.is_empty() {
            self.pieces.push_back(Piece::Text(text));
        }
    }

    fn end(&mut self, reason: &'static str, cached_tokens: u64) {
        // Never more than the prompt tokens counted here.
        self.usage.cached_tokens = cached_tokens.min(self.usage.prompt_tokens);
        self.pieces.push_back(Piece::Finish(reason, self.usage));
    }
}
