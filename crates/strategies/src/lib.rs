//! The optimisation strategies, one file each, and their registry.
//!
//! To add one: copy `large_pages.rs`, write its headings (*What · Why it helps · When it hurts · Evidence · Undo ·
//! References*; they become its page in the book), and add one line to [`all`].
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod large_pages;

use homeostat_engine::Strategy;

/// All strategies, in the order in which they are considered.
pub fn all() -> Vec<Box<dyn Strategy>> {
    vec![Box::new(large_pages::LargePages)]
}

/// The documentation of each strategy as Markdown, from its own source: (id, text).
pub fn book() -> Vec<(&'static str, String)> {
    vec![("large_pages", doc_comment(include_str!("large_pages.rs")))]
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
    fn every_source_file_is_registered() {
        let files = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        #[expect(clippy::disallowed_methods, reason = "a test over the source tree")]
        let mut names: Vec<String> = std::fs::read_dir(files)
            .unwrap()
            .map(|e| {
                e.unwrap()
                    .path()
                    .file_stem()
                    .unwrap()
                    .to_string_lossy()
                    .into_owned()
            })
            .filter(|n| n != "lib")
            .collect();
        names.sort();
        let mut ids: Vec<String> = all().iter().map(|s| s.id().to_string()).collect();
        ids.sort();
        assert_eq!(names, ids);
    }
}
