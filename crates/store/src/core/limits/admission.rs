//! Decides which missing pages of a put may be written, before any space is allocated.

use crate::admission::{Admission, AdmissionMode, AdmissionRefusal, WriteBudget};
use crate::catalog::{Refusal, ReserveRequest, ScopeRef};
use crate::core::StoreCore;
use crate::core::miss_causes::MissCause;
use crate::core::reservations::PlannedRun;
use crate::options::Options;
use crate::stats::AdmissionStats;
use parking_lot::Mutex;
use ritornello_format::{PageHash, RUN_HEADER_UNITS_MAX, UNIT, units_of};
use std::time::Instant;

/// The ghost list (see [`crate::admission`]) remembers as many pages as the store, at the capacity
/// with which it was opened, would hold if each page had this length, at most
/// [`crate::admission::GHOST_PAGES_MAX`].
const GHOST_PAGE_BYTES: u64 = 64 << 10;

/// Admission, under a lock that is never held together with another lock.
pub(crate) struct PutAdmission {
    mode: AdmissionMode,
    started: Instant,
    policy: Mutex<Admission>,
}

impl PutAdmission {
    /// The admission that `options` choose, for a store of `capacity` bytes.
    pub(crate) fn new(options: &Options, capacity: u64, started: Instant) -> Self {
        let ghosts = usize::try_from(capacity / GHOST_PAGE_BYTES).unwrap_or(usize::MAX);
        let policy = Admission::new(options.admission, options.write_budget, ghosts);
        Self { mode: options.admission, started, policy: Mutex::new(policy) }
    }

    pub(crate) fn stats(&self) -> AdmissionStats {
        let policy = self.policy.lock();
        let a_day = |budget: WriteBudget| (budget.bytes_per_second() * 86_400.0).round() as u64;
        AdmissionStats {
            mode: self.mode.word().to_owned(),
            policy: policy.policy().word().to_owned(),
            budget_bytes_per_day: policy.budget().map(a_day),
            available_bytes: policy.available_bytes(),
            ghost_pages: policy.ghost_pages() as u64,
        }
    }
}

/// The part of a put that the scope's quota and admission allow.
pub(crate) struct Admitted {
    /// Position of the first missing page that is not allowed; the number of keys if there is none.
    pub(crate) end: usize,
    /// Why the missing pages at `end` and after it get no space; `None` if there are no such pages.
    pub(crate) refused: Option<Refusal>,
    /// Number of missing pages before `end`.
    pages: usize,
    /// Number of missing pages at `end` and after it.
    behind: usize,
    /// Units of the longest page of the put.
    page_units: u32,
    /// Bytes charged to the write budget for the admitted pages.
    charged: u64,
}

impl Admitted {
    /// Maximum units of a run of `pages` pages.
    pub(crate) fn run_units(&self, pages: usize) -> u64 {
        u64::from(RUN_HEADER_UNITS_MAX) + u64::from(self.page_units) * pages as u64
    }
}

impl StoreCore {
    /// Applies the scope's quota, then admission, to the missing pages of a put, and charges the
    /// write budget for the admitted pages.
    pub(crate) fn admit(
        &self,
        scope: ScopeRef,
        hashes: &[PageHash],
        present: &[bool],
        request: &ReserveRequest,
    ) -> Admitted {
        let longest = request.page_units.iter().copied().max();
        let page_units = longest.unwrap_or_else(|| units_of(scope.page_bytes) as u32);
        let missing: Vec<usize> = (0..hashes.len()).filter(|&at| !present[at]).collect();
        let allowed = missing.len().min(self.pages_within_quota(scope, page_units));
        let page_bytes = u64::from(page_units) * UNIT;
        let allowed_pages = missing[..allowed].iter().map(|&at| hashes[at]);
        let PutAdmission { policy, started, .. } = &self.admission;
        let decision = policy.lock().decide(allowed_pages, page_bytes, started.elapsed());
        let over_quota = (allowed < missing.len()).then_some(Refusal::Quota);
        let refused = decision.refused.map_or(over_quota, |refused| {
            Some(match refused {
                AdmissionRefusal::FirstSight => Refusal::Admission,
                AdmissionRefusal::Budget => Refusal::WriteBudget,
            })
        });
        Admitted {
            end: missing.get(decision.pages).copied().unwrap_or(hashes.len()),
            refused,
            pages: decision.pages,
            behind: missing.len() - decision.pages,
            page_units,
            charged: page_bytes * decision.pages as u64,
        }
    }

    /// Counts refused pages by reason, remembers the reason of each, and refunds the part of the
    /// charge that exceeds the space of `runs`. `last` is the reason why no run of `runs` has the
    /// remaining admitted pages.
    pub(crate) fn count_refused(
        &self,
        hashes: &[PageHash],
        present: &[bool],
        admitted: &Admitted,
        runs: &[PlannedRun],
        last: Option<Refusal>,
    ) {
        let unplaced = admitted.pages - runs.iter().map(|run| run.pages as usize).sum::<usize>();
        let placed = runs.last().map_or(0, |run| (run.at + run.pages) as usize).min(admitted.end);
        let refused = [
            (admitted.refused, admitted.behind, admitted.end..hashes.len()),
            (last, unplaced, placed..admitted.end),
        ];
        for (reason, pages, part) in refused {
            let Some(reason) = reason else { continue };
            let missing = part.filter(|at| !present[*at]).map(|at| hashes[at]);
            self.miss_causes.note(missing, MissCause::Refused(reason));
            let counters = &self.counters;
            let counter = match reason {
                Refusal::NoSpace | Refusal::Deadline => &counters.refused_space,
                Refusal::Metadata => &counters.refused_metadata,
                Refusal::Quota => &counters.refused_quota,
                Refusal::Admission => &counters.refused_admission,
                Refusal::WriteBudget => &counters.refused_write_budget,
                Refusal::IndexMemory => &counters.refused_index_memory,
                Refusal::Absent => &counters.refused_absent_space,
            };
            counter.add(pages as u64);
            counters.refused_pages.add(pages as u64);
        }
        let placed: u64 = runs.iter().map(|run| run.place.units() * UNIT).sum();
        self.admission.policy.lock().give_back(admitted.charged.saturating_sub(placed));
    }
}
