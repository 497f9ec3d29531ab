//! The backend of a remote with a key file: called only after the file has been read.

use super::backend::{Backend, Listed};
use super::keyring::KeyRing;
use ritornello_format::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Passes calls to another backend. Until the key file has been read once, every call tries to read
/// it, and fails with `Fatal` if the file cannot be used: nothing is written without a seal, and
/// nothing is read without verification.
pub(super) struct KeyedBackend {
    inner: Arc<dyn Backend>,
    keys: Arc<KeyRing>,
}

impl KeyedBackend {
    pub(super) fn new(inner: Arc<dyn Backend>, keys: Arc<KeyRing>) -> Self {
        Self { inner, keys }
    }

    /// The backend that calls are passed to, once the key file has been read.
    ///
    /// # Errors
    /// `Fatal` if the key file cannot be used.
    fn inner(&self) -> Result<&dyn Backend> {
        self.keys.load().map_err(|error| {
            Error::fatal("the remote is not used without its key").because(error)
        })?;
        Ok(self.inner.as_ref())
    }
}

impl fmt::Debug for KeyedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner, f)
    }
}

impl Backend for KeyedBackend {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.inner()?.get(name, range)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.inner()?.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.inner()?.set(name, value)
    }

    fn set_shared(&self, name: &str, value: &Arc<Vec<u8>>) -> Result<()> {
        self.inner()?.set_shared(name, value)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.inner()?.delete(name)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        self.inner()?.list(prefix, each)
    }

    fn exists_batch(&self, names: &[&str]) -> Vec<Result<bool>> {
        match self.inner() {
            Ok(inner) => inner.exists_batch(names),
            Err(_) => names.iter().map(|name| self.exists(name)).collect(),
        }
    }

    fn get_batch(&self, requests: &[(&str, Option<Range<u64>>)]) -> Vec<Result<Option<Vec<u8>>>> {
        match self.inner() {
            Ok(inner) => inner.get_batch(requests),
            Err(_) => requests.iter().map(|(name, range)| self.get(name, range.clone())).collect(),
        }
    }

    fn set_batch(&self, values: &[(&str, &[u8])]) -> Vec<Result<()>> {
        match self.inner() {
            Ok(inner) => inner.set_batch(values),
            Err(_) => values.iter().map(|(name, value)| self.set(name, value)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryBackend;
    use super::*;
    use ritornello_format::ErrorKind;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn calls_fail_until_key_file_is_usable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let inner = Arc::new(MemoryBackend::default());
        let keys = Arc::new(KeyRing::deferred(&path));
        let backend = KeyedBackend::new(Arc::clone(&inner) as Arc<dyn Backend>, keys);
        let error = backend.set("a", b"1").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fatal);
        assert!(error.to_string().contains("make it, or correct ?key="), "{error}");
        assert!(backend.get("a", None).is_err() && backend.exists("a").is_err());
        assert!(backend.set_shared("a", &Arc::new(vec![1])).is_err());
        assert!(backend.delete("a").is_err() && backend.list("", &mut |_| ()).is_err());
        assert!(backend.exists_batch(&["a", "b"]).iter().all(Result::is_err));
        assert!(backend.get_batch(&[("a", None)]).iter().all(Result::is_err));
        assert!(backend.set_batch(&[("a", &b"1"[..])]).iter().all(Result::is_err));
        assert!(!inner.exists("a").unwrap());
        std::fs::write(&path, format!("a {}\n", "5a".repeat(32))).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        backend.set("a", b"1").unwrap();
        assert!(inner.exists("a").unwrap());
        let found: Result<Vec<bool>> = backend.exists_batch(&["a", "b"]).into_iter().collect();
        assert_eq!(found.unwrap(), [true, false]);
    }
}
