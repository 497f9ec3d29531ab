//! Counts of puts, gets and lookups, of the prefill that loads avoided, and of caches over tiers.
//! Each process counts its own, and reports them to the owner, whose statistics therefore cover the
//! calls of all processes.

use crate::durations::{
    DURATION_BOUNDS, DURATION_COUNTS, FIRST_BUCKET, LOOKUP_BOUNDS, bucket, micros,
};
use crate::queue_lengths::CacheQueues;
use ritornello_volume::transfer::{MissReason, PageOutcome};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The counts at the beginning of a message, in this order. The buckets of puts, the buckets of
/// gets, [`MissReason::ALL`], [`PREFILL_NAMES`], [`CACHE_NAMES`], [`LOOKUP_NAMES`], the buckets of
/// lookups, [`UNREGISTERED_NAMES`], [`ENCODING_NAMES`], and the
/// [`DurationCounts`](crate::DurationCounts) of gets and of puts of remotes follow. The order is part
/// of the protocol: further counts come at the end of a message.
const NAMES: [&str; PUT_BUCKETS] = [
    "puts",
    "put_micros",
    "gets",
    "get_micros",
    "get_bytes",
    "read_pages",
    "staging_refusals",
    "unanswered",
];
pub(crate) const PUTS: usize = 0;
pub(crate) const PUT_MICROS: usize = 1;
pub(crate) const GETS: usize = 2;
pub(crate) const GET_MICROS: usize = 3;
pub(crate) const GET_BYTES: usize = 4;
pub(crate) const READ_PAGES: usize = 5;
pub(crate) const STAGING_REFUSALS: usize = 6;
pub(crate) const UNANSWERED: usize = 7;
const PUT_BUCKETS: usize = 8;
const GET_BUCKETS: usize = PUT_BUCKETS + DURATION_BOUNDS.len();
const UNDELIVERED: usize = GET_BUCKETS + DURATION_BOUNDS.len();
/// Number of counts of undelivered pages, by reason.
const REASONS: usize = 13;
const _: () = assert!(
    MissReason::ALL.len() == REASONS,
    "the counts of further reasons come after all present counts"
);
const PREFILL: usize = UNDELIVERED + REASONS;
/// Names of the counts of avoided prefill: see [`TransferCounts::prefill_avoided`].
const PREFILL_NAMES: [&str; 4] = [
    "prefill_avoided_tokens",
    "prefill_untimed_tokens",
    "prefill_avoided_micros",
    "prefill_load_micros",
];
const CACHE: usize = PREFILL + PREFILL_NAMES.len();
/// Names of the counts of a cache, without durations: see [`CacheCounts`].
const CACHE_NAMES: [&str; 14] = [
    "gate_decisions_all",
    "gate_decisions_some",
    "gate_decisions_none",
    "gate_load_micros",
    "gate_regret_micros",
    "remote_calls_get",
    "remote_calls_put",
    "remote_calls_exists",
    "remote_calls_failures",
    "remote_calls_spared",
    "remote_read_bytes",
    "remote_written_bytes",
    "remote_breaker_openings",
    "remote_breaker_open_micros",
];
const LOOKUPS: usize = CACHE + CACHE_NAMES.len();
/// Names of the counts of timed lookups: their number, and their durations in nanoseconds.
const LOOKUP_NAMES: [&str; 2] = ["timed_probes", "probe_nanos"];
const LOOKUP_BUCKETS: usize = LOOKUPS + LOOKUP_NAMES.len();
const UNREGISTERED_PROBES: usize = LOOKUP_BUCKETS + LOOKUP_BOUNDS.len();
const MISSED_UNREGISTERED: usize = UNREGISTERED_PROBES + 1;
/// Names of the counts of lookups in scopes that are not registered: their number, and the pages
/// that they requested. The owner is only asked for the scope, and does not see the pages.
const UNREGISTERED_NAMES: [&str; 2] = ["unregistered_probes", "missed_unregistered"];
const ENCODING: usize = UNREGISTERED_PROBES + UNREGISTERED_NAMES.len();
/// Names of the counts of the bytes of pages that puts wrote: before encoding, and after encoding
/// without run headers and padding.
const ENCODING_NAMES: [&str; 2] = ["put_raw_bytes", "put_encoded_bytes"];
/// Maximum counts in a message: a later build may send more counts than this build knows. An owner
/// cannot decode a longer message, so the maximum of a released protocol version stays.
pub(crate) const REPORTED_COUNTS_MAX: usize = 256;
const _: () = assert!(LENGTH <= REPORTED_COUNTS_MAX);
const REMOTE_GETS: usize = ENCODING + ENCODING_NAMES.len();
const REMOTE_PUTS: usize = REMOTE_GETS + DURATION_COUNTS;
const LENGTH: usize = REMOTE_PUTS + DURATION_COUNTS;

/// Number of entries of [`CacheCounts`].
pub const CACHE_COUNTS: usize = CACHE_NAMES.len() + 2 * DURATION_COUNTS;
/// Counts of a cache over tiers: decisions of its gate to load all, some or none of the found
/// pages; microseconds of the decided loads, and of their regret (the time by which a load and the
/// computation of the remaining tokens exceeded the estimate for computing all tokens); calls of
/// the remote that get, put, and query existence; failed calls; calls not made; bytes read from the
/// remote, and written to it; openings of its circuit breaker, and microseconds that the breaker
/// was open; [`DurationCounts`](crate::DurationCounts) of the remote's gets, then of its puts.
pub type CacheCounts = [u64; CACHE_COUNTS];

/// The counters of a cache over tiers.
pub trait CacheCounters: Debug + Send + Sync {
    /// The counts since the cache was opened.
    fn counts(&self) -> CacheCounts;
    /// The bytes in the cache's queues now.
    fn queues(&self) -> CacheQueues;
}

/// The counts of one call, or the sums of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TransferCounts([u64; LENGTH]);

impl TransferCounts {
    /// The count `at` is `count`, all others are zero.
    pub(crate) fn one(at: usize, count: u64) -> Self {
        let mut counts = [0; LENGTH];
        counts[at] = count;
        Self(counts)
    }

    /// A put that wrote pages of `bytes` bytes, which have `encoded` bytes after encoding.
    pub(crate) fn put(elapsed: Duration, bytes: u64, encoded: u64) -> Self {
        let mut counts = Self::one(PUTS, 1);
        counts.0[ENCODING] = bytes;
        counts.0[ENCODING + 1] = encoded;
        counts.0[PUT_MICROS] = micros(elapsed);
        counts.add_to_bucket(PUT_BUCKETS, DURATION_BOUNDS, elapsed);
        counts
    }

    /// A get of pages with these outcomes, which read and verified `bytes` bytes.
    pub(crate) fn get<'a>(
        elapsed: Duration,
        bytes: u64,
        outcomes: impl Iterator<Item = &'a PageOutcome>,
    ) -> Self {
        let mut counts = Self::one(GETS, 1);
        counts.0[GET_MICROS] = micros(elapsed);
        counts.add_to_bucket(GET_BUCKETS, DURATION_BOUNDS, elapsed);
        counts.0[GET_BYTES] = bytes;
        for outcome in outcomes {
            let at = match outcome {
                PageOutcome::Verified => READ_PAGES,
                PageOutcome::Missed(reason) => UNDELIVERED + *reason as usize,
            };
            counts.0[at] += 1;
        }
        counts
    }

    /// A load of `tokens` tokens that the engine did not compute, which took `load`. `prefill`: the
    /// time that computing them would have taken. Without `prefill` the tokens count as untimed,
    /// and `load` does not count, so that the sums of the two times cover the same loads.
    pub(crate) fn prefill_avoided(tokens: u64, prefill: Option<Duration>, load: Duration) -> Self {
        let mut counts = Self::one(PREFILL, tokens);
        match prefill {
            None => counts.0[PREFILL + 1] = tokens,
            Some(prefill) => {
                counts.0[PREFILL + 2] = micros(prefill);
                counts.0[PREFILL + 3] = micros(load);
            }
        }
        counts
    }

    /// A timed lookup.
    pub(crate) fn lookup(elapsed: Duration) -> Self {
        let mut counts = Self::one(LOOKUPS, 1);
        counts.0[LOOKUPS + 1] = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        counts.add_to_bucket(LOOKUP_BUCKETS, LOOKUP_BOUNDS, elapsed);
        counts
    }

    /// A lookup of `pages` pages in a scope that is not registered.
    pub(crate) fn unregistered_lookup(pages: usize) -> Self {
        let mut counts = Self::one(UNREGISTERED_PROBES, 1);
        counts.0[MISSED_UNREGISTERED] = pages as u64;
        counts
    }

    /// Adds a call to the bucket of its duration; `buckets` is the position of the first bucket.
    fn add_to_bucket(&mut self, buckets: usize, bounds: [u64; 11], elapsed: Duration) {
        if let Some(at) = bucket(bounds, elapsed) {
            self.0[buckets + at] = 1;
        }
    }

    pub(crate) fn as_slice(&self) -> &[u64] {
        &self.0
    }
}

/// Sums of [`TransferCounts`].
#[derive(Debug)]
pub struct TransferTotals([AtomicU64; LENGTH]);

impl Default for TransferTotals {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl TransferTotals {
    /// Adds counts in the order of a message. Ignores counts that this build does not know.
    pub fn add(&self, counts: &[u64]) {
        self.add_from(0, counts);
    }

    /// Adds counts of a cache.
    pub fn add_cache(&self, counts: &CacheCounts) {
        let (calls, durations) = counts.split_at(CACHE_NAMES.len());
        self.add_from(CACHE, calls);
        self.add_from(REMOTE_GETS, durations);
    }

    fn add_from(&self, first: usize, counts: &[u64]) {
        for (total, count) in self.0[first..].iter().zip(counts).filter(|(_, count)| **count > 0) {
            // A client may report any number, and a counter must not decrease.
            let sum = |total: u64| Some(total.saturating_add(*count));
            let _ = total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
        }
    }

    /// Returns the counts since the last call, in the order of a message; `None` if all are zero.
    pub fn take(&self) -> Option<Vec<u64>> {
        let counts: Vec<u64> =
            self.0.iter().map(|total| total.swap(0, Ordering::Relaxed)).collect();
        counts.iter().any(|count| *count > 0).then_some(counts)
    }

    pub(crate) fn get(&self, at: usize) -> u64 {
        self.0[at].load(Ordering::Relaxed)
    }

    /// Pages that were located and not delivered.
    pub(crate) fn undelivered(&self) -> u64 {
        (UNDELIVERED..PREFILL).map(|at| self.get(at)).fold(0, u64::saturating_add)
    }

    /// All counts by name. `puts_within_N_us`, `gets_within_N_us`, `timed_probes_within_N_us`,
    /// `remote_gets_within_N_us` and `remote_puts_within_N_us` count the calls that took at most `N`
    /// microseconds, `undelivered_REASON` the pages that missed for this reason although they were
    /// located.
    pub fn by_name(&self) -> impl Iterator<Item = (String, u64)> {
        let plain = NAMES.iter().enumerate().map(|(at, name)| ((*name).to_owned(), self.get(at)));
        let buckets = [
            ("puts", PUT_BUCKETS, DURATION_BOUNDS),
            ("gets", GET_BUCKETS, DURATION_BOUNDS),
            (LOOKUP_NAMES[0], LOOKUP_BUCKETS, LOOKUP_BOUNDS),
            ("remote_gets", REMOTE_GETS + FIRST_BUCKET, DURATION_BOUNDS),
            ("remote_puts", REMOTE_PUTS + FIRST_BUCKET, DURATION_BOUNDS),
        ];
        let durations = buckets.into_iter().flat_map(move |(calls, first, bounds)| {
            let mut sum: u64 = 0;
            bounds.into_iter().zip(first..).map(move |(bound, at)| {
                sum = self.get(at).saturating_add(sum);
                (format!("{calls}_within_{bound}_us"), sum)
            })
        });
        let undelivered = MissReason::ALL.iter().zip(UNDELIVERED..);
        let undelivered = undelivered
            .map(|(reason, at)| (format!("undelivered_{}", reason.word()), self.get(at)));
        let others = PREFILL_NAMES.iter().chain(&CACHE_NAMES).chain(&LOOKUP_NAMES).zip(PREFILL..);
        let newer = UNREGISTERED_NAMES.iter().chain(&ENCODING_NAMES).zip(UNREGISTERED_PROBES..);
        let remote = [
            (&"remote_gets", REMOTE_GETS),
            (&"remote_get_micros", REMOTE_GETS + 1),
            (&"remote_puts", REMOTE_PUTS),
            (&"remote_put_micros", REMOTE_PUTS + 1),
        ];
        let others = others.chain(newer).chain(remote);
        let others = others.map(|(name, at)| ((*name).to_owned(), self.get(at)));
        plain.chain(durations).chain(undelivered).chain(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn buckets_count_all_calls_within_their_bound() {
        let totals = TransferTotals::default();
        let outcomes = [
            PageOutcome::Verified,
            PageOutcome::Verified,
            PageOutcome::Missed(MissReason::Checksum),
        ];
        for micros in [100, 101, 20_000_000] {
            let elapsed = Duration::from_micros(micros);
            totals.add(TransferCounts::get(elapsed, 7, outcomes.iter()).as_slice());
        }
        let named: BTreeMap<String, u64> = totals.by_name().collect();
        let within = |bound: u64| named[&format!("gets_within_{bound}_us")];
        assert_eq!((within(100), within(300), within(10_000_000)), (1, 2, 2));
        assert_eq!((named["gets"], named["get_micros"], named["get_bytes"]), (3, 20_000_201, 21));
        assert_eq!((named["read_pages"], named["undelivered_checksum"]), (6, 3));
        assert_eq!((named["puts"], named["undelivered_io"], totals.undelivered()), (0, 0, 3));
        assert_eq!(named.len(), LENGTH);
    }

    #[test]
    fn taken_counts_are_not_taken_again() {
        let (one, other) = (TransferTotals::default(), TransferTotals::default());
        one.add(TransferCounts::put(Duration::from_millis(2), 400, 300).as_slice());
        one.add(TransferCounts::one(UNANSWERED, 4).as_slice());
        other.add(&one.take().unwrap());
        assert_eq!((other.get(PUTS), other.get(PUT_MICROS), other.get(UNANSWERED)), (1, 2000, 4));
        let named: BTreeMap<String, u64> = other.by_name().collect();
        assert_eq!((named["put_raw_bytes"], named["put_encoded_bytes"]), (400, 300));
        assert_eq!(one.take(), None);
        // A later build may send more counts, an earlier build fewer.
        other.add(&[1; LENGTH + 3]);
        other.add(&[1]);
        assert_eq!(other.get(PUTS), 3);
    }

    #[test]
    fn untimed_tokens_have_no_load_time() {
        let totals = TransferTotals::default();
        let (short, long) = (Duration::from_millis(3), Duration::from_secs(2));
        for counts in [
            TransferCounts::prefill_avoided(100, None, long),
            TransferCounts::prefill_avoided(50, Some(long), short),
            // A load that failed, and a load that was slower than computing.
            TransferCounts::prefill_avoided(0, Some(Duration::ZERO), short),
            TransferCounts::prefill_avoided(7, Some(short), long),
            TransferCounts::prefill_avoided(0, None, long),
        ] {
            totals.add(counts.as_slice());
        }
        let named: BTreeMap<String, u64> = totals.by_name().collect();
        assert_eq!((named["prefill_avoided_tokens"], named["prefill_untimed_tokens"]), (157, 100));
        assert_eq!(named["prefill_avoided_micros"], 2_003_000);
        assert_eq!(named["prefill_load_micros"], 2_006_000);
        assert_eq!(totals.undelivered(), 0);
    }

    /// The positions of the counts are part of the protocol.
    #[test]
    fn counts_of_a_cache_follow_the_counts_of_earlier_builds() {
        let totals = TransferTotals::default();
        totals.add_cache(&std::array::from_fn(|at| at as u64 + 1));
        let sent = totals.take().unwrap();
        assert_eq!(sent[..47], [0; 47], "an earlier build sends 47 counts");
        totals.add(&sent);
        let named: BTreeMap<String, u64> = totals.by_name().collect();
        assert_eq!((named["gate_decisions_all"], named["gate_regret_micros"]), (1, 5));
        assert_eq!((named["remote_calls_get"], named["remote_read_bytes"]), (6, 11));
        assert_eq!(named["remote_breaker_open_micros"], 14);
        assert_eq!(named["prefill_load_micros"], 0);
        assert_eq!(sent[61..78], [0; 17], "counts of other calls");
        assert_eq!((sent[78], sent.len()), (15, 104), "durations are at the end");
        assert_eq!((named["remote_gets"], named["remote_get_micros"]), (15, 16));
        assert_eq!((named["remote_puts"], named["remote_put_micros"]), (28, 29));
        let within = |calls: &str, bound: u64| named[&format!("{calls}_within_{bound}_us")];
        assert_eq!((within("remote_gets", 100), within("remote_gets", 300)), (17, 17 + 18));
        assert_eq!(within("remote_gets", 10_000_000), (17..=27).sum::<u64>());
        assert_eq!((within("remote_puts", 100), within("gets", 10_000_000)), (30, 0));
    }

    #[test]
    fn lookups_shorter_than_a_microsecond_have_a_sum() {
        let totals = TransferTotals::default();
        for nanos in [600, 1_000, 1_001, 2_000_000_000] {
            totals.add(TransferCounts::lookup(Duration::from_nanos(nanos)).as_slice());
        }
        let named: BTreeMap<String, u64> = totals.by_name().collect();
        assert_eq!((named["timed_probes"], named["probe_nanos"]), (4, 2_000_002_601));
        let within = |bound: u64| named[&format!("timed_probes_within_{bound}_us")];
        assert_eq!((within(1), within(3), within(1_000_000)), (2, 3, 3));
    }

    /// [`TransferCounts::get`] uses a reason's number as its position in [`MissReason::ALL`].
    #[test]
    fn reasons_are_in_the_order_of_their_declaration() {
        assert!(MissReason::ALL.iter().enumerate().all(|(at, reason)| *reason as usize == at));
    }
}
