//! The prefill node: computes prompts for decode nodes and streams their KV
//! blocks while it computes.
//!
//! ```text
//!  decode node ─PrefillRequest─▶ shell ──▶ request (checks) ──▶ work_queue ◀──▶ scheduler · residents
//!                                  │                                ▲
//!                                  ▼              rows of a chunk   │ next chunk
//!  decode node ◀═frames, messages═ handoff_task ◀───────────── engine_thread
//!                                    encode · frame_stream          step, export
//! ```
//!
//! Pure: `config`, `request`, `scheduler`, `residents`. The engine has a thread
//! of its own, and each handoff a task that owns its `handoff::Sender`.
//! Not its job: sampling, text, choosing nodes.

mod board;
mod config;
mod encode;
mod engine_thread;
mod frame_stream;
mod handoff_task;
mod request;
mod residents;
mod scheduler;
mod shell;
mod work_queue;

#[cfg(test)]
mod tests;

pub use config::PrefillConfig;
pub use shell::{NodeError, run};
