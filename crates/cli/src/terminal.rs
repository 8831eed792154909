//! Where output goes: its width, whether it may be coloured, whether it is for people or for programs.

use crate::failure::{Failure, Said};
use crate::render::Look;
use homeostat_daemon::printable;
use serde::Serialize;
use std::io::{ErrorKind, IsTerminal, Write};

/// Width when the output is no terminal or does not say.
const WIDTH_DEFAULT: usize = 100;
/// Narrower than this nothing can be shown well.
const WIDTH_MIN: usize = 40;
/// Wider than this lines are hard to read.
const WIDTH_MAX: usize = 160;

/// The output of one command.
#[derive(Clone, Debug)]
pub struct Terminal {
    /// Name of the program, before its messages.
    program: &'static str,
    /// Print JSON.
    pub json: bool,
    /// Whether standard output is a terminal.
    pub is_terminal: bool,
    width: usize,
    color: bool,
}

impl Terminal {
    /// What standard output is.
    pub fn detect(program: &'static str, json: bool) -> Self {
        let stdout = std::io::stdout();
        let is_terminal = stdout.is_terminal();
        let columns = std::env::var("COLUMNS")
            .ok()
            .and_then(|c| c.parse::<usize>().ok());
        let width = if is_terminal {
            rustix::termios::tcgetwinsize(&stdout)
                .ok()
                .map(|w| usize::from(w.ws_col))
                .filter(|w| *w > 0)
        } else {
            columns
        };
        // NO_COLOR: any value but the empty one (no-color.org).
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
        Self {
            program,
            json,
            is_terminal,
            width: width.unwrap_or(WIDTH_DEFAULT).clamp(WIDTH_MIN, WIDTH_MAX),
            color: is_terminal && !no_color && !dumb,
        }
    }

    /// How to render.
    pub fn look(&self) -> Look {
        Look {
            width: self.width,
            color: self.color,
            now_unix: now_unix(),
        }
    }

    /// Prints text.
    ///
    /// # Errors
    /// The reader has gone, or the output can not be written.
    pub fn print(&self, text: &str) -> Result<(), Failure> {
        if text.ends_with('\n') || text.is_empty() {
            write(text)
        } else {
            write(&format!("{text}\n"))
        }
    }

    /// Clears the screen for the next picture. What goes into a file or is for programs is not cleared.
    ///
    /// # Errors
    /// As [`Terminal::print`].
    pub fn clear(&self) -> Result<(), Failure> {
        if !self.is_terminal || self.json {
            return Ok(());
        }
        write("\x1b[H\x1b[2J")
    }

    /// Prints a value as JSON, or as the text that `human` makes.
    ///
    /// # Errors
    /// As [`Terminal::print`].
    pub fn show<T: Serialize>(&self, value: &T, human: impl FnOnce(&Look) -> String) -> Result<(), Failure> {
        if self.json {
            let text = serde_json::to_string_pretty(value)
                .map_err(|e| Failure::failed(format!("cannot be expressed as JSON: {e}")))?;
            self.print(&printable::for_json(&text))
        } else {
            self.print(&printable::for_terminal(&human(&self.look()), self.color))
        }
    }

    /// A message beside the output.
    pub fn warn(&self, message: &str) {
        self.complain(&Said::warning(message));
    }

    /// Why it failed, or what to be careful about.
    pub fn complain(&self, said: &Said<'_>) {
        let line = match serde_json::to_string(said) {
            Ok(json) if self.json => printable::for_json(&json).into_owned(),
            _ => format!(
                "{}: {}",
                self.program,
                printable::for_terminal(&said.text(), false)
            ),
        };
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

fn write(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| match e.kind() {
            ErrorKind::BrokenPipe => Failure::ReaderGone,
            _ => Failure::failed(format!("cannot write the output: {e}")),
        })
}

fn now_unix() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}
