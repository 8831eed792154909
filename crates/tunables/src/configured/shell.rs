//! Commands that write settings: `ExecStart=` and its like in systemd units, rc.local, and the scripts and `sysctl -p FILE`
//! that these start.
//!
//! A small part of the shell is followed: quotation marks, variables, `for` over a list of words, pipes into `tee`,
//! `echo … > FILE`. Both sides of an `if` count, since what it asks is not known. What is not followed, and names a file of
//! a setting, may write it: such a line has a value that is not known. Whether a unit runs is not known either.

use super::{Applies, Form, Way, Written, files_of, joined_lines, sysctl, sysctl_path};
use crate::tree::Tree;
use std::collections::BTreeMap;

const UNITS: &[&str] = &[
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
const SCRIPTS: &[&str] = &["/etc/rc.local", "/etc/rc.d/rc.local"];
/// Deepest chain of scripts that start scripts, and of shells in shells.
const DEPTH_MAX: u32 = 4;
/// Most words that loops are followed over, all together, and most effects of one command.
const STEPS_MAX: u32 = 2000;
/// Stands for what is not known inside a word.
const UNKNOWN: char = '\u{0}';
/// Programs that name files only to read them or to change who may use them.
const READERS: &[&str] = &[
    "[",
    "[[",
    "test",
    "cat",
    "grep",
    "ls",
    "stat",
    "find",
    "head",
    "tail",
    "awk",
    "sed",
    "cut",
    "wc",
    "readlink",
    "chmod",
    "chown",
    "chgrp",
    "mount",
    "umount",
    "mountpoint",
    "true",
    "false",
    "exit",
    "cd",
    "logger",
    "sleep",
    "udevadm",
    "systemd-tmpfiles",
    "rm",
    "mkdir",
    "touch",
];

/// A file that a command writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) path: String,
    pub(super) value: String,
    pub(super) form: Form,
}

/// What a command does with settings.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Effect {
    Write(Write),
    /// `sysctl -p FILE`.
    Load(String),
    /// Another program or script with its whole path.
    Script(String),
}

/// What the text of a shell writes, as far as it is understood.
pub(super) fn writes(text: &str) -> Vec<Write> {
    let written = |effect| match effect {
        Effect::Write(write) => Some(write),
        Effect::Load(_) | Effect::Script(_) => None,
    };
    effects(text).into_iter().filter_map(written).collect()
}

fn effects(text: &str) -> Vec<Effect> {
    let mut shell = Shell::default();
    shell.run(&tokens(text), 0);
    shell.found
}

/// Everything that units and rc.local write.
pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut reader = Reader {
        tree,
        found: Vec::new(),
    };
    let unknown = |why: &str| Applies::Unknown(why.to_owned());
    for (unit, commands) in units(tree) {
        for (file, number, command) in commands {
            // systemd ignores a line whose quotation marks do not close.
            let Some(words) = arguments(&command) else {
                continue;
            };
            let mut shell = Shell::default();
            for words in words.split(|w| w == ";") {
                shell.command(words, None, &[], 0);
            }
            let place = Place {
                way: Way::SystemdUnit,
                file: &file,
                number,
                what: &unit,
                via: String::new(),
                applies: unknown("the unit may be off"),
            };
            reader.add(shell.found, &place, 0);
        }
    }
    for file in SCRIPTS {
        let text = tree.text(file).unwrap_or_default();
        for (number, lines) in commands_of(&text) {
            let place = Place {
                way: Way::BootScript,
                file,
                number,
                what: "rc.local",
                via: String::new(),
                applies: unknown("the script may not be run"),
            };
            reader.add(effects(&lines), &place, 0);
        }
    }
    reader.found
}

/// A command: its file, its line and its text.
type UnitCommand = (String, usize, String);

/// The commands of each unit, with its drop-ins, where an empty line takes back those before it.
fn units(tree: &dyn Tree) -> Vec<(String, Vec<UnitCommand>)> {
    let mut parts: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    let unit_of = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    for (file, text) in files_of(tree, UNITS, ".service") {
        parts.entry(unit_of(&file)).or_default().push((file, text));
    }
    let mut with_drop_ins: Vec<String> = UNITS
        .iter()
        .flat_map(|d| tree.names(d))
        .filter(|n| n.ends_with(".service.d"))
        .collect();
    with_drop_ins.sort_unstable();
    with_drop_ins.dedup();
    for name in with_drop_ins {
        let directories: Vec<String> = UNITS.iter().map(|d| format!("{d}/{name}")).collect();
        let directories: Vec<&str> = directories.iter().map(String::as_str).collect();
        let unit = name.strip_suffix(".d").unwrap_or(&name).to_owned();
        parts
            .entry(unit)
            .or_default()
            .extend(files_of(tree, &directories, ".conf"));
    }
    let mut found = Vec::new();
    for (unit, files) in parts {
        let mut commands: Vec<(String, String, usize, String)> = Vec::new();
        for (file, text) in files {
            let mut section = String::new();
            for (number, line) in joined_lines(&text) {
                if line.starts_with('[') {
                    section = line;
                    continue;
                }
                if line.starts_with(['#', ';']) || section != "[Service]" {
                    continue;
                }
                let Some((key, command)) = line.split_once('=') else {
                    continue;
                };
                let (key, command) = (key.trim(), command.trim());
                if !matches!(key, "ExecStart" | "ExecStartPre" | "ExecStartPost") {
                    continue;
                }
                if command.is_empty() {
                    commands.retain(|(k, ..)| k != key);
                } else {
                    commands.push((key.to_owned(), file.clone(), number, command.to_owned()));
                }
            }
        }
        let commands = commands
            .into_iter()
            .map(|(_, file, number, command)| (file, number, command));
        found.push((unit, commands.collect()));
    }
    found
}

/// The words of a command as systemd splits them: quotation marks, escapes, `$$` and `%%`; `None` when a mark is not closed.
fn arguments(command: &str) -> Option<Vec<String>> {
    let command = command.trim_start_matches(['@', '-', ':', '+', '!']).trim_start();
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = command.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(q), c) if q == c => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (_, '\\') => word.get_or_insert_default().push(match chars.next()? {
                'n' => '\n',
                't' => '\t',
                's' => ' ',
                other => other,
            }),
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return None;
    }
    words.extend(word);
    Some(words.iter().map(|w| substituted(w)).collect())
}

/// What systemd puts in for `$` and `%`: `${NAME}` anywhere, `$NAME` as a whole word; neither is known here.
fn substituted(word: &str) -> String {
    let is_name = |t: &str| !t.is_empty() && t.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if word.strip_prefix('$').is_some_and(is_name) {
        return UNKNOWN.to_string();
    }
    let mut out = String::new();
    let mut rest = word;
    while let Some(at) = rest.find(['$', '%']) {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let mut chars = from.chars();
        let (mark, next) = (chars.next(), chars.next());
        rest = match (mark, next) {
            (Some(m), Some(n)) if m == n => {
                out.push(m);
                chars.as_str()
            }
            (Some('$'), Some('{')) => {
                out.push(UNKNOWN);
                from.split_once('}').map_or("", |(_, after)| after)
            }
            (Some('%'), Some(_)) => {
                out.push(UNKNOWN);
                chars.as_str()
            }
            (Some(m), _) => {
                out.push(m);
                from.get(m.len_utf8()..).unwrap_or_default()
            }
            (None, _) => "",
        };
    }
    out.push_str(rest);
    out
}

/// The lines of a script, gathered so that what spans several lines stays together.
fn commands_of(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut depth = 0i32;
    let mut open = false;
    for (number, line) in joined_lines(text) {
        let words = || line.split([' ', '\t', ';']).filter(|w| !w.is_empty());
        let goes_on = depth > 0 || open;
        depth += words()
            .map(|w| match w {
                "for" | "while" | "until" | "if" | "case" => 1,
                "done" | "fi" | "esac" => -1,
                _ => 0,
            })
            .sum::<i32>();
        let is_odd = |q: char| line.matches(q).count() % 2 == 1;
        open ^= !line.starts_with('#') && (is_odd('\'') || is_odd('"'));
        match found.last_mut() {
            Some((_, whole)) if goes_on => {
                whole.push('\n');
                whole.push_str(&line);
            }
            _ => found.push((number, line)),
        }
    }
    // Variables that are set on one line are used on another: all of them stand before each.
    let set: Vec<String> = found
        .iter()
        .map(|(_, l)| l.clone())
        .filter(|l| {
            is_assignment(l.split_whitespace().next().unwrap_or_default()) && !l.contains(['`', '(', '>'])
        })
        .collect();
    let set = set.join("\n");
    found
        .into_iter()
        .map(|(number, line)| (number, format!("{set}\n{line}")))
        .collect()
}

/// Where an effect is written down.
struct Place<'p> {
    way: Way,
    file: &'p str,
    number: usize,
    what: &'p str,
    /// The unit or script that leads there.
    via: String,
    applies: Applies,
}

struct Reader<'t> {
    tree: &'t dyn Tree,
    found: Vec<Written>,
}

impl Reader<'_> {
    fn line(&mut self, write: Write, place: &Place<'_>) {
        let mut written = Written::new(place.way, write.path, &write.value, place.file, place.number);
        place.what.clone_into(&mut written.what);
        place.via.clone_into(&mut written.via);
        written.form = write.form;
        written.applies = place.applies.clone();
        written.optional = true;
        self.found.push(written);
    }

    fn add(&mut self, effects: Vec<Effect>, place: &Place<'_>, depth: u32) {
        for effect in effects {
            match effect {
                Effect::Write(write) => self.line(write, place),
                Effect::Load(file) => {
                    let text = self.tree.text(&file).unwrap_or_default();
                    for (number, path, value) in sysctl::assignments(&text) {
                        let inner = Place {
                            file: &file,
                            number,
                            via: format!("{}:{}", place.file, place.number),
                            applies: place.applies.clone(),
                            ..*place
                        };
                        let form = Form::Plain;
                        self.line(Write { path, value, form }, &inner);
                    }
                }
                Effect::Script(file) if depth < DEPTH_MAX => {
                    let Some(text) = self.tree.text(&file) else {
                        continue;
                    };
                    let is_shell = match text.strip_prefix("#!") {
                        Some(rest) => rest
                            .lines()
                            .next()
                            .is_some_and(|l| l.trim_end().ends_with("sh") || l.contains("sh ")),
                        None => file.ends_with(".sh"),
                    };
                    let inner = |number| Place {
                        file: &file,
                        number,
                        via: format!("{}:{}", place.file, place.number),
                        applies: place.applies.clone(),
                        ..*place
                    };
                    if is_shell {
                        for (number, command) in commands_of(&text) {
                            self.add(self::effects(&command), &inner(number), depth + 1);
                        }
                    } else if text.starts_with("#!") {
                        for (index, line) in text.lines().enumerate() {
                            let may = mentioned(line).into_iter().map(Effect::Write).collect();
                            self.add(may, &inner(index + 1), DEPTH_MAX);
                        }
                    }
                }
                Effect::Script(_) => {}
            }
        }
    }
}

/// Files of settings that a text names: what may be written there is not known.
fn mentioned(text: &str) -> Vec<Write> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = [rest.find("/sys/"), rest.find("/proc/sys/")]
        .into_iter()
        .flatten()
        .min()
    {
        let from = rest.get(at..).unwrap_or_default();
        let ends = |c: char| {
            c.is_whitespace()
                || matches!(
                    c,
                    '"' | '\'' | ',' | ';' | ')' | ']' | '>' | '<' | '|' | '&' | ':'
                )
        };
        let end = from.find(ends).unwrap_or(from.len());
        let (path, after) = from.split_at(end);
        let path = path.replace(UNKNOWN, "*");
        if path.trim_end_matches('/').matches('/').count() > 2 {
            found.push(Write {
                path,
                value: String::new(),
                form: Form::Computed,
            });
        }
        rest = if end == 0 {
            from.get(1..).unwrap_or_default()
        } else {
            after
        };
    }
    found
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// Its pieces: text, and whether variables are looked for in it.
    Word(Vec<(String, bool)>),
    /// `;`, an end of line, `&&`, `||`, `&`, and brackets.
    End,
    Pipe,
    /// Into a file (`>`, `>>`, `2>`: whether it is the output).
    Into(bool),
    /// From a file.
    From,
}

/// Splits the text of a shell; what follows a quotation mark that is not closed is left out.
fn tokens(text: &str) -> Vec<Token> {
    let mut found = Vec::new();
    let mut word: Option<Vec<(String, bool)>> = None;
    let mut chars = text.chars().peekable();
    let push = |word: &mut Option<Vec<(String, bool)>>, c: char, expands: bool| {
        let pieces = word.get_or_insert_default();
        match pieces.last_mut() {
            Some((text, same)) if *same == expands => text.push(c),
            _ => pieces.push((c.to_string(), expands)),
        }
    };
    while let Some(c) = chars.next() {
        match c {
            '#' if word.is_none() => {
                while chars.peek().is_some_and(|c| *c != '\n') {
                    chars.next();
                }
            }
            '\'' | '"' => {
                let mut closed = false;
                let mut inner = Vec::new();
                while let Some(d) = chars.next() {
                    match d {
                        d if d == c => {
                            closed = true;
                            break;
                        }
                        '\\' if c == '"'
                            && chars.peek().is_some_and(|n| matches!(n, '"' | '\\' | '$' | '`')) =>
                        {
                            inner.extend(chars.next().map(|n| (n, false)));
                        }
                        d => inner.push((d, c == '"')),
                    }
                }
                if !closed {
                    return found;
                }
                word.get_or_insert_default();
                for (d, expands) in inner {
                    push(&mut word, d, expands);
                }
            }
            '\\' => match chars.next() {
                Some('\n') | None => {}
                Some(next) => push(&mut word, next, false),
            },
            // What a command says is not known: its whole text is one unknown.
            '`' => {
                for d in chars.by_ref() {
                    if d == '`' {
                        break;
                    }
                }
                push(&mut word, UNKNOWN, false);
            }
            '$' if chars.peek() == Some(&'(') => {
                let mut depth = 0;
                for d in chars.by_ref() {
                    depth += i32::from(d == '(') - i32::from(d == ')');
                    if depth == 0 {
                        break;
                    }
                }
                push(&mut word, UNKNOWN, false);
            }
            '>' | '<' => {
                let number = match word.as_deref() {
                    Some([(text, _)]) if text.len() == 1 && text.chars().all(|c| c.is_ascii_digit()) => {
                        let number = text.clone();
                        word = None;
                        number
                    }
                    _ => String::new(),
                };
                found.extend(word.take().map(Token::Word));
                while chars.peek().is_some_and(|n| matches!(n, '>' | '<' | '|' | '-')) {
                    chars.next();
                }
                found.push(if c == '<' {
                    Token::From
                } else {
                    Token::Into(matches!(number.as_str(), "" | "1"))
                });
                // `>&2`: no file.
                if chars.peek() == Some(&'&') {
                    chars.next();
                }
            }
            '|' | '&' | ';' | '\n' | '(' | ')' => {
                found.extend(word.take().map(Token::Word));
                let doubled = chars.peek() == Some(&c);
                if doubled && matches!(c, '|' | '&' | ';') {
                    chars.next();
                }
                found.push(if c == '|' && !doubled {
                    Token::Pipe
                } else {
                    Token::End
                });
            }
            c if c.is_whitespace() => found.extend(word.take().map(Token::Word)),
            c => push(&mut word, c, true),
        }
    }
    found.extend(word.map(Token::Word));
    found
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

/// What is known while a script is followed.
#[derive(Default)]
struct Shell {
    variables: BTreeMap<String, String>,
    found: Vec<Effect>,
    steps: u32,
}

impl Shell {
    /// A word with its variables put in.
    fn expand(&self, pieces: &[(String, bool)]) -> String {
        let mut out = String::new();
        for (text, expands) in pieces {
            if !expands {
                out.push_str(text);
                continue;
            }
            let mut rest = text.as_str();
            while let Some((before, after)) = rest.split_once('$') {
                out.push_str(before);
                let braced = after.strip_prefix('{').and_then(|inner| inner.split_once('}'));
                let (name, next) = match braced {
                    Some(both) => both,
                    None => {
                        let end = after
                            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                            .unwrap_or(after.len());
                        let end = if end == 0 {
                            usize::from(!after.is_empty())
                        } else {
                            end
                        };
                        match after.split_at_checked(end) {
                            Some(both) => both,
                            None => (after, ""),
                        }
                    }
                };
                match self.variables.get(name) {
                    Some(value) => out.push_str(value),
                    None => out.push(UNKNOWN),
                }
                rest = next;
            }
            out.push_str(rest);
        }
        out
    }

    fn run(&mut self, tokens: &[Token], depth: u32) {
        if depth > DEPTH_MAX {
            return;
        }
        let text = |token: Option<&Token>| match token {
            Some(Token::Word(pieces)) => pieces.iter().map(|(t, _)| t.as_str()).collect::<String>(),
            _ => String::new(),
        };
        let mut at = 0;
        let mut start = true;
        while at < tokens.len() {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return;
            }
            if let Some(Token::End) = tokens.get(at) {
                start = true;
                at += 1;
                continue;
            }
            let word = text(tokens.get(at));
            if start && word == "for" {
                at = self.follow_loop(tokens, at, depth);
                continue;
            }
            if start
                && matches!(
                    word.as_str(),
                    "if" | "then"
                        | "else"
                        | "elif"
                        | "fi"
                        | "while"
                        | "until"
                        | "do"
                        | "done"
                        | "esac"
                        | "{"
                        | "}"
                        | "!"
                        | "time"
                )
            {
                at += 1;
                continue;
            }
            let end = tokens
                .iter()
                .skip(at)
                .position(|t| *t == Token::End)
                .map_or(tokens.len(), |n| at + n);
            self.pipeline(tokens.get(at..end).unwrap_or_default(), depth);
            start = true;
            at = end;
        }
    }

    /// `for NAME in WORDS; do …; done`: where to go on after it.
    fn follow_loop(&mut self, tokens: &[Token], at: usize, depth: u32) -> usize {
        let is = |index: usize, word: &str| matches!(tokens.get(index), Some(Token::Word(p)) if p.iter().map(|(t, _)| t.as_str()).collect::<String>() == word);
        let name = match tokens.get(at + 1) {
            Some(Token::Word(pieces)) => pieces.iter().map(|(t, _)| t.as_str()).collect::<String>(),
            _ => return at + 1,
        };
        let mut from = at + 2;
        let mut words = Vec::new();
        if is(from, "in") {
            from += 1;
            while let Some(Token::Word(pieces)) = tokens.get(from) {
                let expanded = self.expand(pieces);
                if pieces.iter().any(|(_, expands)| *expands) {
                    words.extend(expanded.split_whitespace().map(str::to_owned));
                } else {
                    words.push(expanded);
                }
                from += 1;
            }
        } else {
            words.push(UNKNOWN.to_string());
        }
        while matches!(tokens.get(from), Some(Token::End)) {
            from += 1;
        }
        if !is(from, "do") {
            return from.max(at + 1);
        }
        let mut nested = 0;
        let mut end = from;
        while end < tokens.len() {
            if is(end, "do") {
                nested += 1;
            } else if is(end, "done") {
                nested -= 1;
                if nested == 0 {
                    break;
                }
            }
            end += 1;
        }
        let body = tokens.get(from + 1..end).unwrap_or_default();
        let before = self.variables.remove(&name);
        for word in words {
            self.variables.insert(name.clone(), word);
            self.run(body, depth + 1);
        }
        self.variables.remove(&name);
        if let Some(before) = before {
            self.variables.insert(name, before);
        }
        (end + 1).max(at + 1)
    }

    /// Commands of which each gets what the one before it says.
    fn pipeline(&mut self, tokens: &[Token], depth: u32) {
        let mut said: Option<String> = None;
        for part in tokens.split(|t| *t == Token::Pipe) {
            let mut words = Vec::new();
            let mut into = Vec::new();
            let mut at = 0;
            while at < part.len() {
                match (part.get(at), part.get(at + 1)) {
                    (Some(Token::Into(is_output)), Some(Token::Word(pieces))) => {
                        if *is_output {
                            into.push(self.expand(pieces));
                        }
                        at += 2;
                    }
                    (Some(Token::From), _) => at += 2,
                    (Some(Token::Word(pieces)), _) => {
                        let raw: String = pieces.iter().map(|(t, _)| t.as_str()).collect();
                        let expanded = self.expand(pieces);
                        if words.is_empty() && is_assignment(&raw) {
                            if let Some((name, value)) = expanded.split_once('=') {
                                self.variables.insert(name.to_owned(), value.to_owned());
                            }
                        } else {
                            words.push(expanded);
                        }
                        at += 1;
                    }
                    _ => at += 1,
                }
            }
            said = self.command(&words, said, &into, depth);
        }
    }

    /// One command; what it says, where that is known.
    fn command(
        &mut self,
        words: &[String],
        given: Option<String>,
        into: &[String],
        depth: u32,
    ) -> Option<String> {
        let mut words = words;
        let name = loop {
            let [first, rest @ ..] = words else { return None };
            let name = first.rsplit('/').next().unwrap_or_default();
            // Programs that start what follows them.
            let starts = [
                "sudo", "exec", "env", "nice", "command", "nohup", "ionice", "busybox", "builtin",
            ];
            if starts.contains(&name) {
                words = rest;
                while words
                    .first()
                    .is_some_and(|w| w.starts_with('-') || is_assignment(w))
                {
                    words = words.get(1..).unwrap_or_default();
                }
                continue;
            }
            words = rest;
            break (name, first.clone());
        };
        let (name, whole) = name;
        let mut says = None;
        let mut targets: Vec<String> = into.to_vec();
        match name {
            "echo" | "printf" => {
                let shown: Vec<&str> = words
                    .iter()
                    .map(String::as_str)
                    .skip_while(|w| matches!(*w, "-n" | "-e" | "-en" | "-ne"))
                    .collect();
                says = match (name, shown.as_slice()) {
                    ("printf", [format, arguments @ ..]) if !arguments.is_empty() => {
                        let mut text = (*format).to_owned();
                        for argument in arguments {
                            text = text.replacen("%s", argument, 1).replacen("%d", argument, 1);
                        }
                        Some(text)
                    }
                    _ => Some(shown.join(" ")),
                }
                .map(|text| text.replace("\\n", "\n").trim_end_matches('\n').to_owned());
            }
            "tee" => {
                says = given.or(Some(UNKNOWN.to_string()));
                targets.extend(words.iter().filter(|w| !w.starts_with('-')).cloned());
            }
            "sysctl" => self.sysctl(words),
            "sh" | "bash" | "dash" | "ash" | "ksh" | "zsh" => {
                let is_text = |w: &String| w.starts_with('-') && !w.starts_with("--") && w.contains('c');
                match words.iter().position(is_text) {
                    Some(at) => {
                        if let Some(text) = words.get(at + 1) {
                            let mut inner = Self::default();
                            inner.run(&tokens(text), depth + 1);
                            self.found.extend(inner.found);
                        }
                    }
                    None => {
                        let script = words.iter().find(|w| w.starts_with('/'));
                        self.found.extend(script.cloned().map(Effect::Script));
                    }
                }
            }
            "." | "source" => {
                let script = words.iter().find(|w| w.starts_with('/'));
                self.found.extend(script.cloned().map(Effect::Script));
            }
            name if READERS.contains(&name) => {}
            _ => {
                if whole.starts_with('/') {
                    self.found.push(Effect::Script(whole));
                }
                let may = words.iter().flat_map(|w| mentioned(w));
                self.found.extend(may.map(Effect::Write));
            }
        }
        for target in targets {
            if target.starts_with("/sys/") || target.starts_with("/proc/sys/") {
                let value = says.clone().unwrap_or(UNKNOWN.to_string());
                let form = if value.contains(UNKNOWN) {
                    Form::Computed
                } else {
                    Form::Plain
                };
                self.found.push(Effect::Write(Write {
                    path: target.replace(UNKNOWN, "*"),
                    value: value.replace(UNKNOWN, "?"),
                    form,
                }));
            }
        }
        says
    }

    fn sysctl(&mut self, words: &[String]) {
        let mut loads = false;
        let mut files = Vec::new();
        for word in words {
            match word.as_str() {
                "-p" | "-f" | "--load" => loads = true,
                "--system" => {}
                option
                    if option.starts_with("--load=")
                        || option.starts_with("-p")
                        || option.starts_with("-f") =>
                {
                    loads = true;
                    files.push(
                        option
                            .trim_start_matches("--load=")
                            .trim_start_matches("-p")
                            .trim_start_matches("-f")
                            .to_owned(),
                    );
                }
                option if option.starts_with('-') => {}
                argument if loads => files.push(argument.to_owned()),
                argument => {
                    if let Some((name, value)) = argument.split_once('=') {
                        let form = if value.contains(UNKNOWN) {
                            Form::Computed
                        } else {
                            Form::Plain
                        };
                        self.found.push(Effect::Write(Write {
                            path: sysctl_path(name.trim()).replace(UNKNOWN, "*"),
                            value: value.trim().replace(UNKNOWN, "?"),
                            form,
                        }));
                    }
                }
            }
        }
        if loads && files.is_empty() {
            files.push("/etc/sysctl.conf".to_owned());
        }
        self.found.extend(files.into_iter().map(Effect::Load));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    fn write(path: &str, value: &str) -> Write {
        Write {
            path: path.to_owned(),
            value: value.to_owned(),
            form: Form::Plain,
        }
    }

    #[test]
    fn commands_that_write_are_understood() {
        for (command, path, value) in [
            (
                "/sbin/sysctl -q -w vm.swappiness=1",
                "/proc/sys/vm/swappiness",
                "1",
            ),
            (
                "/bin/sh -c 'echo never > /sys/kernel/mm/transparent_hugepage/enabled'",
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "never",
            ),
            (
                "sh -c \"echo 1 | tee -a /sys/kernel/mm/ksm/run > /dev/null\"",
                "/sys/kernel/mm/ksm/run",
                "1",
            ),
            (
                "echo -n 5 >/proc/sys/vm/page-cluster",
                "/proc/sys/vm/page-cluster",
                "5",
            ),
            (
                "F=/sys/kernel/mm/ksm; test -e $F/run && printf '%s\\n' 1 2>/dev/null > ${F}/run || true",
                "/sys/kernel/mm/ksm/run",
                "1",
            ),
            (
                "sysctl -w net.ipv4.tcp_rmem='4096 1 2'",
                "/proc/sys/net/ipv4/tcp_rmem",
                "4096 1 2",
            ),
        ] {
            assert_eq!(writes(command), [write(path, value)], "{command}");
        }
        for nothing in [
            "",
            "echo hello",
            "echo > ",
            "sysctl vm.swappiness",
            "cat /proc/sys/vm/swappiness",
            "[ -f /sys/kernel/mm/ksm/run ]",
            "# echo 1 > /sys/a",
            "echo 'not closed > /sys/a/b",
        ] {
            assert_eq!(writes(nothing), [], "{nothing}");
        }
        assert_eq!(
            writes("echo 1 > /sys/a; echo 2 > /sys/b && sysctl a.b=3").len(),
            3
        );
    }

    #[test]
    fn loops_are_followed_and_what_is_not_known_is_said() {
        let found = writes("for f in enabled defrag; do echo never > /sys/thp/$f; done; echo 1 > /sys/last");
        assert_eq!(
            found,
            [
                write("/sys/thp/enabled", "never"),
                write("/sys/thp/defrag", "never"),
                write("/sys/last", "1")
            ]
        );
        let found = writes("for d in /sys/block/*; do echo none > $d/queue/scheduler; done");
        assert_eq!(found, [write("/sys/block/*/queue/scheduler", "none")]);
        for unknown in [
            "echo $(cat /tmp/x) > /sys/a/b",
            "echo \"$X\" > /sys/a/b",
            "cat /tmp/x > /sys/a/b",
            "/opt/tune /sys/a/b 1",
        ] {
            let found = writes(unknown);
            assert_eq!(
                (found.len(), found[0].path.as_str(), found[0].form),
                (1, "/sys/a/b", Form::Computed),
                "{unknown}"
            );
        }
        assert_eq!(
            writes("while read d; do echo 1 > /sys/block/$d/queue/x; done")[0].path,
            "/sys/block/*/queue/x"
        );
    }

    #[test]
    fn units_their_drop_ins_and_rc_local_are_read() {
        let tree = Files::new(&[
            (
                "/etc/systemd/system/thp.service",
                "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo never > /sys/kernel/mm/transparent_hugepage/defrag'\n",
            ),
            (
                "/etc/systemd/system/x.service.d/more.conf",
                "[Service]\nExecStartPre=-/usr/sbin/sysctl -w net.core.somaxconn=1024\n",
            ),
            (
                "/etc/rc.local",
                "#!/bin/sh\n# echo 1 > /sys/a\nX=/sys/kernel\nif true; then\necho 1 > $X/mm/ksm/run\nfi\n",
            ),
        ]);
        let found = read(&tree);
        let places: Vec<String> = found.iter().map(Written::place).collect();
        assert_eq!(
            places,
            [
                "/etc/systemd/system/thp.service:3",
                "/etc/systemd/system/x.service.d/more.conf:2",
                "/etc/rc.local:4"
            ]
        );
        assert_eq!(found[2].path, "/sys/kernel/mm/ksm/run");
    }

    #[test]
    fn scripts_and_files_of_sysctls_are_followed_and_broken_lines_are_not() {
        let tree = Files::new(&[
            (
                "/etc/systemd/system/a.service",
                "[Service]\nExecStart=/bin/sh -c 'echo 1 > /sys/kernel/mm/ksm/run\n",
            ),
            (
                "/etc/systemd/system/b.service",
                "[Service]\nExecStart=/usr/sbin/sysctl -p /etc/opt/x.conf\nExecStart=/opt/tune.sh\nExecStart=/opt/tune.py\n",
            ),
            (
                "/etc/systemd/system/c.service",
                "[Service]\nExecStart=/bin/sh -c 'echo 1 > /sys/gone/x'\n",
            ),
            (
                "/etc/systemd/system/c.service.d/o.conf",
                "[Service]\nExecStart=\nExecStart=/bin/sh -c 'for f in a b; do echo 1 > /sys/kernel/$f/$$f; done'\n",
            ),
            ("/etc/opt/x.conf", "vm.swappiness = 3\n"),
            (
                "/opt/tune.sh",
                "#!/bin/bash\nfor i in 0 1; do\n  echo $i > /sys/s/$i\ndone\n",
            ),
            (
                "/opt/tune.py",
                "#!/usr/bin/python3\nopen('/sys/kernel/mm/ksm/run', 'w')\n",
            ),
        ]);
        let found: Vec<(String, String)> = read(&tree).iter().map(|w| (w.path.clone(), w.place())).collect();
        let is = |path: &str, place: &str| (path.to_owned(), place.to_owned());
        assert_eq!(
            found,
            [
                is(
                    "/proc/sys/vm/swappiness",
                    "/etc/opt/x.conf:1, by /etc/systemd/system/b.service:2"
                ),
                is("/sys/s/0", "/opt/tune.sh:2, by /etc/systemd/system/b.service:3"),
                is("/sys/s/1", "/opt/tune.sh:2, by /etc/systemd/system/b.service:3"),
                is(
                    "/sys/kernel/mm/ksm/run",
                    "/opt/tune.py:2, by /etc/systemd/system/b.service:4"
                ),
                is("/sys/kernel/a/a", "/etc/systemd/system/c.service.d/o.conf:3"),
                is("/sys/kernel/b/b", "/etc/systemd/system/c.service.d/o.conf:3"),
            ]
        );
    }
}
