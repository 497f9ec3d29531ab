//! The arguments of a put or a get that a ticket represents.

use crate::batch::BatchMemory;
use crate::keys::Keys;
use crate::scope::Scope;
use crate::time::{self, control, seconds_since_1970};
use pyo3::prelude::*;
use ritornello_store::PutOptions;
use ritornello_volume::transfer::Control;
use std::sync::Arc;

/// Keys, memory and deadline of a put or a get.
pub(crate) struct Submission {
    pub(crate) scope: Arc<ritornello_format::Scope>,
    pub(crate) keys: Vec<Box<[u8]>>,
    pub(crate) batch: BatchMemory,
    pub(crate) control: Control,
}

impl Submission {
    /// Returns a get into `out`, in consecutive sections with these ends.
    pub(crate) fn get(
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        sections: Option<Vec<u64>>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let control = control(keys.py(), timeout)?;
        let control = Control { sections: time::sections(keys.py(), sections)?, ..control };
        let keys = Keys::of(keys)?.boxed();
        let batch = BatchMemory::target(out, keys.len(), scope.page_bytes)?;
        Ok(Self { scope: Arc::clone(&scope.inner), keys, batch, control })
    }

    /// Returns a put of `pages`, the pages of all keys except the first `first` keys.
    pub(crate) fn put(
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        first: usize,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let control = control(keys.py(), timeout)?;
        let keys = Keys::of(keys)?.boxed();
        let batch = BatchMemory::source(pages, keys.len().saturating_sub(first), scope.page_bytes)?;
        Ok(Self { scope: Arc::clone(&scope.inner), keys, batch, control })
    }
}

/// Returns the options of a put.
pub(crate) fn put_options(
    parent: Option<&[u8]>,
    retain_until: Option<&Bound<'_, PyAny>>,
) -> PyResult<PutOptions> {
    let retain_until = retain_until.map(seconds_since_1970).transpose()?.unwrap_or_default();
    Ok(PutOptions { retain_until, ..PutOptions::after(parent) })
}
