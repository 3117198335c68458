//! Nodes that fail, clients that leave, routers that stop.

use std::time::Duration;

use kv_transfer::{FailureKind, FinishReason, Generate, Shutdown, Status};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::client::{begin, read_until};
use super::mesh::{answer, config, eventually};
use super::*;
use crate::error::RouterError;
use crate::shell::Router;

fn prompt(stream: bool) -> Value {
    json!({"prompt": "hi", "stream": stream})
}

/// Two decode nodes; the one that is asked first does `first`, the other `then`.
async fn two_nodes(first: Vec<Act>, then: fn(&Generate) -> Vec<Act>) -> (Mesh, [mesh::Node; 2]) {
    let mesh = Mesh::start().await;
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let script = move |generate: &Generate| match asked.swap(true, std::sync::atomic::Ordering::SeqCst) {
        false => first.clone(),
        true => then(generate),
    };
    let script = std::sync::Arc::new(script);
    let other = script.clone();
    let nodes = [
        mesh.decode("d0", move |generate| script(generate)).await,
        mesh.decode("d1", move |generate| other(generate)).await,
    ];
    (mesh, nodes)
}

#[tokio::test]
async fn a_node_that_fails_before_the_first_token_is_replaced_unseen() {
    let ways = [
        vec![Act::Die],
        vec![started(0), Act::Reset],
        vec![Act::Sleep(300), Act::Die],
        vec![failed(FailureKind::Busy)],
        vec![failed(FailureKind::Draining)],
        vec![failed(FailureKind::Internal)],
        vec![],
    ];
    for first in ways {
        for stream in [false, true] {
            let (mesh, nodes) = two_nodes(first.clone(), |_| answer("fine")).await;
            let reply = post(mesh.http, "/v1/completions", &prompt(stream)).await;
            assert_eq!(reply.status, 200, "{first:?}: {reply:?}");
            let text = match stream {
                true => reply.streamed_text(0),
                false => reply.json()["choices"][0]["text"].as_str().unwrap().to_owned(),
            };
            assert_eq!(text, "fine");
            let requests: Vec<_> = nodes.iter().flat_map(mesh::Node::requests).collect();
            assert!(requests.len() == 2 && requests[0].tokens == requests[1].tokens);
        }
    }
}

#[tokio::test]
async fn a_node_that_dies_in_mid_answer_is_replaced_and_the_text_goes_on() {
    // A closed connection takes unsent bytes with it.
    let first = [vec![started(0)], say("one "), vec![Act::Sleep(200), Act::Die]].concat();
    let then = |generate: &Generate| {
        assert!(generate.tokens.ends_with(b"one ".map(u32::from).as_slice()));
        assert_eq!(generate.max_tokens, 6);
        answer("two")
    };
    let (mesh, _nodes) = two_nodes(first, then).await;
    let body = json!({
        "prompt": "hi", "max_tokens": 10, "stream": true, "stream_options": {"include_usage": true},
    });
    let reply = post(mesh.http, "/v1/completions", &body).await;
    assert_eq!(reply.streamed_text(0), "one two");
    assert_eq!(reply.finish_reasons(), ["stop"]);
    let usage = reply.chunks().last().unwrap()["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(3), &json!(7)));
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "the answer comes while the test tells the status")]
async fn an_engine_that_stands_still_is_left_although_its_node_goes_on_talking() {
    let first = [vec![started(0)], say("one "), vec![Act::Hang]].concat();
    let (mesh, nodes) = two_nodes(first, |_| answer("two")).await;
    let reply = tokio::spawn({
        let http = mesh.http;
        async move { post(http, "/v1/completions", &prompt(true)).await }
    });
    // Fresh status all the time, and no step.
    let busy = |sequence, node: &mesh::Node| {
        let at_work = usize::from(!node.requests().is_empty());
        let status = Status { sequence, slots_used: at_work as u32, steps_total: 7, ..Status::default() };
        Mesh::set_status(node, status);
    };
    for sequence in 1..=50 {
        if reply.is_finished() {
            break;
        }
        nodes.iter().for_each(|node| busy(sequence, node));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let reply = timeout(Duration::from_secs(1), reply).await.expect("it did not wait for ever").unwrap();
    assert_eq!(reply.streamed_text(0), "one two");
    assert_eq!(reply.finish_reasons(), ["stop"]);
    assert_eq!(nodes.iter().map(mesh::Node::resets).sum::<usize>(), 1, "the frozen node is told");
}

#[tokio::test]
async fn without_another_node_a_broken_stream_ends_with_an_error_and_no_finish() {
    let acts = [vec![started(0)], say("one "), vec![failed(FailureKind::Internal)]].concat();
    let (mesh, _node) = Mesh::of_one(acts).await;
    let stream = post(mesh.http, "/v1/completions", &prompt(true)).await;
    assert_eq!((stream.status, stream.streamed_text(0)), (200, "one ".into()));
    let last = stream.chunks().pop().unwrap();
    assert_eq!(
        (&last["error"]["type"], &last["error"]["code"]),
        (&json!("server_error"), &json!("internal_error"))
    );
    assert!(stream.finish_reasons().is_empty() && !stream.events().contains(&"[DONE]"));
    assert_eq!(post(mesh.http, "/v1/completions", &prompt(false)).await.status, 500);
}

#[tokio::test]
async fn refusals_have_their_own_status_for_streams_too() {
    let cases = [
        (FailureKind::Invalid, 400, ""),
        (FailureKind::Busy, 503, "busy"),
        (FailureKind::PrefillUnavailable, 503, "prefill_unavailable"),
        (FailureKind::Draining, 503, "draining"),
        (FailureKind::Internal, 500, "internal_error"),
    ];
    for (kind, status, code) in cases {
        let (mesh, _node) = Mesh::of_one(vec![Act::Sleep(20), failed(kind)]).await;
        for stream in [false, true] {
            let reply = post(mesh.http, "/v1/completions", &prompt(stream)).await;
            assert_eq!((reply.status, reply.error_code().as_str()), (status, code));
            assert_eq!(reply.header("content-type"), Some("application/json"));
            assert_eq!(reply.header("retry-after").is_some(), status == 503);
        }
    }
}

#[tokio::test]
async fn without_nodes_requests_are_refused_at_once() {
    let mesh = Mesh::start().await;
    for stream in [false, true] {
        let reply = post(mesh.http, "/v1/completions", &prompt(stream)).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (503, "no_decode_node"));
        assert!(reply.header("retry-after").is_some());
    }
}

#[tokio::test]
async fn a_policy_that_refuses_fallback_says_so_and_is_followed_when_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.toml");
    std::fs::write(&path, "mode = \"always-remote\"\nfallback = \"refuse\"\n").unwrap();
    let mesh = Mesh::with(crate::RouterConfig { policy: Some(path.clone()), ..config() }).await;
    let _node = mesh.decode("d0", |_| answer("x")).await;
    let reply = post(mesh.http, "/v1/completions", &prompt(true)).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (503, "prefill_unavailable"));
    std::fs::write(&path, "mode = \"nonsense\"\n").unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(post(mesh.http, "/v1/completions", &prompt(true)).await.status, 503);
    std::fs::write(&path, "mode = \"always-local\"\n").unwrap();
    eventually(async || {
        let reply = post(mesh.http, "/v1/completions", &prompt(true)).await;
        reply.header("x-segue-route").is_some_and(|route| route.contains("rule=always-local"))
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_resets_the_stream_to_the_node_at_once() {
    let streaming = [vec![started(0)], say("go"), vec![Act::Hang]].concat();
    for (acts, stream) in [(streaming, true), (vec![Act::Hang], true), (vec![Act::Hang], false)] {
        let (mesh, node) = Mesh::of_one(acts.clone()).await;
        let body = prompt(stream).to_string();
        let mut connection = begin(mesh.http, "POST", "/v1/completions", &[], body.as_bytes()).await;
        if acts.len() > 1 {
            read_until(&mut connection, "\"text\":\"o\"").await;
        }
        eventually(async || node.requests().len() == 1).await;
        assert_eq!(mesh.status().await["requests_in_flight"], 1);
        drop(connection);
        timeout(Duration::from_secs(1), eventually(async || node.resets() == 1))
            .await
            .expect("within a second");
        eventually(async || mesh.status().await["requests_in_flight"] == 0).await;
        let page = get(mesh.http, "/metrics").await.body;
        assert!(page.contains("segue_router_ended_total{outcome=\"cancelled\"} 1"), "{page}");
    }
}

#[tokio::test]
async fn the_head_of_a_stream_does_not_wait_for_a_long_prefill() {
    let acts = [vec![Act::Sleep(3_000)], answer("late")].concat();
    let (mesh, _node) = Mesh::of_one(acts).await;
    let body = prompt(true).to_string();
    let mut connection = begin(mesh.http, "POST", "/v1/completions", &[], body.as_bytes()).await;
    let head = read_until(&mut connection, "\r\n\r\n");
    assert!(timeout(Duration::from_secs(1), head).await.unwrap().starts_with("HTTP/1.1 200"));
    read_until(&mut connection, "[DONE]").await;
}

#[tokio::test]
async fn a_draining_router_finishes_what_runs_and_takes_nothing_new() {
    let acts =
        [vec![started(0)], say("a"), vec![Act::Sleep(700)], say("b"), vec![finished(FinishReason::Stop)]];
    let (mesh, _node) = Mesh::of_one(acts.concat()).await;
    let body = prompt(true).to_string();
    let mut running = begin(mesh.http, "POST", "/v1/completions", &[], body.as_bytes()).await;
    read_until(&mut running, "\"text\":\"a\"").await;
    mesh.shutdown.send(Shutdown::Draining).unwrap();
    assert_eq!(get(mesh.http, "/health/ready").await.status, 503);
    let refused = post(mesh.http, "/v1/completions", &prompt(true)).await;
    assert_eq!((refused.status, refused.error_code().as_str()), (503, "draining"));
    assert!(read_until(&mut running, "[DONE]").await.contains("\"text\":\"b\""));
    timeout(Duration::from_secs(3), mesh.served).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_second_signal_stops_at_once() {
    let (mesh, _node) = Mesh::of_one(vec![started(0), Act::Hang]).await;
    let body = prompt(true).to_string();
    let _running = begin(mesh.http, "POST", "/v1/completions", &[], body.as_bytes()).await;
    eventually(async || mesh.status().await["requests_in_flight"] == 1).await;
    mesh.shutdown.send(Shutdown::Draining).unwrap();
    mesh.shutdown.send(Shutdown::Now).unwrap();
    timeout(Duration::from_secs(3), mesh.served).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_busy_port_is_named() {
    let mesh = Mesh::start().await;
    let (_shutdown, watched) = tokio::sync::watch::channel(Shutdown::Running);
    let credentials = kv_transfer::MeshAuthority::generate().issue("router", kv_transfer::Role::Router);
    let model = crate::ModelIdentity {
        name: "x".into(),
        alias: "x".into(),
        fingerprint: kv_block::Fingerprint([0; 32]),
        context_tokens_max: 10,
    };
    let config = crate::RouterConfig { listen: mesh.http, ..config() };
    let vocabulary = std::sync::Arc::new(engine::fake::FakeVocabulary);
    let error = Router::bind(&config, vocabulary, model, &credentials, watched).await.err().unwrap();
    assert!(matches!(error, RouterError::Bind { .. }));
    let port = format!("(port {})", mesh.http.port());
    assert!(
        error.to_string().contains(&mesh.http.to_string()) && error.to_string().contains(&port),
        "{error}"
    );
}

#[tokio::test]
async fn a_node_with_another_model_is_refused_and_the_rest_goes_on() {
    let mesh = Mesh::start().await;
    let _good = mesh.decode("d0", |_| answer("x")).await;
    let reason = mesh.join_with_fingerprint("d1", [9; 32]).await;
    assert!(reason.contains("0909090909090909") && reason.contains("model fingerprint"), "{reason}");
    assert_eq!(mesh.status().await["nodes"].as_array().unwrap().len(), 1);
    assert_eq!(post(mesh.http, "/v1/completions", &prompt(false)).await.status, 200);
}
