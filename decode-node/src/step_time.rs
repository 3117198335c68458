//! How long an engine step takes: `a·passes + b·tokens + c·attended`, learned
//! from the node's own steps.
//!
//! The engine goes through the model once for sequences that grow by equally
//! many tokens in neighbouring slots, and once more for every other one: these
//! are the passes. `tokens` counts the batch, `attended` sums for each of its
//! tokens the tokens before it. Least squares over an exponentially fading past, pulled gently
//! towards the prior so that the first steps are sane and steps that are all
//! alike cannot send a coefficient off.

use std::time::Duration;

use kv_block::SlotId;

/// Weight that the past keeps per step: about the last 100 steps count.
const FADE: f64 = 0.99;
/// How strongly the prior pulls, in units of one typical step.
const PRIOR_WEIGHT: f64 = 0.02;
/// A step that took this many times the prediction was disturbed from outside;
/// it counts as if it had taken only so much.
const OUTLIER: f64 = 4.0;

/// No part of a step takes negative time; a tiny floor keeps the model growing
/// in tokens.
const LOWEST: [f64; 3] = [0.0, 1e-3, 0.0];

/// What a batch costs to compute, in countable things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Times that the engine goes through the model.
    pub passes: usize,
    /// Tokens in the batch.
    pub tokens: usize,
    /// Sum over those tokens of the tokens before them.
    pub attended: usize,
}

impl StepLoad {
    /// Adds `tokens` behind `resident` ones, in a pass of their own.
    pub fn plus(self, tokens: usize, resident: usize) -> Self {
        Self { passes: self.passes + 1, ..self.joined_by(tokens, resident) }
    }

    /// Adds `tokens` behind `resident` ones to a pass that is counted already.
    fn joined_by(self, tokens: usize, resident: usize) -> Self {
        Self {
            passes: self.passes,
            tokens: self.tokens + tokens,
            attended: self.attended + tokens * resident + tokens * tokens / 2,
        }
    }

    /// Adds a token for each running stream, given as `(slot, resident)` in the
    /// order of the slots.
    pub fn plus_streams(self, streams: impl IntoIterator<Item = (SlotId, usize)>) -> Self {
        let mut load = self;
        let mut neighbour = None;
        for (slot, resident) in streams {
            load =
                if neighbour == Some(slot.0) { load.joined_by(1, resident) } else { load.plus(1, resident) };
            neighbour = slot.0.checked_add(1);
        }
        load
    }

    fn features(self) -> [f64; 3] {
        // Scaled so that all three have like magnitude in typical steps.
        [self.passes as f64, self.tokens as f64 / 100.0, self.attended as f64 / 100_000.0]
    }
}

/// The learned model. Times are in milliseconds.
#[derive(Clone, Debug)]
pub struct StepTime {
    coefficients: [f64; 3],
    prior: [f64; 3],
    normal: [[f64; 3]; 3],
    right: [f64; 3],
}

impl Default for StepTime {
    fn default() -> Self {
        // A small model on one CPU core, as measured. Any other machine is learned in a
        // few steps, and from this side they err towards being short.
        Self::with_prior([10.0, 250.0, 500.0])
    }
}

impl StepTime {
    /// `prior`: milliseconds per pass, per 100 tokens, per 100,000 attended tokens.
    pub fn with_prior(prior: [f64; 3]) -> Self {
        Self { coefficients: prior, prior, normal: [[0.0; 3]; 3], right: [0.0; 3] }
    }

    /// Expected time of a step, in milliseconds.
    pub fn predict_ms(&self, load: StepLoad) -> f64 {
        load.features().iter().zip(self.coefficients).map(|(x, c)| x * c).sum()
    }

    /// Takes in a step that was measured.
    pub fn observe(&mut self, load: StepLoad, took: Duration) {
        let took_ms = (took.as_secs_f64() * 1e3).min(self.predict_ms(load) * OUTLIER);
        let x = load.features();
        for row in 0..3 {
            for column in 0..3 {
                self.normal[row][column] = self.normal[row][column] * FADE + x[row] * x[column];
            }
            self.right[row] = self.right[row] * FADE + x[row] * took_ms;
        }
        self.refit();
    }

    /// Most prompt tokens behind `resident` that can join `base` so that the
    /// step stays within `cap_ms`; 0 if none can.
    pub fn room(&self, base: StepLoad, resident: usize, cap_ms: f64, limit: usize) -> usize {
        // The cost grows with every token, so the largest fit is found by halving.
        let (mut fits, mut too_many) = (0, limit + 1);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if self.predict_ms(base.plus(middle, resident)) <= cap_ms {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        fits
    }

    /// Least squares under the bounds: one coefficient after the other is set to
    /// its best value given the others, from where the last fit ended. A plain
    /// solution cut off at the bounds would be far off in the other coefficients.
    fn refit(&mut self) {
        const SWEEPS: usize = 100;
        for _ in 0..SWEEPS {
            for (i, &lowest) in LOWEST.iter().enumerate() {
                let others: f64 =
                    (0..3).filter(|&j| j != i).map(|j| self.normal[i][j] * self.coefficients[j]).sum();
                let right = self.right[i] + PRIOR_WEIGHT * self.prior[i] - others;
                self.coefficients[i] = (right / (self.normal[i][i] + PRIOR_WEIGHT)).max(lowest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn load(tokens: usize, resident: usize) -> StepLoad {
        StepLoad::default().plus(tokens, resident)
    }

    fn truth_ms(load: StepLoad) -> f64 {
        5.0 * load.passes as f64 + 1.9 * load.tokens as f64 + 0.0006 * load.attended as f64
    }

    fn trained() -> StepTime {
        let mut model = StepTime::default();
        for step in 0..300 {
            let load = load([1, 4, 40, 80, 200][step % 5], (step * 37) % 4000);
            model.observe(load, Duration::from_secs_f64(truth_ms(load) / 1e3));
        }
        model
    }

    #[test]
    fn learns_the_cost_of_its_own_steps() {
        let model = trained();
        for load in [load(1, 100), load(60, 0), load(60, 4000), load(256, 2000)] {
            let (predicted, true_ms) = (model.predict_ms(load), truth_ms(load));
            assert!((predicted - true_ms).abs() < 0.1 * true_ms, "{load:?}: {predicted} of {true_ms}");
        }
    }

    #[test]
    fn two_steps_of_a_machine_ten_times_as_fast_are_enough() {
        let mut model = StepTime::default();
        for (tokens, resident) in [(34, 0), (40, 34)] {
            let load = load(tokens, resident);
            model.observe(load, Duration::from_secs_f64(truth_ms(load) / 1e4));
        }
        let next = load(40, 74).plus(10, 74);
        assert!(
            model.predict_ms(next) < 40.0,
            "{} ms, {} in truth",
            model.predict_ms(next),
            truth_ms(next) / 10.0
        );
    }

    #[test]
    fn one_disturbed_step_changes_little() {
        let mut model = trained();
        let before = model.predict_ms(load(50, 1000));
        model.observe(load(50, 1000), Duration::from_secs(30));
        assert!(model.predict_ms(load(50, 1000)) < before * 1.5);
    }

    #[test]
    fn neighbours_share_a_pass() {
        let streams = |slots: &[u16]| {
            StepLoad::default().plus_streams(slots.iter().map(|&slot| (SlotId(slot), 10))).passes
        };
        assert_eq!(streams(&[]), 0);
        assert_eq!(streams(&[0, 1, 2]), 1);
        assert_eq!(streams(&[0, 1, 3, 4, 7]), 3);
        let load = StepLoad::default().plus_streams([(SlotId(2), 10)]).plus(64, 100);
        assert_eq!(load, StepLoad { passes: 2, tokens: 65, attended: 10 + 6400 + 2048 });
    }

    #[test]
    fn room_is_the_largest_chunk_that_fits() {
        let model = trained();
        let room = model.room(load(1, 500), 1000, 100.0, 512);
        assert!(model.predict_ms(load(1, 500).plus(room, 1000)) <= 100.0);
        assert!(model.predict_ms(load(1, 500).plus(room + 1, 1000)) > 100.0);
        assert_eq!(model.room(load(200, 4000), 0, 10.0, 512), 0);
        assert_eq!(model.room(StepLoad::default(), 0, 1e9, 512), 512);
    }

    proptest! {
        #[test]
        fn any_measurements_leave_a_usable_model(
            steps in prop::collection::vec((1usize..600, 0usize..100_000, 0u64..100_000_000), 1..200)
        ) {
            let mut model = StepTime::default();
            for (tokens, resident, micros) in steps {
                model.observe(load(tokens, resident), Duration::from_micros(micros));
                let predicted = model.predict_ms(load(tokens, resident));
                prop_assert!(predicted.is_finite() && predicted >= 0.0);
            }
        }
    }
}
