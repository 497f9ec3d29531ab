//! The calls of the worker threads of `soak`, and their counts.

use crate::random::mix;
use ritornello_format::{ErrorKind, Result, Scope};
use ritornello_store::{PutOptions, Store};
use ritornello_volume::transfer::Control;
use ritornello_volume::{BorrowedPages, BorrowedPagesMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Maximum duration of a call; a longer call counts as hung.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of scopes.
pub const SCOPES: usize = 5;
/// Pages of the longest sequence, by scope.
const PAGES: [u64; SCOPES] = [16, 16, 16, 16, 2];
/// Bytes of all sequences together, counting half of [`PAGES`] pages per sequence, as a multiple of
/// the store's capacity.
const WORKING_SET_CAPACITIES: u64 = 3;
/// Bytes per page, by scope. The last scope's pages are longer than [`LONG_PAGE_BYTES`].
const PAGE_BYTES: [usize; SCOPES] = [12_000, 64 << 10, 300_000, 64 << 10, 1_400_000];
/// Length above which the soak's store stripes a page over its directories. At most five
/// directories are in use, so each piece has at least 256 KiB.
pub const LONG_PAGE_BYTES: u64 = 5 * (256 << 10);
const _: () = assert!(PAGE_BYTES[SCOPES - 1] as u64 > LONG_PAGE_BYTES, "no page is striped");
/// Position in [`scopes`] of the scope whose pages are bfloat16 numbers, which codecs can encode.
pub const NUMERIC_SCOPE: usize = 3;
/// Maximum retention of pages, in seconds.
const RETAIN_SECONDS_MAX: u64 = 20;

/// Returns the scopes of small pages, ordinary pages, large pages, pages of bfloat16 numbers, and
/// striped pages.
pub fn scopes() -> [Scope; SCOPES] {
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
        Scope::opaque("soak striped", PAGE_BYTES[4] as u64, true),
    ]
}

/// Counts of all threads of one process.
#[derive(Debug, Default)]
pub struct Totals {
    /// Calls that returned.
    pub operations: AtomicU64,
    /// Bytes put and read.
    pub bytes: AtomicU64,
    /// Bytes read that differ from the bytes put.
    pub wrong_bytes: AtomicU64,
    /// Calls that failed with `Retry` or `Closed`, flushes that failed while the store was not
    /// poisoned, and changes of the store that leased or retained pages prevented.
    pub retries: AtomicU64,
    /// Successful changes of the store's space and settings.
    pub changes: AtomicU64,
    /// First error after which the soak must end.
    pub fatal: Mutex<Option<String>>,
}

impl Totals {
    pub(super) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn record<T>(&self, answer: Result<T>) -> Option<T> {
        Self::add(&self.operations, 1);
        match answer {
            Ok(value) => Some(value),
            // The call may be retried: for example, an owner was killed or a scope was dropped
            // during the call.
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

    /// Records `why` as the error after which the soak must end, unless an earlier error is
    /// recorded.
    pub(super) fn fail(&self, why: String) {
        self.fatal.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
    }
}

/// Threads at work on one store.
pub struct Workers {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    /// Start of each thread's current step, in milliseconds of `clock`. A step of a writer is one
    /// call, or a flush that fails and a call for statistics; a step of a reader is a lease, a get
    /// and a release.
    call_starts: Arc<Vec<AtomicU64>>,
    clock: Instant,
}

impl Workers {
    /// Starts `writers` threads that write and `readers` threads that read; all their choices
    /// follow from `seed`.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        store: &Arc<Store>,
        totals: &Arc<Totals>,
        capacity: u64,
        seed: u64,
        writers: usize,
        readers: usize,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let call_starts: Arc<Vec<AtomicU64>> =
            Arc::new((0..writers + readers).map(|_| AtomicU64::new(0)).collect());
        let clock = Instant::now();
        let mut threads = Vec::new();
        for at in 0..writers + readers {
            let (store, totals) = (Arc::clone(store), Arc::clone(totals));
            let (stop, call_starts) = (Arc::clone(&stop), Arc::clone(&call_starts));
            let mut worker = Worker::new(store, totals, capacity, mix(seed ^ (at as u64 + 1)));
            let name = if at < writers { "soak-writer" } else { "soak-reader" };
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    call_starts[at].store(clock.elapsed().as_millis() as u64, Ordering::Relaxed);
                    if at < writers { worker.write() } else { worker.read() }
                }
                call_starts[at].store(u64::MAX, Ordering::Relaxed);
            })?;
            threads.push(thread);
        }
        Ok(Self { stop, threads, call_starts, clock })
    }

    /// Returns the time since the start of the oldest step in progress, which is at least as long
    /// as the oldest call.
    #[must_use]
    pub fn slowest(&self) -> Duration {
        let oldest = self.call_starts.iter().map(|beat| beat.load(Ordering::Relaxed)).min();
        let now = self.clock.elapsed();
        now.saturating_sub(Duration::from_millis(oldest.unwrap_or(u64::MAX)))
    }

    /// Stops all threads. Returns whether every thread ended within `timeout`, without a panic.
    #[must_use]
    pub fn stop(self, timeout: Duration) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        let until = Instant::now() + timeout;
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
struct Worker {
    store: Arc<Store>,
    totals: Arc<Totals>,
    scopes: [Scope; SCOPES],
    /// Number of sequences of each scope.
    sequence_counts: [u64; SCOPES],
    random: u64,
    pages: Vec<Vec<u8>>,
    expected: Vec<u8>,
}

impl Worker {
    fn new(store: Arc<Store>, totals: Arc<Totals>, capacity: u64, random: u64) -> Self {
        let scopes = scopes();
        let share = capacity * WORKING_SET_CAPACITIES / scopes.len() as u64;
        let count = |at: usize| (share / (PAGE_BYTES[at] as u64 * PAGES[at] / 2)).max(4);
        let sequence_counts = std::array::from_fn(count);
        Self {
            store,
            totals,
            scopes,
            sequence_counts,
            random,
            pages: Vec::new(),
            expected: Vec::new(),
        }
    }

    fn random_below(&mut self, bound: u64) -> u64 {
        self.random = mix(self.random);
        self.random % bound
    }

    /// Returns the position of a random scope in [`scopes`], and the keys of leading pages of a
    /// random sequence. Half of the picks are among a sixteenth of the sequences.
    fn pick(&mut self) -> (usize, Vec<[u8; 24]>) {
        let at = self.random_below(PAGE_BYTES.len() as u64) as usize;
        let few = self.random_below(2) == 0;
        let sequence_counts =
            if few { self.sequence_counts[at] / 16 + 1 } else { self.sequence_counts[at] };
        let (name, pages) = (self.random_below(sequence_counts), self.random_below(PAGES[at]) + 1);
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
        match self.random_below(100) {
            0..=84 => self.put(at, &keys),
            85..=89 => {
                let _ = self.totals.record(self.store.touch(&self.scopes[at], &keys));
            }
            90..=93 => {
                let last = keys.len() - 1;
                let _ = self.totals.record(self.store.delete(&self.scopes[at], &keys[last..]));
            }
            94..=97 => self.flush(),
            _ if self.random_below(100) == 0 => {
                let _ = self.totals.record(self.store.drop_scope(&self.scopes[at]));
            }
            _ => {
                let _ = self.totals.record(self.store.exists(&self.scopes[at], &keys));
            }
        }
    }

    fn flush(&self) {
        let answer = self.store.flush();
        // After an owner was killed, the next flush fails, because puts may be lost. The failed
        // flush counts as a retry, and not as a failure of the soak.
        let poisoned = || self.store.stats().is_ok_and(|stats| stats.catalog.poisoned.is_some());
        if answer.is_err() && !poisoned() {
            Totals::add(&self.totals.operations, 1);
            Totals::add(&self.totals.retries, 1);
        } else {
            let _ = self.totals.record(answer);
        }
    }

    fn put(&mut self, at: usize, keys: &[&[u8]]) {
        let retain_until = match self.random_below(12) {
            0 => now() + 1 + self.random_below(RETAIN_SECONDS_MAX),
            _ => 0,
        };
        let bytes = PAGE_BYTES[at];
        self.pages.resize(keys.len(), Vec::new());
        for (page, key) in self.pages.iter_mut().zip(keys) {
            fill(page, bytes, key, at == NUMERIC_SCOPE);
        }
        let pages: Vec<&[u8]> = self.pages.iter().map(Vec::as_slice).collect();
        let source = BorrowedPages::new(&pages);
        let (terms, control) =
            (PutOptions { retain_until, ..PutOptions::default() }, Control::default());
        let answer = self.store.put_batch(&self.scopes[at], keys, &source, &terms, &control);
        if let Some(outcome) = self.totals.record(answer) {
            Totals::add(&self.totals.bytes, outcome.bytes);
        }
    }

    fn read(&mut self) {
        let (at, keys) = self.pick();
        let keys: Vec<&[u8]> = keys.iter().map(<[u8; 24]>::as_slice).collect();
        let scope = &self.scopes[at];
        let ttl = Duration::from_secs(10);
        let Some(leased) = self.totals.record(self.store.lease(scope, &keys, ttl)) else { return };
        self.get(at, &keys[..leased.pages]);
        let _ = self.totals.record(self.store.release(leased.lease));
    }

    fn get(&mut self, at: usize, keys: &[&[u8]]) {
        let bytes = PAGE_BYTES[at];
        self.pages.resize(keys.len(), Vec::new());
        self.pages.iter_mut().for_each(|page| page.resize(bytes, 0));
        let mut slices: Vec<&mut [u8]> = self.pages.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        let answer = self.store.get_batch(&self.scopes[at], keys, &target, &Control::default());
        drop(target);
        let Some(outcome) = self.totals.record(answer) else { return };
        Totals::add(&self.totals.bytes, outcome.bytes);
        for ((page, key), _) in self.pages.iter().zip(keys).zip(&outcome.ok).filter(|(_, ok)| **ok)
        {
            fill(&mut self.expected, bytes, key, at == NUMERIC_SCOPE);
            let wrong = page.iter().zip(&self.expected).filter(|(got, want)| got != want).count();
            Totals::add(&self.totals.wrong_bytes, wrong as u64);
        }
    }
}

/// Returns the Unix time in seconds.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Fills `page` with the bytes that `key` implies. If `numbers` is set, on average two of three
/// pages hold bfloat16 numbers, and the third holds random bytes.
pub(super) fn fill(page: &mut Vec<u8>, bytes: usize, key: &[u8], numbers: bool) {
    let word = |word: &[u8]| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let seed = key.chunks(8).fold(0, |seed, part| mix(seed ^ word(part)));
    // As bfloat16, the magnitudes are 2^-7 to 2, with any sign and mantissa.
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
    fn equal_keys_fill_equal_bytes() {
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
