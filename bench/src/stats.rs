//! Medians and spreads.

use serde::Serialize;

/// Median and range of one number over the repetitions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) n: usize,
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// `None` of nothing.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        Some(Self {
            n: values.len(),
            median: quantile(values, 0.5)?,
            min: quantile(values, 0.0)?,
            max: quantile(values, 1.0)?,
        })
    }
}

/// The middle value, or the mean of the two middle ones.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// Linear interpolation between the two nearest ranks (R's type 7, numpy's default).
pub(crate) fn quantile(values: &[f64], q: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let place = q.clamp(0.0, 1.0) * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn quantiles_interpolate_as_numpy_does() {
        let values = [10.0, 20.0, 30.0, 40.0];
        assert_eq!(quantile(&values, 0.9), Some(37.0));
        assert_eq!(quantile(&values, 1.0), Some(40.0));
        assert_eq!(quantile(&values, 0.0), Some(10.0));
    }

    #[test]
    fn spread_counts_its_values() {
        assert_eq!(Spread::of(&[2.0, 4.0]), Some(Spread { n: 2, median: 3.0, min: 2.0, max: 4.0 }));
        assert_eq!(Spread::of(&[]), None);
    }
}
