//! Sensors, meters and effectors of the real machine.
