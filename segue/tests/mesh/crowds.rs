//! Many clients at once, patient ones and others.

use std::time::{Duration, Instant};

use crate::harness::{self, Client, code_word, long_prompt};

#[tokio::test]
async fn two_hundred_clients_leave_and_nothing_stays_behind() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(Duration::from_secs(10)).await);
    client.stream("Name a colour.", 8).await;
    let before = ttft_of_shorts(&client, ["a river", "a city", "a tree"]).await;
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..200_u64 {
        let client = client.clone();
        clients.spawn(async move {
            // Spread over 8 s; patience from nothing to 1.5 s, in an order that
            // mixes every phase with every length.
            tokio::time::sleep(Duration::from_millis(index * 40)).await;
            let words = [5, 500, 900, 2500][index as usize % 4];
            let patience = Duration::from_millis(index * 7919 % 1500);
            client.leave(&long_prompt(1000 + index, words), 200, patience).await;
        });
    }
    while let Some(left) = clients.join_next().await {
        left.unwrap();
    }
    // A second on a quiet machine, see the printed figures; other work on a test
    // machine must not fail this.
    let left = Instant::now();
    assert!(client.settles(Duration::from_secs(5)).await, "{:#}", client.status().await);
    let settled = left.elapsed();
    let after = ttft_of_shorts(&client, ["a mountain", "a lake", "a bird"]).await;
    println!("all freed {settled:?} after the last left; TTFT {before:?} before, {after:?} after");
    assert!(after < before * 3 + Duration::from_millis(100), "{after:?}, {before:?}");
    let long = client.chat(&long_prompt(1999, 700), 4, "").await;
    assert!(long.route.starts_with("remote; "), "{}", long.route);
    assert_eq!(long.status, 200);
}

/// Median TTFT of short requests, one after the other.
async fn ttft_of_shorts(client: &Client, things: [&str; 3]) -> Duration {
    let mut ttfts = Vec::new();
    for thing in things {
        ttfts.push(client.stream(&format!("Name {thing}."), 8).await.ttft);
    }
    ttfts.sort();
    ttfts[1]
}

#[tokio::test]
async fn concurrent_long_prompts_do_not_mix() {
    let (_turn, client) = harness::shared().await;
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..16_usize {
        let client = client.clone();
        clients.spawn(async move {
            let word = code_word(index);
            let prompt = format!(
                "The code word is {word}. {} The code word is {word}. What is the code word? Answer with the code word.",
                long_prompt(2000 + index as u64, 850)
            );
            (index, client.chat(&prompt, 24, "").await)
        });
    }
    let mut own = 0;
    while let Some(answer) = clients.join_next().await {
        let (index, answer) = answer.unwrap();
        assert!(answer.route.starts_with("remote; "), "{}", answer.route);
        assert!(answer.prompt_tokens() > 800, "{}", answer.prompt_tokens());
        for other in (0..16).filter(|&other| other != index) {
            assert!(!answer.text().contains(&code_word(other)), "{index} says {other}: {}", answer.text());
        }
        own += usize::from(answer.text().contains(&code_word(index)));
    }
    // A small model does not always do as told; but if most answers lacked the
    // word, this test would prove nothing.
    assert!(own >= 8, "only {own} of 16 said their own word");
    assert!(client.settles(Duration::from_secs(10)).await);
}
