//! Buffers given as Python objects: one buffer each, or several that together make the page.

use crate::buffer::{Access, BufferGuard, Chunk};
use crate::error::invalid;
use crate::overlap::{MemoryRange, overlap};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyString;
use ritornello_volume::page_memory::{Fragment, FragmentMut, PageSource, PageTarget};
use std::ops::Range;

/// The memory of pages, kept until [`Buffers::release`] or the last reference is dropped.
pub(crate) struct Buffers {
    chunks: Vec<Chunk>,
    /// Chunks of each page.
    pages: Vec<Range<usize>>,
    /// `None` once the memory is released: no fragments are handed out then.
    held: Mutex<Option<BufferGuard>>,
}

impl Buffers {
    /// Takes the first `count` of `pages`, each of `page_bytes` bytes. Memory to be written must
    /// not overlap.
    pub(crate) fn of(
        pages: &Bound<'_, PyAny>,
        count: usize,
        page_bytes: u64,
        purpose: Access,
    ) -> PyResult<Self> {
        let py = pages.py();
        let mut taken = Self {
            chunks: Vec::with_capacity(count),
            pages: Vec::with_capacity(count),
            held: Mutex::default(),
        };
        let mut held = BufferGuard::default();
        let given = pages.try_iter().map_err(|_| invalid(py, "pages is a list of buffers"))?;
        for (at, page) in given.take(count).enumerate() {
            taken.add(at, &page?, page_bytes, purpose, &mut held)?;
        }
        if taken.pages.len() < count {
            return Err(invalid(py, format!("{count} keys, but {} pages", taken.pages.len())));
        }
        if purpose == Access::Write {
            check_disjoint(py, taken.ranges().collect())?;
        }
        *taken.held.lock() = Some(held);
        Ok(taken)
    }

    fn add(
        &mut self,
        at: usize,
        page: &Bound<'_, PyAny>,
        page_bytes: u64,
        purpose: Access,
        held: &mut BufferGuard,
    ) -> PyResult<()> {
        let from = self.chunks.len();
        if let Some(chunk) = held.take(page, purpose, || format!("page {at}"))? {
            self.chunks.push(chunk);
        } else {
            for (part, piece) in pieces(at, page)?.enumerate() {
                let (piece, name) = (piece?, || format!("piece {part} of page {at}"));
                let chunk = held.take(&piece, purpose, name)?;
                self.chunks.push(chunk.ok_or_else(|| no_buffer(&piece, &name()))?);
            }
        }
        let bytes: u64 = self.chunks[from..].iter().map(|chunk| chunk.bytes as u64).sum();
        if bytes != page_bytes {
            return Err(invalid(
                page.py(),
                format!("page {at} has {bytes} bytes; pages of this scope have {page_bytes}"),
            ));
        }
        self.pages.push(from..self.chunks.len());
        Ok(())
    }

    /// Releases the memory. No operation may use the memory after this call.
    pub(crate) fn release(&self) {
        drop(self.held.lock().take());
    }

    fn ranges(&self) -> impl Iterator<Item = MemoryRange> {
        self.pages.iter().enumerate().flat_map(|(page, range)| {
            self.chunks[range.clone()].iter().map(move |chunk| MemoryRange {
                address: chunk.start.addr(),
                bytes: chunk.bytes,
                page,
            })
        })
    }

    fn chunks_of(&self, page: usize) -> impl Iterator<Item = &Chunk> {
        let range = self.pages.get(page).filter(|_| self.held.lock().is_some());
        let chunks = range.map_or(&[][..], |range| &self.chunks[range.clone()]);
        chunks.iter().filter(|chunk| chunk.bytes > 0)
    }
}

// SAFETY: `held` keeps the buffers exported, so their memory neither moves nor ends; after
// `release`, which waits for the ticket, no fragment is handed out. The trait permits Python code
// to change a buffer during a put.
unsafe impl PageSource for Buffers {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        // SAFETY: exported buffers of at least this length.
        out.extend(self.chunks_of(page).map(|c| unsafe { Fragment::new(c.start, c.bytes) }));
    }
}

// SAFETY: as above. Buffers taken for writing were exported as writable and checked not to overlap;
// `_core.pyi` requires the Python caller not to touch them until the call returns or the ticket is
// done.
unsafe impl PageTarget for Buffers {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        // SAFETY: exported writable buffers of at least this length.
        out.extend(self.chunks_of(page).map(|c| unsafe { FragmentMut::new(c.start, c.bytes) }));
    }
}

/// Refuses memory in which two pages, or two pieces of one page, overlap.
pub(crate) fn check_disjoint(py: Python<'_>, ranges: Vec<MemoryRange>) -> PyResult<()> {
    match overlap(ranges) {
        None => Ok(()),
        Some((a, b)) if a == b => Err(invalid(py, format!("the pieces of page {a} overlap"))),
        Some((a, b)) => Err(invalid(py, format!("pages {a} and {b} overlap in memory"))),
    }
}

type Pieces<'py> = Bound<'py, pyo3::types::PyIterator>;

fn pieces<'py>(at: usize, page: &Bound<'py, PyAny>) -> PyResult<Pieces<'py>> {
    let refused = || no_buffer(page, &format!("page {at}"));
    if page.is_instance_of::<PyString>() {
        return Err(refused());
    }
    page.try_iter().map_err(|_| refused())
}

fn no_buffer(object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    let given = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
    invalid(
        object.py(),
        format!(
            "{name} is of type {given}: pass a buffer (bytes, memoryview, NumPy array, CPU tensor), or \
             a list of buffers that together make the page"
        ),
    )
}
