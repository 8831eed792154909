//! Experiment statistics: switchback trials, test martingales, false-discovery control.
//!
//! Inputs are plain numbers: scores (natural logarithms of a metric, more is better), random assignments (coins) and
//! seconds. The crate reads no clock and draws no randomness. Score differences are relative changes in log units: 0.02
//! is a gain of 2 %.
//!
//! Only IEEE 754 addition, multiplication, division and square root are used, with own `exp` and `ln` ([`robust`]). So
//! every machine computes the same bits, and a recording replays to the same decisions elsewhere.
//!
//! | module | question it answers |
//! |---|---|
//! | [`switchback`] | is the change a gain, a loss, or not worth it? (randomised on/off blocks) |
//! | [`block_length`] | how long must a block be, and can anything be proven at all within the budget? |
//! | [`discovery`] | which level may the next of many tries use? |
//! | [`control`] | which noise did others see as well, so that it can be taken out? |
//! | [`fresh`] | how large is an accepted gain, exactly? |
//! | [`scar`] | is the gain only a scar of the undo? |
//! | [`schedule`] | which pairs follow an acceptance? |
//! | [`guard`] | does an accepted gain last? |
//! | [`breaker`] | must this block be ended at once? |
//! | [`trimmed`] | did somebody else lose by it? |
//! | [`robust`] | medians, spreads, correlations, stable elementary functions, quality of a work meter |

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod block_length;
pub mod breaker;
pub mod control;
pub mod discovery;
pub mod fresh;
pub mod guard;
pub mod onset;
pub mod robust;
pub mod scar;
pub mod schedule;
pub mod simulation;
pub mod staged;
pub mod switchback;
pub mod trimmed;

pub use switchback::{Arm, Decision, Design, Estimate, Trial, TrialParameters};
