//! Opening stores, without ever making one where there was none.

use crate::exit::Failure;
use ritornello_format::Manifest;
use ritornello_medium::Host;
use ritornello_node::Node;
use ritornello_store::{Directory, Options};
use std::path::Path;
use std::sync::Arc;

/// What the store in `dir` is; `None` where `dir` could hold a store and does not.
///
/// # Errors
/// Unusable for what is no directory, holds something else, or has a damaged manifest.
pub fn manifest(dir: &Path) -> Result<Option<Manifest>, Failure> {
    if !dir.is_dir() {
        let line = if dir.exists() { "is not a directory" } else { "does not exist" };
        return Err(Failure::unusable(
            format!("{} {line}", dir.display()),
            "name a directory that exists: the one that is given to Store.open",
        ));
    }
    Directory::new(Arc::new(Host), dir).manifest().map_err(|error| Failure::unopened(&error))
}

/// The store in `dir`: owned by this process if nobody else owns it.
///
/// # Errors
/// Unusable where there is none, or it cannot be opened.
pub fn existing(dir: &Path) -> Result<Arc<Node>, Failure> {
    if manifest(dir)?.is_none() {
        return Err(Failure::unusable(
            format!("there is no Ritornello store in {}", dir.display()),
            "name the directory that was given to Store.open",
        ));
    }
    with(&Options::new(dir))
}

/// A store by its options.
///
/// # Errors
/// Unusable where it cannot be opened.
pub fn with(options: &Options) -> Result<Arc<Node>, Failure> {
    ritornello_node::open(options).map_err(|error| Failure::unopened(&error))
}
