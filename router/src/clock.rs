//! The only places that read clocks and draw randomness.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[expect(clippy::disallowed_methods, reason = "the shell's clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

#[expect(clippy::disallowed_methods, reason = "the date in responses and templates")]
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

#[expect(clippy::disallowed_methods, reason = "seeds and request ids that the client did not choose")]
pub(crate) fn random() -> u64 {
    rand::Rng::random(&mut rand::rng())
}
