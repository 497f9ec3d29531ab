//! The core's log on its way to Python's `logging`: `ritornello.core_log` takes its lines in a
//! thread of Python. No thread of the core attaches to the interpreter to log.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use ritornello_cli::log::{EmbeddedLog, Line, start_embedded};
use std::sync::OnceLock;

/// The log, once it is started; `None` inside if its lines do not go to Python.
static LOG: OnceLock<Option<EmbeddedLog>> = OnceLock::new();

/// Starts the log when the first store, cache or device is opened. If Python cannot take its lines,
/// for example because no thread can be started, lines go to standard error. Fails only with an
/// exception that is no `Exception`, such as `KeyboardInterrupt`.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    let mut started = None;
    LOG.get_or_init(|| {
        let log = start_embedded();
        started = log.as_ref().map(|log| (log.queue, log.level));
        log
    });
    // Import after the initialization: an import may release the interpreter to a thread that then
    // waits, attached to it, for the end of the initialization.
    let Some((queue, level)) = started else { return Ok(()) };
    let level = level.map(|level| python_level(&level));
    let imported = py.import("ritornello.core_log");
    match imported.and_then(|core_log| core_log.call_method1("start", (level,))) {
        Ok(_) => Ok(()),
        Err(error) => {
            queue.print_waiting();
            if error.is_instance_of::<PyException>(py) { Ok(()) } else { Err(error) }
        }
    }
}

/// Level, target, message, fields, seconds since 1970, thread, source file, and line in this file.
type LineValues = (u8, String, String, Vec<(&'static str, String)>, f64, String, String, u32);

/// Waits for the next line of the log, and returns it; `None` if the log ended.
#[pyfunction]
pub(crate) fn take_log_line(py: Python<'_>) -> Option<LineValues> {
    let log = LOG.get()?.as_ref()?;
    let line = py.detach(|| log.queue.take())?;
    let Line { level, target, file, line, time, thread, message, fields } = line;
    Some((python_level(&level), target, message, fields, time, thread, file, line))
}

/// Ends the log: later lines go to standard error. With `print`, the lines that wait do too;
/// without, [`take_log_line`] still returns them.
#[pyfunction]
#[pyo3(signature = (*, print=false))]
pub(crate) fn end_log(py: Python<'_>, print: bool) {
    if let Some(Some(log)) = LOG.get() {
        py.detach(|| if print { log.queue.print_waiting() } else { log.queue.close() });
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
