//! A machine made of texts, for tests.

use crate::tree::{Tree, Unreadable};
use std::collections::BTreeMap;

/// Files by path.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files {
    files: BTreeMap<String, String>,
    configuration: Option<String>,
}

impl Files {
    pub(crate) fn new(list: &[(&str, &str)]) -> Self {
        Self {
            files: list
                .iter()
                .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
                .collect(),
            configuration: None,
        }
    }

    pub(crate) fn with_configuration(mut self, text: &str) -> Self {
        self.configuration = Some(text.to_owned());
        self
    }

    pub(crate) fn set(&mut self, path: &str, text: &str) {
        self.files.insert(path.to_owned(), text.to_owned());
    }
}

impl Tree for Files {
    fn read(&self, path: &str) -> Result<Vec<u8>, Unreadable> {
        self.files
            .get(path)
            .map(|text| text.clone().into_bytes())
            .ok_or(Unreadable::Absent)
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let prefix = format!("{}/", directory.trim_end_matches('/'));
        let mut names: Vec<String> = self
            .files
            .keys()
            .filter_map(|path| path.strip_prefix(&prefix)?.split('/').next().map(str::to_owned))
            .collect();
        names.dedup();
        names
    }

    fn kernel_configuration(&self) -> Option<Vec<u8>> {
        self.configuration.clone().map(String::into_bytes)
    }
}
