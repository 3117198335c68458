use std::time::Duration;

use engine::fake::FakeOptions;
use kv_block::IsolationKey;
use kv_transfer::PrefillRequest;

use super::decode_side::{Mesh, config, prompt, slow};

#[tokio::test(flavor = "multi_thread")]
async fn rows_received_are_the_rows_computed_for_any_length() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    for (salt, length) in [(1, 2), (2, 17), (3, 65), (4, 66), (5, 1000)] {
        let received = mesh.run(mesh.request(&prompt(salt, length))).await;
        let blocks = (length - 1).div_ceil(16);
        assert_eq!(received.frames, blocks * 8, "one frame per block and part");
    }
    mesh.idle().await;
    let status = mesh.status();
    assert_eq!(status.handoffs_completed_total, 5);
    assert_eq!(status.handoffs_failed_total, 0);
    assert_eq!(status.transfer_bytes_total, (1 + 16 + 64 + 65 + 999) * 8 * 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_the_decode_node_has_are_not_sent() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    let request = mesh.request(&prompt(1, 300));
    let received = mesh.run(PrefillRequest { have_blocks: 10, ..request }).await;
    assert_eq!(received.frames, (19 - 10) * 8);
    assert_eq!(mesh.status().prefill_tokens_total, 299);
}

#[tokio::test(flavor = "multi_thread")]
async fn little_credit_delivers_everything_all_the_same() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    let request = mesh.request(&prompt(1, 700));
    // Two blocks of 16 tokens, 8 parts, 32 bytes.
    mesh.run(PrefillRequest { credit_bytes: 2 * 16 * 8 * 32, ..request }).await;
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_prefix_is_sent_and_only_the_rest_computed() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    let longer = prompt(1, 500);
    assert_eq!(mesh.run(mesh.request(&longer[..301])).await.reused_tokens, 0);
    assert_eq!(mesh.status().prefill_tokens_total, 300);
    let received = mesh.run(mesh.request(&longer)).await;
    assert_eq!(received.reused_tokens, 288, "whole blocks of the 300 tokens held");
    assert_eq!(mesh.status().prefill_tokens_total, 300 + 499 - 288);
    // Another key shares nothing.
    let isolation = IsolationKey::from_salt("other").0;
    let received = mesh.run(PrefillRequest { isolation, ..mesh.request(&longer) }).await;
    assert_eq!(received.reused_tokens, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_prompt_stops_within_a_chunk_and_frees_everything() {
    let mesh = Mesh::start(config(), slow()).await;
    let tokens = prompt(1, 3000);
    let mut client = mesh.open(mesh.request(&tokens)).await;
    client.computed(128).await;
    client.leave();
    mesh.idle().await;
    let steps = mesh.status().steps_total;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(mesh.status().steps_total <= steps + 1, "computes on: {:?}", mesh.status());
    assert_eq!(mesh.status().handoffs_failed_total, 1);
    // What was computed is not lost: a retry goes on there.
    let received = mesh.run(mesh.request(&tokens)).await;
    assert!(received.reused_tokens >= 128);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_departed_while_queued_is_never_computed() {
    let mesh = Mesh::start(config(), slow()).await;
    let mut first = mesh.open(mesh.request(&prompt(1, 1501))).await;
    first.computed(64).await;
    let departed = mesh.open(mesh.request(&prompt(2, 1001))).await;
    mesh.until("both queued", |status| status.handoffs_active == 2).await;
    departed.leave();
    mesh.until("departed", |status| status.handoffs_active == 1 && status.queue_tokens <= 1500).await;
    first.computed(1500).await;
    first.leave();
    mesh.idle().await;
    assert_eq!(mesh.status().prefill_tokens_total, 1500);
}
