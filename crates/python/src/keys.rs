//! Page keys: `list[bytes]`, borrowed during a call.

use crate::error::{OrRaise, invalid};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use ritornello_format::Result;

/// Keys kept alive by separate references: another thread may change the list while the interpreter
/// is detached.
pub(crate) struct Keys<'py>(Vec<Bound<'py, PyBytes>>);

impl<'py> Keys<'py> {
    /// Takes references to the elements of a list or another iterable.
    pub(crate) fn of(keys: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = keys.cast::<PyList>() {
            return list.iter().enumerate().map(|(at, key)| bytes(at, key)).collect();
        }
        keys.try_iter()
            .map_err(|_| invalid(keys.py(), "keys is a list of bytes objects"))?
            .enumerate()
            .map(|(at, key)| bytes(at, key?))
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

/// Runs `action` on the keys, detached from the interpreter.
pub(crate) fn ask<T: Send>(
    keys: &Bound<'_, PyAny>,
    action: impl FnOnce(&[&[u8]]) -> Result<T> + Send,
) -> PyResult<T> {
    let (py, held) = (keys.py(), Keys::of(keys)?);
    let keys = held.slices();
    py.detach(|| action(&keys)).or_raise(py)
}

fn bytes<'py>(at: usize, key: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    key.cast_into::<PyBytes>().map_err(|error| {
        let key = error.into_inner();
        let given = key.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        invalid(
            key.py(),
            format!("key {at} is of type {given}: pass the engine's block hash as bytes"),
        )
    })
}
