//! A mesh that nobody uses.

use crate::harness::{self, long_prompt};
use crate::soak_time;

// B8
#[tokio::test]
#[ignore = "takes minutes: make soak"]
async fn the_first_requests_after_idling_are_served_as_ever() {
    let (turn, client) = harness::shared().await;
    let mesh = turn.as_ref().unwrap();
    let long = |salt| format!("{}\nWhat is the capital of France?", long_prompt(salt, 700));
    // Connections between all of them are there before.
    client.chat(&long(960), 8, "").await;
    let (pids, log) = (client.pids().await, mesh.log());
    let (failed, fallbacks) = counters(&client).await;
    tokio::time::sleep(soak_time()).await;
    let prompt = long(961);
    let (remote, local) = tokio::join!(
        client.chat(&prompt, 8, ""),
        client.chat("What is the capital of France? One sentence.", 24, "")
    );
    assert!(remote.route.starts_with("remote; "), "{remote:?}");
    assert!(local.route.starts_with("local; rule=short"), "{local:?}");
    assert!(local.text().contains("Paris"), "{local:?}");
    assert_eq!(remote.text(), client.oracle(&prompt, 8).await.text);
    assert_eq!(counters(&client).await, (failed, fallbacks));
    assert_eq!(client.pids().await, pids);
    assert_eq!(mesh.log(), log, "nothing happened");
}

async fn counters(client: &harness::Client) -> (u64, f64) {
    let failed = client.node_sum("decode", "handoffs_failed_total").await;
    (failed, client.metric("segue_router_prefill_fallbacks_total").await)
}
