//! The state that all handles of one process on one directory share.

use crate::failover_catalog::FailoverCatalog;
use crate::heal;
use crate::membership::Membership;
use crate::node_directory::{NodeDirectory, unusable};
use crate::open_context::OpenContext;
use crate::permissions::ClientPermissions;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_medium::Medium;
use ritornello_store::{Catalog, Directory, Options, Store, StorePolicy, open_segments};
use ritornello_volume::staging::Staging;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Memory per process for copies of pages and unaligned reads, of which only used parts are
/// resident.
const STAGING_BYTES: usize = 256 << 20;

/// An open store.
pub(crate) struct Shared {
    directory: Arc<NodeDirectory>,
    medium: Arc<dyn Medium>,
    catalog: Arc<FailoverCatalog>,
    store: Arc<Store>,
    phase: Mutex<Phase>,
}

/// Life cycle of a [`Shared`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In use; the value is the number of handles.
    Open(usize),
    /// The last handle was closed. Writes may still be in progress.
    Closing,
    /// Closed.
    Closed,
}

impl Shared {
    /// Opens the store in `directory`, with one handle. Returns the store's permissions, too.
    pub(crate) fn open(
        directory: NodeDirectory,
        medium: Arc<dyn Medium>,
        options: &Options,
        until: Instant,
    ) -> Result<(Self, StorePolicy)> {
        let anchored = directory.anchor(medium);
        let medium = anchored.map_err(|error| unusable(directory.path(), error))?;
        let policy = Directory::new(Arc::clone(&medium), directory.path()).policy()?;
        let directory = Arc::new(directory);
        let opening = OpenContext {
            directory: Arc::clone(&directory),
            medium: Arc::clone(&medium),
            options: options.clone(),
            permissions: Arc::new(ClientPermissions::new(policy.clone())),
            closing: AtomicBool::new(false),
            heal_signal: Arc::default(),
        };
        let catalog = Arc::new(FailoverCatalog::open(opening, until)?);
        if let Err(error) = heal::start(&catalog) {
            let _ = catalog.close();
            return Err(error);
        }
        let opened = store_over(catalog, &medium, options);
        let (catalog, store) = opened?;
        let phase = Mutex::new(Phase::Open(1));
        Ok((Self { directory, medium, catalog, store, phase }, policy))
    }

    /// Adds a handle and returns the store's permissions. Returns `None` if the last handle was
    /// closed or another store has replaced this store. Differences between `options` and the store
    /// are logged.
    ///
    /// # Errors
    /// `Invalid` if the directory holds no store of this format, or a malformed policy file.
    pub(crate) fn add_handle(&self, options: &Options) -> Result<Option<StorePolicy>> {
        let mut phase = self.phase.lock();
        let Phase::Open(handles) = &mut *phase else { return Ok(None) };
        if self.catalog.is_replaced() {
            return Ok(None);
        }
        if self.catalog.is_leaving() {
            return Err(Error::retry(
                "this process is closing the store, because its path no longer leads to it: \
                 open it again",
            ));
        }
        let directory = Directory::new(Arc::clone(&self.medium), self.directory.path());
        directory.manifest_for(options)?;
        let policy = directory.policy()?;
        *handles += 1;
        Ok(Some(policy))
    }

    /// Removes a handle. The caller calls [`Shared::close_if_unused`] afterwards.
    pub(crate) fn remove_handle(&self) {
        let mut phase = self.phase.lock();
        *phase = match *phase {
            Phase::Open(handles) if handles > 1 => Phase::Open(handles - 1),
            Phase::Open(_) => Phase::Closing,
            phase => phase,
        };
    }

    /// Closes the store if no handle is left.
    ///
    /// # Errors
    /// Any error of [`FailoverCatalog::close`]. If [`Shared::is_closing`] holds afterwards, the
    /// caller calls this function again.
    pub(crate) fn close_if_unused(&self) -> Result<()> {
        if !self.is_closing() {
            return Ok(());
        }
        self.store.close();
        let closed = self.catalog.close();
        if matches!(&*self.catalog.membership(), Membership::Closed) {
            *self.phase.lock() = Phase::Closed;
        }
        closed
    }

    /// Whether the last handle is closed but the lock is still held.
    pub(crate) fn is_closing(&self) -> bool {
        *self.phase.lock() == Phase::Closing
    }

    /// Whether the store is closed.
    pub(crate) fn is_closed(&self) -> bool {
        *self.phase.lock() == Phase::Closed
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn catalog(&self) -> &FailoverCatalog {
        &self.catalog
    }
}

/// Creates the payload half of the store over a catalog; closes the catalog on failure.
fn store_over(
    catalog: Arc<FailoverCatalog>,
    medium: &Arc<dyn Medium>,
    options: &Options,
) -> Result<(Arc<FailoverCatalog>, Arc<Store>)> {
    let made = (|| {
        let segments = match catalog.membership().core() {
            Some(core) => core.segments(),
            None => {
                Directory::new(Arc::clone(medium), &options.dir).manifest_for(options)?;
                let (manifest, segments) =
                    open_segments(Arc::clone(medium), &options.dir, options.io)?;
                if manifest.uuid != catalog.store() {
                    return Err(Error::retry(
                        "the directory was replaced during the open: open again",
                    ));
                }
                segments
            }
        };
        let _ = catalog.segments.set(Arc::downgrade(&segments));
        let catalog: Arc<dyn Catalog> = Arc::clone(&catalog) as _;
        Ok(Store::new(catalog, segments, Staging::new(STAGING_BYTES)?))
    })();
    match made {
        Ok(store) => Ok((catalog, store)),
        Err(error) => {
            let _ = catalog.close();
            Err(error)
        }
    }
}
