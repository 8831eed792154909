//! The optimisation strategies and their registry.
