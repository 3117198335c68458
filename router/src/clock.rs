//! The only places that read clocks and draw randomness.
#![expect(clippy::disallowed_methods, reason = "the shell's clock, dates, seeds and request ids")]

use std::time::Instant;

pub(crate) fn now() -> Instant {
    host::now()
}

pub(crate) fn unix_seconds() -> u64 {
    host::unix_time().as_secs()
}

pub(crate) fn random() -> u64 {
    host::random()
}
