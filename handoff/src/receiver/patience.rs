//! When silence counts as a stall.
//!
//! There is no deadline for a prompt: a long one takes as long as it takes.
//! What is bounded is silence, in multiples of the longest gap that this
//! handoff has shown: prefill nodes give signs of life while their engine moves,
//! also while a prompt is queued, computes a long chunk or was put aside for a
//! shorter one. A second clock, of minutes, bounds the time without growth, in
//! case that a peer talks and does not work.

use std::time::{Duration, Instant};

/// Chunks get slower as a prompt gets longer, and a busy peer hiccups: four
/// times the longest gap so far is a stall and not a slow chunk.
const GAPS: u32 = 4;

/// Without a bound, a peer that answers just before each deadline would
/// quadruple it each time.
const GROWTH_MAX: u32 = 16;

/// Shorter prompts may pass this one in the queue, so its start may come much
/// later than forecast.
const FORECAST_FACTOR: u32 = 4;

/// Admission never queues for longer; a peer's forecast beyond it is nonsense.
const FORECAST_MAX: Duration = Duration::from_secs(3600);

/// Time without growth allowed beyond the forecast, in shortest stalls: minutes,
/// because giving up a place in a queue that moves is worse than a late fallback.
const GROWTH_STALLS: u32 = 320;

/// Measures progress and says when it has been missing for too long.
#[derive(Debug)]
pub(super) struct Patience {
    stall_min: Duration,
    longest_gap: Duration,
    last_word: Instant,
    /// Work on this prompt was seen.
    started: bool,
    accepted: bool,
    /// Until then there must be more of it; `None` if beyond reckoning.
    grow_by: Option<Instant>,
}

impl Patience {
    pub(super) fn new(now: Instant, stall_min: Duration) -> Self {
        let grow_by = now.checked_add(stall_min.saturating_mul(GROWTH_STALLS));
        Self {
            stall_min,
            longest_gap: Duration::ZERO,
            last_word: now,
            started: false,
            accepted: false,
            grow_by,
        }
    }

    /// The sender took the request and expects to start on it after a while.
    pub(super) fn accepted(&mut self, now: Instant, expected_start: Duration) {
        self.alive(now);
        // Only the first forecast counts: a peer could renew it for ever.
        if !self.started && !std::mem::replace(&mut self.accepted, true) {
            let queue = expected_start.min(FORECAST_MAX) * FORECAST_FACTOR;
            let slack = self.stall_min.saturating_mul(GROWTH_STALLS);
            self.grow_by = now.checked_add(queue.saturating_add(slack));
        }
    }

    /// A sign of life.
    pub(super) fn alive(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last_word);
        self.longest_gap = self.longest_gap.max(gap);
        self.last_word = self.last_word.max(now);
    }

    /// Tokens were computed or rows arrived.
    pub(super) fn worked(&mut self, now: Instant) {
        self.started = true;
        self.grow_by = now.checked_add(self.stall_min.saturating_mul(GROWTH_STALLS));
        self.alive(now);
    }

    /// When silence becomes a stall; `None` if never (a stall of centuries).
    pub(super) fn deadline(&self) -> Option<Instant> {
        let most = self.stall_min.saturating_mul(GROWTH_MAX);
        let wait = self.longest_gap.saturating_mul(GAPS).min(most).max(self.stall_min);
        let silence = self.last_word.checked_add(wait);
        [silence, self.grow_by].into_iter().flatten().min()
    }
}
