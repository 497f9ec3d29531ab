//! Memory that Python objects own, held for as long as it is used.

use crate::error::invalid;
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;
use std::mem;
use std::ptr;
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, Sender, channel};

/// What memory is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

/// Contiguous bytes of a Python object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: an address and a length; what may be done there is said where it is done.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Bytes `from..from + bytes` of this chunk, which must be inside it.
    pub(crate) fn part(&self, from: usize, bytes: usize) -> Self {
        debug_assert!(from + bytes <= self.bytes, "a part lies inside its chunk");
        Self { start: self.start.wrapping_add(from), bytes }
    }
}

/// Keeps the memory of some Python objects where it is.
///
/// May be dropped on any thread: what it held is let go by the next [`release_dropped`], because
/// a thread of ours that waits for the interpreter could hang its shutdown.
#[derive(Default)]
pub(crate) struct Held {
    views: Vec<View>,
    objects: Vec<Py<PyAny>>,
}

/// An exported buffer. It may not move while it is exported, and is released by whoever empties
/// [`DROPPED`]; one that is merely forgotten leaks.
struct View(Box<ffi::Py_buffer>);

// SAFETY: only its owner touches it, and releases it attached to the interpreter.
unsafe impl Send for View {}
// SAFETY: nothing is done through a shared reference.
unsafe impl Sync for View {}

/// A channel rather than a list under a lock: a fork may happen while a thread of ours sends.
static DROPPED: LazyLock<(Sender<Held>, Mutex<Receiver<Held>>)> = LazyLock::new(|| {
    let (sender, receiver) = channel();
    (sender, Mutex::new(receiver))
});

/// Lets go of what was dropped since.
pub(crate) fn release_dropped(py: Python<'_>) {
    // Releasing may run Python code that calls us again: not under the lock.
    let next = || DROPPED.1.lock().try_recv().ok();
    while let Some(mut held) = next() {
        for mut view in held.views.drain(..) {
            // SAFETY: attached to the interpreter; filled by `PyObject_GetBuffer`, released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *view.0) };
        }
        held.objects.drain(..).for_each(|object| object.drop_ref(py));
    }
}

impl Drop for Held {
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

impl Held {
    /// Takes hold of the memory of `object`: through the buffer protocol, or as a CPU tensor.
    /// `None` if it is neither; `name` names it in errors.
    pub(crate) fn take(
        &mut self,
        object: &Bound<'_, PyAny>,
        purpose: Use,
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
        purpose: Use,
        name: impl Fn() -> String,
    ) -> PyResult<Chunk> {
        let py = object.py();
        let flags = match purpose {
            Use::Read => ffi::PyBUF_SIMPLE,
            Use::Write => ffi::PyBUF_WRITABLE,
        };
        let view = export(object, flags).map_err(|cause| {
            let read_only = purpose == Use::Write && is_readable(object);
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
            return Err(invalid(py, format!("{} has no memory behind it", name())));
        }
        self.objects.push(tensor.clone().unbind());
        Ok(Chunk { start: ptr::with_exposed_provenance_mut(address), bytes })
    }
}

/// Exports the contiguous bytes of an object.
fn export(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<View> {
    let mut view = Box::new(ffi::Py_buffer::new());
    // SAFETY: a live object and a buffer to fill, attached to the interpreter.
    let failed = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0;
    if failed { Err(PyErr::fetch(object.py())) } else { Ok(View(view)) }
}

/// Whether an object that refused to be written can at least be read.
fn is_readable(object: &Bound<'_, PyAny>) -> bool {
    match export(object, ffi::PyBUF_SIMPLE) {
        Ok(view) => {
            drop(Held { views: vec![view], objects: Vec::new() });
            true
        }
        Err(_) => false,
    }
}
