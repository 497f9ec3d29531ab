//! A remote that could not be opened: every call says why.

use super::backend::Backend;
use ritornello_format::{Error, ErrorKind, Result};
use std::fmt;
use std::ops::Range;

/// See the module.
pub struct Unopened {
    address: String,
    why: String,
}

impl Unopened {
    /// That at `address`, which `why` kept from being opened.
    #[must_use]
    pub fn new(address: &str, why: &Error) -> Self {
        // Options may be secrets.
        let address = address.split('?').next().unwrap_or_default().to_owned();
        Self { address, why: why.to_string() }
    }

    fn refuse<T>(&self) -> Result<T> {
        let why = "this remote could not be opened when the cache was: open it again when it can";
        Err(Error::new(ErrorKind::Fatal, why)
            .with("remote", &self.address)
            .because(self.why.clone()))
    }
}

impl fmt::Debug for Unopened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

impl Backend for Unopened {
    fn get(&self, _: &str, _: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.refuse()
    }
    fn exists(&self, _: &str) -> Result<bool> {
        self.refuse()
    }
    fn set(&self, _: &str, _: &[u8]) -> Result<()> {
        self.refuse()
    }
}
