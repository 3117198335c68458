//! What happened to one request, and when. All times count from the start of the run, so that
//! requests can be compared with each other.

use std::time::Duration;

use crate::chunk::Usage;

/// How a request ended. A refusal is an ordinary answer of a busy server, not a failure of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The stream came to its proper end.
    Completed,
    /// We closed the stream because enough had been seen.
    Stopped,
    /// Another status than 200.
    Refused { status: u16, message: String },
    /// No answer, a broken stream, or an error event in it.
    Failed(String),
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Completed => write!(f, "completed"),
            Self::Stopped => write!(f, "stopped"),
            Self::Refused { status, message } => write!(f, "refused with {status}: {message}"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

/// One request from its send to its end.
#[derive(Debug, Clone)]
pub(crate) struct Timeline {
    /// Just before the connection is opened: connecting counts.
    pub(crate) sent: Duration,
    pub(crate) headers: Option<Duration>,
    /// First byte of the body.
    pub(crate) first_byte: Option<Duration>,
    /// First chunk that names the role, which some servers send before they have computed anything.
    pub(crate) role: Option<Duration>,
    /// Arrival of the first chunk with text in it, and of every one after it that tells of a token,
    /// even if that token has no text of its own.
    pub(crate) contents: Vec<Duration>,
    pub(crate) ended: Duration,
    pub(crate) outcome: Outcome,
    pub(crate) usage: Option<Usage>,
    pub(crate) finish_reason: Option<String>,
    /// The value of `x-segue-route`.
    pub(crate) route: Option<String>,
}

impl Timeline {
    pub(crate) fn started(sent: Duration) -> Self {
        Self {
            sent,
            headers: None,
            first_byte: None,
            role: None,
            contents: Vec::new(),
            ended: sent,
            outcome: Outcome::Failed("not finished".to_owned()),
            usage: None,
            finish_reason: None,
            route: None,
        }
    }

    /// Time to the first text, the number that a user feels.
    pub(crate) fn ttft(&self) -> Option<Duration> {
        self.contents.first().map(|first| first.saturating_sub(self.sent))
    }

    /// `local` or `remote`, from the server's own word.
    pub(crate) fn route_name(&self) -> Option<&str> {
        self.route.as_deref().and_then(|route| route.split(';').next()).map(str::trim)
    }

    /// The largest pause in the text that touches the window. A pause that has not ended by the end
    /// of the window counts up to there. `None` if no text had arrived before the window's end.
    pub(crate) fn worst_gap(&self, window: Window) -> Option<Duration> {
        self.gaps(window).map(|(start, end)| end - start).max()
    }

    /// All pauses that touch the window, as (start, end).
    pub(crate) fn gaps(&self, window: Window) -> impl Iterator<Item = (Duration, Duration)> + '_ {
        let last = self.contents.last().copied();
        let open =
            last.filter(|&last| last < window.to && self.ended >= window.to).map(|last| (last, window.to));
        self.contents
            .windows(2)
            .map(|pair| (pair[0], pair[1]))
            .filter(move |&(start, end)| end > window.from && start < window.to)
            .chain(open)
    }
}

/// A stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) from: Duration,
    pub(crate) to: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn stream(contents: &[u64], ended: u64) -> Timeline {
        Timeline {
            contents: contents.iter().copied().map(ms).collect(),
            ended: ms(ended),
            ..Timeline::started(ms(0))
        }
    }

    fn window(from: u64, to: u64) -> Window {
        Window { from: ms(from), to: ms(to) }
    }

    #[test]
    fn only_gaps_that_touch_the_window_count() {
        let timeline = stream(&[0, 500, 510, 520, 600, 610, 2000], 2000);
        assert_eq!(timeline.worst_gap(window(505, 605)), Some(ms(80)));
        assert_eq!(timeline.worst_gap(window(505, 611)), Some(ms(1390)));
        assert_eq!(timeline.worst_gap(window(499, 505)), Some(ms(500)));
    }

    #[test]
    fn a_pause_that_is_still_open_counts_up_to_the_end_of_the_window() {
        assert_eq!(stream(&[10, 20], 900).worst_gap(window(0, 800)), Some(ms(780)));
    }

    #[test]
    fn a_stream_that_ended_inside_the_window_is_not_paused() {
        assert_eq!(stream(&[10, 20], 21).worst_gap(window(0, 800)), Some(ms(10)));
    }

    #[test]
    fn route_name_is_the_first_word_of_the_header() {
        let timeline = Timeline { route: Some("remote; rule=long".into()), ..Timeline::started(ms(0)) };
        assert_eq!(timeline.route_name(), Some("remote"));
    }
}
