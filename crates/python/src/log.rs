//! The core's log on its way to Python's `logging`: `ritornello.core_log` takes its lines in a
//! thread of Python. No thread of the core attaches to the interpreter to log.

use pyo3::prelude::*;
use ritornello_cli::log::{EmbeddedLog, Line, start_embedded};
use std::sync::OnceLock;
use std::time::Duration;

/// The log, once it is started; `None` inside if its lines do not go to Python.
static LOG: OnceLock<Option<EmbeddedLog>> = OnceLock::new();

/// Maximum time that [`take_log_lines`] waits. A line about omitted lines may be late by this time.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the log when the first store, cache or device is opened.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    let mut started = None;
    LOG.get_or_init(|| {
        let log = start_embedded();
        started = log.as_ref().map(|log| log.level);
        log
    });
    // Imports may let other threads run, which may wait for the initialization above.
    let Some(level) = started else { return Ok(()) };
    let level = level.map(|level| python_level(&level));
    py.import("ritornello.core_log")?.call_method1("start", (level,))?;
    Ok(())
}

/// Level, target, message, fields, seconds since 1970, thread, source file, and line in this file.
type LineValues = (u8, String, String, Vec<(&'static str, String)>, f64, String, String, u32);

/// Returns lines of the log. Waits for them at most 10 seconds, then returns an empty list. Returns
/// `None` if the log ended.
#[pyfunction]
pub(crate) fn take_log_lines(py: Python<'_>) -> Option<Vec<LineValues>> {
    let log = LOG.get()?.as_ref()?;
    let lines = py.detach(|| log.queue.take(TAKE_TIMEOUT))?;
    let values = lines.into_iter().map(|line| {
        let Line { level, target, file, line, time, thread, message, fields } = line;
        (python_level(&level), target, message, fields, time, thread, file, line)
    });
    Some(values.collect())
}

/// Ends the log: later lines go to standard error.
#[pyfunction]
pub(crate) fn end_log() {
    if let Some(Some(log)) = LOG.get() {
        log.queue.close();
    }
}

/// The level in Python's `logging`, where 5 is below `DEBUG`.
fn python_level(level: &tracing::Level) -> u8 {
    match *level {
        tracing::Level::ERROR => 40,
        tracing::Level::WARN => 30,
        tracing::Level::INFO => 20,
        tracing::Level::DEBUG => 10,
        tracing::Level::TRACE => 5,
    }
}
