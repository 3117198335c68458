//! Right answers by either route, and how fast they come.

use std::time::Duration;

use crate::harness::{self, long_prompt};

#[tokio::test]
async fn short_chat_is_answered_locally() {
    let (_turn, client) = harness::shared().await;
    let answer = client.chat("What is the capital of France? One sentence.", 24, "").await;
    assert!(answer.route.starts_with("local; rule=short"), "{}", answer.route);
    assert!(answer.text().contains("Paris"), "{}", answer.text());
    let usage = &answer.body["usage"];
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"].as_u64(), Some(sum));
}

/// Greedy text of both routes. The batches have other shapes, so the logits
/// differ in their last bits, and one near tie makes all further tokens differ:
/// only the beginning is compared.
#[tokio::test]
async fn long_prompt_goes_remote_and_reads_like_a_local_one() {
    let (_turn, client) = harness::shared().await;
    for salt in [11, 12, 13] {
        let prompt = format!("{}\nWhat is the capital of France?", long_prompt(salt, 700));
        let remote = client.chat(&prompt, 16, "").await;
        let local = client.chat(&prompt, 16, "local").await;
        assert!(remote.route.starts_with("remote; "), "{}", remote.route);
        assert!(local.route.starts_with("local; "), "{}", local.route);
        assert_eq!(remote.prompt_tokens(), local.prompt_tokens());
        assert!(remote.prompt_tokens() > 600, "{}", remote.prompt_tokens());
        let begin = |text: &str| text.split_whitespace().take(4).collect::<Vec<_>>().join(" ");
        assert_eq!(begin(remote.text()), begin(local.text()), "salt {salt}");
    }
}

#[tokio::test]
async fn every_prompt_token_but_the_last_is_computed_on_one_node_and_installed_on_the_other() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(Duration::from_secs(10)).await);
    let computed = client.node_sum("prefill", "prefill_tokens_total").await;
    let installed = client.node_sum("decode", "installed_tokens_total").await;
    let by_decode = client.node_sum("decode", "prefill_tokens_total").await;
    let answer = client.chat(&long_prompt(21, 900), 4, "").await;
    assert!(answer.route.starts_with("remote; "), "{}", answer.route);
    assert!(client.settles(Duration::from_secs(10)).await);
    // The counters of the last status are at most 250 ms old.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let tokens = answer.prompt_tokens();
    assert_eq!(client.node_sum("prefill", "prefill_tokens_total").await - computed, tokens - 1);
    assert_eq!(client.node_sum("decode", "installed_tokens_total").await - installed, tokens - 1);
    assert_eq!(client.node_sum("decode", "prefill_tokens_total").await - by_decode, 1);
    assert_eq!(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let whole = client.metric("segue_decode_handoff_seconds_total").await;
    let tail = client.metric("segue_decode_handoff_tail_seconds_total").await;
    println!("handoffs took {whole:.3} s, {tail:.3} s of it after the last chunk");
    assert!(0.0 < tail && tail < whole, "{tail} of {whole}");
}

#[tokio::test]
async fn short_prompt_does_not_wait_behind_a_long_one() {
    let (_turn, client) = harness::shared().await;
    let question = "Name a colour.";
    client.stream(question, 8).await;
    let idle = client.stream("Name a fruit.", 8).await;
    let long = tokio::spawn({
        let client = client.clone();
        async move { client.stream(&long_prompt(31, 3000), 8).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let short = client.stream("Name an animal.", 8).await;
    assert!(!long.is_finished(), "the long prompt was too short for this test");
    let long = long.await.unwrap();
    assert!(long.route.starts_with("remote; "), "{}", long.route);
    assert!(short.route.starts_with("local; "), "{}", short.route);
    // Generous: other work on a test machine must not fail it. Behind a server
    // without a mesh it is a hundred times.
    assert!(
        short.ttft < idle.ttft * 3 + Duration::from_millis(100),
        "{:?} behind, {:?} idle",
        short.ttft,
        idle.ttft
    );
    assert!(short.total * 2 < long.ttft, "{:?} short, {:?} long", short.total, long.ttft);
}

#[tokio::test]
async fn stream_ends_with_a_reason_and_done() {
    let (_turn, client) = harness::shared().await;
    let stream = client.stream("Count from one to twenty.", 12).await;
    assert!(stream.is_whole(), "{stream:?}");
    assert_eq!((stream.finish_reasons, stream.tokens), (vec!["length".to_owned()], 12));
    assert!(!stream.text.is_empty());
}
