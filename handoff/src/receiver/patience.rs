//! When silence counts as a stall.
//!
//! There is no deadline for a prompt: a long one takes as long as it takes.
//! What is bounded is the time without progress, in multiples of the longest
//! gap that this handoff has shown. While the prompt is queued, signs of life
//! are progress, but not without end: an engine that hangs in its first chunk
//! looks just like a long queue.

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

/// Queueing allowed beyond the forecast, in shortest stalls: minutes, because
/// giving up a place in a queue that moves is worse than a late fallback.
const QUEUE_STALLS: u32 = 64;

/// Measures progress and says when it has been missing for too long.
#[derive(Debug)]
pub(super) struct Patience {
    stall_min: Duration,
    longest_gap: Duration,
    last_progress: Instant,
    /// Work on this prompt was seen.
    started: bool,
    /// Until then it must have been; `None` after that, or if beyond reckoning.
    start_by: Option<Instant>,
}

impl Patience {
    pub(super) fn new(now: Instant, stall_min: Duration) -> Self {
        let start_by = now.checked_add(stall_min.saturating_mul(QUEUE_STALLS));
        Self { stall_min, longest_gap: Duration::ZERO, last_progress: now, started: false, start_by }
    }

    /// The sender took the request and expects to start on it after a while.
    pub(super) fn accepted(&mut self, now: Instant, expected_start: Duration) {
        self.alive(now);
        if !self.started {
            let queue = expected_start.min(FORECAST_MAX) * FORECAST_FACTOR;
            let slack = self.stall_min.saturating_mul(QUEUE_STALLS);
            self.start_by = now.checked_add(queue.saturating_add(slack));
        }
    }

    /// A sign of life: progress as long as the prompt may be queued.
    pub(super) fn alive(&mut self, now: Instant) {
        if !self.started {
            self.progress(now);
        }
    }

    /// Tokens were computed or rows arrived.
    pub(super) fn worked(&mut self, now: Instant) {
        self.started = true;
        self.start_by = None;
        self.progress(now);
    }

    /// When silence becomes a stall; `None` if never (a stall of centuries).
    pub(super) fn deadline(&self) -> Option<Instant> {
        let most = self.stall_min.saturating_mul(GROWTH_MAX);
        let wait = self.longest_gap.saturating_mul(GAPS).min(most).max(self.stall_min);
        let silence = self.last_progress.checked_add(wait);
        [silence, self.start_by].into_iter().flatten().min()
    }

    fn progress(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last_progress);
        self.longest_gap = self.longest_gap.max(gap);
        self.last_progress = self.last_progress.max(now);
    }
}
