//! Newton's method for the speeds of all workloads.

use super::Warm;

/// Use and queue length of every resource at the given speeds (instructions per cycle). Returns the largest `|1 - speed
/// · cycles|`, infinite beyond a capacity. `residual` gets the signed values, `cycles` those with queues.
fn evaluate(w: &mut Warm, speed: &[f64]) -> f64 {
    let count = speed.len();
    w.cycles.copy_from_slice(&w.fixed);
    for r in &w.active {
        let row = r * count..(r + 1) * count;
        let asked: f64 = w.load[row.clone()]
            .iter()
            .zip(speed)
            .map(|(load, x)| load * x)
            .sum();
        let rho = asked + w.copied[*r];
        let idle = 1.0 - rho;
        if idle <= 0.0 {
            return f64::INFINITY;
        }
        let service = w.map.service[*r];
        w.rho[*r] = rho;
        w.queue[*r] = service * rho / (2.0 * idle);
        w.slope[*r] = service / (2.0 * idle * idle);
        for (cycles, delay) in w.cycles.iter_mut().zip(&w.delay[row]) {
            *cycles += delay * w.queue[*r];
        }
    }
    let mut error = 0.0_f64;
    for ((residual, cycles), x) in w.newton.residual.iter_mut().zip(&w.cycles).zip(speed) {
        *residual = 1.0 - x * cycles;
        error = error.max(residual.abs());
    }
    error
}

/// Relative error at which the equations count as solved.
const ACCURACY: f64 = 1e-12;
/// Acceptable relative error if arithmetic stops short.
const TOLERANCE: f64 = 1e-10;
/// Most Newton steps; three to six are usual.
const STEPS_MAX: usize = 60;
const HALVINGS_MAX: usize = 10;
/// Largest step towards full use of a resource.
const BRINK: f64 = 0.98;
/// Larger uses at the start are scaled down to this.
const START: f64 = 0.9;

/// Solves speed · (fixed + delay · queue(load · speed)) = 1 by Newton's method within the resources' capacity, where
/// queues grow without limit: a solution always exists. Without progress, solves for each workload in turn.
pub(super) fn fixed_point(w: &mut Warm) -> bool {
    let count = w.fixed.len();
    let mut speed = std::mem::take(&mut w.speed);
    if speed.len() != count {
        speed.clear();
        speed.extend(w.fixed.iter().map(|f| 1.0 / f));
    }
    for (x, fixed) in speed.iter_mut().zip(&w.fixed) {
        *x = x.min(1.0 / fixed);
    }
    let highest = highest_use(w, &speed);
    if highest > 0.999 {
        speed.iter_mut().for_each(|x| *x *= START / highest);
    }
    let mut error = evaluate(w, &speed);
    let mut trial = std::mem::take(&mut w.newton.trial);
    for _ in 0..STEPS_MAX {
        if error <= ACCURACY {
            break;
        }
        newton_step(w, &speed);
        let mut scale = longest_step(w, &speed);
        let mut after = f64::INFINITY;
        for _ in 0..HALVINGS_MAX {
            for ((t, x), step) in trial.iter_mut().zip(&speed).zip(&w.newton.step) {
                *t = x + scale * step;
            }
            after = evaluate(w, &trial);
            if after < error {
                break;
            }
            scale *= 0.5;
        }
        if after < error {
            std::mem::swap(&mut speed, &mut trial);
            error = after;
        } else if error <= TOLERANCE {
            break;
        } else {
            by_turns(w, &mut speed);
            error = evaluate(w, &speed);
        }
    }
    error = error.min(evaluate(w, &speed));
    w.newton.trial = trial;
    w.speed = speed;
    error <= TOLERANCE
}

/// Use of the busiest resource, as a share of what copying leaves.
fn highest_use(w: &Warm, speed: &[f64]) -> f64 {
    let count = speed.len();
    let of = |r: &usize| -> f64 {
        let asked: f64 = w.load[r * count..(r + 1) * count]
            .iter()
            .zip(speed)
            .map(|(l, x)| l * x)
            .sum();
        asked / (1.0 - w.copied[*r])
    };
    w.active.iter().map(of).fold(0.0, f64::max)
}

/// The part of `step`, at most 1, that keeps every speed positive and every resource below full.
fn longest_step(w: &Warm, speed: &[f64]) -> f64 {
    let count = speed.len();
    let mut longest = 1.0_f64;
    for (x, step) in speed.iter().zip(&w.newton.step) {
        if *step < 0.0 {
            longest = longest.min(-BRINK * x / step);
        }
    }
    for r in &w.active {
        let more: f64 = w.load[r * count..(r + 1) * count]
            .iter()
            .zip(&w.newton.step)
            .map(|(l, s)| l * s)
            .sum();
        if more > 0.0 {
            longest = longest.min(BRINK * (1.0 - w.rho[*r]) / more);
        }
    }
    longest
}

/// One Newton step in `step`: solves (cycles + speed · delay · slope · load) step = residual by elimination.
fn newton_step(w: &mut Warm, speed: &[f64]) {
    let count = speed.len();
    w.newton.matrix.fill(0.0);
    for r in &w.active {
        let row = r * count..(r + 1) * count;
        let (delay, load) = (&w.delay[row.clone()], &w.load[row]);
        let slope = w.slope[*r];
        for ((line, d), x) in w.newton.matrix.chunks_exact_mut(count).zip(delay).zip(speed) {
            let weight = d * slope * x;
            if weight > 0.0 {
                for (m, l) in line.iter_mut().zip(load) {
                    *m += weight * l;
                }
            }
        }
    }
    // Scale columns by speed: relative changes are the natural unit.
    for (g, line) in w.newton.matrix.chunks_exact_mut(count).enumerate() {
        line[g] += w.cycles[g];
        for (m, x) in line.iter_mut().zip(speed) {
            *m *= x;
        }
    }
    w.newton.step.copy_from_slice(&w.newton.residual);
    let (m, x) = (&mut w.newton.matrix, &mut w.newton.step);
    for k in 0..count {
        let pivot = (k..count).fold(k, |best, i| {
            if m[i * count + k].abs() > m[best * count + k].abs() {
                i
            } else {
                best
            }
        });
        if pivot != k {
            for j in 0..count {
                m.swap(pivot * count + j, k * count + j);
            }
            x.swap(pivot, k);
        }
        let diagonal = m[k * count + k];
        if diagonal == 0.0 {
            continue;
        }
        let (above, below) = m.split_at_mut((k + 1) * count);
        let head = &above[k * count + k..];
        for (i, line) in below.chunks_exact_mut(count).enumerate() {
            let factor = line[k] / diagonal;
            if factor != 0.0 {
                for (a, b) in line[k..].iter_mut().zip(head) {
                    *a -= factor * b;
                }
                x[k + 1 + i] -= factor * x[k];
            }
        }
    }
    for k in (0..count).rev() {
        let sum: f64 = (k + 1..count).map(|j| m[k * count + j] * x[j]).sum();
        let diagonal = m[k * count + k];
        x[k] = if diagonal == 0.0 {
            0.0
        } else {
            (x[k] - sum) / diagonal
        };
    }
    for (step, x) in x.iter_mut().zip(speed) {
        *step *= x;
    }
}

/// Bisects each workload in turn with the others fixed (60 steps) and goes half the way: slow and sure.
fn by_turns(w: &mut Warm, speed: &mut [f64]) {
    for g in 0..speed.len() {
        let old = speed[g];
        let (mut low, mut high) = (0.0, 1.0 / w.fixed[g]);
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            speed[g] = middle;
            let fits = evaluate(w, speed).is_finite() && w.newton.residual[g] > 0.0;
            if fits { low = middle } else { high = middle }
        }
        // The old speed fitted and the new one fits, so their mean fits.
        speed[g] = (old * low.max(old * 1e-3)).sqrt();
    }
}
