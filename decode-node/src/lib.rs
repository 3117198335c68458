//! The decode node: owns every request from prompt to last token.
//!
//! ```text
//!  router ─Generate─▶ request_task ──(local)──────────────┐
//!                        │                                ▼
//!                        └─(remote)─▶ handoff_task ─▶ engine thread: Runner
//!                                       ▲  frames          scheduler · slots · sampler
//!                                       └── prefill node
//! ```
//!
//! Pure: [`scheduler`], [`step_time`], [`slots`], [`sampler`]. The [`runner`]
//! drives an engine session with them, on a thread of its own so that the
//! network never waits for compute. The rest is shell.
//! Not its job: text, templates, choosing nodes.

mod config;
mod engine_thread;
#[cfg(test)]
mod fidelity_tests;
mod handoff_task;
mod peers;
mod request_task;
pub mod runner;
pub mod sampler;
pub mod scheduler;
mod sequence;
mod shell;
pub mod slots;
mod staging;
mod stats;
pub mod step_time;

pub use config::DecodeConfig;
pub use sequence::{NewSequence, Prefix, RequestKey, SequenceEvent};
pub use shell::{NodeError, run};
