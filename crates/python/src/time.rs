//! Seconds, as Python gives them.

use crate::error::{OrRaise, invalid, unfit};
use pyo3::prelude::*;
use ritornello_volume::transfer::{Control, Sections};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A span of `seconds`; `what` names the argument. Too long to count is as long as can be counted.
pub(crate) fn duration(py: Python<'_>, what: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(invalid(py, format!("{what} is {seconds}: pass seconds, zero or more")));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// A moment: seconds since 1970, or a `datetime`. One before 1970 has passed, like any other.
pub(crate) fn seconds_since_1970(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let seconds = given.extract::<f64>().or_else(|_| given.call_method0("timestamp")?.extract());
    match seconds {
        // A conversion of numbers too large or too small ends at the limits.
        Ok(seconds) if !f64::is_nan(seconds) => Ok((seconds.ceil() as u64).max(1)),
        _ => Err(unfit("retain_until", given, "seconds since 1970 or a datetime")),
    }
}

/// When `timeout` from now is; `None` for no limit.
pub(crate) fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    Ok(Instant::now().checked_add(duration(py, "timeout", seconds)?))
}

/// Stops after `timeout`.
pub(crate) fn control(py: Python<'_>, timeout: Option<f64>) -> PyResult<Control> {
    Ok(Control { deadline: deadline(py, timeout)?, ..Control::default() })
}

/// The sections of pages that are to come one after the other.
pub(crate) fn sections(py: Python<'_>, ends: Option<Vec<u64>>) -> PyResult<Option<Arc<Sections>>> {
    Ok(ends.map(Sections::new).transpose().or_raise(py)?.map(Arc::new))
}
