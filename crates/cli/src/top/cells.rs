//! The cells of a screen, and which of them differ from the picture before.

use unicode_width::UnicodeWidthChar;

/// The second column of a wide character.
const TRAILING: char = '\0';

/// A rectangle of cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rect {
    /// First column.
    pub x: u16,
    /// First line.
    pub y: u16,
    /// Columns.
    pub width: u16,
    /// Lines.
    pub height: u16,
}

impl Rect {
    /// A rectangle by its corner and its size.
    pub fn new(x: u16, y: u16, width: u16, height: u16) -> Self {
        Self { x, y, width, height }
    }

    /// The column after the last.
    pub fn right(self) -> u16 {
        self.x.saturating_add(self.width)
    }

    /// The line after the last.
    pub fn bottom(self) -> u16 {
        self.y.saturating_add(self.height)
    }
}

/// One cell: a character, and its style as parameters of the escape sequence "select graphic rendition".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The character.
    pub symbol: char,
    /// Each parameter follows a semicolon; empty for plain text.
    pub style: &'static str,
}

/// A screen of cells, line by line.
#[derive(Clone, Debug)]
pub struct Cells {
    /// What it covers; its corner is the origin.
    pub area: Rect,
    cells: Vec<Cell>,
}

impl Cells {
    /// A blank screen.
    pub fn blank(width: u16, height: u16) -> Self {
        let blank = Cell {
            symbol: ' ',
            style: "",
        };
        Self {
            area: Rect::new(0, 0, width, height),
            cells: vec![blank; usize::from(width) * usize::from(height)],
        }
    }

    /// Writes one character. A character that does not fit into the line is left out.
    pub fn set(&mut self, x: u16, y: u16, symbol: char, style: &'static str) {
        let width = symbol.width().unwrap_or(0);
        if width == 0 || y >= self.area.height || usize::from(x) + width > usize::from(self.area.width) {
            return;
        }
        let at = usize::from(y) * usize::from(self.area.width) + usize::from(x);
        self.cells[at] = Cell { symbol, style };
        for cell in &mut self.cells[at + 1..at + width] {
            *cell = Cell {
                symbol: TRAILING,
                style: "",
            };
        }
    }

    /// Column, line and cell of each character that stands here.
    pub fn characters(&self) -> impl Iterator<Item = (u16, u16, Cell)> + '_ {
        let width = usize::from(self.area.width.max(1));
        self.cells
            .iter()
            .enumerate()
            .map(move |(i, cell)| ((i % width) as u16, (i / width) as u16, *cell))
            .filter(|(_, _, cell)| cell.symbol != TRAILING)
    }

    /// The characters that differ from those of a screen of the same size. What a wide character covered differs, too.
    pub fn changes<'a>(&'a self, shown: &'a Self) -> impl Iterator<Item = (u16, u16, Cell)> + 'a {
        let width = usize::from(self.area.width);
        self.characters()
            .filter(move |(x, y, cell)| shown.cells[usize::from(*y) * width + usize::from(*x)] != *cell)
    }
}
