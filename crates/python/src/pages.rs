//! Pages given as Python objects: one buffer each, or several that together make the page.

use crate::buffer::{Chunk, Held, Use};
use crate::error::invalid;
use crate::overlap::{Span, overlap};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyString;
use ritornello_volume::memory::{Fragment, FragmentMut, PageSource, PageTarget};
use std::ops::Range;

/// The memory of some pages, held until [`Pages::release`] or the last reference goes.
pub(crate) struct Pages {
    chunks: Vec<Chunk>,
    /// Which chunks make a page.
    pages: Vec<Range<usize>>,
    /// `None` once the memory was let go: there are no fragments then.
    held: Mutex<Option<Held>>,
}

impl Pages {
    /// Takes hold of the first `count` of `pages`, each of `page_bytes` bytes. Memory that is to
    /// be written may not overlap.
    pub(crate) fn of(
        pages: &Bound<'_, PyAny>,
        count: usize,
        page_bytes: u64,
        purpose: Use,
    ) -> PyResult<Self> {
        let py = pages.py();
        let mut taken = Self {
            chunks: Vec::with_capacity(count),
            pages: Vec::with_capacity(count),
            held: Mutex::default(),
        };
        let mut held = Held::default();
        let given = pages.try_iter().map_err(|_| invalid(py, "pages is a list of buffers"))?;
        for (at, page) in given.take(count).enumerate() {
            taken.add(at, &page?, page_bytes, purpose, &mut held)?;
        }
        if taken.pages.len() < count {
            return Err(invalid(py, format!("{count} keys, but {} pages", taken.pages.len())));
        }
        if purpose == Use::Write {
            check_apart(py, taken.spans().collect())?;
        }
        *taken.held.lock() = Some(held);
        Ok(taken)
    }

    fn add(
        &mut self,
        at: usize,
        page: &Bound<'_, PyAny>,
        page_bytes: u64,
        purpose: Use,
        held: &mut Held,
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

    /// Lets the memory go. Only when nothing works on it any more.
    pub(crate) fn release(&self) {
        drop(self.held.lock().take());
    }

    fn spans(&self) -> impl Iterator<Item = Span> {
        self.pages.iter().enumerate().flat_map(|(page, range)| {
            self.chunks[range.clone()].iter().map(move |chunk| Span {
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

// SAFETY: `held` keeps the buffers exported, so their memory stays where it is and as long as it
// is; after `release`, which waits for the ticket, no fragment is handed out. Python code that
// changes a buffer during a put is what the trait allows for.
unsafe impl PageSource for Pages {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        // SAFETY: exported buffers of at least this length.
        out.extend(self.chunks_of(page).map(|c| unsafe { Fragment::new(c.start, c.bytes) }));
    }
}

// SAFETY: as above. Pages taken for writing were exported as writable and checked not to overlap;
// the Python caller leaves them alone until the call returns or the ticket is done, as `_core.pyi`
// asks for.
unsafe impl PageTarget for Pages {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        // SAFETY: exported writable buffers of at least this length.
        out.extend(self.chunks_of(page).map(|c| unsafe { FragmentMut::new(c.start, c.bytes) }));
    }
}

/// Refuses memory that two pages, or two pieces of one, would both be written to.
pub(crate) fn check_apart(py: Python<'_>, spans: Vec<Span>) -> PyResult<()> {
    match overlap(spans) {
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
