//! Request bodies and files, for `fuzz/`: everywhere else they come through the
//! HTTP server or from disk.

use settings::SettingsError;

use crate::RouterConfig;
use crate::chat_template::ChatTemplate;
use crate::openai::{self, ApiError, Fields, Messages, Params, PromptInput};
use crate::policy::{self, Policy};

/// What a body asks for, as far as it has bounds.
pub struct Asked {
    /// How to choose tokens.
    pub sampling: kv_transfer::Sampling,
    /// Tokens to generate at most.
    pub max_tokens: Option<u32>,
    /// Strings that end the answer.
    pub stops: Vec<String>,
    /// Answers per prompt.
    pub choices: u32,
    /// Prompts that are texts: the rendered messages of a chat are one.
    pub texts: Vec<String>,
    /// Prompts that are token ids.
    pub tokens: Vec<Vec<u32>>,
}

/// The status and message of a refusal.
pub type Refusal = (u16, String);

/// The prompt of a completion must be below `vocabulary_tokens`.
pub fn completion(body: &[u8], vocabulary_tokens: usize) -> Result<Asked, Refusal> {
    let read = || {
        let fields = Fields::parse(body)?;
        let mut asked = asked(Params::read(&fields)?);
        for prompt in openai::prompts(&fields, vocabulary_tokens)? {
            match prompt {
                PromptInput::Text(text) => asked.texts.push(text),
                PromptInput::Tokens(tokens) => {
                    asked.tokens.push(tokens.iter().map(|token| token.0).collect())
                }
            }
        }
        Ok(asked)
    };
    read().map_err(refusal)
}

/// The messages go through the chat template `source`.
pub fn chat(body: &[u8], source: &str) -> Result<Asked, Refusal> {
    let read = || {
        let fields = Fields::parse(body)?;
        let mut asked = asked(Params::read(&fields)?);
        let messages = Messages::read(&fields)?;
        let template = ChatTemplate::new(source, "<s>".into(), "</s>".into()).map_err(ApiError::malformed)?;
        let rendered = template.render(&messages.messages, &messages.template_variables);
        asked.texts.push(rendered.map_err(ApiError::malformed)?);
        Ok(asked)
    };
    read().map_err(refusal)
}

/// Objects and arrays that a body announces.
pub fn containers(body: &[u8]) -> usize {
    openai::containers(body)
}

/// A policy file.
pub fn policy(text: &str) -> Result<Policy, SettingsError> {
    policy::file::parse(text)
}

/// The router's configuration file.
pub fn config(text: &str) -> Result<RouterConfig, SettingsError> {
    RouterConfig::parse(text)
}

fn asked(params: Params) -> Asked {
    let Params { sampling, max_tokens, stops, choices, .. } = params;
    Asked { sampling, max_tokens, stops, choices, texts: Vec::new(), tokens: Vec::new() }
}

fn refusal(error: ApiError) -> Refusal {
    (error.status, error.message().to_owned())
}
