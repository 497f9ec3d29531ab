//! The owner's explanation why pages are hits or misses.

use ritornello_format::FieldDifference;
use serde::{Deserialize, Serialize};

/// Maximum keys that one call explains.
pub const EXPLAINED_KEYS_MAX: usize = 4096;

/// The owner's explanation of a list of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The keys by answer, in their order. Together they cover all keys.
    pub spans: Vec<KeySpan>,
    /// The scopes that answers of [`Answer::OtherScope`] name.
    pub other_scopes: Vec<OtherScope>,
    /// Whether the scope is registered: from its first put or settings until it is dropped. Scopes
    /// without pages and settings are also dropped by a full registry, and by an opening of a store
    /// with more than 1,024 scopes.
    pub is_registered: bool,
    /// Seconds since the owner opened the store. The owner knows no eviction, removal, damage,
    /// refusal or abandoned put of an earlier time.
    pub remembered_seconds: u64,
}

/// Consecutive keys with the same answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySpan {
    /// Position of the first key.
    pub at: u32,
    /// Number of keys.
    pub pages: u32,
    /// Why the pages are hits or misses.
    pub answer: Answer,
    /// The detail that the answer has according to [`Answer`], for example a cause in one word;
    /// empty if the answer has no detail.
    pub detail: String,
    /// Seconds since the first page of the span was evicted, removed (also as damaged), refused or
    /// abandoned; `None` for other answers. Later pages of the span may have other ages.
    pub seconds_ago: Option<u64>,
}

/// Why a page is a hit or a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Stored, and delivered by a get, unless its bytes cannot be read. The detail is the tier of
    /// the store, as in metrics: `host` if the store is in memory, else `disk`. Owners of earlier
    /// builds give no detail.
    Hit,
    /// Stored, and not delivered by a get, because an earlier page of the prompt is missing or
    /// absent.
    BehindMissing,
    /// A put requests or has space for the page, and has not committed it, or committed it during
    /// this call.
    NotYetVisible,
    /// Stored in a volume or segment that cannot be used now. The detail says where and why.
    AbsentVolume,
    /// Evicted. The detail is the label `cause` of the metric `ritornello_evicted_pages_total`,
    /// then, except for `segment`, ` by ` and the eviction policy in force at the eviction: the
    /// policy of the store or, for `quota`, of the scope. For `adaptive` it is the policy that
    /// `adaptive` followed then. Owners of earlier builds omit the policy.
    Evicted,
    /// Removed by a caller. The detail is `deleted` (the page, or in a chained scope a page before
    /// it), `scope_dropped` (the scope with all its pages) or `directory_forgotten`.
    Removed,
    /// Removed because the page, or in a chained scope a page before it, failed verification
    /// (detail `verification`), or lost its space while its volume or segment was absent (detail
    /// `space`).
    Damaged,
    /// Offered by a put and refused. The detail is the word of the [`Refusal`](crate::Refusal).
    Refused,
    /// A put had space for the page, and did not write or commit it, or could not commit it, for
    /// example because the page before it had been removed.
    Abandoned,
    /// Not stored in this scope, and stored in another scope under the same key. The detail is the
    /// id of the other scope, which [`Explanation::other_scopes`] describes.
    OtherScope,
    /// The owner remembers no cause. The detail is `not_offered` if no put has asked for space
    /// for the page since the owner opened the store, or only puts that failed with an error have.
    /// The page may have been stored before, and lost; and a put may have ended before it asked,
    /// for example after a refusal of earlier pages. The detail is `forgotten` if the page may have
    /// had a cause that newer causes displaced. Owners of earlier builds give no detail.
    Unknown,
}

impl Answer {
    /// The answer in one word, as in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::BehindMissing => "behind_missing",
            Self::NotYetVisible => "not_yet_visible",
            Self::AbsentVolume => "absent_volume",
            Self::Evicted => "evicted",
            Self::Removed => "removed",
            Self::Damaged => "damaged",
            Self::Refused => "refused",
            Self::Abandoned => "abandoned",
            Self::OtherScope => "other_scope",
            Self::Unknown => "unknown",
        }
    }
}

/// A scope that has some of the keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherScope {
    /// Digest of the scope's identity, in hexadecimal digits.
    pub id: String,
    /// The model that the scope names.
    pub model: String,
    /// How this scope differs from the scope that was asked about. `None` if the owner has no
    /// description of the scope that was asked about, neither from a registration nor from the
    /// caller.
    pub differs: Option<Vec<FieldDifference>>,
}
