//! The backends, by name.

#[cfg(feature = "art")]
use crate::{ArtIndex, ArtOptions};
#[cfg(feature = "lsm")]
use crate::{LsmIndex, LsmOptions};
use crate::{MemoryIndex, PrefixIndex, RunIndex, RunOptions};
use ritornello_format::{Error, Result};
use ritornello_medium::Medium;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

/// A backend of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Backend {
    /// Memory-resident, with a journal and two checkpoints: the default.
    Run,
    /// Hash maps, which are lost when the index is closed: the backend with which tests compare all
    /// other backends.
    Memory,
    /// Holt, a persistent adaptive radix tree. Cargo feature `art`.
    Art,
    /// RocksDB, for indexes larger than memory. Cargo feature `lsm`.
    Lsm,
}

/// Options of [`Backend::open`]. A backend ignores options that do not apply to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Maximum bytes that the index's files may take: see [`RunOptions::metadata_bytes_max`].
    pub metadata_bytes_max: u64,
    /// Maximum bytes of memory in which `lsm` and `art` cache their files.
    pub cache_bytes: u64,
    /// Whether every change is durable when the call that makes it returns, except the recency from
    /// [`crate::PrefixIndex::touch`]. Only `art` obeys this option; in other persistent backends a
    /// change is durable after the next sync.
    pub durable: bool,
    /// Whether the open of `lsm` or `art` checks everything on disk. `run` ignores this option: it
    /// always checks what it reads.
    pub verify: bool,
    /// Whether the previous owner closed the index without a failed sync: see
    /// [`RunOptions::clean`]. `lsm` ignores it: every open rewrites data that may exist in the page
    /// cache only. `art` ignores it too, because Holt has no way to write this data again.
    pub clean: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            metadata_bytes_max: RunOptions::default().metadata_bytes_max,
            cache_bytes: 128 << 20,
            durable: false,
            verify: true,
            clean: true,
        }
    }
}

impl Backend {
    /// All backends, compiled in or not.
    const ALL: [Self; 4] = [Self::Run, Self::Memory, Self::Art, Self::Lsm];

    /// The backends that this program was compiled with.
    pub fn compiled() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|backend| match backend {
            Self::Run | Self::Memory => true,
            Self::Art => cfg!(feature = "art"),
            Self::Lsm => cfg!(feature = "lsm"),
        })
    }

    /// The backend's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Memory => "memory",
            Self::Art => "art",
            Self::Lsm => "lsm",
        }
    }

    /// Whether the index outlives the process.
    #[must_use]
    pub const fn is_persistent(self) -> bool {
        !matches!(self, Self::Memory)
    }

    /// Opens the index in its own directory `dir`, or creates an index.
    ///
    /// # Errors
    /// `Invalid` if the backend is not compiled in; the errors of the backend's own `open`.
    pub fn open(
        self,
        medium: Arc<dyn Medium>,
        dir: &Path,
        options: &OpenOptions,
    ) -> Result<Box<dyn PrefixIndex>> {
        match self {
            Self::Run => {
                let OpenOptions { metadata_bytes_max, clean, .. } = *options;
                let options = RunOptions { metadata_bytes_max, clean, ..RunOptions::default() };
                Ok(Box::new(RunIndex::open(medium, dir, options)?))
            }
            Self::Memory => Ok(Box::new(MemoryIndex::new())),
            #[cfg(feature = "art")]
            Self::Art => {
                let OpenOptions { cache_bytes, durable, verify, .. } = *options;
                let options = ArtOptions { cache_bytes, durable, verify };
                Ok(Box::new(ArtIndex::open(dir, options)?))
            }
            #[cfg(not(feature = "art"))]
            Self::Art => Err(not_compiled(self.name())),
            #[cfg(feature = "lsm")]
            Self::Lsm => {
                let OpenOptions { metadata_bytes_max, cache_bytes, verify, .. } = *options;
                let fitting = LsmOptions::within(metadata_bytes_max);
                let options = LsmOptions { block_cache_bytes: cache_bytes, verify, ..fitting };
                Ok(Box::new(LsmIndex::open(dir, &options)?))
            }
            #[cfg(not(feature = "lsm"))]
            Self::Lsm => Err(not_compiled(self.name())),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Backend {
    type Err = Error;

    /// The backend of this name; `Invalid` if it is unknown or not compiled in.
    fn from_str(name: &str) -> Result<Self> {
        Self::compiled().find(|backend| backend.name() == name).ok_or_else(|| not_compiled(name))
    }
}

fn not_compiled(name: &str) -> Error {
    let known = Backend::ALL.iter().any(|backend| backend.name() == name);
    let compiled: Vec<&str> = Backend::compiled().map(Backend::name).collect();
    let why = if known { "is not compiled in: build with its cargo feature" } else { "is unknown" };
    Error::invalid(format!("the index `{name}` {why}; this build has {}", compiled.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_an_unknown_backend_lists_the_compiled_backends() {
        for backend in Backend::compiled() {
            assert_eq!(backend.name().parse::<Backend>().unwrap(), backend);
        }
        let error = "cuckoo".parse::<Backend>().unwrap_err().to_string();
        assert!(error.contains("cuckoo") && error.contains("run, memory"), "{error}");
    }
}
