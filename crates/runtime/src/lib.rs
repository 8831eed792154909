//! Carries out the commands of the engine: journal first, act, confirm, record.
