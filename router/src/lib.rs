//! The router: takes OpenAI-compatible requests, decides where each is
//! prefilled and decoded, and turns tokens into text.
//!
//! ```text
//!  HTTP ─▶ openai/ (checked request) ─▶ chat_template, tokens, block hashes
//!            policy/ (pure) ◀── registry (pure) ◀── nodes: Hello, Status, Warm
//!            request ──Generate──▶ decode node ──RequestEvent──▶ detokenize, stop
//!  HTTP ◀─ openai/ (response or SSE)
//! ```
//!
//! Job: validation, placement with a named reason, the life of one request
//! (another node before the first token, the same stream continued after it),
//! the OpenAI surface, and what operators see of the mesh.
//! Not its job: tensors, KV bytes, schedules of the nodes.

mod answer;
mod app;
mod calendar;
mod chat_template;
mod clock;
mod config;
mod detokenize;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod membership;
mod metrics;
mod openai;
pub mod policy;
mod prefix_view;
mod python_json;
mod registry;
mod request;
mod shell;
mod status;
mod stop;
mod text;

pub use config::{ModelIdentity, RouterConfig};
pub use error::RouterError;
pub use shell::{Router, RouterCore, run};
