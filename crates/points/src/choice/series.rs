//! Counts per window, and how they vary against each other.

/// Mean and standard deviation.
pub(super) fn moments(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    if values.len() < 2 {
        return (values.first().copied().unwrap_or(0.0), f64::INFINITY);
    }
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    (mean, (squares / (n - 1.0)).sqrt())
}

pub(super) struct Series(pub(super) Vec<f64>);

impl Series {
    pub(super) fn mean(&self) -> f64 {
        moments(&self.0).0
    }

    /// Logarithms of the ratio to another series, per window. `None`: one of the two was zero in a window.
    pub(super) fn ratios(&self, other: &[f64]) -> Option<Vec<f64>> {
        self.0
            .iter()
            .zip(other)
            .map(|(a, b)| (*a > 0.0 && *b > 0.0).then(|| (a / b).ln()))
            .collect()
    }

    /// Variation added by rounding to whole counts at the edges of the windows, which may differ in length.
    pub(super) fn rounding(&self) -> f64 {
        let squares: f64 = self.0.iter().map(|count| count.max(0.5).powi(-2)).sum();
        0.5 * (squares / self.0.len().max(1) as f64).sqrt()
    }

    /// Variation of the ratio to another series beyond rounding. Infinite where one of the two was zero.
    pub(super) fn variation(&self, other: &Self) -> f64 {
        let Some(ratios) = self.ratios(&other.0) else {
            return f64::INFINITY;
        };
        let spread = moments(&ratios).1;
        let rounding = self.rounding().powi(2) + other.rounding().powi(2);
        (spread * spread - rounding).max(0.0).sqrt()
    }
}
