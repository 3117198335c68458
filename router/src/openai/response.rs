//! Responses and stream chunks, field by field as OpenAI sends them.

use serde::Serialize;
use serde_json::{Value, json};

/// Which of the two generation endpoints answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completion,
}

impl Endpoint {
    fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completion => "cmpl-",
        }
    }

    fn object(self, stream: bool) -> &'static str {
        match (self, stream) {
            (Self::Chat, false) => "chat.completion",
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Completion, _) => "text_completion",
        }
    }
}

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub(crate) struct ResponseHead {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
}

/// Token counts of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Prompt tokens that nobody computed for this request.
    pub(crate) cached_tokens: u64,
}

/// One finished answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) finish_reason: &'static str,
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": { "cached_tokens": self.cached_tokens },
        })
    }
}

impl ResponseHead {
    pub(crate) fn new(endpoint: Endpoint, request_id: &str, created: u64, model: String) -> Self {
        Self { endpoint, id: format!("{}{request_id}", endpoint.id_prefix()), created, model }
    }

    /// The whole answer at once.
    pub(crate) fn whole(&self, choices: &[Choice], usage: Usage) -> String {
        let choices = choices.iter().enumerate().map(|(index, choice)| self.whole_choice(index, choice));
        self.body(false, choices.collect(), Some(usage))
    }

    /// First chunk of one choice, where the endpoint has one.
    pub(crate) fn first_chunk(&self, index: usize) -> Option<String> {
        match self.endpoint {
            Endpoint::Chat => Some(self.delta(index, json!({"role": "assistant", "content": ""}), None)),
            Endpoint::Completion => None,
        }
    }

    /// More text.
    pub(crate) fn text_chunk(&self, index: usize, text: &str) -> String {
        match self.endpoint {
            Endpoint::Chat => self.delta(index, json!({ "content": text }), None),
            Endpoint::Completion => self.text(index, text, None),
        }
    }

    /// The end of one choice.
    pub(crate) fn finish_chunk(&self, index: usize, reason: &str) -> String {
        match self.endpoint {
            Endpoint::Chat => self.delta(index, json!({}), Some(reason)),
            Endpoint::Completion => self.text(index, "", Some(reason)),
        }
    }

    /// The counts, on a chunk of their own.
    pub(crate) fn usage_chunk(&self, usage: Usage) -> String {
        self.body(true, Vec::new(), Some(usage))
    }

    fn whole_choice(&self, index: usize, choice: &Choice) -> Value {
        let (text, reason) = (&choice.text, choice.finish_reason);
        match self.endpoint {
            Endpoint::Chat => json!({
                "index": index,
                "message": { "role": "assistant", "content": text },
                "logprobs": null,
                "finish_reason": reason,
            }),
            Endpoint::Completion => {
                json!({ "index": index, "text": text, "logprobs": null, "finish_reason": reason })
            }
        }
    }

    fn delta(&self, index: usize, delta: Value, reason: Option<&str>) -> String {
        let choice = json!({ "index": index, "delta": delta, "finish_reason": reason });
        self.body(true, vec![choice], None)
    }

    fn text(&self, index: usize, text: &str, reason: Option<&str>) -> String {
        let choice = json!({ "index": index, "text": text, "logprobs": null, "finish_reason": reason });
        self.body(true, vec![choice], None)
    }

    fn body(&self, stream: bool, choices: Vec<Value>, usage: Option<Usage>) -> String {
        let body = Body {
            id: &self.id,
            object: self.endpoint.object(stream),
            created: self.created,
            model: &self.model,
            choices,
            usage: usage.map(Usage::json),
        };
        serde_json::to_string(&body).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(endpoint: Endpoint) -> ResponseHead {
        ResponseHead::new(endpoint, "r1", 5, "tiny".into())
    }

    fn parsed(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    const USAGE: Usage = Usage { prompt_tokens: 10, completion_tokens: 2, cached_tokens: 4 };

    #[test]
    fn a_whole_chat_answer_has_openais_shape() {
        let choice = Choice { text: "hi".into(), finish_reason: "stop" };
        assert_eq!(
            parsed(&head(Endpoint::Chat).whole(&[choice], USAGE)),
            json!({
                "id": "chatcmpl-r1", "object": "chat.completion", "created": 5, "model": "tiny",
                "choices": [{
                    "index": 0, "message": {"role": "assistant", "content": "hi"},
                    "logprobs": null, "finish_reason": "stop",
                }],
                "usage": {
                    "prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            })
        );
    }

    #[test]
    fn chat_chunks_hold_no_null_members_where_openai_omits_them() {
        let head = head(Endpoint::Chat);
        let choice = |text: &str| parsed(text)["choices"][0].clone();
        assert_eq!(
            choice(&head.first_chunk(0).unwrap()),
            json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null})
        );
        assert_eq!(
            choice(&head.text_chunk(0, "a")),
            json!({"index": 0, "delta": {"content": "a"}, "finish_reason": null})
        );
        assert_eq!(
            choice(&head.finish_chunk(0, "length")),
            json!({"index": 0, "delta": {}, "finish_reason": "length"})
        );
        assert!(parsed(&head.text_chunk(0, "a")).get("usage").is_none());
    }

    #[test]
    fn the_usage_chunk_has_no_choices() {
        let chunk = parsed(&head(Endpoint::Completion).usage_chunk(USAGE));
        assert_eq!(chunk["choices"], json!([]));
        assert_eq!(chunk["usage"]["total_tokens"], 12);
    }

    #[test]
    fn completion_chunks_are_text_completions() {
        let head = head(Endpoint::Completion);
        assert!(head.first_chunk(0).is_none());
        let chunk = parsed(&head.finish_chunk(1, "stop"));
        assert_eq!(
            (chunk["object"].as_str(), chunk["id"].as_str()),
            (Some("text_completion"), Some("cmpl-r1"))
        );
        assert_eq!(
            chunk["choices"][0],
            json!({"index": 1, "text": "", "logprobs": null, "finish_reason": "stop"})
        );
    }
}
