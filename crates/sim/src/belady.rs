//! The upper bound: the hits of an optimal policy.

use crate::Trace;
use crate::replay::{ReplayCounts, Sizes};
use ritornello_format::{Result, UNIT, units_of};
use std::collections::BinaryHeap;

/// Next use of a block that is never used again.
const NEVER: u32 = u32::MAX;

/// Replays `trace` through the optimal policy. After each request the policy keeps the blocks that
/// are used again soonest, among the stored blocks and the request's blocks. Blocks that are never
/// used again are not written.
///
/// No policy has more hits (Belady, "A study of replacement algorithms for a virtual-storage
/// computer", 1966; here a policy may skip the write of a block). A request that uses a block again
/// also uses the blocks before it. A block's next use is therefore no later than the next uses of
/// the blocks that follow it, and of blocks with the same next use, the block farthest from the
/// root is evicted first. So the blocks before a stored block are stored too, and every use of a
/// stored block is a hit. Unlike the store's policies, which cut runs, this policy evicts single
/// blocks. `progress` receives the position in the trace, in requests, every 1,024 requests and at
/// the end.
///
/// # Errors
/// `Invalid` if `sizes` cannot be simulated.
pub fn belady(trace: &Trace, sizes: &Sizes, progress: &mut dyn FnMut(u64)) -> Result<ReplayCounts> {
    sizes.check()?;
    let next = next_uses(trace);
    let counted_from = sizes.counted_from(trace);
    let page_bytes = units_of(sizes.block_bytes) * UNIT;
    // For each block, the request that uses the block next; `None` if the block is not stored.
    let mut due: Vec<Option<u32>> = vec![None; trace.footprint()];
    // Next use, depth in its prompt, and id of each stored block, the farthest next use first, then
    // the deepest block. An entry is stale if `due` has no next use for its block, or a different
    // next use.
    let mut farthest: BinaryHeap<(u32, u32, u32)> = BinaryHeap::new();
    let mut held = 0u64;
    let mut counts = ReplayCounts::default();
    for at in 0..trace.requests() {
        let span = trace.span(at);
        let blocks = trace.request(at);
        let hits = blocks.iter().take_while(|block| due[**block as usize].is_some()).count();
        if at >= counted_from {
            counts.references += blocks.len() as u64;
            counts.hits += hits as u64;
        }
        for ((depth, &block), &again) in (0..).zip(blocks).zip(&next[span]) {
            let stays = (again != NEVER).then_some(again);
            held += u64::from(stays.is_some());
            held -= u64::from(due[block as usize].is_some());
            due[block as usize] = stays;
            if stays.is_some() {
                farthest.push((again, depth, block));
            }
        }
        while held > sizes.capacity_blocks {
            let Some((when, _, block)) = farthest.pop() else { break };
            if due[block as usize] == Some(when) {
                due[block as usize] = None;
                held -= 1;
            }
        }
        let inserted = blocks[hits..].iter().filter(|block| due[**block as usize].is_some());
        let admitted = inserted.count() as u64;
        counts.admitted += admitted;
        counts.bytes_admitted += admitted * sizes.block_bytes;
        counts.bytes_written += admitted * page_bytes;
        if at % 1024 == 0 {
            progress(at as u64);
        }
    }
    progress(trace.requests() as u64);
    Ok(counts)
}

/// Returns, for every block reference of the trace, the next request that contains the same block,
/// or [`NEVER`].
fn next_uses(trace: &Trace) -> Vec<u32> {
    let mut next = vec![NEVER; trace.references()];
    let mut seen = vec![NEVER; trace.footprint()];
    for at in (0..trace.requests()).rev() {
        for (reference, &block) in trace.span(at).zip(trace.request(at)) {
            next[reference] = std::mem::replace(&mut seen[block as usize], at as u32);
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TraceBuilder;
    use crate::replay::replay;
    use proptest::prelude::*;
    use ritornello_store::eviction::PolicyKind;
    use std::collections::HashMap;

    /// Returns the maximum number of hits of request `at` and later requests if the blocks in the
    /// set `held` are stored. Tries every set of maximal size that can be kept after each request,
    /// even if a block's predecessor is missing in it.
    fn best(
        trace: &Trace,
        capacity: u32,
        at: usize,
        held: u32,
        known: &mut HashMap<(usize, u32), u32>,
    ) -> u32 {
        if at == trace.requests() {
            return 0;
        }
        if let Some(&hits) = known.get(&(at, held)) {
            return hits;
        }
        let blocks = trace.request(at);
        let hits = blocks.iter().take_while(|block| held >> **block & 1 == 1).count() as u32;
        let pool = blocks.iter().fold(held, |pool, block| pool | 1 << block);
        let most = (0..=pool)
            .filter(|kept| kept & !pool == 0)
            .filter(|kept| kept.count_ones() == capacity.min(pool.count_ones()))
            .map(|kept| best(trace, capacity, at + 1, kept, known))
            .max();
        let most = most.unwrap_or(0);
        known.insert((at, held), hits + most);
        hits + most
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn bound_is_optimal_and_lru_does_not_exceed_it(
            requests in prop::collection::vec(prop::collection::vec(0..2u64, 1..4), 1..9),
            capacity in 1..6u64,
        ) {
            let mut builder = TraceBuilder::new("t");
            requests.iter().for_each(|ids| builder.request(0.0, ids.iter().copied()));
            let trace = builder.finish();
            let sizes = Sizes { capacity_blocks: capacity, block_bytes: 64 << 20, warm_up: 0.0 };
            let bound = belady(&trace, &sizes, &mut |_| ()).unwrap();
            let optimum = best(&trace, capacity as u32, 0, 0, &mut HashMap::new());
            prop_assert_eq!(bound.hits, u64::from(optimum));
            let lru = replay(&trace, PolicyKind::Lru.build().as_mut(), &sizes, &mut |_| ()).unwrap();
            prop_assert!(lru.hits <= bound.hits);
        }
    }

    #[test]
    fn blocks_never_used_again_are_not_written() {
        let mut builder = TraceBuilder::new("t");
        for ids in [&[1, 2][..], &[3, 4], &[1, 2], &[5], &[1]] {
            builder.request(0.0, ids.iter().copied());
        }
        let sizes = Sizes { capacity_blocks: 2, block_bytes: 4096, warm_up: 0.0 };
        let counts = belady(&builder.finish(), &sizes, &mut |_| ()).unwrap();
        assert_eq!((counts.references, counts.hits, counts.admitted), (8, 3, 2));
        assert_eq!(counts.bytes_written, 2 * 4096);
    }
}
