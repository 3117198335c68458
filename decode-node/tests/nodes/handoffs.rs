//! Handoffs that go well, and those that do not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::Model;
use engine::fake::{FakeModel, FakeOptions};
use kv_transfer::{FailureKind, FinishReason, Generate, PrefillCandidate, RequestEvent, Sampling, Shutdown};
use tokio::time::timeout;

use crate::harness::{Answer, Mesh, PATIENCE, prompt, quick, request};

/// A prompt token takes 2 ms: slow enough to act while a prompt computes.
fn slow() -> FakeOptions {
    FakeOptions { token_time: Duration::from_millis(2), ..quick() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_prompt_is_computed_there_and_answered_here() {
    let mut mesh = Mesh::new(quick()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let prompt = prompt(1, 1000);
    let answer = d.answer(&request(&prompt, vec![p.candidate()])).await;
    assert_eq!(answer.started, Some((0, "prefill-1".to_owned(), String::new(), 999)));
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
    assert_eq!(answer.last, Some(RequestEvent::Finished(FinishReason::Length)));
    let here =
        d.reports(|status| status.requests_in_flight == 0 && status.generated_tokens_total == 20).await;
    assert_eq!((here.prefill_tokens_total, here.installed_tokens_total), (1, 999));
    assert_eq!((here.staged_bytes, here.slots_used, here.handoffs_completed_total), (0, 0, 1));
    let (whole, tail) = (here.handoff_micros_total, here.handoff_tail_micros_total);
    assert!(0 < tail && tail < whole, "{tail} µs of {whole} µs after the last token");
    let there = p.reports(|status| status.handoffs_active == 0 && status.prefill_tokens_total > 0).await;
    assert_eq!((there.prefill_tokens_total, there.staged_bytes, there.handoffs_completed_total), (999, 0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_handoffs_at_once_do_not_mix() {
    let mut mesh = Mesh::new(quick()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = Arc::new(mesh.decode(|config| config.staging_bytes = 1 << 20).await);
    let tasks: Vec<_> = (0..24)
        .map(|seed| {
            let (d, candidate) = (d.clone(), p.candidate());
            let prompt = prompt(seed, 300 + seed * 37);
            tokio::spawn(async move { (d.answer(&request(&prompt, vec![candidate])).await, prompt) })
        })
        .collect();
    for task in tasks {
        let (answer, prompt) = task.await.unwrap();
        assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
    }
    d.reports(|status| status.staged_bytes == 0 && status.requests_in_flight == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_prefill_node_the_prompt_is_computed_here_or_refused() {
    let mut mesh = Mesh::new(quick()).await;
    let d = mesh.decode(|_| ()).await;
    let nobody = PrefillCandidate { name: "gone".to_owned(), address: "127.0.0.1:9".to_owned() };
    let prompt = prompt(2, 500);
    let answer = d.answer(&request(&prompt, vec![nobody.clone()])).await;
    let (_, by, reason, installed) = answer.started.unwrap();
    assert!(by.is_empty() && installed == 0 && reason.starts_with("gone: "), "{by} {reason}");
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
    let refused = d.answer(&Generate { fallback_local: false, ..request(&prompt, vec![nobody]) }).await;
    assert!(
        matches!(refused.last, Some(RequestEvent::Failed { kind: FailureKind::PrefillUnavailable, .. })),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dying_prefill_node_sent_is_kept() {
    let mut mesh = Mesh::new(slow()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let prompt = prompt(3, 800);
    let (_sender, inbox) = d.ask(&request(&prompt, vec![p.candidate()])).await;
    // About half of the rows have arrived.
    let half = mesh.bytes_per_token() * 400;
    d.reports(|status| status.staged_bytes >= half).await;
    p.shutdown.send(Shutdown::Now).unwrap();
    let answer = timeout(PATIENCE, Answer::read(inbox)).await.unwrap();
    let (_, by, reason, installed) = answer.started.unwrap();
    assert!(installed >= 400 && by.is_empty() && !reason.is_empty(), "{installed} by {by}: {reason}");
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
    let after = d.reports(|status| status.requests_in_flight == 0 && status.staged_bytes == 0).await;
    assert_eq!(after.prefill_tokens_total + after.installed_tokens_total, 800);
    assert_eq!(after.handoffs_failed_total, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_ends_while_its_rows_wait_for_a_slot_is_no_loss() {
    let mut mesh = Mesh::new(FakeOptions { step_time: Duration::from_millis(10), ..quick() }).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = Arc::new(mesh.decode(|config| config.slots = 1).await);
    let running = request(&prompt(10, 50), Vec::new());
    let running = Generate { max_tokens: 200, ..running };
    let (_sender, first) = d.ask(&running).await;
    d.reports(|status| status.slots_used == 1).await;
    let long = prompt(11, 500);
    let (_sender, second) = d.ask(&request(&long, vec![p.candidate()])).await;
    // All rows have arrived and wait for the only slot.
    let bytes = 499 * mesh.bytes_per_token();
    d.reports(|status| status.staged_bytes == bytes).await;
    p.shutdown.send(Shutdown::Now).unwrap();
    let answer = timeout(PATIENCE, Answer::read(second)).await.expect("the answer comes");
    assert_eq!(answer.tokens, mesh.model.continuation(&long, 20));
    assert_eq!(answer.started.unwrap().3, 499, "what was complete is used");
    assert_eq!(timeout(PATIENCE, Answer::read(first)).await.unwrap().tokens.len(), 200);
    // The bulk side still works: a node that is gone is noticed, not waited for.
    let answer = d.answer(&request(&prompt(12, 500), vec![p.candidate()])).await;
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt(12, 500), 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_prefill_node_sent_survives_the_refusal_of_the_next() {
    let mut mesh = Mesh::new(slow()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let gone = PrefillCandidate { name: "gone".to_owned(), address: "127.0.0.1:9".to_owned() };
    let prompt = prompt(13, 800);
    let (_sender, inbox) = d.ask(&request(&prompt, vec![p.candidate(), gone])).await;
    let half = mesh.bytes_per_token() * 400;
    d.reports(|status| status.staged_bytes >= half).await;
    p.shutdown.send(Shutdown::Now).unwrap();
    let answer = timeout(PATIENCE, Answer::read(inbox)).await.unwrap();
    assert!(answer.started.unwrap().3 >= 400);
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_prompts_for_an_unreachable_prefill_node_wait_for_one_time_out_only() {
    let mut mesh = Mesh::new(quick()).await;
    let d = Arc::new(mesh.decode(|_| ()).await);
    // A socket that takes packets and never answers.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let asked = Instant::now();
    let tasks: Vec<_> = (0..8)
        .map(|seed| {
            let (d, address) = (d.clone(), address.clone());
            let candidate = PrefillCandidate { name: "silent".to_owned(), address };
            tokio::spawn(async move { d.answer(&request(&prompt(seed, 300), vec![candidate])).await })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap().tokens.len(), 20);
    }
    assert!(asked.elapsed() < Duration::from_secs(6), "{:?}", asked.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_both_nodes_within_a_second() {
    let mut mesh = Mesh::new(slow()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let (sender, inbox) = d.ask(&request(&prompt(4, 4000), vec![p.candidate()])).await;
    d.reports(|status| status.staged_bytes > 0).await;
    let left = Instant::now();
    sender.reset();
    drop(inbox);
    d.reports(|status| {
        status.requests_in_flight == 0 && status.handoffs_active == 0 && status.staged_bytes == 0
    })
    .await;
    let stopped = p.reports(|status| status.handoffs_active == 0 && status.staged_bytes == 0).await;
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    assert!(stopped.prefill_tokens_total < 4000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_larger_than_the_staging_memory_is_computed_here_at_once() {
    let mut mesh = Mesh::new(quick()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|config| config.staging_bytes = 1 << 20).await;
    let prompt = prompt(5, 8000);
    let answer = d.answer(&request(&prompt, vec![p.candidate()])).await;
    let (_, _, reason, installed) = answer.started.unwrap();
    assert!(installed == 0 && reason.contains("staging memory"), "{reason}");
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_with_another_model_is_refused_by_name_of_both() {
    let mut mesh = Mesh::new(quick()).await;
    let other = Arc::new(FakeModel::new(FakeOptions { seed: 99, ..quick() }).unwrap());
    let p = mesh.prefill(other.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let prompt = prompt(6, 400);
    let answer = d.answer(&request(&prompt, vec![p.candidate()])).await;
    let (_, _, reason, _) = answer.started.unwrap();
    for fingerprint in [mesh.model.fingerprint(), other.fingerprint()] {
        assert!(reason.contains(&fingerprint.to_string()), "{reason} names {fingerprint}");
    }
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_make_no_sense_are_refused_by_name() {
    let mut mesh = Mesh::new(quick()).await;
    let d = mesh.decode(|config| config.context_tokens = 128).await;
    let good = request(&prompt(7, 50), Vec::new());
    let cases = [
        (Generate { tokens: Vec::new(), ..good.clone() }, "allowed 1 to 127"),
        (Generate { tokens: vec![1; 128], ..good.clone() }, "allowed 1 to 127"),
        (
            Generate { tokens: vec![1, 70_000], ..good.clone() },
            "token 1 of the prompt is outside the vocabulary",
        ),
        (Generate { max_tokens: 0, ..good.clone() }, "max_tokens is 0"),
        (
            Generate { sampling: Sampling { top_p: f32::NAN, ..good.sampling.clone() }, ..good.clone() },
            "finite",
        ),
    ];
    for (bad, part) in cases {
        match d.answer(&bad).await.last {
            Some(RequestEvent::Failed { kind: FailureKind::Invalid, message }) => {
                assert!(message.contains(part), "{message}")
            }
            other => panic!("{part}: {other:?}"),
        }
    }
    assert_eq!(d.answer(&good).await.tokens.len(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_node_finishes_what_runs_and_refuses_what_comes() {
    let mut mesh = Mesh::new(FakeOptions { step_time: Duration::from_millis(20), ..quick() }).await;
    let d = mesh.decode(|_| ()).await;
    let prompt = prompt(8, 50);
    let (_sender, inbox) = d.ask(&request(&prompt, Vec::new())).await;
    d.reports(|status| status.slots_used == 1).await;
    d.shutdown.send(Shutdown::Draining).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let refused = d.answer(&request(&prompt, Vec::new())).await;
    assert!(
        matches!(refused.last, Some(RequestEvent::Failed { kind: FailureKind::Draining, .. })),
        "{refused:?}"
    );
    let answer = timeout(PATIENCE, Answer::read(inbox)).await.unwrap();
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_node_at_the_address_of_a_prefill_node_is_not_taken_for_it() {
    let mut mesh = Mesh::new(quick()).await;
    let p = mesh.prefill(mesh.model.clone()).await;
    let d = mesh.decode(|_| ()).await;
    let prompt = prompt(1, 300);
    let candidate = PrefillCandidate { name: "prefill-9".to_owned(), ..p.candidate() };
    let answer = d.answer(&request(&prompt, vec![candidate])).await;
    let (_, by, reason, _) = answer.started.unwrap();
    assert_eq!(by, "");
    assert!(reason.contains("prefill-1 answers there, not prefill-9"), "{reason}");
    assert_eq!(answer.tokens, mesh.model.continuation(&prompt, 20));
}
