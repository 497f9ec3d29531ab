//! The log on standard error: of commands, and of processes that use the store as a library.

use ritornello_terminal::print;
use std::io::IsTerminal;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

/// The environment variable that chooses what is logged, and in which form: a level, or levels by
/// crate, and the word `json`, such as `warn,ritornello_store=debug,json`.
const VARIABLE: &str = "RITORNELLO_LOG";

/// The levels that are logged, and whether lines are JSON, one object per line, or text.
#[derive(Debug, PartialEq)]
struct Choice {
    levels: Targets,
    json: bool,
}

impl Choice {
    /// Parses a value of [`VARIABLE`]; `default` is the level if the value names none. Returns the
    /// first word that is wrong as an error.
    fn parse(value: &str, default: LevelFilter) -> Result<Self, &str> {
        let mut choice = Self { levels: Targets::new().with_default(default), json: false };
        for word in value.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if word.eq_ignore_ascii_case("json") {
                choice.json = true;
            } else if let Ok(level) = word.parse::<LevelFilter>() {
                choice.levels = choice.levels.with_default(level);
            } else if let Some((target, level)) = word.split_once('=') {
                let level: LevelFilter = level.parse().map_err(|_| word)?;
                choice.levels = choice.levels.with_target(target, level);
            } else {
                return Err(word);
            }
        }
        Ok(choice)
    }

    /// Returns the choice in [`VARIABLE`]; `default` and text if the variable is unset or
    /// malformed. Prints a line about a malformed value.
    fn of_environment(default: LevelFilter) -> Self {
        let value = std::env::var(VARIABLE).unwrap_or_default();
        Self::parse(&value, default).unwrap_or_else(|word| {
            print::print_stderr(&format!(
                "{VARIABLE}={value} was ignored, because of \"{word}\": give a level (error, warn, \
                 info, debug, trace, off), levels by crate, and json for lines in JSON, such as \
                 warn,ritornello_store=debug,json"
            ));
            Self { levels: Targets::new().with_default(default), json: false }
        })
    }

    /// Starts the log. If the process already has a logger, that logger stays in use. `bare` omits
    /// time and target from lines of text; JSON always has both.
    fn start(self, bare: bool) {
        let lines = fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(!self.json && std::io::stderr().is_terminal());
        let lines = match (self.json, bare) {
            (true, _) => lines.json().flatten_event(true).boxed(),
            (false, true) => lines.with_target(false).without_time().boxed(),
            (false, false) => lines.boxed(),
        };
        let _ = tracing_subscriber::registry().with(lines.with_filter(self.levels)).try_init();
    }
}

/// Starts the log of a command: lines of the level `default` and of more severe levels, or what
/// [`VARIABLE`] chooses.
pub(crate) fn start_in_command(default: LevelFilter) {
    Choice::of_environment(default).start(true);
}

/// Starts the log of a process that uses the store as a library: warnings and errors, or what
/// [`VARIABLE`] chooses. If the process already has a logger, such as a command's logger, that
/// logger stays in use.
pub fn start_in_library() {
    Choice::of_environment(LevelFilter::WARN).start(false);
}
