//! A small HTTP/1.1 client: the tests must see every byte.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A whole response.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    head: String,
    pub(super) body: String,
}

/// Far beyond what any test needs, so that a hang fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) async fn get(address: SocketAddr, path: &str) -> Reply {
    send(address, "GET", path, &[], b"").await
}

pub(super) async fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    send(address, "POST", path, &[], body.to_string().as_bytes()).await
}

pub(super) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let mut stream = begin(address, method, path, headers, body).await;
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await;
    // The server may close while a refused body is still on its way.
    let _ = read.expect("the response ends");
    parse(&bytes)
}

/// Sends a request and leaves reading to the caller.
pub(super) async fn begin(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let extra: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n{extra}\r\n"
    );
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(body).await;
    stream
}

/// Reads until `marker` has come.
pub(super) async fn read_until(stream: &mut TcpStream, marker: &str) -> String {
    let mut bytes = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&bytes).contains(marker) {
            let mut buffer = [0; 4096];
            let count = stream.read(&mut buffer).await.unwrap();
            assert!(count > 0, "closed before {marker:?}: {}", String::from_utf8_lossy(&bytes));
            bytes.extend_from_slice(&buffer[..count]);
        }
    };
    timeout(PATIENCE, read).await.expect("the marker comes");
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The data of all events, in order.
    pub(super) fn events(&self) -> Vec<&str> {
        let frames = self.body.split_terminator("\n\n");
        frames.filter_map(|frame| frame.strip_prefix("data: ")).collect()
    }

    /// The JSON of all events but `[DONE]`.
    pub(super) fn chunks(&self) -> Vec<Value> {
        let events = self.events().into_iter().filter(|event| *event != "[DONE]");
        events.map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// All text of choice `index`.
    pub(super) fn streamed_text(&self, index: usize) -> String {
        let chunks = self.chunks();
        let choices =
            chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).filter(|c| c["index"] == index);
        choices.filter_map(|c| c["delta"]["content"].as_str().or(c["text"].as_str())).collect()
    }

    /// All finish reasons, in order.
    pub(super) fn finish_reasons(&self) -> Vec<String> {
        let reason = |chunk: &Value| chunk["choices"][0]["finish_reason"].as_str().map(str::to_owned);
        self.chunks().iter().filter_map(reason).collect()
    }

    pub(super) fn error_code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(super) fn error_message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
    }
}

fn parse(bytes: &[u8]) -> Reply {
    let text = String::from_utf8(bytes.to_vec()).expect("responses are UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response head in {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunked(body) } else { body.to_owned() };
    Reply { status, head: head.to_owned(), body }
}

fn unchunked(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        body.push_str(&after[..size]);
        rest = &after[size + 2..];
    }
    body
}
