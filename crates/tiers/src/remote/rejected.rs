//! Reasons for rejecting fetched objects, and counters by reason.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The reason why a fetched object counts as a miss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RejectReason {
    /// Truncated, with invalid checksums, with an unsupported version, or with different pages than
    /// requested.
    Damaged(String),
    /// No seal, under the name of a sealed object.
    Unsealed,
    /// The key file does not hold the key of the seal, which has this id.
    UnknownKey(String),
    /// The authenticator does not match the bytes.
    WrongTag,
}

/// A verified value, or why it was rejected.
pub(super) type Verified<T> = std::result::Result<T, RejectReason>;

impl RejectReason {
    pub(super) fn damaged(why: impl fmt::Display) -> Self {
        Self::Damaged(why.to_string())
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(why) => f.write_str(why),
            Self::Unsealed => {
                f.write_str("the object has no seal, but the name of a sealed object")
            }
            Self::UnknownKey(id) => {
                write!(f, "sealed with the key `{id}`, which the key file does not hold")
            }
            Self::WrongTag => f.write_str(
                "the authenticator does not match: forged, damaged, or duplicate key id",
            ),
        }
    }
}

/// Rejected objects by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectedObjects {
    /// Truncated, with invalid checksums, with an unsupported version, or with different pages than
    /// requested.
    pub damaged: u64,
    /// No seal, under the name of a sealed object.
    pub unsealed: u64,
    /// The key file does not hold the key of the seal.
    pub unknown_key: u64,
    /// The authenticator does not match: the object is forged or damaged, or two key files give
    /// different keys the same id.
    pub wrong_tag: u64,
}

#[derive(Debug, Default)]
pub(super) struct RejectedCounters {
    damaged: AtomicU64,
    unsealed: AtomicU64,
    unknown_key: AtomicU64,
    wrong_tag: AtomicU64,
}

impl RejectedCounters {
    /// Counts a rejection. The first rejection of each reason except `Damaged` is logged as a
    /// warning, because a foreign writer or key may have caused it; later rejections are logged at
    /// level debug, because they must not fill the log.
    pub(super) fn add(&self, name: &str, why: &RejectReason) {
        let count = match why {
            RejectReason::Damaged(_) => &self.damaged,
            RejectReason::Unsealed => &self.unsealed,
            RejectReason::UnknownKey(_) => &self.unknown_key,
            RejectReason::WrongTag => &self.wrong_tag,
        };
        let before = count.fetch_add(1, Relaxed);
        if before == 0 && !matches!(why, RejectReason::Damaged(_)) {
            tracing::warn!(name, %why, "an object of the remote could not be authenticated and was not used: check the key file, and who writes to the remote; further objects rejected for this reason are logged at level debug");
        } else {
            tracing::debug!(name, %why, "an object of the remote was not used");
        }
    }

    pub(super) fn get(&self) -> RejectedObjects {
        RejectedObjects {
            damaged: self.damaged.load(Relaxed),
            unsealed: self.unsealed.load(Relaxed),
            unknown_key: self.unknown_key.load(Relaxed),
            wrong_tag: self.wrong_tag.load(Relaxed),
        }
    }
}
