//! Opening stores and remotes for a command; an error becomes a [`Failure`].

use crate::exit::Failure;
use ritornello_format::{Error, ErrorKind, Manifest};
use ritornello_medium::Host;
use ritornello_node::{Node, Observed};
use ritornello_remote::ConfiguredBackend;
use ritornello_store::{Directory, Options};
use ritornello_tiers::remote::RemoteAddress;
use std::path::Path;
use std::sync::Arc;

/// Returns the manifest of the store in `dir`; `None` if `dir` holds no store and no files of
/// another origin.
///
/// # Errors
/// `Unusable` if `dir` does not exist, is not a directory, holds files of another origin, or has a
/// manifest that is damaged or of another format; `Problems` if its disk fails.
pub fn manifest(dir: &Path) -> Result<Option<Manifest>, Failure> {
    if !dir.is_dir() {
        let line = if dir.exists() { "is not a directory" } else { "does not exist" };
        return Err(Failure::unusable(
            format!("{} {line}", dir.display()),
            "name a directory that exists: the directory that is given to Store.open",
        ));
    }
    Directory::new(Arc::new(Host), dir).manifest().map_err(|error| Failure::unopened(&error))
}

/// Opens the store in `dir`; this process becomes the owner if no other process owns the store.
///
/// # Errors
/// `Problems` if the store cannot be opened because its disk fails; `Unusable` if no store exists,
/// or the store cannot be opened for another reason.
pub fn existing(dir: &Path) -> Result<Arc<Node>, Failure> {
    check_existing(dir)?;
    with(&Options::new(dir))
}

/// Like [`existing`], for a salvage: the open keeps scopes without pages.
///
/// # Errors
/// Errors of [`existing`].
pub fn for_salvage(dir: &Path) -> Result<Arc<Node>, Failure> {
    check_existing(dir)?;
    with(&Options { keep_empty_scopes: true, ..Options::new(dir) })
}

/// Returns the state of the store in `dir` without opening it; see [`ritornello_node::observe`].
///
/// # Errors
/// `Problems` if the disk fails; `Unusable` if no store exists, its owner does not answer, or its
/// state cannot be read for another reason.
pub fn observed(dir: &Path) -> Result<Observed, Failure> {
    ritornello_node::observe(dir).map_err(|error| unobserved(dir, &error))
}

/// Returns the failure of a call of [`ritornello_node::observe`] or
/// [`ritornello_node::owner_stats`]. If `error` is `Invalid` and `dir` holds no store, the failure
/// says so.
#[must_use]
pub fn unobserved(dir: &Path, error: &Error) -> Failure {
    // Only an `Invalid` error can mean that `dir` holds no store. After other errors `dir` is not
    // read, because its disk may hang.
    if error.kind() == ErrorKind::Invalid
        && let Err(failure) = check_existing(dir)
    {
        return failure;
    }
    Failure::unopened(error)
}

/// Checks that `dir` holds a store.
///
/// # Errors
/// Errors of [`manifest`]; `Unusable` if no store exists.
pub fn check_existing(dir: &Path) -> Result<(), Failure> {
    if manifest(dir)?.is_some() {
        return Ok(());
    }
    Err(Failure::unusable(
        format!("there is no Ritornello store in {}", dir.display()),
        "name the directory that was given to Store.open",
    ))
}

/// Opens the store that `options` describe, as [`ritornello_node::open`] does.
///
/// # Errors
/// `Problems` if the store cannot be opened because its disk fails, otherwise `Unusable`.
pub fn with(options: &Options) -> Result<Arc<Node>, Failure> {
    ritornello_node::open(options).map_err(|error| Failure::unopened(&error))
}

/// Opens a remote.
///
/// # Errors
/// `Failed` if the remote cannot be opened now; `Unusable` if the address is invalid, or the remote
/// cannot be opened for another reason.
pub fn remote(address: &RemoteAddress) -> Result<ConfiguredBackend, Failure> {
    ritornello_remote::open(address.expose()).map_err(Failure::from_remote)
}
