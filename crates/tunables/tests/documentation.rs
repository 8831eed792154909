//! docs/tunables.md says what the catalogue says.

use homeostat_tunables::{Catalogue, markdown};

#[test]
fn the_reference_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tunables.md");
    let text = markdown::reference(&Catalogue::load().expect("the catalogue is sound"));
    if std::env::var_os("HOMEOSTAT_UPDATE_DOCS").is_some() {
        std::fs::write(path, &text).expect("docs can be written");
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == text,
        "docs/tunables.md is not up to date: HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-tunables"
    );
}
