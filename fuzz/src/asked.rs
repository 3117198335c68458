//! Bounds that every request body keeps, whatever its endpoint.

use router::fuzzing::Asked;

/// Fails if a parameter left its range.
pub fn check(asked: &Asked) {
    let sampling = &asked.sampling;
    assert!((0.0..=2.0).contains(&sampling.temperature), "temperature {}", sampling.temperature);
    assert!((0.0..=1.0).contains(&sampling.top_p), "top_p {}", sampling.top_p);
    assert!((0.0..=1.0).contains(&sampling.min_p), "min_p {}", sampling.min_p);
    assert!((1..=16).contains(&asked.choices), "{} choices", asked.choices);
    assert!(asked.max_tokens.is_none_or(|tokens| (1..=i32::MAX as u32).contains(&tokens)));
    assert!(asked.stops.len() <= 16 && asked.stops.iter().all(|stop| (1..=16 << 10).contains(&stop.len())));
}
