//! Hit rates of three ways to keep pages in the same number of bytes: in the store, in one file per
//! page, and in memory that a restart empties. Each hit rate comes from a replay of the same
//! requests, without an index.

use super::args::AdaptiveArgs;
use super::report::HitRate;
use crate::bench::index::load::{Load, Workload};
use ritornello_format::{UNIT, units_of};
use ritornello_sim::{ReplayCounts, Sizes, Trace, TracePart, replay};
use ritornello_store::eviction::PolicyKind;
use ritornello_terminal::exit::Failure;
use std::collections::BTreeMap;

/// Bytes that a file takes besides its blocks: an inode on ext4.
const INODE_BYTES: u64 = 256;
/// Bytes that each way to keep pages may use, as a share of the bytes of all pages.
const BUDGET_SHARE: f64 = 0.5;

/// Returns the hit rate of each way to keep pages.
///
/// # Errors
/// Errors of the generator of the requests, and of the replays.
pub fn measure(args: &AdaptiveArgs) -> Result<Vec<HitRate>, Failure> {
    let load = Load::new(Workload::TenStage, args.entries)?;
    let Some(trace) = load.trace() else { return Ok(Vec::new()) };
    let counted_from = load.stages()[0].start;
    let budget = (trace.footprint() as f64 * args.page_bytes as f64 * BUDGET_SHARE) as u64;
    let page = units_of(args.page_bytes) * UNIT;
    // A page also takes a share of a run header. A first replay measures that share, because it
    // depends on the number of runs.
    let tried = store(trace, budget / page, args.page_bytes, counted_from)?;
    let with_header = tried.bytes_written as f64 / tried.admitted.max(1) as f64;
    let pages = (budget as f64 / with_header) as u64;
    let kept = store(trace, pages, args.page_bytes, counted_from)?;
    // In memory a page takes exactly its bytes: it is not rounded up to blocks, and runs have no
    // headers.
    let in_memory = budget / args.page_bytes;
    let middle = trace.requests() / 2;
    let before =
        store(&trace.clone().part(TracePart::First), in_memory, args.page_bytes, counted_from)?;
    let after = store(
        &trace.clone().part(TracePart::Second),
        in_memory,
        args.page_bytes,
        counted_from.saturating_sub(middle),
    )?;
    let as_files = budget / (page + INODE_BYTES);
    let rate = |hits: u64, of: u64| hits as f64 / of.max(1) as f64;
    Ok(vec![
        HitRate { name: "the store", pages, hit_rate: kept.hit_rate() },
        HitRate {
            name: "one file per page, least recently used evicted",
            pages: as_files,
            hit_rate: files(trace, as_files, counted_from),
        },
        HitRate {
            name: "memory, with one restart",
            pages: in_memory,
            hit_rate: rate(before.hits + after.hits, before.references + after.references),
        },
    ])
}

/// Replays the trace with the store's own eviction, and room for `pages` pages. Hits count from
/// request `from`.
fn store(trace: &Trace, pages: u64, page_bytes: u64, from: usize) -> Result<ReplayCounts, Failure> {
    let warm_up = from as f64 / trace.requests().max(1) as f64;
    let sizes = Sizes { capacity_blocks: pages.max(1), block_bytes: page_bytes, warm_up };
    Ok(replay(trace, PolicyKind::default().build().as_mut(), &sizes, &mut |_| ())?)
}

/// Returns the hit rate of one file per page, with room for `pages` pages: a request uses its pages
/// in order, and the least recently used page is evicted. A page is a hit if it and all pages
/// before it are present. Hits count from request `from`.
fn files(trace: &Trace, pages: u64, from: usize) -> f64 {
    let mut used: Vec<Option<u64>> = vec![None; trace.footprint()];
    let mut order: BTreeMap<u64, u32> = BTreeMap::new();
    let (mut clock, mut hits, mut asked) = (0, 0, 0);
    for number in 0..trace.requests() {
        let blocks = trace.request(number);
        if number >= from {
            asked += blocks.len();
            hits += blocks.iter().take_while(|block| used[**block as usize].is_some()).count();
        }
        for &block in blocks {
            if let Some(then) = used[block as usize] {
                order.remove(&then);
            }
            clock += 1;
            used[block as usize] = Some(clock);
            order.insert(clock, block);
            if order.len() as u64 > pages
                && let Some((_, gone)) = order.pop_first()
            {
                used[gone as usize] = None;
            }
        }
    }
    hits as f64 / asked.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_sim::TraceBuilder;

    #[test]
    fn per_page_lru_evicts_prefix_first() {
        let mut builder = TraceBuilder::new("t");
        for request in [&[1, 2, 3][..], &[9], &[1, 2, 3], &[1, 2, 3]] {
            builder.request(0.0, request.iter().copied());
        }
        let trace = builder.finish();
        // Three of the four requests are for pages 1 to 3, the second is for page 9. If all pages
        // fit, the requests have 0, 0, 3 and 3 hits: 6 of 10 pages.
        assert_eq!(files(&trace, 10, 0), 0.6);
        // If only three pages fit, page 9 evicts page 1, then page 1 evicts page 2, page 2 evicts
        // page 3, and page 3 evicts page 9: the third request has no hit, the fourth has three.
        assert_eq!(files(&trace, 3, 0), 0.3);
        assert_eq!(files(&trace, 10, 2), 1.0);
    }
}
