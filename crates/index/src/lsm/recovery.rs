//! Opens the database of the index `lsm`: recovers from crashes and repairs damage.
//!
//! ```text
//! lsm/           the database
//! lsm.new/       the new database for the runs of a damaged database, until it is complete
//! lsm.old/       the damaged database, until the new database is named lsm/
//! lsm.damaged    marks damage: the next open copies the consistent runs into a new database
//! lsm.seal       the recorded length of RocksDB's manifest
//! ```
//!
//! A crash leaves a torn end of a log, which RocksDB does not replay. A database is damaged if
//! RocksDB cannot open it although its files are readable, or would never finish opening it, or its
//! manifest has become shorter, or damage was found in it. If the database does not open, RocksDB
//! repairs as many files as possible. Every consistent run of a damaged database, repaired or not,
//! is inserted into a new database, which takes the name of the old database. If no run can be
//! read, the index is empty.

use super::LsmIndex;
use super::claim::Claim;
use super::families::{Families, Names};
use super::gauges::Gauges;
use super::keys::{self, Family};
use super::options::LsmOptions;
use super::record::{Counts, Record};
use super::tuner::Tuner;
use super::write::Writer;
use super::{seal, wal_corruption};
use crate::sync::Mutex;
use crate::{NewRun, PrefixIndex, RunId};
use ritornello_format::{Error, ErrorKind, PageHash, Result};
use rocksdb::{DB, Options};
use std::collections::HashMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::OnceLock;
use std::{fs, io};

/// Numbers of runs that [`LsmIndex::open`] recovered and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LsmRecovered {
    /// Whether the database was damaged, so that its consistent runs were copied into a new
    /// database.
    pub damaged: bool,
    /// Runs that were copied into the new database.
    pub saved_runs: u64,
    /// Runs dropped as inconsistent, including their descendants; does not count runs whose records
    /// RocksDB could not read.
    pub dropped_runs: u64,
}

/// Unsynced bytes above which a new database is synced while the runs of a damaged database are
/// copied into it.
const SYNC_BYTES: u64 = 1 << 20;

/// Maximum bytes of each file that RocksDB writes and does not need at the next open: its messages,
/// its identity and the record of its options (36 KiB). The messages exceed their limit of 64 KiB
/// by at most the header that each open writes.
const UNNEEDED_BYTES_MAX: u64 = 256 << 10;

pub(super) fn open(dir: &Path, options: &LsmOptions) -> Result<LsmIndex> {
    let names = Names::of(dir);
    refuse_in_forked_child(dir)?;
    // RocksDB would create a directory that all users can read.
    let mut private = fs::DirBuilder::new();
    private.recursive(true).mode(0o700).create(dir).map_err(|error| refused(dir, error))?;
    let identity = fs::metadata(dir).map_err(|error| refused(dir, error))?;
    let claim = Claim::take(dir, &identity)?;
    let mut index = open_claimed(dir, &names, options)?;
    index.claim = Some(claim);
    Ok(index)
}

fn open_claimed(dir: &Path, names: &Names, options: &LsmOptions) -> Result<LsmIndex> {
    finish_interrupted_save(names).map_err(|error| refused(dir, error))?;
    remove_oversized(&names.database).map_err(|error| refused(dir, error))?;
    let corrupt_logs =
        wal_corruption::find_in_logs(&names.database).map_err(|error| refused(dir, error))?;
    if !corrupt_logs.is_empty() {
        // Mark the damage before the truncation: if the process dies in between, the next open must
        // know of the damage, because a truncated log looks intact.
        fs::write(&names.marker, b"").map_err(|error| refused(dir, error))?;
        wal_corruption::truncate_logs(&corrupt_logs).map_err(|error| refused(dir, error))?;
    }
    if !names.marker.exists() {
        match try_open(names, options) {
            Ok(index) if !options.verify || index.db.is_consistent() => {
                index.db.seal();
                return Ok(index);
            }
            Ok(_) if !names.marker.exists() => {
                return Err(refused(dir, "a file of the database cannot be read"));
            }
            Ok(_) => {}
            Err(OpenFailure::Refused(error)) => return Err(error),
            Err(OpenFailure::Damage(error)) => {
                tracing::warn!(%error, dir = %dir.display(), "the index does not open: repairing it");
                fs::write(&names.marker, b"").map_err(|error| refused(dir, error))?;
            }
        }
    }
    save(names, options)
}

/// Refuses to open in a forked child of a process that has used RocksDB. All databases share
/// RocksDB's threads, which belong to the process that opened the first database: a child does not
/// have these threads, and would wait for them forever.
pub(crate) fn refuse_in_forked_child(dir: &Path) -> Result<()> {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    let this = std::process::id();
    if *PROCESS.get_or_init(|| this) == this {
        return Ok(());
    }
    Err(Error::fatal(
        "the index lsm does not work in a forked child of a process that has used it: \
         start the process anew instead, or use the index `run`",
    )
    .with("dir", dir.display()))
}

enum OpenFailure {
    /// The open was refused, and the files are not known to be damaged.
    Refused(Error),
    /// The database is damaged: a repair may recover runs.
    Damage(Box<dyn std::error::Error + Send + Sync>),
}

/// Completes or reverts a replacement of the database that a crash interrupted.
fn finish_interrupted_save(names: &Names) -> io::Result<()> {
    remove(&names.new)?;
    if names.old.exists() {
        if names.database.exists() {
            // Remove the marker only now, when the new database has its final name.
            let _ = fs::remove_file(&names.marker);
            remove(&names.old)?;
        } else {
            fs::rename(&names.old, &names.database)?;
        }
    }
    Ok(())
}

fn sync_directory(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |dir| fs::File::open(dir)?.sync_all())
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn try_open(names: &Names, options: &LsmOptions) -> std::result::Result<LsmIndex, OpenFailure> {
    let path = &names.database;
    let refuse = |error| OpenFailure::Refused(refused(path, error));
    if is_unfinished(path) {
        if holds_entries(path).map_err(refuse)? {
            return Err(OpenFailure::Damage(
                "the file CURRENT is missing, but tables exist".into(),
            ));
        }
        remove(path).map_err(refuse)?;
    }
    if is_manifest_broken(names) {
        return Err(OpenFailure::Damage("the manifest is damaged, or has lost its end".into()));
    }
    let opened = match Families::open(path, names, options) {
        Err(error) if lacks_families(&error) && !holds_entries(path).map_err(refuse)? => {
            remove(path).map_err(refuse)?;
            Families::open(path, names, options)
        }
        opened => opened,
    };
    let db = opened.map_err(|error| classify(path, error))?;
    match db.counts() {
        Ok(counts) => {
            let counts = counts.unwrap_or_default();
            Ok(index(db, counts, options, LsmRecovered::default()))
        }
        Err(error) if error.kind() == ErrorKind::Invalid => {
            Err(OpenFailure::Refused(error.with("dir", path.display())))
        }
        Err(error) => Err(OpenFailure::Damage(Box::new(error))),
    }
}

fn index(db: Families, counts: Counts, options: &LsmOptions, recovered: LsmRecovered) -> LsmIndex {
    LsmIndex {
        gauges: Gauges::new(options.budget, &counts),
        db,
        tuner: Tuner::new(options),
        probe: options.probe,
        writer: Mutex::new(Writer { counts }),
        touched: Mutex::new(HashMap::new()),
        syncing: Mutex::new(()),
        compacting: Mutex::new(0),
        recovered,
        claim: None,
    }
}

/// Removes files that RocksDB does not need and that are longer than RocksDB writes them, because
/// another file was put in their place. RocksDB would keep such a file, and its bytes would count
/// towards the index's budget forever. Truncates `LOCK`, which RocksDB leaves empty, and does not
/// remove it: the lock of another process is on its inode.
fn remove_oversized(database: &Path) -> io::Result<()> {
    if !database.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(database)? {
        let entry = entry?;
        let (name, length) = (entry.file_name(), entry.metadata()?.len());
        let name = name.to_string_lossy();
        if name == "LOCK" && length > 0 {
            fs::OpenOptions::new().write(true).open(entry.path())?.set_len(0)?;
        } else if length > UNNEEDED_BYTES_MAX
            && ["IDENTITY", "LOG", "OPTIONS-"].iter().any(|kind| name.starts_with(kind))
        {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether `CURRENT` is missing, because creating the database was interrupted or the file was
/// lost. RocksDB would create a new database in the directory, and delete the existing files.
fn is_unfinished(path: &Path) -> bool {
    path.exists() && !path.join("CURRENT").exists()
}

/// Whether the manifest is shorter than its recorded length, or has a record that RocksDB would
/// read in an endless loop, so that RocksDB must not open the database from it.
fn is_manifest_broken(names: &Names) -> bool {
    seal::is_broken(&names.database, &names.seal) || wal_corruption::is_in_manifest(&names.database)
}

/// Whether any file may hold entries. If no file may hold entries, creating the database was
/// interrupted.
fn holds_entries(path: &Path) -> io::Result<bool> {
    let mut holds = false;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        holds |= name.ends_with(".sst") || (name.ends_with(".log") && entry.metadata()?.len() > 0);
    }
    Ok(holds)
}

/// Whether this process or another process has the database open. RocksDB reports this only in the
/// text of the error.
pub(crate) fn is_open_already(error: &rocksdb::Error) -> bool {
    let text = error.to_string();
    let texts = ["IO error: While lock file: ", "IO error: lock hold by current process"];
    texts.iter().any(|words| text.starts_with(words))
}

/// Whether a database lacks column families of the index: they were never created, or were lost.
fn lacks_families(error: &rocksdb::Error) -> bool {
    error.kind() == rocksdb::ErrorKind::InvalidArgument
        && error.to_string().contains("Column family not found")
}

/// Distinguishes damage of the database from a file system that refuses access.
fn classify(path: &Path, error: rocksdb::Error) -> OpenFailure {
    let text = error.to_string();
    if is_open_already(&error) {
        return OpenFailure::Refused(
            Error::retry("the index is open already, here or in another process: close it first")
                .with("dir", path.display())
                .because(error),
        );
    }
    if text.contains("Column families not opened") {
        return OpenFailure::Refused(
            Error::invalid(
                "the index has an unknown format: open it with the version that wrote it",
            )
            .with("dir", path.display())
            .because(error),
        );
    }
    let is_missing_file = text.contains("No such file");
    if error.kind() == rocksdb::ErrorKind::IOError && !is_missing_file {
        return OpenFailure::Refused(refused(path, error));
    }
    OpenFailure::Damage(Box::new(error))
}

fn refused(path: &Path, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::fatal("the index cannot be opened: check its directory and its disk")
        .with("dir", path.display())
        .because(error)
}

/// Copies the consistent runs into a new database.
fn save(names: &Names, options: &LsmOptions) -> Result<LsmIndex> {
    let path = &names.database;
    let mut recovered = LsmRecovered { damaged: true, ..LsmRecovered::default() };
    let old = open_damaged(names, options)?;
    if old.is_none() {
        tracing::error!(
            dir = %path.display(),
            "the index cannot be repaired and is dropped: the store starts without pages"
        );
    }
    // Remove the seal: it records the length of a manifest of the old database, and a manifest of
    // the new database may have the same name.
    match fs::remove_file(&names.seal) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(refused(&names.seal, error));
        }
        _ => {}
    }
    let new =
        Families::open(&names.new, names, options).map_err(|error| refused(&names.new, error))?;
    // Copy without a budget: recovered runs are kept even if they exceed the budget.
    let unbounded = LsmOptions { budget: u64::MAX, ..options.clone() };
    let mut saved = index(new, Counts::default(), &unbounded, recovered);
    if let Some(old) = old {
        (recovered.saved_runs, recovered.dropped_runs) = copy(&old, &saved)?;
    }
    saved.sync()?;
    saved.recovered = recovered;
    let clean = !saved.db.is_poisoned();
    drop(saved);
    if !clean {
        return Err(refused(&names.new, "the new database cannot be written"));
    }
    let place = |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| refused(to, error));
    place(path, &names.old).or_else(|error| if path.exists() { Err(error) } else { Ok(()) })?;
    place(&names.new, path)?;
    // Make the new name durable, which syncs inside the new database do not.
    sync_directory(path).map_err(|error| refused(path, error))?;
    finish_interrupted_save(names).map_err(|error| refused(path, error))?;
    let _ = fs::remove_file(&names.marker);
    tracing::warn!(
        saved = recovered.saved_runs,
        dropped = recovered.dropped_runs,
        dir = %path.display(),
        "the index was damaged: consistent runs were copied into a new database"
    );
    match try_open(names, options) {
        Ok(mut index) => {
            index.db.seal();
            index.recovered = recovered;
            Ok(index)
        }
        Err(OpenFailure::Refused(error)) => Err(error),
        Err(OpenFailure::Damage(error)) => Err(refused(path, error)),
    }
}

/// Opens the damaged database, repaired if necessary. `None` if it cannot be opened.
fn open_damaged(names: &Names, options: &LsmOptions) -> Result<Option<Families>> {
    let path = &names.database;
    let open = || Families::open(path, names, options).map_err(|error| classify(path, error));
    // Opening a damaged database without a repair would delete the files that its manifest does not
    // name.
    let is_listed = !is_unfinished(path) && !is_manifest_broken(names);
    match if is_listed { open() } else { Err(OpenFailure::Damage("unlisted files".into())) } {
        Ok(db) => return Ok(Some(db)),
        Err(OpenFailure::Refused(error)) => return Err(error),
        Err(OpenFailure::Damage(_)) => {}
    }
    if let Err(error) = DB::repair(&Options::default(), path) {
        tracing::warn!(%error, dir = %path.display(), "the index could not be repaired");
        return Ok(None);
    }
    let repaired = Families::open_remaining(path, names, options);
    match repaired.map_err(|error| classify(path, error)) {
        Ok(db) => Ok(Some(db)),
        Err(OpenFailure::Refused(error)) => Err(error),
        Err(OpenFailure::Damage(error)) => {
            tracing::warn!(%error, dir = %path.display(), "the repaired index does not open");
            Ok(None)
        }
    }
}

/// Inserts every consistent run of `old` into `new`. Returns the numbers of runs copied and
/// dropped.
fn copy(old: &Families, new: &LsmIndex) -> Result<(u64, u64)> {
    let mut names: HashMap<RunId, RunId> = HashMap::new();
    let mut later = Vec::new();
    let (mut dropped, mut failed) = (0, None);
    let (mut start, mut stride) = (0u64, 1u64);
    loop {
        let mut seen = None;
        let whole = old.scan(Family::Run, &keys::run(RunId(start)), |key, value| {
            let Some(run) = keys::read_run(key) else { return true };
            seen = Some(run.0);
            let saved = save_run(old, new, &names, run, value).and_then(|saved| {
                if new.gauges.pending() > SYNC_BYTES {
                    new.sync()?;
                }
                Ok(saved)
            });
            match saved {
                Ok(Saved::As(name)) => drop(names.insert(run, name)),
                Ok(Saved::Later(name, parent, page)) => {
                    names.insert(run, name);
                    later.push((name, parent, page));
                }
                Ok(Saved::Not) => dropped += 1,
                Err(error) => failed = Some(error),
            }
            failed.is_none()
        });
        if let Some(error) = failed {
            return Err(error);
        }
        // After an unreadable entry, continue the scan at a higher run number. While no entry can
        // be read, double the step, so that a long unreadable part takes few scans.
        stride = if seen.is_some() { 1 } else { stride.saturating_mul(2) };
        let behind = seen.unwrap_or(start).checked_add(stride);
        match behind {
            Some(behind) if !whole => start = behind,
            _ => break,
        }
    }
    // Link the runs in `later` to their parents, which were inserted after them, and remove runs
    // whose parents were not inserted.
    for (name, parent, page) in later {
        let first = new.page(name, 0);
        let parent = names.get(&parent).and_then(|parent| new.page(*parent, page.into()));
        let scope = new.run(name).map(|view| view.scope);
        match (scope, parent, first) {
            (Some(scope), Some(parent), Some(first)) => new.link(scope, parent, first),
            _ => dropped += new.truncate(name, 0).iter().filter(|gone| gone.whole).count() as u64,
        }
    }
    if let Ok(Some(counts)) = old.counts() {
        new.retain(&[], counts.clock);
    }
    let saved = new.stats().runs;
    Ok((saved, dropped))
}

enum Saved {
    /// The run was inserted under this name.
    As(RunId),
    /// The run was inserted without its parent, which is inserted later: the run's name in the new
    /// database, the parent's name in the old database, and the page of the parent.
    Later(RunId, RunId, u16),
    /// The run is inconsistent, or its parent was not inserted: the run was not inserted.
    Not,
}

/// Inserts the run `run` of `old`, whose record is `value`, into `new`. `names` maps the names in
/// `old` of the runs that were inserted before to their names in `new`.
fn save_run(
    old: &Families,
    new: &LsmIndex,
    names: &HashMap<RunId, RunId>,
    run: RunId,
    value: &[u8],
) -> Result<Saved> {
    let Ok(record) = Record::decode(value) else { return Ok(Saved::Not) };
    let hashes = old.hashes(run, &record, 0);
    let live = hashes.iter().filter(|hash| **hash != PageHash::NONE).count();
    let Some(used) = old.used(run) else { return Ok(Saved::Not) };
    let holes_where_none_can_be = record.chained && live != hashes.len();
    if live != usize::from(record.live) || holes_where_none_can_be {
        return Ok(Saved::Not);
    }
    let (parent, later) = match record.parent {
        None => (None, None),
        Some((parent, page)) => match names.get(&parent) {
            Some(name) => match new.page(*name, page.into()) {
                Some(hash) => (Some(hash), None),
                None => return Ok(Saved::Not),
            },
            None if parent > run => (None, Some((parent, page))),
            None => return Ok(Saved::Not),
        },
    };
    // A removed page has no hash. Insert the run with a substitute hash for each removed page, and
    // remove the substitutes after that.
    let mut filled = hashes.clone();
    let mut stand_ins = Vec::new();
    for (page, hash) in (0..=u16::MAX).zip(&mut filled).filter(|(_, hash)| **hash == PageHash::NONE)
    {
        hash.0[..10].copy_from_slice(&keys::page_position(run, page));
        hash.0[10..].fill(0xa5);
        stand_ins.push(*hash);
    }
    let inserted = new.insert(&NewRun {
        scope: record.scope,
        chained: record.chained,
        parent,
        pages: &filled,
        place: &record.place,
        recency: used.recency,
    });
    let name = match inserted {
        Ok(name) => name,
        Err(error) if error.kind() == ErrorKind::Fatal => return Err(error),
        Err(_) => return Ok(Saved::Not),
    };
    new.remove(record.scope, &stand_ins);
    if used.retain_until > 0 {
        new.retain(&[(name, used.retain_until)], 0);
    }
    Ok(match later {
        Some((parent, page)) => Saved::Later(name, parent, page),
        None => Saved::As(name),
    })
}
