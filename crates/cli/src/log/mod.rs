//! The log. A command logs on standard error. A process that embeds the store takes the lines from
//! a queue, unless the environment chooses JSON, which goes to standard error. Repeated lines are
//! limited.

mod queue;
mod throttle;

pub use queue::{Line, LineQueue};

use queue::QueueLayer;
use std::io::{self, IsTerminal, Write};
use std::sync::{LazyLock, OnceLock};
use throttle::Omitted;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::writer::{MakeWriter, OptionalWriter};
use tracing_subscriber::prelude::*;

/// The environment variable that chooses what is logged, and in which form: any of a level, levels
/// of crates, and the word `json`, such as `warn,ritornello_store=debug,json`.
const VARIABLE: &str = "RITORNELLO_LOG";

/// Set once the log is on standard error: whether lines are JSON.
static ON_STDERR: OnceLock<bool> = OnceLock::new();

/// The levels that are logged, and whether lines are JSON, one object per line, or text.
#[derive(Debug, PartialEq)]
struct Choice {
    levels: Targets,
    json: bool,
}

impl Choice {
    /// Parses a value of [`VARIABLE`]; `default` is the level of the crates for which the value
    /// names no level. Returns the first word that is wrong as an error.
    fn parse(value: &str, default: LevelFilter) -> Result<Self, &str> {
        let mut choice = Self { levels: Targets::new().with_default(default), json: false };
        for word in value.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if word.eq_ignore_ascii_case("json") {
                choice.json = true;
            } else if let Ok(level) = word.parse::<LevelFilter>() {
                choice.levels = choice.levels.with_default(level);
            } else if let Some((target, level)) = word.split_once('=')
                && !level.is_empty()
            {
                let level: LevelFilter = level.parse().map_err(|_| word)?;
                choice.levels = choice.levels.with_target(target, level);
            } else {
                return Err(word);
            }
        }
        Ok(choice)
    }

    /// The least severe level that is logged for any crate; `None` if nothing is logged.
    fn least_severe(&self) -> Option<Level> {
        let levels = self.levels.iter().map(|(_, level)| level).chain(self.levels.default_level());
        levels.max().and_then(|level| level.into_level())
    }

    /// Returns the choice in [`VARIABLE`] and true. If the variable is unset, empty or malformed,
    /// returns the level `default` in lines of text, and false. Prints a line about a malformed
    /// value.
    fn of_environment(default: LevelFilter) -> (Self, bool) {
        LazyLock::force(&throttle::PROCESS);
        let value = std::env::var_os(VARIABLE).unwrap_or_default();
        let value = value.to_string_lossy();
        match Self::parse(&value, default) {
            Ok(choice) => (choice, !value.is_empty()),
            Err(word) => {
                print_line(&format!(
                    "{VARIABLE}={value} was ignored, because of \"{word}\": give a level (error, \
                     warn, info, debug, trace, off), levels by crate, and json for lines in JSON, \
                     such as warn,ritornello_store=debug,json"
                ));
                (Self { levels: Targets::new().with_default(default), json: false }, false)
            }
        }
    }

    /// Starts the log on standard error. `bare` omits time and target from lines of text; JSON
    /// always has both.
    fn start_on_stderr(self, bare: bool) {
        let json = self.json;
        let lines = fmt::layer()
            .with_writer(Stderr { json })
            .with_ansi(!json && io::stderr().is_terminal());
        let lines = match (json, bare) {
            (true, _) => lines.json().flatten_event(true).boxed(),
            (false, true) => lines.with_target(false).without_time().boxed(),
            (false, false) => lines.boxed(),
        };
        if tracing_subscriber::registry().with(lines.with_filter(self.levels)).try_init().is_ok() {
            let _ = ON_STDERR.set(json);
        }
    }

    /// Starts the log in the returned queue, unless the process already has a logger.
    fn start_in_queue(self) -> Option<&'static LineQueue> {
        let queue: &'static LineQueue = Box::leak(Box::new(LineQueue::new()));
        let lines = QueueLayer(queue).with_filter(self.levels);
        tracing_subscriber::registry().with(lines).try_init().ok().map(|()| queue)
    }
}

/// Standard error, without the lines that the throttle omits.
struct Stderr {
    json: bool,
}

impl MakeWriter<'_> for Stderr {
    type Writer = OptionalWriter<StderrWriter>;

    fn make_writer(&self) -> Self::Writer {
        OptionalWriter::some(StderrWriter)
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> Self::Writer {
        let admitted = throttle::admit(metadata, |omitted| print_omitted(omitted, self.json));
        if admitted { self.make_writer() } else { OptionalWriter::none() }
    }
}

/// Writes to standard error without a lock, unlike [`io::stderr`]: in a forked child, a lock stays
/// locked forever if a thread of the parent held it during the fork. Each line is written in one
/// call, so that lines of several threads do not mix.
struct StderrWriter;

impl io::Write for StderrWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stderr(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line to standard error. Ignores errors, such as a closed pipe.
fn print_line(text: &str) {
    let _ = StderrWriter.write_all(format!("{text}\n").as_bytes());
}

/// Prints a line about omitted lines.
fn print_omitted(omitted: &Omitted, json: bool) {
    let (statement, message) = (&omitted.statement, omitted.message());
    print_line(&if json {
        let mut timestamp = String::new();
        let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
        serde_json::json!({
            "timestamp": timestamp,
            "level": statement.level.as_str(),
            "message": message,
            "target": statement.target,
        })
        .to_string()
    } else {
        format!("{:>5} {message}", statement.level)
    });
}

/// Starts the log of a command: lines of the level `default` and of more severe levels, or what
/// [`VARIABLE`] chooses.
pub(crate) fn start_in_command(default: LevelFilter) {
    Choice::of_environment(default).0.start_on_stderr(true);
}

/// Prints on standard error how many lines were omitted, at the end of a command or process.
pub fn finish() {
    let json = *ON_STDERR.get().unwrap_or(&false);
    throttle::take_omitted().iter().for_each(|omitted| print_omitted(omitted, json));
}

/// The log of a process that embeds the store.
#[derive(Debug)]
pub struct EmbeddedLog {
    /// The lines.
    pub queue: &'static LineQueue,
    /// The least severe level that [`VARIABLE`] chooses for any crate; `None` if it chooses none.
    pub level: Option<Level>,
}

/// Starts the log of a process that embeds the store: warnings and errors, or what [`VARIABLE`]
/// chooses. Returns `None` if lines go elsewhere: to standard error, because [`VARIABLE`] chooses
/// JSON; or to a logger that the process already has.
pub fn start_embedded() -> Option<EmbeddedLog> {
    let (choice, is_chosen) = Choice::of_environment(LevelFilter::WARN);
    if choice.json {
        choice.start_on_stderr(false);
        return None;
    }
    let level = if is_chosen { choice.least_severe() } else { None };
    choice.start_in_queue().map(|queue| EmbeddedLog { queue, level })
}
