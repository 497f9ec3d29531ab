//! Changes the store's space and settings while others work on it.

use super::work::{NUMBERS, Tally, mix, scopes};
use ritornello_codec::Codec;
use ritornello_format::{Error, ErrorKind, Result, ScopeSettings};
use ritornello_store::{Reshape, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two changes, in milliseconds at most.
const PAUSE_MAX: u64 = 1500;
/// Directories that come and go.
const DIRS: u64 = 4;

/// A thread that changes things.
pub struct Shaper {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Shaper {
    /// Starts it. The capacity stays between a half of `capacity` and all of it; directories are
    /// made in `dir`.
    ///
    /// # Errors
    /// If a thread cannot be had.
    pub fn start(
        store: &Arc<Store>,
        tally: &Arc<Tally>,
        dir: &Path,
        capacity: u64,
        seed: u64,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut hand = Hand {
            store: Arc::clone(store),
            tally: Arc::clone(tally),
            dir: dir.to_owned(),
            capacity,
            dice: mix(seed),
        };
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("soak-shaper".to_owned()).spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    let until = Instant::now() + Duration::from_millis(hand.below(PAUSE_MAX));
                    while Instant::now() < until && !stopped.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    hand.change();
                }
            })?;
        Ok(Self { stop, thread })
    }

    /// Has it end. Returns whether it did, within `patience`.
    #[must_use]
    pub fn stop(self, patience: Duration) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        let until = Instant::now() + patience;
        while !self.thread.is_finished() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.thread.join().is_ok()
    }
}

struct Hand {
    store: Arc<Store>,
    tally: Arc<Tally>,
    dir: PathBuf,
    capacity: u64,
    dice: u64,
}

impl Hand {
    fn below(&mut self, bound: u64) -> u64 {
        self.dice = mix(self.dice);
        self.dice % bound
    }

    fn change(&mut self) {
        let answer = match self.below(8) {
            0..=3 => self.resize(),
            4 | 5 => self.change_paths(),
            _ => self.configure(),
        };
        if answer.is_ok() {
            Tally::add(&self.tally.changes, 1);
        }
        // What is held may be more than a small store may be made of.
        let refused = |error: &Error| {
            error.kind() == ErrorKind::Invalid && error.message().contains("may not be evicted")
        };
        let answer = match answer {
            Err(error) if refused(&error) => Err(Error::retry("too much is held")),
            answer => answer,
        };
        self.tally.settle(answer);
        self.check_budget(self.capacity);
    }

    fn resize(&mut self) -> Result<()> {
        let capacity = self.capacity - self.below(self.capacity / 2);
        self.store.resize(capacity)?;
        self.check_budget(capacity);
        Ok(())
    }

    /// Drains a directory, or adds one.
    fn change_paths(&mut self) -> Result<()> {
        let paths = self.store.stats()?.catalog.paths;
        let active: Vec<&str> =
            paths.iter().filter(|path| !path.draining).map(|path| path.dir.as_str()).collect();
        let number = self.below(DIRS);
        let new = self.dir.join(format!("more-{number}")).to_string_lossy().into_owned();
        if active.len() > 1 && self.below(2) == 0 {
            let which = self.below(active.len() as u64) as usize;
            return self.store.reshape(&Reshape::DrainPath(active[which].to_owned()));
        }
        if paths.iter().any(|path| path.dir == new) {
            return Ok(());
        }
        match self.store.reshape(&Reshape::AddPath(new)) {
            // A long soak has used them all.
            Err(error) if error.message().contains("256 directories") => Ok(()),
            // It was added by an owner that was killed before it could say so.
            Err(error) if error.message().contains("has this directory already") => Ok(()),
            answer => answer,
        }
    }

    fn configure(&mut self) -> Result<()> {
        let which = self.below(4) as usize;
        let codecs = [Codec::Raw, Codec::Split, Codec::Zstd];
        let codec = codecs[self.below(3) as usize].number();
        let quota_bytes = (self.below(3) == 0).then(|| self.capacity / (3 + self.below(8)));
        let settings = ScopeSettings {
            codec: (which == NUMBERS).then_some(codec),
            quota_bytes,
            retained_bytes: quota_bytes.map(|quota| quota / 2),
        };
        self.store.configure(&scopes()[which], &settings)
    }

    fn check_budget(&self, capacity: u64) {
        let Ok(stats) = self.store.stats() else { return };
        let allocated = stats.catalog.allocated_bytes;
        if allocated > capacity {
            self.tally.fail(format!("{allocated} bytes are allocated, of {capacity}"));
        }
    }
}
