//! An engine's registered memory: the engine passes bases and strides once, and afterwards only
//! page numbers.

use crate::error::invalid;
use crate::memory::{Access, BufferGuard, Chunk, MemoryRange, PageMemory, check_disjoint, overlap};
use pyo3::prelude::*;
use ritornello_volume::page_memory::{Fragment, FragmentMut, PageSource, PageTarget};
use std::sync::Arc;

/// One buffer of a pool.
struct Part {
    chunk: Chunk,
    page_bytes: usize,
    stride: usize,
    writable: bool,
}

/// The buffers of a pool, kept until the pool and all page lists and tickets over them are dropped.
struct Memory {
    parts: Vec<Part>,
    page_bytes: usize,
    pages: usize,
    /// Whether the spans of the buffers that hold pages, gaps between pages included, do not
    /// overlap. If so, pages with different ids do not overlap.
    apart: bool,
    _held: BufferGuard,
}

impl Memory {
    /// Returns the memory of page `page` in each buffer; `page < self.pages`.
    fn chunks(&self, page: usize) -> impl Iterator<Item = Chunk> {
        self.parts
            .iter()
            .filter(|part| part.page_bytes > 0)
            .map(move |part| part.chunk.part(page * part.stride, part.page_bytes))
    }
}

/// Registered source or target memory of an engine: page `i` is the concatenation, over `buffers`
/// in order, of `page_bytes[k]` bytes of buffer `k`, beginning at `i * page_bytes[k]` or, if
/// strides are given, at `i * strides[k]`. The pool keeps the buffers alive, and has as many pages
/// as the buffer that holds the fewest.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct PagePool(Arc<Memory>);

#[pymethods]
impl PagePool {
    #[new]
    #[pyo3(signature = (buffers, page_bytes, *, strides=None))]
    fn new(
        py: Python<'_>,
        buffers: Vec<Bound<'_, PyAny>>,
        page_bytes: Vec<usize>,
        strides: Option<Vec<usize>>,
    ) -> PyResult<Self> {
        let strides = strides.unwrap_or_else(|| page_bytes.clone());
        if buffers.is_empty() || buffers.len() != page_bytes.len() || strides.len() != buffers.len()
        {
            return Err(invalid(
                py,
                format!(
                    "a pool needs page_bytes, and strides if given, for each of its buffers: {} \
                     buffers, {} page_bytes, {} strides",
                    buffers.len(),
                    page_bytes.len(),
                    strides.len()
                ),
            ));
        }
        let mut held = BufferGuard::default();
        let mut parts = Vec::with_capacity(buffers.len());
        for (at, (buffer, (page_bytes, stride))) in
            buffers.iter().zip(page_bytes.into_iter().zip(strides)).enumerate()
        {
            parts.push(part(at, buffer, page_bytes, stride, &mut held)?);
        }
        let pages = parts.iter().map(Part::pages).min().unwrap_or(0);
        let page_bytes = parts.iter().map(|part| part.page_bytes).sum();
        let apart = buffers_disjoint(&parts, pages);
        Ok(Self(Arc::new(Memory { parts, page_bytes, pages, apart, _held: held })))
    }

    /// Bytes per page, over all buffers.
    #[getter]
    fn page_bytes(&self) -> usize {
        self.0.page_bytes
    }

    fn __len__(&self) -> usize {
        self.0.pages
    }

    /// Returns the pages with these ids, in this order.
    fn pages(&self, ids: &Bound<'_, PyAny>) -> PyResult<PoolPages> {
        let ids = ids
            .try_iter()
            .map_err(|_| invalid(ids.py(), "ids must be a list of page numbers"))?
            .enumerate()
            .map(|(at, id)| self.checked(at, &id?))
            .collect::<PyResult<Arc<[usize]>>>()?;
        Ok(PoolPages(Selection { memory: Arc::clone(&self.0), len: ids.len(), ids }))
    }

    fn __repr__(&self) -> String {
        format!("PagePool({} pages of {} bytes)", self.0.pages, self.0.page_bytes)
    }
}

impl PagePool {
    fn checked(&self, at: usize, id: &Bound<'_, PyAny>) -> PyResult<usize> {
        id.extract().ok().filter(|page| *page < self.0.pages).ok_or_else(|| {
            let given = id.repr().map(|text| text.to_string()).unwrap_or_default();
            let pages = self.0.pages;
            invalid(
                id.py(),
                format!("id {at} is {given}; this pool has {pages} pages, starting at 0"),
            )
        })
    }
}

impl Part {
    fn pages(&self) -> usize {
        let behind_first = self.chunk.bytes.checked_sub(self.page_bytes);
        behind_first.map_or(0, |bytes| bytes / self.stride + 1)
    }
}

fn part(
    at: usize,
    buffer: &Bound<'_, PyAny>,
    page_bytes: usize,
    stride: usize,
    held: &mut BufferGuard,
) -> PyResult<Part> {
    let py = buffer.py();
    let name = || format!("buffer {at}");
    if page_bytes == 0 || stride < page_bytes {
        return Err(invalid(
            py,
            format!(
                "page_bytes of buffer {at} is {page_bytes}, its stride {stride}: pass page_bytes \
                 of at least 1, and a stride of at least page_bytes"
            ),
        ));
    }
    // Accept read-only memory, because a put only reads.
    let (chunk, writable) = match held.take(buffer, Access::Write, name) {
        Ok(chunk) => (chunk, true),
        Err(_) => (held.take(buffer, Access::Read, name)?, false),
    };
    let given = || buffer.get_type().name().map(|name| name.to_string()).unwrap_or_default();
    let chunk = chunk.ok_or_else(|| {
        invalid(py, format!("buffer {at} is of type {}: pass buffers or CPU tensors", given()))
    })?;
    Ok(Part { chunk, page_bytes, stride, writable })
}

/// Returns whether the spans of the buffers, from page zero to the end of page `pages - 1` with the
/// gaps between pages, do not overlap.
fn buffers_disjoint(parts: &[Part], pages: usize) -> bool {
    let used = |part: &Part| match pages {
        0 => 0,
        _ => (pages - 1) * part.stride + part.page_bytes,
    };
    let ranges = parts.iter().enumerate().map(|(page, part)| MemoryRange {
        address: part.chunk.start.addr(),
        bytes: used(part),
        page,
    });
    overlap(ranges.collect()).is_none()
}

/// Some pages of a pool, in the order of the ids; accepted wherever a list of pages is accepted.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct PoolPages(Selection);

#[pymethods]
impl PoolPages {
    fn __len__(&self) -> usize {
        self.0.len
    }

    fn __repr__(&self) -> String {
        format!("PoolPages({} pages of {} bytes)", self.0.len, self.0.memory.page_bytes)
    }
}

/// The first `len` pages of `ids`.
#[derive(Clone)]
pub(crate) struct Selection {
    memory: Arc<Memory>,
    ids: Arc<[usize]>,
    len: usize,
}

impl PoolPages {
    /// Returns the first `count` pages, for a scope with pages of `page_bytes`.
    pub(crate) fn select(
        &self,
        py: Python<'_>,
        count: usize,
        page_bytes: u64,
        purpose: Access,
    ) -> PyResult<Selection> {
        let memory = &self.0.memory;
        if memory.page_bytes as u64 != page_bytes {
            return Err(invalid(
                py,
                format!(
                    "pages of the pool have {} bytes; pages of this scope have {page_bytes}: pass \
                     the pool of this scope's pages",
                    memory.page_bytes
                ),
            ));
        }
        if self.0.len < count {
            return Err(invalid(
                py,
                format!("{count} keys, but {} pages: pass one page for each key", self.0.len),
            ));
        }
        let selection = Selection { len: count, ..self.0.clone() };
        if purpose == Access::Write {
            selection.check_writable(py)?;
        }
        Ok(selection)
    }
}

impl Selection {
    fn check_writable(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(at) = self.memory.parts.iter().position(|part| !part.writable) {
            return Err(invalid(
                py,
                format!("buffer {at} of the pool is read-only: a get needs writable buffers"),
            ));
        }
        let mut ids: Vec<(usize, usize)> =
            self.ids[..self.len].iter().enumerate().map(|(at, &id)| (id, at)).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let ((id, first), (_, second)) = (twice[0], twice[1]);
            return Err(invalid(
                py,
                format!("ids {first} and {second} both name page {id}: pass each page once"),
            ));
        }
        if self.memory.apart {
            return Ok(());
        }
        let ranges = (0..self.len).flat_map(|page| {
            self.memory.chunks(self.ids[page]).map(move |chunk| MemoryRange {
                address: chunk.start.addr(),
                bytes: chunk.bytes,
                page,
            })
        });
        check_disjoint(py, ranges.collect())
    }

    fn chunks_of(&self, page: usize) -> impl Iterator<Item = Chunk> {
        let id = self.ids[..self.len].get(page);
        id.into_iter().flat_map(|&id| self.memory.chunks(id))
    }
}

// SAFETY: the pool's buffers stay exported, and its tensors referenced, while `memory` lives. The
// ids were checked against the lengths of both. The trait permits Python code to change a buffer
// during a put.
unsafe impl PageSource for Selection {
    fn len(&self) -> usize {
        self.len
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        // SAFETY: each chunk is inside an exported buffer or a CPU tensor.
        out.extend(self.chunks_of(page).map(|c| unsafe { Fragment::new(c.start, c.bytes) }));
    }
}

// SAFETY: as for `PageSource`. A selection becomes a target only after `check_writable`, and the
// Python caller must not touch its pages until the call returns or the ticket is done.
unsafe impl PageTarget for Selection {
    fn len(&self) -> usize {
        self.len
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        // SAFETY: each chunk is inside a writable exported buffer or a CPU tensor.
        out.extend(self.chunks_of(page).map(|c| unsafe { FragmentMut::new(c.start, c.bytes) }));
    }
}

// `release` does nothing: the pool keeps its buffers exported.
impl PageMemory for Selection {}
