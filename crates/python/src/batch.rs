//! Batches of pages: keys, and the memory of their pages, kept until the transfer has ended.

use crate::arguments::{Keys, control};
use crate::error::{OrRaise, invalid};
use crate::memory::{Access, Buffers, PageMemory, release_dropped};
use crate::pool::PoolPages;
use crate::scope::Scope;
use pyo3::prelude::*;
use ritornello_format::Result;
use ritornello_volume::transfer::{Control, Sections};
use std::sync::Arc;

/// Scope, keys, memory and control of a put or a get.
pub(crate) struct Submission {
    pub(crate) scope: Arc<ritornello_format::Scope>,
    pub(crate) keys: Vec<Box<[u8]>>,
    pub(crate) memory: BatchMemory,
    pub(crate) control: Control,
}

impl Submission {
    /// Returns a get into `out`. `sections` holds the end of each section, in bytes from the start
    /// of a page.
    pub(crate) fn get(
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        sections: Option<Vec<u64>>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let control = control(keys.py(), timeout)?;
        let sections = sections.map(Sections::new).transpose().or_raise(keys.py())?;
        let control = Control { sections: sections.map(Arc::new), ..control };
        let keys = Keys::of(keys)?.boxed();
        let memory = BatchMemory::target(out, keys.len(), scope.page_bytes)?;
        Ok(Self { scope: Arc::clone(&scope.inner), keys, memory, control })
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
        let memory =
            BatchMemory::source(pages, keys.len().saturating_sub(first), scope.page_bytes)?;
        Ok(Self { scope: Arc::clone(&scope.inner), keys, memory, control })
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

pub(crate) struct BatchMemory(pub(crate) Arc<dyn PageMemory>);

impl BatchMemory {
    /// Takes the memory that a put of `keys` pages reads. Refuses `pages` whose length is not
    /// `keys`; of an iterator without a length, elements after the first `keys` stay unused.
    pub(crate) fn source(pages: &Bound<'_, PyAny>, keys: usize, page_bytes: u64) -> PyResult<Self> {
        if let Ok(given) = pages.len()
            && given != keys
        {
            return Err(invalid(
                pages.py(),
                format!("{keys} keys, but {given} pages: pass one page for each key"),
            ));
        }
        Self::of(pages, keys, page_bytes, Access::Read)
    }

    /// Takes the memory that a get of `keys` pages fills; further elements of `pages` stay unused.
    pub(crate) fn target(pages: &Bound<'_, PyAny>, keys: usize, page_bytes: u64) -> PyResult<Self> {
        Self::of(pages, keys, page_bytes, Access::Write)
    }

    fn of(
        pages: &Bound<'_, PyAny>,
        keys: usize,
        page_bytes: u64,
        purpose: Access,
    ) -> PyResult<Self> {
        release_dropped(pages.py());
        Ok(Self(match pages.cast::<PoolPages>() {
            Ok(pool) => Arc::new(pool.get().select(pages.py(), keys, page_bytes, purpose)?),
            Err(_) => Arc::new(Buffers::of(pages, keys, page_bytes, purpose)?),
        }))
    }

    /// Releases the memory of a call that has ended. Returns the call's value, or raises its error.
    pub(crate) fn finish<T>(&self, py: Python<'_>, done: Result<T>) -> PyResult<T> {
        self.release(py);
        done.or_raise(py)
    }

    /// Releases buffers that this batch alone holds; a pool keeps its buffers. No operation may use
    /// the memory after this call.
    pub(crate) fn release(&self, py: Python<'_>) {
        self.0.release();
        release_dropped(py);
    }
}
