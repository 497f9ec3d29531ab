//! Memory that Python objects own, kept alive while it is in use, and the pages in it. A page is
//! one buffer, or several buffers together.

use crate::error::invalid;
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyString};
use ritornello_volume::page_memory::{Fragment, FragmentMut, PageSource, PageTarget};
use std::mem;
use std::ops::Range;
use std::ptr;
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, Sender, channel};

/// The access that memory is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Contiguous bytes of a Python object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: a chunk is an address and a length; each access states why it is sound.
unsafe impl Send for Chunk {}
// SAFETY: a chunk is an address and a length; each access states why it is sound.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Bytes `from..from + bytes` of this chunk, which must be inside it.
    pub(crate) fn part(&self, from: usize, bytes: usize) -> Self {
        debug_assert!(from + bytes <= self.bytes, "a part is inside its chunk");
        Self { start: self.start.wrapping_add(from), bytes }
    }
}

/// Keeps buffers of Python objects exported, and tensors referenced.
///
/// A guard may be dropped on any thread. The next [`release_dropped`] releases its buffers, because
/// a worker thread that waits for the interpreter could hang the interpreter's shutdown.
#[derive(Default)]
pub(crate) struct BufferGuard {
    views: Vec<BufferView>,
    objects: Vec<Py<PyAny>>,
}

/// An exported buffer. The view must not move while the buffer is exported. Only
/// [`release_dropped`] releases a buffer; a leaked export is never released.
struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: only the owner of a view accesses it, and only `release_dropped` releases it, attached to
// the interpreter.
unsafe impl Send for BufferView {}
// SAFETY: no function accesses a view through a shared reference.
unsafe impl Sync for BufferView {}

/// Guards that were dropped and are not released yet. Dropped guards are in a channel, so that a
/// worker thread takes no lock when it drops a guard: a lock that the thread held during a fork
/// would stay locked in the child. Only threads that are attached to the interpreter lock the
/// receiver.
static DROPPED: LazyLock<(Sender<BufferGuard>, Mutex<Receiver<BufferGuard>>)> =
    LazyLock::new(|| {
        let (sender, receiver) = channel();
        (sender, Mutex::new(receiver))
    });

/// Releases the guards dropped so far.
pub(crate) fn release_dropped(py: Python<'_>) {
    // Take each guard outside the lock, because a release may run Python code that calls this
    // function again.
    let next = || DROPPED.1.lock().try_recv().ok();
    while let Some(mut held) = next() {
        for mut view in held.views.drain(..) {
            // SAFETY: this thread is attached to the interpreter. `PyObject_GetBuffer` filled the
            // view, and only this call releases it.
            unsafe { ffi::PyBuffer_Release(&raw mut *view.0) };
        }
        held.objects.drain(..).for_each(|object| object.drop_ref(py));
    }
}

impl Drop for BufferGuard {
    fn drop(&mut self) {
        if self.views.is_empty() && self.objects.is_empty() {
            return;
        }
        let held =
            Self { views: mem::take(&mut self.views), objects: mem::take(&mut self.objects) };
        // The send cannot fail, because the receiver lives as long as the process.
        let _ = DROPPED.0.send(held);
    }
}

impl BufferGuard {
    /// Keeps the memory of `object`: a buffer by an export, a CPU tensor by a reference. Returns
    /// `None` if `object` is neither. `name` returns the object's name for errors.
    pub(crate) fn take(
        &mut self,
        object: &Bound<'_, PyAny>,
        purpose: Access,
        name: impl Fn() -> String,
    ) -> PyResult<Option<Chunk>> {
        // SAFETY: `object` is alive, and this thread is attached to the interpreter.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0 {
            return self.take_buffer(object, purpose, name).map(Some);
        }
        if object.hasattr("data_ptr")? {
            return self.take_tensor(object, name).map(Some);
        }
        Ok(None)
    }

    fn take_buffer(
        &mut self,
        object: &Bound<'_, PyAny>,
        purpose: Access,
        name: impl Fn() -> String,
    ) -> PyResult<Chunk> {
        let py = object.py();
        let flags = match purpose {
            Access::Read => ffi::PyBUF_SIMPLE,
            Access::Write => ffi::PyBUF_WRITABLE,
        };
        let view = export(object, flags).map_err(|cause| {
            let read_only = purpose == Access::Write && is_readable(object);
            let error = invalid(
                py,
                if read_only {
                    format!("{} is read-only: pass memory that may be written", name())
                } else {
                    format!(
                        "{} is not one contiguous piece of memory: pass its contiguous pieces as \
                         a list, or a contiguous copy",
                        name()
                    )
                },
            );
            error.set_cause(py, Some(cause));
            error
        })?;
        let chunk = Chunk { start: view.0.buf.cast(), bytes: view.0.len.unsigned_abs() };
        self.views.push(view);
        Ok(chunk)
    }

    fn take_tensor(
        &mut self,
        tensor: &Bound<'_, PyAny>,
        name: impl Fn() -> String,
    ) -> PyResult<Chunk> {
        let py = tensor.py();
        let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
        if device != "cpu" {
            return Err(invalid(
                py,
                format!("{} is in {device} memory: copy it to the CPU", name()),
            ));
        }
        if !tensor.call_method0("is_contiguous")?.is_truthy()? {
            return Err(invalid(
                py,
                format!("{} is not contiguous: pass its contiguous pieces as a list", name()),
            ));
        }
        let bytes: usize = tensor.getattr("nbytes")?.extract()?;
        let address: usize = tensor.call_method0("data_ptr")?.extract()?;
        if address == 0 && bytes > 0 {
            return Err(invalid(
                py,
                format!("{} is a tensor without memory: pass one that has memory", name()),
            ));
        }
        self.objects.push(tensor.clone().unbind());
        Ok(Chunk { start: ptr::with_exposed_provenance_mut(address), bytes })
    }
}

/// Exports the contiguous bytes of an object.
fn export(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<BufferView> {
    let mut view = Box::new(ffi::Py_buffer::new());
    // SAFETY: `object` is alive, `view` may be filled, and this thread is attached to the
    // interpreter.
    let failed = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0;
    if failed { Err(PyErr::fetch(object.py())) } else { Ok(BufferView(view)) }
}

/// Returns whether an object that refused write access permits read access.
fn is_readable(object: &Bound<'_, PyAny>) -> bool {
    match export(object, ffi::PyBUF_SIMPLE) {
        Ok(view) => {
            drop(BufferGuard { views: vec![view], objects: Vec::new() });
            true
        }
        Err(_) => false,
    }
}

/// The source of a put, or the target of a get.
pub(crate) trait PageMemory: PageSource + PageTarget {
    /// Releases the memory if this object alone keeps it; by default does nothing. No operation may
    /// use the memory after this call.
    fn release(&self) {}
}

/// The memory of pages, kept until [`PageMemory::release`] is called or the last reference is
/// dropped.
pub(crate) struct Buffers {
    chunks: Vec<Chunk>,
    /// For each page, the range of its chunks in `chunks`.
    pages: Vec<Range<usize>>,
    /// `None` after the memory was released: the pages have no fragments then.
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
        let given = pages.try_iter().map_err(|_| invalid(py, "pages must be a list of buffers"))?;
        for (at, page) in given.take(count).enumerate() {
            taken.add(at, &page?, page_bytes, purpose, &mut held)?;
        }
        if taken.pages.len() < count {
            return Err(invalid(
                py,
                format!(
                    "{count} keys, but {} pages: pass one page for each key",
                    taken.pages.len()
                ),
            ));
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

// SAFETY: `held` keeps buffers exported and tensors referenced, so their memory neither moves nor
// ends. `release` is called after the last transfer, and no fragment is handed out afterwards. The
// trait permits Python code to change a buffer during a put.
unsafe impl PageSource for Buffers {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        // SAFETY: each chunk has the address and length of an exported buffer or a CPU tensor.
        out.extend(self.chunks_of(page).map(|c| unsafe { Fragment::new(c.start, c.bytes) }));
    }
}

// SAFETY: as for `PageSource`. Buffers taken for writing were exported as writable, and all taken
// memory was checked not to overlap. `_core.pyi` requires the Python caller not to touch the memory
// until the call returns or the ticket is done.
unsafe impl PageTarget for Buffers {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        // SAFETY: each chunk has the address and length of a writable buffer or a CPU tensor.
        out.extend(self.chunks_of(page).map(|c| unsafe { FragmentMut::new(c.start, c.bytes) }));
    }
}

impl PageMemory for Buffers {
    fn release(&self) {
        drop(self.held.lock().take());
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

fn pieces<'py>(at: usize, page: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyIterator>> {
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

/// A span of memory that belongs to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MemoryRange {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) page: usize,
}

/// Returns two pages that share a byte, if there are any; the same page twice if two pieces of it
/// overlap.
pub(crate) fn overlap(mut ranges: Vec<MemoryRange>) -> Option<(usize, usize)> {
    ranges.retain(|span| span.bytes > 0);
    ranges.sort_unstable();
    ranges
        .windows(2)
        .find(|pair| pair[0].address + pair[0].bytes > pair[1].address)
        .map(|pair| (pair[0].page.min(pair[1].page), pair[0].page.max(pair[1].page)))
}
