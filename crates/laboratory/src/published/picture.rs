//! Two hours of P15 as a picture: work and locality with homeostat, by hand and left alone, beside the Redbook's figures.

use super::{Results, Together, aso_curves};
use crate::drawing::{self, Axis, Curve, Panel, picture};
use crate::report::PublishedCurve;
use crate::run::{Arm, Line};

/// Where the picture lies, as the page names it.
pub const PICTURE: &str = "figures/p15.svg";
/// The run that is shown.
const RUN: &str = "p15";
/// Programs of that run; the Redbook's curves are drawn for both of them together.
const PROGRAMS: f64 = 2.0;
/// The first minutes are shown by themselves: all is decided in them.
const FIRST_MINUTES: f64 = 12.0;
const ALL_MINUTES: f64 = 120.0;

const HOMEOSTAT: &str = drawing::WRITER;
const ASO: &str = drawing::READER;
const BY_HAND: &str = drawing::HELD;
const ALONE: &str = drawing::NOBODY;

/// The picture; `None` where the run is not there.
pub(super) fn of(results: &Results) -> Option<String> {
    let arms = [
        (ALONE, results.together(RUN, Arm::LeftAlone)?),
        (BY_HAND, results.together(RUN, Arm::Manual)?),
        (HOMEOSTAT, results.together(RUN, Arm::Homeostat)?),
    ];
    let trial = first_trial(&results.outcome(RUN)?.track(Arm::Homeostat)?.story);
    let published = aso_curves();
    let aso = |name: &str, times: f64| marked(&published, name, times);
    let curves = |of: fn(&Together) -> Option<f64>, aso: Curve| -> Vec<Curve> {
        let drawn = arms.iter().map(|(colour, points)| Curve {
            colour,
            points: points
                .iter()
                .filter_map(|p| Some((p.at_s / 60.0, of(p)?)))
                .collect(),
            marked: false,
        });
        drawn.chain(std::iter::once(aso)).collect()
    };
    let rate = curves(|p| Some(p.work_per_s), aso("throughput", PROGRAMS));
    let local = curves(|p| p.least_local.map(|x| x * 100.0), aso("locality", 1.0));
    let panels: Vec<Panel> = [
        (FIRST_MINUTES, vec![0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]),
        (ALL_MINUTES, vec![0.0, 30.0, 60.0, 90.0, 120.0]),
    ]
    .iter()
    .flat_map(|(minutes, ticks)| {
        let minutes = *minutes;
        let panel = |title: &str, y: Axis, curves: &[Curve]| Panel {
            title: title.to_owned(),
            below: "minutes",
            x: Axis::new(0.0, minutes, ticks),
            y,
            shaded: trial,
            curves: curves.iter().map(|c| until(c, minutes)).collect(),
        };
        [
            panel(
                "transactions per second, both programs",
                Axis::new(0.0, 28.0, &[0.0, 5.0, 10.0, 15.0, 20.0, 25.0]),
                &rate,
            ),
            panel(
                "local accesses of the one with fewer (%)",
                Axis::new(0.0, 105.0, &[0.0, 25.0, 50.0, 75.0, 100.0]),
                &local,
            ),
        ]
    })
    .collect();
    Some(picture(
        "P15: two memory chases on two distant chips",
        2,
        &panels,
        &[
            (HOMEOSTAT, "homeostat (first trial shaded)"),
            (BY_HAND, "by hand"),
            (ALONE, "left alone"),
            (ASO, "the Redbook's ASO, as published"),
        ],
    ))
}

/// A published curve with its points marked, each value so many times as large.
fn marked(published: &[PublishedCurve], name: &str, times: f64) -> Curve {
    let points = published
        .iter()
        .filter(|c| c.curve == name)
        .flat_map(|c| &c.points);
    Curve {
        colour: ASO,
        points: points.map(|p| (p.at_s / 60.0, p.value * times)).collect(),
        marked: true,
    }
}

/// The part of a curve up to that minute: what lies beyond would be drawn on the edge.
fn until(curve: &Curve, minutes: f64) -> Curve {
    let points = curve.points.iter().filter(|(at, _)| *at <= minutes);
    Curve {
        points: points.copied().collect(),
        ..curve.clone()
    }
}

/// From when to when the first trial ran, in minutes: until what came of it was said.
fn first_trial(story: &[Line]) -> Option<(f64, f64)> {
    let begun = story.iter().position(|l| l.stage == "trying")?;
    let (first, later) = (story.get(begun)?, story.get(begun + 1..)?);
    let ended = later
        .iter()
        .find(|l| l.workload == first.workload && ["improved", "declined"].contains(&l.stage.as_str()))?;
    Some((first.at_s / 60.0, ended.at_s / 60.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_trial_lasts_until_it_is_told_what_came_of_it() {
        let line = |at_s: f64, stage: &str, workload: &str| Line {
            at_s,
            stage: stage.into(),
            workload: Some(workload.into()),
            ..Line::default()
        };
        let story = [
            line(6.0, "declined", "a"),
            line(30.0, "trying", "a"),
            line(40.0, "declined", "b"),
            line(90.0, "improved", "a"),
            line(120.0, "improved", "a"),
        ];
        assert_eq!(first_trial(&story), Some((0.5, 1.5)));
        assert_eq!(first_trial(&story[..3]), None);
        assert_eq!(of(&Results::default()), None);
    }

    #[test]
    fn the_published_curve_is_that_of_both_programs() {
        let curve = marked(&aso_curves(), "throughput", PROGRAMS);
        assert_eq!(curve.points, [(0.5, 8.0), (2.0, 18.0)]);
        assert_eq!(until(&curve, 1.0).points, [(0.5, 8.0)]);
    }
}
