//! How a store's bytes are moved, and why.

use crate::staging::Backing;

/// What the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IoChoice {
    /// The best that passes the self-test.
    #[default]
    Auto,
    /// `io_uring`, or an error.
    Uring,
    /// Threads that call `preadv` and `pwritev`.
    Pool,
    /// Through the page cache.
    Buffered,
}

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// `io_uring`.
    Uring,
    /// Threads that call `preadv` and `pwritev`, past the page cache where [`IoReport::direct`].
    Pool,
    /// Threads that go through the page cache.
    Buffered,
    /// Copies from and to segments that are mapped: directories in memory.
    Mapped,
    /// One call after the other: a simulated file system.
    Simulated,
}

impl IoMode {
    /// In one word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Pool => "pool",
            Self::Buffered => "buffered",
            Self::Mapped => "mapped",
            Self::Simulated => "simulated",
        }
    }
}

/// What was found when the segments were opened; also in the log, as one line.
#[derive(Clone, Debug)]
pub struct IoReport {
    /// What moves the bytes.
    pub mode: IoMode,
    /// Why not something better; empty if there is nothing better.
    pub why: String,
    /// Name of the file system, of each directory.
    pub file_systems: Vec<String>,
    /// Whether all directories are driven past the page cache.
    pub direct: bool,
    /// What staging memory is made of.
    pub backing: Backing,
    /// Whether every file system keeps its promises to several processes and across power loss.
    pub trusted: bool,
    /// Why not, if not.
    pub distrust: String,
    /// What to know or change.
    pub warnings: Vec<String>,
}

impl IoReport {
    /// What to tell a user who asks how the store is doing: the warnings, and what a store in memory
    /// lacks, which is not worth one.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        let lacking = (self.mode == IoMode::Mapped && !self.why.is_empty()).then_some(&self.why);
        self.warnings.iter().chain(lacking).cloned().collect()
    }
}
