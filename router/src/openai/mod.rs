//! The OpenAI surface: what a request may say, and what an answer looks like.
//!
//! Requests are checked by hand from JSON values, so that every refusal names
//! the field and what it expects. `null` is the same as absent. Fields that are
//! not known are ignored, except those that would change the meaning of the
//! answer: these are refused by name until they work.

mod error;
mod fields;
mod messages;
mod params;
mod prompts;
mod response;

pub(crate) use error::ApiError;
pub(crate) use fields::{Fields, containers};
pub(crate) use messages::Messages;
pub(crate) use params::Params;
pub(crate) use prompts::{PromptInput, prompts, text_or_tokens};
pub(crate) use response::{Choice, Endpoint, ResponseHead, Usage};
