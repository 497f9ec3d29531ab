//! What a caller may choose when opening a store.

use ritornello_format::{Error, Result};
use ritornello_volume::segments::IoChoice;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes a segment file, unless the manifest says otherwise.
pub const SEGMENT_BYTES: u64 = 256 << 20;
/// The smallest segment: for tests.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// When a put counts as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// When it is visible. It survives the process soon after, and power loss after `flush`.
    #[default]
    Cache,
    /// When it survives power loss.
    Durable,
}

impl Durability {
    /// The name users type.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Durable => "durable",
        }
    }

    /// Reads the name users type.
    ///
    /// # Errors
    /// `Invalid`, listing the names.
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "cache" => Ok(Self::Cache),
            "durable" => Ok(Self::Durable),
            _ => Err(Error::invalid("durability is \"cache\" or \"durable\"").with("given", word)),
        }
    }
}

/// Which index backend a store has. Fixed when the store is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexKind {
    /// Run records in memory, a journal and checkpoints on disk.
    #[default]
    Run,
    /// Plain maps in memory, nothing on disk: for comparison, empty after a restart.
    Memory,
}

impl IndexKind {
    /// The name users type, also in the manifest.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Memory => "memory",
        }
    }

    /// Reads the name users type.
    ///
    /// # Errors
    /// `Invalid`, listing the names.
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "run" => Ok(Self::Run),
            "memory" => Ok(Self::Memory),
            _ => Err(Error::invalid("index is \"run\" or \"memory\"").with("given", word)),
        }
    }
}

/// How to open a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory: metadata, the socket, and the segments unless `paths` says otherwise.
    pub dir: PathBuf,
    /// Budget in bytes. Needed for a new store; for an old one it must be what it was made with.
    pub capacity: Option<u64>,
    /// Directories of the segments, on several disks perhaps. Fixed when the store is made.
    pub paths: Vec<PathBuf>,
    /// When a put counts as done.
    pub durability: Durability,
    /// How bytes move.
    pub io: IoChoice,
    /// Index backend.
    pub index: Option<IndexKind>,
    /// Bytes a segment file. Fixed when the store is made.
    pub segment_bytes: Option<u64>,
    /// Longest time between a commit and its durability in `cache` mode.
    pub sync_interval: Duration,
}

impl Options {
    /// Opens `dir` with everything at its default.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            capacity: None,
            paths: Vec::new(),
            durability: Durability::default(),
            io: IoChoice::Auto,
            index: None,
            segment_bytes: None,
            sync_interval: Duration::from_secs(2),
        }
    }
}
