//! What the mesh must answer: the fake model's own continuation of the prompt,
//! computed without the mesh.

use engine::Vocabulary;
use engine::fake::{BOS, FakeModel, FakeVocabulary};
use kv_block::Token;

/// The one right answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    /// All of it.
    pub(crate) text: String,
    /// Why it ends there.
    pub(crate) finish_reason: &'static str,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Tokens of the answer.
    pub(crate) completion_tokens: u64,
}

/// The answer to a chat with these `(role, content)` messages.
pub(crate) fn chat(model: &FakeModel, messages: &[(&'static str, String)], max_tokens: usize) -> Expected {
    let mut text = String::new();
    for (role, content) in messages {
        text += &format!("<|im_start|>{role}\n{content}<|im_end|>\n");
    }
    text += "<|im_start|>assistant\n";
    completion(model, &text, max_tokens)
}

/// The answer to a raw prompt.
pub(crate) fn completion(model: &FakeModel, prompt: &str, max_tokens: usize) -> Expected {
    let tokens = FakeVocabulary.tokenize(prompt, true, true);
    debug_assert_eq!(tokens.first(), Some(&BOS));
    let answer = model.continuation(&tokens, max_tokens);
    Expected {
        text: text_of(&answer),
        finish_reason: if answer.len() < max_tokens { "stop" } else { "length" },
        prompt_tokens: tokens.len() as u64,
        completion_tokens: answer.len() as u64,
    }
}

fn text_of(tokens: &[Token]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| FakeVocabulary.piece(*token, false)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
