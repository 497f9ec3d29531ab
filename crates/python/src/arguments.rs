//! Converts arguments from Python to values of the core: keys, times, sizes, options.

use crate::error::{OrRaise, invalid, invalid_argument};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use ritornello_format::parse_bytes;
use ritornello_store::PutOptions;
use ritornello_store::admission::WriteBudget;
use ritornello_volume::segments::IoChoice;
use ritornello_volume::transfer::Control;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(crate) fn put_options(
    parent: Option<&[u8]>,
    retain_until: Option<&Bound<'_, PyAny>>,
) -> PyResult<PutOptions> {
    let retain_until = retain_until.map(seconds_since_1970).transpose()?.unwrap_or_default();
    Ok(PutOptions { retain_until, ..PutOptions::after(parent) })
}

/// References that keep the caller's keys alive if another thread changes the caller's list while
/// this thread is detached from the interpreter.
pub(crate) struct Keys<'py>(Vec<Bound<'py, PyBytes>>);

impl<'py> Keys<'py> {
    /// Takes references to the elements of a list or another iterable.
    pub(crate) fn of(keys: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = keys.cast::<PyList>() {
            // Take the elements by index, because the iterator of a list asks for the list's length
            // before each element.
            let length = list.len();
            let mut taken = Vec::with_capacity(length);
            for at in 0..length {
                taken.push(key_bytes(at, list.get_item(at)?)?);
            }
            return Ok(Self(taken));
        }
        keys.try_iter()
            .map_err(|_| invalid(keys.py(), "keys must be a list of bytes objects"))?
            .enumerate()
            .map(|(at, key)| key_bytes(at, key?))
            .collect()
    }

    /// Returns the keys' bytes without a copy.
    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        self.0.iter().map(|key| key.as_bytes()).collect()
    }

    /// Returns copies of the keys' bytes.
    pub(crate) fn boxed(&self) -> Vec<Box<[u8]>> {
        self.0.iter().map(|key| Box::from(key.as_bytes())).collect()
    }
}

impl<'py> FromIterator<Bound<'py, PyBytes>> for Keys<'py> {
    fn from_iter<I: IntoIterator<Item = Bound<'py, PyBytes>>>(keys: I) -> Self {
        Self(keys.into_iter().collect())
    }
}

fn key_bytes<'py>(at: usize, key: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    key.cast_into::<PyBytes>().map_err(|error| {
        let key = error.into_inner();
        let given = key.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        invalid(
            key.py(),
            format!("key {at} is of type {given}: pass the engine's block hash as bytes"),
        )
    })
}

/// Returns a duration of `seconds`; `what` names the argument. A number too large for a
/// `Duration` becomes `Duration::MAX`.
pub(crate) fn duration(py: Python<'_>, what: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(invalid(py, format!("{what} is {seconds}: pass seconds, zero or more")));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Returns `given`, a number or a `datetime`, as seconds since 1970, rounded up. A time of 0 or
/// less becomes 1, which is also in the past, because 0 would mean that no time is given.
fn seconds_since_1970(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let seconds = given.extract::<f64>().or_else(|_| given.call_method0("timestamp")?.extract());
    match seconds {
        // The cast turns a number outside the range of `u64` into the nearest `u64`.
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

/// Returns the directory of a store and, if `path` is a list, the further directories in it.
pub(crate) fn directories(path: &Bound<'_, PyAny>) -> PyResult<(PathBuf, Option<Vec<PathBuf>>)> {
    if let Ok(dir) = path.extract() {
        return Ok((dir, None));
    }
    let advice = "a directory, or a list of directories, one per disk";
    let mut dirs: Vec<PathBuf> =
        path.extract().map_err(|_| invalid_argument("path", path, advice))?;
    if dirs.is_empty() {
        return Err(invalid_argument("path", path, advice));
    }
    let dir = dirs.remove(0);
    Ok((dir, Some(dirs)))
}

/// Parses a number of bytes: an integer, or text with a unit. `what` names the argument.
pub(crate) fn bytes_of(what: &str, given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = given.py();
    if let Ok(text) = given.extract::<String>() {
        return parse_bytes(&text).or_raise(py);
    }
    given.extract().map_err(|_| invalid_argument(what, given, "bytes, or text such as \"200GiB\""))
}

/// Parses a write budget: bytes per day, or text with a time span.
pub(crate) fn budget_of(given: &Bound<'_, PyAny>) -> PyResult<WriteBudget> {
    let py = given.py();
    if let Ok(text) = given.extract::<String>() {
        return WriteBudget::parse(&text).or_raise(py);
    }
    let advice = "bytes per day, or text such as \"2TB/day\"";
    given
        .extract()
        .map(WriteBudget::per_day)
        .map_err(|_| invalid_argument("write_budget", given, advice))
}

pub(crate) fn io_choice(py: Python<'_>, word: &str) -> PyResult<IoChoice> {
    Ok(match word {
        "auto" => IoChoice::Auto,
        "uring" => IoChoice::Uring,
        "pool" => IoChoice::Pool,
        "buffered" => IoChoice::Buffered,
        _ => {
            let choices = "io must be \"auto\", \"uring\", \"pool\" or \"buffered\"";
            return Err(invalid(py, format!("{choices}, not {word:?}")));
        }
    })
}
