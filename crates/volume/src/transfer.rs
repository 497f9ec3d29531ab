//! Moves runs between the caller's memory and the segments, and checksums their headers and pages
//! on the way.

mod check;
mod chunk;
mod copy;
mod disk;
mod lanes;
mod mapped;
mod pack;
mod page;
mod read;
mod salvage;
mod sections;
mod stored_page;
mod stream_copy;
mod verify_run;
mod volume_times;
mod wide_crc;
mod write;

pub(crate) use mapped::{copy_threads, copy_threads_max};
pub use pack::{Pack, PackedPage, PackedPages, Packing, Unpack};
pub use salvage::SalvagedRun;
pub use sections::Sections;
pub use verify_run::{VerifiedRun, is_unreadable_on_disk};
pub use write::failed_volume;

use crate::page_memory::{PageSource, PageTarget};
use crate::staging::{Staging, StagingBuffer};
use ritornello_format::{Place, RunHeader, ScopeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval at which a call that waits for operations in flight checks whether it was cancelled.
const CANCEL_CHECK: Duration = Duration::from_millis(20);

/// Deadline, cancellation and options of one call. After cancellation or the deadline no operation
/// is submitted. The call still waits for operations in flight, because the kernel uses the
/// caller's memory until they complete; a read whose operations in flight all use memory of this
/// crate alone leaves them behind after a short time ([`Segments::read_runs`]). The default has no
/// deadline and cannot be cancelled.
///
/// [`Segments::read_runs`]: crate::Segments::read_runs
#[derive(Clone, Debug, Default)]
pub struct Control {
    /// Time from which the call submits no further operation.
    pub deadline: Option<Instant>,
    /// Once this flag is set, the call submits no further operation.
    pub cancelled: Option<Arc<AtomicBool>>,
    /// Send pages through staging even where they could move in place. Without effect on mapped
    /// segments, on pages shorter than 4 KiB, and on pages that are in staging already. A transfer
    /// with this copy is faster if the caller's memory is in pages of 4 KiB and the block device
    /// accepts few scatter-gather entries per operation.
    pub through_staging: bool,
    /// The order in which parts of the pages of a get are needed, and the waiters to notify. Puts
    /// ignore this field.
    pub sections: Option<Arc<Sections>>,
}

impl Control {
    /// The reason to stop now, or `None` to continue.
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

    /// Maximum time after which [`Control::stop`] must be checked again; `None` if the call has no
    /// deadline and cannot be cancelled.
    pub(crate) fn check_after(&self) -> Option<Duration> {
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        let until_deadline = self.deadline.map(left);
        match &self.cancelled {
            None => until_deadline,
            Some(_) => Some(until_deadline.map_or(CANCEL_CHECK, |left| left.min(CANCEL_CHECK))),
        }
    }

    /// Takes `bytes` of staging memory ([`Staging::take`]). Waits for free memory until the
    /// deadline or the cancellation of this call, at most 30 seconds, then returns `None`.
    #[must_use]
    pub fn stage(&self, staging: &Arc<Staging>, bytes: usize) -> Option<StagingBuffer> {
        staging.take(bytes, self.deadline, &|| self.stop().is_some())
    }
}

/// A run to write.
#[derive(Clone, Copy)]
pub struct RunWrite<'a> {
    /// The destination. The place's `header_checksum` is ignored.
    pub place: &'a Place,
    /// The header to write. The caller sets store, scope, slot, page length, parent, keys and
    /// slices per page; if the source's pages are encoded, also every slice, with checksum zero.
    /// The other fields are ignored: the write computes them from the place and from the bytes.
    pub header: &'a RunHeader,
    /// The bytes as stored on disk.
    pub source: &'a dyn PageSource,
    /// The page of `source` that becomes the run's first page.
    pub first: usize,
}

/// Consecutive pages of a run to read.
#[derive(Clone, Copy)]
pub struct RunRead<'a> {
    /// The location of the run.
    pub place: &'a Place,
    /// The scope that the run header must name.
    pub scope: ScopeId,
    /// The page length in bytes that the run header must name.
    pub page_bytes: u64,
    /// The keys that the run header must name for the pages read, one key per page.
    pub keys: &'a [&'a [u8]],
    /// Number in the run of the first page to read.
    pub first: u32,
    /// The destination. After a miss, the page's memory may hold any bytes.
    pub target: &'a dyn PageTarget,
    /// The page of `target` that receives page `first`.
    pub target_first: usize,
    /// The handling of encoded pages.
    pub encoded: Encoded<'a>,
}

/// Handling of encoded pages.
#[derive(Clone, Copy)]
pub enum Encoded<'a> {
    /// Decode encoded pages. A page with an unknown codec misses.
    Unpack(&'a dyn Unpack),
    /// Deliver no encoded page: encoded pages miss.
    Refuse,
    /// Deliver all pages as stored on disk, verified and padded: the target's pages are as long as
    /// the place's pages.
    AsStored,
}

/// The outcome of reading one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageOutcome {
    /// The stored bytes match their checksums, and the target holds the page that was written under
    /// the page's key.
    Verified,
    /// The target does not hold the page.
    Missed(MissReason),
}

impl PageOutcome {
    /// Whether the page was verified.
    #[must_use]
    pub const fn is_verified(self) -> bool {
        matches!(self, Self::Verified)
    }
}

/// Why a page missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MissReason {
    /// The place is inconsistent, is outside the segments, or does not hold the pages of the read.
    Place,
    /// The place holds no run header, or a header that differs from the header that the index names
    /// or does not fit the read.
    Header,
    /// The header names a different scope.
    Scope,
    /// The header names a different key for this page.
    Key,
    /// This process does not know the page's codec, or the read refuses encoded pages
    /// ([`Encoded::Refuse`]).
    Codec,
    /// The checksum matches and the codec is known, but the bytes do not decode: they were damaged
    /// before they were written.
    Frame,
    /// The checksum does not match: the stored bytes differ from the bytes written.
    Checksum,
    /// The file system failed, or the segments were opened before a fork. A put of the store also
    /// reports this reason for a write that failed for another cause, such as a lack of staging
    /// memory, unless the call was stopped or a volume has stalled.
    Io,
    /// The target has no memory for the page, or its memory is not as long as the page.
    Memory,
    /// No staging memory became free in time.
    Staging,
    /// The caller cancelled.
    Cancelled,
    /// The deadline passed.
    Deadline,
    /// The volume has completed no operation for two seconds, although some are in flight.
    Stalled,
}

impl MissReason {
    /// All reasons, in the order of their declaration. The order is part of the protocol between
    /// processes: additions come last.
    pub const ALL: [Self; 13] = [
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
        Self::Stalled,
    ];

    /// The reason as one lower-case word, as in metrics.
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
            Self::Stalled => "stalled",
        }
    }

    /// Whether stored data (the place in the index, or the bytes on disk) caused the miss. The
    /// caller then reports the page: the owner reads it again, and if it finds the damage too,
    /// removes the page and quarantines its space. The other reasons are conditions of the call or
    /// of this process.
    #[must_use]
    pub const fn is_damage(self) -> bool {
        matches!(
            self,
            Self::Place | Self::Header | Self::Scope | Self::Key | Self::Frame | Self::Checksum
        )
    }
}
