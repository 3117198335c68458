//! Measures what a short request suffers when it arrives behind a long one, on *any*
//! OpenAI-compatible server, and writes evidence files that others can check.
//!
//! ```text
//!  inverse_arrival ── the procedure: who is sent when ──┬─ schedule  arms in ABBA order      (pure)
//!        │                                              ├─ prompt    salted texts from a seed (pure)
//!        ▼                                              └─ calibrate words ↔ tokens           (pure)
//!     client ── one streaming request → Timeline ───────┬─ sse       bytes → events           (pure)
//!        │                                              └─ chunk     event → what it means    (pure)
//!        ▼
//!     estimate ── timelines → slowdown, h, gaps (pure) ─── stats     medians                  (pure)
//!        │
//!        ▼
//!     record ── raw.jsonl, summary.json, README.md ─────── report    tables as text           (pure)
//! ```
//!
//! Not here: anything that knows how a server works inside. The only thing said to Segue alone is
//! the request header `x-segue-prefill`, which picks the arm.

mod calibrate;
mod chunk;
mod client;
mod date;
mod estimate;
#[doc(hidden)]
pub mod fuzzing;
mod inverse_arrival;
mod prompt;
mod record;
mod report;
mod schedule;
mod sse;
mod stats;
mod timeline;

pub use inverse_arrival::{InverseArrivalArgs, inverse_arrival};
pub use schedule::Arm;

/// The suites of `segue bench`.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// How long does a short request wait that arrives behind long ones?
    InverseArrival(Box<InverseArrivalArgs>),
}

/// Runs one suite to its end, or until Ctrl-C.
pub async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::InverseArrival(args) => inverse_arrival(*args).await,
    }
}
