//! A backend that injects faults into calls of another backend.

use super::backend::{Backend, Listed};
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The injected fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendFault {
    /// No fault.
    #[default]
    None,
    /// Calls fail with `Retry`.
    Unavailable,
    /// Calls fail with `Fatal`.
    Refused,
    /// Calls do not return until the fault changes.
    Hangs,
    /// Values are cut in half when read or written.
    Short,
    /// One bit of each value read is flipped.
    Flipped,
    /// Values are missing when read.
    Gone,
}

impl BackendFault {
    /// All faults except `None`.
    pub const ALL: [Self; 6] =
        [Self::Unavailable, Self::Refused, Self::Hangs, Self::Short, Self::Flipped, Self::Gone];
}

/// A backend with injected faults, and counts of the calls of `exists` and `set`.
#[derive(Debug)]
pub struct FaultyBackend {
    inner: Arc<dyn Backend>,
    fault: Mutex<BackendFault>,
    changed: Condvar,
    flips: AtomicU64,
    exists_calls: AtomicU64,
    set_calls: AtomicU64,
}

impl FaultyBackend {
    /// Wraps `inner`, without a fault.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self {
            inner,
            fault: Mutex::default(),
            changed: Condvar::new(),
            flips: AtomicU64::new(0),
            exists_calls: AtomicU64::new(0),
            set_calls: AtomicU64::new(0),
        }
    }

    /// Injects `fault` into all following calls, and into calls that hang now.
    pub fn fail(&self, fault: BackendFault) {
        *self.fault.lock() = fault;
        self.changed.notify_all();
    }

    /// Number of calls of `exists`; a batch counts each name.
    pub fn exists_calls(&self) -> u64 {
        self.exists_calls.load(Relaxed)
    }

    /// Number of calls of `set`.
    pub fn set_calls(&self) -> u64 {
        self.set_calls.load(Relaxed)
    }

    fn inject(&self) -> Result<BackendFault> {
        let mut fault = self.fault.lock();
        while *fault == BackendFault::Hangs {
            self.changed.wait(&mut fault);
        }
        match *fault {
            BackendFault::Unavailable => Err(Error::retry("injected fault: 503")),
            BackendFault::Refused => Err(Error::fatal("injected fault: 403")),
            other => Ok(other),
        }
    }
}

impl Backend for FaultyBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let fault = self.inject()?;
        let value = self.inner.get(name, range)?;
        Ok(match (fault, value) {
            (BackendFault::Gone, _) => None,
            (BackendFault::Short, Some(mut value)) => {
                value.truncate(value.len() / 2);
                Some(value)
            }
            (BackendFault::Flipped, Some(mut value)) if !value.is_empty() => {
                let at = self.flips.fetch_add(7919, Relaxed) as usize % value.len();
                value[at] ^= 1;
                Some(value)
            }
            (_, value) => value,
        })
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.exists_calls.fetch_add(1, Relaxed);
        self.inject()?;
        self.inner.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.set_calls.fetch_add(1, Relaxed);
        let fault = self.inject()?;
        let half = if fault == BackendFault::Short { value.len() / 2 } else { value.len() };
        self.inner.set(name, &value[..half])
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.inject()?;
        self.inner.delete(name)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.inject()?;
        self.inner.list(prefix, each)
    }
}
