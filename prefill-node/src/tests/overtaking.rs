use kv_transfer::{HandoffMessage, PrefillRequest};

use super::decode_side::{BLOCK, CHUNK, Mesh, config, prompt, slow};
use crate::PrefillConfig;
use crate::scheduler::UNSENT_CHUNKS_FREE;

#[tokio::test(flavor = "multi_thread")]
async fn a_short_prompt_overtakes_a_long_one_at_a_chunk_boundary() {
    let mesh = Mesh::start(PrefillConfig { max_resident: 2, ..config() }, slow()).await;
    let mut long = mesh.open(mesh.request(&prompt(1, 4001))).await;
    long.computed(64).await;
    mesh.run(mesh.request(&prompt(2, 101))).await;
    let status = mesh.status();
    assert!(status.queue_tokens > 2000, "the long prompt is not done: {status:?}");
    mesh.until("the short one ended", |status| status.handoffs_active == 1).await;
    long.leave();
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_that_take_turns_both_arrive_whole() {
    let mesh = Mesh::start(PrefillConfig { max_resident: 2, ..config() }, slow()).await;
    let long = mesh.request(&prompt(1, 2001));
    let run_long = mesh.run(long);
    let run_shorts = async {
        for salt in 2..8 {
            mesh.run(mesh.request(&prompt(salt, 150 + salt as usize))).await;
        }
    };
    tokio::join!(run_long, run_shorts);
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_without_credit_holds_up_nobody_else_and_bounded_memory() {
    let mesh = Mesh::start(PrefillConfig { max_resident: 2, ..config() }, slow()).await;
    let request = mesh.request(&prompt(1, 2001));
    let slow = mesh.open(PrefillRequest { credit_bytes: 0, ..request }).await;
    let chunks_bytes = (UNSENT_CHUNKS_FREE * CHUNK * 8 * 32) as u64;
    mesh.until("all chunks staged", |status| status.staged_bytes == chunks_bytes).await;
    mesh.run(mesh.request(&prompt(2, 701))).await;
    let status = mesh.status();
    assert_eq!(status.staged_bytes, chunks_bytes);
    assert_eq!(status.prefill_tokens_total, 700 + (UNSENT_CHUNKS_FREE * CHUNK) as u64);
    slow.leave();
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_takes_nothing_costs_memory_and_nobody_their_turn() {
    let mesh = Mesh::start(PrefillConfig { staging_bytes: 1 << 30, ..config() }, slow()).await;
    let request = mesh.request(&prompt(1, 2001));
    let stuck = mesh.open(PrefillRequest { credit_bytes: 0, ..request }).await;
    let all_bytes = 2000 * 8 * 32;
    mesh.until("all staged", |status| status.staged_bytes == all_bytes && status.slots_used == 0).await;
    mesh.run(mesh.request(&prompt(2, 701))).await;
    mesh.until("the other one ended", |status| status.handoffs_active == 1).await;
    assert_eq!(mesh.status().staged_bytes, all_bytes);
    stuck.leave();
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credit_sets_a_waiting_prompt_going_again() {
    let mesh = Mesh::start(config(), slow()).await;
    let request = mesh.request(&prompt(1, 601));
    let block_bytes = (BLOCK * 8 * 32) as u64;
    let mut client = mesh.open(PrefillRequest { credit_bytes: 0, ..request }).await;
    mesh.until("waiting", |status| status.staged_bytes == 16 * block_bytes).await;
    client.to_node.send(&HandoffMessage::Credit { bytes: 1 << 30 }).await.unwrap();
    loop {
        if let HandoffMessage::Complete { block_count, token_count, .. } = client.message().await {
            assert_eq!((block_count, token_count), (38, 600));
            break;
        }
    }
    client.to_node.send(&HandoffMessage::Installed).await.unwrap();
    mesh.until("completed", |status| status.handoffs_completed_total == 1).await;
    mesh.idle().await;
}
