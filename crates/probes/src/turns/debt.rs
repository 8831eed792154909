//! What counting has cost more than it may, and is to be made up for.

/// Longest time in which it is made up for (seconds). Where that is not enough several times in a row it is given up: the program has
/// changed.
pub(super) const MAKE_UP_MAX: f64 = 60.0;
/// What is less than the budget of so many seconds is no debt: the share of the next turn makes up for it.
const SLACK: f64 = 1.0;

/// Seconds of the program's CPU time that counting has taken beyond its limit so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Debt(f64);

impl Debt {
    /// Adds what a piece of time has cost, of so much CPU time of the program, of which `limit` is the share that it may cost.
    pub(crate) fn add(&mut self, cost: f64, cpu: f64, limit: f64) {
        self.0 = (self.0 + cost - limit * cpu.max(0.0)).max(0.0);
    }

    /// How long nothing is to be counted (seconds), of a program that uses so many CPUs; 0 for a debt that the next share makes
    /// up for.
    ///
    /// # Errors
    /// The seconds that it would take: more than is waited for.
    pub(crate) fn rest(&self, cpus: f64, limit: f64) -> Result<f64, f64> {
        let seconds = self.0 / (limit * cpus).max(1e-9);
        if seconds <= SLACK {
            Ok(0.0)
        } else if seconds <= MAKE_UP_MAX {
            Ok(seconds)
        } else {
            Err(seconds)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cost_too_much_is_made_up_for_by_rest_and_given_up_beyond_a_minute() {
        let limit = 0.005;
        let mut debt = Debt::default();
        // At the limit there is none, and what was left over is not saved up.
        debt.add(0.005, 1.0, limit);
        debt.add(0.0, 10.0, limit);
        debt.add(0.005, 1.0, limit);
        assert_eq!(debt.rest(1.0, limit), Ok(0.0));
        // 50 ms too much of a program on one CPU: ten seconds of its budget.
        debt.add(0.055, 1.0, limit);
        let rest = debt.rest(1.0, limit).unwrap();
        assert!((rest - 10.0).abs() < 1e-9, "{rest}");
        // While it rests it is paid back, on two CPUs twice as fast.
        debt.add(0.0, 4.0, limit);
        assert!((debt.rest(2.0, limit).unwrap() - 3.0).abs() < 1e-9);
        debt.add(0.0, 6.5, limit);
        assert_eq!(debt, Debt(0.0));
        debt.add(0.4, 1.0, limit);
        assert!(debt.rest(1.0, limit).unwrap_err() > 60.0);
        // Of a program that rests nobody knows when it will have made up for it.
        assert!(debt.rest(0.0, limit).is_err());
    }
}
