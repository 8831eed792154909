//! Small formulas for what depends on the machine: `min(65536, 4 * sqrt(memory / 1024 * 16))`, `value == 0 && nodes > 1`.
//!
//! Numbers, the names in [`Names`], `+ - * /`, comparisons (1 or 0), `&&`, `||`, brackets, and the functions `min`, `max`,
//! `sqrt`, `log2` and `floor`. They stand in the catalogue alone and are all evaluated in a test, so an error in one is
//! a bug of ours; it is returned all the same.

use crate::tree::Facts;

/// Deepest nesting of brackets.
const DEPTH_MAX: u32 = 32;

/// Why a formula has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("formula {formula:?}: {problem}")]
pub struct ExpressionError {
    /// The formula.
    pub formula: String,
    /// What is wrong with it.
    pub problem: String,
}

/// What the names of a formula stand for: `memory` (bytes), `pages`, `page` (bytes), `cpus`, `nodes`, and `value`.
#[derive(Clone, Copy, Debug)]
pub struct Names<'f> {
    /// The machine.
    pub facts: &'f Facts,
    /// The value that a rule is about.
    pub value: Option<f64>,
}

impl Names<'_> {
    fn find(&self, name: &str) -> Option<f64> {
        let facts = self.facts;
        Some(match name {
            "memory" => facts.memory as f64,
            "pages" => (facts.memory / facts.page.max(1)) as f64,
            "page" => facts.page as f64,
            "cpus" => f64::from(facts.cpus.max(1)),
            "nodes" => f64::from(facts.nodes.max(1)),
            "value" => self.value?,
            _ => return None,
        })
    }
}

/// The value of a formula.
///
/// # Errors
/// It is not well formed, or names something that is not known.
pub fn evaluate(formula: &str, names: &Names<'_>) -> Result<f64, ExpressionError> {
    let mut parser = Parser {
        text: formula.as_bytes(),
        at: 0,
        depth: 0,
        names,
    };
    let outcome = parser.either().and_then(|value| {
        parser.spaces();
        if parser.at < parser.text.len() {
            Err(format!("not understood from character {}", parser.at + 1))
        } else if value.is_finite() {
            Ok(value)
        } else {
            Err("has no finite value".to_owned())
        }
    });
    outcome.map_err(|problem| ExpressionError {
        formula: formula.to_owned(),
        problem,
    })
}

struct Parser<'t> {
    text: &'t [u8],
    at: usize,
    depth: u32,
    names: &'t Names<'t>,
}

type Value = Result<f64, String>;

fn truth(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

impl Parser<'_> {
    fn spaces(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    fn takes(&mut self, token: &str) -> bool {
        self.spaces();
        let rest = self.text.get(self.at..).unwrap_or_default();
        let fits = rest.starts_with(token.as_bytes());
        if fits {
            self.at += token.len();
        }
        fits
    }

    fn either(&mut self) -> Value {
        let mut left = self.both()?;
        while self.takes("||") {
            let right = self.both()?;
            left = truth(left != 0.0 || right != 0.0);
        }
        Ok(left)
    }

    fn both(&mut self) -> Value {
        let mut left = self.comparison()?;
        while self.takes("&&") {
            let right = self.comparison()?;
            left = truth(left != 0.0 && right != 0.0);
        }
        Ok(left)
    }

    fn comparison(&mut self) -> Value {
        let left = self.sum()?;
        for (token, holds) in [
            ("<=", (|a, b| a <= b) as fn(f64, f64) -> bool),
            (">=", |a, b| a >= b),
            ("==", |a, b| a == b),
            ("!=", |a, b| a != b),
            ("<", |a, b| a < b),
            (">", |a, b| a > b),
        ] {
            if self.takes(token) {
                let right = self.sum()?;
                return Ok(truth(holds(left, right)));
            }
        }
        Ok(left)
    }

    fn sum(&mut self) -> Value {
        let mut left = self.product()?;
        loop {
            if self.takes("+") {
                left += self.product()?;
            } else if self.takes("-") {
                left -= self.product()?;
            } else {
                return Ok(left);
            }
        }
    }

    fn product(&mut self) -> Value {
        let mut left = self.atom()?;
        loop {
            if self.takes("*") {
                left *= self.atom()?;
            } else if self.takes("/") {
                left /= self.atom()?;
            } else {
                return Ok(left);
            }
        }
    }

    fn atom(&mut self) -> Value {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err("is nested too deeply".into());
        }
        let value = self.atom_inside();
        self.depth -= 1;
        value
    }

    fn atom_inside(&mut self) -> Value {
        if self.takes("(") {
            let value = self.either()?;
            return self.closing(value);
        }
        if self.takes("-") {
            return self.atom().map(|v| -v);
        }
        self.spaces();
        let start = self.at;
        while self
            .text
            .get(self.at)
            .is_some_and(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_'))
        {
            self.at += 1;
        }
        let word = self.text.get(start..self.at).unwrap_or_default();
        let word = String::from_utf8_lossy(word).into_owned();
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.parse().map_err(|_| format!("{word:?} is no number"));
        }
        if self.takes("(") {
            return self.function(&word);
        }
        self.names
            .find(&word)
            .ok_or_else(|| format!("{word:?} is not known"))
    }

    fn closing(&mut self, value: f64) -> Value {
        if self.takes(")") {
            Ok(value)
        } else {
            Err("a bracket is not closed".into())
        }
    }

    fn function(&mut self, name: &str) -> Value {
        let mut arguments = vec![self.either()?];
        while self.takes(",") {
            arguments.push(self.either()?);
        }
        let value = match (name, arguments.as_slice()) {
            ("min", [first, rest @ ..]) => rest.iter().fold(*first, |a, b| a.min(*b)),
            ("max", [first, rest @ ..]) => rest.iter().fold(*first, |a, b| a.max(*b)),
            ("sqrt", [x]) => x.sqrt(),
            ("log2", [x]) => x.log2(),
            ("floor", [x]) => x.floor(),
            _ => return Err(format!("no function {name:?} of {} arguments", arguments.len())),
        };
        self.closing(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn facts() -> Facts {
        Facts {
            memory: 16 << 30,
            cpus: 8,
            nodes: 2,
            page: 4096,
            ..Facts::default()
        }
    }

    fn value(formula: &str) -> Result<f64, String> {
        let facts = facts();
        let names = Names {
            facts: &facts,
            value: Some(7.0),
        };
        evaluate(formula, &names).map_err(|e| e.problem)
    }

    #[test]
    fn formulas_have_the_values_of_arithmetic() {
        for (formula, expected) in [
            ("1 + 2 * 3", 7.0),
            ("(1+2)*3 - 4/2", 7.0),
            ("-2 + 3", 1.0),
            ("min(65536, 4 * sqrt(memory / 1024 * 16))", 65536.0),
            ("floor(log2(cpus)) + 1", 4.0),
            ("max(1, cpus, nodes)", 8.0),
            ("value == 7 && nodes > 1", 1.0),
            ("value < 7 || cpus >= 9", 0.0),
            ("value != 7", 0.0),
            ("pages * page == memory", 1.0),
        ] {
            assert_eq!(value(formula), Ok(expected), "{formula}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_an_error() {
        for formula in ["", "1 +", "(1", "1)", "nothing", "sqrt(1,2)", "1/0", "1 2", "3x"] {
            assert!(value(formula).is_err(), "{formula}");
        }
        assert!(value(&"(".repeat(10_000)).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(text in "[-+*/()<>=&|, 0-9a-z.]{0,60}") {
            let _ = value(&text);
        }
    }
}
