//! Opens the index `run`: loads the newest exact checkpoint, and replays the journal that follows
//! the checkpoint.
//!
//! Replay finds runs by their names (`RunId`). Replay is idempotent: a record that inserts a run
//! has no effect if the run is already restored, and every other record about a run has no effect
//! if the run does not exist. After the replay, recovery builds the slot table and the tree of
//! attachments, and drops inconsistent runs together with their descendants.
//!
//! Files are **undamaged** if all of these conditions hold:
//!
//! * A checkpoint loads, or the journal is empty or has its first record.
//! * The journal has all changes that the loaded checkpoint may show.
//! * At most a torn frame follows the journal's last record, and the disk can read the journal.
//!
//! A part that the disk cannot read (`EIO`) counts as damaged, after it was read twice. If the
//! other parts do not restore everything, all files are read once more after a pause, because the
//! fault may be temporary.
//!
//! The open of undamaged files truncates the torn frame, and syncs the checkpoint, the journal
//! files and the directory, so that all recovered changes are durable.
//!
//! **Rewriting.** All other states are damage, and a later recovery must not read the files that
//! this recovery skipped. After an unclean end ([`RunOptions::clean`]) even files that look
//! undamaged may have been read from the page cache only. After a failed sync the kernel keeps
//! bytes in the page cache that are not on the disk, and no later sync writes them. The open
//! therefore writes the recovered state into new files before the index is used: after damage,
//! after an unclean end, if the disk could not read a part of the files, when runs got new names,
//! and when an earlier rewriting was interrupted. The steps:
//!
//! 1. Create an empty journal file after all other journal files, durably.
//! 2. Write a checkpoint that this file follows to `checkpoint-new`, durably.
//! 3. Rename `checkpoint-new` to one of the two checkpoints, and sync the directory.
//! 4. Remove the other checkpoint, then the older journal files.
//!
//! No file that was read is changed before step 3. A checkpoint that looks intact in the page cache
//! may be damaged on the disk; the other checkpoint and its journal are then the only valid state.
//! Power loss before the end of step 3 leaves the old files and an empty journal file, which is not
//! damage; after step 3 the new checkpoint suffices. `checkpoint-new` is never read, and the next
//! open removes it.
//!
//! Until step 4 the files may exceed the budget by the new checkpoint. If the file system has no
//! room for the new checkpoint, the open fails with `Retry`, reports the bytes that the checkpoint
//! needs, and leaves the old files unchanged. No old file can be removed first, because each may be
//! needed. No old file is overwritten in place, because a disk that has just failed may tear the
//! only copy.

use super::checkpoint::{self, CheckpointFile, Checkpoints};
use super::frames::{Frames, Next, read_twice};
use super::journal::{self, Journal, JournalFile, write_refused};
use super::options::checkpoint_bytes;
use super::pending::Pending;
use super::replay::{Restored, finish};
use super::{Gauges, Recovered, RunIndex, RunOptions};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};
use ritornello_format::checkpoint::{CheckpointEnd, CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{JournalHeader, JournalRecord};
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_medium::{Access, Medium, MediumFile, is_unreadable};
use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(super) const READ: Access = Access { write: false, create: false, direct: false };
const WRITE: Access = Access { write: true, create: false, direct: false };
/// Pause before the files are read again, if the disk cannot read a part of them and the other
/// parts do not restore everything.
const REREAD_PAUSE: Duration = Duration::from_millis(500);

/// The result of a replay of journal files.
#[derive(Debug, Default)]
struct Replayed {
    records: u64,
    /// Sequence number of the last record that was replayed.
    last: u64,
    /// Number of the file to append to, which is the last file that was read, and the offset after
    /// its last intact record. `None` if no file was read, or the last file has no valid header
    /// whose first sequence number follows `last`.
    tail: Option<(u64, u64)>,
    /// Number of the last file that was read.
    ended_in: u64,
    torn_bytes: u64,
    /// Whether files after `ended_in` may have records that were not replayed, the file at which
    /// the replay should begin is missing, or the disk cannot read the record at which the replay
    /// ended.
    damaged: bool,
}

/// The result of recovering from one checkpoint, or from the journal alone. The default is an empty
/// index.
#[derive(Debug, Default)]
struct Attempt {
    restored: Restored,
    replayed: Replayed,
    /// Number of the checkpoint file that was loaded; `None` if only the journal was read.
    slot: Option<usize>,
    exact: bool,
}

pub(super) fn open(medium: Arc<dyn Medium>, dir: &Path, options: RunOptions) -> Result<RunIndex> {
    medium.create_dir(dir)?;
    match medium.remove(&checkpoint::path_of_new(dir)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let numbers = journal::numbers(medium.as_ref(), dir)?;
    let mut files = Vec::new();
    for &number in &numbers {
        let bytes = medium.open(&journal::path(dir, number), READ)?.length()?;
        files.push(JournalFile { number, bytes });
    }
    let newest = newest_with_records(&files);
    let unreadable = Cell::new(false);
    let source =
        Source { medium: medium.as_ref(), dir, numbers: &numbers, newest, unreadable: &unreadable };
    let mut found = source.recover()?;
    if unreadable.get() && !found.is_undamaged() {
        drop(found);
        std::thread::sleep(REREAD_PAUSE);
        unreadable.set(false);
        found = source.recover()?;
    }
    let undamaged = found.is_undamaged();
    let Found { headers, attempt, .. } = found;
    let Attempt { restored, replayed, slot, exact } = attempt;
    let (mut tables, dropped) = finish(restored, !exact);
    let renumbered = tables.runs.renumber();
    let next = replayed.last + 1;

    let last = numbers.last().copied();
    // Without any file, or with one journal file without records, no change was ever durable.
    let is_empty =
        undamaged && numbers.len() < 2 && newest == 0 && headers == [None; 2] && !unreadable.get();
    // If the replay ended before the last file, an earlier open was interrupted while it rewrote
    // the index: the empty journal file of that open follows a file with a torn frame.
    let is_last = last.is_none_or(|last| last == replayed.ended_in);
    let is_intact = options.clean && undamaged && is_last && !renumbered && !unreadable.get();
    let must_rewrite = !is_intact && !is_empty;
    let file = match replayed.tail {
        _ if must_rewrite => {
            let number = last.unwrap_or(0).max(newest_journal(&headers)) + 1;
            let header = JournalHeader { number, first: next };
            let created = journal::create(medium.as_ref(), dir, header);
            let (file, entry) = created.map_err(|error| write_refused(dir, error))?;
            files.push(entry);
            file
        }
        Some((number, position)) if Some(number) == last && options.clean => {
            let file = medium.open(&journal::path(dir, number), WRITE)?;
            if replayed.torn_bytes > 0 {
                file.set_len(position)?;
            }
            if let Some(last) = files.last_mut() {
                last.bytes = position;
            }
            file
        }
        _ => {
            // The index is new, or its only journal file has no records, or a kill or power loss
            // interrupted the creation of the last journal file: create the last journal file anew.
            let number = files.pop().map_or(1, |file| file.number);
            let header = JournalHeader { number, first: next };
            let (file, entry) = journal::create(medium.as_ref(), dir, header)?;
            files.push(entry);
            file
        }
    };
    if !must_rewrite {
        // The recovered bytes may be in the page cache only, for example if the caller does not
        // know how the previous process ended. After this sync the index may treat them as durable.
        let checkpoint = slot.map(|slot| checkpoint::path(dir, slot));
        let journals = numbers.iter().map(|number| journal::path(dir, *number));
        for path in checkpoint.into_iter().chain(journals) {
            medium.open(&path, READ)?.sync_data()?;
        }
        medium.sync_dir(dir)?;
    }
    let recovered = Recovered {
        replayed: replayed.records,
        torn_bytes: replayed.torn_bytes,
        damaged: !undamaged,
        dropped_runs: dropped.len() as u64,
    };
    if recovered.damaged || recovered.torn_bytes > 0 || recovered.dropped_runs > 0 {
        tracing::warn!(dir = %dir.display(), ?recovered, "the index was incomplete; opened with the records that could be recovered");
    }
    let journal = Journal::new(file, files, replayed.last);
    let index = RunIndex {
        checkpoints: Mutex::new(checkpoints_of(&headers, slot, journal.first_number())),
        gauges: gauges(&journal, medium.as_ref(), dir, options.metadata_bytes_max)?,
        journal: Mutex::new(journal),
        pending: Mutex::new(Pending::new(next)),
        tables: RwLock::new(tables),
        touched: Mutex::new(Vec::new()),
        medium,
        dir: dir.to_owned(),
        options,
        recovered,
    };
    if must_rewrite {
        // The new checkpoint does not contain the dropped runs, so no journal record removes them.
        index.rewrite(next)?;
    } else if !dropped.is_empty() {
        let mut pending = index.pending.lock();
        for section in dropped.chunks(1024) {
            let entries = section.iter().map(|run| (run.0, 0)).collect();
            index.append(&mut pending, &JournalRecord::Cut(entries));
        }
    }
    Ok(index)
}

impl RunIndex {
    /// Steps 2 to 4 of [rewriting](self). The current journal file is new and empty, and its first
    /// record will be `first`.
    fn rewrite(&self, first: u64) -> Result<()> {
        let mut checkpoints = self.checkpoints.lock();
        let journal = self.journal.lock().current().number;
        let header = CheckpointHeader { id: checkpoints.last_id + 1, journal, first };
        checkpoints.last_id = header.id;
        let new = checkpoint::path_of_new(&self.dir);
        let bytes = match self.write_checkpoint(&new, header, &|| Ok(())) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::Retry => {
                // Free the room of the new checkpoint. If its removal fails, the next open removes
                // it.
                let _ = self.medium.remove(&new);
                let _ = self.medium.remove(&journal::path(&self.dir, journal));
                let images = self.tables.read().runs.image_bytes;
                let needed = checkpoint_bytes(images, self.options.checkpoint_write_bytes);
                return Err(error.with("bytes", needed));
            }
            Err(error) => return Err(error),
        };
        let slot = checkpoints.next();
        let named = self.medium.rename(&new, &checkpoint::path(&self.dir, slot));
        self.or_poison(named.and_then(|()| self.medium.sync_dir(&self.dir)))?;
        self.count_checkpoint(slot, bytes);

        let other = 1 - slot;
        checkpoints.files[slot] = CheckpointFile { id: header.id, journal };
        checkpoints.files[other] = CheckpointFile { id: 0, journal };
        let gone = match self.medium.remove(&checkpoint::path(&self.dir, other)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.medium.sync_dir(&self.dir),
        };
        self.or_poison(gone)?;
        self.gauges.checkpoints[other].store(0, Ordering::Relaxed);
        self.remove_before(journal)
    }
}

/// Number of the last journal file that is longer than its header, or zero.
fn newest_with_records(files: &[JournalFile]) -> u64 {
    let long = |file: &&JournalFile| file.bytes > JournalHeader::BYTES as u64;
    files.iter().rev().find(long).map_or(0, |file| file.number)
}

fn newest_journal(headers: &[Option<CheckpointHeader>; 2]) -> u64 {
    headers.iter().flatten().map(|header| header.journal).max().unwrap_or(0)
}

/// Returns the state of the two checkpoint files. `used` is the number of the file that was loaded,
/// `first` the lowest number of an existing journal file. The next checkpoint overwrites a file
/// that was not loaded.
fn checkpoints_of(
    headers: &[Option<CheckpointHeader>; 2],
    used: Option<usize>,
    first: u64,
) -> Checkpoints {
    let files = [0, 1].map(|slot| match headers[slot] {
        Some(header) if used == Some(slot) => {
            CheckpointFile { id: header.id, journal: header.journal }
        }
        // This checkpoint is older than the loaded checkpoint.
        Some(header)
            if used.is_some_and(|used| headers[used].is_some_and(|u| u.id > header.id)) =>
        {
            CheckpointFile { id: header.id, journal: header.journal.max(first) }
        }
        _ => CheckpointFile { id: 0, journal: first },
    });
    let last_id = headers.iter().flatten().map(|header| header.id).max().unwrap_or(0);
    Checkpoints { files, last_id }
}

fn gauges(journal: &Journal, medium: &dyn Medium, dir: &Path, budget: u64) -> Result<Gauges> {
    let length = |slot| -> Result<AtomicU64> {
        match medium.open(&checkpoint::path(dir, slot), READ) {
            Ok(file) => Ok(AtomicU64::new(file.length()?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(AtomicU64::new(0)),
            Err(error) => Err(error.into()),
        }
    };
    Ok(Gauges {
        poisoned: AtomicBool::new(false),
        budget: AtomicU64::new(budget),
        pending: AtomicU64::new(0),
        journals: AtomicU64::new(journal.bytes()),
        journal: AtomicU64::new(journal.current().bytes),
        journal_files: AtomicU64::new(journal.count()),
        checkpoints: [length(0)?, length(1)?],
        written: AtomicU64::new(0),
        made: AtomicU64::new(0),
    })
}

/// The header of a checkpoint file; `None` if there is no file, no intact header in it, or if the
/// disk cannot read the header, which sets `unreadable`.
pub(super) fn read_checkpoint_header(
    medium: &dyn Medium,
    dir: &Path,
    slot: usize,
    unreadable: &Cell<bool>,
) -> Result<Option<CheckpointHeader>> {
    let file = match medium.open(&checkpoint::path(dir, slot), READ) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut bytes = [0; CheckpointHeader::BYTES];
    let read = read_twice(file.as_ref(), &mut bytes, 0);
    let Some(read) = none_if_unreadable(read, unreadable)? else { return Ok(None) };
    none_if_damaged(CheckpointHeader::decode(&bytes[..read]))
}

/// Turns the error of a read that the disk cannot do into `None`, and notes it in `unreadable`.
fn none_if_unreadable<T>(read: io::Result<T>, unreadable: &Cell<bool>) -> Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_unreadable(&error) => {
            tracing::warn!(%error, "a part of the index cannot be read");
            unreadable.set(true);
            Ok(None)
        }
        Err(error) => Err(Error::from(error)),
    }
}

/// Turns damage into `None`; an unknown format version stays an error.
fn none_if_damaged<T>(decoded: Result<T>) -> Result<Option<T>> {
    match decoded {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::Miss => Ok(None),
        Err(error) => Err(error),
    }
}

/// The files of an index, as a source of recovery.
#[derive(Clone, Copy, Debug)]
struct Source<'a> {
    medium: &'a dyn Medium,
    dir: &'a Path,
    /// Numbers of the journal files, ascending.
    numbers: &'a [u64],
    /// Number of the last journal file that may hold records.
    newest: u64,
    /// Set if the disk could not read a part of the files.
    unreadable: &'a Cell<bool>,
}

/// The state that the files restore.
#[derive(Debug)]
struct Found {
    headers: [Option<CheckpointHeader>; 2],
    attempt: Attempt,
    /// Whether the chosen source has all changes up to the end of its replay.
    is_whole: bool,
}

impl Found {
    fn is_undamaged(&self) -> bool {
        self.is_whole && !self.attempt.replayed.damaged
    }
}

impl Source<'_> {
    fn recover(&self) -> Result<Found> {
        let mut headers = [None; 2];
        for (slot, header) in headers.iter_mut().enumerate() {
            *header = read_checkpoint_header(self.medium, self.dir, slot, self.unreadable)?;
        }
        let (attempt, is_whole) = self.choose(&headers)?;
        Ok(Found { headers, attempt, is_whole })
    }

    /// Recovers from the first of these sources that exists: the newest exact checkpoint; a journal
    /// that has its first record; the newest intact checkpoint; a journal without its beginning, if
    /// the header of its first file is intact. Without such a source the index is empty. Returns
    /// the result, and whether the files were undamaged.
    fn choose(&self, headers: &[Option<CheckpointHeader>; 2]) -> Result<(Attempt, bool)> {
        let mut slots: Vec<(usize, CheckpointHeader)> =
            (0..2).filter_map(|slot| Some((slot, headers[slot]?))).collect();
        slots.sort_by_key(|(_, header)| std::cmp::Reverse(header.id));
        let mut inexact: Option<Attempt> = None;
        for (slot, header) in slots {
            let Some((mut restored, end)) = self.load(slot, &header)? else { continue };
            let replayed = self.replay(&mut restored, header.journal, header.first)?;
            let exact = replayed.last >= end.last;
            let attempt = Attempt { restored, replayed, slot: Some(slot), exact };
            if exact {
                return Ok((attempt, inexact.is_none()));
            }
            inexact.get_or_insert(attempt);
        }
        // Without an exact checkpoint, use the journal alone if its first record still exists.
        let first = self.numbers.first().copied();
        let header = match first {
            Some(first) => self.journal_header(first, self.unreadable)?,
            None => None,
        };
        let mut restored = Restored::default();
        let mut attempt = |number, first, exact| -> Result<Attempt> {
            let replayed = self.replay(&mut restored, number, first)?;
            Ok(Attempt { restored: std::mem::take(&mut restored), replayed, slot: None, exact })
        };
        match (first, header) {
            (Some(number), Some(header)) if header.first == 1 => {
                Ok((attempt(number, 1, true)?, inexact.is_none()))
            }
            _ if inexact.is_some() => Ok((inexact.unwrap_or_default(), false)),
            // The index is new, or the creation of its first file was interrupted.
            (None, _) => {
                let attempt = Attempt { exact: true, ..Attempt::default() };
                Ok((attempt, !self.unreadable.get()))
            }
            (Some(1), None) if self.newest == 0 && !self.unreadable.get() => {
                Ok((attempt(1, 1, true)?, true))
            }
            // No checkpoint is usable, and the journal lacks its beginning: runs in the missing
            // part are lost, and their descendants are dropped.
            (Some(number), Some(header)) => Ok((attempt(number, header.first, false)?, false)),
            (Some(_), None) => Ok((Attempt::default(), false)),
        }
    }

    /// Loads a checkpoint. `None` unless every frame can be read and is intact, and the last frame has the numbers
    /// of the runs and pages that were loaded.
    fn load(
        &self,
        slot: usize,
        header: &CheckpointHeader,
    ) -> Result<Option<(Restored, CheckpointEnd)>> {
        let file = self.medium.open(&checkpoint::path(self.dir, slot), READ)?;
        let mut frames = Frames::new(file, CheckpointHeader::BYTES as u64);
        let mut restored = Restored::default();
        for ordinal in 0.. {
            let next = none_if_unreadable(frames.next(), self.unreadable)?;
            let Some(Next::Frame(frame)) = next else { return Ok(None) };
            if frame.sequence != header.sequence(ordinal) {
                return Ok(None);
            }
            match CheckpointFrame::decode(frame.kind, frame.body) {
                Ok(CheckpointFrame::Runs(runs)) => {
                    for image in runs {
                        let Ok(image) = image else { return Ok(None) };
                        if !restored.insert(image) {
                            return Ok(None);
                        }
                    }
                }
                Ok(CheckpointFrame::Retained(retained)) => restored.retain(retained),
                Ok(CheckpointFrame::End(end)) => {
                    let agrees = (end.runs, end.pages) == restored.counts();
                    restored.note_reuse(end.reuse);
                    return Ok(agrees.then_some((restored, end)));
                }
                Err(_) => return Ok(None),
            }
        }
        Ok(None)
    }

    fn file(&self, number: u64) -> Result<Option<Arc<dyn MediumFile>>> {
        match self.medium.open(&journal::path(self.dir, number), READ) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn journal_header(
        &self,
        number: u64,
        unreadable: &Cell<bool>,
    ) -> Result<Option<JournalHeader>> {
        let Some(file) = self.file(number)? else { return Ok(None) };
        let mut bytes = [0; JournalHeader::BYTES];
        let read = read_twice(file.as_ref(), &mut bytes, 0);
        let Some(read) = none_if_unreadable(read, unreadable)? else { return Ok(None) };
        let header = none_if_damaged(JournalHeader::decode(&bytes[..read]))?;
        Ok(header.filter(|header| header.number == number))
    }

    /// Replays journal file `number` and the files that follow without a gap, starting at sequence
    /// number `first`.
    fn replay(&self, restored: &mut Restored, number: u64, first: u64) -> Result<Replayed> {
        let mut replayed = Replayed { last: first - 1, ..Replayed::default() };
        let newest = self.newest;
        for number in number.. {
            let Some(file) = self.file(number)? else {
                // A missing file ends the replay. Its absence is damage if a file with a higher
                // number may have records, or if the replay has read no file yet.
                replayed.damaged = newest > number || replayed.tail.is_none();
                return Ok(replayed);
            };
            replayed.ended_in = number;
            let length = file.length()?;
            let unread = Cell::new(false);
            let header = self.journal_header(number, &unread)?;
            if header.is_none_or(|header| header.first != replayed.last + 1) {
                replayed.tail = None;
                replayed.torn_bytes = length;
                let is_unreadable = self.note(&unread);
                replayed.damaged = number < newest || is_unreadable;
                return Ok(replayed);
            }
            let mut frames = Frames::new(file, JournalHeader::BYTES as u64);
            let position = loop {
                let position = frames.position();
                let next = none_if_unreadable(frames.next(), &unread)?;
                let Some(Next::Frame(frame)) = next else { break position };
                let record = JournalRecord::decode(frame.kind, frame.body);
                match record {
                    Ok(record) if frame.sequence == replayed.last + 1 => restored.apply(record),
                    _ => break position,
                }
                replayed.last += 1;
                replayed.records += 1;
            };
            replayed.tail = Some((number, position));
            replayed.torn_bytes = length.saturating_sub(position);
            let is_unreadable = self.note(&unread);
            if replayed.torn_bytes > 0 || is_unreadable {
                // A torn frame at the end of the last file does not count: no sync covered it. A
                // record that the disk cannot read may have been durable.
                replayed.damaged = number < newest || is_unreadable;
                return Ok(replayed);
            }
        }
        Ok(replayed)
    }

    /// Notes and returns whether the disk could not read a part of a journal file.
    fn note(&self, unread: &Cell<bool>) -> bool {
        self.unreadable.set(self.unreadable.get() || unread.get());
        unread.get()
    }
}
