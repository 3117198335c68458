//! Wrong requests get a clear answer, and nobody else notices.

use serde_json::{Value, json};

use crate::harness;

fn messages() -> Value {
    json!([{"role": "user", "content": "Hello"}])
}

#[tokio::test]
async fn wrong_requests_are_refused_by_name() {
    let (_turn, client) = harness::shared().await;
    let pids = client.pids().await;
    let too_long = "word ".repeat(9000);
    // What is sent, and what the message must name.
    let cases = [
        (json!({"messages": messages(), "max_tokens": "many"}), "max_tokens"),
        (json!({"messages": messages(), "max_tokens": -1}), "max_tokens"),
        (json!({"messages": messages(), "temperature": "hot"}), "temperature"),
        (json!({"messages": messages(), "temperature": -0.5}), "temperature"),
        (json!({"messages": messages(), "top_p": 1.5}), "top_p"),
        (json!({"messages": messages(), "min_p": -1}), "min_p"),
        (json!({"messages": messages(), "n": 0}), "n"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "Hello"}), "messages"),
        (json!({"messages": [{"role": 7, "content": "Hello"}]}), "role"),
        (json!({}), "messages"),
        (json!({"messages": [{"role": "user", "content": too_long}]}), "8192"),
    ];
    for (body, named) in cases {
        let answer = client.post("/v1/chat/completions", &body, "").await;
        assert_eq!(answer.status, 400, "{named}: {answer:?}");
        assert!(answer.error().contains(named), "{named}: {answer:?}");
    }
    let answer = client.post("/v1/completions", &json!({"prompt": ""}), "").await;
    assert_eq!(answer.status, 400, "{answer:?}");
    let answer =
        client.post("/v1/chat/completions", &json!({"model": "gpt-none", "messages": messages()}), "").await;
    assert_eq!(answer.status, 404, "{answer:?}");
    assert!(answer.error().contains("gpt-none"), "{answer:?}");
    assert_eq!(client.pids().await, pids);
    assert_eq!(client.chat("Hello", 4, "").await.status, 200);
}

#[tokio::test]
async fn bytes_that_are_not_a_request_are_refused() {
    let (_turn, client) = harness::shared().await;
    let pids = client.pids().await;
    let deep = "[".repeat(100_000);
    for body in ["", "{", "null", "[1, 2]", "\u{0}\u{1}", deep.as_str()] {
        let answer = client.post_raw("/v1/chat/completions", body.to_owned()).await;
        assert!((400..500).contains(&answer.status), "{answer:?}");
        assert!(!answer.error().is_empty());
    }
    assert_eq!(client.get("/v1/nothing").await.status, 404);
    assert_eq!(client.get("/v1/chat/completions").await.status, 405);
    assert_eq!(
        client.post("/v1/chat/completions", &json!({"messages": messages()}), "sideways").await.status,
        400
    );
    assert_eq!(client.pids().await, pids);
    assert_eq!(client.chat("Hello", 4, "").await.status, 200);
}
