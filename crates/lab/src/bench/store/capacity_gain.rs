//! `bench store --codec`: pages kept by a store that is too small for all pages, raw and encoded.

use super::report::CapacityGain;
use crate::bench::disk::capacity_for;
use crate::bench::driver::LoadDriver;
use crate::bench::shape::Shape;
use ritornello_codec::Codec;
use ritornello_format::{RUN_HEADER_UNITS_MAX, UNIT};
use ritornello_store::{Budget, Options};
use ritornello_terminal::exit::Failure;
use ritornello_terminal::open;
use std::path::Path;

/// The store's segments hold the raw bytes put, divided by this number, and rounded up to whole
/// segments. With four segments or more not all pages fit, even if a codec shortens them to a
/// third.
const CAPACITY_SHARE: u64 = 4;
/// Minimum number of puts that fit into the store, so that the store evicts gradually.
const PUTS_MIN: u64 = 8;
/// Approximate number of segments of the store: few, so that the unused ends of the segments are a
/// small part of the store.
const SEGMENTS: u64 = 8;

/// Puts all pages of `shape` into a store in `dir` whose segments together have at least a quarter
/// of the pages' raw bytes, once raw and once encoded, and returns how many pages each store keeps.
///
/// # Errors
/// Disk errors and store errors.
pub fn measure(shape: &Shape, segment_bytes: u64, dir: &Path) -> Result<CapacityGain, Failure> {
    let small = smaller(shape);
    let least = small.page_bytes + u64::from(RUN_HEADER_UNITS_MAX) * UNIT;
    let wanted = (small.total() / CAPACITY_SHARE / SEGMENTS).max(4 * least).next_power_of_two();
    let segment_bytes = segment_bytes.min(wanted.max(1 << 20));
    let segments = (small.total() / CAPACITY_SHARE).div_ceil(segment_bytes);
    let pages = u64::from(small.sequences) * u64::from(small.sequence_pages);
    let capacity = capacity_for(segments, segment_bytes, pages * 512)?;
    let mut driver = LoadDriver::new(&small)?;
    let mut kept = |codec| {
        let store_dir = dir.join("kept");
        let mut options = Options::new(&store_dir);
        options.capacity = Some(capacity);
        options.segment_bytes = Some(segment_bytes);
        options.codec = codec;
        let node = open::with(&options)?;
        driver.put(node.store(), 0, small.sequences)?;
        let pages = node.store().stats()?.catalog.pages;
        node.close()?;
        drop(node);
        std::fs::remove_dir_all(&store_dir)?;
        Ok::<u64, Failure>(pages)
    };
    let (raw_pages, encoded_pages) = (kept(Codec::Raw)?, kept(shape.codec)?);
    let budget = Budget::divide(capacity, segment_bytes)?;
    Ok(CapacityGain {
        segments_bytes: u64::from(budget.segments_max) * segment_bytes,
        raw_pages,
        encoded_pages,
        ratio: encoded_pages as f64 / raw_pages.max(1) as f64,
    })
}

/// Returns `shape` with sequences short enough that [`PUTS_MIN`] puts fit into the store. The
/// number of pages stays the same, except for the remainder of the division.
fn smaller(shape: &Shape) -> Shape {
    let pages = shape.total() / CAPACITY_SHARE / PUTS_MIN / shape.page_bytes;
    let sequence_pages = u32::try_from(pages)
        .map_or(shape.sequence_pages, |pages| pages.clamp(1, shape.sequence_pages));
    let sequences = shape.sequences * shape.sequence_pages / sequence_pages;
    Shape { sequence_pages, sequences, ..shape.clone() }
}
