//! Errors of the core as the exceptions of `ritornello.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use ritornello_format::{Error, ErrorKind};

/// Python module that defines the exceptions. The module is written in Python because
/// `InvalidError` has two bases.
const MODULE: &str = "ritornello.errors";

struct Exception {
    name: &'static str,
    class: PyOnceLock<Py<PyType>>,
}

impl Exception {
    const fn new(name: &'static str) -> Self {
        Self { name, class: PyOnceLock::new() }
    }

    fn class<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyType>> {
        self.class.import(py, MODULE, self.name)
    }
}

static BASE: Exception = Exception::new("RitornelloError");
static INVALID: Exception = Exception::new("InvalidError");
static SETTING: Exception = Exception::new("SettingError");
static RETRY: Exception = Exception::new("RetryError");
static FATAL: Exception = Exception::new("FatalError");
static CLOSED: Exception = Exception::new("ClosedError");

/// Adds the exceptions of `ritornello.errors`, except `SettingError`, to `_core`.
pub(crate) fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    [&BASE, &INVALID, &RETRY, &FATAL, &CLOSED]
        .iter()
        .try_for_each(|exception| module.add(exception.name, exception.class(module.py())?))
}

pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let exception = match error.kind() {
        ErrorKind::Invalid => &INVALID,
        ErrorKind::Retry => &RETRY,
        ErrorKind::Miss => &BASE,
        ErrorKind::Fatal => &FATAL,
        ErrorKind::Closed => &CLOSED,
    };
    match exception.class(py) {
        Ok(class) => PyErr::from_type(class.clone(), (error.to_string(),)),
        Err(failed) => failed,
    }
}

/// Returns whether an exception is a `FatalError`, after which a retry is useless.
pub(crate) fn is_fatal(py: Python<'_>, error: &PyErr) -> bool {
    FATAL.class(py).is_ok_and(|fatal| error.is_instance(py, fatal))
}

pub(crate) fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    raise(py, &Error::invalid(message))
}

/// Converts an `InvalidError` to a `SettingError`, which says that no later call with this setting
/// succeeds. Returns any other exception unchanged.
pub(crate) fn as_setting(py: Python<'_>, error: PyErr) -> PyErr {
    let is_invalid = INVALID.class(py).is_ok_and(|class| error.is_instance(py, class));
    match SETTING.class(py) {
        Ok(class) if is_invalid => PyErr::from_type(class.clone(), (error.value(py).to_string(),)),
        _ => error,
    }
}

/// Returns an `InvalidError` for the argument `what`, whose value `given` is not accepted. `advice`
/// says what to pass instead.
pub(crate) fn invalid_argument(what: &str, given: &Bound<'_, PyAny>, advice: &str) -> PyErr {
    let shown = given.repr().map(|text| text.to_string()).unwrap_or_default();
    invalid(given.py(), format!("{what} is {shown}: pass {advice}"))
}

/// Converts a `Result` of the core to a `PyResult`.
pub(crate) trait OrRaise<T> {
    /// Returns the value, or raises the exception of the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for ritornello_format::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}
