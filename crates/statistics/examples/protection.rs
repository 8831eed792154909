//! Blocks without a protection until it is proven, by the chance of such a block: lost work, false accepts.
#![expect(clippy::print_stdout, reason = "an example prints")]

use homeostat_statistics::robust::{ln, quantile};
use homeostat_statistics::simulation::Random;
use homeostat_statistics::{Arm, Decision, Design, Trial, TrialParameters};

type Noise = fn(&mut Random) -> f64;
const NOISES: [(&str, Noise); 4] = [
    ("5 % white", |r| 0.05 * r.gaussian()),
    ("10 % heavy", |r| 0.10 * r.heavy()),
    ("30 % white", |r| 0.30 * r.gaussian()),
    ("two states", |r| if r.uniform() < 0.2 { -1.0 } else { 0.0 }),
];

/// Blocks and off blocks to an accept; `None` without one.
fn run(
    off_chance: f64,
    design: Design,
    alpha: f64,
    loss: f64,
    noise: Noise,
    seed: u64,
) -> Option<(f64, f64)> {
    let mut random = Random::new(seed);
    let mut trial = Trial::new(TrialParameters {
        alpha,
        design,
        off_chance,
        scale_prior: 0.5,
        targets: [0.1, 0.3, 0.7, 1.4, 2.0],
        loss_max: Some(1.4),
        blocks_max: 600,
        ..TrialParameters::default()
    });
    let (mut blocks, mut off) = (0.0, 0.0);
    while trial.decision() == Decision::Continue {
        let coin = trial.needs_coin() && random.uniform() < trial.chance_on();
        let arm = trial.next_arm(coin);
        let without = if arm == Arm::Off { ln(1.0 - loss) } else { 0.0 };
        blocks += 1.0;
        off += f64::from(u8::from(arm == Arm::Off));
        trial.observe(without + noise(&mut random));
    }
    (trial.decision() == Decision::Benefit).then_some((blocks, off))
}

fn main() {
    println!("Median / 90th percentile. Lost: blocks of work.");
    for alpha in [0.0055, 0.000_185] {
        for loss in [0.5, 0.9] {
            for (name, noise) in NOISES {
                println!("level {alpha}, loss {:.0} %, {name}", loss * 100.0);
                for (what, design, chance) in [
                    ("pairs", Design::Paired, 0.5),
                    ("fair", Design::Adaptive, 0.5),
                    ("1 in 3", Design::Adaptive, 1.0 / 3.0),
                    ("1 in 4", Design::Adaptive, 0.25),
                    ("1 in 5", Design::Adaptive, 0.2),
                    ("1 in 6", Design::Adaptive, 1.0 / 6.0),
                ] {
                    let found: Vec<(f64, f64)> = (0..400)
                        .filter_map(|seed| run(chance, design, alpha, loss, noise, seed))
                        .collect();
                    let of = |p: f64, of: fn(&(f64, f64)) -> f64| {
                        quantile(&found.iter().map(of).collect::<Vec<_>>(), p)
                    };
                    println!(
                        "  {what:6} {:3.0} % proven, {:3.0} / {:3.0} blocks, {:4.1} / {:4.1} off, {:4.1} / {:4.1} lost",
                        found.len() as f64 / 4.0,
                        of(0.5, |f| f.0),
                        of(0.9, |f| f.0),
                        of(0.5, |f| f.1),
                        of(0.9, |f| f.1),
                        loss * of(0.5, |f| f.1),
                        loss * of(0.9, |f| f.1),
                    );
                }
            }
        }
    }
}
