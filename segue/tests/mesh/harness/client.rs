//! Requests and what came back.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use rustix::process::Pid;
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
    /// Chunks that told of a token.
    pub(crate) tokens: usize,
    /// All reasons in order; there should be one.
    pub(crate) finish_reasons: Vec<String>,
    /// Chunks that named the role.
    pub(crate) roles: usize,
    /// Times that `[DONE]` came.
    pub(crate) dones: usize,
    /// Different ids of chunks.
    pub(crate) ids: BTreeSet<String>,
}

/// A stream under way.
pub(crate) struct OpenStream {
    begin: Instant,
    stream: Stream,
    body: BoxStream<'static, reqwest::Result<Bytes>>,
    buffer: Vec<u8>,
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

    /// The same, with nothing used that was computed before.
    pub(crate) async fn cold(&self, prompt: &str, max_tokens: u32, arm: &str) -> Answer {
        let mut body = chat(prompt, max_tokens, false);
        body["cache_salt"] = json!(fresh_salt());
        self.post("/v1/chat/completions", &body, arm).await
    }

    /// The one token that goes on with a text without a template, spaces cut.
    pub(crate) async fn complete(&self, prompt: &str, salt: Option<&str>, arm: &str) -> String {
        let mut body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0});
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        let answer = self.post("/v1/completions", &body, arm).await;
        let text = answer.body["choices"][0]["text"].as_str();
        text.unwrap_or_else(|| panic!("no text in {answer:?}")).trim().to_owned()
    }

    /// A chat, streamed to its end.
    pub(crate) async fn stream(&self, prompt: &str, max_tokens: u32) -> Stream {
        self.open(prompt, max_tokens).await.rest().await
    }

    /// The same, and nothing computed before is used for it: each call has an
    /// isolation key of its own.
    pub(crate) async fn oracle(&self, prompt: &str, max_tokens: u32) -> Stream {
        let mut body = chat(prompt, max_tokens, true);
        body["cache_salt"] = json!(fresh_salt());
        let oracle = self.open_body(&body).await.rest().await;
        assert!(oracle.is_whole(), "{oracle:?}");
        oracle
    }

    /// The same; a refusal or a broken stream is an error in words.
    pub(crate) async fn try_stream(&self, prompt: &str, max_tokens: u32) -> Result<Stream, String> {
        let begin = now();
        let request = self.request("/v1/chat/completions", &chat(prompt, max_tokens, true), "");
        let response = request.send().await.map_err(|error| error.to_string())?;
        if response.status().as_u16() != 200 {
            return Err(format!("{}: {}", response.status(), response.text().await.unwrap_or_default()));
        }
        let mut stream = OpenStream::new(begin, response);
        while stream.try_advance().await? {}
        Ok(stream.stream)
    }

    /// The same, to be read event by event.
    pub(crate) async fn open(&self, prompt: &str, max_tokens: u32) -> OpenStream {
        self.open_body(&chat(prompt, max_tokens, true)).await
    }

    /// The same, with an answer that only `max_tokens` ends.
    pub(crate) async fn open_endless(&self, prompt: &str, max_tokens: u32) -> OpenStream {
        let mut body = chat(prompt, max_tokens, true);
        body["ignore_eos"] = json!(true);
        self.open_body(&body).await
    }

    async fn open_body(&self, body: &Value) -> OpenStream {
        let begin = now();
        let response = self.send("/v1/chat/completions", body, "").await;
        assert_eq!(response.status().as_u16(), 200);
        OpenStream::new(begin, response)
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

    /// The same, if the router can be reached at all.
    pub(crate) async fn try_status(&self) -> Option<Value> {
        self.http.get(format!("{}/mesh/status", self.url)).send().await.ok()?.json().await.ok()
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

    /// Process of a node.
    pub(crate) async fn pid(&self, name: &str) -> Pid {
        let pids = self.pids().await;
        let (_, pid) = pids.iter().find(|(node, _)| node == name).unwrap();
        Pid::from_raw(i32::try_from(*pid).unwrap()).unwrap()
    }

    /// Waits until every node that the router knows is healthy, `count` of them.
    pub(crate) async fn sees_all_healthy(&self, count: usize) -> bool {
        eventually(Duration::from_secs(60), async || {
            let Some(status) = self.try_status().await else { return false };
            let nodes = status["nodes"].as_array().unwrap();
            nodes.len() == count && nodes.iter().all(|node| node["healthy"] == true)
        })
        .await
    }

    /// Waits until the router takes the node for healthy.
    pub(crate) async fn sees_healthy(&self, name: &str) -> bool {
        eventually(Duration::from_secs(20), async || {
            let status = self.status().await;
            let nodes = status["nodes"].as_array().unwrap();
            nodes.iter().any(|node| node["name"] == name && node["healthy"] == true)
        })
        .await
    }

    /// Waits until a new process of the node is healthy.
    pub(crate) async fn sees_another(&self, name: &str, old: Pid) -> bool {
        let old = old.as_raw_nonzero().get() as u64;
        let replaced = async || self.pids().await.iter().any(|(node, pid)| node == name && *pid != old);
        eventually(Duration::from_secs(20), replaced).await && self.sees_healthy(name).await
    }

    /// Tokens of a text as the server counts them, template not included.
    pub(crate) async fn count_tokens(&self, text: &str) -> u64 {
        let answer = self.post("/tokenize", &json!({ "prompt": text }), "").await;
        answer.body["count"].as_u64().unwrap_or_else(|| panic!("no count in {answer:?}"))
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

    /// The text of a page that is no JSON.
    pub(crate) async fn page(&self, path: &str) -> String {
        self.http.get(format!("{}{path}", self.url)).send().await.unwrap().text().await.unwrap()
    }

    /// Sum over all nodes of a metric, given with or without labels; 0 if it was
    /// never counted.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = self.page("/metrics").await;
        let lines = page.lines().filter_map(|line| line.strip_prefix(name));
        let values = lines.filter(|rest| rest.starts_with(['{', ' ']));
        values.map(|rest| rest.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    async fn send(&self, path: &str, body: &Value, arm: &str) -> reqwest::Response {
        self.request(path, body, arm).send().await.expect("the router answers")
    }

    fn request(&self, path: &str, body: &Value, arm: &str) -> reqwest::RequestBuilder {
        let request = self.http.post(format!("{}{path}", self.url)).json(body);
        if arm.is_empty() { request } else { request.header("x-segue-prefill", arm) }
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

    /// Prompt tokens that were there already.
    pub(crate) fn cached_tokens(&self) -> u64 {
        self.body["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or_else(|| panic!("no cached tokens in {self:?}"))
    }

    /// Message of an error in OpenAI's shape.
    pub(crate) fn error(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_else(|| panic!("no error message in {self:?}"))
    }
}

impl OpenStream {
    fn new(begin: Instant, response: reqwest::Response) -> Self {
        let stream = Stream { route: route(&response), ..Stream::default() };
        Self { begin, stream, body: response.bytes_stream().boxed(), buffer: Vec::new() }
    }

    /// What came so far.
    pub(crate) fn so_far(&self) -> &Stream {
        &self.stream
    }

    /// Takes in what arrives next; false at the end.
    pub(crate) async fn advance(&mut self) -> bool {
        self.try_advance().await.expect("the stream is not cut and has no error in it")
    }

    async fn try_advance(&mut self) -> Result<bool, String> {
        let Some(bytes) = self.body.next().await else { return Ok(false) };
        self.buffer.extend_from_slice(&bytes.map_err(|error| error.to_string())?);
        while let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
            self.stream.take(std::str::from_utf8(&event).unwrap().trim_end())?;
        }
        if !self.stream.text.is_empty() && self.stream.ttft.is_zero() {
            self.stream.ttft = self.begin.elapsed();
        }
        Ok(true)
    }

    /// Reads the rest.
    pub(crate) async fn rest(mut self) -> Stream {
        while self.advance().await {}
        self.stream.total = self.begin.elapsed();
        self.stream
    }
}

impl Stream {
    /// Whether it is one whole answer: one role, one reason, one `[DONE]`, one id.
    pub(crate) fn is_whole(&self) -> bool {
        (self.roles, self.finish_reasons.len(), self.dones, self.ids.len()) == (1, 1, 1, 1)
    }

    fn take(&mut self, event: &str) -> Result<(), String> {
        let Some(data) = event.strip_prefix("data: ") else { return Ok(()) };
        if data == "[DONE]" {
            self.dones += 1;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).expect("events are JSON");
        if !event["error"].is_null() {
            return Err(event.to_string());
        }
        self.ids.insert(event["id"].to_string());
        let choice = &event["choices"][0];
        if choice["delta"]["role"].is_string() {
            self.roles += 1;
        } else if let Some(text) = choice["delta"]["content"].as_str() {
            self.tokens += 1;
            self.text.push_str(text);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reasons.push(reason.to_owned());
        }
        Ok(())
    }
}

/// Name of the decode node in a route header.
pub(crate) fn decode_node(route: &str) -> &str {
    let field = route.split("; ").find_map(|field| field.strip_prefix("decode="));
    field.unwrap_or_else(|| panic!("no decode node in {route:?}"))
}

/// The nodes of `role` in a status.
pub(crate) fn nodes<'a>(status: &'a Value, role: &str) -> Vec<&'a Value> {
    status["nodes"].as_array().unwrap().iter().filter(|node| node["role"] == role).collect()
}

/// A key of isolation that no other request has.
fn fresh_salt() -> String {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    format!("oracle {}", CALLS.fetch_add(1, Relaxed))
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
