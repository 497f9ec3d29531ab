//! A medium that injects faults on schedule.

use crate::{Access, FileOwner, Medium, MediumFault, MediumFile, Op, Room, Schedule};
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Granularity of damage in bytes: the smallest disk sector.
const SECTOR: usize = 512;
/// The unit of direct I/O.
const BLOCK: usize = 4096;

/// Wraps any medium and injects the faults of a [`Schedule`], except into `owner`,
/// `close_to_others` and `host_path`.
#[derive(Clone, Debug)]
pub struct Faulty {
    inner: Arc<dyn Medium>,
    schedule: Schedule,
    descriptors: bool,
}

impl Faulty {
    /// Wraps `inner` with the faults of `schedule` (of which the caller keeps a clone).
    #[must_use]
    pub fn new(inner: Arc<dyn Medium>, schedule: Schedule) -> Self {
        Self { inner, schedule, descriptors: false }
    }

    /// Exposes the descriptors of `inner`'s files: no fault is injected into transfers through
    /// descriptors, only into calls of this medium and its files. Serves tests in which transfers
    /// use the host's I/O, `io_uring` included, while other calls fail.
    #[must_use]
    pub fn with_descriptors(mut self) -> Self {
        self.descriptors = true;
        self
    }

    fn check(&self, op: Op, path: &Path) -> io::Result<()> {
        self.schedule.next(op, path).map_or(Ok(()), |fault| Err(fault.error()))
    }
}

impl Medium for Faulty {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.check(Op::CreateDir, path)?;
        self.inner.create_dir(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        self.check(Op::Open, path)?;
        let inner = self.inner.open(path, access)?;
        let (path, schedule, descriptors) =
            (path.to_owned(), self.schedule.clone(), self.descriptors);
        Ok(Arc::new(FaultyFile { inner, path, schedule, descriptors }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check(Op::Rename, to)?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.check(Op::Remove, path)?;
        self.inner.remove(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.check(Op::List, dir)?;
        self.inner.list(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.check(Op::SyncDir, dir)?;
        self.inner.sync_dir(dir)
    }

    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.check(Op::Room, dir)?;
        self.inner.room(dir)
    }

    fn owner(&self, dir: &Path) -> io::Result<FileOwner> {
        self.inner.owner(dir)
    }

    fn close_to_others(&self, dir: &Path) -> io::Result<()> {
        self.inner.close_to_others(dir)
    }

    fn host_path(&self, path: &Path) -> PathBuf {
        self.inner.host_path(path)
    }
}

#[derive(Debug)]
struct FaultyFile {
    inner: Arc<dyn MediumFile>,
    path: PathBuf,
    schedule: Schedule,
    descriptors: bool,
}

impl FaultyFile {
    fn next(&self, op: Op) -> Option<MediumFault> {
        self.schedule.next(op, &self.path)
    }

    fn check(&self, op: Op) -> io::Result<()> {
        self.next(op).map_or(Ok(()), |fault| Err(fault.error()))
    }

    /// Stores every other sector of `buffer`, beginning with the first; the sectors between them
    /// keep their bytes in the file.
    fn write_torn(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        // Make one write from aligned memory, so that files open for direct I/O accept it too.
        let (mut memory, start) = aligned(buffer.len());
        let torn = &mut memory[start..start + buffer.len()];
        let had = self.inner.read_at(torn, offset)?;
        torn[had..].fill(0);
        for (to, from) in torn.chunks_mut(SECTOR).zip(buffer.chunks(SECTOR)).step_by(2) {
            to.copy_from_slice(from);
        }
        self.inner.write_at(torn, offset)
    }
}

/// Memory that holds `length` bytes at the returned offset, aligned for direct I/O.
fn aligned(length: usize) -> (Vec<u8>, usize) {
    let memory = vec![0; length + BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK).min(BLOCK);
    (memory, start)
}

/// Returns half of `length`, rounded down: to whole blocks if `length` is a multiple of a block,
/// otherwise to whole sectors.
fn half(length: usize) -> usize {
    let unit = if length.is_multiple_of(BLOCK) { BLOCK } else { SECTOR };
    length / 2 / unit * unit
}

impl MediumFile for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match self.next(Op::Read) {
            None => self.inner.read_at(buffer, offset),
            Some(MediumFault::Short) => {
                let length = half(buffer.len());
                self.inner.read_at(&mut buffer[..length], offset)
            }
            Some(MediumFault::Torn) => {
                let read = self.inner.read_at(buffer, offset)?;
                for sector in buffer[..read].chunks_mut(SECTOR).step_by(2) {
                    sector.iter_mut().for_each(|byte| *byte = !*byte);
                }
                Ok(read)
            }
            Some(fault) => Err(fault.error()),
        }
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        match self.next(Op::Write) {
            None => self.inner.write_at(buffer, offset),
            Some(MediumFault::Short) => {
                self.inner.write_at(&buffer[..half(buffer.len())], offset)?;
                Err(MediumFault::Short.error())
            }
            Some(MediumFault::Torn) => self.write_torn(buffer, offset),
            Some(fault) => Err(fault.error()),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check(Op::SyncData)?;
        self.inner.sync_data()
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        self.check(Op::Allocate)?;
        self.inner.allocate(length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.check(Op::SetLen)?;
        self.inner.set_len(length)
    }

    fn drain(&self) -> io::Result<()> {
        self.check(Op::Drain)?;
        self.inner.drain()
    }

    fn length(&self) -> io::Result<u64> {
        self.check(Op::Stat)?;
        self.inner.length()
    }

    fn allocated(&self) -> io::Result<u64> {
        self.check(Op::Stat)?;
        self.inner.allocated()
    }

    /// `None` unless `with_descriptors` was called, because I/O through the descriptor cannot fail
    /// on schedule.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor().filter(|_| self.descriptors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Host, Rule, SimDisk};

    const WRITE: Access = Access { write: true, create: true, direct: false };

    fn disk(schedule: &Schedule) -> Faulty {
        Faulty::new(Arc::new(SimDisk::new(1 << 20)), schedule.clone())
    }

    #[test]
    fn only_the_nth_match_fails() {
        let schedule = Schedule::new();
        let disk = disk(&schedule);
        let (a, b) =
            (disk.open(Path::new("/a"), WRITE).unwrap(), disk.open(Path::new("/b"), WRITE));
        schedule.add(Rule::nth(2, MediumFault::NoSpace).on(Op::Write).at("a"));
        a.write_at(b"1", 0).unwrap();
        b.unwrap().write_at(b"1", 0).unwrap();
        let error = a.write_at(b"2", 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        a.write_at(b"3", 0).unwrap();
        assert_eq!((schedule.count(Op::Write), schedule.injected()), (4, 1));
        assert_eq!(schedule.total(), 6);
    }

    #[test]
    fn matches_from_the_nth_on_fail_until_healed() {
        let schedule = Schedule::new();
        let disk = disk(&schedule);
        let file = disk.open(Path::new("/a"), WRITE).unwrap();
        schedule.add(Rule::nth(2, MediumFault::Io).onward().on(Op::SyncData));
        assert!(file.sync_data().is_ok());
        assert!(file.sync_data().is_err() && file.sync_data().is_err());
        schedule.heal();
        assert!(file.sync_data().is_ok());
        schedule.add(Rule::always(MediumFault::Io));
        assert!(disk.room(Path::new("/")).is_err() && disk.list(Path::new("/")).is_err());
    }

    #[test]
    fn opens_fail_without_file_handles() {
        let schedule = Schedule::new();
        let disk = disk(&schedule);
        schedule.add(Rule::nth(1, MediumFault::NoSystemFiles).on(Op::Open));
        schedule.add(Rule::nth(2, MediumFault::NoProcessFiles).on(Op::Open));
        let refused = || disk.open(Path::new("/a"), WRITE).err().unwrap().raw_os_error();
        let (system, process) = (rustix::io::Errno::NFILE, rustix::io::Errno::MFILE);
        assert_eq!(refused(), Some(system.raw_os_error()));
        assert_eq!(refused(), Some(process.raw_os_error()));
        assert!(disk.open(Path::new("/a"), WRITE).is_ok());
    }

    #[test]
    fn short_transfer_moves_half_and_torn_transfer_every_other_sector() {
        let schedule = Schedule::new();
        let disk = disk(&schedule);
        let file = disk.open(Path::new("/a"), WRITE).unwrap();
        file.write_at(&[1; 2048], 0).unwrap();
        schedule.add(Rule::nth(1, MediumFault::Short).on(Op::Write));
        assert!(file.write_at(&[2; 2048], 0).is_err());
        let mut got = [0; 2048];
        file.read_at(&mut got, 0).unwrap();
        assert!(got[..1024].iter().all(|&byte| byte == 2) && got[1024..].iter().all(|&b| b == 1));

        schedule.add(Rule::nth(1, MediumFault::Torn).on(Op::Write));
        file.write_at(&[3; 2048], 0).unwrap();
        file.read_at(&mut got, 0).unwrap();
        assert_eq!([got[0], got[512], got[1024], got[1536]], [3, 2, 3, 1]);

        schedule.add(Rule::nth(1, MediumFault::Torn).on(Op::Read));
        schedule.add(Rule::nth(2, MediumFault::Short).on(Op::Read));
        file.read_at(&mut got, 0).unwrap();
        assert_eq!([got[0], got[512]], [!3, 2]);
        assert_eq!(file.read_at(&mut got, 0).unwrap(), 1024);
    }

    #[test]
    fn torn_direct_writes_reach_the_host() {
        let root = tempfile::tempdir().unwrap();
        let schedule = Schedule::new();
        let disk = Faulty::new(Arc::new(Host), schedule.clone());
        let path = root.path().join("f");
        let Ok(file) = disk.open(&path, Access { direct: true, ..WRITE }) else {
            return; // The file system of the test has no direct I/O.
        };
        assert!(file.descriptor().is_none());
        schedule.add(Rule::nth(1, MediumFault::Torn).on(Op::Write));
        let (mut memory, start) = aligned(8192);
        memory[start..start + 8192].fill(7);
        file.write_at(&memory[start..start + 8192], 0).unwrap();
        let read = std::fs::read(&path).unwrap();
        assert_eq!([read[0], read[512], read[1024], read.len() as u8], [7, 0, 7, 0]);
    }
}
