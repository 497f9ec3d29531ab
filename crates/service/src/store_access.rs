//! The way to a store: an open handle of this process, or observation.

use parking_lot::RwLock;
use ritornello_format::Result;
use ritornello_node::{Node, Observed, observe};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store that the service answers about.
#[derive(Debug)]
pub struct StoreAccess {
    dir: PathBuf,
    name: String,
    node: RwLock<Option<Arc<Node>>>,
}

impl StoreAccess {
    /// A store that this process does not have open.
    #[must_use]
    pub fn new(dir: &Path) -> Arc<Self> {
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        let name = dir.to_string_lossy().into_owned();
        Arc::new(Self { dir, name, node: RwLock::new(None) })
    }

    /// Records the handle with which this process has the store open, or that it has left it.
    pub fn set_open(&self, node: Option<Arc<Node>>) {
        *self.node.write() = node;
    }

    /// The directory in text: the value of the label `store`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The handle of this process, if it has the store open.
    pub(crate) fn open_handle(&self) -> Option<Arc<Node>> {
        self.node.read().clone()
    }

    /// Returns the state of the store. May wait for a disk without a limit.
    ///
    /// # Errors
    /// Errors of [`observe`], or of [`ritornello_store::Store::stats`] for a store that this
    /// process has open.
    pub(crate) fn observe(&self) -> Result<Observed> {
        match self.open_handle() {
            Some(node) => {
                let stats = node.store().stats()?;
                Ok(Observed::Owned(Box::new(stats.catalog)))
            }
            None => observe(&self.dir),
        }
    }
}
