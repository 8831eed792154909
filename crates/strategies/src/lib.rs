//! The optimisation strategies, one file each, and their registry.
//!
//! What several of them need (the machine's domains, the demand on them, predictions) is in `common`.
//!
//! To add one: copy `large_pages.rs`, write its headings (*What · Why it helps · When it hurts · Evidence · Undo ·
//! References*; they become its page in the book), and add one line to [`all`].
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod autotune;
mod cache_affinity;
mod common;
mod consolidation;
mod file_cache;
mod large_pages;
mod memory_affinity;
mod numa_balancing;
mod prefetch;
mod relocation;

pub use common::score::{PlacementScore, Scored, placement_scores};
use homeostat_engine::Strategy;

/// All strategies, in the order in which they are considered: threads before the memory that follows them, and both
/// before large pages, which are not moved any more; last what is set for the whole host.
pub fn all() -> Vec<Box<dyn Strategy>> {
    vec![
        Box::new(cache_affinity::CacheAffinity),
        Box::new(memory_affinity::MemoryAffinity),
        Box::new(consolidation::CONSOLIDATION),
        Box::new(relocation::RELOCATION),
        Box::new(large_pages::LargePages),
        Box::new(prefetch::Prefetch),
        Box::new(numa_balancing::NumaBalancing),
        Box::new(file_cache::FileCache),
        Box::new(autotune::AutotuneClassic),
    ]
}

/// The documentation of each strategy as Markdown, from its own source: (id, text).
pub fn book() -> Vec<(&'static str, String)> {
    vec![
        ("cache_affinity", doc_comment(include_str!("cache_affinity.rs"))),
        ("memory_affinity", doc_comment(include_str!("memory_affinity.rs"))),
        ("consolidation", doc_comment(include_str!("consolidation.rs"))),
        ("relocation", doc_comment(include_str!("relocation.rs"))),
        ("large_pages", doc_comment(include_str!("large_pages.rs"))),
        ("prefetch", doc_comment(include_str!("prefetch.rs"))),
        ("numa_balancing", doc_comment(include_str!("numa_balancing.rs"))),
        ("file_cache", doc_comment(include_str!("file_cache.rs"))),
        ("autotune", doc_comment(include_str!("autotune.rs"))),
    ]
}

fn doc_comment(source: &str) -> String {
    source
        .lines()
        .take_while(|l| l.starts_with("//!"))
        .map(|l| l.trim_start_matches("//!").strip_prefix(' ').unwrap_or(""))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_every_strategy_has_its_page() {
        let mut ids: Vec<String> = all().iter().map(|s| s.id().to_string()).collect();
        let pages: Vec<&str> = book().iter().map(|b| b.0).collect();
        assert_eq!(ids.iter().map(String::as_str).collect::<Vec<_>>(), pages);
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), all().len());
        for (id, text) in book() {
            for heading in [
                "## What",
                "## Why it helps",
                "## When it hurts",
                "## Evidence",
                "## Undo",
                "## References",
            ] {
                assert!(text.contains(heading), "{id} lacks the heading {heading}");
            }
        }
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test over the documentation")]
    fn the_book_has_the_pages_as_they_stand_in_the_source() {
        let book_directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/strategies");
        for (id, text) in book() {
            let page = book_directory.join(format!("{id}.md"));
            let wanted = format!("<!-- made from crates/strategies/src/{id}.rs -->\n\n{text}\n");
            if std::env::var("HOMEOSTAT_UPDATE_DOCS").is_ok() {
                std::fs::create_dir_all(&book_directory).unwrap();
                std::fs::write(&page, &wanted).unwrap();
            }
            let found = std::fs::read_to_string(&page).unwrap_or_default();
            assert!(
                found == wanted,
                "{} is not in step: HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-strategies",
                page.display()
            );
        }
    }

    #[test]
    fn settings_carry_their_strategy_and_both_profiles_lie_in_their_range() {
        for strategy in all() {
            let mut names = Vec::new();
            for setting in strategy.settings() {
                assert_eq!(setting.strategy, strategy.id().as_str(), "{}", setting.name);
                assert!(setting.low < setting.high, "{setting:?}");
                for value in [setting.default, setting.classic] {
                    assert!((setting.low..=setting.high).contains(&value), "{setting:?}");
                }
                assert!(
                    setting.help.len() > 20 && !setting.help.ends_with('.'),
                    "{setting:?}"
                );
                names.push(setting.name);
            }
            assert!(!names.is_empty(), "{} has no thresholds", strategy.id());
            names.sort_unstable();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{}: a name twice", strategy.id());
        }
    }

    #[test]
    fn every_source_file_is_registered() {
        let files = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        #[expect(clippy::disallowed_methods, reason = "a test over the source tree")]
        let mut names: Vec<String> = std::fs::read_dir(files)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|path| path.is_file())
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .filter(|n| n != "lib")
            .collect();
        names.sort();
        let mut ids: Vec<String> = all().iter().map(|s| s.id().to_string()).collect();
        ids.sort();
        assert_eq!(names, ids);
    }
}
