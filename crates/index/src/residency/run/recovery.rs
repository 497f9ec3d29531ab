//! Opens the residency backend `run` from its files.
//!
//! Each file begins with a copy of the whole state, and is *complete* if this copy is complete.
//! **Undamaged** files are one complete file, which may end in a torn frame; or, after a crash
//! during a copy, the newest file and the older files whose records precede its own without a gap.
//! Only damage leaves a gap. If the file after a gap is complete, it replaces all that was read
//! before; if not, it is skipped.
//!
//! A single complete file stays in use, without its torn frame. In all other cases, before the
//! index is used, the recovered state is written to a new file, and all other files are removed.

use super::journal::{self, Journal, Pending};
use super::{ResidencyRecovered, RunResidency, RunResidencyOptions, SWEPT};
use crate::residency::runs::Runs;
use crate::run::frames::{Frames, Next};
use crate::sync::{AtomicBool, AtomicU64, Mutex, RwLock};
use ritornello_format::residency::{ResidencyHeader, ResidencyRecord};
use ritornello_format::{ErrorKind, Result};
use ritornello_medium::{Access, Medium, MediumFile};
use std::path::Path;
use std::sync::Arc;

/// The runs and holders restored from the journal files read so far.
#[derive(Debug)]
struct Restored {
    runs: Runs,
    /// Sequence number of the last record that was applied.
    last: u64,
    /// Length of the intact part of the last file read.
    length: u64,
    /// Length of the last file when its initial copy was complete; zero if the copy is incomplete.
    copied: u64,
    is_whole: bool,
    recovered: ResidencyRecovered,
}

impl Restored {
    /// An empty state whose next record has the sequence number `last + 1`.
    fn new(last: u64) -> Self {
        let recovered = ResidencyRecovered::default();
        Self { runs: Runs::new(), last, length: 0, copied: 0, is_whole: false, recovered }
    }

    fn apply(&mut self, record: &ResidencyRecord<'_>) {
        self.runs.reclaim(SWEPT);
        match record {
            ResidencyRecord::Stored { scope, parent, holders, pages } => {
                if self.runs.has_room(pages.len()) {
                    self.runs.put(*scope, holders, *parent, pages);
                }
            }
            ResidencyRecord::Removed { scope, holder, pages } => {
                for page in pages.iter() {
                    self.runs.remove(*scope, holder.worker, holder.tiers, *page);
                }
            }
            ResidencyRecord::ClearedWorker(worker) => self.runs.clear_worker(*worker),
            ResidencyRecord::ClearedScope(scope) => self.runs.clear_scope(*scope),
            ResidencyRecord::Complete => self.is_whole = true,
        }
    }

    /// Applies the frames of a file whose header has been read, up to the first damaged frame.
    fn read(&mut self, file: Arc<dyn MediumFile>) -> Result<()> {
        let end = file.length()?;
        let mut frames = Frames::new(file, ResidencyHeader::BYTES as u64);
        (self.is_whole, self.copied) = (false, 0);
        loop {
            self.length = frames.position();
            let Next::Frame(frame) = frames.next()? else { break };
            let Ok(record) = ResidencyRecord::decode(frame.kind, frame.body) else { break };
            if frame.sequence != self.last + 1 {
                break;
            }
            self.apply(&record);
            self.last += 1;
            self.recovered.replayed += 1;
            if record == ResidencyRecord::Complete {
                self.copied = frames.position();
            }
        }
        self.recovered.torn_bytes += end - self.length;
        Ok(())
    }
}

fn read_header(file: &dyn MediumFile, number: u64) -> Result<Option<ResidencyHeader>> {
    let mut bytes = [0; ResidencyHeader::BYTES];
    let read = file.read_at(&mut bytes, 0)?;
    match ResidencyHeader::decode(&bytes[..read]) {
        Ok(header) => Ok(Some(header).filter(|header| header.number == number)),
        Err(error) if error.kind() == ErrorKind::Miss => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn open(
    medium: Arc<dyn Medium>,
    dir: &Path,
    options: RunResidencyOptions,
) -> Result<RunResidency> {
    medium.create_dir(dir)?;
    let numbers = journal::numbers(medium.as_ref(), dir)?;
    let access = Access { write: true, ..Access::default() };
    let mut restored: Option<Restored> = None;
    let mut older = Vec::new();
    let mut damaged = false;
    for &number in &numbers {
        let file = medium.open(&journal::path(dir, number), access)?;
        older.push((number, file.length()?));
        let Some(header) = read_header(file.as_ref(), number)? else {
            // A file without an intact header is damage. The last file is an exception: a crash may
            // have interrupted its creation.
            damaged |= Some(&number) != numbers.last();
            continue;
        };
        match restored.as_mut().filter(|restored| restored.last + 1 == header.first) {
            Some(restored) => restored.read(file)?,
            None => {
                let mut alone = Restored::new(header.first.saturating_sub(1));
                alone.read(file)?;
                damaged |= restored.is_some() || !alone.is_whole;
                if alone.is_whole {
                    restored = Some(alone);
                }
            }
        }
    }
    let is_undamaged = numbers.len() == 1 && restored.as_ref().is_some_and(|it| it.is_whole);
    let restored = restored.unwrap_or_else(|| Restored::new(0));
    let next = restored.last + 1;
    let last = numbers.last().copied().unwrap_or(0);
    let (file, number, length) = if is_undamaged {
        let file = medium.open(&journal::path(dir, last), access)?;
        if restored.recovered.torn_bytes > 0 {
            file.set_len(restored.length)?;
        }
        // The previous process may have died before it synced the file, so the recovered bytes may
        // be in the page cache only. Sync them, because the index counts them as durable.
        file.sync_data()?;
        older.clear();
        (file, last, restored.length)
    } else {
        let header = ResidencyHeader { number: last + 1, first: next };
        let file = journal::create(medium.as_ref(), dir, header)?;
        (file, header.number, ResidencyHeader::BYTES as u64)
    };
    let recovered = ResidencyRecovered { damaged, ..restored.recovered };
    if recovered.damaged || recovered.torn_bytes > 0 {
        tracing::warn!(dir = %dir.display(), ?recovered, "the residency index was incomplete; opened with the records that could be recovered");
    }
    let bytes = length + older.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let index = RunResidency {
        medium,
        dir: dir.to_owned(),
        options,
        copying: Mutex::new(()),
        journal: Mutex::new(Journal { file, number, length, copied: restored.copied, older }),
        pending: Mutex::new(Pending::new(next)),
        runs: RwLock::new(restored.runs),
        refused: AtomicU64::new(0),
        disk_bytes: AtomicU64::new(bytes),
        poisoned: AtomicBool::new(false),
        recovered,
    };
    if !is_undamaged {
        index.fill()?;
    }
    Ok(index)
}
