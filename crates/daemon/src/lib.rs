//! Wiring: settings, control socket, signals.
