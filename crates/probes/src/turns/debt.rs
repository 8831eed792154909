//! Counting cost beyond the budget, which rests repay.

/// Longest rest to repay debt (seconds). If it is too short several times in a row, counting ends.
pub(super) const MAKE_UP_MAX: f64 = 60.0;
/// A smaller debt than this many seconds of budget is ignored: the share of the next turn repays it.
const SLACK: f64 = 1.0;

/// Seconds of the program's CPU time that counting took beyond its limit so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Debt(f64);

impl Debt {
    /// Adds a cost. `limit`: the share of the program's CPU time `cpu` that counting may cost.
    pub(crate) fn add(&mut self, cost: f64, cpu: f64, limit: f64) {
        self.0 = (self.0 + cost - limit * cpu.max(0.0)).max(0.0);
    }

    /// Length of the rest (seconds) for a program that uses this many CPUs. 0 for a debt that the next share repays.
    ///
    /// # Errors
    /// The seconds that a rest would take, if more than [`MAKE_UP_MAX`].
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
