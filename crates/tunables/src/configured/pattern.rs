//! Patterns of file names as shells, udev and tmpfiles.d have them: `*`, `?`, `[a-z]`, `[!a]`. None goes over a slash.

/// Whether a text is a pattern.
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// Whether a name fits one of several patterns parted by `|`, as in udev rules.
pub fn fits_any(patterns: &str, name: &str) -> bool {
    patterns.split('|').any(|p| fits(p, name))
}

/// Longest pattern or name that is compared.
const LENGTH_MAX: usize = 4096;

/// Whether a name fits a pattern. Takes time in proportion to the product of their lengths at most.
pub fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    if pattern.len() > LENGTH_MAX || name.len() > LENGTH_MAX {
        return false;
    }
    let (mut p, mut n) = (0, 0);
    // Where to go on when what follows the last star does not fit.
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        let byte = name.get(n).copied().unwrap_or_default();
        let step = match pattern.get(p) {
            Some(b'*') => {
                back = Some((p + 1, n));
                p += 1;
                continue;
            }
            Some(b'?') if byte != b'/' => Some(p + 1),
            Some(b'[') if byte != b'/' => class(pattern, p, byte),
            Some(literal) if *literal == byte => Some(p + 1),
            _ => None,
        };
        match (step, back) {
            (Some(next), _) => {
                p = next;
                n += 1;
            }
            // The star takes one byte more, but no slash.
            (None, Some((after, from))) if name.get(from) != Some(&b'/') => {
                back = Some((after, from + 1));
                p = after;
                n = from + 1;
            }
            (None, _) => return false,
        }
    }
    pattern.get(p..).unwrap_or_default().iter().all(|b| *b == b'*')
}

/// Where the pattern goes on after the class at `start` when it holds the byte.
fn class(pattern: &[u8], start: usize, byte: u8) -> Option<usize> {
    let mut at = start + 1;
    let negated = matches!(pattern.get(at), Some(b'!' | b'^'));
    at += usize::from(negated);
    let first = at;
    let mut holds = false;
    loop {
        let low = *pattern.get(at)?;
        if low == b']' && at > first {
            return (holds != negated).then_some(at + 1);
        }
        match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'-'), Some(&high)) if high != b']' => {
                holds |= (low..=high).contains(&byte);
                at += 3;
            }
            _ => {
                holds |= low == byte;
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_fit_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("a", "a", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c*e", "abcde", true),
            ("a?c", "abc", true),
            ("sd[a-z]", "sda", true),
            ("sd[!a]", "sda", false),
            ("sd[!a]*", "sdb1", true),
            (
                "/sys/block/*/queue/scheduler",
                "/sys/block/vda/queue/scheduler",
                true,
            ),
            ("/sys/*/scheduler", "/sys/block/vda/scheduler", false),
            ("[", "[", false),
            ("", "", true),
            ("*", "", true),
            ("nvme[0-9]n*", "nvme10n1", false),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
        assert!(fits_any("sd*|nvme*", "nvme0n1") && !fits_any("sd*|nvme*", "vda"));
    }

    proptest! {
        #[test]
        fn never_panics_and_a_text_fits_itself(pattern in "[a*?\\[\\]!/-]{0,30}", name in "[ab/]{0,30}") {
            let _ = fits(&pattern, &name);
            prop_assert!(fits(&name, &name));
        }
    }
}
