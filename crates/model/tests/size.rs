//! The size ratchet: limits for files, functions, structs, implementations, parameters and sentences, and a ceiling for each crate.
//!
//! `size.toml` lists what exceeds a limit today. The list may only shrink: an entry that is larger than the code, or that needs no
//! exception any more, fails as well as code that exceeds its entry. `HOMEOSTAT_UPDATE_SIZE=1` lowers and removes entries; it raises
//! none. An issue that adds a capability may raise one crate's ceiling by hand; its commit gives the number and the reason.
//!
//! `make size` prints the totals. Production code is what is compiled without `cfg(test)`, below `src`.

#![allow(clippy::expect_used, reason = "a helper of a test")]

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};

/// Limits of house.md. Lines of a file without its tests, lines of a function, fields, methods, parameters, words of a sentence.
const FILE_MAX: usize = 800;
const FUNCTION_MAX: usize = 70;
const FIELDS_MAX: usize = 20;
const METHODS_MAX: usize = 40;
const PARAMETERS_MAX: usize = 6;
const WORDS_MAX: usize = 40;
/// Production lines of all crates and of the largest one, which the restructuring aims at.
const ALL_TARGET: usize = 125_000;
const CRATE_TARGET: usize = 16_000;

/// What may exceed a limit, and by how much.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Sizes {
    /// Ceiling of production lines by crate.
    crates: BTreeMap<String, usize>,
    /// Lines by file.
    files: BTreeMap<String, usize>,
    /// Lines by file and function.
    functions: BTreeMap<String, usize>,
    /// Fields by file and struct.
    structs: BTreeMap<String, usize>,
    /// Methods by crate and type: all implementations of a type in a crate count together, but those of traits.
    methods: BTreeMap<String, usize>,
    /// Parameters by file and function.
    parameters: BTreeMap<String, usize>,
    /// Sentences of documentation that are too long, by file.
    sentences: BTreeMap<String, usize>,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every Rust file below a directory, sorted.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else {
            continue;
        };
        for entry in entries {
            let path = entry.expect("a directory of the source can be read").path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn lines_of(span: proc_macro2::Span) -> usize {
    span.end().line - span.start().line + 1
}

/// Lines of a function without its documentation.
fn body_lines(signature: &syn::Signature, block: &syn::Block) -> usize {
    block.span().end().line - signature.span().start().line + 1
}

/// Whether an item is compiled for tests only.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|a| {
        a.path().is_ident("test")
            || (a.path().is_ident("cfg")
                && a.parse_args::<syn::Path>()
                    .is_ok_and(|path| path.is_ident("test")))
    })
}

fn doc_text(attributes: &[syn::Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes.iter().filter(|a| a.path().is_ident("doc")) {
        if let syn::Meta::NameValue(syn::MetaNameValue {
            value:
                syn::Expr::Lit(syn::ExprLit {
                    lit: syn::Lit::Str(line),
                    ..
                }),
            ..
        }) = &attribute.meta
        {
            text.push_str(&line.value());
            text.push('\n');
        }
    }
    text
}

/// How many sentences of a text have more words than they may. Code, tables and list items end a sentence.
fn long_sentences(text: &str) -> usize {
    let mut words = 0;
    let mut long = 0;
    let mut is_code = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("```") {
            is_code = !is_code;
        }
        if is_code || line.is_empty() || line.starts_with(['*', '-', '|', '#', '`']) {
            words = 0;
        }
        if is_code {
            continue;
        }
        for word in line.split_whitespace() {
            words += 1;
            if word.ends_with(['.', '?', '!', ':']) {
                long += usize::from(words > WORDS_MAX);
                words = 0;
            }
        }
    }
    long
}

/// What one file adds.
struct Reader<'a> {
    sizes: &'a mut Sizes,
    file: String,
    of_crate: String,
    /// Lines of items for tests.
    test_lines: usize,
    long: usize,
    /// Type whose implementation is being read.
    of_type: Option<String>,
}

impl Reader<'_> {
    fn raise(list: &mut BTreeMap<String, usize>, name: String, value: usize) {
        let entry = list.entry(name).or_default();
        *entry = (*entry).max(value);
    }

    fn function(&mut self, signature: &syn::Signature, lines: usize) {
        let name = match &self.of_type {
            Some(of_type) => format!("{}::{of_type}::{}", self.file, signature.ident),
            None => format!("{}::{}", self.file, signature.ident),
        };
        if lines > FUNCTION_MAX {
            Self::raise(&mut self.sizes.functions, name.clone(), lines);
        }
        let parameters = signature
            .inputs
            .iter()
            .filter(|i| matches!(i, syn::FnArg::Typed(_)))
            .count();
        if parameters > PARAMETERS_MAX {
            Self::raise(&mut self.sizes.parameters, name, parameters);
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(i) => &i.attrs,
            syn::Item::Fn(i) => &i.attrs,
            syn::Item::Impl(i) => &i.attrs,
            syn::Item::Struct(i) => &i.attrs,
            syn::Item::Use(i) => &i.attrs,
            syn::Item::Const(i) => &i.attrs,
            syn::Item::Enum(i) => &i.attrs,
            syn::Item::Macro(i) => &i.attrs,
            _ => return visit::visit_item(self, item),
        };
        if is_test(attributes) {
            self.test_lines += lines_of(item.span());
        } else {
            visit::visit_item(self, item);
        }
    }

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.long += long_sentences(&doc_text(&item.attrs));
        self.function(&item.sig, body_lines(&item.sig, &item.block));
        let outer = self.of_type.take();
        visit::visit_item_fn(self, item);
        self.of_type = outer;
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.long += long_sentences(&doc_text(&item.attrs));
        let fields = item.fields.len();
        if fields > FIELDS_MAX {
            Self::raise(
                &mut self.sizes.structs,
                format!("{}::{}", self.file, item.ident),
                fields,
            );
        }
        visit::visit_item_struct(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.long += long_sentences(&doc_text(&field.attrs));
        visit::visit_field(self, field);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let name = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        let methods = item
            .items
            .iter()
            .filter(|i| matches!(i, syn::ImplItem::Fn(f) if !is_test(&f.attrs)))
            .count();
        if let (Some(name), true) = (&name, item.trait_.is_none()) {
            *self
                .sizes
                .methods
                .entry(format!("{}::{name}", self.of_crate))
                .or_default() += methods;
        }
        let outer = std::mem::replace(&mut self.of_type, name);
        visit::visit_item_impl(self, item);
        self.of_type = outer;
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if is_test(&item.attrs) {
            self.test_lines += lines_of(item.span());
            return;
        }
        self.long += long_sentences(&doc_text(&item.attrs));
        self.function(&item.sig, body_lines(&item.sig, &item.block));
        visit::visit_impl_item_fn(self, item);
    }
}

/// Totals that no limit names.
#[derive(Default)]
struct Totals {
    /// Production lines by crate, and of them those with code.
    crates: BTreeMap<String, (usize, usize)>,
    /// Lines of tests.
    tests: usize,
}

/// Lines that are neither blank nor a comment.
fn code_lines(text: &str) -> usize {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count()
}

/// Files that another file includes under `cfg(test)`: `mod tests;`.
fn is_test_file(file: &Path) -> bool {
    file.components().any(|c| {
        let name = c.as_os_str().to_string_lossy();
        name == "tests" || name == "tests.rs" || name.ends_with("_tests.rs")
    })
}

fn measure() -> (Sizes, Totals) {
    let (mut sizes, mut totals) = (Sizes::default(), Totals::default());
    let root = repository();
    let mut crates: Vec<PathBuf> = std::fs::read_dir(root.join("crates"))
        .expect("crates can be read")
        .map(|entry| entry.expect("crates can be read").path())
        .collect();
    crates.push(root.join("vm/guest"));
    crates.sort();
    for directory in crates.iter().filter(|d| d.join("Cargo.toml").exists()) {
        let name = directory
            .file_name()
            .expect("a crate has a name")
            .to_string_lossy()
            .into_owned();
        for path in sources(directory) {
            let text = std::fs::read_to_string(&path).expect("a source file can be read");
            let lines = text.lines().count();
            let relative = path.strip_prefix(directory).expect("it lies there");
            if !relative.starts_with("src") || is_test_file(relative) {
                totals.tests += lines;
                continue;
            }
            let parsed = syn::parse_file(&text).expect("a source file can be parsed");
            let file = path
                .strip_prefix(&root)
                .expect("it lies there")
                .to_string_lossy()
                .into_owned();
            let mut reader = Reader {
                long: long_sentences(&doc_text(&parsed.attrs)),
                sizes: &mut sizes,
                file: file.clone(),
                of_crate: name.clone(),
                test_lines: 0,
                of_type: None,
            };
            reader.visit_file(&parsed);
            let (test_lines, long) = (reader.test_lines, reader.long);
            let production = lines - test_lines;
            totals.tests += test_lines;
            let entry = totals.crates.entry(name.clone()).or_default();
            entry.0 += production;
            // Code is spread over a file as its lines are: the share of it is that of the whole file.
            entry.1 += code_lines(&text) * production / lines.max(1);
            if production > FILE_MAX {
                sizes.files.insert(file.clone(), production);
            }
            if long > 0 {
                sizes.sentences.insert(file, long);
            }
        }
    }
    sizes.methods.retain(|_, methods| *methods > METHODS_MAX);
    sizes.crates = totals
        .crates
        .iter()
        .map(|(name, (lines, _))| (name.clone(), *lines))
        .collect();
    (sizes, totals)
}

fn list() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/size.toml")
}

/// What exceeds the list. Ceilings of crates are not lowered: they leave room for a mend.
fn complaints(listed: &Sizes, found: &Sizes) -> Vec<String> {
    let mut out = Vec::new();
    for (name, lines) in &found.crates {
        match listed.crates.get(name) {
            Some(ceiling) if lines <= ceiling => {}
            Some(ceiling) => out.push(format!(
                "crate {name}: {lines} production lines, at most {ceiling}"
            )),
            None => out.push(format!("crate {name} has no ceiling in size.toml")),
        }
    }
    let mut compare =
        |what: &str, limit: usize, listed: &BTreeMap<String, usize>, found: &BTreeMap<String, usize>| {
            for (name, size) in found {
                match listed.get(name) {
                    Some(most) if size == most => {}
                    Some(most) if size < most => {
                        out.push(format!("{name}: {size} {what}; lower its entry of {most}"))
                    }
                    Some(most) => out.push(format!("{name}: {size} {what}, at most {most}")),
                    None => out.push(format!("{name}: {size} {what}, at most {limit}")),
                }
            }
            for name in listed.keys().filter(|name| !found.contains_key(*name)) {
                out.push(format!(
                    "{name}: needs no exception for {what} any more; remove its entry"
                ));
            }
        };
    compare("lines", FILE_MAX, &listed.files, &found.files);
    compare("lines", FUNCTION_MAX, &listed.functions, &found.functions);
    compare("fields", FIELDS_MAX, &listed.structs, &found.structs);
    compare("methods", METHODS_MAX, &listed.methods, &found.methods);
    compare(
        "parameters",
        PARAMETERS_MAX,
        &listed.parameters,
        &found.parameters,
    );
    compare(
        "sentences of more than 40 words",
        0,
        &listed.sentences,
        &found.sentences,
    );
    out
}

/// The list with every entry lowered to what was found, and none raised or added.
fn lowered(listed: &Sizes, found: &Sizes) -> Sizes {
    let lower = |listed: &BTreeMap<String, usize>, found: &BTreeMap<String, usize>| {
        listed
            .iter()
            .filter_map(|(name, most)| Some((name.clone(), *found.get(name)?.min(most))))
            .collect()
    };
    Sizes {
        crates: lower(&listed.crates, &found.crates),
        files: lower(&listed.files, &found.files),
        functions: lower(&listed.functions, &found.functions),
        structs: lower(&listed.structs, &found.structs),
        methods: lower(&listed.methods, &found.methods),
        parameters: lower(&listed.parameters, &found.parameters),
        sentences: lower(&listed.sentences, &found.sentences),
    }
}

#[test]
fn nothing_grows_beyond_its_limit() {
    let text = std::fs::read_to_string(list()).unwrap_or_default();
    let mut listed: Sizes = toml::from_str(&text).expect("size.toml can be read");
    let (found, _) = measure();
    if std::env::var_os("HOMEOSTAT_UPDATE_SIZE").is_some() {
        // The first list is what was found.
        listed = if text.is_empty() {
            found.clone()
        } else {
            lowered(&listed, &found)
        };
        let text = toml::to_string(&listed).expect("it can be written");
        std::fs::write(list(), text).expect("size.toml can be written");
    }
    let complaints = complaints(&listed, &found);
    assert!(
        complaints.is_empty(),
        "{}\nWhat shrank is entered by: HOMEOSTAT_UPDATE_SIZE=1 cargo test -p homeostat-model --test size",
        complaints.join("\n")
    );
}

#[test]
fn an_entry_that_is_too_large_and_one_that_is_too_small_are_both_complained_of() {
    let sizes = |lines| Sizes {
        files: [("a.rs".to_owned(), lines)].into(),
        ..Sizes::default()
    };
    assert_eq!(complaints(&sizes(900), &sizes(900)), [""; 0]);
    assert_eq!(complaints(&sizes(900), &sizes(901)).len(), 1);
    assert_eq!(complaints(&sizes(900), &sizes(899)).len(), 1);
    assert_eq!(complaints(&sizes(900), &Sizes::default()).len(), 1);
    assert_eq!(lowered(&sizes(900), &sizes(901)), sizes(900));
    assert_eq!(lowered(&sizes(900), &sizes(899)), sizes(899));
    let long = "word ".repeat(WORDS_MAX) + "more.";
    assert_eq!(
        long_sentences(&format!("A short one. {long}\n* an item\n\n{long}")),
        2
    );
}

/// Lines of files with an ending, or that begin with an interpreter's name, outside of the crates.
fn other_lines(directories: &[&str], is_wanted: impl Fn(&Path, &str) -> bool) -> usize {
    let mut lines = 0;
    let mut left: Vec<PathBuf> = directories.iter().map(|d| repository().join(d)).collect();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).expect("a directory of the source can be read");
            left.extend(entries.map(|entry| entry.expect("a directory of the source can be read").path()));
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            if is_wanted(&path, &text) {
                lines += text.lines().count();
            }
        }
    }
    lines
}

/// `make size`: today, target, and whether it is reached.
#[test]
#[ignore = "make size: a table for people"]
fn table() {
    let (found, totals) = measure();
    let mut out = String::new();
    let mut row = |what: &str, today: usize, target: Option<usize>| {
        let (target, reached) = match target {
            Some(target) => (target.to_string(), if today <= target { "yes" } else { "no" }),
            None => (String::new(), ""),
        };
        writeln!(out, "{what:<58} {today:>8} {target:>8} {reached}").expect("a text can be written to");
    };
    let all: usize = totals.crates.values().map(|(lines, _)| lines).sum();
    let code: usize = totals.crates.values().map(|(_, code)| code).sum();
    row("production lines", all, Some(ALL_TARGET));
    row("  of them without comments and blank lines, about", code, None);
    row("lines of tests", totals.tests, None);
    let largest = totals
        .crates
        .values()
        .map(|(lines, _)| *lines)
        .max()
        .unwrap_or_default();
    row("largest crate", largest, Some(CRATE_TARGET));
    for (name, (lines, _)) in &totals.crates {
        row(&format!("  {name}"), *lines, None);
    }
    row("files over 800 lines", found.files.len(), Some(5));
    row("functions over 70 lines", found.functions.len(), Some(20));
    row("structs over 20 fields", found.structs.len(), Some(0));
    row(
        "types with over 40 methods in a crate",
        found.methods.len(),
        Some(0),
    );
    row(
        "functions with over 6 parameters",
        found.parameters.len(),
        Some(0),
    );
    row(
        "sentences of documentation over 40 words",
        found.sentences.values().sum(),
        Some(0),
    );
    let has_ending =
        |path: &Path, endings: &[&str]| path.extension().is_some_and(|e| endings.iter().any(|x| e == *x));
    row(
        "lines of Python and shell in tools, vm, packaging",
        other_lines(&["tools", "vm", "packaging"], |_, text| text.starts_with("#!")),
        None,
    );
    row(
        "lines of C",
        other_lines(&["crates", "tools", "vm", "fuzz"], |path, _| {
            has_ending(path, &["c", "h"])
        }),
        None,
    );
    row(
        "lines of data tables over 50 lines",
        other_lines(&["crates", "packaging", "tools"], |path, text| {
            has_ending(path, &["toml", "json", "csv"])
                && text.lines().count() > 50
                && !path.ends_with("size.toml")
        }),
        None,
    );
    let words = |path: &str| {
        std::fs::read_to_string(repository().join(path)).map_or(0, |text| text.split_whitespace().count())
    };
    row("words of ARCHITECTURE.md", words("ARCHITECTURE.md"), Some(1800));
    let book: usize = std::fs::read_dir(repository().join("docs"))
        .expect("docs can be read")
        .map(|entry| {
            entry
                .expect("docs can be read")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| {
            name.ends_with(".md") && !["commands.md", "configuration.md", "tunables.md"].contains(&&**name)
        })
        .map(|name| words(&format!("docs/{name}")))
        .sum();
    row(
        "words of the book without the generated reference",
        book,
        Some(15_000),
    );
    println!("{:<58} {:>8} {:>8} reached\n{out}", "what", "today", "target");
}
