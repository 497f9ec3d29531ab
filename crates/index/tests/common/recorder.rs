//! A medium that records the effect of a power loss after every change.

use parking_lot::Mutex;
use ritornello_medium::{Access, Medium, MediumFile, Room, SimDisk};
use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// A disk that records its state after a power loss at each change, and that can wait for a message
/// before it writes to a checkpoint.
#[derive(Clone, Debug)]
pub struct Watched {
    pub disk: SimDisk,
    pub crashes: Arc<Mutex<Vec<SimDisk>>>,
    pub pause: Arc<Mutex<Option<Pause>>>,
}

/// Announces a write, and waits for an answer.
#[derive(Debug)]
pub struct Pause {
    pub about: Sender<()>,
    pub go: Receiver<()>,
}

#[derive(Debug)]
struct WatchedFile(Arc<dyn MediumFile>, Watched, bool);

impl Watched {
    pub fn over(disk: SimDisk) -> Self {
        Self { disk, crashes: Arc::default(), pause: Arc::default() }
    }

    fn note(&self) {
        let mut crashes = self.crashes.lock();
        let seed = crashes.len() as u64;
        crashes.push(self.disk.crash(seed * 77 + 1));
        crashes.push(self.disk.crash(seed * 99 + 2));
    }
}

impl Medium for Watched {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        let file = self.disk.open(path, access)?;
        self.note();
        let checkpoint = path.to_string_lossy().contains("checkpoint");
        Ok(Arc::new(WatchedFile(file, self.clone(), checkpoint)))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)?;
        self.note();
        Ok(())
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.disk.remove(path)?;
        self.note();
        Ok(())
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.disk.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.disk.sync_dir(dir)?;
        self.note();
        Ok(())
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.disk.room(dir)
    }
}

impl MediumFile for WatchedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        if self.2 {
            let pause = self.1.pause.lock();
            // The test drops its receiver when it needs no further pause.
            if let Some(pause) = pause.as_ref().filter(|pause| pause.about.send(()).is_ok()) {
                let _ = pause.go.recv();
            }
        }
        self.0.write_at(buffer, offset)?;
        self.1.note();
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()?;
        self.1.note();
        Ok(())
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.0.allocate(length)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)?;
        self.1.note();
        Ok(())
    }
    fn drain(&self) -> io::Result<()> {
        self.0.drain()
    }
    fn length(&self) -> io::Result<u64> {
        self.0.length()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.0.allocated()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
