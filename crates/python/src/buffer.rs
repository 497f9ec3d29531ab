//! Memory that Python objects own, kept alive while in use.

use crate::error::invalid;
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;
use std::mem;
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

// SAFETY: an address and a length; each access states why it is sound.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Bytes `from..from + bytes` of this chunk, which must be inside it.
    pub(crate) fn part(&self, from: usize, bytes: usize) -> Self {
        debug_assert!(from + bytes <= self.bytes, "a part is inside its chunk");
        Self { start: self.start.wrapping_add(from), bytes }
    }
}

/// Keeps the memory of Python objects exported.
///
/// May be dropped on any thread: the next [`release_dropped`] releases the buffers, because a
/// worker thread that waits for the interpreter could hang its shutdown.
#[derive(Default)]
pub(crate) struct BufferGuard {
    views: Vec<BufferView>,
    objects: Vec<Py<PyAny>>,
}

/// An exported buffer. It must not move while exported. Only [`release_dropped`] releases a buffer;
/// a leaked export is never released.
struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: only its owner touches it, and releases it attached to the interpreter.
unsafe impl Send for BufferView {}
// SAFETY: nothing is done through a shared reference.
unsafe impl Sync for BufferView {}

/// Guards dropped and not yet released. A channel, not a list under a lock, because a fork may
/// happen while another thread sends.
static DROPPED: LazyLock<(Sender<BufferGuard>, Mutex<Receiver<BufferGuard>>)> =
    LazyLock::new(|| {
        let (sender, receiver) = channel();
        (sender, Mutex::new(receiver))
    });

/// Releases the guards dropped so far.
pub(crate) fn release_dropped(py: Python<'_>) {
    // Not under the lock: a release may run Python code that calls this function again.
    let next = || DROPPED.1.lock().try_recv().ok();
    while let Some(mut held) = next() {
        for mut view in held.views.drain(..) {
            // SAFETY: attached to the interpreter; filled by `PyObject_GetBuffer`, released once.
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
        // The receiver lives as long as the process.
        let _ = DROPPED.0.send(held);
    }
}

impl BufferGuard {
    /// Exports the memory of `object`: through the buffer protocol, or as a CPU tensor. Returns
    /// `None` if it is neither; `name` names it in errors.
    pub(crate) fn take(
        &mut self,
        object: &Bound<'_, PyAny>,
        purpose: Access,
        name: impl Fn() -> String,
    ) -> PyResult<Option<Chunk>> {
        // SAFETY: a live object, attached to the interpreter.
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
            return Err(invalid(py, format!("{} has no memory", name())));
        }
        self.objects.push(tensor.clone().unbind());
        Ok(Chunk { start: ptr::with_exposed_provenance_mut(address), bytes })
    }
}

/// Exports the contiguous bytes of an object.
fn export(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<BufferView> {
    let mut view = Box::new(ffi::Py_buffer::new());
    // SAFETY: a live object and a buffer to fill, attached to the interpreter.
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
