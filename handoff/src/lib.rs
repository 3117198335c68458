//! The prefill→decode handoff as two values: a [`Sender`] on the prefill node
//! and a [`Receiver`] on the decode node.
//!
//! ```text
//!  events in ──▶ handle(now, event) ──▶ poll_action() ──▶ orders for the shell
//!                                       next_deadline() ─▶ when to wake up
//! ```
//!
//! Job: what may be sent, stored, installed and freed, and when a handoff ends.
//! Not its job: sockets, clocks, codecs, engines.

#[cfg(test)]
mod pair_tests;
mod receiver;
mod sender;
#[cfg(test)]
mod testing;

pub use receiver::{
    FrameFacts, FrameVerdict, Receiver, ReceiverAction, ReceiverEvent, ReceiverOutcome, ReceiverPlan,
    ReceiverState,
};
pub use sender::{Sender, SenderAction, SenderEvent, SenderOutcome, SenderPlan, SenderState};

/// A bug in the shell: an event that the present state does not allow.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event} is not allowed in state {state}")]
pub struct HandoffError {
    /// Name of the state.
    pub state: &'static str,
    /// Name of the event.
    pub event: &'static str,
}
