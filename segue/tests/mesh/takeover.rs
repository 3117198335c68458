//! Nodes that die or freeze in the middle of an answer: the client gets all of
//! it, once.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::harness::{self, Client, Mesh, decode_node, eventually, long_prompt, nodes};

const COUNT: &str = "Count from 1 to 60. Write one number per line and nothing else.";

#[tokio::test]
async fn answer_goes_on_on_another_node_when_its_decode_node_dies() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--decode-nodes", "2"]);
    let client = mesh.client();
    for (round, tokens) in [1, 10, 100].into_iter().enumerate() {
        let prompt = format!("Round {round}. {COUNT}");
        let oracle = client.oracle(&prompt, 120).await;
        assert!(oracle.tokens > 100, "{oracle:?}");

        let mut stream = client.open(&prompt, 120).await;
        while stream.so_far().tokens < tokens {
            assert!(stream.advance().await, "ended after {:?}", stream.so_far());
        }
        let name = decode_node(&stream.so_far().route).to_owned();
        let victim = client.pid(&name).await;
        kill_process(victim, Signal::KILL).unwrap();
        let answer = stream.rest().await;
        assert!(answer.is_whole(), "after {tokens} tokens: {answer:?}");
        assert_eq!(answer.text, oracle.text, "after {tokens} tokens");
        assert!(client.settles(Duration::from_secs(5)).await, "{:#}", client.status().await);
        assert!(client.sees_another(&name, victim).await, "{:#}", client.status().await);
    }
}

#[tokio::test]
async fn request_is_placed_again_when_its_decode_node_dies_before_the_first_token() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--decode-nodes", "2"]);
    let client = mesh.client();
    let prompt = format!("{}\nWhat is the capital of France?", long_prompt(51, 1200));
    let request = tokio::spawn({
        let (client, prompt) = (client.clone(), prompt.clone());
        async move { client.stream(&prompt, 12).await }
    });
    let mut name = None;
    let taken = eventually(Duration::from_secs(5), async || {
        let status = client.status().await;
        let busy = nodes(&status, "decode").into_iter().find(|node| node["handoffs_active"] == 1);
        name = busy.map(|node| node["name"].as_str().unwrap().to_owned());
        name.is_some()
    });
    assert!(taken.await, "{:#}", client.status().await);
    let name = name.unwrap();
    kill_process(client.pid(&name).await, Signal::KILL).unwrap();
    let answer = request.await.unwrap();
    assert!(answer.is_whole(), "{answer:?}");
    // The prefill node learns of the death by twelve seconds of silence.
    assert!(client.settles(Duration::from_secs(15)).await, "{:#}", client.status().await);
    assert_eq!(answer.text, client.oracle(&prompt, 12).await.text);
}

#[tokio::test]
async fn what_a_dying_prefill_node_has_sent_is_not_computed_again() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    for (round, share) in [0.1, 0.5, 0.95].into_iter().enumerate() {
        let prompt = format!("{}\nWhat is the capital of France?", long_prompt(60 + round as u64, 1500));
        let total = client.count_tokens(&prompt).await;
        let by_decode = client.node_sum("decode", "prefill_tokens_total").await;
        let by_prefill = client.node_sum("prefill", "prefill_tokens_total").await;
        let victim = client.pid("prefill-1").await;
        let request = tokio::spawn({
            let (client, prompt) = (client.clone(), prompt.clone());
            // Long enough to be still under way when the status tells of the prefill.
            async move { client.stream(&prompt, 100).await }
        });
        let computed = loop {
            let computed =
                client.node_sum("prefill", "prefill_tokens_total").await.saturating_sub(by_prefill);
            if computed as f64 >= share * total as f64 {
                break computed;
            }
            assert!(!request.is_finished(), "{computed} of {total} tokens seen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        kill_process(victim, Signal::KILL).unwrap();
        let killed = Instant::now();
        let answer = request.await.unwrap();
        let took = killed.elapsed();
        assert!(answer.is_whole(), "{answer:?}");
        assert!(client.settles(Duration::from_secs(5)).await, "{:#}", client.status().await);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let again = client.node_sum("decode", "prefill_tokens_total").await - by_decode;
        println!("killed after {computed} of {total} tokens; {again} computed on the decode node, {took:?}");
        // The last chunk may not have left the node that was killed.
        let (template, chunk, block) = (40, 256, 64);
        assert!(again <= total + template - computed + chunk + block, "{again} of {total}, {computed} done");
        assert!(client.sees_another("prefill-1", victim).await, "{:#}", client.status().await);
        let oracle = client.oracle(&prompt, 12).await;
        assert!(
            answer.text.starts_with(&oracle.text),
            "killed at {share}: {} and {}",
            answer.text,
            oracle.text
        );
    }
}

#[tokio::test]
async fn nodes_that_freeze_cost_time_but_no_answer() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--decode-nodes", "2"]);
    let client = mesh.client();
    frozen_decode_node(&client).await;
    frozen_prefill_node(&client).await;
}

async fn frozen_decode_node(client: &Client) {
    let oracle = client.oracle(COUNT, 60).await;
    let mut stream = client.open(COUNT, 60).await;
    while stream.so_far().tokens < 10 {
        assert!(stream.advance().await);
    }
    let name = decode_node(&stream.so_far().route).to_owned();
    let pid = client.pid(&name).await;
    kill_process(pid, Signal::STOP).unwrap();
    // Nobody else is disturbed.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let other = client.chat("What is the capital of France? One sentence.", 24, "").await;
    assert!(!other.route.contains(&format!("decode={name}")), "{}", other.route);
    assert!(other.text().contains("Paris"), "{}", other.text());
    let answer = tokio::time::timeout(Duration::from_secs(30), stream.rest()).await.expect("it moves on");
    kill_process(pid, Signal::CONT).unwrap();
    assert!(answer.is_whole() && answer.text == oracle.text, "{answer:?}");
    assert!(client.sees_healthy(&name).await, "{:#}", client.status().await);
}

async fn frozen_prefill_node(client: &Client) {
    let prompt = format!("{}\nWhat is the capital of France?", long_prompt(71, 900));
    let request = tokio::spawn({
        let (client, prompt) = (client.clone(), prompt.clone());
        async move { client.stream(&prompt, 12).await }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    let pid = client.pid("prefill-1").await;
    kill_process(pid, Signal::STOP).unwrap();
    let answer =
        tokio::time::timeout(Duration::from_secs(60), request).await.expect("it falls back").unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    assert!(answer.is_whole(), "{answer:?}");
    assert!(client.sees_healthy("prefill-1").await, "{:#}", client.status().await);
    assert!(client.settles(Duration::from_secs(10)).await, "{:#}", client.status().await);
    assert_eq!(answer.text, client.oracle(&prompt, 12).await.text);
}
