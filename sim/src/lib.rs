//! The whole mesh in one thread and in virtual time.
//!
//! ```text
//!  clients ─HTTP─▶ router ═QUIC═ decode nodes ═QUIC═ prefill nodes     the real ones
//!     │              │                │                    │
//!  oracle         machine          machine              machine        simulated
//!                    └──── network: delay, loss, cuts ────┘
//! ```
//!
//! Router, nodes, wire and QUIC are those of a running mesh; only the machines
//! under them, the packets between them, the engines' arithmetic and the clock
//! are not. Everything that is drawn follows from one seed, so a run that fails
//! fails again.
//!
//! Job: run seeds under named mixes of faults and check every answer, every
//! bound and what is left at the end. Not its job: speed; real machines.

mod answer;
mod campaign;
mod checker;
mod client;
mod faults;
mod mesh;
mod mix;
mod network;
mod oracle;
mod run;
mod workload;

pub use campaign::{Campaign, SimArgs, Totals, command};
pub use checker::Findings;
pub use host::Bug;
pub use mix::{Fault, Mix};
pub use run::{Options, simulate};

#[expect(clippy::disallowed_methods, reason = "the simulation reads its own clock")]
fn now() -> std::time::Instant {
    host::now()
}
