//! Prompts whose greedy answer does not depend on the company they are in.

use crate::harness::{Client, long_prompt};

/// A prompt with the only right answer.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) prompt: String,
    pub(crate) answer: String,
}

/// Most tokens of an answer.
pub(crate) const ANSWER_TOKENS: u32 = 12;

const QUESTIONS: [&str; 6] = [
    "What is the capital of France? Answer with one word.",
    "What is the capital of Italy? Answer with one word.",
    "What is the capital of Japan? Answer with one word.",
    "Repeat the word banana three times.",
    "What is the capital of Germany? Answer with one word.",
    "Say the days of the week.",
];

/// Asks every prompt by both routes on an idle mesh and keeps those that are
/// answered alike. The two routes compute in batches of different shapes, which
/// changes the last bits of logits: an answer that hangs on them proves nothing.
pub(crate) async fn stable(client: &Client) -> Vec<Known> {
    let shorts = QUESTIONS.iter().map(|question| (*question).to_owned());
    let longs = (0..6).map(|index| {
        format!("{}\n{}", long_prompt(900 + index, 520 + 60 * index as usize), QUESTIONS[index as usize % 3])
    });
    let mut known = Vec::new();
    for prompt in shorts.chain(longs) {
        let first = client.chat(&prompt, ANSWER_TOKENS, "remote").await.text().to_owned();
        let second = client.oracle(&prompt, ANSWER_TOKENS).await.text;
        let third = client.cold(&prompt, ANSWER_TOKENS, "local").await.text().to_owned();
        if first == second && second == third {
            known.push(Known { prompt, answer: first });
        }
    }
    let long = known.iter().filter(|known| known.prompt.len() > 500).count();
    assert!(known.len() >= 6 && long >= 2, "too few prompts have a stable answer: {known:?}");
    known
}
