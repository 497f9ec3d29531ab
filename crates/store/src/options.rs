//! The options of opening a store.

use crate::admission::{AdmissionMode, WriteBudget};
use crate::eviction::PolicyKind;
use ritornello_codec::Codec;
use ritornello_format::{Error, Result, parse_bytes};
use ritornello_volume::segments::IoChoice;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Default bytes per segment file; the manifest holds the actual value.
pub const SEGMENT_BYTES: u64 = 256 << 20;
/// Minimum bytes per segment file.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Default scrub rate in bytes per second: a tebibyte in a day and a half.
pub const SCRUB_RATE: u64 = 8 << 20;

/// Minimum memory ceiling of an index, in bytes.
const INDEX_MEMORY_MIN: u64 = 16 << 20;

/// When a put is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// A put is complete when its pages are visible. The next sync, in the background
    /// ([`Options::sync_interval`]) or in `flush`, lets the pages survive a crash of the owner's
    /// process and a power loss.
    #[default]
    Cache,
    /// A put is complete when its pages survive a power loss.
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

/// The index backend of a store. If the owner names a different index, the store is converted,
/// unless a volume is absent; `memory` is refused for a store with another index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexKind {
    /// Run records in memory, a journal and checkpoints on disk.
    #[default]
    Run,
    /// Plain maps in memory, nothing on disk: for comparison, empty after a restart.
    Memory,
    /// RocksDB, for indexes larger than memory. Requires the Cargo feature `lsm`.
    #[cfg(feature = "lsm")]
    Lsm,
}

/// Parses an index: its name, and for `run` optionally a memory ceiling after a colon, as in
/// `run:8GiB`.
///
/// # Errors
/// `Invalid` for an unknown name, listing the names; for a malformed size; for a ceiling of another
/// index, or below 16 MiB.
pub fn parse_index(word: &str) -> Result<(IndexKind, Option<u64>)> {
    let Some((name, size)) = word.split_once(':') else {
        return IndexKind::parse(word).map(|kind| (kind, None));
    };
    let (kind, bytes) = (IndexKind::parse(name)?, parse_bytes(size)?);
    if kind != IndexKind::Run || bytes < INDEX_MEMORY_MIN {
        return Err(Error::invalid(
            "only `run` has a memory ceiling, of 16 MiB at least, as in \"run:8GiB\"",
        )
        .with("given", word));
    }
    Ok((kind, Some(bytes)))
}

impl IndexKind {
    /// The backends compiled in.
    pub const ALL: &[Self] = &[
        Self::Run,
        Self::Memory,
        #[cfg(feature = "lsm")]
        Self::Lsm,
    ];

    /// The name users type, also in the manifest.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Memory => "memory",
            #[cfg(feature = "lsm")]
            Self::Lsm => "lsm",
        }
    }

    /// Parses the name in a manifest.
    ///
    /// # Errors
    /// `Invalid` if the backend is not compiled in, with advice.
    pub(crate) fn stored(word: &str) -> Result<Self> {
        Self::parse(word).map_err(|error| {
            Error::invalid(format!(
                "this store has the index `{word}`: open the store with a build that has this \
                 index, or convert the store with that build (`ritornello convert-index DIR --to \
                 run`)"
            ))
            .because(error)
        })
    }

    /// Parses the name users type.
    ///
    /// # Errors
    /// `Invalid`, listing the backends compiled in.
    pub fn parse(word: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|kind| kind.word() == word).ok_or_else(|| {
            let words: Vec<&str> = Self::ALL.iter().map(|kind| kind.word()).collect();
            let advice = match word {
                "lsm" => {
                    ": \"lsm\" is RocksDB, and needs a build with the cargo feature `lsm` \
                     (`make rocksdb` explains how)"
                }
                _ => "",
            };
            Error::invalid(format!("this build has the indexes {}{advice}", words.join(", ")))
                .with("given", word)
        })
    }
}

/// How to open a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory: metadata, the socket, and the segments unless `paths` is set.
    pub dir: PathBuf,
    /// Directories besides `dir`, one per disk, which hold segments, and copies of the manifest and
    /// of the scope registry; `None` if the caller gave no list. A new store is created with all of
    /// them. Opening an existing store adds the listed directories that the store lacks, unless the
    /// disk of a directory seems not to be mounted, and keeps its directories that are not listed.
    pub further_dirs: Option<Vec<PathBuf>>,
    /// Capacity in bytes. Required for a new store; the owner resizes an existing store to this
    /// capacity, or keeps its capacity with a warning if this is impossible.
    pub capacity: Option<u64>,
    /// Directories of all segments of a new store; if empty, these are a directory in `dir`, and
    /// `further_dirs`. Not allowed together with `further_dirs`. The directories of an existing
    /// store are changed with [`Catalog::change_capacity`](crate::Catalog::change_capacity).
    pub paths: Vec<PathBuf>,
    /// When a put is complete.
    pub durability: Durability,
    /// How segments are read and written: in the best mode that passes the self-test, or in a mode
    /// that the caller names.
    pub io: IoChoice,
    /// Index backend. With `None` an existing store keeps its index, and a new store gets the
    /// default.
    pub index: Option<IndexKind>,
    /// Maximum resident bytes of the index `run`: at this ceiling puts are skipped until eviction
    /// has freed memory. `None`: a quarter of the memory available to this process.
    pub index_memory: Option<u64>,
    /// Bytes per segment file. The size is fixed when the store is created.
    pub segment_bytes: Option<u64>,
    /// Interval of the background syncs, which make commits durable in `cache` mode. The store
    /// syncs earlier if space or the index's journal requires it.
    pub sync_interval: Duration,
    /// Whether the open keeps all scopes without pages, because a salvage will follow. Without this
    /// option an open of a store with more than 1,024 scopes drops most of them.
    pub keep_empty_scopes: bool,
    /// Whether background threads sync and maintain the store. Without them, as in deterministic
    /// tests, the caller does so with [`StoreCore::run_once`](crate::StoreCore::run_once).
    pub background_threads: bool,
    /// The eviction policy.
    pub eviction: PolicyKind,
    /// The codec of scopes without a codec setting. A lossy codec applies to scopes whose dtype and
    /// layout it supports; pages of other scopes are stored unencoded.
    pub codec: Codec,
    /// Maximum number of bytes per second that scrubbing reads while the store is idle, where a run
    /// counts as at least 32 KiB per page. While the store is in use, scrubbing reads at an eighth
    /// of this rate. Zero for no scrubbing.
    pub scrub_rate: u64,
    /// Which pages are admitted.
    pub admission: AdmissionMode,
    /// Bytes that puts may write per span of time; `None` for no limit.
    pub write_budget: Option<WriteBudget>,
    /// Returns seconds since 1970. Tests replace it.
    pub wall_clock: fn() -> u64,
    /// Length above which a page is divided over the volumes: 16 MiB. Tests replace it.
    pub long_page_bytes: u64,
}

/// The system's seconds since 1970.
fn system_clock() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Parses the name of a codec.
///
/// # Errors
/// `Invalid`, listing the names.
pub fn parse_codec(word: &str) -> Result<Codec> {
    Codec::parse(word).ok_or_else(|| {
        let words: Vec<&str> = Codec::ALL.iter().map(|codec| codec.word()).collect();
        Error::invalid(format!("a codec is one of {}", words.join(", "))).with("given", word)
    })
}

impl Options {
    /// Default options for `dir`.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            further_dirs: None,
            capacity: None,
            paths: Vec::new(),
            durability: Durability::default(),
            io: IoChoice::Auto,
            index: None,
            index_memory: None,
            segment_bytes: None,
            sync_interval: Duration::from_secs(2),
            keep_empty_scopes: false,
            background_threads: true,
            eviction: PolicyKind::default(),
            codec: Codec::Raw,
            scrub_rate: SCRUB_RATE,
            admission: AdmissionMode::default(),
            write_budget: None,
            wall_clock: system_clock,
            long_page_bytes: 16 << 20,
        }
    }
}
