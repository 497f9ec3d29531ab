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
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Address space of an open store's staging memory in one process. Pages of the huge-page pool are
/// resident from the start; other pages become resident when they are first used, and stay so.
const STAGING_BYTES: usize = 256 << 20;

/// A store that this process has open, with one or several handles.
pub(crate) struct Shared {
    pub(crate) catalog: Arc<FailoverCatalog>,
    pub(crate) store: Arc<Store>,
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
        let opening = OpenContext {
            directory: Arc::new(directory),
            medium,
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
        let store = store_over(&catalog, options).inspect_err(|_| drop(catalog.close()))?;
        catalog.reports.set_store(&store);
        Ok((Self { catalog, store, phase: Mutex::new(Phase::Open(1)) }, policy))
    }

    /// Adds a handle and returns the store's permissions. Returns `None` if the last handle was
    /// closed, or the store was closed because its path no longer leads to it. Differences between
    /// `options` and the store are logged.
    ///
    /// # Errors
    /// Errors of [`Directory::manifest_for`] and [`Directory::policy`]; `Retry` while the store is
    /// being closed because its path no longer leads to it.
    pub(crate) fn add_handle(&self, options: &Options) -> Result<Option<StorePolicy>> {
        let mut phase = self.phase.lock();
        let Phase::Open(handles) = &mut *phase else { return Ok(None) };
        let membership = &self.catalog.membership;
        if membership.is_replaced() {
            return Ok(None);
        }
        if membership.is_leaving() {
            return Err(Error::retry(
                "this process is closing the store, because its path no longer leads to it: \
                 open it again",
            ));
        }
        let OpenContext { directory, medium, .. } = &membership.opening;
        let directory = Directory::new(Arc::clone(medium), directory.path());
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
        if matches!(&*self.catalog.membership.get(), Membership::Closed) {
            *self.phase.lock() = Phase::Closed;
        }
        closed
    }

    /// Whether the last handle was closed and the store is not closed yet.
    pub(crate) fn is_closing(&self) -> bool {
        *self.phase.lock() == Phase::Closing
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.phase.lock() == Phase::Closed
    }
}

/// Creates the [`Store`], which transfers payload, over `catalog`.
fn store_over(catalog: &Arc<FailoverCatalog>, options: &Options) -> Result<Arc<Store>> {
    let membership = &catalog.membership;
    let medium = &membership.opening.medium;
    let segments = match membership.get().core() {
        Some(core) => core.segments(),
        None => {
            Directory::new(Arc::clone(medium), &options.dir).manifest_for(options)?;
            let (manifest, segments) = open_segments(Arc::clone(medium), &options.dir, options.io)?;
            if manifest.uuid != membership.store {
                return Err(Error::retry("the directory was replaced during the open: open again"));
            }
            segments
        }
    };
    membership.set_segments(&segments);
    let catalog: Arc<dyn Catalog> = Arc::clone(catalog) as _;
    Ok(Store::new(catalog, segments, Staging::new(STAGING_BYTES)?))
}
