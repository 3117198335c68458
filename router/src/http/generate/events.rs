//! A streamed answer: server-sent events, exactly as OpenAI sends them.
//!
//! Per choice: the role once (chat), text, one chunk with the finish reason. For
//! the whole: usage if asked for, one `[DONE]`. An answer that breaks off ends
//! with an error event instead, never with a finish reason that is not true.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, SelectAll};
use futures_util::{Stream, StreamExt};

use super::Exchange;
use crate::answer::{Answer, Piece};
use crate::metrics::Outcome;
use crate::openai::{ApiError, ResponseHead, Usage};

/// Proxies and clients give up on silent connections after 30 s or more.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const DONE: &str = "[DONE]";

type Pieces = Pin<Box<dyn Stream<Item = (usize, Result<Piece, ApiError>)> + Send>>;

/// The response to a streaming request.
pub(super) fn respond(
    head: ResponseHead,
    answers: Vec<Answer>,
    include_usage: bool,
    exchange: Exchange,
) -> Response {
    let begun = vec![false; answers.len()];
    let tag = |(index, answer): (usize, Answer)| -> Pieces {
        Box::pin(answer.into_stream().map(move |piece| (index, piece)))
    };
    let pieces = stream::select_all(answers.into_iter().enumerate().map(tag));
    let events = Events {
        frames: Frames { head, include_usage, begun, usage: Usage::default(), due: VecDeque::new() },
        pieces: Some(pieces),
        exchange,
    };
    let events = stream::unfold(events, |mut events| async move {
        let data = events.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(data)), events))
    });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // nginx would collect the tokens otherwise.
    let no_buffering = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response.headers_mut().insert(no_buffering.0, no_buffering.1);
    response
}

struct Events {
    frames: Frames,
    /// Gone after the last piece.
    pieces: Option<SelectAll<Pieces>>,
    exchange: Exchange,
}

impl Events {
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.frames.due.pop_front() {
                return Some(data);
            }
            match self.pieces.as_mut()?.next().await {
                Some((index, Ok(piece))) => self.frames.piece(index, piece),
                Some((_, Err(error))) => self.end(Outcome::Failed, |frames| frames.error(&error)),
                None => self.end(Outcome::Finished, Frames::done),
            }
        }
    }

    /// Nothing follows; what other choices were doing is dropped.
    fn end(&mut self, outcome: Outcome, last: impl FnOnce(&mut Frames)) {
        self.exchange.outcome = outcome;
        self.pieces = None;
        last(&mut self.frames);
    }
}

/// Pieces of all choices to the data of events. Pure.
struct Frames {
    head: ResponseHead,
    include_usage: bool,
    /// Choices whose first chunk was sent.
    begun: Vec<bool>,
    usage: Usage,
    due: VecDeque<String>,
}

impl Frames {
    fn piece(&mut self, index: usize, piece: Piece) {
        if !std::mem::replace(&mut self.begun[index], true) {
            self.due.extend(self.head.first_chunk(index));
        }
        match piece {
            Piece::Text(text) => self.due.push_back(self.head.text_chunk(index, &text)),
            Piece::Finish(reason, usage) => {
                self.usage = [self.usage, usage].into_iter().sum();
                self.due.push_back(self.head.finish_chunk(index, reason));
            }
        }
    }

    fn done(&mut self) {
        if self.include_usage {
            self.due.push_back(self.head.usage_chunk(self.usage));
        }
        self.due.push_back(DONE.to_owned());
    }

    fn error(&mut self, error: &ApiError) {
        self.due.push_back(error.body());
    }
}
