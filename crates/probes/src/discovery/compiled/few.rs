//! Chooses the last round's candidates for three hardware breakpoints. The fourth is reserved for the burden.

/// Rates closer than this (logarithm) may be equal: they were counted one after the other under a moving load.
const ALIKE: f64 = 0.2;

/// Chooses two candidates of one rate, and one of another rate for contrast. Equal rates are probably the same work, so
/// the most common rate wins, weighted by coverage. `candidates`: most promising first. `room`: total hits per second.
/// `of`: rate and coverage.
pub(crate) fn best<T>(
    candidates: Vec<T>,
    room: f64,
    of: impl Fn(&T) -> (f64, f64),
    function: impl Fn(&T) -> u64,
) -> Vec<T> {
    let seen: Vec<(f64, f64)> = candidates.iter().map(&of).collect();
    let alike = |a: f64, b: f64| (a.max(1.0) / b.max(1.0)).ln().abs() <= ALIKE;
    // Two candidates of the rate must fit the room.
    let weight = |rate: f64| -> f64 {
        if 2.0 * rate > room {
            return 0.0;
        }
        seen.iter()
            .filter(|(r, _)| alike(*r, rate))
            .map(|(_, coverage)| coverage)
            .sum()
    };
    // The heaviest rate, and of equal ones the most promising.
    let heaviest = |without: Option<f64>| -> Option<f64> {
        let rates = seen.iter().map(|(rate, _)| *rate);
        let others = rates.filter(|rate| without.is_none_or(|w| !alike(*rate, w)));
        let best = others
            .map(|rate| (weight(rate), rate))
            .filter(|(weight, _)| *weight > 0.0);
        best.reduce(|a, b| if b.0 > a.0 { b } else { a })
            .map(|(_, rate)| rate)
    };
    let Some(first) = heaviest(None) else {
        return Vec::new();
    };
    let second = heaviest(Some(first));
    let mut left = room;
    let mut kept: Vec<usize> = Vec::new();
    let mut keep = |fits: &dyn Fn(usize, f64) -> bool| -> Option<usize> {
        let (i, (rate, _)) = seen
            .iter()
            .enumerate()
            .find(|(i, (rate, _))| *rate <= left && !kept.contains(i) && fits(*i, *rate))?;
        left -= rate;
        kept.push(i);
        Some(i)
    };
    let function = |i: usize| candidates.get(i).map(&function);
    let one = keep(&|_, rate| alike(rate, first));
    // The witness is from another function, if one runs as often.
    let other = |i: usize, rate: f64| alike(rate, first) && one.and_then(function) != function(i);
    if keep(&other).is_none() {
        keep(&|_, rate| alike(rate, first));
    }
    if let Some(second) = second {
        keep(&|_, rate| alike(rate, second));
    }
    let mut candidates: Vec<Option<T>> = candidates.into_iter().map(Some).collect();
    kept.into_iter()
        .filter_map(|i| candidates.get_mut(i)?.take())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_at_which_most_places_run_is_kept_twice_and_another_once() {
        // (rate, coverage, function), as they were found in a JVM that ran a loop of 3,900 turns a second.
        type Place = (f64, f64, u64);
        let found: Vec<Place> = vec![
            (3894.0, 0.99, 1),
            (3894.0, 0.99, 1),
            (3954.0, 0.99, 1),
            (109.0, 0.60, 1),
            (189.0, 0.68, 1),
            (529.0, 0.57, 2),
            (34152.0, 0.37, 3),
            (3959.0, 0.50, 3),
        ];
        let of = |found: &[Place], room| {
            let kept = best(
                (0..found.len()).collect(),
                room,
                |i| (found[*i].0, found[*i].1),
                |i| found[*i].2,
            );
            kept.into_iter().collect::<Vec<usize>>()
        };
        // The witness is of another function; where there is none, of the same.
        assert_eq!(of(&found, 27_000.0), [0, 7, 4]);
        assert_eq!(of(&found[..7], 27_000.0), [0, 1, 4]);
        // No room for two of that rate: what there is room for.
        assert_eq!(of(&found, 5_000.0), [4, 3]);
        assert!(of(&[(90_000.0, 1.0, 1)], 27_000.0).is_empty());
        assert!(of(&[], 27_000.0).is_empty());
    }
}
