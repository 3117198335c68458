//! What was computed is used again: by whom it may be, and by nobody else.

use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{self, Answer, Client, Mesh, decode_node, eventually, long_prompt};

const SETTLE: Duration = Duration::from_secs(10);
/// What a node told the router is at most this old.
const STATUS: Duration = Duration::from_millis(500);
/// Longer than anything here takes on a slow machine.
const SLOW: Duration = Duration::from_secs(60);
const CAPITAL: &str = "What is the capital of France? Answer with one word.";
const CHAT: &str = "/v1/chat/completions";

// A14
#[tokio::test]
async fn a_retry_goes_on_where_the_prompt_was_cut_off() {
    let (_turn, client) = harness::shared().await;
    assert!(client.settles(SETTLE).await);
    tokio::time::sleep(STATUS).await;
    let prompt = format!("{}\n{CAPITAL}", long_prompt(601, 1500));
    let before = client.node_sum("prefill", "prefill_tokens_total").await;
    let mut held = 0;
    for _ in 0..2 {
        let asking = tokio::spawn({
            let (client, prompt) = (client.clone(), prompt.clone());
            async move { client.leave(&prompt, 8, SLOW).await }
        });
        // Beyond what the try before it left: it did not begin again.
        let further = eventually(SLOW, async || computed_since(&client, before).await > held);
        assert!(further.await, "{:#}", client.status().await);
        asking.abort();
        assert!(client.settles(SETTLE).await, "{:#}", client.status().await);
        tokio::time::sleep(STATUS).await;
        held = computed_since(&client, before).await;
    }
    let answer = client.chat(&prompt, 8, "").await;
    assert!(answer.route.starts_with("remote; "), "{}", answer.route);
    // A chunk that was being computed when its client left may have come later.
    assert!(answer.cached_tokens() >= held, "{held} tokens were there: {answer:?}");
    assert!(answer.cached_tokens() < answer.prompt_tokens() - 1, "too short a prompt for this test");
    assert!(client.settles(SETTLE).await);
    tokio::time::sleep(STATUS).await;
    // All tries together paid for the prompt once.
    assert_eq!(computed_since(&client, before).await, answer.prompt_tokens() - 1);
    assert_eq!(answer.text(), client.oracle(&prompt, 8).await.text);
}

/// Tokens that prefill nodes computed since there were `before`.
async fn computed_since(client: &Client, before: u64) -> u64 {
    client.node_sum("prefill", "prefill_tokens_total").await - before
}

// C14, K7
#[tokio::test]
async fn a_cache_salt_shares_nothing_with_others() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    for (arm, beginning) in [("local", long_prompt(602, 250)), ("remote", long_prompt(603, 250))] {
        for salt in [Some("x"), Some("y"), None] {
            let ask = async |end: &str| {
                let mut body = request(&[json!({"role": "user", "content": format!("{beginning} {end}")})]);
                if let Some(salt) = salt {
                    body["cache_salt"] = json!(salt);
                }
                let answer = client.post(CHAT, &body, arm).await;
                assert!(answer.route.starts_with(arm), "{answer:?}");
                answer.cached_tokens()
            };
            assert_eq!(ask(CAPITAL).await, 0, "{arm}, {salt:?}: others had the same beginning");
            // In whole blocks on the prefill node.
            let again = ask("What is the capital of Italy?").await;
            assert!(again >= 192, "{arm}, {salt:?}: only {again} of its own tokens");
        }
    }
}

// B12
#[tokio::test]
async fn a_restarted_router_finds_every_conversation_where_it_was() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--decode-nodes", "2"]);
    let client = mesh.client();
    // Fewer than one node has slots: whoever sits where, nobody is put out.
    let mut conversations: Vec<_> = (0..6).map(|index| Conversation::new(610 + index, 100)).collect();
    for conversation in &mut conversations {
        conversation.turn(&client, "Name a colour.").await;
    }
    let router = mesh.router().await;
    kill_process(router, Signal::KILL).unwrap();
    assert!(eventually(SLOW, async || !harness::lives(router)).await);
    assert!(client.sees_all_healthy(3).await, "{}", mesh.log());
    tokio::time::sleep(STATUS).await;
    for conversation in &mut conversations {
        conversation.turn(&client, "Name another one.").await;
        conversation.assert_continued();
    }
}

// C17
#[tokio::test]
async fn turns_of_a_chat_find_their_node_and_compute_only_what_is_new() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&["--decode-nodes", "2"]);
    let client = mesh.client();
    let mut conversations: Vec<_> = (0..3).map(|index| Conversation::new(620 + index, 100)).collect();
    for question in
        ["Name a colour.", "Name another one.", "And a third one.", "A fourth one.", "The last one."]
    {
        let before = client.node_sum("decode", "prefill_tokens_total").await;
        let mut new = 0;
        for conversation in &mut conversations {
            conversation.turn(&client, question).await;
            conversation.assert_continued();
            new += conversation.last().prompt_tokens() - conversation.last().cached_tokens();
        }
        // Also until the router knows where the answers are.
        tokio::time::sleep(STATUS).await;
        assert_eq!(client.node_sum("decode", "prefill_tokens_total").await - before, new);
    }
}

/// A chat that goes on; all its answers so far.
struct Conversation {
    messages: Vec<Value>,
    answers: Vec<Answer>,
}

impl Conversation {
    /// One that begins like no other: the template's own beginning is shorter
    /// than a block.
    fn new(salt: u64, words: usize) -> Self {
        let messages = vec![json!({"role": "system", "content": long_prompt(salt, words)})];
        Self { messages, answers: Vec::new() }
    }

    async fn turn(&mut self, client: &Client, question: &str) {
        self.messages.push(json!({"role": "user", "content": question}));
        let answer = client.post(CHAT, &request(&self.messages), "").await;
        self.messages.push(json!({"role": "assistant", "content": answer.text()}));
        self.answers.push(answer);
    }

    fn last(&self) -> &Answer {
        self.answers.last().unwrap()
    }

    /// The last turn ran where the one before it did, and found all of it.
    fn assert_continued(&self) {
        let [.., before, last] = &self.answers[..] else { return };
        assert_eq!(decode_node(&last.route), decode_node(&before.route), "{last:?}");
        // The last token of the prompt before, and what was said to it.
        assert!(last.cached_tokens() >= before.prompt_tokens() - 1, "{last:?} after {before:?}");
    }
}

fn request(messages: &[Value]) -> Value {
    json!({"messages": messages, "max_tokens": 8, "temperature": 0})
}
