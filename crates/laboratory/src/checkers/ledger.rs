//! Attributes changes of the machine's settings, and so knows the untouched picture.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// A value in a picture.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// An amount: bytes, pieces, pages. Zero is the same as absent.
    Amount(i128),
    /// A setting: a mask, a switch, a name.
    Setting(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(n) => n.fmt(f),
            Self::Setting(s) => s.fmt(f),
        }
    }
}

/// Settings that nobody chose: a person who sets them gives the choice back.
const FREE: [&str; 2] = ["all", "on"];

/// Everything that an effector or a person can change, by name.
pub type Picture = BTreeMap<String, Value>;

/// The author of a change between two pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hand {
    /// A program or the kernel.
    Machine,
    /// A person or another tuner.
    Person,
    /// An effector of homeostat.
    Ours,
}

/// Attributes every change of settings, and keeps the picture of the machine as if untouched.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    last: Picture,
    untouched: Picture,
    /// Settings (not amounts) that a person wrote while ours was in force.
    persons: BTreeMap<String, Value>,
    /// Amounts that a person moved while we owed something. Amounts do not show whose page moved: pages drained from a
    /// node look like ours and go back with them. Not compared until nothing is owed; then they are as they are.
    disputed: BTreeSet<String>,
}

/// The part of a name shared by all amounts of one program.
fn family(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(family, _)| family)
}

fn amount(value: Option<&Value>) -> Option<i128> {
    match value {
        None => Some(0),
        Some(Value::Amount(n)) => Some(*n),
        Some(Value::Setting(_)) => None,
    }
}

/// Whether two values are equal; an absent amount is zero.
fn same(a: Option<&Value>, b: Option<&Value>) -> bool {
    a == b || matches!((amount(a), amount(b)), (Some(x), Some(y)) if x == y && (a.is_some() || b.is_some()))
}

impl Ledger {
    /// A ledger that starts on an untouched machine.
    pub fn new(picture: Picture) -> Self {
        Self {
            untouched: picture.clone(),
            last: picture,
            persons: BTreeMap::new(),
            disputed: BTreeSet::new(),
        }
    }

    /// Records the changes of `hand`. Returns a person's settings that we overwrote: name, their value, ours.
    pub fn note(&mut self, hand: Hand, now: Picture) -> Vec<(String, Value, Option<Value>)> {
        let mut overwritten = Vec::new();
        if now == self.last {
            return overwritten;
        }
        let names: BTreeSet<&String> = self.last.keys().chain(now.keys()).collect();
        for name in names {
            let (before, after) = (self.last.get(name), now.get(name));
            if before == after {
                continue;
            }
            match hand {
                Hand::Ours => {
                    if let Some(persons) = self.persons.get(name) {
                        if after != Some(persons) {
                            overwritten.push((name.clone(), persons.clone(), after.cloned()));
                        }
                    }
                }
                Hand::Machine | Hand::Person => {
                    let ours = !same(self.untouched.get(name), before);
                    if hand == Hand::Person && matches!(before, Some(Value::Amount(_))) {
                        self.disputed.insert(family(name).to_owned());
                    }
                    let change = match (amount(before), amount(after)) {
                        (Some(b), Some(a)) => Some(a - b),
                        _ => None,
                    };
                    match (change, amount(self.untouched.get(name)), after) {
                        // What a program gives up leaves its untouched amount, too.
                        (Some(_), Some(_), None) => {
                            self.untouched.remove(name);
                        }
                        (Some(change), Some(untouched), Some(_)) => {
                            self.untouched
                                .insert(name.clone(), Value::Amount(untouched + change));
                        }
                        (_, _, None) => {
                            self.untouched.remove(name);
                            self.persons.remove(name);
                        }
                        (_, _, Some(value)) => {
                            // The kernel changes our mask (a CPU went). The untouched mask stays as the undo writes it.
                            if hand == Hand::Person || !ours {
                                self.untouched.insert(name.clone(), value.clone());
                            }
                            if hand == Hand::Person
                                && FREE.iter().any(|free| *value == Value::Setting((*free).into()))
                            {
                                self.persons.remove(name);
                            } else if hand == Hand::Person {
                                self.persons.insert(name.clone(), value.clone());
                            }
                        }
                    }
                }
            }
        }
        self.last = now;
        overwritten
    }

    /// A person wrote this setting, as in the last picture: it is theirs, even if it equals ours.
    pub fn chosen(&mut self, name: &str) {
        if let Some(value @ Value::Setting(text)) = self.last.get(name) {
            if !FREE.contains(&text.as_str()) {
                self.persons.insert(name.to_owned(), value.clone());
            }
            self.untouched.insert(name.to_owned(), value.clone());
        }
    }

    /// Differences from the untouched picture: name, untouched, found.
    pub fn ours(&self) -> Vec<(String, Option<Value>, Option<Value>)> {
        let names: BTreeSet<&String> = self.last.keys().chain(self.untouched.keys()).collect();
        names
            .into_iter()
            .filter(|name| !same(self.untouched.get(*name), self.last.get(*name)))
            .filter(|name| !self.disputed.contains(family(name)))
            .map(|name| {
                (
                    name.clone(),
                    self.untouched.get(name).cloned(),
                    self.last.get(name).cloned(),
                )
            })
            .collect()
    }

    /// Nothing is owed any more: what was disputed is as it is.
    pub fn nothing_owed(&mut self) {
        for family_name in std::mem::take(&mut self.disputed) {
            self.untouched.retain(|name, _| family(name) != family_name);
            let now = self.last.iter().filter(|(name, _)| family(name) == family_name);
            self.untouched
                .extend(now.map(|(name, value)| (name.clone(), value.clone())));
        }
    }

    /// Accepts what is left over as the machine's own, after it was reported: one cause, one report.
    pub fn settle(&mut self) {
        self.untouched.clone_from(&self.last);
    }
}

/// The first few differences as a sentence.
pub fn differences(list: &[(String, Option<Value>, Option<Value>)]) -> String {
    let word = |v: &Option<Value>| {
        v.as_ref()
            .map_or_else(|| "nothing".to_owned(), ToString::to_string)
    };
    let mut parts: Vec<String> = list
        .iter()
        .take(4)
        .map(|(name, untouched, found)| format!("{name}: {} instead of {}", word(found), word(untouched)))
        .collect();
    if list.len() > 4 {
        parts.push(format!("{} more", list.len() - 4));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(pairs: &[(&str, Value)]) -> Picture {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect()
    }
    fn set(text: &str) -> Value {
        Value::Setting(text.to_owned())
    }

    #[test]
    fn what_a_person_chose_is_theirs_also_when_it_is_what_we_had_set() {
        let mask = |text: &str| picture(&[("a/mask", set(text))]);
        let mut ledger = Ledger::new(mask("all"));
        ledger.note(Hand::Ours, mask("4-7"));
        ledger.note(Hand::Person, mask("4-7"));
        assert_eq!(ledger.ours().len(), 1, "no picture shows it");
        ledger.chosen("a/mask");
        assert!(ledger.ours().is_empty(), "it stays when ours is taken back");
        let overwritten = ledger.note(Hand::Ours, mask("all"));
        assert_eq!(overwritten.len(), 1, "and is not to be overwritten");
    }

    #[test]
    fn growth_during_a_move_is_the_programs_and_the_move_is_ours() {
        let mut ledger = Ledger::new(picture(&[("a/0", Value::Amount(100)), ("a/1", Value::Amount(0))]));
        ledger.note(
            Hand::Ours,
            picture(&[("a/0", Value::Amount(40)), ("a/1", Value::Amount(60))]),
        );
        ledger.note(
            Hand::Machine,
            picture(&[("a/0", Value::Amount(40)), ("a/1", Value::Amount(90))]),
        );
        assert_eq!(ledger.ours().len(), 2);
        ledger.note(
            Hand::Ours,
            picture(&[("a/0", Value::Amount(100)), ("a/1", Value::Amount(30))]),
        );
        assert_eq!(ledger.ours(), vec![]);
    }

    #[test]
    fn a_mask_not_put_back_is_found_and_a_persons_value_overwritten_too() {
        let mut ledger = Ledger::new(picture(&[("mask", set("all"))]));
        ledger.note(Hand::Ours, picture(&[("mask", set("0-3"))]));
        assert_eq!(ledger.ours().len(), 1);
        ledger.note(Hand::Person, picture(&[("mask", set("4"))]));
        assert_eq!(ledger.ours(), vec![], "what a person chose is how it is to be");
        let overwritten = ledger.note(Hand::Ours, picture(&[("mask", set("all"))]));
        assert_eq!(overwritten, vec![("mask".to_owned(), set("4"), Some(set("all")))]);
        assert!(differences(&ledger.ours()).contains("mask: all instead of 4"));
    }

    #[test]
    fn what_ends_takes_its_changes_along() {
        let mut ledger = Ledger::new(picture(&[("mask", set("all")), ("a/0", Value::Amount(7))]));
        ledger.note(
            Hand::Ours,
            picture(&[("mask", set("0")), ("a/0", Value::Amount(2))]),
        );
        ledger.note(Hand::Machine, Picture::new());
        assert_eq!(ledger.ours(), vec![]);
    }
}
