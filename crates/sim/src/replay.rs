//! Replays a trace through an eviction policy with the calls that the store makes.

use crate::Trace;
use crate::sim_index::SimIndex;
use ritornello_format::{Error, Result, RunHeader, UNIT, units_of};
use ritornello_store::eviction::{Demand, Eviction, Resident};

/// Maximum payload of a run, as in a store on one volume.
const RUN_BYTES_MAX: u64 = 64 << 20;
/// Length of a key in a run's header: a SHA-256, as in vLLM.
const KEY_BYTES: usize = 32;

/// Sizes of a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Capacity in blocks. Run headers take no capacity.
    pub capacity_blocks: u64,
    /// Bytes per block.
    pub block_bytes: u64,
    /// Share of the requests, starting at the first, whose references and hits are not counted.
    pub warm_up: f64,
}

impl Sizes {
    /// Checks the sizes.
    ///
    /// # Errors
    /// `Invalid` if the sizes cannot be simulated.
    pub(crate) fn check(&self) -> Result<()> {
        if self.capacity_blocks == 0 {
            return Err(Error::invalid("the capacity must be at least one block"));
        }
        if self.block_bytes == 0 || units_of(self.block_bytes) > u64::from(u32::MAX) {
            return Err(Error::invalid("a block has at least a byte, and less than 16 TiB")
                .with("block_bytes", self.block_bytes));
        }
        if !(0.0..1.0).contains(&self.warm_up) {
            return Err(Error::invalid(
                "the warm-up is a share of the requests, from 0 to below 1",
            )
            .with("given", self.warm_up));
        }
        Ok(())
    }

    /// The first request whose hits are counted.
    pub(crate) fn counted_from(&self, trace: &Trace) -> usize {
        (trace.requests() as f64 * self.warm_up).ceil() as usize
    }
}

/// Counters of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    /// Block references after the warm-up.
    pub references: u64,
    /// References that were hits: the block and all blocks before it were stored.
    pub hits: u64,
    /// Blocks written in the whole replay.
    pub admitted: u64,
    /// Blocks that were not written in the whole replay, because the policy freed too little
    /// space for them, or for an earlier run of the same request.
    pub refused: u64,
    /// Bytes written for the admitted blocks: pages, padding, and run headers. In a result of
    /// Belady's bound there are no run headers.
    pub bytes_written: u64,
    /// Bytes of the blocks written, without padding and run headers.
    pub bytes_admitted: u64,
}

impl ReplayCounts {
    /// Hits per reference after the warm-up.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.references.max(1) as f64
    }

    /// Bytes written per byte admitted; 1 if no block was written.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        if self.bytes_admitted == 0 {
            return 1.0;
        }
        self.bytes_written as f64 / self.bytes_admitted as f64
    }
}

/// Replays `trace` through `policy`, which must be empty. `progress` receives the position in the
/// trace, in requests, every 1,024 requests and at the end.
///
/// A request reads its leading stored blocks and puts its missing blocks. The policy receives the
/// calls of [`Eviction`]: `hit` for the blocks read, `demanded` for all blocks, `victims` until the
/// missing blocks fit, `shrink` or `remove` for each victim, and `admit` for each new run. Runs are
/// formed as in a store on one volume. The runs that hold the request's leading stored blocks are
/// not evicted during the request. A run that finds no space is refused, and so are all later runs
/// of the request.
///
/// # Errors
/// `Invalid` if `sizes` cannot be simulated; `Fatal` if the policy violates its contract.
pub fn replay(
    trace: &Trace,
    policy: &mut dyn Eviction,
    sizes: &Sizes,
    progress: &mut dyn FnMut(u64),
) -> Result<ReplayCounts> {
    sizes.check()?;
    let page_units = units_of(sizes.block_bytes) as u32;
    let headers = header_units(sizes.block_bytes);
    let run_pages = headers.len() - 1;
    let counted_from = sizes.counted_from(trace);
    let mut index = SimIndex::new(trace);
    let mut free = sizes.capacity_blocks;
    let mut counts = ReplayCounts::default();
    let mut path = Vec::new();
    let keys = |blocks: &[u32]| blocks.iter().map(|block| trace.key(*block)).collect::<Vec<_>>();
    for at in 0..trace.requests() {
        let span = trace.span(at);
        let blocks = trace.request(at);
        let hits = index.walk(blocks, &mut path);
        if at >= counted_from {
            counts.references += blocks.len() as u64;
            counts.hits += hits as u64;
        }
        let (read, missing) = blocks.split_at(hits);
        if !read.is_empty() {
            policy.hit(&path);
            policy.demanded(Demand::Read, None, &mut keys(read).into_iter());
        }
        if !missing.is_empty() {
            let after = read.last().map(|block| trace.key(*block));
            policy.demanded(Demand::Write, after, &mut keys(missing).into_iter());
        }
        // As in the store, all runs of a put get space before the first of them is visible.
        let mut fit = 0;
        for run in missing.chunks(run_pages) {
            let wanted = run.len() as u64;
            if free < wanted {
                free += evict(policy, &mut index, wanted - free, page_units)?;
            }
            if free < wanted {
                break;
            }
            free -= wanted;
            fit += run.len();
        }
        counts.refused += (missing.len() - fit) as u64;
        for (number, run) in missing[..fit].chunks(run_pages).enumerate() {
            let first = hits + number * run_pages;
            let before = first.checked_sub(1).map(|before| blocks[before]);
            let pages = run.len() as u32;
            let (name, parent) = index.insert(span.start + first, pages, before);
            let header_units = headers[run.len()];
            policy.admit(&Resident {
                run: name,
                key: trace.key(run[0]),
                parent,
                pages,
                page_units,
                header_units,
            });
            let units = u64::from(header_units) + u64::from(page_units) * run.len() as u64;
            counts.bytes_written += units * UNIT;
            counts.bytes_admitted += sizes.block_bytes * run.len() as u64;
            counts.admitted += run.len() as u64;
        }
        if at % 1024 == 0 {
            progress(at as u64);
        }
    }
    progress(trace.requests() as u64);
    Ok(counts)
}

/// Evicts until at least `blocks` blocks are evicted, or the policy has no victims. Returns the
/// number of evicted blocks.
fn evict(
    policy: &mut dyn Eviction,
    index: &mut SimIndex<'_>,
    blocks: u64,
    page_units: u32,
) -> Result<u64> {
    let mut evicted = 0;
    while evicted < blocks {
        let victims = policy.victims((blocks - evicted) * u64::from(page_units), &*index);
        let before = evicted;
        for victim in &victims {
            let pages = index.cut(victim.run, victim.keep_pages)?;
            if pages > 0 && victim.keep_pages > 0 {
                policy.shrink(victim.run, pages);
            } else {
                policy.remove(victim.run);
            }
            evicted += u64::from(pages);
        }
        if evicted == before {
            break;
        }
    }
    Ok(evicted)
}

/// Length of a run's header in units, indexed by the run's number of pages, up to the longest run.
fn header_units(block_bytes: u64) -> Vec<u32> {
    let keys = |pages: u64| (0..pages).map(|_| KEY_BYTES);
    let by_size = (RUN_BYTES_MAX / block_bytes).clamp(1, 65_535);
    let pages = RunHeader::pages_that_fit(keys(by_size), 1).max(1) as u64;
    (0..=pages.min(by_size)).map(|pages| RunHeader::units(keys(pages), 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TraceBuilder;
    use ritornello_store::eviction::PolicyKind;

    fn sizes(capacity_blocks: u64, block_bytes: u64) -> Sizes {
        Sizes { capacity_blocks, block_bytes, warm_up: 0.0 }
    }

    fn trace_of(requests: &[&[u64]]) -> Trace {
        let mut builder = TraceBuilder::new("t");
        requests.iter().for_each(|ids| builder.request(0.0, ids.iter().copied()));
        builder.finish()
    }

    fn lru(trace: &Trace, sizes: Sizes) -> ReplayCounts {
        replay(trace, PolicyKind::Lru.build().as_mut(), &sizes, &mut |_| ()).unwrap()
    }

    #[test]
    fn hits_and_writes_match_manual_count() {
        // Pages of 64 MiB make every block a separate run, so that an eviction removes no more
        // blocks than needed.
        let trace = trace_of(&[&[1, 2, 3], &[1, 2, 4], &[5], &[1, 2, 3], &[1, 9, 3]]);
        // The requests change the stored blocks as follows: the first stores 1, 2 and 3; then 4
        // replaces 3; 5 replaces 4; 3 replaces 5; 9 replaces 3, and another block 3, which follows
        // 9, replaces 2.
        let counts = lru(&trace, sizes(3, 64 << 20));
        assert_eq!((counts.references, counts.hits), (13, 2 + 2 + 1));
        assert_eq!((counts.admitted, counts.refused), (3 + 1 + 1 + 1 + 2, 0));
        assert_eq!(counts.bytes_admitted, 8 * (64 << 20));
        assert_eq!(counts.bytes_written, 8 * ((64 << 20) + 4096));
        let whole = lru(&trace, sizes(100, 64 << 20));
        assert_eq!((whole.hits, whole.admitted), (2 + 3 + 1, 7));
    }

    #[test]
    fn protected_path_stays_and_new_runs_are_refused() {
        let trace = trace_of(&[&[1, 2], &[1, 2, 3, 4], &[1, 2]]);
        let counts = lru(&trace, sizes(2, 64 << 20));
        assert_eq!((counts.hits, counts.admitted, counts.refused), (4, 2, 2));
    }

    #[test]
    fn warm_up_hits_do_not_count() {
        let trace = trace_of(&[&[1, 2, 3], &[1, 2, 3], &[1, 2, 3], &[7]]);
        let mut given = sizes(3, 10_000);
        given.warm_up = 0.5;
        let counts = lru(&trace, given);
        assert_eq!((counts.references, counts.hits, counts.admitted), (4, 3, 4));
        // Each page takes three units, and the header of each run one unit.
        assert_eq!(counts.bytes_written, ((1 + 3 * 3) + (1 + 3)) * 4096);
        assert!(counts.write_amplification() > 1.2);
    }

    #[test]
    fn unusable_sizes_are_refused() {
        let trace = trace_of(&[&[1]]);
        for bad in [sizes(0, 4096), sizes(1, 0), sizes(1, u64::MAX)] {
            assert!(
                replay(&trace, PolicyKind::Lru.build().as_mut(), &bad, &mut |_| ()).is_err(),
                "{bad:?}"
            );
        }
        let late = Sizes { warm_up: 1.0, ..sizes(1, 4096) };
        assert!(replay(&trace, PolicyKind::Lru.build().as_mut(), &late, &mut |_| ()).is_err());
    }
}
