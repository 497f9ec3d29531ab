//! Asks for the state of a store without opening the store.
//!
//! An observer never takes the store's lock, so it never becomes the owner. An observer has no name
//! under `clients/`, so it does not count as a client, and holds no lease or reservation. It sends
//! one request, `Stats`, on a connection that it then closes. It becomes a client for one request
//! in two cases: the owner speaks only protocol versions without observers, or the request is for
//! decisions or for an explanation, whose list of keys may be longer than a message of an observer.
//! If no process owns the store, the observer reads the store's files and changes none of them.

use crate::channel::Channel;
use crate::client::{Client, late, response, unexpected};
use crate::exclusive::with_unopened_store;
use crate::greeting::OtherVersion;
use crate::handshake::{HANDSHAKE_TIMEOUT, dial, greet};
use crate::node_directory::{NodeDirectory, unusable};
use crate::owner_lost::{is_owner_lost, owner_lost};
use crate::protocol::{Hello, OBSERVERS_SINCE};
use crate::record_lock::LockHolder;
use ritornello_format::{Error, Result, ScopeId};
use ritornello_medium::Host;
use ritornello_store::{
    CatalogStats, DecisionListing, Directory, Explanation, Keys, Request, RequestExplanation,
    Response, StoredStats,
};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

/// Maximum time to wait for an owner that starts, stops or recovers, or for another thread of this
/// process that opens or closes the store.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before another attempt to reach an owner that does not listen.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Maximum time to wait for the statistics: for an observer after the handshake, for a client
/// including the handshake.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The refusal of an observer in a process that uses the store.
const IS_OPEN: &str = "this process has the store open: ask through the handle that it has";

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
/// call if the owner speaks only protocol versions without observers. An owner is waited for at
/// most 40 seconds. The time of file reads is not limited, because a read ends when its disk
/// answers.
///
/// # Errors
/// Errors of [`owner_stats`]; if no process owns the store, `Invalid` if the directory holds no
/// store, and errors of [`Directory::manifest`].
pub fn observe(dir: &Path) -> Result<Observed> {
    let owned = |directory: &_, owner| Ok(Observed::Owned(Box::new(ask(directory, owner)?)));
    find(dir, LISTEN_TIMEOUT, &owned, &stored)
}

/// Like [`observe`], but reads no file of the store: returns `None` if no process owns `dir`, which
/// may then hold no store.
///
/// # Errors
/// [`OwnerSilent`](ritornello_store::OwnerSilent) if the owner lives and does not answer a
/// handshake within two seconds. `Retry` in these cases:
/// * For five seconds, a process holds the store's lock and does not listen, the store's owner or
///   directory changes in each attempt, or another thread of this process opens or closes the
///   store, or asks its owner.
/// * The owner does not send its statistics within 30 seconds, or too many observers ask it.
/// * The owner and this build have no protocol version or format in common.
/// * A file operation in the directory fails.
///
/// `Invalid` if the directory does not exist, belongs to another user or cannot be read, if another
/// user's process owns the store, or if this process has the store open.
pub fn owner_stats(dir: &Path) -> Result<Option<CatalogStats>> {
    let owned = |directory: &_, owner| ask(directory, owner).map(Some);
    find(dir, LISTEN_TIMEOUT, &owned, &|_| Ok(None))
}

/// Asks the owner of the store in `dir` why pages of the scope `id` are hits or misses; see
/// [`Store::explain`](ritornello_store::Store::explain). Returns `None` if no process owns the
/// store. This process becomes a client for the call, and never the owner.
///
/// The owner has the time `within` to answer. Until the call ends, other threads of this process
/// that observe, ask about or open the store wait; [`observe`] waits for at most five seconds, so
/// pass less if this process also observes the store. An owner that starts, and another such
/// thread, are waited for during half of `within`, at most five seconds. The time of file
/// operations in the directory is not limited.
///
/// # Errors
/// Errors of [`owner_stats`]; `Invalid` for malformed or too many keys, or if the owner's version
/// does not explain; `Retry` if the owner has not answered after `within`, has too many clients, or
/// reopens the store.
pub fn explain(
    dir: &Path,
    id: ScopeId,
    keys: &[&[u8]],
    within: Duration,
) -> Result<Option<Explanation>> {
    let request = Request::Explain { id, scope: None, keys: Keys::Listed(keys) };
    ask_as_client(dir, &request, within, |response| match response {
        Response::Explained(explanation) => Some(explanation),
        _ => None,
    })
}

/// Asks the owner of the store in `dir` what processes decided about the request that `request`
/// names, and why its pages are hits or misses now; see
/// [`Store::explain_request`](ritornello_store::Store::explain_request). Returns `None` if no
/// process owns the store. This process becomes a client for the call, and never the owner.
/// `within`: as for [`explain`].
///
/// # Errors
/// Errors of [`explain`] besides those about keys.
pub fn explain_request(
    dir: &Path,
    request: &str,
    within: Duration,
) -> Result<Option<RequestExplanation>> {
    ask_as_client(dir, &Request::ExplainRequest { request }, within, |response| match response {
        Response::RequestExplained(explanation) => Some(explanation),
        _ => None,
    })
}

/// Asks the owner of the store in `dir` for the newest decisions that it remembers, at most
/// `limit`; see [`Store::decisions`](ritornello_store::Store::decisions). Returns `None` if no
/// process owns the store. This process becomes a client for the call, and never the owner.
/// `within`: as for [`explain`].
///
/// # Errors
/// Errors of [`explain`] besides those about keys.
pub fn decisions(dir: &Path, limit: u32, within: Duration) -> Result<Option<DecisionListing>> {
    ask_as_client(dir, &Request::Decisions { limit }, within, |response| match response {
        Response::Decisions(listing) => Some(listing),
        _ => None,
    })
}

/// Sends `request` to the owner of the store in `dir`, as a client for one call. Returns what
/// `expected` takes from the response; `None` if no process owns the store. Attempts begin in the
/// first half of `within`: with less time, an owner that answers could not complete the handshake,
/// and would be reported as silent. All attempts and waits together end after `within`, so threads
/// that wait for this call and for calls that began before it wait for no longer than `within`.
fn ask_as_client<T>(
    dir: &Path,
    request: &Request<'_>,
    within: Duration,
    expected: impl Fn(Response) -> Option<T>,
) -> Result<Option<T>> {
    let until = Instant::now() + within;
    let owned = |directory: &Arc<NodeDirectory>, owner: LockHolder| {
        // File operations in the directory took all the time: the owner was not asked.
        if Instant::now() >= until {
            return Err(late(owner));
        }
        let response = Client::connect(directory, until)?.call(request, until)?;
        expected(response).map(Some).ok_or_else(unexpected)
    };
    find(dir, LISTEN_TIMEOUT.min(within / 2), &owned, &|_| Ok(None))
}

/// A function that asks the owner, the holder of the directory's lock.
type Ask<'a, T> = &'a dyn Fn(&Arc<NodeDirectory>, LockHolder) -> Result<T>;

/// The result of one attempt to get the state of a store.
enum Attempt<T> {
    Done(T),
    /// The owner does not listen, or ended or began during the attempt; or the path began to lead
    /// to another directory.
    Again(Error),
}

/// Calls `owned` if a process owns the store, or `unowned` with the directory if no process does,
/// and returns the result. Repeats an attempt that ends with [`Attempt::Again`]; no attempt begins
/// later than `patience` after the call.
fn find<T>(
    dir: &Path,
    patience: Duration,
    owned: Ask<'_, T>,
    unowned: &dyn Fn(&Path) -> Result<T>,
) -> Result<T> {
    let until = Instant::now() + patience;
    let path = fs::canonicalize(dir).map_err(|error| unusable(dir, error))?;
    loop {
        match with_unopened_store(&path, until, IS_OPEN, || attempt(&path, owned, unowned))? {
            Attempt::Done(found) => return Ok(found),
            Attempt::Again(error) if Instant::now() + RETRY_PAUSE > until => {
                return Err(error.with("dir", path.display()));
            }
            Attempt::Again(_) => std::thread::sleep(RETRY_PAUSE),
        }
    }
}

fn attempt<T>(
    path: &Path,
    owned: Ask<'_, T>,
    unowned: &dyn Fn(&Path) -> Result<T>,
) -> Result<Attempt<T>> {
    let Some(directory) = NodeDirectory::observe(path)? else {
        let found = unowned(path);
        let is_unowned = NodeDirectory::observe(path)?.is_none();
        return if is_unowned { found.map(Attempt::Done) } else { Ok(Attempt::Again(changed())) };
    };
    let directory = Arc::new(directory);
    let attempted = match directory.lock.holder() {
        Ok(Some(owner)) => match owned(&directory, owner) {
            Ok(found) => Ok(Attempt::Done(found)),
            Err(error) if is_owner_lost(&error) => Ok(Attempt::Again(not_listening(owner, error))),
            Err(error) => Err(error),
        },
        Ok(None) => read_unowned(&directory, unowned),
        Err(error) => Err(error),
    };
    // Close the lock file now: a thread of `Client` may keep the directory after
    // `with_unopened_store` has returned. This process may then open the store, and a close of the
    // file after that would release the lock of the opened store.
    directory.lock.close();
    attempted
}

/// Calls `unowned`, which may read the store's files. Returns [`Attempt::Again`] in two cases: an
/// owner started during the call, and may have replaced a file between two reads; or the path leads
/// elsewhere, and the files and the lock may be of different directories.
fn read_unowned<T>(
    directory: &NodeDirectory,
    unowned: &dyn Fn(&Path) -> Result<T>,
) -> Result<Attempt<T>> {
    let found = unowned(directory.path());
    let is_same = matches!(directory.is_elsewhere(), Ok(false));
    if is_same && directory.lock.holder()?.is_none() {
        found.map(Attempt::Done)
    } else {
        Ok(Attempt::Again(changed()))
    }
}

fn changed() -> Error {
    Error::retry(
        "the store's directory or its owner changed while the store's files were read: try again",
    )
}

fn not_listening(owner: LockHolder, error: Error) -> Error {
    Error::retry(
        "a process holds the store's lock and does not listen: it starts, stops or recovers, or it \
         is a command that works on the store; try again later",
    )
    .with("pid", owner.0)
    .because(error)
}

fn stored(path: &Path) -> Result<Observed> {
    let stored = Directory::new(Arc::new(Host), path).stored_stats()?;
    stored.map(|stored| Observed::Unowned(Box::new(stored))).ok_or_else(|| {
        Error::invalid("there is no Ritornello store in this directory: name a store's directory")
            .with("dir", path.display())
    })
}

fn ask(directory: &Arc<NodeDirectory>, owner: LockHolder) -> Result<CatalogStats> {
    let answer = match ask_as_observer(directory, owner) {
        // The newest protocol version that owner and observer have in common has no observers.
        Err(error) if OtherVersion::of(&error).and_then(OtherVersion::in_common).is_some() => {
            let until = Instant::now() + ANSWER_TIMEOUT;
            Client::connect(directory, until)?.call(&Request::Stats, until)
        }
        answer => answer,
    };
    match answer? {
        Response::Stats(stats) => Ok(*stats),
        Response::Failed(fault) => Err(Error::from(fault).with("pid", owner.0)),
        _ => Err(unexpected()),
    }
}

fn ask_as_observer(directory: &NodeDirectory, owner: LockHolder) -> Result<Response> {
    let until = Instant::now() + HANDSHAKE_TIMEOUT;
    let dialled = dial(directory, owner, until)?;
    let (mut channel, ..) =
        greet(directory, dialled, Hello::observer(), OBSERVERS_SINCE, owner, until)?;
    let is_owner = || Ok(directory.lock.holder()? == Some(owner));
    request_stats(&mut channel, owner, Instant::now() + ANSWER_TIMEOUT, &is_owner)
}

/// Sends [`Request::Stats`] and receives the response, as long as `is_owner` returns true.
///
/// # Errors
/// `Retry` if the response has not arrived at `until`: the owner answered the handshake, so it is
/// not silent.
fn request_stats(
    channel: &mut Channel,
    owner: LockHolder,
    until: Instant,
    is_owner: &dyn Fn() -> Result<bool>,
) -> Result<Response> {
    let mut check_wait = |_| {
        if !is_owner()? {
            return Err(owner_lost(io::ErrorKind::ConnectionAborted.into()));
        }
        if Instant::now() < until { Ok(()) } else { Err(late(owner)) }
    };
    channel.stage(&Request::Stats)?;
    channel.send(&mut check_wait)?;
    let bytes = channel.receive(&mut check_wait)?;
    response(bytes.ok_or_else(|| owner_lost(io::ErrorKind::UnexpectedEof.into()))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ErrorKind;
    use ritornello_store::OwnerSilent;
    use std::os::unix::net::UnixStream;

    #[test]
    fn owner_that_answers_too_late_is_not_reported_as_silent() {
        let (near, _far) = UnixStream::pair().unwrap();
        let mut channel = Channel::new(Arc::new(near), Duration::from_millis(10)).unwrap();
        let until = Instant::now() + Duration::from_millis(50);
        let error = request_stats(&mut channel, LockHolder(7), until, &|| Ok(true)).unwrap_err();
        assert!(error.kind() == ErrorKind::Retry && !OwnerSilent::caused(&error), "{error}");
        assert!(error.to_string().contains("in time") && error.to_string().contains("pid=7"));
        let ended = request_stats(&mut channel, LockHolder(7), until, &|| Ok(false)).unwrap_err();
        assert!(is_owner_lost(&ended), "{ended}");
    }
}
