//! Lengths of the queues of all processes. Each process reports the lengths of its queues to the
//! owner about every two seconds while a queue is not empty, and then until a report of empty
//! queues is sent.

use crate::client_id::ClientId;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Names of the queues. The first two count calls: submitted gets and puts that wait for a thread.
/// The queues of caches over tiers follow, in bytes: of pages that wait to be written or promoted
/// to a tier, and of loads from a tier that are queued or running. The order is part of the
/// protocol: further queues come at the end.
const NAMES: [&str; 8] = [
    "queued_gets",
    "queued_puts",
    "queued_host_bytes",
    "queued_disk_bytes",
    "queued_remote_bytes",
    "loading_host_bytes",
    "loading_disk_bytes",
    "loading_remote_bytes",
];
/// Number of queues of the store. The queues of caches follow.
const OF_STORE: usize = 2;
/// Maximum lengths in a message: a later build may send more than this build knows.
pub(crate) const REPORTED_QUEUES_MAX: usize = 64;

/// Lengths of the queues of a cache over tiers, in bytes: of promotions and writes to `host`, to
/// `disk` and to `remote`, and of loads from `host`, from `disk` and from `remote`.
pub type CacheQueues = [u64; NAMES.len() - OF_STORE];

/// Lengths of the queues of one process, or their sums over several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLengths([u64; NAMES.len()]);

impl QueueLengths {
    /// The lengths of a process with `gets` waiting gets and `puts` waiting puts, without caches.
    #[must_use]
    pub fn of_store(gets: usize, puts: usize) -> Self {
        let mut lengths = Self::default();
        lengths.0[..OF_STORE].copy_from_slice(&[gets as u64, puts as u64]);
        lengths
    }

    /// Adds the queues of a cache.
    pub fn add_cache(&mut self, queues: &CacheQueues) {
        add(&mut self.0[OF_STORE..], queues);
    }

    /// The lengths in the order of a message.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.0
    }
}

/// Adds `more` to `sums`, without the lengths for which `sums` has no place. Sums saturate, because
/// a client may report any number.
fn add(sums: &mut [u64], more: &[u64]) {
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
}

/// The last report of each connected process.
#[derive(Debug, Default)]
pub(crate) struct ReportedQueues(Mutex<HashMap<ClientId, QueueLengths>>);

impl ReportedQueues {
    /// Replaces the lengths of a process. Ignores queues that this build does not know.
    pub(crate) fn report(&self, client: ClientId, lengths: &[u64]) {
        let mut known = QueueLengths::default();
        add(&mut known.0, lengths);
        let mut reported = self.0.lock();
        if known == QueueLengths::default() {
            reported.remove(&client);
        } else {
            reported.insert(client, known);
        }
    }

    pub(crate) fn client_left(&self, client: ClientId) {
        self.0.lock().remove(&client);
    }

    /// The sums over all processes, by name.
    pub(crate) fn by_name(&self) -> impl Iterator<Item = (String, u64)> {
        let mut sums = [0; NAMES.len()];
        self.0.lock().values().for_each(|lengths| add(&mut sums, &lengths.0));
        NAMES.iter().map(|name| (*name).to_owned()).zip(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(reported: &ReportedQueues) -> Vec<u64> {
        reported.by_name().map(|(_, sum)| sum).collect()
    }

    #[test]
    fn last_reports_of_connected_processes_are_summed() {
        let reported = ReportedQueues::default();
        let mut lengths = QueueLengths::of_store(1, 2);
        lengths.add_cache(&[10, 20, 30, 40, 50, 60]);
        lengths.add_cache(&[1; 6]);
        assert_eq!(lengths.as_slice(), [1, 2, 11, 21, 31, 41, 51, 61]);
        let (one, other) = (ClientId(1), ClientId(2));
        reported.report(one, &[9; 8]);
        reported.report(one, lengths.as_slice());
        // A later build may send more lengths, an earlier build fewer.
        reported.report(other, &[5; 10]);
        assert_eq!(sums(&reported), [6, 7, 16, 26, 36, 46, 56, 66]);
        reported.report(other, &[u64::MAX]);
        assert_eq!(sums(&reported), [u64::MAX, 2, 11, 21, 31, 41, 51, 61]);
        reported.client_left(one);
        assert_eq!(sums(&reported), [u64::MAX, 0, 0, 0, 0, 0, 0, 0]);
        reported.report(other, &[0; 8]);
        assert_eq!(sums(&reported), [0; 8]);
    }
}
