//! Medians and other quantiles.

/// Returns the median (of an even number of values the upper of the middle two), or zero without
/// values.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the value at the quantile `q`, from 0 to 1, or zero without values. Of `n` values in
/// ascending order, this is the value with the index `floor(q n)`, counted from 0, at most `n - 1`.
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = (sorted.len() as f64 * q) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_quantile_are_values_of_the_sample() {
        assert_eq!(median(&[3.0, 1.0, 2.0, 9.0, 4.0]), 3.0);
        assert_eq!(quantile(&(0..100).map(f64::from).collect::<Vec<_>>(), 0.99), 99.0);
        assert_eq!(median(&[]), 0.0);
    }
}
