//! How long a program takes to come back once it is protected, seen while it is protected for the first time.
//!
//! Pages that were pushed out come back as fast as the storage gives them: within a second on one machine, in half a
//! minute on the next. The blocks of the trial that follows discard so much of their beginning, neither less, or blocks
//! would show less than there is, nor much more, or the proof would take twice as long. It is fixed before the first coin
//! is tossed, and so of no influence on what the coins prove.

use crate::panel::Gauge;
use homeostat_model::Nanoseconds;

/// The work is looked at in windows of this length …
pub(crate) const WINDOW: Nanoseconds = Nanoseconds::from_secs(2);
/// … of which the last so many are what the program comes back to, and as many before them show whether it still gets faster.
const LAST: usize = 3;
/// It does where the ones are more than this much of the others: pages that come back one after another bring back the work slowly at first.
const RISING: f64 = 1.1;
/// A window counts as back, and the last ones as level, within this share of the work. On a machine that is shared with others
/// the windows of a program that is back are a fifth apart; what still lacks in the first blocks shrinks what they show of gain and harm alike.
const LEVEL_SHARE: f64 = 0.65;
/// One that did at least this share of it while it was lost has not begun to come back …
const LOST_SHARE: f64 = 0.8;
/// … and only one that did less than this share of it can be seen to be back: the least of some windows is low by chance, too.
const CLEARLY_LOST: f64 = 0.5;
/// What the program did while it was lost is the least that it did in one of so many windows before: a reader may be found so
/// soon that the program was alone in the others.
const BEFORE: u64 = 2;

/// What was seen of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// The program was back after this time.
    Took(Nanoseconds),
    /// It still gets faster, or has not begun to, or too little was measured to say so.
    UnderWay,
    /// It was at its level all the time, and what it did before is not known, or not far from that.
    Unseen,
}

/// What was seen since `from`, when the protection was made.
pub(crate) fn seen(gauge: &Gauge<'_>, from: Nanoseconds, now: Nanoseconds) -> Recovery {
    let of = |begin: Nanoseconds| gauge.read(begin, begin + WINDOW).score;
    let windows = now.saturating_sub(from).0 / WINDOW.0;
    let scores: Vec<Option<f64>> = (0..windows).map(|k| of(from + WINDOW * k)).collect();
    let before = (1..=BEFORE).filter_map(|k| of(from.saturating_sub(WINDOW * k)));
    judge(before.reduce(f64::min), &scores)
}

/// Scores are in log units: what the program did while it was lost, and by window since it is protected.
fn judge(lost: Option<f64>, scores: &[Option<f64>]) -> Recovery {
    let Some((first, last)) = scores.len().checked_sub(LAST).map(|n| scores.split_at(n)) else {
        return Recovery::UnderWay;
    };
    let Some(mut last) = last.iter().copied().collect::<Option<Vec<f64>>>() else {
        return Recovery::UnderWay;
    };
    let newest = last[LAST - 1];
    last.sort_by(f64::total_cmp);
    let level = last[LAST / 2];
    let near = -LEVEL_SHARE.ln();
    let has_begun = lost.is_none_or(|lost| level > lost - LOST_SHARE.ln());
    let mut before: Vec<f64> = first.iter().rev().take(LAST).flatten().copied().collect();
    before.sort_by(f64::total_cmp);
    let is_level = before
        .get(before.len().saturating_sub(1) / 2)
        .is_some_and(|before| level <= before + RISING.ln());
    if !is_level || newest > level + near || !has_begun {
        return Recovery::UnderWay;
    }
    if lost.is_some_and(|lost| level < lost - CLEARLY_LOST.ln()) {
        return Recovery::Unseen;
    }
    let below = |score: &Option<f64>| score.is_none_or(|s| s < level - near);
    match first.iter().rposition(below) {
        Some(k) => Recovery::Took(Nanoseconds(WINDOW.0 * (k as u64 + 1))),
        None if lost.is_some() => Recovery::Took(Nanoseconds::ZERO),
        None => Recovery::Unseen,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(lost: Option<f64>, rates: &[f64]) -> Recovery {
        let scores: Vec<Option<f64>> = rates.iter().map(|r| (*r > 0.0).then(|| r.ln())).collect();
        judge(lost.map(f64::ln), &scores)
    }

    fn took(windows: u64) -> Recovery {
        Recovery::Took(Nanoseconds(WINDOW.0 * windows))
    }

    #[test]
    fn a_program_is_back_when_it_stays_near_what_it_comes_to() {
        // Lost, half, back.
        assert_eq!(
            after(None, &[0.1, 50.0, 98.0, 100.0, 101.0, 99.0, 100.0, 98.0]),
            took(2)
        );
        // One slow window in between counts: it was not back for good.
        assert_eq!(
            after(None, &[0.1, 95.0, 30.0, 100.0, 101.0, 99.0, 100.0]),
            took(3)
        );
        // A window without a reading is not one in which it was back.
        assert_eq!(
            after(None, &[0.0, 0.0, 100.0, 101.0, 99.0, 100.0, 100.0]),
            took(2)
        );
        // Back at once, for all that can be seen; only what it did while it was lost tells that from a program that was never away.
        assert_eq!(after(Some(1.0), &[100.0, 98.0, 103.0, 99.0, 101.0]), took(0));
        assert_eq!(after(None, &[100.0, 98.0, 103.0, 99.0, 101.0]), Recovery::Unseen);
        // One that had lost a fourth only may have come back as well as have varied by so much.
        assert_eq!(
            after(Some(75.0), &[100.0, 98.0, 103.0, 99.0, 101.0]),
            Recovery::Unseen
        );
    }

    #[test]
    fn a_program_that_still_gets_faster_or_has_not_begun_to_is_not_back() {
        let under_way = Recovery::UnderWay;
        assert_eq!(after(None, &[0.1, 1.0, 5.0, 20.0, 40.0, 80.0]), under_way);
        assert_eq!(after(Some(1.0), &[1.0, 1.1, 1.0, 0.9, 1.0]), under_way);
        // Nor can it be said of one that was seen too shortly, or not at the end.
        assert_eq!(after(None, &[100.0, 100.0, 100.0]), under_way);
        assert_eq!(after(None, &[100.0, 100.0, 100.0, 100.0, 0.0]), under_way);
    }

    #[test]
    fn pages_that_come_back_one_after_another_are_waited_for_until_they_are_there() {
        // Of a program that touches its pages at random, all of them back after so many windows: what is missing decides its work, so for
        // long hardly anything is seen of it.
        for needed in 4..=22 {
            let rates: Vec<f64> = (0..30)
                .map(|k| {
                    let missing = 1.0 - (f64::from(k) + 0.5) / f64::from(needed);
                    (1.0 / missing.max(0.01)).min(100.0)
                })
                .collect();
            let looks = (5..=rates.len()).map(|n| after(Some(1.0), &rates[..n]));
            let first = looks.into_iter().find(|seen| *seen != Recovery::UnderWay);
            assert_eq!(first, Some(took(needed as u64)), "{needed} windows");
        }
    }
}
