//! # `ritornello._core`
//!
//! The Python module over [`ritornello_node`] and [`ritornello_store`]: it converts arguments to
//! keys, pages and scopes, and results to Python values.
//!
//! **Promises.** Calls that wait or move bytes detach from the interpreter. Memory of a ticket is
//! kept until the ticket is done. Worker threads attach to the interpreter only to call a remote's
//! backend that is a Python class; other worker threads cannot hang the interpreter's shutdown.
//!
//! `unsafe` code does four things. It calls CPython's buffer protocol. It passes the memory of
//! Python objects to transfers, each piece as an address and a length; a buffer stays exported, and
//! a tensor referenced, at least until the transfer ends. It declares these addresses and buffers
//! `Send` and `Sync`. It passes a device's addresses and streams, as given by Python code, to
//! `ritornello_device`.

mod arguments;
mod backend;
mod batch;
mod cache;
mod completions;
mod decision;
mod device;
mod error;
mod fence;
mod lease;
mod log;
mod lookup;
mod memory;
mod open;
mod outcome;
mod policy;
mod pool;
mod scope;
mod store;

use error::OrRaise;
use pyo3::prelude::*;
use ritornello_tiers::cache::TierSpec;
use std::path::PathBuf;

/// The compiled core. Calls release the GIL while they wait or move bytes.
#[pymodule]
mod _core {
    use super::{PyModule, PyResult, backend, error, open};
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::cache::Cache;
    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::destroy;
    #[pymodule_export]
    use super::device::{Device, DeviceMove, DevicePages, DevicePool, DeviceSlots};
    #[pymodule_export]
    use super::lease::LeasedPrefix;
    #[pymodule_export]
    use super::log::{end_log, take_log_line};
    #[pymodule_export]
    use super::lookup::Lookup;
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
    use super::shown_tier;
    #[pymodule_export]
    use super::store::Store;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        error::export(module)?;
        backend::export(module)?;
        open::register(module)
    }
}

/// Removes the store in `path`, which no process may have open: its files in all its directories
/// that are present.
#[pyfunction]
fn destroy(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    py.detach(|| ritornello_node::destroy(&path)).or_raise(py)
}

/// Returns the text of one tier of a list, without what may be a secret in an address.
#[pyfunction]
fn shown_tier(text: &str) -> String {
    TierSpec::shown(text)
}

/// Runs the `ritornello` command: `argv` is its name and arguments, `python` the interpreter for
/// measurements that need Python. Returns the exit status.
#[pyfunction]
fn run_cli(py: Python<'_>, argv: Vec<String>, python: PathBuf) -> i32 {
    py.detach(|| ritornello_cli::run(argv, Some(python)))
}
