//! A backend in front of another one that does things wrong, to see what becomes of it.

use super::backend::{Backend, Listed};
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// It says that it cannot now.
    Unavailable,
    /// It says that it will not.
    Refused,
    /// Calls do not come back, until there is another fault.
    Hangs,
    /// Values come, and go, by half.
    Short,
    /// One bit of each value is another.
    Flipped,
    /// Values are not there when they are read.
    Gone,
}

impl Fault {
    /// All that go wrong.
    pub const ALL: [Self; 6] =
        [Self::Unavailable, Self::Refused, Self::Hangs, Self::Short, Self::Flipped, Self::Gone];
}

/// See the module.
#[derive(Debug)]
pub struct FaultyBackend {
    inner: Arc<dyn Backend>,
    fault: Mutex<Fault>,
    changed: Condvar,
    turn: AtomicU64,
    asked: AtomicU64,
    sets: AtomicU64,
}

impl FaultyBackend {
    /// In front of `inner`, with nothing wrong yet.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self {
            inner,
            fault: Mutex::default(),
            changed: Condvar::new(),
            turn: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            sets: AtomicU64::new(0),
        }
    }

    /// From now on `fault`; calls that hang go on with it.
    pub fn fail(&self, fault: Fault) {
        *self.fault.lock() = fault;
        self.changed.notify_all();
    }

    /// Names that it was asked for whether they exist.
    pub fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }

    /// Values that it was given.
    pub fn sets(&self) -> u64 {
        self.sets.load(Relaxed)
    }

    fn inject(&self) -> Result<Fault> {
        let mut fault = self.fault.lock();
        while *fault == Fault::Hangs {
            self.changed.wait(&mut fault);
        }
        match *fault {
            Fault::Unavailable => Err(Error::retry("a made-up fault: 503")),
            Fault::Refused => Err(Error::fatal("a made-up fault: 403")),
            other => Ok(other),
        }
    }
}

impl Backend for FaultyBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        let fault = self.inject()?;
        let value = self.inner.get(name, range)?;
        Ok(match (fault, value) {
            (Fault::Gone, _) => None,
            (Fault::Short, Some(mut value)) => {
                value.truncate(value.len() / 2);
                Some(value)
            }
            (Fault::Flipped, Some(mut value)) if !value.is_empty() => {
                let at = self.turn.fetch_add(7919, Relaxed) as usize % value.len();
                value[at] ^= 1;
                Some(value)
            }
            (_, value) => value,
        })
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.asked.fetch_add(1, Relaxed);
        self.inject()?;
        self.inner.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.sets.fetch_add(1, Relaxed);
        let fault = self.inject()?;
        let half = if fault == Fault::Short { value.len() / 2 } else { value.len() };
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
