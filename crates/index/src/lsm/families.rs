//! The database, and typed reads of its column families.

use super::controller::Controller;
use super::keys::{self, Family};
use super::meter::Meter;
use super::options::LsmOptions;
use super::record::{Counts, Record, Sum, Use};
use crate::RunId;
use crate::sync::{AtomicBool, Ordering};
use ritornello_format::{Error, PageHash, Result, ScopeSlot};
use rocksdb::{Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBPinnableSlice, Options};
use std::path::{Path, PathBuf};

/// RocksDB's default family.
const DEFAULT: &str = "default";
/// The key of the [`Counts`] in the family `default`.
pub(super) const COUNTS: &[u8] = b"counts";

/// The names in the index's directory, see [`super::recovery`].
#[derive(Clone)]
pub(super) struct Names {
    pub(super) database: PathBuf,
    pub(super) new: PathBuf,
    pub(super) old: PathBuf,
    pub(super) marker: PathBuf,
    pub(super) seal: PathBuf,
}

impl Names {
    pub(super) fn of(dir: &Path) -> Self {
        Self {
            database: dir.join("lsm"),
            new: dir.join("lsm.new"),
            old: dir.join("lsm.old"),
            marker: dir.join("lsm.damaged"),
            seal: dir.join("lsm.seal"),
        }
    }
}

/// An open database, with its column families and the parts that measure and tune it.
pub(super) struct Families {
    pub(super) db: DB,
    pub(super) cache: Cache,
    pub(super) options: Options,
    pub(super) controller: Controller,
    pub(super) meter: Meter,
    names: Names,
    poisoned: AtomicBool,
}

impl std::fmt::Debug for Families {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Families").field("path", &self.db.path()).finish_non_exhaustive()
    }
}

impl Families {
    /// Opens the database in `path`, which is one of `names`, or creates a database. Families that
    /// are missing in an existing database are not created: their loss is damage.
    pub(super) fn open(
        path: &Path,
        names: &Names,
        choices: &LsmOptions,
    ) -> std::result::Result<Self, rocksdb::Error> {
        let is_new = !path.join("CURRENT").exists();
        Self::open_with(path, names, choices, is_new)
    }

    /// Opens a repaired database, in which only the families with tables exist.
    pub(super) fn open_remaining(
        path: &Path,
        names: &Names,
        choices: &LsmOptions,
    ) -> std::result::Result<Self, rocksdb::Error> {
        Self::open_with(path, names, choices, true)
    }

    fn open_with(
        path: &Path,
        names: &Names,
        choices: &LsmOptions,
        creates_missing: bool,
    ) -> std::result::Result<Self, rocksdb::Error> {
        let mut options = choices.database();
        options.create_if_missing(creates_missing);
        options.create_missing_column_families(creates_missing);
        let cache = Cache::new_lru_cache(choices.block_cache_bytes as usize);
        let families = Family::ALL.map(|family| {
            ColumnFamilyDescriptor::new(family.name(), choices.family(&cache, family.is_filtered()))
        });
        let plain = ColumnFamilyDescriptor::new(DEFAULT, choices.family(&cache, false));
        let all = families.into_iter().chain([plain]);
        let db = DB::open_cf_descriptors(&options, path, all)?;
        Ok(Self {
            db,
            cache,
            options,
            controller: Controller::new(choices.mode),
            meter: Meter::new(choices),
            names: names.clone(),
            poisoned: AtomicBool::new(false),
        })
    }

    /// The handle of a column family.
    ///
    /// # Errors
    /// Never, because every family was opened with the database; the type cannot express this.
    pub(super) fn handle(&self, family: Family) -> Result<&ColumnFamily> {
        self.named(family.name())
    }

    fn named(&self, name: &'static str) -> Result<&ColumnFamily> {
        self.db.cf_handle(name).ok_or_else(|| {
            Error::fatal("the index lacks one of its column families: open the store again")
                .with("name", name)
        })
    }

    /// The handles of all families, and of the family of the [`Counts`].
    ///
    /// # Errors
    /// Errors of [`Self::handle`].
    pub(super) fn handles(&self) -> Result<Vec<&ColumnFamily>> {
        let names = Family::ALL.map(Family::name).into_iter().chain([DEFAULT]);
        names.map(|name| self.named(name)).collect()
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// Poisons the index after a failed read or write: the index then refuses writes, and reads
    /// continue where possible.
    pub(super) fn poison(&self, error: &rocksdb::Error) {
        // A file-system error does not prove damage of the files' contents.
        let refused = error.kind() == rocksdb::ErrorKind::IOError
            && !error.to_string().contains("No such file");
        if refused {
            if !self.poisoned.swap(true, Ordering::AcqRel) {
                tracing::error!(
                    %error,
                    path = %self.db.path().display(),
                    "RocksDB could not read or write a file: the index refuses writes until the \
                     store is opened again"
                );
            }
        } else {
            self.note_damage(error);
        }
    }

    /// Poisons the index because its contents are inconsistent, and creates the marker file, so
    /// that the next open copies the consistent runs into a new database. Does nothing if the index
    /// is poisoned already.
    pub(super) fn note_damage(&self, error: &dyn std::fmt::Display) {
        if self.poisoned.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::error!(
            %error,
            path = %self.db.path().display(),
            "the index is damaged: it is no longer written, and the next open repairs it"
        );
        if let Err(error) = std::fs::write(&self.names.marker, b"") {
            tracing::error!(
                %error,
                "the file that marks the index as damaged could not be written: the next open may \
                 miss the damage"
            );
        }
    }

    /// The value of a key; `None` if the key does not exist, or if it cannot be read, which poisons
    /// the index.
    pub(super) fn get(&self, family: Family, key: &[u8]) -> Option<DBPinnableSlice<'_>> {
        let read = self.handle(family).map(|handle| self.db.get_pinned_cf(handle, key));
        match read {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                self.poison(&error);
                None
            }
            Err(_) => None,
        }
    }

    /// The decoded value of a key; `None` if [`Self::get`] returns `None`, or if the value is
    /// malformed, which counts as damage.
    fn decoded<T>(&self, family: Family, key: &[u8], read: fn(&[u8]) -> Result<T>) -> Option<T> {
        match read(&self.get(family, key)?) {
            Ok(value) => Some(value),
            Err(error) => {
                self.note_damage(&error);
                None
            }
        }
    }

    /// The run of a page, and the page's number in the run. The controller counts the lookup.
    pub(super) fn find(&self, scope: ScopeSlot, hash: PageHash) -> Option<(RunId, u16)> {
        let Self { controller, meter, .. } = self;
        let key = keys::page(scope, hash);
        let found = meter.lookup(|| self.get(Family::Page, &key), Option::is_some);
        controller.looked_up(u64::from(found.is_some()), u64::from(found.is_none()));
        keys::read_page_position(&found?)
    }

    pub(super) fn record(&self, run: RunId) -> Option<Record> {
        self.decoded(Family::Run, &keys::run(run), Record::decode)
    }

    pub(super) fn used(&self, run: RunId) -> Option<Use> {
        self.decoded(Family::Use, &keys::run(run), Use::decode)
    }

    /// The stored counts.
    ///
    /// # Errors
    /// `Invalid` if the database has an unknown format; `Miss` if the counts cannot be read.
    pub(super) fn counts(&self) -> Result<Option<Counts>> {
        let unreadable = |error| Error::miss("the index's counts cannot be read").because(error);
        self.db.get(COUNTS).map_err(unreadable)?.map(|bytes| Counts::decode(&bytes)).transpose()
    }

    /// The hashes of pages `from..` of a run; [`PageHash::NONE`] for holes and for all pages before
    /// `from`.
    pub(super) fn hashes(&self, run: RunId, record: &Record, from: u16) -> Vec<PageHash> {
        let mut hashes = vec![PageHash::NONE; usize::from(record.pages)];
        let start = keys::path(record.scope, run, from);
        self.scan(Family::Path, &start, |key, value| {
            let here = keys::read_path(key).filter(|(s, r, _)| (*s, *r) == (record.scope, run));
            let Some((_, _, page)) = here else { return false };
            if let (Some(slot), Some(hash)) =
                (hashes.get_mut(usize::from(page)), keys::read_hash(value))
            {
                *slot = hash;
            }
            true
        });
        hashes
    }

    /// Visits keys and values in order, starting at `start`, until `visit` returns `false`. Returns
    /// `false` if an entry cannot be read, which ends the scan and poisons the index.
    pub(super) fn scan(
        &self,
        family: Family,
        start: &[u8],
        mut visit: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> bool {
        let Ok(handle) = self.handle(family) else { return false };
        let mut iterator = self.db.raw_iterator_cf(handle);
        self.controller.ranged(1);
        self.meter.seek(|| iterator.seek(start));
        while let Some((key, value)) = iterator.item() {
            if !visit(key, value) {
                return true;
            }
            iterator.next();
        }
        iterator.status().map_err(|error| self.poison(&error)).is_ok()
    }

    /// Whether every block of every family is readable and intact, and the entries match the
    /// checksum in the counts: no entry is missing or older than the counts.
    pub(super) fn is_consistent(&self) -> bool {
        let Ok(counts) = self.counts() else { return false };
        let mut sum = Sum::default();
        for family in Family::ALL {
            let Ok(handle) = self.handle(family) else { return false };
            let mut options = rocksdb::ReadOptions::default();
            options.fill_cache(false);
            options.set_readahead_size(1 << 20);
            let mut iterator = self.db.raw_iterator_cf_opt(handle, options);
            iterator.seek_to_first();
            while let Some((key, value)) = iterator.item() {
                sum.add(family, key, value);
                iterator.next();
            }
            if let Err(error) = iterator.status() {
                self.poison(&error);
                return false;
            }
        }
        let is_consistent = sum == counts.unwrap_or_default().sum;
        if !is_consistent {
            self.note_damage(&"entries are missing or out of date");
        }
        is_consistent
    }

    /// Writes the length of RocksDB's file MANIFEST to a file beside the database
    /// ([`super::seal`]), so that the next opening detects a MANIFEST that has lost its end.
    pub(super) fn seal(&self) {
        super::seal::write(self.db.path(), &self.names.seal);
    }

    /// Checks that the index is not poisoned.
    ///
    /// # Errors
    /// `Fatal` after a read or write has failed, or damage was found.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_poisoned() {
            return Err(Error::fatal(
                "the index is damaged or its disk failed: open the store again",
            ));
        }
        Ok(())
    }
}
