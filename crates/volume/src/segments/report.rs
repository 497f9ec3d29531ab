//! The I/O mode that moves a store's bytes, and why it was chosen.

use crate::staging::Backing;

/// The I/O mode that the user requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IoChoice {
    /// The best mode that passes the self-test.
    #[default]
    Auto,
    /// `io_uring`; where it cannot be used the opening fails, except on simulated files.
    Uring,
    /// Threads that call `preadv` and `pwritev`.
    Pool,
    /// Through the page cache.
    Buffered,
}

/// The I/O mode in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// `io_uring`.
    Uring,
    /// Threads that call `preadv` and `pwritev`, without the page cache on volumes where direct I/O
    /// works.
    Pool,
    /// Threads that go through the page cache.
    Buffered,
    /// Copies from and to mapped segments, where all directories are in memory.
    Mapped,
    /// One operation of a call at a time, on a simulated file system.
    Simulated,
}

impl IoMode {
    /// The mode as one lower-case word.
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

    /// The tier of the segments: `host` if they are in memory, else `disk`, as in metrics.
    #[must_use]
    pub const fn tier(self) -> &'static str {
        match self {
            Self::Mapped => "host",
            Self::Uring | Self::Pool | Self::Buffered | Self::Simulated => "disk",
        }
    }
}

/// The I/O mode chosen when the segments were opened, and the results of the self-test from which
/// it was chosen. Logged when the segments are opened: `warnings` and `distrust` as warnings, the
/// other fields in one line. Volumes that are added, leave or return later change `direct` and
/// `file_systems` only, and a limit of open files that is too low adds a warning.
#[derive(Clone, Debug)]
pub struct IoReport {
    /// The I/O mode in use.
    pub mode: IoMode,
    /// Why a better mode is not in use, or why a mapped store has no huge pages; empty if
    /// `io_uring` is in use, or if huge pages are available to a mapped store.
    pub why: String,
    /// Name of the file system of each volume that is present, in the order of the volumes.
    pub file_systems: Vec<String>,
    /// Whether all directories are accessed without the page cache.
    pub direct: bool,
    /// The kind of the staging memory.
    pub backing: Backing,
    /// False if a directory is on a file system that another machine or process serves (a network
    /// file system, FUSE): locks between processes, and synced bytes after power loss, then depend
    /// on that machine or process. True on an unknown file system, about which `warnings` warns.
    pub trusted: bool,
    /// Why `trusted` is false; else empty.
    pub distrust: String,
    /// Conditions that a user should know or change.
    pub warnings: Vec<String>,
}

impl IoReport {
    /// The warnings for the statistics of the store: [`warnings`](Self::warnings), and why a store
    /// in memory has no huge pages, which is not worth a warning in the log.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        let lacking = (self.mode == IoMode::Mapped && !self.why.is_empty()).then_some(&self.why);
        self.warnings.iter().chain(lacking).cloned().collect()
    }
}
