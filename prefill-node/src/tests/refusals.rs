use std::sync::Arc;

use engine::fake::{FakeModel, FakeOptions};
use engine::{Model, SessionConfig};
use kv_transfer::{HandoffMessage, PROTOCOL_VERSION, PrefillRequest, RefusalReason, Shutdown};

use super::decode_side::{Mesh, config, prompt, slow};
use crate::PrefillConfig;
use crate::request::{NodeFacts, Refusal};

fn facts() -> NodeFacts {
    let model = FakeModel::new(FakeOptions::default()).unwrap();
    let session = SessionConfig { slots: 1, context_tokens: 256, batch_tokens_max: 64, threads: 1 };
    NodeFacts {
        fingerprint: model.fingerprint(),
        layout: Ok(model.prefill_session(&session).unwrap().layout().clone()),
        vocabulary_size: 256,
        context_tokens: 200,
        block_tokens: 16,
        chunk_tokens: 64,
    }
}

fn good(facts: &NodeFacts) -> PrefillRequest {
    PrefillRequest {
        protocol: PROTOCOL_VERSION,
        handoff: [1; 16],
        request_id: "r".to_owned(),
        fingerprint: facts.fingerprint.0,
        layout: facts.layout.as_ref().unwrap().id().0,
        isolation: [0; 32],
        block_tokens: 16,
        tokens: (0..100).collect(),
        have_blocks: 0,
        end: 99,
        codecs: vec![65_535, kernels::RAW],
        credit_bytes: 1000,
    }
}

#[test]
fn a_good_request_becomes_a_job_with_the_codec_known_here() {
    let facts = facts();
    let job = facts.check(PrefillRequest { have_blocks: 2, ..good(&facts) }).unwrap_or_else(|_| panic!());
    assert_eq!(job.prompt.tokens.len(), 99);
    assert_eq!(job.prompt.export_from, 32);
    assert_eq!(job.table.block_count(), 7);
    assert_eq!(job.codec.id(), kernels::RAW);
}

/// Reason, words of the message, and the change that provokes it.
type Case<'a> = (RefusalReason, &'a [&'a str], &'a dyn Fn(&mut PrefillRequest));

#[test]
fn every_mismatch_is_refused_with_both_values() {
    let facts = facts();
    let refused = |change: &dyn Fn(&mut PrefillRequest)| -> Refusal {
        let mut request = good(&facts);
        change(&mut request);
        facts.check(request).err().expect("a refusal")
    };
    let cases: [Case; 13] = [
        (RefusalReason::Mismatch, &["protocol is 77 in", "2 on"], &|r| r.protocol = 77),
        (RefusalReason::Mismatch, &["fingerprint", "0909090909090909"], &|r| r.fingerprint = [9; 32]),
        (RefusalReason::Mismatch, &["KV layout", "0909090909090909"], &|r| r.layout = [9; 32]),
        (RefusalReason::Mismatch, &["block_tokens", "32", "16"], &|r| r.block_tokens = 32),
        (RefusalReason::Invalid, &["0..0"], &|r| r.end = 0),
        (RefusalReason::Invalid, &["0..101", "100"], &|r| r.end = 101),
        (RefusalReason::Invalid, &["0..4294967295"], &|r| r.end = u32::MAX),
        (RefusalReason::Invalid, &["7 blocks", "99"], &|r| r.have_blocks = 7),
        (RefusalReason::Invalid, &["4294967295 blocks"], &|r| r.have_blocks = u32::MAX),
        (RefusalReason::Invalid, &["token 5 ", "256"], &|r| r.tokens[5] = 256),
        (RefusalReason::NoCodec, &["[7, 9]", "raw"], &|r| r.codecs = vec![7, 9]),
        (RefusalReason::NoCodec, &["[]"], &|r| r.codecs.clear()),
        (RefusalReason::TooLong, &["250", "200"], &|r| {
            r.tokens = vec![1; 251];
            r.end = 250;
        }),
    ];
    for (reason, parts, change) in cases {
        let refusal = refused(change);
        assert_eq!(refusal.reason, reason, "{}", refusal.message);
        parts.iter().for_each(|part| assert!(refusal.message.contains(part), "{part}: {}", refusal.message));
    }
}

#[test]
fn a_refusal_never_repeats_the_prompt() {
    let facts = facts();
    let mut request = good(&facts);
    request.tokens[5] = 123_456_789;
    assert!(!facts.check(request).err().unwrap().message.contains("123456789"));
}

async fn refusal(mesh: &Mesh, request: PrefillRequest) -> (RefusalReason, String) {
    match mesh.open(request).await.message().await {
        HandoffMessage::Refused { reason, message } => (reason, message),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_costs_nothing_and_the_next_one_is_served() {
    let mesh = Mesh::start(config(), FakeOptions::default()).await;
    let request = mesh.request(&prompt(1, 100));
    let (reason, message) = refusal(&mesh, PrefillRequest { fingerprint: [9; 32], ..request.clone() }).await;
    assert_eq!(reason, RefusalReason::Mismatch);
    assert!(message.contains("fingerprint"));
    assert_eq!(mesh.status().steps_total, 0);
    mesh.run(request).await;
    mesh.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_node_is_busy_and_says_which_limit() {
    let mesh = Mesh::start(PrefillConfig { handoffs_max: 1, ..config() }, slow()).await;
    let mut first = mesh.open(mesh.request(&prompt(1, 2001))).await;
    first.computed(64).await;
    let (reason, message) = refusal(&mesh, mesh.request(&prompt(2, 100))).await;
    assert_eq!((reason, message.as_str()), (RefusalReason::Busy, "1 handoffs are under way, the limit"));
    first.leave();
    mesh.idle().await;

    let mesh = Mesh::start(PrefillConfig { queue_tokens_max: 2050, ..config() }, slow()).await;
    let mut first = mesh.open(mesh.request(&prompt(1, 2001))).await;
    assert!(matches!(first.message().await, HandoffMessage::Accepted { queued_tokens: 0, .. }));
    let (reason, message) = refusal(&mesh, mesh.request(&prompt(2, 2000))).await;
    assert_eq!(reason, RefusalReason::Busy);
    assert!(message.ends_with("prompt tokens are queued, limit 2050"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_prompt_is_told_what_is_ahead_of_it() {
    let mesh = Mesh::start(config(), slow()).await;
    let mut first = mesh.open(mesh.request(&prompt(1, 8001))).await;
    first.computed(64).await;
    let mut second = mesh.open(mesh.request(&prompt(2, 3001))).await;
    let accepted = second.message().await;
    let HandoffMessage::Accepted { queued_tokens, expected_start_ms, chunk_tokens, .. } = accepted else {
        panic!("{accepted:?}")
    };
    assert!((1..8000).contains(&queued_tokens));
    assert!(expected_start_ms > 0);
    assert_eq!(chunk_tokens, 64);
    // The heartbeat comes although nothing is computed for it.
    assert!(matches!(second.message().await, HandoffMessage::Progress { computed_tokens: 0, .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_node_finishes_what_it_has_and_takes_nothing_new() {
    let mesh = Mesh::start(config(), slow()).await;
    let mut first = mesh.open(mesh.request(&prompt(1, 601))).await;
    first.computed(64).await;
    mesh.shutdown.send_replace(Shutdown::Draining);
    let (reason, _) = refusal(&mesh, mesh.request(&prompt(2, 100))).await;
    assert_eq!(reason, RefusalReason::Draining);
    first.computed(600).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_be_cut_into_blocks_is_refused_with_the_reason() {
    let options = FakeOptions { blocks_supported: false, ..FakeOptions::default() };
    let model = Arc::new(FakeModel::new(options).unwrap());
    let twin = Arc::new(FakeModel::new(FakeOptions::default()).unwrap());
    let mesh = Mesh::start_with(config(), model, twin).await;
    let (reason, message) = refusal(&mesh, mesh.request(&prompt(1, 100))).await;
    assert_eq!(reason, RefusalReason::Mismatch);
    assert!(message.contains("cannot be prefilled remotely: the fake was told so"), "{message}");
}
