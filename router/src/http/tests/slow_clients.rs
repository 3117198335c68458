//! Clients that keep the router waiting. The limits here are eight connections
//! and one second.

use std::net::SocketAddr;
use std::time::Duration;

use kv_transfer::FinishReason;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::mesh::answer;
use super::*;

const SOON: Duration = Duration::from_secs(5);

/// Sends `bytes`, then waits for the router to end the connection.
async fn what_comes_back(http: SocketAddr, bytes: &str) -> String {
    let mut socket = TcpStream::connect(http).await.unwrap();
    socket.write_all(bytes.as_bytes()).await.unwrap();
    let mut reply = String::new();
    timeout(SOON, socket.read_to_string(&mut reply)).await.expect("the router ends it").unwrap();
    reply
}

#[tokio::test]
async fn a_head_that_never_ends_is_cut() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    for head in ["", "POST /v1/comp", "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"] {
        let reply = what_comes_back(mesh.http, head).await;
        assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 408"), "{reply}");
    }
}

#[tokio::test]
async fn a_body_that_stands_still_is_a_408_and_a_slow_one_is_read() {
    let (mesh, node) = Mesh::of_one(answer("x")).await;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 16\r\n\r\n";
    let reply = what_comes_back(mesh.http, &format!("{head}{{\"prom")).await;
    assert!(reply.starts_with("HTTP/1.1 408"), "{reply}");
    assert!(reply.contains("No byte of the request body came for 1 s"), "{reply}");
    assert!(node.requests().is_empty());

    let mut socket = TcpStream::connect(mesh.http).await.unwrap();
    socket.write_all(head.as_bytes()).await.unwrap();
    for part in ["{\"pro", "mpt\": ", "\"hi\"}"] {
        tokio::time::sleep(Duration::from_millis(600)).await;
        socket.write_all(part.as_bytes()).await.unwrap();
    }
    let mut reply = String::new();
    timeout(SOON, socket.read_to_string(&mut reply)).await.unwrap().unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
}

#[tokio::test]
async fn bodies_under_way_are_bounded_together() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let prompt = "a".repeat(90_000);
    let body = json!({"prompt": "x", "unused": prompt});
    let mut slow = TcpStream::connect(mesh.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 95000\r\n\r\n";
    slow.write_all(format!("{head}{prompt}").as_bytes()).await.unwrap();
    // Each counts with what it has beyond 65,536 bytes; 40,000 are allowed in all.
    let refused = loop {
        let reply = post(mesh.http, "/v1/completions", &body).await;
        if reply.status != 200 {
            break reply;
        }
    };
    assert_eq!(refused.status, 503);
    assert!(refused.body.contains("too many request bodies are under way"), "{}", refused.body);
    let small = post(mesh.http, "/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!(small.status, 200, "what fits is served");
    drop(slow);
    let again = loop {
        let reply = post(mesh.http, "/v1/completions", &body).await;
        if reply.status != 503 {
            break reply;
        }
    };
    assert_eq!(again.status, 200, "the memory comes back with the connection");
}

#[tokio::test]
async fn a_crowd_of_silent_connections_keeps_nobody_out_for_long() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let mut silent = Vec::new();
    for _ in 0..30 {
        silent.push(TcpStream::connect(mesh.http).await.unwrap());
    }
    // Of thirty, eight are served at a time and each for a second.
    let reply =
        timeout(Duration::from_secs(10), get(mesh.http, "/health/live")).await.expect("its turn comes");
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn clients_that_never_read_are_cut_and_make_room() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let mut deaf = Vec::new();
    for _ in 0..8 {
        let socket = TcpStream::connect(mesh.http).await.unwrap();
        // Far more answers than all buffers hold; the router stops reading too.
        let many = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(20_000);
        let _ = timeout(Duration::from_millis(200), async {
            let mut left = many.as_bytes();
            while !left.is_empty() {
                socket.writable().await.unwrap();
                left = &left[socket.try_write(left).unwrap_or(0)..];
            }
        })
        .await;
        deaf.push(socket);
    }
    let reply =
        timeout(Duration::from_secs(15), get(mesh.http, "/health/live")).await.expect("they were cut");
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn an_answer_may_take_longer_than_a_client_may_be_silent() {
    let acts =
        [vec![started(0)], say("a"), vec![Act::Sleep(2500)], say("b"), vec![finished(FinishReason::Stop)]];
    let (mesh, _node) = Mesh::of_one(acts.concat()).await;
    let reply = post(mesh.http, "/v1/completions", &json!({"prompt": "hi", "stream": true})).await;
    assert_eq!(reply.streamed_text(0), "ab");
    assert_eq!(reply.finish_reasons(), ["stop"]);
}
