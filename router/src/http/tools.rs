//! `/tokenize` and `/detokenize`, in vLLM's and in llama-server's words.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use serde_json::json;

use super::generate::{blocking, chat_prompt, read_tokens, whole_body};
use super::reply;
use crate::app::App;
use crate::detokenize::Detokenizer;
use crate::openai::{ApiError, Fields, Messages, PromptInput, text_or_tokens};

pub(super) async fn tokenize(State(app): State<Arc<App>>, body: Result<Bytes, BytesRejection>) -> Response {
    answer(app, body, |app, fields| {
        let tokens = match text_field(&fields)? {
            Some(text) => {
                let add_bos = fields.boolean("add_special_tokens", true)?;
                app.vocabulary.tokenize(text, add_bos, true)
            }
            None => read_tokens(app, &chat_prompt(app, &Messages::read(&fields)?)?),
        };
        let ids: Vec<_> = tokens.iter().map(|token| token.0).collect();
        Ok(json!({ "count": ids.len(), "max_model_len": app.context_tokens(), "tokens": ids }).to_string())
    })
    .await
}

pub(super) async fn detokenize(State(app): State<Arc<App>>, body: Result<Bytes, BytesRejection>) -> Response {
    answer(app, body, |app, fields| {
        let Some(value) = fields.value("tokens") else {
            return Err(ApiError::invalid("tokens", "'tokens' is missing"));
        };
        let tokens = match value.as_array().map(Vec::as_slice) {
            Some([]) => Vec::new(),
            _ => match text_or_tokens("tokens", value, app.vocabulary.size())? {
                PromptInput::Tokens(tokens) => tokens,
                PromptInput::Text(_) => {
                    return Err(ApiError::invalid(
                        "tokens",
                        "'tokens' is a string, expected an array of token ids",
                    ));
                }
            },
        };
        let mut detokenizer = Detokenizer::default();
        let mut text: String =
            tokens.iter().map(|token| detokenizer.push(&app.vocabulary.piece(*token, true))).collect();
        text.push_str(detokenizer.finish());
        Ok(json!({ "prompt": text, "content": text }).to_string())
    })
    .await
}

fn text_field(fields: &Fields) -> Result<Option<&str>, ApiError> {
    match fields.string("prompt")? {
        Some(text) => Ok(Some(text)),
        None => fields.string("content"),
    }
}

async fn answer(
    app: Arc<App>,
    body: Result<Bytes, BytesRejection>,
    work: impl FnOnce(&App, Fields) -> Result<String, ApiError> + Send + 'static,
) -> Response {
    let body = match whole_body(&app, body) {
        Ok(body) => body,
        Err(error) => return reply::error(&error),
    };
    match blocking(&app, body.len(), move |app| work(app, Fields::parse(&body)?)).await {
        Ok(body) => reply::json(StatusCode::OK, body),
        Err(error) => reply::error(&error),
    }
}
