//! Clients that leave: nothing goes on for them, and nobody waits for them.

use std::time::{Duration, Instant};

use crate::harness::{self, Client, eventually, long_prompt};

const SETTLE: Duration = Duration::from_secs(10);
/// The status of a node is at most this old.
const STATUS: Duration = Duration::from_millis(500);
/// Longer than anything here takes on a slow machine.
const SLOW: Duration = Duration::from_secs(60);
/// `chunk_tokens` of a prefill node.
const CHUNK: u64 = 256;

// A6
#[tokio::test]
async fn prompt_of_a_departed_client_stops_within_a_chunk() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(SETTLE).await);
    let before = client.node_sum("prefill", "prefill_tokens_total").await;
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.leave(&long_prompt(101, 5500), 8, SLOW).await }
    });
    assert!(computes_more_than(&client, before).await, "{:#}", client.status().await);
    asking.abort();
    tokio::time::sleep(STATUS).await;
    let computed = client.node_sum("prefill", "prefill_tokens_total").await;
    assert!(computed < before + 5000, "{} tokens: it was nearly done", computed - before);
    assert!(client.settles(Duration::from_secs(2)).await, "{:#}", client.status().await);
    // The chunk that was being computed ends, and no other begins.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let after = client.node_sum("prefill", "prefill_tokens_total").await;
    assert!(after <= computed + CHUNK, "{computed} tokens when the client had left, {after} later");
}

// A9
#[tokio::test]
async fn prompts_that_leave_the_queue_are_never_computed() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(SETTLE).await);
    let before = client.node_sum("prefill", "prefill_tokens_total").await;
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..10 {
        let client = client.clone();
        clients.spawn(async move {
            // The first one is the shortest and keeps the node busy.
            let words = if index == 0 { 2000 } else { 2600 };
            client.leave(&long_prompt(110 + index, words), 8, SLOW).await;
        });
    }
    assert!(computes_more_than(&client, before).await, "{:#}", client.status().await);
    clients.shutdown().await;
    let empty =
        eventually(Duration::from_secs(2), async || client.node_sum("prefill", "queue_tokens").await == 0);
    assert!(empty.await, "{:#}", client.status().await);
    tokio::time::sleep(STATUS).await;
    let computed = client.node_sum("prefill", "prefill_tokens_total").await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let after = client.node_sum("prefill", "prefill_tokens_total").await;
    assert!(after <= computed + CHUNK, "{} tokens were computed for nobody", after - computed);
}

/// Waits until prefill nodes have computed something since.
async fn computes_more_than(client: &Client, before: u64) -> bool {
    eventually(SLOW, async || client.node_sum("prefill", "prefill_tokens_total").await > before).await
}

// A10
#[tokio::test]
async fn generation_stops_when_its_client_leaves() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(SETTLE).await);
    let cancelled = cancelled(&client).await;
    let mut stream = client.open_endless("Tell a long story.", 4000).await;
    while stream.so_far().tokens < 5 {
        assert!(stream.advance().await);
    }
    drop(stream);
    stops_generating(&client).await;
    // Not streamed: the client hears nothing before the end, and leaves too.
    let patience = Duration::from_secs(1);
    let whole = client.chat("Count from 1 to 4000, one number per line.", 4000, "");
    assert!(tokio::time::timeout(patience, whole).await.is_err(), "too short an answer for this test");
    stops_generating(&client).await;
    assert_eq!(self::cancelled(&client).await, cancelled + 2.0);
}

async fn cancelled(client: &Client) -> f64 {
    client.metric("segue_router_ended_total{outcome=\"cancelled\"}").await
}

async fn stops_generating(client: &Client) {
    assert!(client.settles(Duration::from_secs(3)).await, "{:#}", client.status().await);
    tokio::time::sleep(STATUS).await;
    let generated = client.node_sum("decode", "generated_tokens_total").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(client.node_sum("decode", "generated_tokens_total").await, generated);
}

// A12, I12
#[tokio::test]
async fn health_is_answered_while_a_hundred_streams_leave_at_once() {
    let (_turn, client) = harness::shared().await;
    let mut clients = tokio::task::JoinSet::new();
    let end = Instant::now() + Duration::from_secs(3);
    for index in 0..100_u64 {
        let client = client.clone();
        clients.spawn(async move {
            let prompt = long_prompt(130 + index, 300);
            client.leave(&prompt, 400, end.saturating_duration_since(Instant::now())).await;
        });
    }
    let mut slowest = Duration::ZERO;
    while Instant::now() < end + Duration::from_secs(5) {
        let begin = Instant::now();
        assert_eq!(client.get("/health/live").await.status, 200);
        slowest = slowest.max(begin.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("slowest answer of /health/live: {slowest:?}");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
}

// A4
#[tokio::test]
async fn prompts_that_leave_while_they_wait_for_a_slot_free_their_memory() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(SETTLE).await);
    let mut streams = Vec::new();
    for index in 0..8 {
        // As many as there are slots.
        streams.push(client.open_endless(&format!("Note {index}. Tell a long story."), 4000).await);
    }
    let before = client.node_sum("prefill", "prefill_tokens_total").await;
    let mut waiting = tokio::task::JoinSet::new();
    for index in 0..3 {
        let client = client.clone();
        waiting.spawn(async move {
            client.leave(&long_prompt(240 + index, 560), 8, SLOW).await;
        });
    }
    let staged = eventually(SLOW, async || {
        let computed = client.node_sum("prefill", "prefill_tokens_total").await - before;
        let status = client.status().await;
        computed >= 3 * 560 && status["slots_used"] == 8 && status["staged_bytes"].as_u64().unwrap() > 0
    });
    assert!(staged.await, "{:#}", client.status().await);
    waiting.shutdown().await;
    let freed = eventually(Duration::from_secs(10), async || {
        let status = client.status().await;
        status["staged_bytes"] == 0 && status["handoffs_active"] == 0
    });
    assert!(freed.await, "{:#}", client.status().await);
    assert_eq!(client.status().await["slots_used"], 8, "no slot had to become free for that");
    drop(streams);
    assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
}
