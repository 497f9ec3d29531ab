//! One thing that was looked at.

use serde::Serialize;

/// How it looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Fine,
    /// It works; something could be better.
    Advice,
    /// It does not work, or cannot be relied on.
    Wrong,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How it looks.
    pub level: Level,
    /// What was looked at.
    pub what: &'static str,
    /// What was found.
    pub found: String,
    /// What to change; empty if nothing.
    pub change: String,
}

impl Finding {
    /// As it should be.
    pub fn fine(what: &'static str, found: impl Into<String>) -> Self {
        Self { level: Level::Fine, what, found: found.into(), change: String::new() }
    }

    /// It works; something could be better.
    pub fn advice(what: &'static str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { level: Level::Advice, what, found: found.into(), change: change.into() }
    }

    /// It does not work, or cannot be relied on.
    pub fn wrong(what: &'static str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { level: Level::Wrong, what, found: found.into(), change: change.into() }
    }
}
