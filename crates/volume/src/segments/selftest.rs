//! Tests the capabilities of a directory by writing and reading a file in it.

use super::Segments;
use super::kind::{self, Trust};
use crate::io_engine::{Inline, IoEngine, IoVec, Op, Work};
use crate::memory_block::Block;
use ritornello_format::{Error, Result, UNIT};
use ritornello_medium::{Access, Medium, MediumFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Prefix of the test file's name; the process id and a serial number follow.
pub(super) const PREFIX: &str = ".selftest-";

/// Length of the test's reads and writes in bytes.
const TRIAL_BYTES: usize = 5 * UNIT as usize;

/// The result of testing a directory.
pub(super) struct DirectoryTest {
    pub(super) kind: String,
    pub(super) trust: Trust,
    /// Whether writes of a dead process can be waited for: see [`kind::drains`].
    pub(super) drains: bool,
    /// Whether files are on a real file system: see [`MediumFile::is_simulated`].
    pub(super) real: bool,
    /// Whether files have descriptors, for `io_uring` and for maps.
    pub(super) descriptors: bool,
    /// Whether direct I/O works and bypasses the page cache.
    pub(super) direct: bool,
    /// Why `direct` is false; else empty.
    pub(super) why: String,
}

impl DirectoryTest {
    /// Whether files are in memory, on a real file system.
    pub(super) fn in_memory(&self) -> bool {
        self.real && self.trust == Trust::Memory
    }
}

/// A new name in `dir` for a test file.
pub(super) fn test_file(dir: &Path) -> PathBuf {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    dir.join(format!("{PREFIX}{}-{serial}", std::process::id()))
}

/// Writes, reads and compares a small file, through `O_DIRECT` if the file system may honour it,
/// and with the alignment of all later I/O. On a full file system the test reads from an existing
/// segment instead: segments are allocated as a whole, so they can still be read and written.
pub(super) fn examine(medium: &dyn Medium, dir: &Path) -> Result<DirectoryTest> {
    let room = medium.room(dir).map_err(|error| {
        Error::invalid("a volume's directory cannot be examined: does it exist?")
            .with("dir", dir.display())
            .because(error)
    })?;
    let (name, trust) = kind::of(room.kind);
    let kind = match trust {
        Trust::Unknown => format!("{name} ({:#x})", room.kind),
        _ => name.to_owned(),
    };
    let path = test_file(dir);
    let outcome = trial(
        trust,
        |direct| medium.open(&path, Access { write: true, create: !direct, direct }),
        round_trip,
    );
    // The file may not exist: ignore the error.
    let _ = medium.remove(&path);
    let outcome = match outcome {
        Err(error) if is_full(&error) => on_segment(medium, dir, trust).unwrap_or(Err(error)),
        outcome => outcome,
    };
    let Outcome { real, descriptors, refusal } = outcome.map_err(|error| {
        let error_kind = error.kind();
        let advice = match error_kind {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "a volume's directory cannot be written to: check its owner and mount options"
            }
            _ if is_full(&error) => "a volume's file system is full: free some space",
            _ => "a volume's directory failed the self-test: use another directory or disk",
        };
        Error::invalid(advice).with("dir", dir.display()).because(error)
    })?;
    let why = refusal.unwrap_or_default();
    let drains = kind::drains(room.kind);
    let direct = real && why.is_empty();
    Ok(DirectoryTest { kind, trust, drains, real, descriptors, direct, why })
}

/// The result of a trial; `refusal` is the reason if direct I/O is not possible.
struct Outcome {
    real: bool,
    descriptors: bool,
    refusal: Option<String>,
}

/// Runs `check` on the file that `open` opens, with direct I/O if possible, else without. A
/// simulated file is not checked.
fn trial(
    trust: Trust,
    open: impl Fn(bool) -> io::Result<Arc<dyn MediumFile>>,
    check: fn(&Arc<dyn MediumFile>) -> io::Result<()>,
) -> io::Result<Outcome> {
    let plain = open(false)?;
    let (real, descriptors) = (!plain.is_simulated(), plain.descriptor().is_some());
    let found = |refusal| Ok(Outcome { real, descriptors, refusal });
    if !real {
        return found(Some("the files are simulated".to_owned()));
    }
    if trust == Trust::Memory {
        check(&plain)?;
        return found(Some("this file system is in memory".to_owned()));
    }
    if trust == Trust::PageCache {
        check(&plain)?;
        let why = "this file system accepts O_DIRECT and goes through the page cache anyway";
        return found(Some(why.to_owned()));
    }
    let direct = open(true).and_then(|file| check(&file));
    match direct {
        Ok(()) => found(None),
        // Return the error of a full file system: it does not show whether direct I/O works.
        Err(error) if is_full(&error) => Err(error),
        Err(error) => {
            check(&plain)?;
            found(Some(format!("O_DIRECT does not work here: {error}")))
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Tests with an existing segment, by reading only. `None` if the directory holds no segment.
fn on_segment(medium: &dyn Medium, dir: &Path, trust: Trust) -> Option<io::Result<Outcome>> {
    let names = medium.list(dir).ok()?;
    let path = dir.join(names.iter().find(|name| Segments::is_segment(name))?);
    let open = |direct| medium.open(&path, Access { write: true, create: false, direct });
    let read = |file: &_| transfer(file, false, &mut Block::new(TRIAL_BYTES));
    Some(trial(trust, open, read))
}

/// Writes and reads several units. The offset is one unit, and the address is aligned to at least
/// one unit: the least alignment of later I/O.
fn round_trip(file: &Arc<dyn MediumFile>) -> io::Result<()> {
    let unit = UNIT as usize;
    let mut written = Block::new(TRIAL_BYTES);
    for (at, byte) in written.bytes_mut().iter_mut().enumerate() {
        *byte = (at * 31 + at / unit) as u8;
    }
    let mut read = Block::new(TRIAL_BYTES);
    transfer(file, true, &mut written)?;
    file.sync_data()?;
    transfer(file, false, &mut read)?;
    if written.bytes() == read.bytes() {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the bytes read differ from the bytes written",
        ))
    }
}

fn transfer(file: &Arc<dyn MediumFile>, write: bool, block: &mut Block) -> io::Result<()> {
    struct Once(Option<Op>, io::Result<()>);
    impl Work for Once {
        fn next(&mut self) -> Option<Op> {
            self.0.take()
        }
        fn done(&mut self, _: u64, result: io::Result<()>) {
            self.1 = result;
        }
        fn compute(&mut self) -> bool {
            false
        }
    }
    let iovec = IoVec::new(block.as_ptr(), block.len());
    // SAFETY: the block is borrowed mutably until the engine returns.
    let op = unsafe { Op::new(0, Arc::clone(file), write, UNIT, vec![iovec]) };
    let mut work = Once(Some(op), Ok(()));
    Inline.run(&mut work);
    work.1
}
