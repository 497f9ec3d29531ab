//! Where a run lies in mapped segments.

use crate::map::Map;
use crate::segments::Segments;
use ritornello_format::{Place, SegmentId};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The extents of a run that a transfer touches, mapped.
pub(in crate::transfer) struct MappedRun {
    parts: Vec<Part>,
}

struct Part {
    segment: SegmentId,
    /// Bytes of the run, counted from its header.
    logical: Range<u64>,
    /// Where they begin in the segment.
    offset: u64,
    map: Arc<Map>,
    /// Bytes that the segment had when it was last looked at.
    file_bytes: u64,
}

impl MappedRun {
    /// That of bytes `range` of `place`, counted from the run's header; `None` if some of it is in a
    /// segment that cannot be mapped.
    ///
    /// # Errors
    /// If a segment cannot be opened.
    pub(in crate::transfer) fn new(
        segments: &Segments,
        place: &Place,
        range: Range<u64>,
    ) -> Result<Option<Self>, (SegmentId, io::Error)> {
        let (mut parts, mut from) = (Vec::with_capacity(place.extents.len()), 0);
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
            parts.push(Part { segment, logical, offset: extent.offset(), map, file_bytes });
        }
        Ok(Some(Self { parts }))
    }

    /// Visits the bytes `range` of the run, which it was made for, in order: where they are, which
    /// can be touched, and how many are there.
    ///
    /// # Errors
    /// If the segment is shorter than that by now, or gone, or file_bytes no memory for it.
    pub(in crate::transfer) fn for_each(
        &self,
        range: Range<u64>,
        mut visit: impl FnMut(*mut u8, usize),
    ) -> Result<(), (SegmentId, io::Error)> {
        let first = self.parts.partition_point(|part| part.logical.end <= range.start);
        for part in &self.parts[first..] {
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
