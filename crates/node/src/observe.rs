//! Asks for the state of a store without opening the store.
//!
//! An observer never takes the store's lock, so it never becomes the owner, and it has no name
//! under `clients/`, so it takes no place of a client and holds no lease or reservation. It sends
//! one request, `Stats`, on a connection that it then closes. If no process owns the store, the
//! observer reads the store's files and changes none of them.

use crate::client::{Client, response, unexpected};
use crate::exclusive::with_unopened_store;
use crate::greeting::OtherVersion;
use crate::handshake::{HANDSHAKE_TIMEOUT, dial, greet};
use crate::node_directory::{NodeDirectory, unusable};
use crate::owner_lost::{is_owner_lost, owner_lost};
use crate::protocol::Hello;
use crate::record_lock::LockHolder;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_medium::Host;
use ritornello_store::{
    CatalogStats, Directory, OwnerSilent, Request, Response, StoreReopening, StoredStats,
};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

/// Maximum time to wait for an owner that starts, stops or recovers, or for another thread of this
/// process that opens or closes the store.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before another attempt to reach such an owner.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Maximum time to wait for the statistics after the handshake.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a store that this process does not use.
#[derive(Clone, Debug)]
pub enum Observed {
    /// The statistics that the owner returned.
    Owned(Box<CatalogStats>),
    /// No process owns the store: the state in its files.
    Unowned(Box<StoredStats>),
}

/// Returns the state of the store in `dir`: asks its owner, or reads its files if no process owns
/// it. Never makes this process the owner or a client, except that it becomes a client for this
/// call if the owner is of a build that knows no observers. Takes at most 20 seconds.
///
/// # Errors
/// [`OwnerSilent`] if the owner lives and does not answer a handshake within two seconds; `Retry`
/// if a process holds the store's lock and does not listen within five seconds, if the owner does
/// not send its statistics within ten seconds, or if the owner and this build have no protocol
/// version in common; `Invalid` if the directory holds no store or belongs to another user, if
/// another user owns the store, or if this process has the store open; errors of
/// [`Directory::manifest`] if no process owns the store.
pub fn observe(dir: &Path) -> Result<Observed> {
    let path = fs::canonicalize(dir).map_err(|error| unusable(dir, error))?;
    let until = Instant::now() + LISTEN_TIMEOUT;
    with_unopened_store(&path, until, || {
        loop {
            if let Some(observed) = observe_once(&path)? {
                return Ok(observed);
            }
            if Instant::now() + RETRY_PAUSE > until {
                return Err(Error::retry(
                    "a process holds the store's lock and does not listen (it starts, stops or \
                     recovers)",
                )
                .with("dir", path.display()));
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    })
}

/// Makes one attempt. Returns `None` if the owner does not listen, or ended or began during the
/// attempt.
fn observe_once(path: &Path) -> Result<Option<Observed>> {
    let Some(directory) = NodeDirectory::observe(path)? else {
        return stored(path).map(Some);
    };
    let directory = Arc::new(directory);
    let observed = ask_or_read(&directory);
    // A thread of `Client` may keep the directory for longer than this process is kept from opening
    // the store.
    directory.lock.close();
    observed
}

fn ask_or_read(directory: &Arc<NodeDirectory>) -> Result<Option<Observed>> {
    let Some(owner) = directory.lock.holder()? else {
        let stored = stored(directory.path());
        // If an owner started in the meantime, it may have replaced a file between two reads.
        return if directory.lock.holder()?.is_none() { stored.map(Some) } else { Ok(None) };
    };
    match ask(directory, owner) {
        Ok(stats) => Ok(Some(Observed::Owned(Box::new(stats)))),
        Err(error) if is_owner_lost(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn stored(path: &Path) -> Result<Observed> {
    let stored = Directory::new(Arc::new(Host), path).stored_stats()?;
    stored.map(|stored| Observed::Unowned(Box::new(stored))).ok_or_else(|| {
        Error::invalid("there is no Ritornello store in this directory").with("dir", path.display())
    })
}

fn ask(directory: &Arc<NodeDirectory>, owner: LockHolder) -> Result<CatalogStats> {
    let answer = match ask_as_observer(directory, owner) {
        // An owner of a build that knows no observers refuses the empty name.
        Err(error) if is_refusal(&error) => {
            let until = Instant::now() + ANSWER_TIMEOUT;
            Client::connect(directory, until)?.call(&Request::Stats, until)
        }
        answer => answer,
    };
    match answer? {
        Response::Stats(stats) => Ok(*stats),
        Response::Failed(fault) => Err(fault.into()),
        _ => Err(unexpected()),
    }
}

fn ask_as_observer(directory: &NodeDirectory, owner: LockHolder) -> Result<Response> {
    let until = Instant::now() + HANDSHAKE_TIMEOUT;
    let dialled = dial(directory, owner, until)?;
    let (mut channel, ..) = greet(directory, dialled, Hello::observer(), owner, until)?;
    let until = Instant::now() + ANSWER_TIMEOUT;
    let mut check_wait = |_| {
        if directory.lock.holder()? != Some(owner) {
            return Err(owner_lost(io::ErrorKind::ConnectionAborted.into()));
        }
        if Instant::now() < until { Ok(()) } else { Err(OwnerSilent::error(owner.0)) }
    };
    channel.stage(&Request::Stats)?;
    channel.send(&mut check_wait)?;
    let bytes = channel.receive(&mut check_wait)?;
    response(bytes.ok_or_else(|| owner_lost(io::ErrorKind::UnexpectedEof.into()))?)
}

/// Whether `error` is an answer of the owner that a client may not get.
fn is_refusal(error: &Error) -> bool {
    error.kind() == ErrorKind::Retry
        && !is_owner_lost(error)
        && !OwnerSilent::caused(error)
        && !StoreReopening::caused(error)
        && OtherVersion::of(error).is_none()
}
