//! What the threads do to the store, and what they count.

use ritornello_format::{ErrorKind, Result, Scope};
use ritornello_store::{PutOptions, Store};
use ritornello_volume::transfer::Control;
use ritornello_volume::{BorrowedPages, BorrowedPagesMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Pages of the longest sequence.
const PAGES: u64 = 16;
/// Sequences take so many times the capacity together.
const FOOTPRINT: u64 = 3;
/// Bytes a page, by scope.
const PAGE_BYTES: [usize; 4] = [12_000, 64 << 10, 300_000, 64 << 10];
/// The scope whose pages are numbers, that codecs are for.
pub const NUMBERS: usize = 3;
/// Pages are retained for so many seconds at most.
const RETAIN_MAX: u64 = 20;

/// Small pages, ordinary and large ones, and numbers.
pub fn scopes() -> [Scope; 4] {
    [
        Scope::opaque("soak small", PAGE_BYTES[0] as u64, false),
        Scope::opaque("soak", PAGE_BYTES[1] as u64, true),
        Scope::opaque("soak large", PAGE_BYTES[2] as u64, true),
        Scope {
            dtype: "bfloat16".to_owned(),
            page_tokens: 16,
            layers: (0, 16),
            kv_heads: (0, 1),
            head_dim: 64,
            layout: "page_first".to_owned(),
            page_bytes: None,
            ..Scope::opaque("soak numbers", 1, true)
        },
    ]
}

/// The finaliser of `SplitMix64` (Steele, Lea, Flood, 2014).
pub fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Counts of all threads of one process.
#[derive(Debug, Default)]
pub struct Tally {
    /// Calls that were answered.
    pub operations: AtomicU64,
    /// Bytes put and got.
    pub bytes: AtomicU64,
    /// Bytes that were not what they should have been.
    pub wrong_bytes: AtomicU64,
    /// Calls that said they may be tried again.
    pub retries: AtomicU64,
    /// Changes of the store's space and settings that were made.
    pub changes: AtomicU64,
    /// What said that the store cannot go on.
    pub fatal: Mutex<Option<String>>,
}

impl Tally {
    pub(super) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn settle<T>(&self, answer: Result<T>) -> Option<T> {
        Self::add(&self.operations, 1);
        match answer {
            Ok(value) => Some(value),
            // An owner that was killed, or a scope that was dropped meanwhile.
            Err(error) if matches!(error.kind(), ErrorKind::Retry | ErrorKind::Closed) => {
                Self::add(&self.retries, 1);
                None
            }
            Err(error) => {
                self.fail(error.to_string());
                None
            }
        }
    }

    /// The store cannot go on, or has done what it must not.
    pub(super) fn fail(&self, why: String) {
        self.fatal.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
    }
}

/// Threads at work on one store.
pub struct Crew {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    /// By thread: when its present call began, in milliseconds of `clock`.
    beats: Arc<Vec<AtomicU64>>,
    clock: Instant,
}

impl Crew {
    /// Sends so many writers and readers to work; all they choose follows from `seed`.
    ///
    /// # Errors
    /// If a thread cannot be had.
    pub fn start(
        store: &Arc<Store>,
        tally: &Arc<Tally>,
        capacity: u64,
        seed: u64,
        writers: usize,
        readers: usize,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let beats: Arc<Vec<AtomicU64>> =
            Arc::new((0..writers + readers).map(|_| AtomicU64::new(0)).collect());
        let clock = Instant::now();
        let mut threads = Vec::new();
        for at in 0..writers + readers {
            let (store, tally) = (Arc::clone(store), Arc::clone(tally));
            let (stop, beats) = (Arc::clone(&stop), Arc::clone(&beats));
            let mut hand = Hand::new(store, tally, capacity, mix(seed ^ (at as u64 + 1)));
            let name = if at < writers { "soak-writer" } else { "soak-reader" };
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    beats[at].store(clock.elapsed().as_millis() as u64, Ordering::Relaxed);
                    if at < writers { hand.write() } else { hand.read() }
                }
                beats[at].store(u64::MAX, Ordering::Relaxed);
            })?;
            threads.push(thread);
        }
        Ok(Self { stop, threads, beats, clock })
    }

    /// How long the slowest call has lasted by now.
    #[must_use]
    pub fn slowest(&self) -> Duration {
        let oldest = self.beats.iter().map(|beat| beat.load(Ordering::Relaxed)).min();
        let now = self.clock.elapsed();
        now.saturating_sub(Duration::from_millis(oldest.unwrap_or(u64::MAX)))
    }

    /// Lets everybody finish what they are doing, unless that lasts longer than `patience`.
    /// Returns whether all came home.
    #[must_use]
    pub fn stop(self, patience: Duration) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        let until = Instant::now() + patience;
        for thread in self.threads {
            while !thread.is_finished() {
                if Instant::now() > until {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            if thread.join().is_err() {
                return false;
            }
        }
        true
    }
}

/// One thread's choices and buffers.
struct Hand {
    store: Arc<Store>,
    tally: Arc<Tally>,
    scopes: [Scope; 4],
    /// By scope: its sequences.
    names: [u64; 4],
    dice: u64,
    pages: Vec<Vec<u8>>,
    expected: Vec<u8>,
}

impl Hand {
    fn new(store: Arc<Store>, tally: Arc<Tally>, capacity: u64, dice: u64) -> Self {
        let scopes = scopes();
        let share = capacity * FOOTPRINT / scopes.len() as u64;
        let names = PAGE_BYTES.map(|bytes| (share / (bytes as u64 * PAGES / 2)).max(4));
        Self { store, tally, scopes, names, dice, pages: Vec::new(), expected: Vec::new() }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.dice = mix(self.dice);
        self.dice % bound
    }

    /// A sequence, few of them often and many seldom, and some of its leading pages.
    fn pick(&mut self) -> (usize, Vec<[u8; 24]>) {
        let at = self.below(PAGE_BYTES.len() as u64) as usize;
        let few = self.below(2) == 0;
        let names = if few { self.names[at] / 16 + 1 } else { self.names[at] };
        let (name, pages) = (self.below(names), self.below(PAGES) + 1);
        let key = |page: u64| {
            let mut key = [0; 24];
            for (to, word) in key.chunks_exact_mut(8).zip([at as u64, name, page]) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            key
        };
        (at, (0..pages).map(key).collect())
    }

    fn write(&mut self) {
        let (at, keys) = self.pick();
        let keys: Vec<&[u8]> = keys.iter().map(<[u8; 24]>::as_slice).collect();
        match self.below(100) {
            0..=84 => self.put(at, &keys),
            85..=89 => {
                let _ = self.tally.settle(self.store.touch(&self.scopes[at], &keys));
            }
            90..=93 => {
                let last = keys.len() - 1;
                let _ = self.tally.settle(self.store.delete(&self.scopes[at], &keys[last..]));
            }
            94..=97 => self.flush(),
            _ if self.below(100) == 0 => {
                let _ = self.tally.settle(self.store.drop_scope(&self.scopes[at]));
            }
            _ => {
                let _ = self.tally.settle(self.store.exists(&self.scopes[at], &keys));
            }
        }
    }

    fn flush(&self) {
        let answer = self.store.flush();
        // Once after an owner was killed, a flush says that puts may be gone: so it should.
        let poisoned = || self.store.stats().is_ok_and(|stats| stats.catalog.poisoned.is_some());
        if answer.is_err() && !poisoned() {
            Tally::add(&self.tally.operations, 1);
            Tally::add(&self.tally.retries, 1);
        } else {
            let _ = self.tally.settle(answer);
        }
    }

    fn put(&mut self, at: usize, keys: &[&[u8]]) {
        let retain_until = match self.below(12) {
            0 => now() + 1 + self.below(RETAIN_MAX),
            _ => 0,
        };
        let bytes = PAGE_BYTES[at];
        self.pages.resize(keys.len(), Vec::new());
        for (page, key) in self.pages.iter_mut().zip(keys) {
            fill(page, bytes, key, at == NUMBERS);
        }
        let pages: Vec<&[u8]> = self.pages.iter().map(Vec::as_slice).collect();
        let source = BorrowedPages::new(&pages);
        let (terms, control) =
            (PutOptions { retain_until, ..PutOptions::default() }, Control::default());
        let answer = self.store.put_batch(&self.scopes[at], keys, &source, &terms, &control);
        if let Some(outcome) = self.tally.settle(answer) {
            Tally::add(&self.tally.bytes, outcome.bytes);
        }
    }

    fn read(&mut self) {
        let (at, keys) = self.pick();
        let keys: Vec<&[u8]> = keys.iter().map(<[u8; 24]>::as_slice).collect();
        let scope = &self.scopes[at];
        let ttl = Duration::from_secs(10);
        let Some(leased) = self.tally.settle(self.store.lease(scope, &keys, ttl)) else { return };
        self.get(at, &keys[..leased.pages]);
        let _ = self.tally.settle(self.store.release(leased.lease));
    }

    fn get(&mut self, at: usize, keys: &[&[u8]]) {
        let bytes = PAGE_BYTES[at];
        self.pages.resize(keys.len(), Vec::new());
        self.pages.iter_mut().for_each(|page| page.resize(bytes, 0));
        let mut slices: Vec<&mut [u8]> = self.pages.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        let answer = self.store.get_batch(&self.scopes[at], keys, &target, &Control::default());
        drop(target);
        let Some(outcome) = self.tally.settle(answer) else { return };
        Tally::add(&self.tally.bytes, outcome.bytes);
        for ((page, key), _) in self.pages.iter().zip(keys).zip(&outcome.ok).filter(|(_, ok)| **ok)
        {
            fill(&mut self.expected, bytes, key, at == NUMBERS);
            let wrong = page.iter().zip(&self.expected).filter(|(got, want)| got != want).count();
            Tally::add(&self.tally.wrong_bytes, wrong as u64);
        }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The only right bytes for `key`. Of the pages of numbers every third is plain noise.
pub(super) fn fill(page: &mut Vec<u8>, bytes: usize, key: &[u8], numbers: bool) {
    let word = |word: &[u8]| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let seed = key.chunks(8).fold(0, |seed, part| mix(seed ^ word(part)));
    // As bfloat16: between 2^-8 and 2, with any sign and mantissa.
    let (keep, set) = match numbers && !seed.is_multiple_of(3) {
        true => (0x83ff_83ff_83ff_83ff, 0x3c00_3c00_3c00_3c00),
        false => (u64::MAX, 0),
    };
    page.clear();
    page.reserve(bytes + 8);
    let mut at = seed;
    while page.len() < bytes {
        at = at.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(seed | 1);
        page.extend_from_slice(&(at & keep | set).to_le_bytes());
    }
    page.truncate(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_from_the_key() {
        let (mut one, mut same, mut other) = (Vec::new(), vec![9; 3], Vec::new());
        fill(&mut one, 1001, b"a key", false);
        fill(&mut same, 1001, b"a key", false);
        fill(&mut other, 1001, b"a kez", false);
        assert_eq!(one.len(), 1001);
        assert!(one == same);
        let alike = one.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(alike < 30, "{alike}");
    }
}
