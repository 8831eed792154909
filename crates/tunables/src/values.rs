//! Which values a setting takes, and when two texts mean the same one.

use std::fmt;

/// The values of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Values {
    /// So many whole numbers, each between these (inclusive); `None` = as far as the kernel goes.
    Integers {
        /// How many numbers the file holds.
        count: usize,
        /// Smallest.
        min: Option<i128>,
        /// Largest.
        max: Option<i128>,
    },
    /// One of these words. Kernel files that list all put the chosen one into brackets.
    Words(Vec<String>),
    /// One of the words that the file itself lists.
    Listed,
    /// Free text.
    Text,
}

/// Longest value that is written.
const TEXT_MAX: usize = 4096;

impl Values {
    /// From the notation of the catalogue: `0..200`, `..`, `3 x 0..`, `always|madvise|never`, `listed`, `text`.
    ///
    /// # Errors
    /// The notation that is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no notation of values");
        match text {
            "listed" => return Ok(Self::Listed),
            "text" => return Ok(Self::Text),
            _ => {}
        }
        if text.contains('|') {
            return Ok(Self::Words(
                text.split('|').map(|w| w.trim().to_owned()).collect(),
            ));
        }
        let (count, range) = match text.split_once(" x ") {
            Some((count, range)) => (count.trim().parse().map_err(|_| wrong())?, range.trim()),
            None => (1, text),
        };
        let (low, high) = range.split_once("..").ok_or_else(wrong)?;
        let bound = |t: &str| match t.trim() {
            "" => Ok(None),
            t => t.parse::<i128>().map(Some).map_err(|_| wrong()),
        };
        Ok(Self::Integers {
            count,
            min: bound(low)?,
            max: bound(high)?,
        })
    }

    /// What a file's text says: the word in brackets where all are listed, white space reduced to single blanks.
    pub fn normal(&self, text: &str) -> String {
        let plain = text.split_whitespace().collect::<Vec<_>>().join(" ");
        match self {
            Self::Integers { .. } => match plain.strip_prefix("0x") {
                Some(hex) => i128::from_str_radix(hex, 16).map_or(plain.clone(), |n| n.to_string()),
                None => plain,
            },
            Self::Listed => chosen(&plain).unwrap_or(plain),
            Self::Words(words) => {
                let word = chosen(&plain).unwrap_or(plain);
                // Y and 1, N and 0, true and false: kernel files take several and show one.
                let is = |of: &[&str]| of.iter().any(|w| w.eq_ignore_ascii_case(&word));
                let has = |w: &str| words.iter().any(|x| x == w);
                let (yes, no) = (["Y", "1", "true", "on"], ["N", "0", "false", "off"]);
                if has(&word) {
                    word
                } else if is(&yes) {
                    yes.iter()
                        .find(|w| has(w))
                        .map_or(word.clone(), |w| (*w).to_owned())
                } else if is(&no) {
                    no.iter()
                        .find(|w| has(w))
                        .map_or(word.clone(), |w| (*w).to_owned())
                } else {
                    word
                }
            }
            Self::Text => plain,
        }
    }

    /// The value to write for what a person typed. `shown` is what the file says now.
    ///
    /// # Errors
    /// Why it is no value of this setting, with the range.
    pub fn check(&self, typed: &str, shown: &str) -> Result<String, String> {
        if typed.len() > TEXT_MAX || typed.contains(['\0', '\n']) {
            return Err(format!("a value is one line of at most {TEXT_MAX} bytes"));
        }
        let value = self.normal(typed);
        match self {
            Self::Integers { count, min, max } => {
                let words: Vec<&str> = value.split(' ').collect();
                if words.len() != *count {
                    return Err(format!("expected {self}"));
                }
                for word in words {
                    let n: i128 = word
                        .parse()
                        .map_err(|_| format!("{word:?} is no whole number; expected {self}"))?;
                    if min.is_some_and(|m| n < m) || max.is_some_and(|m| n > m) {
                        return Err(format!("{n} is out of range; expected {self}"));
                    }
                }
                Ok(value)
            }
            Self::Words(words) if words.contains(&value) => Ok(value),
            Self::Words(_) => Err(format!("{value:?} is no value of it; expected {self}")),
            Self::Listed => {
                let listed: Vec<&str> = shown
                    .split_whitespace()
                    .map(|w| w.trim_matches(['[', ']']))
                    .collect();
                // A file that shows only what is in force leaves the check to the kernel.
                if listed.len() < 2 || listed.contains(&value.as_str()) {
                    Ok(value)
                } else {
                    Err(format!(
                        "{value:?} is not offered here; expected {}",
                        listed.join(", ")
                    ))
                }
            }
            Self::Text => Ok(value),
        }
    }

    /// The value as a number, where it is one.
    pub fn number(value: &str) -> Option<f64> {
        match value {
            "Y" | "true" => Some(1.0),
            "N" | "false" => Some(0.0),
            v => v.split(' ').next()?.parse::<f64>().ok().filter(|n| n.is_finite()),
        }
    }
}

/// The word in brackets.
fn chosen(text: &str) -> Option<String> {
    text.split(' ')
        .find_map(|w| w.strip_prefix('[')?.strip_suffix(']'))
        .map(str::to_owned)
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integers { count, min, max } => {
                if *count > 1 {
                    write!(f, "{count} numbers, each ")?;
                }
                match (min, max) {
                    (Some(a), Some(b)) => write!(f, "{a} to {b}"),
                    (Some(a), None) => write!(f, "{a} or more"),
                    (None, Some(b)) => write!(f, "at most {b}"),
                    (None, None) => f.write_str("a whole number"),
                }
            }
            Self::Words(words) => f.write_str(&words.join(", ")),
            Self::Listed => f.write_str("one of those that the file lists"),
            Self::Text => f.write_str("text"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notations_are_understood_and_shown() {
        for (notation, shown) in [
            ("0..200", "0 to 200"),
            ("-1..", "-1 or more"),
            ("..", "a whole number"),
            ("3 x 0..", "3 numbers, each 0 or more"),
            ("always|never", "always, never"),
            ("text", "text"),
        ] {
            assert_eq!(Values::parse(notation).unwrap().to_string(), shown);
        }
        for wrong in ["", "5", "a..b", "x x 0..1"] {
            assert!(Values::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_file_shows_is_brought_into_one_form() {
        let words = Values::parse("always|madvise|never").unwrap();
        assert_eq!(words.normal("always [madvise] never\n"), "madvise");
        assert_eq!(Values::parse("N|Y").unwrap().normal("1\n"), "Y");
        assert_eq!(Values::parse("false|true").unwrap().normal("N"), "false");
        assert_eq!(
            Values::parse("3 x 0..").unwrap().normal("4096\t16384\t99\n"),
            "4096 16384 99"
        );
        assert_eq!(Values::parse("0..").unwrap().normal("0xff\n"), "255");
        assert_eq!(Values::Listed.normal("none [mq-deadline] kyber"), "mq-deadline");
    }

    #[test]
    fn only_values_in_range_are_taken() {
        let range = Values::parse("0..200").unwrap();
        assert_eq!(range.check(" 10 ", "60"), Ok("10".to_owned()));
        for wrong in ["201", "-1", "ten", "", "1 2", "1\n2"] {
            assert!(range.check(wrong, "60").is_err(), "{wrong:?}");
        }
        let words = Values::parse("always|never").unwrap();
        assert!(words.check("never", "").is_ok() && words.check("sometimes", "").is_err());
        let shown = "none [mq-deadline]";
        assert!(Values::Listed.check("none", shown).is_ok());
        assert!(Values::Listed.check("cfq", shown).is_err());
        assert!(Values::Listed.check("performance", "schedutil").is_ok());
        assert!(Values::Text.check(&"x".repeat(5000), "").is_err());
    }
}
