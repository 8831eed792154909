//! Progress counters that a program publishes for homeostat.
