//! Crash-safe journal and SQLite history.
