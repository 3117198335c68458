//! The largest of recent values: a figure that rises at once and is forgotten
//! after a while.

use std::time::{Duration, Instant};

/// A value counts for at least this long and at most twice as long.
const WINDOW: Duration = Duration::from_secs(10);

/// Largest value of the current and the previous window.
#[derive(Debug, Default)]
pub struct RecentMax {
    window_start: Option<Instant>,
    current: u64,
    previous: u64,
}

impl RecentMax {
    /// Takes a value in and returns the largest recent one.
    pub fn record(&mut self, now: Instant, value: u64) -> u64 {
        let start = *self.window_start.get_or_insert(now);
        let age = now.saturating_duration_since(start);
        if age >= WINDOW {
            self.previous = if age >= 2 * WINDOW { 0 } else { self.current };
            self.current = 0;
            self.window_start = Some(now);
        }
        self.current = self.current.max(value);
        self.current.max(self.previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "an arbitrary start of virtual time")]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_peak_is_remembered_for_a_while_and_then_forgotten() {
        let (mut max, start) = (RecentMax::default(), start());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(max.record(at(0), 9), 9);
        assert_eq!(max.record(at(5), 1), 9);
        assert_eq!(max.record(at(11), 2), 9);
        assert_eq!(max.record(at(22), 3), 3);
    }
}
