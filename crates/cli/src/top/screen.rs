//! The terminal: taken, painted, asked for keys, and put back.
//!
//! Painting needs a dozen escape sequences of ECMA-48 that every terminal of the last thirty years knows, and reading keys
//! a few more; they are written out here, so that nothing else can reach the terminal. A picture is collected and written
//! at once, between the marks of a synchronised update; terminals that do not know them take no notice.

use super::model::{PAGES, Wish};
use ratatui::backend::{Backend, ClearType, WindowSize};
use ratatui::buffer::Cell;
use ratatui::layout::{Position, Size};
use ratatui::style::{Color, Modifier};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::Mutex;
use std::time::Duration;

/// The other screen, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[0m\x1b[2J";
/// The screen as it was, with its cursor and without colours.
const LEAVE: &str = "\x1b[?2026l\x1b[0m\x1b[?25h\x1b[?1049l";
/// What comes now belongs together.
const BEGIN: &str = "\x1b[?2026h";
/// It is complete.
const END: &str = "\x1b[?2026l";
/// Size of a terminal that does not say.
const SIZE: Size = Size {
    width: 80,
    height: 24,
};

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

/// Turns cells into escape sequences.
pub(super) struct Paint<W> {
    out: W,
    picture: String,
    at: Option<Position>,
    style: (Color, Modifier),
    /// Whether the size is that of a terminal; tests have none.
    size: Option<Size>,
}

impl Paint<io::Stdout> {
    /// Onto standard output.
    pub(super) fn new() -> Self {
        Self::onto(io::stdout(), None)
    }
}

impl<W: Write> Paint<W> {
    fn onto(out: W, size: Option<Size>) -> Self {
        Self {
            out,
            picture: String::new(),
            at: None,
            style: (Color::Reset, Modifier::empty()),
            size,
        }
    }

    fn paint(&mut self, style: (Color, Modifier)) {
        if style == self.style {
            return;
        }
        self.style = style;
        self.picture.push_str("\x1b[0");
        for (modifier, code) in [
            (Modifier::BOLD, ";1"),
            (Modifier::DIM, ";2"),
            (Modifier::REVERSED, ";7"),
        ] {
            if style.1.contains(modifier) {
                self.picture.push_str(code);
            }
        }
        self.picture.push_str(match style.0 {
            Color::Red => ";31",
            Color::Green => ";32",
            Color::Yellow => ";33",
            Color::Cyan => ";36",
            Color::DarkGray => ";90",
            // No other is used here.
            _ => "",
        });
        self.picture.push('m');
    }
}

impl<W: Write> Backend for Paint<W> {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        for (x, y, cell) in content {
            if self.at != Some(Position { x, y }) {
                let _ = write!(self.picture, "\x1b[{};{}H", y + 1, x + 1);
            }
            self.paint((cell.fg, cell.modifier));
            self.picture.push_str(cell.symbol());
            // A cell of two columns moves the cursor by two: then the place is told again.
            let narrow =
                cell.symbol().is_ascii() || unicode_width::UnicodeWidthStr::width(cell.symbol()) == 1;
            self.at = narrow.then_some(Position { x: x + 1, y });
        }
        Ok(())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(self.at.unwrap_or_default())
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, _position: P) -> io::Result<()> {
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.picture.push_str("\x1b[0m\x1b[2J");
        self.style = (Color::Reset, Modifier::empty());
        self.at = None;
        Ok(())
    }

    fn clear_region(&mut self, _region: ClearType) -> io::Result<()> {
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        if let Some(size) = self.size {
            return Ok(size);
        }
        let size = tcgetwinsize(io::stdout())?;
        Ok(match (size.ws_col, size.ws_row) {
            (0, _) | (_, 0) => SIZE,
            (width, height) => Size { width, height },
        })
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize {
            columns_rows: self.size()?,
            pixels: Size::default(),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.picture.is_empty() {
            return Ok(());
        }
        let picture = format!("{BEGIN}{}{END}", self.picture);
        self.picture.clear();
        self.out.write_all(picture.as_bytes())?;
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
    use ratatui::style::Style;
    use ratatui::terminal::Terminal;

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
    fn written(pictures: &[&[(u16, &str, Style)]]) -> Vec<String> {
        #[derive(Clone, Default)]
        struct Shared(std::sync::Arc<Mutex<Vec<u8>>>);
        impl Write for Shared {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().expect("no thread died").extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let out = Shared::default();
        let paint = Paint::onto(out.clone(), Some(Size { width: 20, height: 3 }));
        let mut terminal = Terminal::new(paint).expect("a terminal of bytes");
        pictures
            .iter()
            .map(|lines| {
                terminal
                    .draw(|frame| {
                        for (y, text, style) in *lines {
                            frame.buffer_mut().set_string(0, *y, text, *style);
                        }
                    })
                    .expect("it draws");
                let bytes = std::mem::take(&mut *out.0.lock().expect("no thread died"));
                String::from_utf8(bytes).expect("text")
            })
            .collect()
    }

    #[test]
    fn only_what_changed_is_written_in_one_piece() {
        let plain = Style::default();
        let red = Style::default().fg(Color::Red);
        let pictures = written(&[
            &[(0, "one", plain), (1, "two", red)],
            &[(0, "one", plain), (1, "two", red)],
            &[(0, "one", plain), (1, "twx", red)],
            &[(0, "\u{6f22}\u{5b57}x", plain)],
        ]);
        assert_eq!(
            pictures[0],
            "\x1b[?2026h\x1b[1;1Hone\x1b[2;1H\x1b[0;31mtwo\x1b[?2026l"
        );
        assert_eq!(pictures[1], "", "nothing changed, nothing is written");
        assert_eq!(pictures[2], "\x1b[?2026h\x1b[2;3Hx\x1b[?2026l");
        assert!(pictures[3].contains("\x1b[1;3H\u{5b57}"), "{:?}", pictures[3]);
    }
}
