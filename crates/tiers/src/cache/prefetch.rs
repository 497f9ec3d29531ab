//! The prefetch of one prompt: its progress and its outcome.

use super::local_prefix::LocalPrefix;
use super::lookup::LookupOptions;
use super::prompt::PromptPages;
use crate::gate::TierSpan;
use parking_lot::Mutex;
use ritornello_store::LeaseNumber;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time after the end of a prefetch for which its outcome stays valid if a lookup has returned it.
/// A lookup after this time queries the remote again.
const REPORTED_VALID_FOR: Duration = Duration::from_secs(5);
/// Time after the end of a prefetch for which its outcome stays valid if no lookup has returned it,
/// and for which its fetched pages count as reserved.
const KEEP_FOR: Duration = Duration::from_secs(10);

/// The prefetch of one prompt.
#[derive(Debug)]
pub(super) struct Prefetch {
    pub(super) pages: PromptPages,
    pub(super) options: LookupOptions,
    /// The local tiers of the leading pages (in an unchained scope, of all local pages) when the
    /// prefetch started.
    pub(super) local: Vec<TierSpan>,
    /// In an unchained scope, the pages that were on no local tier when the prefetch started.
    pub(super) missing: Vec<usize>,
    pub(super) since: Instant,
    stage: Mutex<Stage>,
    /// The gate's estimate of the time to load the pages worth having, local and remote; zero
    /// before the gate's decision.
    expected: Mutex<Duration>,
    /// Leases that keep fetched pages on the first tier, each for at most 30 seconds.
    kept: Mutex<Vec<LeaseNumber>>,
    /// Whether a lookup has returned the outcome.
    reported: AtomicBool,
    /// Set to stop the prefetch.
    pub(super) cancelled: Arc<AtomicBool>,
}

/// The progress of a prefetch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// The remote has not answered yet.
    Querying,
    /// `fetched` of `of` pages are stored.
    Fetching { fetched: usize, of: usize },
    /// Ended at `at`: complete, failed, cancelled or not worthwhile. The first `known` pages of the
    /// prompt were found on local tiers or the remote; in an unchained scope, `known` pages in any
    /// positions were. `fetched` is the number of pages fetched, or zero after it was taken.
    Done { at: Instant, known: usize, fetched: usize },
}

impl Prefetch {
    pub(super) fn new(pages: PromptPages, options: LookupOptions, found: &LocalPrefix) -> Self {
        Self {
            pages,
            options,
            local: found.spans.clone(),
            missing: found.missing.clone(),
            since: Instant::now(),
            stage: Mutex::new(Stage::Querying),
            expected: Mutex::default(),
            kept: Mutex::default(),
            reported: AtomicBool::new(false),
            cancelled: Arc::default(),
        }
    }

    pub(super) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    pub(super) fn set_stage(&self, stage: Stage) {
        *self.stage.lock() = stage;
    }

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Whether the outcome is so old that the remote should be queried again.
    pub(super) fn is_stale(&self) -> bool {
        let lasts =
            if self.reported.load(Ordering::Acquire) { REPORTED_VALID_FOR } else { KEEP_FOR };
        matches!(self.stage(), Stage::Done { at, .. } if at.elapsed() >= lasts)
    }

    pub(super) fn expected(&self) -> Duration {
        *self.expected.lock()
    }

    pub(super) fn set_expected(&self, expected: Duration) {
        *self.expected.lock() = expected;
    }

    /// Keeps a lease on fetched pages until [`take_fetched`](Self::take_fetched) takes it, or the
    /// lease expires.
    pub(super) fn keep(&self, lease: LeaseNumber) {
        self.kept.lock().push(lease);
    }

    /// Takes the number of pages fetched, which is reported once (zero before the prefetch has
    /// ended), and the leases on pages fetched so far.
    pub(super) fn take_fetched(&self) -> (usize, Vec<LeaseNumber>) {
        let fetched = match &mut *self.stage.lock() {
            Stage::Done { fetched, .. } => {
                self.reported.store(true, Ordering::Release);
                std::mem::take(fetched)
            }
            _ => 0,
        };
        (fetched, std::mem::take(&mut *self.kept.lock()))
    }

    /// Bytes of a page in all scopes that hold parts of it. A separate prefetch fetches the part in
    /// each scope.
    pub(super) fn page_bytes(&self) -> u64 {
        self.options.page_bytes.max(self.pages.page_bytes)
    }

    /// Bytes on the first tier that are reserved for this prompt, in all scopes that hold parts of
    /// its pages: none until the remote has answered, then all pages to fetch until the prefetch
    /// ends, then the fetched pages until a lookup takes them, for at most [`KEEP_FOR`].
    pub(super) fn reserved_bytes(&self) -> u64 {
        let pages = match self.stage() {
            Stage::Fetching { of, .. } => of,
            Stage::Done { at, fetched, .. } if at.elapsed() < KEEP_FOR => fetched,
            _ => 0,
        };
        (pages as u64).saturating_mul(self.page_bytes())
    }

    /// Bytes that this prefetch still has to fetch; zero until the remote has answered.
    pub(super) fn remaining_bytes(&self) -> u64 {
        match self.stage() {
            Stage::Fetching { fetched, of } => self.pages.bytes(of - fetched),
            _ => 0,
        }
    }

    pub(super) fn local_pages(&self) -> usize {
        self.local.iter().map(|span| span.pages).sum()
    }
}
