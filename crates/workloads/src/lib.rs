//! Real programs that stress one thing each.
