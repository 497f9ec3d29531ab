//! A finding of `ritornello doctor`.

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No change is needed.
    Fine,
    /// The store works; a change would improve it.
    Advice,
    /// The store does not work, or is unreliable.
    Wrong,
}

/// A finding about one aspect of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Severity.
    pub level: Level,
    /// The aspect examined.
    pub what: &'static str,
    /// The observation.
    pub found: String,
    /// The recommended change; empty if no change is recommended.
    pub change: String,
}

impl Finding {
    /// Returns a finding that needs no change.
    pub fn fine(what: &'static str, found: impl Into<String>) -> Self {
        Self { level: Level::Fine, what, found: found.into(), change: String::new() }
    }

    /// Returns a finding with advice.
    pub fn advice(what: &'static str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { level: Level::Advice, what, found: found.into(), change: change.into() }
    }

    /// Returns a finding of a fault.
    pub fn wrong(what: &'static str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self { level: Level::Wrong, what, found: found.into(), change: change.into() }
    }
}
