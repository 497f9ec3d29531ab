//! Moving runs between memory and segments, with checksums on the way.

mod check;
mod chunk;
mod copy;
mod in_flight;
mod mapped;
mod pack;
mod page;
mod read;
mod read_state;
mod salvage;
mod sections;
mod slices;
mod verify;
mod write;
mod write_error;
mod write_state;

pub(crate) use mapped::copy_threads;
pub use pack::{Pack, PackedPage, PackedPages, Packing, Unpack};
pub use salvage::FoundRun;
pub use sections::Sections;
pub use verify::{VerifiedRun, is_refused_by_disk};

use crate::memory::{PageSource, PageTarget};
use crate::segments::Segments;
use ritornello_format::{Place, Result, RunHeader, ScopeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// When to stop. Nothing is begun after that; what is in flight is waited for, since the memory is
/// the caller's. The default never stops.
#[derive(Clone, Debug, Default)]
pub struct Control {
    /// Stop at this time.
    pub deadline: Option<Instant>,
    /// Stop when this is true.
    pub cancelled: Option<Arc<AtomicBool>>,
    /// Whether all bytes go through staging, also those that could move in place: where memory is
    /// in small pages, and the disk takes few pieces an operation, the copy is the faster way.
    pub through_staging: bool,
    /// What of the pages of a get is wanted first, and who waits for it; nothing to puts.
    pub sections: Option<Arc<Sections>>,
}

impl Control {
    /// Why to stop now, if so.
    #[must_use]
    pub fn stop(&self) -> Option<MissReason> {
        if self.cancelled.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire)) {
            Some(MissReason::Cancelled)
        } else if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            Some(MissReason::Deadline)
        } else {
            None
        }
    }
}

/// A run to write.
pub struct RunWrite<'a> {
    /// Where to; its `header_checksum` is not looked at.
    pub place: &'a Place,
    /// What it is: store, scope, slot, page length, parent, keys and slices a page; and the slices,
    /// if the source's pages are encoded (all of them listed, their checksums zero). The rest follows
    /// from the place and from the bytes, and is not looked at.
    pub header: &'a RunHeader,
    /// The bytes, as they are to lie on disk.
    pub source: &'a dyn PageSource,
    /// The page of `source` that is the run's first.
    pub first: usize,
}

/// Some consecutive pages of a run to read.
pub struct RunRead<'a> {
    /// Where from.
    pub place: &'a Place,
    /// The scope its header must name.
    pub scope: ScopeId,
    /// The page length its header must name.
    pub page_bytes: u64,
    /// The keys its header must name for the pages read; there are as many pages as keys.
    pub keys: &'a [&'a [u8]],
    /// The page of the run to begin with.
    pub first: u32,
    /// Where to. Memory of pages that are missed may have been written to.
    pub target: &'a dyn PageTarget,
    /// The page of `target` that `first` goes to.
    pub target_first: usize,
    /// What to do with encoded pages.
    pub encoded: Encoded<'a>,
}

/// What to do with pages that are encoded.
#[derive(Clone, Copy)]
pub enum Encoded<'a> {
    /// Decode them. A codec that is not known is a miss.
    Unpack(&'a dyn Unpack),
    /// Miss them.
    Refuse,
    /// Deliver all pages as they lie on disk, verified and padded: the target's pages are as long as
    /// the place's.
    AsStored,
}

/// What became of a page that was to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageFate {
    /// It is in the target, and it is what was written under its key.
    Verified,
    /// It is not.
    Missed(MissReason),
}

impl PageFate {
    /// Whether the page was verified.
    #[must_use]
    pub const fn is_verified(self) -> bool {
        matches!(self, Self::Verified)
    }
}

/// Why a page could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MissReason {
    /// The place does not add up, or lies outside the volumes.
    Place,
    /// There is no header there, or not the one the index meant.
    Header,
    /// The header is of another scope.
    Scope,
    /// The header names another key for this page.
    Key,
    /// The page is encoded in a way that is not known here.
    Codec,
    /// The bytes have their checksum and a known codec, but they do not decode.
    Frame,
    /// The bytes are not those that were written.
    Checksum,
    /// The file system failed.
    Io,
    /// The target has no memory of the right length for this page.
    Memory,
    /// There was no staging memory in time.
    Staging,
    /// The caller cancelled.
    Cancelled,
    /// The deadline passed.
    Deadline,
}

impl MissReason {
    /// All reasons, for tables of counters.
    pub const ALL: [Self; 12] = [
        Self::Place,
        Self::Header,
        Self::Scope,
        Self::Key,
        Self::Codec,
        Self::Frame,
        Self::Checksum,
        Self::Io,
        Self::Memory,
        Self::Staging,
        Self::Cancelled,
        Self::Deadline,
    ];

    /// In one word, as in metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Place => "place",
            Self::Header => "header",
            Self::Scope => "scope",
            Self::Key => "key",
            Self::Codec => "codec",
            Self::Frame => "frame",
            Self::Checksum => "checksum",
            Self::Io => "io",
            Self::Memory => "memory",
            Self::Staging => "staging",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
        }
    }

    /// Whether the bytes on the disk are to blame (and the entry is to be quarantined), rather
    /// than this call.
    #[must_use]
    pub const fn is_damage(self) -> bool {
        matches!(
            self,
            Self::Place | Self::Header | Self::Scope | Self::Key | Self::Frame | Self::Checksum
        )
    }
}

impl Segments {
    /// Writes runs, and returns for each the header checksum that the index is to keep. Nothing is
    /// durable before [`Segments::sync`].
    ///
    /// Within a run the header goes last. Pages are padded with zeroes. A run is written as a whole
    /// or not at all, as far as the caller may decode_expected_header: if anything of it fails, so does the run.
    ///
    /// # Errors
    /// For each run: `Invalid` if place, header and source do not match; `Retry` if the file system
    /// failed, staging memory ran out, or `control` said stop (context `reason`).
    pub fn write_runs(&self, runs: &[RunWrite<'_>], control: &Control) -> Vec<Result<u64>> {
        if self.is_mapped() {
            return mapped::write(self, runs, control);
        }
        write::WriteJob::run(self, runs, control)
    }

    /// Reads pages, and returns for each read the fate of each of its pages. Headers are read with
    /// the pages, not before them.
    ///
    /// Where `control` names sections of the pages, they come in that order, of all pages of all
    /// reads, and those that came before ([`Sections::arrived`]) are left as they are. The caller sees
    /// to it that whoever waits for them wants no other pages.
    pub fn read_runs(&self, reads: &[RunRead<'_>], control: &Control) -> Vec<Vec<PageFate>> {
        if let Some(sections) = control.sections.as_deref().filter(|all| all.fit(reads)) {
            let read = if self.is_mapped() { sections::read_mapped } else { sections::read };
            return read(self, reads, sections, control);
        }
        if self.is_mapped() {
            return mapped::read(self, reads, control);
        }
        read::ReadJob::run(self, reads, control)
    }
}
