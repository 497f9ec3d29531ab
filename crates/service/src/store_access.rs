//! How the service reaches a store: through the handle with which this process has the store open,
//! or by observing the store.

use crate::calls::Calls;
use parking_lot::{Mutex, RwLock};
use ritornello_format::{Error, Result};
use ritornello_node::{Node, Observed, observe};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store that the service answers about.
#[derive(Debug)]
pub struct StoreAccess {
    dir: PathBuf,
    name: String,
    node: RwLock<Option<Arc<Node>>>,
    /// Why the last attempt of this process to open or take over the store failed; `None` after an
    /// attempt succeeded.
    failure: Mutex<Option<String>>,
    calls: Calls,
}

impl StoreAccess {
    /// Creates the access to the store in `dir`, which counts as not open in this process until
    /// [`StoreAccess::set_open`] is called.
    #[must_use]
    pub fn new(dir: &Path) -> Arc<Self> {
        // `components` drops a final `/`, so that it makes no second name.
        let dir = std::path::absolute(dir)
            .unwrap_or_else(|_| dir.to_owned())
            .components()
            .collect::<PathBuf>();
        let name = dir.to_string_lossy().into_owned();
        let (node, failure) = (RwLock::new(None), Mutex::new(None));
        Arc::new(Self { dir, name, node, failure, calls: Calls::default() })
    }

    /// Records the handle with which this process has the store open; `None` if this process has
    /// left the store.
    pub fn set_open(&self, node: Option<Arc<Node>>) {
        *self.failure.lock() = None;
        let former = std::mem::replace(&mut *self.node.write(), node);
        // Drop the former handle without the lock: the last handle closes the store, which may take
        // long.
        drop(former);
    }

    /// Records that this process does not have the store open, because it could not open or take
    /// over the store, until [`StoreAccess::set_open`] is called. Called before the failed store is
    /// closed: the reason is then known during the close, which may take long and lets no thread
    /// observe the store.
    pub fn set_failed(&self, reason: &str) {
        // First the reason, so that a thread that finds no handle finds the reason.
        *self.failure.lock() = Some(reason.to_owned());
        let former = self.node.write().take();
        // Drop the handle without the lock, as in `set_open`.
        drop(former);
    }

    /// Why this process could not open or take over the store, and that it tries again; `None` if
    /// no attempt has failed since the last success.
    pub(crate) fn failure(&self) -> Option<String> {
        let failure = self.failure.lock();
        let text = |reason| {
            format!(
                "the service could not open or take over the store, and tries again every few \
                 seconds: {reason}"
            )
        };
        failure.as_ref().map(text)
    }

    /// The directory, absolute.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory in text, by which requests, answers and metrics name the store.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The handle of this process, if it has the store open. The last handle closes the store when
    /// it is dropped, so only threads that may wait for a disk call this function.
    pub(crate) fn open_handle(&self) -> Option<Arc<Node>> {
        self.node.read().clone()
    }

    /// The limit of calls of this store.
    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }

    /// Returns the state of the store. May wait for a disk without a limit.
    ///
    /// # Errors
    /// Errors of [`observe`], or of [`ritornello_store::Store::stats`] for a store that this
    /// process has open; `Retry` if this process could not open the store, and no process owns it
    /// or its state cannot be observed; `Retry` if no process owns the store, and its files
    /// show that an opening would fail.
    pub(crate) fn observe(&self) -> Result<Observed> {
        let observed = self.ask(|source| match source {
            Source::Open(node) => {
                let stats = node.store().stats()?;
                Ok(Observed::Owned(Box::new(stats.catalog)))
            }
            Source::Directory(dir) => observe(dir),
        });
        match (observed, self.failure()) {
            // The next process may fail to open a store whose files can be read.
            (Ok(Observed::Unowned(_)), Some(failure)) => Err(Error::retry(failure)),
            (Ok(Observed::Unowned(stored)), None) if stored.unopenable.is_some() => {
                let why = stored.unopenable.unwrap_or_default();
                Err(Error::retry(format!("no process can open the store: {why}")))
            }
            // While this process opens or closes the store, the failure says more than that.
            (Err(error), Some(failure)) => {
                Err(Error::retry(format!("{failure}; its state is not known now: {error}")))
            }
            (observed, _) => observed,
        }
    }

    /// Asks `question` about the store: through the handle of this process if it has the store
    /// open, otherwise by the directory.
    ///
    /// # Errors
    /// Errors of `question`.
    pub(crate) fn ask<T>(&self, question: impl Fn(Source<'_>) -> Result<T>) -> Result<T> {
        if let Some(node) = self.open_handle() {
            return question(Source::Open(&node));
        }
        question(Source::Directory(&self.dir)).or_else(|error| match self.open_handle() {
            // This process opened the store after the first check, and no process can observe a
            // store that it has open: use the handle.
            Some(node) => question(Source::Open(&node)),
            None => Err(error),
        })
    }
}

/// How a question about a store is asked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// Through the handle with which this process has the store open.
    Open(&'a Node),
    /// By the directory of a store that this process does not have open.
    Directory(&'a Path),
}
