//! Measures the speed of this machine's disk and memory: the reference for a store's own figures.
//!
//! Measurements use only the store's I/O engines and its kind of staging memory, with one file and
//! operations of equal length: no checksums, no headers, no index. A measurement of the disk is one
//! pass over the file, so that a benchmark can alternate these passes with passes through the
//! store.

use crate::io_engine::{IoEngine, IoVec, Op, Pool, Uring, Work};
use crate::staging::{Backing, Staging, StagingBuffer};
use ritornello_format::{Error, Result, UNIT};
use ritornello_medium::{Access, Medium, MediumFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Length in bytes of the buffer that all operations in flight share.
const BUFFER_BYTES: usize = 32 << 20;
/// Maximum bytes of one pass of [`Limit::sweep`].
const SWEEP_BYTES: u64 = 256 << 20;
/// Operation lengths and depths that [`Limit::sweep`] compares.
const SHAPES: [IoShape; 6] = [
    IoShape::new(512 << 10, 32),
    IoShape::new(1 << 20, 8),
    IoShape::new(1 << 20, 16),
    IoShape::new(2 << 20, 8),
    IoShape::new(4 << 20, 4),
    IoShape::new(8 << 20, 2),
];

/// Length of the operations of a measurement, and how many are in flight at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoShape {
    /// Bytes per operation: a multiple of 4 KiB.
    pub op_bytes: usize,
    /// Operations in flight.
    pub depth: usize,
}

impl IoShape {
    const fn new(op_bytes: usize, depth: usize) -> Self {
        Self { op_bytes, depth }
    }
}

/// Bytes that one measurement moved, and the time that it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Bytes moved.
    pub bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// CPU seconds of this process, kernel time included.
    pub cpu_seconds: f64,
}

impl Rate {
    /// Measures `pass`, which moves `bytes`.
    ///
    /// # Errors
    /// Any error that `pass` returns.
    pub fn of(bytes: u64, pass: impl FnOnce() -> Result<()>) -> Result<Self> {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        pass()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Self { bytes, seconds, cpu_seconds: cpu_seconds() - cpu })
    }

    /// Bytes moved, in GiB.
    #[must_use]
    pub fn gib(&self) -> f64 {
        self.bytes as f64 / f64::from(1u32 << 30)
    }
    /// GiB per second.
    #[must_use]
    pub fn gib_s(&self) -> f64 {
        self.gib() / self.seconds.max(f64::MIN_POSITIVE)
    }
    /// CPU seconds per GiB.
    #[must_use]
    pub fn cpu_s_per_gib(&self) -> f64 {
        self.cpu_seconds / self.gib().max(f64::MIN_POSITIVE)
    }
}

/// CPU time of this process so far, in seconds, kernel time included.
#[must_use]
pub fn cpu_seconds() -> f64 {
    // SAFETY: a zeroed `rusage` is valid, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Number of threads with which a store on tmpfs copies `pages` pages of `bytes` bytes in total.
#[must_use]
pub fn copy_threads(pages: usize, bytes: u64) -> usize {
    crate::transfer::copy_threads(pages, bytes)
}

/// A preallocated file in a directory, and the buffer for its transfers. Dropping the value removes
/// the file.
pub struct Limit {
    medium: Arc<dyn Medium>,
    path: PathBuf,
    file: Arc<dyn MediumFile>,
    bytes: u64,
    engine: Box<dyn IoEngine>,
    buffer: StagingBuffer,
    backing: Backing,
    read_shape: IoShape,
    write_shape: IoShape,
}

impl Limit {
    /// Preallocates a file of `bytes` in `dir`, rounded up to a multiple of the longest operation
    /// (8 MiB). Does not write to the file.
    ///
    /// # Errors
    /// `Invalid` if the file cannot be opened for direct I/O: without direct I/O the page cache
    /// would be measured. `Retry` if the disk has no room for the file, or no memory is free for
    /// the buffer.
    pub fn prepare(medium: Arc<dyn Medium>, dir: &Path, bytes: u64) -> Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let largest = SHAPES.iter().map(|shape| shape.op_bytes as u64).max().unwrap_or(UNIT);
        let bytes = bytes.max(1).next_multiple_of(largest);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".limit-{}-{serial}", std::process::id()));
        let file = preallocate(medium.as_ref(), &path, bytes)?;
        let staging = Staging::new(BUFFER_BYTES)?;
        let backing = staging.stats().backing;
        let mut buffer = staging
            .try_take(BUFFER_BYTES)
            .ok_or_else(|| Error::retry("no memory is free for the buffer of a measurement"))?;
        for (at, unit) in buffer.bytes_mut().chunks_mut(8).enumerate() {
            unit.copy_from_slice(&(at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        let engine: Box<dyn IoEngine> = match Uring::new() {
            Ok(engine) if file.descriptor().is_some() => Box::new(engine),
            _ => Box::new(Pool::new()),
        };
        let shape = SHAPES[2];
        Ok(Self {
            medium,
            path,
            file,
            bytes,
            engine,
            buffer,
            backing,
            read_shape: shape,
            write_shape: shape,
        })
    }

    /// Measures several operation lengths and depths, and keeps the fastest shape for later writes
    /// and the fastest for later reads. Returns these two shapes in this order. Writes the file
    /// first, because a read of blocks that were never written does not reach the device.
    ///
    /// # Errors
    /// `Retry` if the file system fails.
    pub fn sweep(&mut self) -> Result<(IoShape, IoShape)> {
        self.write()?;
        let bytes = self.bytes.min(SWEEP_BYTES);
        for write in [true, false] {
            let mut best = (0.0, self.write_shape);
            for shape in SHAPES {
                let rate = Rate::of(bytes, || self.pass(write, bytes, shape))?.gib_s();
                if rate > best.0 {
                    best = (rate, shape);
                }
            }
            *if write { &mut self.write_shape } else { &mut self.read_shape } = best.1;
        }
        Ok((self.write_shape, self.read_shape))
    }

    /// Writes the whole file into newly preallocated blocks, and syncs it. The preallocation is not
    /// measured.
    ///
    /// # Errors
    /// `Retry` if the file system fails; `Invalid` if the new file cannot be opened for direct I/O.
    pub fn write_fresh(&mut self) -> Result<Rate> {
        self.medium.remove(&self.path)?;
        self.file = preallocate(self.medium.as_ref(), &self.path, self.bytes)?;
        self.file.sync_data()?;
        self.write()
    }

    /// Writes the whole file, and syncs it.
    ///
    /// # Errors
    /// `Retry` if the file system fails.
    pub fn write(&mut self) -> Result<Rate> {
        Rate::of(self.bytes, || self.pass(true, self.bytes, self.write_shape))
    }

    /// Reads the whole file.
    ///
    /// # Errors
    /// `Retry` if the file system fails.
    pub fn read(&mut self) -> Result<Rate> {
        Rate::of(self.bytes, || self.pass(false, self.bytes, self.read_shape))
    }

    /// Copies one half of the buffer (16 MiB) to the other half on one thread, repeatedly. The
    /// copied bytes total the length of the file, rounded down to a multiple of 16 MiB, but at
    /// least 16 MiB.
    pub fn memcpy(&mut self) -> Rate {
        let half = BUFFER_BYTES / 2;
        let rounds = (self.bytes / half as u64).max(1);
        let (start, cpu) = (Instant::now(), cpu_seconds());
        for _ in 0..rounds {
            let (from, to) = self.buffer.bytes_mut().split_at_mut(half);
            std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
        }
        let seconds = start.elapsed().as_secs_f64();
        Rate { bytes: rounds * half as u64, seconds, cpu_seconds: cpu_seconds() - cpu }
    }

    /// The I/O engine's name as one lower-case word.
    #[must_use]
    pub fn engine(&self) -> &'static str {
        self.engine.name()
    }

    /// The kind of memory of the buffer.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.backing
    }

    fn pass(&self, write: bool, bytes: u64, shape: IoShape) -> Result<()> {
        let depth = shape.depth.min(BUFFER_BYTES / shape.op_bytes).max(1);
        let mut work = Pass {
            limit: self,
            write,
            op_bytes: shape.op_bytes,
            at: 0,
            bytes,
            vacant: (0..depth as u64).collect(),
            result: Ok(()),
        };
        self.engine.run(&mut work);
        work.result?;
        if write {
            self.file.sync_data()?;
        }
        Ok(())
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        if let Err(error) = self.medium.remove(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the file of a measurement could not be removed");
        }
    }
}

fn preallocate(medium: &dyn Medium, path: &Path, bytes: u64) -> Result<Arc<dyn MediumFile>> {
    let access = Access { write: true, create: true, direct: true };
    let file = medium.open(path, access).map_err(|error| {
        Error::invalid(
            "the file of a measurement cannot be opened for direct I/O: name another directory",
        )
        .with("path", path.display())
        .because(error)
    })?;
    if let Err(error) = file.allocate(bytes) {
        // Remove the file that is only partly allocated.
        let _ = medium.remove(path);
        return Err(Error::retry("no room for the file of a measurement: free some space")
            .with("bytes", bytes)
            .because(error));
    }
    Ok(file)
}

/// One pass over the file of a [`Limit`]: a read or a write of its first `bytes`.
struct Pass<'a> {
    limit: &'a Limit,
    write: bool,
    op_bytes: usize,
    at: u64,
    bytes: u64,
    /// Slots of the buffer that no operation uses.
    vacant: Vec<u64>,
    result: io::Result<()>,
}

impl Work for Pass<'_> {
    fn next(&mut self) -> Option<Op> {
        if self.at >= self.bytes || self.result.is_err() {
            return None;
        }
        let slot = self.vacant.pop()?;
        let length = (self.op_bytes as u64).min(self.bytes - self.at) as usize;
        let to = self.limit.buffer.as_ptr().wrapping_add(slot as usize * self.op_bytes);
        let iovecs = vec![IoVec::new(to, length)];
        let file = Arc::clone(&self.limit.file);
        // SAFETY: `slot` is below the depth, so the iovec is inside the buffer, which outlives the
        // engine's run, and no other operation uses the slot.
        let op = unsafe { Op::new(slot, file, self.write, self.at, iovecs) };
        self.at += length as u64;
        Some(op)
    }
    fn done(&mut self, tag: u64, result: io::Result<()>) {
        self.vacant.push(tag);
        if self.result.is_ok() {
            self.result = result;
        }
    }
    fn compute(&mut self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_medium::Host;

    #[test]
    fn measurement_leaves_no_files() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut limit = Limit::prepare(Arc::new(Host), dir.path(), 16 << 20).unwrap();
        limit.sweep().unwrap();
        for rate in [limit.write_fresh().unwrap(), limit.write().unwrap(), limit.read().unwrap()] {
            assert_eq!(rate.bytes, 16 << 20);
            assert!(rate.gib_s() > 0.0 && rate.cpu_s_per_gib() >= 0.0);
        }
        assert!(limit.memcpy().gib_s() > 0.0);
        drop(limit);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
