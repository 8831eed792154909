//! Exact bounds on rates that were counted.

/// Probability of at most `k` events in `n` independent tries of probability `p`.
fn at_most(k: u64, n: u64, p: f64) -> f64 {
    if p <= 0.0 || k >= n {
        return 1.0;
    }
    if p >= 1.0 {
        return 0.0;
    }
    // By logarithms: the first term may underflow.
    let (log_p, log_q) = (p.ln(), (-p).ln_1p());
    let mut log_term = n as f64 * log_q;
    let mut sum = log_term.exp();
    for i in 0..k {
        log_term += ((n - i) as f64).ln() - ((i + 1) as f64).ln() + log_p - log_q;
        sum += log_term.exp();
    }
    sum.min(1.0)
}

/// Largest rate that `k` events in `n` tries do not exclude, one-sided (Clopper and Pearson 1934). 1 without tries.
pub fn rate_at_most(k: u64, n: u64, confidence: f64) -> f64 {
    if n == 0 || k >= n {
        return 1.0;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if at_most(k, n, middle) > 1.0 - confidence {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_clopper_and_pearson() {
        // From the quantiles of the beta distribution: without events 1 - 0.05^(1/n), the "rule of three".
        for (k, n, upper) in [
            (0, 10, 0.258_866),
            (0, 1000, 0.002_991_249),
            (1, 10, 0.394_163),
            (5, 100, 0.102_253),
            (10, 10, 1.0),
        ] {
            let found = rate_at_most(k, n, 0.95);
            assert!((found - upper).abs() < 1e-5, "{k} of {n}: {found}");
        }
        assert_eq!(rate_at_most(0, 0, 0.95), 1.0);
    }

    #[test]
    fn many_tries_do_not_lose_the_first_term() {
        let upper = rate_at_most(900, 10_000, 0.95);
        assert!((0.0948..0.0950).contains(&upper), "{upper}");
    }
}
