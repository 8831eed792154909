//! A disk with a queue.
//!
//! One server: random reads cost a positioning each and bring a cluster of pages; sequential streams cost bandwidth.
//! What waits in front of it follows the open single-server queue: response = service / (1 - use).

use homeostat_model::Bytes;
use serde::{Deserialize, Serialize};

/// Use beyond which the queue is not followed: the response then is twenty times the service.
const USE_MAX: f64 = 0.95;

/// A disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Disk {
    /// Time of one random read in milliseconds (8 for a disk that turns, 0.1 for flash).
    pub random_ms: f64,
    /// Pages that one random read brings in.
    pub cluster_pages: f64,
    /// Sequential speed in MB/s.
    pub sequential_mb_s: f64,
}

impl Default for Disk {
    /// A disk that turns: 8 ms, clusters of 4 pages (machine-model B.2: 2 ms a page), 100 MB/s.
    fn default() -> Self {
        Self {
            random_ms: 8.0,
            cluster_pages: 4.0,
            sequential_mb_s: 100.0,
        }
    }
}

impl Disk {
    /// What is wrong with it.
    pub fn complaints(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!("disk.{name} = {value}: must be between {low} and {high}"));
            }
        };
        range("random_ms", self.random_ms, 0.001, 1000.0);
        range("cluster_pages", self.cluster_pages, 1.0, 1024.0);
        range("sequential_mb_s", self.sequential_mb_s, 0.1, 1e6);
        wrong
    }

    /// Time of one page-in on an idle disk, in seconds.
    pub fn page_in_s(&self) -> f64 {
        self.random_ms / 1e3 / self.cluster_pages
    }

    /// Share of its time that the disk is busy, 0..; above 1 it cannot keep up.
    pub fn busy(&self, pages_in_per_s: f64, stream: Bytes) -> f64 {
        pages_in_per_s * self.page_in_s() + stream.0 as f64 / (self.sequential_mb_s * 1e6)
    }

    /// Time of one page-in in seconds when others keep the disk busy for this share of its time.
    pub fn page_in_behind_s(&self, others: f64) -> f64 {
        self.page_in_s() / (1.0 - others.clamp(0.0, USE_MAX))
    }

    /// What is left of a stream (bytes per second) when page-ins take their part first.
    pub fn stream_beside(&self, wanted: f64, pages_in_per_s: f64) -> f64 {
        let left = (1.0 - pages_in_per_s * self.page_in_s()).clamp(1.0 - USE_MAX, 1.0);
        wanted.min(left * self.sequential_mb_s * 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turning_disk_needs_two_milliseconds_a_page_and_more_behind_a_queue() {
        let d = Disk::default();
        assert!((d.page_in_s() - 0.002).abs() < 1e-12);
        assert!((d.page_in_behind_s(0.5) - 0.004).abs() < 1e-12);
        assert!(
            d.page_in_behind_s(7.0) <= 0.002 / (1.0 - USE_MAX) + 1e-12,
            "bounded"
        );
        assert!((d.busy(250.0, Bytes(50_000_000)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn streams_give_way_to_page_ins_but_never_stop() {
        let d = Disk::default();
        assert_eq!(d.stream_beside(1e6, 0.0), 1e6);
        assert!((d.stream_beside(1e9, 250.0) - 50e6).abs() < 1.0);
        assert!(d.stream_beside(1e9, 1e6) > 0.0);
    }

    #[test]
    fn impossible_disks_are_named() {
        let d = Disk {
            random_ms: 0.0,
            ..Disk::default()
        };
        assert!(d.complaints().join("").contains("disk.random_ms"));
        assert!(Disk::default().complaints().is_empty());
    }
}
