//! Writes HTML in which nothing that came from outside can become markup: text and attribute values go through
//! [`Html::text`] and [`Html::open`], which escape, and there is no other way in but for constants of this program.

use homeostat_daemon::printable;
use std::fmt::Write as _;

/// A document that is being written.
#[derive(Default)]
pub(super) struct Html {
    out: String,
}

/// Attributes of an element: names are ours, values may be anybody's.
pub(super) type Attributes<'a> = &'a [(&'static str, &'a str)];

impl Html {
    /// The document.
    pub(super) fn finish(self) -> String {
        self.out
    }

    /// Text: what a browser would take for markup is escaped, what would move or turn the text is spelled out.
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        for c in printable::for_terminal(text, false).chars() {
            match c {
                '&' => self.out.push_str("&amp;"),
                '<' => self.out.push_str("&lt;"),
                '>' => self.out.push_str("&gt;"),
                '"' => self.out.push_str("&quot;"),
                '\'' => self.out.push_str("&#39;"),
                c => self.out.push(c),
            }
        }
        self
    }

    /// The beginning of an element.
    pub(super) fn open(&mut self, name: &'static str, attributes: Attributes<'_>) -> &mut Self {
        self.out.push('<');
        self.out.push_str(name);
        for (key, value) in attributes {
            let _ = write!(self.out, " {key}=\"");
            self.text(value);
            self.out.push('"');
        }
        self.out.push('>');
        self
    }

    /// Its end.
    pub(super) fn close(&mut self, name: &'static str) -> &mut Self {
        let _ = write!(self.out, "</{name}>");
        self
    }

    /// An element around what `inner` writes.
    pub(super) fn element(
        &mut self,
        name: &'static str,
        attributes: Attributes<'_>,
        inner: impl FnOnce(&mut Self),
    ) -> &mut Self {
        self.open(name, attributes);
        inner(self);
        self.close(name)
    }

    /// An element that holds text only.
    pub(super) fn leaf(&mut self, name: &'static str, attributes: Attributes<'_>, text: &str) -> &mut Self {
        self.element(name, attributes, |h| {
            h.text(text);
        })
    }

    /// A constant of this program, as it is: the style sheet.
    pub(super) fn constant(&mut self, text: &'static str) -> &mut Self {
        self.out.push_str(text);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_outside_becomes_markup() {
        let mut html = Html::default();
        let hostile = "</p><script>alert('x')</script>\" onload=\"y&\u{202e}\x1b[2J";
        html.leaf("p", &[("title", hostile)], hostile);
        let text = html.finish();
        assert_eq!(text.matches('<').count(), 2, "{text}");
        assert!(!text.contains("\" onload"), "{text}");
        assert!(!text.contains('\u{202e}') && !text.contains('\x1b'), "{text}");
    }
}
