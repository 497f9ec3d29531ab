//! The file of the scope registry.
//!
//! The file begins with a *head*: the complete registry at the time when the file was written.
//! *Records* of later registrations and removals are appended to it. A change after which the
//! obsolete bytes would exceed the bytes of live scopes by more than 64 KiB replaces the file by a
//! file with a head only.

use crate::budget::REGISTRY_DEAD_BYTES;
use crate::directory::{Directory, SCOPES};
use ritornello_format::{Result, ScopeRegistry, StoredRegistry};
use ritornello_medium::MediumFile;
use std::sync::Arc;

/// The owner's file `SCOPES`.
#[derive(Debug)]
pub(crate) struct RegistryFile {
    directory: Directory,
    /// The file, open for appending records. `None` until this owner has replaced the file, and
    /// after a failed change whose result on disk is unknown: the next change then replaces the
    /// file.
    file: Option<Arc<dyn MediumFile>>,
    length: u64,
    /// Whether the file has records after its head.
    appended: bool,
    /// Bytes of live scopes in the head and in records.
    live: u64,
}

impl RegistryFile {
    /// Opens the file that holds `stored`. Replaces the file if it has appended records, because
    /// these may have been read from the page cache without being on the disk.
    ///
    /// # Errors
    /// Errors of [`Directory::write_registry`].
    pub(crate) fn open(directory: Directory, stored: &StoredRegistry) -> Result<Self> {
        let length = stored.head_bytes as u64;
        let mut opened = Self { directory, file: None, length, appended: false, live: length };
        if stored.appended_bytes > 0 {
            opened.replace(&stored.registry)?;
        }
        Ok(opened)
    }

    /// Bytes of the file that live scopes take.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// Makes a registration durable: appends `record`, or replaces the file by `changed`, the
    /// registry with the registration.
    ///
    /// # Errors
    /// File-system errors, with advice. After such an error the next owner may find the
    /// registration, which is harmless, because the store has no page of the new scope. `Fatal` if
    /// the file was replaced, and the next opening may read either file.
    pub(crate) fn register(&mut self, record: &[u8], changed: &ScopeRegistry) -> Result<()> {
        let added = record.len() as u64;
        let Some(file) = self.appendable(added, self.live + added) else {
            return self.replace(changed);
        };
        if let Err(error) = file.write_at(record, self.length) {
            // Cut off the partial record, so that the next record can follow.
            self.file = file.set_len(self.length).is_ok().then_some(file);
            return Err(self.directory.refused(error).with("file", SCOPES));
        }
        // After an error append no further record: a second sync of the file may succeed without
        // writing the bytes that the first sync lost.
        file.sync_data().map_err(|error| self.directory.refused(error).with("file", SCOPES))?;
        self.file = Some(file);
        self.length += added;
        self.appended = true;
        self.live += added;
        Ok(())
    }

    /// Makes a removal of scopes, whose records take `freed` bytes, durable: appends `record`, or
    /// replaces the file by `changed`, the registry without these scopes. `former` is the registry
    /// with them.
    ///
    /// # Errors
    /// File-system errors, with advice. After such an error `former` remains valid. `Fatal` if the
    /// next opening may read either registry.
    pub(crate) fn remove(
        &mut self,
        record: &[u8],
        freed: u64,
        changed: &ScopeRegistry,
        former: &ScopeRegistry,
    ) -> Result<()> {
        let (added, live) = (record.len() as u64, self.live.saturating_sub(freed));
        let Some(file) = self.appendable(added, live) else { return self.replace(changed) };
        if let Err(error) = file.write_at(record, self.length).and_then(|()| file.sync_data()) {
            let error = self.directory.refused(error).with("file", SCOPES);
            return match self.replace(former) {
                Ok(()) => Err(error),
                Err(_) => Err(self.directory.uncertain_error(SCOPES).because(error)),
            };
        }
        self.file = Some(file);
        self.length += added;
        self.appended = true;
        self.live = live;
        Ok(())
    }

    /// If the file has records after its head, replaces the file by a file with a head only, which
    /// earlier builds can read. `registry` holds the contents of the file.
    ///
    /// # Errors
    /// File-system errors: the contents are unchanged.
    pub(crate) fn compact(&mut self, registry: &ScopeRegistry) -> Result<()> {
        if self.appended { self.replace(registry) } else { Ok(()) }
    }

    /// Replaces the file by a file whose head holds `registry`.
    ///
    /// # Errors
    /// Errors of [`Directory::write_registry`].
    pub(crate) fn replace(&mut self, registry: &ScopeRegistry) -> Result<()> {
        let bytes = registry.encode();
        // After an error the old file may no longer be in the directory.
        self.file = None;
        self.file = Some(self.directory.write_registry(&bytes)?);
        self.length = bytes.len() as u64;
        self.appended = false;
        self.live = self.length;
        Ok(())
    }

    /// Takes the file for an append of `added` bytes; `None` if the file must be replaced. `live`:
    /// live bytes of the file after the append.
    fn appendable(&mut self, added: u64, live: u64) -> Option<Arc<dyn MediumFile>> {
        if self.length + added > 2 * live + REGISTRY_DEAD_BYTES {
            return None;
        }
        self.file.take()
    }
}
