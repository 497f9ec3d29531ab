//! The operations of a remote: three required and several optional operations.

use ritornello_format::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Name of the object.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of writing, in seconds since 1970 by the remote's clock.
    pub written: u64,
}

/// A store of named values shared by several machines: an object store, or a mounted file system.
///
/// Values have at least one byte. A name may be written again, with the same pages but not always
/// with the same bytes: the compression and the seal depend on the writer's settings. The last
/// complete write wins. A value becomes visible whole or not at all. Names consist of `a-z`, `0-9`,
/// `.`, `-` and `/`, at most 200 characters.
///
/// Many threads may call concurrently. A call may take any time: `RemoteTier` stops waiting for it
/// at the deadline.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The value of `name`, or the bytes of it in `range`; the range is cut at the end of the
    /// value. `None` if there is no value.
    ///
    /// # Errors
    /// `Retry` if the remote cannot be reached or does not answer, `Fatal` if it refuses and will
    /// keep refusing (wrong credentials, missing bucket).
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>>;

    /// Whether `name` has a value.
    ///
    /// # Errors
    /// The same errors as [`get`](Self::get).
    fn exists(&self, name: &str) -> Result<bool>;

    /// Sets the value of `name`.
    ///
    /// # Errors
    /// The same errors as [`get`](Self::get).
    fn set(&self, name: &str, value: &[u8]) -> Result<()>;

    /// [`set`](Self::set) of a value that the backend may keep a reference to instead of copying
    /// it.
    ///
    /// # Errors
    /// The same errors as [`get`](Self::get).
    fn set_shared(&self, name: &str, value: &Arc<Vec<u8>>) -> Result<()> {
        self.set(name, value)
    }

    /// Removes the value of `name`, if any.
    ///
    /// # Errors
    /// `Invalid` if the backend does not support deletion; otherwise the same errors as
    /// [`get`](Self::get).
    fn delete(&self, name: &str) -> Result<()> {
        let _ = name;
        Err(unsupported("delete"))
    }

    /// Lists the values whose names begin with `prefix`, in any order.
    ///
    /// # Errors
    /// `Invalid` if the backend does not support listing; otherwise the same errors as
    /// [`get`](Self::get).
    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        let _ = (prefix, each);
        Err(unsupported("list"))
    }

    /// [`exists`](Self::exists) of several names.
    fn exists_batch(&self, names: &[&str]) -> Vec<Result<bool>> {
        names.iter().map(|name| self.exists(name)).collect()
    }

    /// [`get`](Self::get) of several names.
    fn get_batch(&self, requests: &[(&str, Option<Range<u64>>)]) -> Vec<Result<Option<Vec<u8>>>> {
        requests.iter().map(|(name, range)| self.get(name, range.clone())).collect()
    }

    /// [`set`](Self::set) of several names.
    fn set_batch(&self, values: &[(&str, &[u8])]) -> Vec<Result<()>> {
        values.iter().map(|(name, value)| self.set(name, value)).collect()
    }
}

fn unsupported(what: &'static str) -> Error {
    Error::invalid("this backend does not support this operation").with("operation", what)
}
