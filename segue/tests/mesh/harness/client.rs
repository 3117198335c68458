//! Requests and what came back.

use std::time::Duration;

use futures_util::StreamExt;
use serde_json::{Value, json};

use super::{eventually, now};

/// Sends requests to one mesh.
#[derive(Clone)]
pub(crate) struct Client {
    url: String,
    http: reqwest::Client,
}

/// A whole response.
#[derive(Debug)]
pub(crate) struct Answer {
    /// HTTP status.
    pub(crate) status: u16,
    /// `x-segue-route`, or empty.
    pub(crate) route: String,
    /// The body; `null` if it is not JSON.
    pub(crate) body: Value,
}

/// A response read event by event.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// `x-segue-route`, or empty.
    pub(crate) route: String,
    /// All text pieces.
    pub(crate) text: String,
    /// From the request to the first text.
    pub(crate) ttft: Duration,
    /// From the request to the end.
    pub(crate) total: Duration,
    /// Of the last choice that had one.
    pub(crate) finish_reason: Option<String>,
    /// Whether `[DONE]` came.
    pub(crate) done: bool,
}

impl Client {
    pub(crate) fn new(url: &str) -> Self {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(240)).build().unwrap();
        Self { url: url.to_owned(), http }
    }

    /// A greedy chat with one message; `arm` is `x-segue-prefill` or empty.
    pub(crate) async fn chat(&self, prompt: &str, max_tokens: u32, arm: &str) -> Answer {
        self.post("/v1/chat/completions", &chat(prompt, max_tokens, false), arm).await
    }

    /// The same, streamed to its end.
    pub(crate) async fn stream(&self, prompt: &str, max_tokens: u32) -> Stream {
        let begin = now();
        let response = self.send("/v1/chat/completions", &chat(prompt, max_tokens, true), "").await;
        assert_eq!(response.status().as_u16(), 200);
        let mut stream = Stream { route: route(&response), ..Stream::default() };
        let mut body = response.bytes_stream();
        let mut buffer = Vec::new();
        while let Some(bytes) = body.next().await {
            buffer.extend_from_slice(&bytes.expect("the stream is not cut"));
            while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = buffer.drain(..end + 2).collect();
                stream.take(std::str::from_utf8(&event).unwrap().trim_end());
                if !stream.text.is_empty() && stream.ttft.is_zero() {
                    stream.ttft = begin.elapsed();
                }
            }
        }
        stream.total = begin.elapsed();
        stream
    }

    /// Starts a streamed chat and goes away after `patience`.
    pub(crate) async fn leave(&self, prompt: &str, max_tokens: u32, patience: Duration) {
        let read = async {
            let mut body =
                self.send("/v1/chat/completions", &chat(prompt, max_tokens, true), "").await.bytes_stream();
            while let Some(Ok(_)) = body.next().await {}
        };
        // The connection closes when the response is dropped half-read.
        let _ = tokio::time::timeout(patience, read).await;
    }

    /// Any body to any path.
    pub(crate) async fn post(&self, path: &str, body: &Value, arm: &str) -> Answer {
        answer(self.send(path, body, arm).await).await
    }

    /// Bytes that need not be JSON.
    pub(crate) async fn post_raw(&self, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        let request =
            self.http.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        answer(request.body(body).send().await.unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        answer(self.http.get(format!("{}{path}", self.url)).send().await.unwrap()).await
    }

    /// `/mesh/status`.
    pub(crate) async fn status(&self) -> Value {
        let answer = self.get("/mesh/status").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.body
    }

    /// Sum of `field` over the healthy nodes of `role`.
    pub(crate) async fn node_sum(&self, role: &str, field: &str) -> u64 {
        nodes(&self.status().await, role)
            .iter()
            .map(|node| node[field].as_u64().unwrap_or_else(|| panic!("no {field} in {node}")))
            .sum()
    }

    /// Process ids by node name.
    pub(crate) async fn pids(&self) -> Vec<(String, u64)> {
        let status = self.status().await;
        let nodes = status["nodes"].as_array().unwrap().iter();
        let mut pids: Vec<_> = nodes
            .map(|node| (node["name"].as_str().unwrap().to_owned(), node["pid"].as_u64().unwrap()))
            .collect();
        pids.sort();
        pids
    }

    /// Waits until nothing is under way anywhere.
    pub(crate) async fn settles(&self, limit: Duration) -> bool {
        eventually(limit, async || {
            let status = self.status().await;
            ["requests_in_flight", "handoffs_active", "staged_bytes", "slots_used"].iter().all(|total| {
                status[total].as_u64().unwrap_or_else(|| panic!("no total {total} in {status}")) == 0
            })
        })
        .await
    }

    /// Sum over all nodes of a metric.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = self.http.get(format!("{}/metrics", self.url)).send().await.unwrap().text().await.unwrap();
        let values: Vec<f64> = page
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(!values.is_empty(), "no {name} in {page}");
        values.iter().sum()
    }

    async fn send(&self, path: &str, body: &Value, arm: &str) -> reqwest::Response {
        let mut request = self.http.post(format!("{}{path}", self.url)).json(body);
        if !arm.is_empty() {
            request = request.header("x-segue-prefill", arm);
        }
        request.send().await.expect("the router answers")
    }
}

impl Answer {
    /// Text of the only choice.
    pub(crate) fn text(&self) -> &str {
        assert_eq!(self.status, 200, "{self:?}");
        self.body["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_else(|| panic!("no text in {self:?}"))
    }

    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.body["usage"]["prompt_tokens"].as_u64().unwrap_or_else(|| panic!("no usage in {self:?}"))
    }

    /// Message of an error in OpenAI's shape.
    pub(crate) fn error(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_else(|| panic!("no error message in {self:?}"))
    }
}

impl Stream {
    fn take(&mut self, event: &str) {
        let Some(data) = event.strip_prefix("data: ") else { return };
        if data == "[DONE]" {
            self.done = true;
            return;
        }
        let event: Value = serde_json::from_str(data).expect("events are JSON");
        assert!(event["error"].is_null(), "{event}");
        let choice = &event["choices"][0];
        self.text.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
    }
}

/// The nodes of `role` in a status.
pub(crate) fn nodes<'a>(status: &'a Value, role: &str) -> Vec<&'a Value> {
    status["nodes"].as_array().unwrap().iter().filter(|node| node["role"] == role).collect()
}

fn chat(prompt: &str, max_tokens: u32, stream: bool) -> Value {
    json!({
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    })
}

fn route(response: &reqwest::Response) -> String {
    response
        .headers()
        .get("x-segue-route")
        .map_or_else(String::new, |value| value.to_str().unwrap().to_owned())
}

async fn answer(response: reqwest::Response) -> Answer {
    Answer {
        status: response.status().as_u16(),
        route: route(&response),
        body: response.json().await.unwrap_or(Value::Null),
    }
}
