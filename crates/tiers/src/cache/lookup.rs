//! Parameters and result of a lookup.

use crate::gate::{LoadDecision, LoadMode, TierSpan};
use ritornello_format::residency::Tier;
use ritornello_store::LeaseNumber;

/// Properties of a prompt besides its keys, supplied by the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupOptions {
    /// Which decisions the gate may make.
    pub mode: LoadMode,
    /// Tokens per page. Zero skips the gate: all pages found are loaded, unless the mode forbids
    /// it.
    pub page_tokens: u64,
    /// Bytes to move in order to load one page, if parts of the page are stored under the same key
    /// in several scopes. Zero stands for the page bytes of the scope.
    pub page_bytes: u64,
    /// Number of leading tokens whose pages the engine already holds.
    pub computed: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
}

impl LookupOptions {
    /// Leading pages that the engine already holds; zero if the number is unknown.
    pub(super) fn computed_pages(&self) -> usize {
        self.computed.checked_div(self.page_tokens).unwrap_or(0) as usize
    }
}

/// Whether a lookup has its final answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The answer is final.
    Ready,
    /// The remote has not answered yet: the caller should repeat the lookup.
    Querying,
    /// Pages are being fetched from the remote: the caller should repeat the lookup.
    Loading,
}

impl Readiness {
    /// The state's name in lower case.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Querying => "querying",
            Self::Loading => "loading",
        }
    }
}

/// A lease on pages of one local tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierLease {
    /// The tier.
    pub tier: Tier,
    /// The number that the tier's store gave the lease.
    pub lease: LeaseNumber,
}

/// The result of a lookup. In an unchained scope all fields count pages anywhere in the keys
/// instead of leading pages.
#[derive(Clone, Debug, PartialEq)]
pub struct Lookup {
    /// Whether the lookup's answer is final, or what the lookup waits for.
    pub readiness: Readiness,
    /// Tiers of the leading pages, in prompt order. The spans include remote pages if the lookup's
    /// answer is final and the prompt's prefetch has ended. If the policy's maximum wait ends
    /// before the prefetch, the final answer names local tiers only.
    pub spans: Vec<TierSpan>,
    /// Leading pages on this machine; fewer if the limit on the leases of a process
    /// ([`Store::lease`](ritornello_store::Store::lease)) was reached.
    pub local: usize,
    /// Number of leading pages that the engine has after the load, all of them covered by `leases`;
    /// the engine loads the pages among them that it lacks. Zero if the gate decides to load
    /// nothing, even if the engine holds some pages.
    pub load: usize,
    /// Pages fetched so far from the remote for this prompt. The first lookup after the end of the
    /// fetch reports them for the last time.
    pub fetched: usize,
    /// Number of pages fetched so far, and number of pages to fetch; zeros unless `readiness` is
    /// [`Loading`](Readiness::Loading).
    pub progress: (usize, usize),
    /// The gate's decision; `None` while the answer is not final, and if the lookup skipped the
    /// gate, no prefill was recorded yet, the prompt has no tokens after
    /// [`LookupOptions::computed`], or no page was found that the engine lacks.
    pub decision: Option<LoadDecision>,
    /// Leases to release after the pages are loaded; unreleased leases expire.
    pub leases: Vec<TierLease>,
}
