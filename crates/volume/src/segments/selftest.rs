//! What a directory can do, found out by doing it.

use super::kind::{self, Trust};
use crate::engine::{Engine, Inline, Op, Span, Work};
use crate::memory_block::Block;
use ritornello_format::{Error, Result, UNIT};
use ritornello_medium::{Access, Medium, MediumFile};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What the file is called that a test writes: this, then numbers of the process and the test.
pub(super) const PREFIX: &str = ".selftest-";

/// What was found out about a directory.
pub(super) struct Finding {
    pub(super) kind: String,
    pub(super) trust: Trust,
    /// Files have descriptors.
    pub(super) real: bool,
    /// Direct I/O works and is what it says.
    pub(super) direct: bool,
    /// Why not.
    pub(super) why: String,
}

impl Finding {
    /// Whether files are memory, and can be mapped.
    pub(super) fn in_memory(&self) -> bool {
        self.real && self.trust == Trust::Memory
    }
}

/// Writes, reads and compares a small file, through `O_DIRECT` where that can be meant, and with
/// the alignment that all later I/O has.
pub(super) fn examine(medium: &dyn Medium, dir: &Path) -> Result<Finding> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let room = medium.room(dir).map_err(|error| {
        Error::invalid("a volume's directory cannot be looked at: does it exist?")
            .with("dir", dir.display())
            .because(error)
    })?;
    let (name, trust) = kind::of(room.kind);
    let kind = match trust {
        Trust::Unknown => format!("{name} ({:#x})", room.kind),
        _ => name.to_owned(),
    };
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let path = dir.join(format!("{PREFIX}{}-{serial}", std::process::id()));
    let outcome = trial(medium, &path, trust);
    // A file that was never made need not be removed.
    let _ = medium.remove(&path);
    let (real, refusal) = outcome.map_err(|error| {
        let error_kind = error.kind();
        let advice = match error_kind {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "a volume's directory cannot be written to: check its owner and mount options"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "a volume's file system is full: free some space"
            }
            _ => "a volume's directory failed the self-test",
        };
        Error::invalid(advice).with("dir", dir.display()).because(error)
    })?;
    let why = refusal.unwrap_or_default();
    Ok(Finding { kind, trust, real, direct: real && why.is_empty(), why })
}

/// Whether files are real, and why direct I/O is out, if it is.
fn trial(medium: &dyn Medium, path: &Path, trust: Trust) -> io::Result<(bool, Option<String>)> {
    let plain = medium.open(path, Access { write: true, create: true, direct: false })?;
    if plain.descriptor().is_none() {
        return Ok((false, Some("the files are simulated".to_owned())));
    }
    if trust == Trust::Memory {
        round_trip(&plain)?;
        return Ok((true, Some("this file system is memory".to_owned())));
    }
    if trust == Trust::PageCache {
        round_trip(&plain)?;
        let why = "this file system accepts O_DIRECT and goes through the page cache anyway";
        return Ok((true, Some(why.to_owned())));
    }
    let direct = medium
        .open(path, Access { write: true, create: false, direct: true })
        .and_then(|file| round_trip(&file));
    match direct {
        Ok(()) => Ok((true, None)),
        Err(error) => {
            round_trip(&plain)?;
            Ok((true, Some(format!("O_DIRECT does not work here: {error}"))))
        }
    }
}

/// Several units at an offset that is aligned to one unit only, from memory that is, too.
fn round_trip(file: &Arc<dyn MediumFile>) -> io::Result<()> {
    const UNITS: usize = 5;
    let unit = UNIT as usize;
    let mut written = Block::new(UNITS * unit);
    for (at, byte) in written.bytes_mut().iter_mut().enumerate() {
        *byte = (at * 31 + at / unit) as u8;
    }
    let mut read = Block::new(UNITS * unit);
    transfer(file, true, &mut written)?;
    file.sync_data()?;
    transfer(file, false, &mut read)?;
    if written.bytes() == read.bytes() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "what was read is not what was written"))
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
        fn spare(&mut self) -> bool {
            false
        }
    }
    let span = Span::new(block.as_ptr(), block.len());
    // SAFETY: the block is borrowed mutably until the engine has run.
    let op = unsafe { Op::new(0, Arc::clone(file), write, UNIT, vec![span]) };
    let mut work = Once(Some(op), Ok(()));
    Inline.run(&mut work);
    work.1
}
