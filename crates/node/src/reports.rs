//! Reports to the owner, about every two seconds: counts of this process's puts, gets, lookups and
//! caches, the lengths of its queues, and its decisions about the pages of requests. A request for
//! statistics, decisions or the explanation of a request, and the close of the store, send the
//! reports first. No other call waits for a report.

use crate::membership::Membership;
use parking_lot::Mutex;
use ritornello_store::{
    CACHE_COUNTS, CacheCounters, CacheCounts, Catalog, Decision, QueueLengths,
    REPORTED_DECISIONS_MAX, Request, Store, TransferTotals,
};
use std::borrow::Cow;
use std::mem;
use std::sync::{Arc, OnceLock, Weak};

/// Maximum bytes of the decisions that are kept until they are sent. At most
/// [`REPORTED_DECISIONS_MAX`] decisions are kept.
const DECISION_BYTES_MAX: usize = 1 << 20;

/// Maximum bytes of the decisions in a message, unless a single decision is longer. Counts
/// [`Decision::bytes`], which exceed the encoded bytes. Each side keeps a buffer of 64 KiB per
/// connection, so shorter messages take no further memory. A longer message may also fill the
/// socket: the send then times out, and the connection is closed.
const MESSAGE_BYTES_MAX: usize = 48 << 10;

/// Reports that are not sent to the owner yet.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    /// Held by the thread that sends, so that decisions arrive in their order.
    sending: Mutex<Caches>,
    transfers: TransferTotals,
    decisions: Mutex<UnsentDecisions>,
    /// The store in this process, whose queues are reported.
    store: OnceLock<Weak<Store>>,
}

/// The caches whose lowest local tier is this store.
#[derive(Debug, Default)]
struct Caches {
    /// Each cache with its counts at the last call of [`Caches::take`].
    counters: Vec<(Arc<dyn CacheCounters>, CacheCounts)>,
    /// Whether the next report of queues is sent even if all queues are empty: a queue was not
    /// empty at the last report, or this report could not be sent.
    was_queued: bool,
}

impl Caches {
    /// Adds to `totals` the growth of the counts since the last call, and to `queues` the lengths
    /// of the queues. Removes caches that ended.
    fn take(&mut self, totals: &TransferTotals, queues: &mut QueueLengths) {
        self.counters.retain_mut(|(counters, reported)| {
            let is_open = Arc::strong_count(counters) > 1;
            let counts = counters.counts();
            totals.add_cache(&std::array::from_fn(|at| counts[at].saturating_sub(reported[at])));
            *reported = counts;
            if is_open {
                queues.add_cache(&counters.queues());
            }
            is_open
        });
    }
}

#[derive(Debug, Default)]
struct UnsentDecisions {
    decisions: Vec<Decision>,
    bytes: usize,
    /// Number of decisions since the last report for which this buffer, or the caller of
    /// [`Reports::keep`], had no room.
    dropped: u64,
}

impl UnsentDecisions {
    fn add(&mut self, decision: Decision) {
        let bytes = self.bytes + decision.bytes();
        if self.decisions.len() == REPORTED_DECISIONS_MAX || bytes > DECISION_BYTES_MAX {
            self.dropped = self.dropped.saturating_add(1);
        } else {
            self.bytes = bytes;
            self.decisions.push(decision);
        }
    }
}

impl Reports {
    /// Includes the queues of the store whose catalog sends these reports.
    pub(crate) fn set_store(&self, store: &Arc<Store>) {
        let _ = self.store.set(Arc::downgrade(store));
    }

    /// Includes the counts and queues of a cache, until the caller has dropped all its references.
    pub(crate) fn add_cache(&self, counters: Arc<dyn CacheCounters>) {
        self.sending.lock().counters.push((counters, [0; CACHE_COUNTS]));
    }

    /// Keeps the counts or the decisions of a report until [`Reports::send`] sends them. Returns
    /// `false`, and keeps nothing, for all other requests, also for a report of queues.
    pub(crate) fn keep(&self, request: &Request<'_>) -> bool {
        match request {
            Request::ReportTransfers { counts } => self.transfers.add(counts),
            Request::ReportDecisions { decisions, dropped } => {
                let decisions = decisions.to_vec();
                let mut unsent = self.decisions.lock();
                decisions.into_iter().for_each(|decision| unsent.add(decision));
                unsent.dropped = unsent.dropped.saturating_add(*dropped);
            }
            _ => return false,
        }
        true
    }

    /// Sends all reports, after another thread that sends them has finished. Does not wait for
    /// answers. Waits at most 200 ms per message while the socket is full. Counts that cannot be
    /// sent now are kept for the next report, and decisions as far as the buffer has room. Reports
    /// sent to an owner that ends before it reads them are lost.
    pub(crate) fn send(&self, membership: &Membership) {
        let mut caches = self.sending.lock();
        let store = self.store.get().and_then(Weak::upgrade);
        let mut queues = store.map_or_else(QueueLengths::default, |store| store.queues());
        caches.take(&self.transfers, &mut queues);
        let is_queued = queues != QueueLengths::default();
        if is_queued || caches.was_queued {
            let lengths = Cow::Borrowed(queues.as_slice());
            // The owner remembers the last report, so the report of empty queues is repeated until
            // it is sent.
            caches.was_queued = !send(membership, &Request::ReportQueues { lengths }) || is_queued;
        }
        if let Some(counts) = self.transfers.take()
            && !send(membership, &Request::ReportTransfers { counts: Cow::Borrowed(&counts) })
        {
            self.transfers.add(&counts);
        }
        let unsent = mem::take(&mut *self.decisions.lock());
        let (mut decisions, mut dropped) = (&unsent.decisions[..], unsent.dropped);
        while !decisions.is_empty() || dropped > 0 {
            let (now, later) = decisions.split_at(message_len(decisions));
            let request = Request::ReportDecisions { decisions: Cow::Borrowed(now), dropped };
            if !send(membership, &request) {
                return self.keep_unsent(decisions.to_vec(), dropped);
            }
            (decisions, dropped) = (later, 0);
        }
    }

    /// Keeps decisions that could not be sent, before later decisions.
    fn keep_unsent(&self, decisions: Vec<Decision>, dropped: u64) {
        let mut unsent = self.decisions.lock();
        let later = mem::take(&mut *unsent);
        unsent.dropped = dropped.saturating_add(later.dropped);
        decisions.into_iter().chain(later.decisions).for_each(|decision| unsent.add(decision));
    }
}

/// Number of leading decisions that fit a message; at least one, unless there is none.
fn message_len(decisions: &[Decision]) -> usize {
    let mut bytes = 0;
    let fit = decisions.iter().take_while(|decision| {
        bytes += decision.bytes();
        bytes <= MESSAGE_BYTES_MAX
    });
    fit.count().max(1).min(decisions.len())
}

/// Sends a report to the owner, if this process owns the store or is a client. Returns `false` if
/// the report must be sent later.
fn send(membership: &Membership, report: &Request<'_>) -> bool {
    match membership {
        Membership::Owner(owner) => owner.catalog.call(report).is_ok(),
        Membership::Client(client) => client.report(report),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ScopeId;
    use ritornello_store::{CacheQueues, DecisionOutcome};
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    fn decision(request: usize, pages: usize) -> Decision {
        let key: &[u8] = &[7; 32];
        let keys = vec![key; pages];
        let id = format!("{request:04}");
        Decision::now(&id, ScopeId::default(), DecisionOutcome::Missed).with_pages(&keys)
    }

    fn report(reports: &Reports, decision: Decision) {
        let decisions = Cow::Owned(vec![decision]);
        assert!(reports.keep(&Request::ReportDecisions { decisions, dropped: 0 }));
    }

    /// The ids of the kept decisions, and the number of dropped decisions.
    fn kept(reports: &Reports) -> (Vec<String>, u64) {
        let unsent = reports.decisions.lock();
        (unsent.decisions.iter().map(|kept| kept.request.clone()).collect(), unsent.dropped)
    }

    #[test]
    fn increase_of_a_caches_counts_is_reported_once_up_to_its_end() {
        #[derive(Debug, Default)]
        struct Counters(AtomicU64);
        impl CacheCounters for Counters {
            fn counts(&self) -> CacheCounts {
                [self.0.load(Relaxed); CACHE_COUNTS]
            }
            fn queues(&self) -> CacheQueues {
                [self.0.load(Relaxed); 6]
            }
        }
        let reports = Reports::default();
        let counters = [Arc::new(Counters::default()), Arc::new(Counters::default())];
        counters.iter().for_each(|counters| reports.add_cache(Arc::clone(counters) as _));
        let [one, other] = counters;
        let sums = |totals: &TransferTotals| totals.take().map(|counts| counts[47]);
        let queues = || {
            let mut queues = QueueLengths::of_store(1, 2);
            reports.sending.lock().take(&TransferTotals::default(), &mut queues);
            queues.as_slice()[1..4].to_vec()
        };
        let taken = |totals| {
            reports.sending.lock().take(totals, &mut QueueLengths::default());
            sums(totals)
        };
        let totals = &TransferTotals::default();
        one.0.store(3, Relaxed);
        other.0.store(4, Relaxed);
        assert_eq!((taken(totals), taken(totals)), (Some(7), None));
        one.0.store(8, Relaxed);
        drop(one);
        assert_eq!((taken(totals), reports.sending.lock().counters.len()), (Some(5), 1));
        assert_eq!(queues(), [2, 4, 4]);
        // Counts that cannot be sent are kept.
        other.0.store(6, Relaxed);
        reports.send(&Membership::Closed);
        assert_eq!(sums(&reports.transfers), Some(2));
        // The report of empty queues is repeated until the owner has received it.
        other.0.store(0, Relaxed);
        reports.send(&Membership::Closed);
        assert!(reports.sending.lock().was_queued);
    }

    #[test]
    fn decisions_beyond_the_buffer_are_counted() {
        let reports = Reports::default();
        (0..REPORTED_DECISIONS_MAX + 3).for_each(|number| report(&reports, decision(number, 1)));
        let (ids, dropped) = kept(&reports);
        assert_eq!((ids.len(), dropped, &*ids[0]), (REPORTED_DECISIONS_MAX, 3, "0000"));
        let (long, fit) = (Reports::default(), DECISION_BYTES_MAX / decision(0, 900).bytes());
        (0..fit + 3).for_each(|number| report(&long, decision(number, 900)));
        report(&long, decision(fit + 3, 1));
        let (ids, dropped) = kept(&long);
        assert_eq!((ids.len(), dropped), (fit + 1, 3), "a short decision still fits");
    }

    #[test]
    fn messages_hold_as_many_decisions_as_fit() {
        let each = decision(0, 100).bytes();
        let all: Vec<Decision> = (0..200).map(|number| decision(number, 100)).collect();
        assert_eq!(message_len(&all), MESSAGE_BYTES_MAX / each);
        assert_eq!((message_len(&all[..3]), message_len(&[])), (3, 0));
        let long = vec![decision(0, 1024); 2];
        assert!(long[0].bytes() < MESSAGE_BYTES_MAX && message_len(&long) == 1);
    }

    #[test]
    fn decisions_that_are_not_sent_stay_before_later_decisions() {
        let reports = Reports::default();
        (0..2).for_each(|number| report(&reports, decision(number, 1)));
        reports.send(&Membership::Closed);
        report(&reports, decision(2, 1));
        assert_eq!(kept(&reports), (["0000", "0001", "0002"].map(str::to_owned).to_vec(), 0));
        let earlier = (0..REPORTED_DECISIONS_MAX).map(|number| decision(number, 1)).collect();
        reports.keep_unsent(earlier, 5);
        let (ids, dropped) = kept(&reports);
        assert_eq!((ids.len(), dropped, &*ids[2]), (REPORTED_DECISIONS_MAX, 5 + 3, "0002"));
        assert!(!reports.keep(&Request::Flush));
    }
}
