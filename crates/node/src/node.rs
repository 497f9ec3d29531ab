//! Opening a store, and the handle on an open store.

use crate::membership::Role;
use crate::mounts;
use crate::node_directory::{Identity, NodeDirectory, unusable};
use crate::open_stores::{self, Slot};
use crate::process::Process;
use crate::shared::Shared;
use ritornello_format::{Error, Result};
use ritornello_medium::{Host, Medium};
use ritornello_store::{
    CacheCounters, CapacityChange, Directory, Options, Store, StoreCore, StorePolicy,
    foreign_directory,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

/// Maximum time that opening waits for an owner that is starting, stopping or recovering, or for
/// another thread of this process that opens or closes the store.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A handle on an open store. The store is closed when its last handle in this process is closed
/// or dropped.
pub struct Node {
    process: Process,
    slot: Slot,
    shared: Arc<Shared>,
    policy: StorePolicy,
    closed: AtomicBool,
}

/// Opens the store in `options.dir`: as its owner if the store has no owner, otherwise as a client
/// of the owner. A second open in one process returns a second handle on the same store;
/// differences between its options and the store are logged, and only the directories of
/// `further_dirs` are added.
///
/// The owner's `durability` and `sync_interval` apply; a client's apply when it becomes the owner.
/// Each process transfers pages with the I/O mode that its own `io` chooses. If `capacity` or
/// `index` differ from the store's, an owner resizes the store and converts its index, and a client
/// only logs the difference. Different `paths` or `segment_bytes` are only logged. Directories of
/// `further_dirs` that the store lacks are added, by a client through the owner.
///
/// # Errors
/// `Invalid` if the directory or its file system is unsuitable, another user owns the store, or a
/// store cannot be created with these options; the message says what to change. `Retry` in these
/// cases:
/// * An owner does not listen within a minute, refuses this client, or has no protocol version in
///   common with this build.
/// * Another thread of this process opens or closes the store for a minute.
/// * The directory is replaced during the open, or a file operation in the directory fails.
///
/// `Fatal` if neither copy of the manifest is intact and one is damaged, or the directory is moved
/// while its lock is taken. Errors of the owner's recovery.
pub fn open(options: &Options) -> Result<Arc<Node>> {
    open_on(Arc::new(Host), options)
}

/// Like [`open`], over `medium` instead of the host's files, for example to inject faults into this
/// process's I/O. Locks and sockets are always the host's.
///
/// # Errors
/// Any error of [`open`].
pub fn open_on(medium: Arc<dyn Medium>, options: &Options) -> Result<Arc<Node>> {
    let until = Instant::now() + CALL_TIMEOUT;
    let name = std::path::absolute(&options.dir).map_err(|error| unusable(&options.dir, error))?;
    let path = prepare(&medium, options, &name)?;
    let options = Options { dir: path.clone(), ..options.clone() };
    let identity = Identity::of(&path).map_err(|error| unusable(&path, error))?;
    let slot = open_stores::slot(identity)?;
    let Some(mut open) = slot.try_lock_until(until) else {
        return Err(Error::retry(
            "another thread has been opening or closing this store for a minute: open it again later",
        )
        .with("dir", path.display()));
    };
    if let Some(shared) = open.upgrade() {
        if let Some(policy) = shared.add_handle(&options)? {
            drop(open);
            let node = Node::new(slot, shared, policy);
            node.add_listed_dirs(&options);
            return Ok(node);
        }
        shared.close_if_unused()?;
    }
    let directory = NodeDirectory::open(&path)?;
    if directory.identity() != identity {
        return Err(Error::retry("the directory was replaced while it was opened: open it again")
            .with("dir", path.display()));
    }
    mounts::record_opening(&name, directory.mounts());
    let opened = Shared::open(directory, medium, &options, until);
    let (shared, policy) = opened.map_err(|error| error.with("dir", path.display()))?;
    let shared = Arc::new(shared);
    *open = Arc::downgrade(&shared);
    drop(open);
    let node = Node::new(slot, shared, policy);
    // An owner has added the listed directories already, when it opened the store's core.
    if node.role() == Role::Client {
        node.add_listed_dirs(&options);
    }
    tracing::info!(role = node.role().word(), dir = %path.display(), "the store is open");
    Ok(node)
}

/// Creates the directory of a new store. Rejects a directory that holds files of other programs,
/// before it changes any file. `name` is the directory as the caller names it. Returns the
/// canonical path of the directory.
fn prepare(medium: &Arc<dyn Medium>, options: &Options, name: &Path) -> Result<PathBuf> {
    let dir = options.dir.as_path();
    let refused = |error| unusable(dir, error);
    let path = match fs::canonicalize(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.capacity.is_some() => {
            mounts::check_creation(name)?;
            Directory::new(Arc::clone(medium), name).check_new(options)?;
            medium.create_dir(dir).map_err(refused)?;
            fs::canonicalize(dir).map_err(refused)?
        }
        found => found.map_err(refused)?,
    };
    // Check which user owns the directory before reading anything in it.
    let owner = medium.owner(&path).map_err(refused)?;
    if !owner.is_this_user {
        return Err(foreign_directory(&path, owner));
    }
    let directory = Directory::new(Arc::clone(medium), &path);
    let manifest = directory.manifest();
    // Look for `LOCK` after the read of the manifest, because the read may have seen a store that
    // another process was creating. If `LOCK` exists, another process may be creating the store, or
    // own a store of another format; the files are then checked under the lock.
    let is_locked = path.join("LOCK").exists();
    match manifest {
        Ok(Some(stored)) if stored.owner_epoch > 0 => return Ok(path),
        Ok(None) if options.capacity.is_none() && !is_locked => {
            return Err(refused(io::ErrorKind::NotFound.into()));
        }
        // `LOCK` alone does not show that the directory holds a store: LevelDB uses the same name.
        Err(error) if !is_locked || !directory.holds_store() => return Err(error),
        _ => {}
    }
    mounts::check_creation(name)?;
    directory.check_new(options)?;
    Ok(path)
}

impl Node {
    fn new(slot: Slot, shared: Arc<Shared>, policy: StorePolicy) -> Arc<Self> {
        let closed = AtomicBool::new(false);
        Arc::new(Self { process: Process::current(), slot, shared, policy, closed })
    }

    /// Adds the directories in `options.further_dirs` that the store lacks.
    fn add_listed_dirs(&self, options: &Options) {
        let medium = Arc::clone(&self.shared.catalog.membership.opening.medium);
        Directory::new(medium, self.path()).add_listed(options, |dir| {
            self.store().change_capacity(&CapacityChange::AddVolume(dir))
        });
    }

    /// The permissions in the store's policy file, as read when this handle was opened.
    #[must_use]
    pub fn policy(&self) -> &StorePolicy {
        &self.policy
    }

    /// The store. Calls fail with `Closed` once it is closed, and in a forked child.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Reports the counts of a cache over tiers to the owner about every two seconds, until the
    /// caller has dropped all its references to `counters`.
    pub fn report_cache(&self, counters: Arc<dyn CacheCounters>) {
        self.shared.catalog.reports.add_cache(counters);
    }

    /// The current role of this process.
    #[must_use]
    pub fn role(&self) -> Role {
        self.shared.catalog.membership.get().role()
    }

    /// Returns whether this process owns the store and neither reopens nor closes it, and the index
    /// is in memory, so that a lookup returns immediately. Never waits.
    #[must_use]
    pub fn answers_at_once(&self) -> bool {
        self.shared.catalog.membership.answers_at_once()
    }

    /// Takes over if the owner has died, as any other call would, and returns the resulting role.
    /// For a process that waits to become the owner and makes no other call.
    ///
    /// # Errors
    /// `Retry` if the owner lives and does not answer, the next owner does not listen, or the store
    /// is being reopened; `Closed` if the store is closed, or left because its path no longer leads
    /// to it; `Fatal` if another store has taken its place; errors of the recovery.
    pub fn ensure_owner(&self) -> Result<Role> {
        self.process.check()?;
        self.shared.catalog.membership.ensure_owner()?;
        Ok(self.role())
    }

    /// Returns whether this process has closed the store because its path no longer leads to it:
    /// another store or file system is at the path, or the store failed and was moved or unmounted.
    /// Afterwards every call on this handle fails, and opening the path again opens the store now
    /// at the path, or creates one. Costs one load from memory.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.shared.catalog.membership.is_replaced()
    }

    /// Returns the problem that prevents full use of the store, if any: a write or sync of its
    /// owner failed and the store is not reopened yet, the owner does not answer, or this process
    /// has closed or is leaving the store. A client asks its owner.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.shared.catalog.problem()
    }

    /// The store's core, while this process owns the store: for operations of the owner only, such
    /// as `fsck`. The core is closed with the store, even while references remain. A failed store
    /// is not reopened before all references are dropped.
    #[must_use]
    pub fn core(&self) -> Option<Arc<StoreCore>> {
        self.shared.catalog.membership.get().core().cloned()
    }

    /// The canonical path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.shared.catalog.membership.opening.directory.path()
    }

    /// Closes this handle, and with the last handle the store: waits for puts and gets in progress,
    /// makes everything durable if this process is the owner, and releases the directory. Does
    /// nothing in a forked child.
    ///
    /// # Errors
    /// `Retry` if writes or calls of this process are in progress after 90 seconds, or a disk does
    /// not answer: the store refuses calls but keeps its lock; close again. `Fatal` if the last
    /// sync failed; the store is closed.
    pub fn close(&self) -> Result<()> {
        if !self.process.is_current() {
            return Ok(());
        }
        // While this thread holds the slot of the directory (`open_stores`), no other thread of
        // this process opens the directory.
        let _slot = self.slot.lock();
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.shared.remove_handle();
        }
        self.shared.close_if_unused()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.process.is_current() {
            if let Err(error) = self.close() {
                tracing::error!(%error, "a store was dropped and could not be closed");
            }
            if !self.shared.is_closing() {
                return;
            }
        }
        // A reference is leaked in two cases: a forked child must not close resources that it
        // shares with its parent, and the lock must outlive writes in progress.
        std::mem::forget(Arc::clone(&self.shared));
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("path", &self.path())
            .field("role", &self.role())
            .finish_non_exhaustive()
    }
}
