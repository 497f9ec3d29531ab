//! The file of the scope registry: appended to, and replaced when most of it is dead.

use crate::directory::{Directory, SCOPES};
use ritornello_format::{Result, ScopeRegistry, StoredRegistry};
use ritornello_medium::MediumFile;
use std::sync::Arc;

/// Dead bytes that the file may hold besides as many as it holds live ones.
const DEAD_BYTES: u64 = 64 << 10;

/// The file `SCOPES` of the owner.
#[derive(Debug)]
pub(crate) struct RegistryFile {
    directory: Directory,
    /// What records are appended to. `None` until this owner has replaced the file, and after an
    /// append whose outcome on the disk is not known: the next change then replaces the file.
    file: Option<Arc<dyn MediumFile>>,
    length: u64,
    /// Whether there is a record behind the head.
    appended: bool,
    /// Bytes of the live scopes, as the head and their records have them.
    live: u64,
}

impl RegistryFile {
    /// The file that holds `stored`. If anything was appended to it, it is replaced: what a former
    /// owner appended may have been read from the page cache without being on the disk.
    ///
    /// # Errors
    /// As of [`Directory::write_registry`].
    pub(crate) fn open(directory: Directory, stored: &StoredRegistry) -> Result<Self> {
        let length = stored.head_bytes as u64;
        let mut opened = Self { directory, file: None, length, appended: false, live: length };
        if stored.appended_bytes > 0 {
            opened.replace(&stored.registry)?;
        }
        Ok(opened)
    }

    /// The file's bytes at most while the live scopes take `live`, with the new file of a
    /// replacement beside it.
    pub(crate) const fn bytes_max(live: u64) -> u64 {
        3 * live + DEAD_BYTES
    }

    /// Bytes of the file that live scopes take.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// Makes a registration durable: appends `record`, or replaces the file by `changed`, the registry
    /// with the registration.
    ///
    /// # Errors
    /// Those of the file system, with advice: a next owner may find the registration or not, under a
    /// slot that no page has. `Fatal` as of [`Directory::write_registry`].
    pub(crate) fn register(&mut self, record: &[u8], changed: &ScopeRegistry) -> Result<()> {
        let added = record.len() as u64;
        let Some(file) = self.appendable(added, self.live + added) else {
            return self.replace(changed);
        };
        if let Err(error) = file.write_at(record, self.length) {
            // Without the part that was written, the next record may follow.
            self.file = file.set_len(self.length).is_ok().then_some(file);
            return Err(self.directory.refused(error).with("file", SCOPES));
        }
        // A second sync of the same file may succeed without writing what the first one lost: after
        // an error the file is not appended to again.
        file.sync_data().map_err(|error| self.directory.refused(error).with("file", SCOPES))?;
        self.file = Some(file);
        self.length += added;
        self.appended = true;
        self.live += added;
        Ok(())
    }

    /// Makes a removal of scopes durable, which took `freed` bytes: appends `record`, or replaces the
    /// file by `changed`, the registry without them. `former` is the registry with them.
    ///
    /// # Errors
    /// Those of the file system, with advice: `former` holds. `Fatal` if either of the two may hold
    /// after the next opening.
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
                Err(_) => Err(self.directory.unsure(SCOPES).because(error)),
            };
        }
        self.file = Some(file);
        self.length += added;
        self.appended = true;
        self.live = live;
        Ok(())
    }

    /// Replaces the file by `registry`, which is what it holds, if anything was appended: the next owner
    /// reads a head alone, which earlier versions read as well.
    ///
    /// # Errors
    /// Those of the file system: the file holds the same as before.
    pub(crate) fn compact(&mut self, registry: &ScopeRegistry) -> Result<()> {
        if self.appended { self.replace(registry) } else { Ok(()) }
    }

    /// Replaces the file by `registry`.
    ///
    /// # Errors
    /// As of [`Directory::write_registry`].
    pub(crate) fn replace(&mut self, registry: &ScopeRegistry) -> Result<()> {
        let bytes = registry.encode();
        // After an error the old file may be none of the directory's any more.
        self.file = None;
        self.file = Some(self.directory.write_registry(&bytes)?);
        self.length = bytes.len() as u64;
        self.appended = false;
        self.live = self.length;
        Ok(())
    }

    /// Takes the file out, if `added` bytes may be appended to it where `live` bytes of it would be
    /// live then.
    fn appendable(&mut self, added: u64, live: u64) -> Option<Arc<dyn MediumFile>> {
        if self.length + added > 2 * live + DEAD_BYTES {
            return None;
        }
        self.file.take()
    }
}
