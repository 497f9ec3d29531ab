//! What a remote must be able to do: three things, and some it may.

use ritornello_format::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was written, seconds since 1970 by the remote's clock.
    pub written: u64,
}

/// A place for named values that several machines reach: an object store, a mounted file system.
///
/// Values have one byte at least. A name is written once: whoever writes it again writes the same bytes, so the last writer, the
/// first one, and one that gives up all leave the same. A value appears whole or not at all. Names
/// are of `a-z`, `0-9`, `.`, `-` and `/`, at most 200 characters.
///
/// Calls may come from many threads at once. One may take as long as it needs: the tier waits for
/// none longer than its deadline, and goes on without.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The value of `name`, or bytes `range` of it, of which what lies behind its end is left out;
    /// `None` if there is none.
    ///
    /// # Errors
    /// `Retry` if the remote cannot be asked or does not answer, `Fatal` if it refuses and will go on
    /// refusing (credentials, a bucket that is not there).
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>>;

    /// Whether `name` has a value.
    ///
    /// # Errors
    /// Like [`get`](Self::get).
    fn exists(&self, name: &str) -> Result<bool>;

    /// Gives `name` a value.
    ///
    /// # Errors
    /// Like [`get`](Self::get).
    fn set(&self, name: &str, value: &[u8]) -> Result<()>;

    /// [`set`](Self::set) of a value that may be kept for as long as it takes: for those that would
    /// copy it otherwise.
    ///
    /// # Errors
    /// Like [`get`](Self::get).
    fn set_shared(&self, name: &str, value: &Arc<Vec<u8>>) -> Result<()> {
        self.set(name, value)
    }

    /// Takes the value of `name` away, if it has one.
    ///
    /// # Errors
    /// Like [`get`](Self::get); `Invalid` where the backend cannot.
    fn delete(&self, name: &str) -> Result<()> {
        let _ = name;
        Err(unsupported("delete"))
    }

    /// Everything whose name begins with `prefix`, in any order.
    ///
    /// # Errors
    /// Like [`delete`](Self::delete).
    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        let _ = (prefix, each);
        Err(unsupported("list"))
    }

    /// [`exists`](Self::exists) of several names.
    fn exists_batch(&self, names: &[&str]) -> Vec<Result<bool>> {
        names.iter().map(|name| self.exists(name)).collect()
    }

    /// [`get`](Self::get) of several names.
    fn get_batch(&self, asked: &[(&str, Option<Range<u64>>)]) -> Vec<Result<Option<Vec<u8>>>> {
        asked.iter().map(|(name, range)| self.get(name, range.clone())).collect()
    }

    /// [`set`](Self::set) of several names.
    fn set_batch(&self, values: &[(&str, &[u8])]) -> Vec<Result<()>> {
        values.iter().map(|(name, value)| self.set(name, value)).collect()
    }
}

fn unsupported(what: &'static str) -> Error {
    Error::invalid("this backend has only get, exists and set").with("asked", what)
}
