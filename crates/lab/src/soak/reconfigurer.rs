//! Changes of the space and settings of the store of `soak`, under load.

use super::work::{NUMERIC_SCOPE, SCOPES, Totals, scopes};
use crate::random::mix;
use ritornello_codec::Codec;
use ritornello_format::{Error, ErrorKind, Result, ScopeSettings};
use ritornello_store::{CapacityChange, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum pause between two changes, in milliseconds.
const PAUSE_MS_MAX: u64 = 1500;
/// Number of directories that are added. These and the store's first directory of segments are
/// drained.
const DIRS: u64 = 4;

/// A thread that changes the store's capacity, directories and scope settings.
pub struct Reconfigurer {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Reconfigurer {
    /// Starts the thread. The capacity stays between a half of `capacity` and all of it;
    /// directories are created in `dir`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        store: &Arc<Store>,
        totals: &Arc<Totals>,
        dir: &Path,
        capacity: u64,
        seed: u64,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut changer = Changer {
            store: Arc::clone(store),
            totals: Arc::clone(totals),
            dir: dir.to_owned(),
            capacity,
            random: mix(seed),
        };
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("soak-shaper".to_owned()).spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    let until =
                        Instant::now() + Duration::from_millis(changer.random_below(PAUSE_MS_MAX));
                    while Instant::now() < until && !stopped.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    changer.change();
                }
            })?;
        Ok(Self { stop, thread })
    }

    /// Stops the thread. Returns whether the thread ended within `timeout`, without a panic.
    #[must_use]
    pub fn stop(self, timeout: Duration) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        let until = Instant::now() + timeout;
        while !self.thread.is_finished() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.thread.join().is_ok()
    }
}

struct Changer {
    store: Arc<Store>,
    totals: Arc<Totals>,
    dir: PathBuf,
    capacity: u64,
    random: u64,
}

impl Changer {
    fn random_below(&mut self, bound: u64) -> u64 {
        self.random = mix(self.random);
        self.random % bound
    }

    fn change(&mut self) {
        let answer = match self.random_below(8) {
            0..=3 => self.resize(),
            4 | 5 => self.change_paths(),
            _ => self.configure(),
        };
        if answer.is_ok() {
            Totals::add(&self.totals.changes, 1);
        }
        // A reduced capacity can be too small for the leased and retained pages: count the refusal
        // as a retry.
        let refused = |error: &Error| {
            error.kind() == ErrorKind::Invalid && error.message().contains("may not be evicted")
        };
        let answer = match answer {
            Err(error) if refused(&error) => {
                Err(Error::retry("too many pages are leased or retained"))
            }
            answer => answer,
        };
        self.totals.record(answer);
        self.check_budget(self.capacity);
    }

    fn resize(&mut self) -> Result<()> {
        let capacity = self.capacity - self.random_below(self.capacity / 2);
        self.store.resize(capacity)?;
        self.check_budget(capacity);
        Ok(())
    }

    /// Drains a directory, or adds one of [`DIRS`] directories; does nothing if the store has it
    /// already.
    fn change_paths(&mut self) -> Result<()> {
        let paths = self.store.stats()?.catalog.paths;
        let active: Vec<&str> =
            paths.iter().filter(|path| !path.draining).map(|path| path.dir.as_str()).collect();
        let number = self.random_below(DIRS);
        let new = self.dir.join(format!("more-{number}")).to_string_lossy().into_owned();
        if active.len() > 1 && self.random_below(2) == 0 {
            let which = self.random_below(active.len() as u64) as usize;
            return self
                .store
                .change_capacity(&CapacityChange::DrainVolume(active[which].to_owned()));
        }
        if paths.iter().any(|path| path.dir == new) {
            return Ok(());
        }
        match self.store.change_capacity(&CapacityChange::AddVolume(new)) {
            // A store accepts 256 directories in its lifetime, including drained directories. A
            // long soak adds 256 directories; further additions are refused, which is no error.
            Err(error) if error.message().contains("256 directories") => Ok(()),
            // The owner added the directory and was killed before it replied, and the repeated call
            // found the directory.
            Err(error) if error.message().contains("has this directory already") => Ok(()),
            answer => answer,
        }
    }

    fn configure(&mut self) -> Result<()> {
        let which = self.random_below(SCOPES as u64) as usize;
        let codecs = [Codec::Raw, Codec::Split, Codec::Zstd];
        let codec = codecs[self.random_below(3) as usize].number();
        let quota_bytes =
            (self.random_below(3) == 0).then(|| self.capacity / (3 + self.random_below(8)));
        let settings = ScopeSettings {
            codec: (which == NUMERIC_SCOPE).then_some(codec),
            quota_bytes,
            retained_bytes: quota_bytes.map(|quota| quota / 2),
        };
        self.store.configure(&scopes()[which], &settings)
    }

    fn check_budget(&self, capacity: u64) {
        let Ok(stats) = self.store.stats() else { return };
        let allocated = stats.catalog.allocated_bytes;
        if allocated > capacity {
            let why = format!(
                "{allocated} bytes are allocated, more than the capacity of {capacity} bytes"
            );
            self.totals.fail(why);
        }
    }
}
