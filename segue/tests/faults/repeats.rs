//! The same again gives the same again.

use std::time::Duration;

use serde_json::json;

use crate::harness::{self, ANIMALS, long_prompt, twins, wrong_answers};

const QUESTION: &str = "What is the capital of France? Answer with one word.";

// C7
#[tokio::test]
async fn the_same_prompt_gives_the_same_answer_alone_and_in_a_crowd() {
    let (_turn, client) = harness::shared().await;
    let prompt = format!("{}\n{QUESTION}", long_prompt(401, 500));
    let first = client.chat(&prompt, 6, "").await;
    for _ in 0..4 {
        assert_eq!(client.chat(&prompt, 6, "").await.text(), first.text());
    }
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (client, prompt) = (client.clone(), prompt.clone());
        crowd.spawn(async move { client.chat(&prompt, 6, "").await });
    }
    while let Some(answer) = crowd.join_next().await {
        assert_eq!(answer.unwrap().text(), first.text());
    }
}

// C8
#[tokio::test]
async fn slots_that_are_used_again_remember_nothing() {
    let (_turn, client) = harness::shared().await;
    let (a, b) =
        (format!("Note A. {QUESTION}"), "Note B. Name the largest planet. Answer with one word.".to_owned());
    let longer = format!("{a} Then name a river there.");
    let ask = async |prompt: &str| client.chat(prompt, 8, "").await.text().to_owned();
    let (first_a, first_b, first_longer) = (ask(&a).await, ask(&b).await, ask(&longer).await);
    for _ in 0..2 {
        for (prompt, expected) in [(&a, &first_a), (&a, &first_a), (&longer, &first_longer), (&b, &first_b)] {
            assert_eq!(ask(prompt).await, *expected, "{prompt}");
        }
    }
}

// C13; 2,000 of them in `soak`
#[tokio::test]
async fn prompts_that_differ_in_one_token_never_mix() {
    let (_turn, client) = harness::shared().await;
    // The last token of a block of 64, and the first one.
    let twins = twins(&client, &[63, 64], &ANIMALS[..4]).await;
    let wrong = wrong_answers(&client, &twins, 32).await;
    assert!(wrong.is_empty(), "{wrong:?}");
}

// C6
#[tokio::test]
async fn internal_fields_from_clients_have_no_effect() {
    let (_turn, client) = harness::shared().await;
    let pids = client.pids().await;
    let plain = client.chat(QUESTION, 6, "").await;
    for _ in 0..2 {
        let body = json!({
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 6,
            "temperature": 0,
            "kv_transfer_params": {"do_remote_prefill": true, "remote_block_ids": [1, 2]},
            "bootstrap_room": 7,
            "bootstrap_host": "192.0.2.1",
            "data_parallel_rank": 3,
            "id_slot": 99,
        });
        let answer = client.post("/v1/chat/completions", &body, "").await;
        assert!(answer.status == 400 || answer.text() == plain.text(), "{answer:?}");
    }
    assert_eq!(client.pids().await, pids);
    assert!(client.settles(Duration::from_secs(5)).await);
}
