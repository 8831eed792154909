//! The controllers of the file cache on the simulated machine, as a page of the book with its pictures:
//! `cargo run --release -p homeostat-laboratory --example file_cache [DIRECTORY [LOADS [SEED]]]`.
//!
//! Prints the page; with a DIRECTORY (docs) it writes `file-cache-simulated.md` and `figures/simulated-*.svg` there instead.
#![expect(clippy::print_stdout, reason = "an example prints its page")]

use homeostat_laboratory::file_cache::page::{self, LOADS, PICTURES, SEED};
use std::error::Error;
use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse());
    let (loads, seed) = (number(1, LOADS)?, number(2, SEED)?);
    let threads = available_parallelism().map_or(1, Into::into);
    let page = page::page(loads, seed, threads);
    let Some(directory) = arguments.first().map(Path::new) else {
        println!("{}", page.text);
        return Ok(());
    };
    fs::create_dir_all(directory.join("figures"))?;
    fs::write(directory.join("file-cache-simulated.md"), page.text)?;
    for (name, picture) in PICTURES.iter().zip(page.pictures) {
        fs::write(directory.join(name), picture)?;
    }
    Ok(())
}
