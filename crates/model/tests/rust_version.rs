//! Debian 13 builds homeostat with the Rust that it ships: no package asks for a newer one, and no source file uses
//! let-chains, which are younger. Newer functions of the standard library are clippy's (`incompatible_msrv`); the real
//! proof is `make msrv`.

#![allow(clippy::expect_used, reason = "a helper of a test")]

use proc_macro2::{Delimiter, Spacing, Span, TokenStream, TokenTree};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// Major and minor number of the Rust in Debian 13. Source: the package rustc 1.85.0+dfsg3-1 of Debian 13.
const DEBIAN_13: (u64, u64) = (1, 85);

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_package_that_linux_needs_builds_with_the_rust_of_debian_13() {
    let options = [
        "--offline",
        "--locked",
        // Packages for other systems are locked, too, and downloaded by nobody.
        "--filter-platform",
        "x86_64-unknown-linux-gnu",
    ];
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(repository().join("Cargo.toml"))
        .other_options(options.map(str::to_owned))
        .exec()
        .expect("cargo metadata works");
    let ours = metadata.workspace_packages();
    for package in &ours {
        assert!(
            package.rust_version.is_some(),
            "{} lacks rust-version.workspace = true",
            package.name
        );
    }
    let newer: Vec<String> = metadata
        .packages
        .iter()
        .filter_map(|p| Some((p, p.rust_version.as_ref()?)))
        .filter(|(_, version)| (version.major, version.minor) > DEBIAN_13)
        .map(|(p, version)| format!("{} {} needs Rust {version}", p.name, p.version))
        .collect();
    assert!(
        newer.is_empty(),
        "{newer:#?}; cargo update -p NAME --precise OLDER"
    );
    let others = metadata.packages.len() - ours.len();
    assert!(
        others > 50,
        "only {others} packages found: the test looks at the wrong place"
    );
}

#[test]
fn no_source_file_has_a_let_chain() {
    let mut files = Vec::new();
    for directory in ["crates", "vm", "fuzz"] {
        gather(&repository().join(directory), &mut files);
    }
    assert!(
        files.len() > 200,
        "only {} source files found: the test looks at the wrong place",
        files.len()
    );
    let mut found = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a source file can be read");
        let name = path.display();
        found.extend(chains(&text).iter().map(|line| format!("{name}:{line}")));
    }
    assert!(found.is_empty(), "let-chains, which Rust 1.85 lacks: {found:#?}");
}

#[test]
fn a_planted_let_chain_is_found() {
    for (text, lines) in [
        ("fn f() {\n if a && let Some(b) = c {}\n}", vec![2]),
        ("fn f() {\n if let Some(b) = c && b {}\n}", vec![2]),
        ("fn f() {\n while let Some(b) = c\n && b && d {}\n}", vec![3]),
        ("fn f() { if x {} else if let A { b } = c && b {} }", vec![1]),
        (
            "fn f() {\n assert!({ if let Some(b) = c && b { 1 } else { 2 } });\n}",
            vec![2],
        ),
        (
            "t! {\n fn f(a in 0..1) {\n if let A { b } = c && b {}\n }\n}",
            vec![3],
        ),
        // Neither of these is one.
        ("fn f() { let b = c && d; if let Some(b) = (c && d) {} }", vec![]),
        ("fn f() { if let Some(b) = c { if b && d {} } }", vec![]),
        ("t! { if let Some(b) = c { b && d } else { a && b } }", vec![]),
        ("fn f() { if let Some(&&b) = c {} }", vec![]),
        ("t! { if let Some(&&b) = c {} let a = b && c; }", vec![]),
    ] {
        assert_eq!(chains(text), lines, "{text}");
    }
}

/// Lines of an `&&` that makes a let-chain.
fn chains(text: &str) -> Vec<usize> {
    let mut chains = Chains(Vec::new());
    chains.visit_file(&syn::parse_file(text).expect("a source file is Rust"));
    chains.0.sort_unstable();
    chains.0.dedup();
    chains.0
}

struct Chains(Vec<usize>);

impl<'a> Visit<'a> for Chains {
    fn visit_expr_binary(&mut self, e: &'a syn::ExprBinary) {
        let is_let = |side: &syn::Expr| matches!(side, syn::Expr::Let(_));
        match &e.op {
            syn::BinOp::And(and) if is_let(&e.left) || is_let(&e.right) => self.note(and.spans[0]),
            _ => {}
        }
        visit::visit_expr_binary(self, e);
    }

    fn visit_macro(&mut self, m: &'a syn::Macro) {
        self.tokens(m.tokens.clone());
    }
}

impl Chains {
    fn note(&mut self, and: Span) {
        self.0.push(and.start().line);
    }

    /// What a macro gets need not be Rust, so here a chain is an `&&` between `if let` or `while let` and its block.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut in_condition = false;
        let mut has_let = false;
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(word) if word == "if" || word == "while" => {
                    in_condition = true;
                    has_let = false;
                }
                TokenTree::Ident(word) if word == "let" => has_let = true,
                TokenTree::Punct(first) if first.as_char() == '&' && first.spacing() == Spacing::Joint => {
                    let second = tokens.next_if(|t| matches!(t, TokenTree::Punct(p) if p.as_char() == '&'));
                    let before_let = matches!(tokens.peek(), Some(TokenTree::Ident(word)) if word == "let");
                    if in_condition && second.is_some() && (has_let || before_let) {
                        self.note(first.span());
                    }
                }
                TokenTree::Group(group) => {
                    let is_pattern = matches!(tokens.peek(), Some(TokenTree::Punct(p)) if p.as_char() == '=');
                    if group.delimiter() == Delimiter::Brace && !is_pattern {
                        in_condition = false;
                    }
                    self.tokens(group.stream());
                }
                _ => {}
            }
        }
    }
}

fn gather(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a source directory can be read") {
        let path = entry.expect("a source directory can be read").path();
        if path.is_dir() && !path.ends_with("target") {
            gather(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}
