//! What an index that shapes itself watches, decides and says: plain data, whatever is compiled in.
//! The backend `lsm` fills it in.

/// The two knobs of a fluid LSM-tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Setting {
    /// Size ratio between neighbouring levels, 2 to 12.
    pub ratio: u32,
    /// Most sorted runs a level holds, 1 to `ratio - 1`.
    pub runs: u32,
}

/// How many operations of each kind there were, in entries of the tree: one probe that looks nine
/// hashes up is nine of them.
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

/// What the tree holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tree {
    /// Bytes of all entries on disk.
    pub bytes: f64,
    /// Bytes that a flush writes, which make the smallest run.
    pub memtable: f64,
}

/// Nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// Writing an entry once more in a compaction: its share of reading, merging and writing.
    pub rewrite: f64,
    /// Asking the filter of one run for one key.
    pub filter: f64,
    /// Fetching the block that a key would be in, and searching it.
    pub block: f64,
    /// Placing an iterator on one run.
    pub seek: f64,
    /// Share of filters that say yes to a key that is not there.
    pub false_positive: f64,
}

/// Why a decision was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The first full window.
    First,
    /// The mix moved.
    Shift,
    /// The tree became at least twice as large, or as small, since the last decision.
    Growth,
}

impl Reason {
    /// One word for logs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Shift => "shift",
            Self::Growth => "growth",
        }
    }
}

/// A look that led to a decision; where `from` is `to`, the gain was too small.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Operations counted before it.
    pub at: u64,
    /// Why.
    pub reason: Reason,
    /// The mix it was made for, normalised.
    pub mix: Mix,
    /// The tree it was made for.
    pub tree: Tree,
    /// The target before.
    pub from: Setting,
    /// The target now.
    pub to: Setting,
    /// Predicted nanoseconds an operation with `from`.
    pub cost_from: f64,
    /// And with `to`.
    pub cost_to: f64,
}

/// How an index is shaped now, and how that came about.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Whether it is moved by what the index is asked to do.
    pub adaptive: bool,
    /// Operations counted.
    pub operations: u64,
    /// The setting in force.
    pub applied: Setting,
    /// The one that it moves to, step by step.
    pub target: Setting,
    /// Levels that the tree has with the setting in force; none while it fits the memtable.
    pub levels: u32,
    /// Sorted runs of the family that is asked for hashes.
    pub sorted_runs: u64,
    /// Bytes that compactions wrote over bytes that flushes wrote, since open.
    pub rewrites: f64,
    /// The tree.
    pub tree: Tree,
    /// What operations cost, as measured.
    pub prices: Prices,
    /// The latest decisions, oldest first.
    pub decisions: Vec<Decision>,
}
