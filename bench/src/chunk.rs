//! What one event of a chat stream says.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The server's own token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// `None` when the server does not report it.
    pub(crate) cached_tokens: Option<u64>,
}

/// One event, reduced to what the measurement needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StreamEvent {
    /// `[DONE]`.
    Done,
    /// The server gave up in mid-stream.
    Error(String),
    /// A chunk; several things can be true of the same one.
    Chunk { role: bool, content: Content, finish_reason: Option<String>, usage: Option<Usage> },
}

/// What a chunk has of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// No field for it, or the role or finish reason only.
    None,
    /// An empty text beside nothing else: a token was computed that has no text of its own, such as
    /// a part of a character.
    Empty,
    /// Text.
    Text,
}

/// Reads the `data` of one event. Text that is not JSON is an error of the server.
pub(crate) fn read_event(data: &str) -> StreamEvent {
    if data.trim() == "[DONE]" {
        return StreamEvent::Done;
    }
    let Ok(value) = serde_json::from_str::<Value>(data) else {
        return StreamEvent::Error(format!("not JSON: {}", clip(data)));
    };
    if let Some(error) = value.get("error").filter(|error| !error.is_null()) {
        return StreamEvent::Error(error_message(error));
    }
    let choice = &value["choices"][0];
    let delta = &choice["delta"];
    // A reasoning model's first token is a reasoning token: the user has waited until then.
    let texts = [&delta["content"], &delta["reasoning_content"], &delta["reasoning"], &choice["text"]];
    let finish_reason = choice["finish_reason"].as_str().map(str::to_owned);
    let role = delta["role"].is_string();
    let longest = texts.iter().filter_map(|text| text.as_str()).map(str::len).max();
    StreamEvent::Chunk {
        role,
        content: match longest {
            Some(1..) => Content::Text,
            Some(0) if !role && finish_reason.is_none() => Content::Empty,
            _ => Content::None,
        },
        finish_reason,
        usage: read_usage(&value["usage"]),
    }
}

/// The counts of a `usage` object, if it is one.
pub(crate) fn read_usage(usage: &Value) -> Option<Usage> {
    Some(Usage {
        prompt_tokens: usage["prompt_tokens"].as_u64()?,
        completion_tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
    })
}

/// The message of an OpenAI-shaped error, or whatever there is instead.
pub(crate) fn error_message(error: &Value) -> String {
    match error.get("message").and_then(Value::as_str).or(error.as_str()) {
        Some(message) => clip(message),
        None => clip(&error.to_string()),
    }
}

/// Shortens a server's words to one line of a table.
pub(crate) fn clip(text: &str) -> String {
    const CHARS_MAX: usize = 300;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= CHARS_MAX {
        return line;
    }
    line.chars().take(CHARS_MAX).chain("…".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(data: &str) -> (bool, Content, Option<String>, Option<Usage>) {
        match read_event(data) {
            StreamEvent::Chunk { role, content, finish_reason, usage } => {
                (role, content, finish_reason, usage)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_role_chunk_is_not_content() {
        let (role, content, ..) = chunk(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#);
        assert_eq!((role, content), (true, Content::None));
        let (role, content, ..) = chunk(r#"{"choices":[{"delta":{"role":"assistant","content":null}}]}"#);
        assert_eq!((role, content), (true, Content::None));
    }

    #[test]
    fn an_empty_text_by_itself_is_a_token_without_text() {
        for (data, content) in [
            (r#"{"choices":[{"delta":{"content":""},"finish_reason":null}]}"#, Content::Empty),
            (r#"{"choices":[{"text":""}]}"#, Content::Empty),
            (r#"{"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}"#, Content::None),
            (r#"{"choices":[{"delta":{}}]}"#, Content::None),
        ] {
            assert_eq!(chunk(data).1, content, "{data}");
        }
    }

    #[test]
    fn content_reasoning_and_completion_text_are_content() {
        for data in [
            r#"{"choices":[{"delta":{"content":"a"}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"a"}}]}"#,
            r#"{"choices":[{"text":"a"}]}"#,
        ] {
            assert_eq!(chunk(data).1, Content::Text, "{data}");
        }
    }

    #[test]
    fn usage_chunk_without_choices_is_read() {
        let data = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,
                      "prompt_tokens_details":{"cached_tokens":2}}}"#;
        let usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: Some(2) };
        assert_eq!(chunk(data), (false, Content::None, None, Some(usage)));
    }

    #[test]
    fn errors_and_nonsense_are_errors_and_null_error_is_none() {
        assert_eq!(read_event(r#"{"error":{"message":"gone"}}"#), StreamEvent::Error("gone".into()));
        assert_eq!(read_event("<html>"), StreamEvent::Error("not JSON: <html>".into()));
        assert_eq!(chunk(r#"{"error":null,"choices":[{"delta":{"content":"a"}}]}"#).1, Content::Text);
        assert_eq!(read_event("[DONE]"), StreamEvent::Done);
    }
}
