//! Wraps the calls of Holt that this backend uses, and converts its errors.

use holt::{CheckpointConfig, Durability, KeyRangeEntryRef, RangeEntry, Tree, TreeConfig};
use ritornello_format::{Error, Result};
use std::path::Path;

/// Maximum operations per batch. A batch is one record of Holt's log, of at most about 1 MiB.
pub(super) const OPS: usize = 1024;

/// Minimum bytes of a stored value. Shorter values are padded.
///
/// A frame of Holt has 512 KiB and 10,240 slots, one per node. If a frame runs out of slots before
/// bytes, Holt cannot move a part of the frame to another frame, because the move takes a slot. All
/// later inserts into the frame then fail (`OutOfSlots`), each after hundreds of milliseconds.
/// Padding therefore makes leaves so long that a frame runs out of bytes first. Keys have 9 to 21
/// bytes, except the three keys of counters; a leaf adds 16 bytes, and there is one inner node for
/// three leaves.
const VALUE_BYTES_MIN: usize = 64;

fn pad(value: &[u8]) -> Box<[u8]> {
    let padding = VALUE_BYTES_MIN.saturating_sub(value.len() + 1);
    let mut padded = Vec::with_capacity(value.len() + padding + 1);
    padded.extend_from_slice(value);
    padded.resize(value.len() + padding, 0);
    padded.push(padding as u8);
    padded.into()
}

fn unpad(mut value: Vec<u8>) -> Vec<u8> {
    let padding = value.pop().unwrap_or_default();
    value.truncate(value.len().saturating_sub(padding.into()));
    value
}

/// Operations to apply together.
#[derive(Clone, Debug, Default)]
pub(super) struct Batch(Vec<Change>);

/// A key, and its new value; `None` deletes the key.
type Change = (Box<[u8]>, Option<Box<[u8]>>);

impl Batch {
    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) {
        self.0.push((key.into(), Some(pad(value))));
    }

    pub(super) fn delete(&mut self, key: &[u8]) {
        self.0.push((key.into(), None));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns a batch that deletes the keys of this batch in reverse order, to undo an insert.
    /// Leaves out `stay`, the only key that existed before the insert.
    pub(super) fn undo(&self, stay: &[u8]) -> Self {
        let new = self.0.iter().rev().filter(|(key, _)| **key != *stay);
        Self(new.map(|(key, _)| (key.clone(), None)).collect())
    }

    fn bytes(&self) -> u64 {
        let of = |(key, value): &Change| key.len() + value.as_ref().map_or(0, |value| value.len());
        self.0.iter().map(of).sum::<usize>() as u64
    }
}

pub(super) struct Holt {
    tree: Tree,
    /// For tests: makes the next batch fail after this number of its operations, as Holt may fail
    /// in the middle of a batch.
    #[cfg(test)]
    pub(super) fail_after: parking_lot::Mutex<Option<usize>>,
}

impl std::fmt::Debug for Holt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Holt").field(&self.tree.config().storage).finish()
    }
}

impl Holt {
    /// Opens the tree in `dir`, or creates a tree.
    pub(super) fn open(dir: &Path, cache_bytes: u64, durable: bool) -> holt::Result<Self> {
        let mut config = TreeConfig::new(dir);
        // A frame has 512 KiB. Fewer than eight frames cannot hold a path through the tree.
        config.buffer_pool_size = (cache_bytes >> 19).max(8) as usize;
        config.durability = Durability::Wal { sync: durable };
        // `PrefixIndex::sync` makes the checkpoints: Holt's background checkpoints would write
        // every dirty frame twice per second.
        config.checkpoint = CheckpointConfig { enabled: false, ..CheckpointConfig::default() };
        Ok(Self {
            tree: Tree::open(config)?,
            #[cfg(test)]
            fail_after: parking_lot::Mutex::new(None),
        })
    }

    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.tree.get(key).map(|value| value.map(unpad)).map_err(error)
    }

    /// All entries whose keys begin with `prefix`, in order.
    pub(super) fn scan(
        &self,
        prefix: &[u8],
    ) -> impl Iterator<Item = Result<(Vec<u8>, Vec<u8>)>> + use<> {
        self.tree.scan(prefix).into_iter().filter_map(|entry| match entry {
            Ok(RangeEntry::Key { key, value, .. }) => Some(Ok((key, unpad(value)))),
            Ok(_) => None,
            Err(cause) => Some(Err(error(cause))),
        })
    }

    /// At most `limit` keys that begin with `prefix` and follow `start`.
    pub(super) fn keys_after(
        &self,
        prefix: &[u8],
        start: &[u8],
        limit: usize,
    ) -> Result<Vec<Vec<u8>>> {
        let mut keys = Vec::new();
        let visited = self.tree.scan_keys(prefix).start_after(start).visit(limit, |entry| {
            if let KeyRangeEntryRef::Key { key, .. } = entry {
                keys.push(key.to_vec());
            }
            Ok(())
        });
        visited.map(|_| keys).map_err(error)
    }

    pub(super) fn any(&self, prefix: &[u8]) -> Result<bool> {
        self.tree.is_prefix_empty(prefix).map(|empty| !empty).map_err(error)
    }

    /// Applies a batch. The log gets the whole batch or no part of it. After a failure, a part of
    /// the batch may have been applied to the tree. Returns the number of bytes of the batch's keys
    /// and values.
    pub(super) fn apply(&self, batch: &Batch) -> Result<u64> {
        #[cfg(test)]
        let after = self.fail_after.lock().take();
        #[cfg(test)]
        if let Some(after) = after {
            self.apply(&Batch(batch.0[..after.min(batch.0.len())].to_vec()))?;
            return Err(error(holt::Error::NotYetImplemented("a test")));
        }
        let applied = self.tree.atomic(|out| {
            for (key, value) in &batch.0 {
                match value {
                    Some(value) => out.put(key, value),
                    None => out.delete(key),
                }
            }
        });
        applied.map(|_| batch.bytes()).map_err(error)
    }

    /// Writes all dirty frames and truncates the log. Holt has no other call that makes changes
    /// durable.
    pub(super) fn checkpoint(&self) -> Result<()> {
        self.tree.checkpoint().map_err(error)
    }
}

/// Whether an error is caused by the contents of the files, not by the file system.
pub(super) fn is_damage(error: &Error) -> bool {
    use std::error::Error as _;
    use std::io::ErrorKind::{NotFound, WouldBlock};
    let cause = error.source().and_then(|source| source.downcast_ref::<holt::Error>());
    cause.is_some_and(|cause| match cause {
        // Damage: a missing file, an I/O error without an error number of the kernel (such as a
        // short read, but not `WouldBlock`), and every other error of Holt.
        holt::Error::BlobStoreIo(cause) => {
            cause.kind() == NotFound || cause.raw_os_error().is_none() && cause.kind() != WouldBlock
        }
        _ => true,
    })
}

/// Converts an error, with advice for the caller.
pub(super) fn error(cause: holt::Error) -> Error {
    use holt::Error as E;
    let error = match &cause {
        E::Alloc(_) | E::Free(_) | E::NotYetImplemented(_) => Error::retry(
            "Holt found no room for the keys in its frames: remove pages, or use the index `run` \
             or `lsm`, which do not have this limit",
        ),
        E::KeyTooLong { .. } | E::ValueTooLong { .. } | E::WalRecordTooLarge { .. } => {
            Error::invalid("Holt takes keys and values of up to 64 KiB: insert shorter runs")
        }
        E::BlobStoreIo(_) => Error::fatal(
            "Holt could not read or write its files: check the disk, and open the index again",
        ),
        _ => Error::fatal(
            "Holt's files are damaged: close the index and open it again, which drops damaged files; \
             or remove the index's directory",
        ),
    };
    error.because(cause)
}
