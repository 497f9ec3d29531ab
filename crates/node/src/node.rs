//! OpenContext a store, and the handle that comes of it.

use crate::node_directory::{Identity, NodeDirectory, unusable};
use crate::process::Process;
use crate::registry::{self, Slot};
use crate::shared::Shared;
use ritornello_format::{Error, Result};
use ritornello_medium::{Host, Medium};
use ritornello_store::{Directory, Options, Store, StoreCore, StorePolicy, foreign_directory};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

/// OpenContext waits this long for an owner that is starting, stopping or recovering.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// What this process is to a store. It changes from client to owner when the owner goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It has the index and answers the others.
    Owner,
    /// Another process does.
    Client,
}

impl Role {
    /// The role in one lower-case word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Client => "client",
        }
    }
}

/// A handle on an open store. The store is closed when its last handle in this process is closed
/// or dropped.
pub struct Node {
    process: Process,
    slot: Slot,
    shared: Arc<Shared>,
    policy: StorePolicy,
    left: AtomicBool,
}

/// Opens the store in `options.dir`: as its owner if nobody owns it, otherwise as a client of the
/// process that does. A second open in one process gives a second handle on the same store.
///
/// `durability`, `sync_interval` and `io` are the owner's to choose; a client brings its own to
/// bear when it becomes the owner. A capacity, an index, paths or a segment size that differ from the
/// store's are logged by a client; an owner resizes the store, and converts its index.
///
/// # Errors
/// `Invalid` where the directory, the file system, or the owner's user do not fit, or where a store
/// cannot be made with the options, and the message says what would do; `Retry` if an owner does not
/// listen within a minute, or is of a version that this build has nothing in common with.
pub fn open(options: &Options) -> Result<Arc<Node>> {
    open_on(Arc::new(Host), options)
}

/// As [`open`], over another medium than the host's: one that injects faults into this process's I/O.
/// Locks and sockets are the host's in any case.
///
/// # Errors
/// Those of [`open`].
pub fn open_on(medium: Arc<dyn Medium>, options: &Options) -> Result<Arc<Node>> {
    let until = Instant::now() + CALL_TIMEOUT;
    let path = prepare(&medium, options)?;
    let options = Options { dir: path.clone(), ..options.clone() };
    let policy = Directory::new(Arc::clone(&medium), &path).policy()?;
    let slot = registry::slot(Identity::of(&path).map_err(|error| unusable(&path, error))?)?;
    let Some(mut open) = slot.try_lock_until(until) else {
        return Err(Error::retry("another thread has been opening or closing this store for long")
            .with("dir", path.display()));
    };
    if let Some(shared) = open.upgrade() {
        if shared.enter(&options)? {
            drop(open);
            return Ok(Node::new(slot, shared, policy));
        }
        shared.finish()?;
    }
    let shared = Shared::open(NodeDirectory::open(&path)?, medium, &options, policy.clone(), until);
    let shared = Arc::new(shared.map_err(|error| error.with("dir", path.display()))?);
    *open = Arc::downgrade(&shared);
    drop(open);
    let node = Node::new(slot, shared, policy);
    tracing::info!(role = node.role().word(), dir = %path.display(), "the store is open");
    Ok(node)
}

/// Makes the directory if a store is to be made, and refuses one that holds something else before
/// anything in it is touched.
fn prepare(medium: &Arc<dyn Medium>, options: &Options) -> Result<PathBuf> {
    let dir = options.dir.as_path();
    let refused = |error| unusable(dir, error);
    let path = match fs::canonicalize(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.capacity.is_some() => {
            medium.create_dir(dir).map_err(refused)?;
            fs::canonicalize(dir).map_err(refused)?
        }
        found => found.map_err(refused)?,
    };
    // Before anything in it is read.
    let owner = medium.owner(&path).map_err(refused)?;
    if !owner.is_this_user {
        return Err(foreign_directory(&path, owner));
    }
    let manifest = Directory::new(Arc::clone(medium), &path).manifest();
    // Looked at after the manifest. If it is there, somebody may be making the store just now, and
    // whoever has the lock judges what else is.
    if path.join("LOCK").exists() {
        return Ok(path);
    }
    if manifest?.is_none() && options.capacity.is_none() {
        return Err(refused(io::ErrorKind::NotFound.into()));
    }
    Ok(path)
}

impl Node {
    fn new(slot: Slot, shared: Arc<Shared>, policy: StorePolicy) -> Arc<Self> {
        let left = AtomicBool::new(false);
        Arc::new(Self { process: Process::current(), slot, shared, policy, left })
    }

    /// What the store permitted when this handle was opened.
    #[must_use]
    pub fn policy(&self) -> &StorePolicy {
        &self.policy
    }

    /// The store. Calls fail with `Closed` once it is closed, and in a forked child.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        self.shared.store()
    }

    /// What this process is to the store now.
    #[must_use]
    pub fn role(&self) -> Role {
        self.shared.role()
    }

    /// Takes over if the owner is gone, as any other call would, and says what this process is then.
    /// For who waits to own and asks nothing.
    ///
    /// # Errors
    /// `Retry` if the owner lives and does not answer, or a next one does not listen.
    pub fn ensure_owner(&self) -> Result<Role> {
        self.shared.ensure_owner()?;
        Ok(self.role())
    }

    /// Whether another store has taken this one's place: every call fails from then on, and opening
    /// again finds the new one. Costs no more than a load from memory.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.shared.is_replaced()
    }

    /// What keeps the store from being used in full, if something does: its owner's last write or sync
    /// failed, and it is not reopened yet; or the owner cannot be asked. A client asks its owner.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.shared.problem()
    }

    /// The engine, while this process owns the store: what only an owner may do, such as `fsck`.
    /// It is closed with the store, whoever still holds it. A store that failed is not reopened before
    /// it is dropped.
    #[must_use]
    pub fn core(&self) -> Option<Arc<StoreCore>> {
        self.shared.core()
    }

    /// The directory, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.shared.path()
    }

    /// Closes this handle, and with the last one the store: tickets that run finish, an owner
    /// makes everything durable, and the directory is free. Does nothing in a forked child.
    ///
    /// # Errors
    /// `Retry` if writes of this process are still on their way after a minute and a half: the
    /// store is closed to calls but keeps its lock; close again. `Fatal` if the last sync failed:
    /// it is closed.
    pub fn close(&self) -> Result<()> {
        if !self.process.is_current() {
            return Ok(());
        }
        // Nobody may open the directory in this process before it is free.
        let _slot = self.slot.lock();
        if !self.left.swap(true, Ordering::AcqRel) {
            self.shared.leave();
        }
        self.shared.finish()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.process.is_current() {
            if let Err(error) = self.close() {
                tracing::error!(%error, "a store was dropped and could not be closed");
            }
            if !self.shared.unfinished() {
                return;
            }
        }
        // A forked child must not close what it shares with its parent; and a lock under which
        // writes are on their way must outlive them.
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
