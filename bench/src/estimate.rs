//! From timelines to the numbers of one repetition.
//!
//! ```text
//!  long(s) sent        short sent                 last long's first token
//!      │◄── offset ──────►│◄───────── what is left ─────────►│
//!                         │◄─ TTFT_short ─►
//!
//!  slowdown = TTFT_short / TTFT_idle
//!  h        = (TTFT_short − TTFT_idle) / (T_long − offset)      0: not held up, 1: held up to the end
//! ```
//!
//! T_long is the TTFT of the long prompt that gets its first token last, and the offset is the
//! measured one. `h` above 1 means that the short request waited even beyond that.

use std::fmt;
use std::time::Duration;

use crate::schedule::Arm;
use crate::stats::median;
use crate::timeline::{Outcome, Timeline, Window};

/// The timelines of one repetition of one arm.
#[derive(Debug)]
pub(crate) struct Repetition {
    /// Short requests with nothing else to do.
    pub(crate) idle: Vec<Timeline>,
    /// The long prompts that were sent at once.
    pub(crate) longs: Vec<Timeline>,
    /// The short request behind them.
    pub(crate) short: Timeline,
    /// The stream that was running before they came.
    pub(crate) peer: Option<Timeline>,
    /// The same once more without the long prompts: such a stream, a short request beside it, and the
    /// stretch that counts: as long, and as long after the stream's start, as the disturbed one.
    pub(crate) undisturbed: Option<Undisturbed>,
}

/// What the long prompts are compared with.
#[derive(Debug)]
pub(crate) struct Undisturbed {
    pub(crate) peer: Timeline,
    pub(crate) short: Timeline,
    pub(crate) window: Window,
}

/// The numbers of one repetition, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) idle_ttft_s: f64,
    pub(crate) short_ttft_s: f64,
    pub(crate) slowdown: f64,
    pub(crate) h: f64,
    pub(crate) offset_s: f64,
    /// TTFT of each long prompt, earliest first.
    pub(crate) long_ttfts_s: Vec<f64>,
    pub(crate) peer: Option<PeerEstimate>,
}

/// What the running stream noticed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PeerEstimate {
    pub(crate) worst_gap_s: f64,
    pub(crate) median_gap_s: f64,
    /// Worst gap without the long prompts. `None` when that stream or its short request did not last.
    pub(crate) control_worst_gap_s: Option<f64>,
    /// The stream was over before the last long prompt had its first token.
    pub(crate) ended_early: bool,
}

/// Why a repetition says nothing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Invalid {
    Request { what: &'static str, outcome: Outcome },
    NoText { what: &'static str },
    LongTooFast { long_ttft_s: f64, offset_s: f64 },
    LongCached { cached: u64, prompt: u64 },
    OtherArm { asked: Arm, route: String },
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request { what, outcome } => write!(f, "{what} {outcome}"),
            Self::NoText { what } => write!(f, "{what} completed without any text"),
            Self::LongTooFast { long_ttft_s, offset_s } => write!(
                f,
                "long finished before offset (first token after {long_ttft_s:.3} s, short sent after \
                 {offset_s:.3} s); use a longer --long-tokens"
            ),
            Self::OtherArm { asked, route } => write!(
                f,
                "asked for the arm {}, but the server took {route:?}; a router obeys only with \
                 allow_route_override = true",
                asked.name()
            ),
            Self::LongCached { cached, prompt } => write!(
                f,
                "{cached} of {prompt} tokens of a fresh long prompt came from a cache; the prefill was not cold"
            ),
        }
    }
}

/// A few tokens of the chat template stand before the salt and may be cached by anyone. More than this
/// share of a long prompt is not template.
const CACHED_SHARE_MAX: f64 = 0.01;

/// Computes the numbers, or says why there are none.
pub(crate) fn estimate(repetition: &Repetition) -> Result<Estimate, Invalid> {
    let mut idle = Vec::new();
    for timeline in &repetition.idle {
        idle.push(ttft_s("idle short", timeline)?);
    }
    let idle_ttft_s = median(&idle).ok_or(Invalid::NoText { what: "idle short" })?;
    let mut long_ttfts_s = Vec::new();
    for timeline in &repetition.longs {
        long_ttfts_s.push(ttft_s("long", timeline)?);
        check_cold(timeline)?;
    }
    long_ttfts_s.sort_by(f64::total_cmp);
    let short_ttft_s = ttft_s("short behind long", &repetition.short)?;

    let window = disturbed_window(&repetition.longs).ok_or(Invalid::NoText { what: "long" })?;
    let offset_s = repetition.short.sent.saturating_sub(window.from).as_secs_f64();
    let long_ttft_s = (window.to - window.from).as_secs_f64();
    if long_ttft_s <= offset_s {
        return Err(Invalid::LongTooFast { long_ttft_s, offset_s });
    }
    Ok(Estimate {
        idle_ttft_s,
        short_ttft_s,
        slowdown: short_ttft_s / idle_ttft_s,
        h: (short_ttft_s - idle_ttft_s) / (long_ttft_s - offset_s),
        offset_s,
        long_ttfts_s,
        peer: repetition.peer.as_ref().and_then(|peer| peer_estimate(peer, window, repetition)),
    })
}

/// From the first send of a long prompt to the last first token of one. `None` if one got none.
pub(crate) fn disturbed_window(longs: &[Timeline]) -> Option<Window> {
    let from = longs.iter().map(|long| long.sent).min()?;
    let firsts: Option<Vec<Duration>> = longs.iter().map(|long| long.contents.first().copied()).collect();
    Some(Window { from, to: firsts?.into_iter().max()? })
}

/// Refuses a long prompt that was not computed afresh. Servers that do not report it pass.
pub(crate) fn check_cold(long: &Timeline) -> Result<(), Invalid> {
    let Some(usage) = long.usage else { return Ok(()) };
    let cached = usage.cached_tokens.unwrap_or(0);
    if cached as f64 > CACHED_SHARE_MAX * usage.prompt_tokens as f64 {
        return Err(Invalid::LongCached { cached, prompt: usage.prompt_tokens });
    }
    Ok(())
}

/// Refuses a control that was none: a router may ignore the header that names the arm.
pub(crate) fn check_arm(asked: Arm, repetition: &Repetition) -> Result<(), Invalid> {
    let wanted = match asked {
        Arm::Local => "local",
        Arm::Remote => "remote",
        Arm::Auto | Arm::Plain => return Ok(()),
    };
    for timeline in repetition.longs.iter().chain([&repetition.short]) {
        if timeline.route_name().is_some_and(|route| route != wanted) {
            return Err(Invalid::OtherArm { asked, route: timeline.route.clone().unwrap_or_default() });
        }
    }
    Ok(())
}

/// TTFT of a request that must have come to its end.
pub(crate) fn ttft_s(what: &'static str, timeline: &Timeline) -> Result<f64, Invalid> {
    if timeline.outcome != Outcome::Completed {
        return Err(Invalid::Request { what, outcome: timeline.outcome.clone() });
    }
    Ok(timeline.ttft().ok_or(Invalid::NoText { what })?.as_secs_f64())
}

fn peer_estimate(peer: &Timeline, window: Window, repetition: &Repetition) -> Option<PeerEstimate> {
    let gaps: Vec<f64> = peer.gaps(window).map(|(start, end)| (end - start).as_secs_f64()).collect();
    let control = repetition.undisturbed.as_ref().filter(|control| {
        control.peer.ended >= control.window.to && control.short.outcome == Outcome::Completed
    });
    let control_worst_gap = control.and_then(|control| control.peer.worst_gap(control.window));
    Some(PeerEstimate {
        worst_gap_s: peer.worst_gap(window)?.as_secs_f64(),
        median_gap_s: median(&gaps)?,
        control_worst_gap_s: control_worst_gap.map(|gap| gap.as_secs_f64()),
        ended_early: peer.ended < window.to,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Usage;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn completed(sent: u64, contents: &[u64]) -> Timeline {
        let contents: Vec<Duration> = contents.iter().copied().map(ms).collect();
        let ended = contents.last().copied().unwrap_or(ms(sent));
        Timeline { contents, ended, outcome: Outcome::Completed, ..Timeline::started(ms(sent)) }
    }

    fn blocked() -> Repetition {
        Repetition {
            idle: vec![completed(0, &[50]), completed(100, &[160]), completed(200, &[270])],
            longs: vec![completed(1_000, &[9_000]), completed(1_000, &[11_000])],
            short: completed(3_000, &[9_060, 9_070]),
            peer: None,
            undisturbed: None,
        }
    }

    #[test]
    fn slowdown_and_h_follow_their_definitions() {
        let estimate = estimate(&blocked()).unwrap();
        assert_eq!(estimate.idle_ttft_s, 0.06);
        assert_eq!(estimate.short_ttft_s, 6.06);
        assert!((estimate.slowdown - 101.0).abs() < 1e-9);
        assert_eq!(estimate.offset_s, 2.0);
        assert_eq!(estimate.long_ttfts_s, [8.0, 10.0]);
        // 6 s more than idle, of the 8 s that were left of the last long prompt.
        assert!((estimate.h - 0.75).abs() < 1e-9);
    }

    #[test]
    fn a_short_that_is_not_held_up_has_slowdown_one_and_h_zero() {
        let repetition = Repetition { short: completed(3_000, &[3_060]), ..blocked() };
        let estimate = estimate(&repetition).unwrap();
        assert!((estimate.slowdown - 1.0).abs() < 1e-9 && estimate.h.abs() < 1e-9);
    }

    #[test]
    fn a_long_that_was_over_before_the_short_came_says_nothing() {
        let repetition = Repetition { longs: vec![completed(1_000, &[2_900])], ..blocked() };
        let invalid = estimate(&repetition).unwrap_err();
        assert_eq!(invalid, Invalid::LongTooFast { long_ttft_s: 1.9, offset_s: 2.0 });
        assert!(invalid.to_string().contains("long finished before offset"));
        assert!(invalid.to_string().contains("use a longer --long-tokens"));
    }

    #[test]
    fn a_refused_short_is_named_with_the_servers_words() {
        let outcome = Outcome::Refused { status: 503, message: "queue full".into() };
        let repetition = Repetition { short: Timeline { outcome, ..completed(3_000, &[]) }, ..blocked() };
        let text = estimate(&repetition).unwrap_err().to_string();
        assert_eq!(text, "short behind long refused with 503: queue full");
    }

    #[test]
    fn a_warm_long_prompt_is_refused_and_template_tokens_are_not() {
        let with_cached = |cached| {
            let usage = Usage { prompt_tokens: 4_300, completion_tokens: 1, cached_tokens: Some(cached) };
            let long = Timeline { usage: Some(usage), ..completed(1_000, &[9_000]) };
            estimate(&Repetition { longs: vec![long], ..blocked() })
        };
        assert!(with_cached(0).is_ok());
        assert!(with_cached(30).is_ok());
        assert_eq!(with_cached(64), Err(Invalid::LongCached { cached: 64, prompt: 4_300 }));
    }

    #[test]
    fn the_peer_is_judged_between_the_longs_send_and_the_last_first_token() {
        let peer = completed(0, &[100, 900, 1_010, 1_050, 1_060, 2_990, 3_100, 11_010, 20_000]);
        let undisturbed = Undisturbed {
            peer: completed(0, &[0, 1_000, 1_030, 1_050, 11_100]),
            short: completed(1_040, &[1_045]),
            window: Window { from: ms(1_001), to: ms(1_050) },
        };
        let repetition = Repetition { peer: Some(peer), undisturbed: Some(undisturbed), ..blocked() };
        let peer = estimate(&repetition).unwrap().peer.unwrap();
        assert_eq!(peer.worst_gap_s, 7.91);
        assert_eq!(peer.control_worst_gap_s, Some(0.03));
        assert!(!peer.ended_early);
    }

    #[test]
    fn a_peer_that_ended_early_is_marked_and_no_gap_is_invented() {
        let repetition = Repetition { peer: Some(completed(0, &[990, 1_010, 1_050])), ..blocked() };
        let peer = estimate(&repetition).unwrap().peer.unwrap();
        assert!(peer.ended_early);
        assert_eq!(peer.worst_gap_s, 0.04);
        assert_eq!(peer.control_worst_gap_s, None);
    }

    #[test]
    fn a_control_that_took_the_other_way_says_nothing() {
        let mut repetition = blocked();
        repetition.longs[0].route = Some("remote; rule=long".to_owned());
        assert_eq!(check_arm(Arm::Auto, &repetition), Ok(()));
        let message = check_arm(Arm::Local, &repetition).unwrap_err().to_string();
        assert!(message.contains("arm local") && message.contains("remote; rule=long"), "{message}");
    }
}
