//! The options of a remote tier.

use super::keyring::KeyRing;
use super::packing::Form;
use std::sync::Arc;

/// How pages are written to a remote, and which objects are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Writes each page compressed with Zstandard at this level, from 1 to 19, if this makes it
    /// shorter; `None` writes pages uncompressed. Reads accept both.
    pub zstd: Option<i32>,
    /// Seals written objects with the first key, and accepts only objects sealed with one of these
    /// keys; `None` writes, and accepts, only objects without a seal.
    pub keys: Option<Arc<KeyRing>>,
}

impl RemoteOptions {
    /// The form of the objects that are read and written.
    #[must_use]
    pub fn form(&self) -> Form {
        if self.keys.is_some() { Form::Sealed } else { Form::Plain }
    }
}
