//! The programs of the published results by name, and some that nobody published (`data/profiles.toml`).

use crate::hardware::Profile;
use serde::Deserialize;
use std::sync::LazyLock;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shipped {
    profiles: Vec<Profile>,
}

/// Part of the program; a test proves that it is readable.
static PROFILES: LazyLock<Vec<Profile>> = LazyLock::new(|| {
    let shipped: Shipped = toml::from_str(include_str!("../data/profiles.toml")).unwrap_or_default();
    shipped.profiles
});

/// Names that [`profile`] knows.
pub fn names() -> Vec<&'static str> {
    PROFILES.iter().map(|p| p.name.as_str()).collect()
}

/// The program of that name; `None` when there is none (see [`names`]).
pub fn profile(name: &str) -> Option<Profile> {
    PROFILES.iter().find(|p| p.name == name).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_is_sound() {
        assert_eq!(names().len(), 13);
        for name in names() {
            let p = profile(name).unwrap();
            for number in [p.b, p.m3, p.mx, p.mt, p.prefetch_lines, p.instructions_per_unit] {
                assert!(number.is_finite() && number >= 0.0, "{name}");
            }
            for part in [p.prefetch_covered, p.kin, p.cpu_share] {
                assert!((0.0..=1.0).contains(&part), "{name}");
            }
            let written = serde_json::to_string(&p).unwrap();
            assert_eq!(serde_json::from_str::<Profile>(&written).unwrap(), p);
        }
        assert!(profile("nonesuch").is_none());
    }

    #[test]
    fn spinning_takes_what_the_published_throughput_leaves() {
        let p = profile("oracle-oltp").unwrap();
        let ratio = p.instructions(4.855_15) / p.instructions(7.413_82);
        assert!((ratio - 1.2361).abs() < 1e-3, "{ratio}");
    }
}
