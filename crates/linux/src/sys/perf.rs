//! Counting through perf events.
