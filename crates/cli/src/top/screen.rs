//! The terminal: taken, painted, asked for keys, and put back.
//!
//! Painting needs a dozen escape sequences of ECMA-48 that every terminal of the last thirty years knows, and reading keys
//! a few more; they are written out here, so that nothing else can reach the terminal. A picture is collected and written
//! at once, between the marks of a synchronised update; terminals that do not know them take no notice.

use super::cells::{Cells, Rect};
use super::model::{PAGES, Wish};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::Mutex;
use std::time::Duration;
use unicode_width::UnicodeWidthChar;

/// The other screen, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[0m\x1b[2J";
/// The screen as it was, with its cursor and without colours.
const LEAVE: &str = "\x1b[?2026l\x1b[0m\x1b[?25h\x1b[?1049l";
/// What comes now belongs together.
const BEGIN: &str = "\x1b[?2026h";
/// It is complete.
const END: &str = "\x1b[?2026l";
/// Size of a terminal that does not say.
const SIZE: (u16, u16) = (80, 24);

/// How the terminal was before it was taken. There is one terminal, and whoever ends the program has to find it.
static FOUND: Mutex<Option<Termios>> = Mutex::new(None);

/// Takes the terminal: keys come one by one and unseen, and the other screen is shown.
pub(super) fn take() -> io::Result<()> {
    let found = tcgetattr(io::stdin())?;
    let mut raw = found.clone();
    raw.make_raw();
    *FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(found);
    tcsetattr(io::stdin(), OptionalActions::Flush, &raw)?;
    say(ENTER)
}

/// Puts it back. Whatever of it fails: the rest is done all the same. A second time it does nothing.
pub(super) fn give_back() {
    let found = FOUND
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .take();
    if let Some(found) = found {
        let _ = say(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &found);
    }
}

fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Columns and lines of the terminal.
pub(super) fn size() -> io::Result<(u16, u16)> {
    let size = tcgetwinsize(io::stdout())?;
    Ok(match (size.ws_col, size.ws_row) {
        (0, _) | (_, 0) => SIZE,
        known => known,
    })
}

/// Turns cells into escape sequences.
pub(super) struct Screen<W> {
    out: W,
    shown: Cells,
    /// What is to be written.
    text: String,
    /// Where the cursor stands, if that is known.
    at: Option<(u16, u16)>,
    style: &'static str,
}

impl<W: Write> Screen<W> {
    /// A screen that is blank.
    pub(super) fn onto(out: W) -> Self {
        Self {
            out,
            shown: Cells::blank(0, 0),
            text: String::new(),
            at: None,
            style: "",
        }
    }

    /// Blanks it, so that the next picture is written as a whole.
    pub(super) fn clear(&mut self) {
        self.text.push_str("\x1b[0m\x1b[2J");
        self.shown = Cells::blank(self.shown.area.width, self.shown.area.height);
        (self.at, self.style) = (None, "");
    }

    /// Writes what differs from the picture before, in one piece.
    pub(super) fn show(&mut self, picture: Cells) -> io::Result<()> {
        let Rect { width, height, .. } = picture.area;
        if self.shown.area != picture.area {
            if self.shown.area.width > 0 {
                self.clear();
            }
            self.shown = Cells::blank(width, height);
        }
        for (x, y, cell) in picture.changes(&self.shown) {
            if self.at != Some((x, y)) {
                let _ = write!(self.text, "\x1b[{};{}H", y + 1, x + 1);
            }
            if cell.style != self.style {
                self.style = cell.style;
                let _ = write!(self.text, "\x1b[0{}m", cell.style);
            }
            self.text.push(cell.symbol);
            // A cell of two columns moves the cursor by two: then the place is told again.
            self.at = (cell.symbol.width() == Some(1)).then_some((x + 1, y));
        }
        self.shown = picture;
        if self.text.is_empty() {
            return Ok(());
        }
        let text = format!("{BEGIN}{}{END}", self.text);
        self.text.clear();
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

/// Waits for keys, at most so long. What came is told as wishes; what means nothing is dropped. `None`: nobody types any
/// more, the terminal is gone.
pub(super) fn keys(patience: Duration) -> io::Result<Option<Vec<Wish>>> {
    let input = io::stdin();
    let mut bytes = [0; 256];
    let wait = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    match poll(&mut [PollFd::new(&input, PollFlags::IN)], Some(&wait)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Some(Vec::new())),
        Ok(_) => {}
        Err(e) => return Err(e.into()),
    }
    match rustix::io::read(&input, &mut bytes) {
        Ok(0) => Ok(None),
        Ok(n) => Ok(Some(wishes(&bytes[..n]))),
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(Some(Vec::new())),
        // The terminal was closed.
        Err(rustix::io::Errno::IO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The wishes in what was typed. A key that sends several bytes sends them at once.
fn wishes(mut bytes: &[u8]) -> Vec<Wish> {
    let mut out = Vec::new();
    while let Some((first, rest)) = bytes.split_first() {
        let (wish, used) = match (first, rest.first()) {
            (0x1b, Some(b'[' | b'O')) => {
                sequence(&rest[1..]).map_or((None, bytes.len()), |(w, n)| (w, n + 2))
            }
            // Alt and a key.
            (0x1b, Some(_)) => (None, 2),
            (0x1b, None) => (Some(Wish::Back), 1),
            (byte, _) => (plain(*byte), 1),
        };
        out.extend(wish);
        bytes = &bytes[used.min(bytes.len())..];
    }
    out
}

/// A key that sends a sequence, after its introduction: what it means, and how long it is.
fn sequence(bytes: &[u8]) -> Option<(Option<Wish>, usize)> {
    let end = bytes.iter().position(|b| (0x40..=0x7e).contains(b))?;
    let parameter = bytes[..end].split(|b| *b == b';').next().unwrap_or_default();
    let wish = match (bytes[end], parameter) {
        (b'A', _) => Some(Wish::Move(-1)),
        (b'B', _) => Some(Wish::Move(1)),
        (b'C', _) => Some(Wish::Time(1)),
        (b'D', _) => Some(Wish::Time(-1)),
        (b'H', _) | (b'~', b"1" | b"7") => Some(Wish::First),
        (b'F', _) | (b'~', b"4" | b"8") => Some(Wish::Live),
        (b'P', _) | (b'~', b"11") => Some(Wish::Help),
        (b'~', b"5") => Some(Wish::Screen(-1)),
        (b'~', b"6") => Some(Wish::Screen(1)),
        _ => None,
    };
    Some((wish, end + 1))
}

/// A key that sends one byte.
fn plain(byte: u8) -> Option<Wish> {
    Some(match byte {
        // Ctrl-C and Ctrl-D: in this mode they are keys like others.
        3 | 4 | b'q' => Wish::Quit,
        b'?' => Wish::Help,
        8 | 127 => Wish::Back,
        b'\r' | b'\n' => Wish::Open,
        b'\t' => Wish::NextPage,
        b'1'..=b'4' => Wish::Go(PAGES[usize::from(byte - b'1')]),
        b'k' => Wish::Move(-1),
        b'j' => Wish::Move(1),
        b'h' => Wish::Time(-1),
        b'l' => Wish::Time(1),
        b'[' => Wish::Time(-10),
        b']' => Wish::Time(10),
        b'g' => Wish::First,
        b'G' => Wish::Live,
        b' ' => Wish::Hold,
        12 => Wish::Repaint,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::model::Page;

    #[test]
    fn keys_mean_what_the_help_says() {
        for (bytes, wanted) in [
            (&b"q"[..], Wish::Quit),
            (b"\x03", Wish::Quit),
            (b"\x1b", Wish::Back),
            (b"\x1b[A", Wish::Move(-1)),
            (b"\x1bOB", Wish::Move(1)),
            (b"\x1b[D", Wish::Time(-1)),
            (b"\x1b[1;5C", Wish::Time(1)),
            (b"\x1b[5~", Wish::Screen(-1)),
            (b"\x1b[1~", Wish::First),
            (b"\x1b[F", Wish::Live),
            (b"3", Wish::Go(Page::Workload)),
            (b"\t", Wish::NextPage),
        ] {
            assert_eq!(wishes(bytes), [wanted], "{bytes:?}");
        }
        assert_eq!(
            wishes(b"jj\x1b[Bq"),
            [Wish::Move(1), Wish::Move(1), Wish::Move(1), Wish::Quit]
        );
    }

    #[test]
    fn what_nobody_types_means_nothing() {
        for bytes in [
            &b"\x1b["[..],
            b"\x1b[999",
            b"\x1b[<0;1;1M",
            b"\xff\xfe",
            "\u{e4}".as_bytes(),
            b"\x1b[200~",
            b"\x1bx",
        ] {
            assert_eq!(wishes(bytes), [], "{bytes:?}");
        }
        // Whatever comes, it comes to an end.
        for seed in 0..2000u32 {
            let bytes: Vec<u8> = (0..64)
                .map(|i| (seed.wrapping_mul(2_654_435_761).rotate_left(i) >> 24) as u8)
                .collect();
            let _ = wishes(&bytes);
        }
    }

    /// What is written for one picture after another.
    fn written(pictures: &[&[(u16, &str, &'static str)]]) -> Vec<String> {
        let mut screen = Screen::onto(Vec::new());
        pictures
            .iter()
            .map(|lines| {
                let mut picture = Cells::blank(20, 3);
                for (y, text, style) in *lines {
                    let mut x = 0;
                    for c in text.chars() {
                        picture.set(x, *y, c, style);
                        x += c.width().expect("a width") as u16;
                    }
                }
                screen.show(picture).expect("it writes");
                String::from_utf8(std::mem::take(&mut screen.out)).expect("text")
            })
            .collect()
    }

    #[test]
    fn only_what_changed_is_written_in_one_piece() {
        let pictures = written(&[
            &[(0, "one", ""), (1, "two", ";31")],
            &[(0, "one", ""), (1, "two", ";31")],
            &[(0, "one", ""), (1, "twx", ";31")],
            &[(0, "\u{6f22}\u{5b57}x", "")],
            &[(0, "a\u{5b57}x", "")],
        ]);
        assert_eq!(
            pictures[0],
            "\x1b[?2026h\x1b[1;1Hone\x1b[2;1H\x1b[0;31mtwo\x1b[?2026l"
        );
        assert_eq!(pictures[1], "", "nothing changed, nothing is written");
        assert_eq!(pictures[2], "\x1b[?2026h\x1b[2;3Hx\x1b[?2026l");
        assert!(pictures[3].contains("\x1b[1;3H\u{5b57}"), "{:?}", pictures[3]);
        // The second half of a wide character that went, and what moved by a column.
        assert_eq!(pictures[4], "\x1b[?2026h\x1b[1;1Ha\u{5b57}\x1b[1;4Hx \x1b[?2026l");
    }

    #[test]
    fn another_size_or_a_wish_writes_the_whole_picture_again() {
        let mut screen = Screen::onto(Vec::new());
        let picture = |width| {
            let mut picture = Cells::blank(width, 1);
            picture.set(0, 0, 'a', "");
            // What does not fit is left out.
            picture.set(width - 1, 0, '\u{5b57}', "");
            picture.set(0, 1, 'b', "");
            picture
        };
        for (width, begins) in [(3, ""), (4, "\x1b[0m\x1b[2J")] {
            screen.show(picture(width)).expect("it writes");
            let wanted = format!("{BEGIN}{begins}\x1b[1;1Ha{END}");
            assert_eq!(String::from_utf8_lossy(&screen.out), wanted);
            screen.out.clear();
        }
        screen.clear();
        screen.show(picture(4)).expect("it writes");
        assert!(String::from_utf8_lossy(&screen.out).contains("\x1b[2J\x1b[1;1Ha"));
    }
}
