//! The raw limits of several directories, each alone and all at the same time: the rates of direct
//! I/O without a store.

use ritornello_format::{Error, Result};
use ritornello_medium::Medium;
use ritornello_volume::baseline::{Limit, Rate, cpu_seconds};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Write,
    Read,
}

/// One [`Limit`] per directory, which measures the raw rates of the directory's disk.
pub struct RawLimits(Vec<Limit>);

impl RawLimits {
    /// Preallocates a file in each directory, for an equal share of `bytes`, rounded up to a
    /// multiple of 8 MiB. Then finds the fastest operation size and number of operations in flight
    /// for each directory, while all directories are in use.
    ///
    /// # Errors
    /// `Invalid` if a directory permits no direct I/O; `Retry` if a file system fails or has no
    /// room for the file, no memory is free for a buffer, or a thread cannot start; `Fatal` if a
    /// thread panics.
    pub fn prepare(medium: &Arc<dyn Medium>, dirs: &[PathBuf], bytes: u64) -> Result<Self> {
        let share = bytes.div_ceil(dirs.len().max(1) as u64);
        let prepare = |dir: &PathBuf| Limit::prepare(Arc::clone(medium), dir, share);
        let mut limits = dirs.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        in_parallel(&mut limits, |limit| limit.sweep().map(drop))?;
        Ok(Self(limits))
    }

    /// Writes or reads the file of each directory, without using two directories at the same time.
    /// Returns a rate per directory.
    ///
    /// # Errors
    /// `Retry` if a file system fails.
    pub fn alone(&mut self, direction: Direction) -> Result<Vec<Rate>> {
        self.0.iter_mut().map(|limit| pass(limit, direction)).collect()
    }

    /// Writes or reads the files of all directories at the same time. Returns one rate: the sum of
    /// their bytes, divided by the time until the last file is done.
    ///
    /// # Errors
    /// `Retry` if a file system fails or a thread cannot start; `Fatal` if a thread panics.
    pub fn together(&mut self, direction: Direction) -> Result<Rate> {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let rates = in_parallel(&mut self.0, |limit| pass(limit, direction))?;
        let seconds = start.elapsed().as_secs_f64();
        let bytes = rates.iter().map(|rate| rate.bytes).sum();
        Ok(Rate { bytes, seconds, cpu_seconds: cpu_seconds() - cpu })
    }
}

fn pass(limit: &mut Limit, direction: Direction) -> Result<Rate> {
    match direction {
        Direction::Write => limit.write(),
        Direction::Read => limit.read(),
    }
}

/// Runs `work` on each limit, all at the same time. Returns the results in order.
fn in_parallel<T: Send>(
    limits: &mut [Limit],
    work: impl Fn(&mut Limit) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let work = &work;
        let start = |limit| thread::Builder::new().spawn_scoped(scope, move || work(limit));
        // Collect the threads: all must start before the first is joined.
        let threads = limits.iter_mut().map(start).collect::<Vec<_>>();
        let join = |thread: std::io::Result<thread::ScopedJoinHandle<'_, Result<T>>>| {
            let panicked = |_| Error::fatal("a thread that measured a directory panicked");
            thread?.join().map_err(panicked)?
        };
        threads.into_iter().map(join).collect()
    })
}
