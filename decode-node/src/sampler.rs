//! Choosing the next token from logits: pure, and the same on every node.
//!
//! The random number for a token depends only on the request's seed and the
//! token's position, not on any state. So a sequence that is replayed on
//! another node goes on exactly where it was.
//!
//! Order as in vLLM (`v1/sample`): temperature, then `min_p`, `top_k`, `top_p`.

use kv_block::Token;
use kv_transfer::Sampling;

/// Chooses from `logits` (`[vocabulary]`) the token at `position`.
///
/// Greedy at temperature 0; equal logits go to the lowest id. NaN logits are
/// never chosen.
pub fn sample(logits: &[f32], sampling: &Sampling, position: usize) -> Token {
    if sampling.temperature <= 0.0 {
        return argmax(logits);
    }
    let mut candidates = scaled(logits, sampling.temperature);
    if candidates.is_empty() {
        return argmax(logits);
    }
    keep_min_p(&mut candidates, sampling.min_p);
    if needs_order(sampling, candidates.len()) {
        candidates.sort_unstable_by(|a, b| b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token)));
        keep_top_k(&mut candidates, sampling.top_k);
        keep_top_p(&mut candidates, sampling.top_p);
    }
    draw(&candidates, uniform(sampling.seed, position))
}

#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    /// exp((logit − best) / temperature), so the best has 1.
    weight: f64,
}

fn argmax(logits: &[f32]) -> Token {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] || logits[best].is_nan() {
            best = index;
        }
    }
    Token(best as u32)
}

fn scaled(logits: &[f32], temperature: f32) -> Vec<Candidate> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Below e^-40 of the best a token is never drawn; leaving it out keeps
    // the list short for the sort.
    (0u32..)
        .zip(logits)
        .map(|(token, logit)| (token, f64::from(logit - best) / f64::from(temperature)))
        .filter(|(_, exponent)| *exponent > -40.0)
        .map(|(token, exponent)| Candidate { token, weight: exponent.exp() })
        .collect()
}

fn needs_order(sampling: &Sampling, candidates: usize) -> bool {
    sampling.top_p < 1.0 || (sampling.top_k > 0 && (sampling.top_k as usize) < candidates)
}

fn keep_min_p(candidates: &mut Vec<Candidate>, min_p: f32) {
    if min_p > 0.0 {
        candidates.retain(|candidate| candidate.weight >= f64::from(min_p.min(1.0)));
    }
}

fn keep_top_k(candidates: &mut Vec<Candidate>, top_k: u32) {
    if top_k > 0 {
        candidates.truncate(top_k as usize);
    }
}

fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f32) {
    if top_p >= 1.0 {
        return;
    }
    let wanted = candidates.iter().map(|candidate| candidate.weight).sum::<f64>() * f64::from(top_p);
    let mut sum = 0.0;
    let kept = candidates.iter().take_while(|candidate| {
        let take = sum < wanted;
        sum += candidate.weight;
        take
    });
    // The best token stays even at top_p = 0.
    let kept = kept.count().max(1);
    candidates.truncate(kept);
}

fn draw(candidates: &[Candidate], uniform: f64) -> Token {
    let total = candidates.iter().map(|candidate| candidate.weight).sum::<f64>();
    let mut left = uniform * total;
    for candidate in candidates {
        left -= candidate.weight;
        if left < 0.0 {
            return Token(candidate.token);
        }
    }
    // Rounding can leave a last sliver.
    Token(candidates[candidates.len() - 1].token)
}

/// A number in [0, 1) from seed and position: SplitMix64 (Steele, Lea and
/// Flood 2014), evaluated at a counter.
fn uniform(seed: u64, position: usize) -> f64 {
    let mut z = seed.wrapping_add((position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampling() -> Sampling {
        Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 7 }
    }

    #[test]
    fn greedy_takes_the_best_and_the_lowest_id_of_equals() {
        let greedy = Sampling { temperature: 0.0, ..sampling() };
        assert_eq!(sample(&[0.0, 2.0, 2.0, 1.0], &greedy, 0), Token(1));
        assert_eq!(sample(&[f32::NAN, -1.0, -3.0], &greedy, 0), Token(1));
    }

    #[test]
    fn shares_follow_the_softmax() {
        let logits = [0.0, (3.0f32).ln()];
        let hits = (0..20_000).filter(|&p| sample(&logits, &sampling(), p) == Token(1)).count();
        let share = hits as f64 / 20_000.0;
        assert!((share - 0.75).abs() < 0.01, "{share}");
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_the_right_tokens() {
        // Probabilities 0.5, 0.25, 0.15, 0.1.
        let logits: Vec<f32> = [0.5f32, 0.25, 0.15, 0.1].iter().map(|p| p.ln()).collect();
        let seen = |sampling: &Sampling| {
            (0..5000).map(|p| sample(&logits, sampling, p).0).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(seen(&sampling()), 4);
        assert_eq!(seen(&Sampling { top_k: 2, ..sampling() }), 2);
        assert_eq!(seen(&Sampling { top_p: 0.7, ..sampling() }), 2);
        assert_eq!(seen(&Sampling { top_p: 0.0, ..sampling() }), 1);
        assert_eq!(seen(&Sampling { min_p: 0.29, ..sampling() }), 3);
        assert_eq!(seen(&Sampling { temperature: 0.01, ..sampling() }), 1);
    }

    proptest! {
        #[test]
        fn same_seed_and_position_same_token(
            logits in prop::collection::vec(-20.0f32..20.0, 1..300),
            temperature in 0.0f32..2.0, top_p in 0.0f32..=1.0, top_k in 0u32..50, min_p in 0.0f32..=1.0,
            seed: u64, position in 0usize..100_000,
        ) {
            let sampling = Sampling { temperature, top_p, top_k, min_p, seed };
            let token = sample(&logits, &sampling, position);
            prop_assert!((token.0 as usize) < logits.len());
            prop_assert_eq!(token, sample(&logits, &sampling, position));
        }
    }
}
