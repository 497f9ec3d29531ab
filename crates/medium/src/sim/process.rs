//! A process on a simulated disk that can be killed with writes in flight.

use super::{SimDisk, SimFile};
use crate::{Access, Medium, MediumFile, Room};
use parking_lot::Mutex;
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// A process's view of a [`SimDisk`]. After the process is killed, every change fails with
/// `BrokenPipe`, except the asynchronous writes that [`SimProcess::kill`] permits, and the creation
/// of directories until [`SimProcess::is_dead`]. Reads, which change nothing, still work.
#[derive(Clone, Debug)]
pub struct SimProcess {
    disk: SimDisk,
    /// Whether a file is written asynchronously (`io_uring`).
    asynchronous: fn(&Path) -> bool,
    life: Arc<Mutex<Life>>,
}

#[derive(Debug, Default)]
struct Life {
    /// Number of changes until the process is killed; `None` if no kill is planned.
    changes: Option<u64>,
    /// Number of asynchronous writes that may still begin after the kill.
    in_flight: usize,
    dead: bool,
}

impl SimDisk {
    /// Creates a process on this disk. Writes to files for which `asynchronous` returns true can
    /// outlive the process.
    #[must_use]
    pub fn process(&self, asynchronous: fn(&Path) -> bool) -> SimProcess {
        SimProcess { disk: self.clone(), asynchronous, life: Arc::default() }
    }
}

impl SimProcess {
    /// The disk, without the restrictions of this process.
    #[must_use]
    pub fn disk(&self) -> &SimDisk {
        &self.disk
    }

    /// Kills the process after `changes` more changes. After that, at most `in_flight` asynchronous
    /// writes still begin, if the process attempts no other change before them. These writes report
    /// success but stay in flight: readers do not see them until [`SimDisk::land`] or a
    /// [`MediumFile::drain`] of their file. A power loss may tear them.
    pub fn kill(&self, changes: u64, in_flight: usize) {
        *self.life.lock() = Life { changes: Some(changes), in_flight, dead: false };
    }

    /// Kills the process now, without writes in flight.
    pub fn kill_now(&self) {
        *self.life.lock() = Life { changes: Some(0), in_flight: 0, dead: true };
    }

    /// Whether the process is dead: [`SimProcess::kill_now`] was called, or after
    /// [`SimProcess::kill`] a change failed or a write was left in flight.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.life.lock().dead
    }

    fn change(&self) -> io::Result<()> {
        match &mut *self.life.lock() {
            Life { changes: None, .. } => Ok(()),
            Life { changes: Some(left @ 1..), .. } => {
                *left -= 1;
                Ok(())
            }
            life => {
                (life.in_flight, life.dead) = (0, true);
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
    }

    /// Returns whether the asynchronous write that begins now stays in flight: whether the process
    /// is killed, and [`SimProcess::kill`] permits a further write.
    fn begins_write(&self) -> bool {
        match &mut *self.life.lock() {
            Life { changes: Some(0), in_flight: more @ 1.., dead } => {
                *more -= 1;
                *dead = true;
                true
            }
            _ => false,
        }
    }
}

impl Medium for SimProcess {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        if self.is_dead() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.disk.create_dir(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        if access.create {
            self.change()?;
        }
        let file = self.disk.open_file(path, access)?;
        let asynchronous = (self.asynchronous)(path);
        Ok(Arc::new(ProcessFile { file, asynchronous, process: self.clone() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change()?;
        self.disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.change()?;
        self.disk.remove(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.disk.list(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.change()?;
        self.disk.sync_dir(dir)
    }

    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.disk.room(dir)
    }
}

#[derive(Debug)]
struct ProcessFile {
    file: SimFile,
    asynchronous: bool,
    process: SimProcess,
}

impl MediumFile for ProcessFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        if self.asynchronous && self.process.begins_write() {
            return self.file.begin_write(buffer, offset);
        }
        self.process.change()?;
        self.file.write_at(buffer, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.process.change()?;
        self.file.sync_data()
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        self.process.change()?;
        self.file.allocate(length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.process.change()?;
        self.file.set_len(length)
    }

    fn drain(&self) -> io::Result<()> {
        self.process.change()?;
        self.file.drain()
    }

    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }

    fn allocated(&self) -> io::Result<u64> {
        self.file.allocated()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
