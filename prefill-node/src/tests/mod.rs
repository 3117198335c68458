//! Tests of the whole node, with the fake engine and a scripted decode node.
#![expect(clippy::disallowed_methods, reason = "tests run in real time and start tasks")]

mod decode_side;
mod failures;
mod handoffs;
mod overtaking;
mod refusals;
mod scheduler;

use std::time::Instant;

/// A point in time for tests in virtual time.
pub(crate) fn now() -> Instant {
    Instant::now()
}
