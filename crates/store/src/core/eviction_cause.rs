//! The causes by which evicted pages are counted.

/// The reason why pages are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum EvictionCause {
    /// A put, or a run that is moved, needs space.
    Space,
    /// The scope of the pages would exceed its quota.
    Quota,
    /// The index is at its memory ceiling or its maximum number of runs, or its files are at their
    /// share of the capacity.
    Index,
    /// The segment is to be removed, by a smaller capacity or a drain of its directory, and its
    /// run cannot be moved.
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
}
