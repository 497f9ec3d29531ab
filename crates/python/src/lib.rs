//! # `ritornello._core`
//!
//! The Python module over [`ritornello_node`] and [`ritornello_store`]: arguments become keys,
//! pages and scopes, results become Python values, and nothing is decided here.
//!
//! **Promises.** The interpreter is detached while a call waits or moves bytes. Memory that a
//! ticket works on is held until it is done. Worker threads never attach to the interpreter, so
//! they cannot hang its shutdown; those of a remote whose backend is a Python class do, for its calls.
//!
//! `unsafe` here is of one kind: turning buffers that Python promised to keep into fragments.

mod backend;
mod batch;
mod buffer;
mod cache;
mod completions;
mod error;
mod handle;
mod keys;
mod log;
mod outcome;
mod overlap;
mod pages;
mod policy;
mod pool;
mod scope;
mod store;
mod submission;
mod time;

use error::OrRaise;
use pyo3::prelude::*;
use std::path::PathBuf;

/// The compiled core. Everything here releases the GIL while it waits or moves bytes.
#[pymodule]
mod _core {
    use super::{PyModule, PyResult, backend, error, handle};
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::cache::{Cache, Found};
    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::destroy;
    #[pymodule_export]
    use super::outcome::{Outcome, Ticket};
    #[pymodule_export]
    use super::policy::StorePolicy;
    #[pymodule_export]
    use super::pool::{PagePool, PoolPages};
    #[pymodule_export]
    use super::run_cli;
    #[pymodule_export]
    use super::scope::Scope;
    #[pymodule_export]
    use super::store::{Match, Store};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        error::export(module)?;
        backend::export(module)?;
        handle::close_at_exit(module)
    }
}

/// Removes the store in `path`, which nobody may have open: its files, and nothing else.
#[pyfunction]
fn destroy(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    py.detach(|| ritornello_node::destroy(&path)).or_raise(py)
}

/// Runs the `ritornello` command: `argv` is its name and arguments, `python` the interpreter for
/// measurements that need one. Returns the exit status.
#[pyfunction]
fn run_cli(py: Python<'_>, argv: Vec<String>, python: PathBuf) -> i32 {
    py.detach(|| ritornello_cli::run(argv, Some(python)))
}
