//! The causes by which evicted pages are counted.

/// The reason why pages are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum EvictionCause {
    /// A put, or a run that is moved, needs space.
    Space,
    /// The scope of the pages exceeds its quota, or a put would make it exceed the quota.
    Quota,
    /// The index is at its memory ceiling or its maximum number of runs, or its files are at their
    /// share of the capacity.
    Index,
    /// The segment with the pages is to be removed, because of a smaller capacity or a drain of its
    /// directory, and the run with the pages cannot be moved.
    Segment,
}

impl EvictionCause {
    /// The cause in one word, as in metrics.
    pub(in crate::core) const fn word(self) -> &'static str {
        match self {
            Self::Space => "space",
            Self::Quota => "quota",
            Self::Index => "index",
            Self::Segment => "segment",
        }
    }

    /// Whether an eviction policy chooses the pages.
    pub(in crate::core) const fn is_by_policy(self) -> bool {
        !matches!(self, Self::Segment)
    }
}
