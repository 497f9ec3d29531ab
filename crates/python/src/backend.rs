//! Remote backends written in Python: any class with `get`, `exists` and `set`.
//!
//! A call attaches its thread to the interpreter until the call ends. Most calls run on threads of
//! the remote tier (`ritornello_tiers::remote`). An exception fails the call that raised it: the
//! tier counts the failure and continues without the page. The constructor runs in the first call
//! and not when the tiers are opened, so that the tiers open even if a service is down or hangs; if
//! the constructor raises, the next call runs it again. Once the interpreter begins to exit, calls
//! fail with `Closed`, and the exit waits at most [`STOP_TIMEOUT`] for running calls.

use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyType};
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_remote::ParsedAddress;
use ritornello_tiers::remote::{Backend, Listed};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time that the interpreter's exit waits for running calls of backends.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of running calls of all backends, and whether the interpreter is exiting.
static CALLS: Mutex<Calls> = Mutex::new(Calls { running: 0, over: false });
static ENDED: Condvar = Condvar::new();

struct Calls {
    running: usize,
    /// Whether the interpreter is exiting: no further call may begin.
    over: bool,
}

/// A running call of a backend: counted in [`CALLS`] until it is dropped.
struct Call;

impl Call {
    fn begin() -> Result<Self> {
        let mut calls = CALLS.lock();
        if calls.over {
            return Err(Error::new(
                ErrorKind::Closed,
                "the backend is not called, because the interpreter is exiting",
            ));
        }
        calls.running += 1;
        Ok(Self)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.lock().running -= 1;
        ENDED.notify_all();
    }
}

/// Registers this module as the opener of addresses such as `module:Class?argument=value`.
pub(crate) fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    ritornello_remote::register_opener(Arc::new(|address| {
        PythonBackend::open(address).map(|backend| Arc::new(backend) as Arc<dyn Backend>)
    }));
    let last = wrap_pyfunction!(stop_calls, module)?;
    module.py().import("atexit")?.call_method1("register", (last,))?;
    Ok(())
}

/// Refuses new calls, and waits for running calls.
#[pyfunction]
fn stop_calls(py: Python<'_>) {
    py.detach(|| {
        let until = Instant::now() + STOP_TIMEOUT;
        let mut calls = CALLS.lock();
        calls.over = true;
        while calls.running > 0 && !ENDED.wait_until(&mut calls, until).timed_out() {}
    });
}

/// A backend that calls the methods of a Python object.
struct PythonBackend {
    class: Py<PyAny>,
    arguments: Py<PyDict>,
    object: PyOnceLock<Py<PyAny>>,
    address: ParsedAddress,
}

impl fmt::Debug for PythonBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)
    }
}

impl PythonBackend {
    fn open(address: &ParsedAddress) -> Result<Self> {
        attached(|py| {
            let (class, arguments) = Self::find(py, address).map_err(|error| {
                Error::invalid(
                    "the backend's class cannot be used: type MODULE:CLASS?argument=value",
                )
                .with("backend", address)
                .because(address.redact(&error.to_string()))
            })?;
            Ok(Self { class, arguments, object: PyOnceLock::new(), address: address.clone() })
        })
    }

    /// Finds the class that an address names, and checks its methods and the arguments.
    fn find(py: Python<'_>, address: &ParsedAddress) -> PyResult<(Py<PyAny>, Py<PyDict>)> {
        let mut class = py.import(address.scheme.as_str())?.into_any();
        for part in address.path.split('.') {
            class = class.getattr(part)?;
        }
        let arguments = PyDict::new(py);
        for (name, value) in &address.options {
            arguments.set_item(name, value)?;
        }
        match py.import("inspect")?.call_method1("signature", (&class,)) {
            Ok(signature) => drop(signature.call_method("bind", (), Some(&arguments))?),
            // Skip the check of a class whose signature cannot be inspected.
            Err(error) if error.is_instance_of::<PyValueError>(py) => {}
            Err(error) => return Err(error),
        }
        // A class with `__getattr__` may provide methods dynamically.
        let is_static = class.is_instance_of::<PyType>() && !class.hasattr("__getattr__")?;
        for method in ["get", "exists", "set"] {
            if is_static && !class.hasattr(method)? {
                return Err(PyAttributeError::new_err(format!("the class has no method {method}")));
            }
        }
        Ok((class.unbind(), arguments.unbind()))
    }

    /// Returns the object, and constructs it on the first call. Concurrent calls wait, detached
    /// from the interpreter, until the object is constructed.
    fn object<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        let made = || self.class.call(py, (), Some(self.arguments.bind(py)));
        self.object.get_or_try_init(py, made).map(|object| object.bind(py))
    }

    /// Runs `call` with the object. A `FatalError` of the class becomes `Fatal`, as do `TypeError`
    /// and `AttributeError`, which show that the class is unsuitable. Any other exception becomes
    /// `Retry`.
    fn call<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        attached(|py| {
            self.object(py).and_then(call).map_err(|error| {
                let fatal = error.is_instance_of::<PyTypeError>(py)
                    || error.is_instance_of::<PyAttributeError>(py)
                    || crate::error::is_fatal(py, &error);
                let kind = if fatal { ErrorKind::Fatal } else { ErrorKind::Retry };
                Error::new(kind, "the backend's class raised an exception")
                    .with("backend", &self.address)
                    .because(self.address.redact(&error.to_string()))
            })
        })
    }
}

/// Runs `run` attached to the interpreter, or fails with `Closed` once the interpreter exits.
fn attached<T>(run: impl FnOnce(Python<'_>) -> Result<T>) -> Result<T> {
    let _call = Call::begin()?;
    let exiting = || {
        Err(Error::new(
            ErrorKind::Closed,
            "the backend is not called, because the interpreter is exiting",
        ))
    };
    Python::try_attach(run).unwrap_or_else(exiting)
}

/// Copies the bytes of a buffer; returns `None` without a copy if there are more than
/// `most` bytes.
fn bytes(value: &Bound<'_, PyAny>, most: u64) -> PyResult<Option<Vec<u8>>> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        return Ok((bytes.len() as u64 <= most).then(|| bytes.to_vec()));
    }
    let view = PyMemoryView::from(value)?;
    if view.getattr("nbytes")?.extract::<u64>()? > most {
        return Ok(None);
    }
    let copied = view.call_method0("tobytes")?;
    Ok(Some(copied.cast::<PyBytes>()?.as_bytes().to_vec()))
}

impl Backend for PythonBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let (start, stop) = range.clone().map_or((0, None), |range| (range.start, Some(range.end)));
        let most = range.map_or(u64::MAX, |range| range.end - range.start);
        let value = self.call(|object| {
            let value = object.call_method1("get", (name, start, stop))?;
            if value.is_none() { Ok(None) } else { bytes(&value, most).map(Some) }
        })?;
        match value {
            None => Ok(None),
            Some(Some(value)) => Ok(Some(value)),
            Some(None) => {
                Err(Error::fatal("the backend's get returned more than value[start:stop]")
                    .with("backend", &self.address))
            }
        }
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.call(|object| object.call_method1("exists", (name,))?.extract())
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.call(|object| {
            object.call_method1("set", (name, PyBytes::new(object.py(), value))).map(drop)
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.optional("delete")?;
        self.call(|object| object.call_method1("delete", (name,)).map(drop))
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.optional("list")?;
        let all: Vec<(String, u64, f64)> = self.call(|object| {
            object.call_method1("list", (prefix,))?.try_iter()?.map(|one| one?.extract()).collect()
        })?;
        for (name, bytes, written) in all {
            each(Listed { name, bytes, written: written.max(0.0) as u64 });
        }
        Ok(())
    }
}

impl PythonBackend {
    fn optional(&self, method: &'static str) -> Result<()> {
        if self.call(|object| object.hasattr(method))? {
            return Ok(());
        }
        Err(Error::invalid("the backend's class lacks the method for this operation: add it")
            .with("operation", method))
    }
}
