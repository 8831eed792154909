//! Quantities that carry their unit in the type.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, AddAssign, Mul, Sub};

/// Defines a transparent text identifier: a newtype over `String` that cannot be confused with another one.
#[macro_export]
macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);
        impl $name {
            /// Wraps the text.
            pub fn new(text: impl Into<String>) -> Self { Self(text.into()) }
            /// The text.
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.pad(&self.0) }
        }
        impl std::ops::Deref for $name {
            type Target = str;
            fn deref(&self) -> &str { &self.0 }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self { Self(text.to_owned()) }
        }
    };
}

/// Defines a closed list of words: an enum that people, JSON and the history all know by the same words.
#[macro_export]
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$about])* #[serde(rename = $word)] $variant,)+ }
        impl $name {
            /// All of them, in order.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];
            /// Its word.
            pub const fn as_str(self) -> &'static str { match self { $(Self::$variant => $word,)+ } }
            /// The one with this word.
            pub fn of(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.as_str() == word)
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.pad(self.as_str()) }
        }
        impl std::ops::Deref for $name {
            type Target = str;
            fn deref(&self) -> &str { self.as_str() }
        }
    };
}

/// A length of time, or an instant as time since the machine booted (CLOCK_MONOTONIC), in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nanoseconds(pub u64);

impl Nanoseconds {
    /// No time at all.
    pub const ZERO: Self = Self(0);
    /// From whole milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }
    /// From whole seconds.
    pub const fn from_secs(s: u64) -> Self {
        Self(s.saturating_mul(1_000_000_000))
    }
    /// From seconds; negative and non-finite values become zero.
    pub fn from_secs_f64(s: f64) -> Self {
        if s.is_finite() && s > 0.0 {
            Self((s * 1e9) as u64)
        } else {
            Self(0)
        }
    }
    /// As seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
    /// As whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }
    /// Difference that stops at zero.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
    /// As a share of another time; 0 of none.
    pub fn share_of(self, all: Self) -> f64 {
        if all.0 > 0 {
            self.as_secs_f64() / all.as_secs_f64()
        } else {
            0.0
        }
    }
}
impl Add for Nanoseconds {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self(self.0.saturating_add(o.0))
    }
}
impl AddAssign for Nanoseconds {
    fn add_assign(&mut self, o: Self) {
        *self = *self + o;
    }
}
impl Sub for Nanoseconds {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        self.saturating_sub(o)
    }
}
impl Mul<u64> for Nanoseconds {
    type Output = Self;
    fn mul(self, k: u64) -> Self {
        Self(self.0.saturating_mul(k))
    }
}
impl fmt::Display for Nanoseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.as_secs_f64();
        if s >= 86_400.0 {
            write!(f, "{:.1} d", s / 86_400.0)
        } else if s >= 3_600.0 {
            write!(f, "{:.1} h", s / 3_600.0)
        } else if s >= 120.0 {
            write!(f, "{:.1} min", s / 60.0)
        } else if s >= 1.0 {
            write!(f, "{s:.1} s")
        } else {
            write!(f, "{:.1} ms", s * 1e3)
        }
    }
}

/// An amount of memory or data in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// From KiB.
    pub const fn from_kib(k: u64) -> Self {
        Self(k.saturating_mul(1024))
    }
    /// From MiB.
    pub const fn from_mib(m: u64) -> Self {
        Self(m.saturating_mul(1024 * 1024))
    }
    /// In MiB, with fraction.
    pub fn as_mib_f64(self) -> f64 {
        self.0 as f64 / (1024.0 * 1024.0)
    }
    /// Difference that stops at zero.
    pub const fn saturating_sub(self, o: Self) -> Self {
        Self(self.0.saturating_sub(o.0))
    }
}
impl Add for Bytes {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self(self.0.saturating_add(o.0))
    }
}
impl AddAssign for Bytes {
    fn add_assign(&mut self, o: Self) {
        *self = *self + o;
    }
}
impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), |a, b| a + b)
    }
}
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = self.0 as f64;
        if b >= 1024f64.powi(3) {
            write!(f, "{:.2} GiB", b / 1024f64.powi(3))
        } else if b >= 1024f64.powi(2) {
            write!(f, "{:.1} MiB", b / 1024f64.powi(2))
        } else if b >= 1024.0 {
            write!(f, "{:.0} KiB", b / 1024.0)
        } else {
            write!(f, "{} B", self.0)
        }
    }
}

/// A dimensionless share or relative change; 0.05 is five percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ratio(pub f64);

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:+.1} %", self.0 * 100.0)
    }
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { self.0.fmt(f) }
        }
        impl From<$name> for u32 {
            fn from(id: $name) -> Self { id.0 }
        }
    };
}
number_id!(
    /// A logical CPU (hardware thread), as the kernel numbers it.
    CpuId
);
number_id!(
    /// A NUMA node, as the kernel numbers it.
    NodeId
);
number_id!(
    /// A last-level-cache domain: the lowest CPU number that shares the cache.
    LlcId
);

/// Numbers of CPUs or nodes as the kernel and people write them: `0-15,32`. The numbers must ascend.
pub fn ranges(numbers: impl IntoIterator<Item = impl Into<u32>>) -> String {
    let mut out = String::new();
    let mut open: Option<(u32, u32)> = None;
    let mut close = |range: (u32, u32)| {
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str(&range.0.to_string());
        if range.1 > range.0 {
            out.push('-');
            out.push_str(&range.1.to_string());
        }
    };
    for number in numbers.into_iter().map(Into::into) {
        open = Some(match open {
            Some((first, last)) if last.checked_add(1) == Some(number) => (first, number),
            Some(range) => {
                close(range);
                (number, number)
            }
            None => (number, number),
        });
    }
    if let Some(range) = open {
        close(range);
    }
    out
}

/// How numbers that may be infinite or not a number are written down: as numbers where they are finite, else as the
/// words `inf`, `-inf` and `nan`. JSON has no word of its own for them, and a recording must lose nothing.
///
/// For `#[serde(with = "homeostat_model::units::any_number")]`.
pub mod any_number {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Word(String),
        /// As older versions wrote all three.
        Nothing(()),
    }

    /// Writes it down.
    ///
    /// # Errors
    /// Those of the format.
    pub fn serialize<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
        if x.is_finite() {
            to.serialize_f64(*x)
        } else if x.is_nan() {
            to.serialize_str("nan")
        } else {
            to.serialize_str(if *x > 0.0 { "inf" } else { "-inf" })
        }
    }

    /// Reads it back.
    ///
    /// # Errors
    /// It is neither a number nor one of the words.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        match Written::deserialize(from)? {
            Written::Number(x) => Ok(x),
            Written::Nothing(()) => Ok(f64::NAN),
            Written::Word(w) => match w.as_str() {
                "inf" => Ok(f64::INFINITY),
                "-inf" => Ok(f64::NEG_INFINITY),
                "nan" => Ok(f64::NAN),
                _ => Err(D::Error::custom(format!("{w:?} is not a number"))),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_the_same_everywhere() {
        use crate::ExperimentKind::{self, Placebo, StagedRollout, Switchback};
        assert_eq!(ExperimentKind::ALL, [Switchback, StagedRollout, Placebo]);
        for kind in ExperimentKind::ALL.iter().copied() {
            assert_eq!(ExperimentKind::of(kind.as_str()), Some(kind));
            assert_eq!(
                (kind.to_string().as_str(), &*kind),
                (kind.as_str(), kind.as_str())
            );
        }
        assert_eq!(
            (StagedRollout.as_str(), ExperimentKind::of("staged")),
            ("staged_rollout", None)
        );
        assert_eq!(format!("{Placebo:<8}|"), "placebo |");
    }

    #[test]
    fn ranges_read_like_the_kernels() {
        assert_eq!(ranges([0u32, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
        assert_eq!(ranges([0u32; 0]), "");
        assert_eq!(ranges([u32::MAX - 1, u32::MAX]), "4294967294-4294967295");
    }
}
