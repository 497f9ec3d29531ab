//! Reports to the owner, about every two seconds, for which no call waits: counts of this process's
//! puts and gets, and its decisions about the pages of requests.

use crate::membership::Membership;
use parking_lot::Mutex;
use ritornello_store::{Catalog, Decision, REPORTED_DECISIONS_MAX, Request, TransferTotals};
use std::borrow::Cow;
use std::mem;

/// Maximum bytes of the decisions that are kept until they are sent, of which there are at most
/// [`REPORTED_DECISIONS_MAX`].
const DECISION_BYTES_MAX: usize = 1 << 20;

/// Reports that are not sent to the owner yet.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    transfers: TransferTotals,
    decisions: Mutex<UnsentDecisions>,
}

#[derive(Debug, Default)]
struct UnsentDecisions {
    decisions: Vec<Decision>,
    bytes: usize,
    /// Decisions that did not fit since the last report.
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
    /// Keeps the contents of a report. Returns whether `request` is a report.
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

    /// Sends all reports. Waits for nothing: counts and decisions that cannot be sent now are in
    /// the next report. Reports sent to an owner that ends before it reads them are lost.
    pub(crate) fn send(&self, membership: &Membership) {
        if let Some(counts) = self.transfers.take()
            && !send(membership, &Request::ReportTransfers { counts: Cow::Borrowed(&counts) })
        {
            self.transfers.add(&counts);
        }
        let UnsentDecisions { decisions, dropped, .. } = mem::take(&mut *self.decisions.lock());
        if decisions.is_empty() && dropped == 0 {
            return;
        }
        let request = Request::ReportDecisions { decisions: Cow::Borrowed(&decisions), dropped };
        if !send(membership, &request) {
            self.keep_unsent(decisions, dropped);
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

/// Sends a report to the owner, if this process owns the store or has an owner. Returns whether it
/// was sent.
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
    use ritornello_store::DecisionOutcome;

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
    fn decisions_beyond_the_buffer_are_counted() {
        let reports = Reports::default();
        (0..REPORTED_DECISIONS_MAX + 3).for_each(|number| report(&reports, decision(number, 1)));
        let (ids, dropped) = kept(&reports);
        assert_eq!((ids.len(), dropped, &*ids[0]), (REPORTED_DECISIONS_MAX, 3, "0000"));
        let (long, fit) = (Reports::default(), DECISION_BYTES_MAX / decision(0, 4000).bytes());
        (0..fit + 3).for_each(|number| report(&long, decision(number, 4000)));
        report(&long, decision(fit + 3, 1));
        let (ids, dropped) = kept(&long);
        assert_eq!((ids.len(), dropped), (fit + 1, 3), "a short decision still fits");
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
