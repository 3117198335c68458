//! The whole suite against a server with scripted delays: the numbers must be those of the script.

#![expect(clippy::disallowed_methods, reason = "a server in the test process needs a clock and tasks")]
#![expect(clippy::unwrap_used, reason = "helpers of tests, which the lint does not recognise as tests")]

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Json, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, serve};
use bench::{InverseArrivalArgs, inverse_arrival};
use clap::Parser;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};

const SHORT: Duration = Duration::from_millis(60);
const LONG: Duration = Duration::from_millis(1_000);
const OFFSET_S: f64 = 0.3;
const TOKEN: Duration = Duration::from_millis(10);

/// What the scripted server does to others while a long prompt is prefilled.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    /// Nothing.
    Apart,
    /// Shorts and running streams wait until the prefill is over.
    Blocking,
    /// Shorts are refused.
    Refusing,
    /// As the header `x-segue-prefill` says: `local` is blocking, `auto` is apart.
    Segue,
}

struct Fake {
    manner: Manner,
    cached_tokens: u64,
    long_until: Mutex<Option<Instant>>,
}

type Sender = mpsc::UnboundedSender<Result<Bytes, Infallible>>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocking_server_has_h_one_and_freezes_the_running_stream() {
    let summary = measure(Manner::Blocking, 0, &["--stream-peer"]).await.unwrap();
    let arm = &summary["arms"]["plain"];
    assert_eq!(arm["valid"], 2);
    between(&arm["short_ttft_idle_s"]["median"], 0.06, 0.12);
    between(&arm["short_ttft_behind_s"]["median"], 0.74, 0.95);
    between(&arm["h"]["median"], 0.92, 1.15);
    between(&arm["slowdown"]["median"], 6.0, 13.0);
    between(&arm["long_ttft_last_s"]["median"], 1.0, 1.2);
    between(&arm["long_ttft_alone_s"]["median"], 1.0, 1.2);
    between(&arm["peer_worst_gap_s"]["median"], 0.95, 1.2);
    between(&arm["peer_worst_gap_control_s"]["median"], 0.01, 0.2);
    between(&arm["peer_median_gap_s"]["median"], 0.005, 1.2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mesh_is_recognised_and_its_two_arms_are_told_apart() {
    let summary = measure(Manner::Segue, 0, &["--longs", "2"]).await.unwrap();
    let (auto, local) = (&summary["arms"]["auto"], &summary["arms"]["local"]);
    between(&auto["slowdown"]["median"], 0.5, 2.0);
    between(&auto["h"]["median"], -0.1, 0.1);
    between(&local["h"]["median"], 0.92, 1.15);
    assert_eq!(auto["long_routes"], json!({ "remote": 4 }));
    assert_eq!(local["long_routes"], json!({ "local": 4 }));
    assert_eq!(auto["peer_worst_gap_s"], Value::Null);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_has_the_length_that_was_asked_for() {
    let summary = measure(Manner::Apart, 0, &["--long-tokens", "2000"]).await.unwrap();
    between(&summary["arms"]["plain"]["long_prompt_tokens"]["median"], 1_990.0, 2_010.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_outcomes_in_the_files_and_no_panic() {
    let directory = tempfile::tempdir().unwrap();
    let error = run(Manner::Refusing, 0, &[], directory.path()).await.unwrap_err();
    assert_eq!(error.to_string(), "arm plain: no repetition is valid");
    let summary = summary_of(directory.path());
    assert_eq!(summary["arms"]["plain"]["invalid"][0], "short behind long refused with 503: queue full");
    let raw = rows_of(directory.path());
    let refused = raw.iter().find(|row| row["kind"] == "short_behind").unwrap();
    assert_eq!(refused["outcome"], "refused with 503: queue full");
    assert_eq!(refused["ttft_s"], Value::Null);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_long_prompt_is_not_taken_for_a_cold_one() {
    let directory = tempfile::tempdir().unwrap();
    run(Manner::Apart, 256, &[], directory.path()).await.unwrap_err();
    let invalid = summary_of(directory.path())["arms"]["plain"]["invalid"][0].as_str().unwrap().to_owned();
    assert!(invalid.starts_with("256 of "), "{invalid}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offset_beyond_the_long_prompt_asks_for_a_longer_one() {
    let directory = tempfile::tempdir().unwrap();
    run(Manner::Apart, 0, &["--offset", "1.5"], directory.path()).await.unwrap_err();
    let invalid = summary_of(directory.path())["arms"]["plain"]["invalid"][0].as_str().unwrap().to_owned();
    assert!(invalid.starts_with("long finished before offset"), "{invalid}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evidence_is_complete_and_is_never_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--note", "commit=abc", "--api-key", "s3cret", "--stream-peer"];
    run(Manner::Apart, 0, &flags, directory.path()).await.unwrap();
    let kinds: Vec<String> =
        rows_of(directory.path()).iter().map(|row| row["kind"].as_str().unwrap().to_owned()).collect();
    let count = |kind: &str| kinds.iter().filter(|name| *name == kind).count();
    for (kind, expected) in [
        ("calibration", 2),
        ("long_alone", 1),
        ("short_idle", 6),
        ("long", 2),
        ("short_behind", 2),
        ("peer", 2),
        ("peer_control", 2),
        ("short_control", 2),
    ] {
        assert_eq!(count(kind), expected, "{kind}");
    }
    let readme = std::fs::read_to_string(directory.path().join("README.md")).unwrap();
    assert!(readme.contains("- commit: abc") && readme.contains("slowdown"), "{readme}");
    for file in ["README.md", "summary.json", "raw.jsonl"] {
        assert!(!std::fs::read_to_string(directory.path().join(file)).unwrap().contains("s3cret"), "{file}");
    }
    let error = run(Manner::Apart, 0, &[], directory.path()).await.unwrap_err();
    assert!(error.to_string().contains("already holds a measurement"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_options_are_named() {
    for (flags, expected) in [
        (vec!["--reps", "0"], "--reps 0: must be at least 1"),
        (vec!["--longs", "0"], "--longs 0: must be at least 1"),
        (vec!["--offset=-1"], "--offset -1: must be 0 to 3600 seconds"),
        (vec!["--extra-body", "[]"], "--extra-body: must be a JSON object"),
    ] {
        let words = [vec!["bench", "--url", "http://127.0.0.1:1"], flags].concat();
        let error = inverse_arrival(Options::parse_from(words).args).await.unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[tokio::test]
async fn no_server_is_an_error_that_names_the_address() {
    let words = ["bench", "--url", "http://127.0.0.1:1/v1", "--timeout-s", "5"];
    let error = inverse_arrival(Options::parse_from(words).args).await.unwrap_err();
    assert!(error.to_string().contains("no answer from http://127.0.0.1:1/v1/models"), "{error:#}");
}

#[derive(Parser)]
struct Options {
    #[command(flatten)]
    args: InverseArrivalArgs,
}

async fn measure(manner: Manner, cached_tokens: u64, flags: &[&str]) -> anyhow::Result<Value> {
    let directory = tempfile::tempdir()?;
    run(manner, cached_tokens, flags, directory.path()).await?;
    Ok(summary_of(directory.path()))
}

async fn run(manner: Manner, cached_tokens: u64, flags: &[&str], directory: &Path) -> anyhow::Result<()> {
    let url = start(Fake { manner, cached_tokens, long_until: Mutex::new(None) }).await;
    let offset = OFFSET_S.to_string();
    let directory = directory.to_str().unwrap();
    let mut words = vec!["bench", "--url", &url, "--reps", "2", "--out", directory];
    if !flags.contains(&"--offset") {
        words.extend(["--offset", &offset]);
    }
    words.extend(flags);
    inverse_arrival(Options::parse_from(words).args).await
}

fn summary_of(directory: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(directory.join("summary.json")).unwrap()).unwrap()
}

fn rows_of(directory: &Path) -> Vec<Value> {
    let raw = std::fs::read_to_string(directory.join("raw.jsonl")).unwrap();
    raw.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn between(value: &Value, low: f64, high: f64) {
    let number = value.as_f64().unwrap_or(f64::NAN);
    assert!((low..=high).contains(&number), "{number} is not in {low}..={high}");
}

async fn start(fake: Fake) -> String {
    let mesh = fake.manner == Manner::Segue;
    let mut app = Router::new()
        .route("/v1/models", get(|| async { Json(json!({ "data": [{ "id": "fake" }] })) }))
        .route("/v1/chat/completions", post(chat));
    if mesh {
        app = app.route("/mesh/status", get(|| async { Json(json!({ "nodes": [] })) }));
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { serve(listener, app.with_state(Arc::new(fake))).await });
    format!("http://{address}")
}

async fn chat(State(fake): State<Arc<Fake>>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    let prompt = body["messages"][0]["content"].as_str().unwrap().to_owned();
    let words = prompt.split_whitespace().count() as u64;
    let long = prompt.contains("Read these notes");
    let blocking = match fake.manner {
        Manner::Blocking => true,
        Manner::Segue => headers["x-segue-prefill"] == "local",
        Manner::Apart | Manner::Refusing => false,
    };
    if fake.manner == Manner::Refusing && !long && fake.busy_until().is_some() {
        let error = json!({ "error": { "message": "queue full", "type": "server_error" } });
        return (StatusCode::SERVICE_UNAVAILABLE, Json(error)).into_response();
    }
    let usage = json!({ "choices": [], "usage": { "prompt_tokens": words + 20, "completion_tokens": 1,
        "prompt_tokens_details": { "cached_tokens": if long { fake.cached_tokens } else { 0 } } } });
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        event(&sender, &json!({ "choices": [{ "delta": { "role": "assistant", "content": "" } }] }));
        if long {
            fake.prefill(words).await;
        } else {
            fake.wait(blocking).await;
            sleep(SHORT).await;
        }
        let tokens = if prompt.contains("Count from 1") { body["max_tokens"].as_u64().unwrap() } else { 1 };
        for _ in 0..tokens {
            if !event(&sender, &json!({ "choices": [{ "delta": { "content": "x" } }] })) {
                return;
            }
            sleep(TOKEN).await;
            fake.wait(blocking && !long).await;
        }
        event(&sender, &json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] }));
        event(&sender, &usage);
        let _ = sender.send(Ok(Bytes::from_static(b"data: [DONE]\n\n")));
    });
    let route = if blocking { "local; rule=override" } else { "remote; rule=long" };
    let body = futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|piece| (piece, receiver))
    });
    ([("content-type", "text/event-stream"), ("x-segue-route", route)], Body::from_stream(body))
        .into_response()
}

impl Fake {
    fn busy_until(&self) -> Option<Instant> {
        self.long_until.lock().unwrap().filter(|&until| until > Instant::now())
    }

    async fn prefill(&self, words: u64) {
        // The prompts of the calibration are not held up: they are not what is being measured.
        if words > 1_000 {
            let until = Instant::now() + LONG;
            *self.long_until.lock().unwrap() = Some(until);
            sleep_until(until.into()).await;
        }
    }

    async fn wait(&self, blocking: bool) {
        while let Some(until) = self.busy_until().filter(|_| blocking) {
            sleep_until(until.into()).await;
        }
    }
}

fn event(sender: &Sender, value: &Value) -> bool {
    sender.send(Ok(Bytes::from(format!("data: {value}\n\n")))).is_ok()
}
