//! The index of a simulation: which blocks are stored, in which runs. Corresponds to the store's
//! index with a single scope.

use crate::Trace;
use ritornello_format::{Error, Result};
use ritornello_index::RunId;
use ritornello_store::eviction::{EvictionContext, Used};

/// The run number that stands for no run.
const NONE: u32 = u32::MAX;

/// The stored blocks.
///
/// Invariant: the predecessor of a stored block is stored (closure). [`SimIndex::cut`] refuses to
/// remove a block that precedes a stored block, which exposes a policy that does not evict leaves
/// first.
pub(crate) struct SimIndex<'t> {
    trace: &'t Trace,
    /// For every block: its run, or [`NONE`] if the block is not stored, and its page in the run.
    locations: Vec<(u32, u32)>,
    /// For every block: the number of runs whose first block directly follows it.
    children: Vec<u32>,
    /// Runs by number; numbers are not reused.
    runs: Vec<Run>,
    /// Number of calls of [`SimIndex::walk`].
    round: u64,
}

/// Consecutive blocks of one request.
struct Run {
    /// Index of the run's first block among the references of the trace.
    first: usize,
    pages: u32,
    /// Whether the run follows a stored block.
    has_parent: bool,
    /// The number (`round`) of the call of [`SimIndex::walk`] that last protected the run.
    protected_in: u64,
}

impl<'t> SimIndex<'t> {
    pub(crate) fn new(trace: &'t Trace) -> Self {
        let blocks = trace.footprint();
        Self {
            trace,
            locations: vec![(NONE, 0); blocks],
            children: vec![0; blocks],
            runs: Vec::new(),
            round: 0,
        }
    }

    /// Finds the leading blocks of `blocks` that are stored, and fills `path` with their runs.
    /// Until the next call exactly these runs are protected from eviction. Returns the number of
    /// these leading blocks.
    pub(crate) fn walk(&mut self, blocks: &[u32], path: &mut Vec<Used>) -> usize {
        self.round += 1;
        path.clear();
        let mut last = NONE;
        for (at, block) in blocks.iter().enumerate() {
            let (run, page) = self.locations[*block as usize];
            if run == NONE {
                return at;
            }
            if run == last
                && let Some(used) = path.last_mut()
            {
                used.pages = page + 1;
            } else {
                path.push(Used { run: RunId(u64::from(run)), pages: page + 1 });
                self.runs[run as usize].protected_in = self.round;
                last = run;
            }
        }
        blocks.len()
    }

    /// Inserts `pages` blocks, starting at reference `first` of the trace, as a run after the
    /// stored block `predecessor`. The blocks must not be stored yet. Returns the run, and the run
    /// and the page of the predecessor.
    pub(crate) fn insert(
        &mut self,
        first: usize,
        pages: u32,
        predecessor: Option<u32>,
    ) -> (RunId, Option<(RunId, u32)>) {
        // The cast loses no bits: the machine's memory does not hold 2^32 runs.
        let run = self.runs.len() as u32;
        self.runs.push(Run { first, pages, has_parent: predecessor.is_some(), protected_in: 0 });
        for (page, block) in (0..).zip(&self.trace.blocks()[first..first + pages as usize]) {
            self.locations[*block as usize] = (run, page);
        }
        let parent = predecessor.map(|block| {
            self.children[block as usize] += 1;
            let (run, page) = self.locations[block as usize];
            (RunId(u64::from(run)), page)
        });
        (RunId(u64::from(run)), parent)
    }

    /// Cuts a run to its first `keep` pages. Returns the number of removed pages.
    ///
    /// # Errors
    /// `Fatal` if a removed page is the parent of another run.
    pub(crate) fn cut(&mut self, run: RunId, keep: u32) -> Result<u32> {
        let Some(entry) = self.runs.get_mut(run.0 as usize) else { return Ok(0) };
        let Run { first, pages, has_parent, .. } = *entry;
        if pages <= keep {
            return Ok(0);
        }
        entry.pages = keep;
        let removed = first + keep as usize..first + pages as usize;
        for &block in &self.trace.blocks()[removed] {
            if self.children[block as usize] > 0 {
                return Err(Error::fatal(
                    "the policy cut a page that is the parent of a run: report this",
                )
                .with("run", run.0)
                .with("keep", keep));
            }
            self.locations[block as usize].0 = NONE;
        }
        if keep == 0 && has_parent {
            // The reference `first - 1` is the parent block, because the parent precedes the run in
            // the request that inserted the run.
            self.children[self.trace.blocks()[first - 1] as usize] -= 1;
        }
        Ok(pages - keep)
    }
}

impl EvictionContext for SimIndex<'_> {
    fn is_protected(&self, run: RunId) -> bool {
        self.runs.get(run.0 as usize).is_some_and(|run| run.protected_in == self.round)
    }

    fn page_key(&self, run: RunId, page: u32) -> u64 {
        let run = self.runs.get(run.0 as usize).filter(|run| page < run.pages);
        run.map_or(0, |run| self.trace.key(self.trace.blocks()[run.first + page as usize]))
    }
}
