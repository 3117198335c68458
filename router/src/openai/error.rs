//! Errors in OpenAI's shape.

use std::borrow::Cow;

use serde::Serialize;

/// A refusal or failure as the client sees it. Never holds prompt text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: u16,
    message: String,
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
    /// Seconds until a new try makes sense.
    pub(crate) retry_after: Option<u32>,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

/// Longer than any model's name that is not a mistake.
const MODEL_CHARS_SHOWN: usize = 100;

/// Slots free up within seconds.
const RETRY_SECONDS: u32 = 2;

impl ApiError {
    /// 400 about the field `param`.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, INVALID, message) }
    }

    /// 400 about the body as a whole.
    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(400, INVALID, message)
    }

    /// 400: the field works elsewhere, but not here yet.
    pub(crate) fn unsupported(param: &str) -> Self {
        let message = format!("'{param}' is not supported by this server");
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 400: prompt and answer do not fit the context.
    pub(crate) fn context(prompt: usize, max_tokens: Option<u32>, limit: usize) -> Self {
        let asked = match max_tokens {
            Some(answer) => {
                let sum = prompt as u64 + u64::from(answer);
                format!("the prompt has {prompt} tokens and max_tokens is {answer}, together {sum}")
            }
            None => format!("the prompt has {prompt} tokens and leaves no room for an answer"),
        };
        let message = format!("This model's maximum context length is {limit} tokens, but {asked}.");
        Self { code: Some("context_length_exceeded"), ..Self::malformed(message) }
    }

    /// 404: no such model. The client's own word, escaped and cut: it may be anything.
    pub(crate) fn unknown_model(asked: &str, accepted: &[&str]) -> Self {
        let asked: String = asked.chars().take(MODEL_CHARS_SHOWN).collect();
        let message = format!("The model {asked:?} in 'model' does not exist; this server has {accepted:?}");
        let not_found = Self::new(404, INVALID, message);
        Self { code: Some("model_not_found"), param: Some("model".into()), ..not_found }
    }

    /// 404: no such route.
    pub(crate) fn unknown_route() -> Self {
        Self { code: Some("not_found"), ..Self::new(404, INVALID, "There is nothing at this path") }
    }

    /// 405.
    pub(crate) fn wrong_method() -> Self {
        let message = "This path exists, but not for this method";
        Self { code: Some("method_not_allowed"), ..Self::new(405, INVALID, message) }
    }

    /// 408.
    pub(crate) fn body_too_slow(limit: std::time::Duration) -> Self {
        let message = format!("No byte of the request body came for {} s", limit.as_secs());
        Self { code: Some("request_timeout"), ..Self::new(408, INVALID, message) }
    }

    /// 413.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        let message = format!("The request body is larger than {limit} bytes");
        Self { code: Some("request_too_large"), ..Self::new(413, INVALID, message) }
    }

    /// 503 with `Retry-After`.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        let unavailable = Self::new(503, SERVER, message);
        Self { code: Some(code), retry_after: Some(RETRY_SECONDS), ..unavailable }
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self { code: Some("internal_error"), ..Self::new(500, SERVER, message) }
    }

    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, param: None, code: None, retry_after: None }
    }

    /// What went wrong, for people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The machine-readable reason, if there is one.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// The JSON body, also the last event of a stream that breaks off.
    pub(crate) fn body(&self) -> String {
        let error = Shape {
            message: Cow::Borrowed(&self.message),
            kind: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        serde_json::to_string(&Body { error }).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Body<'a> {
    error: Shape<'a>,
}

#[derive(Serialize)]
struct Shape<'a> {
    message: Cow<'a, str>,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}
