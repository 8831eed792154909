//! The mind: pure, deterministic decisions.
