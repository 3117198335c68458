//! What answers look like.

use kv_transfer::{FinishReason, Status};
use serde_json::json;

use super::mesh::{answer, eventually};
use super::*;
use crate::http::tests::client::send;

fn chat(extra: serde_json::Value) -> serde_json::Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_is_answered_whole_and_streamed_with_the_same_text_and_usage() {
    let acts = [vec![started(3)], say("Hé🦀!"), vec![finished(FinishReason::Stop)]].concat();
    let (mesh, node) = Mesh::of_one(acts).await;
    let whole = post(mesh.http, "/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!((whole.status, whole.header("content-type")), (200, Some("application/json")));
    let body = whole.json();
    assert_eq!(body["choices"][0]["message"], json!({"role": "assistant", "content": "Hé🦀!"}));
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["model"], "tiny");

    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let stream = post(mesh.http, "/v1/chat/completions", &chat(options)).await;
    assert_eq!((stream.status, stream.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!(stream.streamed_text(0), "Hé🦀!");
    let deltas: Vec<_> = stream.chunks().iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    assert_eq!(deltas[0], json!({"role": "assistant", "content": ""}));
    // A token is a byte here; those that complete no character give an empty text.
    for (delta, text) in deltas[1..9].iter().zip(["H", "", "é", "", "", "", "🦀", "!"]) {
        assert_eq!(*delta, json!({ "content": text }));
    }
    assert_eq!(stream.finish_reasons(), ["stop"]);
    assert_eq!(stream.events().iter().filter(|event| **event == "[DONE]").count(), 1);
    assert_eq!(stream.events().last(), Some(&"[DONE]"));
    let usage = stream.chunks().last().unwrap().clone();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &body["usage"]));
    // <s> <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n, a token per byte but for the control tokens.
    assert_eq!(body["usage"]["prompt_tokens"], 1 + 1 + 7 + 1 + 1 + 1 + 10);
    assert_eq!(body["usage"]["completion_tokens"], "Hé🦀!".len());
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    let ids: std::collections::HashSet<_> =
        stream.chunks().iter().map(|chunk| chunk["id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(node.requests()[0].tokens, node.requests()[1].tokens);
    assert_eq!(node.resets(), 0);
}

#[tokio::test]
async fn usage_is_streamed_only_when_asked_for() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    for options in
        [json!({}), json!({"stream_options": null}), json!({"stream_options": {"include_usage": false}})]
    {
        let mut body = chat(json!({"stream": true}));
        body.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        let stream = post(mesh.http, "/v1/chat/completions", &body).await;
        assert!(stream.chunks().iter().all(|chunk| chunk.get("usage").is_none()));
    }
}

#[tokio::test]
async fn a_completion_has_its_own_shape_and_every_prompt_form_works() {
    let (mesh, node) = Mesh::of_one(answer("ok")).await;
    for prompt in [json!("hi"), json!(["hi"]), json!([256, 104, 105]), json!([[256, 104, 105]])] {
        let whole = post(mesh.http, "/v1/completions", &json!({"prompt": prompt})).await;
        let expected = json!([{"index": 0, "text": "ok", "logprobs": null, "finish_reason": "stop"}]);
        assert_eq!(whole.json()["choices"], expected);
        let stream = post(mesh.http, "/v1/completions", &json!({"prompt": prompt, "stream": true})).await;
        assert_eq!(stream.streamed_text(0), "ok");
        assert_eq!(stream.finish_reasons(), ["stop"]);
    }
    assert!(node.requests().iter().all(|request| request.tokens == [256, 104, 105]));
}

#[tokio::test]
async fn several_prompts_and_choices_come_in_order_and_the_prompt_counts_once() {
    let mesh = Mesh::start().await;
    let node = mesh
        .decode("d0", |generate| answer(&char::from(*generate.tokens.last().unwrap() as u8).to_string()))
        .await;
    let body = json!({"prompt": ["xa", "yb"], "n": 2, "seed": 5});
    let whole = post(mesh.http, "/v1/completions", &body).await.json();
    let texts: Vec<_> = whole["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["a", "a", "b", "b"]);
    assert_eq!(
        (&whole["usage"]["prompt_tokens"], &whole["usage"]["completion_tokens"]),
        (&json!(6), &json!(4))
    );
    let mut seeds: Vec<_> = node.requests().iter().map(|request| request.sampling.seed).collect();
    seeds.sort();
    assert_eq!(seeds, [5, 6, 7, 8]);

    let mut body = body;
    body["stream"] = true.into();
    let stream = post(mesh.http, "/v1/completions", &body).await;
    let texts: Vec<_> = (0..4).map(|index| stream.streamed_text(index)).collect();
    assert_eq!(texts, ["a", "a", "b", "b"]);
    assert_eq!(stream.finish_reasons().len(), 4);
}

#[tokio::test]
async fn a_stop_string_over_several_tokens_never_leaks_and_ends_the_work() {
    let acts = [vec![started(0)], say("alpha beta gamma"), vec![Act::Hang]].concat();
    let (mesh, node) = Mesh::of_one(acts).await;
    let whole = post(mesh.http, "/v1/chat/completions", &chat(json!({"stop": "beta gam"}))).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "alpha ");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["usage"]["completion_tokens"], "alpha beta gam".len());
    let body = chat(json!({"stop": ["zzz", "beta gam"], "stream": true}));
    let stream = post(mesh.http, "/v1/chat/completions", &body).await;
    assert_eq!(stream.streamed_text(0), "alpha ");
    assert_eq!(stream.finish_reasons(), ["stop"]);
    eventually(async || node.resets() == 2).await;
}

#[tokio::test]
async fn text_held_back_as_a_possible_stop_is_sent_at_the_end() {
    let (mesh, _node) = Mesh::of_one(answer("one\nUs")).await;
    let body = chat(json!({"stop": "\nUser:", "stream": true}));
    let stream = post(mesh.http, "/v1/chat/completions", &body).await;
    assert_eq!(stream.streamed_text(0), "one\nUs");
}

#[tokio::test]
async fn a_character_cut_by_the_length_limit_is_replaced_once() {
    let mut acts = [vec![started(0)], say("a🦀")].concat();
    acts.pop();
    acts.push(finished(FinishReason::Length));
    let (mesh, _node) = Mesh::of_one(acts).await;
    let whole = post(mesh.http, "/v1/chat/completions", &chat(json!({}))).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], "a\u{FFFD}");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    let stream = post(mesh.http, "/v1/chat/completions", &chat(json!({"stream": true}))).await;
    assert_eq!(stream.streamed_text(0), "a\u{FFFD}");
    assert_eq!(stream.finish_reasons(), ["length"]);
}

#[tokio::test]
async fn the_route_and_the_request_id_are_reported() {
    let mesh = Mesh::start().await;
    let decode = mesh.decode("d0", |_| answer("x")).await;
    let _prefill = mesh.prefill("p0").await;
    let long = "x".repeat(600);
    let short = chat(json!({}));
    let long = json!({"prompt": long});
    let cases = [
        (
            "/v1/chat/completions",
            &short,
            "",
            "local; rule=short; decode=d0; prefill=-; prompt=22; uncached=22",
        ),
        ("/v1/completions", &long, "", "remote; rule=long; decode=d0; prefill=p0; prompt=601; uncached=601"),
        ("/v1/completions", &long, "local", "local; rule=override-local; decode=d0; prefill=-; prompt=601; "),
        ("/v1/chat/completions", &short, "remote", "remote; rule=override-remote; decode=d0; prefill=p0; "),
    ];
    for (path, body, arm, expected) in cases {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let headers = [("x-segue-prefill", arm), ("x-request-id", "r-1")];
            let reply = send(mesh.http, "POST", path, &headers, body.to_string().as_bytes()).await;
            let route = reply.header("x-segue-route").unwrap();
            assert!(route.starts_with(expected) && route.ends_with("; request=r-1"), "{route}");
            assert_eq!(reply.header("x-request-id"), Some("r-1"));
            let generate = decode.requests().pop().unwrap();
            let names: Vec<_> = generate.prefill.iter().map(|prefill| prefill.name.as_str()).collect();
            assert_eq!(names, if expected.starts_with("remote") { vec!["p0"] } else { vec![] });
            assert!(generate.fallback_local);
        }
    }
}

#[tokio::test]
async fn what_is_warm_on_the_node_does_not_count_as_prompt() {
    let mesh = Mesh::start().await;
    let decode = mesh.decode("d0", |_| answer("x")).await;
    let _prefill = mesh.prefill("p0").await;
    let long = "y".repeat(1000);
    decode.state.send_modify(|state| state.warm[3] = mesh.warm_hashes(&long));
    eventually(async || {
        let reply = post(mesh.http, "/v1/completions", &json!({"prompt": long})).await;
        let route = reply.header("x-segue-route").unwrap().to_owned();
        route.starts_with("local; rule=short; decode=d0; prefill=-; prompt=1001; uncached=41;")
    })
    .await;
    let salted = json!({"prompt": long, "cache_salt": "mine"});
    let reply = post(mesh.http, "/v1/completions", &salted).await;
    assert!(reply.header("x-segue-route").unwrap().contains("uncached=1001"));
}

#[tokio::test]
async fn without_max_tokens_the_answer_may_fill_the_context() {
    let (mesh, node) = Mesh::of_one(answer("x")).await;
    post(mesh.http, "/v1/completions", &json!({"prompt": "hi"})).await;
    post(mesh.http, "/v1/completions", &json!({"prompt": "hi", "max_tokens": 7})).await;
    let limits: Vec<_> = node.requests().iter().map(|request| request.max_tokens).collect();
    assert_eq!(limits, [mesh::CONTEXT_TOKENS - 3, 7]);
}

#[tokio::test]
async fn sampling_reaches_the_node_as_asked() {
    let (mesh, node) = Mesh::of_one(answer("x")).await;
    let body = json!({
        "prompt": "hi", "temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125, "seed": 9, "ignore_eos": true,
    });
    post(mesh.http, "/v1/completions", &body).await;
    post(mesh.http, "/v1/completions", &json!({"prompt": "hi"})).await;
    let [first, second] = &node.requests()[..] else { panic!() };
    let sampling = &first.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.5, 0.25, 4, 0.125));
    assert!(first.ignore_end && sampling.seed == 9);
    assert_eq!((second.sampling.temperature, second.sampling.top_p, second.ignore_end), (1.0, 1.0, false));
}

#[tokio::test]
async fn models_are_listed_exactly_as_accepted() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let list = get(mesh.http, "/v1/models").await.json();
    let ids: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["tiny", "Tiny Model"]);
    for id in ids {
        assert_eq!(
            post(mesh.http, "/v1/completions", &json!({"prompt": "a", "model": id})).await.status,
            200
        );
    }
    assert_eq!(get(mesh.http, "/v1/models/tiny").await.json()["id"], "tiny");
    assert_eq!(get(mesh.http, "/v1/models/other").await.error_code(), "model_not_found");
}

#[tokio::test]
async fn tokens_and_text_can_be_asked_for() {
    let mesh = Mesh::start().await;
    let tokens = post(mesh.http, "/tokenize", &json!({"prompt": "hé"})).await.json();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!([256, 104, 195, 169]), &json!(4)));
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(post(mesh.http, "/tokenize", &messages).await.json()["count"], 22);
    let text = post(mesh.http, "/detokenize", &json!({"tokens": [104, 195, 169]})).await.json();
    assert_eq!(text["prompt"], "hé");
    assert_eq!(post(mesh.http, "/detokenize", &json!({"tokens": [1e6]})).await.status, 400);
}

#[tokio::test]
async fn operators_see_health_figures_and_metrics() {
    let mesh = Mesh::start().await;
    assert_eq!(get(mesh.http, "/health/live").await.status, 200);
    assert_eq!(get(mesh.http, "/health/ready").await.status, 503);
    let node = mesh.decode("d0", |_| answer("xyz")).await;
    assert_eq!(get(mesh.http, "/health/ready").await.status, 200);
    Mesh::set_status(
        &node,
        Status {
            slots_used: 2,
            staged_bytes: 10,
            handoffs_active: 1,
            handoff_tail_micros_total: 1500,
            ..Status::default()
        },
    );
    mesh.wait_for("d0", |node| node["slots_used"] == 2).await;
    let status = mesh.status().await;
    let totals = json!({"requests_in_flight": 0, "handoffs_active": 1, "staged_bytes": 10, "slots_used": 2});
    for (key, value) in totals.as_object().unwrap() {
        assert_eq!(&status[key], value, "{key}");
    }
    let expected = json!({"name": "d0", "role": "decode", "pid": 42, "healthy": true, "model": "Tiny Model"});
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&status["nodes"][0][key], value, "{key}");
    }
    post(mesh.http, "/v1/completions", &json!({"prompt": "hi"})).await;
    post(mesh.http, "/v1/completions", &json!({"prompt": "hi", "model": "other"})).await;
    let page = get(mesh.http, "/metrics").await.body;
    for line in [
        "segue_router_ttft_seconds_count 1",
        "segue_router_itl_seconds_count 2",
        "segue_router_requests_total{status=\"200\",rule=\"short\"} 1",
        "segue_router_requests_total{status=\"404\",rule=\"none\"} 1",
        "segue_router_ended_total{outcome=\"finished\"} 1",
        "segue_router_completion_tokens_total 3",
        "segue_router_requests_in_flight 0",
        "segue_decode_slots_used{node=\"d0\"} 2",
        "segue_decode_staged_bytes{node=\"d0\"} 10",
        "segue_decode_handoff_tail_seconds_total{node=\"d0\"} 0.0015",
    ] {
        assert!(page.contains(line), "{line} in {page}");
    }
}
