//! Counts in windows, and how they vary against each other.

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

/// A count for each window, with the work that it stands for.
pub(super) struct Series(pub(super) Vec<f64>);

impl Series {
    pub(super) fn mean(&self) -> f64 {
        moments(&self.0).0
    }

    /// Logarithms of the ratio to another series, window by window; `None` when one of them was silent in a window.
    pub(super) fn ratios(&self, other: &[f64]) -> Option<Vec<f64>> {
        self.0
            .iter()
            .zip(other)
            .map(|(a, b)| (*a > 0.0 && *b > 0.0).then(|| (a / b).ln()))
            .collect()
    }

    /// What rounding to whole counts at the edges of the windows adds to the variation; windows may be of different lengths.
    pub(super) fn rounding(&self) -> f64 {
        let squares: f64 = self.0.iter().map(|count| count.max(0.5).powi(-2)).sum();
        0.5 * (squares / self.0.len().max(1) as f64).sqrt()
    }

    /// How much the ratio to another series varies beyond rounding: infinite when one of them was silent.
    pub(super) fn variation(&self, other: &Self) -> f64 {
        let Some(ratios) = self.ratios(&other.0) else {
            return f64::INFINITY;
        };
        let spread = moments(&ratios).1;
        let rounding = self.rounding().powi(2) + other.rounding().powi(2);
        (spread * spread - rounding).max(0.0).sqrt()
    }
}
