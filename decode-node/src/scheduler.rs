//! Which sequences get how many tokens in the next step: pure.
//!
//! Every running stream gets its one token first. What time is left under the
//! step cap goes to prompts: short ones first, shortest remaining first, and
//! the one long prompt gets what is over, at least a fixed share.
//!
//! ```text
//!  |— decode: 1 token each —|— shorts, shortest first, ≤ 3/4 —|— long: the rest —|
//!  0                                                              itl_cap_ms
//! ```
//!
//! Bounds. A short prompt never waits for more than the step that is running
//! when it arrives. A long prompt always gets a quarter of the prompt budget,
//! so shorts can stretch it to four times its time and no more. Among shorts,
//! age counts: one that has waited n times `AGE_MS_PER_TOKEN` is served like one n
//! tokens shorter.

use std::time::Instant;

use kv_block::SlotId;

use crate::step_time::{StepLoad, StepTime};

/// Share of the prompt budget that shorts leave to a waiting long prompt.
const LONG_SHARE: f64 = 0.25;
/// Waiting this many milliseconds is worth one token in the order of shorts.
const AGE_MS_PER_TOKEN: f64 = 10.0;
/// Share of the cap that prompts get even when decoding alone fills the step:
/// slow progress beats none. In time, not in tokens: behind a long context one
/// token can cost as much as thirty at its beginning.
const PROMPT_SHARE_MIN: f64 = 0.25;

/// A short prompt's rest of one part in so many joins the step when no stream runs.
const REST_SHARE: usize = 3;

/// A sequence in a slot, as far as planning cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotView {
    /// The slot.
    pub slot: SlotId,
    /// Tokens resident.
    pub resident: usize,
    /// Prompt tokens still to compute; 0 for a running stream.
    pub remaining: usize,
    /// Whether the prompt counts as long.
    pub long: bool,
    /// When the prompt arrived.
    pub arrived: Instant,
}

/// One slot's share of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The slot.
    pub slot: SlotId,
    /// Prompt tokens to compute, or 1 for a running stream.
    pub tokens: usize,
}

/// A step, planned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Streams first, then prompts; empty if there is nothing to do.
    pub shares: Vec<Share>,
    /// What the shares cost together.
    pub load: StepLoad,
}

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// Aim for the length of a step, in milliseconds.
    pub cap_ms: f64,
    /// Most tokens that the engine takes in one step.
    pub tokens_max: usize,
}

/// Plans one step. `slots` come in the order of their numbers.
pub fn plan(now: Instant, slots: &[SlotView], model: &StepTime, limits: StepLimits) -> Plan {
    let streams = || slots.iter().filter(|view| view.remaining == 0);
    let mut step = Step {
        plan: Plan {
            shares: streams().map(|view| Share { slot: view.slot, tokens: 1 }).collect(),
            load: StepLoad::default().plus_streams(streams().map(|view| (view.slot, view.resident))),
        },
        limits,
        model,
        alone: streams().next().is_none(),
        prompt_moved: false,
    };
    let mut shorts: Vec<_> = slots.iter().filter(|view| view.remaining > 0 && !view.long).collect();
    let longs: Vec<_> = slots.iter().filter(|view| view.remaining > 0 && view.long).collect();
    shorts.sort_by(|a, b| urgency(now, a).total_cmp(&urgency(now, b)).then(a.slot.cmp(&b.slot)));

    let before_ms = model.predict_ms(step.plan.load);
    let until_ms = limits.cap_ms.max(before_ms + limits.cap_ms * PROMPT_SHARE_MIN);
    let share = if longs.is_empty() { 0.0 } else { LONG_SHARE };
    let shorts_until_ms = before_ms + (until_ms - before_ms) * (1.0 - share);
    for view in shorts {
        step.fill(view, shorts_until_ms);
    }
    for view in longs {
        step.fill(view, until_ms);
    }
    step.plan
}

/// Smaller is served first.
fn urgency(now: Instant, view: &SlotView) -> f64 {
    let waited_ms = now.saturating_duration_since(view.arrived).as_secs_f64() * 1e3;
    view.remaining as f64 - waited_ms / AGE_MS_PER_TOKEN
}

struct Step<'a> {
    plan: Plan,
    limits: StepLimits,
    model: &'a StepTime,
    /// No stream runs that the cap would protect.
    alone: bool,
    /// Some prompt got a share.
    prompt_moved: bool,
}

impl Step<'_> {
    fn fill(&mut self, view: &SlotView, until_ms: f64) {
        let load = self.plan.load;
        let limit = view.remaining.min(self.limits.tokens_max.saturating_sub(load.tokens));
        let mut tokens = self.model.room(load, view.resident, until_ms, limit);
        // A small rest costs a pass of its own, and nobody waits for this step.
        if self.alone && !view.long && limit == view.remaining && limit <= tokens + tokens / REST_SHARE {
            tokens = limit;
        }
        if !self.prompt_moved || view.long {
            tokens = tokens.max(1.min(limit));
        }
        if tokens > 0 {
            self.plan.load = load.plus(tokens, view.resident);
            self.plan.shares.push(Share { slot: view.slot, tokens });
            self.prompt_moved = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const LIMITS: StepLimits = StepLimits { cap_ms: 100.0, tokens_max: 512 };

    /// 4 ms per pass, 2 ms per token, nothing for attention.
    fn model() -> StepTime {
        StepTime::with_prior([4.0, 200.0, 0.0])
    }

    fn prompt(slot: u16, remaining: usize, long: bool, arrived: Instant) -> SlotView {
        SlotView { slot: SlotId(slot), resident: 0, remaining, long, arrived }
    }

    fn stream(slot: u16, now: Instant) -> SlotView {
        SlotView { resident: 100, ..prompt(slot, 0, false, now) }
    }

    fn tokens_of(shares: &[Share], slot: u16) -> usize {
        shares.iter().filter(|share| share.slot == SlotId(slot)).map(|share| share.tokens).sum()
    }

    fn start() -> Instant {
        #[expect(clippy::disallowed_methods, reason = "a test needs some instant to start from")]
        Instant::now()
    }

    #[test]
    fn streams_come_first_and_the_rest_of_the_step_goes_to_the_prompt() {
        let now = start();
        let shares =
            plan(now, &[prompt(0, 5000, true, now), stream(1, now), stream(2, now)], &model(), LIMITS).shares;
        assert_eq!(shares[0], Share { slot: SlotId(1), tokens: 1 });
        assert_eq!(shares[1], Share { slot: SlotId(2), tokens: 1 });
        assert_eq!(tokens_of(&shares, 0), 44, "(100 − two passes of 4) / 2 − 2 streams");
    }

    #[test]
    fn a_small_rest_joins_the_step_if_no_stream_waits_for_it() {
        let now = start();
        let short = |remaining| prompt(0, remaining, false, now);
        assert_eq!(tokens_of(&plan(now, &[short(64)], &model(), LIMITS).shares, 0), 64, "48 fit");
        assert_eq!(tokens_of(&plan(now, &[short(65)], &model(), LIMITS).shares, 0), 48);
        let beside = plan(now, &[short(60), stream(1, now)], &model(), LIMITS);
        assert_eq!(tokens_of(&beside.shares, 0), 45);
    }

    #[test]
    fn a_short_prompt_overtakes_the_long_one_which_still_moves() {
        let now = start();
        let shares =
            plan(now, &[prompt(0, 5000, true, now), prompt(1, 30, false, now)], &model(), LIMITS).shares;
        assert_eq!(tokens_of(&shares, 1), 30);
        assert_eq!(tokens_of(&shares, 0), 16);
    }

    #[test]
    fn shorts_leave_a_quarter_to_the_long_one() {
        let now = start();
        let views: Vec<_> =
            (1..8).map(|slot| prompt(slot, 400, false, now)).chain([prompt(0, 5000, true, now)]).collect();
        let shares = plan(now, &views, &model(), LIMITS).shares;
        assert_eq!(shares.iter().map(|share| share.tokens).sum::<usize>() - tokens_of(&shares, 0), 35);
        assert_eq!(tokens_of(&shares, 0), 11);
    }

    #[test]
    fn shortest_first_until_age_decides() {
        let start = start();
        let old = prompt(0, 400, false, start);
        let young = |now| prompt(1, 100, false, now);
        let soon = start + Duration::from_millis(500);
        assert!(tokens_of(&plan(soon, &[old, young(soon)], &model(), LIMITS).shares, 1) > 0);
        let later = start + Duration::from_millis(3500);
        let shares = plan(later, &[old, young(later)], &model(), LIMITS).shares;
        assert_eq!(tokens_of(&shares, 0), 48, "{shares:?}");
    }

    #[test]
    fn a_long_context_does_not_stretch_the_step() {
        // 20 ms per token behind 4,000 others.
        let model = StepTime::with_prior([4.0, 200.0, 450.0]);
        let now = start();
        let long = SlotView { resident: 4000, ..prompt(0, 300, true, now) };
        let shares = plan(now, &[long, stream(1, now), prompt(2, 31, false, now)], &model, LIMITS).shares;
        let load =
            StepLoad::default().plus(1, 100).plus(tokens_of(&shares, 2), 0).plus(tokens_of(&shares, 0), 4000);
        assert!(tokens_of(&shares, 0) >= 1 && tokens_of(&shares, 2) >= 25, "{shares:?}");
        assert!(model.predict_ms(load) <= LIMITS.cap_ms, "{} ms: {shares:?}", model.predict_ms(load));
    }

    #[test]
    fn prompts_move_even_when_decoding_fills_the_step() {
        let now = start();
        let views: Vec<_> =
            (1..80).map(|slot| stream(slot, now)).chain([prompt(0, 300, false, now)]).collect();
        assert_eq!(tokens_of(&plan(now, &views, &model(), LIMITS).shares, 0), 10, "a quarter of the cap");
    }

    proptest! {
        #[test]
        fn every_plan_keeps_the_bounds(
            streams in 0usize..60,
            prompts in prop::collection::vec((1usize..6000, any::<bool>(), 0u64..10_000), 0..20),
        ) {
            let start = start();
            let now = start + Duration::from_secs(10);
            let mut views: Vec<_> = (0..streams).map(|slot| stream(slot as u16, now)).collect();
            for (index, (remaining, long, age_ms)) in prompts.iter().enumerate() {
                views.push(prompt((streams + index) as u16, *remaining, *long, now - Duration::from_millis(*age_ms)));
            }
            let shares = plan(now, &views, &model(), LIMITS).shares;
            prop_assert!(shares.iter().map(|share| share.tokens).sum::<usize>() <= LIMITS.tokens_max);
            for view in &views {
                let got = tokens_of(&shares, view.slot.0);
                prop_assert!(got <= view.remaining.max(1));
                if view.remaining == 0 { prop_assert_eq!(got, 1); }
                if view.long { prop_assert!(got > 0, "a long prompt always moves"); }
            }
            if !prompts.is_empty() {
                prop_assert!(shares.len() > streams, "some prompt always moves");
            }
        }
    }
}
