//! How many pages stay in a store that is too small for them, encoded and as they come.

use super::mover::Mover;
use super::place::capacity_for;
use super::report::Kept;
use super::shape::Shape;
use crate::exit::Failure;
use crate::open;
use ritornello_codec::Codec;
use ritornello_format::{RUN_HEADER_UNITS_MAX, UNIT};
use ritornello_store::{Budget, Options};
use std::path::Path;

/// The store holds one in so many of the pages that are put, as they come. Not all of them would stay
/// if they took a third of that.
const SHARE: u64 = 4;
/// Puts that fit into the store, at least: it evicts by and by.
const PUTS: u64 = 8;
/// Segments of the store, about. What is left at the end of one is little beside it.
const SEGMENTS: u64 = 8;

/// Puts the whole set into a store of a quarter of its size, as it comes and encoded, in `dir`.
///
/// # Errors
/// Those of the disk and of the store.
pub fn measure(shape: &Shape, segment_bytes: u64, dir: &Path) -> Result<Kept, Failure> {
    let small = smaller(shape);
    let least = small.page_bytes + u64::from(RUN_HEADER_UNITS_MAX) * UNIT;
    let wanted = (small.total() / SHARE / SEGMENTS).max(4 * least).next_power_of_two();
    let segment_bytes = segment_bytes.min(wanted.max(1 << 20));
    let segments = (small.total() / SHARE).div_ceil(segment_bytes);
    let pages = u64::from(small.sequences) * u64::from(small.sequence_pages);
    let capacity = capacity_for(segments, segment_bytes, pages * 512)?;
    let mut mover = Mover::new(&small)?;
    let mut kept = |codec| {
        let home = dir.join("kept");
        let mut options = Options::new(&home);
        options.capacity = Some(capacity);
        options.segment_bytes = Some(segment_bytes);
        options.codec = codec;
        let node = open::with(&options)?;
        mover.put(node.store(), 0, small.sequences)?;
        let pages = node.store().stats()?.catalog.pages;
        node.close()?;
        drop(node);
        std::fs::remove_dir_all(&home)?;
        Ok::<u64, Failure>(pages)
    };
    let (raw_pages, encoded_pages) = (kept(Codec::Raw)?, kept(shape.codec)?);
    let budget = Budget::divide(capacity, segment_bytes)?;
    Ok(Kept {
        segments_bytes: u64::from(budget.segments_max) * segment_bytes,
        raw_pages,
        encoded_pages,
        ratio: encoded_pages as f64 / raw_pages.max(1) as f64,
    })
}

/// The same pages in shorter sequences, if need be.
fn smaller(shape: &Shape) -> Shape {
    let pages = shape.total() / SHARE / PUTS / shape.page_bytes;
    let sequence_pages = u32::try_from(pages)
        .map_or(shape.sequence_pages, |pages| pages.clamp(1, shape.sequence_pages));
    let sequences = shape.sequences * shape.sequence_pages / sequence_pages;
    Shape { sequence_pages, sequences, ..shape.clone() }
}
