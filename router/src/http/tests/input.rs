//! What clients get wrong.

use serde_json::{Value, json};

use super::client::send;
use super::mesh::{CONTEXT_TOKENS, answer};
use super::*;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn good(path: &str) -> Value {
    match path {
        CHAT => json!({"messages": [{"role": "user", "content": "hi"}]}),
        _ => json!({"prompt": "hi"}),
    }
}

#[tokio::test]
async fn every_field_with_every_wrong_type_gives_an_answer_or_a_400_that_names_it() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let fields = [
        "model",
        "messages",
        "prompt",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "n",
        "stream_options",
        "ignore_eos",
        "cache_salt",
        "tools",
        "tool_choice",
        "logprobs",
        "response_format",
        "logit_bias",
        "chat_template_kwargs",
        "user",
        "n_predict",
        "samplers",
    ];
    let values = [
        json!("text"),
        json!(1),
        json!(-1),
        json!(1.5),
        json!(true),
        json!([]),
        json!(["a"]),
        json!([1]),
        json!({}),
        json!({"a": 1}),
        json!(null),
        json!(1e300),
        json!(9_223_372_036_854_775_807_i64),
        json!([[[]]]),
    ];
    for path in [CHAT, COMPLETION] {
        for field in fields {
            for value in &values {
                let mut body = good(path);
                body[field] = value.clone();
                let reply = post(mesh.http, path, &body).await;
                match reply.status {
                    200 => {}
                    400 | 404 => {
                        let message = reply.error_message();
                        assert!(message.contains(field), "{path} {field} {value}: {message}");
                    }
                    other => panic!("{other} for {path} {field} {value}: {reply:?}"),
                }
            }
        }
    }
    assert_eq!(mesh.status().await["requests_in_flight"], 0);
}

#[tokio::test]
async fn broken_bodies_are_refused_without_an_echo() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let deep = [b"{\"a\":".repeat(10_000), b"secret".to_vec()].concat();
    let bodies: [&[u8]; 9] = [
        b"",
        b"secret",
        b"\"secret\"",
        b"{\"prompt\": \"secret\"",
        b"{\"prompt\": \"secret\xFF\xFE\"}",
        b"{\"prompt\": \"secret \\ud800\"}",
        b"\xEF\xBB\xBF{\"prompt\": \"secret\"}",
        b"{\"prompt\": 1e400, \"x\": \"secret\"}",
        &deep,
    ];
    for path in [CHAT, COMPLETION, "/tokenize", "/detokenize"] {
        for body in bodies {
            let reply = send(mesh.http, "POST", path, &[], body).await;
            assert_eq!(reply.status, 400, "{path} {}", String::from_utf8_lossy(&body[..body.len().min(40)]));
            assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
            assert!(!reply.body.contains("secret"), "{}", reply.body);
        }
    }
}

#[tokio::test]
async fn a_prompt_with_an_answer_beyond_the_context_is_refused_with_the_numbers() {
    let (mesh, node) = Mesh::of_one(answer("x")).await;
    let limit = CONTEXT_TOKENS as usize;
    let prompt = |tokens: usize, max_tokens: Option<usize>, stream: bool| json!({"prompt": vec![1; tokens], "max_tokens": max_tokens, "stream": stream});
    for stream in [false, true] {
        let cases = [
            (limit, None, vec![limit]),
            (10 * limit, None, vec![10 * limit, limit]),
            (limit - 50, Some(500), vec![limit - 50, 500, limit]),
            (3, Some(2_147_483_647), vec![3, 2_147_483_647, limit]),
        ];
        for (tokens, max_tokens, numbers) in cases {
            let reply = post(mesh.http, COMPLETION, &prompt(tokens, max_tokens, stream)).await;
            assert_eq!((reply.status, reply.error_code().as_str()), (400, "context_length_exceeded"));
            let message = reply.error_message();
            assert!(numbers.iter().all(|number| message.contains(&number.to_string())), "{message}");
        }
    }
    assert!(node.requests().is_empty());
    assert_eq!(post(mesh.http, COMPLETION, &prompt(limit - 1, None, false)).await.status, 200);
    assert_eq!(post(mesh.http, COMPLETION, &prompt(limit - 50, Some(50), false)).await.status, 200);
}

#[tokio::test]
async fn unknown_models_routes_and_methods_are_named() {
    let (mesh, node) = Mesh::of_one(answer("x")).await;
    for model in ["", "other", "TINY"] {
        let reply = post(mesh.http, COMPLETION, &json!({"prompt": "hi", "model": model})).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (404, "model_not_found"));
        assert!(reply.error_message().contains("tiny"));
    }
    assert!(node.requests().is_empty());
    let reply = get(mesh.http, "/v2/nothing").await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "not_found"));
    let reply = get(mesh.http, CHAT).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (405, "method_not_allowed"));
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_a_413_and_one_below_is_not() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let fill = |bytes: usize| {
        let empty = json!({"prompt": "hi", "user": ""}).to_string().len();
        json!({"prompt": "hi", "user": "u".repeat(bytes - empty)})
    };
    assert_eq!(post(mesh.http, COMPLETION, &fill(100_000)).await.status, 200);
    let reply = post(mesh.http, COMPLETION, &fill(100_001)).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "request_too_large"));
    assert!(reply.error_message().contains("100000"));
}

#[tokio::test]
async fn a_wrong_arm_is_refused() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let body = good(COMPLETION).to_string();
    let reply = send(mesh.http, "POST", COMPLETION, &[("x-segue-prefill", "up")], body.as_bytes()).await;
    assert_eq!(reply.status, 400);
    assert!(reply.error_message().contains("x-segue-prefill"));
}

#[tokio::test]
async fn message_orders_that_clients_send_are_answered() {
    let (mesh, _node) = Mesh::of_one(answer("x")).await;
    let orders = [
        vec!["user", "system", "user"],
        vec!["developer", "user"],
        vec!["user", "user"],
        vec!["user", "assistant"],
        vec!["tool"],
    ];
    for order in orders {
        let messages: Vec<_> = order.iter().map(|role| json!({"role": role, "content": "x"})).collect();
        assert_eq!(post(mesh.http, CHAT, &json!({ "messages": messages })).await.status, 200);
    }
    let unknown = json!({"messages": [{"role": "king", "content": "x"}]});
    assert!(post(mesh.http, CHAT, &unknown).await.error_message().contains("messages[0].role"));
}

#[tokio::test]
async fn one_request_cannot_ask_for_answers_without_bound() {
    let (mesh, node) = Mesh::of_one(answer("x")).await;
    let prompts = vec!["a"; 64];
    let refused = post(mesh.http, "/v1/completions", &json!({"prompt": prompts, "n": 3})).await;
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(message, "64 prompts with 'n' = 3 ask for 192 answers, at most 128 are allowed");
    assert!(node.requests().is_empty());
    let served = post(mesh.http, "/v1/completions", &json!({"prompt": prompts, "n": 2})).await;
    assert_eq!(served.status, 200, "{served:?}");
    assert_eq!(served.json()["choices"].as_array().unwrap().len(), 128);
}
