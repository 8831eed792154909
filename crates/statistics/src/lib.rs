//! Experiment statistics: switchback trials, test martingales, false-discovery control.
