//! Reads a response as a strict client does and compares it with the oracle.

use serde_json::Value;

use crate::oracle::Expected;

/// What the bytes of a response say. `Err` names what a client must never see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    /// The answer's text so far.
    pub(crate) text: String,
    /// Why it ended, if it has.
    pub(crate) finish_reason: Option<String>,
    /// Prompt, completion and cached tokens, if told.
    pub(crate) usage: Option<[u64; 3]>,
    /// The error in the stream, if there is one.
    pub(crate) error: Option<String>,
    /// Whether `[DONE]` came.
    pub(crate) done: bool,
    roles: usize,
}

/// Reads server-sent events; the last one may be cut off.
pub(crate) fn events(bytes: &[u8], complete: bool) -> Result<Read, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("not UTF-8: {error}"))?;
    let mut read = Read::default();
    let mut parts: Vec<_> = text.split("\n\n").collect();
    let rest = parts.pop().unwrap_or_default();
    if complete && !rest.is_empty() {
        return Err(format!("the stream ends within an event: {rest:?}"));
    }
    for part in parts {
        if part.starts_with(':') {
            continue;
        }
        let data = part.strip_prefix("data: ").ok_or_else(|| format!("not an event: {part:?}"))?;
        if read.done || read.error.is_some() {
            return Err(format!("an event after the end: {data}"));
        }
        read.event(data)?;
    }
    Ok(read)
}

/// Reads a whole answer.
pub(crate) fn whole(bytes: &[u8]) -> Result<Read, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| format!("not JSON: {error}"))?;
    let choice = &value["choices"][0];
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str());
    Ok(Read {
        text: text.ok_or_else(|| format!("no text in {value}"))?.to_owned(),
        finish_reason: choice["finish_reason"].as_str().map(str::to_owned),
        usage: usage(&value["usage"]),
        done: true,
        ..Read::default()
    })
}

/// Whether a refusal is one that a client can act on; returns its message.
pub(crate) fn check_refusal(status: u16, body: &[u8], retry_after: bool) -> Result<String, String> {
    let value: Value = serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))?;
    let Some(message) = value["error"]["message"].as_str() else {
        return Err(format!("status {status} without a message: {value}"));
    };
    // Of a mistake in a field OpenAI states none.
    if status >= 500 && !value["error"]["code"].is_string() {
        return Err(format!("status {status} without a code: {value}"));
    }
    if status == 503 && !retry_after {
        return Err(format!("status 503 without Retry-After: {message}"));
    }
    Ok(message.to_owned())
}

fn usage(value: &Value) -> Option<[u64; 3]> {
    let cached = value["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    Some([value["prompt_tokens"].as_u64()?, value["completion_tokens"].as_u64()?, cached])
}

impl Read {
    fn event(&mut self, data: &str) -> Result<(), String> {
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let value: Value = serde_json::from_str(data).map_err(|error| format!("{error} in {data}"))?;
        if !value["error"].is_null() {
            self.error = Some(value["error"]["message"].as_str().unwrap_or("?").to_owned());
            return Ok(());
        }
        if let Some(told) = usage(&value["usage"])
            && self.usage.replace(told).is_some()
        {
            return Err("usage came twice".to_owned());
        }
        let Some(choice) = value["choices"].get(0) else { return Ok(()) };
        if !choice["delta"]["role"].is_null() {
            self.roles += 1;
        }
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !text.is_empty() && self.finish_reason.is_some() {
            return Err(format!("text after the finish reason: {data}"));
        }
        self.text += text;
        if let Some(reason) = choice["finish_reason"].as_str()
            && self.finish_reason.replace(reason.to_owned()).is_some()
        {
            return Err("two finish reasons".to_owned());
        }
        Ok(())
    }

    /// Whether this is the right answer, whole.
    pub(crate) fn check(&self, expected: &Expected, chat_stream: bool) -> Result<(), String> {
        self.check_begun(expected)?;
        if self.text != expected.text {
            return Err(format!("text {:?} is not the whole of {:?}", self.text, expected.text));
        }
        if self.finish_reason.as_deref() != Some(expected.finish_reason) {
            return Err(format!("finish reason {:?}, not {:?}", self.finish_reason, expected.finish_reason));
        }
        if !self.done {
            return Err("no [DONE]".to_owned());
        }
        if chat_stream && self.roles != 1 {
            return Err(format!("{} chunks with a role", self.roles));
        }
        let Some([prompt, completion, cached]) = self.usage else { return Err("no usage".to_owned()) };
        if prompt != expected.prompt_tokens || completion != expected.completion_tokens || cached > prompt {
            return Err(format!("usage {:?} for {expected:?}", self.usage));
        }
        Ok(())
    }

    /// Whether this can be the beginning of the right answer.
    pub(crate) fn check_begun(&self, expected: &Expected) -> Result<(), String> {
        if let Some(reason) = &self.finish_reason
            && (self.text != expected.text || reason != expected.finish_reason)
        {
            return Err(format!("finish reason {reason:?} after {:?} of {expected:?}", self.text));
        }
        if expected.text.starts_with(&self.text) {
            return Ok(());
        }
        Err(format!("text {:?} does not begin {:?}", self.text, expected.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected() -> Expected {
        Expected { text: "ab".to_owned(), finish_reason: "stop", prompt_tokens: 3, completion_tokens: 2 }
    }

    fn stream(data: &[&str]) -> Vec<u8> {
        data.iter().map(|data| format!("data: {data}\n\n")).collect::<String>().into_bytes()
    }

    const ROLE: &str = r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
    const A: &str = r#"{"choices":[{"delta":{"content":"a"}}]}"#;
    const B: &str = r#"{"choices":[{"delta":{"content":"b"}}]}"#;
    const STOP: &str = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
    const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#;

    fn judge(data: &[&str]) -> Result<(), String> {
        events(&stream(data), true)?.check(&expected(), true)
    }

    #[test]
    fn the_right_stream_passes_and_every_other_is_told_apart() {
        assert_eq!(judge(&[ROLE, A, B, STOP, USAGE, "[DONE]"]), Ok(()));
        for (wrong, word) in [
            (&[ROLE, A, STOP, USAGE, "[DONE]"][..], "finish reason"),
            (&[ROLE, A, USAGE, "[DONE]"], "not the whole"),
            (&[ROLE, A, A, STOP, USAGE, "[DONE]"], "finish reason"),
            (&[ROLE, A, A, USAGE, "[DONE]"], "does not begin"),
            (&[ROLE, A, B, USAGE, "[DONE]"], "finish reason"),
            (&[ROLE, A, B, STOP, STOP, USAGE, "[DONE]"], "two finish"),
            (&[ROLE, A, STOP, B, USAGE, "[DONE]"], "after the finish"),
            (&[ROLE, ROLE, A, B, STOP, USAGE, "[DONE]"], "role"),
            (&[A, B, STOP, USAGE, "[DONE]"], "role"),
            (&[ROLE, A, B, STOP, USAGE], "[DONE]"),
            (&[ROLE, A, B, STOP, USAGE, "[DONE]", "[DONE]"], "after the end"),
            (&[ROLE, A, B, STOP, "[DONE]"], "usage"),
        ] {
            let error = judge(wrong).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_stream_that_was_cut_off_is_judged_by_what_came() {
        let bytes = stream(&[ROLE, A]);
        let read = events(&bytes[..bytes.len() - 3], false).unwrap();
        assert_eq!(read.check_begun(&expected()), Ok(()));
        assert!(events(&bytes[..bytes.len() - 3], true).is_err());
    }
}
