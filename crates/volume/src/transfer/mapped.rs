//! Transfers from and to mapped segments: copies, checksummed while their bytes are in the
//! processor's cache.
//!
//! A page is copied in pieces of [`PIECE`] bytes, and each piece is both checksummed and copied
//! before the next. A write checksums a piece of the source and then copies it. A read copies a
//! piece and then checksums the copy, because other processes may change the mapped bytes at any
//! time. The second step reads from the first-level cache, at several times the speed of memory, so
//! that checksums cost little. Exception: a read first copies a part of a page as a whole if the
//! part has encoded slices, or if an earlier read has delivered the part's beginning to the target.
//! From this copy each slice is verified, and then copied or decoded to the target.

mod copy_threads;
mod read;
mod write;

pub(crate) use copy_threads::{copy_threads, copy_threads_max};
pub(super) use read::read;
pub(super) use write::write;

use crate::map::Map;
use crate::segments::Segments;
use ritornello_format::{Place, SegmentId};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are copied and checksummed at a time: they fit the first-level cache.
const PIECE: usize = 16 << 10;

/// The mapped extents of a run that a transfer needs.
struct MappedRun {
    extents: Vec<MappedExtent>,
}

struct MappedExtent {
    segment: SegmentId,
    /// Bytes of the run, counted from its header.
    logical: Range<u64>,
    /// Offset of these bytes in the segment.
    offset: u64,
    map: Arc<Map>,
    /// Length of the segment's file when this value was made.
    file_bytes: u64,
}

impl MappedRun {
    /// Maps bytes `range` of the run at `place`, counted from its header. `None` if some of them
    /// are in a segment that cannot be mapped.
    ///
    /// # Errors
    /// The segment whose file could not be opened or examined, and why.
    fn new(
        segments: &Segments,
        place: &Place,
        range: Range<u64>,
    ) -> Result<Option<Self>, (SegmentId, io::Error)> {
        let (mut extents, mut from) = (Vec::with_capacity(place.extents.len()), 0);
        for extent in &place.extents {
            let logical = from..from + extent.bytes();
            from = logical.end;
            if logical.start >= range.end || logical.end <= range.start {
                continue;
            }
            let segment = extent.segment;
            let Some(map) = segments.map(segment).map_err(|error| (segment, error))? else {
                return Ok(None);
            };
            let file_bytes = map.file_bytes().map_err(|error| (segment, error))?;
            extents.push(MappedExtent {
                segment,
                logical,
                offset: extent.offset(),
                map,
                file_bytes,
            });
        }
        Ok(Some(Self { extents }))
    }

    /// Calls `visit` with address and length of each contiguous part of bytes `range`, in order.
    /// `range` must be inside the range passed to [`MappedRun::new`]. The parts are faulted in
    /// first ([`Map::fault_in`]), so that touching them raises no signal, except on kernels before
    /// 5.14, or if another program truncates the file meanwhile.
    ///
    /// # Errors
    /// The segment that is too short, removed, or without memory for its pages, and why.
    fn for_each(
        &self,
        range: Range<u64>,
        mut visit: impl FnMut(*mut u8, usize),
    ) -> Result<(), (SegmentId, io::Error)> {
        let first = self.extents.partition_point(|part| part.logical.end <= range.start);
        for part in &self.extents[first..] {
            let (from, to) = (part.logical.start.max(range.start), part.logical.end.min(range.end));
            if from >= to {
                break;
            }
            let at = part.offset + (from - part.logical.start);
            let end = at + (to - from);
            if end > part.file_bytes {
                return Err((part.segment, io::ErrorKind::UnexpectedEof.into()));
            }
            part.map.fault_in(at..end).map_err(|error| (part.segment, error))?;
            visit(part.map.ptr_at(at), (to - from) as usize);
        }
        Ok(())
    }
}
