//! The four forms of a completion's prompt.

use kv_block::Token;
use serde_json::Value;

use super::fields::{integer, mismatch};
use super::{ApiError, Fields};

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PromptInput {
    /// To be tokenised.
    Text(String),
    /// As is.
    Tokens(Vec<Token>),
}

const FIELD: &str = "prompt";
const EXPECTED: &str = "a string, an array of strings, an array of token ids or an array of such arrays";

/// Each prompt takes slots of its own.
const PROMPTS_MAX: usize = 64;

/// All prompts of a completion request, at least one, none empty. Token ids
/// must be below `vocabulary_tokens`.
pub(crate) fn prompts(fields: &Fields, vocabulary_tokens: usize) -> Result<Vec<PromptInput>, ApiError> {
    let prompts = match fields.value(FIELD) {
        None => return Err(ApiError::invalid(FIELD, "'prompt' is missing")),
        Some(Value::Array(items)) if items.iter().all(|item| item.is_string() || item.is_array()) => {
            same_kind(items)?;
            items
                .iter()
                .map(|item| text_or_tokens(FIELD, item, vocabulary_tokens))
                .collect::<Result<_, _>>()?
        }
        Some(value) => vec![text_or_tokens(FIELD, value, vocabulary_tokens)?],
    };
    if prompts.is_empty() {
        return Err(ApiError::invalid(FIELD, "'prompt' is empty"));
    }
    if prompts.len() > PROMPTS_MAX {
        let got = prompts.len();
        let message = format!("'prompt' has {got} prompts, allowed at most {PROMPTS_MAX}");
        return Err(ApiError::invalid(FIELD, message));
    }
    Ok(prompts)
}

fn same_kind(items: &[Value]) -> Result<(), ApiError> {
    match items.iter().find(|item| item.is_string() != items[0].is_string()) {
        Some(other) => Err(mismatch(FIELD, EXPECTED, other)),
        None => Ok(()),
    }
}

/// One prompt: a string, or an array of token ids.
pub(crate) fn text_or_tokens(
    field: &str,
    value: &Value,
    vocabulary_tokens: usize,
) -> Result<PromptInput, ApiError> {
    match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::invalid(field, format!("'{field}' is empty")))
        }
        Value::String(text) => Ok(PromptInput::Text(text.clone())),
        Value::Array(ids) if ids.is_empty() => Err(ApiError::invalid(field, format!("'{field}' is empty"))),
        Value::Array(ids) => {
            let token = |id| token(field, id, vocabulary_tokens);
            ids.iter().map(token).collect::<Result<_, _>>().map(PromptInput::Tokens)
        }
        other => Err(mismatch(field, EXPECTED, other)),
    }
}

fn token(field: &str, id: &Value, vocabulary_tokens: usize) -> Result<Token, ApiError> {
    let expected = format!("token ids from 0 to {}", vocabulary_tokens.saturating_sub(1));
    match integer(id).and_then(|id| u32::try_from(id).ok()) {
        Some(token) if (token as usize) < vocabulary_tokens => Ok(Token(token)),
        _ => Err(mismatch(field, expected, id)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(prompt: Value) -> Result<Vec<PromptInput>, String> {
        let fields = Fields::parse(json!({ "prompt": prompt }).to_string().as_bytes()).unwrap();
        prompts(&fields, 100).map_err(|error| error.message().to_owned())
    }

    fn text(text: &str) -> PromptInput {
        PromptInput::Text(text.into())
    }

    fn tokens(ids: &[u32]) -> PromptInput {
        PromptInput::Tokens(ids.iter().map(|id| Token(*id)).collect())
    }

    #[test]
    fn all_four_forms_are_read() {
        assert_eq!(read(json!("a")), Ok(vec![text("a")]));
        assert_eq!(read(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(read(json!([1, 2])), Ok(vec![tokens(&[1, 2])]));
        assert_eq!(read(json!([[1], [2, 3]])), Ok(vec![tokens(&[1]), tokens(&[2, 3])]));
    }

    #[test]
    fn empty_prompts_are_refused() {
        for prompt in [json!(""), json!([""]), json!([]), json!([[]]), json!(["a", ""])] {
            assert_eq!(read(prompt), Err("'prompt' is empty".into()));
        }
        assert_eq!(read(json!(null)), Err("'prompt' is missing".into()));
    }

    #[test]
    fn mixtures_and_wrong_ids_are_refused_by_name() {
        for prompt in [
            json!(["a", 1]),
            json!([1, "a"]),
            json!(["a", [1]]),
            json!([[1], "a"]),
            json!([100]),
            json!([-1]),
            json!([1.5]),
            json!([true]),
            json!({}),
            json!(7),
            json!([{"a": 1}]),
            json!([[["a"]]]),
        ] {
            let error = read(prompt.clone()).unwrap_err();
            assert!(error.contains("'prompt'"), "{prompt}: {error}");
        }
        assert!(read(json!(vec!["a"; 65])).unwrap_err().contains("at most 64"));
    }
}
