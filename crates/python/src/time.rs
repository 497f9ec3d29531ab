//! Times and durations of Python.

use crate::error::{OrRaise, invalid, invalid_argument};
use pyo3::prelude::*;
use ritornello_volume::transfer::{Control, Sections};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns a duration of `seconds`; `what` names the argument. Too large a number saturates.
pub(crate) fn duration(py: Python<'_>, what: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(invalid(py, format!("{what} is {seconds}: pass seconds, zero or more")));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Returns a time as seconds since 1970; takes a number or a `datetime`. Times before 1970 become
/// 1, which has passed as well.
pub(crate) fn seconds_since_1970(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let seconds = given.extract::<f64>().or_else(|_| given.call_method0("timestamp")?.extract());
    match seconds {
        // The cast saturates numbers that are too large or too small.
        Ok(seconds) if !f64::is_nan(seconds) => Ok((seconds.ceil() as u64).max(1)),
        _ => Err(invalid_argument("retain_until", given, "seconds since 1970 or a datetime")),
    }
}

/// Returns the time `timeout` seconds from now; `None` for no limit.
pub(crate) fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    Ok(Instant::now().checked_add(duration(py, "timeout", seconds)?))
}

/// Returns a control that stops an operation after `timeout` seconds.
pub(crate) fn control(py: Python<'_>, timeout: Option<f64>) -> PyResult<Control> {
    Ok(Control { deadline: deadline(py, timeout)?, ..Control::default() })
}

/// Returns the sections of pages that are read in order.
pub(crate) fn sections(py: Python<'_>, ends: Option<Vec<u64>>) -> PyResult<Option<Arc<Sections>>> {
    Ok(ends.map(Sections::new).transpose().or_raise(py)?.map(Arc::new))
}
