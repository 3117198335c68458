//! A mesh without a prefill node.

use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::harness::{self, Mesh, long_prompt};

const CAPITAL: &str = "What is the capital of France? One sentence.";

// B4, B5
#[tokio::test]
async fn decode_node_alone_serves_everything_and_says_why() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--prefill-nodes", "0"]);
    let client = mesh.client();
    assert!(client.chat(CAPITAL, 24, "").await.text().contains("Paris"));
    let answer = client.chat(&long_prompt(301, 500), 4, "").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.route.starts_with("local; rule=no-prefill-node"), "{}", answer.route);
    assert_eq!(
        client.metric("segue_router_requests_total{status=\"200\",rule=\"no-prefill-node\"}").await,
        1.0
    );
}

// B4
#[tokio::test]
async fn policy_that_forbids_the_fallback_is_obeyed() {
    let _turn = harness::alone().await;
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    std::fs::write(&policy, "mode = \"always-remote\"\nfallback = \"refuse\"\n").unwrap();
    let mesh = Mesh::start(&["--prefill-nodes", "0", "--policy", policy.to_str().unwrap()]);
    let client = mesh.client();
    for _ in 0..2 {
        let answer = client.chat(&long_prompt(302, 500), 4, "").await;
        assert_eq!(answer.status, 503, "{answer:?}");
        assert_eq!(answer.body["error"]["code"], "prefill_unavailable", "{answer:?}");
    }
    // Read again without a restart.
    std::fs::write(&policy, "mode = \"always-remote\"\nfallback = \"local\"\n").unwrap();
    let served = harness::eventually(Duration::from_secs(10), async || {
        client.chat("What is the capital of France?", 8, "").await.status == 200
    });
    assert!(served.await, "{}", mesh.log());
}

// B2
#[tokio::test]
async fn prefill_node_killed_early_costs_seconds_not_the_transfer_timeout() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    let victim = client.pid("prefill-1").await;
    let begin = harness::now();
    let request = tokio::spawn({
        let client = client.clone();
        async move { client.chat(&long_prompt(303, 800), 4, "").await }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(client.node_sum("prefill", "queue_tokens").await > 0, "it is done already");
    kill_process(victim, Signal::KILL).unwrap();
    let answer = request.await.unwrap();
    let took = begin.elapsed();
    assert_eq!(answer.status, 200, "{answer:?}");
    println!("answered {took:?} after the request");
    // Detection, and some 840 tokens computed on the decode node.
    assert!(took < Duration::from_secs(40), "{took:?}");
    assert!(client.settles(Duration::from_secs(5)).await, "{:#}", client.status().await);
}
