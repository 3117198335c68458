//! One streaming chat request, with the arrival time of everything in it.
//!
//! Every request opens its own connection, and opening it counts: so no request is favoured by a
//! connection that happens to be warm. Nagle's algorithm is off. The arrival time is taken per piece
//! of the body before anything is parsed.

#![expect(clippy::disallowed_methods, reason = "this shell measures, so it reads the clock")]

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures_util::StreamExt;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use crate::chunk::{Content, StreamEvent, clip, error_message, read_event};
use crate::schedule::Arm;
use crate::sse::SseParser;
use crate::timeline::{Outcome, Timeline};

/// Where requests go.
pub(crate) struct Client {
    http: reqwest::Client,
    root: String,
    api_key: Option<String>,
    timeout: Duration,
    epoch: Instant,
}

/// What to ask.
pub(crate) struct ChatRequest<'a> {
    pub(crate) model: &'a str,
    pub(crate) prompt: String,
    pub(crate) tokens_max: u32,
    pub(crate) arm: Arm,
    /// Ask the server to write on past its own end; servers that do not know the field ignore it.
    pub(crate) endless: bool,
    /// Fields to add to the body.
    pub(crate) extra: &'a Map<String, Value>,
}

/// Lets the caller follow a stream and end it.
pub(crate) struct Control {
    /// Set once the first text is there.
    pub(crate) started: watch::Sender<bool>,
    /// Set by the caller to close the stream.
    pub(crate) stop: watch::Receiver<bool>,
}

impl Client {
    /// `url` with or without `/v1`.
    pub(crate) fn new(url: &str, api_key: Option<String>, timeout: Duration) -> anyhow::Result<Self> {
        let root = url.trim().trim_end_matches('/');
        let root = root.strip_suffix("/v1").unwrap_or(root).to_owned();
        ensure!(
            root.starts_with("http://"),
            "--url {url}: must start with http:// (a TLS server is measured through a local proxy)"
        );
        let http = reqwest::Client::builder()
            .tcp_nodelay(true)
            .pool_max_idle_per_host(0)
            .no_proxy()
            .build()
            .context("the HTTP client cannot be built")?;
        Ok(Self { http, root, api_key, timeout, epoch: Instant::now() })
    }

    /// Time since the run began.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// A JSON document under the root, or `None` if there is no such thing.
    pub(crate) async fn document(&self, path: &str) -> Option<Value> {
        let request = self.authorised(self.http.get(format!("{}{path}", self.root)));
        let response = request.timeout(Duration::from_secs(5)).send().await.ok()?;
        if !response.status().is_success() {
            return None;
        }
        response.json().await.ok()
    }

    /// The first id of `/v1/models`.
    pub(crate) async fn first_model(&self) -> anyhow::Result<String> {
        let url = format!("{}/v1/models", self.root);
        let response = self.authorised(self.http.get(&url)).timeout(self.timeout).send().await;
        let response = response.with_context(|| format!("no answer from {url}"))?;
        let status = response.status();
        let body: Value = response.json().await.with_context(|| format!("{url} answered {status}"))?;
        let id = body["data"][0]["id"].as_str();
        Ok(id.with_context(|| format!("{url} answered {status} and lists no model; use --model"))?.to_owned())
    }

    /// Sends the request and watches it to its end. Whatever happens is an outcome.
    pub(crate) async fn chat(&self, request: &ChatRequest<'_>, control: Option<Control>) -> Timeline {
        let prepared = self.prepare(request);
        let mut timeline = Timeline::started(self.now());
        let exchange = self.exchange(prepared, &mut timeline, control);
        let outcome = match tokio::time::timeout(self.timeout, exchange).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::Failed(clip(&format!("{error:#}"))),
            Err(_) => Outcome::Failed(format!("no end within {} s", self.timeout.as_secs())),
        };
        timeline.outcome = outcome;
        timeline.ended = self.now();
        timeline
    }

    fn prepare(&self, request: &ChatRequest<'_>) -> reqwest::RequestBuilder {
        let mut body = json!({
            "model": request.model,
            "messages": [{ "role": "user", "content": request.prompt }],
            "max_tokens": request.tokens_max,
            "temperature": 0,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        if request.endless {
            body["ignore_eos"] = json!(true);
        }
        for (field, value) in request.extra {
            body[field] = value.clone();
        }
        let mut http = self.http.post(format!("{}/v1/chat/completions", self.root));
        if let Some(arm) = request.arm.header() {
            http = http.header("x-segue-prefill", arm);
        }
        self.authorised(http).header("content-type", "application/json").body(body.to_string())
    }

    fn authorised(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn exchange(
        &self,
        request: reqwest::RequestBuilder,
        timeline: &mut Timeline,
        mut control: Option<Control>,
    ) -> anyhow::Result<Outcome> {
        let response = tokio::select! {
            response = request.send() => response?,
            () = stopped(&mut control) => return Ok(Outcome::Stopped),
        };
        timeline.headers = Some(self.now());
        let route = response.headers().get("x-segue-route");
        timeline.route = route.and_then(|route| route.to_str().ok()).map(str::to_owned);
        let status = response.status();
        if status != reqwest::StatusCode::OK {
            return Ok(refusal(status.as_u16(), &response.text().await.unwrap_or_default()));
        }

        let mut parser = SseParser::default();
        let mut pieces = response.bytes_stream();
        loop {
            let piece = tokio::select! {
                piece = pieces.next() => piece,
                () = stopped(&mut control) => return Ok(Outcome::Stopped),
            };
            let at = self.now();
            let Some(piece) = piece else { break };
            let piece = piece?;
            timeline.first_byte.get_or_insert(at);
            for data in parser.push(&piece)? {
                if let Some(outcome) = note(timeline, at, read_event(&data)) {
                    return Ok(outcome);
                }
            }
            if let Some(control) = &control
                && !timeline.contents.is_empty()
            {
                control.started.send_if_modified(|started| !std::mem::replace(started, true));
            }
        }
        Ok(match timeline.finish_reason {
            Some(_) => Outcome::Completed,
            None => Outcome::Failed("the stream ended without finish_reason and [DONE]".to_owned()),
        })
    }
}

/// Writes one event into the timeline; the outcome if it is the last one.
fn note(timeline: &mut Timeline, at: Duration, event: StreamEvent) -> Option<Outcome> {
    match event {
        StreamEvent::Done => return Some(Outcome::Completed),
        StreamEvent::Error(message) => {
            return Some(Outcome::Failed(format!("error in the stream: {message}")));
        }
        StreamEvent::Chunk { role, content, finish_reason, usage } => {
            if role {
                timeline.role.get_or_insert(at);
            }
            let arrived = match content {
                Content::Text => true,
                // No text for the user yet, but the answer has not stopped either.
                Content::Empty => !timeline.contents.is_empty(),
                Content::None => false,
            };
            if arrived {
                timeline.contents.push(at);
            }
            timeline.finish_reason = finish_reason.or(timeline.finish_reason.take());
            timeline.usage = usage.or(timeline.usage);
        }
    }
    None
}

/// Returns when the caller wants the stream closed; never without a control.
async fn stopped(control: &mut Option<Control>) {
    if let Some(control) = control
        && control.stop.wait_for(|&stop| stop).await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

fn refusal(status: u16, body: &str) -> Outcome {
    let message = match serde_json::from_str::<Value>(body) {
        Ok(value) => error_message(value.get("error").unwrap_or(&value)),
        Err(_) => clip(body),
    };
    Outcome::Refused { status, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_is_taken_with_and_without_v1() {
        for url in ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"] {
            assert_eq!(Client::new(url, None, Duration::from_secs(1)).unwrap().root, "http://a:1", "{url}");
        }
    }

    #[test]
    fn another_scheme_is_refused_by_name() {
        let error = Client::new("https://a", None, Duration::from_secs(1)).err().unwrap();
        assert!(error.to_string().contains("--url https://a: must start with http://"), "{error}");
    }

    #[test]
    fn a_refusal_carries_the_servers_own_message() {
        let refused = |message: &str| Outcome::Refused { status: 503, message: message.to_owned() };
        assert_eq!(refusal(503, r#"{"error":{"message":"queue full"}}"#), refused("queue full"));
        assert_eq!(refusal(503, r#"{"detail":"no"}"#), refused(r#"{"detail":"no"}"#));
        assert_eq!(refusal(503, "plain words"), refused("plain words"));
    }
}
