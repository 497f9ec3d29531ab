//! The `pages` or `out` argument of a put or a get: a list of buffers, or pages of a pool.

use crate::buffer::{Access, release_dropped};
use crate::error::invalid;
use crate::pages::Buffers;
use crate::pool::{PoolPages, Selection};
use pyo3::prelude::*;
use ritornello_volume::page_memory::{PageSource, PageTarget};
use std::sync::Arc;

/// The memory of a batch.
pub(crate) enum BatchMemory {
    Buffers(Arc<Buffers>),
    Pool(Selection),
}

impl BatchMemory {
    /// Takes memory to write `keys` pages from; the number of pages must match.
    pub(crate) fn source(pages: &Bound<'_, PyAny>, keys: usize, page_bytes: u64) -> PyResult<Self> {
        if let Ok(given) = pages.len()
            && given != keys
        {
            return Err(invalid(pages.py(), format!("{keys} keys, but {given} pages")));
        }
        Self::of(pages, keys, page_bytes, Access::Read)
    }

    /// Takes memory to read `keys` pages into; pages beyond that number stay unused.
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
        match pages.cast::<PoolPages>() {
            Ok(pool) => pool.get().select(pages.py(), keys, page_bytes, purpose).map(Self::Pool),
            Err(_) => Buffers::of(pages, keys, page_bytes, purpose)
                .map(|pages| Self::Buffers(Arc::new(pages))),
        }
    }

    pub(crate) fn as_source(&self) -> &dyn PageSource {
        match self {
            Self::Buffers(pages) => pages.as_ref(),
            Self::Pool(selection) => selection,
        }
    }

    pub(crate) fn as_target(&self) -> &dyn PageTarget {
        match self {
            Self::Buffers(pages) => pages.as_ref(),
            Self::Pool(selection) => selection,
        }
    }

    pub(crate) fn to_source(&self) -> Arc<dyn PageSource> {
        match self {
            Self::Buffers(pages) => Arc::clone(pages) as Arc<dyn PageSource>,
            Self::Pool(selection) => Arc::new(selection.clone()),
        }
    }

    pub(crate) fn to_target(&self) -> Arc<dyn PageTarget> {
        match self {
            Self::Buffers(pages) => Arc::clone(pages) as Arc<dyn PageTarget>,
            Self::Pool(selection) => Arc::new(selection.clone()),
        }
    }

    /// Releases the memory. No operation may use the memory after this call.
    pub(crate) fn release(&self, py: Python<'_>) {
        if let Self::Buffers(pages) = self {
            pages.release();
        }
        release_dropped(py);
    }
}
