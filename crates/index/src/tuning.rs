//! The state of an index that adapts its structure, as the backend `lsm` reports it. The types
//! exist with and without the feature `lsm`.

/// The two parameters of a fluid LSM-tree, which `docs/adaptive-lsm.md` explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Setting {
    /// Size ratio of neighbouring levels, 2 to 12.
    pub ratio: u32,
    /// Maximum sorted runs of a level, 1 to `ratio - 1`.
    pub runs: u32,
}

/// Number of operations of each kind, counted in entries of the tree: a probe that looks up nine
/// hashes counts nine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mix {
    /// Entries written or removed.
    pub writes: f64,
    /// Point lookups that found their key.
    pub hits: f64,
    /// Range reads.
    pub ranges: f64,
    /// Point lookups that found nothing.
    pub empty: f64,
}

/// The size of an LSM-tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeSize {
    /// Bytes of the tables on disk, all column families together.
    pub bytes: f64,
    /// Mean bytes that a flush of the memtable writes; before the first flush, half the size of the
    /// memtable.
    pub memtable: f64,
}

/// Costs of an LSM-tree's operations in nanoseconds, and the false-positive probability of the
/// Bloom filters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// The cost of an entry in a compaction: of reading, merging and writing the entry.
    pub rewrite: f64,
    /// The cost of checking the Bloom filter of one sorted run for one key.
    pub filter: f64,
    /// The cost of fetching the block that may hold a key, and of searching it.
    pub block: f64,
    /// The cost of positioning an iterator on one sorted run.
    pub seek: f64,
    /// Probability that a Bloom filter reports a key that its sorted run does not have.
    pub false_positive: f64,
}

/// The reason for which the tuner computed a target anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The first window, of at least 4,096 operations, is full.
    First,
    /// The mix of operations differs from the mix of the last decision.
    Shift,
    /// Since the last decision the tree has more than doubled, or shrunk to less than half its
    /// size.
    Growth,
}

impl Reason {
    /// The reason as one lower-case word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Shift => "shift",
            Self::Growth => "growth",
        }
    }
}

/// A decision of the tuner on a target. If `from` equals `to`, the setting is fixed, or no other
/// setting had a predicted saving that is large enough for a change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TuningDecision {
    /// Operations counted before the decision.
    pub at: u64,
    /// The reason for the decision.
    pub reason: Reason,
    /// The mix on which the decision is based, as shares that sum to 1.
    pub mix: Mix,
    /// The tree on which the decision is based.
    pub tree: TreeSize,
    /// The target before the decision.
    pub from: Setting,
    /// The target after the decision.
    pub to: Setting,
    /// Predicted nanoseconds per operation with `from`.
    pub cost_from: f64,
    /// Predicted nanoseconds per operation with `to`.
    pub cost_to: f64,
}

/// The current structure of an index's LSM-tree, and the decisions that led to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Whether the tuner adapts the setting to the mix of operations; `false` if the setting is
    /// fixed.
    pub adaptive: bool,
    /// Number of operations that the tuner has counted.
    pub operations: u64,
    /// The setting that was applied last.
    pub applied: Setting,
    /// The setting towards which the tuner changes `applied`, at most one step per flush.
    pub target: Setting,
    /// Number of levels of a tree of the size `tree` with the setting `applied`, computed instead
    /// of counted; zero while all entries fit the memtable.
    pub levels: u32,
    /// Number of sorted runs in the RocksDB column family whose keys are page hashes.
    pub sorted_runs: u64,
    /// Bytes written by compactions, divided by bytes written by flushes, since open.
    pub rewrites: f64,
    /// The size of the LSM-tree.
    pub tree: TreeSize,
    /// Costs of operations, estimated from measurements and initial guesses.
    pub prices: Prices,
    /// The latest decisions, oldest first.
    pub decisions: Vec<TuningDecision>,
}
